"""Steps with drafts where layers leave neurons out: each token has the bits of a step of it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
from families import case_named, random_model, save
from model_files import family_gguf
from sparse_models import tiny_llama
from test_disk_expert_neurons import resting as experts_on_disk
from test_disk_neurons import FEWEST, NEURONS, in_memory
from test_disk_neurons import model as model_of_neurons
from test_disk_neurons import opened as from_disk
from test_expert_neurons import model as experts_model
from test_expert_neurons import opened as exact_experts
from test_expert_neurons import plain_model
from test_predicted_experts import give_plain_predictors, give_predictors
from test_predicted_experts import opened as predicted_experts
from test_speculation_models import Truth
from toy_model import ToyTokenizer

from powerinfer.config import EngineConfig
from powerinfer.devices import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.bundle_types import choose_types
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.predictor_file import write_predictor
from powerinfer.models import load
from powerinfer.neurons import Predictor
from powerinfer.prepare.packing import pack
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import AnswerRequest
from powerinfer.runtime.speculation import Guessing, Outlook, Speculation
from powerinfer.sparsity import Sparsity
from powerinfer.sparsity.attach import attach
from powerinfer.sparsity.selection import select

COUNTS = (3, 8, 1, 5, 2, 7)
TOKENS = sum(COUNTS)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "FF", NEURONS)


def logits(executor: Any, counts: Sequence[int], alone: bool = True) -> np.ndarray:
    """[TOKENS, vocab] of one sequence, in steps of that many tokens."""
    tokens = np.random.default_rng(3).integers(0, executor.vocab_size, TOKENS).astype(np.int32)
    pages = np.arange(executor.n_pages, dtype=np.int32)[None]
    rows, at = [], 0
    for count in counts:
        span = np.arange(at, at + count, dtype=np.int32)
        each = np.arange(count, dtype=np.int32)
        batch = Batch(tokens[span], span, np.zeros_like(each), pages, each, alone=alone)
        rows.append(executor.forward(batch).copy())
        at += count
    return np.concatenate(rows)


def check_bits(executor: Any, differs: bool = True) -> None:
    """differs: without the flag some bits are others: by the number of tokens neurons are divided."""
    single = logits(executor, [1] * TOKENS)
    np.testing.assert_array_equal(logits(executor, COUNTS), single)
    together = logits(executor, COUNTS, alone=False)
    assert np.array_equal(together, single) != differs
    np.testing.assert_allclose(together, single, rtol=0, atol=0.05 * np.abs(single).max())


@contextmanager
def opened(path: Path, selector: str, types: tuple[str, str], **options: Any) -> Iterator[tuple[CpuExecutor, Sparsity]]:
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint, *types))
    settings = {"threads": 2, "context": 64, "trial": False, "max_batch": 8, "recall_every": 2, "selector": selector}
    engine = EngineConfig(**(settings | options))
    executor = load(checkpoint, engine)
    try:
        yield executor, attach(executor, checkpoint, engine, select(checkpoint, engine), list)
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("types", "threads"), [(("F16", "F16"), 2), (("Q8_0", "Q4_0X32"), 3), (("BF16", "Q8_0"), 2), (("Q4_0", "Q4_0"), 1)]
)
def test_exact(types: tuple[str, str], threads: int, tmp_path: Path) -> None:
    with opened(tiny_llama(tmp_path / "m.gguf"), "exact", types, threads=threads) as (executor, sparsity):
        check_bits(executor, threads > 1)
        counts = executor.ffns[0].counts()
        assert counts["tokens"] == 3 * TOKENS and counts["steps"] == TOKENS + 2 * len(COUNTS)
        assert sparsity.drafts_alone


@pytest.mark.parametrize("build", [tiny_llama, lambda path: family_gguf("opt").write(path)], ids=["gates", "no gates"])
def test_tokens_of_which_many_neurons_fire_go_on_densely(build: Callable[[Path], Path], tmp_path: Path) -> None:
    """Each by its own number, as if it was alone."""
    with opened(build(tmp_path / "m.gguf"), "exact", ("F16", "F16")) as (executor, _):
        rows = []
        for above in (0.0, 0.5, 1.0):  # each token, some, none
            for ffn in executor.ffns.values():
                ffn.clear()
                ffn.op.dense_above = above
            np.testing.assert_array_equal(logits(executor, COUNTS), logits(executor, [1] * TOKENS))
            rows.append(executor.ffns[0].counts()["rows"])
        assert rows[0] > rows[1] > rows[2]


def test_thresholds_of_products(tmp_path: Path) -> None:
    """What up is multiplied as a whole for is decided on again, for each token."""
    path = tiny_llama(tmp_path / "m.gguf", "cats", limits=True, products=True)
    with opened(path, "exact", ("F16", "F16")) as (executor, _):
        for above in (0.0, 0.3):
            for ffn in executor.ffns.values():
                ffn.op.dense_above = above
            np.testing.assert_array_equal(logits(executor, COUNTS), logits(executor, [1] * TOKENS))


@pytest.mark.parametrize("floor", [0, 300])
def test_predicted(floor: int, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    rng, config = np.random.default_rng(3), checkpoint.config
    layers = [
        tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((32, config.d_model), (NEURONS, 32)))
        for _ in range(config.n_layers)
    ]
    write_predictor(checkpoint, None, "F16", [Predictor(32, 0.0, floor)] * config.n_layers, layers)  # type: ignore[arg-type]
    with opened(path, "predicted", ("Q8_0", "F16")) as (executor, sparsity):
        check_bits(executor)
        report = sparsity.report()
        assert report is not None and 0.3 < report["candidate_fraction"] < 0.95
        assert 0.2 < report["recall"] < 1 and report["sampled"] > 0


@pytest.mark.parametrize("name", ["olmo2-relu", "falcon-40b"])
def test_norms_behind_and_layers_side_by_side(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    config = case.config()
    path = save(case, config, random_model(case, config, 3), "folder", tmp_path)
    with opened(path, "exact", ("F16", "F16")) as (executor, _):
        check_bits(executor)


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
@pytest.mark.parametrize("predictor", [False, True])
def test_neurons_inside_experts(kind: str, predictor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = experts_model(tmp_path, kind)
    executor = (
        predicted_experts(give_predictors(path), recall_every=2) if predictor else exact_experts(path, exact=True)
    )
    check_bits(executor)
    executor.close()


def test_experts_without_gates_beside_a_shared_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for shared, latents in ((None, 0), ("F16", 32)):
        executor = exact_experts(plain_model(tmp_path, "Q5_0", shared, latents), exact=True)
        check_bits(executor)
        executor.close()


def test_experts_whose_router_comes_before_attention(tmp_path: Path) -> None:
    case = case_named("smallthinker")
    config = case.config(moe_ffn_hidden_size=64)
    path = save(case, config, random_model(case, config, 3), "folder", tmp_path)
    engine = EngineConfig(threads=2, context=64, max_batch=1, quantize="q8_0")
    executor = load(open_checkpoint(path, "q8_0"), engine, in_experts=True)
    assert executor.expert_ffns
    check_bits(executor)
    executor.close()


@pytest.mark.parametrize("selector", ["exact", "predicted"])
def test_neurons_on_disk(selector: str, tmp_path: Path) -> None:
    path = model_of_neurons(tmp_path, ("Q8_0", "Q4_0X32"))
    single = logits(in_memory(path, selector, threads=2), [1] * TOKENS)
    own = from_disk(path, selector, FEWEST, threads=2).executor
    for counts in (COUNTS, [1] * TOKENS):
        np.testing.assert_array_equal(logits(own, counts), single)


@pytest.mark.parametrize("predictor", [False, True])
def test_neurons_of_experts_on_disk(predictor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = plain_model(tmp_path, "Q5_0")
    if predictor:
        give_plain_predictors(path, threshold=3.0)
    inside = predicted_experts(path) if predictor else exact_experts(path, exact=True)
    single = logits(inside, [1] * TOKENS)
    for slots in (1, 3):
        own = experts_on_disk(path, slots, predicted=predictor)
        for counts in (COUNTS, [1] * TOKENS):
            np.testing.assert_array_equal(logits(own, counts), single)
        own.close()
    inside.close()


def three(self: Speculation, outlooks: dict[AnswerRequest, Outlook]) -> dict[AnswerRequest, int]:
    """Three drafts for each request that may have so many."""
    for request in outlooks:
        self._requests.setdefault(request, Guessing())
    return {request: min(3, outlook.most) for request, outlook in outlooks.items()}


def test_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that decode alone those without drafts; beside another one there are none."""
    texts = [np.random.default_rng(seed).integers(0, 32, 3 + 20 * seed).tolist() for seed in range(3)]
    params = SamplingParams(temperature=1, top_k=8, seed=2, max_tokens=24, ignore_eos=True, logprobs=1)
    monkeypatch.setattr(Speculation, "_counts", three)
    with opened(tiny_llama(tmp_path / "m.gguf"), "exact", ("F16", "F16"), max_batch=2, context=128) as found:
        executor, sparsity = found

        def llm_with(source: Truth | None) -> LLM:
            engine = EngineConfig(threads=2, context=128, max_batch=2, prefix_cache=False)
            return LLM.from_parts(executor, ToyTokenizer(), executor.config, engine, sparsity, source)  # type: ignore[arg-type]

        plain = llm_with(None)
        expected = [plain.generate([text], params)[0] for text in texts]
        answers = [text + one.token_ids for text, one in zip(texts, expected, strict=True)]
        llm = llm_with(Truth(answers, executor.vocab_size))
        for text, before in zip(texts, expected, strict=True):
            found_now = llm.generate([text], params)[0]
            assert (found_now.token_ids, found_now.logprobs) == (before.token_ids, before.logprobs)
        stats = llm.stats().speculation
        assert stats.accepted > 20
        together = llm_with(Truth(answers, executor.vocab_size))
        for one, before in zip(together.generate(texts[:2], params), plain.generate(texts[:2], params), strict=True):
            assert (one.token_ids, one.logprobs) == (before.token_ids, before.logprobs)
        assert together.stats().speculation.drafted == 0
