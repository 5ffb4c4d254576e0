"""Hot on the GPU, cold on the CPU, together: the FFNs of layers whose neurons are split between the two.

For each layer of a step:

    GPU   attention ... n | x and names out | sum of the hot neurons              | + sum of the cold ones ...
    CPU                     wait            | sum of the cold neurons | back

The selector runs once, on the GPU. The CPU is told to begin by one transfer (n, and for a predictor the names of its
neurons) and gives back one vector a token, which is added to the GPU's own. Where no cold neuron is named there is no
job and nothing comes back; where a layer has no cold neurons nothing goes out either.

For a long prompt the GPU computes the cold neurons too, and the CPU none: see devices/stage.py.

An FFN is a sum over its neurons, so where they rest changes nothing but how the sum is rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.cpu import CpuExecutor, Weights
from powerinfer.devices.link import NAMED_TOKENS
from powerinfer.devices.stage import Stage
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.trace import span
from powerinfer.formats.bundle_file import BundleFile
from powerinfer.formats.bundle_memory import SomeBundles, gather, own_pages
from powerinfer.hybrid.adjust import trades
from powerinfer.kernels import gpu
from powerinfer.neurons import Indices, Placement, Predictor, Tier
from powerinfer.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer import _native
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.formats.checkpoint import Progress

Floats = NDArray[np.float32]

ENOUGH = 128
"""Tokens that a layer must have seen lately before its neurons trade places."""


@dataclass
class _Guess:
    """A layer's predictor on the GPU."""

    about: Predictor
    inner: gpu.Weight
    outer: gpu.Weight


