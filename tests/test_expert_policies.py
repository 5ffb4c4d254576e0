"""Policies that place experts: small traces computed by hand, and what every policy must keep to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from powerinfer.placement.experts import (
    EXPERT_POLICIES,
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
