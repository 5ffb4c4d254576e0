"""BitNet: the weights of its folders, and what their rounding is worth. What it computes with them: families.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("families")

import torch
from families import (
    TOKENS,
    Case,
    exact_logits,
    open_executor,
    prompt,
    random_model,
    rms,
    run_chunks,
    scattered_pages,
)
from safetensors.torch import save_file
from test_architectures import check_same_bits
from transformers import integrations

from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.hybrid.resolve import resolve

SIZES = {  # rows of whole blocks of each type, and of none
    "TQ2_0": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "Q4_0": {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24},
    "F16": {"hidden_size": 40, "intermediate_size": 88, "head_dim": 10},
}
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
OFFLINE = ONLINE | {"quantization_mode": "offline"}
BITLINEAR = {"quant_method": "bitnet", "modules_to_not_convert": None}
Stored = dict[str, torch.Tensor]


def case_of(type_name: str) -> Case:
    return Case("bitnet", "bitnet", SIZES[type_name], {})


def is_linear(name: str) -> bool:
    return "_proj." in name


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """torch compiles nothing of these classes of transformers."""
    with torch.compiler.set_stance("force_eager"):
        yield


def random_weights(type_name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Stored]:
    """(model of float32, its tensors), in that type."""
    case = case_of(type_name)
    model = random_model(case, case.config(), seed=5).to(dtype).float()
    return model, {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}


def write(folder: Path, model: Any, stored: Stored, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    config = json.loads(model.config.to_json_string()) | {"architectures": ["BitNetForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(stored, folder / "model.safetensors")
    return folder


def packed(stored: Stored, scale: float, divides: bool = False) -> tuple[Stored, Stored]:
    """(the tensors with matrices as codes, the values of these)."""
    generator, values = torch.Generator().manual_seed(9), {}
    for name in [name for name in stored if is_linear(name)]:
        codes = torch.randint(-1, 2, stored[name].shape, generator=generator)
        factor = torch.tensor([scale], dtype=torch.bfloat16)
        values[name] = codes.float() / factor.float() if divides else codes.float() * factor.float()
        stored[name] = integrations.bitnet.pack_weights(codes.clone())
        stored[f"{name.removesuffix('.weight')}.weight_scale"] = factor
        assert torch.equal(integrations.bitnet.unpack_weights(stored[name], torch.float32), codes.float())
    return stored, values


def taken(checkpoint: Checkpoint) -> dict[str, Any]:
    """The matrices by their names in a folder."""
    places = {f"self_attn.{part}_proj": part for part in "qkvo"} | {f"mlp.{p}_proj": p for p in ("gate", "up", "down")}
    return {
        f"model.layers.{layer}.{module}.weight": checkpoint.take(f"layers.{layer}.{part}")
        for layer in range(checkpoint.config.n_layers)
        for module, part in places.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("type_name", SIZES)
def test_floats_become_the_matrices_of_transformers(type_name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, stored = random_weights(type_name, dtype)
    checkpoint = open_checkpoint(write(tmp_path / "model", model, stored, ONLINE))
    assert checkpoint.notes[0].startswith(f"21 absmean matrices are computed in {type_name}")
    for name, tensor in taken(checkpoint).items():
        wanted = integrations.bitnet.WeightQuant.apply(stored[name]).float()
        assert tensor.type == type_name and torch.equal(torch.from_numpy(tensor.float32().copy()), wanted), name


@pytest.mark.parametrize("settings", [OFFLINE, BITLINEAR], ids=["autobitlinear", "bitlinear"])
@pytest.mark.parametrize("type_name", SIZES)
def test_codes_and_scales(type_name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model, stored = random_weights(type_name)
    stored, values = packed(stored, 1.34375, "linear_class" not in settings)
    checkpoint = open_checkpoint(write(tmp_path / "model", model, stored, settings))
    for name, tensor in taken(checkpoint).items():
        assert tensor.type == type_name
        ours, bound = torch.from_numpy(tensor.float32().copy()), 0 if settings == OFFLINE else 2**-11
        assert ((ours - values[name]).abs() <= bound * values[name].abs()).all(), name


@contextmanager
def rounded_inputs(model: Any) -> Iterator[None]:
    """The model with the inputs of its matrices rounded to 8 bits of each token's largest, as transformers has them."""
    own = integrations.bitnet.ActQuant.apply
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: (own(inputs[0]),))
        for name, module in model.named_modules()
        if name.endswith("_proj")
    ]
    yield
    for hook in hooks:
        hook.remove()


def ours(path: Path, tokens: np.ndarray) -> np.ndarray:
    executor = open_executor(path)
    try:
        return run_chunks(executor, tokens, [TOKENS], scattered_pages(executor, 1)[0])
    finally:
        executor.close()


