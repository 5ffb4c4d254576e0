"""Readers of one call of a function, for each way in which dialects write calls.

A reader gets the text behind the beginning of a call, piece by piece. name: once it is known; ended: the call is
complete; failed: it is none, or broken. rest: the text behind it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from powerinfer.text.call_values import Value, json_of_elements, json_of_text, json_of_value, kinds
from powerinfer.text.marks import HOLE, MISMATCH, MORE, follow, follow_any, overlap
from powerinfer.text.tokenizer import valid_unicode
from powerinfer.text.tools import NAME

if TYPE_CHECKING:
    from powerinfer.text.tool_calls import ToolFormat

_MAX_KEY = 256  # characters, white space included


class CallReader(ABC):
    """Base of all readers: text that waits, and pieces of the arguments as JSON."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self.name: str | None = None
        self.ended = self.failed = False
        self._text = ""  # not used yet
        self._pieces: list[str] = []  # of the arguments
        self._step: Callable[[], bool]
        self._last = False

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

    def finish(self) -> None:
        """No text follows, though the call has not ended: what is open is closed, if the name is known."""
        self._last = True
        self.push("")
        if self.name is not None and not self.ended:
            self._complete()
            self.ended = True

    @abstractmethod
    def _complete(self) -> None:
        """Close the arguments."""


_KEY = re.compile(r'\s*,?\s*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)')
_PART_OF_KEY = re.compile(r'\s*,?\s*(?:"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*)?)?)?')
_CLOSED = re.compile(r"\s*\}")
_NAME_KEYS = frozenset(("name", "tool_name"))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | {"id", "type", "tool_call_id"}


class ObjectReader(CallReader):
    """{"name": ..., "arguments": {...}}, with its keys in any order, or {NAME: {...}}."""

    def __init__(self, form: ToolFormat) -> None:
        super().__init__(form)
        self._names, self._arguments = _NAME_KEYS | {form.name_key}, _ARGUMENT_KEYS | {form.arguments_key}
        self._key = ""
        self._value = Value()
        self._has_arguments = self._has_value = self._streamed = False
        self._step = self._read_brace

    def _read_brace(self) -> bool:
        self._text, self._step = self._text[1:], self._read_key
        return True

    def _read_key(self) -> bool:
        text = self._text
        match = _KEY.match(text) or _CLOSED.match(text)
        if match is None or match.end() > _MAX_KEY:
            self.failed = len(text) > _MAX_KEY or _PART_OF_KEY.fullmatch(text) is None
            return False
        self._text = text[match.end() :]
        if match.re is _CLOSED:
            self._end()
            return False
        try:
            self._key = valid_unicode(json.loads(match[1], strict=False))
        except ValueError:
            self._key = ""
        if self._form.named_by_key and self.name is None:
            self.name, self._key = self._key, self._form.arguments_key
            self.failed = not self.name
        elif self.name is None:
            self.failed = self._key not in _KEYS | self._names | self._arguments
        self._value = Value(self._form.quote)
        self._has_value = self._key in self._arguments and not self._has_arguments
        self._has_arguments = self._has_arguments or self._has_value
        self._streamed = self._has_value and self._text.startswith("{")
        self._collected: list[str] = []
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        written = self._value.push(self._text)
        self._text = self._value.rest if self._value.ended else ""
        self._use(written)
        if self._value.ended:
            self._value_ends()
        return self._value.ended

    def _use(self, written: str) -> None:
        """Arguments in an object are used as they come; what counts only as a whole is collected."""
        if self._streamed:
            self._pieces.append(written)
        elif self._has_value or (self._key in self._names and self.name is None):
            self._collected.append(written)

    def _value_ends(self) -> None:
        self._step = self._read_key
        if not self._collected:
            return
        text = "".join(self._collected)
        value = json.loads(text)
        if not self._has_value:
            self.failed = not (isinstance(value, str) and value)
            self.name = None if self.failed else valid_unicode(value)
        elif value is None:
            self._has_arguments = False
        else:
            self._pieces.append(_arguments_of(text))

    def _complete(self) -> None:
        if self._step == self._read_value:
            self._use(self._value.finish())
            self._value_ends()
        if not self._has_arguments:
            self._pieces.append("{}")

    def _end(self) -> None:
        self.ended, self.failed = self.name is not None, self.name is None
        if not self._has_arguments:
            self._pieces.append("{}")


