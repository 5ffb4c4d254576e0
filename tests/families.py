"""Cases of every architecture: tiny random models of `transformers`, in their files, and what runs them here.

The truth is `transformers` run in float64 throughout (truth.py keeps it). The bound on this engine's error is four
times the error that `transformers` itself makes in float32: both sum the same terms, and where a vectorised sum keeps
16 partial sums of n/16 terms, a plain chain of n terms is off by up to sqrt(16) = 4 times as much (rounding errors add
up as a random walk). Every case also names a change of its configuration that must be noticed: a truth that no longer
told a wrong configuration from a right one would make the case worthless.

Families that `transformers` does not have are its nearest one with another FFN, written here from the papers: ProSparse
(arXiv 2402.13516) and TurboSparse (2406.05955), whose FFN Bamboo has as well. OpenELM is in plain torch (openelm.py).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

import gemma_files  # noqa: E402
import kimi_files  # noqa: E402
import lfm2_files  # noqa: E402
import mamba_files  # noqa: E402
import openelm  # noqa: E402, F401
import renamed_families  # noqa: E402
import smallthinker  # noqa: E402, F401

from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import Batch, Executor  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.models import load  # noqa: E402

TOKENS = 75  # more than two pages of 32, and not a multiple of any block
CONTEXT = 128
ROUNDING = 4.0
SIZES: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF_ROPE = PLAIN_ROPE | {"partial_rotary_factor": 0.5}
# Settings of a family beside SIZES; those of kinds that are not here are LLAMA's.
LLAMA: dict[str, Any] = dict(
    intermediate_size=88, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_parameters=PLAIN_ROPE
)
QUARTER_ROPE = PLAIN_ROPE | {"partial_rotary_factor": 0.25}
DELTA = LLAMA | dict(
    num_hidden_layers=4, head_dim=32, rope_parameters=QUARTER_ROPE, linear_num_key_heads=2, linear_key_head_dim=16,
    linear_num_value_heads=4, linear_value_head_dim=32, shared_expert_intermediate_size=72,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": dict(ffn_dim=88, word_embed_proj_dim=64),
    "falcon": dict(ffn_hidden_size=88, activation="relu", rope_parameters=PLAIN_ROPE),
    "nemotron": dict(intermediate_size=88, num_key_value_heads=2, head_dim=16, rope_parameters=HALF_ROPE),
    "nanochat": dict(
        intermediate_size=88, num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters=PLAIN_ROPE,
        final_logit_softcapping=15.0,
    ),
    "jais2": dict(intermediate_size=88, num_key_value_heads=2, head_dim=16, rope_parameters=PLAIN_ROPE),
}
# Sizes of latent attention that fill no lanes.
LATENT: dict[str, Any] = dict(
    intermediate_size=88, num_key_value_heads=4, rms_norm_eps=1e-6, rope_parameters=PLAIN_ROPE,
    kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, first_k_dense_replace=1,
    routed_scaling_factor=1.7,
)  # fmt: skip
GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.3, logits_scaling=5.0)
FAMILIES |= {
    "gemma3_text": dict(
        intermediate_size=88, num_key_value_heads=2, head_dim=24, rms_norm_eps=1e-5, num_hidden_layers=6,
        sliding_window=20, query_pre_attn_scalar=24, tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
            "sliding_attention": PLAIN_ROPE,
        },
    ),
    "gemma2": dict(
        intermediate_size=88, num_key_value_heads=2, head_dim=24, rms_norm_eps=1e-5, num_hidden_layers=4,
        sliding_window=20, query_pre_attn_scalar=24, attn_logit_softcapping=3.0, final_logit_softcapping=20.0,
        tie_word_embeddings=True, rope_parameters=PLAIN_ROPE,
    ),
    "gemma4_text": dict(
        intermediate_size=88, num_key_value_heads=2, head_dim=24, global_head_dim=40, num_global_key_value_heads=1,
        attention_k_eq_v=True, rms_norm_eps=1e-5, num_hidden_layers=4, sliding_window=20, final_logit_softcapping=20.0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=101, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
            "sliding_attention": PLAIN_ROPE,
        },
    ),
    "gemma3n_text": dict(
        intermediate_size=88, num_key_value_heads=2, head_dim=24, rms_norm_eps=1e-5, num_hidden_layers=6,
        sliding_window=20, final_logit_softcapping=20.0, tie_word_embeddings=True, laurel_rank=12,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=90, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        activation_sparsity_pattern=[0.95, 0.8, 0.3, 0.0, 0.6, 0.0],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0}, "sliding_attention": PLAIN_ROPE,
        },
    ),
    "phi3": dict(
        intermediate_size=88, num_key_value_heads=2, rms_norm_eps=1e-5, sliding_window=None,
        original_max_position_embeddings=64, rope_parameters=PLAIN_ROPE,
    ),
    "olmo3": LLAMA | dict(num_hidden_layers=4, sliding_window=20),
    "mixtral": LLAMA | dict(num_local_experts=6, num_experts_per_tok=2),
    "qwen2_moe": LLAMA | dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=72,
    ),
    "qwen3_moe": LLAMA | dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True,
    ),
    "olmoe": LLAMA | dict(num_experts=8, num_experts_per_tok=3),
    "phimoe": LLAMA | dict(num_local_experts=6),
    "glm4_moe": LLAMA | dict(
        n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, routed_scaling_factor=1.7,
        rope_parameters=HALF_ROPE,
    ),
    "qwen3_5_text": DELTA | dict(num_key_value_heads=1),
    "qwen3_5_moe_text": DELTA | dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40),
    "qwen3_next": DELTA | dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40),
    "deepseek_v2": LATENT | dict(q_lora_rank=None, n_shared_experts=2, topk_method="greedy"),
    "deepseek_v3": LATENT | dict(q_lora_rank=20, n_group=1, topk_group=1),
    "mistral4": LATENT | dict(q_lora_rank=20, n_shared_experts=2),
    "kimi_linear": dict(
        intermediate_size=88, num_hidden_layers=5, num_key_value_heads=4, rms_norm_eps=1e-6, kv_lora_rank=24,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, num_local_experts=8, num_experts_per_tok=3,
        n_shared_experts=2, moe_intermediate_size=40, routed_scaling_factor=1.7, linear_head_dim=16, linear_num_heads=4,
        layer_types=[*["linear_attention"] * 3, "full_attention", "linear_attention"],
    ),
    "plm": LATENT | dict(
        q_lora_rank=None, first_k_dense_replace=3, tie_word_embeddings=True, rope_interleave=True,
        mlp_layer_types=["dense"] * 3,
    ),
    "glm4_moe_lite": LATENT | dict(q_lora_rank=20, mlp_layer_types=["dense", "sparse", "sparse"]),
    "granite": LLAMA | GRANITE,
    "granite_swa": LLAMA | GRANITE | dict(num_hidden_layers=5, sliding_window=20),
    "granitemoe_swa": LLAMA | GRANITE | dict(
        num_hidden_layers=5, sliding_window=20, num_local_experts=6, num_experts_per_tok=3, intermediate_size=40,
        shared_intermediate_size=72,
    ),
    "granitemoe": LLAMA | GRANITE | dict(num_local_experts=6, num_experts_per_tok=3),
    "granitemoeshared": LLAMA | GRANITE | dict(
        num_local_experts=6, num_experts_per_tok=3, intermediate_size=40, shared_intermediate_size=72,
    ),
    "exaone4": LLAMA | dict(num_hidden_layers=4, sliding_window=20),
    "cohere2": dict(
        intermediate_size=88, num_key_value_heads=2, layer_norm_eps=1e-5, num_hidden_layers=4, sliding_window=20,
        logit_scale=0.25, tie_word_embeddings=True, rope_parameters=PLAIN_ROPE,
    ),
    "muse_glimmer_text": dict(
        intermediate_size=88, num_key_value_heads=2, head_dim=24, rms_norm_eps=1e-5, num_hidden_layers=6,
        sliding_window=20, final_logit_softcapping=20.0, post_norm_eps=1e-8, rope_parameters=PLAIN_ROPE,
        output_multiplier=0.4, qk_scale_factor=2.5,
    ),
    "cohere2_moe": dict(
        intermediate_size=40, num_key_value_heads=2, head_dim=24, layer_norm_eps=1e-5, num_hidden_layers=6,
        sliding_window=20, logit_scale=0.25, tie_word_embeddings=True, rope_parameters=PLAIN_ROPE, num_experts=6,
        num_experts_per_tok=3, num_shared_experts=2, expert_selection_fn="sigmoid", first_k_dense_replace=2,
        prefix_dense_intermediate_size=88,
    ),
    "stablelm": dict(
        intermediate_size=88, num_key_value_heads=2, layer_norm_eps=1e-5, rope_parameters=QUARTER_ROPE,
    ),
    "olmo": dict(intermediate_size=88, num_key_value_heads=2, rope_parameters=PLAIN_ROPE),
    "smallthinker": dict(num_hidden_layers=5),
    "minicpm": LLAMA | dict(
        embedding_multiplier=12.0, residual_multiplier=1.4 / math.sqrt(3), attention_multiplier=0.25,
        logits_scaling=4.0,
    ),
    "dots1": LLAMA | dict(
        n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, n_shared_experts=2, norm_topk_prob=True,
        first_k_dense_replace=1, routed_scaling_factor=1.7,
    ),
    "bailing_moe": LLAMA | dict(
        n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, routed_scaling_factor=1.7, n_group=4,
        topk_group=2, use_qk_norm=True, attention_bias=False, rope_parameters=HALF_ROPE,
    ),
    "bailing_moe_1": LLAMA | dict(
        num_local_experts=6, num_experts_per_tok=3, intermediate_size=40, shared_intermediate_size=80,
        embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=0.25, logits_scaling=1.0,
    ),
    "smollm3": LLAMA | dict(num_hidden_layers=5),
    "glm4": LLAMA | dict(rope_parameters=HALF_ROPE),
    "ernie4_5_moe": LLAMA | dict(
        moe_num_experts=6, moe_k=3, moe_intermediate_size=40, moe_layer_start_index=1, tie_word_embeddings=True,
    ),
    "llama4_text": LLAMA | dict(
        intermediate_size=40, intermediate_size_mlp=88, num_hidden_layers=4, num_local_experts=6,
        num_experts_per_tok=1, interleave_moe_layer_step=2,
    ),
    "laguna": LLAMA | dict(
        num_hidden_layers=4, num_attention_heads_per_layer=[2, 4, 6, 4], num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=40, shared_expert_intermediate_size=72, moe_routed_scaling_factor=1.7,
        layer_types=["full_attention", *["sliding_attention"] * 3], sliding_window=20,
        rope_parameters={"full_attention": HALF_ROPE, "sliding_attention": PLAIN_ROPE | {"rope_theta": 20000.0}},
    ),
    "minimax_m2": LLAMA | dict(
        intermediate_size=40, num_local_experts=6, num_experts_per_tok=3, rope_parameters=HALF_ROPE,
    ),
    "gpt_oss": dict(
        intermediate_size=96, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, num_hidden_layers=4,
        num_local_experts=6, num_experts_per_tok=2, sliding_window=20, rope_parameters=PLAIN_ROPE,
    ),
    "nemotron_h": dict(
        num_key_value_heads=2, head_dim=16, intermediate_size=88, layer_norm_epsilon=1e-5, mamba_num_heads=4,
        mamba_head_dim=32, n_groups=2, ssm_state_size=16, time_step_min=1e-30, n_routed_experts=8, n_shared_experts=1,
        moe_intermediate_size=40, moe_shared_expert_intermediate_size=72, num_experts_per_tok=3,
        routed_scaling_factor=1.7, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
    ),
    "granitemoehybrid": GRANITE | dict(
        num_key_value_heads=2, rms_norm_eps=1e-5, intermediate_size=40, shared_intermediate_size=40, mamba_n_heads=4,
        mamba_d_head=32, mamba_d_state=16, num_local_experts=0, num_experts_per_tok=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "falcon_h1": dict(
        num_key_value_heads=2, rms_norm_eps=1e-5, intermediate_size=88, mamba_d_ssm=96, mamba_n_heads=6,
        mamba_d_head=16, mamba_n_groups=2, mamba_d_state=32, embedding_multiplier=3.0, lm_head_multiplier=0.4,
        mlp_multipliers=[0.7, 1.3], key_multiplier=0.6, attention_in_multiplier=1.2, attention_out_multiplier=0.8,
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.7, ssm_multipliers=[0.6, 1.5, 0.8, 1.1, 0.7],
        rope_parameters=PLAIN_ROPE,
    ),
    "mamba2": dict(num_heads=4, head_dim=32, n_groups=2, state_size=16, layer_norm_epsilon=1e-5),
    "hunyuan_v1_moe": LLAMA | dict(intermediate_size=40, num_experts=6, moe_topk=3),
    "lfm2": dict(
        num_key_value_heads=2, norm_eps=1e-5, intermediate_size=132, block_multiple_of=8, rope_parameters=PLAIN_ROPE,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "lfm2_moe": dict(
        num_key_value_heads=2, norm_eps=1e-5, intermediate_size=88, moe_intermediate_size=40, num_experts=6,
        num_experts_per_tok=3, num_dense_layers=1, rope_parameters=PLAIN_ROPE,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "openelm": dict(
        num_query_heads=[4, 2, 6], num_kv_heads=[2, 1, 3], head_dim=16, ffn_multipliers=[0.5, 2.0, 1.3],
        tie_word_embeddings=True,
    ),
}  # fmt: skip
FAMILIES["gemma4_unified_text"] = {
    key: value
    for key, value in FAMILIES["gemma4_text"].items()
    if key not in ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
}
# The module in `transformers`, where it is not called like the kind.
MODULES = {
    "gemma3_text": "transformers.models.gemma3.modeling_gemma3",
    "gemma3n_text": "transformers.models.gemma3n.modeling_gemma3n",
    "gemma4_text": "transformers.models.gemma4.modeling_gemma4",
    "gemma4_unified_text": "transformers.models.gemma4_unified.modeling_gemma4_unified",
    "openelm": "openelm",
    "smallthinker": "smallthinker",
    "llama4_text": "transformers.models.llama4.modeling_llama4",
    "muse_glimmer_text": "transformers.models.muse_glimmer.modeling_muse_glimmer",
}
MODULES |= {f"{name}_text": f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_5", "qwen3_5_moe")}
# Kind and class of a folder that `transformers` does not know -> the kind whose code it shares.
OWN_FFN = {
    "sparsellama": ("SparseLlamaForCausalLM", "llama"),
    "llama_sparse_relu": ("SparseLlamaForCausalLM", "llama"),
    "bamboo": ("BambooForCausalLM", "mistral"),
    "turbomixtral": ("MixtralForCausalLM", "mixtral"),
}


WITH_STATES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""The kinds with layers of Gated DeltaNet."""
ON_CPU_ALONE = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "granitemoe",
    "granitemoeshared",
    "granitemoe_swa",
    "smallthinker",
    "turbomixtral",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "mistral4",
    "kimi-linear",
    "kimi-linear-groups",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe_text",
    "minimax_m2",
    "ernie4_5_moe",
    "dots1",
    "bailing_moe",
    "bailing_moe_1",
    "llama4_text",
    "laguna",
    "cohere2_moe",
    "nemotron-h-experts",
    "nemotron-h-latents",
    "granite-h-experts",
    "gemma4-experts",
    "lfm2_moe",
    "hunyuan_v1_moe",
    "phimoe",
)
"""The kinds, and cases of kinds, that no GPU runs, or only with experts on both devices (test_hybrid_experts.py)."""
FOLDERS = ("folder", "folder-v4")
WITH_KV_B = (*FOLDERS, "gguf", "gguf-kv-b")  # the last: as files of latent attention were before April 2025


