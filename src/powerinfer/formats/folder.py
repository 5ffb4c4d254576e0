"""Hugging Face folders: config.json and safetensors -> `ModelConfig` and canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.config import THRESHOLDED, ExpertsConfig, FfnConfig, ModelConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.column_order import settle_columns
from powerinfer.formats.draft_head import read_draft, split_draft
from powerinfer.formats.families import FOLDERS
from powerinfer.formats.family import Tensors
from powerinfer.formats.folder_config import quantisation, read_config
from powerinfer.formats.folder_quantised import describe, settings_of_modelopt, unpack
from powerinfer.formats.json_file import read_json
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.safetensors_file import read_safetensors
from powerinfer.formats.source import (
    Fused,
    Names,
    SingleTensor,
    Source,
    collect,
    drop_head_predictor,
    predictor_shapes,
)
from powerinfer.formats.tensors import MadeTensor, RawTensor, StoredTensor

THRESHOLDS = (".threshold", ".product_threshold")
"""The ends of the names of thresholds of neurons, which are parameters of their own, not weights of a module."""
_MAX_SHARDS = 1 << 12


def file_names(config: ModelConfig, stored: Mapping[str, SingleTensor]) -> Names:
    """Spelling of canonical names in this folder."""
    family = FOLDERS[config.architecture]
    return family.names if family.find_names is None else family.find_names(config, stored)


def fused(config: ModelConfig, names: Names) -> Sequence[Fused]:
    """The matrices that files of the family store in one tensor."""
    matrices = FOLDERS[config.architecture].fused
    return matrices(config, names) if callable(matrices) else matrices


def open_folder(folder: Path, draft_head: bool = False) -> Source:
    """The model in a Hugging Face folder; ModelError if it is malformed or not one this engine runs.

    draft_head: with the head that predicts further tokens, if it has one.
    """
    metadata, config_files = _read_metadata(folder)
    notes: list[str] = []
    unread: list[str] = []
    config = read_config(metadata, folder, notes, unread)
    layout.check(config, str(folder / "config.json"))
    in_files, files = read_weights(folder)
    stored: Tensors = {name: tensor for name, tensor in in_files.items() if not is_buffer(name)}
    settings = quantisation(metadata)
    if settings is not None:
        for file in files:
            file.check()
        unpack(stored, settings, str(folder))
    family = FOLDERS[config.architecture]
    config = _adapted(config, stored, files, folder)
    made_tensors: dict[str, MadeTensor] = {}
    stored, of_head, heads = split_draft(config, stored, metadata, family)
    if family.make is not None:
        made_tensors = family.make(config, stored, str(folder))
    elif any(isinstance(layer.ffn, ExpertsConfig) for layer in config.layers):
        stored, of_head = dict(_expert_tensors(stored)), dict(_expert_tensors(of_head))
    stored, left_out = drop_head_predictor(stored)
    notes += left_out
    if family.rename is not None:
        notes += family.rename(stored)
    names = file_names(config, stored)
    config, stored = _with_thresholds(config, stored, folder)
    if config.tied_embeddings:
        config = _with_stored_head(config, stored, files, names, notes)
    predictors = family.predictors and any(".mlp.predictor." in name for name in stored)
    extra = predictor_shapes(config, stored, names) if predictors else ()
    tensors = collect(config, stored, names, str(folder), extra, fused(config, names), made_tensors)
    if draft_head and heads:
        config = _with_draft(config, tensors, of_head, heads, files, notes, str(folder))
    if settings is not None:
        settle_columns(config.with_draft, tensors, str(folder))
        notes += describe(tensors.values())
    if family.norms_less_one:
        _add_one_to_norms(tensors, files, family.whole_norms)
    _make_rates(tensors)
    source = Source("hf", folder, config, metadata, tensors, [*config_files, *files], notes, unread=unread)
    if not predictors:
        return source
    # The model's own code skips neurons whose predicted probability is at most a half.
    notes.append("the files include predictors, with threshold 0")
    return replace(source, predictor_threshold=0.0)


def _read_metadata(folder: Path) -> tuple[dict[str, Any], list[MappedFile]]:
    """config.json, and the settings of quantised weights where they are in another file."""
    metadata, file = read_json(folder / "config.json")
    if "quantization_config" in metadata or not (folder / "hf_quant_config.json").exists():
        return metadata, [file]
    settings, settings_file = read_json(folder / "hf_quant_config.json")
    return metadata | {"quantization_config": settings_of_modelopt(settings)}, [file, settings_file]


def _make_rates(tensors: dict[str, StoredTensor]) -> None:
    """Decays of states, of whose rates files have the logarithms."""
    for name in [name for name in tensors if name.endswith((".delta_decay", ".mamba_a"))]:
        with np.errstate(over="ignore"):  # `Checkpoint.take` refuses what is no number
            rates = -np.exp(tensors[name].gathered().float32())
        tensors[name] = RawTensor("F32", rates.shape, rates.astype("<f4").view(np.uint8))


def _with_draft(
    config: ModelConfig,
    tensors: dict[str, StoredTensor],
    of_head: Tensors,
    heads: int,
    files: Sequence[MappedFile],
    notes: list[str],
    source: str,
) -> ModelConfig:
    """The configuration with the draft head, as of `read_draft`. It may store experts otherwise than the model."""
    for file in files:
        file.check()
    family, at = FOLDERS[config.architecture], f"model.layers.{config.n_layers}."
    if family.rename is not None:
        family.rename(of_head)
    names = file_names(config, {name.replace(at, "model.layers.0."): tensor for name, tensor in of_head.items()})
    names = names.extended(family.draft_names)
    return read_draft(config, tensors, of_head, names, source, fused(config, names), heads, notes)


def _adapted(config: ModelConfig, stored: Tensors, files: list[MappedFile], folder: Path) -> ModelConfig:
    """The configuration with the settings that are tensors in folders of the family."""
    adapt = FOLDERS[config.architecture].adapt
    if adapt is None:
        return config
    for file in files:
        file.check()
    config = adapt(config, stored, str(folder))
    layout.check(config, str(folder / "config.json"))
    return config


def _expert_tensors(stored: Tensors) -> Iterator[tuple[str, SingleTensor]]:
    """The tensors with the names of other layers."""
    for name, tensor in stored.items():
        if name.endswith(".e_score_correction_bias"):
            name = name.removesuffix("_bias") + ".bias"
        yield name, tensor


def _with_thresholds(
    config: ModelConfig, stored: Tensors, folder: Path
) -> tuple[ModelConfig, Tensors]:
    """The configuration, with the product thresholds that only tensors show, and the tensors, with the names of others
    for the thresholds of neurons; ModelError where config.json says otherwise than the tensors."""
    of_activations, of_products = ([name for name in stored if name.endswith(end)] for end in THRESHOLDS)
    names = [*of_activations, *of_products]
    has_thresholds = any(isinstance(layer.ffn, FfnConfig) and layer.ffn.thresholds for layer in config.layers)
    if has_thresholds and not of_activations and config.competing == "topk":
        raise ModelError(f"{folder}: activation topk without thresholds of neurons")
    if has_thresholds and not of_activations:
        raise ModelError(
            f"{folder / 'config.json'}: hidden_act_param is missing, and the folder has no thresholds of neurons"
        )
    if names and not has_thresholds:
        raise ModelError(
            f"{folder}: has thresholds of single neurons ({shown(names[0])}), which go neither with hidden_act_param "
            f"in config.json nor with experts nor with an activation other than {', '.join(THRESHOLDED)} and topk"
        )
    if of_products:
        layers = (replace(layer, ffn=replace(layer.neurons, product_thresholds=True)) for layer in config.layers)
        config = replace(config, layers=tuple(layers))
        layout.check(config, str(folder))
    return config, {f"{name}.weight" if name.endswith(THRESHOLDS) else name: one for name, one in stored.items()}


def _add_one_to_norms(tensors: dict[str, StoredTensor], files: list[MappedFile], exempt: tuple[str, ...]) -> None:
    """Some families' files keep the weights of their norms less one, except those whose names end so."""
    for file in files:
        file.check()
    for name, tensor in tensors.items():
        if name.endswith("_norm") and not name.endswith(exempt):
            values = tensor.gathered().float32() + np.float32(1)
            tensors[name] = RawTensor("F32", tensor.shape, values.astype("<f4").view(np.uint8))


