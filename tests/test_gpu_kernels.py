"""The kernels over torch tensors against float64 on the values that the weights hold.

They run on every device that there is (gpu_device.py), in plain torch and in Triton, which is compiled on a GPU and
otherwise interpreted. A float32 sum of n products is off by at most n * eps * sum |a b|; the bounds below carry that
through the products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import interpreted
import numpy as np
import pytest
import reference
import torch
from gpu_device import CUDA, EPS, device_name, sum_error, torch_device
from stored_weights import stored_evenly

from powerinfer.config import THRESHOLDED, AttentionConfig, FfnConfig, LayerConfig, ModelConfig
from powerinfer.devices.gpu_weights import Matrices, StoredMatrix
from powerinfer.formats.bundle_file import bundle_layouts
from powerinfer.formats.quant import block_type, dequantize, quantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import BLOCKS, STORED_ROWS, WEIGHT_TYPES
from powerinfer.kernels import cpu, gpu, gpu_host
from powerinfer.kernels.gpu_types import CallAnswer
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, NeuronVectors

TRITON = find_spec("triton") is not None
KERNELS = ("torch", pytest.param("triton", marks=pytest.mark.skipif(not TRITON, reason="Triton is not installed")))
THRESHOLD = 0.25
TYPES = tuple(kind for kind in gpu.GPU_TYPES if kind not in gpu.UNPACKED)
"""Those that are not unpacked to words: of these see `test_gpu_words`, and some below."""
CODED = 1 / (127 * 256)
"""Of the largest of 32 values, as far as products of integers round each."""


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test that takes this runs with plain torch and with Triton, in memory that holds no numbers at first."""
    if request.param == "triton" and device == "cpu" and CUDA:
        pytest.skip("kernels are compiled for the GPU")
    plain_empty = torch.empty

    def spoilt(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = plain_empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 85)

    monkeypatch.setattr(torch, "empty", spoilt)
    gpu.force_triton(request.param == "triton")
    yield request.param
    gpu.force_triton(None)


