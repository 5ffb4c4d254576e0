"""The rotary embedding of a Hugging Face folder: `rope_parameters`, `rope_scaling` and what stands outside them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from powerinfer.config import AttentionConfig, ModelConfig, RopeConfig
from powerinfer.formats import layout
from powerinfer.formats.family import Folder
from powerinfer.formats.fields import Fields
from powerinfer.formats.mapped import shown

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of attention in `layer_types`, without a window and with one."""


def read_ropes(
    family: Folder, fields: Fields, config: ModelConfig, heads: AttentionConfig, local_theta: float | None
) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of attention. `rope_scaling` is that of global attention only.

    local_theta: default of the local one's base, in `rope_local_base_freq`; None: the base is that of the global one.
    """
    new = fields.get("rope_parameters", None)
    if type(new) is dict and set(new) & {GLOBAL, LOCAL}:
        families = {GLOBAL: family, LOCAL: replace(family, theta=local_theta or family.theta)}
        parts = {kind: Fields({"rope_parameters": new.get(kind)}, f"{fields.source}: {kind}") for kind in families}
        return {kind: read_rope(of_kind, parts[kind], config, heads) for kind, of_kind in families.items()}
    global_rope = read_rope(family, fields, config, heads)
    local = global_rope.theta
    if local_theta is not None:
        local = fields.number("rope_local_base_freq", 1.0001, layout.MAX_THETA, local_theta)
    return {GLOBAL: global_rope, LOCAL: RopeConfig(theta=local, dim=heads.head_dim)}


def read_rope(family: Folder, fields: Fields, config: ModelConfig, heads: AttentionConfig) -> RopeConfig:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as earlier versions did."""
    rope = _rope_values(fields)
    if rope.text("rope_type", "default") == "proportional":
        return _proportional(family, rope, heads.head_dim)
    if family.vision_class:  # places in a picture; a text has one position in all three dimensions
        for key in ("mrope_section", "mrope_interleaved"):
            rope.get(key, None)
    if family.grown:  # the second says again what stands outside, or nothing
        for key in ("llama_4_scaling_beta", "max_position_embeddings"):
            rope.get(key, None)
    dim = _rotated(fields, rope, heads.head_dim, family.partial)
    theta = fields.number("rope_theta", 1.0001, layout.MAX_THETA, family.theta)
    plain = RopeConfig(rope.number("rope_theta", 1.0001, layout.MAX_THETA, theta), dim, family.interleaved)
    outer = fields.integer("original_max_position_embeddings", 1, layout.MAX_CONTEXT, None)
    kind = rope.text("rope_type", "default")
    if kind == "dynamic" and family.stretched and rope.has("alpha"):
        return _stretched(rope, plain)
    if kind not in _SCALINGS:
        raise rope.bad("rope_type", f"is {shown(kind)}, which is not supported (only {', '.join(_SCALINGS)})")
    if family.mscales and _SCALINGS[kind] not in (None, "longrope"):
        raise rope.bad("rope_type", f"is {shown(kind)}; of this family only longrope is supported")
    result = _scaled(family, rope, plain, _SCALINGS[kind], outer, config.context_length)
    unread = rope.unread()
    if unread:
        raise rope.bad(shown(unread[0])[1:-1], f"is set, which this engine does not support for type {kind}")
    return result


def read_growth(fields: Fields) -> dict[str, Any]:
    """Settings of attention by which queries grow with their positions."""
    rope = _rope_values(fields)
    growth = rope.number("llama_4_scaling_beta", 0, layout.MAX_SCALE)
    interval = rope.integer("original_max_position_embeddings", 1, layout.MAX_CONTEXT)
    return {"query_growth": growth, "query_interval": interval}


UNROTATED = 1e30
"""A divisor of frequencies with which nothing turns; llama.cpp's converter writes the same."""


