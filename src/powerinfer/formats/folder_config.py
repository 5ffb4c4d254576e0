"""config.json of a Hugging Face folder -> `ModelConfig`.

Defaults are those of the configuration's `transformers` class, so that a missing key means the same there and here;
unsupported settings are refused by name. No code of the folder is run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from powerinfer.config import THRESHOLDED, ExpertsConfig, FfnConfig, ModelConfig
from powerinfer.errors import nearest_supported
from powerinfer.formats import layout
from powerinfer.formats.families import CLASSES, FOLDERS
from powerinfer.formats.family import Folder
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_keys import check_others, not_read
from powerinfer.formats.folder_modules import Settings
from powerinfer.formats.folder_parts import read_plain
from powerinfer.formats.folder_quantised import problem
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import printable

_VISION = re.compile("Llava|VL|Vision|Vlm|VLM|ImageText|Pixtral|Idefics|PaliGemma|Florence")
"""A part of the names of classes that read pictures."""

# Here null does not mean the default but no window, as many as heads, what the width leaves to each, false, no cap.
_NULLABLE = (
    "sliding_window", "head_dim", "num_key_value_heads", "alibi", "new_decoder_architecture", "parallel_attn",
    "multi_query", "bias", "q_lora_rank", "norm_topk_prob", "rope_interleave", "attn_logit_softcapping",
    "final_logit_softcapping", "attention_chunk_size",
)  # fmt: skip


def read_config(
    metadata: dict[str, Any], folder: Path, notes: list[str] | None = None, unread: list[str] | None = None
) -> ModelConfig:
    """The configuration in `metadata`, the contents of the folder's config.json. ModelError if it is not supported.

    notes: gets lines for the user; unread: gets the keys that nothing read.
    """
    source = str(folder / "config.json")
    metadata = _text_part(metadata)
    family = _family(Fields(metadata, source))
    stated = {key: value for key, value in metadata.items() if value is not None or key in _NULLABLE}
    names: dict[str, str] = {}
    for other, usual in family.other_keys.items():
        if other in stated and names.setdefault(usual, other) == other:
            stated[usual] = stated.pop(other)
    fields, key = Fields({**family.defaults, **stated}, source, notes=notes, names=names), family.key
    config = ModelConfig(
        architecture=family.model_type,
        d_model=fields.integer(key("hidden_size"), 1, layout.MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB),
        context_length=fields.integer(key("max_position_embeddings"), 1, layout.MAX_CONTEXT),
        norm_eps=fields.number(key("rms_norm_eps"), 1e-12, 0.1, 1e-5),
        layers=(),
        tied_embeddings=fields.flag(key("tie_word_embeddings"), False),
        name=printable(folder.resolve().name),
    )
    listed: Any = fields.get(family.layer_list, None) if family.layer_list else None
    counted = {"default": len(listed)} if type(listed) is list and len(listed) in range(1, layout.MAX_LAYERS) else {}
    n_layers = fields.integer(key("num_hidden_layers"), 1, layout.MAX_LAYERS, **counted)
    config = _with_thresholds(fields, (family.read or read_plain)(family, fields, config, n_layers))
    check_others(fields)
    if unread is not None:
        unread += [key for key in not_read(fields) if key in metadata]
    return config


def _with_thresholds(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Configuration with thresholds of activations: a number for all layers, or a list with one for each; where none is
    stated, each neuron has its own, unless they are of experts. topk has both: a layer's is how many count."""
    topk = any(layer.ffn.activation == "topk" for layer in config.layers)
    if not topk and not any(layer.ffn.activation in THRESHOLDED for layer in config.layers):
        return config
    if not fields.has("hidden_act_param") and not config.experts and not topk:
        neurons = (replace(layer, ffn=replace(layer.neurons, thresholds=True)) for layer in config.layers)
        return replace(config, layers=tuple(neurons))
    limits = fields.numbers("hidden_act_param", config.n_layers, 0, layout.MAX_SCALE)
    layers = []
    for layer, limit in zip(config.layers, limits, strict=True):
        assert isinstance(layer.ffn, FfnConfig | ExpertsConfig)
        ffn = replace(layer.ffn, threshold=limit)
        layers.append(replace(layer, ffn=replace(ffn, thresholds=True) if topk and isinstance(ffn, FfnConfig) else ffn))
    return replace(config, layers=tuple(layers))


