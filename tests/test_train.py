"""Training predictors: what is learnt from samples of a known kind, how large it gets, and what it says of itself."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import FF, LAYERS, VOCAB, D, family_gguf, gguf_name, give_limits, tiny_fields, weights
from prepared_models import checkpoint
from sparse_models import give_bundles
from test_prepared import describe, left_in

from benchmarks.models.gguf_writer import F32, STRING, Builder
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig, TrainConfig
from powerinfer.devices import Batch
from powerinfer.devices.cpu import Fired
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats import prepared
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.predictor_file import PredictorFile, open_predictor
from powerinfer.formats.prepared import PREDICTOR, PreparedFile
from powerinfer.formats.samples_file import SamplesFile, open_samples, write_samples
from powerinfer.models import load
from powerinfer.prepare import fitting, training
from powerinfer.prepare.adam import Adam
from powerinfer.prepare.fitting import LayerFit, margins, split_rows
from powerinfer.prepare.training import MIN_ROWS, current, model_bytes, train
from powerinfer.progress import silent
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams

ROWS, WINDOW = 2000, 40
QUICK = TrainConfig(steps=200, batch=128, share=1.0, type="f16")


def few_directions(path: Path, directions: int, activation: str = "relu", limits: bool | float = False) -> Path:
    """A tiny LLaMA whose gates look at few directions of what they read: with ReLU so many suffice to predict them.

    limits: with thresholds of the neurons, or this one for all of them.
    """
    builder = tiny_fields("llama").add("llama.hidden_act", STRING, activation)
    rng = np.random.default_rng(9)
    for name, values in weights("llama").items():
        if name.endswith("gate"):
            values = rng.standard_normal((FF, directions)) @ rng.standard_normal((directions, D)) / directions**0.5
        if name.endswith("ffn_norm"):
            values = 1 + 0.1 * values
        builder.tensor(gguf_name(name), values.astype(np.float32))
    if limits is True:
        give_limits(builder, np.linspace(0.12, 0.24, FF, dtype=np.float32))
    elif limits:
        builder.add("llama.hidden_act_param", F32, limits)
    return builder.write(path)


class Samples:
    """Takes what an executor shows."""

    def __init__(self) -> None:
        self.x: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
        self.active: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]

    def reads(self, layer: int, x: np.ndarray) -> None:
        self.x[layer].append(x.copy())

    def fires(self, layer: int, fired: Fired) -> None:
        self.active[layer].append(fired.active.copy())


def give_samples(path: Path, rows: int = ROWS, seed: int = 0) -> Path:
    """The same path, with samples of windows of random tokens beside it, as the engine computes them."""
    checkpoint = open_checkpoint(path)
    executor = load(checkpoint, EngineConfig(threads=1, context=128, max_batch=1, selector="all"))
    seen, rng = Samples(), np.random.default_rng(seed)
    with executor.observed(seen):
        for at in range(0, rows, WINDOW):
            count = min(WINDOW, rows - at)
            ids, positions = rng.integers(0, VOCAB, count).astype(np.int32), np.arange(count, dtype=np.int32)
            pages = np.array([[0, 1, 2, 3]], np.int32)
            executor.forward(Batch(ids, positions, np.zeros_like(ids), pages, np.zeros(0, np.int32)))
    executor.close()
    put(checkpoint, seen.x, seen.active)
    return path


def put(checkpoint: Checkpoint, x: list[list[np.ndarray]], active: list[list[np.ndarray]]) -> None:
    rows = sum(map(len, x[0]))
    with write_samples(checkpoint, None, rows, np.arange(0, rows, WINDOW), {}) as write:
        for layer in range(checkpoint.config.n_layers):
            write.put(layer, 0, np.concatenate(x[layer]), np.concatenate(active[layer]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its gates look at 12 directions; with samples."""
    return give_samples(few_directions(tmp_path_factory.mktemp("few") / "m.gguf", 12))


