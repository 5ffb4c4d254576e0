"""Time the FFN operator alone: all layers' FFNs of a decode step, each way in turn, on random tokens.

    python -m benchmarks.sparse.ffn_time MODEL [--threads N] [--steps 64]      prints one JSON document

The model needs bundles and a predictor. Seconds of one token over all layers, medians over the steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from powerinfer import LLM
from powerinfer.devices.batch import Batch

WAYS = ("dense", "exact", "predicted")
CONTEXT = 1024


def measure(model: Path, threads: int, steps: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    options: dict[str, Any] = {"threads": threads, "context": CONTEXT, "max_batch": 1, "recall_every": 0}
    with LLM(model, selector="predicted", trial=False, **options) as llm:
        executor: Any = llm._executor
        tokens = np.random.default_rng(5).integers(0, llm.config.vocab_size, CONTEXT).astype(np.int32)
        pages = np.arange(CONTEXT // executor.page_size, dtype=np.int32)[None]
        first, nothing = np.zeros(1, np.int32), np.empty(0, np.int32)
        with executor.timed():
            for step in range(len(WAYS) * (steps + 1)):
                way = WAYS[step % len(WAYS)]
                for layer in range(llm.config.n_layers):
                    executor.ffns[layer].set_ways({1: way})
                at = np.full(1, step % CONTEXT, np.int32)
                executor.forward(Batch(tokens[at], at, first, pages, nothing))
                seconds[way].append(sum(executor.ffn_seconds()))
    return {way: median(values[1:]) for way, values in seconds.items()} | {"steps": steps, "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=64, help="of each way (default 64)")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.model, arguments.threads, arguments.steps)))


if __name__ == "__main__":
    main()
