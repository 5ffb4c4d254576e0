"""Write what pages say of names and options: the reference of docs/reference.md, from the signatures and docstrings of
what `powerinfer` exports, and the tables of docs/coming-from.md, from the hints that commands and calls give.

    python -m docs.site.reference          --check: end with an error instead where it is not up to date
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from inspect import getdoc, isclass, signature
from pathlib import Path
from typing import Any

import powerinfer
from benchmarks.lib.tables import paragraphs, table, write_tables
from powerinfer.cli import common, main
from powerinfer.runtime.options import ELSEWHERE, ChatOptions, EmbeddingOptions, RequestOptions, TemplateOptions
from powerinfer.runtime.request import Timings

DOCS = Path(__file__).parents[1]


def classes() -> list[type]:
    """Classes that are described, in the order of the page; errors are a table of their own."""
    exported = [getattr(powerinfer, name) for name in powerinfer.__all__]
    first = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "Completion"]
    after = [one for one in exported if one.__name__ not in first and not issubclass(one, Exception)]
    return [*(getattr(powerinfer, name) for name in first), Timings, *after]


def reference() -> dict[str, str | None]:
    return {"reference": paragraphs(*map(_described, classes()), "## Keywords of `AsyncLLM`", _keywords(), _errors())}


def _described(described: type) -> str:
    parts = [f"## {described.__name__}", markdown(getdoc(described) or "")]
    if not _fields(described):
        parts.insert(1, f"`{described.__name__}{_signature(described)}`")
        parts += (part for name, member in _members(described) for part in _member(described.__name__, name, member))
    return paragraphs(*parts)


def _fields(described: type) -> bool:
    """Whether it is a record: a dataclass or a named tuple, all of whose fields its docstring explains."""
    return hasattr(described, "__dataclass_fields__") or hasattr(described, "_fields")


def _members(described: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(described).items():
        if not name.startswith("_") and not isclass(member) and getdoc(getattr(described, name)):
            yield name, member


def _member(owner: str, name: str, member: Any) -> Iterator[str]:
    yield f"### {owner}.{name}"
    if not isinstance(member, property):
        yield f"`{name}{_signature(getattr(member, '__func__', member))}`"
    yield markdown(getdoc(member) or "")


def _signature(called: Any) -> str:
    """Parameters and what is returned, as they are written."""
    text = re.sub(r"^\((self|cls)(, )?", "(", str(signature(called)))
    return text.replace("'", "").replace(" -> None", "") if isclass(called) else text.replace("'", "")


def _keywords() -> str:
    """The keywords that calls take beside their arguments."""
    kinds = (EmbeddingOptions, RequestOptions, TemplateOptions, ChatOptions)
    rows = [[f"`{kind.__name__}`", _names(kind.__annotations__), getdoc(kind) or ""] for kind in kinds]
    return table(["type", "keywords", "for"], rows)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _errors() -> str:
    exported = (getattr(powerinfer, name) for name in powerinfer.__all__)
    errors = sorted((one for one in exported if issubclass(one, Exception)), key=lambda error: len(error.__mro__))
    rows = [[f"`{one.__name__}`", _names(base.__name__ for base in one.__bases__), getdoc(one) or ""] for one in errors]
    first = "The text of each is one line that says what is wrong and how to mend it."
    return paragraphs("## Errors", first, table(["error", "is a", "raised for"], rows))


def markdown(docstring: str) -> str:
    """A docstring as Markdown: its indented code in fences, a paragraph of `name: meaning` as a list."""
    parts = []
    for paragraph in re.split(r"\n\n(?!    )", docstring):
        text, *code = re.split(r"(?:\n\n|^)(?=    )", paragraph, maxsplit=1)
        parts += [_listed(text)] if text else []
        parts += ["```py\n" + re.sub("^    ", "", one, flags=re.MULTILINE) + "\n```" for one in code]
    return paragraphs(*parts)


_FIELD = re.compile(r"(\w+(?:, \w+)*)( \([^\n]+? default .+?\))?: ")


def _listed(text: str) -> str:
    """The paragraph, in which lines that begin with the names of fields are items of a list."""
    lines: list[str] = []
    for line in text.splitlines():
        found = _FIELD.match(line)
        if found and found[1].islower():
            kind, _, default = (found[2] or "")[2:-1].rpartition(", default ")
            values = f" (`{kind}`, default `{default}`)" if kind else ""
            if lines and not lines[-1].startswith("-"):
                lines.append("")
            lines.append(f"- {_names(found[1].split(', '))}{values}: {line[found.end():]}")
        elif lines and lines[-1].startswith("-"):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def names_elsewhere() -> dict[str, str | None]:
    """Names of commands, flags and options of other programs, with what they are here."""
    commands = {name: f"`{here}`" for name, here in main.FOREIGN.items()} | main.HINTS
    of_flags = {flag: _where(flag, here) + _with_code(hint) for flag, (here, hint) in common.FOREIGN.items()}
    options = {name: _names(here.split(" and ")) for name, here in ELSEWHERE.items()}
    heads = {"commands": ("there", "here"), "flags": ("there", "here"), "options": ("keyword there", "of `LLM`")}
    groups = {"commands": commands, "flags": of_flags, "options": options}
    return {kind: table(heads[kind], _by_answer(names)) for kind, names in groups.items()}


def _where(flag: str, here: str) -> str:
    """The commands that answer a flag with a hint, where they are few: those with a flag that do not have that one."""
    verbs = [verb for verb in main.VERBS if here in flags(verb) and flag not in flags(verb)]
    return f"`{verbs[0]}`: " if len(verbs) == 1 else ""


@cache
def flags(verb: str) -> set[str]:
    """The flags of a command."""
    parser = common.Parser()
    import_module(f"powerinfer.cli.{verb}").configure(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def _with_code(hint: str) -> str:
    """A hint with its flags and commands as code."""
    hint = hint.removeprefix("use ")
    if hint.startswith("powerinfer"):
        return f"`{hint}`"
    return re.sub(r"(--?[a-z][a-z-]*( [A-Z]+| none| off|\b))", r"`\1`", hint)


def _by_answer(hints: Mapping[str, str]) -> list[list[str]]:
    """A row for each answer, with the names that have it."""
    return [[_names(name for name in hints if hints[name] == here), here] for here in dict.fromkeys(hints.values())]


PAGES = {DOCS / "reference.md": reference, DOCS / "coming-from.md": names_elsewhere}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
