"""A LLaMA in plain torch, and how its SwiGLU becomes ReGLU or dReLU: sampling, regression, distillation, figures.

    FFN(x) = down @ h,   h = silu(gate @ x) * (up @ x)             SwiGLU, what the model was trained with
                         h = relu(gate @ x) * (up @ x)             ReGLU  (activation "relu")
                         h = relu(gate @ x) * relu(up @ x)         dReLU  (activation "drelu")
                         h = a * (up @ x), a = gate @ x where it exceeds a threshold, else 0   FATReLU ("fatrelu")

Weights are named as in `llama2c`. Only the FFNs' matrices are ever trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.models.gguf_writer import EPS, THETA
from runs.llama2c import BOS, Shape

FFN = ("ffn_gate", "ffn_up", "ffn_down")
SOFT = 0.25  # of `firing`


class Pass(NamedTuple):
    """What happened in a layer's FFN, of each token."""

    x: Tensor  # its input behind the norm, float32 [..., d_model]
    gate: Tensor  # gate @ x [..., d_ff]
    up: Tensor  # up @ x
    h: Tensor
    out: Tensor  # [..., d_model]


Seen = Callable[[int, Pass], None]
"""Called with a layer and what happened there."""


def fast_type() -> torch.dtype:
    """bfloat16 where this CPU multiplies matrices of it in tiles, ten times as fast; elsewhere float32."""
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def is_ffn(name: str) -> bool:
    """Whether a weight is a matrix of an FFN."""
    return name.rpartition(".")[2] in FFN


def hidden_of(gate: Tensor, up: Tensor, activation: str, threshold: float = 0.0) -> Tensor:
    """h of the neurons, from both products [..., d_ff]."""
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "fatrelu":
        return torch.where(gate > threshold, gate, 0) * up
    return functional.relu(gate) * (functional.relu(up) if activation == "drelu" else up)


class Llama:
    """Weights and forward pass.

    weights: float32; the FFNs' are leaves of their own, so that they can be trained. compute: the type in which
    matrices are multiplied; norms, the residual stream and the logits stay float32.
    """

    def __init__(
        self,
        shape: Shape,
        weights: dict[str, Tensor],
        activation: str = "silu",
        threshold: float = 0.0,
        compute: torch.dtype = torch.float32,
    ) -> None:
        self.shape, self.activation, self.threshold, self.compute = shape, activation, threshold, compute
        self.weights = {
            name: w.detach().clone().float() if is_ffn(name) else w.detach().float() for name, w in weights.items()
        }
        self._frozen = {name: w.to(compute) for name, w in self.weights.items() if not is_ffn(name)}
        angles = THETA ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        turns = torch.outer(torch.arange(shape.context).float(), angles)
        self._turns = torch.polar(torch.ones_like(turns), turns)  # [context, head_dim / 2]

    def trained(self) -> list[Tensor]:
        """The FFNs' matrices, in a fixed order; they ask for gradients from now on."""
        names = [f"blk.{layer}.{part}" for layer in range(self.shape.n_layers) for part in FFN]
        return [self.weights[name].requires_grad_() for name in names]

    def _weight(self, name: str) -> Tensor:
        return self._frozen[name] if name in self._frozen else self.weights[name].to(self.compute)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x.to(self.compute), self._weight(name))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (self.shape.d_model,), self.weights[name], EPS)

    def _heads(self, x: Tensor, first: int | None) -> Tensor:
        """[batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]; rotated if they begin at `first`."""
        split = x.unflatten(-1, (-1, self.shape.head_dim))
        if first is not None:
            pairs = torch.view_as_complex(split.float().unflatten(-1, (-1, 2)))
            turns = self._turns[first : first + x.shape[1], None]
            split = torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
        return split.transpose(1, 2)

    def ffn(self, x: Tensor, layer: int) -> Pass:
        """A layer's FFN on its normalised input."""
        gate, up = (self._linear(x, f"blk.{layer}.{part}") for part in ("ffn_gate", "ffn_up"))
        h = hidden_of(gate, up, self.activation, self.threshold)
        return Pass(x, gate, up, h, self._linear(h, f"blk.{layer}.ffn_down"))

    def states(self, tokens: Tensor, seen: Seen | None = None, cache: Cache | None = None) -> Tensor:
        """int64 [batch, tokens] -> what the head reads, float32 [batch, tokens, d_model].

        cache: of the tokens before these, which are added to it.
        """
        first = cache.length if cache else 0
        x = functional.embedding(tokens, self.weights["token_embd"])
        for layer in range(self.shape.n_layers):
            name = f"blk.{layer}."
            normed = self._norm(x, name + "attn_norm")
            q = self._heads(self._linear(normed, name + "attn_q"), first)
            k = self._heads(self._linear(normed, name + "attn_k"), first)
            v = self._heads(self._linear(normed, name + "attn_v"), None)
            if cache:
                k, v = cache.add(layer, k, v)
            grouped = self.shape.n_kv_heads != self.shape.n_heads
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=tokens.shape[1] > 1, enable_gqa=grouped)
            x = x + self._linear(mixed.transpose(1, 2).flatten(-2), name + "attn_output")
            done = self.ffn(self._norm(x, name + "ffn_norm"), layer)
            if seen:
                seen(layer, done)
            x = x + done.out
        if cache:
            cache.length += tokens.shape[1]
        return self._norm(x, "output_norm")

    def logits(self, states: Tensor, words: Tensor | None = None) -> Tensor:
        """float32 [..., vocab]; words: int64, the tokens whose logits are wanted."""
        head = self._weight("output" if "output" in self.weights else "token_embd")
        return functional.linear(states.to(self.compute), head if words is None else head[words]).float()


