"""States after steps of which not all tokens were accepted: what was is replayed from the state before, and every token
has the bits of decoding one at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from families import case_named, random_model, save
from model_files import conv_gguf, delta_gguf, mamba_gguf
from speculation import LENGTH, PREFIX, UNDO, Sequence, Work, batch_of, one_by_one, some_texts, tables_of

from powerinfer import _native
from powerinfer.config import EngineConfig
from powerinfer.devices.cpu import CpuExecutor, Drafting
from powerinfer.devices.states import state_bytes
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.models import load

GGUFS = {"delta": delta_gguf, "mamba": mamba_gguf, "conv": conv_gguf}
CASES = ("qwen3-next", "granite-h", "falcon-h1")
"""Models of `families`: value heads that share keys; groups of heads; Mamba2 beside attention."""


@pytest.fixture(scope="module", params=[*GGUFS, *CASES])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if request.param in GGUFS:
        return GGUFS[request.param]().write(folder / "m.gguf")
    case = case_named(request.param)
    config = case.config()
    return save(case, config, random_model(case, config, 3), "folder", folder)


def speculating(path: Path, undo_tokens: int = UNDO) -> CpuExecutor:
    engine = EngineConfig(threads=2, context=128, max_batch=7)
    return load(open_checkpoint(path), engine, drafting=Drafting(undo_tokens))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_random_drafts_change_no_bit(path: Path, seed: int) -> None:
    """Some sequences begin, some go on from one kept state, which stays; some pause, some have the step of a prompt."""
    model, rng = speculating(path), np.random.default_rng(seed)
    texts = some_texts(model, 5)
    for text in texts[1:3]:
        text[:PREFIX] = texts[0][:PREFIX]
    expected = [one_by_one(model, text) for text in texts]
    tables = tables_of(5)
    tables[3:, : PREFIX // 32] = np.arange(20, 24).reshape(2, 2)
    shared = 14
    model.forward(batch_of([Work(0, 0, texts[0][:PREFIX], 0, shared)], tables))
    sequences = [
        Sequence(row, text, expected[row], [2 * row, 2 * row + 1], 0 if row > 2 else shared, 0 if row > 2 else PREFIX)
        for row, text in enumerate(texts)
    ]
    while left := [one for one in sequences if one.at < LENGTH]:
        some = [one for one in left if rng.random() < 0.7] or left
        rng.shuffle(some)  # type: ignore[arg-type]
        works = [one.work(rng, model.vocab_size) for one in some]
        logits, first = model.forward(batch_of([work for work, _ in works], tables)), 0
        for one, (work, right) in zip(some, works, strict=True):
            assert np.array_equal(logits[first : first + right], one.expected[one.at : one.at + right])
            first += len(work.tokens)
            one.accept(work, right)
    assert len(set().union(*(one.patterns for one in sequences))) > 25
    logits = model.forward(batch_of([Work(0, PREFIX, texts[0][PREFIX:], shared, 0)], tables))
    assert np.array_equal(logits, expected[0][PREFIX:]), "the kept state stays"
    model.close()


def test_a_state_in_place_goes_on_from_what_is_replayed(path: Path) -> None:
    """The step after a speculation may write the slot that gets the state behind the replayed tokens."""
    model = speculating(path)
    text = some_texts(model, 1)[0]
    expected, tables = one_by_one(model, text), tables_of(1)
    model.forward(batch_of([Work(0, 0, text[:30], 0, 0)], tables))
    model.forward(batch_of([Work(0, 30, text[30:36], 0, 1)], tables))
    logits = model.forward(batch_of([Work(0, 33, text[33:34], 0, 1, 3, 1)], tables))
    assert np.array_equal(logits, expected[33:34])
    logits = model.forward(batch_of([Work(0, 34, text[34:36], 1, 1)], tables))
    assert np.array_equal(logits, expected[34:36])
    model.forward(batch_of([Work(0, 36, text[36:44], 1, 2)], tables))  # none of which is accepted
    logits = model.forward(batch_of([Work(0, 36, text[36:], 1, 2)], tables))
    assert np.array_equal(logits, expected[36:])
    model.close()


def test_what_cannot_be_replayed(path: Path) -> None:
    model = speculating(path)
    text, tables = some_texts(model, 1)[0], tables_of(2)
    tables[1] = np.arange(8, 12)

    def run(*works: Work) -> None:
        model.forward(batch_of(list(works), tables))

    def refuse(*works: Work) -> None:
        with pytest.raises(RuntimeError):
            run(*works)

    run(Work(0, 0, text[:30], 0, 0))
    run(Work(0, 30, text[30:36], 0, 1))
    again = Work(0, 33, text[33:35], 0, 1, 3, 2)
    refuse(replace(again, read=1))  # holds 36 tokens
    refuse(replace(again, read=2))  # holds nothing
    refuse(replace(again, write=2))  # has no inputs
    refuse(replace(again, at=32, tokens=text[32:34]))  # 29 tokens before
    refuse(replace(again, replayed=2))
    refuse(replace(again, at=37, tokens=text[37:39], replayed=7))  # more than the step had
    run(again)
    refuse(again)  # slot 1 has the inputs of the step at 33
    run(replace(again, at=34, tokens=text[34:43], read=2, replayed=1, undo=2))  # too many tokens to be undone
    refuse(Work(0, 36, text[36:38], 2, 1, 2, 2))
    run(Work(0, 43, text[43:45], 1, 1))  # in place: the state before is lost
    refuse(Work(0, 44, text[44:46], 1, 1, 1, 2))
    model.close()


def test_slots_that_a_native_step_refuses(path: Path) -> None:
    model = speculating(path)
    assert model._states is not None and model._states.native.undo_tokens == UNDO
    text, tables = some_texts(model, 1)[0], tables_of(2)
    tables[1] = np.arange(8, 12)
    batch = batch_of([Work(0, 5, text[:1], 0, 1, 3, 2), Work(1, 5, text[:1], 3, 4, 3, 5)], tables)
    batch = replace(batch, logit_rows=batch.logit_rows[:0])
    assert batch.replayed is not None and batch.undo_states is not None
    for name, row, value, why in (
        ("undo_states", 0, model._states.slots, "outside its memory"),
        ("undo_states", 0, -1, "outside its memory"),
        ("undo_states", 0, 5, "two sequences write"),
        ("undo_states", 0, 4, "two sequences write"),
        ("undo_states", 0, 3, "another one writes"),
        ("read_states", 0, model._states.slots, "outside its memory"),
        ("replayed", 0, -1, "more tokens are replayed"),
        ("replayed", 0, 6, "more tokens are replayed"),
    ):
        slots = np.array(getattr(batch, name))
        slots[row] = value
        wrong = replace(batch, **{name: slots})
        model.slots = (wrong.read_states, wrong.states)  # type: ignore[assignment]
        with pytest.raises(ValueError, match=why):
            model._run(wrong, 0, model._program.size)
    model.slots = batch.read_states, batch.states  # type: ignore[assignment]
    for missing in ({"undo_states": None}, {"replayed": None}, {"replayed": batch.replayed[:1]}):
        with pytest.raises(ValueError, match=r"belong together|differ in length"):
            model._run(replace(batch, **missing), 0, model._program.size)
    far = replace(batch, positions=batch.positions + 20, replayed=batch.replayed + 6)
    with pytest.raises(ValueError, match="more tokens are replayed"):
        model._run(far, 0, model._program.size)
    model.close()


def test_inputs_take_memory_only_where_they_are_wanted(path: Path) -> None:
    config = open_checkpoint(path).config
    for undo_tokens in (0, 1, UNDO):
        model = speculating(path, undo_tokens)
        states, choice = model._states, model.choices.states
        assert states is not None and choice is not None
        assert states.native.slot_bytes == state_bytes(config, undo_tokens=undo_tokens) == choice.value.nbytes
        model.close()
    each = sum(
        kind.channels + (2 * -(-kind.n_value_heads // _native.LANES) * _native.LANES if kind.n_key_heads else 0)
        for kind in config.states.values()
    )
    assert state_bytes(config, undo_tokens=UNDO) - state_bytes(config) == 4 * UNDO * each


def test_too_many_tokens_to_be_undone() -> None:
    for undo_tokens in (-1, 17):
        with pytest.raises(ValueError, match="at most 16 tokens"):
            _native.States([(3, 0, 0, 3, 16, False, False)], 2, undo_tokens)


def test_nothing_is_replayed_where_nothing_is_kept(path: Path) -> None:
    model = speculating(path, 0)
    text, tables = some_texts(model, 1)[0], tables_of(1)
    model.forward(batch_of([Work(0, 0, text[:30], 0, 0)], tables))
    model.forward(batch_of([Work(0, 30, text[30:36], 0, 1)], tables))
    with pytest.raises(RuntimeError, match="not kept"):
        model.forward(batch_of([Work(0, 33, text[33:35], 0, 1, 3, 2)], tables))
    model.close()
