"""Speculation with executors: whatever is drafted, answers have the bits of decoding without; with states, too, and
with the drafts of a model's own head."""

from __future__ import annotations

import weakref
from pathlib import Path
from queue import SimpleQueue
from random import Random

import numpy as np
import pytest
from draft_models import DraftModel, tier_of
from families import case_named, random_model, save
from model_files import conv_gguf, delta_gguf, mamba_gguf
from toy_model import VOCAB, ToyTokenizer, idle

from powerinfer.config import EngineConfig
from powerinfer.devices import Batch
from powerinfer.devices.cpu import CpuExecutor, Drafting
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.models import load
from powerinfer.runtime import speculation
from powerinfer.runtime.draft_model import DraftModel as SmallerModel
from powerinfer.runtime.draft_sources import draft_source
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import AnswerRequest
from powerinfer.runtime.speculation import DraftSource, Guessing, Outlook, Speculation

GGUFS = {"delta": delta_gguf, "mamba": mamba_gguf, "conv": conv_gguf}
NAMES = (*GGUFS, "qwen3-next", "falcon-h1", "qwen3", "gemma3", "deepseek-v3", "gpt-oss")


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if request.param in GGUFS:
        return GGUFS[request.param]().write(folder / "m.gguf")
    case = case_named(request.param)
    config = case.config()
    return save(case, config, random_model(case, config, 3), "folder", folder)


class Truth:
    """A source that knows the answers, and is wrong now and then."""

    name = "test"

    def __init__(self, answers: list[list[int]], vocab: int) -> None:
        self._answers, self._vocab, self._random = answers, vocab, Random(3)

    def outlook(self, request: AnswerRequest) -> Outlook:
        return Outlook(7, "test", 0.5)

    def draft(self, wanted: list[tuple[AnswerRequest, int]]) -> list[list[int]]:
        return [self._for(request.tokens, count) for request, count in wanted]

    def _for(self, tokens: list[int], count: int) -> list[int]:
        known = next((one for one in self._answers if one[: len(tokens)] == tokens), [])
        following = known[len(tokens) : len(tokens) + count]
        return [one if self._random.random() < 0.75 else self._random.randrange(self._vocab) for one in following]

    def prepare(self, requests: object) -> None:
        pass

    def observe(self, parts: object) -> None:
        pass

    def forget(self, request: AnswerRequest) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have any number of drafts, whatever these cost."""
    random = Random(5)

    def counts(self: Speculation, outlooks: dict[AnswerRequest, Outlook]) -> dict[AnswerRequest, int]:
        for request in outlooks:
            self._requests.setdefault(request, Guessing())
        return {request: random.randint(0, outlook.most) for request, outlook in outlooks.items()}

    monkeypatch.setattr(Speculation, "_counts", counts)


def llm_of(executor: CpuExecutor, engine: EngineConfig, source: DraftSource | None = None) -> LLM:
    return LLM.from_parts(executor, ToyTokenizer(), executor.config, engine, source=source)  # type: ignore[arg-type]


def prompts(vocab: int) -> list[list[int]]:
    shared = np.random.default_rng(1).integers(0, vocab, 70).tolist()
    texts = [np.random.default_rng(seed).integers(0, vocab, 3 + 5 * seed).tolist() for seed in range(3)]
    return [*texts, shared + texts[0], shared + texts[1], [1, 2, 3, 1, 2, 3, 1, 2, 3]]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1, top_k=8, seed=2, max_tokens=30, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.3, max_tokens=40, stop="7"),
    SamplingParams(temperature=1, seed=7, top_p=0.9, presence_penalty=0.5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1, seed=9, max_tokens=30, ignore_eos=True),
]


def test_answers_have_the_same_bits(path: Path) -> None:
    engine = EngineConfig(threads=2, context=128, max_batch=3, speculate="lookup")
    plain = EngineConfig(threads=2, context=128, max_batch=3)
    executor = load(open_checkpoint(path), plain)
    texts = prompts(executor.vocab_size)
    expected = llm_of(executor, plain).generate(texts, PARAMS)
    answers = [text + one.token_ids for text, one in zip(texts, expected, strict=True)]
    drafting = load(open_checkpoint(path), engine)
    drafting.n_pages = 5  # which three requests outgrow
    llm = llm_of(drafting, engine, Truth(answers, executor.vocab_size))
    for _ in range(2):  # the second time with prefixes that the first left
        for one, before in zip(llm.generate(texts, PARAMS), expected, strict=True):
            assert one.token_ids == before.token_ids
            assert (one.logprobs, one.text, one.finish_reason) == (before.logprobs, before.text, before.finish_reason)
        assert idle(llm)
    assert llm.stats().preemptions > 0, "some requests were put back"
    stats = llm.stats().speculation
    assert 0.3 * stats.drafted < stats.accepted < 0.9 * stats.drafted
    assert stats.accepted > 60


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1", "deepseek-v3"])
def test_constrained_answers_have_the_same_bits(name: str, tmp_path: Path) -> None:
    """A grammar's mask follows the drafts, of layers of each kind."""
    case = case_named(name)
    config = case.config()
    config.vocab_size = VOCAB  # of a tokenizer that can spell every text
    path = save(case, config, random_model(case, config, 3), "folder", tmp_path)
    params = [
        SamplingParams(temperature=0, max_tokens=40, regex="[a-f]{3,30}z[0-9]{9}"),
        SamplingParams(temperature=1, seed=9, max_tokens=60, regex="([a-c]|[0-3]){60}", logprobs=2),
        SamplingParams(temperature=1, seed=3, max_tokens=40, choice=["a long answer of many letters", "a short one"]),
    ]
    engine = EngineConfig(threads=2, context=128, max_batch=2)
    texts = prompts(VOCAB)[:3]
    expected = llm_of(load(open_checkpoint(path), engine), engine).generate(texts, params)
    answers = [text + one.token_ids for text, one in zip(texts, expected, strict=True)]
    drafting = EngineConfig(threads=2, context=128, max_batch=2, speculate="lookup")
    llm = llm_of(load(open_checkpoint(path), drafting), drafting, Truth(answers, VOCAB))
    for one, before in zip(llm.generate(texts, params), expected, strict=True):
        assert (one.token_ids, one.text, one.logprobs) == (before.token_ids, before.text, before.logprobs)
    stats = llm.stats().speculation
    assert 20 < stats.accepted < stats.drafted


