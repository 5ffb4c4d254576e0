"""Chat templates: messages to the prompt that the model was trained on.

A special token inside a message's content is plain text: it must not end or start a turn. Such tokens are enclosed in
two marker characters before the template sees them, and the markers are removed from the rendered text, which
distinguishes tokens of the template from those of messages. The prompt is what the template writes without them.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from powerinfer.errors import ModelError, RequestError, single_line
from powerinfer.formats.windows import WINDOW, find

if TYPE_CHECKING:
    from powerinfer.text.tokenizer import Tokenizer

_M = TypeVar("_M", bound=Mapping[str, Any])

MAX_DEPTH = 64

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The roles of OpenAI's messages, and what the template gets."""

NO_TEMPLATE = "this model has no chat template: use a plain prompt (--raw)"

NEXT_TURN = "\nUser:"
"""Line behind an answer in the format of `plain_template`, with which a model invents the user's next turn."""

_PLAIN = """{% for message in messages %}\
{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}\
{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] | trim + '\n' }}\
{% else %}{{ 'Assistant: ' + message['content'] | trim + '\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}Assistant:{% endif %}"""


class ChatTemplate:
    """A model's chat template, in Jinja. `bos`, `eos`: its bos_token and eos_token. `now`: the time that it is told,
    as ISO text; "": the clock's. `tool_use`: the source for chats with tools, where the model has one of its own for
    them. `variables`: those that it is given where nothing else is said."""

    def __init__(self, source: str, bos: str = "", eos: str = "", now: str = "", tool_use: str | None = None) -> None:
        self.source, self.bos, self.eos, self.now, self.tool_use = source, bos, eos, now, tool_use
        self.variables: Mapping[str, Any] = {}

    def with_time(self, now: str) -> ChatTemplate:
        """The same at another time: some templates write the date."""
        return self._with(now=now)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The same with other variables where nothing else is said."""
        return self._with(variables=variables)

    def _with(self, **changed: Any) -> ChatTemplate:
        other = copy(self)
        vars(other).update(changed)
        return other

    @property
    def tool_template(self) -> ChatTemplate:
        """The template for chats with tools."""
        return self if self.tool_use is None else self._with(source=self.tool_use, tool_use=None)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Sequence[str] = (),
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The prompt for `messages`, [{"role": ..., "content": ...}, ...], and its spans that are plain text.

        special_tokens: their texts. A span is [start, end) in characters: no special token may be seen in it; spans are
        in order. add_generation_prompt: end with the start of the assistant's answer. options: other variables of the
        template, such as `tools`. RequestError: the template rejects these messages. ModelError: it is broken or takes
        too much time or memory.
        """
        if not messages:
            raise RequestError("a chat needs at least one message")
        if self.tool_use is not None and options.get("tools"):
            return self.tool_template.render(messages, special_tokens, add_generation_prompt, **options)
        shown = [_with_thought(message, self.source) for message in messages]
        variables = _plain_data({**self.variables, **options, "messages": shown})
        roles = self._roles_with_parts()
        if roles:
            from powerinfer.text.content_shapes import shaped

            variables["messages"] = [shaped(message, roles) for message in variables["messages"]]
        text = self._text(variables, add_generation_prompt)
        marks = _Marks.choose(variables, self.source, special_tokens)
        if marks is None:
            return text, []
        marked, spans = marks.take(self._text(marks.put(variables), add_generation_prompt))
        if marked == text:
            return text, spans
        from powerinfer.text.spans import carried_over

        in_contents = marks.tokens.fullmatch
        return text, carried_over(marked, spans, text, special_tokens, lambda token: bool(in_contents(token)))

    def _text(self, variables: dict[str, Any], add_generation_prompt: bool) -> str:
        text = _written_out(self.source, variables["messages"], add_generation_prompt)
        if text is not None:
            return text
        tokens = {name: text for name, text in (("bos_token", self.bos), ("eos_token", self.eos)) if text}
        names = {**tokens, "tools": None, "documents": None}
        return self._run({**names, **variables, "add_generation_prompt": add_generation_prompt})

    def _roles_with_parts(self) -> frozenset[str]:
        """The roles whose contents the template reads as lists of parts."""
        if self.source.replace("\\n", "\n") in _WRITTEN_OUT:
            return frozenset()
        from powerinfer.text.content_shapes import roles_with_parts

        return roles_with_parts(self.source, self.bos, self.eos)

    def prepare(self) -> None:
        """Import Jinja and compile the template now, in any thread, so that the first `render` need not."""
        if self.source.replace("\\n", "\n") not in _WRITTEN_OUT:
            from powerinfer.text import sandbox

            with contextlib.suppress(sandbox.Failed, sandbox.TemplateLimit):  # the rendering says it
                sandbox.render(self.source, None)
                self._roles_with_parts()

    def _run(self, variables: dict[str, Any]) -> str:
        from powerinfer.text import sandbox

        try:
            return sandbox.render(self.source, variables, self.now)
        except sandbox.TemplateRefused as error:
            raise RequestError(f"the chat template does not take these messages: {single_line(error)}") from error
        except sandbox.Failed as error:
            raise ModelError(f"the model's chat template fails: {single_line(error)}; --raw goes without it") from error
        except sandbox.TemplateLimit as error:
            reason = single_line(error)
            raise ModelError(f"the model's chat template is refused: {reason}; --raw goes without it") from error


