"""`powerinfer sparsify`: stages, what is kept of an interrupted run, what is written and how it runs, bad input."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configs import small
from matplotlib.figure import Figure
from model_files import edit_config

from benchmarks.models import expert_models, make_model
from benchmarks.models.speed_models import Shape, write_random_llama
from powerinfer import LLM, PowerInferError, RequestError, SamplingParams
from powerinfer.cli.main import main
from powerinfer.config import ExpertsConfig, ModelConfig, RopeConfig, SparsifyConfig
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.gguf import encoded, metadata_bytes, read_gguf, write_gguf
from powerinfer.formats.layout import is_matrix, shapes
from powerinfer.formats.prepared import TRAINING, PreparedFile
from powerinfer.formats.quant import dequantize, quantize
from powerinfer.formats.safetensors_file import safetensors_header
from powerinfer.placement.shapes import find_shape
from powerinfer.prepare.corpus import open_corpora
from powerinfer.progress import silent
from powerinfer.report.plots import draw_training
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.model_text import sampling_defaults_of, tokenizer_of
from powerinfer_train import Listener, SparsifyResult, _dense_reason_by_type, measured, sparsify
from powerinfer_train.estimate import estimate, memory, stage_costs
from powerinfer_train.own_text import OwnText, is_useful, write_own_text
from powerinfer_train.recipes import FFN_PARTS, RECIPES, RecipeStage, StoredTypes, check_recipe
from powerinfer_train.step_log import StepLog, draw_log, read_log
from powerinfer_train.torch_model import ROUNDED, NeuronValues, TorchModel, _Rounded, load
from powerinfer_train.training import Sparsifier, _Cut, _stored, check_start, fast_type, trained_names
from powerinfer_train.writing import write_model

SHAPE = Shape(d_model=64, d_ff=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab=1200, context=128)
SMALL = {"window": 32, "batch": 256, "rows": 4, "tokens": 10_240, "save": 1e9, "device": "cpu"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense") / "tiny.gguf"
    write_random_llama(path, SHAPE)
    return path


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer to draw than most of these trainings take; those that `test_the_command` makes are drawn."""
    monkeypatch.setattr("powerinfer_train.draw_log", lambda *_: None)


