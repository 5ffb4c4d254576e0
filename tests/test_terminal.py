"""The command line as people know it: piped prompts, short flags, errors as JSON, conversations in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from sparse_models import tiny_llama

from powerinfer.cli import chat, common, conversation_file, run, terminal
from powerinfer.cli.keys import typed_text
from powerinfer.cli.main import VERBS, main, usage
from powerinfer.cli.terminal import Terminal
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.text.model_text import tokenizer_of

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
    tokens = tokenizer_of(open_checkpoint(smollm2)).encode("The capital of\n\nFrance is")
    assert json.loads(done.stdout)["prompt_tokens"] == len(tokens)


# ---------------------------------------------------------------- flags


def parsed(verb: str, *argv: str) -> Any:
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
    files = {"eval": ["perplexity", "--file", "x"], "rm": ["x"], "sparsify": ["--out", "x"]}
    files["quantize"] = ["x", "q8_0", "-o", "x"]
    needed = (files | {"completion": ["bash"]}).get(verb, [])
    assert main([verb, *needed, "--no-such-flag", "--json"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert set(document) == {"error", "status"} and document["status"] == 2
    assert document["error"]["type"] == "RequestError" and "--no-such-flag" in document["error"]["message"]
    assert err == f"powerinfer: {document['error']['message']}\n"


def test_errors_that_are_no_mistake_in_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "no command rnu; did you mean run?"
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert main(["inspect", "-m", str(tmp_path / "broken.gguf"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ModelError"
    assert main(["run", "--no-such-flag", "--", "--json"]) == 2
    assert capsys.readouterr().out == "", "it is the prompt"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (KeyboardInterrupt(), 130, "Interrupted"),
        (MemoryError(), 1, "MemoryError"),
        (ZeroDivisionError(), 1, "ZeroDivisionError"),
    ],
)
def test_other_ends_are_documents_too(
    error: BaseException, status: int, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from powerinfer.cli import list as listing

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(listing, "list_stored", fail)
    assert main(["list", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == status and document["error"]["type"] == kind
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


# ---------------------------------------------------------------- a conversation


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, threads=1, context=160, gpu="none") as loaded:
        yield loaded


@pytest.fixture
def talk(llm: LLM) -> chat.ChatSession:
    """A conversation with short greedy answers."""
    params = SamplingParams(temperature=0.0, max_tokens=4)
    return chat.ChatSession(llm, params, common.Output(True), None, False)


def say(talk: chat.ChatSession, *texts: str) -> None:
    for text in texts:
        assert talk.handle(text, chat.Interrupts())


def roles(talk: chat.ChatSession) -> str:
    return "".join(message["role"][0] for message in talk.messages)


def test_turns_can_be_taken_back_and_answered_again(talk: chat.ChatSession) -> None:
    say(talk, "/system Be brief.", "Hello", "What is two and two?")
    before = talk.messages[:]
    assert roles(talk) == "suaua"
    say(talk, "/retry")
    assert talk.messages == before and len(talk.turns) == 3, "greedy answers are the same again"
    say(talk, "/undo")
    assert talk.messages == before[:3]
    say(talk, "/undo", "/undo")
    assert talk.messages == before[:1], "the system message is no turn"
    say(talk, "/undo", "/retry")
    assert talk.messages == before[:1]


def test_every_command_is_acknowledged(talk: chat.ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    for text, says in (
        ("/system Be brief.", "system message set"),
        ("/system", "system message removed"),
        ("/clear", "starts over"),
        ("/reset", "starts over"),
        ("/help", "/save FILE"),
        ("/set", "top_k "),
        ("/undo", "no earlier message"),
        ("/lod x", "did you mean /load?"),
        ("/\x1b[2Jx", "no command /\\x1b[2Jx; /help"),
        ("/save", "needs the name of a file"),
        ("/stats", "context       0 of 160 tokens used"),
        ("/show info", "no command /show; /set lists"),
        ("/model x", "no command /model: the model is chosen when a model is loaded: `powerinfer chat -m NAME`"),
        ("/load /nowhere", "cannot read /nowhere"),
        ("/load \0", "is no path"),
    ):
        say(talk, text)
        assert says in capsys.readouterr().err, text
    assert not any(talk.handle(text, chat.Interrupts()) for text in ("/bye", "/exit", "/quit"))


def test_set_changes_a_sampling_option(talk: chat.ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    say(talk, "/set temp 0.5", "/set top-k 7", "/set max_tokens -1", "/set stop a  b", "/set ignore_eos true")
    say(talk, "/set logit_bias 5=-1", "/set --seed 3", "/set parameter top_p 0.9")
    expected = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        max_tokens=None,
        stop=["a  b"],
        ignore_eos=True,
        logit_bias={5: -1.0},
        seed=3,
    )
    assert talk.params == expected
    assert "temperature           0.5" in capsys.readouterr().err
    for text, says in (
        ("/set temp warm", " temperature must be a number, not 'warm'"),
        ("/set top-k warm", " top_k must be a whole number, not 'warm'"),
        ("/set num_ctx 4096", "no option num_ctx; the context is chosen when a model is loaded"),
        ("/set parameter num_ctx 1", "no option num_ctx; the context"),
        ("/set top_p 1.5", "top_p must be"),
        ("/set tempo 1", "no option tempo; did you mean temp?"),
        ("/set top_q 1", "no option top_q; did you mean top_"),
        ("/set grammar x", "no option grammar"),
        ("/set think off", "no option think; /think on and /think off say"),
        ("/set ignore_eos 1", "true or false"),
        ("/set whatever", "no option whatever; there are max_tokens, temperature, "),
        ("/set whatever 3", "no option whatever; there are max_tokens, temperature, "),
    ):
        say(talk, text)
        assert says in capsys.readouterr().err, text
    assert talk.params == expected
    say(talk, "/set stop none", "/set seed none")
    assert talk.params.stop == () and talk.params.seed is None


def test_a_block_is_one_message(talk: chat.ChatSession) -> None:
    say(talk, '"""/help\nis no command here"""')
    assert talk.messages[0]["content"] == "/help\nis no command here"
    assert chat.unfinished('"""') and chat.unfinished('"""a\n') and not chat.unfinished('"""a"""')
    assert not chat.unfinished('""""""') and not chat.unfinished("a") and chat.unfinished('"""""')


