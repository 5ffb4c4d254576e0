"""The nouns of sparse computation as small types: tier, bundle layout, predictor, placement.

A neuron is row i of gate and up with column i of down, of one layer. Nothing here reads files or computes an FFN; the
asserts state what every user of a type may rely on. What comes out of a file is checked by its reader before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int32]

PART_ALIGNMENT = 64
"""Bytes of a bundle's parts are multiples of this: a cache line."""


class Tier(IntEnum):
    """Where the bytes of a group rest; the values are those of a placement's arrays."""

    GPU = 0
    CPU = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """How the stored bytes of one neuron lie side by side: [gate part][up part][down part]; plain: without gate part.

    gate_type is the type of gate and up. gate_bytes and down_bytes are the bytes of a part of either type for d_model
    elements, as the native module counts them.
    """

    d_model: int
    gated: bool
    gate_type: str
    down_type: str
    gate_bytes: int
    down_bytes: int

    def __post_init__(self) -> None:
        assert self.d_model > 0
        for nbytes in (self.gate_bytes, self.down_bytes):
            assert nbytes > 0 and nbytes % PART_ALIGNMENT == 0, nbytes

    @property
    def gate_at(self) -> int:
        """Offset of the gate part; only gated FFNs have one."""
        assert self.gated
        return 0

    @property
    def up_at(self) -> int:
        """Offset of the up part."""
        return self.gate_bytes if self.gated else 0

    @property
    def down_at(self) -> int:
        """Offset of the down part."""
        return self.up_at + self.gate_bytes

    @property
    def stride(self) -> int:
        """Bytes from one neuron to the next."""
        return self.down_at + self.down_bytes


@dataclass(frozen=True, slots=True)
class Predictor:
    """What a layer's predictor is, besides its weights: z = out . relu(in . r), r what the FFN's norm reads.

    rank: rows of in; a neuron is a candidate when its z is at least `threshold`, and where fewer than `floor` are, the
    `floor` neurons of largest z are taken.
    """

    rank: int
    threshold: float
    floor: int

    def __post_init__(self) -> None:
        assert self.rank > 0 and self.floor >= 0 and math.isfinite(self.threshold)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which tier every neuron rests in: group g of a layer is its neurons from g * group_size up to the next group.

    tiers: for each layer int8 [ceil(d_ff / group_size)], values of `Tier`. A layer's last group may be smaller.
    """

    d_ff: int
    group_size: int
    tiers: tuple[NDArray[np.int8], ...]

    def __post_init__(self) -> None:
        assert self.d_ff > 0 and self.group_size > 0
        groups = -(-self.d_ff // self.group_size)
        for tiers in self.tiers:
            assert tiers.dtype == np.int8 and tiers.shape == (groups,), (tiers.dtype, tiers.shape)
            assert tiers.min() >= min(Tier) and tiers.max() <= max(Tier), "not a tier"

    def parts(self, layer: int) -> dict[Tier, Indices]:
        """The neurons of a layer by tier: ascending, disjoint, together all of them. Every tier has an entry."""
        tiers = np.repeat(self.tiers[layer], self.group_size)[: self.d_ff]
        parts = {tier: np.flatnonzero(tiers == tier).astype(np.int32) for tier in Tier}
        assert sum(map(len, parts.values())) == self.d_ff
        return parts
