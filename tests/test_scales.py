"""Training the scales of quantised blocks alone, `sparsify --type same`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import small
from test_quant import random_blocks
from test_sparsify import SHAPE, SMALL, divergence, made
from test_sparsify_attention import LATENT, one_layer

from benchmarks.models import expert_models
from benchmarks.models.speed_models import write_random_llama
from powerinfer import ModelError, RequestError
from powerinfer.config import SparsifyConfig
from powerinfer.formats.block_scales import SCALED, block_scales, factors, with_scales
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.quant import block_type, quantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.prepare.corpus import open_corpora
from powerinfer_train import Listener, sparsify
from powerinfer_train.blocks import Blocks, linear
from powerinfer_train.estimate import estimate, memory
from powerinfer_train.recipes import RECIPES, StoredTypes, code_bytes, code_bytes_of_k_quants, trained_names
from powerinfer_train.training import Sparsifier
from powerinfer_train.writing import write_model


def tensor(kind: str, *shape: int) -> RawTensor:
    about = block_type(kind)
    rows = random_blocks(about, int(np.prod(shape[:-1])), shape[-1] // about.block, seed=len(shape))
    random = RawTensor(kind, shape, rows.reshape(-1))
    draw = np.random.default_rng(0)
    return with_scales(random, draw.uniform(0.01, 1, (*rows.shape[:1], shape[-1] // about.block, len(factors(random)))))


@pytest.mark.parametrize("kind", sorted(SCALED))
def test_values_are_linear_in_the_scales(kind: str) -> None:
    stored = tensor(kind, 3, 512)
    scales = block_scales(stored)
    assert np.array_equal(with_scales(stored, scales).data, stored.data)
    each = [one.reshape(3, scales.shape[1], -1) for one in factors(stored)]
    values = sum(one * scales[..., n, None] for n, one in enumerate(each)).reshape(3, 512)
    assert np.allclose(values, stored.float32(), rtol=1e-5, atol=1e-5 * np.abs(values).max())
    tripled = with_scales(stored, 3 * scales)
    assert np.allclose(tripled.float32(), 3 * stored.float32(), rtol=2e-3, atol=2e-3 * np.abs(values).max())
    assert all(np.array_equal(a, b) for a, b in zip(factors(tripled), factors(stored), strict=True))
    with pytest.raises(ModelError, match="too large for float16"):
        with_scales(stored, np.full_like(scales, 1e6))


@pytest.mark.parametrize("kind", sorted(SCALED))
def test_moves_and_their_gradient(kind: str) -> None:
    """Beside the plain sum, of a stack of two matrices."""
    stored = tensor(kind, 2, 5, 512)
    blocks = Blocks.from_tensor(stored, torch.device("cpu"))
    rng = torch.Generator().manual_seed(0)
    moves = (0.1 * torch.randn(blocks.scales.shape, generator=rng)).requires_grad_()
    x = torch.randn(3, 4, 512, generator=rng).requires_grad_()
    weight = torch.randn(3, 4, 5, generator=rng)
    every = [torch.from_numpy(one).unflatten(-1, (blocks.scales.shape[-2], -1)) for one in factors(stored)]
    moved = blocks.scales + blocks.units * moves
    plain = sum(one * moved[..., n, None] for n, one in enumerate(every)).flatten(-2)
    scale = float(plain.detach().abs().max())
    for number in range(2):
        own, of_one = blocks.expert(number), moves[number]
        assert torch.allclose(own.values(of_one), plain[number], rtol=1e-5, atol=1e-5 * scale)
        wanted = torch.autograd.grad(((x @ plain[number].T) * weight).sum(), (x, moves), retain_graph=True)
        found = torch.autograd.grad((linear(x, of_one, own) * weight).sum(), (x, moves), retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    assert np.array_equal(blocks.stored(stored, blocks.still()).data, stored.data)
    written = blocks.stored(stored, moves)
    back = blocks.moves_to(written)
    assert back is not None and torch.allclose(blocks.moved(back), moved, rtol=1e-3, atol=1e-7)
    assert blocks.moves_to(tensor(kind, 2, 5, 256)) is None
    assert blocks.moves_to(RawTensor("F16", (2, 5, 512), np.zeros(2 * 5 * 512 * 2, np.uint8))) is None
    again = blocks.rescaled(written)
    assert again is not None and again.factors is blocks.factors, "codes are in memory once"
    assert np.array_equal(again.stored(written, again.still()).data, written.data)
    other = stored.data.copy()
    other.reshape(-1, block_type(kind).nbytes)[:, -5] ^= 1
    assert blocks.moves_to(RawTensor(kind, stored.shape, other)) is None


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, its FFNs in Q5_0 and attention in Q4_1."""
    folder = tmp_path_factory.mktemp("quantised")
    return stored_as(folder, "q5_0", "q4_1")


