"""Thoughts: what a model writes for itself before its answer, between two marks.

    <think>
    The sky is blue because ...
    </think>

    Because air scatters blue light.

The marks, and the variables that turn thinking on and off, are read off the model's chat template: a history with a
thought is rendered, and the marks are what the template writes around the thought. Templates that drop earlier thoughts
are searched for marks that are known. Whether a prompt has begun the thought already is seen at its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from powerinfer.errors import ModelError, RequestError
from powerinfer.text import harmony
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.marks import overlap
from powerinfer.text.tool_parser import AnswerDelta, AnswerFormat, AnswerParser, Reasoning

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Degrees of thinking, from the least."""

NO_EFFORT = ("none", "no_think")
"""Values of reasoning_effort for no thinking: OpenAI's, and Hunyuan's."""

MAX_MARK = 96  # characters
SECONDS = 2.0  # of processor time for reading a template

_SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning": (True, False),
    "thinking_mode": ("enabled", "disabled"),
}
"""Variables of templates that turn thinking on and off, with the values that do so."""

_KEEP_VARIABLES: Mapping[str, bool] = {
    "preserve_thinking": True,
    "keep_past_thinking": True,
    "clear_thinking": False,
    "drop_thinking": False,
    "truncate_history_thinking": False,
}
"""Variables of templates that show the thoughts of earlier turns, with the value that does so."""

_BUDGETS = ("thinking_budget", "reasoning_budget")  # variables: tokens of a thought

_WORDS = re.compile(r"think|reason|thought|inner_prefix", re.IGNORECASE)  # in every template of a model that thinks
_MARK = re.compile(r"<[^<>\s]{1,40}>|\[[^\[\]\n]{1,40}\]")


@dataclass(frozen=True)
class Thinking:
    """Wishes of a request. on: whether to think; effort: of `EFFORTS`; budget: most tokens of a thought; keep: show the
    model its thoughts of earlier turns. None: as the template has it."""

    on: bool | None = None
    effort: str | None = None
    budget: int | None = None
    keep: bool | None = None


@dataclass(frozen=True)
class Thoughts:
    """Marks of a model's thoughts, and what its template offers.

    begin, end: marks around a thought; answer: marks around what follows it, "" if there are none; alone: the mark that
    an answer without a thought begins with. switches: variables
    with their values for on and off; efforts: values of `reasoning_effort` that the template takes; budget: the
    variable for the most tokens of a thought, "" if there is none; kept: variables, with the value that shows the
    thoughts of earlier turns. channels: they are harmony's, which has a parser of its own.
    """

    begin: str
    end: str
    answer: tuple[str, str] = ("", "")
    alone: str = ""
    switches: tuple[tuple[str, Any, Any], ...] = ()
    efforts: tuple[str, ...] = ()
    budget: str = ""
    keep_variables: tuple[tuple[str, bool], ...] = ()
    channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return tuple(text for text in (self.begin, self.end, *self.answer, self.alone) if text)

    def variables(self, wanted: Thinking) -> dict[str, Any]:
        """Variables for the template."""
        chosen: dict[str, Any] = {}
        on = wanted.on
        if wanted.effort is not None and on is None:
            on = True
        if on is not None:
            chosen |= {name: values[0] if on else values[1] for name, *values in self.switches}
        graded = on and not self.switches and any(value in NO_EFFORT for value in self.efforts)
        effort = self._effort(wanted.effort or ("medium" if graded else None), on)
        if effort is not None:
            chosen["reasoning_effort"] = effort
        if self.budget and wanted.budget is not None:
            chosen[self.budget] = wanted.budget
        if wanted.keep is not None:
            chosen |= {name: shows == wanted.keep for name, shows in self.keep_variables}
        return chosen

    def _effort(self, wanted: str | None, on: bool | None) -> str | None:
        """The value of the template's that comes nearest from below."""
        if on is False:
            least = [value for value in self.efforts if value in NO_EFFORT] or [*self.efforts[:1]]
            return least[0] if least else None
        if wanted not in EFFORTS:
            return None
        place = EFFORTS.index(wanted)
        efforts = [value for value in self.efforts if value in EFFORTS]
        lower = [value for value in efforts if EFFORTS.index(value) <= place]
        return lower[-1] if lower else next(iter(efforts), None)

    def opened(self, prompt: str) -> bool | None:
        """Whether a prompt has begun the thought, by its end; False: it has ended it; None: neither."""
        tail = prompt.rstrip()
        if tail.endswith(self.end):
            return False
        return True if tail.endswith(self.begin.rstrip()) else None


