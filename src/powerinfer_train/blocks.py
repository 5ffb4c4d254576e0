"""Quantised matrices that are trained without their codes: only the scales of their blocks move.

As in PEQA (arXiv 2305.14152), with the minima of the blocks as well. What is trained is stored in float16, so next to
nothing is lost by rounding, and the optimiser's memory is that of one or two numbers a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from powerinfer.formats.block_scales import SCALED, block_scales, factors, with_scales
from powerinfer.formats.quant import block_type
from powerinfer.formats.tensors import RawTensor

PART = 16  # values that have the same factor of the minimum, in every type
REACH = 10 / 3  # of a scale and a minimum, so that the rates of a recipe, which are those of values, suit them


@dataclass(frozen=True)
class Blocks:
    """A matrix [rows, columns] or a stack of them. `factors`: of the values, int8 or int16 [..., rows, columns], and
    those of the minima, of PART values each. scales: float32 [..., rows, blocks, 1 or 2], as stored; units: of the same
    shape, what a move of 1 adds to them. `moves`, which is trained, is a tensor of that shape too."""

    factors: tuple[Tensor, ...]
    scales: Tensor
    units: Tensor

    @classmethod
    def from_tensor(cls, stored: RawTensor, device: torch.device) -> Blocks:
        """stored: of a type of `block_scales.SCALED`."""
        kind, parts = block_type(stored.type), factors(stored)
        scales = block_scales(stored)
        units = np.abs(scales)
        if units.shape[-1] == 2 and kind.block == 32:  # a minimum may be zero where the block's values are not
            units[..., 1] = units[..., 0] * np.float32(parts[0].max(initial=0) / 3)
        parts[1:] = [one[..., ::PART] for one in parts[1:]]
        small = np.int8 if kind.block == 32 else np.int16
        shape = (*stored.shape[:-1], stored.shape[-1] // kind.block, scales.shape[-1])
        return cls(
            tuple(torch.from_numpy(one.astype(small)).to(device) for one in parts),
            torch.from_numpy(scales).view(shape).to(device),
            torch.from_numpy(np.float32(REACH) * units).view(shape).to(device),
        )

    def still(self) -> Tensor:
        """Moves of a matrix that stays as it is stored, which take no memory."""
        return torch.zeros((), device=self.scales.device).expand_as(self.scales)

    def expert(self, number: int) -> Blocks:
        """A matrix of the stack."""
        return Blocks(tuple(one[number] for one in self.factors), self.scales[number], self.units[number])

    def moved(self, moves: Tensor) -> Tensor:
        """The scales and minima."""
        return torch.addcmul(self.scales, self.units, moves)

    def values(self, moves: Tensor) -> Tensor:
        """float32 [rows, columns], of one matrix."""
        moved = self.moved(moves)
        values = self.factors[0].unflatten(-1, (moved.shape[-2], -1)) * moved[..., :1]
        if len(self.factors) > 1:
            low = self.factors[1].unflatten(-1, (moved.shape[-2], -1)) * moved[..., 1:]
            values.unflatten(-1, (-1, PART)).add_(low[..., None])
        return values.flatten(-2)

    def gradient(self, of_values: Tensor) -> Tensor:
        """Gradient of the moves, from that of the values [rows, columns], of one matrix."""
        blocks = self.scales.shape[-2]
        of_values = of_values.float()
        blocks_gradient = of_values.unflatten(-1, (blocks, -1))
        sums = [(blocks_gradient * self.factors[0].unflatten(-1, (blocks, -1))).sum(-1)]
        if len(self.factors) > 1:
            parts = of_values.unflatten(-1, (-1, PART)).sum(-1)
            sums.append((parts * self.factors[1]).unflatten(-1, (blocks, -1)).sum(-1))
        return torch.stack(sums, -1).mul_(self.units)

    def stored(self, tensor: RawTensor, moves: Tensor) -> RawTensor:
        """The tensor that `of` was given, with the moved scales."""
        moved = self.moved(moves.detach()).flatten(0, -3).cpu().numpy()
        return with_scales(tensor, moved)

    def rescaled(self, other: RawTensor) -> Blocks | None:
        """Another tensor, with the codes of this one in memory; None if it has others."""
        if other.type not in SCALED:
            return None
        theirs = Blocks.from_tensor(other, self.scales.device)
        same = len(theirs.factors) == len(self.factors) and theirs.scales.shape == self.scales.shape
        if not same or not all(torch.equal(a, b) for a, b in zip(self.factors, theirs.factors, strict=True)):
            return None
        return replace(theirs, factors=self.factors)

    def moves_to(self, other: RawTensor) -> Tensor | None:
        """The moves with which this becomes another tensor; None if that has other codes."""
        theirs = self.rescaled(other)
        if theirs is None:
            return None
        return torch.where(self.units > 0, (theirs.scales - self.scales) / self.units, 0)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """x @ W^T in x's type, W the values of moved blocks, which are made again on the way back instead of kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Tensor, blocks: Blocks) -> Tensor:
        ctx.save_for_backward(x, moves)
        ctx.blocks = blocks
        return functional.linear(x, blocks.values(moves).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, moves), blocks, gradient = ctx.saved_tensors, ctx.blocks, gradients[0]
        by_x = gradient @ blocks.values(moves).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return by_x, None, None
        return by_x, blocks.gradient(gradient.flatten(0, -2).T @ x.flatten(0, -2)), None


def linear(x: Tensor, moves: Tensor, blocks: Blocks) -> Tensor:
    """x [..., columns] -> [..., rows] in x's type."""
    product: Tensor = _Linear.apply(x, moves, blocks)
    return product
