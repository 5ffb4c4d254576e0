"""Placement independence: wherever neurons, layers and the head are placed, the answer is the dense one.

The GPU is every device that there is (gpu_device.py). The truth and the bound are those of families.py:
float64, and four times the error that `transformers` makes in float32. Weights are float16 numbers, so bundles of F16
hold them exactly.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
from families import case_named  # noqa: E402
from gpu_device import device_name, torch_device  # noqa: E402
from sparse_models import give_bundles, predictors_of, some_neurons, tiny_llama  # noqa: E402
from test_gpu_layers import DECODED, counting_recorder, static_where_emulated  # noqa: E402
from test_sparse import (  # noqa: E402
    RELU,
    opened,
    packed,
    predictor_weights,
    side_by_side,
    split_calls,
)
from truth import Truth  # noqa: E402

from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices.link import Link  # noqa: E402
from powerinfer.devices.replayed_spans import UNRECORDED  # noqa: E402
from powerinfer.devices.stage import Stage, buffer_bytes  # noqa: E402
from powerinfer.devices.trace import Span, Trace  # noqa: E402
from powerinfer.errors import PowerInferError  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.bundle_memory import some_bytes  # noqa: E402
from powerinfer.formats.bundle_types import choose_types  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.predictor_file import write_predictor  # noqa: E402
from powerinfer.formats.tensors import RawTensor  # noqa: E402
from powerinfer.hybrid import ffn as hybrid  # noqa: E402
from powerinfer.hybrid.ffn import HybridFfn, NeuronSplit  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu  # noqa: E402
from powerinfer.hybrid.sparsity import HybridSparsity  # noqa: E402
from powerinfer.hybrid.terms import trades  # noqa: E402
from powerinfer.kernels import cpu, gpu  # noqa: E402
from powerinfer.neurons import NeuronPlacement, Predictor, Tier  # noqa: E402
from powerinfer.prepare.packing import pack  # noqa: E402
from powerinfer.runtime.live import Live  # noqa: E402
from powerinfer.sparsity.selection import Selection  # noqa: E402

SPLITS = (0.0, 0.1, 0.5, 0.9, 1.0)


def in_small_steps(executor: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of a text fed as decode does, some tokens alone and the others a few at a time."""
    few, rest = divmod(len(tokens) - 9, 6)
    sizes = [1] * 9 + [6] * few + [rest] * (rest > 0)
    return families.run_chunks(executor, tokens, sizes, families.scattered_pages(executor, 1)[0])


def placed(config: Any, share: float, seed: int = 0) -> NeuronPlacement:
    """Random neurons, each with this probability of being on the GPU."""
    rng = np.random.default_rng([seed, round(100 * share)])
    tiers = tuple(np.where(rng.random(size) < share, Tier.GPU, Tier.CPU).astype(np.int8) for size in config.ffn_sizes)
    return NeuronPlacement(config.ffn_sizes, 1, tiers)


@contextmanager
def split(
    path: Path,
    share: float,
    layers: int | None = None,
    head: bool = True,
    predictors: Any = None,
    most: Sequence[float] | None = None,
    stage: Stage | None = None,
    passes: bool = False,
    frequency: Any = None,
    **options: Any,
) -> Iterator[tuple[Any, list[HybridFfn]]]:
    """passes: the layers that are not on the GPU stream, too."""
    settings = {"threads": 1, "context": families.CONTEXT, "kv_type": "f32", "prefill_chunk": families.TOKENS}
    engine = EngineConfig(**(settings | {"max_batch": 8} | options))
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    bundles = open_bundles(checkpoint, None, cpu.bundle_row_bytes)
    gpu_layers = config.n_layers if layers is None else layers
    selector = "exact" if most is None else "threshold"
    selection = Selection(selector, "a test", tuple(most or ()), bundles, predictors)
    whole = head and gpu_layers == config.n_layers
    parts = NeuronSplit(bundles, placed(config, share), selection.threshold, predictors, stage, frequency)
    resolved = Resolved(checkpoint, engine, selection, UsedGpu(device_name()), Placement(gpu_layers, whole))
    executor = load_split(resolved, parts, stage=stage if passes else None)
    try:
        yield executor, parts.ffns
    finally:
        executor.close()


