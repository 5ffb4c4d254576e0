"""Hot neurons on the GPU, cold ones on the CPU, at the same time: FFNs that are split between the two.

For each layer of a step:

    GPU   attention ... n | x and selection out | sum of the hot neurons            | + sum of the cold ones ...
    CPU                     wait                | sum of the cold neurons | back

The selector runs once, on the GPU. One transfer starts the CPU (n, and with a predictor which of its neurons are
selected); the CPU returns one vector per token, which is added to the GPU's own. If no cold neuron is selected the CPU
computes nothing; if a layer has no cold neurons nothing is sent.

For a long prompt the GPU computes the cold neurons too, and the CPU none: see devices/stage.py.

An FFN is a sum over its neurons, so where they are placed changes only how the sum is rounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
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
from powerinfer.formats.bundle_file import BundleFile
from powerinfer.hybrid.parts import CpuPart, GpuPart, RestingPart
from powerinfer.kernels import gpu
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.kernels.gpu_types import tensor_bytes
from powerinfer.neurons import Counts, FfnVectors, Indices, NeuronPlacement, NeuronVectors, Predictor, Tier

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer import _native
    from powerinfer.devices.gpu import GpuLayers


@dataclass
class _GpuPredictor:
    """A layer's predictor on the GPU. order, int32, and the same on the GPU, numbers: the neurons of the rows of
    `outer`, the hot ones first."""

    about: Predictor
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


class HybridFfn:
    """The FFN of one layer of `GpuLayers`: hot neurons on the GPU, cold ones on the CPU.

    hot, cold: int32, the neurons on the GPU and on the CPU, ascending. on_input: called in steps in which neurons are
    cold, and which are launched, with the residual stream and the input of gate and up, both float32 [T, d_model] on
    the GPU.
    """

    def __init__(
        self,
        layer: int,
        cpu: CpuExecutor,
        layers: GpuLayers,
        bundles: BundleFile,
        hot: Indices,
        *,
        vectors: NeuronVectors = (),
        threshold: float = 0.0,
        weights: Weights | None = None,
        stage: Stage | None = None,
        frequency: NDArray[np.float64] | None = None,
    ) -> None:
        """threshold: activations up to this magnitude count as zero; weights: of a predictor; stage: streams cold
        neurons to the GPU for long prompts. frequency: [neurons], the share of the tokens that each fires for, by which
        RAM has some of those on disk at first, where cold ones rest there; None: not known.

        PowerInferError if a device runs out of memory; ValueError for neurons that compete in banks: which of them
        count depends on gates of both devices.
        """
        import torch

        assert layers.link is not None
        if cpu.config.in_banks:
            raise ValueError("neurons of the activation topk cannot be split over devices")
        self.layer = layer
        self.stage = stage
        self._fused = False
        self.on_input: Callable[[Tensor, Tensor], None] | None = None
        self._config = cpu.config.layers[layer].neurons
        self._layers = layers
        self._link = layers.link
        self._bundles = bundles
        self._vectors = vectors
        self._threshold = threshold
        self._gpu_part: GpuPart | None = None
        own = cpu, layer, bundles.layouts[layer], vectors, threshold
        self._cpu_part: CpuPart | RestingPart
        if cpu.disk is not None and layer in cpu.disk.about.neurons:
            self._cpu_part = RestingPart(*own, cpu.disk, bundles.layers[layer], frequency, weights is not None)
        else:
            self._cpu_part = CpuPart(*own)
        self._calls: dict[tuple[int, int], _native.NeuronCall] = {}  # by tokens and columns that are sent
        self._predicts = True
        self._predictor: _GpuPredictor | None = None
        if weights is not None:
            with self._failures():
                inner, outer = (gpu.upload(part, layers.device) for part in weights[1:])
                order = np.arange(outer.rows, dtype=np.int32)
                numbers = torch.empty(len(order), dtype=torch.int32, device=layers.device)
                self._predictor = _GpuPredictor(weights[0], inner, outer, order, numbers)
        self.place(hot)
        self.clear()

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
        if self._calls:
            self._take_calls()
            self._layers.changed(self.layer)  # recordings have the calls' addresses
            self._calls.clear()
        with self._failures(), current(to):
            if len(hot):
                own = self._config, self._vectors, self._threshold
                self._gpu_part = GpuPart(layout, groups, hot, to, *own)
            if self._predictor is not None:
                self._predictor.arrange(np.concatenate([hot, self.cold]))
        self._cpu_part.place(groups, self.cold)
        self._layers.changed(self.layer)
        self._bundles.file.release(groups)

    def limit(self, slots: int) -> None:
        """Where neurons rest on disk RAM holds at most so many, and no more than it had room for at first. Between
        steps. ModelError if the disk does not answer."""
        if isinstance(self._cpu_part, RestingPart):
            self._cpu_part.limit(slots)

    def fill(self) -> None:
        """Cold neurons that rest on disk are where they stay: memory reads those that fire most often. ModelError if
        they cannot be read."""
        if isinstance(self._cpu_part, RestingPart) and len(self.cold):
            self._cpu_part.fill()

    def close(self) -> None:
        """Free both parts, the predictor, and the buffers that this FFN shares with others."""
        if self.stage is not None:
            self.stage.close()
        for name in ("_gpu_part", "_cpu_part", "_calls", "_predictor", "_link", "_layers", "_bundles"):
            self.__dict__.pop(name, None)

    def _failures(self) -> AbstractContextManager[None]:
        return gpu_failures(f"loading the neurons of layer {self.layer}", "give less --vram")

    @property
    def neurons(self) -> gpu.Neurons | None:
        """The hot neurons; None if there are none."""
        return None if self._gpu_part is None else self._gpu_part.neurons

    @property
    def cold_bytes(self) -> int:
        """Bytes of the cold neurons' bundles in RAM."""
        return self._cpu_part.nbytes

    def memory(self) -> dict[str, int]:
        """Bytes on the GPU by part: ffn (the hot neurons, with their counters) and predictor."""
        parts = {"ffn": 0 if self._gpu_part is None else self._gpu_part.nbytes}
        return parts if self._predictor is None else parts | {"predictor": self._predictor.nbytes}

    # ---------------------------------------------------------------- a step

    def before(self) -> list[Operator]:
        """Nothing, see `FfnParts`."""
        return []

    def begin(self) -> list[Operator]:
        """Send the CPU its input and its selection, see `FfnParts`.

        The GPU's work is static: the launches are the same for every step of a shape. If there are cold neurons, in a
        step of few tokens the GPU calls the CPU, which sums them while the GPU sums the hot ones. In others, where the
        GPU cannot, and where neurons rest on disk, the host acts twice: it records an event after the copy, and sums
        the cold neurons. In a long step it streams them to the GPU instead.
        """
        operators = []
        if self._predictor is not None:
            operators.append(self._operator("predictor", self._select))
        if len(self.cold):
            operators.append(self._operator("copy out", self._send))
            operators.append(self._operator("mark", self._mark, by_host=True, called=self._begin_cold))
        return operators

    def finish(self) -> list[Operator]:
        """Add the sums of both parts, see `FfnParts`."""
        operators = []
        if len(self.hot):
            operators.append(self._operator("hot neurons", self._add_hot))
        if len(self.cold):
            operators.append(self._operator("cold neurons", self._sum_cold, by_host=True, called=self._join_cold))
            operators.append(self._operator("add", self._add_cold))
        return operators

    def _operator(
        self,
        kind: str,
        run: Callable[[Step], None],
        *,
        by_host: bool = False,
        called: Callable[[Step], None] | None = None,
    ) -> Operator:
        # The GPU does not call what reads: of a failure its calls pass on the text, and not of which kind it is.
        return Operator(kind, self.layer, run, not by_host, None if self._cpu_part.rests else called)

    def _selects(self, tokens: int) -> bool:
        """Whether the predictor runs in a step of that number of tokens."""
        return self._predictor is not None and self._predicts and tokens <= NEURON_TOKENS

    def _streams(self, step: Step) -> bool:
        """Whether the GPU computes the cold neurons too."""
        return self.stage is not None and self.stage.takes(len(step.x))

    def _select(self, step: Step) -> None:
        tokens, predictor = len(step.x), self._predictor
        if predictor is None or not self._selects(tokens):
            return
        about = predictor.about
        places = self._link.selected(tokens, len(self.hot), len(self.cold))
        weights = predictor.inner, predictor.outer, predictor.numbers
        gpu.predict(*weights, step.x, about.threshold, about.floor, places)

    def _send(self, step: Step) -> None:
        if not self._streams(step):
            self._link.send(len(step.x), self._sent_columns(len(step.x)))

    def _sent_columns(self, tokens: int) -> int:
        """Number of cold neurons whose selection is sent, per token."""
        return len(self.cold) if self._selects(tokens) else 0

    def _mark(self, step: Step) -> None:
        if self.on_input is not None:
            assert step.read is not None
            self.on_input(step.x, step.read)
        if not self._streams(step):
            self._link.mark()

    def _begin_cold(self, step: Step) -> None:
        tokens, columns = len(step.x), self._sent_columns(len(step.x))
        if (tokens, columns) not in self._calls:
            assert isinstance(self._cpu_part, CpuPart)
            self._calls[tokens, columns] = self._cpu_part.call(self._link, tokens, columns)
        self._link.begin(self._calls[tokens, columns])

    def _join_cold(self, _: Step) -> None:
        self._link.join()

    def _add_hot(self, step: Step) -> None:
        assert self._gpu_part is not None and step.read is not None
        tokens = len(step.x)
        selected = self._link.selected(tokens, len(self.hot), 0)[0] if self._selects(tokens) else None
        few = tokens <= NEURON_TOKENS
        self._gpu_part.add_sum(step.target, step.read, selected, count=few, fused=self._fused)
        step.normed = None

    def _sum_cold(self, step: Step) -> None:
        """Write the CPU's sum to the link's buffer; zeros if no cold neuron is selected."""
        tokens = len(step.x)
        if self._streams(step):
            with span(self._layers.trace, "gpu", "streamed neurons", self.layer):
                self._stream_cold(step)
            return
        begin = time.perf_counter()
        with span(self._layers.trace, "cpu", "wait", self.layer, "wait"):
            self._link.wait()
        waited = time.perf_counter()
        x, selected, out = self._link.views(tokens, self._sent_columns(tokens))
        if self._layers.rehearses and self._cpu_part.rests:
            out[:] = 0  # the input is no text: the predictor selects every neuron, and all of them would be read
            return
        with span(self._layers.trace, "cpu", "cold neurons", self.layer):
            job = self._cpu_part.sum(x, selected, out)
        self._jobs += job and tokens <= NEURON_TOKENS
        self._seconds += waited - begin, time.perf_counter() - waited

    def _stream_cold(self, step: Step) -> None:
        assert self.stage is not None and step.read is not None
        own = self._config, self._vectors, self._threshold
        for some in self._cpu_part.pieces(self.stage):
            self.stage.add_sum(step.target, step.read, self._bundles.layouts[self.layer], some, *own)
            if self._layers.rehearses and self._cpu_part.rests:
                return  # one piece takes as much memory as all, which would be read from disk

    def _add_cold(self, step: Step) -> None:
        if not self._streams(step):
            self._link.add_back(step.target)
        step.normed = None

    # ---------------------------------------------------------------- counters

    def clear(self) -> None:
        """Reset the counters."""
        self._sums: Counter[str] = Counter()
        self._take_calls()
        self._jobs = 0
        self._since = self._layers.few_tokens, self._layers.few_steps
        self.recent = np.zeros(self._config.size)
        self.recent_tokens = 0.0
        self._seconds = np.zeros(2)
        self._fired, self._fired_tokens = np.zeros(self._config.size, np.int64), 0
        self._take_counts()
        self.recent[:] = 0
        self._fired[:] = 0

    def fuse(self, on: bool) -> None:
        """Whether the GPU sums its neurons for one token by a fused kernel from now on."""
        self._fused = on
        self._layers.changed(self.layer)

    def predict(self, on: bool) -> None:
        """Whether to use the predictor from now on."""
        self._predicts = on
        self._layers.changed(self.layer)

    def forget_half(self) -> None:
        """Of the recent counts."""
        self.recent /= 2
        self.recent_tokens /= 2

    def collect(self) -> Mapping[str, int]:
        """Counts, over the tokens of steps of up to `NEURON_TOKENS`: tokens, steps, jobs (steps in which the
        CPU had one), and summed over the tokens the neurons that fired on the GPU (hot) and on the CPU (cold).

        `recent`, float64 [neurons], has then for each neuron the tokens that it fired for.
        """
        self._take_calls()
        tokens, steps = self._layers.few_tokens - self._since[0], self._layers.few_steps - self._since[1]
        self._since = self._layers.few_tokens, self._layers.few_steps
        self.recent_tokens += tokens
        self._fired_tokens += tokens
        self._sums.update(tokens=tokens, steps=steps, jobs=self._jobs)
        self._jobs = 0
        self._sums.update(self._take_counts())
        return self._sums

    def take_fired(self) -> tuple[int, Counts]:
        """(tokens, int64 [neurons] those that each fired for) since the last call; not while a step runs."""
        self.collect()
        taken = self._fired_tokens, self._fired
        self._fired, self._fired_tokens = np.zeros(self._config.size, np.int64), 0
        return taken

    def take_seconds(self) -> tuple[float, float]:
        """Seconds that the CPU waited for the GPU, and summed cold neurons beside it, since the last call."""
        self._take_calls()
        wait, work = self._seconds
        self._seconds = np.zeros(2)
        return float(wait), float(work)

    def _take_calls(self) -> None:
        """Add what the GPU's calls of the CPU did since the last time."""
        for (tokens, _), call in self._calls.items():
            _, jobs, waited, worked = call.take()
            self._jobs += jobs if tokens <= NEURON_TOKENS else 0
            self._seconds += waited, worked

    def _take_counts(self) -> dict[str, int]:
        """Add the counts since the last call to `recent`. Returns the sums of the existing parts."""
        sums = {}
        for name, index, part in (("hot", self.hot, self._gpu_part), ("cold", self.cold, self._cpu_part)):
            if part is not None and len(index):
                counts = part.take_counts()
                self.recent[index] += counts
                self._fired[index] += counts
                sums[name] = int(counts.sum())
        return sums


