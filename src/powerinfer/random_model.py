"""A model with random weights whose neurons fire as seldom as wanted: it shows what skipping saves, its words mean
nothing.

The residual stream of each token has the constant component CARRIED in one direction, which the embedding writes; the
rest is about Gaussian. The row of a neuron's gate is a random one of length 1 at right angles to that direction, less
so much of it that the gate exceeds zero with the probability of the neuron, from a power law over the neurons of a
layer. Which neuron is how frequent is drawn at random.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from powerinfer.formats.gguf import encoded, write_gguf
from powerinfer.formats.gguf_model import NAMES
from powerinfer.formats.quant import Bytes, Float32
from powerinfer.placement.power_law import power_law
from powerinfer.progress import Progress, silent
from powerinfer.text.bpe import byte_alphabet
from powerinfer.text.tokenizer_gguf import CONTROL, NORMAL, UNKNOWN

CARRIED = 0.5  # the constant component, relative to the rest of the embedding
FFN_WRITES = 0.3  # variance that all FFNs together add to the stream, relative to the embedding's
ATTENTION_WRITES = 0.1  # the same of attention to one token; over many tokens it averages out
HEAD_GAIN = 3.0  # standard deviation of the logits, about
NEVER = 20.0  # less the logits of tokens that are no letters are
ROWS = 512  # of a block that a thread computes at once
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"

_Value = str | bool | int | float | list[str] | list[int]


@dataclass(frozen=True)
class RandomModel:
    """Sizes, and how often neurons fire: `active` of them for a token, the more unevenly the higher `skew`."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    active: float = 0.10
    skew: float = 1.0
    context: int = 2048
    seed: int = 1

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """(canonical name, shape) of each, in the order of the file."""
        d, kv = self.d_model, self.d_model // self.n_heads * self.n_kv_heads
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (d,), "q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d),
            "ffn_norm": (d,), "gate": (self.d_ff, d), "up": (self.d_ff, d), "down": (d, self.d_ff),
        }  # fmt: skip
        inside = [(f"layers.{at}.{name}", shape) for at in range(self.n_layers) for name, shape in layer.items()]
        ends = (len(_vocabulary()[0]), d)
        return [("embed", ends), *inside, ("final_norm", (d,)), ("head", ends)]

    @property
    def nbytes(self) -> int:
        """Bytes of the file, about: matrices in F16."""
        return sum(2 * math.prod(shape) for _, shape in self.tensors)


# The three shapes of a 3B model's layer (Llama 3.2): rows of 6 KiB, which memory delivers as fast as whole matrices.
WIDE = RandomModel(d_model=3072, d_ff=8192, n_layers=2, n_heads=24, n_kv_heads=8)
"""A model whose FFNs dominate as in large ones, of a few hundred megabytes."""


def write_random_model(
    path: Path, model: RandomModel, name: str, progress: Progress = silent, threads: int = 1
) -> None:
    """Write it as a GGUF file, which has its name only when it is whole and on disk. OSError if that fails."""
    part = path.with_name(path.name + ".part")
    tensors = [(NAMES(one), "F32" if len(shape) == 1 else "F16", shape) for one, shape in model.tensors]
    try:
        with part.open("wb") as file, ThreadPoolExecutor(threads) as pool:
            write_gguf(file, _metadata(model, name), tensors, _values(model, pool, progress))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink()


def _metadata(model: RandomModel, name: str) -> dict[str, bytes]:
    tokens, types, merges = _vocabulary()
    sizes: dict[str, _Value] = {
        "context_length": model.context, "embedding_length": model.d_model, "block_count": model.n_layers,
        "feed_forward_length": model.d_ff, "attention.head_count": model.n_heads,
        "attention.head_count_kv": model.n_kv_heads, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4,
        "rope.dimension_count": model.d_model // model.n_heads, "vocab_size": len(tokens), "hidden_act": "relu",
    }  # fmt: skip
    general: dict[str, _Value] = {"general.architecture": "llama", "general.name": name, "general.file_type": 1}
    tokenizer: dict[str, _Value] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges,
        "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False,
    }  # fmt: skip
    of_model = {f"llama.{key}": value for key, value in sizes.items()}
    of_tokenizer = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    return {key: encoded(value) for key, value in (general | of_model | of_tokenizer).items()}


