"""Provoke an error of the GPU's driver in the middle of an answer: the program must end, with one line that says so.

    python -m benchmarks.hybrid.driver_error MODEL [--gpu cuda] [--vram 1GiB] [--out FILE]

A child runs `powerinfer run`; in its fifth step a kernel writes to an address that nobody has. On torch's CPU device
the step fails as if one had. Prints one JSON document; the exit status is 1 where the child ended otherwise than it
should: not within a minute, with another status than 1, without a part of an answer, or with more or less than one line
on its standard error, but for its progress.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.hybrid import worker
from benchmarks.hybrid.compare import gpu_name
from benchmarks.lib import machine, results
from powerinfer.cli.main import main as powerinfer
from powerinfer.devices.gpu import GpuLayers
from powerinfer.hardware import measure

STEP = 5
HANGS = 60  # seconds
NOWHERE = 1 << 46
"""An address that is none of a device's memory, nor of the host's that it may use."""
SAID = "the GPU failed while"


def write_nowhere() -> None:
    """Launch a kernel that does."""
    import triton
    import triton.language as tl

    @triton.jit
    def _write(address):  # type: ignore[no-untyped-def]
        tl.store(address.to(tl.pointer_type(tl.int32)), 1)

    _write[(1,)](NOWHERE)


def child(arguments: argparse.Namespace) -> int:
    steps, download, emulated = count(1), GpuLayers._download, arguments.gpu == "cpu"

    def failing(self: GpuLayers, step: Any) -> Any:
        if not self.rehearses and next(steps) == STEP:
            if emulated:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nas if there were a driver")
            write_nowhere()
        return download(self, step)

    flags = [
        "run",
        "-m",
        str(arguments.model),
        "-p",
        "a",
        "--raw",
        "-n",
        "32",
        "--no-trial",
        "--temperature",
        "0",
        "--gpu",
        arguments.gpu,
    ]
    flags += ["-c", "128"] + ([] if arguments.vram is None else ["--vram", arguments.vram])
    with mock.patch.object(GpuLayers, "_download", failing), worker.rates_once():
        if not emulated:
            return powerinfer(flags)
        with mock.patch.object(measure, "measured", lambda *_, **__: worker.stand_in()):
            return powerinfer(flags)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpu", default="cuda", help="cuda, cuda:1, or cpu, which stands in (default %(default)s)")
    parser.add_argument("--vram", metavar="SIZE", help="default: all that is free")
    parser.add_argument("--out", type=Path, help="write the document there too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        return child(arguments)
    command = [sys.executable, "-m", "benchmarks.hybrid.driver_error", str(arguments.model), "--gpu", arguments.gpu]
    command += ["--child"] + ([] if arguments.vram is None else ["--vram", arguments.vram])
    document: dict[str, Any] = {"kind": "driver-error", **machine.description(), "device": gpu_name(arguments.gpu)}
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, cwd=machine.ROOT)
        status, lines, answer = done.returncode, done.stderr.splitlines(), done.stdout
    except subprocess.TimeoutExpired:
        status, lines, answer = None, [], ""
    lines = [line for line in lines if not line.startswith("loading weights")]
    said = len(lines) == 1 and SAID in lines[0]
    document |= {"status": status, "seconds": round(time.monotonic() - begin, 1), "lines": lines[-20:]}
    document |= {"answer": answer[:200], "as_it_should": status == 1 and said and bool(answer)}
    if arguments.out is not None:
        results.write_json(arguments.out, document)
    print(json.dumps(document))
    return int(not document["as_it_should"])


if __name__ == "__main__":
    sys.exit(main())
