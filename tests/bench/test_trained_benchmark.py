"""benchmarks/sparse/trained.py: its tables, and what the results that are kept must show."""

from __future__ import annotations

import json

import pytest

from benchmarks.sparse import trained


def test_the_page_holds_the_tables_of_the_results() -> None:
    result = json.loads(trained.RESULT.read_text())
    made = trained.tables(result)
    assert made in trained.PAGE.read_text(), "python -m benchmarks.sparse.trained --tables writes them"
    for name, found in result["models"].items():
        assert f"{found['all']['perplexity']:.3f}" in made and f"| {name} |" in made


def test_what_predictors_reach() -> None:
    models = json.loads(trained.RESULT.read_text())["models"]
    predicted = {name: found for name, found in models.items() if name != trained.ORIGINAL}
    beyond: dict[str, float] = {}
    for name, found in predicted.items():
        met, fires = found["predicted"]["sparsity"], found["exact"]["sparsity"]["active_fraction"]
        model = name.split()[0]
        beyond[model] = min(beyond.get(model, 1.0), met["candidate_fraction"] - fires)
        assert met["recall"] >= 0.95
        assert found["train"]["share_of_model"] <= 0.10
        dense, exact = found["all"]["perplexity"], found["exact"]["perplexity"]
        assert exact == pytest.approx(dense, rel=1e-3), "exact is the dense answer within rounding"
        assert found["predicted"]["perplexity"] == pytest.approx(dense, rel=0.02)
    assert beyond and all(points <= 0.10 for points in beyond.values()), "with one of the recalls that were tried"
