"""Plans where RAM does not hold a model on the CPU alone: what a load leaves on disk, and how fast that decodes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
from expert_shapes import shape
from sparse_models import give_bundles, give_predictor, give_profile, profile_for, tiny_llama
from test_disk import OPTIONS, PARAMS, least_of
from test_disk_experts import larger

from benchmarks.models import expert_models
from powerinfer import LLM, ModelError, RequestError
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hardware import measure
from powerinfer.hardware.description import Disk, Hardware, load, save
from powerinfer.hybrid.disk import open_tier
from powerinfer.hybrid.disk_hints import disk_speed
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import Resolved, needs
from powerinfer.neurons import Profile
from powerinfer.placement import disk
from powerinfer.placement.budget import Workload, least_ram
from powerinfer.placement.disk import plan_disk
from powerinfer.placement.disk_speed import Decoding, Op, follow, predict
from powerinfer.placement.plan import PlanRequest, kept_document, make_plan, save_plan
from powerinfer.placement.plan_document import rate
from powerinfer.placement.power_law import FAMILIES, assumed_profile
from powerinfer.placement.request import model_subject, shape_subject
from powerinfer.placement.shapes import Model

MIB, GIB = 1 << 20, 1 << 30
HIGH = load("pc-high")
DISK = Disk({4096: 1.0, 1 << 20: 1.0})  # 1 GB/s, whatever the size
MB = 1_000_000
OTHER = EngineConfig(threads=3)  # for which nothing was measured


def op(seconds: float, read: int = 0, **more: Any) -> Op:
    return Op(0, seconds, read, read, **more)


# ---------------------------------------------------------------- following a step


def test_a_step_computes_while_the_disk_reads() -> None:
    read, reads_less = op(0.004, 10 * MB), op(0.015, 10 * MB)
    for ops, window, seconds in (
        ([op(0.004), op(0.002)], 0, 0.006),
        ([read, read], 20 * MB, 0.020),  # the disk never waits
        ([read, read], 10 * MB, 0.028),  # nothing is read while it is used
        ([reads_less, reads_less], 20 * MB, 0.030),
        ([read, op(0.030)], 10 * MB, 0.034),  # read meanwhile
        ([op(0.001, 10 * MB), op(0.002)], 15 * MB, 0.011),  # the next step's has no room beside it
        ([read, op(0.001, 5 * MB), read], 25 * MB, 0.025),
    ):
        found, waited = follow(ops, window, DISK)
        assert found == pytest.approx(seconds), (ops, window)
        assert sum(waited) == pytest.approx(seconds - sum(one.seconds for one in ops))


def test_what_is_fetched_delays_what_needs_it() -> None:
    for fetch, seconds in ((0.005, 0.010), (0.012, 0.015)):  # known after 2 ms, 1 ms remains to be computed
        found, _ = follow([op(0.010, first=0.002, last=0.001, fetch=fetch)], 0, DISK)
        assert found == pytest.approx(seconds)
    behind, waited = follow([op(0.001, 20 * MB), op(0.001, fetch=0.004, last=0.001)], 40 * MB, DISK)
    assert behind == pytest.approx(0.026), "one disk serves both, the next step first"
    assert waited[1] == pytest.approx(0.024)


# ---------------------------------------------------------------- predictions


def test_what_is_guessed_is_read_while_the_operator_before_computes() -> None:
    """Ten milliseconds of reads each, of the second eight early; the first one computes for six."""
    latency = HIGH.disk
    assert latency is not None
    for early, seconds in ((0.0, 0.032), (0.008, 0.026)):
        ops = [
            Op(0, 0.006, first=0.006, fetched=1, fetch=0.01, needed=1, missed=1),
            Op(1, 0.006, first=0.006, fetched=1, fetch=0.01, needed=1, missed=1, early=early),
        ]
        found, waited = follow(ops, 0, latency)
        assert found == pytest.approx(seconds) and sum(waited) == pytest.approx(seconds - 0.012)


def test_some_memory_for_neurons_is_common(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shape_subject("llama-7b", "q4_0", "predicted").model
    profile = profile_for(model.config.ffn_sizes)
    work, n = Workload("f16", 1024, 512, selector="predicted"), max(model.config.ffn_sizes)
    for ram in (2 * GIB, 5 * GIB // 2, 3 * GIB):
        plan = plan_disk(model, work, ram, HIGH.cpu.threads, bundled=True, profile=profile)
        about = plan.about
        assert about.slot_bytes == model.bundles[0].pitch
        slots = sum(about.neurons.values()) + about.common
        if min(about.neurons.values()) > max(n // disk.FEWEST, disk.LEAST * HIGH.cpu.threads):
            assert about.common == n // disk.MOST or about.common == pytest.approx(slots / disk.COMMON, rel=0.1)
        else:  # all beyond the fewest
            assert 0 < about.common < slots / disk.COMMON
        monkeypatch.setattr(disk, "COMMON", 1 << 40)
        without = plan_disk(model, work, ram, HIGH.cpu.threads, bundled=True, profile=profile)
        monkeypatch.undo()
        assert without.about.common == 0 and without.about.slot_bytes == 0
        assert sum(without.about.neurons.values()) - slots in range(-2, 3)  # whole slots of each layer
        assert abs(sum(plan.held.values()) - sum(without.held.values())) < 2 * about.slot_bytes
        assert sum(plan.held.values()) <= ram
        assert bool(about.lent) == bool(without.about.lent)


def test_bundles_that_do_not_go_together_share_no_memory() -> None:
    model = shape_subject("llama-7b", "q4_0", "predicted").model
    sizes = [replace(one, down_bytes=one.down_bytes + 64 * (at % 2)) for at, one in enumerate(model.bundles)]
    plan, _ = planned(replace(model, bundles=sizes), 5 * GIB // 2, "predicted")
    assert plan.about.neurons and plan.about.common == 0
    for nbytes in (1 << 16, 4096):  # larger ones; of 2,048 numbers in F16: a whole number of blocks, read in place
        rows = [replace(one, gate_bytes=4096, down_bytes=nbytes) for one in model.bundles]
        plan, _ = planned(replace(model, bundles=rows), 3 * GIB, "predicted")
        assert plan.about.neurons and plan.about.common == 0


def planned(model: Model, ram: int, selector: str = "all") -> tuple[disk.DiskPlan, Workload]:
    work = Workload("f16", 1024, 128, selector=selector)
    return plan_disk(model, work, ram, HIGH.cpu.threads, bundled=selector != "all"), work


def test_dense_models_take_the_time_of_their_reads_or_products() -> None:
    model, profile = (
        shape_subject("mistral-7b", "q4_0", "all").model,
        assumed_profile(FAMILIES["swiglu"], (14336,) * 32),
    )
    assert HIGH.disk is not None
    last = None
    for ram in range(GIB, 4 * GIB, GIB // 4):
        plan, work = planned(model, ram)
        found = predict(plan, model, HIGH.cpu, HIGH.disk, Decoding(work, 512, profile))
        assert found.nbytes == plan.streamed and found.hits is None and found.prompt_bytes == plan.streamed
        reading, computing = found.nbytes / HIGH.disk.rate(4 << 20), sum(own for own, _ in found.layers)
        assert max(reading, computing) * (1 - 1e-9) <= found.seconds <= reading + computing + 0.01
        if computing < reading / 2:
            assert found.seconds < 1.1 * reading, "the disk hardly ever waits"
        assert last is None or (found.seconds < last.seconds and found.nbytes < last.nbytes)
        last = found
        slower = replace(HIGH.cpu, pack_gb_s=0.5)
        assert predict(plan, model, slower, HIGH.disk, Decoding(work, 512, profile)).seconds > found.seconds


@pytest.mark.parametrize("selector", ["exact", "predicted"])
def test_neurons_that_fire_often_are_in_memory(selector: str) -> None:
    model = shape_subject("llama-7b", "q4_0", "predicted").model
    profile, last = profile_for(model.config.ffn_sizes), 1.0
    assert HIGH.disk is not None
    for ram in (2 * GIB, 5 * GIB // 2, 3 * GIB):
        plan, work = planned(model, ram, selector)
        found = predict(plan, model, HIGH.cpu, HIGH.disk, Decoding(work, 512, profile))
        read = needed = 0.0
        for layer, slots in plan.about.neurons.items():
            fired = np.sort(profile.fraction(layer))[::-1]
            wanted = fired if selector == "exact" else np.minimum(1, model.selected[layer] * fired)
            layout = model.bundles[layer]
            read += wanted[slots:].sum() * (layout.pitch - (layout.gate_bytes if selector == "exact" else 0))
            needed += wanted.sum()
        assert found.nbytes == pytest.approx(read + plan.streamed, rel=1e-3)
        assert found.hits is not None and 0 < found.hits < 1
        assert found.seconds <= last
        last = found.seconds


def test_ram_goes_to_what_would_be_read_the_longest() -> None:
    model = shape_subject("llama-7b", "q4_0", "exact").model
    n, work = 11008, Workload("f16", 1024, 128, selector="exact")

    def profile(*shares: np.ndarray) -> Profile:
        counts = tuple((1e6 * np.minimum(1, shares[layer % len(shares)])).astype(np.int64) for layer in range(32))
        return replace(assumed_profile(FAMILIES["swiglu"], (n,) * 32), tokens=10**6, counts=counts)

    def read(plan: disk.DiskPlan, own: Profile) -> float:
        each = model.bundles[0].pitch - model.bundles[0].gate_bytes + disk.APART
        missed = (np.sort(own.fraction(layer))[::-1][slots:].sum() for layer, slots in plan.about.neurons.items())
        return plan.streamed + sum(missed) * each

    skewed = 100 / np.arange(1, n + 1)
    uneven, rare, often = profile(2 * skewed, skewed / 2), profile(np.full(n, 0.001)), profile(np.full(n, 0.9))
    gains = []
    for ram in (3 * GIB // 2, 2 * GIB, 5 * GIB // 2):
        plain = plan_disk(model, work, ram, HIGH.cpu.threads, bundled=True)
        given = model, work, ram, HIGH.cpu.threads
        plans = {own: plan_disk(*given, bundled=True, profile=own) for own in (uneven, rare, often)}
        for own, plan in plans.items():
            assert sum(plan.held.values()) <= ram
            assert read(plan, own) <= read(plain, own)
        assert plans[rare].streamed < plans[uneven].streamed < plans[often].streamed
        assert plans[uneven].about.neurons[0] > 2 * plans[uneven].about.neurons[31]
        gains.append(read(plain, uneven) / read(plans[uneven], uneven))
    assert 1 < gains[0] < gains[1] < gains[2]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux")
@pytest.mark.parametrize("selector", ["exact", "predicted"])
def test_neurons_have_memory_that_prompts_alone_use(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ram = shape_subject("llama-7b", "q4_0", "predicted").model, 5 * GIB // 2
    work, profile = Workload("f16", 1024, 512, selector=selector), profile_for(model.config.ffn_sizes)
    plan = plan_disk(model, work, ram, HIGH.cpu.threads, bundled=True, profile=profile)
    about = plan.about
    assert sum(plan.held.values()) <= ram
    assert all(0 < about.lent[layer] < n for layer, n in about.neurons.items())
    slot = model.bundles[0].pitch - (model.bundles[0].gate_bytes if selector == "exact" else 0)
    more = slot * sum(n - about.lent[layer] for layer, n in about.neurons.items())
    rows = (512 - 32) * model.row_bytes
    alone = about.window if not plan.streamed else 0
    assert rows / 2 < more <= rows + alone and about.lends_window == (not plan.streamed)
    short = plan_disk(model, replace(work, chunk=32), ram, HIGH.cpu.threads, bundled=True, profile=profile)
    assert bool(short.about.lent) == short.about.lends_window == (not short.streamed)  # no rows, at most the window
    monkeypatch.setattr(disk, "ROUNDED", GIB)
    without = plan_disk(model, work, ram, HIGH.cpu.threads, bundled=True, profile=profile)
    assert not without.about.lent
    assert sum(without.about.neurons.values()) < sum(about.neurons.values()) or without.streamed > plan.streamed


def test_experts_that_are_there_are_not_read() -> None:
    model = shape_subject("qwen3-30b-a3b", "q4_0", "all").model
    assert HIGH.disk is not None
    profile, n = assumed_profile(FAMILIES["swiglu"], model.config.ffn_sizes), 128
    plan, work = planned(model, 8 * GIB)
    each = sum(one.file for one in model.experts[0]) / n
    often = {layer: np.linspace(0, 1, n + 1) ** 0.3 for layer in model.config.experts}
    found = []
    for hits in (None, often):
        decoding = Decoding(work, 512, profile, hits)
        one = predict(plan, model, HIGH.cpu, HIGH.disk, decoding)
        lacking = [1 - (slots / n if hits is None else hits[at][slots]) for at, slots in plan.about.experts.items()]
        assert one.nbytes == pytest.approx(8 * sum(lacking) * each)
        assert one.hits == pytest.approx(1 - sum(lacking) / len(lacking))
        found.append(one)
    assert found[1].seconds < found[0].seconds
    assert found[0].prompt_bytes == pytest.approx(
        sum((n - slots) * each for slots in plan.about.experts.values()), rel=1e-3
    ), "a piece of a prompt selects nearly all of them"


# ---------------------------------------------------------------- plans


def request(ram: int | None, name: str = "mistral-7b", hardware: Hardware = HIGH, **options: Any) -> PlanRequest:
    engine = EngineConfig(ram=ram, gpu="none", context=1024, max_batch=1, **options)
    return shape_subject(name, "q4_0", engine.selector).request(hardware, engine)


def test_a_plan_says_what_is_read_and_what_would_hold_it() -> None:
    made = make_plan(request(2 * GIB))
    document = made.document()
    assert not document.fits and sum(document.bytes["cpu"].values()) <= 2 * GIB
    assert document.bytes["disk"]["panels"] == document.predicted.disk_bytes == made.claims.disk.streamed  # type: ignore[union-attr]
    assert document.predicted.decode_tok_s == 1 / made.choice.seconds
    assert all(layer.cpu + layer.disk == 14336 for layer in document.layers)
    said = " ".join(document.reasons)
    assert "of dense weights at every step" in said and "GB/s" in said and "no GPU is used" in said
    (more,) = document.helps
    assert make_plan(request(more.bytes)).fits and more.bytes == least_ram(made.request.model, made.request.workload)
    assert not make_plan(request(more.bytes - (200 << 20))).fits
    with pytest.raises(RequestError, match="pc-high describes no disk"):
        make_plan(request(2 * GIB, hardware=replace(HIGH, disk=None)))
    for ram, helps in (100, ""), (300, ", or a lower --context or --prefill-chunk"):  # where that may be enough
        with pytest.raises(RequestError, match=rf"even if its weights stay on disk.* give --ram [\d.]+MiB{helps}$"):
            make_plan(request(ram << 20))


def test_a_plan_is_kept_and_read_again(tmp_path: Path) -> None:
    for name, ram in (("mistral-7b", 2 * GIB), ("llama-7b", 3 * GIB), ("qwen3-30b-a3b", 8 * GIB)):
        asked = request(ram, name)
        made = make_plan(asked)
        path = save_plan(made, tmp_path)
        found = kept_document(tmp_path, asked)
        assert found == made.document(path) and found is not None and not found.fits
        path.write_text(path.read_text().replace(asked.key, "0" * 16))
        with pytest.raises(ModelError, match="not the plan that its name says"):
            kept_document(tmp_path, asked)


def test_auto_uses_no_bundles_where_only_dense_matrices_fit() -> None:
    """As a load does; nor where dense matrices are read in less time than single neurons."""
    both = request(None, "llama-7b")
    assert both.selector != "all"
    dense = replace(both, selector="all")
    enough, all_dense = (least_ram(one.model, one.workload) for one in (both, dense))
    for ram, selector, fits in (
        (enough, both.selector, True),
        (enough - 1, "all", True),
        (all_dense, "all", True),
        (all_dense // 3, "all", False),
        (all_dense - GIB // 4, both.selector, False),
    ):
        made = make_plan(request(ram, "llama-7b"))
        assert (made.request.selector, made.fits) == (selector, fits)
        asked = make_plan(request(ram, "llama-7b", selector=both.selector))
        assert asked.request.selector == both.selector and asked.fits is (ram == enough)
        dense, bundled = make_plan(request(ram, "llama-7b", selector="all")), asked.claims.disk
        if bundled is not None and dense.claims.disk is not None:
            better = disk.better_densely(dense.claims.disk, bundled)
            assert better == (dense.choice.seconds < asked.choice.seconds) == (selector == "all")
    assert [one.bytes for one in made.helps] == [all_dense, enough]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--shape", "qwen3-30b-a3b", "--dtype", "q4_0", "--hardware", "pc-high", "--vram", "0"]
    assert main([*flags, "--ram", "8GiB", "--context", "1024", "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["predicted"]["disk_hits"] > 0 and document["predicted"]["disk_bytes"] > 0
    assert document["bytes"]["disk"]["experts"] > document["bytes"]["cpu"]["experts"] > 0
    assert "of the experts that a token needs, if all are selected equally often" in shown.err


# ---------------------------------------------------------------- beside a load


def give_machine(cache: Path, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """pc-high, with the engine's threads, as if it was measured here."""
    monkeypatch.setenv("POWERINFER_CACHE", str(cache))
    key = measure.machine_key(engine)
    machine = replace(HIGH, gpu=None, cpu=replace(HIGH.cpu, threads=int(key["threads"])), key=key)
    machine = replace(machine, sync_us=0.0, copy_gb_s=0.0)
    save(machine, measure.kept_at(key))
    return machine


