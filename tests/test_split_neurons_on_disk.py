"""Neurons on a GPU, in RAM and on disk: the bits of those of which RAM has all that the GPU lacks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_device import device_name  # noqa: E402
from sparse_models import give_profile, profile_of  # noqa: E402
from test_disk_neurons import FEWEST, NEURONS, model, steps, wide  # noqa: E402, F401
from test_gpu_layers import on_gpu  # noqa: E402
from test_hybrid import placed  # noqa: E402
from test_split_experts_on_disk import emulating  # noqa: E402

from powerinfer import ModelError, RequestError, _native  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices.disk import OnDisk  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.devices.stage import Stage, buffer_bytes  # noqa: E402
from powerinfer.devices.torch_device import choose_device  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hardware.description import load  # noqa: E402
from powerinfer.hybrid.beside_gpu import with_fewer_layers  # noqa: E402
from powerinfer.hybrid.ffn import HybridFfn, NeuronSplit  # noqa: E402
from powerinfer.hybrid.load import load_resolved, load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Resolved, needs  # noqa: E402
from powerinfer.hybrid.sparsity import HybridSparsity  # noqa: E402
from powerinfer.kernels.cpu import NEURON_TOKENS  # noqa: E402
from powerinfer.placement import budget  # noqa: E402
from powerinfer.placement.disk import DiskPlan, resting_bytes, resting_in_ram, slot_bytes  # noqa: E402
from powerinfer.placement.plan import make_plan, with_less_vram  # noqa: E402
from powerinfer.sparsity.selection import select  # noqa: E402

ENGINE = EngineConfig(
    threads=1, prefill_chunk=64, max_batch=4, context=128, trial=False, disk="direct", selector="predicted"
)
PAGES = 16
LARGE = 12288  # neurons
MIB = 1 << 20


@contextmanager
def split(
    path: Path,
    slots: int | None,
    share: float = 0.3,
    streams: bool = False,
    reads: Callable[..., Any] | None = None,
    layers: int | None = None,
    resting: tuple[int, ...] | None = None,
    fills: bool = True,
    selector: str = "predicted",
) -> Iterator[tuple[Any, list[HybridFfn]]]:
    """slots: neurons of each layer in RAM, of all that the GPU does not have; None: all of them are there.

    share: of the neurons on the GPU. streams: the GPU computes what is cold of prompts. reads: makes those of files,
    None: of the disk. layers: on the GPU, None: all. resting: layers whose neurons are on disk, None: those.
    fills: memory reads those that fire most often.
    """
    checkpoint, engine = open_checkpoint(path), replace(ENGINE, selector=selector)
    config, selection = checkpoint.config, select(checkpoint, engine)
    bundles = selection.bundles
    assert bundles is not None
    stage = None
    if streams:
        stage = Stage(choose_device(device_name()), buffer_bytes(bundles.layouts[0], NEURONS, 1 << 20))
        stage.least = NEURON_TOKENS + 1
    profile = profile_of(config.n_layers, NEURONS)
    made = NeuronSplit(
        bundles, placed(config, share), predictors=selection.predictors, stage=stage, frequency=profile.fraction
    )
    every = config.n_layers
    plan = None
    if slots is not None:
        rest = range(layers or every) if resting is None else resting
        plan = DiskPlan(OnDisk(neurons=dict.fromkeys(rest, slots)), {}, 0)
    where = on_gpu(layers or every, head=(layers or every) == every, pages=PAGES)
    with pytest.MonkeyPatch.context() as patch:
        if reads is not None:
            patch.setattr(_native, "Reads", reads)
        executor = load_split(Resolved(checkpoint, engine, selection, **where).placed(disk=plan), made)
        for ffn in made.ffns if fills else ():
            ffn.fill()
        try:
            yield executor, made.ffns
        finally:
            executor.close()
            made.close()


def answers(executor: Any, first: int | None = None) -> list[np.ndarray]:
    """Of the first steps, None: of all. The first five are of one sequence, a prompt and single tokens."""
    return [executor.forward(batch).copy() for batch in islice(steps(executor.vocab_size), first)]


def check_bits(executor: Any, right: list[np.ndarray]) -> None:
    for own, one in zip(answers(executor, len(right)), right, strict=True):
        np.testing.assert_array_equal(own, one)


@pytest.mark.parametrize(
    ("selector", "types", "activation", "streams"),
    [  # each type by the CPU and streamed, and so each selector
        ("predicted", ("F16", "F16"), "relu", False),
        ("predicted", ("Q8_0", "Q8_0"), "relu", True),
        ("predicted", ("Q4_0", "Q4_0X32"), "relu", False),
        ("exact", ("F16", "F16"), "drelu", True),
        ("exact", ("Q8_0", "F16"), "opt", False),
        ("exact", ("Q8_0", "F16"), "opt", True),
        ("exact", ("Q4_0", "Q4_0X32"), "relu", True),
    ],
)
@pytest.mark.usefixtures("device")
def test_the_bits_are_those_of_neurons_in_ram(
    selector: str, types: tuple[str, str], activation: str, streams: bool, tmp_path: Path
) -> None:
    """Whatever the slots hold, and however prompts are computed."""
    path = model(tmp_path, types, activation)
    own: dict[str, Any] = {"streams": streams, "selector": selector}
    with split(path, None, **own) as (executor, ffns):
        right = answers(executor)
        counted = [dict(ffn.collect()) for ffn in ffns]
    read = []
    for slots in (FEWEST, NEURONS // 2, NEURONS):
        with split(path, slots, **own) as (executor, ffns):
            check_bits(executor, right)
            told = [dict(ffn.collect()) for ffn in ffns]
            assert [own | {"jobs": 0} for own in told] == [own | {"jobs": 0} for own in counted]
            check_bits(executor, right)
            read.append(executor.disk.counts())
    few, more, every = read
    assert few["hits"] < more["hits"] < every["hits"] <= every["wanted"] and every["bytes"] > 0
    assert few["bytes"] > more["bytes"] > every["bytes"] or streams, "what is cold of prompts is read in any case"


@pytest.mark.usefixtures("device")
def test_only_what_fires_is_read(tmp_path: Path) -> None:
    with split(model(tmp_path), FEWEST, selector="exact") as (executor, ffns):
        prompt, *others = islice(steps(executor.vocab_size), 5)
        executor.forward(prompt)
        for batch in others:
            executor.disk.clear()
            for ffn in ffns:
                ffn.clear()
            executor.forward(batch)
            fired = sum(ffn.collect()["cold"] for ffn in ffns)
            assert executor.disk.counts()["wanted"] == fired < sum(len(ffn.cold) for ffn in ffns)


@pytest.mark.parametrize("selector", ["predicted", "exact"])
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.usefixtures("device")
def test_none_and_all_of_them_on_the_gpu(share: float, selector: str, tmp_path: Path) -> None:
    path = model(tmp_path)
    with split(path, None, share, selector=selector) as (executor, _):
        right = answers(executor)
    with split(path, FEWEST, share, selector=selector) as (executor, ffns):
        check_bits(executor, right)
        assert all(bool(dict(ffn.collect())["jobs"]) == (share == 0) for ffn in ffns)
        assert bool(executor.disk.counts()["wanted"]) == (share == 0)


@pytest.mark.parametrize("selector", ["predicted", "exact"])
@pytest.mark.usefixtures("device")
def test_layers_of_both_kinds(selector: str, tmp_path: Path) -> None:
    """One whose cold neurons rest on disk beside one that has all of them in RAM, and one on the CPU as a whole."""
    path = model(tmp_path)
    for more in ({"resting": (1,)}, {"layers": 1}):
        with split(path, None, layers=more.get("layers"), selector=selector) as (executor, _):  # type: ignore[arg-type]
            right = answers(executor)
        with split(path, FEWEST, selector=selector, **more) as (executor, _):  # type: ignore[arg-type]
            check_bits(executor, right)
            assert executor.disk.counts()["bytes"] and len(executor.disk.slots) == 1


@pytest.mark.parametrize("selector", ["predicted", "exact"])
@pytest.mark.parametrize("streams", [False, True], ids=["by the CPU", "streamed"])
@pytest.mark.usefixtures("device")
def test_neurons_that_move(streams: bool, selector: str, tmp_path: Path) -> None:
    """As where memory is measured: those that leave the GPU rest on disk, too."""
    path = model(tmp_path)
    rng = np.random.default_rng(7)
    moved = [np.flatnonzero(rng.random(NEURONS) < share).astype(np.int32) for share in (0.1, 0.8)]
    with (
        split(path, None, streams=streams, selector=selector) as (executor, ffns),
        split(path, FEWEST, streams=streams, fills=False, selector=selector) as (other, cold),
    ):
        for hot in moved:
            for one in (*ffns, *cold):
                one.place(hot)
            for one in cold if hot is moved[0] else ():
                one.fill()
                slots = other.disk.slots[one.layer]
                assert not slots.priority[hot].any() and slots.priority[one.cold].any(), "others want no slots"
            check_bits(other, answers(executor))
            for one, own in zip(ffns, cold, strict=True):
                assert np.array_equal(one.take_fired()[1], own.take_fired()[1])


@pytest.mark.parametrize("selector", ["predicted", "exact"])
@pytest.mark.parametrize("at", [0, 3, 100])
@pytest.mark.usefixtures("device")
def test_a_step_that_could_not_read_fails_and_the_next_one_is_right(at: int, selector: str, tmp_path: Path) -> None:
    emulated = {"fail_at": at + NEURONS, "failures": 1, "error": errno.EIO}  # behind those that are read at the start
    _check_failure(model(tmp_path), emulating(**emulated), False, selector)


@pytest.mark.usefixtures("device")
def test_gates_that_could_not_be_read(tmp_path: Path) -> None:
    opened: list[Any] = []

    def reads(files: Any, direct: bool) -> Any:
        opened.append(None)
        return emulating(**({"fail_at": 0, "failures": 1, "error": errno.EIO} if opened[1:] else {}))(files, direct)

    with (
        pytest.raises(ModelError, match=os.strerror(errno.EIO)),
        split(model(tmp_path), FEWEST, reads=reads, selector="exact"),
    ):
        pass
    assert len(opened) == 2


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.usefixtures("device")
def test_a_prompt_that_could_not_be_read_fails_and_the_next_one_is_right(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def reads(files: Any, direct: bool) -> Any:
        """The second of them are those of prompts."""
        failing = {"fail_at": at, "failures": 1, "error": errno.EIO} if opened else {}
        opened.append(None)
        return emulating(**failing)(files, direct)

    _check_failure(model(tmp_path), reads, True)
    assert len(opened) == 2


def _check_failure(path: Path, reads: Any, streams: bool, selector: str = "predicted") -> None:
    failed = 0
    with (
        split(path, None, streams=streams, selector=selector) as (executor, _),
        split(path, NEURONS // 2, streams=streams, reads=reads, selector=selector) as (other, _),
    ):
        for batch in steps(executor.vocab_size):
            right = executor.forward(batch).copy()
            try:
                found = other.forward(batch).copy()
            except ModelError as error:
                assert str(error).endswith(os.strerror(errno.EIO)) and "\n" not in str(error)
                failed += 1
                found = other.forward(batch).copy()
            np.testing.assert_array_equal(found, right)
    assert failed == 1


@pytest.mark.usefixtures("device")
def test_bundles_that_change_are_noticed(tmp_path: Path) -> None:
    path = model(tmp_path)
    with split(path, FEWEST) as (executor, _):
        first, *_ = steps(executor.vocab_size)
        executor.forward(first)
        os.utime(path.with_name(path.name + ".powerinfer") / "neurons.safetensors")
        with pytest.raises(ModelError, match="changed"):
            executor.forward(first)


# ---------------------------------------------------------------- by a plan


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made for a described machine: this one may be measured anew at any time."""
    machine = load("pc-high")
    machine = replace(machine, cpu=replace(machine.cpu, threads=ENGINE.threads))
    monkeypatch.setattr("powerinfer.hardware.measure.measured", lambda *_, **__: machine)
    monkeypatch.setattr("powerinfer.hardware.measure.saved_hardware", lambda *_, **__: machine)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: None) -> Path:
    return large_model(tmp_path, monkeypatch)


