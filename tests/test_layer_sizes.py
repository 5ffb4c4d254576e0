"""A model whose layers have FFNs of several sizes: read, packed, profiled, planned, and run every way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from model_files import FF, D, gguf_name, tiny_fields, weights
from sparse_models import CHAT, TEXT, give_bundles, give_predictor, give_profile, profile_for

from benchmarks.models.gguf_writer import ARRAY, STRING, U32, Array
from powerinfer import LLM
from powerinfer.evaluate import agreement
from powerinfer.formats.bundle_file import open_bundles
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.predictor_file import open_predictor
from powerinfer.formats.profile_file import open_profile
from powerinfer.hardware.description import load
from powerinfer.kernels import cpu
from powerinfer.neurons import Tier
from powerinfer.placement.plan import PlanRequest, kept_document, make_plan, save_plan
from powerinfer.placement.shapes import checkpoint_model, described_model

SIZES = (FF, FF // 3)  # 96 and 32: one group of bundles, and a few


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = tiny_fields().put("llama.feed_forward_length", ARRAY, Array(U32, list(SIZES)))
    builder.add("llama.hidden_act", STRING, "relu").add("tokenizer.chat_template", STRING, CHAT)
    for name, values in weights("llama").items():
        if name.startswith("layers.1.") and FF in values.shape:
            values = values[:, : SIZES[1]] if values.shape == (D, FF) else values[: SIZES[1]]
        builder.tensor(gguf_name(name), np.ascontiguousarray(values.astype(np.float16).astype(np.float32)))
    path = builder.write(tmp_path_factory.mktemp("sizes") / "m.gguf")
    return give_profile(give_predictor(give_bundles(path), -1e6))


def opened(path: Path, selector: str, **options: object) -> LLM:
    return LLM(path, selector=selector, threads=2, kv_type="f32", trial=False, context=128, **options)


def test_what_is_prepared_has_the_sizes_of_the_layers(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    assert checkpoint.config.ffn_sizes == SIZES
    assert open_profile(checkpoint).sizes == SIZES
    assert tuple(layer.outer.shape[0] for layer in open_predictor(checkpoint).layers.values()) == SIZES
    assert [len(rows) for rows in open_bundles(checkpoint, None, cpu.bundle_row_bytes).layers] == [3, 1]


@pytest.mark.parametrize("selector", ["exact", "predicted"])
def test_sparse_decode_is_the_dense_answer(model: Path, selector: str) -> None:
    with opened(model, selector) as llm, opened(model, "all") as dense:
        result = agreement(llm, dense, TEXT, 96, 100, 1)
        assert result.top1_agreement == 1 and 0 < result.max_abs_logit_diff < 1e-3  # predictors that select everything
        report = llm.sparsity
    assert 0.2 < report["active_fraction"] < 0.8
    assert [layer["tokens"] for layer in report["layers"]] == [100, 100]


def test_a_profile_counts_each_layers_neurons(model: Path, tmp_path: Path) -> None:
    from powerinfer.cli.main import main

    text = tmp_path / "text.txt"
    text.write_text(TEXT * 4)
    flags = ["--corpus", str(text), "--window", "64", "--prepared", str(tmp_path / "p")]
    assert main(["profile", "-m", str(model), *flags]) == 0
    made = open_profile(open_checkpoint(model), str(tmp_path / "p"))
    assert made.sizes == SIZES and all(0.2 < made.active_fraction(layer) < 0.8 for layer in range(2))
    assert all(histogram.sum() == made.tokens for histogram in made.active)


@pytest.mark.parametrize("policy", ["time", "ilp", "greedy", "random"])
def test_a_plan_places_each_layers_neurons(model: Path, policy: str, tmp_path: Path) -> None:
    shape = checkpoint_model(open_checkpoint(model))
    request = PlanRequest(
        shape, profile_for(SIZES), load("pc-low"), context=128, selector="exact", policy=policy, insist=True
    )
    plan = make_plan(request)
    assert [sum(neurons.values()) for neurons in plan.neurons] == list(SIZES)
    placement = plan.placement(request.profile)
    for layer, neurons in enumerate(plan.neurons):
        assert {tier: len(part) for tier, part in placement.split_by_tier(layer).items()} == neurons
    if plan.claims.gpu_layers and policy in ("time", "random"):  # the others have a least number of groups a layer
        assert any(neurons[Tier.GPU] for neurons in plan.neurons)
    document = plan.document(save_plan(plan, tmp_path))
    assert kept_document(tmp_path, request) == document and document.bytes == plan.bytes


def test_a_described_model_has_predictors_of_each_layers_size(model: Path) -> None:
    config = open_checkpoint(model).config
    shape = described_model(config, "f16", "sizes", 0.5)
    (_, large), (_, small) = shape.predictors
    assert large.stored == 3 * small.stored
