"""benchmarks/speed/processors.py with programs that only say how fast they were, and the tables of what they say."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import machine, results
from benchmarks.speed import processors, processors_table

OWN = """
import json, os, sys
words = sys.argv
isa = words[words.index("--isa") + 1] if "--isa" in words else "amx"
children = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
busy = [pid for pid in children if "sum(range" in open(f"/proc/{pid}/cmdline").read()]
speed = 60.0 / (1 + len(busy))
rates = {"prefill_tok_s": {"median": 10 * speed}, "decode_tok_s": {"median": speed}}
print(json.dumps(rates | {"choices": {"isa": f"{isa} (asked for)"}, "bytes_per_token": 1, "peak_rss_mb": 1.0}))
"""
PEER = """#!/bin/sh
case "$*" in *"-n 0"*) speed=200;; *) speed=20;; esac
echo '[{"avg_ts": '$speed'}]'
"""


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "own.py").write_text(OWN)
    for build, native in (("native", "ON"), ("avx2", "OFF")):
        folder = tmp_path / build / "bin"
        folder.mkdir(parents=True)
        (folder / "llama-bench").write_text(PEER)
        (folder / "llama-bench").chmod(0o755)
        (folder.parent / "CMakeCache.txt").write_text(f"GGML_NATIVE:BOOL={native}\n")
    for name in (*processors.NAMES, *processors.BUSY_NAMES):
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    described = {"date": "2026-01-01T00:00:00", "commit": "0", "cpu": {"name": "c", "cores": 2, "units": []}}
    monkeypatch.setattr(machine, "description", lambda: described)
    monkeypatch.setattr(machine, "cpu", lambda: {"cores": 2, "units": ["avx512f"]})
    monkeypatch.setattr(machine, "wait_until_quiet", lambda _: None)
    monkeypatch.setattr(processors, "bandwidth", lambda threads: {str(n): 10.0 for n in threads})
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    command = ["--models", str(tmp_path), "--powerinfer", f"python3 {tmp_path / 'own.py'}", "--retries", "0"]
    return [*command, "--rounds", "2"]


def measure(given: list[str], tmp_path: Path, isa: str, build: str, *more: str) -> dict[str, Any]:
    out = tmp_path / f"results/{isa}.json"
    peer = ["--peer", str(tmp_path / build / "bin"), "--isa", isa, "--out", str(out)]
    assert processors.main([*given, *peer, *more]) == 0
    return dict(json.loads(out.read_text()))


def test_levels_stand_side_by_side_quiet_and_busy(given: list[str], tmp_path: Path) -> None:
    measure(given, tmp_path, "avx2", "avx2", "--names", "r1b-Q4_0", "r1b-F16", "--beside", "0,2,loop")
    measure(given, tmp_path, "amx", "native", "--names", "r1b-F16")
    text = processors_table.processors_table()
    assert text is not None
    assert "| tokens a second | AVX2 | llama.cpp | ratio | AMX | llama.cpp | ratio |" in text
    assert "| prefill, 1.1B F16 | 600* | 200* | 3.00 | 600* | 200* | 3.00 |" in text
    assert "| decode, 1.1B Q4_0 | 60.0* | 20.0* | 3.00 | | | |" in text
    assert "| decode, SmolLM2-135M Q4_1 | 0 | 60.0 | 100 % | 20.0 | 100 % |" in text
    assert "| decode, SmolLM2-135M Q4_1 | 2 | 20.0 | 33 % | 20.0 | 100 % |" in text, "beside two processes"
    assert "| prefill, SmolLM2-135M Q4_1 | 1, on one core | 300 | 50 % | 200 | 100 % |" in text
    assert "- AMX: 2026-01-01, commit 0, 2 cores of c, level amx, 2 rounds" in text


def test_a_measurement_goes_on_where_it_stopped(given: list[str], tmp_path: Path) -> None:
    part = [*given, "--peer", str(tmp_path / "avx2/bin"), "--isa", "avx2", "--out", str(tmp_path / "one.json")]
    assert processors.main([*part, "--minutes", "-1"]) == 3 and not (tmp_path / "one.json").exists()
    assert processors.main([*part, "--names", "r1b-F16", "--rounds", "1"]) == 0
    first = json.loads((tmp_path / "one.json").read_text())["speed"][0]["rounds"]
    assert processors.main([*part, "--names", "r1b-F16", "r1b-Q8_0"]) == 0
    document = json.loads((tmp_path / "one.json").read_text())
    assert [entry["model"] for entry in document["speed"]] == ["r1b-F16", "r1b-Q8_0"]
    again = document["speed"][0]["rounds"]
    assert all(again[label][0] == runs[0] and len(again[label]) == 2 for label, runs in first.items())
    with pytest.raises(SystemExit, match="another isa"):
        processors.main([word if word != "avx2" else "avx512" for word in part])


def test_a_peer_of_another_level_is_refused(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not for avx2"):
        processors.main([*given, "--peer", str(tmp_path / "native/bin"), "--isa", "avx2"])


def test_busy_processes_use_cores_and_end_with_the_context() -> None:
    before = os.times()
    core, children = max(os.sched_getaffinity(0)), Path(f"/proc/self/task/{os.getpid()}/children")
    others = set(children.read_text().split())
    with machine.busy(1, on=core):
        (pid,) = map(int, set(children.read_text().split()) - others)
        begin = time.monotonic()
        while int(Path(f"/proc/{pid}/stat").read_text().split()[13]) < 10:
            assert time.monotonic() < begin + 30, "it uses no time"
            time.sleep(0.02)
        assert os.sched_getaffinity(pid) == {core}
    assert not Path(f"/proc/{pid}").exists()
    used = sum(os.times()[2:4]) - sum(before[2:4])  # of children that were waited for
    assert used >= 0.05, "it counts as the caller's own"
