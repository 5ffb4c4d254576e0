"""Experts that a fast memory holds: policies behind one interface, and their replay over recorded selections.

A layer's fast memory has slots, each for one expert. Before a step an engine asks `resident`, computes those experts
there and the others where they are, and afterwards tells `observe` what the router selected, or lets `decide` look at
the layers' tallies; what these return is to be copied, off the critical path. Policies are deterministic, and decide in
C++ (csrc/expert_policy.cpp), for all layers in a few microseconds.

    static   the most frequent experts of a profile; never copies
    lru      a missed expert takes the slot of the one that was selected longest ago
    lfu      a missed expert takes the slot of the one that was selected least often of late, if it has become more
             frequent
    dynamic  static at first; then an expert changes places with one that has become clearly more frequent, a few a step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.rankings import NEEDS_PROFILE, RANKINGS, ExpertDecisions

Swap = tuple[int, int]
"""(slot, expert): the expert takes the slot's place in the fast memory."""

LayerSwap = tuple[int, int, int]
"""(layer, slot, expert): the same, and where."""

Frequencies = Mapping[int, NDArray[np.float64]]
"""Of each layer with experts the share of the tokens that select an expert, float64 [experts]."""

EXPERT_POLICIES = ("static", "lru", "lfu", "dynamic")

HALF_LIFE = 64.0
"""Tokens after which a selection counts half, in `lfu` and `dynamic`."""
HYSTERESIS = 0.5
"""`dynamic`: how much more frequent an expert must be than the one whose slot it takes, relatively."""
PRIOR = 0.25
"""`dynamic`: what the profile weighs in the counts, by what all tokens of late weigh. Without it, chance would exchange
rare experts."""
COPIES = 4
"""`dynamic`: experts copied for a step, at most, on average over a few steps."""


