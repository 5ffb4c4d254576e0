"""The answers to one HTTP request, which may be several (n, several prompts), as one stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from powerinfer.serve.api_error import shutting_down

if TYPE_CHECKING:
    from powerinfer.runtime.async_llm import AsyncLLM
    from powerinfer.runtime.params import SamplingParams
    from powerinfer.runtime.request import StreamEvent
    from powerinfer.serve.metrics import Metrics


class Job(NamedTuple):
    """One answer to compute."""

    prompt: list[int]
    params: SamplingParams


class Limits(NamedTuple):
    """Seconds, None: no limit. salt: of the client's part of the prefix cache. together: answers computed at once.
    model: its name, for metrics."""

    timeout: float | None
    queue_timeout: float | None
    salt: bytes
    together: int
    model: str


Answers = AsyncGenerator["tuple[int, StreamEvent] | None", None]
"""(number of the job, its next event) as they come; None after each `ping` seconds without one."""


async def answers(engine: AsyncLLM, jobs: Sequence[Job], limits: Limits, metrics: Metrics, ping: float) -> Answers:
    """Run all jobs. The first error of one ends all and is raised; closing the generator ends all.

    Only `limits.together` jobs are with the engine at a time, so that one request does not fill its queue.
    """
    events: asyncio.Queue[tuple[int, StreamEvent] | BaseException] = asyncio.Queue()
    turns = asyncio.Semaphore(limits.together)

    async def run(number: int, job: Job) -> None:
        try:
            async with turns:
                await _run(engine, number, job, limits, metrics, events)
        except Exception as error:
            events.put_nowait(error)

    tasks = [asyncio.create_task(run(number, job)) for number, job in enumerate(jobs)]
    left = len(tasks)
    try:
        while left:
            try:
                async with asyncio.timeout(ping):
                    item = await events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, BaseException):
                raise item
            left -= item[1].completion is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    engine: AsyncLLM,
    number: int,
    job: Job,
    limits: Limits,
    metrics: Metrics,
    events: asyncio.Queue[tuple[int, StreamEvent] | BaseException],
) -> None:
    last = time.perf_counter()
    first = True
    stream = engine.stream(
        job.prompt, job.params, salt=limits.salt, timeout=limits.timeout, queue_timeout=limits.queue_timeout
    )
    async for event in stream:
        now = time.perf_counter()
        if event.token_id is not None:
            metrics.token(limits.model, now - last, first)
            first, last = False, now
        if event.finish_reason == "abort":
            raise shutting_down()
        events.put_nowait((number, event))
