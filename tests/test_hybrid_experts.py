"""Experts on a GPU and on the CPU: wherever they are placed, the answer is that of the whole model.

The GPU is every device that there is (gpu_device.py); truth and bound are those of families.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
import gpu_device  # noqa: E402
import interpreted  # noqa: E402
import test_expert_neurons as neurons_inside  # noqa: E402
import test_predicted_experts as predicted_experts  # noqa: E402
import test_train_experts as train_experts  # noqa: E402
from families import case_named  # noqa: E402
from gpu_device import device_name, torch_device  # noqa: E402
from model_files import FF, LAYERS, D  # noqa: E402
from test_gpu_kernels import TRITON  # noqa: E402
from test_gpu_layers import DECODED, counting_recorder, engine_of, on_gpu, opened  # noqa: E402
from test_gpu_layers import static_where_emulated as static_attention  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig, ExpertsConfig, ModelConfig  # noqa: E402
from powerinfer.devices.choices import Choice  # noqa: E402
from powerinfer.devices.link import link_bytes  # noqa: E402
from powerinfer.devices.sharing import Sharing  # noqa: E402
from powerinfer.devices.stage import Stage, expert_buffer  # noqa: E402
from powerinfer.errors import ChangedError, PowerInferError, RequestError  # noqa: E402
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from powerinfer.formats.expert_files import open_expert_profile  # noqa: E402
from powerinfer.hardware import measure  # noqa: E402
from powerinfer.hybrid import context_note  # noqa: E402
from powerinfer.hybrid.copier import Copier, Pace  # noqa: E402
from powerinfer.hybrid.experts import ExpertSparsity, ExpertSplit, HybridExperts  # noqa: E402
from powerinfer.hybrid.load import load_resolved, load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Resolved, division_of, needs  # noqa: E402
from powerinfer.kernels import gpu, gpu_experts, gpu_latent  # noqa: E402
from powerinfer.kernels.cpu import PAGE  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.neurons import Indices  # noqa: E402
from powerinfer.placement import budget, context_cost  # noqa: E402
from powerinfer.placement.experts import Policy, make_policy  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model, skipping_model  # noqa: E402
from powerinfer.prepare.expert_profiling import profile_experts  # noqa: E402
from powerinfer.sparsity import expert_trial  # noqa: E402
from powerinfer.sparsity.selection import select  # noqa: E402

NAMES = (
    "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "glm4-moe", "gpt-oss", "smallthinker", "smallthinker-softmax",
    "qwen3-next", "qwen35-moe", "minimax-m2", "ernie-moe", "nemotron-h-experts", "granite-h-experts",
    "gemma4-experts", "llama4-chunks", "laguna", "phimoe", "cohere2-moe", "granite-moe-swa", "kimi-linear",
)  # fmt: skip
FILES = ("qwen2-moe", "gpt-oss", "smallthinker-4b", "qwen3-next-some", "qwen35-moe", "nemotron-h-latents")
LATENT = (
    ("deepseek-v2-lite", "folder"),
    ("deepseek-v2", "gguf"),
    ("deepseek-v3", "gguf-kv-b"),
    ("deepseek-v3-halves", "folder"),
    ("glm4-moe-lite", "folder"),
    ("kimi-k2", "gguf"),
)
EXTREMES = ("mixtral", "gpt-oss", "smallthinker", "deepseek-v3", "nemotron-h-experts")
"""Plain; with biases; selected before attention; of latents; without gates: all on one of the devices, too."""
TOTAL = families.TOKENS


def some(config: ModelConfig, share: float) -> list[Indices]:
    """Random experts of each layer, about that share of them."""
    rng = np.random.default_rng(round(100 * share))
    sizes = [one.ffn.n_experts if isinstance(one.ffn, ExpertsConfig) else 0 for one in config.layers]
    return [np.sort(rng.permutation(n)[: round(share * n)]).astype(np.int32) for n in sizes]


@contextmanager
def split(
    path: Path,
    share: float,
    layers: int | None = None,
    movable: bool = False,
    stage: Stage | None = None,
    **options: Any,
) -> Iterator[tuple[Any, list[HybridExperts]]]:
    config = open_checkpoint(path).config
    parts = ExpertSplit(some(config, share), movable, stage)
    every = config.n_layers
    with opened(path, on_gpu(layers or every, head=(layers or every) == every), parts, **options) as executor:
        yield executor, parts.ffns


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case_named(name), layout, id=f"{name}-{layout}")
        for name, layout in (*((one, "folder") for one in NAMES), *((one, "gguf") for one in FILES), *LATENT)
    ],
)
@pytest.mark.usefixtures("device")
def test_every_split_gives_the_answer_of_the_whole(case: families.Case, layout: str, tmp_path: Path) -> None:
    truth = Truth(case, layout, tmp_path)
    tokens = truth.texts[0]
    for share in (0.0, 0.4, 1.0) if case.name in EXTREMES else (0.4,):
        with split(truth.path, share) as (executor, ffns):
            pages = families.scattered_pages(executor, 4)
            truth.check(families.run_chunks(executor, tokens, [TOTAL], pages[0]), what=f"whole, {share}")
            truth.check(families.run_chunks(executor, tokens, [1, 7, 32, 2, TOTAL - 42], pages[1]), what="in chunks")
            decoded = [families.run_chunks(executor, tokens, DECODED, own) for own in pages[2:]]
            truth.check(decoded[0], what=f"token by token, {share}")
            np.testing.assert_array_equal(*decoded)  # the same bits
            for text, ours in enumerate(families.run_two(executor, *truth.texts[:2], pages[2:])):
                truth.check(ours, text, "in a batch")
            for ffn in ffns:
                assert (len(ffn.hot) + len(ffn.cold)) == ffn.config.n_experts
                assert (ffn.collect()["jobs"] > 0) == (share < 1) and (ffn.cold_bytes > 0) == (share < 1)


@pytest.mark.usefixtures("device")
def test_a_selection_is_sent_before_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the router reads the layer's input; the CPU, if the host waits for it, fetches weights until its own input
    is there."""
    truth, waits = Truth(case_named("smallthinker"), "gguf", tmp_path), []
    begun = ["router", "selection out", "mark selection", "attention", "project", "norm", "copy out", "mark"]
    for share in (0.5, 1.0):
        with split(truth.path, share) as (executor, _):
            kinds = [one.kind for one in executor.gpu.operators if one.layer == 1]
            ends = ["hot experts", "cold experts", "add"]
            assert kinds == (begun + ends if share < 1 else ["router", *begun[3:6], ends[0]])
    with split(truth.path, 0.5) as (executor, ffns):
        link = executor.gpu.link
        executor.gpu.record(executor.gpu._recorder, "waits")

        def arrived() -> bool:
            waits.append(len(waits))
            return len(waits) % 3 == 0

        monkeypatch.setattr(link, "arrived", arrived)
        pages = families.scattered_pages(executor, 1)[0]
        truth.check(families.run_chunks(executor, truth.texts[0], DECODED, pages))
        assert len(waits) >= len(DECODED) * len(ffns)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.usefixtures("device")
def test_layers_that_do_not_fit_run_on_the_cpu_as_a_whole(layers: int, tmp_path: Path) -> None:
    truth = Truth(case_named("qwen2-moe"), "gguf", tmp_path)
    with split(truth.path, 0.5, layers) as (executor, ffns):
        assert len(ffns) <= layers
        pages = families.scattered_pages(executor, 1)[0]
        truth.check(families.run_chunks(executor, truth.texts[0], [9, 1, TOTAL - 10], pages))


@pytest.mark.skipif(not TRITON or gpu_device.CUDA, reason="Triton's interpreter is not at hand")
@pytest.mark.parametrize("name", ["gpt-oss", "smallthinker", "kimi-k2"])  # biases, an early router, latents and shares
@pytest.mark.usefixtures("device")
def test_the_kernels_of_a_gpu(name: str, tmp_path: Path) -> None:
    layers = {"rope_layout": [0, 1], "sliding_window_layout": [0, 1]} if name == "smallthinker" else {}
    truth = Truth(case_named(name), "folder", tmp_path, num_hidden_layers=2, **layers)
    gpu.force_triton(True)
    try:
        with split(truth.path, 0.5) as (executor, _):
            pages = families.scattered_pages(executor, 1)[0]
            chunks = [33, 3, 1] if name == "gpt-oss" else [9, 1]  # prompts are multiplied in one way
            ours = families.run_chunks(executor, truth.texts[0][: sum(chunks)], chunks, pages)
    finally:
        gpu.force_triton(None)
    assert families.rms(ours - truth.logits[0][: sum(chunks)]) <= truth.allowed(2)


