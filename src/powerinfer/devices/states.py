"""The states of sequences, for models with layers that keep one for each sequence (Gated DeltaNet, Mamba2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from powerinfer import _native
from powerinfer.config import DeltaNetConfig, EngineConfig, ModelConfig, StateKind
from powerinfer.errors import RequestError
from powerinfer.kernels import cpu

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.devices.batch import Batch

Slots = tuple["NDArray[np.int32]", "NDArray[np.int32]"]
"""The slots that a step reads and writes, for each row of its page table."""

_MOST_KEPT = 8  # states of prefixes, which may take a hundred megabytes each
UNDO_TOKENS = 8
"""Tokens of a sequence in a step with drafts, at most."""

_UNKNOWN = -1  # of a state that a failed step left behind


def state_slots(requests: int, prefixes: bool, undo_tokens: int = 0) -> int:
    """Slots of a model whose layers have states, so that `requests` run together. undo_tokens: as of `StateMemory`.

    One for each request, or two where steps are undone, one for a text that is scored, and, if prefixes are found
    again, some to keep states in.
    """
    return requests * (1 + (undo_tokens > 0)) + 1 + prefixes * min(requests, _MOST_KEPT)


def tokens_to_undo(engine: EngineConfig, config: ModelConfig) -> int:
    """`undo_tokens` of a model's executor: what drafts need, where requests may have some."""
    return UNDO_TOKENS if config.states and engine.drafts_for(config) else 0


def state_bytes(config: ModelConfig, layers: slice = slice(None), undo_tokens: int = 0) -> int:
    """Bytes of a sequence's state in these layers, on the CPU; 0: none has any. undo_tokens: as of `StateMemory`."""
    return sum(_layer_bytes(kind, undo_tokens) for kind in _kinds(config, layers))


def _layer_bytes(kind: StateKind, undo_tokens: int) -> int:
    """Bytes of the convolution's last inputs and the heads' states, of what is kept of a chunk's tokens, and of the
    inputs of those that may be undone."""
    floats = cpu.round_up((kind.taps - 1) * kind.channels, cpu.LANES) + kind.width * kind.key_dim
    if kind.chunked:
        floats += _native.CHUNK * (kind.width + kind.n_key_heads * kind.key_dim + 2 * kind.n_value_heads)
    decays = kind.decays if isinstance(kind, DeltaNetConfig) else kind.n_value_heads
    of_heads = sum(cpu.round_up(n, cpu.LANES) for n in (decays, kind.n_value_heads))
    inputs = kind.channels + of_heads * bool(kind.n_key_heads)
    return 4 * (floats + undo_tokens * inputs)


def _kinds(config: ModelConfig, layers: slice) -> list[StateKind]:
    configs = config.states
    return [configs[layer] for layer in range(config.n_layers)[layers] if layer in configs]


class StateMemory:
    """Slots for states. A step reads the state of each of its sequences in one slot and leaves the new one in another,
    or in the same: so a state is kept by going on elsewhere, and nothing is ever copied.

    Of a step of up to `undo_tokens` tokens of a sequence that wrote another slot than it read, what the rules read of
    these tokens is kept, too. So if only the first of them hold, the next step replays them from the state before.

    Here are the states of the layers on the CPU, and which tokens' state a slot has on all devices."""

    def __init__(self, config: ModelConfig, slots: int, first_layer: int = 0, undo_tokens: int = 0) -> None:
        """first_layer: the first that is on the CPU."""
        layers = [
            (
                *(kind.taps, kind.n_key_heads, kind.key_dim, kind.n_value_heads, kind.value_dim),
                *(kind.chunked, kind.channel_decays),
            )
            for kind in _kinds(config, slice(first_layer, None))
        ]
        self.native = _native.States(layers, slots, undo_tokens)
        self.slots = slots
        self.undo_tokens = undo_tokens
        self._tokens = np.zeros(slots, np.int64)  # of a sequence that each state holds
        self._inputs = np.zeros((slots, 2), np.int64)  # tokens whose inputs are kept: position of the first, number

    def begin(self, batch: Batch) -> Slots:
        """The slots of a step.

        RuntimeError where a slot to read does not hold the tokens before the step's: a mistake of the caller.
        RequestError for more sequences than slots, if the batch names none.
        """
        if batch.states is None or batch.read_states is None:
            if len(batch.page_table) > self.slots:
                raise RequestError(f"{len(batch.page_table)} sequences, and states of {self.slots}: raise --max-batch")
            slots = np.arange(len(batch.page_table), dtype=np.int32)
            return slots, slots
        first, _ = runs_of(batch)
        at, row = batch.positions[first], batch.rows[first]
        written = batch.states[row]
        if batch.replayed is not None and batch.undo_states is not None:
            count = batch.replayed[row]
            again = count > 0
            at = at - count
            inputs = self._inputs[written[again]]
            if not (np.array_equal(inputs[:, 0], at[again]) and np.all(count[again] <= inputs[:, 1])):
                raise RuntimeError("the inputs of tokens to be replayed are not kept")
            written = np.concatenate([written, batch.undo_states[row[again]]])
        later = at > 0
        if not np.array_equal(self._tokens[batch.read_states[row[later]]], at[later]):
            raise RuntimeError("a sequence's state is not that of the tokens before the step")
        self._tokens[written] = _UNKNOWN
        self._inputs[written] = 0
        return batch.read_states, batch.states

    def end(self, batch: Batch) -> None:
        """The step was computed."""
        if batch.states is None or batch.read_states is None:
            return
        first, last = runs_of(batch)
        at, row = batch.positions[first], batch.rows[first]
        if batch.replayed is not None and batch.undo_states is not None:
            again = batch.replayed[row] > 0
            self._tokens[batch.undo_states[row[again]]] = at[again]
        self._tokens[batch.states[row]] = batch.positions[last] + 1
        undoable = undoable_runs(batch, (batch.read_states, batch.states), self.undo_tokens)
        self._inputs[batch.states[row[undoable]]] = np.stack([at, last + 1 - first], axis=1)[undoable]