@pytest.mark.sampled
@pytest.mark.parametrize("case", RELU, ids=lambda case: case.name)
@pytest.mark.usefixtures("device")
def test_every_split_gives_the_dense_answer(case: families.Case, tmp_path: Path) -> None:
    model = Truth(case, half=True)
    tokens = model.texts
    truth = model.logits
    allowed = model.allowed()
    path = packed(model, tmp_path)
    # Every share with a gate, with another place of the norm, beside attention; of the others, the extremes and half.
    full = case.name in ("llama-relu", "opt-post-norm", "falcon-40b")
    for share in SPLITS if full else SPLITS[::2]:
        with split(path, share) as (executor, ffns):
            pages = families.scattered_pages(executor, 1)[0]
            decoded = partial(families.run_chunks, executor, tokens[0], DECODED, pages)
            alone = decoded()
            assert families.rms(alone - truth[0]) <= allowed, share
            if share == 0.5:
                np.testing.assert_array_equal(decoded(), alone)  # same bits again
                for fused in (True, False):
                    for ffn in ffns:
                        ffn.fuse(fused)
                    other = decoded()
                    assert families.rms(other - truth[0]) <= allowed, fused
                np.testing.assert_array_equal(other, alone)
            whole = families.run_chunks(executor, tokens[0], [len(tokens[0])], pages)  # a prompt
            assert families.rms(whole - truth[0]) <= allowed, share
            if full or share == 0.5:
                together = side_by_side(executor, [one[:35] for one in tokens])
                off = [families.rms(ours - exact[:35]) for ours, exact in zip(together, truth, strict=True)]
                assert max(off) <= 2 * allowed, share
            assert all((ffn.neurons is None) == (share == 0) for ffn in ffns)
            assert all(bool(ffn.collect()["jobs"]) == (share < 1) for ffn in ffns)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama-relu", "falcon-40b", "opt"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.usefixtures("device")
def test_layers_that_do_not_fit_run_on_the_cpu_as_a_whole(name: str, layers: int, tmp_path: Path) -> None:
    case = next(case for case in RELU if case.name.startswith(name))
    model = Truth(case, half=True)
    tokens = families.prompt(case)
    truth = model.logits[0]
    allowed = model.allowed()
    path = packed(model, tmp_path)
    for head in (False, True):
        with split(path, 0.5, layers, head) as (executor, _):
            assert families.rms(in_small_steps(executor, tokens) - truth) <= allowed
            pages = families.scattered_pages(executor, 1)[0]
            chunks = families.run_chunks(executor, tokens, [9, 3, len(tokens) - 12], pages)
            assert families.rms(chunks - truth) <= allowed


def predictor_of(config: Any, threshold: float = 0.0, floor: int = 0) -> Any:
    parts = [predictor_weights(config.d_model, config.widest_ffn, layer) for layer in range(config.n_layers)]
    return given(Predictor(len(parts[0][0]), threshold, floor), parts)


