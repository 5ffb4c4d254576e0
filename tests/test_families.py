"""The ReLU families: folders that `transformers` saved and GGUF files, read into the same configuration and tensors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import changed, model_config
from model_files import (
    FF,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PREDICTOR_RANKS,
    VOCAB,
    D,
    as_stored,
    edit_config,
    experts_gguf,
    family_gguf,
    family_weights,
    give_limits,
    safetensors_bytes,
    tiny_folder,
    weights,
)

from benchmarks.models.gguf_writer import F32, STRING, U32, Builder
from powerinfer.config import ModelConfig, RopeConfig
from powerinfer.errors import ModelError
from powerinfer.formats import folder_config, layout
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def saved(folder: Path, kind: str, **settings: Any) -> Any:
    """A model with all its parameters random, saved in the folder by `transformers` itself."""
    config = transformers.CONFIG_MAPPING[kind](**(SIZES | settings))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def read(path: Path) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """The checkpoint, and all its tensors, which are exactly those of its configuration."""
    checkpoint = open_checkpoint(path)
    values = {}
    for name, shape in layout.shapes(checkpoint.config):
        tensor = checkpoint.take(name)
        assert tensor.shape == shape and tensor.data.ndim == 1 and tensor.data.flags.c_contiguous
        values[name] = tensor.float32()
    checkpoint.finish()
    return checkpoint, values


def parameter(model: Any, name: str) -> np.ndarray:
    return model.get_parameter(name).detach().numpy()


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def same(taken: dict[str, np.ndarray], model: Any, names: dict[str, str]) -> None:
    """names: canonical -> the module's, {} standing for the layer's number; all that is taken must be named."""
    spelled = {}
    for canonical, name in names.items():
        many = canonical.startswith("layers.")
        spelled |= {canonical.format(i): name.format(i) for i in range(LAYERS if many else 1)}
    assert taken.keys() == spelled.keys()
    for canonical, name in spelled.items():
        assert np.array_equal(taken[canonical], parameter(model, name)), canonical


def norm(canonical: str, name: str) -> dict[str, str]:
    return {canonical: f"{name}.weight", f"{canonical}_bias": f"{name}.bias"}


# --- OPT

OPT_LAYER = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj"}
OPT_LAYER |= {"up": "fc1", "down": "fc2"}


def opt_names(*, bias: bool = True, final: bool = True, projections: bool = False, tied: bool = True) -> dict[str, str]:
    names = {"embed": "model.decoder.embed_tokens.weight", "positions": "model.decoder.embed_positions.weight"}
    if projections:
        names |= {f"project_{way}": f"model.decoder.project_{way}.weight" for way in ("in", "out")}
    names |= norm("layers.{}.attn_norm", "model.decoder.layers.{}.self_attn_layer_norm")
    names |= norm("layers.{}.ffn_norm", "model.decoder.layers.{}.final_layer_norm")
    for inner, name in OPT_LAYER.items():
        names[f"layers.{{}}.{inner}"] = f"model.decoder.layers.{{}}.{name}.weight"
        if bias:
            names[f"layers.{{}}.{inner}_bias"] = f"model.decoder.layers.{{}}.{name}.bias"
    names |= norm("final_norm", "model.decoder.final_layer_norm") if final else {}
    return names if tied else names | {"head": "lm_head.weight"}


OPT = model_config(
    LAYERS,
    FF,
    None,
    architecture="opt",
    d_model=D,
    n_heads=HEADS,
    n_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    vocab_size=VOCAB,
    context_length=128,
    norm_eps=1e-5,
    activation="relu",
    gated=False,
    norm="layer",
    positions="learned",
    position_offset=2,
    tied_embeddings=True,
    qkv_bias=True,
    o_bias=True,
    bias=True,
)
OPT_CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, bool]]] = [
    ({}, {}, {}),
    (
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},  # OPT-350m
        {"norms": "post", "final_norm": False, "embed_dim": 32},
        {"final": False, "projections": True},
    ),
    ({"_remove_final_layer_norm": True}, {"final_norm": False}, {"final": False}),
    ({"enable_bias": False}, {"qkv_bias": False, "o_bias": False, "bias": False}, {"bias": False}),
    ({"tie_word_embeddings": False}, {"tied_embeddings": False}, {"tied": False}),
]


@pytest.mark.parametrize(("settings", "changes", "names"), OPT_CASES)
def test_opt(tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], names: dict[str, bool]) -> None:
    model = saved(tmp_path / "opt", "opt", ffn_dim=FF, **({"word_embed_proj_dim": D} | settings))
    checkpoint, taken = read(tmp_path / "opt")
    assert checkpoint.config == changed(OPT, name="opt", **changes)
    same(taken, model, opt_names(**names))


def test_opt_files_without_the_outer_prefix(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model = saved(tmp_path / "opt", "opt", ffn_dim=FF, word_embed_proj_dim=D)
    path = tmp_path / "opt/model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    same(read(tmp_path / "opt")[1], model, opt_names())


# --- Falcon

FALCON = changed(
    OPT,
    architecture="falcon",
    n_kv_heads=KV_HEADS,
    size=4 * D,
    rope=RopeConfig(theta=10000.0, dim=HEAD_DIM),
    parallel=True,
    positions="rope",
    position_offset=0,
    qkv_bias=False,
    o_bias=False,
    bias=False,
)
LARGE = {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS}
BIASES = {"qkv_bias": True, "o_bias": True, "bias": True}
FALCON_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "40b": (LARGE, {}),
    "40b with biases": (LARGE | {"bias": True}, BIASES),
    "11b": (LARGE | {"num_ln_in_parallel_attn": 1}, {"shared_norm": True}),
    "7b": ({"num_kv_heads": HEADS}, {"n_kv_heads": 1, "shared_norm": True}),
    "all heads": ({"multi_query": False}, {"n_kv_heads": HEADS, "shared_norm": True}),
    "all heads with biases": (
        {"multi_query": False, "bias": True},
        {"n_kv_heads": HEADS, "shared_norm": True} | BIASES,
    ),
    "sequential": ({"parallel_attn": False}, {"n_kv_heads": 1, "parallel": False}),
    "squared": (LARGE | {"activation": "relu2"}, {"activation": "relu2"}),
    "other sizes": (
        LARGE | {"ffn_hidden_size": FF, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False},
        {"size": FF, "norm_eps": 1e-3, "tied_embeddings": False},
    ),
    "rope": (
        LARGE | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope": RopeConfig(theta=5e5, dim=HEAD_DIM)},
    ),
}


def falcon_names(config: ModelConfig) -> dict[str, str]:
    """Of everything but Q, K and V."""
    two = config.layers[0].parallel and not config.layers[0].shared_norm
    names = {"embed": "transformer.word_embeddings.weight", **norm("final_norm", "transformer.ln_f")}
    names |= norm("layers.{}.attn_norm", "transformer.h.{}." + ("ln_attn" if two else "input_layernorm"))
    if not config.layers[0].shared_norm:
        names |= norm("layers.{}.ffn_norm", "transformer.h.{}." + ("ln_mlp" if two else "post_attention_layernorm"))
    for inner, name in {"o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}.items():
        names[f"layers.{{}}.{inner}"] = f"transformer.h.{{}}.{name}.weight"
        if config.layers[0].ffn.bias:
            names[f"layers.{{}}.{inner}_bias"] = f"transformer.h.{{}}.{name}.bias"
    return names if config.tied_embeddings else names | {"head": "lm_head.weight"}


@pytest.mark.parametrize("case", FALCON_CASES)
def test_falcon(tmp_path: Path, case: str) -> None:
    settings, changes = FALCON_CASES[case]
    model = saved(tmp_path / "falcon", "falcon", **({"activation": "relu"} | settings))
    checkpoint, taken = read(tmp_path / "falcon")
    assert checkpoint.config == changed(FALCON, name="falcon", **changes)
    rest = {name: values for name, values in taken.items() if name.split(".")[-1][0] not in "qkv"}
    same(rest, model, falcon_names(checkpoint.config))
    for layer in range(LAYERS):
        for name, values in own_split(model, layer).items():
            assert np.array_equal(taken[f"layers.{layer}.{name}"], values), f"{case}: {name} of layer {layer}"
            if checkpoint.config.layers[0].attention.qkv_bias:
                bias = own_split(model, layer, bias=True)[name]
                assert np.array_equal(taken[f"layers.{layer}.{name}_bias"], bias[:, 0])


def own_split(model: Any, layer: int, bias: bool = False) -> dict[str, np.ndarray]:
    """Rows of q, k and v by the module's own hand; columns are the answers to unit vectors, or the bias."""
    attention = model.transformer.h[layer].self_attention
    x = torch.zeros(1, 1, D) if bias else torch.eye(D)[None]
    fused = attention.query_key_value
    with torch.no_grad():
        answers = fused(x) if bias or fused.bias is None else fused(x) - fused(torch.zeros_like(x))
        if not bias:
            answers = x @ fused.weight.T  # the same, without the rounding of the subtraction
        parts = attention._split_heads(answers)
    q, k, v = (part[0].numpy() for part in parts)  # [tokens, heads, head_dim]
    if attention.new_decoder_architecture:  # which repeats keys and values for every head of a group
        k, v = (part[:, :: HEADS // KV_HEADS] for part in (k, v))
    return {name: part.reshape(len(part), -1).T for name, part in zip("qkv", (q, k, v), strict=True)}


def test_parts_of_a_fused_tensor_count_once(tmp_path: Path) -> None:
    model = saved(tmp_path / "falcon", "falcon", activation="relu", **LARGE)
    checkpoint = open_checkpoint(tmp_path / "falcon")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert checkpoint.parameters == total and checkpoint.bytes_by_type == {"F32": 4 * total}
    views = checkpoint.take("layers.0.o").data, checkpoint.take("layers.0.k").data
    assert not views[0].flags.owndata and views[1].nbytes == 4 * KV_HEADS * HEAD_DIM * D
    plain = open_checkpoint(tmp_path / "falcon", quantize="q8_0")
    assert plain.fingerprint == checkpoint.fingerprint and plain.take("layers.1.v").type == "Q8_0"


# --- Nemotron

NEMOTRON = changed(
    FALCON,
    architecture="nemotron",
    size=FF,
    rope=RopeConfig(theta=10000.0, dim=HEAD_DIM // 2),
    activation="relu2",
    parallel=False,
    tied_embeddings=False,
)
NEMOTRON_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
    ({"mlp_bias": True, "norm_eps": 1e-4}, {"bias": True, "norm_eps": 1e-4}),
    ({"partial_rotary_factor": 0.75}, {"rope": RopeConfig(theta=10000.0, dim=12)}),
    ({"head_dim": 32, "hidden_act": "relu"}, {"head_dim": 32, "rope": RopeConfig(dim=16), "activation": "relu"}),
    ({"tie_word_embeddings": True}, {"tied_embeddings": True}),
]


@pytest.mark.parametrize(("settings", "changes"), NEMOTRON_CASES)
def test_nemotron(tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any]) -> None:
    sizes = {"num_key_value_heads": KV_HEADS, "intermediate_size": FF}
    model = saved(tmp_path / "nemotron", "nemotron", **(sizes | settings))
    checkpoint, taken = read(tmp_path / "nemotron")
    config = checkpoint.config
    assert config == changed(NEMOTRON, name="nemotron", **changes)
    names = {"embed": "model.embed_tokens.weight"} | norm("final_norm", "model.norm")
    names |= norm("layers.{}.attn_norm", "model.layers.{}.input_layernorm")
    names |= norm("layers.{}.ffn_norm", "model.layers.{}.post_attention_layernorm")
    for inner in ("q", "k", "v", "o", "up", "down"):
        module = f"model.layers.{{}}.{'self_attn' if inner in 'qkvo' else 'mlp'}.{inner}_proj"
        names[f"layers.{{}}.{inner}"] = f"{module}.weight"
        if config.layers[0].ffn.bias if inner in ("up", "down") else config.layers[0].attention.qkv_bias:
            names[f"layers.{{}}.{inner}_bias"] = f"{module}.bias"
    names |= {} if config.tied_embeddings else {"head": "lm_head.weight"}
    with torch.no_grad():  # what the norms multiply with: their weights and one
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter += 1.0
    same(taken, model, names)


# --- the families that look like LLaMA


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_gated_families(tmp_path: Path, kind: str, activation: str) -> None:
    folder = tiny_folder(tmp_path / kind, kind)
    edit_config(folder, hidden_act=activation)
    assert read(folder)[0].config.activations == activation
    assert read(folder)[0].config == changed(open_checkpoint(folder).config, activation=activation, gated=True)


def prosparse(folder: Path, **changes: Any) -> Path:
    """As the published folders are, which bring code of their own."""
    tiny_folder(folder)
    code = {"AutoConfig": "configuration_sparsellama.SparseLlamaConfig"}
    code["AutoModelForCausalLM"] = "modeling_sparsellama.SparseLlamaForCausalLM"
    names = {"architectures": ["SparseLlamaForCausalLM"], "model_type": "sparsellama", "auto_map": code}
    edit_config(folder, **(names | {"hidden_act": "fatrelu", "hidden_act_param": 0.01} | changes))
    return folder


def bamboo(folder: Path, **changes: Any) -> Path:
    """As the published folders are."""
    tiny_folder(folder, "mistral", tied=False)
    code = {"AutoConfig": "configuration_bamboo.BambooConfig", "AutoModel": "modeling_bamboo.BambooForCausalLM"}
    code["AutoModelForCausalLM"] = "modeling_bamboo.BambooForCausalLM"
    names = {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "auto_map": code}
    edit_config(folder, **(names | {"hidden_act": "relu", "sliding_window": 4096, "head_dim": ...} | changes))
    return folder


def test_prosparse(tmp_path: Path) -> None:
    checkpoint, taken = read(prosparse(tmp_path / "p"))
    config = checkpoint.config
    assert (config.activations, config.layers[0].ffn.threshold, config.architecture) == ("fatrelu", 0.01, "sparsellama")
    assert config.layers[0].attention.window is None and config.layers[0].ffn.gated and config.norm == "rms"
    assert all(np.array_equal(taken[name], values) for name, values in weights("llama").items())
    relu = read(prosparse(tmp_path / "r", hidden_act="relu"))[0].config
    assert (relu.activations, relu.layers[0].ffn.threshold) == ("relu", 0.0)
    grouped = read(prosparse(tmp_path / "k", num_key_value_heads=KV_HEADS, mlp_bias=False))[0].config
    assert grouped.layers[0].attention.n_kv_heads == KV_HEADS


def test_bamboo(tmp_path: Path) -> None:
    checkpoint, taken = read(bamboo(tmp_path / "b"))
    config = checkpoint.config
    assert (config.activations, config.layers[0].attention.window, config.architecture) == ("drelu", 4096, "bamboo")
    assert config.layers[0].ffn.gated and checkpoint.predictor_threshold is None and checkpoint.notes == []
    assert all(np.array_equal(taken[name], values) for name, values in weights("mistral", False).items())
    # what its class takes for a missing key: 8 heads, here of 4 dimensions, and a window
    changes = {"num_key_value_heads": ..., "sliding_window": ...}
    config = read(bamboo(tmp_path / "kv", num_attention_heads=16, **changes))[0].config
    attention = config.layers[0].attention
    assert (attention.n_kv_heads, attention.head_dim, attention.window) == (8, 4, 4096)


def test_predictors_of_turbosparse(tmp_path: Path) -> None:
    folder = bamboo(tmp_path / "turbo")
    stored = as_stored(weights("mistral", False))
    rng = np.random.default_rng(0)
    added = {}
    for layer, rank in enumerate(PREDICTOR_RANKS):
        for name, shape in (("fc1", (rank, D)), ("fc2", (FF, rank))):
            values = rng.standard_normal(shape).astype(np.float32)
            added[f"model.layers.{layer}.mlp.predictor.{name}.weight"] = values
    stored |= {name: ("F32", values.shape, values.tobytes()) for name, values in added.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    checkpoint, _ = read(folder)  # where nobody takes them, and finish() does not mind
    assert checkpoint.predictor_threshold == 0.0
    assert checkpoint.parameters == sum(values.size for values in weights("mistral", False).values())
    assert checkpoint.notes == ["the files include predictors, with threshold 0"]
    for layer in range(LAYERS):
        for ours, theirs in (("in", "fc1"), ("out", "fc2")):
            taken = checkpoint.take(f"layers.{layer}.predictor_{ours}").float32()
            assert np.array_equal(taken, added[f"model.layers.{layer}.mlp.predictor.{theirs}.weight"])
    del stored["model.layers.1.mlp.predictor.fc2.weight"]
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    refused(folder, r"layers\.1\.mlp\.predictor\.fc2\.weight is missing")


# --- what is left out means what `transformers` takes it for

DEFAULTS: list[tuple[str, dict[str, Any]]] = [
    ("opt", {"ffn_dim": FF}),
    ("opt", {"ffn_dim": FF, "word_embed_proj_dim": None}),
    ("falcon", {"activation": "relu"}),
    ("falcon", {"activation": "relu", "num_kv_heads": 2, "new_decoder_architecture": True, "multi_query": None}),
    ("falcon", {"activation": "relu", "multi_query": None, "parallel_attn": None, "bias": None, "alibi": None}),
    ("nemotron", {"intermediate_size": FF, "num_key_value_heads": 2}),
    ("nemotron", {"intermediate_size": FF, "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 5e4}}),
    (
        "nemotron",
        {
            "intermediate_size": FF,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
        },
    ),
]


@pytest.mark.parametrize(("kind", "settings"), DEFAULTS)
def test_defaults_are_those_of_transformers(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    from powerinfer.formats.folder_config import read_config

    raw = {name: value for name, value in SIZES.items() if value is not None} | settings
    raw["architectures"] = [{"opt": "OPT"}.get(kind, kind.capitalize()) + "ForCausalLM"]
    ours = read_config(json.loads(json.dumps(raw)), tmp_path)
    config = transformers.CONFIG_MAPPING[kind](**json.loads(json.dumps(raw)))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert ours.tied_embeddings == config.tie_word_embeddings
    sizes = sum(int(np.prod(shape)) for _, shape in layout.shapes(ours))
    assert sizes == sum(parameter.numel() for parameter in theirs.parameters())
    epsilons = {module.eps for module in theirs.modules() if isinstance(module, torch.nn.LayerNorm)}
    assert epsilons == {ours.norm_eps}
    if kind != "opt":
        frequencies = theirs.base_model.rotary_emb.inv_freq
        (rope,) = ours.ropes
        assert len(frequencies) == rope.dim // 2
        assert config.rope_parameters["rope_theta"] == rope.theta
        assert config.rope_parameters.get("factor", 1.0) == rope.factor


def test_a_missing_key_of_gemma_means_what_it_means_in_transformers(tmp_path: Path) -> None:
    from powerinfer.formats.folder_config import read_config

    ours, theirs = read_config({"architectures": ["Gemma3ForCausalLM"]}, tmp_path), transformers.Gemma3TextConfig()
    assert (ours.n_layers, ours.d_model) == (theirs.num_hidden_layers, theirs.hidden_size)
    heads = {(layer.attention.n_heads, layer.attention.n_kv_heads, layer.attention.head_dim) for layer in ours.layers}
    assert heads == {(theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)}
    assert set(ours.ffn_sizes) == {theirs.intermediate_size} and ours.norm_eps == theirs.rms_norm_eps
    assert (ours.vocab_size, ours.context_length) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert theirs.hidden_activation == "gelu_pytorch_tanh" and ours.activations == "gelu_tanh"
    windows = {"full_attention": None, "sliding_attention": theirs.sliding_window}
    assert [layer.attention.window for layer in ours.layers] == [windows[kind] for kind in theirs.layer_types]


# --- what is refused

OPT_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation_function": "gelu"}, "activation_function is 'gelu'; of this family only relu"),
    "squared": ({"activation_function": "relu2"}, "activation_function is 'relu2'"),
    "norms without weights": ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is 'False'"),
    "another head_dim": ({"head_dim": 8}, "head_dim is '8'"),
    "positions": ({"max_position_embeddings": 127}, r"embed_positions\.weight has shape"),
    "embedding": ({"word_embed_proj_dim": 32}, r"embed_tokens\.weight has shape"),
    "order": ({"do_layer_norm_before": False}, "does not have: 'model.decoder.final_layer_norm"),
    "biases": ({"enable_bias": False}, "does not have"),
    "width": ({"word_embed_proj_dim": 0}, "word_embed_proj_dim is '0'"),
}
FALCON_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "the original activation": ({"activation": "gelu"}, "activation is 'gelu'; of this family only relu, relu2"),
    "no activation": ({"activation": ...}, "activation is 'gelu'"),
    "alibi": ({"alibi": True}, "ALiBi"),
    "the older class": ({"architectures": ["RWForCausalLM"]}, "RWForCausalLM.* is not supported"),
    "sequential and new": ({"parallel_attn": False}, "parallel_attn is false"),
    "three norms": ({"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is '3'"),
    "two norms and old": ({"new_decoder_architecture": False, "num_ln_in_parallel_attn": 2}, "goes with new_decoder"),
    "key-value heads": (
        {"new_decoder_architecture": False, "multi_query": False, "num_ln_in_parallel_attn": 1},
        "num_kv_heads is 2, but without multi_query there are 4",
    ),
    "uneven groups": ({"num_kv_heads": 3}, "evenly"),
    "other groups": ({"num_kv_heads": 4}, r"query_key_value\.weight has shape \[128, 64\], not \[192, 64\]"),
    "n_embed": ({"n_embed": 128}, "n_embed is '128'"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is '0.5'"),
    "one norm": ({"num_ln_in_parallel_attn": 1}, r"input_layernorm\.weight is missing"),
    "head": ({"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
    "strange code": (
        {"auto_map": {"AutoModelForCausalLM": "modeling_falcon.OtherForCausalLM"}},
        "names code of the folder's own, which is never run",
    ),
}
NEMOTRON_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "silu"}, "hidden_act is 'silu'; of this family only relu, relu2"),
    "no key-value heads": ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
    "odd rotation": ({"rope_parameters": {"partial_rotary_factor": 0.6}}, "9 of a head's 16 dimensions cannot be"),
    "no rotation": ({"rope_parameters": {"partial_rotary_factor": 0.0}}, "0 of a head's 16 dimensions cannot be"),
    "rotation": ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is '1.5'"),
    "rope": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic', which is not supported"),
    "biases": ({"mlp_bias": True}, r"up_proj\.bias is missing"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    saved(base / "opt", "opt", ffn_dim=FF, word_embed_proj_dim=D)
    saved(base / "falcon", "falcon", activation="relu", **LARGE)
    saved(base / "nemotron", "nemotron", num_key_value_heads=KV_HEADS, intermediate_size=FF)
    return {path.name: path for path in base.iterdir()}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("opt", case) for case in OPT_REFUSED),
        *(("falcon", case) for case in FALCON_REFUSED),
        *(("nemotron", case) for case in NEMOTRON_REFUSED),
    ],
)
def test_settings_that_are_refused(folders: dict[str, Path], kind: str, case: str) -> None:
    changes, message = {"opt": OPT_REFUSED, "falcon": FALCON_REFUSED, "nemotron": NEMOTRON_REFUSED}[kind][case]
    folder = folders[kind]
    original = (folder / "config.json").read_text()
    edit_config(folder, **changes)
    try:
        refused(folder, message)
    finally:
        (folder / "config.json").write_text(original)


HUNYUAN: dict[str, Any] = {
    "model_type": "hunyuan_v1_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "num_experts": 4, "moe_topk": [2, 2],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shared_expert": [2, 2]}, "num_shared_expert is not 1"),
        ({"moe_intermediate_size": [48, 48]}, "moe_intermediate_size is not intermediate_size, 96"),
        ({"moe_topk": [2, 1]}, "moe_topk is"),
        ({"use_cla": True}, "use_cla is 'True'"),
        ({"use_qk_norm": False}, "use_qk_norm is 'False'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic', which is not supported"),
    ],
)
def test_settings_of_hunyuan(changes: dict[str, Any], message: str) -> None:
    from powerinfer.formats.folder_config import read_config

    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    config = read_config(HUNYUAN | {"rope_scaling": scaling}, Path("hunyuan"))
    (rope,) = config.ropes
    assert rope.theta == pytest.approx(10000 * 1000 ** (16 / 14)) and rope.scaling is None
    with pytest.raises(ModelError, match=message):
        read_config(HUNYUAN | changes, Path("hunyuan"))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (prosparse, {"hidden_act": "shifted_relu"}, "hidden_act is 'shifted_relu'; of this family only fatrelu, relu"),
        (prosparse, {"hidden_act": ...}, "hidden_act is missing"),
        (prosparse, {"hidden_act_param": ...}, "hidden_act_param is missing"),
        (prosparse, {"hidden_act_param": -0.5}, "hidden_act_param is '-0.5'"),
        (prosparse, {"hidden_act_param": "0.01"}, "hidden_act_param is '0.01', not a number"),
        (prosparse, {"model_type": "llama"}, "model_type is 'llama', which does not go with SparseLlamaForCausalLM"),
        (prosparse, {"auto_map": {"AutoModelForCausalLM": "evil.LlamaForCausalLM"}}, "never run"),
        (prosparse, {"auto_map": {"AutoModelForCausalLM": ["a", "SparseLlamaForCausalLM"]}}, "never run"),
        (prosparse, {"auto_map": "modeling_sparsellama.SparseLlamaForCausalLM"}, "never run"),
        (prosparse, {"head_dim": 8}, "head_dim is '8'"),
        (bamboo, {"hidden_act": "silu"}, "hidden_act is 'silu'; of this family only relu"),
        (bamboo, {"hidden_act": ...}, "hidden_act is 'silu'"),
        (bamboo, {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "never run"),
        (bamboo, {"num_key_value_heads": None}, "has shape"),
    ],
)
def test_folders_with_code_of_their_own(tmp_path: Path, make: Any, changes: dict[str, Any], message: str) -> None:
    folder = make(tmp_path / "folder")
    edit_config(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "silu_and_mul", "relu6", "leaky_relu"])
