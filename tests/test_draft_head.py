"""The draft head of a model (MTP): read from either kind of file, beside `transformers`, in chunks and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

families = pytest.importorskip("families")

from draft_models import DraftModel  # noqa: E402
from families import CONTEXT, ROUNDING, TOKENS, rms, scattered_pages  # noqa: E402

from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import Batch  # noqa: E402
from powerinfer.devices.cpu import CpuExecutor  # noqa: E402
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from powerinfer.models import load  # noqa: E402

CASES = [
    ("qwen35", False), ("qwen35-moe", False), ("qwen3-next", False), ("glm4-moe", False), ("glm4-moe", True),
    ("deepseek-v3", False), ("deepseek-v3", True), ("glm4-moe-lite", False),
]  # fmt: skip
NAMES = [f"{name}{'-whole' * whole}" for name, whole in CASES]


def executor_of(checkpoint: Checkpoint, **options: Any) -> CpuExecutor:
    settings = {"threads": 1, "context": CONTEXT, "kv_type": "f32", "prefill_chunk": TOKENS, "max_batch": 4}
    return load(checkpoint, EngineConfig(**(settings | options)))


def batch_of(tokens: np.ndarray, first: int, pages: np.ndarray, state: int = 0) -> Batch:
    """Tokens of one sequence from a position on, all of whose logits are wanted."""
    span, slot = np.arange(len(tokens), dtype=np.int32), np.array([state], np.int32)
    rows = np.zeros(len(tokens), np.int32)
    return Batch(np.ascontiguousarray(tokens), first + span, rows, pages[None], span, slot, slot)


def run(
    executor: CpuExecutor, tokens: np.ndarray, pages: np.ndarray, chunks: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(logits of the model, hidden states that the head reads and gives, its logits) of a text in pieces."""
    head, at, parts = executor.drafter, 0, []
    assert head is not None
    for n in chunks:
        rows = np.arange(n, dtype=np.int32)
        of_model = executor.forward(batch_of(tokens[at : at + n], at, pages)).copy()
        inputs = head.inputs(rows)
        of_head = head.forward(batch_of(tokens[at + 1 : at + n + 1], at, pages), inputs).copy()
        parts.append((of_model, inputs, head.outputs(rows), of_head))
        at += n
    assert at == len(tokens) - 1
    return tuple(np.concatenate(one) for one in zip(*parts, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("layout", ["folder", "gguf"])
@pytest.mark.parametrize(("name", "whole"), CASES, ids=NAMES)
def test_a_head_is_that_of_transformers(name: str, whole: bool, layout: str, tmp_path: Path) -> None:
    model = DraftModel(name, whole=whole)
    checkpoint = model.open(model.save(layout, tmp_path))
    assert checkpoint.notes == [] or "transposing" in checkpoint.notes[0], checkpoint.notes
    draft = checkpoint.config.draft
    assert draft is not None and (draft.embedding, draft.head, draft.final_norm) == (whole, whole, True)
    executor = executor_of(checkpoint)
    _, *ours = run(executor, model.tokens, scattered_pages(executor, 1)[0], [TOKENS])
    executor.close()
    for got, exact, narrow in zip(ours, model.exact, model.narrow, strict=True):
        assert rms(got - exact) <= ROUNDING * rms(narrow - exact)