@dataclass(frozen=True)
class Case:
    """A model type with its settings, and settings it must be told apart from."""

    name: str
    kind: str
    settings: dict[str, Any]
    mistaken: dict[str, Any]
    layouts: tuple[str, ...] = (*FOLDERS, "gguf")
    metadata: dict[str, Any] = field(default_factory=dict)  # GGUF keys behind the architecture's prefix

    @property
    def base(self) -> str:
        """The kind in `transformers`."""
        return OWN_FFN[self.kind][1] if self.kind in OWN_FFN else renamed_families.BASES.get(self.kind, self.kind)

    def config(self, **changes: Any) -> Any:
        settings = SIZES | FAMILIES.get(self.kind, FAMILIES.get(self.base, LLAMA)) | self.settings | changes
        if "rope_parameters" in settings:
            settings["rope_parameters"] = copy.deepcopy(settings["rope_parameters"])
        config = transformers.AutoConfig.for_model(self.base, **settings)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"  # the fused ones take no float64
        return config


def rope(**parameters: Any) -> dict[str, Any]:
    return PLAIN_ROPE | parameters


LLAMA3 = rope(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
EQUAL_LLAMA3 = LLAMA3 | {"high_freq_factor": 1.0}  # nothing is blended
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
GROWN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
FACTORS = np.random.default_rng(2).uniform(1.0, 40.0, (2, 6)).round(3).tolist()
LONGROPE = HALF_ROPE | {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": FACTORS[0],
    "long_factor": FACTORS[1],
}
EIGHT_FACTORS = np.random.default_rng(3).uniform(1.0, 40.0, (2, 8)).round(3).tolist()
EIGHT_LONGROPE = rope(
    rope_type="longrope", short_factor=EIGHT_FACTORS[0], long_factor=EIGHT_FACTORS[1],
    original_max_position_embeddings=CONTEXT,
)  # fmt: skip
PHIMOE_ROPE = EIGHT_LONGROPE | {
    "original_max_position_embeddings": 64, "short_mscale": 1.1, "long_mscale": 1.3,
}  # fmt: skip
LONGROPE_KEYS = {
    "rope.dimension_count": 12,
    "rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(64)),
    "rope.scaling.original_context_length": 64,
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
HALF_YARN = {"partial_rotary_factor": 0.5, "attention_factor": 1.2}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
MINICPM_KEYS = {"embedding_scale": 12.0, "residual_scale": 1.4 / math.sqrt(3), "logit_scale": 4.0}
GRANITE_KEYS = {"embedding_scale": 3.0, "residual_scale": 0.6, "attention.scale": 0.3, "logit_scale": 5.0}
CASES = [
    Case("llama2", "llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-2}),
    Case("llama-gqa", "llama", {"num_attention_heads": 8, "num_key_value_heads": 2}, {"rms_norm_eps": 1e-3}),
    Case("llama-one-kv-head", "llama", {"num_key_value_heads": 1}, {"rope_parameters": rope(rope_theta=20000.0)}),
    Case("llama3", "llama", {"rope_parameters": LLAMA3}, {"rope_parameters": rope(rope_theta=500000.0)}),
    Case(
        "llama-linear",
        "llama",
        {"rope_parameters": rope(rope_type="linear", factor=4.0)},
        {"rope_parameters": PLAIN_ROPE},
        metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    Case("llama-yarn", "llama", {"rope_parameters": YARN}, {"rope_parameters": PLAIN_ROPE}, metadata=YARN_KEYS),
    Case("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}, {"rope_parameters": LLAMA3}),
    Case(
        "mistral-window",
        "mistral",
        {"sliding_window": 20},
        {"sliding_window": 21},
        layouts=("folder", "folder-v4"),  # a GGUF file of architecture llama has no window
    ),
    Case(
        "mistral-head-dim",
        "mistral",
        {"sliding_window": None, "head_dim": 32},
        {"rope_parameters": rope(rope_theta=20000.0)},
    ),
    Case(
        "ministral3",
        "ministral3",
        {"rope_parameters": GROWN, "head_dim": 32},
        {"rope_parameters": GROWN | {"llama_4_scaling_beta": 0.3}},
        ("folder", "gguf"),
        YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.4},
    ),
    Case(
        "smollm2",
        "llama",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 48,
            "rope_parameters": rope(rope_theta=100000.0),
        },
        {"rope_parameters": PLAIN_ROPE},
    ),
    Case("qwen2", "qwen2", {"tie_word_embeddings": True}, {"rms_norm_eps": 1e-2}),
    Case(
        "qwen2-window",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
        layouts=("folder", "folder-v4"),
    ),
    Case("qwen2-yarn", "qwen2", {"rope_parameters": YARN}, {"rope_parameters": PLAIN_ROPE}, metadata=YARN_KEYS),
    Case(
        "qwen3",
        "qwen3",
        {"head_dim": 32, "tie_word_embeddings": True},
        {"rope_parameters": rope(rope_theta=20000.0)},
    ),
    Case("llama-relu", "llama", {"hidden_act": "relu"}, {"hidden_act": "silu"}, metadata={"hidden_act": "relu"}),
    Case("mistral-relu", "mistral", {"hidden_act": "relu", "sliding_window": 20}, {"hidden_act": "relu2"}, FOLDERS),
    Case(
        "prosparse",
        "sparsellama",
        {"hidden_act": "relu", "hidden_act_param": 0.25},
        {"hidden_act_param": 0.26},
        ("folder", "gguf"),
        {"hidden_act": "fatrelu", "hidden_act_param": 0.25},
    ),
    Case("sparselm-relu", "llama_sparse_relu", {"hidden_act": "relu"}, {"hidden_act": "silu"}, FOLDERS),
    Case("turbosparse", "bamboo", {"sliding_window": None}, {"up_rectified": False}, ("folder", "gguf")),
    Case("opt", "opt", {"tie_word_embeddings": True}, {"activation_function": "silu"}, ("folder", "gguf")),
    Case(
        "opt-no-biases",
        "opt",
        {"enable_bias": False, "num_attention_heads": 2},
        {"activation_function": "relu2"},
        ("folder", "gguf"),
    ),
    Case(
        "opt-post-norm",
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 48},
        {"do_layer_norm_before": True, "_remove_final_layer_norm": True},
        ("folder",),
    ),
    Case(
        "falcon-7b",
        "falcon",
        {"tie_word_embeddings": True},
        {"layer_norm_epsilon": 1e-3},
        metadata={"hidden_act": "relu"},
    ),
    Case(
        "falcon-40b",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"rope_parameters": rope(rope_theta=20000.0)},
        metadata={"hidden_act": "relu"},
    ),
    Case(
        "falcon-heads",
        "falcon",
        {"multi_query": False, "bias": True},
        {"activation": "silu"},
        metadata={"hidden_act": "relu"},
    ),
    Case("falcon-in-turn", "falcon", {"parallel_attn": False}, {"layer_norm_epsilon": 1e-3}, FOLDERS),
    Case("nemotron", "nemotron", {}, {"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 1.0}}),
    Case(
        "nemotron-biases",
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
        {"hidden_act": "relu"},
    ),
    Case("jais2", "jais2", {}, {"layer_norm_eps": 1e-2}),
    Case("nanochat", "nanochat", {}, {"final_logit_softcapping": 14.0}, ("folder",)),
    Case(
        "jais2-no-biases",
        "jais2",
        {"attention_bias": False, "mlp_bias": False, "head_dim": 24, "tie_word_embeddings": True},
        {"hidden_act": "relu"},
        ("folder",),  # llama.cpp's has all of them
    ),
    Case(
        "gemma3",
        "gemma3_text",
        {},
        {"sliding_window": 21},
        metadata={
            "attention.sliding_window": 20,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    Case(
        "gemma3-no-windows",
        "gemma3_text",
        {
            "layer_types": ["full_attention"] * 3,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 10,
            "rope_parameters": {"full_attention": PLAIN_ROPE, "sliding_attention": PLAIN_ROPE},
        },
        {"query_pre_attn_scalar": 11},
        ("folder",),
    ),
    Case(
        "gemma2",
        "gemma2",
        {},
        {"attn_logit_softcapping": 3.1},
        metadata={
            "attention.sliding_window": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0,
        },
    ),
    Case(
        "gemma2-scale",
        "gemma2",
        {"query_pre_attn_scalar": 10, "attn_logit_softcapping": None, "sliding_window": 12},
        {"final_logit_softcapping": 20.1},
        ("folder",),
    ),
    Case("gemma4", "gemma4_text", {}, {"sliding_window": 21}, ("folder", "gguf")),
    Case(
        "gemma4-experts",
        "gemma4_text",
        {
            "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40,
            "attention_k_eq_v": False, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        {"top_k_experts": 2},
        ("folder", "gguf"),
    ),
    Case(
        "gemma4-e",
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "attention_k_eq_v": False, "num_global_key_value_heads": None, "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        },
        {"rms_norm_eps": 1e-2},
        ("folder", "gguf"),
    ),
    Case(
        "gemma4-e-wide",
        "gemma4_text",
        {"hidden_size_per_layer_input": 208, "attention_k_eq_v": False, "num_global_key_value_heads": None},
        {"rms_norm_eps": 1e-2},
        ("folder", "gguf"),
    ),
    Case(
        "gemma4-unified",
        "gemma4_unified_text",
        {"final_logit_softcapping": None, "global_head_dim": 24, "num_hidden_layers": 2, "attention_bias": True,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"rms_norm_eps": 1e-2},
        ("folder",),
    ),
    Case("gemma3n", "gemma3n_text", {}, {"activation_sparsity_pattern": [0.0] * 6}, ("folder", "gguf")),
    Case(
        "gemma3n-streams",
        "gemma3n_text",
        {
            "altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False, "attention_bias": True,
            "final_logit_softcapping": 5.0, "tie_word_embeddings": False, "num_kv_shared_layers": 0,
            "intermediate_size": [88, 40, 72, 88, 56, 24], "vocab_size_per_layer_input": 101,
        },
        {"altup_active_idx": 0},
        ("folder",),
    ),
    Case("phi3", "phi3", {"sliding_window": 20}, {"sliding_window": 21}, metadata={"attention.sliding_window": 20}),
    Case(
        "phi3-long",
        "phi3",
        {"rope_parameters": LONGROPE, "tie_word_embeddings": True},
        {"rope_parameters": LONGROPE | {"long_factor": FACTORS[0]}},
        metadata=LONGROPE_KEYS,
    ),
    Case(
        "phi3-short",
        "phi3",
        {"rope_parameters": LONGROPE, "max_position_embeddings": 256, "original_max_position_embeddings": CONTEXT},
        {"rope_parameters": LONGROPE | {"short_factor": FACTORS[1]}},
        metadata=LONGROPE_KEYS
        | {
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(2) / math.log(CONTEXT)),
            "rope.scaling.original_context_length": CONTEXT,
        },
    ),
    Case("olmo2", "olmo2", {}, {"rms_norm_eps": 1e-3}),
    Case("olmo2-relu", "olmo2", {"hidden_act": "relu"}, {"hidden_act": "silu"}, metadata={"hidden_act": "relu"}),
    Case(
        "olmo3",
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN_ROPE}},
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}},
        metadata=YARN_KEYS | {"attention.sliding_window": 20},
    ),
    Case("mixtral", "mixtral", {}, {"num_experts_per_tok": 3}),
    Case("mixtral-window", "mixtral", {"sliding_window": 20, "hidden_act": "relu"}, {"hidden_act": "silu"}, FOLDERS),
    Case("turbosparse-mixtral", "turbomixtral", {}, {"up_rectified": False}, metadata={"hidden_act": "drelu"}),
    Case("qwen2-moe", "qwen2_moe", {}, {"norm_topk_prob": True}),
    Case(
        "qwen2-moe-some",
        "qwen2_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": True},
        {"num_experts_per_tok": 2},
        FOLDERS,
    ),
    Case("qwen3-moe", "qwen3_moe", {"head_dim": 32}, {"norm_topk_prob": False}),
    Case("qwen3-moe-some", "qwen3_moe", {"mlp_only_layers": [1]}, {"num_experts_per_tok": 2}),
    Case("olmoe", "olmoe", {}, {"norm_topk_prob": True}),
    Case("arcee", "arcee", {}, {"hidden_act": "relu"}),
    Case("arcee-biases", "arcee", {"attention_bias": True, "mlp_bias": True}, {"rope_parameters": LLAMA3}, FOLDERS),
    Case("arcee-llama3", "arcee", {"rope_parameters": LLAMA3}, {"rope_parameters": PLAIN_ROPE}),
    Case("smollm3", "smollm3", {"tie_word_embeddings": True}, {"no_rope_layers": [1, 1, 1, 1, 1]}),
    Case(
        "smollm3-others", "smollm3", {"no_rope_layers": [1, 0, 1, 1, 0]}, {"no_rope_layers": [1, 0, 1, 1, 1]}, FOLDERS
    ),
    Case(
        "exaone4", "exaone4", {"rope_parameters": LLAMA3, "head_dim": 32}, {"sliding_window": 21}, ("folder", "gguf"),
        {"attention.sliding_window": 20},
    ),
    Case(
        "exaone4-global",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True},
        {"sliding_window": 20, "layer_types": ["full_attention"] * 4},
        ("folder", "gguf"),
    ),
    Case(
        "cohere2", "cohere2", {}, {"sliding_window": 21}, ("folder", "gguf"),
        {"attention.sliding_window": 20, "logit_scale": 0.25},
    ),
    Case(
        "cohere2-biases",
        "cohere2",
        {"attention_bias": True, "layer_types": [*["full_attention"] * 3, "sliding_attention"]},
        {"logit_scale": 0.26},
        ("folder",),
    ),
    Case(
        "cohere2-moe", "cohere2_moe", {}, {"num_experts_per_tok": 2}, ("folder", "gguf"),
        {"attention.sliding_window": 20, "logit_scale": 0.25},
    ),
    Case(
        "cohere2-moe-norm",
        "cohere2_moe",
        {
            "rms_norm_eps": 1e-5, "expert_selection_fn": "softmax", "num_shared_experts": 0, "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", *["sparse"] * 4], "prefix_dense_sliding_window_pattern": 2,
            "layer_types": ["full_attention", "full_attention", *["sliding_attention"] * 4],
        },
        {"rms_norm_eps": 1e-2},
        ("folder",),
    ),
    Case(
        "cohere2-moe-sum",
        "cohere2_moe",
        {
            "shared_expert_combination_strategy": "sum", "norm_topk_prob": False, "num_shared_experts": 1,
            "prefix_dense_sliding_window_pattern": 2,
        },
        {"shared_expert_combination_strategy": "average"},
        ("folder",),
    ),
    Case(
        "muse-glimmer", "muse_glimmer_text", {"layer_types": [*["sliding_attention"] * 3, *["full_attention"] * 3],
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0, 0, 0]}, {"post_norm_eps": 1e-2}, ("folder", "gguf"),
        {
            "attention.sliding_window": 20, "final_logit_softcapping": 20.0, "logit_scale": 0.4,
            "attention.sliding_window_pattern": [True] * 3 + [False] * 3,
        },
    ),
    Case(
        "muse-glimmer-rope",
        "muse_glimmer_text",
        {"attention_bias": True, "layer_rope_theta": [0, 0, 5000.0, 0, 7.0, 10000.0], "tie_word_embeddings": True},
        {"qk_scale_factor": 2.4},
        ("folder",),
    ),
    Case("muse-glimmer-types", "muse_glimmer_text", {}, {"sliding_window": 21}, ("folder",)),
    Case("stablelm", "stablelm", {}, {"rope_parameters": HALF_ROPE}),
    Case(
        "stablelm-12b",
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True, "num_attention_heads": 4},
        {"layer_norm_eps": 1e-3},
        ("folder", "gguf"),
    ),
    Case("stablelm-norms", "stablelm", {"qk_layernorm": True}, {"layer_norm_eps": 1e-3}, ("folder",)),
    Case("olmo", "olmo", {"tie_word_embeddings": True}, {"clip_qkv": 0.5}, ("folder", "gguf")),
    Case(
        "olmo-clipped", "olmo", {"clip_qkv": 0.7, "attention_bias": True}, {"clip_qkv": 0.75}, ("folder",),
    ),
    Case(
        "olmo-clamped", "olmo", {"clip_qkv": 0.7}, {"clip_qkv": 0.75}, ("folder", "gguf"),
        {"attention.clamp_kqv": 0.7},
    ),
    Case("stablelm-biases", "stablelm", {"use_qkv_bias": True}, {"layer_norm_eps": 1e-3}, ("gguf",)),
    Case("apertus", "apertus", {"rope_parameters": LLAMA3}, {"rms_norm_eps": 1e-3}),
    Case(
        "apertus-default-rope",
        "apertus",
        {"rope_parameters": None, "attention_bias": True, "head_dim": 24, "tie_word_embeddings": True},
        {"rope_parameters": LLAMA3},
        ("folder",),
    ),
    Case("apertus-relu2", "apertus", {"hidden_act": "relu2"}, {"hidden_act": "relu"}, ("folder",)),
    Case("bitnet", "bitnet", {}, {"hidden_act": "relu"}, metadata={"hidden_act": "relu2"}),
    Case("bitnet-silu", "bitnet", {"hidden_act": "silu", "tie_word_embeddings": True}, {"rms_norm_eps": 1e-3}),
    Case(
        "bitnet-biases", "bitnet", {"attention_bias": True, "num_attention_heads": 8, "head_dim": 8},
        {"rope_parameters": rope(rope_theta=20000.0)}, ("folder",),
    ),
    Case(
        "phimoe",
        "phimoe",
        {"attention_bias": True, "lm_head_bias": True, "sliding_window": None},
        {"router_jitter_noise": 0.5},
        metadata={"rope.dimension_count": 16},
    ),
    Case(
        "phimoe-mini", "phimoe", {"head_dim": 24, "sliding_window": 20}, {"sliding_window": 21}, ("folder", "gguf"),
        {"rope.dimension_count": 24, "attention.sliding_window": 20},
    ),
    Case(
        "phimoe-long",
        "phimoe",
        {"rope_parameters": PHIMOE_ROPE, "original_max_position_embeddings": 64, "router_jitter_noise": 0.3},
        {"rope_parameters": PHIMOE_ROPE | {"long_mscale": 1.4}},
        ("folder",),
    ),
    Case(
        "phimoe-short",
        "phimoe",
        {
            "rope_parameters": PHIMOE_ROPE | {"original_max_position_embeddings": CONTEXT},
            "max_position_embeddings": 256, "tie_word_embeddings": True, "lm_head_bias": True, "sliding_window": 20,
        },
        {"rope_parameters": PHIMOE_ROPE | {"original_max_position_embeddings": CONTEXT, "short_mscale": 1.2}},
        ("folder",),
    ),
    Case("seed-oss", "seed_oss", {}, {"rms_norm_eps": 1e-3}),
    Case("seed-oss-no-biases", "seed_oss", {"attention_bias": False}, {"rms_norm_eps": 1e-3}),
    Case("llama4", "llama4_text", {"rope_parameters": EQUAL_LLAMA3}, {"use_qk_norm": False}, ("folder", "gguf")),
    Case(
        "llama4-chunks",
        "llama4_text",
        {"attention_chunk_size": 20, "floor_scale": 9, "attn_scale": 0.7, "num_experts_per_tok": 2},
        {"attention_chunk_size": 20, "floor_scale": 9, "attn_scale": 0.7, "num_experts_per_tok": 1},
        ("folder",),
    ),
    Case("laguna", "laguna", {}, {"sliding_window": 21}, ("folder", "gguf"), {"attention.sliding_window": 20}),
    Case(
        "laguna-yarn",
        "laguna",
        {"rope_parameters": {"full_attention": YARN | HALF_YARN, "sliding_attention": PLAIN_ROPE}},
        {"rope_parameters": {"full_attention": HALF_ROPE, "sliding_attention": PLAIN_ROPE}},
        ("folder",),
    ),
    Case("minimax-m2", "minimax_m2", {}, {"num_experts_per_tok": 2}),
    Case("glm4", "glm4", {}, {"rms_norm_eps": 1e-3}),
    Case("ernie", "ernie4_5", {"tie_word_embeddings": True}, {"rms_norm_eps": 1e-3}),
    Case("ernie-moe", "ernie4_5_moe", {}, {"moe_k": 2}),
    Case("ernie-moe-some", "ernie4_5_moe", {"moe_layer_interval": 2}, {"moe_k": 2}, FOLDERS),
    Case("glm4-moe", "glm4_moe", {}, {"routed_scaling_factor": 1.6}),
    Case(
        "glm4-moe-groups",
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2},
        {"topk_group": 4},
    ),
    Case("qwen3-next", "qwen3_next", {}, {"norm_topk_prob": False}),
    Case(
        "qwen3-next-some",
        "qwen3_next",
        {"decoder_sparse_step": 2, "layer_types": ["full_attention", *["linear_attention"] * 3]},
        {"rope_parameters": HALF_ROPE},
        ("folder", "gguf"),
    ),
    Case("qwen35", "qwen3_5_text", {}, {"rope_parameters": HALF_ROPE}),
    Case("qwen35-relu", "qwen3_5_text", {"hidden_act": "relu"}, {"hidden_act": "silu"}, FOLDERS),
    Case(
        "qwen35-heads",
        "qwen3_5_text",
        {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True},
        {"rms_norm_eps": 1e-3},
    ),
    Case("qwen35-moe", "qwen3_5_moe_text", {}, {"num_experts_per_tok": 2}),
    Case("deepseek-v2-lite", "deepseek_v2", {}, {"routed_scaling_factor": 1.6}, WITH_KV_B),
    Case(
        "deepseek-v2",
        "deepseek_v2",
        {
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.7}},
        WITH_KV_B,
        YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.0707},
    ),
    Case("deepseek-v2-groups", "deepseek_v2", GROUPS, {"topk_method": "greedy"}),
    Case(
        "deepseek-v2-yarn",
        "deepseek_v2",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
        {"rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.5}},
        FOLDERS,
    ),
    Case("deepseek-v3", "deepseek_v3", {"n_group": 4, "topk_group": 2}, {"topk_group": 3}, WITH_KV_B),
    Case("glm4-moe-lite", "glm4_moe_lite", {}, {"routed_scaling_factor": 1.6}),
    Case(
        "mistral4",
        "mistral4",
        {"rope_parameters": GROWN},
        {"rope_parameters": GROWN | {"llama_4_scaling_beta": 0.3}},
        ("folder", "gguf"),
        YARN_KEYS | {
            "rope.scaling.yarn_log_multiplier": 0.1, "attention.temperature_scale": 0.4,
            "attention.temperature_length": 32,
        },
    ),
    Case(
        "mistral4-groups",
        "mistral4",
        {"rope_parameters": GROWN, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "q_lora_rank": None},
        {"rope_parameters": GROWN, "n_group": 4, "topk_group": 3},
        ("folder",),
    ),
    Case("kimi-linear", "kimi_linear", {}, {"routed_scaling_factor": 1.6}, ("folder", "gguf")),
    Case(
        "kimi-linear-groups",
        "kimi_linear",
        {
            "mlp_layer_types": ["dense"] * 4 + ["sparse"], "linear_num_heads": 3, "linear_head_dim": 48,
            "linear_conv_kernel_dim": 3, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "norm_topk_prob": False,
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
        },
        {"n_group": 4, "topk_group": 3},
        ("folder",),
    ),
    Case(
        "kimi-linear-dense",
        "kimi_linear",
        {"mlp_layer_types": ["dense"] * 5, "linear_num_heads": 3, "linear_head_dim": 48, "hidden_act": "relu"},
        {"rms_norm_eps": 1e-2},
        ("folder",),
    ),
    Case("plm", "plm", {}, {"rope_parameters": rope(rope_theta=20000.0)}, ("folder", "gguf")),
    Case(
        "plm-halves",
        "plm",
        {"rope_interleave": False, "q_lora_rank": 20, "tie_word_embeddings": False, "head_dim": 8},
        {"rope_interleave": True},
        ("folder",),
    ),
    Case("deepseek-v3-halves", "deepseek_v3", {"rope_interleave": False}, {"rope_interleave": True}, FOLDERS),
    Case(
        "kimi-k2",
        "deepseek_v3",
        {
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "norm_topk_prob": True,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
        {"norm_topk_prob": False},
        WITH_KV_B,
        YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.1},
    ),
    Case("granite", "granite", {"tie_word_embeddings": True}, {"residual_multiplier": 0.61}, metadata=GRANITE_KEYS),
    Case(
        "granite-swa",
        "granite_swa",
        {"layer_rope_theta": [0, 10000, 10000, 10000, 0]},
        {"sliding_window": 21},
        ("folder", "gguf"),
        GRANITE_KEYS | {"attention.sliding_window": 20},
    ),
    Case(
        "granite-swa-bases",
        "granite_swa",
        {
            "layer_rope_theta": [10000, 0, 20000, 10000, 30000],
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
        },
        {"layer_rope_theta": [10000, 0, 20000, 10000, 30500]},
        ("folder",),
    ),
    Case(
        "granite-moe-swa",
        "granitemoe_swa",
        {"layer_rope_theta": [0, 10000, 10000, 10000, 0]},
        {"sliding_window": 21},
        ("folder", "gguf"),
        GRANITE_KEYS | {"attention.sliding_window": 20},
    ),
    Case(
        "granite-moe-swa-bases",
        "granitemoe_swa",
        {
            "layer_rope_theta": [10000, 0, 20000, 10000, 30000], "shared_intermediate_size": 0, "attention_bias": True,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
        },
        {"num_experts_per_tok": 2},
        ("folder",),
    ),
    Case("granite-biases", "granite", {"attention_bias": True, "mlp_bias": True}, {"logits_scaling": 5.1}, FOLDERS),
    Case("granite-relu", "granite", {"hidden_act": "relu"}, {"embedding_multiplier": 3.1}, FOLDERS),
    Case(
        "minicpm",
        "minicpm",
        {"rope_parameters": EIGHT_LONGROPE},
        {"rope_parameters": EIGHT_LONGROPE | {"short_factor": EIGHT_FACTORS[1]}},
        ("folder", "gguf"),
        MINICPM_KEYS | {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": CONTEXT},
    ),
    Case(
        "minicpm-2b",
        "minicpm",
        {"logits_scaling": 64 / 256, "tie_word_embeddings": True},
        {"embedding_multiplier": 12.1},
        ("folder", "gguf"),  # the first files state no factors
    ),
    Case("dots1", "dots1", {}, {"routed_scaling_factor": 1.6}),
    Case(
        "dots1-window", "dots1", {"sliding_window": 20, "max_window_layers": 1, "attention_bias": True},
        {"sliding_window": 20, "max_window_layers": 2}, ("folder",),
    ),
    Case("ling-2", "bailing_moe", {}, {"topk_group": 3}, ("folder", "gguf")),
    Case(
        "ling-2-one", "bailing_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"num_experts_per_tok": 1, "norm_topk_prob": True}, ("folder",),
    ),
    Case("ling-1", "bailing_moe_1", {}, {"num_experts_per_tok": 2}, ("folder", "gguf")),
    Case("granite-moe", "granitemoe", {}, {"attention_multiplier": 0.31}, metadata=GRANITE_KEYS),
    Case("granite-moe-shared", "granitemoeshared", {}, {"num_experts_per_tok": 2}, metadata=GRANITE_KEYS),
    Case(
        "smallthinker",
        "smallthinker",
        {"rope_layout": [0, 1, 1, 1, 0], "sliding_window_layout": [0, 1, 1, 1, 0]},
        {"sliding_window_size": 21},
        ("folder", "gguf"),
        {"attention.sliding_window": 20, "expert_gating_func": 2},
    ),
    Case(
        "smallthinker-4b",
        "smallthinker",
        {"rope_theta": 20000.0},
        {"router_first": False},
        ("folder", "gguf"),
        {"expert_gating_func": 2},
    ),
    Case(
        "smallthinker-softmax",
        "smallthinker",
        {"moe_primary_router_apply_softmax": True, "sliding_window_layout": [1, 0, 1, 0, 1]},
        {"rope_layout": [0, 1, 1, 1, 1]},
        ("folder",),
    ),
    Case("gpt-oss", "gpt_oss", {}, {"sliding_window": 21}, ("folder", "gguf"), {"attention.sliding_window": 20}),
    Case("gpt-oss-limits", "gpt_oss", {}, {"swiglu_limit": 7.5}, ("folder",)),
    Case(
        "gpt-oss-yarn",
        "gpt_oss",
        {"rope_parameters": YARN | {"rope_theta": 150000.0}},
        {"rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False}},
        metadata=YARN_KEYS | {"attention.sliding_window": 20},
    ),
    Case(
        "gpt-oss-not-truncated",
        "gpt_oss",
        {"rope_parameters": YARN | {"rope_theta": 150000.0, "truncate": False}},
        {"num_experts_per_tok": 3},
        FOLDERS,  # no key of GGUF says so
    ),
    Case("openelm", "openelm", {}, {"rope_freq_constant": 20000.0}, ("folder", "gguf")),
    Case(
        "openelm-relu",
        "openelm",
        {"activation_fn_name": "relu"},
        {"activation_fn_name": "swish"},
        ("folder", "gguf"),
        {"hidden_act": "relu"},
    ),
    Case("nemotron-h", "nemotron_h", {}, {"layer_norm_epsilon": 1e-2}),
    Case(
        "nemotron-h-biases",
        "nemotron_h",
        {"mlp_bias": True, "use_bias": True, "use_conv_bias": False, "n_groups": 1},
        {"layer_norm_epsilon": 1e-2},
    ),
    Case(
        "nemotron-h-experts",
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "moe"]},
        {"routed_scaling_factor": 1.6},
    ),
    Case(
        "nemotron-h-latents",
        "nemotron_h",
        {
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"], "moe_latent_size": 32,
            "n_group": 4, "topk_group": 2,
        },
        {"topk_group": 3},
    ),
    Case("granite-h", "granitemoehybrid", {}, {"residual_multiplier": 0.5}, ("folder", "gguf")),
    Case(
        "granite-h-experts",
        "granitemoehybrid",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 72, "mamba_n_groups": 2},
        {"attention_multiplier": 0.2},
        ("folder", "gguf"),
    ),
    Case(
        "granite-h-attention",  # as of Granite 4.0's dense models
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "tie_word_embeddings": True},
        {"rope_parameters": rope(rope_theta=20000.0)},
        ("folder", "gguf"),
    ),
    Case(
        "granite-h-limits",
        "granitemoehybrid",
        {"time_step_limit": [0.3, 0.9], "mamba_conv_bias": False, "position_embedding_type": "rope"},
        {"time_step_limit": [0.3, 0.8]},
        ("folder",),
    ),
    Case("falcon-h1", "falcon_h1", {}, {"key_multiplier": 0.5}, ("folder", "gguf")),
    Case(
        "falcon-h1-norm",
        "falcon_h1",
        {"mamba_rms_norm": True, "num_attention_heads": 8},
        {"mamba_norm_before_gate": False},
        ("folder",),
    ),
    Case(
        "falcon-h1-norm-behind",
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        {"ssm_multipliers": [0.6, 1.5, 0.8, 1.1, 1.7]},
        ("gguf",),
    ),
    Case("mamba2", "mamba2", {}, {"layer_norm_epsilon": 1e-2}, ("folder", "gguf")),
    Case("lfm2", "lfm2", {"tie_word_embeddings": True}, {"norm_eps": 1e-2}),
    Case(
        "lfm2-biases",
        "lfm2",
        {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "num_attention_heads": 2},
        {"norm_eps": 1e-2},
        ("folder",),
    ),
    Case(
        "hunyuan",
        "hunyuan_v1_dense",
        {"tie_word_embeddings": True, "rope_parameters": rope(rope_type="dynamic", alpha=50.0, factor=1.0)},
        {"rope_parameters": PLAIN_ROPE},
    ),
    Case("hunyuan-moe", "hunyuan_v1_moe", {}, {"moe_topk": 2}),
    Case("lfm2-moe", "lfm2_moe", {"tie_word_embeddings": True}, {"num_experts_per_tok": 2}, ("folder", "gguf")),
]


