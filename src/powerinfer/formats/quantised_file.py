"""A GGUF file made of a model, its matrices in other types. What an interrupted run has written is used by the next one
of the same result."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from powerinfer import __version__
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.gguf import GGUFFile, encoded, header_bytes, metadata_bytes
from powerinfer.formats.gguf_model import with_scales
from powerinfer.formats.importance import Importance
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.mixes import ModelMatrices
from powerinfer.formats.quant import Bytes, Float32, all_numbers, block_type
from powerinfer.formats.scale_search import searched
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import NATIVE_TYPES
from powerinfer.progress import Progress, Say, silent

_PIECE = 1 << 20  # elements that a thread quantises at a time
_SLOW_PIECE = 1 << 15  # of types that take long, so that the time that is left is soon known
_SLOW = ("IQ1", "IQ2", "IQ3")
_SYNC_EVERY = 1 << 28  # bytes after which what is written counts as done
_UNFINISHED, _COUNT_AT = b"PART", 8  # in place of GGUF's magic, and of the number of tensors: of those that are done


@dataclass(frozen=True)
class Original:
    """A model that is quantised. metadata: of the new file, as it is stored; matrices: its tensors; take: the tensor
    of a name; files: those that it is in; is_gguf: the new file has all of the old one's tensors, as they were;
    factors: of matrices of NVFP4, one or one for each of stacked ones, a tensor of the new file where they stay so."""

    path: Path
    metadata: Mapping[str, bytes]
    matrices: ModelMatrices
    take: Callable[[str], RawTensor]
    files: Sequence[MappedFile]
    is_gguf: bool
    factors: Mapping[str, Float32] = field(default_factory=dict)

    def entries(self, types: Mapping[str, str]) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, type, shape) of the new file's tensors, by the type of each of the model's."""
        entries: list[tuple[str, str, tuple[int, ...]]] = []
        for name, (_, shape) in self.matrices.stored.items():
            entries.append((name, types[name], shape))
            if name in self.factors and types[name] == "NVFP4":
                entries.append((_scale_name(name), "F32", self.factors[name].shape))
        return entries

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by name."""
        return {name: shape for name, (_, shape) in self.matrices.stored.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files)


def _scale_name(name: str) -> str:
    """The name of the tensor of a matrix's factors, as llama.cpp has it."""
    return f"{name.removesuffix('.weight')}.scale"


def written_factors(kind: str, shape: tuple[int, ...], scales: Float32 | None) -> Float32 | None:
    """Factors of a matrix that a file can have beside it; None: it has none, or others."""
    fit = kind == "NVFP4" and scales is not None and len(scales) in (1, prod(shape[:-2]))
    return scales if fit else None


def gguf_original(gguf: GGUFFile) -> Original:
    """The model in a GGUF file, or in one in parts. Factors that NVFP4 has in tensors of their own become a part of the
    weights where they get another type."""
    tensors = with_scales(gguf, gguf.tensors)
    stored = {name: (tensor.type, tensor.shape) for name, tensor in tensors.items()}
    metadata = {key: value for key, value in metadata_bytes(gguf.path).items() if not key.startswith("split.")}
    matrices = describe(stored, gguf.metadata)
    factors = {name: written_factors(one.type, one.shape, one.scales) for name, one in tensors.items()}
    stated = {name: values for name, values in factors.items() if values is not None}
    return Original(gguf.path, metadata, matrices, tensors.__getitem__, gguf.files, is_gguf=True, factors=stated)


def describe(stored: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, Any]) -> ModelMatrices:
    """Tensors of a model of that metadata."""

    def number(key: str) -> int:
        value = metadata.get(f"{metadata.get('general.architecture')}.{key}", 0)
        value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, int) and value >= 0 else 0

    layers, heads, of_keys = (number(key) for key in ("block_count", "attention.head_count", "attention.head_count_kv"))
    grouped = of_keys > 0 and heads // of_keys >= 4
    return ModelMatrices(stored, layers, number("expert_count"), grouped, layers == 80 and heads != of_keys)


@dataclass(frozen=True)
class Quantised:
    """A file that was written. types: how many tensors it has of each; resumed: tensors that an earlier run wrote."""

    path: Path
    nbytes: int
    types: dict[str, int]
    resumed: int


