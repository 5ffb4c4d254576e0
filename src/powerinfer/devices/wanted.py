"""Whether a GPU should be used. Runs at every start, so it imports neither torch nor GPU code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError, install_extra

UNUSED_VRAM = "--vram is not used: there is no GPU to use ({})"
NO_GPU = "--vram is the memory of a GPU, and --gpu none uses none: leave out one of the two"

_NAME = re.compile(r"auto|none|cpu|cuda(:\d{1,4})?")
_LISTED = re.compile(r"cpu|(?:cuda:)?(\d{1,4})")
MOST_GPUS = 16
DRIVERS = Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1")
"""Files of NVIDIA's driver on Linux, and under WSL2, which has no devices of its own."""


def wanted_gpu(engine: EngineConfig) -> tuple[str | None, str]:
    """(name for `choose_device`, of several GPUs all of them (`gpu_names`), or None for no GPU; the reason). Imports
    nothing if there is no driver.

    RequestError for a name that no device has, and for VRAM of none.
    """
    if engine.gpu == "none" and engine.vram:
        raise RequestError(NO_GPU)
    named = _listed(engine.gpu)
    _check_sizes(named, engine)
    if engine.gpu == "none" or engine.vram == 0:
        return None, "asked for" if engine.gpu == "none" else "--vram is 0"
    if engine.gpu != "auto":
        return ",".join(named), "asked for"
    if not has_driver():
        return None, "no NVIDIA driver"
    if lacks_torch():
        return None, f"torch is not installed: {install_extra('gpu')}"
    return ",".join(f"cuda:{number}" for number in range(len(engine.vrams))) or "cuda", "found"


def _check_sizes(named: list[str], engine: EngineConfig) -> None:
    """RequestError for sizes of --vram that are not those of the GPUs of --gpu."""
    sizes = len(engine.vrams)
    if 0 in engine.vrams:
        raise RequestError("--vram of a GPU that is used is more than 0: leave the others out of --gpu and --vram")
    if len(named) > 1 and sizes not in (0, len(named)):
        raise RequestError(f"--gpu names {len(named)} GPUs, and --vram has {sizes} sizes: give a size for each")
    if len(named) > 1 and engine.vram and not sizes:
        raise RequestError(f"--vram is the memory of each of {len(named)} GPUs: give {len(named)} sizes, as 8GiB,12GiB")
    if sizes > MOST_GPUS:
        raise RequestError(f"--vram has {sizes} sizes, and a model is split over at most {MOST_GPUS} GPUs")
    if sizes and len(named) == 1 and engine.gpu != "auto":
        raise RequestError(f"--vram has {sizes} sizes, and --gpu names one GPU: name as many, as --gpu 0,1")


def gpu_names(name: str) -> list[str]:
    """The names for `choose_device` of the GPUs that `wanted_gpu` gives."""
    return name.split(",")


def _listed(text: str) -> list[str]:
    """The names in --gpu, for `choose_device`; auto and none by themselves."""
    names = [name.strip() for name in text.split(",")]
    if len(names) == 1 and _NAME.fullmatch(names[0]):
        return names
    matches = [_LISTED.fullmatch(name) for name in names]
    for name, match in zip(names, matches, strict=True):
        if match is None:
            raise RequestError(f"there is no device {name!r}: choose auto, none, cuda, cuda:1, cpu, or several, as 0,1")
    devices = ["cpu" if match is None or match[1] is None else f"cuda:{int(match[1])}" for match in matches]
    twice = next((name for name in devices if name != "cpu" and devices.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"--gpu names {twice} twice: name each GPU once")
    if len(set(devices)) > 1 and "cpu" in devices:
        raise RequestError("--gpu cpu is a stand-in for a GPU: name GPUs, or stand-ins alone")
    if len(devices) > MOST_GPUS:
        raise RequestError(f"--gpu names {len(devices)} GPUs, and a model is split over at most {MOST_GPUS}")
    return devices


def has_driver() -> bool:
    """Whether NVIDIA's driver is there."""
    return any(file.exists() for file in DRIVERS)


def lacks_torch() -> bool:
    """Whether there is a GPU that only torch is missing for."""
    return has_driver() and importlib.util.find_spec("torch") is None
