"""Weights whose codes kernels unpack to words of four: types of few bits, of grids and of tables, as a file has them.

Plain torch gives their values to the bit; kernels multiply with them within the bounds of `test_gpu_kernels`.
"""

from __future__ import annotations

from dataclasses import replace

import interpreted  # noqa: F401
import numpy as np
import pytest
from gpu_device import EPS, device_name
from stored_weights import stored
from test_gpu_experts import TOP, N, exact_sum, some_experts
from test_gpu_kernels import TRITON, assert_close, floats, kernels, on_device, product, raw  # noqa: F401

from powerinfer.formats.quant import block_type, dequantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import gpu, gpu_experts

TYPES = [kind for kind in gpu.GPU_TYPES if kind in gpu.UNPACKED]


def some(kind: str, rows: int, k: int) -> RawTensor:
    """Rows with values of about the same size; of `FACTORED` with a factor each."""
    factors = np.linspace(0.5, 2, rows, dtype=np.float32) if kind == gpu.FACTORED else None
    return replace(raw(kind, rows, k), scales=factors)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.usefixtures("device")
def test_values_are_those_of_the_file(kind: str) -> None:
    """Of any bytes: rows in another order, and zeros where there is none."""
    rows, k = 9, 2 * max(256, block_type(kind).block)
    own = RawTensor(kind, (rows, k), stored(kind, rows, k, np.random.default_rng(5)), some(kind, rows, 256).scales)
    weight = gpu.upload(own, device_name())
    assert weight.type == kind and weight.nbytes == gpu.weight_bytes(kind, rows, k)
    np.testing.assert_array_equal(gpu.values(weight).cpu().numpy(), own.float32())
    order = np.array([4, -1, 0, 8, 8], np.int32)
    wanted = np.where(order[:, None] < 0, 0, own.float32()[order])
    np.testing.assert_array_equal(gpu.values(gpu.upload(own, device_name(), order)).cpu().numpy(), wanted)
    from_file = gpu.stored(kind, rows, k, on_device(own.data))
    plain = dequantize(own.data.reshape(rows, -1), kind)
    np.testing.assert_array_equal(gpu.values(from_file, 2, 6).cpu().numpy(), plain[2:6])


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("kind", TYPES)
def test_products_of_one_of_some_and_of_many_tokens(
    kind: str,
    kernels: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In registers, by tensor cores, and dequantised: k is more than a tile has, and no whole number of tiles."""
    if kernels == "torch":
        pytest.skip("plain torch multiplies values, as those of all types")
    from powerinfer.kernels import triton_kernels

    monkeypatch.setitem(triton_kernels.ONE, kind, triton_kernels.Tile(2, 512, 4))
    monkeypatch.setitem(triton_kernels.SEVERAL, kind, triton_kernels.Tile(16, 512, 4))
    own = some(kind, 3, 768)
    weight, wide = gpu.upload(own, device_name()), own.float32().astype(np.float64)
    for tokens in (1, 9) if kind not in ("Q2_K", "IQ2_S") else (1, 3, 9):
        x = floats(tokens, tokens, 768)
        assert_close(gpu.linear(weight, on_device(x)), *product(wide, x, kind))
    half = triton_kernels.values(weight, 1, 3, None, None).cpu().numpy()
    assert (np.abs(half - wide[1:]) <= np.abs(wide).max(axis=1)[1:, None] * 2**-10).all()  # rounded; and Q2_K's terms


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kind", ["Q3_K", "IQ3_S"])
def test_experts(kind: str, tokens: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Of a type whose pieces are read together, and of one with a grid."""
    if kernels == "torch":
        pytest.skip("plain torch multiplies values, as those of all types")
    from powerinfer.kernels import triton_kernels

    for tiles in (triton_kernels.ONE, triton_kernels.WIDE):
        monkeypatch.setitem(tiles, kind, tiles[kind]._replace(rows=128, columns=256))
    about, tensors = some_experts(kind, 256, 256, True, "silu")
    index = np.array([2, 7], np.int32)
    experts = gpu_experts.resident(tensors, index, about, device_name())
    assert experts.nbytes == 2 * sum(gpu.weight_bytes(kind, *one.shape[1:]) for one in tensors)
    x, weights = floats(6, tokens, 256), np.abs(floats(7, tokens, TOP))
    selected = np.sort(np.argsort(floats(8, tokens, N), axis=1)[:, :TOP], axis=1)
    selected[0, :2] = index
    selected[0].sort()
    places = np.full(N, -1, np.int32)
    places[index] = np.arange(2)
    slots = places[selected]
    found = gpu_experts.expert_sum(experts, on_device(x), on_device(slots), on_device(weights)).cpu().numpy()
    exact, most = exact_sum(about, tensors, x, np.where(slots < 0, -1, selected), weights, [None] * 3)
    assert np.abs(found - exact).max() <= 40 * 512 * EPS * most


def test_blocks_are_cut_into_whole_words() -> None:
    """Kernels read codes in words, and headers in numbers of two bytes."""
    for kind, (begin, end) in gpu.UNPACKED.items():
        header = block_type(kind).nbytes - (end - begin)
        assert 0 <= begin < end <= block_type(kind).nbytes and (end - begin) % 4 == 0 and header % 2 == 0
        assert kind not in gpu.K_CODES and (kind in gpu.INTEGERS) == (kind in gpu.GPU_TYPES)