@pytest.mark.parametrize("name", ["glm4-moe", "qwen35", "deepseek-v3", "ling-2", "ernie-moe", "nemotron-h-latents"])
def test_a_models_own_head_drafts(name: str, tmp_path: Path) -> None:
    model = DraftModel(name)
    path = model.save("folder", tmp_path)
    plain = EngineConfig(threads=2, context=128, max_batch=3, speculate="off")
    expected = llm_of(load(open_checkpoint(path), plain), plain).generate(prompts(SIZE := 96), PARAMS)
    engine = EngineConfig(threads=2, context=128, max_batch=3, prefill_chunk=16)
    executor = load(open_checkpoint(path, draft_head=True), engine)
    executor.n_pages = 5  # which three requests outgrow
    source = draft_source(engine, executor, executor.config)
    assert source is not None and source.name == "mtp"
    llm = llm_of(executor, engine, source)
    for _ in range(2):
        for one, before in zip(llm.generate(prompts(SIZE), PARAMS), expected, strict=True):
            assert (one.token_ids, one.logprobs) == (before.token_ids, before.logprobs)
        assert idle(llm)
    assert llm.stats().speculation.drafted > 100 and llm.stats().preemptions > 0
    head = weakref.ref(executor.drafter)
    llm.close()
    assert head() is None, "who has the closed model has no weights"


def test_a_head_drafts_where_the_model_is_on_disk(tmp_path: Path) -> None:
    path = DraftModel("glm4-moe").save("folder", tmp_path)
    engine = EngineConfig(threads=2, context=128, max_batch=3, prefill_chunk=16)
    expected = llm_of(load(open_checkpoint(path), engine), engine).generate(prompts(96), PARAMS)
    checkpoint = open_checkpoint(path, draft_head=True)
    executor = load(checkpoint, engine, disk=tier_of(checkpoint))
    llm = llm_of(executor, engine, draft_source(engine, executor, executor.config))
    for one, before in zip(llm.generate(prompts(96), PARAMS), expected, strict=True):
        assert (one.token_ids, one.logprobs) == (before.token_ids, before.logprobs)
    stats = llm.stats()
    assert stats.speculation.drafted > 100 and stats.disk_bytes > 0 and stats.disk_wanted > stats.disk_hits
    llm.close()


