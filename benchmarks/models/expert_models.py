"""Make a model of experts (MoE) with random weights, in the shape of one that people run.

    python -m benchmarks.models.expert_models OUT.gguf --shape qwen3-30b-a3b --layers 8 --type q4_0
    python -m benchmarks.models.expert_models FOLDER --shape smallthinker-4b --layers 4

An OUT that does not end in .gguf is a Hugging Face folder, in F16; gpt-oss's experts are in MXFP4, as in published
folders. Its values are those of the GGUF file, before they are rounded.

Random weights say nothing about quality; the work they make is that of real ones: the router selects as many experts of
the same sizes, and about as many different ones for a batch, since its choices are independent of each other. With
--skew S some experts are selected more often, by a power law with that exponent, and with --locality L, from 0 to less
than 1, tokens tend to select what the tokens before them did: routing.py says how. `powerinfer profile` measures both.
Both apply to files and folders; --locality needs a first layer without a window (not gpt-oss and SmallThinker-21B).
--layers cuts the model, so that it fits small machines, and so does --vocab. Embedding and head are Q8_0 or as --head
says, norms and routers F32; with mxfp4 all but the experts is Q8_0, as in published files. --active gives the share of
neurons inside experts that fire for a token, of models whose activation can be zero. A file that exists is kept; for
other types give the Q8_0 file to llama-quantize.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.models import expert_folders, few_bits
from benchmarks.models.gguf_writer import Builder
from benchmarks.models.routing import Routing
from benchmarks.models.speed_models import Shape as Sizes
from benchmarks.models.vocabulary import gguf_fields
from benchmarks.models.weights import repeated
from powerinfer.config import (
    RECTIFIED,
    DeltaNetConfig,
    ExpertsConfig,
    GatedAttentionConfig,
    LatentAttentionConfig,
    ModelConfig,
    RopeConfig,
    Shape,
)
from powerinfer.formats.gguf_model import NAMES
from powerinfer.formats.layout import shapes
from powerinfer.placement.shapes import find_shape

SEED = 20241216
TYPES = ("q4_0", "q8_0", "mxfp4", "f16", *few_bits.TYPES)
SCORING = {"softmax": 1, "sigmoid": 2}
"""A router's rule -> `expert_gating_func`."""
PIECE = 1 << 24  # weights made at a time


# Of the name of a published shape the architecture in GGUF.
ARCHITECTURES = {
    "mixtral-8x7b": "llama",
    "olmoe-1b-7b": "olmoe",
    "qwen3-30b-a3b": "qwen3moe",
    "glm-4.5-air": "glm4moe",
    "smallthinker-4b": "smallthinker",
    "smallthinker-21b": "smallthinker",
    "qwen3-next-80b-a3b": "qwen3next",
    "qwen3.6-35b-a3b": "qwen35moe",
    "gpt-oss-20b": "gpt-oss",
}
ARCHITECTURES |= dict.fromkeys(("deepseek-v2-lite", "deepseek-v3", "kimi-k2"), "deepseek2")
CONTEXT = 4096
CONFIGS = {name: replace(find_shape(name).config, architecture=own, name="") for name, own in ARCHITECTURES.items()}


@dataclass(frozen=True)
class Weights:
    """kind, head: types of the layers' matrices, and of embedding and head; active: of the neurons of an expert, the
    share that fires, None: as it comes; skew, locality: of the routers, as of `Routing`; distinct: layers that differ,
    the others have the bytes of one of them, 0: all do."""

    kind: str
    head: str = "q8_0"
    active: float | None = None
    seed: int = SEED
    skew: float = 0.0
    locality: float = 0.0
    distinct: int = 0

    def routing(self, config: ModelConfig) -> Routing:
        """What makes the routers of a model so. ValueError where that cannot be."""
        if self.active is not None and (self.skew or self.locality):
            raise ValueError("--active cannot be combined with --skew or --locality")
        return Routing(config, self.skew, self.locality)


def source_layers(config: ModelConfig, about: Weights) -> list[int]:
    """Of each layer the one whose bytes it has: in turn those of the first ones that are alike. That which makes the
    slow part of what routers see is like no other."""
    sources = []
    for layer, own in enumerate(config.layers):
        first = range(int(about.locality > 0), about.distinct if about.distinct <= layer else 0)
        alike = [other for other in first if config.layers[other] == own]
        sources.append(alike[layer % len(alike)] if alike else layer)
    return sources


