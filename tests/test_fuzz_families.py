"""Damaged files of families that are settings of a common one, or have mechanisms of their own: those of families.py.

A case is made from its number alone, and used and bounded as those of test_fuzz.py: it works, or is refused in a line.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("families")

from families import case_named
from test_fuzz import bounded_memory, damage_json, damaged_gguf, rewrite, run, use
from truth import Truth

from benchmarks.models.gguf_writer import ARRAY, Array, Builder
from powerinfer.formats.gguf import metadata_bytes, read_gguf

__all__ = ["bounded_memory"]  # a fixture

CASES = 1600
NAMES = (
    "gemma3n", "apertus", "bitnet-silu", "phimoe", "cohere2-moe", "granite-moe-swa", "plm", "muse-glimmer",
    "kimi-linear", "stablelm-12b", "olmo-clamped",
)  # fmt: skip


def builder_of(path: Path) -> Builder:
    """A file whose every part can be changed, as it is stored."""
    file, builder = read_gguf(path), Builder()
    for key, raw in metadata_bytes(path).items():
        kind, of_items = (int.from_bytes(raw[at : at + 4], "little") for at in (0, 4))
        builder.add(key, kind, Array(of_items, file.metadata[key]) if kind == ARRAY else file.metadata[key])
    for name, tensor in file.tensors.items():
        builder.tensor(name, tensor.float32())
    return builder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {name: Truth(case_named(name)).save("folder", root / name) for name in NAMES}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Builder]:
    root = tmp_path_factory.mktemp("files")
    return {name: builder_of(Truth(case_named(name)).save("gguf", root)) for name in NAMES}


def test_models_without_damage_work(folders: dict[str, Path], bases: dict[str, Builder], tmp_path: Path) -> None:
    for name, folder in folders.items():
        use(folder, random.Random(0), text=False)
        use(bases[name].write(tmp_path / "m.gguf"), random.Random(0), text=False)


def test_damaged_files(bases: dict[str, Builder], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    run(CASES, lambda rng: rewrite(path, damaged_gguf(rng, list(bases.values()))), worked_at_most=0.5, text=False)


def test_damaged_configurations(folders: dict[str, Path]) -> None:
    settings = {name: json.loads((folder / "config.json").read_text()) for name, folder in folders.items()}

    def make(rng: random.Random) -> Path:
        name = rng.choice(NAMES)
        changed = damage_json(settings[name], rng, rng.choice([1, 1, 2, 3]))
        rewrite(folders[name] / "config.json", json.dumps(changed).encode())
        return folders[name]

    run(CASES, make, worked_at_most=0.7, text=False)