def _with_stored_head(
    config: ModelConfig, stored: Tensors, files: list[MappedFile], names: Names, notes: list[str]
) -> ModelConfig:
    """Some folders keep a copy of the tied embedding as the head; it goes if it really is one, and else is the head, as
    in `transformers`."""
    head, embed = stored.get(names("head")), stored.get(names("embed"))
    if head is None or embed is None:
        return config
    for file in files:
        file.check()
    if _equal(head, embed):
        del stored[names("head")]
        return config
    notes.append("config.json ties lm_head to the embedding, but the two tensors differ: each is used as it is stored")
    return replace(config, tied_embeddings=False)


def _equal(first: SingleTensor, other: SingleTensor) -> bool:
    """Whether two tensors are the same as they are stored. One that is made is quantised, which the other is not."""
    if not isinstance(first, RawTensor) or not isinstance(other, RawTensor):
        return False
    return (first.type, first.shape) == (other.type, other.shape) and np.array_equal(first.data, other.data)


_BUFFERS = (
    "inv_freq", "cos_cached", "sin_cached", "freqs_cis", "rope_cache",
    "position_ids", "masked_bias", "causal_mask", "attention_mask",
)  # fmt: skip


def is_buffer(name: str) -> bool:
    """Whether a tensor is what a class saved beside its weights, and makes anew from the configuration."""
    return name.rpartition(".")[2] in _BUFFERS


