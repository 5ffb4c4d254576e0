"""Tool calls: how models of different families are told of functions, and how they write calls of them.

A `ToolFormat` is data; which one a model has is decided by its chat template. `ToolParser` turns the text of an answer,
as it comes, into text and calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import choice as random_choice
from string import ascii_letters, digits
from typing import Any, NamedTuple

from powerinfer.errors import RequestError
from powerinfer.formats.grammar import JSON_OPTIONS, WHITESPACE, Grammar, LazyGrammar, check_depth, json_text, literal

MAX_TOOLS = 128
MAX_CALLS = 16  # of one answer, where a grammar says what is called
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Tool(NamedTuple):
    """A function that a model may call. parameters: JSON schema of its arguments; document: as the template gets it."""

    name: str
    parameters: dict[str, Any]
    document: dict[str, Any]


class ToolChoice(NamedTuple):
    """kind: "none", "auto", "required"; or "function": the one called `name`."""

    kind: str
    name: str = ""


@dataclass(frozen=True)
class ToolDelta:
    """A piece of call number `index`. The first piece has id and name; arguments: a piece of JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = str | ToolDelta
"""Text of the answer, or a piece of a call."""


# ------------------------------------------------------------------------------------------------------------- requests


def read_tools(document: Any) -> list[Tool]:
    """The functions of OpenAI's `tools`; RequestError for what is none."""
    if document is None:
        return []
    if not isinstance(document, list | tuple) or len(document) > MAX_TOOLS:
        raise RequestError(f"tools must be a list of at most {MAX_TOOLS} functions")
    check_depth(list(document), "tools")
    tools = [_tool(entry, f"tools[{at}]") for at, entry in enumerate(document)]
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("two tools have the same name")
    return tools