CARRIED = 0.5
"""The stream's component in the direction of `signs`, relative to the rest: written by the embedding alone, it gives
gate rows a constant to compare with, as in benchmarks/models/weights.py."""


def signs(width: int) -> np.ndarray:
    """float32 [width], as many 1 as -1."""
    return np.where(np.arange(width) % 2, np.float32(1), np.float32(-1))


def tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """(name in the file, shape) of every tensor, in file order. Norms, biases and routers are F32."""
    found: dict[str, Shape] = {}
    for canonical, shape in shapes(config):
        name = file_name(config, canonical)
        found[name] = (found.get(name, (0,))[0] + shape[0], *shape[1:])  # some are one below the other in a tensor
    yield from found.items()


def file_name(config: ModelConfig, canonical: str) -> str:
    """The name in a GGUF file. config: with the architecture in GGUF, or the family of folders."""
    name = NAMES(canonical)
    if config.architecture in ("glm4moe", "gpt-oss") or config.states:
        name = name.replace("ffn_norm", "post_attention_norm")
    if config.architecture in ("qwen3next", "qwen3_next"):
        name = name.replace("ssm_alpha", "ssm_ba").replace("ssm_beta", "ssm_ba")
    return name.replace("ssm_a.weight", "ssm_a")


def kind_of(name: str, dims: Shape, about: Weights, routing: Routing) -> str:
    """The type of a tensor: a name of `quant.BLOCK_TYPES`."""
    if len(dims) == 1 or name.endswith(("ffn_gate_inp.weight", "ssm_conv1d.weight", ".bias")):
        return "F32"
    if routing.precise(name) or (about.kind == "mxfp4" and "_exps" not in name):
        return "Q8_0"
    return (about.head if name in ("token_embd.weight", "output.weight") else about.kind).upper()


def write(path: Path, config: ModelConfig, about: Weights, threads: int = 1) -> None:
    """Write the file; threads: that compute its tensors, each a tensor in memory."""
    routing = about.routing(config)
    builder = _described(config)
    every = [(name, dims, kind_of(name, dims, about, routing)) for name, dims in tensors(config)]
    for name, dims, kind in every:
        builder.declare(name, kind, dims)

    def stored(number: int) -> np.ndarray:
        name, dims, kind = every[number]
        print(f"\r{name:40}", end="", file=sys.stderr)
        values = _values(_rng(about, number), name, dims, about, routing)
        return np.concatenate([part if kind == "F32" else few_bits.stored(part, kind) for part in values])

    places = {name: number for number, (name, *_) in enumerate(every)}
    layers = source_layers(config, about)
    names = (re.sub(r"^blk\.(\d+)\.", lambda found: f"blk.{layers[int(found[1])]}.", name) for name in places)
    builder.stream(path, repeated(stored, [places[name] for name in names], threads))
    print(file=sys.stderr)


def _rng(about: Weights, number: int) -> np.random.Generator:
    """Of a tensor, by its number in file order."""
    return np.random.default_rng((about.seed, number))


def write_folder(path: Path, config: ModelConfig, about: Weights) -> None:
    """The same as a Hugging Face folder. config: with the family of folders as its architecture."""
    expert_folders.write_folder(path, config, _canonical(config, about))


def _canonical(config: ModelConfig, about: Weights) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """(canonical name, its values as `_values` has them) of every tensor: those of the GGUF file with that seed."""
    routing = about.routing(config)
    known = dict(shapes(config))
    parts: dict[str, list[str]] = {}
    for one in known:
        parts.setdefault(file_name(config, one), []).append(one)
    for number, (name, dims) in enumerate(tensors(config)):
        values = _values(_rng(about, number), name, dims, about, routing)
        if len(parts[name]) == 1:
            yield parts[name][0], values
            continue
        attention = config.layers[int(name.split(".")[1])].attention
        groups = 1  # of the rows of GGUF's tensor
        if isinstance(attention, GatedAttentionConfig):
            groups = attention.n_heads
        elif name.endswith("ssm_ba.weight") and isinstance(attention, DeltaNetConfig):
            groups = attention.n_key_heads
        whole = np.concatenate(list(values))
        rows = expert_folders.rows_of([known[one][0] for one in parts[name]], groups)
        yield from ((one, iter([whole[own]])) for one, own in zip(parts[name], rows, strict=True))