@pytest.mark.skipif(not TRITON or gpu_device.CUDA, reason="Triton's interpreter is not at hand")
@pytest.mark.usefixtures("device")
def test_a_token_takes_eight_kernels_a_layer(tmp_path: Path) -> None:
    """Of quantised experts, all on the GPU, and a context of up to a thousand tokens; then norm and head."""
    path = neurons_inside.model(tmp_path, "Q4_0", "silu")
    gpu.force_triton(True)
    try:
        with split(path, 1.0) as (executor, ffns), interpreted.launches() as names:
            pages = families.scattered_pages(executor, 1)[0]
            families.run_chunks(executor, np.arange(2, dtype=np.int32), [1, 1], pages)
    finally:
        gpu.force_triton(None)
    attention = ["_norm_kernel", "_linear_kernel", "_attention_kernel", "_linear_kernel"]
    layer = [*attention, "_norm_kernel", "_router_kernel", "_hidden_kernel", "_down_kernel"]
    assert names == 2 * (len(ffns) * layer + ["_norm_kernel", "_linear_kernel"])


def static_where_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that can be recorded, which those of plain torch cannot."""
    static_attention(monkeypatch)
    if device_name() == "cpu":
        monkeypatch.setattr(gpu_experts, "expert_sum", static_sum)
        monkeypatch.setattr(gpu_latent, "attention", static_latents)


def static_sum(
    experts: Any, x: Any, slots: Any, weights: Any, table: Any, into: Any = None, hidden: Any = None
) -> Any:
    """`gpu_experts.expert_sum` by operators that do not depend on data: every expert for every token."""
    every, slots = torch.zeros_like(x), slots if table is None else table[slots.long()]
    for slot in range(experts.slots):
        own = (weights * (slots == slot)).sum(dim=1)
        every = every + gpu_experts._expert(experts, slot, x, own, hidden)
    return every if into is None else into.add_(every)


@pytest.mark.parametrize("name", ["mixtral", "smallthinker"])
@pytest.mark.usefixtures("device")
def test_recorded_launches_are_replayed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is the same for every step of a shape, whatever experts are selected, and after a swap."""
    truth, made = Truth(case_named(name), "gguf", tmp_path), []
    static_where_emulated(monkeypatch)
    with split(truth.path, 0.5, movable=True) as (executor, ffns):
        executor.gpu.record(counting_recorder(made))
        pages = families.scattered_pages(executor, 2)
        truth.check(families.run_chunks(executor, truth.texts[0], DECODED, pages[0]))
        assert made and min(made) > 0
        for ffn in ffns:
            ffn.swap(ffn.hot[:1], ffn.cold[:1])
        truth.check(families.run_chunks(executor, truth.texts[0], DECODED, pages[1]), what="after a swap")


