"""Time the expert part of a step alone, as a CPU beside a GPU has it: the selected experts of a token, whole, and
with what does not fire left out.

    python -m benchmarks.models.silent_models M.gguf --shape nemotron-3-nano-30b-a3b --layers 6 --type q5_0 --predictor
    python -m benchmarks.sparse.expert_time M.gguf [--threads 2] [--layers 2] [--steps 64] [--out FILE]

The model needs predictors for `predicted`. Its text is random tokens, decoded one at a time; each layer's input and
what its router selects are taken from there. RAM holds the experts of --layers layers once for each way: 3 x 0.9 GB a
layer of Nemotron 3 Nano in Q5_0. Every step is summed in each way in turn. Router, shared expert and norms are the
GPU's.

Prints one JSON document: seconds of a token over these layers, medians over the steps; `ratio`: those of `all` by
those of another way, the median of the ratios within a step; of the neurons the shares that are computed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import machine, results
from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor, ExpertSum
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.predictor_file import open_predictor
from powerinfer.formats.tensors import RawTensor
from powerinfer.models import load

WAYS = ("all", "exact", "predicted")
PAGE = 32


@dataclass
class Inputs:
    """What experts got, by layer and token (`ExpertObserver`): x float32 [1, d_model] before the norm, and the experts
    that were selected, int32 [1, experts of a token]."""

    x: dict[int, list[NDArray[np.float32]]] = field(default_factory=dict)
    selected: dict[int, list[NDArray[np.int32]]] = field(default_factory=dict)

    def reads(self, layer: int, x: NDArray[np.float32]) -> None:
        self.x.setdefault(layer, []).append(x.copy())

    def fires(self, layer: int, selected: NDArray[np.int32], active: NDArray[np.uint8]) -> None:
        self.selected.setdefault(layer, []).append(selected.copy())


def decoded(checkpoint: Checkpoint, engine: EngineConfig, steps: int) -> Inputs:
    """What the experts of a model get of random tokens of one sequence."""
    executor, inputs = load(checkpoint, engine), Inputs()
    tokens = np.random.default_rng(5).integers(0, executor.vocab_size, steps).astype(np.int32)
    pages = np.arange(executor.n_pages, dtype=np.int32)[None]
    first, nothing = np.zeros(1, np.int32), np.empty(0, np.int32)
    with executor.observed_experts(inputs):
        for step in range(steps):
            at = np.full(1, step, np.int32)
            executor.forward(Batch(tokens[at], at, first, pages, nothing))
    executor.close()
    return inputs


def sums_of(checkpoint: Checkpoint, executor: CpuExecutor, layers: list[int]) -> dict[str, list[ExpertSum]]:
    """All experts of some layers, in each way that there is."""
    file = open_predictor(checkpoint) if Path(f"{checkpoint.path}.powerinfer/predictor.safetensors").exists() else None
    sums: dict[str, list[ExpertSum]] = {}
    for way in WAYS if file is not None else WAYS[:-1]:
        executor.in_experts = way != "all"
        for layer in layers:
            config, predicted = checkpoint.config.experts[layer], None
            if way == "predicted":
                assert file is not None
                own, n = file.layers[layer], config.n_experts * config.size
                outer = RawTensor(own.outer.type, (n, own.outer.shape[1]), own.outer.rows()[:n].reshape(-1))
                predicted = (own.predictor, own.inner, outer), checkpoint.take(f"layers.{layer}.ffn_norm").float32()
            experts = (checkpoint.take(f"layers.{layer}.experts_{part}") for part in config.matrices)
            sums.setdefault(way, []).append(executor.expert_sum(layer, experts, predicted=predicted))
            checkpoint.release()
    return sums


def measure(model: Path, threads: int, layers: int, steps: int) -> dict[str, Any]:
    checkpoint = open_checkpoint(model)
    pages = -(-steps // PAGE)
    engine = EngineConfig(threads=threads, context=PAGE * pages, max_batch=1, prefill_chunk=PAGE, recall_every=0)
    some = list(checkpoint.config.experts)[:layers]
    inputs = decoded(checkpoint, engine, steps)
    executor = CpuExecutor(checkpoint.config, engine, {}, pages=pages)
    sums = sums_of(checkpoint, executor, some)
    ways, seconds = list(sums), {way: np.zeros(steps) for way in sums}
    norms = [checkpoint.take(f"layers.{layer}.ffn_norm").float32() for layer in some]
    for step in range(steps):
        x = [inputs.x[layer][step] for layer in some]
        normed = [
            (row / np.sqrt(np.square(row).mean() + checkpoint.config.norm_eps) * norm).astype(np.float32)
            for row, norm in zip(x, norms, strict=True)
        ]
        for turn in range(len(ways)):
            way = ways[(step + turn) % len(ways)]
            given, out = x if way == "predicted" else normed, np.empty_like(x[0])
            begin = perf_counter()
            for own, row, layer in zip(sums[way], given, some, strict=True):
                selected = inputs.selected[layer][step]
                own.sum(row, selected, np.full(selected.shape, 1 / selected.size, np.float32), out)
            seconds[way][step] = perf_counter() - begin
    found = {
        "seconds": {way: median(own[1:]) for way, own in seconds.items()},
        "ratio": {way: median(seconds["all"][1:] / own[1:]) for way, own in seconds.items() if way != "all"},
        "computed": {way: shares(own, checkpoint, some) for way, own in sums.items() if way != "all"},
    }
    executor.close()
    return {"model": model.name, "layers": some, "threads": threads, "steps": steps} | found


def shares(sums: list[ExpertSum], checkpoint: Checkpoint, layers: list[int]) -> dict[str, float]:
    """Shares of the neurons of the selected experts: active, and candidates, of which the first product is computed or
    known to fire."""
    counts = [own.op.counts() for own in sums]
    experts = [checkpoint.config.experts[layer] for layer in layers]
    neurons = sum(own["tokens"] * one.router.top_k * one.size for own, one in zip(counts, experts, strict=True))
    return {name: sum(own[name] for own in counts) / neurons for name in ("active", "candidates")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2, help="layers with experts, from the first on (default 2)")
    parser.add_argument("--steps", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds to wait for other programs (default 60)")
    parser.add_argument("--out", type=Path, help="also a file")
    arguments = parser.parse_args()
    machine.wait_until_quiet(arguments.quiet)
    document = {"kind": "expert-time", **machine.description()}
    document |= measure(arguments.model, arguments.threads, arguments.layers, arguments.steps)
    if arguments.out is not None:
        results.write_json(arguments.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
