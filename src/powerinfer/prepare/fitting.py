"""The predictor of one layer, fitted to samples of the layer's FFN input and of the neurons that fire.

Of a layer of experts one predictor selects among the neurons of all experts: they share its hidden units. What counts
is the cells (row, neuron) of the experts that a row selects. An expert is a group of neurons, or several where a shared
expert, which every row has, is no multiple of it; an FFN without experts is one group that every row has.

A predictor is z = out . relu(in . r), r the residual stream before the FFN's norm, and selects the neurons whose z
reaches a threshold (PowerInfer, arXiv 2312.12456). It has no biases, so it is homogeneous: z(s r) = s z(r) for s > 0.
Whether a neuron fires does not depend on the length of r either, because a norm divides by it. So a predictor is fitted
on r / scale(r), scale the norm's divisor, and applied to r itself; only its threshold depends on the length, and is
therefore kept near 0 in training.

There are two ways to obtain weights:

- low rank, without training ("svd"). A neuron fires where its margin, linear in r / scale(r), is positive. Margins in
  units of their standard deviation are approximated with least mean squared error over the samples (SVD of G C^(1/2), C
  the covariance). A linear direction v takes two units, relu(v . r) - relu(-v . r), or, if some direction u has
  u . r = scale(r) approximately (as in the residual streams of language models), one unit that is always active,
  relu((v + c u) . r) - c u . r; the second term is shared by all directions. The same u provides offsets. Neurons that
  fire on both sides of zero (cats) have no such margin: `in` is that of their gates, and `out` the least squares
  solution for where they fire.
- training from there: gradient descent on the class-balanced loss of `_training_loss`, through the quantisation.

Everything is measured as the engine computes it: weights in their stored type, and with Q8_0 the activations in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ExpertsConfig, FfnConfig, FfnKind, TrainConfig
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.quant import Bytes, Float32, dequantize, quantize
from powerinfer.formats.samples_file import SamplesFile
from powerinfer.neurons import Predictor

Tensor = Any
"""A torch tensor; torch is imported only to make predictors."""

_BATCH = 1024  # rows measured at once
_CELLS = 1 << 22  # maximum rows * neurons at once
_MOMENT_ROWS = 1 << 16  # rows used for the covariance
_CHECK_ROWS = 4096  # rows used to check training
_BINS_SHIFT = 12  # low bits of a float that a bin of z ignores: bins are 2^-11 of z wide
_BINS = 1 << (32 - _BINS_SHIFT)
_FEW_CELLS = 1 << 17  # maximum rows * neurons that are sorted
_RISE = 0.02  # rate at which the weight of firing neurons follows the recall
_SLOPES = [2.0**n for n in range(-2, 9)]  # initial slopes of the logistic that are tried
_SOLVED_ROWS = 1 << 14  # rows used for least squares
_SCALE_ROWS = 256  # rows used for scales
_PATIENCE = 5  # checks, of twenty, within which the loss must improve
_EASILY = 0.75  # fraction of the allowed loss at which training ends early
_AS_GOOD = 0.001  # minimum gain of a trained predictor over one of low rank
_FEW_ROWS = 32  # training rows of an expert below which all of its neurons are selected
_BLOCK = 4096  # neurons computed in float64 at once


@dataclass(frozen=True, slots=True)
class Rows:
    """Row numbers of the samples for fitting, for choosing (threshold, size, when to stop), and for reporting."""

    train: NDArray[np.int64]
    choose: NDArray[np.int64]
    report: NDArray[np.int64]


def split_rows(rows: int, windows: NDArray[np.int64]) -> Rows:
    """The last tenth is held out, in whole windows if there are ten; its windows alternately choose and report.

    windows: int64, the first row of each, ascending from 0.
    """
    held_windows = max(2, -(-len(windows) // 10))
    if len(windows) < 10 or windows[-held_windows] < rows // 2:
        first, middle = rows - max(2, rows // 10), rows - max(1, rows // 20)
        return Rows(np.arange(first), np.arange(first, middle), np.arange(middle, rows))
    ends = np.append(windows[1:], rows)
    parts = [np.arange(begin, end) for begin, end in zip(windows[-held_windows:], ends[-held_windows:], strict=True)]
    return Rows(np.arange(windows[-held_windows]), np.concatenate(parts[::2]), np.concatenate(parts[1::2]))


@dataclass(frozen=True, slots=True)
class FitFigures:
    """Quality of a predictor on some rows: shares from 0 to 1, over all neurons of all rows.

    recall: of the neurons that fire, those selected (1 if none fires); precision: of those selected, the ones that fire
    (1 if none is selected); candidate_fraction: selected, of all; active_fraction: firing, of all.
    """

    recall: float
    precision: float
    candidate_fraction: float
    active_fraction: float

    @property
    def lost(self) -> float:
        """Sparsity lost: selected minus firing neurons, as a share of all."""
        return self.candidate_fraction - self.active_fraction


@dataclass(frozen=True)
class Fitted:
    """A layer's predictor of some size, without its weights.

    method: "trained", "svd", or "constant" if no neuron fires, or all do. chosen: figures on the rows that chose the
    threshold, used to compare sizes; figures: on the reporting rows. svd: figures of the low-rank predictor of the same
    size, svd_form: how it was made. steps: of training.
    """

    predictor: Predictor
    method: str
    chosen: FitFigures
    figures: FitFigures
    svd: FitFigures
    svd_form: str
    steps: int


Stored = tuple[Bytes, Bytes]
"""Bytes in the stored type of in [rank, d_model] and out [neurons, rank]."""


# ---------------------------------------------------------------- margins


@dataclass(frozen=True, slots=True)
class Margins:
    """Margins of one matrix: positive if weights . (r / scale(r)) + offset > 0; [neurons, d_model] and [neurons]."""

    weights: Float32
    offset: Float32


def margins(checkpoint: Checkpoint, layer: int) -> tuple[Margins, ...]:
    """The margins that must be positive for a neuron to fire: the gate's (plain FFN: up's), and for dReLU up's too.

    Of neurons that fire on both sides of zero they are the gate itself: they fire where it is large either way.
    The FFN's norm (weight, bias, subtraction of the mean) is folded into the weights.
    """
    config, layer_config, name = checkpoint.config, checkpoint.config.layers[layer], f"layers.{layer}."
    ffn = layer_config.ffn
    assert isinstance(ffn, FfnConfig | ExpertsConfig)
    parts = ["gate", "up"] if ffn.activation == "drelu" else ["gate" if ffn.gated else "up"]
    of = [""] if isinstance(ffn, FfnConfig) else ["experts_", *(["shared_"] if ffn.predicted_shared else [])]
    result = []
    for part in parts:
        stored = [_input_rows(checkpoint, name, one, part) for one in of]
        weights = np.concatenate(stored).astype(np.float32, copy=False)
        offset = np.zeros(len(weights), np.float32)
        if checkpoint.has(f"{name}{part}_bias"):
            offset += checkpoint.take(f"{name}{part}_bias").float32()
        if ffn.activation == "fatrelu":
            limits = name + "threshold"
            offset -= checkpoint.take(limits).float32() if checkpoint.has(limits) else np.float32(ffn.threshold)
        if layer_config.norms in ("pre", "both"):
            norm = name + ("attn_norm" if layer_config.shared_norm else "ffn_norm")
            if checkpoint.has(norm + "_bias"):
                offset += weights @ checkpoint.take(norm + "_bias").float32()
            weights *= checkpoint.take(norm).float32()
            if config.norm == "layer":
                weights -= weights.mean(axis=1, keepdims=True)
        result.append(Margins(weights, offset))
    return tuple(result)


def _input_rows(checkpoint: Checkpoint, name: str, kind: str, part: str) -> Float32:
    """Rows of gate or up over what the layer reads, [neurons, d_model]: of experts of latents, times the matrix that
    makes these."""
    values = checkpoint.take(f"{name}{kind}{part}").float32()
    if kind == "experts_" and checkpoint.has(f"{name}latent_in"):
        return values.reshape(-1, values.shape[-1]) @ checkpoint.take(f"{name}latent_in").float32()
    return values.reshape(-1, checkpoint.config.d_model)


def _scale(checkpoint: Checkpoint, layer: int, x: Tensor) -> Tensor:
    """The divisor of the norm before the FFN, [n, 1]."""
    config = checkpoint.config
    if config.layers[layer].norms not in ("pre", "both"):  # the FFN reads x itself
        return x.new_ones((len(x), 1))
    if config.norm == "layer":
        x = x - x.mean(1, keepdim=True)
    return (x * x).mean(1, keepdim=True).add(config.norm_eps).sqrt()


# ---------------------------------------------------------------- a layer


@dataclass(frozen=True, slots=True)
class _Histogram:
    """The bins in which z is, ascending, and in each of them the neurons that fire and all: int64 [bins]."""

    bins: Tensor
    fires: Tensor
    total: Tensor

    def figures(self, at: int) -> FitFigures:
        """Figures of a threshold at the beginning of a bin."""
        above = self.bins >= at
        hits, selected = int(self.fires[above].sum()), int(self.total[above].sum())
        active, total = int(self.fires.sum()), int(self.total.sum())
        return FitFigures(
            hits / active if active else 1.0,
            hits / selected if selected else 1.0,
            selected / total,
            active / total,
        )


@dataclass(frozen=True, slots=True)
class _Cells:
    """Cells (row, neuron) of a batch of rows, group after group.

    parts: of each group that some row has its number and those rows, None: all; size: neurons of a group; fires: bool
    [cells].
    """

    parts: list[tuple[int, Tensor | None]]
    size: int
    fires: Tensor

    def fires_by_part(self) -> Iterator[Tensor]:
        """`fires` of each of `parts`: bool [its rows, size]."""
        sizes = [len(self.fires) if rows is None else len(rows) * self.size for _, rows in self.parts]
        return (own.reshape(-1, self.size) for own in self.fires.split(sizes))

    def z(self, hidden: Tensor, outer: Tensor) -> Tensor:
        """[cells], of the hidden units of the rows."""
        import torch

        blocks = outer.split(self.size)
        products = [
            ((hidden if rows is None else hidden[rows]) @ blocks[group].T).reshape(-1) for group, rows in self.parts
        ]
        return products[0] if len(products) == 1 else torch.cat(products)


@dataclass(frozen=True, slots=True)
class _RowGroups:
    """Groups that each row of a layer of experts has. per_expert: of one; groups: of all; shared: of these, those of
    the shared expert, the last."""

    selected: NDArray[np.uint16]  # experts, [rows, experts of a token]
    per_expert: int
    groups: int
    shared: int

    @property
    def row_groups(self) -> int:
        """Number of groups of a row."""
        return int(self.selected.shape[1]) * self.per_expert + self.shared

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The groups of some rows, [rows, row_groups], in the order of their bits."""
        experts = self.selected[rows].astype(np.int64)[:, :, None] * self.per_expert + np.arange(self.per_expert)
        shared = np.broadcast_to(np.arange(self.groups - self.shared, self.groups), (len(rows), self.shared))
        return np.concatenate((experts.reshape(len(rows), -1), shared), axis=1)


