"""A model of the engine's configuration in torch, with gradients: what `sparsify` trains, and its teacher.

Weights have their canonical names (`formats.layout`), so a model of any family and file format is loaded, trained and
written back alike. What a family's layers compute is what `ModelConfig` says, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from powerinfer.config import (
    BANK,
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    FfnConfig,
    GatedAttentionConfig,
    LatentAttentionConfig,
    ModelConfig,
    RopeConfig,
    RouterConfig,
)
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.layout import is_matrix, shapes
from powerinfer.kernels.gpu_experts import mix_experts
from powerinfer.kernels.gpu_types import OAI_LIMIT, OAI_SCALE
from powerinfer.kernels.torch_attention import attend_windows
from powerinfer.models.rope import rope_frequencies
from powerinfer_train import blocks
from powerinfer_train.blocks import Blocks
from powerinfer_train.torch_delta import remember
from powerinfer_train.torch_latent import attend_latents


class NeuronValues(NamedTuple):
    """Values within a sum of neurons, of each token: its input behind the norm [..., d_model], both products (gate
    is None where there is none), h [..., d_ff] and its output [..., d_model]. expert: its number, None: there are none.
    """

    expert: int | None
    x: Tensor
    gate: Tensor | None
    up: Tensor
    h: Tensor
    out: Tensor


Hidden = Callable[[str, "Tensor | None", Tensor], Tensor]
"""h from the name of an FFN (`layers.N.`, of experts `layers.N.experts_`, `layers.N.shared_`), and gate and up."""

ROUNDED = {"q4_0": (16, False), "q5_0": (32, False), "q4_1": (16, True), "q5_1": (32, True)}
"""Types that `TorchModel.rounded` may state: the number of their codes, and whether a block has a least value of its
own. Finer ones are not worth it."""

Observer = Callable[[str, NeuronValues], None]
"""Called with the name of an FFN and what happened there."""


def activate(
    config: FfnConfig | ExpertsConfig,
    gate: Tensor | None,
    up: Tensor,
    thresholds: Tensor | None = None,
    product_thresholds: Tensor | None = None,
) -> Tensor:
    """h of neurons, as `tests/reference.py` defines it. thresholds: [d_ff], where each neuron has its own;
    product_thresholds: [d_ff], of h, or None."""
    linear = up if gate is None else gate
    if config.activation == "swiglu_oai":
        linear = linear.clamp(max=OAI_LIMIT)
        return linear * torch.sigmoid(OAI_SCALE * linear) * (up.clamp(-OAI_LIMIT, OAI_LIMIT) + 1)
    threshold = config.threshold if thresholds is None else thresholds
    match config.activation:
        case "silu":
            active = functional.silu(linear)
        case "gelu_tanh":
            active = functional.gelu(linear, approximate="tanh")
        case "relu" | "drelu":
            active = functional.relu(linear)
        case "relu2":
            active = functional.relu(linear).square()
        case "cats":
            active = functional.silu(linear)
            active = torch.where(active.abs() > threshold, active, 0)
        case "xielu":
            above, below, beta, least = cast(FfnConfig, config).curve
            more = torch.expm1(linear.clamp(max=least)) - linear
            active = torch.where(linear > 0, above * linear * linear, below * more) + beta * linear
        case "topk":
            assert thresholds is not None
            active = functional.silu(linear)
            active = torch.where(largest(active.abs() / thresholds, int(config.threshold)), active, 0)
        case _:
            active = torch.where(linear > threshold, linear, 0)
    if gate is None:
        return active
    h = active * (functional.relu(up) if config.activation == "drelu" else up)
    return h if product_thresholds is None else torch.where(h.abs() <= product_thresholds, 0, h)


def largest(ranked: Tensor, count: int) -> Tensor:
    """bool, of the shape of ranked [..., neurons]: those among the `kept` largest of their bank of BANK neurons, the
    first among equals."""
    order = ranked.unflatten(-1, (-1, BANK)).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    mask = torch.zeros((*ranked.shape[:-1], ranked.shape[-1] // BANK, BANK), dtype=torch.bool, device=ranked.device)
    return mask.scatter_(-1, order, True).flatten(-2)


class TorchModel:
    """Weights by canonical name, and the forward pass over whole windows of text.

    Matrices are multiplied in `compute`; norms, the residual stream, the router and the logits are float32. rounded:
    by name, matrices that are used as a type of `ROUNDED` stores them, with the gradient of what they are rounded from;
    blocks: by name, matrices whose weights here are the moves of their scales; transposed: of both, the ones that are
    stored transposed.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], compute: torch.dtype) -> None:
        self.config, self.compute = config, compute
        self.weights = weights
        self.hidden: Hidden = self._plain
        self.rounded: Mapping[str, str] = {}
        self.blocks: Mapping[str, Blocks] = {}
        self.transposed: Container[str] = ()
        self._unstacked: dict[str, tuple[Tensor, ...]] = {}  # of stacked matrices, those of each expert
        self._rotations: dict[tuple[RopeConfig, int], tuple[Tensor, Tensor]] = {}

    # ------------------------------------------------------------------------------------------------ parts

    def _raw_weight(self, name: str, expert: int | None) -> Tensor:
        if expert is None:
            return self.weights[name]
        return self._unstacked.get(name, self.weights[name])[expert]

    def weight(self, name: str, expert: int | None = None) -> Tensor:
        """The weight with which products are made."""
        weight, kind, blocks = self._raw_weight(name, expert), self.rounded.get(name), self._blocks(name, expert)
        if blocks is not None:
            weight = blocks.values(weight).mT if name in self.transposed else blocks.values(weight)
        elif kind is not None:
            weight = _rounded(weight.mT, kind).mT if name in self.transposed else _rounded(weight, kind)
        return weight.to(self.compute)

    def _blocks(self, name: str, expert: int | None) -> Blocks | None:
        blocks = self.blocks.get(name)
        return blocks if blocks is None or expert is None else blocks.expert(expert)

    def linear(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        """x [..., in] times a matrix, with its bias if there is one, in `compute`."""
        bias, blocks_, x = self.weights.get(name + "_bias"), self._blocks(name, expert), x.to(self.compute)
        if blocks_ is None or name in self.transposed:
            out = functional.linear(x, self.weight(name, expert))
        else:
            out = blocks.linear(x, self._raw_weight(name, expert), blocks_)
        if bias is None:
            return out
        return out + (bias if expert is None else bias[expert]).to(out.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        if name not in self.weights:
            return x
        weight, eps = self.weights[name], self.config.norm_eps
        if name.endswith("out_norm") and self.config.out_norm_eps is not None:
            eps = self.config.out_norm_eps
        if self.config.norm == "layer":
            return functional.layer_norm(x, x.shape[-1:], weight, self.weights.get(name + "_bias"), eps)
        return _Rms.apply(x, weight, eps)

    def _rotation(self, rope: RopeConfig, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = rope, tokens
        if key not in self._rotations:
            frequencies, factor = rope_frequencies(rope, tokens)
            angles = torch.outer(torch.arange(tokens).float(), torch.from_numpy(frequencies.copy()))
            self._rotations[key] = (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)
        return self._rotations[key]

    def rotate(self, x: Tensor, rope: RopeConfig) -> Tensor:
        """x [batch, tokens, heads, dim], whose first `rope.dim` dimensions turn."""
        cos, sin = (part[:, None] for part in self._rotation(rope, x.shape[1], x.device))
        rotated: Tensor = _Rotated.apply(x, cos, sin, rope.interleaved)
        return rotated

    def _attention(self, x: Tensor, name: str, config: AttentionConfig) -> Tensor:
        heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
        parts, x = {}, x.to(self.compute)
        for part in heads:
            product = self.linear(x, name + (part if part in config.projections else "k"))
            if config.qkv_clip is not None:
                product = product.clamp(-config.qkv_clip, config.qkv_clip)
            if part != "v" and config.qk_norm == "width":
                product = self.inner_norm(product, f"{name}{part}_norm")
            product = product.unflatten(-1, (heads[part], config.head_dim))
            if part != "v":
                product = self._normed_heads(product, f"{name}{part}_norm", config)
            elif config.v_norm:
                product = self.plain_norm(product)
            if part != "v" and config.rope is not None:
                product = self.rotate(product, config.rope)
            if part != "v" and config.rotates_first:
                product = self.inner_norm(product, f"{name}{part}_norm")
            parts[part] = product.transpose(1, 2)
        q, k, v = (parts[part] for part in "qkv")
        sinks = self.weights[name + "sinks"] if config.sinks else None
        mixed = attend_windows(q, k, v, config, sinks).transpose(1, 2).flatten(-2)
        return self.linear(self.gate_attended(mixed, x, name, config), name + "o")

    def gate_attended(self, mixed: Tensor, x: Tensor, name: str, config: AttentionConfig) -> Tensor:
        """Gate and normalise what heads give, for o."""
        if isinstance(config, GatedAttentionConfig):
            gate = self.linear(x, name + "q_gate")
            if config.by_head:
                gate = torch.nn.functional.softplus(gate).repeat_interleave(config.head_dim, -1)
            mixed = mixed * (gate if config.by_head else torch.sigmoid(gate))
        if config.attended_norm:
            mixed = self.inner_norm(mixed, name + "attended_norm")
        return mixed

    def _normed_heads(self, x: Tensor, name: str, config: AttentionConfig) -> Tensor:
        """Heads of queries or keys, [..., heads, head_dim], with the norm that precedes their rotation."""
        match config.qk_norm:
            case "head":
                return self.inner_norm(x, name)
            case "plain":
                return self.plain_norm(x)
            case "separate":
                plain = functional.layer_norm(x.float(), x.shape[-1:], eps=self.config.norm_eps)
                return (plain * self.weights[name]).to(x.dtype)
            case _:
                return x

    def inner_norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """The RMS norm within attention, in the type of x [..., n]. eps: None, the model's."""
        return _Rms.apply(x.float(), self.weights[name], self.config.norm_eps if eps is None else eps).to(x.dtype)

    def plain_norm(self, x: Tensor) -> Tensor:
        """The same without weights."""
        return _Rms.apply(x.float(), torch.ones(x.shape[-1], device=x.device), self.config.norm_eps).to(x.dtype)

    def _plain(self, name: str, gate: Tensor | None, up: Tensor) -> Tensor:
        ffn = self.config.layers[int(name.split(".")[1])].ffn
        assert isinstance(ffn, FfnConfig | ExpertsConfig)
        thresholds = (self.weights.get(name + part) for part in ("threshold", "product_threshold"))
        h = activate(ffn, gate, up, *thresholds)
        return self.inner_norm(h, name + "inner_norm") if name + "inner_norm" in self.weights else h

    def neurons(self, x: Tensor, name: str, expert: int | None = None) -> NeuronValues:
        """The sum of neurons whose matrices are `name` + gate, up and down, of x [..., d_model] behind the norm."""
        x = x.to(self.compute)
        gate = self.linear(x, name + "gate", expert) if name + "gate" in self.weights else None
        up = self.linear(x, name + "up", expert)
        h = self.hidden(name, gate, up)
        return NeuronValues(expert, x, gate, up, h, self.linear(h, name + "down", expert))

    def _selected(self, x: Tensor, name: str, router: RouterConfig) -> tuple[Tensor, Tensor]:
        """(experts of each row of x, their weights), [rows, top_k]."""
        scores = functional.linear(x.float(), self.weights[name + "router"].float())
        if router.bias:
            scores = scores + self.weights[name + "router_bias"]
        if router.scoring == "sparsemixer":
            return mix_experts(scores, router)
        scores = scores.sigmoid() if router.scoring == "sigmoid" else scores.softmax(-1)
        ranked = scores + self.weights[name + "router_correction_bias"] if router.correction else scores
        if router.groups > 1:
            grouped = ranked.unflatten(-1, (router.groups, -1))
            best = grouped.topk(router.group_best, -1).values.sum(-1).topk(router.top_groups, -1).indices
            kept_groups = torch.zeros_like(grouped[..., 0]).scatter_(-1, best, 1) > 0
            ranked = grouped.masked_fill(~kept_groups[..., None], float("-inf")).flatten(-2)
        selected = ranked.topk(router.top_k, -1).indices
        weights = scores.gather(-1, selected)
        if router.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return selected, weights * router.scale

    def _experts(self, x: Tensor, routed: Tensor, name: str, config: ExpertsConfig, observe: Observer | None) -> Tensor:
        """The selected experts' weighted sum and the shared expert's, float32. routed: what the router reads."""
        rows = x.flatten(0, -2)
        selected, weights = self._selected(routed.flatten(0, -2), name, config.router)
        total = torch.zeros(rows.shape, device=rows.device)
        # one gradient of the whole stack, not one for each expert
        stacks = [f"{name}experts_{part}" for part in config.matrices]
        self._unstacked = {stack: self.weights[stack].unbind(0) for stack in stacks}
        for expert in range(config.n_experts):
            row, place = (selected == expert).nonzero(as_tuple=True)
            if len(row):
                read, weight = rows[row], weights[row, place, None]
                if config.router.scales_input:
                    read, weight = read * weight.to(read.dtype), torch.ones_like(weight)
                done = self.neurons(read, name + "experts_", expert)
                if observe is not None:
                    observe(name + "experts_", done)
                total = total.index_add(0, row, done.out.float() * weight)
        self._unstacked = {}
        if config.shared_size:
            done = self.neurons(rows, name + "shared_")
            if observe is not None:
                observe(name + "shared_", done)
            out = done.out.float()
            if config.shared_weight:
                out = out * torch.sigmoid(rows.float() @ self.weights[name + "shared_weight"].float())[:, None]
            total = total + out
        return total.view(x.shape)

    # ------------------------------------------------------------------------------------------------ the whole

    def states(self, tokens: Tensor, observe: Observer | None = None) -> Tensor:
        """int64 [batch, tokens] -> what the head reads, float32 [batch, tokens, width]."""
        x = self.enter(tokens)
        for layer in range(self.config.n_layers):
            x = self._layer(x, layer, observe)
        return self.leave(x)

    def enter(self, tokens: Tensor) -> Tensor:
        """int64 [batch, tokens] -> what the first layer reads, float32 [batch, tokens, d_model]."""
        config = self.config
        x = functional.embedding(tokens, self.weights["embed"]).float()
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        if config.embed_dim:
            x = self.linear(x, "project_in").float()
        if config.positions == "learned":
            x = x + self.weights["positions"][config.position_offset :][: tokens.shape[1]]
        return self.plain_norm(x) if config.embed_norm else x

    def leave(self, x: Tensor) -> Tensor:
        """The last layer's output -> the head's input."""
        x = self._norm(x, "final_norm")
        return self.linear(x, "project_out").float() if self.config.embed_dim else x

    def _layer(self, x: Tensor, layer: int, observe: Observer | None) -> Tensor:
        config, name, scale = self.config.layers[layer], f"layers.{layer}.", self.config.residual_scale

        def scaled(value: Tensor) -> Tensor:
            return value.float() if scale == 1 else value.float() * scale

        def attend(value: Tensor) -> Tensor:
            return scaled(ATTENTIONS[type(config.attention)](self, value, name, config.attention))

        entered = x

        def sum_neurons(value: Tensor) -> Tensor:
            if isinstance(config.ffn, ExpertsConfig):
                routed = entered if config.ffn.early_router else value
                return scaled(self._experts(value, routed, name, config.ffn, observe)) * config.ffn_factors[1]
            done = self.neurons(value, name)
            if observe is not None:
                observe(name, done)
            return scaled(done.out) * config.ffn_factors[1]

        if config.norms == "post":
            x = self._norm(x + attend(x), name + "attn_norm")
            return self._norm(x + sum_neurons(x), name + "ffn_norm")
        normed = self._norm(x, name + "attn_norm")
        attended = self._norm(attend(normed), name + "attn_out_norm")
        if config.parallel:
            scale_ = normed if config.shared_norm else self._norm(x, name + "ffn_norm")
            return x + attended + sum_neurons(scale_)
        x = x + attended
        x = x + self._norm(sum_neurons(self._norm(x, name + "ffn_norm")), name + "ffn_out_norm")
        return x * self.weights[name + "out_scale"] if config.out_scale else x

    def products(self, states: Tensor) -> Tensor:
        """Products of states with the head, in the type that is computed in [..., vocab]."""
        return functional.linear(states.to(self.compute), self._head())

    def scaled(self, products: Tensor) -> Tensor:
        """The logits that `products` become, float32."""
        logits, cap = products.float(), self.config.logit_cap
        if self.config.head_bias:
            logits = logits + self.weights["head_bias"]
        logits = logits if self.config.logit_scale == 1 else logits * self.config.logit_scale
        return logits if cap is None else (logits / cap).tanh() * cap

    def logits(self, states: Tensor) -> Tensor:
        """float32 [..., vocab]."""
        return self.scaled(self.products(states))

    def states_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient for `states` of one for their logits, [..., vocab] -> float32 [..., width]."""
        return (gradient.to(self.compute) @ self._head()).float() * self.config.logit_scale

    def _head(self) -> Tensor:
        return self.weight("embed" if self.config.tied_embeddings else "head")


ATTENTIONS: dict[type, Callable[[TorchModel, Tensor, str, Any], Tensor]] = {
    AttentionConfig: TorchModel._attention,
    GatedAttentionConfig: TorchModel._attention,
    LatentAttentionConfig: attend_latents,
    DeltaNetConfig: remember,
}
"""Output of a layer's attention, by the class of `LayerConfig.attention`: called with (model, what it reads [batch,
tokens, d_model], `layers.N.`, its configuration)."""


class _Rotated(torch.autograd.Function):  # type: ignore[misc]
    """x [..., tokens, heads, dim] whose pairs are turned by angles, computed in float32: cos, sin [tokens, 1, pairs].
    The way back turns the gradient by the opposite angles. As one function, for the reason of `training._Cut`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin, ctx.interleaved), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.shape[-1]
    places = (slice(pairs), slice(pairs, 2 * pairs))
    if interleaved:
        places = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    first, second = (x[..., place].float() for place in places)
    out = torch.empty_like(x) if x.shape[-1] == 2 * pairs else x.clone()
    out[..., places[0]] = (first * cos).addcmul_(second, sin, value=-1)
    out[..., places[1]] = (first * sin).addcmul_(second, cos)
    return out


