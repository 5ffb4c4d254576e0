"""Types of the tensors of quantised files, by the names that llama.cpp has for its mixes of them: the same tensors get
the same types.

A mix has a type for most matrices, and rules for some kinds of them: by the layer, by whether several heads share keys
and values, by whether errors are weighed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from powerinfer.errors import RequestError
from powerinfer.formats.mapped import shown
from powerinfer.formats.quant import block_type, can_dequantize


@dataclass(frozen=True)
class ModelMatrices:
    """Tensors of a model as their types are chosen. stored: (type, shape) by the file's name; layers: their number, of
    experts: of a layer's; grouped: at least 4 query heads share keys and values; large: it is one of 80 layers with
    such heads."""

    stored: Mapping[str, tuple[str, tuple[int, ...]]]
    layers: int = 0
    experts: int = 0
    grouped: bool = False
    large: bool = False

    def names(self) -> Iterator[str]:
        """The matrices that are quantised: vectors, norms, routers and integers stay as they are."""
        for name, (kind, shape) in self.stored.items():
            matrix = any(dim > 1 for dim in shape[:-1]) and name.endswith("weight") and can_dequantize(kind)
            if matrix and _UNCHANGED.search(name) is None:
                yield name

    def is_head(self, name: str) -> bool:
        """Whether it is the head, or the embedding where that is the head, too."""
        tied = "output.weight" not in self.stored
        return name == "output.weight" or (tied and name in _EMBEDDINGS)


_UNCHANGED = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv"
    r"|indexer\.[kq]_proj|^position_embd|^token_types|time_mix_(first|[wvag][012]|decay_w[12]|lerp_fused)\.weight"
    r"|attn_rel_b"
)
"""Names of the small matrices that llama.cpp leaves as they are, too: routers, convolutions, positions."""

_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_KINDS = {
    "value": re.compile(r"\.attn_(v|qkv|kv_b)\.weight$"), "key": re.compile(r"\.attn_k\.weight$"),
    "query": re.compile(r"\.attn_q\.weight$"), "out": re.compile(r"\.attn_output\.weight$"),
    "down": re.compile("ffn_down"), "gate": re.compile("ffn_gate"), "up": re.compile("ffn_up"),
}  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """A matrix among those of its kind: its number of `count`. weighed: errors are."""

    number: int
    count: int
    of: ModelMatrices
    weighed: bool


_Holds = Callable[[_Place], bool]


def _always(_: _Place) -> bool:
    return True


def _grouped(place: _Place) -> bool:
    return place.of.grouped


def _grouped_or_experts(place: _Place) -> bool:
    return place.of.grouped or place.of.experts >= 4


def _eighth(place: _Place) -> bool:
    return place.number < place.count // 8


def _sixteenth(place: _Place) -> bool:
    return place.number < place.count // 16


def _first(count: int) -> _Holds:
    return lambda place: place.number < count


def _ends_and_thirds(place: _Place) -> bool:
    first = place.count // 8
    return _eighth(place) or place.number >= 7 * place.count // 8 or (place.number - first) % 3 == 2


def _middle(place: _Place) -> bool:
    return not _eighth(place) and place.number < 7 * place.count // 8


def _even(place: _Place) -> bool:
    return not place.weighed


def _eighth_if(weighed: bool) -> _Holds:
    return lambda place: _eighth(place) and place.weighed == weighed


Rule = tuple[str, str, _Holds]
"""(kind, type, where it holds): the first that holds counts."""


@dataclass(frozen=True)
class Mix:
    """Types of a file. number: of the mix in general.file_type; head: type of the head, embedding: of one that is not
    the head, None: as other matrices; experts: type of stacked matrices. eight: what models of eight experts have
    instead for values, keys and attention's result; pure: no rule holds, for the head neither."""

    number: int
    type: str
    rules: tuple[Rule, ...] = ()
    head: str = "Q6_K"
    embedding: str | None = None
    experts: str | None = None
    eight: Mapping[str, str] | None = None
    pure: bool = False


_EIGHT = {"value": "Q8_0", "key": "Q8_0"}
_EIGHT_OUT = _EIGHT | {"out": "Q5_K"}
_EIGHT_SMALL = {"key": "Q4_K", "out": "Q5_K"}


def _small_rules(value: str, down: str, out: str | None) -> tuple[Rule, ...]:
    """Rules of mixes of less than 3 bits."""
    rules: tuple[Rule, ...] = (
        ("value", "Q4_K", _grouped_or_experts), ("value", value, _always), ("down", down, _eighth),
    )  # fmt: skip
    return rules if out is None else (*rules, ("out", out, _always))


def _alike(kind: str, *names: str) -> tuple[Rule, ...]:
    return tuple((name, kind, _always) for name in names)


def _more(kind: str, *names: str) -> tuple[Rule, ...]:
    return tuple((name, kind, _ends_and_thirds) for name in names)


_IQ4_RULES: tuple[Rule, ...] = (("value", "Q5_K", _grouped), ("down", "Q5_K", _eighth_if(False)))

