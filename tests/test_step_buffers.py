"""What a step uploads: the numbers of a batch, of any shape and in any order of shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_device import count_pinned  # noqa: E402

from powerinfer.devices import step_buffers  # noqa: E402
from powerinfer.devices.batch import Batch  # noqa: E402
from powerinfer.devices.flags import FLAG_BYTES  # noqa: E402
from powerinfer.devices.states import input_places, replayed_runs, runs_with_slots  # noqa: E402
from powerinfer.devices.step_buffers import StepBuffers, step_bytes  # noqa: E402
from powerinfer.kernels import cpu  # noqa: E402

D_MODEL, MOST = 8, 96


def batch_of(rng: Any, sequences: int, each: int, pages: int, logits: int) -> Batch:
    """Tokens at the end of contexts of that number of pages."""
    tokens = sequences * each
    table = rng.permutation(sequences * pages).astype(np.int32).reshape(sequences, pages)
    positions = np.tile(pages * cpu.PAGE - each + np.arange(each, dtype=np.int32), sequences)
    rows = np.repeat(np.arange(sequences, dtype=np.int32), each)
    return Batch(np.zeros(tokens, np.int32), positions, rows, table, np.arange(tokens - logits, tokens, dtype=np.int32))


def check(buffers: StepBuffers, rng: Any, batch: Batch, states: bool) -> None:
    x = rng.standard_normal((len(batch.tokens), D_MODEL), np.float32)
    own = np.arange(len(batch.page_table), dtype=np.int32)
    slots = (own, own[::-1].copy()) if states else None
    step = buffers.upload(batch, x, slots)
    np.testing.assert_array_equal(step.x.numpy(), x)
    for found, wanted in (
        (step.positions, batch.positions),
        (step.rows, batch.rows),
        (step.logit_rows, batch.logit_rows),
    ):
        np.testing.assert_array_equal(found.numpy(), wanted)
    places = batch.page_table[batch.rows, batch.positions // cpu.PAGE].astype(np.int64) * cpu.PAGE
    np.testing.assert_array_equal(step.slots.numpy(), places + batch.positions % cpu.PAGE)
    assert step.slots.dtype == torch.int64
    width = step.page_table.shape[1]
    np.testing.assert_array_equal(step.page_table.numpy(), batch.page_table[:, :width])
    assert width > int(batch.positions.max()) // cpu.PAGE
    if slots is None:
        assert step.runs is None
    else:
        assert step.runs is not None
        np.testing.assert_array_equal(step.runs.numpy(), np.asarray(runs_with_slots(batch, slots)).reshape(-1, 4))


@pytest.mark.parametrize("most", [2, 64])
def test_a_step_of_any_shape_after_any_other(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Contexts of thousands of pages, which make room again for all shapes; more shapes than are kept."""
    monkeypatch.setattr(step_buffers, "_MOST_SHAPES", most)
    rng = np.random.default_rng(3)
    buffers = StepBuffers(torch.device("cpu"), MOST, D_MODEL, 16, totals=False)
    shapes = [(1, 1, 1, 1), (3, 1, 2, 3), (1, MOST, 5, 1), (4, 2, 1, 0), (1, 1, 3000, 1), (32, 1, 200, 32)]
    for _ in range(3):
        for at in rng.permutation(len(shapes)):
            for states in (False, True, False):
                check(buffers, rng, batch_of(rng, *shapes[at]), states)


def test_padded_tokens() -> None:
    """They stand for nothing, have no slot, and are zeros, whatever steps came before; the address is that of a step
    that is not padded."""
    rng, buffers = np.random.default_rng(4), StepBuffers(torch.device("cpu"), MOST, D_MODEL, 16, totals=False)
    keys = set()
    for sequences, each in ((1, 40), (2, 20), (1, 64), (1, 33), (2, 30)):
        check(buffers, rng, batch_of(rng, 1, MOST, 5, 1), False)
        batch, count = batch_of(rng, sequences, each, 4, 1), sequences * each
        x = rng.standard_normal((count, D_MODEL), np.float32)
        step = buffers.upload(batch, x, padded=64)
        np.testing.assert_array_equal(step.x[:count].numpy(), x)
        np.testing.assert_array_equal(step.positions[:count].numpy(), batch.positions)
        assert len(step.x) == len(step.rows) == len(step.slots) == 64 and not step.x[count:].any()
        assert (step.slots[:count] >= 0).all() and (step.slots[count:] == -1).all()
        assert (step.positions[count:] == -1).all() and not step.rows[count:].any()
        keys.add((step.key, step.x.data_ptr(), step.slots.data_ptr(), step.logit_rows.data_ptr()))
    assert len(keys) == 2, "of one and of two sequences"


