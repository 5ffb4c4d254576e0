"""Build llama.cpp, the peer of the benchmarks, from the sdist of llama-cpp-python, for exactly this machine.

    python -m benchmarks.lib.llama_cpp FOLDER [--no-amx | --avx2 | --cuda ARCHITECTURE]      prints the binaries' folder
    python -m benchmarks.lib.llama_cpp FOLDER --archive FILE.tgz

Release build, GGML_NATIVE, OpenMP, its own kernels repacking weights (CPU_REPACK), as its README says. One line is
added to its AMX code: gcc treats `_tile_loadconfig` as reading 8 bytes of the 64, drops the stores of the rest, and
the program then dies in the first prefill. `--no-amx` builds a second variant without AMX, for a comparison that also
holds on processors that have none, `--avx2` one with AVX2, FMA, F16C and BMI2 and nothing newer. Needs cmake, ninja
and a C++ compiler.

`--cuda 90` builds for an NVIDIA GPU too (89: RTX 40, 90: H100 and H200), with CUDA graphs and flash attention as by
default; needs CUDA's compiler, nvcc. What is built already stays, so a build that was stopped goes on. Compiling the
kernels of flash attention takes most of the time; --no-flash-attention leaves them out.

`--wheels` takes CUDA's compiler from PyPI (lib/cuda_wheels.py), for a machine without a GPU; on two cores a build takes
an hour. `--few` leaves out of it what no benchmark here runs: flash attention but for heads of 64 and 128 dimensions
and a cache of F16, and products of types but Q4_0, Q8_0, Q4_K and Q6_K. A program that runs into one of these aborts.

Binaries for a machine with another processor than this one: `--no-native` leaves GGML_NATIVE out, and compiles for the
extensions of current servers (AVX-512 with VNNI and BF16, AMX).

For a machine without a network: `--archive` writes what building needs of the source, mended, and nothing else;
unpacked into FOLDER there, it is not downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.lib.cuda_wheels import toolkit

SDIST = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-bench", "llama-completion", "llama-perplexity", "llama-quantize")
CUDA_PROGRAMS = ("llama-bench", "llama-batched-bench")
PARTS = ("CMakeLists.txt", "LICENSE", "app", "cmake", "common", "ggml", "include", "licenses", "src", "tools", "vendor")
SERVER = ("AVX2", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX_TILE", "AMX_INT8", "AMX_BF16")
AVX2 = ("AVX2", "FMA", "F16C", "BMI2")
AMX_LINE = "    _tile_loadconfig(&tc);\n"
AMX_MENDED = '    asm volatile("" : : "m"(tc));  // gcc: keep all stores to tc\n' + AMX_LINE


def source(folder: Path) -> Path:
    """llama.cpp's source tree under `folder`, downloaded and mended once."""
    target = folder / "source"
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", "llama-cpp-python"]
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


def leave_out(tree: Path) -> None:
    """`--few`: the kernels' files that are left out become empty, of the others the cases of other heads."""
    for path in (tree / "ggml/src/ggml-cuda/template-instances").glob("*.cu"):
        kind, _, rest = path.stem.partition("-instance-")
        kept = {"fattn-tile": r"dkq(64|128)-", "fattn-vec": "f16-f16$", "mmq": "q4_0|q8_0|q4_k|q6_k"}.get(kind, "")
        if not re.match(kept, rest):
            path.write_text("// left out\n")
        elif kind == "fattn-mma-f16":
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if not re.match(r"DECL.*CASE\((?!64,|128,)", line)))


def aborting(target: Path, programs: tuple[str, ...], env: dict[str, str]) -> Path:
    """An object with all functions that the programs lack, which abort."""
    lacking: set[str] = set()
    for program in programs:
        subprocess.run(["ninja", "-C", str(target), program], env=env, stdout=sys.stderr, stderr=subprocess.DEVNULL)
        told = subprocess.run(["ninja", "-t", "commands", program], cwd=target, capture_output=True, text=True, env=env)
        link = told.stdout.splitlines()[-1].replace(" -o ", " -Wl,--no-demangle -o ", 1)
        said = subprocess.run(link, shell=True, cwd=target, capture_output=True, text=True).stderr
        lacking |= set(re.findall(r"undefined reference to `([^']+)'", said))
    made = target / "aborting.o"
    labels = "".join(f".globl {name}\n.type {name},@function\n{name}:\n" for name in sorted(lacking))
    code = f'.text\n{labels}call abort@PLT\n.section .note.GNU-stack,"",@progbits\n'
    subprocess.run(["cc", "-c", "-x", "assembler", "-", "-o", str(made)], input=code, text=True, check=True)
    return made


