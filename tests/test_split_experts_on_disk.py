"""Experts on a GPU, in RAM and on disk: the bits of those of which RAM has all that the GPU lacks."""

from __future__ import annotations

import errno
import json
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import test_expert_neurons as neurons_inside  # noqa: E402
from expert_shapes import shape  # noqa: E402
from gpu_device import device_name  # noqa: E402
from model_files import mamba_gguf  # noqa: E402
from serving import ByteTokenizer  # noqa: E402
from test_disk import steps  # noqa: E402
from test_disk_experts import on_disk, single_tokens, written  # noqa: E402, F401
from test_gpu_layers import on_gpu  # noqa: E402
from test_hybrid_experts import policy_of, some  # noqa: E402

from benchmarks.models import expert_models  # noqa: E402
from powerinfer import LLM, SamplingParams, _native  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import disk  # noqa: E402
from powerinfer.devices.disk import OnDisk  # noqa: E402
from powerinfer.errors import ModelError, RequestError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hardware import measure  # noqa: E402
from powerinfer.hardware.description import load  # noqa: E402
from powerinfer.hybrid.copier import Copier  # noqa: E402
from powerinfer.hybrid.experts import ExpertSparsity, ExpertSplit, HybridExperts  # noqa: E402
from powerinfer.hybrid.load import load_resolved, load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Resolved, UsedPolicy, needs  # noqa: E402
from powerinfer.hybrid.vram import smaller  # noqa: E402
from powerinfer.placement.disk import DiskPlan  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.sizes import read_size  # noqa: E402

ENGINE = EngineConfig(threads=1, prefill_chunk=64, max_batch=4, context=128, trial=False, disk="direct")
NAMES = ("qwen3-30b-a3b", "smallthinker-4b", "gpt-oss-20b", "deepseek-v2-lite", "folder")
MIB = 1 << 20
REAL, MEASURED = _native.Reads, measure.measured
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@contextmanager
def split(
    path: Path,
    slots: int | None,
    share: float = 0.5,
    layers: int | None = None,
    emulated: dict[str, Any] | None = None,
    prefetch: bool = True,
    matrices: Sequence[str] = (),
    **parts: Any,
) -> Iterator[tuple[Any, list[HybridExperts]]]:
    """slots: experts of each layer in RAM, of all that the GPU does not have; None: all of them are there.

    emulated: the disk. matrices: dense ones that pass through a window.
    """
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    made = ExpertSplit(some(config, share), **parts)
    plan = None
    if slots is not None:
        window = (1 << 20) * bool(matrices)
        about = OnDisk(frozenset(matrices), window, dict.fromkeys(config.experts, slots), prefetch=prefetch)
        plan = DiskPlan(about, {}, 0)
    every = config.n_layers
    where = on_gpu(layers or every, head=(layers or every) == every, pages=8)
    resolved = Resolved(checkpoint, ENGINE, **where).placed(disk=plan)
    with pytest.MonkeyPatch.context() as patch:
        if emulated is not None:
            patch.setattr(_native, "Reads", emulating(**emulated))
        executor = load_split(resolved, made)
    try:
        yield executor, made.ffns
    finally:
        executor.close()


def emulating(**disk: Any) -> Callable[..., _native.Reads]:
    return lambda files, direct: REAL(files, False, **disk)


def answers(executor: Any) -> list[np.ndarray]:
    """Of a prompt, a batch of two sequences, and single tokens."""
    return [executor.forward(batch).copy() for batch in steps(executor.vocab_size)]


def check_bits(executor: Any, right: list[np.ndarray]) -> None:
    for own, one in zip(answers(executor), right, strict=True):
        np.testing.assert_array_equal(own, one)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("device")
def test_the_bits_are_those_of_experts_in_ram(name: str, written: Callable[[str], Path]) -> None:  # noqa: F811
    """With one slot in RAM and with one for each expert, whatever an earlier step has left there."""
    with split(written(name), None) as (executor, _):
        right = answers(executor)
    read = []
    for slots in (1, 5, 32):
        with split(written(name), slots) as (executor, ffns):
            check_bits(executor, right)
            check_bits(executor, right)
            assert all(len(ffn.hot) and len(ffn.cold) and ffn.collect()["jobs"] for ffn in ffns)
            read.append(executor.disk.counts())
    few, more, every = read
    assert few["bytes"] > more["bytes"] > every["bytes"] > 0
    assert few["wanted"] == more["wanted"] == every["wanted"]
    assert few["hits"] < more["hits"] < every["hits"] < every["wanted"]


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.usefixtures("device")
def test_none_and_all_of_them_on_the_gpu(share: float, written: Callable[[str], Path]) -> None:  # noqa: F811
    with split(written("qwen3-30b-a3b"), None, share) as (executor, _):
        right = answers(executor)
    with split(written("qwen3-30b-a3b"), 4, share) as (executor, ffns):
        check_bits(executor, right)
        assert all(bool(ffn.collect()["jobs"]) == (share == 0) for ffn in ffns)
        assert bool(executor.disk.counts()["bytes"]) == (share == 0)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "smallthinker-4b"])