def large_model(folder: Path, monkeypatch: pytest.MonkeyPatch, layers: int = 0, neurons: int = LARGE) -> Path:
    """With more neurons than there are slots for those that are being read."""
    if layers:
        monkeypatch.setattr(model_files, "LAYERS", layers)
    monkeypatch.setattr(model_files, "FF", neurons)
    monkeypatch.setattr("test_disk_neurons.NEURONS", neurons)
    for name in ("PACKED", "READ_COPIES", "FIRSTS_AT_ONCE"):  # else so small models are not read from disk
        monkeypatch.setattr(f"powerinfer.placement.disk.{name}", 4 << 10)
    path = model(folder)
    give_profile(path)
    return path


def planned(path: Path, less: int, more: Mapping[str, Any] = {}, **options: Any) -> Resolved:
    """With a --vram for three in five neurons, and so much less --ram than the others need."""
    own, checkpoint = replace(ENGINE, gpu=device_name(), **more), open_checkpoint(path)
    if options.get("selector") == "exact":
        own = replace(own, selector="exact")
    every = needs(resolve(checkpoint, own))
    bundles = select(checkpoint, ENGINE).bundles
    assert bundles is not None
    vram = every.vram - sum(len(one) for one in bundles.layers) * bundles.layouts[0].group_bytes * 2 // 5
    whole = resolve(checkpoint, replace(own, vram=vram))
    assert whole.placement.plan is not None and whole.placement.plan.fits and whole.placement.disk is None
    if not less:
        return whole
    return resolve(open_checkpoint(path), replace(own, **({"vram": vram, "ram": needs(whole).ram - less} | options)))


