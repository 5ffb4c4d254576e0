"""Steps that are launched before the host has looked at their tokens: the answers are those without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparse_models import tiny_llama
from test_scheduler import greedy, prompt
from toy_model import ToyExecutor, ask, idle, settled, toy_llm

from benchmarks.speed.python_share import measure_host
from powerinfer.devices import Batch
from powerinfer.devices.batch import LogitsNeed
from powerinfer.errors import PowerInferError
from powerinfer.kernels.candidates import CANDIDATES, LIKELIEST, drawn_token
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def candidates_of(logits: np.ndarray, inverse_temperatures: np.ndarray) -> np.ndarray:
    """Records as a device makes them."""
    records = np.zeros(len(logits), CANDIDATES)
    for record, row, sharpness in zip(records, logits, inverse_temperatures, strict=True):
        ids = np.flatnonzero(row >= np.partition(row, -LIKELIEST)[-LIKELIEST])
        record["count"], record["ids"][: len(ids)], record["values"][: len(ids)] = len(ids), ids, row[ids]
        record["total"] = np.exp((row - row.max()) * sharpness).sum()
    return records


class AheadExecutor(ToyExecutor):
    """Computes a batch's successor, and writes to its pages, before it returns the batch's tokens."""

    overlaps = True

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.next: tuple[Batch, np.ndarray] | None = None
        self.collected = self.void = self.undrawn = 0

    def forward(self, batch: Batch) -> np.ndarray:
        launched, self.next = self.next, None
        if launched is not None and launched[0] is batch:
            self.collected += 1
            logits = launched[1]
        else:
            self.void += launched is not None
            logits = super().forward(batch)
        if batch.needs == LogitsNeed.LOGITS:
            assert batch.successor is None
            batch.overlap()
            return logits
        drawn = batch.needs == LogitsNeed.CANDIDATES
        if drawn:
            assert batch.inverse_temperatures is not None
            result = candidates_of(logits, batch.inverse_temperatures)
            batch.logits = lambda: logits
        else:
            result = logits.argmax(axis=1).astype(np.int32)
        following = None if batch.successor is None else batch.successor()
        if following is not None:
            tokens = result
            if drawn:
                assert following.draws is not None
                tokens = np.array(list(map(drawn_token, result, map(tuple, following.draws.tolist()))), np.int32)
            following.tokens[:] = tokens
            there = replace(following, tokens=np.maximum(tokens, 0))
            self.next = following, super().forward(there)
            self.undrawn += int(tokens.min() < 0)
            result = result if tokens.min() < 0 else tokens
        batch.overlap()
        return result

    def hidden_states(self, rows: np.ndarray) -> np.ndarray:
        assert self.next is None, "they are those of another step"
        return super().hidden_states(rows)


@pytest.mark.parametrize("max_batch", [1, 3])
def test_answers_are_those_without(max_batch: int) -> None:
    """Requests that end at different times, by a token and by their length, and others that wait; then prompts that
    begin with whole answers, whose pages are found."""
    executor, plain = AheadExecutor(), ToyExecutor()
    llm, other = toy_llm(executor, max_batch=max_batch), toy_llm(plain, max_batch=max_batch)
    prompts = [prompt(length) for length in (1, 31, 32, 33, 60, 2)]
    params = [replace(greedy(length), stop_token_ids=[*range(0, 256, 60)]) for length in (40, 9, 70, 33, 5, 64)]
    reasons = set()
    for _ in range(2):
        ours, wanted = (one.generate(prompts, params) for one in (llm, other))
        for answer, right in zip(ours, wanted, strict=True):
            assert (answer.token_ids, answer.text) == (right.token_ids, right.text)
            assert (answer.finish_reason, answer.cached_tokens) == (right.finish_reason, right.cached_tokens)
            reasons.add(answer.finish_reason)
        prompts = [text + answer.token_ids + prompt(3, 5) for text, answer in zip(prompts, ours, strict=True)]
    assert any(answer.cached_tokens >= 64 for answer in ours) and reasons == {"stop", "length"}
    assert executor.collected > 60 and 0 < executor.void <= 12
    steps = settled(llm).steps
    assert idle(llm) and steps == settled(other).steps == len(plain.sizes), "what is void is no step"
    assert len(executor.sizes) == steps + executor.void + (executor.next is not None)


@pytest.mark.parametrize("stops", [lambda ids, text: {"stop_token_ids": ids[9:10]},
                                   lambda ids, text: {"stop": [text[12:15]]},
                                   lambda ids, text: {"max_tokens": 1}])  # fmt: skip
def test_what_ends_an_answer(stops: Callable[[list[int], str], dict[str, Any]]) -> None:
    """In the middle, while another one goes on."""
    whole = toy_llm().generate([prompt(20)], LONG)[0]
    params = [replace(LONG, **stops(whole.token_ids, whole.text)), LONG]
    executor = AheadExecutor()
    llm = toy_llm(executor, max_batch=2)
    ours, wanted = (one.generate([prompt(20), prompt(30)], params) for one in (llm, toy_llm(max_batch=2)))
    for answer, right in zip(ours, wanted, strict=True):
        assert (answer.token_ids, answer.text) == (right.token_ids, right.text)
        assert answer.finish_reason == right.finish_reason
    assert len(ours[0].token_ids) < 20 and executor.collected > 40 and executor.void <= 2 and idle(llm)


def test_pages_that_are_lacking() -> None:
    """Requests are put back, and computed again."""
    executor = AheadExecutor(n_pages=24, page_size=8)
    llm = toy_llm(executor, context=192, max_batch=4)
    prompts = [prompt(20, seed) for seed in range(6)]
    answers = llm.generate(prompts, LONG)
    plain = toy_llm().generate(prompts, LONG)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert settled(llm).preemptions and executor.collected > 30 and idle(llm)


def test_requests_that_come_and_go() -> None:
    """One is aborted, and one is submitted, while a step that neither knows of has been launched."""
    executor = AheadExecutor()
    executor.held = True
    llm = toy_llm(executor, max_batch=3)
    first, second = ask(llm, prompt(10), LONG), ask(llm, prompt(12), LONG)
    executor.let(6)
    executor.wait_for(6)
    llm._runner.abort([first.request])
    third = ask(llm, prompt(14), LONG)
    executor.release()
    last = first.rest()[-1]
    assert last is not None and last.finish_reason == "abort" and last.completion is not None
    got = last.completion.token_ids
    assert got == toy_llm().generate([prompt(10)], LONG)[0].token_ids[: len(got)] and got
    for asked, text in ((second, prompt(12)), (third, prompt(14))):
        ids = [event.token_id for event in asked.rest() if event is not None]
        assert ids == toy_llm().generate([text], LONG)[0].token_ids
    assert executor.void and executor.collected and idle(llm)


def test_a_step_that_fails() -> None:
    """It was launched ahead: its requests fail, and the next ones are right."""
    executor = AheadExecutor()
    llm = toy_llm(executor)
    executor.fail_at[7] = PowerInferError("the device failed")
    with pytest.raises(PowerInferError, match="the device failed"):
        llm.generate([prompt(20)], LONG)
    assert idle(llm)
    assert llm.generate([prompt(20)], LONG)[0].token_ids == toy_llm().generate([prompt(20)], LONG)[0].token_ids


@pytest.mark.parametrize("hot", [False, True])
def test_sampled_answers(hot: bool) -> None:
    """Beside a greedy one, with all settings, and others that wait; with the same seeds they are those without. hot: at
    a temperature at which candidates often do not suffice, so that hardly anything is launched ahead."""
    executor = AheadExecutor()
    llm, other = toy_llm(executor, max_batch=3), toy_llm(max_batch=3)
    settings: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40}, {"temperature": 0.0}, {"temperature": 1.1, "top_k": 1},
        {"temperature": 0.5, "top_k": 0, "top_p": 0.8}, {"temperature": 1.0, "top_k": 0, "min_p": 0.1, "top_p": 1.0},
    ]  # fmt: skip
    if hot:
        settings = [{"temperature": 1.6, "top_k": 0, "top_p": 0.85}] * 5
    lengths = (70, 9, 40, 33, 50)
    params = [
        replace(LONG, **{"min_p": 0.0, **one}, seed=seed, max_tokens=length)
        for seed, (one, length) in enumerate(zip(settings, lengths, strict=True))
    ]
    prompts = [prompt(length) for length in (5, 31, 12, 40, 2)]
    for _ in range(2):
        ours, wanted = (one.generate(prompts, params) for one in (llm, other))
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in wanted]
    assert len(set(map(tuple, (answer.token_ids for answer in ours)))) == 5 and idle(llm)
    assert (executor.undrawn > 0) == hot
    assert executor.collected < 60 if hot else executor.collected > 120
    assert executor.void <= 12


@pytest.mark.parametrize("what", ["sampled", "logprobs", "penalties", "states", "embedding"])
def test_where_more_than_the_tokens_is_unknown(what: str) -> None:
    """Nothing is launched ahead, also not for a greedy answer beside."""
    executor = AheadExecutor(n_states=4 if what == "states" else 0)
    llm = toy_llm(executor, max_batch=2)
    other = {
        "sampled": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3},
        "logprobs": {"logprobs": 0},
        "penalties": {"presence_penalty": 0.5},
    }.get(what, {})  # fmt: skip
    params = [replace(LONG, **other), replace(LONG, max_tokens=58)]
    if what == "embedding":
        whole = ask(llm, prompt(9), LONG)
        llm.embed([prompt(11)])
        assert len(whole.rest()) == 60
    else:
        answers = llm.generate([prompt(9), prompt(11)], params)
        plain = toy_llm(ToyExecutor(n_states=executor.n_states), max_batch=2).generate([prompt(9), prompt(11)], params)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        assert not executor.collected
    assert idle(llm)


class ForgetfulExecutor(ToyExecutor):
    """Asks for a batch's successor, and does not launch it."""

    def forward(self, batch: Batch) -> np.ndarray:
        if batch.successor is not None:
            batch.successor()
        return super().forward(batch)


