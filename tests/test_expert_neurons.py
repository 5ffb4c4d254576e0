"""Selector `exact` inside experts: the answers of whole experts, from weights that rest once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
from levels import each_level
from model_files import FF, LAYERS, PLAIN_EXPERTS, SHARED, D, experts_gguf, mamba_gguf
from stored_weights import stored_evenly

from benchmarks.models.gguf_writer import F32, STRING
from powerinfer import LLM, RequestError, SamplingParams
from powerinfer.cli.main import main
from powerinfer.config import THRESHOLDED, EngineConfig, ExpertsConfig, RouterConfig
from powerinfer.devices import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.quant import quantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import STORED_ROWS
from powerinfer.models import load
from powerinfer.sparsity.selection import auto

TOKENS = 50  # as a prompt more than what is computed sparsely, and whole steps of those otherwise
TYPES = {"F16": 1, "BF16": 30, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "MXFP4": 39}
ALLOWED = {"F16": 1e-5, "BF16": 0.004, "Q4_0": 1e-5, "Q5_1": 1e-5, "Q8_0": 1e-5}  # of the logits; whole BF16 rounds h
ACTIVATIONS = ("relu", "relu2", "fatrelu", "drelu", "cats")


def model(folder: Path, kind: str = "F16", activation: str = "relu", **change: Any) -> Path:
    builder = experts_gguf(**change).add("llama.hidden_act", STRING, activation)
    if activation in THRESHOLDED:
        builder.add("llama.hidden_act_param", F32, {"fatrelu": 0.1, "cats": 0.2}[activation])
    for tensor in [one for one in builder.tensors if "_exps" in one.name]:
        builder.tensors.remove(tensor)
        values = np.frombuffer(tensor.data, np.float32).reshape(tensor.dims[::-1])
        values = values * np.float32(20 if "down" in tensor.name else 1)  # else attention hides what experts add
        stored = values if kind == "F32" else quantize(values.reshape(-1, values.shape[-1]), kind)
        builder.tensor(tensor.name, stored, TYPES.get(kind, 0), list(tensor.dims))
    return builder.write(folder / f"{kind}-{activation}.gguf")


def opened(path: Path, *, exact: bool, threads: int = 2, level: str | None = None) -> CpuExecutor:
    engine = EngineConfig(threads=threads, context=128, kv_type="f32", prefill_chunk=TOKENS, isa=level)
    return load(open_checkpoint(path), engine, in_experts=exact)


def logits(executor: CpuExecutor, step: int) -> np.ndarray:
    """[TOKENS, vocab] of one sequence, fed `step` tokens at a time."""
    tokens = np.random.default_rng(3).integers(0, executor.vocab_size, TOKENS).astype(np.int32)
    pages = np.arange(executor.n_pages, dtype=np.int32)[None]
    results = []
    for at in range(0, TOKENS, step):
        span = np.arange(at, min(at + step, TOKENS), dtype=np.int32)
        rows = np.arange(len(span), dtype=np.int32)
        results.append(executor.forward(Batch(tokens[span], span, np.zeros_like(rows), pages, rows)).copy())
    return np.concatenate(results)


def far(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative error of nine of ten positions: where rounding decides which experts are selected, one is far off."""
    errors = np.sqrt(np.square(found - expected).mean(1) / np.square(expected).mean(1))
    return float(np.quantile(errors, 0.9))


@each_level("kind", [*ALLOWED])
def test_prompts_have_the_bits_of_whole_experts(kind: str, level: str, tmp_path: Path) -> None:
    """The bundles become the panels that the file's matrices would."""
    path = model(tmp_path, kind)
    whole, exact = (opened(path, exact=one, level=level) for one in (False, True))
    assert sorted(exact.expert_ffns) == list(range(LAYERS)) and not whole.expert_ffns
    assert np.array_equal(logits(exact, TOKENS), logits(whole, TOKENS))
    for ffn in exact.expert_ffns.values():
        assert ffn.counts()["steps"] == 0
        ffn.op.set_whole(True)
    assert np.array_equal(logits(exact, 25), logits(whole, 25)), "the selector is suspended"
    for one in (whole, exact):
        one.close()


