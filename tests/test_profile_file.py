"""Profiles and samples on disk: what is written is read, and what does not suit the model is refused."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_models import checkpoint
from test_prepared import describe, edit_header, left_in

from powerinfer.errors import ModelError, PowerInferError
from powerinfer.formats import prepared
from powerinfer.formats.prepared import PROFILE, SAMPLES, PreparedFile
from powerinfer.formats.profile_file import open_profile, open_profile_file, write_profile
from powerinfer.formats.samples_file import SamplesFile, SamplesWriter, open_samples, row_bytes, write_samples
from powerinfer.neurons import Profile

D_MODEL, D_FF, LAYERS = 64, 99, 2
TOKENS = (700, 300)


def model(folder: Path, **options: Any) -> Any:
    return checkpoint(folder / "m.gguf", **{"d_ff": D_FF, **options})


def profile(thresholds: tuple[float, ...] | None = None) -> Profile:
    rng = np.random.default_rng(5)
    each = tuple(np.array([rng.integers(0, n + 1, D_FF) for n in TOKENS]) for _ in range(LAYERS))
    active = tuple(np.bincount(rng.integers(0, 101, sum(TOKENS)), minlength=101) for _ in range(LAYERS))
    total = tuple(counts.sum(axis=0) for counts in each)
    return Profile(sum(TOKENS), total, ("a", "ü.txt"), TOKENS, each, active, (0.25, 1.0), thresholds)


def written(folder: Path) -> PreparedFile:
    write_profile(model(folder), None, profile((0.5, 0.25)), {"window": 512, "of": ["x"]})
    return PreparedFile(PROFILE, model(folder))


def refused(read: Callable[[], Any], folder: Path, why: str) -> None:
    with pytest.raises(ModelError) as caught:
        read()
    message = str(caught.value)
    assert re.search(why, message), message
    assert f"`powerinfer profile -m {folder}/m.gguf`" in message and "\n" not in message


@pytest.mark.parametrize("thresholds", [None, (0.5, 0.25)])
def test_a_profile_that_is_written_is_read(tmp_path: Path, thresholds: tuple[float, ...] | None) -> None:
    one = profile(thresholds)
    path = write_profile(model(tmp_path), None, one, {"window": 512})
    file = open_profile_file(model(tmp_path))
    other = file.profile
    assert file.path == path and file.details == {"window": 512}
    for name in ("tokens", "sizes", "corpora", "corpus_tokens", "reuse", "thresholds", "digest"):
        assert getattr(other, name) == getattr(one, name), name
    for name in ("counts", "corpus_counts", "active"):
        assert all(map(np.array_equal, getattr(one, name), getattr(other, name))), name
    assert left_in(tmp_path) == ["profile.safetensors"]


def test_the_same_profile_is_the_same_file(tmp_path: Path) -> None:
    path = written(tmp_path).path
    before = path.read_bytes()
    assert written(tmp_path).path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"neurons": [98, 98]},
        {"n_layers": None},
        {"corpora": None},
        {"corpora": []},
        {"corpora": [3, 4]},
        {"corpora": [{"name": "a", "tokens": 700}]},
        {"corpora": [{"name": "a", "tokens": 699}, {"name": "b", "tokens": 301}]},
        {"corpora": [{"name": "a", "tokens": 1000}, {"name": "b", "tokens": 0}]},
        {"corpora": [{"name": "a", "tokens": 700}, {"name": "b", "tokens": 10**30}]},
        {"corpora": [{"name": "a", "tokens": 700}, {"name": 1, "tokens": 300}]},
        {"corpora": [{"name": "a", "tokens": 700}, {"name": "b", "tokens": 300.0}]},
        {"corpora": [{"name": "a", "tokens": 1}] * 100_000},
        {"reuse": None},
        {"reuse": [0.5]},
        {"reuse": [0.5, 1.5]},
        {"reuse": [0.5, "x"]},
        {"thresholds": []},
        {"thresholds": [0.5, -1.0]},
        {"thresholds": [True, 0.5]},
        {"about": None},
    ],
    ids=lambda change: str(change)[:60],
)
def test_descriptions_that_do_not_suit(tmp_path: Path, change: dict[str, Any]) -> None:
    file = written(tmp_path)
    describe(file, lambda description: description.update(change))
    refused(
        lambda: open_profile(model(tmp_path)),
        tmp_path,
        r"states|state|does not hold|counts|count each|: (n_layers|corpora|reuse|thresholds|about)",
    )


def stored(file: PreparedFile, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Change the numbers of a tensor in the file."""
    _, tensors, mapped = file.read()
    data = tensors[name].data
    at = data.ctypes.data - mapped.view().ctypes.data
    values = data.view("<i8").copy()
    change(values)
    raw = bytearray(file.path.read_bytes())
    raw[at : at + values.nbytes] = values.tobytes()
    file.path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("name", "value"),
    [(f"layers.1.{name}", value) for name in ("counts", "active") for value in (-1, 1001, 1 << 62, -(1 << 63))],
)
def test_counts_that_cannot_be(tmp_path: Path, name: str, value: int) -> None:
    file = written(tmp_path)
    stored(file, name, lambda values: values.__setitem__(3, value))
    refused(lambda: open_profile(model(tmp_path)), tmp_path, "layer 1")


