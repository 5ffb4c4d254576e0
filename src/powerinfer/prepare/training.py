"""Training the predictors of a model: the size of each layer is found by training, within a limit for all together.

A layer starts with a size from its sparsity and skew; the size grows or shrinks, along a ladder of multiples of 32,
until it is the smallest at which the predictor selects the target share of the firing neurons (recall) with at most the
allowed false positives, as a share of all neurons (lost). Growth also stops if it gains nothing. If all layers together
exceed their share of the model's bytes, sizes are lowered step by step where that loses least sparsity per byte.

Every fitted size of a layer is saved in the folder of prepared files until the predictor is complete, so an interrupted
run resumes; sizes fitted with other samples or options are not reused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from powerinfer.config import ModelConfig, TrainConfig
from powerinfer.errors import ModelError, PowerInferError, RequestError, install_extra
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.predictor_file import PredictorFile, open_predictor, write_predictor
from powerinfer.formats.prepared import Kind, PreparedFile, prepared_folder
from powerinfer.formats.quant import Float32, block_type, dequantize
from powerinfer.formats.samples_file import SamplesFile, open_samples
from powerinfer.prepare.fitting import Fitted, LayerFit, Stored, split_rows
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.selection import check_experts, check_neurons

MIN_ROWS = 512
"""Minimum number of samples for training and measuring."""

_NO_TORCH = f"this needs torch: {install_extra('train')}"
_METHOD = 4
"""Incremented when the same samples and options give another predictor."""

_RUNG = 32  # units: whole blocks of Q8_0
_WORTH = 0.97  # growth continues while the loss falls below this fraction of the previous one
_UNFINISHED = re.compile(r"predictor\.\d+\.\d+\.safetensors(\.part)?")


@dataclass(frozen=True)
class TrainedPredictors:
    """The result of `train`. seconds: of the work; resumed: sizes of layers that an earlier run had finished;
    notes: lines for the user."""

    file: PredictorFile
    seconds: float
    resumed: int
    notes: tuple[str, ...]


def describe(file: PredictorFile) -> dict[str, Any]:
    """Trained predictors as a JSON document: path, bytes, type, and the figures of their training."""
    training = file.training or {}
    layers = training.get("layers", [])
    shown = ("recall", "candidate_fraction", "active_fraction")
    means = {name: mean(layers, name) if layers else None for name in shown}
    names = ("recall_target", "held_out_tokens", "share_of_model", "layers")
    figures = {name: training.get(name) for name in names}
    return {"path": str(file.path), "bytes": file.nbytes, "type": file.type, **means, **figures}


def mean(layers: Sequence[Mapping[str, float]], name: str) -> float:
    """A figure of the layers (`PredictorFile.training`), on average."""
    return sum(one[name] for one in layers) / len(layers)


def current(checkpoint: Checkpoint, prepared: str | None, config: TrainConfig) -> PredictorFile | None:
    """The existing predictors, if they were made from the same samples with the same options."""
    check(checkpoint, config)
    with suppress(ModelError):
        file, samples = open_predictor(checkpoint, prepared), open_samples(checkpoint, prepared)
        if (file.training or {}).get("key") == _key(samples, config, _type(checkpoint, config)):
            return file
    return None


def check(checkpoint: Checkpoint, config: TrainConfig) -> None:
    """RequestError if the model cannot have predictors, or an option is out of its range."""
    if checkpoint.config.experts:
        check_experts("predicted", checkpoint)
    else:
        check_neurons(checkpoint.config, "train")
    if not checkpoint.config.experts and not checkpoint.config.rectified:
        raise RequestError(
            f"activations of {checkpoint.config.activations_never_zero} are never exactly zero, so there is nothing to "
            "predict: use --selector threshold, which needs no predictor"
        )
    if checkpoint.config.competing:
        raise RequestError(
            f"train: which neurons of the activation {checkpoint.config.competing} count is not predicted so far: use "
            "--selector exact"
        )
    for name, low, high in (("recall", 0.5, 0.9999), ("lost", 0.0, 1.0), ("share", 0.0, 1.0), ("lr", 0.0, 1.0)):
        value = getattr(config, name)
        if not (low <= value <= high and value > 0) and not (name == "lost" and value == 0):
            raise RequestError(f"--{name} {value} must be between {low or 0:g} and {high:g}")
    if config.steps < 0 or config.batch < 1 or config.seed < 0:
        raise RequestError("--steps and --seed cannot be negative, and --batch must be at least 1")
    if config.type == "q8_0" and checkpoint.config.d_model % 32:
        raise RequestError(f"rows of {checkpoint.config.d_model} weights are not whole blocks of Q8_0; use --type f16")
    _ladder(checkpoint, config)


def train(
    checkpoint: Checkpoint,
    prepared: str | None,
    config: TrainConfig,
    progress: Progress = silent,
    threads: int = 0,
) -> TrainedPredictors:
    """Make the predictors of a model from its samples, and write them into the folder `prepared` (None: beside it).

    threads: of the CPU, 0 for all. Memory: that of one layer (`LayerFit`). The same samples, options, device and number
    of threads give the same file. RequestError for invalid options, ModelError for unusable samples, PowerInferError
    without torch or if a file cannot be written; the next run reuses the finished sizes.
    """
    begin = time.perf_counter()
    check(checkpoint, config)
    _import_torch()
    device = _device(config)
    samples = open_samples(checkpoint, prepared)
    if samples.rows < MIN_ROWS:
        raise RequestError(
            f"{samples.path} holds {samples.rows} samples and at least {MIN_ROWS} are needed: profile a longer corpus"
        )
    with torch_threads(threads):
        work = _Work(checkpoint, prepared, config, samples, device, progress)
        file = work.run()
    return TrainedPredictors(file, time.perf_counter() - begin, work.resumed, tuple(work.notes))


def model_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the model's weights in the types they are used in, without predictors."""
    total = 0
    for name, _, shape, nbytes in checkpoint.tensor_list():
        if ".predictor_" in name:
            continue
        kind = block_type(checkpoint.taken_type(name.removesuffix("_rows")))
        fits = checkpoint.quantize is not None and shape[-1] % kind.block == 0
        total += math.prod(shape[:-1]) * kind.row_bytes(shape[-1]) if fits else nbytes
    return total


