"""What a plan says that a GPU and the RAM beside it hold, against what its layers hold there (gpu_device.py).

At load, at full context and at full batch: weights and caches to the byte, working memory never more than planned. And
where the estimate of working memory is too low: fewer neurons are there once what was measured fits.
"""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import model_files  # noqa: E402
from configs import small  # noqa: E402
from gpu_device import device_name, torch_device  # noqa: E402
from model_files import LAYERS, delta_gguf, family_gguf, latent_gguf, plain_folder, tiny_folder  # noqa: E402
from sparse_models import give_bundles, give_predictor, give_profile, profile_for, tiny_llama  # noqa: E402
from stored_weights import stored_evenly  # noqa: E402
from test_checkpoint import with_type  # noqa: E402

from benchmarks.models import expert_models  # noqa: E402
from powerinfer.config import EngineConfig, FfnConfig, LatentAttentionConfig, LayerConfig  # noqa: E402
from powerinfer.devices import cpu as cpu_device  # noqa: E402
from powerinfer.devices import torch_device as torch_device_module  # noqa: E402
from powerinfer.devices.batch import Batch  # noqa: E402
from powerinfer.devices.gpu import GpuLayers  # noqa: E402
from powerinfer.devices.link import Link, link_bytes  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.devices.stage import Stage  # noqa: E402
from powerinfer.errors import GpuMemoryError, ModelError, PowerInferError, RequestError  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.bundle_types import choose_types  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.profile_file import open_profile, write_profile  # noqa: E402
from powerinfer.formats.quant import block_type  # noqa: E402
from powerinfer.hardware import measure  # noqa: E402
from powerinfer.hardware.description import Hardware, load  # noqa: E402
from powerinfer.hybrid import beside_gpu, crossing, fusion, memory_trial, resolve, resolved, vram  # noqa: E402
from powerinfer.hybrid import load as hybrid_load  # noqa: E402
from powerinfer.hybrid.experts import ExpertSplit  # noqa: E402
from powerinfer.hybrid.ffn import HybridFfn, NeuronSplit  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.parts import GpuNeurons  # noqa: E402
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu  # noqa: E402
from powerinfer.kernels import cpu, gpu_types  # noqa: E402
from powerinfer.neurons import Tier  # noqa: E402
from powerinfer.placement import budget  # noqa: E402
from powerinfer.placement.budget import Division, Workload, on_gpu  # noqa: E402
from powerinfer.placement.plan import Plan, PlanRequest, make_plan  # noqa: E402
from powerinfer.placement.shapes import Model, checkpoint_model, described_model, find_shape  # noqa: E402
from powerinfer.placement.solver import GROUP  # noqa: E402
from powerinfer.placement.working_memory import GPU_MARGIN, LAYER_MARGIN, working_memory  # noqa: E402
from powerinfer.prepare.packing import pack  # noqa: E402
from powerinfer.runtime.engine import LLM  # noqa: E402
from powerinfer.runtime.request import SamplingParams  # noqa: E402
from powerinfer.sparsity.selection import select  # noqa: E402

CONTEXT, CHUNK, REQUESTS = 96, 48, 3
OPTIONS: dict[str, Any] = {"threads": 1, "context": CONTEXT, "prefill_chunk": CHUNK, "max_batch": REQUESTS}


def prepared(path: Path, types: tuple[str | None, str | None] = (None, None), quantize: str | None = None) -> Path:
    """The same path, with bundles and a profile beside it."""
    checkpoint = open_checkpoint(path, quantize)
    pack(checkpoint, None, choose_types(checkpoint, *types))
    config = checkpoint.config
    write_profile(checkpoint, None, profile_for(config.ffn_sizes), {})
    return path


def models(folder: Path, name: str) -> tuple[Path, str | None]:
    """(path, what its matrices are quantised to on load)."""
    if name == "llama":
        return prepared(tiny_llama(folder / "m.gguf"), ("F16", "F16")), None
    if name == "llama-limits":
        return prepared(tiny_llama(folder / "m.gguf", "cats", limits=True, products=True), ("F16", "F16")), None
    if name == "llama-q8_0":
        return prepared(tiny_llama(folder / "m.gguf"), ("Q8_0", "Q8_0"), "q8_0"), "q8_0"
    if name == "llama-q4_0":
        return prepared(tiny_llama(folder / "m.gguf"), ("Q4_0", "Q4_0X32"), "q4_0"), "q4_0"
    if name == "llama-predictors":
        return give_profile(give_predictor(give_bundles(tiny_llama(folder / "m.gguf")))), None
    if name == "falcon":
        return prepared(family_gguf("falcon").write(folder / "m.gguf"), ("F16", "F16")), None
    return prepared(plain_folder(folder / "model", name), ("F16", "F16")), None


def machine(reserved: int = 0) -> Hardware:
    """pc-low without a disk, whose devices wait for nothing: the smallest group of neurons is worth its place."""
    hardware = load("pc-low")
    return replace(hardware, gpu=replace(hardware.gpu, reserved_bytes=reserved), disk=None, sync_us=0.0)


def request_of(path: Path, quantize: str | None, groups: float, layers: int | None = None, **more: Any) -> PlanRequest:
    """The request for a plan with room for `groups` groups on the GPU, or for `layers` layers without neurons there."""
    checkpoint = open_checkpoint(path, quantize)
    model, hardware = checkpoint_model(checkpoint), machine()
    selector = "predicted" if model.predictors else "exact"
    request = PlanRequest(
        model, open_profile(checkpoint, None), hardware, context=CONTEXT, chunk=CHUNK, requests=REQUESTS,
        selector=selector, policy="greedy", insist=True, **more,
    )  # fmt: skip
    vram = request.vram_for() + int(groups * GROUP * model.gpu_neuron)
    if layers is not None:
        vram = sum(on_gpu(model, hardware, request.workload, Division(layers)).values())
    return replace(request, vram=vram)