def write_quantised(
    original: Original,
    types: Mapping[str, str],
    number: int,
    path: Path,
    threads: int,
    importance: Importance | None = None,
    progress: Progress = silent,
    say: Say = silent,
) -> Quantised:
    """Write a model as one file, which has its name only when it is whole and on disk. types: of each tensor; number:
    of the mix in general.file_type; say: gets lines about what an interrupted run leaves, or has left.

    RequestError for a GGUF file that has these types already, ModelError for a weight that the type cannot hold, or
    that is infinite or NaN, PowerInferError if the file cannot be written.
    """
    stored = original.matrices.stored
    if original.is_gguf and all(types[name] == kind for name, (kind, _) in stored.items()):
        raise RequestError(f"{original.path} is that already: each of its tensors has the type that it would get")
    metadata = _metadata(original, number, importance)
    entries = original.entries(types)
    header, starts = header_bytes(metadata, entries)
    nbytes = [prod(shape[:-1]) * block_type(kind).row_bytes(shape[-1]) for _, kind, shape in entries]
    size = len(header) + starts[-1] + nbytes[-1]
    with _unfinished_file(path, header, size, _key(original, header, importance), say) as (to, done):
        begin = len(header) + starts[done] if done < len(starts) else size
        to.seek(begin)
        quantiser = _Quantiser(original, types, importance, progress)
        quantiser.done = sum(prod(shape) for _, _, shape in entries[:done])
        at, unsynced = done, 0
        with ThreadPoolExecutor(threads) as pool:
            try:
                for at in range(done, len(entries)):
                    to.write(b"\0" * (len(header) + starts[at] - to.tell()))
                    to.write(quantiser.data(entries[at][0], pool).data)
                    unsynced += nbytes[at]
                    if unsynced >= _SYNC_EVERY:
                        _count_done(to, at + 1)
                        unsynced = 0
            except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
                pool.shutdown(cancel_futures=True)
                _count_done(to, at)
                raise
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return Quantised(path, path.stat().st_size, dict(Counter(types.values())), done)


def file_size(original: Original, types: Mapping[str, str], importance: Importance | None = None) -> int:
    """Bytes of the file that `write_quantised` writes."""
    entries = original.entries(types)
    header, starts = header_bytes(_metadata(original, 0, importance), entries)
    _, kind, shape = entries[-1]
    return len(header) + starts[-1] + prod(shape[:-1]) * block_type(kind).row_bytes(shape[-1])


def _metadata(original: Original, number: int, importance: Importance | None) -> dict[str, bytes]:
    metadata = dict(original.metadata)
    metadata |= {"general.file_type": encoded(number), "general.quantization_version": encoded(2)}
    if importance is not None:
        metadata["quantize.imatrix.file"] = encoded(importance.name)
        metadata["quantize.imatrix.entries_count"] = encoded(len(importance.columns))
    return metadata


