"""EAGLE-3 heads: read from each kind of file, beside the paper written in torch, in chunks and batches; answers with
their drafts have the bits of those without; files and models that are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

families = pytest.importorskip("families")
torch = pytest.importorskip("torch")

from eagle_models import KINDS, VOCAB, D, EagleModel, Kind  # noqa: E402
from families import ROUNDING, TOKENS, rms, scattered_pages  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from test_draft_head import batch_of, executor_of, run  # noqa: E402
from test_speculation_models import PARAMS, any_number, llm_of, prompts  # noqa: E402, F401
from toy_model import idle  # noqa: E402

from powerinfer import _native  # noqa: E402
from powerinfer.config import AttentionConfig, EngineConfig  # noqa: E402
from powerinfer.devices import Batch  # noqa: E402
from powerinfer.devices.cpu_ffn import pack  # noqa: E402
from powerinfer.devices.drafter import EagleHead  # noqa: E402
from powerinfer.errors import ModelError, NoDraftsError  # noqa: E402
from powerinfer.formats import eagle  # noqa: E402
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint  # noqa: E402
from powerinfer.formats.eagle import is_eagle, open_eagle  # noqa: E402
from powerinfer.formats.folder import read_weights  # noqa: E402
from powerinfer.formats.tensors import float32_tensor  # noqa: E402
from powerinfer.hybrid.resolve import resolve  # noqa: E402
from powerinfer.hybrid.resolved import needs  # noqa: E402
from powerinfer.models import load  # noqa: E402
from powerinfer.progress import silent  # noqa: E402
from powerinfer.runtime import speculation  # noqa: E402
from powerinfer.runtime.draft_sources import check_head, draft_source, join_head, smaller_model  # noqa: E402
from powerinfer.runtime.params import SamplingParams  # noqa: E402
from powerinfer.runtime.request import AnswerRequest  # noqa: E402

Saved = tuple[EagleModel, Path, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """A head of each kind, with the files of its model and its own."""
    result = {}
    for kind in KINDS:
        model, folder = EagleModel(kind), tmp_path_factory.mktemp(kind)
        result[kind] = model, model.save_model(folder), model.save(folder / "head")
    return result


def joined(path: Path, head: Path, **options: Any) -> Checkpoint:
    checkpoint = open_checkpoint(path, **options)
    join_head(checkpoint, EngineConfig(speculate=str(head)), silent)
    return checkpoint


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_that_of_the_paper(kind: str, saved: dict[str, Saved]) -> None:
    model, path, head = saved[kind]
    assert is_eagle(head) and not is_eagle(path)
    executor = executor_of(joined(path, head))
    assert isinstance(executor.drafter, EagleHead) and executor.drafter.tokens.tolist() == model.ids.tolist()
    _, *ours = run(executor, model.tokens, scattered_pages(executor, 1)[0], [TOKENS])
    executor.close()
    exact, narrow = model.said(torch.float64), model.said(torch.float32)
    for got, wide, less in zip(ours, exact, narrow, strict=True):
        assert got.shape == wide.shape
        assert rms(got - wide) <= ROUNDING * rms(less - wide)


@pytest.mark.parametrize("kind", ["eagle", "speculators"])
def test_chunks_and_batches_give_the_same_bits(kind: str, saved: dict[str, Saved]) -> None:
    """And the model's own are those without a head."""
    model, path, head = saved[kind]
    results = []
    for threads, chunks in ((1, [TOKENS]), (2, [32, 1, 30, *[1] * (TOKENS - 63)])):
        executor = executor_of(joined(path, head), threads=threads)
        results.append(run(executor, model.tokens, scattered_pages(executor, 1)[0], chunks))
    for got, wanted in zip(results[1], results[0], strict=True):
        assert np.array_equal(got, wanted)
    plain = executor_of(open_checkpoint(path))
    alone = plain.forward(batch_of(model.tokens[:-1], 0, scattered_pages(plain, 1)[0]))
    assert plain.drafter is None and np.array_equal(alone, results[0][0])
    drafter, pages, texts = executor.drafter, scattered_pages(executor, 4), (model.tokens, np.roll(model.tokens, 7))
    singles = [run(executor, text, pages[at], [TOKENS]) for at, text in enumerate(texts)]
    n = TOKENS // 2
    both = Batch(
        np.concatenate([text[1 : n + 1] for text in texts]),
        np.tile(np.arange(n, dtype=np.int32), 2),
        np.repeat(np.arange(2, dtype=np.int32), n),
        np.ascontiguousarray(pages[2:]),
        np.arange(2 * n, dtype=np.int32),
    )
    assert drafter is not None
    logits = drafter.forward(both, np.concatenate([one[1][:n] for one in singles]))
    assert np.array_equal(logits, np.concatenate([one[3][:n] for one in singles]))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_same_bits(kind: str, saved: dict[str, Saved]) -> None:
    """Greedy and with seeds, in batches, with prefixes found again, and after requests were put back."""
    _, path, head = saved[kind]
    plain = EngineConfig(threads=2, context=128, max_batch=3, speculate="off")
    expected = llm_of(load(open_checkpoint(path), plain), plain).generate(prompts(96), PARAMS)
    engine = EngineConfig(threads=2, context=128, max_batch=3, prefill_chunk=16, speculate=str(head))
    executor = load(joined(path, head), engine)
    executor.n_pages = 5  # which three requests outgrow
    source = draft_source(engine, executor, executor.config)
    assert source is not None and source.name == "eagle"
    llm = llm_of(executor, engine, source)
    for _ in range(2):
        for one, before in zip(llm.generate(prompts(96), PARAMS), expected, strict=True):
            assert (one.token_ids, one.logprobs) == (before.token_ids, before.logprobs)
        assert idle(llm)
    assert llm.stats().speculation.drafted > 100 and llm.stats().preemptions > 0
    llm.close()


