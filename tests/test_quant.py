"""Block formats against the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize as oracle_dequantize
from gguf.quants import quantize as oracle_quantize

from powerinfer.errors import ModelError
from powerinfer.formats.quant import BLOCK_TYPES, BlockType, block_type, can_dequantize, dequantize, quantize

READABLE = [kind for kind in BLOCK_TYPES.values() if can_dequantize(kind.name)]
NEW = {"Q1_0": (128, 18), "Q2_0": (64, 18)}  # that the package does not read yet: elements and bytes of a block
BLOCKS = [kind for kind in READABLE if kind.block > 1 and kind.name not in NEW]
WRITABLE = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
Q8_1_IN_FILES = 36  # ggml's block_q8_1 holds two halves and 32 bytes; the gguf package says 40


def ids(kind: BlockType) -> str:
    return kind.name


def test_sizes_are_those_of_the_format() -> None:
    for type_id, (block, nbytes) in GGML_QUANT_SIZES.items():
        kind = BLOCK_TYPES[int(type_id)]
        expected = Q8_1_IN_FILES if type_id.name == "Q8_1" else nbytes
        assert (kind.name, kind.block, kind.nbytes) == (type_id.name, block, expected)
    assert {kind.name for kind in BLOCK_TYPES.values()} - {type_id.name for type_id in GGML_QUANT_SIZES} <= {"Q2_0"}
    assert {name: (block_type(name).block, block_type(name).nbytes) for name in NEW} == NEW
    assert (block_type("Q1_0").id, block_type("Q2_0").id) == (41, 42)


def random_blocks(kind: BlockType, rows: int, per_row: int, seed: int) -> np.ndarray:
    """Random bytes: every bit pattern of every field, infinite and NaN scales among them."""
    return np.random.default_rng(seed).integers(0, 256, (rows, per_row * kind.nbytes), dtype=np.uint8)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal, +0 and -0 told apart, any NaN equal to any other (its payload is not specified)."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(np.all(nan | (a.view(np.uint32) == b.view(np.uint32))))


@pytest.mark.parametrize("kind", BLOCKS, ids=ids)
@pytest.mark.parametrize(("rows", "per_row"), [(1, 1), (3, 5), (67, 9)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_dequantize_matches_gguf(kind: BlockType, rows: int, per_row: int) -> None:
    data = random_blocks(kind, rows, per_row, seed=kind.id * 100 + rows)
    expected = oracle_dequantize(data, gguf.GGMLQuantizationType(kind.id)).astype(np.float32)
    actual = dequantize(data, kind.name)
    assert actual.shape == (rows, per_row * kind.block) and actual.dtype == np.float32
    assert same_bits(actual, expected.reshape(actual.shape))


@pytest.mark.parametrize("name", NEW)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_codes_in_their_order_behind_a_scale(name: str) -> None:
    """As llama.cpp reads Q1_0, of bits that stand for -d and d, and Q2_0, of two bits that stand for -d to 2 d."""
    block, nbytes = NEW[name]
    bits = 8 * (nbytes - 2) // block
    data = random_blocks(block_type(name), 5, 7, seed=block)
    expected = []
    for one in data.reshape(-1, nbytes):
        d = one[:2].view("<f2")[0].astype(np.float32)
        for element in range(block):
            code = int(one[2 + element * bits // 8]) >> element * bits % 8 & (1 << bits) - 1
            expected.append((d if code else -d) if bits == 1 else np.float32(code - 1) * d)
    assert same_bits(dequantize(data, name), np.array(expected, np.float32).reshape(5, -1))


def test_dequantize_spans_chunks() -> None:
    kind = block_type("Q4_1")
    data = random_blocks(kind, 700, 30, seed=7)  # 672,000 elements: several chunks and a rest
    with np.errstate(all="ignore"):
        expected = oracle_dequantize(data, gguf.GGMLQuantizationType.Q4_1)
        assert same_bits(dequantize(data, "Q4_1"), expected)


@pytest.mark.parametrize("bits", [16, 32])
def test_plain_floats(bits: int) -> None:
    rng = np.random.default_rng(0)
    if bits == 32:
        values = rng.standard_normal((3, 7)).astype(np.float32)
        assert np.array_equal(dequantize(values.view(np.uint8), "F32"), values)
        double = values.astype(np.float64)
        assert np.array_equal(dequantize(double.view(np.uint8), "F64"), values)
        return
    every = np.arange(65536, dtype=np.uint16).reshape(16, -1)
    assert same_bits(dequantize(every.view(np.uint8), "F16"), every.view(np.float16).astype(np.float32))
    assert same_bits(dequantize(every.view(np.uint8), "BF16"), (every.astype(np.uint32) << 16).view(np.float32))


def hard_values(seed: int) -> np.ndarray:
    """Rows that meet every branch: spreads of scale, zeros, exact halves, peaks of both signs, subnormals."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((64, 96)).astype(np.float32) * np.float32(10.0) ** rng.integers(-6, 4, (64, 1))
    x = x.astype(np.float32)
    x[0] = 0
    x[1] = np.float32(0.25)
    x[2] = np.tile(np.array([127, -127, 0.5, -0.5, 1.5, -63.5, 2.5, 126.5], np.float32), 12)
    x[3, ::2], x[3, 1::2] = 3, -3  # equal peaks of both signs: the first one sets the scale
    x[4] = np.linspace(-1e-6, 1e-6, 96, dtype=np.float32)
    x[5, :48] = 0
    x[6] = -np.abs(x[6])
    x[7] = np.tile(np.array([-8, 8, 7.5, -7.5, 0.5, 1.5, 2.5, 3.5], np.float32), 12)
    return x


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_quantize_matches_gguf(name: str) -> None:
    for seed in range(5):
        x = hard_values(seed)
        expected = oracle_quantize(x, gguf.GGMLQuantizationType[name])
        assert np.array_equal(quantize(x, name), expected)


