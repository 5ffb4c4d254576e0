"""The call `short` of benchmarks/hybrid/visit.py: its parts without a GPU, by figures that are known."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.hybrid import compare, driver_error, exchange, short_table, step_times, whole  # noqa: E402
from benchmarks.hybrid.step_times import Kernel  # noqa: E402
from benchmarks.lib.jobs import Jobs  # noqa: E402
from benchmarks.models import expert_models, make_model, writers  # noqa: E402
from benchmarks.models.weights import Plan, Weights, repeated  # noqa: E402
from powerinfer import LLM  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402


def arguments(**changed: Any) -> Any:
    given = {"shape": whole.EXPERTS, "tiny": True, "layers": None, "models": Path("models"), "locality": 0.0}
    return SimpleNamespace(**given | {"times": None, "cards": (8, 12), "prompts": (512,), "tokens": 4, **changed})


def test_what_comes_again_is_made_once() -> None:
    made: list[int] = []
    for threads in (1, 3):
        found = [*repeated(lambda number: made.append(number) or 10 * number, [4, 2, 4, 2, 7, 4], threads)]
        assert found == [40, 20, 40, 20, 70, 40] and sorted(made) == [2, 4, 7]
        made.clear()


@pytest.mark.parametrize("locality", [0.0, 0.6])
def test_layers_of_experts_have_the_bytes_of_others(locality: float, tmp_path: Path) -> None:
    config = whole.config_of(arguments())
    about = expert_models.Weights("q4_0", locality=locality, distinct=3)
    sources = [0, 1, 2, 2, 1] if locality else [0, 1, 2, 0, 1]  # the slow layer is like no other
    assert expert_models.source_layers(config, about) == sources
    path = tmp_path / "m.gguf"
    expert_models.write(path, config, about, threads=2)
    checkpoint = open_checkpoint(path)
    every = [np.asarray(checkpoint.stored(f"layers.{layer}.experts_down").data) for layer in range(5)]
    for layer, source in enumerate(sources):
        assert [np.array_equal(every[layer], other) for other in every] == [source == one for one in sources]
    logits: list[np.ndarray] = []
    with LLM(path, gpu="none", threads=1, context=64, trial=False) as llm:
        llm.score([1, 2, 3, 4], 0, lambda _, rows: logits.append(rows.copy()))
    assert np.isfinite(np.concatenate(logits)).all()


def test_layers_of_neurons_have_the_weights_of_others(tmp_path: Path) -> None:
    sizes = make_model.SHAPES["tiny"] | {"n_layers": 6}
    plan = Plan(**sizes, distinct=2, layer_ratio=4.0)  # type: ignore[arg-type]
    assert [plan.source(layer) for layer in range(6)] == [1, 1, 1, 4, 4, 4]
    assert [Plan(**sizes).source(layer) for layer in range(6)] == [*range(6)]  # type: ignore[arg-type]
    weights = Weights(plan)
    one, same, other = (weights.predictor(layer, 128)[1] for layer in (0, 2, 3))
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    path = tmp_path / "m.gguf"
    writers.write_gguf(path, plan, "f16", lambda _: None)
    checkpoint = open_checkpoint(path)
    gates = [np.asarray(checkpoint.stored(f"layers.{layer}.gate").data) for layer in range(6)]
    assert [np.array_equal(gates[0], gate) for gate in gates] == [True] * 3 + [False] * 3
    firing = make_model.activity.measure(path, make_model.random_tokens(256, plan.vocab))
    wanted = make_model.chosen_statistics(plan)["layers"]
    np.testing.assert_allclose(firing.document()["layers"], wanted, rtol=0.35)


def test_exchanges_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "exchange.json"
    found = exchange.main(["--device", "cpu", "--layers", "2", "--out", str(out)])
    assert json.loads(out.read_text()) == found and set(found["layer_us"]) == set(found["step_us"]) - {"kernels"}
    assert {"by functions, in place", "by functions, copied"} < set(found["step_us"])
    assert "torch's CPU device" in found["lacks"]["copied"] and "by flags, copied" not in found["step_us"]


def test_exchanges_of_a_device_that_works_by_itself() -> None:
    """By flags and by functions, in recordings that are replayed, in place and copied."""
    pytest.importorskip("triton")
    from deferred import DEFERRED, deferred

    with deferred(1) as machine:
        steps = exchange.Steps(DEFERRED, 3)
        with steps.streams.active():
            found = dict(exchange.cases(steps))
        assert machine.replays > exchange.REPEATS * len(found)
    ways = {f"{way}, {where}" for way in ("by flags", "by functions") for where in ("in place", "copied")}
    assert ways < set(found) and not steps.reasons


def test_exchanges_that_were_not_made_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from powerinfer.devices.torch_device import choose_device

    steps = exchange.Steps(choose_device("cpu"), 2)
    link = steps.link(False)
    with steps.streams.active():
        run, calls = steps.exchanging(link, True)
        assert steps.seconds(run, link, calls) > 0
        monkeypatch.setattr(link, "begin", lambda *_: None)
        monkeypatch.setattr(link, "join", lambda _: None)
        with pytest.raises(RuntimeError, match="call was made 0 to 0 times in 21 replays"):
            steps.seconds(run, link, calls)


def kernels(steps: int, idle: float) -> list[Kernel]:
    """Steps of three kernels, microseconds: 10, another behind a wait of 5, and 20 that begin before it ends."""
    found, at = [], 0.0
    for _ in range(steps):
        found += [Kernel("a", at, at + 10), Kernel("b", at + 15, at + 25), Kernel("last", at + 20, at + 40)]
        at += 40 + idle
    return found


def test_the_time_between_steps_is_known() -> None:
    found = step_times.gpu_times(kernels(step_times.PROFILED, 60.0))
    assert found["idle_ms"] == pytest.approx(0.06) and found["profiled_ms"] == pytest.approx(0.1)
    assert found["busy_ms"] == pytest.approx(0.035) and found["launched"] == 3
    assert next(iter(found["kernels"])) == "last" and found["kernels"]["a"] == {"us": pytest.approx(10), "launches": 1}
    assert step_times.gpu_times([]) == {}
    assert step_times.gpu_times([Kernel("a", number, number + 1) for number in range(50)]) == {}


class FakePeer(compare.Peer):
    """A layer of experts takes 300 MiB beside 1 GiB; says how fast it was."""

    def knows(self, flag: str) -> bool:
        return False

    def alone(self, model: Path, threads: int, flags: list[str], tokens: int) -> tuple[float, int | None]:
        return 50.0, (1 << 30) + (48 - int(flags[-1])) * (300 << 20)

    def bench(self, model: Path, threads: int, flags: list[str], sizes: list[str]) -> list[dict[str, Any]]:
        pinned = "-mmp" in sizes
        tokens = ["-n", "0" if pinned else "64"]
        assert sizes[:8] == ["-p", "512,2048", *tokens, "-b", "2048", "-ub", "512,2048"]
        more = 9 if pinned else 0
        rates = [(tokens, 0, batch, tokens + batch + more) for batch in (512, 2048) for tokens in (512, 2048)]
        return [
            {"n_prompt": prompt, "n_gen": gen, "n_ubatch": batch, "avg_ts": rate}
            for prompt, gen, batch, rate in (*rates, (0, 64, 512, 60.0), (0, 64, 2048, 62.0))
        ]


def test_the_peer_gets_what_fits_and_its_best_flags(tmp_path: Path) -> None:
    given = arguments(tiny=False, models=tmp_path, prompts=(512, 2048), tokens=64, threads=0)
    measurement: Any = SimpleNamespace(arguments=given, peer=FakePeer(Path(), "cpu", []))
    measurement.model = tmp_path / "m.gguf"
    with measurement.model.open("wb") as file:
        file.truncate(17 << 30)
    budgets = whole.budgets(measurement)
    assert budgets == {"8": 8 << 30, "12": 12 << 30}
    half: Any = SimpleNamespace(arguments=arguments(tiny=False, times=2.0), model=measurement.model)
    assert whole.budgets(half) == {"a-2-th": 17 << 29}
    found = whole.theirs(measurement, "8", "ncmoe")
    assert found["count"] == 23 and found["decode_tok_s"] == {"1": 62.0}
    assert found["prompt_tok_s"]["2048, -ub 2048"] == 4096 and len(found["prompt_tok_s"]) == 8
    assert found["prompt_tok_s"]["2048, -ub 2048, not mapped"] == 4105


def document(**jobs: Any) -> str:
    return json.dumps({"jobs": {key.replace("__", "/"): job for key, job in jobs.items()}})


def test_rows_of_the_aims(tmp_path: Path) -> None:
    def job(decode: float, **prompts: float) -> dict[str, Any]:
        return {"decode_tok_s": {"1": decode}, "prompt_tok_s": {name[1:]: one for name, one in prompts.items()}}

    theirs = job(40.0) | {"prompt_tok_s": {"512, -ub 512": 90.0, "2048, -ub 2048": 300.0, "2048, -ub 512": 200.0}}
    ours = job(110.0, _512=100.0, _2048=500.0) | {"vram": 8 << 30, "vram_used": 9 << 30}
    text = document(
        ours__8__static__auto=ours, ours__8__static__512=job(999.0),
        ours__12__static__auto={"error": "no room"}, theirs__8__ncmoe=theirs, theirs__8__cache=job(50.0),
    )  # fmt: skip
    (tmp_path / "whole.json").write_text(text)
    run = {"decode_tok_s": {"1": 400.0}, "step": {"idle_ms": 0.15}}
    keys = {"decode__drelu-7b__0__powerinfer": run, "decode__drelu-7b__0__llama.cpp-ngl": job(200.0)}
    (tmp_path / "drelu-7b-1.json").write_text(document(**keys))
    (tmp_path / "visit.json").write_text(json.dumps({"short/new tests": {"rc": 1, "why": ""}}))
    said = short_table.report(tmp_path)
    assert "8 GB: decode | 1.5x | 2.5x | 2.20x: 110 by 50.0 tokens/s | at least | 9.0, over the budget of 8.0;" in said
    assert "12 GB: decode | 1.5x | 2.5x | not measured |" in said
    assert "8 GB: prompt of 512 | 1x | 2x | 1.11x: 100 by 90.0 tokens/s | at least |" in said
    assert "8 GB: prompt of 2,048 | 1.5x | 3x | 1.67x: 500 by 300 tokens/s | at least |" in said
    assert "7B dReLU, F16, whole: decode | 1.5x | 2.2x | 2.00x: 400 by 200 tokens/s | at least |" in said
    assert "fixed host cost (7B dReLU) | 0.2 ms | 0.1 ms | 0.15 ms | at least |" in said
    assert "ours/12/static/auto failed: no room" in said and "short/new tests: status 1" in said
    assert short_table.Row("", 1, 2, 3.0, 4.0).cells()[-2] == "no"


def test_an_error_of_the_driver_that_is_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"powerinfer: {driver_error.SAID} computing 1 tokens: CUDA error"
    told = [(1, [line], "a b", True), (1, ["Traceback", line], "a b", False), (139, [line], "a b", False)]
    for status, lines, answer, good in (*told, (1, [line], "", False)):  # the last: while the model was loaded
        done = subprocess.CompletedProcess([], status, answer, "\n".join(["loading weights: 20%", *lines]))
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        monkeypatch.setattr(driver_error, "gpu_name", lambda _: "")
        monkeypatch.setattr(driver_error.machine, "description", dict)
        assert driver_error.main([str(tmp_path)]) == int(not good)
        assert json.loads(capsys.readouterr().out)["as_it_should"] == good


def test_figures_are_written_before_a_profiler_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails says so; a process that it ends has its result all the same."""
    monkeypatch.setattr(step_times, "decoded", lambda *_: 1.0)
    monkeypatch.setattr(step_times, "engine_times", lambda *_: {"step_ms": 1.0})
    monkeypatch.setattr(step_times, "profiled", lambda *_: [][0])
    found = step_times.times(None, "cuda", 4)  # type: ignore[arg-type]
    assert found == {"step_ms": 1.0, "lacks": "IndexError: list index out of range"}
    out = tmp_path / "jobs.json"
    measurement = Jobs(document={"jobs": {}}, out=out, quiet=0)
    measurement.note("ours/8", {"decode_tok_s": {"1": 2.0}})
    assert json.loads(out.read_text())["jobs"]["ours/8"]["decode_tok_s"] == {"1": 2.0}

    def crashes(command: list[str], _: float) -> str:
        Path(json.loads(command[-1])["note"]).write_text('{"vram": 7}')
        raise RuntimeError("python ended with status -11")

    monkeypatch.setattr(compare.programs, "output", crashes)
    found = compare.run({"what": "decode", "gpu": "cuda"})
    assert found == {"vram": 7, "step": {"lacks": "python ended with status -11"}}
