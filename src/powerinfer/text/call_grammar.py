"""Grammars of calls of functions: what an answer must match, from the description of a dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powerinfer.errors import RequestError
from powerinfer.text.call_values import kinds, resolved
from powerinfer.text.grammar import JSON_OPTIONS, MAX_SOURCE, WHITESPACE, json_text, literal
from powerinfer.text.marks import HOLE
from powerinfer.text.tools import Tool

if TYPE_CHECKING:
    from powerinfer.text.tool_calls import ToolFormat

MAX_CALLS = 16  # of one answer, where a grammar says what is called
_ANY_ORDER = 4  # arguments that must be there and may come in any order
_DEPTH = 4  # of literals that are held to their schema
_MAX_LENGTH = 4096  # of a text that is counted
_SPACE = r"/[ \t\r\n]{0,8}/"
_REFERENCES = re.compile(r'"\$ref":"(#/(?:\$defs|definitions)/)?')
_EDGES = re.compile(r"^\s+|\s*\n\s*|\s+$")
_TEXT = r"/(.|\n)*/"
_NAME = "/[A-Za-z0-9_.-]{1,64}/"


def with_options(schema: Mapping[str, Any]) -> str:
    """A schema as part of a Lark grammar, which has llguidance's options in it."""
    return json_text({**schema, "x-guidance": JSON_OPTIONS}, "the schema")