@pytest.fixture(autouse=True)
def few_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importances of all of the text would take as long as most of these trainings do."""
    monkeypatch.setattr("powerinfer_train.training.WEIGHED", 512)


def made(model: Path, out: Path, **options: Any) -> SparsifyResult:
    config = SparsifyConfig(**(SMALL | {"zeros": 0.7} | options))
    return sparsify(open_checkpoint(model), [], config, out, threads=1)


def limits(checkpoint: Checkpoint) -> list[float]:
    """Thresholds of the layers; where neurons have their own, of one of mean importance."""
    if checkpoint.config.competing or not all(layer.neurons.thresholds for layer in checkpoint.config.layers):
        return [layer.neurons.threshold for layer in checkpoint.config.layers]
    own = (checkpoint.take(f"layers.{n}.threshold").float32() for n in range(len(checkpoint.config.layers)))
    return [float(1 / np.mean(1 / one)) for one in own]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_makes_a_model_that_runs(recipe: str, dense: Path, tmp_path: Path) -> None:
    about = made(dense, tmp_path, recipe=recipe, type="f16", tokens=5120).document
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.config.activations == RECIPES[recipe].activation
    assert np.allclose(limits(checkpoint), about["limits"] or [0, 0], rtol=1e-5)
    least = {"cats": 0.6, "product": 0.6, "topk": 0.7, "fatrelu": 0.6, "reglu": 0.5, "drelu": 0.7}
    assert about["zeros"] > least[recipe]
    # what the engine counts and computes is what was measured
    with LLM(tmp_path / "model.gguf", threads=1, selector="all") as llm:
        tokens = llm.tokenizer.encode("It was the best of times, it was the worst of times.")
        rows: list[np.ndarray] = []
        llm.score(tokens, 0, lambda at, logits: rows.append(np.array(logits)))
    own = np.concatenate(rows)
    model = TorchModel(checkpoint.config, load(checkpoint), torch.float32)
    zeros: list[float] = []
    with torch.no_grad():
        states = model.states(
            torch.tensor([tokens]), lambda name, seen: zeros.append(float((seen.h == 0).float().mean()))
        )
        logits = model.logits(states)[0].numpy()
    apart = np.abs(own - logits).max(1) / logits.std()
    # a neuron that lies at its threshold fires in one computation and not in the other: in a token now and then
    assert np.median(apart) < 0.02 and (recipe in ("cats", "product", "fatrelu", "topk") or apart.max() < 0.05)
    assert abs(np.mean(zeros) - about["zeros"]) < 0.1


def test_distilling_teaches(dense: Path, tmp_path: Path) -> None:
    """The same thresholds without training are much further from the original."""
    config = SparsifyConfig(**(SMALL | {"zeros": 0.8, "tokens": 10_240, "lr": 3.0}))
    work = Sparsifier(open_checkpoint(dense), open_corpora([]), config, tmp_path)
    done = work.run()
    untrained = dict(work.teacher.weights)
    trained, work.student.weights = work.student.weights, untrained
    before = divergence(work)
    work.student.weights = trained
    assert divergence(work) < 0.7 * before
    assert len(done.limits) == 2


@torch.no_grad()
def divergence(work: Sparsifier) -> float:
    tokens = torch.from_numpy(work._held_out.astype(np.int64))
    wanted, own = (torch.log_softmax(m.logits(m.states(tokens)), -1) for m in (work.teacher, work.student))
    return float((wanted.exp() * (wanted - own)).sum(-1).mean())


@pytest.mark.parametrize("recipe", ["product", pytest.param("topk", marks=pytest.mark.rest), "reglu"])
def test_an_interrupted_run_goes_on_and_gives_the_same(recipe: str, dense: Path, tmp_path: Path) -> None:
    # the second time after the 20 steps that the text lasts for
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    made(dense, whole, recipe=recipe, tokens=6144)
    steps = 0

    def stop(label: str, done: int, total: int) -> None:
        nonlocal steps
        steps += label == "training"
        if steps in (4, 24):
            steps += 1
            raise KeyboardInterrupt

    config = SparsifyConfig(**(SMALL | {"zeros": 0.7, "recipe": recipe, "tokens": 6144}))
    for step in (4, 23):
        notes: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            sparsify(open_checkpoint(dense), [], config, parts, Listener(stop, notes.append), threads=1)
        assert notes[-1] == f"stopped: the same command goes on from step {step} of 24"
        assert not (parts / "model.gguf").exists()
    done = made(dense, parts, recipe=recipe, tokens=6144)
    assert done.document["resumed"] > 20
    assert (parts / "model.gguf").read_bytes() == (whole / "model.gguf").read_bytes()
    rows = list(csv.reader((parts / "log.csv").read_text().splitlines()))
    assert [row[0] for row in rows[1:]] == [str(step) for step in range(24)]
    assert (parts / "log.csv").read_text() == (whole / "log.csv").read_text()


def test_an_interruption_within_a_step_keeps_the_steps_before(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = made(dense, tmp_path / "whole", recipe="cats", tokens=5120), tmp_path / "parts"
    plain, calls = Sparsifier._distil, 0

    def interrupted(self: Sparsifier, *given: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt
        return plain(self, *given)

    monkeypatch.setattr(Sparsifier, "_distil", interrupted)
    config = SparsifyConfig(**(SMALL | {"zeros": 0.7, "save": 600.0, "recipe": "cats", "tokens": 5120}))
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sparsify(open_checkpoint(dense), [], config, parts, Listener(say=notes.append), threads=1)
    each = config.batch // config.window // config.rows
    assert notes[-1] == f"stopped: the same command goes on from step {9 // each} of 20"
    done = made(dense, parts, recipe="cats", tokens=5120)
    assert done.document["resumed"] == 9 // each
    assert done.path.read_bytes() == whole.path.read_bytes()


def test_a_sparse_model_is_trained_further(dense: Path, tmp_path: Path) -> None:
    first = made(dense, tmp_path / "first", type="f16")
    original, begun = open_checkpoint(dense), open_checkpoint(first.path)
    config = SparsifyConfig(**(SMALL | {"zeros": 0.7, "type": "f16", "tokens": 1024}))
    work = Sparsifier(original, open_corpora([]), config, tmp_path / "second", start=begun)
    assert np.allclose(list(work._gates.of.values()), first.document["limits"], rtol=1e-5)
    assert np.array_equal(work.trained("layers.1.up").float32(), begun.take("layers.1.up").float32())
    assert abs(float(work._gates.importance["layers.0."].mean()) - 1) < 1e-4
    assert 0.65 < work.evaluate(work.student).zeros[0] < 0.75
    done = sparsify(original, [], config, tmp_path / "second", threads=1, start=begun).document
    assert done["start"] == "first/model.gguf" and abs(done["zeros"] - 0.7) < 0.05
    write_random_llama(tmp_path / "other.gguf", SHAPE, seed=1)
    relu = made(dense, tmp_path / "third", recipe="reglu", tokens=1024).path
    with pytest.raises(RequestError, match="no model that recipe cats made out of"):  # before text is written
        long = replace(config, own_text=10**9)
        sparsify(original, [], long, tmp_path / "4", threads=1, start=open_checkpoint(relu))
    for source, wrong in ((dense, dense), (dense, relu), (tmp_path / "other.gguf", first.path)):
        with pytest.raises(RequestError, match="no model that recipe cats made out of"):
            Sparsifier(open_checkpoint(source), open_corpora([]), config, tmp_path / "4", start=open_checkpoint(wrong))
    config = SparsifyConfig(**(SMALL | {"zeros": 0.7, "recipe": "reglu"}))
    work = Sparsifier(original, open_corpora([]), config, tmp_path / "5", start=open_checkpoint(relu))
    assert [stage.name for stage, _ in work.stages] == ["distil", "distil"]
    assert sum(steps for _, steps in work.stages) == work._steps


def test_the_gate_alone_makes_a_part_of_the_zeros(dense: Path, tmp_path: Path) -> None:
    """What `--gate-zeros` says, of a model and of one that is trained further from it."""
    options: dict[str, Any] = {"recipe": "product", "tokens": 2048, "type": "f16", "zeros": 0.7, "gate_zeros": 0.4}
    begun = open_checkpoint(made(dense, tmp_path / "first", **options).path)
    assert all(layer.neurons.product_thresholds for layer in begun.config.layers)
    config = SparsifyConfig(**(SMALL | options | {"gate_zeros": 0.2, "tokens": 4096}))
    done = sparsify(open_checkpoint(dense), [], config, tmp_path / "second", threads=1, start=begun)
    for path, share in ((begun.path, 0.4), (done.path, 0.2)):
        checkpoint = open_checkpoint(path)
        model = TorchModel(checkpoint.config, load(checkpoint), torch.float32)
        limits = [torch.from_numpy(checkpoint.take(f"layers.{n}.threshold").float32().copy()) for n in range(2)]
        below, zeros = [], []
        seen: list[NeuronValues] = []
        with torch.no_grad():
            model.states(torch.arange(256).view(4, 64), lambda name, one, seen=seen: seen.append(one))
        for one, limit in zip(seen, limits, strict=True):
            assert one.gate is not None
            below.append(float((torch.nn.functional.silu(one.gate).abs() <= limit).float().mean()))
            zeros.append(float((one.h == 0).float().mean()))
        assert abs(np.mean(below) - share) < 0.1 and abs(np.mean(zeros) - 0.7) < 0.1, (share, below, zeros)


def test_another_number_of_neurons_of_a_bank(dense: Path, tmp_path: Path) -> None:
    """A model of topk is trained further with the thresholds that its neurons have."""
    options: dict[str, Any] = {"recipe": "topk", "tokens": 1024, "type": "f16"}
    begun = open_checkpoint(made(dense, tmp_path / "first", **options).path)
    config = SparsifyConfig(**(SMALL | options | {"zeros": 0.5}))
    done = sparsify(open_checkpoint(dense), [], config, tmp_path / "second", threads=1, start=begun)
    ours = open_checkpoint(done.path)
    assert limits(begun) == [19, 19] and limits(ours) == done.document["limits"] == [32, 32]
    for name in ("layers.0.threshold", "layers.1.threshold"):
        assert np.allclose(ours.take(name).float32(), begun.take(name).float32(), rtol=1e-5)


def test_a_start_with_rows_in_another_order_is_refused(dense: Path, tmp_path: Path) -> None:
    """The rows of q and k of a Llama lie otherwise in a GGUF file than in a folder."""
    first = made(dense, tmp_path / "first", tokens=1024)
    work = Sparsifier(open_checkpoint(dense), open_corpora([]), SparsifyConfig(**(SMALL | {"zeros": 0.7})), tmp_path)
    layers = work._checkpoint.config.layers
    turned = tuple(
        replace(one, attention=replace(one.attention, rope=replace(one.attention.rope, interleaved=False)))
        for one in layers
    )
    start = open_checkpoint(first.path)
    start.config = replace(start.config, layers=turned)
    with pytest.raises(RequestError, match="no model that recipe cats made out of"):
        work._started(start, work.teacher.weights)


def test_thresholds_of_zero_in_a_start(dense: Path, tmp_path: Path) -> None:
    first = made(dense, tmp_path / "first", tokens=1024, type="f16")
    start = open_checkpoint(first.path)
    thresholds = np.array(start.take("layers.0.threshold").float32())
    thresholds[3] = 0
    path = write_model(start, tmp_path / "zero", StoredTypes("f16"), [], lambda name: 0, {"hidden_act": "cats"}, {
        "layers.0.threshold": thresholds,
        "layers.1.threshold": np.array(start.take("layers.1.threshold").float32()),
    })  # fmt: skip
    config = SparsifyConfig(**(SMALL | {"zeros": 0.7}))
    work = Sparsifier(open_checkpoint(dense), open_corpora([]), config, tmp_path, start=open_checkpoint(path))
    importance = work._gates.importance["layers.0."]
    assert bool(importance.isfinite().all()) and int(importance.argmax()) == 3 and work._gates.of[0] > 0


def test_a_state_of_another_training_is_refused(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(dense, tmp_path, tokens=1024)
    for more, other in (({"tokens": 2048}, "--tokens"), ({"zeros": 0.6, "seed": 3}, "--zeros, --seed")):
        with pytest.raises(RequestError, match=rf"is of another training \(other: {other}\): give another --out"):
            made(dense, tmp_path, **({"tokens": 1024} | more))
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 2000)
    config = SparsifyConfig(**(SMALL | {"zeros": 0.7, "tokens": 1024}))
    with pytest.raises(RequestError, match="is of a training that ended with --lr 1: give another --out, or the same"):
        made(dense, tmp_path, tokens=1024, lr=0.5)
    made(dense, tmp_path / "other", tokens=1024, recipe="topk")
    for start, why in ((tmp_path / "other", "it was made by recipe topk"), (dense, "it is not sparse")):
        with pytest.raises(RequestError, match=f"no model that recipe cats made out of .*: {why}"):
            sparsify(
                open_checkpoint(dense), [], SparsifyConfig(**SMALL), tmp_path / "new", start=open_checkpoint(start)
            )
        assert not (tmp_path / "new").exists(), "nothing is left of what was refused"
    with pytest.raises(RequestError, match="it is sparse already; to train it further, give its original with -m"):
        made(tmp_path / "other", tmp_path / "new")
    short = tmp_path / "short.txt"
    short.write_text("one two three")
    for there in (False, True):
        if there:
            (tmp_path / "new").mkdir()
        with pytest.raises(RequestError, match="less than one window"):
            sparsify(open_checkpoint(dense), [str(short)], SparsifyConfig(**SMALL), tmp_path / "new", threads=1)
        assert (tmp_path / "new").exists() == there
    with pytest.raises(RequestError, match=r"\(other: the text\)"):
        sparsify(open_checkpoint(dense), [str(text)], config, tmp_path, threads=1)
    state = tmp_path / "training.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    (tmp_path / "finished.json").unlink()
    monkeypatch.setattr(Sparsifier, "evaluate", None)  # not before the state is read
    with pytest.raises(PowerInferError, match=r"training\.safetensors.*past the end of the file: give another --out"):
        made(dense, tmp_path, tokens=1024)


def test_a_state_that_was_tampered_with_is_refused(dense: Path, tmp_path: Path) -> None:
    good = made(dense, tmp_path, tokens=1024).path.read_bytes()
    (tmp_path / "finished.json").unlink()
    state = tmp_path / "training.safetensors"
    file = PreparedFile(TRAINING, open_checkpoint(dense), path=state, option=("--out", "FOLDER"))
    about, tensors, _ = file.read()
    about["seconds"] = 1e6
    for name, value, why in (
        ("limits", {"threshold": [math.inf, 0.1]}, r"limits\.threshold\[0\] is 'inf'"),
        ("limits", {"threshold": [-1.0, 0.1]}, r"limits\.threshold\[0\] is '-1\.0'"),
        ("limits", {"threshold": [0.1]}, "is damaged"),
        ("penalty", math.inf, "penalty is 'inf'"),
        ("step", 10**6, "is damaged"),
        ("compute", "float64", "compute is 'float64'"),
    ):
        state.unlink()
        text = json.dumps(about | {name: value}).replace("Infinity", "1e999")
        stored = ((one, tensor.type, tensor.shape, tensor.nbytes) for one, tensor in tensors.items())
        with state.open("wb") as to:
            to.write(safetensors_header(stored, {"powerinfer": text}))
            for tensor in tensors.values():
                to.write(tensor.data)
        with pytest.raises(PowerInferError, match=f"training.safetensors:? .*{why}.*: give another --out"):
            made(dense, tmp_path, tokens=1024)
        assert (tmp_path / "model.gguf").read_bytes() == good
    state.unlink()
    with file.write(about, [(one, tensor.type, tensor.shape) for one, tensor in tensors.items()]) as write:
        for one, tensor in tensors.items():
            write(one, tensor.data)
    assert made(dense, tmp_path, tokens=1024).document["seconds"] > 1e6, "of all runs"
    record = json.loads((tmp_path / "finished.json").read_text())
    record["figures"]["perplexity"] = 10**400
    (tmp_path / "finished.json").write_text(json.dumps(record))
    assert made(dense, tmp_path, tokens=1024).document["resumed"] == 4


def test_the_type_of_products_is_that_of_the_state(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a trial chooses it, it may choose another one the next time."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    took = {torch.bfloat16: 1.0, torch.float32: 2.0}
    monkeypatch.setattr("powerinfer_train.training._product", lambda kind: took[kind])
    fast_type.cache_clear()
    whole = made(dense, tmp_path / "whole", tokens=1024).path.read_bytes()

    def stop(label: str, done: int, total: int) -> None:
        if label == "training" and done == 2:
            raise KeyboardInterrupt

    config = SparsifyConfig(**(SMALL | {"zeros": 0.7, "tokens": 1024, "save": 0.0}))
    with pytest.raises(KeyboardInterrupt):
        sparsify(open_checkpoint(dense), [], config, tmp_path / "parts", Listener(stop), threads=1)
    took[torch.bfloat16] = 3.0
    fast_type.cache_clear()
    made(dense, tmp_path / "parts", tokens=1024, save=0.0)
    assert (tmp_path / "parts" / "model.gguf").read_bytes() == whole
    fast_type.cache_clear()


def test_an_original_that_says_nothing_is_refused(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*given: Any) -> dict[str, torch.Tensor]:
        return {name: value * math.nan if name == "final_norm" else value for name, value in load(*given).items()}

    monkeypatch.setattr("powerinfer_train.training.load", damaged)
    for recipe in ("cats", "reglu"):
        with pytest.raises(PowerInferError, match=r"tiny\.gguf gives no usable probabilities for these texts"):
            made(dense, tmp_path, tokens=1024, recipe=recipe)


def test_a_text_whose_name_is_none(dense: Path, tmp_path: Path) -> None:
    text = tmp_path / os.fsdecode(b"caf\xe9.txt")
    text.write_text("It is a truth universally acknowledged, that a single man must be in want of a wife. " * 60)
    config = SparsifyConfig(**(SMALL | {"batch": 128, "tokens": 512}))
    done = sparsify(open_checkpoint(dense), [str(text)], config, tmp_path / "out", threads=1)
    assert done.document["corpora"] == [text.name] and "caf?.txt" in (tmp_path / "out" / "README.md").read_text()
    assert sparsify(open_checkpoint(dense), [str(text)], config, tmp_path / "out", threads=1).document == done.document


def test_windows_are_drawn_from_all_of_a_text(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal shares of texts whatever their lengths; others with a start, and what is held out in neither."""
    monkeypatch.setattr("powerinfer_train.training.MAX_HELD_OUT", 3 * 32)
    for name, repeated in (("long", 4000), ("short", 1500)):
        (tmp_path / name).write_text("".join(f"{name} {number} " for number in range(repeated)))
    corpora = open_corpora([str(tmp_path / "long"), str(tmp_path / "short")])
    options = SparsifyConfig(**(SMALL | {"tokens": 512, "type": "q4_0"}))
    original = open_checkpoint(dense)
    begun = open_checkpoint(made(dense, tmp_path / "first", tokens=512, type="f16").path)
    notes: list[str] = []
    first = Sparsifier(original, corpora, options, tmp_path, say=notes.append)
    other = Sparsifier(original, corpora, replace(options, batch=300), tmp_path, say=notes.append, start=begun)
    assert notes == ["--batch 300 is not a multiple of --window 32: a step has 288 tokens"]
    assert len(first._train) == len(other._train) == 2 * 512 // 32
    assert len(first._held_out) == 6 and np.array_equal(first._held_out, other._held_out)
    rows = [{tuple(row) for row in work._train.tolist()} for work in (first, other)]
    assert rows[0] != rows[1] and not (rows[0] | rows[1]) & {tuple(row) for row in first._held_out.tolist()}
    assert [stage.stored for stage, _ in first.stages] == [False, True]
    assert all(stage.stored for stage, _ in other.stages)


