"""How fast a model decodes whose weights stay on disk in part (disk.py): reads beside computing.

A step is a list of operators, each with its time of computing (cost.py). What they read:

    dense matrices            pass through the window: the disk reads them in turn as long as there is room, across
                              steps, and an operator waits until its own are there. Computed as window.cpp does it.
    experts, neurons          those needed that RAM does not have. Which are needed is known once a part of the operator
                              is computed (the gates of `exact`, a predictor); those that are there are computed
                              meanwhile, what arrives last afterwards.

One disk serves both, in the order in which reads begin, at the rates of its description. Dense matrices and experts are
packed each time they are multiplied, which takes longer than multiplying. The prediction is what a step takes once
steps follow one another.

Simplifications: RAM has the neurons that fire most often; with the experts, how often RAM has one is what a profile
counted of others (beside a GPU: those that are selected most often of the rest); and the mean of a maximum is not less
than the maximum of the means used here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.cpu_experts import expert_layout, plain_layout
from powerinfer.formats.expert_rows import resting_layers
from powerinfer.hardware.description import Device, Disk
from powerinfer.models.inventory import Matrix, Unit
from powerinfer.neurons import Profile
from powerinfer.placement import cost
from powerinfer.placement.budget import Workload, gib
from powerinfer.placement.disk import BLOCK, DiskPlan, attention_units, ffn_units, head_unit
from powerinfer.placement.shapes import Model
from powerinfer.placement.solver import GROUP

Hits = Mapping[int, NDArray[np.float64]]
"""By layer of experts: share of the selections that RAM answers with room for n of them, float64 [experts + 1]."""

_LARGE = 4 << 20  # bytes of a read

_GUESSED = 0.7
"""Of a layer's missing neurons those that are read behind those of the layer before: three quarters of the guesses,
nearly all right (csrc/neuron_sum.cpp)."""

_STEPS = 5  # that are followed; the first one fills the window


@dataclass(frozen=True)
class Decoding:
    """What a step computes. past: tokens in the cache of each of `work.batch` requests; profile: of neurons; hits: of
    experts, None: all are selected equally often, one token after another independently."""

    work: Workload
    past: int
    profile: Profile
    hits: Hits | None = None


class OnGpu(NamedTuple):
    """A layer on a GPU, where the CPU has the other experts.

    seconds: of a step, if RAM has them; first: of these, those before the selection; hot: experts on the GPU; needed:
    of the others, those of a step; missed: of these, those that RAM does not have.
    """

    seconds: float
    first: float = 0.0
    hot: int = 0
    needed: float = 0.0
    missed: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """A decode step. seconds: in all; waited: of these for the disk; layers: of each layer, those of computing, and
    those in which it waits; nbytes: read from disk; hits: of the experts and neurons that are needed, the share that
    RAM has, None: none are on disk. prompt_bytes: read for a piece of a prompt; disk_rate: bytes a second of large
    reads."""

    seconds: float
    waited: float
    layers: tuple[tuple[float, float], ...]
    nbytes: float
    hits: float | None
    prompt_bytes: float
    disk_rate: float

    def reasons(self, plan: DiskPlan, known: bool, of: str = "that a token needs") -> Iterator[str]:
        """What is read, and how long it takes, for people. known: how often experts are selected; of: which items
        RAM has a share of."""
        yield f"a step reads {plan.why}"
        share, rate = 100 * self.waited / self.seconds, self.disk_rate / 1e9
        how = f"from the disk at up to {rate:.2f} GB/s"
        yield f"that is {gib(self.nbytes)} a step, {how}: it waits {share:.0f} % of its time"
        if self.hits is not None:
            kind = "experts" if plan.about.experts else "neurons"
            how = "" if known or not plan.about.experts else ", if all are selected equally often"
            yield f"RAM has {100 * self.hits:.0f} % of the {kind} {of}{how}"
        yield f"a piece of a prompt reads {gib(self.prompt_bytes)}"


def predict(
    plan: DiskPlan,
    model: Model,
    device: Device,
    disk: Disk,
    decoding: Decoding,
    on_gpu: Sequence[OnGpu] = (),
    ends: float | None = None,
) -> Prediction:
    """The time of a step by a plan. device: the CPU; on_gpu: the first layers, where a GPU has them; ends: seconds
    outside of the layers, None: of the CPU alone."""
    steps = _Steps(plan, model, device, disk, decoding, on_gpu)
    ops = [*(op for layer in range(model.config.n_layers) for op in steps.layer(layer)), steps.end(ends)]
    seconds, waited = follow(ops, plan.about.window, disk)
    layers = np.zeros((model.config.n_layers, 2))
    for op, wait in zip(ops[:-1], waited, strict=False):
        layers[op.layer] += (op.seconds, wait)
    needed = sum(op.needed for op in ops)
    return Prediction(
        seconds,
        sum(waited),
        tuple((float(own), float(wait)) for own, wait in layers),
        sum(op.read + op.fetched for op in ops),
        1 - sum(op.missed for op in ops) / needed if needed else None,
        steps.prompt_bytes(),
        disk.rate(_LARGE),
    )


class Op(NamedTuple):
    """An operator. seconds: of computing, first: of it before it is known what is fetched, last: after that is there.
    read: bytes that pass through the window, ring: that they take there; fetched, fetch: bytes and seconds of other
    reads; needed, missed: experts or neurons, and those of them that RAM does not have; early: of the seconds of
    `fetch` those of reads that are guessed, and begin behind those of the operator before that fetches."""

    layer: int
    seconds: float
    read: int = 0
    ring: int = 0
    first: float = 0.0
    last: float = 0.0
    fetched: float = 0.0
    fetch: float = 0.0
    needed: float = 0.0
    missed: float = 0.0
    early: float = 0.0


class _Steps:
    """Makes the operators of a step."""

    def __init__(
        self, plan: DiskPlan, model: Model, device: Device, disk: Disk, decoding: Decoding, on_gpu: Sequence[OnGpu]
    ) -> None:
        self._on_gpu = on_gpu
        self._plan, self._model, self._device, self._disk, self._decoding = plan, model, device, disk, decoding
        self._about, self._batch = plan.about, decoding.work.batch
        self._way = cost.WAYS[decoding.work.selector][0]
        profile, config = decoding.profile, model.config
        orders = [profile.order(layer) for layer in range(config.n_layers)]
        every = self._way == "all"
        self._expected = cost.expected(profile, orders, config, model.selected, self._batch, GROUP, every)
        self._ffn, self._sparse = (
            cost.cpu_time(device, self._expected, model, way, panels=True).total[:, 0] for way in ("all", self._way)
        )

    def layer(self, layer: int) -> Iterator[Op]:
        """Its attention, by what is read together, and its FFN."""
        if layer < len(self._on_gpu):
            yield self._split(layer, self._on_gpu[layer])
            return
        work, model = self._decoding.work, self._model
        taken = cost.attention_seconds(
            self._device, model, layer, work.kv_type, self._decoding.past, self._batch, panels=True, ffn=False
        )
        yield from self._units(layer, list(attention_units(model, layer)), taken)
        if layer in self._about.neurons:
            yield self._neurons(layer)
            return
        beside = self._seconds(model.beside[layer]) if model.n_experts[layer] else 0.0
        yield from self._units(layer, list(ffn_units(model, layer)), beside + float(self._ffn[layer]))
        if layer in self._about.experts:
            yield self._experts(layer)

    def end(self, taken: float | None) -> Op:
        """The head, and what is between two steps. taken: seconds, None: on the CPU."""
        if taken is None:
            taken = cost.end_seconds(self._device, self._model, panels=True) + 1e-6 * self._device.step_us
        unit = head_unit(self._model).only(self._about.matrices)
        return Op(-1, taken + self._packing(unit.matrices), *_passes(unit))

    def prompt_bytes(self) -> float:
        """Bytes read for a piece of a prompt: what is streamed, and experts that some of its tokens select."""
        streamed = sum(n for use, n in self._plan.resting.items() if use in ("attention", "panels", "head"))
        chunk, every = self._decoding.work.chunk, self._about.experts.items()
        hot = {at: one.hot for at, one in enumerate(self._on_gpu)}
        shares = ((at, 1 - (slots + hot.get(at, 0)) / self._model.n_experts[at]) for at, slots in every)
        return streamed + sum(self._needed(at, chunk) * lacking * self._expert_bytes(at) for at, lacking in shares)

    def _units(self, layer: int, units: Sequence[Unit], taken: float) -> Iterator[Op]:
        """taken: seconds of computing in all, if RAM has the matrices as panels."""
        rest = taken - sum(self._seconds(unit.matrices) for unit in units)
        for unit in units:
            read = unit.only(self._about.matrices)
            yield Op(layer, rest + self._seconds(unit.matrices) + self._packing(read.matrices), *_passes(read))
            rest = 0.0
        if not units:
            yield Op(layer, rest)

    def _seconds(self, matrices: tuple[Matrix, ...]) -> float:
        return cost.matrix_seconds(self._device, matrices, panels=True)

    def _packing(self, matrices: tuple[Matrix, ...]) -> float:
        """Seconds by which products with weights as a file has them take longer."""
        if not self._device.pack_gb_s:
            return 0.0
        nbytes = sum(one.file for one in matrices)
        return max(0.0, nbytes / (1e9 * self._device.pack_gb_s) - self._seconds(matrices))

    def _expert_bytes(self, layer: int) -> float:
        return sum(one.file for one in self._model.experts[layer]) / self._model.n_experts[layer]

    def _expert_reads(self, layer: int) -> tuple[float, float]:
        """(bytes, seconds) of what is read of an expert: its matrices; where its neurons are told apart and that takes
        the disk less time, in place of down the rows that fire, or of both those that a predictor selects."""
        model, n = self._model, self._model.n_experts[layer]

        def reading(matrices: Sequence[Matrix]) -> tuple[float, float]:
            sizes = [one.file / n for one in matrices]
            return sum(sizes), sum(self._disk.seconds(int(nbytes) + BLOCK) for nbytes in sizes)

        total = reading(model.experts[layer])
        if not model.in_rows or layer not in resting_layers(model.config):
            return total
        ffn, (up, down) = model.config.experts[layer], model.experts[layer]
        width, predicted = ffn.row_width(model.config.d_model), len(model.expert_predictor(layer)) > 0
        layout = (expert_layout if predicted else plain_layout)(width, up.type, down.type)
        share = min(1.0, model.firing * (model.selected[layer] if predicted else 1))
        rows = ffn.size * (1 - (1 - share) ** self._batch)
        nbytes, seconds = reading([] if predicted else [up])
        partial = nbytes + rows * layout.pitch, seconds + rows * self._disk.seconds(layout.pitch + BLOCK)
        return partial if partial[1] < total[1] else total

    def _needed(self, layer: int, tokens: int) -> float:
        """Of a layer's experts, how many a step of that many tokens needs."""
        about = self._model.config.experts[layer]
        return about.n_experts * (1 - (1 - about.router.top_k / about.n_experts) ** tokens)

    def _experts(self, layer: int) -> Op:
        n, slots, hits = self._model.n_experts[layer], self._about.experts[layer], self._decoding.hits
        needed = self._needed(layer, self._batch)
        missed = needed * (1 - (slots / n if hits is None else float(hits[layer][slots])))
        return self._fetched(layer, needed * self._each(layer), 0.0, needed, missed)

    def _split(self, layer: int, own: OnGpu) -> Op:
        if layer not in self._about.experts:
            return Op(layer, own.seconds)
        return self._fetched(layer, own.seconds, own.first, own.needed, own.missed)

    def _each(self, layer: int) -> float:
        """Seconds of an expert that was read."""
        matrices = self._model.experts[layer]
        return (self._seconds(matrices) + self._packing(matrices)) / self._model.n_experts[layer]

    def _fetched(self, layer: int, seconds: float, first: float, needed: float, missed: float) -> Op:
        nbytes, parts = self._expert_reads(layer)
        return Op(
            layer,
            seconds,
            first=first,
            last=min(1.0, missed) * self._each(layer),
            fetched=missed * nbytes,
            fetch=self._fetch(missed, parts),
            needed=needed,
            missed=missed,
        )

    def _neurons(self, layer: int) -> Op:
        """`exact` computes the first matrix, of gates where there are any; a predictor's neurons are known at once."""
        layout, sums = self._model.bundles[layer], self._expected.sums[layer]
        exact = self._way == "exact"
        of_kind = sums[:, cost.FIRED if exact else cost.SELECTED]
        needed = float(of_kind[-1])
        missed = needed - float(np.interp(self._about.neurons[layer] / GROUP, np.arange(len(of_kind)), of_kind))
        first = self._seconds(self._model.ffn[layer][:1]) if exact else self._seconds(self._model.predictors[layer])
        seconds = float(self._sparse[layer]) + (0.0 if exact else first)
        nbytes = layout.pitch - (layout.gate_bytes if exact else 0)
        gates = ffn_units(self._model, layer)[0].first(int(exact)).only(self._about.matrices)
        packing = self._packing(gates.matrices)
        first, seconds = first + packing, seconds + packing
        fetch = self._fetch(missed, self._disk.seconds(nbytes + BLOCK))
        next_layer = next((one for one in sorted(self._about.neurons) if one > layer), None)
        if next_layer is not None and self._guessed(next_layer):  # by its predictor, while reads are under way
            seconds += self._seconds(self._model.predictors[next_layer])
        return Op(
            layer,
            seconds,
            *_passes(gates),
            first=first,
            last=(seconds - first) * missed / needed if needed else 0.0,
            fetched=missed * nbytes,
            fetch=fetch,
            needed=needed,
            missed=missed,
            early=_GUESSED * fetch if self._guessed(layer) else 0.0,
        )

    def _guessed(self, layer: int) -> bool:
        """Whether a layer's neurons, of which some are on disk, are read behind those of one before it."""
        about = self._about
        early = self._way == "predicted" and about.direct and about.prefetch
        return early and layer > min(about.neurons) and about.neurons[layer] < self._model.config.ffn_sizes[layer]

    def _fetch(self, n: float, each: float) -> float:
        """Seconds of about n reads that begin together: none at all as often as with independent ones."""
        return n * each - math.expm1(-n) * 1e-6 * self._disk.latency_us


