"""How large the code is: lines by folder, lengths of functions, functions of many arguments, files that mention a word.

    python -m benchmarks.lib.code_size [TREE ...] [--words d_ff ...]     a column for each tree, default: this one

Prints Markdown tables. Lines are those of the files, comments and blank lines included; a function's are those from
its name to its end, nested functions included. Arguments count without `self` and `cls`. C++ functions are found by
their brackets, which serves for code that clang-format has formatted.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from benchmarks.lib.machine import ROOT
from benchmarks.lib.tables import table

PACKAGE = "src"
OTHERS = ("tests", "benchmarks", "runs", "docs")
SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".md"}
MANY = 8  # arguments
LONGEST = 8  # functions shown
NOT_CODE = re.compile(  # comments, strings, characters, directives
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^[ \t]*#(?:\\\n|[^\n])*", re.S | re.M
)
# What may stand between the arguments of a C++ function and its body: qualifiers, a result, a list of initialisers.
BEFORE_BODY = re.compile(r"\)\s*(?:const|noexcept|override|final|mutable|&)*\s*(?:->[\w:<>,&*\s]+)?(?::[^;{}]*)?$")
NAMED = re.compile(r"([~\w]+|operator\S+)\s*$")
STATEMENTS = {"if", "for", "while", "switch", "catch", "return", "alignas", "decltype", "sizeof", "__attribute__"}


@dataclass(frozen=True)
class Function:
    name: str
    path: Path
    lines: int
    arguments: int


def python_functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = node.args
            names = [one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
            names += [one.arg for one in (taken.vararg, taken.kwarg) if one]
            count = sum(name not in ("self", "cls") for name in names)
            yield Function(node.name, path, (node.end_lineno or node.lineno) - node.lineno + 1, count)


def cpp_functions(path: Path) -> Iterator[Function]:
    text = NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text())
    opened: list[tuple[str, int, int] | None] = []  # of each open bracket: a function's name, arguments and first line
    since = 0  # where the text since the last statement or bracket begins
    line = 1
    for at, character in enumerate(text):
        if character == "\n":
            line += 1
        elif character == "{":
            opened.append(_head(text[since:at], line))
        elif character == "}" and opened:
            function = opened.pop()
            if function is not None:
                name, arguments, first = function
                yield Function(name, path, line - first + 1, arguments)
        if character in ";{}" and not _within_brackets(text[since:at]):
            since = at + 1


def _within_brackets(text: str) -> bool:
    return text.count("(") > text.count(")")


def _head(text: str, line: int) -> tuple[str, int, int] | None:
    """Name, number of arguments and first line of the function whose body begins on that line behind this text."""
    if not BEFORE_BODY.search(text) or "=" in text.partition("(")[0].replace("operator", ""):
        return None
    opening = text.find("(")
    name = NAMED.search(text[:opening])
    if name is None or name[1] in STATEMENTS or text[:opening].lstrip().startswith(("return", "else")):
        return None
    depth, arguments, inside = 0, 0, False
    for character in text[opening + 1 :]:
        if character in "(<[":
            depth += 1
        elif character in ")>]":
            if depth == 0:
                break
            depth -= 1
        elif character == "," and depth == 0:
            arguments += 1
        inside |= not character.isspace()
    return name[1], arguments + inside, line - text[name.start(1) :].count("\n")


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def files_of(tree: Path, *folders: str) -> list[Path]:
    found = (path for folder in folders for path in (tree / folder).rglob("*"))
    return sorted(path for path in found if path.suffix in SUFFIXES and path.is_file())


def lines_by_folder(tree: Path) -> Counter[str]:
    counted: Counter[str] = Counter()
    for path in files_of(tree, PACKAGE, *OTHERS):
        top, *inner = path.relative_to(tree).parts[:-1]
        rooms = inner[1:] if inner[:1] == ["powerinfer"] else inner
        counted[(rooms or ["powerinfer"])[0] if top == "src" else top] += lines_of(path)
    return counted


def lengths(functions: list[Function]) -> list[str]:
    """Of all functions: how many, median, 90 and 99 % of their lines, how many take many arguments."""
    found = [one.lines for one in functions]
    cuts = quantiles(found, n=100)
    many = sum(one.arguments >= MANY for one in functions)
    return [f"{len(found)}", f"{median(found):.0f}", f"{cuts[89]:.0f}", f"{cuts[98]:.0f}", f"{many}"]


def longest(functions: list[Function]) -> str:
    shown = sorted(functions, key=lambda one: (-one.lines, one.name))[:LONGEST]
    return ", ".join(f"`{one.name}` {one.lines} ({one.path.name})" for one in shown)


def report(trees: list[Path], words: list[str]) -> str:
    names = [tree.resolve().name for tree in trees]
    counted = [lines_by_folder(tree) for tree in trees]
    folders = sorted(set().union(*counted), key=lambda folder: (folder in OTHERS, folder))
    body = [[folder, *(str(one[folder] or "") for one in counted)] for folder in folders]
    inside = [sum(n for folder, n in one.items() if folder not in OTHERS) for one in counted]
    body += [["all of powerinfer/", *map(str, inside)], ["everything", *(str(one.total()) for one in counted)]]
    parts = [table(["lines", *names], body, numbers=True)]
    for language, suffixes, find in (("Python", {".py"}, python_functions), ("C++", {".cpp", ".h"}, cpp_functions)):
        found = [
            [one for path in files_of(tree, PACKAGE) if path.suffix in suffixes for one in find(path)] for tree in trees
        ]
        heads = ["functions", "median lines", "90 % under", "99 % under", f"{MANY} or more arguments"]
        rows = [[head, *cells] for head, *cells in zip(heads, *map(lengths, found), strict=True)]
        rows.append(["longest", *map(longest, found)])
        parts.append(table([language, *names], rows))
    if words:
        rows = []
        for word in words:
            texts = [[path.read_text() for path in files_of(tree, PACKAGE)] for tree in trees]
            rows.append([f"`{word}`", *(str(sum(word in text for text in of_tree)) for of_tree in texts)])
        parts.append(table(["files of powerinfer/ that mention", *names], rows, numbers=True))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="*", default=[ROOT], metavar="TREE", help="a checkout of the code")
    parser.add_argument("--words", nargs="+", default=[], metavar="WORD")
    arguments = parser.parse_args()
    print(report(arguments.trees, arguments.words), end="")


if __name__ == "__main__":
    main()