def test_a_successor_that_was_not_launched_is_not_followed() -> None:
    wanted = toy_llm().generate([prompt(20)], LONG)[0].token_ids
    assert toy_llm(ForgetfulExecutor()).generate([prompt(20)], LONG)[0].token_ids == wanted


def test_nothing_is_under_way_when_the_engines_thread_has_ended() -> None:
    """Though nobody closes the model."""
    executor, dropped = AheadExecutor(), list[bool]()
    executor.drop_successor = lambda: dropped.append(True)  # type: ignore[attr-defined]
    llm = toy_llm(executor)
    llm.generate([prompt(9)], LONG)
    driver, before = llm._runner._driver, len(dropped)
    driver.stop()
    driver.join()
    assert len(dropped) > before


def test_texts_that_are_scored_between_steps() -> None:
    executor = AheadExecutor()
    llm: LLM = toy_llm(executor, max_batch=2)
    wanted, seen = toy_llm().generate([prompt(20)], LONG)[0].token_ids, list[int]()
    asked = ask(llm, prompt(20), LONG)
    llm._runner.score([prompt(40)], [0], lambda text, at, logits: seen.append(len(logits)), 1)
    assert sum(seen) == 40
    assert [event.token_id for event in asked.rest() if event is not None] == wanted
    assert idle(llm)


def test_python_calls_of_a_token(tmp_path: Path) -> None:
    """What the engine's thread does in Python for a token of a model that a GPU has, launched ahead: 51, and 55 where
    it is sampled."""
    pytest.importorskip("torch")
    document = measure_host(tiny_llama(tmp_path / "m.gguf"), "cpu", 1, 64, 0)
    assert document["greedy"]["calls"]["python"] < 52
    assert document["sampled"]["calls"]["python"] < 56
