"""benchmarks/hybrid/compare.py on a stand-in for a GPU, and with a peer that only says how fast it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.hybrid import compare, recipes, table, worker  # noqa: E402
from benchmarks.lib import jobs as lib_jobs  # noqa: E402
from benchmarks.models import make_model  # noqa: E402
from benchmarks.models.weights import Weights, shapes  # noqa: E402
from powerinfer import LLM, system  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hardware import measure  # noqa: E402
from powerinfer.hardware.description import load, save  # noqa: E402
from powerinfer.kernels import gpu  # noqa: E402
from powerinfer.placement.solver import GROUP  # noqa: E402

GIB = 1 << 30


def measured(out: Path, *more: object, run: Callable[..., Any] = compare.run) -> dict[str, Any]:
    """The document of a whole run at the tiny scale."""
    fixed = ("--models", out.parent / "models", "--gpu", "cpu", "--scale", "tiny", "--names", "falcon-40b")
    sizes = ("--rounds", 1, "--tokens", 4, "--batches", 1, 9, "--prompt", 48, "--shares", 1.5)
    fixed = (*fixed, "--threads", 1, "--quiet", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run", run)
        patch.setattr(sys, "argv", ["hybrid.py", *map(str, (*fixed, *sizes, "--out", out, *more))])
        status = compare.main()
    document = json.loads(out.read_text())
    assert status == any("error" in job for job in document["jobs"].values())
    return document


def test_all_of_it_on_a_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "hybrid.json"
    document = measured(out)
    jobs = document["jobs"]
    assert [job["error"] for job in jobs.values() if "error" in job] == []
    model = "falcon-40b"
    steps = [f"ablation/{model}/0/{step}" for step in ("dense", "layers", "random", "exact")]
    expected = [f"decode/{model}/0/powerinfer", *steps]
    prompt = f"prefill/{model}/0/powerinfer"
    before = [f"make/{model}", "hardware", f"reference/{model}"]
    assert list(jobs) == [*before, f"kernel/{model}", *expected, prompt, f"budget/{model}/1.5"]
    apart = jobs[f"reference/{model}"]["apart"]
    assert apart > 0.01, "the predictor leaves something out"
    for key in expected:
        names = ["every"] if key.split("/")[-1] in ("dense", "exact") else ["every", "predicted"]
        together = ("alone", "2", "8")  # there is a cache for nine requests at most
        assert set(jobs[key]["off"]) == {f"{name} {of}" for name in names for of in together}
        for name, value in jobs[key]["off"].items():  # F16; a neuron next to the predictor's threshold may differ
            assert value < (0.25 if name.startswith("predicted") else 1e-4) * apart, name
    assert {name.partition(", ")[2] for name in jobs[prompt]["off"]} == {"streamed", "cpu"}
    assert max(jobs[prompt]["off"].values()) < 0.25 * apart
    assert set(jobs[prompt]["prefill_tok_s"]) == {"streamed", "cpu"} and min(jobs[prompt]["prefill_tok_s"].values()) > 0
    plan, dense, *others = (jobs[key] for key in expected)
    assert set(plan["decode_tok_s"]) == {"1", "9"} and all(rate > 0 for rate in plan["decode_tok_s"].values())
    assert "sparsity" not in dense and set(plan["sparsity"]) == {"1", "9"}
    whole = plan["vram"]
    assert all(job["vram"] == whole for job in others) and jobs[f"budget/{model}/1.5"]["vram"] > whole
    in_turns, at_random, exact = (job["sparsity"]["1"]["gpu_share"] for job in others)
    assert in_turns == 0, "there is no room for a whole layer"
    assert plan["sparsity"]["1"]["gpu_share"] > at_random and exact > at_random, "hot neurons are where they should be"
    assert plan["sparsity"]["1"]["active_fraction"] == pytest.approx(0.05, abs=0.03)
    at_once = plan["at_once"]
    assert 0 < at_once["least"] <= at_once["most"] <= 1 and at_once["cpu_s"] > 0 and at_once["waited_s"] > 0
    assert worker.bounds(1.0, 0.3, 0.5) == {"step_s": 1.0, "cpu_s": 0.3, "gpu_s": 0.5, "least": 0.5, "most": 0.8}
    assert 0 < plan["trace"]["overlap"] <= 1 and plan["plan"]["ms_per_token"] > 0
    runs = jobs[f"kernel/{model}"]["runs"]
    assert [(run["tokens"], run["fired"]) for run in runs] == [(1, 51), (8, 51), (32, 51)] and runs[0]["gb_s"] > 0
    assert not list((tmp_path / "results" / "models").iterdir()), "models are removed"

    def never(task: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError(task)

    assert measured(out, run=never) == document, "nothing is done twice"
    with pytest.raises(SystemExit, match="other settings"):
        measured(out, "--tokens", 5, run=never)
    capsys.readouterr()
    text = table.tables(document)
    assert "2 of 60 layers" in text and "prompt of 48 tokens" in text
    assert "failed" not in text and not table.speaks(document)
    assert len(table.step_rates(document, model)) == 4
    spans = table.last_token(table.trace_of(document, out.parent, model))
    assert {"attention", "hot neurons", "cold neurons"} <= {span["cat"] for span in spans}
    pytest.importorskip("matplotlib")
    assert [path.name for path in table.draw(document, out.parent, tmp_path)] == [
        f"hybrid-{kind}.png" for kind in ("ablation", "budget", "trace")
    ]


def test_what_failed_is_said_and_can_be_done_again(tmp_path: Path) -> None:
    def run(task: dict[str, Any]) -> dict[str, Any]:
        if task["what"] in ("decode", "kernel"):
            raise RuntimeError("no such kernel")
        return {}

    out = tmp_path / "hybrid.json"
    document = measured(out, "--sections", "decode", "kernel", run=run)
    assert document["jobs"]["kernel/falcon-40b"]["error"] == "no such kernel"
    assert "decode/falcon-40b/0/powerinfer failed: no such kernel" in table.tables(document)
    again = measured(out, "--sections", "decode", "kernel", run=lambda task: {"runs": []})
    assert again["jobs"]["kernel/falcon-40b"] == document["jobs"]["kernel/falcon-40b"]
    again = measured(out, "--sections", "kernel", "--retry", run=lambda task: {"runs": []})
    assert "error" not in again["jobs"]["kernel/falcon-40b"]


@pytest.mark.parametrize("what", ["hardware", "reference"])
def test_no_job_is_done_without_what_it_needs(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks: list[str] = []

    def run(task: dict[str, Any]) -> dict[str, Any]:
        tasks.append(task["what"])
        if task["what"] == what:
            raise RuntimeError("no memory")
        return {"runs": []}

    out = tmp_path / "hybrid.json"
    jobs = measured(out, "--sections", "decode", "kernel", run=run)["jobs"]
    before = ["make", "hardware", "reference"]
    assert tasks == before[: before.index(what) + 1] and len(jobs) == len(tasks)
    key = what if what == "hardware" else f"{what}/falcon-40b"
    assert capsys.readouterr().err.splitlines()[-1] == f"falcon-40b: no job can be done, {key} failed: no memory"
    again = measured(out, "--sections", "kernel", "--retry", run=lambda _: {"runs": []})["jobs"]
    assert "kernel/falcon-40b" in again and not [key for key, job in again.items() if "error" in job]


def test_measuring_the_machine_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(compare.programs, "output", lambda _, timeout: limits.append(timeout) or "{}")
    for what in ("decode", "hardware", "make"):
        compare.run({"what": what, "gpu": "cuda"})
    assert limits[0] < limits[1] and limits[2] is None


def test_a_model_that_is_gone_is_made_again_where_that_is_all(tmp_path: Path) -> None:
    tasks: list[str] = []
    for sections in (("make",), ("make",), ("kernel", "make"), ("kernel", "make")):
        run = lambda task: tasks.append(task["what"]) or {"runs": []}  # noqa: E731
        measured(tmp_path / "hybrid.json", "--sections", *sections, run=run)
    assert tasks == ["make", "make", "make", "hardware", "reference", "kernel"]


@pytest.mark.parametrize("section", ["decode", "prefill", "kernel"])
def test_a_wrong_model_is_not_timed(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose neurons on the GPU count twice: its logits are not the CPU's."""
    plain, timed = gpu.neuron_sum, []

    def wrong(*given: Any, **how: Any) -> Any:
        total, fired = plain(*given, **how)
        return (2 * total, fired) if len(given) < 5 else plain(*given, **how)

    monkeypatch.setattr(gpu, "neuron_sum", wrong)
    monkeypatch.setattr(worker.gpu_kernels, "seconds", lambda *_: timed.append(1))
    monkeypatch.setattr(worker, "decoded", lambda *_: timed.append(1))
    monkeypatch.setattr(LLM, "generate", lambda *_: timed.append(1))
    jobs = measured(tmp_path / "hybrid.json", "--sections", section)["jobs"]
    key, what = (
        ("kernel/falcon-40b", "the sum is")
        if section == "kernel"
        else (f"{section}/falcon-40b/0/powerinfer", "logits are")
    )
    assert jobs[key]["error"].startswith(f"not timed: {what} off by ") and not timed


