"""The programs in examples/, each run as a user would, in this process, with the smallest model."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerinfer.runtime.engine import LLM
from powerinfer.serve.server import Server

pytestmark = pytest.mark.model
FOLDER = Path(__file__).parent.parent / "examples"
ALONE = {
    "batch": r"(.+['\"]\n){4}stopped: the request took longer than 0.2 s\n",
    "chat": r"> What is the capital of France\?\n.*Paris.*\n> And of Italy\?\n(.*\n)+",
    "search": r"\+0\.\d+  The Moon circles .*\n-.*\n-.*\n",
    "structured": r"[^\n:]{1,20}: (red|green|blue), [0-8] legs\n",
}
SERVED = {
    "client": r"(.*\n)+[\w.-]+: vectors of 576 numbers\n",
    "functions": r"(add\(-?\d+, -?\d+\) = -?\d+\n)+.+(.*\n)+",
}
"""What each prints, by its name: with a model, or with a server's address, as its argument."""


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2) as llm:
        yield llm


def printed(name: str, argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", argument])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ALONE)
def test_programs_with_a_model(
    name: str, smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(name, str(smollm2), monkeypatch, capsys)
    assert re.fullmatch(ALONE[name], text), text


@pytest.mark.parametrize("name", SERVED)
def test_programs_with_a_server(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(name, server.url, monkeypatch, capsys)
    assert re.fullmatch(SERVED[name], text), text


def test_every_program_is_run_and_listed() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    listed = set(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert names == {*ALONE, *SERVED} == listed