def rectified_twice(mlp: Any, x: Any) -> Any:
    """The FFN of TurboSparse and Bamboo: relu on the gate and on up."""
    return mlp.down_proj(torch.relu(mlp.gate_proj(x)) * torch.relu(mlp.up_proj(x)))


def squared_relu(mlp: Any, x: Any) -> Any:
    """The FFN of PLM (arXiv 2503.12167)."""
    return mlp.down_proj(torch.relu(mlp.up_proj(x)).square())


def rectified_experts(experts: Any, x: Any, selected: Any, weights: Any) -> Any:
    """The experts of TurboSparse-Mixtral, of which each token has those of `selected`, [T, top]."""
    every = []
    for first, second in zip(experts.gate_up_proj, experts.down_proj, strict=True):
        gate, up = (x @ first.T).chunk(2, dim=-1)
        every.append((torch.relu(gate) * torch.relu(up)) @ second.T)
    own = torch.stack(every, dim=1).gather(1, selected[:, :, None].expand(-1, -1, x.shape[-1]))
    return (weights[:, :, None] * own).sum(1)


TINY_VISION = dict(
    patch_size=2, pos_emb_height=4, pos_emb_width=4, num_attention_heads=2, num_hidden_layers=1, hidden_size=16,
    intermediate_size=24,
)  # fmt: skip
PROJECTOR = dict(out_hidden_size=64, projector_hidden_size=24)


