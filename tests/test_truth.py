"""Truths that are shared: made once, whoever asks, made again when damaged, and never those of another question."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

truths = pytest.importorskip("truth")

from families import case_named, random_model, save  # noqa: E402
from shared import KEPT, shared  # noqa: E402
from truth import Truth  # noqa: E402


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Entries of a test are its own."""
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "cache"))
    folder: Path = truths.entries()
    return folder


def counting() -> tuple[list[int], Callable[[], dict[str, np.ndarray]]]:
    made: list[int] = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"some": np.arange(5.0), "model/a file": np.frombuffer(b"bytes", np.uint8)}

    return made, make


def test_an_entry_is_made_once_for_its_key(apart: Path) -> None:
    made, make = counting()
    for key in (("a", 1), ("a", 1), ("a", 2), ("a", 1)):
        found = shared(apart, make, *key)
        np.testing.assert_equal(found, make())
        made.pop()
    assert len(made) == 2 and {path.name for path in apart.iterdir() if path.name != "locks"} == {
        path.name for path in apart.iterdir() if len(path.name) == 64
    }


@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_damaged_entry_is_made_again(apart: Path, at: int) -> None:
    made, make = counting()
    shared(apart, make, "key")
    path = next(path for path in apart.iterdir() if path.name != "locks")
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[at] ^= 1
    for content in (bytes(changed), whole[:-1], whole[:20], b""):
        path.write_bytes(content)
        shared(apart, make, "key")
        assert path.read_bytes() == whole
    assert len(made) == 5


def test_what_an_entry_follows_from_is_in_its_name(apart: Path, tmp_path: Path) -> None:
    """Another configuration, seed, precision or layout is another entry, though the name of the case is the same."""
    case = case_named("llama-gqa")
    every = [Truth(case), Truth(case, seed=12), Truth(case, half=True), Truth(case, rms_norm_eps=1e-2)]
    said = [truth.logits[0] for truth in every]
    assert all(np.abs(one - said[0]).max() > 1e-6 for one in said[1:])
    assert np.abs(every[0].mistaken - said[0]).max() > 1e-3
    for name, layout in (("a", "folder"), ("b", "gguf")):
        assert every[0].save(layout, tmp_path / name).is_dir() == (layout == "folder")
    assert len([path for path in apart.iterdir() if path.name != "locks"]) == 4 + 1 + 2
    np.testing.assert_array_equal(Truth(case).logits[0], said[0])


def test_other_code_has_entries_of_its_own(apart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of folders of entries only the last ones stay."""
    code = tmp_path / "code"
    code.mkdir()
    for name in truths.SOURCES:
        (code / name).write_bytes((Path(truths.__file__).with_name(name)).read_bytes())
    monkeypatch.setattr(truths, "__file__", str(code / "truth.py"))
    folders = [apart]
    for turn, name in enumerate([*truths.SOURCES, *truths.SOURCES]):
        for at, one in enumerate(folders):
            if one.exists():
                os.utime(one, (1000 + at, 1000 + at))
        with (code / name).open("a") as file:
            file.write(f"# {turn}\n")
        truths._entries.cache_clear()
        folders.append(truths.entries())
    assert len(set(folders)) == len(folders)
    assert [one for one in folders if one.exists()] == folders[-KEPT :]
    monkeypatch.undo()
    truths._entries.cache_clear()


def test_files_are_the_callers_alone(tmp_path: Path) -> None:
    """What a test does to its model's files, or to its model, no other sees."""
    truth = Truth(case_named("llama-gqa"), "gguf", tmp_path / "a")
    for parameter in truth.model.parameters():
        parameter.data.zero_()
    whole = truth.path.read_bytes()
    truth.path.write_bytes(b"")
    case = truth.case
    (tmp_path / "b").mkdir()
    made = save(case, case.config(), random_model(case, case.config(), 11), "gguf", tmp_path / "b")
    assert Truth(case).save("gguf", tmp_path / "c").read_bytes() == made.read_bytes() == whole
    assert np.abs(Truth(case).logits[0]).max() > 0


def test_processes_wait_for_each_other(apart: Path) -> None:
    """Of several that ask at the same time one makes the entry."""
    code = (
        "import os, pathlib, sys, time, numpy as np, shared\n"
        "def make():\n"
        "    print('made', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    return {'by': np.array([os.getpid()])}\n"
        "sys.stdin.readline()\n"
        "print(shared.shared(pathlib.Path(sys.argv[1]), make, 'key')['by'][0])\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(apart)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        )
        for _ in range(2)
    ]
    said = []
    for one in started:
        one.stdin.write("\n")  # type: ignore[union-attr]
        one.stdin.flush()  # type: ignore[union-attr]
    for one in started:
        said += one.communicate(timeout=120)[0].split()
    assert said.count("made") == 1 and len({word for word in said if word != "made"}) == 1
