"""How a model's publisher wants it sampled: what is read, what is ignored, and that it only fills what nobody gave."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from model_files import tiny_folder, tiny_gguf
from serving import served_llm
from toy_model import ToyTokenizer

from powerinfer import LLM, hub
from powerinfer.cli.common import with_model_defaults
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.pinned import CATALOGUE
from powerinfer.runtime.params import SamplingParams
from powerinfer.text.model_text import sampling_defaults_of
from powerinfer.text.sampling_defaults import SamplingDefaults, folder_defaults, gguf_defaults

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [151645, 151643]}


def written(folder: Path, document: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def test_a_folder_states_its_sampling(tmp_path: Path) -> None:
    assert folder_defaults(tmp_path) == SamplingDefaults()
    found = folder_defaults(written(tmp_path, QWEN3))
    assert found.values == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert found.source == "generation_config.json" and found.notes == ()
    assert folder_defaults(written(tmp_path, {"eos_token_id": 2, "top_p": None})) == SamplingDefaults()


def test_a_folder_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    stated = {"do_sample": False, "temperature": 0.7, "top_k": 50, "repetition_penalty": 1.1}
    assert folder_defaults(written(tmp_path, stated)).values == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_a_gguf_file_states_its_sampling() -> None:
    float32 = 0.949999988079071  # what a file's float32 of 0.95 reads as
    metadata = {
        "general.sampling.temp": 0.699999988079071,
        "general.sampling.top_p": float32,
        "general.sampling.top_k": 20,
        "general.sampling.min_p": 0.0,
        "general.sampling.penalty_repeat": 1.0499999523162842,
    }
    found = gguf_defaults(metadata)
    assert found.source == "GGUF metadata"
    assert found.values == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }
    assert gguf_defaults({"general.name": "x"}) == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e300),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "0.7\x1b[2J" * 100),
        ("temperature", True),
        ("temperature", [0.7]),
        ("top_k", 2.5),
        ("top_k", -2),
        ("top_k", 1 << 70),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", {"a": 1}),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_a_hostile_value_is_ignored_with_one_line(name: str, value: Any) -> None:
    keys = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
    found = gguf_defaults({f"general.sampling.{keys.get(name, name)}": value})
    assert not found.values and not found.source and len(found.notes) == 1
    assert "ignored" in found.notes[0] and found.notes[0].isprintable() and len(found.notes[0]) < 250


def test_hostile_folders(tmp_path: Path) -> None:
    found = folder_defaults(written(tmp_path, {"do_sample": "no", "temperature": 0.5, "top_p": 7}))
    assert found.values == {"temperature": 0.5} and len(found.notes) == 2
    for raw in (b"[]", b'{"top_p": NaN}', b"\xff", b"{" * 9, b'{"a": 1, "a": 2}'):
        (tmp_path / "generation_config.json").write_bytes(raw)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            folder_defaults(tmp_path)


def test_checkpoints_of_both_formats(tmp_path: Path) -> None:
    file = tiny_gguf().put("general.sampling.top_k", 5, 7).write(tmp_path / "m.gguf")
    assert sampling_defaults_of(open_checkpoint(file)).values == {"top_k": 7}
    folder = tiny_folder(tmp_path / "folder")
    assert sampling_defaults_of(open_checkpoint(written(folder, QWEN3))).values["top_k"] == 20


def test_defaults_fill_only_what_is_not_given() -> None:
    with served_llm() as llm:
        assert llm.default_params() == SamplingParams()
        llm.sampling = SamplingDefaults({"temperature": 0.0, "top_k": 3}, "GGUF metadata")
        assert llm.default_params() == SamplingParams(temperature=0.0, top_k=3)
        assert llm.default_params(temperature=0.5, seed=1) == SamplingParams(temperature=0.5, top_k=3, seed=1)
        assert llm.default_params(temperature=0) == SamplingParams(temperature=0), "greedy is the most likely token"
        given = argparse.Namespace(top_k=9)
        params = SamplingParams(top_k=9, stop="x")
        assert with_model_defaults(params, llm, given) == SamplingParams(temperature=0.0, top_k=9, stop="x")
        greedy = SamplingParams(temperature=0.0)
        assert with_model_defaults(greedy, llm, argparse.Namespace(temperature=0.0)) == greedy


def test_a_prompt_without_params_is_answered_with_the_models_defaults() -> None:
    prompt = ToyTokenizer().encode("any")
    with served_llm() as llm:
        greedy = llm.generate([prompt], SamplingParams(temperature=0))[0].token_ids
        llm.sampling = SamplingDefaults({"temperature": 0.0}, "GGUF metadata")
        assert llm.generate([prompt])[0].token_ids == greedy
        hot = SamplingParams(temperature=50.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
        once, again = (llm.generate([prompt], hot)[0].token_ids for _ in range(2))
        assert once == again != greedy, "params that are given stay as they are"


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_suits_a_small_model(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    model = CATALOGUE[name]
    folder = re.sub("[/:]", "--", hub.full_name(name).lower())
    assert hub.recommended_sampling(tmp_path / "models" / folder / model.file).values == model.sampling
    SamplingParams(**model.sampling)
    file = tiny_gguf().put("tokenizer.chat_template", 8, "{{ enable_thinking }}").write(tmp_path / "m.gguf")
    (tmp_path / "models" / folder).mkdir(parents=True)
    file.rename(tmp_path / "models" / folder / model.file)
    with LLM(tmp_path / "models" / folder / model.file, gpu="none") as llm:
        assert llm.sampling.values == model.sampling
        assert llm.template is not None and llm.template.variables == model.template
    assert hub.recommended_sampling(tmp_path / model.file) == SamplingDefaults()
