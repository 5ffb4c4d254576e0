"""States on a GPU after steps of which not all tokens were accepted: plain torch, the Triton kernels, and models with
layers on the stand-in for a GPU. On the CPU: test_undone_states.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import test_gpu_delta  # noqa: E402
import test_gpu_mamba  # noqa: E402
from gpu_device import device_name  # noqa: E402
from model_files import conv_gguf, delta_gguf, mamba_gguf  # noqa: E402
from speculation import LENGTH, PREFIX, UNDO, Sequence, Work, batch_of, one_by_one, some_texts, tables_of  # noqa: E402
from test_gpu_kernels import floats, kernels, on_device  # noqa: E402, F401
from test_gpu_layers import engine_of, on_gpu  # noqa: E402

from powerinfer.config import EngineConfig, ShortConvConfig  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.devices.states import input_places, replayed_runs, runs_with_slots  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolved import Resolved  # noqa: E402
from powerinfer.kernels import gpu_delta, gpu_mamba, gpu_short_conv, gpu_states  # noqa: E402
from powerinfer.kernels.gpu_types import Replay, States  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402


def short_conv() -> gpu_short_conv.ShortConv:
    about = ShortConvConfig(48, 4, bias=True)
    return gpu_short_conv.ShortConv(about, on_device(floats(1, 4, 48)), on_device(floats(2, 48)))


LAYERS: dict[str, tuple[Callable[[], Any], Any, Any, Callable[[Any], int]]] = {
    "delta, in turn": (
        lambda: test_gpu_delta.weights(test_gpu_delta.KINDS["in turn"]),
        gpu_delta.delta_net, gpu_delta.replay, lambda one: one.channels + one.width + 2 * one.n_value_heads,
    ),
    "delta, odd sizes": (
        lambda: test_gpu_delta.weights(test_gpu_delta.KINDS["odd sizes, long convolution"]),
        gpu_delta.delta_net, gpu_delta.replay, lambda one: one.channels + one.width + 2 * one.n_value_heads,
    ),
    "mamba, in groups": (
        lambda: test_gpu_mamba.weights(test_gpu_mamba.KINDS["in groups, with a norm of each"]),
        gpu_mamba.mamba, gpu_mamba.replay, lambda one: one.width + one.channels + one.n_heads,
    ),
    "short convolution": (short_conv, gpu_short_conv.short_conv, gpu_short_conv.replay, lambda one: 3 * one.size),
}  # fmt: skip
"""Of each: its weights, what computes and replays it, and numbers of a row of products."""

FIRST = [Work(1, 9, [0] * 3, 2, 3), Work(3, 0, [0] * 4, 0, 4), Work(4, 70, [0] * 5, 6, 5)]
AGAIN = [Work(1, 11, [0], 2, 3, 2, 0), Work(3, 1, [0] * 2, 0, 4, 1, 7), Work(4, 74, [0], 6, 5, 4, 6)]
"""A step, and one that replays some of its tokens: elsewhere, from nothing, in place; rows 0 and 2 have none."""


@pytest.mark.parametrize("name", LAYERS)
def test_replayed_tokens(kernels: str, name: str) -> None:  # noqa: F811
    """The state is that of the step without the others: the same bits by Triton's kernels."""
    make, layer, replay, width = LAYERS[name]
    net, tables, undo = make(), np.arange(20, dtype=np.int32).reshape(5, 4), 5
    about = net.about

    def filled() -> States:
        (states,) = gpu_states.new_states([about], 8, device_name(), undo)
        for at, part in enumerate((states.window, states.heads)):
            part.copy_(on_device(floats(6 + at, *part.shape)))
        return states

    def compute(works: list[Work], products: np.ndarray, states: States) -> None:
        batch = batch_of(works, tables)
        assert batch.read_states is not None and batch.states is not None
        runs, x = runs_with_slots(batch, (batch.read_states, batch.states)), on_device(products)
        places = input_places(batch, (batch.read_states, batch.states), undo)
        assert places is not None
        gpu_states.keep_inputs(about, x, states, on_device(places))
        layer(net, x, states, on_device(runs), on_device(batch.rows))

    products, states, wanted = floats(2, 12, width(about)), filled(), filled()
    compute(FIRST, products, states)
    batch = batch_of(AGAIN, tables)
    assert batch.read_states is not None and batch.states is not None
    found = replayed_runs(batch, (batch.read_states, batch.states), undo)
    assert found is not None
    runs, places = found
    before = [part.clone() for part in (states.window, states.heads, states.inputs)]
    rows = np.repeat(np.arange(5, dtype=np.int32), undo)
    replay(net, states, Replay(on_device(runs), on_device(rows), on_device(places)))
    pairs = zip(FIRST, AGAIN, strict=True)
    shorter = [replace(one, tokens=one.tokens[: two.replayed], write=two.undo) for one, two in pairs]
    compute(shorter, products[[0, 1, 3, 7, 8, 9, 10]], wanted)
    for slot in range(8):
        for own, kept, other in zip((states.window, states.heads), before, (wanted.window, wanted.heads), strict=False):
            if slot not in (0, 6, 7):
                np.testing.assert_array_equal(own[slot].cpu(), kept[slot].cpu())
            elif kernels == "triton":
                np.testing.assert_array_equal(own[slot].cpu(), other[slot].cpu())
            else:
                np.testing.assert_allclose(own[slot].cpu(), other[slot].cpu(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(states.inputs.cpu(), before[2].cpu())


def test_steps_that_keep_and_replay_nothing() -> None:
    tables = np.arange(20, dtype=np.int32).reshape(5, 4)
    for works, places, replayed in (
        ([Work(1, 9, [0], 2, 2)], False, False),  # in place
        ([Work(1, 9, [0] * 6, 2, 3)], False, False),  # too many
        ([Work(1, 9, [0] * 6, 2, 3), Work(2, 9, [0] * 5, 4, 5)], True, False),
        ([Work(1, 9, [0] * 6, 2, 3, 2, 4), Work(2, 9, [0], 5, 5)], False, True),
        ([Work(1, 9, [0], 2, 3, 2, 3)], False, True),  # goes on in place
        ([Work(1, 9, [0], 2, 3, 2, 4)], True, True),
    ):
        batch = batch_of(works, tables)
        assert batch.read_states is not None and batch.states is not None
        slots = batch.read_states, batch.states
        assert (input_places(batch, slots, 5) is not None, replayed_runs(batch, slots, 5) is not None) == (
            places,
            replayed,
        )
        assert input_places(batch, slots, 0) is None


GGUFS = {"delta": delta_gguf, "mamba": mamba_gguf, "conv": conv_gguf}


@pytest.fixture(scope="module", params=GGUFS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GGUFS[request.param]().write(tmp_path_factory.mktemp("model") / "m.gguf")


def split(path: Path, layers: int, undo_tokens: int = UNDO) -> SplitExecutor:
    checkpoint = open_checkpoint(path)
    share = on_gpu(layers, layers == checkpoint.config.n_layers)
    engine = engine_of(context=128, max_batch=7, prefill_chunk=128)
    return load_split(Resolved(checkpoint, engine, **share, undo_tokens=undo_tokens))


@pytest.mark.sampled
@pytest.mark.parametrize("every", [True, False], ids=["all", "one"])
@pytest.mark.usefixtures("device")
def test_random_drafts(path: Path, every: bool) -> None:
    """As on the CPU, within the rounding of steps of other sizes."""
    alone = load(open_checkpoint(path), EngineConfig(threads=1, context=128, kv_type="f32"))
    model = split(path, alone.config.n_layers if every else 1)
    rng, texts = np.random.default_rng(4), some_texts(alone, 3)
    texts[1][:PREFIX] = texts[0][:PREFIX]
    expected, tables = [one_by_one(alone, text) for text in texts], tables_of(3)
    tables[2, : PREFIX // 32] = (20, 21)
    model.forward(batch_of([Work(0, 0, texts[0][:PREFIX], 0, 14)], tables))
    sequences = [
        Sequence(row, text, expected[row], [2 * row, 2 * row + 1], 4 if row == 2 else 14, 0 if row == 2 else PREFIX)
        for row, text in enumerate(texts)
    ]
    while left := [one for one in sequences if one.at < LENGTH]:
        some = [one for one in left if rng.random() < 0.7] or left
        works = [one.work(rng, model.vocab_size) for one in some]
        logits, first = model.forward(batch_of([work for work, _ in works], tables)), 0
        for one, (work, right) in zip(some, works, strict=True):
            wanted = one.expected[one.at : one.at + right]
            assert np.abs(logits[first : first + right] - wanted).max() <= 1e-4 * np.abs(wanted).max()
            first += len(work.tokens)
            one.accept(work, right)
    with pytest.raises(RuntimeError, match="not kept"):
        model.forward(batch_of([Work(0, LENGTH, [0], 14, 0, 3, 1)], tables))
    model.close()
    alone.close()


@pytest.mark.usefixtures("device")
def test_what_inputs_take(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    config, planned = checkpoint.config, checkpoint_model(checkpoint)
    for undo_tokens in (0, 3):
        model = split(path, config.n_layers, undo_tokens)
        nbytes = sum(one.nbytes for one in model.gpu._states.values())
        assert nbytes == planned.gpu_state_bytes(7, slice(None), undo_tokens)
        model.close()
    assert planned.gpu_state_bytes(7, slice(None), 3) > planned.gpu_state_bytes(7)
    assert planned.state_bytes(7, slice(None), 3) > planned.state_bytes(7)