def _arguments_of(text: str) -> str:
    """The JSON text of arguments that are no object; some models write an object's JSON text in a string."""
    value = json.loads(text)
    if isinstance(value, str):
        try:
            if isinstance(json.loads(value, strict=False), dict):
                reader = Value()
                return valid_unicode(reader.push(value.strip()) + reader.finish())
        except (ValueError, RecursionError):
            pass
    try:
        return json_of_value(value)
    except ValueError:  # numbers beyond those of floats, which JSON has
        return text


class NamedReader(CallReader):
    """The function's name, a mark, and the arguments, which subclasses read: here JSON."""

    def __init__(self, form: ToolFormat) -> None:
        super().__init__(form)
        mark = form.name_end
        _, hole, behind = mark.partition(HOLE)
        self._marks = (mark, behind) if hole and behind.strip() else (mark,)
        self._step = self._read_name

    def _read_name(self) -> bool:
        match = _NAME_BEGIN.match(self._text)
        assert match is not None
        name, text = match[1], self._text[match.end() :]
        if self._form.name_begin and name.startswith(self._form.name_begin):
            name = name.removeprefix(self._form.name_begin)
        if len(name) > _MAX_NAME:
            self.failed = True
            return False
        if not text and not self._last:
            return False
        at = follow_any(self._marks, text) if self._marks[0].strip() else 0
        if at == MORE and not self._last:
            self.failed = len(text) > _MAX_KEY
            return False
        if at < 0 or not NAME.fullmatch(name):
            self.failed = True
            return False
        self.name, self._text = name, text[at:]
        self._begin()
        return True

    def _begin(self) -> None:
        """The arguments begin."""
        self._value = Value(self._form.quote)
        self._step = self._expect_value

    def _expect_value(self) -> bool:
        text = self._text.lstrip()
        if not text:
            return False
        if text[0] not in '{["':
            self._complete()
            self.ended = True
            return False
        self._collected: list[str] | None = None if text[0] == "{" else []
        self._text, self._step = text, self._read_value
        return True

    def _read_value(self) -> bool:
        self._use(self._value.push(self._text))
        self._text = self._value.rest if self._value.ended else ""
        if self._value.ended:
            self._value_ends()
        self.ended = self._value.ended
        return False

    def _use(self, written: str) -> None:
        (self._pieces if self._collected is None else self._collected).append(written)

    def _value_ends(self) -> None:
        if self._collected is not None:
            self._pieces.append(_arguments_of("".join(self._collected)))

    def _complete(self) -> None:
        if self._step == self._read_value:
            self._use(self._value.finish())
            self._value_ends()
        else:
            self._pieces.append("{}")


class KeywordsReader(NamedReader):
    """A call in Python: NAME(a=1, b="x")."""

    def _begin(self) -> None:
        self._value = Value(keywords=True)
        self._collected, self._step = None, self._read_value


