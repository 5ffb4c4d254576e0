"""Continuous batching: what each step computes, admission, preemption, prefix reuse; on the toy model."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from toy_model import EOS, ToyExecutor, ask, idle, reference_greedy, toy_llm

from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams


def greedy(max_tokens: int | None = 20) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 256, length).tolist()


def check(llm: LLM, prompts: list[list[int]], max_tokens: int = 20) -> None:
    """Every answer is the one that its prompt has alone, and all pages come back."""
    answers = llm.generate(prompts, greedy(max_tokens))
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference_greedy(one, max_tokens)
        assert answer.prompt_tokens == len(one)
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == EOS else "length")
    assert idle(llm)


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_answers_do_not_depend_on_batch_and_chunk(max_batch: int, chunk: int) -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor, max_batch=max_batch, prefill_chunk=chunk)
    prompts = [prompt(length) for length in (1, 31, 32, 33, 64, 65, 100, 2)]
    check(llm, prompts)
    assert max(executor.sequences) <= max_batch
    if chunk == 64:
        assert max(executor.sequences) == max_batch
    assert max(executor.sizes) <= chunk + max_batch


@pytest.mark.parametrize("mixed", [15, 4])
def test_requests_join_and_leave_at_any_step(mixed: int) -> None:
    """A long prompt is computed in pieces beside the decoding of others, which never wait."""
    executor = ToyExecutor(max_tokens=16)
    llm = toy_llm(executor, max_batch=2, prefill_chunk=16, mixed_chunk=mixed)
    executor.held = True
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    first = ask(llm, prompt(3), params)
    executor.let(5)
    executor.wait_for(5)
    second = ask(llm, prompt(60), replace(params, max_tokens=5))
    pieces = 60 // mixed
    executor.let(1 + pieces)
    executor.wait_for(6 + pieces)
    assert executor.sizes == [3] + [1] * 5 + [mixed + 1] * pieces
    assert first.events.qsize() == 6 + pieces, "a token at every step"
    executor.release()
    assert len(first.rest()) == 40 and len(second.rest()) == 5
    assert executor.sizes[6 + pieces :] == [2] * 4 + [1] * (30 - pieces)
    assert idle(llm)


def test_the_first_prompts_of_a_call_share_a_step() -> None:
    executor = ToyExecutor()
    toy_llm(executor).generate([prompt(5), prompt(6), prompt(7)], greedy(3))
    assert executor.sizes[0] == 18


def test_preemption_changes_nothing() -> None:
    """Four requests grow to 10 pages each in a cache of 24: the youngest are put back, computed again, and agree."""
    executor = ToyExecutor(n_pages=24, page_size=8)
    llm = toy_llm(executor, context=192, max_batch=4, prefix_cache=False)
    prompts = [prompt(20, seed) for seed in range(6)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    alone = [toy_llm().generate([one], params)[0].token_ids for one in prompts]
    answers = llm.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == alone
    useful = sum(len(one) + 59 for one in prompts)
    assert len(executor.positions) > useful, "some tokens were computed twice: there was a preemption"
    assert idle(llm) and llm.stats().preemptions > 0


def test_sampling_goes_on_after_preemption() -> None:
    executor = ToyExecutor(n_pages=24, page_size=8)
    llm = toy_llm(executor, context=192, max_batch=4)
    prompts = [prompt(20, seed) for seed in range(6)]
    params = SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True, repetition_penalty=1.2)
    alone = [toy_llm().generate([one], params)[0] for one in prompts]
    answers = llm.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert all(answer.cached_tokens == 0 for answer in answers), "one's own recomputed pages are no cached prompt"


def test_a_request_that_fills_the_whole_cache() -> None:
    executor = ToyExecutor(n_pages=4, page_size=8)
    llm = toy_llm(executor, context=1000)
    assert llm.context == 32
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    answers = llm.generate([prompt(9, 1), prompt(30, 2)], params)
    assert [answer.completion_tokens for answer in answers] == [23, 2]
    assert [answer.finish_reason for answer in answers] == ["length", "length"]


def test_a_cached_prefix_is_not_computed_again() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    base = prompt(100)
    llm.generate([base], greedy(1))
    executor.positions.clear()
    for tail, cached in ([], 96), ([7], 96), (prompt(40, 1), 96):
        answer = llm.generate([base + tail], greedy(1))[0]
        assert answer.cached_tokens == cached
        assert answer.token_ids == reference_greedy(base + tail, 1)
        assert executor.positions == list(range(cached, len(base) + len(tail)))
        executor.positions.clear()
    other = [1, *base[1:]]
    assert llm.generate([other], greedy(5))[0].cached_tokens == 0
    check(llm, [base[:64], base[:65], base[:32] + base[:64]])


def test_the_last_prompt_token_is_always_computed() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    whole = prompt(64)
    llm.generate([whole], greedy(1))
    executor.positions.clear()
    assert llm.generate([whole], greedy(1))[0].cached_tokens == 32
    assert executor.positions == list(range(32, 64))


def test_pages_written_by_decode_are_reused() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    first = llm.generate([prompt(20)], params)[0]
    history = prompt(20) + first.token_ids  # 70 tokens, of which the last was not computed
    executor.positions.clear()
    second = llm.generate([[*history, 1, 2, 3]], params)[0]
    assert second.cached_tokens == 64
    assert min(executor.positions) == 64
    assert second.token_ids == toy_llm().generate([[*history, 1, 2, 3]], params)[0].token_ids


def test_requests_that_come_together_compute_a_shared_prefix_once() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    system = prompt(130)
    prompts = [system + prompt(5, seed) for seed in range(4)]
    check(llm, prompts, max_tokens=1)
    assert sum(position < 128 for position in executor.positions) == 128


def test_an_ended_request_does_not_hold_up_those_that_wait_for_its_prefix() -> None:
    executor = ToyExecutor(max_tokens=16)
    llm = toy_llm(executor, prefill_chunk=16)
    executor.held = True
    system = prompt(130)
    first, waiting = ask(llm, [*system, 2], greedy(3)), ask(llm, [*system, 3], greedy(3))
    executor.let()
    executor.wait_for(1)
    assert llm.stats().running == llm.stats().waiting == 1
    llm._runner.abort([first.request])
    executor.release()
    assert [event and event.token_id for event in waiting.rest()] == reference_greedy([*system, 3], 3)


def test_without_the_prefix_cache_everything_is_computed() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor, prefix_cache=False)
    for _ in range(2):
        executor.positions.clear()
        assert llm.generate([prompt(70)], greedy(1))[0].cached_tokens == 0
        assert executor.positions == list(range(70))


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic(seed: int) -> None:
    """Small pages, a small cache, prompts with shared beginnings, random sizes: always the answer of each alone."""
    rng = random.Random(seed)
    page_size = rng.choice([2, 4, 8])
    context = rng.choice([48, 64])
    n_pages = rng.randint(context // page_size, 3 * context // page_size)
    executor = ToyExecutor(n_pages=n_pages, page_size=page_size, max_tokens=rng.choice([4, 16, 64]))
    llm = toy_llm(
        executor,
        context=context,
        max_batch=rng.randint(1, 6),
        prefill_chunk=rng.choice([1, 5, 64]),
        prefix_cache=rng.random() < 0.8,
    )
    roots = [prompt(rng.randint(1, 30), n) for n in range(3)]
    for round_ in range(3):
        prompts = [rng.choice(roots) + prompt(rng.randint(0, 8), round_) for _ in range(rng.randint(1, 12))]
        check(llm, prompts, max_tokens=rng.randint(1, context - 38))
        roots.append(prompts[0][:30])
