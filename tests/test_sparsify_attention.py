"""Kinds of attention as `sparsify` trains them: gradients beside plain definitions, and folders end to end.

Their logits are compared in test_sparsify_model.py, GGUF files end to end in test_sparsify.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from configs import small
from families import case_named
from test_sparsify import logits_of
from torch import Tensor
from truth import Truth

from benchmarks.models import expert_models
from benchmarks.models.vocabulary import write_tokenizer_files
from powerinfer.config import (
    AttentionKind,
    DeltaNetConfig,
    FfnConfig,
    LatentAttentionConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    NoAttention,
    RopeConfig,
    SparsifyConfig,
)
from powerinfer.errors import RequestError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.gguf import metadata_bytes, read_gguf, write_gguf
from powerinfer.formats.layout import is_matrix, shapes
from powerinfer.formats.quant import dequantize, quantize
from powerinfer.formats.tensors import float32_tensor
from powerinfer.models.blocks import ATTENTIONS as WIRED
from powerinfer.models.rope import rope_frequencies
from powerinfer.placement.shapes import find_shape
from powerinfer_train import sparsify
from powerinfer_train.activations import Observed
from powerinfer_train.recipes import UNTRAINED, StoredTypes, check_recipe, trained_names
from powerinfer_train.torch_model import ATTENTIONS, TorchModel, narrowed
from powerinfer_train.writing import write_model

WIDTH, TOKENS = 48, 70  # no whole chunks of a rule
FOLDERS = ("deepseek-v3", "qwen3-next-80b-a3b", "qwen3.6-35b-a3b")
DENSE = "qwen35"


def one_layer(attention: AttentionKind, seed: int = 0) -> TorchModel:
    layer = LayerConfig(attention, FfnConfig(32))
    config = ModelConfig("test", WIDTH, 32, 256, 1e-5, (layer,))
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config):
        drawn = torch.randn(shape, generator=rng)
        weights[name] = drawn * 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.3 * drawn
        if name.endswith("decay"):
            weights[name] = -(drawn - 2).exp()
    return TorchModel(config, weights, torch.float32)


def turned(x: Tensor, rope: RopeConfig) -> Tensor:
    """x [tokens, dim], float64, pair by pair."""
    frequencies, factor = rope_frequencies(rope, len(x))
    pairs = []
    for i, frequency in enumerate(frequencies.tolist()):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + rope.dim // 2)
        angle = torch.arange(len(x)).double() * frequency
        cos, sin = angle.cos() * factor, angle.sin() * factor
        pairs.append((a, x[:, a] * cos - x[:, b] * sin))
        pairs.append((b, x[:, a] * sin + x[:, b] * cos))
    return torch.stack([value for _, value in sorted(pairs, key=lambda pair: pair[0])], -1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def over_latents(about: LatentAttentionConfig, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The absorbed form, as the engine has it, head by head: x [tokens, width] -> [tokens, width]."""
    if about.q_latents is None:
        queries = x @ weights["q"].T
    else:
        queries = norm(x @ weights["q_a"].T, weights["q_a_norm"], about.norm_eps) @ weights["q_b"].T
    kept = x @ weights["kv_a"].T
    latents = norm(kept[:, : about.latents], weights["kv_a_norm"], about.norm_eps)
    key, heads = turned(kept[:, about.latents :], about.rope), []
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    for h in range(about.n_heads):
        q = queries[:, h * about.query_dim : (h + 1) * about.query_dim]
        of_latents = q[:, : about.plain_dim] @ weights["k_b"][h].T
        scores = of_latents @ latents.T + turned(q[:, about.plain_dim :], about.rope) @ key.T
        shares = (scores * about.scale).masked_fill(hidden, -torch.inf).softmax(-1)
        heads.append(shares @ latents @ weights["v_b"][h].T)
    return torch.cat(heads, -1) @ weights["o"].T


