"""Speculation: drafts, guesses of the tokens that follow, which a step computes together with a request's last token.

The model samples at each place as it would without them, and a draft counts while it is the token that was sampled. So
answers stay the same, bit for bit, where a token's logits do not depend on the batch; what is gained is time, and only
while drafts are right often enough for what they cost. A `DraftSource` makes them. `Speculation` decides how many each
request gets: it measures how long steps of that many tokens take and how often drafts are right, and takes the number
with the most expected tokens a second (the utility of Cascade, arXiv 2506.20675, within every step).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from powerinfer.devices.states import UNDO_TOKENS
from powerinfer.kernels.candidates import CANDIDATES
from powerinfer.kernels.candidates import MOST as MOST_CANDIDATES
from powerinfer.progress import Say, silent
from powerinfer.runtime.draft_ahead import AheadTrial
from powerinfer.runtime.request import AnswerRequest, Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.runtime.draft_ahead import BesideThread

MOST = UNDO_TOKENS - 1
"""Drafts of a request in one step, at most."""

_MARGIN = 1.02  # expected gain below which there are no drafts
_SLOPE = 0.02  # what a token more is taken to cost, as a share of a step, where no larger step was measured
_WEIGHT = 4.0  # of what is known of all requests, in drafts, for one of which less is known
_DECAY = 0.95  # of what was counted, with each verified guess
_MEASURED = 7  # newest times of a step's size of which the median counts
_STALE = 512  # steps after which a size's times are forgotten
_PLAIN_EVERY = 128  # steps with drafts after which one has none, so that it is known what these take
_PATIENCE = 48  # steps without drafts after which one is tried again; doubled each time that this brings nothing
_LONGEST_PATIENCE = 16 * _PATIENCE
_REST = 8  # steps without drafts for which that was decided at once, where it can be
_READING = 0.1  # of a step, what a source takes for a token that it lacks, until it was measured
_TRIED = 0.02  # of the time without drafts, what it may take to read what is lacked for a try


class Outlook(NamedTuple):
    """A source's outlook for a request. most: drafts; kind: of its guesses, by which they differ in how often they are
    right; likely: the share that is right, until it was measured; lacks: tokens of the request that the source has to
    compute before; steady: the next tokens change nothing of it."""

    most: int
    kind: str
    likely: float
    lacks: int = 0
    steady: bool = False


class DraftSource(Protocol):
    """Source of drafts. All calls come from the engine's thread, between steps. Errors end drafts, and nothing else."""

    name: str

    def outlook(self, request: AnswerRequest) -> Outlook:
        """Outlook for drafts that follow the request's tokens; must be fast."""
        ...

    def prepare(self, requests: Sequence[AnswerRequest]) -> int:
        """Compute tokens that it lacks, no more than a step may while others wait; their number."""
        ...

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        """Up to so many drafts for each request, whose outlook was asked in this step; none where it still lacks
        tokens."""
        ...

    def observe(self, requests: Sequence[tuple[Request, int, int]]) -> None:
        """The step was computed. requests: each with its first token in the batch, and how many of these are right.
        Nothing of the step can be read from the executor afterwards."""
        ...

    def forget(self, request: AnswerRequest) -> None:
        """The request, of which it may never have heard, has ended, or was put back."""
        ...

    def close(self) -> None:
        """Free what it has."""
        ...


class AheadSource(DraftSource, Protocol):
    """A source that can draft in a thread while a step is computed.

    thread: that one, None: it does not; ready: drafts so far that were there at once.
    """

    thread: BesideThread | None
    ready: int

    def go_on(self, wanted: Sequence[tuple[AnswerRequest, int]], stopped: Callable[[], bool]) -> None:
        """Draft behind the drafts of each request, until it is told to stop."""
        ...


