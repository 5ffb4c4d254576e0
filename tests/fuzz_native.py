"""Damaged GGUF files through the native module: those that still load run a forward pass. Not collected by pytest.

`make fuzz-asan` runs it with a module built under AddressSanitizer and UndefinedBehaviorSanitizer. A case is made from
its number alone (`--first N --cases 1` repeats it), and the cases take the instruction-set levels in turn. A process
that a sanitiser ends is reported with the number of its case; anything but a ModelError or a RequestError is a failure
too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf_bytes import Builder
from test_fuzz import GGUF_BASES, damage, damaged_gguf

from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.quant import BLOCK_TYPES

NATIVE_IDS = [0, 1, 30, 8, 2, 3, 6, 7, 12, 13, 14]
CHUNK = 500  # cases of one process
TOKENS = 37  # more than a page of the cache


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


def hostile_weights(rng: random.Random) -> bytes:
    """A file whose header is right and whose weights are any bytes, infinite scales and NaN included."""
    base = rng.choice(GGUF_BASES)
    tensors = []
    for tensor in base.tensors:
        kind = BLOCK_TYPES[rng.choice(NATIVE_IDS)]
        if len(tensor.dims) != 2 or tensor.dims[0] % kind.block:
            tensors.append(replace(tensor))
            continue
        size = tensor.dims[0] // kind.block * kind.nbytes * tensor.dims[1]
        tensors.append(replace(tensor, type_id=kind.id, data=rng.randbytes(size)))
    builder: Builder = replace(base, tensors=tensors)
    return builder.encode()


def make(rng: random.Random) -> bytes:
    what = rng.random()
    if what < 0.5:
        return damaged_gguf(rng)
    if what < 0.75:
        return hostile_weights(rng)
    base = rng.choice(GGUF_BASES)
    return damage(base.encode(), rng, len(base.header()[0]))


def use(path: Path, isa: str, rng: random.Random) -> None:
    """Load, and run a prompt and one more token of each of two sequences."""
    from powerinfer.devices.batch import Batch
    from powerinfer.models import load

    kv_type = rng.choice(["f16", "q8_0", "f32"])
    engine = EngineConfig(
        threads=rng.choice([1, 2]), context=64, prefill_chunk=2 * TOKENS, max_batch=2, isa=isa, kv_type=kv_type
    )
    executor = load(open_checkpoint(path), engine)
    table = np.array([[1, 3], [0, 2]], np.int32)
    for start, count in ((0, TOKENS), (TOKENS, 1)):
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), 2)
        tokens = np.array([rng.randrange(executor.vocab_size) for _ in positions], np.int32)
        rows = np.repeat(np.arange(2, dtype=np.int32), count)
        wanted = np.arange(len(tokens), dtype=np.int32)[count - 1 :: count]
        logits = executor.forward(Batch(tokens, positions, rows, table, wanted))
        assert logits.shape == (2, executor.vocab_size)
    executor.close()


def run(cases: range, note: int, folder: Path) -> Counter[str]:
    """Run cases one after the other; the number of the one that runs is kept in the file `note`."""
    from powerinfer import _native

    path = folder / "m.gguf"
    results: Counter[str] = Counter()
    levels = _native.levels()
    for case in cases:
        os.pwrite(note, case.to_bytes(8, "little"), 0)
        rng = random.Random(case)
        path.unlink(missing_ok=True)
        path.write_bytes(make(rng))
        try:
            use(path, levels[case % len(levels)], rng)
            results["worked"] += 1
        except (ModelError, RequestError) as error:
            results["refused"] += 1
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
    if options.module:
        use_module(options.module)
    from powerinfer import _native

    print(f"{_native.__file__}: levels {', '.join(_native.levels())}", flush=True)
    start = time.monotonic()
    bad, totals = 0, Counter[str]()
    last = options.first + options.cases
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        note = os.open(folder / "case", os.O_RDWR | os.O_CREAT)
        first = options.first
        while first < last and bad < 10:
            cases = range(first, min(first + CHUNK, last))
            child = os.fork()
            if child == 0:
                try:
                    results = run(cases, note, folder)
                    os.pwrite(note, b"".join(results[key].to_bytes(8, "little") for key in ("worked", "refused")), 8)
                except BaseException as error:
                    print(error, file=sys.stderr, flush=True)
                    os._exit(1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status == 0:
                raw = os.pread(note, 16, 8)
                totals["worked"] += int.from_bytes(raw[:8], "little")
                totals["refused"] += int.from_bytes(raw[8:], "little")
                first = cases.stop
            else:
                bad += 1
                first = int.from_bytes(os.pread(note, 8, 0), "little") + 1
                print(f"case {first - 1} failed, status {os.waitstatus_to_exitcode(status)}", flush=True)
    print(f"{totals['worked']} worked, {totals['refused']} refused, {bad} failed, {time.monotonic() - start:.0f} s")
    return 1 if bad or not totals["worked"] or not totals["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
