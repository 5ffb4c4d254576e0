"""Matrices of the types with grids (IQ1, IQ2, IQ3) that the CPU has in panels (csrc/table.h), as floats on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.formats.iq_grids import grid
from powerinfer.formats.weight_types import WEIGHT_TYPES
from powerinfer.kernels.cpu import LANES

if TYPE_CHECKING:
    from torch import Tensor

# Entries of a block, and the bits of per_byte that panels have apart from its lowest eight.
_PARTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "IQ3_S": (64, (1,)), "IQ3_XXS": (64, ()), "IQ2_XXS": (32, ()), "IQ2_XS": (32, (1,)), "IQ2_S": (32, (2,)),
    "IQ1_S": (32, (2, 1)), "IQ1_M": (32, (4,)),
}  # fmt: skip
_UNITS = {"IQ3_S": 1.0, "IQ3_XXS": 0.25, "IQ1_S": 1.0, "IQ1_M": 1.0}  # IQ2: an eighth


def values(kind: str, k: int, panels: Tensor) -> Tensor:
    """float32 [rows, k] of panels of k columns, uint8 [panels, bytes of a panel]."""
    import torch

    facts, blocks, (entries, parts) = WEIGHT_TYPES[kind], k // 256, _PARTS[kind]
    end = blocks * facts.codes * LANES
    codes = panels[:, :end].reshape(len(panels), blocks, -1)
    scales = panels[:, end : end + blocks * facts.panel_scales * LANES].reshape(len(panels), blocks, -1)
    at = entries * LANES
    numbers = codes[..., :at].unflatten(-1, (entries, LANES)).int()
    shift = 8
    for bits in parts:
        per_byte = 8 // bits
        part = codes[..., at : at + entries // per_byte * LANES].unflatten(-1, (-1, 1, LANES)).int()
        by = bits * torch.arange(per_byte, device=panels.device, dtype=torch.int32)[:, None]
        numbers = numbers | (part >> by & (1 << bits) - 1).flatten(-3, -2) << shift
        at, shift = at + entries // per_byte * LANES, shift + bits
    numbers = _row_major(numbers)
    table = torch.from_numpy(grid(kind[:3] if kind.startswith("IQ1") else kind)).to(panels.device)
    wide = table[numbers.long() & len(table) - 1].flatten(-2)
    pairs = scales[..., 2 * LANES :].unflatten(-1, (-1, 1, LANES)).int()
    small = torch.cat((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)
    small = _row_major(small)
    if kind.startswith("IQ1"):
        down = small >> 3 if kind == "IQ1_S" else numbers >> 11
        wide = wide + (0.125 - 0.25 * down.float()).repeat_interleave(256 // down.shape[-1], -1)
        small = small & 7
    else:
        signs = codes[..., at:].unflatten(-1, (8, LANES, 1, 4)).int()  # byte j of 32 elements: of every fourth, j first
        group = torch.arange(8, device=panels.device, dtype=torch.int32)[:, None]
        by = group // 2 + group % 2 * 4
        negative = (signs >> by & 1).permute(0, 3, 1, 2, 4, 5).flatten(-3)
        wide = wide * (1 - 2 * negative).float()
    base = _row_major(scales[..., : 2 * LANES].contiguous().view(torch.float16).unsqueeze(-2)).float()
    factors = base * _UNITS.get(kind, 0.125) * (2 * small + 1).float()
    return (wide * factors.repeat_interleave(256 // factors.shape[-1], -1)).reshape(-1, k)


def _row_major(data: Tensor) -> Tensor:
    """[panels, blocks, n, LANES] -> [panels, LANES, blocks, n]."""
    return data.permute(0, 3, 1, 2)