@dataclass
class _Rate:
    """Share of drafts that were right, of those that were verified up to the first wrong one; older ones count less."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int) -> None:
        self.right, self.tried = _DECAY * self.right + right, _DECAY * self.tried + tried

    def share(self, expected: float) -> float:
        return (self.right + _WEIGHT * expected) / (self.tried + _WEIGHT)


@dataclass
class Guessing:
    """Drafts of a request so far, and those of its next step."""

    rates: dict[str, _Rate] = field(default_factory=dict)
    kind: str = ""  # of its drafts in this step
    idle: int = 0  # steps since it had drafts
    rest: int = 0  # steps for which it will have none
    patience: int = _PATIENCE
    retried: bool = False  # its drafts of this step are a try


@dataclass(frozen=True)
class SpeculationStats:
    """Counts of drafts.

    steps: those that had some; drafted, accepted: drafts, and those of them that were right; places: the right ones by
    their place behind a request's last token; tokens: that these steps brought; seconds: that they took, drafts
    included; plain_seconds: that their tokens would have taken without drafts, by steps that had none;
    failed: whether the source failed, so that there are none until the model is loaded again; ahead: of the drafts,
    those that were there at once, made while the step before was computed.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    places: tuple[int, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    failed: int = 0
    ahead: int = 0

    @property
    def gain(self) -> float | None:
        """Speed of the steps with drafts, as a multiple of that without; None: there were none."""
        return self.plain_seconds / self.seconds if self.seconds else None


NO_DRAFTS = SpeculationStats()


class SizeTimes:
    """Seconds of decode steps by their number of tokens, or, where they grow in proportion, of drafting by drafts."""

    def __init__(self, *, proportional: bool = False) -> None:
        self._proportional = proportional
        self._times: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}  # the step at which each size was measured last
        self._steps = 0

    def add(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        self._times.setdefault(tokens, deque(maxlen=_MEASURED)).append(seconds)
        self._last[tokens] = self._steps
        for size in [size for size, last in self._last.items() if self._steps - last > _STALE]:
            if len(self._last) > 1:
                del self._last[size], self._times[size]

    @property
    def largest(self) -> int:
        """The largest size that was measured; 0: none was."""
        return max(self._times, default=0)

    def expect(self, tokens: int) -> float | None:
        """Expected seconds, between those of the nearest sizes that were measured; None: none was."""
        if not self._times:
            return None
        if tokens in self._times:
            return median(self._times[tokens])
        below = max((size for size in self._times if size < tokens), default=None)
        above = min((size for size in self._times if size > tokens), default=None)
        if below is None:
            assert above is not None
            return median(self._times[above]) / (1 + (0 if self._proportional else _SLOPE) * (above - tokens))
        low = median(self._times[below])
        if above is None:
            return low + (tokens - below) * self._slope(below, low)
        return low + (median(self._times[above]) - low) * (tokens - below) / (above - below)

    def _slope(self, largest: int, seconds: float) -> float:
        """Seconds that each token more takes beyond the largest size that was measured."""
        if self._proportional:
            return seconds / largest
        before = max((size for size in self._times if size < largest), default=None)
        if before is None:
            return _SLOPE * seconds
        return max(_SLOPE * seconds, (seconds - median(self._times[before])) / (largest - before))


FEW = 4
"""Drafts of a request in one step, at most, of a source that computes them one after another."""

_SURE = 0.3  # probability below which a further one of these is none


def consecutive_drafts(
    wanted: Sequence[tuple[AnswerRequest, int]],
    can_go_on: Callable[[AnswerRequest, int], bool],
    next_tokens: Callable[[Sequence[AnswerRequest], Mapping[AnswerRequest, list[int]]], Sequence[tuple[int, float]]],
) -> list[list[int]]:
    """Drafts of requests, each of which reads those before it.

    can_go_on: whether a request can have a draft at a place; next_tokens: of requests with their drafts so far, the
    likeliest token of each and its probability, 0 for one that is none.
    """
    counts = dict(wanted)
    drafts: dict[AnswerRequest, list[int]] = {request: [] for request in counts}
    going = list(counts)
    for place in range(max(counts.values())):
        going = [one for one in going if len(drafts[one]) == place < counts[one] and can_go_on(one, place)]
        if not going:
            break
        for request, (token, probability) in zip(going, next_tokens(going, drafts), strict=True):
            if probability >= _SURE or (probability > 0 and not place):
                drafts[request].append(token)
    return [drafts[request] for request, _ in wanted]


def likeliest(logits: NDArray[Any]) -> tuple[int, float]:
    """The most likely token, and its probability, 0 where it is not known. logits: float32 [vocab], or a record of
    `CANDIDATES` at temperature 1."""
    if logits.dtype == CANDIDATES:
        count, total = int(logits["count"]), float(logits["total"])
        if count > MOST_CANDIDATES or not 1 <= total < np.inf:
            return 0, 0.0
        return int(logits["ids"][logits["values"][:count].argmax()]), 1.0 / total
    token = int(logits.argmax())
    weights = np.exp(logits - logits[token])
    return token, 1.0 / float(weights.sum(dtype=np.float64))


class Speculation:
    """Drafts for the requests of an engine, as many as pay, and what is known of them."""

    def __init__(self, source: DraftSource, *, alone: bool = False, say_failed: Say = silent) -> None:
        """alone: only requests that decode alone have drafts; say_failed: told the error of a source that fails."""
        self.source = source
        self._thread: BesideThread | None = getattr(source, "thread", None)  # in which it drafts ahead
        self._trial = AheadTrial()
        self._ready = _Rate()  # drafts that were there at once
        self._ahead = 0
        self._say_failed = say_failed
        self._alone = alone
        self._requests: dict[AnswerRequest, Guessing] = {}
        self._rates: dict[str, _Rate] = {}  # of all requests, by kind
        self._times: dict[int, SizeTimes] = {}  # by number of requests
        self._drafting = SizeTimes(proportional=True)
        self._reading: deque[float] = deque(maxlen=_MEASURED)  # seconds of a token that the source lacked
        self._steps = self._drafted = self._accepted = self._tokens = 0
        self._since_plain = 0
        self._places = [0] * MOST
        self.failed = False  # an error of the source: requests go on without drafts
        self._drafted_s = self._seconds = self._plain_seconds = 0.0  # the first: since the last step that had drafts

    def stats(self) -> SpeculationStats:
        places = tuple(count for count in self._places if count)  # no place is right without those before it
        counts = self._steps, self._drafted, self._accepted, places
        times = self._tokens, self._seconds, self._plain_seconds
        return SpeculationStats(*counts, *times, int(self.failed), self._ahead)

    def draft(self, requests: Sequence[Request]) -> None:
        """Give the requests of the next step their drafts. Where some of them are prompts there are none: what such a
        step takes is not known."""
        answers = [one for one in requests if isinstance(one, AnswerRequest) and one.computed + 1 == len(one.tokens)]
        for request in answers:
            request.drafts = ()
        if self.failed or not answers or any(one.computed + 1 < len(one.tokens) for one in requests):
            return
        if self._alone and len(answers) > 1:
            return
        if self._since_plain >= _PLAIN_EVERY:
            self._since_plain = 0
            return
        if self._all_rest(answers):
            return
        begin = time.perf_counter()
        with self._drop_drafts_on_failure():
            outlooks = {request: self._outlook(request) for request in answers}
            wanted = [(request, count) for request, count in self._counts(outlooks).items() if count]
            self._since_plain = self._since_plain + 1 if wanted else 0
            if wanted:
                self._give_drafts(wanted)
                self._drafted_s += time.perf_counter() - begin

    def _all_rest(self, answers: Sequence[AnswerRequest]) -> bool:
        """Whether none of the requests has drafts in this step, as was decided before."""
        resting = [guessing for guessing in map(self._requests.get, answers) if guessing is not None and guessing.rest]
        if len(resting) < len(answers):
            return False
        for guessing in resting:
            guessing.rest -= 1
            guessing.idle += 1
        return True

    def _give_drafts(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> None:
        begin = time.perf_counter()
        lacked = self.source.prepare([request for request, _ in wanted])
        prepared = time.perf_counter()
        if lacked:
            self._reading.append((prepared - begin) / lacked)
        drafted = self.source.draft(wanted)
        count, ready = sum(count for _, count in wanted), getattr(self.source, "ready", 0)
        if all(drafted) and count > ready:
            self._drafting.add(count - ready, time.perf_counter() - prepared)
        self._ready.add(ready, count)
        self._ahead += ready
        for (request, _), drafts in zip(wanted, drafted, strict=True):
            request.drafts = drafts

    @contextmanager
    def drafting_ahead(self, requests: Sequence[Request]) -> Iterator[None]:
        """A context in which the step of these requests is computed, while the source drafts what may follow it, where
        that gains. Behind it the source is idle."""
        wanted = self._wanted_ahead(requests)
        if not wanted or self.failed:
            yield
            return
        thread, source = self._thread, cast("AheadSource", self.source)
        assert thread is not None
        with self._drop_drafts_on_failure():
            thread.begin(lambda stopped: source.go_on(wanted, stopped))
        try:
            yield
        finally:
            if not self.failed:
                with self._drop_drafts_on_failure():
                    thread.end()

    def _wanted_ahead(self, requests: Sequence[Request]) -> list[tuple[AnswerRequest, int]]:
        """The requests of a step that have drafts in it, and may have some in the next one if all of them are right,
        as many as now; none where nothing is drafted ahead."""
        if self._thread is None or not self._trial.way:
            return []
        drafted = [one for one in requests if isinstance(one, AnswerRequest) and one.drafts]
        counts = [(one, min(len(one.drafts), _left(one) - len(one.drafts) - 2)) for one in drafted]
        return [(request, count) for request, count in counts if count > 0]

    def observe(self, parts: Sequence[tuple[Request, int, int]]) -> None:
        """The step was computed; as of `DraftSource`."""
        if not self.failed:
            with self._drop_drafts_on_failure():
                self.source.observe(parts)

    @contextmanager
    def _drop_drafts_on_failure(self) -> Iterator[None]:
        """A context in which an error of the source, such as too little memory, ends drafts and nothing else."""
        try:
            yield
        except Exception as error:
            self.failed = True
            self._say_failed(str(error) or type(error).__name__)
            self._requests.clear()
            self.source.close()

    def _outlook(self, request: AnswerRequest) -> Outlook:
        outlook = self.source.outlook(request)
        return outlook._replace(most=max(0, min(outlook.most, _left(request) - 1, MOST)))  # the step brings a token

    def _counts(self, outlooks: dict[AnswerRequest, Outlook]) -> dict[AnswerRequest, int]:
        """Drafts of each request: of all numbers those with the most expected tokens a second."""
        counts = dict.fromkeys(outlooks, 0)
        gains: list[tuple[float, AnswerRequest]] = []  # what another draft of a request is expected to bring
        for request, outlook in outlooks.items():
            guessing = self._requests.setdefault(request, Guessing())
            guessing.kind, guessing.retried = outlook.kind, False
            usual = self._rates.setdefault(outlook.kind, _Rate()).share(outlook.likely)
            share = guessing.rates.setdefault(outlook.kind, _Rate()).share(usual)
            gains += [(share ** (place + 1), request) for place in range(outlook.most)]
        gains.sort(key=lambda gain: -gain[0])
        times = self._times.setdefault(len(outlooks), SizeTimes())
        plain = times.expect(len(outlooks))
        if plain is None:
            return counts
        if times.largest <= len(outlooks):  # what a token more takes is not known
            del gains[1:]
        slowest = _MARGIN * len(outlooks) / plain
        best, best_count, expected = slowest, 0, float(len(outlooks))
        for count, (gain, _) in enumerate(gains, 1):
            expected += gain
            seconds = times.expect(len(outlooks) + count)
            assert seconds is not None
            seconds = max(seconds, plain)  # whatever noise made of them
            drafting = (self._drafting.expect(count) or 0.0) * (1 - self._ready.share(0.0))
            if (speed := expected / (seconds + drafting)) > best:
                best, best_count = speed, count
        for _, request in gains[:best_count]:
            counts[request] += 1
        saved = plain - len(outlooks) / best  # for each token of a request
        for request, outlook in outlooks.items():
            reading = outlook.lacks * (median(self._reading) if self._reading else _READING * plain)
            if reading > _left(request) * saved:
                counts[request] = 0
            self._retry(request, outlook, counts, reading / plain)
        return counts

    def _retry(
        self, request: AnswerRequest, outlook: Outlook, counts: dict[AnswerRequest, int], reading: float
    ) -> None:
        """Try a draft of a request again that had none for long. reading: steps for which the source reads before."""
        guessing = self._requests[request]
        if counts[request]:
            guessing.idle = guessing.rest = 0
            return
        guessing.idle += 1
        if guessing.idle >= guessing.patience and outlook.most and reading <= _TRIED * guessing.idle:
            counts[request], guessing.idle, guessing.retried = 1, 0, True
            guessing.patience = min(2 * guessing.patience, _LONGEST_PATIENCE)
        elif outlook.steady and outlook.most:
            guessing.rest = max(0, min(_REST, guessing.patience - guessing.idle) - 1)

    def guessing(self, request: AnswerRequest) -> Guessing | None:
        """A request's record of its drafts, for `verified`; None: it never had an outlook."""
        return self._requests.get(request)

    def verified(self, guessing: Guessing, drafted: int, accepted: int) -> None:
        """Count a request's drafts of the step, and those up to the first wrong one. The request may have ended."""
        self._drafted += drafted
        self._accepted += accepted
        for place in range(accepted):
            self._places[place] += 1
        tried = min(accepted + 1, drafted)
        for rates in (guessing.rates, self._rates):
            rates.setdefault(guessing.kind, _Rate()).add(accepted, tried)
        if accepted and guessing.retried:
            guessing.patience = _PATIENCE

    def computed(self, tokens: int, requests: int, brought: int, seconds: float) -> None:
        """A step of decoding requests alone took so long, and brought so many tokens."""
        times = self._times.setdefault(requests, SizeTimes())
        plain = times.expect(requests)
        if tokens > requests and plain is not None:
            self._steps += 1
            self._tokens += brought
            self._seconds += seconds + self._drafted_s
            if self._thread is not None:
                self._trial.add(requests, tokens, seconds + self._drafted_s)
            self._plain_seconds += plain * brought / requests
            self._drafted_s = 0.0
        times.add(tokens, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended, or was put back."""
        if isinstance(request, AnswerRequest):
            self._requests.pop(request, None)
            if not self.failed:
                self.source.forget(request)

    def close(self) -> None:
        """Free what the source has."""
        if not self.failed:
            self.source.close()


def _left(request: AnswerRequest) -> int:
    """Tokens that a request may still get."""
    return request.max_new - (len(request.tokens) - request.n_prompt)
