"""The kernels over single neurons at every level that runs here: rows, lists, activations, batches.

The truth is float64 on the values that the rows hold, with activations in the form that their type requires.
A float32 sum of n products is off by at most n * eps * sum |a b|; the bounds below carry that through the products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from levels import LEVELS, each_level
from reference import seen_by
from stored_weights import stored_evenly

from powerinfer import _native
from powerinfer.formats.quant import block_type, dequantize, quantize
from powerinfer.formats.weight_types import STORED_ROWS

EPS = float(np.finfo(np.float32).eps)
TYPES = ("F16", "BF16", "Q8_0", "Q4_0")
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
ACROSS = {f"{kind}X32": kind for kind in BLOCKS}  # with the types of their blocks
BITS = {"Q8_0": 8, "Q5_0": 5, "Q5_1": 5}  # of codes, where they are not four
MINIMA = ("Q4_1", "Q5_1")
OFFSETS = {"Q4_0": 8, "Q5_0": 16}  # of codes
ENTRIES = {  # of codes that are numbers of them
    "IQ4_NL": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "MXFP4": (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6),
}
DOTS_ALONE = ("Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
GROUP = _native.GROUP
ACTIVATIONS = ("silu", "gelu_tanh", "relu", "relu2", "fatrelu", "drelu", "cats", "xielu")
CURVE = (0.7, 1.1, 0.5, -1e-6)
"""Of xielu."""
THRESHOLD = 0.25
POOL = _native.Pool(2)


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    """The rows as a model file stores them, uint8 [rows, row_bytes]."""
    if kind == "F16":
        return values.astype(np.float16).view(np.uint8)
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if kind == "IQ4_NL" or kind in STORED_ROWS:
        return stored_evenly(kind, *values.shape, 1.0, np.random.default_rng(values.shape)).reshape(len(values), -1)
    return quantize(values, kind)


def across(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(blocks across each 32 neurons of values [neurons, k], group by group; the values that they hold, any for a type
    that cannot be written)."""
    neurons, k = values.shape
    whole = np.zeros((-(-neurons // GROUP) * GROUP, k), np.float32)
    whole[:neurons] = values
    if kind == "IQ4_NL":
        blocks = stored_evenly(kind, k, len(whole), 1.0, np.random.default_rng([neurons, k])).reshape(k, -1)
    else:
        blocks = quantize(np.ascontiguousarray(whole.T), kind)
    held = np.ascontiguousarray(dequantize(blocks, kind).T)[:neurons]
    return np.ascontiguousarray(blocks.reshape(k, -1, block_type(kind).nbytes).transpose(1, 0, 2)).reshape(-1), held


def fifths(kind: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the fifth bits of the codes of a row lie: (byte, bit) of each element, see csrc/table.h."""
    every = np.arange(k)
    line = -(-k // 128) * 64 + every // 512 * 64
    if kind in ACROSS:  # of the sixteen columns that begin at 16 b it is bit b
        return line + every % 16 // 4 * 16 + every % 512 // 128 * 4 + every % 4, every % 128 // 16
    lanes, block, v = np.minimum(k // 32 - every // 512 * 16, 16), every // 32 % 16, every % 32 // 4
    word = np.where(np.isin(lanes, (1, 2, 4, 8)), v % 4 * lanes + block, block)
    bit = np.where(np.isin(lanes, (1, 2, 4, 8)), word // 16 + 4 * (v >= 4), v)
    return line + word % 16 * 4 + every % 4, bit


def spec_of(activation: str, *settings: Any) -> _native.NeuronSpec:
    """What neurons compute, with `CURVE` where the activation has one."""
    return _native.NeuronSpec(activation, *settings, curve=CURVE if activation == "xielu" else ())


@dataclass
class Layer:
    """Bundles of one layer, and the values that they hold in float64."""

    native: Any
    data: np.ndarray  # uint8 [groups, bytes of a group]
    gate: np.ndarray | None  # [neurons, d_model], and so the others
    up: np.ndarray
    down: np.ndarray
    activation: str
    up_type: str
    down_type: str
    biases: tuple[np.ndarray | None, np.ndarray | None]
    limits: np.ndarray | None  # of each neuron, in place of THRESHOLD
    product_limits: np.ndarray | None  # of each neuron

    @property
    def neurons(self) -> int:
        return len(self.up)


def make_layer(
    k: int,
    neurons: int,
    types: tuple[str, str],
    activation: str = "relu",
    gated: bool = True,
    biases: bool = False,
    limits: np.ndarray | None = None,
    product_limits: np.ndarray | None = None,
) -> Layer:
    rng = np.random.default_rng([k, neurons])
    parts = [("gate", types[0], "dot")] * gated + [("up", types[0], "dot"), ("down", types[1], "add")]
    sizes = [_native.bundle_row_bytes(kind, k) for _, kind, _ in parts]
    pitch = sum(sizes)
    data = np.full((-(-neurons // GROUP), GROUP * pitch + _native.shared_bytes(types[1], k)), 0xAA, np.uint8)
    held, at = {}, {}
    for (name, kind, use), offset in zip(parts, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True):
        values = rng.standard_normal((neurons, k)).astype(np.float32)
        if kind in ACROSS:
            rows, values = across(values, ACROSS[kind])
        else:
            rows = stored(values, kind)
            values = dequantize(rows, kind)
        _native.pack_bundle_rows(POOL, kind, use, neurons, k, rows.reshape(-1), data, pitch, offset)
        held[name] = values.astype(np.float64)
        at[name] = offset
    bias = [rng.standard_normal(neurons).astype(np.float32) if biases else None for _ in range(2)]
    if not gated:
        bias[0] = None
    native = _native.Bundles(
        data, neurons, k, types[0] if gated else None, *types, pitch, at.get("gate", 0), at["up"], at["down"],
        spec_of(activation, THRESHOLD if limits is None else 0.0, *bias, limits, product_limits),
    )  # fmt: skip
    values = held.get("gate"), held["up"], held["down"]
    return Layer(native, data, *values, activation, *types, (bias[0], bias[1]), limits, product_limits)


def limits_of(neurons: int) -> np.ndarray:
    """A threshold of its own for each neuron."""
    return np.random.default_rng([neurons, 2]).uniform(0, 2, neurons).astype(np.float32)


def products_of(neurons: int) -> np.ndarray:
    """A threshold of its own for each neuron's product: of gate and up, which are about 8, a quarter is below."""
    return np.random.default_rng([neurons, 3]).uniform(0, 40, neurons).astype(np.float32)


def activate(x: np.ndarray, activation: str, limit: float | np.ndarray = THRESHOLD) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "cats":
        s = x / (1 + np.exp(-x))
        return np.where(np.abs(s) > limit, s, 0)
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if activation == "fatrelu":
        return np.where(x > limit, x, 0)
    if activation == "xielu":
        return np.where(x > 0, CURVE[0] * x * x, CURVE[1] * (np.expm1(np.minimum(x, CURVE[3])) - x)) + CURVE[2] * x
    return np.maximum(x, 0) ** (2 if activation == "relu2" else 1)


def steepest(x: np.ndarray, activation: str) -> np.ndarray:
    """The maximum slope of the activation."""
    return 2 * np.abs(x) + 1 if activation in ("relu2", "xielu") else np.full(x.shape, 1.2)


def expected(layer: Layer, x: np.ndarray, index: np.ndarray, most: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """(sum of the listed neurons, bound of its error), float64 [tokens, d_model]."""
    seen = seen_by(x, layer.up_type)
    k = x.shape[1]
    limit = THRESHOLD if layer.limits is None else layer.limits[index]

    def dots(weights: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        value, size = seen @ weights[index].T, np.abs(seen) @ np.abs(weights[index].T)
        if bias is not None:
            value, size = value + bias[index], size + np.abs(bias[index])
        return value, (k + 2) * EPS * size

    if layer.gate is None:
        first, first_off = dots(layer.up, layer.biases[1])
        h = activate(first, layer.activation, limit)
        off = first_off * steepest(first, layer.activation) + 4 * EPS * np.abs(h)
    else:
        first, first_off = dots(layer.gate, layer.biases[0])
        up, up_off = dots(layer.up, layer.biases[1])
        gate = activate(first, layer.activation, limit)
        gate_off = first_off * steepest(first, layer.activation) + 4 * EPS * np.abs(gate)
        if most:
            assert (np.abs(np.abs(gate) - most) > gate_off).all(), "the case depends on a rounding"
            gate = np.where(np.abs(gate) > most, gate, 0)
            gate_off = np.where(gate != 0, gate_off, 0)
        if layer.activation == "drelu":
            up = np.maximum(up, 0)
        h = gate * up
        off = gate_off * np.abs(up) + np.abs(gate) * up_off + gate_off * up_off + EPS * np.abs(h)
        if layer.product_limits is not None:
            least = layer.product_limits[index]
            near = np.abs(np.abs(h) - least) <= off  # a rounding decides whether it is h or 0
            h = np.where(np.abs(h) <= least, 0, h)
            off = np.where(near, 2 * off + least, np.where(h == 0, 0, off))
    if layer.activation == "fatrelu":
        assert (np.abs(first - limit) > first_off).all(), "the case depends on a rounding"
    if layer.activation == "cats":
        near = np.abs(np.abs(activate(first, "silu")) - limit)
        assert (near > 1.2 * first_off).all(), "the case depends on a rounding"
    if layer.down_type in ACROSS:  # h in 8 bits of the largest of its group
        for group in np.unique(index // GROUP):
            of = index // GROUP == group
            off[:, of] += ((np.abs(h) + off)[:, of].max(axis=1) / 254 * 1.001)[:, None]
    size = np.abs(layer.down[index])
    return h @ layer.down[index], off @ size + (len(index) + 2) * EPS * (np.abs(h) @ size)


def part(layer: Layer, x: np.ndarray, index: np.ndarray, level: str, most: float = 0.0) -> np.ndarray:
    out = np.zeros((len(x), x.shape[1]), np.float32)
    layer.native.add(level, x, np.ascontiguousarray(index, np.int32), out, most)
    return out


def tokens(n: int, k: int) -> np.ndarray:
    return np.random.default_rng([n, k, 7]).standard_normal((n, k)).astype(np.float32)


def check(layer: Layer, x: np.ndarray, index: np.ndarray, level: str, most: float = 0.0) -> None:
    want, bound = expected(layer, x, index, most)
    off = np.abs(part(layer, x, index, level, most) - want)
    assert (off <= bound + 1e-30).all(), (off - bound).max()


@pytest.mark.parametrize(
    ("kind", "use"),
    [(kind, use) for kind in TYPES for use in ("dot", "add")] + [(kind, "dot") for kind in (*DOTS_ALONE, *STORED_ROWS)],
)
def test_a_part_holds_what_was_packed_into_it(kind: str, use: str) -> None:
    block = block_type(kind).block
    for k in (
        {block, 3 * block, 4 * block, 5 * block, 17 * block, 15, 33, 128}
        if block == 1
        else (32, 96, 128, 160, 544)
        if block == 32
        else (block, 3 * block)
    ):
        size = _native.bundle_row_bytes(kind, k)
        assert size % 64 == 0 and _native.shared_bytes(kind, k) == 0
        rows = stored(np.random.default_rng(k).standard_normal((37, k)).astype(np.float32), kind)
        data = np.full((2, GROUP, size + 128), 0x55, np.uint8)
        _native.pack_bundle_rows(POOL, kind, use, 37, k, rows.reshape(-1), data.reshape(2, -1), size + 128, 64)
        assert (data[..., :64] == 0x55).all() and (data[..., 64 + size :] == 0x55).all(), "written beside the part"
        back = np.full((37, k), np.nan, np.float32)
        _native.unpack_bundle_rows(kind, use, k, data.reshape(2, -1), size + 128, 64, back)
        np.testing.assert_array_equal(back, dequantize(rows, kind))


@pytest.mark.parametrize(
    ("kind", "use"),
    [(kind, use) for kind in TYPES for use in ("dot", "add")]
    + [(kind, "dot") for kind in DOTS_ALONE]
    + [(kind, "add") for kind in ACROSS],
)
def test_the_order_says_where_each_element_lies(kind: str, use: str) -> None:
    """Compared with the values that `unpack_bundle_rows` reads."""
    for k in (32, 96, 128, 160, 544, 1056):
        size, shared = _native.bundle_row_bytes(kind, k), _native.shared_bytes(kind, k)
        rng = np.random.default_rng(k)
        count = (k if shared else k // 32) if kind[0] in "QIM" else 0
        of_block = ACROSS.get(kind, kind)
        scales, mins = rng.standard_normal((2, count)).astype(np.float16)
        codes, order = _native.code_bytes(kind, k), _native.bundle_row_order(kind, use, k)
        data = np.zeros((1, GROUP * size + shared), np.uint8)
        row = data[0, :size]
        if kind in ("F16", "BF16"):
            values = rng.standard_normal(k).astype(np.float32)
            held = stored(values, kind).reshape(-1)
            row[order], row[order + 1] = held[::2], held[1::2]
            want = dequantize(held.reshape(1, -1), kind)[0]
        else:
            bits, every = BITS.get(of_block, 4), np.arange(k)
            values = rng.integers(0, 1 << bits, k)
            low = values if bits == 8 else (values & 15) << 4 * (every // 16 % 2)
            np.bitwise_or.at(row, order, low.astype(np.uint8))
            if bits == 5:
                at, bit = fifths(kind, k)
                np.bitwise_or.at(row, at, (values >> 4 << bit).astype(np.uint8))
            signed = values.astype(np.uint8).view(np.int8) if bits == 8 else values - OFFSETS.get(of_block, 0)
            if of_block in ENTRIES:
                signed = np.array(ENTRIES[of_block], np.float32)[values]
            behind, each = data[0, GROUP * size :] if shared else row[codes:], 1 if shared else 32
            if of_block == "MXFP4":
                exponents = rng.integers(0, 250, count)
                behind[:count] = exponents
                scales = np.exp2(exponents - 127.0)
            else:
                behind[: scales.nbytes] = scales.view(np.uint8)
            want = signed * np.repeat(scales.astype(np.float32), each)
            if of_block in MINIMA:
                at = 2 * (-(-k // 128) * 128 if shared else -(-k // 512) * 16)
                behind[at : at + mins.nbytes] = mins.view(np.uint8)
                want = want.astype(np.float32) + np.repeat(mins.astype(np.float32), each)
        back = np.empty((1, k), np.float32)
        _native.unpack_bundle_rows(kind, use, k, data, size, 0, back)
        np.testing.assert_array_equal(back[0], want.astype(np.float32))
    with pytest.raises(ValueError, match="whole blocks" if count else "for 'add'"):
        _native.bundle_row_order(kind, use if count else "other", 33)


@pytest.mark.parametrize("kind", ACROSS)
def test_blocks_across_neurons_are_kept(kind: str) -> None:
    for k in (32, 96, 128, 160, 544):
        rows, held = across(np.random.default_rng(k).standard_normal((70, k)).astype(np.float32), ACROSS[kind])
        size, shared = _native.bundle_row_bytes(kind, k), _native.shared_bytes(kind, k)
        of_block, lines = ACROSS[kind], -(-k // 128)
        bits = BITS.get(of_block, 4)
        assert size == (lines * 128 if bits == 8 else lines * 64 + (-(-k // 512) * 64 if bits == 5 else 0))
        assert shared == lines * 128 * (4 if of_block in MINIMA else 1 if of_block == "MXFP4" else 2)
        data = np.full((3, GROUP * (size + 128) + shared + 64), 0x55, np.uint8)
        _native.pack_bundle_rows(POOL, kind, "add", 70, k, rows, data, size + 128, 64)
        bundles = data[:, : GROUP * (size + 128)].reshape(3, GROUP, -1)
        assert (bundles[..., :64] == 0x55).all() and (bundles[..., 64 + size :] == 0x55).all(), "beside the part"
        assert (data[:, -64:] == 0x55).all(), "behind what is shared"
        back = np.full((70, k), np.nan, np.float32)
        _native.unpack_bundle_rows(kind, "add", k, data, size + 128, 64, back)
        np.testing.assert_array_equal(back, held)


@each_level(
    "types",
    [
        ("F16", "F16"),
        ("BF16", "BF16"),
        ("Q8_0", "Q8_0"),
        ("Q4_0", "Q8_0"),
        ("Q4_0", "Q4_0"),
        ("Q4_0", "Q4_0X32"),
        ("Q4_1", "Q4_1X32"),
        *((kind if kind in (*TYPES, *DOTS_ALONE) else "Q8_0", f"{kind}X32") for kind in BLOCKS[2:]),
        *((kind, "F16") for kind in STORED_ROWS),
    ],
    prompts=False,
)
def test_every_type_and_width(types: tuple[str, str], level: str) -> None:
    block = block_type(types[0]).block
    widths = (
        (block, 3 * block, 5 * block)
        if types[0] in STORED_ROWS
        else (32, 64, 96, 128, 160, 256, 512, 544, 576, 1056)
        if types[0] not in ("F16", "BF16")
        else (1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 576)
    )
    for k in widths:
        layer = make_layer(k, 23, types)
        for n in (1, 2, 3, 5, 8, 32):
            check(layer, tokens(n, k), np.arange(23), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, gated: bool, level: str) -> None:
    for biases in (False, True):
        layer = make_layer(64, 37, ("Q8_0", "F16"), activation, gated, biases)
        check(layer, tokens(3, 64), np.arange(37), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["fatrelu", "cats"])
def test_thresholds_of_neurons(activation: str, gated: bool, level: str) -> None:
    own = products_of(70) if gated and activation == "cats" else None
    layer = make_layer(64, 70, ("Q8_0", "F16"), activation, gated, True, limits_of(70), own)
    x = tokens(3, 64)
    for index in (np.arange(70), np.array([67, 3, 40])):
        check(layer, x, index, level, most=0.3 if gated else 0.0)
    _, bound = expected(layer, x, np.arange(70))
    for name in ("limits", "product_limits") if own is not None else ("limits",):
        moved: Any = {name: np.roll(getattr(layer, name), 1)}
        wrong, _ = expected(replace(layer, **moved), x, np.arange(70))
        assert (np.abs(wrong - part(layer, x, np.arange(70), level)) > bound).any(), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", ["fatrelu", "cats"])
def test_thresholds_alike_are_one(activation: str, level: str) -> None:
    """They give the same bits as one threshold of the layer, and a NaN in the input still gives NaN."""
    alike = np.full(37, THRESHOLD, np.float32)
    none = np.zeros(37, np.float32)  # products that are zero count as such
    one, each = (
        make_layer(64, 37, ("F16", "F16"), activation, limits=limits, product_limits=products)
        for limits, products in ((None, None), (alike, none))
    )
    x = tokens(5, 64)
    np.testing.assert_array_equal(part(each, x, np.arange(37), level), part(one, x, np.arange(37), level))
    x[2, 7] = np.nan
    out = part(each, x, np.arange(37), level)
    assert np.isnan(out[2]).all() and np.isfinite(out[[0, 1, 3, 4]]).all()


def test_thresholds_that_do_not_go_together_are_refused() -> None:
    own = np.zeros(37, np.float32)
    for activation, threshold in (("relu", 0.0), ("silu", 0.0), ("cats", 0.5)):
        with pytest.raises(ValueError, match="thresholds of neurons are for fatrelu and cats"):
            _native.NeuronSpec(activation, threshold, limits=own)
    for activation, limits in (("cats", None), ("relu", None), ("topk", own)):
        with pytest.raises(ValueError, match="thresholds of products go with thresholds of neurons"):
            _native.NeuronSpec(activation, 8.0 if activation == "topk" else 0.0, limits=limits, product_limits=own)
    for limits, products in ((own[1:].copy(), None), (own, own[1:].copy())):
        with pytest.raises(ValueError, match="thresholds must have one value for every neuron"):
            make_layer(64, 37, ("F16", "F16"), "cats", limits=limits, product_limits=products)
    with pytest.raises(ValueError, match="thresholds of products, but no gate"):
        make_layer(64, 37, ("F16", "F16"), "cats", gated=False, limits=own, product_limits=own)


@each_level("kind", [*TYPES, *ACROSS], prompts=False)
def test_lists_empty_full_short_and_unordered(kind: str, level: str) -> None:
    first = ACROSS.get(kind, kind)
    layer = make_layer(96, 41, (first if first in (*TYPES, *DOTS_ALONE) else "Q8_0", kind))
    x = tokens(2, 96)
    for index in ([], [40], [0, 40], [5, 3, 4], [*range(41)], [*range(1, 41, 3)], [2, 0, 39, 7, 11, 13, 17]):
        check(layer, x, np.asarray(index, np.int32), level)


@pytest.mark.parametrize("level", LEVELS)
def test_neurons_below_the_threshold_are_left_out(level: str) -> None:
    layer = make_layer(64, 50, ("Q8_0", "Q8_0"), "silu")
    x = tokens(3, 64)
    check(layer, x, np.arange(50), level, most=2.0)
    dense, _ = expected(layer, x, np.arange(50))
    assert np.abs(dense - part(layer, x, np.arange(50), level, 2.0)).max() > 1e-2, "nothing was left out"


@each_level(
    "types",
    [
        ("F16", "F16"),
        ("BF16", "BF16"),
        ("Q8_0", "Q8_0"),
        ("Q4_0", "Q4_0"),
        ("Q4_0", "Q4_0X32"),
        ("Q4_1", "Q4_1X32"),
        ("F16", "Q5_1X32"),
        ("Q8_0", "Q8_0X32"),
        *((kind, "F16") for kind in STORED_ROWS),
    ],
    prompts=False,
)
def test_a_token_has_the_same_bits_alone_in_a_batch_and_again(types: tuple[str, str], level: str) -> None:
    k = block_type(types[0]).block if types[0] in STORED_ROWS else 160
    layer = make_layer(k, 61, types)
    x = tokens(32, k)
    index = np.arange(61)
    whole = part(layer, x, index, level)
    np.testing.assert_array_equal(part(layer, x, index, level).view(np.uint32), whole.view(np.uint32))
    for n in (1, 2, 3, 5):
        some = part(layer, np.ascontiguousarray(x[32 - n :]), index, level)
        np.testing.assert_array_equal(some.view(np.uint32), whole[32 - n :].view(np.uint32))


@each_level(
    "types",
    [("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "Q8_0"), ("Q4_0", "Q8_0"), ("Q4_0", "Q4_0X32"), ("Q4_1", "Q4_1X32")],
    prompts=False,
)
def test_wherever_neurons_are_placed_the_parts_add_up(types: tuple[str, str], level: str) -> None:
    layer = make_layer(128, 200, types, "drelu")
    x = tokens(4, 128)
    want, bound = expected(layer, x, np.arange(200))
    rng = np.random.default_rng(3)
    for parts in (1, 2, 3, 4):
        place = rng.integers(0, parts, 200)
        total = sum(part(layer, x, np.flatnonzero(place == i), level).astype(np.float64) for i in range(parts))
        assert (np.abs(total - want) <= bound + 1e-30).all()


@pytest.mark.parametrize("level", LEVELS)
def test_nan_and_infinity_reach_the_output(level: str) -> None:
    layer = make_layer(32, 20, ("F16", "F16"))
    for value in (np.nan, np.inf):
        x = tokens(2, 32)
        x[1, 5] = value
        out = part(layer, x, np.arange(20), level)
        assert np.isfinite(out[0]).all() and not np.isfinite(out[1]).any()


def test_invalid_requests_are_refused() -> None:
    layer = make_layer(32, 4, ("F16", "F16"))
    x = tokens(1, 32)
    for index in ([4], [-1]):
        with pytest.raises(ValueError, match="no such neuron"):
            part(layer, x, np.asarray(index), "")
    with pytest.raises(ValueError, match="twice"):
        part(layer, x, np.asarray([2, 1, 2]), "")
    with pytest.raises(ValueError, match="between 1 and 32"):
        part(layer, tokens(33, 32), np.arange(4), "")
    with pytest.raises(ValueError, match="d_model"):
        part(layer, tokens(1, 33), np.arange(4), "")
    with pytest.raises(ValueError, match="not NVFP4"):
        _native.bundle_row_bytes("NVFP4", 256)
    for kind, k in (("Q8_0", 40), ("Q3_K", 128)):
        with pytest.raises(ValueError, match="whole blocks"):
            _native.bundle_row_bytes(kind, k)
    with pytest.raises(ValueError, match="as model files have them"):
        _native.bundle_row_order("Q3_K", "dot", 256)
    rows = stored(tokens(2, 64), "F16").reshape(-1)
    wide = (1, 32 * 128)
    for shape, pitch, at in (
        (wide, 128, 64), (wide, 128, 1), (wide, 128, -64), ((1, 32 * 128 + 2), 128, 0), ((2, 32 * 128), 128, 0),
        (wide, 192, 0), (wide, 64, 0), (wide, 0, 0), (wide, -128, 0), (wide, 1 << 62, 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"row"):
            _native.pack_bundle_rows(POOL, "F16", "dot", 2, 64, rows, np.zeros(shape, np.uint8), pitch, at)
    for kind, use, refused in (
        ("Q4_0X32", "dot", "for 'add' alone"),
        ("Q4_1", "add", "for 'dot' alone"),
        ("IQ3_S", "add", "for 'dot' alone"),
    ):
        with pytest.raises(ValueError, match=refused):
            rows = np.zeros(32 * 18, np.uint8)
            _native.pack_bundle_rows(POOL, kind, use, 32, 256, rows, np.zeros((1, 8192), np.uint8), 64, 0)