@pytest.fixture
def small_tiles(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every loop of a Triton kernel goes round, and every list and context is in several pieces."""
    if kernels == "torch":
        return
    from powerinfer.kernels import triton_fused, triton_kernels, triton_neurons

    monkeypatch.setattr(triton_fused, "PRODUCTS", dict.fromkeys(triton_fused.PRODUCTS, triton_kernels.Tile(4, 32, 8)))
    monkeypatch.setattr(triton_fused, "DOWN", dict.fromkeys(triton_fused.DOWN, triton_kernels.Tile(2, 32, 8)))
    monkeypatch.setattr(triton_fused, "ADDED_UP", (2, 32))
    monkeypatch.setattr(triton_fused, "LEAST_NEURONS", 24)
    monkeypatch.setattr(triton_fused, "LISTED_WORDS", 4)
    for table in (
        triton_kernels.ONE,
        triton_kernels.SEVERAL,
        triton_kernels.WIDE,
        triton_neurons.DOT_ONE,
        triton_neurons.DOT_SEVERAL,
        triton_neurons.ADD_ONE,
        triton_neurons.ADD_SEVERAL,
    ):
        for kind, tile in table.items():
            monkeypatch.setitem(table, kind, tile._replace(rows=min(tile.rows, 16), columns=32))
    monkeypatch.setattr(triton_kernels, "LEAST_SEVERAL", 0)
    monkeypatch.setattr(triton_kernels, "VALUES", 2)
    monkeypatch.setattr(triton_kernels, "ATTENTION_SPLIT_PAGES", 1)
    monkeypatch.setattr(triton_neurons, "LIST", 32)
    monkeypatch.setattr(triton_neurons, "READ", 64)


def by_interpreter() -> bool:
    """Whether kernels are gone through operation by operation: then every kernel and type once, of one shape that has a
    whole tile, a part of one and several programs; other shapes by plain torch, and by what compiled kernels there are.
    """
    return not CUDA and gpu.which(torch.empty(0)) == "triton"


TWINS = {"BF16": "F16", "Q4_1": "Q8_0", "Q4_K": "Q5_K"}
"""Types whose code in Triton's kernels is that of another type (BF16's of several tokens is F32's), or a part of it, or
which become it on a GPU. `test_linear` has them, too; other tests have them in plain torch and on a GPU."""


def skip_twins(type_name: str, but: bool = False) -> None:
    """but: it has no twin in this test."""
    if by_interpreter() and type_name in TWINS and not but:
        pytest.skip(f"the interpreter goes through the kernels with {TWINS[type_name]}")


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device_name())


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def raw(type_name: str, rows: int, k: int) -> RawTensor:
    return RawTensor(type_name, (rows, k), stored_evenly(type_name, rows, k, 1.0, np.random.default_rng([rows, k])))


def whole(type_name: str, k: int) -> int:
    """k, or the next width of whole blocks."""
    return k + -k % block_type(type_name).block


def narrowed(type_name: str, tokens: int) -> float:
    """How far products with several tokens may round a weight, as a share of it: quantised ones to float16."""
    few = 8 if type_name in gpu.INTEGERS else 1
    several = few < tokens <= gpu.FEW and gpu.which(torch.empty(0, device=device_name())) == "triton"
    return 2**-11 if several and type_name not in ("F32", "F16", "BF16") else 0.0


def coded(type_name: str, x: np.ndarray) -> np.ndarray:
    """How far products with few tokens may round their values, float64 [T, k]: to integers, with quantised weights."""
    off = np.zeros(x.shape)
    if len(x) <= 8 and type_name in gpu.INTEGERS and gpu.which(torch.empty(0, device=device_name())) == "triton":
        blocks = np.abs(x.astype(np.float64)).reshape(-1, 32)
        off += (np.repeat(blocks.max(axis=1), 32) * CODED).reshape(x.shape)
    return off


def product(weights: np.ndarray, x: np.ndarray, type_name: str) -> tuple[np.ndarray, np.ndarray]:
    """(x . W^T, bound of a float32 sum's error), float64 [T, rows]."""
    size = np.abs(x.astype(np.float64)) @ np.abs(weights.T)
    bound = (sum_error(x.shape[1]) + narrowed(type_name, len(x))) * size
    return x.astype(np.float64) @ weights.T, bound + coded(type_name, x) @ np.abs(weights.T)


def assert_close(got: torch.Tensor, want: np.ndarray, bound: np.ndarray | float) -> None:
    assert got.dtype == torch.float32 and tuple(got.shape) == want.shape
    off = np.abs(got.cpu().numpy() - want)
    assert (off <= bound).all(), f"off by {off.max()}, most {np.max(off - bound)} above the bound"


# ---- Weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", gpu.GPU_TYPES)
@pytest.mark.usefixtures("device")
def test_a_weight_holds_the_values_of_the_file(type_name: str) -> None:
    k = whole(type_name, 96)
    stored = raw(type_name, 7, k)
    on_gpu = stored.data if device_name() == "cpu" else stored.data.copy()
    from_file = gpu.stored(type_name, 7, k, on_device(on_gpu))
    for weight in (gpu.upload(stored, device_name()), from_file):
        np.testing.assert_array_equal(gpu.values(weight).cpu().numpy(), stored.float32())
        np.testing.assert_array_equal(gpu.values(weight, 2, 5).cpu().numpy(), stored.float32()[2:5])
        assert (weight.type, weight.rows, weight.k) == (type_name, 7, k)
        assert all(part is None or part.is_contiguous() for part in (weight.data, weight.scales))
        assert weight.nbytes == gpu.weight_bytes(type_name, 7, k)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.usefixtures("device")
def test_other_types_become_8_bits(type_name: str) -> None:
    stored = raw(type_name, 3, 256)
    weight = gpu.upload(stored, device_name())
    assert weight.type == gpu.gpu_type(type_name) == "Q8_0"
    assert weight.nbytes == gpu.weight_bytes(type_name, 3, 256) == 3 * 256 * 34 // 32
    if type_name == "Q5_0":
        np.testing.assert_array_equal(gpu.values(weight).cpu().numpy(), stored.float32())
    blocks = stored.float32().reshape(3, -1, 32)
    step = np.abs(blocks).max(axis=2, keepdims=True) / 127
    off = np.abs(gpu.values(weight).cpu().numpy().reshape(blocks.shape) - blocks)
    assert (off <= step * 0.5 + np.abs(blocks) * 2**-10).all()  # half a code, and the scale rounded to 11 bits


def test_types_that_no_block_fits() -> None:
    assert gpu.gpu_type("F64", 20) == "F32"
    assert gpu.gpu_type("Q5_1", 32) == "Q8_0"
    assert gpu.weight_bytes("F64", 2, 20) == 160


@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K"])
@pytest.mark.usefixtures("device")
def test_rows_are_reordered_and_padded(type_name: str) -> None:
    stored = raw(type_name, 6, whole(type_name, 64))
    row_map = np.array([3, -1, 0, 5, 5, -1], np.int32)
    values = gpu.values(gpu.upload(stored, device_name())).cpu().numpy()
    want = np.where(row_map[:, None] < 0, 0, values[row_map])
    np.testing.assert_array_equal(gpu.values(gpu.upload(stored, device_name(), row_map)).cpu().numpy(), want)


@pytest.mark.usefixtures("device")
def test_a_read_only_mapping_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = raw("Q8_0", 40, 64)
    stored.data.flags.writeable = False
    monkeypatch.setattr(gpu, "_SLAB", 7 * 64)
    np.testing.assert_array_equal(gpu.values(gpu.upload(stored, device_name())).cpu().numpy(), stored.float32())


# ---- Operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 20, 33])
@pytest.mark.parametrize("type_name", TYPES)
def test_linear(type_name: str, tokens: int, kernels: str) -> None:
    """Of longer rows see `test_long_rows`, too."""
    if by_interpreter() and tokens == 3 and type_name not in gpu.INTEGERS:
        pytest.skip("as 20 are multiplied")
    sizes = ((37, 512), (5, 256), (16, 1280)) if type_name in gpu.K_CODES else ((37, 96), (5, 32), (16, 544))
    if type_name[0] not in "QM":
        sizes = ((37, 33), (1, 1), (7, 544))
    for rows, k in sizes[: 1 if by_interpreter() else None]:
        stored = raw(type_name, rows, k)
        x, bias = floats(1, tokens, k), floats(2, rows)
        want, bound = product(stored.float32().astype(np.float64), x, type_name)
        weight = gpu.upload(stored, device_name())
        assert_close(gpu.linear(weight, on_device(x)), want, bound)
        alone, to = gpu.linear(weight, on_device(x), on_device(bias)), on_device(floats(3, tokens, rows))
        assert_close(alone, want + bias, bound + 2 * EPS * np.abs(want + bias))
        wanted = to + alone
        assert gpu.linear(weight, on_device(x), on_device(bias), to) is to
        assert torch.equal(to, wanted)  # the same bits as if it were added afterwards


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("type_name", "tokens"), [(kind, 9 if kind in (*gpu.INTEGERS, "F32") else 3) for kind in (*TYPES, "Q3_K")]
)
@pytest.mark.usefixtures("small_tiles")
def test_few_rows_are_shared_by_programs(
    type_name: str, tokens: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several tokens: what each gets of a row's tiles is added up, of which the last one has fewer."""
    if kernels == "torch":
        pytest.skip("programs are Triton's")
    skip_twins(type_name)
    from powerinfer.kernels import triton_kernels

    rows, k = 21, 768 if type_name in gpu.CUT else 224
    stored, x, bias = raw(type_name, rows, k), on_device(floats(1, tokens, k)), on_device(floats(2, rows))
    weight = gpu.upload(stored, device_name())
    plain = gpu.linear(weight, x, bias)
    monkeypatch.setattr(triton_kernels, "LEAST_SEVERAL", 0.05)
    monkeypatch.setattr(triton_kernels, "LEAST_TILES", 1)
    monkeypatch.setattr(triton_kernels, "SPLITS", (2, 32))
    monkeypatch.setattr(triton_kernels, "processors", lambda _: 132)
    tile = triton_kernels.fitting(weight, tokens, 132)
    each, splits = triton_kernels.shared_rows(weight, tile, tokens, 132)
    tiles = -(-triton_kernels.row_width(type_name, k) // tile.columns)
    assert each is not None and 1 < splits <= 3 and (tiles % each or type_name not in ("F16", "Q8_0"))
    want, bound = product(stored.float32().astype(np.float64), x.cpu().numpy(), type_name)
    assert_close(triton_kernels.linear(weight, x, relu=True), np.maximum(want, 0), bound)
    with_bias = gpu.linear(weight, x, bias)
    assert torch.allclose(with_bias, plain, atol=1e-5 * float(plain.abs().max()))
    to = on_device(floats(3, tokens, rows))
    wanted = to + with_bias
    assert gpu.linear(weight, x, bias, to) is to and torch.equal(to, wanted)


@pytest.mark.usefixtures("device")
def test_a_matrix_is_multiplied_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, x = raw("Q4_0", 21, 64), floats(3, 40, 64)
    monkeypatch.setattr(gpu, "_PIECE", 5 * 64)
    want, bound = product(stored.float32().astype(np.float64), x, "Q4_0")
    assert_close(gpu.linear(gpu.upload(stored, device_name()), on_device(x)), want, bound)


@pytest.mark.parametrize(
    ("kind", "rows", "k", "tokens", "tile"),
    [
        ("F16", 32768, 8192, 1, (4, 1024)),
        ("F16", 1024, 8192, 1, (2, 2048)),
        ("Q8_0", 256, 8192, 1, (1, 8192)),
        ("Q8_0", 32768, 256, 1, (4, 256)),
        ("Q4_0", 32768, 256, 1, (4, 128)),
        ("Q4_0", 512, 4096, 1, (1, 2048)),
        ("F16", 3, 33, 1, (1, 64)),
        ("F16", 32768, 8192, 8, (32, 128)),
        ("Q4_0", 4096, 4096, 8, (2, 2048)),
        ("Q8_0", 8192, 8192, 8, (2, 4096)),
        ("Q4_0", 4096, 4096, 16, (16, 32)),
        ("Q8_0", 256, 8192, 32, (16, 128)),
    ],
)
def test_tiles_fit_the_matrix(
    kind: str, rows: int, k: int, tokens: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes of one token, and rather lower than too few of several."""
    from powerinfer.kernels import triton_kernels

    monkeypatch.setattr(triton_kernels, "NEARLY", 0.9)
    weight = gpu.Weight(kind, rows, k, torch.empty(0))
    assert triton_kernels.fitting(weight, tokens, 132)[:2] == tile


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("multiprocessors", [132, 128, 76, 34])
def test_launches_fill_a_gpu(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one wave where programs can be cut as one likes, else without a last wave that leaves most of it empty."""
    from powerinfer.kernels import triton_kernels, triton_neurons

    monkeypatch.setattr(triton_kernels, "NEARLY", 0.9)

    def matrix(kind: str, rows: int, k: int) -> gpu.Weight:
        return gpu.Weight(kind, rows, k, torch.empty(0))

    for kind, held in triton_neurons.HELD_ONE.items():
        for tokens, each in ((1, held), (8, triton_neurons.HELD_SEVERAL[kind])):
            for k, n in ((8192, 32768), (8192, 28672), (4096, 14336)):
                across, splits = triton_neurons.add_grid(matrix(kind, n, k), n, tokens, multiprocessors)
                assert 0.6 <= across * splits / (each * multiprocessors) <= 1, (kind, tokens, k)
    for kind in gpu.GPU_TYPES:
        for rows, k in ((8192, 8192), (9216, 8192), (32768, 1024), (4096, 4096), (6144, 4096), (14336, 512)):
            weight = matrix(kind, rows, k)
            tile = triton_kernels.fitting(weight, 1, multiprocessors)
            programs = -(-rows // tile.rows)
            slots = min(triton_kernels.HELD[kind] // tile.warps, triton_kernels.PROGRAMS) * multiprocessors
            assert triton_kernels.filled(programs, slots) >= 0.6, (kind, rows, k, programs, slots)
            rows_of_several = triton_kernels.fitting(weight, 16, multiprocessors).rows
            assert rows_of_several == 16 or rows >= 1.5 * multiprocessors * rows_of_several
    for kv_heads in (1, 8, 32):
        splits = triton_kernels.context_splits(128, 4, kv_heads, 2 * multiprocessors)
        assert splits * kv_heads <= 2 * multiprocessors
        assert splits == 128 // 4 or (splits + 1) * kv_heads > 2 * multiprocessors


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("type_name", [*TYPES, "Q3_K"])
@pytest.mark.usefixtures("small_tiles")
def test_long_rows(type_name: str, tokens: int) -> None:
    """Of two programs, one of which has all its rows, and of several tiles, the last of which is cut if it may be."""
    skip_twins(type_name)
    k = whole(type_name, 96) if type_name[0] in "QM" else 80
    stored, x = raw(type_name, 19, k), floats(1, tokens, k)
    want, bound = product(stored.float32().astype(np.float64), x, type_name)
    assert_close(gpu.linear(gpu.upload(stored, device_name()), on_device(x)), want, bound)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, infinity less infinity
@pytest.mark.parametrize("k", [33, 544])
@pytest.mark.usefixtures("small_tiles")
def test_halves_have_22_bits_of_the_largest_value(k: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens of any size; what is not finite stays with its token, in products, too."""
    if kernels == "torch":
        pytest.skip("halves are Triton's")
    from powerinfer.kernels import triton_kernels

    monkeypatch.setattr(triton_kernels, "HALVED", 64)  # several pieces of a row
    x = floats(40, 7, k) * np.array([[1e-38], [1e-30], [1e-3], [1], [1e9], [1e35], [0]], np.float32)
    tokens = len(x)

    def read(made: torch.Tensor) -> np.ndarray:
        flat = made.cpu().numpy()
        high, low = (flat[: 2 * tokens * k].reshape(2, tokens, k)).astype(np.float64)
        scales = flat[2 * tokens * k :].view(np.float32).astype(np.float64)
        assert (np.log2(scales) % 1 == 0).all()
        return (high + low / 2**11) * scales[:, None]

    largest = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    assert (np.abs(read(triton_kernels.halves(on_device(x))) - x) <= 2**-22 * largest + 2.0**-149).all()
    count = k // 2
    some = read(triton_kernels.halves(on_device(x), on_device(np.array([count], np.int32))))
    assert (np.abs(some - x)[:, :count] <= 2**-22 * largest + 2.0**-149).all()
    weight, x[2, 5], x[3, 6] = gpu.upload(raw("F16", 21, k), device_name()), np.nan, np.inf
    got = gpu.linear(weight, on_device(x)).cpu().numpy()
    want, bound = product(gpu.values(weight).cpu().numpy().astype(np.float64), np.delete(x, (2, 3), axis=0), "F16")
    assert np.isnan(got[2]).all() and not np.isfinite(got[3]).any()
    assert (np.abs(np.delete(got, (2, 3), axis=0) - want) <= bound + 1e-38).all()


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.usefixtures("small_tiles")
def test_many_tokens_are_multiplied_in_a_narrow_type(
    type_name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_NARROW", [device_name()])
    stored, x = raw(type_name, 21, 96), floats(3, 40, 96)
    x[7] *= 1e9
    x[8] = 0
    want, bound = product(stored.float32().astype(np.float64), x, type_name)
    rounding = 2**-8 if type_name == "BF16" else 2**-10 if type_name == "F16" else 2**-9
    got = gpu.linear(gpu.upload(stored, device_name()), on_device(x))
    assert_close(got, want, bound * (1 + rounding / sum_error(96)))
    bundles = make_bundles(96, 38, (type_name, "Q4_0X32" if type_name == "Q4_0" else type_name), "silu")
    index, x = np.arange(38, dtype=np.int32), floats(36, 40, 96)
    want, _, h, _ = expected(bundles, index, x)
    total, _ = run(all_of(bundles, index), x)
    assert_close(total, want, 8 * rounding * (np.abs(h).max() * np.abs(bundles.parts["down"]).sum(axis=0)))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_activations_are_narrowed_once_by_a_power_of_two(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all products, whatever pieces and types their matrices have; with the same bits by either kernel."""
    monkeypatch.setattr(gpu, "_NARROW", [device_name()])
    x = floats(40, 37, 96) * np.float32(10) ** np.linspace(-42, 37, 37, dtype=np.float32)[:, None]
    x[4], x[5, 7], x[6, 8] = 0, np.nan, np.inf
    made, scale = gpu.activations_of(on_device(x)).narrowed(torch.float16)
    assert scale is not None and made.dtype == torch.float16 and scale.shape == (37, 1)
    finite = np.isfinite(x).all(axis=1)
    largest = np.abs(x[finite]).max(axis=1, keepdims=True).astype(np.float64)
    wide = made.double().cpu().numpy() * scale.double().cpu().numpy()
    assert (np.abs(wide[finite] - x[finite]) <= 2**-11 * np.abs(x[finite]) + 2**-24 * largest + 2.0**-149).all()
    assert (np.abs(made.cpu().numpy()[finite]) <= 4).all() and (np.log2(scale.cpu().numpy()[finite]) % 1 == 0).all()
    assert np.isnan(wide[5]).any() and not np.isfinite(wide[6]).all()
    gpu.force_triton(False)
    other, same = gpu.activations_of(on_device(x)).narrowed(torch.float16)
    gpu.force_triton(kernels == "triton")
    assert same is not None and torch.equal(other[on_device(finite)], made[on_device(finite)])
    counted, real = [], gpu._halves
    monkeypatch.setattr(gpu, "_halves", lambda rows: (counted.append(len(rows)), real(rows))[1])
    monkeypatch.setattr(gpu, "_PIECE", 5 * 96)
    stored = [raw("Q4_0", 21, 96), raw("F16", 12, 96), raw("Q8_0", 7, 96)]
    matrices = Matrices([StoredMatrix(one, None) for one in stored], [None] * 3, torch_device())
    x = floats(3, 40, 96)
    got, at = matrices(on_device(x)), 0
    for one in stored:
        want, bound = product(one.float32().astype(np.float64), x, one.type)
        columns = got[:, at : at + one.shape[0]]
        assert_close(columns, want, bound * (1 + 2**-9 / sum_error(96)))
        at += one.shape[0]
    assert counted == [40]


@pytest.mark.usefixtures("device")
def test_matrices_whose_scales_are_no_numbers() -> None:
    for type_name in gpu.GPU_TYPES:
        for place in WEIGHT_TYPES[type_name].halves:
            for number, good in ((-65504.0, True), (-np.inf, False)):
                tensor = raw(type_name, 5, 512)
                data = tensor.data.copy()
                blocks = data.reshape(5, -1, block_type(type_name).nbytes)
                blocks[4, 1, place : place + 2] = np.array([number], "<f2").view(np.uint8)
                matrix = StoredMatrix(RawTensor(type_name, (5, 512), data), None)
                with nullcontext() if good else pytest.raises(OverflowError, match="not numbers"):
                    Matrices([matrix], [None], torch_device())


@pytest.mark.parametrize("type_name", ["MXFP4", *gpu.K_CODES])
@pytest.mark.usefixtures("small_tiles")
def test_many_tokens_of_types_without_bundles(type_name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_twins(type_name)
    monkeypatch.setattr(gpu, "_NARROW", [device_name()])
    k = whole(type_name, 96)
    stored, x = raw(type_name, 21, k), floats(3, 40, k)
    want, bound = product(stored.float32().astype(np.float64), x, type_name)
    got = gpu.linear(gpu.upload(stored, device_name()), on_device(x))
    rounding = 2**-11 if type_name == "MXFP4" else 2**-10  # of x, and of weights that float16 does not have
    assert_close(got, want, bound * (1 + rounding / sum_error(k)))


@pytest.mark.parametrize("width", [1, 33, 64, 200])
def test_norms(width: int, kernels: str) -> None:
    x, weight, bias = floats(4, 2, 3, width) * 3 + 1, floats(5, width), floats(6, width)
    tensors = [on_device(a) for a in (x, weight, bias)]
    rms = reference.rms_norm(x, weight, 1e-5)
    assert_close(gpu.norm(tensors[0], tensors[1], None, 1e-5, False), rms, (width + 8) * EPS * np.abs(rms))
    layer = reference.layer_norm(x, weight, bias, 1e-5)
    # The mean is taken out of x with an error of its own, which the deviation makes larger or smaller.
    deviation = np.sqrt(x.astype(np.float64).var(axis=-1, keepdims=True) + 1e-5)
    off = (width + 8) * EPS * (np.abs(layer - bias) + np.abs(x).max() / deviation * np.abs(weight) + np.abs(bias))
    assert_close(gpu.norm(*tensors, 1e-5, True), layer, off)
    into, sent = torch.full_like(tensors[0], torch.nan), torch.full_like(tensors[0], torch.nan)
    assert gpu.norm(tensors[0], tensors[1], None, 1e-5, True, into, sent=sent) is into
    assert_close(into, layer - bias, off)
    assert torch.equal(sent, into), "the host gets the same"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(1, 1), (3, 173), (2, 512)])
def test_memory_of_the_host_is_written_and_read(shape: tuple[int, int]) -> None:
    """To the number, and not beyond."""
    x, sums = on_device(floats(3, *shape)), on_device(floats(4, *shape))
    memory = torch.full((x.numel() + 8,), torch.nan, device=x.device)
    into = memory[4:-4].view(shape)
    gpu_host.put(x.T.contiguous().T, into)  # rows that do not lie one behind the other
    assert torch.equal(into, x) and memory.isnan().sum() == 8
    assert torch.equal(gpu_host.take(into), x)
    total = sums.clone()
    gpu_host.add(into, total)
    assert torch.equal(total, sums + x) and torch.equal(into, x)
    for cold in (0, 3):  # terms that the CPU has summed
        answer = unanswered(x.device)
        answer.counters[0] = cold
        total = sums.clone()
        gpu_host.add(into, total, answer)
        assert torch.equal(total, sums + x if cold else sums)
        assert torch.equal(gpu_host.take(into, answer), x if cold else torch.zeros_like(x))


@pytest.mark.parametrize(("dim", "pairs"), [(8, 4), (40, 16), (64, 32)])
def test_rotary_embedding(dim: int, pairs: int, kernels: str) -> None:
    x, positions = floats(7, 5, 3, dim), np.array([0, 1, 2, 900, 31], np.int32)
    frequencies = (10000.0 ** -(np.arange(pairs) / pairs)).astype(np.float32)
    want = reference.rope(x, *reference.rotations(positions, frequencies, 1.25))
    got = gpu.rotate(on_device(x), on_device(positions), on_device(frequencies), 1.25)
    assert_close(got, want, 8 * EPS * 1.25 * 2 * np.abs(x).max())
    np.testing.assert_array_equal(got.cpu().numpy()[..., 2 * pairs :], x[..., 2 * pairs :])


def unwritten(kv_type: str, pages: int, kv_heads: int, dim: int) -> gpu.Cached:
    """A cache in which every value is no number."""
    cached = gpu.new_cache(kv_type, pages, kv_heads, dim, device_name())
    cached.data.fill_(77)
    (cached.data if cached.scales is None else cached.scales).fill_(torch.nan)
    return cached


def held(cached: gpu.Cached) -> np.ndarray:
    """Its values by slot."""
    return cached.values(torch.arange(len(cached.data), device=device_name())).flatten(0, 1).cpu().numpy()


@pytest.mark.parametrize(("kv_type", "dim"), [("f16", 24), ("f32", 24), ("q8_0", 24), ("q8_0", 96)])
def test_keys_and_values_are_stored(kv_type: str, dim: int, kernels: str) -> None:
    caches = [unwritten(kv_type, 3, 2, dim) for _ in range(2)]
    k, v = floats(8, 4, 2, dim), floats(9, 4, 2, dim)
    k[0, 0, 0], v[1, 1, 1] = 1e6, -1e7  # the second has a scale that float16 cannot hold
    k[1, 0], v[3, 1, :8] = 0, np.array([127, 0.5, 1.5, -2.5, 126.5, 3.5, -0.5, 1e-9])  # halves go to even
    v[3, 0] *= 1e-9  # so small that the scale is zero
    slots = np.array([70, 3, -1, 64])
    gpu.store_kv(*caches, on_device(k), on_device(v), on_device(slots))
    for cache, new in zip(caches, (k, v), strict=True):
        flat = held(cache)
        np.testing.assert_array_equal(flat[slots[[0, 1, 3]]], reference.kv_rounded(new, kv_type)[[0, 1, 3]])
        assert np.isnan(np.delete(flat, slots[[0, 1, 3]], axis=0)).all(), "written beside the slots"
        assert cache.nbytes == 3 * gpu.PAGE * 2 * gpu.kv_bytes(kv_type, dim)


@pytest.mark.parametrize(("pairs", "kv_type"), [(4, "f32"), (8, "f32"), (4, "q8_0")])
def test_heads_are_turned_and_stored_in_one_go(pairs: int, kv_type: str, kernels: str) -> None:
    """The heads are parts of one tensor, as a product gives them."""
    heads, kv, dim, tokens = 3, 2, 16, 4
    every = floats(16, tokens, heads + 2 * kv, dim)
    positions, slots = np.array([7, 0, 40, 900], np.int32), np.array([39, -1, 0, 64])
    frequencies = (10000.0 ** -(np.arange(pairs) / pairs)).astype(np.float32)
    turned = reference.rope(every, *reference.rotations(positions, frequencies, 1.0))
    ours = on_device(every)
    q, k, v = ours[:, :heads], ours[:, heads : heads + kv], ours[:, heads + kv :]
    caches = [unwritten(kv_type, 3, kv, dim) for _ in range(2)]
    rotation, pair = (on_device(frequencies), 1.0), (caches[0], caches[1])
    gpu.rotate_and_store(q, k, v, on_device(positions), rotation, pair, on_device(slots))
    bound = 16 * EPS * np.abs(every).max()
    assert_close(q, turned[:, :heads], bound)
    stored = np.array([0, 2, 3])
    step = np.abs(every).max() * 2**0.5 / 127 if kv_type == "q8_0" else 0  # a pair turns by no more than its length
    for cache, want in zip(caches, (turned[:, heads : heads + kv], every[:, heads + kv :]), strict=True):
        flat = held(cache)
        assert_close(on_device(flat[slots[stored]]), want[stored], bound + step * (0.5 + 2**-10))
        assert int(np.isnan(flat).all(axis=(1, 2)).sum()) == len(flat) - len(stored)


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
@pytest.mark.parametrize("pairs", [8, 24])
def test_heads_are_normalised_before_they_are_turned(pairs: int, kv_type: str, kernels: str) -> None:
    """All of a head's dimensions, of which some may not turn."""
    heads, kv, dim, tokens = 3, 2, 48, 3
    every, weights = floats(17, tokens, heads + 2 * kv, dim) * 5, [floats(n, dim) for n in (18, 19)]
    positions, slots = np.array([7, 0, 40], np.int32), np.array([39, 3, 64])
    frequencies = (10000.0 ** -(np.arange(pairs) / pairs)).astype(np.float32)
    parts = every[:, :heads], every[:, heads : heads + kv]
    normed = [reference.rms_norm(part, weight, 1e-5) for part, weight in zip(parts, weights, strict=True)]
    turns = reference.rotations(positions, frequencies, 1.0)
    want = [reference.rope(part.astype(np.float32), *turns) for part in normed]
    ours = on_device(every)
    q, k, v = ours[:, :heads], ours[:, heads : heads + kv], ours[:, heads + kv :]
    caches = [unwritten(kv_type, 3, kv, dim) for _ in range(2)]
    norms = gpu.HeadNorms(on_device(weights[0]), on_device(weights[1]), 1e-5)
    rotation, pair = (on_device(frequencies), 1.0), (caches[0], caches[1])
    gpu.rotate_and_store(q, k, v, on_device(positions), rotation, pair, on_device(slots), norms)
    bound = (dim + 24) * EPS * max(np.abs(part).max() for part in want)
    assert_close(q, want[0], bound)
    step = np.abs(want[1]).max() * 2**0.5 / 127 if kv_type == "q8_0" else 0
    assert_close(on_device(held(caches[0])[slots]), want[1], bound + step * (0.5 + 2**-10))


@pytest.mark.parametrize(
    ("kv_type", "normed", "position", "split"),
    [("f16", True, 70, True), ("f32", False, 31, False), ("q8_0", True, 64, True), ("f16", False, -1, False)],
)
def test_one_token_turns_is_stored_and_attends_in_one_go(
    kv_type: str, normed: bool, position: int, split: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as by two kernels, in the cache, too; -1: a token that stands for nothing."""
    if kernels == "triton":
        from powerinfer.kernels import triton_kernels

        monkeypatch.setattr(triton_kernels, "ATTENTION_SPLIT_PAGES", 1 if split else 100)
    heads, kv, dim, pairs = 6, 2, 64, 24
    every, slot = floats(59, 1, heads + 2 * kv, dim), 7 * gpu.PAGE + position % gpu.PAGE if position >= 0 else -1
    pages = on_device(np.array([[5, 2, 7] if position > 63 else [7, 2, 5]], np.int32))
    contexts = gpu.Contexts(pages, on_device(np.zeros(1, np.int32)), on_device(np.array([position], np.int32)))
    rotation = on_device((10000.0 ** -(np.arange(pairs) / pairs)).astype(np.float32)), 1.0
    norms = gpu.HeadNorms(on_device(floats(60, dim)), on_device(floats(61, dim)), 1e-5) if normed else None
    settings, answers = AttentionConfig(heads, kv, dim), []
    for together in (False, True):
        own = on_device(every.copy())  # q turns in its place
        q, k, v = own[:, :heads], own[:, heads : heads + kv], own[:, heads + kv :]
        first, second = (cached(kv_type, on_device(floats(n, 8, gpu.PAGE, kv, dim))) for n in (62, 63))
        slots = on_device(np.array([slot], np.int64))
        with interpreted.launches() if by_interpreter() else nullcontext([]) as names:
            if together:
                new = gpu.NewHeads(k, v, slots, rotation, norms)
                got = gpu.attend(q, new, (first, second), contexts, settings)
            else:
                gpu.rotate_and_store(q, k, v, contexts.positions, rotation, (first, second), slots, norms)
                got = gpu.attention(q, (first, second), contexts, settings)
        assert len(names) == (by_interpreter() and 1 + split + (not together))
        answers.append((got, held(first), held(second)))
    (apart, *before), (got, *after) = answers
    torch.testing.assert_close(got, apart, rtol=0, atol=0 if not CUDA else 1e-5)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def cached(kv_type: str, values: torch.Tensor) -> gpu.Cached:
    """A cache that holds these, which it gives back as they are."""
    if kv_type == "q8_0":
        return gpu.Cached(*(part.contiguous() for part in gpu.quantised(values)))
    return gpu.Cached(values.to(torch.float16 if kv_type == "f16" else torch.float32))


GROWTH: dict[str, Any] = {"query_growth": 0.4, "query_interval": 9, "query_offset": 1}
"""Settings by which queries grow with their positions."""


def query_factors(positions: list[int], growth: dict[str, Any]) -> Any:
    """Factors of the queries at some positions, float32."""
    if not growth:
        return np.ones(len(positions), np.float32)
    intervals = np.floor((np.array(positions) + growth["query_offset"]) / growth["query_interval"])
    return (1 + growth["query_growth"] * np.log(1 + intervals)).astype(np.float32)


@dataclass
class Sequence:
    pages: list[int]
    positions: list[int]  # of the step's tokens


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter, where a sequence has NaN
@pytest.mark.parametrize(
    ("sizes", "window", "many", "split", "sinks", "kv_types"),
    [
        ((2, 2, 8), None, 2, False, False, "f32 q8_0"),
        ((2, 2, 8), 5, 31, False, True, "f16"),
        ((6, 2, 24), None, 31, False, False, "f32 q8_0"),
        ((6, 2, 24), 40, 2, True, True, "f16"),
        ((6, 2, 24), 5, 2, True, False, "q8_0"),
        ((2, 2, 8), None, 31, True, True, "f32 f16"),
        ((2, 1, 264), 40, 2, False, False, "f16"),
    ],
)
def test_attention(
    sizes: tuple[int, int, int],
    window: int | None,
    many: int,
    split: bool,
    sinks: bool,
    kv_types: str,
    request: pytest.FixtureRequest,
    kernels: str,
) -> None:
    """sizes: heads of queries and of keys, their dimension; split: the context, between programs; kv_types: of the
    cache, by the interpreter: each of a few tokens and of a prompt, and with a context that is split."""
    if split:
        request.getfixturevalue("small_tiles")
    several = [Sequence([5, 2, 7], [70]), Sequence([1], [0, 1, 2]), Sequence([3, 6], [*range(31, 31 + many)])]
    heads, kv_heads, dim = sizes
    q = floats(10, 4 + many, heads, dim)
    beside = floats(14, heads) if sinks else None
    chunked = window is not None and sinks
    growth, cap = GROWTH if split else {}, 1.5 if window == 5 else None  # errors shrink by a cap
    for kv_type in kv_types.split() if by_interpreter() else ("f32", "f16", "q8_0"):
        caches = [reference.kv_rounded(floats(seed, 8, gpu.PAGE, kv_heads, dim), kv_type) for seed in (11, 12)]
        table, rows, positions = np.full((3, 3), -1, np.int32), [], []
        want, bound = [], []
        for i, one in enumerate(several):
            table[i, : len(one.pages)] = one.pages
            at, n = len(rows), len(one.positions)
            rows += [i] * n
            positions += one.positions
            grown = q[at : at + n] * query_factors(one.positions, growth)[:, None, None]
            mine = (grown, *caches, np.array(one.pages), np.array(one.positions, np.int32))
            want.append(reference.attention(*mine, window=window or 0, sinks=beside, cap=cap, chunked=chunked))
            # A score's error is that of a sum of dim products; weights change by as much, relatively, and the rest
            # rounds once for every position.
            eps = 2**-10 if many > 8 and kv_type != "f32" else EPS  # prompts meet an F16 cache in F16
            score = np.abs(grown).sum(axis=2).max() * np.abs(caches[0]).max() / np.sqrt(dim)
            longest = max(one.positions) + 1
            bound.append(
                2
                * eps
                * ((sum_error(dim) / EPS + 2) * score + longest + 8)
                * np.abs(caches[1]).max()
                * np.ones_like(want[-1])
            )
        parts = [cached(kv_type, on_device(c)) for c in caches]
        for part, values in zip(parts, caches, strict=True):
            np.testing.assert_array_equal(held(part), values.reshape(-1, kv_heads, dim))
        # The last token stands for nothing, as those that fill up a step of fixed size.
        extra = on_device(np.concatenate([q, floats(13, 1, heads, dim)]))
        step = on_device(np.array([*rows, 0], np.int32)), on_device(np.array([*positions, -1], np.int32))
        for part in parts:  # a page of nobody
            (part.data if part.scales is None else part.scales)[0] = torch.nan
        contexts = gpu.Contexts(on_device(table), *step)
        settings = AttentionConfig(heads, kv_heads, dim, window=window, score_cap=cap, chunked=chunked, **growth)
        given = extra, (parts[0], parts[1]), contexts, settings, None if beside is None else on_device(beside)
        got = gpu.attention(*given).view(extra.shape)
        assert_close(got[:-1], np.concatenate(want), np.concatenate(bound))
        assert (got[-1] == 0).all()
        for part in parts:
            (part.data if part.scales is None else part.scales)[several[0].pages] = torch.nan
        again = gpu.attention(*given).view(extra.shape)
        assert again[0].isnan().all() and torch.equal(again[1:], got[1:]), "of the first sequence alone"


def test_rows_are_moved_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of some rows with the scales of others would be another matrix."""
    weight = gpu.upload(raw("Q8_0", 8, 64), device_name())
    before, plain, left = gpu.values(weight).clone(), torch.Tensor.index_select, [2]

    def failing(own: torch.Tensor, *of: Any) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return plain(own, *of)

    order = np.arange(8, dtype=np.int32)[::-1]
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch.Tensor, "index_select", failing)
        gpu.rearrange(weight, order)
    assert torch.equal(gpu.values(weight), before)
    gpu.rearrange(weight, order)
    assert torch.equal(gpu.values(weight), before.flip(0))


def unanswered(device: Any) -> CallAnswer:
    """The call of number 8; no call was answered yet."""
    counters, answered = (torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 1))
    return CallAnswer(counters, answered, 8)


def is_settled(answer: CallAnswer, cold: int) -> bool:
    """Whether it is by a kernel that has selected so many terms of the CPU's."""
    return answer.counters.tolist() == [cold, 0, 0] and answer.answered.item() == (0 if cold else 8)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("tokens", "floor"), [(1, 0), (3, 5)])
def test_a_predictor_answers_where_it_selects_nothing_of_the_cpu(tokens: int, floor: int) -> None:
    weights = (gpu.upload(raw("Q8_0", *shape), device_name()) for shape in ((32, 64), (70, 32)))
    inner, outer = weights
    x, numbers = on_device(floats(14, tokens, 64)), on_device(np.arange(70, dtype=np.int32))
    answered = []
    for threshold, split in ((1e9, 60), (1e9, 70), (0.0, 60)):
        parts = [torch.full((tokens, size), 7, dtype=torch.uint8, device=x.device) for size in (split, 70 - split)]
        answer = unanswered(x.device)
        gpu.predict(inner, outer, numbers, x, threshold, floor, (parts[0], parts[1]), answer)
        assert is_settled(answer, int(parts[1].sum()))
        answered.append(answer.answered.item() == 8)
    assert answered[1:] == [True, False] and (floor or answered[0])


def guessed(inner: gpu.Weight, outer: gpu.Weight, x: torch.Tensor, threshold: float, floor: int) -> torch.Tensor:
    """What is selected, whatever the order of the rows, in one piece and in two."""
    found, n = [], outer.rows
    orders = (0, np.arange(n)), (min(23, n), np.random.default_rng(5).permutation(n)), (n, np.arange(n))
    kept = [None if one is None else one.clone() for one in (outer.data, outer.scales)]
    for hot, order in orders[: 2 if by_interpreter() else 3]:
        own = gpu.Weight(outer.type, n, outer.k, *(None if one is None else one.clone() for one in kept))
        gpu.rearrange(own, order.astype(np.int32))
        parts = [torch.full((len(x), size), 7, dtype=torch.uint8, device=x.device) for size in (hot, n - hot)]
        numbers = on_device(order.astype(np.int32))
        answer = None if len(x) > gpu.FEW else unanswered(x.device)
        gpu.predict(inner, own, numbers, x, threshold, floor, (parts[0], parts[1]), answer)
        assert answer is None or is_settled(answer, int(parts[1].sum()))
        found.append(torch.cat(parts, 1)[:, on_device(np.argsort(order))])
    assert all(torch.equal(found[0], one) for one in found[1:])
    return found[0]


@pytest.mark.parametrize(
    ("type_name", "tokens"), [("F16", 1), ("F16", 9), ("F16", 33), ("Q8_0", 1), ("Q8_0", 5), ("Q8_0", 12), ("Q8_0", 33)]
)
def test_what_a_predictor_names(type_name: str, tokens: int, kernels: str) -> None:
    if by_interpreter() and (type_name, tokens) in (("F16", 33), ("Q8_0", 12)):
        pytest.skip("as 33 of the other type, or as 9")
    inner, outer = raw(type_name, 32, 64), raw(type_name, 70, 32)
    x = floats(14, tokens, 64)
    hidden, off = product(inner.float32().astype(np.float64), x, type_name)
    hidden = np.maximum(hidden, 0)
    wide = outer.float32().astype(np.float64)
    z = hidden @ wide.T
    doubt = off @ np.abs(wide.T) + (40 * EPS + narrowed(type_name, tokens)) * (hidden @ np.abs(wide.T))
    weights = gpu.upload(inner, device_name()), gpu.upload(outer, device_name())
    for share in (0.3,) if by_interpreter() else (0.0, 0.3, 1.0):
        threshold = float(np.float32(np.quantile(z, 1 - share) + (1 if share == 0 else -1e-3)))
        got = guessed(*weights, on_device(x), threshold, 0).cpu().numpy()
        assert got.dtype == np.uint8 and got.shape == z.shape
        sure = np.abs(z - threshold) > doubt
        assert sure.mean() > 0.9
        np.testing.assert_array_equal(got[sure], (z >= threshold)[sure])
    got = guessed(*weights, on_device(x), 1e30, 17).cpu().numpy()
    assert (got.sum(axis=1) == 17).all()
    for t in range(tokens):
        named, rest = z[t][got[t] == 1], z[t][got[t] == 0]
        assert named.min() >= rest.max() - 2 * doubt.max()
    assert guessed(*weights, on_device(x), 1e30, 500).all()


def test_of_equal_guesses_the_first_are_named(kernels: str) -> None:
    inner = gpu.upload(raw("F32", 4, 8), device_name())
    outer = gpu.upload(RawTensor("F32", (70, 4), np.zeros(70 * 16, np.uint8)), device_name())
    got = guessed(inner, outer, on_device(floats(15, 2, 8)), 0.5, 9).cpu().numpy()
    np.testing.assert_array_equal(got, np.tile(np.arange(70) < 9, (2, 1)))
    assert guessed(inner, outer, on_device(floats(15, 2, 8)), 0.0, 9).all()
    odd = np.full((2, 8), np.nan, np.float32)
    assert guessed(inner, gpu.upload(raw("F32", 70, 4), device_name()), on_device(odd), 0.5, 0).all()


# ---- Neurons ---------------------------------------------------------------------------------------------------------


@dataclass
class Bundles:
    config: ModelConfig
    layout: BundleLayout
    groups: np.ndarray  # uint8 [groups, group_bytes]
    parts: dict[str, np.ndarray]  # the values that they hold, float64 [d_ff, d_model]
    vectors: NeuronVectors

    @property
    def limit(self) -> Any:
        """The activation's threshold, or that of each neuron."""
        limits = self.vectors[2]
        return self.config.layers[0].neurons.limit if limits is None else limits


def make_bundles(
    d_model: int,
    d_ff: int,
    types: tuple[str, str],
    activation: str = "relu",
    gated: bool = True,
    biases: bool = False,
    limits: bool = False,
    product_limits: bool = False,
) -> Bundles:
    curve = (0.7, 1.1, 0.5, -1e-6) if activation == "xielu" else ()
    ffn = FfnConfig(d_ff, activation, THRESHOLD, gated, curve=curve)
    config = ModelConfig(
        architecture="test", d_model=d_model, vocab_size=8,
        context_length=8, norm_eps=1e-5,
        layers=(LayerConfig(AttentionConfig(1, 1, d_model), ffn),),
    )  # fmt: skip
    (layout,) = bundle_layouts(config, *types, cpu.bundle_row_bytes)
    groups = np.full((-(-d_ff // BUNDLE_GROUP), layout.group_bytes), 0xAA, np.uint8)
    parts = {}
    for name in ("gate", "up", "down") if gated else ("up", "down"):
        kind = types[name == "down"]
        values = floats(len(name), d_ff, d_model) / np.sqrt(d_model)
        if kind in BLOCKS:
            whole = np.zeros((len(groups) * BUNDLE_GROUP, d_model), np.float32)
            whole[:d_ff] = values
            blocks = quantize(np.ascontiguousarray(whole.T), BLOCKS[kind])
            values = np.ascontiguousarray(dequantize(blocks, BLOCKS[kind]).T)[:d_ff]
            data = np.ascontiguousarray(blocks.reshape(d_model, len(groups), -1).swapaxes(0, 1))
        elif kind in STORED_ROWS:
            size = float(1 / np.sqrt(d_model))
            data = stored_evenly(kind, d_ff, d_model, size, np.random.default_rng(len(name))).reshape(d_ff, -1)
            values = dequantize(data, kind)
        else:
            data = quantize(values, kind)
            values = dequantize(data, kind)
        cpu.pack_bundle_rows(layout, name, d_ff, data.reshape(-1), groups, 1)
        if kind == "Q4_1" or kind in STORED_ROWS or (kind in BLOCKS and kind != "Q4_0X32"):  # on a GPU
            values = dequantize(quantize(values, "Q8_0"), "Q8_0")
        parts[name] = values.astype(np.float64)
    both = [floats(20 + i, d_ff) if biases else None for i in range(2)]
    own, of_products = (
        np.abs(floats(seed, d_ff)) if wanted else None for seed, wanted in ((22, limits), (23, product_limits))
    )
    return Bundles(config, layout, groups, parts, (both[0] if gated else None, both[1], own, of_products))


def all_of(bundles: Bundles, index: np.ndarray) -> gpu.Neurons:
    return gpu.resident(
        bundles.layout, bundles.groups, index, device_name(), bundles.config.layers[0].ffn, bundles.vectors
    )


def expected(
    bundles: Bundles, index: np.ndarray, x: np.ndarray, named: np.ndarray | None = None, most: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(sum, bound of its error, h, where no rounding decides whether a neuron fires)."""
    config = bundles.config.layers[0].ffn

    def dots(name: str, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        value, off = product(bundles.parts[name][index], x, bundles.layout.gate_type)
        return (value, off) if bias is None else (value + bias[index], off + 2 * EPS * np.abs(bias[index]))

    first, off = dots("gate", bundles.vectors[0]) if config.gated else dots("up", bundles.vectors[1])
    own = bundles.limit if bundles.vectors[2] is None else bundles.limit[index]
    limit = own if config.activation in THRESHOLDED else 0.0
    decides = np.abs(reference.activate("silu", first)) if config.activation == "cats" else first
    sure = np.abs(decides - limit) > 1.2 * off
    h = reference.activate("relu" if config.activation == "drelu" else config.activation, first, None, own)
    steep = config.activation in ("relu2", "xielu")
    off = off * (2 * np.abs(first) + 1 if steep else 1.2) + 8 * EPS * np.abs(h)
    if config.activation in THRESHOLDED:
        off = np.where(sure, off, off + own)
    if most:
        sure &= np.abs(np.abs(h) - most) > off
        off = np.where(sure, off, off + most)
        h = np.where(np.abs(h) <= most, 0, h)
    if config.gated:
        up, up_off = dots("up", bundles.vectors[1])
        if config.activation == "drelu":
            sure &= np.abs(up) > up_off
            up = np.maximum(up, 0)
        off = off * np.abs(up) + np.abs(h) * up_off + off * up_off + 2 * EPS * np.abs(h * up)
        h = h * up
        if bundles.vectors[3] is not None:
            least = bundles.vectors[3][index]
            near = np.abs(np.abs(h) - least) <= off
            sure &= ~near
            off = np.where(near, 2 * off + least, off)
            h = np.where(np.abs(h) <= least, 0, h)
    assert sure.mean() > 0.95
    if named is not None:
        h, sure = h * (named != 0), sure | (named == 0)
    off = np.where((h == 0) & sure, 0, off)
    down = bundles.parts["down"][index]
    rounding = (len(index) + 4) * EPS + narrowed(bundles.layout.down_type, len(x))
    return h @ down, off @ np.abs(down) + rounding * (np.abs(h) @ np.abs(down)) + 1e-30, h, sure


ROW_TYPES = [
    ("F16", "F16"),
    ("BF16", "BF16"),
    ("Q8_0", "Q8_0"),
    ("Q4_0", "Q4_0"),
    ("Q4_0", "Q4_0X32"),
    ("Q4_1", "Q4_1X32"),
]
ROUNDED = [
    *(("Q8_0", f"{kind}X32") for kind in ("Q5_0", "Q5_1", "Q8_0", "MXFP4")),
    *((kind, "Q8_0") for kind in STORED_ROWS),
]  # to Q8_0


@pytest.mark.parametrize("types", ROW_TYPES + ROUNDED)
def test_resident_neurons_hold_what_their_bundles_hold(
    types: tuple[str, str], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_LOADED", 1)  # group by group
    if kernels == "triton":
        from powerinfer.kernels import triton_bundles

        monkeypatch.setattr(triton_bundles, "UNITS", 64)
    some = [np.array([3, 31, 32, 33, 69]), np.arange(70), np.array([], np.int64)]
    sizes: tuple[int, ...] = (96, 544, 32, 128, 160, 512, 1056) if types[0] not in ("F16", "BF16") else (33, 1, 64, 100)
    sizes = (256, 768) if types[0] in STORED_ROWS else sizes
    for d_model in sizes[:2] if kernels == "triton" else sizes:
        bundles = make_bundles(d_model, 70, types)
        for index in some[:1] if kernels == "triton" else some:
            own = all_of(bundles, index.astype(np.int32))
            assert own.n == len(index) and own.gate is not None
            np.testing.assert_array_equal(gpu.values(own.gate).cpu().numpy(), bundles.parts["gate"][index])
            np.testing.assert_array_equal(gpu.values(own.up).cpu().numpy(), bundles.parts["up"][index])
            scales = None if own.shared is None or own.group is None else own.shared[own.group.long()]
            down = gpu.values(own.down, scales=scales).cpu().numpy()
            np.testing.assert_array_equal(down, bundles.parts["down"][index])
            each = d_model * block_type("Q4_0").nbytes // 32 if types[0] == "Q4_0" else None
            if types == ("Q4_0", "Q4_0"):
                assert own.nbytes == 3 * len(index) * each
            if types[1] == "Q4_0X32":
                groups = len(np.unique(index // BUNDLE_GROUP))
                assert own.nbytes == len(index) * (2 * each + d_model // 2 + 4) + groups * 2 * d_model


def run(
    neurons: gpu.Neurons, x: np.ndarray, named: np.ndarray | None = None, most: float = 0.0, fused: bool = False,
    added: bool = False,
) -> tuple[torch.Tensor, np.ndarray]:
    """added: to what is there already, too."""
    given = on_device(x), None if named is None else on_device(named), most
    total, fired = gpu.neuron_sum(neurons, *given, fused=fused)
    assert fired.dtype == torch.int32 and tuple(fired.shape) == (neurons.n,)
    if not added and by_interpreter():
        return total, fired.cpu().numpy()
    to, counts = torch.full_like(total, 0.5), torch.full_like(fired, 3, dtype=torch.int64)
    more = gpu.neuron_sum(neurons, *given, to, counts, fused)
    assert more[0] is to and more[1] is counts and torch.equal(counts, 3 + fired)
    size = float(total[total.isfinite()].abs().sum())
    assert torch.allclose(to, total + 0.5, atol=1e-6 * size + 1e-6, equal_nan=True)
    return total, fired.cpu().numpy()


def check(
    bundles: Bundles,
    index: np.ndarray,
    tokens: int,
    share: float | None,
    most: float = 0.0,
    added: bool = False,
    ways: tuple[bool, ...] = (False, True),
) -> None:
    """ways: of one token, kernels for each stage, or one for all."""
    x = floats(30 + tokens, tokens, bundles.config.d_model)
    named = None
    if share is not None:
        named = (np.random.default_rng(31).random((tokens, len(index))) < share).astype(np.uint8)
    want, bound, h, sure = expected(bundles, index, x, named, most)
    sure = sure.all(axis=0)
    for fused in ways if tokens == 1 and gpu.which(on_device(x)) == "triton" else (False,):
        total, fired = run(all_of(bundles, index), x, named, most, fused, added)
        assert_close(total, want, bound)
        np.testing.assert_array_equal(fired[sure], (h != 0).sum(axis=0)[sure])


@pytest.mark.parametrize("tokens", [1, 3, 32, 33])
@pytest.mark.parametrize("types", ROW_TYPES)
def test_neurons_of_every_type(types: tuple[str, str], tokens: int, kernels: str) -> None:
    skip_twins(types[0], types[0] == "BF16" and tokens > 1)
    if by_interpreter() and tokens == 3 and types[0] not in gpu.INTEGERS:
        pytest.skip("as 32 are multiplied")
    index = np.array([0, 3, 17, 31, 32, 40, 63, 64, 65, 69], np.int32)
    for d_model, share in ((160, 0.4), (64, None))[: 1 if by_interpreter() else 2]:  # some neurons, and all
        check(make_bundles(d_model, 70, types), index, tokens, share, added=True)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("types", ROW_TYPES)
@pytest.mark.usefixtures("small_tiles")
def test_many_neurons(types: tuple[str, str], tokens: int) -> None:
    skip_twins(types[0], types[0] == "BF16" and tokens > 1)
    bundles, index = make_bundles(64, 70, types), np.arange(0, 70, 2, dtype=np.int32)
    check(bundles, index, tokens, None if tokens == 1 else 0.4)


@pytest.mark.parametrize("types", [("F16", "F16"), ("Q4_0", "Q4_0X32")])
@pytest.mark.usefixtures("small_tiles")
def test_even_shares_of_the_selected_neurons(types: tuple[str, str], kernels: str) -> None:
    """In one kernel: lists of any number of words, the last of which is cut; shares of none, and of several tiles."""
    if kernels == "torch":
        pytest.skip("there is one kernel for each stage, or for all, of Triton's")
    bundles = make_bundles(64, 80, types)
    lists = (77, 1.0), (3, 0.5), (79, 0.4), (78, 0.02), (1, None), (2, None)
    brief = by_interpreter() and types[0] != "F16"  # no list depends on a type
    for n, share in lists[: 2 if brief else None]:
        check(bundles, np.arange(n, dtype=np.int32), 1, share, ways=(True,))
    if brief:
        return
    neurons, x = all_of(bundles, np.arange(77, dtype=np.int32)), on_device(floats(37, 1, 64))
    named = on_device((np.random.default_rng(38).random((1, 77)) < 0.4).astype(np.uint8))
    some, other = (gpu.neuron_sum(neurons, x, own, fused=True) for own in (named, named * 254))
    assert torch.equal(some[0], other[0]) and torch.equal(some[1], other[1]), "any byte but zero selects"


HOW: list[tuple[float | None, float]] = [(0.5, 0.0), (None, 0.3)]
"""The share of the neurons that are selected, and what a neuron must exceed."""


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ["silu", "relu", "relu2", "fatrelu", "drelu", "gelu_tanh", "cats", "xielu"])
def test_every_activation(activation: str, gated: bool, kernels: str) -> None:
    if activation == "drelu" and not gated:
        return
    bundles, index = make_bundles(48, 40, ("F16", "F16"), activation, gated, biases=True), np.arange(40, dtype=np.int32)
    cases = [(4, None, 0.3), (1, 0.5, 0.0)][: 2 if gated or activation == "relu" else 1]  # one function for all kernels
    if not by_interpreter():
        cases = [(tokens, *how) for tokens in (1, 4) for how in HOW]
    for tokens, share, most in cases:
        check(bundles, index, tokens, share, most)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ["fatrelu", "cats"])
def test_each_neuron_has_its_threshold(activation: str, gated: bool, kernels: str) -> None:
    products = gated and activation == "cats"
    if by_interpreter() and gated != products:
        pytest.skip("the interpreter goes through thresholds of gates and of products with the others")
    bundles = make_bundles(48, 70, ("F16", "F16"), activation, gated, True, True, products)
    every, some = np.arange(70, dtype=np.int32), np.array([3, 31, 32, 69], np.int32)
    cases = [(every, 1, 0.5, 0.0), (some, 4, None, 0.3)]
    if not by_interpreter():
        cases = [(index, tokens, *how) for index in (every, some) for tokens in (1, 4) for how in HOW]
    for index, tokens, share, most in cases:
        check(bundles, index, tokens, share, most)
    x = floats(36, 2, 48)
    one, _ = run(all_of(bundles, np.arange(70, dtype=np.int32)), x)
    for at in (2, 3) if products else (2,):
        vectors = [np.roll(own, 1) if i == at and own is not None else own for i, own in enumerate(bundles.vectors)]
        two, _ = run(all_of(replace(bundles, vectors=vectors), np.arange(70, dtype=np.int32)), x)
        assert ((one - two).abs() > 1e-2).any()
    x[0, 5] = np.nan
    total, _ = run(all_of(bundles, np.arange(70, dtype=np.int32)), x)
    assert torch.isnan(total[0]).all() and torch.isfinite(total[1]).all()


def test_rows_that_share_scales_lie_in_any_order(kernels: str) -> None:
    """And scales of a group none of whose neurons counts are not read."""
    if kernels == "torch":
        pytest.skip("a neuron's scales are its own there")
    bundles, index = make_bundles(160, 96, ("Q4_0", "Q4_0X32")), np.arange(0, 96, 4, dtype=np.int32)
    x, named = floats(39, 1, 160), np.ones((1, len(index)), np.uint8)
    named[0, index >= 64] = 0
    want, bound, _, _ = expected(bundles, index, x, named)
    mixed = np.random.default_rng(40).permutation(len(index)).astype(np.int32)
    ours = all_of(bundles, index)
    assert ours.gate is not None and ours.shared is not None and ours.group is not None
    ours.shared[ours.group[-1]] = torch.nan
    for weight in (ours.gate, ours.up, ours.down):
        gpu.rearrange(weight, mixed)
    ours.group.copy_(ours.group[on_device(mixed).long()])
    for fused in (False, True):
        total, fired = run(ours, x, named[:, mixed], fused=fused)
        assert_close(total, want, bound)
        assert fired.any()


def test_no_neuron_and_none_named(kernels: str) -> None:
    bundles = make_bundles(64, 70, ("Q8_0", "Q8_0"))
    none = np.array([], np.int32)
    for tokens in (1, 8, 33):
        for fused in (False, True) if tokens == 1 else (False,):
            total, fired = run(all_of(bundles, none), floats(32, tokens, 64), fused=fused)
            assert (total == 0).all() and total.shape == (tokens, 64) and fired.shape == (0,)
            nobody = np.zeros((tokens, 70), np.uint8)
            total, fired = run(all_of(bundles, np.arange(70)), floats(32, tokens, 64), nobody, fused=fused)
            assert (total == 0).all() and not fired.any()


def test_a_token_gets_only_its_own_neurons(kernels: str) -> None:
    bundles = make_bundles(64, 70, ("F16", "F16"))
    neurons = all_of(bundles, np.arange(70, dtype=np.int32))
    x, named = floats(33, 2, 64), np.zeros((2, 70), np.uint8)
    named[0, ::3] = 1
    total, _ = run(neurons, x, named)
    assert (total[0] != 0).any() and (total[1] == 0).all()


def test_the_same_bits_every_time(kernels: str) -> None:
    bundles = make_bundles(96, 92, ("Q4_0", "Q4_0X32"))
    neurons = all_of(bundles, np.arange(0, 92, 2, dtype=np.int32))
    x = floats(34, 4, 96)
    named = (np.random.default_rng(36).random((1, 46)) < 0.5).astype(np.uint8)
    for given in ((x,), (x[:1], None, 0.0, True), (x[:1], named, 0.0, True)):
        first, _ = run(neurons, *given)
        again, _ = run(neurons, *given)
        assert torch.equal(first, again)


@pytest.mark.skipif(not TRITON or CUDA, reason="Triton's interpreter is not at hand")
def test_a_fused_kernel_and_a_sum_in_place_of_a_kernel_for_each_stage(kernels: str) -> None:
    if kernels == "torch":
        pytest.skip("kernels are Triton's")
    bundles = make_bundles(96, 200, ("F16", "F16"))
    neurons, x = all_of(bundles, np.arange(200, dtype=np.int32)), on_device(floats(34, 1, 96))
    named, to = on_device(np.ones((1, 200), np.uint8)), torch.zeros_like(x)
    counted = {}
    for given in (None, named):
        for fused in (False, True):
            with interpreted.launches() as counted[given is None, fused]:
                gpu.neuron_sum(neurons, x, given, 0.0, to, fused=fused)
    fused = ["_fused_kernel", "_sum_kernel"]
    assert counted[False, True] == counted[True, True] == fused
    assert counted[False, False] == ["_list_kernel", "_products_kernel", "_add_kernel", "_sum_kernel"]
    assert counted[True, False] == ["_products_kernel", "_list_kernel", "_add_kernel", "_sum_kernel"]


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_numbers_that_are_none_are_not_hidden(kind: str, kernels: str) -> None:
    bundles = make_bundles(64, 70, (kind, kind))
    neurons = all_of(bundles, np.arange(70, dtype=np.int32))
    x = floats(35, 2, 64)
    x[0, 5] = np.nan
    total, fired = run(neurons, x, most=0.1)
    assert torch.isnan(total[0]).all() and torch.isfinite(total[1]).all()
    assert (fired >= 1).all()
    total, fired = run(neurons, x[:1], most=0.1, fused=True)
    assert torch.isnan(total).all() and (fired == 1).all()


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.usefixtures("small_tiles")
def test_codes_have_15_bits_of_the_largest_value_of_a_block(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of any size; what is not finite makes its own block NaN, in products its own token."""
    if kernels == "torch":
        pytest.skip("codes are Triton's")
    from powerinfer.kernels import triton_kernels

    monkeypatch.setattr(triton_kernels, "CODED_BLOCKS", 2)  # several pieces of a row
    k, sizes = 160, np.array([1e-38, 1e-30, 1, 1e35, 0], np.float32)
    x = floats(41, 3, k) * np.repeat(sizes, 32)
    x[0, 64:66] = x[0, 64:96].max() * np.array([1, -1])  # codes at both ends
    x[0, 66] = x[0, 64] * (63.5 / 127)  # half a step
    x[1, 70], x[2, 3] = np.nan, -np.inf

    def read(made: torch.Tensor) -> np.ndarray:
        flat, blocks = made.cpu().numpy(), k // 32
        high, low = (flat[:, 8 * at * blocks : 8 * (at + 1) * blocks].copy().view(np.int8) for at in (0, 1))
        behind = flat[:, 16 * blocks : 19 * blocks].copy().view(np.float32).astype(np.float64)
        both = 256 * high.astype(np.float64) + low
        np.testing.assert_array_equal(behind[:, blocks:], both.reshape(len(x), -1, 16).sum(axis=2))
        return both * np.repeat(behind[:, :blocks], 32, axis=1)

    got = read(triton_kernels.codes(on_device(x)))
    wrong = np.repeat((~np.isfinite(x)).reshape(3, -1, 32).any(axis=2), 32, axis=1)
    assert np.isnan(got[wrong]).all()
    largest = np.repeat(np.abs(np.where(wrong, 0, x)).reshape(3, -1, 32).max(axis=2), 32, axis=1).astype(np.float64)
    off = np.abs(np.where(wrong, 0, got) - np.where(wrong, 0, x))
    assert (off <= largest * (CODED + 2 * EPS) + 2.0**-120).all()
    weight = gpu.upload(raw("Q8_0", 21, k), device_name())
    x[0, 96:128] = 0  # or sums are infinite
    sums = gpu.linear(weight, on_device(x)).cpu().numpy()
    assert np.isfinite(sums[0]).all() and np.isnan(sums[1:]).all()
    want, bound = product(gpu.values(weight).cpu().numpy().astype(np.float64), x[:1], "Q8_0")
    assert (np.abs(sums[:1] - want) <= bound + 1e-30).all()


def made_beside(result: torch.Tensor) -> None:
    """The kernel that wrote a result has made its codes, and they are those that it would have got."""
    from powerinfer.kernels import triton_kernels

    codes = triton_kernels.codes(result)
    assert codes.data_ptr() == triton_kernels.codes(result).data_ptr(), "made by no kernel of their own"
    blocks, plain = result.shape[1] // 32, triton_kernels.codes(result.clone())
    assert torch.equal(codes[:, : 19 * blocks], plain[:, : 19 * blocks])


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
def test_codes_are_made_beside_what_they_are_of(kernels: str) -> None:
    if kernels == "torch":
        pytest.skip("codes are Triton's")
    from powerinfer.kernels import triton_kernels

    for tokens, width in ((1, 64), (3, 96), (triton_kernels.IN_TURN, 160)):
        x, weight, bias = (on_device(a) for a in (floats(51, tokens, width), floats(52, width), floats(53, width)))
        into = torch.empty_like(x)
        for own in (None, into):
            for layer in (False, True):
                made_beside(gpu.norm(x, weight, bias, 1e-5, layer, own, for_codes=True))
        for up in (None, bias.expand(x.shape).contiguous()):
            made_beside(gpu.activate("silu", x, up, for_codes=True))
    for tokens, width in ((triton_kernels.IN_TURN + 1, 64), (2, 65)):  # which take none, or cannot have any
        x = on_device(floats(54, tokens, width))
        for result in (gpu.norm(x, x[0], None, 1e-5, False, for_codes=True), gpu.activate("relu", x, for_codes=True)):
            assert not hasattr(result, "made_codes")
    plain = gpu.norm(x[:1], x[0], None, 1e-5, False)
    assert not hasattr(plain, "made_codes"), "nobody asked for them"


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_the_last_program_joins_a_context(kv_type: str, kernels: str) -> None:
    """In pieces of one page; in their order, whichever program is the last. Counters are zero behind."""
    caches = [cached(kv_type, on_device(floats(n, 6, gpu.PAGE, 2, 32))) for n in (65, 66)]
    table = on_device(np.array([[0, 2, 4], [5, 1, 3]], np.int32))
    rows, positions = on_device(np.array([0, 1, 0], np.int32)), on_device(np.array([70, 12, -1], np.int32))
    given = on_device(floats(67, 3, 6, 32)), (caches[0], caches[1]), gpu.Contexts(table, rows, positions)
    settings, arrived = AttentionConfig(6, 2, 32), torch.zeros(2 * gpu.FEW, dtype=torch.int32, device=device_name())
    whole = gpu.attention(*given, settings)
    with interpreted.launches() if by_interpreter() else nullcontext([]) as names:
        got = gpu.attention(*given, settings, None, True, arrived)
    assert names == ["_attention_kernel"] * by_interpreter()
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-6)
    assert not arrived.any() and (got[2] == 0).all()
    if kernels == "triton":
        made_beside(got)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("dim", "heads"), [(32, 4), (96, 6)])
def test_codes_of_attention(split: bool, dim: int, heads: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sequences, and a token that stands for nothing, whose codes are zeros."""
    if kernels == "torch":
        pytest.skip("codes are Triton's")
    from powerinfer.kernels import triton_kernels

    monkeypatch.setattr(triton_kernels, "ATTENTION_SPLIT_PAGES", 1 if split else 100)
    caches = [cached("f16", on_device(floats(n, 6, gpu.PAGE, 2, dim))) for n in (55, 56)]
    table = on_device(np.array([[0, 2, 4], [5, 1, 3]], np.int32))
    rows, positions = on_device(np.array([0, 1, 0], np.int32)), on_device(np.array([70, 12, -1], np.int32))
    q = on_device(floats(57, 3, heads, dim))
    how = gpu.Contexts(table, rows, positions), AttentionConfig(heads, 2, dim)
    got = gpu.attention(q, (caches[0], caches[1]), *how, for_codes=True)
    made_beside(got)
    torch.testing.assert_close(got, gpu.attention(q, (caches[0], caches[1]), *how), rtol=1e-6, atol=1e-6)
    assert (triton_kernels.codes(got)[2, : 16 * got.shape[1] // 32] == 0).all()
    odd = cached("f16", on_device(floats(58, 6, gpu.PAGE, 2, 20)))
    got = gpu.attention(q[:, :, :20].contiguous(), (odd, odd), *how, for_codes=True)
    assert not hasattr(got, "made_codes"), "no whole blocks"


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of the interpreter, in exp of what is far below zero
@pytest.mark.parametrize(
    "activation", ["silu", "gelu_tanh", "relu", "relu2", "drelu", "fatrelu", "cats", "xielu", "swiglu_oai"]
)
def test_activations(activation: str, kernels: str) -> None:
    """With a gate that is a part of a larger tensor, and without one."""
    both = floats(59, 3, 2 * 50) * 4
    both[0, 3], both[1, 60] = np.nan, np.inf
    halves = on_device(both)[:, :50], on_device(both)[:, 50:]
    for up in (halves[1], None) if activation not in ("drelu", "swiglu_oai") else (halves[1],):
        limit = (0.7, 1.1, 0.5, -0.25) if activation == "xielu" else 0.3
        got = gpu.activate(activation, halves[0], up, limit)
        gpu.force_triton(False)
        want = gpu.activate(activation, *(None if one is None else one.double() for one in (halves[0], up)), limit)
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-7, equal_nan=True)
        gpu.force_triton(kernels == "triton")


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(("tokens", "tile"), [(1, (1, 8192)), (3, (1, 8192))])
def test_a_few_long_rows(tokens: int, tile: tuple[int, int], kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles as a GPU gets them."""
    from powerinfer.kernels import triton_kernels

    monkeypatch.setattr(triton_kernels, "NEARLY", 0.9)
    stored, x = raw("Q8_0", 3, 5120), floats(42, tokens, 5120)
    weight = gpu.upload(stored, device_name())
    assert triton_kernels.fitting(weight, tokens, 132)[:2] == tile
    want, bound = product(stored.float32().astype(np.float64), x, "Q8_0")
    assert_close(gpu.linear(weight, on_device(x)), want, bound)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("kind", "tokens"), [("F16", 5), ("Q8_0", 5), ("Q4_0", 20)])
def test_a_dense_sum_has_the_neurons_of_a_sparse_one(kind: str, tokens: int) -> None:
    """And the same sum, to the bits that activations have then."""
    x, n = on_device(floats(3, tokens, 64)), 48
    weights = [gpu.upload(raw(kind, n, 64), device_name()) for _ in range(3)]
    own = gpu.Neurons(*weights, None, None, None, None, "relu", 0.0)
    for selected in (None, on_device((floats(6, tokens, n) > -0.5).astype(np.uint8))):
        found = []
        for dense in (False, True):
            into, fired = on_device(floats(5, tokens, 64)), torch.zeros(n, dtype=torch.int64, device=x.device)
            assert gpu.neuron_sum(own, x, selected, 0.01, into, fired, dense=dense)[0] is into
            found.append((into, fired))
        assert torch.equal(found[0][1], found[1][1]) and found[0][1].any()
        assert (found[0][0] - found[1][0]).abs().max() <= 1e-3 * found[0][0].abs().max()


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("kind", "tokens", "n", "k"), [("Q8_0", 3, 70, 96), ("Q4_0", 20, 32, 160), ("Q4_0X32", 32, 300, 96)]
)
def test_sums_of_all_rows(kind: str, tokens: int, n: int, k: int, kernels: str) -> None:
    """Quantised rows, of which the last group is not full, times numbers of every size; a token's bits are those that
    it has beside any others."""
    if kernels == "torch":
        pytest.skip("sums of rows are Triton's")
    from powerinfer.kernels.triton_row_sums import row_sums

    shared = on_device(np.abs(floats(8, -(-n // 32), k)).astype(np.float16)) if kind == "Q4_0X32" else None
    weight = gpu.upload(raw("Q4_0" if shared is not None else kind, n, k), device_name())
    of_rows = None if shared is None else shared.repeat_interleave(32, dim=0)[:n]
    if shared is not None:
        weight = gpu.Weight(kind, n, k, weight.data)
    values = gpu.values(weight, scales=of_rows).cpu().numpy().astype(np.float64)
    h = floats(7, tokens, n) * np.float32(10.0) ** np.arange(-8, tokens - 8, dtype=np.float32)[:, None]
    h[h < 0] = 0
    before = floats(9, tokens, k)
    size = np.abs(h) @ np.abs(values)
    rounded = 2.0**-11 * (1 if shared is not None else 2)
    bound = size * (rounded + sum_error(n)) + 2.0**-23 * np.abs(before)
    got = row_sums(weight, shared, on_device(h), on_device(before.copy()))
    assert_close(got, h.astype(np.float64) @ values + before, bound)
    got = row_sums(weight, shared, on_device(h), None)
    assert_close(got, h.astype(np.float64) @ values, bound)
    last = row_sums(weight, shared, on_device(np.concatenate([h[-1:], h[:1]])), None)
    assert torch.equal(last, got[[-1, 0]])
