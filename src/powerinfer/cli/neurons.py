"""Lines about the neurons of a loaded model: which layers skip some, what they read, which are hot."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import sparsity_text
from powerinfer.errors import PowerInferError

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM


def neuron_rows(llm: LLM, sparsity: dict[str, Any]) -> dict[str, str]:
    """Name -> text. sparsity: `LLM.sparsity`."""
    rows = {"neurons": sparsity_text(sparsity)}
    if "gpu_share" in sparsity:
        hot, cold = (sum(layer.get(kind, 0) for layer in sparsity["layers"]) for kind in ("hot", "cold"))
        if hot + cold:
            rows["hot and cold"] = f"{100 * hot / (hot + cold):.0f} % of the neurons, the hot ones, are on the GPU"
        return rows
    ways: dict[str, list[int]] = {}
    for layer in sparsity["layers"]:
        ways.setdefault(layer["ways"]["1"], []).append(layer["layer"])
    rows |= {way: f"layers {ranges(layers)}" for way, layers in sorted(ways.items())}
    share = _hot_share(llm)
    if share is not None:
        rows["hot"] = f"{100 * share:.0f} % of the neurons make 80 % of the activations, by the profile"
    return rows


def _hot_share(llm: LLM) -> float | None:
    """The share of the neurons that makes 80 % of the activations; None without a profile that can be used."""
    from powerinfer.formats.prepared import PROFILE, PreparedFile
    from powerinfer.formats.profile_file import open_profile

    if llm.checkpoint is None or llm.config.experts:
        return None
    with suppress(PowerInferError):  # a stale one is no obstacle to an answer
        if PreparedFile(PROFILE, llm.checkpoint, llm.engine.prepared).exists():
            return open_profile(llm.checkpoint, llm.engine.prepared).hot_share()
    return None


def ranges(numbers: list[int]) -> str:
    """Ascending numbers in short: "0-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