# Jinja takes 30 ms to import and to compile a template, a sixth of a short answer's time to first token. Templates with
# exactly these sources are ChatML and need no Jinja: source -> default system prompt. Some files have \n instead of a
# line break inside strings, which is equivalent.
_CHATML = (
    "{% for message in messages %}%s"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_WRITTEN_OUT = {
    _CHATML.replace("%s", ""): None,
    _CHATML.replace(
        "%s",
        "{% if loop.first and messages[0]['role'] != 'system' %}"
        f"{{{{ '<|im_start|>system\n{_SMOLLM2_SYSTEM}<|im_end|>\n' }}}}{{% endif %}}",
    ): _SMOLLM2_SYSTEM,
}


def _written_out(source: str, messages: list[Any], add_prompt: bool) -> str | None:
    """The output of a template in `_WRITTEN_OUT`; None for every other, and for messages that are not plain text."""
    template = source.replace("\\n", "\n")
    if template not in _WRITTEN_OUT:
        return None
    if not all(isinstance(entry, dict) for entry in messages):
        return None
    turns = [(entry.get("role"), entry.get("content")) for entry in messages]
    if not all(isinstance(role, str) and isinstance(content, str) for role, content in turns):
        return None
    system = _WRITTEN_OUT[template]
    if system is not None and turns[0][0] != "system":
        turns.insert(0, ("system", system))
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return text + "<|im_start|>assistant\n" if add_prompt else text


_THOUGHT = ("reasoning_content", "thinking", "reasoning")
"""Names of the thought before an answer, in messages and in templates."""

_THOUGHT_PART = re.compile(r"""type['"]?\]?\s*==\s*['"]thinking['"]""")


def _with_thought(message: Any, source: str) -> Any:
    """A message with its thought under the names that templates read, as transformers does for the first two; as a part
    of the content for those that read it there alone."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return message
    thought = next((message[name] for name in _THOUGHT if message.get(name) is not None), None)
    if not isinstance(thought, str):
        return message
    in_parts = "reasoning_content" not in source and _THOUGHT_PART.search(source) is not None
    if thought and in_parts and isinstance(message.get("content"), str):
        text = [{"type": "text", "text": message["content"]}] * bool(message["content"])
        return {**message, "content": [{"type": "thinking", "thinking": thought}, *text]}
    names = _THOUGHT[:2] if any(name in source for name in _THOUGHT[:2]) else _THOUGHT
    return {**dict.fromkeys(names, thought), **{name: value for name, value in message.items() if value is not None}}


def plain_template(tokenizer: Tokenizer) -> ChatTemplate:
    """A template for models that were trained on none: turns are "User: ..." and "Assistant: ...", one a line.

    An answer should end at `NEXT_TURN`.
    """
    bos = tokenizer.literal_text(tokenizer.bos_id) if tokenizer.add_bos else ""
    return ChatTemplate("{{ bos_token }}" + _PLAIN if bos else _PLAIN, bos)


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that came with a tokenizer; None when it came without."""
    templates = tokenizer.vocabulary.chat_templates
    if "default" not in templates:
        return None
    bos, eos = tokenizer.literal_text(tokenizer.bos_id), tokenizer.literal_text(tokenizer.eos_id)
    return ChatTemplate(templates["default"], bos, eos, tool_use=templates.get("tool_use"))


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **options: Any,
) -> list[int]:
    """Token ids of the prompt for `messages`; arguments and errors as in `ChatTemplate.render`.

    The template writes the beginning-of-sequence token if the model needs one; none is added.
    """
    text, plain = template.render(messages, tokenizer.special_tokens, add_generation_prompt, **options)
    return tokenizer.encode_masked(text, plain, add_bos=False)


