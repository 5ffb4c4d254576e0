"""Models of which most layers have no FFN, as the dense ones of Nemotron-H: profile, bundles, predictors, two devices,
plans and disk, against the answer with every neuron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import families  # noqa: E402
import test_disk_neurons  # noqa: E402
from families import case_named  # noqa: E402
from model_files import mamba_gguf  # noqa: E402
from sparse_models import TEXT, predictors_of, profile_for, some_neurons  # noqa: E402
from test_gpu_layers import on_gpu  # noqa: E402
from test_hybrid import placed  # noqa: E402
from test_sparse import opened  # noqa: E402
from truth import Truth  # noqa: E402

from benchmarks.models.gguf_writer import U32, Builder  # noqa: E402
from powerinfer import LLM, ModelError  # noqa: E402
from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.devices import Batch  # noqa: E402
from powerinfer.devices.disk import OnDisk  # noqa: E402
from powerinfer.errors import RequestError  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.bundle_types import choose_types  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.predictor_file import open_predictor, write_predictor  # noqa: E402
from powerinfer.formats.profile_file import open_profile  # noqa: E402
from powerinfer.formats.quant import block_type, quantize  # noqa: E402
from powerinfer.formats.samples_file import open_samples  # noqa: E402
from powerinfer.hardware.description import load as load_hardware  # noqa: E402
from powerinfer.hybrid.ffn import NeuronSplit  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolved import Resolved  # noqa: E402
from powerinfer.kernels import cpu  # noqa: E402
from powerinfer.neurons import Tier  # noqa: E402
from powerinfer.placement.disk import DiskPlan  # noqa: E402
from powerinfer.placement.plan import POLICIES, PlanRequest, kept_document, make_plan, save_plan  # noqa: E402
from powerinfer.placement.request import shape_subject  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model, find_shape, stored_types  # noqa: E402
from powerinfer.prepare.packing import current, pack  # noqa: E402
from powerinfer.sparsity.selection import auto, select  # noqa: E402

BLOCKS = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"]}
FFNS = [1, 3, 5]
LAYOUTS = ["gguf", "folder"]
PATTERN = "M-*-M-"


def truth_of(layout: str) -> Truth:
    return Truth(case_named("nemotron-h"), layout, half=True, **BLOCKS)


def packed(model: Truth, folder: Path) -> Path:
    """The model's file or folder, with bundles that hold its weights exactly."""
    path = model.save(model.layout, folder)
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint, "F16", "F16"))
    return path


def decoded(executor: Any, tokens: np.ndarray, chunks: list[int] | None = None) -> np.ndarray:
    pages = families.scattered_pages(executor, 1)[0]
    return families.run_chunks(executor, tokens, chunks or [1] * len(tokens), pages)