def test_tokens_that_are_replayed_and_kept() -> None:
    """Steps with the same key have them at the same addresses, whatever came between."""
    rng, undo = np.random.default_rng(5), 3
    buffers = StepBuffers(torch.device("cpu"), MOST, D_MODEL, 16, totals=False, undo_tokens=undo)
    own = np.arange(4, dtype=np.int32)
    addresses: dict[tuple[int, ...], list[int]] = {}
    for each in (1, 3, 4, 1, 3, 4):
        batch = batch_of(rng, 4, each, 2, 4)
        for replayed in (0, 2):
            for slots in ((own, own + 4), (own + 4, own + 4)):
                again = np.array([replayed, 0, replayed, 0], np.int32)
                one = replace(batch, read_states=slots[0], states=slots[1], replayed=again, undo_states=own + 8)
                step = buffers.upload(one, rng.standard_normal((4 * each, D_MODEL), np.float32), slots)
                found, places = replayed_runs(one, slots, undo), input_places(one, slots, undo)
                tensors = [step.positions, step.slots, step.logit_rows, step.page_table, step.runs]
                assert (step.replay is None) == (found is None) == (not replayed)
                if step.replay is not None and found is not None:
                    np.testing.assert_array_equal(step.replay.runs.numpy(), found[0])
                    np.testing.assert_array_equal(step.replay.inputs.numpy(), found[1])
                    np.testing.assert_array_equal(step.replay.rows.numpy(), np.repeat(own, undo))
                    tensors += [step.replay.runs, step.replay.inputs, step.replay.rows]
                assert (step.input_places is None) == (places is None)
                if step.input_places is not None and places is not None:
                    np.testing.assert_array_equal(step.input_places.numpy(), places)
                    tensors.append(step.input_places)
                np.testing.assert_array_equal(step.positions.numpy(), one.positions)
                np.testing.assert_array_equal(step.runs.numpy(), runs_with_slots(one, slots))
                at = [part.data_ptr() for part in tensors if part is not None]
                assert addresses.setdefault(step.key, at) == at
    assert len(addresses) > 6


def test_inputs_of_layers_that_are_not_given_are_zeros() -> None:
    """Also behind a step that had some."""
    rng = np.random.default_rng(5)
    buffers = StepBuffers(torch.device("cpu"), MOST, D_MODEL, 16, totals=False, inputs=32)
    batch = batch_of(rng, 2, 3, 1, 1)
    x, inputs = rng.standard_normal((6, D_MODEL), np.float32), rng.standard_normal((6, 32), np.float32)
    for given in (inputs, None, inputs):
        step = buffers.upload(batch, x, None, given)
        assert step.inputs is not None
        np.testing.assert_array_equal(step.inputs.numpy(), np.zeros_like(inputs) if given is None else given)


@pytest.mark.parametrize(("inputs", "paired"), [(0, False), (32, True)])
def test_bytes_in_ram(inputs: int, paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that is pinned, as more rows of logits are wanted."""
    pinned_bytes = count_pinned(monkeypatch)
    buffers = StepBuffers(torch.device("cpu"), MOST, D_MODEL, 16, totals=False, inputs=inputs)
    if paired:
        buffers.pair()
    for rows in (1, 2, 3, 8, 9):
        buffers.make_room(rows)
        held = pinned_bytes()
        counted = step_bytes(MOST, D_MODEL, 16, rows, inputs=inputs, ahead=paired)
        assert held + paired * FLAG_BYTES == counted
