"""Models on several GPUs, in RAM and on disk: the bits of one GPU with the same neurons and experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import test_split_experts_on_disk as experts_on_disk  # noqa: E402
import test_split_neurons_on_disk as neurons_on_disk  # noqa: E402
from sparse_models import profile_of  # noqa: E402
from test_disk_experts import written  # noqa: E402, F401
from test_disk_neurons import FEWEST, NEURONS, model, wide  # noqa: E402, F401
from test_hybrid import placed  # noqa: E402
from test_several_gpus import planned  # noqa: E402
from test_split_experts_on_disk import large  # noqa: E402, F401

from powerinfer import RequestError  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices.disk import OnDisk  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hardware.description import Hardware, load  # noqa: E402
from powerinfer.hybrid.copier import Copier  # noqa: E402
from powerinfer.hybrid.experts import ExpertSplit  # noqa: E402
from powerinfer.hybrid.ffn import NeuronSplit  # noqa: E402
from powerinfer.hybrid.load import load_resolved, load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu, needs  # noqa: E402
from powerinfer.hybrid.several import CardSplits  # noqa: E402
from powerinfer.placement.disk import DiskPlan  # noqa: E402
from powerinfer.placement.experts import make_policy  # noqa: E402
from powerinfer.placement.plan import Plan  # noqa: E402
from powerinfer.sizes import read_size  # noqa: E402
from powerinfer.sparsity.selection import select  # noqa: E402

GIB, MIB = 1 << 30, 1 << 20
ENGINE = EngineConfig(threads=1, prefill_chunk=64, max_batch=4, context=128, trial=False, disk="direct")


def answers(executor: Any) -> list[np.ndarray]:
    return experts_on_disk.answers(executor)


def check_alike(ours: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for own, right in zip(ours, wanted, strict=True):
        assert np.isfinite(own).all()
        np.testing.assert_array_equal(own, right)


def on_cards(path: Path, gpus: int, make: Callable[[int, int], Any], about: OnDisk | None, **changes: Any) -> Any:
    """An executor of a model of two layers on so many GPUs. make: the split of some layers; about: on disk."""
    checkpoint, selection = open_checkpoint(path), changes.pop("selection", None)
    firsts = (0, 1) if gpus == 2 else ()
    placement = Placement(2, True, pages=16, firsts=firsts, disk=None if about is None else DiskPlan(about, {}, 0))
    resolved = Resolved(checkpoint, replace(ENGINE, **changes), device=UsedGpu(",".join(["cpu"] * gpus)))
    if selection is not None:
        resolved = replace(resolved, selection=selection)
    ends = (1, 2) if gpus == 2 else (2,)
    splits = [make(first, last) for first, last in zip(firsts or (0,), ends, strict=True)]
    return load_split(replace(resolved, placement=placement), CardSplits(splits, ends)), splits


@pytest.mark.parametrize("selector", ["predicted", "exact"])
def test_neurons_on_disk_beside_two_gpus(selector: str, tmp_path: Path) -> None:
    """Of both GPUs' layers, and of one of them."""
    path = model(tmp_path)
    checkpoint = open_checkpoint(path)
    selection = select(checkpoint, replace(ENGINE, selector=selector))
    assert selection.bundles is not None

    def make(*_: int) -> NeuronSplit:
        frequency = profile_of(2, NEURONS).fraction
        assert selection.bundles is not None
        place = selection.bundles, placed(checkpoint.config, 0.3)
        return NeuronSplit(*place, predictors=selection.predictors, frequency=frequency)

    def run(gpus: int, resting: Sequence[int]) -> list[np.ndarray]:
        about = OnDisk(neurons=dict.fromkeys(resting, FEWEST)) if resting else None
        executor, splits = on_cards(path, gpus, make, about, selector=selector, selection=selection)
        try:
            for ffn in (ffn for split in splits for ffn in split.ffns):
                ffn.fill()
            found = answers(executor)
            assert not resting or (executor.disk.counts()["bytes"] and len(executor.disk.slots) == len(resting))
            return found
        finally:
            executor.close()

    wanted = run(1, ())
    for resting in ((0, 1), (1,)):
        check_alike(run(2, resting), wanted)


