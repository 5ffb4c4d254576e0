"""The way between a GPU and the CPU, for layers that both of them work on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor, device

Floats = NDArray[np.float32]

NAMED_TOKENS = 8
"""Most tokens of a step that a predictor names neurons for: for more nearly every neuron is named by some token."""


def link_bytes(max_tokens: int, d_model: int, d_ff: int) -> int:
    """Bytes of the buffers of a `Link`, which lie in RAM."""
    return 2 * 4 * max_tokens * d_model + min(max_tokens, NAMED_TOKENS) * d_ff


class Link:
    """The way between a GPU and the CPU: buffers that both reach, one set for all layers.

    What goes out is copied in the order of the GPU's stream, so the CPU waits for that much of it and no more. A buffer
    is written again only when the next layer's input has come, behind which the last one's sum was added.
    """

    def __init__(self, to: device, max_tokens: int, d_model: int, d_ff: int) -> None:
        import torch

        self._cuda = to.type == "cuda"
        self.to = to

        def host(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)

        self._x = host(max_tokens, d_model, dtype=torch.float32)
        self._back = host(max_tokens, d_model, dtype=torch.float32)
        self._names = host(min(max_tokens, NAMED_TOKENS) * d_ff, dtype=torch.uint8)
        self._came = torch.cuda.Event() if self._cuda else None
        self._sent: tuple[Floats, NDArray[np.uint8] | None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, which lie in RAM."""
        return int(self._x.nbytes + self._back.nbytes + self._names.nbytes)

    def send(self, x: Tensor, names: Tensor | None) -> None:
        """Let x float32 [T, d_model] and names uint8 [T, n] go out to the CPU."""
        own = self._x[: len(x)]
        own.copy_(x, non_blocking=True)
        named = None
        if names is not None:
            place = self._names[: names.numel()].view(names.shape)
            place.copy_(names, non_blocking=True)
            named = place.numpy()
        if self._came is not None:
            self._came.record()
        self._sent = own.numpy(), named

    def wait(self) -> tuple[Floats, NDArray[np.uint8] | None]:
        """What was sent, once it is there."""
        assert self._sent is not None
        if self._came is not None:
            self._came.synchronize()
        return self._sent

    def back(self, tokens: int) -> Floats:
        """Where the CPU's sums are to be written, float32 [tokens, d_model]."""
        sums: Floats = self._back[:tokens].numpy()
        return sums

    def add_back(self, total: Tensor) -> None:
        """total += what is there."""
        back = self._back[: len(total)]
        total.add_(back.to(self.to, non_blocking=True) if self._cuda else back)
