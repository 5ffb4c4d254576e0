"""powerinfer/_native.pyi says what the native module has. `python tests/test_native_stub.py` regenerates it."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import nanobind.stubgen

from powerinfer import _native

STUB = Path(__file__).parent.parent / "powerinfer" / "_native.pyi"  # an editable installation has it nowhere else


def generated() -> str:
    """The module's stub; arrays without the details that type checkers do not read."""
    stubs = nanobind.stubgen.StubGen(_native, include_docstrings=True)
    stubs.put(_native)
    text = re.sub(r"Annotated\[(NDArray\[numpy\.\w+\]), dict\([^][]*?\)\]", r"\1", stubs.get())
    text = re.sub(r'"""\n +(.+)\n +"""', r'"""\1"""', text)
    text = re.sub(r": list = .*", ": list[str]", text)
    text = text.replace("from typing import Annotated\n", "")
    text = text.replace("import numpy\n", "import numpy as np\n")
    return text.replace("NDArray[numpy.", "NDArray[np.")


def test_the_stub_is_that_of_the_module() -> None:
    """Up to its layout, which ruff makes."""
    assert ast.dump(ast.parse(STUB.read_text())) == ast.dump(ast.parse(generated())), f"run python {__file__}"


if __name__ == "__main__":
    STUB.write_text(generated())
    subprocess.run(["ruff", "format", "--quiet", STUB], check=True)
