"""Drafting ahead, on the toy model: the same answers and the same drafts, whatever the thread does; a trial that knows
whether it pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from test_speculation import PARAMS, PROMPTS, SimilarExecutor, _three, many, prompt, same, speculating  # noqa: F401
from toy_model import VOCAB, ToyExecutor, ask, idle, settled, toy_llm

from powerinfer.devices import Batch
from powerinfer.runtime.draft_ahead import AheadTrial, BesideThread
from powerinfer.runtime.draft_model import DraftModel
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.speculation import Speculation

ONE = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every step with drafts is one in which further ones are made."""
    monkeypatch.setattr(AheadTrial, "way", property(lambda _: True, lambda *_: None), raising=False)
    yield


def threads() -> int:
    return sum(thread.name == "powerinfer drafts" for thread in threading.enumerate())


class Slow(ToyExecutor):
    """A model whose step takes at least as long as what is drafted ahead meanwhile."""

    source: DraftModel | None = None

    def forward(self, batch: Batch) -> np.ndarray:
        thread = None if self.source is None else self.source.thread
        while thread is not None and thread._busy and thread._outcomes.empty():
            time.sleep(1e-4)
        return super().forward(batch)


@pytest.mark.parametrize("executor", [ToyExecutor, SimilarExecutor])
@pytest.mark.parametrize(("pages", "drafts"), [(64, 64), (26, 8)], ids=["room", "preempting"])
@pytest.mark.parametrize("slow", [False, True])
def test_answers_stay_the_same(
    many: None, ahead: None, executor: type[ToyExecutor], pages: int, drafts: int, slow: bool  # noqa: F811
) -> None:
    def target() -> ToyExecutor:
        return (Slow if slow else ToyExecutor)(n_pages=pages, page_size=8)

    context = 8 * 26
    plain = toy_llm(target(), context).generate(PROMPTS, PARAMS)
    source = DraftModel(executor(n_pages=drafts, page_size=16, max_tokens=24), VOCAB, ahead=True)
    model = target()
    model.source = source  # type: ignore[attr-defined]
    llm = speculating(source, model, context)
    for _ in range(2):
        assert all(map(same, llm.generate(PROMPTS, PARAMS), plain))
        assert idle(llm)
    stats = settled(llm).speculation
    assert stats.drafted >= stats.accepted > 0 and not stats.failed
    assert stats.ahead > 0 or not slow
    assert source._pages.available == drafts and not source._sequences
    llm.close()
    assert threads() == 0


def test_drafts_that_come_true_are_there_at_once(ahead: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed twice, and between the steps only what follows a draft that is unlikely, or the prompt."""
    monkeypatch.setattr(Speculation, "_counts", _three)
    small, model = ToyExecutor(), Slow()
    model.source = DraftModel(small, VOCAB, ahead=True)
    llm = speculating(model.source, model)
    answer = llm.generate([prompt(30)], ONE)[0]
    assert answer.token_ids == toy_llm().generate([prompt(30)], ONE)[0].token_ids
    assert small.positions == list(range(len(small.positions)))
    stats = settled(llm).speculation
    assert stats.accepted == stats.drafted > 20 and stats.ahead > 0.7 * stats.drafted
    llm.close()


def test_the_drafts_are_those_of_drafting_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind guesses that were wrong: what was computed for these is not read."""
    monkeypatch.setattr(Speculation, "_counts", _three)
    seen = list[Any]()
    for way in (False, True):
        monkeypatch.setattr(AheadTrial, "way", property(lambda _, way=way: way, lambda *_: None), raising=False)
        model = Slow()
        model.source = DraftModel(SimilarExecutor(), VOCAB, ahead=True)
        llm = speculating(model.source, model)
        answers = llm.generate([prompt(20), prompt(33)], ONE)
        stats = settled(llm).speculation
        assert 0 < stats.accepted < stats.drafted and (0 < stats.ahead < stats.drafted) == way
        seen.append([(one.token_ids, one.drafted, one.accepted) for one in answers])
        llm.close()
    assert seen[0] == seen[1]


def test_an_aborted_request_leaves_nothing(many: None, ahead: None) -> None:  # noqa: F811
    executor, source = ToyExecutor(), DraftModel(ToyExecutor(), VOCAB, ahead=True)
    executor.held = True
    llm = speculating(source, executor)
    asked = ask(llm, prompt(40), SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    executor.let(6)
    executor.wait_for(6)
    llm._runner.abort([asked.request])
    executor.release()
    asked.rest()
    assert idle(llm) and not source._sequences and source._pages.available == 64
    llm.close()
    assert threads() == 0


class Failing(ToyExecutor):
    """A model that fails in the thread that drafts ahead."""

    error: BaseException = RuntimeError("the device is gone")

    def forward(self, batch: Batch) -> np.ndarray:
        if threading.current_thread().name == "powerinfer drafts":
            raise self.error
        return super().forward(batch)


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), MemoryError()])
def test_an_error_in_the_thread_ends_drafts_alone(
    error: BaseException, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculation, "_counts", _three)
    small = Failing()
    small.error = error
    llm = speculating(DraftModel(small, VOCAB, ahead=True))
    assert all(map(same, llm.generate(PROMPTS, PARAMS), toy_llm().generate(PROMPTS, PARAMS)))
    assert settled(llm).speculation.failed and llm.drafts is None and small.closed and idle(llm)
    assert (str(error) or "MemoryError") in llm.choices["drafts"]
    assert threads() == 0
    llm.close()


