"""Files as other writers make them: today's and older versions of llama.cpp's converter and of Ollama in GGUF, and what
folders have beside what a family's class asks for. Right is what `transformers` makes of the folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import (
    FF,
    HEAD_DIM,
    LAYERS,
    Builder,
    D,
    as_stored,
    delta_gguf,
    edit_config,
    experts_gguf,
    family_gguf,
    latent_gguf,
    safetensors_bytes,
    tiny_config,
    tiny_folder,
    tiny_gguf,
    weights,
)

from benchmarks.models.gguf_writer import U32
from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.devices.batch import Batch
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.folder_config import read_config
from powerinfer.formats.quant import dequantize, nvfp4_as_q8_0, quantize
from powerinfer.models import load

WINDOW = {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]}


def opened(builder: Builder, tmp_path: Path) -> Any:
    return open_checkpoint(builder.write(tmp_path / f"m{len(list(tmp_path.iterdir()))}.gguf"))


def with_keys(builder: Builder, architecture: str, keys: dict[str, Any]) -> Builder:
    for key in keys:
        builder.drop(f"{architecture}.{key}")
    return builder.fields(keys, f"{architecture}.")


# --- keys of GGUF files


BUILDERS: dict[str, Callable[[], Builder]] = {
    "llama": tiny_gguf,
    "mixtral": experts_gguf,
    "qwen2": lambda: tiny_gguf("qwen2", biases="qkv"),
    "qwen35": delta_gguf,
    "nemotron": lambda: family_gguf("nemotron"),
    "deepseek2": lambda: latent_gguf(older=False),
}


def architecture_of(builder: Builder) -> str:
    return str(next(value for key, _, value in builder.entries if key == "general.architecture"))


@pytest.mark.parametrize("model", BUILDERS)
@pytest.mark.parametrize(
    "key",
    [
        "use_parallel_residual", "rope.mrope_interleaved", "rope.mrope_section", "mrope_sections",
        "mm.tokens_per_image", "vision.block_count", "vision.attention.layer_norm_epsilon", "spatial_merge_size",
        "max_position_embeddings",
        "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "tensor_data_layout",
        "rope.scaling.original_context_length", "rope.scaling.type", "attn_logit_softcapping", "pooling_type",
        "attention.clamp_kqv", "expert_group_count", "expert_shared_feed_forward_length",
    ],
)  # fmt: skip
def test_keys_of_writers_base_classes_change_nothing(tmp_path: Path, model: str, key: str) -> None:
    values = {
        "rope.mrope_section": [4, 2, 2], "mrope_sections": [4, 2, 2], "mm.tokens_per_image": 256,
        "vision.block_count": 27, "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
        "vision.attention.layer_norm_epsilon": 1e-6, "tensor_data_layout": "Meta AI original pth",
        "rope.scaling.original_context_length": 0, "rope.scaling.type": "", "attn_logit_softcapping": 0.0,
        "pooling_type": 0, "attention.clamp_kqv": 0.0, "expert_group_count": 1,
        "expert_shared_feed_forward_length": 512, "spatial_merge_size": 2,
        "max_position_embeddings": 64,
    }  # fmt: skip
    plain = opened(BUILDERS[model](), tmp_path)
    builder = BUILDERS[model]()
    architecture = architecture_of(builder)
    found = opened(with_keys(builder, architecture, {key: values.get(key, True)}), tmp_path)
    assert found.config == plain.config and found.notes == plain.notes
    assert not set(found.unread) - {*plain.unread, f"{architecture}.{key}"}


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("llama", {"attention.head_dim": HEAD_DIM}),
        ("mixtral", {"norm_top_k_prob": True}),
        ("qwen35", {"ssm.v_head_reordered": True}),
        ("llama", {"rope.freq_base_swa": 20000.0}),
    ],
)
def test_keys_that_say_again_what_others_do(tmp_path: Path, model: str, keys: dict[str, Any]) -> None:
    plain = opened(BUILDERS[model](), tmp_path)
    architecture = architecture_of(BUILDERS[model]())
    assert opened(with_keys(BUILDERS[model](), architecture, keys), tmp_path).config == plain.config
    for key, value in keys.items():
        other = not value if value is True else value + 1
        builder = with_keys(BUILDERS[model](), architecture, {key: other})
        if key == "ssm.v_head_reordered":
            kinds = opened(builder, tmp_path).config.states.values()
            assert kinds and not any(kind.tiled for kind in kinds)
        else:
            with pytest.raises(ModelError, match=f"{architecture}.{key} is '{other}'"):
                opened(builder, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_logit_softcapping", 30.0), ("logit_scale", 0.5), ("vision_model", 1), ("attention.clamp_kqv", 8.0)],
)
def test_keys_that_ask_for_something_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"llama.{key} is "):
        opened(with_keys(tiny_gguf(), "llama", {key: value}), tmp_path)


def test_what_nothing_reads_is_listed(tmp_path: Path) -> None:
    builder = tiny_gguf().fields({"vision.block_count": 2, "use_parallel_residual": True}, "llama.")
    builder.fields({"clip.has_vision_encoder": True, "general.license": "mit", "split.count": 1})
    expected = ["clip.has_vision_encoder", "llama.use_parallel_residual", "llama.vision.block_count"]
    assert sorted(opened(builder, tmp_path).unread) == expected
    assert opened(tiny_gguf(), tmp_path).unread == []


def test_what_reads_pictures_is_left_out(tmp_path: Path) -> None:
    plain, builder = opened(tiny_gguf(), tmp_path), tiny_gguf()
    for name in ("v.patch_embed.weight", "v.blk.0.attn_q.weight", "mm.mm_input_projection.weight", "a.conv1d.0.weight"):
        builder.tensor(name, np.zeros((4, 4), np.float32))
    found = opened(builder.fields({"vision.block_count": 1}, "llama."), tmp_path)
    assert found.notes == ["only text is read: the part for pictures is left out"]
    assert list(found.names()) == list(plain.names()) and found.config == plain.config


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
OWN = 1 + 0.1 * math.log(4)


@pytest.mark.parametrize(
    ("keys", "gain", "note"),
    [
        ({"yarn_attn_factor": OWN}, None, ""),
        ({"yarn_attn_factor": -1.0}, None, ""),
        ({"yarn_attn_factor": 1.0}, None, ""),
        ({"yarn_attn_factor": 1 / OWN}, None, "yarn_attn_factor 0.878249 is not applied to YaRN's 1.139"),
        ({"yarn_attn_factor": 1.5}, 1.5, "yarn_attn_factor 1.5 replaces YaRN's 1.139"),
        ({"yarn_ext_factor": 1.0, "extrapolation_factor": 1.0}, None, ""),
        ({"yarn_ext_factor": 0.5}, None, "yarn_ext_factor of YaRN is not applied"),
        ({"attn_factor": 0.5}, 0.5 * OWN, ""),
    ],
)
def test_factors_of_yarn(tmp_path: Path, keys: dict[str, float], gain: float | None, note: str) -> None:
    builder = tiny_gguf().fields(YARN, "llama.").fields(keys, "llama.rope.scaling.")
    found = opened(builder, tmp_path)
    (rope,) = found.config.ropes
    assert rope.scaling == "yarn" and rope.attention_factor == (None if gain is None else pytest.approx(gain))
    assert [one.partition(", as")[0] for one in found.notes] == ([note] if note else [])


def test_betas_of_yarn_as_ollama_calls_them(tmp_path: Path) -> None:
    builder = tiny_gguf().fields(YARN, "llama.").fields({"beta_fast": 16.0, "beta_slow": 2.0}, "llama.rope.scaling.")
    (rope,) = opened(builder, tmp_path).config.ropes
    assert (rope.beta_fast, rope.beta_slow) == (16, 2)


def test_local_base_as_ollama_calls_it(tmp_path: Path) -> None:
    def gemma() -> Builder:
        builder = tiny_gguf("gemma3").fields({"attention.sliding_window": 8}, "gemma3.")
        norms = ("post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm")
        for layer in range(LAYERS):
            for name in norms:
                builder.tensor(f"blk.{layer}.{name}.weight", np.ones(HEAD_DIM if "attn_" in name else D, np.float32))
        return builder

    bases = {rope.theta for rope in opened(gemma(), tmp_path).config.ropes}
    assert bases == {10000.0}
    builder = gemma().fields({"rope.local.freq_base": 5000.0}, "gemma3.")
    assert {rope.theta for rope in opened(builder, tmp_path).config.ropes} == {5000.0}


# --- tensors of GGUF files


def nvfp4(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random blocks with scales such as writers have: the largest is near 448."""
    blocks = rng.integers(0, 256, (math.prod(shape) // 64, 36), dtype=np.uint8)
    blocks[:, :4] = rng.integers(0x60, 0x7F, (len(blocks), 4))
    return blocks.reshape(*shape[:-1], -1)


Scaled = dict[str, tuple[np.ndarray, np.ndarray]]


def with_nvfp4(builder: Builder, spelling: str = "scale", *, count: int = 0) -> Scaled:
    """Give the matrices of FFNs blocks of NVFP4 and factors of their own; what they are: name -> (blocks, factors)."""
    rng, found = np.random.default_rng(4), {}
    for tensor in list(builder.tensors):
        stem = tensor.name.removesuffix(".weight")
        if not any(f".ffn_{part}" in stem for part in ("gate", "up", "down")) or stem.endswith("_inp"):
            continue
        shape = tuple(reversed(tensor.dims))
        blocks = nvfp4(rng, *shape)
        factors = rng.uniform(2e-5, 4e-5, count or math.prod(shape[:-2])).astype(np.float32)
        tensor.type_id, tensor.data = 40, blocks.tobytes()
        builder.tensor(f"{stem}.{spelling}", factors)
        builder.tensor(f"{stem}.input_scale", np.full(len(factors), 0.01, np.float32))
        found[stem] = blocks, factors
    return found


@pytest.mark.parametrize("spelling", ["scale", "weight.scale"])
def test_nvfp4_has_a_factor_beside_its_blocks(tmp_path: Path, spelling: str) -> None:
    builder = sized_for_nvfp4(experts=0)
    stored = with_nvfp4(builder, spelling)
    found = opened(builder, tmp_path)
    check_scaled(found, stored, {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"})


def test_nvfp4_of_experts_has_a_factor_for_each(tmp_path: Path) -> None:
    for count in (0, 1):
        builder = sized_for_nvfp4(experts=4)
        stored = with_nvfp4(builder, count=count)
        found = opened(builder, tmp_path)
        names = {f"experts_{part}": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
        check_scaled(found, stored, names)
    builder = sized_for_nvfp4(experts=4)
    with_nvfp4(builder, count=3)
    with pytest.raises(ModelError, match=r"ffn_gate_exps.scale' is not one number for each matrix"):
        opened(builder, tmp_path)


def check_scaled(checkpoint: Any, stored: Scaled, names: dict[str, str]) -> None:
    for layer in range(LAYERS):
        for name, stem in names.items():
            blocks, factors = stored[f"blk.{layer}.{stem}"]
            values = dequantize(blocks.reshape(-1, blocks.shape[-1]), "NVFP4")
            wanted = values * np.repeat(factors, len(values) // len(factors))[:, None]
            taken = checkpoint.take(f"layers.{layer}.{name}")
            assert taken.type == "NVFP4" and np.array_equal(taken.float32().reshape(wanted.shape), wanted)
            if taken.scales is not None and len(taken.shape) == 3:
                for few in (checkpoint.take_some(f"layers.{layer}.{name}", np.array([2, 0])), taken.subset([2, 0])):
                    assert np.array_equal(few.float32(), taken.float32()[[2, 0]])
                assert np.array_equal(taken.matrix(3).float32(), taken.float32()[3])
            rests = checkpoint.resting(f"layers.{layer}.{name}")
            assert rests is None if len(taken.shape) == 2 else np.array_equal(rests.scales, factors)
    with pytest.raises(ModelError, match="is not stored as it is used"):
        checkpoint.places(f"layers.0.{next(iter(names))}")


@pytest.mark.parametrize("experts", [0, 4])
def test_models_of_nvfp4_compute_with_the_factors(experts: int, tmp_path: Path) -> None:
    """As one of the same values in F32 does, but for the activations, which are rounded to 8 bits."""
    builder, same = sized_for_nvfp4(experts), sized_for_nvfp4(experts)
    stored = with_nvfp4(builder)
    for tensor in same.tensors:
        blocks, factors = stored.get(tensor.name.removesuffix(".weight"), (None, None))
        if blocks is not None and factors is not None:
            values = dequantize(blocks.reshape(-1, blocks.shape[-1]), "NVFP4")
            tensor.data = (values * np.repeat(factors, len(values) // len(factors))[:, None]).tobytes()
    found = []
    for name, one in (("nvfp4", builder), ("f32", same)):
        executor = load(open_checkpoint(one.write(tmp_path / f"{name}.gguf")), EngineConfig(threads=2, context=64))
        tokens, rows = np.arange(20, dtype=np.int32) % executor.vocab_size, np.arange(20, dtype=np.int32)
        pages = np.arange(executor.n_pages, dtype=np.int32)[None]
        found.append(executor.forward(Batch(tokens, rows, np.zeros_like(rows), pages, rows)).copy())
    errors = np.sqrt(np.square(found[0] - found[1]).mean(1) / np.square(found[1]).mean(1))
    assert 0 < np.quantile(errors, 0.9) < 0.02


def sized_for_nvfp4(experts: int) -> Builder:
    """A tiny model the rows of whose FFNs are whole blocks of 64."""
    builder = experts_gguf(experts) if experts else tiny_gguf()
    builder.put("llama.feed_forward_length", U32, 128)
    for tensor in builder.tensors:
        if FF in tensor.dims:
            tensor.dims = [128 if dim == FF else dim for dim in tensor.dims]
            tensor.data = bytes(4 * math.prod(tensor.dims))
    return builder


def test_nvfp4_becomes_q8_0_with_less_rounding_than_other_values() -> None:
    rng = np.random.default_rng(0)
    blocks = nvfp4(rng, 32, 640)
    values = dequantize(blocks, "NVFP4")
    factor = np.float32(3e-5)
    ours = dequantize(nvfp4_as_q8_0(blocks, np.full((32, 1), factor)), "Q8_0") - values * factor
    plain = dequantize(quantize(values * factor, "Q8_0"), "Q8_0") - values * factor
    assert np.sqrt(np.mean(ours**2)) < 0.6 * np.sqrt(np.mean(plain**2))
    assert not dequantize(nvfp4_as_q8_0(np.zeros((1, 36), np.uint8)), "Q8_0").any()


@pytest.mark.parametrize("dims", [[D, 1], [1, D], [D, 1, 1]])
def test_dimensions_of_one_count_for_nothing(tmp_path: Path, dims: list[int]) -> None:
    plain, builder = opened(tiny_gguf(), tmp_path), tiny_gguf()
    tensor = next(tensor for tensor in builder.tensors if tensor.name == "blk.0.attn_norm.weight")
    tensor.dims = dims
    taken, wanted = (one.take("layers.0.attn_norm") for one in (opened(builder, tmp_path), plain))
    assert taken.shape == wanted.shape == (D,) and np.array_equal(taken.data, wanted.data)


def test_a_matrix_keeps_its_rows(tmp_path: Path) -> None:
    builder = tiny_gguf()
    tensor = next(tensor for tensor in builder.tensors if tensor.name == "blk.0.ffn_up.weight")
    tensor.dims = [D, FF, 1]
    assert opened(builder, tmp_path).take("layers.0.up").shape == (FF, D)
    tensor.dims = [FF, D]
    with pytest.raises(ModelError, match="has shape"):
        opened(builder, tmp_path)


def test_gate_and_up_of_experts_in_one_tensor(tmp_path: Path) -> None:
    plain, builder = opened(experts_gguf(), tmp_path), experts_gguf()
    for layer in range(LAYERS):
        parts = []
        for part in ("gate", "up"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            tensor = next(tensor for tensor in builder.tensors if tensor.name == name)
            parts.append(np.frombuffer(tensor.data, np.float32).reshape(tuple(reversed(tensor.dims))))
            builder.tensors.remove(tensor)
        builder.tensor(f"blk.{layer}.ffn_gate_up_exps.weight", np.concatenate(parts, axis=1))
    found = opened(builder, tmp_path)
    for name in list(plain.names()):
        assert np.array_equal(found.take(name).float32(), plain.take(name).float32())
    assert plain.resting("layers.0.experts_up") is not None and found.resting("layers.0.experts_up") is not None
    with pytest.raises(ModelError, match=r"ffn_gate_up_exps\.weight has shape"):
        builder.tensors[-1].dims[1] -= 1
        opened(builder, tmp_path)


# --- folders


def rope_of(**changes: Any) -> ModelConfig:
    return read_config(tiny_config("qwen3") | changes, Path("folder"))


@pytest.mark.parametrize(
    ("scaling", "notes"),
    [
        ({"attn_factor": 0.8782488562869419}, ["attn_factor of YaRN is not applied, as in transformers"]),
        ({"extrapolation_factor": 0.5}, ["extrapolation_factor of YaRN is not applied, as in transformers"]),
        ({"attn_factor": 1, "extrapolation_factor": 1.0}, []),
        ({"mscale": 0.7}, ["mscale of YaRN is not applied without mscale_all_dim, as in transformers"]),
        ({"mscale_all_dim": 0.7}, []),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, []),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, []),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.25}, []),
        ({"attention_factor": 1.25}, []),
    ],
)
def test_yarn_means_what_transformers_says(scaling: dict[str, float], notes: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    raw = {key: value for key, value in tiny_config("qwen3").items() if key != "rope_theta"}
    raw |= {"rope_theta": 20000.0, "rope_scaling": yarn | scaling}
    said: list[str] = []
    (rope,) = read_config(json.loads(json.dumps(raw)), Path("folder"), said).ropes
    config = transformers.Qwen3Config(**json.loads(json.dumps(raw)))
    _, gain = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert (OWN if rope.attention_factor is None else rope.attention_factor) == pytest.approx(gain, rel=1e-6)
    assert said == notes


def test_both_dictionaries_of_rope_may_say_the_same() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    new = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 20000.0}
    alone = rope_of(rope_scaling=yarn)
    assert rope_of(rope_scaling=yarn, rope_parameters=new) == alone
    assert rope_of(rope_scaling=yarn, rope_parameters=new | {"beta_fast": 32.0}).ropes[0].beta_fast == 32
    for other in ({"factor": 8.0}, {"rope_type": "linear"}):
        with pytest.raises(ModelError, match="both set, and differ"):
            rope_of(rope_scaling=yarn, rope_parameters=new | other)


def latents(**changes: Any) -> ModelConfig:
    settings = {"architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 512, "q_lora_rank": None}
    return read_config(settings | changes, Path("folder"))


def test_the_original_context_outside_the_dictionary_of_latent_attention() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    inside = latents(rope_scaling=yarn | {"original_max_position_embeddings": 128})
    outside = latents(rope_scaling=yarn, original_max_position_embeddings=128)
    assert inside.ropes[0].original_context_length == 128 and outside == inside
    with pytest.raises(ModelError, match="original_max_position_embeddings is 128, but 64 outside"):
        latents(rope_scaling=yarn | {"original_max_position_embeddings": 128}, original_max_position_embeddings=64)


def test_null_flags_are_false() -> None:
    assert {one.router.normalise for one in latents(norm_topk_prob=None).experts.values()} == {False}
    assert {one.router.normalise for one in latents().experts.values()} == {True}
    assert not latents(rope_interleave=None).ropes[0].interleaved and latents().ropes[0].interleaved


def test_the_activation_behind_the_convolution_of_gated_delta_net() -> None:
    """In transformers `hidden_act`, of FFNs too; a model made by `sparsify` has two."""
    settings = {"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 40}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    settings |= {"max_position_embeddings": 128}

    def read(**changes: Any) -> ModelConfig:
        return read_config(settings | changes, Path("folder"))

    def both(**changes: Any) -> tuple[set[str], set[str]]:
        config = read(**changes)
        return {layer.ffn.activation for layer in config.layers}, {one.activation for one in config.states.values()}

    assert both(hidden_act="swish") == ({"silu"}, {"silu"})
    assert both(hidden_act="relu") == ({"relu"}, {"relu"})
    assert both(hidden_act="relu", linear_hidden_act="silu") == ({"relu"}, {"silu"})
    for stated in ({"hidden_act": "cats"}, {"hidden_act": "silu", "linear_hidden_act": "cats"}):
        with pytest.raises(ModelError, match="hidden_act is 'cats', also behind the convolution"):
            read(**stated)


@pytest.mark.parametrize("slides", [["full_attention", "sliding_attention"], ["sliding_attention"] * LAYERS])
def test_mistral_with_layer_types_is_what_autoconfig_makes_of_it(tmp_path: Path, slides: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tiny_folder(tmp_path / "tiny", "mistral")
    edit_config(folder, sliding_window=20, layer_types=slides)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert theirs.model_type == "ministral"
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    found = open_checkpoint(folder)
    assert [layer.attention.window for layer in found.config.layers] == windows and found.unread == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (WINDOW, "layer_types holds 'sliding_attention'"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is '30.0'"),
        ({"n_routed_experts": 8}, "n_routed_experts is '8'"),
        ({"residual_multiplier": 0.5}, "residual_multiplier is '0.5'"),
        ({"use_qk_norm": True}, "use_qk_norm is 'True'"),
    ],
)
def test_keys_of_other_classes_that_change_results_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(tiny_config() | changes, Path("folder"))


def test_keys_that_change_nothing_are_listed(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    plain = open_checkpoint(folder)
    edit_config(
        folder, clip_qkv=None, layer_types=["full_attention"] * LAYERS, use_cache=True, num_experts=0,
        some_new_key=3, residual_multiplier=1.0, attention_dropout=0.0,
    )  # fmt: skip
    found = open_checkpoint(folder)
    assert found.unread == ["some_new_key"] and plain.unread == []
    assert found.config == plain.config


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    stored = as_stored(weights("llama"))
    names = sorted(stored)
    (folder / "model.safetensors").unlink()
    for number, some in enumerate((names[:9], names[8:])):
        (folder / f"m{number}.safetensors").write_bytes(safetensors_bytes({name: stored[name] for name in some}))
    places = {name: f"m{int(at > 8)}.safetensors" for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert len(list(open_checkpoint(folder).names())) == len(names)
    kind, shape, raw = stored[names[8]]
    changed = {name: stored[name] for name in names[8:]} | {names[8]: (kind, shape, raw[:-4] + b"\0\0\0\1")}
    (folder / "m1.safetensors").write_bytes(safetensors_bytes(changed))
    with pytest.raises(ModelError, match="is in another file, too, with other values"):
        open_checkpoint(folder)


def test_keys_that_nothing_read_are_shown_at_v(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from powerinfer.cli.main import main

    keys = {"use_parallel_residual": True, "vision.\x1b[2Jcount": 3}
    path = tiny_gguf().fields(keys, "llama.").write(tmp_path / "m.gguf")
    for flags, shown in (([], False), (["-v"], True)):
        assert main(["run", "--raw", "ab", "-m", str(path), "-n", "1", "--gpu", "none", *flags]) == 0
        said = capsys.readouterr().err
        line = "keys not read     llama.use_parallel_residual, llama.vision.[2Jcount"
        assert (line in said) is shown and "\x1b" not in said
