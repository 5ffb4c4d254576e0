"""Samples for measuring the rates of CPU and GPU: random layers and neurons, and the fit of their times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import AttentionConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig, uniform
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.quant import Bytes, block_type, can_quantize, dequantize, quantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import PACKED_DOWN, WEIGHT_TYPES
from powerinfer.kernels import cpu
from powerinfer.models.builder import Builder, Matrix, Norm
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout
from powerinfer.progress import Progress

FRACTIONS = (0.02, 0.1, 0.25, 0.5)
"""Shares of the neurons of sparse FFNs that fire."""

HEAD_DIM = 64

_DISTINCT = 256  # rows of random weights, repeated to the height of a matrix


class Samples:
    """Makes random weights, one sample after another, and reports how many are done. name, total: for `progress`."""

    def __init__(self, name: str, total: int, context: int, progress: Progress) -> None:
        """context: tokens that the sample models take."""
        self._random = np.random.default_rng(1)
        self._name = name
        self._total = total
        self._context = context
        self._progress = progress
        self._done = 0

    def tick(self) -> None:
        """Another sample begins."""
        self._progress(self._name, self._done, self._total)
        self._done += 1

    def config(
        self, shape: tuple[int, int], layers: int, heads: int = 0, kv_heads: int = 0, vocab: int = HEAD_DIM
    ) -> ModelConfig:
        """A transformer of d_model and neurons `shape`; as many heads as d_model holds, unless they are given."""
        d_model, neurons = shape
        heads = heads or d_model // HEAD_DIM
        attention = AttentionConfig(heads, kv_heads or d_model // HEAD_DIM, HEAD_DIM, RopeConfig(dim=HEAD_DIM))
        layer = LayerConfig(attention, FfnConfig(neurons, "relu"))
        return ModelConfig(
            architecture="sample",
            d_model=d_model,
            vocab_size=vocab,
            context_length=self._context,
            norm_eps=1e-5,
            layers=uniform(layers, layer),
        )

    def normal(self, kind: str, rows: int, cols: int) -> RawTensor:
        """Normal values of variance 1/cols, so that the product with a normalised row has variance 1; of types that
        cannot be written, as K-quants, any values whose squares have that mean."""
        if not can_quantize(kind):
            data = self._blocks(kind, min(rows, _DISTINCT), cols).reshape(-1)
        else:
            values = self._random.standard_normal((min(rows, _DISTINCT), cols), np.float32) / math.sqrt(cols)
            data = quantize(values.astype(np.float32), kind).reshape(-1)
        return RawTensor(kind, (rows, cols), np.resize(data, rows * block_type(kind).row_bytes(cols)))

    def _blocks(self, kind: str, rows: int, cols: int) -> Bytes:
        """Rows of any codes, uint8 [rows, row_bytes]."""
        block = block_type(kind)
        blocks = self._random.integers(0, 256, (rows, cols // block.block, block.nbytes), np.uint8)
        if kind == "NVFP4":
            blocks[..., :4] &= 7  # scales of that order of magnitude
        if kind == "IQ1_M":  # whose float16, the high four bits of four words, is 2 ** -7
            blocks[..., 49:56:2] &= 15
            blocks[..., 55] |= 0x20

        def filled(scale: float) -> Bytes:
            for at in WEIGHT_TYPES[kind].halves:
                blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
            return blocks.reshape(rows, -1)

        return filled(1 / math.sqrt(cols * np.square(dequantize(filled(1.0), kind), dtype=np.float64).mean()))

    def bundles(self, kind: str, shape: tuple[int, int], threads: int) -> tuple[BundleLayout, NDArray[np.uint8]]:
        """Gated neurons as bundles, in the types that `pack` makes of this one; gate and up are the same normal rows.

        uint8 [groups, layout.group_bytes].
        """
        d_model, n = shape
        down_type = PACKED_DOWN.get(kind, kind)
        gate_bytes, _ = cpu.bundle_row_bytes(kind, d_model)
        layout = BundleLayout(d_model, True, kind, down_type, gate_bytes, *cpu.bundle_row_bytes(down_type, d_model))
        bundles = np.zeros((n_groups(n), layout.group_bytes), np.uint8)
        gate = self.normal(kind, n, d_model)
        down = self.normal(kind, len(bundles) * d_model, BUNDLE_GROUP) if kind in PACKED_DOWN else gate
        for name, rows in (("gate", gate), ("up", gate), ("down", down)):
            cpu.pack_bundle_rows(layout, name, n, rows.data, bundles, threads)
        return layout, bundles


def wire(
    builder: Builder[Matrix, Norm],
    d_model: int,
    layers: Iterable[int],
    qkv: Sequence[RawTensor],
    out: RawTensor,
    ffn: Sequence[RawTensor] = (),
) -> None:
    """Wire layers, each with its own copies of these matrices. ffn: gate, up and down; (): the caller adds FFNs."""
    weight = np.ones(d_model, np.float32)
    for layer in layers:
        builder.attention(layer, builder.norm(weight), [builder.matrix(one) for one in qkv])
        builder.project(layer, builder.matrix(out))
        if ffn:
            gate, up, down = (builder.matrix(one) for one in ffn)
            builder.ffn(layer, builder.norm(weight), gate, up, down)


# ---------------------------------------------------------------- fits


@dataclass(frozen=True)
class FitGroup:
    """Layers that differ only in how many neurons fire: one width, one way."""

    d_model: int
    way: str
    dense_type: str
    dense_bytes: int  # of the product that selects the neurons: the gate's, the predictor's


@dataclass(frozen=True)
class RowFit:
    """seconds = fixed[group] + bytes / (1e9 gb_s) + 1e-9 row_ns * rows."""

    gb_s: float
    row_ns: float
    fixed: dict[FitGroup, float]


def fit_rows(times: Sequence[tuple[FitGroup, float, float, float]], peak_gb_s: float) -> RowFit:
    """The least squares of (group, rows, bytes, seconds): a rate within (0, peak_gb_s], a row's time from 0 on.

    Residuals count relative to the seconds. At least two rows of one group are needed.
    """
    groups = list(dict.fromkeys(group for group, *_ in times))
    member = np.array([[group == one for one in groups] for group, *_ in times], np.float64)
    rows, nbytes, seconds = (np.array([entry[at] for entry in times], np.float64) for at in (1, 2, 3))

    def solve(columns: list[NDArray[np.float64]], target: NDArray[np.float64]) -> list[float]:
        matrix = np.column_stack([member, *columns]) / seconds[:, None]
        return [float(value) for value in np.linalg.lstsq(matrix, target / seconds, rcond=None)[0]]

    *fixed, per_byte, per_row = solve([1e-9 * nbytes, 1e-9 * rows], seconds)
    least = 1 / peak_gb_s  # ns a byte: nothing is read faster than straight through
    if per_row < 0:
        per_row = 0.0
        *fixed, per_byte = solve([1e-9 * nbytes], seconds)
    if per_byte < least:
        per_byte = least
        *fixed, per_row = solve([1e-9 * rows], seconds - 1e-9 * per_byte * nbytes)
        per_row = max(0.0, per_row)
    return RowFit(1 / per_byte, per_row, dict(zip(groups, fixed, strict=True)))


def figure(value: float) -> float:
    """Rounded to four digits, the precision of a measurement."""
    return float(f"{value:.4g}")