def test_memory_that_is_there_once_it_is_used() -> None:
    before = measure.memories(EngineConfig()).cpu.memory_bytes
    with worker.memory_of(before + GIB):
        grown = measure.memories(EngineConfig()).cpu
        assert (grown.memory_bytes, grown.reserved_bytes, system.available_memory()) == (before + GIB, 0, before + GIB)
    with worker.memory_of(None):
        assert measure.memories(EngineConfig()).cpu.memory_bytes == before


def test_rates_that_were_disturbed_are_kept_between_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    engine = EngineConfig(threads=1)
    disturbed = replace(load("pc-low"), gpu=None, disturbed=1.0, key=measure.machine_key(engine))
    save(disturbed, measure.kept_at(disturbed.key))
    monkeypatch.setattr(measure, "quiet", lambda: True)
    assert measure.saved_hardware(engine) is None
    with worker.rates_once():
        assert measure.saved_hardware(engine) == disturbed


def test_a_program_that_hangs_is_ended() -> None:
    with pytest.raises(RuntimeError, match=r"sleep had not ended after 0 seconds"):
        compare.programs.output(["sleep", "30"], 0.1)


def test_it_ends_in_time_and_goes_on(tmp_path: Path) -> None:
    seconds = [0.0]

    def run(task: dict[str, Any]) -> dict[str, Any]:
        seconds[0] += 50
        made = compare.bundles_of(Path(task["model"])), worker.reference_of(Path(task["model"]))
        for path in made:
            path.parent.mkdir(exist_ok=True)
            path.touch()
        return {"decode_tok_s": {"1": 1.0}}

    out = tmp_path / "hybrid.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib_jobs.time, "monotonic", lambda: seconds[0])
        patch.setattr(lib_jobs.machine, "wait_until_quiet", lambda _: None)
        counts = [len(measured(out, "--minutes", 3, run=run)["jobs"]) for _ in range(6)]
    assert counts[0] == 3 and counts == sorted(counts) and counts[-1] == counts[-2] == 11


