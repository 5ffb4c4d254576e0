"""Prepared files: they appear whole or not at all, and are refused when they do not suit the model."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_models import checkpoint

from powerinfer.errors import ModelError, PowerInferError
from powerinfer.formats import prepared
from powerinfer.formats.prepared import BUNDLES, PREDICTOR, Kind, PreparedFile, prepared_folder

TENSORS = [("layers.0.neurons", "U8", (3, 128)), ("layers.1.neurons", "U8", (3, 128))]
DATA = {name: np.arange(i, i + 384, dtype=np.uint16).astype(np.uint8) for i, (name, _, _) in enumerate(TENSORS)}


def place(folder: Path, kind: Kind = BUNDLES, **options: Any) -> PreparedFile:
    return PreparedFile(kind, checkpoint(folder / "m.gguf", **options))


def fill(write: Callable[[str, np.ndarray], None]) -> None:
    for name, data in DATA.items():
        write(name, data)


def written(folder: Path, **description: Any) -> PreparedFile:
    file = place(folder)
    with file.write(description, TENSORS) as write:
        fill(write)
    return file


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def refused(file: PreparedFile, why: str) -> None:
    """The file is refused in one line that says why and names the command that makes it."""
    with pytest.raises(ModelError) as caught:
        file.read()
    message = str(caught.value)
    assert re.search(why, message), message
    assert "\n" not in message and f"`{file.command}`" in message and str(file.path) in message


# ---------------------------------------------------------------- where files lie


@pytest.mark.parametrize(
    ("model", "option", "folder"),
    [
        ("/a/x.gguf", None, "/a/x.gguf.powerinfer"),
        ("/a/dir/", None, "/a/dir.powerinfer"),
        (Path("/a/b/.."), None, "/a.powerinfer"),
        ("/", None, "/.powerinfer"),
        ("/a/x.gguf", "/b/c", "/b/c"),
    ],
)
def test_the_folder_of_a_model(model: str | Path, option: str | None, folder: str) -> None:
    assert prepared_folder(model, option) == Path(folder)


def test_the_folder_of_the_folder_we_are_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert prepared_folder(".") == tmp_path / "model.powerinfer"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepared_folder(".", "~/p") == tmp_path / "p"


def test_the_command_can_be_pasted(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "my model.gguf", quantize="q8_0")
    assert (
        PreparedFile(BUNDLES, model, "a b").command
        == f"powerinfer pack -m '{tmp_path}/my model.gguf' --quantize q8_0 --prepared 'a b'"
    )
    plain = PreparedFile(PREDICTOR, checkpoint(tmp_path / "m.gguf"))
    assert plain.command == f"powerinfer train -m {tmp_path}/m.gguf"
    assert plain.path == tmp_path / "m.gguf.powerinfer" / "predictor.safetensors"


# ---------------------------------------------------------------- what is written


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, extra=[1, "ü"])
    description, tensors, mapped = file.read()
    assert description["extra"] == [1, "ü"] and description["made_with"]
    assert {name: (tensor.type, tensor.shape) for name, tensor in tensors.items()} == {
        name: (dtype, shape) for name, dtype, shape in TENSORS
    }
    assert all(np.array_equal(tensors[name].data, data) for name, data in DATA.items())
    assert mapped.path == file.path and left_in(tmp_path) == ["neurons.safetensors"]


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    from safetensors import safe_open

    file = written(tmp_path, extra="x")
    with safe_open(file.path, "numpy") as opened:
        assert set(opened.keys()) == set(DATA)
        for name, data in DATA.items():
            assert np.array_equal(opened.get_tensor(name).reshape(-1), data)
        described = json.loads(opened.metadata()["powerinfer"])
    assert described["format"] == BUNDLES.format and described["kind"] == "neurons" and described["extra"] == "x"


def test_tensors_begin_at_whole_lines_and_the_first_at_a_page(tmp_path: Path) -> None:
    shapes = [("a", "F16", (3, 5)), ("b", "U8", (64,)), ("c", "F32", (7,)), ("d", "BF16", (33,)), ("e", "U8", (1,))]
    values = {name: np.full(prepared._ELEMENT[kind] * int(np.prod(shape)), 7, np.uint8) for name, kind, shape in shapes}
    file = place(tmp_path)
    with file.write({}, shapes) as write:
        for name, data in values.items():
            write(name, data)
    _, tensors, mapped = file.read()
    assert list(tensors) == list(values), "what only pads is not shown"
    base = mapped.view().ctypes.data
    at = {name: tensor.data.ctypes.data - base for name, tensor in tensors.items()}
    assert at["a"] % 4096 == 0 and all(offset % 64 == 0 for offset in at.values())
    assert all(np.array_equal(tensors[name].data, data) for name, data in values.items())


def test_a_tensor_may_come_in_pieces(tmp_path: Path) -> None:
    file = place(tmp_path)
    with file.write({}, TENSORS) as write:
        for name, data in DATA.items():
            rows = data.reshape(3, 128)
            write(name, rows[:1])
            write(name, np.asfortranarray(rows[1:]))  # in whatever order its bytes lie
    _, tensors, _ = file.read()
    assert all(np.array_equal(tensors[name].data, data) for name, data in DATA.items())


def test_nothing_is_kept_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    rows, stride, piece = 1 << 14, 1024, np.zeros((64, 1024), np.uint8)
    file = place(tmp_path)
    with file.write({}, [("layers.0.neurons", "U8", (rows, stride))]) as write:
        tracemalloc.start()
        for _ in range(rows // 64):
            write("layers.0.neurons", piece)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20 < file.path.stat().st_size


# ---------------------------------------------------------------- whole or not at all


def wrong_order(write: Callable[[str, np.ndarray], None]) -> None:
    for name in reversed(DATA):
        write(name, DATA[name])


def too_much(write: Callable[[str, np.ndarray], None]) -> None:
    write("layers.0.neurons", np.zeros(385, np.uint8))


def too_little(write: Callable[[str, np.ndarray], None]) -> None:
    write("layers.0.neurons", DATA["layers.0.neurons"])
    write("layers.1.neurons", DATA["layers.1.neurons"][:-1])


def one_too_few(write: Callable[[str, np.ndarray], None]) -> None:
    write("layers.0.neurons", DATA["layers.0.neurons"])


def interrupted(write: Callable[[str, np.ndarray], None]) -> None:
    write("layers.0.neurons", DATA["layers.0.neurons"])
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("work", "ending"),
    [
        (wrong_order, AssertionError),
        (too_much, AssertionError),
        (too_little, AssertionError),
        (one_too_few, AssertionError),
        (interrupted, KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("before", [False, True], ids=["first", "again"])
def test_work_that_ends_early_leaves_what_was_there(
    tmp_path: Path, work: Callable[..., None], ending: type[BaseException], before: bool
) -> None:
    file = written(tmp_path, version="old") if before else place(tmp_path)
    with pytest.raises(ending), file.write({"version": "new"}, TENSORS) as write:
        assert (file.path.parent / "neurons.safetensors.part").exists()
        work(write)
    assert left_in(tmp_path) == (["neurons.safetensors"] if before else [])
    if before:
        assert file.read()[0]["version"] == "old"


def test_a_killed_process_leaves_no_file_and_the_next_one_replaces_its_rest(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from test_prepared import *\n"
        "with place(Path(sys.argv[1])).write({}, TENSORS) as write:\n"
        "    write('layers.0.neurons', DATA['layers.0.neurons'])\n"
        "    print('half', flush=True)\n"
        "    import time; time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        assert left_in(tmp_path) == ["neurons.safetensors.part"]
        with pytest.raises(PowerInferError, match="another process is writing"):
            written(tmp_path)
        assert left_in(tmp_path) == ["neurons.safetensors.part"], "it is not ours to remove"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert left_in(tmp_path) == ["neurons.safetensors.part"]
    refused(place(tmp_path), "there is no")
    part = tmp_path / "m.gguf.powerinfer" / "neurons.safetensors.part"
    part.write_bytes(part.read_bytes() + b"x" * 100_000)  # longer than what replaces it
    written(tmp_path).read()
    assert left_in(tmp_path) == ["neurons.safetensors"]


def test_a_name_that_another_process_gave_away_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our opening NAME.part and our locking it, its writer may finish: what we hold is its final file."""
    lock, final = prepared._lock, tmp_path / "m.gguf.powerinfer" / "neurons.safetensors"
    finished = []

    def late(fd: int, part: Path) -> None:
        if not finished:
            part.write_bytes(b"theirs")
            finished.append(part.rename(final.with_name("theirs")))
        lock(fd, part)

    monkeypatch.setattr(prepared, "_lock", late)
    written(tmp_path).read()
    assert finished[0].read_bytes() == b"theirs" and left_in(tmp_path) == ["neurons.safetensors", "theirs"]