@pytest.mark.parametrize("selector", ["predicted", "exact"])
def test_what_neither_memory_holds_stays_on_disk(selector: str, large: Path) -> None:
    """Within both budgets, which the load keeps; the less RAM, the fewer neurons are there."""
    before = 1 << 30
    for less in (3 << 18, 7 << 18) if selector == "predicted" else (3 << 18, 4 << 18):
        resolved = planned(large, less, selector=selector)
        plan, disk, engine = resolved.placement.plan, resolved.placement.disk, resolved.engine
        assert plan is not None and disk is not None and engine.ram is not None and engine.vram is not None
        assert not plan.fits and needs(resolved).ram <= engine.ram and needs(resolved).vram <= engine.vram
        when = "are selected" if selector == "predicted" else "fire"
        assert f"stay on disk and are read when they {when}" in " ".join(plan.reasons)
        said: list[str] = []
        executor, sparsity = load_resolved(resolved, list, say=said.append)
        try:
            assert "it reads neurons that fire, of 2 layers" in said[0] and executor.choices.disk is not None
            in_ram = sum(ffn.cold_bytes for ffn in sparsity.ffns)  # type: ignore[attr-defined]
            beside, _ = resting_in_ram(plan.request.model, 2, 2, 0, selector == "predicted")
            pitch = plan.request.model.bundle.pitch
            assert in_ram <= disk.held["ffn"] + 2 * beside * pitch and in_ram < before
            before = in_ram
            assert "some of it from disk, streams from 33 tokens" in str(executor.choices.prefill)
            found = answers(executor, 5)
            report = executor.disk.report()  # type: ignore[union-attr]
            assert report["bytes"] and 0 < report["hit_rate"] < 1
        finally:
            executor.close()
        whole, own = load_resolved(replace(resolved, checkpoint=open_checkpoint(large)).placed(disk=None), list)
        assert own.stage is not None
        own.stage.least = NEURON_TOKENS + 1  # measured there
        check_bits(whole, found)
        whole.close()


