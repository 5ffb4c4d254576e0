"""Build llama.cpp, the peer of the benchmarks, from the sdist of llama-cpp-python, for exactly this machine.

    python benchmarks/peer.py FOLDER [--no-amx]      prints the folder of the binaries

Release build, GGML_NATIVE, OpenMP, its own kernels repacking weights (CPU_REPACK), as its README says. One line is
added to its AMX code: gcc treats `_tile_loadconfig` as reading 8 bytes of the 64, drops the stores of the rest, and
the program then dies in the first prefill. `--no-amx` builds a second variant without AMX, for a comparison that also
holds on processors that have none. Needs cmake, ninja and a C++ compiler.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from pathlib import Path

SDIST = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-bench", "llama-completion", "llama-perplexity", "llama-quantize")
AMX_LINE = "    _tile_loadconfig(&tc);\n"
AMX_MENDED = '    asm volatile("" : : "m"(tc));  // gcc: keep all stores to tc\n' + AMX_LINE


def source(folder: Path) -> Path:
    """llama.cpp's source tree under `folder`, downloaded and mended once."""
    target = folder / "source"
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "-d", str(folder), SDIST], check=True, stdout=sys.stderr)
        archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        tree = folder / archive.name.removesuffix(".tar.gz") / "vendor/llama.cpp"
        kernels = tree / "ggml/src/ggml-cpu/amx/mmq.cpp"
        text = kernels.read_text()
        if text.count(AMX_LINE) != 1:
            sys.exit(f"{kernels} is not the version that this script knows how to mend")
        kernels.write_text(text.replace(AMX_LINE, AMX_MENDED))
        tree.rename(target)
    return target


def build(folder: Path, amx: bool = True) -> Path:
    """Configure and build (only what is missing); returns the folder of the binaries."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / ("build" if amx else "build-no-amx")
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    if not amx:
        without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        flags += [f"-DCMAKE_C_FLAGS={without}", f"-DCMAKE_CXX_FLAGS={without}"]
    configure = ["cmake", "-S", str(source(folder)), "-B", str(target), "-G", "Ninja", *flags]
    subprocess.run(configure, check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", str(target), "--target", *PROGRAMS], check=True, stdout=sys.stderr)
    return target / "bin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-amx", action="store_true")
    arguments = parser.parse_args()
    print(build(arguments.folder, not arguments.no_amx))


if __name__ == "__main__":
    main()
