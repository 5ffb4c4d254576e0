"""What the neurons of a model do on a text: how often each fires, and what the largest of them alone are worth.

Computed by `powerinfer_train.torch_model`, for any model that `sparsify` can train: a neuron fires where its h is
not zero, whatever its activation and its thresholds are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from powerinfer.config import ExpertsConfig
from powerinfer.errors import RequestError
from powerinfer.evaluate import perplexity_windows
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.report.plots import MASS, cumulative
from powerinfer.text.model_text import tokenizer_of
from powerinfer_train.torch_model import Hidden, NeuronValues, Observer, TorchModel, activate, load, narrowed
from powerinfer_train.training import fast_type

ROWS = 4
"""Windows that are computed at once."""


def open_torch(checkpoint: Checkpoint) -> TorchModel:
    compute = fast_type(torch.device("cpu"))
    return TorchModel(checkpoint.config, narrowed(load(checkpoint), compute), compute)


def windows(checkpoint: Checkpoint, texts: Sequence[Path], count: int, context: int) -> Tensor:
    """`count` windows of `context` tokens, spread evenly over the windows of all texts, int64 [count, context].

    RequestError for a text that is not UTF-8, or has less than two windows.
    """
    found: list[list[int]] = []
    for text in texts:
        try:
            words = text.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise RequestError(f"{text} is not UTF-8") from None
        found += perplexity_windows(tokenizer_of(checkpoint), words, context)
    some = np.linspace(0, len(found) - 1, min(count, len(found))).round().astype(int)
    return torch.tensor([found[at] for at in some])


def parts(tokens: Tensor, label: str) -> Iterator[Tensor]:
    """Some windows after the other, with progress on stderr."""
    for number, part in enumerate(tokens.split(ROWS)):
        print(f"\r{label}: window {number * ROWS} of {len(tokens)}", end="", file=sys.stderr, flush=True)
        yield part
    print(f"\r{label}: {len(tokens)} windows{' ' * 12}", file=sys.stderr)


@torch.no_grad()
def firing(model: TorchModel, tokens: Tensor) -> dict[str, Any]:
    """How often neurons fire: shares of zeros and the skew by layer, and what the most active ones carry.

    curve: share of all firings of the most active 0, 1, ... 100 % of the model's neurons; hot_share: the smallest share
    of the neurons that carries 80 %.
    """
    n = model.config.n_layers
    fired: dict[tuple[int, str, int | None], Tensor] = {}
    computed = [0] * n

    def count(name: str, seen: NeuronValues) -> None:
        layer = int(name.split(".")[1])
        ones = (seen.h != 0).flatten(0, -2)
        key = layer, name, seen.expert
        fired[key] = fired.get(key, 0) + ones.sum(0)
        computed[layer] += ones.numel()

    for part in parts(tokens, "firing"):
        model.states(part, count)
    counts: list[list[np.ndarray]] = [[] for _ in range(n)]
    for (layer, _, _), ones in fired.items():
        counts[layer].append(ones.numpy())
    layers = []
    for layer, own in zip(model.config.layers, counts, strict=True):
        ffn, seen = layer.ffn, np.concatenate(own)
        neurons = ffn.n_experts * ffn.size + ffn.shared_size if isinstance(ffn, ExpertsConfig) else ffn.width
        layers.append(np.pad(seen, (0, neurons - len(seen))))  # experts that no token selected
    every = np.concatenate(layers)
    share = cumulative(every)
    return {
        "tokens": tokens.numel(),
        "active_fraction": float(every.sum() / sum(computed)),
        "zeros_by_layer": [1 - float(one.sum() / number) for one, number in zip(layers, computed, strict=True)],
        "hot_share": hot_share(every),
        "hot_share_by_layer": [hot_share(one) for one in layers],
        "curve": np.interp(np.linspace(0, len(every), 101), np.arange(len(share)), share).tolist(),
    }


def hot_share(counts: np.ndarray) -> float:
    """The smallest share of neurons that carries 80 % of the firings."""
    return float(np.searchsorted(cumulative(counts), MASS) / len(counts)) if counts.any() else 0.0


def largest(h: Tensor, share: float) -> Tensor:
    """h [..., neurons] with only that share of each token's values, the largest in magnitude; the others are 0."""
    kept = max(1, round(share * h.shape[-1]))
    at = h.abs().topk(kept, -1).indices
    return torch.zeros_like(h).scatter(-1, at, h.gather(-1, at))


def only_largest(model: TorchModel, share: float) -> AbstractContextManager[None]:
    plain = model.hidden
    return with_hidden(model, plain if share == 1 else lambda *parts: largest(plain(*parts), share))


def with_thresholds(model: TorchModel, factor: float) -> AbstractContextManager[None]:
    """The model with every threshold, of a layer, of a neuron or of its product, times `factor`."""

    def hidden(name: str, gate: Tensor | None, up: Tensor) -> Tensor:
        ffn = model.config.layers[int(name.split(".")[1])].ffn
        own = (model.weights.get(name + kind) for kind in ("threshold", "product_threshold"))
        own = (None if one is None else factor * one for one in own)
        return activate(replace(ffn, threshold=factor * ffn.threshold), gate, up, *own)

    return with_hidden(model, hidden)


@contextmanager
def with_hidden(model: TorchModel, hidden: Hidden) -> Iterator[None]:
    plain, model.hidden = model.hidden, hidden
    try:
        yield
    finally:
        model.hidden = plain


def curve(model: TorchModel, tokens: Tensor, factors: Sequence[float]) -> list[dict[str, float]]:
    """The perplexity, and the share of h that is zero, where the thresholds are multiplied by each of `factors`."""
    found = []
    for factor in factors:
        zeros, computed = 0, 0

        def count(_: str, seen: NeuronValues) -> None:
            nonlocal zeros, computed
            zeros += int((seen.h == 0).sum())
            computed += seen.h.numel()

        with with_thresholds(model, factor):
            value = perplexity(model, tokens, f"thresholds times {factor:g}", count)
        found.append({"factor": factor, "perplexity": value, "zeros": zeros / computed})
    return found


@torch.no_grad()
def perplexity(model: TorchModel, tokens: Tensor, label: str, seen: Observer | None = None) -> float:
    """Of the second half of each window, as `eval perplexity` scores it."""
    half, total, scored = tokens.shape[1] // 2, 0.0, 0
    for part in parts(tokens, label):
        for states, inside in zip(model.states(part, seen)[:, half:-1], part[:, half + 1 :], strict=True):
            total += float(functional.cross_entropy(model.logits(states), inside, reduction="sum"))
            scored += inside.numel()
    return math.exp(min(total / scored, 700.0))