@pytest.mark.parametrize(("selector", "less"), [("predicted", 9 << 17), ("exact", 3 << 18)])
def test_neurons_that_leave_the_gpu_rest_on_disk_too(selector: str, less: int, large: Path) -> None:
    """As where memory is measured: RAM holds no more than before, and a rehearsal reads nothing."""
    resolved = planned(large, less, selector=selector)
    assert resolved.placement.plan is not None and resolved.placement.disk is not None
    executor, sparsity = load_resolved(resolved, list)
    assert isinstance(sparsity, HybridSparsity) and isinstance(executor, SplitExecutor) and executor.disk is not None
    held = sum(ffn.cold_bytes for ffn in sparsity.ffns)
    right = answers(executor, 5)
    plan = with_less_vram(resolved.placement.plan, 1 << 18)
    assert plan is not None and plan.loads and not plan.fits
    before = sum(len(ffn.hot) for ffn in sparsity.ffns)
    executor.close()
    executor, sparsity = load_resolved(resolved.placed(plan=plan, disk=plan.on_disk), list)
    assert isinstance(sparsity, HybridSparsity) and isinstance(executor, SplitExecutor) and executor.disk is not None
    assert sum(len(ffn.hot) for ffn in sparsity.ffns) < before
    beside, _ = resting_in_ram(plan.request.model, 2, 2, 0, selector == "predicted")
    slot = resting_bytes(plan.request.model.bundle, selector == "predicted")
    most = plan.bytes["cpu"]["ffn"] + 2 * beside * slot
    assert held - (1 << 18) < sum(ffn.cold_bytes for ffn in sparsity.ffns) <= most
    assert sum(plan.bytes["cpu"].values()) <= (resolved.engine.ram or 0)
    executor.disk.clear()
    executor.gpu.rehearse(1)
    assert executor.disk.counts()["wanted"] == 0
    for own, one in zip(answers(executor, 5), right, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-3, atol=1e-3)
    executor.close()