@contextmanager
def loaded(path: Path, quantize: str | None, plan: Plan) -> Iterator[tuple[Any, list[HybridFfn]]]:
    checkpoint = open_checkpoint(path, quantize)
    engine = EngineConfig(**OPTIONS, kv_type=plan.request.kv_type, selector=plan.request.selector)
    selection, pages = select(checkpoint, engine), -(-CONTEXT // cpu.PAGE)
    assert selection.bundles is not None
    stage = None
    if plan.staging:
        stage = Stage(torch_device(), plan.staging)
        stage.least = CHUNK
    placement = plan.placement(plan.request.profile)
    split = NeuronSplit(selection.bundles, placement, predictors=selection.predictors, stage=stage)
    whole = Placement(plan.claims.gpu_layers, plan.claims.gpu_head, plan, pages=pages)
    resolved = Resolved(checkpoint, engine, selection, UsedGpu(device_name()), whole)
    executor = load_split(resolved, split, stage=stage if plan.claims.passes else None)
    try:
        yield executor, split.ffns
    finally:
        executor.close()


def held_on_gpu(executor: Any, ffns: list[HybridFfn]) -> dict[str, int]:
    held: Counter[str] = Counter(executor.gpu.memory())
    del held["allocator"]  # what torch keeps of other tests, too
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


PARTS: list[tuple[int, int | None]] = [(0, None), (1, None), (3, None), (99, None), (0, 1)]
KINDS = ("llama-limits", "llama-q8_0", "llama-q4_0", "opt", "falcon", "nemotron")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "groups", "layers"),
    # Every placement with predictors and without; of every kind some neurons, and a layer alone.
    [
        *((name, *part) for name in ("llama", "llama-predictors") for part in PARTS),
        *((name, *part) for name in KINDS for part in (PARTS[2], PARTS[4])),
    ],
)
@pytest.mark.usefixtures("device")
def test_a_plans_bytes_are_what_is_held(tmp_path: Path, name: str, groups: int, layers: int | None) -> None:
    path, quantize = models(tmp_path, name)
    plan = make_plan(request_of(path, quantize, groups, layers))
    assert plan.claims.gpu_layers == (plan.request.model.config.n_layers if layers is None else layers)
    planned = plan.bytes["gpu"]
    every = sum(-(-layer.ffn.size // GROUP) for layer in plan.request.model.config.layers)
    assert sum(plan.choice.gpu) == min(groups, every)
    with loaded(path, quantize, plan) as (executor, ffns):
        for when in steps(executor):
            held = {part: nbytes for part, nbytes in held_on_gpu(executor, ffns).items() if nbytes}
            assert set(held) <= set(planned)
            scratch = held.pop("scratch")
            assert scratch <= planned["scratch"], when
            assert held == {part: planned[part] for part in held}, when
            assert sum(held.values()) + planned["scratch"] == sum(planned.values()) <= plan.request.vram, when
        most = scratch + passed(executor, tmp_path)
        assert most <= planned["scratch"]
        counted = planned["scratch"] - GPU_MARGIN - plan.claims.gpu_layers * LAYER_MARGIN
        if device_name() == "cpu":  # on a GPU recorded steps have their memory elsewhere
            assert counted <= 3 * most, "an estimate far too high takes the room of neurons"
        assert not plan.staging, "there is hardly any room"
        in_ram = sum(ffn.cold_bytes for ffn in ffns)
        bundles = open_bundles(open_checkpoint(path, quantize), None, cpu.bundle_row_bytes)
        in_ram += sum(layer.nbytes for layer in bundles.layers[plan.claims.gpu_layers :])
        assert in_ram == plan.bytes["cpu"].get("ffn", 0)
        predictors = sum(ffn.predictor_bytes for ffn in executor.cpu.ffns.values())
        assert predictors == plan.bytes["cpu"].get("predictor", 0)
        assert (predictors > 0) == (name == "llama-predictors" and layers is not None)


@pytest.mark.parametrize(
    ("kv_type", "layers", "head"),
    [("f16", 1, False), ("f32", 2, False), ("q8_0", 2, True), ("q8_0", 1, False), ("f16", 2, True)],
)
@pytest.mark.usefixtures("device")
def test_dense_layers_are_as_large_as_was_counted(tmp_path: Path, kv_type: str, layers: int, head: bool) -> None:
    """Layers as a whole and the head, use by use."""
    check_dense_layers(
        tiny_folder(tmp_path / "model", "qwen2", dtype="F16", biases="qkv"), tmp_path, kv_type, layers, head
    )


FEW_BITS = ("Q3_K", "Q2_K", "IQ3_S", "NVFP4", "IQ2_XS", "IQ4_XS", "TQ1_0")


@pytest.mark.usefixtures("device")
def test_types_of_few_bits_take_on_a_gpu_what_they_do_in_a_file(tmp_path: Path) -> None:
    """A file with several of them, as dynamic quantisations have; NVFP4 takes four bytes more for each row."""
    builder, rng = with_type("Q3_K", 11), np.random.default_rng(4)
    matrices = [tensor for tensor in builder.tensors if tensor.name.startswith("blk") and len(tensor.dims) == 2]
    rows = 0
    for number, tensor in enumerate(matrices):
        kind = FEW_BITS[number % len(FEW_BITS)]
        tensor.type_id = block_type(kind).id
        tensor.data = stored_evenly(kind, tensor.dims[1], tensor.dims[0], 0.1, rng).tobytes()
        rows += tensor.dims[1] * (kind == "NVFP4")
    path = builder.write(tmp_path / "m.gguf")
    check_dense_layers(path, tmp_path, "f16", LAYERS, False)
    model = checkpoint_model(open_checkpoint(path))
    on_device = sum(one.stored for layer in (*model.attention, *model.ffn) for one in layer)
    assert on_device == sum(len(tensor.data) for tensor in matrices) + 4 * rows


@pytest.mark.parametrize(("layers", "head"), [(1, False), (2, True)])
@pytest.mark.usefixtures("device")
def test_states_are_as_large_as_was_counted(tmp_path: Path, layers: int, head: bool) -> None:
    """With keys and values, in the slots of all requests and of kept prefixes; the rest on the CPU."""
    path = delta_gguf().write(tmp_path / "m.gguf")
    check_dense_layers(path, tmp_path, "f16", layers, head)
    model = checkpoint_model(open_checkpoint(path))
    every, each = (model.state_bytes(REQUESTS, slice(at, None)) for at in (0, layers))
    assert every > 0 and each == 0, "the first layer alone has states"


def check_dense_layers(path: Path, tmp_path: Path, kv_type: str, layers: int, head: bool) -> None:
    model = checkpoint_model(open_checkpoint(path))
    work = Workload(kv_type, CONTEXT, CHUNK, REQUESTS)
    planned = on_gpu(model, load("pc-low"), work, Division(layers, head), dense=True)
    checkpoint, engine, pages = open_checkpoint(path), EngineConfig(**OPTIONS, kv_type=kv_type), -(-CONTEXT // cpu.PAGE)
    placement = Placement(layers, head, pages=pages)
    whole = Resolved(checkpoint, engine, device=UsedGpu(device_name()), placement=placement)
    assert resolved.kept_on_gpus(whole) == [sum(planned.values()) - planned["runtime"] - planned["scratch"]]
    executor = load_split(whole)
    try:
        for when in steps(executor):
            held = {part: nbytes for part, nbytes in held_on_gpu(executor, []).items() if nbytes}
            scratch = held.pop("scratch")
            assert held | {name: planned[name] for name in ("runtime", "scratch")} == planned, when
        assert scratch + passed(executor, tmp_path) <= planned["scratch"]
    finally:
        executor.close()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize(("older", "layers", "head"), [(False, 1, False), (True, 2, True)])
@pytest.mark.usefixtures("device")
def test_latent_attention_is_as_large_as_was_counted(
    tmp_path: Path, kv_type: str, older: bool, layers: int, head: bool
) -> None:
    """Both forms of files."""
    check_dense_layers(latent_gguf(older).write(tmp_path / "m.gguf"), tmp_path, kv_type, layers, head)


@pytest.mark.parametrize("q_latents", [None, 32])
def test_working_memory_of_latent_attention(tmp_path: Path, q_latents: int | None) -> None:
    """Of layers with little else: never more than was counted without the margins, and not far less."""
    config = expert_models.CONFIGS["deepseek-v2-lite"]
    about = config.layers[0].attention
    assert isinstance(about, LatentAttentionConfig)
    about = replace(about, n_heads=8, latents=128, plain_dim=32, rope_dim=16, value_dim=32, q_latents=q_latents)
    about = replace(about, rope=replace(about.rope, dim=16), scale=2 * about.scale)
    layers = (LayerConfig(about, FfnConfig(32)), LayerConfig(about, small(config).layers[-1].ffn))
    path = tmp_path / "m.gguf"
    expert_models.write(path, replace(config, d_model=64, vocab_size=1200, layers=layers), expert_models.Weights("f16"))
    model, engine = checkpoint_model(open_checkpoint(path)), EngineConfig(**OPTIONS)
    split = ExpertSplit([np.arange(n, dtype=np.int32) for n in model.n_experts])
    placement = Placement(2, True, pages=-(-CONTEXT // cpu.PAGE))
    executor = load_split(Resolved(open_checkpoint(path), engine, device=UsedGpu("cpu"), placement=placement), split)
    try:
        most = passed(executor, tmp_path) + executor.gpu.memory()["scratch"]
    finally:
        executor.close()
    counted = model.gpu_scratch(CHUNK, REQUESTS, 2) - GPU_MARGIN - 2 * LAYER_MARGIN
    assert most <= counted <= 4 * most


def test_many_rows_of_logits_dequantise_the_head() -> None:
    """Of a vocabulary that is far wider than the model's other matrices, of which a piece was counted before."""
    model = described_model(find_shape("qwen3-30b-a3b").config, "q4_0", "a model", 0.0)
    assert model.config.vocab_size * model.config.d_model > gpu_types.PIECE
    rows = gpu_types.FEW
    few, more, many = (working_memory(model.config, 512, n, 1) for n in (rows - 1, rows, rows + 1))
    assert few["pieces"] == more["pieces"] < many["pieces"] == 2 * gpu_types.PIECE


@pytest.mark.usefixtures("device")
def test_the_buffers_between_the_devices() -> None:
    for name in ("bamboo-7b", "qwen3-30b-a3b", "smallthinker-21b", "nemotron-3-super-120b-a12b"):
        config = find_shape(name).config
        for tokens in (3, 40, 2048):
            assert Link(torch_device(), tokens, config).nbytes == link_bytes(tokens, config)


def passed(executor: Any, folder: Path) -> int:
    """Bytes, at most, that steps allocate and free again, the largest ones included."""
    list(steps(executor))  # what is kept is there now
    if device_name() == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        list(steps(executor))
        return int(torch.cuda.max_memory_allocated()) - before
    told = {"activities": [torch.profiler.ProfilerActivity.CPU], "profile_memory": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11 says that no events are kept here, which would take seconds
        with torch.profiler.profile(**told) as profile:
            list(steps(executor))
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    events = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    return int(np.cumsum([event["args"]["Bytes"] for event in events]).max())


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.usefixtures("device")
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
            held = held_on_gpu(executor, ffns)
            assert held["staging"] == planned["gpu"]["staging"] and held["ffn"] == planned["gpu"].get("ffn", 0), when
        assert held["scratch"] + passed(executor, tmp_path) <= planned["gpu"]["scratch"]
    everything = sum(planned["cpu"].values()) - planned["cpu"]["staging"]
    tight = make_plan(replace(plan.request, ram=everything))
    assert tight.fits and not tight.staging


@pytest.mark.parametrize("name", ["llama", "llama-q4_0", "llama-predictors", "opt", "falcon", "nemotron"])
@pytest.mark.usefixtures("device")
def test_what_layers_in_ram_stream_through_is_counted(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside split neurons: buffers, norms and biases, a cache that passes through; given up where neurons need it."""
    monkeypatch.setattr(budget, "PASSED", 1)
    path, quantize = models(tmp_path, name)
    least = request_of(path, quantize, 0, 1)
    assert least.vram is not None and not make_plan(least).claims.passes, "there is hardly any room"
    tried = (make_plan(replace(least, vram=least.vram + more)) for more in range(0, 1 << 20, 1 << 10))
    plan = next(plan for plan in tried if plan.claims.passes)
    assert plan.claims.gpu_layers == 1 < plan.request.model.config.n_layers
    planned = plan.bytes
    assert planned["gpu"]["passing"] > 0 < planned["cpu"]["passing"]
    assert plan.request.vram is not None and sum(planned["gpu"].values()) <= plan.request.vram
    with loaded(path, quantize, plan) as (executor, ffns):
        streamed = executor.streamed
        assert streamed is not None and streamed.spans
        for when in steps(executor):
            held = held_on_gpu(executor, ffns)
            beside = sum(held[part] - planned["gpu"][part] for part in ("norms", "kv"))
            assert beside == planned["gpu"]["passing"] and held["staging"] == planned["gpu"]["staging"], when
        assert held["scratch"] + passed(executor, tmp_path) <= planned["gpu"]["scratch"]
        returned = sum(buffer.numel() for buffer in streamed._cache._host)
        assert returned == planned["cpu"]["passing"]
    tight = make_plan(replace(plan.request, ram=sum(planned["cpu"].values()) - planned["cpu"]["passing"]))
    assert tight.fits and not tight.claims.passes


@pytest.mark.parametrize("quantize", [None, "q4_0"])
def test_without_buffers_as_much_is_left_as_if_there_were_none(
    tmp_path: Path, quantize: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where groups of neurons would share more than there is, and buffers take of that."""
    monkeypatch.setattr(budget, "PASSED", 1)
    path, quantize = models(tmp_path, "llama" if quantize is None else f"llama-{quantize}")
    least, seen = request_of(path, quantize, 0, 1), set()
    assert least.vram is not None
    for more in range(0, 1 << 18, 1 << 10):
        given = least.model, least.hardware, least.workload, least.vram + more, 1 << 30
        claims = budget.claim(*given)
        with monkeypatch.context() as patch:
            patch.setattr(budget, "_passing", lambda *_: None)
            patch.setattr(budget, "_staging", lambda *_: 0)
            assert claims.without_buffers() == budget.claim(*given)
        seen.add((claims.passes, claims.gpu_left == 0))
    assert (True, True) in seen


@pytest.mark.parametrize("name", ["llama", "llama-predictors"])
def test_a_model_whose_last_layers_stream(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded within a budget that holds one layer: several requests, one of them with a prefix in the cache, twice, and
    a score, as by the CPU alone."""
    monkeypatch.setattr(budget, "PASSED", 1)
    made = machine(RESERVED)
    monkeypatch.setattr(measure, "measured", lambda *_, **__: made)
    path, quantize = models(tmp_path, name)
    prompt = np.random.default_rng(0).integers(1, 40, 60).tolist()
    several, once = [prompt, prompt[:50], prompt], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)

    def results(llm: LLM) -> tuple[list[list[int]], np.ndarray]:
        rows: list[np.ndarray] = []
        answers = [[answer.token_ids for answer in llm.generate(several, once)] for _ in range(2)]
        llm.score(prompt, 1, lambda _, logits: rows.append(logits.copy()))
        assert answers[0] == answers[1]
        return answers[0], np.concatenate(rows)

    with LLM(path, **OPTIONS, gpu="none", trial=False) as llm:
        wanted, right = results(llm)
    least = replace(request_of(path, quantize, 0, 1), hardware=made)
    assert least.vram is not None
    tried = (make_plan(replace(least, vram=least.vram + RESERVED + more)) for more in range(0, 1 << 22, 1 << 14))
    vram = next(plan for plan in tried if plan.claims.passes).request.vram
    assert vram is not None
    for _ in range(2):  # with what the first start measured, too
        with load_within(path, quantize, vram + (64 << 10)) as llm:
            executor = llm._executor
            assert "cold neurons and the layers in RAM" in llm.choices["prefill"]
            streamed, ran = executor.streamed, []  # type: ignore[union-attr]
            run = streamed.run
            monkeypatch.setattr(streamed, "run", lambda *given, run=run, ran=ran: (ran.append(1), run(*given))[1])
            streamed.stage.least = 33
            answers, rows = results(llm)
            assert answers == wanted and ran
            assert np.sqrt(((rows - right) ** 2).mean() / (right**2).mean()) < 1e-4


# ---------------------------------------------------------------- measured


RESERVED = 1 << 20
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stand-in is asked what its steps take, and nothing is estimated for them; what was found, rehearsal by
    rehearsal."""
    found: list[int] = []

    def rehearsed(executor: Any, requests: int) -> int:
        assert requests == REQUESTS
        found.append(sum(executor.gpu.memory().values()) + passed(executor, tmp_path))
        return found[-1]

    monkeypatch.setattr(vram, "rehearsed", rehearsed)
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: 0)
    monkeypatch.setattr(measure, "measured", lambda *_, **__: machine(RESERVED))
    return found


def load_within(path: Path, quantize: str | None, vram: int, **more: Any) -> LLM:
    return LLM(path, **OPTIONS | more, quantize=quantize, gpu="cpu", vram=vram)


@pytest.mark.parametrize(
    ("name", "halves"), [("llama", 1), ("llama-q8_0", 3), ("llama-q4_0", 1), ("llama-predictors", 3)]
)
def test_neurons_make_room_for_what_was_measured(
    tmp_path: Path, name: str, halves: int, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At load, at full context and at full batch the budget holds, though nothing was planned for what steps take; and
    but for the margin, which these models are too small for, no more neurons leave than have to."""
    monkeypatch.setattr(vram, "MARGIN", 1 << 40)
    path, quantize = models(tmp_path, name)
    group = GROUP * checkpoint_model(open_checkpoint(path, quantize)).gpu_neuron

    def taken(llm: LLM) -> int:
        executor, ffns = llm._executor, llm._sparsity.ffns  # type: ignore[union-attr]
        return RESERVED + sum(held_on_gpu(executor, ffns).values()) + passed(executor, tmp_path)

    with load_within(path, quantize, 1 << 30) as llm:
        assert len(measured) == 1 and "measured" not in llm.choices["gpu"]
        wanted = llm.generate([[5, 9, 2]], SHORT)[0].token_ids
        budget = taken(llm) - halves * group // 2
    with load_within(path, quantize, budget) as llm:
        assert len(measured) >= 3 and "% since memory was measured" in llm.choices["gpu"]
        for when in steps(llm._executor):
            assert budget - 2 * group < taken(llm) <= budget, when
        assert llm.generate([[5, 9, 2]], SHORT)[0].token_ids == wanted
        assert llm._executor.gpu.share._nbytes == budget - RESERVED  # what torch is held to, on a GPU


class Pieces:
    """Torch's memory of a device, in bytes: a piece for weights, which it keeps whole though `free` bytes of it are,
    and for steps of each number of tokens another one, of three bytes a token, two of them used, until it is told to
    return them."""

    weights, free = 1000, 300

    def __init__(self) -> None:
        self.cached = dict[int, int]()
        self.empty_cache: Any = self.cached.clear
        self.reset_peak_memory_stats(None)

    def step(self, tokens: int) -> None:
        self.cached[tokens] = 3 * tokens
        self.most_held = max(self.most_held, self.memory_reserved(None))
        self.most_used = max(self.most_used, self.memory_allocated(None) + 2 * tokens)

    def reset_peak_memory_stats(self, _: Any) -> None:
        self.most_held, self.most_used = self.memory_reserved(None), self.memory_allocated(None)

    def memory_reserved(self, _: Any) -> int:
        return self.weights + sum(self.cached.values())

    def memory_allocated(self, _: Any) -> int:
        return self.weights - self.free

    def max_memory_reserved(self, _: Any) -> int:
        return self.most_held

    def max_memory_allocated(self, _: Any) -> int:
        return self.most_used

    def memory_stats(self, _: Any) -> dict[str, int]:
        return {"requested_bytes.all.current": self.memory_allocated(None)}


def test_what_torch_holds_in_the_largest_step_counts(
    tmp_path: Path, described: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free bytes between weights, which its temporaries do not fill, too; nothing that steps of other sizes left."""
    path, quantize = models(tmp_path, "llama")
    with LLM(path, **OPTIONS, quantize=quantize, gpu="cpu") as llm:
        layers, pieces = llm._executor.gpu, Pieces()
        run = layers._rehearse

        def rehearsed(tokens: int, *given: Any, **how: Any) -> None:
            run(tokens, *given, **how)
            pieces.step(tokens)

        monkeypatch.setattr(torch, "cuda", pieces)
        monkeypatch.setattr(layers, "_cuda", True)
        monkeypatch.setattr(layers, "_rehearse", rehearsed)
        before = sum(layers.memory().values()) - layers.memory()["allocator"]
        assert layers.rehearse(1) == 2 * layers.max_tokens
        held = pieces.free + 3 * layers.max_tokens
        assert sum(layers.memory().values()) - before == held
        monkeypatch.undo()


def test_a_step_that_the_budget_has_no_room_for(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run again without a limit, for torch may keep pieces that it cannot use; then there is nothing to lift."""
    path, quantize = models(tmp_path, "llama")
    with load_within(path, quantize, 1 << 30) as llm:
        wanted = llm.generate([[5, 9, 2]], SHORT)[0].token_ids
        layers, failures = llm._executor.gpu, [1]
        run = layers._run

        def failing(*step: Any) -> Any:
            if failures[0]:
                failures[0] -= 1
                raise GpuMemoryError("the GPU ran out of memory: give less --vram")
            return run(*step)

        monkeypatch.setattr(layers, "_run", failing)
        assert llm.generate([[5, 9, 2]], SHORT)[0].token_ids == wanted
        assert layers.share._nbytes is None
        failures[0] = 1
        with pytest.raises(GpuMemoryError, match="ran out of memory"):
            llm.generate([[5, 9, 2]], SHORT)
        assert llm.generate([[5, 9, 2]], SHORT)[0].token_ids == wanted


def test_budgets_that_cannot_be_held(tmp_path: Path, measured: list[int]) -> None:
    """One line that says what would do: without neurons to move, and without RAM to move them to."""
    path, quantize = models(tmp_path, "llama")
    with load_within(path, quantize, 1 << 30):
        dense = measured[-1] + RESERVED
    said = r"takes .* of the GPU's memory, and --vram leaves it .*: give "
    with pytest.raises(PowerInferError, match=said) as caught:
        load_within(path, quantize, dense - (1 << 12))
    assert "\n" not in str(caught.value)
    model, work = checkpoint_model(open_checkpoint(path, quantize)), Workload("f16", CONTEXT, CHUNK, REQUESTS)
    one_layer = sum(on_gpu(model, machine(RESERVED), work, Division(1), dense=True).values())
    with pytest.raises(PowerInferError, match=said):
        load_within(path, quantize, one_layer, selector="all")
    planned = make_plan(request_of(path, quantize, 99))
    assert not planned.neurons[0][Tier.CPU], "RAM has no room for neurons"
    with pytest.raises(PowerInferError, match=r"needs .* more of RAM or VRAM"):
        load_within(path, quantize, measured[0] + RESERVED + (1 << 12), ram=sum(planned.bytes["cpu"].values()))


def test_a_gpu_that_runs_out_of_memory(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neurons leave until the largest steps run; where there are none left, the device's own line is what is said."""
    path, _ = models(tmp_path, "llama")
    model = checkpoint_model(open_checkpoint(path))
    monkeypatch.setattr(vram, "_LACKING", GROUP * model.gpu_neuron)
    left = [2, 99]

    def rehearsed(executor: Any, _: int) -> int:
        if left[0]:
            left[0] -= 1
            raise GpuMemoryError("the GPU ran out of memory while it was tried: give less --vram")
        return 0

    monkeypatch.setattr(vram, "rehearsed", rehearsed)
    with LLM(path, **OPTIONS, gpu="cpu") as llm:  # of four groups, the last of each layer half as large: one, then two
        assert 32 <= sum(len(ffn.hot) for ffn in llm._sparsity.ffns) <= GROUP  # type: ignore[union-attr]
    del left[0]
    with pytest.raises(GpuMemoryError, match="ran out of memory while it was tried"):
        LLM(path, **OPTIONS, gpu="cpu")


def test_whole_layers_leave_until_the_budget_holds(tmp_path: Path, measured: list[int]) -> None:
    """First the head, then the layers; `auto` ends on the CPU and says why."""
    path, quantize = models(tmp_path, "llama")
    with load_within(path, quantize, 1 << 30, selector="all") as llm:
        assert llm.choices["gpu"].startswith("2 layers and the head on cpu")
        wanted = llm.generate([[5, 9, 2]], SHORT)[0].token_ids
    with load_within(path, quantize, measured[-1] + RESERVED - 1, selector="all") as llm:
        assert llm.choices["gpu"].startswith("2 layers on cpu")
        assert llm.generate([[5, 9, 2]], SHORT)[0].token_ids == wanted
    with load_within(path, quantize, measured[-1] + RESERVED - 1, selector="all") as llm:
        assert llm.choices["gpu"].startswith("1 layer on cpu")
        assert llm.generate([[5, 9, 2]], SHORT)[0].token_ids == wanted


def test_auto_ends_on_the_cpu(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, wherever the device ran out of memory."""
    path, _ = models(tmp_path, "llama")

    def rehearsed(*_: Any) -> int:
        raise GpuMemoryError("the GPU ran out of memory while it was tried: give less --vram")

    monkeypatch.setattr(vram, "rehearsed", rehearsed)
    monkeypatch.setattr(resolve, "wanted_gpu", lambda _: ("cpu", "chosen"))
    for selector in ("all", "exact"):
        with LLM(path, **OPTIONS, gpu="auto", selector=selector) as llm:
            assert llm.choices["gpu"].startswith("none (the GPU ran out of memory while it was tried")
            assert llm.generate([[5, 9, 2]], SHORT)


def test_neurons_take_what_was_estimated_too_high(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured working memory replaces the estimate once; later starts place the same neurons at once."""
    path, quantize = models(tmp_path, "llama")
    group = GROUP * checkpoint_model(open_checkpoint(path, quantize)).gpu_neuron
    with load_within(path, quantize, 1 << 30) as llm:
        every = sum(len(ffn.hot) for ffn in llm._sparsity.ffns)  # type: ignore[union-attr]
        wanted = llm.generate([[5, 9, 2]], SHORT)[0].token_ids
        working = llm._executor.gpu.memory()["scratch"] + passed(llm._executor, tmp_path)  # type: ignore[union-attr]
    (Path(f"{path}.powerinfer") / "trials.json").unlink()
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: working + working // 4)
    plan = make_plan(request_of(path, quantize, 99))
    budget = RESERVED + plan.request.vram_for(2) - group // 2  # by the estimate, for one group
    hot: list[list[list[int]]] = []
    for start, calls in enumerate((2, 1)):
        measured.clear()
        with load_within(path, quantize, budget) as llm:
            ffns = llm._sparsity.ffns  # type: ignore[union-attr]
            hot.append([ffn.hot.tolist() for ffn in ffns])
            assert len(measured) == calls and "% since memory was measured" in llm.choices["gpu"], start
            assert sum(held_on_gpu(llm._executor, ffns).values()) + passed(llm._executor, tmp_path) <= budget - RESERVED
            assert llm.generate([[5, 9, 2]], SHORT)[0].token_ids == wanted
    assert hot[0] == hot[1] and GROUP < sum(map(len, hot[0])) <= every


class ExpertsCard:
    """A device on which all experts but three fit by the estimate, and all by what is measured; it runs out of memory
    where `fits` says no to (their number, whether prompts stream)."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path = folder / "m.gguf"
        expert_models.write(path, small(expert_models.CONFIGS["qwen3-30b-a3b"]), expert_models.Weights("f16"))
        checkpoint = open_checkpoint(path)
        model = checkpoint_model(checkpoint)
        self.each, self.every = model.expert_bytes(0)[0], sum(model.n_experts)
        everything = resolved.needs(resolve.resolve(checkpoint, EngineConfig(**OPTIONS, gpu="cpu"))).vram
        with load_within(path, None, 1 << 30) as llm:
            self.wanted = llm.generate([[5, 9, 2]], SHORT)[0].token_ids
            working = llm._executor.gpu.memory()["scratch"] + passed(llm._executor, folder)  # type: ignore[union-attr]
        room = working + working // 8 + 2 * self.each  # with experts on the CPU, too, steps take a little more
        monkeypatch.setattr(Model, "gpu_scratch", lambda *_: room + 3 * self.each)
        self.budget = everything + room  # by the estimate for all but three
        self.loads: list[int] = []
        self.streams: list[bool] = []
        self.fits: Callable[[int, bool], bool] = lambda *_: True
        hold, rehearsed = vram.hold_budget, vram.rehearsed

        def counted(executor: Any, resolved: Any, split: Any, **more: Any) -> Any:
            self.loads.append(sum(len(ffn.hot) for ffn in split.ffns))
            self.streams.append(split.stage is not None)
            return hold(executor, resolved, split, **more)

        def tried(executor: Any, requests: int) -> int | None:
            if not self.fits(self.loads[-1], self.streams[-1]):
                raise GpuMemoryError("the GPU ran out of memory while it was tried: give less --vram")
            return rehearsed(executor, requests)

        monkeypatch.setattr(vram, "hold_budget", counted)
        monkeypatch.setattr(vram, "rehearsed", tried)

    def start(self, more: int = 0, **options: Any) -> list[int]:
        """The numbers of experts on the GPU that were tried at a start, with so many bytes more of VRAM."""
        self.loads.clear()
        self.streams.clear()
        with load_within(self.path, None, self.budget + more, **options) as llm:
            assert llm.generate([[5, 9, 2]], SHORT)[0].token_ids == self.wanted
            said = llm.choices["gpu"].endswith("since memory was measured")
            assert more or said == (self.loads[-1] == self.every)
        return list(self.loads)


@pytest.fixture
def experts_card(tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> ExpertsCard:
    return ExpertsCard(tmp_path, monkeypatch)


def test_experts_take_what_was_estimated_too_high(experts_card: ExpertsCard) -> None:
    """The model is loaded again with more experts, once; later starts place them at once, with that --vram. Where that
    runs out of memory those of the estimate stay, then too."""
    card, every = experts_card, experts_card.every
    assert card.start() == [every - 3, every] and card.start() == [every]
    assert card.start(-card.each) == [every - 4, every], "what was measured with other layers there may not hold"
    card.fits = lambda hot, _: hot < every
    assert card.start() == [every, every - 3] and card.start() == [every - 3]


def test_experts_of_the_estimate_stay(experts_card: ExpertsCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more of them run out of memory, or RAM would not hold what those need; then at later starts, too."""
    card, every = experts_card, experts_card.every
    card.fits = lambda hot, _: hot < every
    assert card.start() == [every - 3, every, every - 3] and card.start() == [every - 3]
    with monkeypatch.context() as patch:
        patch.setattr(beside_gpu, "with_other_experts", lambda *_: RequestError("RAM holds no other experts"))
        closed: list[int] = []
        close = SplitExecutor.close
        patch.setattr(SplitExecutor, "close", lambda own: (closed.append(id(own)), close(own))[1])
        assert card.start(retrial=True) == [every - 3, every - 3] and len(closed) == 2
    assert card.start() == [every - 3]


def test_what_experts_have_to_leave_is_saved(experts_card: ExpertsCard) -> None:
    """Where fewer of them fit than by the estimate, and where buffers for prompts do not."""
    card, every = experts_card, experts_card.every
    card.fits = lambda hot, _: hot < every - 3
    first = card.start()
    assert first[0] == every - 3 and len(first) > 1 and card.start() == first[-1:]
    card.fits = lambda hot, streams: hot < every and not streams
    few = 20 * card.each
    first = card.start(-few)
    assert len(first) > 1 and not card.streams[-1] and card.start(-few) == first[-1:] and not card.streams[-1]


def test_chunks_give_way_where_they_take_more_than_they_are_worth(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that were chosen, on a device which runs out of memory with long ones: later starts begin with short ones;
    those that were asked for stay, and experts leave."""
    path, tried, most = tmp_path / "m.gguf", list[tuple[int, int]](), {"tokens": 512, "experts": 99}
    expert_models.write(path, small(expert_models.CONFIGS["qwen3-30b-a3b"]), expert_models.Weights("f16"))
    monkeypatch.setattr(Model, "gpu_scratch", lambda _, tokens, *__: (1 << 20) + 4 * tokens)
    monkeypatch.setattr(vram, "_LACKING", 1 << 15)
    monkeypatch.setattr(budget, "EXPERT_STAGED", 1)
    chosen = {"context": 2048, "prefill_chunk": 0}
    every = resolve.resolve(open_checkpoint(path), EngineConfig(**OPTIONS | chosen, gpu="cpu"))
    assert every.placement.plan is not None
    given = resolved.needs(every).vram - 4 * every.placement.plan.request.model.expert_bytes(0)[0]

    def full(executor: Any, _: int) -> None:
        hot = sum(len(layer._ffn.parts.hot) for layer in executor.gpu._layers if layer._ffn is not None)
        tried.append((executor.max_tokens, hot))
        if executor.max_tokens > most["tokens"] or hot > most["experts"]:
            raise GpuMemoryError("the GPU ran out of memory while it was tried: give less --vram")

    monkeypatch.setattr(vram, "rehearsed", full)
    for loads in ([2048, 512], [512]):
        tried.clear()
        with load_within(path, None, given, **chosen) as llm:
            assert [tokens for tokens, _ in tried] == loads
            assert llm.choices["prefill_chunk"].startswith("512 ")
            assert llm.generate([[5, 9, 2]], SHORT)
    most |= {"tokens": 2048, "experts": tried[-1][1] - 1}
    tried.clear()
    with load_within(path, None, given, context=2048, prefill_chunk=2048):
        assert len(tried) > 1 and {tokens for tokens, _ in tried} == {2048}


def test_options_hold_when_a_load_is_tried_again(
    experts_card: ExpertsCard, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `resolve` refuses does not come about by running out of memory."""
    card = experts_card
    card.fits = lambda *_: False
    monkeypatch.setattr(resolve, "wanted_gpu", lambda _: ("cpu", "chosen"))
    options = OPTIONS | {"gpu": "auto", "vram": card.budget}
    for moved in ({"expert_policy": "lru"}, {"adjust": True}):
        with pytest.raises(GpuMemoryError, match="ran out of memory while it was tried"):
            LLM(card.path, **options | moved)
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: 0)
    plan = make_plan(request_of(wide, None, 24))
    split = Resolved(open_checkpoint(wide), EngineConfig(**OPTIONS, gpu="auto", adjust=True), device=UsedGpu("cpu"))
    split = split.placed(layers=plan.claims.gpu_layers, plan=plan)
    monkeypatch.setattr(vram, "smaller", lambda resolved, *_: resolved.placed(disk="some neurons"))
    with pytest.raises(RequestError, match="some of them rest on disk: leave it out"):
        hybrid_load._smaller_load(GpuMemoryError("out of memory"), split, 0, lambda _: None)


def test_a_load_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is an executor on the CPU, and after the weights were wired."""
    path, _ = models(tmp_path, "llama")
    checkpoint, ended = open_checkpoint(path), list[str]()
    end, close = torch_device_module.MemoryShare.end, GpuLayers.close
    monkeypatch.setattr(torch_device_module.MemoryShare, "end", lambda own: (ended.append("share"), end(own))[1])
    monkeypatch.setattr(GpuLayers, "close", lambda own: (ended.append("gpu"), close(own))[1])

    def failing(*_: Any, **__: Any) -> None:
        raise ModelError("a tensor is left over")

    one = Resolved(checkpoint, EngineConfig(**OPTIONS), device=UsedGpu("cpu"), placement=Placement(1))
    for owner, name, left in ((cpu_device, "CpuExecutor", set()), (checkpoint, "finish", {"share", "gpu"})):
        ended.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with pytest.raises(ModelError, match="left over"):
                load_split(one)
        assert {*ended} == left


# ---------------------------------------------------------------- starts after the first


WORKING = 1 << 20
NEURON = 3 * 64 * 2  # bytes: F16, d_model 64


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with 16 groups of neurons a layer, so that a margin is more than a group."""
    monkeypatch.setattr(model_files, "FF", 1024)
    return prepared(tiny_llama(tmp_path / "wide.gguf"), ("F16", "F16"))


class Card:
    """A device whose steps take `working` bytes, and which runs out of memory where more than `room` neurons are on it,
    at the time `when`: "upload", "steps" or "prompts"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.path, self.working, self.room, self.when = path, WORKING, 1 << 40, ""
        self.rehearsals = self.failures = 0
        self._hot: dict[int, int] = {}
        place, settle = HybridFfn.place, crossing.measured

        def placed(ffn: HybridFfn, hot: Any) -> None:
            self._check("upload", {**self._hot, ffn.layer: len(hot)})
            place(ffn, hot)
            self._hot[ffn.layer] = len(hot)

        def rehearsed(executor: Any, _: int) -> int:
            self._check("steps", self._hot)
            self.rehearsals += 1
            return sum(executor.gpu.memory().values()) + self.working

        def settled(*given: Any) -> Any:
            self._check("prompts", self._hot)
            return settle(*given)

        monkeypatch.setattr(HybridFfn, "place", placed)
        monkeypatch.setattr(vram, "rehearsed", rehearsed)
        monkeypatch.setattr(crossing, "measured", settled)
        monkeypatch.setattr(vram, "_LACKING", 4 * GROUP * NEURON)
        monkeypatch.setattr(measure, "measured", lambda *_, **__: machine(RESERVED))

    def _check(self, when: str, hot: dict[int, int]) -> None:
        if when == self.when and sum(hot.values()) > self.room:
            self.failures += 1
            raise GpuMemoryError("the GPU ran out of memory while it was tried: give less --vram")

    def start(self, budget: int, **more: Any) -> list[list[int]]:
        """The neurons on the GPU after a start, which answers as every other."""
        self.rehearsals = self.failures = 0
        self._hot.clear()
        with load_within(self.path, None, budget, **more) as llm:
            assert llm.generate([[5, 9, 2]], SHORT)[0].token_ids == self.wanted
            return [ffn.hot.tolist() for ffn in llm._sparsity.ffns]  # type: ignore[union-attr]

    @property
    def wanted(self) -> list[int]:
        with LLM(self.path, **OPTIONS, gpu="none", trial=False) as llm:
            return list(llm.generate([[5, 9, 2]], SHORT)[0].token_ids)

    @property
    def saved(self) -> Path:
        return Path(f"{self.path}.powerinfer") / "trials.json"

    def entry(self, **changes: int) -> dict[str, Any]:
        """The saved entry, after changes of it."""
        document = json.loads(self.saved.read_text())
        (entry,) = (one["result"] for one in document["trials"] if one["subject"] == memory_trial.MEMORY.name)
        entry |= changes
        self.saved.write_text(json.dumps(document))
        return dict(entry)

    def budget(self, groups: float) -> int:
        """VRAM for that number of groups."""
        plan = request_of(self.path, None, groups)
        assert plan.vram is not None
        return RESERVED + plan.vram + WORKING


@pytest.fixture
def card(wide: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    """By the estimate steps take nothing."""
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: 0)
    return Card(monkeypatch, wide)


@pytest.mark.parametrize("estimate", [0, WORKING + WORKING // 4], ids=["neurons leave", "neurons come"])
def test_a_margin_stays_free(card: Card, estimate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take somewhat more at a later start do not make other neurons come or leave again."""
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: estimate)
    budget = card.budget(24) - estimate
    first = card.start(budget)
    assert card.rehearsals == 2 and 0 < sum(map(len, first)) < 24 * GROUP
    card.working += WORKING // vram.MARGIN
    assert WORKING // vram.MARGIN > 2 * GROUP * NEURON, "or rounding to groups would do"
    assert card.start(budget) == first and card.rehearsals == 1


def test_recordings_give_way_before_neurons(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that suffices, on every start."""
    lacking = 4 * GROUP * NEURON
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: WORKING - lacking)
    budget, recorded, gave = card.budget(24) - WORKING + lacking, 0, list[int]()

    def record_less(layers: GpuLayers, nbytes: int) -> int:
        gave.append(min(nbytes, recorded))
        return gave[-1]

    monkeypatch.setattr(GpuLayers, "record_less", record_less)
    fewer = sum(map(len, card.start(budget)))
    assert card.rehearsals == 2
    card.saved.unlink()
    recorded = 2 * lacking
    for _ in range(2):
        gave.clear()
        assert sum(map(len, card.start(budget))) > fewer + GROUP and card.rehearsals == 1
        assert 0 < sum(gave) < recorded


@pytest.mark.parametrize("estimate", [0, WORKING + WORKING // 4], ids=["neurons leave", "neurons come"])
def test_the_kernel_that_was_chosen_stays_when_neurons_move(
    card: Card, estimate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is timed once, where neurons stay; then the largest steps run again. Every layer has it, on every start."""
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: estimate)
    monkeypatch.setattr(fusion, "fuses", lambda _: True)
    timed: list[list[int]] = []

    def chosen(self: fusion.Fusion, _: Any) -> Any:
        timed.append([len(ffn.hot) for ffn in self._ffns])
        return fusion.Kernel(True, 2e-3, 1e-3)

    fused: list[bool] = []
    sums = GpuNeurons.add_sum
    monkeypatch.setattr(
        GpuNeurons, "add_sum", lambda part, *given, **how: (fused.append(how["fused"]), sums(part, *given, **how))[1]
    )
    monkeypatch.setattr(fusion.Fusion, "_timed", chosen)
    budget = card.budget(24) - estimate
    first = card.start(budget)
    assert timed == [list(map(len, first))] and card.rehearsals == 3, "as they are, moved, with the other kernel"
    assert fused and fused[-1]
    fused.clear()
    assert card.start(budget) == first and len(timed) == 1 and card.rehearsals == 1
    assert fused and all(fused)


@pytest.mark.parametrize("when", ["upload", "steps", "prompts"])
def test_a_device_that_runs_out_of_memory_at_any_time(card: Card, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neurons leave until it does not; later starts succeed at once, with somewhat less room, too."""
    monkeypatch.setattr(budget, "STAGED", 4)  # cold neurons, and buffers for them
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: WORKING + WORKING // vram.MARGIN)
    ample = card.budget(24) - WORKING
    every = sum(map(len, card.start(ample)))
    assert not card.failures and card.rehearsals == 1
    card.saved.unlink()
    card.when, card.room = when, every - 3 * GROUP
    hot = card.start(ample)
    assert card.failures == 1 and 0 < sum(map(len, hot)) <= card.room - 2 * GROUP, "four groups and a margin left"
    card.room -= 2 * GROUP
    assert card.start(ample) == hot and (card.failures, card.rehearsals) == (0, 1)


@pytest.mark.parametrize("layer", [0, 1])
def test_nothing_of_a_failed_upload_is_held_by_the_next(
    card: Card, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "STAGED", 4)
    monkeypatch.setattr(Model, "gpu_scratch", lambda *_: WORKING + WORKING // vram.MARGIN)
    ample = card.budget(24) - WORKING
    hot = list(map(len, card.start(ample)))
    card.saved.unlink()
    made: list[list[Any]] = []
    planned, made_part, made_stage = hybrid_load._planned_split, GpuNeurons.__init__, Stage.__init__

    def next_try(*given: Any) -> Any:
        gc.collect()
        assert not any(ref() is not None for tries in made for ref in tries), "two uploads at a time"
        made.append([])
        return planned(*given)

    def part(self: GpuNeurons, *given: Any) -> None:
        made_part(self, *given)
        made[-1].append(weakref.ref(self))

    def stage(self: Stage, *given: Any) -> None:
        made_stage(self, *given)
        made[-1] += map(weakref.ref, (*self._host, *self._on_device))

    monkeypatch.setattr(hybrid_load, "_planned_split", next_try)
    monkeypatch.setattr(GpuNeurons, "__init__", part)
    monkeypatch.setattr(Stage, "__init__", stage)
    card.when, card.room = "upload", sum(hot[: layer + 1]) - 3 * GROUP
    card.start(ample)
    assert len(made) == card.failures + 2 > 2 and len(made[0]) == 4 + layer, "the last one with a margin"


def test_saved_memory_that_is_wrong_is_replaced(card: Card) -> None:
    budget = card.budget(24)
    first, right = card.start(budget), card.entry()
    for working, measured in ((0, right["measured"]), (right["working"] + WORKING, 2 * right["measured"])):
        card.entry(working=working, measured=measured)
        again = card.start(budget)
        assert card.rehearsals == 2 and abs(sum(map(len, again)) - sum(map(len, first))) <= GROUP
        assert abs(card.entry()["working"] - right["working"]) <= 2 * GROUP * NEURON
        assert card.entry()["measured"] == right["measured"]
        assert card.start(budget) == again and card.rehearsals == 1


def test_saved_memory_stands_though_fewer_neurons_take_less(wide: Path, measured: list[int]) -> None:
    """Steps take more memory with more neurons: what was saved after neurons left is not taken for wrong."""
    with load_within(wide, None, 1 << 30) as llm:
        ffns = llm._sparsity.ffns  # type: ignore[union-attr]
        budget = RESERVED + measured[-1] + sum(sum(ffn.memory().values()) for ffn in ffns) - GROUP * NEURON // 2
    for calls in (2, 1, 1):
        measured.clear()
        with load_within(wide, None, budget):
            assert len(measured) == calls


def test_saved_memory_that_ram_has_no_room_for(card: Card) -> None:
    """It was saved with more --ram: the estimate is used instead."""
    budget = card.budget(24)
    first = card.start(budget)
    card.entry(working=card.entry()["working"] + 12 * GROUP * NEURON)
    plan = make_plan(replace(request_of(card.path, None, 24), vram=budget - RESERVED - WORKING))
    ram = sum(plan.bytes["cpu"].values()) + 8 * GROUP * plan.claims.cpu_neuron
    assert sum(map(len, card.start(budget, ram=ram))) >= sum(map(len, first))