@pytest.mark.sampled(("kind", "level"), ("kind", "step"), ("level", "step"))
@pytest.mark.parametrize("step", [1, 25])
@each_level("kind", [*ALLOWED], prompts=False)
def test_small_steps_compute_what_fires(kind: str, level: str, step: int, tmp_path: Path) -> None:
    path = model(tmp_path, kind)
    whole, exact = (opened(path, exact=one, level=level) for one in (False, True))
    expected = logits(whole, step)
    assert far(logits(exact, step), expected) <= ALLOWED[kind]
    for ffn in exact.expert_ffns.values():
        counts = ffn.counts()
        assert counts["tokens"] == TOKENS and counts["neurons"] == TOKENS * 2 * FF
        assert 0.3 < counts["active"] / counts["neurons"] < 0.7, "half of random gates fire"
        assert counts["bytes"] < ffn.nbytes * TOKENS if step == 1 else counts["steps"] == TOKENS // step
    for one in (whole, exact):
        one.close()


@pytest.mark.parametrize("kind", STORED_ROWS)
def test_rows_as_the_file_has_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up of blocks of 256, beside down of blocks of 32: prompts have the bits of whole experts."""
    monkeypatch.setattr(model_files, "D", 256)
    monkeypatch.setattr(model_files, "HEAD_DIM", 64)
    path, rng = model(tmp_path, "Q5_0"), np.random.default_rng(6)
    checkpoint = open_checkpoint(path)
    for name, tensor in checkpoint._tensors.items():
        if "gate_exps" in name or "up_exps" in name or "experts_gate" in name or "experts_up" in name:
            data = stored_evenly(kind, 4 * FF, 256, 1 / 16, rng)
            checkpoint._tensors[name] = RawTensor(kind, tensor.shape, data)
    engine = EngineConfig(threads=2, context=128, kv_type="f32", prefill_chunk=TOKENS)
    whole, exact = executors = [load(checkpoint, engine, in_experts=one) for one in (False, True)]
    assert [ffn.layout.gate_type for ffn in exact.expert_ffns.values()] == LAYERS * [kind]
    assert np.array_equal(logits(exact, TOKENS), logits(whole, TOKENS))
    assert far(logits(exact, 25), logits(whole, 25)) <= 1e-5
    for one in executors:
        one.close()


def with_shared(path: Path, kind: str = "F32") -> Checkpoint:
    """A model of experts with gates, beside a random shared one, of that type, with a weight for each token."""
    checkpoint, rng = open_checkpoint(path), np.random.default_rng(4)
    layers = []
    for at, layer in enumerate(checkpoint.config.layers):
        assert isinstance(layer.ffn, ExpertsConfig)
        layers.append(replace(layer, ffn=replace(layer.ffn, shared_size=SHARED, shared_weight=True)))
        shapes = dict(layers[at].ffn.tensors(D))
        for name in ("shared_gate", "shared_up", "shared_down", "shared_weight"):
            values = rng.standard_normal(shapes[name]).astype(np.float32)
            of_type = "F32" if name == "shared_weight" else kind
            data = quantize(np.atleast_2d(values), of_type).reshape(-1).view(np.uint8)
            checkpoint._tensors[f"layers.{at}.{name}"] = RawTensor(of_type, shapes[name], data)
    checkpoint.config = replace(checkpoint.config, layers=tuple(layers))
    return checkpoint


def test_experts_with_gates_beside_a_shared_one(tmp_path: Path) -> None:
    """That one is computed whole, in the same way as without selector."""
    path, engine = model(tmp_path), EngineConfig(threads=2, context=128, kv_type="f32", prefill_chunk=TOKENS)
    whole, exact_ones = executors = [load(with_shared(path), engine, in_experts=exact) for exact in (False, True)]
    assert sorted(exact_ones.expert_ffns) == list(range(LAYERS))
    assert np.array_equal(logits(exact_ones, TOKENS), logits(whole, TOKENS))
    for step in (1, 25):
        assert far(logits(exact_ones, step), logits(whole, step)) <= ALLOWED["F16"]
    for one in executors:
        one.close()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_that_can_be_zero(activation: str, tmp_path: Path) -> None:
    path, other = model(tmp_path, activation=activation), model(tmp_path, activation="silu")
    results = []
    for file, exact in ((path, False), (path, True), (other, False)):
        executor = opened(file, exact=exact, threads=3)
        results.append(logits(executor, 5))
        executor.close()
    assert far(results[1], results[0]) <= ALLOWED["F16"] < 0.01 < far(results[2], results[0])


def test_weights_rest_once(tmp_path: Path) -> None:
    executor = opened(model(tmp_path, "Q4_0"), exact=True)
    for ffn in executor.expert_ffns.values():
        stored = 4 * 3 * FF * D * 18 // 32
        held = 4 * FF * (ffn.gate_row + ffn.layout.stride)
        assert stored <= held <= 2.5 * stored, "rows this short are mostly padding"
    executor.close()


def test_numbers_that_are_none_stay_in_their_token(tmp_path: Path) -> None:
    executor = opened(model(tmp_path), exact=True)
    rows = np.arange(3, dtype=np.int32)  # of three sequences
    batch = Batch(rows + 1, np.zeros(3, np.int32), rows, rows[:, None].copy(), np.empty(0, np.int32))
    executor.embedded(batch)[1] = np.nan
    executor.finish(batch)
    assert np.isfinite(executor.hidden_states(rows)).all(axis=1).tolist() == [True, False, True]
    executor.close()


def test_a_model_says_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path)
    settings = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    assert auto(open_checkpoint(path).config)[1].startswith("a trial at load")
    with LLM(path, gpu="none", threads=2, selector="all") as llm:
        expected, dense = llm.generate("ab", settings).token_ids, llm.bytes_per_token
    with LLM(path, gpu="none", threads=2, selector="exact") as llm:
        assert llm.generate("ab", settings).token_ids == expected
        report = llm.sparsity
        assert report is not None and report["selector"] == "exact" and report["tokens"] >= 8
        assert 0.3 < report["active_fraction"] < 0.7 and len(report["layers"]) == LAYERS
        assert llm.bytes_per_token is not None and dense is not None and llm.bytes_per_token < dense
    text = tmp_path / "text.txt"
    text.write_text("ab ba " * 40)
    flags = ["--selector", "exact", "--file", str(text), "--context", "32", "--gpu", "none", "--json"]
    assert main(["eval", "agreement", "-m", str(path), *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["mean_kl"] < 1e-6 and 0.3 < result["active_fraction"] < 0.7
    few = ["--prompt-tokens", "8", "--gen-tokens", "4", "--repeat", "1"]
    assert main(["bench", "-m", str(path), "--selector", "exact", "--gpu", "none", *few]) == 0


@pytest.mark.parametrize(
    ("made", "selector", "why"),
    [
        ({"kind": "F32"}, "exact", "experts of type F32 have no rows of single neurons of up"),
        ({}, "threshold", "selector threshold: not inside experts so far; use --selector exact or all"),
        ({"activation": "silu"}, "exact", "never exactly zero"),
    ],
)
def test_what_is_refused(made: dict[str, Any], selector: str, why: str, tmp_path: Path) -> None:
    path = model(tmp_path, **made)
    with pytest.raises(RequestError, match=why):
        LLM(path, gpu="none", threads=1, selector=selector)


PLAIN = {"F16": 1, "BF16": 30, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "IQ4_NL": 20, "MXFP4": 39}


def plain_model(folder: Path, kind: str, shared: str | None = None, latents: int = 0) -> Path:
    """Experts without gates beside a shared one, their squared activations in a layer of their own: random codes of a
    type, of the shared one's down another. latents: width of what all but the shared one read and give."""
    builder, rng = mamba_gguf("*EE", latents), np.random.default_rng(5)
    for tensor in [one for one in builder.tensors if "exp" in one.name and one.name.endswith("weight")]:
        builder.tensors.remove(tensor)
        *rows, cols = tensor.dims[::-1]
        own = shared or kind if "shexp" in tensor.name else kind
        size = 4.0 if "down" in tensor.name else 0.2  # else attention hides what experts add
        data = stored_evenly(own, int(np.prod(rows)), cols, size, rng)
        builder.tensor(tensor.name, data, PLAIN.get(own, 0), list(tensor.dims))
    return builder.write(folder / f"{kind}-{shared}-{latents}.gguf")


