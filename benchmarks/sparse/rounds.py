"""The rounds of the comparisons of selectors with the dense path and with llama.cpp: compare.py, silent.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import programs


def measure(
    engines: programs.Engines, model: Path, arguments: argparse.Namespace, rates: Sequence[str]
) -> dict[str, Any]:
    """The rates of all engines on a model, and this engine's by those that compute every neuron, within a round."""
    runs = {label: programs.Runs() for label in engines.labels()}

    def job(label: str) -> dict[str, Any]:
        return engines.measure(label, model, arguments.threads)

    for number in range(arguments.rounds):
        programs.one_round(runs, number, arguments.retries, arguments.quiet, job)
        latest = {label: engine.rounds[-1] for label, engine in runs.items()}
        shown = [
            f"{label} {', '.join(f'{run[rate]:.1f}' for rate in rates)}{'*' * run['disturbed']}"
            for label, run in latest.items()
            if run is not None
        ]
        print(f"{model.stem}, round {number + 1}:", "; ".join(shown), file=sys.stderr)
    dense = [label for label in ("all", *engines.peers) if label in runs]
    return {
        "engines": {label: run.summary(tuple(rates)) | own_fields(run) for label, run in runs.items()},
        "ratio": {
            label: {
                base: {rate: programs.ratios(run, runs[base], rate) for rate in rates}
                for base in dense
                if base != label
            }
            for label, run in runs.items()
            if label in engines.settings
        },
    }


def own_fields(run: programs.Runs) -> dict[str, Any]:
    """What our own bench says beside the rate, of its last run; of the layers only what differs among them."""
    done = [entry for entry in run.rounds if entry is not None]
    if not done or "bytes_per_token" not in done[-1]:
        return {}
    result = {"bytes_per_token": done[-1]["bytes_per_token"]}
    if sparsity := done[-1].get("sparsity"):
        layers = sparsity.get("layers", [])
        result["sparsity"] = {name: value for name, value in sparsity.items() if name != "layers"}
        result["ways"] = [layer.get("ways") for layer in layers]
    return result
