"""Transfers between a GPU and the CPU, for layers that both of them compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from powerinfer.formats.quant import Bytes, Float32
from powerinfer.kernels.cpu import NEURON_TOKENS

if TYPE_CHECKING:
    from torch import Tensor, device


def link_bytes(max_tokens: int, d_model: int, neurons: int) -> int:
    """Bytes of the buffers of a `Link` in RAM. neurons: of the largest FFN."""
    return 2 * 4 * max_tokens * d_model + _selection_bytes(max_tokens, neurons)


def _selection_bytes(max_tokens: int, neurons: int) -> int:
    """Single neurons are selected in steps of up to NEURON_TOKENS tokens: more tokens together select nearly all."""
    return min(max_tokens, NEURON_TOKENS) * neurons


class Link:
    """Buffers between a GPU and the CPU, one set for all layers, at fixed addresses.

    On the GPU the input of the neurons and the selection of cold ones are adjacent, so that one copy sends both; the
    CPU waits only for that part of the GPU's work. A buffer is reused only when the next layer's input has arrived,
    which is after the previous layer's sum was added.
    """

    def __init__(self, to: device, max_tokens: int, d_model: int, neurons: int) -> None:
        """neurons: of the largest FFN."""
        import torch

        self._cuda = to.type == "cuda"
        self._d_model = d_model
        selection = _selection_bytes(max_tokens, neurons)
        nbytes = 4 * max_tokens * d_model + selection
        self._there = torch.zeros(nbytes, dtype=torch.uint8, device=to)
        self._here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        self._hot = torch.zeros(selection, dtype=torch.uint8, device=to)
        self._back = torch.zeros((max_tokens, d_model), pin_memory=self._cuda)
        self._came = torch.cuda.Event() if self._cuda else None
        self._views: dict[tuple[int, int], tuple[Float32, Bytes | None, Float32]] = {}

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
        """Buffer for the input of the neurons, float32 [tokens, d_model]."""
        import torch

        return self._there[: 4 * tokens * self._d_model].view(torch.float32).view(tokens, self._d_model)

    def selected(self, tokens: int, hot: int, cold: int) -> tuple[Tensor, Tensor]:
        """Buffers for the selection of neurons, uint8 [tokens, hot] and [tokens, cold]."""
        begin = 4 * tokens * self._d_model
        out = self._there[begin : begin + tokens * cold]
        return self._hot[: tokens * hot].view(tokens, hot), out.view(tokens, cold)

    def send(self, tokens: int, cold: int) -> None:
        """Send the input, and the selection of `cold` cold neurons (0: none), to the CPU."""
        nbytes = tokens * (4 * self._d_model + cold)
        self._here[:nbytes].copy_(self._there[:nbytes], non_blocking=True)

    def add_back(self, x: Tensor) -> None:
        """x float32 [tokens, d_model] += the CPU's sums."""
        back = self._back[: len(x)]
        x.add_(back.to(x.device, non_blocking=True) if self._cuda else back)

    # ---------------------------------------------------------------- on the CPU

    def mark(self) -> None:
        """`wait` waits for everything sent so far. The host can only wait for events outside of recordings."""
        if self._came is not None:
            self._came.record()

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        if self._came is not None:
            self._came.synchronize()

    def views(self, tokens: int, cold: int) -> tuple[Float32, Bytes | None, Float32]:
        """The received input, float32 [tokens, d_model], and selection, uint8 [tokens, cold], None if cold is 0; and
        the buffer for the sums, float32 [tokens, d_model]."""
        key = tokens, cold
        if key not in self._views:
            here = self._here.numpy()
            end = 4 * tokens * self._d_model
            selected = here[end : end + tokens * cold].reshape(tokens, cold) if cold else None
            x = here[:end].view(np.float32).reshape(tokens, self._d_model)
            self._views[key] = x, selected, self._back[:tokens].numpy()
        return self._views[key]
