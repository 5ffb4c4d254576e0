"""The package as `pip install` leaves it: the wheel in an environment that has nothing else but what it needs.

The wheel is built by its real backend, so that a file that the package lacks is missing; without compiling: the native
module is this environment's. What `powerinfer[serve]` needs is linked, one distribution at a time, from this
environment: installing it anew would take a minute. Nothing else can be imported there, torch for instance.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from powerinfer import _native

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
from scikit_build_core.build import build_wheel
build_wheel(sys.argv[1], {"wheel.cmake": "false", "wheel.py-api": "py3"})
"""


def install(folder: Path, clone: Path, extras: Iterable[str], more: Iterable[str] = ()) -> Path:
    """The folder of the commands of an environment in `folder`, with the wheel of this package and its extras.

    clone: the folder that `pip install .` was given, as pip notes it. more: other distributions, clients for instance.
    """
    wheels = folder / "wheels"
    subprocess.run([sys.executable, "-c", BUILD, str(wheels)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    venv.create(folder / "venv", symlinks=True)
    bin = folder / "venv" / "bin"
    flags = ["-qq", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    pip = [sys.executable, "-m", "pip", "--python", str(bin / "python")]
    subprocess.run([*pip, "install", *flags, *map(str, wheels.glob("*.whl"))], check=True)
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    shutil.copy(str(_native.__file__), packages / "powerinfer")
    noted = next(packages.glob("powerinfer-*.dist-info")) / "direct_url.json"
    assert noted.exists(), "pip notes where a package comes from: PEP 610"
    noted.write_text(json.dumps({"url": clone.as_uri(), "dir_info": {}}))
    package = next(importlib.metadata.distributions(name="powerinfer", path=[str(packages)]))
    for distribution in _needed(package, extras, more):
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            there = packages / name
            if not there.exists():
                there.symlink_to(distribution.locate_file(name))
    return bin


def _needed(package: Distribution, extras: Iterable[str], more: Iterable[str]) -> Iterator[Distribution]:
    """The distributions that a package with extras needs, and others, with what they need."""
    wanted = [*_requirements(package, extras), *((name, "") for name in more)]
    seen: set[tuple[str, str]] = set()
    while wanted:
        name, extra = key = wanted.pop()
        if key in seen:
            continue
        seen.add(key)
        distribution = package if name == package.name else importlib.metadata.distribution(name)
        if distribution is not package:
            yield distribution
        wanted += _requirements(distribution, [extra])


def _requirements(distribution: Distribution, extras: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, extra or "") of what it needs with these extras."""
    for extra in {"", *extras}:
        for needed in map(Requirement, distribution.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                yield from ((canonicalize_name(needed.name), one) for one in {"", *needed.extras})


def clone_in(folder: Path) -> Path:
    """A clone of this repository to run commands in: what they write, beside models too, stays there."""
    folder.mkdir()
    for entry in sorted(ROOT.iterdir()):
        if entry.name.startswith(".") or entry.name in ("build", "dist"):
            continue
        if entry.name == "models":
            shutil.copytree(entry, folder / "models", copy_function=os.symlink)
        else:
            (folder / entry.name).symlink_to(entry)
    return folder