def stored_as(folder: Path, ffns: str, attention: str) -> Path:
    write_random_llama(folder / "dense.gguf", SHAPE)
    dense = open_checkpoint(folder / "dense.gguf")
    names = trained_names(dense.config)[1]
    return write_model(dense, folder, StoredTypes(ffns, attention), names, dense.take, {"hidden_act": "silu"})


def test_codes_stay_and_scales_learn(quantised: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"type": "same", "lr": 20.0, "zeros": 0.7, "tokens": 2560}
    whole, parts = made(quantised, tmp_path / "whole", **options), tmp_path / "parts"
    before, after = open_checkpoint(quantised), open_checkpoint(whole.path)
    assert after.metadata["general.file_type"] == before.metadata["general.file_type"]
    for name in trained_names(before.config)[1]:
        old, new = before.take(name), after.take(name)
        assert new.type == old.type and not np.array_equal(new.data, old.data), name
        assert np.array_equal(with_scales(new, block_scales(old)).data, old.data), name
    steps = 0

    def stop(label: str, *_: int) -> None:
        nonlocal steps
        steps += label == "training"
        if steps == 4:
            steps += 1
            raise KeyboardInterrupt

    config = SparsifyConfig(**(SMALL | options | {"save": 1e-9}))
    with pytest.raises(KeyboardInterrupt):
        sparsify(before, [], config, parts, Listener(stop), threads=1)
    again = made(quantised, parts, **options)
    assert again.document["resumed"] == 4
    assert again.path.read_bytes() == whole.path.read_bytes()
    work = Sparsifier(before, open_corpora([]), config, tmp_path / "third", start=after)
    assert np.array_equal(work.trained("layers.1.up").data, after.take("layers.1.up").data)


def test_disturbed_scales_are_learnt_again(quantised: Path, tmp_path: Path) -> None:
    config = SparsifyConfig(**(SMALL | {"type": "same", "lr": 40.0, "zeros": 0.3, "tokens": 5120}))
    work = Sparsifier(open_checkpoint(quantised), open_corpora([]), config, tmp_path)
    rng = torch.Generator().manual_seed(0)
    for name in work._blocks:
        moves = work.student.weights[name]
        moves += 0.1 * torch.randn(moves.shape, generator=rng)
    before = divergence(work)
    work.run()
    assert divergence(work) < 0.8 * before


def test_scales_of_experts_and_latent_attention(tmp_path: Path) -> None:
    expert_models.write(
        tmp_path / "model.gguf",
        small(expert_models.CONFIGS["deepseek-v2-lite"]),
        expert_models.Weights("q8_0", "q4_0"),
    )
    before = open_checkpoint(tmp_path / "model.gguf")
    config = SparsifyConfig(**(SMALL | {"type": "same", "lr": 50.0, "tokens": 512}))
    after = open_checkpoint(sparsify(before, [], config, tmp_path / "out", threads=1).path)
    for name in trained_names(before.config)[1]:
        old, new = before.stored(name), after.stored(name)
        assert np.array_equal(with_scales(new, block_scales(old)).data, old.data), name
        if ".experts_" not in name:  # few of them see a token
            assert not np.array_equal(new.data, old.data), name


