"""Buffers for uploading a step to a GPU and downloading its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.batch import NOT_FINITE, Batch
from powerinfer.devices.states import Slots, input_places, replayed_runs, runs_with_slots
from powerinfer.devices.step import Step
from powerinfer.devices.streams import Event, Streams, streams_of
from powerinfer.devices.torch_device import import_torch
from powerinfer.formats.quant import Float32
from powerinfer.kernels import cpu
from powerinfer.kernels.gpu_types import Replay, tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor, device
else:
    Tensor = device = Any


class PassedRows(NamedTuple):
    """The residual stream of a step on another device, float32 [T, d_model], and when it is there."""

    x: Tensor
    ready: Event


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
        self._make_logits(1)
        self._description = _Description(to, self._streams)
        self._done = self._streams.event()

    @property
    def totals(self) -> bool:
        """Whether steps have a `Step.total`."""
        return self._total is not None

    def sleep(self, on: bool) -> None:
        """Whether the host gives up its core while it waits for a result; not while a step runs."""
        self._done = self._streams.event(sleeps=on)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return tensor_bytes(self._x, self._total, self._inputs) + self._description.nbytes

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of a step's description and its logits; they change with a step that is larger than all before."""
        return self._description.address, int(self._host_logits.data_ptr())

    def upload(
        self, batch: Batch, x: Float32 | PassedRows, slots: Slots | None = None, inputs: Float32 | None = None
    ) -> Step:
        """A step on the device: its description, its residual stream and what layers get of its tokens, one transfer
        each; nothing of the last one is under way. slots: of states, if layers have them; inputs: None: zeros."""
        tokens = len(batch.tokens)
        rows = x.x if isinstance(x, PassedRows) else x
        assert 0 < tokens <= self._x.shape[0] and rows.shape == (tokens, self._x.shape[1])
        states = None if slots is None else _StateNumbers.make(batch, slots, self._undo_tokens)
        (positions, of_tokens, places, page_table, logit_rows), on_states = self._description.upload(batch, states)
        on_device = self._x[:tokens]
        if isinstance(x, PassedRows):
            self._streams.current().wait_event(x.ready)
            on_device.copy_(x.x, non_blocking=True)
        else:
            self._host_rows[:tokens] = x
            on_device.copy_(self._host_x[:tokens], non_blocking=True)
        total = None if self._total is None else self._total[:tokens]
        on_layers = None if self._inputs is None else self._inputs[:tokens]
        if on_layers is not None and inputs is None:
            on_layers.zero_()  # it has those of an earlier step
        elif on_layers is not None and self._host_inputs is not None:
            self._host_inputs.numpy()[:tokens] = inputs
            on_layers.copy_(self._host_inputs[:tokens], non_blocking=True)
        more: dict[str, Any] = {"total": total, "inputs": on_layers} | on_states
        return Step(on_device, positions, of_tokens, places, page_table, logit_rows, **more)

    def residual(self, rows: Tensor) -> Tensor:
        """Rows of the last step's residual stream, on the device; rows: int32 [n], indices of its tokens."""
        return self._x.index_select(0, rows)

    def logits(self, rows: int) -> Tensor:
        """The buffer for that number of rows of logits, float32 [rows, vocab_size]."""
        if rows > self._host_logits.shape[0]:
            self._make_logits(1 << (rows - 1).bit_length())
        return self._host_logits[:rows]

    def largest(self, rows: int) -> tuple[Tensor, Tensor]:
        """Buffers for the largest of each row of logits, float32 [rows], and its token, int64 [rows]; at most as many
        as `logits` was called with."""
        return self._host_largest[:rows], self._host_tokens[:rows]

    def _make_logits(self, rows: int) -> None:
        torch = import_torch()
        self._host_logits = self._streams.pinned((rows, self._vocab_size), torch.float32)
        self._host_largest = self._streams.pinned(rows, torch.float32)
        self._host_tokens = self._streams.pinned(rows, torch.int64)

    def pass_on(self, step: Step) -> PassedRows:
        """The step's residual stream for another device: it stays there until the next step of this one."""
        ready = self._streams.event()
        ready.record(self._streams.current())
        return PassedRows(step.x, ready)

    def download(self, step: Step, logits: bool) -> NDArray[Any]:
        """The logits of a step, or of one that is greedy their tokens, or its residual stream, once the device is done
        with it."""
        rows, greedy = step.logit_rows.shape[0], logits and step.greedy
        out = self.logits(rows) if logits else self._host_x[: step.x.shape[0]]
        if not logits:
            out.copy_(step.x, non_blocking=True)
        self._done.record()
        self._done.synchronize()
        if greedy:
            largest, tokens = (each.numpy() for each in self.largest(rows))
            numbers: NDArray[np.int32] = tokens.astype(np.int32)
            wrong = ~np.isfinite(largest)
            if wrong.any():
                numbers[wrong] = [_NUMBERS.get(float(value), -1) for value in largest[wrong]]
            return numbers
        values: Float32 = out.numpy()
        return values


