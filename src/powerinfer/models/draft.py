"""Wiring of the draft head of a model (`DraftHeadConfig`), behind the model itself."""

from __future__ import annotations

from copy import copy
from typing import Any, Protocol

from powerinfer.formats.layout import draft_prefix
from powerinfer.formats.tensors import RawTensor
from powerinfer.models.blocks import wire_layer
from powerinfer.models.builder import Builder, Matrix, Norm, OwnFfn, Tensors, vector
from powerinfer.models.eagle import wire_eagle


class DraftBuilder(Builder[Matrix, Norm], Protocol):
    """A device with a draft head: `CpuExecutor`, which documents the methods, or the `Recorder` of the inventory."""

    def draft_input(
        self, embedding: RawTensor | None, embed_norm: Norm, hidden_norm: Norm, matrix: RawTensor
    ) -> None: ...
    def draft_head(self, norm: Norm, matrix: RawTensor | None) -> None: ...


def wire_draft(
    builder: DraftBuilder[Matrix, Norm], checkpoint: Tensors, ffn: OwnFfn[Norm] | None = None
) -> None:
    """Wire what it reads, its layer, and its logits. Every tensor of it is taken once, and perhaps the final norm. ffn:
    wires the layer's FFN."""
    config, at = checkpoint.config, draft_prefix(checkpoint.config)
    draft = config.draft
    assert draft is not None
    if draft.eagle is not None:
        device: Any = builder  # an `EagleBuilder`, which a GPU is not
        return wire_eagle(device, checkpoint)
    embed_norm, hidden_norm = (_norm(builder, checkpoint, f"{at}draft_{name}_norm") for name in ("embed", "hidden"))
    embedding = checkpoint.take(f"{at}draft_embed") if draft.embedding else None
    builder.draft_input(embedding, embed_norm, hidden_norm, checkpoint.take(f"{at}draft_join"))
    layers = copy(checkpoint)  # the same tensors, of a model with one more layer
    layers.config = config.with_draft
    wire_layer(builder, layers, config.n_layers, ffn)
    norm = _norm(builder, checkpoint, f"{at}draft_norm" if draft.final_norm else "final_norm")
    builder.draft_head(norm, checkpoint.take(f"{at}draft_head") if draft.head else None)


def _norm(builder: DraftBuilder[Matrix, Norm], checkpoint: Tensors, name: str) -> Norm:
    return builder.norm(checkpoint.take(name).float32(), vector(checkpoint, f"{name}_bias"))