class CallRules:
    """The rules of a Lark grammar for calls of some functions. special: ids of the special tokens by their text."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], special: Mapping[str, int]) -> None:
        self._form, self._tools, self._special = form, tools, special
        self._typed: list[str] = []  # rules that the values need

    def rules(self) -> list[str]:
        """The rules for `call`, and what it consists of."""
        lines = [f"W: /{WHITESPACE}/", "call: " + " | ".join(f"call_{at}" for at in range(len(self._tools)))]
        for at, tool in enumerate(self._tools):
            lines += getattr(self, f"_{self._form.body}")(at, tool)
        if self._form.quote or self._form.literals or self._form.body == "keywords":
            lines += self._literals()
        return [*lines, *self._typed]

    def calls(self, parallel: bool, begun: str = "") -> str:
        """The rule for a call or more. begun: the text that the answer has begun them with."""
        form, more = self._form, f"{{0,{MAX_CALLS - 1}}}"
        opening, end = self.mark(form.call_begin), self.mark(form.end)
        closing = self.mark(form.call_end)
        before = self.mark(form.section)
        first = opening
        if begun and (rest := _strip_begin(begun, form.section)) is not None:
            before = self.mark(rest)
        elif begun:
            texts = (form.call_begin, *form.openings[1:])
            rests = [rest for text in texts if (rest := _strip_begin(begun, text)) is not None]
            before, first = "", self._either([self.mark(rest) for rest in rests])
        closed = f"call {closing}"
        if form.listed:
            inner = f'{first} {closed} (W? "," W? {opening} {closed}){more}' if parallel else f"{first} {closed}"
            bracket = "" if begun.endswith("[") or form.section.endswith("[") else 'W? "["'
            return f'{before} {bracket} W? {inner} W? "]" {end}'
        again = f"({self.mark(form.between)} {opening} {closed}){more}" if parallel else ""
        return f"{before} {first} {closed} {again} {end}"

    def mark(self, text: str, exact: bool = False) -> str:
        """A mark in the grammar: special tokens as such, white space at its edges and around line breaks free, unless
        it is exact."""
        marks = sorted((token for token in self._special if token in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        return " ".join(piece for part in parts if part for piece in self._pieces(part, exact))

    def _pieces(self, part: str, exact: bool) -> list[str]:
        if part in self._special:
            return [f"<[{self._special[part]}]>"]
        if exact:
            return [literal(part)]
        pieces: list[str] = []
        for at, plain in enumerate(part.split(HOLE)):
            if at:
                pieces.append(_NAME)
            before = 0
            for space in _EDGES.finditer(plain):
                pieces += [literal(plain[before : space.start()])] * (space.start() > before) + [_SPACE]
                before = space.end()
            pieces += [literal(plain[before:])] * (before < len(plain))
        return pieces

    @staticmethod
    def _either(options: Sequence[str]) -> str:
        filled = [option for option in options if option]
        group = f"({' | '.join(filled)})" if len(filled) > 1 else filled[0] if filled else ""
        return f"({group})?" if group and len(filled) < len(options) else group

    # ---- a call, by the body of the dialect

    def _object(self, at: int, tool: Tool) -> list[str]:
        form = self._form
        name, key = literal(json.dumps(tool.name)), literal(json.dumps(form.arguments_key))
        arguments = [f"arguments_{at}: %json {with_options(tool.parameters)}"]
        if form.named_by_key:
            return [f'call_{at}: "{{" W? {name} W? ":" W? arguments_{at} W? "}}"', *arguments]
        begin = '"{" W?'
        identity = f"{literal(json.dumps(form.id_key))} W? \":\" W? /\"[A-Za-z0-9_.-]{{1,64}}\"/" if form.id_key else ""
        if identity and form.id_first:
            begin += f' {identity} W? "," W?'
        named = f'{literal(json.dumps(form.name_key))} W? ":" W? {name} W? "," W? {key} W? ":" W?'
        behind = f'(W? "," W? {identity})?' if identity and not form.id_first else ""
        return [f'call_{at}: {begin} {named} arguments_{at} {behind} W? "}}"', *arguments]

    def _name(self, tool: Tool) -> str:
        """The name with what precedes and follows it."""
        form = self._form
        before, hole, behind = form.name_end.partition(HOLE)
        end = self.mark(form.name_end)
        if hole and behind.strip():
            end = f"({self.mark(before + HOLE)})? {self.mark(behind)}"
        begin = f"{literal(form.name_begin)} " if form.name_begin else ""
        return f"{begin}{literal(tool.name)} {end}"

    def _json(self, at: int, tool: Tool) -> list[str]:
        if self._form.quote:
            return [f"call_{at}: {self._name(tool)} dictionary"]
        schema = with_options(tool.parameters)
        return [f"call_{at}: {self._name(tool)} arguments_{at}", f"arguments_{at}: %json {schema}"]

    def _keywords(self, at: int, tool: Tool) -> list[str]:
        words = [
            (f"{literal(name)} W? \"=\" W? {_literal_rule(schema, tool.parameters)}", required)
            for name, schema, required in _properties(tool)
        ]
        arguments, rules = _ordered_arguments(f"{at}_", words, 'W? "," W?')
        if not words and _is_open(tool):
            arguments = '(keyword (W? "," W? keyword)*)?'
        return [f"call_{at}: {self._name(tool)} W? {arguments} W?" + ' ")"', *rules]

    def _tagged(self, at: int, tool: Tool) -> list[str]:
        properties = _properties(tool)
        if not properties:
            end, hole, behind = self._form.value_end.partition(HOLE)
            self._typed = ["any_value" + self._text_value("", end)]
            any_key = f"{self.mark(self._form.key_begin)} {_NAME} {self._key_end('string')} any_value"
            any_key += f" {_NAME} {self.mark(behind)}" if hole else ""
            return [f"call_{at}: {self._name(tool)}" + (f" ({any_key} {_SPACE})*" if _is_open(tool) else "")]
        rules, size = [], 0
        for number, (name, schema, _) in enumerate(properties):
            value = f"value_{at}_{number}"
            begin = f"{self.mark(self._form.key_begin)} {literal(name)}"
            ways, value_rules = self._values(value, schema, tool.parameters, self._form.value_end.replace(HOLE, name))
            rules += value_rules
            spelled = [f"{self._key_end(kind)} {way}" for kind, way in ways]
            rules.append(f"argument_{at}_{number}: {begin} {self._either(spelled)} {_SPACE}")
            size += sum(map(len, value_rules))
            if size > MAX_SOURCE:  # definitions are in the rule of every argument that refers to one
                message = f"the schema of {tool.name} is too large: let fewer arguments refer to large definitions"
                raise RequestError(message)
        names = [(f"argument_{at}_{number}", required) for number, (_, _, required) in enumerate(properties)]
        return [f"call_{at}: {self._name(tool)} rest_{at}_0", *_unordered_arguments(f"rest_{at}_", names), *rules]

    def _values(
        self, rule: str, schema: Any, root: Mapping[str, Any], end: str
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """Type and rule of each way to write a value, up to the mark `end`; and the rules that these need."""
        allowed = kinds(schema, root)
        text = f"{rule}{self._text_value(_counted(schema), end)}"
        if self._form.nested and (not allowed or allowed & {"object", "array"}):
            return [("", rule)], [f"{rule}{self._text_value('', end)}"]
        values = _texts(schema, allowed)
        if values and not any("<" in value for value in values):
            options = " | ".join(literal(value) for value in values)
            text = f"{rule}: ({options}) {self.mark(end, exact=True)}"
        standalone = _standalone(schema, root, allowed) if allowed else {}
        value = f"%json {with_options(standalone)}" if not self._form.literals else _literal_rule(schema, root)
        plain = f"{rule}: {_SPACE} {value} {self.mark(end)}"
        may_be_text = not allowed or "string" in allowed
        if not self._form.type_words:
            return [("", rule)], [text if may_be_text else plain]
        json_kinds = sorted(allowed - {"string"}) if allowed else ["object", "number", "boolean", "array"]
        words = {self._form.word(kind): kind for kind in json_kinds}
        ways = [(kind, f"{rule}_json") for kind in words.values()]
        any_json = f"{rule}: %json {with_options({})} {self.mark(end)}"
        json_rule = any_json if may_be_text else plain
        rules = [json_rule.replace(rule, f"{rule}_json", 1)] if ways else []
        if may_be_text:
            ways.append(("string", rule))
            rules.append(text)
        return ways, rules

    def _key_end(self, kind: str) -> str:
        form = self._form
        return self.mark(form.key_end.replace(HOLE, form.word(kind)) if form.type_words else form.key_end, exact=True)

    def _text_value(self, counted: str, end: str) -> str:
        """Text up to the mark that ends a value, as the rest of a rule."""
        if any(token in end for token in self._special):
            return f": {counted or _TEXT} {self.mark(end)}"
        return f"[suffix={literal(end.strip())}]: {counted or _TEXT}"

    def _literals(self) -> list[str]:
        """The rules for values in Python's literals, or with marks around texts and bare keys."""
        quote, rules = self._form.quote, []
        text = r"""/'([^'\\]|\\.)*'/ | /"([^"\\]|\\.)*"/"""
        key, null, truth = "text", '"None" | "null"', '"True" | "False" | "true" | "false"'
        if quote:
            text, key, null, truth = f"{self.mark(quote)} quoted", "/[A-Za-z0-9_.-]+/", '"null"', '"true" | "false"'
            plain = f"quoted[suffix={literal(quote)}]: {_TEXT}"
            rules = [f"quoted: {_TEXT} {self.mark(quote)}" if quote in self._special else plain]
        return [
            *rules,
            f"text: {text}",
            f"truth: {truth}",
            r"integer: /-?(0|[1-9][0-9]{0,17})/",
            r"number: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/",
            'list: "[" W? (literal (W? "," W? literal)*)? W? "]"',
            'dictionary: "{" W? (entry (W? "," W? entry)*)? W? "}"',
            f'entry: {key} W? ":" W? literal',
            'keyword: /[A-Za-z_][A-Za-z0-9_]*/ "=" literal',
            f"literal: text | truth | {null} | number | list | dictionary",
        ]