@dataclass(frozen=True)
class _KeptPoint:
    key: str
    point: Fitted


class _Work:
    """One run: fits the points, chooses the sizes, writes the file."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prepared: str | None,
        config: TrainConfig,
        samples: SamplesFile,
        device: str,
        progress: Progress,
    ) -> None:
        self.notes: list[str] = []
        self.resumed = 0
        self._checkpoint, self._prepared, self._config = checkpoint, prepared, config
        self._samples, self._device, self._progress = samples, device, progress
        self._type = _type(checkpoint, config)
        self._key = _key(samples, config, self._type)
        self._rows = split_rows(samples.rows, samples.windows)
        self._points: dict[int, dict[int, Fitted]] = {layer: {} for layer in checkpoint.config.predicted_layers}
        self._layer: tuple[int, LayerFit] | None = None
        self._model_bytes = model_bytes(checkpoint)
        self._budget = int(config.share * self._model_bytes)
        self._ladder = _ladder(checkpoint, config)
        self._done = 0.0

    def run(self) -> PredictorFile:
        ranks = {}
        for layer in self._points:
            rank = self._search(layer)
            self._point(layer, rank)  # now, while the layer's `LayerFit` is in memory; it may not have been fitted yet
            ranks[layer] = rank
        lowered = self._lowered(ranks)
        for layer, rank in lowered.items():
            self._point(layer, rank)
        self._layer = None
        short = [n for n, rank in lowered.items() if not self._met(self._points[n][rank])]
        if lowered != ranks:
            changed = sum(lowered[layer] != rank for layer, rank in ranks.items())
            self.notes.append(f"{changed} layers were made smaller to keep {self._config.share:.0%} of the model")
        if short:
            self.notes.append(
                f"{len(short)} of {len(ranks)} layers have more than {self._config.lost:.1%} false positives"
            )
        file = self._write(lowered)
        self._remove_unfinished()
        return file

    # ------------------------------------------------------------ sizes

    def _search(self, layer: int) -> int:
        """The smallest rank that meets the target, or the one beyond which growth gains nothing."""
        ladder = self._ladder
        fit = self._fit(layer)
        if fit.constant:
            self._point(layer, ladder[0])
            return ladder[0]
        # The target is missed at low and below, and met at high and above.
        low, high = -1, len(ladder)
        at = min(len(ladder) - 1, bisect_left(ladder, fit.start_rank()))
        untrained = bisect_left(ladder, True, at, key=lambda rank: fit.low_rank_lost(rank) <= self._config.lost)
        if untrained < len(ladder):  # large enough even without training, which costs most of the time
            high, at = untrained, max(0, untrained - 1)
        step = 1
        while high - low > 1:
            if self._met(self._point(layer, ladder[at])):
                high = at
            elif low >= 0 and high == len(ladder) and not self._worth(layer, low, at):
                return ladder[low]
            else:
                low = at
            if low < 0:  # shrink, by growing steps, until the target is missed; then bisect
                at = max(0, high - step)
            elif high == len(ladder):
                at = min(len(ladder) - 1, low + step)
            else:
                at = (low + high) // 2
            step *= 2
        return ladder[min(high, len(ladder) - 1)]

    def _met(self, point: Fitted) -> bool:
        return point.chosen.lost <= self._config.lost

    def _worth(self, layer: int, before: int, after: int) -> bool:
        """Whether the larger of two sizes, both of which miss the target, is enough better to continue growing."""
        small, large = (self._points[layer][self._ladder[at]].chosen.lost for at in (before, after))
        return large <= _WORTH * small

    def _lowered(self, ranks: dict[int, int]) -> dict[int, int]:
        """The ranks, lowered until they fit the budget, each time where the expected loss per byte is least."""
        ranks, nbytes = dict(ranks), partial(_bytes, self._checkpoint.config, self._type)
        total = sum(nbytes(layer, rank) for layer, rank in ranks.items())
        while total > self._budget:
            steps = []
            for layer, rank in ranks.items():
                below = self._ladder.index(rank) - 1
                if below >= 0:
                    lower = self._ladder[below]
                    saved = nbytes(layer, rank) - nbytes(layer, lower)
                    steps.append(((self._expected(layer, lower) - self._expected(layer, rank)) / saved, layer, lower))
            _, layer, lower = min(steps)
            total -= nbytes(layer, ranks[layer]) - nbytes(layer, lower)
            ranks[layer] = lower
        return ranks

    def _expected(self, layer: int, rank: int) -> float:
        """The expected loss of a rank, interpolated between known ones and rank 0, which selects all neurons."""
        measured = sorted((one, point.chosen.lost) for one, point in self._points[layer].items())
        active = self._points[layer][measured[0][0]].chosen.active_fraction
        ends = [(0, 1 - active), *measured]
        return float(np.interp(rank, [one for one, _ in ends], [lost for _, lost in ends]))

    # ------------------------------------------------------------ points

    def _fit(self, layer: int) -> LayerFit:
        """The layer's `LayerFit`; only one is in memory at a time."""
        if self._layer is None or self._layer[0] != layer:
            self._layer = None
            self._samples.file.check()
            options = self._rows, self._config, self._type, self._device
            self._layer = (layer, LayerFit(self._checkpoint, layer, self._samples, *options))
        return self._layer[1]

    def _point(self, layer: int, rank: int) -> Fitted:
        """The point, fitted or from an earlier run."""
        points = self._points[layer]
        if rank not in points:
            point = self._saved_point(layer, rank)
            if point is None:
                fit = self._fit(layer)
                point, weights = fit.fit(rank, lambda share: self._tell(layer, len(points) + share))
                self._keep(layer, point, weights)
            else:
                self.resumed += 1
            points[rank] = point
        self._tell(layer, len(points))
        return points[rank]

    def _tell(self, layer: int, points: float) -> None:
        """Estimated progress after that number of ranks of a layer: four are usual."""
        self._done = max(self._done, list(self._points).index(layer) + 1 - 0.6**points)
        total = 1000 * len(self._points)
        self._progress("training predictors", min(total, int(1000 * self._done)), total)

    def _place(self, layer: int, rank: int) -> PreparedFile:
        kind = Kind(f"predictor.{layer}.{rank}", "part of a predictor", "train", in_experts=True)
        return PreparedFile(kind, self._checkpoint, self._prepared)

    def _keep(self, layer: int, point: Fitted, weights: Stored) -> None:
        description = {"key": self._key, "point": asdict(point)}
        tensors = dict(zip(("in", "out"), weights, strict=True))
        place = self._place(layer, point.predictor.rank)
        with place.write(description, [(name, "U8", (data.size,)) for name, data in tensors.items()]) as write:
            for name, data in tensors.items():
                write(name, data.reshape(-1))

    def _saved_point(self, layer: int, rank: int) -> Fitted | None:
        """The point saved by an earlier run with the same key."""
        try:
            place = self._place(layer, rank)
            description, tensors, _ = place.read()
            saved = place.described(_KeptPoint, description)
        except ModelError:
            return None
        same = saved.key == self._key and {t.shape for t in tensors.values()} == self._shapes(layer, rank)
        return saved.point if same and saved.point.predictor.rank == rank else None

    def _shapes(self, layer: int, rank: int) -> set[tuple[int, ...]]:
        kind, config = block_type(self._type), self._checkpoint.config
        return {(rank * kind.row_bytes(config.d_model),), (config.separable[layer] * kind.row_bytes(rank),)}

    def _weights(self, layer: int, rank: int) -> tuple[Float32, Float32]:
        """Weights in and out as float32; converted back to their type they give the same bytes."""
        _, tensors, file = self._place(layer, rank).read()
        file.check()
        config = self._checkpoint.config
        shapes = {"in": (rank, config.d_model), "out": (config.separable[layer], rank)}
        inner, outer = (
            dequantize(tensors[name].data.reshape(shape[0], -1), self._type).reshape(shape)
            for name, shape in shapes.items()
        )
        return inner, outer

    # ------------------------------------------------------------ the file

    def _write(self, ranks: dict[int, int]) -> PredictorFile:
        config = self._checkpoint.config
        points = {layer: self._points[layer][rank] for layer, rank in ranks.items()}
        total = sum(_bytes(config, self._type, layer, rank) for layer, rank in ranks.items())
        training = {
            "key": self._key,
            "recall_target": self._config.recall,
            "lost_target": self._config.lost,
            "type": self._type,
            "seed": self._config.seed,
            "layers": [_point_document(layer, point) for layer, point in points.items()],
            "bytes": total,
            "share_of_model": total / self._model_bytes,
            "trained_tokens": len(self._rows.train),
            "held_out_tokens": len(self._rows.choose) + len(self._rows.report),
        }
        weights = (self._weights(layer, rank) for layer, rank in ranks.items())
        predictors = [points[layer].predictor if layer in points else None for layer in range(config.n_layers)]
        write_predictor(self._checkpoint, self._prepared, self._type, predictors, weights, training)
        return open_predictor(self._checkpoint, self._prepared)

    def _remove_unfinished(self) -> None:
        with suppress(OSError):
            for path in prepared_folder(self._checkpoint.path, self._prepared).iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    path.unlink()


