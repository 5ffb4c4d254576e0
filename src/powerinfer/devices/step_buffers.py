"""Buffers for uploading a step to a GPU and downloading its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.batch import NOT_FINITE, Batch, LogitsNeed
from powerinfer.devices.flags import FLAG_BYTES
from powerinfer.devices.states import Slots, input_places, replayed_runs, runs_with_slots
from powerinfer.devices.step import Step
from powerinfer.devices.streams import Event, Streams, streams_of
from powerinfer.devices.torch_device import import_torch
from powerinfer.formats.quant import Float32
from powerinfer.kernels import candidates, cpu, gpu_candidates
from powerinfer.kernels.gpu_types import FEW, Replay, tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor, device
else:
    Tensor = device = Any


class PassedRows(NamedTuple):
    """The residual stream of a step on another device, float32 [T, d_model], and when it is there; all of them, where
    there are several."""

    x: Tensor
    ready: Event
    streams: Sequence[Tensor] = ()


def description_bytes(max_tokens: int, d_model: int, ahead: bool) -> int:
    """Bytes of RAM of the description of a step, but for long page tables; ahead: of two, with the flags of steps that
    are launched ahead."""
    return (1 + ahead) * (4 * min(max_tokens, FEW) * d_model + _NUMBERS_ROOM) + ahead * FLAG_BYTES


def step_bytes(
    max_tokens: int, d_model: int, vocab_size: int, rows: int = 1, *, inputs: int = 0, ahead: bool = False
) -> int:
    """Bytes of RAM of `StepBuffers`, with room for that many rows of logits: in powers of two, as they grow. ahead: as
    of `description_bytes`."""
    of_row = 4 * vocab_size + _LARGEST_BYTES + 4 * candidates.WORDS
    vectors = 4 * max_tokens * (d_model + inputs) + (1 << (rows - 1).bit_length()) * of_row
    return vectors + description_bytes(max_tokens, d_model, ahead)


class StepBuffers:
    """The residual stream and the description of a batch on a device, pinned memory for what is transferred.

    totals: whether the parts of an FFN are added in a buffer of their own (`Step.total`); inputs: numbers that layers
    get of a token beside the residual stream; undo_tokens: as of `StateMemory`.
    """

    def __init__(
        self,
        to: device,
        max_tokens: int,
        d_model: int,
        vocab_size: int,
        *,
        totals: bool,
        inputs: int = 0,
        undo_tokens: int = 0,
    ) -> None:
        torch = import_torch()
        self._streams = streams_of(to)
        self._vocab_size = vocab_size
        self._undo_tokens = undo_tokens
        self._x = torch.zeros((max_tokens, d_model), device=to)
        self._host_x = self._streams.pinned(self._x.shape, torch.float32)
        self._host_rows: Float32 = self._host_x.numpy()
        self._total = torch.zeros_like(self._x) if totals else None
        self._inputs = torch.zeros((max_tokens, inputs), device=to) if inputs else None
        self._host_inputs = self._streams.pinned((max_tokens, inputs), torch.float32) if inputs else None
        self._device = to
        self._saved_x: Tensor | None = None
        self._make_logits(1)
        self._description = _Description(to, self._streams, min(max_tokens, FEW) * d_model, d_model)
        self._last = self._x
        self._done = self._streams.event()

    @property
    def totals(self) -> bool:
        """Whether steps have a `Step.total`."""
        return self._total is not None

    @property
    def inputs(self) -> bool:
        """Whether layers get something of a token beside the residual stream."""
        return self._inputs is not None

    def sleep(self, on: bool) -> None:
        """Whether the host gives up its core while it waits for a result; not while a step runs."""
        self._done = self._streams.event(sleeps=on)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = self._x, self._total, self._inputs, self._largest, self._candidates, self._saved_x
        return tensor_bytes(*tensors) + self._description.nbytes

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of a step's description and its logits; they change with a step that is larger than all before."""
        return self._description.address, int(self._host_logits.data_ptr())

    def upload(
        self,
        batch: Batch,
        x: Float32 | PassedRows,
        slots: Slots | None = None,
        inputs: Float32 | None = None,
        padded: int = 0,
    ) -> Step:
        """A step on the device; nothing of the last one is under way. Its description, with the residual stream of few
        tokens, is one transfer, that of many tokens another one, and so is what layers get of its tokens. slots: of
        states, if layers have them; inputs: None: zeros. padded: the tokens that the step has there, more than FEW, of
        a batch without states: those behind the batch's are zeros, and stand for nothing; 0: as many as the batch."""
        count, rows = len(batch.tokens), x.x if isinstance(x, PassedRows) else x
        tokens = padded or count
        assert 0 < count <= tokens <= self._x.shape[0] and rows.shape == (count, self._x.shape[1])
        assert not padded or (padded > FEW and slots is None and self._inputs is None and rows is x)
        states = None if slots is None else _StateNumbers.make(batch, slots, self._undo_tokens)
        passed = x if isinstance(x, PassedRows) else None
        places = self._description.fill(batch, states, passed is None and tokens <= FEW, padded)
        if places.x is not None:
            places.x[...] = rows
        places.send()
        on_device = self._x[:tokens] if places.on_device_x is None else places.on_device_x
        if passed is not None:
            self._streams.current().wait_event(passed.ready)
            on_device.copy_(passed.x, non_blocking=True)
        elif places.on_device_x is None:
            self._host_rows[:count], self._host_rows[count:tokens] = rows, 0
            on_device.copy_(self._host_x[:tokens], non_blocking=True)
        self._last = on_device
        total = None if self._total is None else self._total[:tokens]
        on_layers = None if self._inputs is None else self._inputs[:tokens]
        if on_layers is not None and inputs is None:
            on_layers.zero_()  # it has those of an earlier step
        elif on_layers is not None and self._host_inputs is not None:
            self._host_inputs.numpy()[:tokens] = inputs
            on_layers.copy_(self._host_inputs[:tokens], non_blocking=True)
        return Step(on_device, *places.on_device, total=total, inputs=on_layers, **places.on_states)

    def pair(self) -> None:
        """Let the description of a step be written while that of the one before may still be read, and its residual
        stream be kept."""
        self._description.pair()
        self._saved_x = import_torch().zeros((min(len(self._x), FEW), self._x.shape[1]), device=self._device)

    def keep(self, step: Step) -> None:
        """Keep the residual stream of a step, of few tokens, which the step behind it overwrites."""
        assert self._saved_x is not None
        self._saved_x[: step.x.shape[0]].copy_(step.x)

    def restore(self, step: Step) -> None:
        """Bring it back; nothing of another step is under way."""
        assert self._saved_x is not None
        step.set(self._saved_x[: step.x.shape[0]])

    def left(self, batch: Batch) -> int:
        """Number of steps behind this one, which was uploaded last, that have its shape, where each sequence gets a
        token in each of them."""
        return self._description.left(batch) if self._inputs is None else 0

    def upload_ahead(self, batch: Batch) -> Float32:
        """Upload such a step, of few tokens, while the one before is under way: to the same addresses. Its residual
        stream, float32 [T, d_model], is written later to what is returned, once the device waits for it."""
        places = self._description.fill(batch, None, True)
        places.send()
        assert places.x is not None
        return places.x

    def brought(self, rows: int, needs: LogitsNeed) -> tuple[NDArray[Any], ...]:
        """Memory in which the tokens of a step's largest logits are, int64 [rows], and these; or their candidates,
        int32 [rows, WORDS]."""
        if needs == LogitsNeed.CANDIDATES:
            return (self._words[:rows],)
        return self._tokens[:rows], self._values[:rows]

    def copied_candidates(self, rows: int) -> NDArray[Any]:
        """The candidates of a step's rows, which are there, in memory of their own."""
        return self._records[:rows].copy()

    def residual(self, rows: Tensor) -> Tensor:
        """Rows of the last step's residual stream, on the device; rows: int32 [n], indices of its tokens."""
        return self._last.index_select(0, rows)

    def make_room(self, rows: int) -> None:
        """Make room for the logits of a step, or what it needs of them."""
        if rows > self._host_logits.shape[0]:
            self._make_logits(1 << (rows - 1).bit_length())

    def give(self, step: Step, logits: Tensor) -> None:
        """Bring what a step needs of its logits, float32 [rows, vocab_size], to the host, where there is room."""
        rows = len(logits)
        if step.needs == LogitsNeed.LARGEST:
            import_torch().max(logits, dim=1, out=(self._largest_logits[:rows], self._largest_tokens[:rows]))
            self._host_largest.copy_(self._largest, non_blocking=True)
        elif step.needs == LogitsNeed.CANDIDATES:
            assert step.inverse_temperatures is not None
            gpu_candidates.select(logits, step.inverse_temperatures, self._candidates[:rows])
            self._host_candidates[:rows].copy_(self._candidates[:rows], non_blocking=True)
        else:
            self._host_logits[:rows, : logits.shape[1]].copy_(logits, non_blocking=True)  # a draft's may be fewer

    def candidates(self, logits: Tensor) -> NDArray[Any]:
        """Candidates of logits, float32 [R, vocab_size], at temperature 1, in memory of their own."""
        torch = import_torch()
        records = torch.zeros((len(logits), candidates.WORDS), dtype=torch.int32, device=self._device)
        gpu_candidates.select(logits, torch.ones(len(logits), device=self._device), records)
        result: NDArray[Any] = records.cpu().numpy().view(candidates.CANDIDATES)[:, 0]
        return result

    def _make_logits(self, rows: int) -> None:
        torch = import_torch()
        self._host_logits = self._streams.pinned((rows, self._vocab_size), torch.float32)
        # Tokens of the largest logits, int64 [rows], then these logits.
        nbytes = _LARGEST_BYTES * rows
        self._largest = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._largest_tokens = self._largest[: 8 * rows].view(torch.int64)
        self._largest_logits = self._largest[8 * rows :].view(torch.float32)
        self._host_largest = self._streams.pinned(nbytes, torch.uint8)
        in_host = self._host_largest.numpy()
        self._tokens: NDArray[np.int64] = in_host[: 8 * rows].view(np.int64)
        self._values: Float32 = in_host[8 * rows :].view(np.float32)
        shape = rows, candidates.WORDS
        self._candidates = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._host_candidates = self._streams.pinned(shape, torch.int32)
        self._words: NDArray[np.int32] = self._host_candidates.numpy()
        self._records: NDArray[Any] = self._words.view(candidates.CANDIDATES)[:, 0]

    def pass_on(self, step: Step, streams: Sequence[Tensor] = ()) -> PassedRows:
        """The step's residual stream, and all of several, for another device: they stay there until the next step of
        this one."""
        ready = self._streams.event()
        ready.record(self._streams.current())
        return PassedRows(step.x, ready, streams)

    def download(self, step: Step, logits: bool) -> NDArray[Any]:
        """Result of a step, what it needs of its logits or its residual stream, once the device is done with it."""
        if not logits:
            self._host_x[: step.x.shape[0]].copy_(step.x, non_blocking=True)
        self.wait()
        rows = step.logit_rows.shape[0]
        if not logits:
            values: Float32 = self._host_rows[: step.x.shape[0]]
            return values
        if step.needs == LogitsNeed.LARGEST:
            return self._numbers(rows)
        if step.needs == LogitsNeed.CANDIDATES:
            return self._records[:rows]
        values = self._host_logits[:rows].numpy()
        return values

    def wait(self) -> None:
        """Wait for all that the device was given."""
        self._done.record()
        self._done.synchronize()

    def _numbers(self, rows: int) -> NDArray[np.int32]:
        """Tokens of the largest logits, or numbers of `NOT_FINITE`."""
        largest = self._values[:rows]
        numbers: NDArray[np.int32] = self._tokens[:rows].astype(np.int32)
        finite = np.isfinite(largest)
        if not finite.all():
            numbers[~finite] = [_NUMBERS.get(float(value), -1) for value in largest[~finite]]
        return numbers


