"""Which neurons of a model fire, token by token: a plain float32 forward pass over random tokens, one layer at a time.

Reads the file through the engine's own reader and computes the dense answer in numpy, without the engine's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import FfnConfig, ModelConfig
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.predictor_file import open_predictor
from powerinfer.formats.prepared import PREDICTOR, PreparedFile
from powerinfer.models.rope import rope_frequencies
from powerinfer.placement.power_law import hot_share

Float32 = NDArray[np.float32]

PAPER = """\
the paper's models               neurons that carry 80 % of the activations
              mean active         of one layer    of the whole model
OPT-30B       3 %                 26 %            17 %
ReGLU-70B     18 %                43 %            26 %
dReLU         10 %                -               -"""


@dataclass
class Layer:
    """What one layer showed: counts int64 [d_ff], tokens, and sums over tokens of set sizes and shared neurons."""

    counts: NDArray[np.int64]
    tokens: int = 0
    followed: int = 0  # neurons of all tokens that have one before them in their sequence
    kept: int = 0  # of these, how many fired for the token before too
    candidates: int | None = None  # of a predictor, over all tokens; None without one
    found: int = 0  # candidates that fire

    @property
    def fractions(self) -> NDArray[np.float64]:
        """How often each neuron fired."""
        return self.counts / self.tokens

    @property
    def recall(self) -> float:
        return self.found / max(1, int(self.counts.sum()))


@dataclass
class Activity:
    """All layers of a model."""

    layers: list[Layer] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Shares and fractions, from 0 to 1."""
        means = [float(layer.fractions.mean()) for layer in self.layers]
        result: dict[str, Any] = {
            "tokens": self.layers[0].tokens,
            "active_fraction": float(np.mean(means)),
            "layers": means,
            "hot_share_of_layer": [hot_share(layer.counts) for layer in self.layers],
            "hot_share_of_model": hot_share(np.stack([layer.counts for layer in self.layers])),
            "overlap": sum(layer.kept for layer in self.layers) / max(1, sum(layer.followed for layer in self.layers)),
        }
        if all(layer.candidates is not None for layer in self.layers):
            d_ff = len(self.layers[0].counts)
            result["recall"] = sum(layer.found for layer in self.layers) / sum(int(x.counts.sum()) for x in self.layers)
            result["candidate_fraction"] = float(np.mean([x.candidates / x.tokens / d_ff for x in self.layers]))
        return result

    def report(self) -> str:
        """The document in words, next to the paper's figures."""
        values = self.document()
        means, shares = values["layers"], values["hot_share_of_layer"]
        lines = [
            f"measured on {values['tokens']} random tokens",
            f"mean active               {percent(values['active_fraction'])}   "
            f"(layers {percent(min(means))} to {percent(max(means))})",
            f"80 % of activations by    {percent(float(np.mean(shares)))} of a layer's neurons   "
            f"(layers {percent(min(shares))} to {percent(max(shares))})",
            f"                          {percent(values['hot_share_of_model'])} of the whole model's neurons",
            f"kept from token to token  {percent(values['overlap'])} of a token's neurons",
        ]
        if "recall" in values:
            lines.append(
                f"predictor                 recall {percent(values['recall'])}, "
                f"candidates {percent(values['candidate_fraction'])}"
            )
        return "\n".join([*lines, "", PAPER])


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def measure(path: Path, tokens: NDArray[np.int64]) -> Activity:
    """Run sequences of tokens [sequences, length] through a model, and through its predictor if it has one."""
    checkpoint = open_checkpoint(path)
    predictors = None
    if PreparedFile(PREDICTOR, checkpoint).exists():
        predictors = open_predictor(checkpoint).layers
    activity = Activity()
    for number, (active, seen) in enumerate(layers(checkpoint, tokens)):
        layer = Layer(active.sum(axis=(0, 1)), active.shape[0] * active.shape[1])
        layer.followed = int(active[:, 1:].sum())
        layer.kept = int((active[:, 1:] & active[:, :-1]).sum())
        if predictors is not None:
            one = predictors[number]
            hidden = np.maximum(seen @ one.inner.float32().T, 0)
            candidates = hidden @ one.outer.float32().T >= one.predictor.threshold
            layer.candidates = int(candidates.sum())
            layer.found = int((candidates & active).sum())
        activity.layers.append(layer)
    return activity


