"""Tool calls: how models of different families are told of functions, and how they write calls of them.

A `ToolFormat` describes a dialect: it is data. `dialect_reading.py` reads it off a chat template. From it come the
spelling of a conversation as the template takes it (`tool_messages.py`), the grammar of calls (`call_grammar.py`), and
the reading of answers (`tool_parser.py`). The functions are those of a request (`tools.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from secrets import choice as random_choice
from string import ascii_letters, digits
from typing import Any

from powerinfer.errors import RequestError
from powerinfer.text import harmony, tool_messages
from powerinfer.text.call_grammar import CallRules, with_options
from powerinfer.text.call_writing import written
from powerinfer.text.grammar import Grammar, LazyGrammar, json_text, literal
from powerinfer.text.marks import HOLE
from powerinfer.text.tool_parser import AnswerParser, ToolParser
from powerinfer.text.tools import Tool, ToolChoice


@dataclass(frozen=True)
class ToolFormat:
    """A dialect: `section`, calls with `between` between them, `end`; in a list of JSON if they are `listed`.

    A call is `call_begin`, its body, `call_end`. body: "object", {"name": ..., "arguments": ...}; or the function's
    name, `name_end`, and the arguments: as an object ("json"), in Python ("keywords"), or each as `key_begin`, key,
    `key_end`, value, `value_end` ("tagged"). `HOLE` in a mark stands for a word, such as an id.

    name_key, arguments_key, id_key: of an object; id_first: the id precedes the name; named_by_key: it is {NAME:
    arguments}. name_begin: precedes the name, and may be missing. type_words: the words by which a tagged value's type
    is told in `key_end`; first the one of text. value_marks: around a text that has marks or line breaks in it.
    nested: the mark before the tags of objects' keys and lists' items, in values; `HOLE` in `value_end` is the key
    then. literals: values that are no text are Python's literals. quote: a mark around strings.

    also: other texts that begin calls. begun_by: the mark by which calls are known, if not the first line of theirs.
    bare: an answer that begins with the object of a call needs no text before it. dropped: texts that are no part of
    the answer. prompt_end: the end of the prompt that belongs to the answer.

    announced_in: where the model learns of the functions: in the template's variable `announced_as` ("template"), in it
    as JSON text ("text"), in a field of the system message ("system"), or in words of our own ("words").
    whole_documents: with every field that a function may have. clock: the variable for the time. history: how earlier
    calls are given to the template: in its own way ("template"), or as text ("words", with results as the user's;
    "text", with messages of results). text_arguments: arguments are JSON text; no_content: a message with calls has no
    content; single: it has one call; short_ids: ids have nine letters and digits; named_ids: they are
    functions.NAME:NUMBER. no_system: the template takes no system message.

    Of a request: parallel: an answer may have several calls; required: it is nothing but calls; tools: the functions.
    """

    name: str
    section: str = ""
    call_begin: str = ""
    call_end: str = ""
    between: str = ""
    end: str = ""
    listed: bool = False
    body: str = "object"
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    id_first: bool = False
    named_by_key: bool = False
    name_begin: str = ""
    name_end: str = ""
    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    value_marks: tuple[str, str] = ("", "")
    nested: str = ""
    literals: bool = False
    type_words: tuple[tuple[str, str], ...] = ()
    quote: str = ""
    also: tuple[str, ...] = ()
    begun_by: str = ""
    bare: bool = False
    dropped: tuple[str, ...] = ()
    prompt_end: str = ""
    announced_in: str = "template"
    announced_as: str = "tools"
    whole_documents: bool = False
    clock: str = ""
    history: str = "template"
    text_arguments: bool = False
    no_content: bool = False
    single: bool = False
    short_ids: bool = False
    named_ids: bool = False
    no_system: bool = False
    parallel: bool = True
    required: bool = False
    tools: tuple[Tool, ...] = field(default=(), compare=False)

    @cached_property
    def sections(self) -> tuple[str, ...]:
        """The texts that begin the calls of an answer, as far as they are no part of a call."""
        return tuple(text for text in (self.section, *self.also) if text.strip())

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """The texts that begin a call: some models leave out the first line of theirs."""
        begin = self.call_begin.strip()
        _, line, last = begin.rpartition("\n")
        return tuple(text for text in (begin, last if line else "") if text)

    @cached_property
    def begins(self) -> tuple[str, ...]:
        """The texts by which a beginning of calls is known: their first lines."""
        if self.begun_by:
            return (self.begun_by,)
        texts = [self.section] if self.section.strip() else list(self.openings)
        lines = [text.strip().partition(HOLE)[0] for text in (*texts, *self.also)]
        return tuple(dict.fromkeys(self._first_line(line) for line in lines if line))

    @staticmethod
    def _first_line(text: str) -> str:
        line, _, rest = text.partition("\n")
        return text if rest and not _TAG.fullmatch(line) else line

    def ended_by(self, texts: Sequence[str]) -> ToolFormat:
        """The format where some tokens end an answer: they are no part of the calls."""
        end = self.end.rstrip()
        for text in texts:
            end = end.removesuffix(text).rstrip() if text else end
        return self if end == self.end.rstrip() else replace(self, end=end)

    def word(self, kind: str) -> str:
        """The word for a type in `key_end`."""
        words = dict(self.type_words)
        return words.get(kind, words.get("number", "")) if self.type_words else ""

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and variables for the chat template, from the messages of a request.

        Arguments of earlier calls, JSON text in a request, become objects, as transformers passes them, where the
        template takes them. RequestError for malformed calls.
        """
        plain = tool_messages.plain(messages)
        documents: list[dict[str, Any]] = [tool.document for tool in tools]
        if self.whole_documents:
            documents = tool_messages.fill_fields(documents)
        if self.short_ids:
            plain = tool_messages.with_short_ids(plain)
        if self.named_ids:
            plain = tool_messages.with_named_ids(plain)
        if self.history != "template":
            plain = tool_messages.with_calls_as_text(plain, self._written, results=self.history == "text")
        if self.single:
            plain = tool_messages.split_calls(plain)
        if self.text_arguments:
            plain = tool_messages.with_text_arguments(plain)
        if self.no_content:
            plain = tool_messages.drop_content(plain)
        variables = {self.clock: datetime.now().strftime("%Y-%m-%d")} if self.clock else {}
        if self.announced_in == "text":
            return plain, {**variables, self.announced_as: json.dumps(documents, ensure_ascii=False, indent=4)}
        if not documents:
            return plain, {self.announced_as: []} if self.whole_documents else {}
        if self.announced_in == "words":
            example = {"function": {"name": "name_of_function", "arguments": {"name_of_argument": "value"}}}
            return tool_messages.told_in_words(plain, documents, self._written([example]), self.no_system), {}
        if self.announced_in == "system":
            listed = json_text([document["function"] for document in documents], "tools")
            return tool_messages.with_system(plain, "", {"tools": listed}), {}
        return plain, {self.announced_as: documents}

    def _written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return written(self, calls)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special: Mapping[str, int] | None = None,
        instead: Grammar | None = None,
    ) -> Grammar | None:
        """Constraint of an answer that has to call: a certain function, or any; None: it may be text.

        special: ids of the special tokens by their text. instead: JSON that may be the answer instead of calls;
        RequestError if it is not a JSON schema.
        """
        if choice.kind not in ("required", "function"):
            return None
        named = [tool for tool in tools if choice.kind == "required" or tool.name == choice.name]
        rules = CallRules(self, named, special or {})
        calls = rules.calls(self.parallel and choice.kind == "required")
        if instead is None:
            return Grammar.lark("\n".join([f"start: {calls}", *rules.rules()]))
        check_json(instead)
        answer = f"answer: %json {with_options(json.loads(instead.text))}"
        return Grammar.lark("\n".join([f"start: {calls} | answer", answer, *rules.rules()]))

    def call_grammar(self, tools: Sequence[Tool], special: Mapping[str, int] | None = None) -> Grammar:
        """Grammar of the text behind the position that `call_position` finds."""
        rules = CallRules(self, tools, special or {})
        parallel = self.parallel and (self.listed or bool(self.section.strip()))
        ways = dict.fromkeys(rules.calls(parallel, begun) for begun in self.begins)
        return Grammar.lark("\n".join([f"start: {' | '.join(ways)}", *rules.rules()]))

    def lazy_grammar(self, tools: Sequence[Tool], special: Mapping[str, int] | None = None) -> LazyGrammar:
        """Constraint of the calls of an answer, where it may be text; if they are not parallel, it ends with one."""
        ends = None if self.parallel else self.call_ends
        names = tuple(tool.name for tool in tools)
        position = partial(self.call_position, special=frozenset(special or ()), names=names)
        return LazyGrammar(self.call_grammar(tools, special), position, ends)

    def call_ends(self) -> Callable[[str], bool]:
        """Test for one answer: given its text piece by piece, says whether its first call has ended."""
        parser = replace(self, parallel=False).parser()

        def ended(text: str) -> bool:
            parser.push(text)
            return parser.ended

        return ended

    def call_position(
        self, text: str, from_start: bool, special: frozenset[str] = frozenset(), names: Sequence[str] = ()
    ) -> int | None:
        """Position in the text of an answer from which the first call goes on after its beginning; None: there is none.

        A mark that is only named is none: a call has to follow it, unless it is one of the special tokens. from_start:
        the text begins where the answer does. names: of the functions.
        """
        before = self.prompt_end if from_start else ""
        shown = before + text
        ends = (match.end() for mark in self.begins for match in re.finditer(re.escape(mark), shown))
        match = [at for at in ends if self._goes_on(shown, at, special, names)]
        if match:
            return max(0, min(match) - len(before))
        return text.index("{") if self.bare and from_start and _BARE.match(text) else None

    def _goes_on(self, text: str, at: int, special: frozenset[str], names: Sequence[str]) -> bool:
        """Whether a call follows a mark that ends at a position."""
        mark = next(mark for mark in self.begins if text.endswith(mark, 0, at))
        if any(token in mark for token in special):
            return True
        behind = text[at:].lstrip()
        for rest in self._rests(mark):
            line = rest.strip().partition("\n")[0].partition(HOLE)[0]
            if line and behind.startswith(line):
                return True
            named = any(behind.startswith(name) for name in names) if self._named else behind.startswith(("{", "["))
            if named and not line:
                return True
        return False

    @property
    def _named(self) -> bool:
        """Whether a call begins with the function's name."""
        return self.body != "object" and not self.listed

    def _rests(self, mark: str) -> list[str]:
        """Texts that may follow a mark that begins calls, before the first of them."""
        if self.section.lstrip().startswith(mark):
            rest = self.section.lstrip()[len(mark) :]
            return [rest if rest.strip() else "" if self.listed else self.call_begin]
        begins = [text for text in (self.call_begin.lstrip(), *self.openings[1:]) if text.startswith(mark)]
        return [text[len(mark) :] for text in begins] or [""]

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart from the answer."""
        return False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of the format that may be special tokens, or have some in them."""
        texts = (*self.begins, self.section, self.call_begin, self.name_end, self.call_end, self.between, self.end)
        texts += (self.key_begin, self.key_end, self.value_end, self.quote, *self.dropped)
        return tuple(dict.fromkeys(text for text in texts if text.strip()))

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
        """A parser for one answer. new_id: makes the ids of calls."""
        return ToolParser(self, new_id or (_short_id if self.short_ids else _long_id))


