"""The trial by which `auto` takes `exact` inside experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_files import LAYERS
from test_disk_expert_neurons import silent
from test_expert_neurons import model, plain_model

from powerinfer import LLM, SamplingParams
from powerinfer.config import EngineConfig
from powerinfer.devices.disk import DiskTier, OnDisk
from powerinfer.formats import checkpoint
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.tensors import RawTensor
from powerinfer.hybrid import disk_trial, expert_selector
from powerinfer.hybrid.disk import first_layers_tier
from powerinfer.hybrid.load import Loading
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import Resolved, model_of, needs, ram_bytes
from powerinfer.placement.budget import RUNTIME_BYTES
from powerinfer.prepare.expert_packing import pack_experts
from powerinfer.sparsity import expert_trial, trials

SETTINGS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
Timed = Callable[[float], list[int]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Sets the time of `exact`, of a dense one of 1; returns the sizes that are measured from then on."""

    def sets(exact: float) -> list[int]:
        sizes: list[int] = []

        def seconds(executor: object, ops: object, size: int, sample: object) -> list[float]:
            sizes.append(size)
            return [1.0, exact]

        monkeypatch.setattr(expert_trial, "_seconds", seconds)
        return sizes

    return sets


def loaded(path: Path, **options: object) -> tuple[str, str | None]:
    """What a load with `auto` says of its selector, and that of its statistics after an answer."""
    with LLM(path, gpu="none", threads=1, max_batch=4, **options) as llm:  # type: ignore[arg-type]
        llm.generate("ab", SETTINGS)
        report = llm.sparsity
        return str(llm.choices["selector"]), None if report is None else report["selector"]


@pytest.mark.parametrize("made", [model, lambda folder: plain_model(folder, "Q5_0")])
def test_auto_takes_what_is_faster_and_remembers_it(made: Callable[[Path], Path], timed: Timed, tmp_path: Path) -> None:
    path = made(tmp_path)
    sizes = timed(0.9)
    said, selector = loaded(path)
    assert sizes == [1, 4] and selector == "exact" and said.startswith("exact inside experts")
    assert "dense 1000000 us, exact 900000 us" in said and "measured in" in said
    said, selector = loaded(path)
    assert sizes == [1, 4] and selector == "exact" and "measured earlier" in said
    resolved = resolve(open_checkpoint(path), EngineConfig(gpu="none", threads=1, max_batch=4))
    assert resolved.selection.in_experts, "plans and inspect know it, too"
    sizes = timed(0.99)
    said, selector = loaded(path, retrial=True)
    assert sizes == [1, 4] and selector is None and "exact 990000 us" in said
    assert loaded(path)[1] is None and sizes == [1, 4]
    with LLM(path, gpu="none", threads=1, selector="exact") as llm:
        assert llm.sparsity is not None and sizes == [1, 4], "what is asked for is not tried"


