"""The activation topk: of each bank of 64 neurons so many count, those whose silu is largest in units of their own."""

from __future__ import annotations

import json
from pathlib import Path

import model_files
import numpy as np
import pytest
import reference
from model_files import Builder, edit_config, experts_gguf, family_gguf, give_limits, tiny_folder

from benchmarks.models.gguf_writer import F32, STRING

torch = pytest.importorskip("torch")

from sparse_models import TEXT  # noqa: E402
from test_hybrid import split  # noqa: E402
from test_sparse import opened, side_by_side, split_calls  # noqa: E402
from test_watch import look  # noqa: E402

from powerinfer.cli.main import main  # noqa: E402
from powerinfer.config import BANK, EngineConfig, TrainConfig  # noqa: E402
from powerinfer.errors import ModelError, RequestError  # noqa: E402
from powerinfer.formats.bundle_file import open_bundles  # noqa: E402
from powerinfer.formats.bundle_types import choose_types  # noqa: E402
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from powerinfer.hybrid.load import load_split  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu  # noqa: E402
from powerinfer.kernels import cpu, gpu  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.placement.request import model_subject  # noqa: E402
from powerinfer.prepare.packing import pack  # noqa: E402
from powerinfer.prepare.training import check  # noqa: E402
from powerinfer.report import plots  # noqa: E402
from powerinfer.report.findings import findings  # noqa: E402
from powerinfer.sparsity.selection import Selection  # noqa: E402
from powerinfer_train.torch_model import TorchModel, largest  # noqa: E402
from powerinfer_train.torch_model import load as load_torch  # noqa: E402

FF, KEPT = 2 * BANK, 20
TOKENS = [np.random.default_rng(seed).integers(0, model_files.VOCAB, 30).astype(np.int32) for seed in range(3)]


@pytest.fixture(autouse=True)
def whole_banks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "FF", FF)


def topk(kept: float = KEPT) -> Builder:
    builder = give_limits(family_gguf("llama")).add("llama.hidden_act", STRING, "topk")
    return builder.add("llama.hidden_act_param", F32, kept)