def with_states(about: DeltaNetConfig, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Gated DeltaNet token by token and head by head: x [tokens, width] -> [tokens, width]."""
    own = {name.removeprefix("delta_"): value for name, value in weights.items()}
    rows = [torch.zeros(len(own["conv"]), dtype=torch.float64)] * (about.taps - 1)
    rows += list(torch.cat([x @ own[part].T for part in "qkv"], -1))
    keys, shared = about.n_key_heads * about.key_dim, about.n_value_heads // about.n_key_heads
    states = [torch.zeros(about.key_dim, about.value_dim, dtype=torch.float64)] * about.n_value_heads
    every = []
    for t, value in enumerate(x):
        taken = sum(rows[t + i] * own["conv"][:, i] for i in range(about.taps))
        q, k, v = (taken * taken.sigmoid()).split([keys, keys, about.width])
        heads = []
        for h in range(about.n_value_heads):
            of = h % about.n_key_heads if about.tiled else h // shared
            key, query = (part[of * about.key_dim : (of + 1) * about.key_dim] for part in (k, q))
            key, query = (part / (part.square().sum() + 1e-6).sqrt() for part in (key, query))
            spread = torch.log1p((own["a"][h] @ value + own["dt_bias"][h]).exp())
            state = states[h] * (own["decay"][h] * spread).exp()
            wanted = v[h * about.value_dim : (h + 1) * about.value_dim] - state.T @ key
            states[h] = state + torch.outer(key, (own["b"][h] @ value).sigmoid() * wanted)
            read = norm(states[h].T @ query * about.key_dim**-0.5, own["norm"], 1e-5)
            gate = own["z"][h * about.value_dim : (h + 1) * about.value_dim] @ value
            heads.append(read * gate * gate.sigmoid())
        every.append(torch.cat(heads))
    return torch.stack(every) @ own["o"].T


LATENT = LatentAttentionConfig(3, 24, 12, 8, 16, RopeConfig(100.0, 8, interleaved=True), 0.3, 20)
YARN = RopeConfig(100.0, 8, scaling="yarn", factor=4.0, original_context_length=8)
KINDS: dict[str, tuple[Any, Any]] = {
    "latents": (LATENT, over_latents),
    "latents, queries without": (replace(LATENT, q_latents=None, rope=YARN, norm_eps=1e-3), over_latents),
    "latents, wide values": (replace(LATENT, value_dim=32), over_latents),
    "states": (DeltaNetConfig(2, 16, 4, 32, 4), with_states),
    "states, heads in turn": (DeltaNetConfig(2, 16, 4, 16, 3, tiled=True), with_states),
    "states, a head each": (DeltaNetConfig(2, 32, 2, 16, 4), with_states),
}


@pytest.mark.parametrize(("about", "plain"), KINDS.values(), ids=KINDS)
def test_gradients_of_attention(about: Any, plain: Any) -> None:
    """Of everything that is trained, and of the input, beside autograd of the definition in float64."""
    model, name = one_layer(about), "layers.0."
    config = model.config
    matrices = [one for one, shape in about.tensors(WIDTH) if is_matrix(one, shape)]
    assert {name + one for one in matrices} < set(trained_names(config)[1])
    wide = {one: model.weights[name + one].double() for one, _ in about.tensors(WIDTH)}
    for one in matrices:
        model.weights[name + one].requires_grad_()
        wide[one].requires_grad_()
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS, WIDTH, generator=rng).requires_grad_()
    back = torch.randn(2, TOKENS, WIDTH, generator=rng)
    out = ATTENTIONS[type(about)](model, x, name, about)
    wide_x = x.detach().double().requires_grad_()
    wanted = torch.stack([plain(about, wide, one) for one in wide_x])
    assert close(out, wanted)
    ours = torch.autograd.grad(out, [x, *(model.weights[name + one] for one in matrices)], back)
    known = torch.autograd.grad(wanted, [wide_x, *(wide[one] for one in matrices)], back.double())
    for which, mine, right in zip(("x", *matrices), ours, known, strict=True):
        assert close(mine, right), which


def close(mine: Tensor, right: Tensor) -> bool:
    mine, right = mine.detach().double(), right.detach()
    return float((mine - right).norm()) < 1e-5 * float(right.norm())


def test_every_kind_of_attention_is_trained() -> None:
    """Layers without attention belong to families that are refused for Mamba2 or for FFNs without gates."""
    assert set(ATTENTIONS) == set(WIRED) - {*UNTRAINED, NoAttention}
    config = replace(find_shape("llama-7b").config, layers=(LayerConfig(Mamba2Config(4, 16, 2, 16, 4), FfnConfig(32)),))
    with pytest.raises(RequestError, match="models with Mamba2, short convolutions or Kimi Delta Attention are not"):
        check_recipe("reglu", config)


def test_models_that_are_not_computed_are_refused() -> None:
    """By training, and where the importance of columns is measured."""
    dense, routed = (replace(find_shape(f"gemma-4-{size}").config, logit_cap=None) for size in ("e2b", "26b-a4b"))
    refused = {"experts with norms": routed, "inputs of layers": dense, "read the keys": replace(dense, layer_inputs=0)}
    for reason, config in refused.items():
        with pytest.raises(RequestError, match=f"models with .*{reason}.* are not trained"):
            check_recipe("reglu", config)
        checkpoint: Any = SimpleNamespace(config=config, path="model.gguf")
        with pytest.raises(RequestError, match=f"not measured for .*{reason}"):
            Observed(checkpoint)


@pytest.mark.parametrize("about", [LATENT, KINDS["states"][0]], ids=["latents", "states"])
def test_products_in_bfloat16(about: Any) -> None:
    """A window shorter than the taps, and one of whole chunks: what is kept between products is as in float32."""
    found: list[list[Tensor]] = []
    for compute in (torch.float32, torch.bfloat16):
        model = one_layer(about)
        wide = TorchModel(model.config, narrowed(model.weights, compute), compute)
        rng = torch.Generator().manual_seed(1)
        every = [torch.randn(1, tokens, WIDTH, generator=rng).requires_grad_() for tokens in (2, 64)]
        outs = [ATTENTIONS[type(about)](wide, x, "layers.0.", about) for x in every]
        found.append([*outs, *torch.autograd.grad(outs, every, [torch.ones_like(out) for out in outs])])
    for exact, rough in zip(*found, strict=True):
        rough, exact = rough.detach().float(), exact.detach()
        assert float((rough - exact).norm()) < 0.03 * float(exact.norm())


def test_matrices_that_are_stored_transposed_are_rounded_as_stored() -> None:
    model = one_layer(replace(LATENT, plain_dim=32, latents=64, rope_dim=8))
    model.rounded, model.transposed = {"layers.0.k_b": "q4_0", "layers.0.v_b": "q4_1"}, {"layers.0.k_b"}
    for name, kind in model.rounded.items():
        own, rounded = model.weights[name], model.weight(name)
        if name in model.transposed:
            own, rounded = own.mT, rounded.mT
        rows = own.reshape(-1, own.shape[-1]).numpy()
        assert np.array_equal(rounded.reshape(rows.shape), dequantize(quantize(rows, kind.upper()), kind.upper()))


def test_what_a_file_says_twice_is_written_once(tmp_path: Path) -> None:
    """Keys and values from latents in one tensor beside those in use would be the old ones."""
    plain, both = tmp_path / "plain.gguf", tmp_path / "both.gguf"
    expert_models.write(plain, small(expert_models.CONFIGS["deepseek-v2-lite"]), expert_models.Weights("f16", "f16"))
    file = read_gguf(plain)
    tensors = file.tensors | {f"blk.{n}.attn_kv_b.weight": file.tensors["output.weight"] for n in range(3)}
    listed = [(name, tensor.type, tensor.shape) for name, tensor in tensors.items()]
    with both.open("wb") as to:
        write_gguf(to, metadata_bytes(plain), listed, (tensor.data for tensor in tensors.values()))
    checkpoint, names = open_checkpoint(both), ["layers.1.k_b", "layers.2.v_b"]
    about = {"hidden_act": "cats", "hidden_act_param": [0.0] * 3}
    path = write_model(
        checkpoint,
        tmp_path / "out",
        StoredTypes("f16"),
        names,
        lambda name: float32_tensor(checkpoint.take(name).float32() / 2),
        about,
    )
    written = open_checkpoint(path)
    assert set(read_gguf(path).tensors) == set(file.tensors)
    for name in names:
        assert np.allclose(2 * written.take(name).float32(), checkpoint.take(name).float32(), atol=1e-6)


def folder(shape: str, path: Path) -> Path:
    if shape != DENSE:
        expert_models.write_folder(path, small(find_shape(shape).config), expert_models.Weights("f16"))
        return path
    made = Truth(case_named(shape), vocab_size=1200).save("folder", path)
    write_tokenizer_files(made, 1200)
    return made


@pytest.mark.parametrize("shape", [*FOLDERS, DENSE])
def test_a_folder_is_trained(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All matrices of its layers change but the routers', nothing else does, and the engine computes the same model."""
    monkeypatch.setattr("powerinfer_train.training.fast_type", lambda *_: torch.float32)
    monkeypatch.setattr("powerinfer_train.draw_log", lambda *_: None)  # which takes longer than the training
    before = open_checkpoint(folder(shape, tmp_path / "source"))
    config = SparsifyConfig(window=32, batch=128, rows=4, tokens=512, save=1e9, device="cpu", seed=3)
    after = open_checkpoint(sparsify(before, [], config, tmp_path / "out", threads=1).path)
    assert after.config.activations == "cats" and after.main_type == before.main_type
    trained = trained_names(before.config)[1]
    for name, _ in shapes(before.config):
        same = np.array_equal(after.take(name).float32(), before.take(name).float32())
        assert same == (name not in trained), name
    assert any(name.endswith(".threshold") for name in after.names()) == (shape == DENSE)
    own, known = logits_of(after.path)
    apart = np.abs(own - known).max(1) / known.std()
    assert np.median(apart) < 0.02  # a neuron at its threshold fires in one computation and not in the other
