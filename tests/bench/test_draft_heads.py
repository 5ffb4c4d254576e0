"""Random draft heads that benchmarks give to models: what they add, and that the model stays what it was."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import draft_head, expert_models, make_model
from benchmarks.models.speed_models import Shape, write_random_llama
from powerinfer.config import EngineConfig
from powerinfer.devices import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.models import load

SHAPE = Shape(d_model=128, d_ff=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, vocab=1000, context=64)


def executor(path: Path, draft_head: bool = True) -> CpuExecutor:
    engine = EngineConfig(threads=1, context=64, max_batch=1, kv_type="f32")
    return load(open_checkpoint(path, draft_head=draft_head), engine)


def batch(tokens: list[int]) -> Batch:
    span = np.arange(len(tokens), dtype=np.int32)
    pages = np.arange(2, dtype=np.int32)[None]
    return Batch(np.array(tokens, np.int32), span, np.zeros_like(span), pages, span)


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_a_head_costs_a_layer_and_says_something(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = tmp_path / "plain.gguf", tmp_path / "drafting.gguf"
    write_random_llama(plain, SHAPE, kind=kind, head="Q8_0")
    monkeypatch.setattr(sys, "argv", ["draft_head", str(plain), str(path)])
    draft_head.main()
    whole, without = open_checkpoint(path, draft_head=True), open_checkpoint(plain)
    assert whole.config.draft is not None and not (whole.config.draft.embedding or whole.config.draft.head)
    assert whole.config.draft.layer == whole.config.layers[-1]
    assert whole.fingerprint == without.fingerprint, "prepared files of the one suit the other"
    assert whole.taken_type(f"layers.{SHAPE.n_layers}.draft_join") == kind
    tokens = [5, 9, 700, 3]
    drafting, alone = executor(path), executor(plain, False)
    assert np.array_equal(drafting.forward(batch(tokens)), alone.forward(batch(tokens)))
    head = drafting.drafter
    assert head is not None
    said = head.forward(batch([*tokens[1:], 8]), head.inputs(np.arange(4, dtype=np.int32)))
    assert np.isfinite(said).all() and said.std(axis=1).min() > 0.1
    written = path.read_bytes()
    draft_head.main()
    assert path.read_bytes() == written, "a file that exists is kept"
    with pytest.raises(ValueError, match="has a draft head already"):
        draft_head.add_draft_head(path, tmp_path / "twice.gguf")


def test_models_that_skip_neurons_and_models_of_experts(tmp_path: Path) -> None:
    sparse, experts = tmp_path / "sparse.gguf", tmp_path / "experts.gguf"
    asked = make_model.parser().parse_args([str(sparse), "--shape", "tiny", "--type", "q4_0"])
    make_model.make(sparse, make_model.plan_of(asked), asked.format, asked.type)
    from configs import small

    expert_models.write(experts, small(expert_models.CONFIGS["glm-4.5-air"]), expert_models.Weights("q8_0"))
    for path in (sparse, experts):
        target = path.with_stem(f"{path.stem}-mtp")
        draft_head.add_draft_head(path, target)
        checkpoint = open_checkpoint(target, draft_head=True)
        assert checkpoint.config.draft is not None, checkpoint.notes
        assert checkpoint.config.draft.layer.ffn == checkpoint.config.layers[-1].ffn
        assert executor(target).drafter is not None
