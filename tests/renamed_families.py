"""Families that `transformers` does not have but for the names of tensors and keys: folders of their nearest one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
BASES = {
    "minicpm": "granite", "bailing_moe": "glm4_moe", "bailing_moe_1": "granitemoeshared", "plm": "deepseek_v3",
}  # fmt: skip
"""Kind -> the kind of `transformers` that computes the same."""


def as_minicpm(config: dict[str, Any], tensors: Tensors) -> Tensors:
    layers = config["num_hidden_layers"]
    config |= {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "hidden_act": "silu"}
    config["scale_emb"] = config.pop("embedding_multiplier")
    config["scale_depth"] = config.pop("residual_multiplier") * layers**0.5
    config["dim_model_base"] = config["hidden_size"] / config.pop("logits_scaling")
    del config["attention_multiplier"]
    return tensors


_BAILING = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias", "block_sparse_moe.router.layer": "mlp.gate",
}  # fmt: skip


def as_bailing(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Ling and Ring of the first version, and of the second, which is like GLM-4.5."""
    second = config["model_type"] == "glm4_moe"
    name = f"BailingMoe{'V2' * second}ForCausalLM"
    keys = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "num_local_experts": None}
    if not second:
        keys = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"}
        config |= {"num_shared_experts": config.pop("shared_intermediate_size") // config["intermediate_size"]}
        config |= {"first_k_dense_replace": 0, "norm_topk_prob": True}
    for old, new in keys.items():
        value = config.pop(old, None)
        if new is not None:
            config[new] = value
    config |= {"architectures": [name], "model_type": "bailing_moe", "use_bias": False, "use_qkv_bias": False}
    if second:
        config["norm_topk_prob"] = True  # which the class of Ling does not look at
        config |= {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0}
        config["partial_rotary_factor"] = config["rope_parameters"].pop("partial_rotary_factor")
    else:
        config["intermediate_size"] = 88
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
            del config[key]
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in _BAILING.items():
            name = name.replace(old, new)
        if ".self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            renamed[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif "block_sparse_moe.input_linear" in name or "shared_mlp.input_linear" in name:
            renamed |= _experts(name, tensor, ("gate", "up"))
        elif "output_linear" in name:
            renamed |= _experts(name, tensor, ("down",))
        elif not re.search(r"self_attn\.[kv]_proj", name):
            renamed[name] = tensor
    return renamed


def _experts(name: str, tensor: torch.Tensor, parts: tuple[str, ...]) -> Tensors:
    """Granite's matrices of all experts, or of the shared one, which are one tensor, as those of each expert."""
    prefix = name.partition("block_sparse_moe" if "block_sparse" in name else "shared_mlp")[0]
    halves = zip(parts, tensor.chunk(len(parts), dim=-2), strict=True)
    if "shared_mlp" in name:
        return {f"{prefix}mlp.shared_experts.{part}_proj.weight": half.contiguous() for part, half in halves}
    return {
        f"{prefix}mlp.experts.{at}.{part}_proj.weight": half[at].contiguous()
        for part, half in halves
        for at in range(len(tensor))
    }


def as_plm(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """DeepSeek-V3 without experts; `families.build` exchanges its FFNs."""
    code = {"AutoModelForCausalLM": "modeling_plm.PLMForCausalLM"}
    config |= {"architectures": ["PLMForCausalLM"], "model_type": "plm", "hidden_act": "relu2", "auto_map": code}
    for key in [key for key in config if "expert" in key or "group" in key or key.startswith(("routed", "moe"))]:
        del config[key]
    return tensors


RENAME: dict[str, Callable[[dict[str, Any], Tensors], Tensors]] = {
    "minicpm": as_minicpm, "bailing_moe": as_bailing, "bailing_moe_1": as_bailing, "plm": as_plm,
}  # fmt: skip
"""Kind -> what changes config.json in place, and gives the tensors under their names."""


def rename(kind: str, folder: Path) -> None:
    """Make a folder of its nearest kind one of this kind."""
    path, shards = folder / "config.json", sorted(folder.glob("*.safetensors"))
    config = json.loads(path.read_text())
    tensors = RENAME[kind](config, {name: value for shard in shards for name, value in load_file(shard).items()})
    for file in (*shards, folder / "model.safetensors.index.json"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    path.write_text(json.dumps(config))
