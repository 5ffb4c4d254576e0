"""Experts of the CPU's executor whose neurons are told apart: up and down as bundles, gates as matrices, or, where a
predictor selects before gates are computed, in the bundles too. Without gates up is the matrix, or with a predictor in
the bundles. A shared expert without gates lies behind them, or, of another width or other types, in bundles of its own.

The weights rest once: prompts repack the bundles of an expert, a few panels at a time, for the kernels of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from powerinfer import _native
from powerinfer.config import ExpertsConfig, ModelConfig
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.bundle_memory import own_pages, transposed
from powerinfer.formats.quant import Bytes
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import ACROSS, BLOCKS, DOT_TYPES
from powerinfer.kernels import cpu
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout

ROW_TYPES = DOT_TYPES
"""Types of gate and up that bundles hold without loss, and that prompts make matrices of."""

DOWN_TYPES = ("F16", "BF16", *ACROSS)
"""Types of down that they hold so."""


@dataclass(frozen=True)
class SharedNeurons:
    """A shared expert in bundles of its own. sum: of its neurons, which counts its steps; first_row: bytes of a
    neuron's first product; groups: bytes of the bundles."""

    sum: _native.NeuronSum
    layout: BundleLayout
    first_row: float
    groups: Bytes


@dataclass(frozen=True)
class ByNeuron:
    """Some experts as bundles. sum: of their neurons, which counts its steps; groups: their bytes, of those in memory.

    predictor: selects neurons before the first product (gates, or without gates up) is computed, whose rows are then in
    the bundles; None: these are a matrix. more: neurons of a shared expert behind all others; beside: it has bundles of
    its own. rank: of a predictor without its first matrix, whose products others compute; 0: there is none.
    """

    sum: _native.NeuronSum
    layout: BundleLayout
    groups: Bytes
    predictor: _native.Predictor | None = None
    more: int = 0
    beside: SharedNeurons | None = None
    rank: int = 0


@dataclass(frozen=True)
class ExpertFfn:
    """The FFN of a layer of experts, their neurons as bundles. op: the operator; sum: what counts its sparse steps;
    shared: beside them, None: it lies behind the others, or is not separable."""

    op: _native.Experts
    sum: _native.NeuronSum
    layout: BundleLayout
    gate_row: float  # bytes of a neuron's first product: gate, or without gates up
    predictor: tuple[int, float]  # bytes of what all experts share of it, and of a neuron; 0: there is none
    neurons: int  # of a token's experts
    nbytes: int  # read for a token where every neuron of its experts is computed
    shared: SharedNeurons | None = None

    def counts(self) -> dict[str, int]:
        """Count as `CpuFfn` does; neurons: of the experts of all tokens."""
        counts = dict(self.op.counts())
        nbytes = _row_bytes(counts, self.layout, self.gate_row)
        if self.shared is not None:
            beside = dict(self.shared.sum.counts())
            nbytes += _row_bytes(beside, self.shared.layout, self.shared.first_row)
            for name in ("active", "candidates"):
                counts[name] += beside[name]
        common, row = self.predictor
        counts["bytes"] = round(nbytes + counts["steps"] * common + counts.pop("predictor_rows") * row)
        return counts | {"neurons": counts["tokens"] * self.neurons}


def _row_bytes(counts: dict[str, int], layout: BundleLayout, first_row: float) -> float:
    """Bytes of the rows that were counted, which are taken out."""
    sizes = (first_row, layout.gate_bytes, layout.down_bytes, layout.shared_bytes)
    rows = [counts.pop(name) for name in ("first_rows", "up_rows", "down_rows", "shared_scales")]
    return sum(number * nbytes for number, nbytes in zip(rows, sizes, strict=True))


def types_problem(config: ModelConfig, type_of: Callable[[str], str], predicted: bool) -> str | None:
    """Reason for which neurons inside experts cannot be told apart with matrices of these types; None: they can be, or
    are not in any layer. type_of: of a matrix by its canonical name; predicted: before the first product, too."""
    for layer, ffn in config.experts.items():
        if ffn.whole_reason is not None:
            continue
        of_rows = ffn.matrices if predicted else ffn.matrices[1:]
        kinds = {name: type_of(f"layers.{layer}.experts_{name}") for name in of_rows}
        for name, kind in kinds.items():
            allowed = DOWN_TYPES if name == "down" else ROW_TYPES
            if kind not in allowed:
                return (
                    f"experts of type {kind} have no rows of single neurons of {name} (only {', '.join(allowed)}); "
                    "take the model in one of these, or use --selector all"
                )
        width = ffn.row_width(config.d_model)
        if kinds["down"] in ACROSS and width % 32:
            return f"a neuron's {width} weights are not whole blocks; use --selector all"
        if "gate" in kinds and kinds["gate"] != kinds["up"]:
            return (
                f"gate of type {kinds['gate']} and up of type {kinds['up']} in layer {layer} must have the same type; "
                "use --selector exact or all"
            )
    return None


SharedPlace = Literal["behind", "apart", ""]


def shared_place(
    config: ExpertsConfig, d_model: int, types: Sequence[str], shared: Sequence[str], *, predicted: bool
) -> SharedPlace:
    """Place of the bundles of a shared expert without gates: behind those of the others where it has their width and
    types, else apart from them; "": it has none, and is computed whole. types, shared: of up and down of the experts,
    and of the shared one, (): it is not there; predicted: bundles have up, too."""
    first = 0 if predicted else 1
    if not config.predicted_shared or not shared:
        return ""
    if not config.latents and list(types[first:]) == list(shared[first:]):
        return "behind"
    up, down = shared
    allowed = down in DOWN_TYPES and not (down in ACROSS and d_model % 32)
    return "apart" if allowed and (up in ROW_TYPES or not predicted) else ""


