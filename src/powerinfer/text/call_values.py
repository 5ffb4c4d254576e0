"""Values in calls of functions, as models write them, turned into JSON as they come.

A model's JSON may be broken, and some dialects write Python's literals, or text that only the function's schema gives a
type. What comes out is valid JSON, whatever goes in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from powerinfer.text.grammar import MAX_DEPTH
from powerinfer.text.tokenizer import valid_unicode

_SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_PLAIN = {quote: re.compile(rf"[^\\{quote}\"\x00-\x1f]+") for quote in ('"', "'")}
_MARKED = re.compile(r"[^\\\"\x00-\x1f<]+")  # in a string between marks
_WORD = re.compile(r"[^\s,:=\"'{}\[\]()<]+|<")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NAMES = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
MAX_OPEN = 256  # brackets in brackets: JSON decoders do not take many more
MAX_NUMBER = 1024  # characters: Python reads whole numbers of some thousands
_PIECE = 1024  # characters that are looked at together: a step copies what is left of them
_LOOK_AHEAD = 32  # characters
_HEX = {"u": 4, "x": 2, "U": 8}


class Value:
    """Reads a JSON value, or Python's literal, piece by piece, and writes it as JSON.

    Well-formed JSON stays as it is. Raw line breaks in strings are escaped; what lacks is added: brackets, commas,
    quotes around words. A value ends where its brackets do; a bracket in too many others is a text, and so is a number
    of too many digits.

    quote: a mark beside `"` and `'` around strings. keywords: the value is the arguments of a call in Python,
    `a=1, b=2)`.
    """

    def __init__(self, quote: str = "", keywords: bool = False) -> None:
        self._text = ""  # not read yet
        self._out: list[str] = []
        self._open: list[str] = []  # brackets
        self._step = self._value
        self._quote = self._mark = quote
        self._comma = ""  # a comma that waits for what it separates
        self._as_key = False  # the string or word is a key
        self._last = False
        self.ended = False
        if keywords:
            self._open.append("{")
            self._out.append("{")
            self._step = self._key

    @property
    def rest(self) -> str:
        """The text behind the value, once it has ended."""
        return self._text

    def push(self, text: str) -> str:
        """The JSON that is certain after this piece."""
        for at in range(0, len(text), _PIECE):
            self._text += text[at : at + _PIECE]
            while not self.ended and self._text and self._step():
                pass
        out, self._out = "".join(self._out), []
        return out

    def finish(self) -> str:
        """The rest of the JSON, if no text follows: what is open is closed."""
        self._last = True
        while not self.ended and self._text and self._step():
            pass
        if self._step == self._string:
            self._close_string()
        if self._step == self._word:
            self._end_word()
        while self._open:
            self._close()
        if not self.ended and self._step == self._value:
            self._out.append("null")
        self.ended = True
        out, self._out = "".join(self._out), []
        return out

    def _skip_space(self) -> bool:
        """White space is passed on; whether there is text behind it."""
        rest = self._text.lstrip(_SPACE)
        if len(rest) < len(self._text) and not self._comma:
            self._out.append(self._text[: len(self._text) - len(rest)])
        elif self._comma:
            self._comma += self._text[: len(self._text) - len(rest)]
        self._text = rest
        return bool(rest)

    def _begin_item(self) -> None:
        self._out.append(self._comma)
        self._comma = ""

    def _value(self) -> bool:
        if not self._skip_space():
            return False
        char = self._text[0]
        if char in "}])" and self._open:
            return self._closing()
        if char in ",}])" and not self._open:
            self._out.append("null")
            self.ended = True
            return False
        if char in ",:=":
            self._text = self._text[1:]
            return True
        return self._begin_string_or_word(False)

    def _begin_string_or_word(self, as_key: bool) -> bool:
        char, mark = self._text[0], self._quote
        if mark and char == mark[0] and len(self._text) < len(mark) and mark.startswith(self._text) and not self._last:
            return False
        self._begin_item()
        self._as_key = as_key
        if mark and self._text.startswith(mark):
            self._mark, self._text, self._step = mark, self._text[len(mark) :], self._string
            self._out.append('"')
        elif char in "\"'":
            self._mark, self._text, self._step = char, self._text[1:], self._string
            self._out.append('"')
        elif char in "{[(" and not as_key and len(self._open) < MAX_OPEN:
            self._open.append("{" if char == "{" else "[")
            self._out.append(self._open[-1])
            self._text, self._step = self._text[1:], self._key if char == "{" else self._value
        else:
            self._words: list[str] = []
            self._step = self._word
        return True

    def _key(self) -> bool:
        if not self._skip_space():
            return False
        char = self._text[0]
        if char in "}])":
            return self._closing()
        if char in ",:={[(":
            self._text = self._text[1:]
            return True
        return self._begin_string_or_word(True)

    def _colon(self) -> bool:
        if not self._skip_space():
            return False
        if self._text[0] in ":=":
            self._text = self._text[1:]
        self._out.append(":")
        self._step = self._value
        return True

    def _expect_separator(self) -> bool:
        """Read the separator or bracket behind a value in brackets."""
        if not self._skip_space():
            return False
        char = self._text[0]
        if char in "}])":
            return self._closing()
        self._comma = self._comma or ","
        if char in ",:=":
            self._text = self._text[1:]
        self._step = self._key if self._open[-1] == "{" else self._value
        return True

    def _closing(self) -> bool:
        """A closing bracket closes those that were opened behind its own; one without its own closes one."""
        wanted = "{" if self._text[0] == "}" else "["
        if self._text[0] == ")" and "[" not in self._open:
            wanted = "{"
        self._text = self._text[1:]
        while wanted in self._open and self._open[-1] != wanted:
            self._close()
        self._close()
        return not self.ended

    def _close(self) -> None:
        if self._step == self._colon:
            self._out.append(":null")
        elif self._step == self._value and self._open[-1] == "{":
            self._out.append("null")
        self._comma = self._comma[1:] if self._comma else ""
        self._out.append(self._comma + _CLOSING[self._open.pop()])
        self._comma = ""
        self._end_value()

    def _end_value(self) -> None:
        self.ended, self._step = not self._open, self._expect_separator

    def _string(self) -> bool:
        text, mark = self._text, self._mark
        if len(mark) > 1 and text[0] == mark[0]:
            if text.startswith(mark):
                self._text = text[len(mark) :]
                self._close_string()
                return True
            if mark.startswith(text) and not self._last:
                return False
            self._out.append(text[0])
            self._text = text[1:]
            return True
        pattern = _PLAIN.get(mark, _MARKED)
        match = pattern.match(text)
        if match is not None:
            self._out.append(match[0])
            self._text = text[match.end() :]
        elif text[0] == mark == "'":
            return self._apostrophe()
        elif text[0] == mark:
            self._text = text[1:]
            self._close_string()
        elif text[0] == "\\" and len(mark) == 1:
            return self._escape()
        else:  # a control character, another quote, or a mark's beginning
            self._out.append(json.dumps(text[0], ensure_ascii=False)[1:-1])
            self._text = text[1:]
        return True

    def _apostrophe(self) -> bool:
        """An apostrophe ends a string where what follows may follow a string: some models escape none within."""
        behind = self._text[1:_LOOK_AHEAD].lstrip(_SPACE)
        if not behind and len(self._text) < _LOOK_AHEAD and not self._last:
            return False
        self._text = self._text[1:]
        if behind and behind[0] not in ",:=)]}":
            self._out.append("'")
        else:
            self._close_string()
        return True

    def _escape(self) -> bool:
        text = self._text
        if len(text) < 2 and not self._last:
            return False
        letter = text[1:2]
        length = _HEX.get(letter, 0)
        if length and len(text) < 2 + length and not self._last:
            return False
        digits = text[2 : 2 + length]
        if length and len(digits) == length and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            code = int(digits, 16)
            plain = json.dumps(chr(code))[1:-1] if code < 0x110000 else ""
            self._out.append(text[:6] if letter == "u" else plain)
            self._text = text[2 + length :]
        elif letter and letter in '"\\/bfnrt':
            self._out.append(text[:2])
            self._text = text[2:]
        elif letter == "'":
            self._out.append("'")
            self._text = text[2:]
        else:
            self._out.append("\\\\")
            self._text = text[1:]
        return True

    def _close_string(self) -> None:
        self._out.append('"')
        self._key_or_value_ends()

    def _word(self) -> bool:
        match = _WORD.match(self._text)
        if match is not None:
            self._words.append(match[0])
            self._text = self._text[match.end() :]
            return True
        self._end_word()
        return True

    def _end_word(self) -> None:
        word = "".join(self._words)
        number = len(word) <= MAX_NUMBER and _NUMBER.fullmatch(word) is not None
        plain = _NAMES.get(word) or (word if number else None)
        self._out.append(json.dumps(word, ensure_ascii=False) if plain is None or self._as_key else plain)
        if not word and self._text:  # no bracket, quote or word: a stray character
            self._text = self._text[1:]
        self._key_or_value_ends()

    def _key_or_value_ends(self) -> None:
        if self._as_key:
            self._step = self._colon
        else:
            self._end_value()


def closed(text: str) -> str:
    """A text that was to be JSON, as JSON."""
    reader = Value()
    return reader.push(text) + ("" if reader.ended else reader.finish())


def json_of_value(value: Any) -> str:
    """The JSON text of a value. Lone surrogates in it, which no answer can hold, are U+FFFD; ValueError for NaN."""
    return valid_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False))


# ------------------------------------------------------------------------------------------------------ plain text


_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_DEPTH = 8  # of references and alternatives


def kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a value may have by its schema; none: any."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return kinds(_referred(reference, root), root, depth + 1)
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset((stated,))
    if isinstance(stated, list):
        return frozenset(kind for kind in stated if isinstance(kind, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset("null" if value is None else _KINDS[type(value)] for value in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            ways = [kinds(option, root, depth + 1) for option in options]
            return frozenset().union(*ways) if all(ways) else frozenset()
    if isinstance(parts := schema.get("allOf"), list):
        return next((part_kinds for part in parts if (part_kinds := kinds(part, root, depth + 1))), frozenset())
    return frozenset(("object",)) if "properties" in schema else frozenset()


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference refers to."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return _referred(reference, root) if isinstance(reference, str) else schema


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    at: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        at = at.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at


def json_of_text(text: str, allowed: frozenset[str]) -> str:
    """The JSON text of a value that was written as plain text, of one of some types (none: of any)."""
    quoted = json.dumps(text, ensure_ascii=False)
    if allowed == {"string"}:
        return quoted
    plain = text.strip()
    try:
        value: Any = json.loads(plain)
    except (ValueError, RecursionError):
        value = _literal(plain)
    if value is None and plain not in ("null", "None"):
        return quoted
    kind = "null" if value is None else _KINDS[type(value)]
    fits = kind in allowed or (kind == "integer" and "number" in allowed)
    if not fits and isinstance(value, float) and "integer" in allowed and value.is_integer():
        return str(int(value))
    if not fits and ((allowed and "string" in allowed) or (not allowed and kind == "string")):
        return quoted
    try:
        return json_of_value(value)
    except ValueError:
        return quoted


def _literal(text: str) -> Any:
    """The value of Python's literal for a list, a dictionary, or a constant; None for others."""
    if text in ("True", "False"):
        return text == "True"
    if text[:1] not in ("{", "[", "("):
        return None
    reader = Value()
    written = reader.push(text)
    if not reader.ended or reader.rest.strip():
        return None
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return None


