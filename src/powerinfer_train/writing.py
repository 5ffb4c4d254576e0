"""A model's files again, with other weights, in the format they have or in the other one of GGUF and folder. In the
format they have, what is not changed is copied.

Thresholds of neurons, tensors that a dense model does not have, are added, replaced or left out.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from powerinfer.config import THRESHOLDED, Shape
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint, Place
from powerinfer.formats.families import FOLDERS
from powerinfer.formats.family import MIXED_ACT
from powerinfer.formats.folder import THRESHOLDS, file_names
from powerinfer.formats.folder_config import read_config
from powerinfer.formats.gguf import encoded, metadata_bytes, read_gguf, write_gguf
from powerinfer.formats.gguf_model import NAMES, redundant_tensors
from powerinfer.formats.json_file import read_json
from powerinfer.formats.layout import is_matrix, is_router, shapes
from powerinfer.formats.quant import Bytes, Float32, block_type, dequantize, quantize
from powerinfer.formats.safetensors_file import read_safetensors, safetensors_header
from powerinfer.formats.tensors import RawTensor, float32_tensor
from powerinfer_train.as_folder import AsFolder, json_bytes
from powerinfer_train.as_gguf import AsGGUF
from powerinfer_train.finished import RECORD, STATE
from powerinfer_train.other_format import OtherFormat
from powerinfer_train.own_text import FILE as OWN_TEXT
from powerinfer_train.recipes import StoredTypes
from powerinfer_train.step_log import LOG_FILE, PICTURE

_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "bf16": 32}
"""Name of a file in GGUF by the type of its changed matrices."""

_DIVISORS = "rope_freqs.weight"
_LIMITS, _INDEX = "hidden_act_param", "model.safetensors.index.json"
SHARD = 5 * 10**9
"""Most bytes of tensors in one file of a folder, as `transformers` 4 has it."""

NewTensor = Callable[[str], RawTensor]
"""A changed tensor, by its canonical name: its values as F32, or as the file has it but for its scales."""


class _Change:
    """Row mapping from canonical tensors into one file tensor: (name, rows of the file, rows of that tensor)."""

    def __init__(self, tensor: RawTensor) -> None:
        self.tensor = tensor
        self.rows: list[tuple[str, slice, slice]] = []

    def data(self, new: NewTensor, kind: str) -> Bytes:
        """All of it in that type."""
        sources = [(new(name), here, there) for name, here, there in self.rows]
        if kind == self.tensor.type and all(one.type == kind for one, _, _ in sources):
            rows = self.tensor.rows().copy()
            for one, here, there in sources:
                rows[here] = one.rows()[there]
            return rows
        values = np.array(dequantize(self.tensor.rows(), self.tensor.type))
        for one, here, there in sources:
            values[here] = one.float32().reshape(-1, values.shape[-1])[there]
        return quantize(values, kind)


def check_writable(
    checkpoint: Checkpoint, types: StoredTypes, names: Sequence[str], fields: Mapping[str, Any], form: str = "same"
) -> None:
    """ModelError or RequestError if these tensors could not be replaced in the model's files, or the activation could
    not be stated there. types, form: as of `write_model`."""
    if form == "gguf" and checkpoint.source != "gguf":
        AsGGUF(checkpoint, types)
        return
    if form == "folder" and checkpoint.source == "gguf":
        form_ = AsFolder(checkpoint, types)
        document, architecture = form_.document, form_.architecture
    else:
        for name in names:
            checkpoint.places(name)
        if checkpoint.source == "gguf":
            return
        (document, _), architecture = read_json(checkpoint.path / "config.json"), checkpoint.config.architecture
    read = read_config(_stating(document, architecture, fields), checkpoint.path)
    if any(layer.ffn.activation != fields["hidden_act"] for layer in read.layers):
        raise RequestError(f"{checkpoint.path}: folders of {architecture} cannot state an activation")


def write_model(
    checkpoint: Checkpoint,
    out: Path,
    types: StoredTypes,
    changed: Sequence[str],
    new: NewTensor,
    fields: Mapping[str, Any],
    added: Mapping[str, Float32] = MappingProxyType({}),
    form: str = "same",
) -> Path:
    """Write the model with new values of the tensors `changed` (canonical names) into the folder `out`; its path.

    form: same, as the model's; gguf; folder. types: of the changed matrices of a GGUF file, of all in the other format
    than the model's; a folder made of a folder keeps its types. fields: the activation, "hidden_act", and the
    thresholds of the layers, "hidden_act_param", if it has any. added: of every layer the thresholds of its neurons,
    float32 [neurons], as `layers.N.threshold`, and of their products as `layers.N.product_threshold`. Where neither
    states thresholds those that the model has for its neurons stay, if the activation is one that needs them. Each
    file takes its place when it is complete and on disk.
    """
    out.mkdir(parents=True, exist_ok=True)
    stay = not added and fields["hidden_act"] in THRESHOLDED and _LIMITS not in fields
    gone = [name for name in checkpoint.names() if name.endswith(THRESHOLDS) and not stay]
    added_tensors = {name: float32_tensor(values) for name, values in added.items()}
    model = _WrittenModel(checkpoint, types, changed, new, fields, added_tensors, gone)
    gguf = checkpoint.source == "gguf"
    if form == "folder" or (form == "same" and not gguf):
        return _gguf_as_folder(model, out) if gguf else _write_folder(model, out)
    content = _changed_gguf(model) if gguf else _folder_as_gguf(model)
    with _complete_file(out / "model.gguf") as to:
        write_gguf(to, *content)
    return out / "model.gguf"


@dataclass(frozen=True)
class _WrittenModel:
    """Model that is written: fields as of `write_model`; gone: canonical names of the tensors that are left out."""

    checkpoint: Checkpoint
    types: StoredTypes
    changed: Sequence[str]
    new: NewTensor
    fields: Mapping[str, Any]
    added: Mapping[str, RawTensor]
    gone: Sequence[str]

    def stored(self, name: str) -> RawTensor:
        """A changed tensor as the files have it."""
        tensor = self.new(name)
        if tensor.type != "F32" or not self.checkpoint.is_transposed(name):
            return tensor
        return float32_tensor(tensor.float32().swapaxes(-1, -2))


def _changes(
    tensors: Mapping[str, RawTensor], base: Bytes, places: Sequence[tuple[str, Place, int]]
) -> dict[str, _Change]:
    """Changes by the file's name of a tensor. base: the view of the file; places: of `_places_by_file`."""
    starts = {name: tensor.data.ctypes.data - base.ctypes.data for name, tensor in tensors.items()}
    changes: dict[str, _Change] = {}
    for canonical, run, before in places:
        name = next(one for one, start in starts.items() if start <= run.begin < start + tensors[one].nbytes)
        tensor = tensors[name]
        row = block_type(tensor.type).row_bytes(tensor.shape[-1])
        first, begin, count = (run.begin - starts[name]) // row, before // row, run.nbytes // row
        change = changes.setdefault(name, _Change(tensor))
        change.rows.append((canonical, slice(first, first + count), slice(begin, begin + count)))
    return changes


