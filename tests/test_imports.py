"""The packages import one another in one direction only, and heavy libraries only where they are used."""

from __future__ import annotations

import ast
import gc
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"

# A room may import rooms of a smaller rank, and itself; rooms of one rank do not know each other.
RANK = {
    **dict.fromkeys(("config", "errors", "experts", "neurons", "numa", "progress", "sizes", "system", "topology"), 0),
    **{"formats": 1, "pinned": 1, "kernels": 2, "text": 2, "hub": 3, "devices": 3, "models": 4, "sparsity": 5},
    **{"hardware": 5, "placement": 6, "hybrid": 7, "random_model": 7, "runtime": 8, "tasks": 8, "evaluate": 9},
    **{"comparison": 9, "report": 9, "prepare": 10, "serve": 10, "powerinfer_train": 11, "cli": 12, "__main__": 13},
}
# Imported when they are used: slow to import, or not in the core install.
LAZY = {
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "torch",
    "triton",
    "matplotlib",
    "PIL",
    "highspy",
    "llguidance",
    "prompt_toolkit",
}
# Files that are themselves imported when they are used, and only then: their kernels are decorated, or their classes
# derived, at the top.
KERNELS = (
    "bundles", "candidates", "delta", "experts", "fused", "host", "kernels", "latent", "launch", "mamba", "neurons",
    "panels", "prompt_experts", "row_sums", "short_conv", "states", "words",
)  # fmt: skip
HEAVY = {f"powerinfer.kernels.triton_{name}" for name in KERNELS} | {
    "powerinfer.cli.terminal",
    "powerinfer.prepare.adam",
    "powerinfer_train.activations",
    "powerinfer_train.sensitivity",
    "powerinfer_train.timing",
    "powerinfer_train.blocks",
    "powerinfer_train.torch_delta",
    "powerinfer_train.torch_latent",
    "powerinfer_train.torch_model",
    "powerinfer_train.training",
}
NEVER = {"pickle", "transformers", "gguf", "requests", "safetensors"}
FILES = sorted(SOURCES.rglob("*.py"))
TYPES = SOURCES / "powerinfer/formats/weight_types.py"  # which reads the table that the native module is compiled with


STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""What may have statements within it."""


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file. To look for garbage among its many objects, which all stay, would take longer than that."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


def imported(tree: ast.AST, modules: Container[str] = ()) -> Iterator[tuple[str, int]]:
    """(absolute module name, line) of every import below `tree`, those under TYPE_CHECKING left out.

    modules: names that are modules where `from` imports them; the others count as what stands in their module.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield name if node.module == "powerinfer" or name in modules else node.module or "", node.lineno
        elif isinstance(node, STATEMENTS) and not (isinstance(node, ast.If) and for_types(node)):
            yield from imported(node, modules)


def for_types(node: ast.If) -> bool:
    """Whether type checkers alone read what it guards."""
    return any("TYPE_CHECKING" in (getattr(one, "id", ""), getattr(one, "attr", "")) for one in ast.walk(node.test))


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    return tuple(imported(parsed(path)))


def room(module: str) -> str:
    """Another package counts as a room."""
    package, *inner = module.split(".")
    return inner[0] if package == "powerinfer" else package


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts)


def test_imports_go_one_way() -> None:
    for path in FILES:
        here = room(module_name(path))
        if here == "__init__":
            continue  # the package's own face looks into every room, lazily
        assert here in RANK, f"{path} is in no room that has a rank"
        for module, line in imports_of(path):
            inside = module.startswith(("powerinfer.", "powerinfer_train"))
            if inside and room(module) not in (here, "_native", "__version__"):
                assert RANK[room(module)] < RANK[here], f"{path}:{line}: {here} may not import {module}"
            if module == "powerinfer._native" and path != TYPES:
                assert RANK[here] >= RANK["kernels"], f"{path}:{line}: {here} may not import the native module"
            assert module.split(".")[0] not in NEVER, f"{path}:{line} imports {module}"


def test_heavy_imports_are_inside_functions() -> None:
    for path in FILES:
        if module_name(path) in HEAVY:
            continue
        top = [node for node in parsed(path).body if isinstance(node, ast.Import | ast.ImportFrom | ast.If | ast.Try)]
        for module, line in imported(ast.Module(top, [])):
            heavy = module.split(".")[0] in LAZY or module in HEAVY
            assert not heavy, f"{path}:{line} imports {module} at the top of the file"


def dependencies() -> dict[str, set[str]]:
    """For every module of the package, the modules of the package that it imports.

    Imports inside functions count, those under TYPE_CHECKING do not: they say what a type is and are never run.
    """
    modules = {module_name(path): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    return {
        name: {module for module, _ in imported(parsed(path), modules)} - {name}
        for name, path in modules.items()
    }


def test_no_files_import_each_other() -> None:
    wanted = dependencies()
    assert wanted["powerinfer.cli.run"] and wanted["powerinfer.formats.checkpoint"]  # the walk sees something
    while free := {name for name, needs in wanted.items() if not needs & wanted.keys()}:
        wanted = {name: needs for name, needs in wanted.items() if name not in free}
    assert not wanted, f"these import each other, or a file that does: {', '.join(sorted(wanted))}"


def test_only_the_server_needs_its_libraries() -> None:
    libraries = {"fastapi", "starlette", "pydantic", "uvicorn", "h11", "msgspec", "prometheus_client"}
    for path in FILES:
        modules = {module.split(".")[0] for module, _ in imports_of(path)}
        assert not modules & libraries or room(module_name(path)) == "serve", path


def test_the_native_module_has_one_door() -> None:
    users = set()
    for path in FILES:
        modules = {module for module, _ in imports_of(path)}
        if "powerinfer._native" in modules and path != TYPES:
            users.add(room(module_name(path)))
    assert users <= {"kernels", "devices"}