def given(about: Predictor, weights: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """As a selection has them: what makes the predictor of a layer."""

    def of(layer: int) -> tuple[Predictor, RawTensor, RawTensor]:
        inner, outer = (
            RawTensor("F16", part.shape, part.astype(np.float16).view(np.uint8).reshape(-1)) for part in weights[layer]
        )
        return about, inner, outer

    return of


@pytest.mark.parametrize("name", ["llama-relu", "turbosparse", "falcon-40b"])
@pytest.mark.usefixtures("device")
def test_predicted_is_the_same_wherever_neurons_are_placed(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    model = Truth(case, half=True)
    tokens = families.prompt(case)
    path = packed(model, tmp_path)
    truth = model.logits[0]
    allowed = model.allowed()
    some = [tokens[:20], tokens[::-1][:20].copy()]
    answers, splits = {}, SPLITS if name == "llama-relu" else SPLITS[::2]
    for share in splits:
        with split(path, share, predictors=predictor_of(open_checkpoint(path).config)) as (executor, _):
            answers[share] = in_small_steps(executor, tokens)
            together = side_by_side(executor, some)
            assert families.rms(together[0] - answers[share][: len(some[0])]) <= 2 * allowed
            pages = families.scattered_pages(executor, 1)[0]
            pieces = families.run_chunks(executor, tokens, [32, 9, 31, 3], pages)
            assert families.rms(pieces - answers[share]) <= 2 * allowed, "the names of many tokens"
            more = families.run_chunks(executor, tokens, [33, 42], pages)
            assert families.rms(more - truth) <= allowed, "of more tokens every gate is computed"
    assert families.rms(answers[0.0] - truth) > 100 * allowed, "the predictor leaves nothing out"
    for share in splits[1:]:
        assert families.rms(answers[share] - answers[0.0]) <= 2 * allowed, share
    predictors = predictor_of(open_checkpoint(path).config)
    with split(path, 0.5, 1, False, predictors) as (executor, ffns):  # the others are the CPU's own
        assert families.rms(in_small_steps(executor, tokens) - answers[0.0]) <= 2 * allowed
        together = side_by_side(executor, some)
        assert families.rms(together[0] - answers[0.0][: len(some[0])]) <= 2 * allowed
        pages = families.scattered_pages(executor, 1)[0]
        pieces = families.run_chunks(executor, tokens, [32, 9, 31, 3], pages)
        assert families.rms(pieces - answers[0.0]) <= 2 * allowed
        sparsity = HybridSparsity("predicted", executor, ffns)
        counts = executor.cpu.ffns[1].counts()
        assert counts["tokens"] == 2 * (len(tokens) + len(some[0]))
        assert counts["active"] <= counts["candidates"] < 0.9 * counts["tokens"] * executor.cpu.config.widest_ffn
        executor.cpu.ffns[1].clear()
        with sparsity.suspended():
            assert families.rms(in_small_steps(executor, tokens) - truth) <= allowed
        counts = executor.cpu.ffns[1].counts()
        assert counts["candidates"] == counts["tokens"] * executor.cpu.config.widest_ffn
        whole = families.run_chunks(executor, tokens, [len(tokens)], pages)
        assert families.rms(whole - truth) <= allowed and executor.cpu.ffns[1].counts() == counts  # a prompt


@pytest.mark.usefixtures("device")
def test_no_job_if_no_cold_neuron_is_selected(tmp_path: Path) -> None:
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens = families.prompt(case)
    for floor in (0, 3):
        predictors = predictor_of(open_checkpoint(path).config, 1e5, floor)
        with split(path, 0.5, predictors=predictors) as (executor, ffns):
            split_calls(executor, tokens)
            assert {ffn.collect()["steps"] for ffn in ffns} == {len(tokens)}
            jobs = sum(ffn.collect()["jobs"] for ffn in ffns)
            assert jobs == 0 if floor == 0 else jobs > 0


TYPES = [("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "Q8_0"), ("Q4_0", "Q8_0"), ("Q4_0", "Q4_0X32"), ("F16", "Q8_0")]


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.usefixtures("device")
def test_every_type_of_bundle(types: tuple[str, str], tmp_path: Path) -> None:
    """Cold quantised neurons use 8-bit activations, hot ones 32-bit: results of splits lie between the extremes."""
    case = case_named("llama-relu")
    path = Truth(case, intermediate_size=96).save("folder", tmp_path)  # whole groups of neurons
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint, *types))
    tokens = families.prompt(case)
    answers = []
    for share in SPLITS if types[0] == types[1] else SPLITS[::2]:
        with split(path, share) as (executor, _):
            answers.append(in_small_steps(executor, tokens))
    rounding = families.rms(answers[0] - answers[-1])  # of all activations to 8 bits; none for floating-point types
    assert rounding < 0.05 * families.rms(answers[-1])
    for answer in answers[1:-1]:
        assert families.rms(answer - answers[-1]) <= 1.5 * rounding + 1e-5


@pytest.mark.usefixtures("device")
def test_both_devices_apply_the_threshold(tmp_path: Path) -> None:
    case = case_named("llama2")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens = families.prompt(case)
    truth = model.logits[0]
    allowed = model.allowed()
    answers = []
    for share in SPLITS:
        with split(path, share, most=[0.05] * model.config.num_hidden_layers) as (executor, _):
            answers.append(in_small_steps(executor, tokens))
            assert families.rms(answers[-1] - answers[0]) <= 2 * allowed
    assert families.rms(answers[0] - truth) > 100 * allowed
    with split(path, 0.5, 1, most=[0.05] * model.config.num_hidden_layers) as (executor, _):
        assert families.rms(in_small_steps(executor, tokens) - answers[0]) <= 2 * allowed


@pytest.mark.parametrize("activation", ["cats", "fatrelu"])
@pytest.mark.usefixtures("device")
def test_thresholds_of_neurons(activation: str, tmp_path: Path) -> None:
    """Wherever neurons and layers are, decode, batches and prompts, streamed or not, are the CPU's dense answer."""
    path = give_bundles(tiny_llama(tmp_path / "m.gguf", activation, limits=True, products=activation == "cats"))
    checkpoint = open_checkpoint(path)
    layout, config = open_bundles(checkpoint, None, cpu.bundle_row_bytes).layouts[0], checkpoint.config
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, config.vocab_size, 40).astype(np.int32) for _ in range(2)]
    with opened(path, selector="all") as (executor, _):
        wanted = [in_small_steps(executor, one) for one in tokens]
    bound = 1e-4 * np.abs(wanted).max()
    for share, layers in ((0.0, None), (0.5, None), (1.0, None), (0.5, 1)):
        stage = Stage(torch_device(), buffer_bytes(layout, config.widest_ffn, 1 << 15))
        with split(path, share, layers, stage=stage) as (executor, _):
            together = side_by_side(executor, tokens)
            assert max(np.abs(ours - one).max() for ours, one in zip(together, wanted, strict=True)) < bound
            pages = families.scattered_pages(executor, 1)[0]
            for least in (None, 33):
                stage.least = least
                prompt = families.run_chunks(executor, tokens[0], [40], pages)
                assert np.abs(prompt - wanted[0]).max() < bound, (share, layers, least)
    engine = EngineConfig(threads=1, context=families.CONTEXT, kv_type="f32", prefill_chunk=families.TOKENS)
    selection = Selection("all", "a test")
    whole = Placement(config.n_layers, True)
    executor = load_split(Resolved(checkpoint, engine, selection, UsedGpu(device_name()), whole))
    try:
        assert np.abs(in_small_steps(executor, tokens[0]) - wanted[0]).max() < bound  # whole layers
    finally:
        executor.close()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["llama-relu", "falcon-40b"])
