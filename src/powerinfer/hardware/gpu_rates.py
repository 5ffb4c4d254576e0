"""The rates of a GPU in decoding, from the layers and kernels that decode on it, over weights larger than caches.

Dense products and fixed times: steps of `GpuLayers` of two widths, launched or replayed as in decoding. Rows of
bundles: `kernels.gpu.neuron_sum` over neurons of which chosen fractions fire, many calls in one recording, timed by the
device, so that launches do not count. The cost of a sparse FFN, and of an exchange with the CPU, is the extra time of
steps that have one. torch's CPU device is measured the same way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.devices.gpu import CacheSize, GpuLayers
from powerinfer.devices.link import Link
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.streams import Event, streams_of
from powerinfer.devices.torch_device import MemoryShare, choose_device, current, gpu_failures
from powerinfer.errors import PowerInferError
from powerinfer.hardware.description import (
    ALL_TYPES,
    NO_GPU,
    RATED_ROWS,
    SIZES_ALONE,
    Device,
    RatedTypes,
    unmeasured,
)
from powerinfer.hardware.samples import FRACTIONS, HEAD_DIM, FitGroup, Samples, figure, fit_rows, wire
from powerinfer.kernels import cpu, gpu
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout
from powerinfer.progress import Progress, silent
from powerinfer.system import available_memory, cpu_name, resident_memory

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass(frozen=True)
class GpuEffort:
    """Sizes of the measurements. sample_bytes: weights of a sample, more than the device's caches hold."""

    sample_bytes: int
    wide: tuple[int, int]  # d_model, d_ff
    narrow: tuple[int, int]
    rows: tuple[tuple[int, int], ...]  # d_model, neurons of a sparse FFN
    context: int  # tokens that attention reads
    steps: int = 10  # timed, of each sample
    layers: tuple[int, int] = (8, 24)  # of the narrow samples
    copy_bytes: int = 64 << 20


ON_CUDA = GpuEffort(256 << 20, (4096, 4096), (256, 512), ((2048, 8192), (8192, 8192)), 2048)
STAND_IN = GpuEffort(4 << 20, (256, 512), (64, 128), ((256, 256), (512, 256)), 512, 3, (2, 6), 16 << 20)

MOST_CONTEXT = 1 << 30
"""Assumed maximum of the driver's memory per process; more in use on a card belongs to others."""

_HOST_BYTES = 1 << 30  # where it cannot be measured
_MOST_WAIT = 120.0  # seconds
_RECORDED = 16  # calls of a recording, at least: its launch takes as long as a small kernel
_WARM_UP = 3  # steps: kernels are compiled in the first, the second is recorded
_SAMPLE_SECONDS = 0.3  # after which a sample gets only the minimum of steps
_LEAST_STEPS = 3
_LAYER_OPERATORS = 4  # attention's input, attention, projection, FFN
_FEW_FIRE = 0.1  # of the neurons, where an FFN's fixed time is measured


@dataclass(frozen=True)
class GpuRates:
    """A GPU, and its fields of a `Hardware`."""

    device: Device
    sync_us: float = 0.0
    copy_gb_s: float = 1.0


def gpu_name(name: str) -> str:
    """The model name of a device, by its name for `choose_device`."""
    import torch

    chosen = choose_device(name)
    if chosen.type == "cuda":
        return str(torch.cuda.get_device_name(chosen))
    return f"{NO_GPU} ({cpu_name() or 'CPU'})"


def software(name: str) -> dict[str, str]:
    """Everything but the engine that a GPU's rates depend on: its model, and the versions of the software."""
    import torch

    triton = "none"
    if gpu.which(torch.empty(0, device=choose_device(name))) == "triton":
        try:
            triton = version("triton")
        except PackageNotFoundError:  # it has other names too
            triton = "unknown"
    return {"gpu_device": gpu_name(name), "torch": str(torch.__version__), "triton": triton}


def free_memory(name: str) -> int:
    """Bytes on the device that are free or used by this process, without the driver's part; 0: unknown.

    In emulation, free RAM.
    """
    import torch

    chosen = choose_device(name)
    if chosen.type != "cuda":
        return available_memory()
    return int(torch.cuda.mem_get_info(chosen)[0]) + int(torch.cuda.memory_reserved(chosen))


