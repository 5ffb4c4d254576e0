"""Prepared files of a model: where they are stored, how they are written, when they are refused.

A model `x.gguf` has the folder `x.gguf.powerinfer` beside it, a folder `dir` has `dir.powerinfer`. A prepared file is a
safetensors file. Its metadata holds one JSON object under "powerinfer": `format`, `kind`, `fingerprint` and `quantize`
(the model it was made for, and the option it was opened with), `made_with`, and fields of its kind. The first tensor
begins at a multiple of 4096 bytes of the file, every tensor at a multiple of 64.

A file has its final name only when it is complete and on disk: it is written as NAME.part, synced and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from powerinfer import __version__
from powerinfer.config import ModelConfig
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import checked, parse_json
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.quant import Bytes
from powerinfer.formats.safetensors_file import read_safetensors
from powerinfer.formats.tensors import RawTensor

PAGE = 4096  # alignment of the first tensor
LINE = 64  # alignment of every tensor

T = TypeVar("T")

_METADATA = "powerinfer"
_PADDING = "padding."
_ELEMENT = {"I64": 8, "F32": 4, "U32": 4, "F16": 2, "BF16": 2, "U16": 2, "U8": 1}

Tensor = tuple[str, str, tuple[int, ...]]
"""(name, dtype of safetensors, shape) of a tensor that will be written."""

Write = Callable[[str, Bytes], None]
"""write(name, data): the bytes of a tensor, uint8; in the announced order, in any number of pieces."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of prepared file: its name, what people call its contents, and the verb that makes it.

    format: incremented with every change of the content, including the order of bytes in a bundle's part. of_neurons:
    of use only to models whose neurons are told apart; in_experts: those inside experts, too.
    """

    name: str
    noun: str
    verb: str
    format: int = 1
    of_neurons: bool = True
    in_experts: bool = False

    def useless_reason(self, config: ModelConfig) -> str | None:
        """Reason for which such a file is of no use to a model; None: it is."""
        if not self.of_neurons or (self.in_experts and config.unpredicted_reason is None):
            return None
        return config.whole_reason


BUNDLES = Kind("neurons", "bundles", "pack", format=4)
PREDICTOR = Kind("predictor", "predictor", "train", in_experts=True)
PROFILE = Kind("profile", "profile", "profile")
SAMPLES = Kind("samples", "samples", "profile", in_experts=True)
EXPERTS = Kind("experts", "expert profile", "profile", format=2, of_neurons=False)
EXPERT_ROWS = Kind("expert-rows", "rows of experts", "pack", of_neurons=False)
EXPERT_BUNDLES = Kind("expert-bundles", "bundles of experts", "pack", of_neurons=False)
EXPERT_TRACE = Kind("experts-trace", "trace of experts", "profile", of_neurons=False)
TRAINING = Kind("training", "unfinished training", "sparsify", format=2, of_neurons=False)
PROFILE_STATE = Kind("profile-unfinished", "unfinished profile", "profile")


def prepared_folder(model: str | Path, prepared: str | None = None) -> Path:
    """The folder of a model's prepared files: `prepared` if it is given, else MODEL.powerinfer beside the model."""
    if prepared is not None:
        return Path(prepared).expanduser()
    return Path(os.path.abspath(model) + ".powerinfer")  # abspath resolves `.` and `dir/`


def check_replaceable(path: Path, mark: bytes, noun: str) -> None:
    """RequestError if there is a file of another content, which is not to be lost. mark: what its beginning holds if it
    is what people call `noun`."""
    with suppress(OSError), open(path, "rb") as file:
        if mark not in file.read(1 << 16):
            raise RequestError(f"{path} exists and is no {noun}: it would be lost, so give another file, or remove it")