def test_other_activations_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    edit_config(folder, hidden_act=name)
    known = "silu, swish, relu, relu2, fatrelu, drelu, cats, topk"
    refused(folder, f"hidden_act is '{name}'; of this family only {known} is supported")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers is"),
        ({"no_rope_layers": [1]}, "not 0 or 1 for every layer"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is '0'"),
        ({"use_sliding_window": True}, "use_sliding_window is"),
    ],
)
def test_positions_of_smollm3(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """As published, and where nothing is stated, every fourth layer has none."""
    settings = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
    for stated in ({}, {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4, "use_sliding_window": False}):
        layers = folder_config.read_config(settings | stated, tmp_path).layers
        assert [layer.attention.rope is None for layer in layers] == [False, False, False, True]
        assert layers[0].attention.rope is not None and layers[0].attention.rope.theta == 2e6
    with pytest.raises(ModelError, match=message):
        folder_config.read_config(settings | changes, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "gelu"}, "activation 'gelu' is unknown"),
        ({"activation": "drelu", "gated": False}, "drelu needs a gated FFN"),
        ({"threshold": 0.5}, "activation relu with threshold 0.5"),
        ({"activation": "fatrelu", "threshold": -0.5}, "threshold -0.5"),
        ({"activation": "cats", "product_thresholds": True}, "product thresholds, which only gated fatrelu and cats"),
        ({"activation": "cats", "thresholds": True, "product_thresholds": True}, "product thresholds, which only"),
        ({"norm": "batch"}, "norm 'batch'"),
        ({"norms": "between"}, "norms in order 'between' are unknown"),
        ({"qk_norm": "both"}, "of q and k 'both' are unknown"),
        ({"norms": "post", "parallel": False}, "neither a final norm"),
        ({"norms": "post", "final_norm": False}, "nor a parallel FFN"),
        ({"parallel": False, "shared_norm": True}, "needs them to be parallel"),
        ({"positions": "alibi"}, "positions 'alibi'"),
        ({"position_offset": 2}, "offset 2"),
        ({"rope": RopeConfig(dim=HEAD_DIM + 2)}, "18 of a head's 16 dimensions"),
        ({"rope": RopeConfig(dim=7)}, "7 of a head's 16 dimensions"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    layout.check(FALCON, "x")
    with pytest.raises(ModelError, match=message):
        layout.check(changed(FALCON, **changes), "x")


# --- GGUF

GGUF_BASE = changed(
    NEMOTRON,
    name="Tiny",
    rope=RopeConfig(theta=20000.0, dim=HEAD_DIM),
    norm_eps=float(np.float32(1e-5)),
    activation="relu",
)
GGUF_CONFIGS = {
    "nemotron": changed(GGUF_BASE, activation="relu2", rope=RopeConfig(theta=20000.0, dim=HEAD_DIM // 2)),
    "falcon": changed(GGUF_BASE, architecture="falcon", parallel=True, shared_norm=True),
    "opt": changed(OPT, name="Tiny"),
    "bamboo": changed(
        GGUF_BASE,
        architecture="bamboo",
        gated=True,
        norm="rms",
        activation="drelu",
        rope=RopeConfig(theta=20000.0, dim=HEAD_DIM, interleaved=True),
    ),
}


@pytest.mark.parametrize(("architecture", "two_norms"), [(n, False) for n in GGUF_CONFIGS] + [("falcon", True)])
def test_gguf_files(tmp_path: Path, architecture: str, two_norms: bool) -> None:
    checkpoint, taken = read(family_gguf(architecture, two_norms).write(tmp_path / "m.gguf"))
    assert checkpoint.config == changed(
        GGUF_CONFIGS[architecture], shared_norm=architecture == "falcon" and not two_norms
    )
    expected = family_weights(architecture, two_norms)
    assert taken.keys() == expected.keys() and checkpoint.notes == [] and checkpoint.predictor_threshold is None
    for name, values in expected.items():
        assert np.array_equal(taken[name], values), name


def converted(model: Any, architecture: str, path: Path) -> Path:
    """The model as llama.cpp's converter writes it, under the names of the gguf library."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "falcon":
        kv = config.num_kv_heads if config.new_decoder_architecture else 1
        writer.add_tensor_data_layout("jploski")
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_string("falcon.hidden_act", "relu")  # which is not llama.cpp's
    else:
        kv = config.num_key_value_heads
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_eps(config.norm_eps)
        writer.add_vocab_size(config.vocab_size)
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(share * config.hidden_size) // config.num_attention_heads)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_head_count_kv(kv)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "query_key_value" in name:
            groups = values.view(kv, HEADS // kv + 2, HEAD_DIM, D)
            values = torch.cat([part.reshape(-1, D) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])])
        if architecture == "nemotron" and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("falcon", {"activation": "relu", **LARGE}),
        ("falcon", {"activation": "relu", "num_kv_heads": HEADS, "tie_word_embeddings": False}),
        ("nemotron", {"num_key_value_heads": KV_HEADS, "intermediate_size": FF, "attention_bias": True}),
        ("nemotron", {"num_key_value_heads": HEADS, "intermediate_size": FF, "mlp_bias": True}),
    ],
)
def test_converted_models_are_the_same(tmp_path: Path, architecture: str, settings: dict[str, Any]) -> None:
    model = saved(tmp_path / "folder", architecture, **settings)
    folder, expected = read(tmp_path / "folder")
    checkpoint, taken = read(converted(model, architecture, tmp_path / "m.gguf"))
    epsilon = float(np.float32(folder.config.norm_eps))
    assert checkpoint.config == replace(folder.config, name="", norm_eps=epsilon)
    assert taken.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(taken[name], values), name


def put(key: str, kind: int, value: Any) -> Any:
    return lambda builder: builder.put(key, kind, value)


def test_gguf_files_say_their_activation(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def activation(architecture: str, *entries: tuple[str, int, Any]) -> tuple[str, float]:
        builder = family_gguf(architecture)
        for key, kind, value in entries:
            builder.put(f"{architecture}.{key}", kind, value)
        config = open_checkpoint(builder.write(path)).config
        return config.activations, config.layers[0].ffn.threshold

    for name in ("silu", "relu", "relu2", "drelu"):
        assert activation("llama", ("hidden_act", STRING, name)) == (name, 0.0)
    fatrelu = ("hidden_act", STRING, "fatrelu")
    assert activation("qwen2", fatrelu, ("hidden_act_param", F32, 0.5)) == ("fatrelu", 0.5)
    assert activation("opt") == ("relu", 0.0)
    assert activation("nemotron", ("hidden_act", STRING, "relu")) == ("relu", 0.0)
    assert activation("falcon", ("hidden_act", STRING, "relu2")) == ("relu2", 0.0)


LIMITS = np.linspace(0, 1, FF, dtype=np.float32)


def limit(
    builder: Builder, activation: str, limits: np.ndarray, layers: int = LAYERS, products: bool = False
) -> Builder:
    """With a threshold for each neuron, and perhaps one for its product."""
    return give_limits(builder, limits, layers, products).put("llama.hidden_act", STRING, activation)


def test_thresholds_of_neurons(tmp_path: Path) -> None:
    plain = open_checkpoint(family_gguf("llama").write(tmp_path / "plain.gguf"))
    for activation, products in (("fatrelu", False), ("cats", True)):
        builder = limit(family_gguf("llama"), activation, LIMITS, products=products)
        checkpoint, taken = read(builder.write(tmp_path / "m.gguf"))
        own = {"thresholds": True, "product_thresholds": products}
        assert checkpoint.config == changed(plain.config, activation=activation, **own)
        for layer in range(LAYERS):
            assert np.array_equal(taken[f"layers.{layer}.threshold"], LIMITS)
            assert not products or np.array_equal(taken[f"layers.{layer}.product_threshold"], 16 * LIMITS)
    other = limit(family_gguf("llama"), activation, LIMITS / 2).write(tmp_path / "other.gguf")
    assert open_checkpoint(other).fingerprint != checkpoint.fingerprint
    of_experts = limit(experts_gguf(), "cats", LIMITS).write(tmp_path / "experts.gguf")
    refused(of_experts, "has thresholds of single neurons, which models of experts cannot have")
    assert "thresholds" not in repr(checkpoint.config)  # so models without them keep their fingerprints


@pytest.mark.parametrize("value", [-1e-30, math.nan, math.inf])
def test_damaged_thresholds_are_refused(tmp_path: Path, value: float) -> None:
    limits = LIMITS.copy()
    limits[-1] = value
    builder = limit(family_gguf("llama"), "cats", limits, products=True)
    checkpoint = open_checkpoint(builder.write(tmp_path / "m.gguf"))
    for name in ("threshold", "product_threshold"):
        with pytest.raises(
            ModelError, match=rf"m\.gguf: tensor layers\.0\.{name} holds values that are negative or no n"
        ):
            checkpoint.take(f"layers.0.{name}")


def test_folders_with_thresholds_of_neurons(tmp_path: Path) -> None:
    """In a folder they are parameters of the MLPs, and config.json states none."""
    folder = tiny_folder(tmp_path / "tiny")
    path = folder / "model.safetensors"
    plain = as_stored(weights("llama", True))
    own = {f"model.layers.{layer}.mlp.threshold": ("F32", (FF,), LIMITS.tobytes()) for layer in range(LAYERS)}
    path.write_bytes(safetensors_bytes(plain | own))
    edit_config(folder, hidden_act="cats")
    checkpoint, taken = read(folder)
    assert all(layer.neurons.thresholds for layer in checkpoint.config.layers)
    assert np.array_equal(taken["layers.1.threshold"], LIMITS)
    of_products = {name.replace("threshold", "product_threshold"): one for name, one in own.items()}
    path.write_bytes(safetensors_bytes(plain | own | of_products))
    both, taken = read(folder)
    assert both.config == changed(checkpoint.config, product_thresholds=True)
    assert np.array_equal(taken["layers.1.product_threshold"], LIMITS)
    path.write_bytes(safetensors_bytes(plain | of_products))
    refused(folder, "hidden_act_param is missing, and the folder has no thresholds of neurons")
    path.write_bytes(safetensors_bytes(plain | own | dict(list(of_products.items())[:1])))
    refused(folder, r"tensor model\.layers\.1\.mlp\.product_threshold\.weight is missing")
    path.write_bytes(safetensors_bytes(plain | own))
    for changes in ({"hidden_act_param": 0.5}, {"hidden_act": "silu", "hidden_act_param": ...}):
        edit_config(folder, **changes)
        refused(
            folder, r"has thresholds of single neurons \('model\.layers\.0\.mlp\.threshold'\), which go neither with"
        )
    path.write_bytes(safetensors_bytes(plain | dict(list(own.items())[:1])))
    edit_config(folder, hidden_act="cats")
    refused(folder, r"tensor model\.layers\.1\.mlp\.threshold\.weight is missing")
    path.write_bytes(safetensors_bytes(plain))
    refused(folder, r"config\.json: hidden_act_param is missing, and the folder has no thresholds of neurons")


def test_gguf_files_state_the_context_of_opt_in_two_ways(tmp_path: Path) -> None:
    plain = open_checkpoint(family_gguf("opt").write(tmp_path / "m.gguf")).config
    assert plain.context_length == 128
    other = family_gguf("opt").put("opt.context_length", U32, 128)
    assert open_checkpoint(other.write(tmp_path / "m.gguf")).config == plain


def test_fused_matrices_of_other_gguf_files(tmp_path: Path) -> None:
    builder = family_gguf("nemotron")
    values = family_weights("nemotron")
    builder.tensors = [
        tensor for tensor in builder.tensors if tensor.name.split(".")[-2] not in ("attn_q", "attn_k", "attn_v")
    ]
    for layer in range(LAYERS):
        rows = np.concatenate([values[f"layers.{layer}.{part}"] for part in "qkv"])
        builder.tensor(f"blk.{layer}.attn_qkv.weight", rows)
    _, taken = read(builder.write(tmp_path / "m.gguf"))
    assert all(np.array_equal(taken[name], array) for name, array in values.items())
    builder.tensor("blk.0.attn_q.bias", np.zeros(HEADS * HEAD_DIM, np.float32))
    refused(builder.write(tmp_path / "m.gguf"), r"blk\.0\.attn_qkv\.bias is missing")


def without(*names: str) -> Any:
    def change(builder: Builder) -> None:
        builder.tensors = [tensor for tensor in builder.tensors if tensor.name not in names]

    return change


GGUF_REFUSED: dict[str, tuple[str, Any, str]] = {
    "falcon of old": (
        "falcon",
        lambda b: b.drop("falcon.hidden_act"),
        "hidden_act is missing, which means gelu; only relu",
    ),
    "gelu": ("falcon", put("falcon.hidden_act", STRING, "gelu"), "hidden_act is 'gelu'; only relu, relu2"),
    "gated activation": ("opt", put("opt.hidden_act", STRING, "drelu"), "hidden_act is 'drelu'"),
    "no threshold": ("llama", put("llama.hidden_act", STRING, "fatrelu"), "hidden_act_param is missing"),
    "a threshold for nothing": ("llama", put("llama.hidden_act_param", F32, 0.5), "hidden_act_param is set"),
    "thresholds of relu": ("llama", lambda b: limit(b, "relu", LIMITS), "relu has no thresholds of neurons"),
    "thresholds of a layer": (
        "llama",
        lambda b: limit(b, "cats", LIMITS, 1),
        r"blk\.1\.ffn_threshold\.weight is missing",
    ),
    "product thresholds of a layer": (
        "llama",
        lambda b: without("blk.1.ffn_product_threshold.weight")(limit(b, "cats", LIMITS, products=True)),
        r"blk\.1\.ffn_product_threshold\.weight is missing",
    ),
    "few thresholds": ("llama", lambda b: limit(b, "cats", LIMITS[1:]), rf"has shape \[{FF - 1}\], not \[{FF}\]"),
    "two kinds of thresholds": (
        "llama",
        lambda b: limit(b, "cats", LIMITS).put("llama.hidden_act_param", F32, 0.5),
        "hidden_act_param is set, but the file has a threshold for each neuron",
    ),
    "products without thresholds of gates": (
        "llama",
        lambda b: without(*(f"blk.{layer}.ffn_threshold.weight" for layer in range(LAYERS)))(
            limit(b, "cats", LIMITS, products=True).put("llama.hidden_act_param", F32, 0.5)
        ),
        "product thresholds, which only gated fatrelu and cats with thresholds of neurons have",
    ),
    "partial rotation": ("falcon", put("falcon.rope.dimension_count", U32, 8), "dimension_count is '8'"),
    "odd rotation": ("nemotron", put("nemotron.rope.dimension_count", U32, 7), "7 of a head's 16"),
    "rotation": ("nemotron", put("nemotron.rope.dimension_count", U32, 18), "dimension_count is '18'"),
    "epsilon": ("nemotron", lambda b: b.drop("nemotron.attention.layer_norm_epsilon"), "layer_norm_epsilon is missing"),
    "rope of opt": ("opt", put("opt.rope.freq_base", F32, 1e4), "rope.freq_base is set"),
    "no positions": ("opt", without("position_embd.weight"), "position_embd.weight is missing"),
    "context": ("opt", put("opt.context_length", U32, 129), "context_length is 129, but position_embd.weight has 130"),
    "one of two norms": ("falcon", without("blk.0.attn_norm.bias"), r"blk\.0\.attn_norm\.bias is missing"),
    "no qkv": ("falcon", without("blk.0.attn_qkv.weight"), r"blk\.0\.attn_q\.weight is missing"),
    "a gate": ("opt", lambda b: b.tensor("blk.0.ffn_gate.weight", np.zeros((FF, D), np.float32)), "does not have"),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_gguf_files_that_are_refused(tmp_path: Path, case: str) -> None:
    architecture, change, message = GGUF_REFUSED[case]
    builder = family_gguf(architecture)
    change(builder)
    refused(builder.write(tmp_path / "m.gguf"), message)


def test_a_fused_bias_in_blocks_is_refused(tmp_path: Path) -> None:
    builder = family_gguf("falcon")
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for layer in range(LAYERS):
        builder.tensor(f"blk.{layer}.attn_qkv.bias", np.zeros(rows // 32 * 34, np.uint8), type_id=8, dims=[rows])
    refused(builder.write(tmp_path / "m.gguf"), "has type Q8_0, in which it cannot be cut")
