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
    assert visit.main([*where, "--minutes", "0"]) == 1 and "no time left" in capsys.readouterr().out
    seconds = 100
    (tmp_path / "work/visit.json").unlink()
    assert visit.main([*where, "--regardless"]) == 1
    told = json.loads((tmp_path / "out/visit.json").read_text())
    assert (told["falcon/slow"]["rc"], told["falcon/after"]["rc"]) == (None, 0)


def test_experts_whose_logits_differ_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "decoded", lambda *_: pytest.fail("timed"))
    plain = worker.logits_of
    beside_a_gpu = lambda llm: plain(llm) * (1 if llm.choices["gpu"].startswith("none") else 1.1)  # noqa: E731
    monkeypatch.setattr(worker, "logits_of", beside_a_gpu)
    out = tmp_path / "experts.json"
    given = ["--models", str(tmp_path), "--gpu", "cpu", "--tiny", "--threads", "1", "--out", str(out)]
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