def _tool(entry: Any, where: str) -> Tool:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or entry.get("type") != "function":
        raise RequestError(f'{where} must be {{"type": "function", "function": {{...}}}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f"{where}.function.parameters must be the JSON schema of an object")
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{where}.function.description must be a text")
    json_text(parameters, f"{where}.function.parameters")
    given = {key: value for key, value in function.items() if key != "strict" and value is not None}
    document = {"type": "function", "function": {**given, "parameters": dict(parameters)}}
    return Tool(name, {**parameters, "type": "object"}, document)


def read_tool_choice(document: Any, tools: Sequence[Tool]) -> ToolChoice:
    """OpenAI's `tool_choice`; missing: "auto" if there are tools. RequestError for what is not supported."""
    if document is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(document, Mapping) and document.get("type") == "function":
        function = document.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in [tool.name for tool in tools]:
            raise RequestError(f"tool_choice names {str(name)[:64]!r}, which is not among the tools")
        return ToolChoice("function", str(name))
    if document not in ("none", "auto", "required"):
        raise RequestError('tool_choice must be "none", "auto", "required" or a function')
    if document == "required" and not tools:
        raise RequestError('tool_choice "required" needs tools')
    return ToolChoice(str(document) if tools else "none")


# -------------------------------------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls: `begin`, then an object (if `listed` a list of them), then `end`.

    begins: all texts that begin calls; a grammar asks for the first one. inner: before and after an object, between:
    between calls. bare: an answer that begins with the object of a call needs no text before it. argument_mark: a call
    is the function's name, this text, and the arguments. arguments: their key. told: how the model learns of the
    functions: from the template's variable `tools` ("template"), from a field of the system message ("system"), or in
    words of our own ("words"). short_ids: calls have ids of nine letters and digits. parallel: an answer may have
    several calls, which is a request's choice and not the family's.
    """

    name: str
    begins: tuple[str, ...]
    end: str = ""
    listed: bool = False
    bare: bool = False
    inner: str = ""
    between: str = ""
    argument_mark: str = ""
    arguments: str = "arguments"
    told: str = "template"
    short_ids: bool = False
    parallel: bool = True

    @classmethod
    def of(cls, template: str | None) -> ToolFormat:
        """The format of a model with this chat template. RequestError if the template has one that is not known."""
        source = template or ""
        for present, absent, found in _ROWS:
            if all(text in source for text in present) and not any(text in source for text in absent):
                return found
        if re.search(r"\btools\b", source):
            raise RequestError("this model's chat template has a format of tool calls that is not supported")
        return GENERIC

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and variables for the chat template, from the messages of a request.

        Arguments of earlier calls, JSON text in a request, become objects, as transformers passes them. RequestError
        for malformed calls.
        """
        plain = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
        _name_results(plain)
        documents = [tool.document for tool in tools]
        if self.short_ids:
            plain = [_with_short_ids(message) for message in plain]
        if self.told == "words":
            return _in_words(plain, documents), {}
        if self.told == "system" and documents:
            listed = json_text([document["function"] for document in documents], "tools")
            return _with_system(plain, "", {"tools": listed}), {}
        return plain, {"tools": documents} if documents else {}

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special: Mapping[str, int] | None = None,
        instead: Grammar | None = None,
    ) -> Grammar | None:
        """What an answer must match if it has to call: a certain function, or any; None: it may be text.

        special: ids of the special tokens by their text. instead: JSON that may be the answer instead of calls;
        RequestError if it is not a JSON schema.
        """
        if choice.kind not in ("required", "function"):
            return None
        named = [tool for tool in tools if choice.kind == "required" or tool.name == choice.name]
        begin = "" if self.bare else _mark(self.begins[0], special or {})
        calls = self._calls(begin, self.parallel and choice.kind == "required", special or {})
        if instead is None:
            return Grammar.lark("\n".join([f"start: {calls}", *self._objects(named, special or {})]))
        if instead.kind != "json_schema":
            raise RequestError("with tools that may be called, only JSON can be asked for beside them")
        answer = f"answer: %json {_with_options(json.loads(instead.text))}"
        return Grammar.lark("\n".join([f"start: {calls} | answer", answer, *self._objects(named, special or {})]))

    def call_grammar(self, tools: Sequence[Tool], special: Mapping[str, int] | None = None) -> Grammar:
        """What follows the position that `call_position` finds."""
        calls = self._calls("", self.parallel and self.listed, special or {})
        return Grammar.lark("\n".join([f"start: {calls}", *self._objects(tools, special or {})]))

    def lazy_grammar(self, tools: Sequence[Tool], special: Mapping[str, int] | None = None) -> LazyGrammar:
        """What the calls of an answer must match, where it may be text; if they are not parallel, it ends with one."""
        ends = None if self.parallel else self.call_end
        return LazyGrammar(self.call_grammar(tools, special), self.call_position, ends)

    def call_end(self) -> Callable[[str], bool]:
        """For one answer: given its text piece by piece, says whether its first call has ended."""
        parser = replace(self, parallel=False).parser()

        def ended(text: str) -> bool:
            parser.push(text)
            return parser.ended

        return ended

    def call_position(self, text: str, whole: bool) -> int | None:
        """Where in the text of an answer the first call goes on after its beginning; None: there is none so far.

        whole: the text begins where the answer does.
        """
        found = [at + len(mark) for mark in self.begins if (at := text.find(mark)) >= 0]
        if found:
            return min(found)
        return text.index("{") if self.bare and whole and _BARE.match(text) else None

    def parser(self, new_id: Callable[[], str] | None = None) -> ToolParser:
        """A parser for one answer. new_id: makes the ids of calls."""
        return ToolParser(self, new_id or (_short_id if self.short_ids else _long_id))

    def _calls(self, begin: str, parallel: bool, special: Mapping[str, int]) -> str:
        """The rule for one call or more."""
        end, more = _mark(self.end, special), f"{{0,{MAX_CALLS - 1}}}"
        if self.listed:
            inner = f'call ("," W? call){more}' if parallel else "call"
            return f'{begin} "[" W? {inner} W? "]" {end}'
        one = f"{begin} {_mark(self.inner, {})} call {_mark(self.inner, {})} {end}"
        return f"{one} ({_mark(self.between, {})} {one}){more}" if parallel else one

    def _objects(self, tools: Sequence[Tool], special: Mapping[str, int]) -> list[str]:
        """The rules for `call`, a function's name with its arguments."""
        rules = [f"W: /{WHITESPACE}/", "call: " + " | ".join(f"call_{at}" for at in range(len(tools)))]
        for at, tool in enumerate(tools):
            schema = _with_options(tool.parameters)
            name, key = literal(json.dumps(tool.name)), literal(json.dumps(self.arguments))
            if self.argument_mark:
                call = f"{literal(tool.name)} {_mark(self.argument_mark, special)} arguments_{at}"
            else:
                start = f'"{{" W? "\\"name\\"" W? ":" W? {name} W? "," W? {key} W? ":" W?'
                call = f'{start} arguments_{at} W? "}}"'
            rules += [f"call_{at}: {call}", f"arguments_{at}: %json {schema}"]
        return rules


