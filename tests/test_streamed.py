"""Layers of the CPU whose matrices stream to a GPU for long prompts: products, models of every family, the load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
import model_files  # noqa: E402
from families import case_named  # noqa: E402
from gpu_device import device_name, sum_error, torch_device  # noqa: E402
from prepared_models import saved_results  # noqa: E402
from sparse_models import tiny_llama  # noqa: E402
from stored_weights import stored  # noqa: E402
from test_gpu_kernels import floats, on_device  # noqa: E402
from test_gpu_layers import engine_of  # noqa: E402
from test_gpu_layers import on_gpu as placed  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer import LLM, SamplingParams, _native  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices.batch import Batch  # noqa: E402
from powerinfer.devices.gpu_weights import PanelMatrix, StreamedMatrices  # noqa: E402
from powerinfer.devices.split import SplitExecutor  # noqa: E402
from powerinfer.devices.stage import Stage, layer_buffer  # noqa: E402
from powerinfer.errors import PowerInferError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.quant import block_type, dequantize, quantize  # noqa: E402
from powerinfer.formats.weight_types import NATIVE_TYPES  # noqa: E402
from powerinfer.hardware import measure  # noqa: E402
from powerinfer.hardware.description import load  # noqa: E402
from powerinfer.hybrid import crossing  # noqa: E402
from powerinfer.hybrid.crossing import Crossing  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Resolved, needs  # noqa: E402
from powerinfer.kernels import gpu_panels  # noqa: E402
from powerinfer.placement import budget  # noqa: E402
from powerinfer.placement.budget import Workload, on_gpu  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402

TOKENS = 37  # more than those whose products read a weight once
LEAST = 33


def filled(stage: Stage) -> Stage:
    """Its buffers hold no number in any type."""
    for buffer in (*stage._host, *stage._on_device):
        buffer.fill_(255)
    return stage


@pytest.mark.parametrize("kind", sorted(NATIVE_TYPES))
@pytest.mark.usefixtures("device")
def test_products_of_every_type(kind: str) -> None:
    """Two matrices on the same rows, of one of which not all rows count, against float64; the buffers go round several
    times. The same bits again."""
    rng, k, pool, arena = (
        np.random.default_rng(3),
        2 * max(32, block_type(kind).block),
        _native.Pool(2),
        _native.Arena(),
    )
    x, bias = floats(7, TOKENS, k), floats(8, 53)
    kept = np.array([0, 1, 5, 16, 17, 30], np.int64)
    packed, wanted = [], []
    for rows in (53, 31):
        data = stored(kind, rows, k, rng)
        wanted.append(dequantize(data.reshape(rows, -1), kind).astype(np.float64))
        packed.append(_native.pack_matrix(pool, arena, kind, rows, k, data))
    wanted[1] = wanted[1][kept]
    panel = max(packed[0].nbytes // 4, gpu_panels.panel_bytes(kind, k))
    stage = filled(Stage(torch_device(), panel))
    assert stage.panels_at_once(kind, k, packed[0].nbytes // 4) == 1
    matrices = [
        PanelMatrix(stage, kind, len(want), k, one.panels, own)
        for one, want, own in zip(packed, wanted, (None, kept), strict=True)
    ]
    product = StreamedMatrices(matrices, [on_device(bias), None], torch_device())
    got = product(on_device(x))
    both = np.concatenate(wanted)
    right = x.astype(np.float64) @ both.T
    right[:, :53] += bias
    size = np.abs(x) @ np.abs(both).T + np.concatenate([np.abs(bias), np.zeros(len(kept))])
    bound = size * (sum_error(k) + (2**-11 if gpu_panels.device_type(kind) == "F16" != kind else 0)) + k * 2**-25
    if device_name() == "cuda":  # operands in narrow types
        bound = bound + size * 2**-8
    assert (np.abs(got.cpu().numpy() - right) <= bound).all()
    assert torch.equal(product(on_device(x)), got)


# ---- In a model ------------------------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path, layers: int, buffer: int = 1 << 15, **options: Any) -> Iterator[SplitExecutor]:
    engine = engine_of(**options)
    resolved = Resolved(open_checkpoint(path, engine.quantize), engine, **placed(layers))
    executor = load_split(resolved, stage=filled(Stage(torch_device(), buffer)))
    try:
        yield executor
    finally:
        executor.close()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each product that streams."""
    found: list[int] = []
    call = StreamedMatrices.__call__

    def counting(self: StreamedMatrices, x: torch.Tensor, *to: Any) -> torch.Tensor:
        found.append(len(x))
        return call(self, x, *to)

    monkeypatch.setattr(StreamedMatrices, "__call__", counting)
    return found


