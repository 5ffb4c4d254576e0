"""benchmarks/models/disk_models.py: as large as it says, and with everything that the models need."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from benchmarks.models import disk_models, expert_models, writers
from benchmarks.models.weights import Plan
from powerinfer.config import ModelConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.expert_files import open_trace, trace_place
from powerinfer.formats.folder_config import read_config
from powerinfer.formats.quant import block_type


def file_bytes(config: ModelConfig, about: expert_models.Weights) -> int:
    """Bytes of the tensors of a GGUF file."""
    kinds = ((dims, expert_models.kind_of(name, dims, about, about.routing(config)))
             for name, dims in expert_models.tensors(config))  # fmt: skip
    return sum(prod(dims[:-1]) * block_type(kind).row_bytes(dims[-1]) for dims, kind in kinds)


def test_about_three_gigabytes() -> None:
    layers, about = disk_models.LAYERS, expert_models.Weights(disk_models.STORED)
    skewed = replace(about, skew=disk_models.SKEW, locality=disk_models.LOCALITY)
    assert 2.8e9 < file_bytes(disk_models.dense(layers["dense"]), about) < 3.1e9
    assert 2.8e9 < file_bytes(disk_models.experts(layers["experts"]), skewed) < 3.1e9
    tensors = writers.file_tensors(disk_models.relu(layers["relu"]))
    assert 2.8e9 < sum(prod(writers.stored_shape(dims, disk_models.STORED)) for _, dims in tensors) < 3.1e9


TINY = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
    "vocab_size": 1024, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


def tiny_config(layers: int, **keys: object) -> ModelConfig:
    return read_config(TINY | {"num_hidden_layers": layers} | keys, Path("config.json"))


def tiny_dense(layers: int) -> ModelConfig:
    return replace(tiny_config(layers, model_type="llama"), architecture="llama")


def tiny_relu(layers: int) -> Plan:
    sizes = {"d_model": 128, "d_ff": 512, "n_heads": 4, "n_kv_heads": 2, "n_layers": layers, "vocab": 1024}
    return Plan(family="llama", activation="drelu", **sizes, noise_rank=47)


def tiny_experts(layers: int) -> ModelConfig:
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
    heads = {"num_attention_heads": 8, "head_dim": 32, "hidden_size": 256}
    return replace(tiny_config(layers, model_type="qwen3_moe", **experts, **heads), architecture="qwen3moe")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in (("dense", tiny_dense), ("relu", tiny_relu), ("experts", tiny_experts)):
        monkeypatch.setattr(disk_models, name, config)
    monkeypatch.setattr(disk_models, "PROFILED", 512)
    monkeypatch.setattr(disk_models, "TRACED", 512)


@pytest.mark.usefixtures("tiny")
def test_models_and_what_belongs_to_them(tmp_path: Path) -> None:
    made = {name: disk_models.make(tmp_path, name, 1, 2) for name in ("dense", "relu", "experts")}
    written = {name: {file.name for file in disk_models.prepared_files(path)} for name, path in made.items()}
    assert written == {
        "dense": {"dense.gguf"},
        "relu": {"relu.gguf", "neurons.safetensors", "predictor.safetensors", "profile.safetensors"},
        "experts": {"experts.gguf", "experts.safetensors"},
    }
    assert [open_checkpoint(path).config.layers[0].ffn.activation for path in made.values()] == [
        "silu",
        "drelu",
        "silu",
    ]
    experts = open_checkpoint(made["experts"])
    trace = open_trace(experts, trace_place(experts, None, disk_models.trace_of(made["experts"])))
    assert {len(selected) for selected in trace.selected.values()} == {disk_models.TRACED}
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in made:
        disk_models.make(tmp_path, name, 1, 2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "what exists is kept"
