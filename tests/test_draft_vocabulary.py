"""Draft vocabularies: what they list, logits of listed tokens alone, and answers, which stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

families = pytest.importorskip("families")

from draft_models import DraftModel  # noqa: E402
from families import TOKENS, case_named, random_model, save, scattered_pages  # noqa: E402
from test_draft_head import batch_of, executor_of  # noqa: E402
from test_speculation_models import PARAMS, any_number, llm_of, prompts  # noqa: E402, F401

from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices.cpu import CpuExecutor, Drafting  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.kernels import draft_rows  # noqa: E402
from powerinfer.kernels.cpu import LANES  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.runtime.draft_model import DraftModel as SmallerModel  # noqa: E402
from powerinfer.runtime.draft_sources import draft_source  # noqa: E402
from powerinfer.runtime.draft_vocabulary import DraftVocabulary  # noqa: E402
from powerinfer.runtime.mtp import MtpDrafts  # noqa: E402


def test_first_tokens_and_those_that_were_seen() -> None:
    vocabulary = DraftVocabulary(80_005)
    first, last = 10_000 // LANES, 80_000 // LANES
    assert vocabulary.restricts
    listed = vocabulary.changed()
    assert listed is not None and listed.tolist() == list(range(first))
    vocabulary.note([3, 20_001, 20_002, 79_999, 80_004])  # the last panel is not a whole one
    listed = vocabulary.changed()
    assert listed is not None and listed.dtype == np.int32
    assert listed.tolist() == [*range(first), 20_001 // LANES, last - 1]
    assert vocabulary.token(7) == 7
    assert vocabulary.token(first * LANES + 1) == 20_001 // LANES * LANES + 1
    logits = np.arange(80_005, dtype=np.float32)
    assert len(vocabulary.narrow(logits)) == len(listed) * LANES
    vocabulary.note([20_003, 5])
    vocabulary.note([])
    assert vocabulary.changed() is None


def test_the_half_that_was_seen_last_stays() -> None:
    vocabulary = DraftVocabulary(80_000)
    first = 10_000 // LANES
    most = draft_rows.RECENT // LANES
    panels = np.arange(first, first + most + 1)
    for panel in panels:
        vocabulary.note([int(panel) * LANES])
    vocabulary.note([int(panels[0]) * LANES])  # again
    listed = vocabulary.changed()
    assert listed is not None
    kept = listed[first:].tolist()
    assert kept == [panels[0], *panels[-(most // 2 - 1) :]]


@pytest.mark.parametrize("size", [0, 100, 8191])
def test_a_small_vocabulary_is_drafted_from_as_a_whole(size: int) -> None:
    vocabulary = DraftVocabulary(size)
    vocabulary.note([size // 2])
    assert not vocabulary.restricts and vocabulary.changed() is None and vocabulary.token(99) == 99
    assert len(vocabulary.narrow(np.zeros(size, np.float32))) == size


@pytest.mark.parametrize("quantize", [None, "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["qwen35", "glm4-moe"])
def test_logits_of_listed_panels_have_the_same_bits(name: str, quantize: str | None, tmp_path: Path) -> None:
    """Next to each other and not, of many rows and of one, on two threads; later all again."""
    model = DraftModel(name)
    path = model.save("folder", tmp_path)
    checkpoint = open_checkpoint(path, draft_head=True, **({"quantize": quantize} if quantize else {}))
    executor = executor_of(checkpoint, threads=2)
    head, pages = executor.drafter, scattered_pages(executor, 1)[0]
    assert head is not None and head.lists
    rows = np.arange(TOKENS, dtype=np.int32)
    executor.forward(batch_of(model.tokens[:-1], 0, pages))
    inputs = head.inputs(rows)
    following = batch_of(model.tokens[1:], 0, pages)
    whole = head.forward(following, inputs).copy()
    for panels in ([0], [1, 2, 3], [0, 2, 3, 5], [5]):
        head.list_panels(np.array(panels, np.int32))
        columns = np.concatenate([np.arange(LANES) + LANES * panel for panel in panels])
        assert columns.max() < executor.vocab_size
        got = head.forward(following, inputs)[:, : len(columns)]
        assert np.array_equal(got, whole[:, columns])
        alone = head.forward(batch_of(model.tokens[1:2], 0, pages), inputs[:1])
        assert np.array_equal(alone[0, : len(columns)], whole[0, columns])
    of_model = executor.forward(batch_of(model.tokens[:4], 0, pages)).copy()
    head.list_panels(np.empty(0, np.int32))
    assert np.array_equal(head.forward(following, inputs), whole)
    assert np.array_equal(executor.forward(batch_of(model.tokens[:4], 0, pages)), of_model), "which has all tokens"
    for wrong in ([3, 2], [-1], [99], [1, 1]):
        with pytest.raises(ValueError, match="panels of the output head"):
            head.list_panels(np.array(wrong, np.int32))
    executor.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of 96 tokens are drafted from in part."""
    monkeypatch.setattr(draft_rows, "LEAST", LANES)


def test_answers_with_a_draft_vocabulary_stay_the_same(small: None, tmp_path: Path) -> None:
    path = DraftModel("glm4-moe").save("folder", tmp_path)
    plain = EngineConfig(threads=2, context=128, max_batch=3, speculate="off")
    expected = llm_of(load(open_checkpoint(path), plain), plain).generate(prompts(96), PARAMS)
    engine = EngineConfig(threads=2, context=128, max_batch=3)
    executor = load(open_checkpoint(path, draft_head=True), engine)
    source = draft_source(engine, executor, executor.config)
    assert isinstance(source, MtpDrafts) and source._vocabulary.restricts
    llm = llm_of(executor, engine, source)
    for one, before in zip(llm.generate(prompts(96), PARAMS), expected, strict=True):
        assert (one.token_ids, one.logprobs) == (before.token_ids, before.logprobs)
    assert llm.stats().speculation.drafted > 50


def test_drafts_are_of_the_draft_vocabulary(small: None, tmp_path: Path) -> None:
    case = case_named("qwen3")
    config = case.config()
    path = save(case, config, random_model(case, config, 3), "folder", tmp_path)
    engine = EngineConfig(threads=2, context=128, max_batch=3, speculate="off")
    executor = load(open_checkpoint(path), engine)
    smaller = load(open_checkpoint(path), engine, drafting=Drafting(pool=executor.pool))
    assert isinstance(smaller, CpuExecutor)
    source = SmallerModel(smaller, executor.vocab_size, list_panels=smaller.list_draft_panels)
    drafted: set[int] = set()
    draft = source.draft

    def watched(wanted: list) -> list[list[int]]:
        drafts = draft(wanted)
        listed = source._vocabulary._listed
        for tokens in drafts:
            assert all(token // LANES in listed for token in tokens)
            drafted.update(tokens)
        return drafts

    source.draft = watched  # type: ignore[method-assign, assignment]
    llm = llm_of(executor, engine, source)
    text = [1, 2, 3]
    expected = llm_of(load(open_checkpoint(path), engine), engine).generate([text], PARAMS[0])[0].token_ids
    assert llm.generate([text], PARAMS[0])[0].token_ids == expected
    assert drafted and not {token // LANES for token in expected} <= {0}, "the first panel is not all"
    stats = llm.stats().speculation
    assert 0 < stats.accepted <= stats.drafted
    llm.close()