# ------------------------------------------------------------------------------------------------------ nested tags


@dataclass
class _Element:
    """A tag with what is in it."""

    key: str
    text: str = ""
    inner: list[_Element] = field(default_factory=list)


def json_of_elements(text: str, mark: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The JSON text of a value in which objects and lists are tags behind a mark: `<key>value</key>` for each key, and
    `<item>value</item>` for each item."""
    allowed = kinds(schema, root)
    tree = None if allowed == {"string"} else _elements(text, mark)
    if tree is None:
        return json_of_text(text, allowed)
    return json_of_value(_value_of(tree, schema, root))


def _elements(text: str, mark: str) -> _Element | None:
    """The tags in a text; None if they do not close each other."""
    tags = re.compile(rf"{re.escape(mark)}<(/?)([^<>]{{1,256}})>")
    open_tags, at = [_Element("")], 0
    for tag in tags.finditer(text):
        open_tags[-1].text += text[at : tag.start()]
        at = tag.end()
        if not tag[1]:
            open_tags.append(_Element(tag[2]))
            open_tags[-2].inner.append(open_tags[-1])
        elif len(open_tags) > 1 and open_tags[-1].key == tag[2]:
            open_tags.pop()
        else:
            return None
        if len(open_tags) > MAX_DEPTH:
            return None
    open_tags[-1].text += text[at:]
    return open_tags[0] if len(open_tags) == 1 else None


def _value_of(element: _Element, schema: Any, root: Mapping[str, Any]) -> Any:
    allowed = kinds(schema, root)
    if not element.inner:
        empty = not element.text.strip() and "string" not in allowed
        if empty and allowed & {"object", "array"}:
            return [] if "array" in allowed else {}
        return json.loads(json_of_text(element.text, allowed))
    listed = all(inner.key == "item" for inner in element.inner) and ("array" in allowed or "object" not in allowed)
    form = _option(schema, "array" if listed else "object", root)
    if listed:
        return [_value_of(inner, form.get("items"), root) for inner in element.inner]
    properties = form.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    return {inner.key: _value_of(inner, schemas.get(inner.key), root) for inner in element.inner}


def _option(schema: Any, kind: str, root: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """The part of a schema that is about a type."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return {}
    ways = [way for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list) for way in schema[name]]
    fitting = (way for way in ways if kind in kinds(way, root))
    option = next(fitting, None)
    return schema if option is None else _option(option, kind, root, depth + 1)
