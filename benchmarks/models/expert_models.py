"""Make a model of experts (MoE) with random weights, in the shape of one that people run.

    python -m benchmarks.models.expert_models OUT.gguf --shape qwen3-30b-a3b --layers 8 --type q4_0

Random weights say nothing about quality; the work they make is that of real ones: the router selects as many experts of
the same sizes, and about as many different ones for a batch, since its choices are independent of each other.
--layers cuts the model, so that it fits small machines. Embedding and head are Q8_0, norms and routers F32. A file
that exists is kept; for other types give the Q8_0 file to llama-quantize. Needs the `bench` extra (gguf).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from benchmarks.models.speed_models import write_tokenizer
from powerinfer.formats.quant import block_type, quantize

SEED = 20241216
TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}
PIECE = 1 << 24  # weights made at a time


@dataclass(frozen=True)
class Shape:
    """Sizes. shared: neurons of the shared expert, 0: none; dense: layers without experts, which come first."""

    architecture: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    top_k: int
    size: int
    vocab: int
    d_ff: int = 0
    shared: int = 0
    dense: int = 0


SHAPES = {
    "mixtral-8x7b": Shape("llama", 4096, 32, 32, 8, 128, 8, 2, 14336, 32000, 14336),
    "olmoe-1b-7b": Shape("olmoe", 2048, 16, 16, 16, 128, 64, 8, 1024, 50304, 1024),
    "qwen1.5-moe-a2.7b": Shape("qwen2moe", 2048, 24, 16, 16, 128, 60, 4, 1408, 151936, 5632, shared=5632),
    "qwen3-30b-a3b": Shape("qwen3moe", 2048, 48, 32, 4, 128, 128, 8, 768, 151936, 6144),
    "glm-4.5-air": Shape("glm4moe", 4096, 46, 96, 8, 128, 128, 8, 1408, 151552, 10944, shared=1408, dense=1),
}


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor in file order. Norms, biases and routers are F32."""
    d, q, kv = shape.d_model, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    glm = shape.architecture == "glm4moe"
    yield "token_embd.weight", (shape.vocab, d)
    for layer in range(shape.n_layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (d,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{block}attn_{name}.weight", (rows, d)
            if shape.architecture in ("qwen2moe", "glm4moe"):
                yield f"{block}attn_{name}.bias", (rows,)
        if shape.architecture in ("qwen3moe", "olmoe"):
            wide = shape.architecture == "olmoe"
            yield block + "attn_q_norm.weight", (q if wide else shape.head_dim,)
            yield block + "attn_k_norm.weight", (kv if wide else shape.head_dim,)
        yield block + "attn_output.weight", (d, q)
        yield block + ("post_attention_norm.weight" if glm else "ffn_norm.weight"), (d,)
        yield from _ffn(shape, block, dense=layer < shape.dense)
    yield "output_norm.weight", (d,)
    yield "output.weight", (shape.vocab, d)


def _ffn(shape: Shape, block: str, dense: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    def matrices(suffix: str, size: int, *outer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{block}ffn_gate{suffix}.weight", (*outer, size, shape.d_model)
        yield f"{block}ffn_up{suffix}.weight", (*outer, size, shape.d_model)
        yield f"{block}ffn_down{suffix}.weight", (*outer, shape.d_model, size)

    if dense:
        yield from matrices("", shape.d_ff)
        return
    yield block + "ffn_gate_inp.weight", (shape.n_experts, shape.d_model)
    if shape.architecture == "glm4moe":
        yield block + "exp_probs_b.bias", (shape.n_experts,)
    yield from matrices("_exps", shape.size, shape.n_experts)
    if shape.shared:
        yield from matrices("_shexp", shape.shared)
    if shape.architecture == "qwen2moe":
        yield block + "ffn_gate_inp_shexp.weight", (shape.d_model,)


def kind_of(name: str, dims: tuple[int, ...], kind: str) -> str:
    """The type of a tensor: a name of `quant.BLOCK_TYPES`."""
    if len(dims) == 1 or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    return "Q8_0" if name in ("token_embd.weight", "output.weight") else kind.upper()


def write(path: Path, shape: Shape, kind: str, seed: int = SEED) -> None:
    """Write the file, a piece in memory at a time."""
    beside = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(beside, shape.architecture)
    _metadata(writer, shape)
    for name, dims in tensors(shape):
        own = kind_of(name, dims, kind)
        stored = (*dims[:-1], block_type(own).row_bytes(dims[-1]))
        dtype, raw = (np.dtype(np.float32), None) if own == "F32" else (np.dtype(np.uint8), TYPES[own.lower()])
        writer.add_tensor_info(name, dims if raw is None else stored, dtype, int(np.prod(stored)), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for name, dims in tensors(shape):
        writer.write_tensor_data(_values(rng, name, dims, kind_of(name, dims, kind), shape.n_layers))
        print(f"\r{name:40}", end="", file=sys.stderr)
    writer.close()
    print(file=sys.stderr)
    os.replace(beside, path)


def _values(rng: np.random.Generator, name: str, dims: tuple[int, ...], own: str, layers: int) -> np.ndarray:
    """Norms are all ones; products of a matrix are about as large as what it reads, and small where they add up."""
    if len(dims) == 1:
        return np.full(dims, 0.0 if name.endswith("bias") else 1.0, np.float32)
    cols = dims[-1]
    deviation = 1.0 if name == "token_embd.weight" else cols**-0.5
    if ("output" in name and "blk" in name) or "down" in name:
        deviation /= (2 * layers) ** 0.5
    rows = int(np.prod(dims[:-1]))
    step = max(1, PIECE // cols)
    parts = []
    for first in range(0, rows, step):
        values = rng.standard_normal((min(step, rows - first), cols), np.float32) * np.float32(deviation)
        parts.append(values if own == "F32" else quantize(values, own))
    return np.concatenate(parts).reshape(*dims[:-1], -1)


def _metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name(f"random experts, {shape.architecture}")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.d_model)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.d_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(shape.head_dim // 2 if shape.architecture == "glm4moe" else shape.head_dim)
    writer.add_expert_count(shape.n_experts)
    writer.add_expert_used_count(shape.top_k)
    if shape.architecture != "llama":
        writer.add_expert_feed_forward_length(shape.size)
    if shape.architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(shape.shared)
    if shape.architecture == "glm4moe":
        writer.add_expert_shared_count(1)
        writer.add_leading_dense_block_count(shape.dense)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
    write_tokenizer(writer, shape.vocab)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, metavar="N", help="default: all")
    parser.add_argument("--type", choices=tuple(TYPES), default="q4_0", help="of the layers' matrices")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.layers is not None:
        if not shape.dense < arguments.layers <= shape.n_layers:
            parser.error(f"--layers must be from {shape.dense + 1} to {shape.n_layers}")
        shape = replace(shape, n_layers=arguments.layers)
    if arguments.out.exists():
        print(f"{arguments.out} exists already: kept", file=sys.stderr)
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write(arguments.out, shape, arguments.type)


if __name__ == "__main__":
    main()