def copied(model: Path, folder: Path) -> Path:
    """The model with its samples, in another folder."""
    target = folder / model.name
    for name in (model.name, f"{model.name}.powerinfer/samples.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((model.parent / name).read_bytes())
    os.utime(folder / f"{model.name}.powerinfer/samples.safetensors", ns=(0, 0))
    return target


def made(path: Path, config: TrainConfig = QUICK) -> PredictorFile:
    return train(open_checkpoint(path), None, config, threads=1).file


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> PredictorFile:
    """Its predictor, in a folder of its own."""
    return made(copied(model, tmp_path_factory.mktemp("trained")))


def held_out(samples: SamplesFile, layer: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x, which neurons fire) of some rows."""
    x, active = samples.layers[layer]
    return x[rows].astype(np.float32), np.unpackbits(active[rows], axis=1, bitorder="little", count=FF).astype(bool)


# ---------------------------------------------------------------- what is learnt


@pytest.mark.parametrize("fused", [False, True])
def test_adam_has_the_bits_of_torchs(fused: bool) -> None:
    """Of tensors in groups of unlike rates, which change; one has no gradient at first."""
    rng, rates = np.random.default_rng(5), [0.02, 0.003]
    ours, theirs = (
        [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((7, 5), (3,), (33, 2))]
        for rng in (np.random.default_rng(6), np.random.default_rng(6))
    )
    groups = [{"params": theirs[:2], "lr": rates[0]}, {"params": theirs[2:], "lr": rates[1]}]
    adam = Adam([ours[:2], ours[2:]], betas=(0.9, 0.98), fused=fused)
    torchs = torch.optim.Adam(groups, betas=(0.9, 0.98), fused=fused)
    for step in range(9):
        for left, right in zip(ours[step == 0 :], theirs[step == 0 :], strict=True):
            left.grad = torch.from_numpy(rng.standard_normal(left.shape).astype(np.float32))
            right.grad = left.grad.clone()
        for group, rate in zip(torchs.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + step)
        torchs.step()
        adam.step([rate / (1 + step) for rate in rates])
        assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
        assert all(one.grad is None for one in ours)
    for left, right in zip(ours, theirs, strict=True):
        moments, state = adam.moments[left], torchs.state[right]
        assert torch.equal(moments.exp_avg, state["exp_avg"]) and torch.equal(moments.exp_avg_sq, state["exp_avg_sq"])
        assert float(moments.step) == float(state["step"])


def test_few_directions_are_learnt_at_the_smallest_size(model: Path, trained: PredictorFile) -> None:
    file = trained
    assert [one.predictor.rank for one in file.layers.values()] == [32, 32]
    samples = open_samples(open_checkpoint(model))
    rows = split_rows(samples.rows, samples.windows)
    assert file.training is not None
    for layer, (one, told) in enumerate(zip(file.layers.values(), file.training["layers"], strict=True)):
        x, fires = held_out(samples, layer, rows.report)
        named = np.maximum(x @ one.inner.float32().T, 0) @ one.outer.float32().T >= one.predictor.threshold
        recall, candidates = (named & fires).sum() / fires.sum(), named.mean()
        assert recall > 0.98 and candidates - fires.mean() < 0.03
        # what the file says of itself is what anybody finds who computes it
        assert recall == pytest.approx(told["recall"], abs=2e-4)
        assert candidates == pytest.approx(told["candidate_fraction"], abs=2e-4)
        assert fires.mean() == pytest.approx(told["active_fraction"])
        assert told["precision"] == pytest.approx((named & fires).sum() / named.sum(), abs=2e-4)
        x, fires = held_out(samples, layer, rows.choose)
        named = np.maximum(x @ one.inner.float32().T, 0) @ one.outer.float32().T >= one.predictor.threshold
        assert (named & fires).sum() / fires.sum() >= 0.99 - 2e-4, "the threshold was chosen for this"


def test_more_directions_need_a_larger_size(tmp_path: Path) -> None:
    """48 directions do not fit into 32 units, and 64 units of the model's 64 dimensions hold them all."""
    path = give_samples(few_directions(tmp_path / "m.gguf", 48))
    file = made(path)
    assert [one.predictor.rank for one in file.layers.values()] == [64, 64]
    assert file.training is not None
    assert all(one["candidate_fraction"] - one["active_fraction"] < 0.08 for one in file.training["layers"])


def test_low_rank_is_taken_where_training_adds_nothing(trained: PredictorFile) -> None:
    assert trained.training is not None
    for one in trained.training["layers"]:
        assert one["method"] == "svd" and one["steps"] == 0
        assert (one["recall"], one["candidate_fraction"]) == (one["svd_recall"], one["svd_candidate_fraction"])


def test_few_cells_are_counted_as_many_are(
    model: Path, trained: PredictorFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all bins instead of in order."""
    monkeypatch.setattr(fitting, "_FEW_CELLS", 0)
    assert made(copied(model, tmp_path)).path.read_bytes() == trained.path.read_bytes()


def test_training_spends_units_where_they_decide(tmp_path: Path) -> None:
    """Two thirds of the neurons always fire, though they vary as much; the rest look at 26 directions of their own.

    Low rank approximates all of them alike, and 32 units are too few for that. Training finds that 26 directions do.
    """
    gate = np.zeros((FF, D), np.float32)
    rng = np.random.default_rng(4)
    gate[:64, 6:38], gate[64:, 38:] = rng.standard_normal((64, 32)), rng.standard_normal((32, 26))
    gate[:64, 5] = 5
    builder = tiny_fields("llama").add("llama.hidden_act", STRING, "relu")
    for name, values in weights("llama").items():
        own = gate if name.endswith("gate") else np.ones_like(values) if name.endswith("norm") else values
        builder.tensor(gguf_name(name), own)
    x = rng.standard_normal((ROWS, D)).astype(np.float32)
    x[:, 5] += 8
    path = synthetic(builder.write(tmp_path / "m.gguf"), x @ gate.T > 0, x=x)
    found, _ = layer_fit(path, config=replace(QUICK, steps=600)).fit(32, lambda share: None)
    assert found.method == "trained" and 0 < found.steps <= 600
    assert found.figures.recall > 0.98 and found.svd.recall > 0.98
    assert found.svd.lost > 0.03 and found.figures.lost < 0.6 * found.svd.lost, (found.svd.lost, found.figures.lost)


def sampled_layers(path: Path) -> list[dict[str, Any]]:
    """Of each layer what the engine reports of a predicted run, with the recall that it sampled in every step."""
    options: dict[str, Any] = {"selector": "predicted", "trial": False, "recall_every": 1, "threads": 2, "context": 128}
    with LLM(path, **options) as llm:
        rng = np.random.default_rng(5)
        for _ in range(6):
            prompt = rng.integers(1, VOCAB, 4).tolist()
            llm.generate([prompt], SamplingParams(max_tokens=60, temperature=1.5, seed=1, ignore_eos=True))
        report = llm.sparsity
    assert report is not None and report["sampled"] > 200
    return list(report["layers"])


@pytest.mark.parametrize("type_name", ["q8_0", "f16"])
def test_the_engine_finds_the_recall_that_was_told(model: Path, tmp_path: Path, type_name: str) -> None:
    path = give_bundles(copied(model, tmp_path))
    file = made(path, replace(QUICK, type=type_name))
    assert file.type == type_name.upper() and file.training is not None
    for found, told in zip(sampled_layers(path), file.training["layers"], strict=True):
        assert found["recall"] == pytest.approx(told["recall"], abs=0.015)
        assert found["candidate_fraction"] == pytest.approx(told["candidate_fraction"], abs=0.04)


@pytest.mark.parametrize("limits", [True, 0.2], ids=["of neurons", "of layers"])
def test_neurons_that_fire_on_both_sides_of_zero(limits: bool | float, tmp_path: Path) -> None:
    """Their predictors select fewer than any that knows one side, and the engine finds the recall that was told."""
    path = give_bundles(give_samples(few_directions(tmp_path / "m.gguf", 3, "cats", limits), rows=6000))
    config = TrainConfig(recall=0.97, lost=0.1, steps=400, batch=128, share=1.0)
    told = (made(path, config).training or {})["layers"]
    checkpoint = open_checkpoint(path)
    samples = open_samples(checkpoint)
    rows = split_rows(samples.rows, samples.windows)
    for layer, figures in enumerate(told):
        x, fires = held_out(samples, layer, rows.report)
        scale = fitting._scale(checkpoint, layer, torch.from_numpy(x)).numpy()
        (gate,) = margins(checkpoint, layer)
        g = x / scale @ gate.weights.T + gate.offset
        silu = g / (1 + np.exp(-g))
        limit = checkpoint.take(f"layers.{layer}.threshold").float32() if limits is True else limits
        assert ((np.abs(silu) > limit) != fires).mean() < 2e-3, "what they learn from is what the engine computes"
        assert 0.1 < (silu[fires] < 0).mean() < 0.9
        one_side = max(np.mean(sign * g >= np.quantile((sign * g)[fires], 0.03)) for sign in (1, -1))
        lost = figures["candidate_fraction"] - figures["active_fraction"]
        assert figures["recall"] > 0.955 and lost < 0.12 and lost < 0.5 * (one_side - fires.mean())
    for found, figures in zip(sampled_layers(path), told, strict=True):
        assert found["recall"] == pytest.approx(figures["recall"], abs=0.02)
        assert found["candidate_fraction"] == pytest.approx(figures["candidate_fraction"], abs=0.05)


# ---------------------------------------------------------------- a layer

KINDS = {
    "relu": lambda: family_gguf("llama").add("llama.hidden_act", STRING, "relu"),
    "fatrelu": lambda: (
        family_gguf("llama").add("llama.hidden_act", STRING, "fatrelu").add("llama.hidden_act_param", F32, 2.5)
    ),
    "fatrelu of neurons": lambda: give_limits(family_gguf("llama").add("llama.hidden_act", STRING, "fatrelu")),
    "drelu": lambda: family_gguf("bamboo"),
    "relu2, plain": lambda: family_gguf("nemotron"),
    "relu, plain, biases": lambda: family_gguf("opt"),
    "relu, plain, parallel": lambda: family_gguf("falcon"),
    "relu, plain, parallel, two norms": lambda: family_gguf("falcon", two_norms=True),
}


def layer_fit(path: Path, layer: int = 0, config: TrainConfig = QUICK, type_name: str = "F16") -> LayerFit:
    checkpoint = open_checkpoint(path)
    samples = open_samples(checkpoint)
    rows = split_rows(samples.rows, samples.windows)
    return LayerFit(checkpoint, layer, samples, rows, config, type_name, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_margins_say_who_fires(tmp_path: Path, kind: str) -> None:
    """Against the engine: a neuron fires where all its margins are positive."""
    builder: Builder = KINDS[kind]()
    path = give_samples(builder.write(tmp_path / "m.gguf"), rows=400)
    checkpoint = open_checkpoint(path)
    samples = open_samples(checkpoint)
    for layer in range(LAYERS):
        x, fires = held_out(samples, layer, np.arange(400))
        scale = fitting._scale(checkpoint, layer, torch.from_numpy(x)).numpy()
        found = np.ones(fires.shape, bool)
        for one in margins(checkpoint, layer):
            found &= x / scale @ one.weights.T + one.offset > 0
        assert 0.02 < fires.mean() < 0.98
        assert (found != fires).mean() < 2e-3, "more than x in F16 explains"


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_size_predicts_every_family(tmp_path: Path, kind: str) -> None:
    """With as many units as dimensions little is left to guess; of dReLU's two margins not more than without one."""
    builder: Builder = KINDS[kind]()
    path = give_samples(builder.write(tmp_path / "m.gguf"), rows=4000)
    found, _ = layer_fit(path).fit(64, lambda share: None)
    assert found.figures.recall > 0.97
    if kind == "drelu":
        checkpoint = open_checkpoint(path)
        x, _ = held_out(open_samples(checkpoint), 0, np.arange(4000))
        gate = (x @ margins(checkpoint, 0)[0].weights.T > 0).mean()
        assert found.figures.candidate_fraction < gate
    else:
        assert found.figures.lost < 0.08


def test_low_rank_by_hand(tmp_path: Path) -> None:
    """In all its forms, a predictor of low rank approximates the margins as well as the SVD says that it can."""
    path = few_directions(tmp_path / "m.gguf", 64)
    x = np.random.default_rng(1).standard_normal((ROWS, D)).astype(np.float32)
    x += 8 * np.eye(D, dtype=np.float32)[5]  # a direction that is there in every row
    fit = layer_fit(synthetic(path, x[:, :1] > 0, x=x))
    fit._low_rank_of(32)
    assert fit._low_rank is not None
    unit = x[:1800] / np.sqrt((x[:1800] ** 2).mean(1, keepdims=True) + 1e-5)
    margin = unit @ margins(open_checkpoint(path), 0)[0].weights.T.astype(np.float64)
    margin /= margin.std(0)
    values = np.linalg.svd(margin - margin.mean(0), compute_uv=False) ** 2
    forms = list(fit._low_rank.forms(32))
    assert [name for name, *_ in forms] == ["opened by 2", "opened by 4", "in pairs"]
    for name, inner, outer in forms:
        directions = 15 if name == "in pairs" else 31
        z = np.maximum(unit @ inner.numpy().T, 0) @ outer.numpy().T
        left = values[directions:].sum() / values.sum()
        error = np.square(z - margin).sum() / np.square(margin - margin.mean(0)).sum()
        closed = 0.02 if name == "opened by 2" else 0.001  # units that are closed now and then
        assert left * 0.98 < error < left * 1.02 + closed, name


def test_the_size_to_begin_with_falls_with_sparsity_and_skew(model: Path) -> None:
    fit = layer_fit(model)
    sizes = []
    for frequency in (np.full(FF, 0.5), np.full(FF, 0.1), np.where(np.arange(FF) < FF // 10, 0.91, 0.01)):
        fit.frequency = frequency
        sizes.append(fit.start_rank())
    assert sizes[0] == 0.5 * D and sizes[0] > sizes[1] > sizes[2]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50))
def test_bins_are_in_the_order_of_their_floats(values: list[float]) -> None:
    z = torch.tensor(sorted(values))
    bins = fitting._bins(torch, z)
    assert (bins[1:] >= bins[:-1]).all()
    for value, bin in zip(z, bins.tolist(), strict=True):
        lowest = fitting._lowest_of(bin)
        assert lowest <= value and int(fitting._bins(torch, torch.tensor([lowest]))[0]) == bin
        below = torch.nextafter(torch.tensor(lowest), torch.tensor(-torch.inf))
        assert int(fitting._bins(torch, below[None])[0]) < bin, "else it is not the lowest"


def test_minus_zero_reaches_a_threshold_of_zero() -> None:
    assert fitting._lowest_of(int(fitting._bins(torch, torch.tensor([-0.0]))[0])) == 0.0


@given(rows=st.integers(MIN_ROWS, 5000), data=st.data())
@settings(max_examples=50, deadline=None)
def test_rows_are_held_out(rows: int, data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.integers(1, rows - 1), unique=True, max_size=60))
    windows = np.array([0, *sorted(starts)])
    split = split_rows(rows, windows)
    together = np.concatenate([split.train, split.choose, split.report])
    assert np.array_equal(np.sort(together), np.arange(rows)), "each row is for one thing"
    assert len(split.choose) and len(split.report) and len(split.train) >= rows // 2 - 1
    assert split.train.max() < min(split.choose.min(), split.report.min())


def test_windows_are_held_out_whole() -> None:
    split = split_rows(2000, np.arange(0, 2000, 40))
    assert np.array_equal(split.choose, [*range(1800, 1840), *range(1880, 1920), *range(1960, 2000)])
    assert np.array_equal(split.report, [*range(1840, 1880), *range(1920, 1960)])


# ---------------------------------------------------------------- sizes


def test_the_share_is_kept(tmp_path: Path) -> None:
    path = give_samples(few_directions(tmp_path / "m.gguf", 48))
    config = replace(QUICK, steps=0)
    whole = made(path, config)
    assert [one.predictor.rank for one in whole.layers.values()] == [64, 64]
    share = 0.8 * whole.nbytes / model_bytes(open_checkpoint(path))
    result = train(open_checkpoint(path), None, replace(config, share=share), threads=1)
    assert sorted(one.predictor.rank for one in result.file.layers.values()) == [32, 64], "one layer suffices"
    told = result.file.training
    assert told is not None and told["bytes"] == result.file.nbytes
    assert told["share_of_model"] == result.file.nbytes / model_bytes(open_checkpoint(path)) <= share
    assert any("made smaller" in note for note in result.notes) and any(
        "false positives" in note for note in result.notes
    )
    with pytest.raises(RequestError, match=r"--share 0\.\d\d would do") as caught:
        made(path, replace(config, share=0.2 * share))
    named = re.search(r"--share (0\.\d\d)", str(caught.value))
    assert named is not None
    assert {one.predictor.rank for one in made(path, replace(config, share=float(named[1]))).layers.values()} == {32}


def test_the_model_is_counted_as_it_is_used(model: Path) -> None:
    plain, quantised = open_checkpoint(model), open_checkpoint(model, quantize="q8_0")
    assert model_bytes(plain) == 4 * plain.parameters
    assert 0.25 * model_bytes(plain) < model_bytes(quantised) < 0.8 * model_bytes(plain)


@pytest.mark.parametrize(
    ("d_model", "some", "last"),
    [(64, {32, 64}, 64), (288, {224, 256, 288}, 288), (20, {20}, 20), (2048, {1024, 1280}, 2048)],
)
def test_the_sizes_that_are_tried(tmp_path: Path, d_model: int, some: set[int], last: int) -> None:
    model = checkpoint(tmp_path / "m.gguf", d_model=d_model, d_ff=d_model)
    rungs = training._ladder(model, TrainConfig(share=1.0))
    assert rungs == sorted(set(rungs)) and some <= set(rungs) and rungs[-1] == last
    assert all(b - a <= max(32, a / 4) for a, b in itertools.pairwise(rungs))


class Ladder(training._Work):
    """The search alone, in a world where each rank loses what a function says, and more without training."""

    def __init__(self, ladder: list[int], lost: Callable[[int], float], start: float, gain: float = 0.5) -> None:
        self._ladder, self._config, self.tried = ladder, TrainConfig(lost=0.03), []  # type: ignore[misc]
        self._lost, self._points = lost, [{}]
        fit = {"constant": False, "start_rank": lambda _: start, "low_rank_lost": lambda _, rank: lost(rank) / gain}
        self._layer = (0, type("Fit", (), fit)())

    def _point(self, layer: int, rank: int) -> Any:
        self.tried.append(rank)
        figures = fitting.FitFigures(0.99, 0.9, 0.1 + self._lost(rank), 0.1)
        self._points[0][rank] = type("Point", (), {"chosen": figures})()
        return self._points[0][rank]


@given(
    size=st.integers(1, 40),
    needed=st.integers(1, 1400),
    start=st.floats(0, 1400),
    steep=st.floats(0.002, 0.05),
    gain=st.floats(0.01, 1),
)
def test_the_search_finds_the_smallest_rank(size: int, needed: int, start: float, steep: float, gain: float) -> None:
    ladder = [32 * (n + 1) for n in range(size)]
    work = Ladder(ladder, lambda rank: 0.03 * 2.0 ** (steep * (needed - rank)), start, gain)
    found = work._search(0)
    enough = [rank for rank in ladder if rank >= needed]
    assert found == (enough[0] if enough else ladder[-1])
    assert len(set(work.tried)) == len(work.tried) <= 2 * np.log2(size) + 3


def test_growing_ends_where_it_gains_nothing() -> None:
    work = Ladder([32 * n for n in range(1, 41)], lambda rank: 0.2 if rank < 256 else 0.199, 200)
    assert work._search(0) == 224 and work.tried == [224, 256]


def test_a_size_that_needs_no_training_bounds_the_search() -> None:
    work = Ladder([32 * n for n in range(1, 41)], lambda rank: 0.02 if rank >= 512 else 0.1, 200, gain=0.9)
    assert work._search(0) == 512 and work.tried == [480], "512 keeps the target untrained"


# ---------------------------------------------------------------- again and again

UNREACHED = replace(QUICK, lost=0.0, steps=20)
"""Every size is tried and trained."""


def test_the_same_seed_gives_the_same_file(model: Path, tmp_path: Path) -> None:
    files = []
    for name in ("one", "two", "other"):
        config = replace(UNREACHED, seed=1 if name == "other" else 0)
        path = copied(model, tmp_path / name)
        made(path, config)
        files.append(PreparedFile(PREDICTOR, open_checkpoint(path)).path.read_bytes())
    assert files[0] == files[1] != files[2]


def test_a_run_that_was_stopped_goes_on(model: Path, tmp_path: Path) -> None:
    whole, stopped = copied(model, tmp_path / "whole"), copied(model, tmp_path / "stopped")
    expected = made(whole, UNREACHED).path.read_bytes()
    assert current(open_checkpoint(whole), None, UNREACHED) is not None
    assert left_in(tmp_path / "whole") == sorted([model.name, "predictor.safetensors", "samples.safetensors"])

    def stop(label: str, done: int, total: int) -> None:
        if done > 0.6 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(open_checkpoint(stopped), None, UNREACHED, stop, threads=1)
    kept = [name for name in left_in(tmp_path / "stopped") if name.startswith("predictor")]
    assert kept and not any(name.endswith(".part") for name in kept)
    assert current(open_checkpoint(stopped), None, UNREACHED) is None
    result = train(open_checkpoint(stopped), None, UNREACHED, threads=1)
    assert result.resumed == len(kept) and result.file.path.read_bytes() == expected
    assert left_in(tmp_path / "stopped") == left_in(tmp_path / "whole")


def test_what_was_kept_under_other_options_is_made_again(model: Path, tmp_path: Path) -> None:
    path = copied(model, tmp_path)
    checkpoint = open_checkpoint(path)

    def stop(label: str, done: int, total: int) -> None:
        if done > 0.6 * total:
            raise KeyboardInterrupt

    for config, samples_changed in ((replace(UNREACHED, seed=1), False), (UNREACHED, True)):
        with pytest.raises(KeyboardInterrupt):
            train(checkpoint, None, UNREACHED, stop, threads=1)
        if samples_changed:
            os.utime(tmp_path / f"{model.name}.powerinfer/samples.safetensors", ns=(0, 10**9))
        assert train(checkpoint, None, config, threads=1).resumed == 0
        assert sum("predictor" in name for name in left_in(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["cut", "other key", "other point", "no rank"])
def test_damaged_leftovers_are_made_again(model: Path, tmp_path: Path, damage: str) -> None:
    path = copied(model, tmp_path)
    checkpoint = open_checkpoint(path)
    work = training._Work(checkpoint, None, UNREACHED, open_samples(checkpoint), "cpu", silent)
    work._point(0, 32)
    place = work._place(0, 32)
    if damage == "cut":
        place.path.write_bytes(place.path.read_bytes()[:-1])
    elif damage == "other key":
        describe(place, lambda description: description.update(key="x"))
    elif damage == "other point":
        describe(place, lambda description: description.update(point=[3]))
    else:
        describe(place, lambda description: description["point"]["predictor"].update(rank=0))
    assert work._saved_point(0, 32) is None


def test_up_to_date(model: Path, tmp_path: Path) -> None:
    path = copied(model, tmp_path)
    checkpoint = open_checkpoint(path)
    assert current(checkpoint, None, QUICK) is None
    made(path)
    assert current(checkpoint, None, QUICK) is not None
    for change in ({"seed": 1}, {"recall": 0.95}, {"share": 0.9}, {"type": "q8_0"}):
        assert current(checkpoint, None, replace(QUICK, **change)) is None, change
    assert current(checkpoint, None, replace(QUICK, device="cpu")) is not None


# ---------------------------------------------------------------- what cannot be had


def synthetic(path: Path, active: np.ndarray, rows: int = ROWS, x: np.ndarray | None = None) -> Path:
    """Samples in which the neurons `active` (bool, as rows and neurons broadcast) fire."""
    checkpoint = open_checkpoint(path)
    if x is None:
        x = np.random.default_rng(1).standard_normal((rows, D)).astype(np.float32)
    packed = np.packbits(np.broadcast_to(active, (rows, FF)), axis=1, bitorder="little")
    put(checkpoint, [[x]] * LAYERS, [[packed]] * LAYERS)
    return path


@pytest.mark.parametrize("every", [False, True])
def test_layers_where_nothing_or_everything_fires(model: Path, tmp_path: Path, every: bool) -> None:
    path = synthetic(copied(model, tmp_path), np.array(every))
    give_bundles(path)
    file = made(path)
    assert [one.predictor.rank for one in file.layers.values()] == [32, 32] and file.training is not None
    for one in file.training["layers"]:
        assert one["method"] == "constant" and one["recall"] == one["precision"] == 1
        assert one["candidate_fraction"] == one["active_fraction"] == every
    options: dict[str, Any] = {"selector": "predicted", "trial": False, "context": 128, "threads": 1}
    with LLM(path, **options) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert llm.sparsity is not None and llm.sparsity["candidate_fraction"] == every


def test_neurons_that_hardly_ever_fire(model: Path, tmp_path: Path) -> None:
    """Three firings in all, none of them in the rows that choose the threshold."""
    active = np.zeros((ROWS, FF), bool)
    active[[5, 700, 1200], [3, 3, 90]] = True
    file = made(synthetic(copied(model, tmp_path), active))
    assert file.training is not None
    for one in file.training["layers"]:
        assert one["recall"] == 1 and one["active_fraction"] == 0 and one["candidate_fraction"] <= 1


def test_firing_that_cannot_be_predicted(model: Path, tmp_path: Path) -> None:
    """A coin for each neuron: the recall is kept all the same, by naming nearly all."""
    active = np.random.default_rng(2).random((ROWS, FF)) < 0.3
    file = made(synthetic(copied(model, tmp_path), active), replace(QUICK, steps=50))
    assert file.training is not None
    for one in file.training["layers"]:
        assert one["recall"] == pytest.approx(0.99, abs=0.01)
        assert one["candidate_fraction"] == pytest.approx(0.99, abs=0.02)


def refused(path: Path, error: type[PowerInferError], why: str, config: TrainConfig = QUICK, **options: Any) -> str:
    before = left_in(path.parent)
    with pytest.raises(error) as caught:
        train(open_checkpoint(path, **options), None, config, threads=1)
    assert re.search(why, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value) and left_in(path.parent) == before
    return str(caught.value)


def test_no_samples(tmp_path: Path) -> None:
    path = few_directions(tmp_path / "m.gguf", 4)
    assert f"`powerinfer profile -m {path}` makes it" in refused(path, ModelError, "there is no")


def test_samples_of_another_model(model: Path, tmp_path: Path) -> None:
    path = copied(model, tmp_path)
    few_directions(path, 13)
    assert "powerinfer profile" in refused(path, ModelError, "another model")


def test_samples_of_another_quantize(model: Path, tmp_path: Path) -> None:
    refused(copied(model, tmp_path), ModelError, "without --quantize", quantize="q8_0")


def test_too_few_samples(model: Path, tmp_path: Path) -> None:
    path = give_samples(copied(model, tmp_path), rows=MIN_ROWS - 1)
    refused(path, RequestError, f"{MIN_ROWS - 1} samples and at least {MIN_ROWS} are needed: profile a longer corpus")
    assert made(give_samples(path, rows=MIN_ROWS)).training is not None


@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_samples_that_are_no_numbers(model: Path, tmp_path: Path, row: int) -> None:
    x = np.ones((ROWS, D), np.float32)
    x[row, 7] = np.nan
    refused(synthetic(copied(model, tmp_path), np.array(True), x=x), ModelError, "layer 0 are not all finite")


def test_samples_cut_short_while_open(model: Path, tmp_path: Path) -> None:
    path = copied(model, tmp_path)
    checkpoint = open_checkpoint(path)
    samples = open_samples(checkpoint)
    work = training._Work(checkpoint, None, QUICK, samples, "cpu", silent)
    samples.path.write_bytes(samples.path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="changed while it was in use"):
        work.run()


def test_models_whose_neurons_are_never_silent(tmp_path: Path) -> None:
    path = family_gguf("llama").write(tmp_path / "m.gguf")
    refused(path, RequestError, "silu are never exactly zero.*--selector threshold")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"recall": 1.0}, "--recall 1.0 must be between"),
        ({"recall": float("nan")}, "--recall nan"),
        ({"lost": -0.1}, "--lost -0.1"),
        ({"share": 0.0}, "--share 0.0"),
        ({"lr": float("inf")}, "--lr inf"),
        ({"batch": 0}, "--batch must be at least 1"),
        ({"steps": -1}, "cannot be negative"),
        ({"device": "cuda"}, "torch finds no GPU"),
    ],
    ids=str,
)
def test_options_out_of_range(model: Path, change: dict[str, Any], why: str) -> None:
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RequestError, match=re.escape(why)):
        train(open_checkpoint(model), None, replace(QUICK, **change), threads=1)


