"""Predictors of neurons inside experts: their samples, what is learnt from them, and what the engine makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import FF, LAYERS, PLAIN_EXPERTS, SHARED, VOCAB, D, experts_gguf, mamba_gguf
from test_prepared import describe, edit_header, left_in

from benchmarks.models.gguf_writer import F32, STRING
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig, TrainConfig
from powerinfer.errors import ModelError, RequestError
from powerinfer.experts import LayerUse
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.expert_files import open_expert_profile, open_expert_profile_file, write_expert_profile
from powerinfer.formats.predictor_file import LayerPredictor
from powerinfer.formats.prepared import EXPERTS, SAMPLES, PreparedFile
from powerinfer.formats.quant import quantize
from powerinfer.formats.samples_file import SamplesFile, open_samples, row_bytes, write_samples
from powerinfer.prepare import expert_profiling, training
from powerinfer.prepare.corpus import Windows
from powerinfer.prepare.counting import Task
from powerinfer.prepare.expert_profiling import profile_experts
from powerinfer.prepare.fitting import LayerFit, split_rows
from powerinfer.prepare.training import train
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams

N, TOP, SIZE = 4, 2, 40  # experts, of a token; tokens of a window
ENGINE = EngineConfig(threads=2)
QUICK = TrainConfig(steps=200, batch=128, share=1.0, type="f16")


def predictable(folder: Path, directions: int = 3, activation: str = "relu", kind: int = 1) -> Path:
    """A tiny model whose experts' gates look at few directions, each at its own."""
    builder = experts_gguf().add("llama.hidden_act", STRING, activation)
    if activation == "cats":
        builder.add("llama.hidden_act_param", F32, 0.2)
    rng = np.random.default_rng(9)
    for tensor in [one for one in builder.tensors if "_exps" in one.name]:
        builder.tensors.remove(tensor)
        values = np.frombuffer(tensor.data, np.float32).reshape(tensor.dims[::-1])
        if "gate" in tensor.name or (activation == "drelu" and "up" in tensor.name):
            looks = rng.standard_normal((N, directions, D)) / directions**0.5
            values = (rng.standard_normal((N, FF, directions)) @ looks).astype(np.float32)
        values = values * np.float32(20 if "down" in tensor.name else 1)  # else attention hides what experts add
        builder.tensor(tensor.name, quantize(values.reshape(-1, values.shape[-1]), "F16"), kind, list(tensor.dims))
    return builder.write(folder / "m.gguf")


