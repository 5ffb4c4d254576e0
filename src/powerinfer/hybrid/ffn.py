"""FFNs whose terms are neurons, see terms.py: a predictor may select some of them, on the GPU.

If no cold neuron is selected the CPU computes nothing; if a layer has no cold neurons nothing is sent, and in steps
of so many tokens that together they need nearly all neurons none are looked up (`cost.dense_tokens`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import FfnConfig
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.cpu_ffn import Weights
from powerinfer.devices.stage import Stage
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.torch_device import current, gpu_failures
from powerinfer.devices.trace import span
from powerinfer.errors import PowerInferError
from powerinfer.formats.bundle_file import BundleFile
from powerinfer.hybrid.parts import CpuNeurons, GpuNeurons, RestingNeurons
from powerinfer.hybrid.terms import HybridTerms, Split
from powerinfer.kernels import gpu
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.kernels.gpu_types import tensor_bytes
from powerinfer.neurons import Counts, FfnVectors, Indices, NeuronPlacement, Predictor, Tier
from powerinfer.placement.cost import dense_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer import _native
    from powerinfer.devices.gpu import GpuLayers


@dataclass
class _GpuPredictor:
    """A layer's predictor on the GPU. order, int32, and the same on the GPU, numbers: the neurons of the rows of
    `outer`, the hot ones first."""

    config: Predictor
    inner: gpu.Weight
    outer: gpu.Weight
    order: Indices
    numbers: Tensor

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.outer.nbytes + tensor_bytes(self.numbers)

    def arrange(self, order: Indices) -> None:
        """Give `outer` its rows in this order of neurons."""
        import torch

        gpu.rearrange(self.outer, np.argsort(self.order)[order].astype(np.int32))
        self.numbers.copy_(torch.from_numpy(order))
        self.order = order


class HybridFfn(HybridTerms):
    """The FFN of one layer of `GpuLayers` over neurons. Counters are of steps of up to `NEURON_TOKENS` tokens."""

    terms = "neurons"
    most = 512
    _freed = ("_predictor", "_bundles")

    def __init__(
        self, split: NeuronSplit, cpu: CpuExecutor, layers: GpuLayers, layer: int, vectors: FfnVectors
    ) -> None:
        """PowerInferError if a device runs out of memory; ValueError for neurons that compete: which of them count
        depends on gates of both devices."""
        import torch

        super().__init__(layer, layers, split.stage)
        if cpu.config.competing:
            raise ValueError(f"neurons of the activation {cpu.config.competing} cannot be split over devices")
        self._config = cpu.config.layers[layer].neurons
        self._bundles = split.bundles
        self._threshold = split.threshold(layer)
        self._vectors = vectors.neuron_vectors
        self._fused = False
        self._gpu_part: GpuNeurons | None = None
        weights = None if split.predictors is None else split.predictors(layer)
        frequency = None if split.frequency is None else split.frequency(layer)
        place = cpu, layer, split.bundles.layouts[layer], self._vectors, self._threshold
        if cpu.disk is not None and layer in cpu.disk.about.neurons:
            groups = split.bundles.layers[layer]
            self._cpu_part: CpuNeurons = RestingNeurons(*place, groups, frequency, weights is not None)
        else:
            self._cpu_part = CpuNeurons(*place)
        self._predicts, self._dense_from = True, NEURON_TOKENS + 1
        self._frequency = frequency
        self._predictor: _GpuPredictor | None = None
        if weights is not None:
            with self._failures():
                inner, outer = (gpu.upload(part, layers.device) for part in weights[1:])
                order = np.arange(outer.rows, dtype=np.int32)
                numbers = torch.empty(len(order), dtype=torch.int32, device=layers.device)
                self._predictor = _GpuPredictor(weights[0], inner, outer, order, numbers)
        self._reset()
        self.place(split.placement.split_by_tier(layer)[Tier.GPU])

    def place(self, hot: Indices) -> None:
        """Put these neurons on the GPU, and only there; all others on the CPU.

        New neurons are read from the bundles file, in the order of their index, into the memory of those they replace.
        If this fails, it must be repeated before a step runs. ModelError if what is needed of those on disk cannot be
        read.
        """
        layout, to = self._bundles.layouts[self.layer], self._layers.device
        self._bundles.file.check()
        groups = self._bundles.layers[self.layer]
        self.hot = hot
        self.cold = np.setdiff1d(np.arange(self._config.size, dtype=np.int32), hot)
        self._gpu_part = None  # free its memory before allocating
        self._take_calls()
        self._calls.clear()
        self._layers.changed(self.layer)  # recordings have the calls' addresses
        with self._failures(), current(to):
            if len(hot):
                config = self._config, self._vectors, self._threshold
                self._gpu_part = GpuNeurons(layout, groups, hot, to, *config)
            if self._predictor is not None:
                self._predictor.arrange(np.concatenate([hot, self.cold]))
        self._dense_from = NEURON_TOKENS + 1
        if self._gpu_part is not None and not len(self.cold):
            self._dense_from = dense_tokens(self._frequency, layout.gated, self._predictor is not None)
        stage, memory = self.stage, self._cpu_part.memory
        if stage is not None and memory is not None:
            with self._failures():
                same = self._cpu_part.reuses(len(self.cold), len(groups))
                stage.finish() if same else stage.registered.release(memory)
        self._cpu_part.place(groups, self.cold)
        if stage is not None and self._cpu_part.memory is not None:
            stage.registered.note(self._cpu_part.memory)
        self._layers.changed(self.layer)
        self._bundles.file.release(groups)

    def swap(self, leave: Indices, come: Indices) -> None:
        """Exchange neurons. After a failure, which is raised, nothing has changed or, where even that does not fit
        any more, all neurons of the layer are on the CPU."""
        before = self.hot
        try:
            self.place(np.union1d(np.setdiff1d(before, leave), come).astype(np.int32))
        except BaseException as error:
            error.with_traceback(None)  # its frames may hold what must make room
            try:
                self.place(before)
            except PowerInferError:
                self.place(before[:0])
            raise

    def fill(self) -> None:
        """Read the cold neurons on disk that fire most often into RAM, once all are where they stay. ModelError if they
        cannot be read."""
        if len(self.cold):
            self._cpu_part.fill()

    def _failures(self) -> AbstractContextManager[None]:
        return gpu_failures(f"loading the neurons of layer {self.layer}", "give less --vram")

    @property
    def neurons(self) -> gpu.Neurons | None:
        """The hot neurons; None if there are none."""
        return None if self._gpu_part is None else self._gpu_part.neurons

    @property
    def cold_bytes(self) -> int:
        return self._cpu_part.nbytes

    def memory(self) -> dict[str, int]:
        """Bytes on the GPU by part: ffn (the hot neurons, with their counters) and predictor."""
        parts = {"ffn": 0 if self._gpu_part is None else self._gpu_part.nbytes}
        return parts if self._predictor is None else parts | {"predictor": self._predictor.nbytes}

    # ---------------------------------------------------------------- a step

    @property
    def _asks_cpu(self) -> bool:
        return len(self.cold) > 0

    @property
    def _callable(self) -> bool:
        """Not where neurons rest on disk: a call that fails passes on the text, and not the kind of the failure."""
        return not self._cpu_part.rests

    def _selection(self) -> list[Operator]:
        return [] if self._predictor is None else [self._operator("predictor", self._select)]

    def _gpu_sums(self) -> list[Operator]:
        return [self._operator("hot neurons", self._add_hot)] if len(self.hot) else []

    def _selects(self, tokens: int) -> bool:
        """Whether the predictor runs in a step of that number of tokens."""
        return self._predictor is not None and self._predicts and tokens <= NEURON_TOKENS

    def _select(self, step: Step) -> None:
        tokens, predictor = len(step.x), self._predictor
        if predictor is None or not self._selects(tokens):
            return
        config = predictor.config
        places = self._link.selected(tokens, len(self.hot), len(self.cold))
        weights = predictor.inner, predictor.outer, predictor.numbers
        gpu.predict(*weights, step.x, config.threshold, config.floor, places, self._answer(step))

    def _chooses(self, tokens: int) -> bool:
        return self._selects(tokens)

    def _sent_bytes(self, tokens: int) -> int:
        return len(self.cold) if self._selects(tokens) else 0

    def _make_calls(self, tokens: int, sent: int) -> tuple[_native.NeuronCall]:
        return (self._cpu_part.call(self._link, tokens, sent),)

    def _add_hot(self, step: Step) -> None:
        assert self._gpu_part is not None and step.read is not None
        tokens = len(step.x)
        selected = self._link.selected(tokens, len(self.hot), 0)[0] if self._selects(tokens) else None
        few = tokens <= NEURON_TOKENS
        ways = {"fused": self._fused, "dense": tokens >= self._dense_from}
        self._gpu_part.add_sum(step.target, step.read, selected, count=few, **ways)
        step.normed = None

    def _compute_cold(self, step: Step) -> None:
        tokens, begin = len(step.x), time.perf_counter()
        self._wait()
        waited = time.perf_counter()
        x, selected, out = self._link.views(tokens, self._sent_bytes(tokens))
        if self._layers.rehearses and self._cpu_part.rests:
            out[:] = 0  # the input is no text: the predictor selects every neuron, and all of them would be read
            return
        with span(self._layers.trace, "cpu", "cold neurons", self.layer):
            job = self._cpu_part.sum(x, selected, out)
        self._sums["jobs"] += job and tokens <= NEURON_TOKENS
        self._seconds += waited - begin, time.perf_counter() - waited

    def _stream_cold(self, step: Step) -> None:
        assert self.stage is not None and step.read is not None
        config = self._config, self._vectors, self._threshold
        for bundles in self._cpu_part.pieces(self.stage):
            self.stage.add_sum(step.target, step.read, self._bundles.layouts[self.layer], bundles, *config)
            if self._layers.rehearses and self._cpu_part.rests:
                return  # one piece takes as much memory as all, which would be read from disk

    def fuse(self, on: bool) -> None:
        """Choose whether the GPU sums its neurons for one token by a fused kernel."""
        self._fused = on
        self._layers.changed(self.layer)

    def suspend(self, on: bool) -> None:
        """Choose whether the predictor is left out."""
        self._predicts = not on
        self._layers.changed(self.layer)

    # ---------------------------------------------------------------- counters

    def clear(self) -> None:
        self.collect()
        self._reset()

    def _reset(self) -> None:
        self._sums: Counter[str] = Counter(jobs=0)
        self._since = self._layers.few_tokens, self._layers.few_steps
        self._seconds = np.zeros(2)
        self.recent, self.recent_tokens = np.zeros(self._config.size), 0.0
        self._fired, self._fired_tokens = np.zeros(self._config.size, np.int64), 0

    def collect(self) -> Counter[str]:
        self._layers.drop_next()  # a step launched ahead waits for this thread, and counters would for it
        self._take_calls()
        tokens, steps = self._layers.few_tokens - self._since[0], self._layers.few_steps - self._since[1]
        self._since = self._layers.few_tokens, self._layers.few_steps
        self.recent_tokens += tokens
        self._fired_tokens += tokens
        self._sums.update(tokens=tokens, steps=steps, neurons=tokens * self._config.size)
        for name, index, part in (("hot", self.hot, self._gpu_part), ("cold", self.cold, self._cpu_part)):
            if part is not None and len(index):
                counts = part.take_counts()
                self.recent[index] += counts
                self._fired[index] += counts
                self._sums.update({name: int(counts.sum()), "active": int(counts.sum())})
        return self._sums

    def take_fired(self) -> tuple[int, Counts]:
        """(tokens, int64 [neurons] the number for which each fired) since the last call; not while a step runs."""
        self.collect()
        counts = self._fired_tokens, self._fired
        self._fired, self._fired_tokens = np.zeros(self._config.size, np.int64), 0
        return counts

    def take_seconds(self) -> tuple[float, float]:
        """Seconds that the CPU waited for the GPU, and summed cold neurons beside it, since the last call."""
        self._take_calls()
        wait, work = self._seconds
        self._seconds = np.zeros(2)
        return float(wait), float(work)

    def _take_calls(self) -> None:
        for tokens, _, jobs, waited, worked in self._taken_calls():
            self._sums["jobs"] += jobs if tokens <= NEURON_TOKENS else 0
            self._seconds += waited, worked


@dataclass
class NeuronSplit(Split[HybridFfn]):
    """The split of the neurons of the GPU's layers.

    placement: hot neurons are those of `Tier.GPU`; all others, on disk too, are cold. By layer, threshold: activations
    up to this magnitude count as zero; predictors, None: none select; frequency: float64 [neurons], the share of the
    tokens for which each fires, by which RAM has some of those on disk at first, None: it is not known.
    """

    bundles: BundleFile
    placement: NeuronPlacement
    threshold: Callable[[int], float] = lambda layer: 0.0
    predictors: Callable[[int], Weights] | None = None
    stage: Stage | None = None
    frequency: Callable[[int], NDArray[np.float64]] | None = None
    ffns: list[HybridFfn] = field(default_factory=list)
    kind: type = FfnConfig

    def __call__(self, cpu: CpuExecutor, layers: GpuLayers, layer: int, vectors: FfnVectors) -> HybridFfn:
        """PowerInferError if a device runs out of memory."""
        self.ffns.append(HybridFfn(self, cpu, layers, layer, vectors))
        return self.ffns[-1]