def _places_by_file(model: _WrittenModel) -> dict[Path, list[tuple[str, Place, int]]]:
    """Places by file: (canonical name of a changed tensor, a place of it there, bytes of the tensor before that)."""
    files: dict[Path, list[tuple[str, Place, int]]] = {}
    for name in model.changed:
        before = 0
        for place in model.checkpoint.places(name):
            files.setdefault(place.path, []).append((name, place, before))
            before += place.nbytes
    return files


# --- GGUF ------------------------------------------------------------------------------------------------------------

_Content = tuple[dict[str, bytes], list[tuple[str, str, tuple[int, ...]]], Iterator[Bytes]]
"""Content of a file, as `write_gguf` takes it."""


def _changed_gguf(model: _WrittenModel) -> _Content:
    """Content of a GGUF file, or of one in parts, whose tensors are then in one."""
    file, places = read_gguf(model.checkpoint.path), _places_by_file(model)
    changes: dict[str, _Change] = {}
    for part in file.files:
        base = part.view()
        begin = base.ctypes.data
        inside = {name: one for name, one in file.tensors.items() if 0 <= one.data.ctypes.data - begin < base.nbytes}
        changes |= _changes(inside, base, places.get(part.path, []))
    types = {name: _new_type(change, model.types) for name, change in changes.items()}
    left_out = {NAMES(name) for name in model.gone}.union(redundant_tensors(file, model.checkpoint.config))
    all_tensors = {name: tensor for name, tensor in file.tensors.items() if name not in left_out}
    all_tensors |= {NAMES(name): tensor for name, tensor in model.added.items()}
    tensors = [(name, types.get(name, tensor.type), tensor.shape) for name, tensor in all_tensors.items()]
    architecture, metadata = model.checkpoint.config.architecture, metadata_bytes(file.path)
    metadata = {key: value for key, value in metadata.items() if not key.startswith("split.")}
    metadata.pop(f"{architecture}.{_LIMITS}", None)
    metadata |= {f"{architecture}.{key}": encoded(value) for key, value in model.fields.items()}
    if model.types.changed != "same":
        metadata["general.file_type"] = encoded(_FILE_TYPES[model.types.changed])
    data = (
        changes[name].data(model.stored, kind).reshape(-1) if name in changes else all_tensors[name].data
        for name, kind, _ in tensors
    )
    return metadata, tensors, data