@pytest.mark.usefixtures("device")
def test_layers_on_the_cpu_as_a_whole_read_too(name: str, written: Callable[[str], Path]) -> None:  # noqa: F811
    """They share the disk, and the policy, with those that are split; their dense matrices may be there, too."""
    with split(written(name), None, layers=1) as (executor, _):
        right = answers(executor)
    with split(written(name), 5, layers=1) as (executor, ffns):
        check_bits(executor, right)
        assert len(ffns) == 1 and ffns[0]._cpu_part is not None
        assert executor.disk.counts()["wanted"] > ffns[0]._cpu_part.op.disk_counts()["wanted"] > 0
    dense = [*(f"layers.1.{part}" for part in "qkvo"), "head"]
    for emulated in (None, {"latency": 1e-4, "rate": 2e9}):
        with split(written(name), 5, layers=1, matrices=dense, emulated=emulated) as (executor, _):
            check_bits(executor, right)
            check_bits(executor, right)
            assert executor.disk.window is not None


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "smallthinker-4b"])
@pytest.mark.usefixtures("device")
def test_a_slow_disk_changes_nothing(name: str, written: Callable[[str], Path]) -> None:  # noqa: F811
    with split(written(name), None) as (executor, _):
        right = answers(executor)
    with split(written(name), 6, emulated={"latency": 1e-4, "rate": 2e9}) as (executor, _):
        check_bits(executor, right)
        assert executor.disk.counts()["waited"] > 0


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.usefixtures("device")
def test_experts_are_guessed_a_layer_ahead(name: str, written: Callable[[str], Path]) -> None:  # noqa: F811
    """As well as on the CPU alone, though the layer before gets the experts' input alone; what is on the GPU is not."""
    alone = on_disk(open_checkpoint(written(name)), 8)
    for one in single_tokens(40, alone.vocab_size):
        alone.forward(one)
    assert alone.disk is not None
    right = alone.disk.report()["guess_rate"]
    found = []
    for prefetch, share in ((False, 0.5), (True, 0.5), (True, 0.0)):
        with split(written(name), 8, share, prefetch=prefetch) as (executor, ffns):
            logits = [executor.forward(one).copy() for one in single_tokens(40, executor.vocab_size)]
            found.append((share, np.stack(logits), executor.disk.counts()))
            for ffn in ffns:
                assert ffn._cpu_part is not None
                assert np.flatnonzero(ffn._cpu_part.op.elsewhere).tolist() == ffn.hot.tolist()
    (_, expected, none), (_, logits, some), (_, _, every) = found
    np.testing.assert_array_equal(logits, expected)
    assert not none["guessed"] and 0 < some["guessed"] < 0.75 * every["guessed"]
    assert abs(every["right"] / every["guessed"] - right) < 0.05
    assert some["right"] > 0.5 * some["guessed"]


@pytest.mark.usefixtures("device")
def test_experts_are_guessed_across_layers_without_any(tmp_path: Path) -> None:
    path, found = mamba_gguf("ME*E").write(tmp_path / "m.gguf"), []
    for prefetch in (False, True):
        with split(path, 2, 0.0, prefetch=prefetch) as (executor, _):
            found.append((answers(executor), executor.disk.counts()["guessed"]))
    (expected, none), (same, some) = found
    assert none == 0 < some
    for one, other in zip(same, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "smallthinker-4b"])
