"""The Python API on the toy model: answers, streams, stops, errors, interrupts, threads; perplexity."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sparse_models import tiny_llama
from toy_model import (
    BOS,
    EOS,
    VOCAB,
    Asked,
    ToyExecutor,
    ToyTokenizer,
    ask,
    idle,
    joined,
    reference_greedy,
    reference_logits,
    toy_llm,
    until,
)

from powerinfer.config import EngineConfig
from powerinfer.devices import Batch
from powerinfer.devices.batch import LogitsNeed
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.evaluate import Perplexity, perplexity
from powerinfer.kernels.candidates import CANDIDATES, LIKELIEST
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import Completion

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def ids(text: str) -> list[int]:
    return list(text.encode())


def text_of(tokens: Sequence[int]) -> str:
    return ToyTokenizer().decode(tokens)


def usable(llm: LLM) -> None:
    """Nothing runs, every page is free, and a new request gets the right answer."""
    assert idle(llm)
    assert llm.generate([ids("is it well?")], GREEDY)[0].token_ids == reference_answer("is it well?")


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Called in another thread: raises KeyboardInterrupt in the main one, once.

    The signal is repeated until then, as one that comes just before a thread sleeps does not wake it.
    """
    seen = threading.Event()

    def raises(*about: object) -> None:
        if not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not seen.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, raises)
    yield press
    signal.signal(signal.SIGINT, before)


def reference_answer(prompt: str, max_tokens: int = 30) -> list[int]:
    tokens = ids(prompt)
    for _ in range(max_tokens):
        tokens.append(int(reference_logits(tokens).argmax()))
    return tokens[-max_tokens:]


def test_generate_one_and_many() -> None:
    llm = toy_llm()
    one = llm.generate("hello", GREEDY)
    assert one.token_ids == reference_answer("hello")
    assert one.text == text_of(one.token_ids)
    assert (one.prompt_tokens, one.completion_tokens, one.finish_reason) == (5, 30, "length")
    many = llm.generate(
        ["hello", ids("world"), ids("hello")], [GREEDY, SamplingParams(temperature=0, max_tokens=4), GREEDY]
    )
    assert [answer.token_ids[:4] for answer in many] == [
        reference_answer(prompt)[:4] for prompt in ("hello", "world", "hello")
    ]
    assert [answer.completion_tokens for answer in many] == [30, 4, 30]
    assert llm.generate([]) == []


def test_stream_gives_what_generate_gives() -> None:
    llm = toy_llm()
    for params in (GREEDY, SamplingParams(seed=4, max_tokens=25), SamplingParams(temperature=0, stop="e")):
        whole = llm.generate("a prompt", params)
        events = list(llm.stream("a prompt", params))
        assert "".join(event.text for event in events) == whole.text
        assert [event.token_id for event in events] == whole.token_ids
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [whole.finish_reason]
        last = events[-1].completion
        assert last is not None and (last.text, last.token_ids) == (whole.text, whole.token_ids)
        assert all(event.completion is None for event in events[:-1])


def test_streams_may_be_read_in_turn() -> None:
    llm = toy_llm()
    streams = [llm.stream(prompt, GREEDY) for prompt in ("one", "two", "three")]
    rows = list(zip(*streams, strict=True))
    for n, prompt in enumerate(("one", "two", "three")):
        assert [row[n].token_id for row in rows] == reference_answer(prompt)


def test_the_end_token() -> None:
    """An end token ends the answer; it is counted, but not shown."""
    llm = toy_llm()
    ended = [llm.generate(f"prompt {n}", SamplingParams(temperature=0, max_tokens=400)) for n in range(8)]
    stopped = [answer for answer in ended if answer.finish_reason == "stop"]
    assert stopped, "the toy model must end some answers by itself"
    for n, answer in enumerate(ended):
        assert answer.token_ids == reference_greedy(ids(f"prompt {n}"), 400)
        assert answer.text == text_of(answer.token_ids)
        assert EOS not in answer.token_ids[:-1]
    on = [llm.generate(f"prompt {n}", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)) for n in range(8)]
    assert {answer.finish_reason for answer in on} == {"length"}
    assert any(EOS in answer.token_ids for answer in on)


