"""Work of one request that must not delay others: beside the event loop, and large bodies one at a time.

What a thread does in Python takes turns with the event loop and the engine. What takes long in one call of a library
does not, so the sizes of such calls are limited, or they let others run (`formats.tokenizer`, `formats.windows`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool

from powerinfer.errors import RequestError
from powerinfer.serve.api_error import ApiError
from powerinfer.text.grammar import check_depth

T = TypeVar("T")

SMALL = 1 << 16  # bytes of a body that is read in less time than a thread takes to do it
LARGE = 1 << 20  # bytes of a body from which on its work waits for that of others of its kind
MAX_VALUES = 100_000  # lists, objects and texts in a body; numbers are cheaper

_thread = ThreadPoolExecutor(1, thread_name_prefix="large")


async def run_in_worker(size: int, work: Callable[..., T], *args: Any, **options: Any) -> T:
    """`work(*args, **options)` in a thread. size: of the request's body, in bytes."""
    if size < LARGE:
        return await run_in_threadpool(work, *args, **options)
    call = partial(copy_context().run, work, *args, **options)
    return await asyncio.get_running_loop().run_in_executor(_thread, call)


async def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body is. ApiError for anything else: only RFC 8259's JSON is taken, and none nested or split
    without end."""
    return _read_json(body) if len(body) <= SMALL else await run_in_worker(len(body), _read_json, body)


def _read_json(body: bytes) -> dict[str, Any]:
    _check_values(body)
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the JSON is nested too deep", code="invalid_json") from None
    try:
        check_depth(document, "the JSON")
    except RequestError as error:
        raise ApiError(400, str(error)) from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return document


def _check_values(body: bytes) -> None:
    """ApiError for more than `MAX_VALUES`: a decoder makes millions of objects in one call."""
    if _containers(body) + body.count(b'"') // 2 <= MAX_VALUES:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every other quote ends a text now
    parts = plain.split(b'"', 2 * MAX_VALUES + 2)
    if _containers(b"".join(parts[::2])) + len(parts) // 2 > MAX_VALUES:
        raise ApiError(400, f"the JSON has more than {MAX_VALUES} lists, objects and texts: send less at a time")


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")
