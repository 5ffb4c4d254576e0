"""Make the models of disk/compare.py: random weights of about 3 GB each, in the shapes of published models.

    python -m benchmarks.models.disk_models FOLDER [--names dense relu experts silent] [--layers N]

dense     layers of Mistral-7B: SwiGLU, so every weight is read for every token
relu      layers of Bamboo-7B, dReLU: 10 % of the neurons fire, by a power law (make_model.py); with its profile,
          predictor and bundles, from what is known of the weights (prepared.py)
experts   layers of Qwen3-30B-A3B: 128 experts, 8 a token, used as unevenly as routing.py makes them (SKEW, LOCALITY);
          with a profile of their use over this repository's pages, and a trace of what another text selects
silent    blocks of Nemotron 3 Nano 30B-A3B: 128 experts without gates, 6 a token and a shared one, 9 % of whose neurons
          fire (silent_models.py); with predictors and the rows of its experts; 2 GB

All in Q4_0, `silent` in Q5_0. The same names give the same bytes; what exists is kept. --layers N: fewer layers, to try
things.
Experts: LRU with memory for an eighth and for a quarter of them hits about 60 and 80 % of what the trace selects
(docs/experts.md). Of a trained model with 512 experts, 10 a token, 67 and 81 % were reported (llama.cpp, pull request
27861).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.lib.machine import ROOT
from benchmarks.models import expert_models, make_model, prepared, silent_models
from benchmarks.models.weights import Plan
from powerinfer.cli.main import main as powerinfer
from powerinfer.config import ModelConfig
from powerinfer.placement.shapes import find_shape

LAYERS = {"dense": 22, "relu": 22, "experts": 8, "silent": 6}
VOCAB = 32000
STORED = "q4_0"
SKEW = LOCALITY = 0.6
PROFILED, TRACED = 8192, 4096  # tokens


def dense(layers: int) -> ModelConfig:
    """As the architecture in GGUF."""
    config = find_shape("mistral-7b").config
    return replace(config, architecture="llama", layers=config.layers[:layers])


def relu(layers: int) -> Plan:
    sizes = {"d_model": 4096, "d_ff": 14336, "n_heads": 32, "n_kv_heads": 8, "n_layers": layers, "vocab": VOCAB}
    return Plan(family="llama", activation="drelu", **sizes, **make_model.PROFILES["drelu"])


def experts(layers: int) -> ModelConfig:
    config = expert_models.CONFIGS["qwen3-30b-a3b"]
    return replace(config, vocab_size=VOCAB, layers=config.layers[:layers])


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.gguf"


def trace_of(model: Path) -> Path:
    """Where the trace of a model of experts is: what the tokens of a text select that its profile has not counted."""
    return model.with_suffix(".trace")


def prepared_files(model: Path) -> list[Path]:
    """The model's file, and those of what was prepared for it that are read while it runs."""
    return [model, *sorted(Path(f"{model}.powerinfer").glob("*.safetensors"))]


def make(folder: Path, name: str, threads: int, layers: int | None = None) -> Path:
    """A model with everything that it needs, unless it is there; its path."""
    path = path_of(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    _MAKERS[name](path, layers or LAYERS[name], threads)
    return path


def _dense(path: Path, layers: int, threads: int) -> None:
    if not path.exists():
        expert_models.write(path, dense(layers), expert_models.Weights(STORED))


def _relu(path: Path, layers: int, threads: int) -> None:
    prepared.prepare(path, relu(layers), STORED, threads)


def _experts(path: Path, layers: int, threads: int) -> None:
    if not path.exists():
        expert_models.write(path, experts(layers), expert_models.Weights(STORED, skew=SKEW, locality=LOCALITY), threads)
    profile = ["profile", "-m", str(path), "--samples", "0", "--threads", str(threads)]
    if not Path(f"{path}.powerinfer/experts.safetensors").exists():
        _run([*profile, "--corpus", str(ROOT / "docs"), "--tokens", str(PROFILED)])
    if not trace_of(path).exists():
        aside = path.with_suffix(".aside")  # the profile of the trace's own text is not the model's
        _run([*profile, "--prepared", str(aside), "--tokens", str(TRACED), "--trace", str(trace_of(path))])
        shutil.rmtree(aside)


def _silent(path: Path, layers: int, threads: int) -> None:
    if not path.exists():
        sizes = silent_models.cut("nemotron-3-nano-30b-a3b", layers, VOCAB)
        silent_models.write(path, sizes, "q5_0", [silent_models.SILENT])
        silent_models.write_predictors(path, sizes, [silent_models.SILENT])
    _run(["pack", "-m", str(path), "--threads", str(threads)])


def _run(command: list[str]) -> None:
    if powerinfer(command):
        raise RuntimeError(f"powerinfer {command[0]} failed")


_MAKERS: dict[str, Callable[[Path, int, int], None]] = {
    "dense": _dense, "relu": _relu, "experts": _experts, "silent": _silent,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("--names", nargs="+", choices=tuple(LAYERS), default=tuple(LAYERS), help="default: all")
    parser.add_argument("--layers", type=int, metavar="N", help="default: as many as take about 3 GB")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    for name in arguments.names:
        path = make(arguments.folder, name, arguments.threads, arguments.layers)
        print(f"{path}: {path.stat().st_size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