@pytest.mark.parametrize("selector", ["predicted", "exact"])
def test_plans_with_layers_on_the_cpu_as_a_whole(
    selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: None
) -> None:
    """Within --ram, whether it can be loaded or not; and what it suggests can be."""
    path = large_model(tmp_path, monkeypatch, layers=4, neurons=LARGE // 4)
    own = replace(ENGINE, gpu=device_name(), selector=selector, prefill_chunk=16)
    checkpoint = open_checkpoint(path)
    plan = resolve(checkpoint, own).placement.plan
    assert plan is not None and plan.fits
    model_, request = plan.request.model, plan.request
    dense = sum(budget.on_gpu(model_, request.hardware, request.workload, budget.Division(3)).values())
    request = replace(request, vram=dense + budget.shared_on_gpu(model_, 3) + 1024)
    whole = sum(make_plan(request).bytes["cpu"].values())
    kinds = set()
    for ram in range(whole - 4 * MIB, whole, MIB // 2):
        request = replace(request, ram=ram)
        try:
            found = make_plan(request)
        except RequestError:
            continue
        assert found.claims.gpu_layers == 3 and sum(found.bytes["cpu"].values()) <= ram
        kinds.add((found.fits, found.loads))
        for one in found.helps:
            if one.what == "neurons are read from disk":
                assert make_plan(replace(request, ram=one.bytes)).loads
    assert {(False, True), (False, False)} <= kinds


@pytest.mark.parametrize("each", [64, 4096, 6912, 16384, 32768, 36800, 49152])
def test_a_slot_takes_what_is_planned(each: int, tmp_path: Path) -> None:
    """Past the cache whole blocks are read, in place or to be copied."""
    path = tmp_path / "items"
    path.write_bytes(bytes(9 * each + 192))
    reads = _native.Reads([(str(path), path.stat().st_size)], True)
    slots = _native.Slots(reads, [_native.Resting(0, 192, each, each)], 9, 2)
    assert slots.slot_bytes <= slot_bytes(each) <= 1.125 * max(each, slots.slot_bytes)


def test_what_cannot_be_read_is_refused_or_done_otherwise(large: Path) -> None:
    less = 1 << 20
    for options, match in (
        ({"disk": "none"}, "--disk none forbids to read them: give --ram"),
        ({"adjust": True}, "--adjust moves neurons between devices, and some of them rest on disk: leave it out"),
    ):
        with pytest.raises(RequestError, match=match):
            planned(large, less, **options)
    for selector in ("exact", "auto"):
        assert planned(large, less, selector=selector).placement.disk is not None
        with pytest.raises(
            RequestError, match=r"and --ram does not hold what reading them from disk takes: give --ram"
        ):
            planned(large, 2 * less, selector=selector)


def test_without_predictors_neurons_or_whole_layers_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: None
) -> None:
    """Neurons, unless RAM does not hold what that takes, or the disk would take clearly longer."""
    path = large_model(tmp_path, monkeypatch, layers=16, neurons=LARGE // 4)
    short = {"prefill_chunk": 16}
    neurons = planned(path, 5 << 18, short, selector="auto")
    assert neurons.placement.plan is not None and neurons.placement.disk is not None
    assert neurons.placement.disk.about.neurons
    for less, apart in ((12 << 18, 8 << 10), (5 << 18, 1 << 30)):
        monkeypatch.setattr("powerinfer.placement.plan.APART", apart)
        auto = planned(path, less, short, selector="auto")
        assert auto.placement.plan is None and auto.selection.bundles is None and 0 < auto.placement.layers < 16
        assert auto.selection.reason.startswith("--vram and --ram do not hold all neurons")
        assert auto.placement.disk is not None and needs(auto).ram <= (auto.engine.ram or 0)


def test_buffers_for_prompts_leave_the_free_memory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: None
) -> None:
    """They do before a layer is on disk, as within --ram."""
    path, free = large_model(tmp_path, monkeypatch, layers=16), 1 << 40
    monkeypatch.setattr("powerinfer.system.available_memory", lambda: free)
    engine = replace(ENGINE, gpu=device_name(), selector="all")
    engine = replace(engine, vram=needs(resolve(open_checkpoint(path), engine)).vram - 100 * MIB)
    whole = resolve(open_checkpoint(path), engine)
    assert 0 < whole.placement.layers < 16 and whole.placement.staging
    free = needs(whole).ram
    assert resolve(open_checkpoint(path), engine).placement == whole.placement
    free -= 1
    without = resolve(open_checkpoint(path), engine)
    assert without.placement == whole.placed(staging=0).placement and needs(without).ram <= free


def test_without_ram_the_free_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: None) -> None:
    """Of layers on the CPU beside a GPU, with a short context if none was asked for."""
    path = large_model(tmp_path, monkeypatch, layers=16)
    free = 1 << 40
    monkeypatch.setattr("powerinfer.system.available_memory", lambda: free)
    engine = replace(ENGINE, gpu=device_name(), selector="all", prefill_chunk=16)
    every = needs(resolve(open_checkpoint(path), engine))
    engine = replace(engine, vram=every.vram - 30 * MIB)
    whole = resolve(open_checkpoint(path), engine)
    assert 0 < whole.placement.layers < 16 and whole.placement.disk is None
    free = needs(whole).ram
    assert resolve(open_checkpoint(path), engine).placement.disk is None
    free -= 5 * MIB
    placed = resolve(open_checkpoint(path), engine)
    assert placed.placement.disk is not None and placed.engine.ram is None
    assert placed.placement.layers == whole.placement.layers
    assert sum(placed.placement.disk.held.values()) <= free and not placed.placement.staging
    assert resolve(open_checkpoint(path), replace(engine, disk="none")).placement.disk is None
    fewer = with_fewer_layers(placed)
    assert isinstance(fewer, Resolved) and fewer.placement.disk is not None
    assert fewer.placement.disk.resting["panels"] > placed.placement.disk.resting["panels"]
    free = 1 * MIB
    assert resolve(open_checkpoint(path), engine).placement.disk is None, "the system may find it"