def test_stop_tokens_and_stop_strings() -> None:
    llm = toy_llm()
    tokens = llm.generate("hello", GREEDY).token_ids
    at = next(n for n in range(5, 30) if tokens[n] not in tokens[:n] and tokens[n] < 128)
    stop = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[tokens[at]])
    answer = llm.generate("hello", stop)
    assert answer.finish_reason == "stop" and answer.token_ids == tokens[: at + 1]
    assert answer.text == text_of(tokens[:at])
    answer = llm.generate("hello", SamplingParams(temperature=0, max_tokens=30, stop=[chr(tokens[at])]))
    assert answer.finish_reason == "stop" and answer.token_ids == tokens[: at + 1]
    assert answer.text == text_of(tokens[:at])
    assert idle(llm)


def test_a_seed_gives_the_same_tokens_whatever_runs_beside() -> None:
    llm = toy_llm()
    params = SamplingParams(seed=11, temperature=1.3, max_tokens=40, ignore_eos=True)
    alone = llm.generate("hello", params).token_ids
    other = SamplingParams(seed=None, max_tokens=40)
    beside = llm.generate(["x", "hello", "yy", "zzz"], [other, params, other, GREEDY])[1].token_ids
    assert alone == beside
    assert alone != llm.generate("hello", SamplingParams(seed=12, temperature=1.3, max_tokens=40)).token_ids


def test_logprobs_are_the_models_own() -> None:
    llm = toy_llm()
    params = SamplingParams(seed=1, max_tokens=6, logprobs=3, repetition_penalty=1.5, ignore_eos=True)
    answer = llm.generate("hello", params)
    assert answer.logprobs is not None and len(answer.logprobs) == 6
    tokens = ids("hello")
    for token, got in zip(answer.token_ids, answer.logprobs, strict=True):
        logits = reference_logits(tokens).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert got.logprob == pytest.approx(expected[token], abs=1e-5)
        assert [one.token_id for one in got.top] == np.argsort(-expected)[:3].tolist()
        assert (got.token_id, got.bytes) == (token, llm.tokenizer.token_bytes(token))
        assert got.text == got.bytes.decode("utf-8", "replace")
        assert [one.bytes for one in got.top] == [llm.tokenizer.token_bytes(one.token_id) for one in got.top]
        tokens.append(token)
    assert llm.generate("hello", GREEDY).logprobs is None
    events = list(llm.stream("hello", params))
    assert [event.logprobs for event in events] == answer.logprobs


def test_timings() -> None:
    llm = toy_llm()
    timings = llm.generate("hello", GREEDY).timings
    assert timings.load_s == 0.0
    assert timings.ttft_s is not None and timings.ttft_s > 0
    assert timings.prefill_tok_s is not None and timings.prefill_tok_s >= 5 / timings.ttft_s
    assert timings.decode_tok_s is not None and timings.decode_tok_s > 0
    one = llm.generate("hello", SamplingParams(max_tokens=1)).timings
    assert one.decode_tok_s is None, "one token has no rate"
    assert asdict(one).keys() == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}


