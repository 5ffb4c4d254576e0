"""powerinfer/_native.pyi, which the build writes for type checkers, has all that the native module has."""

from __future__ import annotations

import ast
from pathlib import Path

import powerinfer
from powerinfer import _native

BESIDE = Path(powerinfer.__file__).with_name("_native.pyi")


def names(body: list[ast.stmt]) -> set[str]:
    """Public names that statements of a stub define."""
    defined = {item.name for item in body if isinstance(item, ast.FunctionDef | ast.ClassDef)}
    targets = [item.target for item in body if isinstance(item, ast.AnnAssign)]
    defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in defined if not name.startswith("_")}


def test_the_stub_is_that_of_the_module() -> None:
    tree = ast.parse(BESIDE.read_text())
    public = {name for name in dir(_native) if not name.startswith("_")}
    assert names(tree.body) == public
    classes = {item.name: names(item.body) for item in tree.body if isinstance(item, ast.ClassDef)}
    for name in {name for name in public if isinstance(getattr(_native, name), type)}:
        members = {member for member in vars(getattr(_native, name)) if not member.startswith("_")}
        assert classes[name] == members, name


def test_lists_of_names_have_a_type() -> None:
    text = BESIDE.read_text()
    assert all(f"{name}: list[str]" in text for name in ("TYPES", "ACTIVATIONS", "KV_TYPES"))
