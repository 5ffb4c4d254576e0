"""What of a model stays on disk where RAM does not hold it: of all, on the CPU alone, or of what a GPU does not have.

Every byte that stays on disk costs the same to read, so what matters is how many a token needs. Neurons and experts
come first: of those on disk a token reads only the ones that it selects and RAM does not have. Dense matrices are read
whole, by every step, so RAM keeps as many of them as it can: FFNs stay on disk before attention, and the head last,
evenly over the layers, so that the disk works while the resident ones are multiplied. What is used once in each step in
the same order gains nothing from a cache that replaces it: of n matrices in a cache of n - 1, the one that is missing
is always the next. So which ones stay in RAM is fixed (Belady, IBM Systems Journal 5, 1966).

A neuron on disk is a read of its own, which takes as long as many more bytes in order (`APART`), but few tokens need
it. Where a profile says how often each fires, RAM goes to what would take the disk the longest, the next neurons or the
next dense matrix: of all numbers of dense matrices on disk the one with which a step reads the shortest.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from powerinfer.config import ExpertsConfig, FfnConfig
from powerinfer.devices.disk import OnDisk, Reads
from powerinfer.errors import RamError, RequestError
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.expert_rows import resting_layers
from powerinfer.formats.prepared import LINE
from powerinfer.kernels.cpu import NEURON_TOKENS, READ_COPIES, matrix_bytes
from powerinfer.models.inventory import Matrix, Unit
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, Profile
from powerinfer.placement import cost
from powerinfer.placement.budget import ON_CPU, Division, Footprint, Workload, gib, in_ram
from powerinfer.placement.shapes import Model
from powerinfer.system import MOST_THREADS

BLOCK = 4096
"""Bytes of a block of the disk: what is read begins and ends with whole ones."""

AHEAD = 32 << 20
"""Bytes that are read ahead of what a step uses, or the next matrices, if they are larger: what is under way at a time
(reads.cpp)."""

PACKED = 4 << 20
"""Bytes of a thread for the panels of matrices on disk."""

FEWEST = 50
"""Of a layer's neurons on disk RAM holds at least 1 / FEWEST,"""

LEAST = 2 * BUNDLE_GROUP
"""and so many for each thread."""

NEURON = 48
"""Bytes that say of a neuron on disk where it is, and how often it was used."""

ROUNDED = 48 << 20
"""Bytes by which memory that is lent is used beyond whole rows: huge pages."""

FIRSTS_AT_ONCE = 4 << 20
"""Bytes of bundles that are read at a time for their first rows."""

APART = 32 << 10
"""Bytes in order that a disk reads in the time that a small read takes beyond its own: about 10 us at 3 GB/s."""


COMMON = 16
"""Of the slots for neurons one in so many is common to all layers: while a layer is computed it has more than its own,
for those that it reads and that fire too rarely to stay."""

MOST = 8
"""At most a layer's neurons divided by this are common."""


CLEARLY = 1.25
"""As many times as much must be read for single neurons as for dense matrices, which take longer to compute, to prefer
these."""


@dataclass(frozen=True)
class DiskPlan:
    """about: what stays on disk; held: bytes in RAM by use, which fit; streamed: bytes that every step reads; resting:
    bytes of what stays on disk, by use. reading: bytes in order that a disk reads in the time of all that a step is
    expected to read, small reads among them; None: how often neurons fire is not known. ram: the budget."""

    about: OnDisk
    held: Footprint
    streamed: int
    resting: Footprint = field(default_factory=dict)
    reading: float | None = None
    ram: int = 0

    @property
    def why(self) -> str:
        """What is read, for people."""
        about, parts = self.about, []
        if self.streamed:
            parts.append(f"{gib(self.streamed)} of dense weights at every step")
        if about.neurons:
            parts.append(f"neurons that fire, of {len(about.neurons)} layers")
        if about.experts:
            parts.append(f"experts that are selected, of {len(about.experts)} layers")
        return f"{' and '.join(parts)}, where RAM does not hold them"

    def kept(self, sizes: Sequence[int]) -> list[int]:
        """Of each layer's neurons those that RAM has. sizes: all of them."""
        every = enumerate(sizes)
        return [self.about.neurons.get(layer, 0 if self._streamed_ffn(layer) else n) for layer, n in every]

    def _streamed_ffn(self, layer: int) -> bool:
        return any(f"layers.{layer}.{name}" in self.about.matrices for name in ("gate", "up", "down"))