def layers(checkpoint: Checkpoint, tokens: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], Float32]]:
    """For each layer (neurons that fire, bool [sequences, length, d_ff]; what a predictor reads, [.., d_model])."""
    config = checkpoint.config
    strange = any(one.norms != "pre" or one.attention.qk_norm or one.attention.window for one in config.layers)
    if strange or config.embed_dim:
        raise SystemExit(f"{checkpoint.path}: this script follows the models of make_model.py only")

    def take(name: str) -> Float32:
        return checkpoint.take(name).float32()

    x = take("embed")[tokens]
    if config.positions == "learned":
        x += take("positions")[np.arange(tokens.shape[1]) + config.position_offset]
    for layer, own in enumerate(config.layers):
        tensors = _Tensors(checkpoint, f"layers.{layer}.")
        attended = _attention(config, tensors, _norm(config, tensors, "attn_norm", x))
        read = x if own.parallel else x + attended
        n = _norm(config, tensors, "attn_norm" if own.shared_norm else "ffn_norm", read)
        h, active = _neurons(own.ffn, tensors, n)
        yield active, read
        x = x + attended + tensors.linear("down", h)
        checkpoint.release()


class _Tensors:
    """A layer's tensors as float32, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.checkpoint, self.prefix = checkpoint, prefix

    def __call__(self, name: str) -> Float32:
        return self.checkpoint.take(self.prefix + name).float32()

    def linear(self, name: str, x: Float32) -> Float32:
        out = x @ self(name).T
        return out + self(f"{name}_bias") if self.checkpoint.has(f"{self.prefix}{name}_bias") else out


def _norm(config: ModelConfig, tensors: _Tensors, name: str, x: Float32) -> Float32:
    if config.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    scaled = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(config.norm_eps)) * tensors(name)
    return scaled + tensors(f"{name}_bias") if config.norm == "layer" else scaled


def _neurons(config: FfnConfig, tensors: _Tensors, n: Float32) -> tuple[Float32, NDArray[np.bool_]]:
    """(h [.., neurons], which of them fire)."""
    first = tensors.linear("gate" if config.gated else "up", n)
    active = first > config.threshold
    h = np.where(active, first, np.float32(0))
    if config.activation == "relu2":
        h *= h
    elif config.activation == "silu":
        raise SystemExit(f"{tensors.checkpoint.path}: every neuron of a silu model fires")
    if config.gated:
        up = tensors.linear("up", n)
        if config.activation == "drelu":
            active &= up > 0
            up = np.maximum(up, 0)
        h *= up
    return h, active


def _attention(config: ModelConfig, tensors: _Tensors, n: Float32) -> Float32:
    """Causal attention within each sequence, [sequences, length, d_model]."""
    sequences, length, _ = n.shape
    own = config.layers[0].attention  # of models whose layers are alike
    dim, groups = own.head_dim, own.n_heads // own.n_kv_heads
    q = tensors.linear("q", n).reshape(sequences, length, own.n_heads, dim)
    k = tensors.linear("k", n).reshape(sequences, length, own.n_kv_heads, dim)
    v = tensors.linear("v", n).reshape(sequences, length, own.n_kv_heads, dim)
    if config.positions == "rope":
        q, k = (_rotated(config, part) for part in (q, k))
    k, v = (np.repeat(part, groups, axis=2).transpose(0, 2, 1, 3) for part in (k, v))
    scores = q.transpose(0, 2, 1, 3) @ k.transpose(0, 1, 3, 2) / np.float32(np.sqrt(dim))
    scores += np.triu(np.full((length, length), -np.inf, np.float32), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return tensors.linear("o", (weights @ v).transpose(0, 2, 1, 3).reshape(sequences, length, -1))


def _rotated(config: ModelConfig, x: Float32) -> Float32:
    """Rotary positions; neighbouring pairs are first put half a head apart, in keys and queries alike."""
    frequencies, factor = rope_frequencies(config.ropes[0])
    if config.ropes[0].interleaved:
        x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    angles = (np.arange(x.shape[1], dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    cos, sin = (turn(angles)[:, None] * np.float32(factor) for turn in (np.cos, np.sin))
    pairs = len(frequencies)
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = [first * cos - second * sin, first * sin + second * cos, rest]
    return np.concatenate(turned, axis=-1).astype(np.float32)
