"""The benchmark of drafts: drafts that are right as often as asked, on a model with a random head; its table."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.models import draft_head
from benchmarks.models.speed_models import Shape, write_random_llama
from benchmarks.speed import speculation, speculation_table

SHAPE = Shape(d_model=128, d_ff=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, vocab=1000, context=1024)


def test_drafts_that_are_right_as_often_as_asked(tmp_path: Path) -> None:
    plain, model = tmp_path / "plain.gguf", tmp_path / "m.gguf"
    write_random_llama(plain, SHAPE, kind="Q4_0", head="Q8_0")
    draft_head.add_draft_head(plain, model)
    arguments = argparse.Namespace(threads=1, gen_tokens=48, rounds=2, quiet=0.0)
    entry = speculation.of_head(model, (1.0, 0.0), 2, arguments)
    right, wrong = entry["drafts"]["100 % right"], entry["drafts"]["0 % right"]
    assert right[0] == right[1] and wrong[1] == 0
    assert set(entry["ratio"]) == {"off", "100 % right", "0 % right"} and entry["ratio"]["off"] == 1.0
    document = {
        "speculation": [entry], "threads": 1, "gen_tokens": 48, "rounds": 2, "date": "2026-11-29", "commit": "c",
        "cpu": {"name": "a CPU", "cores": 2, "units": []},
    }  # fmt: skip
    body = speculation_table.body(document)
    assert "| a head, m | 100 % right |" in body and "a CPU" in body


def test_rates_that_llama_cpp_reports() -> None:
    plain = "perf:        eval time =    7059.85 ms /   119 runs   (   59.33 ms per token,    16.86 tokens per second)"
    lookup = "decoded  128 tokens in    3.411 seconds, speed:   37.527 t/s"
    assert speculation.RATES.findall(plain) == ["16.86"]
    assert speculation.RATES.findall(lookup) == ["37.527"]
    prompt = "prompt eval time = 10 ms / 5 tokens (2 ms per token, 500.0 tokens per second)"
    assert not speculation.RATES.findall(prompt)
