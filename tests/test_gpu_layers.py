"""Layers on a GPU, or on one that torch's CPU emulates: every architecture against `transformers`, and failures.

The truth and the bound are those of families.py: float64, and four times the error that `transformers` makes
in float32. That a wrong configuration misses the bound is shown in test_architectures.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
import gpu_device  # noqa: E402
import test_gpu_kernels as kernels  # noqa: E402
from families import case_named  # noqa: E402
from gpu_device import EPS, device_name, sum_error, torch_device  # noqa: E402
from sparse_models import tiny_llama  # noqa: E402
from test_sparse import residual_of  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer.config import EngineConfig, FfnConfig  # noqa: E402
from powerinfer.devices import Batch, wanted  # noqa: E402
from powerinfer.devices.batch import LogitsNeed, StoppedError  # noqa: E402
from powerinfer.devices.cpu import CpuExecutor  # noqa: E402
from powerinfer.devices.gpu import GpuLayers  # noqa: E402
from powerinfer.devices.gpu_weights import Matrices, StoredMatrix  # noqa: E402
from powerinfer.devices.link import link_bytes  # noqa: E402
from powerinfer.devices.recording import Recorder, Recordings, Run, State, recorder_of  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.devices.step import Operator, Step  # noqa: E402
from powerinfer.devices.step_buffers import description_bytes  # noqa: E402
from powerinfer.devices.streams import ImmediateStreams, call_now  # noqa: E402
from powerinfer.devices.torch_device import choose_device, gpu_failures  # noqa: E402
from powerinfer.errors import ModelError, PowerInferError, RequestError  # noqa: E402
from powerinfer.formats.checkpoint import Checkpoint, RawTensor, open_checkpoint  # noqa: E402
from powerinfer.formats.quant import dequantize, quantize  # noqa: E402
from powerinfer.hardware.usable_gpus import check_gpus  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu, model_of, workload  # noqa: E402
from powerinfer.kernels import gpu  # noqa: E402
from powerinfer.kernels.candidates import ERROR, LIKELIEST  # noqa: E402
from powerinfer.kernels.gpu_types import MADE_CODES  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.placement.budget import Division, in_ram  # noqa: E402
from powerinfer.runtime.engine import LLM  # noqa: E402
from powerinfer.runtime.params import SamplingParams  # noqa: E402
from powerinfer.runtime.sampling import Sampler  # noqa: E402
from powerinfer.text.model_text import tokenizer_of  # noqa: E402

LAYERS = families.SIZES["num_hidden_layers"]


DECODED = [62, *[1] * 3, families.TOKENS - 65]
"""Chunks of a text: a prompt, single tokens from its second page into its third, and what is left at once."""


def engine_of(**options: Any) -> EngineConfig:
    settings = {"threads": 1, "context": families.CONTEXT, "kv_type": "f32", "prefill_chunk": families.TOKENS}
    return EngineConfig(**(settings | {"max_batch": 4} | options))


def on_gpu(layers: int = LAYERS, head: bool = False, pages: int | None = None) -> dict[str, Any]:
    """The part of a model that is on the test's device."""
    return {"device": UsedGpu(device_name()), "placement": Placement(layers, head, pages=pages)}


def everything() -> dict[str, Any]:
    """All layers and the head are there."""
    return on_gpu(head=True)


@contextmanager
def opened(path: Path, share: dict[str, Any], split: Any = None, **options: Any) -> Iterator[SplitExecutor]:
    engine = engine_of(**options)
    executor = load_split(Resolved(open_checkpoint(path, engine.quantize), engine, **share), split)
    try:
        yield executor
    finally:
        executor.close()


def all_of(truth: Truth) -> dict[str, Any]:
    """The whole model on the device."""
    return on_gpu(truth.config.num_hidden_layers, head=True)


@pytest.mark.sampled("case.name")
@pytest.mark.parametrize(("case", "layout"), families.device_cases())
@pytest.mark.usefixtures("device")
def test_logits(case: families.Case, layout: str, tmp_path: Path) -> None:
    """In one go, in chunks, token by token, two sequences together; all on the GPU, then a part of it."""
    truth = Truth(case, layout, tmp_path)
    tokens, total, every = truth.texts[0], families.TOKENS, truth.config.num_hidden_layers
    with opened(truth.path, on_gpu(every, head=True)) as executor:
        pages = families.scattered_pages(executor, 4)
        truth.check(families.run_chunks(executor, tokens, [total], pages[0]), what="whole")
        truth.check(families.run_chunks(executor, tokens, [1, 7, 32, 2, total - 42], pages[1]), what="in chunks")
        truth.check(families.run_chunks(executor, tokens, DECODED, pages[2]), what="token by token")
        together = families.run_two(executor, *truth.texts[:2], pages[2:])
        for text, ours in enumerate(together):
            truth.check(ours, text, "in a batch")
    fewest = open_checkpoint(truth.path).config.whole_layers(1) or every
    for layers in {fewest, every}:  # the head, and of one layer the others, on the CPU
        with opened(truth.path, on_gpu(layers)) as executor:
            truth.check(families.run_chunks(executor, tokens, [50, 1, total - 51], pages[3]), what=f"{layers} layers")


