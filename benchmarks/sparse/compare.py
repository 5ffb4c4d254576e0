"""Measure decoding with selectors against the dense path and against llama.cpp, by the fraction of neurons active.

    python -m benchmarks.sparse.compare --models FOLDER --llama-quantize PATH --peer [LABEL=]FOLDER_OF_BINARIES

For every fraction a random LLaMA of that mean activity is made (models/make_model.py), given a predictor and bundles,
and measured in F16 and, by llama-quantize, in Q4_0: --rounds rounds, in each every engine once, in an order that
rotates from round to round, as in speed/compare.py. Engines: this one with its selectors `all`, `exact` and `predicted`
forced (--no-trial), `predicted` with the trial that may fall back, and llama.cpp, which is dense. Then the FFN operator
alone (ffn_time.py). FOLDER holds one model at a time, about 5 GB, unless --keep.

Writes one JSON; table.py turns the newest figures into the table and the plot of the docs.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, programs, results
from benchmarks.models import make_model, prepared
from benchmarks.models.speed_models import requantize
from benchmarks.models.weights import Plan
from benchmarks.sparse import rounds

FRACTIONS = (0.02, 0.05, 0.10, 0.20, 0.50, 1.0)
TYPES = ("F16", "Q4_0")
RATE = "decode_tok_s"
ENGINES = {
    "all": ["--selector", "all"],
    "exact": ["--selector", "exact", "--no-trial"],
    "predicted": ["--selector", "predicted", "--no-trial"],
    "predicted-trial": ["--selector", "predicted"],
}


def model_path(folder: Path, fraction: float, kind: str) -> Path:
    return folder / f"sparse-{100 * fraction:g}-{kind}.gguf"


def prepare(model: Path, plan: Plan, own: list[str], arguments: argparse.Namespace) -> None:
    """The model's file, predictor and bundles."""
    kind = model.stem.rpartition("-")[2]
    full = model_path(arguments.models, plan.active, "F16")
    if not model.exists():
        make_model.make(full, plan, "gguf", "f16")
    if kind != "F16":
        requantize(arguments.llama_quantize, full, model, kind, os.cpu_count() or 1)
    make_model.make_predictor(model, plan, arguments.predictor_rank, arguments.predictor_type)
    programs.output([*own, "pack", "-m", str(model)])


def measure(engines: programs.Engines, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All engines on one model: their rates, and the ratios to the dense ones within a round."""
    figures = rounds.measure(engines, model, arguments, (RATE,))
    ratios = figures["ratio"].items()
    return figures | {"ratio": {label: {base: of[RATE] for base, of in bases.items()} for label, bases in ratios}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where the models are made")
    parser.add_argument("--llama-quantize", type=Path, help="the peer's binary; needed for types other than F16")
    programs.add_arguments(parser, retries=1)
    parser.add_argument("--shape", choices=tuple(make_model.SHAPES), default="1b")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS, help="default: %(default)s")
    parser.add_argument("--types", nargs="+", default=TYPES, help="default: %(default)s")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=tuple(ENGINES))
    parser.add_argument("--predictor-rank", type=int, default=512)
    parser.add_argument("--predictor-type", choices=("q8_0", "f16"), default="q8_0")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the models")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/sparse-DATE.json")
    arguments = parser.parse_args()
    if arguments.llama_quantize is None and set(arguments.types) != {"F16"}:
        parser.error("give --llama-quantize PATH, or --types F16")
    return arguments


def main() -> None:
    arguments = parse()
    peers = programs.peers(arguments)
    settings = {name: ENGINES[name] for name in arguments.engines}
    own = arguments.powerinfer.split()
    engines = programs.Engines(own, peers, 16, arguments.gen_tokens, settings, rates=(RATE,))
    document: dict[str, Any] = {"kind": "sparse", **machine.description()}
    for name in ("shape", "threads", "gen_tokens", "predictor_rank", "predictor_type"):
        document[name] = getattr(arguments, name)
    document["peers"] = {label: programs.peer_facts(folder) for label, folder in peers.items()}
    machine.wait_until_quiet(arguments.quiet)
    document["read_bandwidth_gb_s"] = programs.bandwidth([arguments.threads])
    document["sparse"] = []
    out = arguments.out or results.path_of(document)
    arguments.models.mkdir(parents=True, exist_ok=True)
    base = Plan(**make_model.SHAPES[arguments.shape])
    base = replace(base, noise_rank=min(base.noise_rank, (arguments.predictor_rank - 1) // 2))
    for fraction in arguments.fractions:
        for kind in arguments.types:
            model = model_path(arguments.models, fraction, kind)
            prepare(model, replace(base, active=fraction), own, arguments)
            result = measure(engines, model, arguments)
            machine.wait_until_quiet(arguments.quiet)
            result["ffn_seconds"] = programs.script_result("sparse.ffn_time", model, arguments.threads)
            document["sparse"].append({"active": fraction, "type": kind, "file_bytes": model.stat().st_size, **result})
            results.write_json(out, document)  # after every step: an interrupted session keeps what it has
            if not arguments.keep and kind != "F16":
                prepared.remove(model)
        if not arguments.keep:
            prepared.remove(model_path(arguments.models, fraction, "F16"))


if __name__ == "__main__":
    main()
