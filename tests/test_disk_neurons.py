"""Neurons that rest on disk: the same bits as from memory, whatever the slots hold, and failures of the disk."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
from model_files import family_gguf
from sparse_models import give_bundles, give_profile, predictors_of, some_neurons, tiny_llama

from powerinfer import ModelError, RequestError, _native
from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch, StoppedError
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.disk import DiskTier, OnDisk
from powerinfer.devices.rankings import DISK_POLICIES
from powerinfer.errors import demand
from powerinfer.formats.bundle_types import choose_types
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.predictor_file import write_predictor
from powerinfer.hybrid.load import load_resolved
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import Resolved, needs
from powerinfer.models import load
from powerinfer.placement.budget import Workload
from powerinfer.placement.disk import DiskPlan, plan_disk
from powerinfer.placement.shapes import checkpoint_model
from powerinfer.prepare.packing import pack
from powerinfer.sizes import read_size
from powerinfer.sparsity.attach import CpuSparsity, attach
from powerinfer.sparsity.selection import Selection, select

NEURONS = 384
FEWEST = 128  # slots that two threads need
TYPES = [("F16", "F16"), ("BF16", "Q8_0"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q8_0", "Q4_0X32"), ("Q4_1", "Q4_1X32")]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "FF", NEURONS)


def engine_of(selector: str, **more: Any) -> EngineConfig:
    options = {"threads": 1, "prefill_chunk": 64, "max_batch": 4, "context": 128, "trial": False, "recall_every": 0}
    return EngineConfig(**(options | {"selector": selector} | more))


def model(folder: Path, types: tuple[str, str] = ("F16", "F16"), activation: str = "relu") -> Path:
    """With bundles, and predictors that select seven in ten neurons."""
    path = folder / "m.gguf"
    return prepared(
        family_gguf("opt").write(path)
        if activation == "opt"
        else tiny_llama(path, activation, 0.5 if activation == "fatrelu" else False),
        types,
    )


def prepared(path: Path, types: tuple[str, str]) -> Path:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    pack(checkpoint, None, choose_types(checkpoint, *types))
    about, predictors = predictors_of(some_neurons(len(config.neurons), NEURONS), config.d_model)
    layers = [about if size else None for size in config.ffn_sizes]
    write_predictor(checkpoint, None, "F16", layers, predictors)
    return path


@dataclass
class Opened:
    executor: CpuExecutor
    sparsity: CpuSparsity
    tier: DiskTier
    selection: Selection


def in_memory(path: Path, selector: str, **more: Any) -> CpuExecutor:
    """Every small step as from disk."""
    engine, checkpoint = engine_of(selector, **more), open_checkpoint(path)
    executor = load(checkpoint, engine)
    attach(executor, checkpoint, engine, select(checkpoint, engine), list)
    for ffn in executor.ffns.values():
        ffn.set_ways({32: "predicted" if selector == "predicted" else "exact"})
    return executor


def tier_of(
    checkpoint: Checkpoint,
    selection: Selection,
    slots: int,
    direct: bool = True,
    policy: str = "lfu",
    gates: bool = False,
    lent: int | None = None,
    prefetch: bool = True,
    common: int = 0,
    **emulated: Any,
) -> DiskTier:
    """What dense steps alone read passes through a window; of the neurons of every layer memory has `slots`, and all
    share as many as are common. gates: the first matrix of every FFN passes through the window, too. lent: of the slots
    those that prompts leave."""
    assert selection.bundles is not None
    files = [*checkpoint.files, selection.bundles.file]
    names = [
        f"layers.{layer}.{name}"
        for layer, about in checkpoint.config.neurons.items()
        for name in about.matrices[0 if selection.predictors or gates else 1 :]
    ]
    places = [place for name in names if (place := checkpoint.rests_at(name)) is not None]
    assert len(places) == len(names)
    reads = _native.Reads([(os.fspath(file.path), file.size) for file in files], direct, **emulated)
    neurons = dict.fromkeys(checkpoint.config.neurons, slots)
    fewer = {} if lent is None else dict.fromkeys(neurons, lent)
    about = OnDisk(
        frozenset(names), 512 << 10, neurons=neurons, direct=direct, neuron_policy=policy, lent=fewer,
        lends_window=not gates, prefetch=prefetch, common=common, slot_bytes=selection.bundles.layouts[0].pitch,
    )  # fmt: skip
    return DiskTier(about, files, places, reads)


def opened(path: Path, selector: str, slots: int, direct: bool = True, threads: int = 1, **more: Any) -> Opened:
    engine, checkpoint = engine_of(selector, threads=threads), open_checkpoint(path)
    selection = select(checkpoint, engine)
    tier = tier_of(checkpoint, selection, slots, direct, **more)
    executor = load(checkpoint, engine, disk=tier)
    sparsity = attach(executor, checkpoint, engine, selection, list)
    assert isinstance(sparsity, CpuSparsity)
    return Opened(executor, sparsity, tier, selection)


def steps(vocab: int) -> Iterator[Batch]:
    """Prompts of 40, 5 and 32 tokens, single tokens, and three at once."""
    rng = np.random.default_rng(5)

    def step(*runs: tuple[int, int, int]) -> Batch:
        positions = np.concatenate([np.arange(first, first + n) for _, first, n in runs]).astype(np.int32)
        rows = np.repeat(np.arange(len(runs)), [n for *_, n in runs]).astype(np.int32)
        pages = np.array([[3 * own, 3 * own + 1, 3 * own + 2] for own, *_ in runs], np.int32)
        tokens = rng.integers(0, vocab, len(positions)).astype(np.int32)
        return Batch(tokens, positions, rows, pages, np.arange(len(positions), dtype=np.int32))

    yield step((0, 0, 40))
    for at in range(40, 44):
        yield step((0, at, 1))
    yield step((1, 0, 5))
    yield step((2, 0, 32))
    yield step((0, 44, 1), (1, 5, 1), (2, 32, 1))


def answers(executor: CpuExecutor) -> list[np.ndarray]:
    return [executor.forward(batch).copy() for batch in steps(executor.config.vocab_size)]


def check_same(executor: CpuExecutor, expected: list[np.ndarray]) -> None:
    for own, right in zip(answers(executor), expected, strict=True):
        assert np.array_equal(own, right)


@pytest.mark.sampled
@pytest.mark.parametrize("selector", ["exact", "predicted"])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_neurons_on_disk_give_the_same_bits(selector: str, types: tuple[str, str], tmp_path: Path) -> None:
    path = model(tmp_path, types)
    expected = {threads: answers(in_memory(path, selector, threads=threads)) for threads in (1, 2)}  # parts of sums
    for slots, direct, threads in ((FEWEST, True, 2), (NEURONS // 2, False, 1), (NEURONS, True, 1)):
        own = opened(path, selector, slots, direct, threads)
        for _ in range(2):  # the second time with what the first one read
            check_same(own.executor, expected[threads])
        assert all(one.slots == slots for one in own.tier.slots.values())
        counts = [one.stats() for one in own.tier.slots.values()]
        assert all(0 < one["hits"] < one["wanted"] for one in counts)


def test_sums_of_more_parts_than_threads_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nearly all of 896 neurons fire for some token of a step: three parts for each thread, which come in waves."""
    monkeypatch.setattr(model_files, "FF", 896)
    path = give_bundles(tiny_llama(tmp_path / "m.gguf"))
    expected = answers(in_memory(path, "exact", threads=2))
    for slots in (FEWEST, 768):
        check_same(opened(path, "exact", slots, threads=2).executor, expected)


