"""Replicas of the server on Ray Serve: both answer, streams flow, clients that leave are noticed, one comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from serving import until
from sparse_models import tiny_llama

from powerinfer.errors import RequestError
from powerinfer.serve.server import read_replicas

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install '.[ray]'")
COMMAND = [sys.executable, "-m", "powerinfer", "serve"]
START = 180.0  # seconds that Ray may take to start on busy cores


@contextmanager
def cluster(*flags: str) -> Iterator[tuple[subprocess.Popen[str], list[Any]]]:
    """The command in a session of its own, whose processes are ended with it, and its log, which grows."""
    process = subprocess.Popen(
        [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    log: list[Any] = []

    def read() -> None:
        for line in process.stdout or ():
            log.append(json.loads(line) if line.startswith("{") else line)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, log
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            reader.join(30)
            if process.stdout is not None:
                process.stdout.close()


def events(log: list[Any], name: str) -> list[Any]:
    return [line for line in log if isinstance(line, dict) and line["event"] == name]


def address_of(process: subprocess.Popen[str]) -> str:
    """Where the cluster is that this command has started."""
    words = (word for one in psutil.Process(process.pid).children(recursive=True) for word in one.cmdline())
    return next(word for word in words if word.startswith("--gcs-address=")).partition("=")[2]


@needs_ray
@pytest.mark.slow
def test_two_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They answer, notice clients that leave, come back, and stay when somebody else would serve on their cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # each command would have a token of its own
    path = tiny_llama(tmp_path / "tiny.gguf")
    with cluster("-m", str(path), "--ray", "2", "--port", "0", "--threads", "1") as (process, log):
        until(lambda: process.poll() is not None or events(log, "listening"), START)
        assert process.poll() is None, log
        url = events(log, "listening")[0]["url"]
        with httpx2.Client(base_url=url, timeout=60) as http:
            pids: set[int] = set()

            def ask() -> int | None:
                """The process of a replica; None if it has ended and Ray does not know that yet."""
                try:
                    answer = http.get("/v1/engine")
                except httpx2.TransportError:
                    return None
                return int(answer.json()["process"]) if answer.status_code == 200 else None

            def several(count: int) -> bool:
                pids.update(pid for pid in (ask(),) if pid is not None)
                return len(pids) >= count

            until(lambda: several(2))
            assert process.pid not in pids

            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
                assert [model.id for model in api.models.list()] == ["tiny"]
                chunks = list(api.completions.create(model="tiny", prompt="abc", max_tokens=5, stream=True,
                                                     extra_body={"ignore_eos": True}))  # fmt: skip
                assert len(chunks) > 1 and chunks[-1].choices[0].finish_reason == "length"
            assert http.post("/v1/completions", json={"prompt": "abc", "model": "other"}).status_code == 404

            lasting = {"prompt": "abcabc", "max_tokens": 100, "ignore_eos": True, "n": 128, "stream": True}

            def left() -> None:
                with http.stream("POST", "/v1/completions", json=lasting) as stream:
                    assert next(stream.iter_lines()).startswith("data: {")

            def aborted() -> bool:
                """Of the replica that answers, one of two."""
                counted = re.search(r"^powerinfer_aborted_requests_total\S+ (\S+)$", http.get("/metrics").text, re.M)
                return counted is not None and float(counted[1]) > 0

            def cancelled() -> bool:
                """An answer may be complete before Ray knows that its client has left; then another one."""
                left()
                return any(aborted() or time.sleep(0.1) for _ in range(30))

            until(cancelled, START)

            with monkeypatch.context() as patch:
                patch.setenv("RAY_ADDRESS", address_of(process))
                with cluster("-m", str(path), "--ray", "1", "--port", "0", "--threads", "1") as (other, said):
                    assert other.wait(START) == 2, said
            assert "Ray Serve already runs on this cluster" in str(said[-1])
            assert ask() in pids

            dead = pids.copy().pop()
            os.kill(dead, signal.SIGKILL)
            until(lambda: several(3), START)  # another one has come
            until(lambda: ask() not in (None, dead))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert events(log, "draining")


@needs_ray
def test_a_model_that_cannot_be_loaded_on_ray(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    with cluster("-m", str(tmp_path / "broken.gguf"), "--ray", "1", "--port", "0", "--threads", "1") as (process, log):
        assert process.wait(60) == 2
    assert len(log) == 1 and log[0].startswith("powerinfer: ") and "broken.gguf" in log[0]


def test_numbers_of_replicas() -> None:
    assert [read_replicas(text) for text in ("1", "3", "1-4", "2-2")] == [(1, 1), (3, 3), (1, 4), (2, 2)]
    for text in ("0", "", "-1", "4-1", "1-", "a", "1-2-3", "99999"):
        with pytest.raises(RequestError):
            read_replicas(text)
