"""The engine's thread: aborts in every state, failures, deadlines, the bound on waiting requests, turns, exit, fork."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sparse_models import tiny_llama
from toy_model import (
    Asked,
    StoppableExecutor,
    ToyExecutor,
    ask,
    idle,
    joined,
    reference_greedy,
    settled,
    toy_llm,
    until,
)

from powerinfer.errors import EngineError, PowerInferError, QueueFullError, RequestError, RequestTimeoutError
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.scheduler import shares

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 256, length).tolist()


def answer(tokens: list[int], params: SamplingParams = LONG) -> list[int]:
    return toy_llm().generate([tokens], params)[0].token_ids


def token_ids(asked: Asked) -> list[int | None]:
    return [event.token_id if event is not None else None for event in asked.rest()]


def held(**options: object) -> tuple[ToyExecutor, LLM]:
    executor = ToyExecutor()
    executor.held = True
    return executor, toy_llm(executor, **options)


# ---------------------------------------------------------------- aborts


def waiting(executor: ToyExecutor, llm: LLM) -> Asked:
    asked = ask(llm, prompt(50, 1), LONG)
    executor.let()
    executor.wait_for(1)
    assert asked.request.start_time is None, "the only row is taken"
    return asked


def in_its_prompt(executor: ToyExecutor, llm: LLM) -> Asked:
    asked = ask(llm, prompt(200, 1), LONG)
    executor.let(2)
    executor.wait_for(2)
    assert 0 < asked.request.computed < 200
    return asked


def decoding(executor: ToyExecutor, llm: LLM) -> Asked:
    asked = ask(llm, prompt(50, 1), LONG)
    executor.let(3)
    executor.wait_for(3)
    assert len(asked.request.tokens) > 50
    return asked


def ended(executor: ToyExecutor, llm: LLM) -> Asked:
    asked = ask(llm, prompt(10, 1), replace(LONG, max_tokens=1))
    executor.let(2)
    executor.wait_for(2)
    return asked


def never_submitted(executor: ToyExecutor, llm: LLM) -> Asked:
    return Asked(llm, prompt(50, 1), LONG)


@pytest.mark.parametrize("state", [waiting, in_its_prompt, decoding, ended, never_submitted])
def test_abort_in_every_state(state: Callable[[ToyExecutor, LLM], Asked]) -> None:
    """A step later its row and pages are free, it ended as aborted, and the other one never noticed."""
    executor, llm = held(max_batch=1 if state is waiting else 2, mixed_chunk=64)
    other = ask(llm, prompt(20), LONG)
    executor.wait_for(0)
    asked = state(executor, llm)
    llm._runner.abort([asked.request])
    llm._runner.abort([asked.request])
    executor.let()
    executor.wait_for(executor.begun)
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (1, 0)
    assert stats.used_pages == len(other.request.pages) and not asked.request.pages and asked.request.row == -1
    if state is never_submitted:
        assert asked.events.empty()
    else:
        last = asked.rest()[-1]
        assert last is not None and last.finish_reason == ("length" if state is ended else "abort")
        assert last.completion is not None
        got = last.completion.token_ids
        start = asked.request.tokens[: asked.request.n_prompt]
        assert got == answer(start)[: len(got)] and len(got) == {decoding: 3, ended: 1}.get(state, 0)
    executor.release()
    assert token_ids(other) == answer(prompt(20))
    assert idle(llm)
    assert llm.stats().aborted == (0 if state in (ended, never_submitted) else 1)


def test_a_step_that_nobody_needs_is_stopped() -> None:
    """The pages that were computed before stay, those of the step do not."""
    executor = StoppableExecutor(max_tokens=64)
    executor.held = True
    llm = toy_llm(executor)
    one, other = ask(llm, prompt(50, 1), LONG), ask(llm, prompt(200), LONG)
    executor.wait_for(0)
    executor.let()
    executor.wait_for(1)
    llm._runner.abort([one.request])
    executor.let()  # someone needs it
    executor.wait_for(2)
    assert not executor.stopped and llm.stats().aborted == 1
    llm._runner.abort([other.request])
    until(lambda: idle(llm))
    assert executor.stopped == 1 and executor.begun == 3
    last = other.rest()[-1]
    assert last is not None and last.finish_reason == "abort"
    executor.release()
    again = llm.generate([prompt(200)], LONG)[0]
    assert again.token_ids == answer(prompt(200)) and 32 <= again.cached_tokens <= other.request.n_prompt - 64


def test_closing_a_model_stops_its_step() -> None:
    executor = StoppableExecutor()
    executor.held = True
    llm = toy_llm(executor)
    asked = ask(llm, prompt(50), LONG)
    executor.wait_for(0)
    llm.close()
    assert executor.stopped == 1 and executor.closed and asked.rest()[-1].finish_reason == "abort"  # type: ignore[union-attr]

    executor = StoppableExecutor()
    executor.held = True
    llm = toy_llm(executor)
    closing = threading.Thread(target=lambda: (executor.wait_for(0), llm.close()))
    closing.start()
    with pytest.raises(RequestError, match="the model was closed"):
        llm.score(prompt(50), 10, lambda at, logits: None)
    closing.join()
    assert executor.stopped == 1


def test_a_text_that_is_scored_is_not_stopped_by_others() -> None:
    executor = StoppableExecutor()
    executor.held = True
    llm, seen = toy_llm(executor), list[int]()
    scoring = threading.Thread(target=lambda: llm.score(prompt(50), 49, lambda at, logits: seen.append(at)))
    scoring.start()
    executor.wait_for(0)
    asked = ask(llm, prompt(20), LONG)
    llm._runner.abort([asked.request])
    executor.release()
    scoring.join()
    assert seen == [49] and not executor.stopped


def test_abort_of_a_preempted_request() -> None:
    executor = ToyExecutor(n_pages=12, page_size=8)
    llm = toy_llm(executor, context=96, prefix_cache=False)
    executor.held = True
    first, second = ask(llm, prompt(30), LONG), ask(llm, prompt(30, 1), LONG)

    def preempted() -> int:
        if not llm.stats().preemptions:
            executor.let()
            executor.wait_for(executor.begun)
        return llm.stats().preemptions

    until(preempted)
    assert second.request.row == -1 and (llm.stats().running, llm.stats().waiting) == (1, 1)
    llm._runner.abort([second.request])
    executor.release()
    last = second.rest()[-1]
    assert last is not None and last.finish_reason == "abort"
    assert token_ids(first) == answer(prompt(30)) and idle(llm)


def test_a_thousand_requests_from_many_threads() -> None:
    """Submitted, aborted and read at random: those that end by themselves have the right answer; nothing is left."""
    executor = ToyExecutor(n_pages=40, page_size=8)
    llm = toy_llm(executor, context=96, max_batch=6, prefill_chunk=32, mixed_chunk=8)
    prompts = [prompt(length) for length in (1, 7, 16, 33, 50)]
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = {tuple(one): reference_greedy(one, 20) for one in prompts}
    wrong: list[object] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        open_: list[Asked] = []
        for _ in range(125):
            open_.append(ask(llm, rng.choice(prompts), params, salt=b"ab"[: rng.randint(0, 2)]))
            if len(open_) > 6:
                one = open_.pop(rng.randrange(len(open_)))
                if rng.random() < 0.4:
                    llm._runner.abort([one.request])
                last = one.rest()[-1]
                assert last is not None and last.completion is not None
                tokens = expected[tuple(one.request.tokens[: one.request.n_prompt])]
                got = last.completion.token_ids
                if got != (tokens[: len(got)] if last.finish_reason == "abort" else tokens):
                    wrong.append((seed, last))
        llm._runner.abort([one.request for one in open_])

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert not wrong and idle(llm)
    assert llm.stats().aborted > 0


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [PowerInferError("the GPU is full"), MemoryError()])
def test_a_step_that_fails_ends_its_requests_only(error: Exception) -> None:
    executor, llm = held(max_batch=1)
    first, second = ask(llm, prompt(20), LONG), ask(llm, prompt(30), LONG)
    executor.fail_at[3] = error
    executor.release()
    events = first.rest()
    assert len(events) == 4 and events[-1] is None
    assert isinstance(first.request.error, PowerInferError)
    assert str(first.request.error).startswith("the GPU is full" if str(error) else "out of memory")
    assert token_ids(second) == answer(prompt(30)) and idle(llm)
    executor.fail_at[executor.begun] = error
    with pytest.raises(PowerInferError, match=r"GPU is full|out of memory"):
        llm.generate("again", LONG)
    assert llm.generate([prompt(20)], LONG)[0].token_ids == answer(prompt(20)) and idle(llm)


@pytest.mark.parametrize("where", ["forward", "plan", "commit"])
def test_an_unexpected_error_fails_everything(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, llm = held(max_batch=1)
    first, second = ask(llm, prompt(20), LONG), ask(llm, prompt(30), LONG)
    executor.let(3)
    executor.wait_for(3)
    if where == "forward":
        executor.fail_at[4] = ZeroDivisionError("one by nothing")
    else:

        def broken() -> None:
            raise ZeroDivisionError("one by nothing")

        monkeypatch.setattr(llm._runner._scheduler, where, broken)
    executor.release()
    for asked in (first, second):
        assert asked.rest()[-1] is None
        assert isinstance(asked.request.error, EngineError)
        assert isinstance(asked.request.error.__cause__, ZeroDivisionError)
    thread = llm._runner._driver._thread
    assert thread is not None
    thread.join(60)
    for use in (
        lambda: llm.generate("x"),
        lambda: next(llm.stream("x")),
        lambda: llm.score([1], 0, lambda at, rows: None),
    ):
        with pytest.raises(EngineError, match="ZeroDivisionError: one by nothing; load the model again"):
            use()
    assert llm.sparsity is None and llm.stats().running >= 0
    llm.close()
    assert executor.closed


def test_a_listener_that_raises_loses_its_request_only() -> None:
    executor, llm = held()
    bad, good = Asked(llm, prompt(20), LONG), Asked(llm, prompt(30), LONG)

    def gone(event: object) -> None:
        raise RuntimeError("nobody listens")

    bad.request.deliver = gone
    llm._runner.submit([bad.request, good.request])
    executor.release()
    assert token_ids(good) == answer(prompt(30))
    assert idle(llm) and llm.stats().aborted == 1 and len(bad.request.tokens) < 30


# ---------------------------------------------------------------- deadlines, the bound, turns


class Clock:
    """Stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


