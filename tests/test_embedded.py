"""The embedding alone, as a step beside a GPU begins: few tokens by one thread, more by all."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_files import plain_folder
from sparse_models import tiny_llama

from powerinfer import _native
from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.kernels import cpu
from powerinfer.kernels.candidates import CANDIDATES, MOST, WORDS, any_tokens
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


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_rows_of_tokens_that_a_gpu_brings(name: str, tmp_path: Path) -> None:
    """A thread is in its place; logits that are no numbers are told, and rows that are lacking are read."""
    path = tiny_llama(tmp_path / "m.gguf") if name == "llama" else plain_folder(tmp_path / "m", name)
    engine = EngineConfig(threads=2, context=128, max_batch=4, prefix_cache=False, prefill_chunk=64)
    whole, ours = (load(open_checkpoint(path), engine) for _ in "12")
    numbers, largest = np.zeros(64, np.uint32), (np.full(4, -1, np.int64), np.zeros(4, np.float32))
    flags = _native.HostFlags(numbers[:1], numbers[32:33], 20.0)
    rows = np.arange(4, dtype=np.int32)
    table = np.arange(16, dtype=np.int32).reshape(4, 4)

    def bring(number: int, tokens: list[int], logits: list[float]) -> None:
        largest[0][:], largest[1][:] = tokens, logits
        numbers[0] = number

    try:
        assert ours.looks_up
        for number, first in enumerate((3, 40, 3), 1):
            wanted = replace(batch_of(4, first, whole.vocab_size), rows=rows, page_table=table)
            batch, out = replace(wanted, tokens=np.zeros(4, np.int32)), np.full((4, ours.d_model), np.nan, np.float32)
            given = flags, number, 0.0, largest, batch, out
            assert not ours.answer_tokens(*given) and numbers[32] == number - 1 and np.isnan(out).all()
            gpu = threading.Thread(target=bring, args=(number, wanted.tokens.tolist(), [0.5, np.nan, np.inf, -np.inf]))
            gpu.start()
            assert ours.answer_tokens(flags, number, 20.0, *given[3:]) and numbers[32] == number
            gpu.join()
            assert batch.tokens.tolist() == [wanted.tokens[0], -1, -2, -3]
            np.testing.assert_array_equal(out, whole.embedded(wanted))
        for wrong in (replace(batch, positions=batch.positions - 4), replace(batch, tokens=batch.tokens[:3])):
            with pytest.raises(ValueError, match=r"position|differ in length"):
                ours.answer_tokens(flags, 4, 0.0, largest, wrong, out)
        for token in (-1, whole.vocab_size):
            bring(4, [0, 1, 2, token], [0.0] * 4)
            with pytest.raises(ValueError, match="outside the embedding"):
                ours.answer_tokens(flags, 4, 0.0, largest, batch, out)
        assert numbers[32] == 3
    finally:
        whole.close()
        ours.close()


def test_rows_of_tokens_that_are_drawn(tmp_path: Path) -> None:
    """Out of candidates that a GPU brings; where one cannot be, nothing is answered."""
    engine = EngineConfig(threads=2, context=128, max_batch=4, prefix_cache=False, prefill_chunk=64)
    path = tiny_llama(tmp_path / "m.gguf")
    whole, ours = (load(open_checkpoint(path), engine) for _ in "12")
    numbers, records = np.zeros(64, np.uint32), np.zeros((4, WORDS), np.int32)
    flags = _native.HostFlags(numbers[:1], numbers[32:33], 20.0)
    of_rows = records.view(CANDIDATES)[:, 0]
    of_rows["count"], of_rows["values"][:, :3] = 3, (2.0, 2.0, 1.0)
    of_rows["ids"][:, :3] = [(9 + row, 5 + row, 1) for row in range(4)]
    draws = np.array([(0.0, 0, 1, 0, 0), (1.0, 3, 1, 0, 0.999), (1.0, 3, 1, 0, 0), (1.0, 3, 1, 0, 0.5)])
    wanted = replace(
        batch_of(4, 3, whole.vocab_size), rows=np.arange(4, dtype=np.int32), tokens=np.array([5, 1, 7, 12], np.int32),
        page_table=np.arange(16, dtype=np.int32).reshape(4, 4),
    )  # fmt: skip
    batch, out = replace(wanted, tokens=np.zeros(4, np.int32), draws=draws), np.zeros((4, ours.d_model), np.float32)
    try:
        assert not ours.answer_tokens(flags, 1, 0.0, (records,), batch, out)
        numbers[0] = 2
        assert ours.answer_tokens(flags, 1, 0.0, (records,), batch, out) and numbers[32] == 1
        assert batch.tokens.tolist() == wanted.tokens.tolist()
        np.testing.assert_array_equal(out, whole.embedded(wanted))
        of_rows["count"][2] = MOST + 1
        assert ours.answer_tokens(flags, 2, 0.0, (records,), batch, out) and numbers[32] == 1
        assert batch.tokens.tolist() == [5, 1, -1, 12]
        np.testing.assert_array_equal(out, whole.embedded(replace(wanted, tokens=any_tokens(records, batch.tokens))))
        for brought, wrong in ((records[:, 1:].copy(), batch), (records, replace(batch, draws=draws[:3]))):
            with pytest.raises(ValueError, match=r"another length|a draw of its own"):
                ours.answer_tokens(flags, 2, 0.0, (brought,), wrong, out)
        of_rows["ids"][3, 0] = whole.vocab_size
        of_rows["values"][3, 0] = 9.0
        with pytest.raises(ValueError, match="outside the embedding"):
            ours.answer_tokens(flags, 2, 0.0, (records,), batch, out)
        assert numbers[32] == 1
    finally:
        whole.close()
        ours.close()


def test_its_time_is_taken(tmp_path: Path) -> None:
    executor = load(open_checkpoint(tiny_llama(tmp_path / "m.gguf")), EngineConfig(threads=2, context=64, max_batch=1))
    try:
        executor._program.timed = True
        executor.embedded(batch_of(1, 0, executor.vocab_size))
        times = executor._program.take_times()
        assert times[0][0] == "embed" and times[0][1] > 0 and not any(seconds for _, seconds in times[1:])
    finally:
        executor.close()
