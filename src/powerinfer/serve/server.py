"""The server's life: listen, load the model in a thread, answer, drain.

It listens before the model is loaded, so that /health says how far that is. SIGTERM or Ctrl-C ends it: no request is
accepted any more, running ones have `drain` seconds to finish, and a second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import math
import os
import re
import resource
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from powerinfer.config import ServeConfig
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.serve.api_error import error_document
from powerinfer.serve.app import build_app
from powerinfer.serve.gate import App, Gate, GateLimits
from powerinfer.serve.keys import ENVIRONMENT, Keys, read_keys
from powerinfer.serve.llama_server import add_llama_server
from powerinfer.serve.logs import log
from powerinfer.serve.ollama import add_ollama
from powerinfer.serve.served import ModelSource
from powerinfer.serve.service import STOP_SECONDS, Service, ServicePolicy
from powerinfer.serve.thinking import FORMATS, Defaults

MAX_HEADERS = 32 << 10  # bytes of a request's line and headers
BACKLOG = 512  # connections that wait to be accepted
KEEP_ALIVE = 30  # seconds that a connection may be idle between two requests
IN_PROGRESS = 64  # requests beyond those that run and wait: being read, checked, or finished
SLICE = 8192  # bytes that one connection gives the server in one go
MAX_FILES = 1 << 16  # open at a time, if this process may have so many
FILES = 128  # of these, for models, logs and libraries
MAX_KEEP_ALIVE = 1_000_000_000  # seconds
LOCAL_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))


def check(config: ServeConfig) -> None:
    """RequestError for an option that cannot be."""
    if not 0 <= config.port <= 65535:
        raise RequestError(f"port must be from 0 to 65535, not {config.port}")
    for name in ("timeout", "queue_timeout", "drain", "receive_timeout"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) >= 0):
            raise RequestError(f"{name} must be a number of seconds, not {getattr(config, name)}")
    if config.keep_alive is not None and not 0 <= config.keep_alive <= MAX_KEEP_ALIVE:
        raise RequestError(f"keep_alive must be from 0 to {MAX_KEEP_ALIVE} seconds or None, not {config.keep_alive}")
    if config.ray is not None:
        read_replicas(config.ray)
    if config.max_models < 0:
        raise RequestError(f"max_models must be at least 0, not {config.max_models}")
    if config.reasoning_budget < -1 or config.reasoning_format not in FORMATS:
        raise RequestError("reasoning_budget must be at least -1, and reasoning_format auto or none")
    if config.receive_timeout == 0 or config.max_body < 1:
        raise RequestError("receive_timeout and max_body must be above 0")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise RequestError("TLS needs both --tls-cert and --tls-key")
    for origin in config.cors:
        if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.endswith("/")):
            raise RequestError(f"--cors takes an origin, such as https://example.org, or *, not {origin}")


def read_replicas(text: str) -> tuple[int, int]:
    """(fewest, most) of "2" or "1-4". RequestError for anything else."""
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < fewest <= most:
        raise RequestError(
            f"--ray takes a number of replicas, such as 2, or the fewest and the most, 1-4, not {text!r}"
        )
    return fewest, most


def is_local(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(config: ServeConfig) -> socket.socket:
    """The socket. PowerInferError if the address is in use; RequestError for one that this machine does not have."""
    try:
        addresses = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listening = socket.socket(family, kind, protocol)  # not create_server: asyncio sets NODELAY only if it sees TCP
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
    except (socket.gaierror, UnicodeError):
        raise RequestError(f"{config.host} is no address to listen on") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE and (free := _free_port(family, address)) is not None:
            reason = f"it is in use, perhaps by this server, started before; --port {free} is free"
        elif error.errno == errno.EACCES and config.port < 1024:
            reason = "ports below 1024 are the administrator's: use a larger --port"
        else:
            reason = error.strerror or str(error)
        raise PowerInferError(f"cannot listen on {config.host}, port {config.port}: {reason}") from None
    listening.setblocking(False)
    return listening


def _free_port(family: int, address: Any) -> int | None:
    """The next port that is free at the same address."""
    for port in range(address[1] + 1, min(address[1] + 100, 65536)):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((address[0], port, *address[2:]))
            return port
    return None


def assemble(service: Service, config: ServeConfig, keys: Keys, requests: int) -> App:
    """All layers around the routes. requests: that the engine takes, those that wait included."""
    service.thinking = Defaults(config.reasoning_format, config.reasoning_budget)
    app = build_app(service)
    add_llama_server(app, service)
    add_ollama(app, service)
    endpoints = frozenset(path for route in app.routes if (path := getattr(route, "path", "")) and "{" not in path)
    limits = GateLimits(
        MAX_HEADERS, config.max_body, config.receive_timeout, requests + IN_PROGRESS, config.log_prompts
    )
    # with a key, what another host name leads to is not answered anyway
    hosts = LOCAL_HOSTS | {config.host.lower()} if is_local(config.host) and not keys else None
    gate: App = Gate(app, keys, hosts, limits, service.metrics, endpoints)
    if config.cors:  # outermost: a browser's question before a request has no key, and must see refusals
        gate = CORSMiddleware(
            gate,
            allow_origins=list(config.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # those it asks for: clients of an origin that is named have headers of their own
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
        )
    return gate


class Protocol(H11Protocol):
    """uvicorn's HTTP, with a limit on the time to send a request's headers, and with errors in JSON.

    A request's state has `abort`, which ends its connection without waiting for what the client has not read.
    """

    header_seconds = 30.0
    most_connections = 1024

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._header_timer: asyncio.TimerHandle | None = None
        self._waiting = bytearray()  # what has come and is not looked at yet
        if len(self.connections) > self.most_connections:
            _too_many("too many connections: new ones are closed", connections=self.most_connections)
            transport.abort()
        else:
            self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_header()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) > SLICE or self._waiting:  # it may be thousands of chunks: others have their turns between
            self.flow.pause_reading()
            if not self._waiting:
                self.loop.call_soon(self._take_slice)
            self._waiting += data
        else:
            self._take(data)

    def _take_slice(self) -> None:
        if self.transport.is_closing():
            return
        data = bytes(self._waiting[:SLICE])
        del self._waiting[:SLICE]
        self._take(data)
        if self._waiting:
            self.loop.call_soon(self._take_slice)
        else:
            self.flow.resume_reading()

    def _take(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._unwatch_header()
        elif self._header_timer is None and not self.transport.is_closing():
            self._watch_header()

    def _watch_header(self) -> None:
        self._header_timer = self.loop.call_later(self.header_seconds, self._too_slow)

    def _unwatch_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(error_document(400, msg, code="invalid_http")).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server, which a second signal of any kind ends at once, and a broken engine too."""

    def __init__(self, config: uvicorn.Config, service: Service, listening: socket.socket) -> None:
        super().__init__(config)
        self.service = service
        self._listening = listening
        self.say: Callable[[str], object] = lambda line: None  # to a person at a terminal, beside the log
        service.ending = lambda: self.should_exit
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if config.is_ssl else 'http'}://{shown}:{port}"

    def live(self) -> None:
        """Listen, load and answer until a signal or `should_exit`. PowerInferError: why the engine is no more."""

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(_on_loop_error)
            self.service.start()
            await self.serve([self._listening])
            await self.service.close()

        with contextlib.closing(self._listening):
            asyncio.run(main())
        if self.service.failure is not None:
            raise self.service.failure

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # not kept for uvicorn to raise again: a drained server has done its work
        self.force_exit = self.force_exit or self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        return self.service.failure is not None or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        log("info", "draining", connections=len(self.server_state.connections))
        running, seconds = len(self.server_state.tasks), self.config.timeout_graceful_shutdown
        if running and seconds and not self.force_exit:
            requests = "1 request" if running == 1 else f"{running} requests"
            self.say(f"waiting up to {seconds} s for {requests}; Ctrl-C again ends now")
        watch = asyncio.create_task(self._end_if_forced())
        try:
            await super().shutdown(sockets)
        finally:
            watch.cancel()
        if self.server_state.tasks:  # they have been cancelled
            await asyncio.wait(self.server_state.tasks, timeout=STOP_SECONDS)

    async def _end_if_forced(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.05)
        for task in list(self.server_state.tasks):
            task.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _connections() -> int:
    """Number of connections that leaves files for everything else, of as many as this process may have open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    left = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/dev/fd"))
    return max(8, left - min(FILES, left // 2))


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
        _too_many("no connection can be accepted now", reason=error.strerror)  # asyncio says so hundreds of times
    else:
        loop.default_exception_handler(context)


_logged_at: dict[str, float] = {}  # when, by event


def _too_many(event: str, **facts: Any) -> None:
    """Log an event of which there may be thousands, at most once a second."""
    now = time.monotonic()
    if now - _logged_at.get(event, -1.0) >= 1.0:
        _logged_at[event] = now
        log("warning", event, **facts)


def checked_keys(config: ServeConfig) -> list[str]:
    """The API keys. RequestError for an address that other machines can reach, without any."""
    keys = read_keys(config.api_key_file)
    if not keys and not config.insecure and not is_local(config.host):
        raise RequestError(
            f"{config.host} can be reached from other machines: set an API key ({ENVIRONMENT} or --api-key-file), "
            "or say --insecure"
        )
    return keys


def make_server(
    sources: Sequence[ModelSource], config: ServeConfig, requests: int, policy: ServicePolicy | None = None
) -> Server:
    """A server that listens already. requests: that its engines take, those that wait included; policy: of several
    models, None: there is one.

    RequestError for an option that cannot be; PowerInferError if the port is taken.
    """
    check(config)
    keys = Keys(checked_keys(config))
    service = Service(sources, policy, timeout=config.timeout or None, queue_timeout=config.queue_timeout or None)
    settings = _uvicorn_config(assemble(service, config, keys, requests), config)
    server = Server(settings, service, listen(config))
    log("info", "listening", url=server.url, models=service.names, keys=bool(keys))
    return server


def _uvicorn_config(app: App, config: ServeConfig) -> uvicorn.Config:
    try:
        settings = uvicorn.Config(
            app,
            loop="asyncio",
            http=type(
                "Protocol",
                (Protocol,),
                {"header_seconds": config.receive_timeout, "most_connections": _connections()},
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(config.drain),
            h11_max_incomplete_event_size=MAX_HEADERS,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        settings.load()
    except (OSError, ssl.SSLError) as error:
        raise RequestError(f"the TLS certificate and key cannot be used: {error.strerror or error}") from None
    return settings
