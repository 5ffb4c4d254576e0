"""Pages of the KV cache between the CPU's byte order and a GPU's."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_device import torch_device  # noqa: E402

from powerinfer import _native  # noqa: E402
from powerinfer.kernels import gpu, gpu_pages  # noqa: E402
from powerinfer.kernels.cpu import LANES, PAGE, round_up  # noqa: E402

KINDS = {"f32": np.float32, "f16": np.float16, "q8_0": np.int8}


@pytest.mark.parametrize("dim", [16, 20, 64, 72])
@pytest.mark.parametrize("kv_type", KINDS)
@pytest.mark.usefixtures("device")
def test_pages_get_there_and_back(kv_type: str, dim: int) -> None:
    """Every number to its place, as csrc/table.h describes the CPU's; others stay as they are, and padding is zero."""
    rng, heads, pages = np.random.default_rng(1), 3, 5
    pad, kind = round_up(dim, LANES), KINDS[kv_type]
    blocks = -(-pad // 32)
    cpu = _native.Cache(kv_type, [(2, 24), (heads, dim)], pages).heads(1)
    assert cpu.shape[:2] == (pages, heads) and cpu.flags.writeable
    each = pad * PAGE * np.dtype(kind).itemsize
    k, v = (rng.integers(-99, 99, (pages, PAGE, heads, dim)).astype(kind) for _ in range(2))
    scales = [rng.standard_normal((pages, PAGE, heads, blocks)).astype(np.float16) for _ in range(2)]
    for part, own in enumerate((k, v)):
        wide = np.zeros((pages, heads, PAGE, pad), kind)
        wide[..., :dim] = own.transpose(0, 2, 1, 3)
        wide = wide if part else wide.transpose(0, 1, 3, 2)
        cpu[..., part * each : (part + 1) * each] = np.ascontiguousarray(wide).view(np.uint8).reshape(pages, heads, -1)
        if kv_type == "q8_0":
            of = scales[part].transpose(0, 2, 1, 3) if part else scales[part].transpose(0, 2, 3, 1)
            begin, size = 2 * each + part * blocks * PAGE * 2, blocks * PAGE * 2
            cpu[..., begin : begin + size] = np.ascontiguousarray(of).view(np.uint8).reshape(pages, heads, -1)
    keys, values = (gpu.new_cache(kv_type, pages + 2, heads, dim, torch_device()) for _ in range(2))
    there = torch.tensor([6, 0, 3], device=torch_device())
    some = np.array([4, 1, 2])
    gpu_pages.put(keys, values, there, torch.from_numpy(cpu[some]).to(torch_device()))
    for cached, own, own_scales in ((keys, k, scales[0]), (values, v, scales[1])):
        np.testing.assert_array_equal(cached.data[there].cpu().numpy(), own[some])
        assert not cached.data[[1, 2, 4, 5]].any()
        if cached.scales is not None:
            np.testing.assert_array_equal(cached.scales[there].cpu().numpy(), own_scales[some])
    back = gpu_pages.taken(keys, values, there, cpu.shape[2]).cpu().numpy()
    np.testing.assert_array_equal(back, cpu[some])
