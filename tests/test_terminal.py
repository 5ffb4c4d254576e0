"""The command line as people know it: piped prompts, short flags, errors as JSON, conversations in a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from powerinfer.cli import common, run
from powerinfer.cli.main import VERBS, main, usage
from powerinfer.errors import RequestError
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams

COMMAND = [sys.executable, "-m", "powerinfer.cli.main"]


# ---------------------------------------------------------------- the prompt of run


def prompt(monkeypatch: pytest.MonkeyPatch, given: str | None, stdin: bytes) -> str:
    """The prompt of a `run` with this argument and a pipe that held `stdin`."""
    reader, writer = os.pipe()

    def write() -> None:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(stdin)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with os.fdopen(reader) as piped, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", piped)
            return run._prompt(given, common.Output(False))
    finally:
        thread.join()


@pytest.mark.parametrize(
    ("given", "stdin", "whole"),
    [
        ("Summarise this:", b"some text\n", "Summarise this:\n\nsome text"),
        ("Summarise this:", b"\ntwo\nlines\n\n", "Summarise this:\n\ntwo\nlines"),
        ("Why?", b"", "Why?"),
        ("Why?", b"\n", "Why?"),
        (None, b"the file\n", "the file\n"),
        ("-", "wörds".encode(), "wörds"),
    ],
)
def test_piped_text_follows_the_prompt(
    given: str | None, stdin: bytes, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prompt(monkeypatch, given, stdin) == whole


@pytest.mark.parametrize("given", [None, "-", "Summarise this:"])
@pytest.mark.parametrize(
    ("stdin", "says"), [(b"\x7fELF\0\0", "binary data"), (b"\xff\xfe", "not UTF-8"), (b"x" * 2001, "larger than")]
)
def test_a_piped_prompt_is_text_of_bounded_size(
    given: str | None, stdin: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LARGEST", 2000)
    with pytest.raises(RequestError, match=says):
        prompt(monkeypatch, given, stdin)
    assert prompt(monkeypatch, "-", b"x" * 2000) == "x" * 2000


@pytest.mark.parametrize("given", [None, "-"])
def test_nothing_piped_in_is_no_prompt(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="no prompt"):
        prompt(monkeypatch, given, b" \n")


def test_a_pipe_that_stays_silent_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PATIENCE", 0.01)
    reader, writer = os.pipe()
    with os.fdopen(reader) as piped, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", piped)
        timer = threading.Timer(0.2, os.close, [writer])
        timer.start()
        assert run._prompt("Why?", common.Output(False)) == "Why?"
        timer.join()
    assert "from stdin" in capsys.readouterr().err


def test_stdin_that_is_neither_file_nor_pipe_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as null:
        monkeypatch.setattr(sys, "stdin", null)
        assert run._prompt("Why?", common.Output(False)) == "Why?"
    monkeypatch.setattr(sys, "stdin", None)
    assert run._prompt("Why?", common.Output(False)) == "Why?"


def test_run_joins_a_file_to_its_prompt(smollm2: Path, tmp_path: Path) -> None:
    from powerinfer.formats.checkpoint import open_checkpoint

    (tmp_path / "text").write_text("France is\n")
    command = [*COMMAND, "run", "The capital of", "--raw", "-m", str(smollm2), "-n", "1", "--json"]
    with open(tmp_path / "text") as file:
        done = subprocess.run(command, stdin=file, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    tokens = open_checkpoint(smollm2).tokenizer().encode("The capital of\n\nFrance is")
    assert json.loads(done.stdout)["prompt_tokens"] == len(tokens)


# ---------------------------------------------------------------- flags


def parsed(verb: str, *argv: str) -> Any:
    from importlib import import_module

    parser = common.Parser(prog=verb)
    common.common_flags(parser)
    import_module(f"powerinfer.cli.{verb}").configure(parser)
    return parser.parse_args(argv)


def test_short_flags() -> None:
    short = "-p hi -m M -n 7 -t 1 -c 64 -s 3 --temp 0 --top-k 1 --top-p 0.5 --min-p 0.1"
    long = "--prompt hi --model M --max-tokens 7 --threads 1 --context 64 --seed 3 --temperature 0 --top-k 1"
    assert parsed("run", *short.split()) == parsed("run", *long.split(), "--top-p", "0.5", "--min-p", "0.1")


def test_every_verb_has_the_short_flags_of_its_options() -> None:
    known = {"--threads": "-t", "--context": "-c", "--seed": "-s", "--max-tokens": "-n", "--temperature": "--temp"}
    seen = set()
    for verb in VERBS:
        parser = common.Parser(prog=verb)
        from importlib import import_module

        import_module(f"powerinfer.cli.{verb}").configure(parser)
        for action in parser._actions:
            for long in known.keys() & set(action.option_strings):
                assert known[long] in action.option_strings, (verb, long)
                seen.add(long)
    assert seen == known.keys()


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_answers_end_where_the_model_ends_them(verb: str) -> None:
    def limit(*argv: str) -> Any:
        return common.config_from(parsed(verb, *argv), SamplingParams).max_tokens

    assert limit() is None
    assert limit("-n", "-1") is None and limit("--max-tokens=-1") is None and limit("-n", "none") is None
    assert limit("-n", "5") == 5
    with pytest.raises(RequestError, match="max_tokens must be a whole number of at least 1"):
        limit("-n", "-2")


def test_help_is_wrapped_at_the_terminals_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        for verb in VERBS:
            with pytest.raises(SystemExit):
                main([verb, "--help"])
            lines = capsys.readouterr().out.splitlines()
            assert max(map(len, lines)) <= width, (verb, max(lines, key=len))
        assert max(map(len, usage().splitlines())) <= max(width, 66), "its table is as wide as it is"
    assert common.wrapped("a  b\nc  d\n\nlong text", 5) == "a  b\nc  d\n\nlong\ntext", "a table keeps its lines"


# ---------------------------------------------------------------- errors as JSON


@pytest.mark.parametrize("verb", VERBS)
def test_an_error_of_any_verb_is_a_document(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = {"eval": ["perplexity", "--file", "x"], "completion": ["bash"]}.get(verb, [])
    assert main([verb, *needed, "--no-such-flag", "--json"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert set(document) == {"error", "status"} and document["status"] == 2
    assert document["error"]["type"] == "RequestError" and "--no-such-flag" in document["error"]["message"]
    assert err == f"powerinfer: {document['error']['message']}\n"


def test_errors_that_are_no_mistake_in_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "no verb rnu; did you mean run?"
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert main(["inspect", "-m", str(tmp_path / "broken.gguf"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ModelError"
    assert main(["run", "--no-such-flag", "--", "--json"]) == 2
    assert capsys.readouterr().out == "", "it is the prompt"


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (MemoryError(), 1), (ZeroDivisionError(), 1)]
)
def test_other_ends_are_documents_too(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from powerinfer.cli import pull

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(pull, "list_stored", fail)
    assert main(["pull", "--list", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == status and document["error"]["type"] == type(error).__name__
    assert document["error"]["message"]


# ---------------------------------------------------------------- the progress of a prompt


def test_the_progress_of_a_prompt(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from powerinfer.runtime import engine

    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(engine, "POLL", 0.002)
    with LLM(smollm2, threads=1, context=512, prefill_chunk=32, gpu="none") as llm:
        params = SamplingParams(max_tokens=2, temperature=0.0)
        for event in llm.stream([5] * 400, params, progress=lambda *one: seen.append(one)):
            first = event
            break
        answered = llm.generate([[5] * 400], params)[0]
    assert first.token_id == answered.token_ids[0]
    done = [one for _, one, _ in seen]
    assert done == sorted(done) and done[-1] == 400 and len(set(done)) > 4
    assert all(label == "reading the prompt" and total == 400 for label, _, total in seen)


def test_the_progress_of_a_prompt_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from powerinfer.cli import progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for kind, shown in ((Terminal, True), (io.StringIO, False)):
        screen = kind()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(progress, "FIRST_AFTER", -1.0)
        with run.reading() as report:
            report("reading the prompt", 3, 4)
            assert ("75%" in screen.getvalue()) is shown
            report("reading the prompt", 4, 4)
            assert screen.getvalue().endswith("\r\033[K") is shown
