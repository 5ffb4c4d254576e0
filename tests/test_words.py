"""Plain words: the offences against CONTRIBUTING's rule for names and docstrings, by room, only become fewer.

`python tests/test_words.py [ROOM ...]` lists them, and enters smaller numbers in words.txt.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from test_imports import parsed

SOURCES = Path(__file__).parent.parent / "src"
LIMITS = Path(__file__).with_name("words.txt")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A name is none of these words, by itself or with others behind it.
PRONOUNS = words(
    "about apart both each every here how its mine one ones others own some such that there those what where which "
    "who whose why"
)
# Nor one of these alone: a noun belongs behind it.
PARTICIPLES = words("found given goes held kept known lent made said seen taken told turned whole")
# No function's name begins with one. (from_file, to_json, as_dict, with_scale and on_token are idioms of Python.)
PREPOSITIONS = words(
    "above across after among at before behind below beside between beyond by for in inside into near of over since "
    "than through under until within without"
)
# A docstring begins with none of these.
BEGINNINGS = PREPOSITIONS | words(
    "as from how it its on so such that these they this those to what when where which who whoever whose why with"
)
SHORT = 3
"""Lines of a loop or a lambda whose variables may have any name."""

Offence = tuple[str, str, int, str]  # kind, file, line, word
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMELESS = (ast.Constant, ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
"""Parts of expressions, which bind nothing."""
LOOPS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def offends(name: str, function: bool) -> bool:
    first, *more = name.strip("_").lower().split("_")
    return first in PRONOUNS or (first in PARTICIPLES and not more) or (function and first in PREPOSITIONS)


def loop_names(node: ast.AST) -> set[ast.AST]:
    """The nodes below a short loop or lambda that bind its variables."""
    if not isinstance(node, LOOPS) or (node.end_lineno or 0) - node.lineno >= SHORT:
        return set()
    if isinstance(node, ast.Lambda):
        return set(ast.walk(node.args))
    loops = [node] if isinstance(node, ast.For) else node.generators
    return {below for loop in loops for below in ast.walk(loop.target)}


def offences(file: str, tree: ast.AST) -> list[Offence]:
    """Names that a function, class or module binds, once each, and strings that stand as docstrings."""
    skipped: set[ast.AST] = set()
    seen: set[tuple[int, str]] = set()
    found: list[Offence] = []

    def visit(node: ast.AST, scope: int) -> None:
        skipped.update(loop_names(node))
        name, kind = "", "names"
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name, kind = node.name, "names" if isinstance(node, ast.ClassDef) else "functions"
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            begin = re.findall(r"\w+", node.value.value)
            if begin and begin[0].lower() in BEGINNINGS:
                found.append(("docstrings", file, node.lineno, " ".join(begin[:4])))
        if name and node not in skipped and offends(name, kind == "functions") and (scope, name) not in seen:
            seen.add((scope, name))
            found.append((kind, file, node.lineno, name))
        inside = kind == "functions" or isinstance(node, ast.ClassDef)
        for below in ast.iter_child_nodes(node):
            if not isinstance(below, NAMELESS):
                visit(below, node.lineno if inside else scope)

    visit(tree, 0)
    return found


def native_offences(file: str, text: str) -> Iterator[Offence]:
    """Names in C++, once for each file."""
    code = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.DOTALL)
    for name, call in dict(re.findall(r"\b([A-Za-z_]\w*)\b(\s*\()?", code)).items():
        function = bool(call) and name != "for"
        if offends(name, function):
            yield "functions" if function else "names", file, 1, name


@cache
def offences_by_room() -> dict[str, list[Offence]]:
    rooms: dict[str, list[Offence]] = defaultdict(list)
    classes: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.*")):
        package, *inner = path.relative_to(SOURCES).parts
        room = inner[0] if len(inner) > 1 else package
        file, text = str(path.relative_to(SOURCES)), path.read_text() if path.suffix in (".h", ".cpp") else ""
        if path.suffix != ".py":
            rooms[room].extend(native_offences(file, text))
            continue
        tree = parsed(path)
        rooms[room].extend(offences(file, tree))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((room, file, node.lineno))
    for name, places in classes.items():
        for room, file, line in places if len(places) > 1 else ():
            rooms[room].append(("classes", file, line, name))
    return rooms


KINDS = ("names", "functions", "docstrings", "classes")


def counts() -> dict[str, tuple[int, ...]]:
    kinds = {room: Counter(kind for kind, *_ in found) for room, found in offences_by_room().items()}
    return {room: tuple(counted[kind] for kind in KINDS) for room, counted in kinds.items() if counted}


def limits() -> dict[str, tuple[int, ...]]:
    rows = [line.split() for line in LIMITS.read_text().splitlines()[1:]]
    return {room: tuple(map(int, numbers)) for room, *numbers in rows}


def lowered() -> str:
    """The text of words.txt with today's numbers where they are smaller."""
    allowed, today = limits(), counts()
    rows = [["room", *KINDS]]
    for room in sorted(allowed | today):
        numbers = today.get(room, (0,) * len(KINDS))
        rows.append([room, *map(str, map(min, numbers, allowed.get(room, numbers)))])
    return "".join(f"{room:<18}{''.join(f'{number:>12}' for number in numbers)}\n" for room, *numbers in rows)


def test_offences_only_become_fewer() -> None:
    allowed = limits()
    for room, numbers in counts().items():
        for kind, number, limit in zip(KINDS, numbers, allowed.get(room, (0,) * len(KINDS)), strict=True):
            places = [f"{file}:{line}: {word}" for each, file, line, word in offences_by_room()[room] if each == kind]
            assert number <= limit, f"{kind} of {room}, see CONTRIBUTING.md:\n" + "\n".join(places)


def test_offences_are_noticed() -> None:
    text = '''
class Kept:
    """Of what remains."""
    def _of_gpu(self, one, page):
        self.found = {key for key, every in page}
        for own in page:
            a
            b
            c
        for each in page:
            a
'''
    found = [word for *_, word in offences("file", ast.parse(text))]
    assert found == ["Kept", "Of what remains", "_of_gpu", "one", "found", "own"]
    assert [word for *_, word in native_offences("file", "int own; // each\nfor (of_all(x))")] == ["own", "of_all"]


if __name__ == "__main__":
    for room in sys.argv[1:] or offences_by_room():
        for _, file, line, word in offences_by_room()[room]:
            print(f"{file}:{line}: {word}")
    LIMITS.write_text(lowered())
    print(LIMITS.read_text())
