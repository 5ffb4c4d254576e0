"""The blocks of a page of Markdown: commands with what they print, and Python, as CONTRIBUTING.md says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SHELL = ("console", "sh", "indented")


@dataclass(frozen=True)
class Block:
    """kind: the word after the fence, or "indented"; line: of its first line; follows: it is the next after another."""

    kind: str
    lines: list[str]
    line: int
    follows: bool = False


@dataclass(frozen=True)
class Command:
    """A command line of a shell, or with `script` a Python program; shown: the lines that it prints, None: not said."""

    text: str
    line: int
    shown: list[str] | None = None
    script: bool = False

    @property
    def fails(self) -> bool:
        """Whether it shows an error of this program."""
        return any(line.startswith("powerinfer: ") for line in self.shown or ())


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced and every indented block."""
    lines = page.read_text().splitlines()
    at, ended = 0, -1  # ended: the line after the last block
    while at < len(lines):
        begin, found = at, re.fullmatch(r"```(\S*)", lines[at])
        if found:
            while lines[at := at + 1] != "```":
                pass
            yield Block(found[1], lines[begin + 1 : at], begin + 2, not any(lines[ended:begin]) and ended >= 0)
            ended = at = at + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1]) and not _in_list(lines[:at]):
            while at < len(lines) and (not lines[at] or lines[at].startswith("    ")):
                at += 1
            yield Block("indented", [line[4:] for line in lines[begin:at]], begin + 1)
            ended = at
        else:
            at += 1


def _in_list(before: Sequence[str]) -> bool:
    """Whether an indented line after these ones belongs to a list."""
    text = next((line for line in reversed(before) if line and not line.startswith(" ")), "")
    return re.match(r"([-*]|\d+\.) ", text) is not None


def commands(page: Path) -> list[Command]:
    """The commands and scripts of a page, in their order."""
    found: list[Command] = []
    every = list(blocks(page))
    for block, after in pairwise([*every, Block("", [], 0)]):
        if block.kind == "console":
            found += _console(block)
        elif block.kind in SHELL:
            found += (Command(text, line) for text, line in _joined(block.lines, block.line))
        elif block.kind == "python":
            shown = after.lines if after.kind == "text" and after.follows else None
            found.append(Command("\n".join(block.lines), block.line, shown, script=True))
    return found


def _console(block: Block) -> Iterator[Command]:
    starts = [at for at, line in enumerate(block.lines) if line.startswith("$ ")]
    assert starts[:1] == [0], f"line {block.line}: a block of `console` begins with a command"
    for at, end in pairwise([*starts, len(block.lines)]):
        first = [block.lines[at][2:]]
        while first[-1].endswith("\\"):
            first.append(block.lines[at + len(first)])
        ((text, _),) = _joined(first, 0)
        shown = block.lines[at + len(first) : end]
        while shown and not shown[-1]:
            shown.pop()
        yield Command(text, block.line + at, shown or None)


def _joined(lines: Sequence[str], number: int) -> Iterator[tuple[str, int]]:
    """(command, line) of a script for a shell: without comments; a backslash and a quotation continue a line."""
    text, begin = "", number
    for at, line in enumerate(lines, number):
        if text.endswith("\\"):
            text = f"{text[:-1].rstrip()} {line.lstrip()}"
        else:
            text, begin = (f"{text}\n{line}", begin) if text else (line, at)
        if text.endswith("\\"):
            continue
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation goes on
            continue
        if words:
            yield _without_comment(text), begin
        text = ""
    assert not text, f"line {begin}: a quotation or a backslash at the end of a block"


def _without_comment(text: str) -> str:
    words = shlex.split(text, comments=True)
    for found in re.finditer(r"\s+#", text):
        begin = text[: found.start()]
        with suppress(ValueError):  # within a quotation
            if shlex.split(begin) == words:
                return begin
    return text


def is_shown(printed: str, shown: Sequence[str]) -> bool:
    """Whether a text is what a page shows: `...` stands for anything in a line, or alone for any lines."""
    parts = ["(?:.*\n)*?" if line.strip() == "..." else _line(line) for line in shown]
    return re.fullmatch("".join(parts), printed.rstrip("\n") + "\n") is not None


def _line(line: str) -> str:
    return ".*?".join(map(re.escape, line.rstrip().split("..."))) + "[ ]*\n"