class PreparedFile:
    """One kind of file of one model: its path, the command that makes it, reading and writing.

    prepared: the option of that name, None for the folder beside the model; path: a file that is named (--trace).
    """

    def __init__(
        self,
        kind: Kind,
        checkpoint: Checkpoint,
        prepared: str | None = None,
        path: Path | None = None,
        option: tuple[str, str] = ("--trace", "FILE"),
    ) -> None:
        """option: the flag that `path` follows from, and what it takes."""
        self.kind = kind
        self.path = path or prepared_folder(checkpoint.path, prepared) / f"{kind.name}.safetensors"
        self._fingerprint = checkpoint.fingerprint
        self._quantize = checkpoint.quantize
        self._useless_reason = kind.useless_reason(checkpoint.config)
        command = ["powerinfer", kind.verb, "-m", str(checkpoint.path)]
        command += ["--quantize", checkpoint.quantize] if checkpoint.quantize else []
        command += ["--prepared", prepared] if prepared is not None else []
        command += [option[0], str(path)] if path is not None else []
        self.command = shlex.join(command)
        named = f"{' '.join(option)} names another"
        self._elsewhere = "--prepared PATH chooses another folder" if path is None else named

    def exists(self) -> bool:
        """Whether there is a file, valid or not."""
        return os.path.exists(self.path)

    def bad(self, problem: str) -> ModelError:
        """The error for a file that cannot be used."""
        return ModelError(f"{self.path} {problem}; `{self.command}` recreates it")

    def read(self) -> tuple[dict[str, Any], dict[str, RawTensor], MappedFile]:
        """The description, the tensors by name (views of the mapped file) and the file.

        ModelError if there is none, or it is damaged, or was made for another model, with another --quantize, or by a
        version with another format. The caller checks which tensors there are.
        """
        if self._useless_reason is not None:
            raise ModelError(f"{self.path} is of no use: {self._useless_reason}")
        if not self.exists():
            raise ModelError(f"there is no {self.path}; `{self.command}` makes it")
        try:
            tensors, metadata, file = read_safetensors(self.path)
            text = metadata.get(_METADATA)
            description = parse_json(text.encode(errors="surrogatepass"), str(self.path)) if type(text) is str else None
        except ModelError as error:
            raise ModelError(f"{error}; `{self.command}` recreates it") from None
        if type(description) is not dict:
            raise self.bad("was not written by powerinfer")
        self._check(description)
        return description, {name: data for name, data in tensors.items() if not _is_padding(name, data)}, file

    def described(self, kind: type[T], description: dict[str, Any]) -> T:
        """The fields of a description that are its kind's own, as a `kind`; ModelError if they do not fit."""
        common = ("format", "kind", "fingerprint", "quantize", "made_with")
        fields = {name: value for name, value in description.items() if name not in common}
        try:
            return checked(kind, fields, str(self.path))
        except ModelError as error:
            raise ModelError(f"{error}; `{self.command}` recreates it") from None

    def holds(self, tensors: dict[str, RawTensor], name: str, dtype: str, shape: tuple[int, ...]) -> RawTensor:
        """Remove a tensor from those of `read` and return it; ModelError if there is none of this type and shape."""
        tensor = tensors.pop(name, None)
        if tensor is None or (tensor.type, tensor.shape) != (dtype, shape):
            raise self.bad(f"does not hold {name} as {list(shape)} of type {dtype}")
        return tensor

    def holds_no_more(self, tensors: dict[str, RawTensor]) -> None:
        """ModelError if tensors are left."""
        if tensors:
            raise self.bad(f"holds tensors that do not belong there, such as {shown(next(iter(tensors)))}")

    def _check(self, description: dict[str, Any]) -> None:
        if description.get("kind") != self.kind.name:
            raise self.bad(f"holds {shown(description.get('kind'))}, not {self.kind.name}")
        stated = description.get("format")
        if type(stated) is not int or stated != self.kind.format:
            expected = self.kind.format
            raise self.bad(f"was written by another version of powerinfer (format {shown(stated)}, not {expected})")
        if description.get("fingerprint") != self._fingerprint:
            raise self.bad("was made for another model, or the model has changed")
        quantize = description.get("quantize")
        if quantize != self._quantize:
            raise self.bad(f"was made {opened_with(quantize)}, and the model is opened {opened_with(self._quantize)}")

    @contextmanager
    def write(self, description: dict[str, Any], tensors: Sequence[Tensor]) -> Iterator[Write]:
        """Write the file while the block runs; it takes its place at the block's end, unless that raised.

        The block calls the given function for each of `tensors`, in their order; nothing is buffered.
        PowerInferError, one line, when the folder cannot be written or the disk is full; then, and on any other error
        or Ctrl-C, no partial file remains and an existing file stays unchanged.
        """
        left = deque(name for name, _, _ in tensors)
        at = 0  # of the current tensor's bytes

        def write(name: str, data: Bytes) -> None:
            nonlocal at
            assert left and name == left[0], f"{name} comes out of order"
            part.put(name, at, np.ascontiguousarray(data))
            at += data.nbytes
            if at == part.sizes[name]:
                left.popleft()
                at = 0

        with self.fill(description, tensors, keep=False) as part:
            yield write
            assert not left, f"{left[0]} is not complete"

    @contextmanager
    def fill(
        self, description: dict[str, Any], tensors: Sequence[Tensor], resume: bool = False, keep: bool = True
    ) -> Iterator[PartFile]:
        """Write the file in any order while the block runs; it takes its place at the block's end, unless that raised.

        Bytes that are not written are zero. keep: NAME.part remains if the block ends early, and `resume` continues it
        if it has the same description and tensors: see `resumed`; its space is allocated at the start. PowerInferError,
        without a partial file, if the disk is too small.
        """
        document = {
            "format": self.kind.format,
            "kind": self.kind.name,
            "fingerprint": self._fingerprint,
            "quantize": self._quantize,
            "made_with": __version__,
            **description,
        }
        header, sizes = _header(json.dumps(document, allow_nan=False), tensors)
        part = PartFile(self.path, header, sizes, self._elsewhere)
        try:
            part.open(resume, keep)
            yield part
            part.finish()
        finally:
            part.close(keep)

    def check_writable(self, tensors: Sequence[Tensor]) -> None:
        """PowerInferError, before the work, if a file of these tensors cannot be written."""
        _, sizes = _header("", tensors)
        PartFile(self.path, b"", sizes, self._elsewhere).check_writable()

    def remove(self) -> None:
        """Remove the file and the incomplete one of `fill`; PowerInferError if that fails."""
        self.remove_part()
        self._unlink(self.path)

    def remove_part(self) -> None:
        """Remove the incomplete file of `fill`."""
        self._unlink(self.path.with_name(self.path.name + ".part"))

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise PowerInferError(f"cannot remove {path} ({error.strerror or error})") from None