class Cache:
    """Keys and values of `batch` sequences, up to shape.context tokens: one chunk of many tokens, then single ones."""

    def __init__(self, model: Llama, batch: int) -> None:
        shape = model.shape
        size = (shape.n_layers, 2, batch, shape.n_kv_heads, shape.context, shape.head_dim)
        self._stored = torch.empty(size, dtype=model.compute)
        self.length = 0

    def add(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep both; what there is now of the layer."""
        end = self.length + k.shape[2]
        stored = self._stored[layer]
        stored[0, :, :, self.length : end], stored[1, :, :, self.length : end] = k, v
        return stored[0, :, :, :end], stored[1, :, :, :end]


@torch.no_grad()
def sample(model: Llama, batch: int, generator: torch.Generator, top_k: int = 40) -> Tensor:
    """int64 [batch, context] at temperature 1 from BOS on. A text that ends is followed by BOS and the next one."""
    cache = Cache(model, batch)
    rows = torch.full((batch, model.shape.context), BOS)
    for at in range(1, model.shape.context):
        logits = model.logits(model.states(rows[:, at - 1 : at], cache=cache)[:, 0])
        best, words = logits.topk(min(top_k, model.shape.vocab))
        drawn = torch.multinomial(best.softmax(-1), 1, generator=generator)
        rows[:, at] = words.gather(1, drawn)[:, 0]
    return rows


def windows(tokens: list[int], context: int) -> Tensor:
    """int64 [windows, context] as `powerinfer eval perplexity` cuts a text: side by side, BOS for the first of each."""
    count = len(tokens) // context
    cut = torch.tensor(tokens[: count * context]).view(count, context)
    cut[:, 0] = BOS
    return cut


def batches(text: Tensor, rows: int, seed: int) -> Iterator[Tensor]:
    """`rows` windows at a time without end, in another order every time the text is through.

    ValueError if there are fewer windows than that.
    """
    if len(text) < rows:
        raise ValueError(f"a text of {len(text)} windows has no batch of {rows}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(text), generator=generator)
        for at in range(0, len(text) - rows + 1, rows):
            yield text[order[at : at + rows]]


def oriented(model: Llama, teacher: Llama, tokens: Tensor) -> None:
    """Turn neurons (up and down with the other sign, the same SwiGLU) so that up is positive where they matter.

    dReLU drops what has a negative up: of two equal descriptions of a neuron this takes the one that loses less.
    """

    def turn(layer: int, seen: Pass) -> None:
        h = seen.h.float().flatten(0, -2)
        sign = torch.where((h * h.abs()).sum(0) < 0, -1.0, 1.0)
        for part, along in (("ffn_up", sign[:, None]), ("ffn_down", sign[None])):
            model.weights[f"blk.{layer}.{part}"].mul_(along)

    with torch.no_grad():
        teacher.states(tokens, turn)


def firing(seen: Pass, activation: str) -> Tensor:
    """About the share of neurons that fire, as something that has a gradient: mean of s(gate), dReLU s(gate) * s(up).

    s(a) = sigmoid(a / (SOFT * the neuron's root mean square of a)): it counts signs, so scaling weights does not
    lower it, what lies far from zero is left alone, and a margin grows around zero.
    """

    def positive(a: Tensor) -> Tensor:
        a = a.float()
        scale = a.detach().square().flatten(0, -2).mean(0).sqrt()
        return torch.sigmoid(a / (SOFT * scale + 1e-6))

    share = positive(seen.gate)
    return (share * positive(seen.up) if activation == "drelu" else share).mean()


def regression_loss(model: Llama, teacher: Llama, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(mean over the layers of |own FFN - teacher's|^2 / |teacher's|^2, each for the teacher's inputs, `firing`)."""
    wanted: list[Pass] = []
    with torch.no_grad():
        teacher.states(tokens, lambda layer, seen: wanted.append(seen))
    own = [model.ffn(seen.x, layer) for layer, seen in enumerate(wanted)]
    errors = [
        (mine.out.float() - theirs.out.float()).square().sum() / theirs.out.float().square().sum()
        for mine, theirs in zip(own, wanted, strict=True)
    ]
    return torch.stack(errors).mean(), torch.stack([firing(mine, model.activation) for mine in own]).mean()


def distillation_loss(model: Llama, teacher: Llama, tokens: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """(mean KL(teacher || model) over `words` in nats, mean over the layers of `firing`)."""
    shares: list[Tensor] = []
    with torch.no_grad():
        wanted = functional.log_softmax(teacher.logits(teacher.states(tokens).flatten(0, 1), words), -1)
    states = model.states(tokens, lambda layer, seen: shares.append(firing(seen, model.activation)))
    own = functional.log_softmax(model.logits(states.flatten(0, 1), words), -1)
    return functional.kl_div(own, wanted, log_target=True, reduction="batchmean"), torch.stack(shares).mean()


@torch.no_grad()
def evaluate(model: Llama, text: Tensor, rows: int = 8) -> tuple[float, Tensor]:
    """Of windows [n, context] (perplexity, int64 [n_layers, d_ff]: for how many tokens each neuron's h is not zero).

    The second half of each window is scored, as `powerinfer eval perplexity` does; all of it counts for the neurons.
    """
    total, scored, half = 0.0, 0, text.shape[1] // 2
    counts = torch.zeros(model.shape.n_layers, model.shape.d_ff, dtype=torch.int64)

    def count(layer: int, seen: Pass) -> None:
        counts[layer] += (seen.h != 0).flatten(0, -2).sum(0)

    for part in text.split(rows):
        logits = model.logits(model.states(part, count)[:, half:-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), part[:, half + 1 :].flatten(), reduction="sum")
        total, scored = total + float(loss), scored + logits.shape[0] * logits.shape[1]
    return math.exp(total / scored), counts