def side_by_side(executor: Any, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of sequences whose tokens are computed together, each with a state of its own."""
    pages = families.scattered_pages(executor, len(sequences))
    each = np.arange(len(sequences), dtype=np.int32)
    steps = [
        Batch(np.array(tokens, np.int32), np.full(len(each), at, np.int32), each, pages, *[each] * 3)
        for at, tokens in enumerate(zip(*sequences, strict=True))
    ]
    return list(np.stack([executor.forward(batch).copy() for batch in steps], axis=1))


def check_answers(executor: Any, model: Truth) -> None:
    """Token by token, behind a prompt, and side by side."""
    truth, allowed = model.logits, model.allowed()
    assert families.rms(decoded(executor, model.texts[0]) - truth[0]) <= allowed
    chunks = [50, *[1] * (len(truth[0]) - 50)]
    assert families.rms(decoded(executor, model.texts[0], chunks) - truth[0]) <= allowed
    together = side_by_side(executor, [one[:20] for one in model.texts])
    assert max(families.rms(own - one[:20]) for own, one in zip(together, truth, strict=True)) <= 2 * allowed


# --- the CPU


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_is_the_dense_answer(layout: str, tmp_path: Path) -> None:
    model = truth_of(layout)
    path = packed(model, tmp_path)
    assert auto(open_checkpoint(path).config) == ("exact", "bundles are prepared")
    with opened(path, selector="exact") as (executor, sparsity):
        assert sparsity is not None and list(executor.ffns) == FFNS
        check_answers(executor, model)
        report = sparsity.report()
        assert [one["layer"] for one in report["layers"]] == FFNS
        assert all(one["tokens"] and 0.2 < one["active_fraction"] < 0.8 for one in report["layers"])
        sparse = decoded(executor, model.texts[0])
        with sparsity.suspended():
            dense = decoded(executor, model.texts[0])
        assert families.rms(sparse - dense) <= model.allowed()


def test_predicted_is_the_answer_without_the_others(tmp_path: Path) -> None:
    """Neurons that no predictor selects have no part in it, as if their rows of up were zero."""
    model = truth_of("gguf")
    path, kept = packed(model, tmp_path), some_neurons(len(FFNS), model.config.intermediate_size)
    about, weights = predictors_of(kept, model.config.hidden_size)
    write_predictor(open_checkpoint(path), None, "F16", [None, about] * 3, weights)
    wide = model.model
    with torch.no_grad():
        for layer, own in zip(FFNS, kept, strict=True):
            wide.model.layers[layer].mixer.up_proj.weight[~own] = 0
    truth = families.exact_logits(model.case, model.config, wide, model.texts[0])
    assert families.rms(truth - model.logits[0]) > 100 * model.allowed()
    with opened(path, selector="predicted") as (executor, sparsity):
        assert sparsity is not None
        assert families.rms(decoded(executor, model.texts[0]) - truth) <= model.allowed()
        assert [one["layer"] for one in sparsity.report()["layers"]] == FFNS
        assert sparsity.report()["candidate_fraction"] == pytest.approx(kept.mean())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with Mamba2, attention and MLPs."""
    return hybrid().write(tmp_path / "m.gguf")


def hybrid() -> Builder:
    return mamba_gguf(PATTERN).put("nemotron_h.context_length", U32, 512)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a profile and its samples, bundles and predictors, as the commands make them."""
    folder = tmp_path_factory.mktemp("prepared")
    path = hybrid().write(folder / "m.gguf")
    (folder / "text.txt").write_text(TEXT * 3)
    assert main(["profile", "-m", str(path), "--corpus", str(folder / "text.txt"), "--window", "64"]) == 0
    assert main(["train", "-m", str(path), "--steps", "0", "--share", "0.9", "--recall", "0.9"]) == 0
    assert main(["pack", "-m", str(path), "--no-check"]) == 0
    return path


def test_a_profile_counts_the_layers_that_have_neurons(prepared: Path) -> None:
    checkpoint = open_checkpoint(prepared)
    profile, samples = open_profile(checkpoint), open_samples(checkpoint)
    assert profile.sizes == (0, 96, 0, 96, 0, 96) and list(profile.layers) == FFNS
    assert samples.rows == profile.tokens > 500
    assert list(samples.layers) == FFNS
    for layer, (x, active) in samples.layers.items():
        fires = np.unpackbits(active, axis=1, bitorder="little")[:, : profile.sizes[layer]]
        assert np.array_equal(fires.sum(axis=0), profile.counts[layer])
        assert x.shape[1] == 64 and profile.active[layer].sum() == profile.tokens
    assert 0.2 < profile.active_fraction() < 0.8 and profile.hot_share(0) == profile.active_fraction(0) == 0
    assert profile.hot_share() == pytest.approx(np.mean([profile.hot_share(layer) for layer in FFNS]), abs=0.1)


def test_predictors_are_trained_for_them(prepared: Path) -> None:
    file = open_predictor(open_checkpoint(prepared))
    assert list(file.layers) == FFNS and file.training is not None
    assert [one["layer"] for one in file.training["layers"]] == FFNS
    assert all(one["recall"] > 0.85 for one in file.training["layers"])
    with opened(prepared, selector="predicted") as (executor, sparsity):
        assert sparsity is not None
        decoded(executor, np.array([7, 5, 9, 11, 6, 20] * 12, np.int32)[: families.TOKENS])
        assert sparsity.report()["sampled"] and sparsity.report()["recall"] > 0.7


def test_a_trial_is_of_ffns(prepared: Path) -> None:
    with LLM(prepared, threads=1, gpu="none", context=128, max_batch=1, selector="exact", retrial=True) as first:
        ways = {one["layer"]: one["ways"]["1"] for one in (first.sparsity or {"layers": []})["layers"]}
    assert list(ways) == FFNS and set(ways.values()) <= {"dense", "exact"}
    with LLM(prepared, threads=1, gpu="none", context=128, max_batch=1, selector="exact") as again:
        assert {one["layer"]: one["ways"]["1"] for one in again.sparsity["layers"]} == ways
        assert "earlier" in str(again.choices["trial"])


def test_a_report_has_the_layers_by_number(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from powerinfer.report.findings import findings
    from powerinfer.report.sections import Plots, activations, layer_section, predictors

    class Undrawn(Plots):
        def add(self, section: Any, name: str, caption: str, draw: Any) -> None:
            pass

    kept = findings(open_checkpoint(prepared))
    assert kept.profile.value is not None and kept.predictor.value is not None and not kept.lacking[:-1]
    drawn = Undrawn(1)
    columns = [activations(kept.profile.value, drawn)[2], predictors(kept.predictor.value, drawn)[2]]
    (table,) = layer_section(kept.profile.value, kept.predictor.value, columns, drawn).tables
    assert [row[0] for row in table.rows] == ["1", "3", "5"] and not any("–" in row for row in table.rows)
    assert main(["inspect", "-m", str(prepared)]) == 0
    assert "exact (bundles are prepared)" in capsys.readouterr().out


def in_types(builder: Builder, kinds: dict[str, str]) -> Builder:
    """The same with tensors in these types, by a part of their names."""
    for tensor in builder.tensors:
        for name, kind in kinds.items():
            if name in tensor.name:
                values = np.frombuffer(tensor.data, np.float32).reshape(-1, tensor.dims[0])
                tensor.type_id, tensor.data = block_type(kind).id, quantize(values, kind).tobytes()
    return builder


@pytest.mark.parametrize(
    ("kind", "down"),
    [("Q5_0", "Q5_0X32"), ("Q4_0", "Q4_0X32"), ("Q4_1", "Q4_1X32"), ("MXFP4", "MXFP4X32"), ("Q5_1", "Q5_1X32"),
     ("Q8_0", "Q8_0")],
)  # fmt: skip
def test_types_of_its_files_are_packed_as_they_are(kind: str, down: str, tmp_path: Path) -> None:
    """Rows of 96 numbers, no multiple of 256, are blocks of 32 in a file."""
    path = in_types(hybrid(), {"ffn_": kind}).write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    result = pack(checkpoint, None, choose_types(checkpoint))
    assert result.bundles.types[1] == down and (result.error["down"] == 0) == (kind != "Q8_0")
    check_exact(path)


def check_exact(path: Path) -> None:
    """`exact` gives the dense answer, within the rounding of activations to 8 bits."""
    tokens = np.random.default_rng(2).integers(1, 40, 60).astype(np.int32)
    with opened(path, selector="exact") as (executor, sparsity):
        assert sparsity is not None
        ours = decoded(executor, tokens)
        assert 0.2 < sparsity.report()["active_fraction"] < 0.8
        with sparsity.suspended():
            dense = decoded(executor, tokens)
    assert families.rms(ours - dense) < 0.02 * families.rms(dense)


@pytest.mark.usefixtures("device")
def test_a_type_of_down_for_each_layer(tmp_path: Path) -> None:
    """As in files of Nemotron Nano 9B v2 that are called Q4_K_M: blocks of 32 stay, what is Q8_0 is rounded anew."""
    kinds = {"blk.1.ffn_down": "Q5_0", "blk.3.ffn_down": "Q8_0", "blk.5.ffn_down": "Q4_0", "ffn_up": "Q5_0"}
    path = in_types(hybrid(), kinds).write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    types = choose_types(checkpoint)
    assert types.downs[1::2] == ("Q5_0X32", "Q8_0", "Q4_0X32")
    assert types.notes == ("up: Q5_0 becomes Q8_0",) and types.down == "Q5_0X32, Q8_0, Q4_0X32"
    result = pack(checkpoint, None, types)
    assert 0.004 < result.error["down"] < 0.006, "of the layer that changes"
    assert current(checkpoint, None, types) is not None
    assert [layout.down_type for layout in result.bundles.layouts][1::2] == list(types.downs[1::2])
    check_exact(path)
    tokens = np.random.default_rng(2).integers(1, 40, 30).astype(np.int32)
    with split(path, 0.0, 6) as (executor, _):
        cold = decoded(executor, tokens)
    for share in (0.5, 1.0):
        with split(path, share, 6) as (executor, _):
            assert families.rms(decoded(executor, tokens) - cold) < 0.02 * families.rms(cold)
    shape, hardware = checkpoint_model(checkpoint), load_hardware("pc-low")
    request = PlanRequest(shape, profile_for(shape.config.ffn_sizes), hardware, context=128, insist=True)
    plan = make_plan(replace(request, vram=request.vram_for(3)))
    assert sum(plan.bytes["gpu"].values()) <= request.vram_for(3) and any(own[Tier.GPU] for own in plan.neurons)


# --- two devices


@contextmanager
def split(path: Path, share: float, layers: int, slots: int | None = None, **options: Any) -> Iterator[Any]:
    """The first layers on a GPU with this share of their neurons. slots: neurons of each layer in RAM, of those that
    rest on disk; None: all that the GPU does not have."""
    checkpoint = open_checkpoint(path)
    engine = EngineConfig(
        threads=1, context=families.CONTEXT, kv_type="f32", prefill_chunk=families.TOKENS, max_batch=4, trial=False,
        disk="direct", selector="exact",
    )  # fmt: skip
    engine = replace(engine, **options)
    selection, config = select(checkpoint, engine), checkpoint.config
    assert selection.bundles is not None
    profile = profile_for(config.ffn_sizes)
    parts = NeuronSplit(
        selection.bundles, placed(config, share), predictors=selection.predictors, frequency=profile.fraction
    )
    rest = None if slots is None else DiskPlan(OnDisk(neurons=dict.fromkeys(config.neurons, slots)), {}, 0)
    where = on_gpu(layers, head=layers == config.n_layers)
    executor = load_split(Resolved(checkpoint, engine, selection, **where).placed(disk=rest), parts)
    try:
        if slots is not None:
            for ffn in parts.ffns:
                ffn.fill()
        yield executor, parts.ffns
    finally:
        executor.close()


@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.usefixtures("device")
def test_neurons_split_between_gpu_and_cpu(layers: int, tmp_path: Path) -> None:
    model = truth_of("gguf")
    path = packed(model, tmp_path)
    for share in (0.0, 0.5, 1.0):
        with split(path, share, layers) as (executor, ffns):
            assert [ffn.layer for ffn in ffns] == [layer for layer in FFNS if layer < layers]
            check_answers(executor, model)


@pytest.mark.usefixtures("device")
def test_neurons_on_disk_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of neurons in RAM."""
    monkeypatch.setattr(model_files, "FF", 384)
    path = hybrid().write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint))
    about, weights = predictors_of(some_neurons(len(FFNS), 384), checkpoint.config.d_model)
    write_predictor(checkpoint, None, "F16", [None, about] * 3, weights)
    tokens = np.random.default_rng(2).integers(1, 40, 40).astype(np.int32)
    for selector in ("exact", "predicted"):
        with split(path, 0.3, 6, selector=selector) as (executor, _):
            right = decoded(executor, tokens)
        with split(path, 0.3, 6, 128, selector=selector) as (executor, ffns):
            assert len(ffns) == 3
            np.testing.assert_array_equal(decoded(executor, tokens), right)
            assert executor.disk is not None and executor.disk.counts()["hits"] < executor.disk.counts()["wanted"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_places_neurons_where_there_are_any(path: Path, policy: str) -> None:
    shape, hardware = checkpoint_model(open_checkpoint(path)), load_hardware("pc-low")
    sizes = shape.config.ffn_sizes
    whole = PlanRequest(shape, profile_for(sizes), hardware, context=128, selector="exact", policy=policy, insist=True)
    for vram in (whole.vram_for(1), whole.vram_for(3), whole.vram_for(99)):
        plan = make_plan(replace(whole, vram=vram))
        assert sum(plan.bytes["gpu"].values()) <= vram and plan.claims.gpu_layers == 6
        assert [sum(neurons.values()) for neurons in plan.neurons] == list(sizes)
        assert not any(number for layer, number in enumerate(plan.choice.gpu) if layer not in FFNS)
        placement = plan.placement(plan.request.profile)
        assert [len(placement.split_by_tier(layer)[Tier.GPU]) for layer in range(6)] == [
            own[Tier.GPU] for own in plan.neurons
        ]
        assert all(own["sync"] == 0 for at, own in enumerate(plan.choice.layer_seconds) if at not in FFNS)


def test_a_plan_fills_the_memories_with_neurons(tmp_path: Path) -> None:
    """All that two small memories hold is used: layers without neurons take no room."""
    shape = find_shape("nemotron-nano-9b-v2")
    subject = shape_subject("nemotron-nano-9b-v2", None, "exact")
    machine = load_hardware("pc-low")
    request = PlanRequest(subject.model, subject.profile, machine, context=2048, selector="exact", requests=1)
    plan = make_plan(replace(request, vram=5 << 30))
    assert plan.fits and 0 < plan.activations["gpu"] < 1
    needed = sum(plan.bytes["cpu"].values())
    without_disk = replace(machine, disk=None)
    assert make_plan(replace(plan.request, hardware=without_disk, ram=needed + (8 << 20))).fits
    beyond = make_plan(replace(plan.request, ram=needed - (200 << 20)))
    assert beyond.loads and not beyond.fits
    path = save_plan(beyond, tmp_path)
    found = kept_document(tmp_path, beyond.request)
    assert path.exists() and found is not None and found.sizes == shape.config.ffn_sizes
    for selector in ("exact", "predicted"):
        alone = make_plan(replace(request, vram=0, ram=4 << 30, selector=selector))
        assert alone.claims.disk is not None and list(alone.claims.disk.about.neurons) == list(shape.config.neurons)
        assert alone.from_disk is not None and 0 < (alone.from_disk.hits or 0) < 1
    assert {stored_types(shape.config, "q4_k_m")[f"layers.1.{part}"] for part in ("up", "down")} <= {"Q5_0", "Q8_0"}


# --- disk


@pytest.mark.parametrize("selector", ["exact", "predicted"])
def test_neurons_are_read_from_disk(selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with all of them in RAM; the next layer that has neurons is foreseen, whatever lies between."""
    monkeypatch.setattr(model_files, "FF", test_disk_neurons.NEURONS)
    path = test_disk_neurons.prepared(hybrid().write(tmp_path / "m.gguf"), ("F16", "F16"))
    tokens = np.random.default_rng(2).integers(1, 40, 70).astype(np.int32)
    whole = test_disk_neurons.in_memory(path, selector)
    right = decoded(whole, tokens)
    whole.close()
    disk = test_disk_neurons.opened(path, selector, test_disk_neurons.FEWEST)
    np.testing.assert_array_equal(decoded(disk.executor, tokens), right)
    counts = disk.tier.counts()
    assert 0 < counts["hits"] < counts["wanted"] and bool(counts["guessed"]) == (selector == "predicted")
    disk.executor.close()


def test_what_has_no_ffn_has_nothing_to_prepare(tmp_path: Path) -> None:
    path = mamba_gguf("M*M").write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.whole_reason == "no layer has an FFN" and auto(checkpoint.config)[0] == "all"
    with pytest.raises(RequestError, match=r"pack: no layer has an FFN; the model runs with --selector all"):
        pack(checkpoint, None, choose_types(checkpoint, "F16", "F16"))


def test_bundles_of_another_pattern_are_refused(path: Path, tmp_path: Path) -> None:
    other = mamba_gguf("-M*-M-").write(tmp_path / "other.gguf")
    for one in (path, other):
        checkpoint = open_checkpoint(one)
        pack(checkpoint, None, choose_types(checkpoint))
    (tmp_path / "m.gguf.powerinfer" / "neurons.safetensors").replace(
        tmp_path / "other.gguf.powerinfer" / "neurons.safetensors"
    )
    with pytest.raises(ModelError, match="made for another model"):
        open_bundles(open_checkpoint(other), None, cpu.bundle_row_bytes)
