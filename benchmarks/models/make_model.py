"""Make a model with random weights whose neurons fire as often as wanted, for measurements of speed and memory.

    python -m benchmarks.models.make_model OUT --family llama --shape 1b --active 0.10 --predictor-rank 512
    python -m benchmarks.models.make_model OUT --family opt --format hf --profile opt-30b
    python -m benchmarks.models.make_model --measure MODEL [--tokens 512]

Random weights say nothing about quality; the work they make is that of real ones. OUT is a GGUF file or a Hugging
Face folder, OUT.powerinfer the folder of its predictor. A model that exists already is kept, so the same flags with
--predictor-rank give a predictor to what llama-quantize made of one.

How often a neuron fires. Neuron i of a layer fires with probability p_i for a token, p_i from a power law over the
neurons' ranks: p(q) = min(0.9999, a * q ** -skew), q from 0 to 1, with `a` such that the mean is --active. Which
neuron has which rank is drawn for every layer separately. With --layer-ratio R the mean grows geometrically, R-fold,
from the first layer to the last. Whether a neuron fires depends on the token; the busy neurons are the same ones for
all. How that is built into the weights: see weights.py.

Profiles, and what they are to look like (the shares of neurons that carry 80 % of all activations):

    --profile    mean active   skew   layer ratio   of a layer      of the model      as in the paper
    opt-30b      3 %           0.99   74            26 %            17 % (48 layers)  26 %, 17 %
    reglu-70b    18 %          0.93   64            43 %            26 % (80 layers)  43 %, 26 %
    drelu        10 %          1.00   1             38 %            38 %              none; 90 % sparsity

For opt-30b and reglu-70b skew and ratio were solved for from the paper's two shares, that of a layer taken as the
mean over the layers; both come out at an exponent of about 1, Zipf's law, which is therefore the default. For drelu
the paper gives no share. --active alone, without a profile, makes all layers alike.

The predictor. The noise that makes a neuron fire lies in --noise-rank directions, known to the predictor, but for a
share --rest of its variance, which is not. So the predictor must miss some: it is set to select --recall of the firings
and selects more neurons than fire. dReLU: gate and up share the known noise, and p_i is the probability that both fire.

--measure runs a plain forward pass over random tokens and prints what really fires. It works for all models of this
script in any type, so also for what llama-quantize makes of them. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import activity, writers
from benchmarks.models.weights import ACTIVATIONS, Plan, Weights, shapes
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.predictor_file import write_predictor
from powerinfer.neurons import Predictor, Profile

SHAPES: dict[str, dict[str, int]] = {
    "1b": {},  # the defaults of Plan: the random model of speed_models.py
    "100m": {"d_model": 768, "d_ff": 3072, "n_layers": 12, "n_heads": 12, "n_kv_heads": 4, "vocab": 16000},
    "tiny": {
        "d_model": 128,
        "d_ff": 512,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab": 1024,
        "context": 512,
        "noise_rank": 48,
    },
}
PROFILES: dict[str, dict[str, float]] = {
    "opt-30b": {"active": 0.03, "skew": 0.99, "layer_ratio": 74},
    "reglu-70b": {"active": 0.18, "skew": 0.93, "layer_ratio": 64},
    "drelu": {"active": 0.10, "skew": 1.0, "layer_ratio": 1},
}
# flag -> (field of Plan, type, help)
NUMBERS: dict[str, tuple[str, type, str]] = {
    "--d-model": ("d_model", int, "width"),
    "--d-ff": ("d_ff", int, "neurons of a layer"),
    "--layers": ("n_layers", int, "layers"),
    "--heads": ("n_heads", int, "attention heads"),
    "--kv-heads": ("n_kv_heads", int, "key-value heads; 1 makes a Falcon like Falcon-7B, more one like Falcon-40B"),
    "--vocab": ("vocab", int, "tokens, 1000 at least"),
    "--context": ("context", int, "longest context"),
    "--active": ("active", float, "mean fraction of neurons that fire"),
    "--skew": ("skew", float, "exponent of the power law; 0: all neurons alike"),
    "--layer-ratio": ("layer_ratio", float, "mean of the last layer by that of the first"),
    "--noise-rank": ("noise_rank", int, "directions that firing depends on"),
    "--rest": ("rest", float, "share of the noise that no predictor knows"),
    "--recall": ("recall", float, "what the predictor is set to"),
    "--distinct": ("distinct", int, "layers that differ, the others are as one of these, which saves time; 0: all do"),
    "--fatrelu-threshold": ("offset", float, "of --activation fatrelu, there 0.01"),
    "--seed": ("seed", int, "of all random numbers; the same seed gives the same bytes"),
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("out", nargs="?", type=Path, metavar="OUT", help="file or folder to make")
    result.add_argument("--measure", type=Path, metavar="MODEL", help="measure this model instead of making one")
    result.add_argument("--tokens", type=int, metavar="N", help="measure on N tokens (default 512; 0 after making)")
    result.add_argument("--json", action="store_true", help="print the measurement as JSON")
    result.add_argument("--family", choices=tuple(ACTIVATIONS), default="llama")
    result.add_argument("--format", choices=("gguf", "hf"), default="gguf")
    result.add_argument("--type", choices=tuple(writers.TYPES), default="f16", help="of the matrices")
    result.add_argument("--shape", choices=tuple(SHAPES), default="1b", help="sizes that are not given one by one")
    result.add_argument("--activation", choices=ACTIVATIONS["llama"], default="relu")
    result.add_argument("--profile", choices=tuple(PROFILES), help="statistics that are not given one by one")
    result.add_argument("--predictor-rank", type=int, default=0, metavar="R", help="write a predictor of rank R too")
    result.add_argument("--predictor-type", choices=("q8_0", "f16"), default="q8_0", help="of the predictor's weights")
    for flag, (name, kind, text) in NUMBERS.items():
        default = f" (default {getattr(Plan, name)})"
        result.add_argument(flag, dest=name, type=kind, default=None, metavar="N", help=text + default)
    return result


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the flags describe; ValueError if it cannot be."""
    values: dict[str, Any] = {"family": arguments.family, "activation": arguments.activation}
    values |= SHAPES[arguments.shape]
    if arguments.profile:
        values |= PROFILES[arguments.profile]
    if arguments.activation == "fatrelu":
        values["offset"] = 0.01  # as ProSparse's models have
    given = {name: getattr(arguments, name) for name, _, _ in NUMBERS.values()}
    given = {name: value for name, value in given.items() if value is not None}
    if "offset" in given and arguments.activation != "fatrelu":
        raise ValueError("--fatrelu-threshold goes with --activation fatrelu")
    if arguments.family == "opt" and "n_kv_heads" not in given:
        given["n_kv_heads"] = given.get("n_heads", values.get("n_heads", Plan.n_heads))
    if arguments.predictor_rank and "noise_rank" not in given:
        values["noise_rank"] = min(values.get("noise_rank", Plan.noise_rank), (arguments.predictor_rank - 1) // 2)
    return Plan(**values | given)


def make(out: Path, plan: Plan, form: str, kind: str, threads: int = 1) -> None:
    """Write the model, unless it is there. threads: that compute its weights, of a GGUF file."""
    if out.exists():
        print(f"{out} exists already: kept", file=sys.stderr)
        return
    if kind == "q4_0" and (form != "gguf" or plan.d_model % 32 or plan.d_ff % 32):
        raise ValueError("Q4_0 goes into GGUF files, and needs widths in multiples of 32")
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if form == "gguf":
        writers.write_gguf(out, plan, kind, Progress(plan.n_layers), threads)
    else:
        writers.write_folder(out, plan, kind, Progress(plan.n_layers))
    print(f"\r{out}: {time.monotonic() - start:.0f} s        ", file=sys.stderr)


def make_predictor(model: Path, plan: Plan, rank: int, kind: str = "q8_0") -> Path:
    """Write the predictor of a model that was made from the plan, in whatever type it now is; the file's path.

    ValueError if the rank is too small for the plan, or not whole blocks of Q8_0.
    """
    if kind == "q8_0" and (rank % 32 or plan.d_model % 32):
        raise ValueError(f"a predictor in Q8_0 needs rank and width in multiples of 32, not {rank} and {plan.d_model}")
    weights = Weights(plan)
    weights.predictor(0, rank)  # refuses before a file is begun
    layers = (weights.predictor(layer, rank) for layer in range(plan.n_layers))
    described = [Predictor(rank, 0.0, 0)] * plan.n_layers
    return write_predictor(open_checkpoint(model), None, kind.upper(), described, layers, _known_reach(plan, rank))


def _known_reach(plan: Plan, rank: int) -> dict[str, Any]:
    """What predictors reach by the plan's own arithmetic, as `train` would describe it; weights by the model's."""
    weights, layers = Weights(plan), []
    for number in range(plan.n_layers):
        p = weights.layer(number).probabilities
        fires, named = float(p.mean()), float(plan.firing.candidates(p).mean())
        reach = {"recall": plan.recall, "candidate_fraction": named}
        first = {f"svd_{name}": value for name, value in reach.items()}  # nothing was there before it
        precision = min(1.0, plan.recall * fires / named)  # above 1 by rounding alone
        told = {"rank": rank, "method": "known", "active_fraction": fires, "precision": precision}
        layers.append(told | reach | first)
    whole = sum(math.prod(shape) for _, shape in shapes(plan))
    share = min(1.0, plan.n_layers * rank * (plan.d_model + plan.d_ff) / whole)
    return {"recall_target": plan.recall, "share_of_model": share, "held_out_tokens": 0, "layers": layers}


def known_profile(plan: Plan, tokens: int = 1_000_000) -> Profile:
    """What a profile of `tokens` tokens would count on average: nothing is run, the plan says how often neurons fire.

    Tokens are taken as independent of each other, and of each the mean fraction of a layer's neurons fires.
    """
    weights, counts, active, reuse = Weights(plan), [], [], []
    for number in range(plan.n_layers):
        p = weights.layer(number).probabilities
        counts.append(np.rint(p * tokens).astype(np.int64))
        active.append(np.zeros(101, np.int64))
        active[-1][int(100 * p.mean())] = tokens
        reuse.append(float((p * p).sum() / p.sum()))
    each = tuple(layer[None] for layer in counts)
    return Profile(tokens, tuple(counts), ("known",), (tokens,), each, tuple(active), tuple(reuse), None)


class Progress:
    """One line on stderr that says which layer is being written."""

    def __init__(self, n_layers: int) -> None:
        self.n_layers, self.layer = n_layers, ""

    def __call__(self, tensor: str) -> None:
        layer = tensor.split(".")[1] if tensor.startswith("layers.") else ""
        if layer != self.layer and layer:
            print(f"\rlayer {int(layer) + 1} of {self.n_layers}", end="", file=sys.stderr, flush=True)
        self.layer = layer


def random_tokens(count: int, vocab: int, length: int = 128) -> np.ndarray:
    """Sequences of at most `length` random tokens, [sequences, length], `count` in all or a few more."""
    length = min(length, count)
    return np.random.default_rng(7).integers(0, vocab, (-(-count // length), length))


def chosen_statistics(plan: Plan) -> dict[str, Any]:
    """What the plan asks for, under the names of the measurement."""
    weights = Weights(plan)
    p = np.stack([weights.layer(number).probabilities for number in range(plan.n_layers)])
    return {
        "active_fraction": float(p.mean()),
        "layers": p.mean(axis=1).tolist(),
        "hot_share_of_layer": [activity.hot_share(layer) for layer in p],
        "hot_share_of_model": activity.hot_share(p),
    }


def chosen(plan: Plan) -> str:
    """The same in words."""
    values, percent = chosen_statistics(plan), activity.percent
    means = values["layers"]
    return "\n".join(
        [
            f"chosen: mean active {percent(values['active_fraction'])}, "
            f"layers {percent(min(means))} to {percent(max(means))}",
            f"80 % of activations by {percent(float(np.mean(values['hot_share_of_layer'])))} of a layer's neurons, "
            f"{percent(values['hot_share_of_model'])} of the whole model's",
        ]
    )


def main() -> None:
    arguments = parser().parse_args()
    if (arguments.out is None) == (arguments.measure is None):
        parser().error("give either OUT or --measure MODEL")
    tokens = arguments.tokens
    if arguments.out:
        try:
            plan = plan_of(arguments)
            make(arguments.out, plan, arguments.format, arguments.type)
            if arguments.predictor_rank:
                make_predictor(arguments.out, plan, arguments.predictor_rank, arguments.predictor_type)
        except ValueError as error:
            parser().error(str(error))
        print(chosen(plan))
    elif tokens is None:
        tokens = 512
    if tokens:
        path = arguments.out or arguments.measure
        vocab = open_checkpoint(path).config.vocab_size
        result = activity.measure(path, random_tokens(tokens, vocab))
        print(json.dumps(result.document()) if arguments.json else result.report())


if __name__ == "__main__":
    main()