@pytest.mark.skipif(not kernels.TRITON or gpu_device.CUDA, reason="Triton's interpreter is not at hand")
@pytest.mark.parametrize("name", ["qwen3", "falcon-7b", "qwen35"])
@pytest.mark.usefixtures("device")
def test_the_kernels_of_a_gpu(name: str, tmp_path: Path) -> None:
    """Prompts and single tokens with Triton's kernels, in its interpreter; of as few layers as have every kind."""
    kinds = ["linear_attention", "full_attention"] if name == "qwen35" else []
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds} if kinds else {"num_hidden_layers": 1}
    truth = Truth(case_named(name), "folder", tmp_path, **layers)
    gpu.force_triton(True)
    try:
        with opened(truth.path, all_of(truth)) as executor:
            pages = families.scattered_pages(executor, 1)[0]
            ours = families.run_chunks(executor, truth.texts[0][:37], [33, 3, 1], pages)
        assert families.rms(ours - truth.logits[0][:37]) <= truth.allowed(2)
    finally:
        gpu.force_triton(None)


@pytest.mark.usefixtures("device")
def test_the_same_step_gives_the_same_bits(tmp_path: Path) -> None:
    truth = Truth(case_named("qwen3"), "folder", tmp_path)
    runs = []
    for _ in range(2):
        with opened(truth.path, everything()) as executor:
            pages = families.scattered_pages(executor, 2)
            runs += [families.run_chunks(executor, truth.texts[0], [60, 1, 14], own) for own in pages]
    assert all(np.array_equal(run, runs[0]) for run in runs[1:])


@pytest.mark.parametrize("types", [("F32", "F32", "F32"), ("F16", "Q8_0", "F16"), ("Q8_0", "Q5_0", "Q8_0")])
@pytest.mark.parametrize("biases", [(True, False, True), (False, False, False)])
@pytest.mark.usefixtures("device")
def test_matrices_on_the_same_rows(types: tuple[str, ...], biases: tuple[bool, ...]) -> None:
    """Joined or not, they give what each gives alone, one after another; Q5_0 becomes Q8_0."""
    rng, stored, expected, largest = np.random.default_rng(1), [], [], 0.0
    x = on_device(rng.standard_normal((3, 64)))
    own = [on_device(rng.standard_normal(rows)) if b else None for rows, b in zip((5, 8, 3), biases, strict=True)]
    for kind, rows, bias in zip(types, (5, 4, 3), own, strict=True):
        values = rng.standard_normal((rows, 64)).astype(np.float32)
        largest = max(largest, float((x.abs().cpu() @ torch.from_numpy(values).abs().T).max()))
        tensor = RawTensor(kind, (rows, 64), quantize(values, kind).reshape(-1))
        row_map = np.array([3, 0, -1, 2, -1, 1, 1, 3], np.int32) if rows == 4 else None
        stored.append(StoredMatrix(tensor, row_map))
        expected.append(gpu.linear(gpu.upload(tensor, torch_device(), row_map), x, bias))
    together = Matrices(stored, own, torch_device())
    assert len(together.weights) == (3 if "F16" in types else 1)
    assert together.nbytes == sum(gpu.weight_bytes(one.tensor.type, one.rows, 64) for one in stored)
    errors = (together(x) - torch.cat(expected, dim=1)).abs()
    each = sum_error(64) if device_name() == "cuda" else 32 * EPS
    assert errors.max() <= 2 * each * largest  # sums of 64 products in another order


class Tape(TorchDispatchMode):
    """Records torch's operations, and calls of the host, and replays them on the same tensors, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __enter__(self) -> Any:
        self._plain = ImmediateStreams.call
        ImmediateStreams.call = self._call  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *about: Any) -> None:
        ImmediateStreams.call = self._plain  # type: ignore[method-assign]
        super().__exit__(*about)

    def _call(self, _: Any, function: int, data: int) -> None:
        call_now(function, data)
        self.calls.append((call_now, (function, data), {}, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def again(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def on_device(values: np.ndarray) -> Any:
    return torch.from_numpy(np.array(values, np.float32, order="C")).to(torch_device())


def counting_recorder(made: list[int]) -> Recorder:
    """The device's own recorder, or a stand-in for one. Counts how often each recording is replayed."""
    if device_name() == "cpu":
        return stand_in_recorder(made)
    own = recorder_of(torch_device())
    assert own is not None

    def record(run: Run, state: State) -> Run:
        made.append(0)
        number, replay = len(made) - 1, own(run, state)

        def counted(given: State) -> State:
            made[number] += 1
            return replay(given)

        return counted

    return record


def static_where_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that can be recorded, which plain torch's cannot."""
    if device_name() == "cpu":
        monkeypatch.setattr(gpu, "attention", static_attention)


