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
