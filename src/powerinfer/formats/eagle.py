"""EAGLE-3 heads: draft heads in files of their own, trained for a model, as folders or GGUF files.

A folder is that of SafeAILab's, SpecForge's and NVIDIA's training (`midlayer.` or `layers.0.`, settings in
`eagle_config`) or of Red Hat's "speculators" (the layer's settings in `transformer_layer_config`); a GGUF file is of
the architecture `eagle3`, as llama.cpp's converter writes it. What a head does not have, the embedding or the output
head, is the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.config import DraftHeadConfig, EagleConfig, ModelConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_NAMES
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder import is_buffer, read_weights
from powerinfer.formats.folder_config import read_config
from powerinfer.formats.gguf import GGUFFile, read_gguf
from powerinfer.formats.gguf_model import DIVISORS, NAMES
from powerinfer.formats.gguf_model import read_config as read_gguf_config
from powerinfer.formats.json_file import read_json
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.quant import can_dequantize
from powerinfer.formats.source import Names, SingleTensor, Source, collect_some
from powerinfer.formats.tensors import RawTensor, StoredTensor, float32_tensor

_CLASSES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel",
    "Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLMEagle3",
)  # fmt: skip
_ARCHITECTURE = "eagle3"
_IDS = "eagle_aux_hidden_state_layer_ids"
_FEW, _MANY = 2, 16  # features
_ALIKE = 0.2  # relative difference of the rows of two embeddings that may be of rounding
_ROWS = 16  # of an embedding that are compared
_BEGIN = 1 << 16  # bytes of a file among which its architecture is stated
_OF_HEAD = (
    "architectures", "auto_map", "model_type", "draft_vocab_size", "target_hidden_size", "eagle_config", _IDS,
    "num_hidden_layers", "tie_word_embeddings", "layer_types", "sliding_window", "use_sliding_window",
)  # fmt: skip
"""Keys of config.json that are not those of a model of the head's layer."""
_FOLDER_NAMES = replace(LLAMA_NAMES, layers="layers").extended(
    {"draft_embed_norm": "input_layernorm", "draft_hidden_norm": "hidden_norm"}
)
_GGUF_NAMES = NAMES.extended({"draft_embed_norm": "attn_norm", "draft_hidden_norm": "attn_norm_2"})
_AROUND = {"fuse": "fc", "norm": "norm", "head": "lm_head", "embed": "embed_tokens", "features_norm": "input_norm"}
_AROUND_GGUF = {"fuse": "fc", "norm": "output_norm", "head": "output", "embed": "token_embd"}


@dataclass(frozen=True)
class _Head:
    """The contents of a head's files. config: a model of its layer alone; stored: tensors under their names in the
    file; layer: the beginning of the names of the layer's; names: of these, as in a layer 0; around: of what is around
    the layer; ids: of each row of the output head the model's token, None: it is the row's number."""

    config: ModelConfig
    eagle: EagleConfig
    stored: dict[str, SingleTensor]
    layer: str
    names: Names
    around: Mapping[str, str]
    ids: np.ndarray[Any, np.dtype[np.int64]] | None
    files: list[MappedFile]


def is_eagle(path: Path) -> bool:
    """Whether that is the folder or the file of an EAGLE-3 head. False for what cannot be read, too."""
    with suppress(ModelError, OSError):
        if path.is_dir():
            metadata, _ = read_json(path / "config.json")
            classes = metadata.get("architectures")
            named = type(classes) is list and any(one in _CLASSES for one in classes)
            return named or "speculators_model_type" in metadata or "draft_vocab_size" in metadata
        with path.open("rb") as file:
            begin = file.read(_BEGIN)  # a header with a tokenizer takes a tenth of a second
        if begin.startswith(b"GGUF") and _ARCHITECTURE.encode() in begin:
            return read_gguf(path).metadata.get("general.architecture") == _ARCHITECTURE
    return False


