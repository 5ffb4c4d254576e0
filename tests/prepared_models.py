"""Checkpoints made in memory, of any sizes and types, for the tests of what is prepared for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stored_weights import stored_evenly

from powerinfer.config import AttentionConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig, uniform
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.source import Source
from powerinfer.formats.tensors import RawTensor


def saved_results(file: Path, subject: str) -> list[dict[str, Any]]:
    """The results of a subject's trials in a file, the newest first; none if there is no file."""
    entries = json.loads(file.read_text())["trials"] if file.exists() else []
    return [one["result"] for one in entries if one["subject"] == subject]


def checkpoint(
    path: Path,
    types: str | Mapping[str, str] = "F16",
    *,
    d_model: int = 64,
    d_ff: int = 96,
    layers: int = 2,
    gated: bool = True,
    by_neuron: bool = False,
    quantize: str | None = None,
    seed: int = 1,
    scale: float = 0.05,
) -> Checkpoint:
    """The FFN of a model with random weights of about `scale`, at a path where no file need be.

    types: of all its matrices, or by name (gate, up, down); by_neuron: down is stored as down_rows.
    """
    attention = AttentionConfig(1, 1, 2, RopeConfig(dim=2))
    config = ModelConfig(
        architecture="llama", d_model=d_model, vocab_size=4, context_length=8, norm_eps=1e-5, tied_embeddings=True,
        layers=uniform(layers, LayerConfig(attention, FfnConfig(d_ff, "relu", gated=gated))),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        shapes = {"gate": (d_ff, d_model), "up": (d_ff, d_model), "down": (d_model, d_ff)}
        for name, shape in list(shapes.items())[0 if gated else 1 :]:
            kind = types if isinstance(types, str) else types[name]
            if name == "down" and by_neuron:
                name, shape = "down_rows", (d_ff, d_model)
            data = stored_evenly(kind, *shape, scale, rng)
            tensors[f"layers.{layer}.{name}"] = RawTensor(kind, shape, data)
        for name, rows in (("q", 2), ("k", 2), ("v", 2)):
            tensors[f"layers.{layer}.{name}"] = RawTensor(
                "F16", (rows, d_model), stored_evenly("F16", rows, d_model, scale, rng)
            )
        tensors[f"layers.{layer}.o"] = RawTensor("F16", (d_model, 2), stored_evenly("F16", d_model, 2, scale, rng))
    tensors["embed"] = RawTensor("F16", (4, d_model), stored_evenly("F16", 4, d_model, scale, rng))
    return Checkpoint(Source("gguf", path, config, {}, tensors, []), quantize)
