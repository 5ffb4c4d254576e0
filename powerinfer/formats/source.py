"""What a model file, of whatever format, is turned into before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerinfer.config import ModelConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.quant import can_dequantize
from powerinfer.formats.tensors import RawTensor


@dataclass(frozen=True)
class Source:
    """A model as it lies on disk: its configuration and its tensors under their canonical names, all checked."""

    kind: str  # "gguf" or "hf"
    path: Path
    config: ModelConfig
    metadata: dict[str, Any]
    tensors: dict[str, RawTensor]
    files: list[MappedFile]


def collect(
    config: ModelConfig,
    stored: dict[str, RawTensor],
    spelled: Callable[[str], str],
    where: str,
    extra: Iterable[tuple[str, tuple[int, ...]]] = (),
) -> dict[str, RawTensor]:
    """Canonical name -> tensor, for all that `config` asks for and `extra`; ModelError unless that is all there is.

    stored: tensors under the names of the file; spelled: canonical name -> name in the file.
    """
    if config.n_layers > len(stored):  # before anything loops over the layers
        raise ModelError(f"{where}: claims {config.n_layers} layers and holds {len(stored)} tensors")
    found: dict[str, RawTensor] = {}
    rest = set(stored)
    for canonical, shape in (*layout.shapes(config), *extra):
        name = spelled(canonical)
        tensor = stored.get(name)
        if tensor is None:
            raise ModelError(f"{where}: tensor {name} is missing")
        if tensor.shape != shape:
            raise ModelError(f"{where}: tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
        if not can_dequantize(tensor.type):
            raise ModelError(
                f"{where}: tensor {name} has type {tensor.type}, which this engine does not read; "
                "take the model in another quantisation, such as Q4_K_M or Q8_0"
            )
        found[canonical] = tensor
        rest.discard(name)
    if rest:
        names = ", ".join(shown(name) for name in sorted(rest)[:3])
        more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
        raise ModelError(f"{where}: tensors that a {config.architecture} model does not have: {names}{more}")
    return found


def printable(name: object) -> str:
    """A model's name for people: no control characters, not too long."""
    return "".join(c for c in str(name)[:200] if c.isprintable())