def test_a_full_context_drops_the_oldest_turns(talk: chat.ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    say(talk, "/system Be brief.")
    for number in range(9):
        say(talk, f"{number} " + "word " * 18)
    err = capsys.readouterr().err
    assert err.count("the context is full: ") == 2 and "earlier turns dropped" in err
    assert len(talk.turns) == 9, "every message was answered"
    assert roles(talk).startswith("sua") and talk.messages[0]["content"] == "Be brief."
    assert talk.messages[-2]["content"].startswith("8 ")
    kept = [message["content"][0] for message in talk.messages[1::2]]
    assert kept == sorted(kept) and kept[0] > "0", "the oldest are gone, in order"
    before = talk.messages[:]
    say(talk, "word " * 200)
    assert "does not fit the context" in capsys.readouterr().err and talk.messages == before


def test_an_answer_ends_with_the_context(talk: chat.ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    say(talk, "/set max_tokens none", "/set ignore_eos true", "Hi", "Again")
    err = capsys.readouterr().err
    assert err.count("(the context is full)") == 2 and "1 of the earlier turns dropped" in err
    first, second = talk.turns
    assert first["prompt_tokens"] + first["completion_tokens"] == 160 and second["completion_tokens"] > 80


def test_the_speed_of_an_answer(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    say(chat.ChatSession(llm, params, common.Output(True), None, True), "Hi")
    assert re.search(r"^\(4 tokens, [\d.]+ tok/s, prompt of \d+", capsys.readouterr().err, re.MULTILINE)


def test_the_use_of_the_context(talk: chat.ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    say(talk, "/set ignore_eos true", "Hi", "And?", "/stats")
    rows = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", capsys.readouterr().err, re.MULTILINE))
    used = int(rows["context"].removesuffix(" of 160 tokens used"))
    assert talk.turns[-1]["prompt_tokens"] + 4 <= used <= talk.turns[-1]["prompt_tokens"] + 12
    assert re.match(r"4 tokens, [\d.]+ tok/s, prompt of \d+", rows["last answer"])
    assert rows["first token"].startswith("after 0.") and rows["answers"] == "2, 8 tokens"


def test_ctrl_c_before_an_answer_keeps_the_conversation(
    talk: chat.ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(talk, "Hello")
    before = talk.messages[:]
    monkeypatch.setattr(chat, "answer", lambda *_, **__: (130, {"finish_reason": "abort", "text": ""}))
    say(talk, "What?", "/retry")
    assert talk.messages == before


def test_interrupts_end_an_answer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    before = signal.getsignal(signal.SIGINT)
    ended = []

    def twice() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)  # while the first one is handled
            ended.append(True)

    with chat.Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.allowed(twice)
        signal.raise_signal(signal.SIGINT)
    assert ended and signal.getsignal(signal.SIGINT) is before


# ---------------------------------------------------------------- conversations in files


def test_a_loaded_conversation_is_shown(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [("user", "Old?"), ("assistant", "Yes."), ("user", "What\x1b[2J?"), ("assistant", "That.")]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": [dict(role=a, content=b) for a, b in turns]}))
    talk = chat.ChatSession(llm, SamplingParams(), common.Output(False), None, False)
    say(talk, f"/load {tmp_path}/talk.json")
    out, err = capsys.readouterr()
    assert out == "That.\n" and err.startswith("> What\\x1b[2J?\n(4 messages loaded from ") and "Old" not in err


def test_a_saved_conversation_is_continued(talk: chat.ChatSession, tmp_path: Path) -> None:
    file = tmp_path / "a talk.json"
    say(talk, "/system Be brief, naïve 漢.", "Hello", f"/save {file}")
    before = talk.messages[:]
    assert json.loads(file.read_text(encoding="utf-8")) == {"messages": before}
    assert os.listdir(tmp_path) == ["a talk.json"]
    say(talk, "/system Other.", f"/load {file}")
    assert talk.messages == before
    say(talk, "/clear")
    assert talk.messages == before[:1], "its system message stays"
    say(talk, "Hi", f"/save {file}")
    assert len(json.loads(file.read_text(encoding="utf-8"))["messages"]) == 3, "a conversation is saved over another"
    file.write_text(json.dumps({"messages": before, "turns": [{"text": "x"}]}))
    assert conversation_file.load(file) == before, "the document of chat --json"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"messages": {}}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "tool", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a", "x": 1}, {"role": "assistant", "content": "b"}]}',
        b'{"messages": [{"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]}',
        b"[" * 100_000,
        b'{"messages": [' + b'{"role":' * 50_000,
    ],
    ids=lambda content: repr(content[:40]),
)
def test_hostile_conversations_are_refused(talk: chat.ChatSession, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "talk.json"
    file.write_bytes(content)
    with pytest.raises(PowerInferError):
        conversation_file.load(file)
    with pytest.raises(RequestError, match="is no conversation"):
        conversation_file.save(file, [])
    assert file.read_bytes() == content, "only a saved conversation may be overwritten"
    say(talk, "/clear", f"/load {file}", f"/save {file}")
    assert talk.messages == []


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b" " * (conversation_file.LARGEST + 1))
    for name in ("pipe", "large", ".", "none"):
        with pytest.raises(PowerInferError):
            conversation_file.load(tmp_path / name)
        with pytest.raises(RequestError):
            conversation_file.save(tmp_path / ("no/" if name == "none" else "") / name, [])
    file = tmp_path / "surrogates.json"
    file.write_text('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": ""}]}')
    assert conversation_file.load(file)[0]["content"] == "\ufffd"


# ---------------------------------------------------------------- the line editor


def typed(keys: str, history: Path, count: int = 1) -> list[str | None]:
    """What a terminal reads when these keys are pressed."""
    with create_pipe_input() as pipe:
        commands = {name: about for name, (_, about) in chat.COMMANDS.items()}
        options = common.option_names(SamplingParams)
        terminal = Terminal(history, chat.unfinished, commands, options, input=pipe, output=DummyOutput())
        pipe.send_text(keys)
        return [terminal.read() for _ in range(count)]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("Hello\r", "Hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ('"""one\rtwo"""\r', '"""one\ntwo"""'),
        ("\x1b[200~one\r\ntwo\n\x1b[201~\r", "one\ntwo\n"),
        ("Hello\x03Bye\r", "Bye"),
        ("\x04", None),
    ],
)
def test_keys(keys: str, text: str | None, tmp_path: Path) -> None:
    assert typed(keys, tmp_path / "history") == [text]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/s", ["/system", "/set", "/save", "/stats"]),
        ("/set top", ["top_k", "top_p"]),
        ("/load {}/ta", ["lk.json"]),
        ("/system /s", []),
        ("text /s", []),
        ("one\n/s", []),
    ],
)
def test_completion(text: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    completer = terminal._Completer(dict.fromkeys(chat.COMMANDS, ""), common.option_names(SamplingParams))
    document = Document(text.format(tmp_path))
    assert [one.text for one in completer.get_completions(document, CompleteEvent())] == found


def test_ctrl_c_where_nothing_is_typed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        typed("\x03", tmp_path / "history")


def test_history_is_kept_across_sessions(tmp_path: Path) -> None:
    history = tmp_path / "cache" / "history"
    assert typed("first\rsecond\x1b\rline\r", history, 2) == ["first", "second\nline"]
    assert history.stat().st_mode & 0o777 == 0o600
    assert typed("\x1b[A\x1b[A\x1b[A\r", history) == ["first"]
    assert typed("\x12fir\r\r", history) == ["first"], "Ctrl-R searches it"


def test_history_is_bounded_and_survives_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "history"
    file.write_bytes(b'\xff\n5\n[1]\n"good"\n"half\n"\\ud800"\n' + b"[" * 10_000 + b"\n")
    os.chmod(file, 0o644)
    history = terminal.SavedHistory(file)
    assert list(history.load_history_strings()) == ["\ufffd", "good"]
    history.store_string("x" * (terminal.LARGEST_ENTRY + 1))
    history.store_string("new")
    assert list(history.load_history_strings()) == ["new", "\ufffd", "good"]
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(terminal, "MOST_BYTES", 2000)
    for number in range(400):
        history.store_string(f"entry {number}")
    assert next(iter(history.load_history_strings())) == "entry 399"
    assert file.stat().st_size <= 1000 and file.stat().st_mode & 0o777 == 0o600
    assert next(iter(history.load_history_strings())) == "entry 399"
    assert os.listdir(tmp_path) == ["history"]
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", file / "below"):
        broken = terminal.SavedHistory(path)
        broken.store_string("lost")
        assert list(broken.load_history_strings()) == []


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("and why?", "and why?"),
        ("\x1b[A\x1bOBa\x1b[1;5Cb\x1b[200~c\x1b[201~\x1b", "abc"),
        ("one\rtwo\x1b\rthree\r\r", "one\ntwo\nthree"),
        ("wörk\x7f\x7f\x7fhy\x04\x0f?", "why?"),
        ("a word\x17\x17b\n c\x15d", "b\nd"),
        ("\x7f\x17\x15", ""),
    ],
)
def test_keys_that_were_pressed_before(keys: str, text: str) -> None:
    assert typed_text(keys.encode()) == text
    assert typed_text(keys.encode() + b"\xc3") == text, "half a letter"


# ---------------------------------------------------------------- all of it, on a terminal


class Screen:
    """A process on a pseudo terminal: what it shows, and keys for it."""

    def __init__(self, command: list[str], **environment: str) -> None:
        pid, self._fd = pty.fork()
        if pid == 0:
            os.execvpe(command[0], command, {**os.environ, **environment})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
        self._pid, self._shown = pid, b""

    def keys(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str) -> str:
        """What was shown up to `text`."""
        self._read_until(lambda: text.encode() in self._shown, repr(text))
        before, found, self._shown = self._shown.partition(text.encode())
        return (before + found).decode(errors="replace")

    def until_letters(self, count: int) -> None:
        """Until so many letters of an answer are shown."""
        bar = re.compile(rb"\rreading the prompt [^\r]*")  # of a busy machine
        self._read_until(lambda: len(re.findall(rb"[A-Za-z]", bar.sub(b"", self._shown))) >= count, f"{count} letters")

    def _read_until(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 30
        while not there():
            ready = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"no {what} in {self._shown!r}"
            try:
                self._shown += os.read(self._fd, 1 << 16)
            except OSError:  # the process ended
                raise AssertionError(f"no {what} in {self._shown!r}") from None

    def end(self) -> tuple[str, int]:
        """What it shows until it ends, and its exit status."""
        with contextlib.suppress(OSError):  # the terminal of a process that has ended
            while data := os.read(self._fd, 1 << 16):
                self._shown += data
        os.close(self._fd)
        return self._shown.decode(errors="replace"), os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


PROMPT, ENTERED = "\x1b[0;32;1m>", "\x1b[?2004l"  # as prompt_toolkit writes a prompt, and the end of what was typed


STOPPED = """
import os, signal, sys, termios, time
from powerinfer.cli.keys import unechoed

def has_echo():
    return bool(termios.tcgetattr(0)[3] & termios.ECHO)

child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    while os.getpgrp() != os.tcgetpgrp(0):
        os.sched_yield()
    continued = []
    signal.signal(signal.SIGCONT, lambda *_: continued.append(None))
    with unechoed(lambda text: print("kept", text)):
        print("echo", has_echo(), flush=True)
        try:
            while True:
                time.sleep(0.001)
                if continued:
                    print("again", continued.pop() or has_echo(), flush=True)
        except KeyboardInterrupt:
            pass
    os._exit(7)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # as a shell
os.setpgid(child, child)
os.tcsetpgrp(0, child)
_, status = os.waitpid(child, os.WUNTRACED)
print("stopped", os.WIFSTOPPED(status), has_echo(), flush=True)
os.kill(child, signal.SIGCONT)
_, status = os.waitpid(child, 0)
print("end", os.waitstatus_to_exitcode(status), has_echo(), flush=True)
"""


def test_a_stopped_process_gives_the_terminal_back() -> None:
    screen = Screen([sys.executable, "-c", STOPPED])
    screen.until("echo False")
    screen.keys("a\x1a")
    screen.until("stopped True True")
    screen.until("again False")
    screen.keys("b\x03")
    screen.until("kept ab")
    assert "end 7 True" in screen.end()[0]


def test_a_server_on_a_terminal_says_where_it_is(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny.gguf")
    command = [*COMMAND, "serve", "-m", str(model), "--port", "0", "--gpu", "none", "-c", "64"]
    screen = Screen(command, TERM="xterm", NO_COLOR="")
    block = screen.until("Ctrl-C")
    assert re.search(r"\x1b\[1mtiny, context of 64 tokens, 8 requests at a time\x1b\[0m\r\n", block)
    found = dict(re.findall(r"^  (\S.*?)  +(\S+)", block, re.MULTILINE))
    page = found["chat in a browser"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", page)
    assert (found["OpenAI's API"], found["Anthropic's API"]) == (page + "v1", page[:-1])
    screen.until("tiny is loaded, in ")
    with contextlib.suppress(OSError):
        urllib.request.urlopen(page + "no%1b[2J", timeout=30)
    assert "\x1b[2J" not in screen.until("404 GET /no\\x1b[2J, ")
    screen.keys("\x03")
    rest, status = screen.end()
    assert status == 0 and "the server ends" in rest and "{" not in rest


def test_a_conversation_on_a_terminal(smollm2: Path, tmp_path: Path) -> None:
    flags = ["-m", str(smollm2), "--temp", "0", "-c", "2000", "--gpu", "none"]
    environment = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "NO_COLOR": ""}
    screen = Screen([*COMMAND, "chat", *flags], POWERINFER_CACHE=str(tmp_path), **environment)
    title = screen.until("Ctrl-D ends").splitlines()[-1]
    assert f"\x1b[1m{smollm2.stem}\x1b[0m, context of 2000 tokens; /help" in title
    screen.until(PROMPT)
    screen.keys("\x03")
    screen.until("/bye or Ctrl-D ends")
    screen.until(PROMPT)
    screen.keys("/set ignore_eos true\r")
    screen.until("ignore_eos            true")
    screen.until(PROMPT)
    screen.keys('"""Write a long story\r')
    screen.keys('about the sea."""\r')
    screen.until(ENTERED)
    screen.until_letters(10)  # of the answer
    screen.keys("qx\x7f\x1b[Ax\rz?")
    screen.until_letters(20)
    screen.keys("\x03")
    answered = screen.until("(stopped)")
    assert "^[" not in answered and "z?" not in answered, "keys are not shown in it"
    assert "qx" in screen.until("z?"), "they are the begin of the next message"
    screen.keys("\x03")  # drops it
    screen.keys("\x03\x03")
    for _ in range(2):
        screen.until("/bye or Ctrl-D ends")
        screen.until(PROMPT)
    screen.keys("/set max_tokens 5\r")
    screen.until("max_tokens            5")
    screen.until(PROMPT)
    screen.keys("And?\r")
    screen.until("(ended by --max-tokens 5)")
    screen.until(PROMPT)
    screen.keys(f"/save {tmp_path}/talk.json\r")
    screen.until("(4 messages saved in")
    screen.until(PROMPT)
    screen.keys("\x04")
    last, status = screen.end()
    assert status == 0 and "Traceback" not in last
    assert re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", last).endswith("\n"), "the shell's prompt begins a line"
    saved = conversation_file.load(tmp_path / "talk.json")
    assert saved[0]["content"] == "Write a long story\nabout the sea." and len(saved[1]["content"]) > 4
    assert (tmp_path / "chat-history").stat().st_mode & 0o777 == 0o600