class MessageError(RequestError):
    """A message that cannot be taken. where: the field that is wrong; unsupported: it is valid, but not here."""

    def __init__(self, path: str, problem: str, unsupported: bool = False) -> None:
        super().__init__(f"{path} {problem}")
        self.path, self.unsupported = path, unsupported


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as templates take them: contents are texts; parts of text are joined by line breaks.

    MessageError for an unknown role, a content that is missing, and parts that are no text, such as images.
    """
    return [_plain_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(path, f'must be {{"role": ..., "content": ...}}, not {type(message).__name__}')
    role, content = message.get("role"), message.get("content")
    if role == "function":
        raise MessageError(f"{path}.role 'function'", "is not supported: use tool", True)
    if not isinstance(role, str) or role not in ROLES:
        shown = "it is missing" if role is None else f"not {str(role)[:64]!r}"
        raise MessageError(f"{path}.role", f"must be one of {', '.join(ROLES)}; {shown}")
    if content is None and message.get("tool_calls"):
        content = ""
    if content is None:
        raise MessageError(f"{path}.content", "is missing")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_text_of(part, f"{path}.content[{at}]") for at, part in enumerate(content))
    elif not isinstance(content, str):
        raise MessageError(f"{path}.content", f"must be a text or a list of parts, not {type(content).__name__}")
    return {**message, "role": ROLES[role], "content": content}


def _text_of(part: Any, path: str) -> str:
    if not isinstance(part, Mapping):
        raise MessageError(path, f'must be {{"type": "text", "text": ...}}, not {type(part).__name__}')
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise MessageError(f"{path}.type {str(kind)[:64]!r}", "is not supported: this model takes text", True)
    if not isinstance(text, str):
        raise MessageError(f"{path}.text", "is missing")
    return text


def drop_oldest(
    messages: Sequence[_M], encode: Callable[[Sequence[_M]], list[int]], limit: int
) -> tuple[list[_M], list[int], int]:
    """The messages without the fewest oldest turns for a prompt of up to `limit` tokens, the prompt, how many turns.

    A turn is a message of the user and all up to the next one. The system's messages at the beginning stay, and so does
    the last turn, even if the prompt is longer then. encode: messages to tokens.
    """
    first = next((at for at, one in enumerate(messages) if one.get("role") != "system"), len(messages))
    starts = [at for at in range(first, len(messages)) if at == first or messages[at].get("role") == "user"]
    prompts: dict[int, list[int]] = {}

    def rest_after(turns: int) -> list[_M]:
        return [*messages[:first], *messages[starts[turns] :]] if turns else list(messages)

    def fits(turns: int) -> bool:
        prompts[turns] = encode(rest_after(turns))
        return len(prompts[turns]) <= limit

    last = max(0, len(starts) - 1)
    turns = 0 if fits(0) else min(last, 1 + bisect_left(range(1, last), True, key=fits))
    if turns not in prompts:
        fits(turns)
    return rest_after(turns), prompts[turns], turns


@dataclass(frozen=True)
class _Marks:
    """Two characters that occur nowhere else, and what to put them around."""

    opening: str
    closing: str
    tokens: re.Pattern[str]
    longest: int  # characters of a token
    parts: tuple[str, ...]  # beginnings of tokens, where a string ends

    @classmethod
    def choose(cls, variables: Any, source: str, special: Sequence[str]) -> _Marks | None:
        """None when no string in `given` has a special token in it, or ends with the beginning of one."""
        present = [text for text in special if text]
        texts = list(_strings(variables))
        tokens = [token for token in present if any(token in text for text in texts)]
        # Two adjacent strings of a template must not form a token across their boundary.
        starts = {token[:cut] for token in present for cut in range(1, len(token))}
        tails = [text.rstrip()[-max(map(len, present), default=1) :] for text in texts]
        ends = {tail[cut:] for tail in tails for cut in range(len(tail))}
        parts = sorted(starts & ends, key=len, reverse=True)
        if not tokens and not parts:
            return None
        pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)"
        opening, closing = cls._free_characters(source, texts)
        return cls(opening, closing, re.compile(pattern), max(map(len, tokens), default=0), tuple(parts))

    @staticmethod
    def _free_characters(source: str, texts: Sequence[str]) -> tuple[str, str]:
        """Two private-use characters that none of these has."""
        used = set(source)
        for text in texts:
            for at in range(0, 0 if text.isascii() else len(text), WINDOW):
                used.update(text[at : at + WINDOW])
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
        opening, closing = next(free, ""), next(free, "")
        if not closing:
            raise RequestError("the messages use every private-use character of Unicode")
        return opening, closing

    def put(self, value: Any) -> Any:
        """`value` with the tokens in all its strings enclosed; keys of dicts stay."""
        if isinstance(value, str):
            return self._enclosed(value)
        if isinstance(value, dict):
            return {key: self.put(entry) for key, entry in value.items()}
        return [self.put(entry) for entry in value] if isinstance(value, list) else value

    def _enclosed(self, text: str) -> str:
        pieces: list[str] = []
        done = 0
        while match := find(self.tokens, text, done, self.longest):
            pieces += [text[done : match.start()], self.opening, match[0], self.closing]
            done = match.end()
        rest = text[done:]
        end = len(rest.rstrip())
        begin = next((end - len(part) for part in self.parts if rest.endswith(part, 0, end)), end)
        if begin < end:
            rest = f"{rest[:begin]}{self.opening}{rest[begin:end]}{self.closing}{rest[end:]}"
        return "".join([*pieces, rest])

    def take(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text without markers and the spans they enclosed; one that lost its partner is a span of length 0."""
        # A template that writes ASCII JSON escapes the markers.
        for mark in (self.opening, self.closing):
            text = text.replace(f"\\u{ord(mark):04x}", mark)
        spans: list[tuple[int, int]] = []
        parts: list[str] = []
        at, done, begin = 0, 0, None
        marks = re.compile(f"[{self.opening}{self.closing}]")
        while match := find(marks, text, done, 1):
            parts.append(text[done : match.start()])
            at += match.start() - done
            done = match.end()
            if match[0] == self.closing:
                spans.append((at if begin is None else begin, at))
                begin = None
            else:
                if begin is not None:
                    spans.append((begin, begin))
                begin = at
        if begin is not None:
            spans.append((begin, begin))
        return "".join([*parts, text[done:]]), spans


def _plain_data(value: Any, depth: int = 0) -> Any:
    """A copy of `value` in strings, numbers, lists and dicts with string keys; RequestError for anything else."""
    if depth > MAX_DEPTH:
        raise RequestError(f"the messages are nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        from powerinfer.text.tokenizer import valid_unicode

        return valid_unicode(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain_data(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_data(entry, depth + 1) for entry in value]
    raise RequestError(f"a message may hold text, numbers, lists and objects, not {type(value).__name__}")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _strings(entry)
