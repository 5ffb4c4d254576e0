"""States of sequences: which are kept, who waits for them, and that all slots come back; on the toy model, whose next
value depends on its state, and on a tiny model with Gated DeltaNet."""

from __future__ import annotations

import random

import numpy as np
import pytest
from toy_model import ToyExecutor, ask, idle, reference_greedy, toy_llm

from powerinfer.devices.states import state_slots
from powerinfer.errors import RequestError
from powerinfer.runtime import state_cache
from powerinfer.runtime.params import SamplingParams


def greedy(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 256, length).tolist()


def with_states(requests: int = 8, **options: int) -> ToyExecutor:
    return ToyExecutor(n_states=state_slots(requests, True), **options)


def answer(llm, tokens: list[int], max_tokens: int = 1) -> int:
    """Cached tokens of an answer, which is the right one."""
    found = llm.generate([tokens], greedy(max_tokens))[0]
    assert found.token_ids == toy_llm(context=1024).generate([tokens], greedy(max_tokens))[0].token_ids
    assert idle(llm)
    return found.cached_tokens


def test_a_prompt_goes_on_where_it_ended() -> None:
    executor = with_states()
    llm = toy_llm(executor)
    base = prompt(100)
    assert answer(llm, base) == 0
    executor.positions.clear()
    assert answer(llm, base) == 96
    assert executor.positions == list(range(96, 100))
    assert answer(llm, base + prompt(40, 1)) == 96, "more of the same text"
    assert answer(llm, base + prompt(40, 1)) == 128
    assert answer(llm, base[:64]) == 0, "the state at an earlier place is not known"
    assert answer(llm, base[:64]) == 32


def test_a_state_is_kept_where_prompts_part() -> None:
    executor = with_states()
    llm = toy_llm(executor)
    system = prompt(200)
    assert answer(llm, system + prompt(30, 1)) == 0
    assert answer(llm, system + prompt(30, 2)) == 0, "it keeps the state at the last common page"
    assert answer(llm, system + prompt(30, 3)) == 192
    assert answer(llm, prompt(100, 9) + prompt(30, 4)) == 0
    assert answer(llm, prompt(100, 9) + prompt(30, 5)) == 0
    assert answer(llm, prompt(100, 9) + prompt(30, 6)) == 0, "what they share is too short to be kept"


def test_requests_that_come_together_compute_a_shared_prefix_once() -> None:
    executor = with_states()
    llm = toy_llm(executor)
    system = prompt(130)
    prompts = [system + prompt(5, seed) for seed in range(6)]
    answers = llm.generate(prompts, greedy(3))
    for one, found in zip(prompts, answers, strict=True):
        assert found.token_ids == reference_greedy(one, 3)[:3] or len(reference_greedy(one, 3)) < 3
    assert sum(position < 128 for position in executor.positions) == 128
    assert idle(llm)


def test_several_answers_to_one_prompt() -> None:
    executor = with_states(4)
    llm = toy_llm(executor, max_batch=4)
    base = prompt(100)
    llm.generate([base] * 4, greedy(40))
    assert sum(position < 96 for position in executor.positions) == 96
    assert idle(llm)


def test_who_waits_for_a_state_goes_on_when_its_maker_ends() -> None:
    executor = with_states(max_tokens=16)
    llm = toy_llm(executor, prefill_chunk=16)
    executor.held = True
    system = prompt(150)
    first, waiting = ask(llm, [*system, 2], greedy(3)), ask(llm, [*system, 3], greedy(3))
    executor.let()
    executor.wait_for(1)
    assert llm.stats().running == llm.stats().waiting == 1
    llm._runner.abort([first.request])
    executor.release()
    assert [event and event.token_id for event in waiting.rest()] == toy_llm().generate([[*system, 3]], greedy(3))[
        0
    ].token_ids
    assert idle(llm)


def test_nobody_waits_for_the_state_of_a_request_that_ended() -> None:
    executor = with_states(1, max_tokens=32)
    llm = toy_llm(executor, max_batch=1, prefill_chunk=32)
    executor.held = True
    base = prompt(150)
    first = ask(llm, base, greedy(1))
    executor.let()
    executor.wait_for(1)
    llm._runner.abort([first.request])
    executor.release()
    assert idle(llm)
    assert answer(llm, base) == 0
    for seed in range(1, 4):  # whose states take the place of that one; its pages stay
        assert answer(llm, prompt(70, seed)) == 0
    assert answer(llm, base) == 0