def _strip_begin(begun: str, text: str) -> str | None:
    """The text behind `begun`; None if it does not begin so."""
    stripped = text.lstrip()
    return stripped[len(begun) :] if text and stripped.startswith(begun) else None


def _properties(tool: Tool) -> list[tuple[str, Any, bool]]:
    """Names and schemas of the arguments, and whether they must be there."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    names = required if isinstance(required, list) else []
    schemas = properties if isinstance(properties, dict) else {}
    return [(name, schema, name in names) for name, schema in schemas.items()]


def _is_open(tool: Tool) -> bool:
    """Whether a function without named arguments may have any."""
    return tool.parameters.get("additionalProperties", "properties" not in tool.parameters) is not False


def _standalone(schema: Mapping[str, Any], root: Mapping[str, Any], allowed: frozenset[str]) -> dict[str, Any]:
    """A part of a schema as one of its own, with the definitions if it refers to any; its types alone if something
    refers to the rest of the schema."""
    if not _REFERENCES.search(json_text(schema, "the schema")):
        return {**schema}
    copy = {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}
    elsewhere = any(not of_definitions for of_definitions in _REFERENCES.findall(json_text(copy, "the schema")))
    return {"type": sorted(allowed)} if elsewhere else copy


def _texts(schema: Any, allowed: frozenset[str]) -> list[str]:
    """The texts that a value may be, by its schema; none: any, or not only texts."""
    values = schema.get("enum") if isinstance(schema, Mapping) and allowed == {"string"} else None
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _counted(schema: Any) -> str:
    """A pattern for a text of limited length; "" for any."""
    if not isinstance(schema, Mapping):
        return ""
    least, most = _number(schema.get("minLength", 0)), _number(schema.get("maxLength"))
    if least is None or most is None or least > most:
        return ""
    return rf"/(.|\n){{{least},{most}}}/"


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_LENGTH else None


def _ordered_arguments(rule: str, words: Sequence[tuple[str, bool]], comma: str) -> tuple[str, list[str]]:
    """Arguments in their order, separated, of which some may be left out, and the rules for them. rule: the end of
    these rules' names."""
    rules = [f"argument_{rule}{at}: {word}" for at, (word, _) in enumerate(words)]
    first = next((at for at, (_, required) in enumerate(words) if required), len(words))
    for at in range(len(words) - 1):
        more, required = f"{comma} argument_{rule}{at + 1}", words[at + 1][1]
        behind = f"behind_{rule}{at + 1}" if at + 2 < len(words) else ""
        rules.append(f"behind_{rule}{at}: {more if required else f'({more})?'} {behind}")
    for at in range(min(first + 1, len(words))):
        behind = f"behind_{rule}{at}" if at + 1 < len(words) else ""
        later = f" | from_{rule}{at + 1}" if at < min(first, len(words) - 1) else ""
        rules.append(f"from_{rule}{at}: argument_{rule}{at} {behind}{later}")
    return ("" if not words else f"from_{rule}0" if first < len(words) else f"(from_{rule}0)?"), rules


