"""Plants every fault in turn and runs the tests that must find it: `make mutations`, or `python run.py TEXT...`.

A fault is planted in the working tree, so what it is planted in must be committed; it is taken out again whatever
happens. Where it lies in native code the module is built again, before the tests and at the end.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutations import Mutation, every_mutation  # noqa: E402

TOO_LONG = 900
"""Seconds after which a fault counts as found: it may make a test wait for ever."""


def check(mutation: Mutation) -> None:
    """SystemExit where it cannot be planted."""
    if (ROOT / mutation.file).read_text().count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file} does not have this once: {mutation.old!r}")
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", mutation.file], cwd=ROOT, check=False).returncode:
        raise SystemExit(f"{mutation.file} has changes that are not committed")


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The working tree has the fault inside."""
    path = ROOT / mutation.file
    source = path.read_text()
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        path.write_text(source)


def build() -> None:
    """The native module of the working tree as it is."""
    subprocess.run(["make", "--silent", ".venv/stamp-dev"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def is_found(mutation: Mutation) -> bool:
    """Whether the tests fail."""
    words = shlex.split(mutation.tests)
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command = words if words[0] == "make" else [*pytest, "--cases", "all", *words]
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = running.communicate(timeout=TOO_LONG)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return True
    ran = "tests passed" in said if words[0] == "make" else running.returncode in (0, 1)
    if not ran:
        raise SystemExit(f"{mutation.tests} ended with {running.returncode} and ran no test:\n{said[-2000:]}")
    return running.returncode != 0


def main(texts: list[str]) -> int:
    chosen = [m for m in every_mutation() if not texts or any(text in f"{m}" for text in texts)]
    if not chosen:
        raise SystemExit(f"no fault has this in its guarantee, file or tests: {', '.join(texts)}")
    for mutation in chosen:
        check(mutation)
    missed = 0
    for mutation in chosen:
        begin = time.monotonic()
        try:
            with planted(mutation):
                if mutation.native and not mutation.tests.startswith("make "):
                    build()
                found = is_found(mutation)
        finally:
            if mutation.native:
                build()
        missed += not found
        seconds = time.monotonic() - begin
        print(f"{'found' if found else 'MISSED'}  {seconds:5.0f} s  {mutation.file}: {mutation.guarantee}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults were found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
