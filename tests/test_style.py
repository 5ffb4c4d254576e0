"""Functions stay small: few decisions, few arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from test_imports import FILES, SOURCES, STATEMENTS, parsed

DECISIONS = 20
ARGUMENTS = 8
Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """(name within the file, function) of every function below `tree`, those within functions too."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, STATEMENTS):
            continue
        name = within
        if isinstance(node, Function | ast.ClassDef):
            name = f"{within}.{node.name}" if within else node.name
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, name)


def decisions(tree: ast.AST) -> int:
    """McCabe's complexity of a function less one: branches, loops, cases, handlers, conditions of comprehensions, and
    each `and` and `or`; those of functions within it too. Assertions, which tell types to mypy, are none."""
    count, below = 0, [tree]
    while below:
        node = below.pop()
        if isinstance(node, ast.Assert):
            continue
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        below += ast.iter_child_nodes(node)
    return count


def arguments(function: Function) -> int:
    """Number of arguments of a function, `self` and `cls` left out; 0 of one that Triton compiles, whose arguments are
    numbers and addresses."""
    if any("triton.jit" in ast.unparse(one) for one in function.decorator_list):
        return 0
    named = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


@cache
def figures() -> list[tuple[tuple[str, str], int, int]]:
    """((file, function), its complexity, its arguments) of every function of the packages."""
    return [
        ((path.relative_to(SOURCES).as_posix(), name), 1 + decisions(function), arguments(function))
        for path in FILES
        for name, function in functions(parsed(path))
    ]


def test_functions_have_few_decisions() -> None:
    large = {key: number for key, number, _ in figures() if number > DECISIONS}
    assert not large, "cut these by meaning"


def test_functions_have_few_arguments() -> None:
    wide = {key: number for key, _, number in figures() if number > ARGUMENTS}
    assert not wide, "give these a record for arguments that belong together"


def test_what_counts() -> None:
    text = "def f(self, a, *, b):\n for x in [y for y in a if y]:\n  if a and b or x: return 1\n assert a or b"
    ((name, function),) = functions(ast.parse(text))
    assert (name, 1 + decisions(function), arguments(function)) == ("f", 7, 2)