@each_level("kind", [*PLAIN])
def test_prompts_of_experts_without_gates_have_the_bits_of_whole_ones(kind: str, level: str, tmp_path: Path) -> None:
    """Rows of down, whose blocks lie across neurons, become the panels that the file's matrices would."""
    path = plain_model(tmp_path, kind)
    whole, exact = (opened(path, exact=one, level=level) for one in (False, True))
    assert sorted(exact.expert_ffns) == [1, 2] and not whole.expert_ffns
    assert np.array_equal(logits(exact, TOKENS), logits(whole, TOKENS))
    for one in (whole, exact):
        one.close()


WIDE = 672  # columns of a row: more than a line of 128, and of 512 with fifth bits


@each_level("kind", [*PLAIN])
def test_wide_rows_become_the_panels_of_the_matrix(kind: str, level: str, tmp_path: Path) -> None:
    """Line by line, the next one asked for meanwhile; of experts with many and with few rows."""
    checkpoint, rng = open_checkpoint(plain_model(tmp_path, "F16")), np.random.default_rng(9)
    config = replace(checkpoint.config, d_model=WIDE)
    engine = EngineConfig(threads=2, context=128, prefill_chunk=TOKENS, isa=level)
    executor = CpuExecutor(config, engine, {})
    shapes = [(PLAIN_EXPERTS, *shape) for shape in ((FF, WIDE), (WIDE, FF))]
    data = [stored_evenly(kind, n * rows, cols, 1.0, rng) for n, rows, cols in shapes]
    parts = [RawTensor(kind, shape, own.reshape(-1)) for shape, own in zip(shapes, data, strict=True)]
    sums = []
    for executor.in_experts in (False, True):
        sums.append(executor.expert_sum(1, parts))
    x = rng.standard_normal((TOKENS, WIDE)).astype(np.float32)
    weights, found = rng.random((TOKENS, 2), np.float32), np.empty((2, TOKENS, WIDE), np.float32)
    selected = np.tile(np.int32([0, 1]), (TOKENS, 1))  # some of two and three
    selected[:3] = 2, 3
    for one, out in zip(sums, found, strict=True):
        one.sum(x, selected, weights, out)
    assert np.abs(found[0]).max() > 0
    np.testing.assert_array_equal(*found)
    executor.close()


