"""An executor whose first layers lie on a GPU and whose others lie on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.devices.gpu import GpuLayers


class SplitExecutor:
    """Embedding on the CPU, the layers of `gpu`, those of `cpu`, and the head on whichever has it.

    The result for a token is the same on every run. How its sums are rounded may hang on how many tokens its call has.
    """

    def __init__(self, cpu: CpuExecutor, gpu: GpuLayers) -> None:
        assert cpu.n_pages == gpu.n_pages and cpu.max_tokens == gpu.max_tokens and cpu.first_layer == gpu.layers
        self.cpu = cpu
        self.gpu = gpu
        self.page_size = cpu.page_size
        self.n_pages = cpu.n_pages
        self.max_tokens = cpu.max_tokens
        self.vocab_size = cpu.vocab_size
        layers = f"{gpu.layers} layer{'s' * (gpu.layers > 1)}{' and the head' * gpu.has_head}"
        self.choices = cpu.choices | {"gpu": f"{layers} on {gpu.device}"}

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one token reads on both devices."""
        return self.cpu.bytes_per_token + self.gpu.bytes_per_token

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        x = self.cpu.embedded(batch)
        result = self.gpu.run(batch, x)
        if self.gpu.has_head:
            return result
        x[:] = result
        return self.cpu.finish(batch)

    def close(self) -> None:
        self.gpu.close()
        self.cpu.close()
