"""Measure models of the Nemotron-H kind, whose neurons are mostly silent, with selectors, beside llama.cpp.

    python -m benchmarks.sparse.silent --models FOLDER --peer [LABEL=]FOLDER_OF_BINARIES

Writes each model of MODELS (random weights, a published shape cut in blocks, 90.7 % of its neurons silent; see
models/silent_models.py), and measures prompts and decoding in rounds, every engine once a round, in an order that
rotates, as speed/compare.py does. Engines: this one with its selectors `all`, `exact` and `predicted` forced, and
llama.cpp, which computes all neurons. FOLDER holds one model at a time, unless --keep.

Writes one JSON, after each model; table.py turns the newest figures into the table of docs/selectors.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, programs, results
from benchmarks.models import prepared, silent_models
from benchmarks.sparse import rounds

MODELS = {
    "nemotron-3-nano-30b-a3b": (9, ("q5_0", "q8_0", "q4_0")),
    "nemotron-nano-9b-v2": (16, ("q5_0",)),
}
"""Published shape -> its first blocks, in which every kind has about its share; the types."""
VOCAB = 20_000
"""Tokens in the table: the head of a model of few blocks would be most of its bytes."""
ENGINES = {"all": ["--selector", "all"]} | {
    name: ["--selector", name, "--no-trial"] for name in ("exact", "predicted")
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where the models are written")
    programs.add_arguments(parser, retries=1)
    parser.add_argument("--shapes", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--types", nargs="+", help="default: those of each shape")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=tuple(ENGINES))
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the models")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/silent-DATE.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    peers = programs.peers(arguments)
    settings = {name: ENGINES[name] for name in arguments.engines}
    own = arguments.powerinfer.split()
    engines = programs.Engines(own, peers, arguments.prompt_tokens, arguments.gen_tokens, settings)
    document: dict[str, Any] = {"kind": "silent", **machine.description(), "vocab": VOCAB}
    for name in ("threads", "gen_tokens", "prompt_tokens"):
        document[name] = getattr(arguments, name)
    document["peers"] = {label: programs.peer_facts(folder) for label, folder in peers.items()}
    machine.wait_until_quiet(arguments.quiet)
    document["read_bandwidth_gb_s"] = programs.bandwidth([arguments.threads])
    document["silent"] = []
    out = arguments.out or results.path_of(document)
    arguments.models.mkdir(parents=True, exist_ok=True)
    for shape in arguments.shapes:
        layers, kinds = MODELS[shape]
        for kind in arguments.types or kinds:
            model = arguments.models / f"{shape}-{layers}-{kind}.gguf"
            sizes, silent = silent_models.cut(shape, layers, VOCAB), [silent_models.SILENT]
            if not model.exists():
                silent_models.write(model, sizes, kind, silent)
            prepared.prepare_silent(model, sizes, silent)
            figures = rounds.measure(engines, model, arguments, programs.RATES)
            entry = {"model": shape, "layers": layers, "type": kind.upper(), "file_bytes": model.stat().st_size}
            document["silent"].append(entry | figures)
            results.write_json(out, document)  # after every model: an interrupted session keeps what it has
            if not arguments.keep:
                prepared.remove(model)


if __name__ == "__main__":
    main()
