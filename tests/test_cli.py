"""The command as a user meets it: its output and its exit status, in a process of its own where that matters."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from powerinfer.cli import common, progress, run
from powerinfer.cli.main import VERBS, main
from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError
from powerinfer.pinned import CATALOGUE
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import StreamEvent

COMMAND = [sys.executable, "-m", "powerinfer.cli.main"]


def powerinfer(*args: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: a new one takes longer to start than most commands do."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        file.write(stdin)
        file.seek(0)
        patch.setattr(sys, "stdin", file)
        for name, value in environment.items():
            patch.setenv(name, value)
        with redirect_stdout(out), redirect_stderr(err):
            try:
                status = main(list(args))
            except SystemExit as end:  # of --help
                status = int(end.code or 0)
    return subprocess.CompletedProcess(list(args), status, out.getvalue(), err.getvalue())


def process(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command as installed for this interpreter."""
    return subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, text=True, timeout=120)


def without_progress(stderr: str) -> str:
    """What was said beside the progress of loading, which is shown where that takes long, on busy cores."""
    return re.sub(r"^loading weights: \d+%.*\n", "", stderr, flags=re.MULTILINE)


def error_line(done: subprocess.CompletedProcess[str], status: int = 2) -> str:
    """The one line of a failure; nothing else may be said, least of all a traceback."""
    assert done.returncode == status, (done.returncode, done.stderr)
    lines = without_progress(done.stderr).splitlines()
    assert len(lines) == 1 and lines[0].startswith("powerinfer: "), done.stderr
    line = lines[0].removeprefix("powerinfer: ")
    if "--json" in done.args:
        document = json.loads(done.stdout)
        assert document["status"] == status and document["error"]["message"] == line, document
    else:
        assert done.stdout == ""
    return line


# ---------------------------------------------------------------- the frame


