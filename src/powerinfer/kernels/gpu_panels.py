"""Matrices that the CPU has in panels (csrc/table.h), converted on a device that they were copied to.

Every type of the CPU becomes one that many tokens are multiplied with: its own where that is as fast, another that
keeps every value (Q5_0 and IQ4_NL as Q8_0, Q3_K as Q6_K, TQ1_0, TQ2_0, Q1_0 and Q2_0 as Q4_0), else F16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.formats.quant import block_type
from powerinfer.formats.weight_types import WEIGHT_TYPES
from powerinfer.kernels import gpu_grids
from powerinfer.kernels.cpu import LANES
from powerinfer.kernels.gpu_types import FLOAT16_MAX, K_CODES, UNPACKED, Weight

if TYPE_CHECKING:
    from torch import Tensor

_FLIP = 0x88  # codes with an offset of 8 become two's complement
_FEW_VALUES = ("TQ1_0", "TQ2_0", "Q2_0", "Q1_0")  # from -1 to 2
_SAME_VALUES = {**dict.fromkeys(_FEW_VALUES, "Q4_0"), "Q3_K": "Q6_K", "Q5_0": "Q8_0", "IQ4_NL": "Q8_0"}


def device_type(kind: str) -> str:
    """The type in which a matrix of panels gets on a device, for products with many tokens."""
    if kind in _SAME_VALUES:
        return _SAME_VALUES[kind]
    return "F16" if kind in UNPACKED else str(WEIGHT_TYPES[kind].gpu)


def panel_bytes(kind: str, k: int) -> int:
    """Bytes of a panel of k columns once it is converted."""
    return LANES * block_type(device_type(kind)).row_bytes(k)


def from_panels(kind: str, k: int, panels: Tensor) -> Weight:
    """Rows of a matrix [rows, k] from panels of it, uint8 [panels, bytes of a panel] on the device; zeros where the
    last panel has no row. The weight has memory of its own."""
    import torch

    rows, n = LANES * len(panels), k // block_type(kind).block
    if kind in ("F32", "F16"):
        own = torch.float32 if kind == "F32" else torch.float16
        data = panels.view(own).view(len(panels), -1, LANES)[:, :k]
        return Weight(kind, rows, k, _transposed(data).view(rows, k))
    if kind == "BF16":
        words = panels.view(torch.int32).view(len(panels), -1, LANES)
        return Weight(kind, rows, k, _transposed(words).view(rows, -1).view(torch.bfloat16)[:, :k].contiguous())
    if WEIGHT_TYPES[kind].grid:
        return _as_f16(k, gpu_grids.values(kind, k, panels))
    factors = None
    if kind == "NVFP4":
        at = n * WEIGHT_TYPES[kind].codes * LANES
        factors = panels[:, at : at + 4 * LANES].contiguous().view(torch.float32).view(-1, 1)
        panels = torch.cat((panels[:, :at], panels[:, at + 4 * LANES :]), dim=1)
    codes, meta = _parts(kind, n, panels)
    if factors is not None:
        codes = codes.view(rows, n, 4, 8)
        table = torch.tensor(WEIGHT_TYPES[kind].entries, dtype=torch.float32, device=panels.device)
        wide = table[torch.cat((codes & 15, codes >> 4), dim=-1).long()]
        scale = _half_e4m3(_transposed(meta.reshape(len(panels), -1, LANES)).view(rows, n, 4))
        return _as_f16(k, (wide * scale[..., None]).view(rows, k) * factors)
    if kind in K_CODES:
        return Weight(kind, rows, k, *_k_quants(kind, codes, meta))
    if kind == "Q3_K":
        return Weight("Q6_K", rows, k, *_k_quants("Q6_K", _as_q6_k(_three_bits(codes) + 28), meta))
    if kind == "Q8_0":
        return Weight(kind, rows, k, codes.view(torch.int8).view(rows, k), _scales(meta)[..., 0].contiguous())
    if kind == "Q4_0":
        return Weight(kind, rows, k, (codes ^ _FLIP).view(rows, -1), _scales(meta)[..., 0].contiguous())
    if kind == "MXFP4":
        return Weight(kind, rows, k, codes.view(rows, -1), _transposed(meta).view(rows, -1))
    if kind in _FEW_VALUES:
        unpack = {"TQ1_0": _digits, "Q1_0": _bits}.get(kind, _two_bits)
        few = unpack(codes).reshape(rows, -1, 32) - 1
        return Weight("Q4_0", rows, k, (few[..., :16] & 15 | few[..., 16:] << 4).view(rows, -1),
                      _scales(meta).expand(-1, -1, block_type(kind).block // 32).reshape(rows, -1))  # fmt: skip
    if kind == "Q2_K":
        both = _scales(meta[..., :64]).float()
        nibbles = _transposed(meta[..., 64:].reshape(len(panels), -1, LANES)).view(rows, n, 16)
        scale, least = both[..., :1] * (nibbles & 15).float(), both[..., 1:] * (nibbles >> 4).float()
        return _as_f16(k, _two_bits(codes).view(rows, n, 16, 16).float() * scale[..., None] - least[..., None])
    if kind == "IQ4_XS":
        table = torch.tensor(WEIGHT_TYPES[kind].entries, dtype=torch.float32, device=panels.device)
        wide = table[_nibbles(codes.view(rows, -1, 16)).long()]
        scale = _scales(meta[..., :32])  # one of 256, with eight factors
        each = _transposed(meta[..., 32:].reshape(len(panels), -1, LANES)).view(torch.int8).view(rows, n, 8)
        return _as_f16(k, wide * (scale.float() * each.float()).view(rows, -1, 1))
    nibbles = _nibbles(codes[..., :16])
    if kind in ("Q5_0", "Q5_1"):  # byte j of four has, in bit g, the fifth bit of element 4 g + j
        bits = torch.arange(8, dtype=torch.uint8, device=panels.device)[:, None]
        nibbles = nibbles | (codes[..., None, 16:] >> bits & 1).flatten(-2) << 4
    scales = _scales(meta)
    if kind == "Q5_0":
        return Weight("Q8_0", rows, k, (nibbles.view(torch.int8) - 16).view(rows, k), scales[..., 0].contiguous())
    if kind == "IQ4_NL":
        entries = torch.tensor(WEIGHT_TYPES[kind].entries, dtype=torch.int8, device=panels.device)
        return Weight("Q8_0", rows, k, entries[nibbles.long()].view(rows, k), scales[..., 0].contiguous())
    assert kind in ("Q4_1", "Q5_1")
    both = scales.float()
    return _as_f16(k, nibbles.float() * both[..., :1] + both[..., 1:])


def _as_f16(k: int, values: Tensor) -> Weight:
    wide = values.clamp(-FLOAT16_MAX, FLOAT16_MAX).half().reshape(-1, k)
    return Weight("F16", len(wide), k, wide)


def _transposed(panels: Tensor) -> Tensor:
    """[panels, n, LANES] -> [panels, LANES, n], in memory of its own."""
    import torch

    return panels.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _parts(kind: str, n: int, panels: Tensor) -> tuple[Tensor, Tensor]:
    """Of n blocks a row: the bytes of their codes, row by row, [rows, n, bytes]; and what follows the codes of a
    panel, [panels, n, bytes]."""
    import torch

    words, more = WEIGHT_TYPES[kind].codes // 4, WEIGHT_TYPES[kind].panel_scales * LANES
    end = n * words * 4 * LANES
    codes = panels[:, :end].reshape(-1).view(torch.int32).view(len(panels), -1, LANES)
    meta = panels[:, end : end + n * more].reshape(len(panels), n, more)
    return _transposed(codes).view(-1, n * words).view(torch.uint8).view(-1, n, 4 * words), meta


def _scales(meta: Tensor) -> Tensor:
    """float16 of each row, one or several sets of LANES a block: [rows, n, sets]."""
    import torch

    panels, n, nbytes = meta.shape
    halves = meta.contiguous().view(torch.float16).view(panels, -1, LANES)
    return _transposed(halves).view(-1, n, nbytes // (2 * LANES))


def _nibbles(codes: Tensor) -> Tensor:
    """The elements of blocks of 32, [.., 16] -> [.., 32]."""
    import torch

    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _half_e4m3(codes: Tensor) -> Tensor:
    """Half of each number of NVFP4's scales."""
    import torch

    exponent, mantissa = (codes >> 3).int(), (codes & 7).float()
    return torch.ldexp(torch.where(exponent == 0, mantissa, mantissa + 8), exponent.clamp(min=1) - 11)


