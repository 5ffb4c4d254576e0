"""A model whose layers differ in heads, FFN size, activation and gate, against plain torch: dense, sparse, on a GPU.

No published family has all of it; the checkpoint is made in memory. The truth is float64, the bound four times the
error that torch makes in float32 (see families.py). Weights are float16 numbers, so bundles of F16 hold them.
"""

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
from configs import changed  # noqa: E402
from sparse_models import profile_for  # noqa: E402
from test_hybrid import SPLITS, in_small_steps, placed  # noqa: E402
from test_sparse import side_by_side  # noqa: E402

from powerinfer.config import (  # noqa: E402
    AttentionConfig,
    EngineConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
)
from powerinfer.errors import ModelError, RequestError  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.bundle_types import choose_types  # noqa: E402
from powerinfer.formats.checkpoint import Checkpoint  # noqa: E402
from powerinfer.formats.layout import check, shapes  # noqa: E402
from powerinfer.formats.source import Source  # noqa: E402
from powerinfer.formats.tensors import RawTensor  # noqa: E402
from powerinfer.hardware.description import load as load_hardware  # noqa: E402
from powerinfer.hybrid.ffn import NeuronSplit  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu  # noqa: E402
from powerinfer.kernels import cpu  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.neurons import Tier  # noqa: E402
from powerinfer.placement.plan import PlanRequest, make_plan  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402
from powerinfer.prepare.packing import describe, pack  # noqa: E402
from powerinfer.prepare.training import check as check_training  # noqa: E402
from powerinfer.sparsity.attach import attach  # noqa: E402
from powerinfer.sparsity.selection import Selection, auto, select  # noqa: E402

ROPES = RopeConfig(dim=16), RopeConfig(theta=500.0, dim=32), RopeConfig(dim=8)
LAYERS = (
    LayerConfig(AttentionConfig(4, 2, 16, ROPES[0], qkv_bias=True), FfnConfig(96)),
    LayerConfig(AttentionConfig(2, 1, 32, ROPES[1], window=20), FfnConfig(64, "relu", gated=False, bias=True)),
    LayerConfig(AttentionConfig(6, 3, 16, qk_norm="width", scale=0.2), FfnConfig(160, "relu"), norms="both"),
    LayerConfig(AttentionConfig(3, 3, 8, ROPES[2], qk_norm="head", o_bias=True), FfnConfig(40, "relu2", gated=False)),
)
CONFIG = ModelConfig("unlike", 64, families.SIZES["vocab_size"], families.CONTEXT, 1e-5, LAYERS, name="Unlike")
RECTIFIED = [1, 2, 3]
ACTIVATIONS = {"silu": torch.nn.functional.silu, "relu": torch.relu, "relu2": lambda x: torch.relu(x) ** 2}


def tensors() -> dict[str, np.ndarray]:
    """Random float16 numbers as float32, by canonical name."""
    rng, values = np.random.default_rng(5), {}
    for name, shape in shapes(CONFIG):
        noise = rng.standard_normal(shape)
        if len(shape) == 2:
            noise = noise if name == "embed" else 1.5 * noise / np.sqrt(shape[1])
        else:
            noise = 0.5 * noise if name.endswith("bias") else 1 + 0.3 * noise
        values[name] = noise.astype(np.float16).astype(np.float32)
    return values


def checkpoint(folder: Path) -> Checkpoint:
    stored = {
        name: RawTensor("F32" if values.ndim == 1 else "F16", values.shape, data(values))
        for name, values in tensors().items()
    }
    check(CONFIG, "unlike")
    return Checkpoint(Source("gguf", folder / "model.gguf", CONFIG, {}, stored, []))


def data(values: np.ndarray) -> np.ndarray:
    return (values if values.ndim == 1 else values.astype(np.float16)).reshape(-1).view(np.uint8)


# --- the same in plain torch


def norm(x: Any, weight: Any) -> Any:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.norm_eps)