def build(case: Case, config: Any) -> Any:
    """The model of `transformers`, its FFN exchanged where that is all the family differs in."""
    if case.kind == "mistral4":  # which the list of classes lacks
        return transformers.Mistral4ForCausalLM._from_config(config, attn_implementation="eager").eval()
    if case.kind == "muse_glimmer_text":  # there is no class of the part that reads text alone
        config = transformers.MuseGlimmerConfig(text_config=config, vision_config=TINY_VISION, **PROJECTOR)
        model = transformers.MuseGlimmerForConditionalGeneration._from_config(config, attn_implementation="eager")
        return model.eval()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if case.kind == "phimoe" and config.rope_parameters["rope_type"] == "longrope":
        rotary = model.model.rotary_emb  # whose forward has the short divisors, whatever the length
        rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=TOKENS)
    if case.kind == "plm":
        for layer in model.model.layers:
            del layer.mlp.gate_proj
            layer.mlp.forward = partial(squared_relu, layer.mlp)
    if case.kind in OWN_FFN and case.kind != "llama_sparse_relu":
        for layer in model.model.layers:
            if case.kind == "sparsellama":  # FATReLU: what does not exceed the threshold is zero
                layer.mlp.act_fn = torch.nn.Threshold(config.hidden_act_param, 0.0)
            elif not getattr(config, "up_rectified", True):
                (layer.mlp.experts if case.kind == "turbomixtral" else layer.mlp).act_fn = torch.nn.ReLU()
            elif case.kind == "turbomixtral":
                layer.mlp.experts.forward = partial(rectified_experts, layer.mlp.experts)
            else:
                layer.mlp.forward = partial(rectified_twice, layer.mlp)
    return model