class _MarksRow(NamedTuple):
    """Marks of models whose template shows them in prose only, or in a way that renderings do not tell."""

    begin: str
    end: str
    answer: tuple[str, str] = ("", "")
    has: tuple[str, ...] = ()  # in the template; (): its marks


_ROWS = (
    _MarksRow("<|open|>think<|sep|>", "<|close|>think<|sep|>", ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
         ("<|open|>", "<|close|>", "<|sep|>", "think")),  # Kimi K3
    _MarksRow("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ("", "[END FINAL RESPONSE]"),
         ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),  # Apriel
)  # fmt: skip
_COMMON_ROWS = (
    _MarksRow(  # Granite
        "<think>", "</think>", ("<response>", "</response>"), ("<think></think>", "<response></response>")
    ),
    _MarksRow("<think>", "</think>"),
    _MarksRow("<think>", "</think>", has=("</think>",)),
    _MarksRow("[THINK]", "[/THINK]"),
    _MarksRow("<seed:think>", "</seed:think>"),
    _MarksRow("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
         ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>")),
    _MarksRow("<|START_THINKING|>", "<|END_THINKING|>"),
    _MarksRow("<|channel>thought", "<channel|>"),
    _MarksRow("<|inner_prefix|>", "<|inner_suffix|>"),
    _MarksRow("<thinking>", "</thinking>"),
    _MarksRow("<thought>", "</thought>"),
    _MarksRow("<reasoning>", "</reasoning>"),
)  # fmt: skip


def read_thoughts(template: ChatTemplate | None) -> Thoughts | None:
    """The way in which the model with this template thinks; None if it does not. The first time for a template it is
    rendered some
    times, which takes milliseconds."""
    if template is None or _WORDS.search(template.source) is None:
        return None
    return _read(template.source, template.bos, template.eos)


@lru_cache(32)
def _read(source: str, bos: str, eos: str) -> Thoughts | None:
    probe = _ThoughtProbe(ChatTemplate(source, bos, eos, "2026-01-01T00:00:00"))
    switches = tuple((name, *values) for name, values in _SWITCHES.items() if probe.switches(name, *values))
    on = {name: value for name, value, _ in switches}
    efforts = probe.efforts(on)
    if all(mark in source for mark in harmony.CHANNELS):
        return Thoughts(harmony.THOUGHT, harmony.END, switches=switches, efforts=efforts, channels=True)
    common = _row(_COMMON_ROWS, source)
    marks = _row(_ROWS, source) or probe.marks(on) or common
    if marks is None:
        return None
    if common is not None and marks[:2] == common[:2] and not any(marks.answer):
        marks = common  # a history with calls has no answer
    budget = next((name for name in _BUDGETS if probe.switches(name, 512, None)), "")
    keeps = tuple((name, shows) for name, shows in _KEEP_VARIABLES.items() if re.search(rf"\b{name}\b", source))
    alone = probe.alone(marks.answer[0]) if marks.answer[0] else ""
    return Thoughts(marks.begin, marks.end, marks.answer, alone, switches, efforts, budget, keeps)


def _row(rows: Sequence[_MarksRow], source: str) -> _MarksRow | None:
    return next((row for row in rows if all(text in source for text in row.has or (row.begin, row.end))), None)


_USER, _ANSWER, _THOUGHT = "Is it warm there?", "It may well be so", "Let us see about that"
_HISTORY = [{"role": "user", "content": _USER}]
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look_up", "arguments": {"place": "Rome"}}}


class _ThoughtProbe:
    """Renders one template, for as long as that takes little time."""

    def __init__(self, template: ChatTemplate) -> None:
        from powerinfer.text.sandbox import TimeLimit

        self._template, self._limit = template, TimeLimit(SECONDS)

    def text(self, more: Sequence[Mapping[str, Any]] = (), ask: bool = True, **variables: Any) -> str | None:
        """The prompt; None if the template does not make one."""
        if self._limit.reached:
            return None
        try:
            return self._template.render([*_HISTORY, *more], add_generation_prompt=ask, **variables)[0]
        except (RequestError, ModelError):
            return None

    def switches(self, name: str, on: Any, off: Any) -> bool:
        """Whether the prompt depends on a variable."""
        if not re.search(rf"\b{name}\b", self._template.source):
            return False
        texts = self.text(**{name: on}), self.text(**({} if off is None else {name: off}))
        return None not in texts and texts[0] != texts[1]

    def efforts(self, on: Mapping[str, Any]) -> tuple[str, ...]:
        """Values of `reasoning_effort` that are not refused, from the least; where any is written, gpt-oss's three."""
        if not re.search(r"\breasoning_effort\b", self._template.source):
            return ()
        other = self.text(**on, reasoning_effort="enormous")
        if other is not None and "enormous" in other:
            return "low", "medium", "high"
        return tuple(value for value in (*NO_EFFORT, *EFFORTS) if self.text(**on, reasoning_effort=value) is not None)

    def marks(self, on: Mapping[str, Any]) -> _MarksRow | None:
        """Marks around the thought in a history."""
        for extra in ({}, {"tool_calls": [_CALL]}):
            thought = dict.fromkeys(("reasoning_content", "thinking", "reasoning"), _THOUGHT)
            turn = {"role": "assistant", "content": "" if extra else _ANSWER, **extra}
            text = self.text([{**turn, **thought}], ask=False, **on)
            if text is not None and text.count(_THOUGHT) == 1:
                before, _, after = text.partition(_THOUGHT)
                row = _marks(self._begin(before, on), after)
                if row is not None:
                    return row
        return None

    def alone(self, opening: str) -> str:
        """The rest of the mark before an answer, of which the prompt may have the beginning."""
        prompt = (self.text() or "").rstrip()
        begun = max(at for at in range(len(opening)) if prompt.endswith(opening[:at].rstrip()))
        return opening[begun:].strip()

    def _begin(self, before: str, on: Mapping[str, Any]) -> str:
        """The mark that the text before a thought ends with."""
        prompts = [text for text in (self.text(), self.text(**on)) if text is not None]
        unbegun = [text for text in prompts if before.startswith(text) and before[len(text) :].strip()]
        if unbegun and _MARK.search(before[len(unbegun[0]) :]):  # the prompt leaves it to the model
            return before[len(unbegun[0]) :].strip()
        marks = list(_MARK.finditer(before))
        return before[marks[-1].start() :].strip() if marks else ""


def _marks(begin: str, after: str) -> _MarksRow | None:
    """The marks, given what follows the thought in a history; None if these cannot be marks."""
    end = _MARK.match(after.lstrip())
    if end is None or not 0 < len(begin) <= MAX_MARK or begin == end[0] or _USER in begin:
        return None
    between, answer, rest = after.lstrip()[end.end() :].partition(_ANSWER)
    if not answer or not between.strip() or len(between.strip()) > MAX_MARK:
        return _MarksRow(begin, end[0])
    closing = _MARK.match(rest.lstrip())
    return _MarksRow(begin, end[0], (between.strip(), closing[0] if closing is not None else ""))


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class ThoughtFormat:
    """Answers that a thought may precede; `form` is of what follows, None: plain text.

    opened: the prompt has begun the thought. apart: the thought is reasoning; False: it is text, with its marks.
    """

    thoughts: Thoughts
    opened: bool
    form: AnswerFormat | None = None
    separate: bool = True

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart from the answer."""
        return self.separate

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
        """A parser for one answer. new_id: makes the ids of calls."""
        inner = None if self.form is None else self.form.parser(new_id)
        return ThoughtParser(self.thoughts, self.opened, inner, self.separate)


class ThoughtParser:
    """Turns the text of an answer into its parts, piece by piece, whatever the pieces: thoughts, and what the parser
    `inner` makes of the text behind them.

    A thought has no white space around it. One that does not end is reasoning to the end of the answer. Where it was
    cut off in a mark, the part of the mark is dropped.
    """

    def __init__(self, thoughts: Thoughts, opened: bool, inner: AnswerParser | None, separate: bool = True) -> None:
        self._begin, self._end = thoughts.begin, thoughts.end
        self._openings = [mark for mark in (thoughts.answer[0], thoughts.alone) if mark]
        # tokens, which no text about them spells: a thought may begin anywhere, and an end without one is nothing
        tokens = [self._begin, self._end] if self._begin.startswith("<|") else []
        self._marks = [mark for mark in (thoughts.answer[1], *tokens) if mark]  # in an answer
        self._inner, self._separate = inner, separate
        self._text = ""  # not decided yet
        self._spaces = ""  # of a thought, which are dropped if it ends with them
        self._thought = self._thoughts = False  # there was some text of this thought, of any
        self._behind = False  # a thought has ended
        self._step = self._begun if opened else self._expect_thought
        self._deltas: list[AnswerDelta] = [f"{self._begin}\n"] if opened and not separate else []
        self._last = self._cut = False

    @property
    def calls(self) -> int:
        """Calls so far."""
        return 0 if self._inner is None else self._inner.calls

    @property
    def thinks(self) -> bool:
        """Whether the text so far ends within a thought, and not in what may be a mark."""
        return self._step in (self._begun, self._read_thought) and not self._text.strip()

    @property
    def ended(self) -> bool:
        """Whether the only call has ended."""
        return self._inner is not None and self._inner.ended

    def push(self, text: str) -> Sequence[AnswerDelta]:
        """Deltas that are certain after this piece of the answer."""
        self._text += text
        while self._step():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, cut: bool = False) -> Sequence[AnswerDelta]:
        """The rest: no text follows. cut: the answer did not end by itself."""
        self._last, self._cut = True, cut
        deltas = self.push("")
        return deltas if self._inner is None else [*deltas, *self._inner.finish(cut)]

    # A step uses some of the text; False: it waits for more.

    def _expect_thought(self) -> bool:
        """Read the mark before a thought, or go on with the answer."""
        text = self._text.lstrip()
        if text.startswith(self._begin):
            self._mark(self._text[: len(self._text) - len(text) + len(self._begin)])
            self._text, self._step = text[len(self._begin) :], self._read_thought
            return True
        opening = next(filter(text.startswith, self._openings), None)
        if opening is not None:
            self._text, self._step = text[len(opening) :].lstrip(), self._read_answer
            return True
        waits = not text or any(mark.startswith(text) for mark in (self._begin, *self._openings))
        if waits and not self._last:
            return False
        if self._behind and self._separate:
            self._text = text
        if waits and text and self._cut:
            self._text = ""
        self._step = self._read_answer
        return True

    def _begun(self) -> bool:
        """Read the mark of a thought that the prompt has begun: some models begin it once more."""
        text = self._text.lstrip()
        if self._begin.startswith(text) and text != self._begin and not self._last:
            return False
        if text.startswith(self._begin):
            self._text = text[len(self._begin) :]
        self._step = self._read_thought
        return True

    def _read_thought(self) -> bool:
        at = self._text.find(self._end)
        if at < 0:
            waiting = overlap(self._text, self._end)
            self._think(self._text[: len(self._text) - waiting])
            self._text = self._text[len(self._text) - waiting :]
            if self._last:
                self._think("" if self._cut else self._text)
                self._mark(self._spaces)
                self._text = ""
            return False
        self._think(self._text[:at])
        self._mark(self._spaces + self._end)
        self._text = self._text[at + len(self._end) :]
        self._spaces, self._thought, self._behind, self._step = "", False, True, self._expect_thought
        return True

    def _read_answer(self) -> bool:
        text = self._text
        marks = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if not marks:
            waiting = max((overlap(text, mark) for mark in self._marks), default=0)
            self._say(text[: len(text) - waiting] if self._cut or not self._last else text)
            self._text = "" if self._last else text[len(text) - waiting :]
            return False
        at, mark = min(marks)
        self._say(text[:at])
        self._text = text[at + len(mark) :]
        if mark == self._begin:
            self._mark(mark)
        self._step = self._read_thought if mark == self._begin else self._expect_calls
        return True

    def _expect_calls(self) -> bool:
        """Go on behind a mark in the answer: calls may follow."""
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._step = self._read_answer
        return True

    def _say(self, text: str) -> None:
        """Text of the answer."""
        if text:
            self._deltas += [text] if self._inner is None else self._inner.push(text)

    def _think(self, text: str) -> None:
        """Text of a thought."""
        text = self._spaces + text
        thought = text.rstrip()
        self._spaces = text[len(thought) :] if self._thought or thought or not self._separate else ""
        if not thought:
            return
        if self._separate and not self._thought:
            thought = ("\n\n" if self._thoughts else "") + thought.lstrip()
        self._thought = self._thoughts = True
        self._deltas.append(Reasoning(thought) if self._separate else thought)

    def _mark(self, text: str) -> None:
        """A mark, where thoughts are text."""
        if not self._separate:
            self._deltas.append(text)