def test_deadlines_fire_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request in its prompt, of one that decodes, and of one that waits behind another's long prompt."""
    clock = Clock(monkeypatch)
    executor, llm = held(max_batch=2, prefill_chunk=16, mixed_chunk=16)
    decodes = ask(llm, prompt(10), LONG, timeout=50.0)
    executor.let(2)
    executor.wait_for(2)
    reads = ask(llm, prompt(300), LONG, timeout=30.0, queue_timeout=5.0)
    waits = ask(llm, prompt(20), LONG, queue_timeout=20.0, timeout=500.0)
    unlimited = ask(llm, prompt(40), LONG)

    def after(seconds: float) -> list[bool]:
        clock.now = 1000.0 + seconds
        executor.let()
        executor.wait_for(executor.begun)
        return [one.request.ended for one in (decodes, reads, waits, unlimited)]

    assert after(0) == [False] * 4
    assert after(10) == [False] * 4, "it has started: its queue_timeout is over"
    assert after(19.9) == [False] * 4
    assert after(20) == [False, False, True, False]
    assert after(29) == [False, False, True, False]
    assert after(30) == [False, True, True, False]
    assert unlimited.request.start_time is not None, "the row was free at once"
    assert after(50) == [True, True, True, False]
    for one, message in (
        (waits, "waited longer than 20 s"),
        (reads, "took longer than 30 s"),
        (decodes, "longer than 50 s"),
    ):
        assert one.rest()[-1] is None
        with pytest.raises(RequestTimeoutError, match=message):
            raise one.request.error or AssertionError
    executor.release()
    assert token_ids(unlimited) == answer(prompt(40))
    assert idle(llm) and llm.stats().timed_out == 3