@dataclass(frozen=True)
class HarmonyFormat(ToolFormat):
    """gpt-oss's: an answer is messages on channels (harmony.py), some of which are calls, and each call ends it.

    may_call: there are functions to call.
    """

    may_call: bool = True

    @property
    def reasons(self) -> bool:
        return True

    @property
    def marks(self) -> tuple[str, ...]:
        return harmony.MARKS

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = ()
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        plain, variables = super().conversation(messages, tools)
        return tool_messages.on_channels(plain), variables

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        special: Mapping[str, int] | None = None,
        instead: Grammar | None = None,
    ) -> Grammar | None:
        """The grammar of `ToolFormat`; reasoning may come first."""
        if choice.kind not in ("required", "function"):
            return None
        named = [tool for tool in tools if choice.kind == "required" or tool.name == choice.name]
        rules = self._rules(named, special or {})
        ways = [f"channel {literal('commentary ' + harmony.TO)} call"] if named else []
        ways += [f"{literal(' ' + harmony.TO)} call"] if named else []
        if instead is not None:
            check_json(instead)
            schema = with_options(json.loads(instead.text))
            rules += ['final: channel "final" message answer', f"answer: %json {schema}"]
            ways.append("final")
        inside = "/(.|\\n)*/" if harmony.END in (special or {}) else "/[^<]*/"
        rules.append(f'thought: channel "analysis" message {inside} end start_of "assistant"')
        return Grammar.lark("\n".join([f"start: thought? ({' | '.join(ways)})", *rules]))

    def call_grammar(self, tools: Sequence[Tool], special: Mapping[str, int] | None = None) -> Grammar:
        return Grammar.lark("\n".join(["start: call", *self._rules(tools, special or {})]))

    def _rules(self, tools: Sequence[Tool], special: Mapping[str, int]) -> list[str]:
        """The rules for the marks, and for `call`: a function's name, the rest of the header, and the arguments."""
        marks = {"start_of": harmony.START, "channel": harmony.CHANNEL, "message": harmony.MESSAGE}
        marks |= {"end": harmony.END, "constrain": harmony.CONSTRAIN}
        rules = [f"{name}: {_mark(text, special)}" for name, text in marks.items()]
        rules.append('header: (" "? channel "commentary")? (" "? constrain "json" | " json" | " code")? " "? message')
        if tools:
            rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(tools))))
        for at, tool in enumerate(tools):
            rules.append(f"call_{at}: {literal(tool.name)} header arguments_{at}")
            rules.append(f"arguments_{at}: %json {with_options(tool.parameters)}")
        return rules

    def call_position(
        self, text: str, from_start: bool, special: frozenset[str] = frozenset(), names: Sequence[str] = ()
    ) -> int | None:
        matches = harmony.CALL_BEGINS.finditer(text)
        return next((begin.end() for begin in matches if begin.start() or from_start or text[0] == "<"), None)

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
        return harmony.HarmonyParser(new_id or _long_id, self.parallel, self.may_call)


