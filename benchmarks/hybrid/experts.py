"""Decode a model of experts beside cards of 8, 12 and 24 GiB; llama.cpp with CUDA beside it.

    python -m benchmarks.hybrid.experts --models FOLDER [--peer FOLDER_OF_BINARIES] [--out FILE]
    python -m benchmarks.hybrid.experts --models FOLDER --gpu cpu --tiny               tries it without a GPU

The model has random weights in the shape of Qwen3-30B-A3B, of Q4_0, cut to a third of its layers (--layers). So are
the cards, but for what layers share (`worker.part_of`), and none gets more than the model takes: all of it fits into
24 GiB.
Before anything is timed its logits of a text are compared with the CPU's; a model that gives others is an error.
llama.cpp then gets, within the same budget, the experts of as many layers on the GPU as fit (-ncmoe) and, where its
build has that, a cache of experts (--moe-cache-mib), by three tries at most, which read the GPU's memory in use.
Every job is written down when it is done, and started again with the same --out, what is done is not done again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hybrid import compare, step_times, worker
from benchmarks.lib import results
from benchmarks.lib.jobs import Result
from benchmarks.models import expert_models
from powerinfer import LLM
from powerinfer.config import AttentionConfig, EngineConfig, ExpertsConfig, ModelConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hardware import measure
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import needs
from powerinfer.kernels import cpu
from powerinfer.placement.budget import Division, Workload, on_gpu
from powerinfer.placement.shapes import checkpoint_model
from powerinfer.sizes import read_size

SHAPE, LAYERS = "qwen3-30b-a3b", 16
CARDS = (8, 12, 24)  # GiB
BATCHES = (1, 8, 32)
FURTHEST = 0.05
"""How far the logits of a token may be from the CPU's, as a share of their size, in the median over tokens: where the
CPU rounds activations to 8 bits they differ by a per cent or two. A token for which two experts are nearly equal may
select the other, and be farther."""


@dataclass(kw_only=True)
class Measurement(compare.LocalMeasurement):
    """What is measured."""

    @property
    def model(self) -> Path:
        return Path(self.arguments.models / f"{SHAPE}-{'tiny' if self.arguments.tiny else self.arguments.layers}.gguf")

    @property
    def engine(self) -> dict[str, Any]:
        """Of every load: room for the most requests, and nothing chosen by a trial."""
        tokens = worker.context_of(max(BATCHES), self.arguments.tokens)
        given = {"threads": self.arguments.threads, "context": tokens, "max_batch": max(BATCHES), "trial": False}
        return {**given, "prefix_cache": False, "ram": self.arguments.ram}


def shape(tiny: bool, layers: int = LAYERS) -> ModelConfig:
    """The model's, cut."""
    config = expert_models.CONFIGS[SHAPE]
    if not tiny:
        return replace(config, layers=config.layers[:layers])
    layer = config.layers[0]
    assert isinstance(layer.attention, AttentionConfig) and isinstance(layer.ffn, ExpertsConfig)
    rope = layer.attention.rope and replace(layer.attention.rope, dim=32)
    attention = replace(layer.attention, n_heads=2, n_kv_heads=1, head_dim=32, rope=rope)
    layer = replace(layer, attention=attention, ffn=replace(layer.ffn, n_experts=16, size=32))
    return replace(config, d_model=64, vocab_size=1200, layers=(layer,) * 2)


def make(measurement: Measurement) -> Result:
    """The model's file."""
    config = shape(measurement.arguments.tiny, measurement.arguments.layers)
    if not measurement.model.exists():
        threads, _ = cpu.choose_threads(measurement.arguments.threads)
        weights = expert_models.Weights("q4_0", distinct=measurement.arguments.distinct)
        expert_models.write(measurement.model, config, weights, threads)
    return {"file_bytes": measurement.model.stat().st_size, "layers": config.n_layers}


def reference(measurement: Measurement) -> Result:
    """The text's logits on the CPU alone."""
    with LLM(measurement.model, gpu="none", **measurement.engine) as llm:
        np.savez(reference_of(measurement.model), **worker.logits_of(llm, max(BATCHES)))
    return {}


def reference_of(model: Path) -> Path:
    return model.with_suffix(".logits.npz")


def budget_of(measurement: Measurement, card: int) -> int:
    """Bytes of a card's memory that the layers that there are get; at the tiny scale a share of what there is."""
    checkpoint = open_checkpoint(measurement.model)
    engine = EngineConfig(**measurement.engine, gpu=measurement.arguments.gpu)
    model, whole = checkpoint_model(checkpoint), needs(resolve(checkpoint, engine)).vram
    if measurement.arguments.tiny:
        experts = sum(one.n_experts for one in checkpoint.config.experts.values())
        return whole - int((1 - card / max(CARDS)) * experts) * model.expert_bytes(0)[0]
    work = Workload(engine.kv_type, engine.context or 0, engine.chunk, engine.max_batch, selector="all")
    hardware = measure.measured(engine, gpu=engine.gpu)
    held = on_gpu(model, hardware, work, Division(checkpoint.config.n_layers, True), dense=True)
    fixed = sum(held[name] for name in ("head", "runtime", "scratch"))
    part = checkpoint.config.n_layers / expert_models.CONFIGS[SHAPE].n_layers
    return min(whole, worker.part_of(card << 30, fixed, part))