def shared_alone(config: ExpertsConfig) -> ExpertsConfig:
    """The shared expert without gates, as the only one of its kind."""
    return replace(config, n_experts=1, size=config.shared_size, shared_size=0, latents=0)


def bundle(
    config: ExpertsConfig,
    d_model: int,
    gate: RawTensor | None,
    up: RawTensor,
    down: RawTensor,
    threads: int,
    shared: Sequence[RawTensor] = (),
) -> tuple[BundleLayout, Bytes]:
    """All experts as bundles: uint8 [groups, bytes of a group].

    gate, up, down: of all experts, [experts, out, in], of types in `ROW_TYPES`, down of `DOWN_TYPES`; gate: of up's
    type, None: it stays out, or there is none. shared: up and down of a shared expert without gates, of the types of
    the others, which comes behind these.
    """
    layout = expert_layout(d_model, up.type, down.type, gate is not None)
    n, more = config.n_experts * n_groups(config.size), n_groups(shared[0].shape[0]) if shared else 0
    groups = own_pages((n + more) * layout.group_bytes).reshape(-1, layout.group_bytes)
    gates = None if gate is None else gate.data
    _put(layout, groups[:n], gates, up.data, down.data.reshape(config.n_experts, d_model, -1), threads)
    if shared:
        shared_up, shared_down = (one.gathered().data for one in shared)
        _put(layout, groups[n:], None, shared_up, shared_down.reshape(1, d_model, -1), threads)
    return layout, groups


def bundle_down(
    config: ExpertsConfig, d_model: int, up_type: str, down: RawTensor, shared: RawTensor | None, threads: int
) -> tuple[BundleLayout, Bytes]:
    """Down of all experts without gates as bundles: uint8 [groups, bytes of a group]. shared: down of a shared expert,
    [d_model, its neurons] of down's type, behind the others."""
    layout = plain_layout(d_model, up_type, down.type)
    n = config.n_experts * n_groups(config.size)
    more = 0 if shared is None else n_groups(shared.shape[1])
    groups = own_pages((n + more) * layout.group_bytes).reshape(-1, layout.group_bytes)
    _put(layout, groups[:n], None, None, down.data.reshape(config.n_experts, d_model, -1), threads)
    if shared is not None:
        _put(layout, groups[n:], None, None, shared.gathered().data.reshape(1, d_model, -1), threads)
    return layout, groups


def rebundle(
    layout: BundleLayout, groups: Bytes, experts: int, place: int, matrices: Sequence[RawTensor], threads: int
) -> None:
    """Put another expert in a place of those that `bundle`, with gates elsewhere, or `bundle_down` has made. matrices:
    [out, in] of the types of all."""
    per_expert = len(groups) // experts
    of_expert = groups[place * per_expert : (place + 1) * per_expert]
    *_, up, down = matrices
    up_data = up.data if layout.gate_bytes else None
    _put(layout, of_expert, None, up_data, down.data.reshape(1, layout.d_model, -1), threads)


def expert_layout(d_model: int, up_type: str, down_type: str, gated: bool = False) -> BundleLayout:
    """Layout of neurons of experts whose up has a type in `ROW_TYPES` and down one in `DOWN_TYPES`; gated: gates, of
    up's type, are in the bundles, too."""
    down_type = ACROSS.get(down_type, down_type)
    up_bytes, _ = cpu.bundle_row_bytes(up_type, d_model)
    return BundleLayout(d_model, gated, up_type, down_type, up_bytes, *cpu.bundle_row_bytes(down_type, d_model))


def plain_layout(d_model: int, up_type: str, down_type: str) -> BundleLayout:
    """Layout of neurons of experts without gates: up, of any type, is a matrix, and down has a type in `DOWN_TYPES`."""
    down_type = ACROSS.get(down_type, down_type)
    return BundleLayout(d_model, False, up_type, down_type, 0, *cpu.bundle_row_bytes(down_type, d_model))


def put_rows(layout: BundleLayout, groups: Bytes, up: Bytes | None, down: Bytes, threads: int) -> None:
    """Fill the groups of experts without gates. up: uint8 [experts, neurons, bytes of a row], None: elsewhere; down:
    uint8 [experts, d_model, bytes of a row], of `DOWN_TYPES`."""
    _put(layout, groups, None, None if up is None else np.ascontiguousarray(up).reshape(-1), down, threads)


def _put(
    layout: BundleLayout, groups: Bytes, gate: Bytes | None, up: Bytes | None, down: Bytes, threads: int
) -> None:
    """Fill the groups of experts. gate, up: of all their rows, None: elsewhere; down: uint8 [experts, d_model, bytes of
    a row]."""
    neurons = len(groups) * BUNDLE_GROUP
    if gate is not None:
        cpu.pack_bundle_rows(layout, "gate", neurons, gate, groups, threads)
    if up is not None:
        cpu.pack_bundle_rows(layout, "up", neurons, up, groups, threads)
    per_expert = len(groups) // len(down)
    if layout.down_type in BLOCKS:
        data = np.ascontiguousarray(down).reshape(-1)
        cpu.pack_down(layout, per_expert * BUNDLE_GROUP, data, groups, threads)
        return
    for expert, columns in enumerate(down):
        of_expert = groups[expert * per_expert : (expert + 1) * per_expert]
        data = transposed(columns.view(np.uint16)).view(np.uint8).reshape(-1)
        cpu.pack_bundle_rows(layout, "down", per_expert * BUNDLE_GROUP, data, of_expert, threads)
