"""Matrices in types whose codes are searched for: a few rows of each, repeated; whole ones would take minutes."""

from __future__ import annotations

import numpy as np

from powerinfer.formats.quant import can_quantize, quantize
from powerinfer.formats.scale_search import searched

ROWS = 16
TYPES = ("q2_k", "q3_k", "iq2_xs", "iq3_xxs", "iq3_s", "tq2_0")


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 [rows, cols] -> uint8 [rows, bytes of a row]. A type that `quant` rounds to directly holds every row;
    of another type the first ROWS rows follow each other again and again: they cost a kernel what others cost."""
    if can_quantize(kind):
        return quantize(values, kind)
    few = searched(values[:ROWS], kind)
    return np.resize(few, (len(values), few.shape[1]))
