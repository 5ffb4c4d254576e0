"""Damaged model files through the native module: those that still load run a forward pass. Not collected by pytest.

Damaged are GGUF files of every family, and bundles and predictors beside whole ones, which are then decoded sparsely.

`make fuzz-asan` runs it with a module built under AddressSanitizer and UndefinedBehaviorSanitizer. A case is made from
its number alone (`--first N --cases 1` repeats it), and the cases take the instruction-set levels in turn. A process
that a sanitiser ends is reported with the number of its case; anything but a ModelError or a RequestError is a failure
too.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np


def use_module(folder: Path) -> None:
    """Let `powerinfer._native` be the module in `folder`."""
    import powerinfer

    (path,) = folder.glob("_native*.so")
    spec = importlib.util.spec_from_file_location("powerinfer._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["powerinfer._native"] = module
    spec.loader.exec_module(module)
    powerinfer._native = module


if "--module" in sys.argv[:-1]:  # before anything imports the installed one
    use_module(Path(sys.argv[sys.argv.index("--module") + 1]))

from model_files import family_gguf  # noqa: E402
from stored_weights import stored_evenly  # noqa: E402
from test_checkpoint import with_type  # noqa: E402
from test_fuzz import GGUF_BASES, damage, damaged_gguf  # noqa: E402

from benchmarks.models.gguf_writer import Builder  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.errors import ModelError, RequestError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.predictor_file import write_predictor  # noqa: E402
from powerinfer.formats.prepared import BUNDLES, PREDICTOR, Kind, prepared_folder  # noqa: E402
from powerinfer.formats.quant import BLOCK_TYPES, block_type  # noqa: E402
from powerinfer.formats.weight_types import NATIVE_TYPES, STORED_ROWS  # noqa: E402
from powerinfer.neurons import Predictor  # noqa: E402

RESULTS = ("dense worked", "dense refused", "sparse worked", "sparse refused")
CHUNK = 500  # cases of one process
TOKENS = 37  # more than a page of the cache
RANK = 32  # of the predictors
RELU_BASES = [base for base in GGUF_BASES if base.magic == b"PWRI"]  # as PowerInfer published them
ROW_TYPES = [  # of gate and up, and of down
    ("Q4_0", "Q8_0"),
    ("Q4_0", "Q4_0X32"),
    ("Q4_1", "Q4_1X32"),
    ("F16", "F16"),
    ("BF16", "Q4_0"),
    ("Q8_0", "BF16"),
]
COUNTED = (*RESULTS, *sorted(NATIVE_TYPES), *(f"rows of {kind}" for kind in (*dict(ROW_TYPES), *STORED_ROWS)))
"""Of what there must be some: results, and types of matrices and of rows of gate and up in cases that worked."""


def wide_gguf(kind: str, base: Builder | None = None) -> Builder:
    """A Llama whose rows are whole blocks of every type; the matrices of its layers are of that type."""
    builder, rng = with_type(kind, block_type(kind).id, base), np.random.default_rng(3)
    for tensor in builder.tensors:
        cols, rows = tensor.dims[0], math.prod(tensor.dims[1:])
        name = BLOCK_TYPES[tensor.type_id].name
        tensor.data = stored_evenly(name, rows, cols, cols**-0.5, rng).tobytes()
    return builder


WIDE = wide_gguf("Q8_0")


def wide_relu(kind: str) -> Builder:
    """As PowerInfer published them."""
    return wide_gguf(kind, family_gguf("llama", published=True))


def hostile_weights(rng: random.Random) -> tuple[bytes, set[str]]:
    """A file whose header is right and whose weights are any bytes, infinite scales and NaN included, and the types of
    its matrices."""
    base = WIDE if rng.random() < 0.5 else rng.choice(GGUF_BASES)
    tensors, types = [], set()
    for tensor in base.tensors:
        fitting = [kind for kind in sorted(NATIVE_TYPES) if tensor.dims[0] % block_type(kind).block == 0]
        if len(tensor.dims) < 2:
            tensors.append(replace(tensor))
            continue
        kind = block_type(rng.choice(fitting))
        types.add(kind.name)
        size = tensor.dims[0] // kind.block * kind.nbytes * math.prod(tensor.dims[1:])
        tensors.append(replace(tensor, type_id=kind.id, data=rng.randbytes(size)))
    builder: Builder = replace(base, tensors=tensors)
    return builder.encode(), types


@dataclass(frozen=True)
class Prepared:
    """A whole model, the file of each kind that is prepared for it, and the type of rows of gate and up."""

    model: bytes
    files: dict[Kind, bytes]
    rows: str


def prepare(folder: Path) -> list[Prepared]:
    """Each model of `RELU_BASES` with bundles of each of `ROW_TYPES`, one of each of `STORED_ROWS`, and predictors."""
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.prepare.packing import pack

    path = folder / "whole.gguf"
    found = []
    wanted: list[tuple[Builder, list[tuple[str | None, str | None]]]] = [(base, [*ROW_TYPES]) for base in RELU_BASES]
    for base, pairs in [*wanted, *((wide_relu(kind), [(None, None)]) for kind in STORED_ROWS)]:
        model = base.encode()
        path.write_bytes(model)
        checkpoint = open_checkpoint(path)
        d_model, d_ff, layers = checkpoint.config.d_model, checkpoint.config.widest_ffn, checkpoint.config.n_layers
        rng = np.random.default_rng(len(found))
        for gate, down in pairs:
            types = choose_types(checkpoint, gate, down)
            bundles = pack(checkpoint, None, types).bundles.path
            weights = [(rng.standard_normal((RANK, d_model)), rng.standard_normal((d_ff, RANK))) for _ in range(layers)]
            predictor = write_predictor(
                checkpoint,
                None,
                "Q8_0" if len(found) % 2 else "F16",
                [Predictor(RANK, 0.0, int(rng.integers(d_ff)))] * layers,
                [(inner.astype(np.float32), outer.astype(np.float32)) for inner, outer in weights],
            )
            files = {BUNDLES: bundles.read_bytes(), PREDICTOR: predictor.read_bytes()}
            found.append(Prepared(model, files, types.gate))
    return found


def damaged_prepared(raw: bytes, rng: random.Random) -> bytes:
    """A prepared file with its header or its data changed, or all of its data any bytes."""
    start = 8 + int.from_bytes(raw[:8], "little")
    what = rng.random()
    if what < 0.35:
        return damage(raw, rng, len(raw[:start].rstrip()))
    if what < 0.6:
        return raw[:start] + rng.randbytes(len(raw) - start)
    data = bytearray(raw)
    for _ in range(rng.choice([1, 30, 1000])):
        data[rng.randrange(start, len(data))] = rng.choice([0, 0x7C, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return bytes(data)


def write_case(path: Path, rng: random.Random, whole: list[Prepared]) -> tuple[str | None, set[str]]:
    """Write a model, and perhaps what is prepared for it; the selector that it is then to be used with, and the types
    that are `COUNTED`."""
    path.unlink(missing_ok=True)
    folder = prepared_folder(path)
    folder.mkdir(exist_ok=True)
    for kind in (BUNDLES, PREDICTOR):
        (folder / f"{kind.name}.safetensors").unlink(missing_ok=True)
    if rng.random() < 0.6:
        model, types = make(rng)
        path.write_bytes(model)
        return None, types
    prepared = rng.choice(whole)
    path.write_bytes(prepared.model)
    chosen = rng.choice(list(prepared.files))
    for kind, raw in prepared.files.items():
        if kind != chosen and kind == PREDICTOR and rng.random() < 0.3:
            continue  # then the model's own is used
        damaged = damaged_prepared(raw, rng) if kind == chosen else raw
        (folder / f"{kind.name}.safetensors").write_bytes(damaged)
    selector = "predicted" if chosen == PREDICTOR else rng.choice(["exact", "predicted", "threshold"])
    return selector, {f"rows of {prepared.rows}"}


def make(rng: random.Random) -> tuple[bytes, set[str]]:
    what = rng.random()
    if what < 0.5:
        return damaged_gguf(rng), set()
    if what < 0.75:
        return hostile_weights(rng)
    base = rng.choice(GGUF_BASES)
    return damage(base.encode(), rng, len(base.header())), set()


def use(path: Path, isa: str, rng: random.Random, selector: str | None) -> None:
    """Load, and run a prompt and two more tokens of some sequences, sparsely if a selector is given."""
    from powerinfer.devices.batch import Batch
    from powerinfer.models import load
    from powerinfer.sparsity.attach import attach
    from powerinfer.sparsity.selection import select

    several = 2 if selector is None else rng.choice([1, 2, 8, 9, 32])
    engine = EngineConfig(
        threads=rng.choice([1, 2]), context=64, prefill_chunk=several * TOKENS, max_batch=32, isa=isa,
        kv_type=rng.choice(["f16", "q8_0", "f32"]), selector=selector or "all", trial=False, recall_every=2,
        threshold=0.1 if selector == "threshold" else None,
    )  # fmt: skip
    checkpoint = open_checkpoint(path)
    executor = load(checkpoint, engine)
    sparsity = attach(executor, checkpoint, engine, select(checkpoint, engine), lambda: [1])
    table = np.random.default_rng(several).permutation(2 * several).astype(np.int32).reshape(several, 2)
    for start, count in ((0, TOKENS), (TOKENS, 1), (TOKENS + 1, 1)):
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), several)
        tokens = np.array([rng.randrange(executor.vocab_size) for _ in positions], np.int32)
        rows = np.repeat(np.arange(several, dtype=np.int32), count)
        wanted = np.arange(len(tokens), dtype=np.int32)[count - 1 :: count]
        logits = executor.forward(Batch(tokens, positions, rows, table, wanted))
        assert logits.shape == (several, executor.vocab_size)
    report = sparsity.report()
    assert report is None or all(layer["tokens"] == 2 * several for layer in report["layers"])
    executor.close()


def run(cases: range, note: int, folder: Path, whole: list[Prepared]) -> Counter[str]:
    """Run cases one after the other; the number of the one that runs is kept in the file `note`."""
    from powerinfer import _native

    path = folder / "m.gguf"
    results: Counter[str] = Counter()
    levels = _native.levels()
    for case in cases:
        os.pwrite(note, case.to_bytes(8, "little"), 0)
        rng = random.Random(case)
        selector, types = write_case(path, rng, whole)
        kind = "dense" if selector is None else "sparse"
        try:
            use(path, levels[case % len(levels)], rng, selector)
            results.update((f"{kind} worked", *types))
        except (ModelError, RequestError) as error:
            results[f"{kind} refused"] += 1
            assert str(error).isprintable(), f"case {case}: {error!r}"
        except BaseException as error:
            raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", type=Path, help="folder of the native module; default: the installed one")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=4000)
    options = parser.parse_args()
    from powerinfer import _native

    print(f"{_native.__file__}: levels {', '.join(_native.levels())}", flush=True)
    start = time.monotonic()
    bad, totals = 0, Counter[str]()
    last = options.first + options.cases
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        note = os.open(folder / "case", os.O_RDWR | os.O_CREAT)
        whole = prepare(folder)
        first = options.first
        while first < last and bad < 10:
            cases = range(first, min(first + CHUNK, last))
            child = os.fork()
            if child == 0:
                try:
                    results = run(cases, note, folder, whole)
                    os.pwrite(note, b"".join(results[key].to_bytes(8, "little") for key in COUNTED), 8)
                except BaseException as error:
                    print(error, file=sys.stderr, flush=True)
                    os._exit(1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status == 0:
                raw = os.pread(note, 8 * len(COUNTED), 8)
                for at, key in enumerate(COUNTED):
                    totals[key] += int.from_bytes(raw[8 * at : 8 * at + 8], "little")
                first = cases.stop
            else:
                bad += 1
                first = int.from_bytes(os.pread(note, 8, 0), "little") + 1
                print(f"case {first - 1} failed, status {os.waitstatus_to_exitcode(status)}", flush=True)
    counted = ", ".join(f"{totals[key]} {key}" for key in RESULTS)
    missing = [key for key in COUNTED if not totals[key]]
    print(f"{counted}, {bad} failed, {time.monotonic() - start:.0f} s")
    if missing:
        print(f"no case worked with {', '.join(missing)}")
    return 1 if bad or missing else 0


if __name__ == "__main__":
    sys.exit(main())
