"""benchmarks/disk/: jobs with programs that only say how fast they were, and the tables and plots of what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.disk import compare, table
from benchmarks.lib import memory_limit
from benchmarks.lib.file_rates import file_rates
from benchmarks.models import disk_models

FILE = 400 << 20  # bytes of a model, none of which is written
RAM = FILE // 2

OWN = """
import json, sys
what, words = sys.argv[1], sys.argv[2:]
ram = words[words.index("--ram") + 1] if "--ram" in words else None
name = words[words.index("-m") + 1].split("/")[-1]
if what == "bench" and ram and name == "dense.gguf":
    print("an error\\npowerinfer: the disk has gone", file=sys.stderr)
    sys.exit(1)
if what == "bench":
    speed = 6.0 if ram else 10.0
    if "predicted" in words or "exact" in words:
        speed *= 2
    disk = {"mode": ram, "joined_reads": 3200}
    disk |= {"bytes": 4_000_000_000, "bytes_per_token": 125_000_000, "read_gb_s": 2.0, "hit_rate": 0.75}
    document = {"decode_tok_s": {"median": speed}, "prefill_tok_s": {"median": 10 * speed}, "peak_rss_mb": 194.0}
    print(json.dumps(document | ({"disk": disk | {"stall_seconds": 0.5}} if ram else {})))
elif what == "plan":
    print(json.dumps({"predicted": {"decode_tok_s": 5.0}}))
else:
    slots = [int(n) for n in words[words.index("--slots") + 1].split(",")]
    policies = {"lru": {"measured": 0.9, "predicted": 0.8}, "static": {"measured": None, "predicted": 0.7}}
    print(json.dumps({"tokens": 9, "expert_bytes": 1, "at": [{"share": n / 128, "policies": policies} for n in slots]}))