def gpu_rates(
    name: str,
    types: RatedTypes = ALL_TYPES,
    before: GpuRates | None = None,
    effort: GpuEffort | None = None,
    progress: Progress = silent,
) -> GpuRates:
    """Measure a GPU: its sizes, and the rates of these types. name: for `choose_device`; before: what was measured of
    other types, which the result has too. PowerInferError if it fails or has too little memory."""
    chosen = choose_device(name)
    effort = effort or (ON_CUDA if chosen.type == "cuda" and types != SIZES_ALONE else STAND_IN)
    in_use = _driver_bytes(chosen)
    free = free_memory(name)
    if free and free < 6 * effort.sample_bytes:
        raise PowerInferError(
            f"measuring {gpu_name(name)} takes {6 * effort.sample_bytes >> 20} MiB of its memory and {free >> 20} MiB "
            "are free; end other programs first"
        )
    work = _GpuSamples(chosen, effort, progress)
    share = MemoryShare(chosen)  # models' limits do not count meanwhile
    try:
        with gpu_failures("it was measured", "end other programs on it first"), current(chosen):
            rates = work.rates(types, before or GpuRates(unmeasured()))
        work.close()
    finally:
        share.end()
    reserved = 0
    if chosen.type == "cuda":
        reserved = min(in_use, MOST_CONTEXT) + max(0, _driver_bytes(chosen) - in_use)  # kernels and workspaces came
        reserved = max(reserved, rates.device.reserved_bytes)
    device = replace(rates.device, name=gpu_name(name), memory_bytes=_memory(name, reserved), reserved_bytes=reserved)
    return replace(rates, device=device)


def with_free_memory(device: Device, name: str) -> Device:
    """A device measured earlier, with its current free memory."""
    return replace(device, memory_bytes=_memory(name, device.reserved_bytes))


def _memory(name: str, reserved: int) -> int:
    """Free memory, and the reserved part, which was in use when it was measured."""
    return max(1, free_memory(name) + reserved)


def _driver_bytes(chosen: device) -> int:
    """Bytes in use on a card beside torch's own: the driver's part, and other processes'."""
    import torch

    if chosen.type != "cuda":
        return 0
    torch.cuda.synchronize(chosen)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(chosen)
    return max(0, int(total) - int(free) - int(torch.cuda.memory_reserved(chosen)))


