"""Experts of the CPU's executor whose neurons are told apart: up and down as bundles, gates as matrices, or, where a
predictor selects before gates are computed, in the bundles too.

The weights rest once: prompts repack the bundles of an expert, a few panels at a time, for the kernels of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from powerinfer import _native
from powerinfer.config import ExpertsConfig
from powerinfer.formats.bundle_file import ACROSS, n_groups
from powerinfer.formats.bundle_memory import by_group, own_pages, transposed
from powerinfer.formats.quant import Bytes
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import cpu
from powerinfer.neurons import BundleLayout

ROW_TYPES = ("F16", "BF16", "Q4_0")
"""Types of up and down that bundles hold without loss."""


@dataclass(frozen=True)
class ExpertFfn:
    """The FFN of a layer of experts, their neurons as bundles. op: the operator; sum: what counts its sparse steps."""

    op: _native.Experts
    sum: _native.NeuronSum
    layout: BundleLayout
    gate_row: float  # bytes of a neuron's gate
    predictor: tuple[int, float]  # bytes of what all experts share of it, and of a neuron; 0: there is none
    neurons: int  # of a token's experts
    nbytes: int  # read for a token where every neuron of its experts is computed

    def counts(self) -> dict[str, int]:
        """As `CpuFfn.counts`; neurons: of the experts of all tokens."""
        counts = dict(self.op.counts())
        sizes = (self.gate_row, self.layout.gate_bytes, self.layout.down_bytes, self.layout.shared_bytes)
        rows = [counts.pop(name) for name in ("first_rows", "up_rows", "down_rows", "shared_scales")]
        nbytes = sum(number * nbytes for number, nbytes in zip(rows, sizes, strict=True))
        shared, row = self.predictor
        counts["bytes"] = round(nbytes + counts["steps"] * shared + counts.pop("predictor_rows") * row)
        return counts | {"neurons": counts["tokens"] * self.neurons}


def bundle(
    about: ExpertsConfig, d_model: int, gate: RawTensor | None, up: RawTensor, down: RawTensor, threads: int
) -> tuple[BundleLayout, Bytes]:
    """All experts as bundles: uint8 [groups, bytes of a group].

    gate, up, down: of all experts, [experts, out, in], of types in `ROW_TYPES`; gate: of up's type, None: it stays out.
    """
    neurons = about.n_experts * about.size
    down_type = ACROSS if down.type == "Q4_0" else down.type
    up_bytes, _ = cpu.bundle_row_bytes(up.type, d_model)
    layout = BundleLayout(
        d_model, gate is not None, up.type, down_type, up_bytes, *cpu.bundle_row_bytes(down_type, d_model)
    )
    groups = own_pages(n_groups(neurons) * layout.group_bytes).reshape(-1, layout.group_bytes)
    cpu.pack_bundle_rows(up.type, "dot", neurons, d_model, up.data, groups, layout.pitch, layout.up_at, threads)
    if gate is not None:
        cpu.pack_bundle_rows(up.type, "dot", neurons, d_model, gate.data, groups, layout.pitch, layout.gate_at, threads)
    each = n_groups(about.size)
    stored = down.data.reshape(about.n_experts, d_model, -1)
    for expert in range(about.n_experts):
        columns = stored[expert]
        turned = by_group(columns) if down_type == ACROSS else transposed(columns.view(np.uint16)).view(np.uint8)
        own = groups[expert * each : (expert + 1) * each]
        data = np.ascontiguousarray(turned).reshape(-1)
        cpu.pack_bundle_rows(down_type, "add", about.size, d_model, data, own, layout.pitch, layout.down_at, threads)
    return layout, groups