_BARE = re.compile(r'\s*\{\s*"name"\s*:\s*"')

_TAGGED: dict[str, Any] = {"begins": ("<tool_call>",), "end": "</tool_call>", "inner": "\n", "between": "\n"}
HERMES = ToolFormat("hermes", **_TAGGED)
GENERIC = ToolFormat("generic", told="words", **_TAGGED)
LLAMA = ToolFormat("llama3", ("<|python_tag|>",), bare=True, between="; ", arguments="parameters")
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), listed=True, short_ids=True)
MISTRAL_NAMED = ToolFormat("mistral-args", ("[TOOL_CALLS]",), argument_mark="[ARGS]", short_ids=True)
PHI4_MINI = ToolFormat("phi4-mini", ("<|tool_call|>", "functools["), "<|/tool_call|>", listed=True, told="system")

_ROWS: tuple[tuple[tuple[str, ...], tuple[str, ...], ToolFormat], ...] = (
    # texts in a template, texts not in it
    (("<tool_call>", "tools"), ("<function=", "<arg_key>"), HERMES),  # Qwen 2.5 and 3, Hermes
    (("[TOOL_CALLS]", "[ARGS]"), (), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), (), MISTRAL),
    (("<|python_tag|>", "tools"), (), LLAMA),
    (('"parameters": dictionary of argument name', "tools"), (), LLAMA),
    (("<|tool|>", "message['tools']"), (), PHI4_MINI),
)


def _with_options(schema: Mapping[str, Any]) -> str:
    """A schema as part of a Lark grammar, which has llguidance's options in it."""
    return json_text({**schema, "x-guidance": JSON_OPTIONS}, "the schema")


def _mark(text: str, special: Mapping[str, int]) -> str:
    """A text of a format in a Lark grammar: the token, if it is a special one."""
    return f"<[{special[text]}]>" if text in special else literal(text) if text else ""


def _long_id() -> str:
    return "call_" + _letters(24)


def _short_id() -> str:
    return _letters(9)


def _letters(count: int) -> str:
    return "".join(random_choice(ascii_letters + digits) for _ in range(count))