def open_eagle(path: Path, model: ModelConfig, embedding: StoredTensor) -> Source:
    """The head in a folder or a file, for a model: its configuration with the head, and the head's tensors.

    embedding: the model's; a head that has a copy of it uses the model's. ModelError for files that are malformed, or
    that do not go with the model.
    """
    head = _read_folder(path, model) if path.is_dir() else _read_gguf(path, model)
    _check_sizes(head, model, path)
    ids = _tokens(head, model.vocab_size, path)
    if np.array_equal(ids, np.arange(model.vocab_size)):
        head = replace(head, ids=None)
    stored, at = head.stored, layout.draft_prefix(model)
    table, output = (f"{head.around[part]}.weight" for part in ("embed", "head"))
    if table in stored and _alike(stored[table], embedding):
        del stored[table]
    if output not in stored and (head.eagle.vocab != model.vocab_size or head.ids is not None):
        raise ModelError(f"{path}: tensor {output} is missing: rows for {head.eagle.vocab} tokens")
    draft = DraftHeadConfig(head.config.layers[0], table in stored, output in stored, eagle=head.eagle)
    config = replace(model, draft=draft)
    layout.check(config, str(path))
    asked = list(layout.draft_shapes(config))
    names = _names_in_file(head, at, [canonical for canonical, _ in asked])
    tokens = {f"{at}draft_tokens": float32_tensor(ids.astype(np.float32))}
    tensors = collect_some(asked, stored, names, str(path), "llama EAGLE-3", made_tensors=tokens)
    return Source("hf" if path.is_dir() else "gguf", path, config, {}, tensors, head.files)


def _check_sizes(head: _Head, model: ModelConfig, path: Path) -> None:
    """ModelError where the head is not for a model of these sizes."""
    for noun, of_head, of_model in (
        ("width", head.config.d_model, model.d_model),
        ("vocabulary", head.config.vocab_size, model.vocab_size),
    ):
        if of_head != of_model:
            raise ModelError(
                f"{path}: a head of {noun} {of_head} does not go with a model of {noun} {of_model}: take the head that "
                "was trained for this model"
            )


def _names_in_file(head: _Head, at: str, asked: list[str]) -> Names:
    """Spelling of canonical names, which begin with `at`, in the head's file."""
    first, spelled = f"{head.names.layers}.0.", dict[str, str]()
    for canonical in asked:
        part = canonical.removeprefix(at)
        if part.removesuffix("_bias") in head.names.inner:
            spelled[canonical] = head.names(f"layers.0.{part}").replace(first, head.layer, 1)
    spelled |= {f"{at}draft_{part}": f"{name}.weight" for part, name in head.around.items()}
    spelled |= {f"{at}draft_feature{place}_norm": f"fc_norm.{place}.weight" for place in range(_MANY)}
    return replace(head.names, exceptions=spelled)


def _alike(table: SingleTensor, embedding: StoredTensor) -> bool:
    """Whether an embedding is the model's but for rounding, by some of its rows: heads are trained with a copy."""
    other = embedding.gathered()
    if table.shape != other.shape or not isinstance(table, RawTensor) or not can_dequantize(table.type):
        return False
    rows = np.linspace(0, table.shape[0] - 1, _ROWS).astype(int)
    first, second = (np.concatenate([one.values(row, row + 1) for row in rows]) for one in (table, other))
    with np.errstate(invalid="ignore", over="ignore"):  # NaN equals nothing
        return bool(np.linalg.norm(first - second) <= _ALIKE * np.linalg.norm(second))


