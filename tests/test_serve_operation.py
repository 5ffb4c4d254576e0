"""The server in operation: keys, limits, hostile clients, clients that leave, overload, its start and its end."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from serving import SlowExecutor, client, served_llm, serving, until
from sparse_models import tiny_llama
from toy_model import PATIENCE, StoppableExecutor, ToyExecutor, idle

from powerinfer.config import ServeConfig
from powerinfer.errors import EngineError, PowerInferError, RequestError
from powerinfer.runtime.engine import LLM
from powerinfer.serve import gate
from powerinfer.serve import server as server_module
from powerinfer.serve.keys import Keys, read_keys
from powerinfer.serve.metrics import Metrics
from powerinfer.serve.page import FILES as PAGE
from powerinfer.serve.served import ModelSource
from powerinfer.serve.server import MAX_HEADERS, Server, check, is_local, make_server

CHAT = [{"role": "user", "content": "hello"}]
LONG = {"prompt": "hello", "ignore_eos": True, "max_tokens": 400}
COMMAND = [sys.executable, "-m", "powerinfer.cli.main", "serve"]


WRONG: list[dict[str, Any]] = [{}, {"X-Api-Key": "first"}]  # headers without a key
WRONG += [{"Authorization": value} for value in ("Bearer fir", "Basic first", "first", b"Bearer \xff")]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return served_llm(max_queue=32)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    with serving(llm, max_body=1 << 20, receive_timeout=1.0) as server:
        yield server


def well(server: Server) -> None:
    """The next request is answered."""
    with client(server) as http:
        answer = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# ---------------------------------------------------------------- keys


def test_every_route_but_health_and_the_page_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the house\nfirst\n\nsecond\n")
    monkeypatch.setenv("POWERINFER_API_KEY", "third")
    assert read_keys(str(file)) == ["first", "second", "third"]
    with serving(served_llm(), api_key_file=str(file)) as server:
        with client(server) as http:
            assert http.get("/health").status_code == 200
            paths = [route.path for route in server.config.app._app.routes]  # type: ignore[union-attr]
            assert {"/metrics", "/openapi.json", "/v1/engine", "/tokenize"} <= set(paths)
            for path in [*paths, "/nowhere", "/%2Fhealth", "/HEALTH"]:  # httpx makes "/" of "//health"
                if path in ("/health", *PAGE):
                    continue
                for header in WRONG:
                    for method in ("GET", "POST"):
                        anthropic = path.startswith("/v1/messages")  # where X-Api-Key may hold the key
                        sent = {"X-Api-Key": "fir"} if anthropic and "X-Api-Key" in header else header
                        answer = http.request(method, path, headers=sent)
                        if anthropic:
                            assert answer.status_code == 401 and answer.json().keys() == {"type", "error"}
                            assert answer.json()["error"]["type"] == "authentication_error"
                        elif path.startswith("/api/"):
                            assert answer.status_code == 401 and "API key" in answer.json()["error"]
                        else:
                            assert error_of(answer, 401)["type"] == "authentication_error"
                        assert answer.headers["www-authenticate"] == "Bearer"
            for key in ("first", "second", "third"):
                assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="second", max_retries=0) as api:
            assert api.completions.create(model="toy", prompt="x", max_tokens=1).choices
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_keys_do_not_share_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERINFER_API_KEY", "one two")
    with serving(served_llm()) as server, client(server) as http:

        def cached(key: str) -> int:
            body = {"prompt": "a prompt that fills more than a page of the cache, which has 32 tokens", "max_tokens": 1}
            answer = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached("one"), cached("one"), cached("two"), cached("two"), cached("one")] == [0, 64, 0, 64, 64]


def test_keys_that_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POWERINFER_API_KEY", raising=False)
    assert not Keys(read_keys(None))
    for content, says in ((b"# none\n", "holds no API key"), (b"\xff\n", "not UTF-8"), ("ключ\n".encode(), "ASCII")):
        file = tmp_path / "keys"
        file.write_bytes(content)
        with pytest.raises(RequestError, match=says):
            read_keys(str(file))
    with pytest.raises(RequestError, match="cannot read"):
        read_keys(str(tmp_path / "missing"))


def test_who_may_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POWERINFER_API_KEY", raising=False)
    for host, local in (
        ("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
        ("192.168.1.2", False), ("", False), ("example.org", False), ("localhost.example.org", False),
    ):  # fmt: skip
        assert is_local(host) == local
    load = pytest.fail  # nothing is loaded
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(RequestError, match="--insecure"):
            make_server([ModelSource(("x",), load)], ServeConfig(host=host, port=0), 1)  # type: ignore[arg-type]
    for options in ({"insecure": True}, {}):
        if not options:
            monkeypatch.setenv("POWERINFER_API_KEY", "key")
        made = make_server([ModelSource(("x",), load)], ServeConfig(host="0.0.0.0", port=0, **options), 1)  # type: ignore[arg-type]
        made._listening.close()


def test_a_name_of_its_own_does_not_lead_a_page_here(server: Server) -> None:
    """DNS rebinding: without a key, only the machine's own names are answered."""
    with client(server) as http:
        for host in ("attacker.example", "attacker.example:8080", "localhost.attacker.example", "[::2]:80"):
            error_of(http.get("/v1/models", headers={"Host": host}), 403)
        for host in ("localhost", "localhost:1", "127.0.0.1:99", "[::1]:80", "LOCALHOST"):
            assert http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_pages_of_other_origins(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    question = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "content-type,authorization"}  # fmt: skip
    with client(server) as http:
        assert "access-control-allow-origin" not in http.options("/v1/completions", headers=question).headers
        assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "https://a.example"}).headers
    monkeypatch.setenv("POWERINFER_API_KEY", "key")
    with serving(served_llm(), cors=["https://a.example"]) as other, client(other) as http:
        answer = http.options("/v1/completions", headers=question)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-credentials" not in answer.headers
        foreign = http.options("/v1/completions", headers={**question, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in foreign.headers
        refused = http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"


# ---------------------------------------------------------------- hostile input


def schema(document: Any) -> bytes:
    wanted = {"type": "json_schema", "json_schema": {"schema": document}}
    return json.dumps({"prompt": "x", "response_format": wanted}).encode()


HOSTILE = {
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"prompt": "x", "metadata": ' + b'{"a":' * 1000 + b"1" + b"}" * 1001,
    "deep enough": b'{"prompt": "x", "metadata": ' + b'{"a":' * 64 + b"1" + b"}" * 65,
    "unclosed": b'{"prompt": "x"',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "a huge float": b'{"prompt": "x", "temperature": 1e999}',
    "a huge integer": b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    "2^63": b'{"prompt": "x", "seed": 9223372036854775808}',
    "negative max_tokens": b'{"prompt": "x", "max_tokens": -2}',
    "2^31 max_tokens": b'{"prompt": "x", "max_tokens": 2147483648}',
    "negative n": b'{"prompt": "x", "n": -5}',
    "n beyond bounds": b'{"prompt": "x", "n": 1000000000}',
    "prompts times n": json.dumps({"prompt": ["x"] * 100, "n": 100}).encode(),
    "too many prompts": json.dumps({"prompt": ["x"] * 1025}).encode(),
    "a negative token": b'{"prompt": [-1]}',
    "a huge token": b'{"prompt": [4294967296]}',
    "a fraction of a token": b'{"prompt": [1.5]}',
    "true as a token": b'{"prompt": [true]}',
    "top_k": b'{"prompt": "x", "top_k": -2}',
    "many wrong tokens": b'{"prompt": [' + b'"a",' * 100_000 + b"1]}",
    "many stops": json.dumps({"prompt": "x", "stop": ["s"] * 33}).encode(),
    "a long stop": json.dumps({"prompt": "x", "stop": "s" * 1025}).encode(),
    "many biases": json.dumps({"prompt": "x", "logit_bias": {str(n): 1 for n in range(5000)}}).encode(),
    "a long bias": json.dumps({"prompt": "x", "logit_bias": {"1" * 5000: 1}}).encode(),
    "a bias of -1": b'{"prompt": "x", "logit_bias": {"-1": 1}}',
    "a large bias": b'{"prompt": "x", "logit_bias": {"1": 1e30}}',
    "a long prompt": json.dumps({"prompt": "\n" * 400_000}).encode(),
    "n_discard": b'{"prompt": "x", "n_discard": -1}',
    "a schema": json.dumps({"prompt": "x", "response_format": {"type": "json_schema", "pattern": "(a+)+$"}}).encode(),
    "a schema of itself": schema({"$ref": "#"}),
    "a deep schema": schema(json.loads('{"items":' * 60 + "{}" + "}" * 60) | {"$ref": "x" * 100_000}),
    "a regular expression": schema({"type": "string", "pattern": "(" * 2000}),
    "a huge grammar": json.dumps({"prompt": "x", "grammar": "a" * 200_000}).encode(),
    "a template": b'{"prompt": "x", "chat_template": "{{ 1 }}"}',
    "embeddings": b'{"prompt": "x", "prompt_embeds": "gASVAAAAAAAAAA=="}',
    "many fields": json.dumps({"prompt": "x", **{f"f{n}": 1 for n in range(20_000)}}).encode(),
    "a long field": json.dumps({"prompt": "x", "f" * 500_000: 1}).encode(),
    "null": b"null",
    "text": b'"x"',
    "nothing": b"",
    "a null byte": b"\x00",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused(server: Server, llm: LLM, name: str) -> None:
    with client(server) as http:
        answer = http.post("/v1/completions", content=HOSTILE[name], headers={"content-type": "application/json"})
        assert len(error_of(answer, 400)["message"]) < 1000
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert idle(llm)


def test_hostile_conversations_are_refused(server: Server) -> None:
    with client(server) as http:
        for body in (
            {"messages": [[]]},
            {"messages": "hello"},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            {"messages": [{"role": "user", "content": [{}]}]},
            {"messages": [{"role": "x" * 100_000, "content": ""}]},
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            {"messages": CHAT * 5000},
            {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}},
            {"messages": CHAT, "chat_template_kwargs": {"self": 1}},
            {"messages": CHAT, "chat_template_kwargs": {"mood": {"a": [1e308] * 9}}, "chat_template": "x"},
        ):
            error_of(http.post("/v1/chat/completions", json=body), 400)
            error_of(http.post("/apply-template", json=body), 400)
        for path, body in (
            ("/tokenize", {"content": 5}),
            ("/tokenize", {"content": "a", "prompt": "b"}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [258]}),
            ("/detokenize", {"tokens": "abc"}),
        ):
            error_of(http.post(path, json=body), 400)


def test_text_that_is_odd_is_answered(server: Server) -> None:
    """Half a surrogate pair in the JSON, control characters, and characters of every length."""
    with client(server) as http:
        for text in (b'"\\ud800"', b'"\\u0000\\u001b[31m"', '"é€😀\u2028"'.encode(), b'"data: [DONE]\\n\\n"'):
            body = b'{"max_tokens": 4, "echo": true, "stream": true, "logprobs": 2, "prompt": ' + text + b"}"
            answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            if b"ud800" in text:  # not a character: refused as JSON, or taken as U+FFFD
                assert answer.status_code in (200, 400)
            else:
                assert answer.status_code == 200, answer.text
                chunks = [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]
                assert "".join(c["choices"][0]["text"] for c in chunks).startswith(json.loads(text))


def test_a_body_beyond_the_limit(server: Server) -> None:
    with client(server) as http:
        answer = http.post("/v1/completions", json={"prompt": "x" * (1 << 20)})
        assert error_of(answer, 413)["code"] == "request_too_large"
        answer = http.post("/v1/completions", content=(b"x" * 65536 for _ in range(40)))  # of unknown length
        error_of(answer, 413)
    well(server)


# ---------------------------------------------------------------- clients that behave badly


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        yield raw


def received(raw: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    parts = []
    try:
        while part := raw.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, b"400"),
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        # by the parser, which waits for the rest, or, where all of it comes in one piece, by the gate
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2 * MAX_HEADERS + b"\r\n\r\n", b"400 431"),
        (REQUEST + b"Content-Length: -5\r\n\r\n", b"400"),
        (REQUEST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
        (REQUEST + b"Content-Length: 99999999999999999999999999\r\n\r\n", b"400"),
        (REQUEST + b"Content-Length: 9999999999\r\n\r\n", b"413"),
        (REQUEST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", b"200"),
    ],
    ids=["TLS", "nonsense", "no host", "not ASCII", "header", "negative", "two lengths", "huge", "large", "chunk",
         "upgrade"],
)  # fmt: skip
def test_http_that_is_none(server: Server, sent: bytes, status: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        answer = received(raw)
    assert not answer or answer.split(b" ")[1] in status.split(), answer[:200]
    well(server)


def test_headers_in_one_piece_are_limited_too() -> None:
    """The parser looks at the size of what is incomplete alone."""

    async def nothing(*_: object) -> None:
        raise AssertionError("a refused request goes no further")

    async def answered(value: bytes) -> int:
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        limits = gate.GateLimits(100, 1, 1, 1, False)
        door = gate.Gate(nothing, Keys(()), None, limits, Metrics(lambda: None), frozenset())
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [(b"x", value)]}
        await door(scope, nothing, send)
        return int(sent[0]["status"])

    assert asyncio.run(answered(b"a" * 99)) == 431


def test_slow_clients_are_let_go(server: Server, llm: LLM) -> None:
    """Nothing, half a header, half a body, a header byte by byte: the time to send a request is 1 s here."""

    def let_go(sent: bytes) -> bytes:
        with connected(server) as raw, suppress(OSError):  # it may be closed before all is sent
            raw.sendall(sent)
            return received(raw)
        return b""

    with connected(server) as silent, connected(server) as drip:
        with suppress(OSError):  # sent without end, were it not closed
            for number in range(1200):
                drip.sendall(REQUEST[number : number + 1] or b"a")
                time.sleep(0.05)
            pytest.fail("a header that does not end is read for ever")
        assert received(silent) == let_go(REQUEST) == b""
        assert b"200" not in received(drip)
    # of a body its header has to arrive within the second: on a busy machine it may not
    assert any(b" 408 " in let_go(REQUEST + b'Content-Length: 100\r\n\r\n{"prompt": ') for _ in range(20))
    until(lambda: idle(llm))
    well(server)


def test_half_closed_and_early_leaving_clients(server: Server, llm: LLM) -> None:
    body = json.dumps(LONG | {"stream": True}).encode()
    whole = REQUEST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for sent in (whole, whole[:-10], REQUEST):
        with connected(server) as raw:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            received(raw)
        with connected(server) as raw:  # reset
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            raw.sendall(sent)
    until(lambda: idle(llm))
    well(server)


def test_a_body_in_thousands_of_chunks_comes_in_slices(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = server_module.H11Protocol.data_received

    def data_received(self: Any, data: bytes) -> None:
        sizes.append(len(data))
        whole(self, data)

    monkeypatch.setattr(server_module.H11Protocol, "data_received", data_received)
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "user": "x" * 3000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with connected(server) as raw:
        raw.sendall(REQUEST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
        assert b"200 OK" in received(raw)
    assert max(sizes) <= server_module.SLICE and sum(sizes) > 2 * server_module.SLICE
    well(server)


def test_idle_connections_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_connections", lambda: 5)
    monkeypatch.setattr(server_module, "_logged_at", {})
    caplog.set_level(logging.WARNING, "powerinfer.serve")
    with serving(served_llm()) as other, ExitStack() as opened:
        held = [opened.enter_context(connected(other)) for _ in range(5)]
        until(lambda: len(other.server_state.connections) == 5)
        for _ in range(20):
            with connected(other) as raw:
                assert received(raw) == b"", "one too many is closed at once"
        held[0].close()
        until(lambda: len(other.server_state.connections) < 5)
        well(other)
    assert [record.getMessage() for record in caplog.records] == ["too many connections: new ones are closed"]


def test_files_that_run_out_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(server_module, "_logged_at", {})
    caplog.set_level(logging.WARNING, "powerinfer.serve")
    loop = asyncio.new_event_loop()
    try:
        for _ in range(500):  # as asyncio does, for each connection that waits
            server_module._on_loop_error(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
        assert [record.facts["reason"] for record in caplog.records] == ["Too many open files"]  # type: ignore
        server_module._on_loop_error(loop, {"message": "another thing"})
        assert caplog.records[-1].getMessage() == "another thing"
    finally:
        loop.close()
    assert server_module._connections() >= 8


def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SEND_SECONDS", 0.3)
    llm = served_llm(ToyExecutor(n_pages=300), context=4096, max_queue=32)
    with serving(llm) as server, connected(server) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(
            {"prompt": "x", "ignore_eos": True, "max_tokens": 1500, "n": 16, "logprobs": 20, "stream": True}
        )
        raw.sendall(REQUEST + f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: server.server_state.tasks)
        until(lambda: not server.server_state.tasks and not server.server_state.connections, 60)
        until(lambda: idle(llm))
        well(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(stream: bool) -> None:
    executor = ToyExecutor()
    llm = served_llm(executor, max_batch=1, max_queue=8)
    with serving(llm) as server, client(server) as http:
        executor.held = True
        body = json.dumps(LONG | {"stream": stream}).encode()
        with connected(server) as running, connected(server) as waiting:
            for raw in (running, waiting):
                raw.sendall(REQUEST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                until(lambda: llm.stats().running == 1)
            until(lambda: len(server.server_state.tasks) == 2)
        until(lambda: not server.server_state.tasks)  # the server has noticed both
        executor.release()
        until(lambda: idle(llm))
        stats = llm.stats()
        assert stats.answer_tokens < 400
        assert 'powerinfer_requests_total{endpoint="/v1/completions",status="499"} 2.0' in http.get("/metrics").text


def test_a_step_of_a_client_that_leaves_is_stopped() -> None:
    executor = StoppableExecutor()
    executor.held = True
    llm = served_llm(executor)
    with serving(llm) as server:
        body = json.dumps(LONG).encode()
        with connected(server) as running:
            running.sendall(REQUEST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            executor.wait_for(0)
        until(lambda: idle(llm))
        assert executor.stopped == 1 and llm.stats().aborted == 1
        executor.release()


def test_many_clients_that_leave(llm: LLM, server: Server) -> None:
    body = json.dumps(LONG | {"stream": True, "n": 3}).encode()

    def leave(n: int) -> None:
        with connected(server) as raw:
            raw.sendall(REQUEST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(0.01 * (n % 5))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(40)))
    until(lambda: idle(llm))
    well(server)


# ---------------------------------------------------------------- overload, failure


def test_a_full_queue_refuses_at_once() -> None:
    executor = ToyExecutor()
    llm = served_llm(executor, max_batch=1, max_queue=2)
    with serving(llm) as server, ThreadPoolExecutor(12) as pool:
        executor.held = True

        def ask(n: int) -> httpx2.Response:
            with client(server) as http:
                body = LONG | {"max_tokens": 3 if n else 400, "stream": n % 2 == 0}
                return http.post("/v1/completions", json=body)

        first = pool.submit(ask, 0)
        executor.wait_for(0)
        others = [pool.submit(ask, n) for n in range(1, 12)]
        until(lambda: len(server.server_state.tasks) == 12)

        def refused() -> bool:  # the queue is looked at between two steps
            executor.let()
            return sum(one.done() for one in others) >= 9

        until(refused)
        executor.release()
        answers = [one.result(PATIENCE) for one in others]
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 9
        for answer in answers:
            if answer.status_code == 429:
                assert error_of(answer, 429)["type"] == "rate_limit_error"
                assert int(answer.headers["retry-after"]) >= 1
        assert first.result(PATIENCE).status_code == 200
        until(lambda: idle(llm))
        assert llm.stats().rejected == 9


def test_requests_in_progress_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from powerinfer.serve import server as server_module

    monkeypatch.setattr(server_module, "IN_PROGRESS", 0)
    llm = served_llm(max_batch=1, max_queue=1)
    with serving(llm, receive_timeout=20.0) as server, client(server) as http:
        with connected(server) as one, connected(server) as two:
            for raw in (one, two):
                raw.sendall(REQUEST + b"Content-Length: 100\r\n\r\n")
            until(lambda: len(server.server_state.tasks) == 2)
            assert error_of(http.post("/v1/completions", json={"prompt": "x"}), 429)["code"] == "queue_full"
            assert http.get("/health").status_code == 200
        until(lambda: not server.server_state.tasks)
        well(server)


def test_a_request_that_waits_too_long() -> None:
    executor = ToyExecutor()
    executor.held = True
    llm = served_llm(executor, max_batch=1, max_queue=2)
    with serving(llm, queue_timeout=0.3) as server, ThreadPoolExecutor(2) as pool:

        def ask() -> httpx2.Response:
            with client(server) as http:
                return http.post("/v1/completions", json=LONG)

        first = pool.submit(ask)
        executor.wait_for(0)
        second = pool.submit(ask)
        until(lambda: not llm._runner._driver._commands.empty())  # it came while the first one's step is held
        time.sleep(0.3)  # its time is over
        executor.let()
        answer = second.result(PATIENCE)
        error_of(answer, 503)
        assert "0.3 s" in answer.text and int(answer.headers["retry-after"]) >= 1
        executor.release()
        assert first.result(PATIENCE).status_code == 200


def test_a_broken_engine_ends_the_server() -> None:
    executor = ToyExecutor()
    llm = served_llm(executor)
    with serving(llm) as server, client(server) as http:
        executor.fail_at[0] = ZeroDivisionError("a bug")
        assert error_of(http.post("/v1/completions", json=LONG), 503)["code"] == "failed"
        until(lambda: server.failures)  # type: ignore[attr-defined]
    (failure,) = server.failures  # type: ignore[attr-defined]
    assert isinstance(failure, EngineError) and "a bug" in str(failure)


def test_a_step_that_fails_fails_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    executor = ToyExecutor()
    llm = served_llm(executor)
    with serving(llm) as server, client(server) as http:
        executor.fail_at[0] = PowerInferError("the device was busy")
        assert "the device was busy" in error_of(http.post("/v1/completions", json=LONG), 500)["message"]
        well(server)


# ---------------------------------------------------------------- logs


def test_the_log_has_ids_and_no_prompts(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "powerinfer.serve")
    with client(server) as http:
        body = {"prompt": "a secret prompt", "max_tokens": 3, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
        for bad in ("a b", "x" * 129, "{}", "é"):
            answer = http.get("/health?secret", headers={"X-Request-Id": bad.encode()})
            assert answer.headers["x-request-id"] != bad and len(answer.headers["x-request-id"]) == 32
    until(lambda: len(caplog.records) == 5)
    facts: dict[str, Any] = caplog.records[0].facts  # type: ignore[attr-defined]
    assert facts.pop("seconds") > 0
    assert facts == {
        "request_id": "mine-1", "client": "127.0.0.1", "method": "POST", "path": "/v1/completions", "status": 200,
        "prompt_tokens": 15, "completion_tokens": 3,
    }  # fmt: skip
    assert "secret" not in "".join(str(record.__dict__) for record in caplog.records)
    with serving(served_llm(), log_prompts=True) as other:
        with client(other) as http:
            http.post("/v1/completions", json=body)
        until(lambda: any("a secret prompt" in str(getattr(record, "facts", {})) for record in caplog.records))


# ---------------------------------------------------------------- start and end


def test_it_listens_while_the_model_loads() -> None:
    go = threading.Event()

    def load(progress: Any, budget: Any) -> LLM:
        progress("loading weights", 1, 4)
        assert go.wait(30)
        return served_llm()

    server = make_server([ModelSource(("toy",), load)], ServeConfig(port=0), 8)
    thread = threading.Thread(target=server.live)
    thread.start()
    try:
        with client(server) as http:
            until(lambda: server.service.models[0].progress)
            answer = http.get("/health")
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            loading = {"label": "loading weights", "done": 1, "total": 4}
            assert answer.json() == {"status": "loading", "loading": loading}
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/engine")):
                answer = http.request(method, path, json={"prompt": "x"} if method == "POST" else None)
                assert "25 %" in error_of(answer, 503)["message"] and int(answer.headers["retry-after"]) >= 1
            assert http.get("/metrics").status_code == 200
            go.set()
            until(lambda: http.get("/health").status_code == 200)
            well(server)
    finally:
        go.set()
        server.should_exit = True
        thread.join(30)


def test_loading_that_is_in_vain() -> None:
    """An end while it loads does not wait for the load; a load that fails ends the server, with the reason."""
    begun = threading.Event()

    def load(progress: Any, budget: Any) -> LLM:
        while True:
            progress("loading weights", 1, 4)
            begun.set()
            time.sleep(0.01)

    server = make_server([ModelSource(("toy",), load)], ServeConfig(port=0), 8)
    thread = threading.Thread(target=server.live)
    thread.start()
    assert begun.wait(30)
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive() and not any(one.name == "loading" for one in threading.enumerate())

    def fail(progress: Any, budget: Any) -> LLM:
        raise RequestError("no such model")

    with pytest.raises(RequestError, match="no such model"):
        make_server([ModelSource(("toy",), fail)], ServeConfig(port=0), 8).live()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": 70000}, "port must be"),
        ({"reasoning_budget": -2}, "reasoning_budget must be"),
        ({"reasoning_format": "xml"}, "reasoning_format auto or none"),
        ({"timeout": -1.0}, "timeout must be"),
        ({"drain": float("nan")}, "drain must be"),
        ({"max_body": 0}, "max_body"),
        ({"tls_cert": "x"}, "both --tls-cert and --tls-key"),
        ({"cors": ["example.org"]}, "origin"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        check(ServeConfig(**options))


def test_a_port_that_is_taken(server: Server) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(PowerInferError, match=f"cannot listen on 127.0.0.1, port {port}: .*in use"):
        make_server([ModelSource(("x",), pytest.fail)], ServeConfig(port=port), 1)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no address"):
        make_server([ModelSource(("x",), pytest.fail)], ServeConfig(host="no.such.host.invalid", insecure=True), 1)  # type: ignore[arg-type]


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(cafile=str(certificate))
    with serving(served_llm(), tls_cert=str(certificate), tls_key=str(key)) as server:
        assert server.url.startswith("https://")
        with client(server, verify=context) as http:
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    with pytest.raises(RequestError, match="certificate"):
        make_server([ModelSource(("x",), pytest.fail)], ServeConfig(port=0, tls_cert=str(key), tls_key=str(key)), 1)  # type: ignore[arg-type]


def test_the_end_of_draining() -> None:
    """What still runs after the time to drain is told so, and is not computed any further."""
    executor = SlowExecutor(0.05)
    llm = served_llm(executor)
    with serving(llm, drain=0.2) as server, client(server) as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/completions", json=LONG)
        until(lambda: llm.stats().running == 1)
        said: list[str] = []
        server.say = said.append
        server.should_exit = True
        assert error_of(answer.result(PATIENCE), 503)["code"] == "aborted"
        assert said == ["waiting up to 1 s for 1 request; Ctrl-C again ends now"]
    assert executor.closed and len(executor.sizes) < 100


# ---------------------------------------------------------------- the command


@contextmanager
def command(model: Path, *flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, list[Any]]]:
    """The process, its URL once it answers, and its log, which grows."""
    process = subprocess.Popen(
        [*COMMAND, "-m", str(model), "--port", "0", "--threads", "1", *flags],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    log: list[Any] = []
    assert process.stderr is not None

    def read() -> None:
        for line in process.stderr or ():
            log.append(json.loads(line) if line.startswith("{") else line)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        until(lambda: process.poll() is not None or any("loaded" in one["event"] for one in log), 60)
        assert process.poll() is None, log
        yield process, next(one["url"] for one in log if one["event"] == "listening"), log
    finally:
        process.kill()
        process.wait(30)
        reader.join(30)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def plain_client() -> httpx2.Client:
    return httpx2.Client(verify=False, timeout=60)


LASTING = {"prompt": "abcabc", "max_tokens": 100, "ignore_eos": True, "n": 128, "stream": True}
"""Twelve thousand tokens: it runs while signals are sent."""


def test_the_command_drains_on_sigterm(tmp_path: Path) -> None:
    with (
        command(tiny_llama(tmp_path / "tiny.gguf")) as (process, url, log),
        httpx2.Client(verify=False, timeout=60) as http,
    ):
        assert [model["id"] for model in http.get(f"{url}/v1/models").json()["data"]] == ["tiny"]
        answer = http.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}
        )
        assert answer.status_code == 200, answer.text
        with http.stream("POST", f"{url}/v1/completions", json=LASTING) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: any(one["event"] == "draining" for one in log))
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"{url}/health", verify=False)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        finished = [line for line in rest if '"finish_reason":"length"' in line]
        assert len(finished) == 128
        assert process.wait(30) == 0
    events = ["listening", "loaded", "request", "request", "draining", "request"]
    assert [one["event"] for one in log] == events and log[4]["connections"] >= 1


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with (
        command(tiny_llama(tmp_path / "tiny.gguf")) as (process, url, log),
        httpx2.Client(verify=False, timeout=60) as http,
    ):
        with http.stream("POST", f"{url}/v1/completions", json=LASTING) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            until(lambda: any(one["event"] == "draining" for one in log))
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.HTTPError):
                list(lines)
        assert process.wait(30) == 130
    request = next(one for one in log if one["event"] == "request")
    assert 0 < request["completion_tokens"] < 12_800
    assert [one["event"] for one in log] == ["listening", "loaded", "draining", "request"]


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 64)  # seen once it listens
    for flags, says, status in (
        (["--host", "0.0.0.0", "-m", str(tmp_path / "broken.gguf")], "--insecure", 2),
        (["-m", str(tmp_path / "broken.gguf"), "--port", "0"], "broken.gguf", 2),
    ):
        done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)
        assert done.returncode == status and done.stdout == "", done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("powerinfer: ") and says in last
