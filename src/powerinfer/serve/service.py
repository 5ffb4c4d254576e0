"""The service behind the routes: the models of the server, by name.

One model is loaded at the start and stays. Several are loaded when a request names them, one at a time, and unloaded
when no request has used them for a while, or when another one needs their memory, those unused for longest first. A
model that a request uses is never unloaded. What fits is known before anything is loaded: the planner's bytes of every
loaded model, and of the new one, within --ram or the memory that is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from powerinfer.errors import PowerInferError, VramError
from powerinfer.serve.api_error import ApiError, NoModelError
from powerinfer.serve.logs import log
from powerinfer.serve.metrics import Metrics
from powerinfer.serve.served import Budget, ModelSource, ServedModel, run_in_thread
from powerinfer.serve.thinking import Defaults
from powerinfer.system import available_memory, resident_memory, total_memory

STOP_SECONDS = 5.0  # that loading gets to notice that it is in vain
TAG = ":latest"  # which Ollama's clients may write behind a name that has none
KV_SHARE = 4  # further contexts get at most 1/KV_SHARE of the room that is left


class ServicePolicy(NamedTuple):
    """Rules by which several models share the machine.

    budget: for all of them; together: that may be loaded, 0: any number; keep_alive: seconds that one stays without a
    request, None: for ever; waiting: requests that may wait for one model to be loaded; batch: requests that it decodes
    together. sources: all models that there are now; None: always those of the start.
    """

    budget: Budget = Budget()
    together: int = 0
    keep_alive: float | None = 300.0
    waiting: int = 32
    batch: int = 1
    sources: Callable[[], Sequence[ModelSource]] | None = None


class Service:
    """policy: None for one model, which is loaded by `start`; timeouts: in seconds, None: no limit."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        policy: ServicePolicy | None = None,
        *,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> None:
        assert policy is not None or len(sources) == 1
        self.started = int(time.time())
        self.ending: Callable[[], bool] = lambda: False
        self.metrics = Metrics(lambda: self.models)
        self.timeout, self.queue_timeout = timeout, queue_timeout
        self.thinking = Defaults()
        self.models: list[ServedModel] = []
        self._names: dict[str, ServedModel] = {}
        self._folded: dict[str, ServedModel] = {}
        self._policy = policy
        self._turn = asyncio.Lock()  # of what loads and unloads
        self._change = asyncio.Event()  # a model may have become idle, or unwanted
        self._tasks: dict[ServedModel, asyncio.Task[None]] = {}  # loads
        self._unloads: set[asyncio.Task[None]] = set()
        self._timers: dict[ServedModel, asyncio.TimerHandle] = {}
        self._take(sources)

    def _take(self, sources: Sequence[ModelSource]) -> None:
        """Have these models; those that are new, and no more those that are not among them, unless they are in use."""
        current = {model.name: model for model in self.models}
        for source in sources:
            if (model := current.get(source.names[0])) is not None:
                model.source = source  # of its next load: the file may be another one
        models = {source.names[0]: current.get(source.names[0]) or self._model(source) for source in sources}
        stay = {
            name: model for name, model in current.items() if model.has_engine or model.busy or model in self._tasks
        }
        self.models = list((stay | models).values())
        self._names = {name: model for model in self.models for name in model.source.names}
        self._folded = {name.casefold(): model for name, model in reversed(self._names.items())}  # the first one counts

    def _model(self, source: ModelSource) -> ServedModel:
        return ServedModel(
            source, self.metrics, timeout=self.timeout, queue_timeout=self.queue_timeout,
            ending=lambda: self.ending(), changed=self._released,
        )  # fmt: skip

    async def refresh(self) -> None:
        """Take note of models that have come or gone."""
        if self._policy is None or self._policy.sources is None:
            return
        try:
            self._take(await run_in_thread(self._policy.sources, "listing"))
        except PowerInferError as error:
            log("warning", f"the list of models stays as it was: {error}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models."""
        return tuple(self._names)

    @property
    def only(self) -> ServedModel | None:
        """The model of a server that has one; None where they are loaded on demand."""
        return self.models[0] if self._policy is None else None

    @property
    def keep_alive(self) -> float | None:
        """Seconds that a model stays without a request; None: for ever."""
        return None if self._policy is None else self._policy.keep_alive

    @property
    def failure(self) -> PowerInferError | None:
        """Reason for which the server cannot answer any more."""
        return self.only.failure if self.only is not None else None

    @property
    def status(self) -> str:
        """ "loading", "ok" or "failed"."""
        if self.only is None or self.only.ready:
            return "ok"
        return "loading" if self.only.failure is None else "failed"

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        document: dict[str, Any] = {"status": self.status}
        if self.only is None:
            document["models"] = {model.name: model.status for model in self.models}
        elif self.status == "loading" and (progress := self.only.loading()) is not None:
            document["loading"] = progress
        return document

    # ---------------------------------------------------------------- requests

    def _named(self, name: str) -> ServedModel | None:
        """The model of exactly that name, or else without regard to case, or without Ollama's tag."""
        folded = name.casefold()
        return self._names.get(name) or self._folded.get(folded) or self._folded.get(folded.removesuffix(TAG))

    def find(self, name: str | None) -> ServedModel:
        """The model of that name; None: the only one. ApiError (404, 400) if there is none."""
        served = self.only if name is None else self._named(name)
        if served is not None:
            return served
        if name is None:
            raise ApiError(400, f"model is missing: one of {self._first_names()}", param="model", code="model_missing")
        raise NoModelError(name[:128], self._first_names())

    async def use(self, name: str | None, leases: ExitStack) -> ServedModel:
        """The model of that name, loaded, which stays so until `leases` end. ApiError if it cannot be had."""
        model = await self._find_fresh(name)
        while not model.ready:
            if self._policy is None:
                raise model.not_ready()
            await self._wait_for(model, self._policy)
        model.take(leases)
        return model

    async def _find_fresh(self, name: str | None) -> ServedModel:
        if name is not None and self._named(name) is None:
            await self.refresh()
        return self.find(name)

    async def preload(self, name: str) -> None:
        """Load a model without using it. ApiError if that fails."""
        with ExitStack() as leases:
            await self.use(name, leases)

    async def unload(self, name: str) -> None:
        """Unload a model. ApiError (409) if it is in use, (400) if it is the only one of the server."""
        model = self.find(name)
        if self._policy is None:
            raise ApiError(400, f"{model.name} is the only model of this server: it stays loaded", param="model")
        in_use = ApiError(409, f"{model.name} is in use: try again later", param="model", code="in_use")
        if model.busy:  # known before the turn comes, which may take long
            raise in_use
        async with self._turn:
            if model.busy:
                raise in_use
            await self._unload(model)

    def peek(self, name: str | None, leases: ExitStack) -> ServedModel:
        """The same for what only looks: ApiError (503) if it is not loaded, and that is no use of it."""
        model = self.find(name)
        if not model.ready:
            if self.only is None and model.status == "unloaded":
                raise ApiError(503, f"{model.name} is not loaded: a request loads it", code="unloaded")
            raise model.not_ready()
        model.take(leases, counts=False)
        return model

    def _first_names(self, most: int = 16) -> str:
        names = list(self._names) or ["no model yet"]
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

    async def _wait_for(self, model: ServedModel, policy: ServicePolicy) -> None:
        """Wait until a model is loaded, with all others who wait for that."""
        if model.waiting >= policy.waiting:
            raise ApiError(429, f"{model.waiting} requests wait for {model.name} already: try later", code="queue_full")
        task = self._tasks.get(model)
        if task is None:
            task = self._tasks[model] = asyncio.create_task(self._load(model, policy))
            task.add_done_callback(lambda done: self._loaded(model, done))
        model.waiting += 1
        try:
            async with asyncio.timeout(self.queue_timeout):
                await asyncio.shield(task)
        except TimeoutError:
            label = (model.progress or ("waiting for memory", 0, 0))[0]
            reason = f"{model.name} was not loaded within {self.queue_timeout:g} s ({label}): try again later"
            raise ApiError(503, reason, code="loading") from None
        finally:
            model.waiting -= 1
            self._released(model)

    def _loaded(self, model: ServedModel, task: asyncio.Task[None]) -> None:
        del self._tasks[model]
        if not task.cancelled():
            task.exception()  # nobody may be left who waits for it
        self._released(model)

    def _released(self, model: ServedModel) -> None:
        """A request does not use a model, or wait for it, any more."""
        self._change.set()
        keep_alive = self.keep_alive
        if keep_alive is None or not model.has_engine:
            return
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()
        wait = max(0.0, model.used + keep_alive - time.monotonic())
        self._timers[model] = asyncio.get_running_loop().call_later(wait, self._expire, model, keep_alive)

    def _expire(self, model: ServedModel, keep_alive: float) -> None:
        """Unload a model that has not been used for `keep_alive` seconds."""

        async def unload() -> None:
            async with self._turn:
                if not model.busy and time.monotonic() - model.used >= keep_alive:
                    await self._unload(model)

        task = asyncio.create_task(unload())
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    # ---------------------------------------------------------------- loading, one at a time

    def start(self) -> asyncio.Task[None] | None:
        """Begin to load the only model."""
        if self.only is None:
            return None
        task = self._tasks[self.only] = asyncio.create_task(self._load_only(self.only))
        return task

    async def _load_only(self, model: ServedModel) -> None:
        try:
            await model.load(Budget())
        except PowerInferError as error:
            model.failure = error
        except ApiError:
            assert self.ending()

    async def _load(self, model: ServedModel, policy: ServicePolicy) -> None:
        async with self._turn:
            await self._idle(model, lambda: not model.is_used)  # a broken engine, whose requests end now
            await self._unload(model)
            model.failure = None
            await self.refresh()
            try:
                budget = await self._room_for(model, policy)
                await model.load(budget)
            except ApiError:
                raise
            except PowerInferError as error:
                model.failure = error
                log("error", "load_failed", model=model.name, reason=str(error))
                raise ApiError(500, f"{model.name} cannot be loaded: {error}", code="model_failed") from None

    async def _room_for(self, model: ServedModel, policy: ServicePolicy) -> Budget:
        """Budget of a model, once others have made room. ApiError (503) if it can never fit."""
        read = model.source.needs
        assert read is not None
        while True:
            loaded = [one for one in self.models if one.has_engine]
            reserved = sum(one.reserved.ram for one in loaded)
            limit = policy.budget.ram if policy.budget.ram is not None else free_memory(reserved)
            vram = policy.budget.vram
            budget = Budget(limit, None if vram is None else max(0, vram - sum(one.reserved.vram for one in loaded)))
            try:
                needs = await run_in_thread(partial(read, budget), "reading")
            except VramError:
                users = [one for one in loaded if one.reserved.vram]
                if not users:
                    raise
                await self._make_room(model, users)
                continue
            left = limit - reserved - needs.ram
            if left >= 0 and (not policy.together or len(loaded) < policy.together):
                further = min((policy.batch - 1) * needs.kv, left // KV_SHARE)
                model.reserved = needs._replace(ram=needs.ram + further)
                return Budget(model.reserved.ram, budget.vram)
            if not loaded:  # other programs have taken memory meanwhile
                raise ApiError(503, f"{model.name} needs more memory than is free: try again later", code="no_memory")
            await self._make_room(model, loaded)

    async def _make_room(self, model: ServedModel, loaded: Sequence[ServedModel]) -> None:
        """Unload the model that has not been used for longest, once there is one that no request uses."""
        await self._idle(model, lambda: not all(one.busy for one in loaded))
        await self._unload(min((one for one in loaded if not one.busy), key=lambda one: one.used))

    async def _idle(self, model: ServedModel, condition: Callable[[], bool]) -> None:
        """Wait for a condition; ApiError if nobody waits for the model any more."""
        while not condition():
            if not model.waiting or self.ending():
                raise ApiError(503, f"nobody waits for {model.name} any more", code="loading")
            self._change.clear()
            await self._change.wait()

    async def _unload(self, model: ServedModel) -> None:
        if (timer := self._timers.pop(model, None)) is not None:
            timer.cancel()
        if model.has_engine:
            await model.unload()
            model.failure = None
            log("info", "unloaded", model=model.name)
            await asyncio.to_thread(_collect)

    async def close(self) -> None:
        """End what runs, and free all models."""
        for timer in self._timers.values():
            timer.cancel()
        self.ending = lambda: True
        self._change.set()
        pending = [*self._tasks.values(), *self._unloads]
        if pending:
            await asyncio.wait(pending, timeout=STOP_SECONDS)
        for task in pending:
            task.cancel()
        for model in self.models:
            await model.unload()


def free_memory(reserved: int) -> int:
    """Bytes of RAM that models may take together where loaded ones take `taken` of them, used or not yet."""
    resident = resident_memory()
    available = available_memory() or total_memory() - resident
    return min(available + min(resident, reserved), total_memory())


def _collect() -> None:
    """Free what refers to itself: files, tokenizers."""
    import gc

    gc.collect()
