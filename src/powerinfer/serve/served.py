"""A model of the server: its name, where it comes from, and its engine while it is loaded."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from powerinfer.errors import EngineError, PowerInferError, QueueFullError, RequestError, RequestTimeoutError
from powerinfer.hybrid.resolved import Needs
from powerinfer.progress import Progress
from powerinfer.serve.api_error import ApiError, place_in
from powerinfer.serve.live import LiveView
from powerinfer.serve.logs import log

if TYPE_CHECKING:
    from powerinfer.runtime.async_llm import AsyncLLM
    from powerinfer.runtime.driver import EngineStats
    from powerinfer.runtime.engine import LLM
    from powerinfer.serve.metrics import Metrics

T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """Bytes that a load may take; None: what is free."""

    ram: int | None = None
    vram: int | None = None


@dataclass(frozen=True)
class ModelSource:
    """Source of a model.

    names: in the API, the first one being what answers say. load: the model, within a budget. needs: what it takes,
    from its headers; a PowerInferError if the budget is too small or the model cannot be run. path: of its files.
    """

    names: tuple[str, ...]
    load: Callable[[Progress, Budget], LLM]
    needs: Callable[[Budget], Needs] | None = None
    path: Path | None = None


class Stopped(BaseException):
    """The server ends while a model is being loaded."""


async def run_in_thread(work: Callable[[], T], name: str) -> T:
    """`work()` in a thread for which the end of the process does not wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, problem = None, None
        try:
            value = work()
        except BaseException as error:  # a thread's error would be lost
            problem = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(deliver, value, problem)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


class ServedModel:
    """A model that requests name. What changes it runs on the event loop.

    timeout, queue_timeout: of a request, in seconds; None: no limit. ending: whether the server ends.
    """

    def __init__(
        self, source: ModelSource, metrics: Metrics, *, timeout: float | None, queue_timeout: float | None,
        ending: Callable[[], bool], changed: Callable[[ServedModel], None],
    ) -> None:  # fmt: skip
        """changed: called when a request ends that used the engine."""
        self.source, self.name = source, source.names[0]
        self.metrics = metrics
        self.timeout, self.queue_timeout = timeout, queue_timeout
        self.view = LiveView()
        self.reserved = Needs(0)  # by its engine, once it is loaded
        self.progress: tuple[str, int, int] | None = None  # of loading
        self.failure: PowerInferError | None = None  # why it answers no more, or could not be loaded, until it is
        self.waiting = 0  # requests that wait until it is loaded
        self.loads = 0
        self.used = 0.0  # when the last request ended, by the clock of `time.monotonic`
        self._engine: AsyncLLM | None = None
        self._loading = False
        self._users = 0
        self._past: dict[str, float] = {}  # counters of engines that were unloaded
        self._ending, self._changed = ending, changed

    # ---------------------------------------------------------------- its engine

    @property
    def engine(self) -> AsyncLLM:
        """The engine of a request that has taken it."""
        assert self._engine is not None
        return self._engine

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine, be it broken."""
        return self._engine is not None

    @property
    def ready(self) -> bool:
        """Whether requests can be answered."""
        return self._engine is not None and self.failure is None

    @property
    def busy(self) -> bool:
        """Whether a request uses it, or waits for it. Who waits for a broken engine needs another one."""
        return self._users > 0 or (self.waiting > 0 and self.failure is None)

    @property
    def is_used(self) -> bool:
        """Whether a request uses its engine."""
        return self._users > 0

    @property
    def status(self) -> str:
        """ "unloaded", "loading", "ok" or "failed"."""
        if self.failure is not None:
            return "failed"
        if self._engine is not None:
            return "ok"
        return "loading" if self._loading else "unloaded"

    def take(self, leases: ExitStack, counts: bool = True) -> None:
        """Keep the engine until `leases` end. counts: whether the model has been used by that."""
        self._users += 1
        leases.callback(self._release, counts)

    def _release(self, counts: bool) -> None:
        self._users -= 1
        if counts:
            self.used = time.monotonic()
        if not self._users:
            self._changed(self)

    # ---------------------------------------------------------------- loading and unloading

    async def load(self, budget: Budget) -> None:
        """Load it. PowerInferError if that fails, ApiError if the server ends."""
        self.failure, self._loading = None, True
        try:
            await self._load(budget)
        finally:
            self._loading, self.progress = False, None

    async def _load(self, budget: Budget) -> None:
        from powerinfer.runtime.async_llm import AsyncLLM

        try:
            llm = await run_in_thread(lambda: self.source.load(self._report, budget), "loading")
        except PowerInferError:
            raise
        except Stopped:
            raise ApiError(503, "the server is shutting down", code="aborted") from None
        except MemoryError:
            raise PowerInferError("out of memory; a smaller --context or model needs less") from None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log("error", "the model cannot be loaded", error=error, model=self.name)
            raise PowerInferError(f"internal error, {type(error).__name__}: {error}") from error
        self._engine = AsyncLLM.from_llm(llm)
        self.loads += 1
        self.used = time.monotonic()
        log("info", "loaded", model=self.name, seconds=round(llm.load_s, 3), choices=llm.choices)

    def _report(self, label: str, done: int, total: int) -> None:
        self.progress = (label, done, total)
        if self._ending():
            raise Stopped

    async def unload(self) -> None:
        """End what runs, and free the model. This object outlives it: what the server refers to is in cycles."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for name, value in engine.llm.stats().numbers().items():
            self._past[name] = self._past.get(name, 0) + value
        await asyncio.to_thread(self.view.close)
        await engine.close()

    # ---------------------------------------------------------------- for people and clients

    def stats(self) -> tuple[EngineStats | None, dict[str, float]]:
        """The figures of its engine, if there is one, and the sums of those that were unloaded."""
        engine = self._engine
        return None if engine is None else engine.llm.stats(), self._past

    def not_ready(self) -> ApiError:
        """The refusal of a request that does not wait until it is loaded."""
        if self.failure is not None:
            problem = "the engine has failed" if self.has_engine else f"{self.name} could not be loaded"
            return ApiError(503, f"{problem}: {self.failure}", code="failed")
        label, done, total = self.progress or ("", 0, 0)
        share = f" ({label}, {100 * done // total} %)" if total else ""
        return ApiError(503, f"the model is being loaded{share}: try again later", code="loading")

    def loading(self) -> dict[str, Any] | None:
        """The progress of loading."""
        if self.progress is None:
            return None
        return dict(zip(("label", "done", "total"), self.progress, strict=True))

    def refusal(self, error: Exception, seconds: float = 0.0) -> ApiError | None:
        """An error of the engine as the API tells it; None for one that is not meant to reach a client.

        seconds: since the request was submitted.
        """
        if isinstance(error, ApiError):
            return error
        if isinstance(error, QueueFullError):
            return ApiError(429, str(error), code="queue_full")
        if isinstance(error, RequestTimeoutError):
            over = self.timeout is not None and seconds >= self.timeout
            return ApiError(504 if over else 503, str(error), code="timeout")
        if isinstance(error, EngineError):
            self.failure = error
            return ApiError(503, "the engine has failed", code="failed")
        if isinstance(error, RequestError):
            return ApiError(400, str(error), param=place_in(str(error)))
        return ApiError(500, str(error)) if isinstance(error, PowerInferError) else None