def opened_with(quantize: object) -> str:
    """Description of how a model was opened, for messages; quantize: the option, or the value in a file."""
    return "without --quantize" if quantize is None else f"with --quantize {shown(quantize)}"


def _is_padding(name: str, tensor: RawTensor) -> bool:
    return name.startswith(_PADDING) and tensor.type == "U8" and len(tensor.data) < LINE


# ---------------------------------------------------------------- writing


def _header(description: str, tensors: Sequence[Tensor]) -> tuple[bytes, dict[str, int]]:
    """The header of a file of these tensors, and the bytes of each tensor in order, padding included.

    The header is the length of the JSON text, the text and spaces. A tensor that does not end at a whole
    line is followed by one of U8.
    """
    header: dict[str, Any] = {"__metadata__": {_METADATA: description}}
    sizes: dict[str, int] = {}
    at = 0

    def add(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal at
        assert name not in header, name
        nbytes = _ELEMENT[dtype] * math.prod(shape)
        assert nbytes > 0, f"{name} is empty"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        sizes[name] = nbytes
        at += nbytes

    for name, dtype, shape in tensors:
        assert not name.startswith(_PADDING), name
        if at % LINE:
            add(f"{_PADDING}{len(sizes)}", "U8", (-at % LINE,))
        add(name, dtype, shape)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text, sizes


def write_small(path: Path, data: bytes) -> None:
    """Write a small file: beside its place, and there when it is on disk.

    OSError if that fails, PowerInferError while another process does it; then no partial file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    fd = _open_alone(part)
    try:
        os.ftruncate(fd, 0)
        _write_all(fd, data)
        os.fsync(fd)
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    finally:
        os.close(fd)
    _sync_folder(path.parent)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class PartFile:
    """A file that is written under NAME.part and renamed when it is complete. `close` may be called at any time.

    sizes: bytes of each tensor; elsewhere: how to choose another place; resumed: it continues the file of an earlier
    process.
    """

    def __init__(self, path: Path, header: bytes, sizes: dict[str, int], elsewhere: str) -> None:
        self.sizes = sizes
        self.resumed = False
        self._path = path
        self._elsewhere = elsewhere
        self._part = path.with_name(path.name + ".part")
        self._header = header
        *starts, self._bytes = accumulate(sizes.values(), initial=len(header))
        self._starts = dict(zip(sizes, starts, strict=True))
        self._fd = -1
        self._failed = False

    def open(self, resume: bool, reserve: bool) -> None:
        """Begin or continue the file. reserve: allocate all of it, so that no later `put` finds the disk full."""
        with self._file_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = _open_alone(self._part)
            self.resumed = resume and self._is_ours()
            if not self.resumed:
                os.ftruncate(self._fd, 0)
                self._check_space()
                if reserve:
                    self._reserve()
                self._put(self._header, 0)

    def check_writable(self) -> None:
        """PowerInferError if it could not be opened now; an incomplete file stays as it is."""
        from tempfile import TemporaryFile

        with self._file_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self._path.parent):
                pass
            with suppress(FileNotFoundError):
                self._bytes -= os.stat(self._part).st_size  # has its space already
            self._check_space()

    def put(self, name: str, at: int, data: Bytes) -> None:
        """The bytes of a tensor from byte `at` on, uint8, contiguous; they may be put again."""
        assert data.dtype == np.uint8 and data.flags.c_contiguous and at >= 0, name
        assert at + data.nbytes <= self.sizes[name], f"{name} is longer than announced"
        with self._file_errors():
            self._put(data.reshape(-1).data, self._starts[name] + at)

    def get(self, name: str) -> bytes:
        """The bytes of a tensor."""
        with self._file_errors(), open(self._part, "rb") as file:
            file.seek(self._starts[name])
            return file.read(self.sizes[name])

    def sync(self) -> None:
        """Sync to disk."""
        with self._file_errors():
            os.fsync(self._fd)

    def finish(self) -> None:
        """Rename it: it is complete."""
        with self._file_errors():
            os.fsync(self._fd)
            os.replace(self._part, self._path)
            fd, self._fd = self._fd, -1
            os.close(fd)
            _sync_folder(self._path.parent)

    def close(self, keep: bool) -> None:
        """Close it. Unless it was finished it is removed, or with `keep` only where writing failed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if self._failed or not keep:
                with suppress(OSError):
                    self._part.unlink()  # before unlocking: another process may use the name at once
            os.close(fd)

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            raise PowerInferError(
                f"cannot write {self._path} ({error.strerror or error}); {self._elsewhere}"
            ) from error

    def _is_ours(self) -> bool:
        """Whether the part is one of this very file."""
        if os.fstat(self._fd).st_size != self._bytes:
            return False
        with open(self._part, "rb") as file:
            return file.read(len(self._header)) == self._header

    def _check_space(self) -> None:
        """Fail before the work, not after, if the disk is too small."""
        from shutil import disk_usage

        usage = disk_usage(self._path.parent)
        if usage.total and usage.free < self._bytes:  # some file systems report 0 of 0
            reason = f"{self._bytes / 1e6:.0f} MB are needed, {usage.free / 1e6:.0f} MB are free"
            raise OSError(errno.ENOSPC, reason)

    def _reserve(self) -> None:
        """Give the file its length, and allocate its blocks if the system can."""
        os.ftruncate(self._fd, self._bytes)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, self._bytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise  # else: a file system that cannot reserve

    def _put(self, data: bytes | memoryview, at: int) -> None:
        os.lseek(self._fd, at, os.SEEK_SET)
        _write_all(self._fd, data)


def _open_alone(part: Path) -> int:
    """A descriptor of the file, locked; it may hold the remains of a killed process. The lock ends with this process.

    PowerInferError if another process is writing it. A symbolic link in a model's folder is not followed.
    """
    while True:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _lock(fd, part)
            with suppress(FileNotFoundError):
                # Another process may have finished and renamed the file meanwhile.
                if os.path.samestat(os.fstat(fd), os.stat(part)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, part: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PowerInferError(f"another process is writing {part}; wait for it to end") from None
    except OSError:
        pass  # a file system without locks


def _sync_folder(folder: Path) -> None:
    """Sync a rename to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
