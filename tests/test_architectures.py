"""Every architecture against `transformers`: the cases of families.py, as a Hugging Face folder and as a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest

families = pytest.importorskip("families")

import torch  # noqa: E402
from families import (  # noqa: E402
    CASES,
    TOKENS,
    Case,
    case_layouts,
    case_named,
    open_executor,
    prompt,
    random_model,
    rms,
    run_chunks,
    run_two,
    save,
    scattered_pages,
)
from truth import Truth  # noqa: E402

from benchmarks.placement.families_table import folder_types  # noqa: E402
from powerinfer import _native  # noqa: E402
from powerinfer.errors import ModelError  # noqa: E402
from powerinfer.formats import families as family_files  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.formats.families import CLASSES, FOLDERS, GGUFS  # noqa: E402
from powerinfer.formats.folder_config import read_config as read_folder_config  # noqa: E402
from powerinfer.formats.gguf import read_gguf  # noqa: E402
from powerinfer.formats.gguf_model import open_gguf  # noqa: E402


def test_every_family_has_a_case() -> None:
    assert set(FOLDERS) <= {case.kind for case in CASES}


def test_no_family_is_there_twice() -> None:
    files = [import_module(f"{family_files.__name__}.{file.name}") for file in iter_modules(family_files.__path__)]
    folders, ggufs = ([family for file in files for family in getattr(file, name, ())] for name in ("FOLDERS", "GGUFS"))
    assert len(FOLDERS) == len(folders) and len(GGUFS) == len(ggufs)
    alike = 1  # SparseLM and ProSparse call their class alike
    assert len(CLASSES) == sum(len(family.classes) for family in folders) - alike


def test_folders_of_models_with_pictures_are_listed_as_they_are_published() -> None:
    """In docs/models.md: by the `model_type` that their config.json has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as names

    published = {kind: name for kind, name in names.items() if isinstance(name, str)}
    with_pictures = [family for family in FOLDERS.values() if family.vision_class]
    assert len(with_pictures) > 8
    for family in with_pictures:
        kind = folder_types([family])[-1]
        assert published[kind] == family.vision_class, family.model_type


@pytest.mark.sampled("case.name", ("case", "layout"))
@pytest.mark.parametrize(("case", "layout"), case_layouts())
def test_logits(case: Case, layout: str, tmp_path: Path) -> None:
    check_logits(case, layout, tmp_path)


def check_logits(case: Case, layout: str, tmp_path: Path, **options: Any) -> None:
    check_file(Truth(case), Truth(case).save(layout, tmp_path), **options)


def check_file(truth: Truth, path: Path, **options: Any) -> None:
    executor = open_executor(path, **options)
    try:
        ours = run_chunks(executor, truth.texts[0], [TOKENS], scattered_pages(executor, 1)[0])
    finally:
        executor.close()
    assert ours.shape == truth.logits[0].shape
    truth.check(ours, texts=1)


@pytest.mark.sampled
@pytest.mark.parametrize("isa", _native.levels()[1:])
@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "mistral-window",
        "qwen3",
        "turbosparse",
        "opt-post-norm",
        "falcon-7b",
        "nemotron",
        "gemma3",
        "gemma3n",
        "olmo3",
        "gpt-oss",
    ],
)
def test_logits_on_every_instruction_set(name: str, isa: str, tmp_path: Path) -> None:
    check_level(name, isa, tmp_path)


@pytest.mark.parametrize("isa", _native.levels()[1:])
@pytest.mark.parametrize("name", ["deepseek-v2", "kimi-k2"])
def test_latents_on_every_instruction_set(name: str, isa: str, tmp_path: Path) -> None:
    check_level(name, isa, tmp_path)


def check_level(name: str, isa: str, tmp_path: Path) -> None:
    check_logits(case_named(name), "folder", tmp_path, isa=isa)


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_configuration_would_be_seen(case: Case) -> None:
    truth = Truth(case)
    assert rms(truth.mistaken - truth.logits[0]) > 100 * truth.allowed()


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chunks_batches_and_threads_give_the_same_bits(case: Case, tmp_path: Path) -> None:
    check_same_bits(case, Truth(case).save("folder", tmp_path))


