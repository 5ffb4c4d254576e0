"""Whether a GPU should be used. Runs at every start, so it imports neither torch nor GPU code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from powerinfer.config import EngineConfig

_DRIVER = Path("/dev/nvidiactl")


def choose_gpu(engine: EngineConfig) -> tuple[str | None, str]:
    """(name for `choose_device`, or None for no GPU; the reason). Imports nothing if there is no driver."""
    if engine.gpu == "none" or engine.vram == 0:
        return None, "asked for" if engine.gpu == "none" else "--vram is 0"
    if engine.gpu != "auto":
        return engine.gpu, "asked for"
    if not _DRIVER.exists():
        return None, "no NVIDIA driver"
    if importlib.util.find_spec("torch") is None:
        return None, 'torch is not installed: pip install "powerinfer[gpu]"'
    return "cuda", "found"