def runs_with_slots(batch: Batch, slots: Slots) -> NDArray[np.int32]:
    """int32 [S, 4], for each row of a step's page table: its first token, their number, 0 where it has none, the slot
    that is read, -1 for a sequence that begins, and the slot that is written."""
    runs = np.zeros((len(batch.page_table), 4), np.int32)
    first, last = runs_of(batch)
    row, (_, written) = batch.rows[first], slots
    runs[row, 0], runs[row, 1] = first, last + 1 - first
    runs[row, 2] = np.where(batch.positions[first] > 0, _read_by_runs(batch, slots), -1)
    runs[row, 3] = written[row]
    return runs


def replayed_runs(batch: Batch, slots: Slots, undo_tokens: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """The same of the tokens that the step replays, int32 [S, 4], in rows of which each row of the page table has
    `undo_tokens`; and where the inputs of these are, int32 [S * undo_tokens], slot * undo_tokens + number in its step.
    None: it replays none."""
    if batch.replayed is None or batch.undo_states is None:
        return None
    first, _ = runs_of(batch)
    row, (read, written) = batch.rows[first], slots
    if not batch.replayed[row].any():
        return None
    runs = np.zeros((len(batch.page_table), 4), np.int32)
    runs[:, 0] = np.arange(len(runs)) * undo_tokens
    runs[row, 1] = count = batch.replayed[row]
    runs[row, 2] = np.where(batch.positions[first] > count, read[row], -1)
    runs[row, 3] = batch.undo_states[row]
    places = np.zeros((len(runs), undo_tokens), np.int32)
    places[row] = written[row, None] * undo_tokens + np.arange(undo_tokens)
    return runs, places.reshape(-1)


def input_places(batch: Batch, slots: Slots, undo_tokens: int) -> NDArray[np.int64] | None:
    """Rows of the inputs of the step's tokens, int64 [T], as of `replayed_runs`. None: none may be undone.

    Those of a sequence that cannot be undone are anywhere in its slot, where nobody reads them."""
    if not undo_tokens or not undoable_runs(batch, slots, undo_tokens).any():
        return None
    first, last = runs_of(batch)
    number = np.arange(len(batch.tokens)) - np.repeat(first, last + 1 - first)
    places: NDArray[np.int64] = slots[1][batch.rows] * np.int64(undo_tokens) + number % undo_tokens
    return places


def undoable_runs(batch: Batch, slots: Slots, undo_tokens: int) -> NDArray[np.bool_]:
    """Whether the tokens of each run of `runs_of` are few enough to be undone, and the state before them stays."""
    first, last = runs_of(batch)
    stays = (batch.positions[first] == 0) | (_read_by_runs(batch, slots) != slots[1][batch.rows[first]])
    undoable: NDArray[np.bool_] = stays & (last - first < undo_tokens)
    return undoable


def _read_by_runs(batch: Batch, slots: Slots) -> NDArray[np.int32]:
    """The slots from which the tokens of each run of `runs_of` go on."""
    row = batch.rows[runs_of(batch)[0]]
    if batch.replayed is None or batch.undo_states is None:
        return slots[0][row]
    return np.where(batch.replayed[row] > 0, batch.undo_states[row], slots[0][row])


def runs_of(batch: Batch) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The first and the last token of each sequence of a step."""
    change = np.flatnonzero(np.diff(batch.rows))
    return np.concatenate([[0], change + 1]), np.concatenate([change, [len(batch.rows) - 1]])
