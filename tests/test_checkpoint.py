"""Checkpoints: both formats give the same configuration and tensors, and refuse what they do not understand."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import (
    FF,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCAB,
    D,
    as_stored,
    edit_config,
    gguf_name,
    hf_name,
    safetensors_bytes,
    tiny_config,
    tiny_folder,
    tiny_gguf,
    weights,
)

from benchmarks.models.gguf_writer import ARRAY, BOOL, F32, I32, STRING, U32, Array, Builder
from powerinfer.config import AttentionConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig, uniform
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.quant import block_type, dequantize, quantize

VARIANTS = [("llama", True, ""), ("llama", False, "qkv o ffn"), ("qwen2", False, ""), ("qwen3", True, "")]


def refused(path: Path, message: str) -> None:
    gc.disable()  # what other tests left would be collected at this one's expense
    try:
        start = time.process_time()
        with pytest.raises(ModelError, match=message) as caught:
            open_checkpoint(path)
        assert time.process_time() - start < 0.5
    finally:
        gc.enable()
    assert "\n" not in str(caught.value)


def take_all(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    taken = {name: checkpoint.take(name).float32() for name in list(checkpoint.names())}
    checkpoint.finish()
    return taken


def expected_config(architecture: str, tied: bool, biases: str, interleaved: bool, name: str) -> ModelConfig:
    attention = AttentionConfig(
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        rope=RopeConfig(theta=20000.0, dim=HEAD_DIM, interleaved=interleaved),
        qkv_bias=architecture == "qwen2" or "qkv" in biases,
        o_bias="o" in biases,
        qk_norm="head" if architecture == "qwen3" else None,
    )
    return ModelConfig(
        architecture=architecture,
        d_model=D,
        vocab_size=VOCAB,
        context_length=128,
        norm_eps=1e-5,
        layers=uniform(LAYERS, LayerConfig(attention, FfnConfig(FF, bias="ffn" in biases))),
        tied_embeddings=tied,
        name=name,
    )


# --- what is read


@pytest.mark.parametrize(("architecture", "tied", "biases"), VARIANTS)
def test_gguf_models(tmp_path: Path, architecture: str, tied: bool, biases: str) -> None:
    checkpoint = open_checkpoint(tiny_gguf(architecture, tied, biases).write(tmp_path / "m.gguf"))
    config = expected_config(architecture, tied, biases, architecture == "llama", "Tiny")
    epsilon = float(np.float32(1e-5))  # the file stores a float32
    assert checkpoint.config == config.__class__(**{**vars(config), "norm_eps": epsilon})
    taken, expected = take_all(checkpoint), weights(architecture, tied, biases)
    assert taken.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(taken[name], values), name
    assert checkpoint.source == "gguf" and checkpoint.notes == []
    assert checkpoint.parameters == sum(values.size for values in expected.values())
    assert checkpoint.bytes_by_type == {"F32": 4 * checkpoint.parameters} and checkpoint.main_type == "F32"


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("architecture", "tied", "biases"), [*VARIANTS, ("mistral", False, "")])
def test_folders(tmp_path: Path, architecture: str, tied: bool, biases: str, dtype: str) -> None:
    checkpoint = open_checkpoint(tiny_folder(tmp_path / "tiny", architecture, tied, biases, dtype))
    assert checkpoint.config == expected_config(architecture, tied, biases, False, "tiny")
    taken, expected = take_all(checkpoint), weights(architecture, tied, biases)
    assert taken.keys() == expected.keys()
    stored = as_stored(expected, dtype)
    for name, values in expected.items():
        assert checkpoint.take(name).type == dtype
        assert checkpoint.take(name).data.tobytes() == stored[hf_name(name)][2]
        assert np.allclose(taken[name], values, rtol={"F32": 0, "F16": 2**-11, "BF16": 2**-7}[dtype], atol=1e-7)
    assert checkpoint.source == "hf" and checkpoint.main_type == dtype


def test_the_safetensors_library_writes_what_is_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = tiny_folder(tmp_path / "tiny")
    values = weights("llama")
    save_file({hf_name(name): array for name, array in values.items()}, folder / "model.safetensors")
    taken = take_all(open_checkpoint(folder))
    assert all(np.array_equal(taken[name], array) for name, array in values.items())


def test_nothing_is_copied(tmp_path: Path) -> None:
    for path in (tiny_gguf().write(tmp_path / "m.gguf"), tiny_folder(tmp_path / "tiny")):
        tensor = open_checkpoint(path).take("layers.0.q")
        assert not tensor.data.flags.owndata and not tensor.data.flags.writeable and tensor.data.flags.c_contiguous
        assert tensor.data.dtype == np.uint8 and tensor.data.ndim == 1
        assert np.shares_memory(tensor.float32(), tensor.data)


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Cut a folder's one file into shards with an index; gives the weight map."""
    stored = list(as_stored(weights("llama")).items())
    places = {}
    for part in range(parts):
        name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        (folder / name).write_bytes(safetensors_bytes(dict(stored[part::parts])))
        places |= {tensor: name for tensor, _ in stored[part::parts]}
    (folder / "model.safetensors").unlink()
    write_index(folder, places)
    return places


