"""Apertus: where the numbers of xIELU come from, and what is refused. What it computes: families.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("families")

import gguf
import torch
from families import Case, case_named, random_model, save
from test_architectures import check_same_bits
from truth import Truth

from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.folder_config import read_config

PARTS = ("alpha_n", "alpha_p", "beta", "eps")
PUBLISHED: dict[str, Any] = {  # without its sizes
    "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 88, "vocab_size": 101,
    "max_position_embeddings": 65536, "hidden_act": "xielu", "attention_bias": False, "mlp_bias": False,
    "post_norm": False, "qk_norm": True, "rope_theta": 12000000,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3", "type": "llama3",
    },
}  # fmt: skip


def curve(alpha_n: float, alpha_p: float, beta: float, eps: float) -> tuple[float, ...]:
    """Of what files have, by the formula of the class."""
    return math.log1p(math.exp(alpha_p)), beta + math.log1p(math.exp(alpha_n)), beta, eps


def curves(path: Path) -> list[tuple[float, ...]]:
    return [layer.neurons.curve for layer in open_checkpoint(path).config.layers]


def changed_folder(folder: Path, change: Any) -> Path:
    """The folder of the case in one file, its tensors changed."""
    from safetensors.numpy import load_file, save_file

    path = Truth(case_named("apertus")).save("folder", folder)
    parts = sorted(path.glob("*.safetensors"))
    stored = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    for part in (*parts, *path.glob("*.index.json")):
        part.unlink()
    change(stored)
    save_file(stored, path / "model.safetensors")
    return path


def test_folders_and_gguf_files_have_the_same_curves(tmp_path: Path) -> None:
    truth = Truth(case_named("apertus"))
    wanted = []
    for layer in truth.model.model.layers:
        act = layer.mlp.act_fn
        x = torch.tensor([3.0, -1e-7, -2.0], dtype=torch.float64)
        numbers = [getattr(act, part).item() for part in PARTS]
        wanted.append(curve(*numbers))
        above, below, beta, least = wanted[-1]
        ours = torch.where(x > 0, above * x * x, below * (torch.expm1(x.clamp(max=least)) - x)) + beta * x
        assert torch.allclose(ours, act.double()(x).detach(), rtol=1e-12)
    for layout in ("folder", "gguf"):
        (tmp_path / layout).mkdir()
        found = curves(truth.save(layout, tmp_path / layout))
        assert np.allclose(found, wanted, rtol=1e-12) and len(set(found)) == 3


def test_beta_and_eps_of_the_class_where_a_folder_has_none(tmp_path: Path) -> None:
    def change(stored: dict[str, np.ndarray]) -> None:
        for part in ("beta", "eps"):
            del stored[f"model.layers.1.mlp.act_fn.{part}"]

    assert curves(changed_folder(tmp_path, change))[1][2:] == (0.5, -1e-6)


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("alpha_n", None, r"tensor model\.layers\.1\.mlp\.act_fn\.alpha_n is missing"),
        ("alpha_p", [1.0, 2.0], "act_fn.alpha_p is not one number"),
        ("beta", [math.nan], "act_fn.beta is nan, which no curve has"),
        ("eps", [-1e9], "act_fn.eps is -1e\\+09, which no curve has"),
    ],
)
def test_tensors_that_are_refused(part: str, values: list[float] | None, message: str, tmp_path: Path) -> None:
    def change(stored: dict[str, np.ndarray]) -> None:
        name = f"model.layers.1.mlp.act_fn.{part}"
        del stored[name]
        if values is not None:
            stored[name] = np.array(values, np.float32)

    with pytest.raises(ModelError, match=message):
        open_checkpoint(changed_folder(tmp_path, change))


def with_keys(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, values: Any) -> Path:
    """A GGUF file of the case with another value of a key; None: without it."""
    truth, name = Truth(case_named("apertus")), f"add_xielu_{part}"
    add = getattr(gguf.GGUFWriter, name)

    def changed(writer: Any, numbers: Any) -> None:
        if isinstance(values, float):
            writer.add_float32(f"xielu.{part}", values)
        elif values is not None:
            add(writer, values)

    monkeypatch.setattr(gguf.GGUFWriter, name, changed)
    return save(truth.case, truth.config, truth.model, "gguf", folder)


def test_one_number_is_that_of_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {own[2] for own in curves(with_keys(tmp_path, monkeypatch, "beta", 0.75))} == {0.75}


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("alpha_n", None, "xielu.alpha_n is missing"),
        ("eps", [-1e-6, -1e-6], "xielu.eps is .*, not a number"),
        ("beta", [0.5, math.nan, 0.5], "xielu.beta is .*, not a number"),
        ("alpha_p", 1e9, "xielu.alpha_p is .*, not a number"),
    ],
)
def test_keys_that_are_refused(
    part: str, values: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=message):
        open_checkpoint(with_keys(tmp_path, monkeypatch, part, values))


def test_the_published_settings() -> None:
    unread: list[str] = []
    config = read_config(PUBLISHED, Path("apertus"), None, unread)
    rope = config.layers[0].heads.rope
    assert unread == [] and rope is not None and (rope.theta, rope.scaling, rope.factor) == (1.2e7, "llama3", 8.0)
    assert config.layers[0].heads.qk_norm == "head" and config.layers[0].neurons.activation == "xielu"
    other = {key: value for key, value in PUBLISHED.items() if key != "rope_scaling"} | {"rope_theta": 500.0}
    notes: list[str] = []
    assert read_config(other, Path("apertus"), notes).layers[0].heads.rope == rope
    assert notes == ["rope_theta is not applied without rope_scaling, as in transformers"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": False}, "qk_norm is 'False', which this engine does not support"),
        ({"post_norm": True}, "post_norm is 'True'"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; of this family only relu, relu2, xielu is supported"),
        ({"mlp_bias": True}, "mlp_bias is 'True'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(PUBLISHED | changes, Path("apertus"))


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
def test_the_same_bits_with_narrow_types(quantize: str, tmp_path: Path) -> None:
    case = Case("narrow", "apertus", {"head_dim": 32, "intermediate_size": 96}, {})
    path = save(case, case.config(), random_model(case, case.config(), seed=11), "folder", tmp_path)
    check_same_bits(case, path, quantize=quantize, kv_type="f16")


def test_other_activations_have_no_curve(tmp_path: Path) -> None:
    path = Truth(case_named("apertus-relu2")).save("folder", tmp_path)
    assert curves(path) == [(), (), ()]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_act": "xielu"}))
    with pytest.raises(ModelError, match=r"act_fn\.alpha_n is missing"):
        open_checkpoint(path)
