"""gpt-oss in MXFP4: GGUF files and folders hold the same numbers in different orders; what cannot be is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from families import (  # noqa: E402
    CASES,
    TOKENS,
    open_executor,
    prompt,
    random_model,
    rms,
    run_chunks,
    save_folder,
    save_gguf,
    scattered_pages,
)
from safetensors.numpy import load_file, save_file  # noqa: E402

from powerinfer import ModelError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.quant import dequantize, quantize  # noqa: E402

CASE = next(case for case in CASES if case.name == "gpt-oss-yarn")
Tensors = dict[str, np.ndarray]


def rounded(model: Any) -> Any:
    """The model with experts that MXFP4 holds exactly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                rows = parameter.numpy().swapaxes(1, 2)  # [experts, out, in]
                flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
                back = dequantize(quantize(flat, "MXFP4"), "MXFP4").reshape(rows.shape)
                parameter.copy_(torch.from_numpy(back.swapaxes(1, 2).copy()))
    return model


def pairs(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`*_blocks` and `*_scales` of [experts, in, out], by the definition: a byte is elements 2 j and 2 j + 1."""
    rows = np.ascontiguousarray(weights.swapaxes(1, 2))
    blocks = quantize(rows.reshape(-1, rows.shape[-1]), "MXFP4").reshape(*rows.shape[:2], -1, 17)
    packed = blocks[..., 1:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1)  # in the order of the elements
    return codes[..., ::2] | codes[..., 1::2] << 4, np.ascontiguousarray(blocks[..., 0])


def folder(model: Any, path: Path, change: Callable[[Tensors, dict[str, Any]], None] | None = None) -> Path:
    """As published: experts as `*_blocks` and `*_scales`, all in one file."""
    save_folder(CASE, model, path, version4=True)
    tensors: Tensors = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (path / "model.safetensors.index.json").unlink()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pairs(tensors.pop(name))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    if change is not None:
        change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def mxfp4_gguf(config: Any, model: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plain = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, values: np.ndarray, **more: Any) -> None:
        if name.endswith("_exps.weight"):
            rows = quantize(values.reshape(-1, values.shape[-1]), "MXFP4")
            values = rows.reshape(*values.shape[:-1], -1)
            more["raw_dtype"] = gguf.GGMLQuantizationType.MXFP4
        plain(self, name, values, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    return save_gguf(CASE, config, model, path)


def logits_of(path: Path, chunks: list[int]) -> np.ndarray:
    executor = open_executor(path)
    try:
        return run_chunks(executor, prompt(CASE), chunks, scattered_pages(executor, 1)[0])
    finally:
        executor.close()


def test_mxfp4_in_a_folder_and_in_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CASE.config()
    model = rounded(random_model(CASE, config, seed=11))
    exact = logits_of(save_gguf(CASE, config, model, tmp_path / "exact.gguf"), [TOKENS])
    path = folder(model, tmp_path / "model")
    for name in ("gate", "up", "down"):
        assert open_checkpoint(path).take(f"layers.1.experts_{name}").type == "MXFP4"
    ours = logits_of(path, [TOKENS])
    assert rms(ours - exact) < 0.2 * rms(exact)  # activations of 8 bits; any other order gives other logits altogether
    assert np.array_equal(logits_of(mxfp4_gguf(config, model, tmp_path / "m.gguf", monkeypatch), [TOKENS]), ours)
    assert np.array_equal(logits_of(path, [1] * TOKENS), ours), "token by token"


def test_experts_of_other_types_in_a_folder(tmp_path: Path) -> None:
    config = CASE.config()
    model = random_model(CASE, config, seed=11).to(torch.bfloat16)
    path = save_folder(CASE, model, tmp_path / "model", version4=True)
    weights = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"].float().numpy()
    for part, name in enumerate(("gate", "up")):
        tensor = open_checkpoint(path).take(f"layers.1.experts_{name}")
        assert tensor.type == "BF16" and np.array_equal(tensor.float32(), weights[:, :, part::2].swapaxes(1, 2))


EXPERTS = "model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t, c: t.pop(f"{EXPERTS}down_proj_scales"), "down_proj_scales is missing"),
        (lambda t, c: t.pop(f"{EXPERTS}gate_up_proj_bias"), "gate_up_proj_bias is missing"),
        (lambda t, c: t.update({f"{EXPERTS}down_proj_blocks": t[f"{EXPERTS}down_proj_blocks"][:, :-1]}), "has shape"),
        (
            lambda t, c: t.update({f"{EXPERTS}down_proj_blocks": t[f"{EXPERTS}down_proj_blocks"].astype(np.float32)}),
            "has type F32, not U8",
        ),
        (lambda t, c: t.pop("model.layers.0.self_attn.sinks"), "self_attn.sinks.weight is missing"),
        (lambda t, c: c["quantization_config"].update(quant_method="fp8"), "'fp8', not 'mxfp4'"),
        (lambda t, c: c.update(swiglu_limit=5.0), "swiglu_limit"),
        (lambda t, c: (c.pop("rope_scaling"), c.pop("rope_theta")), "rope_parameters is missing"),
        (lambda t, c: c.update(num_experts_per_tok=7), "num_experts_per_tok"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, change: Callable[[Tensors, dict[str, Any]], None], why: str) -> None:
    model = random_model(CASE, CASE.config(), seed=11)
    with pytest.raises(ModelError, match=why):
        open_checkpoint(folder(model, tmp_path / "model", change))
