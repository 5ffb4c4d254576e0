"""Hot on the GPU, cold on the CPU, together: the FFNs of layers whose neurons are split between the two.

For each layer of a step:

    GPU   attention ... n | x and names out | sum of the hot neurons              | + sum of the cold ones ...
    CPU                     wait            | sum of the cold neurons | back

The selector runs once, on the GPU. The CPU is told to begin by one transfer (n, and for a predictor the names of its
neurons) and gives back one vector a token, which is added to the GPU's own. Where no cold neuron is named there is no
job and nothing comes back; where a layer has no cold neurons nothing goes out either.

An FFN is a sum over its neurons, so where they rest changes nothing but how the sum is rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.trace import Trace, span
from powerinfer.formats.pack import BundleFile, gather
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import gpu
from powerinfer.neurons import Indices, Placement, Predictor, Tier

if TYPE_CHECKING:
    from torch import Tensor, device

    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.formats.checkpoint import Progress

Floats = NDArray[np.float32]
Weights = tuple[Predictor, RawTensor, RawTensor]

NAMED_TOKENS = 8
"""Most tokens of a step that a predictor names neurons for: for more nearly every neuron is named by some token."""


class Link:
    """The way between a GPU and the CPU: buffers that both reach, one set for all layers.

    What goes out is copied in the order of the GPU's stream, so the CPU waits for that much of it and no more. A buffer
    is written again only when the next layer's input has come, behind which the last one's sum was added.
    """

    def __init__(self, to: device, max_tokens: int, d_model: int, d_ff: int) -> None:
        import torch

        self._cuda = to.type == "cuda"
        self._device = to

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
        total.add_(back.to(self._device, non_blocking=True) if self._cuda else back)


@dataclass
class _Guess:
    """A layer's predictor on the GPU; hot, cold: int64 columns of its answer."""

    about: Predictor
    inner: gpu.Weight
    outer: gpu.Weight
    hot: Tensor
    cold: Tensor


@dataclass
class HybridCounts:
    """What a layer did in steps of up to `NAMED_TOKENS`: their tokens, the steps, those in which the CPU had a job."""

    tokens: int = 0
    steps: int = 0
    jobs: int = 0