def test_a_loss_that_is_no_number_stops_and_keeps(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Sparsifier._distil
    calls = 0

    def broken(self: Sparsifier, tokens: torch.Tensor, scale: float) -> float:
        nonlocal calls
        calls += 1
        return float("nan") if calls == 20 else plain(self, tokens, scale)

    monkeypatch.setattr(Sparsifier, "_distil", broken)
    with pytest.raises(PowerInferError, match=r"the loss is nan and .* at step 9: the state of step 9 is kept"):
        made(dense, tmp_path, save=1e-9, tokens=5120)
    assert not (tmp_path / "model.gguf").exists()
    monkeypatch.setattr(Sparsifier, "_distil", plain)
    assert made(dense, tmp_path, lr=0.5, tokens=5120).document["resumed"] == 9


# ---------------------------------------------------------------- text that the model writes itself


def chats(folder: Path) -> Path:
    said = [("system", "Be brief."), ("user", "What is the year?"), ("assistant", "It is late.")]
    lines = [{"messages": [{"role": role, "content": what} for role, what in said]}] * 3 + [{"text": "Not a prompt."}]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def written(model: Path, out: Path, *texts: Path, tokens: int = 1200, progress: Any = silent) -> OwnText:
    return write_own_text(
        open_checkpoint(model), open_corpora(list(map(str, texts))), tokens, 0, out, progress, threads=1
    )


def test_own_text_is_written_batch_by_batch(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer_train.own_text.BATCH", 4)
    told: list[tuple[str, int, int]] = []
    whole = written(dense, tmp_path / "whole", progress=lambda *about: told.append(about))
    assert [done for label, done, _ in told if label == "writing text" and done >= 1200] == [1200], "all, once"
    tokenizer = tokenizer_of(open_checkpoint(dense))
    prompt = tokenizer.encode("Alice was beginning to get very tired of sitting by her", special=False, add_bos=False)
    assert whole.answers[0].tolist()[: len(prompt)] == prompt and len(whole.answers[0]) > len(prompt) + 10
    assert len({one.tobytes() for one in whole.answers}) == len(whole.answers), "answers differ"
    assert whole.tokens - len(whole.answers[-1]) < 1200 <= whole.tokens == sum(map(len, whole.answers))

    calls = 0

    def stop(label: str, done: int, total: int) -> None:
        nonlocal calls
        calls += label == "writing text" and done > 0
        if calls == 6:  # in the second batch
            raise KeyboardInterrupt

    parts = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        written(dense, parts, progress=stop)
    assert not (parts / "own-text.jsonl").exists()
    kept = (parts / "own-text.jsonl.part").read_bytes()
    assert kept.count(b"\n") == 5, "what it was made from, and a batch"
    (parts / "own-text.jsonl.part").write_bytes(kept + b"[[1,2],[3")
    again = written(dense, parts)
    assert (parts / "own-text.jsonl").read_bytes() == (tmp_path / "whole" / "own-text.jsonl").read_bytes()
    assert [one.tolist() for one in again.answers] == [one.tolist() for one in whole.answers]
    monkeypatch.setattr("powerinfer.runtime.engine.LLM", None)  # nothing is written twice
    assert written(dense, parts).tokens == whole.tokens
    with pytest.raises(RequestError, match=r"own-text\.jsonl is of another model, text or option"):
        written(dense, parts, tokens=1300)
    (parts / "own-text.jsonl").write_bytes(kept + b"[[1,2],[99999]]\n")
    with pytest.raises(PowerInferError, match="is damaged: remove it"):
        written(dense, parts)


def test_own_text_answers_conversations(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer_train.own_text.BATCH", 2)
    source = "{% for one in messages %}[{{ one.role }}] {{ one.content }}\n{% endfor %}"
    source += "{% if add_generation_prompt %}[answer]{% endif %}"
    monkeypatch.setattr("powerinfer_train.own_text.chat_template_of", lambda _: ChatTemplate(source))
    made = written(dense, tmp_path / "out", chats(tmp_path), tokens=150)
    tokenizer = tokenizer_of(open_checkpoint(dense))
    assert len(made.answers) > 1
    for answer in made.answers:
        assert tokenizer.decode(answer.tolist()).startswith("[system] Be brief.\n[user] What is the year?\n[answer]")
    refused = "{% if messages[0].content == 'Stop.' %}{{ raise_exception('not this one') }}{% endif %}" + source
    monkeypatch.setattr("powerinfer_train.own_text.chat_template_of", lambda _: ChatTemplate(refused))
    bad = tmp_path / "bad.jsonl"
    said = [("user", "Stop."), ("assistant", "Yes.")]
    bad.write_text(json.dumps({"messages": [{"role": role, "content": what} for role, what in said]}) + "\n")
    lines: list[str] = []
    corpora = open_corpora([str(bad), str(chats(tmp_path))])
    some = write_own_text(open_checkpoint(dense), corpora, 400, 0, tmp_path / "some", threads=1, say=lines.append)
    assert len(some.answers) > 2 and len(lines) == 1 and "conversations left out: 1; of the first one" in lines[0]
    with pytest.raises(RequestError, match=r"hold no conversation .* \(conversations left out: 1; .*not this one"):
        written(dense, tmp_path / "bad", bad)
    nothing = tmp_path / "a.txt"
    nothing.write_text("Heading\n\nTwo words\n")
    with pytest.raises(RequestError, match="hold no conversation or sentence"):
        written(dense, tmp_path / "none", nothing)


def test_answers_that_are_of_no_use(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(open_checkpoint(dense))
    end = sorted(tokenizer.eos_ids)[:1]
    words = tokenizer.encode("It was the best of times, it was the worst of times; a far better thing that I do.")
    assert is_useful(words, tokenizer) and is_useful(words + end, tokenizer) and is_useful([5] * 23, tokenizer)
    for period in (1, 7, 64):
        loop = list(range(10, 10 + period)) * max(3, 25 // period + 1)
        assert not is_useful(words + loop, tokenizer) and not is_useful(words + loop + end, tokenizer)
        assert is_useful(loop + words, tokenizer)
    assert not is_useful([], tokenizer) and not is_useful(end, tokenizer)
    monkeypatch.setattr("powerinfer_train.own_text.BATCH", 1)
    monkeypatch.setattr("powerinfer_train.own_text.is_useful", lambda *_: False)
    with pytest.raises(PowerInferError, match="the model's answers are empty or loops"):
        written(dense, tmp_path / "out")


def test_own_text_joins_the_texts(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer_train.own_text.BATCH", 4)
    done = made(dense, tmp_path / "out", tokens=1024, own_text=1000)
    assert done.document["corpora"] == ["built-in sample", "own text"]
    assert done.document["own_text_tokens"] >= 1000
    assert (
        f"{done.document['own_text_tokens']:,} tokens of the original's answers"
        in (tmp_path / "out" / "README.md").read_text()
    )
    (tmp_path / "out" / "finished.json").unlink()
    assert made(dense, tmp_path / "out", tokens=1024, own_text=1000).document["resumed"] == 4


# ---------------------------------------------------------------- files, the command, what is refused


def test_folders(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # two trainings are compared: in bfloat16 those of a random model part further than the types they are stored in
    monkeypatch.setattr("powerinfer_train.training.fast_type", lambda *_: torch.float32)
    source = tmp_path / "source"
    sizes = ["--shape", "tiny", "--format", "hf", "--profile", "reglu-70b", "--layers", "2", "--type", "bf16"]
    asked = make_model.parser().parse_args([str(source), *sizes])
    make_model.make(source, make_model.plan_of(asked), asked.format, asked.type)
    edit_config(source, hidden_act="silu")
    sampling = {"temperature": 0.35, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.1}
    (source / "generation_config.json").write_text(json.dumps(sampling))
    for name in ("consolidated.safetensors", "old.gguf", "pytorch_model.bin", "log.csv"):  # of the original's, or none
        (source / name).write_text("x")
    done = made(source, tmp_path / "out", tokens=2048)
    assert not {"consolidated.safetensors", "old.gguf", "pytorch_model.bin"} & {one.name for one in done.path.iterdir()}
    assert len(read_log(done.path / "log.csv")) == 8
    checkpoint, before = open_checkpoint(done.path), open_checkpoint(source)
    assert checkpoint.config.activations == "cats" and checkpoint.main_type == "BF16"
    assert np.allclose(limits(checkpoint), done.document["limits"], rtol=1e-5)
    for name in before.names():
        assert checkpoint.take(name).shape == before.take(name).shape
    changed = checkpoint.take("layers.0.gate").float32() != before.take("layers.0.gate").float32()
    assert changed.any()
    assert "made sparse" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    as_gguf = made(source, tmp_path / "gguf", tokens=2048, format="gguf", type="f16")
    assert as_gguf.path == tmp_path / "gguf" / "model.gguf" and open_checkpoint(as_gguf.path).main_type == "F16"
    assert sampling_defaults_of(open_checkpoint(as_gguf.path)).values == sampling
    folder, file = open_checkpoint(done.path), open_checkpoint(as_gguf.path)
    for name in ("gate", "up", "down", "threshold"):
        one, other = (of.take(f"layers.1.{name}").float32() for of in (folder, file))
        assert np.allclose(one, other, rtol=2**-8, atol=1e-7), name  # bfloat16; the least steps of float16
    one, other = (math.log(of.document["perplexity"]) for of in (done, as_gguf))
    assert one == pytest.approx(other, rel=0.01)
    with LLM(as_gguf.path, threads=1) as llm:
        assert len(llm.generate("It was", SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


def test_a_model_in_parts(dense: Path, tmp_path: Path) -> None:
    """Its tensors come out in one file, the changed ones of every part."""
    file = read_gguf(dense)
    names = list(file.tensors)
    for number, own in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        about = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        metadata = (metadata_bytes(dense) if number == 0 else {}) | {key: encoded(what) for key, what in about.items()}
        tensors = [(name, file.tensors[name].type, file.tensors[name].shape) for name in own]
        with (tmp_path / f"m-{number + 1:05d}-of-00002.gguf").open("wb") as to:
            write_gguf(to, metadata, tensors, (file.tensors[name].data for name in own))
    whole = made(dense, tmp_path / "whole", tokens=1024).path
    parts = made(tmp_path / "m-00002-of-00002.gguf", tmp_path / "parts", tokens=1024).path
    assert parts.read_bytes() == whole.read_bytes()


def test_a_gguf_model_as_folder(dense: Path, tmp_path: Path) -> None:
    """The same training, written in either format, is the same model; what cannot be written is not trained."""
    with pytest.raises(RequestError, match=r"in --type q8_0 \(only bf16, f16, f32\); --format same writes a GGUF"):
        made(dense, tmp_path / "other", format="folder", type="q8_0")
    assert not (tmp_path / "other").exists()
    folder, file = (made(dense, tmp_path / form, tokens=512, type="f16", format=form) for form in ("folder", "gguf"))
    assert folder.path == tmp_path / "folder" and file.path == tmp_path / "gguf" / "model.gguf"
    assert "--type f16" in (folder.path / "README.md").read_text()
    for one, other in ((folder, "perplexity"), (folder, "zeros")):
        assert one.document[other] == pytest.approx(file.document[other], rel=1e-3)
    answers = []
    for path in (folder.path, file.path):
        with LLM(path, threads=1, selector="all") as llm:
            tokens = llm.tokenizer.encode("It was the best of times, it was the worst of times.")
            rows: list[np.ndarray] = []
            llm.score(tokens, 0, lambda at, logits: rows.append(np.array(logits)))  # noqa: B023
            answers.append(np.concatenate(rows))
    assert np.abs(answers[0] - answers[1]).max() < 1e-2 * answers[1].std()
    with pytest.raises(RequestError, match="or has it in another format: take the original in that one"):
        check_start(open_checkpoint(folder.path), open_checkpoint(dense), "cats")


def test_the_command(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("powerinfer_train.draw_log", draw_log)
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that a single man must be in want of a wife. " * 60)
    flags = ["--window", "32", "--batch", "128", "--tokens", "512", "--zeros", "0.5", "--corpus", str(text), "--json"]
    assert main(["sparsify", "-m", str(dense), "--out", str(tmp_path / "out"), "-t", "1", *flags]) == 0
    about = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert about["path"] == str(tmp_path / "out" / "model.gguf") and about["corpora"] == ["text.txt"]
    assert len(about["zeros_by_layer"]) == 2 and about["tokens"] == 512 and about["resumed"] == 0
    assert (tmp_path / "out" / "loss.png").exists()


def test_a_long_training_is_estimated_first(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is long says how long, and asks at a terminal; --yes does not ask, and what goes on is agreed to already."""
    monkeypatch.setattr("powerinfer_train.LONG", 0)
    monkeypatch.setattr("powerinfer_train.timing.peak", lambda *_: 1e9)
    costs = stage_costs(open_checkpoint(dense).config, RECIPES["cats"], 512, 32)
    hours = sum(stage.tokens * stage.flops for stage in costs) / (0.35 * 1e9) / 3600
    flags = ["sparsify", "-m", str(dense), "--window", "32", "--batch", "128", "--tokens", "512", "-t", "1"]
    assert main([*flags, "--out", str(tmp_path / "out")]) == 0
    said = re.search(r"training on 512 tokens takes about ([0-9.]+) seconds on this machine", capsys.readouterr().err)
    assert said and float(said[1]) == pytest.approx(3600 * hours, abs=0.1)
    monkeypatch.setattr("powerinfer.cli.sparsify.ASKED", 0)
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr("powerinfer.cli.sparsify.agreed", lambda question: bool(asked.append(question)))
    assert main([*flags, "--out", str(tmp_path / "other")]) == 2
    assert "nothing was trained; --yes begins" in capsys.readouterr().err and not (tmp_path / "other").exists()
    assert main([*flags, "--out", str(tmp_path / "other"), "--yes"]) == 0 and asked == ["begin?"]
    (tmp_path / "other" / "finished.json").unlink()
    assert main([*flags, "--out", str(tmp_path / "other")]) == 0 and asked == ["begin?"], "it goes on"


def test_a_finished_training_is_not_done_again(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command has nothing left to do, unless a file is missing or something else is asked for."""
    text, out, evaluated = tmp_path / "text.txt", tmp_path / "out", []
    text.write_text("It is a truth universally acknowledged, that a single man must be in want of a wife. " * 60)
    evaluate = Sparsifier.evaluate
    monkeypatch.setattr(Sparsifier, "evaluate", lambda *given: [evaluated.append(1), evaluate(*given)][1])
    line = ["sparsify", "-m", str(dense), "--out", str(out), "--corpus", str(text), "-t", "1", "--json"]
    line += ["--window", "32", "--batch", "128", "--tokens", "512"]

    def command(*more: str) -> tuple[bool, dict[str, Any]]:
        """Whether it did anything, and what it says."""
        evaluated.clear()
        assert main([*line, *more]) == 0
        said = capsys.readouterr()
        assert bool(evaluated) == ("holds what this command made before: nothing is left to do" not in said.err)
        return bool(evaluated), json.loads(said.out.splitlines()[-1])

    _, first = command()
    assert command() == (False, first)
    assert command("--save", "5") == (False, first) and command("--device", "cpu") == (False, first)
    (out / "training.safetensors").rename(tmp_path / "training.safetensors")
    assert command() == (False, first)  # the state is of no more use
    with pytest.raises(RequestError, match=r"has a model of other options, .* and no training\.safetensors to go"):
        made(dense, out)
    (tmp_path / "training.safetensors").rename(out / "training.safetensors")
    assert command("--type", "f16")[0] and not command("--type", "f16")[0]
    assert command()[0] and not command()[0]
    record = (out / "finished.json").read_text()
    for lacking in (lambda: (out / "README.md").unlink(), lambda: (out / "finished.json").write_text("[]"),
                    lambda: (out / "finished.json").write_text(record.replace('"ratio"', '"rates"')),
                    lambda: os.truncate(out / "model.gguf", 4096), lambda: os.utime(text, (0, 0))):  # fmt: skip
        lacking()
        done, again = command()
        assert done and again["perplexity"] == first["perplexity"] and again["resumed"] == 4

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("powerinfer_train.write_model", interrupted)
    assert main([*line, "--type", "f16"]) == 130
    assert not (out / "finished.json").exists()  # model.gguf may be of either


# ---------------------------------------------------------------- larger models: what they would take, and small ones

PUBLISHED = {
    "llama-3.1-8b": "llama",
    "qwen3-4b": "qwen3",
    "qwen3-30b-a3b": "qwen3moe",
    "deepseek-v2-lite": "deepseek2",
    "deepseek-v3": "deepseek2",
    "qwen3-next-80b-a3b": "qwen3next",
    "qwen3.6-35b-a3b": "qwen35moe",
}
SHARED = ("deepseek2", "qwen3next", "qwen35moe")  # with a shared expert
"""By name of a shape, the architecture in GGUF."""


def small_shape(name: str) -> ModelConfig:
    """Two layers of a published model, narrow."""
    config = find_shape(name).config
    if PUBLISHED[name] in SHARED:
        return small(replace(config, architecture=PUBLISHED[name]))
    layer = config.layers[-1]
    ffn = replace(layer.ffn, size=64)
    if isinstance(ffn, ExpertsConfig):
        ffn = replace(ffn, n_experts=8, router=replace(ffn.router, top_k=2))
    attention = replace(layer.attention, n_heads=4, n_kv_heads=2, head_dim=16, rope=RopeConfig(1e6, 16))
    layers = (replace(layer, attention=attention, ffn=ffn),) * 2
    return replace(config, architecture=PUBLISHED[name], d_model=64, vocab_size=1200, layers=layers)


def estimated(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["sparsify", "--estimate", "--json", *flags]) == 0
    about = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(about, dict)
    return about


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_published_families(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command trains them, and says before what it would take."""
    path = tmp_path / "tiny.gguf"
    expert_models.write(path, small_shape(name), expert_models.Weights("f16", "f16"))
    flags = ["--window", "32", "--batch", "256", "--rows", "4", "--tokens", "1024", "-t", "1", "--device", "cpu"]
    about = estimated(capsys, "-m", str(path), *flags)
    assert about["parameters"] == open_checkpoint(path).parameters and about["here"] is None
    assert main(["sparsify", "-m", str(path), "--out", str(tmp_path / "out"), "--json", *flags]) == 0
    said = capsys.readouterr()
    done = json.loads(said.out.splitlines()[-1])
    assert "the text is a small built-in sample" in said.err
    by_type = bool(open_checkpoint(path).config.experts)
    assert "will not be faster, experts in" not in said.err
    why = _dense_reason_by_type(open_checkpoint(path), SparsifyConfig(type="f32"))
    assert not by_type or (why or "").startswith("experts in F32 are computed whole (those in F16,")
    assert done["architecture"] == PUBLISHED[name] and done["zeros"] > 0.3
    with LLM(done["path"], threads=1) as llm:
        assert len(llm.generate("It was", SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


@pytest.mark.parametrize("recipe", ["fatrelu", "drelu"])
def test_gpt_oss(recipe: str, tmp_path: Path) -> None:
    """The 1 that its activation adds to up is in the biases of the sparse model."""
    path = tmp_path / "tiny.gguf"
    expert_models.write(path, small(expert_models.CONFIGS["gpt-oss-20b"]), expert_models.Weights("mxfp4"))
    before, notes = open_checkpoint(path), list[str]()
    layers = tuple(replace(one, ffn=replace(one.ffn, bias=False)) for one in before.config.layers)  # type: ignore
    with pytest.raises(RequestError, match="changes biases of up in experts of swiglu_oai, and this model has none"):
        check_recipe(recipe, replace(before.config, layers=layers))
    options = SparsifyConfig(**(SMALL | {"recipe": recipe, "zeros": 0.7, "tokens": 1024, "type": "f16"}))
    work = Sparsifier(before, open_corpora([]), options, tmp_path)
    own, original = (
        of.neurons(torch.randn(9, 64, generator=torch.Generator().manual_seed(1)), "layers.0.experts_", 3)
        for of in (work.student, work.teacher)
    )
    assert original.gate is not None
    up = original.up + 1
    wanted = original.gate.relu() * (up.relu() if recipe == "drelu" else up)
    assert float((own.h - wanted).norm()) < 1e-2 * float(wanted.norm())  # products may be in bfloat16
    done = sparsify(before, [], options, tmp_path / "out", listener=Listener(say=notes.append), threads=1)
    assert any("will not be faster, experts with biases are computed whole" in note for note in notes)
    after = open_checkpoint(done.path)
    assert after.config.activations == recipe and done.document["zeros"] > 0.4
    for name, shape in shapes(before.config):
        if not is_matrix(name, shape):
            more = 1 if name.endswith("experts_up_bias") else 0
            assert np.array_equal(after.take(name).float32(), before.take(name).float32() + more), name
    again = sparsify(before, [], options, tmp_path / "again", threads=1, start=after).path
    first, second = (one.take("layers.1.experts_up_bias").float32() for one in (after, open_checkpoint(again)))
    assert np.array_equal(first, second)
    own_logits, known = logits_of(again)
    assert np.median(np.abs(own_logits - known).max(1) / known.std()) < 0.02


def logits_of(model: Path) -> tuple[np.ndarray, np.ndarray]:
    """The engine's and torch's, [tokens, vocab]."""
    with LLM(model, threads=1, selector="all") as llm:
        tokens = llm.tokenizer.encode("It was the best of times, it was the worst of times.")
        rows: list[np.ndarray] = []
        llm.score(tokens, 0, lambda at, logits: rows.append(np.array(logits)))
    checkpoint = open_checkpoint(model)
    own = TorchModel(checkpoint.config, load(checkpoint), torch.float32)
    with torch.no_grad():
        return np.concatenate(rows), own.logits(own.states(torch.tensor([tokens])))[0].numpy()


def trained(name: str) -> float:
    """Weights of a published model that a token is multiplied with and the last stage changes."""
    config, total = find_shape(name).config, 0.0
    sizes = dict(shapes(config))
    for one in trained_names(config)[1]:
        ffn = config.layers[int(one.split(".")[1])].ffn
        some = isinstance(ffn, ExpertsConfig) and ".experts_" in one
        total += math.prod(sizes[one]) * (ffn.router.top_k / ffn.n_experts if some else 1)  # type: ignore[attr-defined]
    return total


def test_what_a_training_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    every = {name: estimated(capsys, "--shape", name, "--tokens", "1000000") for name in PUBLISHED}
    llama = every["llama-3.1-8b"]
    ffns, attention, head = 32 * 3 * 4096 * 14336, 32 * (2 * 4096 + 2 * 1024) * 4096, 128256 * 4096
    mixing = 32 * 32 * 128 * 256  # layers, heads, their width, a window; a token sees half of it, twice
    assert llama["active_parameters"] == ffns + attention + head
    first, last = llama["stages"]
    ways = 2 * (ffns + attention + head)  # teacher forward, student forward, and backward to the inputs
    assert first["flops"] == 3 * ways + 2 * 4 * mixing + 2 * first["weights"] and first["weights"] >= ffns
    assert first["tokens"] + last["tokens"] == 1_000_000
    assert llama["flops"] == sum(one["tokens"] * one["flops"] for one in llama["stages"])
    whole, moments, weights = llama["memory"]
    assert whole["device"] - moments["device"] == moments["ram"] == 8 * last["weights"]
    assert whole["device"] - weights["device"] == weights["ram"] == 12 * last["weights"]
    assert 20 * last["weights"] < whole["device"] < 24 * llama["parameters"]
    card, h100 = llama["devices"]
    assert card["hours"] == pytest.approx(llama["flops"] / 165.2e12 / 0.35 / 3600) and card["fits"] is None
    assert h100["hours"] == pytest.approx(card["hours"] * 165.2 / 989.4)
    heads = {"deepseek-v2-lite": 27 * 16 * (192 + 128) / 2 * 256, "deepseek-v3": 61 * 128 * (192 + 128) / 2 * 256}
    states = 32 * (32 * 5 * 128 + 32**2 / 2 + 3 * 128**2) + 4 * 8192  # of a layer: within chunks of 32, and with states
    heads |= {"qwen3-next-80b-a3b": 12 * 16 * 256**2 + 36 * states, "qwen3.6-35b-a3b": 10 * 16 * 256**2 + 30 * states}
    for name, others in heads.items():
        last = every[name]["stages"][-1]
        used = 2 * every[name]["active_parameters"] * 3 + 2 * 4 * others
        assert used < last["flops"] < used + 2 * every[name]["active_parameters"]
        assert last["flops"] == pytest.approx(used + 2 * trained(name), rel=1e-4)
    experts = every["qwen3-30b-a3b"]
    assert experts["active_parameters"] == pytest.approx(3.04e9, rel=0.01), "what the model's name says, but the table"
    assert experts["flops"] < every["qwen3-4b"]["flops"]
    half = estimated(capsys, "--shape", "llama-3.1-8b", "--tokens", "1000000", "--share", "0.7")
    assert half["devices"][0]["hours"] == pytest.approx(card["hours"] / 2)
    assert main(["sparsify", "--estimate", "--shape", "qwen3-4b", "--recipe", "reglu", "--tokens", "400000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = ("stage 1, regress: 160,000", "stage 2, distil: 180,000", "stage 3, distil: 60,000")
    assert all(line.startswith(start) for line, start in zip(lines[1:4], starts, strict=True))
    assert lines[-2].startswith("RTX 4090: 3.0 minutes (35% of 165") and lines[-1].startswith("H100 SXM: 30.2 seconds")
    regress = estimated(capsys, "--shape", "llama-3.1-8b", "--recipe", "reglu")["stages"][0]
    assert regress["flops"] == 2 * (ffns + attention + mixing) + 2 * ffns + 2 * (ffns + ffns // 3)


@pytest.mark.parametrize(
    "name", ["qwen3-4b", pytest.param("qwen3-30b-a3b", marks=pytest.mark.rest), "qwen3.6-35b-a3b"]
)
def test_a_measured_rate(name: str) -> None:
    config = small_shape(name)
    options = SparsifyConfig(recipe="reglu", window=16, batch=64, rows=2, device="cpu", own_text=99)
    rates = measured(config, options, 1)
    assert len(rates.stages) == 3 and min(*rates.stages, rates.peak) > 0 and rates.device == "cpu"
    about = estimate(config, options, None, rates)
    seconds = sum(one["tokens"] * one["flops"] / rate for one, rate in zip(about["stages"], rates.stages, strict=True))
    assert about["here"]["hours"] == pytest.approx(seconds / 3600)
    assert about["share"] == pytest.approx(min(1, about["flops"] / seconds / rates.peak))


def test_a_rate_counts_the_tokens_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 steps of each of 3 stages, a second each by this clock; a batch of 70 tokens is 4 windows of 16."""
    monkeypatch.setattr("powerinfer_train.timing.time", SimpleNamespace(perf_counter=count().__next__))
    config, steps = small_shape("qwen3-4b"), list[int]()
    options = SparsifyConfig(recipe="reglu", window=16, batch=70, rows=2, device="cpu")
    rates = measured(config, options, 1, lambda label, done, of: steps.append(of) if label == "training" else None)
    costs = stage_costs(config, check_recipe("reglu", config), 1000, 16)
    assert steps == [12] * 12 and rates.stages == tuple(cost.flops * 64 for cost in costs)


def test_each_stage_is_timed_over_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this clock a look takes 1 s, and a step of the stages 10, 20 and 40 s, whose shares of the tokens differ."""
    now, stages = [0], list[RecipeStage]()

    def clock() -> int:
        now[0] += 1
        return now[0]

    def step(label: str, done: int, of: int) -> None:
        if label == "training":
            now[0] += 10 * 2 ** RECIPES["reglu"].stages.index(stages[-1])

    plain = Sparsifier._stage

    def begun(self: Sparsifier, stage: RecipeStage, *about: Any) -> None:
        stages.append(stage)
        plain(self, stage, *about)

    monkeypatch.setattr("powerinfer_train.timing.time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(Sparsifier, "_stage", begun)
    config = small_shape("qwen3-4b")
    options = SparsifyConfig(recipe="reglu", window=16, batch=64, rows=2, device="cpu")
    rates = measured(config, options, 1, step)
    costs = stage_costs(config, check_recipe("reglu", config), 1000, 16)
    took = [64 * cost.flops / rate for cost, rate in zip(costs, rates.stages, strict=True)]
    assert took == pytest.approx([11, 21, 41])


def test_estimates_that_cannot_be(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--estimate", "--shape", "gpt-5"], "no shape 'gpt-5'"),
        (["--estimate", "--shape", "llama-7b"], "recipe cats is for gated FFNs of silu"),
        (["--estimate", "--shape", "qwen3-4b", "-m", str(dense)], "not both"),
        (["--estimate", "--shape", "qwen3-4b", "--share", "0"], "--share 0 must be above 0 and at most 1"),
        (["--estimate", "--shape", "qwen3-4b", "--window", "0"], "--window must be"),
        (["--estimate", "--shape", "gpt-oss-20b", "--measure"], "swiglu_oai: use recipe fatrelu or reglu or drelu"),
        (["--estimate", "--shape", "qwen3-4b", "--tokens", "1024"], "--tokens 1024 is less than a step"),
        (["--estimate", "--shape", "qwen3-4b", "--window", "40961", "--batch", "40961"], "is more than the model's"),
        (["-m", str(dense), "--measure", "--out", "x"], "are for --estimate"),
        (["-m", str(dense.parent / "none"), "--out", "x", "--tokens", "0"], "--tokens must be a whole number"),
        (["-m", str(dense)], "missing: --out"),
    ):
        assert main(["sparsify", *flags]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["window", "rows", "batch", "tokens"])
def test_numbers_that_are_none(option: str, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"--{option} (0 )?(must be|is less)"):
        made(dense, tmp_path, **{option: 0})


def test_what_cannot_be(dense: Path, tmp_path: Path) -> None:
    relu = tmp_path / "relu"
    made(dense, relu, recipe="reglu", tokens=512)
    with pytest.raises(RequestError, match="recipe cats is for gated FFNs of silu, and this model has FFN of 128"):
        made(relu / "model.gguf", tmp_path / "out")
    with pytest.raises(RequestError, match="holds the model itself"):
        made(dense, dense.parent)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "README.md").write_text("mine")
    with pytest.raises(RequestError, match="has files that no training made"):
        made(dense, foreign)
    assert (foreign / "README.md").read_text() == "mine"
    for options, message in (
        ({"own_text": -1}, "--own-text must be a whole number of at least 0, not -1"),
        ({"seed": -1}, "--seed must be a whole number of at least 0, not -1"),
        ({"seed": 1 << 63}, "--seed 9223372036854775808 is more than 64 bits hold"),
        ({"zeros": 1.0}, "--zeros 1 must be above 0 and below 1"),
        ({"save": float("nan")}, "--save must be a number of seconds, not nan"),
        (
            {"type": "q5_1"},
            "--type must be one of auto, same, f32, f16, bf16, q8_0, q5_0, q4_0, not 'q5_1'",
        ),
        ({"batch": 16}, "--batch 16 is less than a window of 32"),
        ({"lr": 0.0}, "--lr 0 must be above 0"),
        ({"tokens": 100}, "--tokens 100 is less than a step of --batch 256 tokens"),
        ({"window": 129}, "--window 129 is more than the model's context of 128"),
        ({"recipe": "gelu"}, "--recipe must be one of cats, "),
        ({"gate_zeros": 0.4}, "--gate-zeros is for --recipe product alone"),
        ({"recipe": "product", "gate_zeros": 0.8}, r"--gate-zeros 0.8 must be above 0 and at most --zeros"),
        ({"recipe": "product", "gate_zeros": math.nan}, r"--gate-zeros nan must be above 0 and at most --zeros"),
    ):
        with pytest.raises(RequestError, match=message):
            made(dense, tmp_path / "out", **({"own_text": 10**9} | options))
    with pytest.raises(RequestError, match=r"--out .*README\.md/out cannot be written: Not a directory; give another"):
        made(dense, foreign / "README.md" / "out", own_text=10**9)
    short = tmp_path / "short.txt"
    short.write_text("one two three four five six seven eight nine ten")
    with pytest.raises(RequestError, match="too few to train on"):
        sparsify(
            open_checkpoint(dense),
            [str(short)],
            SparsifyConfig(**(SMALL | {"window": 16, "batch": 16})),
            tmp_path / "out",
        )


@pytest.mark.parametrize("product", [torch.float32, torch.bfloat16])
def test_memory_is_asked_for_before_anything_else(
    product: torch.dtype, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rule of --estimate: 20 bytes of a weight that is trained, and what the windows take."""
    config = open_checkpoint(dense).config
    trained = SHAPE.n_layers * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    one, all_rows = (memory(config, RECIPES["cats"], rows, 32, product.itemsize)[0].device for rows in (1, 4))
    stored = product.itemsize * open_checkpoint(dense).parameters
    assert 0 < one - stored - (18 if product.itemsize == 2 else 16) * trained == (all_rows - one) // 3
    monkeypatch.setattr("powerinfer_train.training.fast_type", lambda *_: product)
    monkeypatch.setattr("powerinfer_train.training.free_bytes", lambda device: all_rows - 1)
    with pytest.raises(RequestError, match=r"training needs about .* are free: smaller --rows"):
        made(dense, tmp_path, own_text=10**9)
    assert made(dense, tmp_path, tokens=512, rows=3).document["tokens"] == 512
    monkeypatch.setattr("powerinfer_train.training.free_bytes", lambda device: 1)
    with pytest.raises(RequestError, match=r"training needs about .* are free: no --rows and .* smaller model"):
        made(dense, tmp_path / "none", own_text=10**9)


def test_the_steps_as_a_picture(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{at},{'regress' if at < 40 else 'distil'},{100 * (at + 1)},{5 / (1 + at)},0.{at:02}" for at in range(99)]
    broken = ["", "x", "7,distil,700,nan,0.3", "9,distil", "\0" * 200_000, f"{'9' * 5000},distil,1,1,0.3"]
    (tmp_path / "log.csv").write_text("\n".join(["step,stage,tokens,loss,zeros", *lines, *broken]))
    steps = read_log(tmp_path / "log.csv")
    assert len(steps) == 99 and steps[40] == (4100, 5 / 41, 0.4)
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "log.csv", tmp_path / "again")
    begun = (tmp_path / "log.csv").read_bytes().partition(b"\n50,")[0] + b"\n"
    with StepLog(tmp_path / "again") as log:
        log.begin(50)
        assert (tmp_path / "again" / "log.csv").read_bytes() == begun, "what was damaged does not hinder a training"
        log.add(50, "distil", 5100, 0.25, 0.5)
        with pytest.raises(PowerInferError, match="another process is training in"):
            StepLog(tmp_path / "again")
    assert read_log(tmp_path / "again" / "log.csv") == [*steps[:50], (5100, 0.25, 0.5)]
    with StepLog(tmp_path / "again") as log:
        log.begin(0)
    assert (tmp_path / "again" / "log.csv").read_bytes() == b"step,stage,tokens,loss,zeros\r\n"
    with pytest.raises(PowerInferError, match=r"cannot write /dev/null/log\.csv \(File exists\)"):
        StepLog(Path("/dev/null"))
    drawn: list[Any] = []
    monkeypatch.setattr("powerinfer_train.step_log.draw_training", lambda *about: drawn.append(about[-1]))
    regress, distil, last = RECIPES["reglu"].stages
    image = draw_log(tmp_path, [(regress, 40), (distil, 45), (last, 14)])
    assert image == tmp_path / "loss.png" and image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    draw_log(tmp_path, [(distil, 75), (last, 24)])  # what a training with --start leaves
    assert drawn == [[("regress", 0), ("distil", 40), ("distil", 85)], [("distil", 0), ("distil", 75)]]
    figure = Figure()
    tokens, loss, zeros = ([step[at] for step in steps] for at in range(3))
    draw_training(figure, tokens, loss, zeros, [("regress", 0), ("distil", 40)])
    above, below = figure.axes
    assert [text.get_text() for text in above.texts] == ["regress", "distil"]
    assert below.lines[0].get_ydata()[50] == 50 and below.lines[-1].get_xdata()[0] == 4000, "where a stage begins"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("powerinfer_train.draw_log", draw_log)
    made(dense, tmp_path / "out", tokens=512)
    assert (tmp_path / "out" / "log.csv").exists() and not (tmp_path / "out" / "loss.png").exists()


def test_a_full_disk_leaves_no_half_model(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(dense, tmp_path / "out", tokens=512)
    before = (tmp_path / "out" / "model.gguf").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("powerinfer_train.writing.quantize", full)
    with pytest.raises(PowerInferError, match=r"cannot write .*/out/model\.gguf \(No space left on device\): the same"):
        made(dense, tmp_path / "out", tokens=512, type="f16")
    assert (tmp_path / "out" / "model.gguf").read_bytes() == before
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.mark.parametrize(("cats", "products"), [(True, False), (False, False), (True, True)])
def test_the_gradient_of_a_cut(cats: bool, products: bool) -> None:
    torch.manual_seed(0)
    gate, up, limit = (torch.randn(5, 32, requires_grad=True), torch.randn(5, 32, requires_grad=True), torch.rand(32))
    second = torch.rand(32) / 4 if products else None
    h, decides, product, fires = _Cut.apply(gate, up, limit, cats, 0, second)
    assert torch.equal(fires > 0, h != 0)
    active = torch.nn.functional.silu(gate) if cats else gate
    wanted = torch.where((active.abs() if cats else active) > limit, active * up, 0)
    assert torch.equal(decides, active.abs() if cats else gate)
    if second is not None:
        assert torch.equal(product, wanted.abs())
        assert float(((wanted != 0) & (wanted.abs() <= second)).float().mean()) > 0.05
        wanted = torch.where(wanted.abs() > second, wanted, 0)
    assert torch.equal(h, wanted) and (product is None) == (second is None)
    assert 0.2 < float((h == 0).float().mean()) < 0.9
    back = torch.randn(5, 32)
    for own, known in zip(
        torch.autograd.grad(h, (gate, up), back), torch.autograd.grad(wanted, (gate, up), back), strict=True
    ):
        assert torch.allclose(own, known, atol=1e-6)


def test_the_gradient_of_the_largest_of_a_bank() -> None:
    torch.manual_seed(0)
    gate, up, limit = (torch.randn(5, 128, requires_grad=True) for _ in range(3))
    unit = limit.detach().abs() + 0.1
    h, _, _, fires = _Cut.apply(gate, up, unit, True, 24)
    active = torch.nn.functional.silu(gate)
    ranked = (active.abs() / unit).view(5, 2, 64)
    counts = ranked >= ranked.sort(-1).values[..., -24:-23]
    assert torch.equal(fires.view(5, 2, 64) > 0, counts) and bool((counts.sum(-1) == 24).all())
    wanted = torch.where(counts.view(5, 128), active * up, 0)
    assert torch.equal(h, wanted)
    back = torch.randn(5, 128)
    for own, known in zip(
        torch.autograd.grad(h, (gate, up), back), torch.autograd.grad(wanted, (gate, up), back), strict=True
    ):
        assert torch.allclose(own, known, atol=1e-6)


@pytest.mark.parametrize("kind", ["q5_1", "q8_0", "same"])
def test_attention_of_another_type(kind: str, dense: Path, tmp_path: Path) -> None:
    config = SparsifyConfig(**(SMALL | {"type": "q4_0", "attention_type": kind}))
    rounded = Sparsifier(open_checkpoint(dense), open_corpora([]), config, tmp_path)._rounded
    made(dense, tmp_path / "out", tokens=512, type="q4_0", attention_type=kind)
    checkpoint = open_checkpoint(tmp_path / "out" / "model.gguf")
    for name in checkpoint.names():
        layer, _, part = name.rpartition(".")
        if layer and part in ("q", "k", "v", "o", "gate", "up", "down"):
            wanted = "Q4_0" if kind == "same" or part in FFN_PARTS else kind.upper()
            assert checkpoint.take(name).type == wanted, name
            assert rounded.get(name) == (None if wanted == "Q8_0" else wanted.lower()), name


def test_an_embedding_whose_rows_are_no_whole_blocks() -> None:
    """It is written in F16, and used so."""
    weight = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(_stored(weight, "q8_0"), weight.half().float())
    assert not torch.equal(_stored(weight[:, :32], "q8_0"), weight[:, :32].half().float())


def test_an_embedding_of_another_type(dense: Path, tmp_path: Path) -> None:
    before = open_checkpoint(dense).take("embed").float32()
    made(dense, tmp_path / "out", tokens=512, type="q5_0", embedding_type="q4_1")
    checkpoint = open_checkpoint(tmp_path / "out" / "model.gguf")
    embedding = checkpoint.take("embed")
    assert embedding.type == "Q4_1" and checkpoint.take("layers.0.up").type == "Q5_0"
    assert np.array_equal(embedding.float32(), dequantize(quantize(before, "Q4_1"), "Q4_1"))


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_weights_are_those_that_are_stored(kind: str) -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight.data[3, :32] = 0
    rounded, stored = _Rounded.apply(weight, *ROUNDED[kind]), kind.upper()
    assert np.array_equal(rounded.detach().numpy(), dequantize(quantize(weight.detach().numpy(), stored), stored))
    rounded.backward(torch.full((7, 96), 2.0))
    assert torch.equal(weight.grad, torch.full((7, 96), 2.0))


def test_the_gradient_of_the_divergence(dense: Path, tmp_path: Path) -> None:
    config = SparsifyConfig(**(SMALL | {"zeros": 0.5}))
    work = Sparsifier(open_checkpoint(dense), open_corpora([]), config, tmp_path)
    work.teacher = work.student = TorchModel(work._checkpoint.config, load(work._checkpoint), torch.float32)
    rng = torch.Generator().manual_seed(0)
    wanted, own = (torch.randn(200, SHAPE.d_model, generator=rng) for _ in range(2))
    leaf = own.clone().requires_grad_()
    p, q = (torch.log_softmax(work.student.logits(states), -1) for states in (wanted, leaf))
    loss = (p.exp() * (p - q)).sum()
    loss.backward()
    with torch.no_grad():
        total, gradient = work._divergence(wanted, own)
    assert abs(total - float(loss.detach())) < 1e-4 * total
    assert torch.allclose(gradient, leaf.grad, atol=1e-4 * float(leaf.grad.abs().max()))


def test_importances_say_what_the_loss_depends_on(dense: Path, tmp_path: Path) -> None:
    """A neuron whose down column is zero has the least there may be, and doubled columns count twice."""
    config = SparsifyConfig(**(SMALL | {"zeros": 0.5}))
    work = Sparsifier(open_checkpoint(dense), open_corpora([]), config, tmp_path)
    plain = work._importances()[0]["layers.1."]
    assert plain.shape == (SHAPE.d_ff,) and abs(float(plain.mean()) - 1) < 1e-3
    down = work.teacher.weights["layers.1.down"].clone()
    down[:, 0] = 0
    up = work.teacher.weights["layers.1.up"].clone()
    up[1], down[:, 1] = up[1] / 2, down[:, 1] * 2  # the same function
    work.teacher.weights |= {"layers.1.down": down, "layers.1.up": up}
    own = work._importances()[0]["layers.1."]
    assert own[0] == float(np.float32(1e-3)) and plain[0] > 0.01
    assert torch.allclose(own[1:] / own[2], plain[1:] / plain[2], rtol=0.3)