class HybridFfn:
    """The FFN of one layer of `GpuLayers`, which runs its operators.

    hot, cold: int32, the neurons on the GPU and on the CPU, ascending. neurons: the hot ones, None where there are
    none. cold_bytes: of the cold ones' bundles.
    """

    def __init__(
        self,
        layer: int,
        cpu: CpuExecutor,
        layers: GpuLayers,
        bundles: BundleFile,
        hot: Indices,
        *,
        most: float = 0.0,
        weights: Weights | None = None,
        stage: Stage | None = None,
    ) -> None:
        """PowerInferError when a device has no memory left."""
        assert layers.link is not None
        self.layer = layer
        self._predicts = True
        self._cpu = cpu
        self._layers = layers
        self._link = layers.link
        self._bundles = bundles
        self._biases = layers.ffn_biases(layer)
        self._most = most
        self.stage = stage
        self._kept: SomeBundles | None = None
        self._cold: _native.NeuronSum | None = None  # the CPU's part
        self._memory: NDArray[np.uint8] | None = None
        self._guess: _Guess | None = None
        if weights is not None:
            with self._failures():
                inner, outer = (gpu.upload(part, layers.device) for part in weights[1:])
                self._guess = _Guess(weights[0], inner, outer)
        self.place(hot)
        self.clear()

    def place(self, hot: Indices) -> None:
        """Put these neurons on the GPU, and only there; all others on the CPU.

        As many as before take their places: their bundles are read from the file, in the order of their index, into the
        memory of those that were there. Where this is broken off, nothing may run before it was done again.
        """
        import torch

        from powerinfer.devices.torch_device import current

        layout, to = self._bundles.layout, self._layers.device
        self._bundles.file.check()
        rows = self._bundles.layers[self.layer]
        self.hot = hot
        self.cold = np.setdiff1d(np.arange(self._cpu.config.d_ff, dtype=np.int32), hot)
        self.neurons: gpu.Neurons | None = None  # before others take their place
        self._fired: Tensor | None = None
        with self._failures(), current(to):
            if len(hot):
                self.neurons = gpu.resident(layout, rows, hot, to, self._cpu.config, self._biases)
                self._fired = torch.zeros(len(hot), dtype=torch.int64, device=to)
            parts = () if self._guess is None else (hot, self.cold)  # columns of what the predictor says
            self._columns = [torch.from_numpy(part.astype(np.int64)).to(to) for part in parts]
        self.cold_bytes, self._kept, self._cold = 0, None, None
        if len(self.cold):
            most = len(self.cold) * layout.pitch + min(len(self.cold), len(rows)) * layout.shared_bytes
            if self._memory is None or len(self._memory) < most:
                self._memory = own_pages(most)
            kept = self._kept = gather(layout, rows, self.cold, self._memory)
            self.cold_bytes = kept.rows.nbytes
            self._cold = self._cpu.neuron_sum(layout, kept, self._biases, most=self._most, count_fired=True)
        self._layers.hang(self.layer, *self.operators())
        self._bundles.file.release(rows)

    def _failures(self) -> AbstractContextManager[None]:
        from powerinfer.devices.torch_device import gpu_failures

        return gpu_failures(f"loading the neurons of layer {self.layer}", "give less --vram")

    def memory(self) -> dict[str, int]:
        """Bytes on the GPU by part: ffn (the hot neurons, with their counters) and predictor."""
        ffn = (0 if self.neurons is None else self.neurons.nbytes) + _nbytes(self._fired)
        if self._guess is None:
            return {"ffn": ffn}
        weights = self._guess.inner.nbytes + self._guess.outer.nbytes
        return {"ffn": ffn, "predictor": weights + sum(map(_nbytes, self._columns))}

    # ---------------------------------------------------------------- a step

    def operators(self) -> tuple[list[Operator], list[Operator]]:
        """(those that send, those that add), see `GpuLayers.hang`.

        All that the GPU does is static, for it launches the same for every step of a shape. Between that the host acts
        twice where there are cold neurons: it marks what was sent, and sums them while the GPU sums the hot ones. In a
        long step it does neither, but brings them to the GPU.
        """
        send, add = [], []
        if self._guess is not None:
            send.append(self._operator("predictor", self._name))
        if len(self.cold):
            send.append(self._operator("copy out", self._send))
            send.append(self._operator("mark", self._mark, static=False))
        if len(self.hot):
            add.append(self._operator("hot neurons", self._add_hot))
        if len(self.cold):
            add.append(self._operator("cold neurons", self._sum_cold, static=False))
            add.append(self._operator("add", self._add_cold))
        return send, add

    def _operator(self, kind: str, run: Callable[[Step], None], *, static: bool = True) -> Operator:
        return Operator(kind, self.layer, run, static)

    def _named(self, tokens: int) -> bool:
        """Whether the predictor is asked in a step of so many tokens."""
        return self._guess is not None and self._predicts and tokens <= NAMED_TOKENS

    def _name(self, step: Step) -> None:
        import torch

        tokens, guess = len(step.x), self._guess
        if guess is None or not self._named(tokens):
            return
        named = gpu.predict(guess.inner, guess.outer, step.x, guess.about.threshold, guess.about.floor)
        places = self._link.names(tokens, len(self.hot), len(self.cold))
        for columns, place in zip(self._columns, places, strict=True):
            if len(columns):
                torch.index_select(named, 1, columns, out=place)

    def _streams(self, step: Step) -> bool:
        """Whether the GPU computes the cold neurons too."""
        return self.stage is not None and self.stage.takes(step.x.shape[0])

    def _send(self, step: Step) -> None:
        if not self._streams(step):
            self._link.send(len(step.x), self._cold_names(len(step.x)))

    def _cold_names(self, tokens: int) -> int:
        """How many names of cold neurons go out for each token."""
        return len(self.cold) if self._named(tokens) else 0

    def _mark(self, step: Step) -> None:
        if not self._streams(step):
            self._link.mark()

    def _add_hot(self, step: Step) -> None:
        assert self.neurons is not None and self._fired is not None and step.read is not None
        tokens = step.x.shape[0]
        names = self._link.names(tokens, len(self.hot), 0)[0] if self._named(tokens) else None
        total, fired = gpu.neuron_sum(self.neurons, step.read, names, self._most)
        step.add(total)
        if tokens <= NAMED_TOKENS:
            self._fired += fired

    def _sum_cold(self, step: Step) -> None:
        """The CPU's part into the link's buffer; zeros where no cold neuron is named."""
        assert self._cold is not None and self._kept is not None and step.read is not None
        tokens = step.x.shape[0]
        if self.stage is not None and self.stage.takes(tokens):
            own = self._bundles.layout, self._kept, self._cpu.config, self._biases, self._most
            with span(self._layers.trace, "gpu", "streamed neurons", self.layer):
                self.stage.add_sum(step.x, step.read, *own)
            return
        with span(self._layers.trace, "cpu", "wait", self.layer, "wait"):
            self._link.wait()
        with span(self._layers.trace, "cpu", "cold neurons", self.layer):
            x, names, out = self._link.views(tokens, self._cold_names(tokens))
            job = self._cold.sum(x, out, names)
        self._jobs += job and tokens <= NAMED_TOKENS

    def _add_cold(self, step: Step) -> None:
        if not self._streams(step):
            self._link.add_back(step.x)
        step.normed = None

    # ---------------------------------------------------------------- what was done

    def clear(self) -> None:
        """Begin to count anew."""
        self._sums: Counter[str] = Counter()
        self._jobs = 0
        self._since = self._layers.few_tokens, self._layers.few_steps
        self.recent = np.zeros(self._cpu.config.d_ff)
        self.recent_tokens = 0.0
        if self._fired is not None:
            self._fired.zero_()
        if self._cold is not None:
            self._cold.clear()

    def predict(self, on: bool) -> None:
        """Whether a predictor is asked from now on."""
        self._predicts = on
        self._layers.forget(self.layer)

    def forget_half(self) -> None:
        """Of what is recent."""
        self.recent /= 2
        self.recent_tokens /= 2

    def collect(self) -> Mapping[str, int]:
        """Of the tokens that were counted, in steps of up to `NAMED_TOKENS`: tokens, steps, jobs (steps in which the
        CPU had one), and summed over the tokens the neurons that fired on the GPU (hot) and on the CPU (cold).

        `recent`, float64 [d_ff], has then for each neuron the tokens that it fired for.
        """
        tokens, steps = self._layers.few_tokens - self._since[0], self._layers.few_steps - self._since[1]
        self._since = self._layers.few_tokens, self._layers.few_steps
        self.recent_tokens += tokens
        self._sums.update(tokens=tokens, steps=steps, jobs=self._jobs)
        self._jobs = 0
        if self._fired is not None:
            counts = self._fired.to("cpu", copy=True).numpy()
            self._fired.zero_()
            self.recent[self.hot] += counts
            self._sums["hot"] += int(counts.sum())
        if self._cold is not None:
            counts = np.empty(len(self.cold), np.int64)
            self._cold.fired(counts)
            self._cold.clear()
            self.recent[self.cold] += counts
            self._sums["cold"] += int(counts.sum())
        return self._sums


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor.nbytes)


