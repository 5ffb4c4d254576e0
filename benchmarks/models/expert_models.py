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
other types give the Q8_0 file to llama-quantize. Needs the `bench` extra (gguf).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import gguf
import numpy as np

from benchmarks.models import expert_folders
from benchmarks.models.routing import Routing
from benchmarks.models.speed_models import write_tokenizer
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
from powerinfer.formats.quant import block_type, quantize
from powerinfer.placement.shapes import SHAPES

SEED = 20241216
TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q4_0", "q8_0", "mxfp4", "f16")}
PIECE = 1 << 24  # weights made at a time


# Of a name of `placement.shapes.SHAPES` the architecture in GGUF.
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
CONFIGS = {name: replace(SHAPES[name].config, architecture=own) for name, own in ARCHITECTURES.items()}


@dataclass(frozen=True)
class Weights:
    """kind, head: types of the layers' matrices, and of embedding and head; active: of the neurons of an expert, the
    share that fires, None: as it comes; skew, locality: of the routers, as of `Routing`."""

    kind: str
    head: str = "q8_0"
    active: float | None = None
    seed: int = SEED
    skew: float = 0.0
    locality: float = 0.0

    def routing(self, config: ModelConfig) -> Routing:
        """What makes the routers of a model so. ValueError where that cannot be."""
        if self.active is not None and (self.skew or self.locality):
            raise ValueError("--active cannot be combined with --skew or --locality")
        return Routing(config, self.skew, self.locality)


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
    beside = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(beside, config.architecture)
    _metadata(writer, config)
    for name, dims in tensors(config):
        own = kind_of(name, dims, about, routing)
        stored = (*dims[:-1], block_type(own).row_bytes(dims[-1]))
        dtype, raw = (np.dtype(np.float32), None) if own == "F32" else (np.dtype(np.uint8), TYPES[own.lower()])
        writer.add_tensor_info(name, dims if raw is None else stored, dtype, int(np.prod(stored)), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()

    def stored_tensor(number: int, name: str, dims: Shape) -> np.ndarray:
        own = kind_of(name, dims, about, routing)
        values = _values(_rng(about, number), name, dims, about, routing)
        parts = [part if own == "F32" else quantize(part, own) for part in values]
        return np.concatenate(parts).reshape(*dims[:-1], -1)

    left = [(number, *one) for number, one in enumerate(tensors(config))]
    with ThreadPoolExecutor(threads) as pool:
        made = deque(pool.submit(stored_tensor, *one) for one in left[:threads])
        for number, name, _ in left:
            writer.write_tensor_data(made.popleft().result())
            made.extend(pool.submit(stored_tensor, *one) for one in left[number + threads : number + threads + 1])
            print(f"\r{name:40}", end="", file=sys.stderr)
    writer.close()
    print(file=sys.stderr)
    os.replace(beside, path)


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


def _metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    attention = next(layer.attention for layer in reversed(config.layers) if layer.attention.rope is not None)
    assert attention.rope is not None
    writer.add_name(f"random weights, {config.architecture}")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    first = config.layers[0].ffn
    writer.add_feed_forward_length(first.size if isinstance(first, ExpertsConfig) else first.width)
    writer.add_head_count(attention.n_heads)
    writer.add_head_count_kv(attention.n_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.latents or attention.head_dim)
    if isinstance(attention, LatentAttentionConfig):
        _latents(writer, attention)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(attention.rope.theta)
    writer.add_rope_dimension_count(attention.rope.dim)
    experts = config.layers[-1].ffn
    if isinstance(experts, ExpertsConfig):
        _experts(writer, config, experts, attention.rope)
    write_tokenizer(writer, config.vocab_size)


def _experts(writer: gguf.GGUFWriter, config: ModelConfig, experts: ExpertsConfig, rope: RopeConfig) -> None:
    writer.add_expert_count(experts.n_experts)
    writer.add_expert_used_count(experts.router.top_k)
    if config.architecture != "llama":
        writer.add_expert_feed_forward_length(experts.size)
    if config.architecture in ("glm4moe", "deepseek2"):
        router = experts.router
        writer.add_expert_shared_count(experts.shared_size // experts.size)
        dense = sum(layer.ffn.neurons is not None for layer in config.layers)
        writer.add_leading_dense_block_count(dense)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[router.scoring.upper()])
        writer.add_expert_weights_norm(router.normalise)
        writer.add_expert_weights_scale(router.scale)
        writer.add_expert_group_count(router.groups)
        writer.add_expert_group_used_count(router.top_groups)
    window = max(getattr(layer.attention, "window", None) or 0 for layer in config.layers)
    if window:
        writer.add_sliding_window(window)
    if config.architecture == "smallthinker":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.architecture == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.original_context_length)
    for delta in list(config.states.values())[:1]:
        writer.add_expert_shared_feed_forward_length(experts.shared_size)
        writer.add_ssm_conv_kernel(delta.taps)
        writer.add_ssm_state_size(delta.key_dim)
        writer.add_ssm_group_count(delta.n_key_heads)
        writer.add_ssm_time_step_rank(delta.n_value_heads)
        writer.add_ssm_inner_size(delta.width)
        kept = [layer in config.states for layer in range(config.n_layers)]
        writer.add_array(f"{config.architecture}.attention.recurrent_layers", kept)
        if config.architecture != "qwen3next":
            writer.add_rope_dimension_sections([11, 11, 10, 0])


def _latents(writer: gguf.GGUFWriter, attention: LatentAttentionConfig) -> None:
    """0 latents of queries: llama.cpp asks for the key unless it knows the model by its number of layers."""
    rope = attention.rope
    writer.add_q_lora_rank(attention.q_latents or 0)
    writer.add_kv_lora_rank(attention.latents)
    writer.add_key_length_mla(attention.query_dim)
    writer.add_value_length_mla(attention.value_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope.factor)
    writer.add_rope_scaling_orig_ctx_len(rope.original_context_length)
    gain = (attention.scale * attention.query_dim**0.5) ** 0.5
    writer.add_rope_scaling_yarn_log_mul((gain - 1) / math.log(rope.factor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="NAME.gguf, or a folder")
    parser.add_argument("--shape", choices=tuple(CONFIGS), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, metavar="N", help="default: all")
    parser.add_argument("--vocab", type=int, metavar="N", help="default: the shape's own")
    parser.add_argument("--type", choices=tuple(TYPES), default="q4_0", help="of the layers' matrices")
    parser.add_argument("--head", choices=tuple(TYPES), default="q8_0", help="of embedding and head")
    parser.add_argument("--active", type=float, metavar="F", help="share of the neurons of an expert that fire")
    parser.add_argument("--skew", type=float, default=0.0, metavar="S", help="exponent of the experts' use (default 0)")
    parser.add_argument(
        "--locality", type=float, default=0.0, metavar="L", help="share that changes slowly (default 0)"
    )
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
    about = Weights(arguments.type, arguments.head, arguments.active, skew=arguments.skew, locality=arguments.locality)
    try:
        about.routing(config)
    except ValueError as error:
        parser.error(str(error))
    if arguments.out.exists():
        print(f"{arguments.out} exists already: kept", file=sys.stderr)
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.out.suffix == ".gguf":
        write(arguments.out, config, about, len(os.sched_getaffinity(0)))
    else:
        write_folder(arguments.out, replace(config, architecture=SHAPES[arguments.shape].config.architecture), about)


if __name__ == "__main__":
    main()