def reasoning_format(template: str | None) -> ToolFormat | None:
    """Format of an answer without calls, if the model with this chat template marks its reasoning; else None."""
    of_template = template or ""
    return replace(HARMONY, may_call=False) if all(text in of_template for text in harmony.CHANNELS) else None


def check_json(grammar: Grammar) -> None:
    if grammar.kind != "json_schema":
        raise RequestError("with tools that may be called, only JSON can be asked for beside them")


_BARE = re.compile(r'\s*\{\s*"name"\s*:\s*"')

_TAG = re.compile(r"\s*[<\[].*[>\]]\s*")  # a line that is a mark by itself

_TAGGED: dict[str, Any] = {"call_begin": "<tool_call>\n", "call_end": "\n</tool_call>", "between": "\n"}
HERMES = ToolFormat("hermes", **_TAGGED)
GENERIC = ToolFormat("generic", announced_in="words", history="words", **_TAGGED)
LLAMA = ToolFormat(
    "llama3", also=("<|python_tag|>",), bare=True, between="; ", arguments_key="parameters", single=True
)
MISTRAL = ToolFormat("mistral", section="[TOOL_CALLS]", listed=True, short_ids=True, id_key="id")
MISTRAL_NAMED = ToolFormat(
    "mistral-args", call_begin="[TOOL_CALLS]", body="json", name_end=f"[CALL_ID]{HOLE}[ARGS]", short_ids=True
)
HARMONY = HarmonyFormat("harmony", call_begin=harmony.TO, call_end=harmony.CALL)
PHI4_MINI = ToolFormat(
    "phi4-mini", section="<|tool_call|>", also=("functools[",), end="<|/tool_call|>", listed=True,
    announced_in="system", history="text",
)


def _mark(text: str, special: Mapping[str, int]) -> str:
    """A text of a format in a Lark grammar: the token, if it is a special one."""
    return f"<[{special[text]}]>" if text in special else literal(text) if text else ""


def _long_id() -> str:
    return "call_" + _letters(24)


def _short_id() -> str:
    return _letters(9)


def _letters(count: int) -> str:
    return "".join(random_choice(ascii_letters + digits) for _ in range(count))
