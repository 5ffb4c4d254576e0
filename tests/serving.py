"""A server in a thread, over the toy model, for the tests of `powerinfer serve`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import uvicorn.server
from toy_model import BOS, EOS, VOCAB, ToyDecoder, ToyExecutor, ToyTokenizer, toy_llm, until

from powerinfer.config import ServeConfig
from powerinfer.devices import Batch
from powerinfer.runtime.engine import LLM
from powerinfer.serve.served import ModelSource
from powerinfer.serve.server import Server, make_server
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.tokenizer import Vocabulary

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('never') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood or '' }}{% if fail %}{{ 1 // 0 }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ByteTokenizer(ToyTokenizer):
    special_tokens = ()
    special_ids = frozenset({BOS, EOS})
    strips_space = False
    vocabulary = Vocabulary(piece=lambda token: None, size=VOCAB, byte_level=True)

    def encode_masked(self, text: str, plain: Sequence[tuple[int, int]], *, add_bos: bool | None = None) -> list[int]:
        return self.encode(text, add_bos=add_bos)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def stream(self, skip_special: bool = True) -> ToyDecoder:
        return ToyDecoder()


class SlowExecutor(ToyExecutor):
    """Takes `delay` seconds a step."""

    def __init__(self, delay: float, **sizes: int) -> None:
        super().__init__(**sizes)
        self.delay = delay

    def forward(self, batch: Batch) -> np.ndarray:
        time.sleep(self.delay)
        return super().forward(batch)


def served_llm(executor: ToyExecutor | None = None, context: int = 512, **engine: Any) -> LLM:
    toy = toy_llm(executor, context, **engine)
    llm = LLM.from_parts(toy._runner._executor, ByteTokenizer(), toy.config, toy.engine)  # type: ignore[arg-type]
    llm.template = ChatTemplate(TEMPLATE)
    return llm


@contextmanager
def serving(llm: LLM, **config: Any) -> Iterator[Server]:
    """A server that answers, at `server.url`."""
    options = ServeConfig(**{"port": 0, "drain": 2.0, **config})
    requests = llm.engine.max_batch + llm.engine.max_queue
    server = make_server([ModelSource(("toy",), lambda progress, budget: llm)], options, requests)
    with running(server):
        until(lambda: server.service.status != "loading")
        yield server


@contextmanager
def running(server: Server) -> Iterator[None]:
    """A server in a thread, until it listens."""
    failures = server.failures = []  # type: ignore[attr-defined]

    def live() -> None:
        try:
            server.live()
        except BaseException as error:
            failures.append(error)

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 10)

    thread = threading.Thread(target=live)
    with pytest.MonkeyPatch.context() as patch:  # uvicorn looks ten times a second whether it is to end
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
        thread.start()
        try:
            until(lambda: server.started)
            yield
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def client(server: Server, **options: Any) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, timeout=60, **{"verify": False, **options})  # certificates take long


def post(server: Server, path: str, body: Any, **options: Any) -> tuple[int, Any]:
    """(status, document) of an answer."""
    with client(server) as http:
        answer = http.post(path, json=body, **options)
    return answer.status_code, answer.json()