@dataclass
class _Quantiser:
    """The bytes of tensors in their new types. done: elements so far."""

    original: Original
    types: Mapping[str, str]
    importance: Importance | None
    progress: Progress
    done: int = 0

    def __post_init__(self) -> None:
        self._factors = {_scale_name(name): values for name, values in self.original.factors.items()}

    def data(self, name: str, pool: Executor) -> Bytes:
        """Bytes of one tensor."""
        total = sum(prod(shape) for _, shape in self.original.matrices.stored.values())
        for file in self.original.files:
            file.check()  # a page of a file that was cut short must not be touched
        of_factors = self._factors.get(name)
        if of_factors is not None:
            return of_factors.astype("<f4").view(np.uint8)
        tensor, kind = self.original.take(name), self.types[name]
        rows, cols = tensor.size // tensor.shape[-1], tensor.shape[-1]
        stays = kind == tensor.type and (tensor.scales is None or name in self.original.factors)
        out = tensor.rows() if stays else np.empty((rows, block_type(kind).row_bytes(cols)), np.uint8)
        step = max(1, (_SLOW_PIECE if kind.startswith(_SLOW) else _PIECE) // cols)

        def quantise(begin: int) -> int:
            end = min(begin + step, rows)
            if stays:
                if kind in NATIVE_TYPES and not all_numbers(out[begin:end].reshape(-1), kind):
                    raise ModelError("a weight is infinite or not a number, so it cannot be copied")
                return (end - begin) * cols
            weights = None if self.importance is None else self.importance.rows(name, tensor.shape, begin, end)
            out[begin:end] = searched(tensor.values(begin, end), kind, weights)
            return (end - begin) * cols

        try:
            for elements in pool.map(quantise, range(0, rows, step)):
                self.done += elements
                self.progress("quantising", self.done, total)
        except ModelError as error:
            raise ModelError(f"{self.original.path}: tensor {shown(name)}: {error}") from None
        return out.reshape(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Files that are not finished


def _key(original: Original, header: bytes, importance: Importance | None) -> str:
    """Hexadecimal digits that change with what is written."""
    digest = hashlib.sha256(__version__.encode() + header)
    for file in original.files:
        status = file.path.stat()
        digest.update(f"{file.path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    for name, columns in {} if importance is None else importance.columns.items():
        digest.update(name.encode() + columns.tobytes())
    return digest.hexdigest()[:16]


def _count_done(to: BinaryIO, tensors: int) -> None:
    """State that so many tensors are on disk, once they are."""
    to.flush()
    os.fsync(to.fileno())
    os.pwrite(to.fileno(), tensors.to_bytes(8, "little"), _COUNT_AT)


@contextmanager
def _unfinished_file(path: Path, header: bytes, nbytes: int, key: str, say: Say) -> Iterator[tuple[BinaryIO, int]]:
    """(a file that has its name only when it is complete and on disk, the tensors that it has already).

    It stays for the same result if the user interrupts, or the process ends otherwise; not after an error. Both is
    said. PowerInferError if it cannot be written, or another process is writing it.
    """
    part = path.with_name(f"{path.name}.{key}.part")
    resumable = False
    try:
        for other in path.parent.glob(f"{_escaped(path.name)}.*.part"):
            if other != part:
                _remove_abandoned(other)
        with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            if not _locked(file) or not _is_named(file, part):  # who had it may just have given it its name
                resumable = True
                raise PowerInferError(f"another process is writing {path}")
            done = _done(file, header)
            free = shutil.disk_usage(path.parent).free + os.fstat(file.fileno()).st_size
            if free < nbytes:
                raise PowerInferError(f"{path} takes {nbytes / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free there")
            if not done:
                file.truncate(0)
                file.write(_UNFINISHED + header[4:_COUNT_AT] + bytes(8) + header[_COUNT_AT + 8 :])
            else:
                say(f"going on from {part}: {done} tensors are of the run that was interrupted")
            yield file, done
            file.flush()
            file.truncate(nbytes)
            os.fsync(file.fileno())
            os.pwrite(file.fileno(), header[: _COUNT_AT + 8], 0)
            os.fsync(file.fileno())
            os.replace(part, path)
    except (KeyboardInterrupt, SystemExit):
        resumable = True
        say(f"stopped; the same command goes on from {part}")
        raise
    except OSError as error:
        raise PowerInferError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if not resumable:
            with suppress(OSError):
                part.unlink()


def _escaped(name: str) -> str:
    """A name as a pattern that finds it alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _locked(file: BinaryIO) -> bool:
    """Whether the file is this process's now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_named(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_abandoned(part: Path) -> None:
    """Remove what an interrupted run for another result left, unless one is writing it."""
    with suppress(OSError), part.open("rb") as file:
        if file.read(4) == _UNFINISHED and _locked(file):
            part.unlink()


def _done(file: BinaryIO, header: bytes) -> int:
    """Tensors that a file has, of the same result; 0: it begins anew."""
    file.seek(0)
    read = file.read(len(header))
    same = read[:4] == _UNFINISHED and read[4:_COUNT_AT] == header[4:_COUNT_AT]
    if not same or read[_COUNT_AT + 8 :] != header[_COUNT_AT + 8 :]:
        return 0
    return min(*(int.from_bytes(part[_COUNT_AT : _COUNT_AT + 8], "little") for part in (read, header)))
