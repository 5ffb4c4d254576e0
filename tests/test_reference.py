"""The reference operators against numbers worked out by hand. Every other kernel is compared with these."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import reference

from powerinfer.config import Mamba2Config

EPS = 2.0**-52


def close(actual: np.ndarray, expected: object) -> bool:
    """Equal up to a few roundings of float64."""
    return bool(np.allclose(actual, np.asarray(expected, np.float64), rtol=8 * EPS, atol=8 * EPS))


def test_activations_are_quantised_to_eight_bits_per_32() -> None:
    x = np.zeros((2, 64), np.float32)
    x[0, :4] = 254, -254, 1, 3  # a step is 2: halves go to the even code
    x[0, 4:6] = 5, -1.02
    x[1, 33] = -127
    codes, scales = reference.quantise_activations(x)
    assert codes.dtype == np.int8 and scales.shape == (2, 2)
    assert codes[0, :6].tolist() == [127, -127, 0, 2, 2, -1]
    assert codes[1, 33] == -127 and np.count_nonzero(codes) == 6
    assert scales.tolist() == [[2, 0], [0, 1]]


def test_the_smallest_activations_are_zeros() -> None:
    x = np.zeros((3, 32), np.float32)
    x[:, 0] = 2.0**-120, 2.0**-121, 1e-45
    codes, _ = reference.quantise_activations(x)
    assert codes[:, 0].tolist() == [127, 0, 0]


def test_bfloat16_rounds_to_nearest_even() -> None:
    step = 2.0**-7  # of bfloat16 between 1 and 2
    x = np.array([1, 1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -1 - step / 2, 0, -0.0, 3.0e38], np.float32)
    expected = [1, 1, 1 + 2 * step, 1 + step, -1, 0, 0, 226 * 2.0**120]  # 3e38 = 225.7 * 2**120
    assert reference.bfloat16_rounded(x).tolist() == expected


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_linear_of_floats(type_name: str) -> None:
    weights = np.array([[1, 2, 3], [-1, 0.5, 0]], np.float32)
    stored = {"F32": weights, "F16": weights.astype(np.float16)}.get(type_name)
    data = (weights.view(np.uint32) >> 16).astype(np.uint16) if stored is None else stored
    x = np.array([[1, 10, 100], [2, 0, 1.00390625]], np.float32)  # the last is between two bfloat16, the even one is 1
    last = 1 if type_name == "BF16" else 1.00390625
    expected = [[321, 4], [2 + 3 * last, -2]]
    assert reference.linear(x, data.reshape(-1).view(np.uint8), type_name, 2).tolist() == expected


def test_linear_of_blocks() -> None:
    block = np.zeros(34, np.uint8)  # Q8_0: scale 0.5, codes 4, -2, 0, ...
    block[:2] = np.array([0.5], np.float16).view(np.uint8)
    block[2:4] = 4, 254
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 127, 10.4, 99
    assert reference.linear(x, block, "Q8_0", 1).tolist() == [[0.5 * (4 * 127 - 2 * 10)]]


def test_rms_norm() -> None:
    x, weight = np.array([[3, 4, 0, 0]], np.float32), np.array([1, 2, 3, 4], np.float32)
    assert close(reference.rms_norm(x, weight, 0), [[3 / 2.5, 8 / 2.5, 0, 0]])
    assert close(reference.rms_norm(x, weight, 2.75), [[1, 8 / 3, 0, 0]])  # sqrt(25 / 4 + 2.75) = 3


def test_layer_norm() -> None:
    x, weight = np.array([[1, 3, 5, 7]], np.float32), np.array([1, 2, 3, 4], np.float32)  # mean 4, variance 5
    bias = np.array([0, 1, 0, -1], np.float32)
    assert close(reference.layer_norm(x, weight, bias, 4), [[-1, 1 - 2 / 3, 1, 3]])
    assert close(reference.layer_norm(x, weight, bias, 0), np.array([-3, -2, 3, 12]) / math.sqrt(5) + bias)


def test_rope_rotates_halves() -> None:
    x = np.array([[[1, 2, 3, 4, 5]]], np.float32)  # the fifth dimension is not rotated
    cos, sin = np.array([[0.0, -1.0]]), np.array([[1.0, 0.0]])  # by 90 and by 180 degrees
    assert reference.rope(x, cos, sin).tolist() == [[[-3, -2, 1, -4, 5]]]


def test_rotations() -> None:
    frequencies = np.array([1, 0.25], np.float32)
    cos, sin = reference.rotations(np.array([0, 2], np.int32), frequencies, 1.5)
    assert close(cos, [[1.5, 1.5], [1.5 * math.cos(2), 1.5 * math.cos(0.5)]])
    assert close(sin, [[0, 0], [1.5 * math.sin(2), 1.5 * math.sin(0.5)]])
    cos, _ = reference.rotations(np.array([16777217], np.int32), frequencies[:1], 1)
    assert close(cos, [[math.cos(16777216)]])  # a float32 has no 2**24 + 1


def test_activations() -> None:
    gate, up = np.array([0, math.log(3), -math.log(3), 1e3, -1e3]), np.array([5.0, 4, 4, 2, 2])
    assert close(reference.activate("silu", gate, up), [0, math.log(3) * 3, -math.log(3), 2e3, 0])
    gate, up = np.array([-1, 0, 0.25, 0.5, 3, math.nan]), np.array([5, 4, 3, 2, -1, 1.0])
    nan = math.nan
    for name, gated, plain in (
        ("relu", [0, 0, 0.75, 1, -3, nan], [0, 0, 0.25, 0.5, 3, nan]),
        ("relu2", [0, 0, 0.1875, 0.5, -9, nan], [0, 0, 0.0625, 0.25, 9, nan]),
        ("fatrelu", [0, 0, 0, 1, -3, nan], [0, 0, 0, 0.5, 3, nan]),
        ("drelu", [0, 0, 0.75, 1, 0, nan], [0, 0, 0.25, 0.5, 3, nan]),
    ):
        assert np.array_equal(reference.activate(name, gate, up, 0.25), gated, equal_nan=True), name
        assert np.array_equal(reference.activate(name, gate, threshold=0.25), plain, equal_nan=True), name
    silu = [-0.2689414213699951, 0, 0, 0.3112296656009273, 2.8577223804673]  # of 0.25 it is 0.14
    assert close(reference.activate("cats", gate[:-1], threshold=0.25), silu)
    assert close(reference.activate("cats", gate[:-1], up[:-1], 0.25), np.array(silu) * up[:-1])
    curve, low = (0.5, 2.0, 0.25, -math.log(2)), math.log(4)  # e^-log(2) is a half, e^-log(4) a quarter
    gate, up = np.array([2, 0, -0.5, -low, nan]), np.array([3.0, 1, 1, 2, 1])
    xielu = np.array([2.5, -1, -1 + 1 - 0.125, 2 * (low - 0.75) - low / 4, nan])
    assert np.allclose(reference.activate("xielu", gate, None, curve), xielu, 1e-15, equal_nan=True)
    assert np.allclose(reference.activate("xielu", gate, up, curve), xielu * up, 1e-15, equal_nan=True)
    gate = np.array([-1, 0, 0.25, 0.5, 3, nan])
    assert np.isnan(reference.activate("cats", gate[-1:], threshold=0.25)).all()
    assert np.isnan(reference.activate("drelu", np.ones(1), np.array([nan]))).all()


def test_keys_and_values_are_rounded_as_they_are_stored() -> None:
    x = np.array([1 + 2.0**-12, 1e9, -1e9, 6e-8], np.float32)
    assert np.array_equal(reference.kv_rounded(x, "f32"), x)
    assert reference.kv_rounded(x, "f16").tolist() == [1, 65504, -65504, 2.0**-24]
    head = np.zeros(40, np.float32)  # 32 and the rest of a head have scales of their own
    head[:3] = 254, 3.1, -0.9
    head[32:34] = -127, 0.6
    back = reference.kv_rounded(head, "q8_0")
    assert back[:3].tolist() == [254, 4, 0] and back[32:34].tolist() == [-127, 1]
    assert back.shape == (40,) and np.count_nonzero(back) == 4


def test_softmax() -> None:
    assert close(reference.softmax(np.array([0, math.log(3), -math.inf])), [0.25, 0.75, 0])
    assert close(reference.softmax(np.array([1e5, 1e5])), [0.5, 0.5])


def test_attention_over_scattered_pages() -> None:
    """Equal scores: the answer is the mean of the values seen. Position p holds value p; 2 heads share a key head."""
    dim, pages = 4, np.array([3, 0, 2, -1], np.int32)
    keys = np.zeros((4, 32, 2, dim), np.float32)
    values = np.full((4, 32, 2, dim), np.nan, np.float32)
    for position in range(96):
        values[pages[position // 32], position % 32, 0] = position
        values[pages[position // 32], position % 32, 1] = -10 * position
    q = np.ones((3, 4, dim), np.float32)
    positions = np.array([0, 33, 70], np.int32)
    out = reference.attention(q, keys, values, pages, positions)
    assert close(out[:, 0, 0], [0, 16.5, 35]) and close(out[:, 1], out[:, 0])
    assert close(out[:, 2, 0], [0, -165, -350]) and close(out[:, 3], out[:, 2])
    out = reference.attention(q, keys, values, pages, positions, window=3)
    assert close(out[:, 0, 0], [0, 32, 69])


def test_attention_weighs_by_scaled_scores() -> None:
    keys, values = np.zeros((1, 32, 1, 4), np.float32), np.zeros((1, 32, 1, 4), np.float32)
    keys[0, 1, 0] = math.log(3), 0, 0, 0
    values[0, :2, 0, 0] = 8, 16
    q = np.array([[[2, 5, 5, 5]]], np.float32)  # 2 log 3 / sqrt(4): weights 1 and 3
    out = reference.attention(q, keys, values, np.array([0], np.int32), np.array([1], np.int32))
    exact = float(np.float32(math.log(3)))
    assert close(out[0, 0, 0], (8 + 16 * math.exp(exact)) / (1 + math.exp(exact)))


def test_mamba_by_hand() -> None:
    """Two heads of one group each: the second has twice the x, and another B, that its state forgets at once."""
    x = np.array([[[2.0], [4.0]], [[3.0], [6.0]]])
    b, c = np.array([[[1.0], [1.0]], [[2.0], [5.0]]]), np.array([[[3.0], [3.0]], [[1.0], [1.0]]])
    steps = np.array([[0.5, 0.5], [1.0, 1.0]])
    out, state = reference.mamba(x, b, c, steps, np.array([-np.log(2), -1e9]), np.array([10.0, 0.0]))
    np.testing.assert_allclose(out[:, :, 0], [[23.0, 6.0], [36.5, 30.0]])
    np.testing.assert_allclose(state[:, 0, 0], [6.5, 30.0])
    a, d = np.array([-np.log(2), -1e9]), np.array([10.0, 0.0])
    half, kept = reference.mamba(x[:1], b[:1], c[:1], steps[:1], a, d)
    rest, last = reference.mamba(x[1:], b[1:], c[1:], steps[1:], a, d, kept)
    np.testing.assert_array_equal(np.concatenate([half, rest]), out)
    np.testing.assert_array_equal(last, state)


def test_a_layer_of_mamba_by_hand() -> None:
    """One head whose steps reach their limit, and no convolution but of the token itself: y = 2 x c b + x, gated."""
    about = Mamba2Config(1, 16, 1, 16, 2, norm="before", step_limits=(0.0, 2.0), activation="relu")
    ones = {"z": np.ones((16, 16)) / 16, "xbc": np.ones((48, 16)) / 16, "dt": np.ones((1, 16))}
    tensors = ones | {
        "conv": np.tile([0.0, 1.0], (48, 1)), "conv_bias": np.zeros(48), "step_bias": np.array([100.0]),
        "a": np.array([-1e9]), "d": np.array([1.0]), "norm": np.full(16, 3.0), "o": np.eye(16),
    }  # fmt: skip
    out = reference.mamba_layer(about, tensors, np.ones((2, 16)), 0.0)
    np.testing.assert_allclose(out, 3 / (1 + np.exp(-1)))  # all alike, so that the norm gives its weight
    gated = reference.mamba_layer(replace(about, norm="none"), tensors, np.ones((2, 16)), 0.0)
    np.testing.assert_allclose(gated, (2 * 16 + 1) / (1 + np.exp(-1)))