def test_a_deadline_wakes_a_thread_that_has_nothing_to_do() -> None:
    """A request that waits for pages that a scored text holds."""
    executor = ToyExecutor(n_pages=4)
    llm = toy_llm(executor, context=128)
    used: list[int] = []

    def use(position: int, logits: np.ndarray) -> None:
        used.append(position)

    class Slow(list[int]):  # the caller is busy between two calls
        def __getitem__(self, key: object) -> object:
            if key == 64:
                failed.wait(60)
            return super().__getitem__(key)  # type: ignore[index]

    failed = threading.Event()
    asked = Asked(llm, prompt(5), LONG, timeout=0.05)
    asked.request.deliver = lambda event: failed.set()

    def submit() -> None:
        until(lambda: used)
        llm._runner.submit([asked.request])

    thread = threading.Thread(target=submit)
    thread.start()
    llm.score(Slow(prompt(120)), 0, use)
    joined(thread)
    assert failed.is_set() and isinstance(asked.request.error, RequestTimeoutError) and idle(llm)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "5", True])
def test_a_timeout_is_a_number_above_zero(seconds: object) -> None:
    llm = toy_llm()
    for name in ("timeout", "queue_timeout"):
        with pytest.raises(RequestError, match=f"^{name} must be a number of seconds above 0"):
            llm._runner.request([1], LONG, **{name: seconds})  # type: ignore[arg-type]
    assert token_ids(ask(llm, prompt(3), LONG, timeout=1e300, queue_timeout=float("inf"))) == answer(prompt(3))