BESIDE = (*((kind, None, 0) for kind in PLAIN), ("Q5_0", "Q8_0", 0), ("F16", "Q5_1", 0), ("Q4_0", "F32", 0))
"""Types of experts and of the shared one, None: the same; the width of latents."""
OF_LATENTS = (("F16", None, 32), ("Q5_0", None, 32), ("Q8_0", "Q4_1", 32), ("Q4_0", "F32", 32))


@pytest.mark.sampled
@pytest.mark.parametrize("step", [1, 25])
@pytest.mark.parametrize(("kind", "shared", "latents"), [*BESIDE, *OF_LATENTS])
def test_small_steps_skip_rows_of_down(kind: str, shared: str | None, latents: int, step: int, tmp_path: Path) -> None:
    """Those of the experts, and of the shared one, which of the same width and type lies behind them, else beside them,
    and where its type has no rows of neurons is dense."""
    path = plain_model(tmp_path, kind, shared, latents)
    whole, exact = (opened(path, exact=one, threads=3) for one in (False, True))
    assert far(logits(exact, step), logits(whole, step)) <= ALLOWED.get(kind, 2e-3)
    of_token = 2 * FF + (0 if shared == "F32" else SHARED)
    for ffn in exact.expert_ffns.values():
        assert (ffn.shared is not None) == (shared not in ("F32", None) or (shared is None and latents > 0))
        counts = ffn.counts()
        assert counts["tokens"] == TOKENS and counts["neurons"] == TOKENS * of_token
        assert 0.3 < counts["active"] / counts["neurons"] < 0.7, "half of random neurons fire"
        assert counts["bytes"] < ffn.nbytes * TOKENS if step == 1 else counts["steps"] == TOKENS // step
        ffn.op.clear()
        assert set(ffn.counts().values()) == {0}
    for one in (whole, exact):
        one.close()


