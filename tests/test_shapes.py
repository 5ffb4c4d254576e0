"""Sizes of models from their configurations: parameters that are known, bytes as the engine's layouts have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from configs import changed
from model_files import PLAIN, family_gguf, plain_folder, tiny_config, tiny_folder, tiny_gguf
from sparse_models import give_bundles, give_predictor, tiny_llama

from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.bundle_file import open_bundles
from powerinfer.formats.bundle_types import choose_types
from powerinfer.formats.catalogue import catalogue
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.layout import is_matrix, is_router
from powerinfer.formats.mixes import MIXES, ModelMatrices, target_types, wanted_types
from powerinfer.formats.predictor_file import open_predictor
from powerinfer.formats.quant import block_type
from powerinfer.formats.weight_types import NATIVE_TYPES
from powerinfer.kernels import cpu, gpu
from powerinfer.models import inventory, load
from powerinfer.neurons import BUNDLE_GROUP
from powerinfer.placement import shapes
from powerinfer.placement.estimates import shape_of
from powerinfer.placement.mixes import DTYPES, read_dtype
from powerinfer.placement.power_law import FAMILIES
from powerinfer.placement.shapes import (
    checkpoint_model,
    described_model,
    file_bytes,
    find_shape,
    shape_names,
    stored_types,
)
from powerinfer.prepare.packing import pack

PUBLISHED = {  # as their authors count them, in 1e9 (GLM-4.5-Air: 106, rounded down; Kimi K2: 1 T)
    "opt-6.7b": 6.7, "opt-13b": 13, "opt-30b": 30, "opt-66b": 66, "opt-175b": 175, "falcon-7b": 7, "falcon-40b": 41,
    "llama-7b": 6.74, "llama-13b": 13.0, "llama-70b": 69.0, "llama-70b-swiglu": 69.0, "bamboo-7b": 7.24,
    "mistral-7b": 7.24, "llama-3.1-8b": 8.03, "qwen3-4b": 4.02,
    "mixtral-8x7b": 46.7, "olmoe-1b-7b": 6.92, "qwen3-30b-a3b": 30.5, "glm-4.5-air": 106.9,
    "smallthinker-4b": 4, "smallthinker-21b": 21.5,
    "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
    "qwen3-next-80b-a3b": 80, "qwen3.6-35b-a3b": 35,
    "deepseek-v2-lite": 15.7, "deepseek-v2": 236, "deepseek-v3": 671, "kimi-k2": 1026,
    "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-8b": 8.2, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8,
    "qwen2.5-32b": 32.8, "qwen2.5-72b": 72.7, "qwen3.6-27b": 27, "qwen3-235b-a22b": 235,
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.3-70b": 70.6, "smollm2-360m": 0.36, "smollm2-1.7b": 1.7,
    "gemma-2-2b": 2.6, "gemma-2-9b": 9.2, "gemma-2-27b": 27.2,
    "gemma-3n-e2b": 4.4, "gemma-3n-e4b": 6.8,
    "gemma-4-e2b": 4.6, "gemma-4-e4b": 7.5, "gemma-4-12b": 11.9, "gemma-4-26b-a4b": 25.2, "gemma-4-31b": 30.7,
    "gemma-3-270m": 0.27, "gemma-3-1b": 1.0, "gemma-3-4b": 3.9, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0,
    "phi-4": 14.7, "phi-4-mini": 3.8, "mistral-small-24b": 23.6, "granite-3.3-8b": 8.17, "olmo-2-1b": 1.48,
    "olmo-2-7b": 7.3, "glm-4.7-flash": 30, "minimax-m2": 229,
    "jais-2-8b": 8.1, "minicpm4-8b": 8.2, "ling-mini-2.0": 16.3, "ling-flash-2.0": 102.9, "dots.llm1": 142.8,
    "llama-4-scout": 107.8, "llama-4-maverick": 400.7,
    "afm-4.5b": 4.6, "ernie-4.5-21b-a3b": 21.8, "glm-4-32b": 32.6, "glm-4-9b": 9.4, "granite-3.1-1b-a400m": 1.3,
    "granite-3.3-2b": 2.5, "granite-4.0-micro": 3.4, "nemotron-mini-4b": 4.2,
    "nemotron-3-nano-30b-a3b": 31.6, "nemotron-3-super-120b-a12b": 120.7, "nemotron-3-nano-4b": 3.97,
    "nemotron-nano-9b-v2": 8.89, "nemotron-nano-12b-v2": 12.31, "nemotron-h-8b": 8.1,
    "granite-4.0-h-micro": 3.2, "granite-4.0-h-tiny": 6.9, "granite-4.0-h-small": 32.2,
    "falcon-h1-1.5b": 1.55, "falcon-h1-3b": 3.15, "falcon-h1-7b": 7.59,
    "lfm2-350m": 0.35, "lfm2-700m": 0.74, "lfm2-1.2b": 1.17, "lfm2-2.6b": 2.6, "lfm2-8b-a1b": 8.3, "lfm2-24b-a2b": 24,
    "command-r7b": 8, "command-a-111b": 111, "exaone-4.0-1.2b": 1.28, "exaone-4.0-32b": 32.0, "stablelm-2-1.6b": 1.64,
    "falcon3-1b": 1.67, "falcon3-3b": 3.23, "falcon3-7b": 7.46, "falcon3-10b": 10.3,
    "ministral-3-3b": 3.4, "ministral-3-8b": 8.5, "ministral-3-14b": 13.5, "mistral-small-4-119b": 119,
    "hunyuan-4b": 4, "hunyuan-7b": 7.5, "hunyuan-a13b": 80, "apertus-8b": 8.05, "apertus-70b": 70.6,
    "bitnet-b1.58-2b": 2.41, "phi-3.5-moe": 41.9,
    "phi-3.5-mini": 3.8, "qwen3.5-2b": 1.9,
    "qwen3.5-4b": 4.2, "qwen3.5-9b": 9, "seed-oss-36b": 36.2, "smollm3-3b": 3.1, "kimi-linear-48b-a3b": 49.1,
    "muse-glimmer-30b": 27.9, "north-mini-code-30b-a3b": 30.5, "olmo-1b": 1.18, "olmo-7b": 6.89, "plm-1.8b": 1.83,
    "stablelm-2-12b": 12.14,
}  # fmt: skip


@pytest.mark.parametrize("name", shape_names())
def test_parameters_of_published_models(name: str) -> None:
    model = described_model(find_shape(name).config, "f16")
    digits = len(str(PUBLISHED[name]).partition(".")[2])
    assert round(model.parameters / 1e9, digits) == PUBLISHED[name]


def test_latents_are_kept_once() -> None:
    """27 layers of 512 latents and 64 rotated numbers in f16, and 16 heads whose matrices make 128 numbers of them."""
    config = find_shape("deepseek-v2-lite").config
    model = described_model(config, "f16")
    assert model.kv_bytes("f16", 64, 1) == 27 * 64 * 576 * 2
    assert model.kv_bytes("q8_0", 32, 1) == 27 * 32 * (576 + 576 // 32 * 2)
    assert all(model.gpu_kv_bytes(kind, 64, 2) == model.kv_bytes(kind, 64, 2) for kind in ("f16", "q8_0", "f32"))
    latent = sum(one.stored for one in model.attention[0])
    assert latent == 2 * (16 * 192 * 2048 + 576 * 2048 + 16 * (128 + 128) * 512 + 2048 * 16 * 128)


def test_opt_175b_to_the_byte() -> None:
    """96 layers of 12288, 4 x 12288 neurons, a vocabulary of 50272, 2048 + 2 positions."""
    model = described_model(find_shape("opt-175b").config, "f16")
    assert sum(one.stored for one in model.attention[0]) == 4 * 12288 * 12288 * 2
    assert model.bundle.stride == 2 * 2 * 12288 and len(model.attention) == 96
    assert sum(one.stored for one in model.ffn[0]) == model.config.widest_ffn * model.bundle.stride
    assert model.tables == 2 * 12288 * (50272 + 2050) and model.head.stored == 2 * 12288 * 50272
    assert model.kv_bytes("f16", 2048, 1) == 96 * 2048 * 2 * 2 * 12288
    assert model.kv_bytes("f16", 2049, 2, slice(1)) == 2 * (2048 + cpu.PAGE) * 2 * 2 * 12288, "whole pages"
    # two norms and the biases of q, k, v, o, up and down of each layer, and the final norm
    assert model.vectors == 4 * (96 * (2 * 2 * 12288 + 4 * 12288 + 49152 + 12288) + 2 * 12288)


def test_types() -> None:
    config = find_shape("llama-7b").config
    known = ("f16", "bf16", "q8_0", "q4_0", "mxfp4", "q4_k_m", "q5_k_s", "q6_k")
    bits = {dtype: described_model(config, dtype).ffn[0][0].stored * 8 / (11008 * 4096) for dtype in known}
    assert bits == {
        "f16": 16, "bf16": 16, "q8_0": 8.5, "q4_0": 4.5, "mxfp4": 4.25, "q4_k_m": 4.5, "q5_k_s": 5.5, "q6_k": 6.5625,
    }  # fmt: skip
    for dtype in sorted(DTYPES.keys() - set(known)):
        gate = described_model(config, dtype).ffn[0][0]
        converted = gate.type in ("Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
        assert gate.gpu_type == ("Q8_0" if converted else gate.type), "as a load converts it"
    quantised = described_model(config, "q4_0").bundle
    assert (quantised.gate_type, quantised.down_type) == ("Q4_0", "Q4_0X32"), "as pack makes them"
    odd = described_model(changed(config, d_model=4100, head_dim=100, n_heads=41, n_kv_heads=41), "q4_0")
    assert odd.bundle.gate_type == "F16" and not odd.predictors, "rows that are not whole blocks"


@pytest.mark.parametrize("name", ["llama-7b", "llama-3.3-70b", "mixtral-8x7b"])
def test_mixes_of_few_bits_are_those_of_files(name: str) -> None:
    config = find_shape(name).config
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "head": "output", "embed": "token_embd"}
    in_file = {}
    for tensor, shape in shapes.shapes(config):
        outer, _, rest = tensor.partition(".")
        number, _, matrix = rest.partition(".")
        role = matrix.removeprefix("experts_")
        of_layer = f"blk.{number}.{names.get(role, 'ffn_' + role)}"
        if is_matrix(tensor, shape) and not is_router(tensor):
            in_file[tensor] = (of_layer if outer == "layers" else names[tensor]) + ".weight", shape
    stored = {file: ("F16", shape) for file, shape in in_file.values()}
    experts = 8 if name == "mixtral-8x7b" else 0
    matrices = ModelMatrices(stored, config.n_layers, experts, name != "llama-7b", name == "llama-3.3-70b")
    for dtype in ("iq3_m", "iq3_xxs", "iq2_m", "iq2_xs", "iq2_xxs", "tq2_0", "q2_0", "q1_0", "nvfp4"):
        types = target_types(matrices, wanted_types(matrices, MIXES[dtype.upper()], weighed=True))
        planned = stored_types(config, dtype)
        for tensor, (file, _) in in_file.items():
            assert planned[tensor] == types[file], (dtype, tensor)


@pytest.mark.parametrize(("name", "share"), [("opt-66b", 0.0488), ("llama-70b", 0.0808), ("opt-30b", 0.0709)])
def test_predictors_of_described_models_have_the_papers_share(name: str, share: float) -> None:
    model = described_model(find_shape(name).config, "f16", name, find_shape(name).predictor)
    weights = sum(one.stored for pair in model.predictors for one in pair) * 32 / 34
    assert weights / model.parameters == pytest.approx(share, rel=0.05), "whole blocks"
    small = described_model(find_shape(name).config, "q4_0", name, 0.5)
    own = sum(one.stored for layer in (*small.attention, *small.ffn) for one in layer) + small.tables
    assert sum(one.stored for pair in small.predictors for one in pair) <= shapes.MOST_PREDICTOR * own


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", *PLAIN])
def test_a_checkpoint_is_its_configuration(tmp_path: Path, architecture: str) -> None:
    """Headers and configuration agree, and both with what the engine's executor really packs."""
    if architecture in PLAIN:
        path = plain_folder(tmp_path / "model", architecture)
    else:
        path = tiny_folder(
            tmp_path / "model", architecture, dtype="F16", biases="qkv" if architecture == "qwen2" else ""
        )
    checkpoint = open_checkpoint(path)
    model = checkpoint_model(checkpoint)
    described = described_model(checkpoint.config, "f16", model.name)
    assert model.fingerprint == checkpoint.fingerprint
    assert replace(described, predictors=(), fingerprint=model.fingerprint) == replace(model, predictors=())
    executor = load(open_checkpoint(path), EngineConfig(threads=1))
    matrices = [one for layer in (*model.attention, *model.ffn) for one in layer] + [model.head, *model.projections]
    rows = 2 * model.config.d_model * (2 if model.config.positions == "learned" else 1)  # of the tables, looked up
    assert executor.bytes_per_token == sum(one.panels for one in matrices) + rows
    for layer in range(model.config.n_layers):
        assert executor.ffns[layer].nbytes == sum(one.panels for one in model.ffn[layer])


