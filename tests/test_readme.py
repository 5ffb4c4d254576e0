"""What README.md and the first pages behind it say, done: the wheel in a clean environment, each command and program.

How blocks are read, and what they may use, is in CONTRIBUTING.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
from blocks import Block, Command, blocks, commands, is_shown
from installed import ROOT, clone_in, install

from powerinfer.cli.common import Parser, common_flags
from powerinfer.cli.main import VERBS
from powerinfer.errors import PowerInferError
from powerinfer.hub import _folder_of, default_name, find_stored, full_name

RUN = ["README.md", "docs/quickstart.md", "models/smollm2-sparse/README.md"]
"""Pages of which every block is run; of all pages the commands are checked. The first one has its reader in the clone;
the others are run outside of it, of which the quickstart has nearly the same commands."""

FIRST = [f"docs/{name}.md" for name in ("models", "coming-from", "faq", "reference", "structured-output", "serving")]
"""Pages of which the first block is run, outside of the clone."""

EVERY = [page for folder in (".", "docs", "models/*") for page in sorted(ROOT.glob(f"{folder}/*.md"))]
PAGES = [str(page.relative_to(ROOT)) for page in EVERY]
RUNS = [
    (RUN[0], "in the clone"),
    *((page, "elsewhere") for page in [*RUN[1:], *FIRST[1:]]),
    pytest.param(FIRST[0], "elsewhere", marks=pytest.mark.rest),  # each of its commands plans for the whole catalogue
]

NOT_RUN = {
    r"git clone\b|cd powerinfer$": "network; the test has a clone",
    r"pip install\b": "network; the test installs the wheel itself, with what `.[serve]` needs beside it",
    r"make\b": "an environment of its own, and these tests",
    r"powerinfer pull (?!--names)": "network",
    r"powerinfer (run|chat|serve) .*-m (qwen|owner/)": "a download of gigabytes",
    r"powerinfer demo\b": "half a minute of both cores: tests/test_demo.py",
    r"powerinfer prepare\b": "minutes: tests/test_prepare.py",
    r"powerinfer (train|sparsify)\b": "needs torch, and minutes: tests/test_train.py and tests/test_sparsify.py",
    r"powerinfer measure\b": "measures the machine for a minute: tests/test_measure.py",
    r"powerinfer plan -m (?!.*--card)": "measures the machine first: tests/test_plan.py",
    r"powerinfer run .*--vram": "a GPU that this machine may lack; or measures the machine first: tests/test_hybrid.py",
    r"powerinfer run .*big\.gguf": "a model larger than RAM: tests/test_disk.py",
    r"powerinfer eval tasks\b": "a file of a benchmark: tests/test_tasks.py",
    r"powerinfer eval agreement .*predicted": "predictors of `train`: tests/test_agreement.py",
    r"powerinfer experts\b": "a mixture of experts: tests/test_expert_profile.py",
    r"powerinfer report -m": "what `prepare` writes: tests/test_report.py",
}
"""What is not run, as a regular expression that the command begins with, and why."""

SHORT = {
    "powerinfer run": "-n 8",
    "powerinfer bench": "--gen-tokens 4 --repeat 1",
    "powerinfer eval perplexity": "--context 64",
    "powerinfer eval agreement": "--context 64",
    "powerinfer profile": "--window 64",
}
"""Flags that make a command short whose output a page does not show."""

TEXT = "The sea was calm that morning, and the boats went out one after another. " * 12
SERVED = "127.0.0.1:8080"
CONTEXT = 256
"""Tokens of the context of the models that commands run with, so that no answer is long."""
OF_MODELS = {"run", "chat", "serve", "bench", "inspect", "pack", "profile", "eval", "demo"}


class WrongPage(Exception):
    """A page says what is not so."""


def reason(text: str) -> str | None:
    """Why a command is not run; None: it is."""
    return next((why for begin, why in NOT_RUN.items() if re.match(begin, text)), None)


@dataclass
class Machine:
    """An installation, and a home folder in which SmolLM2 takes the place of the default model.

    real: a home folder with the default model itself, for commands whose answer a page shows; None: it was never
    downloaded here, and such answers are not compared.
    """

    bin: Path
    clone: Path
    home: Path
    real: Path | None

    def environment(self, home: Path | None = None) -> dict[str, str]:
        return {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(home or self.home), "LANG": "C.UTF-8", "NO_COLOR": "1"}


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Machine:
    """Made by the first process that needs it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "installed"
    folder.mkdir(exist_ok=True)
    name = full_name(default_name())
    stored = find_stored(name)
    real = None if stored is None else folder / "real"
    made = Machine(folder / "venv" / "bin", folder / "clone", folder / "home", real)
    with (folder / "lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            clone_in(made.clone)
            install(folder, made.clone, {"serve"}, ["openai"])
            (made.home / "models").mkdir(parents=True)
            short = shortened(smollm2, made.home / "models" / "small.gguf")
            for taken in (name, smollm2.parent.name):
                store(made.home, taken, short)
            if real is not None:
                store(real, name, stored.path)
            for place in (made.clone, made.home):
                (place / "model.gguf").symlink_to(short)
                (place / "text.txt").write_text(TEXT)
            (folder / "made").touch()
    return made


def shortened(model: Path, copy: Path) -> Path:
    """A copy of a GGUF file whose context has CONTEXT tokens."""
    data = model.read_bytes()
    at = data.index(b"llama.context_length") + len(b"llama.context_length") + 4  # behind the value's type
    copy.write_bytes(data[:at] + CONTEXT.to_bytes(4, "little") + data[at + 4 :])
    return copy


def store(home: Path, name: str, model: Path) -> None:
    """A model in the cache of a home folder, under a name."""
    folder = home / ".cache" / "powerinfer" / "models" / _folder_of(name).name
    folder.mkdir(parents=True)
    (folder / model.name).symlink_to(model)
    files = {model.name: model.stat().st_size}
    (folder / "manifest.json").write_text(json.dumps({"name": name, "path": model.name, "source": "", "files": files}))


@contextmanager
def one_core() -> Iterator[None]:
    """What is started here runs on one core, as a worker of pytest-xdist does: threads that wait cost time, too."""
    cores = os.sched_getaffinity(0)
    worker = int("0" + os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Printed(NamedTuple):
    stdout: str
    stderr: str


@dataclass
class Terminal:
    """Commands of a page, one after the other, in a folder. A server that one starts serves those that follow."""

    machine: Machine
    folder: Path
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    port: int = 0

    def do(self, command: Command) -> Printed:
        """What it prints; WrongPage if it fails."""
        if command.script:
            script = self.folder / "example.py"
            script.write_text(self.local(command.text))
            return self.shell(f"python {script.name}", home=self.home(command))
        parts = command.text.split(" && ")
        printed = [self.part(part, command) for part in parts if reason(part) is None]
        return Printed("".join(one.stdout for one in printed), "".join(one.stderr for one in printed))

    def part(self, text: str, command: Command) -> Printed:
        verb = text.split()[1] if text.startswith("powerinfer ") else ""
        if verb == "serve":
            return self.serve(text)
        for begin, flags in SHORT.items() if command.shown is None else ():
            text = re.sub(rf"^{begin}\b", f"{begin} {flags}", text)  # the page's own flags come later, and count
        if verb == "run" and command.shown is not None:
            text = text.replace("powerinfer run", "powerinfer run --temperature 0", 1)
        stdin = "/bye\n" if verb == "chat" else ""
        return self.shell(self.local(text), stdin, command.fails, self.home(command))

    def home(self, command: Command) -> Path | None:
        """The home folder of the default model itself, for what a page shows of it."""
        return self.machine.real if command.shown is not None and of_default(command) else None

    def shell(self, text: str, stdin: str = "", fails: bool = False, home: Path | None = None) -> Printed:
        with one_core():
            done = subprocess.run(
                ["bash", "-ec", text], cwd=self.folder, env=self.machine.environment(home), input=stdin, text=True,
                timeout=240, capture_output=True,
            )  # fmt: skip
        if (done.returncode != 0) is not fails:
            raise WrongPage(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")
        progress = re.compile(r"^[\w ]+: \d+ ?%.*\n", re.MULTILINE)  # a terminal erases it
        return Printed(done.stdout, progress.sub("", done.stderr))

    def local(self, text: str) -> str:
        return text.replace(SERVED, f"127.0.0.1:{self.port}")

    def serve(self, text: str) -> Printed:
        """Start a server; it has printed nothing that a page shows but its address."""
        self.stop()
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        log = self.folder / "serve.log"
        with log.open("w") as output, one_core():
            server = subprocess.Popen(
                ["bash", "-c", f"exec {text} --port {self.port}"], cwd=self.folder, env=self.machine.environment(),
                text=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.servers.append(server)
        end = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10):
                    return Printed("", log.read_text().replace(f"127.0.0.1:{self.port}", SERVED))
            except OSError:
                if server.poll() is not None or time.monotonic() > end:
                    raise WrongPage(log.read_text()) from None
                time.sleep(0.05)

    def stop(self) -> None:
        while self.servers:
            server = self.servers.pop()
            server.send_signal(signal.SIGINT)
            if status := server.wait(60):
                raise WrongPage(f"the server ended with exit status {status}")


@contextmanager
def terminal(machine: Machine, folder: Path) -> Iterator[Terminal]:
    opened = Terminal(machine, folder)
    try:
        yield opened
        opened.stop()
    finally:
        for server in opened.servers:
            server.kill()
            server.wait()


def of_default(command: Command) -> bool:
    """Whether what a command prints is of the default model."""
    if command.script:
        return "LLM()" in command.text
    words = shlex.split(command.text)
    named = {"-m", "-hf", "--model", "--models"} & set(words)
    return words[:1] == ["powerinfer"] and words[1] in OF_MODELS and not named


def first_block(page: Path) -> list[Command]:
    begin: Block = next(block for block in blocks(page) if block.kind in ("console", "sh", "python", "indented"))
    return [command for command in commands(page) if command.line < begin.line + len(begin.lines)]


def to_run(page: str) -> list[Command]:
    return commands(ROOT / page) if page in RUN else first_block(ROOT / page)


def problems(of_page: list[Command], opened: Terminal) -> list[str]:
    """The commands that fail, or print something else than the page shows."""
    wrong = []
    for command in of_page:
        try:
            printed = opened.do(command)
            if command.shown is not None and not (of_default(command) and opened.machine.real is None):
                shown = "\n".join(command.shown)
                both = printed.stdout + printed.stderr
                if not is_shown(printed.stdout, command.shown) and not is_shown(both, command.shown):
                    raise WrongPage(f"shown:\n{shown}\nprinted:\n{both}")
        except WrongPage as error:
            wrong.append(f"line {command.line}: {command.text}\n{error}")
    return wrong


@pytest.mark.model
@pytest.mark.parametrize(("page", "where"), RUNS)
def test_what_a_page_says_works(page: str, where: str, machine: Machine) -> None:
    with terminal(machine, machine.clone if where == "in the clone" else machine.home) as opened:
        wrong = problems(to_run(page), opened)
    if wrong:
        pytest.fail(page + ", " + "\n\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_valid(page: str) -> None:
    for command in commands(ROOT / page):
        for part in [] if command.script else command.text.split(" && "):
            words = shlex.split(re.split(r" [<>|] ", part)[0])
            if words[:1] != ["powerinfer"] or words[1].startswith("-") or command.fails:
                continue
            assert words[1] in VERBS, command
            parser = Parser(prog=words[1])
            common_flags(parser)
            import_module(f"powerinfer.cli.{words[1]}").configure(parser)
            try:
                parser.parse_args(words[2:])
            except (PowerInferError, SystemExit) as error:
                pytest.fail(f"{page}, line {command.line}: {part}\n{error}", pytrace=False)


def test_every_exception_is_of_a_command() -> None:
    parts = [part for page in EVERY for command in commands(page) for part in command.text.split(" && ")]
    for begin in NOT_RUN:
        assert any(re.match(begin, part) for part in parts), f"no page has {begin}: remove it from NOT_RUN"


# ---------------------------------------------------------------- the installation


def test_the_wheel_has_every_file_of_the_package(machine: Machine) -> None:
    (wheel,) = (machine.bin.parent.parent / "wheels").glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    built = {path for path in files if path.name.startswith("_native")}
    native = {path for path in files if source / "powerinfer" / "csrc" in path.parents}
    assert packed == {str(path.relative_to(source)) for path in files - built - native}


@pytest.mark.parametrize("where", ["in the clone", "elsewhere"])
def test_python_finds_the_installed_package_and_nothing_that_it_does_not_need(where: str, machine: Machine) -> None:
    code = (
        "import importlib.util, powerinfer; from powerinfer import LLM, SamplingParams; "
        "print(powerinfer.__file__, *(importlib.util.find_spec(name) for name in ('torch', 'matplotlib', 'pytest')))"
    )
    folder = machine.clone if where == "in the clone" else machine.home
    printed = Terminal(machine, folder).shell(f"python -c {shlex.quote(code)}").stdout.split()
    assert Path(printed[0]).is_relative_to(machine.bin.parent / "lib") and printed[1:] == ["None"] * 3


# ---------------------------------------------------------------- how a page is read

PAGE = """# Title

    powerinfer list    # a comment with 'quotes'
    curl http://x \\
        -d '{"a":
             1}'   # more

- a list

    of paragraphs

```console
$ powerinfer run "a # b" \\
    -n 5
one ... three
...

$ powerinfer list
```

```python
print(1)
```

```text
1
```

Text.

```text
powerinfer nothing
```
"""


def test_blocks_are_read_as_contributing_says(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = commands(page)
    assert [(one.line, one.shown, one.script) for one in found] == [
        (3, None, False), (4, None, False), (13, ["one ... three", "..."], False), (18, None, False), (22, ["1"], True),
    ]  # fmt: skip
    assert [shlex.split(one.text) for one in found[:4]] == [
        ["powerinfer", "list"],
        ["curl", "http://x", "-d", '{"a":\n         1}'],
        ["powerinfer", "run", "a # b", "-n", "5"],
        ["powerinfer", "list"],
    ]
    assert found[4].text == "print(1)"


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("one two three\n", True),
        ("one two three\nand\nmore\n", True),
        ("one\nthree\n", False),
        ("one two three four", False),
        ("zero\none two three", False),
        ("", False),
    ],
)
def test_dots_stand_for_what_a_page_leaves_out(printed: str, same: bool) -> None:
    assert is_shown(printed, ["one ... three", "..."]) is same


@pytest.mark.model
@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("```console\n$ echo one\ntwo\n```", "shown:\ntwo\nprinted:\none"),
        ("    powerinfer inspect -m nothere", "exit status 2"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```", "shown:\n2\nprinted:\n1"),
        ("```python\nimport torch\n```", "exit status 1"),
    ],
)
def test_a_page_that_is_wrong_is_found(block: str, says: str, machine: Machine, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(block + "\n")
    with terminal(machine, machine.home) as opened:
        (wrong,) = problems(commands(page), opened)
    assert says in wrong