def test_a_prompt_in_a_narrow_type(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs multiply many tokens: off by less than `transformers` is in float16, and by more than in float32."""
    monkeypatch.setattr(hybrid.gpu, "_NARROW", [device_name()])
    case = case_named(name)
    model = Truth(case, half=True)
    path, tokens = packed(model, tmp_path), families.prompt(case)
    truth = model.logits[0]
    exact = families.rms(model.narrow[0] - truth)
    allowed = families.rms(families.logits(model.model.half(), tokens) - truth)
    checkpoint = open_checkpoint(path)
    layout, d_ff = open_bundles(checkpoint, None, cpu.bundle_row_bytes).layouts[0], checkpoint.config.widest_ffn
    for share in (0.5, 1.0):
        stage = Stage(torch_device(), buffer_bytes(layout, d_ff, 1 << 15))
        with split(path, share, stage=stage) as (executor, _):
            pages = families.scattered_pages(executor, 1)[0]
            for stage.least in (None, 33):
                off = families.rms(families.run_chunks(executor, tokens, [len(tokens)], pages) - truth)
                assert 2 * families.ROUNDING * exact < off <= allowed, (share, stage.least)


@pytest.mark.parametrize("limits", [True, 0.3], ids=["of neurons", "of layers"])
@pytest.mark.usefixtures("device")
def test_predicted_with_thresholds(limits: bool | float, tmp_path: Path) -> None:
    """Of neurons that fire on both sides of zero those that are selected count, wherever they are."""
    path = give_bundles(tiny_llama(tmp_path / "m.gguf", "cats", limits, products=limits is True))
    config = open_checkpoint(path).config
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 40).astype(np.int32)
    with opened(path, selector="exact") as (executor, _):
        dense = in_small_steps(executor, tokens)
    bound = 1e-4 * np.abs(dense).max()
    for select in (1.1, 0.7):
        about, weights = predictors_of(some_neurons(config.n_layers, config.widest_ffn, select), config.d_model)
        write_predictor(open_checkpoint(path), None, "F16", [about] * config.n_layers, weights)
        with opened(path, selector="predicted") as (executor, _):
            wanted = in_small_steps(executor, tokens)
        if select > 1:
            assert np.abs(wanted - dense).max() < bound
        else:
            assert np.abs(wanted - dense).max() > 100 * bound, "what is left out changes nothing"
        chosen = given(about, weights)
        for share, layers in ((0.0, None), (0.5, None), (1.0, None), (0.5, 1)):
            with split(path, share, layers, predictors=chosen) as (executor, _):
                assert np.abs(in_small_steps(executor, tokens) - wanted).max() < bound, (select, share, layers)
                together = side_by_side(executor, [tokens[:12], tokens[::-1][:12].copy()])
                assert np.abs(together[0] - wanted[:12]).max() < bound


@pytest.mark.usefixtures("device")
def test_hot_neurons_are_on_the_gpu_and_only_there(tmp_path: Path) -> None:
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    layout = open_bundles(open_checkpoint(path), None, cpu.bundle_row_bytes).layouts[0]
    for share in SPLITS:
        with split(path, share) as (executor, ffns):
            placement = placed(executor.cpu.config, share)
            for ffn in ffns:
                parts = placement.split_by_tier(ffn.layer)
                assert (0 if ffn.neurons is None else ffn.neurons.n) == len(ffn.hot) == len(parts[Tier.GPU])
                assert ffn.cold_bytes == some_bytes(layout, parts[Tier.CPU])


@pytest.mark.parametrize(
    ("name", "predicted"),
    [("llama-relu", False), ("llama-relu", True), ("falcon-7b", False), ("falcon-40b", True), ("opt-post-norm", True)],
)
@pytest.mark.usefixtures("device")
def test_replayed_steps_give_the_same_bits(
    name: str, predicted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of changing sizes, neurons that are swapped between them, and a predictor that is suspended meanwhile."""
    static_where_emulated(monkeypatch)
    case = case_named(name)
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens, made, runs = families.prompt(case)[:16], [], []
    predictors = predictor_of(open_checkpoint(path).config) if predicted else None
    for recorder in (None, counting_recorder(made)):
        with split(path, 0.5, predictors=predictors) as (executor, ffns):
            sparsity = HybridSparsity("exact", executor, ffns)
            executor.gpu.record(recorder)
            pages = families.scattered_pages(executor, 1)[0]
            sizes = [1] * 4 + [3, 3, 1, 3, 1, 1]

            def steps(executor: Any = executor, pages: Any = pages, sizes: list[int] = sizes) -> np.ndarray:
                return families.run_chunks(executor, tokens, sizes, pages)

            answers = [steps(), steps()]
            for ffn in ffns[1:]:  # as `adjust` does it
                ffn.place(np.sort(np.concatenate([ffn.hot[1:], ffn.cold[:1]])).astype(np.int32))
                answers.append(steps())
            ffns[0].place(ffns[0].hot[:-1])  # fewer than before
            answers.append(steps())
            with sparsity.suspended():
                answers.append(steps())
            answers.append(steps())
            runs.append([*answers, sparsity.report()])
    for launched, replayed in zip(*runs, strict=True):
        np.testing.assert_equal(launched, replayed)
    assert made and min(made) > 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["llama-relu", "falcon-40b"])
