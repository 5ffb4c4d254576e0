"""FP8 matrices of Hugging Face folders: e4m3 codes, with a scale for all, for each row, or for each block.

They become F16: a code has 4 significant bits, and times its scale it is rounded to 11.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from powerinfer.config import Shape
from powerinfer.formats.folder_modules import E4M3, SCALES, Module, Settings, as_f16, finite, numbers
from powerinfer.formats.layout import MAX_WIDTH
from powerinfer.formats.quant import Bytes, Float32
from powerinfer.formats.tensors import MadeTensor


def read_fp8(module: Module, settings: Settings) -> MadeTensor:
    """`weight`, times `weight_scale_inv` or `weight_scale`."""
    codes, rows, cols = module.matrix("weight", "F8_E4M3")
    scales = module.find("weight_scale_inv", *SCALES) or module.take("weight_scale", *SCALES)
    block = _block(module, (rows, cols), scales.shape, settings)
    make = partial(_make, module.title, (rows, cols), block, scales.type)
    return MadeTensor("F16", (rows, cols), (codes, scales), make)


def _block(module: Module, shape: Shape, scales: Shape, settings: Settings) -> Shape:
    """Rows and columns that share a scale. ModelError where the scales are not as many."""
    rows, cols = shape
    count = int(np.prod(scales))
    if count == 1:
        return shape
    if scales in ((rows,), (rows, 1)):
        return 1, cols
    blocks = list(_stated_blocks(settings))
    for high, wide in blocks:
        if scales == (-(-rows // high), -(-cols // wide)):
            return high, wide
    stated = f" in blocks of {' or '.join(f'{high} x {wide}' for high, wide in blocks)}" if blocks else ""
    raise module.bad(f"has scales of shape {list(scales)}, which do not go with {rows} x {cols} weights{stated}")


def _stated_blocks(settings: Settings) -> Iterator[Shape]:
    """Sizes of blocks in the settings."""
    groups = settings.get("config_groups")
    stated = [settings.get("weight_block_size")]
    for group in groups.values() if type(groups) is dict else ():
        weights = group.get("weights") if type(group) is dict else None
        stated.append(weights.get("block_structure") if type(weights) is dict else None)
    for block in stated:
        sizes = block if type(block) is list and len(block) == 2 else ()
        if sizes and all(type(size) is int and 0 < size <= MAX_WIDTH for size in sizes):
            yield tuple(sizes)


def _make(title: str, shape: Shape, block: Shape, scale_type: str, codes: Bytes, scales: Bytes) -> Bytes:
    rows, cols = shape
    high, wide = block
    factors = finite(title, numbers(scales, scale_type)).reshape(-(-rows // high), -(-cols // wide))
    codes = codes.reshape(shape)

    def values(begin: int, end: int) -> Float32:
        result: Float32 = E4M3[codes[begin:end]]
        factor_of = factors[np.arange(begin, end) // high]
        result *= factor_of if wide == cols else np.repeat(factor_of, min(wide, cols), axis=1)[:, :cols]
        return result

    return as_f16(title, rows, cols, values)