def test_cutting_keeps_layers_and_budget_in_proportion() -> None:
    whole = recipes.RECIPES["falcon-40b"]
    cut = recipes.recipe("falcon-40b", "own")
    assert (whole.layers, cut.plan.n_layers, cut.vram, cut.part) == (60, 15, 24 * GIB, 0.25)
    assert worker.part_of(cut.vram, 2 * GIB, cut.part) == 7.5 * GIB, "what layers share does not shrink"
    assert recipes.recipe("drelu-7b", "own").part == 1 and worker.part_of(24 * GIB, 2 * GIB, 1) == 24 * GIB
    with pytest.raises(RuntimeError, match="does not hold what all layers share"):
        worker.part_of(GIB, GIB, 0.5)
    assert recipes.recipe("reglu-70b", "0.001").plan.n_layers == 1
    for wrong in ("0", "1.5", "much"):
        with pytest.raises(ValueError):
            recipes.recipe("falcon-40b", wrong)


@dataclass
class Chosen:
    """A plan, as far as `whole_layers` looks at it."""

    gpu: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    request: Any = None
    choice: Any = None


def test_layers_in_turns_have_the_room_of_the_plan() -> None:
    profile = SimpleNamespace(sizes=(GROUP * 10 - 1,) * 4)
    plan: Any = Chosen(request=SimpleNamespace(profile=profile), choice=Chosen((4, 9, 6, 8), (10,) * 4))
    assert worker.whole_layers(plan).choice.gpu == (10, 10, 0, 0)


def test_threads_and_types_make_the_same_model(tmp_path: Path) -> None:
    plan = recipes.recipe("reglu-70b", "tiny").plan
    name, shape = next((name, shape) for name, shape in shapes(plan) if name == "layers.1.gate")
    one, several = (np.concatenate(list(Weights(plan, threads).blocks(name, shape))) for threads in (1, 3))
    np.testing.assert_array_equal(one, several)
    path = tmp_path / "q4.gguf"
    make_model.make(path, plan, "gguf", "q4_0", 2)
    stored = open_checkpoint(path).take(name)
    assert stored.type == "Q4_0"
    assert np.abs(stored.float32() - one).max() <= np.abs(one).max() / 8 + 1e-6  # a step of 4 bits


def test_the_known_profile_is_what_fires() -> None:
    """Neurons of all of a layer's ranks, against the plan's own probabilities and the share that was asked for."""
    plan = recipes.recipe("drelu-7b", "tiny").plan
    profile = make_model.known_profile(plan, 10_000)
    assert profile.active_fraction() == pytest.approx(plan.active, rel=0.01)
    for layer in range(plan.n_layers):
        p = Weights(plan).layer(layer).probabilities
        np.testing.assert_allclose(profile.fraction(layer), p, atol=0.5 / 10_000)


