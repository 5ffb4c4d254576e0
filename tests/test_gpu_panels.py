"""The CPU's panels on a device: the values that a file has, of every type."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_device import torch_device  # noqa: E402
from stored_weights import stored  # noqa: E402
from test_gpu_kernels import kernels  # noqa: E402, F401

from powerinfer import _native  # noqa: E402
from powerinfer.formats.quant import block_type, dequantize  # noqa: E402
from powerinfer.formats.tensors import RawTensor  # noqa: E402
from powerinfer.formats.weight_types import NATIVE_TYPES  # noqa: E402
from powerinfer.kernels import gpu, gpu_panels  # noqa: E402


@pytest.mark.parametrize("per_row", [1, 3])
@pytest.mark.parametrize("kind", sorted(NATIVE_TYPES))
@pytest.mark.usefixtures("device")
def test_the_values_of_every_type(kind: str, per_row: int) -> None:
    """To the bit; where a type becomes F16, within its rounding. 37 rows do not fill the last panel."""
    about = block_type(kind)
    rows, k = 37, max(per_row * about.block, 32 * per_row)
    rng, factors = np.random.default_rng(5), None
    data = stored(kind, rows, k, rng)
    wanted = dequantize(data.reshape(rows, -1), kind)
    if kind == "NVFP4":  # of rows, beside their blocks
        factors = rng.uniform(0.5, 2, rows).astype(np.float32)
        wanted = wanted * factors[:, None]
    matrix = _native.pack_matrix(_native.Pool(2), _native.Arena(), kind, rows, k, data, None, factors)
    panels = matrix.panels
    assert panels is not None and panels.nbytes == matrix.nbytes and not panels.flags.writeable
    there = torch.from_numpy(panels.copy()).to(torch_device())
    weight = gpu_panels.from_panels(kind, k, there)
    there.fill_(255)  # nothing of the weight is there
    assert (weight.type, weight.rows, weight.k) == (gpu_panels.device_type(kind), 48, k)
    assert weight.nbytes == len(panels) * gpu_panels.panel_bytes(kind, k)
    got = gpu.values(weight).cpu().numpy()
    assert not got[rows:].any()
    if gpu_panels.device_type(kind) == "F16" != kind:
        terms = 4 * np.abs(wanted).max() * 2**-24  # of a product and a sum, whose terms are at most twice as large
        assert (np.abs(got[:rows] - wanted) <= np.abs(wanted) * 2**-11 + 2**-25 + terms).all()
        assert (got[:rows] != wanted).any()
    else:
        np.testing.assert_array_equal(got[:rows], wanted)


@pytest.mark.parametrize("per_row", [1, 3])
@pytest.mark.parametrize("kind", gpu_panels.SAME_BITS)
def test_rows_have_the_bits_that_a_file_gives(
    kind: str, per_row: int, kernels: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """Written between others, by plain torch and by the kernel: several programs of words and of blocks."""
    if kernels == "triton":
        from powerinfer.kernels import triton_panels

        monkeypatch.setattr(triton_panels, "WORDS", 16)
        monkeypatch.setattr(triton_panels, "BLOCKS", 2)
    rows, k = 48, max(per_row * block_type(kind).block, 34 * per_row if block_type(kind).block == 1 else 0)
    data = stored(kind, rows, k, np.random.default_rng(6))
    panels = _native.pack_matrix(_native.Pool(2), _native.Arena(), kind, rows, k, data, None, None).panels
    assert panels is not None
    wanted = gpu.upload(RawTensor(kind, (rows, k), data.reshape(-1)), torch_device())
    weight = gpu.empty(gpu_panels.device_type(kind), rows + 32, k, torch_device())
    for part in (weight.data, weight.scales):
        if part is not None:
            part.view(torch.uint8).fill_(85)
    gpu_panels.put(weight, 16, kind, k, torch.from_numpy(panels.copy()).to(torch_device()))
    assert weight.type == wanted.type
    for part, own in ((weight.data, wanted.data), (weight.scales, wanted.scales)):
        if part is not None and own is not None:
            assert torch.equal(part[16:-16].view(torch.uint8), own.view(torch.uint8))
            assert (part[:16].view(torch.uint8) == 85).all() and (part[-16:].view(torch.uint8) == 85).all()
