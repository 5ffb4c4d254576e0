"""Latent attention beside its logits (test_architectures.py): files of either kind, bad ones, the cache in use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

families = pytest.importorskip("families")
gguf = pytest.importorskip("gguf")

from configs import small  # noqa: E402
from truth import Truth  # noqa: E402

from benchmarks.models import expert_models  # noqa: E402
from powerinfer import LLM, SamplingParams  # noqa: E402
from powerinfer.config import EngineConfig  # noqa: E402
from powerinfer.errors import ModelError  # noqa: E402
from powerinfer.formats import gguf_model  # noqa: E402
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from powerinfer.formats.gguf import read_gguf  # noqa: E402
from powerinfer.formats.quant import dequantize, quantize  # noqa: E402
from powerinfer.formats.tensors import RawTensor  # noqa: E402
from powerinfer.hardware import measure  # noqa: E402
from powerinfer.hardware.description import load  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import needs  # noqa: E402
from powerinfer.placement.shapes import checkpoint_model  # noqa: E402

HEADS, LATENTS, PLAIN, ROTATED, VALUES = 6, 64, 32, 16, 32  # of the case kimi-k2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model with `attn_k_b` and `attn_v_b`, and with `attn_kv_b`."""
    truth, folder = Truth(families.case_named("kimi-k2")), tmp_path_factory.mktemp("latents")
    layouts = {"k_b": "gguf", "kv_b": "gguf-kv-b"}
    return {name: truth.save(layout, folder / name) for name, layout in layouts.items()}


def changed(path: Path, keys: dict[str, Any], tensors: dict[str, RawTensor | None]) -> Checkpoint:
    """The file with other values of these keys of the architecture (None: none), and other tensors (None: none)."""
    file = read_gguf(path)
    for key, value in keys.items():
        file.metadata.pop(f"deepseek2.{key}", None)
        if value is not None:
            file.metadata[f"deepseek2.{key}"] = value
    for name, tensor in tensors.items():
        file.tensors.pop(name, None)
        if tensor is not None:
            file.tensors[name] = tensor
    return Checkpoint(gguf_model.open_gguf(file))


def floats(*shape: int) -> RawTensor:
    return RawTensor("F32", shape, np.zeros(4 * int(np.prod(shape)), np.uint8))


