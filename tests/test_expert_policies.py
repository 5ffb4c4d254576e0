"""Policies that place experts: small traces computed by hand, and what every policy must keep to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from powerinfer.devices.rankings import RANKINGS, Lfu, Lru, UseRanking
from powerinfer.placement.experts import (
    COPIES,
    EXPERT_POLICIES,
    HALF_LIFE,
    HYSTERESIS,
    PRIOR,
    Policy,
    make_policy,
    replay,
    slots_by_frequency,
    slots_evenly,
    slots_in_least_time,
)

START = {0: np.array([0.4, 0.3, 0.2, 0.1])}


def played(policy: Policy, tokens: list[list[int]]) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """(hits, swaps) of each token, in layer 0."""
    hits, swaps = [], []
    for selected in tokens:
        hits.append(policy.hits(0, selected))
        swaps.append(policy.observe(0, selected))
    return hits, swaps


def test_static_keeps_the_most_frequent() -> None:
    policy = Policy("static", {0: 2}, {0: 4}, START)
    assert policy.resident(0).tolist() == [0, 1]
    assert played(policy, [[0, 1], [1, 2], [2, 3]]) == ([2, 1, 0], [[], [], []])
    assert policy.resident(0).tolist() == [0, 1]


def test_lru_brings_in_what_it_missed() -> None:
    """Two slots, empty at first; of one token's experts the higher number counts as the later."""
    policy = Policy("lru", {0: 3}, {0: 5})
    hits, swaps = played(policy, [[0, 1], [1, 2], [0, 1], [3, 4], [0, 4]])
    assert hits == [0, 1, 2, 0, 1]
    # 2 was selected longest ago when 3 and 4 come, then 0: 1 stays. Then 0 takes the slot of 1.
    assert swaps == [[(0, 1), (1, 0)], [(2, 2)], [], [(2, 4), (1, 3)], [(0, 0)]]
    assert sorted(policy.resident(0).tolist()) == [0, 3, 4]


def test_lru_starts_with_the_most_frequent_and_drops_the_least_frequent_first() -> None:
    policy = Policy("lru", {0: 3}, {0: 4}, START)
    assert played(policy, [[3], [3], [2]]) == ([0, 1, 0], [[(2, 3)], [], [(1, 2)]])


def test_lru_with_fewer_slots_than_a_token_selects() -> None:
    policy = Policy("lru", {0: 1}, {0: 4})
    assert played(policy, [[0, 2], [2, 3], [0, 3]]) == ([0, 1, 1], [[(0, 2)], [(0, 3)], []])


def test_lfu_keeps_what_is_selected_most_often() -> None:
    policy = Policy("lfu", {0: 2}, {0: 4})
    hits, swaps = played(policy, [[0], [0], [1], [2], [2], [1], [1]])
    assert hits == [0, 1, 0, 0, 1, 0, 1]
    # 2 has one selection as 1 has, the later weighs more; then 1 has two, the newer of them later than those of 2
    assert swaps == [[(0, 0)], [], [(1, 1)], [(1, 2)], [], [(0, 1)], []]


def test_lfu_forgets() -> None:
    """After ten half-lives a few selections outweigh a hundred old ones."""
    policy = Policy("lfu", {0: 1}, {0: 3}, half_life=10)
    played(policy, [[0]] * 100)
    assert policy.resident(0).tolist() == [0]
    played(policy, [[1]] * 20)
    assert policy.resident(0).tolist() == [1]


def test_dynamic_exchanges_only_what_has_become_clearly_more_frequent() -> None:
    start = {0: np.array([0.5, 0.4, 0.3, 0.0])}
    close = Policy("dynamic", {0: 2}, {0: 4}, start, half_life=100, hysteresis=0.5, copies=1)
    assert not any(played(close, [[1], [2]] * 5)[1]), "2 is not half as frequent again as 1"
    policy = Policy("dynamic", {0: 2}, {0: 4}, start, half_life=100, hysteresis=0.5, copies=1)
    swaps = [swap for step in played(policy, [[3]] * 200)[1] for swap in step]
    assert swaps == [(1, 3)] and policy.resident(0).tolist() == [0, 3]


