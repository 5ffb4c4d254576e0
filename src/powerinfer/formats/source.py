"""A model file of any format, as a configuration and named tensors, before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from powerinfer.config import ModelConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.quant import block_type, can_dequantize
from powerinfer.formats.tensors import MadeTensor, RawTensor, StackedTensor, StoredTensor
from powerinfer.formats.weight_types import FLOAT_TYPES

Tensor = TypeVar("Tensor")
SingleTensor: TypeAlias = RawTensor | MadeTensor
"""A tensor under one name of a file."""


@dataclass(frozen=True)
class Source:
    """A model on disk: its configuration and its tensors under their canonical names, all checked."""

    kind: str  # "gguf" or "hf"
    path: Path
    config: ModelConfig
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: list[MappedFile]
    notes: list[str] = field(default_factory=list)  # lines for the user about how the file was read
    predictor_threshold: float | None = None  # of the file's own predictors
    unread: list[str] = field(default_factory=list)  # keys of the metadata that nothing read, and that change nothing


@dataclass(frozen=True)
class Names:
    """Spelling of canonical names in a family's files: `outer` and `inner` name -> name without `.weight` or `.bias`.

    layers: the prefix of a layer's number; exceptions: whole names in the file of canonical names that do not follow
    from these. `{}` in a name is an expert's number: the file has a tensor for each.
    """

    outer: dict[str, str]
    layers: str
    inner: dict[str, str]
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def extended(self, more: Mapping[str, str]) -> Names:
        """Names with others, or further ones, of a layer's tensors."""
        return replace(self, inner={**self.inner, **more})

    def __call__(self, canonical: str) -> str:
        """The name in the file of a canonical name."""
        if canonical in self.exceptions:
            return self.exceptions[canonical]
        *layer, name = canonical.split(".")
        stem = name.removesuffix("_bias")
        kind = "weight" if stem == name else "bias"
        return f"{self.layers}.{layer[1]}.{self.inner[stem]}.{kind}" if layer else f"{self.outer[stem]}.{kind}"