@pytest.mark.parametrize("kind", ["eagle", "speculators"])
def test_drafts_in_a_row_are_the_papers(kind: str, saved: dict[str, Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    model, path, head = saved[kind]
    engine = EngineConfig(threads=1, context=128, kv_type="f32", speculate=str(head))
    executor = load(joined(path, head), engine)
    source = draft_source(engine, executor, executor.config)
    assert source is not None
    llm, seen, draft = llm_of(executor, engine, source), list[tuple[list[int], list[int]]](), source.draft
    monkeypatch.setattr(speculation, "_SURE", 0.0)

    def watched(wanted: list[tuple[AnswerRequest, int]]) -> list[list[int]]:
        drafts = draft(wanted)
        seen.extend((list(request.tokens), one) for (request, _), one in zip(wanted, drafts, strict=True))
        return drafts

    source.draft = watched  # type: ignore[method-assign, assignment]
    llm.generate([model.tokens[:9].tolist()], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert max(len(drafts) for _, drafts in seen) == 4
    right = sum(drafts == model.drafts(text, len(drafts)) for text, drafts in seen)
    # Rounding may select other experts, or another of two tokens that are about as likely.
    assert right > 0.8 * len(seen), f"{right} of {len(seen)} rows of drafts are the paper's"


def test_a_copy_of_the_models_embedding_is_not_read(saved: dict[str, Saved], tmp_path: Path) -> None:
    model, path, _ = saved["eagle"]
    head = model.save(tmp_path)
    table = model.model.model.embed_tokens.weight.detach().numpy().astype(np.float16)
    save_file(model.tensors() | {"embed_tokens.weight": table}, head / "model.safetensors")
    draft = joined(path, head).config.draft
    assert draft is not None and not draft.embedding and draft.head


def test_all_tokens_in_their_order_need_no_rows_of_their_own(saved: dict[str, Saved], tmp_path: Path) -> None:
    model, path, _ = saved["eagle"]
    head = model.save(tmp_path, draft_vocab_size=VOCAB)
    tensors = {name: one for name, one in model.tensors().items() if name != "lm_head.weight"}
    save_file(tensors | {"d2t": np.zeros(VOCAB, np.int64)}, head / "model.safetensors")
    draft = joined(path, head).config.draft
    assert draft is not None and not draft.head
    save_file(tensors | {"d2t": np.arange(VOCAB)[::-1] - np.arange(VOCAB)}, head / "model.safetensors")
    with pytest.raises(NoDraftsError, match=r"lm_head.weight is missing"):
        joined(path, head)


def test_a_head_is_quantised_as_its_model_is(saved: dict[str, Saved]) -> None:
    _, path, head = saved["eagle"]
    checkpoint = joined(path, head, quantize="q8_0")
    assert any(note.endswith("matrices of the EAGLE head to Q8_0") for note in checkpoint.notes)
    assert checkpoint.taken_type(f"layers.{checkpoint.config.n_layers}.draft_fuse") == "Q8_0"
    engine = EngineConfig(threads=1, context=128, speculate=str(head))
    with_head = needs(resolve(checkpoint, engine)).ram
    without = needs(resolve(open_checkpoint(path, quantize="q8_0"), engine)).ram
    assert with_head - without > checkpoint.draft_bytes / 4
    executor = load(checkpoint, engine)
    llm = llm_of(executor, engine, draft_source(engine, executor, executor.config))
    assert len(llm.generate([[1, 2, 3]], PARAMS[0])[0].token_ids) == 40
    notes: list[str] = []
    checkpoint = joined(path, head, quantize="q8_0")
    resolve(checkpoint, replace(engine, ram=with_head - 1), say=notes.append)
    with pytest.raises(NoDraftsError, match=r"the EAGLE head is left out: there is too little memory.*: raise --ram"):
        check_head(engine, checkpoint.config, notes)


def test_beside_a_gpu_it_is_refused(saved: dict[str, Saved]) -> None:
    from gpu_device import device_name

    _, path, head = saved["eagle"]
    engine = EngineConfig(threads=1, context=64, gpu=device_name(), vram=2 << 30, speculate=str(head))
    with pytest.raises(NoDraftsError, match=r"an EAGLE head reads hidden states of layers.*: use --gpu none"):
        resolve(joined(path, head), engine)


def without(name: str, head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    del tensors[name]
    save_file(tensors, head / "model.safetensors")


def other_ids(head: Path) -> None:
    with_tensors(head, {"d2t": np.array([*[0] * 39, VOCAB - 39])})  # of row 39, to which its number is added


def more_tokens_than_the_model(head: Path) -> None:
    rows = VOCAB + 1
    with_tensors(head, {"d2t": -np.arange(rows), "lm_head.weight": np.zeros((rows, D), np.float32)})


def with_tensors(head: Path, others: dict[str, np.ndarray]) -> None:
    save_file(load_file(head / "model.safetensors") | others, head / "model.safetensors")


def with_copy(name: str, copy: str) -> Callable[[Path], None]:
    """A file that has the tensor `name` a second time, as `copy`."""
    return lambda head: with_tensors(head, {copy: load_file(head / "model.safetensors")[name]})


def with_embedding(dtype: type) -> Callable[[Path], None]:
    return lambda head: with_tensors(head, {"embed_tokens.weight": np.zeros((VOCAB, D), dtype)})


NORM = "midlayer.hidden_norm.weight"


BAD: list[tuple[dict[str, Any], Any, str]] = [
    ({"num_hidden_layers": 2}, None, "a head of 2 layers is not read, only of one"),
    ({"vocab_size": VOCAB + 1}, None, "a head of vocabulary 102 does not go with a model of vocabulary 101"),
    ({"hidden_size": 2 * D}, None, "a head of width 128 does not go with a model of width 64"),
    ({"target_hidden_size": 2 * D}, None, "target_hidden_size is 128, and the head's own width 64"),
    ({"draft_vocab_size": 39}, None, "d2t names 40 tokens, and draft_vocab_size is 39"),
    ({"draft_vocab_size": VOCAB + 1}, more_tokens_than_the_model, "an output head of 102 tokens .* a model of 101"),
    ({"draft_vocab_size": "many"}, None, "draft_vocab_size is 'many'"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, None, "not numbers of the model's 3 layers"),
    ({"eagle_aux_hidden_state_layer_ids": [1]}, None, "has 1 layers, not 2 to 16"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, None, "use_aux_hidden_state is 'False'"),
    ({"eagle_config": 3}, None, "eagle_config is no object"),
    ({"norm_before_fc": True, "fc_norm": True}, None, "both set"),
    ({"norm_before_fc": True}, None, "input_norm.weight is missing"),
    ({"speculators_model_type": "peagle"}, None, "speculators_model_type is 'peagle'"),
    ({"num_attention_heads": 7}, None, "7 heads cannot share 2"),
    ({"rope_scaling": {"rope_type": "odd"}}, None, "rope_type"),
    ({}, lambda head: without("fc.weight", head), "tensor fc.weight is missing"),
    ({}, lambda head: without(NORM, head), f"tensor {NORM} is missing"),
    ({}, lambda head: without("midlayer.mlp.up_proj.weight", head), "tensor midlayer.mlp.up_proj.weight is missing"),
    ({}, with_copy(NORM, "layers.0.hidden_norm.weight"), "several layers is not read .'layers.0.', 'midlayer.'.,"),
    ({}, with_copy(NORM, "layers.3.hidden_norm.weight"), "several layers is not read .'layers.3.', 'midlayer.'.,"),
    ({}, with_copy(NORM, f"model.{NORM}"), f"tensors '{NORM}' and 'model.{NORM}' are the same one"),
    ({}, with_embedding(np.int64), "tensor embed_tokens.weight has type I64, which this engine does not read"),
    ({}, with_embedding(np.int8), "tensor embed_tokens.weight has type I8, which this engine does not read"),
    ({}, lambda head: without("lm_head.weight", head), "lm_head.weight is missing"),
    ({}, other_ids, "d2t names token 101, which is none of the model's 101"),
    ({}, lambda head: (head / "model.safetensors").write_bytes(b"12345678"), "--speculate .*model.safetensors"),
]


@pytest.mark.parametrize(("settings", "damage", "message"), BAD)
def test_heads_that_are_refused(
    settings: dict[str, Any], damage: Any, message: str, saved: dict[str, Saved], tmp_path: Path
) -> None:
    model, path, _ = saved["eagle"]
    head = model.save(tmp_path, **settings)
    if damage is not None:
        damage(head)
    with pytest.raises(NoDraftsError, match=message) as error:
        joined(path, head)
    assert str(error.value).startswith(f"--speculate {head}: ")


ODD: list[Any] = [None, -1, 1 << 40, 0.5, "x", [], {"a": []}, [True, 1]]


@pytest.mark.parametrize("kind", ["eagle", "speculators"])
def test_odd_settings_are_refused_or_read(kind: str, saved: dict[str, Saved], tmp_path: Path) -> None:
    model, path, _ = saved[kind]
    checkpoint, head = open_checkpoint(path), model.save(tmp_path)
    config, refused = json.loads((head / "config.json").read_text()), 0
    places = [(config, key) for key in list(config)]
    places += [(inner, key) for inner in (config.get("transformer_layer_config", {}),) for key in list(inner)]
    for place, key in places:
        for value in ODD:
            before, place[key] = place[key], value
            (head / "config.json").write_text(json.dumps(config))
            place[key] = before
            try:
                open_eagle(head, checkpoint.config, checkpoint.stored("embed"))
            except ModelError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 2 * len(places)


def test_a_cut_file_is_refused(saved: dict[str, Saved], tmp_path: Path) -> None:
    _, path, head = saved["gguf"]
    checkpoint, whole = open_checkpoint(path), head.read_bytes()
    for n in range(0, len(whole), len(whole) // 23 + 1):
        (cut := tmp_path / "cut.gguf").write_bytes(whole[:n])
        with pytest.raises(ModelError):
            open_eagle(cut, checkpoint.config, checkpoint.stored("embed"))


def test_a_cut_folder_is_refused(saved: dict[str, Saved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and behind the reading of its header: to read a mapping past the end of its file kills the process."""
    model, path, _ = saved["eagle"]
    checkpoint, head = open_checkpoint(path), model.save(tmp_path)
    weights = head / "model.safetensors"
    whole = weights.read_bytes()
    for n in range(0, len(whole), len(whole) // 23 + 1):
        weights.write_bytes(whole[:n])
        with pytest.raises(ModelError):
            open_eagle(head, checkpoint.config, checkpoint.stored("embed"))
    for cut in (weights, head / "config.json"):
        model.save(head)

        def read_then_cut(folder: Path, cut: Path = cut) -> Any:
            read = read_weights(folder)
            os.truncate(cut, 0)
            return read

        monkeypatch.setattr(eagle, "read_weights", read_then_cut)
        with pytest.raises(ModelError, match=f"{cut.name} changed while it was in use"):
            open_eagle(head, checkpoint.config, checkpoint.stored("embed"))


def test_a_missing_tensor_has_the_name_of_its_kind_of_files(saved: dict[str, Saved], tmp_path: Path) -> None:
    model, path, _ = saved["speculators"]
    head = model.save(tmp_path)
    without("layers.0.self_attn.k_proj.bias", head)
    with pytest.raises(NoDraftsError, match=r"tensor layers\.0\.self_attn\.k_proj\.bias is missing"):
        joined(path, head)


def test_the_native_operators_are_checked() -> None:
    pool = _native.Pool(1)
    workspace, cache = _native.Workspace(pool, "scalar"), _native.Cache("f32", [(1, 64), (1, 64)], 1)

    def matrix(rows: int, cols: int) -> _native.Matrix:
        return pack(pool, _native.Arena(), float32_tensor(np.zeros((rows, cols), np.float32)))

    def norm(n: int) -> _native.Norm:
        return _native.Norm(np.ones(n, np.float32), 1e-6)

    def program(places: int = 2) -> _native.Program:
        made = _native.Program(workspace, cache, 8, 64, 64, [1, 1])
        made.embed(table)
        for place in range(places):
            made.keep_feature(place, 2)
        made.head(norm(64), matrix(32, 64))
        return made

    table = _native.Table("F32", 32, 64, np.zeros(32 * 64 * 4, np.uint8))
    for place, places in ((2, 2), (-1, 2), (0, 65), (0, 3)):
        with pytest.raises(ValueError, match=r"place among the features|one draft head"):
            program().keep_feature(place, places)
    with pytest.raises(ValueError, match="there is no EAGLE head"):
        program(0).features(1)
    for features in (0, 9):
        with pytest.raises(ValueError, match="there is no EAGLE head"):
            program().features(features)
    right = matrix(64, 128)
    for norms, w, places in (
        ([], right, 0), ([], matrix(64, 64), 2), ([], matrix(32, 128), 2), ([norm(64)], right, 2),
        ([norm(64)] * 3, right, 2), ([norm(128), norm(128)], right, 2), ([None], right, 2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"EAGLE|draft head|feature|norm"):
            program(places).fuse(norms, w)
    made = program()
    made.fuse([norm(64), norm(64)], right)
    with pytest.raises(ValueError, match="a second one"):
        made.fuse([], right)
    settings = AttentionConfig(1, 1, 64)
    of_two, of_one = matrix(64, 128), matrix(64, 64)
    with pytest.raises(ValueError, match="columns"):  # no operator joins two rows yet
        made.attention_input(1, settings, None, of_two, of_two, of_two)
    made.draft_input(table, norm(64), norm(64), None, normed=True)
    for normed, k in ((norm(64), of_two), (None, of_one)):
        with pytest.raises(ValueError, match="columns"):
            made.attention_input(1, settings, normed, of_two, k, k)
    made.attention_input(1, settings, None, of_two, of_two, of_two)
    with pytest.raises(ValueError, match="wrong shape"):
        program().draft_input(table, norm(64), norm(64), None)


def test_other_files_are_no_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": "LlamaForCausalLMEagle3"}))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"eagle3" * 9)
    for path in (tmp_path, tmp_path / "m.gguf", tmp_path / "nothing.gguf"):
        assert not is_eagle(path)
    with pytest.raises(Exception, match="--speculate"):
        smaller_model(EngineConfig(speculate=str(tmp_path / "m.gguf")), 64, silent)


def test_a_head_of_another_model_is_refused(saved: dict[str, Saved], tmp_path: Path) -> None:
    """Whose layers have norms with biases."""
    model = EagleModel(Kind((0, 1, 2), "stablelm"))
    with pytest.raises(NoDraftsError, match="a draft head does not go with other norms than RMS"):
        joined(model.save_model(tmp_path), saved["eagle"][2])
