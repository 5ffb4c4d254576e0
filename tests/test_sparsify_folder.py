"""A model of a GGUF file as a Hugging Face folder: tensors, configuration and tokenizer, beside `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import (
    TOKENS,
    case_named,
    logits,
    open_executor,
    rms,
    run_chunks,
    scattered_pages,
)
from model_files import tiny_gguf
from test_tokenizer import CORPUS, HARD, byte_level_metadata, sentencepiece_metadata, valid
from truth import Truth

from benchmarks.models.gguf_writer import F32, STRING, U32
from powerinfer import RequestError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.tensors import float32_tensor
from powerinfer.text.model_text import tokenizer_of
from powerinfer.text.sampling_defaults import folder_defaults
from powerinfer.text.tokenizer_folder import tokenizer_from_folder
from powerinfer_train.as_folder import AsFolder, json_bytes
from powerinfer_train.recipes import StoredTypes
from powerinfer_train.writing import check_writable, write_model

EXACT = StoredTypes("f32")
WRITTEN = [
    "llama-gqa", "llama3", "llama-linear", "llama-yarn", "llama-biases", "llama-relu", "mistral-head-dim", "smollm2",
    "qwen2", "qwen2-yarn", "qwen3", "qwen3-moe", "qwen3-moe-some",
]  # fmt: skip


def without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizers of these models are none."""
    monkeypatch.setattr(AsFolder, "_tokenizer", lambda *_: {"config.json": {}})


@pytest.mark.parametrize("name", WRITTEN)
def test_a_gguf_file_as_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of the model that the file was made of, in `transformers`, and those of the file in this engine."""
    without_tokens(monkeypatch)
    monkeypatch.setattr("powerinfer_train.writing.SHARD", 50_000)
    truth = Truth(case_named(name), "gguf", tmp_path)
    tokens, file = truth.texts[0], truth.path
    checkpoint = open_checkpoint(file)
    about = {"hidden_act": checkpoint.config.activations}
    changed = ["layers.0.k", "layers.1.o"]
    check_writable(checkpoint, EXACT, changed, about, "folder")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"of an earlier training, of a smaller type")
    path = write_model(
        checkpoint,
        tmp_path / "out",
        EXACT,
        changed,
        lambda name: float32_tensor(2 * checkpoint.take(name).float32()),
        about,
        form="folder",
    )
    index = json.loads((path / "model.safetensors.index.json").read_text())
    written, shards = open_checkpoint(path), {file.name for file in path.glob("*.safetensors")}
    assert path == tmp_path / "out" and len(shards) > 1 and shards == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(nbytes for *_, nbytes in written.tensor_list())
    read = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        read.model.layers[0].self_attn.k_proj.weight /= 2
        read.model.layers[1].self_attn.o_proj.weight /= 2
    wanted = truth.narrow[0]
    assert rms(logits(read, tokens) - wanted) < 2e-5 * rms(wanted)
    again = write_model(checkpoint, tmp_path / "same", EXACT, [], checkpoint.take, about, form="folder")
    own = []
    for one in (file, again):
        executor = open_executor(one)
        try:
            own.append(run_chunks(executor, tokens, [TOKENS], scattered_pages(executor, 1)[0]))
        finally:
            executor.close()
    assert rms(own[1] - own[0]) < 1e-5 * rms(own[0])


def test_what_is_not_written_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_tokens(monkeypatch)
    for name, why in (
        ("olmo2", r"models of olmo2 are not written so \(only llama, qwen2, qwen3, qwen3moe\)"),
        ("mixtral", r"config\.json has no keys for all of its settings \(experts"),
    ):
        checkpoint = open_checkpoint(Truth(case_named(name)).save("gguf", tmp_path))
        with pytest.raises(RequestError, match=f"--format folder, .*model.gguf: {why}.*; --format same writes a GGUF"):
            check_writable(checkpoint, EXACT, [], {"hidden_act": "cats"}, "folder")
    checkpoint = tiny(tmp_path)
    for types, flag in (
        (StoredTypes("q8_0"), "--type q8_0"),
        (StoredTypes("same"), "--type same"),
        (StoredTypes("f16", "q5_1"), "--attention-type q5_1"),
        (StoredTypes("f16", "f16", "q4_0"), "--embedding-type q4_0"),
    ):
        with pytest.raises(RequestError, match=rf"weights are not written so in {flag} \(only bf16, f16, f32\); --fo"):
            check_writable(checkpoint, types, [], {"hidden_act": "cats"}, "folder")


# ---------------------------------------------------------------- tokenizers


def tiny(folder: Path, metadata: dict[str, Any] | None = None, **sampling: float) -> Checkpoint:
    """A tiny Llama; metadata: of another tokenizer."""
    builder = tiny_gguf()
    for name, value in sampling.items():
        builder.add(f"general.sampling.{name}", U32 if type(value) is int else F32, value)
    builder.add("tokenizer.chat_template", STRING, "{{ messages[0]['content'] }}é")
    path = folder / "tiny.gguf"
    builder.write(path)
    checkpoint = open_checkpoint(path)
    if metadata is not None:
        checkpoint.metadata = metadata
    return checkpoint


def side_files(form: AsFolder, folder: Path) -> Path:
    """The folder without its weights."""
    folder.mkdir()
    for name, document in (*form.files.items(), ("config.json", form.document)):
        (folder / name).write_bytes(json_bytes(document))
    return folder


def framed(pre: str) -> dict[str, Any]:
    return byte_level_metadata(pre) | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(lambda: byte_level_metadata("gpt-2"), id="gpt-2"),
        pytest.param(lambda: byte_level_metadata("qwen2"), id="qwen2"),
        pytest.param(lambda: byte_level_metadata("tekken"), id="tekken"),
        pytest.param(lambda: framed("llama-bpe"), id="llama-bpe"),
        pytest.param(lambda: sentencepiece_metadata("bpe"), id="sentencepiece"),
        pytest.param(lambda: sentencepiece_metadata("bpe", prefix=False), id="sentencepiece-no-prefix"),
    ],
)
def test_tokenizers_as_files(metadata: Any, tmp_path: Path) -> None:
    check_tokens(tiny(tmp_path, metadata()), tmp_path / "folder")


def test_the_default_models_tokenizer_as_files(smollm2: Path, tmp_path: Path) -> None:
    folder = check_tokens(open_checkpoint(smollm2), tmp_path / "folder")
    said = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True
    )
    assert said.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")


def check_tokens(checkpoint: Checkpoint, folder: Path) -> Path:
    """The ids of the GGUF file's tokenizer, from the files, here and in `transformers`; the folder."""
    side_files(AsFolder(checkpoint, StoredTypes("bf16")), folder)
    known, own = tokenizer_of(checkpoint), tokenizer_from_folder(folder)
    assert own.vocabulary.added == known.vocabulary.added and own.chat_template == known.chat_template
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    special = "".join(token.text for token in known.vocabulary.added)
    for text in [*HARD, *CORPUS, f"a{special} b {special}\n 12  ", PADDED]:
        ids = known.encode(text)
        assert own.encode(text) == ids and own.encode(text, special=False) == known.encode(text, special=False), text
        twice = known.add_bos and text.startswith(known.token_text(known.bos_id))  # transformers puts it there again
        assert reference.encode(valid(text))[twice:] == ids, text[:80]
        assert own.decode(ids) == known.decode(ids), text[:80]
        assert reference.decode(ids, skip_special_tokens=True) == known.decode(ids), text[:80]
    return folder