@each_level("kind", ["F16", "Q5_0"])
def test_experts_of_latents_at_every_level(kind: str, level: str, tmp_path: Path) -> None:
    """Prompts have the bits of whole experts; so has a suspended selector."""
    path = plain_model(tmp_path, kind, latents=32)
    whole, exact = (opened(path, exact=one, level=level) for one in (False, True))
    assert np.array_equal(logits(exact, TOKENS), logits(whole, TOKENS))
    assert far(logits(exact, 4), logits(whole, 4)) <= ALLOWED.get(kind, 2e-3)
    for ffn in exact.expert_ffns.values():
        ffn.op.set_whole(True)
    assert np.array_equal(logits(exact, 25), logits(whole, 25))
    for one in (whole, exact):
        one.close()


def test_an_expert_without_a_gate_is_replaced(tmp_path: Path) -> None:
    """In a place of some that a caller selects."""
    checkpoint = open_checkpoint(plain_model(tmp_path, "Q5_0"))
    executor = opened(checkpoint.path, exact=True)
    parts = [checkpoint.take(f"layers.1.experts_{part}") for part in ("up", "down")]
    every = [[RawTensor(one.type, one.shape[1:], data) for data in np.split(one.data, PLAIN_EXPERTS)] for one in parts]
    first = [RawTensor(own[0].type, (2, *own[0].shape), np.concatenate([one.data for one in own[:2]])) for own in every]
    some, all_of_them = executor.expert_sum(1, first), executor.expert_sum(1, parts)
    some.replace(1, [own[3] for own in every])
    x = np.random.default_rng(2).standard_normal((3, D)).astype(np.float32)
    found, wanted = np.empty((2, 3, D), np.float32)
    weights = np.full((3, 2), 0.5, np.float32)
    some.sum(x, np.tile(np.int32([0, 1]), (3, 1)), weights, found)
    all_of_them.sum(x, np.tile(np.int32([0, 3]), (3, 1)), weights, wanted)
    np.testing.assert_array_equal(found, wanted)
    executor.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"activation": "silu"}, "silu is never exactly zero"),
        ({"gated": False, "shared_size": 8}, None),
        ({"gated": False, "latents": 32}, None),
        ({"bias": True}, "experts with biases"),
        ({"shared_size": 8}, None),
        ({"size": 40}, "40 neurons of an expert are not whole groups of 32"),
        ({}, None),
    ],
)
def test_experts_that_are_computed_whole(change: dict[str, Any], why: str | None) -> None:
    settings: dict[str, Any] = {"n_experts": 4, "size": 64, "router": RouterConfig(2), "activation": "relu"} | change
    found = ExpertsConfig(**settings).whole_reason
    assert found is None if why is None else why in str(found)
