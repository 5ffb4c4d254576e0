"""Activations that many tokens' products take, in the narrow types that tensor cores multiply, made once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_EXPONENTS = -126, 126
"""Exponents of the powers of two that float32 has, with their inverses: the least and the largest."""


class Activations:
    """Activations float32 [T, k], or a batch of them [.., T, k], which one or several products take.

    halves: makes the rows, and the scales, of float16 (`plain_halves`).
    """

    def __init__(self, x: Tensor, halves: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self.x = x
        self._halves = halves
        self._narrow: dict[Any, tuple[Tensor, Tensor | None]] = {}

    def narrowed(self, kind: Any) -> tuple[Tensor, Tensor | None]:
        """Rows in float16 or bfloat16, of their shape, and what each is multiplied by again, float32 [.., T, 1]: of
        float16 a power of two that is larger than all of its values, since some models have some beyond float16; None:
        by nothing."""
        import torch

        if kind not in self._narrow:
            self._narrow[kind] = (self.x.bfloat16(), None) if kind == torch.bfloat16 else self._halves(self.x)
        return self._narrow[kind]

    def product(self, w: Tensor, columns: slice | None = None) -> Tensor:
        """x . w, float32 [.., T, n], with sums of float32. w: [.., k, n], in whose type x is rounded. columns: of x,
        None: all."""
        columns = slice(None) if columns is None else columns
        if w.dtype == self.x.dtype:
            return self.x[..., columns] @ w
        rows, scale = self.narrowed(w.dtype)
        out = _wide_product(rows[..., columns], w)
        return out if scale is None else out.mul_(scale)


def plain_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Activations.narrowed` of float16, in plain torch."""
    import torch

    exponent = x.abs().amax(dim=-1, keepdim=True).frexp().exponent.clamp_(*_EXPONENTS)
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return torch.ldexp(x, -exponent).half(), scale


def _wide_product(x: Tensor, w: Tensor) -> Tensor:
    """The product of narrow matrices, or of a batch of them, with float32 sums."""
    import torch

    if not x.is_cuda:
        return x.float() @ w.float()
    return (torch.mm if x.ndim == 2 else torch.bmm)(x, w, out_dtype=torch.float32)
