"""Which experts the next tokens select, by what is known before: how much of it is right, and what reading them ahead
from disk would gain.

    python -m benchmarks.models.expert_routes MODEL TRACE.npz --text PATH ...      # routes of a small trained model
    python -m benchmarks.disk.foresight TRACE.npz --out FILE
    powerinfer profile -m MODEL --corpus TEXT --trace FILE                        # or of any model
    python -m benchmarks.disk.foresight FILE --model MODEL
    python -m benchmarks.disk.foresight_table                                     # the tables of docs/disk.md

Recall is of the experts that a token selects. "Reads right" are, of the experts that would be read because a guess
names them and RAM lacks them, those that the step needs; as the engine does, a guess leaves out its lightest quarter,
and RAM has half of the experts, by `lfu`.

Gains are simulated, token by token: memory of each layer and its guesses (csrc/slots.cpp, guesses.cpp), one disk that
reads in order, a CPU that computes what is there and then what arrives. Layers are as many as the shape has: the first
of the trace, then the others again and again, each with a memory of its own; they take what the shape's take by the
plan on the machine. Drafts are one a step, and right as often as in the trace, or more often, where the text's token
takes the place of some wrong ones. Of a model of which only routes are known guesses are supposed to be right in some
share, and wrong drafts to select what other tokens do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import machine as machines
from benchmarks.lib.results import path_of, write_json
from powerinfer.devices.rankings import Lfu
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.expert_files import open_trace, trace_place
from powerinfer.hardware.description import load
from powerinfer.models.inventory import matrix
from powerinfer.placement.cost import attention_seconds, end_seconds, matrix_seconds
from powerinfer.placement.shapes import described_model, find_shape

Experts = NDArray[np.int16]
"""[layers, tokens, top_k], heaviest first; -1: none."""

SHAPE, DTYPE, CPU, PAST = "qwen3-30b-a3b", "q4_0", "pc-8gb", 2048
DISKS = {"2.6 GB/s": 2.6, "7 GB/s": 7.0}
SETTINGS = (("2.6 GB/s", 0.5), ("7 GB/s", 0.25), ("7 GB/s", 0.5), ("7 GB/s", 0.75))
"""Disks, and shares of the experts in RAM."""
WARM, COUNTED = 60, 200
"""Tokens of a simulation before it counts, and those that it counts."""
ENOUGH, PAUSE = 64, 1024
"""As of `Guesses` (csrc/guesses.h)."""


class Trace:
    """What tokens select, and what is expected of them. right: of each token whether its draft is."""

    def __init__(self, arrays: dict[str, Experts], right: NDArray[np.bool_], about: Mapping[str, Any]) -> None:
        """arrays: as of `expert_routes`."""
        self.arrays, self.right, self.about = arrays, right, about
        self.experts = int(about["experts"])
        self.layers, self.tokens, self.top_k = arrays["text/selected"].shape

    @classmethod
    def load(cls, path: Path) -> Trace:
        """A file of `expert_routes`."""
        with np.load(path) as file:
            arrays: dict[str, Any] = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        return cls(arrays, arrays.pop("drafted/is_right"), about)

    def guesses(self, stream: str) -> list[str]:
        return [name.split("/")[1] for name in self.arrays if name.startswith(stream + "/") and "selected" not in name]

    def of(self, stream: str, name: str) -> Experts:
        return self.arrays[f"{stream}/{name}"]


ROUTER = 0.8
"""Share of what the next layer's router guesses that is right, of trained models (arXiv 2511.10676)."""
SUPPOSED = {"half": 0.5, "likely": 0.75}
"""Guesses that are right so often."""


