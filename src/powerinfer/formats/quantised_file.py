"""A GGUF file made of another, its matrices in other types: which tensor gets which type, as llama.cpp has it, and the
writing of the file."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.gguf import GGUFFile, encoded, metadata_bytes, read_gguf, write_gguf
from powerinfer.formats.mapped import shown
from powerinfer.formats.quant import Bytes, Float32, block_type, can_dequantize
from powerinfer.formats.scale_search import searched
from powerinfer.formats.tensors import RawTensor
from powerinfer.progress import Progress, silent

_PIECE = 1 << 20  # elements that a thread quantises at a time


@dataclass(frozen=True)
class Mix:
    """Types of a file: of its matrices, and of those on which most depends: attention's values and down of the layers
    at both ends, and of every third. number: of the mix in general.file_type."""

    number: int
    type: str
    better: str


MIXES = {
    "F16": Mix(1, "F16", "F16"),
    "BF16": Mix(32, "BF16", "BF16"),
    "Q8_0": Mix(7, "Q8_0", "Q8_0"),
    "Q6_K": Mix(18, "Q6_K", "Q6_K"),
    "Q5_K_M": Mix(17, "Q5_K", "Q6_K"),
    "Q5_K": Mix(16, "Q5_K", "Q5_K"),
    "Q5_1": Mix(9, "Q5_1", "Q5_1"),
    "Q5_0": Mix(8, "Q5_0", "Q5_0"),
    "Q4_K_M": Mix(15, "Q4_K", "Q6_K"),
    "Q4_K": Mix(14, "Q4_K", "Q4_K"),
    "Q4_1": Mix(3, "Q4_1", "Q4_1"),
    "Q4_0": Mix(2, "Q4_0", "Q4_0"),
    "IQ4_NL": Mix(25, "IQ4_NL", "IQ4_NL"),
    "IQ4_XS": Mix(30, "IQ4_XS", "IQ4_XS"),
    "Q3_K": Mix(11, "Q3_K", "Q3_K"),
    "Q2_K": Mix(10, "Q2_K", "Q2_K"),
}
"""Types that a model can be quantised to, by name."""

_NARROW = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL",
}  # fmt: skip
"""The types of matrices whose rows are not whole blocks of 256."""

_UNCHANGED = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv"
    r"|indexer\.[kq]_proj|^position_embd|^token_types|time_mix_(first|[wvag][012]|decay_w[12]|lerp_fused)\.weight"
    r"|attn_rel_b"
)
"""Names of the small matrices that llama.cpp leaves as they are, too: routers, convolutions, positions."""


def target_types(gguf: GGUFFile, mix: Mix) -> dict[str, str]:
    """The type of each tensor in the new file. Vectors, norms, routers and integers stay as they are."""
    wanted = wanted_types(gguf, mix)
    return {name: _fitting(wanted[name], tensor.shape[-1]) for name, tensor in gguf.tensors.items()}


def wanted_types(gguf: GGUFFile, mix: Mix) -> dict[str, str]:
    """The same, if all rows were whole blocks."""
    matrices = {name: tensor for name, tensor in gguf.tensors.items() if _is_matrix(name, tensor)}
    tied = "output.weight" not in gguf.tensors
    better = _better(matrices)
    types = {name: tensor.type for name, tensor in gguf.tensors.items()}
    for name in matrices:
        target = mix.better if name in better else mix.type
        head = name == "output.weight" or (tied and name in ("token_embd.weight", "per_layer_token_embd.weight"))
        coarse = block_type(target).block > 1 and target != "Q8_0"
        types[name] = "Q6_K" if head and coarse else target
    return types


def _is_matrix(name: str, tensor: RawTensor) -> bool:
    matrix = any(dim > 1 for dim in tensor.shape[:-1])
    return matrix and name.endswith("weight") and _UNCHANGED.search(name) is None and can_dequantize(tensor.type)


def _better(matrices: Mapping[str, RawTensor]) -> set[str]:
    """Matrices that get the better type of a mix."""
    by_kind: dict[str, dict[str, int]] = {"value": {}, "down": {}}
    last = 0
    for name in matrices:
        if layer := re.match(r"blk\.(\d+)\.", name):
            last = max(last, int(layer[1]))
            if re.search(r"\.attn_(v|qkv|kv_b)\.weight$", name):
                by_kind["value"][name] = int(layer[1])
            elif "ffn_down" in name:
                by_kind["down"][name] = int(layer[1])
    values = sorted(by_kind["value"].items(), key=lambda item: item[1])
    places = [(name, place, len(values)) for place, (name, _) in enumerate(values)]
    places += [(name, layer, last + 1) for name, layer in by_kind["down"].items()]
    return {name for name, place, count in places if _matters(place, count)}


def _matters(layer: int, layers: int) -> bool:
    """Whether a layer is one of the first eighth, of the last, or every third of the others."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


def _fitting(target: str, cols: int) -> str:
    """The type, or what rows of that many elements can be instead."""
    for kind in (target, _NARROW.get(target, "F16")):
        if cols % block_type(kind).block == 0:
            return kind
    return "F16"