def write_index(folder: Path, places: Any) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    whole = open_checkpoint(folder)
    shard(folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == whole.config and checkpoint.fingerprint == whole.fingerprint
    taken = take_all(checkpoint)
    assert all(np.array_equal(taken[name], array) for name, array in weights("llama").items())


def test_paths_that_stand_for_a_model(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    for path in (folder, str(folder), folder / "config.json", folder / "model.safetensors"):
        assert open_checkpoint(path).path == folder
    holder = tmp_path / "holder"
    holder.mkdir()
    refused(holder, "holds no model")
    tiny_gguf().write(holder / "a.gguf")
    assert open_checkpoint(holder).path == holder / "a.gguf"
    tiny_gguf().write(holder / "b.gguf")
    refused(holder, r"2 GGUF models; choose one of them: a\.gguf, b\.gguf$")
    for name in "cdef":
        (holder / f"{name}.gguf").touch()
    refused(holder, r"6 GGUF models; choose one of them: a\.gguf, .*, d\.gguf and 2 more")
    refused(tmp_path / "none.gguf", "No such file")
    pickled = tmp_path / "pytorch_model.bin"
    pickled.write_bytes(b"\x80\x04.")
    refused(pickled, "pickle")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "neither model.safetensors nor .*pickle")


def test_what_nobody_took_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf().write(tmp_path / "m.gguf"))
    for name in list(checkpoint.names()):
        if name != "layers.1.down":
            checkpoint.take(name)
    with pytest.raises(ModelError, match=r"layers\.1\.down"):
        checkpoint.finish()
    assert not checkpoint.has("head")
    with pytest.raises(ModelError, match="no tensor head"):
        checkpoint.take("head")


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    path = tiny_gguf().write(tmp_path / "m.gguf")
    first = open_checkpoint(path).fingerprint
    assert open_checkpoint(path).fingerprint == first and len(first) == 32
    changed = tiny_gguf()
    changed.tensors[3].data = bytes(8) + changed.tensors[3].data[8:]
    assert open_checkpoint(changed.write(path)).fingerprint != first
    theta = tiny_gguf().put("llama.rope.freq_base", F32, 30000.0)
    assert open_checkpoint(theta.write(path)).fingerprint != first
    renamed = tiny_gguf().put("general.name", STRING, "Other")
    assert open_checkpoint(renamed.write(path)).fingerprint == first
    folder = tiny_folder(tmp_path / "tiny")
    plain = open_checkpoint(folder).fingerprint
    assert open_checkpoint(folder, quantize="q8_0").fingerprint == plain


def test_names_are_fit_to_be_printed(tmp_path: Path) -> None:
    builder = tiny_gguf().put("general.name", STRING, "a\x1b[31m\nb" + "x" * 1000)
    name = open_checkpoint(builder.write(tmp_path / "m.gguf")).config.name
    assert name.startswith("a[31mb") and name.isprintable() and len(name) <= 200


def test_a_file_that_shrank_is_not_read(tmp_path: Path) -> None:
    path = tiny_gguf().write(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    os.truncate(path, 100)
    with pytest.raises(ModelError, match="changed while it was in use"):
        checkpoint.take("embed")


# --- RoPE, windows and other switches


def rope_of(path: Path) -> RopeConfig:
    (found,) = open_checkpoint(path).config.ropes
    return found


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    base: dict[str, Any] = {"theta": 20000.0, "dim": HEAD_DIM, "interleaved": True}

    def rope(*entries: tuple[str, int, Any]) -> RopeConfig:
        builder = tiny_gguf()
        for key, kind, value in entries:
            builder.put(f"llama.rope.{key}", kind, value)
        return rope_of(builder.write(path))

    linear = RopeConfig(**base, scaling="linear", factor=4.0)
    assert rope(("scaling.type", STRING, "none"), ("scaling.factor", F32, 4.0)) == RopeConfig(**base)
    assert rope(("scaling.type", STRING, "linear"), ("scaling.factor", F32, 4.0)) == linear
    assert rope(("scaling.factor", F32, 4.0)) == linear  # ggml: linear when no type is said
    assert rope(("scale_linear", F32, 4.0)) == linear
    assert rope(("scaling.factor", F32, 0.0)) == RopeConfig(**base)
    yarn = [("scaling.type", STRING, "yarn"), ("scaling.factor", F32, 4.0)]
    original = ("scaling.original_context_length", U32, 32)
    assert rope(*yarn, original) == RopeConfig(**base, scaling="yarn", factor=4.0, original_context_length=32)
    assert rope(*yarn).original_context_length == 128
    gain = rope(*yarn, original, ("scaling.attn_factor", F32, 0.5), ("scaling.yarn_beta_fast", F32, 16.0))
    assert gain.attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4))) and gain.beta_fast == 16


def test_gguf_llama3_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    builder = tiny_gguf().tensor("rope_freqs.weight", factors)
    checkpoint = open_checkpoint(builder.write(tmp_path / "m.gguf"))
    assert checkpoint.config.ropes[0].scaling is None
    assert checkpoint.config.ropes[0].divisors == tuple(map(float, factors))
    for bad in (0.0, -1.0, np.nan, np.inf):
        wrong = tiny_gguf().tensor("rope_freqs.weight", np.where(factors == 1, np.float32(bad), factors))
        refused(wrong.write(tmp_path / "m.gguf"), "rope_freqs.weight holds")
    both = builder.put("llama.rope.scaling.factor", F32, 4.0)
    refused(both.write(tmp_path / "m.gguf"), "both rope_freqs.weight and RoPE scaling 'linear'")