MIXES = {
    "F16": Mix(1, "F16"),
    "BF16": Mix(32, "BF16"),
    "Q8_0": Mix(7, "Q8_0", head="Q8_0", eight=_EIGHT),
    "Q6_K": Mix(18, "Q6_K", eight=_EIGHT),
    "Q5_K_M": Mix(17, "Q5_K", _more("Q6_K", "value", "down"), eight=_EIGHT),
    "Q5_K_S": Mix(16, "Q5_K", eight=_EIGHT),
    "Q5_1": Mix(9, "Q5_1", eight=_EIGHT),
    "Q5_0": Mix(8, "Q5_0", (("down", "Q5_1", _eighth_if(True)),), eight=_EIGHT),
    "Q4_K_M": Mix(15, "Q4_K", _more("Q6_K", "value", "down"), eight=_EIGHT_OUT),
    "Q4_K_S": Mix(14, "Q4_K", (("value", "Q5_K", _first(4)), ("down", "Q5_K", _eighth)), eight=_EIGHT_OUT),
    "Q4_1": Mix(3, "Q4_1", eight=_EIGHT),
    "Q4_0": Mix(2, "Q4_0", (("down", "Q4_1", _eighth_if(True)),), eight=_EIGHT),
    "IQ4_NL": Mix(25, "IQ4_NL", _IQ4_RULES, eight=_EIGHT_OUT),
    "IQ4_XS": Mix(30, "IQ4_XS", _IQ4_RULES, eight=_EIGHT_OUT),
    "Q3_K_L": Mix(13, "Q3_K", _alike("Q5_K", "value", "down", "out"), eight=_EIGHT),
    "Q3_K_M": Mix(
        12, "Q3_K",
        (
            ("value", "Q5_K", _first(2)), ("value", "Q4_K", _always), ("down", "Q5_K", _sixteenth),
            ("down", "Q4_K", _always), ("out", "Q4_K", _always),
        ),
        eight=_EIGHT_OUT,
    ),
    "Q3_K_S": Mix(11, "Q3_K", eight=_EIGHT_OUT),
    "Q2_K": Mix(
        10, "Q2_K",
        (("value", "Q4_K", _grouped), *_alike("Q3_K", "value", "down", "out")),
        eight=_EIGHT_OUT,
    ),
    "Q2_K_S": Mix(21, "Q2_K", (("value", "Q4_K", _grouped), ("down", "Q4_K", _eighth)), eight=_EIGHT),
    "IQ3_M": Mix(27, "IQ3_S", (*_alike("Q4_K", "value", "out"), ("down", "Q4_K", _eighth)), eight=_EIGHT_OUT),
    "IQ3_S": Mix(26, "IQ3_S", (("value", "Q4_K", _grouped),), eight=_EIGHT_OUT),
    "IQ3_XS": Mix(
        22, "IQ3_S",
        (
            ("value", "Q4_K", _grouped), *_alike("IQ3_XXS", "key", "query"),
            *((kind, "IQ3_XXS", _middle) for kind in ("gate", "up")),
        ),
        eight=_EIGHT_OUT,
    ),
    "IQ3_XXS": Mix(
        23, "IQ3_XXS",
        (
            ("value", "Q4_K", _grouped), ("value", "IQ3_S", _even), *_alike("IQ2_S", "key", "query"),
            ("down", "Q4_K", _eighth_if(False)), ("down", "Q3_K", _even), ("out", "IQ3_S", _always),
        ),
        head="Q5_K", embedding="IQ3_S", eight=_EIGHT_OUT,
    ),
    "IQ2_M": Mix(29, "IQ2_S", _small_rules("IQ3_S", "IQ3_S", "IQ3_S"), "Q5_K", "IQ3_S", eight=_EIGHT_SMALL),
    "IQ2_S": Mix(28, "IQ2_XS", _small_rules("IQ3_S", "IQ3_S", "IQ3_S"), "Q5_K", "IQ3_S", eight=_EIGHT_SMALL),
    "IQ2_XS": Mix(20, "IQ2_XS", _small_rules("Q2_K", "Q2_K", None), "Q5_K", "Q2_K", eight=_EIGHT_SMALL),
    "IQ2_XXS": Mix(19, "IQ2_XXS", _small_rules("Q2_K", "Q2_K", None), "Q5_K", "Q2_K", eight=_EIGHT_SMALL),
    "IQ1_M": Mix(31, "IQ1_M", _small_rules("Q2_K", "Q2_K", "IQ2_XXS"), "Q5_K", "Q2_K", eight=_EIGHT_SMALL),
    "IQ1_S": Mix(24, "IQ1_S", _small_rules("Q2_K", "Q2_K", "IQ2_XXS"), "Q5_K", "Q2_K", eight=_EIGHT_SMALL),
    "NVFP4": Mix(39, "NVFP4"),
    "MXFP4": Mix(38, "MXFP4"),
    "MXFP4_MOE": Mix(38, "Q8_0", head="Q8_0", experts="MXFP4"),
    "TQ2_0": Mix(37, "TQ2_0", embedding="Q4_K", eight=_EIGHT),
    "TQ1_0": Mix(36, "TQ1_0", embedding="Q4_K", eight=_EIGHT),
    "Q2_0": Mix(41, "Q2_0", embedding="Q4_K", eight=_EIGHT),
    "Q1_0": Mix(40, "Q1_0", eight=_EIGHT),
}  # fmt: skip
"""Mixes that a model can be quantised to, by name."""

