"""The model in torch that is trained, beside `transformers`, for every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_architectures import CASES, Case, exact_logits, prompt, random_model, rms, save

from powerinfer import RequestError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.sparsify.torch_model import TorchModel, load, unsupported


def cases() -> list[Case]:
    return [case for case in CASES if not case.kind.startswith("gpt-oss")]


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
