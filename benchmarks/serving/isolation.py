"""How long a stream pauses while another client sends as much as the server takes: on every route, of every kind.

    python -m benchmarks.serving.isolation MODEL.gguf [--megabytes 7.9] [--threads 2]

One client reads a stream; beside it another one sends one large body after the other. Of each: its status, its seconds,
and the longest time between two tokens of the stream meanwhile. The first row is the stream alone: what else runs on
the machine makes pauses, too.

Writes one JSON; serving.table turns the newest into a table of docs/serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, results
from benchmarks.serving.servers import Server, ours, running

CONTEXT = 8192
ALONE_SECONDS = 3.0
SETTLE_SECONDS = 0.3  # of the stream alone, between two bodies

TEXTS: Mapping[str, Callable[[int], str]] = {
    "digits": lambda size: "1" * size,
    "one letter": lambda size: "a" * size,
    "one long word": lambda size: "supercalifragilistic" * (size // 20),
    "spaces": lambda size: " " * size,
    "words": lambda size: "hello world " * (size // 12),
    "turns' marks": lambda size: "<|im_start|>" * (size // 12),
}
"""By name: a text of so many characters."""

Body = dict[str, Any]


def _turn(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


ROUTES: Mapping[str, Callable[[str], Body]] = {
    "/v1/chat/completions": lambda text: {"messages": _turn(text), "max_tokens": 1},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 16},
    "/v1/messages": lambda text: {"messages": _turn(text), "max_tokens": 1},
    "/v1/messages/count_tokens": lambda text: {"messages": _turn(text)},
    "/v1/embeddings": lambda text: {"input": text},
    "/tokenize": lambda text: {"content": text},
    "/apply-template": lambda text: {"messages": _turn(text)},
    "/completion": lambda text: {"prompt": text, "n_predict": 1},
    "/api/chat": lambda text: {"messages": _turn(text), "options": {"num_predict": 1}},
    "/api/generate": lambda text: {"prompt": text, "options": {"num_predict": 1}},
    "/api/embed": lambda text: {"input": text, "truncate": False},
}
"""By path: a request with a text."""

SHAPES: Mapping[str, tuple[str, Callable[[int], bytes]]] = {
    "a list of numbers": ("/v1/completions", lambda size: b'{"prompt":[' + b"1," * (size // 2 - 16) + b"1]}"),
    "ids to decode": ("/detokenize", lambda size: b'{"tokens":[' + b"300," * (size // 4 - 16) + b"1]}"),
    "empty lists": ("/v1/completions", lambda size: b'{"prompt":[' + b"[]," * (size // 3 - 16) + b"[]]}"),
    "empty objects": ("/v1/messages", lambda size: b'{"messages":[' + b"{}," * (size // 3 - 16) + b"{}]}"),
    "many messages": (
        "/v1/chat/completions",
        lambda size: json.dumps({"messages": _turn("x" * (size // 4096 - 40)) * 4096}).encode(),
    ),
    "a schema": (
        "/v1/completions",
        lambda size: json.dumps({"prompt": "x", "json_schema": {"enum": ["x" * 64] * (size // 68)}}).encode(),
    ),
    "functions": (
        "/v1/chat/completions",
        lambda size: json.dumps({"messages": _turn("x"), "tools": _functions(size)}).encode(),
    ),
}
"""By name: a route, and a body of so many bytes in a shape of its own."""


def _functions(size: int) -> list[Body]:
    one = {"type": "object", "properties": {f"p{n}": {"type": "string", "format": "path"} for n in range(100)}}
    each = size // 128 - len(json.dumps(one)) - 100
    return [
        {"type": "function", "function": {"name": f"f{n}", "description": "x" * max(0, each), "parameters": one}}
        for n in range(128)
    ]


class Stream:
    """A client that reads streams without end; `longest` is of the tokens since `begin`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._times: list[float] = []
        self.task = asyncio.create_task(self._read())

    def begin(self) -> None:
        self._times = self._times[-1:]

    @property
    def longest(self) -> float:
        """Seconds, up to now."""
        return max(after - before for before, after in pairwise([*self._times, time.perf_counter()]))

    async def some(self) -> None:
        """Wait for tokens."""
        while len(self._times) < 3:
            await asyncio.sleep(0.01)

    async def _read(self) -> None:
        body = {"prompt": "The", "max_tokens": CONTEXT // 4, "temperature": 1, "stream": True, "ignore_eos": True}
        while True:
            reader, writer = await _sent(self._port, "/v1/completions", json.dumps(body).encode())
            try:
                while line := await reader.readline():
                    if line.startswith(b"data: {"):
                        self._times.append(time.perf_counter())
            finally:
                await _closed(writer)


async def _sent(port: int, path: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode())
    for at in range(0, len(data), 1 << 16):  # so that the reader of the stream has its turns
        writer.write(data[at : at + (1 << 16)])
        await writer.drain()
    return reader, writer


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):  # the server may have refused the rest
        await writer.wait_closed()


async def beside(stream: Stream, port: int, path: str, data: bytes) -> dict[str, Any]:
    """What a request leads to, and the stream's longest pause meanwhile."""
    await asyncio.sleep(SETTLE_SECONDS)
    await stream.some()
    stream.begin()
    begin = time.perf_counter()
    reader, writer = await _sent(port, path, data)
    status = int((await reader.readline()).split()[1])
    while await reader.read(1 << 20):
        pass
    seconds = time.perf_counter() - begin
    await asyncio.sleep(SETTLE_SECONDS)
    await _closed(writer)
    return {"route": path, "status": status, "seconds": seconds, "longest_s": stream.longest}


async def measure(server: Server, size: int) -> list[dict[str, Any]]:
    """Of each body its name, and what `beside` says; the first row is the stream alone."""
    stream = Stream(server.port)
    rows: list[dict[str, Any]] = []
    try:
        await stream.some()
        stream.begin()
        await asyncio.sleep(ALONE_SECONDS)
        rows.append({"name": "nothing", "route": "", "longest_s": stream.longest})
        print(rows[-1], file=sys.stderr)
        for name, text in TEXTS.items():
            for path, body in ROUTES.items():
                data = json.dumps(body(text(size))).encode()
                rows.append({"name": name} | await beside(stream, server.port, path, data))
                print(rows[-1], file=sys.stderr)
        for name, (path, raw) in SHAPES.items():
            rows.append({"name": name} | await beside(stream, server.port, path, raw(size)))
            print(rows[-1], file=sys.stderr)
        if stream.task.done():
            stream.task.result()
    finally:
        stream.task.cancel()
        await asyncio.gather(stream.task, return_exceptions=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--megabytes", type=float, default=7.9, help="of a body; serve takes up to 8 MiB")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/serving-isolation-DATE.json")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"kind": "serving-isolation", **machine.description()}
    document |= {"model": arguments.model.stem, "threads": arguments.threads, "megabytes": arguments.megabytes}
    command = ours(arguments.model, arguments.threads, 4, CONTEXT)
    with running("powerinfer", command) as server:
        document["rows"] = asyncio.run(measure(server, int(arguments.megabytes * 1e6)))
    results.write_json(arguments.out or results.path_of(document), document)


if __name__ == "__main__":
    main()