@pytest.mark.parametrize("at", [0, 7, 60])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.usefixtures("device")
def test_a_step_that_could_not_read_fails_and_the_next_one_is_right(
    at: int,
    prefetch: bool,
    name: str,
    written: Callable[[str], Path],  # noqa: F811
) -> None:
    path, fault = written(name), {"fail_at": at, "failures": 1, "error": errno.EIO}
    with split(path, None) as (executor, _):
        right = answers(executor)
    failed = 0
    with split(path, 6, emulated=fault, prefetch=prefetch) as (executor, _):
        for batch, one in zip(steps(executor.vocab_size), right, strict=True):
            try:
                own = executor.forward(batch).copy()
            except ModelError as error:
                assert str(error) == f"cannot read {path}: {os.strerror(errno.EIO)}"
                failed += 1
                own = executor.forward(batch).copy()
            np.testing.assert_array_equal(own, one)
    assert failed == 1 or (prefetch and failed == 0)  # nobody may need what was expected


@pytest.mark.usefixtures("device")
def test_a_disk_that_is_gone_is_said_at_every_step(written: Callable[[str], Path]) -> None:  # noqa: F811
    with split(written("smallthinker-4b"), 6, emulated={"fail_at": 0, "error": errno.ENODEV}) as (executor, _):
        for batch in steps(executor.vocab_size):
            with pytest.raises(ModelError, match=os.strerror(errno.ENODEV)):
                executor.forward(batch)


@pytest.mark.usefixtures("device")
def test_a_file_that_changes_is_no_longer_computed(tmp_path: Path, written: Callable[[str], Path]) -> None:  # noqa: F811
    path = tmp_path / "m.gguf"
    path.write_bytes(written("qwen3-30b-a3b").read_bytes())
    with split(path, 6) as (executor, _):
        first, *_, last = steps(executor.vocab_size)
        executor.forward(first)
        os.utime(path, ns=(1, 1))
        with pytest.raises(ModelError, match="changed while it was in use"):
            executor.forward(last)


@pytest.mark.parametrize("policy", ["lru", "lfu", "dynamic"])
@pytest.mark.usefixtures("device")
def test_experts_that_are_exchanged_are_read_for_the_gpu(
    policy: str,
    written: Callable[[str], Path],  # noqa: F811
) -> None:
    """The same experts in the same steps, so the same bits."""
    path, found = written("qwen3-30b-a3b"), []
    for slots in (None, 6):
        with split(path, slots, copier=Copier(policy_of(path, policy, 8))) as (executor, ffns):
            logits = [executor.forward(one).copy() for one in single_tokens(40, executor.vocab_size)]
            executor.gpu.observer.settle()
            copied = [ffn.collect()["copied"] for ffn in ffns]
            found.append((np.stack(logits), [ffn.hot.tolist() for ffn in ffns], copied))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:] and all(found[1][2])


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "folder"])
@pytest.mark.usefixtures("device")
def test_swapped_experts(name: str, written: Callable[[str], Path]) -> None:  # noqa: F811
    """Between requests: those that come are read, those that leave are on disk already."""
    path, found = written(name), []
    with split(path, 6, movable=True) as (executor, ffns):
        pairs = [(ffn.hot[[0, 2]], ffn.cold[[1, 2]]) for ffn in ffns]
        hot = [np.setdiff1d(np.union1d(ffn.hot, come), leave) for ffn, (leave, come) in zip(ffns, pairs, strict=True)]
        for ffn, pair in zip(ffns, pairs, strict=True):
            held = ffn.cold_bytes, ffn.memory()
            ffn.swap(*pair)
            assert (ffn.cold_bytes, ffn.memory()) == held
        assert all(np.array_equal(ffn.hot, own) for ffn, own in zip(ffns, hot, strict=True))
        found = answers(executor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_split_experts_on_disk.some", lambda config, share: [own.astype(np.int32) for own in hot])
        with split(path, None) as (executor, _):
            for own, one in zip(found, answers(executor), strict=True):
                np.testing.assert_allclose(own, one, rtol=1e-4, atol=1e-4)  # in other slots, in another order


@pytest.mark.usefixtures("device")
def test_a_swap_that_cannot_read_changes_nothing(written: Callable[[str], Path]) -> None:  # noqa: F811
    path = written("qwen3-30b-a3b")
    with split(path, 6, movable=True) as (executor, ffns):
        right = answers(executor)
        before = ffns[0].hot.tolist()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_native, "Reads", emulating(fail_at=0, error=errno.EIO))
            with pytest.raises(ModelError, match="cannot read"):
                ffns[0].swap(ffns[0].hot[:1], ffns[0].cold[:1])
        assert ffns[0].hot.tolist() == before
        check_bits(executor, right)