class _Rms(torch.autograd.Function):  # type: ignore[misc]
    """`rms_norm` over the last dimension, float32. As one function, for the reason of `training._Cut`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps)).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """d x = inverse * (g - y * mean(g * y)), g the gradient times the weight and y = x * inverse."""
        x, weight, inverse = ctx.saved_tensors
        gradient = gradients[0] * weight
        mean = torch.linalg.vecdot(gradient, x).unsqueeze(-1).mul_(inverse.square() / x.shape[-1])
        return gradient.addcmul_(x, mean, value=-1).mul_(inverse), None, None


def _rounded(weight: Tensor, kind: str) -> Tensor:
    return _Rounded.apply(weight, *ROUNDED[kind])


class _Rounded(torch.autograd.Function):  # type: ignore[misc]
    """A matrix as a type of `ROUNDED` stores it (`formats.quant.quantize`); the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, codes: int, floored: bool) -> Tensor:
        blocks = weight.unflatten(-1, (-1, 32))
        high, low = blocks.amax(-1, True), blocks.amin(-1, True)
        if floored:  # from the least value up
            scale, zero = (high - low) / (codes - 1), 0.0
            codes_ = blocks - low
        else:  # the value farthest from zero has the code 0
            scale, zero = torch.where(high > -low, high, low) / -(codes / 2), codes / 2
            codes_ = blocks
        codes_ = (codes_ * torch.where(scale == 0, 0, 1 / scale)).add_(zero + 0.5).floor_().clamp_(0, codes - 1)
        codes_ = codes_.sub_(zero).mul_(scale.half().float())
        return (codes_.add_(low.half().float()) if floored else codes_).view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def load(checkpoint: Checkpoint, leave: Container[str] = ()) -> dict[str, Tensor]:
    """All weights of a model but those to leave, by canonical name, dequantised to float32."""
    weights = {}
    for name, _ in shapes(checkpoint.config):
        if checkpoint.has(name) and name not in leave:
            weights[name] = torch.from_numpy(checkpoint.take(name).float32().copy())
            checkpoint.release()
    return weights


def narrowed(weights: Mapping[str, Tensor], compute: torch.dtype) -> dict[str, Tensor]:
    """The weights with all matrices in the type that they are multiplied in."""
    return {name: value.to(compute) if is_matrix(name, value.shape) else value for name, value in weights.items()}