def host_bytes(name: str) -> int:
    """Additional RAM of a process once layers run on a GPU: libraries, kernels, the driver's part.

    Measured in a separate process, since this one may have loaded some of it.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    call = f"from powerinfer.hardware import gpu_rates; print(gpu_rates._host_bytes_here({name!r}))"
    try:
        child = subprocess.run(
            [sys.executable, "-c", call],
            capture_output=True,
            timeout=_MOST_WAIT,
            check=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        return max(0, int(child.stdout.split()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return _HOST_BYTES


def _host_bytes_here(name: str) -> int:
    before = resident_memory()
    chosen = choose_device(name)
    _GpuSamples(chosen, STAND_IN).fixed()
    return resident_memory() - before


class _GpuSamples(Samples):
    """The samples, one after another; each is gone before the next is made."""

    def __init__(self, chosen: device, effort: GpuEffort, progress: Progress = silent) -> None:
        super().__init__("measuring the GPU", 1, effort.context, progress)
        self._device = chosen
        self._cuda = chosen.type == "cuda"
        self._streams = streams_of(chosen)
        self._effort = effort

    def close(self) -> None:
        """Release torch's cached memory."""
        if self._cuda:
            import torch

            torch.cuda.empty_cache()

    def rates(self, types: RatedTypes, before: GpuRates) -> GpuRates:
        """The rates before and of these types, with fixed times if there are none yet; memory is left open."""
        if types == SIZES_ALONE:
            self.fixed()  # loads libraries and kernels
            return before
        old = before.device
        self._total = 2 * len(types.dense) + len(types.rows) + (0 if old.dense_gb_s else 4)
        op_us, step_us = (old.op_us, old.step_us) if old.dense_gb_s else self.fixed()
        kinds = [kind for kind in gpu.GPU_TYPES if kind in types.dense]
        dense = {**old.dense_gb_s} | {kind: figure(self.dense(kind, op_us, step_us)) for kind in kinds}
        head = {kind: figure(self.head(kind)) for kind in kinds}
        peak = max(dense.values())
        fits = {kind: fit_rows(list(self.rows(kind)), peak) for kind in RATED_ROWS if kind in types.rows}
        bundle = {kind: figure(fit.gb_s) for kind, fit in fits.items()}
        row_ns = {kind: figure(fit.row_ns) for kind, fit in fits.items()}
        device = replace(old, dense_gb_s=dense, head_gb_s=head, bundle_gb_s=bundle, row_ns=row_ns).joined(old)
        if old.dense_gb_s:
            return replace(before, device=device)
        kv = self.kv_gb_s()
        sparse_us, sync_us = self.split(op_us, step_us, peak)
        device = replace(device, op_us=figure(op_us), sparse_us=figure(sparse_us), step_us=figure(step_us))
        return GpuRates(replace(device, kv_gb_s=figure(kv)), figure(sync_us), figure(self.copy_gb_s()))

    # ------------------------------------------------------------ dense layers

    def fixed(self) -> tuple[float, float]:
        """(op_us, step_us) of narrow layers, whose bytes hardly count: two layer counts separate the two."""
        self.tick()
        few, many = self._effort.layers
        times = [self._step_seconds(self._dense("Q8_0", self._effort.narrow, layers)) for layers in (few, many)]
        per_layer = max(0.0, times[1] - times[0]) / (many - few)
        return 1e6 * per_layer / _LAYER_OPERATORS, 1e6 * max(0.0, times[0] - few * per_layer)

    def dense(self, kind: str, op_us: float, step_us: float) -> float:
        """GB/s of layers of one type."""
        self.tick()
        d_model, d_ff = self._effort.wide
        nbytes = 4 * gpu.weight_bytes(kind, d_model, d_model) + 3 * gpu.weight_bytes(kind, d_ff, d_model)
        layers = max(1, round(self._effort.sample_bytes / nbytes))
        seconds = self._step_seconds(self._dense(kind, self._effort.wide, layers))
        fixed = 1e-6 * (step_us + _LAYER_OPERATORS * op_us * layers)
        return layers * nbytes / max(seconds - fixed, 0.5 * seconds) / 1e9

    def _dense(self, kind: str, shape: tuple[int, int], layers: int) -> GpuLayers:
        d_model, d_ff = shape
        sample = self._layers(shape, layers)
        parts = ((d_model, d_model), (d_ff, d_model), (d_model, d_ff))
        square, up, down = (self.normal(kind, *part) for part in parts)
        wire(sample, d_model, range(layers), [square] * 3, square, [up, up, down])
        return sample

    def head(self, kind: str) -> float:
        """GB/s of the output head: one tall matrix."""
        self.tick()
        d_model = self._effort.wide[0]
        rows = max(1, self._effort.sample_bytes // 2 // gpu.weight_bytes(kind, 1, d_model))
        weight = gpu.upload(self.normal(kind, rows, d_model), self._device)
        x = self._input(1, d_model)
        return weight.nbytes / self._seconds([lambda: gpu.linear(weight, x)]) / 1e9

    def kv_gb_s(self) -> float:
        """Attention over keys and values of the usual type, four heads of queries to one of keys: far, less near."""
        self.tick()
        heads, kv_heads, d_model = 32, 8, 128
        token_bytes = 2 * 2 * kv_heads * HEAD_DIM  # bytes that a token has in a layer: keys and values in F16
        far = self._effort.context // cpu.PAGE * cpu.PAGE
        layers = max(1, round(self._effort.sample_bytes / 2 / (far * token_bytes)))
        sample = self._layers((d_model, d_model), layers, heads, kv_heads, far)
        q, kv = (self.normal("F16", rows * HEAD_DIM, d_model) for rows in (heads, kv_heads))
        out = self.normal("F16", d_model, heads * HEAD_DIM)
        wire(sample, d_model, range(layers), [q, kv, kv], out)
        near = self._step_seconds(sample, cpu.PAGE - 1, close=False)
        total = self._step_seconds(sample, far - 1)
        return layers * (far - cpu.PAGE) * token_bytes / max(total - near, 0.1 * total) / 1e9

    # ------------------------------------------------------------ neurons

    def rows(self, kind: str) -> Iterator[tuple[FitGroup, float, float, float]]:
        """(group, rows, bytes, seconds) of the neurons of an FFN, both ways, every fraction, both widths."""
        self.tick()
        for shape in self._effort.rows:
            layout, neurons = self._neurons(kind, shape)
            copies = [neurons]
            while sum(one.nbytes for one in copies) < self._effort.sample_bytes:
                copies.append(_copy(neurons))
            x = self._input(1, shape[0])
            for way in ("exact", "predicted"):
                group = FitGroup(shape[0], way, kind, 0)
                for fraction in FRACTIONS:
                    yield group, *self._firing(copies, layout, x, way, fraction)

    def _firing(
        self, copies: Sequence[gpu.Neurons], layout: BundleLayout, x: Tensor, way: str, fraction: float
    ) -> tuple[float, float, float]:
        """(rows, bytes, seconds) of a call in which about that fraction of the neurons fires."""
        import torch

        n, threshold = copies[0].n, 0.0
        lists: list[Tensor | None] = [None]
        if way == "exact":  # gates are normal, of variance 1: the quantile lets the fraction pass
            threshold = NormalDist().inv_cdf(1 - fraction)
        else:  # others in each call: the few neurons of one list would stay in a cache
            lists = [
                torch.from_numpy((self._random.random((1, n)) < fraction).astype(np.uint8)).to(self._device)
                for _ in range(max(_RECORDED, len(copies)))
            ]
        rows = nbytes = 0
        for selected in lists:
            fires = gpu.neuron_sum(copies[0], x, selected, threshold)[1].cpu().numpy() > 0
            first, active = n if selected is None else int(selected.sum()), int(fires.sum())
            groups = len(np.unique(np.flatnonzero(fires) // BUNDLE_GROUP))
            rows += first + 2 * active
            nbytes += first * layout.gate_bytes + active * (layout.gate_bytes + layout.down_bytes)
            nbytes += groups * layout.shared_bytes
        to, fired = torch.zeros_like(x), torch.zeros(n, dtype=torch.int64, device=self._device)
        calls = [
            partial(gpu.neuron_sum, neurons, x, selected, threshold, to, fired)
            for neurons, selected in zip(cycle(copies), lists * -(-len(copies) // len(lists)), strict=False)
        ]
        return rows / len(lists), nbytes / len(lists), self._seconds(calls)

    def _neurons(self, kind: str, shape: tuple[int, int]) -> tuple[BundleLayout, gpu.Neurons]:
        """Neurons from bundles, in the types that `pack` makes of this one."""
        n = shape[1]
        layout, bundles = self.bundles(kind, shape, cpu.choose_threads(0)[0])
        numbers = np.arange(n, dtype=np.int32)
        return layout, gpu.resident(layout, bundles, numbers, self._device, self.config(shape, 1).layers[0].neurons)

    def split(self, op_us: float, step_us: float, gb_s: float) -> tuple[float, float]:
        """(sparse_us, sync_us): extra time of a layer for a sparse FFN, and for an exchange with an idle CPU."""
        import torch

        self.tick()
        shape, layers = self._effort.narrow, self._effort.layers[1]
        _, neurons = self._neurons("F16", shape)
        threshold = NormalDist().inv_cdf(1 - _FEW_FIRE)
        square = self.normal("F16", shape[0], shape[0])
        fired = torch.zeros(neurons.n, dtype=torch.int64, device=self._device)
        times = []
        for exchange in (False, True):
            sample = self._layers(shape, layers, split=True)
            wire(sample, shape[0], range(layers), [square] * 3, square)
            for layer in range(layers):
                norm = sample.norm(np.ones(shape[0], np.float32))
                sample.split_ffn(layer, norm, _Sample(sample, layer, neurons, threshold, fired, exchange))
            times.append(self._step_seconds(sample))
        read = neurons.nbytes * (1 + 2 * _FEW_FIRE) / 3  # gate, and the firing rows of up and down
        sparse_us = (1e6 * times[0] - step_us) / layers - _LAYER_OPERATORS * op_us - read / (1e3 * gb_s)
        return max(0.0, sparse_us), max(0.0, 1e6 * (times[1] - times[0]) / layers)

    # ------------------------------------------------------------ copies

    def copy_gb_s(self) -> float:
        """GB/s between the memories, the slower direction."""
        import torch

        self.tick()
        pinned = self._streams.pinned(self._effort.copy_bytes, torch.uint8)
        copied = torch.zeros(len(pinned), dtype=torch.uint8, device=self._device)
        ways = (lambda: copied.copy_(pinned, non_blocking=True), lambda: pinned.copy_(copied, non_blocking=True))
        return len(pinned) / max(self._seconds([way]) for way in ways) / 1e9

    # ------------------------------------------------------------ samples

    def _layers(
        self,
        shape: tuple[int, int],
        layers: int,
        heads: int = 0,
        kv_heads: int = 0,
        context: int = cpu.PAGE,
        *,
        split: bool = False,
    ) -> GpuLayers:
        """Layers without operators, with room for one request."""
        config = self.config(shape, layers, heads, kv_heads)
        return GpuLayers(
            config,
            self._device,
            layers=layers,
            cache=CacheSize("f16", context // cpu.PAGE),
            max_tokens=1,
            rotations={rope: (np.ones(HEAD_DIM // 2, np.float32), 1.0) for rope in config.ropes},
            split=split,
        )

    def _input(self, rows: int, cols: int) -> Tensor:
        import torch

        return torch.from_numpy(self._random.standard_normal((rows, cols), np.float32)).to(self._device)

    # ------------------------------------------------------------ times

    def _step_seconds(self, layers: GpuLayers, position: int = 0, close: bool = True) -> float:
        """A step of one token from x in to x out, median."""
        positions, zero = np.full(1, position, np.int32), np.zeros(1, np.int32)
        pages = np.arange(layers.n_pages, dtype=np.int32)[None]
        x = self._random.standard_normal((1, layers.d_model), np.float32)
        batch = Batch(zero, positions, zero, pages, zero[:0])
        try:
            times = list(self._paced(lambda: layers.run(batch, x)))
        finally:
            if close:
                layers.close()
        return median(times)

    def _seconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        """The device's time for one of these calls, made one after another; median."""
        import torch

        with torch.inference_mode():
            record = self._streams.recorder() if gpu.which(self._input(1, 1)) == "triton" else None
            if record is None:
                return median(self._paced(lambda: self._finished(_all(calls)))) / len(calls)
            repeated = [call for _ in range(-(-_RECORDED // len(calls))) for call in calls]
            for _ in range(_WARM_UP):
                self._finished(_all(calls))
            run = record(_all(repeated))
            first, last = (self._streams.event(timed=True) for _ in range(2))
            times = []
            for _ in self._paced(lambda: self._finished(lambda: _run_between(first, run, last))):
                times.append(1e-3 * first.elapsed_time(last))
            return median(times) / len(repeated)

    def _finished(self, run: Callable[[], Any]) -> None:
        run()
        self._streams.finish()

    def _paced(self, run: Callable[[], Any]) -> Iterator[float]:
        """Seconds of each run after the warm-up; fewer runs on a slow device."""
        for _ in range(_WARM_UP if self._cuda else 1):
            run()
        begin = time.perf_counter()
        for step in range(self._effort.steps):
            if step >= _LEAST_STEPS and time.perf_counter() - begin > _SAMPLE_SECONDS:
                return
            last = time.perf_counter()
            run()
            yield time.perf_counter() - last


def _run_between(first: Event, run: Callable[[], Any], last: Event) -> None:
    first.record()
    run()
    last.record()


def _all(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _copy(neurons: gpu.Neurons) -> gpu.Neurons:
    """The same neurons at other addresses."""

    def other(weight: gpu.Weight | None) -> Any:
        if weight is None:
            return None
        scales = None if weight.scales is None else weight.scales.clone()
        return replace(weight, data=weight.data.clone(), scales=scales)

    copies = {name: other(getattr(neurons, name)) for name in ("gate", "up", "down")}
    return replace(neurons, **copies, shared=None if neurons.shared is None else neurons.shared.clone())


@dataclass(frozen=True)
class _Sample:
    """An FFN of one part, on the GPU; fired: its counters; exchange: beside a CPU that has nothing to do, called or
    waiting as the engine's is."""

    layers: GpuLayers
    layer: int
    neurons: gpu.Neurons
    threshold: float
    fired: Tensor
    exchange: bool

    def ahead(self) -> list[Operator]:
        """Nothing."""
        return []

    def sent(self, step: Step) -> Tensor | None:
        """The host's memory for its input, where there is an exchange."""
        return self._link.sent(len(step.x)) if self.exchange else None

    def begin(self) -> list[Operator]:
        """Send the input, where there is an exchange."""
        if not self.exchange:
            return []
        link = self._link
        send = Operator("copy out", self.layer, lambda step: link.send(len(step.x), 0))
        call, number = link.empty_call(), self.layer + 1
        call_operator = Operator("mark", self.layer, lambda _: link.mark(), False, lambda _: link.begin(call, number))
        return [send, call_operator]

    def finish(self) -> list[Operator]:
        """Add the neurons' sum, and the CPU's, where there is an exchange."""
        hot = Operator("hot neurons", self.layer, self._add)
        if not self.exchange:
            return [hot]
        link, number = self._link, self.layer + 1
        wait = Operator("wait", self.layer, lambda _: link.wait(), False, lambda _: link.join(number))
        return [hot, wait, Operator("add", self.layer, lambda step: link.add_back(step.target))]

    @property
    def _link(self) -> Link:
        assert self.layers.link is not None
        return self.layers.link

    def close(self) -> None:
        """The neurons are those of other samples too."""

    def _add(self, step: Step) -> None:
        assert step.read is not None
        gpu.neuron_sum(self.neurons, step.read, None, self.threshold, step.target, self.fired)
        step.normed = None