def _groups_of(ffn: FfnKind, samples: SamplesFile, layer: int) -> _RowGroups | None:
    """None: the layer has no experts."""
    if not isinstance(ffn, ExpertsConfig):
        return None
    size = math.gcd(ffn.size, ffn.predicted_shared)
    per_expert, shared = ffn.size // size, ffn.predicted_shared // size
    return _RowGroups(samples.selected[layer], per_expert, ffn.n_experts * per_expert + shared, shared)


class LayerFit:
    """Makes predictors of any size for one layer.

    Of the samples, which may be mapped files, rows are read a batch at a time. Memory, besides a predictor, its
    gradients and two moments: the margins' matrices, of dReLU one more, and for each a few of [d_model, d_model], twice
    as wide. ModelError for samples that are not finite.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        samples: SamplesFile,
        rows: Rows,
        config: TrainConfig,
        type_name: str,
        device: str,
    ) -> None:
        import torch

        self._torch = torch
        self._checkpoint = checkpoint
        self._layer = layer
        self._x, self._active = samples.layers[layer]
        self._rows = rows
        self._config, self._type, self._device = config, type_name, torch.device(device)
        self._neurons = checkpoint.config.separable[layer]
        self._of_rows = _groups_of(checkpoint.config.layers[layer].ffn, samples, layer)
        self._groups = 1 if self._of_rows is None else self._of_rows.groups
        self._size = self._neurons // self._groups  # of a group
        self._cells = self._size * (1 if self._of_rows is None else self._of_rows.row_groups)  # of a row
        self._at_once = max(1, min(_BATCH, _CELLS // self._cells))
        self._two_sided = checkpoint.config.fires_both_ways
        self._had = (
            np.full(1, len(rows.train))
            if self._of_rows is None
            else np.bincount(self._of_rows(rows.train).reshape(-1), minlength=self._groups)
        )
        """Training rows that have each group, int64 [groups]."""
        self.frequency = self._counted() / np.maximum(1, self._had).repeat(self._size)
        """Share of these for which each neuron fires, float64 [neurons]."""
        self._low_rank: _LowRank | None = None

    @property
    def constant(self) -> bool:
        """Whether no neuron fires in the training rows, or all always do."""
        return bool((self.frequency == 0).all() or (self.frequency == 1).all())

    def start_rank(self) -> float:
        """The first size to try: half of d_model for each bit of entropy of a neuron's firing.

        The paper starts with a size from the layer's sparsity and adjusts it by its skew. The mean entropy of the
        neurons, in bits, reflects both: it falls with sparsity, and at the same sparsity with skew. Half of d_model
        matches the published predictors (ReluLLaMA-7B: 70 % sparse, 1024 to 2048 of 4096).
        """
        p = np.clip(self.frequency, 1e-12, 1 - 1e-12)
        entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
        return 0.5 * self._checkpoint.config.d_model * self._mean(entropy)

    def low_rank_lost(self, rank: int) -> float:
        """Approximate loss of the low-rank predictor of that size, without the rounding of the stored type."""
        return self._lost(*map(self._nearly, self._low_rank_of(rank)[1:]))

    def fit(self, rank: int, tick: Callable[[float], None]) -> tuple[Fitted, Stored]:
        """The better of the low-rank predictor and the trained one. tick: called with the share of the work done."""
        if self.constant:
            return self._constant(rank)
        form, *low = self._low_rank_of(rank)
        weights, steps = self._fit(low[0], low[1], rank, tick)
        tick(1.0)
        svd = self._measured(*low)
        trained = self._measured(*weights) if steps else svd
        better = trained.chosen.lost < svd.chosen.lost - _AS_GOOD
        chosen, method = (trained, "trained") if better else (svd, "svd")
        predictor = Predictor(rank, chosen.threshold, 0)
        return Fitted(predictor, method, chosen.chosen, chosen.figures, svd.figures, form, steps), chosen.stored

    # ------------------------------------------------------------ rows

    def _mean(self, values: NDArray[np.float64]) -> float:
        """Mean of a value of each neuron over the cells of the training rows."""
        return float(np.average(values, weights=self._had.repeat(self._size)))

    def _counted(self) -> NDArray[np.float64]:
        """Number of training rows in which each neuron fires; all rows are checked."""
        counts = np.zeros((self._groups, self._size))
        for at in range(0, len(self._x), self._at_once):
            part = slice(at, at + self._at_once)
            if not np.isfinite(self._x[part]).all():
                raise ModelError(
                    f"the samples of layer {self._layer} are not all finite: the model's weights may be damaged; "
                    "profile it again"
                )
            bits = np.unpackbits(self._active[part], axis=1, bitorder="little", count=self._cells)
            row_bits = bits[: max(0, len(self._rows.train) - at)]  # training rows come first
            if self._of_rows is None:
                counts[0] += row_bits.sum(axis=0)
                continue
            groups = self._of_rows(np.arange(at, at + len(row_bits))).reshape(-1)
            selected_bits = row_bits.reshape(-1, self._size)
            for group in np.unique(groups):
                counts[group] += selected_bits[groups == group].sum(axis=0)
        return counts.reshape(-1)

    def _batch(self, rows: NDArray[np.int64]) -> tuple[Tensor, _Cells]:
        """(x float32 [n, d_model], their cells) of some rows."""
        torch = self._torch
        x = torch.from_numpy(np.ascontiguousarray(self._x[rows], np.float16)).to(self._device).float()
        packed = torch.from_numpy(np.ascontiguousarray(self._active[rows])).to(self._device)
        places = torch.arange(8, device=self._device, dtype=torch.uint8)
        bits = (packed[:, :, None] >> places) & 1
        fires = bits.reshape(len(rows), -1)[:, : self._cells].bool()
        if self._of_rows is None:
            return x, _Cells([(0, None)], self._size, fires.reshape(-1))
        selected = self._of_rows(rows)
        order = np.argsort(selected.reshape(-1), kind="stable")
        of_row = torch.from_numpy(order // selected.shape[1]).to(self._device)
        counts = np.bincount(selected.reshape(-1), minlength=self._groups)
        rows_of_group = of_row.split(counts.tolist())
        parts = [(group, rows_of_group[group]) for group in np.flatnonzero(counts).tolist()]
        in_order = fires.reshape(-1, self._size)[torch.from_numpy(order).to(self._device)]
        return x, _Cells(parts, self._size, in_order.reshape(-1))

    def _batches(self, rows: NDArray[np.int64]) -> Iterator[tuple[Tensor, _Cells]]:
        for at in range(0, len(rows), self._at_once):
            yield self._batch(rows[at : at + self._at_once])

    # ------------------------------------------------------------ measuring

    def _z(self, x: Tensor, cells: _Cells, inner: Tensor, outer: Tensor) -> Tensor:
        """z of the cells, as the engine computes it from raw x."""
        hidden = self._torch.relu(self._rounded(x) @ inner.T)
        return cells.z(self._rounded(hidden), outer)

    def _rounded(self, values: Tensor) -> Tensor:
        """Activations rounded as by the kernels of the stored type."""
        return _round_to_q8(values) if self._type == "Q8_0" else values

    def _histogram(self, inner: Tensor, outer: Tensor, rows: NDArray[np.int64]) -> _Histogram:
        """Counts of the bins of z, of these rows."""
        torch = self._torch
        if len(rows) * self._cells <= _FEW_CELLS:  # to sort them takes less time than to go through all bins
            batches = list(self._batches(rows))
            bins = _bins(torch, torch.cat([self._z(x, cells, inner, outer) for x, cells in batches]))
            fired = torch.cat([cells.fires for _, cells in batches])
            bins, places, total = bins.unique(return_inverse=True, return_counts=True)
            return _Histogram(bins, torch.bincount(places[fired], minlength=len(bins)), total)
        fires, total = (torch.zeros(_BINS, dtype=torch.int64, device=self._device) for _ in range(2))
        for x, cells in self._batches(rows):
            bins = _bins(torch, self._z(x, cells, inner, outer))
            total += torch.bincount(bins, minlength=_BINS)
            fires += torch.bincount(bins[cells.fires], minlength=_BINS)
        bins = total.nonzero()[:, 0]
        return _Histogram(bins, fires[bins], total[bins])

    def _threshold(self, histogram: _Histogram) -> int:
        """The highest bin at which the recall is reached."""
        need = math.ceil(self._config.recall * int(histogram.fires.sum()))
        from_above = histogram.fires.flip(0).cumsum(0)
        at = len(histogram.bins) - 1 - int((from_above < need).sum())
        return int(histogram.bins[at]) if need else _BINS - 1

    def _lost(self, inner: Tensor, outer: Tensor) -> float:
        """`FitFigures.lost` at the target recall, on the choosing rows: the criterion of training."""
        rows = self._choosing[:: -(-len(self._choosing) // _CHECK_ROWS)]
        histogram = self._histogram(inner, outer, rows)
        return histogram.figures(self._threshold(histogram)).lost

    @property
    def _choosing(self) -> NDArray[np.int64]:
        """The choosing rows, together with the training rows if hardly anything fires in them."""
        fired = np.unpackbits(self._active[self._rows.choose], axis=1, bitorder="little", count=self._cells).sum()
        enough = fired >= 1 / (1 - self._config.recall)
        return self._rows.choose if enough else np.concatenate([self._rows.train, self._rows.choose])

    def _measured(self, inner: Tensor, outer: Tensor) -> _Measured:
        outer = self._with_few(outer)
        stored = [self._stored(matrix) for matrix in (inner, outer)]
        inner, outer = (
            self._torch.from_numpy(dequantize(matrix, self._type)).to(self._device).reshape(weights.shape)
            for matrix, weights in zip(stored, (inner, outer), strict=True)
        )
        histogram = self._histogram(inner, outer, self._choosing)
        at = self._threshold(histogram)
        figures = self._histogram(inner, outer, self._rows.report).figures(at)
        return _Measured(_lowest_of(at), (stored[0], stored[1]), histogram.figures(at), figures)

    def _with_few(self, outer: Tensor) -> Tensor:
        """The same, where groups that few rows have are selected whole.

        All of their weights are the largest of all: as hidden units are not negative, no z of a row exceeds theirs.
        """
        few = self._torch.from_numpy(self._had < _FEW_ROWS).to(self._device)
        if not few.any():
            return outer
        blocks = outer.clone().reshape(self._groups, self._size, -1)
        blocks[few] = outer.abs().max()
        return blocks.reshape(outer.shape)

    def _stored(self, weights: Tensor) -> Bytes:
        """Weights in the stored type, after scaling by a power of two into the precise range of F16, of the scales."""
        peak = float(weights.abs().max())
        scaled = weights * 2.0 ** -math.ceil(math.log2(peak)) if peak else weights
        return quantize(np.ascontiguousarray(scaled.float().cpu().numpy()), self._type)

    # ------------------------------------------------------------ the three ways

    def _constant(self, rank: int) -> tuple[Fitted, Stored]:
        """Selects all neurons or none: z is 0, and the threshold 0 or above it."""
        always = bool(self.frequency.all())
        d_model = self._checkpoint.config.d_model
        inner, outer = (quantize(np.zeros(s, np.float32), self._type) for s in ((rank, d_model), (self._neurons, rank)))
        selected = 1.0 if always else 0.0
        pair = []
        for rows in (self._rows.choose, self._rows.report):
            bits = np.unpackbits(self._active[rows], axis=1, bitorder="little", count=self._cells)
            active = float(bits.mean())
            pair.append(FitFigures(1.0 if always or not active else 0.0, active if always else 1.0, selected, active))
        predictor = Predictor(rank, 0.0 if always else 1.0, 0)
        return Fitted(predictor, "constant", pair[0], pair[1], pair[1], "constant", 0), (inner, outer)

    def _low_rank_of(self, rank: int) -> tuple[str, Tensor, Tensor]:
        """(form, in, out): the low-rank form of that rank that loses least in its stored type."""
        if self._low_rank is None:
            self._low_rank = _LowRank(self._torch, margins(self._checkpoint, self._layer), *self._moments())
        x, _ = self._sample_rows()
        forms = [
            (name, *self._balanced(x, inner.float(), (self._solved(inner) if self._two_sided else outer).float()))
            for name, inner, outer in self._low_rank.forms(rank)
        ]
        return min(forms, key=lambda form: self._lost(self._nearly(form[1]), self._nearly(form[2])))

    def _solved(self, inner: Tensor) -> Tensor:
        """out [neurons, rank] whose z is nearest to 1 where a neuron fires and to 0 elsewhere, in the training rows."""
        torch, rank = self._torch, len(inner)
        inner = inner.float()
        gram = torch.zeros((self._groups, rank, rank), dtype=torch.float64, device=self._device)
        fired = torch.zeros((self._groups, rank, self._size), dtype=torch.float64, device=self._device)
        for x, cells in self._batches(self._rows.train[:: -(-len(self._rows.train) // _SOLVED_ROWS)]):
            hidden = torch.relu(x / _scale(self._checkpoint, self._layer, x) @ inner.T)
            for (group, rows), fires in zip(cells.parts, cells.fires_by_part(), strict=True):
                rows_hidden = hidden if rows is None else hidden[rows]
                gram[group] += rows_hidden.T @ rows_hidden
                fired[group] += rows_hidden.T @ fires.float()
        ridge = gram.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)
        gram += 1e-3 * ridge[:, None, None] * torch.eye(rank, dtype=gram.dtype, device=self._device)
        return torch.linalg.solve(gram, fired).transpose(1, 2).reshape(-1, rank)

    def _nearly(self, weights: Tensor) -> Tensor:
        """Weights with the errors of the stored type, for comparison."""
        return _round_to_q8(weights) if self._type == "Q8_0" else weights

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean [d_model] and second moments [d_model, d_model] of r / scale(r), and the mean of the rows that have each
        group [groups, d_model], float64."""
        torch = self._torch
        rows = self._rows.train[:: -(-len(self._rows.train) // _MOMENT_ROWS)]
        d_model = self._checkpoint.config.d_model
        mean = torch.zeros(d_model, dtype=torch.float64, device=self._device)
        second = torch.zeros((d_model, d_model), dtype=torch.float64, device=self._device)
        sums = torch.zeros((self._groups, d_model), dtype=torch.float64, device=self._device)
        counts = torch.zeros((self._groups, 1), dtype=torch.float64, device=self._device)
        for x, cells in self._batches(rows):
            unit = x / _scale(self._checkpoint, self._layer, x)
            mean += unit.sum(0)
            second += unit.T @ unit
            for group, of_group in cells.parts:
                group_rows = unit if of_group is None else unit[of_group]
                sums[group] += group_rows.sum(0)
                counts[group] += len(group_rows)
        mean /= len(rows)
        return mean, second / len(rows), torch.where(counts > 0, sums / counts.clamp(min=1), mean)

    def _fit(
        self, inner: Tensor, outer: Tensor, rank: int, tick: Callable[[float], None]
    ) -> tuple[tuple[Tensor, Tensor], int]:
        """Weights (in, out) trained from a predictor of low rank, and the number of steps.

        Adam; the learning rate is relative to each matrix's root mean square and decays to 0, earlier if the loss on
        the choosing rows no longer falls, or too slowly for this size to meet the target; training ends if the target
        is met easily. The best weights found are used.
        """
        from powerinfer.prepare.adam import Adam

        config = self._config
        inner, outer, log_weight = self._beginning(inner, outer)
        weights = [inner.requires_grad_(), outer.requires_grad_()]
        rates = [config.lr * float(one.detach().square().mean().sqrt()) for one in weights]
        adam = Adam([[one] for one in weights], betas=(0.9, 0.99))
        random = np.random.default_rng([config.seed, self._layer, rank])
        best_weights = (inner.detach().clone(), outer.detach().clone())
        best = self._lost(*map(self._nearly, best_weights))
        course = [best]  # the best at each check
        interval = max(1, config.steps // 20)
        begin, end, from_rate, step = 0, config.steps, 1.0, 0
        while step < end and best > _EASILY * config.lost:
            rows = np.sort(random.integers(0, len(self._rows.train), config.batch))
            self._training_loss(self._rows.train[rows], inner, outer, log_weight).backward()
            adam.step([rate * from_rate * (end - step) / (end - begin) for rate in rates])
            step += 1
            tick(step / end)
            if step % interval and step != end:
                continue
            lost = self._lost(self._nearly(inner.detach()), self._nearly(outer.detach()))
            if lost < best:
                best, best_weights = lost, (inner.detach().clone(), outer.detach().clone())
            course.append(best)
            if end == config.steps and self._is_in_vain(course, (end - step) / interval):  # decay the rate, and end
                from_rate *= (end - step) / (end - begin)
                begin, end = step, min(end, step + 3 * interval)
        return best_weights, step

    def _training_loss(self, rows: NDArray[np.int64], inner: Tensor, outer: Tensor, log_weight: Tensor) -> Tensor:
        """The mean loss of all neurons on some rows; updates log w.

        Loss of a neuron on a row, z the predictor's answer on r / scale(r): w softplus(-z) where it fires, softplus(z)
        where it does not, over w f + 1 - f, f the layer's share of firing neurons. w balances the classes at the
        recall: it starts where both classes have the same gradient, rises while fewer than the target share of the
        firing neurons have z >= 0, and falls while more do (the multiplier of: fewest candidates such that the recall
        is reached). All neurons share it, because they share a threshold. In Q8_0, gradients pass straight through the
        rounding of weights and activations.
        """
        torch, recall, active = self._torch, self._config.recall, self._mean(self.frequency)
        x, cells = self._batch(rows)
        fires = cells.fires
        z = self._quantised_z(x / _scale(self._checkpoint, self._layer, x), cells, inner, outer)
        with torch.no_grad():
            reached = ((z >= 0) & fires).sum() / fires.sum().clamp(min=1)
            log_weight += _RISE * (recall - reached) / (1 - recall)
            log_weight.clamp_(-3.0, 7.0)
            weight = log_weight.exp()
            per_class = torch.where(fires, weight, 1.0) / (weight * active + 1 - active)
            signs = torch.where(fires, -1.0, 1.0)
        return (torch.nn.functional.softplus(z * signs) * per_class).mean()

    def _is_in_vain(self, course: list[float], checks_left: float) -> bool:
        """Whether the loss of the checks no longer falls, or will not fall far enough.

        Decaying the rate lowers it by another tenth or so; a fifth is assumed.
        """
        if len(course) <= _PATIENCE:
            return False
        gain = (course[-_PATIENCE - 1] - course[-1]) / _PATIENCE
        return gain < 0.002 * course[-1] or 0.8 * course[-1] - gain * checks_left > self._config.lost

    def _beginning(self, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and log w to begin with: (in, out, log w), the same predictor, rescaled for training.

        The recall is reached at z = 0, by means of the constant unit, and the slope of z minimises the logistic loss.
        """
        torch, nn = self._torch, self._torch.nn.functional
        x, cells = self._sample_rows()
        fires, hidden = cells.fires, torch.relu(x @ inner.T)
        z = cells.z(hidden, outer)
        losses = [float(nn.softplus(slope * torch.where(fires, -z, z)).mean()) for slope in _SLOPES]
        slope = _SLOPES[int(np.argmin(losses))]
        outer = slope * outer
        if fires.any():
            firing = z[fires].sort().values
            at = slope * firing[int((1 - self._config.recall) * len(firing))]
            outer[:, -1] -= at / hidden[:, -1].mean().clamp(min=1e-6)
        z = cells.z(hidden, outer)
        forces = [torch.sigmoid(z)[~fires].sum(), torch.sigmoid(-z)[fires].sum()]
        log_weight = (forces[0].clamp(min=1e-6) / forces[1].clamp(min=1e-6)).log().clamp(-3.0, 7.0)
        return inner.clone(), outer, log_weight

    def _sample_rows(self) -> tuple[Tensor, _Cells]:
        """(r / scale(r), their cells) of a few training rows, evenly spaced."""
        x, cells = self._batch(self._rows.train[:: -(-len(self._rows.train) // _SCALE_ROWS)])
        return x / _scale(self._checkpoint, self._layer, x), cells

    def _balanced(self, x: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        """The same predictor with hidden units of root mean square 1.

        One learning rate then suits all, and units that share a block of Q8_0 have the same magnitude.
        """
        size = self._torch.relu(x @ inner.T).square().mean(0).sqrt()
        size = self._torch.where(size > 0, size, 1.0)
        return inner / size[:, None], outer * size

    def _quantised_z(self, x: Tensor, cells: _Cells, inner: Tensor, outer: Tensor) -> Tensor:
        """z of the cells in the stored type, with gradients as if nothing were rounded."""

        def rounded(values: Tensor) -> Tensor:
            return values + (_round_to_q8(values.detach()) - values.detach())

        if self._type != "Q8_0":
            return cells.z(self._torch.relu(x @ inner.T), outer)
        hidden = self._torch.relu(_round_to_q8(x) @ rounded(inner).T)
        return cells.z(rounded(hidden), rounded(outer))


@dataclass(frozen=True, slots=True)
class _Measured:
    threshold: float
    stored: Stored
    chosen: FitFigures
    figures: FitFigures


# ---------------------------------------------------------------- low rank


class _LowRank:
    """Low-rank linear approximations of the margins of a layer, as predictors.

    For dReLU, where two margins must be positive, there are two: the gate's alone, and the sum of both in units of
    their standard deviations. Margins of a group are centred at the mean of the rows that have it.
    """

    def __init__(self, torch: Any, parts: tuple[Margins, ...], mean: Tensor, second: Tensor, means: Tensor) -> None:
        """mean: float64 [d_model], second: moments [d_model, d_model], means: of the groups, [groups, d_model]."""
        self._torch = torch
        self._mean, self._means = mean, means
        eye = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        # least squares solution of u . r = scale(r)
        self._constant = torch.linalg.solve(second + 1e-4 * second.trace() / len(mean) * eye, mean)
        covariance = second - torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt()
        wide = [
            (torch.from_numpy(part.weights).to(mean.device), torch.from_numpy(part.offset).to(mean)) for part in parts
        ]
        scaled = [_scale_to_deviations(weights, offset, root) for weights, offset in wide]
        self._bases = {"gate" if len(parts) > 1 else "": self._basis(*scaled[0], root)}
        if len(parts) > 1:
            joint = _scale_to_deviations(sum(one[0] for one in scaled), sum(one[1] for one in scaled), root)
            self._bases["gate + up"] = self._basis(*joint, root)

    def _basis(self, weights: Tensor, offset: Tensor, root: Tensor) -> _Basis:
        gram = sum(block.double().T @ block.double() for block in weights.split(_BLOCK))
        squares, vectors = self._torch.linalg.eigh(root.T @ gram @ root)
        squares, vectors = squares.flip(0), vectors.flip(1)
        number = max(1, int((squares > 1e-10 * squares[0]).sum()))
        sizes = squares[:number].clamp(min=1e-300).sqrt()
        directions = root @ vectors[:, :number] / sizes
        inner = directions.T @ gram
        groups = weights.split(len(weights) // len(self._means))
        level = self._torch.cat([own.double() @ mean for own, mean in zip(groups, self._means, strict=True)])
        return _Basis(weights, directions, inner, sizes, offset + level)

    def forms(self, rank: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, in [rank, d_model], out [neurons, rank]) of every form with that number of units, float64."""
        torch = self._torch
        for name, basis in self._bases.items():
            for reach in (2.0, 4.0):  # standard deviations by which a unit stays active
                inner, outer, rest = self._first(basis, rank - 1)
                open_by = (reach * basis.sizes[: len(inner)] - inner @ self._mean).clamp(min=0)
                joined = (inner + open_by[:, None] * self._constant, outer)
                yield self._padded(f"{name} opened by {reach:g}".strip(), *joined, rest - outer @ open_by, rank)
            inner, outer, rest = self._first(basis, (rank - 1) // 2)
            joined = (torch.cat([inner, -inner]), torch.cat([outer, -outer], 1))
            yield self._padded(f"{name} in pairs".strip(), *joined, rest, rank)

    def _first(self, basis: _Basis, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """(inner [directions, d_model], outer [neurons, directions], rest [neurons]), of the first directions alone:
        margins = outer . (inner . r) + rest."""
        torch = self._torch
        inner = basis.inner[:number]
        blocks = basis.weights.split(_BLOCK)
        outer = torch.cat([block.double() @ basis.directions[:, :number] for block in blocks])
        levels = self._means @ inner.T  # of the groups
        outer_blocks = outer.split(len(outer) // len(levels))
        explained = torch.cat([own @ level for own, level in zip(outer_blocks, levels, strict=True)])
        return inner, outer, basis.level - explained

    def _padded(self, name: str, inner: Tensor, outer: Tensor, rest: Tensor, rank: int) -> tuple[str, Tensor, Tensor]:
        """Order the units: the constant one last, in a block with the least important; padded with zero units."""
        torch = self._torch
        spare = rank - len(inner) - 1
        rows = torch.cat([inner, inner.new_zeros((spare, inner.shape[1])), self._constant[None]])
        columns = torch.cat([outer, outer.new_zeros((len(outer), spare)), rest[:, None]], 1)
        return name, rows, columns


@dataclass(frozen=True, slots=True)
class _Basis:
    """margins - level = outer . inner . (r - its mean), outer = weights . directions; by descending share.

    In float64 but for the weights, which are as many as the margins' own.
    """

    weights: Tensor  # float32 [neurons, d_model], of the margins
    directions: Tensor  # [d_model, directions]
    inner: Tensor  # [directions, d_model]
    sizes: Tensor  # [directions], their deviations
    level: Tensor  # [neurons], means of the margins


def _scale_to_deviations(weights: Tensor, offset: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Margins in units of their standard deviations. weights: float32, overwritten; offset, root: float64."""
    for first in range(0, len(weights), _BLOCK):
        block, offsets = weights[first : first + _BLOCK], offset[first : first + _BLOCK]
        deviation = (block.double() @ root).square().sum(1).sqrt()
        deviation = deviation.where(deviation > 0, deviation.new_ones(()))
        block /= deviation[:, None].float()
        offsets /= deviation
    return weights, offset


# ---------------------------------------------------------------- numbers


def _round_to_q8(values: Tensor) -> Tensor:
    """Rounded as blocks of Q8_0: 32 neighbours in a row share a scale."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale.where(scale > 0, 1.0)).round() * scale).reshape(values.shape)


def _bins(torch: Any, z: Tensor) -> Tensor:
    """Integers that increase with z: the leading bits of the float, inverted below 0; -0 is 0."""
    bits = (z + 0.0).float().view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >> 31 == 1, 0xFFFFFFFF - bits, bits | 0x80000000) >> _BINS_SHIFT


def _lowest_of(bin: int) -> float:
    """The smallest float of a bin."""
    ordered = bin << _BINS_SHIFT
    bits = ordered & 0x7FFFFFFF if ordered >> 31 else 0xFFFFFFFF - ordered
    return float(np.array(bits, np.uint32).view(np.float32))
