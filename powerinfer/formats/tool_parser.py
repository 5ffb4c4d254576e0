"""The text of an answer, as it comes, turned into text, reasoning and calls of functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from powerinfer.formats.tools import NAME

if TYPE_CHECKING:
    from powerinfer.formats.tool_calls import ToolFormat


@dataclass(frozen=True)
class ToolDelta:
    """A piece of call number `index`. The first piece has id and name; arguments: a piece of JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = str | ToolDelta
"""Text of the answer, or a piece of a call."""


@dataclass(frozen=True)
class Reasoning:
    """Text that a model writes for itself, before its answer."""

    text: str


AnswerDelta = Delta | Reasoning


class AnswerParser(Protocol):
    """Turns the text of an answer into its parts, piece by piece."""

    @property
    def calls(self) -> int:
        """Calls so far."""

    @property
    def ended(self) -> bool:
        """Whether the only call has ended."""

    def push(self, text: str) -> Sequence[AnswerDelta]:
        """What is certain after this piece of the answer."""

    def finish(self, cut: bool = False) -> Sequence[AnswerDelta]:
        """The rest: no text follows. cut: the answer did not end by itself."""


class AnswerFormat(Protocol):
    """How the answers of a model are read."""

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart from the answer."""

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
        """A parser for one answer. new_id: makes the ids of calls."""


class ToolParser:
    """Turns the text of an answer into text and calls, piece by piece, whatever the pieces.

    White space beside calls is dropped. What begins like a call but has no function's name stays text, unless the
    answer was cut off there. If calls are not parallel, the answer ends with the first one, complete or broken; what
    follows it is dropped.
    """

    def __init__(self, form: ToolFormat, new_id: Callable[[], str]) -> None:
        self._form, self._new_id = form, new_id
        self._text = ""  # not decided yet
        self._raw = ""  # the beginning of calls, and ...
        self._seen = ""  # ... of a call, until its name is known: text, if it is no call after all
        self._step = self._in_text
        self._call = _Call(form)
        self._spoken = False  # there was text
        self._last = self._cut = False
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

    def finish(self, cut: bool = False) -> list[Delta]:
        """The rest: no text follows. cut: the answer did not end by itself.

        A call that was cut off stays incomplete; without a function's name it is dropped.
        """
        self._last, self._cut = True, cut
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
        cut_mark = self._cut and (form.required or self.calls > 0)  # a `<` of mere text is no beginning
        held = 0 if self._last and not cut_mark else max(overlap(text, mark) for mark in form.begins)
        say = text[: len(text) - held].rstrip()
        if self._last and not self.calls and not cut_mark:
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
            return self._no_call(unfinished=not rest)
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text, self._call, self._step = rest, _Call(self._form), self._in_call
        return True

    def _in_call(self) -> bool:
        call, text = self._call, self._text
        known, self._text = call.name is not None, ""
        call.push(text)
        if call.name is None:
            self._seen += text
            return self._no_call(unfinished=not call.failed) if call.failed or self._last else False
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

    def _no_call(self, unfinished: bool) -> bool:
        """The beginning was none: it is text, and so is what follows, unless a call begins in it.

        unfinished: it might have become a call, which is dropped if the answer was cut off there.
        """
        if self._cut and unfinished:
            self._raw = self._seen = self._text = ""
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
        elif self._cut and rest and end.startswith(rest):  # a part of the end
            self._text, self._step = "", self._in_text
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
            self.failed = NAME.fullmatch(name) is None
            self.name = None if self.failed else name
            self._text, self._key, self._step = rest.lstrip(), "arguments", self._at_value
            return not self.failed
        head = name[: len(name) - overlap(name, self._mark)]
        self.failed = bool(head) and NAME.fullmatch(head) is None
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


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with, and is longer than."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
