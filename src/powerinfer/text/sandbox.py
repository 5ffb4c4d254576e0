"""Renders chat templates in a process of their own, with bounded time and memory.

The process (template_worker.py) is started with the first template that needs Jinja, in about 0.1 s, and is kept: each
rendering is then one exchange over its pipes. A rendering beyond the limits ends it, and the next one starts another.
A long conversation has a process for itself alone, one at a time, and keeps no short one waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from powerinfer.text.template_worker import OUT_OF_MEMORY

SECONDS = 1.0  # CPU seconds for compiling and rendering; real templates need milliseconds
WAIT = 10.0  # wall-clock seconds for question and answer, even on a busy machine
MEMORY = 512 << 20  # bytes of address space, plus 16 times the request
LARGE = 1 << 20  # bytes of a question from which on it has a process of its own
MAX_SOURCE = 1 << 16  # characters, four times the longest template in use
ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ")  # all that the process gets: to start Python, and for the date


class TemplateRefused(Exception):
    """The template called raise_exception: it does not take these messages."""


class Failed(Exception):
    """The template is broken, does not fit these messages, or cannot be rendered on this machine."""


class TemplateLimit(Exception):
    """The template went beyond its time or memory."""


class TimeLimit:
    """CPU seconds that the renderings of this thread may take together from now on: how busy the machine is does not
    change what fits in."""

    def __init__(self, seconds: float) -> None:
        self._end = _seconds() + seconds

    @property
    def reached(self) -> bool:
        return _seconds() > self._end


_lock, _large = threading.Lock(), threading.Lock()
_used = threading.local()  # seconds: CPU seconds of the renderings of a thread
_worker: subprocess.Popen[bytes] | None = None


def render(source: str, variables: dict[str, Any] | None, now: str = "") -> str:
    """The text of template `source` with `variables` (strings, numbers, lists, dicts). TemplateRefused, Failed or
    TemplateLimit.

    variables None: only starts the process and compiles `source`, ahead of its first rendering; the text is empty. now:
    the time of `strftime_now`, as ISO text; "": the clock's.
    """
    if len(source) > MAX_SOURCE:
        raise TemplateLimit(f"it is longer than {MAX_SOURCE} characters")
    question = {"source": source, "variables": variables, "now": now, "seconds": SECONDS, "memory": MEMORY}
    line = json.dumps(question).encode() + b"\n"
    if len(line) <= LARGE:
        with _lock:
            kind, text = _exchange(line)
    else:
        with _large:
            kind, text = _exchange_alone(line)
    if kind != "text":
        raise {"refused": TemplateRefused, "failed": Failed, "broken": Failed, "limit": TemplateLimit}[kind](text)
    return text


def _exchange(line: bytes) -> tuple[str, str]:
    """The answer of the process, which is ended unless it gave one within its limits."""
    reusable = False
    try:
        worker, start = _started()
        kind, text = _answer(worker, start + line)
        reusable = kind not in ("limit", "broken")  # else the process ends, with its memory
        return kind, text
    finally:
        if not reusable:
            stop()


def _exchange_alone(line: bytes) -> tuple[str, str]:
    """The answer of a process for this question alone, so that short ones need not wait for it."""
    worker, start = _start()
    try:
        return _answer(worker, start + line)
    finally:
        _end(worker)


def _seconds() -> float:
    return getattr(_used, "seconds", 0.0)


def _answer(worker: subprocess.Popen[bytes], question: bytes) -> tuple[str, str]:
    seconds = SECONDS  # of one that gives no answer
    try:
        kind, text, seconds = json.loads(_ask(worker, question, time.monotonic() + WAIT))
        return str(kind), str(text)
    except TimeoutError:
        return "limit", f"it takes longer than {WAIT:g} s"
    except EOFError:
        return _end_of(worker)
    except ValueError:
        return "broken", "the process that renders it gives no answer in JSON"
    finally:
        _used.seconds = _seconds() + seconds


def _ask(worker: subprocess.Popen[bytes], question: bytes, deadline: float) -> bytes:
    """The line that answers `question`; TimeoutError after the deadline, EOFError if the process ends before."""
    assert worker.stdin is not None and worker.stdout is not None
    left, parts = memoryview(question), [b""]
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        selector.register(worker.stdin, selectors.EVENT_WRITE)
        while not parts[-1].endswith(b"\n"):
            ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
            if not ready:
                raise TimeoutError
            if worker.stdin in ready:
                # a process that cannot start closes its input, and its answer says why
                with contextlib.suppress(BlockingIOError):
                    left = left[_written(worker.stdin.fileno(), left) :]
                if not left:
                    selector.unregister(worker.stdin)
            if worker.stdout in ready:
                parts.append(os.read(worker.stdout.fileno(), 1 << 20))
                if not parts[-1]:
                    raise EOFError
    return b"".join(parts)


def _written(fd: int, data: memoryview) -> int:
    """Bytes that a pipe took; all of them if it has no reader any more."""
    try:
        return os.write(fd, data)
    except BrokenPipeError:
        return len(data)


def _end_of(worker: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Kind and text for a process that closed its pipes without an answer."""
    try:
        status = worker.wait(1.0)  # its pipes close before it ends
    except subprocess.TimeoutExpired:
        return "broken", "the process that renders it closed its output"
    if status == -signal.SIGPROF:
        return "limit", f"it takes longer than {SECONDS:g} s"
    if status == OUT_OF_MEMORY:
        return "limit", "it takes too much memory"
    if status < 0:
        return "broken", f"the process that renders it was ended by signal {-status} ({signal.strsignal(-status)})"
    return "broken", f"the process that renders it ended with status {status}"


def _started() -> tuple[subprocess.Popen[bytes], bytes]:
    """The process, a new one where there is none that runs, and its input before the first question."""
    global _worker
    if _worker is not None and _worker.poll() is None:
        return _worker, b""
    stop()
    _worker, start = _start()
    return _worker, start


def _start() -> tuple[subprocess.Popen[bytes], bytes]:
    program = os.path.abspath(Path(__file__).with_name("template_worker.py"))
    try:
        worker = subprocess.Popen(
            [os.path.abspath(sys.executable), "-I", "-X", "utf8", program],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        raise Failed(f"the process that renders it cannot be started ({error.strerror or error})") from None
    assert worker.stdin is not None
    os.set_blocking(worker.stdin.fileno(), False)
    return worker, json.dumps([os.path.abspath(path) for path in sys.path]).encode() + b"\n"


@atexit.register
def stop() -> None:
    """Ends the process, if there is one."""
    global _worker
    worker, _worker = _worker, None
    if worker is not None:
        _end(worker)


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