def stand_in_recorder(made: list[int]) -> Recorder:
    """Counts how often each recording is replayed. Operators that depend on data must be `static_attention`."""

    def record(run: Run, state: State) -> Run:
        made.append(0)
        number, tape = len(made) - 1, Tape()
        with tape:
            after = run(state)  # also runs, so the first replay has nothing to do

        def replay(_: State) -> State:
            made[number] += 1
            if made[number] > 1:
                tape.again()
            return after

        return replay

    return record


def static_attention(
    q: Any, cache: Any, contexts: Any, settings: Any, sinks: Any = None, *_: Any
) -> Any:
    """`gpu.attention` that launches the same for all data, as Triton's does."""
    assert sinks is None
    heads, kv_heads, dim = q.shape[1], cache[0].data.shape[2], q.shape[2]
    pages = contexts.pages.clamp(min=0).long()[contexts.rows.long()]
    keys, values = (part.values(pages).flatten(1, 2) for part in cache)
    place, seen = torch.arange(keys.shape[1]), contexts.positions.long()[:, None]
    hidden = (place > seen) | (place <= seen - (settings.window or 1 << 30))
    grouped = q.view(len(q), kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("tghd,tsgd->tghs", grouped, keys) * settings.score_scale
    weights = scores.masked_fill(hidden[:, None, None, :], -torch.inf).softmax(dim=-1)
    return torch.einsum("tghs,tsgd->tghd", weights, values).flatten(1)


@pytest.mark.parametrize(("name", "layers", "head"), [("gemma3n", 6, True), ("llama3", 1, False)])
def test_what_steps_hold_in_ram(
    name: str, layers: int, head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the CPU's own, as a plan counts it, without what this device lacks: what launches steps ahead."""
    pinned_bytes = gpu_device.count_pinned(monkeypatch)
    truth = Truth(case_named(name), "folder", tmp_path)
    resolved = Resolved(open_checkpoint(truth.path), engine_of(max_batch=3), **on_gpu(layers, head))
    model, executor = model_of(resolved), load_split(resolved)
    try:
        executor.gpu.rehearse(3)
        held = pinned_bytes()
    finally:
        executor.close()
    work, config = workload(model, resolved.engine), model.config
    counted = in_ram(model, work, Division(layers, head))["scratch"]
    counted -= model.scratch_bytes(work.tokens, 0 if head else 3) + link_bytes(work.tokens, config)
    counted -= 2 * 8 * sum(config.ffn_sizes[:layers])
    alone, ahead = (description_bytes(work.tokens, config.d_model, which) for which in (False, True))
    assert held == counted - head * (ahead - alone)


@pytest.mark.parametrize("name", ["llama3", "opt-post-norm", "falcon-7b", "falcon-40b", "qwen35-heads"])
@pytest.mark.usefixtures("device")
def test_replayed_steps_give_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of changing shapes, with neurons that are summed outside of what is recorded."""
    static_where_emulated(monkeypatch)
    truth, made, shown = Truth(case_named(name), "folder", tmp_path), [], []
    runs = []
    for recorder in (None, counting_recorder(made)):
        split = halves(open_checkpoint(truth.path), shown)
        with opened(truth.path, all_of(truth), split=split) as executor:
            executor.gpu.record(recorder)
            pages = families.scattered_pages(executor, 3)
            runs.append([families.run_chunks(executor, truth.texts[0], [3] * 20 + [1] * 15, pages[0])])
            families.run_chunks(executor, truth.texts[1][:32], [32], pages[1])
            rows = np.full((600, 3), -1, np.int32)  # their description does not fit where the others' were
            rows[0] = pages[1]
            none, slots = np.zeros(1, np.int32), np.zeros(600, np.int32)
            for position in (32, 33, 34):
                at = np.full(1, position, np.int32)
                runs[-1].append(executor.forward(Batch(truth.texts[1][at], at, none, rows, none, slots, slots)).copy())
            runs[-1] += families.run_two(executor, *truth.texts[:2], pages[1:])
    for launched, replayed in zip(*runs, strict=True):
        np.testing.assert_array_equal(launched, replayed)
    assert len(made) >= 4 * 5 and min(made) > 0 and sum(made) >= 4 * (9 + 9 + 3 + 10)


@pytest.mark.usefixtures("device")
def test_what_is_needed_of_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the largest ones, or candidates, chosen on the device, launched and replayed, of one row and of
    several; all logits stay there, but where they are asked for afterwards."""
    truth = Truth(case_named("qwen3"), "gguf", tmp_path)
    static_where_emulated(monkeypatch)

    def batch_of(executor: SplitExecutor, at: int, count: int, needs: LogitsNeed) -> Batch:
        places = np.arange(count, dtype=np.int32)
        numbers = truth.texts[0][at : at + count].astype(np.int32), at + places, np.zeros(count, np.int32)
        pages = np.arange(executor.n_pages, dtype=np.int32)[None]
        cold = 1 / (1 + places).astype(np.float32)
        return Batch(*numbers, pages, places, needs=needs, inverse_temperatures=cold)

    def step(executor: SplitExecutor, at: int, count: int, needs: LogitsNeed) -> np.ndarray:
        return executor.forward(batch_of(executor, at, count, needs)).copy()

    with opened(truth.path, all_of(truth)) as executor:
        made: list[int] = []
        executor.gpu.record(counting_recorder(made))
        at = 0
        for count in (1, 1, 1, 3, 3, 3, 40):
            logits = step(executor, at, count, LogitsNeed.LOGITS)
            executor.gpu.buffers._host_logits[:count] = 7.0
            tokens = step(executor, at, count, LogitsNeed.LARGEST)
            assert tokens.dtype == np.int32 and tokens.tolist() == logits.argmax(axis=1).tolist()
            batch, replays = batch_of(executor, at, count, LogitsNeed.CANDIDATES), list[int]()
            before = sum(made)
            batch.meanwhile = lambda replays=replays: replays.append(sum(made))
            records = executor.forward(batch).copy()
            assert replays == [sum(made)] and batch.meanwhile is None, "once, when all that is replayed was launched"
            assert sum(made) > before or count == 40 or at in (0, 1, 3, 6)
            assert (executor.gpu.buffers._host_logits[:count] == 7).all(), "they were not copied"
            for place, (row, record) in enumerate(zip(logits, records, strict=True)):
                n = record["count"]
                np.testing.assert_array_equal(record["values"][:n], row[record["ids"][:n]])
                assert row.argmax() in record["ids"][:n] and n >= min(LIKELIEST, len(row))
                total = np.exp((row - row.max()).astype(np.float64) / (1 + place)).sum()
                assert record["total"] == pytest.approx(total, rel=ERROR)
            assert batch.logits is not None
            for _ in range(2):
                np.testing.assert_array_equal(batch.logits(), logits)
            at += count
        assert step(executor, at, 1, LogitsNeed.LOGITS).shape == (1, executor.vocab_size)
        *operators, head = executor.gpu.operators
        broken = replace(operators[-1], run=lambda own: own.x.fill_(torch.nan))
        executor.gpu._operators = [*operators, broken, head]
        executor.gpu.record(None)
        assert step(executor, at, 1, LogitsNeed.LARGEST).tolist() == [-1]
        for value, number in ((torch.inf, -2), (-torch.inf, -3), (0.5, 7)):

            def end(_: Step, value: float = value) -> None:
                executor.gpu.buffers._values[:1], executor.gpu.buffers._tokens[:1] = value, 7

            executor.gpu._operators = [*operators, replace(head, run=end)]
            assert step(executor, at, 1, LogitsNeed.LARGEST).tolist() == [number]


@pytest.mark.usefixtures("device")
def test_sampled_answers_need_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same seed they are those of all logits."""
    path, engine = tiny_llama(tmp_path / "m.gguf"), engine_of(context=64)
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 1.0}, {"top_k": 0}]
    same = {"temperature": 9.0, "min_p": 0.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    params = [SamplingParams(**(same | one)) for one in settings]
    checkpoint, answers, asked = open_checkpoint(path), [], list[int]()
    logits_of = GpuLayers._logits_of
    monkeypatch.setattr(GpuLayers, "_logits_of", lambda *given: asked.append(1) or logits_of(*given))
    for needs in (Sampler.needs, property(lambda _: LogitsNeed.LOGITS)):
        monkeypatch.setattr(Sampler, "needs", needs)
        executor = load_split(Resolved(checkpoint, engine, **on_gpu(2, head=True)))
        with LLM.from_parts(executor, tokenizer_of(checkpoint), checkpoint.config, engine) as llm:
            for some in (params[:3], params[3:]):
                answers.append([answer.token_ids for answer in llm.generate(["a cab"] * len(some), some)])
                assert not asked or len(answers) > 1, "these are among the candidates"
    assert answers[:2] == answers[2:] and len(set(map(tuple, answers[0]))) == 3


def test_the_number_of_recordings_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer.devices.gpu.MOST_SHAPES", 2)
    static_where_emulated(monkeypatch)
    truth, made = Truth(case_named("llama-gqa"), "folder", tmp_path), []
    with opened(truth.path, everything()) as executor:
        pages = families.scattered_pages(executor, 1)[0]
        families.run_chunks(executor, truth.texts[0][:32], [32], pages)  # now there is room for answers
        executor.gpu.record(counting_recorder(made))
        for _ in range(2):
            ours = families.run_chunks(executor, truth.texts[0][:32], [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 1, 1], pages)
            assert families.rms(ours - truth.logits[0][:32]) <= truth.allowed(2)
    assert len(made) == 6 + 5  # all shapes again except the first of the second round, which came last


def test_recordings_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is lacking, but for those of the last shapes; a later rehearsal does not bring them back."""
    static_where_emulated(monkeypatch)
    truth, made = Truth(case_named("llama-gqa"), "folder", tmp_path), []
    with opened(truth.path, everything()) as executor:
        layers, before = executor.gpu, executor.gpu.memory()["scratch"]
        assert layers.record_less(1) == 0, "nothing is recorded"
        layers.record(counting_recorder(made))
        monkeypatch.setattr(layers, "_memory_taken", lambda: (0, 10 * len(made)))
        layers.rehearse(2)
        assert layers.recorded_bytes == 160 and layers.memory()["scratch"] >= before + 160
        assert [layers.record_less(n) for n in (0, 35)] == [0, 40] and layers.recorded_bytes == 120
        layers.rehearse(2)
        assert layers.recorded_bytes == 120
        assert [layers.record_less(n) for n in (1000, 1)] == [80, 0] and layers.recorded_bytes == 40


def test_codes_are_of_one_recording() -> None:
    """What a kernel makes beside its result is used by those that are recorded with it, and by no others."""
    seen: list[list[bool]] = []

    def makes(step: Step) -> None:
        for result in (step.read, step.attended, step.normed and step.normed[1]):
            assert result is not None
            setattr(result, MADE_CODES, object())

    def looks(step: Step) -> None:
        results = step.read, step.attended, step.normed and step.normed[1]
        seen.append([hasattr(result, MADE_CODES) for result in results])

    kinds = [("makes", makes, True), ("looks", looks, True), ("host", lambda _: None, False), ("looks", looks, True)]
    recordings = Recordings([Operator(kind, 0, run, static) for kind, run, static in kinds], lambda run, _: run)
    one = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):  # the second time it is recorded
        own = [torch.zeros(1, 32) for _ in range(4)]
        step = Step(own[0], one, one, one, one[None], one, own[1], attended=own[2], normed=(torch.clone, own[3]))
        recordings.run(step)
    assert seen == [[True] * 3, [False] * 3] * 2


@pytest.mark.usefixtures("device")
def test_rehearsed_steps_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the tokens, and the pages of a context, by which kernels are compiled."""
    truth, runs = Truth(case_named("opt"), "folder", tmp_path), []
    plain, shapes = gpu.attention, set()

    def noted(*given: Any) -> Any:
        shapes.add((len(given[0]), given[2].pages.shape[1]))
        return plain(*given)

    for rehearse in (False, True):
        with opened(truth.path, everything()) as executor:
            if rehearse:
                with monkeypatch.context() as patch:
                    patch.setattr(gpu, "attention", noted)
                    assert (executor.gpu.rehearse(64) > 0) == (device_name() == "cuda")
                widths = {1 << power for power in range(executor.n_pages.bit_length())}
                assert shapes >= {(1, width) for width in widths} | {(16, 1), (32, 1)}
            pages = families.scattered_pages(executor, 1)[0]
            runs.append(families.run_chunks(executor, truth.texts[0], [70, 5], pages))
    np.testing.assert_array_equal(*runs)


@pytest.mark.usefixtures("device")
def test_unused_pages_and_no_logits(tmp_path: Path) -> None:
    truth = Truth(case_named("llama-gqa"), "folder", tmp_path)
    for share in (everything(), on_gpu(2)):
        with opened(truth.path, share) as executor:
            pages = np.full((3, 200), -1, np.int32)  # wider than any sequence is long, and an unused row
            pages[1, :3] = families.scattered_pages(executor, 1)[0]
            places, ones = np.arange(families.TOKENS, dtype=np.int32), np.ones(families.TOKENS, np.int32)
            some = np.array([3, 70], np.int32)
            ours = executor.forward(Batch(truth.texts[0], places, ones, pages, some))
            assert ours.shape == (2, executor.vocab_size)
            assert families.rms(ours - truth.logits[0][some]) <= truth.allowed(2)
            none = executor.forward(Batch(truth.texts[0], places, ones, pages, some[:0]))
            assert none.shape == (0, executor.vocab_size)


@pytest.mark.parametrize(("kv_type", "nbytes"), [("f16", 32), ("q8_0", 18)])
@pytest.mark.usefixtures("device")
def test_a_narrow_cache(kv_type: str, nbytes: int, tmp_path: Path) -> None:
    """Keys and values are rounded as the CPU's executor rounds them; nbytes: of a head's 16 values.

    Where a value lies so near the middle between two codes that float32 decides, the executors choose neighbours. Fewer
    than one in a hundred does; each is off by a step where the cache's own rounding is off by 1 / sqrt(12) of one.
    """
    truth = Truth(case_named("llama-gqa"), "folder", tmp_path)
    answers = []
    cpu = load(open_checkpoint(truth.path), engine_of(kv_type=kv_type))
    with opened(truth.path, everything(), kv_type=kv_type) as split:
        for executor in (cpu, split):
            pages = families.scattered_pages(executor, 1)[0]
            # more tokens meet a narrow cache in its own type on a GPU, which rounds the queries, too
            answers.append(families.run_chunks(executor, truth.texts[0], [32, 32, 11], pages))
        assert split.gpu.memory()["kv"] == LAYERS * split.n_pages * 32 * 2 * 2 * nbytes
    cpu.close()
    error = families.rms(answers[0] - truth.logits[0])
    assert truth.allowed(2) < families.rms(answers[1] - truth.logits[0]) <= 1.5 * error
    assert families.rms(answers[1] - answers[0]) <= (12 * 0.01) ** 0.5 * error


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.usefixtures("device")
def test_quantised_weights(kind: str, tmp_path: Path) -> None:
    """The answer is that of a model with the dequantised weights."""
    case = families.Case("quantised", "llama", {"intermediate_size": 96}, {})
    truth = Truth(case, "folder", tmp_path)
    with torch.no_grad():
        for name, parameter in truth.model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                stored = quantize(parameter.numpy(), kind.upper())
                parameter.copy_(torch.from_numpy(dequantize(stored, kind.upper())))
    exact = families.exact_logits(case, truth.config, truth.model, truth.texts[0])
    allowed = families.ROUNDING * families.rms(families.logits(truth.model, truth.texts[0]) - exact)
    with opened(truth.path, everything(), quantize=kind) as executor:
        pages = families.scattered_pages(executor, 1)[0]
        ours = families.run_chunks(executor, truth.texts[0], [70, 1, 4], pages)
        assert families.rms(ours - exact) <= allowed
        weights = 64 * (64 + 2 * 32 + 64)
        assert executor.gpu.memory()["attention"] == LAYERS * gpu.weight_bytes(kind.upper(), weights // 64, 64)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, other: Checkpoint) -> Iterator[list[str]]:
    """The names of the tensors that are read meanwhile, from another checkpoint than `other`."""
    read: list[str] = []
    take = Checkpoint.take

    def counting(self: Checkpoint, name: str) -> Any:
        if self is not other:
            read.append(name)
        return take(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "take", counting)
        yield read


NEURON_CASES = ["prosparse", "turbosparse", "opt", "opt-post-norm", "falcon-7b", "falcon-40b", "nemotron-biases"]


@pytest.mark.parametrize("name", NEURON_CASES)
@pytest.mark.usefixtures("device")
def test_neurons_summed_by_other_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's neurons in two parts, from matrices of the test: the dense answer, the inputs and the trace."""
    case = case_named(name)
    truth = Truth(case, "folder", tmp_path)
    blocks = {"falcon": lambda: truth.model.transformer.h, "opt": lambda: truth.model.model.decoder.layers}
    read_by_norm: list[np.ndarray] = []
    keep = lambda _, args: read_by_norm.append(args[0].detach().numpy().reshape(families.TOKENS, -1))  # noqa: E731
    for block in blocks.get(case.base, lambda: truth.model.model.layers)():
        residual_of(case, block).register_forward_pre_hook(keep)
    families.logits(truth.model, truth.texts[0])
    matrices, shown = open_checkpoint(truth.path), []
    split = halves(matrices, shown)
    with counted(monkeypatch, matrices) as read, opened(truth.path, on_gpu(2), split=split) as executor:
        names = {name for name in read if name.split(".")[-1] in ("gate", "up", "down")}
        assert names == {
            f"layers.2.{part}"
            for part in (("gate",) if executor.gpu._config.layers[2].ffn.gated else ()) + ("up", "down")
        }
        assert executor.gpu.memory()["ffn"] == 0
        pages = families.scattered_pages(executor, 1)[0]
        ours = families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages)
    truth.check(ours)
    assert [layer for layer, _ in shown] == [0, 1]
    for (_, x), expected in zip(shown, read_by_norm, strict=False):
        assert np.abs(x - expected).max() < 1e-4 * np.abs(expected).max()


