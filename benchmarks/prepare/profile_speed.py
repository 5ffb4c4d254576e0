"""How fast a model is profiled, beside plain prefill: the same windows in turn, unobserved and with all counted.

    python -m benchmarks.prepare.profile_speed MODEL ... [--rounds 7] [--tokens 200000] [--out FILE]

Profiling is what `powerinfer profile` does with a window of 512 tokens: every layer's counts, histograms, reuse, and
samples written to a file as for a text of --tokens tokens and 1 GiB; models whose activations are never exactly zero
are counted by a threshold. Medians over the rounds; the ratio is the median of the ratios within a round. Text: random
tokens. Saving what was counted, every 20 seconds, is timed apart. Writes a JSON document to benchmarks/results; with
--out, what an earlier run at the same commit found out about other models stays in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.lib.machine import description
from benchmarks.lib.results import path_of, write_json
from powerinfer.config import EngineConfig, ProfileConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.samples_file import row_bytes, write_samples
from powerinfer.models import load
from powerinfer.prepare.corpus import Windows
from powerinfer.prepare.counting import Saved, State, Tally, Task, run_windows
from powerinfer.system import Disturbance

WINDOW = 512


def measure(path: Path, rounds: int, tokens: int) -> dict[str, Any]:
    """Tokens a second, plain and profiled."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    executor = load(checkpoint, EngineConfig(context=WINDOW, max_batch=1, selector="all"))
    rng = np.random.default_rng(6)
    text = Windows(rng.integers(0, config.vocab_size, (rounds + 1, WINDOW), np.int32), ("random",), (rounds + 1,), "")
    rows = min(tokens, ProfileConfig.samples // row_bytes(checkpoint)) * text.tokens // tokens
    rectified = config.partly_rectified
    task = Task(text, max(1, rows), None if rectified else 0.01)
    thresholds = None if rectified else [0.05] * config.n_layers
    state = State(config, 1)
    taken: dict[str, list[float]] = {"plain": [], "profiled": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        write_samples(checkpoint, folder, task.rows, task.starts(), {}) as samples,
    ):
        tally = Tally(config, task, state, samples)
        for window in range(rounds + 1):
            begin = time.perf_counter()
            run_windows(executor, text.ids[window : window + 1])
            middle = time.perf_counter()
            with executor.observed(tally, thresholds):
                tally.look_at(executor, window, window + 1)
            taken["plain"].append(middle - begin)
            taken["profiled"].append(time.perf_counter() - middle)
        begin = time.perf_counter()
        samples.sync()
        Saved(checkpoint, folder, task).save(state)
        saving = time.perf_counter() - begin
    executor.close()
    plain, profiled = taken["plain"][1:], taken["profiled"][1:]  # the first warms up
    return {
        "model": path.name,
        "activation": config.activations,
        "active_fraction": float(state.counts.sum() / (text.tokens * config.n_neurons)),
        "rows_per_window": task.rows / (rounds + 1),
        "plain_tok_s": WINDOW / median(plain),
        "profiled_tok_s": WINDOW / median(profiled),
        "ratio": median(one / other for one, other in zip(plain, profiled, strict=True)),
        "ratios": [one / other for one, other in zip(plain, profiled, strict=True)],
        "save_s": saving,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=ProfileConfig.tokens)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = []
    for path in arguments.models:
        with Disturbance() as load_of_others:
            found.append(measure(path, arguments.rounds, arguments.tokens))
        found[-1] |= {"others_cores": load_of_others.other_cores, "disturbed": load_of_others.disturbed}
        one = found[-1]
        print(
            f"{one['model']}: plain {one['plain_tok_s']:.0f} tok/s, profiled {one['profiled_tok_s']:.0f}, "
            f"ratio {one['ratio']:.3f} ({min(one['ratios']):.3f} to {max(one['ratios']):.3f})"
        )
    about = description()
    out = arguments.out or path_of(about, "profile-speed")
    earlier = json.loads(out.read_text()) if out.exists() else {}
    if earlier.get("commit") == about["commit"]:
        found = [one for one in earlier["results"] if one["model"] not in {two["model"] for two in found}] + found
    write_json(out, {**about, "window": WINDOW, "results": found})


if __name__ == "__main__":
    main()
