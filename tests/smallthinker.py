"""SmallThinker in plain torch, after its paper (arXiv 2507.20984) and the names of its published files.

`transformers` does not have it. It computes in the type of its weights: norms, softmax and angles too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class SmallThinkerConfig(PretrainedConfig):
    """Layouts have 0 or 1 for each layer."""

    model_type = "smallthinker"

    def __init__(
        self,
        hidden_size: int = 64,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int = 16,
        vocab_size: int = 101,
        max_position_embeddings: int = 128,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        rope_layout: list[int] | None = None,
        sliding_window_layout: list[int] | None = None,
        sliding_window_size: int = 20,
        moe_num_primary_experts: int = 6,
        moe_num_active_primary_experts: int = 3,
        moe_ffn_hidden_size: int = 40,
        moe_primary_router_apply_softmax: bool = False,
        router_first: bool = True,
        **others: Any,
    ) -> None:
        """router_first: the router reads what attention's norm does, as the family's do; else what the experts read."""
        self.hidden_size, self.num_hidden_layers, self.vocab_size = hidden_size, num_hidden_layers, vocab_size
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim, self.max_position_embeddings = head_dim, max_position_embeddings
        self.rms_norm_eps, self.rope_theta = rms_norm_eps, rope_theta
        self.rope_layout = rope_layout or [1] * num_hidden_layers
        self.sliding_window_layout = sliding_window_layout or [0] * num_hidden_layers
        self.sliding_window_size = sliding_window_size
        self.moe_num_primary_experts = moe_num_primary_experts
        self.moe_num_active_primary_experts = moe_num_active_primary_experts
        self.moe_ffn_hidden_size = moe_ffn_hidden_size
        self.moe_primary_router_apply_softmax = moe_primary_router_apply_softmax
        self.router_first = router_first
        super().__init__(**others)


class Norm(nn.Module):
    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(config.hidden_size)), config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, config: SmallThinkerConfig, layer: int) -> None:
        super().__init__()
        width, self.dim, self.theta = config.hidden_size, config.head_dim, config.rope_theta
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.turns = config.rope_layout[layer]
        self.window = config.sliding_window_size if config.sliding_window_layout[layer] else None
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, self.kv * self.dim, bias=False) for _ in "kv")
        self.o_proj = nn.Linear(self.heads * self.dim, width, bias=False)

    def rotated(self, x: Tensor) -> Tensor:
        """x [heads, T, dim]; pairs are (i, i + dim / 2)."""
        exponents = torch.arange(0, self.dim, 2, dtype=x.dtype) / self.dim
        angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / self.theta**exponents
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        every = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.view(len(x), -1, self.dim).transpose(0, 1) for part in every)
        if self.turns:
            q, k = self.rotated(q), self.rotated(k)
        k, v = (part.repeat_interleave(self.heads // self.kv, dim=0) for part in (k, v))
        scores = q @ k.transpose(-1, -2) * self.dim**-0.5
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool)
        hidden = ones.triu(1) if self.window is None else ones.triu(1) | ones.tril(-self.window)
        attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.o_proj(attended.transpose(0, 1).reshape(len(x), -1))


class Expert(nn.Module):
    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.moe_ffn_hidden_size
        self.gate, self.up = (nn.Linear(width, size, bias=False) for _ in range(2))
        self.down = nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__()
        self.top, self.softmax = config.moe_num_active_primary_experts, config.moe_primary_router_apply_softmax
        self.primary_router = nn.Linear(config.hidden_size, config.moe_num_primary_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.moe_num_primary_experts))

    def forward(self, read: Tensor, x: Tensor) -> Tensor:
        """read: what the router reads."""
        best, selected = self.primary_router(read).topk(self.top, dim=-1)
        weights = best.softmax(-1) if self.softmax else best.sigmoid() / best.sigmoid().sum(-1, keepdim=True)
        every = torch.stack([expert(x) for expert in self.experts], dim=1)  # of all experts, [T, experts, width]
        own = every.gather(1, selected[:, :, None].expand(-1, -1, x.shape[-1]))
        return (weights[:, :, None] * own).sum(1)


class Layer(nn.Module):
    def __init__(self, config: SmallThinkerConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(config), Norm(config)
        self.self_attn, self.block_sparse_moe = Attention(config, layer), Experts(config)
        self.first = config.router_first

    def forward(self, x: Tensor) -> Tensor:
        attended = x + self.self_attn(self.input_layernorm(x))
        inner = self.post_attention_layernorm(attended)
        return attended + self.block_sparse_moe(x if self.first else inner, inner)


class Decoder(nn.Module):
    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config)


class SmallThinkerForCausalLM(PreTrainedModel):
    config_class = SmallThinkerConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """input_ids [1, T] -> logits [1, T, vocab]."""
        x = self.model.embed_tokens(input_ids[0])
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(self.model.norm(x))[None])


AutoConfig.register("smallthinker", SmallThinkerConfig)
AutoModelForCausalLM.register(SmallThinkerConfig, SmallThinkerForCausalLM)
