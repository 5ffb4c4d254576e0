"""The model in torch that is trained, beside `transformers`, for every family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from families import CASES, Case, prompt, rms
from model_files import tiny_folder
from truth import Truth

from benchmarks.models.vocabulary import write_tokenizer_files
from powerinfer import ModelError, RequestError
from powerinfer.config import FfnConfig
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.tensors import float32_tensor
from powerinfer.text.model_text import tokenizer_of
from powerinfer.text.tokenizer_gguf import PRE_TOKENIZERS, tokenizer_from_gguf
from powerinfer_train.as_gguf import ARCHITECTURES, SPLITS, AsGGUF
from powerinfer_train.other_format import PROBE
from powerinfer_train.recipes import StoredTypes, check_recipe, moved_biases, trained_names
from powerinfer_train.torch_model import TorchModel, _Rms, activate, load
from powerinfer_train.writing import check_writable, write_model

REFUSALS = {
    **dict.fromkeys(
        ("nemotron_h", "granitemoehybrid", "falcon_h1", "mamba2", "lfm2", "lfm2_moe", "kimi_linear"),
        "Mamba2, short convolutions or Kimi Delta Attention",
    ),
    "gemma4-experts": "experts with norms of their own",
    **dict.fromkeys(("gemma3n_text", "gemma4-e", "gemma4-e-wide"), "inputs of layers"),
}
"""Parts of models that are not trained, by the kind or the name of cases."""

# Granite's attention alone is trained
REFUSED = [
    case for case in CASES if REFUSALS.keys() & {case.kind, case.name} and case.name != "granite-h-attention"
]
TRAINED = [case for case in CASES if case not in REFUSED]


def layouts() -> list[Any]:
    """Every case in every layout of its tensors; a folder's config.json of another version for some."""
    every = [(case, layout) for case in TRAINED for layout in case.layouts]
    older = ("llama-gqa", "gemma3", "phi3-long", "qwen3-moe", "deepseek-v2")
    return [
        pytest.param(case, layout, id=f"{case.name}-{layout}")
        for case, layout in every
        if layout != "folder-v4" or case.name in older
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "layout"), layouts())
def test_every_file_is_written_again(case: Case, layout: str, tmp_path: Path) -> None:
    """Matrices of any layout get new values, and nothing else changes but the activation."""
    checkpoint = open_checkpoint(Truth(case).save(layout, tmp_path))
    kind, about = checkpoint.config.layers[-1].ffn.activation, {"hidden_act": "relu"}
    if kind not in ("silu", "gelu_tanh", "swiglu_oai"):
        pytest.skip(f"no recipe is for {kind}")
    names = (*trained_names(checkpoint.config)[1], *moved_biases(checkpoint.config))
    if (kind == "swiglu_oai" or case.kind == "llama4_text") and layout != "gguf":  # gate and up in turn, or transposed
        with pytest.raises(ModelError, match="cannot be replaced: take the model as a GGUF file"):
            check_writable(checkpoint, StoredTypes("f16"), names, about)
        return
    if case.kind == "muse_glimmer_text" and layout != "gguf":  # whose config.json is that of a model for pictures
        with pytest.raises(RequestError, match="folders of muse_glimmer_text cannot state an activation"):
            check_writable(checkpoint, StoredTypes("f16"), names, about)
        return
    check_writable(checkpoint, StoredTypes("f16"), names, about)
    path = write_model(
        checkpoint,
        tmp_path / "out",
        StoredTypes("f16"),
        names,
        lambda name: float32_tensor(-2 * values(checkpoint, name)),
        about,
    )
    written = open_checkpoint(path)
    for one, before in zip(written.config.layers, checkpoint.config.layers, strict=True):
        assert one == replace(before, ffn=replace(before.ffn, activation="relu"))
    assert set(written.names()) == set(checkpoint.names())
    for name in checkpoint.names():
        factor = -2 if name.removesuffix("_rows") in names else 1
        own, wanted = values(written, name), values(checkpoint, name) * factor
        assert np.allclose(own, wanted, rtol=2**-7, atol=1e-5), name
    if case.name in ("llama-gqa", "openelm", "qwen35"):
        add_thresholds(written, tmp_path)


FOLDERS = [case for case in CASES if case.kind in ARCHITECTURES and "folder" in case.layouts]


