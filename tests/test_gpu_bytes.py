"""What a plan says that a GPU and the RAM beside it hold, against what its layers hold on a stand-in for a GPU.

At load, at full context and at full batch, part by part: never more than planned, and planned to within two per cent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from model_files import family_gguf, plain_folder, tiny_folder  # noqa: E402
from sparse_models import give_bundles, give_predictor, give_profile, profile_of, tiny_llama  # noqa: E402

from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices.batch import Batch  # noqa: E402
from powerinfer.devices.link import Link, link_bytes, link_gpu_bytes  # noqa: E402
from powerinfer.devices.stage import Stage  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.bundle_types import choose_types  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.profile_file import open_profile, write_profile  # noqa: E402
from powerinfer.hardware.description import NO_GPU, load  # noqa: E402
from powerinfer.hybrid.ffn import HybridFfn, NeuronSplit  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolve import Resolved  # noqa: E402
from powerinfer.kernels import cpu, gpu  # noqa: E402
from powerinfer.placement import budget  # noqa: E402
from powerinfer.placement.budget import claim, dense_on_gpu, shared_on_gpu, whole_layers  # noqa: E402
from powerinfer.placement.plan import Plan, PlanRequest, make_plan  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.placement.solver import GROUP  # noqa: E402
from powerinfer.prepare.packing import pack  # noqa: E402
from powerinfer.sparsity.selection import select  # noqa: E402

CONTEXT, CHUNK, REQUESTS = 96, 48, 3
OPTIONS: dict[str, Any] = {"threads": 1, "context": CONTEXT, "prefill_chunk": CHUNK, "max_batch": REQUESTS}


def prepared(path: Path, types: tuple[str | None, str | None] = (None, None), quantize: str | None = None) -> Path:
    """The same path, with bundles and a profile beside it."""
    checkpoint = open_checkpoint(path, quantize)
    pack(checkpoint, None, choose_types(checkpoint, *types))
    config = checkpoint.config
    write_profile(checkpoint, None, profile_of(config.n_layers, config.widest_ffn), {})
    return path


def models(folder: Path, name: str) -> tuple[Path, str | None]:
    """(path, what its matrices are quantised to on load)."""
    if name == "llama":
        return prepared(tiny_llama(folder / "m.gguf"), ("F16", "F16")), None
    if name == "llama-q8_0":
        return prepared(tiny_llama(folder / "m.gguf"), ("Q8_0", "Q8_0"), "q8_0"), "q8_0"
    if name == "llama-q4_0":
        return prepared(tiny_llama(folder / "m.gguf"), ("Q4_0", "Q4_0X32"), "q4_0"), "q4_0"
    if name == "llama-predictors":
        return give_profile(give_predictor(give_bundles(tiny_llama(folder / "m.gguf")))), None
    if name == "falcon":
        return prepared(family_gguf("falcon").write(folder / "m.gguf"), ("F16", "F16")), None
    return prepared(plain_folder(folder / "model", name), ("F16", "F16")), None


def request_of(path: Path, quantize: str | None, groups: float, layers: int | None = None, **more: Any) -> PlanRequest:
    """The request for a plan with room for that many groups on the GPU, or for so many layers without neurons there."""
    checkpoint = open_checkpoint(path, quantize)
    model, hardware = checkpoint_model(checkpoint), load("pc-low")
    hardware = replace(hardware, gpu=replace(hardware.gpu, reserved_bytes=0), disk=None)
    selector = "predicted" if model.predictors else "exact"
    request = PlanRequest(
        model, open_profile(checkpoint, None), hardware, context=CONTEXT, chunk=CHUNK, requests=REQUESTS,
        selector=selector, policy="greedy", insist=True, **more,
    )  # fmt: skip
    everything = model.config.n_layers
    vram = dense_on_gpu(request)[-1][1] + shared_on_gpu(model, everything) + int(groups * GROUP * model.gpu_neuron)
    if layers is not None:
        fewer = range(vram, 0, -64)
        vram = next(some for some in fewer if claim(replace(request, vram=some)).gpu_layers == layers)
    return replace(request, vram=vram)


@contextmanager
def loaded(path: Path, quantize: str | None, plan: Plan) -> Iterator[tuple[Any, list[HybridFfn]]]:
    checkpoint = open_checkpoint(path, quantize)
    engine = EngineConfig(**OPTIONS, kv_type=plan.request.kv_type, selector=plan.request.selector)
    selection, pages = select(checkpoint, engine), -(-CONTEXT // cpu.PAGE)
    assert selection.bundles is not None
    stage = None
    if plan.staging:
        stage = Stage(torch.device("cpu"), plan.staging)
        stage.least = CHUNK
    placement = plan.placement(plan.request.profile)
    split = NeuronSplit(selection.bundles, placement, predictors=selection.predictors, stage=stage)
    given = plan.claims.gpu_layers, plan.claims.gpu_head, plan, pages
    executor = load_split(Resolved(checkpoint, engine, selection, "cpu", "", *given), split)
    try:
        yield executor, split.ffns
    finally:
        executor.close()


def on_gpu(executor: Any, ffns: list[HybridFfn]) -> dict[str, int]:
    held: Counter[str] = Counter(executor.gpu.memory())
    stage = next((ffn.stage for ffn in ffns if ffn.stage is not None), None)
    held["staging"] = 0 if stage is None else stage.nbytes
    for ffn in ffns:
        held.update(ffn.memory())
    return dict(held)


def steps(executor: Any) -> Iterator[str]:
    """Load, a whole context of prompts and answers, and as many requests as there may be."""
    yield "load"
    pages = np.arange(-(-CONTEXT // cpu.PAGE), dtype=np.int32)[None]
    rng = np.random.default_rng(1)
    for first in range(0, CONTEXT, CHUNK):
        tokens = rng.integers(0, executor.vocab_size, CHUNK).astype(np.int32)
        places = np.arange(first, first + CHUNK, dtype=np.int32)
        executor.forward(Batch(tokens, places, np.zeros(CHUNK, np.int32), pages, np.array([CHUNK - 1], np.int32)))
    yield "full context"
    each = np.arange(REQUESTS, dtype=np.int32)
    executor.forward(Batch(each, np.full(REQUESTS, 3, np.int32), each, np.tile(pages.T, (1, pages.shape[1])), each))
    yield "full batch"


@pytest.mark.parametrize("name", ["llama", "llama-q8_0", "llama-q4_0", "llama-predictors", "opt", "falcon", "nemotron"])
@pytest.mark.parametrize(("groups", "layers"), [(0, None), (1, None), (3, None), (99, None), (0, 1)])
def test_a_plans_bytes_are_what_is_held(tmp_path: Path, name: str, groups: int, layers: int | None) -> None:
    path, quantize = models(tmp_path, name)
    plan = make_plan(request_of(path, quantize, groups, layers))
    assert plan.claims.gpu_layers == (plan.request.model.config.n_layers if layers is None else layers)
    planned = plan.bytes["gpu"]
    with loaded(path, quantize, plan) as (executor, ffns):
        for when in steps(executor):
            held = {part: nbytes for part, nbytes in on_gpu(executor, ffns).items() if nbytes}
            assert set(held) <= set(planned)
            for part, nbytes in held.items():
                assert nbytes <= planned[part], (when, part)
                assert part == "scratch" or nbytes == planned[part], (when, part)
            total = sum(planned.values()) - planned["step"] - planned["allocator"]
            assert 0.98 * total <= sum(held.values()) <= total <= plan.request.vram, when
        assert not plan.staging, "there is hardly any room"
        in_ram = sum(ffn.cold_bytes for ffn in ffns)
        bundles = open_bundles(open_checkpoint(path, quantize), None, cpu.part_bytes)
        in_ram += sum(layer.nbytes for layer in bundles.layers[plan.claims.gpu_layers :])
        assert in_ram == plan.bytes["cpu"].get("ffn", 0)
        assert executor.cpu.predictor_bytes == plan.bytes["cpu"].get("predictor", 0)
        assert (executor.cpu.predictor_bytes > 0) == (name == "llama-predictors" and layers is not None)


@pytest.mark.parametrize("kv_type", ["f16", "f32", "q8_0"])
def test_dense_layers_are_as_large_as_was_counted(tmp_path: Path, kv_type: str) -> None:
    """As many as fit, and within the budget: with one byte less there is one layer less."""
    path = tiny_folder(tmp_path / "model", "qwen2", dtype="F16", biases="qkv")
    model, hardware = checkpoint_model(open_checkpoint(path)), load("pc-low")
    hardware = replace(hardware, gpu=replace(hardware.gpu, reserved_bytes=0))

    def fitting(vram: int) -> tuple[int, bool]:
        return whole_layers(model, hardware, vram, kv_type, CONTEXT, CHUNK, REQUESTS)

    hardware = replace(hardware, key={"gpu_device": NO_GPU})  # which rounds nothing
    step = model.gpu_passed(CHUNK, REQUESTS)
    for layers, head in ((1, False), (2, False), (2, True)):
        low, high = 0, 1 << 30
        while high - low > 1:  # the least that holds them
            middle = (low + high) // 2
            low, high = (low, middle) if fitting(middle) >= (layers, head) else (middle, high)
        checkpoint = open_checkpoint(path)
        engine, pages = EngineConfig(**OPTIONS, kv_type=kv_type), -(-CONTEXT // cpu.PAGE)
        executor = load_split(Resolved(checkpoint, engine, gpu="cpu", gpu_layers=layers, gpu_head=head, pages=pages))
        try:
            for when in steps(executor):
                held = sum(executor.gpu.memory().values())
                assert 0.98 * (high - step) <= held <= high - step, when
        finally:
            executor.close()


@pytest.mark.parametrize("quantize", [None, "q8_0"])
def test_what_the_allocator_rounds_up(quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its rule on every tensor that a dense model holds; here with smaller segments, as large as its matrices."""
    monkeypatch.setattr(gpu, "LARGE", 8 << 10)
    monkeypatch.setattr(gpu, "SEGMENT", 7 << 10)
    path = tiny_folder(tmp_path / "model", "qwen2", dtype="F16", biases="qkv")
    model = checkpoint_model(open_checkpoint(path, quantize))
    tensors: dict[int, int] = {}

    def noted(original: Any) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            made = original(*args, **options)
            tensors[made.data_ptr()] = made.nbytes
            return made

        return make

    for name in ("empty", "zeros", "cat"):
        monkeypatch.setattr(torch, name, noted(getattr(torch, name)))
    parts: dict[str, Any] = {"gpu": "cpu", "gpu_layers": 2, "gpu_head": True, "pages": -(-CONTEXT // cpu.PAGE)}
    executor = load_split(Resolved(open_checkpoint(path, quantize), EngineConfig(**OPTIONS), **parts))
    executor.close()
    kv = model.gpu_kv_bytes("f16", CONTEXT, 1)
    planned = sum(model.gpu_rounding(layer, kv, False, True) for layer in range(2)) + model.gpu_head_rounding
    vectors = 512 * sum(name.startswith("layers.") for name, _ in model._vectors)  # which are made otherwise, but for
    rounded = sum(map(gpu.rounding, tensors.values()))  # biases; these, and what is no layer's, are the margin
    assert planned - vectors - 2 * 512 <= rounded <= planned + 4 * 512
    assert planned > 4 * vectors


def test_the_buffers_between_the_devices() -> None:
    for sizes in ((32, 64, 96), (3, 100, 333)):
        link = Link(torch.device("cpu"), *sizes)
        assert (link.nbytes, link.gpu_bytes) == (link_bytes(*sizes), link_gpu_bytes(*sizes))


@pytest.mark.parametrize("name", ["llama", "llama-q4_0", "opt", "nemotron"])
def test_what_operators_pass_to_each_other(tmp_path: Path, name: str) -> None:
    """The most that is allocated and freed again within steps, as the allocator has it; not far below what was counted.

    In torch's own arithmetic, which is what there is here; a plan counts so where that was measured.
    """
    path, quantize = models(tmp_path, name)
    plan = make_plan(request_of(path, quantize, 99))
    with loaded(path, quantize, plan) as (executor, _):
        most = passed(executor, tmp_path)
    counted = plan.request.model.gpu_passed(CHUNK, REQUESTS, plain=CONTEXT)
    assert 0.5 * counted <= most <= counted


def passed(executor: Any, folder: Path) -> int:
    """The most that is allocated within steps and freed again."""
    list(steps(executor))  # what is kept is there now
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        list(steps(executor))
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    events = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    return int(np.cumsum([event["args"]["Bytes"] for event in events]).max())


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_what_neurons_stream_through_is_counted(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides, while prompts stream; and it is given up where neurons need its room."""
    monkeypatch.setattr(budget, "STAGED", 2)
    path, quantize = models(tmp_path, name)
    tried = (make_plan(request_of(path, quantize, halves / 2)) for halves in range(24, 0, -1))
    plan = next(plan for plan in tried if plan.staging)  # the most groups that are not all of them
    planned = plan.bytes
    assert planned["gpu"]["staging"] == planned["cpu"]["staging"] > 0
    assert sum(planned["gpu"].values()) <= plan.request.vram
    with loaded(path, quantize, plan) as (executor, ffns):
        for when in steps(executor):
            held = on_gpu(executor, ffns)
            assert held["staging"] == planned["gpu"]["staging"] and held["ffn"] == planned["gpu"].get("ffn", 0), when
        more = planned["gpu"]["step"] - plan.claims.gpu["step"]
        assert passed(executor, tmp_path) <= plan.request.model.gpu_passed(CHUNK, REQUESTS, plain=CONTEXT) + more
    everything = sum(planned["cpu"].values()) - planned["cpu"]["staging"]
    tight = make_plan(replace(plan.request, ram=everything))
    assert tight.fits and not tight.staging
