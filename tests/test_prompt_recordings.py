"""Chunks of prompts that are padded, recorded and replayed, and the trial that decides it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import families
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gpu_device  # noqa: E402
from families import case_named  # noqa: E402
from test_gpu_layers import all_of, counting_recorder, engine_of, on_gpu  # noqa: E402
from test_hybrid_experts import static_where_emulated  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer.devices.batch import Batch, LogitsNeed  # noqa: E402
from powerinfer.devices.gpu import GpuLayers  # noqa: E402
from powerinfer.devices.recording import PROMPTS_BYTES, recorder_of  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.devices.streams import CudaStreams  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hybrid import prompt_trial  # noqa: E402
from powerinfer.hybrid.experts import ExpertSplit  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.prompt_trial import SIZES, PaddedPrompts, measured, settle  # noqa: E402
from powerinfer.hybrid.resolved import Resolved  # noqa: E402
from powerinfer.kernels import gpu  # noqa: E402
from powerinfer.placement.working_memory import prompt_recordings  # noqa: E402

PADDED = (48, 64)
LENGTHS = (40, 48, 33, 60, 41, 64, 50)
"""Of chunks: three and more of each padded number."""


def store(cached: Any, new: Any, slots: Any) -> None:
    """`gpu.store` that launches the same for all data, as Triton's does; of float32."""
    flat = cached.data.view(-1, *new.shape[1:])
    longer = torch.cat((flat, flat[:1]))
    longer[torch.where(slots < 0, len(flat), slots)] = new
    flat.copy_(longer[:-1])