def _tokens(head: _Head, vocab: int, path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The model's token of each row of the output head."""
    rows, problem = head.eagle.vocab, ""
    ids = np.arange(min(rows, vocab)) if head.ids is None else head.ids
    strange = ids[(ids < 0) | (ids >= vocab)]
    if rows > vocab:
        problem = f"an output head of {rows} tokens does not go with a model of {vocab}"
    elif len(ids) != rows:
        problem = f"d2t names {len(ids)} tokens, and draft_vocab_size is {rows}"
    elif len(strange):
        problem = f"d2t names token {strange[0]}, which is none of the model's {vocab}"
    if problem:
        raise ModelError(f"{path}: {problem}: take the head that was trained for this model")
    return ids


def _integers(tensor: SingleTensor | None, path: Path) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """The numbers of d2t; None without it."""
    if tensor is None:
        return None
    if tensor.type not in ("I64", "I32"):
        raise ModelError(f"{path}: tensor d2t has type {shown(tensor.type)}, not I64")
    dtype = "<i8" if tensor.type == "I64" else "<i4"
    return np.frombuffer(tensor.gathered().data.tobytes(), dtype).astype(np.int64)


# --- folders ---------------------------------------------------------------------------------------------------------


def _read_folder(path: Path, model: ModelConfig) -> _Head:
    metadata, config_file = read_json(path / "config.json")
    source, kind = str(path / "config.json"), metadata.get("speculators_model_type")
    of_layer, nested = metadata, metadata.get("eagle_config") or {}
    if kind is not None:
        of_layer = metadata.get("transformer_layer_config", {})
        if kind != _ARCHITECTURE:
            raise ModelError(f"{source}: speculators_model_type is {shown(kind)}, and only {_ARCHITECTURE} is read")
    if type(of_layer) is not dict or type(nested) is not dict:
        raise ModelError(f"{source}: transformer_layer_config or eagle_config is no object")
    classes = metadata.get("architectures")
    if kind is None and not (type(classes) is list and any(one in _CLASSES for one in classes)):
        raise ModelError(f"{source}: architectures is {shown(classes)}, and of EAGLE only heads of EAGLE-3 are read")
    if metadata.get("parallel_drafting"):
        raise ModelError(f"{source}: a head that drafts in parallel is not read: take a plain EAGLE-3 head")
    outer = {key: one for key, one in metadata.items() if one is not None}
    fields = Fields({key: one for key, one in nested.items() if key != _IDS} | outer, source)
    in_files, files = read_weights(path)
    for file in (config_file, *files):
        file.check()
    stored, layer = _folder_tensors(in_files, path)
    layers = Fields(of_layer, source).integer("num_hidden_layers", 1, layout.MAX_LAYERS, 1)
    if layers != 1:
        raise ModelError(f"{source}: a head of {layers} layers is not read, only of one: take another head")
    config = _layer_config(of_layer, {name.removeprefix(layer) for name in stored}, path)
    _check_width(config, fields)
    offsets = _integers(stored.pop("d2t", None), path)  # from the numbers of the rows
    eagle = EagleConfig(
        layers=_feature_layers(fields.get(_IDS, None), nested.get(_IDS), model.n_layers, fields),
        vocab=fields.integer("draft_vocab_size", 1, layout.MAX_VOCAB, config.vocab_size),
        norm_eps=config.norm_eps,
        norms=_feature_norms(fields),
        normed=fields.flag("norm_before_residual", kind is not None),
        normed_output=fields.flag("norm_output", False),
    )
    ids = None if offsets is None else offsets + np.arange(len(offsets))
    for key, needed in (
        ("use_aux_hidden_state", True),
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
    ):
        fields.only(key, needed)
    return _Head(config, eagle, stored, layer, _FOLDER_NAMES, _AROUND, ids, [config_file, *files])


def _folder_tensors(in_files: Mapping[str, RawTensor], path: Path) -> tuple[dict[str, SingleTensor], str]:
    """The tensors but for `t2d`, under their names without `model.`, and the beginning of those of the layer's.
    ModelError for tensors of several layers, or for two of one name."""
    stored: dict[str, SingleTensor] = {}
    for in_file, tensor in in_files.items():
        name = in_file.removeprefix("model.")
        if name in stored:
            raise ModelError(f"{path}: tensors {shown(name)} and {shown('model.' + name)} are the same one")
        if not is_buffer(name) and name != "t2d":
            stored[name] = tensor
    layers = {"midlayer." for name in stored if name.startswith("midlayer.")}
    layers |= {".".join(name.split(".")[:2]) + "." for name in stored if name.startswith("layers.")}
    if not layers <= {"midlayer."} and not layers <= {"layers.0."}:
        names = ", ".join(shown(one) for one in sorted(layers)[:3])
        raise ModelError(f"{path}: a head of several layers is not read ({names}), only of one: take another head")
    return stored, min(layers, default="layers.0.")


def _check_width(config: ModelConfig, fields: Fields) -> None:
    """ModelError for a head of another width than the hidden states that it reads."""
    width = fields.integer("target_hidden_size", 1, layout.MAX_WIDTH, config.d_model)
    if width != config.d_model:
        problem = f"is {width}, and the head's own width {config.d_model}: take a head as wide as the model"
        raise fields.bad("target_hidden_size", problem)


def _layer_config(of_layer: dict[str, Any], stored: set[str], path: Path) -> ModelConfig:
    """A model of the head's layer: Llama's, or Qwen3's if q and k have norms. Settings of biases may be those of the
    model that it was trained for. stored: names of tensors within the layer."""
    normed_heads = "self_attn.q_norm.weight" in stored
    name, kind = ("Qwen3ForCausalLM", "qwen3") if normed_heads else ("LlamaForCausalLM", "llama")
    metadata = {key: one for key, one in of_layer.items() if key not in _OF_HEAD}
    metadata |= {"architectures": [name], "model_type": kind, "num_hidden_layers": 1, "tie_word_embeddings": False}
    metadata |= {"attention_bias": "self_attn.q_proj.bias" in stored, "mlp_bias": False}
    config = read_config(metadata, path)
    if of_layer.get("layer_types") != ["sliding_attention"]:
        return config
    window = Fields(of_layer, str(path / "config.json")).integer("sliding_window", 1, layout.MAX_CONTEXT)
    layer = config.layers[0]
    return replace(config, layers=(replace(layer, attention=replace(layer.heads, window=window)),))


def _feature_norms(fields: Fields) -> str:
    of_all = fields.flag("norm_before_fc", False)
    of_each = fields.flag("fc_norm", False) or fields.flag("use_aux_norm", False)
    if of_all and of_each:
        raise fields.bad("fc_norm", "and norm_before_fc are both set, which is not supported")
    return "whole" if of_all else "each" if of_each else "none"


def _feature_layers(stated: object, nested: object, n_layers: int, fields: Fields) -> tuple[int, ...]:
    """Layers that get the features. stated: their numbers, as vLLM reads them; nested: in `eagle_config`, the numbers
    of the layers that give the features, as SGLang and NVIDIA read them."""
    numbers, first = (stated, 0) if stated else (nested, 1)
    if not numbers:
        return _usual_layers(n_layers)
    if type(numbers) is not list or not all(type(one) is int and 0 <= one + first <= n_layers for one in numbers):
        raise fields.bad(_IDS, f"is {shown(numbers)}, not numbers of the model's {n_layers} layers")
    if not _FEW <= len(numbers) <= _MANY:
        raise fields.bad(_IDS, f"has {len(numbers)} layers, not {_FEW} to {_MANY}")
    return tuple(one + first for one in numbers)


def _usual_layers(n_layers: int) -> tuple[int, ...]:
    """Layers that get the features where a head does not say: a low, a middle and a high one."""
    return tuple(min(max(one, 0), n_layers) for one in (2, n_layers // 2, n_layers - 3))


# --- GGUF files ------------------------------------------------------------------------------------------------------


def _read_gguf(path: Path, model: ModelConfig) -> _Head:
    file, prefix = read_gguf(path), f"{_ARCHITECTURE}."
    fields = Fields(file.metadata, str(path), prefix)
    file.check()
    layers = fields.integer("block_count", 1, layout.MAX_LAYERS)
    if layers != 1:
        raise ModelError(f"{path}: a head of {layers} layers is not read, only of one: take another head")
    config = _gguf_layer_config(file, fields)
    _check_width(config, fields)
    stored = {name: one for name, one in file.tensors.items() if name.removesuffix(".weight") not in DIVISORS}
    ids = _integers(stored.pop("d2t", None), path)  # the model's tokens themselves
    eagle = EagleConfig(
        layers=_feature_layers(fields.get("extract_layers", None), None, model.n_layers, fields),
        vocab=config.vocab_size if ids is None else len(ids),
        norm_eps=config.norm_eps,
        normed=fields.flag("norm_before_residual", False),
    )
    return _Head(config, eagle, dict(stored), "blk.0.", _GGUF_NAMES, _AROUND_GGUF, ids, file.files)


def _gguf_layer_config(file: GGUFFile, fields: Fields) -> ModelConfig:
    """A model of the head's layer, which Llama's is but for what it reads."""
    of_head = ("extract_layers", "target_hidden_size", "norm_before_residual")
    left_out = {f"{_ARCHITECTURE}.{name}" for name in of_head}
    of_layer = {key: value for key, value in file.metadata.items() if key not in left_out}
    metadata = {key.replace(f"{_ARCHITECTURE}.", "llama.", 1): value for key, value in of_layer.items()}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    vocab = fields.integer("vocab_size", 1, layout.MAX_VOCAB, len(tokens) if type(tokens) is list else None)
    if vocab is None:
        raise ModelError(f"{file.path}: eagle3.vocab_size is missing")
    width = fields.integer("embedding_length", 1, layout.MAX_WIDTH)
    table = RawTensor("F32", (vocab, width), np.empty(0, np.uint8))  # of which only the shape is asked for
    tensors = {"token_embd.weight": table} | file.tensors
    return read_gguf_config(replace(file, metadata=metadata | {"general.architecture": "llama"}, tensors=tensors))
