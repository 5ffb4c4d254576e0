"""Facts of the weight types: one table, which the native kernels are compiled with (csrc/types.h).

Nothing else lists types by what they are; kernels and their tiles are listed where they are written.
"""

from __future__ import annotations

from types import SimpleNamespace

from powerinfer import _native

_FACTS = [name for name in vars(_native.WeightType) if not name.startswith("_")]

WEIGHT_TYPES = {
    kind.name: SimpleNamespace(**{name: getattr(kind, name) for name in _FACTS}) for kind in _native.types()
}
"""Every type of the tensors of GGUF files, by name: the fields of `_native.WeightType`, whose objects would outlive the
native module at the end of a program."""

_NATIVE = [kind for kind in WEIGHT_TYPES.values() if kind.native]

NATIVE_TYPES = frozenset(kind.name for kind in _NATIVE)
"""The types of matrices that the native kernels take."""

FLOAT_TYPES = frozenset(kind.name for kind in _NATIVE if kind.floats)

DOT_TYPES = tuple(kind.name for kind in _NATIVE if kind.dots)
"""The types of rows of neurons that are multiplied with activations: of gate and up."""

STORED_ROWS = tuple(kind.name for kind in _NATIVE if kind.dots and kind.block > 32)
"""Types of long blocks, whose rows lie as model files have them: `pack` makes none of another type."""

ROW_TYPES = tuple(name for name in DOT_TYPES if name not in ("Q5_0", "Q5_1", "IQ4_NL", *STORED_ROWS))
"""Types of which `pack` makes rows of gate and up of bundles in files; these may have `STORED_ROWS` as well."""

ACROSS = {kind.name: f"{kind.name}X32" for kind in _NATIVE if kind.across}
"""Types of down as files of these types have it: each block across the 32 neurons of a group, whose rows share their
scales."""

PACKED_DOWN = {name: across for name, across in ACROSS.items() if name != "Q8_0"}
"""Types of down that bundles in files have, by that of the model. Rows of down in Q8_0 are rounded anew: with scales of
their own a few of them are fewer bytes than with those of a group."""

BLOCKS = {across: stored for stored, across in ACROSS.items()}
"""The types of their blocks."""

DOWN_TYPES = (*(kind.name for kind in _NATIVE if kind.adds), *ACROSS.values())
"""The types of rows of down in bundles."""

GPU_TYPES = tuple(kind.name for kind in _NATIVE if kind.gpu == kind.name)
"""The types of matrices on a GPU. Parts of bundles may be Q4_0X32 as well."""


def grid_values(name: str) -> list[int]:
    """The values of the entries of a grid of the IQ types, one entry after the other."""
    return _native.grid(name)