def _values(rng: np.random.Generator, name: str, dims: Shape, about: Weights, routing: Routing) -> Iterator[np.ndarray]:
    """Rows of a tensor, float32, in pieces. Norms are all ones; products of a matrix are about as large as what it
    reads, and small where they add up."""
    if name.endswith("ssm_a"):  # states forget half of what they hold within a few tokens, or within hundreds
        yield routing.vector(name, -np.geomspace(0.001, 1, *dims, dtype=np.float32))
        return
    if len(dims) == 1:
        yield routing.vector(name, np.full(dims, 0.0 if name.endswith("bias") else 1.0, np.float32))
        return
    cols = dims[-1]
    deviation = 1.0 if name == "token_embd.weight" else cols**-0.5
    writes = ("output" in name and "blk" in name) or "down" in name or "ssm_out" in name
    if writes:
        deviation /= (2 * routing.config.n_layers) ** 0.5
    rows = int(np.prod(dims[:-1]))
    step = dims[-2] if about.active is not None and writes else max(1, PIECE // cols)
    carried = signs(dims[-2] if writes else cols)
    for first in range(0, rows, step):
        values = rng.standard_normal((min(step, rows - first), cols), np.float32) * np.float32(deviation)
        if about.active is not None:
            if writes:  # nothing in the direction of what is carried
                values -= carried[:, None] * (carried @ values / len(carried))
            elif name == "token_embd.weight":
                values += np.float32(CARRIED) * carried
            elif "ffn_gate_exps" in name:
                values -= (values @ carried / cols)[:, None] * carried
                values -= np.float32(NormalDist().inv_cdf(1 - about.active) / CARRIED / cols) * carried
        yield routing.rows(name, values, first)


def _described(config: ModelConfig) -> Builder:
    """The file's metadata."""
    attention = next(layer.attention for layer in reversed(config.layers) if layer.attention.rope is not None)
    first, experts, rope = config.layers[0].ffn, config.layers[-1].ffn, attention.rope
    assert rope is not None
    width = first.size if isinstance(first, ExpertsConfig) else first.width
    sizes = Sizes(
        config.d_model, width, config.n_layers, attention.n_heads, attention.n_kv_heads, attention.head_dim,
        config.vocab_size, CONTEXT,
    )  # fmt: skip
    keys = {"attention.key_length": attention.head_dim}
    keys["attention.value_length"] = attention.latents or attention.head_dim
    if isinstance(attention, LatentAttentionConfig):
        keys |= _latents(attention)
    keys["attention.layer_norm_rms_epsilon"] = config.norm_eps
    keys |= {"rope.freq_base": float(rope.theta), "rope.dimension_count": rope.dim}
    if isinstance(experts, ExpertsConfig):
        keys |= _experts(config, experts, rope)
    builder = Builder().model(config.architecture, f"random weights, {config.architecture}", sizes)
    return builder.fields(keys, f"{config.architecture}.").fields(gguf_fields(config.vocab_size), "tokenizer.ggml.")


def _experts(config: ModelConfig, experts: ExpertsConfig, rope: RopeConfig) -> dict[str, Any]:
    router = experts.router
    keys: dict[str, Any] = {"expert_count": experts.n_experts, "expert_used_count": router.top_k}
    if config.architecture != "llama":
        keys["expert_feed_forward_length"] = experts.size
    if config.architecture in ("glm4moe", "deepseek2"):
        keys["expert_shared_count"] = experts.shared_size // experts.size
        keys["leading_dense_block_count"] = sum(layer.ffn.neurons is not None for layer in config.layers)
        keys["expert_gating_func"] = SCORING[router.scoring]
        keys |= {"expert_weights_norm": router.normalise, "expert_weights_scale": float(router.scale)}
        keys |= {"expert_group_count": router.groups, "expert_group_used_count": router.top_groups}
    if window := max(getattr(layer.attention, "window", None) or 0 for layer in config.layers):
        keys["attention.sliding_window"] = window
    if config.architecture == "smallthinker":
        keys["expert_gating_func"] = SCORING["sigmoid"]
    if config.architecture == "gpt-oss":
        keys |= _yarn(rope)
    for delta in list(config.states.values())[:1]:
        keys["expert_shared_feed_forward_length"] = experts.shared_size
        keys |= {"ssm.conv_kernel": delta.taps, "ssm.state_size": delta.key_dim, "ssm.group_count": delta.n_key_heads}
        keys |= {"ssm.time_step_rank": delta.n_value_heads, "ssm.inner_size": delta.width}
        keys["attention.recurrent_layers"] = [layer in config.states for layer in range(config.n_layers)]
        if config.architecture != "qwen3next":
            keys["rope.dimension_sections"] = [11, 11, 10, 0]
    return keys


def _latents(attention: LatentAttentionConfig) -> dict[str, Any]:
    """0 latents of queries: llama.cpp asks for the key unless it knows the model by its number of layers."""
    gain = (attention.scale * attention.query_dim**0.5) ** 0.5
    return {
        "attention.q_lora_rank": attention.q_latents or 0,
        "attention.kv_lora_rank": attention.latents,
        "attention.key_length_mla": attention.query_dim,
        "attention.value_length_mla": attention.value_dim,
        **_yarn(attention.rope),
        "rope.scaling.yarn_log_multiplier": (gain - 1) / math.log(attention.rope.factor),
    }


def _yarn(rope: RopeConfig) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": float(rope.factor), "original_context_length": rope.original_context_length}
    return {f"rope.scaling.{key}": value for key, value in scaling.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="NAME.gguf, or a folder")
    parser.add_argument("--shape", choices=tuple(CONFIGS), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, metavar="N", help="default: all")
    parser.add_argument("--vocab", type=int, metavar="N", help="default: the shape's own")
    parser.add_argument("--type", choices=TYPES, default="q4_0", help="of the layers' matrices")
    parser.add_argument("--head", choices=TYPES[:4], default="q8_0", help="of embedding and head")
    parser.add_argument("--active", type=float, metavar="F", help="share of the neurons of an expert that fire")
    parser.add_argument("--skew", type=float, default=0.0, metavar="S", help="exponent of the experts' use (default 0)")
    parser.add_argument(
        "--locality", type=float, default=0.0, metavar="L", help="share that changes slowly (default 0)"
    )
    parser.add_argument("--distinct", type=int, default=0, metavar="N", help="layers that differ, 0: all (default)")
    arguments = parser.parse_args()
    config = CONFIGS[arguments.shape]
    if arguments.layers is not None:
        if not 2 <= arguments.layers <= config.n_layers:
            parser.error(f"--layers must be from 2 to {config.n_layers}")
        config = replace(config, layers=config.layers[: arguments.layers])
    if arguments.vocab is not None:
        config = replace(config, vocab_size=arguments.vocab)
    if arguments.active is not None:
        if not 0 < arguments.active < 1:
            parser.error("--active must be between 0 and 1")
        if config.layers[-1].ffn.activation not in RECTIFIED:
            parser.error(f"--active: the activation {config.layers[-1].ffn.activation} is never exactly zero")
    if all(layer.attention.rope is None for layer in config.layers):
        parser.error(f"--layers must be larger: the first {config.n_layers} have no attention")
    more = {name: getattr(arguments, name) for name in ("skew", "locality", "distinct")}
    about = Weights(arguments.type, arguments.head, arguments.active, **more)
    try:
        about.routing(config)
    except ValueError as error:
        parser.error(str(error))
    if arguments.distinct < 0 or (arguments.distinct and arguments.out.suffix != ".gguf"):
        parser.error("--distinct is a number of layers, of a GGUF file")
    if arguments.out.exists():
        print(f"{arguments.out} exists already: kept", file=sys.stderr)
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.out.suffix == ".gguf":
        write(arguments.out, config, about, len(os.sched_getaffinity(0)))
    else:
        family = find_shape(arguments.shape).config.architecture
        write_folder(arguments.out, replace(config, architecture=family), about)


if __name__ == "__main__":
    main()