def test_a_step_that_fails_waits_for_the_thread(many: None, ahead: None) -> None:  # noqa: F811
    executor, source = ToyExecutor(), DraftModel(ToyExecutor(), VOCAB, ahead=True)
    executor.fail_at = {8: MemoryError()}
    llm = speculating(source, executor)
    with pytest.raises(Exception, match="out of memory"):
        llm.generate([prompt(20)], ONE)
    assert idle(llm) and source.thread is not None and not source.thread._busy and not source._sequences
    assert llm.generate([prompt(9)], ONE)[0].token_ids == toy_llm().generate([prompt(9)], ONE)[0].token_ids
    llm.close()


def test_a_thread_ends_with_whoever_has_it() -> None:
    thread, seen = BesideThread(), list[bool]()
    thread.end()  # of nothing
    thread.begin(lambda stopped: seen.append(stopped()))
    thread.end()
    assert len(seen) == 1 and threads() == 1

    def waits(stopped: Any) -> None:
        while not stopped():
            time.sleep(1e-4)

    thread.begin(waits)
    thread.end()

    def fails(_: Any) -> None:
        raise ValueError("none")

    thread.begin(fails)
    with pytest.raises(ValueError, match="none"):
        thread.end()
    thread.begin(fails)
    thread.close()
    assert threads() == 0
    dropped = BesideThread()
    dropped.begin(lambda stopped: None)
    dropped.end()
    assert threads() == 1
    del dropped
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert threads() == 0


def run(trial: AheadTrial, beside: float, steps: int, noise: float = 0.1) -> float:
    """The share of steps in which drafts are made ahead. beside: seconds of such a step by one of the others."""
    random, ways = Random(3), 0
    for _ in range(steps):
        ways += trial.way
        tokens = random.randint(2, 5)
        seconds = 0.01 * tokens * random.uniform(1 - noise, 1 + noise) * (beside if trial.way else 1)
        trial.add(1, tokens, seconds)
    return ways / steps


@pytest.mark.parametrize(("beside", "least", "most"), [(0.7, 0.9, 1), (1.3, 0, 0.1)])
def test_a_trial_finds_what_pays(beside: float, least: float, most: float) -> None:
    trial = AheadTrial()
    assert least <= run(trial, beside, 3000) <= most
    run(trial, 2 - beside, 2000)
    later = run(trial, 2 - beside, 1000)
    assert later > 0.8 if beside > 1 else later < 0.2


def test_steps_of_other_sizes_are_not_compared() -> None:
    trial = AheadTrial()
    for step in range(200):
        trial.add(1, 2 if trial.way else 3 + step % 2, 0.01)
    assert trial._chosen is None


def test_a_thread_that_cannot_start_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    thread = BesideThread()
    with pytest.raises(RuntimeError, match="start new thread"):
        thread.begin(lambda stopped: None)
    thread.end()
    thread.close()