def test_matrices_that_are_stored_transposed() -> None:
    model = one_layer(replace(LATENT, plain_dim=32, latents=64, rope_dim=8))
    name = "layers.0.k_b"
    rows = model.weights[name].mT.contiguous()
    stored = RawTensor(
        "Q4_1", tuple(rows.shape), quantize(rows.reshape(-1, rows.shape[-1]).numpy(), "Q4_1").reshape(-1)
    )
    own = Blocks.from_tensor(stored, torch.device("cpu"))
    model.blocks, model.transposed = {name: own}, {name}
    model.weights[name] = own.still()
    assert np.allclose(model.weight(name).mT.numpy(), stored.float32(), rtol=1e-5, atol=1e-6)


def test_codes_of_another_training(quantised: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokens": 512}
    start = open_checkpoint(made(quantised, tmp_path / "first", type="q8_0", **options).path)
    config = SparsifyConfig(**(SMALL | options | {"type": "same"}))
    with pytest.raises(RequestError, match=r"has other codes than .* --type same trains scales alone: give the --type"):
        Sparsifier(open_checkpoint(quantised), open_corpora([]), config, tmp_path, start=start)


def test_types_without_scales(tmp_path: Path) -> None:
    path = stored_as(tmp_path, "q8_0", "mxfp4")
    with pytest.raises(ModelError, match=r"layers\.0\.q is stored as MXFP4, whose scales cannot be trained: give anot"):
        made(path, tmp_path / "out", type="same")


def test_memory_of_scales_alone(quantised: Path) -> None:
    """A fraction of what all weights need; without codes it is the same as ever."""
    checkpoint, config = open_checkpoint(quantised), SparsifyConfig(type="same")
    codes = code_bytes(checkpoint, config)
    assert codes == dict.fromkeys(trained_names(checkpoint.config)[1], 1)
    assert not code_bytes(checkpoint, SparsifyConfig(type="q8_0"))
    assert code_bytes_of_k_quants(checkpoint.config, config) == dict.fromkeys(codes, 2)
    recipe = RECIPES["cats"]
    small, large = (memory(checkpoint.config, recipe, 1, 1, 2, one)[0].device for one in (codes, {}))
    trained = sum(int(np.prod(checkpoint.take(name).shape)) for name in trained_names(checkpoint.config)[1])
    assert large - small > 14 * trained
    about = estimate(checkpoint.config, replace(config, window=32), None, None, codes)
    assert [one["place"] for one in about["memory"]] == ["all on the device"]


def test_memory_where_some_matrices_are_trained_as_a_whole(quantised: Path, tmp_path: Path) -> None:
    """Those stored as floats, and those that get another type."""
    floats, recipe, config = open_checkpoint(stored_as(tmp_path, "q5_0", "f16")), RECIPES["cats"], SparsifyConfig()
    ffns, every = trained_names(floats.config)
    assert code_bytes(floats, replace(config, type="same")) == dict.fromkeys(ffns, 1)
    other = replace(config, type="same", attention_type="q5_1")
    assert code_bytes(open_checkpoint(quantised), other) == dict.fromkeys(ffns, 1)
    assert code_bytes_of_k_quants(floats.config, other) == dict.fromkeys(ffns, 2)
    none, some, all_ = (memory(floats.config, recipe, 1, 1, 2, dict.fromkeys(names, 1)) for names in ((), ffns, every))
    attention = sum(int(np.prod(floats.take(name).shape)) for name in set(every) - set(ffns))
    assert none[0].device > some[0].device > all_[0].device
    assert len(some) == 3 and some[1].ram == 8 * attention and some[2].ram == 12 * attention
