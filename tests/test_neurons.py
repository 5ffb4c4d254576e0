"""The nouns: layouts add up, placements cut a layer into parts that are disjoint and complete."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerinfer.neurons import BundleLayout, NeuronPlacement, Predictor, Profile, Tier


def test_a_gated_bundle() -> None:
    layout = BundleLayout(100, True, "F16", "Q8_0", 256, 128)
    assert (layout.gate_at, layout.up_at, layout.down_at, layout.pitch) == (0, 256, 512, 640)
    assert (layout.stride, layout.group_bytes) == (640, 32 * 640)
    shared = dataclasses.replace(layout, shared_bytes=192)
    assert (shared.pitch, shared.stride, shared.group_bytes) == (640, 646, 32 * 640 + 192)


def test_a_plain_bundle() -> None:
    layout = BundleLayout(100, False, "F16", "F16", 256, 256)
    assert (layout.up_at, layout.down_at, layout.pitch) == (0, 256, 512)
    with pytest.raises(AssertionError):
        layout.gate_at  # noqa: B018


@pytest.mark.parametrize(
    "wrong", [{"d_model": 0}, {"gate_bytes": 100}, {"down_bytes": 0}, {"down_bytes": -64}, {"shared_bytes": 1}]
)
def test_layouts_that_cannot_be(wrong: dict[str, int]) -> None:
    good = BundleLayout(100, True, "F16", "Q8_0", 256, 128)
    with pytest.raises(AssertionError):
        dataclasses.replace(good, **wrong)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"floor": -1}, {"threshold": float("nan")}, {"threshold": np.inf}])
def test_predictors_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="predictor"):
        dataclasses.replace(Predictor(16, 0.5, 0), **wrong)


@given(st.data(), st.integers(1, 300), st.integers(1, 80), st.integers(1, 3))
def test_parts_are_disjoint_ascending_and_complete(data: st.DataObject, d_ff: int, size: int, layers: int) -> None:
    groups = -(-d_ff // size)
    one = st.lists(st.sampled_from(Tier), min_size=groups, max_size=groups)
    chosen = data.draw(st.lists(one, min_size=layers, max_size=layers))
    placement = NeuronPlacement((d_ff,) * len(chosen), size, tuple(np.array(tiers, np.int8) for tiers in chosen))
    for layer, tiers in enumerate(chosen):
        parts = placement.split_by_tier(layer)
        assert set(parts) == set(Tier)
        for tier, neurons in parts.items():
            assert neurons.dtype == np.int32
            assert (np.diff(neurons) > 0).all()
            assert all(tiers[neuron // size] is tier for neuron in neurons)
        assert sorted(np.concatenate(list(parts.values()))) == list(range(d_ff))


@pytest.mark.parametrize(
    "tiers",
    [
        pytest.param(np.zeros(3, np.int8), id="too few groups"),
        pytest.param(np.zeros(4, np.int32), id="another dtype"),
        pytest.param(np.zeros((2, 2), np.int8), id="another shape"),
        pytest.param(np.array([0, 1, 2, 3], np.int8), id="beyond the tiers"),
        pytest.param(np.array([0, -1, 0, 0], np.int8), id="below the tiers"),
    ],
)
def test_placements_that_cannot_be(tiers: np.ndarray) -> None:
    NeuronPlacement((100,), 32, (np.zeros(4, np.int8),))
    with pytest.raises(AssertionError):
        NeuronPlacement((100, 100), 32, (np.zeros(4, np.int8), tiers))


def profile(each: list[list[list[int]]], tokens: tuple[int, ...]) -> Profile:
    """A profile from counts[layer][corpus][neuron]."""
    counts = tuple(np.array(layer, np.int64) for layer in each)
    whole = tuple(layer.sum(axis=0) for layer in counts)
    names = tuple("abcdef"[: len(tokens)])
    active = (np.bincount([0] * sum(tokens), minlength=101),) * len(counts)
    return Profile(sum(tokens), whole, names, tokens, counts, active, (0.5,) * len(counts))


def test_a_profile_in_figures() -> None:
    one = profile([[[5, 0, 9, 1, 5]], [[0, 0, 0, 0, 0]]], (10,))
    assert one.n_layers == 2 and one.fraction(0).tolist() == [0.5, 0.0, 0.9, 0.1, 0.5]
    assert one.active_fraction(0) == 20 / 50 and one.active_fraction(1) == 0 and one.active_fraction() == 20 / 100
    assert one.order(0).tolist() == [2, 0, 4, 3, 1] and one.order(0).dtype == np.int32
    assert one.hot_share(0, 0.8) == 3 / 5, "9 + 5 of 20 are not 16, 9 + 5 + 5 are"
    assert (one.hot_share(0, 0.45), one.hot_share(0, 0.46)) == (1 / 5, 2 / 5)
    assert one.hot_share(1) == 0 and one.hot_share() == 3 / 10


def test_the_overlap_of_corpora() -> None:
    first, second = [9, 8, 7, 0, 0, 0, 0, 0, 0, 0], [0, 8, 9, 0, 0, 0, 0, 0, 0, 1]
    one = profile([[first, second]], (10, 10))
    assert one.overlap(0, 1) == 1 / 2, "{0, 1} and {2, 1}"
    assert one.overlap(0, 1, 1.0) == 2 / 3, "those that never fire are in no set"
    assert one.overlap(0, 0) == 1.0
    assert profile([[[0] * 10, [0] * 10]], (10, 10)).overlap(0, 1) is None


@given(st.data(), st.integers(1, 40))
def test_order_and_hot_share_by_brute_force(data: st.DataObject, d_ff: int) -> None:
    counts = data.draw(st.lists(st.integers(0, 9), min_size=d_ff, max_size=d_ff))
    one = profile([[counts]], (9,))
    assert one.order(0).tolist() == sorted(range(d_ff), key=lambda neuron: (-counts[neuron], neuron))
    enough = [n for n in range(d_ff + 1) if sum(sorted(counts, reverse=True)[:n]) >= 0.8 * sum(counts)]
    assert one.hot_share(0) == enough[0] / d_ff


def test_the_digest_depends_on_counts_and_tokens_only() -> None:
    one = profile([[[5, 0, 9]]], (10,))
    assert len(one.digest) == 64 and one.digest == dataclasses.replace(one, reuse=(0.1,), thresholds=(1.0,)).digest
    each = [([[[5, 0, 9]]], 11), ([[[5, 1, 9]]], 10), ([[[5, 0, 9]], [[0, 0, 0]]], 10)]
    others = [profile(counts, (tokens,)) for counts, tokens in each]
    assert len({one.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 11},
        {"counts": (np.array([5, 0, 9, 0]),)},
        {"corpora": ("a", "b")},
        {"reuse": ()},
        {"thresholds": (1.0, 2.0)},
        {"counts": (np.array([5, 0, 8]),)},
        {"counts": (np.array([5, 0, 9], np.int32),)},
        {"active": (np.zeros(100, np.int64),)},
    ],
    ids=str,
)
def test_profiles_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        dataclasses.replace(profile([[[5, 0, 9]]], (10,)), **wrong)  # type: ignore[arg-type]
