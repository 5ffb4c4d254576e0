"""The embedding alone, as a step beside a GPU begins: few tokens by one thread, more by all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_files import plain_folder
from sparse_models import tiny_llama

from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.kernels import cpu
from powerinfer.models import load


def batch_of(tokens: int, first: int, vocab: int) -> Batch:
    """At positions from `first` on."""
    numbers = np.arange(tokens, dtype=np.int32)
    pages = np.arange(-(-(first + tokens) // cpu.PAGE), dtype=np.int32)[None]
    return Batch((7 * numbers + first) % vocab, first + numbers, np.zeros(tokens, np.int32), pages, numbers)


@pytest.mark.parametrize("name", ["llama", "opt"])  # rotated, and with a row for each position
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_in_two_parts_is_the_whole(name: str, threads: int, tmp_path: Path) -> None:
    """For one token, for as many as one thread looks up, and for more; each at positions that the last step had not."""
    path = tiny_llama(tmp_path / "m.gguf") if name == "llama" else plain_folder(tmp_path / "m", name)
    engine = EngineConfig(threads=threads, context=128, max_batch=1, prefix_cache=False, prefill_chunk=64)
    whole, parts = (load(open_checkpoint(path), engine) for _ in "12")
    at = 0
    try:
        for tokens in (1, 32, 33, 2, 1):
            batch = batch_of(tokens, at, whole.vocab_size)
            at += tokens
            wanted = whole.forward(batch).copy()
            embedded = parts.embedded(batch).copy()
            assert embedded.shape == (tokens, parts.d_model) and np.ptp(embedded) > 0
            np.testing.assert_array_equal(parts.finish(batch), wanted)
    finally:
        whole.close()
        parts.close()


def test_its_time_is_taken(tmp_path: Path) -> None:
    executor = load(open_checkpoint(tiny_llama(tmp_path / "m.gguf")), EngineConfig(threads=2, context=64, max_batch=1))
    try:
        executor._program.timed = True
        executor.embedded(batch_of(1, 0, executor.vocab_size))
        times = executor._program.take_times()
        assert times[0][0] == "embed" and times[0][1] > 0 and not any(seconds for _, seconds in times[1:])
    finally:
        executor.close()