def better_densely(dense: DiskPlan | None, bundled: DiskPlan) -> bool:
    """Whether to compute every neuron rather than to read single ones. dense: without bundles, None: RAM holds all."""
    reads = 0 if dense is None else dense.streamed
    return not reads or (bundled.reading or 0) > CLEARLY * reads


def plan_disk(
    model: Model,
    work: Workload,
    ram: int,
    threads: int,
    division: Division = ON_CPU,
    *,
    bundled: bool = False,
    whole: int | None = None,
    profile: Profile | None = None,
) -> DiskPlan | RequestError:
    """What stays on disk so that the CPU computes within `ram` bytes what a GPU does not have.

    bundled: neurons may stay on disk as bundles, of any selector but `all`. Experts that the GPU does not have may stay
    there, and all where they are exchanged. whole: bytes of RAM that hold the model, of a small one less than what
    reading it takes. profile: how often neurons fire, None: not known.

    Returns the error, with the least that would do, where even one matrix at a time does not fit.
    """
    if model.in_experts and (division.layers or not model.in_rows):
        selector = "predicted" if model.predictors else "exact"
        rows = f", or run `{model.rows_command}` for --selector {selector}" if resting_layers(model.config) else ""
        return RequestError(
            "neurons inside experts are computed where all experts are in RAM, and they do not fit: leave out "
            f"--selector, and whole experts are read from disk{'' if division.layers else rows}"
        )
    experts = _Experts(model, division)
    if experts.converted:
        return RequestError(
            f"{model.name}: experts are read from disk as a file has them, and these would be converted: "
            "leave out --quantize, or take a file in a type that is computed as it is"
        )
    return _Budget(model, work, ram, threads, division, experts, bundled, profile).plan(whole)