# ---------------------------------------------------------------- the peer


class FakePeer(compare.Peer):
    """Takes 1 GiB and half of one for each unit on the GPU; faster with fewer threads."""

    def alone(self, model: Path, threads: int, flags: list[str], tokens: int) -> tuple[float, int | None]:
        count = int(flags[1])
        if count > 20:
            raise RuntimeError("out of memory")
        return 8.0 / threads, GIB + count * GIB // 2


@pytest.mark.parametrize(("guess", "count"), [(GIB // 4, 9), (GIB // 2, 10), (GIB, 10)])
def test_the_most_layers_within_the_budget(guess: int, count: int) -> None:
    """In three tries, with one less than would fit after a guess that is far off."""
    found = compare.limit(FakePeer(Path(), "cuda", []), Path("m"), "ngl", 40, 6 * GIB, guess, 4)
    assert found["count"] == count and found["flags"] == ["-ngl", str(count)] and found["threads"] == 2
    assert max(one["vram_used"] for one in found["tries"] if one["count"] <= 10) == GIB + count * GIB // 2
    assert len(found["tries"]) <= compare.MOST_TRIES
    with pytest.raises(RuntimeError, match="nothing fits"):
        compare.limit(FakePeer(Path(), "cuda", []), Path("m"), "ngl", 40, GIB // 2, guess, 4)


def test_the_peer_runs_after_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round; later ones take turns."""
    given = ["--models", tmp_path, "--names", "falcon-40b", "--sections", "decode", "peer", "ablation", "--rounds", 2]
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, given)])
    arguments = compare.parse()
    peer = compare.Peer(tmp_path, "cuda", [])
    measurement = compare.Measurement(document={"jobs": {}}, out=tmp_path, quiet=0, arguments=arguments, peer=peer)
    keys = [key.replace("/falcon-40b", "") for key, _ in compare.jobs(measurement, "falcon-40b")]
    ours = ["decode/0/powerinfer", *(f"ablation/0/{step}" for step in (*compare.STEPS, "exact"))]
    ways = compare.DENSE_WAYS
    first = [*ours, *(f"peer/{way}" for way in ways), *(f"decode/0/llama.cpp-{way}" for way in ways)]
    assert keys[: len(first)] == first
    assert set(keys[len(first) :]) == {f"decode/1/{name}" for name in ("powerinfer", *(f"llama.cpp-{w}" for w in ways))}


def test_flags_of_the_peer() -> None:
    assert compare.ngl_flags(3, 4) == ["-ngl", "3"] and compare.ngl_flags(5, 4) == ["-ngl", "999"]
    assert compare.ot_flags(4, 4) == ["-ngl", "999"]
    assert compare.ot_flags(2, 4)[2:] == ["-ot", r"blk\.(2|3)\.ffn_(up|gate|down)\.weight=CPU"]


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_peer_and_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "echo 100; echo 700; echo 300; exec sleep 60")
    program(tmp_path, "llama-bench", f'echo "$@" > {tmp_path}/alone; sleep 0.2; echo \'[{{"avg_ts": 16.0}}]\'')
    lines = "\n".join(json.dumps({"pl": batch, "speed_tg": 10.0 * batch}) for batch in (8, 32))
    program(tmp_path, "llama-batched-bench", f'echo "$@" > {tmp_path}/together\ncat <<END\nload\n{lines}\nEND')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    peer = compare.Peer(tmp_path, "cuda:1", ["-x"])
    result = peer.measure(Path("m.gguf"), {"threads": 4, "flags": ["-ngl", "7"]}, [1, 8, 32], 64)
    assert result == {"decode_tok_s": {"1": 16.0, "8": 80.0, "32": 320.0}, "vram_used": 600 << 20}
    assert (tmp_path / "alone").read_text().startswith("-m m.gguf -t 4 -ngl 7 -x -p 0 -n 64")
    assert "-npl 8,32" in (tmp_path / "together").read_text()
    prompt = peer.prompt(Path("m.gguf"), {"threads": 4, "flags": []}, 512)
    assert prompt == {"prefill_tok_s": {"llama.cpp": 16.0}} and "-p 512 -n 0" in (tmp_path / "alone").read_text()
    program(tmp_path, "llama-batched-bench", "exit 3")
    result = peer.measure(Path("m.gguf"), {"threads": 4, "flags": []}, [1, 8], 64)
    assert result["decode_tok_s"] == {"1": 16.0} and "status 3" in result["together_error"]
    (tmp_path / "nvidia-smi").unlink()
    with compare.Vram("cuda") as unknown:
        pass
    assert unknown.peak is None
