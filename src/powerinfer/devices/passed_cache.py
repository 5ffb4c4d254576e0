"""Keys and values of layers in RAM, which pass through a GPU while it computes these layers.

The CPU keeps the cache, in its own byte order, for it decodes with it. Before attention on the GPU the pages with
earlier tokens of the step's sequences are brought there, through the stage; those that the step wrote to come back:

    GPU   pages in | attention of layer 7 | pages out | pages in | attention of layer 8 | pages out
    CPU                                                 | writes those of layer 7 ..

The CPU waits for what came back only where it needs the buffer again, or the step is over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import AttentionConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.gpu import GpuLayers
from powerinfer.devices.stage import BUFFERS, Stage, return_buffer
from powerinfer.devices.streams import streams_of
from powerinfer.kernels import cpu as native
from powerinfer.kernels import gpu_pages

if TYPE_CHECKING:
    from torch import Tensor

    Pages = tuple[NDArray[np.int64], Tensor]
    """Page numbers, here and on the device."""

    Returned = tuple[NDArray[np.uint8], NDArray[np.int64], int]
    """The cache of a layer, its pages that are to be written, and their bytes in a buffer."""


def earlier_tokens(batch: Batch) -> NDArray[np.int64]:
    """Tokens of each sequence of a step, a row of its page table, before those of the step; 0 where it has none."""
    first = np.full(len(batch.page_table), np.iinfo(np.int64).max)
    np.minimum.at(first, batch.rows, batch.positions)
    first[first == np.iinfo(np.int64).max] = 0
    return first


class PassedCache:
    """Moves pages of the layers of `cpu`; one step at a time. token_bytes: of a token in a layer, at most."""

    def __init__(self, cpu: CpuExecutor, gpu: GpuLayers, stage: Stage) -> None:
        import torch

        config = cpu.config
        attending = [
            number
            for number in range(gpu.layers, config.n_layers)
            if isinstance(attention := config.layers[number].attention, AttentionConfig) and attention.kv_from is None
        ]
        page = max((math.prod(cpu.cached(layer).shape[1:]) for layer in attending), default=0)
        self.token_bytes = page // native.PAGE
        nbytes = return_buffer(page, cpu.max_tokens, stage.nbytes // BUFFERS)
        self._cpu = cpu
        self._gpu = gpu
        self._stage = stage
        streams = streams_of(gpu.device)
        self._host = [streams.pinned(nbytes, torch.uint8) for _ in range(BUFFERS)]
        self._came = [streams.event() for _ in range(BUFFERS)]
        self._waiting: list[Returned | None] = [None] * BUFFERS
        self._turn = 0
        self._batch: Batch | None = None
        self._pages: dict[int | None, Pages] = {}

    def begin(self, batch: Batch) -> None:
        """A step begins; what the last one did not finish is void."""
        self._batch = batch
        self._pages.clear()
        self._waiting = [None] * BUFFERS

    def bring(self, layer: int, window: int | None) -> None:
        """Copy what the step's tokens can see of earlier ones to the GPU: the last `window` tokens, None: all."""
        pages, places = self._page_numbers(window or 0)
        keys, values = self._gpu.cache(layer)
        cached = self._cpu.cached(layer)
        _, *shape = cached.shape
        step = self._stage.items_held(shape[0] * shape[1])
        for begin in range(0, len(pages), step):
            chunk = pages[begin : begin + step]
            with self._stage.sent([cached[chunk].reshape(-1)]) as (raw,):
                assert raw is not None
                gpu_pages.put(keys, values, places[begin : begin + step], raw.view(len(chunk), *shape))

    def give_back(self, layer: int) -> None:
        """Copy the pages with the step's tokens to the CPU."""
        pages, places = self._page_numbers(None)
        keys, values = self._gpu.cache(layer)
        cached = self._cpu.cached(layer)
        heads, nbytes = cached.shape[1:]
        step = len(self._host[0]) // (heads * nbytes)
        for begin in range(0, len(pages), step):
            slot, self._turn = self._turn, (self._turn + 1) % BUFFERS
            self._write(slot)
            raw = gpu_pages.taken(keys, values, places[begin : begin + step], nbytes).view(-1)
            self._host[slot][: len(raw)].copy_(raw, non_blocking=True)
            self._came[slot].record()
            self._waiting[slot] = cached, pages[begin : begin + step], len(raw)

    def end(self) -> None:
        """The step is over: the CPU has all pages."""
        for slot in range(BUFFERS):
            self._write(slot)
        self._batch = None

    def _write(self, slot: int) -> None:
        waiting = self._waiting[slot]
        if waiting is None:
            return
        cached, pages, nbytes = waiting
        self._came[slot].synchronize()
        cached[pages] = self._host[slot].numpy()[:nbytes].reshape(-1, *cached.shape[1:])
        self._waiting[slot] = None

    def _page_numbers(self, window: int | None) -> Pages:
        """Pages of the step's earlier tokens that a window reaches back to, 0: all; None: those that it writes to."""
        import torch

        if window not in self._pages:
            assert self._batch is not None
            batch, table = self._batch, self._batch.page_table
            if window is None:
                numbers = table[batch.rows, batch.positions // native.PAGE]
            else:
                first = earlier_tokens(batch)
                place = native.PAGE * np.arange(table.shape[1], dtype=np.int32)
                reached = place < first[:, None]
                if window:
                    reached &= place + native.PAGE > first[:, None] - window + 1
                numbers = table[reached]
            unique = np.unique(numbers).astype(np.int64)
            self._pages[window] = unique, torch.from_numpy(unique).to(self._gpu.device)
        return self._pages[window]

    def close(self) -> None:
        """Free the buffers; no step follows."""
        self._host, self._waiting = [], []
