"""Rates at which this machine trains: a few real steps, timed, of a model of some layers with random weights."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from powerinfer.config import ModelConfig, SparsifyConfig
from powerinfer.errors import RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.layout import shapes
from powerinfer.prepare.corpus import Corpus, Piece
from powerinfer.progress import Progress, silent
from powerinfer.text.tokenizer import Tokenizer
from powerinfer_train.estimate import SHARE, Rates, memory, stage_costs
from powerinfer_train.recipes import RecipeStage, check
from powerinfer_train.torch_model import TorchModel
from powerinfer_train.training import HeldOutFigures, Sparsifier, fast_type, find_device, free_bytes

STEPS = 4  # of each stage; the first is not counted
LAYERS = 2  # of the model, fewer where memory is short
VOCAB = 32768  # at most: the head of a few layers would else be most of the work
_VECTORS = {"bias": 0.0, "delta_decay": -0.1}  # by the end of the name, where they are not 1
PEAK = 2048  # rows and columns of the matrices whose product says what the machine could do


def measure(config: ModelConfig, options: SparsifyConfig, progress: Progress = silent) -> Rates:
    """The rates of the stages of a recipe. progress: called with ("training", step, steps).

    RequestError for a model that cannot be trained, and where these layers need more memory than is free.
    """
    recipe = check(options, config)
    count = len(recipe.stages)
    cut = replace(config, vocab_size=min(config.vocab_size, VOCAB))
    device = find_device(options.device)
    free = free_bytes(device)
    for layers in range(min(LAYERS, config.n_layers), -1, -1):
        if not layers:
            raise RequestError(f"{free / 2**30:.1f} GiB are free, too few to train one layer of this model")
        cut = replace(cut, layers=config.layers[-layers:])
        if memory(cut, recipe, options.rows, options.window, fast_type(device).itemsize)[0].device < free:
            break
    ends: list[float] = []

    def tell(label: str, done: int, of: int) -> None:
        if label == "training":
            ends.append(time.perf_counter())
        progress(label, done, of)

    step = options.batch // options.window * options.window  # tokens: whole windows
    options = replace(options, tokens=STEPS * count * step, batch=step, own_text=0)
    text = _RandomText("random", (), cut.vocab_size, options.tokens + 8 * options.window)
    with tempfile.TemporaryDirectory() as folder:
        work = _Timed(cast(Checkpoint, _RandomModel(cut)), [text], options, Path(folder), tell)
        work.run()
    costs = [stage.flops * step for stage in stage_costs(cut, recipe, options.tokens, options.window)]
    took = [statistics.median(np.diff(ends[STEPS * at : STEPS * (at + 1)]).tolist()) for at in range(count)]
    rates = tuple(cost / seconds for cost, seconds in zip(costs, took, strict=True))
    return Rates(work.device.type, rates, peak(work.device, work.teacher.compute))


class _Timed(Sparsifier):
    """A training of STEPS steps of each stage, of which nothing is kept."""

    def _divided(self, stages: Sequence[RecipeStage]) -> list[tuple[RecipeStage, int]]:
        return [(stage, STEPS) for stage in stages]

    def evaluate(self, model: TorchModel) -> HeldOutFigures:
        return HeldOutFigures(1.0, ())

    def _resume(self) -> tuple[int, dict[str, torch.Tensor]]:
        return 0, {}

    def _keep(self, *_: object) -> None:
        pass

    def text_of(self, checkpoint: Checkpoint) -> tuple[Tokenizer, None]:
        return cast(Tokenizer, _NoTokenizer()), None


class _NoTokenizer:
    """Tokenizer for the windows of a text that is numbers already."""

    bos_id, add_bos = None, False


@dataclass(frozen=True)
class _RandomText(Corpus):
    """Token ids below `vocab`."""

    vocab: int = 0
    tokens: int = 0

    def pieces(self) -> Iterator[Piece]:
        yield np.random.default_rng(0).integers(0, self.vocab, self.tokens, np.int32)


class _RandomModel:
    """Checkpoint of a training, with random weights."""

    source, quantize, fingerprint, path = "folder", None, "", Path("random")

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._shapes = dict(shapes(config))
        self._rng = np.random.default_rng(0)
        self._values: NDArray[np.float32] = np.zeros(0, np.float32)

    def is_transposed(self, name: str) -> bool:
        return False

    def has(self, name: str) -> bool:
        return name in self._shapes

    def take(self, name: str) -> _RandomModel:
        shape = self._shapes[name]
        value = next((value for end, value in _VECTORS.items() if name.endswith(end)), 1.0)
        vector = np.full(shape, value, np.float32)
        matrix = self._rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        self._values = matrix if len(shape) > 1 else vector
        return self

    def float32(self) -> NDArray[np.float32]:
        return self._values

    def release(self) -> None:
        pass


def hours(config: ModelConfig, options: SparsifyConfig) -> float:
    """About how long a training takes here: SHARE of the rate of large products, which is measured in a second."""
    device = find_device(options.device)
    costs = stage_costs(config, check(options, config), options.tokens, options.window)
    total = sum(stage.tokens * stage.flops for stage in costs)
    return total / (SHARE * peak(device, fast_type(device))) / 3600


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the product of two large matrices, the fastest within a second: AMX takes half of one to get there."""
    a = torch.randn(PEAK, PEAK, device=device).to(dtype)
    best, began = math.inf, time.perf_counter()
    while time.perf_counter() - began < 1 or best == math.inf:
        begin = time.perf_counter()
        product = a @ a
        float(product[0, 0])  # waits for a GPU
        best = min(best, time.perf_counter() - begin)
    return 2 * PEAK**3 / best