def test_bf16_and_f16_match_gguf() -> None:
    x = hard_values(3)
    x[9, :3] = np.nan, np.inf, -np.inf
    with np.errstate(over="ignore"):
        for name in ("BF16", "F16"):
            expected = oracle_quantize(x, gguf.GGMLQuantizationType[name])
            assert np.array_equal(quantize(x, name), expected.view(np.uint8).reshape(x.shape[0], -1)), name


@pytest.mark.parametrize("name", WRITABLE)
def test_round_trip_error_is_within_half_a_step(name: str) -> None:
    x = np.random.default_rng(1).uniform(-1, 1, (8, 256)).astype(np.float32)
    back = dequantize(quantize(x, name), name)
    # A step is the range over the codes; a symmetric type may clip its far end by one more half step. The scale (and
    # the floor) are stored as float16: relative error 2**-11 of values up to 1 each.
    steps = {"Q8_0": 1 / 127, "Q4_0": 2 / 16, "Q5_0": 2 / 32, "Q4_1": 2 / 15, "Q5_1": 2 / 31, "MXFP4": 1 / 2}
    bound = steps[name] * (1 if name in ("Q4_0", "Q5_0") else 0.5) + 2 * 2**-11 * 1.1
    assert np.abs(back - x).max() <= bound


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_quantize_refuses_what_it_cannot_hold(name: str, bad: float) -> None:
    if name == "MXFP4" and np.isfinite(bad):
        return  # its scales reach as far as float32
    x = np.zeros((2, 64), np.float32)
    x[1, 40] = bad
    with pytest.raises(ModelError, match="cannot be quantised"):
        quantize(x, name)


def test_errors_name_the_type() -> None:
    with pytest.raises(ModelError, match="Q8_K"):
        dequantize(np.zeros((1, 292), np.uint8), "Q8_K")
    with pytest.raises(ModelError, match="'Q9_9'"):
        block_type("Q9_9")
    with pytest.raises(ModelError, match="whole Q8_0 blocks"):
        dequantize(np.zeros((1, 35), np.uint8), "Q8_0")
    with pytest.raises(ModelError, match="Q4_0"):
        quantize(np.zeros((1, 33), np.float32), "Q4_0")
    with pytest.raises(ModelError, match="Q6_K"):
        quantize(np.zeros((1, 256), np.float32), "Q6_K")
    with pytest.raises(ValueError, match="whole Q4_0 blocks"):
        block_type("Q4_0").row_bytes(31)


def test_empty_rows() -> None:
    assert dequantize(np.zeros((0, 34), np.uint8), "Q8_0").shape == (0, 32)
    assert quantize(np.zeros((0, 32), np.float32), "Q8_0").shape == (0, 34)
