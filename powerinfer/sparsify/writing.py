"""A model's files again, with other weights: GGUF to GGUF, a folder to a folder or to GGUF. What is not changed is
copied, but for the last.

Thresholds of neurons, tensors that a dense model does not have, are added, replaced or left out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from powerinfer.config import THRESHOLDED
from powerinfer.errors import RequestError
from powerinfer.formats.checkpoint import Checkpoint, Place
from powerinfer.formats.folder import THRESHOLD, file_names
from powerinfer.formats.folder_config import read_config
from powerinfer.formats.gguf import encoded, metadata_bytes, read_gguf, write_gguf
from powerinfer.formats.gguf_model import NAMES, said_twice
from powerinfer.formats.json_file import read_json
from powerinfer.formats.layout import is_matrix, is_router, shapes
from powerinfer.formats.quant import Bytes, Float32, block_type, dequantize, quantize
from powerinfer.formats.safetensors_file import read_safetensors, safetensors_header
from powerinfer.formats.tensors import RawTensor, float32_tensor
from powerinfer.sparsify.as_gguf import AsGGUF
from powerinfer.sparsify.recipes import StoredTypes

_FILE_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "bf16": 32}
"""By the type of changed matrices, what GGUF calls a file of it."""

_DIVISORS = "rope_freqs.weight"
_LIMITS, _INDEX = "hidden_act_param", "model.safetensors.index.json"
_KEYS = {"gemma3_text": "hidden_activation", "openelm": "activation_fn_name"}
"""Families of folders that call "hidden_act" otherwise."""

NewTensor = Callable[[str], RawTensor]
"""A changed tensor, by its canonical name: its values as F32, or as the file has it but for its scales."""


class _Change:
    """What becomes of a tensor of a file: by canonical name, which of its rows are which of that tensor's."""

    def __init__(self, tensor: RawTensor) -> None:
        self.tensor = tensor
        self.rows: list[tuple[str, slice, slice]] = []

    def data(self, new: NewTensor, kind: str) -> Bytes:
        """All of it in that type."""
        made = [(new(name), here, there) for name, here, there in self.rows]
        if kind == self.tensor.type and all(one.type == kind for one, _, _ in made):
            rows = self.tensor.rows().copy()
            for one, here, there in made:
                rows[here] = one.rows()[there]
            return rows
        values = np.array(dequantize(self.tensor.rows(), self.tensor.type))
        for one, here, there in made:
            values[here] = one.float32().reshape(-1, values.shape[-1])[there]
        return quantize(values, kind)


def check_writable(checkpoint: Checkpoint, names: Sequence[str], about: Mapping[str, Any], form: str = "same") -> None:
    """ModelError or RequestError if these tensors could not be replaced in the model's files, or the activation could
    not be stated there. form: as of `write_model`."""
    if form == "folder" and checkpoint.source == "gguf":
        raise RequestError(
            f"--format folder: {checkpoint.path} has no files of a tokenizer: take the folder that it was made of"
        )
    if form == "gguf" and checkpoint.source != "gguf":
        AsGGUF(checkpoint)
        return
    for name in names:
        checkpoint.places(name)
    if checkpoint.source == "gguf":
        if len(read_gguf(checkpoint.path).files) > 1:
            raise RequestError(f"{checkpoint.path} is split into parts: join them first, with llama-gguf-split --merge")
        return
    made = read_config(_document(checkpoint, about), checkpoint.path)
    if any(layer.ffn.activation != about["hidden_act"] for layer in made.layers):
        raise RequestError(f"{checkpoint.path}: folders of {checkpoint.config.architecture} cannot state an activation")