def _proportional(family: Folder, rope: Fields, dim: int) -> RopeConfig:
    """The rotary embedding that turns the first pairs of a head, as fast as if all turned."""
    rope.text("rope_type")
    theta = rope.number("rope_theta", 1.0001, layout.MAX_THETA, family.theta)
    factor = rope.number("factor", 1e-6, layout.MAX_SCALE, 1.0)
    rotated = int(dim * rope.number("partial_rotary_factor", 0, 1, 1.0) / 2)
    if rope.unread():
        raise rope.bad(shown(rope.unread()[0])[1:-1], "is set, which this engine does not support for proportional")
    divisors = (factor,) * rotated + (UNROTATED,) * (dim // 2 - rotated)
    return RopeConfig(theta, dim, family.interleaved, divisors=() if set(divisors) == {1.0} else divisors)


def _stretched(rope: Fields, plain: RopeConfig) -> RopeConfig:
    """`plain` with a base that `alpha` stretches, whatever the length of a text; the class reads nothing else."""
    alpha = rope.number("alpha", 1e-6, layout.MAX_SCALE)
    if plain.dim <= 2:
        raise rope.bad("alpha", f"is set for {plain.dim} rotated dimensions of a head, which it cannot stretch")
    return replace(plain, theta=plain.theta * alpha ** (plain.dim / (plain.dim - 2)))


def _rope_values(fields: Fields) -> Fields:
    """Values of `rope_parameters` and `rope_scaling`; both may be there, if they agree in what both say."""
    new, old = fields.get("rope_parameters", None), fields.get("rope_scaling", None)
    source = f"{fields.source}: {'rope_parameters' if new is not None else 'rope_scaling'}"
    new, old = ({} if value is None else value for value in (new, old))
    for key, values in (("rope_parameters", new), ("rope_scaling", old)):
        if type(values) is not dict:
            raise fields.bad(key, f"is {shown(values)}, not an object")
    values_of = [{key: value for key, value in values.items() if value is not None} for values in (new, old)]
    for values in values_of:  # the older name of the key
        if "type" in values:
            values.setdefault("rope_type", values.pop("type"))
    if any(values_of[1][key] != values_of[0][key] for key in values_of[1].keys() & values_of[0].keys()):
        raise fields.bad("rope_scaling", "and rope_parameters are both set, and differ")
    if new and old and values_of[0].get("rope_type", "default") != values_of[1].get("rope_type", "default"):
        raise fields.bad("rope_scaling", "and rope_parameters are both set, and differ")
    return Fields(values_of[1] | values_of[0], source, notes=fields.notes)


def _rotated(fields: Fields, rope: Fields, head_dim: int, partial: float | None) -> int:
    """Rotated dimensions of a head."""
    if partial is None:
        fields.only("partial_rotary_factor", 1, 1.0)
        rope.only("partial_rotary_factor", 1, 1.0)
        return head_dim
    outer = fields.number("partial_rotary_factor", 0, 1, partial)
    return int(head_dim * rope.number("partial_rotary_factor", 0, 1, outer))


_SCALINGS = {
    "default": None,
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",  # as the first files of Phi-3 call it
}
"""`rope_type` -> `RopeConfig.scaling`."""


def _scaled(
    family: Folder, rope: Fields, plain: RopeConfig, scaling: str | None, outer: int | None, context: int
) -> RopeConfig:
    """`plain` with the scaling that `rope` describes.

    outer: the context that the model was trained on first, as it stands outside `rope`; context: the model's own.
    """

    def number(key: str, *default: float | None) -> Any:
        return rope.number(key, 1e-6, layout.MAX_SCALE, *default)

    if scaling is None:
        return plain
    if scaling == "linear":
        return replace(plain, scaling=scaling, factor=number("factor"))
    inner = rope.integer("original_max_position_embeddings", 1, layout.MAX_CONTEXT, None)
    if inner is not None and outer is not None and inner != outer:
        raise rope.bad("original_max_position_embeddings", f"is {inner}, but {outer} outside")
    first = inner or outer or context
    settings: dict[str, Any]
    if scaling == "llama3":
        settings = {"factor": number("factor")} | {key: number(key) for key in ("low_freq_factor", "high_freq_factor")}
    elif scaling == "yarn":
        rope.flag("finetuned", False)
        settings = {"factor": number("factor")}
        settings |= {"attention_factor": _attention_factor(rope, settings["factor"])}
        settings |= {"truncate": rope.flag("truncate", True)}
        settings |= {"beta_fast": number("beta_fast", 32.0), "beta_slow": number("beta_slow", 1.0)}
    else:
        settings = {"factor": number("factor", context / first), "attention_factor": number("attention_factor", None)}
        if family.mscales:
            settings["attention_factor"], beyond = number("short_mscale"), number("long_mscale")
            settings["long_attention_factor"] = beyond
        names = {"divisors": "short_factor", "long_divisors": "long_factor"}
        settings |= {name: _divisors(rope, key, plain.dim // 2) for name, key in names.items()}
    return replace(plain, scaling=scaling, original_context_length=first, **settings)


def _attention_factor(rope: Fields, factor: float) -> float | None:
    """YaRN's factor of what is rotated, None: the one that follows from `factor`. As in `transformers` `mscale` and
    `mscale_all_dim` count together only, and what other readers know besides is not applied."""
    stated = rope.number("attention_factor", 1e-6, layout.MAX_SCALE, None)
    scales = [rope.number(key, 0, layout.MAX_SCALE, 0.0) for key in ("mscale", "mscale_all_dim")]
    for key in ("attn_factor", "extrapolation_factor"):
        if rope.number(key, -1, layout.MAX_SCALE, 1.0) not in (1, -1):
            rope.notes.append(f"{key} of YaRN is not applied, as in transformers")
    if stated is not None or not all(scales):
        if stated is None and scales[0]:
            rope.notes.append("mscale of YaRN is not applied without mscale_all_dim, as in transformers")
        return None if stated is None else float(stated)
    of_rotated, of_all = (_yarn_gain(factor, scale) for scale in scales)
    return of_rotated / of_all


def _divisors(rope: Fields, key: str, count: int) -> tuple[float, ...]:
    values: Any = rope.get(key, None)
    right = type(values) is list and len(values) == count
    if not right or not all(type(one) in (int, float) and 1e-6 < one < layout.MAX_SCALE for one in values):
        raise rope.bad(key, f"is not a list of {count} positive numbers")
    return tuple(map(float, values))


def _yarn_gain(factor: float, scale: float = 1.0) -> float:
    """Factor of YaRN where positions are divided by `factor`."""
    return 1 + 0.1 * scale * math.log(max(factor, 1))


def read_latent_rope(
    family: Folder, fields: Fields, config: ModelConfig, plain: int, rotated: int
) -> tuple[RopeConfig, float]:
    """(rotary embedding, factor of attention's scores), which YaRN's `mscale` and `mscale_all_dim` are about.

    plain, rotated: dimensions of a head, of which the files of some families state the share that is rotated, too.
    """
    stated = family.partial is not None
    rope = read_rope(family, fields, config, AttentionConfig(1, 1, plain + rotated if stated else rotated))
    if rope.dim != rotated:
        raise fields.bad("qk_rope_head_dim", f"is {rotated}, but partial_rotary_factor says {rope.dim}")
    if rope.scaling != "yarn":
        return rope, 1.0
    scale = _rope_values(fields).number("mscale_all_dim", 0, layout.MAX_SCALE, 0.0)
    return rope, _yarn_gain(rope.factor, scale) ** 2
