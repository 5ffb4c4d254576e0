"""Whether GPUs can be used and, where none can, what this machine lacks for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from powerinfer.devices.wanted import has_driver
from powerinfer.errors import PowerInferError, RequestError, install_extra


def check_gpus(names: Sequence[str]) -> None:
    """Raise what `choose_device` does for one of these names; RequestError where a driver is missing, or a torch that
    can use one, which says how to mend it."""
    from powerinfer.devices.torch_device import choose_device

    try:
        for name in names:
            choose_device(name)
    except PowerInferError:
        lacks = [] if names[0] == "cpu" or _finds_gpus() else _missing()
        if not lacks:
            raise
        them = "them" if len(lacks) > 1 else "it"
        raise RequestError(f"a GPU needs {' and '.join(lacks)}: install {them}, or use --gpu none") from None


def _finds_gpus() -> bool:
    """Whether torch finds GPUs: then an error is of the one that was named."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _missing() -> list[str]:
    """Parts that a GPU needs, and this machine does not have, each with how to get it."""
    lacks = []
    if not has_driver():
        lacks.append("NVIDIA's driver (nvidia-smi shows whether it works)")
    if importlib.util.find_spec("torch") is None:
        return [*lacks, f"torch ({install_extra('gpu')})"]
    try:
        import torch
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        return [*lacks, f"a torch that can be imported (pip install --force-reinstall torch; now: {reason})"]
    if torch.version.cuda is None:
        lacks.append("a torch that was built with CUDA (pip install --force-reinstall torch)")
    return lacks