def _vocabulary() -> tuple[list[str], list[int], list[str]]:
    """(tokens, their types, merges): bytes, letters after a space, and pairs of letters, the only ones that come."""
    space = byte_alphabet()[ord(" ")]
    merges = [f"{first} {second}" for first in (space, *LETTERS) for second in LETTERS]
    tokens = ["<|unk|>", "<|bos|>", "<|eos|>", *byte_alphabet(), *(pair.replace(" ", "") for pair in merges)]
    return tokens, [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3)], merges


def _values(model: RandomModel, pool: ThreadPoolExecutor, progress: Progress) -> Iterator[Bytes]:
    """The bytes of each tensor."""
    weights, tensors = _Weights(model), model.tensors
    for number, (name, shape) in enumerate(tensors):
        progress("writing random weights", number, len(tensors))
        if len(shape) == 1:
            yield np.ones(shape, "<f4").view(np.uint8)
            continue
        values = np.empty(shape, "<f2")

        def fill(first: int, number: int = number, name: str = name, values: NDArray[np.float16] = values) -> None:
            rows = slice(first, min(first + ROWS, len(values)))
            values[rows] = weights.rows(name, number, rows, values.shape[1])

        for _ in pool.map(fill, range(0, shape[0], ROWS)):
            pass
        yield values.reshape(-1).view(np.uint8)


class _Weights:
    """The values of the matrices, a block of rows at a time."""

    def __init__(self, model: RandomModel) -> None:
        self._model = model
        generator = np.random.default_rng((model.seed, 0))
        self._signs = generator.permutation(np.resize(np.array([1, -1], np.float32), model.d_model))
        often = [generator.permutation(power_law(model.active, model.skew, model.d_ff)) for _ in range(model.n_layers)]
        normal = NormalDist()
        self._limits = [np.array([normal.inv_cdf(1 - p) for p in layer]) for layer in often]

    def rows(self, name: str, number: int, rows: slice, columns: int) -> Float32:
        """float32 [rows, columns] of the tensor of a number."""
        generator = np.random.default_rng((self._model.seed, 1 + number, rows.start))
        normal = generator.standard_normal((rows.stop - rows.start, columns), np.float32)
        *outer, inner = name.split(".")
        if inner == "embed":
            return np.asarray(normal + np.float32(CARRIED) * self._signs)
        if inner == "head":
            return self._head(normal, rows)
        layer = int(outer[1])
        if inner == "gate":
            return self._gate(normal, rows, layer)
        scales = {"o": self._scale_of_o(), "down": self._scale_of_down(layer)}
        return normal * np.float32(scales.get(inner, 1 / math.sqrt(columns)))

    def _spread(self, layer: int) -> float:
        """Standard deviation of the stream, without its constant component, that an FFN reads."""
        return math.sqrt(1 + (FFN_WRITES * layer + ATTENTION_WRITES * (layer + 1)) / self._model.n_layers)

    def _gate(self, normal: Float32, rows: slice, layer: int) -> Float32:
        """Rows whose product with the stream exceeds zero as often as their neuron fires."""
        d = self._model.d_model
        normal -= np.outer(normal @ self._signs / d, self._signs)
        normal /= np.linalg.norm(normal, axis=1, keepdims=True)
        lean = self._limits[layer][rows] * self._spread(layer) / (CARRIED * d)
        return normal - np.outer(lean.astype(np.float32), self._signs)

    def _scale_of_o(self) -> float:
        return math.sqrt(ATTENTION_WRITES / self._model.n_layers / self._model.d_model)

    def _scale_of_down(self, layer: int) -> float:
        """Factor that makes the FFN add its part to the variance: the mean square of relu(gate) times up is known."""
        limits, spread = self._limits[layer], self._spread(layer)
        normal = NormalDist()
        squares = sum((1 + t * t) * normal.cdf(-t) - t * normal.pdf(t) for t in limits.tolist())
        after_norm = spread**2 / (spread**2 + CARRIED**2)
        return math.sqrt(FFN_WRITES / self._model.n_layers / (squares * after_norm))

    def _head(self, normal: Float32, rows: slice) -> Float32:
        """Rows of the head: tokens that are no letters have logits that are never sampled."""
        d, letters = self._model.d_model, len(_vocabulary()[0]) - len(LETTERS) * (len(LETTERS) + 1)
        length = math.hypot(self._spread(self._model.n_layers), CARRIED)
        without = np.arange(rows.start, rows.stop) < letters
        lean = np.where(without, np.float32(NEVER * length / (CARRIED * d)), np.float32(0))
        return normal * np.float32(HEAD_GAIN / math.sqrt(d)) - np.outer(lean, self._signs)