def _two_bits(codes: Tensor) -> Tensor:
    """The elements of blocks, [rows, n, bytes] -> [rows, n, 4 * bytes]: a line has 16 of them, 4 by 4."""
    import torch

    lines = codes.view(*codes.shape[:2], -1, 4)
    return torch.stack([lines >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)


def _bits(codes: Tensor) -> Tensor:
    """The elements of blocks of Q1_0, [rows, n, 16] -> [rows, n, 128], doubled: a line has 32 of them, 4 by 4."""
    import torch

    lines = codes.view(*codes.shape[:2], -1, 1, 4)
    return (lines >> torch.arange(8, dtype=torch.uint8, device=codes.device)[:, None] << 1 & 2).flatten(-3)


def _digits(codes: Tensor) -> Tensor:
    """The elements of blocks of TQ1_0, [rows, n, 52] -> [rows, n, 256]: digits of base 3."""
    import torch

    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8, device=codes.device)
    digits = ((codes[..., None, :] * powers[:, None]).short() * 3 >> 8).to(torch.uint8)
    parts = [digits[..., begin:end].flatten(-2) for begin, end in ((0, 32), (32, 48), (48, 52))]
    return torch.cat(parts, dim=-1)[..., :256]


def _three_bits(codes: Tensor) -> Tensor:
    """The elements of blocks of Q3_K, [rows, n, 96] -> [rows, n, 256]: three lines have 32 of them, 4 by 4."""
    import torch

    first, second, third = codes.view(*codes.shape[:2], 8, 3, 4).unbind(dim=-2)
    low = [line >> shift & 7 for line in (first, second, third) for shift in (0, 3)]
    parts = [first >> 6 | (third >> 6 & 1) << 2, second >> 6 | third >> 7 << 2]
    return torch.stack(low + parts, dim=-2).flatten(-3)