def test_histograms_whose_sum_wraps(tmp_path: Path) -> None:
    file = written(tmp_path)
    stored(file, "layers.0.active", lambda values: values.__setitem__(slice(0, 2), (1 << 63) - 1))
    refused(lambda: open_profile(model(tmp_path)), tmp_path, "layer 0")


def test_profiles_of_other_shapes(tmp_path: Path) -> None:
    file = written(tmp_path)
    edit_header(file, lambda header: header.update({"layers.2.counts": header.pop("layers.1.counts")}))
    refused(lambda: open_profile(model(tmp_path)), tmp_path, r"does not hold layers\.1\.counts")
    file = written(tmp_path)
    edit_header(file, lambda header: header["layers.1.counts"].update(shape=[99, 2]))
    refused(lambda: open_profile(model(tmp_path)), tmp_path, r"does not hold layers\.1\.counts")
    written(tmp_path)
    refused(lambda: open_profile(model(tmp_path, seed=2)), tmp_path, "another model")


# ---------------------------------------------------------------- samples

ROWS, WINDOWS = 10, np.array([0, 3, 8])


def rows() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(6)
    width = -(-D_FF // 8)
    return [
        (rng.standard_normal((ROWS, D_MODEL), np.float32), rng.integers(0, 256, (ROWS, width)).astype(np.uint8))
        for _ in range(LAYERS)
    ]


def put(writer: SamplesWriter, begin: int, end: int) -> None:
    for layer, (x, active) in enumerate(rows()):
        writer.put(layer, begin, x[begin:end], active[begin:end])


def sampled(folder: Path) -> PreparedFile:
    with write_samples(model(folder), None, ROWS, WINDOWS, {"seed": 1}) as writer:
        put(writer, 6, ROWS)
        put(writer, 0, 7)
    return PreparedFile(SAMPLES, model(folder))


def opened(folder: Path) -> SamplesFile:
    return open_samples(model(folder))


def test_samples_that_are_written_are_read(tmp_path: Path) -> None:
    path = sampled(tmp_path).path
    file = opened(tmp_path)
    assert (file.rows, file.details, file.path) == (ROWS, {"seed": 1}, path)
    assert np.array_equal(file.windows, WINDOWS) and left_in(tmp_path) == ["samples.safetensors"]
    for (x, active), (of_x, of_active) in zip(file.layers.values(), rows(), strict=True):
        assert x.dtype == np.float16 and np.array_equal(x, of_x.astype(np.float16))
        assert np.array_equal(active, of_active)
    assert row_bytes(model(tmp_path)) * ROWS == sum(x.nbytes + active.nbytes for x, active in file.layers.values())


def test_values_beyond_f16_are_clipped(tmp_path: Path) -> None:
    with write_samples(model(tmp_path), None, ROWS, WINDOWS, {}) as writer:
        for layer, (x, active) in enumerate(rows()):
            x[0, :2] = (1e6, -1e30)
            writer.put(layer, 0, x, active)
    assert opened(tmp_path).layers[0][0][0, :2].tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize(
    "change", [{"rows": 11}, {"rows": 0}, {"rows": 10.0}, {"rows": 1 << 62}, {"rows": None}, {"about": 3}], ids=str
)
def test_descriptions_of_samples_that_do_not_suit(tmp_path: Path, change: dict[str, Any]) -> None:
    describe(sampled(tmp_path), lambda description: description.update(change))
    refused(lambda: opened(tmp_path), tmp_path, "does not hold|: rows is|: about is")


@pytest.mark.parametrize("windows", [[1, 3, 8], [0, 3, 3], [0, 8, 3], [0, 3, 10], [0, -1, 8]], ids=str)
def test_windows_that_cannot_be(tmp_path: Path, windows: list[int]) -> None:
    stored(sampled(tmp_path), "windows", lambda values: values.__setitem__(slice(None), windows))
    refused(lambda: opened(tmp_path), tmp_path, "windows that do not follow")


def test_samples_of_other_shapes(tmp_path: Path) -> None:
    for name, other in (("layers.1.x", "layers.2.x"), ("windows", "window")):
        file = sampled(tmp_path)
        edit_header(file, lambda header, name=name, other=other: header.update({other: header.pop(name)}))
        refused(lambda: opened(tmp_path), tmp_path, "does not")
    sampled(tmp_path)
    refused(lambda: open_samples(model(tmp_path, seed=2)), tmp_path, "another model")


def test_what_ends_early_is_gone_on_with(tmp_path: Path) -> None:
    whole = sampled(tmp_path).path.read_bytes()
    PreparedFile(SAMPLES, model(tmp_path)).remove()
    assert left_in(tmp_path) == []
    arguments = (model(tmp_path), None, ROWS, WINDOWS, {"seed": 1})
    with pytest.raises(KeyboardInterrupt), write_samples(*arguments) as writer:
        put(writer, 0, 4)
        writer.sync()
        raise KeyboardInterrupt
    assert left_in(tmp_path) == ["samples.safetensors.part"]
    refused(lambda: opened(tmp_path), tmp_path, "there is no")
    with write_samples(*arguments, resume=True) as writer:
        assert writer.resumed
        put(writer, 4, ROWS)
    assert PreparedFile(SAMPLES, model(tmp_path)).path.read_bytes() == whole
    assert left_in(tmp_path) == ["samples.safetensors"]


@pytest.mark.parametrize(
    ("rest", "resume"),
    [
        pytest.param({"details": {"seed": 2}}, True, id="other about"),
        pytest.param({"rows": 11}, True, id="other rows"),
        pytest.param({}, False, id="not asked for"),
    ],
)
def test_what_is_another_file_is_not_gone_on_with(tmp_path: Path, rest: dict[str, Any], resume: bool) -> None:
    whole = sampled(tmp_path).path.read_bytes()
    earlier = {"rows": ROWS, "windows": WINDOWS, "details": {"seed": 1}, **rest}
    with pytest.raises(ZeroDivisionError), write_samples(model(tmp_path), None, **earlier) as writer:
        put(writer, 0, ROWS)
        1 / 0  # noqa: B018
    with write_samples(model(tmp_path), None, ROWS, WINDOWS, {"seed": 1}, resume) as writer:
        assert not writer.resumed
        put(writer, 0, ROWS)
    assert PreparedFile(SAMPLES, model(tmp_path)).path.read_bytes() == whole


@pytest.mark.parametrize("rest", [b"", b"x" * 100, b"\0" * (1 << 20)], ids=["empty", "short", "long"])
def test_a_part_that_is_something_else(tmp_path: Path, rest: bytes) -> None:
    folder = tmp_path / "m.gguf.powerinfer"
    folder.mkdir()
    (folder / "samples.safetensors.part").write_bytes(rest)
    with write_samples(model(tmp_path), None, ROWS, WINDOWS, {}, resume=True) as writer:
        assert not writer.resumed
        put(writer, 0, ROWS)
    opened(tmp_path)


def test_a_killed_process_leaves_a_part_for_the_next_one(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from test_profile_file import *\n"
        "with write_samples(model(Path(sys.argv[1])), None, ROWS, WINDOWS, {'seed': 1}) as writer:\n"
        "    put(writer, 0, 5)\n"
        "    print('half', flush=True)\n"
        "    import time; time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    arguments = (model(tmp_path), None, ROWS, WINDOWS, {"seed": 1}, True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        with pytest.raises(PowerInferError, match="another process is writing"), write_samples(*arguments):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    with write_samples(*arguments) as writer:
        assert writer.resumed
        put(writer, 5, ROWS)
    found = opened(tmp_path).layers.values()
    assert all(np.array_equal(active, of[1]) for (_, active), of in zip(found, rows(), strict=True))


@pytest.mark.parametrize("why", ["known", "reserved", "found"])
def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    import shutil

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    usage = shutil.disk_usage(tmp_path)
    if why == "known":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    elif why == "reserved":
        monkeypatch.setattr(prepared.os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(prepared.os, "write", full)
    with (
        pytest.raises(PowerInferError, match=r"cannot write .*--prepared"),
        write_samples(model(tmp_path), None, ROWS, WINDOWS, {}) as writer,
    ):
        put(writer, 0, ROWS)
    assert left_in(tmp_path) == []
