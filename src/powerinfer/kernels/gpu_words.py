"""Weights whose codes kernels unpack to words of four (`triton_words`), in plain torch: their values, and their tables.

Rows lie as `gpu_types.UNPACKED` says. Values have the bits that `formats.quant.dequantize` gives.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.formats.iq_grids import grid
from powerinfer.formats.weight_types import WEIGHT_TYPES
from powerinfer.kernels.gpu_types import UNPACKED

if TYPE_CHECKING:
    from torch import Tensor


@cache
def table(kind: str, device: Any) -> Tensor | None:
    """The grid of a type on a device, for kernels: an entry's four int8 as an int32, or its eight as an int64; those of
    IQ1 are eight times as large, and moved up by an eighth. None: the type has none."""
    import torch

    if not WEIGHT_TYPES[kind].grid:
        return None
    values = grid(kind[:3] if kind.startswith("IQ1") else kind)
    if kind.startswith("IQ1"):
        values = values * 8 + 1
    entries = np.ascontiguousarray(values.astype(np.int8))
    return torch.from_numpy(entries.view(np.int32 if entries.shape[1] == 4 else np.int64)[:, 0]).to(device)


def values(kind: str, k: int, data: Tensor, scales: Tensor) -> Tensor:
    """The values of rows [n, k], float32. data, scales: as `Weight` has them."""
    begin, end = UNPACKED[kind]
    codes = data.reshape(-1, end - begin)
    if kind == "NVFP4":
        header, factors = scales[:, : k // 16].reshape(-1, 4), _floats(scales, k // 16)
        return _nvfp4(codes, header).view(-1, k) * factors
    header = scales.reshape(-1, WEIGHT_TYPES[kind].nbytes - (end - begin))
    if WEIGHT_TYPES[kind].grid:
        return _grid_values(kind, codes, header).view(-1, k)
    readers = {
        "Q2_K": _q2_k, "Q3_K": _q3_k, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "IQ4_XS": _iq4_xs, "Q2_0": _q2_0, "Q1_0": _q1_0
    }  # fmt: skip
    return readers[kind](codes, header).view(-1, k)


def _half(header: Tensor, at: int = 0) -> Tensor:
    """The float16 at a byte of each block, float32 [n, 1]."""
    import torch

    return header[:, at : at + 2].contiguous().view(torch.float16).float()


def _floats(scales: Tensor, at: int) -> Tensor:
    import torch

    return scales[:, at : at + 4].contiguous().view(torch.float32)


def _fields(packed: Tensor, width: int, bits: int, mask: int) -> Tensor:
    """Fields of `bits` of each `width` bytes: the lowest of all of them, then the next; [n, fields]."""
    import torch

    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed.unflatten(-1, (-1, 1, width)) >> shifts & mask).flatten(1)


def _parts(wide: Tensor, scale: Tensor) -> Tensor:
    """Values [n, elements] times the scales of their parts [n, parts]."""
    return (wide.unflatten(-1, (scale.shape[1], -1)).float() * scale[..., None]).flatten(1)


def _q2_k(codes: Tensor, header: Tensor) -> Tensor:
    small, wide = header[:, :16], _fields(codes, 32, 2, 3)
    least = _half(header, 18) * (small >> 4).float()
    return _parts(wide, _half(header, 16) * (small & 15).float()) - least.repeat_interleave(16, -1)


def _q3_k(codes: Tensor, header: Tensor) -> Tensor:
    small = _fields(header[:, :8], 8, 4, 15) | _fields(header[:, 8:12], 4, 2, 3) << 4
    wide = _fields(codes[:, 32:], 32, 2, 3).float() + 4 * _fields(codes[:, :32], 32, 1, 1).float() - 4
    return _parts(wide, _half(header, 12) * (small.float() - 32))


def _tq2_0(codes: Tensor, header: Tensor) -> Tensor:
    return _half(header) * (_fields(codes, 32, 2, 3).float() - 1)


def _q2_0(codes: Tensor, header: Tensor) -> Tensor:
    return _half(header) * (_fields(codes, 1, 2, 3).float() - 1)


def _q1_0(codes: Tensor, header: Tensor) -> Tensor:
    return _half(header) * (2 * _fields(codes, 1, 1, 1).float() - 1)


def _tq1_0(codes: Tensor, header: Tensor) -> Tensor:
    import torch

    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8, device=codes.device)[:, None]
    digits = ((codes[:, None, :] * powers).short() * 3 >> 8).float() - 1
    wide = torch.cat([digits[..., begin:end].flatten(1) for begin, end in ((0, 32), (32, 48), (48, 52))], dim=-1)
    return _half(header) * wide[:, :256]


def _entries(kind: str, numbers: Tensor) -> Tensor:
    """Entries that codes of four bits stand for."""
    import torch

    return torch.tensor(WEIGHT_TYPES[kind].entries, dtype=torch.float32, device=numbers.device)[numbers.long()]


def _nvfp4(codes: Tensor, header: Tensor) -> Tensor:
    import torch

    exponent, mantissa = (header >> 3 & 15).int(), (header & 7).float()
    scale = torch.ldexp(torch.where(exponent == 0, mantissa, mantissa + 8), exponent.clamp(min=1) - 11)
    return _parts(_entries("NVFP4", _fields(codes, 8, 4, 15)), scale.masked_fill(header == 0x7F, 0))


def _iq4_xs(codes: Tensor, header: Tensor) -> Tensor:
    small = _fields(header[:, 4:8], 1, 4, 15) | _fields(header[:, 2:4], 1, 2, 3) << 4
    return _parts(_entries("IQ4_XS", _fields(codes, 16, 4, 15)), _half(header) * (small.float() - 32))


def _words(packed: Tensor, nbytes: int) -> Tensor:
    """Numbers of two or four bytes, int64 [n, numbers]."""
    import torch

    packed = packed.clone(memory_format=torch.contiguous_format)  # a part of one block may begin between words
    return packed.view(torch.int16 if nbytes == 2 else torch.int32).long() & (1 << 8 * nbytes) - 1


def _even(seven: Tensor) -> Tensor:
    """Seven bits, and an eighth that makes the number of set ones even."""
    low = seven & 127
    odd = low ^ low >> 4
    odd = odd ^ odd >> 2
    return low | (odd ^ odd >> 1) << 7 & 128


def _split_words(words: Tensor, bits: int, mask: int) -> Tensor:
    """Four fields of each word, `bits` apart: int64 [n, 4 * words]."""
    import torch

    return (words[..., None] >> bits * torch.arange(4, device=words.device) & mask).flatten(1)


def _numbers(kind: str, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of entries, and the eight signs of each run of eight elements; those of IQ1 go down where it is not 0."""
    import torch

    if kind in ("IQ3_S", "IQ3_XXS"):
        low = codes[:, :64].long()
        if kind == "IQ3_XXS":
            return low, _even(_split_words(_words(codes[:, 64:], 4), 7, 127))
        return low | _fields(codes[:, 64:72], 1, 1, 1).long() << 8, codes[:, 72:].long()
    if kind == "IQ2_XXS":
        pairs = _words(codes, 4).view(-1, 8, 2)
        return _split_words(pairs[..., 0], 8, 255), _even(_split_words(pairs[..., 1], 7, 127))
    if kind == "IQ2_XS":
        paired = _words(codes, 2)
        return paired & 511, _even(paired >> 9)
    low = codes[:, :32].long()
    if kind == "IQ2_S":
        return low | _fields(codes[:, 64:], 1, 2, 3).long() << 8, codes[:, 32:64].long()
    if kind == "IQ1_S":
        more = _words(codes[:, 32:], 2)
        return low | _split_words(more, 3, 7) << 8, (more >> 15).repeat_interleave(4, -1)
    fours = _fields(codes[:, 32:], 1, 4, 15).long()
    return low | (fours & 7) << 8, torch.bitwise_and(fours, 8)