def task(windows: int = 60, rows: int | None = None, size: int = SIZE) -> Task:
    ids = np.random.default_rng(0).integers(0, VOCAB, (windows, size)).astype(np.int32)
    about = Windows(ids, ("a",), (windows,), "digest")
    return Task(about, windows * size if rows is None else rows, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With samples."""
    path = predictable(tmp_path_factory.mktemp("experts"))
    profile_experts(open_checkpoint(path), ENGINE, task())
    return path


@pytest.fixture(scope="module")
def trained(model: Path) -> Path:
    train(open_checkpoint(model), None, QUICK, threads=1)
    return model


def fires_of(samples: SamplesFile, layer: int) -> np.ndarray:
    """Bool [rows, TOP, FF]."""
    active = samples.layers[layer][1]
    return np.unpackbits(active, axis=1, bitorder="little").astype(bool).reshape(len(active), TOP, FF)


def named_by(one: LayerPredictor, x: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """What a predictor selects, bool [rows, TOP, FF]."""
    hidden = np.maximum(x.astype(np.float32) @ one.inner.float32().T, 0)
    z = (hidden @ one.outer.float32().T).reshape(len(x), N, FF)
    return np.take_along_axis(z, selected.astype(np.int64)[:, :, None], 1) >= one.predictor.threshold


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_samples_are_what_experts_read_and_compute(activation: str, tmp_path: Path) -> None:
    path = predictable(tmp_path, activation=activation)
    checkpoint = open_checkpoint(path)
    profile_experts(checkpoint, ENGINE, task(20, rows=300))
    samples = open_samples(checkpoint)
    assert samples.rows == 300 and len(samples.windows) == 20
    for layer in range(LAYERS):
        x = samples.layers[layer][0].astype(np.float64)
        scale = np.sqrt((x**2).mean(1, keepdims=True) + checkpoint.config.norm_eps)
        n = x / scale * checkpoint.take(f"layers.{layer}.ffn_norm").float32()
        scores = n @ checkpoint.take(f"layers.{layer}.router").float32().T
        selected = np.sort(np.argsort(-scores, axis=1)[:, :TOP], axis=1)
        same = (selected == samples.selected[layer]).all(1)
        assert same.mean() > 0.97, "but for near ties, in x of F16"
        gate, up = (
            np.einsum("roc,tc->tro", checkpoint.take(f"layers.{layer}.experts_{part}").float32().astype(np.float64), n)
            for part in ("gate", "up")
        )
        fires = (gate > 0) & ((up > 0) | (activation == "relu"))
        expected = np.take_along_axis(fires, selected[:, :, None], 1)[same]
        assert (expected != fires_of(samples, layer)[same]).mean() < 2e-3, "more than x in F16 explains"
        assert 0.1 < expected.mean() < 0.6


def test_the_trace_is_the_same_with_samples(model: Path, tmp_path: Path) -> None:
    """Observing experts changes nothing of what is counted."""
    other = predictable(tmp_path)
    made = profile_experts(open_checkpoint(other), ENGINE, task(rows=0))
    assert made.samples is None and left_in(tmp_path) == ["experts.safetensors", "m.gguf"]
    for one, two in zip(made.file.profile.layers, open_expert_profile(open_checkpoint(model)).layers, strict=True):
        for name in ("counts", "pairs", "distances"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        assert one.sampled is None and one.neuron_use is None and two.sampled is not None


def test_how_often_neurons_inside_experts_fire(model: Path) -> None:
    """What plain loops count of the samples; by places, the busiest of each expert first."""
    samples, profile = open_samples(open_checkpoint(model)), open_expert_profile(open_checkpoint(model))
    for use in profile.layers:
        fires, sampled, fired = fires_of(samples, use.layer), np.zeros(N, int), np.zeros((N, FF), int)
        for row, experts in enumerate(samples.selected[use.layer]):
            for place, expert in enumerate(experts):
                sampled[expert] += 1
                fired[expert] += fires[row, place]
        np.testing.assert_array_equal(use.sampled, sampled)
        np.testing.assert_array_equal(use.fired, fired)
        found = profile.neuron_use[use.layer]
        by_place = np.take_along_axis(fired, found.order.astype(int), 1)
        assert (np.diff(by_place, axis=1) <= 0).all() and (np.sort(found.order, axis=1) == np.arange(FF)).all()
        shares = np.average(by_place / np.maximum(sampled, 1)[:, None], axis=0, weights=sampled)
        assert abs(found.fires.mean() - shares.mean()) < 1e-9
        assert (np.abs(found.fires - shares) <= 0.05).all() and (np.diff(found.fires) <= 1e-12).all()


def test_a_profile_without_neurons_is_completed(model: Path, tmp_path: Path) -> None:
    """That of an earlier version, by its samples: nothing is computed again."""
    checkpoint, place = open_checkpoint(given(model, tmp_path)), PreparedFile(EXPERTS, open_checkpoint(model))
    file = open_expert_profile_file(open_checkpoint(model))
    layers = tuple(replace(one, sampled=None, fired=None) for one in file.profile.layers)
    path = write_expert_profile(checkpoint, None, replace(file.profile, layers=layers), file.details)
    assert profile_experts(checkpoint, ENGINE, task()).tokens == 0
    assert path.read_bytes() == place.path.read_bytes()


def test_what_chance_explains_is_not_expected_again() -> None:
    """Of neurons that fire alike some fire more often in few samples; where they differ, most of it is expected."""
    rng, tokens = np.random.default_rng(3), 60
    nothing = np.zeros((1, 8), np.int64)
    for spread in (0.0, 0.3):
        share = np.clip(rng.normal(0.4, spread, (8, 512)), 0.02, 0.98)
        use = LayerUse(
            0, 1, np.full((1, 8), tokens), np.zeros((8, 8), np.int64), None, np.append(nothing, [[8 * tokens]], axis=1),
            np.full(8, tokens), rng.binomial(tokens, share),
        ).neuron_use  # fmt: skip
        assert use is not None
        half = use.fires[:256].sum() / use.fires.sum()
        again = np.average(np.take_along_axis(share, use.order.astype(int), 1)[:, :256]) / share.mean() / 2
        assert abs(half - again) < 0.02 and (half < 0.52) == (spread == 0)


@pytest.mark.parametrize(("name", "value"), [("sampled", -1), ("sampled", 1 << 40), ("fired", 1 << 20)])
def test_neurons_that_fire_more_often_than_their_experts(name: str, value: int, model: Path, tmp_path: Path) -> None:
    path = given(model, tmp_path)
    profile = open_expert_profile(open_checkpoint(model))
    wrong = [replace(one, **{name: (damaged := getattr(one, name).copy())}) for one in profile.layers]
    damaged.reshape(-1)[3] = value
    write_expert_profile(open_checkpoint(path), None, replace(profile, layers=tuple(wrong)), {})
    with pytest.raises(ModelError, match=r"fire in layer 1 more often than their experts are selected; `powerinfer "):
        open_expert_profile(open_checkpoint(path))


def test_an_interrupted_profile_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, one = open_checkpoint(predictable(tmp_path)), task(6, rows=700, size=600)
    profile_experts(checkpoint, ENGINE, one)
    files = [PreparedFile(kind, checkpoint).path for kind in (EXPERTS, SAMPLES)]
    whole = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    monkeypatch.setattr(expert_profiling, "SAVE_EVERY", 0.0)
    notes: list[str] = []

    def until(label: str, least: int) -> Callable[[str, int, int], None]:
        def progress(now: str, done: int, total: int) -> None:
            if now == label and done >= least:
                raise KeyboardInterrupt

        return progress

    for label, least in (("profiling", 600), ("profiling", 2400)):
        with pytest.raises(KeyboardInterrupt):
            profile_experts(checkpoint, ENGINE, one, None, notes.append, until(label, least))
        assert not any(path.exists() for path in files), "nothing half-written has its name"
    (samples := files[1].with_name(files[1].name + ".part")).unlink()
    with pytest.raises(KeyboardInterrupt):  # samples are lost: from the beginning
        profile_experts(checkpoint, ENGINE, one, None, notes.append, until("counting", 1))
    assert notes == ["resuming: 600 of 3600 tokens are done"] and not samples.exists()
    assert profile_experts(checkpoint, ENGINE, one).tokens == 0, "only counting was left"
    assert [path.read_bytes() for path in files] == whole
    assert profile_experts(checkpoint, ENGINE, one).seconds == 0
    files[1].unlink()
    assert profile_experts(checkpoint, ENGINE, one).tokens == 3600, "samples are made again"
    assert [path.read_bytes() for path in files] == whole
    assert left_in(tmp_path) == ["experts.safetensors", "m.gguf", "samples.safetensors"]


def rewritten(path: Path, change: Callable[[np.ndarray], None]) -> None:
    """The samples of a model with other selected experts."""
    checkpoint = open_checkpoint(path)
    samples = open_samples(checkpoint)
    with write_samples(checkpoint, None, samples.rows, samples.windows, {}) as writer:
        for layer, (x, active) in samples.layers.items():
            selected = samples.selected[layer].copy()
            change(selected)
            writer.put(layer, 0, x.astype(np.float32), active, selected)


def given(model: Path, folder: Path) -> Path:
    """The model with its samples, in another folder."""
    target = folder / model.name
    for name in (model.name, f"{model.name}.powerinfer/samples.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((model.parent / name).read_bytes())
    return target


@pytest.mark.parametrize("value", [N, 65535, None], ids=str)
def test_samples_of_experts_that_are_not_there(value: int | None, model: Path, tmp_path: Path) -> None:
    path = given(model, tmp_path)

    def change(selected: np.ndarray) -> None:
        selected[7, 1] = selected[7, 0] if value is None else value

    rewritten(path, change)
    with pytest.raises(ModelError, match=r"selects no 2 different ones of 4 experts in layer 0; `powerinfer profile"):
        open_samples(open_checkpoint(path))


def test_samples_of_other_shapes(model: Path, tmp_path: Path) -> None:
    path = given(model, tmp_path)
    file = PreparedFile(SAMPLES, open_checkpoint(path))
    whole = file.path.read_bytes()

    def fewer(header: dict[str, dict[str, list[int]]]) -> None:
        header["layers.0.active"]["shape"][1] //= 2

    for edit in (fewer, lambda header: header.pop("layers.1.selected")):
        file.path.write_bytes(whole)
        edit_header(file, edit)
        with pytest.raises(ModelError, match="`powerinfer profile"):
            open_samples(open_checkpoint(path))
    file.path.write_bytes(whole)
    describe(file, lambda about: about.update(rows=1 << 39))
    with pytest.raises(ModelError, match="does not hold"):
        open_samples(open_checkpoint(path))


def test_bytes_of_a_row(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    assert row_bytes(checkpoint) == LAYERS * (2 * D + TOP * FF // 8 + 2 * TOP)


# ---------------------------------------------------------------- what is learnt


def test_few_directions_are_learnt(trained: Path) -> None:
    """Recall and shares are of the cells of selected experts, as anybody finds who computes them."""
    from powerinfer.formats.predictor_file import open_predictor

    checkpoint = open_checkpoint(trained)
    file, samples = open_predictor(checkpoint), open_samples(checkpoint)
    rows = split_rows(samples.rows, samples.windows)
    assert file.training is not None
    for (layer, one), told in zip(file.layers.items(), file.training["layers"], strict=True):
        assert one.outer.shape == (N * FF, one.predictor.rank) and one.predictor.rank == 32
        x, selected = samples.layers[layer][0][rows.report], samples.selected[layer][rows.report]
        fires, named = fires_of(samples, layer)[rows.report], named_by(one, x, selected)
        recall = (named & fires).sum() / fires.sum()
        assert recall > 0.97 and named.mean() - fires.mean() < 0.05
        assert recall == pytest.approx(told["recall"], abs=2e-4)
        assert named.mean() == pytest.approx(told["candidate_fraction"], abs=2e-4)
        assert fires.mean() == pytest.approx(told["active_fraction"])


def test_an_expert_counts_only_its_own_tokens(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    samples = open_samples(checkpoint)
    rows = split_rows(samples.rows, samples.windows)
    fit = LayerFit(checkpoint, 1, samples, rows, QUICK, "F16", "cpu")
    frequency = fit.frequency.reshape(N, FF)
    fires, selected = fires_of(samples, 1)[rows.train], samples.selected[1][rows.train]
    for expert in range(N):
        assert np.allclose(frequency[expert], fires[selected == expert].mean(0))
    assert fit.start_rank() > 0


def test_neurons_that_fire_on_both_sides_of_zero(tmp_path: Path) -> None:
    """Where they fire is approximated with least squares, of each expert over its own tokens; and training goes on."""
    checkpoint = open_checkpoint(predictable(tmp_path, 2, "cats"))
    profile_experts(checkpoint, ENGINE, task())
    samples = open_samples(checkpoint)
    rows = split_rows(samples.rows, samples.windows)
    config = replace(QUICK, steps=300, recall=0.97)
    fit = LayerFit(checkpoint, 0, samples, rows, config, "F16", "cpu")
    inner = np.random.default_rng(2).standard_normal((32, D))
    outer = fit._solved(torch.from_numpy(inner)).numpy().reshape(N, FF, 32)
    x, selected = samples.layers[0][0][rows.train].astype(np.float64), samples.selected[0][rows.train]
    hidden = np.maximum(x / np.sqrt((x**2).mean(1, keepdims=True) + checkpoint.config.norm_eps) @ inner.T, 0)
    fires = fires_of(samples, 0)[rows.train]
    for expert in range(N):
        own = selected == expert
        h, wanted = hidden[own.any(1)], fires[own].astype(np.float64)
        ridge = 1e-3 * np.square(h).sum(0).mean() * np.eye(32)
        expected = np.linalg.solve(h.T @ h + ridge, h.T @ wanted).T
        assert np.abs(outer[expert] - expected).max() < 1e-4 * np.abs(expected).max()
    with training.torch_threads(1):
        found, _ = fit.fit(32, lambda share: None)
    assert found.method == "trained" and found.figures.recall > 0.95
    assert found.figures.lost < 0.95 * found.svd.lost, (found.figures, found.svd)


def test_training_is_better_than_low_rank(tmp_path: Path) -> None:
    """Six directions of each of four experts do not fit into 32 units as pairs."""
    checkpoint = open_checkpoint(predictable(tmp_path, directions=6))
    profile_experts(checkpoint, ENGINE, task())
    samples = open_samples(checkpoint)
    rows = split_rows(samples.rows, samples.windows)
    with training.torch_threads(1):
        config = replace(QUICK, steps=800)
        fit = LayerFit(checkpoint, 0, samples, rows, config, "F16", "cpu")
        found, (inner, outer) = fit.fit(32, lambda share: None)
    assert found.method == "trained" and found.figures.recall > 0.97 and found.svd.recall > 0.97
    assert found.figures.lost < 0.95 * found.svd.lost, (found.figures, found.svd)
    assert inner.nbytes == 2 * 32 * D and outer.nbytes == 2 * N * FF * 32


@pytest.mark.parametrize("type_name", ["f16", "q8_0"])
def test_an_expert_that_few_tokens_had_is_selected_whole(type_name: str, model: Path, tmp_path: Path) -> None:
    from powerinfer.formats.predictor_file import open_predictor

    path = given(model, tmp_path)

    def change(selected: np.ndarray) -> None:  # expert 3 becomes another one
        for row in selected[selected[:, 1] == 3]:
            row[:] = 0
        selected[selected[:, 1] == 3] = [0, 1]

    rewritten(path, change)
    file = train(open_checkpoint(path), None, replace(QUICK, type=type_name, steps=40), threads=1).file
    samples = open_samples(open_checkpoint(path))
    assert open_predictor(open_checkpoint(path)).nbytes == file.nbytes
    for layer, one in file.layers.items():
        x = samples.layers[layer][0]
        others = named_by(one, x, np.full((len(x), TOP), 2))
        assert named_by(one, x, np.full((len(x), TOP), 3)).all() and not others.all()


def test_the_engine_finds_the_recall_that_was_told(trained: Path) -> None:
    from powerinfer.formats.predictor_file import open_predictor

    told = open_predictor(open_checkpoint(trained)).training
    assert told is not None
    tokens = []
    for selector in ("predicted", "all"):
        with LLM(trained, selector=selector, recall_every=1, threads=2, context=128, gpu="none") as llm:
            rng = np.random.default_rng(5)
            for _ in range(6):
                prompt = rng.integers(1, VOCAB, 4).tolist()
                settings = SamplingParams(max_tokens=60, temperature=1.5, seed=1, ignore_eos=True)
                tokens += llm.generate([prompt], settings)[0].token_ids
            if selector == "predicted":
                report = llm.sparsity
    assert report is not None and report["sampled"] > 200
    for found, layer in zip(report["layers"], told["layers"], strict=True):
        assert found["recall"] == pytest.approx(layer["recall"], abs=0.02)
        assert found["candidate_fraction"] == pytest.approx(layer["candidate_fraction"], abs=0.06)


def test_it_reads_less_than_exact(trained: Path) -> None:
    """Of small steps; on a model whose rows are long enough."""
    read = {}
    for selector in ("exact", "predicted"):
        with LLM(trained, selector=selector, recall_every=0, threads=1, context=128, gpu="none") as llm:
            llm.generate("abc", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
            report = llm.sparsity
            assert report is not None
            read[selector] = report["candidate_fraction"]
    assert read["predicted"] < read["exact"] + 0.05


# ---------------------------------------------------------------- commands


def test_from_a_text_to_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = predictable(tmp_path), tmp_path / "text.txt"
    letters = np.random.default_rng(1).choice(list("abcdefg "), 4000)
    text.write_text("".join(letters))

    def run(*flags: str) -> dict[str, object]:
        assert main([*flags, "-m", str(path), "--json"]) == 0
        result: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result

    with pytest.raises(ModelError, match=r"samples\.safetensors; `powerinfer profile"):
        train(open_checkpoint(path), None, QUICK)
    profiled = run("profile", "--corpus", str(text), "--window", "64")
    assert isinstance(profiled["samples"], dict) and profiled["samples"]["rows"] >= 512
    made = run("train", "--threads", "1", "--steps", "40", "--share", "1", "--type", "f16")
    assert made["recall"] > 0.95 and len(made["layers"]) == LAYERS  # type: ignore[operator, arg-type]
    assert run("train", "--threads", "1", "--steps", "40", "--share", "1", "--type", "f16")["seconds"] == 0.0
    flags = ("--selector", "predicted", "--file", str(text), "--context", "64", "--tokens", "200", "--gpu", "none")
    agreed = run("eval", "agreement", *flags)
    assert agreed["top1_agreement"] > 0.9 and agreed["recall"] > 0.95  # type: ignore[operator]
    assert run("inspect")["name"] is not None
    assert run("report")["path"] is not None
    assert run("plan", "--hardware", "pc-16gb", "--context", "64")["path"] is not None


def test_what_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(predictable(tmp_path, activation="silu"))
    with pytest.raises(RequestError, match="never exactly zero"):
        train(checkpoint, None, QUICK)
    assert profile_experts(checkpoint, ENGINE, task(3, rows=0)).samples is None


# ---------------------------------------------------------------- without gates, beside a shared one


def predictable_plain(folder: Path, directions: int = 3, latents: int = 0) -> Path:
    """A tiny model of three layers, of which the first has no FFN; rows of up look at few directions."""
    builder, rng = mamba_gguf("*EE", latents), np.random.default_rng(9)
    for tensor in [one for one in builder.tensors if "exp" in one.name and one.name.endswith("weight")]:
        builder.tensors.remove(tensor)
        values = np.frombuffer(tensor.data, np.float32).reshape(tensor.dims[::-1])
        if "up" in tensor.name:
            looks = rng.standard_normal((directions, values.shape[-1])) / directions**0.5
            values = (rng.standard_normal((*values.shape[:-1], directions)) @ looks).astype(np.float32)
        builder.tensor(tensor.name, quantize(values.reshape(-1, values.shape[-1]), "F16"), 1, list(tensor.dims))
    return builder.write(folder / "m.gguf")


@pytest.mark.parametrize("latents", [0, 32])
def test_neurons_without_gates_are_learnt(
    latents: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the shared expert, too, which every token has; what is told is what a run finds."""
    from powerinfer.formats.predictor_file import open_predictor

    path = predictable_plain(tmp_path, latents=latents)
    checkpoint = open_checkpoint(path)
    profile_experts(checkpoint, ENGINE, task(rows=1800))
    samples = open_samples(checkpoint)
    assert sorted(samples.layers) == [1, 2] == list(checkpoint.config.predicted_layers)
    assert row_bytes(checkpoint) == 2 * (2 * D + (TOP * FF + SHARED) // 8 + 2 * TOP)
    train(checkpoint, None, QUICK, threads=1)
    file = open_predictor(checkpoint)
    rows = split_rows(samples.rows, samples.windows).report
    assert sorted(file.layers) == [1, 2] and file.training is not None
    for (layer, one), told in zip(file.layers.items(), file.training["layers"], strict=True):
        assert one.outer.shape == (PLAIN_EXPERTS * FF + SHARED, one.predictor.rank) and told["layer"] == layer
        x, selected = samples.layers[layer][0][rows].astype(np.float32), samples.selected[layer][rows].astype(np.int64)
        scale = np.sqrt((x**2).mean(1, keepdims=True) + checkpoint.config.norm_eps)
        n = x / scale * checkpoint.take(f"layers.{layer}.ffn_norm").float32()
        z = np.maximum(x @ one.inner.float32().T, 0) @ one.outer.float32().T >= one.predictor.threshold
        both = []
        ups = [checkpoint.take(f"layers.{layer}.{of}_up").float32() for of in ("experts", "shared")]
        if latents:
            ups[0] = ups[0] @ checkpoint.take(f"layers.{layer}.latent_in").float32()
        ups = [up.reshape(-1, D) for up in ups]
        for values in (z, n @ np.concatenate(ups).T > 0):
            of_experts = values[:, : PLAIN_EXPERTS * FF].reshape(len(x), PLAIN_EXPERTS, FF)
            own = np.take_along_axis(of_experts, selected[:, :, None], 1).reshape(len(x), -1)
            both.append(np.concatenate([own, values[:, PLAIN_EXPERTS * FF :]], axis=1))
        named, fires = both
        bits = np.unpackbits(samples.layers[layer][1][rows], axis=1, bitorder="little").astype(bool)
        assert (bits != fires).mean() < 2e-3, "more than x in F16 explains"
        recall = (named & fires).sum() / fires.sum()
        assert recall == pytest.approx(told["recall"], abs=2e-3) and recall > 0.97
        assert named.mean() == pytest.approx(told["candidate_fraction"], abs=2e-3)
        assert named.mean() - fires.mean() < 0.1
    text = tmp_path / "text.txt"
    text.write_text("ab ba " * 40)
    flags = ["--selector", "predicted", "--file", str(text), "--context", "32", "--gpu", "none", "--json"]
    assert main(["eval", "agreement", "-m", str(path), *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["recall"] > 0.9 and result["candidate_fraction"] < 0.8 and result["bytes_per_token"] > 0
    assert main(["inspect", "-m", str(path)]) == 0
    assert "predictor" in capsys.readouterr().out