def random_model(case: Case, config: Any, seed: int) -> Any:
    """A float32 model whose every parameter matters: attention far from uniform, norms and biases far from neutral."""
    model = build(case, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(noise - 3)  # so that what a state has learned stays for some tokens
            elif parameter.ndim > 1:
                parameter.copy_(noise if "embed" in name else 1.5 * noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.copy_(0.5 * noise if name.endswith("bias") else 1 + 0.3 * noise)
            if case.kind == "gpt_oss" and name.endswith("gate_up_proj"):
                parameter *= 6  # beyond the limits of its activation
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith(("act_fn.beta", "act_fn.eps")):  # of xIELU
                buffer.mul_((2e5 if name.endswith("eps") else 1) * (0.5 + torch.rand((), generator=generator)))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model


def halved(model: Any) -> Any:
    """The same model with its parameters rounded to float16 numbers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    return model


class DoubleTorch:
    """The torch module with its 32-bit float types replaced by float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def double_precision(kind: str) -> Iterator[None]:
    """`transformers` computes norms, softmax and angles in float32 whatever the model's type; here in float64."""
    own = MODULES.get(kind, f"transformers.models.{kind}.modeling_{kind}")
    names = ["transformers.modeling_rope_utils", own]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(importlib.import_module(name), "torch", DoubleTorch())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


def exact_logits(case: Case, config: Any, model: Any, tokens: np.ndarray) -> np.ndarray:
    """float64 logits [T, vocab] of the float32 model's weights under `config`."""
    return exact_texts(case, config, model, [tokens])[0]


def exact_texts(case: Case, config: Any, model: Any, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same for each of some texts."""
    with double_precision(case.base):
        wide = build(case, config).double()
        assert all(buffer.dtype == torch.float64 for name, buffer in wide.named_buffers() if "inv_freq" in name)
        wide.load_state_dict(model.state_dict())
        results = [logits(wide, tokens) for tokens in texts]
    assert all(result.dtype == np.float64 for result in results)
    return results


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


# --- the two file formats ---------------------------------------------------------------------------------------


def save_folder(case: Case, model: Any, folder: Path, *, version4: bool) -> Path:
    """A Hugging Face folder in shards; `version4`: its config.json as transformers 4 wrote it."""
    model.save_pretrained(folder, max_shard_size="50KB")
    assert (folder / "model.safetensors.index.json").exists()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if case.kind in OWN_FFN:
        kind = case.base if case.kind == "turbomixtral" else case.kind
        config |= {"architectures": [OWN_FFN[case.kind][0]], "model_type": kind}
        acts = {"sparsellama": "fatrelu", "turbomixtral": "drelu", "llama_sparse_relu": "silu"}
        config["hidden_act"] = acts.get(case.kind, "relu")
    if case.kind == "llama_sparse_relu":  # whose training has other settings than Llama
        config |= {"sparsity_new_intermediate_size": config["intermediate_size"], "intermediate_size": 40}
        config |= {"sparsity_gated_mlp": True, "sparsity_use_hybrid_kernel": False, "sparsity_l1_coeff": 3e-4}
    if version4 and case.kind == "nemotron_h":  # as its files are
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        types = config.pop("layers_block_type")
        config |= {"hybrid_override_pattern": "".join(letters[one] for one in types), "num_hidden_layers": len(types)}
        config["time_step_limit"] = [0.0, math.inf]
    elif version4:
        parameters = config.pop("rope_parameters")
        if "sliding_attention" in parameters:
            config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
            parameters = parameters["full_attention"]
        config["rope_theta"] = parameters.pop("rope_theta")
        if "partial_rotary_factor" in parameters:
            config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
        config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
        types = config.pop("layer_types", None)
        if case.kind == "lfm2":  # as its first files are
            config["full_attn_idxs"] = [at for at, one in enumerate(types) if one != "conv"]
            older = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
            config |= {old: config.pop(new) for old, new in older.items()}
        config["torch_dtype"] = config.pop("dtype", "float32")
    path.write_text(json.dumps(config))
    if case.kind in renamed_families.RENAME:
        renamed_families.rename(case.kind, folder)
    return folder


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",  # BitNet
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "attention_layernorm": "attn_norm",  # Apertus
    "feedforward_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.g_proj": "attn_gate",  # Laguna
    "self_attn.gate_proj": "attn_gate",  # Muse Glimmer
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn_layer_norm": "attn_norm",  # OPT
    "final_layer_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
    "ln_attn": "attn_norm_2",  # Falcon
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",  # Gemma 3, and OLMo
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm",  # GLM-4
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv",  # Phi-3
    "mlp.gate_up_proj": "ffn_up",
    "attn_norm": "attn_norm",  # OpenELM
    "attn.qkv_proj": "attn_qkv",
    "attn.out_proj": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "ffn.proj_2": "ffn_down",
    "self_attn.q_a_proj": "attn_q_a",  # latent attention
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate": "ffn_gate_inp",  # experts
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.router": "ffn_gate_inp",  # Granite
    "block_sparse_moe.primary_router": "ffn_gate_inp",  # SmallThinker
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mlp.router": "ffn_gate_inp",  # gpt-oss
    "self_attn": "attn_sinks",
    "self_attn.query_layernorm": "attn_q_norm",  # Hunyuan
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate.wg": "ffn_gate_inp",
}
for part in ("gate", "up", "down"):
    shared = ("shared_expert", "shared_experts", "shared_mlp")
    GGUF_NAMES |= dict.fromkeys((f"mlp.{block}.{part}_proj" for block in shared), f"ffn_{part}_shexp")
GGUF_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.decoder.embed_tokens": "token_embd",
    "model.decoder.embed_positions": "position_embd",
    "model.decoder.final_layer_norm": "output_norm",
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "transformer.token_embeddings": "token_embd",
    "transformer.norm": "output_norm",
}


def side_by_side(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in the order of a `llama` file: the two rows of a rotated pair adjacent."""
    return np.ascontiguousarray(
        values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape),
    )


def one_after_another(values: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Rows of Falcon's fused matrix, which come by groups of heads, as all of Q, then all of K, then all of V."""
    groups = values.reshape(kv_heads, heads // kv_heads + 2, -1, *values.shape[1:])
    return np.concatenate(
        [part.reshape(-1, *values.shape[1:]) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])]
    )


def gpt_oss_experts(prefix: str, kind: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Matrices are [experts, in, out] in the class; rows of gate and up take turns."""
    of = "bias" if kind.endswith("_bias") else "weight"
    rows = values if of == "bias" else values.swapaxes(1, 2)
    for part, own in (("gate", rows[:, ::2]), ("up", rows[:, 1::2])) if "gate_up" in kind else (("down", rows),):
        yield f"{prefix}_{part}_exps.{of}", np.ascontiguousarray(own)


def by_key_head(values: np.ndarray, config: Any, sizes: list[int]) -> list[np.ndarray]:
    """What Qwen3-Next's folders have together for each key head, apart; sizes: rows of each part."""
    groups = values.reshape(config.linear_num_key_heads, sum(sizes), -1)
    parts = np.split(groups, np.cumsum(sizes)[:-1], axis=1)
    return [np.ascontiguousarray(part.reshape(-1, values.shape[1])) for part in parts]


def in_turn(values: np.ndarray, config: Any, dim: int) -> np.ndarray:
    """Rows of value heads, those of one key head together, in the order of llama.cpp: one of each key head in turn."""
    keys = config.linear_num_key_heads
    heads = values.reshape(keys, config.linear_num_value_heads // keys, dim, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(0, 1).reshape(values.shape))


def delta_tensors(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name within the layer, values) of a tensor of Gated DeltaNet, as llama.cpp's converter writes it."""
    next_ = config.model_type == "qwen3_next"
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    some = config.linear_num_value_heads // config.linear_num_key_heads
    ordered = (lambda values, dim: values) if next_ else partial(in_turn, config=config)
    keys = 2 * key * config.linear_num_key_heads

    def last(values: np.ndarray) -> np.ndarray:  # the values behind the queries and keys
        return np.concatenate([values[:keys], ordered(values[keys:], dim=value)])

    if name == "in_proj_qkvz":
        q, k, v, z = by_key_head(values, config, [key, key, some * value, some * value])
        yield "attn_qkv.weight", np.concatenate([q, k, v])
        yield "attn_gate.weight", z
    elif name == "in_proj_qkv":
        yield "attn_qkv.weight", last(values)
    elif name == "conv1d":
        yield "ssm_conv1d.weight", last(values[:, 0])
    elif name == "out_proj":
        yield "ssm_out.weight", np.ascontiguousarray(ordered(values.T, dim=value).T)
    elif name == "A_log":
        yield "ssm_a", -np.exp(ordered(values, dim=1))
    elif name == "dt_bias":
        yield "ssm_dt.bias", ordered(values, dim=1)
    else:
        short = {"in_proj_z": "attn_gate", "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha", "in_proj_ba": "ssm_ba"}
        if name not in ("norm", "in_proj_ba"):
            values = ordered(values, dim=value if name == "in_proj_z" else 1)
        yield f"{short.get(name, 'ssm_norm')}.weight", values


def gguf_tensors(
    config: Any, model: Any, architecture: str, kv_heads: int, kv_b: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """kv_b: what makes keys and values from latents is in one tensor."""
    experts: dict[str, list[np.ndarray]] = {}
    for name, parameter in text_tensors(model).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        module, _, kind = name.rpartition(".")
        delta = ".linear_attn" in module
        less_one = architecture in ("nemotron", "gemma2", "gemma3") or config.model_type in WITH_STATES
        less_one = less_one or (architecture == "muse-glimmer" and module != "model.norm")
        if less_one and "norm" in module and kind == "weight" and not delta:
            values = values + np.float32(1)  # what the class adds when it runs
        if module in GGUF_OUTER:
            yield f"{GGUF_OUTER[module]}.{kind}", values
            continue
        layer, inner = re.fullmatch(r"\D+\.(\d+)\.(.+)", module).groups()
        if inner == "mlp.act_fn":  # keys have them
            continue
        if architecture == "gpt-oss":
            if inner == "post_attention_layernorm":
                yield f"blk.{layer}.post_attention_norm.weight", values
                continue
            if inner == "mlp.experts":
                yield from gpt_oss_experts(f"blk.{layer}.ffn", kind, values)
                continue
        kind = "weight" if kind == "sinks" else kind
        if delta:
            own = inner.partition("linear_attn.")[2] or kind
            yield from ((f"blk.{layer}.{short}", part) for short, part in delta_tensors(config, own, values))
            continue
        if config.model_type == "llama4_text":
            inner = inner.replace("feed_forward", "mlp")
            values = values.swapaxes(1, 2) if inner == "mlp.experts" else values
        if config.model_type == "granitemoe_swa" and ("experts" in inner or "shared_mlp" in inner):  # nothing is split
            of = "_shexp" if "shared" in inner else "_exps"
            part = ("up" if "shared" in inner else "gate_up") if "input" in inner or "gate" in kind else "down"
            yield f"blk.{layer}.ffn_{part}{of}.weight", values
            continue
        if inner in ("mlp.experts", "block_sparse_moe.experts"):
            split = kind == "gate_up_proj"
            for part, half in zip(
                ("gate", "up") if split else ("down",), np.split(values, 1 + split, axis=1), strict=True
            ):
                yield f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(half)
            continue
        if kind == "e_score_correction_bias":
            yield f"blk.{layer}.exp_probs_b.bias", values.squeeze()
            continue
        if inner == "mlp.shared_expert_gate":
            values = values[0]
        if found := re.fullmatch(r"self_attn\.([qk])_layernorm\.norms\.(\d+)", inner):  # StableLM 2 12B
            experts.setdefault(f"blk.{layer}.attn_{found[1]}_norm.weight", []).append(values)
            continue
        if found := re.fullmatch(r"block_sparse_moe\.experts\.(\d+)\.(\w+)", inner):  # SmallThinker
            experts.setdefault(f"blk.{layer}.ffn_{found[2]}_exps.weight", []).append(values)
            continue
        if inner == "self_attn.kv_b_proj" and not kv_b:
            heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
            k, v = np.split(heads, [config.qk_nope_head_dim], axis=1)
            yield f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(k.swapaxes(1, 2))
            yield f"blk.{layer}.attn_v_b.weight", np.ascontiguousarray(v)
            continue
        if inner in ("ffn.proj_1", "shared_mlp.input_linear"):  # which converters split
            of = "_shexp" * inner.startswith("shared")
            for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                yield f"blk.{layer}.ffn_{part}{of}.weight", half
            continue
        short = GGUF_NAMES[inner]
        behind = ("gemma2", "gemma3", "olmo2", "exaone4", "glm4moe", "seed_oss", "muse-glimmer", *DELTA_NAMES.values())
        second = architecture in behind
        if second and inner == "post_attention_layernorm":
            short = "post_attention_norm"
        pairs: tuple[str, ...] = ("llama", "bamboo", "granite", "granite_swa", "granitemoe", "arcee", "smollm3")
        pairs += ("minicpm", "bailingmoe", "mistral3", "muse-glimmer", "olmo")
        if architecture in pairs and short in ("attn_q", "attn_k"):
            values = side_by_side(values, config.num_attention_heads if short == "attn_q" else kv_heads)
        if architecture == "falcon" and short == "attn_qkv":
            values = one_after_another(values, config.num_attention_heads, kv_heads)
        yield f"blk.{layer}.{short}.{kind}", values
    yield from ((name, np.stack(values)) for name, values in experts.items())
    for layer in range(config.num_hidden_layers if architecture == "muse-glimmer" else 0):
        yield f"blk.{layer}.attn_q_norm.weight", np.full(config.head_dim, config.qk_scale_factor, np.float32)
        yield f"blk.{layer}.attn_k_norm.weight", np.ones(config.head_dim, np.float32)


def text_tensors(model: Any) -> dict[str, Any]:
    """The tensors of what reads text, as in a model of that alone."""
    stored = model.state_dict()
    if not any(".language_model." in name for name in stored):
        return stored
    others = "model.vision_"
    return {name.replace(".language_model.", "."): value for name, value in stored.items() if others not in name}


def llama3_factors(config: Any) -> np.ndarray:
    """What llama.cpp's converter writes as rope_freqs.weight: how much slower each pair turns."""
    scaling = config.rope_parameters
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    wavelengths = 2 * np.pi * scaling["rope_theta"] ** exponents
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low or 1e-30)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def rope_type(config: Any) -> str:
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type"))


DELTA_NAMES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


def add_states(writer: Any, config: Any) -> None:
    """The keys of Gated DeltaNet, as llama.cpp's converter writes them."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    types = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{DELTA_NAMES[config.model_type]}.attention.recurrent_layers", types)
    writer.add_uint32(f"{DELTA_NAMES[config.model_type]}.full_attention_interval", 4)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([2, 1, 1, 0])


LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "plm")
USED = ("num_experts_per_tok", "moe_num_active_primary_experts", "moe_k")
COUNTS = ("moe_num_primary_experts", "moe_num_experts", "num_local_experts", "num_experts", "n_routed_experts")


def add_experts(writer: Any, config: Any) -> None:
    """The keys of experts, as llama.cpp's converter writes them."""
    writer.add_expert_count(next(n for name in COUNTS if (n := getattr(config, name, None)) is not None))
    writer.add_expert_used_count(next(getattr(config, name) for name in USED if hasattr(config, name)))
    for name in ("moe_intermediate_size", "moe_ffn_hidden_size"):
        if hasattr(config, name):
            writer.add_expert_feed_forward_length(getattr(config, name))
    if config.model_type in ("gpt_oss", "minimax_m2", "hunyuan_v1_moe", "llama4_text", "cohere2_moe"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "hunyuan_v1_moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if config.model_type == "cohere2_moe":
        writer.add_leading_dense_block_count(2)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_count(config.num_shared_experts)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if config.model_type == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.moe_num_shared_experts)
    if config.model_type == "minimax_m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type in ("granitemoeshared", "granitemoe_swa"):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.model_type == "laguna":
        writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(1)
    if config.model_type in ("qwen2_moe", "laguna", *WITH_STATES):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type in ("glm4_moe", "dots1"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type in LATENTS:
        sigmoid = config.model_type not in ("deepseek_v2", "mistral4")
        types = gguf.ExpertGatingFuncType
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.model_type != "glm4_moe_lite":  # as the first of its files
            writer.add_expert_gating_func(types.SIGMOID if sigmoid else types.SOFTMAX)
        if sigmoid or config.model_type == "mistral4":
            writer.add_expert_weights_norm(config.norm_topk_prob)
        if sigmoid or getattr(config, "topk_method", "greedy") != "greedy":
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)


def add_latents(writer: Any, config: Any, kv_b: bool) -> int:
    """The keys of latent attention, as llama.cpp's converter writes them, or wrote them; returns the number of heads in
    the cache."""
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    own = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    in_cache = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
    for add, size in zip((writer.add_key_length, writer.add_value_length), own if kv_b else in_cache, strict=True):
        add(size)
    if kv_b:
        return config.num_attention_heads
    writer.add_key_length_mla(own[0])
    writer.add_value_length_mla(own[1])
    return 1


def save_gguf(case: Case, config: Any, model: Any, path: Path, kv_b: bool = False) -> Path:
    own_files = mamba_files.SAVE | lfm2_files.SAVE | gemma_files.SAVE | kimi_files.SAVE
    if case.kind in own_files:
        return own_files[case.kind](config, model, path)
    others = {"mistral": "llama", "sparsellama": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2", "mixtral": "llama"}
    others["turbomixtral"] = "llama"
    others |= {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe"}
    others |= dict.fromkeys(LATENTS, "deepseek2") | {"mistral4": "mistral4", "plm": "plm"}
    others |= DELTA_NAMES | {"granitemoeshared": "granitemoe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2"}
    others |= {"granitemoe_swa": "granite_swa"}
    others |= {"ernie4_5_moe": "ernie4_5-moe", "bailing_moe": "bailingmoe2", "bailing_moe_1": "bailingmoe"}
    others["ministral3"] = "mistral3"
    others |= {"hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe"}
    others |= {"muse_glimmer_text": "muse-glimmer", "llama4_text": "llama4", "cohere2_moe": "cohere2moe"}
    architecture = others.get(case.kind, case.kind)
    opt, falcon = architecture == "opt", architecture == "falcon"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings + (2 if opt else 0))  # PowerInfer's converter: 2050
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture == "openelm":
        writer.add_feed_forward_length([config.ffn_size(layer) for layer in range(config.num_hidden_layers)])
        writer.add_head_count(config.num_query_heads)
    else:
        sizes = ("ffn_dim", "ffn_hidden_size", "moe_ffn_hidden_size", "intermediate_size_mlp")
        sizes += ("prefix_dense_intermediate_size", "intermediate_size")
        writer.add_feed_forward_length(next(getattr(config, size) for size in sizes if hasattr(config, size)))
        writer.add_head_count(getattr(config, "num_attention_heads_per_layer", None) or config.num_attention_heads)
    if architecture == "openelm":
        kv_heads = config.num_kv_heads
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_freq_constant)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    elif opt:
        kv_heads = config.num_attention_heads
    elif case.kind in LATENTS:
        kv_heads = add_latents(writer, config, kv_b)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    elif falcon:
        kv_heads = model.transformer.h[0].self_attention.num_kv_heads
        writer.add_tensor_data_layout("jploski")
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        rope = config.rope_parameters if architecture != "smallthinker" else {"rope_theta": config.rope_theta}
        rope = rope.get("full_attention", rope)
        stretch = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))  # of Hunyuan's
        writer.add_rope_freq_base(rope["rope_theta"] * stretch)
        if architecture == "nemotron":
            writer.add_layer_norm_eps(config.norm_eps)
            writer.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
        elif architecture in ("jais2", "cohere2", "cohere2moe", "stablelm", "olmo"):
            writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", 1e-5))
            share = config.rope_parameters.get("partial_rotary_factor", 1)
            writer.add_rope_dimension_count(int(head_dim * share))
        else:
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if case.kind == "cohere2_moe":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if architecture == "granite_swa":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
            writer.add_array("granite_swa.attention.rope_pattern", [theta != 0 for theta in config.layer_rope_theta])
        if case.kind in WITH_STATES:
            add_states(writer, config)
        if architecture == "apertus":
            for part in ("alpha_n", "alpha_p", "beta", "eps"):
                numbers = [getattr(layer.mlp.act_fn, part).item() for layer in model.model.layers]
                getattr(writer, f"add_xielu_{part}")(numbers)
        if architecture == "laguna":
            writer.add_rope_dimension_count_swa(head_dim)
            writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        if architecture in ("glm4", "glm4moe", "minimax-m2", "bailingmoe2", "laguna"):
            writer.add_rope_dimension_count(head_dim // 2)
        if architecture in ("llama", "arcee", "smollm3"):
            writer.add_vocab_size(config.vocab_size)
            writer.add_rope_dimension_count(head_dim)
    if not opt:
        writer.add_head_count_kv(kv_heads)
    if case.kind != "plm" and any(hasattr(config, name) for name in USED):
        add_experts(writer, config)
    for key, value in case.metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add = add[type(value)]
        add(f"{architecture}.{key}", value)
    if not opt and rope_type(config) == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    if not opt and rope_type(config) == "longrope":
        for length in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    for name, values in gguf_tensors(config, model, architecture, kv_heads, kv_b):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save(case: Case, config: Any, model: Any, layout: str, folder: Path) -> Path:
    if layout.startswith("gguf"):
        kv_b = layout == "gguf-kv-b" or case.kind == "plm"
        return save_gguf(case, config, model, folder / "model.gguf", kv_b=kv_b)
    return save_folder(case, model, folder / "model", version4=layout == "folder-v4")


# --- this engine ------------------------------------------------------------------------------------------------


def open_executor(path: Path, quantize: str | None = None, **options: Any) -> Executor:
    settings = {"threads": 1, "context": CONTEXT, "kv_type": "f32", "prefill_chunk": TOKENS, "max_batch": 4}
    return load(open_checkpoint(path, quantize), EngineConfig(**(settings | options)))


def run_chunks(
    executor: Executor, tokens: np.ndarray, chunks: list[int], pages: np.ndarray, state: int = 0
) -> np.ndarray:
    """Logits [T, vocab] of one sequence fed in pieces of the given lengths. state: its slot."""
    results, start = [], 0
    slot = np.array([state], np.int32)
    for length in chunks:
        span = np.arange(start, start + length, dtype=np.int32)
        batch = Batch(
            tokens=np.ascontiguousarray(tokens[span]),
            positions=span,
            rows=np.zeros(length, np.int32),
            page_table=pages[None],
            logit_rows=np.arange(length, dtype=np.int32),
            read_states=slot,
            states=slot,
        )
        results.append(executor.forward(batch).copy())
        start += length
    assert start == len(tokens)
    return np.concatenate(results)


def scattered_pages(executor: Executor, sequences: int) -> np.ndarray:
    """Page ids [sequences, pages of one] in no order, none twice."""
    count = -(-TOKENS // executor.page_size)
    order = np.random.default_rng(7).permutation(executor.n_pages).astype(np.int32)
    assert len(order) >= sequences * count
    return order[: sequences * count].reshape(sequences, count)


def prompt(case: Case, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], TOKENS).astype(np.int32)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def case_layouts() -> list[Any]:
    return [pytest.param(case, layout, id=f"{case.name}-{layout}") for case in CASES for layout in case.layouts]


TURNED = ("llama", "sparsellama", "bamboo", "granite", "arcee", "smollm3", "falcon", "minicpm", "ministral3")
"""Kinds whose GGUF files have rows of queries and keys in another order, which a device undoes."""


def device_cases() -> list[Any]:
    """Cases that a GPU runs, as a folder and as a GGUF file in turn; one of each of `TURNED` as both. That every file
    is read as it is to be: test_architectures.py; what a device gets of either differs by the order of rows alone."""
    found, both, layouts = [], set(TURNED), ("folder", "gguf")
    for at, case in enumerate(case for case in CASES if not {case.kind, case.name} & {*ON_CPU_ALONE}):
        every = [layout for layout in layouts if layout in case.layouts]
        some = every if case.kind in both else [every[at % len(every)]]
        if len(every) == 2:
            both.discard(case.kind)
        found += [pytest.param(case, layout, id=f"{case.name}-{layout}") for layout in some]
    return found


def run_two(executor: Executor, first: np.ndarray, second: np.ndarray, pages: np.ndarray) -> list[np.ndarray]:
    """Two sequences whose beginnings are in the cache already go on together: 55 tokens of one, 25 of the other."""
    run_chunks(executor, first[:20], [20], pages[0], state=3)
    run_chunks(executor, second[:50], [50], pages[1], state=1)
    slots = np.array([[3, 1], [0, 1], [0, 2], [3, 1], [3, 1], [3, 0]], np.int32)  # some go on elsewhere
    lengths = [TOKENS - 20, TOKENS - 50]
    results: list[list[np.ndarray]] = [[], []]
    for part in range(5):  # each call takes a fifth of either
        spans = [np.arange(TOKENS - n, TOKENS, dtype=np.int32).reshape(5, -1)[part] for n in lengths]
        batch = Batch(
            tokens=np.concatenate([first[spans[0]], second[spans[1]]]),
            positions=np.concatenate(spans),
            rows=np.repeat(np.arange(2, dtype=np.int32), [len(span) for span in spans]),
            page_table=np.ascontiguousarray(pages),
            logit_rows=np.arange(sum(len(span) for span in spans), dtype=np.int32),
            read_states=slots[part],
            states=slots[part + 1],
        )
        answer = executor.forward(batch).copy()
        results[0].append(answer[: len(spans[0])])
        results[1].append(answer[len(spans[0]) :])
    return [np.concatenate(parts) for parts in results]