@pytest.mark.sampled
@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: case.name)
def test_a_folder_as_gguf(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, or a refusal; the tokenizers of these models are none."""
    monkeypatch.setattr(AsGGUF, "_tokenizer", lambda *_: {})
    checkpoint = open_checkpoint(Truth(case).save("folder", tmp_path))
    about = {"hidden_act": checkpoint.config.activations}
    if case.name.endswith(("-window", "-yarn", "-no-windows")) or case.name == "mistral-relu":
        with pytest.raises(RequestError, match=r"--format gguf, .*: (GGUF has no keys|its scaling of the rotary)"):
            check_writable(checkpoint, StoredTypes("f16"), [], about, "gguf")
        return
    check_writable(checkpoint, StoredTypes("f16"), [], about, "gguf")
    doubled = ["layers.0.k", "layers.1.down"] if "layers.1.down" in checkpoint.names() else ["layers.0.k"]
    path = write_model(
        checkpoint,
        tmp_path,
        StoredTypes("f16"),
        doubled,
        lambda name: float32_tensor(2 * values(checkpoint, name)),
        about,
        form="gguf",
    )
    written = open_checkpoint(path)
    assert {kind for name, kind, *_ in written.tensor_list() if name.endswith(("gate", "q", "embed"))} == {"F16"}
    tokens = torch.from_numpy(prompt(3).astype(np.int64))[None]
    logits = []
    for one in (checkpoint, written):
        weights = load(one)
        for name in doubled if one is checkpoint else ():
            weights[name] = 2 * weights[name]
        model = TorchModel(one.config, weights, torch.float32)
        with torch.no_grad():
            logits.append(model.logits(model.states(tokens)).numpy())
    assert rms(logits[1] - logits[0]) < 5e-3 * rms(logits[0])


@pytest.mark.parametrize("split", SPLITS)
def test_a_tokenizer_as_gguf(split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every split of words is recognised by the tokens of the probe, which merges across words tell apart."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learnt.train_from_iterator([PROBE] * 3, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    model = json.loads(learnt.to_str())["model"]
    pieces = [*sorted(model["vocab"], key=model["vocab"].get), "<reponame>", "[PAD]", "<stop>", "<|im_end|>", "<tool>"]
    size = len(pieces) + 3
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [1] * (len(pieces) - 5) + [3, 3, 3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": len(pieces) - 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    engine = tokenizer_from_gguf(metadata)._engine._full
    engine.decoder = decoders.ByteLevel()
    folder = tiny(tmp_path, size, monkeypatch)
    (folder / "tokenizer.json").write_text(engine.to_str())
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": templates}))
    ends = [len(pieces) - 2, len(pieces) - 3]  # the second by its id alone; others by their names
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    made = AsGGUF(open_checkpoint(folder), StoredTypes("q8_0")).metadata
    assert PRE_TOKENIZERS[made["tokenizer.ggml.pre"]].patterns == PRE_TOKENIZERS[split].patterns
    assert made["tokenizer.ggml.tokens"][:-3] == pieces and made["tokenizer.ggml.tokens"][-1] == f"[PAD{size - 1}]"
    assert made["tokenizer.ggml.token_type"][-5:] == [3, 4, 5, 5, 5] and made["tokenizer.chat_template"] == "{{ 1 }}"
    path = write_model(
        open_checkpoint(folder),
        tmp_path,
        StoredTypes("q8_0"),
        [],
        lambda _: float32_tensor(np.zeros(0, np.float32)),
        {"hidden_act": "silu"},
        form="gguf",
    )
    read, known = tokenizer_of(open_checkpoint(path)), tokenizer_of(open_checkpoint(folder))
    text = PROBE + "<|im_end|><tool>" + PROBE
    assert read.encode(text) == known.encode(text) and read.chat_template == known.chat_template
    assert read.eos_ids == known.eos_ids == {*range(len(pieces) - 5, len(pieces) - 1)}


def tiny(folder: Path, vocab: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("model_files.VOCAB", vocab)
    return tiny_folder(folder / "tiny")


def test_tokenizers_that_gguf_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path, 1200, monkeypatch)
    write_tokenizer_files(folder, 1200)
    assert AsGGUF(open_checkpoint(folder), StoredTypes("q8_0")).metadata["tokenizer.ggml.pre"] == "gpt-2"
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    words = {"type": "Split", "pattern": {"Regex": "[aeiou]+"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    stripping = [token | {"lstrip": True} for token in document["added_tokens"]]
    scored = {"decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}}
    for change, why in (
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]}}, "splits words, or ends answers"),
        ({"added_tokens": stripping}, "take the spaces around them"),
        (scored, "neither byte-level BPE nor"),
    ):
        path.write_text(json.dumps(document | change))
        with pytest.raises(RequestError, match=f"--format gguf, .*{why}.*; --format same writes a folder"):
            AsGGUF(open_checkpoint(folder), StoredTypes("q8_0"))
    write_tokenizer_files(folder, 1300)
    with pytest.raises(RequestError, match="it has 1300 tokens, and 1200 rows in the embedding"):
        AsGGUF(open_checkpoint(folder), StoredTypes("q8_0"))


def add_thresholds(checkpoint: Checkpoint, folder: Path) -> None:
    """Thresholds of neurons are added, stay, are replaced, and go; the other tensors keep their values."""
    draw = np.random.default_rng(1)

    def write(source: Checkpoint, to: str, about: dict[str, Any], added: dict[str, np.ndarray]) -> Checkpoint:
        check_writable(source, StoredTypes("f16"), [], about)
        made = open_checkpoint(
            write_model(
                source,
                folder / to,
                StoredTypes("f16"),
                ["layers.0.up"],
                lambda name: float32_tensor(values(checkpoint, name)),
                about,
                added,
            )
        )
        for name in checkpoint.names():
            assert np.array_equal(values(made, name), values(checkpoint, name)), name
        index = made.path / "model.safetensors.index.json"
        if index.exists():
            sizes = sum(nbytes for *_, nbytes in made.tensor_list())
            assert json.loads(index.read_text())["metadata"]["total_size"] == sizes
        return made

    def thresholds(seed: int) -> dict[str, np.ndarray]:
        sizes = enumerate(checkpoint.config.ffn_sizes)
        return {f"layers.{n}.threshold": draw.random(size, np.float32) for n, size in sizes}

    first, second = thresholds(1), thresholds(2)
    one = write(checkpoint, "one", {"hidden_act": "cats"}, first)
    same = write(one, "same", {"hidden_act": "fatrelu"}, {})
    for made, added in ((one, first), (same, first), (write(same, "other", {"hidden_act": "cats"}, second), second)):
        assert all(layer.neurons.thresholds for layer in made.config.layers)
        assert all(np.array_equal(values(made, name), wanted) for name, wanted in added.items())
        assert made.fingerprint != checkpoint.fingerprint
    limits = [0.25] * checkpoint.config.n_layers
    of_layers = write(one, "layers", {"hidden_act": "cats", "hidden_act_param": limits}, {})
    assert [layer.neurons.threshold for layer in of_layers.config.layers] == limits
    assert set(of_layers.names()) == set(checkpoint.names())
    assert set(write(of_layers, "again", {"hidden_act": "cats"}, first).names()) == set(one.names())
    assert set(write(one, "relu", {"hidden_act": "relu"}, {}).names()) == set(checkpoint.names())


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.take(name).float32()


@pytest.mark.sampled
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_logits(case: Case, tmp_path: Path) -> None:
    truth = Truth(case)
    checkpoint = open_checkpoint(truth.save(case.layouts[0], tmp_path))
    weights = load(checkpoint)
    own = TorchModel(checkpoint.config, weights, torch.float32)
    with torch.no_grad():
        mine = own.logits(own.states(torch.from_numpy(truth.texts[0].astype(np.int64))[None]))[0].numpy()
    assert rms(mine - truth.logits[0]) < 1e-4 * rms(truth.logits[0])


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_models_that_are_not_trained(case: Case, tmp_path: Path) -> None:
    config = open_checkpoint(Truth(case).save(case.layouts[0], tmp_path)).config
    part = REFUSALS.get(case.kind) or REFUSALS[case.name]
    with pytest.raises(RequestError, match=f"^models with {part} are not trained so far"):
        check_recipe("reglu", replace(config, logit_cap=None))  # which is a reason of its own


@pytest.mark.parametrize("name", ["cats", "fatrelu"])
def test_thresholds_of_neurons(name: str) -> None:
    draw = np.random.default_rng(1)
    gate, up = (draw.standard_normal((5, 64)).astype(np.float32) for _ in range(2))
    limits = draw.random(64, np.float32) / 4
    about = FfnConfig(64, name, thresholds=True)
    given = [torch.from_numpy(values) for values in (gate, up, limits, limits[::-1].copy())]
    own, both = activate(about, *given[:3]), activate(about, *given)
    assert np.allclose(own, reference.activate(name, gate, up, limits), atol=1e-6)
    assert not np.allclose(own, reference.activate(name, gate, up, float(limits.mean())), atol=1e-6)
    assert np.allclose(both, reference.activate(name, gate, up, limits, 0, limits[::-1]), atol=1e-6)
    assert not np.allclose(own, both, atol=1e-2)


def test_the_gradient_of_a_norm() -> None:
    torch.manual_seed(0)
    x, weight, back = torch.randn(3, 5, 64, requires_grad=True), torch.rand(64) + 0.5, torch.randn(3, 5, 64)
    own, known = _Rms.apply(x, weight, 1e-2), torch.nn.functional.rms_norm(x, (64,), weight, 1e-2)
    assert torch.allclose(own, known, atol=1e-6)
    for mine, wanted in zip(torch.autograd.grad(own, x, back), torch.autograd.grad(known, x, back), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-6)