def test_what_is_not_tried(timed: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = timed(0.5)
    said, selector = loaded(model(tmp_path), trial=False)
    assert selector is None and "--no-trial" in said
    assert loaded(model(tmp_path, "F32"))[1] is None and loaded(model(tmp_path, activation="silu"))[1] is None
    monkeypatch.setattr(expert_selector, "available_memory", lambda: 1000)
    said, selector = loaded(model(tmp_path))
    assert selector is None and "no room" in said and not sizes


def test_both_layouts_run_in_the_same_steps(tmp_path: Path) -> None:
    path = plain_model(tmp_path, "Q4_0")
    checkpoint, engine = open_checkpoint(path), EngineConfig(threads=2, max_batch=3)
    assert expert_trial.obstacle(checkpoint, engine) is None and expert_trial.first_layer(checkpoint) == 1 < LAYERS + 1
    result = expert_trial.measured(checkpoint, engine, [1, 2, 3])
    assert expert_trial.fits(result, engine) and not expert_trial.fits(result, EngineConfig(max_batch=1))
    assert all(0 < seconds < 10 for seconds in result.layers[0].seconds.values())


def placed(path: Path, **options: object) -> Resolved:
    """A load on the CPU, as it was decided."""
    return resolve(open_checkpoint(path), EngineConfig(gpu="none", threads=1, max_batch=4, **options))  # type: ignore[arg-type]


def chosen(resolved: Resolved) -> Resolved:
    """The same when it begins."""
    return expert_selector.with_choice(resolved, Loading(lambda: [1, 2]))


def test_a_disturbed_trial_counts_where_there_is_no_room_for_another(
    timed: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes = model(tmp_path), timed(0.5)
    chosen(placed(path))
    file = next(tmp_path.rglob("trials.json"))
    document = json.loads(file.read_text())
    document["trials"][0]["disturbed"] = 1.0
    file.write_text(json.dumps(document))
    monkeypatch.setattr(trials, "quiet", lambda: True)
    assert not placed(path).selection.in_experts, "it is to be repeated"
    monkeypatch.setattr(expert_selector, "available_memory", lambda: 1000)
    again = placed(path, ram=1 << 30)
    assert again.selection.in_experts and chosen(again) == again and sizes == [1, 4]


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()])
def test_a_trial_that_does_not_end_leaves_whole_experts(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    path, resolved = model(tmp_path), placed(model(tmp_path))
    monkeypatch.setattr(expert_trial, "measured", fails)
    if isinstance(error, MemoryError):
        for _ in range(trials.FAILURES):
            assert "the trial failed: out of memory" in chosen(resolved).selection.reason
    else:
        with pytest.raises(KeyboardInterrupt):
            chosen(resolved)
    left = placed(path).selection
    assert left.selector == "all" and left.reason.endswith("trials.json)") and chosen(placed(path)).selection == left


def test_the_first_start_takes_the_memory_of_the_next(timed: Timed, tmp_path: Path) -> None:
    path, ram = model(tmp_path, "Q4_0"), 1 << 30
    timed(0.5)
    before = placed(path, ram=ram)
    first = chosen(before)
    assert first.selection.in_experts and needs(first).ram > needs(before).ram
    assert before.placement.kv_room is not None and first.placement.kv_room is not None
    assert before.placement.kv_room - first.placement.kv_room == needs(first).ram - needs(before).ram
    assert placed(path, ram=ram).placement == first.placement


def test_the_trial_keeps_to_ram(timed: Timed, tmp_path: Path) -> None:
    path, sizes = model(tmp_path), timed(0.5)
    resolved = placed(path, ram=1 << 30)
    short = replace(resolved, engine=replace(resolved.engine, ram=RUNTIME_BYTES))
    assert "no room" in chosen(short).selection.reason and not sizes
    assert chosen(resolved).selection.in_experts and sizes


def test_where_nothing_is_tried_the_reason_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, disk = model(tmp_path), SimpleNamespace(about=OnDisk())
    assert placed(path).selection.reason.startswith("a trial at load")
    monkeypatch.setattr(expert_selector, "place_in_ram", lambda resolved: resolved.placed(disk=disk))
    resolved = placed(path)
    assert f"whole unless `powerinfer pack -m {path}` has stored their rows" in resolved.selection.reason
    assert chosen(resolved) == resolved


def test_few_experts_of_a_converted_matrix_are_converted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, index = open_checkpoint(model(tmp_path, "F32"), quantize="q8_0"), np.array([2, 0], np.int32)
    name = "layers.0.experts_up"
    full, converted = one.take(name), list[int]()
    real = checkpoint.convert  # type: ignore[attr-defined]

    def noted(tensor: RawTensor, *more: Any) -> RawTensor:
        converted.append(tensor.shape[0])
        return real(tensor, *more)

    monkeypatch.setattr(checkpoint, "convert", noted)
    some = one.take_some(name, index)
    assert converted == [2] and some.type == "Q8_0"
    assert np.array_equal(some.data.reshape(2, -1), full.data.reshape(full.shape[0], -1)[index])


# ---- on disk


def on_disk(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model whose rows are packed, and options with which RAM does not hold it."""
    path = silent(folder)
    options: dict[str, Any] = {"context": 64, "prefill_chunk": 64, "ram": 0}
    engine = EngineConfig(gpu="none", threads=1, max_batch=4, **options | {"ram": None})
    options["ram"] = ram_bytes(model_of(resolve(open_checkpoint(path), engine)), engine) - (4 << 20)
    pack_experts(open_checkpoint(path), None)
    return path, options


@pytest.mark.parametrize(("rows", "faster"), [(0.9, True), (0.99, False)])
def test_experts_on_disk_are_tried_where_rows_are_packed(
    rows: float, faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = on_disk(tmp_path)
    ways: list[bool] = []

    def seconds(resolved: Resolved, sample: object) -> float:
        ways.append(resolved.selection.in_experts)
        return rows if resolved.selection.in_experts else 1.0

    monkeypatch.setattr(disk_trial, "_seconds", seconds)
    said, selector = loaded(path, **options)
    assert ways == [False, True] and (selector == "exact") == faster
    assert f"dense 1000000 us, exact {round(rows * 1e6)} us" in said and "measured in" in said
    said, again = loaded(path, **options)
    assert ways == [False, True] and again == selector and "measured earlier" in said
    resolved = placed(path, **options)
    assert resolved.selection.in_experts == faster and resolved.placement.disk is not None
    assert loaded(path, trial=False, **options)[1] is None
    file = Path(f"{path}.powerinfer/expert-rows.safetensors")
    file.write_bytes(file.read_bytes()[:-64])
    said, selector = loaded(path, **options)
    assert selector is None and "experts are read whole: " in said and f"`powerinfer pack -m {path}` recreates" in said
    assert placed(path, **options).placement.disk is not None and len(ways) == 2
    file.unlink()
    said, selector = loaded(path, **options)
    assert selector is None and f"unless `powerinfer pack -m {path}` has stored their rows" in said and len(ways) == 2


def test_experts_are_read_in_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers with experts, with memory for few of these; what a trial reads is closed behind it."""
    path, options = on_disk(tmp_path)
    tiers: list[DiskTier] = []

    def opened(resolved: Resolved, slots: dict[int, int]) -> DiskTier:
        tiers.append(first_layers_tier(resolved, slots))
        return tiers[-1]

    monkeypatch.setattr(disk_trial, "first_layers_tier", opened)
    resolved = chosen(placed(path, **options))
    assert "one token: dense" in resolved.selection.reason
    assert [dict(tier.about.experts) for tier in tiers] == [{1: 12, 3: 12}] * 2, "four tokens' worth"
    whole, exact = (tier.counts() for tier in tiers)
    assert whole["wanted"] == exact["wanted"] == 2 * 3 * (disk_trial.PROMPT + disk_trial.TIMED)
    assert not whole["rows"] and 0 < exact["rows"] < exact["bytes"]