class Halves:
    """A layer's neurons as two parts, the second of which is launched in every step."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shown: list[tuple[int, np.ndarray]],
        cpu: CpuExecutor,
        layers: GpuLayers,
        layer: int,
        biases: Sequence[np.ndarray | None],
    ) -> None:
        config = checkpoint.config.layers[layer].ffn
        values = {part: np.array(checkpoint.take(f"layers.{layer}.{part}").float32()) for part in config.matrices}
        values["down"] = np.ascontiguousarray(values["down"].T)
        self.layer, self.shown, self.parts = layer, shown, []
        for own in (slice(0, config.size // 2), slice(config.size // 2, None)):
            weights = {part: weight(matrix[own]) for part, matrix in values.items()}
            own_biases = [None if bias is None else on_device(bias[own]) for bias in biases[:2]]
            gate, up, down = weights.get("gate"), weights["up"], weights["down"]
            about = config.activation, config.threshold
            self.parts.append(gpu.Neurons(gate, up, down, None, None, *own_biases, *about))

    def sent(self, _: Step) -> None:
        return None

    def ahead(self) -> list[Operator]:
        return []

    def begin(self) -> list[Operator]:
        show = lambda step: self.shown.append((self.layer, step.x.clone().cpu().numpy()))  # noqa: E731
        return [Operator("show", self.layer, show, static=False)]

    def finish(self) -> list[Operator]:
        first, second = (Operator("half", self.layer, partial(self._add, part)) for part in self.parts)
        return [first, replace(second, static=False)]

    def close(self) -> None:
        self.parts.clear()

    @staticmethod
    def _add(part: gpu.Neurons, step: Any) -> None:
        step.add_part(gpu.neuron_sum(part, step.read)[0])


def halves(*given: Any) -> Any:
    """Makes `Halves` of FFNs."""
    split: Any = partial(Halves, *given)
    split.kind = FfnConfig
    return split


def weight(values: np.ndarray) -> gpu.Weight:
    return gpu.Weight("F32", *values.shape, on_device(values))


def test_a_skipped_tensor_counts_as_taken(tmp_path: Path) -> None:
    case = case_named("llama-gqa")
    path = Truth(case).save("folder", tmp_path)
    told: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(path, "q8_0", lambda _, done, total: told.append((done, total)))
    names = list(checkpoint.names())
    for name in names:
        (checkpoint.skip if "up" in name else checkpoint.take)(name)
        checkpoint.skip(name)
    checkpoint.finish()
    assert told[-1][0] == told[-1][1]
    with pytest.raises(ModelError, match="there is no tensor wrong"):
        checkpoint.skip("wrong")


@pytest.mark.usefixtures("device")
def test_bytes_by_part(tmp_path: Path) -> None:
    truth = Truth(case_named("llama-biases"), "folder", tmp_path)
    with opened(truth.path, everything()) as executor, opened(truth.path, on_gpu(1)) as part:
        every, one = executor.gpu.memory(), part.gpu.memory()
        d, ff, kv = 64, 88, 32
        assert one["attention"] == 4 * (2 * d * d + 2 * d * kv) and one["ffn"] == 4 * 3 * d * ff
        assert one["norms"] == 4 * (2 * d + (2 * d + 2 * kv) + (2 * ff + d) + 8)  # norms, biases, frequencies
        assert one["kv"] == 4 * 2 * 32 * kv * part.n_pages and one["head"] == 0
        assert every["head"] == 4 * d * 101 and every["norms"] == LAYERS * (one["norms"] - 32) + 32 + 4 * d
        assert all(every[name] == LAYERS * one[name] for name in ("attention", "ffn", "kv"))
        assert every["scratch"] == one["scratch"] >= 4 * d * families.TOKENS
        assert str(part.cpu.choices.kv_cache).startswith(f"{part.n_pages} pages")
        both = f"{part.cpu.choices.kv_cache}, {one['kv'] >> 20} MiB on the GPU"
        assert str(part.choices.kv_cache) == both
        assert executor.bytes_per_token > every["attention"] + every["ffn"] + every["head"]


@pytest.mark.usefixtures("device")
def test_pages_may_be_given(tmp_path: Path) -> None:
    truth = Truth(case_named("llama-gqa"), "folder", tmp_path)
    with opened(truth.path, on_gpu(2, pages=3)) as executor:
        assert executor.n_pages == executor.gpu.n_pages == executor.cpu.n_pages == 3
        truth.check(families.run_chunks(executor, truth.texts[0], [families.TOKENS], np.array([2, 0, 1], np.int32)))
        bad = Batch(*(np.zeros(1, np.int32),) * 3, np.array([[3]], np.int32), np.zeros(1, np.int32))
        with pytest.raises(ValueError, match="outside the cache"):
            executor.forward(bad)


# --- failures ------------------------------------------------------------------------------------------


def single_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 300
    return text


FULL = "the GPU ran out of memory while computing 75 tokens: lower --prefill-chunk, --max-batch"
FAULTS = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried"), FULL),
    "memory of a library": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), FULL),
    "memory of the driver": (RuntimeError("Triton Error [CUDA]: out of memory"), FULL),
    "the device": (
        RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might be"),
        "the GPU failed while computing 75 tokens: CUDA error: an illegal memory access; load the model again",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.usefixtures("device")
def test_a_step_that_fails_leaves_the_executor_usable(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = Truth(case_named("falcon-7b"), "folder", tmp_path)
    fault, message = FAULTS[what]
    with opened(truth.path, everything()) as executor:
        pages = families.scattered_pages(executor, 2)
        whole = families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[0])
        linear, calls = gpu.linear, [0]

        def failing(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == 6:
                raise fault
            return linear(*args)

        with monkeypatch.context() as patch:
            patch.setattr(gpu, "linear", failing)
            with pytest.raises(PowerInferError) as caught:
                families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[1])
        assert single_line(caught.value).startswith(message)
        assert np.array_equal(families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[1]), whole)


@pytest.mark.usefixtures("device")
def test_a_prompt_that_nobody_needs_ends_between_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Truth(case_named("falcon-7b"), "folder", tmp_path)
    with opened(truth.path, everything()) as executor:
        pages = families.scattered_pages(executor, 2)
        whole = families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[0])
        forward, linear, stop, calls = executor.forward, gpu.linear, np.zeros(1, np.int32), [0]

        def stoppable(batch: Batch) -> Any:
            batch.stop = stop
            return forward(batch)

        def stopping(*args: Any) -> Any:
            calls[0] += 1
            stop[0] = calls[0] == 3
            return linear(*args)

        with monkeypatch.context() as patch:
            patch.setattr(executor, "forward", stoppable)
            patch.setattr(gpu, "linear", stopping)
            with pytest.raises(StoppedError):
                families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[1])
            assert calls == [3]
        assert np.array_equal(families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[1]), whole)


@pytest.mark.usefixtures("device")
def test_a_request_that_fails_leaves_the_engine_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the Python API: two requests fail, later ones get the answers of the CPU's engine."""
    path, engine = tiny_llama(tmp_path / "m.gguf"), engine_of(context=64)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = ["a cab back bab", "deaf face bead"]
    with LLM(path, kv_type="f32", context=64, selector="all") as llm:
        expected = [answer.token_ids for answer in llm.generate(prompts, params)]
    checkpoint = open_checkpoint(path)
    executor = load_split(Resolved(checkpoint, engine, **on_gpu(1)))
    attention, calls = gpu.attention, [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attention(*args)

    with LLM.from_parts(executor, tokenizer_of(checkpoint), checkpoint.config, engine) as llm:
        executor.gpu.record(None)  # what is replayed is not called
        monkeypatch.setattr(gpu, "attention", failing)
        with pytest.raises(PowerInferError, match="the GPU ran out of memory while computing 2 tokens"):
            llm.generate(prompts, params)
        assert [answer.token_ids for answer in llm.generate(prompts, params)] == expected
        assert llm.choices["gpu"].startswith(f"1 layer on {device_name()}")


def test_other_errors_pass() -> None:
    for error in (ZeroDivisionError(), RuntimeError("shapes differ")):
        with pytest.raises(type(error)), gpu_failures("dividing", "do not"):
            raise error


@pytest.mark.skipif(not kernels.TRITON, reason="Triton is not installed")
def test_kernels_that_do_not_fit_are_one_line() -> None:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    for error in (OutOfResources(139264, 101376, "shared memory"), CompilationError("x = y", None, "no such type")):
        with pytest.raises(PowerInferError) as caught, gpu_failures("computing 3 tokens", "do not"):
            raise error
        said = single_line(caught.value)
        assert said.startswith("this GPU cannot run a kernel of this model while computing 3 tokens (")
        assert said.endswith("); leave out the GPU")


@pytest.mark.usefixtures("device")
def test_no_memory_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Truth(case_named("llama-gqa"), "folder", tmp_path)
    closed: list[CpuExecutor] = []
    close = CpuExecutor.close

    def closing(self: CpuExecutor) -> None:
        closed.append(self)
        close(self)

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "upload_together", full)
        patch.setattr(CpuExecutor, "close", closing)
        with pytest.raises(PowerInferError) as caught:
            load_split(Resolved(open_checkpoint(truth.path), engine_of(), **everything()))
    said = "the GPU ran out of memory while the model was loaded: put fewer layers"
    assert single_line(caught.value).startswith(said)
    assert len(closed) == 1