def _unordered_arguments(rule: str, names: Sequence[tuple[str, bool]]) -> list[str]:
    """Rules for arguments of which some must be there, once each. rule: the beginning of their names; the first has 0.

    A rule says which of those that must be there have been, a bit each; if they are many they come in their order.
    """
    needed = [name for name, required in names if required]
    optional = [name for name, required in names if not required]
    if len(needed) > _ANY_ORDER:
        return [f"{rule}0: " + " ".join(name if required else f"{name}?" for name, required in names)]
    free = f"({' | '.join(optional)}){{0,{len(optional)}}}" if optional else ""
    rules = []
    for been in range(1 << len(needed)):
        ways = [f"{name} {rule}{been | 1 << at}" for at, name in enumerate(needed) if not been >> at & 1]
        after = f"({' | '.join(ways)})" if ways else ""
        rules.append(f"{rule}{been}: {free} {after}" if free or after else f'{rule}{been}: ""')
    return rules


def _literal_rule(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """The rule of Python's literals for a schema."""
    schema = resolved(schema, root)
    allowed = kinds(schema, root)
    if allowed == {"array"} and "items" in schema and depth < _DEPTH:
        item = _literal_rule(schema["items"], root, depth + 1)
        least, most = (_number(schema.get(name)) for name in ("minItems", "maxItems"))
        last = "" if most is None else str(max(0, most - 1))
        more = f'{item} (W? "," W? {item}){{{max(0, (least or 0) - 1)},{last}}}' if most != 0 else ""
        return f'"[" W? ({more}){"" if least else "?"} W? "]"'
    values = _texts(schema, allowed)
    if values and not any(set(value) & set("'\"\\\n") for value in values):
        return "(" + " | ".join(literal(f"{quote}{value}{quote}") for value in values for quote in "'\"") + ")"
    if allowed == {"string"} and (counted := _counted(schema)):
        count = counted.removeprefix(r"/(.|\n)").rstrip("/")
        return "(" + " | ".join(rf"/{quote}[^{quote}\\\n]{count}{quote}/" for quote in "'\"") + ")"
    rules = {"string": "text", "integer": "integer", "number": "number", "boolean": "truth", "null": '"None"',
             "array": "list", "object": "dictionary"}  # fmt: skip
    return "(" + " | ".join(sorted(rules[kind] for kind in allowed if kind in rules)) + ")" if allowed else "literal"