def test_a_long_answer_keeps_its_newest_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "_INTERVAL", 64)
    executor = with_states(2)
    llm = toy_llm(executor, max_batch=2)
    first = llm.generate([prompt(20)], greedy(200))[0]
    history = prompt(20) + first.token_ids
    executor.positions.clear()
    assert answer(llm, [*history, 1, 2, 3]) == 192
    assert min(executor.positions) == 192
    assert answer(llm, history[:180]) == 0, "the state before the newest one is gone"


def test_a_long_prompt_that_was_aborted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "_INTERVAL", 64)
    executor = with_states(2, max_tokens=32)
    llm = toy_llm(executor, max_batch=2, prefill_chunk=32)
    executor.held = True
    base = prompt(300)
    first = ask(llm, base, greedy(1))
    executor.let(5)
    executor.wait_for(5)  # five calls were computed: 160 tokens
    llm._runner.abort([first.request])
    executor.release()
    assert idle(llm)
    assert answer(llm, base) in (128, 192), "a sixth call had begun"


def test_the_least_recently_used_state_goes_first() -> None:
    executor = with_states(2)  # three may be kept once no request runs, and two beside one that does
    llm = toy_llm(executor, max_batch=2)
    texts = [prompt(70, seed) for seed in range(6)]
    for text in texts:
        assert answer(llm, text) == 0
    assert answer(llm, texts[5]) == 64 and answer(llm, texts[4]) == 64
    assert answer(llm, texts[0]) == 0


def test_a_failed_step_leaves_no_state_behind() -> None:
    executor = with_states()
    llm = toy_llm(executor, prefill_chunk=64)
    executor.fail_at[1] = RequestError("no")
    base = prompt(200)
    with pytest.raises(RequestError, match="no"):
        llm.generate([base], greedy(1))
    assert idle(llm)
    assert answer(llm, base) == 0
    assert answer(llm, base) == 192


def test_scoring_has_a_state_of_its_own() -> None:
    executor = with_states(1)
    llm = toy_llm(executor, max_batch=1)
    seen: list[int] = []
    llm.score(prompt(100), 50, lambda position, rows: seen.append(position))
    assert seen and idle(llm)
    assert answer(llm, prompt(100)) == 0


def test_embeddings_keep_no_states() -> None:
    executor = with_states(2)
    llm = toy_llm(executor, max_batch=2)
    once = llm.embed([prompt(100), prompt(100)])
    assert np.array_equal(once[0], once[1])
    assert np.array_equal(once, toy_llm().embed([prompt(100), prompt(100)]))
    assert idle(llm)


@pytest.mark.parametrize("seed", range(24))
def test_random_traffic(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages, few slots, a small cache, shared beginnings: always the answer of each alone."""
    rng = random.Random(seed)
    page_size = rng.choice([2, 4, 8])
    monkeypatch.setattr(state_cache, "_INTERVAL", page_size * rng.choice([1, 2, 5]))
    monkeypatch.setattr(state_cache, "_WORTH", page_size * rng.choice([1, 3]))
    context = rng.choice([48, 64])
    requests, reuse = rng.randint(1, 6), rng.random() < 0.8
    executor = ToyExecutor(
        n_pages=rng.randint(context // page_size, 3 * context // page_size),
        page_size=page_size,
        max_tokens=rng.choice([4, 16, 64]),
        n_states=requests + 1 + reuse if rng.random() < 0.5 else state_slots(requests, reuse),
    )
    llm = toy_llm(
        executor, context=context, max_batch=requests, prefill_chunk=rng.choice([1, 5, 64]), prefix_cache=reuse
    )
    roots = [prompt(rng.randint(1, 30), n) for n in range(3)]
    for round_ in range(3):
        prompts = [rng.choice(roots) + prompt(rng.randint(0, 8), round_) for _ in range(rng.randint(1, 12))]
        tokens = rng.randint(1, context - 38)
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens))
        for one, found in zip(prompts, answers, strict=True):
            assert found.token_ids == reference_greedy(one, tokens)
        assert idle(llm)
        roots.append(prompts[0][:30])
