"""The scales of quantised matrices, apart from their codes.

The values of a block are linear in the float16 numbers that it begins or ends with, its scale and in some types a
minimum: value = scale * a + minimum * b, where a and b follow from the codes (in K-quants with the small scales of the
block's parts). So a matrix can get other scales and keep its codes.
"""

from __future__ import annotations

import numpy as np

from powerinfer.errors import ModelError
from powerinfer.formats.quant import Bytes, Float32, block_type, dequantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import WEIGHT_TYPES

_PLACES = {name: kind.halves for name, kind in WEIGHT_TYPES.items() if kind.native and kind.halves and not kind.grid}
"""Positions in a block's bytes of its scale and its minimum, by type. (Factors of scales of grids are not whole.)"""

SCALED = frozenset(_PLACES)
"""The types that have such numbers, of those that the kernels take."""


def block_scales(tensor: RawTensor) -> Float32:
    """float32 [rows, blocks, 1 or 2]: of each block its scale, and its minimum where the type has one.

    The tensor's type must be of SCALED.
    """
    blocks = _blocks(tensor)
    fields = [blocks[..., at : at + 2].copy().view("<f2").astype(np.float32) for at in _PLACES[tensor.type]]
    return np.concatenate(fields, axis=-1)


def with_scales(tensor: RawTensor, scales: Float32) -> RawTensor:
    """A copy of the tensor with these numbers, as `block_scales` gives them, in float16. ModelError if one is not
    finite there."""
    with np.errstate(over="ignore"):
        halves = scales.astype("<f2")
    if not np.isfinite(halves).all():
        raise ModelError("the scale of a block is too large for float16, or not a number")
    blocks = _blocks(tensor).copy()
    for number, at in enumerate(_PLACES[tensor.type]):
        blocks[..., at : at + 2] = np.ascontiguousarray(halves[..., number, None]).view(np.uint8)
    return RawTensor(tensor.type, tensor.shape, blocks.reshape(-1))


def factors(tensor: RawTensor) -> list[Float32]:
    """Factors of the scale, and of the minimum, of its block in each value: whole numbers, float32 of the tensor's
    shape, one array for each."""
    factors_ = []
    for number in range(len(_PLACES[tensor.type])):
        unit_scales = np.zeros((*_blocks(tensor).shape[:2], len(_PLACES[tensor.type])), np.float32)
        unit_scales[..., number] = 1
        factors_.append(dequantize(with_scales(tensor, unit_scales).rows(), tensor.type).reshape(tensor.shape))
    return factors_


def _blocks(tensor: RawTensor) -> Bytes:
    """uint8 [rows, blocks, bytes]"""
    rows = tensor.rows()
    return rows.reshape(len(rows), -1, block_type(tensor.type).nbytes)