def rotated(x: Any, rope: RopeConfig) -> Any:
    """x [heads, T, dim]; pairs are (i, i + dim / 2)."""
    exponents = torch.arange(0, rope.dim, 2, dtype=x.dtype) / rope.dim
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / rope.theta**exponents
    (first, second), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(about: AttentionConfig, w: dict[str, Any], n: Any) -> Any:
    counts = {"q": about.n_heads, "k": about.n_kv_heads, "v": about.n_kv_heads}
    every = {part: n @ w[part].T + w.get(f"{part}_bias", 0) for part in "qkv"}
    if about.qk_norm == "width":
        every |= {part: norm(every[part], w[f"{part}_norm"]) for part in "qk"}
    heads = {part: every[part].view(len(n), count, -1).transpose(0, 1) for part, count in counts.items()}
    if about.qk_norm == "head":
        heads |= {part: norm(heads[part], w[f"{part}_norm"]) for part in "qk"}
    if about.rope is not None:
        heads |= {part: rotated(heads[part], about.rope) for part in "qk"}
    k, v = (heads[part].repeat_interleave(about.n_heads // about.n_kv_heads, dim=0) for part in "kv")
    scores = heads["q"] @ k.transpose(1, 2) * (about.head_dim**-0.5 if about.scale is None else about.scale)
    back = torch.arange(len(n))[:, None] - torch.arange(len(n))
    unseen = (back < 0) | (back >= (about.window or len(n)))
    attended = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v
    return attended.transpose(0, 1).reshape(len(n), -1) @ w["o"].T + w.get("o_bias", 0)


def ffn(about: FfnConfig, w: dict[str, Any], n: Any) -> Any:
    act, up = ACTIVATIONS[about.activation], n @ w["up"].T + w.get("up_bias", 0)
    hidden = act(n @ w["gate"].T) * up if about.gated else act(up)
    return hidden @ w["down"].T + w.get("down_bias", 0)


def reference(tokens: np.ndarray, dtype: Any, layers: tuple[LayerConfig, ...] = LAYERS) -> np.ndarray:
    """Logits [T, vocab]."""
    values = {name: torch.from_numpy(one).to(dtype) for name, one in tensors().items()}
    x = values["embed"][torch.from_numpy(tokens.astype(np.int64))]
    for number, layer in enumerate(layers):
        start = f"layers.{number}."
        w = {name.removeprefix(start): one for name, one in values.items() if name.startswith(start)}
        for part, compute in (("attn", attention), ("ffn", ffn)):
            about = layer.attention if part == "attn" else layer.ffn
            added = compute(about, w, norm(x, w[f"{part}_norm"]))
            x = x + (norm(added, w[f"{part}_out_norm"]) if layer.norms == "both" else added)
    return np.asarray((norm(x, values["final_norm"]) @ values["head"].T).numpy())


@pytest.fixture(scope="module")
def tokens() -> list[np.ndarray]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, CONFIG.vocab_size, families.TOKENS).astype(np.int32) for _ in range(3)]


@pytest.fixture(scope="module")
def truth(tokens: list[np.ndarray]) -> list[np.ndarray]:
    return [reference(one, torch.float64) for one in tokens]


