"""Renders chat templates in a process of their own, with bounded time and memory.

The process (template_worker.py) is started with the first template that needs Jinja, in about 0.1 s, and is kept: each
rendering is then one exchange over its pipes. A rendering beyond the limits ends it, and the next one starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SECONDS = 1.0  # CPU seconds for compiling and rendering; real templates need milliseconds
WAIT = 10.0  # wall-clock seconds, even on a busy machine
MEMORY = 512 << 20  # bytes of address space, plus 16 times the request
MAX_SOURCE = 1 << 16  # characters, four times the longest template in use


class Refused(Exception):
    """The template called raise_exception: it does not take these messages."""


class Failed(Exception):
    """The template is broken, or does not fit these messages."""


class Limit(Exception):
    """The template went beyond its time or memory."""


_lock = threading.Lock()
_worker: subprocess.Popen[bytes] | None = None


def render(source: str, variables: dict[str, Any] | None) -> str:
    """The text of template `source` with `variables` (strings, numbers, lists, dicts). Refused, Failed or Limit.

    variables None: only starts the process and compiles `source`, ahead of its first rendering; the text is empty.
    """
    if len(source) > MAX_SOURCE:
        raise Limit(f"it is longer than {MAX_SOURCE} characters")
    question = {"source": source, "variables": variables, "seconds": SECONDS, "memory": MEMORY}
    with _lock:
        kind, text = _exchange(json.dumps(question).encode() + b"\n")
    if kind != "text":
        raise {"refused": Refused, "failed": Failed, "limit": Limit}[kind](text)
    return text


def _exchange(line: bytes) -> tuple[str, str]:
    """The answer of the process, which is ended where it gives none in time, or has met a limit."""
    worker = _started()
    with contextlib.suppress(OSError, ValueError):
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(line)
        worker.stdin.flush()
        kind, text = json.loads(_read_line(worker.stdout.fileno(), time.monotonic() + WAIT))
        if kind == "limit":
            stop()  # its memory goes with it
        return str(kind), str(text)
    ended = worker.poll()
    if ended is None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its pipes close before it ends
            ended = worker.wait(0.1)
    stop()
    if ended == -getattr(signal, "SIGPROF", 0):
        return "limit", f"it takes longer than {SECONDS:g} s"
    return "limit", f"it takes longer than {WAIT:g} s" if ended is None else "it takes too much memory"


def _read_line(fd: int, deadline: float) -> bytes:
    """A line from a pipe; TimeoutError after the deadline, ValueError where the pipe ends before the line does."""
    import os

    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not parts or not parts[-1].endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            parts.append(os.read(fd, 1 << 20))
            if not parts[-1]:
                raise ValueError
    return b"".join(parts)


def _started() -> subprocess.Popen[bytes]:
    """The process; a new one where there is none that runs."""
    global _worker
    if _worker is None or _worker.poll() is not None:
        stop()
        program = Path(__file__).with_name("template_worker.py")
        command = [sys.executable, "-I", "-X", "utf8", str(program)]
        _worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert _worker.stdin is not None
        _worker.stdin.write(json.dumps(sys.path).encode() + b"\n")
    return _worker


@atexit.register
def stop() -> None:
    """Ends the process, if there is one."""
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