SPLIT = [one for one in families.device_cases() if one.values[0].kind != "gemma3n_text"]
"""Cases of which a GPU may have some layers."""


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "layout"), SPLIT)
@pytest.mark.usefixtures("device")
def test_a_prompt_is_the_right_answer_whoever_computes_it(
    case: families.Case, layout: str, tmp_path: Path, products: list[int]
) -> None:
    """Within the bound of the CPU's own layers; the same bits on every run; single tokens stay on the CPU."""
    truth = Truth(case, layout, tmp_path)
    tokens, total = truth.texts[0], families.TOKENS
    with opened(truth.path, 1) as executor:
        streamed = executor.streamed
        assert streamed is not None
        if case.kind == "mamba2":  # whose layers are of one part, which the CPU computes
            assert not streamed.spans
            return
        assert streamed.spans
        pages, answers = families.scattered_pages(executor, 4), []
        for least, own in zip((None, LEAST, LEAST), pages, strict=False):
            streamed.stage.least = least
            products.clear()
            answers.append(families.run_chunks(executor, tokens, [40, 1, total - 41], own))
            truth.check(answers[-1], what=str(least))
            assert set(products) == (set() if least is None else {40, total - 41})
        np.testing.assert_array_equal(answers[1], answers[2])
        for text, ours in enumerate(families.run_two(executor, *truth.texts[:2], pages[2:])):
            truth.check(ours, text, "in a batch")


@pytest.mark.usefixtures("device")
def test_short_steps_are_those_of_the_cpu(tmp_path: Path, products: list[int]) -> None:
    truth = Truth(case_named("qwen3"), "folder", tmp_path)
    with opened(truth.path, 1) as executor:
        assert executor.streamed is not None
        pages, answers = families.scattered_pages(executor, 2), []
        for least, own in zip((None, LEAST), pages, strict=True):
            executor.streamed.stage.least = least
            answers.append(families.run_chunks(executor, truth.texts[0], [32, 32, 1, 10], own))
        np.testing.assert_array_equal(*answers)
        assert not products


