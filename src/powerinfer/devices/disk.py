"""The disk as a tier below RAM: what of a model stays in its files, and the reads that bring it into memory."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.devices.rankings import Residents
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.bundle_memory import own_pages
from powerinfer.formats.tensors import RawTensor

if TYPE_CHECKING:
    from powerinfer.formats.expert_rows import ExpertRows
    from powerinfer.formats.mapped import MappedFile
    from powerinfer.formats.quant import Bytes
    from powerinfer.formats.tensors import RestingTensor


@dataclass(frozen=True)
class OnDisk:
    """The part of a model that stays on disk while it runs, and how much of it RAM holds at a time.

    matrices: canonical names of those that pass through a window of `window` bytes, in the order in which a step uses
    them. experts, neurons: by layer the number of those in RAM, where the layer's rest on disk; of experts that a GPU
    has some of, beside those. direct: reads go past the system's cache; why: for people. policy: of `DISK_POLICIES`,
    says which experts stay; frequencies: of each layer's experts, the share of the tokens that select it, None: not
    known. prefetch: experts, and neurons that predictors select, are guessed a layer ahead, and read early.
    neuron_policy: says which neurons stay. lent: by layer the number of neurons that RAM has room for while a prompt is
    computed, where it needs the memory of the others; lends_window: whether neurons have the window's memory, too,
    since small steps need none. common: for how many neurons RAM has room beside `neurons`, whichever layer needs it
    for a while; all layers are in one memory then, in slots of `slot_bytes`, and share what is lent, too.
    """

    matrices: frozenset[str] = frozenset()
    window: int = 0
    experts: Mapping[int, int] = field(default_factory=dict)
    neurons: Mapping[int, int] = field(default_factory=dict)
    direct: bool = True
    why: str = ""
    policy: str = "lfu"
    frequencies: Mapping[int, NDArray[np.float64]] | None = None
    prefetch: bool = True
    neuron_policy: str = "lfu"
    lent: Mapping[int, int] = field(default_factory=dict)
    lends_window: bool = False
    common: int = 0
    slot_bytes: int = 0

    @property
    def anything(self) -> bool:
        return bool(self.matrices or self.experts or self.neurons)


class _SideReads(threading.local):
    """Reads beside those of the steps, and the memory that they read to, of each thread."""

    def __init__(self) -> None:
        self.reads: _native.Reads | None = None
        self.memory: Bytes | None = None


class DiskTier:
    """The files of a model that is read while it runs, and what of it stays in them. about: `OnDisk`; reads: of all
    that a step needs."""

    def __init__(
        self,
        about: OnDisk,
        files: Sequence[MappedFile],
        places: Iterable[tuple[int, int]] = (),
        reads: _native.Reads | None = None,
        rows: Mapping[int, ExpertRows] | None = None,
    ) -> None:
        """files: of the model, and of its bundles; places: (file, offset) of `about.matrices`.

        reads: of the files in that order, None: of the disk itself; rows: of experts whose neurons are told apart, by
        layer. ModelError if a file cannot be read.
        """
        self.about = about
        self.rows = rows or {}
        self._files = list(files)
        self._begin = [file.view().ctypes.data for file in self._files]
        self._streamed = frozenset(places)
        self.reads = reads or read_files(self._files, about.direct)
        self._side = _SideReads()
        self._gathered: Bytes | None = None
        self._read_side_reads = np.zeros(4)  # reads, bytes, seconds, and those of them that a step waited
        self.window = _native.Window(self.reads, about.window) if about.window else None
        self.slots: dict[int, _native.Slots] = {}  # of layers whose neurons are on disk
        self._sums: dict[int, _native.NeuronSum] = {}  # likewise
        self._rest: list[tuple[_native.Slots, NDArray[np.int32]]] = []  # neurons that are to be read at the start
        self._experts: dict[int, _native.Experts] = {}  # by layer
        self._residents = Residents(about.policy)  # experts in RAM
        self._neurons = Residents(about.neuron_policy)
        self._cleared: dict[str, float] = {}
        self._in_step = False
        self._in_prompt = False

    def place(self, data: Bytes) -> tuple[int, int] | None:
        """(file, offset) of a view of one of the files; None for other data."""
        address = data.ctypes.data
        for number, (file, begin) in enumerate(zip(self._files, self._begin, strict=True)):
            if begin <= address < begin + file.size:
                return number, address - begin
        return None

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None) -> _native.Matrix | None:
        """A matrix that passes through the window; None: the tensor is not one of those."""
        place = self.place(tensor.data)
        if place is None or place not in self._streamed:
            return None
        rows, cols = tensor.shape
        return _native.disk_matrix(tensor.type, rows, cols, *place, row_map, tensor.scales)

    def expert_slots(self, layer: int, matrices: Sequence[RestingTensor]) -> _native.Slots:
        """Memory for some experts of a layer. matrices: of all of them, in the order of its parts."""
        parts = [_native.Resting.matrices(one.type, one.shape[1], one.shape[2], one.places) for one in matrices]
        return _native.Slots(self.reads, parts, matrices[0].shape[0], self.about.experts[layer])

    def expert_row_slots(self, layer: int, up: RestingTensor | None) -> _native.Slots:
        """The same of experts whose neurons are told apart: up, and down as `rows`. up: of all of them, None: it is
        in these, too."""
        layer_rows, parts = self.rows[layer], []
        if up is not None:
            parts.append(_native.Resting.matrices(up.type, up.shape[1], up.shape[2], up.places))
        for data, later in ((layer_rows.rows, True), (layer_rows.scales, False)):
            if data is not None:
                place = self.place(data)
                assert place is not None
                parts.append(_native.Resting(*place, data.shape[1], data.shape[1], later=later))
        return _native.Slots(self.reads, parts, len(layer_rows.rows), self.about.experts[layer])

    def add_experts(self, layer: int, op: _native.Experts, slots: _native.Slots) -> None:
        """The operator that uses the slots of a layer. RequestError for a policy that lacks a profile."""
        frequencies = self.about.frequencies
        _add(self._residents, op.uses, slots.priority, None if frequencies is None else frequencies[layer])
        self._experts[layer] = op

    def read(self, matrices: Sequence[RestingTensor], number: int) -> list[RawTensor]:
        """The matrices of one number of matrices [n, out, in], [out, in] as they are stored, valid until this thread's
        next call: any thread reads for itself. ModelError if they cannot be read."""
        read = self._read_all([(*one.places[number], one.each_nbytes) for one in matrices])
        return [one.matrix(number, data) for one, data in zip(matrices, read, strict=True)]

    def read_rows(self, rows: Bytes) -> Bytes:
        """The bytes of a view [n, bytes] of one of the files, without gaps, which a step reads from it: valid and
        failing as of `read`."""
        place = self.place(rows)
        assert place is not None and rows.flags.c_contiguous
        before = self._read_side_reads[2]
        (read,) = self._read_all([(*place, rows.nbytes)])
        self._read_side_reads[3] += self._read_side_reads[2] - before
        return read.reshape(rows.shape)

    def end_reads(self) -> None:
        """Free what this thread reads with and to, until it reads again: steps and copies have threads of their own."""
        self._side.reads = self._side.memory = None

    def gathering(self, nbytes: int) -> Bytes:
        """Memory for what is gathered from `read_rows`, uint8 [nbytes]: one for all, until the next call."""
        if self._gathered is None or len(self._gathered) < nbytes:
            self._gathered = own_pages(nbytes)
        return self._gathered[:nbytes]

    def _read_all(self, places: Sequence[tuple[int, int, int]]) -> list[Bytes]:
        """places: (file, offset, bytes)."""
        side = self._side
        reads = side.reads = side.reads or read_files(self._files, self.about.direct)
        at, begin, align = 0, [], reads.ALIGN
        for _, offset, nbytes in places:  # past the cache, what is read lies in a block of memory as in its file
            begin.append(at + offset % align)
            at = -(-(begin[-1] + nbytes) // align) * align
        # One block for all: the reads keep what they were given until they are closed.
        memory, side.memory = side.memory, None
        if memory is None or len(memory) < at:
            memory = own_pages(sum(-(-nbytes // align) * align + align for _, _, nbytes in places))
        begun = time.perf_counter()
        with self.reading():
            wanted = [(*place, first) for place, first in zip(places, begin, strict=True)]
            reads.wait(reads.begin(wanted, memory))
        side.memory = memory  # not after a failure: the disk may write there yet
        self._read_side_reads[:3] += len(places), sum(nbytes for *_, nbytes in places), time.perf_counter() - begun
        return [memory[first : first + nbytes] for first, (*_, nbytes) in zip(begin, places, strict=True)]

    def neuron_memory(self, slots: int) -> _native.SlotMemory | None:
        """Memory for so many neurons of all layers, and those that are common; None: each layer has its own."""
        common = self.about.common
        return _native.SlotMemory(slots + common, self.about.slot_bytes, common) if common else None

    def add_neurons(
        self,
        layer: int,
        slots: _native.Slots,
        neurons: _native.NeuronSum,
        frequency: NDArray[np.float64] | None,
        hottest: NDArray[np.int32] | None = None,
    ) -> None:
        """The neurons of a layer, and their slots; of those that fire most often it reads the ones that prompts leave,
        and `fill` the others. frequency: [neurons], the share of the tokens that each fires for, None: not known.
        hottest: those that memory has at the start, None: as many as there are slots. ModelError if they cannot be
        read, RequestError for a policy that lacks a profile."""
        _add(self._neurons, neurons.uses, slots.priority, frequency)
        self.slots[layer], self._sums[layer] = slots, neurons
        if frequency is None:
            return
        if hottest is None:
            hottest = np.argsort(-frequency, kind="stable")[: slots.slots].astype(np.int32)
        room = self.about.lent.get(layer, slots.slots)
        _read(slots, hottest[:room])
        if room < len(hottest):
            self._rest.append((slots, hottest[room:]))

    def fill(self) -> None:
        """Read what is to be in memory besides, when all layers are there. ModelError if it cannot be read."""
        for slots, items in self._rest:
            _read(slots, items)
        self._rest.clear()

    def begin(self, tokens: int, forget: Callable[[], None]) -> None:
        """Begin a step of that many tokens. What one that failed has used counts for nothing. forget: gives back the
        memory of a step's rows. ModelError if the disk does not answer."""
        if self._in_step:
            self._residents.forget()
            self._neurons.forget()
        self._in_step = True
        prompt = tokens > _native.NEURON_TOKENS
        if self.about.lent and prompt != self._in_prompt:
            with self.reading():
                self._lend(prompt, forget)

    def _lend(self, prompt: bool, forget: Callable[[], None]) -> None:
        """Prompts use memory that small steps have for neurons. Whoever has it gives it back first."""
        if not prompt:
            forget()
            if self.window is not None and self.about.lends_window:
                self.window.forget()
        slots_lent: Counter[_native.SlotMemory] = Counter()
        for layer, slots in self.slots.items():
            slots_lent[slots.memory] += self.about.lent[layer]
        for memory, n in slots_lent.items():
            memory.use(n if prompt else memory.slots)
        self._in_prompt = prompt

    def observe(self, tokens: int) -> None:
        """Rank, after a step of that many tokens, what leaves memory first in the next one."""
        self._in_step = False
        if self._experts:
            self._residents.observe(tokens)
        if self.slots and tokens <= _native.NEURON_TOKENS:  # longer ones read all neurons, or none
            self._neurons.observe(tokens)

    def report(self) -> dict[str, Any]:
        """A report of what was read since the last `clear`, not while a step runs.

        mode; bytes; read_gb_s: while the disk was reading, None without reads; stall_seconds: that steps waited; of
        neurons and experts wanted, how many RAM had: hit_rate, None where none is on disk; of those read because they
        were expected, how many were needed: guess_rate, None where none was; expert_row_bytes: of the bytes those of
        rows of down, of experts whose neurons are told apart; small_reads, joined_reads: reads of
        neurons, and in how many the disk read them, since neighbours are read at once.
        """
        since = self.counts()
        return {
            "mode": f"{self.reads.engine}, {'direct' if self.reads.direct else 'cached'}",
            "bytes": int(since["bytes"]),
            "read_gb_s": since["bytes"] / since["active"] / 1e9 if since["active"] else None,
            "stall_seconds": since["waited"],
            "hit_rate": since["hits"] / since["wanted"] if since["wanted"] else None,
            "guess_rate": since["right"] / since["guessed"] if since["guessed"] else None,
            "expert_row_bytes": int(since["rows"]),
            "small_reads": int(since["small"]),
            "joined_reads": int(since["joined"]),
        }

    def counts(self) -> dict[str, float]:
        """Counts since the last `clear`, not while a step runs.

        wanted: experts and neurons that steps used; hits: those of them that were in memory when the step began;
        guessed: those that were read because they were expected; right: those of them that were needed; rows: bytes of
        down that were read of experts whose neurons are told apart; reads, bytes:
        of everything that was read, the window's too; small: of the reads those of neurons that lie too closely to be
        read in place, joined: in how many the disk read them; waited: seconds in which steps waited for reads; active:
        seconds in which any was under way.
        """
        return {name: value - self._cleared.get(name, 0) for name, value in self.totals().items()}

    def clear(self) -> None:
        """Begin to count anew."""
        self._cleared = self.totals()

    def totals(self) -> dict[str, float]:
        """`counts` since the model was loaded."""
        read = self.reads.stats()
        counted = [one.disk_counts() for each in (self._sums, self._experts) for one in each.values()]
        items = {name: float(sum(one[name] for one in counted)) for name in ("wanted", "hits", "guessed", "right")}
        of_reads = ("reads", "bytes", "small", "joined", "waited", "active")
        items["rows"] = float(sum(one.disk_counts()["rows"] for one in self._experts.values()))
        items |= {name: float(getattr(read, name)) for name in of_reads}
        for name, more in zip(("reads", "bytes", "active", "waited"), self._read_side_reads.tolist(), strict=True):
            items[name] += more
        return items

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which reads that fail are a `ModelError`, or a `ChangedError`, of one line."""
        try:
            yield
        except _native.ReadError as error:
            self.check()
            raise ModelError(str(error)) from None

    def check(self) -> None:
        """ChangedError if a file was changed since it was opened: what was read from it may be of both."""
        for file in self._files:
            file.check_unchanged()


def _add(
    residents: Residents, uses: NDArray[np.int32], priority: NDArray[np.float32], frequency: NDArray[np.float64] | None
) -> None:
    try:
        residents.add(uses, priority, frequency)
    except ValueError as error:
        raise RequestError(f"{error}: run `powerinfer profile`, or choose another --disk-policy") from None


def _read(slots: _native.Slots, items: NDArray[np.int32]) -> None:
    """Read items into memory, which has room for them."""
    try:
        slots.want(np.sort(items))
        slots.wait()
    except _native.ReadError as error:
        raise ModelError(str(error)) from None
    slots.let_go()
    slots.clear()


Reads = _native.Reads
"""Reads of files that go on while the caller computes; OSError where they fail."""


def read_files(files: Sequence[MappedFile], direct: bool) -> Reads:
    """Reads of files that are open. ModelError if one cannot be opened again, or is no longer the same."""
    try:
        return _native.Reads([(os.fspath(file.path), file.size) for file in files], direct)
    except _native.ReadError as error:
        raise ModelError(str(error)) from None