def _folder_as_gguf(model: _WrittenModel) -> _Content:
    """Content of a folder as a GGUF file."""
    form = AsGGUF(model.checkpoint, model.types)
    metadata = form.metadata | {f"{form.architecture}.{key}": value for key, value in model.fields.items()}
    metadata |= {"general.file_type": _FILE_TYPES[model.types.changed], "general.quantization_version": 2}
    tensors_by_name = _all_tensors(model)
    tensors = [(NAMES(name), *about) for name, about in tensors_by_name.items()]
    data: Iterator[Bytes] = (_data(model, form, name, *about) for name, about in tensors_by_name.items())
    if form.divisors is not None:
        tensors.append((_DIVISORS, "F32", form.divisors.shape))
        data = chain(data, [quantize(form.divisors[None], "F32")])
    return {key: encoded(value) for key, value in metadata.items()}, tensors, data


def fitting(wanted: str, shape: Sequence[int]) -> str:
    """The type, or F16 for rows that are not whole blocks of it."""
    kind = block_type(wanted.upper())
    return kind.name if shape[-1] % kind.block == 0 else "F16"


def _new_type(change: _Change, types: StoredTypes) -> str:
    """Vectors stay as they are, and so do biases."""
    tensor, name = change.tensor, change.rows[0][0]
    if not is_matrix(name, tensor.shape) or types[name] == "same":
        return tensor.type
    return fitting(types[name], tensor.shape)


# --- in the other format ---------------------------------------------------------------------------------------------


def _all_tensors(model: _WrittenModel) -> dict[str, tuple[str, Shape]]:
    """Type and shape of every tensor, by canonical name. Routers and what is no matrix are F32."""
    shapes_by_name = {name: shape for name, shape in shapes(model.checkpoint.config) if name not in model.gone}
    shapes_by_name |= {name: tensor.shape for name, tensor in model.added.items()}
    changed = {name: model.types[name] for name in model.changed}

    def kind(name: str, shape: Shape) -> str:
        if not is_matrix(name, shape) or is_router(name):
            return "F32"
        return fitting(changed.get(name, model.types.changed), shape)

    return {name: (kind(name, shape), shape) for name, shape in shapes_by_name.items()}


def _data(model: _WrittenModel, form: OtherFormat, name: str, kind: str, shape: Shape) -> Bytes:
    """Data of a tensor, by its canonical name, as it is written."""
    if name in model.added:
        return model.added[name].data
    tensor = model.new(name) if name in model.changed else model.checkpoint.take(name)
    rows = np.ascontiguousarray(form.reordered(name, tensor.float32()), np.float32).reshape(-1, shape[-1])
    data = quantize(rows, kind)
    model.checkpoint.release()
    return data