def _point_document(layer: int, point: Fitted) -> dict[str, Any]:
    return {
        "layer": layer,
        "rank": point.predictor.rank,
        **asdict(point.figures),
        "method": point.method,
        "svd_recall": point.svd.recall,
        "svd_candidate_fraction": point.svd.candidate_fraction,
        "svd_form": point.svd_form,
        "steps": point.steps,
    }


def _ladder(checkpoint: Checkpoint, config: TrainConfig) -> list[int]:
    """The ranks to try: in steps of 32, from 256 on of an eighth to a quarter.

    RequestError if even the smallest predictors exceed their share.
    """
    d_model = checkpoint.config.d_model
    rungs, step = [min(_RUNG, d_model)], _RUNG
    while rungs[-1] + step <= d_model:
        rungs.append(rungs[-1] + step)
        if rungs[-1] >= 8 * step:
            step *= 2
    if rungs[-1] < d_model // _RUNG * _RUNG:  # as many units as dimensions: the maximum of the engine
        rungs.append(d_model // _RUNG * _RUNG)
    kind, neurons = _type(checkpoint, config), checkpoint.config.separable
    largest = neurons.index(max(neurons))
    sizes = {rank: _bytes(checkpoint.config, kind, largest, rank) for rank in rungs}
    total = model_bytes(checkpoint)
    budget = int(config.share * total)
    least = sum(_bytes(checkpoint.config, kind, layer, rungs[0]) for layer in checkpoint.config.predicted_layers)
    if least > budget:
        raise RequestError(
            f"the smallest predictors take {least / 1e6:.2f} MB, more than {config.share:.0%} of the model's "
            f"{total / 1e6:.2f} MB: --share {math.ceil(100 * least / total) / 100:.2f} would do"
        )
    room = budget - least + sizes[rungs[0]]
    return [rank for rank in rungs if sizes[rank] <= room]


def _bytes(config: ModelConfig, type_name: str, layer: int, rank: int) -> int:
    """Bytes of the predictor of a layer."""
    kind = block_type(type_name)
    return rank * kind.row_bytes(config.d_model) + config.separable[layer] * kind.row_bytes(rank)


def _type(checkpoint: Checkpoint, config: TrainConfig) -> str:
    if config.type != "auto":
        return config.type.upper()
    return "Q8_0" if checkpoint.config.d_model % 32 == 0 else "F16"


def _key(samples: SamplesFile, config: TrainConfig, type_name: str) -> str:
    """Everything but the model that predictors depend on; the device is deliberately not in the key."""
    options = {**asdict(config), "type": type_name}
    del options["device"]
    identity = [samples.file.size, samples.file.modified_ns, samples.rows, samples.details]
    facts = {"method": _METHOD, "samples": identity, "options": options}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def need_torch() -> None:
    """PowerInferError with the command that installs torch, if it is missing. Does not import it."""
    from importlib.util import find_spec

    with suppress(ValueError):  # of a module that was put out of reach
        if find_spec("torch") is not None:
            return
    raise PowerInferError(_NO_TORCH)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise PowerInferError(_NO_TORCH) from None
    return torch


def _device(config: TrainConfig) -> str:
    has = _import_torch().cuda.is_available()
    if config.device == "cuda" and not has:
        raise RequestError("--device cuda: torch finds no GPU here; use --device cpu")
    return "cuda" if has and config.device != "cpu" else "cpu"


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """A context in which torch uses that number of CPU threads; 0: all that the process may use."""
    from powerinfer.kernels import cpu

    torch = _import_torch()
    before = torch.get_num_threads()
    torch.set_num_threads(cpu.choose_threads(number)[0])
    try:
        yield
    finally:
        torch.set_num_threads(before)
