"""The text of an answer, as it comes, turned into text, reasoning and calls of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from powerinfer.text.call_readers import READERS
from powerinfer.text.marks import MISMATCH, MORE, follow, follow_any, overlap

if TYPE_CHECKING:
    from powerinfer.text.tool_calls import ToolFormat


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
    def thinks(self) -> bool:
        """Whether the text so far ends within reasoning, as far as that is known."""

    @property
    def ended(self) -> bool:
        """Whether the only call has ended."""

    def push(self, text: str) -> Sequence[AnswerDelta]:
        """Deltas that are certain after this piece of the answer."""

    def finish(self, cut: bool = False) -> Sequence[AnswerDelta]:
        """The rest: no text follows. cut: the answer did not end by itself."""


class AnswerFormat(Protocol):
    """Reader of the answers of a model."""

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
        self._text = form.prompt_end  # not decided yet
        self._raw = ""  # the beginning of calls, and ...
        self._consumed: list[str] = []  # ... of a call, until its name is known: text, if it is no call after all
        self._step = self._read_text
        self._call = READERS[form.body](form)
        self._begun = False  # in the section of calls
        self._closed = False  # behind the end of a call
        self._spoken = False  # there was text
        self._last = self._cut = False
        self._deltas: list[Delta] = []
        self.calls = 0  # with a name, so far
        self.ended = False  # after the only call

    thinks = False  # its text is calls and answer

    def push(self, text: str) -> list[Delta]:
        """Deltas that are certain after this piece of the answer."""
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

    def _read_text(self) -> bool:
        first = not self._spoken and not self.calls
        if first and (more := self._read_beginning()) is not None:
            return more
        marks = (*self._form.begins, *self._form.dropped)
        places = [at for mark in marks if (at := self._text.find(mark)) >= 0]
        return self._read_mark(min(places)) if places else self._say_certain()

    def _read_beginning(self) -> bool | None:
        """A thought, or a call without a mark, at the beginning of an answer; None: it begins with neither."""
        lead = len(self._text) - len(self._text.lstrip())
        rest = self._text[lead:]
        at = follow(_THOUGHT, rest) if rest else MISMATCH
        if at >= 0:
            self._say(self._text[: lead + at])
            self._text, self._step = rest[at:], self._read_thought
            return True
        if at == MORE and not self._last:
            return False
        return self._open(0, lead) if self._form.bare and rest.startswith("{") else None

    def _read_mark(self, at: int) -> bool:
        """The text has a mark at that place: calls begin, or it is left out."""
        text, dropped = self._text, self._form.dropped
        if not self._last and any(mark.startswith(text[at:]) for mark in dropped):
            return False
        mark = next((mark for mark in dropped if text.startswith(mark, at)), None)
        if mark is None:
            return self._open(at, at)
        self._say(text[:at])
        self._text = text[at + len(mark) :]
        return True

    def _say_certain(self) -> bool:
        """Say the text but for what may become a mark, and white space that may belong to a call."""
        form, text = self._form, self._text
        cut_mark = self._cut and (form.required or self.calls > 0)  # a `<` of mere text is no beginning
        marks = (*form.begins, *form.dropped)
        waiting = 0 if self._last and not cut_mark else max(overlap(text, mark) for mark in marks)
        say = text[: len(text) - waiting].rstrip()
        if self._last and not self.calls and not cut_mark:
            say = text
        elif len(text) - waiting - len(say) > _MAX_SPACE:
            say = text[: len(text) - waiting - _MAX_SPACE]
        self._say(say)
        self._text = "" if self._last else text[len(say) :]
        return False

    def _read_thought(self) -> bool:
        """Read a thought of a model whose template has none: it is text, and what it names is no call."""
        before, end, rest = self._text.partition(_THOUGHT_END)
        waiting = 0 if end or self._last else overlap(before, _THOUGHT_END)
        self._say(before[: len(before) - waiting] + end)
        self._text = rest if end else before[len(before) - waiting :]
        self._step = self._read_text if end else self._read_thought
        return bool(end)

    def _open(self, begin: int, end: int) -> bool:
        """The text before `begin` is certain; between `begin` and `end` is white space before calls."""
        before = self._text[:begin].rstrip()
        self._say(before)
        self._raw, self._text = self._text[len(before) : end], self._text[end:]
        self._consumed, self._step, self._begun = [], self._expect_section, False
        return True

    def _use(self, length: int) -> None:
        """Take a part of the text as belonging to the beginning of calls."""
        self._raw, self._text = self._raw + self._text[:length], self._text[length:]

    def _expect_section(self) -> bool:
        form = self._form
        at = follow_any(form.sections, self._text) if form.sections else 0
        if at == MORE and not self._last and len(self._text) <= _MAX_SPACE:
            return False
        self._begun = at > 0
        self._use(max(at, 0))
        self._step = self._expect_call
        return True

    def _expect_call(self) -> bool:
        """Read the text between the beginning and a call."""
        form = self._form
        lead = len(self._text) - len(self._text.lstrip(" \t\r\n[" if form.listed else " \t\r\n"))
        rest = self._text[lead:]
        at = follow_any(form.openings, rest) if form.openings else 0 if rest else MORE
        if at == MORE and not self._last and len(self._text) <= _MAX_SPACE:
            return False
        if at >= 0 and form.body == "object":
            behind = rest[at:].lstrip()
            if not behind and not self._last:
                return False
            at = len(rest) - len(behind) if behind.startswith("{") else MISMATCH if behind else MORE
        if at < 0:
            return self._no_call(unfinished=at == MORE)
        self._use(lead + at)
        self._call, self._step = READERS[form.body](form), self._read_call
        return True

    def _read_call(self) -> bool:
        call, text = self._call, self._text
        has_name, self._text = call.name is not None, ""
        call.push(text)
        if (self._last and not self._cut) or (call.failed and call.name is not None):
            call.finish()
        if call.name is None:
            self._consumed.append(text)
            return self._no_call(unfinished=not call.failed) if call.failed or self._last else False
        if not has_name:
            self._deltas.append(ToolDelta(self.calls, self._new_id(), call.name, ""))
            self.calls += 1
        if arguments := call.take():
            self._deltas.append(ToolDelta(self.calls - 1, None, None, arguments))
        if not call.ended:
            return False
        if not self._form.parallel:
            self.ended, self._step = True, self._read_end
            return True
        self._text, self._closed, self._step = call.rest, False, self._read_text if call.failed else self._expect_next
        return True

    def _read_end(self) -> bool:
        self._text = ""
        return False

    def _no_call(self, unfinished: bool) -> bool:
        """The beginning was none: it is text, and so is what follows, unless a call begins in it.

        unfinished: it might have become a call, which is dropped if the answer was cut off there.
        """
        if self._cut and unfinished:
            self._raw, self._text, self._consumed = "", "", []
        text = "".join([self._raw, *self._consumed, self._text])
        begin = len(text) - len(text.lstrip())
        begin += max((len(mark) for mark in self._form.begins if text.startswith(mark, begin)), default=0)
        self._say(text[:begin])
        self._spoken = True
        self._raw, self._consumed, self._text, self._step = "", [], text[begin:], self._read_text
        return True

    def _expect_next(self) -> bool:
        form, rest = self._form, self._text.lstrip()
        if not rest and not self._last and len(self._text) <= _MAX_SPACE:
            return False
        at, waits = self._call_end(rest)
        if at >= 0:
            self._text, self._closed = rest[at:], True
            self._step = self._expect_next if self._begun or form.bare or form.end else self._read_text
            return True
        if rest and rest[0] in self._separators():
            self._text = rest[1:]
            return True
        next_call = self._begins_next_call(rest)
        if next_call >= 0:
            return self._next_call(rest, 0)
        at = follow(form.end, rest) if form.end else MISMATCH
        if at >= 0:
            self._text, self._step = rest[at:], self._read_text
            return True
        waits = waits or MORE in (next_call, at)
        if waits and not self._last and len(rest) <= _MAX_SPACE:
            self._text = rest
            return False
        self._text = "" if waits and self._cut else rest
        self._step = self._read_text
        return True

    def _call_end(self, rest: str) -> tuple[int, bool]:
        """The length of the mark that ends a call, as of `follow`; whether more text could make it one."""
        mark = self._form.call_end
        if not mark or self._closed:
            return MISMATCH, False
        at = follow(mark, rest)
        waits = at == MORE
        if at == MISMATCH or self._last:
            at = max(at, follow(mark.strip().partition("\n")[0], rest))  # some models leave out the rest
        return at, waits or at == MORE

    def _separators(self) -> str:
        """Characters of which one may follow a call."""
        return ",]" if self._form.listed else ",;" if self._form.bare else ""

    def _begins_next_call(self, rest: str) -> int:
        """Whether another call begins: a number from 0 on, or as of `follow`."""
        form = self._form
        if rest[:1] == "{" and form.body == "object" and (not form.openings or not self._closed):
            return 0
        at = follow_any(form.openings, rest) if self._begun and form.openings else MISMATCH
        if at < 0 and form.body == "keywords" and self._begun and rest and (rest[0].isalpha() or rest[0] == "_"):
            return 0
        return at

    def _next_call(self, rest: str, at: int) -> bool:
        self._raw, self._consumed, self._text, self._step = "", [], rest[at:], self._expect_call
        if rest.startswith("{") and self._form.openings:  # without another beginning
            self._call, self._step = READERS[self._form.body](self._form), self._read_call
        return True

    def _say(self, text: str) -> None:
        if text:
            self._spoken = self._spoken or not text.isspace()
            self._deltas.append(text)


_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_MAX_SPACE = 1024  # characters of white space that may belong to a call behind them