@pytest.mark.parametrize(("name", "each"), [("mixtral", 1), ("smallthinker", 2), ("qwen35-moe", 1)])
@pytest.mark.usefixtures("device")
def test_the_gpu_calls_the_cpu(name: str, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replay a step, with a call for a layer's cold experts, or two; the bits and the counts are those of a host
    that waits for the GPU."""
    truth, told = Truth(case_named(name), "gguf", tmp_path), []
    static_where_emulated(monkeypatch)
    for calls in (True, False):
        made: list[int] = []
        with split(truth.path, 0.4) as (executor, ffns):
            executor.gpu.record(counting_recorder(made), "flags" if calls else "waits")
            before = executor.gpu.link.calls.made
            pages = families.scattered_pages(executor, 3)
            found = [families.run_chunks(executor, truth.texts[0][:15], [1] * 8 + [2] * 3 + [1], pages[0])]
            assert executor.gpu.link.calls.made - before == 12 * each * len(ffns) * calls
            assert (made == [7, 2]) == calls, made  # the first step of two tokens makes room, and all is recorded anew
            assert (len(made) > 2 * len(ffns)) == (not calls), made
            found += families.run_two(executor, *truth.texts[:2], pages[1:])
            told.append((*found, ExpertSparsity(executor, ffns).report(), [ffn.recent for ffn in ffns]))
    for called, waited in zip(*told, strict=True):
        np.testing.assert_equal(called, waited)


def static_latents(q: Any, turned: Any, cache: Any, contexts: Any, settings: Any) -> Any:
    """`gpu_latent.attention` that launches the same for all data, as Triton's does."""
    table, rows, positions, scale = contexts.pages, contexts.rows, contexts.positions, settings.scale
    keys = cache.values(table.clamp(min=0).long()[rows.long()].flatten())[:, :, 0].unflatten(0, (len(rows), -1))
    keys, latents = keys.flatten(1, 2), q.shape[2]
    scores = torch.einsum("htd,tsd->ths", q, keys[..., :latents])
    scores = (scores + torch.einsum("thn,tsn->ths", turned, keys[..., latents:])) * scale
    hidden = torch.arange(keys.shape[1]) > positions.long()[:, None]
    weights = scores.masked_fill(hidden[:, None, :], -torch.inf).softmax(dim=-1)
    return torch.einsum("ths,tsd->htd", weights, keys[..., :latents]).contiguous()


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "kimi-k2"])
@pytest.mark.usefixtures("device")
def test_recorded_launches_over_latents(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed for other pages of another sequence, in other places of a page table, and for two together."""
    truth, made = Truth(case_named(name), "gguf", tmp_path), []
    static_where_emulated(monkeypatch)
    with split(truth.path, 0.5) as (executor, _):
        executor.gpu.record(counting_recorder(made))
        pages = families.scattered_pages(executor, 4)
        for own in pages[:2]:
            truth.check(families.run_chunks(executor, truth.texts[0], [2] * 3 + [55] + [1] * (TOTAL - 61), own))
        recorded = len(made)
        for text, both in enumerate(families.run_two(executor, *truth.texts[:2], pages[2:])):
            truth.check(both, text, "in a batch")
        truth.check(families.run_chunks(executor, truth.texts[1], DECODED, pages[3]), 1)
        assert recorded and min(made) > 0


@pytest.mark.parametrize(("kv_type", "nbytes"), [("f16", 160), ("q8_0", 86)])
@pytest.mark.usefixtures("device")
def test_a_narrow_cache_of_latents(kv_type: str, nbytes: int, tmp_path: Path) -> None:
    """Keys are rounded as the CPU rounds them, but for values so near the middle between two codes that float32 decides
    (as for other caches: test_gpu_layers.py); nbytes: of a key's 64 + 16 numbers."""
    truth = Truth(case_named("kimi-k2"), "folder", tmp_path)
    answers = []
    cpu = load(open_checkpoint(truth.path), engine_of(kv_type=kv_type))
    with split(truth.path, 0.5, kv_type=kv_type) as (executor, _):
        for one in (cpu, executor):
            pages = families.scattered_pages(one, 1)[0]
            # more tokens at a time meet a narrow cache in its own type on a GPU, which rounds the queries, too
            chunks = [7] * 10 + [1] * (TOTAL - 70)
            answers.append(families.run_chunks(one, truth.texts[0], chunks, pages))
        assert executor.gpu.memory()["kv"] == executor.gpu.layers * executor.n_pages * 32 * nbytes
    cpu.close()
    error = families.rms(answers[0] - truth.logits[0])
    assert truth.allowed(2) < families.rms(answers[1] - truth.logits[0]) <= 1.5 * error
    # in the median: a token with two experts that are nearly equal may select the other
    apart = np.median([families.rms(one - other) for one, other in zip(*answers, strict=True)])
    assert apart <= (12 * 0.01) ** 0.5 * error


@pytest.mark.usefixtures("device")
def test_swapped_experts_give_the_same_answer(tmp_path: Path) -> None:
    truth = Truth(case_named("qwen3-moe"), "gguf", tmp_path)
    with split(truth.path, 0.5, movable=True) as (executor, ffns):
        pages = families.scattered_pages(executor, 1)[0]
        before = [(ffn.hot.copy(), ffn.cold.copy(), ffn.cold_bytes, ffn.memory()) for ffn in ffns]
        for ffn, (hot, cold, nbytes, memory) in zip(ffns, before, strict=True):
            leave, come = hot[[0, 2]], cold[[1, 2]]
            ffn.swap(leave, come)
            assert set(ffn.hot) == (set(hot) - set(leave)) | set(come)
            assert set(ffn.cold) == (set(cold) - set(come)) | set(leave)
            assert (ffn.cold_bytes, ffn.memory()) == (nbytes, memory)
        truth.check(families.run_chunks(executor, truth.texts[0], DECODED, pages))


@pytest.mark.usefixtures("device")
def test_what_split_layers_did_and_what_is_adjusted(tmp_path: Path) -> None:
    truth = Truth(case_named("mixtral"), "gguf", tmp_path)
    with split(truth.path, 0.5, movable=True) as (executor, ffns):
        sparsity = ExpertSparsity(executor, ffns)
        assert sparsity.report()["gpu_share"] is None and not sparsity.adjust()
        pages = families.scattered_pages(executor, 1)[0]
        families.run_chunks(executor, truth.texts[0], DECODED, pages)
        report = sparsity.report()
        assert report["tokens"] == TOTAL and 0 < report["gpu_share"] < 1 and 0 < report["jobs"] <= 1
        ffn = ffns[0]
        assert ffn.collect()["hot"] + ffn.collect()["cold"] == TOTAL * ffn.top_k
        ffn.recent[:], ffn.recent_tokens = 0, 300
        ffn.recent[ffn.cold[1]] = 600  # clearly hotter than any that is on the GPU
        wanted = int(ffn.cold[1])
        assert sparsity.adjust() and wanted in ffn.hot and sparsity.report()["traded"] == 1
        truth.check(families.run_chunks(executor, truth.texts[0], [TOTAL], pages))
        sparsity.clear()
        assert not sparsity.adjust() and sparsity.report()["tokens"] == 0


@pytest.mark.usefixtures("device")
def test_quantised_experts_keep_their_types(tmp_path: Path) -> None:
    """Answers of splits lie between those of the devices, which round activations in different ways."""
    truth = Truth(case_named("mixtral"), "folder", tmp_path)
    answers = []
    for share in (0.0, 0.5, 1.0):
        with split(truth.path, share, quantize="q8_0") as (executor, ffns):
            pages = families.scattered_pages(executor, 1)[0]
            answers.append(families.run_chunks(executor, truth.texts[0], [TOTAL], pages))
            assert share == 0 or ffns[0].memory()["ffn"] > 0
    apart = families.rms(answers[0] - answers[2])
    assert 0 < apart < 0.1 * families.rms(answers[0])
    assert all(families.rms(answers[1] - other) < 2 * apart for other in (answers[0], answers[2]))


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "smallthinker", "nemotron-h-latents"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.usefixtures("device")
def test_a_prompt_streams_cold_experts(name: str, count: int, tmp_path: Path) -> None:
    """Through buffers of one expert, and of two; the answer is the same, and the CPU has nothing to do."""
    truth = Truth(case_named(name), "gguf", tmp_path)
    about = next(one.ffn for one in open_checkpoint(truth.path).config.layers if isinstance(one.ffn, ExpertsConfig))
    each = [4 * about.size * truth.config.hidden_size] * len(about.matrices)
    stage = Stage(torch_device(), expert_buffer(each, 2 * count))
    assert stage.experts_at_once(each, about.n_experts) == count
    with split(truth.path, 0.25, stage=stage) as (executor, ffns):
        pages = families.scattered_pages(executor, 2)
        assert ffns and all(ffn.stage is stage for ffn in ffns)
        jobs = 0
        for least in (None, 33):
            stage.least = least
            truth.check(families.run_chunks(executor, truth.texts[0], [TOTAL - 3, 1, 2], pages[0]), what=f"{least}")
            jobs, before = sum(ffn.collect()["jobs"] for ffn in ffns), jobs
            assert jobs - before == (3 if least is None else 2) * len(ffns)
        again = [families.run_chunks(executor, truth.texts[0], [TOTAL], page) for page in pages]
        np.testing.assert_array_equal(*again)


@pytest.mark.parametrize("name", ["mixtral", "smallthinker", "nemotron-h-latents"])
@pytest.mark.usefixtures("device")
def test_the_cpu_takes_the_rarest_experts_of_what_streams(name: str, tmp_path: Path) -> None:
    """The answer is the same within its rounding, and has the same bits again; a short step is not shared."""
    truth = Truth(case_named(name), "gguf", tmp_path)
    about = next(one.ffn for one in open_checkpoint(truth.path).config.layers if isinstance(one.ffn, ExpertsConfig))
    each = [4 * about.size * truth.config.hidden_size] * len(about.matrices)
    stage = Stage(torch_device(), expert_buffer(each, 2))
    with split(truth.path, 0.0, stage=stage) as (executor, ffns):
        stage.least, pages, answers = 33, families.scattered_pages(executor, 3), []
        sparsity = ExpertSparsity(executor, ffns)
        for sharing, page in zip((None, *[Sharing(34, 1 << 20, 1.0, 0.3, 0.01)] * 2), pages, strict=True):
            stage.sharing = sharing
            sparsity.clear()
            answers.append(families.run_chunks(executor, truth.texts[0], [TOTAL - 36, 33, 1, 2], page))
            truth.check(answers[-1], what=f"{sharing}")
            beside = sparsity.report()["beside"]
            assert beside is None if sharing is None else 0 < beside < 0.8
        np.testing.assert_array_equal(answers[1], answers[2])
        assert (answers[0] != answers[1]).any(), "the CPU rounds otherwise"


def test_what_is_no_view_of_the_file_is_neither_streamed_nor_swapped(tmp_path: Path) -> None:
    truth = Truth(case_named("mixtral"), "folder", tmp_path)
    stage = Stage(torch_device(), 1 << 20)
    with split(truth.path, 0.5, stage=stage) as (_, ffns):
        assert all(ffn.stage is None for ffn in ffns)
    with (
        pytest.raises(RequestError, match="--adjust needs experts as a GGUF file has them"),
        split(truth.path, 0.5, movable=True),
    ):
        pass


@pytest.mark.parametrize("name", ["qwen3-moe", "smallthinker-4b", "qwen35-moe"])
@pytest.mark.usefixtures("described")
def test_the_crossing_of_experts_is_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the second load finds it."""
    monkeypatch.setattr(budget, "EXPERT_STAGED", 1)  # half a layer is much of so small a model
    truth = Truth(case_named(name), "gguf", tmp_path)
    engine = engine_of(gpu="cpu", kv_type="f16")
    every = needs(resolve(open_checkpoint(truth.path), engine)).vram
    room = replace(engine, vram=every - 2000)  # a few experts do not fit
    for how in ("measured in", "measured earlier"):
        resolved = resolve(open_checkpoint(truth.path), room)
        assert resolved.placement.staging > 0 and resolved.placement.experts is not None
        executor, _ = load_resolved(resolved, lambda: list(range(40)))
        try:
            assert how in str(executor.choices.prefill) and "by tokens" in str(executor.choices.prefill)
            logits = families.run_chunks(executor, truth.texts[0], [TOTAL], families.scattered_pages(executor, 1)[0])
            assert families.rms(logits - truth.logits[0]) < 0.05 * families.rms(truth.logits[0])  # the cache is of F16
        finally:
            executor.close()


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3"])
@pytest.mark.usefixtures("described")
def test_a_load_says_what_its_context_costs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has asked for it, and its cache takes the place of experts, or of layers."""
    monkeypatch.setattr(context_cost, "CONTEXT", PAGE)
    monkeypatch.setattr(context_note, "MUCH", 0.0)
    path, engine = Truth(case_named(name), "gguf", tmp_path).path, engine_of(gpu="cpu", context=0)
    longest = open_checkpoint(path).config.context_length
    assert longest > PAGE
    every = needs(resolve(open_checkpoint(path), replace(engine, context=PAGE))).vram

    def said(context: int, vram: int) -> list[str]:
        return context_note.context_note(resolve(open_checkpoint(path), replace(engine, context=context, vram=vram)))

    (line,) = said(0, every)
    assert f"longest, {longest} tokens, as -c does not say: with -c {PAGE} the GPU would hold " in line
    assert ("tokens/s, not" in line) == (name == "qwen3-moe")
    assert said(longest, every) == said(PAGE, every) == said(0, 2 << 30) == []


@pytest.mark.usefixtures("described")
def test_a_load_of_smallthinker_holds_what_is_planned(tmp_path: Path) -> None:
    truth = Truth(case_named("smallthinker"), "gguf", tmp_path)
    engine, checkpoint = engine_of(gpu="cpu", kv_type="f16"), open_checkpoint(truth.path)
    model = checkpoint_model(checkpoint)
    every = needs(resolve(checkpoint, engine))
    room = replace(engine, vram=every.vram - 11 * model.expert_bytes(0)[0])
    resolved = resolve(checkpoint, room)
    assert resolved.placement.experts is not None
    slots = [len(own) for own in resolved.placement.experts]  # of which layers depends on the machine
    assert sum(slots) == sum(model.n_experts) - 11
    assert needs(resolved).ram == every.ram + 11 * model.expert_bytes(0)[1]
    executor, sparsity = load_resolved(resolved, list)
    try:
        assert isinstance(sparsity, ExpertSparsity) and executor.gpu.has_head
        held, of_experts = executor.gpu.memory(), sum(ffn.memory()["ffn"] for ffn in sparsity.ffns)
        hardware = measure.measured(engine, gpu="cpu")
        work = budget.Workload("f16", families.CONTEXT, TOTAL, 4)
        planned = budget.on_gpu(model, hardware, work, budget.Division(5, True, tuple(slots)), True)
        tables = 5 * 4 * (6 + 1)  # where each of the experts is, and a counter, int32
        assert held["ffn"] + of_experts == planned["ffn"] + planned["experts"] + tables
        assert [held[part] for part in ("attention", "head", "kv")] == [
            planned[part] for part in ("attention", "head", "kv")
        ]
        assert executor.gpu.link.nbytes == link_bytes(TOTAL, model.config)
        assert sum(ffn.cold_bytes for ffn in sparsity.ffns) == 11 * model.expert_bytes(0)[1]
        ours = families.run_chunks(executor, truth.texts[0], DECODED, families.scattered_pages(executor, 1)[0])
        assert families.rms(ours - truth.logits[0]) < 0.05 * families.rms(truth.logits[0])  # the cache is of F16
        assert 0 < sparsity.report()["gpu_share"] < 1
    finally:
        executor.close()


@pytest.mark.parametrize("name", ["qwen3-next", "qwen35-moe"])
@pytest.mark.usefixtures("described")
def test_a_load_with_states_holds_what_is_planned(name: str, tmp_path: Path) -> None:
    """States in the slots of four requests and four prefixes, one for what is scored."""
    truth = Truth(case_named(name), "gguf", tmp_path)
    engine, checkpoint = engine_of(gpu="cpu", kv_type="f16"), open_checkpoint(truth.path)
    model = checkpoint_model(checkpoint)
    each = model.expert_bytes(0)[0]
    resolved = resolve(checkpoint, replace(engine, vram=needs(resolve(checkpoint, engine)).vram - 5 * each))
    assert resolved.placement.experts is not None and resolved.placement.layers == model.config.n_layers
    slots = [len(own) for own in resolved.placement.experts]
    assert sum(slots) == sum(model.n_experts) - 5
    executor, sparsity = load_resolved(resolved, list)
    try:
        assert isinstance(sparsity, ExpertSparsity) and executor.n_states == 9
        held, of_experts = executor.gpu.memory(), sum(ffn.memory()["ffn"] for ffn in sparsity.ffns)
        work = budget.Workload("f16", families.CONTEXT, TOTAL, 4)
        planned = budget.on_gpu(
            model, measure.measured(engine, gpu="cpu"), work, budget.Division(len(slots), True, tuple(slots)), True
        )
        states = model.gpu_state_bytes(4)
        assert planned["kv"] == states + model.gpu_kv_bytes("f16", families.CONTEXT, 1) and states > 0
        assert [held[part] for part in ("attention", "head", "kv")] == [
            planned[part] for part in ("attention", "head", "kv")
        ]
        tables = 4 * (sum(model.n_experts) + len(model.n_experts))  # where each of the experts is, and a counter, int32
        rest = planned["norms"] + planned["ffn"] + planned["experts"]
        assert held["norms"] + held["ffn"] + of_experts == rest + tables
        ours = families.run_chunks(executor, truth.texts[0], DECODED, families.scattered_pages(executor, 1)[0])
        assert families.rms(ours - truth.logits[0]) < 0.05 * families.rms(truth.logits[0])  # the cache is of F16
    finally:
        executor.close()


@contextmanager
def by_neuron(
    source: Path | Checkpoint,
    share: float,
    movable: bool = False,
    stage: Stage | None = None,
    copier: Copier | None = None,
    selector: str = "exact",
    inside: Mapping[int, Indices] | None = None,
) -> Iterator[tuple[Any, list[HybridExperts]]]:
    """Split experts of which only the neurons that fire, or that a predictor selects, are computed."""
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    engine = engine_of(selector=selector, recall_every=1)
    parts = ExpertSplit(some(checkpoint.config, share), movable, stage, copier, inside=inside or {})
    placed = on_gpu(checkpoint.config.n_layers, head=True)
    resolved = Resolved(checkpoint, engine, select(checkpoint, engine), **placed)
    executor = load_split(resolved, parts)
    try:
        yield executor, parts.ffns
    finally:
        executor.close()


def logits_of(executor: Any, chunks: list[int]) -> np.ndarray:
    """Of random tokens, in chunks."""
    tokens = np.random.default_rng(3).integers(0, executor.vocab_size, sum(chunks)).astype(np.int32)
    return families.run_chunks(executor, tokens, chunks, np.arange(executor.n_pages, dtype=np.int32))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0"])
@pytest.mark.parametrize("activation", ["relu", "drelu"])
@pytest.mark.usefixtures("device")
def test_neurons_inside_split_experts(kind: str, activation: str, tmp_path: Path) -> None:
    """Those that fire give the answer of all, wherever experts are; prompts have whole experts."""
    path, chunks = neurons_inside.model(tmp_path, kind, activation), [40, 1, 1, 5, 1, 32, 1]
    with split(path, 0.5) as (executor, _):
        whole = logits_of(executor, chunks)
    for share in (0.0, 0.5, 1.0):
        with by_neuron(path, share) as (executor, ffns):
            found = logits_of(executor, chunks)
            assert neurons_inside.far(found, whole) <= {"F16": 1e-3, "BF16": 0.02, "Q4_0": 0.05}[kind]
            np.testing.assert_array_equal(logits_of(executor, chunks), found)
            report = ExpertSparsity(executor, ffns).report()
            assert (report["active_fraction"] is None) == (share == 1)
            if share < 1:
                assert 0.1 < report["active_fraction"] < 0.7
            with ExpertSparsity(executor, ffns).suspended():
                before = [ffn.collect()["active"] for ffn in ffns]
                assert neurons_inside.far(logits_of(executor, chunks), whole) <= 0.05
                assert [ffn.collect()["active"] for ffn in ffns] == before, "every neuron was computed"
            assert ExpertSparsity(executor, ffns).report()["active_fraction"] == report["active_fraction"]


@pytest.mark.parametrize(("kind", "latents"), [("BF16", 0), ("Q5_0", 0), ("MXFP4", 0), ("Q5_0", 32)])
@pytest.mark.usefixtures("device")
def test_neurons_of_experts_without_gates(kind: str, latents: int, tmp_path: Path) -> None:
    """Beside a shared one, whose neurons the GPU computes; Q5_0 becomes Q8_0 there, and MXFP4 is computed whole. Where
    experts read latents the CPU gets these."""
    path, chunks = neurons_inside.plain_model(tmp_path, kind, latents=latents), [40, 1, 1, 5, 1, 32, 1]
    with split(path, 0.5) as (executor, _):
        whole = logits_of(executor, chunks)
    for share in (0.0, 0.5, 1.0):
        with by_neuron(path, share) as (executor, ffns):
            found = logits_of(executor, chunks)
            assert neurons_inside.far(found, whole) <= {"BF16": 0.02}.get(kind, 0.03)
            np.testing.assert_array_equal(logits_of(executor, chunks), found)
            parts = [ffn._gpu_part for ffn in ffns if share]
            assert all(part is not None and part.by_neuron == (kind != "MXFP4") for part in parts)
            active = ExpertSparsity(executor, ffns).report()["active_fraction"]
            assert (active is None) if share == 1 else 0.3 < active < 0.7


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_experts_with_gates_beside_a_shared_one(kind: str, tmp_path: Path) -> None:
    """The GPU computes all gates of that one, whatever selects neurons of the others, and of F32 all of it."""
    path, chunks = neurons_inside.model(tmp_path), [40, 1, 1, 5, 1, 32, 1]
    predicted_experts.give_predictors(path, threshold=-1e5, checkpoint=neurons_inside.with_shared(path, kind))
    alone = load(neurons_inside.with_shared(path, kind), engine_of())
    whole = logits_of(alone, chunks)
    alone.close()
    for share, selector in ((0.0, "exact"), (0.5, "exact"), (0.5, "predicted"), (1.0, "exact")):
        with by_neuron(neurons_inside.with_shared(path, kind), share, selector=selector) as (executor, ffns):
            assert all((ffn._shared_part is None) == (kind == "F32") for ffn in ffns)
            assert neurons_inside.far(logits_of(executor, chunks), whole) <= 1e-3
            assert share == 1 or 0.1 < ExpertSparsity(executor, ffns).report()["active_fraction"] < 0.7


KINDS = [("gates", "F16"), ("plain", "Q5_0"), ("latents", "F16")]
"""Experts among whose neurons a predictor selects."""


def with_predictors(folder: Path, experts: str, kind: str, threshold: float = 0.0) -> Path:
    """A model with experts of one of `KINDS`, and predictors beside it."""
    if experts == "gates":
        return predicted_experts.give_predictors(neurons_inside.model(folder, kind), threshold)
    made = neurons_inside.plain_model(folder, kind, latents=32 if experts == "latents" else 0)
    return predicted_experts.give_plain_predictors(made, threshold)


@pytest.mark.parametrize(("experts", "kind"), KINDS)
@pytest.mark.usefixtures("device")
def test_predictors_select_inside_split_experts(experts: str, kind: str, tmp_path: Path) -> None:
    """They get the layer's input before its norm; where the CPU gets latents in its place, what the GPU made of it for
    them. Where all are candidates the answer is that of all neurons, and else the same wherever experts are."""
    chunks, allowed = [40, 1, 1, 5, 1, 32, 1], 1e-3 if kind == "F16" else 0.03
    path = with_predictors(tmp_path, experts, kind, threshold=-1e5)
    with split(path, 0.5) as (executor, _):
        whole = logits_of(executor, chunks)
    for share in (0.0, 0.5):
        with by_neuron(path, share, selector="predicted") as (executor, ffns):
            assert neurons_inside.far(logits_of(executor, chunks), whole) <= 0.03
            report = ExpertSparsity(executor, ffns).report()
            assert report["recall"] == report["candidate_fraction"] == 1 and 0.1 < report["active_fraction"] < 0.7
    with_predictors(tmp_path, experts, kind)
    found = []
    for share in (0.0, 0.5, 1.0):
        with by_neuron(path, share, selector="predicted") as (executor, ffns):
            found.append(logits_of(executor, chunks))
            report = ExpertSparsity(executor, ffns).report()
            if share < 1:
                assert 0.3 < report["recall"] < 0.7 and 0.3 < report["candidate_fraction"] < 0.7
            with ExpertSparsity(executor, ffns).suspended():
                assert neurons_inside.far(logits_of(executor, chunks), whole) <= 0.03
        assert neurons_inside.far(found[-1], whole) > 0.01, "half of the neurons are missing"
        assert neurons_inside.far(found[-1], found[0]) <= allowed
    alone = predicted_experts.opened(path)
    assert neurons_inside.far(found[0], logits_of(alone, chunks)) <= allowed
    alone.close()
    with (
        pytest.raises(RequestError, match="among whose neurons a predictor selects"),
        by_neuron(path, 0.5, movable=True, selector="predicted"),
    ):
        pass
    with by_neuron(path, 0.5, copier=Copier(policy_of(path, "lru")), selector="predicted") as (executor, ffns):
        assert neurons_inside.far(logits_of(executor, chunks), found[0]) <= allowed
        assert all(ffn.collect()["copied"] for ffn in ffns)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.usefixtures("device")
def test_neurons_inside_experts_that_move(gates: bool, tmp_path: Path) -> None:
    """Swapped, exchanged from step to step, and streamed."""
    made = neurons_inside.model(tmp_path, "Q4_0") if gates else neurons_inside.plain_model(tmp_path, "Q4_0")
    path, chunks = made, [60, *[1] * 10]
    with by_neuron(path, 0.5, movable=True) as (executor, ffns):
        whole = logits_of(executor, chunks)
        for ffn in ffns:
            memory, cold = ffn.memory(), ffn.cold_bytes
            ffn.swap(ffn.hot[:1], ffn.cold[1:])
            assert (ffn.memory(), ffn.cold_bytes) == (memory, cold)
        assert neurons_inside.far(logits_of(executor, chunks), whole) <= 0.05
    with by_neuron(path, 0.5, copier=Copier(policy_of(path, "lru"))) as (executor, ffns):
        assert neurons_inside.far(logits_of(executor, chunks), whole) <= 0.05
        assert all(ffn.collect()["copied"] for ffn in ffns)
    about = next(iter(open_checkpoint(path).config.experts.values()))
    each = [about.size * D * 18 // 32] * len(about.matrices)
    stage = Stage(torch_device(), expert_buffer(each, 2))
    with by_neuron(path, 0.5, stage=stage) as (executor, ffns):
        stage.least = 33
        assert neurons_inside.far(logits_of(executor, chunks), whole) <= 0.05
        assert all(ffn.collect()["steps"] == 10 for ffn in ffns)


@pytest.mark.skipif(not TRITON or gpu_device.CUDA, reason="Triton's interpreter is not at hand")
@pytest.mark.sampled
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("experts", "selector"),
    [("gates", "exact"), ("plain", "exact"), ("plain", "predicted"), ("latents", "predicted")],
)
def test_neurons_inside_experts_with_the_kernels_of_a_gpu(experts: str, selector: str, tmp_path: Path) -> None:
    gates = experts == "gates"
    path, chunks = with_predictors(tmp_path, experts, "Q4_0" if gates else "Q5_0"), [33, 3, 1] if gates else [3, 1]
    with by_neuron(path, 0.5, selector=selector) as (executor, _):
        expected = logits_of(executor, chunks)
    gpu.force_triton(True)
    try:
        with by_neuron(path, 0.5, selector=selector) as (executor, _):
            assert neurons_inside.far(logits_of(executor, chunks), expected) <= 1e-3
    finally:
        gpu.force_triton(None)


@pytest.mark.usefixtures("described")
def test_a_plan_counts_experts_by_neuron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = neurons_inside.model(tmp_path, "Q4_0")
    engine, checkpoint = engine_of(gpu="cpu", kv_type="f16", selector="exact"), open_checkpoint(path)
    each, by = checkpoint_model(checkpoint).expert_bytes(0), checkpoint_model(checkpoint).by_neuron().expert_bytes(0)
    assert by[0] == each[0] and by[1] > each[1], "rows as short as these are mostly padding"
    every = needs(resolve(checkpoint, engine))
    resolved = resolve(open_checkpoint(path), replace(engine, vram=every.vram - 3 * each[0]))
    assert resolved.placement.experts is not None and sum(map(len, resolved.placement.experts)) == 4 * LAYERS - 3
    assert needs(resolved).ram == every.ram + 3 * by[1] + 2 * resolved.placement.staging
    executor, sparsity = load_resolved(resolved, list)
    try:
        assert isinstance(sparsity, ExpertSparsity) and "exact (neurons inside" in str(executor.choices.selector)
        assert sum(ffn.cold_bytes for ffn in sparsity.ffns) == 3 * by[1]
        held = executor.gpu.memory()["ffn"] + sum(ffn.memory()["ffn"] for ffn in sparsity.ffns)
        work, slots = budget.Workload("f16", families.CONTEXT, TOTAL, 4), map(len, resolved.placement.experts)
        hardware = measure.measured(engine, gpu="cpu")
        division = budget.Division(LAYERS, True, tuple(slots))
        planned = budget.on_gpu(checkpoint_model(checkpoint), hardware, work, division, dense=True)
        assert held == planned["ffn"] + planned["experts"] + LAYERS * (4 + 1) * 4
    finally:
        executor.close()
    flags = ["--gpu", "none", "--threads", "2", "--context", "64", "--json"]
    held = []
    for selector in ("all", "exact"):
        assert main(["plan", "-m", str(path), "--selector", selector, *flags]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        held.append(document["bytes"]["cpu"]["panels"])
        assert any("of the neurons of experts fire" in one for one in document["assumed"]) == (selector == "exact")
    assert held[1] - held[0] == LAYERS * 4 * (by[1] - each[1])


@pytest.mark.parametrize(("experts", "kind"), KINDS)
@pytest.mark.usefixtures("device")
def test_recordings_keep_what_a_predictor_has_made(experts: str, kind: str, tmp_path: Path) -> None:
    """Host operators lie between a predictor and the experts that it selects for, and part the recordings there."""
    path = with_predictors(tmp_path, experts, kind)
    with by_neuron(path, 0.5, selector="predicted") as (executor, _):
        eager = logits_of(executor, [1] * 6)
        executor.gpu.record(lambda run, state: run, "waits")
        np.testing.assert_array_equal(logits_of(executor, [1] * 6), eager)


@pytest.mark.parametrize("experts", ["gates", "plain", "latents"])
@pytest.mark.usefixtures("described")
def test_a_plan_counts_predictors_inside_experts(
    experts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the device that has an expert lie its rows; what all share of a predictor is on both, and is read by each, but
    of latents the GPU alone has it."""
    path = with_predictors(tmp_path, experts, "Q4_0" if experts == "gates" else "Q8_0")
    engine, checkpoint = engine_of(gpu="cpu", kv_type="f16", selector="predicted"), open_checkpoint(path)
    model = checkpoint_model(checkpoint)
    layers, (layer, about) = len(model.config.experts), next(iter(model.config.experts.items()))
    skipping = skipping_model(model, checkpoint, None, predicted=True)
    inner, _ = skipping.predictors[layer]
    of_expert = gpu.weight_bytes("F16", about.size, predicted_experts.RANK)
    assert skipping.expert_bytes(layer)[0] == model.expert_bytes(layer)[0] + of_expert
    every = needs(resolve(checkpoint, engine))
    resolved = resolve(open_checkpoint(path), replace(engine, vram=every.vram - 3 * skipping.expert_bytes(layer)[0]))
    assert resolved.placement.experts is not None
    slots = tuple(map(len, resolved.placement.experts))
    assert sum(slots) == layers * about.n_experts - 3
    cold = sum(slots[at] < about.n_experts for at in model.config.experts)
    of_cpu = 0 if about.latents else inner.panels
    more = 3 * skipping.expert_bytes(layer)[1] + cold * of_cpu + 2 * resolved.placement.staging
    assert needs(resolved).ram == every.ram + more
    executor, sparsity = load_resolved(resolved, list)
    try:
        assert isinstance(sparsity, ExpertSparsity) and "predicted (neurons inside" in str(executor.choices.selector)
        parts = [ffn.memory() for ffn in sparsity.ffns]
        of_gpu = executor.gpu.memory()
        held = of_gpu["norms"] + of_gpu["ffn"] + sum(part["ffn"] + part["predictor"] for part in parts)
        work, hardware = budget.Workload("f16", families.CONTEXT, TOTAL, 4), measure.measured(engine, gpu="cpu")
        division = budget.Division(model.config.n_layers, True, slots)
        planned = budget.on_gpu(skipping, hardware, work, division, dense=True)
        assert sum(part["predictor"] for part in parts) == layers * inner.stored <= planned["predictor"]
        tables = sum(ffn._slots.nbytes + 4 for ffn in sparsity.ffns)  # and a counter
        assert held == sum(planned[part] for part in ("norms", "ffn", "experts", "predictor")) + tables
    finally:
        executor.close()
    for selector in ("exact", "predicted"):
        flags = ["--selector", selector, "--hardware", "pc-16gb", "--context", "64", "--json"]
        assert main(["plan", "-m", str(path), *flags]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        said = any("select 1.5 times the neurons that fire" in one for one in document["assumed"])
        held = sum(document["bytes"][device].get("predictor", 0) for device in ("gpu", "cpu"))
        assert said == (held > 0) == (selector == "predicted")


@pytest.mark.parametrize(("experts", "kind"), [("gates", "F16"), ("plain", "Q8_0"), ("latents", "Q5_0")])
@pytest.mark.usefixtures("described")
def test_a_load_divides_experts_as_planned(
    experts: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the neurons that a profile found to fire most often; both devices hold what is counted."""
    monkeypatch.setattr(budget, "DIVIDED", 1e9)  # times of an emulated GPU say nothing
    path = with_predictors(tmp_path, experts, kind)
    profile_experts(open_checkpoint(path), EngineConfig(threads=1, gpu="none"), train_experts.task(20))
    engine, checkpoint = engine_of(gpu="cpu", kv_type="f16", selector="predicted"), open_checkpoint(path)
    every, use = needs(resolve(checkpoint, engine)).vram, open_expert_profile(checkpoint).neuron_use
    model = skipping_model(checkpoint_model(checkpoint), checkpoint, None, predicted=True)
    layer = next(iter(checkpoint.config.experts))
    room = replace(engine, vram=every - 2 * model.expert_bytes(layer)[0])
    resolved = resolve(open_checkpoint(path), room)
    inside = resolved.placement.hot_neurons
    assert inside and resolved.placement.experts is not None
    executor, sparsity = load_resolved(resolved, list)
    try:
        assert isinstance(sparsity, ExpertSparsity) and "hot neurons of those of" in str(executor.choices.gpu)
        for ffn in sparsity.ffns:
            assert (ffn.layer in inside) == (ffn._inside is not None) == (len(ffn.cold) == ffn.config.n_experts)
            if ffn.layer in inside:
                hot = inside[ffn.layer]
                assert (np.sort(use[ffn.layer].order[:, : hot.shape[1]], axis=1) == hot).all()
        planned = budget.on_gpu(
            model,
            measure.measured(engine, gpu="cpu"),
            budget.Workload("f16", families.CONTEXT, TOTAL, 4),
            division_of(resolved),
            dense=True,
        )
        parts, of_gpu = [ffn.memory() for ffn in sparsity.ffns], executor.gpu.memory()
        held = of_gpu["norms"] + of_gpu["ffn"] + sum(sum(part.values()) for part in parts)
        tables = sum(ffn._slots.nbytes + 4 for ffn in sparsity.ffns)  # and a counter
        assert held == sum(planned[part] for part in ("norms", "ffn", "experts", "predictor")) + tables
        in_ram = budget.in_ram(model, budget.Workload("f16", families.CONTEXT, TOTAL, 4), division_of(resolved))
        of_cpu = [own for ffn in sparsity.ffns if (part := ffn._cpu_part) is not None and (own := part.by_neuron)]
        outer = sum(own.predictor.nbytes for own in of_cpu if own.predictor is not None)
        assert sum(own.groups.nbytes for own in of_cpu) + outer == in_ram["experts"] + in_ram["predictor"]
        found = logits_of(executor, [40, 1, 1, 5])
    finally:
        executor.close()
    with by_neuron(path, 0.0, selector="predicted") as (executor, _):
        assert neurons_inside.far(found, logits_of(executor, [40, 1, 1, 5])) <= 0.05  # the cache is of F16


@pytest.mark.usefixtures("described")
def test_auto_decides_for_the_experts_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trial of the CPU alone, once; the GPU's experts stay whole, and nothing is tried where it has all."""
    sizes, exact = [], [0.5]

    def seconds(_executor: object, _ops: object, size: int, _sample: object) -> list[float]:
        sizes.append(size)
        return [1.0, exact[0]]

    monkeypatch.setattr(expert_trial, "_seconds", seconds)
    path, chunks = neurons_inside.plain_model(tmp_path, "Q8_0"), [40, 1, 1, 5, 1]
    engine = engine_of(gpu="cpu", kv_type="f16")
    every = resolve(open_checkpoint(path), engine)
    assert "the GPU has all experts" in every.selection.reason
    layer, model = next(iter(every.checkpoint.config.experts)), checkpoint_model(every.checkpoint)
    engine = replace(engine, vram=needs(every).vram - 3 * model.expert_bytes(layer)[0])
    found = []
    for turn, (factor, chosen) in enumerate([(0.5, "exact"), (0.5, "exact"), (0.99, "all")]):
        sizes.clear()
        exact[0] = factor
        resolved = resolve(open_checkpoint(path), replace(engine, retrial=turn == 2))
        assert resolved.selection.in_experts == (turn == 1) and not sizes
        executor, sparsity = load_resolved(resolved, lambda: [1, 2, 3])
        try:
            assert isinstance(sparsity, ExpertSparsity) and sizes == ([] if turn == 1 else [1, engine.max_batch])
            of = "those on the CPU" if chosen == "exact" else "them"
            said = str(executor.choices.selector)
            assert f"{chosen} (neurons inside {of}: a layer of experts, " in said and "dense 1000000 us" in said
            assert not any(part.by_neuron for ffn in sparsity.ffns if (part := ffn._gpu_part) is not None)
            assert any(len(ffn.cold) for ffn in sparsity.ffns)
            found.append(logits_of(executor, chunks))
            assert (sparsity.report()["active_fraction"] is None) == (chosen == "all")
        finally:
            executor.close()
    np.testing.assert_array_equal(found[1], found[0])
    assert 0 < neurons_inside.far(found[2], found[0]) <= 0.03


POLICIES = ("lru", "lfu", "dynamic")


def policy_of(path: Path, name: str, slots: int = 2) -> Policy:
    config = open_checkpoint(path).config
    sizes = {layer: one.n_experts for layer, one in config.experts.items()}
    start = {layer: np.full(n, 1 / n) for layer, n in sizes.items()}
    if name == "dynamic":  # quick enough for a short text
        return Policy("dynamic", dict.fromkeys(sizes, slots), sizes, start, half_life=16, hysteresis=0.1)
    return make_policy(name, dict.fromkeys(sizes, slots), sizes, start)


@contextmanager
def exchanged(path: Path, name: str, **options: Any) -> Iterator[tuple[Any, list[HybridExperts]]]:
    config = open_checkpoint(path).config
    parts = ExpertSplit(some(config, 0.5), copier=Copier(policy_of(path, name)))
    with opened(path, on_gpu(config.n_layers, head=True), parts, **options) as executor:
        yield executor, parts.ffns


@pytest.mark.parametrize(
    ("name", "model"), [*((policy, "gpt-oss") for policy in POLICIES), ("lru", "smallthinker"), ("lfu", "smallthinker")]
)
@pytest.mark.usefixtures("device")
def test_experts_that_are_exchanged_from_step_to_step(name: str, model: str, tmp_path: Path) -> None:
    truth = Truth(case_named(model), "gguf", tmp_path)
    runs = []
    for _ in range(2):
        with exchanged(truth.path, name) as (executor, ffns):
            pages = families.scattered_pages(executor, 3)
            ours = families.run_chunks(executor, truth.texts[0], [55, *[1] * (TOTAL - 55)], pages[0])
            truth.check(ours, what=name)
            for text, both in enumerate(families.run_two(executor, *truth.texts[:2], pages[1:])):
                truth.check(both, text, "in a batch")
            executor.gpu.observer.settle()
            copied = [ffn.collect()["copied"] for ffn in ffns]
            assert sum(copied) > 0 and all(len(ffn.hot) == 2 and len(ffn.cold) == 4 for ffn in ffns)
            assert ExpertSparsity(executor, ffns).report()["copied"] == sum(copied)
            assert all(ffn.collect()["hot"] and ffn.collect()["cold"] for ffn in ffns)
            runs.append((ours, copied, {ffn.cold_bytes for ffn in ffns}))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])  # the same bits, whatever the threads' timing
    assert runs[0][1:] == runs[1][1:]
    with split(truth.path, 0.0) as (_, ffns):
        assert {ffn.cold_bytes for ffn in ffns} == runs[0][2], "the CPU has all experts"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("name", "model"), [("lru", "mixtral"), ("lfu", "mixtral"), ("lru", "smallthinker")])