class TaggedReader(NamedReader):
    """Each argument between marks, as plain text or JSON, of which the function's schema decides."""

    def _begin(self) -> None:
        form = self._form
        tool = next((tool for tool in form.tools if tool.name == self.name), None)
        self._root = tool.parameters if tool is not None else {}
        self._keys = 0
        self._key = ""
        self._key_mark = re.split(r"[\s\0]", form.key_end.strip(), maxsplit=1)[0]  # that a key ends with
        self._step = self._expect_key

    def _expect_key(self) -> bool:
        at = follow(self._form.key_begin, self._text)
        if at == MORE or (at == len(self._text) and not self._last):
            return False
        if at == MISMATCH or (self._form.nested and self._text.startswith("/", at)):
            self._complete()
            self.ended = True
            return False
        self._text, self._step = self._text[at:], self._read_key
        return True

    def _read_key(self) -> bool:
        text = self._text
        end = text.find(self._key_mark)
        if end < 0 or end > _MAX_KEY:
            self.failed = len(text) > _MAX_KEY
            return False
        words: list[str] = []
        at = follow(self._form.key_end, text[end:], words)
        if at == MORE:
            self.failed = len(text) > 2 * _MAX_KEY
            return False
        if at == MISMATCH:
            self.failed = True
            return False
        self._key, self._text = text[:end].strip(), text[end + at :]
        self._allowed = self._types(words[-1] if words else None)
        self._closing = self._form.value_end.strip().replace(HOLE, self._key)
        self._pieces.append(("{" if not self._keys else ", ") + json.dumps(self._key, ensure_ascii=False) + ": ")
        self._keys += 1
        self._streamed = self._allowed == {"string"} and not self._form.value_marks[0]
        if self._streamed:
            self._pieces.append('"')
        self._collected = []
        self._step = self._expect_text
        return True

    def _types(self, word: str | None) -> frozenset[str]:
        properties = self._root.get("properties")
        self._schema = properties.get(self._key) if isinstance(properties, dict) else None
        allowed = kinds(self._schema, self._root)
        if word is None or not self._form.type_words:
            return allowed
        plain = self._form.type_words[0][1]  # the word for texts
        return frozenset(("string",)) if word == plain else allowed - {"string"} or _NO_TEXT

    def _expect_text(self) -> bool:
        """A line break that the dialect has before values is none of them."""
        if self._form.key_end.endswith("\n"):
            spaces = self._text[: len(self._text) - len(self._text.lstrip(" \t\r"))]
            if not self._text[len(spaces) :] and not self._last:
                return False
            if self._text[len(spaces) :].startswith("\n"):
                self._text = self._text[len(spaces) + 1 :]
        self._step = self._read_text
        return True

    def _read_text(self) -> bool:
        text, mark = self._text, self._closing
        lines = self._form.value_end.startswith("\n")  # a line break before the mark is none of the value, either
        at = text.find(mark)
        if at >= 0:
            value, self._text = text[:at], text[at + len(mark) :]
            self._add(value.removesuffix("\n") if lines else value)
            self._value_ends()
            self._step = self._expect_key
            return True
        waiting = overlap(text, mark)
        if lines and text[: len(text) - waiting].endswith("\n"):
            waiting += 1
        self._add(text[: len(text) - waiting])
        self._text = text[len(text) - waiting :]
        return False

    def _add(self, text: str) -> None:
        if self._streamed:
            self._pieces.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            assert self._collected is not None
            self._collected.append(text)

    def _value_ends(self) -> None:
        assert self._collected is not None
        value, (begin, end) = "".join(self._collected), self._form.value_marks
        if begin and value.startswith(begin):
            self._pieces.append(json.dumps(value[len(begin) :].removesuffix(end), ensure_ascii=False))
        elif self._form.nested and not self._streamed:
            self._pieces.append(json_of_elements(value, self._form.nested, self._schema, self._root))
        else:
            self._pieces.append('"' if self._streamed else json_of_text(value, self._allowed))

    def _complete(self) -> None:
        if self._step in (self._expect_text, self._read_text):
            self._add(self._text)
            self._value_ends()
        self._pieces.append("}" if self._keys else "{}")


_NO_TEXT = frozenset(("object", "array", "integer", "number", "boolean", "null"))
READERS: dict[str, type[CallReader]] = {
    "object": ObjectReader,
    "json": NamedReader,
    "tagged": TaggedReader,
    "keywords": KeywordsReader,
}
"""Readers by the body of a `ToolFormat`."""

_MAX_NAME = 128
_NAME_BEGIN = re.compile(r"\s*([A-Za-z0-9_.-]*)")