def write_model(
    checkpoint: Checkpoint,
    out: Path,
    types: StoredTypes,
    changed: Sequence[str],
    new: NewTensor,
    about: Mapping[str, Any],
    added: Mapping[str, Float32] = MappingProxyType({}),
    form: str = "same",
) -> Path:
    """Write the model with new values of the tensors `changed` (canonical names) into the folder `out`; its path.

    form: same, as the model's; gguf, of a folder too. types: of the changed matrices of a GGUF file, of all if it is
    made of a folder; a folder keeps its types. about: the activation, "hidden_act", and the thresholds of the layers,
    "hidden_act_param", if it has any. added: of every layer, as `layers.N.threshold`, the thresholds of its neurons,
    float32 [neurons]. Where neither states thresholds those that the model has for its neurons stay, if the activation
    is one that needs them. Each file takes its place when it is complete and on disk.
    """
    out.mkdir(parents=True, exist_ok=True)
    stay = not added and about["hidden_act"] in THRESHOLDED and _LIMITS not in about
    gone = [name for name in checkpoint.names() if name.endswith(THRESHOLD) and not stay]
    own = {name: float32_tensor(values) for name, values in added.items()}
    model = _Model(checkpoint, types, changed, new, about, own, gone)
    if checkpoint.source != "gguf" and form != "gguf":
        return _write_folder(model, out)
    content = _changed_gguf(model) if checkpoint.source == "gguf" else _folder_as_gguf(model)
    with _whole(out / "model.gguf") as to:
        write_gguf(to, *content)
    return out / "model.gguf"


@dataclass(frozen=True)
class _Model:
    """What is written: fields as of `write_model`; gone: canonical names of the tensors that are left out."""

    checkpoint: Checkpoint
    types: StoredTypes
    changed: Sequence[str]
    new: NewTensor
    about: Mapping[str, Any]
    added: Mapping[str, RawTensor]
    gone: Sequence[str]

    def stored(self, name: str) -> RawTensor:
        """A changed tensor as the files have it."""
        made = self.new(name)
        if made.type != "F32" or not self.checkpoint.turned(name):
            return made
        return float32_tensor(made.float32().swapaxes(-1, -2))


def _changes(
    tensors: Mapping[str, RawTensor], base: Bytes, places: Sequence[tuple[str, Place, int]]
) -> dict[str, _Change]:
    """By the file's name of a tensor, what changes in it. base: the view of the file; places: of `_by_file`."""
    starts = {name: tensor.data.ctypes.data - base.ctypes.data for name, tensor in tensors.items()}
    found: dict[str, _Change] = {}
    for canonical, run, before in places:
        name = next(one for one, start in starts.items() if start <= run.begin < start + tensors[one].nbytes)
        tensor = tensors[name]
        row = block_type(tensor.type).row_bytes(tensor.shape[-1])
        first, own, count = (run.begin - starts[name]) // row, before // row, run.nbytes // row
        change = found.setdefault(name, _Change(tensor))
        change.rows.append((canonical, slice(first, first + count), slice(own, own + count)))
    return found


def _by_file(model: _Model) -> dict[Path, list[tuple[str, Place, int]]]:
    """By file, (canonical name of a changed tensor, a place of it there, bytes of the tensor before that)."""
    files: dict[Path, list[tuple[str, Place, int]]] = {}
    for name in model.changed:
        before = 0
        for place in model.checkpoint.places(name):
            files.setdefault(place.path, []).append((name, place, before))
            before += place.nbytes
    return files


# --- GGUF ------------------------------------------------------------------------------------------------------------

_Content = tuple[dict[str, bytes], list[tuple[str, str, tuple[int, ...]]], Iterator[Bytes]]
"""Of a file, as `write_gguf` takes it."""


def _changed_gguf(model: _Model) -> _Content:
    """Of a GGUF file."""
    file = read_gguf(model.checkpoint.path)
    changes = _changes(file.tensors, file.files[0].view(), _by_file(model).get(file.path, []))
    types = {name: _new_type(change, model.types) for name, change in changes.items()}
    left_out = {NAMES(name) for name in model.gone}.union(said_twice(file, model.checkpoint.config))
    every = {name: tensor for name, tensor in file.tensors.items() if name not in left_out}
    every |= {NAMES(name): tensor for name, tensor in model.added.items()}
    tensors = [(name, types.get(name, tensor.type), tensor.shape) for name, tensor in every.items()]
    architecture, metadata = model.checkpoint.config.architecture, metadata_bytes(file.path)
    metadata.pop(f"{architecture}.{_LIMITS}", None)
    metadata |= {f"{architecture}.{key}": encoded(value) for key, value in model.about.items()}
    if model.types.changed != "same":
        metadata["general.file_type"] = encoded(_FILE_TYPES[model.types.changed])
    data = (
        changes[name].data(model.stored, kind).reshape(-1) if name in changes else every[name].data
        for name, kind, _ in tensors
    )
    return metadata, tensors, data


