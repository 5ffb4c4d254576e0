"""The scripts of benchmarks/serving on a tiny model, and random models of experts as files that run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from configs import small

from benchmarks.lib import machine
from benchmarks.models import expert_models
from benchmarks.serving import endurance, isolation, llama_server_suite, overhead, table
from powerinfer import LLM, SamplingParams
from powerinfer.config import ExpertsConfig, LatentAttentionConfig, ModelConfig
from powerinfer.formats.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    expert_models.write(path, small(expert_models.CONFIGS["qwen3-30b-a3b"]), expert_models.Weights("q8_0"))
    return path


def result(script: object, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, object]:
    out = Path(arguments[arguments.index("--out") + 1])
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    monkeypatch.setattr(
        machine, "description", lambda: {"cpu": {"name": "c"}, "commit": "0", "date": "d", "command": "x"}
    )
    script.main()  # type: ignore[attr-defined]
    return dict(json.loads(out.read_text()))


def test_a_crowd_and_clients_that_leave(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endurance, "CONTEXT", 128)
    monkeypatch.setattr(endurance, "LENGTHS", (8, 60))
    found = result(
        endurance, monkeypatch, str(model), "--minutes", "0.03", "--leaving", "8", "--out", str(tmp_path / "e.json")
    )
    crowd, leaving = found["crowd"], found["leaving"]
    assert crowd["wrong"] == 0 and set(crowd["statuses"]) <= {"200", "429", "503"} and crowd["statuses"]["200"] > 0
    assert leaving["after"]["running"] == leaving["after"]["used_pages"] == 0 and leaving["answers"] == 200
    assert "0 wrong" in table.endurance_table(dict.fromkeys(("crowd", "leaving"), found))


def test_what_the_server_adds(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CONTEXT", 128)
    monkeypatch.setattr(overhead, "TOKENS", 8)
    monkeypatch.setattr(overhead, "PREFIX", 64)
    found = result(overhead, monkeypatch, str(model), "--repeat", "1", "--out", str(tmp_path / "o.json"))
    assert found["first_token_ms"]["server"] > 0 and found["prefix_ratio"] > 0 and found["mask"]["masked_ms"] > 0
    assert "times sooner" in table.overhead_table(found)


def test_a_stream_beside_large_bodies(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "CONTEXT", 128)
    monkeypatch.setattr(isolation, "ALONE_SECONDS", 0.1)
    monkeypatch.setattr(isolation, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(isolation, "TEXTS", {"digits": isolation.TEXTS["digits"]})
    found = result(isolation, monkeypatch, str(model), "--megabytes", "0.05", "--out", str(tmp_path / "i.json"))
    rows = {(one["name"], one["route"]): one for one in found["rows"]}
    assert len(rows) == len(found["rows"]) == 1 + len(isolation.ROUTES) + len(isolation.SHAPES)
    assert all(one["longest_s"] > 0 for one in rows.values())
    assert rows["digits", "/v1/chat/completions"]["status"] == 400 and rows["digits", "/tokenize"]["status"] == 200
    shown = table.isolation_table(found)
    assert "the stream alone" in shown and all(name in shown for name in isolation.SHAPES)


def test_what_tests_know_of_their_own_model_is_not_compared() -> None:
    source = """import wget
    assert res.body["timings"]["prompt_n"] == n_prompt
    assert res.body["system_fingerprint"].startswith("b")
    assert match_regex("(going|bed)+", res.choices[0].text)
    assert match_regex(re_content, content)
    assert res.status_code == 200
"""
    assert llama_server_suite.adapted(source) == """wget = None
    assert res.body["timings"]["prompt_n"] > 0
    assert res.body["system_fingerprint"].startswith("powerinfer")
    assert match_words("(going|bed)+", res.choices[0].text)
    assert match_words(re_content, content)
    assert res.status_code == 200
"""


def test_the_model_of_the_suite(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "suite.gguf"
    llama_server_suite.make_model(path, model, "{{ messages[0].content }}")
    with LLM(path, gpu="none", threads=1, context=64) as llm:
        assert llm.template is not None and llm.template.source == "{{ messages[0].content }}"
        assert llm.tokenizer.vocabulary.infill == {"prefix": 5, "suffix": 6, "middle": 7}
        assert len(llm.generate("hello", SamplingParams(max_tokens=3, temperature=0)).token_ids) == 3


@pytest.mark.parametrize("name", expert_models.CONFIGS)
def test_random_models_of_experts_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expert_models.CONFIGS[name]
    monkeypatch.setitem(expert_models.CONFIGS, name, small(whole))
    path = tmp_path / "m.gguf"
    monkeypatch.setattr(sys, "argv", ["script", str(path), "--shape", name, "--layers", str(2)])
    expert_models.main()
    config = open_checkpoint(path).config
    experts = config.layers[1].ffn
    of_whole = whole.layers[-1].ffn
    assert isinstance(experts, ExpertsConfig) and isinstance(of_whole, ExpertsConfig)
    assert (experts.n_experts, experts.router.top_k) == (8, min(8, of_whole.router.top_k))
    ours, wanted = config.layers[1].attention, small(whole).layers[1].attention
    if isinstance(ours, LatentAttentionConfig):
        assert isinstance(wanted, LatentAttentionConfig) and ours.scale == pytest.approx(wanted.scale)
        assert replace(ours, scale=wanted.scale, norm_eps=wanted.norm_eps) == wanted
    with LLM(path, gpu="none", threads=1, context=64) as llm:
        (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        assert len(answer.token_ids) == 3


def test_random_experts_fire_as_often_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = small(expert_models.CONFIGS["smallthinker-4b"])
    wide = replace(wide, d_model=256, layers=tuple(replace(one, ffn=replace(one.ffn, size=128)) for one in wide.layers))
    monkeypatch.setitem(expert_models.CONFIGS, "smallthinker-4b", wide)
    path = tmp_path / "m.gguf"
    flags = ["--shape", "smallthinker-4b", "--layers", "2", "--active", "0.1", "--head", "q4_0", "--vocab", "1100"]
    monkeypatch.setattr(sys, "argv", ["script", str(path), *flags])
    expert_models.main()
    with LLM(path, gpu="none", threads=1, context=128, selector="exact") as llm:
        llm.generate([list(range(5, 95))], SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True))
        report = llm.sparsity
        assert report is not None and 0.05 < report["active_fraction"] < 0.16


def as_stated(config: ModelConfig) -> ModelConfig:
    """With scales of latent attention to the digits that a folder has them in."""
    own = [(layer, layer.attention) for layer in config.layers]
    rounded = [
        replace(layer, attention=replace(kind, scale=round(kind.scale, 6)))
        if isinstance(kind, LatentAttentionConfig)
        else layer
        for layer, kind in own
    ]
    return replace(config, layers=tuple(rounded))


@pytest.mark.parametrize("name", expert_models.CONFIGS)
def test_random_models_of_experts_as_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(expert_models.CONFIGS, name, small(expert_models.CONFIGS[name]))
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / "m"), "--shape", name, "--layers", "3"])
    expert_models.main()
    found, wanted = open_checkpoint(tmp_path / "m").config, expert_models.CONFIGS[name]
    assert as_stated(found).layers == as_stated(wanted).layers and found.tied_embeddings == wanted.tied_embeddings
    with LLM(tmp_path / "m", gpu="none", threads=1, context=64) as llm:
        assert llm.generate("Hi", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)).token_ids