def key_of(card: int) -> str:
    """Of the job of `ours`."""
    return f"experts/{card}/powerinfer"


def ours(measurement: Measurement, card: int) -> Result:
    """Tokens per second by the number of requests, with as many experts on the GPU as the card holds."""
    arguments, vram = measurement.arguments, budget_of(measurement, card)
    with (
        compare.Vram(arguments.gpu, measurement.before) as used,
        LLM(measurement.model, **measurement.engine, gpu=arguments.gpu, vram=vram) as llm,
    ):
        with np.load(reference_of(measurement.model)) as wanted:
            off = {of: checked(logits, wanted[of]) for of, logits in worker.logits_of(llm, max(BATCHES)).items()}
        rates = {str(batch): worker.decoded(llm, batch, worker.tokens_of(batch, arguments.tokens)) for batch in BATCHES}
        told = llm.sparsity or {}
        result: Result = {"vram": vram, "off": off, "decode_tok_s": {batch: rate for batch, (rate, _) in rates.items()}}
        result |= {name: told.get(name) for name in ("gpu_share", "jobs")} | {"choices": dict(llm.choices)}
        measurement.note(key_of(card), result)  # before a profiler runs
        result["step"] = step_times.times(llm, arguments.gpu, arguments.tokens)
    return result | {"vram_used": used.peak}


def checked(logits: np.ndarray, wanted: np.ndarray) -> float:
    """How far logits [n, vocab] are from the CPU's. RuntimeError where that is too far for the same model."""
    each = [worker.apart(one, other) for one, other in zip(logits, wanted, strict=True)]
    off = float(np.median(each))
    if not off <= FURTHEST:
        raise RuntimeError(f"not timed: logits are off by {off:.3g} of the CPU's, more than {FURTHEST}")
    return off


def theirs(measurement: Measurement, card: int, way: str) -> Result:
    """llama.cpp with as many experts on the GPU as the budget of `ours` holds. way: ncmoe or cache."""
    peer, model = measurement.peer, measurement.model
    threads, _ = cpu.choose_threads(measurement.arguments.threads)
    budget = measurement.done[key_of(card)].get("vram")
    if peer is None or budget is None:
        raise RuntimeError("there is no budget of ours to compare with")
    layers = int(measurement.done["make"]["layers"])
    if way == "cache":
        limit = compare.cached_limit(peer, model, layers, budget, threads)
    else:
        limit = compare.limit(peer, model, way, layers, budget, model.stat().st_size // (layers + 1), threads)
    return limit | peer.measure(model, limit, list(BATCHES), measurement.arguments.tokens)


def jobs(measurement: Measurement) -> Iterator[tuple[str, Callable[[], Result]]]:
    """(key, work): this engine with every card, then the peer in each of its ways."""
    cards = measurement.arguments.cards
    for card in cards:
        yield key_of(card), lambda card=card: ours(measurement, card)
    if measurement.peer is None:
        return
    ways = ("ncmoe", "cache") if measurement.peer.knows(compare.CACHE_FLAG) else ("ncmoe",)
    for card, way in itertools.product(cards, ways):
        key = f"experts/{card}/{compare.LLAMA_CPP}-{way}"
        yield key, lambda card=card, way=way: theirs(measurement, card, way)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where the model is made")
    parser.add_argument("--gpu", default="cuda", help="cuda, cuda:1, or cpu, which stands in (default %(default)s)")
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="of llama.cpp's binaries, built with CUDA")
    parser.add_argument("--ram", type=read_size, metavar="SIZE", help="RAM that there is, where it grows with use")
    parser.add_argument("--threads", type=int, default=0, help="of both; 0: ours by itself, the peer's every core")
    parser.add_argument("--cards", type=int, nargs="+", choices=CARDS, default=CARDS, help="GiB; default: all")
    parser.add_argument("--tokens", type=int, default=64, help="decoded by one request alone")
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help="of 48; default: %(default)s")
    parser.add_argument("--distinct", type=int, default=0, metavar="N", help="layers that differ; 0: all (default)")
    parser.add_argument("--make", action="store_true", help="make the model, nothing else")
    parser.add_argument("--tiny", action="store_true", help="a small model of the same kind")
    parser.add_argument("--out", type=Path, default=results.RESULTS / "hybrid-experts.json")
    arguments = parser.parse_args(argv)
    settings = {
        name: getattr(arguments, name) for name in ("gpu", "threads", "tokens", "tiny", "layers", "distinct", "ram")
    }
    measurement = compare.begin(Measurement, arguments, "hybrid-experts", settings)
    with worker.hardware_of(arguments.gpu, arguments.ram):
        if measurement.wanted("make") or not measurement.model.exists():
            measurement.do("make", lambda: make(measurement))
        if arguments.make:
            return int("error" in measurement.done["make"])
        if measurement.wanted("reference") or not reference_of(measurement.model).exists():
            measurement.do("reference", lambda: reference(measurement))
        for key, work in jobs(measurement):
            if measurement.wanted(key):
                measurement.do(key, work)
    return int(any("error" in job for job in measurement.done.values()))


if __name__ == "__main__":
    sys.exit(main())
