"""The predictor of one layer, fitted to samples of the layer's FFN input and of the neurons that fire.

A predictor is z = out . relu(in . r), r the residual stream before the FFN's norm, and selects the neurons whose z
reaches a threshold (PowerInfer, arXiv 2312.12456). It has no biases, so it is homogeneous: z(s r) = s z(r) for s > 0.
Whether a neuron fires does not depend on the length of r either, because a norm divides by it. So a predictor is fitted
on r / scale(r), scale the norm's divisor, and applied to r itself; only its threshold depends on the length, and is
therefore kept near 0 in training.

There are two ways to obtain weights:

- low rank, without training ("svd"). A neuron fires when its margin, linear in r / scale(r), is positive. Margins in
  units of their standard deviation are approximated with least mean squared error over the samples (SVD of G C^(1/2), C
  the covariance). A linear direction v takes two units, relu(v . r) - relu(-v . r), or, if some direction u has
  u . r = scale(r) approximately (as in the residual streams of language models), one unit that is always active,
  relu((v + c u) . r) - c u . r; the second term is shared by all directions. The same u provides offsets.
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

from powerinfer.config import TrainConfig
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.quant import Bytes, Float32, dequantize, quantize
from powerinfer.neurons import Predictor

Tensor = Any
"""A torch tensor; torch is imported only to make predictors."""

_BATCH = 1024  # rows measured at once
_CELLS = 1 << 22  # maximum rows * neurons at once
_MOMENT_ROWS = 1 << 16  # rows used for the covariance
_CHECK_ROWS = 4096  # rows used to check training
_BINS_SHIFT = 12  # low bits of a float that a bin of z ignores: bins are 2^-11 of z wide
_RISE = 0.02  # rate at which the weight of firing neurons follows the recall
_SLOPES = [2.0**n for n in range(-2, 9)]  # initial slopes of the logistic that are tried
_SOME_ROWS = 256  # rows used for scales
_PATIENCE = 5  # checks, of twenty, within which the loss must improve
_EASILY = 0.75  # fraction of the allowed loss at which training ends early
_AS_GOOD = 0.001  # minimum gain of a trained predictor over one of low rank


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
    held = max(2, -(-len(windows) // 10))
    if len(windows) < 10 or windows[-held] < rows // 2:
        first, middle = rows - max(2, rows // 10), rows - max(1, rows // 20)
        return Rows(np.arange(first), np.arange(first, middle), np.arange(middle, rows))
    ends = np.append(windows[1:], rows)
    parts = [np.arange(begin, end) for begin, end in zip(windows[-held:], ends[-held:], strict=True)]
    return Rows(np.arange(windows[-held]), np.concatenate(parts[::2]), np.concatenate(parts[1::2]))


@dataclass(frozen=True, slots=True)
class Figures:
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
    chosen: Figures
    figures: Figures
    svd: Figures
    svd_form: str
    steps: int


Stored = tuple[Bytes, Bytes]
"""Bytes in the stored type of in [rank, d_model] and out [neurons, rank]."""


# ---------------------------------------------------------------- margins


@dataclass(frozen=True, slots=True)
class Margins:
    """Of one matrix: positive if weights . (r / scale(r)) + offset > 0; [neurons, d_model] and [neurons]."""

    weights: Float32
    offset: Float32


def margins(checkpoint: Checkpoint, layer: int) -> tuple[Margins, ...]:
    """The margins that must be positive for a neuron to fire: the gate's (plain FFN: up's), and for dReLU up's too.

    The FFN's norm (weight, bias, subtraction of the mean) is folded into the weights.
    """
    config, own, name = checkpoint.config, checkpoint.config.layers[layer], f"layers.{layer}."
    parts = ["gate", "up"] if own.neurons.activation == "drelu" else ["gate" if own.neurons.gated else "up"]
    result = []
    for part in parts:
        weights = np.array(checkpoint.take(name + part).float32(), np.float32)
        offset = np.zeros(len(weights), np.float32)
        if checkpoint.has(f"{name}{part}_bias"):
            offset += checkpoint.take(f"{name}{part}_bias").float32()
        if own.neurons.activation == "fatrelu":
            offset -= np.float32(own.neurons.threshold)
        if own.norms in ("pre", "both"):
            norm = name + ("attn_norm" if own.shared_norm else "ffn_norm")
            if checkpoint.has(norm + "_bias"):
                offset += weights @ checkpoint.take(norm + "_bias").float32()
            weights *= checkpoint.take(norm).float32()
            if config.norm == "layer":
                weights -= weights.mean(axis=1, keepdims=True)
        result.append(Margins(weights, offset))
    return tuple(result)


def _scale(checkpoint: Checkpoint, layer: int, x: Tensor) -> Tensor:
    """The divisor of the norm before the FFN, [n, 1]."""
    config = checkpoint.config
    if config.layers[layer].norms not in ("pre", "both"):  # the FFN reads x itself
        return x.new_ones((len(x), 1))
    if config.norm == "layer":
        x = x - x.mean(1, keepdim=True)
    return (x * x).mean(1, keepdim=True).add(config.norm_eps).sqrt()


# ---------------------------------------------------------------- a layer


class LayerFit:
    """Makes predictors of any size for one layer.

    x: float16 [rows, d_model]; active: uint8 [rows, ceil(neurons / 8)], bit i % 8 of byte i // 8 is neuron i. Both may
    be mapped files: rows are read a batch at a time. Memory, besides a predictor, its gradients and two moments: the
    margins' matrices and, for each of them, one of their size and three of [d_model, d_model], twice as wide.
    ModelError for samples that are not finite.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        x: NDArray[np.float16],
        active: Bytes,
        rows: Rows,
        config: TrainConfig,
        type_name: str,
        device: str,
    ) -> None:
        import torch

        self._torch = torch
        self._checkpoint = checkpoint
        self._layer = layer
        self._x, self._active, self._rows = x, active, rows
        self._config, self._type, self._device = config, type_name, torch.device(device)
        self._neurons = checkpoint.config.ffn_sizes[layer]
        self._at_once = max(1, min(_BATCH, _CELLS // self._neurons))
        self.frequency = self._counted() / len(rows.train)
        """Share of the training rows for which each neuron fires, float64 [neurons]."""
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
        return 0.5 * self._checkpoint.config.d_model * float(entropy.mean())

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
        kept, method = (trained, "trained") if better else (svd, "svd")
        predictor = Predictor(rank, kept.threshold, 0)
        return Fitted(predictor, method, kept.chosen, kept.figures, svd.figures, form, steps), kept.stored

    # ------------------------------------------------------------ rows

    def _counted(self) -> NDArray[np.float64]:
        """How often each neuron fires in the training rows; all rows are checked."""
        counts = np.zeros(self._neurons)
        for at in range(0, len(self._x), self._at_once):
            part = slice(at, at + self._at_once)
            if not np.isfinite(self._x[part]).all():
                raise ModelError(
                    f"the samples of layer {self._layer} are not all finite: the model's weights may be damaged; "
                    "profile it again"
                )
            bits = np.unpackbits(self._active[part], axis=1, bitorder="little", count=self._neurons)
            counts += bits[: max(0, len(self._rows.train) - at)].sum(axis=0)  # training rows come first
        return counts

    def _batch(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(x float32 [n, d_model], fires bool [n, neurons]) of some rows."""
        torch = self._torch
        x = torch.from_numpy(np.ascontiguousarray(self._x[rows], np.float16)).to(self._device).float()
        packed = torch.from_numpy(np.ascontiguousarray(self._active[rows])).to(self._device)
        places = torch.arange(8, device=self._device, dtype=torch.uint8)
        bits = (packed[:, :, None] >> places) & 1
        return x, bits.reshape(len(rows), -1)[:, : self._neurons].bool()

    def _batches(self, rows: NDArray[np.int64]) -> Iterator[tuple[Tensor, Tensor]]:
        for at in range(0, len(rows), self._at_once):
            yield self._batch(rows[at : at + self._at_once])

    # ------------------------------------------------------------ measuring

    def _z(self, x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        """z [n, neurons], as the engine computes it from raw x."""
        hidden = self._torch.relu(self._rounded(x) @ inner.T)
        return self._rounded(hidden) @ outer.T

    def _rounded(self, values: Tensor) -> Tensor:
        """Activations rounded as by the kernels of the stored type."""
        return _in_8_bits(values) if self._type == "Q8_0" else values

    def _histograms(self, inner: Tensor, outer: Tensor, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Histograms of z: (neurons that fire, all), int64 [bins], by ascending z."""
        torch = self._torch
        fires, every = (torch.zeros(1 << (32 - _BINS_SHIFT), dtype=torch.int64, device=self._device) for _ in range(2))
        for x, active in self._batches(rows):
            bins = _bins(torch, self._z(x, inner, outer))
            every += torch.bincount(bins.reshape(-1), minlength=len(every))
            fires += torch.bincount(bins[active], minlength=len(every))
        return fires, every

    def _threshold(self, fires: Tensor) -> int:
        """The highest bin at which the recall is reached."""
        need = math.ceil(self._config.recall * int(fires.sum()))
        from_above = fires.flip(0).cumsum(0)
        return len(fires) - 1 - int((from_above < need).sum())

    def _lost(self, inner: Tensor, outer: Tensor) -> float:
        """`Figures.lost` at the target recall, on the choosing rows: the criterion of training."""
        rows = self._choosing[:: -(-len(self._choosing) // _CHECK_ROWS)]
        fires, every = self._histograms(inner, outer, rows)
        return _figures(fires, every, self._threshold(fires)).lost

    @property
    def _choosing(self) -> NDArray[np.int64]:
        """The choosing rows, together with the training rows if hardly anything fires in them."""
        fired = np.unpackbits(self._active[self._rows.choose], axis=1, bitorder="little", count=self._neurons).sum()
        enough = fired >= 1 / (1 - self._config.recall)
        return self._rows.choose if enough else np.concatenate([self._rows.train, self._rows.choose])

    def _measured(self, inner: Tensor, outer: Tensor) -> _Measured:
        stored = [self._stored(one) for one in (inner, outer)]
        inner, outer = (
            self._torch.from_numpy(dequantize(one, self._type)).to(self._device).reshape(weights.shape)
            for one, weights in zip(stored, (inner, outer), strict=True)
        )
        fires, every = self._histograms(inner, outer, self._choosing)
        at = self._threshold(fires)
        chosen = _figures(fires, every, at)
        figures = _figures(*self._histograms(inner, outer, self._rows.report), at)
        return _Measured(_lowest_of(at), (stored[0], stored[1]), chosen, figures)

    def _stored(self, weights: Tensor) -> Bytes:
        """In the stored type, after scaling by a power of two into the precise range of F16, the type of the scales."""
        peak = float(weights.abs().max())
        scaled = weights * 2.0 ** -math.ceil(math.log2(peak)) if peak else weights
        return quantize(np.ascontiguousarray(scaled.float().cpu().numpy()), self._type)

    # ------------------------------------------------------------ the three ways

    def _constant(self, rank: int) -> tuple[Fitted, Stored]:
        """Selects all neurons or none: z is 0, and the threshold 0 or above it."""
        every = bool(self.frequency.all())
        d_model = self._checkpoint.config.d_model
        inner, outer = (quantize(np.zeros(s, np.float32), self._type) for s in ((rank, d_model), (self._neurons, rank)))
        selected = 1.0 if every else 0.0
        found = []
        for rows in (self._rows.choose, self._rows.report):
            bits = np.unpackbits(self._active[rows], axis=1, bitorder="little", count=self._neurons)
            active = float(bits.mean())
            found.append(Figures(1.0 if every or not active else 0.0, active if every else 1.0, selected, active))
        predictor = Predictor(rank, 0.0 if every else 1.0, 0)
        return Fitted(predictor, "constant", found[0], found[1], found[1], "constant", 0), (inner, outer)

    def _low_rank_of(self, rank: int) -> tuple[str, Tensor, Tensor]:
        """(form, in, out): the low-rank form of that rank that loses least in its stored type."""
        if self._low_rank is None:
            self._low_rank = _LowRank(self._torch, margins(self._checkpoint, self._layer), *self._moments())
        x, _ = self._some()
        forms = [
            (name, *self._balanced(x, inner.float(), outer.float()))
            for name, inner, outer in self._low_rank.forms(rank)
        ]
        return min(forms, key=lambda form: self._lost(self._nearly(form[1]), self._nearly(form[2])))

    def _nearly(self, weights: Tensor) -> Tensor:
        """Weights with the errors of the stored type, for comparison."""
        return _in_8_bits(weights) if self._type == "Q8_0" else weights

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean [d_model] and second moments [d_model, d_model] of r / scale(r), float64."""
        torch = self._torch
        rows = self._rows.train[:: -(-len(self._rows.train) // _MOMENT_ROWS)]
        d_model = self._checkpoint.config.d_model
        mean = torch.zeros(d_model, dtype=torch.float64, device=self._device)
        second = torch.zeros((d_model, d_model), dtype=torch.float64, device=self._device)
        for x, _ in self._batches(rows):
            unit = x / _scale(self._checkpoint, self._layer, x)
            mean += unit.sum(0)
            second += unit.T @ unit
        return mean / len(rows), second / len(rows)

    def _fit(
        self, inner: Tensor, outer: Tensor, rank: int, tick: Callable[[float], None]
    ) -> tuple[tuple[Tensor, Tensor], int]:
        """((in, out) trained from a predictor of low rank, steps).

        Adam; the learning rate is relative to each matrix's root mean square and decays to 0, earlier if the loss on
        the choosing rows no longer falls, or too slowly for this size to meet the target; training ends if the target
        is met easily. The best weights found are used.
        """
        torch, config = self._torch, self._config
        inner, outer, log_weight = self._beginning(inner, outer)
        weights = [inner.requires_grad_(), outer.requires_grad_()]
        rates = [config.lr * float(one.detach().square().mean().sqrt()) for one in weights]
        groups = [{"params": [one], "lr": rate} for one, rate in zip(weights, rates, strict=True)]
        adam = torch.optim.Adam(groups, betas=(0.9, 0.99))
        random = np.random.default_rng([config.seed, self._layer, rank])
        kept = (inner.detach().clone(), outer.detach().clone())
        best = self._lost(*map(self._nearly, kept))
        course = [best]  # the best at each check
        every = max(1, config.steps // 20)
        begin, end, from_rate, step = 0, config.steps, 1.0, 0
        while step < end and best > _EASILY * config.lost:
            for group, rate in zip(adam.param_groups, rates, strict=True):
                group["lr"] = rate * from_rate * (end - step) / (end - begin)
            rows = np.sort(random.integers(0, len(self._rows.train), config.batch))
            adam.zero_grad()
            self._training_loss(self._rows.train[rows], inner, outer, log_weight).backward()
            adam.step()
            step += 1
            tick(step / end)
            if step % every and step != end:
                continue
            lost = self._lost(self._nearly(inner.detach()), self._nearly(outer.detach()))
            if lost < best:
                best, kept = lost, (inner.detach().clone(), outer.detach().clone())
            course.append(best)
            if end == config.steps and self._in_vain(course, (end - step) / every):  # decay the rate, and end
                from_rate *= (end - step) / (end - begin)
                begin, end = step, min(end, step + 3 * every)
        return kept, step

    def _training_loss(self, rows: NDArray[np.int64], inner: Tensor, outer: Tensor, log_weight: Tensor) -> Tensor:
        """The mean loss of all neurons on some rows; updates log w.

        Loss of a neuron on a row, z the predictor's answer on r / scale(r): w softplus(-z) where it fires, softplus(z)
        where it does not, over w f + 1 - f, f the layer's share of firing neurons. w balances the classes at the
        recall: it starts where both classes have the same gradient, rises while fewer than the target share of the
        firing neurons have z >= 0, and falls while more do (the multiplier of: fewest candidates such that the recall
        is reached). All neurons share it, because they share a threshold. In Q8_0, gradients pass straight through the
        rounding of weights and activations.
        """
        torch, recall, active = self._torch, self._config.recall, float(self.frequency.mean())
        x, fires = self._batch(rows)
        z = self._through(x / _scale(self._checkpoint, self._layer, x), inner, outer)
        with torch.no_grad():
            found = ((z >= 0) & fires).sum() / fires.sum().clamp(min=1)
            log_weight += _RISE * (recall - found) / (1 - recall)
            log_weight.clamp_(-3.0, 7.0)
            weight = log_weight.exp()
            per_class = torch.where(fires, weight, 1.0) / (weight * active + 1 - active)
            signs = torch.where(fires, -1.0, 1.0)
        return (torch.nn.functional.softplus(z * signs) * per_class).mean()

    def _in_vain(self, course: list[float], checks_left: float) -> bool:
        """Whether the loss of the checks no longer falls, or will not fall far enough.

        Decaying the rate lowers it by another tenth or so; a fifth is assumed.
        """
        if len(course) <= _PATIENCE:
            return False
        gain = (course[-_PATIENCE - 1] - course[-1]) / _PATIENCE
        return gain < 0.002 * course[-1] or 0.8 * course[-1] - gain * checks_left > self._config.lost

    def _beginning(self, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(in, out, log w): the same predictor, rescaled for training.

        The recall is reached at z = 0, by means of the constant unit, and the slope of z minimises the logistic loss.
        """
        torch, nn = self._torch, self._torch.nn.functional
        x, fires = self._some()
        hidden = torch.relu(x @ inner.T)
        z = hidden @ outer.T
        losses = [float(nn.softplus(slope * torch.where(fires, -z, z)).mean()) for slope in _SLOPES]
        slope = _SLOPES[int(np.argmin(losses))]
        outer = slope * outer
        if fires.any():
            firing = z[fires].sort().values
            at = slope * firing[int((1 - self._config.recall) * len(firing))]
            outer[:, -1] -= at / hidden[:, -1].mean().clamp(min=1e-6)
        z = hidden @ outer.T
        forces = [torch.sigmoid(z)[~fires].sum(), torch.sigmoid(-z)[fires].sum()]
        log_weight = (forces[0].clamp(min=1e-6) / forces[1].clamp(min=1e-6)).log().clamp(-3.0, 7.0)
        return inner.clone(), outer, log_weight

    def _some(self) -> tuple[Tensor, Tensor]:
        """(r / scale(r), fires) of a few training rows, evenly spaced."""
        x, fires = self._batch(self._rows.train[:: -(-len(self._rows.train) // _SOME_ROWS)])
        return x / _scale(self._checkpoint, self._layer, x), fires

    def _balanced(self, x: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        """The same predictor with hidden units of root mean square 1.

        One learning rate then suits all, and units that share a block of Q8_0 have the same magnitude.
        """
        size = self._torch.relu(x @ inner.T).square().mean(0).sqrt()
        size = self._torch.where(size > 0, size, 1.0)
        return inner / size[:, None], outer * size

    def _through(self, x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        """z in the stored type, with gradients as if nothing were rounded."""

        def rounded(values: Tensor) -> Tensor:
            return values + (_in_8_bits(values.detach()) - values.detach())

        if self._type != "Q8_0":
            return self._torch.relu(x @ inner.T) @ outer.T
        hidden = self._torch.relu(_in_8_bits(x) @ rounded(inner).T)
        return rounded(hidden) @ rounded(outer).T


@dataclass(frozen=True, slots=True)
class _Measured:
    threshold: float
    stored: Stored
    chosen: Figures
    figures: Figures


# ---------------------------------------------------------------- low rank


class _LowRank:
    """Low-rank linear approximations of the margins of a layer, as predictors.

    For dReLU, where two margins must be positive, there are two: the gate's alone, and the sum of both in units of
    their standard deviations.
    """

    def __init__(self, torch: Any, parts: tuple[Margins, ...], mean: Tensor, second: Tensor) -> None:
        self._torch = torch
        eye = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        # least squares solution of u . r = scale(r)
        self._constant = torch.linalg.solve(second + 1e-4 * second.trace() / len(mean) * eye, mean)
        covariance = second - torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt()
        wide = [(torch.from_numpy(part.weights).to(mean), torch.from_numpy(part.offset).to(mean)) for part in parts]
        scaled = [_in_deviations(weights, offset, root) for weights, offset in wide]
        self._bases = {"gate" if len(parts) > 1 else "": self._basis(*scaled[0], root, mean)}
        if len(parts) > 1:
            both = _in_deviations(sum(one[0] for one in scaled), sum(one[1] for one in scaled), root)
            self._bases["gate + up"] = self._basis(*both, root, mean)

    def _basis(self, weights: Tensor, offset: Tensor, root: Tensor, mean: Tensor) -> _Basis:
        spread = weights @ root
        squares, vectors = self._torch.linalg.eigh(spread.T @ spread)
        squares, vectors = squares.flip(0), vectors.flip(1)
        number = max(1, int((squares > 1e-10 * squares[0]).sum()))
        sizes = squares[:number].clamp(min=1e-300).sqrt()
        outer = spread @ vectors[:, :number] / sizes
        inner = outer.T @ weights
        return _Basis(inner, outer, sizes, inner @ mean, offset + weights @ mean)

    def forms(self, rank: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, in [rank, d_model], out [neurons, rank]) of every form with that number of units, float64."""
        torch = self._torch
        for name, basis in self._bases.items():
            for reach in (2.0, 4.0):  # standard deviations by which a unit stays active
                inner, outer, levels = basis.first(rank - 1)
                open_by = (reach * basis.sizes[: len(inner)] - levels).clamp(min=0)
                rest = basis.level - outer @ levels - outer @ open_by
                joined = (inner + open_by[:, None] * self._constant, outer)
                yield self._padded(f"{name} opened by {reach:g}".strip(), *joined, rest, rank)
            inner, outer, levels = basis.first((rank - 1) // 2)
            joined = (torch.cat([inner, -inner]), torch.cat([outer, -outer], 1))
            yield self._padded(f"{name} in pairs".strip(), *joined, basis.level - outer @ levels, rank)

    def _padded(self, name: str, inner: Tensor, outer: Tensor, rest: Tensor, rank: int) -> tuple[str, Tensor, Tensor]:
        """Order the units: the constant one last, in a block with the least important; padded with zero units."""
        torch = self._torch
        spare = rank - len(inner) - 1
        rows = torch.cat([inner, inner.new_zeros((spare, inner.shape[1])), self._constant[None]])
        columns = torch.cat([outer, outer.new_zeros((len(outer), spare)), rest[:, None]], 1)
        return name, rows, columns


@dataclass(frozen=True, slots=True)
class _Basis:
    """margins = outer . (inner . r - levels) + level; directions by descending share, sizes: their deviations."""

    inner: Tensor  # [directions, d_model]
    outer: Tensor  # [neurons, directions]
    sizes: Tensor  # [directions]
    levels: Tensor  # [directions], means of inner . r
    level: Tensor  # [neurons], means of the margins

    def first(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner[:number], self.outer[:, :number], self.levels[:number]


def _in_deviations(weights: Tensor, offset: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Margins in units of their standard deviations."""
    deviation = (weights @ root).square().sum(1).sqrt()
    deviation = deviation.where(deviation > 0, deviation.new_ones(()))
    return weights / deviation[:, None], offset / deviation


# ---------------------------------------------------------------- numbers


def _in_8_bits(values: Tensor) -> Tensor:
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


def _figures(fires: Tensor, every: Tensor, at: int) -> Figures:
    found, selected = int(fires[at:].sum()), int(every[at:].sum())
    active, total = int(fires.sum()), int(every.sum())
    return Figures(
        found / active if active else 1.0,
        found / selected if selected else 1.0,
        selected / total,
        active / total,
    )
