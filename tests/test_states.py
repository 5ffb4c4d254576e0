"""Layers with states (Gated DeltaNet, Mamba2, short convolutions): answers with and without kept states, and slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import conv_gguf, delta_gguf, mamba_gguf
from state_steps import CONTEXT, answers, executor, step, texts

from benchmarks.models.gguf_writer import U32
from powerinfer import LLM, SamplingParams
from powerinfer.runtime import state_cache

MODELS = {
    "delta": lambda: delta_gguf().put("qwen35.context_length", U32, CONTEXT),
    "mamba": lambda: mamba_gguf().put("nemotron_h.context_length", U32, CONTEXT),
    "conv": lambda: conv_gguf().put("lfm2.context_length", U32, CONTEXT),
}


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param]().write(tmp_path_factory.mktemp(request.param) / "m.gguf")


WAYS: list[dict[str, Any]] = [
    {"max_batch": 8, "threads": 3},
    {"max_batch": 3, "prefill_chunk": 45, "mixed_chunk": 5},
    {"kv_type": "f16"},
]


def test_answers_have_the_same_bits_with_and_without_kept_states(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a prompt begin and end where they like, within what Mamba2 computes together, too."""
    monkeypatch.setattr(state_cache, "_INTERVAL", 64)
    system, short = texts(1, 300)[0], texts(1, 40, 1)[0]
    prompts = [system + one for one in texts(3, 20)] + [short + one for one in texts(3, 50)] + [system[:100]]
    alone = answers(path, prompts, prefix_cache=False, max_batch=1, prefill_chunk=512, threads=1)
    assert len({tuple(tokens) for tokens, _ in alone}) == len(prompts), "the answers are not all alike"
    for options in WAYS:
        assert answers(path, prompts, 2, **options) == alone


def test_a_prefix_is_not_computed_again(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    base = texts(1, 200)[0]
    with LLM(path, threads=1, gpu="none", context=CONTEXT) as llm:
        first = llm.generate([base], params)[0]
        again = llm.generate([[*base, *first.token_ids, 1, 2, 3]], params)[0]
        assert (first.cached_tokens, again.cached_tokens) == (0, 192)


def test_an_aborted_request_harms_nobody(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = texts(3, 100)
    with LLM(path, threads=2, gpu="none", context=CONTEXT, max_batch=2, prefill_chunk=30) as llm:
        expected = [llm.generate([one], params)[0].token_ids for one in prompts]
        for at in (1, 7, 33):
            stream = llm.stream(prompts[0], params)
            for _ in range(at):
                next(stream)
            stream.close()
            assert [one.token_ids for one in llm.generate(prompts, params)] == expected


@pytest.mark.parametrize("at", [1, 32, 40, 59])
def test_a_state_that_is_read_elsewhere_stays(path: Path, at: int) -> None:
    model, text = executor(path), texts(1, 60)[0]
    whole = model.forward(step(text, 0, 0, 0)).copy()
    model.forward(step(text[:at], 0, 0, 3))
    for _ in range(3):  # from the same state
        assert np.array_equal(model.forward(step(text[at:], at, 3, 1)), whole)
    model.close()


def test_numbers_that_are_none_stay_in_their_sequence(path: Path) -> None:
    """A state with NaN belongs to one sequence; the next one in its slot begins with zeros."""
    model, text = executor(path), texts(1, 40)[0]
    whole = model.forward(step(text, 0, 0, 0)).copy()
    model._program.residual(1)[:] = np.nan
    model._run(step(text[:1], 40, 0, 0), 1, model._program.size)  # its result is whatever it is
    assert np.array_equal(model.forward(step(text, 0, 0, 0)), whole)
    model.close()
