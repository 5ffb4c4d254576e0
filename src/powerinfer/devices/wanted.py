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
_DRIVER = Path("/dev/nvidiactl")


def wanted_gpu(engine: EngineConfig) -> tuple[str | None, str]:
    """(name for `choose_device`, or None for no GPU; the reason). Imports nothing if there is no driver.

    RequestError for a name that no device has, and for VRAM of none.
    """
    if not _NAME.fullmatch(engine.gpu):
        raise RequestError(f"there is no device {engine.gpu!r}: choose auto, none, cuda, cuda:1 or cpu")
    if engine.gpu == "none" and engine.vram:
        raise RequestError(NO_GPU)
    if engine.gpu == "none" or engine.vram == 0:
        return None, "asked for" if engine.gpu == "none" else "--vram is 0"
    if engine.gpu != "auto":
        return engine.gpu, "asked for"
    if not _DRIVER.exists():
        return None, "no NVIDIA driver"
    if lacks_torch():
        return None, f"torch is not installed: {install_extra('gpu')}"
    return "cuda", "found"


def lacks_torch() -> bool:
    """Whether there is a GPU that only torch is missing for."""
    return _DRIVER.exists() and importlib.util.find_spec("torch") is None