def _text_part(metadata: dict[str, Any]) -> dict[str, Any]:
    """The configuration of what reads text, in a model that also reads pictures."""
    classes, text = metadata.get("architectures"), metadata.get("text_config")
    name = classes[0] if type(classes) is list and len(classes) == 1 and type(classes[0]) is str else ""
    families = [family for family in FOLDERS.values() if name and family.vision_class == name]
    if not families or type(text) is not dict:
        return metadata
    kind = text.get("model_type")
    family = next((one for one in families if kind in (one.model_type, *one.other_types)), families[0])
    outer = {key: metadata[key] for key in ("tie_word_embeddings", "quantization_config") if key in metadata}
    return text | outer | {"architectures": [family.classes[0]]}


def _family(fields: Fields) -> Folder:
    """The family that `architectures` names (`model_type` when it is absent)."""
    classes = fields.get("architectures", None)
    kind: Any = fields.get("model_type", None)
    _check_quantisation(fields, kind)
    if type(kind) is str:
        kind = next((family.model_type for family in FOLDERS.values() if kind in family.other_types), kind)
    name = classes[0] if type(classes) is list and len(classes) == 1 and type(classes[0]) is str else None
    auto_map: Any = fields.get("auto_map", {})
    if type(auto_map) is not dict or not _replaced(auto_map.get("AutoModelForCausalLM"), name):
        raise fields.bad("auto_map", "names code of the folder's own, which is never run")
    if classes is None and type(kind) is str and kind in FOLDERS:
        return FOLDERS[kind]
    if name not in CLASSES:
        if name is not None and (fields.has("vision_config") or _VISION.search(name)):
            raise fields.bad("architectures", f"is {shown(name)}: vision models are not supported")
        raise fields.bad("architectures", f"is {shown(name or classes)}, which {nearest_supported(name, CLASSES)}")
    family = _find_family(name, kind)
    if kind not in (None, family.model_type):
        raise fields.bad("model_type", f"is {shown(kind)}, which does not go with {name}")
    return family


def _find_family(name: str, kind: Any) -> Folder:
    """The family with that class; of two that call theirs alike, the one of that `model_type`."""
    family = FOLDERS.get(kind) if type(kind) is str else None
    return family if family is not None and name in family.classes else CLASSES[name]


def _check_quantisation(fields: Fields, model_type: Any) -> None:
    """ModelError for a folder that is quantised in a way that is not read."""
    settings: Any = fields.get("quantization_config", None)
    family = FOLDERS.get(model_type) if type(model_type) is str else None
    method = settings.get("quant_method") if type(settings) is dict else None
    if settings is None or (family is not None and family.quantisation and method == family.quantisation):
        return
    if family is not None and family.quantisation:
        raise fields.bad("quantization_config", f"has the quant_method {shown(method)}, not {family.quantisation!r}")
    strange = problem(settings)
    if strange is not None:
        raise fields.bad("quantization_config", strange)


def quantisation(metadata: dict[str, Any]) -> Settings | None:
    """The `quantization_config` of a checked config.json, None where there is none, or its family itself reads what it
    says."""
    metadata = _text_part(metadata)
    settings: Settings | None = metadata.get("quantization_config")
    family = FOLDERS.get(metadata.get("model_type", ""))
    return settings if family is None or not family.quantisation else None


def _replaced(code: Any, name: str | None) -> bool:
    """Whether the folder asks for no code of its own, or only for code that this engine replaces."""
    replaces = name in CLASSES and CLASSES[name].replaces_code
    return code is None or (replaces and type(code) is str and code.rpartition(".")[2] == name)
