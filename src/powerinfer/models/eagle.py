"""Wiring of an EAGLE head (`EagleConfig`), behind the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol

from powerinfer.formats.layout import draft_prefix, feature_norms
from powerinfer.formats.tensors import RawTensor
from powerinfer.models.blocks import wire_layer
from powerinfer.models.builder import Builder, Matrix, Norm, Tensors, Vector


class EagleBuilder(Builder[Matrix, Norm], Protocol):
    """A device with an EAGLE head: `CpuExecutor`, which documents the methods, or the `Recorder` of the inventory."""

    def eagle_input(
        self,
        norms: Sequence[Norm],
        matrix: RawTensor,
        embedding: RawTensor | None,
        embed_norm: Norm,
        hidden_norm: Norm,
    ) -> None: ...
    def eagle_head(self, norm: Norm, matrix: RawTensor | None, tokens: Vector) -> None: ...


def wire_eagle(builder: EagleBuilder[Matrix, Norm], checkpoint: Tensors) -> None:
    """Wire what it reads, its layer, and its logits. Every tensor of it is taken once."""
    config, at = checkpoint.config, draft_prefix(checkpoint.config)
    draft = config.draft
    assert draft is not None and draft.eagle is not None
    eps = draft.eagle.norm_eps

    def norm(name: str) -> Norm:
        return builder.norm(checkpoint.take(f"{at}{name}").float32(), None, None, eps)

    embedding = checkpoint.take(f"{at}draft_embed") if draft.embedding else None
    norms = [norm(name) for name in feature_norms(draft.eagle)]
    of_input = norm("draft_embed_norm"), norm("draft_hidden_norm")
    builder.eagle_input(norms, checkpoint.take(f"{at}draft_fuse"), embedding, *of_input)
    layers = copy(checkpoint)  # the same tensors, of a model with one more layer
    layers.config = replace(config.with_draft, residual_scale=1.0)
    wire_layer(builder, layers, config.n_layers, None)
    matrix = checkpoint.take(f"{at}draft_head") if draft.head else None
    builder.eagle_head(norm("draft_norm"), matrix, checkpoint.take(f"{at}draft_tokens").float32())