def build(
    folder: Path, amx: bool = True, cuda: str | None = None, flash_attention: bool = True, native: bool = True,
    wheels: bool = False, few: bool = False, avx2: bool = False,
) -> Path:  # fmt: skip
    """Configure and build (only what is missing); returns the folder of the binaries.

    cuda: compute capability of the GPU without its point, None for a build without CUDA; wheels, few, avx2: see above.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / ("build-avx2" if avx2 else "build" if amx else "build-no-amx")
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    flags += [f"-DGGML_NATIVE={'ON' if native and not avx2 else 'OFF'}"]
    flags += [f"-DGGML_{name}=ON" for name in (AVX2 if avx2 else () if native else SERVER)]
    flags += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    programs = PROGRAMS
    if not amx:
        without = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
        flags += [f"-DCMAKE_C_FLAGS={without}", f"-DCMAKE_CXX_FLAGS={without}"]
    if cuda is not None:
        target, programs = folder / f"build-cuda-{cuda}", CUDA_PROGRAMS
        flags += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={cuda}", "-DGGML_CUDA_NCCL=OFF"]
        flags.append(f"-DGGML_CUDA_FA={'ON' if flash_attention else 'OFF'}")
    env = dict(os.environ)
    if wheels:
        root = toolkit(folder / "cuda")
        env |= {"PATH": f"{root / 'bin'}{os.pathsep}{env['PATH']}", "CUDACXX": str(root / "bin/nvcc")}
        flags.append(f"-DCUDAToolkit_ROOT={root}")
    tree = source(folder)
    if few:
        whole, tree = tree, folder / "source-few"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(whole, tree)  # with the times of its files: what is there is not compiled again
        leave_out(tree)
    configure = ["cmake", "-S", str(tree), "-B", str(target), "-G", "Ninja", *flags]
    subprocess.run(configure, check=True, stdout=sys.stderr, env=env)
    if few:
        missing = aborting(target, programs, env)
        subprocess.run([*configure, f"-DCMAKE_EXE_LINKER_FLAGS={missing}"], check=True, stdout=sys.stderr, env=env)
    subprocess.run(["cmake", "--build", str(target), "--target", *programs], check=True, stdout=sys.stderr, env=env)
    return target / "bin"


def archive(folder: Path, file: Path) -> None:
    """What `build` needs of the source, as `source/` in a compressed archive."""
    tree = source(folder)
    with tarfile.open(file, "w:gz") as tar:
        for part in PARTS:
            tar.add(tree / part, f"source/{part}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    variant = parser.add_mutually_exclusive_group()
    variant.add_argument("--no-amx", action="store_true")
    variant.add_argument("--avx2", action="store_true", help="for processors with AVX2 and nothing newer")
    variant.add_argument("--cuda", metavar="ARCHITECTURE", help="compute capability without its point, such as 90")
    variant.add_argument("--archive", type=Path, metavar="FILE")
    parser.add_argument("--no-flash-attention", action="store_true", help="with --cuda")
    parser.add_argument("--no-native", action="store_true", help="for other servers than this one")
    parser.add_argument("--wheels", action="store_true", help="with --cuda: its compiler from PyPI")
    parser.add_argument("--few", action="store_true", help="with --cuda: the kernels that benchmarks run")
    arguments = parser.parse_args()
    if arguments.archive:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        archive(arguments.folder, arguments.archive)
        return
    if (arguments.wheels or arguments.few) and arguments.cuda is None:
        parser.error("--wheels and --few are for a build with --cuda")
    variant_of = (not arguments.no_amx, arguments.cuda, not arguments.no_flash_attention, not arguments.no_native)
    print(build(arguments.folder, *variant_of, arguments.wheels, arguments.few, arguments.avx2))


if __name__ == "__main__":
    main()