BAD = {
    "no kv_a": ({}, {"blk.1.attn_kv_a_mqa.weight": None}, r"blk\.1\.attn_kv_a_mqa\.weight is missing"),
    "no norm of latents": ({}, {"blk.1.attn_kv_a_norm.weight": None}, r"blk\.1\.attn_kv_a_norm\.weight is missing"),
    "neither k_b nor kv_b": ({}, {"blk.0.attn_k_b.weight": None}, r"blk\.0\.attn_k_b\.weight is missing"),
    "no v_b": ({}, {"blk.2.attn_v_b.weight": None}, r"blk\.2\.attn_v_b\.weight is missing"),
    "k_b as it was": ({}, {"blk.1.attn_k_b.weight": floats(HEADS, PLAIN, LATENTS)}, r"attn_k_b.* has shape"),
    "fewer latents": ({"attention.kv_lora_rank": 32}, {}, r"blk\.0\.attn_q_b\.weight has shape"),
    "no latents": ({"attention.kv_lora_rank": 0}, {}, r"attention\.kv_lora_rank is '0', not"),
    "no number of latents": ({"attention.kv_lora_rank": None}, {}, r"attention\.kv_lora_rank is missing"),
    "latents that are text": ({"attention.kv_lora_rank": "64"}, {}, r"attention\.kv_lora_rank is '64', not"),
    "other latents of queries": ({"attention.q_lora_rank": 21}, {}, r"attn_q_a\.weight has shape"),
    "no latents of queries": ({"attention.q_lora_rank": None}, {}, r"attn_q\.weight is missing"),
    "all of a head rotated": ({"attention.key_length_mla": 16}, {}, r"rope\.dimension_count is 16, and leaves nothing"),
    "values of no whole lanes": ({"attention.value_length_mla": 20}, {}, "20 dimensions, no multiple of 16"),
    "pairs that are not whole": (
        {"rope.dimension_count": 15, "attention.key_length": 79}, {}, "15 of a head's 15 dimensions cannot be rotated",
    ),
    "two heads in the cache": ({"attention.head_count_kv": 2}, {}, r"attention\.head_count_kv is '2', which"),
    "YaRN without its factor": ({"rope.scaling.yarn_log_multiplier": None}, {}, r"log_multiplier is missing: convert"),
    "an odd factor of YaRN": ({"rope.scaling.attn_factor": 1.5}, {}, r"rope\.scaling\.attn_factor is not 1"),
    "temperature": ({"attention.temperature_scale": 0.1}, {}, r"attention\.temperature_length is missing"),
    "more groups than experts": ({"expert_group_count": 9}, {}, r"expert_group_count is '9', not"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "tensors", "line"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_line(
    keys: dict[str, Any], tensors: dict[str, RawTensor | None], line: str, files: dict[str, Path]
) -> None:
    with pytest.raises(ModelError, match=line) as error:
        changed(files["k_b"], keys, tensors)
    assert "\n" not in str(error.value)


def test_a_file_may_say_the_same_twice(files: dict[str, Path]) -> None:
    both = {f"blk.{layer}.attn_kv_b.weight": floats(HEADS * (PLAIN + VALUES), LATENTS) for layer in range(3)}
    assert changed(files["k_b"], {}, both).tensor_list() == open_checkpoint(files["k_b"]).tensor_list()


def test_either_kind_of_file_gives_the_same_matrices(files: dict[str, Path]) -> None:
    newer, older = (open_checkpoint(files[name]) for name in ("k_b", "kv_b"))
    assert newer.config == older.config
    for name in ("layers.0.k_b", "layers.2.v_b"):
        assert np.array_equal(newer.take(name).float32(), older.take(name).float32())
    assert older.notes == ["transposing 3 k_b matrices of type F32"]


def test_quantised_keys_are_turned_head_by_head(files: dict[str, Path]) -> None:
    """From Q4_0 along the latents to Q8_0 along a head's keys: exact but for Q8_0's rounding. Values are as stored."""
    whole = read_gguf(files["kv_b"]).tensors["blk.1.attn_kv_b.weight"]
    blocks = quantize(whole.float32(), "Q4_0")
    stored = RawTensor("Q4_0", whole.shape, blocks.reshape(-1))
    wanted = dequantize(blocks, "Q4_0").reshape(HEADS, PLAIN + VALUES, LATENTS)
    checkpoint = changed(files["kv_b"], {}, {"blk.1.attn_kv_b.weight": stored})
    k, v = checkpoint.take("layers.1.k_b"), checkpoint.take("layers.1.v_b")
    assert (k.type, k.shape, v.type) == ("Q8_0", (HEADS, LATENTS, PLAIN), "Q4_0")
    turned = wanted[:, :PLAIN].swapaxes(1, 2)
    assert np.abs(k.float32() - turned).max() <= np.abs(turned).max() / 127 * 0.51
    assert np.array_equal(v.float32(), wanted[:, PLAIN:])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    expert_models.write(path, small(expert_models.CONFIGS["deepseek-v3"]), expert_models.Weights("q8_0"))
    return path


def test_prefixes_batches_and_types_of_the_cache(model: Path) -> None:
    """A prompt that begins like an earlier one, alone and with others: the tokens that it gives anew."""
    tokens = np.random.default_rng(5).integers(5, 1200, 90).tolist()
    prompts = [tokens[:70], tokens, tokens[:66] + tokens[80:]]
    settings = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for kv_type in ("f16", "q8_0", "f32"):
        with LLM(model, gpu="none", threads=2, context=128, kv_type=kv_type, prefill_chunk=32) as llm:
            reused = [llm.generate([prompt], settings)[0].token_ids for prompt in prompts]
            together = [answer.token_ids for answer in llm.generate(prompts, settings)]
        with LLM(model, gpu="none", threads=1, context=128, kv_type=kv_type, prefix_cache=False) as llm:
            anew = [llm.generate([prompt], settings)[0].token_ids for prompt in prompts]
        assert reused == together == anew


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_a_gpu_gives_the_answers_of_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without latents of queries; some experts on either device, and a layer that has none. Prompts in chunks,
    with a prefix that is there, together, and after one that was given up."""
    pytest.importorskip("torch")
    hardware = replace(load("pc-low"), sync_us=0.0)  # or so small a model would run on the CPU alone
    monkeypatch.setattr(measure, "measured", lambda *_, **__: hardware)
    path = tmp_path / "tiny.gguf"
    expert_models.write(path, small(expert_models.CONFIGS[name]), expert_models.Weights("f16", "f16"))
    tokens = np.random.default_rng(5).integers(5, 1200, 90).tolist()
    prompts = [tokens[:70], tokens, tokens[:66] + tokens[80:]]
    settings = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"threads": 1, "context": 128, "kv_type": "f32", "prefill_chunk": 40}
    with LLM(path, gpu="none", **options) as llm:
        wanted = [answer.token_ids for answer in llm.generate(prompts, settings)]
    checkpoint = open_checkpoint(path)
    every = needs(resolve(checkpoint, EngineConfig(gpu="cpu", **options))).vram
    room = every - 9 * checkpoint_model(checkpoint).expert_bytes(2)[0]
    for vram, experts in ((every, 16), (room, 7)):
        with LLM(path, gpu="cpu", vram=vram, **options) as llm:
            assert llm.choices["gpu"].startswith(f"3 layers and the head on cpu, {experts} of 16")
            for event in llm.stream(prompts[1], settings):
                if event.text is not None:
                    break
            assert [llm.generate([prompt], settings)[0].token_ids for prompt in prompts] == wanted
            assert [answer.token_ids for answer in llm.generate(prompts, settings)] == wanted