def test_a_checkpoint_with_bundles_and_a_predictor(tmp_path: Path) -> None:
    path = give_predictor(give_bundles(tiny_llama(tmp_path / "m.gguf")))
    checkpoint = open_checkpoint(path)
    model = checkpoint_model(checkpoint)
    bundles = open_bundles(checkpoint, None, cpu.bundle_row_bytes)
    assert model.bundles == bundles.layouts
    assert model.bundle.stride * model.config.widest_ffn * model.config.n_layers == bundles.nbytes
    assert sum(one.stored for pair in model.predictors for one in pair) == open_predictor(checkpoint).nbytes
    assert model.selected == (shapes.SELECTED_PER_FIRING,) * model.config.n_layers


def test_a_predictor_that_the_file_brings_along(tmp_path: Path) -> None:
    path = family_gguf("falcon", published=True).write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    own = [entry for entry in checkpoint.tensor_list() if ".predictor_" in entry[0]]
    assert own and sum(one.stored for pair in checkpoint_model(checkpoint).predictors for one in pair) == sum(
        nbytes for *_, nbytes in own
    )


def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    path = tiny_gguf("llama").write(tmp_path / "m.gguf")
    plain = checkpoint_model(open_checkpoint(path))
    quantised = checkpoint_model(open_checkpoint(path, quantize="q8_0"))
    assert plain.weight_type == "F32" and quantised.weight_type == "Q8_0"
    assert quantised.attention[0][0].stored * 4 * 32 == plain.attention[0][0].stored * 34


