"""A model's file that is changed while the model runs: never the end of the process, and never other weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import VOCAB, D, tiny_gguf

from powerinfer.devices.file_rows import FileRows
from powerinfer.errors import ChangedError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.mapped import MappedFile
from powerinfer.formats.tensors import RawTensor

ROWS, COLS, BEGIN = 300, 700, 12


@pytest.fixture
def table(tmp_path: Path) -> tuple[Path, np.ndarray]:
    values = np.random.default_rng(0).standard_normal((ROWS, COLS)).astype(np.float32)
    path = tmp_path / "table"
    path.write_bytes(bytes(BEGIN) + values.tobytes())
    return path, values


def rows_of(path: Path, **options: Any) -> FileRows:
    tensor = RawTensor("F32", (ROWS, COLS), np.empty(4 * ROWS * COLS, np.uint8))
    return FileRows(MappedFile(path), BEGIN, tensor, **({"fewest": 40} | options))


def test_rows_are_those_of_the_file(table: tuple[Path, np.ndarray]) -> None:
    path, values = table
    rng = np.random.default_rng(1)
    for room in (0, 1 << 24):  # with 0 earlier rows make place for others
        rows = rows_of(path, room=room)
        for _ in range(60):
            wanted = rng.integers(0, ROWS, rng.integers(1, 41)).astype(np.int32)
            rows.fetch(wanted)
            assert np.array_equal(rows.data.view(np.float32).reshape(ROWS, COLS)[wanted], values[wanted])
    rows.fetch(np.array([-1, ROWS, 1 << 30], np.int32))  # for whoever looks them up to refuse


def test_few_rows_take_little_memory(table: tuple[Path, np.ndarray]) -> None:
    rows = rows_of(table[0], room=0)
    for start in range(0, ROWS, 40):
        rows.fetch(np.arange(start, min(start + 40, ROWS), dtype=np.int32))
        assert np.count_nonzero(rows.data.view(np.float32).reshape(ROWS, COLS).any(axis=1)) <= 40


@pytest.mark.parametrize("change", ["truncated", "emptied", "overwritten", "longer"])
def test_a_file_that_changes_is_noticed(table: tuple[Path, np.ndarray], change: str) -> None:
    path, values = table
    rows = rows_of(path)
    rows.fetch(np.arange(4, dtype=np.int32))
    if change == "overwritten":
        before = path.stat().st_mtime_ns
        with path.open("r+b") as file:
            file.write(bytes(5000))
        os.utime(path, ns=(before + 1, before + 1))
    else:
        os.truncate(path, {"truncated": 5000, "emptied": 0, "longer": 1 << 21}[change])
    rows.fetch(np.arange(4, dtype=np.int32))  # there already
    assert np.array_equal(rows.data.view(np.float32).reshape(ROWS, COLS)[:4], values[:4])
    with pytest.raises(ChangedError, match="changed while it was in use; load the model again"):
        rows.fetch(np.arange(2, 9, dtype=np.int32))
    with pytest.raises(ChangedError, match="changed while it was in use"):
        rows.fetch(np.array([8], np.int32))


CODE = """
import os, sys
import numpy as np
from powerinfer.config import EngineConfig
from powerinfer.devices import Batch
from powerinfer.errors import ChangedError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.models import load

executor = load(open_checkpoint(sys.argv[1]), EngineConfig(threads=1, context=128, max_batch=1))

def run(*tokens):
    n, slot = len(tokens), np.zeros(1, np.int32)
    batch = Batch(
        tokens=np.array(tokens, np.int32), positions=np.arange(n, dtype=np.int32), rows=np.zeros(n, np.int32),
        page_table=np.arange(4, dtype=np.int32)[None], logit_rows=np.arange(n, dtype=np.int32), read_states=slot,
        states=slot,
    )
    return executor.forward(batch).copy()

first = run(1, 2, 3)
os.truncate(sys.argv[1], 4096)
assert np.array_equal(run(1, 2, 3), first), "what was read stays"
try:
    run(1, 2, 9)
except ChangedError as error:
    print(error)
"""


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_ram_whose_file_is_cut_off(tmp_path: Path, tied: bool) -> None:
    path = tiny_gguf(tied=tied).write(tmp_path / "m.gguf")
    assert open_checkpoint(path).rests_at("embed") is not None and VOCAB > 9 and D
    done = subprocess.run([sys.executable, "-c", CODE, path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{path} changed while it was in use; load the model again\n")
