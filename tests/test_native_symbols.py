"""The native module keeps its names to itself, and its stand-alone tests are built with the module's own flags."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from powerinfer import _native

ROOT = Path(__file__).parents[1]


def cmake_levels() -> dict[str, list[str]]:
    """Level -> compiler flags, as CMakeLists.txt says."""
    source = (ROOT / "CMakeLists.txt").read_text()
    names = dict(re.findall(r"^ *set\((AVX2|AVX512) ([^)]*)\)", source, re.M))

    def flags(words: str) -> list[str]:
        return [
            flag for word in words.split() for flag in (flags(names[word[2:-1]]) if word.startswith("${") else [word])
        ]

    return {name: flags(words) for name, words in re.findall(r"^ *pi_level\((\w+)([^)]*)\)", source, re.M)}


def makefile_levels() -> dict[str, list[str]]:
    """Level -> compiler flags, as the Makefile of the stand-alone tests says."""
    source = (ROOT / "tests" / "native" / "Makefile").read_text()
    names = dict(re.findall(r"^(\w+) := (.*)$", source, re.M))

    def flags(words: str) -> list[str]:
        return [
            flag for word in words.split() for flag in (flags(names[word[2:-1]]) if word.startswith("$(") else [word])
        ]

    return {name: flags(words) for name, words in re.findall(r"^FLAGS_(\w+) :=(.*)$", source, re.M)}


def test_standalone_tests_use_the_flags_of_the_module() -> None:
    assert len(cmake_levels()) == 7
    assert makefile_levels() == cmake_levels()


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


@pytest.mark.parametrize("source", ["test_kernels.cpp", "test_neurons.cpp", "test_delta.cpp", "test_disk.cpp"])
def test_standalone_tests_fit_the_sources(source: str) -> None:
    """They run in `make test-native` only; here the compiler reads them, so that they cannot fall behind."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    flags = ["-std=c++17", "-fsyntax-only", "-I", str(ROOT / "powerinfer" / "csrc")]
    command = [*compiler.split(), *flags, str(ROOT / "tests" / "native" / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