def packed(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(topk().write(path))
    pack(checkpoint, None, choose_types(checkpoint, "F16", "F16"))
    return checkpoint


def truth(checkpoint: Checkpoint, weights: dict | None = None) -> list[np.ndarray]:  # type: ignore[type-arg]
    model = TorchModel(checkpoint.config, weights or load_torch(checkpoint), torch.float32)
    with torch.no_grad():
        return [model.logits(model.states(torch.from_numpy(one).long()[None]))[0].numpy() for one in TOKENS]


def test_dense_and_sparse_are_what_torch_computes(tmp_path: Path) -> None:
    """Tokens alone and together, rows of bundles or whole matrices."""
    checkpoint = packed(tmp_path / "m.gguf")
    wanted = truth(checkpoint)
    weights = load_torch(checkpoint)
    weights["layers.1.threshold"] = weights["layers.1.threshold"].roll(1)
    bound = 5e-3 * np.abs(wanted).max()  # bundles in F16
    assert np.abs(truth(checkpoint, weights)[0] - wanted[0]).max() > 10 * bound, "other units change nothing"
    for selector, above in (("all", 1.0), ("exact", 1.0), ("exact", 0.0), ("threshold", 1.0)):
        options = {"threshold": 1e-6} if selector == "threshold" else {}
        with opened(checkpoint.path, selector=selector, **options) as (executor, sparsity):
            for ffn in executor.ffns.values():
                ffn.op.dense_above = above
            assert np.abs(split_calls(executor, TOKENS[0]) - wanted[0]).max() < bound
            together = side_by_side(executor, TOKENS)
            assert max(np.abs(ours - one).max() for ours, one in zip(together, wanted, strict=True)) < bound
            if sparsity is not None:
                assert sparsity.report()["active_fraction"] == pytest.approx(KEPT / BANK)


def test_single_neurons_on_a_gpu_are_refused(tmp_path: Path) -> None:
    checkpoint = packed(tmp_path / "m.gguf")
    layout = open_bundles(checkpoint, None, cpu.bundle_row_bytes).layouts[0]
    about = checkpoint.config.layers[0].neurons
    with pytest.raises(ValueError, match="neurons of the activation topk are not computed one by one"):
        gpu.empty_neurons(layout, 64, 2, "cpu", about, None)


def test_every_bank_has_its_share(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(topk().write(tmp_path / "m.gguf"))
    for threads in (1, 3):
        executor = load(checkpoint, EngineConfig(threads=threads, context=128, selector="all"))
        try:
            seen = look(executor)
        finally:
            executor.close()
        for layer in range(checkpoint.config.n_layers):
            fires = np.unpackbits(seen.active(layer), axis=1, count=FF, bitorder="little").reshape(-1, BANK)
            assert (fires.sum(axis=1) == KEPT).all()


def test_the_first_among_equals(tmp_path: Path) -> None:
    """Neurons that are alike: the first of a bank count, in the engine, in torch and on a GPU."""
    builder = topk()
    for tensor in builder.tensors:
        if tensor.name.endswith(("ffn_gate.weight", "ffn_threshold.weight")):
            row = tensor.data[: len(tensor.data) // FF]
            tensor.data = row * FF  # down and up stay different
    checkpoint = open_checkpoint(builder.write(tmp_path / "m.gguf"))
    wanted = truth(checkpoint)
    with opened(checkpoint.path, selector="all") as (executor, _):
        ours = split_calls(executor, TOKENS[0])
    assert np.abs(ours - wanted[0]).max() < 1e-4 * np.abs(wanted[0]).max()
    ones = torch.ones(3, FF)
    for mask in (largest(ones, KEPT), gpu.activate("topk", ones, None, torch.ones(FF), KEPT) != 0):
        assert mask.view(-1, BANK)[:, :KEPT].all() and not mask.view(-1, BANK)[:, KEPT:].any()


@pytest.mark.parametrize("kept", [1, 20, 64])
def test_on_a_gpu_as_in_the_reference(kept: int, device: str) -> None:
    rng = np.random.default_rng(kept)
    gate, up = (rng.standard_normal((5, FF)).astype(np.float32) for _ in range(2))
    unit = rng.random(FF, np.float32) + np.float32(0.1)
    wanted = reference.activate("topk", gate, up, unit, kept)
    there = [torch.from_numpy(one).to(device) for one in (gate, up, unit)]
    ours = gpu.activate("topk", *there, kept).cpu()
    assert np.allclose(ours, wanted, atol=1e-6) and (np.count_nonzero(wanted.reshape(-1, BANK), axis=1) == kept).all()
    gate[2, 70] = np.nan
    ours = gpu.activate("topk", torch.from_numpy(gate).to(device), None, there[2], kept)
    assert bool(ours[2, 70].isnan()) and int(ours.isnan().sum()) == 1


def test_whole_layers_on_a_gpu(device: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(topk().write(tmp_path / "m.gguf"))
    wanted = truth(checkpoint)
    for layers, head in ((1, False), (2, True)):
        engine = EngineConfig(threads=1, context=128, kv_type="f32")
        placed = UsedGpu(device), Placement(layers, head)
        executor = load_split(Resolved(checkpoint, engine, Selection("all", "a test"), *placed))
        try:
            assert np.abs(split_calls(executor, TOKENS[0]) - wanted[0]).max() < 1e-3 * np.abs(wanted[0]).max()
        finally:
            executor.close()


def test_neurons_are_not_split_over_devices(tmp_path: Path) -> None:
    checkpoint = packed(tmp_path / "m.gguf")
    with (
        pytest.raises(ValueError, match="neurons of the activation topk cannot be split over devices"),
        split(checkpoint.path, 0.5) as _,
    ):
        pass
    with pytest.raises(RequestError, match="--selector exact: layers with the activation topk run whole beside a GPU"):
        resolve(checkpoint, EngineConfig(gpu="cpu", vram=1 << 30, selector="exact"))
    with pytest.raises(RequestError, match="selector exact: layers with the activation topk run whole"):
        model_subject(checkpoint, None, "exact")
    assert model_subject(checkpoint, None, "auto").selector == "all"
    with pytest.raises(RequestError, match="train: which neurons of the activation topk count is not predicted"):
        check(checkpoint, TrainConfig())
    with pytest.raises(RequestError, match="no predictor can select neurons of the activation topk"):
        resolve(checkpoint, EngineConfig(selector="predicted"))


def test_prepare_packs_and_plans_whole_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it recommends then runs `exact` without a GPU."""
    monkeypatch.setattr(plots, "png", lambda draw, look: b"a plot")
    path, text = topk().write(tmp_path / "m.gguf"), tmp_path / "text.txt"
    text.write_text(TEXT * 6)
    quick = ["--corpus", str(text), "--window", "64", "--tokens", "512", "--hardware", "pc-8gb", "--threads", "1"]
    for selector in ("exact", "threshold"):
        assert main(["prepare", "-m", str(path), *quick, "--selector", selector]) == 2
        assert f"selector {selector}: layers with the activation topk" in capsys.readouterr().err
    assert main(["prepare", "-m", str(path), *quick, "--json"]) == 0
    out, said = capsys.readouterr()
    about = json.loads(out.splitlines()[-1])
    states = {name: step["state"] for name, step in about["steps"].items()}
    assert states["pack"] == "done" and states["train"] == "not needed" and about["plan"]["selector"] == "all"
    (ready,) = [line for line in said.splitlines() if line.startswith("ready: ")]
    assert ready.startswith(f'ready: powerinfer run "..." -m {path}')
    assert "--selector" not in ready, "auto is the default"
    assert findings(open_checkpoint(path)).lacking == [], "a report asks for no predictors"
    found = resolve(open_checkpoint(path), EngineConfig(gpu="none"))
    assert found.selection.selector == "exact"


REFUSED = {
    "too many": (lambda: topk(65), r"topk with 65 of a bank's 64 neurons"),
    "none": (lambda: topk(0), r"topk with 0 of a bank's 64 neurons"),
    "a part of a neuron": (lambda: topk(1.5), r"topk with 1\.5 of a bank's 64 neurons"),
    "no number": (lambda: topk().drop("llama.hidden_act_param"), "hidden_act_param is missing"),
    "no units": (
        lambda: family_gguf("llama").add("llama.hidden_act", STRING, "topk").add("llama.hidden_act_param", F32, 8),
        "activation topk without thresholds of neurons",
    ),
    "experts": (
        lambda: experts_gguf().put("llama.hidden_act", STRING, "topk").put("llama.hidden_act_param", F32, 8),
        "activation topk is not for experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case: str, tmp_path: Path) -> None:
    make, why = REFUSED[case]
    with pytest.raises(ModelError, match=why):
        open_checkpoint(make().write(tmp_path / "m.gguf"))


def test_folders_that_are_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    edit_config(folder, hidden_act="topk", hidden_act_param=8)
    with pytest.raises(ModelError, match="tiny: activation topk without thresholds of neurons"):
        open_checkpoint(folder)
    edit_config(folder, hidden_act_param=...)
    with pytest.raises(ModelError, match=r"hidden_act_param is missing$"):
        open_checkpoint(folder)


def test_banks_that_are_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "FF", 96)
    with pytest.raises(ModelError, match="activation topk needs whole banks of 64 neurons, not 96"):
        open_checkpoint(topk().write(tmp_path / "m.gguf"))
