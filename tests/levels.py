"""Instruction-set levels, and the types of weights for which each has kernels of its own.

For other types a level has those of the level that it builds upon, which are tested there; that it has them, and not
others, is seen in `test_kernels.py` (`test_levels_agree`), at every level with every type.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from stored_weights import FLOATS

from powerinfer import _native

LEVELS: list[str] = _native.levels()
FILES = {
    "amx": "products_tiles",
    "avx512bf16": "products_bf16 neuron_dots_bf16",
    "avxvnni": "products_k products_q products_grids products_iq neuron_dots_q neuron_dots_stored neuron_groups",
}
"""Source files of the levels that build upon another, as CMakeLists.txt has them."""


def has_own(level: str, types: Sequence[str], prompts: bool) -> bool:
    """Whether a level has kernels of its own for one of the types. prompts: products of whole matrices count, too."""
    if level == "amx":
        return prompts and any(kind not in ("F32", "F16") for kind in types)
    if level == "avx512bf16":
        return "BF16" in types
    return level != "avxvnni" or any(kind not in FLOATS for kind in types)


def each_level(name: str, cases: Sequence[str | tuple[str, ...]], prompts: bool = True) -> pytest.MarkDecorator:
    """Parameters "level" and `name`, a type or several, at every level that has kernels of its own for one of them.

    All levels of one case follow one another, for what tests keep of the last one.
    """
    listed = [(case, (case,) if isinstance(case, str) else case) for case in cases]
    found = [
        pytest.param(level, case, id=f"{level}-{'-'.join(types)}")
        for case, types in listed
        for level in LEVELS
        if has_own(level, types, prompts)
    ]
    return pytest.mark.parametrize(("level", name), found)