def _experts(folder: Path) -> Path:
    path = folder / "m.gguf"
    expert_models.write(path, larger(shape("qwen3-30b-a3b")), expert_models.Weights("q8_0"))
    return path


def _neurons(folder: Path) -> Path:
    return give_profile(give_predictor(give_bundles(tiny_llama(folder / "m.gguf"))))


@pytest.mark.parametrize(
    ("write", "selector"), [(_experts, "auto"), (_neurons, "exact"), (_neurons, "predicted"), (_neurons, "auto")]
)
def test_plan_and_load_decide_alike(
    write: Callable[[Path], Path], selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "FF", 1024)
    for name in ("PACKED", "BLOCK", "READ_COPIES"):  # else so small models are not read from disk
        monkeypatch.setattr(disk, name, 0)
    path = write(tmp_path)
    engine = EngineConfig(selector=selector, threads=1, context=64, prefill_chunk=32, max_batch=1, gpu="none")
    machine = give_machine(tmp_path, engine, monkeypatch)
    subject = model_subject(open_checkpoint(path), None, selector)
    whole = subject.request(machine, replace(engine, ram=GIB))
    least, seen = least_ram(whole.model, whole.workload), 0
    for ram in range(least - 1, 0, -(least - 80 * MIB) // 12):
        asked = replace(engine, ram=ram)
        try:
            resolved = resolve(open_checkpoint(path), asked)
        except RequestError as error:
            with pytest.raises(RequestError) as caught:
                make_plan(subject.request(machine, asked))
            assert str(caught.value) == str(error)
            break
        made = make_plan(subject.request(machine, asked))
        assert made.claims.disk == resolved.placement.disk and made.request.selector == resolved.selection.selector
        assert (made.from_disk is None) is (resolved.placement.disk is None)
        if made.from_disk is not None:
            assert disk_speed(resolved) == f", about {rate(1 / made.from_disk.seconds)} tokens/s"
            _check_gap(resolved, machine)
            seen += 1
    else:
        pytest.fail("at last it does not fit")
    assert seen > 1


@pytest.mark.usefixtures("described")
def test_plan_and_load_place_the_same_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers as a whole on a GPU, with the buffers that stream the others, and what RAM does not hold of these."""
    monkeypatch.setattr(model_files, "FF", 1024)
    monkeypatch.setattr(model_files, "LAYERS", 4)
    for name in ("PACKED", "BLOCK", "READ_COPIES", "AHEAD"):
        monkeypatch.setattr(disk, name, 0)
    path = tiny_llama(tmp_path / "m.gguf", "silu")
    engine = EngineConfig(threads=1, context=64, prefill_chunk=64, max_batch=1, gpu="cpu")
    subject = model_subject(open_checkpoint(path), None, "auto")
    machine, seen, vram = replace(HIGH, cpu=replace(HIGH.cpu, threads=1)), set(), 4 * GIB
    for less in (0, 1, 1, 1 << 20):
        vram -= less
        held = make_plan(subject.request(machine, replace(engine, vram=vram))).bytes
        vram, most = sum(held["gpu"].values()), sum(held["cpu"].values())
        for ram in (most, most - 1, *range(most - (1 << 16), most - (9 << 17), -(1 << 17))):
            options = replace(engine, vram=vram, ram=ram)
            try:
                resolved = resolve(open_checkpoint(path), options)
            except RequestError as error:
                with pytest.raises(RequestError, match=re.escape(str(error))):
                    make_plan(subject.request(machine, options))
                seen.add("refused")
                break
            plan = make_plan(subject.request(machine, options))
            claims, placement, needed = plan.claims, resolved.placement, needs(resolved)
            assert (claims.gpu_layers, claims.gpu_head) == (placement.layers, placement.head)
            assert (claims.staging, claims.disk) == (placement.staging, placement.disk)
            assert claims.whole and plan.document().policy == "layers"
            held = plan.bytes
            assert needed.vram == sum(held["gpu"].values()) <= vram
            assert needed.ram == sum(held["cpu"].values()) or "embedding" not in held["cpu"], "which is mapped"
            seen.add((placement.staging > 0, placement.disk is not None))
    assert seen == {"refused", (False, False), (True, False), (False, True)}


def _check_gap(resolved: Resolved, machine: Hardware) -> None:
    """Neighbours are read at once as far as it takes the measured disk no longer, 24 KiB where none was measured."""
    assert resolved.placement.disk is not None and machine.disk is not None
    own, other = (
        open_tier(replace(resolved, engine=replace(one, disk="direct")), list) for one in (resolved.engine, OTHER)
    )
    assert own is not None and other is not None and other.reads.gap == 24 << 10
    bundles = resolved.selection.bundles
    if not resolved.placement.disk.about.neurons or bundles is None or not own.reads.direct:
        assert own.reads.gap == 24 << 10
        return
    layout = bundles.layouts[0]
    row = layout.pitch if resolved.selection.selector == "predicted" else layout.pitch - layout.gate_bytes
    assert own.reads.gap == machine.disk.gap(row + 4096) > 0


def test_a_load_says_the_speed_where_the_machine_was_measured(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS | {"context": 128, "max_batch": 1, "disk": "direct"}
    ram = least_of(smollm2, context=128) + (16 << 20)
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    with LLM(smollm2, ram=ram, **options) as llm:
        assert "of dense weights at every step" in llm.choices["disk"] and "tokens/s" not in llm.choices["disk"]
        right = llm.generate("Water boils", PARAMS).token_ids
    engine = EngineConfig(ram=ram, **options)
    machine = give_machine(tmp_path, engine, monkeypatch)
    made = make_plan(model_subject(open_checkpoint(smollm2), None, "auto").request(machine, engine))
    with LLM(smollm2, ram=ram, **options) as llm:
        assert f"about {rate(1 / made.choice.seconds)} tokens/s" in llm.choices["disk"]
        assert llm.generate("Water boils", PARAMS).token_ids == right
    with LLM(smollm2, ram=ram, **(options | {"disk": "cached"})) as llm:
        assert "tokens/s" not in llm.choices["disk"], "the estimate is of a disk"
