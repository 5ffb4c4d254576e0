"""The model in torch that is trained, beside `transformers`, for every family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from test_architectures import CASES, Case, exact_logits, prompt, random_model, rms, save

from powerinfer import RequestError
from powerinfer.config import FfnConfig
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.sparsify.torch_model import TorchModel, activate, load, unsupported
from powerinfer.sparsify.training import trained_names
from powerinfer.sparsify.writing import check_writable, write_model


def cases() -> list[Case]:
    return [case for case in CASES if not case.kind.startswith("gpt-oss")]


def layouts() -> list[Any]:
    return [pytest.param(case, layout, id=f"{case.name}-{layout}") for case in cases() for layout in case.layouts]


@pytest.mark.parametrize(("case", "layout"), layouts())
def test_every_file_is_written_again(case: Case, layout: str, tmp_path: Path) -> None:
    """Matrices of any layout get new values, and nothing else changes but the activation."""
    config = case.config()
    checkpoint = open_checkpoint(save(case, config, random_model(case, config, 1), layout, tmp_path))
    if unsupported(checkpoint.config) or checkpoint.config.layers[-1].ffn.activation != "silu":
        return
    names, about = trained_names(checkpoint.config)[1], {"hidden_act": "relu"}
    check_writable(checkpoint, names, about)
    path = write_model(checkpoint, tmp_path / "out", "f16", names, lambda name: -2 * values(checkpoint, name), about)
    written = open_checkpoint(path)
    for one, before in zip(written.config.layers, checkpoint.config.layers, strict=True):
        assert one == replace(before, ffn=replace(before.ffn, activation="relu"))
    assert set(written.names()) == set(checkpoint.names())
    for name in checkpoint.names():
        own, wanted = values(written, name), values(checkpoint, name) * (-2 if name in names else 1)
        assert np.allclose(own, wanted, rtol=2**-7, atol=1e-5), name
    if case.name in ("llama-gqa", "openelm", "qwen35"):
        add_thresholds(written, tmp_path)


def add_thresholds(checkpoint: Checkpoint, folder: Path) -> None:
    """Thresholds of neurons are added, stay, are replaced, and go; the other tensors keep their values."""
    draw = np.random.default_rng(1)

    def write(source: Checkpoint, to: str, about: dict[str, Any], added: dict[str, np.ndarray]) -> Checkpoint:
        check_writable(source, [], about)
        made = open_checkpoint(
            write_model(
                source, folder / to, "f16", ["layers.0.up"], lambda name: values(checkpoint, name), about, added
            )
        )
        for name in checkpoint.names():
            assert np.array_equal(values(made, name), values(checkpoint, name)), name
        index = made.path / "model.safetensors.index.json"
        if index.exists():
            sizes = sum(nbytes for *_, nbytes in made.tensor_list())
            assert json.loads(index.read_text())["metadata"]["total_size"] == sizes
        return made

    def thresholds(seed: int) -> dict[str, np.ndarray]:
        sizes = enumerate(checkpoint.config.ffn_sizes)
        return {f"layers.{n}.threshold": draw.random(size, np.float32) for n, size in sizes}

    first, second = thresholds(1), thresholds(2)
    one = write(checkpoint, "one", {"hidden_act": "cats"}, first)
    same = write(one, "same", {"hidden_act": "fatrelu"}, {})
    for made, added in ((one, first), (same, first), (write(same, "other", {"hidden_act": "cats"}, second), second)):
        assert all(layer.neurons.thresholds for layer in made.config.layers)
        assert all(np.array_equal(values(made, name), wanted) for name, wanted in added.items())
        assert made.fingerprint != checkpoint.fingerprint
    limits = [0.25] * checkpoint.config.n_layers
    of_layers = write(one, "layers", {"hidden_act": "cats", "hidden_act_param": limits}, {})
    assert [layer.neurons.threshold for layer in of_layers.config.layers] == limits
    assert set(of_layers.names()) == set(checkpoint.names())
    assert set(write(of_layers, "again", {"hidden_act": "cats"}, first).names()) == set(one.names())
    assert set(write(one, "relu", {"hidden_act": "relu"}, {}).names()) == set(checkpoint.names())


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.take(name).float32()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_logits(case: Case, tmp_path: Path) -> None:
    config = case.config()
    model = random_model(case, config, 1)
    path = save(case, config, model, case.layouts[0], tmp_path / "model")
    checkpoint = open_checkpoint(path)
    weights = load(checkpoint)
    if unsupported(checkpoint.config):
        with pytest.raises(RequestError, match="sparsify cannot train this model"):
            TorchModel(checkpoint.config, weights, torch.float32)
        return
    own = TorchModel(checkpoint.config, weights, torch.float32)
    tokens = prompt(case)
    with torch.no_grad():
        mine = own.logits(own.states(torch.from_numpy(tokens.astype(np.int64))[None]))[0].numpy()
    wanted = exact_logits(case, config, model, tokens)
    assert rms(mine - wanted) < 1e-4 * rms(wanted)


@pytest.mark.parametrize("name", ["cats", "fatrelu"])
def test_thresholds_of_neurons(name: str) -> None:
    draw = np.random.default_rng(1)
    gate, up = (draw.standard_normal((5, 64)).astype(np.float32) for _ in range(2))
    limits = draw.random(64, np.float32) / 4
    about = FfnConfig(64, name, thresholds=True)
    own = activate(about, *map(torch.from_numpy, (gate, up, limits)))
    assert np.allclose(own, reference.activate(name, gate, up, limits), atol=1e-6)
    assert not np.allclose(own, reference.activate(name, gate, up, float(limits.mean())), atol=1e-6)
