"""Random weights in the bytes of a model file, for the tests of the kernels."""

from __future__ import annotations

import numpy as np

from powerinfer.formats.quant import block_type, dequantize
from powerinfer.formats.weight_types import WEIGHT_TYPES

FLOATS = ("F32", "F16", "BF16")

# How many scales the minimum of a block must be to centre the codes.
_CENTRE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5}


def with_scales(blocks: np.ndarray, type_name: str, scales: np.ndarray) -> np.ndarray:
    """Sets the float16 fields of blocks [..., bytes]: scales, and minima that centre the codes on zero.

    The scale of MXFP4 is a power of two: the nearest to the scale's magnitude, the least for zero. Those of NVFP4 are
    numbers of 8 bits: the next below, and of 16 elements each another.
    """
    if type_name == "NVFP4":
        exponents = np.frexp(scales)[1] + 6
        codes = np.clip(8 * exponents[..., None] + np.arange(4), 0, 0x7E)
        blocks[..., :4] = np.where(scales[..., None] == 0, 0, codes)
        return blocks
    if type_name == "MXFP4":
        with np.errstate(divide="ignore"):
            exponents = np.rint(np.log2(np.abs(scales))) + 127
        blocks[..., 0] = np.clip(exponents, 0, 254)
        return blocks
    if type_name == "IQ1_M":  # four bits in each of four words, above scales of its parts
        words = np.ascontiguousarray(blocks[..., 48:56]).view("<u2") & 0x0FFF
        fours = scales.astype(np.float16).view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16) & 0xF
        blocks[..., 48:56] = (words | fours << 12).astype("<u2").view(np.uint8)
        return blocks
    for i, at in enumerate(WEIGHT_TYPES[type_name].halves or (0,)):
        half = (scales * _CENTRE[type_name] if i else scales).astype(np.float16)
        blocks[..., at : at + 2] = half[..., None].view(np.uint8)
    return blocks


def float_bytes(weights: np.ndarray, type_name: str) -> np.ndarray:
    """float32 weights as F32, F16 or BF16 (cut), uint8 1-D."""
    if type_name == "F32":
        return weights.view(np.uint8).reshape(-1)
    narrow = weights.astype(np.float16) if type_name == "F16" else (weights.view(np.uint32) >> 16).astype(np.uint16)
    return narrow.view(np.uint8).reshape(-1)


def stored(type_name: str, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Any codes, scales of both signs over four orders of magnitude; uint8 1-D."""
    if type_name in FLOATS:
        return float_bytes(rng.standard_normal((rows, k)).astype(np.float32), type_name)
    kind = block_type(type_name)
    blocks = rng.integers(0, 256, (rows, k // kind.block, kind.nbytes), dtype=np.uint8)
    scales = rng.choice([-1.0, 1.0], blocks.shape[:2]) * 10 ** rng.uniform(-4, 0, blocks.shape[:2])
    return with_scales(blocks, type_name, scales).reshape(-1)


def stored_evenly(type_name: str, rows: int, k: int, size: float, rng: np.random.Generator) -> np.ndarray:
    """Weights around zero with a standard deviation of about `size`; uint8 1-D."""
    if type_name in FLOATS:
        return float_bytes((rng.standard_normal((rows, k)) * size).astype(np.float32), type_name)
    kind = block_type(type_name)
    shape = (rows, k // kind.block)
    blocks = rng.integers(0, 256, (*shape, kind.nbytes), dtype=np.uint8)
    plain = dequantize(with_scales(blocks, type_name, np.ones(shape)).reshape(rows, -1), type_name)
    return with_scales(blocks, type_name, np.full(shape, size / plain.std())).reshape(-1)