def test_progress_counts_answers() -> None:
    seen: list[tuple[str, int, int]] = []
    toy_llm(max_batch=2).generate(["a", "bb", "ccc"], GREEDY, progress=lambda *event: seen.append(event))
    assert [label for label, _, _ in seen] == ["answers"] * len(seen)
    counts = [done for _, done, _ in seen]
    assert counts == sorted(set(counts)) and counts[-1] == 3


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    llm = toy_llm(context=64)
    for prompt, max_tokens, numbers in (
        ([1] * 40, 25, "40 tokens and max_tokens 25 .* 64 tokens"),
        ([1] * 64, None, "64 tokens and at least 1 .* 64 tokens"),
        ([1] * 100, 1, "100 tokens and max_tokens 1 .* 64 tokens"),
    ):
        with pytest.raises(RequestError, match=numbers):
            llm.generate([prompt], SamplingParams(max_tokens=max_tokens))
        with pytest.raises(RequestError, match=numbers):
            llm.stream(prompt, SamplingParams(max_tokens=max_tokens))  # at once, not at the first token
    exact = llm.generate([[1] * 40], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]
    assert exact.completion_tokens == 24
    full = llm.generate([[1] * 40], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert (full.completion_tokens, full.finish_reason) == (24, "length")


def test_no_more_threads_than_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer.system.usable_cores", lambda: (1, "one"))
    path = tiny_llama(tmp_path / "m.gguf")
    with LLM(path, threads=9, gpu="none") as llm:
        assert llm.choices["threads"] == "1 (asked for)"
        assert llm.notes == ["--threads 9 becomes 1, the cores that this process may use"]
    with pytest.raises(RequestError, match="threads must be between 0"):
        LLM(path, threads=5000, gpu="none")


def test_wrong_requests_are_refused() -> None:
    llm = toy_llm()
    for prompts, message in (
        ([[]], "empty"),
        ([[3, VOCAB]], f"token {VOCAB}"),
        ([[3, -1]], "token -1"),
        ([1, 2, 3], "wrap the token ids"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 prompts came with 1 SamplingParams"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match=r"no option 'kv_typo'; did you mean kv_type"):
        LLM("nowhere.gguf", kv_typo="f16")
    for options, message in (
        ({"max_batch": 0}, "max_batch must be a whole number of at least 1, not 0"),
        ({"prefill_chunk": 2.5}, "prefill_chunk must be a whole number"),
        ({"recall_every": -1}, "recall_every must be a whole number of at least 0"),
        ({"context": -1}, "context must be a whole number of at least 0"),
        ({"vram": "8"}, r"vram: 8 has no unit: did you mean 8GiB\?$"),
        ({"vram": "8x"}, r"vram must be a size \(such as 8GiB, 500MB\), not '8x'$"),
        ({"ram": "-1GiB"}, "ram must be a size .*, not '-1GiB'"),
        ({"ram": -1}, "ram must be a size .*, a whole number of bytes or None, not -1$"),
        ({"ram": 1.5}, "ram must be a size .*, a whole number of bytes or None, not 1.5$"),
        ({"kv_type": "q4"}, "kv_type must be one of f16, q8_0, f32, not 'q4'"),
    ):
        with pytest.raises(RequestError, match=message):
            LLM("nowhere.gguf", **options)
    with pytest.raises(RequestError, match="no file or folder nowhere"):
        LLM("nowhere.gguf", recall_every=0)  # 0 is never, and no mistake
    usable(llm)


def test_a_failing_request_does_not_disturb_the_others() -> None:
    llm = toy_llm()
    nothing = SamplingParams(max_tokens=30, logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    good = llm.stream("hello", GREEDY)
    first = next(good)
    bad = llm.stream("world", nothing)
    with pytest.raises(RequestError, match="forbids every token"):
        next(bad)
    assert [first.token_id] + [event.token_id for event in good] == reference_answer("hello")
    with pytest.raises(RequestError, match="forbids every token"):
        llm.generate(["a", "b"], [GREEDY, nothing])
    usable(llm)
    asked = ask(llm, [1, 2], nothing)
    assert asked.rest() == [None]
    assert asked.request.ended and asked.request.completion is None
    usable(llm)


def test_a_closed_stream_frees_its_pages() -> None:
    llm = toy_llm()
    stream = llm.stream("hello", GREEDY)
    next(stream)
    stream.close()
    usable(llm)
    for _ in llm.stream("hello", GREEDY):
        break  # the generator goes with the loop
    usable(llm)
    llm.stream("never read", GREEDY)
    usable(llm)


@pytest.mark.parametrize("call", [0, 1, 4])
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_ctrl_c_while_waiting(way: str, call: int, ctrl_c: Callable[[], None]) -> None:
    """It ends the requests of this call within a step; one of somebody else goes on, and the prefix cache stays."""
    executor = ToyExecutor(max_tokens=16)
    llm = toy_llm(executor)
    executor.held = True
    other = ask(llm, ids("somebody else"), GREEDY)
    executor.wait_for(0)

    def interrupt() -> None:
        until(lambda: llm._runner._driver._commands.qsize() > 0)  # the main thread waits
        executor.let(call)
        executor.wait_for(call)
        ctrl_c()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        if way == "generate":
            llm.generate(["hello " * 10, "world"], GREEDY)
        else:
            list(llm.stream("hello " * 10, GREEDY))
    joined(thread)
    executor.let()
    executor.wait_for(call + 1)
    assert llm.stats().running == 1, "a step later only the other one runs"
    executor.release()
    assert [event and event.token_id for event in other.rest()] == reference_answer("somebody else")
    usable(llm)
    assert llm.stats().aborted == (2 if way == "generate" else 1)
    if call == 4:
        assert llm.generate("hello " * 10, GREEDY).cached_tokens == 32


def test_threads_share_the_engine() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    answers: dict[str, Completion] = {}

    def work(prompt: str) -> None:
        answers[prompt] = llm.generate(prompt, GREEDY)

    prompts = [f"thread {n}" for n in range(6)]
    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    joined(*threads)
    for prompt in prompts:
        assert answers[prompt].token_ids == reference_answer(prompt)
    usable(llm)


def test_close() -> None:
    executor = ToyExecutor()
    with toy_llm(executor) as llm:
        executor.held = True
        stream = llm.stream("hello", GREEDY)
        executor.let()
        assert next(stream).token_id == reference_answer("hello")[0]
        waiting = ask(llm, ids("never started"), GREEDY)
        closing = threading.Thread(target=llm.close)
        closing.start()
        until(lambda: llm._runner._driver._commands.qsize() == 2)
        assert not executor.closed, "not within a step"
        executor.release()
        joined(closing)
        assert executor.closed
    assert [event.finish_reason for event in stream] == [None, "abort"]
    assert [event and event.finish_reason for event in waiting.rest()] == ["abort"]
    llm.close()
    score = partial(llm.score, [1], 0, lambda at, logits: None)
    for use in (partial(llm.generate, "x"), partial(llm.stream, "x"), score, llm.every_neuron, llm.traced):
        with pytest.raises(RequestError, match="was closed"):
            use()


@pytest.mark.parametrize(
    "where", ["powerinfer.models.wire", "powerinfer.sparsity.attach.attach", "powerinfer.runtime.engine.Runner"]
)
def test_a_load_that_fails_closes_the_executor(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[CpuExecutor] = []

    def fails(*args: object, **more: object) -> None:
        raise PowerInferError("it failed")

    monkeypatch.setattr(CpuExecutor, "close", lambda executor: closed.append(executor))
    monkeypatch.setattr(where, fails)
    with pytest.raises(PowerInferError, match="it failed"):
        LLM(tiny_llama(tmp_path / "m.gguf"), context=64)
    assert len(closed) == 1


def test_a_bad_template_is_found_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []

    def fails(checkpoint: object) -> None:
        raise ModelError("no such template")

    monkeypatch.setattr("powerinfer.runtime.engine.chat_template_of", fails)
    with pytest.raises(ModelError, match="no such template"):
        LLM(tiny_llama(tmp_path / "m.gguf"), context=64, progress=lambda label, done, total: labels.append(label))
    assert "loading weights" not in labels


def reference_losses(tokens: list[int], first: int) -> list[float]:
    losses = []
    for at in range(first, len(tokens) - 1):
        logits = reference_logits(tokens[: at + 1]).astype(np.float64)
        losses.append(float(np.log(np.exp(logits).sum()) - logits[tokens[at + 1]]))
    return losses


@pytest.mark.parametrize("add_bos", [False, True])
def test_perplexity_as_llama_perplexity(add_bos: bool) -> None:
    """Windows of 200 that do not overlap; positions 100 to 198 of each predict the next; BOS starts each window."""
    llm = toy_llm(ToyExecutor(max_tokens=48))
    llm.tokenizer.add_bos = add_bos
    text = "It was the best of times, it was the worst of times. " * 15  # 795 bytes: three windows and a rest
    tokens = [BOS] * add_bos + ids(text)
    losses: list[float] = []
    for window in range(3):
        inside = tokens[window * 200 : (window + 1) * 200]
        if add_bos:
            inside[0] = BOS
        losses += reference_losses(inside, 100)
    seen: list[tuple[str, int, int]] = []
    result = perplexity(llm, text, context=200, progress=lambda *event: seen.append(event))
    assert result.tokens == len(losses) == 3 * 99
    assert result.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert result.error == pytest.approx(result.perplexity * np.std(losses, ddof=1) / math.sqrt(297), rel=1e-4)
    assert seen == [("perplexity", n, 3) for n in (1, 2, 3)]
    usable(llm)


def test_perplexity_leaves_the_prefix_cache_right() -> None:
    executor = ToyExecutor(n_pages=16)
    llm = toy_llm(executor)
    text = "All happy families are alike; each unhappy family is unhappy in its own way. " * 12
    before = llm.generate(text[:300], GREEDY)
    result = perplexity(llm, text, context=300)
    assert llm.generate(text[:300], GREEDY).token_ids == before.token_ids
    assert perplexity(llm, text, context=300) == result


def test_perplexity_of_a_short_text() -> None:
    with pytest.raises(RequestError, match="100 tokens, but two windows of 64 need 128"):
        perplexity(toy_llm(), "x" * 100, context=64)
    with pytest.raises(RequestError, match="too small"):
        perplexity(toy_llm(), "x" * 100, context=2)


@pytest.mark.parametrize(
    ("context", "n", "max_tokens", "advice"),
    [
        (0, 64, None, "of 64 tokens, the model's maximum: shorten the prompt$"),
        (64, 60, 8, r"maximum: shorten the prompt or lower max_tokens \(--max-tokens\)$"),
        (32, 40, None, r"of 32 tokens: shorten the prompt or raise the context \(--context\)$"),
        (32, 20, 20, r": shorten the prompt, lower max_tokens \(--max-tokens\) or raise the context \(--context\)$"),
    ],
)
def test_what_does_not_fit_is_told_what_helps(context: int, n: int, max_tokens: int | None, advice: str) -> None:
    config = toy_llm(context=64).config
    llm = LLM.from_parts(ToyExecutor(), ToyTokenizer(), config, EngineConfig(context=context))
    with llm, pytest.raises(RequestError, match=advice):
        llm.generate("x" * n, SamplingParams(max_tokens=max_tokens))


def test_ctrl_c_in_scoring(ctrl_c: Callable[[], None]) -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    executor.held = True

    def interrupt() -> None:
        executor.let(3)
        executor.wait_for(3)
        ctrl_c()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        perplexity(llm, "x" * 400, context=200)
    joined(thread)
    executor.release()
    usable(llm)
    with pytest.raises(RequestError, match="do not fit the context"):
        perplexity(toy_llm(context=64), "x" * 400, context=100)


def test_scoring_takes_turns_with_requests() -> None:
    """Each is computed as it is alone; without a page, a request waits for the end of the scored text."""
    executor = ToyExecutor(n_pages=20)  # a window of 500 takes 16
    llm = toy_llm(executor)
    alone = perplexity(llm, "x" * 1000, context=500)
    for text, pages_left in (("hello", True), ("hello" * 60, False)):
        executor.held = True
        begun = executor.begun
        found: list[Perplexity] = []
        scoring = threading.Thread(target=lambda found=found: found.append(perplexity(llm, "x" * 1000, context=500)))
        scoring.start()
        executor.wait_for(begun)
        asked = ask(llm, ids(text), GREEDY)
        executor.let(3)
        executor.wait_for(begun + 3)
        assert (asked.request.start_time is not None) == pages_left
        executor.release()
        joined(scoring)
        assert found == [alone]
        assert [event and event.token_id for event in asked.rest()] == reference_answer(text)
    usable(llm)


def test_an_error_of_who_scores_is_his_own() -> None:
    llm = toy_llm()

    def use(position: int, logits: np.ndarray) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.score(ids("hello"), 0, use)
    with pytest.raises(RuntimeError, match="cannot wait for an answer"):
        llm.score(ids("hello"), 0, lambda position, logits: llm.generate("x") and None)
    usable(llm)


def test_scores_from_beyond_the_ends() -> None:
    llm = toy_llm()
    seen: list[tuple[int, int]] = []
    texts = [ids("hello"), ids("hello world"), ids("hell")]
    llm.score_texts(
        texts, [-3, 50, 3], lambda text, at, logits: seen.extend((text, at + n) for n in range(len(logits)))
    )
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (2, 3)]
    llm.score(ids("hello"), 6, lambda *_: seen.clear())
    assert seen, "there is nothing behind the end"
    usable(llm)


def test_damaged_weights_are_named() -> None:
    class Damaged(ToyExecutor):
        def forward(self, batch: object) -> np.ndarray:
            return super().forward(batch) * np.float32("nan")  # type: ignore[arg-type]

    llm = toy_llm(Damaged())
    for params in (GREEDY, SamplingParams()):
        with pytest.raises(PowerInferError, match="may be damaged"):
            llm.generate("hello", params)
    with pytest.raises(PowerInferError, match="may be damaged"):
        perplexity(llm, "x" * 400, context=100)


def candidates_of(batch: Batch, logits: np.ndarray) -> np.ndarray:
    """Records of the 64 largest logits of each row."""
    assert batch.inverse_temperatures is not None
    records = np.zeros(len(logits), CANDIDATES)
    for record, row, cold in zip(records, logits, batch.inverse_temperatures, strict=True):
        best = np.argsort(-row, kind="stable")[:LIKELIEST]
        record["count"], record["total"] = len(best), np.exp((row - row.max()).astype(np.float64) * cold).sum()
        record["values"][: len(best)], record["ids"][: len(best)] = row[best], best
    return records


class Brief(ToyExecutor):
    """Returns what is needed and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: list[LogitsNeed] = []
        self.again = 0
        self.damaged = False

    def forward(self, batch: Batch) -> np.ndarray:
        logits = super().forward(batch)
        self.needs.append(batch.needs)
        if batch.needs == LogitsNeed.LARGEST:
            return np.full(len(logits), -1, np.int32) if self.damaged else logits.argmax(axis=1).astype(np.int32)
        if batch.needs == LogitsNeed.CANDIDATES:
            batch.logits = partial(self.give, logits)
            return candidates_of(batch, logits)
        return logits

    def give(self, logits: np.ndarray) -> np.ndarray:
        self.again += 1
        return logits


def test_tokens_in_place_of_logits() -> None:
    """An executor may return them, or candidates, where no request of a step needs more."""
    executor = Brief()
    llm = toy_llm(executor)
    others: dict[str, Any] = {"logprobs": 2, "repetition_penalty": 1.3, "logit_bias": {65: 3.0}, "temperature": 0.7}
    others["seed"] = 1
    for name, value in others.items():
        executor.needs.clear()
        prompts, params = ["hello", "and a longer one" * 8], [GREEDY, replace(GREEDY, **{"seed": 7, name: value})]
        wanted = toy_llm().generate(prompts, params)
        assert [one.token_ids for one in llm.generate(prompts, params)] == [one.token_ids for one in wanted]
        needs = {"seed": LogitsNeed.LARGEST, "temperature": LogitsNeed.CANDIDATES}.get(name, LogitsNeed.LOGITS)
        assert executor.needs[0] == needs, f"{name} looks at all logits"
    assert not executor.again
    executor.damaged = True
    with pytest.raises(PowerInferError, match="may be damaged"):
        llm.generate("hello", GREEDY)
    executor.damaged = False
    usable(llm)


@pytest.mark.parametrize("overlaps", [False, True])
def test_events_are_delivered_while_a_device_computes(overlaps: bool) -> None:
    """Where the executor says so, and calls for it; else before the step. None is lost where a step fails first."""

    class Device(ToyExecutor):
        def forward(self, batch: Batch) -> np.ndarray:
            logits = super().forward(batch)
            assert (batch.meanwhile is not None) == overlaps
            batch.overlap()
            return logits

    executor, begun = Device(), list[int]()
    executor.overlaps = overlaps  # type: ignore[attr-defined]
    llm = toy_llm(executor)
    asked = Asked(llm, ids("hello"), replace(GREEDY, max_tokens=4))

    def note(event: Any) -> None:
        begun.append(executor.begun)
        asked.events.put(event)

    asked.request.deliver = note
    llm._runner.submit([asked.request])
    assert [event.token_id for event in asked.rest() if event] == reference_greedy(ids("hello"), 4)
    assert begun == ([2, 3, 4, 4] if overlaps else [1, 2, 3, 4])
    executor.fail_at[executor.begun + 1] = PowerInferError("broken")
    failing = ask(llm, ids("hello"), GREEDY)
    first, last = failing.rest()
    assert first is not None and last is None and str(failing.request.error) == "broken"
    usable(llm)


def test_all_logits_where_candidates_do_not_suffice() -> None:
    """They are asked for then, and always once that is often so."""
    executor = Brief()
    llm = toy_llm(executor)
    wide = SamplingParams(temperature=50.0, top_k=0, top_p=0.9, min_p=0.0, seed=5, max_tokens=30, ignore_eos=True)
    narrow = replace(wide, temperature=0.5)
    for params in (wide, narrow, [wide, narrow]):
        executor.needs.clear()
        executor.again = 0
        prompts = ["hello", "hello"]
        wanted = toy_llm().generate(prompts, params)
        assert [one.token_ids for one in llm.generate(prompts, params)] == [one.token_ids for one in wanted]
        assert executor.needs[0] == LogitsNeed.CANDIDATES and (executor.again > 0) == (params is not narrow)
        assert (executor.needs[-1] == LogitsNeed.LOGITS) == (params is not narrow)
    usable(llm)


def test_a_process_that_closes_nothing_ends_silently(tmp_path: Path) -> None:
    """No native object outlives the interpreter: nanobind would report it."""
    code = (
        "import sys\nfrom powerinfer import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], threads=2)\nllm.generate(['a'], SamplingParams(max_tokens=4))"
    )
    run = [sys.executable, "-c", code, str(tiny_llama(tmp_path / "m.gguf"))]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


class Alphabet:
    """A mask that allows some bytes, and ends the answer at one."""

    def __init__(self, allowed: bytes, last: bytes = b"") -> None:
        self.words = np.zeros(-(-VOCAB // 32), np.uint32)
        for token in allowed:
            self.words[token // 32] |= np.uint32(1 << token % 32)
        self.last = last
        self.seen: list[int] = []

    def allows(self, token: int) -> bool:
        return bool(self.words[token // 32] >> np.uint32(token % 32) & 1)

    def allowed(self) -> np.ndarray:
        return self.words

    def accept(self, token: int) -> bool:
        self.seen.append(token)
        return token in self.last


def test_a_mask_bounds_one_answer() -> None:
    """Its log-probabilities are the model's own; it ends the answer; others beside it are as ever."""
    llm = toy_llm()
    beside = ask(llm, ids("beside"), GREEDY)
    mask = Alphabet(b"abcdefg\n", last=b"\n")
    params = SamplingParams(seed=3, temperature=2.0, max_tokens=200, logprobs=1)
    last = list(llm.stream("hello", params, mask=mask))[-1].completion
    assert last is not None and last.finish_reason == "stop" and last.logprobs is not None
    assert mask.seen == last.token_ids and set(last.token_ids) <= set(b"abcdefg\n")
    assert last.text.endswith("\n") and last.token_ids.count(ord("\n")) == 1
    logits = reference_logits(ids("hello")).astype(np.float64)
    assert last.logprobs[0].logprob == pytest.approx(logits[last.token_ids[0]] - np.log(np.exp(logits).sum()), abs=1e-5)
    assert [event and event.token_id for event in beside.rest()] == reference_answer("beside")
    with pytest.raises(RequestError, match="the mask forbids every token"):
        list(llm.stream("hello", params, mask=Alphabet(b"")))
    usable(llm)