def test_the_queue_is_bounded() -> None:
    """Requests for which a row is free do not wait; of the others the newest are refused, before the next step."""
    executor, llm = held(max_batch=2, max_queue=3)
    asked = [Asked(llm, prompt(10, n), LONG) for n in range(8)]
    llm._runner.submit([one.request for one in asked])
    executor.wait_for(0)
    assert [one.request.error is not None for one in asked] == [False] * 5 + [True] * 3
    for one in asked[5:]:
        assert one.rest() == [None] and isinstance(one.request.error, QueueFullError)
        assert "3 requests are waiting already" in str(one.request.error)
    assert (llm.stats().running, llm.stats().waiting, llm.stats().rejected) == (2, 3, 3)
    llm._runner.abort([asked[3].request])
    late = [ask(llm, prompt(10, n), LONG) for n in (20, 21)]
    executor.release()
    assert [token_ids(one) for one in (*asked[:3], asked[4], late[0])] == [
        answer(prompt(10, n)) for n in (0, 1, 2, 4, 20)
    ]
    assert late[1].rest() == [None] and idle(llm)


@pytest.mark.parametrize("end", ["abort", "timeout"])
def test_a_request_that_ended_before_the_step_is_not_refused(end: str) -> None:
    """It arrives at a full queue and ends before the next step: once, and not as refused."""
    executor, llm = held(max_batch=1, max_queue=1)
    first = ask(llm, prompt(10), LONG)
    executor.wait_for(0)
    second = ask(llm, prompt(10, 1), LONG)
    executor.let()
    executor.wait_for(1)
    # Two more wait, too many by one even without `ending`: `late` is refused, and `ending` is not asked.
    late = ask(llm, prompt(10, 2), LONG)
    ending = ask(llm, prompt(10, 3), LONG, **({"timeout": 1e-6} if end == "timeout" else {}))
    if end == "abort":
        llm._runner.abort([ending.request])
    executor.release()
    last = ending.rest()[-1]
    if end == "abort":
        assert last is not None and last.finish_reason == "abort" and ending.request.error is None
    else:
        assert last is None and isinstance(ending.request.error, RequestTimeoutError)
    assert late.rest() == [None] and isinstance(late.request.error, QueueFullError)
    assert [token_ids(one) for one in (first, second)] == [answer(prompt(10)), answer(prompt(10, 1))]
    assert ending.events.empty() and llm.stats().rejected == 1 and idle(llm)


