"""benchmarks/sparse/compare.py and table.py, with programs that only say how fast they were."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib import machine, results
from benchmarks.sparse import compare, silent, table

OWN = """
import json, sys
if sys.argv[1] == "pack":
    sys.exit()
words = sys.argv[2:]
selector, model = words[words.index("--selector") + 1], words[words.index("-m") + 1]
speed = {"all": 20.0, "exact": 30.0, "predicted": 40.0 if "--no-trial" in words else 50.0}[selector]
if "-20-" in model:
    speed = 20.0 if selector == "all" else 10.0
print(json.dumps({
    "prefill_tok_s": {"median": 1.0},
    "decode_tok_s": {"median": speed},
    "bytes_per_token": 1_000_000_000 if selector == "all" else 400_000_000,
    "choices": {},
    "sparsity": {"selector": selector, "active_fraction": 0.1, "layers": [{"layer": 0, "ways": {"1": selector}}]},
}))
"""
PEER = """#!/bin/sh
echo '[{"avg_ts": 16.0}]'
"""


def test_crossing() -> None:
    assert table.crossing([(0.1, 2.0), (0.5, 1.5), (0.7, 0.5), (1.0, 0.4)]) == pytest.approx(0.6)
    assert table.crossing([(0.1, 2.0), (1.0, 1.2)]) == math.inf
    assert table.crossing([(0.1, 0.9), (0.2, 1.2)]) is None
    assert table.crossing([]) is None


def test_run_and_table(tmp_path: Path) -> None:
    own, folder, out = tmp_path / "own.py", tmp_path / "peer/bin", tmp_path / "sparse.json"
    own.write_text(OWN)
    folder.mkdir(parents=True)
    (folder / "llama-bench").write_text(PEER)
    (folder / "llama-bench").chmod(0o755)
    command = [sys.executable, "-m", compare.__name__, "--models", str(tmp_path / "models")]
    command += ["--peer", f"dense={folder}"]
    command += ["--powerinfer", f"{sys.executable} {own}", "--shape", "tiny", "--fractions", "0.05", "0.2"]
    command += ["--types", "F16", "--predictor-rank", "128", "--rounds", "3", "--retries", "0", "--quiet", "0"]
    # CXX: no bandwidth is measured
    subprocess.run([*command, "--out", str(out)], check=True, cwd=machine.ROOT, env=os.environ | {"CXX": "false"})
    assert not list((tmp_path / "models").iterdir())
    document = json.loads(out.read_text())
    assert [(entry["type"], entry["active"]) for entry in document["sparse"]] == [("F16", 0.05), ("F16", 0.2)]
    first = document["sparse"][0]
    assert first["engines"]["predicted"]["decode_tok_s"]["median"] == 40
    assert first["engines"]["predicted"]["sparsity"] == {"selector": "predicted", "active_fraction": 0.1}
    assert first["ratio"]["predicted"]["dense"]["median"] == 2.5
    assert first["ratio"]["exact"]["all"]["median"] == 1.5

    for entry in document["sparse"]:
        entry["bandwidth"] = 20.0
        assert entry["ffn_seconds"] is None  # there are no bundles
        entry["ffn_seconds"] = {"dense": 0.05, "exact": 0.02, "predicted": 0.01}
        for engine in entry["engines"].values():
            engine["kept"] = 3
    rows = [line for line in table.speed_table(document).splitlines() if line.startswith("| F16")]
    assert (
        rows[0]
        == "| F16 | 5 % | 20.0 | 30.0 (1.50) | 40.0 (2.50) | 50.0 (3.12) | 16.0 | 1000 | 400 | 80 % | 0.40 | 0.20 |"
    )
    assert (
        rows[1]
        == "| F16 | 20 % | 20.0 | 10.0 (0.50) | 10.0 (0.62) | 10.0 (0.62) | 16.0 | 1000 | 400 | 20 % | 0.40 | 0.20 |"
    )
    # 1.5 times at 5 %, half at 20 %: equal in the middle
    assert "- `exact` in F16 is as fast as `all` at 12 % active" in table.speed_table(document)
    del document["sparse"][1]
    assert "- `exact` in F16 is faster than `all` up to 5 % active" in table.speed_table(document)


def test_silent_models_and_their_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, folder, out = tmp_path / "own.py", tmp_path / "peer/bin", tmp_path / "silent.json"
    own.write_text(OWN.replace('{"median": 1.0}', '{"median": 32.0}'))
    folder.mkdir(parents=True)
    (folder / "llama-bench").write_text(PEER)
    (folder / "llama-bench").chmod(0o755)
    written: list[str] = []

    def write(path: Path, sizes: silent.silent_models.Sizes, kind: str, share: list[float]) -> None:
        written.append(f"{sizes.pattern} {kind} {share}")
        path.write_bytes(b"GGUF")

    monkeypatch.setattr(silent.silent_models, "write", write)
    monkeypatch.setattr(silent.prepared, "prepare_silent", lambda *_: None)
    monkeypatch.setenv("CXX", "false")  # no bandwidth is measured
    words = ["silent", "--models", str(tmp_path / "models"), "--peer", f"peer={folder}", "--types", "q5_0"]
    words += ["--powerinfer", f"{sys.executable} {own}", "--rounds", "3", "--retries", "0", "--quiet", "0"]
    monkeypatch.setattr(sys, "argv", [*words, "--shapes", "nemotron-3-nano-30b-a3b", "--out", str(out)])
    silent.main()
    assert written == ["MEMEM*EME q5_0 [0.907]"] and not list((tmp_path / "models").iterdir())
    document = json.loads(out.read_text())
    document["cpu"] = machine.description()["cpu"]
    merged = results.merged([document], "silent", "model", "type", "threads")
    assert merged is not None
    text = table.silent_table(merged)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[1].split("|")[4:9] == [" 2 ", " prompt ", " 32.0 (2.00) ", " 32.0 (2.00) ", " 32.0 (2.00) "]
    assert rows[2].split("|")[5:12] == [
        " decode ", " 20.0 (1.25) ", " 30.0 (1.88) ", " 40.0 (2.50) ", " 16.0 ", " 1000 ", " 400 "
    ]  # fmt: skip
