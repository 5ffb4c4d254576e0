"""benchmarks/hybrid/visit.py, experts.py and carry.py without a GPU: all calls at a tiny scale, and their time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.hybrid import carry, compare, experts, visit, worker  # noqa: E402
from benchmarks.hybrid.visit import Step  # noqa: E402
from benchmarks.lib import machine  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("call", [call for call in visit.CALLS if call != "llama.cpp"])
def test_every_call_at_a_tiny_scale(call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = [call, "--trial", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    status = visit.main(where)
    said = capsys.readouterr().out
    assert status == 0, (said, (tmp_path / f"work/{call}.log").read_text()[-3000:])
    told = json.loads((tmp_path / "out/visit.json").read_text())
    assert told and all(one["rc"] == 0 for one in told.values())
    measured = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    jobs = [job for one in measured for key, job in one.get("jobs", {}).items() if "powerinfer" in key]
    assert (call == "kernels") == (not jobs) and all(job["off"] for job in jobs), "checked, then timed"
    assert visit.main(where) == 0 and "---" not in capsys.readouterr().out, "nothing is done twice"


def test_models_are_made_in_memory_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "shm", tmp_path / "disk"
    assert visit.default_work(memory, disk) == disk / "powerinfer"
    memory.mkdir()
    monkeypatch.setattr(visit, "ROOM", 1)
    assert visit.default_work(memory, disk) == memory / "powerinfer"
    monkeypatch.setattr(visit, "ROOM", 1 << 60)
    assert visit.default_work(memory, disk) == disk / "powerinfer"
    (memory / "powerinfer").mkdir()
    assert visit.default_work(memory, disk) == memory / "powerinfer", "where the last call was"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_call_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that take too long are ended, those that need them are left out, and both are done when called again."""
    seconds = 100

    def steps(_: Any) -> list[Step]:
        return [
            Step("first", python("print('one')"), 60),
            Step("slow", python(f"print('begun', flush=True); import time; time.sleep({seconds})"), 1),
            Step("wrong", python("print('no'); raise SystemExit(3)"), 60),
            Step("after", python("print('two')"), 60, ("slow",)),
            Step("last", python("print('three')"), 60, ("first",)),
        ]

    monkeypatch.setattr(visit, "steps", steps)
    where = ["falcon", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert visit.main(where) == 1
    told = json.loads((tmp_path / "out/visit.json").read_text())
    assert {key.split("/")[1]: (one["rc"], one.get("last")) for key, one in told.items()} == {
        "first": (0, "one"), "slow": (None, "begun"), "wrong": (3, "no"), "after": (None, None), "last": (0, "three")
    }  # fmt: skip
    assert told["falcon/slow"]["why"].startswith("took more than 1") and told["falcon/after"]["why"] == "slow failed"
    assert "begun" in (tmp_path / "out/falcon.log").read_text()
    capsys.readouterr()
    seconds = 0
    assert visit.main(where) == 1
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("---")] == ["--- slow", "--- wrong", "--- after"]
    monkeypatch.setattr(visit, "steps", lambda _: [*steps(_), Step("new", python("print('four')"), 60)])
    assert visit.main([*where, "--minutes", "0"]) == 1 and "no time left" in capsys.readouterr().out
    assert visit.main(where) == 1
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("---")] == ["--- new", "--- wrong"], "failed last"
    monkeypatch.setattr(visit, "steps", steps)
    seconds = 100
    (tmp_path / "work/visit.json").unlink()
    assert visit.main([*where, "--regardless"]) == 1
    told = json.loads((tmp_path / "out/visit.json").read_text())
    assert (told["falcon/slow"]["rc"], told["falcon/after"]["rc"]) == (None, 0)


def test_models_of_other_calls_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that is gone on with keeps its own; where they are gone, they are made again if a step needs them."""
    fails = True

    def steps(arguments: Any) -> list[Step]:
        made = visit.models_of(tmp_path, arguments.call)
        make = f"import pathlib; pathlib.Path({str(made)!r}).mkdir(parents=True); print('made')"
        used = f"print('used'); raise SystemExit({int(fails)})"
        return [Step("model", python(make), 60, makes=made), Step("ours", python(used), 60, ("model",))]

    def begun(call: str) -> list[str]:
        visit.main([call, "--clear", "--work", str(tmp_path)])
        return [line[4:] for line in capsys.readouterr().out.splitlines() if line.startswith("--- ")]

    monkeypatch.setattr(visit, "steps", steps)
    assert begun("falcon") == ["model", "ours"] and begun("falcon") == ["ours"]
    assert begun("drelu") == ["model", "ours"] and not visit.models_of(tmp_path, "falcon").exists()
    assert begun("falcon") == ["model", "ours"]
    fails = False
    assert begun("falcon") == ["ours"] and begun("drelu") == ["model", "ours"]
    assert begun("falcon") == [], "nothing needs it any more"


def test_a_peer_is_one_that_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Step]] = []
    monkeypatch.setattr(visit.Visit, "run", lambda self: seen.append([*visit.steps(self.arguments)]) or True)
    program = tmp_path / "llama.cpp/build-cuda-90/bin/llama-bench"
    program.parent.mkdir(parents=True)
    visit.main(["falcon", "--work", str(tmp_path)])
    program.touch()
    visit.main(["falcon", "--work", str(tmp_path)])
    half, whole = ([step.name for step in one] for one in seen)
    assert half == ["model", "ours"] and whole == ["model", "ours", "peer"]
    assert str(program.parent) in seen[1][-1].command


def test_rates_are_measured_before_long_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    take = lambda self: names.extend(step.name for step in visit.steps(self.arguments)) or True  # noqa: E731
    monkeypatch.setattr(visit.Visit, "run", take)
    visit.main(["kernels", "--work", str(tmp_path)])
    assert names[:4] == ["probe", "host calls", "hardware", "kernel tests"]


def test_experts_whose_logits_differ_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "decoded", lambda *_: pytest.fail("timed"))
    plain = worker.logits_of
    beside_a_gpu = lambda llm: plain(llm) * (1 if llm.choices["gpu"].startswith("none") else 1.1)  # noqa: E731
    monkeypatch.setattr(worker, "logits_of", beside_a_gpu)
    out = tmp_path / "experts.json"
    given = ["--models", str(tmp_path), "--gpu", "cpu", "--tiny", "--threads", "1", "--out", str(out)]
    assert experts.main([*given, "--make"]) == 0 and set(json.loads(out.read_text())["jobs"]) == {"make"}
    assert experts.main(given) == 1
    jobs = json.loads(out.read_text())["jobs"]
    assert "not timed: logits are off by 0.1" in jobs["experts/1/powerinfer"]["error"]
    one = np.ones((8, 5), np.float32)
    assert experts.checked(one, one) == 0
    with pytest.raises(RuntimeError, match="off by nan"):
        experts.checked(one * np.nan, one)


def test_flags_for_experts_of_the_peer() -> None:
    assert compare.ncmoe_flags(3, 16) == ["-ngl", "999", "-ncmoe", "13"]


def test_a_copy_of_the_source_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.commit() == ""
    (tmp_path / "COMMIT").write_text("0123456789ab+changes\n")
    assert machine.commit() == "0123456789ab+changes"


def test_packages_are_those_that_the_project_requires() -> None:
    stated = dict(zip(carry.MISSING, carry.requirements(list(carry.MISSING)), strict=True))
    assert stated["highspy"].startswith("highspy>=") and stated["gguf"].startswith("gguf>=")
    assert stated["prompt_toolkit"].startswith("prompt_toolkit>=") and stated["wcwidth"] == "wcwidth"
