"""The draft head (MTP) of a model's files: a layer behind the model's, and what is around it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from powerinfer.config import (
    DraftHeadConfig,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    NoAttention,
    NoFfn,
    ParallelConfig,
    StateKind,
)
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.family import Folder, Tensors
from powerinfer.formats.source import MTP, NO_MTP, Fused, Names, SingleTensor, collect_some
from powerinfer.formats.tensors import StoredTensor

_FIRST_OF = f"of {{}} layers that predict further tokens {MTP} only the first is read"
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
"""Keys of config.json by which layers behind the model's are draft heads."""


def split_draft(
    config: ModelConfig, stored: Tensors, metadata: Mapping[str, Any], family: Folder
) -> tuple[Tensors, Tensors, int]:
    """(tensors of the model in a folder, those of its first draft head, how many heads there are).

    The head's have the names of a layer behind the model's. metadata: config.json.
    """
    of_layer, stated = re.compile(r"model\.layers\.(\d{1,9})\."), any(metadata.get(key) for key in _COUNTS)
    of_model: Tensors = {}
    of_head: Tensors = {}
    numbers = set()
    for name, tensor in stored.items():
        number, new = -1, name
        place = None if family.head_name is None else family.head_name(name, metadata)
        if place is not None:
            number, new = place[0], f"model.layers.{config.n_layers}.{place[1]}"
        elif stated and (match := of_layer.match(name)):
            number = int(match[1]) - config.n_layers
        if number < 0:
            of_model[name] = tensor
            continue
        numbers.add(number)
        if number == 0:
            of_head[new] = tensor
    return of_model, of_head, len(numbers)


def read_draft(
    config: ModelConfig,
    tensors: dict[str, StoredTensor],
    stored: Mapping[str, SingleTensor],
    names: Names,
    source: str,
    fused: Sequence[Fused],
    heads: int,
    notes: list[str],
) -> ModelConfig:
    """The configuration with its draft head, whose tensors join `tensors`; where the head cannot be read without it,
    and a note says why.

    stored: the head's tensors under the names of the file; heads: how many the file has.
    """
    try:
        draft, of_head = _read(config, stored, names, source, fused)
    except ModelError as error:
        notes.append(f"{NO_MTP}: {str(error).removeprefix(f'{source}: ')}")
        return config
    if heads > 1:
        notes.append(_FIRST_OF.format(heads))
    at = layout.draft_prefix(config)
    if draft.embedding and _alike(of_head[f"{at}draft_embed"], tensors["embed"]):
        draft = replace(draft, embedding=False)
        del of_head[f"{at}draft_embed"]
    if draft.head and _alike(of_head[f"{at}draft_head"], tensors["embed" if config.tied_embeddings else "head"]):
        draft = replace(draft, head=False)
        del of_head[f"{at}draft_head"]
    tensors |= of_head
    return replace(config, draft=draft)


def _read(
    config: ModelConfig, stored: Mapping[str, SingleTensor], names: Names, source: str, fused: Sequence[Fused]
) -> tuple[DraftHeadConfig, dict[str, StoredTensor]]:
    at = layout.draft_prefix(config)

    def has(name: str) -> bool:
        return name in names.inner and names(f"{at}{name}") in stored

    if "draft_join" not in names.inner:
        raise ModelError(f"{source}: those of {config.architecture} are not read")
    draft = DraftHeadConfig(
        _layer(config, has("router"), source),
        embedding=has("draft_embed"),
        head=has("draft_head"),
        final_norm=has("draft_norm"),
    )
    drafting = replace(config, draft=draft)
    layout.check(drafting, source)
    return draft, collect_some(layout.draft_shapes(drafting), stored, names, source, config.architecture, fused)


def _layer(config: ModelConfig, routed: bool, source: str) -> LayerConfig:
    """The head's layer: one of the model's, with experts or without, and with attention, if that is a layer by itself
    that of another one."""

    def suits(layer: LayerConfig) -> bool:
        return not isinstance(layer.ffn, NoFfn) and isinstance(layer.ffn, ExpertsConfig) == routed

    attentions = {one for one in config.attentions if not isinstance(one, StateKind | NoAttention | ParallelConfig)}
    layers = {replace(layer, attention=one) for layer in config.layers if suits(layer) for one in attentions}
    if len(layers) != 1:
        count = "no layer" if not layers else f"{len(layers)} kinds of layers"
        raise ModelError(f"{source}: the model has {count} that its layer could be like")
    return layers.pop()


def _alike(first: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same, by samples: files of DeepSeek-V3 and GLM-4.5 have copies of what is shared."""
    kinds = [(one.type, one.shape, one.nbytes, list(one.samples())) for one in (first, other)]
    return kinds[0] == kinds[1]
