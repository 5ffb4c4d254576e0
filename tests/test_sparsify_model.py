"""The model in torch that is trained, beside `transformers`, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_architectures import CASES, Case, exact_logits, prompt, random_model, rms, save

from powerinfer import RequestError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.sparsify.torch_model import TorchModel, load, unsupported
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
