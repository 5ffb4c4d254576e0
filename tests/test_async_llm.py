"""AsyncLLM: answers, streams, cancelling, errors, several loops, on the toy model."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from toy_model import PATIENCE, ToyExecutor, idle, joined, reference_greedy, toy_llm

from powerinfer import AsyncLLM, QueueFullError, RequestError, RequestTimeoutError, SamplingParams
from powerinfer.runtime.engine import LLM

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
Test = Callable[[LLM, AsyncLLM], Awaitable[None]]


def answered(prompt: str, params: SamplingParams = PARAMS) -> list[int]:
    return toy_llm().generate(prompt, params).token_ids


def run(test: Test, executor: ToyExecutor | None = None, **options: object) -> None:
    llm = toy_llm(executor, **options)

    async def whole() -> None:
        await test(llm, AsyncLLM.from_llm(llm))

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))
    assert idle(llm)


def test_generate_and_stream() -> None:
    async def test(llm: LLM, model: AsyncLLM) -> None:
        one = await model.generate("hello", PARAMS)
        assert one.token_ids == answered("hello")
        events = [event async for event in model.stream(list(b"hello"), PARAMS, salt=b"another")]
        assert [event.token_id for event in events] == one.token_ids
        assert "".join(event.text for event in events) == one.text
        last = events[-1].completion
        assert last is not None and last.cached_tokens == 0 and last.finish_reason == "length"
        many = await asyncio.gather(*(model.generate(f"prompt {n}", PARAMS) for n in range(40)))
        assert [one.token_ids for one in many] == [answered(f"prompt {n}") for n in range(40)]
        with pytest.raises(RequestError, match="no chat template"):
            await model.chat([{"role": "user", "content": "hi"}])

    run(test)


def test_what_is_invalid_is_refused_at_the_first_iteration() -> None:
    async def test(llm: LLM, model: AsyncLLM) -> None:
        for prompt, limits, message in (
            ([], {}, "is empty"),
            ([999], {}, "token 999"),
            ("x" * 600, {}, "do not fit the context"),
            ("x", {"timeout": 0}, "timeout must be"),
            ("x", {"salt": "text"}, "salt must be bytes"),
        ):
            with pytest.raises(RequestError, match=message):
                await model.generate(prompt, PARAMS, **limits)
            with pytest.raises(RequestError, match=message):
                await anext(model.stream(prompt, PARAMS, **limits))

    run(test)


@pytest.mark.parametrize("way", ["aclose", "break", "cancel a stream", "cancel generate"])
def test_leaving_ends_the_request_within_a_step(way: str) -> None:
    executor = ToyExecutor()

    async def test(llm: LLM, model: AsyncLLM) -> None:
        executor.held = True
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in model.stream("hello", PARAMS):
                begun.set()
                if way == "break":
                    break

        if way == "aclose":
            stream = model.stream("hello", PARAMS)
            executor.let()
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.create_task(read() if way != "cancel generate" else model.generate("hello", PARAMS))
            if way == "cancel generate":
                await asyncio.to_thread(executor.wait_for, 0)
            else:
                executor.let()
                await begun.wait()
            if way.startswith("cancel"):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task
        # The loop closes the generator that was left: in the next step, or just before it.
        while not llm.stats().aborted and llm._runner._driver._commands.empty():
            await asyncio.sleep(0.001)
        executor.release()
        assert await asyncio.to_thread(idle, llm)
        assert 1 <= executor.begun <= (1 if way == "cancel generate" else 2) and llm.stats().aborted == 1

    run(test, executor)


def test_timeouts_and_the_bound() -> None:
    executor = ToyExecutor()

    async def test(llm: LLM, model: AsyncLLM) -> None:
        for limit, error in ((0.001, RequestTimeoutError), (None, QueueFullError)):
            executor.held = True
            begun = executor.begun
            tasks = [asyncio.create_task(model.generate("first", PARAMS))]
            await asyncio.to_thread(executor.wait_for, begun)
            for n, prompt in enumerate(("second", "third")):
                tasks.append(
                    asyncio.create_task(model.generate(prompt, PARAMS, queue_timeout=limit if n == 0 else None))
                )
                while llm._runner._driver._commands.qsize() <= n:
                    await asyncio.sleep(0.002)
            executor.release()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            failed, well = (done[1], done[2]) if limit else (done[2], done[1])
            assert isinstance(failed, error)
            assert not isinstance(done[0], BaseException) and done[0].token_ids == answered("first")
            assert not isinstance(well, BaseException) and well.token_ids == answered("third" if limit else "second")
        with pytest.raises(RequestTimeoutError, match="took longer than 1e-06 s"):
            await model.generate("x", PARAMS, timeout=1e-6)

    run(test, executor, max_batch=1, max_queue=1)


def test_a_thousand_requests_at_random() -> None:
    executor = ToyExecutor(n_pages=40, page_size=8)
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (1, 7, 16, 33, 50)]
    expected = [reference_greedy(one, 12) for one in prompts]

    async def test(llm: LLM, model: AsyncLLM) -> None:
        async def client(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(25):
                which = rng.randrange(5)
                leave = rng.choice([None, None, 0, 1, 5])
                got: list[int | None] = []
                stream = model.stream(prompts[which], params, salt=bytes([seed % 3]))
                async for event in stream:
                    got.append(event.token_id)
                    if len(got) == leave:
                        break
                await stream.aclose()
                assert got == expected[which][: len(got)]
                if leave is None:
                    assert got == expected[which]
                task = asyncio.create_task(model.generate(prompts[which], params))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.01)
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    assert (await task).token_ids == expected[which]

        await asyncio.gather(*(client(seed) for seed in range(20)))

    run(test, executor, context=96, max_batch=6)


def test_several_loops_and_threads_share_a_model() -> None:
    llm = toy_llm()
    model = AsyncLLM.from_llm(llm)
    wrong: list[str] = []

    def loop(name: str) -> None:
        async def work() -> None:
            answers = await asyncio.gather(*(model.generate(f"{name} {n}", PARAMS) for n in range(5)))
            if [one.token_ids for one in answers] != [answered(f"{name} {n}") for n in range(5)]:
                wrong.append(name)

        asyncio.run(work())

    threads = [threading.Thread(target=loop, args=(f"loop {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    assert llm.generate("sync", PARAMS).token_ids == answered("sync")
    joined(*threads)
    assert not wrong and idle(llm)


def test_a_loop_that_is_closed_loses_its_requests_only() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    model = AsyncLLM.from_llm(llm)
    executor.held = True
    loop = asyncio.new_event_loop()
    stream = model.stream("left", PARAMS)
    executor.let()
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()  # without shutting down its generators
    executor.release()
    assert llm.generate("other", PARAMS).token_ids == answered("other")
    assert idle(llm) and llm.stats().aborted == 1
    with pytest.raises((RuntimeError, StopIteration)):
        stream.aclose().send(None)


def test_close_while_streaming() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)

    async def whole() -> None:
        async with AsyncLLM.from_llm(llm) as model:
            executor.held = True
            stream = model.stream("hello", PARAMS)
            executor.let()
            assert (await anext(stream)).token_id == answered("hello")[0]
            closing = asyncio.create_task(model.close())
            while not llm._runner._driver.closing:
                await asyncio.sleep(0.001)
            executor.release()
            rest = [event async for event in stream]
            await closing
            assert rest[-1].finish_reason in ("abort", "length") and executor.closed
            with pytest.raises(RequestError, match="was closed"):
                await model.generate("x")

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))
