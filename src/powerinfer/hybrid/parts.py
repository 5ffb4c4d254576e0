"""The parts of an FFN that is split between two devices: hot neurons on the GPU, cold ones on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import FfnConfig
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.disk_neurons import n_slots, neuron_slots
from powerinfer.devices.stage import BESIDE, Stage
from powerinfer.formats.bundle_memory import SomeBundles, cuts, gather, own_pages, some_bytes
from powerinfer.formats.quant import Bytes, Float32
from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_types import tensor_bytes
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, Counts, Indices, NeuronVectors
from powerinfer.placement.disk import FIRSTS_AT_ONCE

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer import _native
    from powerinfer.devices.link import Link


class GpuNeurons:
    """Some neurons of a layer on the GPU. index: int32 ascending, at least one."""

    def __init__(
        self,
        layout: BundleLayout,
        groups: NDArray[np.uint8],
        index: Indices,
        to: Any,
        config: FfnConfig,
        vectors: NeuronVectors,
        threshold: float,
    ) -> None:
        """groups: uint8 [groups, layout.group_bytes], the layer's bundles; threshold: activations up to it are zero."""
        import torch

        self.index = index
        self.neurons = gpu.resident(layout, groups, index, to, config, vectors)
        self._threshold = threshold
        self._fired = torch.zeros(len(index), dtype=torch.int64, device=to)

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU, counters included."""
        return self.neurons.nbytes + tensor_bytes(self._fired)

    def add_sum(
        self, total: Tensor, x: Tensor, selected: Tensor | None, *, count: bool, fused: bool, dense: bool
    ) -> None:
        """total += the neurons' sum for x, both float32 [T, d_model].

        selected: uint8 [T, neurons of the part], 0 for a neuron that does not count for a token; None: all count.
        count: whether neurons that fire are counted; fused, dense: as for `gpu.neuron_sum`.
        """
        fired = self._fired if count else None
        gpu.neuron_sum(self.neurons, x, selected, self._threshold, total, fired, fused, dense)

    def take_counts(self) -> Counts:
        """int64 [neurons of the part], the tokens that each fired for since the last call."""
        counts: Counts = self._fired.to("cpu", copy=True).numpy()
        self._fired.zero_()
        return counts


class CpuNeurons:
    """Some neurons of a layer in the CPU's memory: copies of their bundles, in memory that later ones reuse.

    index: int32, the neurons, ascending. rests: its neurons are on disk. memory: which later ones reuse, uint8, None:
    there is none.
    """

    rests = False
    memory: Bytes | None = None

    def __init__(
        self, cpu: CpuExecutor, layer: int, layout: BundleLayout, vectors: NeuronVectors, threshold: float
    ) -> None:
        """threshold: activations up to it count as zero."""
        self.index: Indices = np.empty(0, np.int32)
        self._cpu = cpu
        self._layer = layer
        self._layout = layout
        self._vectors = vectors
        self._threshold = threshold
        self._bundles: SomeBundles | None = None
        self._neurons: _native.NeuronSum | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of RAM."""
        return 0 if self._bundles is None else self._bundles.rows.nbytes

    def place(self, groups: NDArray[np.uint8], index: Indices) -> None:
        """Replace the neurons. groups: as for `GpuNeurons`; index: int32 ascending, may be empty."""
        self._bundles = self._neurons = None
        self.index = index
        if not len(index):
            return
        layout, nbytes = self._layout, self._bytes_of(len(index), len(groups))
        if self.memory is None or len(self.memory) < nbytes:
            self.memory = own_pages(nbytes)
        self._bundles = gather(layout, groups, index, self.memory)
        bundles = self._layer, layout, self._bundles, self._vectors
        self._neurons = self._cpu.parts.bundled(*bundles, threshold=self._threshold, count_fired=True)

    def reuses(self, neurons: int, groups: int) -> bool:
        """Whether that number of neurons is placed in the memory that is there. groups: of the layer."""
        return self.memory is not None and len(self.memory) >= self._bytes_of(neurons, groups)

    def _bytes_of(self, neurons: int, groups: int) -> int:
        return neurons * self._layout.pitch + min(neurons, groups) * self._layout.shared_bytes

    def fill(self) -> None:
        """See `HybridFfn.fill`."""

    def sum(self, x: Float32, selected: NDArray[np.uint8] | None, out: Float32) -> bool:
        """out = the neurons' sum for x, both float32 [T, d_model]. selected: as of `GpuNeurons.add_sum`.

        False if none is selected: then out is zero, and nothing was computed. ModelError if neurons cannot be read:
        then out is void.
        """
        assert self._neurons is not None
        return self._neurons.sum(x, out, selected)

    def call(self, link: Link, tokens: int, columns: int) -> _native.NeuronCall:
        """The same for a GPU to call, of the neurons as they are placed now; columns: as of `Link.views`."""
        assert self._neurons is not None
        return link.neuron_call(self._neurons, tokens, columns)

    def pieces(self, stage: Stage) -> Iterator[SomeBundles]:
        """Bundles for a stage, which cuts them; each is valid until the next is asked for. ModelError if they cannot be
        read."""
        assert self._bundles is not None
        yield self._bundles

    def take_counts(self) -> Counts:
        """int64 [neurons of the part], the tokens that each fired for since the last call."""
        assert self._neurons is not None
        counts = np.empty(len(self.index), np.int64)
        self._neurons.take_fired(counts)
        return counts