# ---------------------------------------------------------------- folders that cannot be written


def cannot_write(file: PreparedFile, why: str) -> None:
    with pytest.raises(PowerInferError) as caught, file.write({}, TENSORS) as write:
        fill(write)
    message = str(caught.value)
    assert why in message and "--prepared" in message and "\n" not in message and str(file.path) in message
    assert caught.value.exit_status == 1


@pytest.mark.parametrize("allowed", range(4))
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    """It becomes full in the header, in a tensor, in the last."""
    write, count = os.write, [0]

    def full(fd: int, data: memoryview) -> int:
        count[0] += 1
        if count[0] > allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: len(data) // 2 + 1])  # as a disk does that is nearly full

    monkeypatch.setattr(prepared.os, "write", full)
    cannot_write(place(tmp_path), "No space left on device")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_errors_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(prepared.os, call, fail)
    cannot_write(place(tmp_path), "Input/output error")
    assert left_in(tmp_path) == []


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(prepared.os, "write", lambda fd, data: write(fd, data[:100]))
    _, tensors, _ = written(tmp_path).read()
    assert all(np.array_equal(tensors[name].data, data) for name, data in DATA.items())


def test_a_disk_that_is_too_small_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    cannot_write(place(tmp_path), "0 MB are free")
    assert left_in(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, used=0, free=0))
    written(tmp_path).read()  # a file system that does not know


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf.powerinfer").write_bytes(b"")
    cannot_write(place(tmp_path), "File exists")
    (tmp_path / "m.gguf.powerinfer").unlink()

    def read_only(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(prepared.os, "open", read_only)
    cannot_write(place(tmp_path), "Read-only file system")


# ---------------------------------------------------------------- what is refused


def describe(file: PreparedFile, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the description in a file; `change` edits it, or gives what replaces it."""

    def edit(header: dict[str, Any]) -> None:
        description = json.loads(header["__metadata__"]["powerinfer"])
        other = change(description)
        header["__metadata__"]["powerinfer"] = json.dumps(description if other is None else other)

    edit_header(file, edit)


def edit_header(file: PreparedFile, edit: Callable[[dict[str, Any]], Any]) -> None:
    raw = file.path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    other = edit(header)
    text = json.dumps(header if other is None else other).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    file.path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_no_file(tmp_path: Path) -> None:
    refused(place(tmp_path), "there is no")
    (tmp_path / "m.gguf.powerinfer").mkdir()
    (tmp_path / "m.gguf.powerinfer" / "neurons.safetensors").symlink_to("nowhere")
    refused(place(tmp_path), "there is no")


def test_a_file_of_another_model(tmp_path: Path) -> None:
    written(tmp_path)
    for other in (place(tmp_path, seed=2), place(tmp_path, d_ff=128), place(tmp_path, types="BF16")):
        refused(other, "another model")
    place(tmp_path).read()


def test_a_file_made_with_another_quantize(tmp_path: Path) -> None:
    written(tmp_path)
    refused(place(tmp_path, quantize="q8_0"), "made without --quantize, and the model is opened with --quantize 'q8_0'")
    with place(tmp_path, quantize="q8_0").write({}, TENSORS) as write:
        fill(write)
    refused(place(tmp_path, quantize="q4_0"), "with --quantize 'q8_0', and .* 'q4_0'")
    refused(place(tmp_path), "made with --quantize 'q8_0', and the model is opened without")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.path.rename(place(tmp_path, PREDICTOR).path)
    refused(place(tmp_path, PREDICTOR), "holds 'neurons', not predictor")


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None, 10**30, "x" * 1000, [1]])
def test_a_file_of_another_version(tmp_path: Path, version: Any) -> None:
    file = written(tmp_path)
    describe(file, lambda description: description.update(format=version))
    refused(file, "another version of powerinfer")


@pytest.mark.parametrize(
    "edit",
    [
        lambda header: header.pop("__metadata__") and None,
        lambda header: header.update(__metadata__={}),
        lambda header: header.update(__metadata__={"powerinfer": 3}),
        lambda header: header.update(__metadata__={"powerinfer": "[]"}),
        lambda header: header.update(__metadata__={"powerinfer": "{"}),
        lambda header: header.update(__metadata__={"powerinfer": "[" * 100_000}),
        lambda header: header.update(__metadata__={"powerinfer": '{"a": 1, "a": 2}'}),
        lambda header: header.update(__metadata__={"powerinfer": "{}"}),
        lambda header: header.update(__metadata__={"powerinfer": '"\ud800"'}),
        lambda header: header.update(__metadata__="x"),
    ],
)
def test_descriptions_that_are_none(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = written(tmp_path)
    edit_header(file, edit)
    refused(file, "powerinfer|JSON|nested|UTF-8")


def overlap(header: dict[str, Any]) -> None:
    header["layers.1.neurons"]["data_offsets"] = [0, 384]


def shift(header: dict[str, Any]) -> None:
    header["layers.1.neurons"]["data_offsets"] = [385, 769]


def beyond(header: dict[str, Any]) -> None:
    header["layers.1.neurons"] = {"dtype": "U8", "shape": [1 << 40], "data_offsets": [384, 384 + (1 << 40)]}


def missing(header: dict[str, Any]) -> None:
    del header["layers.1.neurons"]


@pytest.mark.parametrize("edit", [overlap, shift, beyond, missing, lambda header: []])
def test_damaged_headers(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = written(tmp_path)
    edit_header(file, edit)
    refused(file, "overlaps|hole|past the end|belong to no tensor|not a JSON object")


@pytest.mark.parametrize("length", [0, 7, 8, 100, 4095, 4096, 4096 + 384, 4096 + 767])
def test_truncated_files(tmp_path: Path, length: int) -> None:
    file = written(tmp_path)
    file.path.write_bytes(file.path.read_bytes()[:length])
    refused(file, "truncated|past the end")


@pytest.mark.parametrize("claimed", [1 << 24, (1 << 24) + 1, 1 << 40, (1 << 64) - 1])
def test_headers_that_claim_to_be_huge(tmp_path: Path, claimed: int) -> None:
    file = written(tmp_path)
    file.path.write_bytes(struct.pack("<Q", claimed) + file.path.read_bytes()[8:])
    refused(file, f"claims {claimed} bytes")


def test_what_is_named_as_padding_and_is_too_large_for_it_is_shown(tmp_path: Path) -> None:
    file = written(tmp_path)
    edit_header(file, lambda header: header.update({"padding.9": header.pop("layers.1.neurons")}))
    assert list(file.read()[1]) == ["layers.0.neurons", "padding.9"], "the reader of the kind will refuse it"
