"""OpenELM in plain torch, after its paper (arXiv 2404.14619) and the names of its published files.

`transformers` does not have it. It computes in the type of its weights: norms, softmax and angles too.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

ACTIVATIONS = {"swish": torch.nn.functional.silu, "relu": torch.relu}


class OpenELMConfig(PretrainedConfig):
    """Lists have a value for each layer."""

    model_type = "openelm"
    attribute_map: ClassVar = {
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_transformer_layers",
        "max_position_embeddings": "max_context_length",
        "tie_word_embeddings": "share_input_output_layers",
    }

    def __init__(
        self,
        model_dim: int = 64,
        head_dim: int = 16,
        num_transformer_layers: int = 3,
        num_query_heads: list[int] | None = None,
        num_kv_heads: list[int] | None = None,
        ffn_multipliers: list[float] | None = None,
        ffn_dim_divisor: int = 8,
        activation_fn_name: str = "swish",
        normalize_qk_projections: bool = True,
        rope_freq_constant: float = 10000.0,
        max_context_length: int = 128,
        share_input_output_layers: bool = True,
        vocab_size: int = 101,
        **others: Any,
    ) -> None:
        self.model_dim, self.head_dim, self.vocab_size = model_dim, head_dim, vocab_size
        self.num_transformer_layers = num_transformer_layers
        self.num_query_heads, self.num_kv_heads = num_query_heads, num_kv_heads
        self.ffn_multipliers, self.ffn_dim_divisor = ffn_multipliers, ffn_dim_divisor
        self.ffn_with_glu, self.normalization_layer_name = True, "rms_norm"
        self.activation_fn_name = activation_fn_name
        self.normalize_qk_projections = normalize_qk_projections
        self.rope_freq_constant = rope_freq_constant
        self.max_context_length = max_context_length
        self.share_input_output_layers = share_input_output_layers
        self.rms_norm_eps = 1e-6
        super().__init__(**others)

    def ffn_size(self, layer: int) -> int:
        """Neurons of a layer."""
        wanted, step = self.ffn_multipliers[layer] * self.model_dim, self.ffn_dim_divisor
        size = max(step, int(wanted + step / 2) // step * step)
        return size + step if size < 0.9 * wanted else size


class Norm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, config: OpenELMConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = config.num_query_heads[layer], config.num_kv_heads[layer], config.head_dim
        self.theta = config.rope_freq_constant
        self.qkv_proj = nn.Linear(config.model_dim, (self.heads + 2 * self.kv) * self.dim, bias=False)
        self.out_proj = nn.Linear(self.heads * self.dim, config.model_dim, bias=False)
        own = config.normalize_qk_projections
        self.q_norm, self.k_norm = (Norm(self.dim) if own else nn.Identity() for _ in "qk")

    def rotated(self, x: Tensor) -> Tensor:
        """x [heads, T, dim]; pairs are (i, i + dim / 2)."""
        exponents = torch.arange(0, self.dim, 2, dtype=x.dtype) / self.dim
        angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / self.theta**exponents
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        every = self.qkv_proj(x[0]).view(x.shape[1], -1, self.dim).transpose(0, 1)
        q, k, v = every.split([self.heads, self.kv, self.kv])
        q, k = self.rotated(self.q_norm(q)), self.rotated(self.k_norm(k))
        k, v = (part.repeat_interleave(self.heads // self.kv, dim=0) for part in (k, v))
        scores = q @ k.transpose(-1, -2) * self.dim**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out_proj(attended.transpose(0, 1).reshape(1, x.shape[1], -1))


class Ffn(nn.Module):
    def __init__(self, config: OpenELMConfig, layer: int) -> None:
        super().__init__()
        size = config.ffn_size(layer)
        self.act = ACTIVATIONS[config.activation_fn_name]
        self.proj_1 = nn.Linear(config.model_dim, 2 * size, bias=False)
        self.proj_2 = nn.Linear(size, config.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.proj_1(x).chunk(2, dim=-1)
        return self.proj_2(self.act(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: OpenELMConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = Norm(config.model_dim), Norm(config.model_dim)
        self.attn, self.ffn = Attention(config, layer), Ffn(config, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, config: OpenELMConfig) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_transformer_layers))
        self.norm = Norm(config.model_dim)


class OpenELMForCausalLM(PreTrainedModel):
    config_class = OpenELMConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: OpenELMConfig) -> None:
        super().__init__(config)
        self.transformer = Decoder(config)
        self.post_init()

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """input_ids [1, T] -> logits [1, T, vocab]."""
        x = self.transformer.token_embeddings(input_ids)
        for layer in self.transformer.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.transformer.norm(x) @ self.transformer.token_embeddings.weight.T)


AutoConfig.register("openelm", OpenELMConfig)
AutoModelForCausalLM.register(OpenELMConfig, OpenELMForCausalLM)