@pytest.fixture(scope="module")
def allowed(tokens: list[np.ndarray], truth: list[np.ndarray]) -> float:
    return families.ROUNDING * families.rms(reference(tokens[0], torch.float32) - truth[0])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the model could be in, with its bundles."""
    folder = tmp_path_factory.mktemp("unlike")
    own = checkpoint(folder)
    pack(own, None, choose_types(own, "F16", "F16"))
    return folder


def engine_of(**options: Any) -> EngineConfig:
    settings = {"threads": 1, "context": families.CONTEXT, "kv_type": "f32", "prefill_chunk": families.TOKENS}
    return EngineConfig(**(settings | {"max_batch": 8, "trial": False} | options))


def check_answers(executor: Any, tokens: list[np.ndarray], truth: list[np.ndarray], allowed: float) -> None:
    """In small steps, as a prompt in pieces, and side by side."""
    assert families.rms(in_small_steps(executor, tokens[0]) - truth[0]) <= allowed
    pages = families.scattered_pages(executor, 1)[0]
    chunks = families.run_chunks(executor, tokens[0], [1, 40, 34], pages)
    assert families.rms(chunks - truth[0]) <= allowed
    together = side_by_side(executor, [one[:35] for one in tokens])
    off = [families.rms(ours - exact[:35]) for ours, exact in zip(together, truth, strict=True)]
    assert max(off) <= 2 * allowed


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_dense(tmp_path: Path, tokens: Any, truth: Any, allowed: float, kv_type: str) -> None:
    executor = load(checkpoint(tmp_path), engine_of(kv_type=kv_type))
    try:
        if kv_type == "f32":
            check_answers(executor, tokens, truth, allowed)
        pages = families.scattered_pages(executor, 2)
        whole = families.run_chunks(executor, tokens[0], [families.TOKENS], pages[0])
        assert np.array_equal(families.run_chunks(executor, tokens[0], [1] * families.TOKENS, pages[1]), whole)
        assert families.rms(whole - truth[0]) < 0.02 * families.rms(truth[0])  # 8 bits of keys and values
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        (0, {"rope": RopeConfig(theta=500.0, dim=16)}),
        (0, {"n_kv_heads": 4, "n_heads": 8, "head_dim": 8, "rope": None}),
        (1, {"window": 21}), (1, {"activation": "relu2"}), (2, {"scale": None}), (3, {"activation": "relu"}),
    ],
)  # fmt: skip
def test_a_wrong_layer_would_be_seen(tokens: Any, truth: Any, allowed: float, layer: int, change: Any) -> None:
    other = changed(replace(CONFIG, layers=(LAYERS[layer],)), **change).layers
    wrong = reference(tokens[0], torch.float64, (*LAYERS[:layer], *other, *LAYERS[layer + 1 :]))
    assert families.rms(wrong - truth[0]) > 100 * allowed


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[tuple[Any, Any]]:
    own, engine = checkpoint(folder), engine_of(**options)
    executor = load(own, engine)
    try:
        yield executor, attach(executor, own, engine, select(own, engine), lambda: list(range(40)))
    finally:
        executor.close()


def test_exact_skips_neurons_where_they_are_zero(packed: Path, tokens: Any, truth: Any, allowed: float) -> None:
    with opened(packed, selector="auto") as (executor, sparsity):
        check_answers(executor, tokens, truth, allowed)
        report = sparsity.report()
    assert report["selector"] == "exact"
    sparse = [layer for layer, one in enumerate(report["layers"]) if "exact" in one["ways"].values()]
    assert sparse == RECTIFIED
    assert [one["tokens"] > 0 for one in report["layers"]] == [layer in RECTIFIED for layer in range(4)]
    assert all(0.1 < report["layers"][layer]["active_fraction"] < 0.9 for layer in RECTIFIED)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_whole_layers_on_a_gpu(
    device: str, tmp_path: Path, tokens: Any, truth: Any, allowed: float, layers: int
) -> None:
    on_gpu: dict[str, Any] = {"device": UsedGpu(device), "placement": Placement(layers, layers == 4)}
    executor = load_split(Resolved(checkpoint(tmp_path), engine_of(), **on_gpu))
    try:
        check_answers(executor, tokens, truth, allowed)
    finally:
        executor.close()


@pytest.mark.parametrize("share", SPLITS)
def test_neurons_split_between_gpu_and_cpu(
    device: str, packed: Path, tokens: Any, truth: Any, allowed: float, share: float
) -> None:
    own = checkpoint(packed)
    bundles = open_bundles(own, None, cpu.bundle_row_bytes)
    selection = Selection("exact", "a test", (), bundles)
    for layers in (2, 4):
        parts = NeuronSplit(bundles, placed(CONFIG, share))
        resolved = Resolved(checkpoint(packed), engine_of(), selection, UsedGpu(device), Placement(layers, layers == 4))
        executor = load_split(resolved, parts)
        try:
            check_answers(executor, tokens, truth, allowed)
            assert len(parts.ffns) == layers
        finally:
            executor.close()


def test_a_layout_for_each_layer(packed: Path) -> None:
    own = checkpoint(packed)
    bundles = open_bundles(own, None, cpu.bundle_row_bytes)
    assert [layout.gated for layout in bundles.layouts] == [True, False, True, False]
    assert [rows.shape[0] for rows in bundles.layers] == [3, 2, 5, 2]
    wide, narrow = bundles.layouts[0].stride, bundles.layouts[1].stride
    assert wide * 2 == narrow * 3 and bundles.nbytes == 32 * (8 * wide + 4 * narrow)
    assert describe(bundles, None)["types"] == {"gate": "F16", "up": "F16", "down": "F16"}


def test_what_needs_zeros_in_every_layer_is_refused(packed: Path) -> None:
    own = checkpoint(packed)
    assert auto(own.config) == ("exact", "bundles are prepared")
    with pytest.raises(RequestError, match=r"no predictor can select neurons of the activation silu: use .* exact"):
        select(own, engine_of(selector="predicted"))
    with pytest.raises(RequestError, match="activations of silu are never exactly zero"):
        check_training(own, TrainConfig())


def test_heads_that_do_not_fit_are_refused_in_any_layer() -> None:
    for layer in range(4):
        wrong = changed(replace(CONFIG, layers=(LAYERS[layer],)), n_heads=5, n_kv_heads=2).layers
        with pytest.raises(ModelError, match="5 heads cannot share 2"):
            check(replace(CONFIG, layers=(*LAYERS[:layer], *wrong, *LAYERS[layer + 1 :])), "file")


@pytest.mark.parametrize("policy", ["time", "ilp", "greedy", "random"])
def test_a_plan_holds_its_budgets(packed: Path, policy: str) -> None:
    """Also where a neuron of some layers is larger than one of others."""
    shape, hardware = checkpoint_model(checkpoint(packed)), load_hardware("pc-low")
    whole = PlanRequest(
        shape, profile_for(CONFIG.ffn_sizes), hardware, context=128, selector="exact", policy=policy, insist=True
    )
    for vram in (whole.vram_for(1), whole.vram_for(3), whole.vram_for(99)):
        plan = make_plan(replace(whole, vram=vram))
        assert sum(plan.bytes["gpu"].values()) <= vram
        assert [sum(neurons.values()) for neurons in plan.neurons] == list(CONFIG.ffn_sizes)
    assert plan.claims.gpu_layers == 4
    if policy in ("time", "random"):  # the others have a least number of groups a layer
        assert any(neurons[Tier.GPU] for neurons in plan.neurons)
    each = [layout.stride - layout.gate_bytes for layout in shape.bundles]  # without first rows
    held = each[0] * (96 + 160) + each[1] * (64 + 40)
    alone = make_plan(replace(whole, vram=0))
    assert alone.bytes["cpu"]["ffn"] == held