@pytest.mark.parametrize(
    ("weights", "kv_type"),
    [("float16", "f16"), ("bfloat16", "q8_0"), ("q8_0", "f16"), ("q4_0", "q8_0"), ("float32", "f16")],
)
def test_same_bits_with_narrow_types(weights: str, kv_type: str, tmp_path: Path) -> None:
    case = Case("narrow", "llama", {"head_dim": 32, "intermediate_size": 96}, {})
    model = random_model(case, case.config(), seed=11)
    quantize = weights if weights.startswith("q") else None
    if quantize is None:
        model = model.to(getattr(torch, weights))
    path = save(case, model.config, model, "folder", tmp_path)
    check_same_bits(case, path, quantize=quantize, kv_type=kv_type)


@pytest.mark.parametrize(
    ("weights", "kv_type"), [("float16", "f16"), ("bfloat16", "q8_0"), ("q8_0", "f16"), ("q4_0", "q8_0")]
)
def test_latents_give_the_same_bits_with_narrow_types(weights: str, kv_type: str, tmp_path: Path) -> None:
    case = case_named("kimi-k2")
    model = random_model(case, case.config(), seed=11)
    quantize = weights if weights.startswith("q") else None
    if quantize is None:
        model = model.to(getattr(torch, weights))
    check_same_bits(case, save(case, model.config, model, "folder", tmp_path), quantize=quantize, kv_type=kv_type)


def check_same_bits(case: Case, path: Path, **options: Any) -> None:
    """Every way with one thread, and those that have a thread something to do with two."""
    tokens, other = prompt(case), prompt(case, seed=4)
    uneven = [1, 7, 32, 2, TOKENS - 42]
    executor = open_executor(path, **options)
    try:
        pages = scattered_pages(executor, 4)
        whole = run_chunks(executor, tokens, [TOKENS], pages[0])
        assert np.array_equal(run_chunks(executor, tokens, uneven, pages[1]), whole), "in chunks"
        assert np.array_equal(run_chunks(executor, tokens, [1] * TOKENS, pages[2]), whole), "token by token"
        alone = run_chunks(executor, other, [TOKENS], pages[3])
        together = run_two(executor, tokens, other, pages[2:])
        assert np.array_equal(together[0], whole[20:]) and np.array_equal(together[1], alone[50:]), "in a batch"
    finally:
        executor.close()
    two = open_executor(path, threads=2, **options)
    try:
        for chunks, own in (([TOKENS], pages[0]), (uneven, pages[1]), ([50, *[1] * 25], pages[2])):
            assert np.array_equal(run_chunks(two, tokens, chunks, own), whole), f"with two threads, in {len(chunks)}"
        together = run_two(two, tokens, other, pages[2:])
        assert np.array_equal(together[0], whole[20:]) and np.array_equal(together[1], alone[50:]), "both"
    finally:
        two.close()