def test_without_torch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PowerInferError, match=re.escape("pip install '.[train]' in a clone")):
        train(open_checkpoint(model), None, QUICK)


def test_a_full_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(model, tmp_path)
    write, calls = os.write, 0

    def full(fd: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(prepared.os, "write", full)
        with pytest.raises(PowerInferError, match="No space left on device"):
            made(path)
    assert not any(name.endswith(".part") for name in left_in(tmp_path))
    result = train(open_checkpoint(path), None, QUICK, threads=1)
    assert result.resumed == 1, "what was finished is not made again"


# ---------------------------------------------------------------- the file's account of itself, the command


NO_ACCOUNTS: list[Callable[[Any], object]] = [
    lambda told: 3,
    lambda told: [],
    lambda told: {},
    lambda told: told | {"layers": told["layers"][:1]},
    lambda told: told | {"layers": [3, 3]},
    lambda told: told | {"layers": [told["layers"][0] | {"recall": 1.5}] * 2},
    lambda told: told | {"layers": [told["layers"][0] | {"svd_recall": None}] * 2},
    lambda told: told | {"layers": [told["layers"][0] | {"rank": "x"}] * 2},
    lambda told: told | {"layers": [told["layers"][0] | {"method": ["\x1b[2J"]}] * 2},
    lambda told: told | {"share_of_model": True},
    lambda told: told | {"recall_target": "much"},
    lambda told: told | {"held_out_tokens": None},
]


def test_accounts_that_are_no_account(model: Path, tmp_path: Path) -> None:
    path = copied(model, tmp_path)
    made(path, replace(QUICK, steps=0))
    checkpoint = open_checkpoint(path)
    place = PreparedFile(PREDICTOR, checkpoint)
    good = place.path.read_bytes()
    for change in NO_ACCOUNTS:
        place.path.write_bytes(good)
        open_predictor(checkpoint)
        describe(place, lambda about, change=change: about.update(training=change(about["training"])))
        with pytest.raises(ModelError, match=r"safetensors: training[. ]|does not tell how 2 layers were trained"):
            open_predictor(checkpoint)


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(model, tmp_path)
    flags = ["train", "-m", str(path), "--threads", "1", "--share", "0.9", "--steps", "50", "--json"]
    assert main(flags) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out.splitlines()[-1])
    assert document["path"] == str(PreparedFile(PREDICTOR, open_checkpoint(path)).path) and document["type"] == "Q8_0"
    assert document["seconds"] > 0 and document["resumed"] == 0 and len(document["layers"]) == LAYERS
    assert document["bytes"] == sum(one["rank"] * (D + FF) * 34 // 32 for one in document["layers"])
    mean = sum(one["recall"] for one in document["layers"]) / LAYERS
    assert document["recall"] == pytest.approx(mean)
    rows = [line.split() for line in shown.err.splitlines() if re.match(r"\s+\d", line)]
    assert [row[:3] for row in rows] == [[str(n), "32", document["layers"][n]["method"]] for n in range(LAYERS)]
    assert rows[0][3] == f"{document['layers'][0]['recall']:.2%}"

    assert main([*flags[:-1]]) == 0
    assert "up to date; nothing was done" in capsys.readouterr().out
    assert main([*flags, "--force"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["seconds"] > 0

    assert main(["inspect", "-m", str(path), "--json"]) == 0
    shown = capsys.readouterr()
    assert rows[0][3] in shown.err
    told = json.loads(shown.out.splitlines()[-1])["prepared"]["predictor"]["training"]
    assert told["layers"] == document["layers"] and told["recall_target"] == 0.99


def test_from_a_text_to_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As people do it: profile, train, pack, and what `eval` then measures is what `train` had said."""
    path = few_directions(tmp_path / "m.gguf", 12)
    rng = np.random.default_rng(8)
    texts = []
    for name, letters in (("corpus.txt", 6000), ("other.txt", 400)):
        (tmp_path / name).write_text("".join(rng.choice(list("abcdefghij "), letters)))
        texts.append(str(tmp_path / name))
    model = ["-m", str(path), "--threads", "1", "--json"]
    assert main(["profile", *model, "--corpus", texts[0], "--window", "64"]) == 0
    assert main(["train", *model, "--share", "0.5", "--steps", "100"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    give_bundles(path)
    measure = ["eval", "agreement", *model, "--file", texts[1], "--context", "64"]
    assert main([*measure, "--selector", "predicted"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["recall"] == pytest.approx(told["recall"], abs=0.02)
    assert found["candidate_fraction"] == pytest.approx(told["candidate_fraction"], abs=0.05)
