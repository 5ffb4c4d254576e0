"""Real clients against the server, each with a job in which a function is called: `make test-clients`.

A row of CLIENTS is a client as its package index has it, at one version, installed in a folder of its own under
build/clients, and the command of its job. Its model is the stand-in (stand_in.py), so the server's protocol is tested
and not a model's wits. Nothing but the installation needs a network. `python run.py NAME...` runs some.

An agent gets a folder with notes.txt, reads it, writes what it says into answer.txt, and answers. Other clients are
driven by a script in jobs/.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from string import Template

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "clients"
INSTALL_SECONDS, JOB_SECONDS = 600, 180
NODE = 20  # they ran with it, though some ask for 22
NOWHERE = "http://127.0.0.1:9"
"""A proxy that is not there: clients that want to look something up elsewhere fail at once."""


@dataclass(frozen=True)
class Client:
    """A client: its packages of PyPI or, as `node`, of npm, and its job.

    command: of an agent, with $url, $folder, $bin (where its programs are) and $script (the prompt, else its standard
    input); empty: the script in jobs/ that has its name. steps: what the stand-in does, with $folder and WORD.
    variables: of its environment. context: of the model, in tokens.
    """

    name: str
    packages: tuple[str, ...]
    node: bool = False
    command: tuple[str, ...] = ()
    steps: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    context: int = 65536

    @property
    def folder(self) -> Path:
        return BUILD / self.name

    @property
    def bin(self) -> Path:
        return self.folder / ("node_modules/.bin" if self.node else "bin")


CODEX_PROVIDER = '{name = "powerinfer", base_url = "$url/v1", wire_api = "responses"}'
OPENCODE_CONFIG = """{
    "provider": {"powerinfer": {
        "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$url/v1"},
        "models": {"stand-in": {"tool_call": true, "limit": {"context": 65536, "output": 4096}}}
    }},
    "model": "powerinfer/stand-in", "autoupdate": false
}"""
CLIENTS = [
    Client("sdk-python", ("openai==3.57.0", "anthropic==2.14.0")),
    Client("sdk-node", ("openai@7.59.0", "@anthropic-ai/sdk@1.14.0", "zod@4.6.7"), node=True),
    Client("ollama-python", ("ollama==0.6.3",)),
    Client("ollama-node", ("ollama@0.6.4",), node=True),
    Client("litellm", ("litellm==1.110.2",), variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
    Client(
        "langchain",
        ("langchain==1.5.2", "langchain-openai==1.7.4", "langchain-ollama==1.1.0", "langgraph==1.2.24"),
    ),
    Client("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]==2.66.0",)),
    Client("instructor", ("instructor[anthropic]==1.17.0",)),
    Client("openai-agents", ("openai-agents==0.24.0",)),
    Client(
        "ai-sdk", ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod@4.6.7"), node=True
    ),
    Client("open-webui", ()),
    Client(
        "codex", ("@openai/codex@0.171.0",), node=True,
        command=(
            "$bin/codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--model", "stand-in",
            "--config", "model_provider=powerinfer", "--config", f"model_providers.powerinfer={CODEX_PROVIDER}",
            "$script",
        ),
        steps='{"think": "I need it.", "call": "exec_command", "arguments": {"cmd": "cat notes.txt"}}, '
              '{"call": "exec_command", "arguments": {"cmd": "echo WORD > answer.txt"}}',
    ),
    Client(
        "claude-code", ("@anthropic-ai/claude-code@2.1.332",), node=True, context=40960,
        command=("$bin/claude", "-p", "$script", "--permission-mode", "acceptEdits"),
        variables={"ANTHROPIC_BASE_URL": "$url", "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "stand-in",
                   "ANTHROPIC_DEFAULT_HAIKU_MODEL": "stand-in", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        steps='{"think": "I need it.", "call": "Read", "arguments": {"file_path": "$folder/notes.txt"}}, '
              '{"call": "Write", "arguments": {"file_path": "$folder/answer.txt", "content": "WORD"}}',
    ),
    Client(
        "opencode", ("opencode-ai@1.18.33",), node=True,
        command=("$bin/opencode", "run"),  # a prompt that it gets as words, it would quote
        variables={"OPENCODE_CONFIG_CONTENT": OPENCODE_CONFIG, "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        steps='{"think": "I need it.", "call": "read", "arguments": {"filePath": "$folder/notes.txt"}}, '
              '{"call": "write", "arguments": {"content": "WORD", "filePath": "$folder/answer.txt"}}',
    ),
    Client(
        "qwen-code", ("@qwen-code/qwen-code@0.24.4",), node=True,
        command=("$bin/qwen", "--auth-type", "openai", "--approval-mode", "yolo", "-p", "$script"),
        variables={"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "stand-in"},
        steps='{"think": "I need it.", "call": "read_file", "arguments": {"file_path": "$folder/notes.txt"}}, '
              '{"call": "write_file", "arguments": {"file_path": "$folder/answer.txt", "content": "WORD"}}',
    ),
    Client(
        "aider", ("aider-chat==0.86.2",),
        command=(
            "$bin/aider", "--model", "openai/stand-in", "--edit-format", "whole", "--no-git", "--yes-always",
            "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--file", "notes.txt",
            "--message", "$script",
        ),
        variables={"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "none"},
        steps=r'{"say": "It says WORD, yes.\n\nanswer.txt\n```\nWORD\n```\n"}',  # it has no functions: it reads texts
    ),
]  # fmt: skip


def missing() -> str:
    """What of the tools that install clients is not here; empty: nothing."""
    lacks = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if "node" not in lacks:
        told = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
        lacks += [f"node {NODE} or newer"] * (int(told.strip("v\n").partition(".")[0]) < NODE)
    lacks += ["Python's venv"] * (find_spec("ensurepip") is None)
    return ", ".join(lacks)


def install(client: Client) -> str:
    """Why the client's packages could not be installed; empty: they are there, now or from an earlier run."""
    stamp, wanted = client.folder / "installed", "\n".join(client.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    shutil.rmtree(client.folder, ignore_errors=True)
    client.folder.mkdir(parents=True)
    if client.node:
        npm = ["npm", "install", "--prefix", ".", "--no-audit", "--no-fund", "--loglevel=error"]
        commands = [[*npm, *client.packages]]
    else:
        pip = [client.bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        commands = [[sys.executable, "-m", "venv", "."], *([[*pip, *client.packages]] if client.packages else [])]
    for command in commands:
        try:
            done = subprocess.run(
                command, cwd=client.folder, timeout=INSTALL_SECONDS, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"the installation took more than {INSTALL_SECONDS} s"
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return next((line for line in lines if "error" in line.lower()), "it does not say why")
    stamp.write_text(wanted)
    return ""


@contextmanager
def serving(client: Client) -> Iterator[str]:
    """The address of a server of the stand-in. Its log is beside the client's packages."""
    log = client.folder / "server.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with log.open("wb") as file:
        server = subprocess.Popen(
            [sys.executable, HERE / "stand_in.py", str(client.context)], stderr=file, env=environment
        )
    try:
        while not (lines := [line for line in logged(client) if line.get("event") == "listening"]):
            if server.poll() is not None:
                raise SystemExit(f"the stand-in did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield lines[0]["url"]
    finally:
        server.terminate()
        server.wait(60)


def logged(client: Client) -> list[dict[str, str]]:
    """The whole lines of the server's log that are JSON."""
    lines = (client.folder / "server.log").read_text(errors="replace").rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def job(client: Client, url: str, folder: Path, word: str) -> str:
    """Why the client did not do its job; empty: it did. folder: an empty one."""
    (folder / "home").mkdir()
    work = folder / "work"
    work.mkdir()
    (work / "notes.txt").write_text(f"code word: {word}\n")
    known = {"url": url, "folder": str(work), "bin": str(client.bin)}
    said = '{"think": "That is it.", "say": "It says WORD, yes."}'
    steps = client.steps if "say" in client.steps else f"{client.steps}, {said}"
    known["script"] = f"Write into answer.txt what notes.txt says. SCRIPT [{Template(steps).safe_substitute(known)}]"
    command = [Template(text).safe_substitute(known) for text in client.command]
    if not client.command:
        script = HERE / "jobs" / f"{client.name.replace('-', '_')}_job.{'mjs' if client.node else 'py'}"
        if client.node:  # which looks packages up from where a script is
            for path in (HERE / "jobs" / "job.mjs", script):
                shutil.copy(path, client.folder)
            script = client.folder / script.name
        command = ["node" if client.node else str(client.bin / "python"), str(script), url]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(folder / "home"), "LANG": "C.UTF-8", "TERM": "dumb",
        "HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1",
        **{name: Template(text).safe_substitute(known) for name, text in client.variables.items()},
    }  # fmt: skip
    given = folder / "input"
    given.write_text("" if "$script" in client.command else known["script"])
    output = client.folder / "job.log"
    with output.open("wb") as file, given.open("rb") as read:
        running = subprocess.Popen(
            command, cwd=work, env=environment, stdin=read, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = running.wait(JOB_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it took more than {JOB_SECONDS} s"
        finally:  # what it has started, too
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    if code:
        return f"exit status {code}"
    if client.command:
        if f"It says {word}, yes." not in output.read_text(errors="replace"):
            return "it did not show the answer"
        if not (work / "answer.txt").exists() or (work / "answer.txt").read_text().strip() != word:
            return "answer.txt does not have the word"
    return ""


def check(client: Client) -> tuple[str, str]:
    """(result, what is known of it) of a client; the result is passed, FAILED or not run."""
    if problem := install(client):
        return "not run", problem
    with serving(client) as url, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        problem = job(client, url, Path(folder), f"word{secrets.token_hex(4)}")
    answered = [int(line["prompt_tokens"]) for line in logged(client) if int(line.get("completion_tokens", 0))]
    if problem:
        sys.stdout.write((client.folder / "job.log").read_text(errors="replace"))
        return "FAILED", f"{problem}; {client.folder.relative_to(ROOT)} has the logs"
    return "passed", f"{len(answered)} answers, longest prompt {max(answered)} tokens"


def main(names: list[str]) -> int:
    if unknown := set(names) - {client.name for client in CLIENTS}:
        known = ", ".join(client.name for client in CLIENTS)
        raise SystemExit(f"no client is named {', '.join(sorted(unknown))}; there are {known}")
    not_run = ROOT / "build" / "not-run"
    if lacks := missing():
        not_run.parent.mkdir(exist_ok=True)
        not_run.write_text(f"missing: {lacks}; on Debian: apt-get install nodejs npm python3-venv\n")
        sys.stderr.write(not_run.read_text())
        return 1
    results: dict[str, str] = {}
    table = ""
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        begin = time.monotonic()
        results[client.name], told = check(client)
        line = f"{client.name:14} {time.monotonic() - begin:5.0f} s  {results[client.name]:8} {told}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        table += line
    sys.stdout.write(f"\n{table}")
    left_out = [name for name, result in results.items() if result == "not run"]
    if left_out and "FAILED" not in results.values():
        not_run.write_text(f"{', '.join(left_out)} could not be installed\n")
    return int(set(results.values()) != {"passed"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