_NUMBERS = {value: number for number, value in NOT_FINITE.items()}  # not of NaN, which nothing is equal to

_MOST_SHAPES = 64
"""Shapes whose places are kept."""


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
    pinned: Tensor
    uploaded: Tensor
    on_device: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # positions, rows, slots, page_table, logit_rows
    on_states: dict[str, Any]  # of a `Step`


class _Description:
    """The numbers of a batch, uploaded in one transfer from memory at a fixed address."""

    def __init__(self, to: device, streams: Streams) -> None:
        self._device = to
        self._streams = streams
        self._allocate(1 << 12)

    def _allocate(self, nbytes: int) -> None:
        torch = import_torch()
        self._pinned = self._streams.pinned(nbytes, torch.uint8)
        self._uploaded = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._places: dict[tuple[int, ...], _Places] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self._uploaded.nbytes)

    @property
    def address(self) -> int:
        """Their address on the device."""
        return int(self._uploaded.data_ptr())

    def upload(
        self, batch: Batch, states: _StateNumbers | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], dict[str, Any]]:
        """positions, rows, slots, page_table and logit_rows of a `Step`, and its tensors for states."""
        positions, rows, table = batch.positions, batch.rows, batch.page_table
        # The columns that are in use, as a power of two: shapes hardly change from step to step.
        width = min(table.shape[1], 1 << int(int(positions.max()) // cpu.PAGE).bit_length())
        narrow = [] if states is None else states.narrow
        undoable = states is not None and states.input_places is not None
        shape = len(positions), len(batch.logit_rows), len(table), width, undoable, *map(len, narrow)
        places = self._places.get(shape) or self._make_places(*shape)
        within = positions % cpu.PAGE
        np.multiply(table[rows, positions // cpu.PAGE], cpu.PAGE, out=places.slots, dtype=np.int64)
        np.add(places.slots, within, out=places.slots)
        numbers = positions, rows, batch.logit_rows, table[:, :width], *narrow
        for place, part in zip(places.numbers, numbers, strict=True):
            place[...] = part
        if states is not None and states.input_places is not None:
            places.input_places[...] = states.input_places
        places.uploaded.copy_(places.pinned, non_blocking=True)
        return places.on_device, places.on_states

    def _make_places(
        self, tokens: int, logit_rows: int, sequences: int, width: int, undoable: bool, *narrow: int
    ) -> _Places:
        """undoable: inputs are kept; narrow: lengths of `_StateNumbers.narrow`."""
        torch = import_torch()
        # First what is int64; what states need last, so that the other places do not depend on it.
        sizes = [2 * tokens, 2 * tokens * undoable, tokens, tokens, logit_rows, sequences * width, *narrow]
        nbytes = 4 * sum(sizes)
        if nbytes > len(self._pinned):
            self._allocate(1 << (nbytes - 1).bit_length())
        pinned, uploaded = self._pinned[:nbytes], self._uploaded[:nbytes]
        slots, inputs, *numbers = np.split(pinned.numpy().view(np.int32), np.cumsum(sizes[:-1]))
        wide, wide_inputs, positions, rows, logits, table, *more = uploaded.view(torch.int32).split(sizes)
        on_device = positions, rows, wide.view(torch.int64), table.view(sequences, width), logits
        numbers[3] = numbers[3].reshape(sequences, width)
        on_states: dict[str, Any] = {}
        if more:
            on_states["runs"] = more[0].view(-1, 4)
        if more[1:]:
            on_states["replay"] = Replay(more[1].view(-1, 4), *more[2:])
        if undoable:
            on_states["input_places"] = wide_inputs.view(torch.int64)
        wide_numbers = slots.view(np.int64), inputs.view(np.int64)
        places = _Places(*wide_numbers, tuple(numbers), pinned, uploaded, on_device, on_states)
        if len(self._places) == _MOST_SHAPES:
            del self._places[next(iter(self._places))]
        self._places[tokens, logit_rows, sequences, width, undoable, *narrow] = places
        return places