def _gguf_as_folder(model: _WrittenModel, out: Path) -> Path:
    form = AsFolder(model.checkpoint, model.types)
    all_tensors = _all_tensors(model)
    shards = list(_shards(all_tensors))
    (out / "config.json").unlink(missing_ok=True)  # without it a folder is no model; it is written last
    for weights in out.glob("model*.safetensors*"):  # of another type, maybe in fewer files
        weights.unlink()
    for name, document in form.files.items():
        _write_json(out / name, document)
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        entries = []
        for name in names:
            kind, full_shape = all_tensors[name]
            entries += [(own, kind, shape, _nbytes(kind, shape)) for own, shape in form.entries(name, full_shape)]
        with _complete_file(out / file) as to:
            to.write(safetensors_header(entries, {"format": "pt"}))
            for name in names:
                to.write(_data(model, form, name, *all_tensors[name]).data)
        places |= dict.fromkeys((own for own, *_ in entries), file)
        total += sum(nbytes for *_, nbytes in entries)
    if len(shards) > 1:
        _write_json(out / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    _write_json(out / "config.json", _stating(form.document, form.architecture, model.fields))
    return out


def _shards(all_tensors: Mapping[str, tuple[str, Shape]]) -> Iterator[list[str]]:
    """Names of the tensors of each file, those of float32 first: whatever follows, they are aligned."""
    names: list[str] = []
    filled = 0
    for name, (kind, shape) in all_tensors.items():
        nbytes = _nbytes(kind, shape)
        if names and filled + nbytes > SHARD:
            yield sorted(names, key=lambda one: all_tensors[one][0] != "F32")
            names, filled = [], 0
        names.append(name)
        filled += nbytes
    yield sorted(names, key=lambda one: all_tensors[one][0] != "F32")


def _nbytes(kind: str, shape: Shape) -> int:
    return math.prod(shape[:-1]) * block_type(kind).row_bytes(shape[-1])


# --- folders ---------------------------------------------------------------------------------------------------------


def _write_folder(model: _WrittenModel, out: Path) -> Path:
    checkpoint, gone, files = model.checkpoint, model.gone, _places_by_file(model)
    for name in gone:
        files.setdefault(checkpoint.places(name)[0].path, [])
    home = checkpoint.places("embed")[0].path  # of what is added
    names = file_names(checkpoint.config, {})
    extra = {names(name).removesuffix(".weight"): tensor for name, tensor in model.added.items()}
    if extra:
        files.setdefault(home, [])
    (out / "config.json").unlink(missing_ok=True)  # without it a folder is no model; it is written last
    _copy_others(checkpoint, files, out)
    for path, places in files.items():
        _write_weights(model, path, places, extra if path == home else {}, out)
    if (checkpoint.path / _INDEX).exists():
        _write_index(model, extra, home.name, out)
    document, _ = read_json(checkpoint.path / "config.json")
    _write_json(out / "config.json", _stating(document, checkpoint.config.architecture, model.fields))
    return out


def _copy_others(checkpoint: Checkpoint, changed: Container[Path], out: Path) -> None:
    """Copy the model's files that do not change."""
    weights = {file.path.name for file in checkpoint.files}
    if (checkpoint.path / _INDEX).exists():  # others of these may hold what the engine does not use
        weights |= set(read_json(checkpoint.path / _INDEX)[0]["weight_map"].values())
    for path in sorted(checkpoint.path.iterdir()):
        rewritten = path in changed or path.name in ("config.json", _INDEX, LOG_FILE, PICTURE, RECORD, STATE, OWN_TEXT)
        unused = path.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors") and path.name not in weights
        if rewritten or unused or not path.is_file():
            continue
        with _complete_file(out / path.name) as to, path.open("rb") as source:
            shutil.copyfileobj(source, to, 1 << 22)


def _write_weights(
    model: _WrittenModel,
    path: Path,
    places: Sequence[tuple[str, Place, int]],
    extra: Mapping[str, RawTensor],
    out: Path,
) -> None:
    """Write a file of weights with the changed ones. places: of `_places_by_file`; extra: tensors that are added."""
    tensors, metadata, mapped = read_safetensors(path)
    changes = _changes(tensors, mapped.view(), places)
    kept_tensors = dict(extra)  # first, where float32 is aligned whatever follows
    stored = sorted(tensors.items(), key=lambda entry: entry[1].data.ctypes.data)
    kept_tensors |= {name: tensor for name, tensor in stored if not (model.gone and name.endswith(THRESHOLDS))}
    with _complete_file(out / path.name) as to:
        headers = ((name, tensor.type, tensor.shape, tensor.nbytes) for name, tensor in kept_tensors.items())
        to.write(safetensors_header(headers, metadata))
        for name, tensor in kept_tensors.items():
            change = changes.get(name)
            to.write((tensor.data if change is None else change.data(model.stored, tensor.type)).data)


def _write_index(model: _WrittenModel, extra: Mapping[str, RawTensor], file: str, out: Path) -> None:
    """Write which file has which tensor; extra: tensors that are added, in that file."""
    checkpoint, gone = model.checkpoint, model.gone
    index, _ = read_json(checkpoint.path / _INDEX)
    stay = {name: file for name, file in index["weight_map"].items() if not (gone and name.endswith(THRESHOLDS))}
    index["weight_map"] = stay | dict.fromkeys(extra, file)
    metadata = index.get("metadata")
    if type(metadata) is dict and type(metadata.get("total_size")) is int:
        metadata["total_size"] += sum(tensor.nbytes for tensor in extra.values())
        metadata["total_size"] -= sum(place.nbytes for name in gone for place in checkpoint.places(name))
    _write_json(out / _INDEX, index)


def _stating(document: Mapping[str, Any], architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the activation and its thresholds; `transformers` has one key for FFNs and convolutions."""
    left = {key: value for key, value in document.items() if key != _LIMITS}
    family = FOLDERS[architecture]
    if family.mixed_act:
        left.setdefault(MIXED_ACT, document.get("hidden_act", "silu"))
    named = family.key("hidden_act")
    return left | {named if key == "hidden_act" else key: value for key, value in fields.items()}


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    with _complete_file(path) as to:
        to.write(json_bytes(document))


@contextmanager
def _complete_file(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name only when it is complete and on disk. PowerInferError if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        detail = error.strerror or error
        message = f"cannot write {path} ({detail}): the same command trains no more, but writes it"
        raise PowerInferError(message) from None
    finally:
        part.unlink(missing_ok=True)
