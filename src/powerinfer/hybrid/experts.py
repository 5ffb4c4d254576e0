"""Hot experts on the GPU, cold ones on the CPU, at the same time: FFNs of experts that are split between the two.

For each layer of a step:

    GPU   attention ... n, router | n, experts, weights out | the hot experts, the shared one | + the cold ones ...
    CPU                             wait                    | the cold experts  | back

The router runs on the GPU alone, so both devices agree on each token's experts and their weights. An expert is on one
device, unless a policy exchanges those on the GPU: then the CPU has all. A token's experts are added up in their order,
on each device by itself. Where experts are placed changes how the sum is rounded and, for types that the GPU lacks and
converts, their weights by as much as Q8_0 rounds.

A router that reads what the layer gets runs before attention, and the selection is sent ahead of the experts' input:
the CPU orders its rows and fetches weights into its caches while attention runs.

For a long prompt, whose tokens select nearly all experts, the GPU computes the cold ones too: they stream to it from
the model's file, through the buffers of devices/stage.py.

Where RAM does not hold all cold experts they rest on disk (devices/disk.py): the CPU reads those that are selected and
that it does not have, and computes the others meanwhile, in prompts, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ExpertsConfig
from powerinfer.devices.cpu import CpuExecutor, ExpertSum
from powerinfer.devices.gpu_weights import Matrices, StoredMatrix
from powerinfer.devices.link import EXPERT_BYTES
from powerinfer.devices.stage import Stage
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.streams import Event, Stream, Streams, streams_of
from powerinfer.devices.torch_device import current, gpu_failures
from powerinfer.devices.trace import span
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.tensors import RawTensor, RestingTensor
from powerinfer.hybrid.adjust import trades
from powerinfer.kernels import gpu, gpu_experts
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.kernels.gpu_types import tensor_bytes
from powerinfer.models.builder import ExpertWeights
from powerinfer.neurons import Indices
from powerinfer.placement.experts import Policy, Swap
from powerinfer.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer import _native
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor

ENOUGH = 128
"""Tokens that a layer must have computed recently before its experts are swapped."""

MOST = 2
"""Experts of a layer swapped at a time: the swap happens between requests, which wait for it."""


_HELD = (
    "_gpu_part", "_router", "_router_bias", "_correction", "_shared", "_shared_weight", "_slots", "_biases",
)  # fmt: skip
"""What a layer's experts have on the GPU, by attribute."""


