"""Embeddings: the mean of a text's hidden states after the final norm, beside everything else that the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_model import (
    D_MODEL,
    ToyExecutor,
    ToyTokenizer,
    ask,
    idle,
    reference_embedding,
    reference_greedy,
    toy_llm,
    until,
)

from powerinfer.config import EngineConfig
from powerinfer.errors import PowerInferError, QueueFullError, RequestError, RequestTimeoutError
from powerinfer.runtime.async_llm import AsyncLLM
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams

TEXTS = ["a", "sea", "the boats went out " * 9, "x" * 64, "y" * 65, "calm", "z" * 200]


def expected(texts: list[str]) -> np.ndarray:
    return np.stack([reference_embedding(list(text.encode())) for text in texts])


# ------------------------------------------------------------------------------------------------ on the toy model


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_batch_and_chunk_do_not_change_a_bit(max_batch: int, chunk: int) -> None:
    llm = toy_llm(max_batch=max_batch, prefill_chunk=chunk)
    calls: list[tuple[str, int, int]] = []
    found = llm.embed(TEXTS, progress=lambda *call: calls.append(call))
    assert found.dtype == np.float32 and np.array_equal(found, expected(TEXTS))
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert np.array_equal(llm.embed(TEXTS), found), "nothing of the first time is in the way"
    assert calls == [("embeddings", done, len(TEXTS)) for done in range(1, len(TEXTS) + 1)]
    assert idle(llm)


def test_one_text_none_and_token_ids() -> None:
    llm = toy_llm()
    assert np.array_equal(llm.embed("sea"), expected(["sea"]))
    assert np.array_equal(llm.embed([[115, 101, 97], "sea"]), expected(["sea", "sea"]))
    assert llm.embed([]).shape == (0, D_MODEL)


def test_answers_go_on_meanwhile() -> None:
    """A long text is embedded in pieces beside the decoding of others, which get a token at every step."""
    executor = ToyExecutor(max_tokens=16)
    llm = toy_llm(executor, max_batch=2, prefill_chunk=16, mixed_chunk=4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    executor.held = True
    answer = ask(llm, [1, 2, 3], params)
    executor.let(5)
    executor.wait_for(5)
    request = llm._runner.embedding(list(b"x" * 60))
    llm._runner.submit([request])
    executor.let(16)
    executor.wait_for(21)
    assert executor.sizes == [3] + [1] * 5 + [1 + 4] * 15
    assert answer.events.qsize() == 21, "a token at every step"
    executor.release()
    events = answer.rest()
    assert events[-1] is not None and events[-1].completion is not None
    assert len(events[-1].completion.token_ids) == 40
    assert request.embedding is not None
    assert np.array_equal(request.embedding, reference_embedding(list(b"x" * 60)))
    assert idle(llm)


def test_it_neither_takes_nor_leaves_cached_pages() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    prompt = list(b"the boats went out one after another, and nobody spoke of the storm that was to come at night")
    params = SamplingParams(temperature=0, max_tokens=2)
    llm.generate([prompt], params)
    assert np.array_equal(llm.embed([prompt])[0], reference_embedding(prompt))
    other = [7, *prompt]
    llm.embed([other])
    (answer,) = llm.generate([other], params)
    assert answer.cached_tokens == 0 and answer.token_ids == reference_greedy(other, 2)
    assert llm.generate([prompt], params)[0].cached_tokens == 64, "what was cached is still there"


def test_a_preempted_embedding_begins_again() -> None:
    """Two answers grow until no page is left; the text, the youngest, is computed from its beginning later."""
    executor = ToyExecutor(n_pages=8, page_size=4, max_tokens=4)
    llm = toy_llm(executor, context=32, max_batch=3, prefill_chunk=4, mixed_chunk=1, prefix_cache=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    executor.held = True
    answers = [ask(llm, [n], params) for n in range(2)]
    text = list(b"0123456789ab")
    request = llm._runner.embedding(text)
    llm._runner.submit([request])
    executor.release()
    for answer in answers:
        last = answer.rest()[-1]
        assert last is not None and last.completion is not None
    assert llm.stats().preemptions > 0
    until(lambda: request.ended)
    assert request.embedding is not None and np.array_equal(request.embedding, reference_embedding(text))
    assert idle(llm)


def test_what_is_refused() -> None:
    llm = toy_llm(context=64)
    for texts, message in (
        ([[1], []], "the prompt is empty"),
        ([1, 2], "wrap the token ids"),
        ([[258]], "token 258"),
        (["x" * 65], "65 tokens do not fit the context of 64 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.embed(texts)  # type: ignore[arg-type]
    assert llm.embed(["x" * 64]).shape == (1, D_MODEL), "a text may fill the context"
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.embed(["x"])


def test_states_that_are_not_finite_fail_their_own_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    whole = executor.hidden_states

    def damaged(rows: np.ndarray) -> np.ndarray:
        states = whole(rows)
        states[0] = np.nan
        return states

    first, second = llm._runner.embedding([1, 2]), llm._runner.embedding([3, 4])
    monkeypatch.setattr(executor, "hidden_states", damaged)
    executor.held = True
    llm._runner.submit([first, second])
    executor.wait_for(0)
    executor.release()
    llm._runner.call(lambda: None)
    monkeypatch.undo()
    assert first.embedding is None and "not finite" in str(first.error)
    assert second.embedding is not None and np.array_equal(second.embedding, reference_embedding([3, 4]))


@pytest.mark.parametrize("error", [MemoryError(), PowerInferError("the device failed")])
def test_a_failure_ends_the_embeddings_only(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)

    def fail(rows: np.ndarray) -> np.ndarray:
        raise error

    monkeypatch.setattr(executor, "hidden_states", fail)
    executor.held = True
    answer = ask(llm, [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    request = llm._runner.embedding([4, 5])
    llm._runner.submit([request])
    executor.release()
    assert len(answer.rest()) == 5
    assert request.embedding is None and isinstance(request.error, PowerInferError)
    assert idle(llm)


# ------------------------------------------------------------------------------------------------ asyncio


def test_async_embeddings() -> None:
    llm = toy_llm(ToyExecutor(n_pages=256), max_batch=2, max_queue=1)
    model = AsyncLLM.from_llm(llm)

    async def test() -> None:
        many = TEXTS * 3
        assert np.array_equal(await model.embed(many), expected(many)), "more texts than the queue has room for"
        assert np.array_equal(await model.embed("sea"), expected(["sea"]))
        assert (await model.embed([])).shape == (0, D_MODEL)
        with pytest.raises(RequestError, match="fit the context"):
            await model.embed(["a", "b" * 600, "c"])
        with pytest.raises(RequestError, match="salt must be bytes"):
            await model.embed(["a"], salt="x")  # type: ignore[arg-type]
        with pytest.raises(RequestTimeoutError, match="took longer than 1e-06 s"):
            await model.embed(["a"], timeout=1e-6)

    asyncio.run(asyncio.wait_for(test(), 60))
    assert idle(llm)


@pytest.mark.parametrize("end", ["cancelled", "queue full"])
def test_an_embedding_that_is_not_to_be(end: str) -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor, max_batch=1, max_queue=1)
    model = AsyncLLM.from_llm(llm)

    async def test() -> None:
        executor.held = True
        tasks = [asyncio.create_task(model.embed("a" * 200))]
        await asyncio.to_thread(executor.wait_for, 0)
        for n, text in enumerate(("b", "c")):
            tasks.append(asyncio.create_task(model.embed(text)))
            while llm._runner._driver._commands.qsize() <= n:
                await asyncio.sleep(0.002)
        if end == "cancelled":
            for task in (tasks[0], tasks[2]):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        executor.release()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = [type(one) for one in done]
        if end == "cancelled":
            assert kinds == [asyncio.CancelledError, np.ndarray, asyncio.CancelledError]
            assert np.array_equal(done[1], expected(["b"])) and executor.begun == 2
        else:
            assert kinds == [np.ndarray, np.ndarray, QueueFullError]
            assert np.array_equal(done[0], expected(["a" * 200]))

    asyncio.run(asyncio.wait_for(test(), 60))
    assert idle(llm)


def test_closing_ends_an_embedding() -> None:
    executor = ToyExecutor()
    llm = toy_llm(executor)
    executor.held = True
    request = llm._runner.embedding([1] * 200)
    llm._runner.submit([request])
    executor.wait_for(0)
    llm._runner._driver.stop()
    executor.release()
    llm.close()
    assert isinstance(request.error, RequestError) and "closed" in str(request.error)


# ------------------------------------------------------------------------------------------------ against transformers

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import families  # noqa: E402
from truth import Truth  # noqa: E402

CASES = [
    "llama3", "mistral-window", "qwen3", "opt", "opt-post-norm", "falcon-7b", "nemotron", "gemma3", "gemma3n", "olmo3"
]  # fmt: skip


def wired(name: str) -> Truth:
    """A case, without a projection before its head."""
    case = families.case_named(name)
    return Truth(case, **({"word_embed_proj_dim": 64} if case.kind == "opt" else {}))


def pooled(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float64 [d_model]: as sentence-transformers pools."""
    with torch.no_grad():
        states = model.base_model(torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
    mean = states.double().mean(0)
    return np.asarray(mean / mean.norm())


def exact(model: Truth, texts: list[np.ndarray]) -> list[np.ndarray]:
    """In float64."""
    with families.double_precision(model.case.base):
        wide = families.build(model.case, model.config).double()
        wide.load_state_dict(model.model.state_dict())
        return [pooled(wide, tokens) for tokens in texts]


def opened(path: Path, executor: Any = None, **options: Any) -> LLM:
    """The model with a tokenizer for its 101 tokens: the texts are token ids."""
    executor = executor or families.open_executor(path, **options)
    from powerinfer.formats.checkpoint import open_checkpoint

    config = open_checkpoint(path).config
    tokenizer: Any = ToyTokenizer()
    engine = EngineConfig(max_batch=4, prefill_chunk=options.get("prefill_chunk", families.TOKENS), context=128)
    return LLM.from_parts(executor, tokenizer, config, engine)


@pytest.mark.parametrize("name", CASES)
def test_the_embeddings_of_transformers(name: str, tmp_path: Path) -> None:
    """Alone, in chunks, and together with other texts and an answer: the same bits, within float32's own error."""
    model = wired(name)
    whole = model.texts[0].tolist()
    texts = [whole, whole[:1], model.texts[1].tolist()[:40], whole[5:70]]
    path = model.save("folder", tmp_path)
    with opened(path) as llm:
        alone = np.concatenate([llm.embed([text]) for text in texts])
    every = [np.asarray(text) for text in texts]
    for text, ours, truth in zip(every, alone, exact(model, every), strict=True):
        allowed = families.ROUNDING * max(families.rms(pooled(model.model, text) - truth), 1e-9)
        assert families.rms(ours - truth) <= allowed
    with opened(path, prefill_chunk=16) as llm:
        answer = ask(llm, whole[:9], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        assert np.array_equal(llm.embed(texts), alone)
        assert len(answer.rest()) == 100


def gpu_executors(path: Path, layers: int) -> Iterator[Any]:
    """Executors with their first layers on the test's device."""
    import test_gpu_layers

    for count, head in ((layers, True), (layers, False), (1, False)):
        with test_gpu_layers.opened(path, test_gpu_layers.on_gpu(count, head=head)) as executor:
            yield executor


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["llama3", "gemma3", "opt-post-norm"])
def test_with_layers_on_a_gpu(name: str, tmp_path: Path) -> None:
    model = wired(name)
    path, text = model.save("folder", tmp_path), model.texts[0]
    truth = exact(model, [text])[0]
    allowed = families.ROUNDING * max(families.rms(pooled(model.model, text) - truth), 1e-9)
    for executor in gpu_executors(path, model.config.num_hidden_layers):
        llm = opened(path, executor)
        assert families.rms(llm.embed([text.tolist()])[0] - truth) <= allowed
        llm._runner._driver.stop()
        llm._runner._driver.join()


def test_a_model_that_projects_its_states_is_refused(tmp_path: Path) -> None:
    path = Truth(families.case_named("opt-post-norm")).save("folder", tmp_path)
    with opened(path) as llm, pytest.raises(RequestError, match="it has no embeddings"):
        llm.embed([[1, 2]])
