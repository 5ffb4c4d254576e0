"""What PowerInfer published beside its models: `PWRI` files, and counts of activations.

A PWRI file is a GGUF file with another magic. It has a predictor for every layer (`fc1`, `fc2`) and stores the down
projection neuron by neuron (`ffn_down_t`). Its FFN is always rectified, whatever its architecture.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.fields import Fields
from powerinfer.formats.gguf import GGUFFile
from powerinfer.formats.gguf_model import fused, names_of, read_config, stored_tensors
from powerinfer.formats.layout import MAX_LAYERS, MAX_SCALE, MAX_WIDTH
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Source, collect, predictor_shapes

GPU_INDEX = "says which neurons PowerInfer put on a GPU; this engine does not need it: name the model itself"

_ACTIVATIONS = {"llama": "relu", "bamboo": "drelu", "falcon": "relu", "opt": "relu"}
# The converter wrote no name of the pre-tokenizer: there was one for each of these.
_PRE_TOKENIZERS = {"falcon": "falcon", "opt": "gpt-2"}
_MAX_COUNTS_FILE = 1 << 24  # bytes; MAX_WIDTH counts of 8 bytes, and as much again


def open_published(file: GGUFFile) -> Source:
    """The model in a PWRI file; ModelError if it is not one this engine runs."""
    if file.metadata.get("general.architecture") == "generic.gpu_index":
        raise ModelError(f"{file.path} {GPU_INDEX}")
    config = read_config(file, _ACTIVATIONS)
    threshold = _threshold(file)
    names = names_of(file, config)
    inner = {"predictor_in": "fc1", "predictor_out": "fc2", "down": "ffn_down_t", "down_rows": "ffn_down_t"}
    names = replace(names, inner=names.inner | inner)
    stored = stored_tensors(file, config)
    predictors = predictor_shapes(config, stored, names)
    tensors = collect(config, stored, names, str(file.path), predictors, fused(file, config))
    metadata = file.metadata
    if config.architecture in _PRE_TOKENIZERS:
        metadata = {"tokenizer.ggml.pre": _PRE_TOKENIZERS[config.architecture]} | metadata
    notes = [f"a file of PowerInfer's: activation {config.activations}, predictors with threshold {threshold:g}"]
    return Source("gguf", file.path, config, metadata, tensors, file.files, notes, threshold)


def _threshold(file: GGUFFile) -> float:
    """What the predictors' outputs are compared with."""
    fields = Fields(file.metadata, str(file.path), prefix="powerinfer.")
    threshold = fields.number("sparse_threshold", -MAX_SCALE, MAX_SCALE, 0.0)
    unread = fields.unread()
    if unread:
        raise fields.bad(shown(unread[0])[1:-1], "is set, and this engine does not know what it means")
    return float(threshold)


# --- counts of activations -------------------------------------------------------------------------------------------

_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def read_activation_counts(folder: Path) -> list[NDArray[np.int64]]:
    """How often each neuron fired, int64 [neurons] for every layer, from the files `activation_N.pt` of a folder.

    Layers are in the order of the numbers. The files are pickles; torch reads them without running code in them.
    RequestError if torch is missing, ModelError if a file is missing or does not hold counts.
    """
    matches = [re.fullmatch(r"activation_(\d{1,6})\.pt", path.name) for path in folder.glob("activation_*.pt")]
    numbers = sorted(int(match[1]) for match in matches if match)
    if not numbers:
        raise ModelError(f"{folder} holds no activation_0.pt")
    if len(numbers) > MAX_LAYERS or numbers != list(range(len(numbers))):
        absent = min(set(range(len(numbers) + 1)) - set(numbers))
        raise ModelError(f"{folder}: activation_{absent}.pt is missing, or a number occurs twice")
    try:
        import torch
    except ImportError:
        raise RequestError("reading activation_N.pt files needs torch: pip install 'powerinfer[train]'") from None
    layers = [_read_counts(folder / f"activation_{number}.pt", torch) for number in numbers]
    for number, counts in enumerate(layers):
        if len(counts) != len(layers[0]):
            raise ModelError(f"{folder}: activation_{number}.pt counts {len(counts)} neurons, not {len(layers[0])}")
    return layers


def _read_counts(path: Path, torch: Any) -> NDArray[np.int64]:
    stored = _stored_bytes(path)
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise any exception on a damaged file
        raise ModelError(f"{path}: torch cannot read it without running code ({type(error).__name__})") from None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ModelError(f"{path}: does not hold a plain tensor")
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.ndim != 1 or not 1 <= tensor.shape[0] <= MAX_WIDTH or kind not in (*_INTEGERS, *_FLOATS):
        raise ModelError(f"{path}: a tensor {shown(list(tensor.shape))} of {kind} does not count neurons")
    if tensor.untyped_storage().nbytes() != stored:  # torch does not check this
        raise ModelError(f"{path}: claims another size than it has")
    # float64 is exact up to 2**53
    values: NDArray[Any] = tensor.detach().to(torch.int64 if kind in _INTEGERS else torch.float64).numpy()
    if not (np.isfinite(values) & (values >= 0) & (values < 2**53)).all() or (values != np.floor(values)).any():
        raise ModelError(f"{path}: holds values that are no counts")
    return values.astype(np.int64)


def _stored_bytes(path: Path) -> int:
    """Bytes of the one storage in a file of torch.save, which is a zip file without compression; else ModelError."""
    try:
        size = path.stat().st_size
        if size > _MAX_COUNTS_FILE:
            raise ModelError(f"{path}: {size} bytes are absurd for counts of one layer")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except ModelError:
        raise
    except Exception:  # zipfile raises various exceptions
        raise ModelError(f"{path}: not a file that torch.save writes") from None
    storages = [member for member in members if "/data/" in member.filename]
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or len(storages) != 1 or sum(member.file_size for member in members) > size:
        raise ModelError(f"{path}: not one tensor as torch.save writes it")
    return storages[0].file_size