def test_a_preempted_request_is_not_refused() -> None:
    executor = ToyExecutor(n_pages=12, page_size=8)
    llm = toy_llm(executor, context=96, prefix_cache=False, max_queue=1)
    asked = [Asked(llm, prompt(30, n), LONG) for n in range(2)]
    llm._runner.submit([one.request for one in asked])
    assert [token_ids(one) for one in asked] == [answer(prompt(30, n)) for n in range(2)]
    assert llm.stats().preemptions > 0 and llm.stats().rejected == 0


def test_clients_take_turns() -> None:
    """One that asks for much does not block another; within a client the order stays."""
    executor, llm = held(max_batch=1)
    order: list[str] = []
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    asked = [
        (name, Asked(llm, [ord(name[0])] * 3, params, salt=name[:1].encode()))
        for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0")
    ]
    for name, one in asked:
        one.request.deliver = lambda event, name=name: event.finish_reason and order.append(name)
    llm._runner.submit([one.request for _, one in asked])
    executor.release()
    until(lambda: settled(llm) and len(order) >= len(asked))
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_a_client_that_waits_for_its_own_prefix_is_overtaken() -> None:
    """Its pages are being computed by another request of its own; one of another client starts meanwhile."""
    executor, llm = held(max_batch=3, prefill_chunk=16)
    system = prompt(130)
    first, second = (ask(llm, [*system, n], LONG, salt=b"a") for n in (1, 2))
    other = ask(llm, prompt(5), LONG, salt=b"b")
    executor.let(2)
    executor.wait_for(2)
    assert [one.request.start_time is not None for one in (first, second, other)] == [True, False, True]
    executor.release()
    assert token_ids(second) == answer([*system, 2]) and second.request.cached == 128


def test_salts_share_nothing() -> None:
    llm = toy_llm()
    text = prompt(200)

    def cached(salt: bytes) -> int:
        asked = ask(llm, text, LONG, salt=salt)
        assert token_ids(asked) == answer(text)
        return asked.request.cached

    first = [cached(salt) for salt in (b"", b"a", b"b", b"ab")]
    assert first == [0] * 4
    assert [cached(salt) for salt in (b"", b"a", b"b", b"ab")] == [192] * 4
    # the key of a page is no salt under which that page's successor is found
    asked = ask(llm, text, LONG)
    asked.rest()
    assert cached(asked.request.keys[0]) == 0 and ask(llm, text[32:], LONG, salt=asked.request.keys[0]).rest()
    assert (
        ask(llm, text[32:], LONG, salt=np.asarray(text[:32], np.int32).tobytes()).request.keys[0]
        != asked.request.keys[1]
    )
    with pytest.raises(RequestError, match="salt must be bytes"):
        ask(llm, text, LONG, salt="a")


def test_two_prompts_share_a_step_and_the_short_one_is_first() -> None:
    executor, llm = held(prefill_chunk=32)
    long, short = ask(llm, prompt(300), LONG), ask(llm, prompt(20), LONG)
    executor.let(3)
    executor.wait_for(3)
    assert len(short.request.tokens) > 20 and long.request.computed < 100
    executor.release()
    assert token_ids(long) == answer(prompt(300)) and token_ids(short) == answer(prompt(20))


