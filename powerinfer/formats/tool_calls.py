"""Tool calls: how models of different families are told of functions, and how they write calls of them.

A `ToolFormat` is data; which one a model has is decided by its chat template. Its functions are those of a request
(`tools.py`), the conversation is spelled as its template takes it (`tool_messages.py`), and its answer is read
(`tool_parser.py`).
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
from powerinfer.formats import harmony, tool_messages
from powerinfer.formats.grammar import JSON_OPTIONS, WHITESPACE, Grammar, LazyGrammar, json_text, literal
from powerinfer.formats.tool_parser import AnswerParser, ToolParser
from powerinfer.formats.tools import Tool, ToolChoice

MAX_CALLS = 16  # of one answer, where a grammar says what is called


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls: `begin`, then an object (if `listed` a list of them), then `end`.

    begins: all texts that begin calls; a grammar asks for the first one. inner: before and after an object, between:
    between calls. bare: an answer that begins with the object of a call needs no text before it. argument_mark: a call
    is the function's name, this text, and the arguments. arguments: their key. told: how the model learns of the
    functions: from the template's variable `tools` ("template"), from a field of the system message ("system"), or in
    words of our own ("words"). short_ids: calls have ids of nine letters and digits. A request's choice, not the
    family's: parallel: an answer may have several calls; required: it is nothing but calls.
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
    required: bool = False

    @classmethod
    def of(cls, template: str | None) -> ToolFormat:
        """The format of a model with this chat template. RequestError if the template has one that is not known."""
        source = template or ""
        for row in _ROWS:
            if all(text in source for text in row.has) and not any(text in source for text in row.lacks):
                return row.format
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
        plain = tool_messages.plain(messages)
        documents = [tool.document for tool in tools]
        if self.short_ids:
            plain = tool_messages.with_short_ids(plain)
        if self.told == "words":
            return tool_messages.in_words(plain, documents), {}
        if self.told == "system" and documents:
            listed = json_text([document["function"] for document in documents], "tools")
            return tool_messages.with_system(plain, "", {"tools": listed}), {}
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
        _check_json(instead)
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

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart from the answer."""
        return False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of the format that may be special tokens."""
        return tuple(text for text in (*self.begins, self.end, self.argument_mark) if text)

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
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
        """As of `ToolFormat`; reasoning may come first."""
        if choice.kind not in ("required", "function"):
            return None
        named = [tool for tool in tools if choice.kind == "required" or tool.name == choice.name]
        rules = self._rules(named, special or {})
        ways = [f"channel {literal('commentary ' + harmony.TO)} call"] if named else []
        if instead is not None:
            _check_json(instead)
            schema = _with_options(json.loads(instead.text))
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
        rules.append('header: (" "? channel "commentary")? (" "? constrain "json" | " json")? " "? message')
        if tools:
            rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(tools))))
        for at, tool in enumerate(tools):
            rules.append(f"call_{at}: {literal(tool.name)} header arguments_{at}")
            rules.append(f"arguments_{at}: %json {_with_options(tool.parameters)}")
        return rules

    def call_position(self, text: str, whole: bool) -> int | None:
        found = harmony.CALL_BEGINS.finditer(text)
        return next((one.end() for one in found if one.start() or whole or text[0] == "<"), None)

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
        return harmony.HarmonyParser(new_id or _long_id, self.parallel, self.may_call)


def reasoning_format(template: str | None) -> ToolFormat | None:
    """How an answer without calls is read, if the model with this chat template marks its reasoning; else None."""
    of_template = template or ""
    return replace(HARMONY, may_call=False) if all(text in of_template for text in harmony.CHANNELS) else None


def _check_json(grammar: Grammar) -> None:
    if grammar.kind != "json_schema":
        raise RequestError("with tools that may be called, only JSON can be asked for beside them")


_BARE = re.compile(r'\s*\{\s*"name"\s*:\s*"')

_TAGGED: dict[str, Any] = {"begins": ("<tool_call>",), "end": "</tool_call>", "inner": "\n", "between": "\n"}
HERMES = ToolFormat("hermes", **_TAGGED)
GENERIC = ToolFormat("generic", told="words", **_TAGGED)
LLAMA = ToolFormat("llama3", ("<|python_tag|>",), bare=True, between="; ", arguments="parameters")
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), listed=True, short_ids=True)
MISTRAL_NAMED = ToolFormat("mistral-args", ("[TOOL_CALLS]",), argument_mark="[ARGS]", short_ids=True)
HARMONY = HarmonyFormat("harmony", (harmony.TO,), harmony.CALL)
PHI4_MINI = ToolFormat("phi4-mini", ("<|tool_call|>", "functools["), "<|/tool_call|>", listed=True, told="system")


class _Row(NamedTuple):
    """A format, with the texts by which a template that has it is known: all of `has`, and none of `lacks`."""

    format: ToolFormat
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


_ROWS = (
    _Row(HARMONY, harmony.CHANNELS),
    _Row(HERMES, ("<tool_call>", "tools"), ("<function=", "<arg_key>")),  # Qwen 2.5 and 3, Hermes
    _Row(MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    _Row(MISTRAL, ("[TOOL_CALLS]",)),
    _Row(LLAMA, ("<|python_tag|>", "tools")),
    _Row(LLAMA, ('"parameters": dictionary of argument name', "tools")),
    _Row(PHI4_MINI, ("<|tool|>", "message['tools']")),
)
"""The first one that a template matches is its format."""


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