def test_missing_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu").type == "cpu"
    for name, message in {"gpu": "there is no device 'gpu'", "meta": "a device of type meta"}.items():
        with pytest.raises(RequestError, match=message):
            choose_device(name)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    refused("this torch was built without CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    refused("torch finds no CUDA GPU: check its driver with nvidia-smi")

    def warns() -> bool:
        import warnings

        warnings.warn("the NVIDIA driver on your system is too old\nfor this", stacklevel=1)
        return False

    monkeypatch.setattr(cuda, "is_available", warns)
    refused(r"no CUDA GPU \(the NVIDIA driver on your system is too old\)")
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "get_device_name", lambda index: "GeForce RTX 2080")
    monkeypatch.setattr(cuda, "get_device_capability", lambda index: (7, 5))
    refused("there is no cuda:1: this machine has 1 GPU, counted", "cuda:1")
    refused("GeForce RTX 2080 is too old: its compute capability is 7.5, and 8.0 is needed")
    monkeypatch.setattr(cuda, "get_device_capability", lambda index: (9, 0))

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: unknown error\nCUDA kernel errors might be")

    monkeypatch.setattr(torch, "zeros", broken)
    refused("the GPU cannot be used: CUDA error: unknown error; check it", kind=PowerInferError)


def refused(message: str, name: str = "cuda", kind: type[PowerInferError] = RequestError) -> None:
    with pytest.raises(kind, match=message) as caught:
        choose_device(name)
    single_line(caught.value)


def test_what_a_machine_lacks_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver, here, there = "NVIDIA's driver", tmp_path / "driver", tmp_path
    reasons = {
        (here, None): f"a GPU needs {driver}.* and a torch that was built with CUDA .*: install them, or use",
        (there, None): "a GPU needs a torch that was built with CUDA .*--force-reinstall torch.*: install it",
        (here, "13.0"): f"a GPU needs {driver} .*: install it",
        (there, "13.0"): "torch finds no CUDA GPU",
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for (path, cuda), message in reasons.items():
        monkeypatch.setattr(wanted, "DRIVERS", (path,))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        check_gpus(["cpu"])
        with pytest.raises(RequestError, match=message) as caught:
            check_gpus(["cuda", "cuda:1"])
        single_line(caught.value)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RequestError, match=r"a GPU needs torch \(pip install '\.\[gpu\]'"):
        check_gpus(["cuda"])


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RequestError, match=r"needs torch: pip install '\.\[gpu\]'"):
        choose_device("cpu")


def test_torch_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, powerinfer.devices.gpu, powerinfer.devices.split, powerinfer.models, powerinfer.runtime.engine\n"
    )
    code += "sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
