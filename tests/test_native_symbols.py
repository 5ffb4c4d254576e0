"""The native module keeps its names to itself, and says which levels it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from powerinfer import _native

ROOT = Path(__file__).parents[1]


def test_module_exports_its_entry_point_only() -> None:
    """Kernels compiled for a newer CPU must not stand in for anything outside their own table."""
    tool = shutil.which("nm")
    if tool is None or not _native.__file__.endswith(".so"):
        pytest.skip("no nm here")
    command = [tool, "--dynamic", "--defined-only", _native.__file__]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {line.split()[-1] for line in lines}
    assert "PyInit__native" in names
    assert not [name for name in names if "pi_" in name or "kernels" in name]


def test_an_object_of_a_level_exports_its_kernels_only() -> None:
    """An inline function that two levels share would be taken from one of them for both."""
    folders = sorted((ROOT / "build").glob("editable-*/CMakeFiles/kernels_*.dir/src/powerinfer/csrc"))
    if shutil.which("nm") is None or not folders:
        pytest.skip("no nm, or the module was not built here")
    for folder in folders:
        level = folder.parents[2].name.removeprefix("kernels_").removesuffix(".dir")
        objects = [str(path) for path in sorted(folder.glob("*.o"))]
        assert objects
        command = [str(ROOT / "tests" / "native" / "symbols.sh"), "nm", level, *objects]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", sorted(path.name for path in (ROOT / "tests" / "native").glob("*.cpp")))
def test_standalone_tests_fit_the_sources(source: str) -> None:
    """They run in `make test-native` only; here the compiler reads them, so that they cannot fall behind."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    flags = ["-std=c++17", "-fsyntax-only", "-I", str(ROOT / "src" / "powerinfer" / "csrc")]
    command = [*compiler.split(), *flags, str(ROOT / "tests" / "native" / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MAIN = """
#include <iostream>
#include "cpu.h"
#include "levels.h"
int main() {
  const std::string best = cpu_levels().front();
  std::cout << best << std::endl << find_level("")->name << std::endl;
  for (const std::string& name : {best, std::string("none")}) try {
      find_level(name);
    } catch (const std::invalid_argument& error) { std::cout << error.what() << std::endl; }
}
"""


def test_a_level_that_a_build_lacks_is_refused_with_the_command_that_builds_it(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    csrc = ROOT / "src" / "powerinfer" / "csrc"
    (tmp_path / "main.cpp").write_text(MAIN)
    program = tmp_path / "program"
    sources = [str(csrc / "levels.cpp"), str(csrc / "rows.cpp"), str(tmp_path / "main.cpp")]
    defined = ["-DPI_LEVEL=scalar", "-DPI_PARTS=PI_PART(rows,scalar)", "-DPI_BASES=PI_BASE(scalar,)", "-Wno-psabi"]
    command = [*compiler.split(), "-std=c++17", *defined, "-I", str(csrc), *sources, "-o", str(program)]
    subprocess.run(command, check=True)
    best, chosen, *refusals = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert chosen == "scalar"
    if best != "scalar":
        assert refusals[0].startswith(f"instruction set '{best}' is not in this build, which has: scalar; ")
        assert "make install LEVELS=all" in refusals[0]
    assert refusals[-1] == "instruction set 'none' is unknown or cannot run on this CPU; choose one of: scalar"