@pytest.mark.parametrize("common", [0, 40])
@pytest.mark.parametrize("gates", [False, True])
def test_prompts_use_memory_of_neurons(gates: bool, common: int, tmp_path: Path) -> None:
    path = model(tmp_path)
    selector = "exact" if gates else "predicted"
    expected = answers(in_memory(path, selector))
    own = opened(path, selector, NEURONS - common, gates=gates, lent=FEWEST, common=common)
    every = own.tier.slots.values()
    most = len(every) * FEWEST if common else FEWEST  # of all of them together
    for _ in range(2):
        for batch, right in zip(steps(own.executor.config.vocab_size), expected, strict=True):
            assert np.array_equal(own.executor.forward(batch), right)
            held = [sum(map(one.held, range(NEURONS))) for one in every]
            if len(batch.tokens) > 32:
                assert (sum(held) if common else max(held)) <= most
            else:
                assert min(held) > 0 and max(held) <= NEURONS - common
    assert max(held) > FEWEST


@pytest.mark.parametrize("selector", ["exact", "predicted"])
@pytest.mark.parametrize("common", [1, 64, NEURONS])
def test_layers_that_share_memory_give_the_same_bits(common: int, selector: str, tmp_path: Path) -> None:
    path = give_profile(model(tmp_path))
    expected = answers(in_memory(path, selector))
    own = opened(path, selector, FEWEST, common=common, policy="static")
    for _ in range(2):
        check_same(own.executor, expected)
    if common == NEURONS:  # nothing has had to make room for what fires more rarely
        for layer, slots in own.tier.slots.items():
            often = _frequency(path, layer)
            assert sorted(often[[item for item in range(NEURONS) if slots.held(item)]]) == sorted(often)[-FEWEST:]
    memory = {one.memory for one in own.tier.slots.values()}
    assert len(memory) == 1 and memory.pop().slots == len(own.tier.slots) * FEWEST + common