def test_version_and_help() -> None:
    from powerinfer import __version__

    assert process("--version").stdout == f"powerinfer {__version__}\n"
    shown = process("--help")
    assert shown.returncode == 0 and all(re.search(rf"^  {verb} ", shown.stdout, re.MULTILINE) for verb in VERBS)
    bare = powerinfer()
    assert bare.returncode == 2 and bare.stdout == "" and "usage:" in bare.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str) -> None:
    shown = powerinfer(verb, "--help", COLUMNS="120")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: powerinfer {verb}")
    assert "--json" in shown.stdout and "--debug" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["frobnicate"], "no command frobnicate; there are run, chat"),
        (["rnu"], "no command rnu; did you mean run?"),
        (["rum", "hi"], "no command rum; did you mean run?"),
        (["help", "rnu"], "no command rnu; did you mean run?"),
        (["run", "hi", "-ngl", "99"], "no flag -ngl: use --vram SIZE"),
        (["chat", "--ctx-size=5"], "no flag --ctx-size: use -c N"),
        (["run", "hi", "--n-predict", "5"], "no flag --n-predict: use -n N"),
        (["run", "-f", "x.txt"], "no flag -f: powerinfer run < FILE"),
        (["run", "-i"], "no flag -i: `powerinfer chat`"),
        (["run", "hi", "-fa", "on"], "no flag -fa: leave it out"),
        (["serve", "--n-cpu-moe", "10"], "no flag --n-cpu-moe: leave it out"),
        (["serve", "--jinja"], "no flag --jinja: leave it out: the model's chat template is always used"),
        (["bench", "-p", "64"], "no flag -p: use --prompt-tokens N"),
        (["run", "hi", "-hf", "owner/name:Q4_K_M"], "`powerinfer pull owner/name:Q4_K_M` fetches it"),
        (["run", "hf.co/owner/name", "hi"], "`powerinfer pull owner/name` fetches it"),
        (["show", "model.gguf"], "no command show; did you mean inspect?"),
        (["Why is the sky blue?"], 'a prompt follows `run`: powerinfer run "Why is the sky blue?"'),
        (["Say " * 99], 'a prompt follows `run`: powerinfer run "PROMPT"'),
        (["ps"], "no command ps: the page of a server"),
        (["stop", "x"], "no command stop: Ctrl-C ends a server"),
        (["list", "-ngl"], "unrecognized arguments: -ngl"),
        (["inspect", "--contxt=5"], "--contxt=5; did you mean --context?; see"),
        (["run"], "no prompt; `powerinfer run \"...\"`, or pipe one in; `powerinfer chat` is a conversation"),
        (["run", "hi", "-p", "hi"], "give the prompt once"),
        (["run", "--no-such-flag"], "--no-such-flag; see `powerinfer run --help`"),
        # a prefix is not guessed: a new flag must not change old commands
        (["run", "hi", "--tempera", "1"], "--tempera 1; did you mean --temperature?"),
        (["run", "hi", "--temperature", "warm"], "--temperature must be a number, not 'warm'"),
        (["run", "hi", "--temperature", "-1"], "temperature must be"),
        (["run", "hi", "--top-p", "1.5"], "top_p must be"),
        (["run", "hi", "--top-p", "nan"], "top_p must be"),
        (["run", "hi", "--max-tokens", "0"], "max_tokens must be"),
        (["run", "hi", "--max-tokens", "1.5"], "--max-tokens must be a whole number, not '1.5'"),
        (["run", "hi", "--logit-bias", "5"], "--logit-bias must be ID=BIAS, not '5'"),
        (["run", "hi", "--kv-type", "f8"], "--kv-type must be one of"),
        (["run", "hi", "--raw", "--system", "x"], "--system needs the chat template"),
        (["run", "hi", "--logprobs", "2"], "--logprobs are written with --json alone"),
        (["run", "hi", "-m", "/nowhere/model.gguf"], "no file or folder /nowhere/model.gguf"),
        (["run", "hi", "-m", "owner/name"], "powerinfer pull owner/name"),
        (["inspect", "--context", "-1"], "context must be a whole number of at least 0, not -1"),
        (["inspect", "-m", "smollm2-135m-instruc"], "did you mean smollm2-135m-instruct?"),
        (["bench", "--repeat", "0"], "--repeat"),
        (
            ["eval"],
            "missing: perplexity|agreement|tasks (what to measure), --file (UTF-8 text; tasks: items, repeatable); see",
        ),
        (["eval", "perplexity"], "--file"),
        (["eval", "perplexity", "--file", "/nowhere.txt"], "/nowhere.txt"),
        (
            ["eval", "likeness", "--file", "x"],
            "follows `powerinfer eval` must be one of perplexity, agreement, tasks, not 'likeness'",
        ),
        (["eval", "agrement", "--file", "x"], "not 'agrement'; did you mean agreement?"),
        (["run", "hi", "--vram", "much"], "--vram must be a size (such as 8GiB, 500MB), not 'much'"),
        (["run", "hi", "-m"], "--model needs a value; see"),
        (["run", "hi", "there", "you"], "unexpected: there you; a prompt of several words needs quotes; see"),
        (["run", "hi", "there"], "unexpected: there; a prompt of several words needs quotes, and hi is not the name"),
        (["run", "qwen3-4c", "hi"], "qwen3-4c is not the name of a model; did you mean qwen3-4b?; see"),
        (["run", "owner/name:Q8_0", "hi"], "owner/name:Q8_0 is neither a path nor a pulled model"),
        (["run", "hi", "--nothink"], "no flag --nothink: use --think off"),
        (["run", "hi", "--raw", "--think", "off"], "--think needs the chat template, which --raw does not use"),
        (["run", "hi", "--raw", "--reasoning-budget", "9"], "--reasoning-budget needs the chat template"),
        (["list", "all"], "unexpected: all; see"),
        (["completion"], "missing: SHELL (bash, zsh or fish); see"),
        (["pull", "a b c"], "no model a b c"),
        (["completion", "tcsh"], "the shells are bash, zsh, fish"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_requests_are_one_line_and_status_2(args: list[str], says: str) -> None:
    assert says in error_line(powerinfer(*args))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model at all" * 100])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    before = time.process_time()  # of the process itself: other tests share the cores
    assert "broken.gguf" in error_line(powerinfer("run", "hi", "-m", str(file)))
    assert time.process_time() - before < 3


def test_debug_shows_the_traceback() -> None:
    done = process("run", "hi", "-m", "/nowhere.gguf", "--debug")
    assert done.returncode == 2 and "Traceback" in done.stderr
    assert "RequestError: no file or folder /nowhere.gguf" in done.stderr


def test_prompts_that_are_not_text() -> None:
    done = subprocess.run([*COMMAND, "run"], input=b"\xff\xfe\x00", capture_output=True, timeout=60)
    assert done.returncode == 2 and b"the prompt on stdin is not UTF-8 text" in done.stderr
    done = subprocess.run([*COMMAND, "run", b"caf\xe9"], capture_output=True, timeout=60)
    assert done.returncode == 2 and b"the prompt is not UTF-8 text" in done.stderr


def test_a_verb_imports_nothing_heavy_before_it_needs_it() -> None:
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "completion", "words", "--", "run", "-m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "powerinfer.hub" in loaded
    assert not loaded & {"numpy", "jinja2", "tokenizers", "huggingface_hub", "subprocess", "zipfile", "shutil"}


# ---------------------------------------------------------------- flags from the dataclasses


def parse(config: type, *argv: str) -> Any:
    parser = common.Parser(prog="test")
    common.config_flags(parser, config, "group")
    return common.config_from(parser.parse_args(list(argv)), config)


def test_flags_fill_the_dataclasses() -> None:
    assert parse(EngineConfig) == EngineConfig() and parse(SamplingParams) == SamplingParams()
    assert parse(EngineConfig, "--threads", "3", "--no-prefix-cache", "--quantize", "q8_0") == EngineConfig(
        threads=3, prefix_cache=False, quantize="q8_0"
    )
    argv = "--max-tokens none --stop A --stop B --stop-token-ids 7 --logit-bias 5=-inf --logit-bias 6=1.5 --ignore-eos"
    assert parse(SamplingParams, *argv.split()) == SamplingParams(
        max_tokens=None, stop=["A", "B"], stop_token_ids=[7], logit_bias={5: float("-inf"), 6: 1.5}, ignore_eos=True
    )


def test_a_seed_of_minus_one_is_another_every_time() -> None:
    assert parse(SamplingParams, "--seed", "-1").seed is None
    assert parse(SamplingParams, "--seed", "7").seed == 7


def test_help_of_a_command() -> None:
    assert powerinfer("help", "run").stdout == powerinfer("run", "--help").stdout
    assert powerinfer("help").stdout.startswith("usage: powerinfer COMMAND")


def test_every_option_has_a_flag() -> None:
    import dataclasses

    for config in (EngineConfig, SamplingParams):
        parser = common.Parser(prog="test")
        common.config_flags(parser, config, "group")
        options = {field.name for field in dataclasses.fields(config) if "help" in field.metadata}
        assert len(options) > 10 and options <= {action.dest for action in parser._actions}


def test_a_verbs_own_default_is_used_and_shown() -> None:
    parser = common.Parser(prog="test")
    common.config_flags(parser, SamplingParams, "group", {"max_tokens": 77})
    assert common.config_from(parser.parse_args([]), SamplingParams).max_tokens == 77
    assert common.config_from(parser.parse_args(["--max-tokens", "5"]), SamplingParams).max_tokens == 5
    assert "default 77" in parser.format_help()


def test_parser_errors_are_request_errors() -> None:
    with pytest.raises(RequestError, match="see `test --help`"):
        parse(EngineConfig, "--threads")


# ---------------------------------------------------------------- output


def test_generated_text_cannot_command_a_terminal() -> None:
    assert common.printable("a\x1b[2Jb\x07\x9b\r\n\tüé漢") == "a\\x1b[2Jb\\x07\\x9b\\x0d\n\tüé漢"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "json_mode", "said"), [(io.StringIO, 0, 1), (Terminal, 1, 0), (Terminal, 0, 1)])
