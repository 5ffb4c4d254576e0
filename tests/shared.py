"""Arrays that every process, and every later run of the tests, shares.

An entry is a file of arrays behind their SHA-256, so one that was damaged is made again. It is named by the hash of
what is asked, its folder by the hash of what answers. Whoever asks first makes an entry, under a lock of it alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
KEPT = 3
"""Folders that stay: that of this run, and those that were used last."""


def folder_of(every: Path, made_by: bytes) -> Path:
    """The folder of the entries that this code and these libraries make. What was used less lately goes."""
    folder = every / hashlib.sha256(made_by).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    others = []
    for other in every.iterdir():
        with suppress(FileNotFoundError):  # another process removes the same ones
            others.append((other.stat().st_mtime_ns, other))
    for _, other in sorted((found for found in others if found[1] != folder), reverse=True)[KEPT - 1 :]:
        shutil.rmtree(other, ignore_errors=True)
    return folder


@contextmanager
def _locked(folder: Path, digest: str) -> Iterator[None]:
    """Meanwhile no other process makes this entry. A byte of a file is locked, until the process ends at the latest.

    Locks end when any descriptor of the file is closed in this process, so contexts are not nested.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "locks").open("ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, int(digest[:12], 16), os.SEEK_SET)
        yield


def _read(path: Path) -> Arrays | None:
    """The arrays of an entry; None where there is none, or it is not as it was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        return None
    with np.load(io.BytesIO(content[32:]), allow_pickle=False) as file:
        return dict(file)


def _write(path: Path, arrays: Arrays) -> None:
    """An entry appears whole or not at all."""
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
    beside.replace(path)


def shared(folder: Path, make: Callable[[], Arrays], *key: object) -> Arrays:
    """What `make` returns for this key, whoever called it first."""
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    path = folder / digest
    found = _read(path)
    if found is None:
        with _locked(folder, digest):
            found = _read(path)
            if found is None:
                found = make()
                _write(path, found)
    return found
