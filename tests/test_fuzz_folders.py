"""Damaged quantised folders: codes, scales, permutations, shapes, types, names, settings and lengths of files.

A case is made from its number alone, and used and bounded as those of test_fuzz.py: it works, or is refused in a line.
"""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_quantised_folders as quantised
from model_files import safetensors_bytes, tiny_config
from test_fuzz import INTEGERS, bounded_memory, damage_json, rewrite, run, use
from test_quantised_folders import Stored

__all__ = ["bounded_memory"]  # a fixture

CASES = 1600
BASES = {
    "fp8": (quantised.fp8("block", "F32", "weight_scale_inv"), quantised.BLOCKS),
    "fp8 rows": (quantised.fp8("channel", "BF16", "weight_scale"), quantised.CHANNELS),
    "gptq": (
        quantised.gptq(4, 32, False, shuffled="alike"), quantised.gptq_settings(4, 32, sym=False, desc_act=True)
    ),
    "gptq apart": (quantised.gptq(8, 32, True, shuffled="apart"), quantised.gptq_settings(8, 32, desc_act=True)),
    "gptq of 3 bits": (quantised.gptq(3, 32, True), quantised.gptq_settings(3, 32)),
    "awq": (quantised.awq(32), quantised.AWQ),
    "awq gemv": (quantised.gemv(32, 8), quantised.AWQ | {"version": "gemv"}),
    "packed": (quantised.packed(4, 32, shuffled="alike", zero_points=True), quantised.PACK),
    "int8": (quantised.int8(32, zero_points=True), quantised.INT8),
    "nvfp4": (quantised.nvfp4("modelopt"), quantised.MODELOPT),
    "mxfp4": (quantised.mxfp4("U8"), quantised.MXFP4),
    "nf4": (quantised.nf4(nested=True), quantised.BITS),
    "llm.int8": (quantised.llm_int8, quantised.LLM_INT8),
}  # fmt: skip
TYPES = ("F32", "F16", "BF16", "I32", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F64", "U16")
PATTERNS = tuple(map(bytes.fromhex, ("ff", "00", "7f", "80", "0000807f", "007c", "0000c07f", "01000000")))
"""Bytes that numbers are filled with: among them infinity and NaN in F32 and F16, codes without a number, and ones."""


def odd_data(rng: random.Random, raw: bytes) -> bytes:
    data, what = bytearray(raw), rng.randrange(5)
    at = rng.randrange(len(data)) if data else 0
    if what == 0:
        pattern = rng.choice(PATTERNS)
        return (pattern * len(data))[: len(data)]
    if what == 1:
        return rng.randbytes(len(data))
    if what == 2:  # a number twice, as in a permutation
        at -= at % 4
        data[at : at + 4] = data[:4] if len(data) >= at + 4 else data[at : at + 4]
    elif what == 3 and len(data) >= at + 4:
        data[at : at + 4] = (rng.choice(INTEGERS) % (1 << 32)).to_bytes(4, "little")
    elif data:
        data[at] = rng.choice([0, 0x7C, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return bytes(data)


def odd_shape(rng: random.Random, shape: tuple[int, ...], raw: bytes) -> tuple[tuple[int, ...], bytes]:
    """Another shape of as many numbers, or with more or fewer of them."""
    size, count = len(raw) // max(math.prod(shape), 1), math.prod(shape)
    what = rng.randrange(6)
    if what == 0:
        return shape[::-1], raw
    if what == 1:
        return (count,), raw
    if what == 2:
        return (*shape, 1), raw
    if what == 3:
        factor = rng.choice([2, 3, 4, 7])
        return ((count // factor, factor), raw) if count % factor == 0 else ((1, *shape), raw)
    sizes = list(shape) or [1]
    axis = rng.randrange(len(sizes))
    sizes[axis] = rng.choice([0, 1, sizes[axis] - 1, sizes[axis] + 1, 2 * sizes[axis]])
    if math.prod(sizes) > 1 << 16 or min(sizes) < 0:
        return shape, raw
    nbytes = size * math.prod(sizes)
    return tuple(sizes), (raw * (nbytes // max(len(raw), 1) + 1))[:nbytes]


def damaged(rng: random.Random, stored: Stored) -> Stored:
    """One to three tensors of quantised matrices with other contents, shapes, types or names, or without them."""
    stored = dict(stored)
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choice([name for name in stored if "proj" in name] or list(stored))
        kind, shape, raw = stored[name]
        what = rng.random()
        if what < 0.5:
            stored[name] = kind, shape, odd_data(rng, raw)
        elif what < 0.75:
            stored[name] = kind, *odd_shape(rng, shape, raw)
        elif what < 0.85:
            new = rng.choice(TYPES)
            size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U16": 2}.get(new, 1)
            nbytes = size * math.prod(shape)
            stored[name] = new, shape, (raw * (nbytes // max(len(raw), 1) + 1))[:nbytes]
        elif what < 0.95:
            del stored[name]
        else:
            stored[rng.choice([name + "x", name.replace("0", "1", 1), rng.choice(list(stored))])] = stored[name]
    return stored


def odd_settings(rng: random.Random, settings: dict[str, Any]) -> Any:
    changed = copy.deepcopy(settings)
    known = {"bits": [2, 3, 4, 8, 5], "group_size": [-1, 16, 32, 48, 64, 96, 1, 0, 7], "sym": [True, False]}
    known |= {"desc_act": [True, False], "version": ["gemm", "gemv"], "weight_block_size": [[1, 1], [40, 48], [7, 1]]}
    key = rng.choice(list(known))
    if rng.random() < 0.5:
        changed[key] = rng.choice(known[key])
        return changed
    return damage_json(changed, rng, rng.choice([1, 2]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Stored]]:
    """Folders without damage, and their tensors."""
    folders: dict[str, tuple[Path, Stored]] = {}
    for number, (name, (packer, settings)) in enumerate(BASES.items()):
        tensors: Stored = {}
        path = tmp_path_factory.mktemp("bases") / str(number)
        folders[name] = quantised.folder(path, packer, settings, tensors.update), tensors
    return folders


def test_folders_without_damage_work(whole: dict[str, tuple[Path, Stored]]) -> None:
    for path, _ in whole.values():
        use(path, random.Random(0))


def test_damaged_quantised_folders(whole: dict[str, tuple[Path, Stored]]) -> None:
    def make(rng: random.Random) -> Path:
        name = rng.choice(list(BASES))
        (path, stored), settings = whole[name], BASES[name][1]
        what = rng.random()
        if what < 0.2:
            settings = odd_settings(rng, settings)
        raw = safetensors_bytes(damaged(rng, stored) if what >= 0.2 else stored)
        if what > 0.95:
            raw = raw[: rng.randrange(len(raw))]
        rewrite(path / "model.safetensors", raw)
        rewrite(path / "config.json", json.dumps(tiny_config() | {"quantization_config": settings}).encode())
        return path

    run(CASES, make, worked_at_most=0.6)


def test_damage_is_of_every_kind() -> None:
    """Each base has its share of the cases, and each way of damage."""
    rng, raw = random.Random(1), np.arange(16, dtype=np.int32).tobytes()
    data = {odd_data(rng, raw) for _ in range(200)}
    shapes = {odd_shape(rng, (4, 4), raw)[0] for _ in range(200)}
    assert len(data) > 100 and len(shapes) > 8