@pytest.fixture
def static(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    static_where_emulated(monkeypatch)
    if not gpu_device.CUDA:
        monkeypatch.setattr(gpu, "store", store)


@contextmanager
def whole(truth: Truth, **options: Any) -> Iterator[tuple[SplitExecutor, Resolved]]:
    checkpoint = open_checkpoint(truth.path)
    resolved = Resolved(checkpoint, engine_of(**options), **all_of(truth))
    hot = [np.arange(getattr(layer.ffn, "n_experts", 0), dtype=np.int32) for layer in checkpoint.config.layers]
    executor = load_split(resolved, ExpertSplit(hot) if checkpoint.config.experts else None)
    try:
        yield executor, resolved
    finally:
        executor.close()


def batch_of(
    tokens: np.ndarray, pages: np.ndarray, first: int = 0, row: int = -1, needs: LogitsNeed = LogitsNeed.LOGITS
) -> Batch:
    """A chunk of one sequence, of which the logits of a token, by default the last one, count."""
    places = np.arange(len(tokens), dtype=np.int32)
    return Batch(tokens, first + places, np.zeros_like(places), pages[None], places[row : row + 1 or None], needs=needs)


def chunk(executor: SplitExecutor, *about: Any, **more: Any) -> np.ndarray:
    return executor.forward(batch_of(*about, **more)).copy()


def stored(executor: SplitExecutor) -> list[np.ndarray]:
    """All keys and values, [pages, slots, heads, dim]."""
    return [part.data.cpu().numpy().copy() for parts in executor.gpu._cache.values() for part in parts]


def texts_read(executor: SplitExecutor, truth: Truth) -> list[np.ndarray]:
    """The logits behind chunks of several lengths, of the token behind each, of chunks behind others, and of two
    sequences together."""
    text, pages = truth.texts[0].astype(np.int32), families.scattered_pages(executor, 3)
    logits = []
    for length in LENGTHS:
        before = stored(executor)
        logits.append(chunk(executor, text[:length], pages[0]))
        for old, new in zip(before, stored(executor), strict=True):
            mine = np.zeros(old.shape[:2], np.bool_)
            mine.reshape(-1)[pages[0].repeat(32)[:length] * 32 + np.arange(length) % 32] = True
            assert np.array_equal(old[~mine], new[~mine]), "nothing else is written"
        logits.append(chunk(executor, text[length : length + 1], pages[0], first=length))
    chunk(executor, text[:32], pages[0])
    logits += [chunk(executor, text[32:], pages[0], first=32) for _ in range(3)]
    for first in (20, 24, 22):
        parts = [batch_of(text[:count], pages[1 + row]) for row, count in enumerate((first, 45 - first))]
        fields = (np.concatenate([getattr(one, name) for one in parts]) for name in ("tokens", "positions"))
        rows, last = np.repeat(np.arange(2, dtype=np.int32), (first, 45 - first)), np.array([first - 1, 44], np.int32)
        logits.append(executor.forward(Batch(*fields, rows, pages[1:], last)).copy())
    return logits


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek-v2-lite"])
@pytest.mark.usefixtures("static")
def test_replayed_chunks_have_the_bits_of_launched_ones(name: str, tmp_path: Path) -> None:
    """They are those of the model, and write no slot beside theirs."""
    truth, runs, made = Truth(case_named(name), "gguf", tmp_path), [], list[int]()
    for recorder in (None, counting_recorder(made)):
        with whole(truth) as (executor, _):
            executor.gpu.pad_prompts(PADDED)
            executor.gpu.record(recorder)
            runs.append(texts_read(executor, truth))
    for launched, replayed in zip(*runs, strict=True):
        np.testing.assert_array_equal(launched, replayed)
    for at, length in enumerate(LENGTHS):
        assert families.rms(runs[0][2 * at] - truth.logits[0][length - 1]) <= truth.allowed(2)
    for at in range(2 * len(LENGTHS), 2 * len(LENGTHS) + 3):
        assert families.rms(runs[0][at] - truth.logits[0][-1]) <= truth.allowed(2)
    assert len(made) >= 4 and min(made) > 0


@pytest.mark.usefixtures("device")
def test_padding_changes_no_bit(tmp_path: Path) -> None:
    """A chunk's bits are those of the same tokens before others in a chunk of the padded number; in a trace, too."""
    truth = Truth(case_named("qwen3"), "gguf", tmp_path)
    text = truth.texts[0].astype(np.int32)
    with whole(truth) as (executor, _):
        pages = families.scattered_pages(executor, 2)
        wanted, last = executor.forward(batch_of(text[:36], pages[0], row=32)).copy(), np.array([32], np.int32)
        hidden = executor.hidden_states(last).copy()
        executor.gpu.pad_prompts((36, 48))
        np.testing.assert_array_equal(chunk(executor, text[:33], pages[1]), wanted)
        np.testing.assert_array_equal(executor.hidden_states(last), hidden)
        with executor.traced() as trace:
            np.testing.assert_array_equal(chunk(executor, text[:33], pages[1]), wanted)
        assert len(trace.steps) == 1
        batch = batch_of(text[:33], pages[1], needs=LogitsNeed.CANDIDATES)
        executor.forward(batch)
        assert batch.logits is not None
        np.testing.assert_array_equal(batch.logits(), wanted)


@pytest.mark.usefixtures("static")
def test_what_is_not_recorded(tmp_path: Path) -> None:
    """Layers with states, a part of the model elsewhere, inputs of layers, of which users are told; chunks beyond the
    largest number."""
    cases = {"llama3": None, "qwen35-heads": "layers have states", "gemma3n": "layers get inputs of their own"}
    paths = list[Path]()
    for name, problem in cases.items():
        (folder := tmp_path / name).mkdir()
        truth = Truth(case_named(name), "folder", folder)
        paths.append(truth.path)
        with whole(truth) as (executor, resolved):
            settle(executor, resolved, None)
            assert executor.choices.prompts is None
            executor.gpu.record(counting_recorder([]))
            assert executor.gpu.prompts_problem == problem
            if problem is not None:
                settle(executor, resolved, None)
                assert str(executor.choices.prompts) == f"chunks are launched ({problem})"
                continue
            executor.gpu.pad_prompts(PADDED)
            padded = [executor.gpu.prompts.padded(n) for n in (1, 32, 33, 48, 49, 64, 65)]
            assert padded == [0, 0, 48, 48, 64, 64, 0]
    resolved = Resolved(open_checkpoint(paths[0]), engine_of(), **on_gpu(1))
    executor = load_split(resolved)
    executor.gpu.record(counting_recorder([]))
    settle(executor, resolved, None)
    assert executor.choices.texts()["prompts"] == "chunks are launched (a part of the model is elsewhere)"
    executor.close()


@pytest.mark.usefixtures("static")
def test_memory_of_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take what is left, up to a limit; where that is too little, or the device runs out, chunks are launched."""
    truth, made = Truth(case_named("llama3"), "folder", tmp_path), list[int]()
    text = truth.texts[0].astype(np.int32)
    with whole(truth) as (executor, resolved):
        layers = executor.gpu
        layers.record(recorder := counting_recorder(made))
        layers.pad_prompts(PADDED)
        before, each = layers.memory()["scratch"], PROMPTS_BYTES // 5
        monkeypatch.setattr("powerinfer.devices.gpu.recorder_of", lambda _: recorder)
        monkeypatch.setattr(layers, "_memory_taken", lambda: (7 * len(made), each * len(made)))
        for room, shapes in ((None, 5), (7 + 3 * each, 3), (each, 0), (0, 0)):
            assert layers.record_prompts(room) == bool(shapes) == layers.prompts.records
            assert layers.recorded_bytes == each * shapes
            assert layers.memory()["scratch"] == before + (7 + each * shapes if shapes else 0)

        def fails(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        layers.record_prompts()
        layers.prompts.use(fails)
        pages = families.scattered_pages(executor, 1)[0]
        wanted = [chunk(executor, text[:40], pages) for _ in range(3)]
        assert not layers.prompts.records and layers.prompts.sizes == PADDED
        assert all(np.array_equal(one, wanted[0]) for one in wanted)
        needed = [prompt_recordings(resolved.checkpoint.config, tokens, layers.layers) for tokens in (64, 512)]
        assert PROMPTS_BYTES < needed[0] < needed[1]


@pytest.mark.usefixtures("static")
def test_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of tokens are tried until one gains too little; later starts pad as the first one did."""
    truth, asked = Truth(case_named("llama3"), "folder", tmp_path), list[tuple[int, bool]]()

    def seconds(layers: GpuLayers, tokens: int, _: int) -> float:
        asked.append((tokens, layers.prompts.records))
        return 0.001 * tokens if layers.prompts.records else 0.085

    monkeypatch.setattr(GpuLayers, "prompt_seconds", seconds)
    monkeypatch.setattr(prompt_trial, "SIZES", (40, 64, 72))

    def start(room: int | None = None, **options: Any) -> tuple[str, tuple[int, ...], bool]:
        asked.clear()
        with whole(truth, **options) as (executor, resolved):
            executor.gpu.record(counting_recorder([]))
            settle(executor, resolved, room)
            prompts = executor.gpu.prompts
            return str(executor.choices.prompts), prompts.sizes, prompts.records

    told, sizes, records = start(trial=False)
    assert told == "chunks are launched (--no-trial: nothing was timed)" and not sizes and not asked
    told, sizes, records = start()
    assert told.startswith(
        "chunks of 33 to 72 tokens are padded to 40, 64, 72 and replayed (ms of a chunk launched and replayed, by "
        "tokens: 40: 85 and 40, 64: 85 and 64, 72: 85 and 72), measured in "
    )
    assert asked == [(33, False), (40, True), (41, False), (64, True), (65, False), (72, True)]
    assert sizes == (40, 64, 72) and records
    told, sizes, records = start(room=0)
    assert not asked and sizes == (40, 64, 72) and not records and "and launched: no room to record them" in told
    told, sizes, records = start(room=0, retrial=True)
    assert told.startswith("chunks are launched (no room to record them)") and not sizes and not asked
    assert not start()[1], "as it was measured"
    monkeypatch.setattr(prompt_trial, "SIZES", (40, 64, 72, 74))
    with whole(truth) as (executor, _):
        executor.gpu.record(counting_recorder([]))
        assert measured(executor.gpu, (40, 64, 72), None).last == 72
        monkeypatch.setattr(prompt_trial, "GAIN", 0.6)
        assert measured(executor.gpu, (40, 64, 72), None) == PaddedPrompts(40, ((40, 0.085, 0.04), (64, 0.085, 0.064)))
        assert executor.gpu.prompts.sizes == () and list(SIZES) == sorted(set(SIZES))


def test_a_recording_keeps_no_memory_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of cuBLAS, which would lie in the memory of a recording that may be dropped; of one that fails, too."""
    log, parts = list[str](), ("CUDAGraph", "Stream", "current_stream", "graph", "graph_pool_handle", "stream")
    streams, cuda = CudaStreams(torch.device("cuda", 0)), MagicMock(spec_set=parts)
    monkeypatch.setattr(streams, "_cuda", cuda)
    monkeypatch.setattr("powerinfer.devices.streams.free_workspaces", lambda: log.append("freed"))
    cuda.graph.return_value.__exit__.return_value = None  # which else swallows errors

    def fails() -> None:
        raise RuntimeError("no such operation")

    record = streams.recorder()
    record(lambda: log.append("ran"))
    with pytest.raises(RuntimeError, match="no such"):
        record(fails)
    assert log == ["freed", "ran", "freed", "freed", "freed"]


@pytest.mark.skipif(gpu_device.CUDA, reason="Triton's interpreter is not at hand")
def test_kernels_of_recorded_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, on a device that works later: nothing of a chunk asks the host, and a replay of fewer tokens has the
    bits of the launched chunk."""
    pytest.importorskip("triton")
    from deferred import deferred

    monkeypatch.setattr(gpu, "_forced", [True])
    truth = Truth(case_named("mixtral"), "folder", tmp_path, num_hidden_layers=1)
    text = truth.texts[0].astype(np.int32)
    with deferred(1) as machine, whole(truth) as (executor, _):
        pages = families.scattered_pages(executor, 1)[0]
        executor.gpu.pad_prompts((36,))
        executor.gpu.record(recorder_of(executor.gpu.device))
        wanted, before = executor.forward(batch_of(text[:36], pages, row=32)).copy(), machine.replays
        found = [chunk(executor, text[:length], pages) for length in (34, 33)]
        assert machine.replays == before + 2
    np.testing.assert_array_equal(found[-1], wanted)
    assert families.rms(wanted - truth.logits[0][32]) <= truth.allowed(2)
