"""benchmarks/placement/predictions.py and predictions_table.py on a tiny model: cut models, rounds, tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparse_models import give_bundles, give_predictor, tiny_llama

from benchmarks.placement import predictions
from benchmarks.placement import predictions_table as table
from powerinfer.config import EngineConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hardware.description import Hardware, load


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens, groups that a tiny FFN has several of, and a machine that need not be measured."""
    for name, value in {"PROFILED": 16, "GENERATED": 8, "CONTEXT": 64, "STEPS": 2, "BLOCKS": 2}.items():
        monkeypatch.setattr(predictions, name, value)

    def measure(engine: EngineConfig) -> Hardware:
        machine = load("pc-low")
        return Hardware("here", "", machine.cpu)

    monkeypatch.setattr(predictions, "measure", measure)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return give_predictor(give_bundles(tiny_llama(tmp_path / "tiny.gguf")))


def test_cold_neurons_are_cut_out(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    layers, d_ff = checkpoint.config.n_layers, checkpoint.config.widest_ffn
    cold = [np.arange(layer, d_ff, 3, dtype=np.int32) for layer in range(layers)]
    cut: Any = predictions.ColdCheckpoint(open_checkpoint(model), cold, down=True)
    for layer in range(layers):
        for part in ("gate", "up", "down"):
            whole = checkpoint.take(f"layers.{layer}.{part}").float32()
            wanted = whole[:, cold[layer]] if part == "down" else whole[cold[layer]]
            assert np.array_equal(cut.take(f"layers.{layer}.{part}").float32(), wanted)
        assert np.array_equal(cut.take(f"layers.{layer}.q").data, checkpoint.take(f"layers.{layer}.q").data)
    bare: Any = predictions.ColdCheckpoint(open_checkpoint(model), cold, down=False)
    assert not bare.take("layers.0.down").float32().any() and bare.take("layers.0.down").shape[1] == len(cold[0])


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["predictions.py", *map(str, arguments)])
    predictions.main()


def test_rounds_and_tables(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, before = tmp_path / "plan.json", sorted(Path(f"{model}.powerinfer").iterdir())
    common = ("--threads", 1, "--repeat", 2, "--work", tmp_path / "work", "--out", out)
    for _ in range(2):
        run(monkeypatch, f"{model}:all,exact,predicted", *common)
    run(monkeypatch, f"{model}:all,exact,predicted", *common, "--stand-in", "--shares", 0.5)
    assert sorted(Path(f"{model}.powerinfer").iterdir()) == before, "trials are kept elsewhere"
    document = json.loads(out.read_text())
    assert document["kind"] == "plan" and len(document["rounds"]) == 3
    for one in document["rounds"]:
        assert list(one["selectors"]) == ["all", "exact", "predicted"] and one["cpu"]["dense_gb_s"]
    found = table.cases(document)
    assert len(found) == 6
    for (_, selector, share), rounds in found.items():
        assert all(each["predicted_ms"] > 0 and each["measured_ms"] > 0 for each in rounds)
        if share is None:
            assert sum(rounds[0]["ways"].values()) == open_checkpoint(model).config.n_layers
        else:
            assert 0 <= rounds[0]["neurons_on_gpu"] < 1 and len(rounds) == 1
            assert (0 < rounds[0]["measured_cpu_ms"] < 1e3) or selector == "predicted"  # a difference of two times
    rows = [*(table.alone_table(found) + table.stand_in_table(found)).splitlines(), *table.summary(found)]
    assert sum(line.startswith("| tiny |") for line in rows) == 6
    assert {line.split(",")[0] for line in rows if "within 10 %" in line} == {
        "for the CPU alone",
        "with a GPU stood in for",
    }


def test_the_middle_of_the_rounds() -> None:
    """Rounds in which other programs ran do not count beside others; off is the median of the ratios."""
    case = {"share": 0.5, "quiet": True, "predicted_ms": 10.9, "measured_ms": 10.0}
    rounds = [
        case,
        case | {"predicted_ms": 9.0},
        case | {"predicted_ms": 12.0},
        case | {"quiet": False, "measured_ms": 99.0},
    ]
    document = {
        "rounds": [{"commit": "abc", "model": "m", "stand_in": "gpu", "selectors": {"all": [one]}} for one in rounds]
    }
    (kept,) = table.cases(document).values()
    assert len(kept) == 3 and table.off(kept) == pytest.approx(0.09) and table.middle(kept, "predicted_ms") == "10.9"
    assert table.count(kept) == "3"
    assert table.count([case | {"quiet": False, "landed": False}]) == "1*+"
    assert list(table.summary({("m", "all", 0.5): kept})) == [
        "with a GPU stood in for, undisturbed: 1 of 1 predictions within 10 %, 1 within 20 %, the worst 9 % off"
    ]