@dataclass
class NeuronSplit:
    """How the neurons of the GPU's layers are split: makes the FFN of each layer when it is wired (`load_split`).

    placement: hot neurons are those of `Tier.GPU`; all others, on disk too, are cold. threshold: of a layer, up to
    which magnitude activations count as zero; predictors, stage, frequency: as for `HybridFfn`. ffns: those made so
    far.
    """

    bundles: BundleFile
    placement: NeuronPlacement
    threshold: Callable[[int], float] = lambda layer: 0.0
    predictors: Callable[[int], Weights] | None = None
    stage: Stage | None = None
    frequency: Callable[[int], NDArray[np.float64]] | None = None
    ffns: list[HybridFfn] = field(default_factory=list)
    kind: type = FfnConfig

    def __call__(self, cpu: CpuExecutor, layers: GpuLayers, layer: int, given: FfnVectors) -> HybridFfn:
        """PowerInferError if a device runs out of memory."""
        ffn = HybridFfn(
            layer,
            cpu,
            layers,
            self.bundles,
            self.placement.by_tier(layer)[Tier.GPU],
            vectors=given.of_neurons,
            threshold=self.threshold(layer),
            weights=None if self.predictors is None else self.predictors(layer),
            stage=self.stage,
            frequency=None if self.frequency is None else self.frequency(layer),
        )
        self.ffns.append(ffn)
        return ffn

    def close(self) -> None:
        """Free the FFNs made so far, and the stage. May be called twice."""
        for ffn in self.ffns:
            ffn.close()
        self.ffns.clear()
        if self.stage is not None:
            self.stage.close()