@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.usefixtures("device")
def test_what_a_step_launches(
    calls: bool, name: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replay, in which the GPU calls the CPU for each layer. Where it cannot, a layer takes two replays, a mark and
    the CPU's work; where all its neurons are on one device, less."""
    case = case_named(name)
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens, made, done = families.prompt(case)[:4], [], []
    for name_of in ("mark", "wait"):
        plain = getattr(Link, name_of)
        monkeypatch.setattr(Link, name_of, lambda link, what=name_of, plain=plain: (done.append(what), plain(link)))
    with split(path, share, predictors=predictor_of(open_checkpoint(path).config)) as (executor, ffns):
        executor.gpu.record(counting_recorder(made), "flags" if calls else "waits")
        for ffn in ffns:
            ffn.clear()
        split_calls(executor, tokens)
        kinds = [operator.kind for operator in executor.gpu.operators if operator.layer == 0]
        assert all((min(ffn.take_seconds()) > 0) == (share < 1) for ffn in ffns)
        assert all((ffn.collect()["jobs"] > 0) == (share < 1) for ffn in ffns)
    if share == 0.5:
        attention, project, others = (kinds.index(kind) for kind in ("attention", "project", "cold neurons"))
        beside = kinds.index("mark") < attention < project < others  # the CPU does not wait for attention
        assert beside == (name == "falcon-40b")
    layers = len(ffns)
    replays = {0.0: layers + 1, 0.5: 2 * layers + 1, 1.0: 1}[share]
    if name == "falcon-40b" and share == 0:
        replays = 2 * layers + 1  # attention, while the CPU is at work
    assert made == [len(tokens) - 1] * (1 if calls else replays)
    assert done == ["mark", "wait"] * (layers * len(tokens) * (share < 1 and not calls))


@pytest.mark.usefixtures("device")
def test_a_trace_shows_both_halves(tmp_path: Path) -> None:
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens = families.prompt(case)[:5]
    with split(path, 0.5, 2, False) as (executor, _):
        plain = split_calls(executor, tokens)
        with executor.traced() as trace:
            np.testing.assert_array_equal(split_calls(executor, tokens), plain)  # tracing changes nothing
        split_calls(executor, tokens)  # not traced any more
        unrecorded = UNRECORDED if executor.gpu._recorder else 0
        assert executor.trace is None and len(trace.steps) == len(tokens) - unrecorded
    kinds = {(span.lane, kind) for span in trace.spans for kind in span.kind.split("+")}
    assert {("GPU", "attention"), ("GPU", "hot neurons"), ("CPU", "cold neurons"), ("wait", "wait")} <= kinds
    assert {span.layer for span in trace.spans if span.kind == "cold neurons"} == {0, 1}
    summary = trace.summary()
    assert summary["steps"] == len(tokens) - unrecorded and 0 < summary["overlap"] <= 1
    parts = summary["gpu_s"] + summary["cpu_s"] - summary["both_s"] + summary["neither_s"]
    assert parts == pytest.approx(summary["step_s"])
    events = [event for event in trace.document()["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(trace.spans) and all(event["dur"] >= 0 for event in events)


def test_a_trace_adds_up_what_overlaps() -> None:
    trace = Trace(torch.device("cpu"))
    trace.steps = [(0.0, 10.0)]
    spans = [("GPU", 0.0, 4.0), ("GPU", 3.0, 5.0), ("CPU", 4.5, 6.0), ("wait", 6.0, 7.0), ("CPU", 8.0, 9.0)]
    trace.spans = [Span(lane, "kind", 0, begin, end) for lane, begin, end in spans]
    summary = trace.summary()
    assert (summary["gpu_s"], summary["cpu_s"], summary["both_s"], summary["neither_s"]) == (5.0, 2.5, 0.5, 3.0)
    assert summary["overlap"] == pytest.approx(0.7)


@pytest.mark.usefixtures("device")
def test_a_trace_of_replayed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replayed is a span, as long as it takes: the host waits between them, so that there is one of each. Steps
    that are launched or recorded are left out."""
    static_where_emulated(monkeypatch)
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens, made = families.prompt(case)[:6], []
    with split(path, 0.5) as (executor, ffns):
        executor.gpu.record(counting_recorder(made))
        plain = split_calls(executor, tokens)
        with executor.traced() as trace:
            np.testing.assert_array_equal(split_calls(executor, tokens), plain)
            assert sum(made[1:]) == (2 * len(ffns) + 1) * (len(tokens) - 1)
            families.run_chunks(executor, tokens, [3, 3], families.scattered_pages(executor, 1)[0])
        np.testing.assert_array_equal(split_calls(executor, tokens), plain)
    assert len(trace.steps) == len(tokens) - UNRECORDED
    replays = [span.kind for span in trace.spans if span.lane == "GPU"]
    last = "attention+project+norm+copy out", "hot neurons", "add+head"
    assert len(replays) == (2 * len(ffns) + 1) * len(trace.steps)
    assert replays[0] == last[0] and replays[1] == last[1] and replays[2 * len(ffns)] == last[2], replays[:7]
    begins = [(begin, end) for begin, end in trace.steps]
    for span in trace.spans:
        assert any(begin <= span.begin <= span.end <= end + 1e-3 for begin, end in begins)


@pytest.mark.usefixtures("device")
def test_the_report_counts_what_fired_where(tmp_path: Path) -> None:
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens = families.prompt(case)
    reports = []
    for share in SPLITS:
        with split(path, share) as (executor, ffns):
            sparsity = HybridSparsity("exact", executor, ffns)
            pages = families.scattered_pages(executor, 1)[0]
            families.run_chunks(executor, tokens, [len(tokens)], pages)  # a prompt does not count
            assert sparsity.report()["tokens"] == 0 and sparsity.report()["active_fraction"] is None
            in_small_steps(executor, tokens)
            reports.append(sparsity.report())
            sparsity.clear()
            assert sparsity.report()["tokens"] == 0
    assert len({round(report["active_fraction"], 3) for report in reports}) == 1  # up to gates near zero
    shares = [report["gpu_share"] for report in reports]
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    assert [report["jobs"] for report in reports] == [1, 1, 1, 1, 0]
    with split(path, 1.0, 1, False) as (executor, ffns):  # with layers that the CPU has as a whole
        in_small_steps(executor, tokens)
        report = HybridSparsity("exact", executor, ffns).report()
        assert [(layer["hot"] > 0, layer["gpu_share"], layer["jobs"]) for layer in report["layers"]] == [
            (True, 1, 0), *[(False, 0, 1)] * (len(report["layers"]) - 1)
        ]  # fmt: skip
        assert len(report["layers"]) == model.config.num_hidden_layers and 0 < report["gpu_share"] < 1
        assert round(report["active_fraction"], 3) == round(reports[0]["active_fraction"], 3)


@pytest.mark.usefixtures("device")
def test_a_live_view_of_split_layers(tmp_path: Path) -> None:
    """Its firings are those of the report, whatever else reads the counters meanwhile."""

    class Here:
        def call(self, work: Any) -> Any:
            return work()

        ask = call

    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens = families.prompt(case)
    with split(path, 0.5) as (executor, ffns):
        sparsity = HybridSparsity("exact", executor, ffns)
        sparsity.clear()
        live = Live(executor, sparsity, executor.cpu.config, Here())  # type: ignore[arg-type]
        for part in (tokens[: len(tokens) // 2], tokens):
            split_calls(executor, part)
            sparsity.report()
        for one, told, ffn in zip(live.look(8), sparsity.report()["layers"], ffns, strict=True):
            assert (one.device, one.gpu, one.way) == ("both", len(ffn.hot), "exact")
            assert one.tokens == told["tokens"] and one.active == pytest.approx(told["active_fraction"])
            assert one.placed.max() > 0 and one.seconds[1] > 0
        assert all(one.fired is None and one.seconds == (0, 0) for one in live.look(8))
        live.close()


@pytest.mark.usefixtures("device")
def test_neurons_that_became_hot_are_swapped(tmp_path: Path) -> None:
    """The coldest neurons are on the GPU at first: soon more of what fires is there, and the answer is the same."""
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens = families.prompt(case)
    truth = model.logits[0]
    allowed = model.allowed()
    with split(path, 0.5) as (executor, ffns):
        sparsity = HybridSparsity("exact", executor, ffns)
        assert not sparsity.adjust()  # nothing was counted yet
        for _ in range(10):
            in_small_steps(executor, tokens)
        for ffn in ffns:
            ffn.collect()
            ffn.place(np.sort(np.argsort(ffn.recent, kind="stable")[: len(ffn.hot)]).astype(np.int32))
        in_small_steps(executor, tokens)
        sparsity.clear()
        sizes = [(len(ffn.hot), ffn.cold_bytes) for ffn in ffns]
        for _ in range(5):
            in_small_steps(executor, tokens)
        worst = sparsity.report()["gpu_share"]
        turns = 0
        while sparsity.adjust():
            turns += 1
        assert turns and sparsity.traded and sizes == [(len(ffn.hot), ffn.cold_bytes) for ffn in ffns]
        sparsity.clear()
        assert families.rms(in_small_steps(executor, tokens) - truth) <= allowed
        report = sparsity.report()
        assert report["gpu_share"] > worst + 0.2 and report["traded"] == sparsity.traded
        while sparsity.adjust():  # equally hot neurons stay
            pass
        traded = sparsity.traded
        for _ in range(5):
            in_small_steps(executor, tokens)
        while sparsity.adjust():
            pass
        assert sparsity.traded - traded < 0.2 * traded


@pytest.mark.parametrize("types", [("F16", "F16"), ("Q4_0", "Q4_0X32")])
@pytest.mark.usefixtures("device")
def test_swapped_neurons_exchange_their_memory(types: tuple[str, str], tmp_path: Path) -> None:
    case = case_named("llama-relu")
    path = Truth(case, intermediate_size=96).save("folder", tmp_path)
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint, *types))
    tokens = families.prompt(case)
    with split(path, 0.5, 2, False) as (executor, ffns):
        first, before = in_small_steps(executor, tokens), [ffn.hot for ffn in ffns]
        for ffn in ffns:  # the CPU has none of the first group then, and so not the scales that it shares
            memory = ffn._cpu_part.memory.ctypes.data
            ffn.place(np.arange(len(ffn.hot), dtype=np.int32))
            assert ffn._cpu_part.memory.ctypes.data == memory and ffn.cold[0] >= 32
        assert families.rms(in_small_steps(executor, tokens) - first) < 0.05 * families.rms(first)
        for ffn, hot in zip(ffns, before, strict=True):
            ffn.place(hot)
        np.testing.assert_array_equal(in_small_steps(executor, tokens), first)


def test_only_clear_differences_are_swapped() -> None:
    fired = np.array([100.0, 0, 50, 49, 3, 90, 200, 52])
    hot, cold = np.array([1, 2, 4], np.int32), np.array([0, 3, 5, 6, 7], np.int32)
    leave, come = trades(fired, hot, cold)
    assert list(leave) == [1, 4, 2] and list(come) == [6, 0, 5]
    assert list(trades(fired, hot, cold, limit=1)[1]) == [6]
    leave, come = trades(fired, np.array([2, 7], np.int32), np.array([3], np.int32))
    assert len(leave) == len(come) == 0
    assert len(trades(fired, np.array([], np.int32), cold)[0]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("powerinfer.hybrid.terms.NOISE", 0.0)
        assert len(trades(fired, hot, np.array([3], np.int32))[0]) == 1


@pytest.mark.usefixtures("device")
def test_closing_frees_both_parts_and_what_is_between_them(tmp_path: Path) -> None:
    """Though the executor, the FFNs and what reports of them are still referred to, as they are by a model."""
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    stage = Stage(torch_device(), 1 << 20)
    stage.least = 2
    predictors = predictor_of(open_checkpoint(path).config)
    with split(path, 0.5, predictors=predictors, stage=stage, threads=3) as (executor, ffns):
        sparsity = HybridSparsity("predicted", executor, ffns)
        if stage._pool is not None:
            stage._pool.submit(len, ()).result(30)
        families.run_chunks(executor, families.prompt(case), [74, 1], families.scattered_pages(executor, 1)[0])
        gpu, cpu = executor.gpu, executor.cpu
        held = [gpu.link, gpu.buffers, *stage._on_device, *stage._host, cpu._program, cpu._workspace, cpu._pool]
        for ffn in ffns:
            held += [ffn._gpu_part, ffn._cpu_part, ffn._cpu_part.memory, ffn._cpu_part._neurons, ffn._predictor]
        held += [part for pair in gpu._cache.values() for part in pair if isinstance(part, torch.Tensor)]
        left = [weakref.ref(one) for one in held if hasattr(type(one), "__weakref__") or isinstance(one, np.ndarray)]
        assert len(left) >= len(held) - 3 - len(ffns), "native objects have no weak references"
        del held, ffn, gpu, cpu
    gc.collect()
    assert [type(ref()).__name__ for ref in left if ref() is not None] == []
    assert sparsity.ffns and stage.least is None
    if stage._pool is not None:
        assert not any(thread.is_alive() for thread in stage._pool._threads)
    executor.close()


@pytest.mark.parametrize("room", [True, False], ids=["they come back", "no room for them"])
@pytest.mark.usefixtures("device")
def test_a_layer_can_be_computed_after_a_failed_swap(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where even its own neurons do not fit any more, the layer is the CPU's."""
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens = families.prompt(case)
    truth = model.logits[0]
    allowed = model.allowed()
    with split(path, 0.5) as (executor, ffns):
        sparsity = HybridSparsity("exact", executor, ffns)
        for _ in range(5):
            in_small_steps(executor, tokens)
        before, whole, failures = [len(ffn.hot) for ffn in ffns], hybrid.gpu.resident, [1 if room else 2]

        def failing(*args: Any) -> Any:
            if failures[0]:
                failures[0] -= 1
                raise torch.OutOfMemoryError("no room")
            return whole(*args)

        monkeypatch.setattr(hybrid.gpu, "resident", failing)
        with pytest.raises(PowerInferError, match="ran out of memory while loading the neurons of layer"):
            while sparsity.adjust():
                pass
        left = [len(ffn.hot) for ffn in ffns]
        assert left == before if room else sorted(left)[0] == 0 < sorted(left)[1]
        assert families.rms(in_small_steps(executor, tokens) - truth) <= allowed


@pytest.mark.usefixtures("device")
def test_a_failed_swap_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_named("llama-relu")
    model = Truth(case, half=True)
    path = packed(model, tmp_path)
    tokens = families.prompt(case)
    with split(path, 0.5) as (executor, ffns):
        sparsity = HybridSparsity("exact", executor, ffns)
        for _ in range(5):
            in_small_steps(executor, tokens)
        answer = in_small_steps(executor, tokens)
        before = [ffn.hot for ffn in ffns]
        whole, calls = hybrid.gpu.resident, []

        def once(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("no room")
            return whole(*args)

        monkeypatch.setattr(hybrid.gpu, "resident", once)
        with pytest.raises(PowerInferError, match="ran out of memory while loading the neurons of layer"):
            while sparsity.adjust():
                pass
        assert all((one == ffn.hot).all() for one, ffn in zip(before, ffns, strict=True))
        np.testing.assert_array_equal(in_small_steps(executor, tokens), answer)


@pytest.mark.parametrize("selects", [False, True])
@pytest.mark.usefixtures("device")
def test_matrices_are_multiplied_where_nearly_all_neurons_are_needed(
    selects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the profile says; the same neurons count, and are counted."""
    path, dense, plain = give_bundles(tiny_llama(tmp_path / "tiny.gguf")), [], gpu.neuron_sum

    def noted(*given: Any) -> Any:
        dense.append((len(given[1]), given[-1]))
        return plain(*given)

    monkeypatch.setattr(gpu, "neuron_sum", noted)
    predictors = predictor_of(open_checkpoint(path).config) if selects else None
    tokens, found = np.arange(20, dtype=np.int32), []
    for frequency in (None, 0.01, 0.5):
        often = None if frequency is None else lambda _, share=frequency: np.full(8, share)
        with split(path, 1.0, predictors=predictors, frequency=often) as (executor, ffns):
            dense.clear()
            logits = families.run_chunks(executor, tokens, [16, 4], families.scattered_pages(executor, 1)[0])
            found.append((logits, [ffn.collect()["hot"] for ffn in ffns]))
            assert set(dense) == {(16, frequency != 0.01), (4, frequency == 0.5)}
    for logits, counts in found[1:]:
        assert counts == found[0][1] and families.rms(logits - found[0][0]) < 1e-5