class Policy:
    """A policy over the slots of every layer: experts that a ranking puts before those in slots take their place.

    The ranking of `lru` is `devices.rankings.Lru`, that of the others `Lfu`, in float64. sizes: experts of each layer.
    """

    def __init__(
        self,
        name: str,
        slots: Mapping[int, int],
        experts: Mapping[int, int],
        start: Frequencies | None = None,
        *,
        half_life: float = HALF_LIFE,
        hysteresis: float = HYSTERESIS,
        copies: int = COPIES,
    ) -> None:
        """name: of `EXPERT_POLICIES`; slots: of each layer with experts, by its number; experts: how many each has;
        start: who has slots at first, by frequency; None: slots are empty until experts are copied. ValueError:
        `static` needs it."""
        assert slots.keys() == experts.keys() and (start is None or start.keys() == slots.keys())
        assert name in EXPERT_POLICIES and copies > 0 and hysteresis >= 0
        if start is None and name == "static":
            raise ValueError(NEEDS_PROFILE)
        self.name = name
        self._experts = {layer: np.full(min(n, experts[layer]), -1, np.int32) for layer, n in slots.items()}
        self._outside = {layer: np.ones(n, bool) for layer, n in experts.items()}  # those without a slot
        self._numbers = {layer: number for number, layer in enumerate(slots)}
        self._layers = list(slots)
        self.sizes = dict(experts)
        # Layers take turns: each may copy `most` experts in every `turn`-th step.
        factor, prior, turn, most = 1.0, 0.0, 1, max(experts.values(), default=1)
        if name == "dynamic":
            factor, prior = 1 + hysteresis, PRIOR
            turn, most = max(1, len(slots) // copies), max(1, copies // max(1, len(slots)))
        self._decisions = ExpertDecisions(
            recent=name == "lru", decay=0.5 ** (1 / half_life), factor=factor, prior=prior, turn=turn, most=most,
            selected=name != "dynamic",
        )  # fmt: skip
        for layer, of_slot in self._experts.items():
            known = np.zeros(experts[layer]) if start is None else start[layer].astype(np.float64)
            if start is not None:
                of_slot[:] = np.argsort(-known, kind="stable")[: len(of_slot)]
                self._outside[layer][of_slot] = False
            self._decisions.add(known, of_slot, self._outside[layer])

    def resident(self, layer: int) -> NDArray[np.int32]:
        """The expert in each slot once all swaps so far are carried out, int32 [slots], -1: empty; a view."""
        view = self._experts[layer].view()
        view.flags.writeable = False
        return view

    def hits(self, layer: int, selected: Sequence[int] | NDArray[np.integer]) -> int:
        """The number of selected experts that have a slot."""
        return len(selected) - int(self._outside[layer][selected].sum())

    def observe(self, layer: int, selected: Sequence[int] | NDArray[np.integer], tokens: int = 1) -> list[Swap]:
        """The swaps to make after a step whose tokens selected these experts in a layer, repeated where several tokens
        did. They name different slots. Once in a step for every layer, in any order."""
        if self.name == "static":
            return []
        uses = np.bincount(selected, minlength=len(self._outside[layer]))
        swaps = self._decisions.observe(self._numbers[layer], uses, tokens)
        return [(slot, expert) for _, slot, expert in swaps]

    def watch(self, layer: int, tally: NDArray[np.int64]) -> None:
        """Let `decide` look at a tally of what tokens select in a layer, int64 [experts + 1], of which the last number
        is not read; it only grows. What it has counted by now is no step."""
        self._decisions.watch(self._numbers[layer], tally)

    def decide(self, tokens: int, limit: int) -> list[LayerSwap]:
        """The swaps to make after a step of so many tokens, by the tallies: those of `observe` in every layer that is
        watched, the layers in their order. Of more than `limit` only those by which priorities gain most."""
        if self.name == "static":
            return []
        swaps = self._decisions.decide(tokens, limit)
        return [(self._layers[number], slot, expert) for number, slot, expert in swaps]

    def forget(self) -> None:
        """Leave out what the tallies got since the last time, which is no step."""
        self._decisions.forget()


def make_policy(
    name: str, slots: Mapping[int, int], experts: Mapping[int, int], start: Frequencies | None = None
) -> Policy:
    """The policy of a name; arguments as of `Policy`."""
    return Policy(name, slots, experts, start)


# ---------------------------------------------------------------- slots of the layers


def slots_by_frequency(frequencies: Frequencies, nbytes: Mapping[int, int], budget: int) -> dict[int, int]:
    """How many slots each layer has within `budget` bytes, so that `static` hits most.

    nbytes: of an expert, by layer. Where all are of one size this is the optimum; else what is hit per byte decides,
    and less than one expert's hits are lost.
    """
    slots = dict.fromkeys(frequencies, 0)
    if not slots:
        return slots
    lengths = [len(each) for each in frequencies.values()]
    layers = np.repeat(list(frequencies), lengths)
    sizes = np.repeat([nbytes[layer] for layer in frequencies], lengths)
    order = np.lexsort((layers, -np.concatenate(list(frequencies.values())) / sizes))
    ranked = layers[order]
    fit = int(np.searchsorted(np.cumsum(sizes[order]), budget, side="right"))
    for layer, n in zip(*np.unique(ranked[:fit], return_counts=True), strict=True):
        slots[int(layer)] = int(n)
    budget -= sum(n * nbytes[layer] for layer, n in slots.items())
    least = min(nbytes.values())
    for layer in ranked[fit:].tolist():  # where they are smaller some still fit
        if budget < least:
            break
        if nbytes[layer] <= budget:
            slots[layer] += 1
            budget -= nbytes[layer]
    return slots


_CLEARLY = 0.999
"""Of the time of a placement that is taken over one before it."""


def slots_in_least_time(
    frequencies: Frequencies,
    seconds: Mapping[int, NDArray[np.float64]],
    nbytes: Mapping[int, int],
    budget: int,
) -> dict[int, int]:
    """How many slots each layer has within `budget` bytes, so that a step of `static` takes little time.

    seconds: float64 [experts + 1], of a layer by its slots. All of a layer's experts in slots also save the exchange
    with the CPU, so some layers may be whole, those that are selected most evenly first, and the others have
    `slots_by_frequency` or `slots_evenly`: tried for every number of whole layers.
    """

    def tail(layer: int) -> float:
        """How much of what is selected the less frequent half is."""
        each = np.sort(frequencies[layer])
        return float(each[: len(each) // 2].sum() / max(each.sum(), 1e-30))

    def taken(slots: Mapping[int, int]) -> float:
        return sum(float(seconds[layer][n]) for layer, n in slots.items())

    order, left = sorted(frequencies, key=tail, reverse=True), budget
    best: dict[int, int] | None = None
    for count in range(len(order) + 1):
        whole = {layer: len(frequencies[layer]) for layer in order[:count]}
        others = {layer: each for layer, each in frequencies.items() if layer not in whole}
        sizes = {layer: len(each) for layer, each in others.items()}
        for some in (slots_evenly(sizes, nbytes, left), slots_by_frequency(others, nbytes, left)):
            if best is None or taken(whole | some) < taken(best) * _CLEARLY:
                best = whole | some
        if count < len(order):
            left -= len(frequencies[order[count]]) * nbytes[order[count]]
            if left < 0:
                break
    assert best is not None
    return {layer: best[layer] for layer in frequencies}


def slots_evenly(experts: Mapping[int, int], nbytes: Mapping[int, int], budget: int) -> dict[int, int]:
    """The same number in every layer, as far as its experts go, and one more in the first where some is left."""
    slots = dict.fromkeys(experts, 0)
    while True:
        more = [layer for layer, n in experts.items() if slots[layer] < n]
        if more:  # whole rounds at once
            round_bytes = sum(nbytes[layer] for layer in more)
            rounds = min(budget // round_bytes, min(experts[layer] - slots[layer] for layer in more))
            slots.update({layer: slots[layer] + rounds for layer in more})
            budget -= rounds * round_bytes
            more = [layer for layer in more if slots[layer] < experts[layer]]
        before = budget
        for layer in more:
            if nbytes[layer] <= budget:
                slots[layer] += 1
                budget -= nbytes[layer]
        if budget == before:
            return slots


# ---------------------------------------------------------------- replay


@dataclass(frozen=True)
class Replayed:
    """What a policy did over recorded selections. hits, copies: of each layer; selections: of each layer."""

    policy: str
    slots: dict[int, int]
    tokens: int
    selections: dict[int, int]
    hits: dict[int, int]
    copies: dict[int, int]

    @property
    def hit_rate(self) -> float:
        """Of all selections, the share whose expert had a slot."""
        return sum(self.hits.values()) / sum(self.selections.values())

    def copied_bytes(self, nbytes: Mapping[int, int]) -> float:
        """Bytes copied for a token; nbytes: of an expert, by layer."""
        return sum(n * nbytes[layer] for layer, n in self.copies.items()) / self.tokens


def replay(policy: Policy, selected: Mapping[int, NDArray[np.integer]]) -> Replayed:
    """Play selections to a policy, a token a step; selected: of each layer [tokens, experts of a token].

    A layer's hits do not depend on other layers, so one layer is played after another.
    """
    slots = {layer: len(policy.resident(layer)) for layer in selected}
    hits, copies = dict.fromkeys(selected, 0), dict.fromkeys(selected, 0)
    for layer, each in selected.items():
        if policy.name == "static":
            hits[layer] = int(np.isin(each, policy.resident(layer)).sum())
            continue
        for experts in each:
            hits[layer] += policy.hits(layer, experts)
            copies[layer] += len(policy.observe(layer, experts))
    sizes = {layer: each.size for layer, each in selected.items()}
    return Replayed(policy.name, slots, max(map(len, selected.values())), sizes, hits, copies)


def replay_on_disk(
    policy: str, start: NDArray[np.float32], selected: Mapping[int, NDArray[np.integer]], slots: Mapping[int, int]
) -> Replayed:
    """Play selections to a policy of experts that rest on disk, a token a step: each one that memory lacks is read, in
    place of the one of least priority that the token does not select, of equals the lowest, as `Slots` (csrc/slots.cpp)
    does.

    policy: of `DISK_POLICIES`; start: as of `UseRanking`, its rows the layers in order; selected: of each layer
    [tokens, experts of a token], the same number; slots: at least those of a token.
    """
    rows, n = start.shape
    ranking = RANKINGS[policy](start)
    held = np.zeros((rows, n), bool)
    free = np.array([slots[layer] for layer in selected])
    tokens = len(next(iter(selected.values())))
    hits, misses = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for token in range(tokens):
        uses = np.zeros((rows, n), np.int32)
        for row, each in enumerate(selected.values()):
            uses[row, each[token]] = 1
        used = uses > 0
        missed = used & ~held
        n_missed = missed.sum(1)
        hits += (used & held).sum(1)
        misses += n_missed
        leaving = np.maximum(n_missed - free, 0)
        free -= n_missed - leaving
        if leaving.any():
            order = np.argsort(np.where(held & ~used, ranking.priority, np.inf), axis=1, kind="stable")
            for at in np.flatnonzero(leaving).tolist():
                held[at, order[at, : leaving[at]]] = False
        held |= missed
        ranking.observe(uses, 1)
    by_layer = [dict(zip(selected, found.tolist(), strict=True)) for found in (hits, misses)]
    sizes = {layer: each.size for layer, each in selected.items()}
    return Replayed(policy, {layer: slots[layer] for layer in selected}, tokens, sizes, *by_layer)