def test_dynamic_copies_no_more_than_it_may() -> None:
    """Everything that was hot is cold at once: four layers share two copies a step."""
    layers = range(4)
    start = {layer: np.repeat([0.9, 0.0], 4) for layer in layers}
    policy = Policy("dynamic", dict.fromkeys(layers, 4), dict.fromkeys(layers, 8), start, half_life=4, copies=2)
    steps = [sum(len(policy.observe(layer, [4, 5, 6, 7])) for layer in layers) for _ in range(60)]
    assert max(steps) == 2 and sum(steps) == 16
    assert all(set(policy.resident(layer).tolist()) == {4, 5, 6, 7} for layer in layers)


def random_selections(tokens: int, experts: int, top: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = np.arange(1, experts + 1) ** -1.0
    keys = rng.exponential(size=(tokens, experts)) / weights
    return np.sort(np.argsort(keys, axis=1)[:, :top], axis=1)


@pytest.mark.parametrize("slots", [0, 1, 2, 5, 8, 12])
@pytest.mark.parametrize("name", EXPERT_POLICIES)
def test_every_policy_keeps_its_books(name: str, slots: int) -> None:
    """Swaps say all that changes; a slot has one expert, an expert one slot; steps of one token and of several."""
    start = {0: np.full(8, 0.25), 3: np.arange(8) / 28}
    policy, again = (make_policy(name, {0: slots, 3: slots}, {0: 8, 3: 8}, start) for _ in range(2))
    own = {layer: policy.resident(layer).tolist() for layer in (0, 3)}
    selected = random_selections(300, 8, 2)
    at, brought = 0, 0
    while at < 300:
        tokens = 1 + at % 3
        for layer in own:
            step = selected[at : at + tokens].reshape(-1).tolist()
            swaps = policy.observe(layer, step, tokens)
            assert again.observe(layer, step, tokens) == swaps, "the same every time"
            assert len({slot for slot, _ in swaps}) == len(swaps)
            for slot, expert in swaps:
                own[layer][slot] = expert
                brought += 1
            assert own[layer] == policy.resident(layer).tolist()
            held = [expert for expert in own[layer] if expert >= 0]
            assert len(held) == len(set(held)) and len(own[layer]) == min(slots, 8)
            assert policy.hits(layer, range(8)) == len(held)
        at += tokens
    assert brought == 0 if name == "static" or slots in (0, 8, 12) else brought > 0 or name == "dynamic"
    with pytest.raises(ValueError, match="read-only"):
        policy.resident(0)[:] = 0


def test_static_needs_counts() -> None:
    with pytest.raises(ValueError, match="frequencies"):
        make_policy("static", {0: 1}, {0: 2})


@pytest.mark.parametrize("name", EXPERT_POLICIES)
def test_replay_counts_what_a_plain_loop_counts(name: str) -> None:
    selected = {0: random_selections(200, 8, 2), 1: random_selections(200, 8, 2, seed=2)}
    policy = make_policy(name, {0: 3, 1: 4}, {0: 8, 1: 8}, {0: np.ones(8), 1: np.ones(8)})
    found = replay(policy, selected)
    policy = make_policy(name, {0: 3, 1: 4}, {0: 8, 1: 8}, {0: np.ones(8), 1: np.ones(8)})
    hits, copies = 0, 0
    for token in range(200):
        for layer in (0, 1):
            held = set(policy.resident(layer).tolist())
            hits += sum(int(expert) in held for expert in selected[layer][token])
            copies += len(policy.observe(layer, selected[layer][token].tolist()))
    assert sum(found.hits.values()) == hits and sum(found.copies.values()) == copies
    assert found.hit_rate == hits / 800 and found.copied_bytes({0: 10, 1: 10}) == copies * 10 / 200


class Plain:
    """The decisions of a layer, in numpy, as the rankings say. number: of the layer, of so many."""

    def __init__(self, name: str, slots: int, start: np.ndarray, number: int = 0, layers: int = 1) -> None:
        self.name, self.number = name, number
        self.of_slot = np.argsort(-start, kind="stable")[:slots].astype(np.int32)
        self.outside = np.ones(len(start), bool)
        self.outside[self.of_slot] = False
        dynamic = name == "dynamic"
        lfu = dynamic or name == "lfu"
        self.ranking: UseRanking = Lfu(start, HALF_LIFE) if lfu else RANKINGS[name](start)
        self.factor, self.turn, self.most = 1.0, 1, len(start)
        if dynamic:
            self.factor, self.turn, self.most = 1 + HYSTERESIS, max(1, layers // COPIES), max(1, COPIES // layers)
            self.prior = PRIOR * self.ranking.priority
        self.steps = number

    def wanted(self, selected: Sequence[int] | np.ndarray, tokens: int) -> list[tuple[int, int, int, float]]:
        """(layer, slot, expert, by how much its priority is larger) of the swaps after a step."""
        uses = np.bincount(selected, minlength=len(self.outside))
        self.ranking.observe(uses, tokens)
        self.steps += 1
        if self.steps % self.turn or self.name == "static":
            return []
        priority = self.ranking.priority
        if self.name == "dynamic":
            priority, coming = priority + self.prior, self.outside.nonzero()[0]
        else:
            coming = (uses * self.outside).nonzero()[0]
        more, less = priority[coming], self.factor * priority[self.of_slot]
        first, slots = (-more).argsort(kind="stable")[: self.most], less.argsort(kind="stable")
        n = int((more[first[: len(slots)]] > less[slots[: len(first)]]).sum())
        pairs = zip(slots[:n].tolist(), first[:n].tolist(), strict=True)
        return [(self.number, slot, int(coming[at]), float(more[at] - less[slot])) for slot, at in pairs]

    def swap(self, slot: int, expert: int) -> None:
        self.outside[self.of_slot[slot]], self.outside[expert] = True, False
        self.of_slot[slot] = expert


@pytest.mark.parametrize("limit", [1000, 3, 0])
@pytest.mark.parametrize("name", EXPERT_POLICIES)
def test_decisions_once_a_step_are_those_of_every_layer(name: str, limit: int) -> None:
    """By tallies alone, bit for bit those of numpy; where these are more than a step may copy, those that gain most."""
    layers = {2: 24, 5: 24, 6: 9, 7: 24}
    starts = {layer: np.random.default_rng(layer).dirichlet(np.ones(n)) * 3 for layer, n in layers.items()}
    slots = {2: 8, 5: 20, 6: 4, 7: 1}
    policy = Policy(name, slots, layers, starts)
    plain = [Plain(name, slots[layer], starts[layer], at, 4) for at, layer in enumerate(layers)]
    tallies = {layer: np.full(n + 1, 5, np.int64) for layer, n in layers.items()}
    for layer, tally in tallies.items():
        policy.watch(layer, tally)
    selected = {layer: random_selections(600, n, 3, layer) for layer, n in layers.items()}
    at = made = 0
    while at < 600:
        tokens = 1 + at % 3
        swaps: list[tuple[int, int, int, float]] = []
        for one, layer in zip(plain, layers, strict=True):
            step = selected[layer][at : at + tokens].reshape(-1)
            np.add.at(tallies[layer], step, 1)
            swaps += one.wanted(step, tokens)
        kept = sorted(sorted(swaps, key=lambda swap: -swap[3])[:limit], key=lambda swap: swap[0])
        assert policy.decide(tokens, limit) == [(list(layers)[own], *swap) for own, *swap, _ in kept]
        for own, slot, expert, _ in kept:
            plain[own].swap(slot, expert)
        made, at = made + len(kept), at + tokens
        if at % 50 == 0:  # a step that is none
            tallies[5][:3] += 7
            policy.forget()
    for one, layer in zip(plain, layers, strict=True):
        np.testing.assert_array_equal(policy.resident(layer), one.of_slot)
    assert (made > 0) == (name != "static" and limit > 0)


def test_steps_are_numbers_that_begin_anew() -> None:
    """What was selected before that stays older than what is selected after it."""
    start, none = np.array([0.4, 0.3, 0.2, 0.1]), np.zeros(4, np.int64)
    policy, plain = Policy("lru", {0: 2}, {0: 4}, {0: start}), Plain("lru", 2, start)
    assert isinstance(plain.ranking, Lru)
    for _ in range((1 << 16) - 5):
        policy._decisions.observe(0, none, 1)
    plain.ranking._step += (1 << 16) - 5
    for step in itertools.islice(itertools.cycle([[0], [2], [1], [1], [3], [0]]), 20):
        wanted = plain.wanted(step, 1)
        assert policy.observe(0, step) == [(slot, expert) for _, slot, expert, _ in wanted]
        for _, slot, expert, _ in wanted:
            plain.swap(slot, expert)
    assert plain.ranking._step < 20


def test_arrays_that_do_not_fit_are_refused() -> None:
    policy = Policy("lru", {0: 2}, {0: 4}, START)
    with pytest.raises(ValueError, match="another number of experts"):
        policy.watch(0, np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="another number of experts"):
        policy.observe(0, [7])
    with pytest.raises(ValueError, match="a step has tokens"):
        policy.decide(0, 4)
    with pytest.raises(TypeError):
        policy.watch(0, np.zeros(5, np.int32))  # type: ignore[arg-type]


def best(frequencies: Mapping[int, np.ndarray], slots: Mapping[int, int]) -> float:
    return sum(float(np.sort(each)[::-1][: slots[layer]].sum()) for layer, each in frequencies.items())


def test_slots_by_frequency_hit_most() -> None:
    """Against every division of five slots among two layers."""
    frequencies = {0: np.array([0.9, 0.8, 0.2, 0.1]), 2: np.array([0.5, 0.5, 0.5, 0.5])}
    found = slots_by_frequency(frequencies, {0: 7, 2: 7}, 5 * 7 + 6)
    assert sum(found.values()) == 5
    assert best(frequencies, found) == max(best(frequencies, {0: n, 2: 5 - n}) for n in range(1, 5))
    assert slots_by_frequency(frequencies, {0: 7, 2: 7}, 10**6) == {0: 4, 2: 4}
    assert slots_by_frequency(frequencies, {0: 7, 2: 7}, 6) == {0: 0, 2: 0}
    assert slots_by_frequency(frequencies, {0: 70, 2: 7}, 76) == {0: 0, 2: 4}, "bytes count"


def test_slots_in_least_time() -> None:
    """Beside all ways to fill the room: little slower than the best, and no slower than without whole layers."""
    rng = np.random.default_rng(3)
    for sync, skew, gpu in itertools.product((0.0, 0.3, 1.0, 4.0), (0.0, 0.7, 2.0), (0.0, 0.5)):
        frequencies, seconds = {}, {}
        for layer in range(3):
            each = rng.permutation(np.arange(1, 6.0) ** -skew)
            frequencies[layer] = 2 * each / each.sum()
            hits = np.concatenate([[0], np.cumsum(np.sort(frequencies[layer])[::-1])])
            seconds[layer] = np.maximum(1 + gpu * hits, 2 - hits + sync * (np.arange(6) < 5))

        def taken(slots: Mapping[int, int], of: Mapping[int, Any] = seconds) -> float:
            return sum(float(of[layer][n]) for layer, n in slots.items())

        for budget in range(0, 16):
            given = frequencies, seconds, dict.fromkeys(range(3), 1), budget
            found = slots_in_least_time(*given)
            every = [dict(enumerate(n)) for n in itertools.product(range(6), repeat=3) if sum(n) == min(budget, 15)]
            best = min(map(taken, every))
            assert sum(found.values()) <= budget and taken(found) <= 1.05 * best, (sync, skew, gpu, budget)
            plain = slots_by_frequency(frequencies, given[2], budget)
            evenly = slots_evenly(dict.fromkeys(range(3), 5), given[2], budget)
            assert taken(found) <= 1.002 * min(taken(plain), taken(evenly))


def test_slots_evenly() -> None:
    assert slots_evenly({0: 4, 1: 8}, {0: 5, 1: 5}, 35) == {0: 4, 1: 3}
    assert slots_evenly({0: 2, 1: 8}, {0: 5, 1: 5}, 35) == {0: 2, 1: 5}
    assert slots_evenly({0: 2, 1: 8}, {0: 5, 1: 5}, 10**6) == {0: 2, 1: 8}
    assert slots_evenly({0: 2, 1: 8}, {0: 5, 1: 5}, 0) == {0: 0, 1: 0}