class HybridFfn:
    """The FFN of one layer. Called by `GpuLayers` as the sum of a layer's neurons."""

    def __init__(
        self,
        layer: int,
        cpu: CpuExecutor,
        link: Link,
        hot: gpu.Neurons | None,
        cold: int | None,
        guess: _Guess | None,
        most: float,
        cold_bytes: int,
    ) -> None:
        """hot: the neurons on the GPU, cold: the operator of those on the CPU, None where there are none."""
        assert hot is not None or cold is not None
        self.layer = layer
        self.cold_bytes = cold_bytes
        self.hot = hot
        self.trace: Trace | None = None
        self.predicts = True
        self._cpu = cpu
        self._link = link
        self._cold = cold
        self._guess = guess
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Begin to count anew."""
        self.counts = HybridCounts()
        if self.hot is not None:
            self._fired = _zeros(self.hot)
        if self._cold is not None:
            self._cpu.clear_neuron_sums(self._cold)

    def sums(self) -> dict[str, int]:
        """Of the tokens that were counted: tokens, steps, jobs (steps in which the CPU had one), and summed over the
        tokens the neurons that fired on the GPU (hot_active) and on the CPU (cold_active), and bytes that the CPU read.
        """
        cold = {"active": 0, "bytes": 0} if self._cold is None else self._cpu.neuron_sums(self._cold)
        hot = 0 if self.hot is None else int(self._fired.sum())
        own = {"tokens": self.counts.tokens, "steps": self.counts.steps, "jobs": self.counts.jobs}
        return own | {"hot_active": hot, "cold_active": cold["active"], "cold_bytes": cold["bytes"]}

    def __call__(self, layer: int, n: Tensor, x: Tensor) -> Tensor:
        """n: float32 [T, d_model], what the neurons read; x the same, what a predictor reads. Their sum."""
        assert layer == self.layer
        tokens = len(n)
        hot_names, cold_names = self._names(x) if tokens <= NAMED_TOKENS and self.predicts else (None, None)
        if self._cold is not None:
            with span(self.trace, "gpu", "copy out", self.layer):
                self._link.send(n, cold_names)
        total = self._hot_sum(n, hot_names)
        job = self._cold is not None and self._cold_sum(tokens)
        if job:
            with span(self.trace, "gpu", "add", self.layer):
                self._link.add_back(total)
        if tokens <= NAMED_TOKENS:
            self.counts.tokens += tokens
            self.counts.steps += 1
            self.counts.jobs += job
        return total

    def _names(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        guess = self._guess
        if guess is None:
            return None, None
        with span(self.trace, "gpu", "predictor", self.layer):
            named = gpu.predict(guess.inner, guess.outer, x, guess.about.threshold, guess.about.floor)
            return named.index_select(1, guess.hot), named.index_select(1, guess.cold)

    def _hot_sum(self, n: Tensor, names: Tensor | None) -> Tensor:
        if self.hot is None:
            return n.new_zeros(n.shape)
        with span(self.trace, "gpu", "hot neurons", self.layer):
            total, fired = gpu.neuron_sum(self.hot, n, names, self._most)
            if len(n) <= NAMED_TOKENS:
                self._fired += fired
            return total

    def _cold_sum(self, tokens: int) -> bool:
        """The CPU's part into the link's buffer. False where no cold neuron is named: nothing was done."""
        with span(self.trace, "cpu", "wait", self.layer, "wait"):
            x, names = self._link.wait()
        if names is not None and not names.any():
            return False
        assert self._cold is not None
        with span(self.trace, "cpu", "cold neurons", self.layer):
            self._cpu.neuron_sum(self._cold, x, names, self._link.back(tokens))
        return True


def _zeros(neurons: gpu.Neurons) -> Tensor:
    import torch

    return torch.zeros(neurons.n, dtype=torch.int64, device=neurons.up.data.device)


def hang_neurons(
    cpu: CpuExecutor,
    layers: GpuLayers,
    bundles: BundleFile,
    placement: Placement,
    *,
    most: Callable[[int], float] = lambda layer: 0.0,
    predictors: Callable[[int], Weights] | None = None,
    progress: Progress | None = None,
) -> list[HybridFfn]:
    """Give the GPU's layers their neurons: hot ones there and only there, cold ones copied into the CPU's memory.

    Neurons on disk are taken as cold. most: of a layer, up to which magnitude activations count as zero. The pages of
    the bundles' file are given back as the layers are done. PowerInferError when a device has no memory left.
    """
    from powerinfer.devices.gpu import gpu_failures

    config = cpu.config
    link = Link(layers.device, layers.max_tokens, config.d_model, config.d_ff)
    ffns = []
    for layer in layers.neuron_layers:
        parts = placement.parts(layer)
        hot, cold = parts[Tier.GPU], np.sort(np.concatenate([parts[Tier.CPU], parts[Tier.DISK]]))
        bundles.file.check()
        rows, biases = bundles.layers[layer], layers.ffn_biases(layer)
        with gpu_failures(f"loading the neurons of layer {layer}", "give less --vram"):
            on_gpu = gpu.resident(bundles.layout, rows, hot, layers.device, config, biases) if len(hot) else None
            guess = None if predictors is None else _guess(predictors(layer), hot, cold, layers.device)
        op, cold_bytes = None, 0
        if len(cold):
            kept = gather(bundles.layout, rows, cold)
            op = cpu.bundled_ffn(bundles.layout, kept, biases=(*biases, None), replace=True, most=most(layer))
            cold_bytes = kept.rows.nbytes
        ffn = HybridFfn(layer, cpu, link, on_gpu, op, guess, most(layer), cold_bytes)
        layers.hang(layer, ffn)
        ffns.append(ffn)
        bundles.file.release()
        if progress is not None:
            progress("loading neurons", len(ffns), len(layers.neuron_layers))
    return ffns


def _guess(weights: Weights, hot: Indices, cold: Indices, to: device) -> _Guess:
    import torch

    about, inner, outer = weights
    columns = [torch.from_numpy(part.astype(np.int64)).to(to) for part in (hot, cold)]
    return _Guess(about, gpu.upload(inner, to), gpu.upload(outer, to), *columns)


class HybridSparsity:
    """How layers that are split decode, and what came of it: `Sparsity` of an executor on two devices."""

    def __init__(self, selector: str, executor: SplitExecutor, ffns: Sequence[HybridFfn]) -> None:
        self.selector = selector
        self.ffns = ffns
        self._executor = executor

    def report(self) -> dict[str, Any]:
        """Per layer and in all, of tokens computed in steps of up to `NAMED_TOKENS`.

        hot, cold: neurons on the GPU and on the CPU; active_fraction: of the neurons, those that fired; gpu_share: of
        those that fired, the ones on the GPU; jobs: share of the steps in which the CPU had something to do.
        """
        d_ff = self._executor.cpu.config.d_ff
        layers: list[dict[str, Any]] = []
        totals: Counter[str] = Counter()
        for ffn in self.ffns:
            sums, hot = ffn.sums(), 0 if ffn.hot is None else ffn.hot.n
            totals.update(sums)
            layers.append({"layer": ffn.layer, "hot": hot, "cold": d_ff - hot, **_shares(sums, d_ff)})
        whole = _shares(totals, d_ff) | {"tokens": max((layer["tokens"] for layer in layers), default=0)}
        return {"selector": self.selector, "layers": layers, **whole}

    def clear(self) -> None:
        """Begin to count anew."""
        for ffn in self.ffns:
            ffn.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """No predictor names neurons meanwhile."""
        for ffn in self.ffns:
            ffn.predicts = False
        try:
            yield
        finally:
            for ffn in self.ffns:
                ffn.predicts = True

    @contextmanager
    def traced(self) -> Iterator[Trace]:
        """Note what takes the time of steps meanwhile (`SplitExecutor.traced`)."""
        with self._executor.traced() as trace:
            for ffn in self.ffns:
                ffn.trace = trace
            try:
                yield trace
            finally:
                for ffn in self.ffns:
                    ffn.trace = None

    def bytes_per_token(self, dense: int) -> None:
        """Not known: what the GPU skips is not counted."""


def _shares(sums: Mapping[str, int], d_ff: int) -> dict[str, Any]:
    active, tokens = sums["hot_active"] + sums["cold_active"], sums["tokens"]
    return {
        "tokens": tokens,
        "active_fraction": active / (tokens * d_ff) if tokens else None,
        "gpu_share": sums["hot_active"] / active if active else None,
        "jobs": sums["jobs"] / sums["steps"] if sums["steps"] else None,
    }