def test_neurons_of_the_next_layer_are_read_early(tmp_path: Path) -> None:
    """What its predictor selects of the layer's input before; of the last layer and behind prompts nothing is."""
    path = model(tmp_path)
    expected = answers(in_memory(path, "predicted"))
    own, other = (opened(path, "predicted", NEURONS * 3 // 4, prefetch=on) for on in (True, False))
    if not own.tier.reads.direct:
        pytest.skip("this file system is not read past the cache")
    for one in own, other:
        check_same(one.executor, expected)
    counts, without = own.tier.counts(), other.tier.counts()
    assert without["guessed"] == 0 and counts["wanted"] == without["wanted"]
    assert 0 < counts["right"] <= counts["guessed"] and own.tier.report()["guess_rate"] is not None
    first, second = (slots.stats() for slots in own.tier.slots.values())
    assert first["early"] == 0 and 0 < second["early"] <= counts["right"]
    assert counts["hits"] == first["hits"] + second["hits"] - second["early"]


def test_what_is_in_the_systems_cache_is_not_read_early(tmp_path: Path) -> None:
    """It is copied there and then, which nothing hides."""
    own = opened(model(tmp_path), "predicted", NEURONS // 2, direct=False)
    answers(own.executor)
    assert own.tier.counts()["guessed"] == 0


def test_where_a_layer_has_all_of_its_neurons_nothing_is_guessed(tmp_path: Path) -> None:
    own = opened(model(tmp_path), "predicted", NEURONS)
    answers(own.executor)
    assert own.tier.counts()["guessed"] == 0 < own.tier.counts()["wanted"]


def test_guesses_for_a_layer_that_a_step_does_not_reach_are_forgotten(tmp_path: Path) -> None:
    path = model(tmp_path)
    expected = answers(in_memory(path, "predicted"))
    own = opened(path, "predicted", FEWEST, common=64)
    executor, second = own.executor, own.tier.slots[1]
    single = next(batch for batch in steps(executor.config.vocab_size) if len(batch.tokens) == 1)
    begin = executor.ffns[0].op.number + 1
    executor._make_room(single)
    executor._run(single, 0, begin)
    if own.tier.reads.direct:
        assert np.isinf(second.priority).any(), "they stay until they are needed"
    with pytest.raises(StoppedError):
        executor._run(replace(single, stop=np.ones(1, np.int32)), begin, executor.operators)
    assert np.isfinite(second.priority).all()
    check_same(executor, expected)
    assert sum(map(second.held, range(NEURONS))) <= FEWEST


def test_where_the_disk_is_silent_the_step_behind_a_prompt_fails_at_once(tmp_path: Path) -> None:
    """Though the window is to be given back, into which the disk may still write."""
    latency = 3.0
    own = opened(model(tmp_path), "predicted", NEURONS, lent=FEWEST, latency=latency)
    prompt, single = (
        next(batch for batch in steps(own.executor.config.vocab_size) if wanted(len(batch.tokens)))
        for wanted in (lambda n: n > 32, lambda n: n == 1)
    )
    own.tier.reads.patience = 0.01
    begun = time.monotonic()
    for batch in (prompt, single, single):
        with pytest.raises(ModelError, match="answer"):
            own.executor.forward(batch)
    assert time.monotonic() - begun < latency / 2


@pytest.mark.parametrize("activation", ["relu", "opt"])
@pytest.mark.parametrize("slots", [FEWEST, NEURONS])
def test_gates_on_disk_give_the_same_bits(activation: str, slots: int, tmp_path: Path) -> None:
    path = model(tmp_path, activation=activation)
    expected = answers(in_memory(path, "exact"))
    own = opened(path, "exact", slots, gates=True)
    check_same(own.executor, expected)
    first = "up" if activation == "opt" else "gate"
    each = [open_checkpoint(path).take(f"layers.{at}.{first}").data.nbytes for at in own.tier.slots]
    single = next(batch for batch in steps(own.executor.config.vocab_size) if len(batch.tokens) == 1)
    for _ in range(2):  # the first one follows another kind of step, and what was read ahead for that
        own.tier.clear()
        before = sum(one.stats()["bytes"] for one in own.tier.slots.values())
        own.executor.forward(single)
    neurons = sum(one.stats()["bytes"] for one in own.tier.slots.values()) - before
    assert own.tier.report()["bytes"] == neurons + sum(each)


@pytest.mark.parametrize("activation", ["opt", "relu2", "drelu", "fatrelu"])
def test_what_a_matrix_in_memory_has_is_not_read(activation: str, tmp_path: Path) -> None:
    path = model(tmp_path, activation=activation)
    expected = answers(in_memory(path, "exact"))
    own = opened(path, "exact", FEWEST)
    check_same(own.executor, expected)
    assert own.selection.bundles is not None
    layout = own.selection.bundles.layouts[0]
    rest = layout.pitch - layout.gate_bytes
    for slots in own.tier.slots.values():
        assert slots.stats()["bytes"] == rest * (slots.stats()["wanted"] - slots.stats()["hits"])


@pytest.mark.parametrize("selector", ["exact", "predicted"])
def test_only_dense_steps_read_matrices(selector: str, tmp_path: Path) -> None:
    own = opened(model(tmp_path), selector, NEURONS // 2, prefetch=False)
    used, touched = [], []
    for batch in steps(own.executor.config.vocab_size):
        own.tier.clear()
        for slots in own.tier.slots.values():
            slots.clear()
        own.executor.forward(batch)
        of_neurons = sum(slots.stats()["bytes"] for slots in own.tier.slots.values())
        used.append(own.tier.counts()["bytes"] > of_neurons)
        touched.append(len(batch.tokens) > 32)
    assert used == touched and any(used) and not all(used)


def test_every_neuron_is_read_once_where_all_have_room(tmp_path: Path) -> None:
    own = opened(model(tmp_path), "predicted", NEURONS)
    answers(own.executor)
    for slots in own.tier.slots.values():
        slots.clear()
    answers(own.executor)
    for slots in own.tier.slots.values():
        assert slots.stats()["wanted"] == slots.stats()["hits"] > 0
        assert slots.stats()["bytes"] == 0


@pytest.mark.parametrize("policy", DISK_POLICIES)
def test_policies_change_what_is_read_and_nothing_else(policy: str, tmp_path: Path) -> None:
    path = give_profile(model(tmp_path))
    expected = answers(in_memory(path, "predicted"))
    own = opened(path, "predicted", NEURONS // 2, policy=policy)
    hottest = {int(item) for item in np.argsort(-_frequency(path, 0), kind="stable")[: NEURONS // 2]}
    assert {item for item in range(NEURONS) if own.tier.slots[0].held(item)} == hottest
    assert own.tier.slots[0].stats()["wanted"] == 0
    check_same(own.executor, expected)
    check_same(own.executor, expected)
    if policy == "static":
        assert np.array_equal(own.tier.slots[0].priority, _frequency(path, 0).astype(np.float32))


def _frequency(path: Path, layer: int) -> np.ndarray:
    from powerinfer.formats.profile_file import open_profile

    return open_profile(open_checkpoint(path), None).fraction(layer)


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    own = opened(model(tmp_path), "predicted", NEURONS * 3 // 4, policy="lru")
    batch = next(batch for batch in steps(own.executor.config.vocab_size) if len(batch.tokens) == 5)
    own.executor.forward(batch)
    for slots in own.tier.slots.values():
        slots.clear()
    own.executor.forward(batch)
    for slots in own.tier.slots.values():
        assert slots.stats()["hits"] == slots.stats()["wanted"] > 0


def test_a_slow_disk_changes_nothing(tmp_path: Path) -> None:
    path = model(tmp_path)
    expected = answers(in_memory(path, "predicted"))
    own = opened(path, "predicted", NEURONS // 2, False, latency=2e-5, rate=1e9)
    check_same(own.executor, expected)
    report = own.tier.report()
    assert report["stall_seconds"] > 0 and 0 < report["hit_rate"] < 1 and report["bytes"] > 0


def test_guesses_that_cannot_be_read_are_read_again(tmp_path: Path) -> None:
    """A step fails by what it needs, and by nothing that it was only expected to need."""
    path = model(tmp_path)
    whole = in_memory(path, "predicted")
    expected, batches = answers(whole), list(steps(whole.config.vocab_size))
    outcomes = set()
    for at in range(100, 900, 90):
        own = opened(path, "predicted", FEWEST, True, common=96, fail_at=at, failures=1, error=errno.EIO)
        if not own.tier.reads.direct:
            pytest.skip("this file system is not read past the cache, so nothing is guessed")
        failed = 0
        for batch, right in zip(batches, expected, strict=True):
            try:
                found = own.executor.forward(batch).copy()
            except ModelError:
                failed += 1
                found = own.executor.forward(batch).copy()
            assert np.array_equal(found, right)
            assert all(np.isfinite(slots.priority).all() for slots in own.tier.slots.values())
        assert own.tier.counts()["reads"] > at, "the read that fails was begun"
        outcomes.add(failed)
    assert outcomes == {0, 1}, "reads of both kinds were among those that failed"


@pytest.mark.parametrize("selector", ["exact", "predicted"])
@pytest.mark.parametrize("at", [0, 3, 400, 900])
def test_a_step_that_could_not_read_fails_and_the_next_one_is_right(selector: str, at: int, tmp_path: Path) -> None:
    path = model(tmp_path)
    whole = in_memory(path, selector)
    own = opened(path, selector, NEURONS // 2, False, fail_at=at, failures=1, error=errno.EIO)
    failed = 0
    for batch in steps(whole.config.vocab_size):
        right = whole.forward(batch).copy()
        try:
            found = own.executor.forward(batch).copy()
        except ModelError as error:
            assert str(error).endswith(os.strerror(errno.EIO)) and "\n" not in str(error)
            failed += 1
            found = own.executor.forward(batch).copy()
        assert np.array_equal(found, right)
    assert failed == 1


def test_a_step_that_fails_counts_for_no_policy(tmp_path: Path) -> None:
    path = model(tmp_path)
    good = opened(path, "predicted", NEURONS // 2)
    bad = opened(path, "predicted", NEURONS // 2, False, fail_at=400, failures=1, error=errno.EIO)
    failed = 0
    for batch in steps(good.executor.config.vocab_size):
        good.executor.forward(batch)
        try:
            bad.executor.forward(batch)
        except ModelError:
            failed += 1
            bad.executor.forward(batch)
        for layer, slots in good.tier.slots.items():
            assert np.array_equal(bad.tier.slots[layer].priority, slots.priority)
    assert failed == 1


def test_a_disk_that_fails_for_good_fails_every_step_at_once(tmp_path: Path) -> None:
    own = opened(model(tmp_path), "predicted", FEWEST, False, fail_at=4, error=errno.EIO)
    for batch in steps(own.executor.config.vocab_size):
        with pytest.raises(ModelError):
            own.executor.forward(batch)


@pytest.mark.parametrize("change", ["truncate", "write", "touch"])
def test_bundles_that_change_are_noticed(change: str, tmp_path: Path) -> None:
    own = opened(model(tmp_path), "predicted", FEWEST)
    assert own.selection.bundles is not None
    file, batches = own.selection.bundles.path, list(steps(own.executor.config.vocab_size))
    own.executor.forward(batches[0])
    if change == "truncate":
        os.truncate(file, file.stat().st_size // 2)
    elif change == "write":
        with file.open("r+b") as stream:
            stream.seek(-4096, os.SEEK_END)
            stream.write(bytes(4096))
    else:
        os.utime(file, ns=(1, 1))
    for batch in batches[1:]:
        with pytest.raises(ModelError, match="changed while it was in use"):
            own.executor.forward(batch)


def test_bundles_that_cannot_be_read_at_the_start_are_refused(tmp_path: Path) -> None:
    path = give_profile(model(tmp_path))
    with pytest.raises(ModelError, match=os.strerror(errno.EIO)):
        opened(path, "predicted", FEWEST, False, fail_at=7, error=errno.EIO)


def test_the_report_says_how_layers_decode(tmp_path: Path) -> None:
    own = opened(give_profile(model(tmp_path)), "exact", NEURONS // 2)
    answers(own.executor)
    report = own.sparsity.report()
    assert all(layer["ways"] == {"1": "exact", "32": "exact"} for layer in report["layers"])
    assert all(layer["reason"] == "neurons are read from disk" for layer in report["layers"])
    assert 0 < report["active_fraction"] < 1 and report["tokens"] > 0
    assert "neurons are on disk" in str(own.executor.choices.selector)
    with own.sparsity.suspended():  # through the window
        dense = answers(own.executor)
    whole = in_memory(own.selection.bundles.path.parent.with_suffix(""), "exact")  # type: ignore[union-attr]
    for ffn in whole.ffns.values():
        ffn.set_ways({})
    for left, right in zip(dense, answers(whole), strict=True):
        assert np.array_equal(left, right)


def test_layers_whose_neurons_are_not_on_disk_stay_dense(tmp_path: Path) -> None:
    path = model(tmp_path)
    engine, checkpoint = engine_of("predicted"), open_checkpoint(path)
    selection = select(checkpoint, engine)
    tier = tier_of(checkpoint, selection, FEWEST)
    tier.about.neurons.pop(1)  # type: ignore[attr-defined]
    executor = load(checkpoint, engine, disk=tier)
    sparsity = attach(executor, checkpoint, engine, selection, list)
    answers(executor)
    report = sparsity.report()
    assert report is not None
    first, second = report["layers"]
    assert first["ways"]["1"] == "predicted" and first["tokens"] > 0
    assert second["ways"]["1"] == "dense" and second["tokens"] == 0


def test_a_selector_that_was_asked_for_needs_its_neurons(tmp_path: Path) -> None:
    path = model(tmp_path)
    for selector, problem in (("predicted", True), ("auto", False)):
        engine, checkpoint = engine_of(selector), open_checkpoint(path)
        selection = select(checkpoint, engine)
        tier = tier_of(checkpoint, selection, FEWEST)
        tier.about.neurons.clear()  # type: ignore[attr-defined]
        executor = load(checkpoint, engine, disk=tier)
        if problem:
            with pytest.raises(RequestError, match="--selector predicted"):
                attach(executor, checkpoint, engine, selection, list)
        else:
            assert attach(executor, checkpoint, engine, selection, list).report() is None


def test_the_bundle_file_stays_on_disk(tmp_path: Path) -> None:
    path = give_profile(model(tmp_path))
    own = opened(path, "predicted", FEWEST)
    answers(own.executor)
    assert own.selection.bundles is not None
    assert _resident(own.selection.bundles.path) == 0


def _resident(file: Path) -> int:
    """Bytes of a mapped file in this process' memory."""
    nbytes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            nbytes += int(line.split()[1]) << 10
    return nbytes


@pytest.mark.parametrize("selector", ["exact", "predicted", "threshold"])
@pytest.mark.parametrize("activation", ["relu", "opt"])
def test_what_a_plan_leaves_on_disk_runs(selector: str, activation: str, tmp_path: Path) -> None:
    path = give_profile(model(tmp_path, activation=activation))
    engine = engine_of(selector, threshold=0.1 if selector == "threshold" else None)
    checkpoint = open_checkpoint(path)
    selection = select(checkpoint, engine)
    whole, work = checkpoint_model(checkpoint, None), Workload("f16", 128, 64, 1, selector=selector)

    def plan(ram: int) -> DiskPlan:
        return demand(plan_disk(whole, work, ram, threads=2, bundled=True))

    with pytest.raises(RequestError, match="give --ram") as caught:
        plan(ram=1 << 20)
    least = read_size(str(caught.value).rpartition("give --ram ")[2].split(",")[0])
    found = plan(ram=least)
    assert sum(found.held.values()) <= least
    assert FEWEST <= found.about.neurons[0] <= NEURONS
    names = {f"layers.0.{name}" for name in checkpoint.config.layers[0].neurons.matrices}
    assert names <= found.about.matrices  # the gates of `exact`, too
    places = [place for name in found.about.matrices if (place := checkpoint.rests_at(name)) is not None]
    assert selection.bundles is not None
    tier = DiskTier(found.about, [*checkpoint.files, selection.bundles.file], places)
    executor = load(checkpoint, engine, disk=tier)
    attach(executor, checkpoint, engine, selection, list)
    right = in_memory(path, selector, threshold=engine.threshold)
    check_same(executor, answers(right))


def test_neurons_stay_on_disk_only_where_that_is_asked_for_if_ram_holds_the_dense_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` does not use bundles for which there is no room; a selector that was asked for is kept, and it is said
    that without it nothing would be read."""
    monkeypatch.setattr(model_files, "FF", 1 << 15)
    path = tiny_llama(tmp_path / "m.gguf", "relu", False)
    pack(open_checkpoint(path), None, choose_types(open_checkpoint(path), "F16", "F16"))
    engine = engine_of("auto", gpu="none", threads=2)

    def found(selector: str, ram: int) -> Resolved:
        return resolve(open_checkpoint(path), replace(engine, selector=selector, ram=ram))

    dense, bundled = (needs(found(selector, 1 << 34)).ram for selector in ("all", "exact"))
    between = bundled - 1
    assert dense < between
    plain = found("auto", between)
    assert plain.placement.disk is None and plain.selection.selector == "all"
    asked = found("exact", between)
    assert asked.placement.disk is not None and asked.placement.disk.about.neurons
    said: list[str] = []
    executor, _ = load_resolved(asked, list, say=said.append)
    assert "; --selector all or --context 96 would leave room for all of it" in said[-1]
    assert str(executor.choices.disk).endswith("; --selector all or --context 96 would leave room for all of it")
    executor.close()
    assert "predicted" not in said[-1], "there are none"
    with pytest.raises(RequestError, match="give --ram ") as caught:
        found("exact", 1 << 20)
    least = read_size(str(caught.value).rpartition("give --ram ")[2].split(",")[0])  # with neurons on disk
    assert least > dense
    less = found("auto", dense - 1)
    assert less.placement.disk is not None and not less.placement.disk.about.neurons
    assert less.selection.selector == "all"
    with pytest.raises(RequestError, match="give --ram ") as caught:
        found("auto", 1 << 20)
    assert read_size(str(caught.value).rpartition("give --ram ")[2].split(",")[0]) <= dense