def test_gguf_windows(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    window = tiny_gguf("qwen2").put("qwen2.attention.sliding_window", U32, 20)
    config = open_checkpoint(window.write(path)).config
    assert [layer.attention.window for layer in config.layers] == [20, 20]
    window.put("qwen2.attention.sliding_window_pattern", ARRAY, Array(BOOL, [1, 0]))
    config = open_checkpoint(window.write(path)).config
    assert [layer.attention.window for layer in config.layers] == [20, None]
    window.put("qwen2.attention.sliding_window_pattern", U32, 1)  # the last layer of each period has none
    assert [layer.attention.window for layer in open_checkpoint(window.write(path)).config.layers] == [None, None]
    window.put("qwen2.attention.sliding_window_pattern", U32, 0)
    refused(window.write(path), "sliding_window_pattern")
    window.put("qwen2.attention.sliding_window_pattern", ARRAY, Array(BOOL, [1]))
    refused(window.write(path), "sliding_window_pattern")


def test_gguf_layers_of_several_sizes(tmp_path: Path) -> None:
    builder = tiny_gguf().put("llama.feed_forward_length", ARRAY, Array(U32, [FF, FF // 2]))
    rng = np.random.default_rng(1)
    for name, shape in (("gate", (FF // 2, D)), ("up", (FF // 2, D)), ("down", (D, FF // 2))):
        at = next(i for i, one in enumerate(builder.tensors) if one.name == f"blk.1.ffn_{name}.weight")
        del builder.tensors[at]
        builder.tensor(f"blk.1.ffn_{name}.weight", rng.standard_normal(shape).astype(np.float32))
    config = open_checkpoint(builder.write(tmp_path / "m.gguf")).config
    assert config.ffn_sizes == (FF, FF // 2) and config.widest_ffn == FF and config.n_neurons == FF + FF // 2
    builder.put("llama.feed_forward_length", ARRAY, Array(U32, [FF, FF // 2, FF]))
    refused(
        builder.write(tmp_path / "m.gguf"), "feed_forward_length is .*, not a number from 1 to 1048576 for every layer"
    )


FOLDER_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_theta": ..., "rms_norm_eps": ..., "hidden_act": ..., "tie_word_embeddings": ...}),
    ("llama", {"num_key_value_heads": ..., "head_dim": ...}),
    ("llama", {"num_key_value_heads": None, "head_dim": None}),
    ("llama", {"sliding_window": 7, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}),
    ("llama", {"rope_scaling": {"rope_type": "default"}}),
    (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    ("llama", {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("mistral", {}),
    ("mistral", {"sliding_window": ...}),
    ("mistral", {"sliding_window": 33}),
    ("mistral", {"head_dim": ...}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 10}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16.0}}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    ("qwen3", {"head_dim": ..., "attention_bias": True}),
]


@pytest.mark.parametrize(("architecture", "changes"), FOLDER_CONFIGS)
def test_configurations_mean_what_transformers_says(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from powerinfer.formats.folder_config import read_config

    raw = {key: value for key, value in (tiny_config(architecture) | changes).items() if value is not ...}
    ours = read_config(json.loads(json.dumps(raw)), tmp_path)
    theirs = transformers.CONFIG_MAPPING[architecture](**json.loads(json.dumps(raw)))
    rope, (own,) = theirs.rope_parameters, ours.ropes
    attention, ffn = ours.layers[0].attention, ours.layers[0].ffn
    assert attention.n_kv_heads == theirs.num_key_value_heads and ours.norm_eps == theirs.rms_norm_eps
    assert attention.head_dim == (getattr(theirs, "head_dim", None) or D // HEADS)
    assert ours.tied_embeddings == theirs.tie_word_embeddings and ffn.activation == theirs.hidden_act
    assert attention.qkv_bias == (architecture == "qwen2" or getattr(theirs, "attention_bias", False))
    assert attention.o_bias == (architecture != "qwen2" and getattr(theirs, "attention_bias", False))
    assert ffn.bias == getattr(theirs, "mlp_bias", False)
    assert own.theta == rope["rope_theta"] and own.dim == attention.head_dim and not own.interleaved
    assert (own.scaling or "default") == rope["rope_type"]
    assert own.factor == rope.get("factor", 1.0)
    assert own.original_context_length == rope.get("original_max_position_embeddings", 0)
    assert own.attention_factor == rope.get("attention_factor")
    assert own.beta_fast == rope.get("beta_fast", 32) and own.beta_slow == rope.get("beta_slow", 1)
    for layer in range(LAYERS):
        kinds = getattr(theirs, "layer_types", None)
        slides = architecture == "mistral" or (kinds is not None and kinds[layer] == "sliding_attention")
        window = theirs.sliding_window if slides and architecture != "llama" else None
        assert ours.layers[layer].attention.window == window


def test_a_stored_copy_of_the_tied_head(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    values = weights("llama", tied=True)
    values["head"] = values["embed"].copy()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(as_stored(values)))
    assert not open_checkpoint(folder).has("head")
    values["head"][3, 3] += 1
    (folder / "model.safetensors").write_bytes(safetensors_bytes(as_stored(values)))
    kept = open_checkpoint(folder)
    assert not kept.config.tied_embeddings and np.array_equal(kept.take("head").float32(), values["head"])
    assert np.array_equal(kept.take("embed").float32(), values["embed"])
    assert any("the two tensors differ: each is used as it is stored" in note for note in kept.notes)


@pytest.mark.parametrize(
    ("name", "kind", "shape", "nbytes"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", (8,), 32),
        ("model.position_ids", "I64", (1, 16), 128),
        ("model.layers.1.self_attn.masked_bias", "F32", (), 4),
    ],
)
def test_buffers_that_follow_from_the_configuration_are_ignored(
    tmp_path: Path, name: str, kind: str, shape: tuple[int, ...], nbytes: int
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    stored = as_stored(weights("llama"))
    stored[name] = (kind, shape, bytes(nbytes))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    take_all(open_checkpoint(folder))


# --- quantising and converting on load


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["q8_0", "q4_0"])
def test_quantize_on_load(tmp_path: Path, target: str, dtype: str) -> None:
    folder = tiny_folder(tmp_path / "tiny", tied=False, dtype=dtype)
    plain = open_checkpoint(folder)
    seen: list[tuple[str, int, int]] = []
    checkpoint = open_checkpoint(folder, quantize=target, progress=lambda *step: seen.append(step))
    matrices = {f"layers.{i}.{name}" for i in range(LAYERS) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    for name in list(checkpoint.names()):
        tensor, own = checkpoint.take(name), plain.take(name)
        assert tensor.shape == own.shape
        if name in matrices | {"head"}:
            assert tensor.type == target.upper()
            expected = quantize(own.float32(), target.upper())
            assert np.array_equal(tensor.data, expected.reshape(-1))
            assert np.array_equal(tensor.float32(), dequantize(expected, target.upper()))
        else:
            assert tensor.type == own.type and np.array_equal(tensor.data, own.data)
    total = sum(plain.take(name).size for name in matrices | {"head"})
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1:] == (total, total) and checkpoint.notes == [f"quantising 15 matrices to {target.upper()}"]


def test_a_tied_head_is_quantised_and_the_embedding_is_not(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_folder(tmp_path / "tiny", tied=True), quantize="q8_0")
    assert not checkpoint.config.tied_embeddings and checkpoint.has("head")
    assert checkpoint.take("embed").type == "F32" and checkpoint.take("head").type == "Q8_0"
    expected = quantize(weights("llama")["embed"], "Q8_0")
    assert np.array_equal(checkpoint.take("head").data, expected.reshape(-1))
    assert checkpoint.parameters == sum(values.size for values in weights("llama").values())


def test_large_tensors_are_converted_in_pieces(tmp_path: Path) -> None:
    from powerinfer.formats.tensors import RawTensor, convert

    values = np.random.default_rng(0).standard_normal((3001, 2048)).astype(np.float32)
    ticks: list[int] = []
    tensor = convert(RawTensor("F32", values.shape, values.view(np.uint8).reshape(-1)), "Q4_0", ticks.append)
    assert np.array_equal(tensor.data, quantize(values, "Q4_0").reshape(-1))
    assert len(ticks) > 1 and sum(ticks) == values.size


def test_quantize_requests_that_make_no_sense(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    with pytest.raises(RequestError, match="choose q8_0 or q4_0"):
        open_checkpoint(folder, quantize="q2_k")
    path = with_type("Q8_0", 8).write(tmp_path / "m.gguf")
    with pytest.raises(RequestError, match="quantised already"):
        open_checkpoint(path, quantize="q8_0")


def test_values_that_cannot_be_quantised_are_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    values = weights("llama")
    values["layers.1.up"][5, 5] = np.nan
    (folder / "model.safetensors").write_bytes(safetensors_bytes(as_stored(values)))
    checkpoint = open_checkpoint(folder, quantize="q8_0")
    with pytest.raises(ModelError, match=r"layers\.1\.up: a weight is too large"):
        checkpoint.take("layers.1.up")


def with_type(name: str, type_id: int, base: Builder | None = None) -> Builder:
    """A Llama of wider rows whose layer matrices have that type; zero bytes are valid blocks of every type."""

    width, ff = 256, 512
    builder = tiny_gguf() if base is None else base
    for key, value in [("embedding_length", width), ("feed_forward_length", ff)]:
        builder.put(f"llama.{key}", U32, value)
    for key in ("key_length", "value_length"):
        builder.put(f"llama.attention.{key}", U32, 64)
    builder.put("llama.rope.dimension_count", U32, 64)
    kind = block_type(name)
    sizes = {D: width, FF: ff, HEADS * HEAD_DIM: 256, KV_HEADS * HEAD_DIM: 128}
    for tensor in builder.tensors:
        if len(tensor.dims) == 2:
            cols, rows = (sizes.get(dim, dim) for dim in tensor.dims)
            if "attn_k" in tensor.name or "attn_v" in tensor.name:
                rows = 128
            tensor.dims = [cols, rows]
            chosen = tensor.name.startswith("blk") and ".fc" not in tensor.name  # of a predictor
            tensor.type_id = type_id if chosen else 0
            tensor.data = bytes(rows * (kind.row_bytes(cols) if chosen else 4 * cols))
        else:
            tensor.dims, tensor.data = [width], bytes(4 * width)
    return builder


@pytest.mark.parametrize(
    ("name", "type_id"),
    [
        ("Q4_1", 3), ("Q5_0", 6), ("Q4_K", 12), ("Q6_K", 14), ("BF16", 30), ("IQ4_NL", 20), ("IQ4_XS", 23),
        ("MXFP4", 39), ("Q3_K", 11), ("Q2_K", 10),
        ("TQ1_0", 34), ("TQ2_0", 35), ("NVFP4", 40), ("IQ1_M", 29), ("IQ2_XXS", 16), ("IQ3_S", 21), ("Q1_0", 41),
        ("Q2_0", 42),
    ],
)  # fmt: skip
def test_types_with_kernels_stay(tmp_path: Path, name: str, type_id: int) -> None:
    checkpoint = open_checkpoint(with_type(name, type_id).write(tmp_path / "m.gguf"))
    assert checkpoint.notes == [] and checkpoint.take("layers.1.down").type == name


@pytest.mark.parametrize(("name", "type_id"), [("Q8_1", 9), ("Q8_K", 15), ("I8", 24)])
def test_types_that_cannot_be_read_are_refused_by_name(tmp_path: Path, name: str, type_id: int) -> None:
    refused(with_type(name, type_id).write(tmp_path / "m.gguf"), f"has type {name}, which this engine does not read")


def test_blocks_of_an_older_kind_are_refused(tmp_path: Path) -> None:
    """Files of before llama.cpp had Q2_0 have blocks of 128 in 34 bytes under its number."""
    for last in (False, True):
        builder = with_type("Q2_0", 42)
        if last:
            builder.tensors = [tensor for tensor in builder.tensors if tensor.type_id != 42] + [
                next(tensor for tensor in builder.tensors if tensor.type_id == 42)
            ]
        for tensor in builder.tensors:
            if tensor.type_id == 42:
                tensor.data = bytes(len(tensor.data) // 36 * 34)
        says = "runs past the end of the file" if last else "overlap"
        refused(builder.write(tmp_path / "m.gguf"), f"{says}.*Q2_0 in blocks of 128.*is not read, only in blocks of 64")


def test_vectors_of_other_types(tmp_path: Path) -> None:
    values = np.arange(32, dtype=np.float32)
    double = Checkpoint(
        _source({"final_norm": ("F64", (32,), values.astype(np.float64)), "embed": ("F64", (1, 32), values * 1.0)})
    )
    assert double.take("final_norm").type == "F32" and np.array_equal(double.take("final_norm").float32(), values)
    assert double.notes == ["converting 2 tensors of type F64 to F32"]


def _source(tensors: dict[str, tuple[str, tuple[int, ...], np.ndarray]]) -> Any:
    from powerinfer.formats.source import Source
    from powerinfer.formats.tensors import RawTensor

    config = expected_config("llama", True, "", False, "")
    raw = {n: RawTensor(k, s, np.asarray(v, np.float64).view(np.uint8).reshape(-1)) for n, (k, s, v) in tensors.items()}
    return Source("gguf", Path("x"), config, {}, raw, [])


# --- what is refused: GGUF metadata

HUGE = 2**31


def put(key: str, kind: int, value: Any) -> Callable[[Builder], Any]:
    return lambda builder: builder.put(key, kind, value)


def drop(key: str) -> Callable[[Builder], Any]:
    return lambda builder: builder.drop(key)


def without(name: str) -> Callable[[Builder], Any]:
    def change(builder: Builder) -> None:
        builder.tensors = [tensor for tensor in builder.tensors if tensor.name != name]

    return change


def more(name: str, *shape: int) -> Callable[[Builder], Any]:
    return lambda builder: builder.tensor(name, np.zeros(shape, np.float32))


def reshaped(name: str, *dims: int) -> Callable[[Builder], Any]:
    def change(builder: Builder) -> None:
        next(tensor for tensor in builder.tensors if tensor.name == name).dims = list(dims)

    return change


GGUF_REFUSED: dict[str, tuple[Callable[[Builder], Any], str]] = {
    "no architecture": (drop("general.architecture"), "general.architecture is missing"),
    "unknown architecture": (
        put("general.architecture", STRING, "mamba"),
        r"architecture 'mamba' is not supported \(mamba2 is\): docs/what-runs.md lists what is$",
    ),
    "an architecture like no other": (
        put("general.architecture", STRING, "clip"), r"'clip' is not supported: docs/what-runs.md lists what is$"
    ),
    "architecture of another type": (put("general.architecture", U32, 1), "general.architecture is '1', not a text"),
    "hostile architecture": (put("general.architecture", STRING, "\x1b]0;x\x07"), r"'\\x1b\]0;x\\x07'"),
    "adapter": (put("general.type", STRING, "adapter"), "general.type is 'adapter'"),
    "quantisation version": (put("general.quantization_version", U32, 1), "quantization_version is '1'"),
    "sparse model": (put("powerinfer.sparse_threshold", F32, 0.0), "powerinfer"),
    "no layers": (put("llama.block_count", U32, 0), "block_count is '0'"),
    "2**31 layers": (put("llama.block_count", U32, HUGE), "block_count is '2147483648'"),
    "negative layers": (put("llama.block_count", I32, -1), "block_count is '-1'"),
    "more layers": (put("llama.block_count", U32, LAYERS + 1), r"blk\.2\.\w+\.weight is missing"),
    "many more layers": (put("llama.block_count", U32, 4000), "4000 layers and holds"),
    "fewer layers": (put("llama.block_count", U32, LAYERS - 1), r"does not have: 'blk\.1\..* and 6 more"),
    "layers as a text": (put("llama.block_count", STRING, "2"), "block_count is '2', not a number"),
    "layers as a float": (put("llama.block_count", F32, 2.0), r"block_count is '2\.0', not a number"),
    "no heads": (put("llama.attention.head_count", U32, 0), "head_count is '0'"),
    "no key-value heads": (put("llama.attention.head_count_kv", U32, 0), "head_count_kv is '0'"),
    "heads that do not share": (put("llama.attention.head_count_kv", U32, 3), "evenly"),
    "heads that do not divide": (put("llama.attention.head_count", U32, 7), "do not divide"),
    "heads by layer": (put("llama.attention.head_count", ARRAY, Array(I32, [4, 2])), "2 or 4 heads do not divide"),
    "heads of too many layers": (
        put("llama.attention.head_count", ARRAY, Array(I32, [4] * 3)),
        "number .* every layer",
    ),
    "a layer without heads": (put("llama.attention.head_count_kv", ARRAY, Array(I32, [2, 0])), "number .* every layer"),
    "odd head": (put("llama.attention.key_length", U32, 15), "rope.dimension_count|pairs"),
    "no width": (put("llama.embedding_length", U32, 0), "embedding_length"),
    "another width": (put("llama.embedding_length", U32, 128), "shape|dimension_count"),
    "huge width": (put("llama.embedding_length", U32, HUGE), "embedding_length"),
    "no feed-forward": (drop("llama.feed_forward_length"), "feed_forward_length is missing"),
    "another feed-forward": (put("llama.feed_forward_length", U32, 97), "has shape"),
    "context 0": (put("llama.context_length", U32, 0), "context_length"),
    "context 2**31": (put("llama.context_length", U32, HUGE), "context_length"),
    "epsilon nan": (put("llama.attention.layer_norm_rms_epsilon", F32, float("nan")), "epsilon is 'nan'"),
    "epsilon negative": (put("llama.attention.layer_norm_rms_epsilon", F32, -1.0), "epsilon is '-1.0'"),
    "epsilon 0": (put("llama.attention.layer_norm_rms_epsilon", F32, 0.0), "epsilon is '0.0'"),
    "no epsilon": (drop("llama.attention.layer_norm_rms_epsilon"), "epsilon is missing"),
    "theta inf": (put("llama.rope.freq_base", F32, float("inf")), "freq_base"),
    "theta 0": (put("llama.rope.freq_base", F32, 0.0), "freq_base"),
    "partial rotation": (put("llama.rope.dimension_count", U32, 8), "rope.dimension_count is '8'"),
    "rope type": (put("llama.rope.scaling.type", STRING, "dynamic"), "'dynamic', which is not supported"),
    "longrope alone": (put("llama.rope.scaling.type", STRING, "longrope"), "not both rope_factors_short.weight and"),
    "rope factor": (put("llama.rope.scaling.factor", F32, float("nan")), "factor is 'nan'"),
    "yarn log": (put("llama.rope.scaling.yarn_log_multiplier", F32, 0.1), "yarn_log_multiplier"),
    "attention factor": (put("llama.rope.scaling.attn_factor", F32, 2.0), "for yarn scaling only"),
    "value length": (put("llama.attention.value_length", U32, 8), "value_length is '8'"),
    "experts": (put("llama.expert_count", U32, 8), "expert_used_count is missing"),
    "not causal": (put("llama.attention.causal", BOOL, 0), "causal is 'False'"),
    "activation": (put("llama.hidden_act", STRING, "gelu"), "hidden_act is 'gelu'"),
    "a scale nobody knows": (put("llama.logit_scale", F32, 2.0), "logit_scale is '2.0'"),
    "an unknown key": (put("llama.attention.new_idea", U32, 1), "attention.new_idea is set"),
    "tokens": (put("tokenizer.ggml.tokens", ARRAY, Array(STRING, ["a"])), f"1 tokens, but {VOCAB} rows"),
    "no embedding": (without("token_embd.weight"), "token_embd.weight is missing"),
    "no norm": (without("output_norm.weight"), "output_norm.weight is missing"),
    "a missing matrix": (without("blk.1.ffn_down.weight"), r"blk\.1\.ffn_down\.weight is missing"),
    "half of the biases": (more("blk.0.attn_q.bias", HEADS * HEAD_DIM), r"blk\.0\.attn_k\.bias is missing"),
    "biases of one layer": (more("blk.1.attn_q.bias", HEADS * HEAD_DIM), r"does not have: 'blk\.1\.attn_q\.bias'"),
    "an extra tensor": (more("blk.0.ffn_gate_inp.weight", 8, D), "does not have: 'blk.0.ffn_gate_inp.weight'"),
    "transposed": (reshaped("blk.0.ffn_up.weight", FF, D), rf"shape \[{D}, {FF}\], not \[{FF}, {D}\]"),
    "flat": (reshaped("blk.0.ffn_up.weight", FF * D), "has shape"),
    "a flat embedding": (reshaped("token_embd.weight", VOCAB * D), "rows of token_embd.weight"),
}


@pytest.mark.parametrize("name", GGUF_REFUSED)
def test_gguf_models_that_are_refused(tmp_path: Path, name: str) -> None:
    change, message = GGUF_REFUSED[name]
    builder = tiny_gguf()
    change(builder)
    refused(builder.write(tmp_path / "m.gguf"), message)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("llama.expert_count", U32, 0),
        ("llama.attention.causal", BOOL, 1),
        ("llama.vocab_size", U32, VOCAB + 1),  # the tokens count, not this
        ("llama.tensor_data_layout", STRING, "Meta AI original pth"),
        ("llama.attention.head_count_kv", ARRAY, Array(I32, [KV_HEADS, KV_HEADS])),
        ("general.quantization_version", U32, 2),
        ("general.type", STRING, "model"),
        ("general.license", STRING, "mit"),
        ("quantize.imatrix.entries_count", I32, 3),
    ],
)
def test_gguf_metadata_that_changes_nothing(tmp_path: Path, key: str, kind: int, value: Any) -> None:
    plain = open_checkpoint(tiny_gguf().write(tmp_path / "m.gguf")).config
    assert open_checkpoint(tiny_gguf().put(key, kind, value).write(tmp_path / "m.gguf")).config == plain


def test_a_sliding_qwen3_needs_its_norms(tmp_path: Path) -> None:
    builder = tiny_gguf("qwen3")
    without("blk.0.attn_q_norm.weight")(builder)
    refused(builder.write(tmp_path / "m.gguf"), r"blk\.0\.attn_q_norm\.weight is missing")


# --- what is refused: config.json, index and safetensors

CONFIG_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown class": (
        {"architectures": ["GemmaForCausalLM"]},
        r"architectures is 'GemmaForCausalLM', which is not supported \(Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma4For"
        r"CausalLM are\): docs/what-runs.md lists what is$",
    ),
    "vision": ({"architectures": ["LlavaForConditionalGeneration"]}, "'LlavaFor.*': vision models are not supported$"),
    "vision by its part": ({"architectures": ["X"], "vision_config": {}}, "'X': vision models are not supported$"),
    "two classes": ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "not supported"),
    "classes of another type": ({"architectures": {"a": 1}}, "not supported"),
    "a class that is no text": ({"architectures": [["LlamaForCausalLM"]]}, "not supported"),
    "nothing named": ({"architectures": ..., "model_type": ...}, "architectures is 'None'"),
    "class and type differ": ({"model_type": "qwen2"}, "does not go with LlamaForCausalLM"),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "never run"),
    "quantised": ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config has the quant_method 'hqq'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "activation of another type": ({"hidden_act": 3}, "hidden_act is '3', not a text"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "2**31 layers": ({"num_hidden_layers": HUGE}, "num_hidden_layers"),
    "many layers": ({"num_hidden_layers": 4000}, "4000 layers and holds"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "heads a truth value": ({"num_attention_heads": True}, "num_attention_heads is 'True'"),
    "kv heads": ({"num_key_value_heads": 3}, "evenly"),
    "head_dim": ({"head_dim": 17}, "pairs"),
    "no width": ({"hidden_size": ...}, "hidden_size is missing"),
    "width a text": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "width a float": ({"hidden_size": 64.0}, "hidden_size is '64.0'"),
    "huge number": ({"hidden_size": 10**400}, "hidden_size is '1000"),
    "vocabulary": ({"vocab_size": VOCAB + 1}, r"model\.embed_tokens\.weight has shape"),
    "epsilon": ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    "epsilon infinite": ({"rms_norm_eps": "1e999"}, "rms_norm_eps"),
    "not tied": ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    "tied a number": ({"tie_word_embeddings": 1}, "tie_word_embeddings is '1', not true or false"),
    "bias": ({"attention_bias": True}, r"q_proj\.bias is missing"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rope type": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic', which is not supported"),
    "rope object": ({"rope_scaling": [1]}, "not an object"),
    "rope type no text": ({"rope_scaling": {"type": ["yarn"]}}, "not a text"),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "rope factor 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is '0'"),
    "rope key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section is set"),
    "rope factor for nothing": ({"rope_scaling": {"type": "default", "factor": 2.0}}, "factor is set"),
    "rope mscale": ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 0.7}}, "mscale is set"),
    "rope mscale no number": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "0.7"}}, "mscale is '0.7'"),
    "rope truncate": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}}, "truncate is '0'"),
    "rope betas": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1.0}}, "beta_fast is not above"),
    "rope per layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention is set"),
    "rope twice": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "both set, and differ",
    ),
    "rope llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.5,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        "high_freq_factor is below",
    ),
}


