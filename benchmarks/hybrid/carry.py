"""What a machine without a network needs to run this engine's tests and benchmarks, in one small folder.

    python -m benchmarks.hybrid.carry FOLDER --python PYTHON [--packages highspy gguf ...] [--peer BUILD] [--most 64MiB]

The folder gets the source that is committed, without its models, a wheel of the engine, and wheels of packages. PYTHON
is a program of the version that the machine has: the engine is compiled for it here, by a C++ compiler no newer than
the machine's libraries, and for every processor (its kernels are chosen at start). --packages are those of the engine's
dependencies that the machine lacks, and of theirs; wheels that suit the project's requirements are fetched. --peer is
the folder of a build of llama.cpp for that machine (lib/llama_cpp.py FOLDER --cuda 90 --no-native --wheels --few).

There, `sh FOLDER/install.sh TARGET` unpacks it, without asking any registry: TARGET/source, to work in, TARGET/site,
for PYTHONPATH behind TARGET/source/src and TARGET/source, and TARGET/peer/bin, for `visit --peer`.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from benchmarks.lib import machine
from benchmarks.lib.llama_cpp import CUDA_PROGRAMS
from benchmarks.lib.machine import ROOT
from powerinfer.sizes import read_size

MISSING = ("highspy", "llguidance", "prompt_toolkit", "wcwidth", "gguf")
"""Of the packages that `powerinfer` and its benchmarks need, those that few machines have."""
GLIBC = range(5, 40)  # minor versions whose wheels a machine of today runs
SOURCE = ("src", "benchmarks", "tests", "runs", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE")
INSTALL = """#!/bin/sh
# sh install.sh TARGET: the source in TARGET/source, the packages in TARGET/site, for PYTHONPATH
set -e
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/source"
tar -xzf "$here/source.tgz" -C "$1/source"
echo {commit} > "$1/source/COMMIT"
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$1/site" "$here"/*.whl
cp "$1"/site/powerinfer/_native*.so "$1/source/src/powerinfer/"
if [ -f "$here/peer.txz" ]; then mkdir -p "$1/peer" && tar -xJf "$here/peer.txz" -C "$1/peer"; fi
"""
BOTH = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 96 << 20}]  # programs that share most of their code


def build(folder: Path, python: str) -> Path:
    """The engine's wheel, for this source and PYTHON."""
    for old in folder.glob("powerinfer-*.whl"):
        old.unlink()
    subprocess.run([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    (made,) = folder.glob("powerinfer-*.whl")
    return made


def requirements(packages: list[str]) -> list[str]:
    """The packages as the project requires them, with the versions that it does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *extras["bench"], *extras["test"]]
    known = {one.partition(";")[0].strip() for one in stated}

    def of(package: str) -> str:
        name = package.replace("-", "_").lower()
        fits = (one for one in known if one.replace("-", "_").lower().removeprefix(name)[:1] in (*"<>=", ""))
        return next((one for one in fits if one.replace("-", "_").lower().startswith(name)), package)

    return [of(package) for package in packages]


def fetch(folder: Path, packages: list[str], version: str) -> None:
    """The packages' wheels for Linux on x86-64 and that version of Python, such as "3.12"."""
    flags = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    for minor in reversed(GLIBC):
        flags += ["--platform", f"manylinux_2_{minor}_x86_64"]
    flags += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64", "--platform", "any"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, *flags, *requirements(packages)], check=True)


def pack_peer(build: Path, to: Path) -> None:
    """The programs of a build without their symbols, and how it was made."""
    with (
        tempfile.TemporaryDirectory() as name,
        lzma.open(to, "wb", filters=BOTH) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for program in CUDA_PROGRAMS:
            stripped = Path(name) / program
            subprocess.run(["strip", "-o", str(stripped), str(build / "bin" / program)], check=True)
            tar.add(stripped, f"bin/{program}")
        tar.add(build / "CMakeCache.txt", "CMakeCache.txt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", required=True, help="of the machine's version, with pip")
    parser.add_argument("--packages", nargs="*", default=list(MISSING), help="default: %(default)s")
    parser.add_argument("--peer", type=Path, metavar="BUILD", help="of llama.cpp, with bin/ in it")
    parser.add_argument("--most", type=read_size, default=64 << 20, metavar="SIZE", help="default: 64MiB")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    ask = "import sys; print(f'{sys.version_info.major}.{sys.version_info.minor}')"
    version = subprocess.run([arguments.python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    fetch(arguments.folder, arguments.packages, version)
    build(arguments.folder, arguments.python)
    archive = ["git", "archive", "--format=tar.gz", "-o", str((arguments.folder / "source.tgz").resolve()), "HEAD"]
    subprocess.run([*archive, *SOURCE], check=True, cwd=ROOT)
    (arguments.folder / "peer.txz").unlink(missing_ok=True)
    if arguments.peer is not None:
        pack_peer(arguments.peer, arguments.folder / "peer.txz")
    (arguments.folder / "install.sh").write_text(INSTALL.format(commit=machine.commit()))
    sizes = {path.name: path.stat().st_size for path in sorted(arguments.folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size / 2**20:8.1f} MiB  {name}")
    if sum(sizes.values()) > arguments.most:
        sys.exit(f"{sum(sizes.values()) / 2**20:.0f} MiB are more than {arguments.most / 2**20:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