# --- weights ---------------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> tuple[dict[str, RawTensor], list[MappedFile]]:
    """All tensors of the folder, from one file or from the shards that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        tensors, _, file = read_safetensors(single)
        return tensors, [file]
    if not index.exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        reason = "; pickle files can run code and are never read" if pickled else ""
        raise ModelError(f"{folder} holds neither {single.name} nor {index.name}{reason}")
    places = _weight_map(index)
    tensors = {}
    files = []
    for name in sorted(set(places.values())):
        shard, _, file = read_safetensors(folder / name)
        files.append(file)
        for twice in sorted(tensors.keys() & shard.keys()):
            first, other = tensors[twice], shard[twice]
            if (first.type, first.shape) != (other.type, other.shape) or not np.array_equal(first.data, other.data):
                raise ModelError(f"{folder / name}: tensor {shown(twice)} is in another file, too, with other values")
        tensors |= shard
    missing = {tensor for tensor in places.keys() - tensors.keys() if not is_buffer(tensor)}
    if missing:
        raise ModelError(f"{index}: tensor {shown(min(missing))} is not in {shown(places[min(missing)])}")
    return tensors, files


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> name of a file in the same folder, and nowhere else."""
    places = read_json(index)[0].get("weight_map")
    if type(places) is not dict or not places:
        raise ModelError(f"{index}: has no weight_map")
    for name in set(map(str, places.values())):
        if name.startswith(".") or not set(name).isdisjoint("/\\:\0") or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {shown(name)} is not the name of a safetensors file in the folder")
    if not all(type(name) is str for name in places.values()):
        raise ModelError(f"{index}: weight_map holds something that is not a file name")
    if len(set(places.values())) > _MAX_SHARDS:
        raise ModelError(f"{index}: names an absurd number of files")
    return places