@pytest.mark.usefixtures("device")
def test_many_sequences_with_long_contexts_stay_on_the_cpu(tmp_path: Path) -> None:
    """As the caches of all of them would have to stream, for a token each."""

    def batch(tokens: list[int], position: int) -> Batch:
        """Sequences with so many tokens each, from a position on."""
        rows = np.repeat(np.arange(len(tokens), dtype=np.int32), tokens)
        places = np.concatenate([np.arange(position, position + n, dtype=np.int32) for n in tokens])
        table = np.zeros((len(tokens) + 1, position // 32 + 3), np.int32)  # a row is of no sequence
        return Batch(np.zeros(len(rows), np.int32), places, rows, table, np.empty(0, np.int32))

    truth = Truth(case_named("qwen3"), "folder", tmp_path)
    with opened(truth.path, 1) as executor:
        streamed = executor.streamed
        assert streamed is not None
        streamed.stage.least = LEAST
        about = executor.cpu.config.layers[1].attention
        most = max(own.nbytes for own in streamed.spans) // (2 * 4 * about.n_kv_heads * about.head_dim)
        assert streamed.takes(batch([1] * 40, most // 40)) and not streamed.takes(batch([1] * 40, most // 40 + 1))
        assert streamed.takes(batch([40], 2 * most)) and streamed.takes(batch([LEAST, LEAST], 2 * most))
        assert streamed.takes(batch([40, 1], most)) and not streamed.takes(batch([40, 1], most + 1))
        assert not streamed.takes(batch([1] * (LEAST - 1), 0))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.usefixtures("device")
def test_quantised_weights(kind: str, tmp_path: Path) -> None:
    """The answer is that of a model with the dequantised weights. The CPU's layers are off by activations of 8 bits;
    what streams only by those of the head, which the CPU has in 16: by a 256th of that, with a margin of four."""
    case = families.Case("quantised", "llama", {"intermediate_size": 96}, {})
    truth = Truth(case, "folder", tmp_path)
    with torch.no_grad():
        for name, parameter in truth.model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                data = quantize(parameter.numpy(), kind.upper())
                parameter.copy_(torch.from_numpy(dequantize(data, kind.upper())))
    exact, errors = families.exact_logits(case, truth.config, truth.model, truth.texts[0]), []
    with opened(truth.path, 1, quantize=kind) as executor:
        assert executor.streamed is not None
        for least, own in zip((None, LEAST), families.scattered_pages(executor, 2), strict=True):
            executor.streamed.stage.least = least
            errors.append(families.rms(families.run_chunks(executor, truth.texts[0], [families.TOKENS], own) - exact))
    assert errors[1] <= errors[0] / 64


@pytest.mark.usefixtures("device")
def test_rehearsed_and_traced(tmp_path: Path, products: list[int]) -> None:
    """The largest steps run what streams, too; a trace shows it, and neither changes an answer."""
    truth = Truth(case_named("qwen3"), "folder", tmp_path)
    with opened(truth.path, 1) as executor:
        assert executor.streamed is not None
        executor.streamed.stage.least = LEAST
        executor.gpu.rehearse(2)
        assert set(products) == {families.TOKENS}
        pages = families.scattered_pages(executor, 2)
        plain = families.run_chunks(executor, truth.texts[0], [70, 5], pages[0])
        with executor.traced() as trace:
            traced = families.run_chunks(executor, truth.texts[0], [70, 5], pages[1])
        np.testing.assert_array_equal(plain, traced)
        shown = {(one.lane, one.kind, one.layer) for one in trace.spans}
        assert {("GPU", kind, 2) for kind in ("cache", "attention", "project", "ffn")} <= shown
        assert ("CPU", "layers and head", -1) in shown


@pytest.mark.usefixtures("device")
def test_steps_after_the_trial(tmp_path: Path) -> None:
    """Its steps are larger than all before."""
    truth = Truth(case_named("qwen3"), "folder", tmp_path)
    with opened(truth.path, 1, prefill_chunk=256) as executor:
        found = crossing.measured_layers(executor)
        assert [tokens for tokens, _, _ in found.tried] in ([64], [64, 128], [64, 128, 256])
        pages = families.scattered_pages(executor, 1)[0]
        truth.check(families.run_chunks(executor, truth.texts[0], [70, 5], pages))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.usefixtures("device")
def test_a_narrow_cache(kv_type: str, tmp_path: Path) -> None:
    """Keys and values come back as the CPU would have rounded them; the bound is derived in test_gpu_layers.py."""
    truth = Truth(case_named("llama-gqa"), "folder", tmp_path)
    with opened(truth.path, 1, kv_type=kv_type) as executor:
        assert executor.streamed is not None
        pages, answers = families.scattered_pages(executor, 2), []
        for least, own in zip((None, LEAST), pages, strict=True):
            executor.streamed.stage.least = least
            answers.append(families.run_chunks(executor, truth.texts[0], [33, 3, 39], own))
    error = families.rms(answers[0] - truth.logits[0])
    assert truth.allowed(2) < families.rms(answers[1] - truth.logits[0]) <= 1.5 * error
    assert families.rms(answers[1] - answers[0]) <= (12 * 0.01) ** 0.5 * error


@pytest.mark.usefixtures("device")
def test_a_step_that_fails_leaves_the_executor_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Truth(case_named("qwen3"), "folder", tmp_path)
    with opened(truth.path, 1) as executor:
        assert executor.streamed is not None
        executor.streamed.stage.least = LEAST
        pages = families.scattered_pages(executor, 2)
        whole = families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[0])
        for calls in (2, 4, 7):  # products of the first layer, and of both that stream
            left, linear = [calls], StreamedMatrices.__call__

            def failing(self: StreamedMatrices, *given: Any) -> Any:
                left[0] -= 1  # noqa: B023 - it is called within this round alone
                if not left[0]:  # noqa: B023
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried")
                return linear(self, *given)  # noqa: B023

            with monkeypatch.context() as patch, pytest.raises(PowerInferError, match="out of memory"):
                patch.setattr(StreamedMatrices, "__call__", failing)
                families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[1])
            again = families.run_chunks(executor, truth.texts[0], [families.TOKENS], pages[1])
            np.testing.assert_array_equal(again, whole)


# ---- The load --------------------------------------------------------------------------------------------------------

GIVEN: dict[str, Any] = {
    "threads": 1,
    "context": 96,
    "prefill_chunk": 64,
    "max_batch": 2,
    "gpu": "cpu",
    "kv_type": "f32",
}
PROMPT, SHORT = [5, 9, 2] * 23, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of twelve dense layers."""
    monkeypatch.setattr(measure, "measured", lambda *_, **__: load("pc-low"))
    monkeypatch.setattr(model_files, "LAYERS", 12)
    return tiny_llama(tmp_path / "m.gguf", "silu")


def room(path: Path, layers: int, more: int = 0) -> int:
    """--vram for that number of layers, and `more` bytes."""
    model, work = checkpoint_model(open_checkpoint(path)), Workload("f32", 96, 64, 2)
    return sum(on_gpu(model, load("pc-low"), work, budget.Division(layers), dense=True).values()) + more


def loaded(path: Path, vram: int, **more: Any) -> tuple[dict[str, str], int | None, list[int]]:
    """(choices, from how many tokens on layers stream, the answer to a prompt)."""
    with LLM(path, **(GIVEN | {"vram": vram} | more)) as llm:
        executor = llm._executor
        assert isinstance(executor, SplitExecutor)
        least = None if executor.streamed is None else executor.streamed.stage.least
        assert llm.streams_from == least
        return llm.choices, least, llm.generate([PROMPT], SHORT)[0].token_ids


def test_the_crossing_is_measured_once(model: Path, monkeypatch: pytest.MonkeyPatch, products: list[int]) -> None:
    vram, file = room(model, 4), Path(f"{model}.powerinfer") / "trials.json"
    choices, least, wanted = loaded(model, vram, trial=False)
    assert choices["gpu"].startswith("3 layers on cpu"), "one makes room for the buffers"
    assert "nothing was measured" in choices["prefill"] and least is None and not products
    assert not saved_results(file, "prompts")
    choices, least, answer = loaded(model, vram)
    assert "measured in" in choices["prefill"] and "layers in RAM" in choices["prefill"] and answer == wanted
    (entry,) = saved_results(file, "prompts")
    assert entry["least"] == least and entry["tried"][0][0] == 64 and min(entry["tried"][0][1:]) > 0

    for found in (50, None):
        monkeypatch.setattr(crossing, "measured_layers", lambda _, n=found: Crossing(n, ((40, 1e-3, 2e-3),)))
        products.clear()
        assert loaded(model, vram, retrial=True)[1:] == (found, wanted)
        monkeypatch.setattr(crossing, "measured_layers", None)
        assert loaded(model, vram)[1:] == (found, wanted)
        assert set(products) == ({64} if found else set()), "the first piece streams, what is left of it does not"
        assert "measured earlier" in loaded(model, vram, trial=False)[0]["prefill"]


@pytest.mark.parametrize("limit", [1 << 21, (1 << 22) - 1, 1 << 22, (1 << 22) + 1, 7 << 20, 1 << 30])
@pytest.mark.parametrize(("widest", "page"), [(59392, 0), (64, 3 << 20), (28672, 1 << 20), (64, 1 << 12)])
def test_a_buffer_holds_a_panel_and_a_page(widest: int, page: int, limit: int) -> None:
    """Of float32 at the widest, or there is none; on a GPU it takes no more than its own bytes."""
    for layer in (1 << 16, 20 << 20, 1 << 30):
        size, least = layer_buffer(layer, widest, page, limit), max(4 * 16 * widest, page)
        assert (least <= size <= limit) if size else limit < -(-least // (2 << 20)) * (2 << 20)
        assert size < 2 << 20 or size % (2 << 20) == 0


def test_room_for_the_buffers(model: Path) -> None:
    """Of many layers on the CPU one more makes room; of few none does, and buffers take what is left."""
    engine = EngineConfig(**GIVEN)
    shape = checkpoint_model(open_checkpoint(model))
    work = Workload("f32", 96, 64, 2)
    size = budget.streamed_buffer(shape, work)

    def resolved(vram: int, **more: Any) -> Resolved:
        return resolve(open_checkpoint(model), replace(engine, vram=vram, **more))

    for layers, left, expected in [
        (4, 0, (3, size)),
        (4, budget.streamed_on_gpu(shape, work, 4, size), (4, size)),
        (4, budget.streamed_on_gpu(shape, work, 4, size) - 1, (3, size)),
        (5, 0, (5, 0)),
        (5, budget.streamed_on_gpu(shape, work, 5, size), (5, size)),
        (1, 0, (1, 0)),
        (12, 0, (12, 0)),
    ]:
        found = resolved(room(model, layers, left))
        assert (found.placement.layers, found.placement.staging) == expected, (layers, left)
        taken = needs(found)
        assert taken.vram <= room(model, layers, left)
        more = budget.streamed_in_ram(shape, work, found.placement.layers, found.placement.staging)
        assert taken.ram - needs(found.placed(staging=0)).ram == more >= 2 * found.placement.staging
    streaming = resolved(room(model, 4))
    enough = needs(streaming).ram
    assert resolved(room(model, 4), ram=enough).placement.staging == size
    assert resolved(room(model, 4), ram=enough - 1).placement.staging == 0
    assert resolved(room(model, 4), prefill_chunk=32).placement.staging == 0, "no step is long enough"


def test_what_is_held_is_what_was_counted(model: Path) -> None:
    """On the GPU, and the buffers in RAM."""
    shape, work = checkpoint_model(open_checkpoint(model)), Workload("f32", 96, 64, 2)
    found = resolve(open_checkpoint(model), EngineConfig(**GIVEN, vram=room(model, 4)))
    layers, size = found.placement.layers, found.placement.staging
    planned = on_gpu(shape, load("pc-low"), work, budget.Division(layers), dense=True)
    with LLM(model, **GIVEN, vram=room(model, 4), trial=False) as llm:
        executor = llm._executor
        assert isinstance(executor, SplitExecutor) and executor.streamed is not None
        llm.generate([PROMPT], SHORT)
        held, stage = executor.gpu.memory(), executor.streamed.stage
        assert all(held[part] == planned[part] for part in ("attention", "ffn"))
        more = sum(held[part] - planned[part] for part in ("norms", "kv"))
        assert more + stage.nbytes + stage.nbytes // 2 == budget.streamed_on_gpu(shape, work, layers, size)
        returned = sum(one.nbytes for one in executor.streamed._cache._host)
        assert stage.nbytes + returned == budget.streamed_in_ram(shape, work, layers, size)


def test_without_memory_nothing_streams(model: Path, monkeypatch: pytest.MonkeyPatch, products: list[int]) -> None:
    """The buffers go before layers do."""

    def failing(*_: Any) -> Crossing:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    vram = room(model, 4)
    wanted = loaded(model, vram, trial=False)[2]
    monkeypatch.setattr(crossing, "measured_layers", failing)
    choices, least, answer = loaded(model, vram)
    assert choices["gpu"].startswith("3 layers on cpu") and "no room" in choices["prefill"]
    assert (least, answer) == (None, wanted) and not products