# ------------------------------------------------------------------------------------------------------- conversations


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as transformers takes it."""
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    if plain.get("content") is None:
        plain["content"] = ""
    calls = plain.pop("tool_calls", None)
    if not calls:
        return plain
    if not isinstance(calls, list | tuple) or message.get("role") != "assistant":
        raise RequestError(f"{where}.tool_calls must be a list, in a message of the assistant")
    plain["tool_calls"] = [_earlier_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return plain


def _earlier_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where}.function.arguments is not valid JSON") from None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments must be an object")
    plain: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    if isinstance(call.get("id"), str):
        plain["id"] = call["id"]
    return plain


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Give each result the name of its function, which some templates show."""
    names: dict[Any, str] = {}
    for message in messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls", ())}
        if message.get("role") == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of nine letters and digits, the same for a call and its result."""
    changed = dict(message)
    if isinstance(changed.get("tool_call_id"), str):
        changed["tool_call_id"] = _shortened(changed["tool_call_id"])
    if "tool_calls" in changed:
        changed["tool_calls"] = [{**call, "id": _shortened(call.get("id", ""))} for call in changed["tool_calls"]]
    return changed


def _shortened(given: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", given):
        return given
    from hashlib import sha256

    return sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


_PROMPT = """You may call functions. These are the functions, as JSON:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object with its name and its arguments, between these tags:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>"""


def _in_words(messages: list[dict[str, Any]], documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template without tools: they are in the system message, and results are the user's.

    Messages of one side that follow each other are one, for templates that demand turns.
    """
    turned: list[dict[str, Any]] = []
    for message in messages:
        turn = _turn(message)
        if turned and turn["role"] == turned[-1]["role"] != "system":
            turned[-1] = {**turned[-1], "content": f"{turned[-1]['content']}\n{turn['content']}"}
        else:
            turned.append(turn)
    if not documents:
        return turned
    tools = "\n".join(json_text(document, "tools") for document in documents)
    return _with_system(turned, _PROMPT.format(tools=tools), {})


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        json_text({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, "tool_calls")
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return {"role": "assistant", "content": f"{message['content']}\n{text}" if message["content"] else text}


def _with_system(messages: list[dict[str, Any]], text: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages with a text at the end of the system message, a new one if there is none, and fields in it."""
    if messages and messages[0].get("role") == "system" and isinstance(messages[0]["content"], str):
        first, rest = messages[0], messages[1:]
    else:
        first, rest = {"role": "system", "content": ""}, messages
    content = "\n\n".join(part for part in (first["content"], text) if part)
    return [{**first, "content": content, **fields}, *rest]


# --------------------------------------------------------------------------------------------------------------- parser


class ToolParser:
    """Turns the text of an answer into text and calls, piece by piece, whatever the pieces.

    White space beside calls is dropped. What begins like a call but has no function's name stays text. If calls are not
    parallel, the answer ends with the first one, complete or broken; what follows it is dropped.
    """

    def __init__(self, form: ToolFormat, new_id: Callable[[], str]) -> None:
        self._form, self._new_id = form, new_id
        self._text = ""  # not decided yet
        self._raw = ""  # the beginning of calls, and ...
        self._seen = ""  # ... of a call, until its name is known: text, if it is no call after all
        self._step = self._in_text
        self._call = _Call(form)
        self._spoken = False  # there was text
        self._last = False
        self._deltas: list[Delta] = []
        self.calls = 0  # with a name, so far
        self.ended = False  # after the only call

    def push(self, text: str) -> list[Delta]:
        """What is certain after this piece of the answer."""
        self._text += text
        while self._step():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """The rest: no text follows. A call that was cut off stays incomplete."""
        self._last = True
        return self.push("")

    # A step uses some of the text; False: it waits for more.

    def _in_text(self) -> bool:
        form, text = self._form, self._text
        lead = text[: len(text) - len(text.lstrip())]
        if form.bare and not self._spoken and not self.calls and text[len(lead) :].startswith("{"):
            return self._open(0, len(lead))
        found = [(at, at + len(mark)) for mark in form.begins if (at := text.find(mark)) >= 0]
        if found:
            return self._open(*min(found))
        held = 0 if self._last else max(_overlap(text, mark) for mark in form.begins)
        say = text[: len(text) - held].rstrip()
        if self._last and not self.calls:
            say = text
        self._say(say)
        self._text = "" if self._last else text[len(say) :]
        return False

    def _open(self, begin: int, end: int) -> bool:
        """The text before `begin` is certain; between `begin` and `end` is the beginning of calls."""
        before = self._text[:begin].rstrip()
        self._say(before)
        self._raw, self._text = self._text[len(before) : end], self._text[end:]
        self._seen, self._step = "", self._before_call
        return True

    def _before_call(self) -> bool:
        """Between the beginning and a call."""
        rest = self._text.lstrip(" \t\r\n[" if self._form.listed else " \t\r\n")
        if not rest and not self._last:
            return False
        if not (rest.startswith("{") or (self._form.argument_mark and rest)):
            return self._no_call()
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text, self._call, self._step = rest, _Call(self._form), self._in_call
        return True

    def _in_call(self) -> bool:
        call, text = self._call, self._text
        known, self._text = call.name is not None, ""
        call.push(text)
        if call.name is None:
            self._seen += text
            return self._no_call() if call.failed or self._last else False
        if not known:
            self._deltas.append(ToolDelta(self.calls, self._new_id(), call.name, ""))
            self.calls += 1
        if arguments := call.take():
            self._deltas.append(ToolDelta(self.calls - 1, None, None, arguments))
        if not (call.ended or call.failed):
            return False
        if not self._form.parallel:
            self.ended, self._step = True, self._at_end
            return True
        self._text, self._step = call.rest, self._after_call if call.ended else self._in_text
        return True

    def _at_end(self) -> bool:
        self._text = ""
        return False

    def _no_call(self) -> bool:
        """The beginning was none: it is text, and so is what follows, unless a call begins in it."""
        self._say(self._raw)
        self._spoken = True
        self._raw, self._text, self._seen, self._step = "", self._seen + self._text, "", self._in_text
        return True

    def _after_call(self) -> bool:
        end, more = self._form.end, self._form.listed or self._form.bare
        rest = self._text.lstrip(" \t\r\n,;]" if more else " \t\r\n")
        if more and rest.startswith("{"):
            self._raw, self._seen, self._text, self._step = "", "", rest, self._before_call
        elif end and rest.startswith(end):
            self._text, self._step = rest[len(end) :], self._in_text
        elif not self._last and end.startswith(rest):
            return False
        else:
            self._text, self._step = rest, self._in_text
        return True

    def _say(self, text: str) -> None:
        if text:
            self._spoken = self._spoken or not text.isspace()
            self._deltas.append(text)


_KEY = re.compile(r'\s*,?\s*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)')
_PART_OF_KEY = re.compile(r'\s*,?\s*(?:"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*)?)?)?')
_CLOSED = re.compile(r"\s*\}")
_KEYS = frozenset(("name", "arguments", "parameters", "id", "type"))
_MAX_KEY = 256  # characters, white space included


class _Call:
    """Reads one call as it comes: {"name": ..., "arguments": {...}}, with its keys in any order, or NAME[ARGS]{...}.

    name: once it is known; ended: the call is complete; failed: it is none, or broken. rest: what follows it.
    """

    def __init__(self, form: ToolFormat) -> None:
        self.name: str | None = None
        self.ended = self.failed = False
        self._mark = form.argument_mark
        self._text = ""  # not used yet
        self._key: str | None = None
        self._value = _Value()
        self._pieces: list[str] = []  # of the arguments
        self._has_arguments = False
        self._step = self._in_name if self._mark else self._at_brace

    @property
    def rest(self) -> str:
        return self._text

    def push(self, text: str) -> None:
        self._text += text
        while not (self.ended or self.failed) and self._step():
            pass

    def take(self) -> str:
        """The arguments since the last time."""
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)

    def _at_brace(self) -> bool:
        self._text, self._step = self._text[1:], self._at_key
        return True

    def _in_name(self) -> bool:
        name, mark, rest = self._text.partition(self._mark)
        if mark:
            self.failed = _NAME.fullmatch(name) is None
            self.name = None if self.failed else name
            self._text, self._key, self._step = rest.lstrip(), "arguments", self._at_value
            return not self.failed
        head = name[: len(name) - _overlap(name, self._mark)]
        self.failed = bool(head) and _NAME.fullmatch(head) is None
        return False

    def _at_key(self) -> bool:
        text = self._text
        found = _KEY.match(text) or _CLOSED.match(text)
        if found is None or found.end() > _MAX_KEY:
            self.failed = len(text) > _MAX_KEY or _PART_OF_KEY.fullmatch(text) is None
            return False
        self._text = text[found.end() :]
        if found.re is _CLOSED:
            self._end()
            return False
        try:
            self._key = json.loads(found[1], strict=False)
        except ValueError:
            self._key = ""
        self.failed = self.name is None and self._key not in _KEYS
        self._step = self._at_value
        return True

    def _at_value(self) -> bool:
        """The value begins."""
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._value = _Value()
        arguments = self._key in ("arguments", "parameters") and not self._has_arguments
        self._has_arguments = self._has_arguments or arguments
        self._step = self._in_arguments if arguments and self._text.startswith("{") else self._in_value
        self._collected: list[str] = []
        self._wanted = arguments or (self._key == "name" and self.name is None)
        return True

    def _in_arguments(self) -> bool:
        piece, complete = self._next_piece()
        self._pieces.append(piece)
        return complete and self._value_ends()

    def _in_value(self) -> bool:
        """A value that counts only as a whole."""
        piece, complete = self._next_piece()
        if self._wanted:
            self._collected.append(piece)
        if not complete:
            return False
        if self._wanted:
            self._use("".join(self._collected))
        return not self.failed and self._value_ends()

    def _use(self, text: str) -> None:
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            self.failed = True
            return
        if self._key == "name":
            self.failed = not (isinstance(value, str) and value)
            self.name = None if self.failed else value
        elif isinstance(value, str):  # arguments as JSON text
            self._pieces.append(value)
        else:
            self.failed = value is not None
            self._has_arguments = False

    def _next_piece(self) -> tuple[str, bool]:
        end = self._value.end(self._text)
        piece = self._text if end is None else self._text[:end]
        self._text = self._text[len(piece) :]
        return piece, end is not None

    def _value_ends(self) -> bool:
        self._step = self._at_key
        if self._mark:
            self._end()
        return not self._mark

    def _end(self) -> None:
        self.ended, self.failed = self.name is not None, self.name is None
        if not self._has_arguments:
            self._pieces.append("{}")


class _Value:
    """Finds the end of a JSON value in pieces of text."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escape = False

    def end(self, text: str) -> int | None:
        """The position after the value; None: it goes on."""
        for at, char in enumerate(text):
            if self._escape:
                self._escape = False
            elif self._string:
                self._escape = char == "\\"
                self._string = char != '"'
                if not self._string and not self._depth:
                    return at + 1
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + (self._depth == 0)
            elif not self._depth and (char == "," or char.isspace()):
                return at
        return None


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with, and is longer than."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