def _as_q6_k(codes: Tensor) -> Tensor:
    """Codes of 6 bits [rows, n, 256] as they are behind one another in panels, [rows, n, 192]."""
    import torch

    a, b, c, d = codes.view(*codes.shape[:2], 2, 4, 32).unbind(dim=-2)
    low = ((a & 15) | c << 4, (b & 15) | d << 4)
    return torch.cat((*low, a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6), dim=-1).flatten(-2)


def _k_quants(kind: str, codes: Tensor, meta: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and scales of a `Weight`: as a file has them."""
    import torch

    rows, n = codes.shape[:2]
    panels = len(meta)

    def bytes_of(part: Tensor, count: int) -> Tensor:
        """[panels, n, count * LANES] -> [rows, n, count]."""
        return _transposed(part.reshape(panels, n * count, LANES)).view(rows, n, count)

    if kind == "Q6_K":
        halves = codes.view(rows, n, 2, 96)
        data = torch.cat((halves[..., :64].flatten(-2), halves[..., 64:].flatten(-2)), dim=-1)
        whole = _scales(meta[..., :32]).view(torch.uint8)
        return data.view(rows, -1), torch.cat((bytes_of(meta[..., 32:], 16), whole), dim=-1).view(rows, -1)
    if kind == "Q5_K":
        codes = torch.cat((codes[..., 128:], codes[..., :128]), dim=-1)
    both = _scales(meta[..., :64]).view(torch.uint8)
    pairs = meta[..., 64:].reshape(panels, n, 8, 2, LANES)
    scale, least = (bytes_of(pairs[..., one, :], 8) for one in (0, 1))
    first = scale[..., :4] | scale[..., 4:] >> 4 << 6
    second = least[..., :4] | least[..., 4:] >> 4 << 6
    third = (scale[..., 4:] & 15) | (least[..., 4:] & 15) << 4
    return codes.reshape(rows, -1), torch.cat((both, first, second, third), dim=-1).view(rows, -1)
