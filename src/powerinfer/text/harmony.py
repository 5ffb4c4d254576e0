"""Answers in gpt-oss's format, harmony (github.com/openai/harmony): messages on channels, told apart as they come.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

A message has a header, up to `<|message|>`: who writes it, `<|channel|>` with the channel's name, and `to=` with the
recipient, before the channel or after it; then the type of its content. The prompt ends with `<|start|>assistant`.
`analysis` is reasoning; `final`, and `commentary` to nobody or to `assistant`, are the answer; a message to
`functions.NAME` is a call. Of two channels in a header the last one counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from powerinfer.text.call_values import Value
from powerinfer.text.marks import overlap
from powerinfer.text.tool_parser import AnswerDelta, Reasoning, ToolDelta
from powerinfer.text.tools import NAME

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
TO = "to=functions."
CHANNELS = (START, CHANNEL, MESSAGE)  # in the template of every model that has the format
THOUGHT = f"{CHANNEL}analysis{MESSAGE}"

CALL_BEGINS = re.compile(r"(?:<\|start\|>assistant|<\|channel\|>\w+)\s*to=functions\.|\A\s*to=functions\.")
"""The beginning of a call in the text of an answer, up to the function's name; the second only where that begins."""

_CLOSING = (END, CALL, RETURN, START, CHANNEL)  # of a message's text
_ROLE = re.compile(r"\s*<\|start\|>\s*([^\s<]*)")
_RECIPIENT = re.compile(r"(?:^|\s|<\|start\|>assistant|<\|channel\|>\w+)to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_UNMARKED = re.compile(r"to=[^\s<]*\s*\w*\s*(?:<.*)?", re.DOTALL)  # a header that begins with the recipient
_LONGEST = 512  # characters of a header


class HarmonyParser:
    """Turns the text of an answer into its parts, piece by piece, whatever the pieces.

    Text without a header, as a grammar may demand it, is the answer, however short. A header that was cut off is
    dropped, and so are messages that the model writes in the name of others. Messages of one kind are separated by an
    empty line. If calls are not parallel, the answer ends with the first one. may_call: messages to functions are
    calls; else they are reasoning, as those to the model's own tools are.
    """

    def __init__(self, new_id: Callable[[], str], parallel: bool = True, may_call: bool = True) -> None:
        self._new_id, self._parallel, self._may_call = new_id, parallel, may_call
        self._text = ""  # not decided yet
        self._step = self._read_header
        self._say = self._answer
        self._deltas: list[AnswerDelta] = []
        self._continued: dict[type, bool] = {}  # kinds that there was text of, and whether in this message
        self._value = Value()  # the arguments of a call
        self._called = False  # this message is a call, ...
        self._arguments = False  # ... and has some text
        self._last = self._cut = False
        self.calls = 0  # so far
        self.ended = False  # after the only call

    thinks = False  # reasoning is counted by its text

    def push(self, text: str) -> list[AnswerDelta]:
        """Deltas that are certain after this piece of the answer."""
        self._text += text
        while self._step():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, cut: bool = False) -> list[AnswerDelta]:
        """The rest: no text follows. cut: the answer did not end by itself; a call stays incomplete."""
        self._last, self._cut = True, cut
        deltas = self.push("")
        if not cut:
            self._close()
        return deltas + self._deltas

    # A step uses some of the text; False: it waits for more.

    def _read_header(self) -> bool:
        text = self._text
        at = text.find(MESSAGE)
        if 0 <= at <= _LONGEST and (not text[:at].strip() or self._begins_header(text[:at].lstrip())):
            self._text = text[at + len(MESSAGE) :]
            self._open(text[:at])
            return True
        if self._may_be_header(text):
            if not self._last:
                return False
            if self._cut or START in text or CHANNEL in text or not text.strip():
                self._text = ""
                return False
        mark = next((mark for mark in (START, CHANNEL) if text.lstrip().startswith(mark)), "")
        self._text = text.lstrip()[len(mark) :] if mark else text  # one that never ends
        self._open("")
        return True

    def _may_be_header(self, text: str) -> bool:
        """Whether a header begins like this."""
        if len(text) - overlap(text, MESSAGE) > _LONGEST:
            return False
        begin = text.lstrip()
        return self._begins_header(begin) or any(mark.startswith(begin) for mark in (START, CHANNEL, MESSAGE, "to="))

    @staticmethod
    def _begins_header(text: str) -> bool:
        """Whether it is the beginning of nothing else."""
        return text.startswith((START, CHANNEL)) or _UNMARKED.fullmatch(text) is not None

    def _open(self, header: str) -> None:
        """A message begins."""
        self._step = self._read_text
        self._called = self._arguments = False
        self._continued = dict.fromkeys(self._continued, False)
        header = header.rpartition(END)[2]
        role, to = _ROLE.search(header), _RECIPIENT.findall(header)
        channel = next(reversed(_CHANNEL.findall(header)), "")
        recipient = "" if not to or to[-1] == "assistant" else to[-1]
        name = recipient.removeprefix("functions.")
        if role is not None and role[1] not in ("", "assistant"):
            self._say = self._nothing
        elif self._may_call and name != recipient and NAME.fullmatch(name):
            self._say, self._called, self._value = self._argue, True, Value()
            self._deltas.append(ToolDelta(self.calls, self._new_id(), name, ""))
            self.calls += 1
        elif recipient or channel == "analysis":
            self._say = self._reason
        else:
            self._say = self._answer

    def _read_text(self) -> bool:
        text = self._text
        marks = [(at, mark) for mark in _CLOSING if (at := text.find(mark)) >= 0]
        if not marks:
            waiting = 0 if self._last else max(overlap(text, mark) for mark in _CLOSING)
            self._say(text[: len(text) - waiting])
            self._text = text[len(text) - waiting :]
            return False
        at, mark = min(marks)
        self._say(text[:at])
        self._text = text[at + len(mark) * (mark not in (START, CHANNEL)) :]
        self.ended = self._called and not self._parallel
        self._close()
        self._step = self._read_end if self.ended else self._read_header
        return True

    def _read_end(self) -> bool:
        self._text = ""
        return False

    def _close(self) -> None:
        """A message ends."""
        if self._called and not self._value.ended:
            self._add(self._value.finish() if self._arguments else "{}")
        self._called = False

    # ---- what a message's text is

    def _answer(self, text: str) -> None:
        if text:
            self._deltas.append(self._separator(str) + text)

    def _reason(self, text: str) -> None:
        if text:
            self._deltas.append(Reasoning(self._separator(Reasoning) + text))

    def _separator(self, kind: type) -> str:
        """Separator between a message and the one before of its kind."""
        first = self._continued.get(kind) is False
        self._continued[kind] = True
        return "\n\n" if first else ""

    def _argue(self, text: str) -> None:
        self._arguments = self._arguments or bool(text and not text.isspace())
        if not self._value.ended:
            self._add(self._value.push(text))

    def _add(self, arguments: str) -> None:
        if arguments:
            self._deltas.append(ToolDelta(self.calls - 1, None, None, arguments))

    def _nothing(self, text: str) -> None:
        pass
