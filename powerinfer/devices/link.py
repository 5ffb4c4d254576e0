"""The way between a GPU and the CPU, for layers that both of them work on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from powerinfer.kernels.cpu import NEURON_TOKENS

if TYPE_CHECKING:
    from torch import Tensor, device

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

NAMED_TOKENS = NEURON_TOKENS
"""Most tokens of a step that a predictor names neurons for: the CPU reads a neuron's rows once for so many, and
multiplies them with the tokens that name it. For more, nearly every neuron is named by some token."""


def link_bytes(max_tokens: int, d_model: int, d_ff: int) -> int:
    """Bytes of the buffers of a `Link` that lie in RAM."""
    return 2 * 4 * max_tokens * d_model + _named(max_tokens, d_ff)


def _named(max_tokens: int, d_ff: int) -> int:
    return min(max_tokens, NAMED_TOKENS) * d_ff


class Link:
    """The way between a GPU and the CPU: buffers, one set for all layers, whose addresses stay.

    On the GPU what neurons read and the names of the cold ones lie side by side, so that one copy brings them out; the
    CPU waits for that much of the GPU's work and no more. A buffer is written again only when the next layer's input
    has come, behind which the last one's sum was added.
    """

    def __init__(self, to: device, max_tokens: int, d_model: int, d_ff: int) -> None:
        import torch

        self._cuda = to.type == "cuda"
        self._d_model = d_model
        named = _named(max_tokens, d_ff)
        nbytes = 4 * max_tokens * d_model + named
        self._there = torch.zeros(nbytes, dtype=torch.uint8, device=to)
        self._here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        self._hot = torch.zeros(named, dtype=torch.uint8, device=to)
        self._back = torch.zeros((max_tokens, d_model), pin_memory=self._cuda)
        self._came = torch.cuda.Event() if self._cuda else None
        self._views: dict[tuple[int, int], tuple[Floats, Bytes | None, Floats]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers in RAM."""
        return int(self._here.nbytes + self._back.nbytes)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the buffers on the GPU."""
        return int(self._there.nbytes + self._hot.nbytes)

    # ---------------------------------------------------------------- on the GPU: the same for every step of a shape

    def read(self, tokens: int) -> Tensor:
        """Where what the neurons read is to be written, float32 [tokens, d_model]."""
        import torch

        return self._there[: 4 * tokens * self._d_model].view(torch.float32).view(tokens, self._d_model)

    def names(self, tokens: int, hot: int, cold: int) -> tuple[Tensor, Tensor]:
        """Where the names of so many neurons are to be written, uint8 [tokens, hot] and [tokens, cold]."""
        begin = 4 * tokens * self._d_model
        out = self._there[begin : begin + tokens * cold]
        return self._hot[: tokens * hot].view(tokens, hot), out.view(tokens, cold)

    def send(self, tokens: int, cold: int) -> None:
        """Let what was written go out: what is read, and names of so many cold neurons (0: none were written)."""
        nbytes = tokens * (4 * self._d_model + cold)
        self._here[:nbytes].copy_(self._there[:nbytes], non_blocking=True)

    def add_back(self, x: Tensor) -> None:
        """x float32 [tokens, d_model] += what the CPU has written."""
        back = self._back[: len(x)]
        x.add_(back.to(x.device, non_blocking=True) if self._cuda else back)

    # ---------------------------------------------------------------- on the CPU

    def mark(self) -> None:
        """What was sent by now is what `wait` waits for. The host can only wait for events that are not recorded."""
        if self._came is not None:
            self._came.record()

    def wait(self) -> None:
        """Until what was sent is here."""
        if self._came is not None:
            self._came.synchronize()

    def views(self, tokens: int, cold: int) -> tuple[Floats, Bytes | None, Floats]:
        """What came: what is to be read, float32 [tokens, d_model], and names uint8 [tokens, cold], None where cold is
        0; and where the sums go, float32 [tokens, d_model]."""
        key = tokens, cold
        if key not in self._views:
            here = self._here.numpy()
            end = 4 * tokens * self._d_model
            names = here[end : end + tokens * cold].reshape(tokens, cold) if cold else None
            x = here[:end].view(np.float32).reshape(tokens, self._d_model)
            self._views[key] = x, names, self._back[:tokens].numpy()
        return self._views[key]