_NUMBERS = {value: number for number, value in NOT_FINITE.items()}  # not of NaN, which nothing is equal to

_MOST_SHAPES = 64
"""Shapes whose places are kept."""

_NUMBERS_ROOM = 1 << 12
"""Bytes of the numbers of a description, but where it is longer than all before."""

_LARGEST_BYTES = 8 + 4
"""Bytes of a row's largest logit and its token."""

_ALIGNED = 64
"""Numbers in whose multiples a residual stream ends."""


@dataclass(frozen=True)
class _StateNumbers:
    """Numbers of a step of a model with states: as of the functions, whose tensors a `Step` has."""

    runs: NDArray[np.int32]
    replayed: tuple[NDArray[np.int32], NDArray[np.int32]] | None
    input_places: NDArray[np.int64] | None

    @classmethod
    def make(cls, batch: Batch, slots: Slots, undo_tokens: int) -> _StateNumbers:
        runs, replayed = runs_with_slots(batch, slots), replayed_runs(batch, slots, undo_tokens)
        return cls(runs, replayed, input_places(batch, slots, undo_tokens))

    @property
    def narrow(self) -> list[NDArray[np.int32]]:
        """The int32 numbers: runs, then the parts of `Replay`."""
        if self.replayed is None:
            return [self.runs.reshape(-1)]
        runs, places = self.replayed
        rows = np.repeat(np.arange(len(runs), dtype=np.int32), len(places) // len(runs))
        return [self.runs.reshape(-1), runs.reshape(-1), rows, places]


@dataclass(frozen=True)
class _Places:
    """The places of the numbers of a step of some shape: in pinned memory, and on the device as a `Step` has them."""

    slots: NDArray[np.int64]
    input_places: NDArray[np.int64]
    numbers: tuple[NDArray[np.int32], ...]  # positions, rows, logit_rows, page_table, and those of states
    inverse_temperatures: Float32
    x: Float32 | None
    pinned: Tensor
    uploaded: Tensor
    on_device: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # positions, rows, slots, page_table, logit_rows
    on_device_x: Tensor | None
    on_states: dict[str, Any]  # of a `Step`, and its inverse temperatures

    def send(self) -> None:
        """Upload them."""
        self.uploaded.copy_(self.pinned, non_blocking=True)


class _Description:
    """The numbers of a batch, and the residual stream of few tokens, uploaded in one transfer from memory at a fixed
    address."""

    def __init__(self, to: device, streams: Streams, most: int, d_model: int) -> None:
        """most: numbers of a residual stream at most."""
        self._device = to
        self._streams = streams
        self._most = -(-most // _ALIGNED) * _ALIGNED
        self._d_model = d_model
        self._copies, self._turn = 1, 0
        self._allocate(_NUMBERS_ROOM)

    def pair(self) -> None:
        """Have two copies in memory of the host, which are written in turn."""
        self._copies, self._turn = 2, 0
        self._allocate(self._room)

    def _allocate(self, nbytes: int) -> None:
        """Make room for so many bytes of numbers."""
        torch = import_torch()
        self._room = nbytes
        self._pinned = [self._streams.pinned(4 * self._most + nbytes, torch.uint8) for _ in range(self._copies)]
        self._uploaded = torch.zeros(4 * self._most + nbytes, dtype=torch.uint8, device=self._device)
        self._places: dict[tuple[int, ...], _Places] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self._uploaded.nbytes)

    @property
    def address(self) -> int:
        """Their address on the device."""
        return int(self._uploaded.data_ptr())

    def left(self, batch: Batch) -> int:
        """Number of tokens more of each sequence with which the table has as many columns."""
        last = _last(batch)
        return _width(batch.page_table, last) * cpu.PAGE - 1 - last

    def fill(self, batch: Batch, states: _StateNumbers | None, with_x: bool, padded: int = 0) -> _Places:
        """Write the numbers of a step; with_x: its residual stream has a place among them; padded: as of `upload`.
        Returns where they are."""
        positions, rows, table = batch.positions, batch.rows, batch.page_table
        if padded:
            more = padded - len(positions)
            positions, rows = np.pad(positions, (0, more), constant_values=-1), np.pad(rows, (0, more))
        width = _width(table, _last(batch))
        self._turn = self._copies - 1 - self._turn
        narrow = [] if states is None else states.narrow
        undoable = states is not None and states.input_places is not None
        shape = len(positions), len(batch.logit_rows), len(table), width, undoable, with_x, *map(len, narrow)
        places = self._places.get((self._turn, *shape)) or self._make_places(shape)
        within = positions % cpu.PAGE
        np.multiply(table[rows, positions // cpu.PAGE], cpu.PAGE, out=places.slots, dtype=np.int64)
        np.add(places.slots, within, out=places.slots)
        if padded:
            places.slots[len(batch.positions) :] = -1
        numbers = positions, rows, batch.logit_rows, table[:, :width], *narrow
        for place, part in zip(places.numbers, numbers, strict=True):
            place[...] = part
        if states is not None and states.input_places is not None:
            places.input_places[...] = states.input_places
        if batch.needs == LogitsNeed.CANDIDATES:
            places.inverse_temperatures[...] = 1 if batch.inverse_temperatures is None else batch.inverse_temperatures
        return places

    def _make_places(self, shape: tuple[int, ...]) -> _Places:
        """shape: tokens, rows of logits, sequences, columns of the table; whether inputs are kept, and whether the
        residual stream is among the numbers; lengths of `_StateNumbers.narrow`."""
        torch = import_torch()
        tokens, logit_rows, sequences, width, undoable, with_x, *narrow = shape
        # First x, whose rows are read in whole lines, then what is int64; what states need last, so that the other
        # places do not depend on it.
        x_words = -(-tokens * self._d_model // _ALIGNED) * _ALIGNED * with_x
        sizes = [x_words, 2 * tokens, 2 * tokens * undoable, tokens, tokens, logit_rows, sequences * width, logit_rows]
        sizes += narrow
        nbytes = 4 * sum(sizes)
        if nbytes - 4 * x_words > self._room:
            self._allocate(1 << (nbytes - 4 * x_words - 1).bit_length())
        pinned, uploaded = self._pinned[self._turn][:nbytes], self._uploaded[:nbytes]
        host_x, slots, inputs, *numbers = np.split(pinned.numpy().view(np.int32), np.cumsum(sizes[:-1]))
        numbers[3] = numbers[3].reshape(sequences, width)
        inverse = numbers.pop(4)
        device_x, wide, wide_inputs, *more = uploaded.view(torch.int32).split(sizes)
        positions, rows, logits, table, device_inverse, *more = more
        on_device = positions, rows, wide.view(torch.int64), table.view(sequences, width), logits
        on_states: dict[str, Any] = {"inverse_temperatures": device_inverse.view(torch.float32)}
        if more:
            on_states["runs"] = more[0].view(-1, 4)
        if more[1:]:
            on_states["replay"] = Replay(more[1].view(-1, 4), *more[2:])
        if undoable:
            on_states["input_places"] = wide_inputs.view(torch.int64)
        host_rows = on_device_x = None
        if with_x:
            host_rows = host_x.view(np.float32)[: tokens * self._d_model].reshape(tokens, self._d_model)
            on_device_x = device_x.view(torch.float32)[: tokens * self._d_model].view(tokens, self._d_model)
        places = _Places(
            slots.view(np.int64), inputs.view(np.int64), tuple(numbers), inverse.view(np.float32), host_rows, pinned,
            uploaded, on_device, on_device_x, on_states,
        )  # fmt: skip
        if len(self._places) == _MOST_SHAPES:
            del self._places[next(iter(self._places))]
        self._places[self._turn, *shape] = places
        return places


def _last(batch: Batch) -> int:
    """The highest position of a batch."""
    positions = batch.positions
    return int(positions[0] if len(positions) == 1 else positions.max())


def _width(table: NDArray[np.int32], last: int) -> int:
    """The columns of a page table that are in use, as a power of two: shapes hardly change from step to step."""
    most: int = table.shape[1]
    return min(most, 1 << (last // cpu.PAGE).bit_length())