class _Experts:
    """Experts that the CPU computes, and that may rest on disk. most: by layer, their number; slot: bytes of the place
    of one in RAM; least: slots that a layer needs."""

    def __init__(self, model: Model, division: Division) -> None:
        first, slots = division.layers, division.slots
        self.most: dict[int, int] = {}
        for layer in model.config.experts:
            n = model.n_experts[layer]
            there = 0 if layer >= first or division.cached else n if slots is None else slots[layer]
            if there < n:
                self.most[layer] = n - there
        self._model = model
        self.slot = {at: _slot_bytes(model.experts[at], model.n_experts[at], model.in_rows) for at in self.most}
        self.least = {at: min(most, least_slots(model.config.experts[at])) for at, most in self.most.items()}
        of_gpu = [layer for layer in self.most if layer < first]
        width = -(-model.config.d_model // 32) * 32
        self.guesses = sum(matrix_bytes("Q8_0", model.n_experts[layer], width) for layer in self.most)  # routers
        # An expert on its way to the GPU; biases of all experts, which of layers on the CPU as a whole are vectors, and
        # what is beside rows.
        self.moving = max((self.slot[layer] for layer in of_gpu), default=0)
        self.beside = sum(model.n_experts[layer] * model.expert_biases(layer) for layer in of_gpu) + model.rows_in_ram

    @property
    def converted(self) -> bool:
        """Some would be converted when they are loaded."""
        parts = ((layer, part) for layer in self.most for part in self._model.config.experts[layer].matrices)
        return any(f"layers.{layer}.experts_{part}" in self._model.converted for layer, part in parts)

    def nbytes(self, slots: Mapping[int, int]) -> int:
        """Bytes of that many slots by layer."""
        return sum(slots[layer] * self.slot[layer] for layer in self.most)

    def slots(self, left: int) -> dict[int, int]:
        """By layer, with so many bytes beyond the least: as many in all, as far as they go."""
        slots = dict(self.least)
        while True:
            wanting = [layer for layer in slots if slots[layer] < self.most[layer]]
            each = sum(self.slot[layer] for layer in wanting)
            more = left // each if each else 0
            if not more:
                return slots
            for layer in wanting:
                took = min(more, self.most[layer] - slots[layer])
                slots[layer] += took
                left -= took * self.slot[layer]

    @property
    def resting(self) -> int:
        """Bytes on disk."""
        model = self._model
        each = ((one.file // model.n_experts[at], n) for at, n in self.most.items() for one in model.experts[at])
        return sum(nbytes * n for nbytes, n in each)


class _Budget:
    """RAM that is shared by what always stays there, dense matrices, a window, experts and neurons; arguments as of
    `plan_disk`. held: bytes by use, so far those that nothing changes."""

    def __init__(
        self,
        model: Model,
        work: Workload,
        ram: int,
        threads: int,
        division: Division,
        experts: _Experts,
        bundled: bool,
        profile: Profile | None,
    ) -> None:
        self._model, self._work, self._ram, self._experts = model, work, ram, experts
        self._first = division.layers
        self.table = 0 if "embed" in model.converted else model.tables  # mapped: the system may take its pages
        self._neurons = neurons = _neurons(model, work, threads) if bundled else {}
        self.held = in_ram(model, work, division)
        self.held["embedding"] -= self.table
        self.held["scratch"] += PACKED * min(threads, MOST_THREADS) + (READ_COPIES if neurons else 0)
        self.held["scratch"] += experts.guesses + experts.moving
        order = _order(model, division)
        free = [unit for unit in order if model.converted.isdisjoint(unit.names)]
        self._in_panels = _other(model, range(division.layers, model.config.n_layers), division.head)
        for unit in order:
            self._in_panels[unit.use] += 0 if unit in free else unit.panels
        self._fixed = sum(self.held[use] for use in ("runtime", "scratch", "embedding", "norms", "kv", "predictor"))
        self._fixed += self._in_panels.total() + experts.beside + experts.nbytes(experts.least)
        self._fixed += self.held.get("draft", 0)
        self._fixed += sum(layer.least for layer in neurons.values())
        self._prompts = [layer.prompts for layer in neurons.values()]
        self._units = [unit for unit in (_decoded(dense, neurons) for dense in free) if unit.names]
        self._hottest = _Hottest(neurons, model, work, profile) if neurons and profile else None

    def _windows(self, units: Sequence[Unit]) -> list[_Window]:
        return _windows(units, self._prompts, min(AHEAD, self._ram // 16))

    def _window(self, streamed: Sequence[Unit]) -> int:
        return self._windows(streamed)[-1].nbytes

    def _left(self, streamed: Sequence[Unit], rest: Sequence[Unit]) -> int:
        """Bytes for experts and neurons beyond the fewest, where some dense units are on disk and the rest in RAM."""
        return self._ram - self._fixed - sum(unit.panels for unit in rest) - self._window(streamed)

    def _lent(self, streamed: Sequence[Unit]) -> int:
        """Bytes of prompts that neurons have between these."""
        if not self._neurons or self._first:
            return 0
        return _lent(self._model, self._work, 0 if streamed else self._window(streamed))

    def _read(self, streamed: Sequence[Unit], rest: Sequence[Unit]) -> float:
        """Bytes in order that take as long as what a step reads."""
        room = self._left(streamed, rest) + self._lent(streamed)
        return sum(unit.file for unit in streamed) + self._neurons_read(room)

    def _neurons_read(self, room: int) -> float:
        """The same of neurons alone, which have so many bytes."""
        return self._hottest.read(room) if self._hottest else 0

    def _cut(self) -> tuple[list[Unit], list[Unit]]:
        """(dense units on disk, those in RAM) with which a step reads the shortest."""
        units = self._units
        in_order, panels = 0, sum(unit.panels for unit in units)
        reads: dict[int, float] = {}  # by how many units are on disk, where that fits
        for n, window in enumerate(self._windows(units)):
            left = self._ram - self._fixed - panels - window.nbytes
            if left >= 0:
                reads[n] = in_order + self._neurons_read(left + self._lent(units[:n]))
            if n < len(units):
                in_order, panels = in_order + units[n].file, panels - units[n].panels
        cut = min(reads, key=lambda n: reads[n], default=len(units))
        streamed, rest = units[:cut], units[cut:]
        if streamed:  # of the last one RAM may hold some matrices
            part = streamed.pop()
            for name in part.names[1:]:
                single, others = part.only([name]), part.only(set(part.names) - {name})
                fewer = [*streamed, others], [*rest, single]
                if self._left(*fewer) >= 0 and self._read(*fewer) <= self._read([*streamed, part], rest):
                    rest.append(single)
                    part = others
            streamed.append(part)
        return streamed, rest

    def plan(self, whole: int | None) -> DiskPlan | RamError:
        """The plan; the error where the least does not fit. whole: as of `plan_disk`."""
        streamed, rest = self._cut()
        fixed = self._fixed + sum(unit.panels for unit in rest)
        needed = fixed + self._windows(streamed)[-1].least
        if needed > self._ram:
            return _too_little(self._model, self.held, needed, needed if whole is None else whole, self._ram)
        room = max(0, self._left(streamed, rest))
        experts, neurons, window = self._experts, self._neurons, self._ram - fixed - room
        in_slots = experts.slots(room)
        room -= experts.nbytes(in_slots) - experts.nbytes(experts.least)
        for_neurons = room + self._lent(streamed)
        common, slot_size = (0, 0) if self._first else _common(neurons, for_neurons)
        for_neurons -= common * slot_size
        if self._hottest:
            of_neurons = self._hottest.slots(for_neurons)
        else:
            of_neurons = {layer: one.slots(for_neurons // len(neurons)) for layer, one in neurons.items()}
        beyond = common * slot_size + sum((of_neurons[at] - one.fewest) * one.slot for at, one in neurons.items())
        in_panels = self._in_panels.copy()
        for unit in rest:
            in_panels[unit.use] += unit.panels
        held = self.held | {use: in_panels[use] for use in ("attention", "panels", "head")}
        held["window"] = window
        held["experts"] = experts.beside + experts.nbytes(in_slots)
        held["ffn"] = sum(one.least for one in neurons.values()) + min(beyond, room)
        about = OnDisk(
            frozenset(name for unit in (*self._prompts, *streamed) for name in unit.names),
            window,
            in_slots,
            of_neurons,
            lent=_fewer(neurons, of_neurons, room) if beyond > room else {},
            lends_window=not streamed,
            common=common,
            slot_bytes=slot_size,
        )
        dense = sum(unit.file for unit in streamed)
        reading: float | None = None if neurons else dense
        if self._hottest:
            reading = dense + self._hottest.read(for_neurons)
        return DiskPlan(about, held, dense, self._resting(streamed), reading, self._ram)

    def _resting(self, streamed: Sequence[Unit]) -> Footprint:
        """Bytes on disk by use."""
        resting = Counter({"embedding": self.table})
        for unit in (*self._prompts, *streamed):
            resting[unit.use] += unit.file
        resting["experts"] = self._experts.resting
        resting["ffn"] = sum(self._model.bundles[layer].pitch * one.n for layer, one in self._neurons.items())
        return {use: n for use, n in resting.items() if n}


def slot_bytes(nbytes: int) -> int:
    """Bytes of memory, at most, for an item of so many bytes that is read past the system's cache: whole blocks, or a
    copy where these would take an eighth more (csrc/slots.cpp)."""
    copied = -(-nbytes // LINE) * LINE
    most = copied + copied // 8
    block = Reads.ALIGN
    return min(most, -(-(nbytes + block - 1) // block) * block) if -(-nbytes // block) * block <= most else copied


def resting_bytes(layout: BundleLayout, selects: bool) -> int:
    """Bytes of memory for a neuron that is read beside a GPU. selects: by a predictor, else RAM has its first row."""
    return slot_bytes(layout.pitch if selects else layout.pitch - layout.gate_bytes)


def resting_in_ram(model: Model, layers: int, threads: int, staging: int, selects: bool) -> tuple[int, int]:
    """(slots of each of the GPU's layers, bytes): what RAM needs beside the neurons that it keeps, and first rows,
    where others of these layers are read from disk when they are needed. staging: bytes of a buffer that streams all
    that the GPU does not have for long prompts, through as many that are read and as many that are gathered from them;
    0: none. selects: as of `resting_bytes`.
    """
    largest = max(FIRSTS_AT_ONCE, *(layout.group_bytes for layout in model.bundles[:layers]))
    slots, nbytes = LEAST * threads, READ_COPIES + max(2 * staging, 0 if selects else 2 * largest)
    for layout, n in zip(model.bundles[:layers], model.config.ffn_sizes, strict=False):
        nbytes += min(n, slots) * resting_bytes(layout, selects) + n * NEURON
    return slots, nbytes


def within(free: int) -> int:
    """The budget, where none is given and `free` bytes of RAM do not hold the model."""
    return free * 9 // 10


def free_for(budget: int) -> int:
    """The free bytes of which that budget is left."""
    return -(-budget * 10 // 9)


def least_slots(about: ExpertsConfig) -> int:
    """Experts that RAM must hold of a layer: those of a token, and as many that are read meanwhile."""
    return min(about.n_experts, 2 * about.router.top_k)


@dataclass(frozen=True)
class _Neurons:
    """A layer whose neurons stay on disk. decoded: the matrices that every step uses; prompts: those that only prompts
    use; read: bytes of a neuron that are read, slot: of its place in RAM; least: bytes of the fewest slots, and of what
    is there beside them; n: neurons; fewest: slots."""

    decoded: Unit
    prompts: Unit
    read: int
    slot: int
    least: int
    n: int
    fewest: int

    def slots(self, left: int) -> int:
        return min(self.n, self.fewest + max(0, left) // self.slot)


def _neurons(model: Model, work: Workload, threads: int) -> dict[int, _Neurons]:
    """By layer, where neurons can be left out and prompts find their matrices in the file."""
    found = {}
    for layer, config in enumerate(model.config.layers):
        about, layout = config.ffn, model.bundles[layer]
        if not isinstance(about, FfnConfig) or not (config.neurons.rectified or work.selector == "threshold"):
            continue
        (every,) = ffn_units(model, layer)
        if not model.converted.isdisjoint(every.names):
            continue
        # Without a predictor every step multiplies with the first matrix, which says what is read of the others.
        first = int(work.selector != "predicted")
        beside = n_groups(about.size) * layout.shared_bytes + about.size * NEURON
        read = layout.pitch - (layout.gate_bytes if first else 0)
        slot = slot_bytes(read)
        fewest = min(about.size, max(about.size // FEWEST, LEAST * threads))
        least = beside + fewest * slot
        found[layer] = _Neurons(every.first(first), every.after(first), read, slot, least, about.size, fewest)
    return found


def _lent(model: Model, work: Workload, window: int) -> int:
    """Bytes that small steps may have for neurons since prompts alone use them: the rows of a piece of a prompt beyond
    those of a small step, and a window that only prompts need."""
    if sys.platform != "linux":  # memory is not given back
        return 0
    rows = max(0, work.chunk - NEURON_TOKENS) * model.row_bytes
    return max(0, rows + window - ROUNDED)


def _fewer(neurons: Mapping[int, _Neurons], slots: Mapping[int, int], nbytes: int) -> dict[int, int]:
    """By layer the slots that fit into so many bytes beyond the fewest, of each layer the same share of its own."""
    every = sum((slots[layer] - one.fewest) * one.slot for layer, one in neurons.items())
    share = min(1.0, nbytes / every) if every else 1.0
    return {layer: one.fewest + int(share * (slots[layer] - one.fewest)) for layer, one in neurons.items()}


def _common(neurons: Mapping[int, _Neurons], nbytes: int) -> tuple[int, int]:
    """(slots that are common to all layers, bytes of a slot), with so many bytes beyond the fewest. None are where
    bundles differ or are read in place (csrc/slots.cpp), nor of one layer."""
    sizes = {one.read for one in neurons.values()}
    if len(neurons) < 2 or len(sizes) > 1:
        return 0, 0
    slot = slot_bytes(max(sizes))
    beyond = max(0, nbytes) // slot
    every = beyond + sum(one.fewest for one in neurons.values())
    if slot - max(sizes) >= LINE or every * slot > LINE << 32:  # which the kernels number in lines
        return 0, 0
    n = min(beyond, every // COMMON, max(one.n for one in neurons.values()) // MOST)
    return (n, slot) if n else (0, 0)


def _decoded(unit: Unit, neurons: Mapping[int, _Neurons]) -> Unit:
    """What of a unit every step uses."""
    for one in neurons.values():
        if set(one.prompts.names) <= set(unit.names):
            return one.decoded
    return unit


class _Hottest:
    """Which neurons of all layers RAM has: those that are needed most often. Arguments as of `plan_disk`."""

    def __init__(self, neurons: Mapping[int, _Neurons], model: Model, work: Workload, profile: Profile) -> None:
        self._neurons = neurons
        kind = cost.SELECTED if work.selector == "predicted" else cost.FIRED
        layers, slots, reads = [], [], []
        for layer, one in neurons.items():
            ffn = model.config.layers[layer].neurons
            share = cost.needed(profile.fraction(layer), ffn, kind, model.selected[layer])
            share = np.sort(cost.any_of(share, work.batch))[::-1][one.fewest :]
            layers.append(np.full(len(share), layer))
            slots.append(np.full(len(share), one.slot))
            reads.append(share * (one.slot + APART))
        order = np.argsort(-np.concatenate(reads) / np.concatenate(slots), kind="stable")
        self._layers = np.concatenate(layers)[order]
        self._slots = np.cumsum(np.concatenate(slots)[order])
        read = np.concatenate(reads)[order]
        self._left_out = np.append(np.cumsum(read[::-1])[::-1], 0.0)

    def _most(self, nbytes: int) -> int:
        return int(np.searchsorted(self._slots, nbytes, "right"))

    def read(self, nbytes: int) -> float:
        """Bytes in order that take as long as what a step reads of neurons, with so much memory beyond the fewest."""
        return float(self._left_out[self._most(nbytes)])

    def slots(self, nbytes: int) -> dict[int, int]:
        """By layer."""
        counts = np.bincount(self._layers[: self._most(nbytes)], minlength=max(self._neurons) + 1)
        return {layer: one.fewest + int(counts[layer]) for layer, one in self._neurons.items()}


def _slot_bytes(matrices: Sequence[Matrix], n: int, rows: bool) -> int:
    """rows: neurons are told apart, and the scales of down read apart; what takes nothing lies in what another has."""
    sizes = (max(one.file, one.panels) if one.panels else 0 for one in matrices)
    return sum(nbytes // n + 2 * BLOCK for nbytes in sizes) + 2 * BLOCK * rows


class _Window(NamedTuple):
    """Bytes of a window for dense matrices on disk. least: the most that an operator reads, of a prompt if that is
    more; nbytes: what the window should have."""

    least: int
    nbytes: int


def _windows(units: Sequence[Unit], prompts: Sequence[Unit], ahead: int) -> list[_Window]:
    """Windows for the first 0, 1, 2, ... units, and all. What every step reads should have the largest, and a layer's,
    so that they are read while it is used, or at least `ahead`. More would not hold others of that size: matrices that
    are used together lie side by side. What prompts alone read passes one by one, of an FFN beside what every step
    reads of it: they compute longer than they read, and memory serves neurons better."""
    alone = {unit.layer: _in_window(unit) for unit in prompts}
    of_layer: Counter[int | None] = Counter()
    ffns, most, largest = dict(alone), 0, 0  # what a prompt reads of each FFN, and the most of other operators
    windows = [_Window(*[max(alone.values(), default=0)] * 2)]
    for unit in units:
        size = _in_window(unit)
        of_layer[unit.layer] += size
        largest = max(largest, size)
        if unit.use == "panels":
            ffns[unit.layer] = size + alone.get(unit.layer, 0)
        else:
            most = max(most, size)
        least = max([most, *ffns.values()])
        every = min(of_layer.total(), largest + max(ahead, *of_layer.values()))
        windows.append(_Window(least, max(every, least)))
    return windows


def _in_window(unit: Unit) -> int:
    return unit.file + 2 * BLOCK * len(unit.names)


def _order(model: Model, division: Division) -> list[Unit]:
    """Dense units that a GPU does not have, in the order in which they leave RAM."""
    layers = range(division.layers, model.config.n_layers)
    return [
        *_spread([unit for layer in layers for unit in ffn_units(model, layer)]),
        *_spread([unit for layer in layers for unit in attention_units(model, layer)]),
        *([] if division.head else [head_unit(model)]),
    ]


def _spread(units: Sequence[Unit]) -> list[Unit]:
    """In an order whose every beginning is spread evenly: that of the bits of their numbers, reversed."""
    bits = max(1, (len(units) - 1).bit_length())
    return [units[at] for at in sorted(range(len(units)), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))]


def attention_units(model: Model, layer: int) -> tuple[Unit, ...]:
    """Of a layer's attention, in the order in which a step uses them; without what is always in RAM."""
    return model.inventory.of_layer(layer, "attention")


def ffn_units(model: Model, layer: int) -> tuple[Unit, ...]:
    """The same of its FFN, beside experts that a router selects."""
    return model.inventory.of_layer(layer, "panels")


def head_unit(model: Model) -> Unit:
    """The output head."""
    return Unit("head", None, (model.head,))


def _other(model: Model, layers: Iterable[int], head: bool) -> Counter[str]:
    """Bytes in panels of what is always in RAM, by use: routers, the matrices of latent attention's heads,
    projections. head: a GPU has the head."""
    total = Counter({"head": sum(one.panels for one in model.projections[: 1 if head else None])})
    for layer in layers:
        for use, always in (("attention", "heads"), ("panels", "router")):
            total[use] += sum(unit.panels for unit in model.inventory.of_layer(layer, always))
    return total


def _too_little(model: Model, held: Footprint, least: int, whole: int, ram: int) -> RamError:
    needs = f"{gib(whole)} of RAM" if whole < least else f"{gib(least)} of RAM even if its weights stay on disk"
    cache = f"{gib(held['kv'])} of it for the KV cache and " if held["kv"] else "of it "
    enough = min(least, whole)
    context = "--context or " if held["kv"] else ""  # a GPU that has all layers has all of the cache
    lower = f", or a lower {context}--prefill-chunk" if enough - ram < held["kv"] + held["scratch"] else ""
    return RamError(
        f"{model.name} needs {needs}, {cache}{gib(held['scratch'])} for a piece of a prompt",
        f"--ram is {gib(ram)}: give --ram {gib(enough)}",
        enough,
        lower,
    )