def supposed(selected: Experts, experts: int, right: float, seed: int = 1) -> Trace:
    """A trace of which only `selected`, of a text, is known. Drafts are right in a share of places; wrong ones select
    what another token of the text selects. What is wrong of guesses is drawn by how often experts are selected."""
    draws = np.random.default_rng(seed)
    is_right = draws.random(selected.shape[1]) < right
    wrong = np.roll(selected, selected.shape[1] // 3, axis=1)
    arrays = {"text/selected": selected, "right/selected": selected}
    arrays["drafted/selected"] = np.where(is_right[:, None], selected, wrong)
    counts = np.stack([np.bincount(one.ravel(), minlength=experts) for one in selected])
    for stream in ("text", "drafted", "right"):
        needed = arrays[f"{stream}/selected"]
        drawn = np.stack([draws.choice(experts, needed.shape[1:], p=one / one.sum()) for one in counts])
        for name, share in {"router": ROUTER, **SUPPOSED}.items():
            guess = np.where(draws.random(needed.shape) < share, needed, drawn)
            arrays[f"{stream}/{name}"] = guess.astype(np.int16)
        arrays[f"{stream}/router"][0] = -1
    return Trace(arrays, is_right, {"experts": experts, "right": right})


# ---- What is right


def hits(guess: Experts, needed: Experts) -> NDArray[np.bool_]:
    """Of each guessed expert whether it is among those needed, shape of `guess`."""
    return np.asarray((guess[..., :, None] == needed[..., None, :]).any(-1))


def resident(selected: Experts, experts: int, slots: int) -> tuple[NDArray[np.bool_], Experts]:
    """Before each token: which experts RAM has, by `lfu`, bool [layers, tokens, experts]; and the most frequent ones,
    as many as a token selects."""
    layers, tokens, top_k = selected.shape
    ranking = Lfu(np.zeros((layers, experts), np.float32))
    held = np.zeros((layers, tokens + 1, experts), bool)
    frequent = np.zeros_like(selected)
    rows = np.arange(layers)[:, None]
    for token in range(tokens):
        frequent[:, token] = np.argsort(-ranking.priority, axis=1, kind="stable")[:, :top_k]
        uses = np.zeros((layers, experts), np.int32)
        uses[rows, selected[:, token]] = 1
        now = held[:, token] | (uses > 0)
        order = np.argsort(np.where(uses > 0, np.inf, np.where(now, ranking.priority, -np.inf)), axis=1, kind="stable")
        now[rows, order[:, : experts - slots]] = False
        held[:, token + 1] = now
        ranking.observe(uses, 1)
    return held[:, :-1], frequent


def previous(selected: Experts) -> Experts:
    """What the token before selects; nothing of the first."""
    return np.concatenate([np.full_like(selected[:, :1], -1), selected[:, :-1]], axis=1)


def taken(guess: Experts) -> Experts:
    """The guessed experts that are read: without the lightest quarter."""
    return guess[..., : guess.shape[-1] - guess.shape[-1] // 4]


@dataclass(frozen=True)
class Right:
    """How much of a guess is right. recall: by layer, None: nothing is known of it; reads: of guessed experts that RAM
    lacks, the share that is needed, absent: their number for a token and layer; None: there are none."""

    stream: str
    name: str
    recall: list[float | None]
    reads: float | None
    absent: float


def judged(stream: str, name: str, guess: Experts, needed: Experts, held: NDArray[np.bool_]) -> Right:
    known = guess[:, :, 0] >= 0
    share = hits(needed, guess)
    recall = [float(one[there].mean()) if there.any() else None for one, there in zip(share, known, strict=True)]
    read = taken(guess)
    lacking = (read >= 0) & ~np.take_along_axis(held, np.maximum(read, 0).astype(np.int64), axis=2)
    reads = float(hits(read, needed)[lacking].mean()) if lacking.any() else None
    return Right(stream, name, recall, reads, float(lacking.sum() / max(1, known.sum())))


def all_judged(trace: Trace, share: float = 0.5) -> list[Right]:
    """Of the token that a step begins with, and of its draft, by everything that may foretell them."""
    selected = trace.of("text", "selected")
    held, frequent = resident(selected, trace.experts, round(share * trace.experts))
    found = []
    for stream, back in (("text", 1), ("drafted", 2)):
        needed = trace.of(stream, "selected")
        before = selected
        for _ in range(back):
            before = previous(before)
        there = held if back == 1 else np.concatenate([held[:, :1], held[:, :-1]], axis=1)
        often = frequent if back == 1 else np.concatenate([frequent[:, :1], frequent[:, :-1]], axis=1)
        guesses = {"last": before, "frequent": often} | {name: trace.of(stream, name) for name in trace.guesses(stream)}
        found += [judged(stream, name, guess, needed, there) for name, guess in guesses.items()]
    return found


# ---- What it gains


@dataclass(frozen=True)
class Costs:
    """layers: their number. In seconds attention, expert: of a layer, and of one of its experts in RAM; fresh: of one
    that was just read; end: of the output head, and what is between steps; draft: of the draft head's layer, whose
    output head takes `end` again. nbytes: of an expert; rate: bytes a second of the disk."""

    layers: int
    attention: float
    expert: float
    fresh: float
    end: float
    draft: float
    nbytes: float
    rate: float


def costs(trace: Trace, gb_s: float) -> Costs:
    """Of the shape on the machine; its experts of a token are as many as the trace's."""
    config = find_shape(SHAPE).config
    model, device = described_model(config, DTYPE, SHAPE, 0.0), load(CPU).cpu
    ffn = config.experts[0]
    of_token = ffn.router.top_k / ffn.n_experts / trace.top_k
    attention = attention_seconds(device, model, 0, "f16", PAST, 1, panels=True, ffn=False)
    attention += matrix_seconds(device, model.beside[0], panels=True)
    expert = matrix_seconds(device, model.experts[0], panels=True) * of_token
    nbytes = sum(one.file for one in model.experts[0]) * of_token
    join = matrix_seconds(device, (matrix("Q4_0", config.d_model, 2 * config.d_model),), panels=True)
    end = end_seconds(device, model, panels=True) + 1e-6 * device.step_us
    fresh = max(expert, nbytes / (1e9 * device.pack_gb_s))
    draft = attention + trace.top_k * expert + join
    return Costs(config.n_layers, attention, expert, fresh, end, draft, nbytes, 1e9 * gb_s)


@dataclass
class Disk:
    """Reads in order."""

    each: float
    free: float = 0.0
    reads: int = 0

    def read(self, now: float) -> float:
        """When an expert is there whose read begins now, behind all others."""
        self.free = max(self.free, now) + self.each
        self.reads += 1
        return self.free


class Memory:
    """A layer's slots, and what is expected of it. priority: of each expert, which the ranking changes."""

    def __init__(self, slots: int, priority: NDArray[np.float32], disk: Disk) -> None:
        self.slots, self.priority, self.disk = slots, priority, disk
        self.held: set[int] = set()
        self.coming: dict[int, float] = {}  # when it is there
        self._expected: set[int] = set()
        self._early: set[int] = set()  # of these, those that were not there
        self._ahead: set[int] = set()  # the same before the step, which do not count for `worth`
        self._judged = self._right = self._paused = 0
        self.guessed = self.useful = 0

    def arrive(self, now: float) -> None:
        for expert in [one for one, ready in self.coming.items() if ready <= now]:
            del self.coming[expert]
            self.held.add(expert)

    def _room(self, pinned: set[int]) -> bool:
        """Whether there is a slot for one more, which the least of the others leaves."""
        if len(self.held) + len(self.coming) < self.slots:
            return True
        leaving = self.held - pinned
        if leaving:
            self.held.remove(min(leaving, key=lambda one: (self.priority[one], one)))
        return bool(leaving)

    def worth(self) -> bool:
        return self.slots < len(self.priority) and (self._judged < ENOUGH or 2 * self._right >= self._judged)

    def expect(self, experts: Sequence[int], now: float, until: float | None = None) -> None:
        """Begins to read those that are not there. until: before the step, and while the disk is free before then."""
        self.arrive(now)
        self._expected.update(one for one in experts if one in self.held or one in self.coming)
        for expert in experts:
            if expert in self.held or expert in self.coming:
                continue
            if (until is not None and self.disk.free >= until) or not self._room(self._expected):
                break
            self.coming[expert] = self.disk.read(now)
            self._expected.add(expert)
            self.guessed += 1
            (self._early if until is None else self._ahead).add(expert)

    def begin(self, needed: set[int], now: float) -> tuple[int, list[float], float]:
        """What a step needs: how many are there, when each of the others is, and the time by which all have slots."""
        self.arrive(now)
        self._judged += len(self._early)
        self._right += len(self._early & needed)
        self.useful += len((self._early | self._ahead) & needed)
        if self._judged >= 4 * ENOUGH:
            self._judged, self._right = self._judged // 2, self._right // 2
        if not self.worth():
            self._paused += 1
            if self._paused == PAUSE:
                self._judged = self._right = self._paused = 0
        self._expected, self._early, self._ahead = set(), set(), set()
        there = len(self.held & needed)
        for expert in sorted(needed - self.held - self.coming.keys()):
            while not self._room(needed):
                others = [ready for one, ready in self.coming.items() if one not in needed]
                if not others:
                    raise ValueError("a step needs more experts than there are slots")
                now = max(now, min(others))
                self.arrive(now)
            self.coming[expert] = self.disk.read(now)
        return there, sorted(self.coming[one] for one in needed if one in self.coming), now


@dataclass(frozen=True)
class Way:
    """What is read ahead. within: by the next layer's router, as the engine does; own: by a layer's own, too, before
    its attention; ahead: a guess, before the step's first experts, of the first `depth` layers; "needed": what is
    needed, as nothing can know; idle: only while the disk has nothing else to do by then; drafts: a step has a draft,
    right: at least that often."""

    within: bool = True
    own: bool = False
    ahead: str = ""
    depth: int = 0
    idle: bool = False
    drafts: bool = False
    right: float = 0.0


@dataclass(frozen=True)
class Simulated:
    """Per token. guessed, useful: experts read ahead, and those of them that the step needed; accepted: of drafts."""

    seconds: float
    nbytes: float
    guessed: float
    useful: float
    accepted: float | None = None


class Simulation:
    def __init__(self, trace: Trace, cost: Costs, slots: int, way: Way) -> None:
        self.trace, self.cost, self.way = trace, cost, way
        self.disk = Disk(cost.nbytes / cost.rate)
        self.ranking = Lfu(np.zeros((cost.layers, trace.experts), np.float32))
        self.layers = [Memory(slots, row, self.disk) for row in self.ranking.priority]
        self.of = [0, *(1 + at % (trace.layers - 1) for at in range(cost.layers - 1))]  # the trace's
        self.now = 0.0
        share = float(trace.right.mean())
        chance = (way.right - share) / (1 - share) if share < 1 else 0.0
        self.right = trace.right | (np.random.default_rng(1).random(trace.tokens) < chance)

    def _guess(self, layer: int, name: str, token: tuple[str, int]) -> list[int]:
        stream, at = token
        if name == "needed":
            return self.trace.of(stream, "selected")[self.of[layer], at].tolist()
        guess = taken(self.trace.of(stream, name)[self.of[layer], at]).tolist()
        return guess if guess[0] >= 0 else []

    def _read_ahead(self, token: tuple[str, int], when: float, begin: float) -> None:
        """when: the guess is known, begin: of the step's layers."""
        until = begin + self.cost.attention if self.way.idle else float("inf")
        for layer in range(self.way.depth if self.way.ahead else 0):
            self.layers[layer].expect(self._guess(layer, self.way.ahead, token), when, until)

    def _draft(self, at: int) -> list[tuple[str, int]]:
        """The tokens of a step that begins with `at`; what is known of them before is read ahead."""
        way, cost, sampled = self.way, self.cost, self.now
        tokens = [("text", at)]
        early = way.ahead == "state" or (way.ahead == "needed" and not way.drafts)  # beside the output head
        when = sampled - cost.end if early else sampled
        if way.drafts:
            self.now += cost.draft + cost.end
            tokens.append(("right" if self.right[at + 1] else "drafted", at + 1))
            late = way.ahead in ("draft", "fitted_draft")  # known when the head's layer is computed
            self._read_ahead(tokens[0], sampled + cost.draft if late else when, self.now)
            self._read_ahead(tokens[1], self.now, self.now)
        else:
            self._read_ahead(tokens[0], when, self.now)
        return tokens

    def step(self, at: int) -> int:
        """Computes the token `at`, with a draft of the next one; how many are done."""
        cost, tokens = self.cost, self._draft(at)
        uses = np.zeros((cost.layers, self.trace.experts), np.int32)
        for layer, memory in enumerate(self.layers):
            if self.way.own and memory.worth():
                for token in tokens:
                    memory.expect(self._guess(layer, "before", token), self.now)
            self.now += cost.attention
            needed = [self._guess(layer, "needed", token) for token in tokens]
            for one in needed:
                uses[layer, one] += 1
            there, ready, self.now = memory.begin({expert for one in needed for expert in one}, self.now)
            after = self.layers[layer + 1] if layer + 1 < len(self.layers) else None
            if self.way.within and after is not None and after.worth():
                for token in tokens:
                    after.expect(self._guess(layer + 1, "router", token), self.now)
            self.now += there * cost.expert
            for one in ready:
                self.now = max(self.now, one) + cost.fresh
        self.now += cost.end
        self.ranking.observe(uses, len(tokens))
        return 1 + int(len(tokens) > 1 and self.right[at + 1])

    def _counts(self) -> NDArray[np.float64]:
        sums = [sum(getattr(one, name) for one in self.layers) for name in ("guessed", "useful")]
        return np.array([self.now, self.disk.reads * self.cost.nbytes, *sums])

    def run(self, warm: int, counted: int) -> Simulated:
        at, begin, first, steps = 0, np.zeros(4), 0, 0
        while at < min(warm + counted, self.trace.tokens - 1):
            if at >= warm and not first:
                begin, first = self._counts(), at
            at += self.step(at)
            steps += bool(first)
        found = (self._counts() - begin) / (at - first)
        return Simulated(*found.tolist(), accepted=(at - first) / steps - 1 if self.way.drafts else None)


def ways(trace: Trace, layers: int, right: float) -> list[Way]:
    """All that are told apart. right: share of the drafts, beside the trace's own; 0: these alone."""

    def idle(way: Way, *names: str) -> list[Way]:
        known = [*trace.guesses("text"), "needed"]
        return [replace(way, ahead=name, depth=layers, idle=True) for name in names if name in known]

    plain = Way()
    found = [replace(plain, within=False), plain]
    if "before" in trace.guesses("text"):
        found += [replace(plain, own=True), replace(plain, ahead="embedding", depth=1)]
    found += idle(plain, "state", "token", "fitted", "needed")
    for share in (0.0, right)[: 1 + (right > 0)]:
        drafts = Way(drafts=True, right=share)
        found += [drafts, *idle(drafts, *SUPPOSED, "draft", "token", "fitted_draft", "needed")]
    return found


def simulated(trace: Trace, right: float, warm: int = WARM, counted: int = COUNTED) -> list[dict[str, Any]]:
    """Of disks, shares of the experts in RAM, and ways."""
    found = []
    for name, share in SETTINGS:
        cost = costs(trace, DISKS[name])
        for way in ways(trace, cost.layers, right):
            result = Simulation(trace, cost, round(share * trace.experts), way).run(warm, counted)
            found.append({"disk": name, "share": share, **asdict(way), **asdict(result)})
    return found


def document(trace: Trace, right: float, warm: int = WARM, counted: int = COUNTED) -> dict[str, Any]:
    """A result. right: as of `ways`."""
    found = {"kind": "foresight-routes" if "half" in trace.guesses("text") else "foresight", **machines.description()}
    found |= {"trace": dict(trace.about), "layers": trace.layers, "experts": trace.experts, "top_k": trace.top_k}
    found |= {"tokens": trace.tokens, "drafts_right": float(trace.right.mean()), "shape": SHAPE, "dtype": DTYPE}
    found |= {"machine": CPU, "costs": asdict(costs(trace, 1.0)), "recall": [asdict(one) for one in all_judged(trace)]}
    return found | {"simulated": simulated(trace, right, warm, counted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--model", type=Path, help="whose trace it is, of `powerinfer profile --trace`")
    parser.add_argument("--right", type=float, default=0.75, help="share of drafts that are right (default 0.75)")
    parser.add_argument("--out", type=Path, help="JSON file to write; default: in benchmarks/results/")
    args = parser.parse_args()
    if args.model is None:
        result = document(Trace.load(args.trace), args.right)
    else:
        checkpoint = open_checkpoint(args.model)
        opened = open_trace(checkpoint, trace_place(checkpoint, None, args.trace))
        selected = np.stack([*opened.selected.values()]).astype(np.int16)
        experts = max(one.n_experts for one in checkpoint.config.experts.values())
        result = document(supposed(selected, experts, args.right), 0.0)
    write_json(args.out or path_of(result), result)


if __name__ == "__main__":
    main()