def test_the_first_files_of_qwen3_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have q, k, v and z in one tensor, in the order of the folder."""
    truth, apart = Truth(case_named("qwen3-next")), families.delta_tensors

    def together(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        return iter([("ssm_in.weight", values)]) if name == "in_proj_qkvz" else apart(config, name, values)

    monkeypatch.setattr(families, "delta_tensors", together)
    check_file(truth, save(truth.case, truth.config, truth.model, "gguf", tmp_path))


def with_pictures(plain: Path, folder: Path) -> Path:
    """A folder of Qwen3.5 with experts as it is published: text within a model for pictures, experts in one tensor."""
    from safetensors.numpy import load_file, save_file

    found: dict[str, np.ndarray] = {}
    for shard in sorted(plain.glob("*.safetensors")):
        found |= load_file(shard)
    every = {name: found.pop(name) for name in list(found) if ".mlp.experts." in name}
    for layer in range(sum(name.endswith(".input_layernorm.weight") for name in found)):
        parts = {}
        for part in ("gate", "up", "down"):
            names = [f"model.layers.{layer}.mlp.experts.{i}.{part}_proj.weight" for i in range(6)]
            parts[part] = np.stack([every[name] for name in names])
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = parts["down"]
    found = {name.replace("model.", "model.language_model.", 1): values for name, values in found.items()}
    found |= {"model.visual.merger.norm.weight": np.ones(8, np.float32), "mtp.fc.weight": np.ones((8, 8), np.float32)}
    folder.mkdir()
    save_file({name: np.ascontiguousarray(values) for name, values in found.items()}, folder / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer | {"vision_config": {"depth": 1}}))
    return folder


def test_of_a_model_for_pictures_the_text_is_read(tmp_path: Path) -> None:
    truth = Truth(case_named("qwen35-moe"))
    plain, tokens = truth.save("folder", tmp_path / "plain"), truth.texts[0]
    whole = with_pictures(plain, tmp_path / "whole")
    assert open_checkpoint(whole).notes == ["only text is read: the part for pictures is left out"]
    found = []
    for path in (plain, whole):
        executor = open_executor(path)
        found.append(run_chunks(executor, tokens, [TOKENS], scattered_pages(executor, 1)[0]))
        executor.close()
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("mistral-head-dim", "language_model."), ("ministral3", "model.language_model."), ("mistral4", "language_model.")],
)
def test_the_text_within_a_model_for_pictures_is_of_its_own_family(name: str, prefix: str, tmp_path: Path) -> None:
    """As Mistral publishes them, under the names of either version of `transformers`."""
    from safetensors.numpy import load_file, save_file

    plain, whole = Truth(case_named(name)).save("folder", tmp_path / "plain"), tmp_path / "whole"
    stored = {key: tensor for part in plain.glob("*.safetensors") for key, tensor in load_file(part).items()}
    inner = {key.replace("model.", prefix, 1) if "model.l" in prefix else prefix + key: stored[key] for key in stored}
    begin = prefix.removesuffix("language_model.")
    pictures = {f"{begin}{key}.weight": np.ones(8, np.float32) for key in ("vision_tower.a", "multi_modal_projector.b")}
    whole.mkdir()
    save_file(inner | pictures, whole / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    del text["architectures"]
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (whole / "config.json").write_text(json.dumps(outer))
    found, expected = open_checkpoint(whole), open_checkpoint(plain)
    assert found.notes[0] == "only text is read: the part for pictures is left out"
    assert replace(found.config, name="") == replace(expected.config, name="")
    for tensor in ("embed", "head", "layers.0.attn_norm", "layers.1.o"):
        assert np.array_equal(found.take(tensor).float32(), expected.take(tensor).float32())


@pytest.mark.parametrize(
    ("name", "outer", "prefix"),
    [
        ("gemma3-no-windows", "Gemma3ForConditionalGeneration", "language_model.model."),
        ("gemma3n", "Gemma3nForConditionalGeneration", "model.language_model."),
        ("gemma4-e", "Gemma4ForConditionalGeneration", "model.language_model."),
        ("gemma4-unified", "Gemma4UnifiedForConditionalGeneration", "model.language_model."),
    ],
)
def test_of_gemma_for_pictures_the_text_is_read(name: str, outer: str, prefix: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = Truth(case_named(name)).save("folder", tmp_path)
    plain = open_checkpoint(path)
    stored = {name: tensor for part in sorted(path.glob("*.safetensors")) for name, tensor in load_file(part).items()}
    whole = tmp_path / "whole"
    whole.mkdir()
    named = {prefix + name.removeprefix("model."): tensor for name, tensor in stored.items()}
    of_pictures = dict.fromkeys(
        ("model.vision_tower.a.weight", "model.embed_vision.b.weight", "vision_tower.c.weight",
         "model.audio_tower.d.weight", "multi_modal_projector.e", "model.vision_embedder.f"), np.ones(8, np.float32),
    )  # fmt: skip
    save_file(named | of_pictures, whole / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"architectures": [outer], "text_config": text, "vision_config": {}}))
    read = open_checkpoint(whole)
    assert read.notes == ["only text is read: the part for pictures is left out"]
    assert read.config.layers == plain.config.layers and read.fingerprint == plain.fingerprint


def test_llama_4_for_pictures_is_read_as_text(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    truth = Truth(case_named("llama4"))
    folder = truth.save("folder", tmp_path)
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= {f"language_model.{name}": values for name, values in load_file(shard).items()}
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    found["multi_modal_projector.linear_1.weight"] = np.ones((8, 8), np.float32)
    save_file(found, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer | {"vision_config": {"depth": 1}}))
    assert open_checkpoint(folder).notes == ["only text is read: the part for pictures is left out"]
    check_file(truth, folder)


def test_what_predicts_further_tokens_is_left_out(tmp_path: Path) -> None:
    """Of ERNIE's folders, whose tensors of it have names of their own; other tensors are still refused."""
    from safetensors.numpy import load_file, save_file

    path = Truth(case_named("ernie-moe")).save("folder", tmp_path)
    parts, more = sorted(path.glob("*.safetensors")), np.zeros((4, 4), np.float32)
    stored = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    for part in (*parts, *path.glob("*.index.json")):
        part.unlink()
    weights = path / "model.safetensors"
    further = {f"model.mtp_{name}.0.weight": more for name in ("block", "linear_proj", "emb_norm")}
    save_file(stored | further, weights)
    assert open_checkpoint(path).config.n_layers == 3
    save_file(stored | {"model.other.weight": more}, weights)
    with pytest.raises(ModelError, match=r"model\.other\.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("laguna", {"gating_types": 2}, "gating_types is '2'; only per-head is supported"),
        ("laguna", {"gating_types": ["per-head", "per-element"]}, "only per-head is supported"),
        ("gemma4-e", {"vocab_size_per_layer_input": 100}, "the table of layers' inputs has 100 rows for 101 tokens"),
        ("cohere2-moe", {"shared_expert_combination_strategy": "most"}, "'most'; only average or sum is supported"),
        ("cohere2-moe", {"expert_selection_fn": "entmax"}, "'entmax'; only softmax or sigmoid is supported"),
        ("cohere2-moe", {"mlp_layer_types": ["dense"]}, "not dense or sparse for every layer"),
        ("cohere2-moe", {"num_shared_experts": 4096, "intermediate_size": 400}, "times intermediate_size is 1638400"),
        ("granite-moe-swa", {"layer_rope_theta": [0.5] * 5}, "holds 0.5, no base of frequencies"),
        ("plm", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "and rope_parameters are both set, and differ"),
        ("plm", {"hidden_act": "silu"}, "hidden_act is 'silu'; of this family only relu, relu2 is supported"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope is 'False'"),
        ("kimi-linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ("kimi-linear", {"linear_attn_config": 3}, "linear_attn_config is '3', not an object"),
        ("kimi-linear", {"linear_head_dim": 24}, "Kimi Delta Attention of 24 and 24 dimensions are no multiples of 16"),
        (
            "kimi-linear",
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1, "2"], "kda_layers": [3, 4, 5, 6]}},
            "does not name each of 5 layers once",
        ),
        ("olmo-clipped", {"clip_qkv": -1.0}, "clip_qkv is '-1.0', not a number"),
        (
            "hunyuan",
            {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 9.0}},
            "alpha is set for 2 rotated dimensions",
        ),
    ],
)
def test_odd_settings_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = Truth(case_named(name)).save("folder", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(folder)


def test_kimi_linear_as_published(tmp_path: Path) -> None:
    """What layers of Kimi Delta Attention are is in an object of their own, with the numbers of the others."""
    folder = Truth(case_named("kimi-linear")).save("folder", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    wanted = open_checkpoint(folder).config
    linear = {"head_dim": config.pop("linear_head_dim"), "num_heads": config.pop("linear_num_heads")}
    linear |= {"short_conv_kernel_size": config.pop("linear_conv_kernel_dim"), "full_attn_layers": [4]}
    del config["layer_types"], config["mlp_layer_types"]
    published = {"linear_attn_config": linear | {"kda_layers": [1, 2, 3, 5]}, "first_k_dense_replace": 1}
    published |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "head_dim": 72}
    (folder / "config.json").write_text(json.dumps(config | published))
    assert open_checkpoint(folder).config == wanted


def test_heads_of_kimi_linear_that_no_layer_has_are_refused(tmp_path: Path) -> None:
    file = read_gguf(Truth(case_named("kimi-linear")).save("gguf", tmp_path))
    strange = replace(file, metadata=file.metadata | {"kimi-linear.attention.head_count_kv": [0, 0, 0, 3, 0]})
    with pytest.raises(ModelError, match=r"attention\.head_count_kv holds 3, which is not supported"):
        open_gguf(strange)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-e"])
def test_some_layers_have_one_matrix_for_queries_keys_and_values(name: str, tmp_path: Path) -> None:
    """Of Gemma 4's GGUF files: not those whose keys are values, or which read the keys and values of others."""
    file = read_gguf(Truth(case_named(name)).save("gguf", tmp_path))
    plain, tensors = open_gguf(file), dict(file.tensors)
    for layer, kind in enumerate(plain.config.layers):
        if kind.heads.keys_as_values or kind.heads.kv_from is not None:
            continue
        q, k, v = (tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv")
        rows = sum(part.shape[0] for part in (q, k, v))
        data = np.concatenate([part.data for part in (q, k, v)])
        tensors[f"blk.{layer}.attn_qkv.weight"] = replace(q, shape=(rows, q.shape[1]), data=data)
    assert sum(name.endswith("attn_q.weight") for name in tensors) == {"gemma4": 2, "gemma4-e": 2}[name]
    found = open_gguf(replace(file, tensors=tensors))
    assert found.config == plain.config and found.tensors.keys() == plain.tensors.keys()
    for name, tensor in plain.tensors.items():
        assert np.array_equal(found.tensors[name].float32(), tensor.float32()), name


def test_a_matrix_of_more_than_the_layer_has_is_refused(tmp_path: Path) -> None:
    file = read_gguf(Truth(case_named("gemma4")).save("gguf", tmp_path))
    tensors = dict(file.tensors)
    for layer in range(4):
        q = tensors.pop(f"blk.{layer}.attn_q.weight")
        k, v = (tensors.pop(f"blk.{layer}.attn_{part}.weight", q) for part in "kv")
        rows = sum(part.shape[0] for part in (q, k, v))
        data = np.concatenate([part.data for part in (q, k, v)])
        tensors[f"blk.{layer}.attn_qkv.weight"] = replace(q, shape=(rows, q.shape[1]), data=data)
    with pytest.raises(ModelError, match=r"attn_qkv\.weight has shape \[360, 64\], not \[240, 64\]"):
        open_gguf(replace(file, tensors=tensors))


@pytest.mark.parametrize("window", [None, 0])
def test_a_window_that_a_family_always_has_must_be_stated(window: int | None, tmp_path: Path) -> None:
    """In layers without one, Cohere2 does not rotate positions."""
    file = read_gguf(Truth(case_named("cohere2")).save("gguf", tmp_path))
    metadata = file.metadata | {"cohere2.attention.sliding_window": window}
    message = r"cohere2\.attention\.sliding_window is (missing|'0', not a number from 1)"
    with pytest.raises(ModelError, match=message):
        open_gguf(replace(file, metadata={key: value for key, value in metadata.items() if value is not None}))


@pytest.mark.parametrize("name", ["seed-oss", "ernie"])
def test_head_dim_null_is_what_the_width_leaves(name: str, tmp_path: Path) -> None:
    """As in the classes, whose default for a missing key is another."""
    case = case_named(name)
    folder = Truth(case).save("folder", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    read = read_folder_config(config | {"head_dim": None}, folder)
    assert {layer.heads.head_dim for layer in read.layers} == {case.config(head_dim=None).head_dim} == {16}
    del config["head_dim"]
    missing = read_folder_config(config, folder)
    assert {layer.heads.head_dim for layer in missing.layers} == {128}


def test_global_layers_of_llama_4_see_everything(tmp_path: Path) -> None:
    """Also where a GGUF file states the size of the chunks of the others."""
    file = read_gguf(Truth(case_named("llama4")).save("gguf", tmp_path))
    stated = replace(file, metadata=file.metadata | {"llama4.attention.sliding_window": 8192})
    for one in (file, stated):
        layers = open_gguf(one).config.layers
        assert [layer.attention.window for layer in layers] == [8192, 8192, 8192, None]


def test_ministral_3_as_ollama_writes_it(tmp_path: Path) -> None:
    file = read_gguf(Truth(case_named("ministral3")).save("gguf", tmp_path))
    keys = {
        "attention.temperature_scale": "rope.scaling_beta",
        "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
    }
    renamed = {f"mistral3.{old}": f"mistral3.{new}" for old, new in keys.items()}
    assert renamed.keys() <= file.metadata.keys()
    metadata = {renamed.get(key, key): value for key, value in file.metadata.items()}
    metadata |= {"mistral3.rope.scaling.mscale": 1.0, "mistral3.image_token_index": 10}
    assert open_gguf(replace(file, metadata=metadata)).config == open_gguf(file).config
    with pytest.raises(ModelError, match="mscale"):
        open_gguf(replace(file, metadata=metadata | {"mistral3.rope.scaling.mscale": 0.7}))


def test_lfm2_as_ollama_writes_it(tmp_path: Path) -> None:
    file = read_gguf(Truth(case_named("lfm2")).save("gguf", tmp_path))
    tensors = {name.replace("token_embd_norm", "output_norm"): tensor for name, tensor in file.tensors.items()}
    assert open_gguf(replace(file, tensors=tensors)).tensors.keys() == open_gguf(file).tensors.keys()