class Copier:
    """Copies experts to the GPU beside its work, one after another, as a policy says (`placement.experts`).

    on: whether the policy is told what steps select.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.on = True
        self._pool = ThreadPoolExecutor(1)
        self._side: Stream | None = None

    def begin(self, streams: Streams, copy: Callable[[], None]) -> Future[Event]:
        """Copy, once what the GPU was given so far is done. streams: of the GPU."""
        ready, done = streams.event(), streams.event()
        ready.record(streams.current())
        self._side = side = self._side or streams.stream()

        def beside() -> Event:
            with streams.active(), streams.on(side):
                side.wait_event(ready)
                copy()
                done.record(side)
            return done

        return self._pool.submit(beside)

    def finish(self, streams: Streams, copying: Future[Event]) -> bool:
        """The GPU waits for a copy before what it is given next. Raises what the first copy that fails raised; then
        nothing is copied any more, and False is returned for others that failed."""
        try:
            done = copying.result()
        except Exception:
            if not self.on:
                return False
            self.on = False
            raise
        streams.current().wait_event(done)
        return True

    def close(self) -> None:
        self._pool.shutdown()


class HybridExperts:
    """The experts of one layer of `GpuLayers`."""

    def __init__(
        self,
        layer: int,
        cpu: CpuExecutor,
        layers: GpuLayers,
        weights: ExpertWeights,
        hot: Indices,
        *,
        movable: bool = False,
        stage: Stage | None = None,
        copier: Copier | None = None,
    ) -> None:
        """movable: `swap` is to be called; stage: streams cold experts to the GPU for long prompts; copier: exchanges
        those on the GPU, the CPU has all of them. RequestError where experts cannot be swapped, PowerInferError if a
        device runs out of memory."""
        assert layers.link is not None
        about = cpu.config.layers[layer].ffn
        assert isinstance(about, ExpertsConfig)
        self.layer = layer
        self.about = about
        self._layers = layers
        self._link = layers.link
        self._top_k = about.router.top_k
        self.on_input: Callable[[Tensor, Tensor], None] | None = None
        self._copier = copier
        self._swapped, self._whole = True, False
        self._copying: tuple[list[Swap], Future[Event]] | None = None
        self._calls: dict[int, tuple[_native.ExpertCall, ...]] = {}  # by tokens
        # For calls: of each expert its place on the CPU, -1 where it is on the GPU; what tokens select, as of `calls`.
        self._own_places = np.full(about.n_experts, -1, np.int32)
        self._tally = np.zeros(about.n_experts + 1, np.int64)
        self._disk = cpu.disk if cpu.disk is not None and layer in cpu.disk.about.experts else None
        with gpu_failures(f"loading the experts of layer {layer}", "give less --vram"), current(layers.device):
            self._upload(weights)
            self._norm, self._check_files = weights.norm, weights.check
            # Views of the model's file: no memory of their own.
            self._tensors = self._place(cpu, weights, hot)
        if movable and copier is None and self.about.bias:
            raise RequestError("--adjust does not swap experts that have biases: leave it out")
        if movable and self._tensors is None and self._disk is None:
            flag = "--adjust" if copier is None else f"--expert-policy {copier.policy.name}"
            raise RequestError(
                f"{flag} needs experts as a GGUF file has them, not a folder, --quantize or types IQ1 to IQ3"
            )
        self.stage = stage if stage is not None and self._tensors is not None else None
        self.clear()

    def _upload(self, weights: ExpertWeights) -> None:
        """What every token needs: the router, and the shared expert."""
        import torch

        device = self._layers.device

        def vector(values: NDArray[np.float32] | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(np.array(values, np.float32)).to(device)

        self._router, self._router_bias = gpu.upload(weights.router, device), vector(weights.router_bias)
        self._correction, self._shared_weight = vector(weights.correction), vector(weights.shared_weight)
        self._biases = weights.biases
        self._shared: tuple[Matrices, Matrices] | None = None
        if weights.shared:
            *first, down = (StoredMatrix(tensor, None) for tensor in weights.shared)
            inputs, output = Matrices(first, [None] * len(first), device), Matrices([down], [None], device)
            self._shared = inputs, output

    def _place(self, cpu: CpuExecutor, weights: ExpertWeights, hot: Indices) -> list[RawTensor] | None:
        """Each expert on its device, and only there; those of the CPU in RAM, or on disk. All of them, if RAM needs no
        copy, as it does not of those in a mapped file."""
        import torch

        n, device = self.about.n_experts, self._layers.device
        here = hot if self._copier is not None else np.sort(hot)  # of each slot
        every = self._copier is not None or self._disk is not None  # can be asked of the CPU
        on_cpu = np.arange(n, dtype=np.int32) if every else np.setdiff1d(np.arange(n), hot)
        self._gpu_part = None
        self._cpu_part: ExpertSum | None = None
        self._resting: Sequence[RestingTensor] = ()
        views: list[RawTensor] | None = None
        if self._disk is not None:
            self._resting = weights.resting()
            about = weights.correction, weights.router_bias
            self._cpu_part = cpu.resting_sum(self.layer, self._resting, self._biases, *about)
            if len(here):
                biases = [None if bias is None else bias[here] for bias in self._biases]
                slots = np.arange(len(here), dtype=np.int32)
                self._gpu_part = gpu_experts.resident(weights.some(here), slots, self.about, device, biases)
        else:
            tensors = [tensor.gathered() for tensor in weights.experts()]
            views = tensors if all(map(in_file, tensors)) else None
            if len(here):
                by_neuron = cpu.in_experts and self.about.why_whole is None
                self._gpu_part = gpu_experts.resident(tensors, here, self.about, device, self._biases, by_neuron)
            if len(on_cpu):
                biases = [None if bias is None else bias[on_cpu] for bias in self._biases]
                self._cpu_part = cpu.expert_sum(self.layer, (_some(tensor, on_cpu) for tensor in tensors), biases)
        # Of each expert its slot on the GPU, and its place on the CPU; -1 where it is not there.
        self._slot, self._place_of = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        self._slot[here] = np.arange(len(here))
        self._place_of[on_cpu] = np.arange(len(on_cpu))
        self._slots = torch.from_numpy(self._slot.copy()).to(device)
        self._tell_slots()
        return views

    def _tell_slots(self) -> None:
        """The GPU, what it calls, and what guesses the CPU's experts, know what is there."""
        import torch

        self._slots.copy_(torch.from_numpy(self._slot))
        self._own_places[:] = np.where(self._slot < 0, self._place_of, np.int32(-1))
        if self._disk is not None and self._cpu_part is not None:
            self._cpu_part.op.elsewhere[:] = self._slot >= 0

    def foresee(self, cpu: CpuExecutor, before: HybridExperts, router: RawTensor) -> None:
        """Where experts rest on disk, the layer before guesses which ones are needed, and reads them early.

        What a layer's router gets differs from what the one before it got by what is added to the stream between them,
        and by the weights of their norms: these are part of the matrix that guesses. router: [experts, d_model].
        """
        norm, other, first, second = self._norm, before._norm, before._cpu_part, self._cpu_part
        rest = self._disk is not None and before._disk is not None and self._disk.about.prefetch
        if not rest or first is None or second is None or self.about.early_router:
            return
        if norm is None or other is None or not other.all():
            return
        weights = (router.float32() * (norm / other)).astype(np.float32)
        cpu.foresee(first, second, RawTensor("F32", router.shape, weights.view(np.uint8).reshape(-1)))

    def _stored(self, expert: int) -> list[RawTensor]:
        """An expert's matrices [out, in], as the file has them. ModelError if they cannot be read."""
        if self._disk is not None:
            return self._disk.read(self._resting, expert)
        assert self._tensors is not None
        self._check_files()
        return [_one(tensor, expert) for tensor in self._tensors]

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return self._top_k

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert on the GPU; of none there, those that one has on the CPU."""
        part, n = (self._gpu_part, len(self.hot)) if self._gpu_part is not None else (self._cpu_part, len(self.cold))
        return 0 if part is None else part.nbytes // max(1, n)

    @property
    def hot(self) -> Indices:
        """int32, the experts on the GPU, ascending."""
        return np.flatnonzero(self._slot >= 0).astype(np.int32)

    @property
    def cold(self) -> Indices:
        """int32, the others, ascending."""
        return np.flatnonzero(self._slot < 0).astype(np.int32)

    def swap(self, leave: Indices, come: Indices) -> None:
        """Exchange experts on the GPU for as many on the CPU, each in the other's memory; not while a step runs.
        ModelError for one that cannot be read from disk: it stays where it is."""
        assert self._gpu_part is not None and self._cpu_part is not None
        failures = gpu_failures(f"swapping experts of layer {self.layer}", "load the model again")
        try:
            with failures, current(self._layers.device):
                for old, new in zip(leave, come, strict=True):
                    slot, place = int(self._slot[old]), int(self._place_of[new])
                    into = self._stored(int(new))
                    self._swapped = False  # a swap that fails leaves an expert in neither place
                    gpu_experts.replace(self._gpu_part, slot, into, int(new), self._biases)
                    if self._disk is None:
                        self._cpu_part.replace(place, self._stored(int(old)))
                        self._place_of[old], self._place_of[new] = place, -1
                    self._slot[old], self._slot[new] = -1, slot
                    self._tell_slots()
                    self._swapped = True
        finally:
            if not self._swapped:
                self._layers.changed(self.layer)  # what is replayed does not look whether a swap failed

    def _exchange(self, swaps: list[Swap]) -> None:
        """Begin to copy experts into slots, beside the steps: the next step of the layer has them."""
        assert self._copier is not None and self._gpu_part is not None
        stored, part, biases = self._stored, self._gpu_part, self._biases

        def copy() -> None:
            for slot, expert in swaps:
                gpu_experts.replace(part, slot, stored(expert), expert, biases)

        self._copying = swaps, self._copier.begin(streams_of(self._layers.device), copy)

    def _take_copied(self) -> None:
        """What was copied since the layer's last step is used from now on."""
        if self._copying is None or self._copier is None:
            return
        (swaps, copying), self._copying = self._copying, None
        # A copy that fails leaves slots that nobody must use: the CPU has all experts.
        self._slot[np.isin(self._slot, [slot for slot, _ in swaps])] = -1
        try:
            if self._copier.finish(streams_of(self._layers.device), copying):
                for slot, expert in swaps:
                    self._slot[expert] = slot
                self.copied += len(swaps)
        finally:
            self._tell_slots()

    def follow(self, policy: Policy) -> None:
        """From the next step on a policy decides, and has its experts in their slots; not while a step runs."""
        if self._copier is None:
            return
        self._take_copied()
        before, self._copier.policy = self._callable, policy
        if self._callable != before:  # so it is of all layers, which have one copier
            self._layers.changed(self.layer)
        wanted = policy.resident(self.layer).tolist()
        swaps = [(slot, expert) for slot, expert in enumerate(wanted) if self._slot[expert] != slot]
        if swaps:
            self._exchange(swaps)
            self._take_copied()

    def finish_copies(self) -> None:
        """Wait for what is being copied; not while a step runs."""
        self._take_copied()

    def close(self) -> None:
        """Free both parts, and the buffers that are shared with others."""
        if self._copying is not None:
            self._copying[1].exception()  # wait
        if self.stage is not None:
            self.stage.close()
        if self._copier is not None:
            self._copier.close()
        for name in (*_HELD, "_cpu_part", "_calls", "_link", "_layers", "_tensors", "_disk"):
            self.__dict__.pop(name, None)

    @property
    def cold_bytes(self) -> int:
        """Bytes of RAM for the cold experts."""
        return 0 if self._cpu_part is None else self._cpu_part.nbytes

    def memory(self) -> dict[str, int]:
        """Bytes on the GPU by part: ffn (router, shared expert, hot experts)."""
        shared = () if self._shared is None else self._shared
        parts = [self._router.nbytes, *(one.nbytes for one in shared)]
        parts.append(0 if self._gpu_part is None else self._gpu_part.nbytes)
        vectors = self._router_bias, self._correction, self._shared_weight, self._slots
        return {"ffn": sum(parts) + tensor_bytes(*vectors)}

    # ---------------------------------------------------------------- a step

    def before(self) -> list[Operator]:
        """Select experts where the router reads the layer's input, and send the CPU the selection, see `FfnParts`."""
        if not self.about.early_router:
            return []
        operators = [Operator("router", self.layer, self._select)]
        if self._cpu_part is not None:
            operators.append(Operator("selection out", self.layer, self._send_experts))
            operators.append(self._acts("mark selection", self._mark_experts, self._begin_ahead))
        return operators

    def begin(self) -> list[Operator]:
        """Select experts, unless that is done, and send the CPU its input, see `FfnParts`."""
        operators = [] if self.about.early_router else [Operator("router", self.layer, self._select)]
        if self._cpu_part is not None:
            operators.append(Operator("copy out", self.layer, self._send))
            operators.append(self._acts("mark", self._mark, self._begin_cold))
        return operators

    def finish(self) -> list[Operator]:
        """Add the sums of both parts, see `FfnParts`."""
        operators = []
        if self._gpu_part is not None:
            operators.append(Operator("hot experts", self.layer, self._add_hot))
        if self._shared is not None:
            operators.append(Operator("shared expert", self.layer, self._add_shared))
        if self._cpu_part is not None:
            operators.append(self._acts("cold experts", self._sum_cold, self._join_cold))
            operators.append(Operator("add", self.layer, self._add_cold))
        return operators

    def _acts(self, kind: str, run: Callable[[Step], None], called: Callable[[Step], None]) -> Operator:
        """One in which the host acts, unless the GPU can call it."""
        return Operator(kind, self.layer, run, False, called if self._callable else None)

    @property
    def _callable(self) -> bool:
        """Not where a policy looks at every step, nor where reads from disk fail by themselves."""
        return self._disk is None and (self._copier is None or self._copier.policy.name == "static")

    def _select(self, step: Step) -> None:
        assert step.read is not None
        experts, weights = self._link.experts(len(step.x), self._top_k)
        x = step.x if self.about.early_router else step.read
        logits = gpu.linear(self._router, x, self._router_bias)
        gpu_experts.route(logits, self.about.router, self._correction, experts, weights)

    def _streams(self, step: Step) -> bool:
        """Whether the GPU computes the cold experts too."""
        return self.stage is not None and self.stage.takes(len(step.x))

    def _send_experts(self, step: Step) -> None:
        if not self._streams(step):
            self._link.send_experts(len(step.x), self._top_k)

    def _mark_experts(self, step: Step) -> None:
        if not self._streams(step):
            self._link.mark_experts()

    def _send(self, step: Step) -> None:
        if not self._streams(step):
            self._link.send(len(step.x), 0 if self.about.early_router else EXPERT_BYTES * self._top_k)

    def _check(self) -> None:
        if not self._swapped:
            raise PowerInferError(f"experts of layer {self.layer} were lost in a swap: load the model again")

    def _calls_of(self, tokens: int) -> tuple[_native.ExpertCall, ...]:
        if tokens not in self._calls:
            assert self._cpu_part is not None
            own = self._own_places, self._tally
            self._calls[tokens] = self._cpu_part.calls(self._link, tokens, *own, ahead=self.about.early_router)
        return self._calls[tokens]

    def _begin_ahead(self, step: Step) -> None:
        self._link.begin(self._calls_of(len(step.x))[0])

    def _begin_cold(self, step: Step) -> None:
        self._check()
        self._link.begin(self._calls_of(len(step.x))[-1])

    def _join_cold(self, _: Step) -> None:
        self._link.join()

    def _mark(self, step: Step) -> None:
        self._check()
        self._take_copied()
        if self.on_input is not None:
            assert step.read is not None
            self.on_input(step.x, step.read)
        if not self._streams(step):
            self._link.mark()

    def _add_hot(self, step: Step) -> None:
        assert self._gpu_part is not None and step.read is not None
        experts, weights = self._link.experts(len(step.x), self._top_k)
        gpu_experts.expert_sum(self._gpu_part, step.read, experts, weights, self._slots, step.target)
        step.normed = None

    def _add_shared(self, step: Step) -> None:
        assert self._shared is not None and step.read is not None
        about, (inputs, output) = self.about, self._shared
        product = inputs(step.read)
        if about.gated:
            halves = product[:, : about.shared_size], product[:, about.shared_size :]
            hidden = gpu.activate(about.activation, *halves, about.threshold, for_codes=output.for_codes)
        else:
            hidden = gpu.activate(about.activation, product, None, about.threshold, for_codes=output.for_codes)
        if self._shared_weight is None:
            output(hidden, step.target)
            step.normed = None
        else:
            step.add_part(output(hidden) * gpu_experts.shared_weight(step.read, self._shared_weight))

    def _sum_cold(self, step: Step) -> None:
        """Write the CPU's sum to the link's buffer; zeros if no cold expert is selected."""
        if self._streams(step):
            with span(self._layers.trace, "gpu", "streamed experts", self.layer):
                self._stream_cold(step)
            return
        assert self._cpu_part is not None
        cpu, link, trace = self._cpu_part, self._link, self._layers.trace
        x, experts, weights, out = link.received_experts(len(step.x), self._top_k)  # there once it was waited for
        if self.about.early_router:
            with span(trace, "cpu", "wait for the selection", self.layer, "wait"):
                link.wait_experts()
            with span(trace, "cpu", "prepare cold experts", self.layer):
                places = self._places(experts)
                cpu.order(places, weights)
                while not link.arrived() and cpu.fetch():
                    pass
        with span(trace, "cpu", "wait", self.layer, "wait"):
            link.wait()
        with span(trace, "cpu", "cold experts", self.layer):
            if self.about.early_router:
                job = cpu.sum_ordered(x, out)
            else:
                places = self._places(experts)
                job = cpu.sum(x, places, weights, out)
        if cpu.by_neuron is not None and not self._whole and len(step.x) <= NEURON_TOKENS:
            self.by_neuron += int((places >= 0).sum()) * self.about.size
        counts = np.bincount(experts.reshape(-1), minlength=self.about.n_experts)
        self.selected += counts
        self.recent += counts
        self.hits += int((places < 0).sum())
        self.tokens += len(step.x)
        self.steps += 1
        self.jobs += job
        # A prompt selects nearly all. `static` has a copier in a trial alone, and costs there what it does without.
        copier = self._copier
        if copier is not None and copier.on and copier.policy.name != "static" and len(step.x) <= NEURON_TOKENS:
            swaps = copier.policy.observe(self.layer, experts.reshape(-1).tolist(), len(step.x))
            if swaps:
                self._exchange(swaps)

    def _places(self, experts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Where the CPU has experts; -1 for those on the GPU."""
        return np.where(self._slot[experts] < 0, self._place_of[experts], np.int32(-1))

    def _stream_cold(self, step: Step) -> None:
        """Add the sum of the cold experts, some of which are on the GPU at a time."""
        import torch

        assert self.stage is not None and self._tensors is not None and step.read is not None
        self._check_files()
        experts, weights = self._link.experts(len(step.x), self._top_k)
        count = self.stage.experts_at_once([_one(tensor, 0).nbytes for tensor in self._tensors], self.about.n_experts)
        for first in range(0, len(self.cold), count):
            own = self.cold[first : first + count]
            places = np.full(self.about.n_experts, -1, np.int32)
            places[own] = np.arange(len(own))
            parts = [np.asarray(places.view(np.uint8))]
            for tensor in self._tensors:
                parts += [_one(tensor, expert).data for expert in own]
            with self.stage.sent(parts) as (of_places, *sent):
                assert of_places is not None
                slots = of_places.view(torch.int32)
                joined = [_joined(sent[at * len(own) : (at + 1) * len(own)]) for at in range(len(self._tensors))]
                piece = gpu_experts.from_rows(self.about, self._tensors, joined, own, self._biases)
                gpu_experts.expert_sum(piece, step.read, experts, weights, slots, step.target)
                del piece  # the next one reuses its memory

    def _add_cold(self, step: Step) -> None:
        if not self._streams(step):
            self._link.add_back(step.target)
        step.normed = None

    # ---------------------------------------------------------------- counters, of layers with cold experts

    def collect(self) -> None:
        """Add to the counters what the GPU's calls of the CPU did since the last time; not while a step runs."""
        for tokens, calls in self._calls.items():
            made, jobs, *_ = calls[-1].take()
            self.tokens += made * tokens
            self.steps += made
            self.jobs += jobs
        counts, hits = self._tally[:-1], int(self._tally[-1])
        if self._cpu_part is not None and self._cpu_part.by_neuron is not None and not self._whole:
            self.by_neuron += (int(counts.sum()) - hits) * self.about.size
        self.selected += counts
        self.recent += counts
        self.hits += hits
        self._tally[:] = 0

    def clear(self) -> None:
        """Reset the counters, which are as of the last `collect`. selected: int64 [experts], tokens that each was
        selected for; hits: selections of those on the GPU; copied: experts copied there beside steps; jobs: steps in
        which the CPU had one; recent: as selected, halved now and then (`ExpertSparsity.adjust`). by_neuron: neurons of
        the cold experts of steps that skip those that do not fire."""
        for calls in self._calls.values():
            calls[-1].take()
        self._tally[:] = 0
        self.selected = np.zeros(self.about.n_experts, np.int64)
        self.recent = np.zeros(self.about.n_experts)
        self.tokens = self.steps = self.jobs = self.hits = self.copied = self.by_neuron = 0
        if self._cpu_part is not None and self._cpu_part.by_neuron is not None:
            self._cpu_part.by_neuron.sum.clear()

    @property
    def fired(self) -> int:
        """Of the neurons `by_neuron`, those that fired."""
        sparse = None if self._cpu_part is None else self._cpu_part.by_neuron
        return 0 if sparse is None else sparse.sum.counts()["active"]

    def set_whole(self, on: bool) -> None:
        """Whether every neuron is computed of cold experts that could skip some."""
        self.collect()
        self._whole = on
        if self._cpu_part is not None:
            self._cpu_part.set_whole(on)


def in_file(tensor: RawTensor) -> bool:
    """Whether a tensor's bytes are the mapped file's, not a copy."""
    data: Any = tensor.data
    while isinstance(data, np.ndarray):
        data = data.base
    return data is not None


def _joined(parts: Sequence[Tensor | None]) -> Tensor:
    """Parts that lie one behind the other in a buffer, as one; else a copy."""
    import torch

    own = [part for part in parts if part is not None]
    size, first = own[0].nbytes, own[0]
    if all(part.data_ptr() == first.data_ptr() + at * size for at, part in enumerate(own)):
        return first.as_strided((len(own) * size,), (1,))
    return torch.cat(own)


def _some(tensor: RawTensor, index: Indices) -> RawTensor:
    """Some of the matrices of a tensor [n, out, in]."""
    n, *shape = tensor.shape
    data = tensor.data.reshape(n, -1)
    return RawTensor(tensor.type, (len(index), *shape), (data if len(index) == n else data[index]).reshape(-1))


def _one(tensor: RawTensor, expert: int) -> RawTensor:
    n, *shape = tensor.shape
    return RawTensor(tensor.type, tuple(shape), tensor.data.reshape(n, -1)[expert])


@dataclass
class ExpertSplit:
    """How the experts of the GPU's layers are split: makes the FFN of each layer when it is wired (`load_split`).

    hot: of each layer of the model, the experts on the GPU, int32 (of layers without experts: none); movable: they may
    be swapped; stage: as for `HybridExperts`; copier: exchanges those on the GPU from step to step. ffns: those made so
    far.
    """

    hot: Sequence[Indices]
    movable: bool = False
    stage: Stage | None = None
    copier: Copier | None = None
    ffns: list[HybridExperts] = field(default_factory=list)
    kind: type = ExpertsConfig

    def __call__(self, cpu: CpuExecutor, layers: GpuLayers, layer: int, given: ExpertWeights) -> HybridExperts:
        """PowerInferError if a device runs out of memory."""
        hot = self.hot[layer]
        copier = self.copier if len(hot) else None
        if copier is not None:
            hot = copier.policy.resident(layer).copy()
        movable = self.movable or copier is not None
        ffn = HybridExperts(layer, cpu, layers, given, hot, movable=movable, stage=self.stage, copier=copier)
        if self.ffns and self.ffns[-1].layer == layer - 1:
            ffn.foresee(cpu, self.ffns[-1], given.router)
        self.ffns.append(ffn)
        return ffn

    def close(self) -> None:
        """Free the FFNs made so far, and the stage. May be called twice."""
        for ffn in self.ffns:
            ffn.close()
        self.ffns.clear()
        if self.stage is not None:
            self.stage.close()


class ExpertSparsity(Sparsity):
    """Of a model whose experts are split between a GPU and the CPU."""

    selector = "router"

    def __init__(self, executor: SplitExecutor, ffns: Sequence[HybridExperts], policy: str = "static") -> None:
        """policy: who decides which experts the GPU has, a name of `placement.experts.EXPERT_POLICIES`."""
        self.ffns = ffns
        self.stage = next((ffn.stage for ffn in ffns if ffn.stage is not None), None)
        self.policy = policy
        self.traded = 0  # experts moved to the GPU since the model was loaded
        self._executor = executor
        self._turn = 0

    def report(self) -> dict[str, Any]:
        """Per layer and in all: hot, cold: experts on the GPU and on the CPU; gpu_share: of the tokens' experts, those
        on the GPU, of a layer without cold ones None; jobs: share of the steps in which the CPU had work; policy:
        decides which experts the GPU has; traded: experts swapped onto the GPU between requests; copied: there, beside
        steps; active_fraction: of the cold experts' neurons, those that fired, None where all are computed."""
        layers: list[dict[str, Any]] = []
        selected = hot = 0
        for ffn in self.ffns:
            ffn.collect()
            own, on_gpu = int(ffn.selected.sum()), ffn.hits
            selected, hot = selected + own, hot + on_gpu
            layers.append(
                {
                    "layer": ffn.layer,
                    "hot": len(ffn.hot),
                    "cold": len(ffn.cold),
                    "tokens": ffn.tokens,
                    "gpu_share": on_gpu / own if own else None,
                    "jobs": ffn.jobs / ffn.steps if ffn.steps else None,
                }
            )
        steps, neurons = (sum(getattr(ffn, name) for ffn in self.ffns) for name in ("steps", "by_neuron"))
        tokens = max((ffn.tokens for ffn in self.ffns), default=0)
        whole = tokens * sum(ffn.top_k for ffn in self.ffns if not len(ffn.cold))  # which nobody counts
        selected, hot = selected + whole, hot + whole
        return {
            "selector": self.selector,
            "layers": layers,
            "tokens": tokens,
            "gpu_share": hot / selected if selected else None,
            "jobs": sum(ffn.jobs for ffn in self.ffns) / steps if steps else None,
            "policy": self.policy,
            "traded": self.traded,
            "copied": sum(ffn.copied for ffn in self.ffns),
            "active_fraction": sum(ffn.fired for ffn in self.ffns) / neurons if neurons else None,
        }

    def clear(self) -> None:
        for ffn in self.ffns:
            ffn.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Every neuron of the cold experts is computed inside the context. The GPU leaves out those that give zero."""
        for ffn in self.ffns:
            ffn.set_whole(True)
        try:
            yield
        finally:
            for ffn in self.ffns:
                ffn.set_whole(False)

    def adjust(self) -> bool:
        """Swap experts of one layer, the next in turn with enough recent tokens, if the difference is clear."""
        for _ in self.ffns:
            ffn = self.ffns[self._turn]
            self._turn = (self._turn + 1) % len(self.ffns)
            ffn.collect()
            if ffn.recent.sum() < ENOUGH * ffn.about.router.top_k or not len(ffn.hot):
                continue
            leave, come = trades(ffn.recent, ffn.hot, ffn.cold, MOST)
            ffn.recent /= 2
            if len(come):
                ffn.swap(leave, come)
                self.traded += len(come)
                return True
        return False

    def bytes_per_token(self, dense: int | None) -> None:
        """Unknown: it depends on which experts are selected, and where they are."""