def _folder_as_gguf(model: _Model) -> _Content:
    """Of a folder. Vectors and routers are F32."""
    checkpoint = model.checkpoint
    form = AsGGUF(checkpoint)
    metadata = form.metadata | {f"{form.architecture}.{key}": value for key, value in model.about.items()}
    metadata |= {"general.file_type": _FILE_TYPES[model.types.changed], "general.quantization_version": 2}
    every = {name: shape for name, shape in shapes(checkpoint.config) if name not in model.gone}
    every |= {name: tensor.shape for name, tensor in model.added.items()}
    if form.divisors is not None:
        every[_DIVISORS] = form.divisors.shape
    changed = {name: model.types[name] for name in model.changed}
    types = {
        name: "F32" if len(shape) == 1 or is_router(name) else fitting(changed.get(name, model.types.changed), shape)
        for name, shape in every.items()
    }
    tensors = [(name if name == _DIVISORS else NAMES(name), types[name], shape) for name, shape in every.items()]

    def data() -> Iterator[Bytes]:
        for name, shape in every.items():
            if name == _DIVISORS and form.divisors is not None:
                values = form.divisors
            elif name in model.added:
                values = model.added[name].float32()
            else:
                own = model.new(name) if name in model.changed else checkpoint.take(name)
                values = form.turned(name, own.float32())
            yield quantize(np.ascontiguousarray(values, np.float32).reshape(-1, shape[-1]), types[name])
            checkpoint.release()

    return {key: encoded(value) for key, value in metadata.items()}, tensors, data()


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


# --- folders ---------------------------------------------------------------------------------------------------------


def _write_folder(model: _Model, out: Path) -> Path:
    checkpoint, gone, files = model.checkpoint, model.gone, _by_file(model)
    for name in gone:
        files.setdefault(checkpoint.places(name)[0].path, [])
    home = checkpoint.places("embed")[0].path  # of what is added
    names = file_names(checkpoint.config, {})
    extra = {names(name).removesuffix(".weight"): tensor for name, tensor in model.added.items()}
    if extra:
        files.setdefault(home, [])
    (out / "config.json").unlink(missing_ok=True)  # without it a folder is no model; it is written last
    for path in sorted(checkpoint.path.iterdir()):
        made = path in files or path.name in ("config.json", _INDEX)
        if made or not path.is_file() or path.suffix in (".bin", ".pt", ".pth"):
            continue
        with _whole(out / path.name) as to, path.open("rb") as source:
            shutil.copyfileobj(source, to, 1 << 22)
    for path, places in files.items():
        tensors, metadata, mapped = read_safetensors(path)
        changes = _changes(tensors, mapped.view(), places)
        kept = extra.copy() if path == home else {}  # first, where float32 is aligned whatever follows
        stored = sorted(tensors.items(), key=lambda one: one[1].data.ctypes.data)
        kept |= {name: tensor for name, tensor in stored if not (gone and name.endswith(THRESHOLD))}
        with _whole(out / path.name) as to:
            to.write(safetensors_header(kept, metadata))
            for name, tensor in kept.items():
                change = changes.get(name)
                to.write((tensor.data if change is None else change.data(model.stored, tensor.type)).data)
    if (checkpoint.path / _INDEX).exists():
        index, _ = read_json(checkpoint.path / _INDEX)
        stay = {name: file for name, file in index["weight_map"].items() if not (gone and name.endswith(THRESHOLD))}
        index["weight_map"] = stay | dict.fromkeys(extra, home.name)
        about_all = index.get("metadata")
        if type(about_all) is dict and type(about_all.get("total_size")) is int:
            about_all["total_size"] += sum(tensor.nbytes for tensor in extra.values())
            about_all["total_size"] -= sum(place.nbytes for name in gone for place in checkpoint.places(name))
        with _whole(out / _INDEX) as to:
            to.write(json.dumps(index, indent=2).encode() + b"\n")
    with _whole(out / "config.json") as to:
        to.write(json.dumps(_document(checkpoint, model.about), indent=2).encode() + b"\n")
    return out


def _document(checkpoint: Checkpoint, about: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the activation and its thresholds."""
    document, _ = read_json(checkpoint.path / "config.json")
    document.pop(_LIMITS, None)
    named = _KEYS.get(checkpoint.config.architecture, "hidden_act")
    return document | {named if key == "hidden_act" else key: value for key, value in about.items()}


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that has its name only when it is complete and on disk."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