def _grid_values(kind: str, codes: Tensor, header: Tensor) -> Tensor:
    import torch

    numbers, bits = _numbers(kind, codes)
    entries = torch.from_numpy(grid(kind[:3] if kind.startswith("IQ1") else kind)).to(codes.device)[numbers]
    if kind.startswith("IQ1"):
        wide = entries + torch.where(bits == 0, 0.125, -0.125)[..., None]
    else:
        by = torch.arange(8, device=codes.device)
        wide = entries.view(-1, 32, 8) * (1 - 2 * (bits[..., None] >> by & 1)).float()
    return _parts(wide.flatten(1), _grid_scales(kind, codes, header))


def _grid_scales(kind: str, codes: Tensor, header: Tensor) -> Tensor:
    """Scales of 16 or 32 elements, float32 [n, parts]."""
    import torch

    if kind == "IQ1_M":
        words = _words(header, 2)
        tops = words >> 12 << torch.tensor((0, 4, 8, 12), device=words.device)
        bits = tops.sum(-1, keepdim=True).to(torch.int32).view(torch.int16)[:, ::2]  # the lower half
        return bits.contiguous().view(torch.float16).float() * (2 * _split_words(words, 3, 7) + 1).float()
    if kind == "IQ1_S":
        return _half(header) * (2 * (_words(codes[:, 32:], 2) >> 12 & 7) + 1).float()
    if kind == "IQ3_S":
        return _half(header) * (1 + 2 * _fields(header[:, 2:], 1, 4, 15)).float()
    if kind == "IQ3_XXS":
        small = _words(codes[:, 64:], 4) >> 28
    elif kind == "IQ2_XXS":
        small = _words(codes, 4)[:, 1::2] >> 28
    else:
        small = _fields(header[:, 2:], 1, 4, 15)
    return _half(header) * (0.5 + small.float()) * (0.5 if kind == "IQ3_XXS" else 0.25)