@dataclass(frozen=True)
class Importance:
    """Weights of the errors, by the inputs of matrices, of an imatrix file of llama.cpp. columns: mean squares of the
    inputs by tensor, [matrices, cols]."""

    path: Path
    columns: dict[str, Float32]

    def rows(self, name: str, tensor: RawTensor, begin: int, end: int) -> Float32 | None:
        """The weight of each element of some rows of a tensor; None where the file has none."""
        columns = self.columns.get(name)
        if columns is None:
            return None
        rows_each = tensor.size // tensor.shape[-1] // len(columns)
        rows: Float32 = columns[np.arange(begin, end) // rows_each]
        return rows


def read_importance(path: Path, gguf: GGUFFile) -> Importance:
    """The importance in a GGUF imatrix file, of a model's matrices. ModelError if malformed or of another model."""
    file = read_gguf(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ModelError(f"{path} is not an imatrix file: llama-imatrix -o FILE.gguf makes one")
    columns = {}
    for stored, sums in file.tensors.items():
        name = stored.removesuffix(".in_sum2")
        tensor, counts = gguf.tensors.get(name), file.tensors.get(f"{name}.counts")
        if name == stored or tensor is None:
            continue
        matrices = sums.size // sums.shape[-1]
        right = (sums.type, sums.shape[-1]) == ("F32", tensor.shape[-1])
        right = right and matrices in (1, math.prod(tensor.shape[:-2]))
        if not right or counts is None or (counts.type, counts.size) != ("F32", matrices):
            raise ModelError(f"{path}: {shown(stored)} does not suit the model's tensor; was it made of another model?")
        columns[name] = _means(path, stored, sums.values(0, matrices), counts)
    if not columns:
        raise ModelError(f"{path} says nothing of the matrices of {gguf.path}: it was made of another model")
    return Importance(path, columns)


def _means(path: Path, name: str, sums: Float32, counts: RawTensor) -> Float32:
    """Mean squares of the inputs; of a matrix that got none all are 1."""
    times = counts.float32().reshape(-1, 1)
    if not (np.isfinite(sums).all() and np.isfinite(times).all() and (sums >= 0).all() and (times >= 0).all()):
        raise ModelError(f"{path}: {shown(name)} holds numbers that are infinite, below 0 or no numbers")
    means: Float32 = np.where(times > 0, sums / np.maximum(times, 1), np.float32(1))
    return means


@dataclass(frozen=True)
class Quantised:
    """A file that was written. types: how many tensors it has of each; narrow: matrices that have another type than
    asked for, since their rows are not whole blocks of it."""

    path: Path
    nbytes: int
    types: dict[str, int]
    narrow: int


def write_quantised(
    gguf: GGUFFile,
    type_name: str,
    path: Path,
    threads: int,
    importance: Importance | None = None,
    progress: Progress = silent,
) -> Quantised:
    """Write a model in a type of `MIXES` as one file, which has its name only when it is whole and on disk.

    RequestError for a model that has these types already, ModelError for a weight that the type cannot hold,
    PowerInferError if the file cannot be written.
    """
    mix = MIXES[type_name]
    types, wanted = target_types(gguf, mix), wanted_types(gguf, mix)
    if all(types[name] == tensor.type for name, tensor in gguf.tensors.items()):
        raise RequestError(f"{gguf.path} is {type_name} already: each of its tensors has the type that it would get")
    metadata = {key: value for key, value in metadata_bytes(gguf.path).items() if not key.startswith("split.")}
    metadata |= {"general.file_type": encoded(mix.number), "general.quantization_version": encoded(2)}
    if importance is not None:
        metadata["quantize.imatrix.file"] = encoded(importance.path.name)
        metadata["quantize.imatrix.entries_count"] = encoded(len(importance.columns))
    entries = [(name, types[name], tensor.shape) for name, tensor in gguf.tensors.items()]
    nbytes = sum(math.prod(shape[:-1]) * block_type(kind).row_bytes(shape[-1]) for _, kind, shape in entries)
    with _complete_file(path, nbytes) as to, ThreadPoolExecutor(threads) as pool:
        try:
            write_gguf(to, metadata, entries, _data(gguf, types, importance, pool, progress))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    narrow = sum(types[name] != wanted[name] for name in types)
    return Quantised(path, path.stat().st_size, dict(Counter(types.values())), narrow)


def _data(
    gguf: GGUFFile, types: Mapping[str, str], importance: Importance | None, pool: Executor, progress: Progress
) -> Iterator[Bytes]:
    """The bytes of each tensor in its new type."""
    total = sum(tensor.size for tensor in gguf.tensors.values())
    done = 0
    for name, tensor in gguf.tensors.items():
        gguf.check()  # a page of a file that was cut short must not be touched
        if types[name] == tensor.type:
            yield tensor.data
            done += tensor.size
            progress("quantising", done, total)
            continue
        n_rows, cols = tensor.size // tensor.shape[-1], tensor.shape[-1]
        out = np.empty((n_rows, block_type(types[name]).row_bytes(cols)), np.uint8)
        step = max(1, _PIECE // cols)
        pieces = [(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]

        def quantise(piece: tuple[int, int], tensor: RawTensor = tensor, name: str = name, out: Bytes = out) -> int:
            begin, end = piece
            rows = None if importance is None else importance.rows(name, tensor, begin, end)
            out[begin:end] = searched(tensor.values(begin, end), types[name], rows)
            return (end - begin) * tensor.shape[-1]

        try:
            for elements in pool.map(quantise, pieces):
                done += elements
                progress("quantising", done, total)
        except ModelError as error:
            raise ModelError(f"{gguf.path}: tensor {shown(name)}: {error}") from None
        yield out.reshape(-1)


@contextmanager
def _complete_file(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """A file that has its name only when it is complete and on disk. nbytes: about how many it gets. PowerInferError if
    it cannot be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        free = shutil.disk_usage(path.parent).free
        if free < nbytes:
            raise PowerInferError(f"{path} takes {nbytes / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free there")
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise PowerInferError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            part.unlink()
