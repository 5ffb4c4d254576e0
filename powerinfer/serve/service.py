"""What the routes work on: the engine, once it is loaded, under its names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powerinfer.errors import EngineError, PowerInferError, QueueFullError, RequestError, RequestTimeoutError
from powerinfer.serve.api_error import ApiError
from powerinfer.serve.metrics import Metrics

if TYPE_CHECKING:
    from powerinfer.runtime.async_llm import AsyncLLM
    from powerinfer.runtime.driver import EngineStats


class Service:
    """names: of the model in the API, the first one being what answers say. timeouts: in seconds; None: no limit."""

    def __init__(
        self, names: Sequence[str], *, timeout: float | None = None, queue_timeout: float | None = None
    ) -> None:
        self.names = tuple(names)
        self.timeout, self.queue_timeout = timeout, queue_timeout
        self.started = int(time.time())
        self.progress: tuple[str, int, int] | None = None  # of loading
        self.failure: PowerInferError | None = None  # why there is no engine, and will be none
        self.metrics = Metrics(self._stats)
        self._engine: AsyncLLM | None = None

    def loaded(self, engine: AsyncLLM) -> None:
        """From now on requests are answered."""
        self._engine = engine

    async def close(self) -> None:
        """End what runs, and free the model. This object may outlive it: what the server refers to is in cycles."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    @property
    def status(self) -> str:
        """ "loading", "ok" or "failed"."""
        if self.failure is not None:
            return "failed"
        return "loading" if self._engine is None else "ok"

    @property
    def engine(self) -> AsyncLLM:
        """ApiError (503) while there is none."""
        if self.failure is not None:
            raise ApiError(503, f"the engine has failed: {self.failure}", code="failed")
        if self._engine is None:
            label, done, total = self.progress or ("", 0, 0)
            share = f" ({label}, {100 * done // total} %)" if total else ""
            raise ApiError(503, f"the model is being loaded{share}: try again later", code="loading")
        return self._engine

    def check_model(self, name: str | None) -> None:
        """ApiError (404) for a model that is not this one; None is."""
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"no model {name[:128]!r}; this server has {', '.join(self.names)}", param="model",
                code="model_not_found",
            )  # fmt: skip

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
            return ApiError(400, str(error))
        return ApiError(500, str(error)) if isinstance(error, PowerInferError) else None

    def _stats(self) -> EngineStats | None:
        return None if self._engine is None else self._engine.llm.stats()

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        document: dict[str, Any] = {"status": self.status}
        if self.status == "loading" and self.progress is not None:
            document["loading"] = dict(zip(("label", "done", "total"), self.progress, strict=True))
        return document
