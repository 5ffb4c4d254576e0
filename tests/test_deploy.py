"""What deploy/ starts exists: flags that `serve` has, and files of the repository."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from powerinfer.cli import serve
from powerinfer.cli.common import Parser

ROOT = Path(__file__).parent.parent
UNIT = ROOT / "deploy" / "powerinfer.service"


def parse(flags: list[str]) -> str:
    """--models of a command line; RequestError for a flag that there is not."""
    parser = Parser(prog="powerinfer serve")
    serve.configure(parser)
    return str(parser.parse_args(flags).models)


def test_the_unit_starts_the_server() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    program, verb, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/powerinfer") and verb == "serve" and parse(flags) == "/var/lib/powerinfer/models"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: systemd is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/powerinfer/bin/powerinfer", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr


def test_the_image_starts_the_server() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    command = [json.loads(line) for line in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.M)]
    assert [*command[0][:2], parse(command[0][2:] + command[1])] == ["powerinfer", "serve", "/models"]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
    names = {name for line in copied for name in line.split()}
    assert all((ROOT / name).exists() for name in names if name != "./")
    assert names >= {"pyproject.toml", "CMakeLists.txt", "cmake", "src"}  # what the build reads
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [name for group in re.findall(r"extras=(\S+)", text) for name in group.split(",")]
    assert named and set(named) <= extras.keys()