def _passes(unit: Unit) -> tuple[int, int]:
    return unit.file, unit.file + BLOCK * len(unit.names)


class _Loaded(NamedTuple):
    """In the window. op: whose matrices; begin, end: where; ready: when they are there."""

    op: int
    begin: int
    end: int
    ready: float


def follow(ops: Sequence[Op], window: int, disk: Disk) -> tuple[float, list[float]]:
    """(seconds of a step, of them those in which each operator waits), when step follows step. window: bytes."""
    units = [at for at, op in enumerate(ops) if op.read]
    fetching = [at for at, op in enumerate(ops) if op.fetch]
    after = dict(zip(fetching, [*fetching[1:], *fetching[:1]], strict=True))
    loaded: deque[_Loaded] = deque()
    now = free = begin = 0.0  # free: when the disk has read all that was begun
    waited = np.zeros(len(ops))
    next_unit = 0
    for step in range(_STEPS):
        for at, op in enumerate(ops):
            while len(loaded) < len(units):
                unit = units[next_unit]
                place = _room(loaded, ops[unit].ring, window)
                if place is None:
                    break
                free = max(free, now) + disk.seconds(ops[unit].read)
                loaded.append(_Loaded(unit, place, place + ops[unit].ring, free))
                next_unit = (next_unit + 1) % len(units)
            before = now
            if op.read:
                now = max(now, loaded[0].ready)
            if op.fetch:
                free = max(free, now + op.first) + op.fetch - op.early
                now = max(now, free + op.last - op.seconds)
                free += ops[after[at]].early
            waited[at] += (now - before) * bool(step)
            now += op.seconds
            if op.read:
                loaded.popleft()
        if not step:
            begin = now
    return (now - begin) / (_STEPS - 1), [float(one) / (_STEPS - 1) for one in waited]


def _room(loaded: Sequence[_Loaded], nbytes: int, window: int) -> int | None:
    """Where that many bytes are free behind what was loaded last (`Window::room_for`)."""
    if not loaded:
        return 0
    first, last = loaded[0].begin, loaded[-1].end
    if loaded[-1].begin < first:
        return last if last + nbytes <= first else None
    if last + nbytes <= window:
        return last
    return 0 if nbytes <= first else None