@pytest.mark.parametrize("name", CONFIG_REFUSED)
def test_configurations_that_are_refused(tmp_path: Path, name: str) -> None:
    changes, message = CONFIG_REFUSED[name]
    folder = tiny_folder(tmp_path / "tiny")
    edit_config(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "not a kind for every layer"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ({"layer_types": [{}, []]}, "not supported"),
        ({"use_sliding_window": 1}, "use_sliding_window"),
        ({"sliding_window": -5}, "sliding_window"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"attention_bias": False}, "attention_bias is 'False'"),
    ],
)
def test_qwen2_configurations_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = tiny_folder(tmp_path / "tiny", "qwen2")
    edit_config(folder, **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"9" * 10_000, "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
    ],
)
def test_json_that_is_none(tmp_path: Path, text: bytes, message: str) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "config.json").write_bytes(text)
    refused(folder, message)


def test_a_giant_config_is_not_read(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    os.truncate(folder / "config.json", 1 << 40)
    refused(folder, "absurd")


@pytest.mark.parametrize(
    "name",
    [
        *("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..\\m.safetensors", "C:m.safetensors"),
        *(".safetensors", "m.bin", "", "x\0.safetensors", 5, None, ["model.safetensors"], {"a": 1}),
    ],
)
def test_an_index_leads_nowhere_else(tmp_path: Path, name: Any) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    places = shard(folder)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({}))
    write_index(folder, places | {"model.norm.weight": name})
    refused(folder, "not the name of a safetensors file|not a file name")


