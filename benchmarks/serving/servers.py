"""Start this engine's server or llama.cpp's, and ask it for streams: what the scripts of this folder share.

The client is asyncio alone, so that it takes as little as possible of the cores that the server computes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

START_SECONDS = 300


@dataclass
class Server:
    """A running server. port: of 127.0.0.1; pid: of its process."""

    label: str
    port: int
    pid: int

    def get(self, path: str) -> Any:
        """The JSON document at a path."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    @property
    def resident_mib(self) -> float:
        """Memory of the process that is resident now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass
class Answer:
    """status: of HTTP, 0: the connection broke; times: of each event of the stream, in seconds after the request."""

    status: int = 0
    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(label: str, command: list[str]) -> Iterator[Server]:
    """A server, ready to answer; `command` ends with the flag of the port."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, str(port)], stdout=log, stderr=log)
        server = Server(label, port, process.pid)
        try:
            _wait(server, process, log)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(server: Server, process: subprocess.Popen[bytes], log: Any) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            log.seek(0)
            sys.exit(f"{server.label} ended: {log.read()[-2000:].decode(errors='replace')}")
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"{server.label} was not ready within {START_SECONDS} s")


def ours(model: Path, threads: int, clients: int, context: int, *more: str) -> list[str]:
    """The command of this engine's server for as many requests at a time, each of `context` tokens."""
    flags = ["--threads", str(threads), "--max-batch", str(clients), "--context", str(context), "--gpu", "none"]
    return [sys.executable, "-m", "powerinfer", "serve", "-m", str(model), *flags, *more, "--port"]


def llama_server(folder: Path, model: Path, threads: int, clients: int, context: int) -> list[str]:
    """The same of llama.cpp's."""
    flags = ["-t", str(threads), "-np", str(clients), "-c", str(clients * context), "--no-webui", "--no-cache-prompt"]
    return [str(folder / "llama-server"), "-m", str(model), *flags, "--host", "127.0.0.1", "--port"]


def prompt(seed: int, tokens: int, vocab: int) -> list[int]:
    """Random token ids, but for the lowest, which are often special."""
    return [int(one) for one in np.random.default_rng(seed).integers(vocab // 10, vocab // 2, tokens)]


async def ask(port: int, body: dict[str, Any], path: str = "/v1/completions", leave: int | None = None) -> Answer:
    """Send a request and read its stream. leave: close the connection after that many events."""
    answer = Answer()
    start = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    except OSError:
        return answer
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        status = await reader.readline()
        answer.status = int(status.split()[1]) if status else 0
        while leave is None or len(answer.times) < leave:
            line = await reader.readline()
            if not line:
                break
            if line.startswith(b"data: {"):
                _take(answer, json.loads(line[6:]), time.perf_counter() - start)
    except (OSError, asyncio.IncompleteReadError):
        answer.status = 0
    finally:
        writer.close()
    return answer


def _take(answer: Answer, event: dict[str, Any], seconds: float) -> None:
    usage = event.get("usage")
    if usage:
        answer.tokens = usage["completion_tokens"]
    for choice in event.get("choices", ()):
        answer.texts.append(choice.get("text") or "")
        answer.times.append(seconds)
