"""The outermost layer of the server: every request passes here before anything looks at it.

In this order: an id, the API key, the number of requests in progress, the size of the body and the time to send it.
Then the application runs until it has answered or the client has left, whichever is first, and one line is logged. A
client that leaves cancels the application, and with it what the engine computes for it: the body is complete by then,
so the next message of the connection can only be its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from powerinfer.serve.api_error import ApiError, headers_of, is_anthropic
from powerinfer.serve.keys import Keys
from powerinfer.serve.live import LIVE
from powerinfer.serve.logs import log, request_id
from powerinfer.serve.metrics import Metrics
from powerinfer.serve.overview import OVERVIEW
from powerinfer.serve.page import FILES as PAGE

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health", *PAGE)  # answered without a key
QUIET = (LIVE, OVERVIEW)  # asked twice a second: logged only if that is an error of the client
CLIENT_LEFT = 499  # in the log and the metrics: the client did not wait for its answer
SEND_SECONDS = 60.0  # that a client may take to read what was sent, before it counts as gone
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class GateLimits(NamedTuple):
    """max_headers, max_body: bytes; body_seconds: to send it; requests: in progress, those that wait included."""

    max_headers: int  # of the path and the headers
    max_body: int
    body_seconds: float
    requests: int
    log_prompts: bool


class _Left(Exception):
    """The client has left."""


class Gate:
    """An ASGI application around `app`. endpoints: the paths that metrics name; every other is "other"."""

    def __init__(
        self, app: App, keys: Keys, hosts: frozenset[str] | None, limits: GateLimits, metrics: Metrics,
        endpoints: frozenset[str],
    ) -> None:  # fmt: skip
        """hosts: the names that a request may call this server by; None: any."""
        self._app, self._keys, self._hosts, self._limits = app, keys, hosts, limits
        self._metrics, self._endpoints = metrics, endpoints
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # the server takes no WebSockets
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        path = scope["path"].rstrip("/") or "/"  # an address with a slash behind it is the same
        # the HTTP server sends no body to HEAD; what it says of it is that of GET
        scope = {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        name = sent_id if _ID.fullmatch(sent_id) else uuid.uuid4().hex
        request_id.set(name)
        facts: dict[str, Any] = {}
        scope["state"] = {**scope.get("state", {}), "request_id": name, "salt": b"", "facts": facts}
        answer = _AnswerSender(send, name, scope["path"])
        try:
            body = await self._admit(scope, headers, receive)
            if self._limits.log_prompts:
                facts["body"] = body.decode("utf-8", "replace")
            await self._run(scope, body, receive, answer)
        except ApiError as error:
            await answer.refuse(error)
        except _Left:
            answer.status = CLIENT_LEFT
            if "abort" in scope["state"]:
                scope["state"]["abort"]()
        except asyncio.CancelledError:  # by the server's end, which waits for nothing but the end of this
            await answer.refuse(ApiError(503, "the server is shutting down", code="aborted"))
        finally:
            self._report(scope, answer.status, time.perf_counter() - begin, facts)

    def _report(self, scope: Scope, status: int, seconds: float, facts: dict[str, Any]) -> None:
        path = scope["path"]
        self._metrics.request(path if path in self._endpoints else "other", status, seconds)
        if path in QUIET and status in (200, 503):
            return
        client = (scope.get("client") or ("", 0))[0]
        log(
            "info", "request", client=client, method=scope["method"], path=path[:256],
            status=status, seconds=round(seconds, 6), **facts,
        )  # fmt: skip

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The body of a request that may go on; ApiError for any other."""
        # the HTTP parser limits only what it has to wait for: headers that come in one piece may be larger
        lines = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["path"]) + len(scope["query_string"]) + lines > self._limits.max_headers:
            raise ApiError(431, f"the headers exceed {self._limits.max_headers} bytes", code="headers_too_large")
        self._check_host(headers.get(b"host", b""))
        if scope["path"] not in OPEN and self._keys:
            other = b"Bearer " + headers.get(b"x-api-key", b"") if is_anthropic(scope["path"]) else b""
            salt = self._keys.salt(headers.get(b"authorization", other))
            if salt is None:
                or_other = " or X-Api-Key: KEY" if is_anthropic(scope["path"]) else ""
                message = f"a valid API key is needed: Authorization: Bearer KEY{or_other}"
                raise ApiError(401, message, code="invalid_api_key")
            scope["state"]["salt"] = salt
        if self._running >= self._limits.requests and scope["path"] not in OPEN:
            raise ApiError(429, f"{self._running} requests are in progress: try again later", code="queue_full")
        self._running += 1
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._read(headers, receive)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._limits.body_seconds:g} s") from None
        finally:
            self._running -= 1

    def _check_host(self, header: bytes) -> None:
        """A web page may name this machine by a host name of its own (DNS rebinding) to read what it must not."""
        if self._hosts is None:
            return
        name = header.decode("latin-1").rsplit("]", 1)
        host = name[0].lstrip("[") if len(name) == 2 else name[0].rsplit(":", 1)[0]
        if host.lower() not in self._hosts:
            raise ApiError(403, "this server answers to its own address only: use that, or start it with an API key")

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._limits.max_body
        too_large = ApiError(413, f"the body exceeds {limit} bytes", code="request_too_large")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, answer: _AnswerSender) -> None:
        """The application, until it ends or the client leaves."""
        self._running += 1
        leases = scope["state"]["leases"] = contextlib.ExitStack()  # of models, until the request has ended
        app = asyncio.ensure_future(self._app(scope, _replay(body), answer.send))
        gone = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((app, gone), return_when=asyncio.FIRST_COMPLETED)
            if not app.done():
                raise _Left
            try:
                app.result()
            except _Left:
                raise
            except Exception as error:  # if an answer has begun, its connection is closed: no more can be said
                log("error", "internal error", error=error)
                await answer.refuse(ApiError(500, "internal error: the log has the cause"))
        finally:
            for task in (app, gone):
                task.cancel()
            await asyncio.gather(app, gone, return_exceptions=True)
            leases.close()
            self._running -= 1


async def _left(receive: Receive) -> None:
    """Wait until the connection has ended."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes) -> Receive:
    """A `receive` that gives the whole body, then nothing: the gate itself waits for the client's end."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("never")

    return receive


class _AnswerSender:
    """Sends an answer: with the request's id, and with a limit on the time that the client takes to read it."""

    def __init__(self, send: Send, request_id: str, path: str) -> None:
        self._send, self._id, self._path = send, request_id, path
        self.status = CLIENT_LEFT
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            names = (b"x-request-id", b"request-id") if is_anthropic(self._path) else (b"x-request-id",)
            message["headers"] = [*message.get("headers", ()), *((name, self._id.encode()) for name in names)]
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise _Left from None

    async def refuse(self, error: ApiError) -> None:
        """Send an error, unless an answer has begun or the client has left."""
        if not self.started:
            with contextlib.suppress(_Left):
                await self._send_error(error)

    async def _send_error(self, error: ApiError) -> None:
        body = json.dumps(error.document(self._path)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))} | headers_of(error.status_code)
        coded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status_code, "headers": coded})
        await self.send({"type": "http.response.body", "body": body})