def test_indexes_that_do_not_match(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    places = shard(folder)
    first, second = sorted(set(places.values()))[:2]
    whole = take_all(open_checkpoint(folder))
    some = next(name for name, file in places.items() if file == first)
    for odd in (
        places | {some: second},
        places | {"model.layers.0.self_attn.rotary_emb.inv_freq": first},
        {name: file for name, file in places.items() if name != "model.norm.weight"},
    ):  # what counts is what the files hold
        write_index(folder, odd)
        read = take_all(open_checkpoint(folder))
        assert read.keys() == whole.keys() and all(np.array_equal(read[name], whole[name]) for name in whole)
    write_index(folder, places | {"ghost": first})
    refused(folder, "'ghost' is not in")
    for odd in ({}, [], None, "x"):
        write_index(folder, odd)
        refused(folder, "has no weight_map")
    write_index(folder, places)
    (folder / second).unlink()
    refused(folder, "No such file")


def header(name: str, **fields: Any) -> dict[str, Any]:
    def change(header: dict[str, Any]) -> None:
        header[name].update(fields)

    return {"header": change}


NORM = "model.norm.weight"
END = 4 * sum(values.size for values in weights("llama").values())
SAFETENSORS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"length": 2**64 - 1}, "claims 18446744073709551615 bytes"),
    "length past the end": ({"length": 1 << 22}, "claims"),
    "short length": ({"length": 10}, "not valid JSON"),
    "text": ({"text": b"{" * 100_000}, "not valid JSON|nested"),
    "nested": ({"text": b'{"a":' * 100_000}, "nested too deeply"),
    "list": ({"text": b"[]"}, "not a JSON object"),
    "twice": ({"text": b'{"a":{},"a":{}}'}, "occurs twice"),
    "metadata": ({"header": lambda header: header.update(__metadata__=[1])}, "__metadata__"),
    "hole": ({"header": lambda header: header.pop(NORM)}, "follows a hole|belong to no tensor"),
    "tail": ({"tail": b"\0" * 7}, "7 bytes at the end belong to no tensor"),
    "dtype": (header(NORM, dtype="F31"), "unknown type 'F31'"),
    "dtype no text": (header(NORM, dtype=["F32"]), "unknown type"),
    "shape": (header(NORM, shape=[D + 1]), "do not go with its shape"),
    "shape negative": (header(NORM, shape=[-D]), "has the shape"),
    "shape float": (header(NORM, shape=[64.0]), "has the shape"),
    "shape true": (header(NORM, shape=[True]), "has the shape"),
    "shape no list": (header(NORM, shape="64"), "has the shape"),
    "shape that wraps": (header(NORM, shape=[2**62, 4, 16]), "do not go with its shape"),
    "shape that wraps to the size": (header(NORM, shape=[2**62 + D]), "do not go with its shape"),
    "many dimensions": (header(NORM, shape=[1] * 99), "has the shape"),
    "offsets past the end": (header(NORM, data_offsets=[END, END + 4 * D]), "past the end"),
    "offsets reversed": (header(NORM, data_offsets=[4 * D, 0]), "do not go with its shape"),
    "offsets of another": (header(NORM, data_offsets=[0, 4 * D]), "overlaps"),
    "offsets negative": (header(NORM, data_offsets=[-4 * D, 0]), "has the offsets"),
    "one offset": (header(NORM, data_offsets=[0]), "has the offsets"),
    "offset huge": (header(NORM, data_offsets=[10**30, 10**30 + 4 * D]), "has the offsets"),
    "another field": (header(NORM, extra=1), "is not described by"),
    "no object": ({"header": lambda header: header.update({NORM: 5})}, "is not described by"),
    "8-bit floats": (header(NORM, dtype="F8_E4M3", shape=[4 * D]), "F8_E4M3|has shape"),
}


