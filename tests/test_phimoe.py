"""Phi-3.5-MoE: what SparseMixer selects, its settings, and what is refused. What it computes: families.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("families")

import torch
from families import PHIMOE_ROPE, Case, case_named, random_model, save
from test_architectures import check_same_bits
from transformers.models.phimoe.modeling_phimoe import sparsemixer
from truth import Truth

from powerinfer import _native
from powerinfer.config import ExpertsConfig, RouterConfig
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.folder_config import read_config
from powerinfer.models.rope import rope_frequencies

SIZES: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 101,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 131072,
    "num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01,
    "attention_bias": True, "lm_head_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"},
    "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.243163121016122,
        "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("nearness", [0.0, 0.01, 0.2, 1.0])
def test_the_router_selects_as_the_class_does(nearness: float) -> None:
    spec = _native.RouterSpec(2, "sparsemixer", nearness=nearness)
    several = 0
    for seed in range(200):
        logits = 3 * np.random.default_rng(seed).standard_normal((1, 8)).astype(np.float32) - seed % 3
        shares, selected = sparsemixer(torch.from_numpy(logits).double(), nearness, training=False)
        wanted = dict(zip(selected[0].tolist(), shares[0].tolist(), strict=True))
        ours = dict(zip(*_native.route(spec, logits[0]), strict=True))
        assert list(ours) == sorted(wanted) and np.allclose([ours[at] for at in wanted], list(wanted.values()), 1e-5)
        several += any(share < 0.999 for share in wanted.values())
    assert several > 100 or nearness <= 0.01


def test_the_published_settings() -> None:
    unread: list[str] = []
    config = read_config(SIZES, Path("phimoe"), None, unread)
    rope, ffn = config.layers[0].heads.rope, config.layers[0].ffn
    assert config.head_bias and config.norm == "layer" and config.layers[0].heads.o_bias and rope is not None
    assert isinstance(ffn, ExpertsConfig) and ffn.size == 40
    assert ffn.router == RouterConfig(2, "sparsemixer", normalise=False, nearness=0.01)
    assert unread == ["input_jitter_noise"]  # of training
    for context, divisor in ((4096, 1.0), (4097, 2.0)):
        frequencies, factor = rope_frequencies(rope, context)
        assert factor == 1.243163121016122 and frequencies[0] == np.float32(1 / divisor)


def test_each_length_has_its_factor() -> None:
    config = read_config(SIZES | {"rope_scaling": SIZES["rope_scaling"] | {"long_mscale": 2.0}}, Path("phimoe"))
    rope = config.layers[0].heads.rope
    assert rope is not None and [rope_frequencies(rope, n)[1] for n in (1, 4096, 4097)] == [*[1.243163121016122] * 2, 2]


def _rope(**changes: Any) -> dict[str, Any]:
    scaling = {key: value for key, value in (SIZES["rope_scaling"] | changes).items() if value is not None}
    return {"rope_scaling": scaling}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is '3'"),
        ({"num_local_experts": 1}, "num_experts_per_tok|2 experts a token of 1"),
        ({"router_jitter_noise": -0.1}, "router_jitter_noise"),
        ({"lm_head_bias": 1}, "lm_head_bias is '1', not true or false"),
        (_rope(short_mscale=None), "short_mscale is missing"),
        (_rope(long_mscale=0), "long_mscale"),
        (_rope(long_factor=[1.0] * 7), "long_factor is not a list of 8 positive numbers"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'; of this family only longrope is supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(SIZES | changes, Path("phimoe"))


def test_other_families_have_no_factors_of_lengths() -> None:
    other = SIZES | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "num_local_experts": 0, "auto_map": {}}
    with pytest.raises(ModelError, match="long_mscale is set, which this engine does not support"):
        read_config(other, Path("phi3"))


@pytest.mark.parametrize("layout", ["folder", "gguf"])
def test_a_bias_of_the_head_that_is_missing_or_too_short(layout: str, tmp_path: Path) -> None:
    case = case_named("phimoe")
    truth = Truth(case)
    model = truth.model
    model.lm_head.bias = torch.nn.Parameter(model.lm_head.bias[:99].detach())
    with pytest.raises(ModelError, match=r"lm_head\.bias|output\.bias"):
        open_checkpoint(save(case, truth.config, model, layout, tmp_path))


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
def test_the_same_bits_with_narrow_types(quantize: str, tmp_path: Path) -> None:
    settings = {"head_dim": 32, "intermediate_size": 96, "attention_bias": True, "lm_head_bias": True}
    case = Case("narrow", "phimoe", settings | {"rope_parameters": PHIMOE_ROPE | {
        "short_factor": [1.5] * 16, "long_factor": [2.5] * 16,
    }, "original_max_position_embeddings": 64}, {})  # fmt: skip
    path = save(case, case.config(), random_model(case, case.config(), seed=11), "folder", tmp_path)
    check_same_bits(case, path, quantize=quantize, kv_type="f16")
