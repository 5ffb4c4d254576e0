"""Checkpoints of llama2.c: read them, and write the same model as a GGUF file of the llama architecture.

The layout (karpathy/llama2.c, export.py version 0 and tokenizer.py): seven int32 (d_model, d_ff, layers, heads,
key-value heads, vocabulary, context; the vocabulary negative where the head is a tensor of its own), then float32
tensors, each kind for all layers at once. A tokenizer is an int32, the longest piece in bytes, and of every token a
float32 score, an int32 length and the bytes. Neighbouring elements of a head are rotated together, as GGUF's llama
has it, so no row moves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.models.gguf_writer import dense
from powerinfer.text.tokenizer_gguf import BYTE, CONTROL, NORMAL, UNKNOWN

UNK, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
"""Tokens of llama2.c's vocabularies, which are SentencePiece's: three of control, then the 256 bytes."""

Weights = Mapping[str, np.ndarray]
"""GGUF name without ".weight" -> float32; linear maps are [out, in]."""

_HEADER = struct.Struct("<7i")


@dataclass(frozen=True)
class Shape:
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab: int
    context: int
    tied: bool = True

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) in the order of the file. `{}` stands for the layer: such a tensor is there for each."""
        d, kv = self.d_model, self.n_kv_heads * self.head_dim
        yield "token_embd", (self.vocab, d)
        yield "blk.{}.attn_norm", (d,)
        yield "blk.{}.attn_q", (d, d)
        yield "blk.{}.attn_k", (kv, d)
        yield "blk.{}.attn_v", (kv, d)
        yield "blk.{}.attn_output", (d, d)
        yield "blk.{}.ffn_norm", (d,)
        yield "blk.{}.ffn_gate", (self.d_ff, d)
        yield "blk.{}.ffn_down", (d, self.d_ff)
        yield "blk.{}.ffn_up", (self.d_ff, d)
        yield "output_norm", (d,)


@dataclass(frozen=True)
class Token:
    """A token as GGUF has it."""

    piece: str
    score: float
    type: int


def read_checkpoint(data: bytes) -> tuple[Shape, dict[str, np.ndarray], int]:
    """(shape, weights, bytes read) of the checkpoint at the beginning of `data`. ValueError if it is none."""
    if len(data) < _HEADER.size:
        raise ValueError("not a llama2.c checkpoint: too short")
    *sizes, vocab, context = _HEADER.unpack_from(data)
    shape = Shape(*sizes, abs(vocab), context, tied=vocab > 0)
    if min(*sizes, shape.vocab, context) < 1 or shape.d_model % shape.n_heads or shape.head_dim % 2:
        raise ValueError(f"not a llama2.c checkpoint: its header says {shape}")
    at = _HEADER.size
    weights: dict[str, np.ndarray] = {}

    def take(size: tuple[int, ...]) -> np.ndarray:
        nonlocal at
        count = int(np.prod(size))
        if at + 4 * count > len(data):
            raise ValueError("the llama2.c checkpoint ends too early")
        values = np.frombuffer(data, "<f4", count, at).reshape(size)
        at += 4 * count
        return values

    for name, size in shape.tensors():
        if "{}" in name:
            for layer, values in enumerate(take((shape.n_layers, *size))):
                weights[name.format(layer)] = values
        else:
            weights[name] = take(size)
    take((shape.context, shape.head_dim))  # tables of cosines and sines, which follow from the header
    if not shape.tied:
        weights["output"] = take((shape.vocab, shape.d_model))
    return shape, weights, at


def read_tokens(data: bytes, vocab: int) -> list[Token]:
    """The tokens of the tokenizer that is all of `data`. ValueError if it is not one of `vocab` tokens.

    The exporter wrote spaces for SentencePiece's, and bytes as characters of Latin-1; both are put back.
    """
    tokens, at = [], 4
    for index in range(vocab):
        if at + 8 > len(data):
            raise ValueError(f"the llama2.c tokenizer ends after {index} of {vocab} tokens")
        score, length = struct.unpack_from("<fi", data, at)
        piece = data[at + 8 : at + 8 + length].decode("utf-8").replace(" ", "▁")
        at += 8 + length
        kind = NORMAL
        if index < FIRST_BYTE:
            piece, kind = piece.strip(), UNKNOWN if index == UNK else CONTROL
        elif index < FIRST_BYTE + 256:
            piece, kind = f"<0x{index - FIRST_BYTE:02X}>", BYTE
        tokens.append(Token(piece, score, kind))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow the llama2.c tokenizer")
    return tokens


def write_gguf(
    path: Path,
    name: str,
    shape: Shape,
    weights: Weights,
    tokens: list[Token],
    activation: str = "silu",
    threshold: float = 0.0,
    float16: bool = True,
) -> None:
    """Write the model. `activation` is of powerinfer.config.ACTIVATIONS, `threshold` that of fatrelu.

    float16: matrices as F16; else all is F32. An activation other than silu is named by the key llama.hidden_act,
    which only this engine reads: others would compute SwiGLU.
    """
    builder = dense("llama", name, shape, "f16" if float16 else "f32")
    if activation != "silu":
        builder.fields({"hidden_act": activation}, "llama.")
    if activation == "fatrelu":
        builder.fields({"hidden_act_param": threshold}, "llama.")
    vocabulary = {
        "model": "llama",
        "tokens": [token.piece for token in tokens],
        "scores": [token.score for token in tokens],
        "token_type": [token.type for token in tokens],
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "eot_token_id": BOS,  # these models end a text by beginning the next one
        "unknown_token_id": UNK,
    }
    builder.fields(vocabulary, "tokenizer.ggml.")
    half = {tensor: float16 and values.ndim > 1 for tensor, values in weights.items()}
    for tensor, values in weights.items():
        builder.declare(tensor + ".weight", "F16" if half[tensor] else "F32", values.shape)
    builder.stream(path, (one.astype(np.float16 if half[name] else np.float32) for name, one in weights.items()))