@pytest.mark.parametrize("type_name", SIZES)
def test_logits_are_nearer_to_those_of_exact_inputs_than_transformers_are(type_name: str, tmp_path: Path) -> None:
    """Inputs of matrices are rounded here to 8 bits of the largest of 32, in transformers of a whole row."""
    case, (model, stored) = case_of(type_name), random_weights(type_name)
    tokens = prompt(case)
    path = write(tmp_path / "model", model, dict(stored), ONLINE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_linear(name):
                parameter.copy_(integrations.bitnet.WeightQuant.apply(stored[name]).float())
    exact = exact_logits(case, case.config(), model, tokens)
    with rounded_inputs(model), torch.inference_mode():
        theirs = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    found = ours(path, tokens)
    assert rms(found - exact) < (0.2 if type_name == "F16" else 0.8) * rms(theirs - exact)
    assert rms(theirs - exact) < 0.2 * rms(exact)


def test_the_same_bits(tmp_path: Path) -> None:
    model, stored = random_weights("TQ2_0")
    check_same_bits(case_of("TQ2_0"), write(tmp_path / "model", model, stored, ONLINE))


def test_other_families_have_such_matrices_too(tmp_path: Path) -> None:
    """Llama 3 and Falcon 3 of 1.58 bits."""
    case = Case("llama", "llama", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}, {})
    model = random_model(case, case.config(), seed=5)
    stored, _ = packed({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, 0.75, True)
    path = write(tmp_path / "model", model, stored, BITLINEAR)
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    assert {tensor.type for tensor in taken(open_checkpoint(path)).values()} == {"TQ2_0"}
    assert np.isfinite(ours(path, prompt(case))).all()


def test_modules_that_are_not_converted(tmp_path: Path) -> None:
    model, stored = random_weights("Q4_0")
    names = ["model.layers.1.mlp", "model.layers.0.self_attn.q_proj", "lm_head"]
    found = taken(open_checkpoint(write(tmp_path / "model", model, stored, ONLINE | {"modules_to_not_convert": names})))
    left = [name for name, tensor in found.items() if tensor.type == "BF16"]
    assert left == ["model.layers.0.self_attn.q_proj.weight", *(name for name in found if "layers.1.mlp" in name)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_rms_norm": True}, "use_rms_norm, and norms before every matrix are not computed"),
        ({"linear_class": "bitmatrix"}, "linear_class 'bitmatrix', which is not read"),
        ({"quantization_mode": "later"}, "quantization_mode 'later', which is not read"),
        ({"modules_to_not_convert": [3]}, r"modules_to_not_convert '\[3\]', not a list of names"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, stored = random_weights("F16")
    with pytest.raises(ModelError, match=message):
        open_checkpoint(write(tmp_path / "model", model, stored, ONLINE | settings))


MODULE = "model.layers.0.mlp.up_proj."


def _with(end: str, value: torch.Tensor | None) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        del stored[MODULE + end]
        if value is not None:
            stored[MODULE + end] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("weight_scale", None), "up_proj' has no weight_scale"),
        (_with("weight_scale", torch.ones(2)), "up_proj' has 2 scales, not one"),
        (_with("weight_scale", torch.tensor([torch.nan])), "scales that are infinite or not numbers"),
        (_with("weight_scale", torch.zeros(1)), "up_proj' has a scale of 0"),
        (_with("weight_scale", torch.tensor([1e9])), "a scale of 1e\\+09, which F16 does not hold"),
        (_with("weight", torch.full((40, 96), 0b1011, dtype=torch.uint8)), "codes other than -1, 0 and 1"),
        (_with("weight", torch.zeros(39, 96, dtype=torch.uint8)), "layers.0.mlp.up_proj.weight"),
        (_with("weight", torch.zeros(40, dtype=torch.uint8)), "not of a matrix"),
        (_with("weight", torch.ones(160, 96)), "up_proj.weight_scale"),
    ],
)
def test_tensors_that_are_refused(change: Callable[[Stored], None], message: str, tmp_path: Path) -> None:
    model, stored = random_weights("Q4_0")
    stored, _ = packed(stored, 0.5)
    change(stored)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(write(tmp_path / "model", model, stored, OFFLINE)).take("layers.0.up")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_floats_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    model, stored = random_weights("Q4_0")
    stored[MODULE + "weight"][3, 5] = value
    with pytest.raises(ModelError, match="holds weights that are not numbers"):
        open_checkpoint(write(tmp_path / "model", model, stored, ONLINE)).take("layers.0.up")


@pytest.mark.parametrize("selector", ["exact", "predicted", "threshold"])
def test_selectors_say_that_a_norm_reads_all_neurons(selector: str, tmp_path: Path) -> None:
    model, stored = random_weights("Q4_0")
    checkpoint = open_checkpoint(write(tmp_path / "model", model, stored, ONLINE))
    with pytest.raises(RequestError, match="FFN of 160 neurons, relu2, with a norm before down"):
        resolve(checkpoint, EngineConfig(gpu="none", selector=selector))