@pytest.mark.parametrize("name", SAFETENSORS_REFUSED)
def test_safetensors_files_that_are_refused(tmp_path: Path, name: str) -> None:
    changes, message = SAFETENSORS_REFUSED[name]
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(as_stored(weights("llama")), **changes))
    refused(folder, message)


def test_every_truncation_of_a_safetensors_file_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in [*range(0, 2000, 13), *range(2000, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(folder, "truncated|past the end")


def test_tensors_of_strange_types_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    stored = as_stored(weights("llama"))
    name = hf_name("layers.0.up")
    stored[name] = ("F8_E4M3", (FF, D), bytes(FF * D))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    refused(folder, "up_proj.weight has type F8_E4M3")
    stored[name] = ("F32", (FF, D), bytes(4 * FF * D))
    stored["evil"] = ("F32", (0,), b"")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    refused(folder, "does not have: 'evil'")


def test_messages_stay_on_one_line_and_steer_no_terminal() -> None:
    error = ModelError("first\nsecond \x1b[2J \u202e end, schöne Grüße")
    assert str(error) == "first\\nsecond \\x1b[2J \\u202e end, schöne Grüße"


# --- a real model, and the cost of looking


@pytest.mark.parametrize(
    ("stated", "kind", "name"),
    [(15, "Q4_0", "Q4_K_M"), (15, "F32", "F32"), (7, "Q8_0", "Q8_0"), (1000, "Q4_0", "Q4_0"), (None, "Q4_0", "Q4_0")],
)
def test_quantisation_is_called_by_its_mix(stated: int | None, kind: str, name: str, tmp_path: Path) -> None:
    """Unless the file states none, or one of other types than it has."""
    builder = tiny_gguf()
    if stated is not None:
        builder.add("general.file_type", U32, stated)
    for tensor in [one for one in builder.tensors if len(one.dims) > 1]:
        values = np.frombuffer(tensor.data, np.float32).reshape(-1, tensor.dims[0])
        tensor.type_id, tensor.data = block_type(kind).id, quantize(values, kind).tobytes()
    assert open_checkpoint(builder.write(tmp_path / "m.gguf")).quantisation == name


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    times = []
    for _ in range(3):
        start = time.process_time()
        checkpoint = open_checkpoint(smollm2)
        times.append(time.process_time() - start)
    assert min(times) < 0.1
    assert checkpoint.parameters == 134_515_008 and checkpoint.main_type == "Q4_1"
    config = checkpoint.config
    attention = config.layers[0].attention
    assert (config.n_layers, config.d_model, attention.n_heads, attention.n_kv_heads) == (30, 576, 9, 3)
    assert config.tied_embeddings and config.ropes == (RopeConfig(theta=100000.0, dim=64, interleaved=True),)
    for name in list(checkpoint.names()):
        checkpoint.take(name)
    checkpoint.finish()
    assert gguf_name("layers.0.q") == "blk.0.attn_q.weight"


def test_opening_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tiny_gguf().write(tmp_path / "m.gguf")
    program = (
        "import sys; from powerinfer.formats.checkpoint import open_checkpoint; "
        f"open_checkpoint({str(path)!r}).take('embed'); "
        "print([m for m in ('jinja2', 'tokenizers', 'safetensors', 'torch', 'concurrent.futures', 'json', 'asyncio') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
