"""The nouns: layouts add up, placements cut a layer into parts that are disjoint and complete."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerinfer.neurons import BundleLayout, Placement, Predictor, Tier


def test_a_gated_bundle() -> None:
    layout = BundleLayout(100, True, "F16", "Q8_0", 256, 128)
    assert (layout.gate_at, layout.up_at, layout.down_at, layout.stride) == (0, 256, 512, 640)


def test_a_plain_bundle() -> None:
    layout = BundleLayout(100, False, "F16", "F16", 256, 256)
    assert (layout.up_at, layout.down_at, layout.stride) == (0, 256, 512)
    with pytest.raises(AssertionError):
        layout.gate_at  # noqa: B018


@pytest.mark.parametrize("wrong", [{"d_model": 0}, {"gate_bytes": 100}, {"down_bytes": 0}, {"down_bytes": -64}])
def test_layouts_that_cannot_be(wrong: dict[str, int]) -> None:
    good = BundleLayout(100, True, "F16", "Q8_0", 256, 128)
    with pytest.raises(AssertionError):
        dataclasses.replace(good, **wrong)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"floor": -1}, {"threshold": float("nan")}, {"threshold": np.inf}])
def test_predictors_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        dataclasses.replace(Predictor(16, 0.5, 0), **wrong)


@given(st.data(), st.integers(1, 300), st.integers(1, 80), st.integers(1, 3))
def test_parts_are_disjoint_ascending_and_complete(data: st.DataObject, d_ff: int, size: int, layers: int) -> None:
    groups = -(-d_ff // size)
    one = st.lists(st.sampled_from(Tier), min_size=groups, max_size=groups)
    chosen = data.draw(st.lists(one, min_size=layers, max_size=layers))
    placement = Placement(d_ff, size, tuple(np.array(tiers, np.int8) for tiers in chosen))
    for layer, tiers in enumerate(chosen):
        parts = placement.parts(layer)
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
    Placement(100, 32, (np.zeros(4, np.int8),))
    with pytest.raises(AssertionError):
        Placement(100, 32, (np.zeros(4, np.int8), tiers))