def hang_neurons(
    cpu: CpuExecutor,
    layers: GpuLayers,
    bundles: BundleFile,
    placement: Placement,
    *,
    most: Callable[[int], float] = lambda layer: 0.0,
    predictors: Callable[[int], Weights] | None = None,
    stage: Stage | None = None,
    progress: Progress | None = None,
) -> list[HybridFfn]:
    """Give the GPU's layers their neurons: hot ones there and only there, the others copied into the CPU's memory.

    Neurons on disk are taken as cold. most: of a layer, up to which magnitude activations count as zero. stage:
    through which cold neurons come to the GPU for long prompts. The pages of the bundles' file are given back as the
    layers are done. PowerInferError when a device has no memory left.
    """
    ffns = []
    for layer in layers.neuron_layers:
        weights = None if predictors is None else predictors(layer)
        hot = placement.parts(layer)[Tier.GPU]
        own = cpu, layers, bundles, hot
        ffns.append(HybridFfn(layer, *own, most=most(layer), weights=weights, stage=stage))
        if progress is not None:
            progress("loading neurons", len(ffns), len(layers.neuron_layers))
    return ffns


class HybridSparsity(Sparsity):
    """Of a model whose layers are split between a GPU and the CPU."""

    def __init__(
        self, selector: str, executor: SplitExecutor, ffns: Sequence[HybridFfn], stage: Stage | None = None
    ) -> None:
        self.selector = selector
        self.stage = stage
        self.ffns = ffns
        self.traded = 0  # neurons that came to the GPU since the model was loaded
        self._executor = executor
        self._turn = 0

    def report(self) -> dict[str, Any]:
        """Per layer and in all, of tokens computed in steps of up to `NAMED_TOKENS`.

        hot, cold: neurons on the GPU and on the CPU; active_fraction: of the neurons, those that fired; gpu_share: of
        those that fired, the ones on the GPU; jobs: share of the steps in which the CPU had something to do; traded:
        neurons that have come to the GPU for others; streams_from: the tokens of a step from which on the GPU computes
        the cold ones too, None: it never does. The layers that the CPU has as a whole count, too.
        """
        cpu = self._executor.cpu
        d_ff = cpu.config.d_ff
        layers: list[dict[str, Any]] = []
        totals: Counter[str] = Counter()
        for ffn in self.ffns:
            sums = ffn.collect()
            totals.update(sums)
            layers.append({"layer": ffn.layer, "hot": len(ffn.hot), "cold": len(ffn.cold), **_shares(sums, d_ff)})
        for layer in cpu.bundled_layers:
            counts = cpu.bundled_counts(layer)
            steps = counts["steps"]
            sums = {"tokens": counts["tokens"], "steps": steps, "jobs": steps, "hot": 0, "cold": counts["active"]}
            totals.update(sums)
            layers.append({"layer": layer, "hot": 0, "cold": d_ff, **_shares(sums, d_ff)})
        whole = _shares(totals, d_ff) | {"tokens": max((layer["tokens"] for layer in layers), default=0)}
        streams = None if self.stage is None else self.stage.least
        return {"selector": self.selector, "layers": layers, **whole, "traded": self.traded, "streams_from": streams}

    def clear(self) -> None:
        """Start the counts of `report` anew."""
        for ffn in self.ffns:
            ffn.clear()
        self._executor.cpu.clear_bundled_counts()

    def adjust(self) -> bool:
        """Let neurons of one layer trade places, the next in turn that has seen enough; not while a step runs.

        What has fired lately counts, half of it at each turn of the layer. False where no layer was worth it.
        PowerInferError when a device has no memory left; all is then as before.
        """
        for _ in self.ffns:
            ffn = self.ffns[self._turn]
            self._turn = (self._turn + 1) % len(self.ffns)
            ffn.collect()
            if ffn.recent_tokens < ENOUGH:
                continue
            leave, come = trades(ffn.recent, ffn.hot, ffn.cold)
            ffn.forget_half()
            if len(come):
                before = ffn.hot
                try:
                    ffn.place(np.union1d(np.setdiff1d(before, leave), come).astype(np.int32))
                except BaseException:
                    ffn.place(before)
                    raise
                self.traded += len(come)
                return True
        return False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """No predictor names neurons meanwhile."""
        self._let_predict(False)
        try:
            yield
        finally:
            self._let_predict(True)

    def _let_predict(self, on: bool) -> None:
        for ffn in self.ffns:
            ffn.predict(on)
        self._executor.cpu.predict_bundled(on)

    def bytes_per_token(self, dense: int | None) -> None:
        """Not known: what the GPU skips is not counted."""


def _shares(sums: Mapping[str, int], d_ff: int) -> dict[str, Any]:
    active, tokens = sums["hot"] + sums["cold"], sums["tokens"]
    return {
        "tokens": tokens,
        "active_fraction": active / (tokens * d_ff) if tokens else None,
        "gpu_share": sums["hot"] / active if active else None,
        "jobs": sums["jobs"] / sums["steps"] if sums["steps"] else None,
    }