def test_shares_are_equal_and_use_all_room() -> None:
    assert shares(10, [3, 100, 4]) == [3, 3, 4] or shares(10, [3, 100, 4]) == [3, 4, 3]
    assert shares(512, [512]) == [512] and shares(512, []) == []
    rng = random.Random(0)
    for _ in range(200):
        wanted = [rng.randint(1, 50) for _ in range(rng.randint(1, 8))]
        room = rng.randint(len(wanted), 150)
        got = shares(room, wanted)
        assert sum(got) == min(room, sum(wanted)) and all(
            0 < one <= most for one, most in zip(got, wanted, strict=True)
        )
        short = [one for one, most in zip(got, wanted, strict=True) if one < most]
        assert not short or (max(got) <= max(short) and max(short) - min(short) <= 1)


# ---------------------------------------------------------------- idle work, statistics


def test_idle_work_runs_between_requests_until_it_is_done() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    left = [3]
    done = threading.Event()

    def work() -> bool:
        assert llm.stats().running == llm.stats().waiting == 0
        left[0] -= 1
        if left[0] <= 0:
            done.set()
        return left[0] > 0

    llm._runner.when_idle(work)
    assert llm.sparsity is None
    assert left == [3], "not before the first request"
    llm.generate("a", LONG)
    assert done.wait(60) and settled(llm) and left == [0]
    llm.generate("a", LONG)
    settled(llm)
    assert left == [-1], "again after the next one"

    def fails() -> bool:
        left[0] -= 10
        raise PowerInferError("no more")

    llm._runner.when_idle(fails)
    for _ in range(2):
        llm.generate("a", LONG)
        settled(llm)
    assert left == [-11]


def test_statistics() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    for _ in range(2):
        llm.generate([prompt(70)], replace(LONG, max_tokens=10))
    stats = settled(llm)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.answer_tokens) == (140, 64, 20)
    assert (stats.pages, stats.used_pages, stats.reusable_pages) == (64, 0, 2)
    assert stats.steps == len(executor.sizes) == (2 + 9) + (1 + 9) and stats.step_s > 0
    assert (stats.running, stats.waiting, stats.aborted, stats.rejected, stats.timed_out, stats.preemptions) == (0,) * 6


# ---------------------------------------------------------------- the end of the thread


def test_a_model_that_is_dropped_ends_its_thread() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    assert llm._runner._driver._thread is None, "it starts with the first request"
    llm.generate("a", LONG)
    thread, there = llm._runner._driver._thread, weakref.ref(executor)
    assert thread is not None and thread.daemon
    stream = llm.stream("a", LONG)
    next(stream)
    del llm, executor
    gc.collect()
    assert thread.is_alive(), "the stream uses it"
    del stream
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert there() is None


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    begin = (
        "import os, signal, sys, threading\nfrom powerinfer import LLM, RequestError, SamplingParams\n"
        "llm = LLM(sys.argv[1], threads=2)\n"
        "long = SamplingParams(max_tokens=100, ignore_eos=True)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", begin + code, str(tiny_llama(tmp_path / "m.gguf"))]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(60)", -2, "KeyboardInterrupt"),
        ("llm.close()", 0, ""),
    ],
)
def test_exit_with_a_running_stream(end: str, status: int, error: str, tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGINT, signal.default_int_handler)\nstream = llm.stream([1], long)\nnext(stream)\n"
    done = run(code + end, tmp_path)
    assert done.returncode == status
    assert error in done.stderr and bool(error) == bool(done.stderr) and "terminate" not in done.stderr


def test_a_forked_process_is_refused_and_ends(tmp_path: Path) -> None:
    """It never waits for a thread that it does not have; the first process goes on."""
    code = """
stream = llm.stream([1], long)
next(stream)
child = os.fork()
if not child:
    for use in (lambda: llm.generate([[1]]), lambda: next(llm.stream([1])), lambda: llm.score([1], 0, print)):
        try:
            use()
        except RequestError as error:
            print(error, flush=True)
    llm.stats(), llm.sparsity
    stream.close()
    llm.close()
    os._exit(5)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, len(list(stream)), llm.generate([[1]], long)[0].completion_tokens)
"""
    done = run(code, tmp_path)
    assert done.stderr == "" and done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all("forked after this model was loaded" in line for line in lines[:3])
    assert lines[3] == "5 99 100"
