"""CUDA's compiler and libraries out of PyPI's wheels, to compile for a GPU on a machine that has neither.

`toolkit(folder)` fetches them (600 MB) and gives the folder that CMake's CUDAToolkit_ROOT takes. The driver's library
is a stand-in that a program links with: what is built runs where there is a driver.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "13.0"
PACKAGES = ("nvcc", "crt", "runtime", "cccl", "nvrtc")
DRIVER = (
    "cuDeviceGet", "cuDeviceGetAttribute", "cuGetErrorString", "cuMemAddressFree", "cuMemAddressReserve", "cuMemCreate",
    "cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap",
)  # fmt: skip
"""What llama.cpp calls of the driver itself."""


def link(path: Path, to: str) -> None:
    """Also where an earlier call was interrupted."""
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def toolkit(folder: Path) -> Path:
    """The toolkit's folder, made once."""
    root = folder / "nvidia/cu13"
    stub = root / "lib/stubs/libcuda.so"
    if stub.exists():
        return root
    names = [f"nvidia-cuda-{name}=={VERSION}.*" for name in PACKAGES]
    names += [f"nvidia-nvvm=={VERSION}.*", f"nvidia-cublas=={VERSION}.*"]
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder / "wheels")]
    subprocess.run([*pip, *names], check=True, stdout=sys.stderr)
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder)
    for program in (*(root / "bin").iterdir(), *(root / "nvvm/bin").iterdir()):
        program.chmod(0o755)
    for library in ("cublas", "cublasLt", "cudart", "nvrtc"):
        (found,) = (root / "lib").glob(f"lib{library}.so.[0-9]*")
        link(root / f"lib/lib{library}.so", found.name)
    link(root / "lib64", "lib")
    stub.parent.mkdir(exist_ok=True)
    code = "\n".join(f"int {name}(void) {{ return 999; }}" for name in DRIVER)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(stub)]
    subprocess.run(command, input=code, text=True, check=True)
    return root