def test_one_replay_a_step_with_experts_that_are_exchanged(
    name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits and the counts of a host that waits in every layer."""
    truth, told = Truth(case_named(model), "gguf", tmp_path), []
    static_where_emulated(monkeypatch)
    for calls in (True, False):
        made: list[int] = []
        with exchanged(truth.path, name) as (executor, ffns):
            executor.gpu.record(counting_recorder(made), "flags" if calls else "waits")
            pages = families.scattered_pages(executor, 1)[0]
            ours = families.run_chunks(executor, truth.texts[0], DECODED, pages)
            truth.check(ours, what=name)
            assert (executor.gpu.link.calls.made > 2) == calls, "two tried whether it can"
            assert (len(executor.gpu._recordings._parts) == 1) == calls, "a step is one recording"
            executor.gpu.observer.settle()
            assert made and all(ffn.collect()["copied"] for ffn in ffns)
            told.append((ours, [ffn.collect() for ffn in ffns], [ffn.hot for ffn in ffns]))
    for called, waited in zip(*told, strict=True):
        np.testing.assert_equal(called, waited)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", POLICIES)
def test_experts_have_their_slots_a_step_after_they_were_copied(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step what a policy of numpy's, asked for every layer, says of what was selected."""
    truth, steps = Truth(case_named("gpt-oss"), "gguf", tmp_path), list[dict[int, tuple[Any, list[int]]]]()
    plain: Any = HybridExperts._places

    def places(ffn: HybridExperts, experts: Any) -> Any:
        if ffn is ffns[0]:
            steps.append({})
        steps[-1][ffn.layer] = experts.copy(), ffn.hot.tolist()
        return plain(ffn, experts)

    monkeypatch.setattr(HybridExperts, "_places", places)
    with exchanged(truth.path, name) as (executor, ffns):
        families.run_chunks(executor, truth.texts[0], [1] * TOTAL, families.scattered_pages(executor, 1)[0])
        executor.gpu.observer.settle()
        policy, copied = policy_of(truth.path, name), 0
        slots = {ffn.layer: dict(enumerate(policy.resident(ffn.layer).tolist())) for ffn in ffns}
        begun: list[tuple[int, int, int]] = []
        for at, step in enumerate(steps):
            assert {layer: hot for layer, (_, hot) in step.items()} == {
                layer: sorted(have.values()) for layer, have in slots.items()
            }, at
            for layer, slot, expert in begun:
                slots[layer][slot] = expert
            begun = [
                (layer, *swap)
                for layer, (selected, _) in step.items()
                for swap in policy.observe(layer, selected.reshape(-1))
            ]
            copied += len(begun)
            for layer, slot, _ in begun:
                del slots[layer][slot]
        assert len(steps) == TOTAL and copied == sum(ffn.collect()["copied"] for ffn in ffns) > 0
        hits = sum(len(np.intersect1d(selected, hot)) for step in steps for selected, hot in step.values())
        assert sum(ffn.collect()["hot"] for ffn in ffns) == hits > 0


@pytest.mark.usefixtures("device")
def test_a_step_copies_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Truth(case_named("gpt-oss"), "gguf", tmp_path)
    monkeypatch.setattr("powerinfer.hybrid.copier.COPIED_BYTES", 1)
    with exchanged(truth.path, "lru") as (executor, ffns):
        families.run_chunks(executor, truth.texts[0], [1] * TOTAL, families.scattered_pages(executor, 1)[0])
        executor.gpu.observer.settle()
        copied = sum(ffn.collect()["copied"] for ffn in ffns)
        assert TOTAL // 2 < copied <= TOTAL and all(len(ffn.hot) == 2 for ffn in ffns)


@pytest.mark.usefixtures("device")
def test_a_copy_that_fails_ends_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step: its answer is there. What was copied before it is used; it is told once, in a line."""
    truth, copies, replace = Truth(case_named("mixtral"), "gguf", tmp_path), [0], gpu_experts.replace

    def full(*given: Any) -> None:
        copies[0] += 1
        if copies[0] == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        replace(*given)

    with exchanged(truth.path, "lru") as (executor, ffns):
        executor.choices.experts = Choice("lru", "asked for")
        executor.gpu.observer.tell = (sparsity := ExpertSparsity(executor, ffns, "lru")).end_policy
        pages = families.scattered_pages(executor, 1)[0]
        monkeypatch.setattr(gpu_experts, "replace", full)
        truth.check(families.run_chunks(executor, truth.texts[0], [1] * TOTAL, pages), what="meanwhile")
        assert any(len(ffn.hot) < 2 for ffn in ffns), "what may be damaged is not used"
        assert copies == [4] and sparsity.report()["copied"] == 3
        ended = "ended: the GPU ran out of memory while exchanging experts: give less --vram"
        assert executor.choices.texts()["experts"] == f"lru (asked for); {ended}"
        assert sparsity.report()["policy"] == f"lru ({ended})"
        truth.check(families.run_chunks(executor, truth.texts[0], DECODED, pages), what="afterwards")


@pytest.mark.usefixtures("device")
def test_what_a_failed_call_of_the_cpu_has_counted_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, forgot = Truth(case_named("mixtral"), "gguf", tmp_path), list[int]()

    def failed() -> None:
        raise PowerInferError("the CPU failed")

    with exchanged(truth.path, "lru") as (executor, _):
        pages = families.scattered_pages(executor, 1)[0]
        monkeypatch.setattr(executor.gpu.link, "check", failed)
        monkeypatch.setattr(executor.gpu.observer, "forget", lambda: forgot.append(1))
        with pytest.raises(PowerInferError, match="the CPU failed"):
            families.run_chunks(executor, truth.texts[0], [1], pages)
        assert forgot == [1]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            RuntimeError("CUDA error: unspecified launch failure"),
            "the GPU failed while exchanging.*load the model again",
        ),
        (ChangedError("it changed; load the model again"), "it changed"),
    ],
)
@pytest.mark.usefixtures("device")
def test_a_copy_after_which_nothing_can_run_fails_the_step(
    failure: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, told = Truth(case_named("mixtral"), "gguf", tmp_path), list[PowerInferError]()

    def broken(*given: Any) -> None:
        raise failure

    with exchanged(truth.path, "lru") as (executor, _):
        executor.gpu.observer.tell = told.append
        pages = families.scattered_pages(executor, 1)[0]
        monkeypatch.setattr(gpu_experts, "replace", broken)
        with pytest.raises(PowerInferError, match=message):
            families.run_chunks(executor, truth.texts[0], [1] * TOTAL, pages)
        assert not told


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["Q4_0", "BF16", "F32 with biases"])
def test_exchanged_experts_are_sent_from_panels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of those that are read from the file; by the GPU itself once that memory is registered."""
    monkeypatch.setattr("powerinfer.devices.registered.LEAST_BYTES", 1 << 12)
    biased, read, runs = kind not in gpu.GPU_TYPES, list[int](), list[np.ndarray]()
    path = Truth(case_named("gpt-oss"), "gguf", tmp_path).path if biased else neurons_inside.model(tmp_path, kind)
    stored = HybridExperts._stored
    monkeypatch.setattr(HybridExperts, "_stored", lambda ffn, expert: (read.append(expert), stored(ffn, expert))[1])
    for panels in (True, False):
        if not panels:
            monkeypatch.setattr(gpu_experts, "takes_panels", lambda *_: False)
        with exchanged(path, "lru") as (executor, ffns):
            copier, before = executor.gpu.observer, [list(ffn.in_slot) for ffn in ffns]
            assert not copier.registered.nbytes, "it is not known yet whether experts are exchanged"
            copier.start()
            copier.rehearse()
            assert [ffn.in_slot for ffn in ffns] == before
            assert bool(copier.gpu_bytes) == bool(copier.registered.nbytes) == panels
            runs.append(logits_of(executor, [1] * 24))
            copier.settle()
            assert sum(ffn.collect()["copied"] for ffn in ffns) > len(ffns) and bool(read) != panels
    np.testing.assert_array_equal(*runs)


def test_copies_end_within_half_a_step() -> None:
    """By the rate of the link, or of a thread that reads the file."""

    class Layer:
        tally, in_slot, expert_bytes = np.zeros(5, np.int64), [-1], 1 << 20

        def __init__(self, layer: int, sent_bytes: int) -> None:
            self.layer, self.sent_bytes = layer, sent_bytes

    def limit(seconds: float, rate: float, *sent: int) -> int:
        sizes = {layer: 4 for layer in range(len(sent))}
        copier = Copier(Policy("lru", dict.fromkeys(sizes, 1), sizes), Pace(seconds, rate))
        for layer, sent_bytes in enumerate(sent):
            copier.add(cast("Any", Layer(layer, sent_bytes)))
        copier.close()
        return copier._limit

    assert limit(0.01, 1 << 30, 1 << 20) == 5
    assert limit(1.0, 1 << 40, 1 << 20) == 32  # MiB
    assert limit(0.01, 1e12, 1 << 20, 0) == 9  # 2 GB/s
    assert limit(1e-6, 1e9, 1 << 20) == 1


@pytest.mark.usefixtures("device")
def test_a_swap_that_fails_ends_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed steps, too."""
    truth = Truth(case_named("mixtral"), "gguf", tmp_path)
    static_where_emulated(monkeypatch)
    with split(truth.path, 0.5, movable=True) as (executor, ffns):
        executor.gpu.record(counting_recorder([]))
        pages = families.scattered_pages(executor, 1)[0]
        truth.check(families.run_chunks(executor, truth.texts[0], DECODED, pages))
        with monkeypatch.context() as patch:
            patch.setattr(gpu_experts, "replace", lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ffns[0].swap(ffns[0].hot[:1], ffns[0].cold[:1])
        for chunks in ([TOTAL], [1] * TOTAL):
            with pytest.raises(PowerInferError, match="lost in a swap: load the model again"):
                families.run_chunks(executor, truth.texts[0], chunks, pages)


def test_a_buffer_holds_whole_experts() -> None:
    """Matrices begin at lines, beside a table of all experts."""
    for matrices, experts in (([704, 704, 704], 256), ([1088, 1088, 1056], 128), ([8_000_000] * 3, 512), ([72], 1)):
        stage = Stage(torch_device(), expert_buffer(matrices, experts))
        count = stage.experts_at_once(matrices, experts)
        assert count >= 1
        parts = [np.zeros(4 * experts, np.uint8)] + [np.zeros(one, np.uint8) for one in matrices for _ in range(count)]
        with stage.sent(parts) as sent:
            assert len(sent) == len(parts)


@pytest.mark.parametrize(("experts", "kind"), KINDS)
@pytest.mark.usefixtures("device")
def test_calls_of_the_cpu_select_neurons(
    experts: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits and the counts are those of a host that waits for the GPU."""
    path, told = with_predictors(tmp_path, experts, kind), []
    static_where_emulated(monkeypatch)
    for calls in (True, False):
        with by_neuron(path, 0.5, selector="predicted") as (executor, ffns):
            executor.gpu.record(counting_recorder([]), "flags" if calls else "waits")
            before = executor.gpu.link.calls.made
            found = logits_of(executor, [1] * 4 + [3] * 2)
            assert (executor.gpu.link.calls.made > before) == calls
            report = ExpertSparsity(executor, ffns).report()
            assert 0.3 < report["recall"] < 0.7 and 0.3 < report["candidate_fraction"] < 0.7
            told.append((found, report))
    for called, waited in zip(*told, strict=True):
        np.testing.assert_equal(called, waited)


def some_inside(config: ModelConfig, some: int, layers: int | None = None) -> dict[int, Indices]:
    """Random neurons of each expert, as many of each, of the first layers of experts or of all."""
    rng = np.random.default_rng(some)
    return {
        layer: np.sort(rng.permuted(np.tile(np.arange(one.size), (one.n_experts, 1)), axis=1)[:, :some]).astype("i4")
        for layer, one in list(config.experts.items())[:layers]
    }


@pytest.mark.parametrize(("experts", "kind"), [*KINDS, ("gates", "Q4_0"), ("plain", "F16"), ("latents", "Q8_0")])
@pytest.mark.usefixtures("device")
def test_experts_are_split_by_their_neurons(experts: str, kind: str, tmp_path: Path) -> None:
    """The GPU has some of every expert: candidates there and on the CPU add up to those of the whole, and where all are
    to that of all neurons; prompts, and all else while the selector is suspended, have whole experts."""
    chunks, allowed = [40, 1, 1, 5, 1, 32, 1], 1e-3 if kind == "F16" else 0.03
    for threshold in (0.0, -1e5):
        path = with_predictors(tmp_path, experts, kind, threshold)
        with by_neuron(path, 0.0, selector="predicted") as (executor, ffns):
            expected, told = logits_of(executor, chunks), ExpertSparsity(executor, ffns).report()
        for some_neurons, layers in ((32, None), (FF - 32, 1)):
            inside = some_inside(open_checkpoint(path).config, some_neurons, layers)
            with by_neuron(path, 0.0, selector="predicted", inside=inside) as (executor, ffns):
                found = logits_of(executor, chunks)
                assert neurons_inside.far(found, expected) <= allowed
                np.testing.assert_array_equal(logits_of(executor, chunks), found)
                report = ExpertSparsity(executor, ffns).report()
                assert report["layers"][0]["gpu_share"] == pytest.approx(some_neurons / FF, abs=0.01)
                for name in ("recall", "candidate_fraction", "active_fraction"):
                    assert report[name] == pytest.approx(told[name], abs=0.05)
                with ExpertSparsity(executor, ffns).suspended():
                    counted = [ffn.collect()["active"] for ffn in ffns]
                    whole = logits_of(executor, chunks)
                    assert [ffn.collect()["active"] for ffn in ffns] == counted
                if threshold < 0:
                    assert neurons_inside.far(whole, found) <= allowed
                else:
                    assert neurons_inside.far(whole, found) > 0.01, "half of the neurons are missing"


@pytest.mark.skipif(not TRITON or gpu_device.CUDA, reason="Triton's interpreter is not at hand")
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("experts", "kind"), [("plain", "Q5_0"), ("gates", "Q4_0")])
def test_some_neurons_with_the_kernels_of_a_gpu(experts: str, kind: str, tmp_path: Path) -> None:
    path, chunks = with_predictors(tmp_path, experts, kind), [3, 1]
    inside = some_inside(open_checkpoint(path).config, 32)
    with by_neuron(path, 0.0, selector="predicted", inside=inside) as (executor, _):
        expected = logits_of(executor, chunks)
    gpu.force_triton(True)
    try:
        with by_neuron(path, 0.0, selector="predicted", inside=inside) as (executor, _):
            assert neurons_inside.far(logits_of(executor, chunks), expected) <= 1e-3
    finally:
        gpu.force_triton(None)