@dataclass(frozen=True)
class Fused:
    """Matrices of a layer that a file has in one tensor, whose name is then that of each; and their biases.

    parts: canonical names, in the order of the rows; groups: number of repetitions of that order (Falcon: for each
    key-value head its query heads, its key, its value; experts: for each its gate, its up);
    flat: stacked matrices are one in the file, one below the other.
    """

    parts: tuple[str, ...]
    groups: int = 1
    flat: bool = False

    def cut(self, part: str, tensor: SingleTensor, rows: Sequence[int]) -> SingleTensor:
        """The rows of a part, a matrix, matrices or a bias: a view, with one run of bytes for each group; of a tensor
        that is made, one that is made of as much.

        rows: of each part, those of all groups.
        """
        at = self.parts.index(part)
        row_bytes = tensor.nbytes // sum(rows)
        first, count = (n // self.groups * row_bytes for n in (sum(rows[:at]), rows[at]))
        if isinstance(tensor, MadeTensor):
            return replace(tensor.runs(self.groups, first, count), shape=_rows_as(tensor.shape, rows[at]))
        runs = tensor.data.reshape(self.groups, -1)[:, first : first + count]
        shape = _rows_as(tensor.shape, rows[at])
        return replace(tensor, shape=shape, data=runs[0] if self.groups == 1 else runs)


def _row_count(shape: tuple[int, ...]) -> int:
    """Rows of a matrix or of stacked ones; elements of a bias."""
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


def _rows_as(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The same with another number of rows."""
    return (*shape[:-2], rows // math.prod(shape[:-2]), shape[-1]) if len(shape) > 1 else (rows,)


def predictor_shapes(
    config: ModelConfig, stored: Mapping[str, SingleTensor], names: Names
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(canonical name, shape) of each layer's predictor, of the rank that the file gives it."""
    for layer in range(config.n_layers):
        first = stored.get(names(f"layers.{layer}.predictor_in"))
        rank = max(1, first.shape[0]) if first is not None else 1
        yield f"layers.{layer}.predictor_in", (rank, config.d_model)
        yield f"layers.{layer}.predictor_out", (config.ffn_sizes[layer], rank)


def collect(
    config: ModelConfig,
    stored: Mapping[str, SingleTensor],
    names: Names,
    source: str,
    extra: Iterable[tuple[str, tuple[int, ...]]] = (),
    fused: Sequence[Fused] = (),
    made_tensors: Mapping[str, StoredTensor] | None = None,
) -> dict[str, StoredTensor]:
    """Canonical name -> tensor, for all that `config` asks for and `extra`; ModelError unless that is all there is.

    stored: tensors under the names of the file; fused: matrices in one tensor. Where `names` has a matrix with `_rows`
    behind its name, the file stores it transposed, under that name (`down_rows` [neurons, d_model]). made_tensors:
    tensors by canonical name that are not stored as they are, in their right shapes.
    """
    if config.n_layers > len(stored):  # before anything loops over the layers
        raise ModelError(f"{source}: claims {config.n_layers} layers and holds {len(stored)} tensors")
    asked = (*layout.shapes(config), *extra)
    return collect_some(asked, stored, names, source, config.architecture, fused, made_tensors)


def collect_some(
    asked: Iterable[tuple[str, tuple[int, ...]]],
    stored: Mapping[str, SingleTensor],
    names: Names,
    source: str,
    architecture: str,
    fused: Sequence[Fused] = (),
    made_tensors: Mapping[str, StoredTensor] | None = None,
) -> dict[str, StoredTensor]:
    """The same for what is asked for: (canonical name, shape) of each tensor."""
    tensors: dict[str, StoredTensor] = {}
    rest = set(stored)
    shapes_by_name = dict(_as_stored(canonical, shape, names) for canonical, shape in asked)
    for canonical, shape in shapes_by_name.items():
        if made_tensors is not None and canonical in made_tensors:
            tensors[canonical] = made_tensors[canonical]
            continue
        name = names(canonical)
        part = canonical.rpartition(".")[2].removesuffix("_bias")
        matrices = next((several for several in fused if part in several.parts), None)
        matrices = None if canonical in names.exceptions else matrices
        if "{}" in name:
            expert_names = [name.format(expert) for expert in range(shape[0])]
            experts = [_checked(stored, expert, shape[1:], source) for expert in expert_names]
            tensors[canonical] = _stacked(experts, name, source)
            rest.difference_update(expert_names)
        elif matrices is not None:
            tensors[canonical] = _part(stored, name, matrices, canonical, shapes_by_name, source)
            rest.discard(name)
        else:
            tensors[canonical] = _checked(stored, name, shape, source)
            rest.discard(name)
    if rest:
        names_text = ", ".join(shown(name) for name in sorted(rest)[:3])
        more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
        raise ModelError(f"{source}: tensors that a {architecture} model does not have: {names_text}{more}")
    return tensors


def _part(
    stored: Mapping[str, SingleTensor],
    name: str,
    fused: Fused,
    canonical: str,
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
) -> SingleTensor:
    """One of several matrices in the tensor `name`, or of their biases. shapes: by canonical name."""
    layer, _, inner = canonical.rpartition(".")
    part, bias = inner.removesuffix("_bias"), "_bias" * inner.endswith("_bias")
    shape = shapes[canonical]
    parts = [f"{layer}.{matrix}{bias}" for matrix in fused.parts]
    if any(one not in shapes for one in parts):
        raise ModelError(f"{source}: tensor {name} is of {len(parts)} matrices, not all of which the layer has")
    rows = [_row_count(shapes[one]) for one in parts]
    tensor = _checked(stored, name, _rows_as(shape[-2:] if fused.flat else shape, sum(rows)), source)
    if len(shape) == 1 and block_type(tensor.type).block > 1:
        raise ModelError(f"{source}: tensor {name} has type {tensor.type}, in which it cannot be cut")
    return replace(fused.cut(part, tensor, rows), shape=shape)


ONLY_TEXT = "only text is read: the part for pictures is left out"
_OF_TEXT = "model.language_model.", "language_model.model.", "language_model."
_OF_OTHERS = (  # the beginnings of the names of what reads pictures and sound
    "vision_", "audio_", "embed_vision.", "embed_audio.", "multi_modal_projector.", "visual.",
)  # fmt: skip


def keep_text(stored: dict[str, SingleTensor]) -> list[str]:
    """Leave the tensors of what reads text, under the names that they have in a model of that alone. Returns notes."""
    all_tensors = dict(stored)
    stored.clear()
    for name, tensor in all_tensors.items():
        prefix = next((one for one in _OF_TEXT if name.startswith(one)), None)
        if prefix is not None:
            rest = name.removeprefix(prefix)
            name = rest if rest.startswith("lm_head.") else f"model.{rest}"
        elif name.removeprefix("model.").startswith(_OF_OTHERS):
            continue
        stored[name] = tensor
    return [ONLY_TEXT] * (len(stored) < len(all_tensors))


MTP = "(MTP)"
"""The sign of notes about draft heads."""

NO_MTP = f"the layers that predict further tokens {MTP} are left out"
NO_EAGLE = "the EAGLE head is left out"


def drop_head_predictor(stored: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors without the predictor of the head that SmallThinker's files may have, and a line that says so."""
    rest = {name: tensor for name, tensor in stored.items() if "lm_head_profiler" not in name}
    return rest, ["the file's predictor of the head is not used"] * (len(rest) < len(stored))


def _as_stored(canonical: str, shape: tuple[int, ...], names: Names) -> tuple[str, tuple[int, ...]]:
    """(name, shape) of the tensor that a file has for a canonical one, itself or transposed."""
    rows = f"{canonical}_rows"
    if rows.rpartition(".")[2] not in names.inner:
        return canonical, shape
    return rows, (*shape[:-2], shape[-1], shape[-2])


def _checked(stored: Mapping[str, SingleTensor], name: str, shape: tuple[int, ...], source: str) -> SingleTensor:
    """The tensor of that name in the file; ModelError if it is missing, or has another shape or an unknown type.

    Dimensions of one count for nothing: writers add them to vectors, and leave them out.
    """
    tensor = stored.get(name)
    if tensor is None:
        raise ModelError(f"{source}: tensor {name} is missing")
    if tensor.shape != shape:
        same_rows = tensor.shape[-1:] == shape[-1:] or tensor.type in FLOAT_TYPES
        if not same_rows or _squeezed(tensor.shape) != _squeezed(shape):
            raise ModelError(f"{source}: tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
        tensor = replace(tensor, shape=shape)
    if not can_dequantize(tensor.type):
        raise ModelError(
            f"{source}: tensor {name} has type {tensor.type}, which this engine does not read; "
            "take the model in another quantisation, such as Q4_K_M or Q8_0"
        )
    return tensor


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)


def _stacked(parts: list[SingleTensor], name: str, source: str) -> StackedTensor:
    types = {part.type for part in parts}
    if len(types) > 1:
        raise ModelError(
            f"{source}: tensors {name} have types {' and '.join(sorted(types))}: those of all experts must be one"
        )
    return StackedTensor(tuple(parts))


def printable(name: object, longest: int = 200) -> str:
    """A model's name for people: no control characters, not too long."""
    return "".join(c for c in str(name)[:longest] if c.isprintable())