@pytest.mark.parametrize("kind", sorted(NATIVE_TYPES))
def test_a_matrix_has_the_bytes_and_the_type_that_it_gets_on_a_gpu(kind: str) -> None:
    for rows, cols in ((48, 512), (48, 256)):
        matrix = inventory.matrix(kind, rows, cols)
        assert matrix.stored == gpu.weight_bytes(kind, rows, cols)
        assert matrix.gpu_type == gpu.gpu_type(kind, cols) and matrix.gpu_type in gpu.GPU_TYPES
        factor = 4 * (kind == gpu.FACTORED)  # of each row
        assert matrix.stored == rows * (block_type(matrix.gpu_type).row_bytes(cols) + factor)
        assert matrix.panels == cpu.matrix_bytes(kind, rows, cols)


@pytest.mark.parametrize(
    ("architecture", "types"),
    [
        ("llama", ("F16", "F16")), ("llama", ("BF16", "BF16")), ("llama", ("Q8_0", "Q8_0")),
        ("llama", ("Q4_0", "Q8_0")), ("llama", ("Q4_0", "Q4_0X32")), ("opt", ("F16", "F16")),
    ],
)  # fmt: skip
def test_neurons_on_a_gpu_have_the_bytes_that_are_counted(
    tmp_path: Path, architecture: str, types: tuple[str, str]
) -> None:
    torch = pytest.importorskip("torch")
    if architecture == "llama":
        checkpoint = open_checkpoint(tiny_llama(tmp_path / "m.gguf"), "q4_0" if types[1] == "Q4_0X32" else None)
    else:
        checkpoint = open_checkpoint(plain_folder(tmp_path / "model", architecture))
    pack(checkpoint, None, choose_types(checkpoint, *types))
    model, bundles = checkpoint_model(checkpoint), open_bundles(checkpoint, None, cpu.bundle_row_bytes)
    config, biases = checkpoint.config, [None, None]
    if config.layers[0].ffn.bias:
        biases[1] = np.zeros(config.widest_ffn, np.float32)
    for index in ([0], [1, 31, 40], range(config.widest_ffn)):
        some = np.array(index, np.int32)
        held = gpu.resident(
            bundles.layouts[0], bundles.layers[0], some, torch.device("cpu"), config.layers[0].ffn, biases
        )
        groups = len(np.unique(some // BUNDLE_GROUP))
        assert held.nbytes + 8 * len(some) == len(some) * model.gpu_neuron + groups * model.gpu_shared, index


HEAD_TOO = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")
"""Models whose files have a head beside the embedding, which is the same."""
FEWER_BITS = ("gemma-4-12b",)
"""Models whose files have the embedding, which is the head too, in the bits of other matrices."""


def sized() -> list[tuple[str, str, float, float]]:
    """(shape, quantisation, gigabytes, how much larger they may be) of the catalogue's files; some publishers give more
    matrices more bits."""
    every = [(shape_of(name, model), model) for name, model in catalogue().items()]
    return [
        (shape, one.quantisation, one.gigabytes, 0.045 if model.repository.startswith("unsloth/") else 0.025)
        for shape, model in every
        for one in model.downloads
        if shape is not None and one.quantisation and one.quantisation != "Q4_0" and not one.estimated
        if not one.quantisation.startswith("UD-")
    ]


@pytest.mark.parametrize(("name", "dtype", "gigabytes", "more"), sized())
def test_files_are_as_large_as_published_ones(name: str, dtype: str, gigabytes: float, more: float) -> None:
    """Of each model of the catalogue, by its shape and the mix of types that llama.cpp writes."""
    config = find_shape(name).config
    config = replace(config, tied_embeddings=config.tied_embeddings and name not in HEAD_TOO)
    least = -0.04 if name in FEWER_BITS else -0.01
    assert least < 1 - file_bytes(config, read_dtype(dtype)) / 1e9 / gigabytes < more


def test_a_mix_has_more_bits_where_llama_cpp_gives_them() -> None:
    config = find_shape("qwen3-8b").config
    types = stored_types(config, "q4_k_m")
    assert types["head"] == "Q6_K" and types["embed"] == types["layers.5.gate"] == types["layers.5.q"] == "Q4_K"
    more = [layer for layer in range(36) if types[f"layers.{layer}.v"] == "Q6_K"]
    assert more == [*range(4), 6, 9, 12, 15, 18, 21, 24, 27, 30, *range(31, 36)]
    assert more == [layer for layer in range(36) if types[f"layers.{layer}.down"] == "Q6_K"]
    odd = stored_types(find_shape("qwen2.5-0.5b").config, "q4_k_m")  # rows of 896
    assert odd["layers.9.q"] == "Q5_0" and odd["embed"] == "Q8_0" and odd["layers.9.down"] in ("Q4_K", "Q6_K")
    experts = stored_types(find_shape("qwen3-30b-a3b").config, "q4_k_m")
    assert experts["layers.0.experts_down"] == "Q6_K" and experts["layers.0.router"] == "F32"
    oss = stored_types(find_shape("gpt-oss-20b").config, "mxfp4")
    assert oss["layers.0.experts_up"] == "MXFP4" and oss["layers.0.q"] == oss["embed"] == "Q8_0"


def test_types_of_few_bits_cost_what_their_files_do() -> None:
    config = find_shape("qwen3-30b-a3b").config
    for dtype, kind in (("q2_k", "Q2_K"), ("q3_k_s", "Q3_K")):
        model = described_model(config, dtype, "m")
        up = next(one for one in model.experts[20] if one.name == "layers.20.experts_up")
        assert up.type == kind and model.in_place and not model.converted
        assert up.file <= up.panels < 1.04 * up.file


@pytest.mark.parametrize(
    ("text", "name"),
    [("Q4_K_M", "q4_k_m"), ("UD-Q4_K_XL", "q4_k_m"), ("MXFP4_MOE", "mxfp4"), ("q8_0", "q8_0"), ("IQ4_XS", "iq4_xs")],
)
def test_types_by_the_names_of_files(text: str, name: str) -> None:
    assert read_dtype(text) == name


def test_types_that_are_none() -> None:
    with pytest.raises(RequestError, match="did you mean q4_k_m"):
        read_dtype("q4_km")
    with pytest.raises(RequestError, match="one of f16, bf16"):
        read_dtype("\x1b[2J")


def test_types_that_a_gpu_converts_cost_no_more_elsewhere(tmp_path: Path) -> None:
    """The type of most FFN weights is that of the file, whatever type they get on a GPU."""
    config = find_shape("llama-7b").config
    small, large = inventory.matrix("Q4_1", 64, 512), inventory.matrix("Q5_1", 64, 512)
    model = replace(described_model(config, "f16"), ffn=((small, large, large),))
    assert small.stored == large.stored and model.weight_type == "Q5_1"


def test_what_training_says_of_selected_neurons() -> None:
    layers = [(0.3, 0.1), (0.05, 0.1), (0.2, 0)]
    training = {"layers": [{"candidate_fraction": named, "active_fraction": fire} for named, fire in layers]}
    config, usual = shapes.find_shape("nemotron-nano-9b-v2").config, shapes.SELECTED_PER_FIRING
    config = replace(config, layers=config.layers[:6])
    assert list(config.neurons) == [1, 3, 5]
    assert shapes._selected(config, training) == pytest.approx((usual, 3.0, usual, 1.0, usual, usual))
    assert shapes._selected(config, None) == (usual,) * 6


def test_scratch_is_what_the_engine_takes_or_more(tmp_path: Path) -> None:
    """Against the buffers of csrc/program.cpp, written out."""
    config = find_shape("llama-7b").config
    model = described_model(config, "f16")
    x, qkv, attended, gate_up, rope = 4096, 3 * 4096, 4096, 2 * 11008, 128
    forms = (4 + 2 + 1 + 2 * 4 / 32 + 2 / 16) * (4096 + 11008)
    wanted = 512 * (4 * (x + qkv + attended + gate_up + rope) + forms) + 4 * 32000
    assert model.scratch_bytes(512, 1) == pytest.approx(wanted, rel=0.001)


def test_shapes_by_name_and_by_file(tmp_path: Path) -> None:
    assert find_shape("OPT-175B").config.n_layers == 96
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config("llama", hidden_act="relu")))
    for given in (str(file), str(tmp_path)):
        found = find_shape(given)
        assert found.config.activations == "relu" and found.law == FAMILIES["reglu-7b"]
    for given, near in (
        ("mixtral-8x70b", "the nearest are mixtral-8x7b, mistral-7b"),
        ("Qwen3-4", "the nearest are qwen3-4b"),
        ("wrong/path", "name .`powerinfer plan --names` lists all"),
    ):
        with pytest.raises(RequestError, match=near) as caught:
            find_shape(given)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not a JSON object"),
        ("{", "config.json"),
        (json.dumps({"architectures": ["MambaForCausalLM"]}), "not supported"),
        (json.dumps(tiny_config("llama") | {"hidden_size": 1 << 40}), "hidden_size"),
        (json.dumps(tiny_config("llama") | {"num_hidden_layers": 4000, "intermediate_size": 1 << 20}), "more than can"),
        (json.dumps(tiny_config("llama") | {"num_key_value_heads": 3}), "cannot share"),
        pytest.param('{"a": 1' + " " * (1 << 24) + "}", "absurd", id="large"),
    ],
)
def test_configurations_that_will_not_do(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises((ModelError, RequestError), match=why):
        find_shape(str(file))


def test_the_law_of_a_family() -> None:
    for name in ("opt-6.7b", "falcon-7b", "llama-7b", "bamboo-7b", "mistral-7b", "smallthinker-4b", "kimi-k2"):
        config = find_shape(name).config
        known = shapes.law_of(config)
        assert (known.active >= 0.1) == config.layers[0].ffn.gated, name
        assert np.isfinite(known.hot)