"""
PEER = """#!/bin/sh
case "$*" in *--repack*) speed=2;; *) speed=8;; esac
case "$*" in *"-n 0"*) speed=${speed}0;; esac
echo '[{"avg_ts": '$speed'}]'
"""


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    own, peer = tmp_path / "own.py", tmp_path / "peer"
    own.write_text(OWN)
    peer.mkdir()
    (peer / "llama-bench").write_text(PEER)
    (peer / "llama-bench").chmod(0o755)

    def make(folder: Path, name: str, threads: int, layers: int | None) -> Path:
        path = disk_models.path_of(folder, name)
        with path.open("wb") as file:
            file.truncate(FILE)
        return path

    def rates(path: Path, seconds: float) -> dict[str, Any]:
        return {"engine": "uring", "direct": True, "sequential_gb_s": 3.0, "random_gb_s": {"4096": 0.25}}

    monkeypatch.setattr(disk_models, "make", make)
    monkeypatch.setattr(compare, "file_rates", rates)

    def run(*more: object) -> dict[str, Any]:
        fixed = ["--models", tmp_path, "--peer", peer, "--powerinfer", f"{sys.executable} {own}", "--quiet", 0]
        words = [*fixed, "--threads", 1, "--out", tmp_path / "disk.json", *more]
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, words)])
        assert compare.main() == 0
        document: dict[str, Any] = json.loads((tmp_path / "disk.json").read_text())
        return document

    return run


def test_jobs_tables_and_plots(
    measured: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = measured("--names", "dense", "experts", "--rounds", 3, "--sweep", 0.25)
    jobs = document["jobs"]
    first = ["make/dense", *(f"{engine}/dense/0.5/0" for engine in ("powerinfer", "llama.cpp"))]
    first += ["powerinfer-ram/dense/all/0", "llama.cpp-ram/dense/all/0", "disk/dense/0"]
    second = ["llama.cpp/dense/0.5/1", "powerinfer-ram/dense/all/1"]
    assert list(jobs)[:8] == [*first, *second], "every round another engine is the first"
    assert {"powerinfer/dense/0.25/0", "plan/dense/0.5", "plan/experts/0.5", "hits/experts"} <= set(jobs)
    assert "powerinfer/dense/0.25/1" not in jobs and "hits/dense" not in jobs

    ours, theirs = jobs["powerinfer/experts/0.5/0"], jobs["llama.cpp/experts/0.5/0"]
    assert (ours["decode_tok_s"], ours["prefill_tok_s"], ours["disk"]["mode"]) == (6, 60, f"{RAM}B")
    assert ours["memory"]["limit"] == theirs["memory"]["decode_tok_s"]["limit"] == RAM
    assert ours["memory"]["by"] == document["limited_by"]
    assert (theirs["decode_tok_s"], theirs["prefill_tok_s"]) == (2, 20)
    in_ram = jobs["llama.cpp-ram/experts/all/0"]
    assert in_ram["decode_tok_s"] == 8 and in_ram["memory"]["decode_tok_s"]["limit"] is None
    assert jobs["powerinfer/dense/0.5/0"]["error"].endswith("status 1: powerinfer: the disk has gone")

    for job in jobs.values():
        job["disturbed"] = False
    text = table.speed_table(document)
    speeds = [line for line in text.splitlines() if line.startswith("|")]
    names = [table.LABELS[name] for name in ("dense", "experts")]
    assert speeds[2:] == [
        f"| {names[0]} | 0.42 | 0.21 | decode of 32 | fails | 10.0 | | 2.00 | | 8.00 |",
        "| | | | prompt of 512 | fails | 100 | | 20.0 | | 80.0 |",
        f"| {names[1]} | 0.42 | 0.21 | decode of 32 | 6.00 | 10.0 | 60 % | 2.00 | 3.0 | 8.00 |",
        "| | | | prompt of 512 | 60.0 | 100 | 60 % | 20.0 | 3.0 | 80.0 |",
    ]
    assert "- dense, powerinfer: " in text and "dense 3.00 GB/s in order, at random 4 KiB 0.25" in text
    # 125 MB at 6 tokens a second are a quarter of 3 GB/s; of 2 seconds in which the disk read, steps waited a quarter;
    # 194 of 200 MiB
    reads = table.reads_table(document)
    assert reads is not None
    assert reads.splitlines()[2:] == [
        "| dense | | | | | | | 5.00 | | |",
        "| experts | 125 | 2.00 | 25 % | 75 % | 75 % | 75 % | 5.00 | 1.20 | 97 % |",
    ]
    jobs["powerinfer/experts/0.5/1"]["disturbed"] = True
    assert "decode of 32 | 6.00* | 10.0 |" in table.speed_table(document)

    size = FILE / 1e9
    assert table.speeds(document, table.PEER, "experts") == [(0.25 * size, 2), (0.5 * size, 2)]
    assert table.hits(document) == {"lru": [(100 * slots / 128, 90) for slots in compare.SLOTS]}
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(table, "IMAGES", tmp_path / "img")
    table.draw(document)
    assert {path.name for path in (tmp_path / "img").iterdir()} == {"disk-speed.svg", "disk-hits.svg"}


def test_silent_neurons(measured: Callable[..., dict[str, Any]]) -> None:
    document = measured("--names", "silent", "--rounds", 2, "--sweep")
    assert "exact/silent/0.5/1" in document["jobs"] and "predicted-ram/silent/all/0" not in document["jobs"]
    for job in document["jobs"].values():
        job["disturbed"] = False
    text = table.silent_table(document)
    assert "0.42 GB with 0.5 of its bytes as RAM" in text and "4 KiB at random 0.25" in text
    assert [line for line in text.splitlines() if line.startswith("|")][2:] == [
        "| `auto` | 6.00* | 3.0 | 60.0* | 3.0 | 125 | 75 % | 97 % |",
        "| whole experts | 6.00* | 3.0 | 60.0* | 3.0 | 125 | 75 % | 97 % |",
        "| `exact` | 12.0* | 6.0 | 120* | 6.0 | 125 | 75 % | 97 % |",
        "| `predicted` | 12.0* | 6.0 | 120* | 6.0 | 125 | 75 % | 97 % |",
        "| llama.cpp, mmap | 2.00* | | 20.0* | | | | |",
    ]


def test_what_can_be_hidden() -> None:
    """Of ten tokens in two seconds the disk reads for 1.6: where steps wait for 1.2 of these they compute for 0.8."""
    disk = {"bytes": 3.2e9, "bytes_per_token": 3.2e8, "read_gb_s": 2.0}
    for waited, hidden, overlap in ((1.2, 0.25, 0.5), (0.8, 0.5, 0.5 * 1.6 / 1.2), (0.2, 0.875, 0.875)):
        run = {"decode_tok_s": 5.0, "disk": disk | {"stall_seconds": waited}}
        assert table.hidden(run) == pytest.approx(hidden) and table.overlap(run) == pytest.approx(overlap)
    assert table.overlap({"decode_tok_s": 5.0, "disk": disk | {"read_gb_s": None}}) is None


def test_both_selectors_of_a_model_with_predictors(measured: Callable[..., dict[str, Any]]) -> None:
    document = measured("--names", "relu", "--rounds", 1, "--sweep")
    jobs = document["jobs"]
    assert {"plan/relu/0.5", "plan-predicted/relu/0.5", "predicted-ram/relu/all/0"} <= set(jobs)
    for job in jobs.values():
        job["disturbed"] = False
    jobs["predicted-ram/relu/all/0"]["decode_tok_s"] = 16.0
    text = table.neurons_table(document, document)
    assert "llama.cpp's 2.00 of this run" in text
    assert text.splitlines()[4:] == [
        "| `auto`, which is `exact` | 6.00* | 10.0* | 60 % | 125 | 100 | 75 % | 75 % | 75 % | 5.00 | 3.0 |",
        "| `predicted` | 12.0* | 16.0* | 75 % | 125 | 100 | 75 % | 75 % | 75 % | 5.00 | 6.0 |",
    ]
    jobs["predicted/relu/0.5/0"] = {"error": "it has failed"}
    text = table.neurons_table(document, None)
    assert "llama.cpp was not measured" in text
    assert "- predicted: it has failed" in text


def test_it_goes_on_where_it_was(measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--names", "experts", "--rounds", 1, "--sweep")
    peers = measured(*flags, "--engines", "llama.cpp", "disk")
    assert set(peers["jobs"]) == {"make/experts", "llama.cpp/experts/0.5/0", "disk/experts/0"}
    assert table.reads_table(peers) is None, "nothing has been read"
    whole = measured(*flags)
    unchanged = ("llama.cpp/experts/0.5/0", "disk/experts/0")
    assert [whole["jobs"][key] for key in unchanged] == [peers["jobs"][key] for key in unchanged]
    assert "powerinfer/experts/0.5/0" in whole["jobs"]

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(memory_limit, "output", never)
    assert measured(*flags) == whole
    with pytest.raises(SystemExit, match="other settings"):
        measured(*flags, "--gen-tokens", 8)
    with pytest.raises(SystemExit):
        measured(*flags, "--share", 0)


def test_a_program_that_exceeds_the_limit(measured: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN.replace('if what == "bench":', 'if what == "bench" and bytearray(600 << 20):'))
    document = measured("--names", "relu", "--rounds", 1, "--sweep", "--engines", "powerinfer")
    if document["limited_by"] is None:
        pytest.skip("no memory cgroup can be made here")
    assert document["jobs"]["powerinfer/relu/0.5/0"]["error"].endswith("was killed: it needs more than 0.20 GiB")


def test_a_file_that_another_program_reads(
    measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--names", "dense", "--rounds", 1, "--sweep", "--engines", "llama.cpp", "llama.cpp-ram", "--retry")
    kept = [0, RAM + 1, 0, FILE, 0]  # after dropping, after the program; of the next engine, which has no limit
    monkeypatch.setattr(compare.page_cache, "cached", lambda _: kept.pop(0) if kept else 0)
    jobs = measured(*flags)["jobs"]
    assert jobs["llama.cpp/dense/0.5/0"]["error"].endswith("another program has read them")
    assert jobs["llama.cpp-ram/dense/all/0"]["decode_tok_s"] == 8
    kept[:] = [FILE // 100 + 1]
    jobs = measured(*flags)["jobs"]
    assert jobs["llama.cpp/dense/0.5/0"]["error"].endswith("does another program use them?")
    assert measured(*flags)["jobs"]["llama.cpp/dense/0.5/0"]["decode_tok_s"] == 2


def test_rates_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(33 << 20))
    found = file_rates(path, 0.01)
    assert found["sequential_gb_s"] > 0 and min(found["random_gb_s"].values()) > 0
    assert list(found["random_gb_s"]) == ["4096", "16384", "65536", "262144", "1048576", "4194304"]
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(ValueError, match="model has only 1048576 bytes"):
        file_rates(path, 0.01)