@pytest.mark.parametrize("policy", [None, "lru"])
def test_experts_on_disk_beside_two_gpus(policy: str | None, written: Callable[[str], Path]) -> None:  # noqa: F811
    """Those that a policy exchanges are read by each GPU's own thread."""
    path = written("qwen3-30b-a3b")
    sizes = [open_checkpoint(path).config.experts[layer].n_experts for layer in range(2)]

    def make(first: int, last: int) -> ExpertSplit:
        hot = [np.arange(n // 2, dtype=np.int32) for n in sizes]
        if policy is None:
            return ExpertSplit(hot)
        own = {layer: sizes[layer] for layer in range(first, last)}
        start = {layer: np.full(n, 1 / n) for layer, n in own.items()}
        slots = {layer: n // 2 for layer, n in own.items()}
        return ExpertSplit(hot, copier=Copier(make_policy(policy, slots, own, start)))

    def run(gpus: int, slots: int | None) -> tuple[list[np.ndarray], list[Any]]:
        about = None if slots is None else OnDisk(experts=dict.fromkeys(range(2), slots))
        executor, splits = on_cards(path, gpus, make, about)
        try:
            found = [*answers(executor), *answers(executor)]
            if policy is not None:
                for card in executor.cards:
                    card.observer.settle()
            ffns = [ffn for split in splits for ffn in split.ffns]
            assert slots is None or executor.disk.counts()["bytes"]
            return found, [(ffn.hot.tolist(), ffn.collect()["copied"]) for ffn in ffns]
        finally:
            executor.close()

    wanted, held = run(1, None)
    assert policy is None or all(copied for _, copied in held)
    for slots in (4, 16):
        ours, on_two = run(2, slots)
        check_alike(ours, wanted)
        assert on_two == held


# ---------------------------------------------------------------- by plans


@pytest.fixture
def two_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured, with as many GPUs as are named, for which few neurons are worth it."""
    machine = replace(load("pc-high"), sync_us=0.0)
    machine = replace(machine, cpu=replace(machine.cpu, threads=ENGINE.threads))

    def measured(*_: Any, gpu: str | None = None, **__: Any) -> Hardware:
        return machine.with_cards([machine] * (gpu or "").count(","))

    monkeypatch.setattr("powerinfer.hardware.measure.measured", measured)
    monkeypatch.setattr("powerinfer.hardware.measure.saved_hardware", lambda *_, **__: machine)


def loaded_as_planned(resolved: Resolved) -> Any:
    """The answers on several GPUs, once they are those of one with the same, which may lack some RAM; the executor is
    closed."""
    executor, sparsity = load_resolved(resolved, list)
    try:
        assert executor.disk is not None and executor.disk._side.memory is None, "the load holds what it read to"
        found, disk = answers(executor), executor.disk
        assert disk is not None and set(disk.slots) == set(disk.about.neurons)
        counts = disk.counts()
        read = counts["bytes"]
        assert 0 < counts["hits"] < counts["wanted"]
        held = sum(ffn.cold_bytes for ffn in sparsity.ffns) if hasattr(sparsity, "ffns") else 0
    finally:
        executor.close()
    placement = replace(resolved.placement, firsts=(), several=None, staging=0)
    alone = replace(resolved, checkpoint=open_checkpoint(resolved.checkpoint.path), vram=None)
    alone = replace(alone, device=replace(resolved.device, gpu="cpu"), placement=placement)
    executor, _ = load_resolved(alone, list)
    try:
        check_alike(found, answers(executor))
    finally:
        executor.close()
    assert read
    return held


@pytest.mark.usefixtures("two_described")
def test_experts_that_neither_gpus_nor_ram_hold(large: Path) -> None:  # noqa: F811
    """Within all budgets; without a disk a line says how much RAM would do."""
    engine = replace(ENGINE, gpu="cpu,cpu")
    everything = resolve(open_checkpoint(large), replace(engine, vram=(2 * GIB, 2 * GIB)))
    assert everything.placement.several is not None and everything.placement.disk is None
    vrams = tuple(
        sum(part.plan.bytes["gpu"].values()) - 22 * part.plan.request.model.expert_bytes(0)[0]
        for part in everything.placement.several.parts
    )
    whole = resolve(open_checkpoint(large), replace(engine, vram=vrams))
    assert whole.placement.disk is None and whole.placement.experts is not None
    before = 1 << 30
    for less in (4 * MIB, 8 * MIB):
        ram = needs(whole).ram - less
        resolved = resolve(open_checkpoint(large), replace(engine, vram=vrams, ram=ram))
        disk, plan = resolved.placement.disk, resolved.placement.several
        assert disk is not None and plan is not None and not plan.fits and plan.loads and not plan.staging
        assert needs(resolved).ram <= ram and sum(disk.held.values()) == sum(plan.bytes["cpu"].values())
        assert plan.from_disk is not None and plan.from_disk.nbytes and plan.choice.seconds > whole_seconds(whole)
        slots = sum(disk.about.experts.values())
        assert 0 < slots < before
        before = slots
        with pytest.raises(RequestError, match=r"needs .* of RAM beside 2 GPUs, .* give --ram"):
            resolve(open_checkpoint(large), replace(engine, vram=vrams, ram=ram, disk="none"))
    held = loaded_as_planned(resolved)
    assert 0.9 * disk.held["experts"] < held <= disk.held["experts"]
    exchanged = resolve(open_checkpoint(large), replace(engine, vram=vrams, ram=ram, expert_policy="lru"))
    assert exchanged.policy.name == "lru" and exchanged.placement.disk is not None
    executor, _ = load_resolved(exchanged, list)
    try:
        assert all(np.isfinite(one).all() for one in answers(executor))
    finally:
        executor.close()


def whole_seconds(resolved: Resolved) -> float:
    plan = resolved.placement.several
    assert plan is not None
    return plan.choice.seconds


@pytest.mark.usefixtures("two_described")
@pytest.mark.parametrize("selector", ["predicted", "exact"])
def test_neurons_that_neither_gpus_nor_ram_hold(
    selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = neurons_on_disk.large_model(tmp_path, monkeypatch)
    engine = replace(ENGINE, gpu="cpu,cpu", selector=selector)
    everything = resolve(open_checkpoint(path), replace(engine, vram=(2 * GIB, 2 * GIB)))
    several, bundles = everything.placement.several, everything.selection.bundles
    assert several is not None and bundles is not None
    less = len(bundles.layers[0]) * bundles.layouts[0].group_bytes * 2 // 5
    vrams = tuple(sum(part.plan.bytes["gpu"].values()) - less for part in several.parts)
    whole = resolve(open_checkpoint(path), replace(engine, vram=vrams))
    assert whole.placement.several is not None and whole.placement.several.fits
    ram = needs(whole).ram - (3 << 18)
    resolved = resolve(open_checkpoint(path), replace(engine, vram=vrams, ram=ram))
    plan, disk = resolved.placement.several, resolved.placement.disk
    assert plan is not None and disk is not None and not plan.fits and plan.loads
    assert needs(resolved).ram <= ram and set(disk.about.neurons) <= {0, 1} and disk.about.neurons
    assert sum(disk.resting.values()) == sum(sum(part.plan.bytes["disk"].values()) for part in plan.parts) > 0
    assert any("stay on disk and are read when they" in reason for reason in plan.reasons)
    loaded_as_planned(resolved)
    with pytest.raises(RequestError, match=r"needs .* of RAM beside 2 GPUs, .* give --ram"):
        resolve(open_checkpoint(path), replace(engine, vram=vrams, ram=ram, disk="none"))
    with pytest.raises(RequestError, match=r"reading them from disk takes: give --ram .*, or more --vram") as caught:
        resolve(open_checkpoint(path), replace(engine, vram=vrams, ram=ram - (9 << 18)))
    stated = read_size(str(caught.value).partition("give --ram ")[2].split(",")[0])
    assert resolve(open_checkpoint(path), replace(engine, vram=vrams, ram=stated)).placement.disk is not None
    monkeypatch.setattr("powerinfer.hybrid.several.available_memory", lambda: ram)
    monkeypatch.setattr("powerinfer.hybrid.several.within", lambda free: free - (9 << 18))
    with pytest.raises(RequestError, match="reading them from disk takes") as free:
        resolve(open_checkpoint(path), replace(engine, vram=vrams))
    assert str(free.value) == str(caught.value)


@pytest.mark.usefixtures("two_described")
def test_whole_layers_on_two_gpus_where_neurons_take_the_disk_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = neurons_on_disk.large_model(tmp_path, monkeypatch, layers=16, neurons=neurons_on_disk.LARGE // 4)
    engine = replace(ENGINE, gpu="cpu,cpu", prefill_chunk=16)
    several = resolve(open_checkpoint(path), replace(engine, vram=(2 * GIB, 2 * GIB))).placement.several
    assert several is not None
    held = [part.plan.bytes["gpu"] for part in several.parts]
    vrams = tuple(sum(one.values()) - one["ffn"] * 2 // 5 for one in held)
    ram = needs(resolve(open_checkpoint(path), replace(engine, vram=vrams))).ram
    neurons = resolve(open_checkpoint(path), replace(engine, vram=vrams, ram=ram - (5 << 18)))
    assert neurons.selection.bundles is not None and neurons.placement.disk is not None
    monkeypatch.setattr("powerinfer.placement.plan.APART", 1 << 30)
    dense = resolve(open_checkpoint(path), replace(engine, vram=vrams, ram=ram - (5 << 18)))
    assert dense.selection.bundles is None and dense.placement.several is not None and dense.placement.plan is None
    assert dense.selection.reason.startswith("--vram and --ram do not hold all neurons")
    assert dense.placement.disk is not None and needs(dense).ram <= ram - (5 << 18)


@pytest.mark.parametrize(
    ("name", "ram", "what"),
    [
        ("glm-4.5-air", 16, "experts that are selected, of 45 layers"),
        ("llama-3.3-70b", 12, "of dense weights at every step"),
        ("bamboo-7b", 4, "GiB of neurons stay on disk"),
    ],
)
def test_plans_over_cards_read_from_disk(name: str, ram: int, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both budgets hold, and less RAM takes longer."""
    options: dict[str, Any] = {"selector": "exact", "vram": (2 * GIB, 2 * GIB)} if name == "bamboo-7b" else {}
    plan, more = (planned(name, "RTX 4060, RTX 3060", ram=nbytes * GIB, **options) for nbytes in (ram, 2 * ram))
    assert isinstance(plan, Plan) and plan.loads and not plan.fits
    assert any(what in reason for reason in plan.reasons) and plan.choice.seconds > more.choice.seconds
    budget = plan.request.ram or plan.request.hardware.cpu.memory_bytes - plan.request.hardware.cpu.reserved_bytes
    assert sum(plan.bytes["cpu"].values()) <= budget and sum(plan.bytes["disk"].values())
    assert any(one.what == "everything in memory" for one in plan.helps)
    if name == "glm-4.5-air":
        flags = ["plan", "--shape", name, "--card", "RTX 4060, RTX 3060", "--ram", f"{ram}GiB", "-c", "4096"]
        assert main(flags) == 0 and "from the disk at up to" in capsys.readouterr().out
        assert main([*flags, "--json"]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert document["loads"] and not document["fits"] and document["predicted"]["disk_bytes"]
