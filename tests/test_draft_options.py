"""Drafts as users ask for them: the ways of `--speculate`, what a load says of a head, commands that show it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from draft_models import DraftModel
from eagle_models import EagleModel
from model_files import delta_gguf, tiny_gguf
from sparse_models import TEXT, give_bundles, tiny_llama

from benchmarks.models.draft_head import add_draft_head
from powerinfer import LLM, RequestError, SamplingParams
from powerinfer.cli import serve
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import needs
from powerinfer.kernels import cpu
from powerinfer.placement import draft_gain
from powerinfer.placement.plan_document import Help
from powerinfer.progress import silent
from powerinfer.runtime.draft_sources import smaller_model
from powerinfer.serve.service import Budget
from powerinfer_train.as_gguf import AsGGUF

OPTIONS: dict[str, Any] = {"threads": 1, "gpu": "none", "context": 128, "max_batch": 2, "prefill_chunk": 32}
PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
COMMAND = ["--gpu", "none", "--context", "64", "--threads", "1"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("plain") / "m.gguf", "silu")


@pytest.fixture(scope="module")
def path(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a head."""
    target = tmp_path_factory.mktemp("head") / "m.gguf"
    add_draft_head(plain, target, "f16")
    return target


def other_vocabulary(target: Path) -> Path:
    """A model with a token that `plain` does not have."""
    builder, name = tiny_gguf("llama"), "tokenizer.ggml."
    tokens = next(value.items for key, _, value in builder.entries if key == f"{name}tokens")
    changed = {"tokens": ["abd" if token == "abc" else token for token in tokens], "merges": ["a b", "ab d"]}
    return builder.drop(f"{name}tokens").drop(f"{name}merges").fields(changed, name).write(target)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("way", ["auto", "mtp", "lookup", "MODEL", "off"])
def test_the_ways_give_the_same_answers(way: str, plain: Path, path: Path) -> None:
    with LLM(plain, **OPTIONS) as llm:
        assert llm.drafts is None
        expected = llm.generate(TEXT[:60], PARAMS).token_ids
    with LLM(path, speculate=str(plain) if way == "MODEL" else way, **OPTIONS) as llm:
        assert llm.generate(TEXT[:60], PARAMS).token_ids == expected
        assert llm.drafts == {"auto": "mtp", "MODEL": "model", "off": None}.get(way, way)
        assert ("drafts" in llm.choices) == (way != "off")


def test_a_head_beside_a_selector(tmp_path: Path) -> None:
    """A request that decodes alone has the bits of decoding without drafts."""
    add_draft_head(tiny_llama(tmp_path / "plain.gguf"), path := tmp_path / "m.gguf", "f16")
    give_bundles(path)
    params = replace(PARAMS, temperature=1, seed=4, logprobs=1)
    answers = []
    for way in ("off", "mtp"):
        with LLM(path, speculate=way, selector="exact", trial=False, **OPTIONS | {"threads": 2}) as llm:
            answers.append(llm.generate(TEXT[:40], params))
            assert "exact" in llm.choices["selector"] and (llm.stats().speculation.drafted > 0) == (way == "mtp")
    assert (answers[0].token_ids, answers[0].logprobs) == (answers[1].token_ids, answers[1].logprobs)


def test_a_model_without_a_head_has_none_to_draft(plain: Path, path: Path) -> None:
    with pytest.raises(RequestError, match="--speculate mtp: the model's file has no layers that predict"):
        LLM(plain, speculate="mtp", **OPTIONS)
    engine = EngineConfig(**OPTIONS, speculate="mtp")
    with_head, without = (needs(resolve(open_checkpoint(path, draft_head=one), engine)).ram for one in (True, False))
    assert with_head > without
    with pytest.raises(RequestError, match=r"--speculate mtp: .*\(MTP\) are left out: there is too little memory"):
        LLM(path, speculate="mtp", ram=with_head - 1, **OPTIONS)


def test_smaller_models_that_are_refused(plain: Path, tmp_path: Path) -> None:
    states = delta_gguf().write(tmp_path / "states.gguf")
    with pytest.raises(RequestError, match="keep a state"):
        LLM(plain, speculate=str(states), **OPTIONS)
    other = other_vocabulary(tmp_path / "other.gguf")
    with pytest.raises(RequestError, match="its vocabulary is another one"):
        LLM(plain, speculate=str(other), **OPTIONS)
    with pytest.raises(RequestError, match=r"needs .* of RAM, and --ram gives"):
        LLM(plain, speculate=str(plain), ram=1 << 16, **OPTIONS)