def test_a_small_model_is_said_to_be_small(
    stream: type, json_mode: int, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    common.small_model_note(None, common.Output(bool(json_mode)))
    assert screen.getvalue().count("small model") == said
    common.small_model_note("SmolLM2", common.Output(bool(json_mode)))
    assert screen.getvalue().count("tiny model") == said


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_progress_is_silent_when_quick_and_clean_when_slow(stream: type, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Bar() as bar:
        bar("loading", 1, 4)
        assert screen.getvalue() == ""
        now[0] = 10.0
        bar("loading", 2, 4)
        assert "loading" in screen.getvalue() and "50%" in screen.getvalue()
        bar("loading", 3, 4)
        assert "75%" not in screen.getvalue(), "not redrawn within a moment"
    assert screen.getvalue().endswith("\r\033[K" if stream is Terminal else "50%, 0:20 left\n")


def test_the_end_of_some_work_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress.Bar()
    for label in ("loading", "packing"):
        for done in (2, 4, 4, 4):
            now[0] += 6.0
            bar(label, done, 4)
    lines = [line.partition(",")[0] for line in screen.getvalue().splitlines()]
    assert lines == ["loading: 50%", "loading: 100%", "packing: 50%", "packing: 100%"]


def test_progress_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress.Bar()
    for seconds, done in ((0, 50), (10, 60), (20, 70), (3000, 99), (4000, 100)):
        now[0] = seconds
        bar("work", done, 100)
    expected = ["work: 60%, 0:40 left", "work: 70%, 0:30 left", "work: 99%, 1:01 left", "work: 100%"]
    assert screen.getvalue().splitlines() == expected, "50 were done when it began"
    now[0] += 10
    bar("more", 1, 1000)
    now[0] += 10
    bar("more", 2, 1000)
    assert screen.getvalue().splitlines()[-1] == "more: 0%, 2:46:20 left"


def test_completion_words(tmp_path: Path) -> None:
    def words(*context: str) -> list[str]:
        return powerinfer("completion", "words", "--", *context, POWERINFER_CACHE=str(tmp_path)).stdout.split()

    (tmp_path / "Mine.gguf").write_bytes(b"GGUF")
    powerinfer("pull", str(tmp_path / "Mine.gguf"), POWERINFER_CACHE=str(tmp_path))
    assert words("", "powerinfer") == list(VERBS)
    assert words("ru", "powerinfer") == list(VERBS)
    assert words("run", "-m") == ["mine", *sorted([*CATALOGUE, "smollm2"])]
    assert "mine" in words("pull", "pull")
    assert "--temperature" in words("run", "hi") and "--prompt-tokens" not in words("run", "hi")
    assert words("run", "--kv-type") == ["f16", "q8_0", "f32"]
    assert words("run", "--threads") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid(shell: str) -> None:
    import shutil

    script = powerinfer("completion", shell).stdout
    assert "powerinfer completion words" in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to read the script")
    subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=20)


def test_bash_completes(tmp_path: Path) -> None:
    """The script in a real bash: what stands at the cursor after `powerinfer run -m smol`."""
    (tmp_path / "powerinfer").write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    (tmp_path / "powerinfer").chmod(0o755)
    lines = [powerinfer("completion", "bash").stdout, "COMP_WORDS=(powerinfer run -m smol)", "COMP_CWORD=3"]
    lines += ["_powerinfer", 'echo "${COMPREPLY[@]}"']
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "POWERINFER_CACHE": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent / "src")
    done = subprocess.run(["bash"], input="\n".join(lines), capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split() == ["smollm2", "smollm2-135m-instruct"], done.stderr


# ---------------------------------------------------------------- with the real model


@pytest.fixture(scope="module")
def answered(smollm2: Path) -> dict[str, Any]:
    """One greedy answer as JSON."""
    flags = ["--raw", "--temperature", "0", "--max-tokens", "12", "--json", "--logprobs", "2"]
    done = powerinfer("run", "The capital of France is", "-m", str(smollm2), *flags)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return dict(json.loads(line))


def test_run_json(answered: dict[str, Any]) -> None:
    assert "Paris" in answered["text"]
    assert answered["prompt_tokens"] == 5 and answered["completion_tokens"] == len(answered["token_ids"]) == 12
    assert answered["finish_reason"] == "length"
    assert set(answered["timings"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert all(value > 0 for value in answered["timings"].values())
    assert [len(one["top"]) for one in answered["logprobs"]] == [2] * 12


def test_run_streams_the_same_text(smollm2: Path, answered: dict[str, Any]) -> None:
    flags = ["--raw", "--temperature", "0", "--max-tokens", "12"]
    done = process("run", "-", "-m", str(smollm2), *flags, stdin="The capital of France is")
    assert done.stdout == answered["text"] + "\n"
    assert without_progress(done.stderr) == "(ended by --max-tokens 12)\n"


def test_run_with_a_pulled_model_and_its_template(smollm2: Path) -> None:
    flags = ["--temperature", "0", "--max-tokens", "8", "-v"]
    done = powerinfer("run", "What is the capital of France?", "-m", "smollm2", *flags)
    assert done.returncode == 0 and len(done.stdout) > 8
    # the question has 7 tokens; the template adds its own system message and the marks of the turns
    assert re.search(r"^prompt_tokens +37$", done.stderr, re.MULTILINE)
    for shown in ("decode_tok_s", "isa", "threads"):
        assert re.search(rf"^{shown} +\w", done.stderr, re.MULTILINE), shown


def test_a_prompt_beyond_the_context_names_both_numbers(smollm2: Path) -> None:
    flags = ["--raw", "--context", "64", "--max-tokens", "8"]
    line = error_line(powerinfer("run", "word " * 100, "-m", str(smollm2), *flags))
    assert "8" in line and "64" in line and re.search(r"\b(100|101)\b", line)


def test_chat_remembers_and_obeys_its_commands(smollm2: Path) -> None:
    talk = "My name is Ada.\nWhat is my name?\n/reset\n/nonsense\n/system Be brief.\nHello\n\n/help\n/exit\nnot read\n"
    done = powerinfer("chat", "-m", str(smollm2), "--temperature", "0", "--max-tokens", "24", "--json", stdin=talk)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert len(document["turns"]) == 3
    assert [message["role"] for message in document["messages"]] == ["system", "user", "assistant"]
    assert document["messages"][0]["content"] == "Be brief."
    first, second, third = document["turns"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"], "the first turn is in it"
    assert third["prompt_tokens"] < first["prompt_tokens"], "forgotten, and the template's own system message replaced"
    assert second["cached_tokens"] >= 32 * (first["prompt_tokens"] // 32), "the first turn's pages are used again"
    assert "no command /nonsense" in done.stderr


def test_chat_goes_on_when_the_context_is_full(smollm2: Path) -> None:
    talk = "word " * 200 + "\n/reset\nHi\n"
    done = powerinfer("chat", "-m", str(smollm2), "--context", "96", "--max-tokens", "8", "--json", stdin=talk)
    assert done.returncode == 0, done.stderr
    assert "does not fit the context" in done.stderr and len(json.loads(done.stdout)["turns"]) == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_stream_may_be_closed(closed: str) -> None:
    for words, status in (("list", 0), ("rnu", 2)):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, words]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert done.returncode == status, done
        assert not done.stdout if ">&-" in closed.split() else not done.stderr


def test_ctrl_c_ends_a_stream_cleanly(smollm2: Path) -> None:
    command = [*COMMAND, "run", "Once upon a time", "-m", str(smollm2), "--raw", "--ignore-eos", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, said = process.stdout.read(), process.stderr.read()
        assert process.wait(30) == 130
    assert rest.endswith(b"\n") and without_progress(said.decode()) == ""


def test_ctrl_c_keeps_what_was_generated() -> None:
    closed = []

    def events() -> Iterator[StreamEvent]:
        try:
            yield StreamEvent("Once ", 5)
            yield StreamEvent("upon", 6)
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    status, document = run.answer(events(), common.Output(json_mode=True))
    assert status == 130 and closed
    assert document == {"text": "Once upon", "token_ids": [5, 6], "completion_tokens": 2, "finish_reason": "abort"}


def test_a_broken_pipe_is_quiet(smollm2: Path) -> None:
    command = [*COMMAND, "run", "Once upon a time", "-m", str(smollm2), "--raw", "--ignore-eos", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(5)
        process.stdout.close()
        assert without_progress(process.stderr.read().decode()) == ""
        assert process.wait(60) == 141


def test_bench_json(smollm2: Path) -> None:
    flags = ["-m", str(smollm2), "--prompt-tokens", "40", "--gen-tokens", "4", "--repeat", "3", "--json"]
    done = process("bench", *flags)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    for rate in (document["prefill_tok_s"], document["decode_tok_s"]):
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    # 96.6 MB are the file's weights; how they are packed may add a little
    assert 90e6 < document["bytes_per_token"] < 130e6
    read_per_second = document["bytes_per_token"] * document["decode_tok_s"]["median"]
    assert document["bandwidth_gb_s"] == pytest.approx(read_per_second / 1e9)
    assert 90 < document["peak_rss_mb"] < 2000 and document["choices"]


def test_inspect_json(smollm2: Path) -> None:
    done = powerinfer("inspect", "-m", "smollm2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["sizes"]["n_layers"] == 30 and document["sizes"]["vocab_size"] == 49152
    assert document["parameters"] == 134_515_008 and document["file_bytes"] == 98_362_432
    assert document["quantisation"]["main"] == "Q4_1"
    assert set(document["quantisation"]["bytes"]) == {"Q4_1", "Q8_0", "F32"}
    assert document["chat_template"] is True and document["choices"]
    assert "heads" in powerinfer("inspect", "-m", "smollm2").stdout


def test_perplexity_json(smollm2: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    flags = ["-m", "smollm2", "--file", str(text), "--context", "64"]
    done = powerinfer("eval", "perplexity", *flags, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert 1 < document["perplexity"] < 3, "a sentence that was just read is no surprise"
    text.write_text("short")
    done = powerinfer("eval", "perplexity", *flags)
    assert done.returncode == 2 and "64" in error_line(done)