@pytest.fixture
def with_head(tmp_path: Path) -> LLM:
    """Chunks of a prompt of 16 tokens; its executor waits for nobody."""
    path = DraftModel("glm4-moe").save("folder", tmp_path)
    engine = EngineConfig(threads=2, context=128, max_batch=8, prefill_chunk=16)
    executor = load(open_checkpoint(path, draft_head=True), engine)
    return llm_of(executor, engine, draft_source(engine, executor, executor.config))


def test_embeddings_beside_a_prompt_are_the_models(with_head: LLM) -> None:
    """In a step in which the head reads what the model gave the prompt's tokens."""
    text, other = prompts(96)[2], prompts(96)[3]
    alone = with_head.embed([text])[0]
    embedding, answer = with_head._runner.embedding(text), with_head._runner.request(other, PARAMS[0])
    ended: SimpleQueue[object] = SimpleQueue()
    for request in (answer, embedding):
        request.deliver = ended.put
    with_head._runner.submit([answer, embedding])
    while embedding.embedding is None:
        ended.get(timeout=60)
    np.testing.assert_array_equal(embedding.embedding, alone)
    with_head._runner.abort([answer])


def test_a_request_that_ends_in_its_prompt_leaves_nothing(with_head: LLM) -> None:
    text = prompts(96)[3]
    first = with_head._runner.request(text, PARAMS[0])
    step = with_head._executor.forward

    def abort(batch: Batch) -> np.ndarray:
        logits = step(batch)
        if len(batch.tokens) == 16:
            with_head._runner.abort([first])
        return logits

    with_head._executor.forward = abort  # type: ignore[method-assign]
    with_head._runner.submit([first])
    with_head.generate([text], SamplingParams(max_tokens=1, temperature=0))
    assert idle(with_head)


def test_more_requests_than_a_call_has_tokens_for_what_they_wait_with(with_head: LLM) -> None:
    """Eight requests whose last steps had several right tokens each, and calls of 16."""
    texts = [text[:9] for text in (prompts(96) * 2)[:8]]
    answers = with_head.generate(texts, PARAMS[0])
    assert all(len(one.token_ids) == 40 for one in answers)
    assert with_head.drafts == "mtp" and idle(with_head)


def test_drafts_in_a_row_are_the_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its own logits, with its own hidden states, as transformers says."""
    model = DraftModel("glm4-moe")
    engine = EngineConfig(threads=1, context=128, kv_type="f32")
    executor = load(open_checkpoint(model.save("folder", tmp_path), draft_head=True), engine)
    source = draft_source(engine, executor, executor.config)
    assert source is not None
    llm = llm_of(executor, engine, source)
    seen: list[tuple[list[int], list[int]]] = []
    draft = source.draft
    monkeypatch.setattr(speculation, "_SURE", 0.0)

    def watched(wanted: list[tuple[AnswerRequest, int]]) -> list[list[int]]:
        drafts = draft(wanted)
        seen.extend((list(request.tokens), one) for (request, _), one in zip(wanted, drafts, strict=True))
        return drafts

    source.draft = watched  # type: ignore[method-assign, assignment]
    tokens = model.tokens[:-1].tolist()
    llm.generate([tokens], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert not seen, "nothing is drafted for the last token"
    llm.generate([tokens[:9]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert seen
    assert max(len(drafts) for _, drafts in seen) == 4, "though unlikely ones end them"
    right = sum(drafts == model.drafts(text, len(drafts)) for text, drafts in seen)
    assert all(drafts for _, drafts in seen) and right > 0.8 * len(seen), "where rounding selects no other experts"


def test_a_smaller_model_shares_the_threads(tmp_path: Path) -> None:
    case = case_named("qwen3")
    config = case.config()
    path = save(case, config, random_model(case, config, 3), "folder", tmp_path)
    engine = EngineConfig(threads=2, context=128, max_batch=3, speculate="off")
    expected = llm_of(load(open_checkpoint(path), engine), engine).generate(prompts(96), PARAMS)
    executor = load(open_checkpoint(path), engine)
    small = load(open_checkpoint(path), engine, drafting=Drafting(pool=executor.pool))
    llm = llm_of(executor, engine, SmallerModel(small, executor.vocab_size))
    for one, before in zip(llm.generate(prompts(96), PARAMS), expected, strict=True):
        assert one.token_ids == before.token_ids
    stats = llm.stats().speculation
    assert stats.accepted > 0.4 * stats.drafted > 0
    llm.close()