WEIGHED = ("IQ1_M", "IQ1_S")
"""Types in which weights whose errors count alike make no sense together."""

FILE_TYPES = {mix.number: name for name, mix in MIXES.items() if name != "MXFP4_MOE"} | {0: "F32"}
"""Names of mixes by the number in general.file_type of a GGUF file, llama.cpp's enumeration."""

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""Other names of mixes, as llama.cpp has them."""


def stated_mix(number: object, main_type: str) -> str | None:
    """The mix that a file states, whose matrices are mostly of that type; None: it states none, or another's."""
    name = FILE_TYPES.get(number) if type(number) is int else None
    return name if name is not None and name.split("_")[0] == main_type.split("_")[0] else None


def find_mix(name: str, pure: bool = False) -> Mix:
    """The mix of that name; pure: its type alone. KeyError if there is none."""
    mix = MIXES[ALIASES.get(name, name)]
    return replace(mix, rules=(), embedding=None, eight=None, pure=True) if pure else mix


_NARROW = {
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "Q2_0", "Q1_0", "NVFP4"), "Q4_0"),
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
}
"""The types of matrices whose rows are not whole blocks of these; of IQ types it is IQ4_NL."""


def wanted_types(matrices: ModelMatrices, mix: Mix, weighed: bool = False) -> dict[str, str]:
    """The type of each tensor in the new file, if all rows were whole blocks. weighed: errors are."""
    types = {name: kind for name, (kind, _) in matrices.stored.items()}
    coarse = block_type(mix.type).block > 1
    numbers: Counter[str] = Counter()
    names = sorted(matrices.names(), key=_layer)
    values = sum(_KINDS["value"].search(name) is not None for name in names)
    for name in names:
        types[name] = mix.type
        if not coarse or mix.pure:
            continue
        kind = next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "")
        if matrices.is_head(name):
            types[name] = mix.head
        elif name in _EMBEDDINGS:
            types[name] = mix.embedding or mix.type
        elif mix.experts is not None and len(matrices.stored[name][1]) > 2:
            types[name] = mix.experts
        else:
            place = (numbers[kind], values) if kind == "value" else (_layer(name), matrices.layers)
            types[name] = _ruled_type(mix, kind, _Place(*place, matrices, weighed))
        numbers[kind] += 1
    return types


def _ruled_type(mix: Mix, kind: str, place: _Place) -> str:
    if place.of.experts == 8 and mix.eight is not None and kind in mix.eight:
        return mix.eight[kind]
    target = next((target for of, target, holds in mix.rules if of == kind and holds(place)), mix.type)
    return "Q5_K" if kind == "value" and place.of.large and target in ("Q3_K", "Q4_K") else target


def weighed_type(mix: Mix, kind: str, layer: int, matrices: ModelMatrices) -> str:
    """The type of a layer's matrix where errors are weighed. kind: "value", "key", "query", "out", "gate", "up" or
    "down", "" of another."""
    return _ruled_type(mix, kind, _Place(layer, matrices.layers, matrices, True))


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


def target_types(matrices: ModelMatrices, wanted: Mapping[str, str]) -> dict[str, str]:
    """The type of each tensor in the new file: the wanted one, or what its rows can be."""
    types = {}
    for name, target in wanted.items():
        cols = matrices.stored[name][1][-1]
        narrow = cols % block_type(target).block > 0
        types[name] = fitting("Q6_K" if matrices.is_head(name) and narrow else target, cols)
    return types


def fitting(target: str, cols: int) -> str:
    """The type, or what rows of that many elements can be instead."""
    narrow = _NARROW.get(target, "IQ4_NL" if target.startswith("IQ") else "F16")
    for kind in (target, narrow):
        if cols % block_type(kind).block == 0:
            return kind
    return "F16"


def chosen_types(matrices: ModelMatrices, chosen: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The types of matrices in whose names regular expressions are found: the first (expression, type) that is counts.
    RequestError for one that is found in none."""
    types, used = {}, set()
    for name in matrices.names():
        for pattern, kind in chosen:
            if re.search(pattern, name):
                types[name] = kind
                used.add(pattern)
                break
    for pattern, _ in chosen:
        if pattern not in used and not any(re.search(pattern, name) for name in matrices.names()):
            more = ": GGUF has the experts of a layer in one tensor, of one type" if "exp" in pattern else ""
            raise RequestError(f"--tensor-type {shown(pattern)} finds no matrix of the model{more}")
    return types
