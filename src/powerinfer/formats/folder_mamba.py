"""Mamba2 in Hugging Face folders: its keys and its tensors, which families call by the same names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from powerinfer.config import MIXED_ACTIVATIONS, Mamba2Config, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import GATED, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Fused, Names

MAMBA_NAMES = {
    **dict.fromkeys(("z", "xbc", "dt"), "in_proj"),
    "conv": "conv1d", "step": "dt", "a": "A_log", "d": "D", "norm": "norm", "o": "out_proj",
}  # fmt: skip
"""Names of a mixer's tensors, by the canonical ones without `mamba_`, once `rename_mamba` was there."""


def read_mamba(
    fields: Fields,
    *,
    heads: str = "mamba_n_heads",
    head_dim: str = "mamba_d_head",
    groups: str = "n_groups",
    state: str = "ssm_state_size",
    taps: str = "conv_kernel",
    bias: str = "use_conv_bias",
    act: str = "hidden_act",
) -> Mamba2Config:
    """Mamba2, of the keys that a family has; with a gated norm over all heads together, and no biases of products."""
    activation = GATED.get(fields.text(act), "")
    if activation not in MIXED_ACTIVATIONS:
        raise fields.bad(act, f"is {shown(fields.text(act))}; only {', '.join(MIXED_ACTIVATIONS)} are supported here")
    return Mamba2Config(
        fields.integer(heads, 1, layout.MAX_HEADS),
        fields.integer(head_dim, 1, layout.MAX_HEAD_DIM),
        fields.integer(groups, 1, layout.MAX_HEADS),
        fields.integer(state, 1, layout.MAX_HEAD_DIM),
        fields.integer(taps, 1, layout.MAX_HEAD_DIM),
        conv_bias=fields.flag(bias, True),
        step_limits=_read_limits(fields),
        activation=activation,
    )


def _read_limits(fields: Fields) -> tuple[float, float]:
    """Limits that steps are clamped to. JSON has no infinity: writers leave it out, or write a word."""
    limits = fields.get("time_step_limit", None)
    if limits is None:
        return 0.0, math.inf
    words = {"inf": math.inf, "infinity": math.inf}
    if type(limits) is list and len(limits) == 2:
        limits = [_unwrapped(one, words) for one in limits]
        if all(type(one) in (int, float) for one in limits) and 0 <= limits[0] < limits[1]:
            return float(limits[0]), float(limits[1])
    raise fields.bad("time_step_limit", f"is {shown(limits)}, not two ascending numbers")


def _unwrapped(value: object, words: dict[str, float]) -> object:
    """A number as `transformers` writes one that JSON has not: {"__float__": "Infinity"}."""
    if type(value) is dict and value.keys() == {"__float__"}:
        value = value["__float__"]
    return words.get(value.lower(), value) if type(value) is str else value


def rename_mamba(stored: Tensors) -> None:
    """Parameters of a mixer get names as those of modules have."""
    for old, new in ((".A_log", ".A_log.weight"), (".D", ".D.weight"), (".dt_bias", ".dt.bias")):
        for name in [name for name in stored if name.endswith(old)]:
            stored[name.removesuffix(old) + new] = stored.pop(name)


def fuse_mamba(config: ModelConfig, names: Names) -> Sequence[Fused]:
    """The products with the input are one matrix."""
    return [Fused(("mamba_z", "mamba_xbc", "mamba_dt"))]
