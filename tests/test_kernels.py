"""Native matrix products: every weight type at every instruction-set level of this CPU, against the reference.

The bound is that of float32 sums on the operands that the kernel really multiplies: n * u * sum |a| |b|, u = 2**-24.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import reference
from levels import FILES, LEVELS, each_level
from stored_weights import FLOATS, float_bytes, stored, with_scales

from powerinfer import _native
from powerinfer.config import ACTIVATIONS, EngineConfig
from powerinfer.devices.cpu_ffn import pack
from powerinfer.errors import RequestError
from powerinfer.formats.iq_grids import grid
from powerinfer.formats.mapped import MappedFile, is_mapped
from powerinfer.formats.quant import all_numbers, block_type, dequantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import NATIVE_TYPES, WEIGHT_TYPES
from powerinfer.kernels import cpu

POOLS = {threads: _native.Pool(threads) for threads in (1, 2, 3)}
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 70]
PARTS = 3
"""Of the shapes of products: each kernel meets one of them in `make test`, each type all of them, at some level."""
ROWS = [1, 3, 7, 8, 9, *range(15, 18), *range(31, 65), 70]

every_type = pytest.mark.parametrize("type_name", _native.TYPES)
every_level = pytest.mark.parametrize("level", LEVELS)
every_kernel = each_level("type_name", _native.TYPES)


def test_every_name_of_the_module_is_listed() -> None:
    assert set(FLOATS) < set(_native.TYPES) == NATIVE_TYPES and len(_native.TYPES) == len(NATIVE_TYPES)
    assert sorted(ACTIVATIONS) == sorted(_native.ACTIVATIONS)
    assert LEVELS[-1] == "scalar" and len(set(LEVELS)) == len(LEVELS)


def test_levels_have_kernels_of_the_files_that_are_listed() -> None:
    """What `each_level` leaves out is what no file of the level is compiled for."""
    text = (Path(__file__).parents[1] / "CMakeLists.txt").read_text()
    upon = re.findall(r"pi_level\((\w+) UPON \w+ FILES ([\w\s]+?)\s+FLAGS", text)
    assert {level: " ".join(files.split()) for level, files in upon} == FILES


def magnitude(data: np.ndarray, type_name: str, rows: int) -> np.ndarray:
    """|b| of the bound, [rows, k]: of scale * code + minimum both parts, since they are summed apart."""
    weights = dequantize(data.reshape(rows, -1), type_name).astype(np.float64)
    kind = WEIGHT_TYPES[type_name]
    blocks = data.reshape(rows, -1, kind.nbytes).copy()
    if type_name == "IQ1_S":
        zeros = int(np.flatnonzero((grid("IQ1") == 0).all(axis=1))[0])  # an entry
        blocks[..., 2:34] = zeros & 255
        high = blocks[..., 34:50].view("<u2")
        high[...] = high & 0xF000 | 0o1111 * (zeros >> 8)
    elif len(kind.halves) == 2:
        blocks[..., kind.codes_at : kind.codes_at + kind.codes] = 0
    else:
        return np.abs(weights)
    minima = dequantize(blocks.reshape(rows, -1), type_name).astype(np.float64)
    return np.abs(weights - minima) + np.abs(minima)


@dataclass(frozen=True)
class Case:
    x: np.ndarray
    matrix: _native.Matrix
    expected: np.ndarray
    bound: np.ndarray

    @property
    def rows(self) -> int:
        return self.expected.shape[1]

    def run(self, level: str, threads: int = 1, tokens: slice = slice(None)) -> np.ndarray:
        """The native product of some tokens. The output is NaN before; the padding must be zeros after."""
        x = np.ascontiguousarray(self.x[tokens])
        out = np.full((len(x), cpu.round_up(self.rows, cpu.LANES)), np.nan, np.float32)
        _native.matmul(POOLS[threads], self.matrix, level, x, out)
        assert not out[:, self.rows :].any()
        return out[:, : self.rows]

    def check(self, out: np.ndarray) -> None:
        excess = np.abs(out - self.expected) - self.bound
        assert not np.isnan(out).any() and excess.max() <= 0, f"{np.unravel_index(excess.argmax(), excess.shape)}"


def make_case(type_name: str, x: np.ndarray, data: np.ndarray, rows: int) -> Case:
    k = x.shape[1]
    # Float types: k products, k sums. Blocks: an exact integer sum, scaled twice (with scales of 16: four times) and
    # added; affine types add the minima. A level without fused operations rounds once more for each.
    n = 2 * k if type_name in FLOATS else 4 * k // 32 + 8
    a, b = np.abs(reference.seen_by(x, type_name)), magnitude(data, type_name, rows)
    bound = n * 2.0**-24 / (1 - n * 2.0**-24) * (a @ b.T) + n * 2.0**-126  # results below that may underflow
    if type_name == "BF16":  # units for bfloat16 take subnormal factors as zeros
        bound += np.where(a < 2.0**-126, a, 0) @ b.T + a @ np.where(b < 2.0**-126, b, 0).T
    matrix = _native.pack_matrix(POOLS[1], _native.Arena(), type_name, rows, k, data)
    return Case(x, matrix, reference.linear(x, data, type_name, rows), bound)


@cache
def random_case(type_name: str, k: int, rows: int, tokens: int) -> Case:
    rng = np.random.default_rng([k, rows, tokens, _native.TYPES.index(type_name)])
    x = rng.standard_normal((tokens, k)) * 10 ** rng.uniform(-3, 2, (tokens, 1))
    return make_case(type_name, x.astype(np.float32), stored(type_name, rows, k, rng), rows)


def columns(type_name: str) -> list[int]:
    if type_name in FLOATS:
        return [1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 96, 256, 512, 576, 1536, 4096]
    block = block_type(type_name).block
    return [k for k in (32, 64, 96, 160, 256, 512, 576, 768, 1536, 2048, 4096) if k % block == 0]


def shapes(type_name: str) -> list[tuple[int, int, int]]:
    """(k, rows, tokens): every k, every number of rows and every number of tokens, in changing company."""
    small = [k for k in columns(type_name) if k <= 256]
    some = [
        *zip(columns(type_name), cycle([17, 64, 33, 70, 15, 48, 1]), cycle([5, 1, 16, 2, 9, 33, 12]), strict=False),
        *zip(cycle(small), ROWS, cycle(TOKENS), strict=False),
        *zip(cycle(small[::-1]), cycle([31, 40, 80]), TOKENS, strict=False),
    ]
    return [*some, (small[-1] // 2 if type_name in FLOATS else small[-1], 4096, 3)]


@pytest.mark.sampled(("type_name", "level"), ("type_name", "part"), ("level", "part"))
@pytest.mark.parametrize("part", range(PARTS))
@every_kernel
def test_products(type_name: str, level: str, part: int) -> None:
    for i, shape in list(enumerate(shapes(type_name)))[part::PARTS]:
        case = random_case(type_name, *shape)
        case.check(case.run(level, threads=1 + i // PARTS % 3))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


@pytest.mark.sampled(("type_name", "level"), ("type_name", "threads"), ("level", "threads"))
@pytest.mark.parametrize("threads", POOLS)
@every_kernel
def test_bits_of_a_token_do_not_depend_on_company_or_threads(type_name: str, level: str, threads: int) -> None:
    k = 67 if type_name in FLOATS else 256 if block_type(type_name).block > 32 else 96
    case = random_case(type_name, k, 70, 70)
    alone = np.concatenate([case.run(level, tokens=slice(t, t + 1)) for t in range(70)])
    case.check(alone)
    for i, tokens in enumerate(TOKENS):  # the first ones and the last ones in turn
        some = slice(0, tokens) if (i + threads) % 2 else slice(70 - tokens, 70)
        assert same_bits(case.run(level, threads, some), alone[some]), tokens


@every_kernel
def test_bits_where_the_activations_outgrow_the_cache(type_name: str, level: str) -> None:
    """Kernels take as many tokens at a time as their cache holds: here fewer than there are."""
    case = random_case(type_name, 16384, 17, 48)
    together = case.run(level)
    case.check(together)
    for t in (0, 15, 16, 31, 32, 47):
        assert same_bits(case.run(level, tokens=slice(t, t + 1)), together[t : t + 1])


@pytest.mark.parametrize("type_name", [name for name in _native.TYPES if name != "BF16"])
@pytest.mark.skipif(len(LEVELS) < 3, reason="this CPU runs fewer than two levels with fused multiply-add")
def test_levels_agree(type_name: str) -> None:
    """Integer sums are exact and every level fuses the same operations: a model answers alike on different machines.

    All but the scalar level, which does not fuse, and BF16, whose units sum in an order of their own.
    """
    case = random_case(type_name, 512, 70, 33)
    best, *others = (case.run(level) for level in LEVELS if level != "scalar")
    for other in others:
        assert same_bits(best, other)


def filled(type_name: str, rows: int, k: int, code: int, scale: float) -> np.ndarray:
    """Blocks whose every byte but the float16 fields is `code`; floats: all `scale`, the sign of every third turned."""
    if type_name in FLOATS:
        weights = np.full(rows * k, scale, np.float32)
        weights[::3] *= -1
        return float_bytes(weights, type_name)
    shape = (rows, k // block_type(type_name).block)
    blocks = np.full((*shape, block_type(type_name).nbytes), code, np.uint8)
    return with_scales(blocks, type_name, np.full(shape, scale)).reshape(-1)


def hard_activations(k: int) -> np.ndarray:
    """Sixteen rows, so that units for many tokens come into play."""
    sign = np.where(np.arange(k) % 2 == 0, 1.0, -1.0)
    peak = np.where(np.arange(k) % 32 == 5, 1.0, 1e-3)
    with np.errstate(under="ignore"):
        rows = [np.ones(k), -np.ones(k), sign, -sign, np.zeros(k), 1e25 * np.ones(k), -1e25 * sign, 1e-40 * sign]
        rows += [1e-45 * np.ones(k), 2.0**-120 * sign, 2.0**-121 * sign, 1e-37 * peak, peak, sign * peak, 1e25 * peak]
        rows += [np.where(np.arange(k) // 32 % 2 == 0, 0, sign)]
        return np.asarray(rows, np.float32)


EXTREME_SCALES = (1.0, -1.0, 0.0, 2.0**-24, 1000.0)  # the fourth: the smallest of float16


@cache
def extreme_case(type_name: str) -> tuple[Case, np.ndarray]:
    """Rows of every code with every scale, more than one panel and part of another; which rows have scale 0."""
    k = 256 if block_type(type_name).block > 32 else 96
    codes = (0,) if type_name in FLOATS else (0x00, 0x01, 0x7F, 0x80, 0x88, 0xF0, 0xFF)
    of_rows = [(code, scale) for code in codes for scale in EXTREME_SCALES]
    of_rows *= 1 + cpu.LANES // len(of_rows)
    data = np.concatenate([filled(type_name, 1, k, code, scale) for code, scale in of_rows])
    case = make_case(type_name, hard_activations(k), data, len(of_rows))
    return case, np.array([scale == 0 for _, scale in of_rows])


@every_kernel
def test_extremes(type_name: str, level: str) -> None:
    """Saturation, zeros, subnormals, sums of 1e30: the same bound, and the same bits for one token and for many."""
    case, without_scale = extreme_case(type_name)
    together = case.run(level)
    case.check(together)
    if type_name != "MXFP4":  # whose least scale is 2**-127
        assert not together[:, without_scale].any()
    assert not together[4].any(), "zeros give zeros"
    for t in range(len(case.x)):
        assert same_bits(case.run(level, tokens=slice(t, t + 1)), together[t : t + 1]), t


@every_level
def test_eight_bit_sums_do_not_saturate(level: str) -> None:
    """-128 times 127, 32 times and more: pairs of such products are beyond 16 bits when two instructions add them."""
    x = np.full((9, 64), -1, np.float32)
    case = make_case("Q8_0", x, filled("Q8_0", 16, 64, 0x80, 1.0), 16)
    inexact = 4 * 64 * 128 * 2.0**-24
    assert np.abs(case.run(level) - 64 * 128).max() <= inexact


@every_level
def test_every_exponent_of_mxfp4(level: str) -> None:
    """Of a block each. The scales of the first two are subnormal, the values of the last three beyond float32."""
    blocks = np.random.default_rng(3).integers(0, 256, (16, 256, 17), dtype=np.uint8)
    blocks[..., 0] = np.arange(256)
    data = blocks.reshape(-1)
    matrix = _native.pack_matrix(POOLS[1], _native.Arena(), "MXFP4", 16, 256 * 32, data)
    weights = dequantize(data.reshape(16, -1), "MXFP4").astype(np.float64)
    for e in range(253):
        x, own = np.zeros((2, 256 * 32), np.float32), slice(32 * e, 32 * e + 32)
        x[:, own] = np.array([[-1.0], [1.0]]) * 2.0 ** (100 if e < 60 else -20)
        out = np.full((2, 16), np.nan, np.float32)
        _native.matmul(POOLS[1], matrix, level, x, out)
        expected = x[:, own].astype(np.float64) @ weights[:, own].T
        assert np.abs(out - expected).max() <= 4 * 2.0**-24 * np.abs(expected).max(), e


@every_type
def test_rows_are_looked_up_exactly(type_name: str) -> None:
    rng = np.random.default_rng(5)
    data = stored(type_name, 7, 512, rng)
    expected = dequantize(data.reshape(7, -1), type_name)
    table = _native.Table(type_name, 7, 512, data)
    for row in range(7):
        out = np.full(512, np.nan, np.float32)
        table.row(row, out)
        assert same_bits(out, expected[row])
    for row in (-1, 7):
        with pytest.raises(ValueError, match="no such row"):
            table.row(row, out)


@every_type
def test_panels_take_hardly_more_than_files(type_name: str) -> None:
    """Of IQ2_XXS the eighth sign of eight, which a file leaves out; of K-quants scales of a byte each."""
    assert _native.panel_bytes(type_name, 4096) <= 1.061 * cpu.LANES * block_type(type_name).row_bytes(4096)


def resident(part: np.ndarray) -> int:
    """Bytes of memory that the mapping which an array is a view of takes in this process."""
    place, inside = part.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= place < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the array is in no mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="what a mapping takes is read from /proc")
def test_pages_of_a_file_are_given_back_as_they_are_packed(tmp_path: Path) -> None:
    rows, k, path = 8005, 4096, tmp_path / "weights"
    path.write_bytes(np.random.default_rng(3).integers(0, 100, (rows, k // 32 * 34), np.uint8).tobytes())
    file = MappedFile(path)
    data = file.view()
    assert is_mapped(data) and is_mapped(data[40:].reshape(2, -1)[1]) and not is_mapped(data.copy())
    whole, panels = resident(data), []
    for tensor in (data, data.copy()):
        matrix = pack(POOLS[2], _native.Arena(), RawTensor("Q8_0", (rows, k), tensor))
        panels.append(np.array(matrix.panels))
        if tensor is data:
            assert resident(data) < whole + (4 << 20), f"{data.nbytes} bytes are still in memory"
    np.testing.assert_array_equal(*panels)
    order = np.arange(rows, dtype=np.int32)[::-1].copy()
    mapped, copied = (
        pack(POOLS[2], _native.Arena(), RawTensor("Q8_0", (rows, k), one), order) for one in (data, data.copy())
    )
    np.testing.assert_array_equal(mapped.panels, copied.panels)


@every_type
def test_packed_rows_follow_their_map(type_name: str) -> None:
    rng = np.random.default_rng(6)
    data, x = stored(type_name, 20, 256, rng), rng.standard_normal((3, 256)).astype(np.float32)
    rows = np.array([19, -1, 0, 0, *range(15), -1, 7], np.int32)
    whole = _native.pack_matrix(_native.Pool(1), _native.Arena(), type_name, 20, 256, data)
    plain = np.full((3, cpu.round_up(20, cpu.LANES)), np.nan, np.float32)
    _native.matmul(_native.Pool(1), whole, "", x, plain)
    for threads, pool in POOLS.items():
        matrix = _native.pack_matrix(pool, _native.Arena(), type_name, 20, 256, data, rows)
        assert (matrix.rows, matrix.k, matrix.type) == (21, 256, type_name)
        assert matrix.nbytes == 2 * _native.panel_bytes(type_name, 256)
        out = np.full((3, 32), np.nan, np.float32)
        _native.matmul(POOLS[threads], matrix, "", x, out)
        expected = np.where(rows < 0, np.float32(0), plain[:, rows])
        assert np.array_equal(out[:, :21], expected) and not out[:, 21:].any()


@every_type
def test_scales_that_are_no_numbers_are_noticed(type_name: str) -> None:
    """The largest number of float16 is none of them."""
    kind, rows, rng = block_type(type_name), 20, np.random.default_rng(7)
    blocks = stored(type_name, rows, 512, rng).reshape(rows, -1, kind.nbytes)
    if type_name in FLOATS or type_name.endswith("FP4"):
        return
    for scale, good in ((65504.0, True), (-np.inf, False), (np.nan, False)):
        for field in range(max(1, len(WEIGHT_TYPES[type_name].halves))):
            one, place = blocks.copy(), WEIGHT_TYPES[type_name].halves[field : field + 1]
            if place:
                one[18, 1, place[0] : place[0] + 2] = np.array([scale], "<f2").view(np.uint8)
            else:
                one[18, 1] = with_scales(one[18, 1], type_name, np.array(scale))
            data = one.reshape(-1)
            assert all_numbers(data, type_name) == good
            for pool in POOLS.values():
                if good:
                    _native.pack_matrix(pool, _native.Arena(), type_name, rows, 512, data)
                else:
                    with pytest.raises(OverflowError, match="infinite or not numbers"):
                        _native.pack_matrix(pool, _native.Arena(), type_name, rows, 512, data)


@every_level
def test_rows_of_nvfp4_have_factors(level: str) -> None:
    """Of the rows that the file has, wherever the map puts them, and of rows that are replaced."""
    rng, rows, k = np.random.default_rng(8), 40, 192
    data, other = stored("NVFP4", rows, k, rng), stored("NVFP4", 16, k, rng)
    factors = 2.0 ** rng.integers(-12, 4, rows).astype(np.float32)
    where = np.array([39, -1, *range(32), 3, 38], np.int32)
    x = rng.standard_normal((19, k)).astype(np.float32)

    def times(matrix: _native.Matrix) -> np.ndarray:
        out = np.full((len(x), cpu.round_up(matrix.rows, cpu.LANES)), np.nan, np.float32)
        _native.matmul(POOLS[1], matrix, level, x, out)
        return out

    arena = _native.Arena()
    plain = times(_native.pack_matrix(POOLS[1], arena, "NVFP4", rows, k, data))
    matrix = _native.pack_matrix(POOLS[2], arena, "NVFP4", rows, k, data, where, factors)
    expected = np.where(where < 0, np.float32(0), plain[:, where] * factors[where])
    assert np.array_equal(times(matrix)[:, : len(where)], expected)
    _native.repack(POOLS[2], matrix, 16, 16, other, factors[:16])
    replaced = times(_native.pack_matrix(POOLS[1], arena, "NVFP4", 16, k, other)) * factors[:16]
    assert np.array_equal(times(matrix)[:, 16:32], replaced)
    for kind, many in (("NVFP4", factors[:16]), ("Q8_0", factors)):
        with pytest.raises(ValueError, match="factor"):
            _native.pack_matrix(POOLS[1], arena, kind, rows, k, stored(kind, rows, k, rng), None, many)


@every_level
def test_every_scale_of_nvfp4(level: str) -> None:
    """Of 16 elements each: the sign of a scale counts for nothing, and the one that is no number is zero."""
    blocks = np.random.default_rng(3).integers(0, 256, (16, 64, 36), dtype=np.uint8)
    blocks[..., :4] = np.arange(256).reshape(64, 4)
    matrix = _native.pack_matrix(POOLS[1], _native.Arena(), "NVFP4", 16, 64 * 64, blocks.reshape(-1))
    weights = dequantize(blocks.reshape(16, -1), "NVFP4").astype(np.float64)
    for e in range(256):
        x, own = np.zeros((1, 64 * 64), np.float32), slice(16 * e, 16 * e + 16)
        x[:, own] = np.where(np.arange(16) % 3, 1.0, -1.0)
        out = np.full((1, 16), np.nan, np.float32)
        _native.matmul(POOLS[1], matrix, level, x, out)
        expected = x[:, own].astype(np.float64) @ weights[:, own].T
        assert np.abs(out - expected).max() <= 8 * 2.0**-24 * 16 * np.abs(weights[:, own]).max(), e


def test_wrong_arguments_are_refused() -> None:
    pool, arena, data = POOLS[1], _native.Arena(), np.zeros(2 * 34, np.uint8)
    for type_name, rows, k in [("Q8_0", 1, 32), ("Q8_0", 3, 32), ("Q8_0", 2, 33), ("Q8_0", 0, 32), ("Q8_0", -2, 32),
                               ("Q4_K", 1, 64), ("I8", 1, 256), ("q8_0", 2, 32), ("Q8_0", 2, 2**40)]:  # fmt: skip
        with pytest.raises(ValueError):
            _native.pack_matrix(pool, arena, type_name, rows, k, data)
        with pytest.raises(ValueError):
            _native.Table(type_name, rows, k, data)
    matrix = _native.pack_matrix(pool, arena, "Q8_0", 2, 32, data)
    x, out = np.zeros((1, 32), np.float32), np.zeros((1, 16), np.float32)
    for bad_x, bad_out in [(x[:, :31].copy(), out), (x, out[:, :2].copy()), (np.zeros((2, 32), np.float32), out)]:
        with pytest.raises(ValueError):
            _native.matmul(pool, matrix, "", bad_x, bad_out)
    with pytest.raises(ValueError, match="'avx9' is unknown or cannot run on this CPU; choose one of: "):
        _native.matmul(pool, matrix, "avx9", x, out)
    for threads in (0, -1, 1025):
        with pytest.raises(ValueError, match="between 1 and 1024"):
            _native.Pool(threads)


def test_arrays_that_are_written_or_kept_are_never_copies() -> None:
    """A copy of another type or layout would take the result, or die before its reader."""
    pool, data = POOLS[1], np.zeros(2 * 34, np.uint8)
    matrix, x = _native.pack_matrix(pool, _native.Arena(), "Q8_0", 2, 32, data), np.zeros((1, 32), np.float32)
    for out in (np.zeros((1, 16)), np.zeros((1, 32), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            _native.matmul(pool, matrix, "", x, out)
    for kept in (data.view(np.int8), np.zeros(4 * 34, np.uint8)[::2]):
        with pytest.raises(TypeError):
            _native.Table("Q8_0", 2, 32, kept)
    with pytest.raises(TypeError):
        _native.Table("Q8_0", 2, 32, data).row(0, np.zeros(32))  # type: ignore[arg-type]


def test_a_level_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.ISA_VARIABLE, raising=False)
    assert cpu.choose_isa(None) == (LEVELS[0], "the best this CPU runs")
    assert cpu.choose_isa("scalar") == ("scalar", "asked for")
    monkeypatch.setenv(cpu.ISA_VARIABLE, "scalar")
    assert cpu.choose_isa(None) == ("scalar", f"asked for by {cpu.ISA_VARIABLE}")
    assert cpu.choose_isa(LEVELS[0]) == (LEVELS[0], "asked for")
    with pytest.raises(RequestError, match=r"choose one of: .*scalar"):
        cpu.choose_isa("avx1")
    monkeypatch.delenv(cpu.ISA_VARIABLE)
    monkeypatch.setattr(cpu._native, "cpu_levels", lambda: ["better", *LEVELS])  # a build made on another CPU
    assert cpu.choose_isa(None)[1].endswith("builds better, too")


@pytest.mark.parametrize(("cores", "spared"), [(1, 0), (2, 0), (4, 1), (6, 1), (8, 2), (16, 2), (128, 2)])
def test_cores_for_the_driver_of_a_gpu(cores: int, spared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only automatic threads leave some; torch's CPU device has no driver."""
    monkeypatch.setattr(cpu, "usable_cores", lambda: (cores, "every core"))
    engine = EngineConfig()
    assert cpu.spared_cores(0, "cuda:1") == spared
    assert cpu.choose_threads(cpu.beside_gpu(engine, "cuda").threads)[0] == cores - spared
    for gpu in (None, "cpu"):
        assert cpu.beside_gpu(engine, gpu) == engine
    assert cpu.beside_gpu(replace(engine, threads=cores), "cuda").threads == cores


def test_threads_are_chosen_within_bounds() -> None:
    assert cpu.choose_threads(3) == (3, "asked for")
    assert cpu.choose_threads(0)[0] >= 1
    for wanted in (-1, 1025):
        with pytest.raises(RequestError, match="between 0"):
            cpu.choose_threads(wanted)