@pytest.mark.usefixtures("device")
def test_reading_for_the_gpu_takes_one_block_of_memory(
    written: Callable[[str], Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many experts are read, of layers that are alike."""
    made: list[weakref.ref[np.ndarray]] = []
    plain = disk.own_pages

    def noted(nbytes: int) -> np.ndarray:
        memory = plain(nbytes)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(disk, "own_pages", noted)
    with split(written("qwen3-30b-a3b"), 6, movable=True) as (_, ffns):
        made.clear()
        for ffn in (*ffns, *ffns):
            ffn.swap(ffn.hot[:2], ffn.cold[:2])
        assert sum(one() is not None for one in made) == 1


# ---- what --vram and --ram do not hold


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts take far more than what reading them does."""
    config, path = shape("qwen3-30b-a3b"), tmp_path_factory.mktemp("large") / "m.gguf"
    layers = tuple(replace(layer, ffn=replace(layer.ffn, size=1024)) for layer in config.layers)  # type: ignore[type-var]
    expert_models.write(path, replace(config, layers=layers), expert_models.Weights("q8_0"))
    return path


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made for a described machine: this one may be measured anew at any time."""
    machine = load("pc-high")
    machine = replace(machine, cpu=replace(machine.cpu, threads=ENGINE.threads))
    monkeypatch.setattr("powerinfer.hardware.measure.measured", lambda *_, **__: machine)


def planned(path: Path, hot: int, ram: int = 0, quantize: str | None = None, **options: Any) -> Resolved:
    """With a --vram for that number of experts, and so much less --ram than the others need."""
    engine, checkpoint = replace(ENGINE, gpu=device_name(), **options), open_checkpoint(path, quantize)
    model, every = checkpoint_model(checkpoint), needs(resolve(checkpoint, engine))
    cold = sum(model.n_experts) - hot
    vram = every.vram - cold * model.expert_bytes(0)[0]
    whole = resolve(checkpoint, replace(engine, vram=vram))
    assert whole.placement.experts is not None and whole.placement.disk is None
    needed = needs(replace(whole.placed(staging=0), policy=UsedPolicy(whole.policy.name or "static"))).ram
    return resolve(open_checkpoint(path, quantize), replace(engine, vram=vram, ram=needed - ram)) if ram else whole


def test_what_neither_memory_holds_stays_on_disk(large: Path) -> None:
    """Within both budgets, which the load keeps; the less RAM, the fewer experts are there."""
    before = 1 << 30
    for less in (2 * MIB, 6 * MIB, 12 * MIB):
        resolved = planned(large, 20, less)
        disk, ram, vram = resolved.placement.disk, resolved.engine.ram, resolved.engine.vram
        assert disk is not None and resolved.placement.experts is not None and resolved.placement.staging == 0
        assert ram is not None and vram is not None
        assert sum(disk.held.values()) <= ram and needs(resolved).ram <= ram and needs(resolved).vram <= vram
        executor, sparsity = load_resolved(resolved, list)
        try:
            assert isinstance(sparsity, ExpertSparsity)
            slots = resolved.placement.disk.about.experts
            assert sum(slots.values()) < before and sum(slots.values()) < sum(len(ffn.cold) for ffn in sparsity.ffns)
            before = sum(slots.values())
            held = sum(ffn.cold_bytes for ffn in sparsity.ffns)
            assert 0.9 * resolved.placement.disk.held["experts"] < held <= resolved.placement.disk.held["experts"]
            found = answers(executor)
            assert executor.disk.report()["bytes"] > 0 and "experts that are selected" in str(executor.choices.disk)
            assert "it reads from disk" in str(executor.choices.prefill)
        finally:
            executor.close()
        whole, _ = load_resolved(replace(resolved, checkpoint=open_checkpoint(large)).placed(disk=None), list)
        check_bits(whole, found)
        whole.close()


def test_what_may_not_stay_on_disk_is_refused_before_the_machine_is_measured(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, machine = planned(large, 20, 12 * MIB).engine, load("pc-high")
    assert engine.vram is not None and engine.ram is not None and machine.gpu is not None
    vram, ram = engine.vram - machine.gpu.reserved_bytes, engine.ram - machine.host_bytes  # not known before
    engine = replace(engine, vram=vram, ram=ram, disk="none")
    monkeypatch.setattr(measure, "measured", MEASURED)
    monkeypatch.setattr(measure, "saved_hardware", lambda *_: None)
    monkeypatch.setattr(measure, "measure_and_keep", lambda *_, **__: pytest.fail("it was measured"))
    for less in (ram, MIB):
        with pytest.raises(RequestError, match=r"needs at least .* of RAM \+ VRAM: give --ram"):
            resolve(open_checkpoint(large), replace(engine, ram=less))


def test_a_policy_for_what_is_not_on_disk_is_said(large: Path) -> None:
    engine, notes = replace(planned(large, 20, 12 * MIB).engine, disk_policy="lru"), list[str]()
    resolve(open_checkpoint(large), engine, say=notes.append)
    assert not notes
    resolve(open_checkpoint(large), replace(engine, ram=None), say=notes.append)
    assert notes == ["--disk-policy lru is not used: neither experts nor neurons stay on disk"]


def test_with_fewer_experts_on_the_gpu_more_stay_on_disk(large: Path) -> None:
    """Where it runs out of memory; half of the buffers for long prompts go before experts, and then all."""
    resolved = planned(large, 20, 12 * MIB)
    fewer = smaller(resolved, 1)
    assert isinstance(fewer, Resolved)
    assert fewer.placement.experts is not None and resolved.placement.experts is not None
    assert sum(map(len, fewer.placement.experts)) < sum(map(len, resolved.placement.experts))
    assert fewer.placement.disk is not None and resolved.placement.disk is not None
    assert fewer.placement.disk.resting["experts"] > resolved.placement.disk.resting["experts"]
    assert needs(fewer).ram <= (fewer.engine.ram or 0)
    enough = planned(large, 20)
    halves = smaller(enough.placed(staging=16 << 20), 1)
    assert isinstance(halves, Resolved) and 0 < halves.placement.staging <= 8 << 20
    assert halves == enough.placed(staging=halves.placement.staging)
    assert smaller(halves, 1, 1) == enough.placed(staging=0)
    more = smaller(enough.placed(staging=16 << 20), 32 << 20)
    assert isinstance(more, Resolved) and more.placement.experts is not None and enough.placement.experts is not None
    assert sum(map(len, more.placement.experts)) < sum(map(len, enough.placement.experts))
    enough = enough.placed(staging=0)
    at_most = replace(enough, engine=replace(enough.engine, ram=needs(enough).ram))
    fewer = smaller(at_most, 1)
    assert isinstance(fewer, Resolved) and fewer.placement.disk is not None
    auto = replace(at_most, engine=replace(at_most.engine, expert_policy="auto"), policy=UsedPolicy(None))
    tried = smaller(auto, 1)
    assert isinstance(tried, Resolved) and tried.policy.name == "static"
    assert tried.placement.disk == fewer.placement.disk
    lacking = smaller(replace(at_most, engine=replace(at_most.engine, disk="none")), 1)
    assert isinstance(lacking, RequestError)
    assert re.search(r"needs at least .* of RAM .* give --ram", str(lacking))


def test_the_policy_is_tried_again_with_other_experts(large: Path) -> None:
    """That of a trial holds for the experts that were on the GPU then."""
    auto = planned(large, 20, expert_policy="auto", trial=True).placed(staging=0)
    assert auto.policy.name is None
    fewer = smaller(replace(auto, policy=UsedPolicy("lru", "chosen by a trial")), 1)
    assert isinstance(fewer, Resolved) and fewer.policy.name is None


def test_without_a_disk_ram_must_hold_them(large: Path) -> None:
    with pytest.raises(RequestError, match=r"needs at least .* give --ram .* or more beside"):
        planned(large, 20, 12 * MIB, disk="none")


def test_what_is_advised_is_of_the_cache_only_where_ram_has_some(large: Path) -> None:
    for vram, cached in ((planned(large, 20).engine.vram, False), (0, True)):
        engine = replace(ENGINE, gpu=device_name(), vram=vram, ram=MIB)
        with pytest.raises(RequestError, match=r"even if its weights .* give --ram [\d.]+MiB$") as told:
            resolve(open_checkpoint(large), engine)
        engine = replace(engine, ram=read_size(str(told.value).rpartition(" ")[2]) - MIB)
        said = r"even if its weights .* give --ram .* a lower .*--prefill-chunk$"
        with pytest.raises(RequestError, match=said) as told:
            resolve(open_checkpoint(large), engine)
        assert ("KV cache" in str(told.value)) == ("--context" in str(told.value)) == cached


def test_a_plan_says_what_is_where(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = planned(large, 20, 12 * MIB)
    engine, disk = resolved.engine, resolved.placement.disk
    assert disk is not None and resolved.placement.experts is not None
    flags = ["-m", str(large), "--gpu", device_name(), "--vram", f"{engine.vram}B", "--ram", f"{engine.ram}B"]
    flags += ["--context", "128", "--prefill-chunk", "64", "--max-batch", "4", "--threads", "2", "--json"]
    documents = []
    for command in (["plan", "--dry-run"], ["inspect"]):
        assert main([*command, *flags]) == 0
        text = capsys.readouterr()
        documents.append(json.loads(text.out.splitlines()[-1]))
    plan, inspected = documents
    for layer in plan["layers"]:
        assert layer["experts"] == len(resolved.placement.experts[layer["layer"]])
        assert layer["experts_in_ram"] == disk.about.experts[layer["layer"]]
    assert sum(plan["bytes"]["cpu"].values()) <= (engine.ram or 0)
    assert plan["bytes"]["disk"]["experts"] == disk.resting["experts"] and not plan["fits"]
    assert "of the others RAM holds" in " ".join(plan["reasons"])
    assert "system's cache" not in " ".join(plan["reasons"]), "whether reads go through it is decided at load"
    assert plan["predicted"]["disk_bytes"] > 0 and 0 < plan["predicted"]["disk_hits"] < 1
    assert {"--ram"} < {one["flag"] for one in plan["helps"]} | {"--vram"}
    assert inspected["memory"]["disk"] >= disk.resting["experts"] and inspected["memory"]["ram"] <= (engine.ram or 0)
    assert "experts that are selected" in inspected["choices"]["disk"]


def test_a_request_that_fails_leaves_the_engine_usable(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is told in one line; the next answers are those of a disk that works."""
    resolved, found = planned(large, 20, 12 * MIB), []
    for fault in ({}, {"fail_at": 150, "failures": 30, "error": errno.EIO}):
        monkeypatch.setattr(_native, "Reads", emulating(**fault) if fault else REAL)
        executor, sparsity = load_resolved(replace(resolved, checkpoint=open_checkpoint(large)), list)
        config = open_checkpoint(large).config
        with LLM.from_parts(executor, ByteTokenizer(), config, ENGINE, sparsity) as llm:  # type: ignore[arg-type]
            failed = 0
            while len(found) < 2 * (1 + bool(fault)):
                try:
                    found.append(llm.generate("some", PARAMS).token_ids)
                except ModelError as error:
                    assert str(error) == f"cannot read {large}: {os.strerror(errno.EIO)}"
                    failed += 1
            assert bool(failed) == bool(fault)
            assert llm.disk is not None and llm.disk["bytes"] > 0
    assert len(found[0]) == 12 and all(one == found[0] for one in found)


def test_free_memory_is_the_budget_where_it_does_not_hold_them(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned(large, 20)
    needed = needs(whole.placed(staging=0)).ram
    for free, less in ((2 * needed, False), (needed - 1, True)):
        monkeypatch.setattr("powerinfer.system.available_memory", lambda free=free: free)
        resolved = resolve(open_checkpoint(large), whole.engine)
        assert (resolved.placement.disk is not None) is less
        assert resolved.placement.disk is None or sum(resolved.placement.disk.held.values()) <= free * 9 // 10


def test_policies_over_experts_that_are_on_disk(large: Path) -> None:
    """`auto` tries none; one that is asked for has all experts there, and memory for some."""
    resolved = planned(large, 20, 12 * MIB, trial=True, expert_policy="auto")
    assert resolved.policy.name == "static" and "from disk" in resolved.policy.reason
    resolved = planned(large, 20, 6 * MIB, expert_policy="lru")
    assert resolved.policy.name == "lru" and resolved.placement.disk is not None
    executor, sparsity = load_resolved(resolved, list)
    try:
        for one in single_tokens(30, executor.vocab_size):
            executor.forward(one)
        assert sparsity.report()["copied"] > 0
    finally:
        executor.close()


def test_neurons_inside_experts_need_all_of_them_in_ram(tmp_path: Path) -> None:
    path = neurons_inside.model(tmp_path, "Q4_0")
    with pytest.raises(RequestError, match="computed where all experts are in RAM, and they do not fit"):
        planned(path, 2, 1, selector="exact")


def test_what_is_converted_cannot_stay_on_disk(written: Callable[[str], Path]) -> None:  # noqa: F811
    with pytest.raises(RequestError, match="leave out --quantize"):
        planned(written("folder"), 8, MIB, quantize="q8_0")