class RestingNeurons(CpuNeurons):
    """Neurons that rest on disk: memory has some of them, and reads the others when they are needed. Those are the
    selected ones or, where nothing selects, those that fire: memory has the first rows of all.
    """

    rests = True

    def __init__(
        self,
        cpu: CpuExecutor,
        layer: int,
        layout: BundleLayout,
        vectors: NeuronVectors,
        threshold: float,
        groups: NDArray[np.uint8],
        frequency: NDArray[np.float64] | None,
        selects: bool,
    ) -> None:
        """groups: as for `GpuNeurons`, in a file of the executor's disk; frequency: as of `NeuronSplit`; selects: a
        predictor does, and all rows of neurons are read."""
        super().__init__(cpu, layer, layout, vectors, threshold)
        assert cpu.disk is not None
        self._disk = disk = cpu.disk
        self._groups = groups
        self._frequency = frequency
        n = cpu.config.ffn_sizes[layer]
        most = n_slots(disk, layer, n, cpu.parts.least_slots(n))
        slots = neuron_slots(disk, layout, groups, n, most, entire=selects)
        self._slots = slots.slots
        self._first_bytes = slots.left_out
        self._resting = cpu.parts.resting(layer, slots, vectors, threshold, count_fired=True)
        self._neurons = self._resting

    @property
    def nbytes(self) -> int:
        """Bytes of memory for bundles, and for first rows."""
        return self._slots.slots * self._slots.slot_bytes + len(self.index) * self._first_bytes

    def place(self, groups: NDArray[np.uint8], index: Indices) -> None:
        """Replace the neurons; at most first rows are read. groups: those of the layer. ModelError if that fails."""
        self._resting.keep(index)
        self.index = index
        if self._first_bytes:
            self._read_firsts()

    def fill(self) -> None:
        cold = hottest = None
        if self._frequency is not None:
            cold = np.zeros_like(self._frequency)
            cold[self.index] = self._frequency[self.index]
            hottest = self.index[np.argsort(-cold[self.index], kind="stable")][: self._slots.slots]
        self._disk.add_neurons(self._layer, self._slots, self._resting, cold, hottest)

    def sum(self, x: Float32, selected: NDArray[np.uint8] | None, out: Float32) -> bool:
        with self._disk.reading():
            return super().sum(x, selected, out)

    def _read_firsts(self) -> None:
        layout, step = self._layout, max(1, FIRSTS_AT_ONCE // self._layout.group_bytes)
        for group in range(0, len(self._groups), step):
            first, last = np.searchsorted(self.index, np.array([group, group + step]) * BUNDLE_GROUP)
            if first == last:
                continue
            rows = self._disk.read_rows(self._groups[group : group + step])
            bundles = rows[:, : BUNDLE_GROUP * layout.pitch].reshape(len(rows), BUNDLE_GROUP, layout.pitch)
            index = self.index[first:last] - group * BUNDLE_GROUP
            self._resting.add_firsts(bundles[index // BUNDLE_GROUP, index % BUNDLE_GROUP, : layout.gate_bytes])

    def pieces(self, stage: Stage) -> Iterator[SomeBundles]:
        """Bundles cut as the stage would, so that sums are the same."""
        limit = stage.limit(self._layout)
        counts = np.bincount(self.index // BUNDLE_GROUP, minlength=len(self._groups)).astype(np.int32)
        ends = np.cumsum(counts)
        for begin, end in cuts(self._layout, counts, limit, BESIDE):
            index = self.index[ends[begin] - counts[begin] : ends[end - 1]]
            if len(index):
                yield SomeBundles(index, counts[begin:end], self._gathered(begin, end, limit))

    def _gathered(self, begin: int, end: int, limit: int) -> NDArray[np.uint8]:
        """The bundles of some groups as `SomeBundles.rows`; limit: bytes that are read at a time, or one group."""
        layout, at = self._layout, 0
        step = max(1, limit // layout.group_bytes)
        edges = np.searchsorted(self.index, np.arange(begin, end + step, step).clip(max=end) * BUNDLE_GROUP)
        memory = self._disk.gathering(some_bytes(layout, self.index[edges[0] : edges[-1]]))
        for number, (first, last) in enumerate(pairwise(edges)):
            if first < last:
                group = begin + number * step
                rows = self._disk.read_rows(self._groups[group : min(group + step, end)])
                bundles = gather(layout, rows, self.index[first:last] - group * BUNDLE_GROUP, memory[at:])
                at += bundles.rows.nbytes
        return memory[:at].reshape(1, -1)
