"""Make a model of each profile of models/make_model.py, measure which neurons fire, and keep the figures.

    python -m benchmarks.sparse.profiles FOLDER [--shape 1b] [--tokens 1024]

FOLDER holds one model at a time. Writes benchmarks/results/activity-DATE.json; table.py shows it in the docs.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, results
from benchmarks.models import activity, make_model
from benchmarks.models.weights import Plan

# profile -> what kind of model had those statistics
KINDS: dict[str, dict[str, str]] = {
    "opt-30b": {"family": "opt"},
    "reglu-70b": {"activation": "relu"},
    "drelu": {"activation": "drelu"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=tuple(make_model.SHAPES), default="1b")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--predictor-rank", type=int, default=512)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/activity-DATE.json")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"kind": "activity", **machine.description(), "shape": arguments.shape, "profiles": {}}
    out = arguments.out or results.path_of(document)
    for name, kind in KINDS.items():
        document["profiles"][name] = measured(name, kind, arguments)
        results.write_json(out, document)


def measured(name: str, kind: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """The measurement of a profile, beside what was asked for."""
    values: dict[str, Any] = make_model.SHAPES[arguments.shape] | make_model.PROFILES[name] | kind
    if kind.get("family") == "opt":
        values["n_kv_heads"] = values.get("n_heads", Plan.n_heads)
    plan = Plan(**values)
    model = arguments.folder / f"{name}.gguf"
    try:
        make_model.make(model, plan, "gguf", "f16")
        make_model.make_predictor(model, plan, arguments.predictor_rank)
        result = activity.measure(model, make_model.random_tokens(arguments.tokens, plan.vocab))
    finally:
        model.unlink(missing_ok=True)
        shutil.rmtree(f"{model}.powerinfer", ignore_errors=True)
    return {"chosen": make_model.chosen_statistics(plan), **result.document()}


if __name__ == "__main__":
    main()
