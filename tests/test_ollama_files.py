"""GGUF files as Ollama's converters write them: what they say must be what the folder says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

families = pytest.importorskip("families")

from families import Case, case_named  # noqa: E402
from truth import Truth  # noqa: E402

from powerinfer.config import RopeConfig  # noqa: E402
from powerinfer.errors import ModelError  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.gguf import GGUFFile, read_gguf  # noqa: E402
from powerinfer.formats.gguf_model import open_gguf  # noqa: E402
from powerinfer.formats.source import NO_MTP, ONLY_TEXT, Source  # noqa: E402


def file_of(case: Case | str, tmp_path: Path) -> GGUFFile:
    return read_gguf(Truth(case_named(case) if isinstance(case, str) else case).save("gguf", tmp_path))


def with_keys(file: GGUFFile, **keys: Any) -> GGUFFile:
    """The file with other keys of its architecture; None: without."""
    prefix = file.metadata["general.architecture"]
    metadata = file.metadata | {f"{prefix}.{key}": value for key, value in keys.items()}
    return replace(file, metadata={key: value for key, value in metadata.items() if value is not None})


def renamed(file: GGUFFile, old: str, new: str) -> GGUFFile:
    assert any(old in name for name in file.tensors)
    return replace(file, tensors={name.replace(old, new): tensor for name, tensor in file.tensors.items()})


def test_lfm2_states_the_size_that_the_class_adjusts(tmp_path: Path) -> None:
    plain = file_of("lfm2", tmp_path)
    expected = open_gguf(plain)
    size = expected.config.ffn_sizes[0]
    for stated in (132, 1 << 19, None):
        found = open_gguf(renamed(with_keys(plain, feed_forward_length=stated), "token_embd_norm", "output_norm"))
        assert found.config == expected.config and found.config.ffn_sizes == (size,) * 3
        note = f"FFNs have {size} neurons, not feed_forward_length {stated}, as in Ollama"
        assert [one for one in found.notes if "neurons" in one] == ([note] if stated else [])
    assert not any("neurons" in note for note in expected.notes)


def test_sizes_of_other_families_are_as_stated(tmp_path: Path) -> None:
    plain = file_of("seed-oss", tmp_path)
    with pytest.raises(ModelError, match=r"ffn_gate\.weight has shape \[88, 64\], not \[80, 64\]"):
        open_gguf(with_keys(plain, feed_forward_length=80))


OF_LLAMA_4 = {
    "use_qk_norm": True, "attention.chunk_size": 8192, "attention.head_dim": 16, "vocab_size": 101,
    "vision.block_count": 34, "vision.rope.freq_base": 1e4, "vision.pixel_shuffle_ratio": 0.5,
}  # fmt: skip


def test_llama_4(tmp_path: Path) -> None:
    plain = file_of("llama4", tmp_path)
    expected = open_gguf(plain).config
    assert open_gguf(with_keys(plain, **OF_LLAMA_4)).config == expected
    changed = open_gguf(with_keys(plain, **OF_LLAMA_4 | {"use_qk_norm": False, "attention.chunk_size": 20})).config
    case = case_named("llama4")
    other = replace(case, settings={"use_qk_norm": False, "attention_chunk_size": 20})
    folder = open_checkpoint(Truth(other).save("folder", tmp_path)).config
    for found, wanted in zip(changed.layers, folder.layers, strict=True):
        rope = None if found.heads.rope is None else wanted.heads.rope  # which its divisors change
        assert replace(found.heads, rope=rope) == wanted.heads
    assert [layer.heads.qk_norm for layer in changed.layers] == [None] * 4 != [
        layer.heads.qk_norm for layer in expected.layers
    ]


OF_LAGUNA = {
    "attention.sink_enabled": False, "attention.gating_type": 1, "attention.qk_norm": True, "decoder_sparse_step": 1,
    "attention.layer_types": [0, 1, 1, 1], "attention.sliding_window_pattern": [False, True, True, True],
    "dense_layers": [0], "expert_shared_count": 1, "rope.partial_rotary_factor": 0.5,
    "rope.dimension_count_swa": None, "rope.freq_base_swa": None, "rope.swa.dimension_count": 16,
    "rope.swa.freq_base": 2e4, "rope.swa.scaling.type": "linear", "rope.swa.scaling.factor": 1.0,
    "rope.swa.partial_rotary_factor": 1.0, "rope.scaling.type": "default", "rope.scaling.factor": 1.0,
    "rope.scaling.original_context_length": 0, "rope.scaling.beta_fast": 0.0, "rope.scaling.beta_slow": 0.0,
    "rope.scaling.attn_factor": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("missing", ["", "attention.sliding_window_pattern", "attention.layer_types"])
def test_laguna(missing: str, tmp_path: Path) -> None:
    plain = file_of("laguna", tmp_path)
    keys = OF_LAGUNA | ({missing: None} if missing else {})
    found = open_gguf(renamed(with_keys(plain, **keys), "attn_gate", "attn_g"))
    assert found.config == open_gguf(plain).config and found.tensors.keys() == open_gguf(plain).tensors.keys()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sink_enabled", True), ("attention.gating_type", 0), ("attention.qk_norm", False),
        ("decoder_sparse_step", 2), ("dense_layers", [0, 2]), ("rope.swa.scaling.factor", 4.0),
        ("rope.swa.scaling.type", "yarn"), ("attention.layer_types", [0, 1, 2, 1]),
    ],
)  # fmt: skip
def test_what_laguna_does_not_do_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    keys = OF_LAGUNA | {"attention.sliding_window_pattern": None, key: value}
    with pytest.raises(ModelError, match=f"laguna.{key} is "):
        open_gguf(with_keys(file_of("laguna", tmp_path), **keys))


@pytest.mark.parametrize("factor", [1.0, 1.1386294])
@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_lagunas_factor_is_the_whole_one(key: str, factor: float, tmp_path: Path) -> None:
    """As in transformers: of Ollama's files and of llama.cpp's, which call it otherwise."""
    case = case_named("laguna-yarn")
    full, sliding = case.settings["rope_parameters"].values()
    rope = full | {"attention_factor": factor}
    case = replace(case, settings={"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}})
    expected = open_checkpoint(Truth(case).save("folder", tmp_path)).config
    file = file_of(replace(case, metadata={"attention.sliding_window": 20}), tmp_path)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32, key: factor}
    keys = {f"rope.scaling.{name}": value for name, value in scaling.items()}
    ollama = {"rope.swa.freq_base": 1e4, "rope.freq_base_swa": None} if key == "attn_factor" else {}
    found = open_gguf(with_keys(file, **keys | ollama))
    assert [layer.attention for layer in found.config.layers] == [layer.attention for layer in expected.layers]
    of_global = found.config.layers[0].heads.rope
    assert isinstance(of_global, RopeConfig) and of_global.attention_factor == pytest.approx(factor)
    assert [note for note in found.notes if "YaRN" in note] == [
        f"{key} 1 replaces YaRN's 1.139, as in transformers"
    ] * (factor == 1)


def test_factors_of_gemma_4s_experts(tmp_path: Path) -> None:
    plain = file_of("gemma4-experts", tmp_path)
    older = renamed(plain, "ffn_down_exps.scale", "ffn_gate_inp.per_expert_scale")
    vision = replace(older, tensors=older.tensors | {"model.vision_tower.std": older.tensors["output_norm.weight"]})
    expected, found = open_gguf(plain), open_gguf(vision)
    assert found.config == expected.config and found.tensors.keys() == expected.tensors.keys()
    for name in (name for name in expected.tensors if name.endswith("router_factors")):
        assert np.array_equal(found.tensors[name].float32(), expected.tensors[name].float32())


def called(file: GGUFFile, architecture: str) -> GGUFFile:
    """The file with its keys under another architecture."""
    old = file.metadata["general.architecture"]
    metadata = {
        f"{architecture}{key.removeprefix(old)}" if key.startswith(f"{old}.") else key: value
        for key, value in file.metadata.items()
    }
    return replace(file, metadata=metadata | {"general.architecture": architecture})


def with_tensors(file: GGUFFile, *names: str) -> GGUFFile:
    """The file with further tensors, of which no layer knows."""
    return replace(file, tensors=file.tensors | dict.fromkeys(names, file.tensors["output_norm.weight"]))


def fused(file: GGUFFile, sources: list[int]) -> GGUFFile:
    """The file with one tensor of q, k and v in each layer, keys and values those of the layer that `sources` says."""
    tensors = {name: tensor for name, tensor in file.tensors.items() if ".attn_" not in name or "_norm" in name}
    tensors |= {name: tensor for name, tensor in file.tensors.items() if ".attn_output" in name or "sinks" in name}
    for layer, source in enumerate(sources):
        for kind in ("weight", "bias"):
            names = f"blk.{layer}.attn_q.{kind}", f"blk.{source}.attn_k.{kind}", f"blk.{source}.attn_v.{kind}"
            parts = [file.tensors[name] for name in names if name in file.tensors]
            if not parts:
                continue
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            data = np.concatenate([part.data for part in parts])
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = replace(parts[0], shape=shape, data=data)
    return replace(file, tensors=tensors)


def check_same(found: Source, expected: Source) -> None:
    assert replace(found.config, architecture=expected.config.architecture) == expected.config
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert np.array_equal(found.tensors[name].float32(), tensor.float32()), name


@pytest.mark.parametrize("together", [False, True])
def test_gpt_oss(together: bool, tmp_path: Path) -> None:
    plain = file_of("gpt-oss-yarn", tmp_path)
    file = with_keys(called(plain, "gptoss"), **{"rope.scaling.type": None, "expert_feed_forward_length": None})
    file = fused(file, [0, 1, 2, 3]) if together else file
    names = {".attn_output.": ".attn_out.", ".attn_sinks.weight": ".attn_sinks", ".post_attention_norm.": ".ffn_norm."}
    for old, new in names.items():
        file = renamed(file, old, new)
    key = "tokenizer.ggml.pre"
    for stated, pre in (({}, "gpt-4o"), ({key: "default"}, "gpt-4o"), ({key: "a"}, "a")):
        found = open_gguf(replace(file, metadata=file.metadata | stated))
        check_same(found, open_gguf(plain))
        assert found.metadata[key] == pre and key not in open_gguf(plain).metadata


@pytest.mark.parametrize("factor", [1.1386294, 1.5])
@pytest.mark.parametrize("architecture", ["olmo3", "olmo2"])  # the second: llama.cpp's first files, too
def test_olmo_3(architecture: str, factor: float, tmp_path: Path) -> None:
    plain = file_of("olmo3", tmp_path)
    ollama = with_keys(called(plain, architecture), **{"attention.sliding_window_pattern": [True, True, True, False]})
    check_same(open_gguf(ollama), open_gguf(plain))
    found = open_gguf(with_keys(ollama, **{"rope.scaling.attn_factor": factor}))
    rope = found.config.layers[3].heads.rope
    assert rope is not None and rope.attention_factor == pytest.approx(factor)
    notes = [] if factor < 1.2 else ["attn_factor 1.5 replaces YaRN's 1.139, as in transformers"]
    assert [note for note in found.notes if "YaRN" in note] == notes


def test_glm_4_7_flash(tmp_path: Path) -> None:
    plain = file_of("glm4-moe-lite", tmp_path)
    names = "attention.key_length", "attention.value_length"
    lengths = {name: plain.metadata[f"deepseek2.{name}_mla"] for name in names}
    keys = lengths | {f"{name}_mla": plain.metadata[f"deepseek2.{name}"] for name in names}
    keys |= {"attention.head_count_kv": 4}
    file = called(plain, "glm4moelite")
    check_same(open_gguf(with_keys(file, **keys)), open_gguf(plain))
    with pytest.raises(ModelError, match=r"attention.value_length_mla is '23', which this engine does not support"):
        open_gguf(with_keys(file, **keys | {"attention.value_length_mla": 23}))


def test_nemotron_3_with_pictures(tmp_path: Path) -> None:
    plain = file_of("nemotron-h-latents", tmp_path)
    keys = {"moe_latent_size": None, "vision.block_count": 3, "audio.scale_input": False}
    file = with_keys(called(plain, "nemotron_h_omni"), **keys)
    for end, new in (("down", "in"), ("up", "out")):
        file = renamed(file, f"ffn_latent_{end}", f"ffn_latent_{new}")
    found = open_gguf(with_tensors(file, "mtp.layers.0.norm.weight", "v.blk.0.ln1.weight", "a.blk.0.ln1.weight"))
    check_same(found, open_gguf(plain))
    assert [note for note in found.notes if note in (NO_MTP, ONLY_TEXT)] == [ONLY_TEXT, NO_MTP]


@pytest.mark.parametrize("heads", [[0, 0, 0, 2], [0] * 4, [0, 2]])
def test_qwen_3_5(heads: list[int], tmp_path: Path) -> None:
    plain = file_of("qwen35-moe", tmp_path)
    keys = {
        "attention.head_count_kv": heads, "attention.recurrent_layers": None, "feed_forward_length": 0,
        "ssm.v_head_reordered": True, "image_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7,
    }  # fmt: skip
    file = with_tensors(renamed(with_keys(plain, **keys), ".ssm_dt.bias", ".ssm_dt"), "mtp.fc.weight")
    if heads != [0, 0, 0, 2]:
        with pytest.raises(ModelError, match=r"qwen35moe\.attention\.head_count_kv is "):
            open_gguf(file)
        return
    found = open_gguf(file)
    check_same(found, open_gguf(plain))
    assert NO_MTP in found.notes


def test_queries_in_one_tensor_with_keys_that_a_layer_shares(tmp_path: Path) -> None:
    """Of Gemma 4, as llama.cpp's converter fuses matrices of folders of before transformers 5.5.2."""
    plain = file_of("gemma4-e", tmp_path)
    expected = open_gguf(plain)
    shared = [layer.heads.kv_from for layer in expected.config.layers]
    sources = [layer if source is None else source for layer, source in enumerate(shared)]
    assert sources[-1] != len(sources) - 1
    check_same(open_gguf(fused(plain, sources)), expected)