def test_commands_with_one_request_have_states_for_it(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts undo states, of which each request more takes some; unless --max-batch is given."""
    batches = list[int]()

    def load(checkpoint: Checkpoint, engine: EngineConfig, *_: object) -> None:
        batches.append(engine.max_batch)
        raise RequestError("seen")

    monkeypatch.setattr("powerinfer.runtime.engine.load_with_drafts", load)
    for model in (delta_gguf().write(tmp_path / "states.gguf"), plain):
        for verb in (["run", "hello", "--raw"], ["chat"], ["bench", "--gen-tokens", "2"]):
            for flags in (["lookup"], ["off"], ["lookup", "--max-batch", "3"]):
                assert main([*verb, "-m", str(model), "--speculate", *flags]) == 2
                assert "seen" in capsys.readouterr().err
    assert batches == [*[1, 8, 3] * 2, 8, 8, 3, *[8, 8, 3] * 3]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("bogus", "takes auto, mtp, lookup, off, a smaller MODEL or an EAGLE head, not 'bogus': no model bogus"),
        ("Lookup", "not 'Lookup': .*; did you mean lookup?"),
        ("", "a smaller MODEL or an EAGLE head, not ''$"),
        (None, "speculate must be auto, .* a model, not None"),
        (4, "speculate must be auto, .* not 4"),
    ],
)
def test_values_that_are_refused(way: Any, message: str, plain: Path) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(plain, speculate=way, **OPTIONS)


def test_a_damaged_file_is_named_with_the_flag(plain: Path, tmp_path: Path) -> None:
    (short := tmp_path / "short.gguf").write_bytes(plain.read_bytes()[:5000])
    with pytest.raises(ModelError, match=f"--speculate {short}: "):
        LLM(plain, speculate=str(short), **OPTIONS)


def test_a_model_that_is_not_smaller_is_told(plain: Path, path: Path) -> None:
    for model, told in ((plain, True), (path, False)):
        with LLM(model, speculate=plain, **OPTIONS) as llm:  # type: ignore[arg-type]
            assert any("this model is not smaller" in note for note in llm.notes) == told


def test_a_server_of_several_answers_without_drafts(
    plain: Path,
    path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = other_vocabulary(tmp_path / "other.gguf")
    budget = Budget(1 << 31)
    for model, way, line in (
        (plain, "mtp", "no layers that predict further tokens"),
        (other, str(path), "its vocabulary is another one"),
    ):
        engine = EngineConfig(**OPTIONS | {"context": 32}, speculate=way)
        without = serve._needs(model, replace(engine, speculate="off"), budget)
        assert serve._needs(model, engine, budget) == without
        with serve._load("m", model, engine, lambda *_: None, budget) as llm:
            assert llm.drafts is None
        assert f"it answers without drafts: --speculate {way}: " in (said := caplog.messages[-1]) and line in said
    assert main(["serve", "-m", f"a={plain}", "-m", f"b={path}", "--speculate", "bogus"]) == 2
    assert "--speculate takes auto" in capsys.readouterr().err


def test_a_server_refuses_options_before_it_listens(
    plain: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powerinfer.serve.server.make_server", None)  # which listens
    monkeypatch.setattr("powerinfer.devices.torch_device.choose_device", Mock(side_effect=RequestError("no such GPU")))
    refused = (
        ("--speculate mtp: the model's file has no", ["--speculate", "mtp"]),
        ("--speculate takes auto", ["--speculate", "bogus"]),
        ("is more than the model's", ["-c", "1000000"]),
        ("max_batch must be", ["--max-batch", "0"]),
        ("but this machine has", ["--ram", "9000GiB"]),
        ("GPU", ["--gpu", "cuda"]),
        ("GPU", ["-m", f"b={plain}", "--gpu", "cuda"]),
    )
    for message, flags in refused:
        assert main(["serve", "-m", f"a={plain}", *flags]) == 2, flags
        assert message in capsys.readouterr().err


def test_an_eagle_head(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers, what commands say of it, its memory, and a server of several models."""
    model, other = EagleModel("eagle", vocab=40), EagleModel("eagle")
    head, strange = model.save(tmp_path / "head"), other.save(tmp_path / "strange")
    with LLM(plain, **OPTIONS) as llm:
        expected = llm.generate(TEXT[:60], PARAMS).token_ids
    with LLM(plain, speculate=str(head), **OPTIONS) as llm:
        assert llm.generate(TEXT[:60], PARAMS).token_ids == expected
        assert llm.drafts == "eagle" and llm.choices["drafts"].startswith(str(head))
        assert llm.stats().speculation.drafted > 0 and not llm.stats().speculation.failed
    shown = []
    for flags in (["--speculate", str(head)], []):
        assert main(["inspect", "-m", str(plain), *COMMAND, "--json", *flags]) == 0
        shown.append(document(capsys))
    assert shown[0]["draft_head"]["eagle"]["vocab"] == 40 and shown[1]["draft_head"] is None
    assert 0 < shown[0]["draft_head"]["bytes"] < shown[0]["memory"]["ram"] - shown[1]["memory"]["ram"]
    assert main(["inspect", "-m", str(plain), *COMMAND, "--json", "--speculate", str(strange)]) == 0
    assert "vocabulary 101 does not go with a model of vocabulary 40" in document(capsys)["choices"]["refused"]
    command = ["plan", "-m", str(plain), "--hardware", "pc-16gb", "--dry-run", *COMMAND, "--json"]
    assert main([*command, "--speculate", str(head)]) == 0
    planned = document(capsys)["bytes"]["cpu"]
    assert planned["draft"] > 0
    assert main([*command, "--speculate", str(strange)]) == 2
    less = [*command, "--speculate", str(head), "--ram", f"{sum(planned.values()) - 1}B"]
    assert main(less) == 2
    assert "the EAGLE head is left out: there is too little memory" in capsys.readouterr().err
    engine, budget = EngineConfig(**OPTIONS), Budget(1 << 31)
    taken = [serve._needs(plain, replace(engine, speculate=str(way)), budget).ram for way in (head, strange, "off")]
    assert taken[0] > taken[1] == taken[2]
    with serve._load("m", plain, replace(engine, speculate=str(strange)), lambda *_: None, budget) as llm:
        assert llm.drafts is None
    with pytest.raises(RequestError, match=r"the EAGLE head is left out: there is too little memory.*: raise --ram"):
        LLM(plain, speculate=str(head), ram=taken[0] - 1, **OPTIONS)


def test_plans_with_a_head_and_without_are_kept_apart(path: Path, tmp_path: Path) -> None:
    for way in ("mtp", "off", "mtp"):
        command = ["plan", "-m", str(path), "--hardware", "pc-16gb", *COMMAND, "--prepared", str(tmp_path)]
        assert main([*command, "--speculate", way]) == 0
    assert len(list(tmp_path.glob("plan-*.json"))) == 2


def test_quantize_keeps_the_head(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "q.gguf"
    assert main(["quantize", str(path), "q8_0", "-o", str(target)]) == 0
    checkpoint = open_checkpoint(target, draft_head=True)
    assert checkpoint.config.draft == open_checkpoint(path, draft_head=True).config.draft
    assert 0 < checkpoint.draft_bytes < open_checkpoint(path, draft_head=True).draft_bytes


@pytest.mark.parametrize("name", ["llama-relu", "glm4-moe"])
def test_quantize_keeps_the_head_of_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded, and in the order of rows of GGUF files."""
    monkeypatch.setattr(AsGGUF, "_tokenizer", lambda *_: {})  # that of these models is none
    folder, target = DraftModel(name).save("folder", tmp_path), tmp_path / "q.gguf"
    assert main(["quantize", str(folder), "bf16", "-o", str(target)]) == 0
    before, made = (open_checkpoint(path, draft_head=True) for path in (folder, target))
    assert made.config.draft is not None and made.notes == []
    assert made.config.draft.final_norm and set(made.names()) == set(before.names())
    orders = [layer.attention.rope.interleaved for layer in (before.config.layers[0], made.config.draft.layer)]
    for key in before.names():
        wanted, values = (one.take(key).float32() for one in (before, made))
        if orders[0] != orders[1] and key.endswith((".q", ".k")):
            wanted = wanted.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(wanted.shape)  # of heads of 16
        np.testing.assert_allclose(values, wanted, rtol=2**-8, atol=1e-30)


def test_rows_of_logits_are_counted(plain: Path) -> None:
    """Of two requests with up to seven drafts each."""
    config, engine = open_checkpoint(plain).config, EngineConfig(**OPTIONS)
    held = [needs(resolve(open_checkpoint(plain), replace(engine, speculate=way))).ram for way in ("lookup", "off")]
    assert held[0] - held[1] == 4 * (2 * 8 - 2) * cpu.round_up(config.vocab_size, cpu.LANES)


def test_a_smaller_model_is_quantised_too(plain: Path) -> None:
    taken = []
    for quantize in (None, "q8_0"):
        smaller = smaller_model(EngineConfig(**OPTIONS, speculate=str(plain), quantize=quantize), 128, silent)
        assert smaller is not None
        taken.append(smaller.ram_bytes)
    assert taken[1] < taken[0]


def test_a_server_counts_what_drafts_take(plain: Path, path: Path) -> None:
    budget, engine = Budget(1 << 31), EngineConfig(**OPTIONS)
    without = serve._needs(plain, engine, budget).ram
    with_head, smaller = (
        serve._needs(path, engine, budget),
        serve._needs(plain, replace(engine, speculate=str(plain)), budget),
    )
    assert with_head.ram > without and smaller.ram > without * 3 // 2
    for model, way, taken in ((path, "auto", with_head), (plain, str(plain), smaller)):
        with serve._load("m", model, replace(engine, speculate=way), lambda *_: None, Budget(taken.ram)) as llm:
            assert llm.drafts is not None and llm.disk is None
            assert "(as many as its RAM holds)" in llm.choices["kv_cache"]


def test_inspect_shows_the_head(plain: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "-m", str(path), *COMMAND]) == 0
    head = open_checkpoint(path, draft_head=True).draft_bytes
    assert 0 < head < open_checkpoint(path).file_bytes // 2
    assert f"draft head    a layer of one FFN, {head / 1e6:.1f} MB (--speculate)" in capsys.readouterr().out
    assert main(["inspect", "-m", str(path), *COMMAND, "--json"]) == 0
    shown = document(capsys)
    assert shown["draft_head"]["bytes"] == head and shown["draft_head"]["head"] is False
    assert main(["inspect", "-m", str(plain), *COMMAND, "--json"]) == 0
    bare = document(capsys)
    assert bare["draft_head"] is None and bare["memory"]["ram"] < shown["memory"]["ram"]


def test_inspect_and_plan_count_a_smaller_model(plain: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*flags: str) -> dict[str, Any]:
        assert main(["inspect", "-m", str(path), *COMMAND, "--json", *flags]) == 0
        return document(capsys)

    drafts = shown("--speculate", str(plain))["memory"]
    without = shown("--speculate", "off")["memory"]
    assert drafts["drafts"] > 0 == without["drafts"]
    logits = drafts["ram"] - drafts["drafts"] - without["ram"]  # of drafts
    assert 0 < logits < 1 << 18
    for command in (["inspect"], ["plan", "--dry-run"]):
        assert main([*command, "-m", str(path), *COMMAND, "--speculate", "bogus"]) == 2
        assert "--speculate takes auto" in capsys.readouterr().err
    assert main(["inspect", "-m", str(plain), *COMMAND, "--json", "--speculate", "mtp"]) == 0
    refused = document(capsys)
    assert refused["memory"] is None and refused["choices"]["refused"].startswith("--speculate mtp: ")
    command = ["plan", "-m", str(path), "--hardware", "pc-16gb", "--dry-run", *COMMAND, "--speculate", str(plain)]
    assert main([*command, "--json", "--ram", "1G"]) == 0
    captured = capsys.readouterr()
    assert "of RAM beside the plan: --ram without it is planned for" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["budgets"]["ram"] == (1 << 30) - drafts["drafts"]
    assert main(["plan", "-m", str(plain), "--dry-run", *COMMAND, "--speculate", "mtp"]) == 2
    assert main(["plan", "--shape", "llama-2-7b", "--card", "none", "--ram", "32G", "--speculate", "mtp"]) == 2


def test_hints_count_a_smaller_model(plain: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that are named hold both models; errors about what is left of a budget name the other's share."""
    smaller = smaller_model(EngineConfig(**OPTIONS, speculate=str(plain)), 128, silent)
    assert smaller is not None
    offers = [Help("all", flag, 1 << 30, True) for flag in ("--ram", "--vram")]
    assert [one.bytes - (1 << 30) for one in smaller.add_share(offers)] == [smaller.ram_bytes, 0]
    share = f"--speculate {plain} takes .* of --ram beside that"
    command = ["plan", "-m", str(path), "--hardware", "pc-16gb", "--dry-run", *COMMAND, "--speculate", str(plain)]
    assert main([*command, "--ram", "100MiB"]) == 2
    assert re.search(share, capsys.readouterr().err)
    with pytest.raises(RequestError, match=share):
        LLM(path, speculate=str(plain), ram=smaller.ram_bytes + 5000, **OPTIONS)


def test_a_server_lets_no_model_draft_for_itself(plain: Path, path: Path) -> None:
    engine = EngineConfig(**OPTIONS, speculate=str(plain))
    for model, drafts in ((plain, None), (path, "model")):
        with serve._source(model.name, model, engine).load(lambda *_: None, Budget(1 << 31)) as llm:
            assert llm.drafts == drafts


def test_a_plan_weighs_the_head(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*flags: str) -> dict[str, Any]:
        assert main(["plan", "-m", str(path), "--hardware", "pc-16gb", "--dry-run", *COMMAND, "--json", *flags]) == 0
        return document(capsys)

    whole = planned()
    assert whole["bytes"]["cpu"]["draft"] > 0
    assert any("of drafts are right: with the model's head" in line for line in whole["assumed"])
    for flags in (["--speculate", "off"], ["--ram", str(sum(whole["bytes"]["cpu"].values()) - 1) + "B"]):
        small = planned(*flags)
        assert "draft" not in small["bytes"]["cpu"] and not any("drafts" in line for line in small["assumed"])
    monkeypatch.setattr(draft_gain, "RIGHT", 0.01)
    assert "draft" not in planned("--ram", "1G")["bytes"]["cpu"], "drafts would gain less than they cost"
    assert "draft" in planned("--ram", "1G", "--speculate", "mtp")["bytes"]["cpu"], "they were asked for"
    assert "draft" in planned()["bytes"]["cpu"], "nothing is short"


def test_a_load_weighs_the_head(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for right, there in ((draft_gain.RIGHT, True), (0.01, False)):
        monkeypatch.setattr(draft_gain, "RIGHT", right)
        checkpoint = open_checkpoint(path, draft_head=True)
        resolve(checkpoint, EngineConfig(**OPTIONS, ram=1 << 30), say=said.append)
        assert (checkpoint.config.draft is not None) == there
    assert len(said) == 1 and "within --ram" in said[0]


def test_eval_drafts_nothing(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["eval", "perplexity", "-m", str(path), "--file", str(text), *COMMAND]
    assert main(command) == 0
    assert "MTP" not in capsys.readouterr().err
    assert main([*command, "--speculate", "lookup"]) == 2
    assert "eval scores texts that are given" in capsys.readouterr().err


def test_bench_reads_the_weights_once_a_step(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt-tokens", "8", "--gen-tokens", "24", "--repeat", "1", *COMMAND, "--json"]
    assert main(["bench", "-m", str(path), *flags, "--speculate", "lookup"]) == 0
    shown = document(capsys)
    a_step = shown["decode_tok_s"]["median"] * shown["bytes_per_token"] / shown["bandwidth_gb_s"] / 1e9
    assert a_step > 0.999 and shown["speculation"]["drafts"] == "lookup"
    assert main(["bench", "-m", str(path), *flags[:-1]]) == 0
    said = capsys.readouterr().out
    assert re.search(r"drafts right; \d+ steps had some, which brought .* times as fast as without", said)
    assert main(["bench", "-m", str(path), *flags[:-1], "--speculate", "lookup"]) == 0
    assert "lookup finds drafts in what was written before" in capsys.readouterr().err