PADDED = "[PAD6] [PAD40][PAD7]"


def test_rows_without_a_token_have_none_in_the_files(tmp_path: Path) -> None:
    metadata = byte_level_metadata("smollm")
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"].tolist(), 5, 5]
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], f"[PAD{size}]", "[UNUSED_1]"]
    folder = check_tokens(tiny(tmp_path, metadata), tmp_path / "folder")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert f"[PAD{size}]" not in vocabulary and vocabulary["[UNUSED_1]"] == size + 1


def test_a_tokenizer_that_is_not_bpe(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--format folder, .*its tokenizer is not BPE"):
        AsFolder(tiny(tmp_path, sentencepiece_metadata("unigram")), EXACT)


@pytest.mark.parametrize(
    ("stated", "written"),
    [
        ({}, None),
        ({"temp": 0.7, "top_k": 20}, {"do_sample": True, "temperature": 0.7, "top_k": 20}),
        ({"temp": 0.0, "penalty_repeat": 1.5, "top_p": 0.5}, {"do_sample": False, "repetition_penalty": 1.5}),
    ],
)
def test_how_it_is_sampled(stated: dict[str, float], written: dict[str, Any] | None, tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path, **stated)
    folder = side_files(AsFolder(checkpoint, EXACT), tmp_path / "folder")
    path = folder / "generation_config.json"
    assert path.exists() == (written is not None)
    if written is not None:
        document = json.loads(path.read_text())
        assert written.items() <= document.items() and document["eos_token_id"] == 0 and "top_p" not in document
        read = transformers.GenerationConfig.from_pretrained(folder)
        assert all(getattr(read, name) == value for name, value in written.items())
        left = {name: value for name, value in written.items() if name != "do_sample"}
        assert folder_defaults(folder).values == ({} if written["do_sample"] else {"temperature": 0.0}) | left
