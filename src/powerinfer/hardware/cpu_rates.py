"""The rates of this CPU in decoding, from the executor's own operators over random weights that no cache holds.

Samples of every kind are made first: layers of all weight types, narrow layers, attention over a long context, FFNs of
which chosen fractions of the neurons fire, of two widths, so that a row's fixed time and its bytes part. Then all run
in turn, round by round. Together they read more than any cache holds, so each finds its weights in memory, and what
other programs do meanwhile slows all of them alike. Rates are medians over the rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import EngineConfig, FfnConfig, ModelConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.cpu_ffn import CpuFfn
from powerinfer.errors import PowerInferError
from powerinfer.formats.bundle_memory import ApartBundles, apart, apart_bytes, own_pages, owned
from powerinfer.formats.quant import block_type
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import FLOAT_TYPES, NATIVE_TYPES
from powerinfer.hardware.description import RATED_ROWS
from powerinfer.hardware.samples import HEAD_DIM, FitGroup, Samples, figure, fit_rows, wire
from powerinfer.kernels import cpu
from powerinfer.neurons import BundleLayout, Predictor
from powerinfer.progress import Progress, silent
from powerinfer.system import available_memory


@dataclass(frozen=True)
class Effort:
    """Sizes of the measurements. Tests use smaller ones."""

    wide: tuple[int, int] = (2048, 3072)  # d_model, d_ff of the layers of each type
    vocab: int = 4096  # rows of the head of each type
    narrow: tuple[int, int] = (512, 1408)
    rows: tuple[tuple[int, int], ...] = ((1024, 4096), (4096, 2048))  # d_model, d_ff of sparse FFNs
    context: int = 2048  # tokens that attention reads
    warm_mib: tuple[float, ...] = (16, 32, 64, 96, 128, 192)  # weights of the narrow layers that caches may hold
    free_bytes: int = 5 << 29  # that must be free
    rounds: int = 10  # timed; one more warms up
    seconds: float = 1.2  # after which a slow machine gets only the minimum of rounds
    disk_bytes: int = 64 << 20
    disk_seconds: float = 0.1  # of each size of read


FULL = Effort()

FRACTIONS = (0.02, 0.1, 0.5)
"""Shares of the neurons of sparse FFNs that fire."""

WAYS = ("exact", "predicted")

_TYPES = sorted(NATIVE_TYPES)
_RANK = 128  # of the predictors
_FEW = 256  # rows of the embeddings
_ATTENTION_LAYERS = 16
_LEAST_ROUNDS = 4
_REPEATS = 5  # of a step that caches may hold; two more warm up
_PARKED = 2e-3  # seconds after which the threads of another sample no longer spin
_HEADS, _KV_HEADS = 32, 8  # of the attention over a long context
_KV_BYTES = 2 * 2 * _KV_HEADS * HEAD_DIM  # of a token in a layer: keys and values in F16
_OPERATORS = ("attention_input", "attention", "project", "ffn")  # of a layer


def cpu_rates(engine: EngineConfig, effort: Effort, progress: Progress = silent) -> dict[str, Any]:
    """The fields of a `Device` from `dense_gb_s` on. PowerInferError where memory is short."""
    free = available_memory()
    if free and free < effort.free_bytes:
        raise PowerInferError(
            f"measuring this machine takes {effort.free_bytes >> 20} MiB of memory and {free >> 20} MiB are free; "
            "end other programs first"
        )
    with ExitStack() as stack:
        return _CpuSamples(engine, effort, progress, stack).rates()


def _rate(nbytes: float, seconds: float, fixed_us: float) -> float:
    """GB/s of a measurement, fixed times subtracted, at most half of it."""
    return nbytes / max(seconds - 1e-6 * fixed_us, 0.5 * seconds) / 1e9


def fit_cache(sizes: Sequence[int], gains: Sequence[float]) -> tuple[int, float]:
    """(bytes, gain) of `Device.warm` that best match the gains of samples of these sizes; (0, 1.0) for no gain."""
    gain = max(gains)
    if gain < 1.05:
        return 0, 1.0

    def miss(size: float) -> float:
        colds = [min(1.0, max(0.0, nbytes / size - 1)) for nbytes in sizes]
        predicted = [1 / (cold + (1 - cold) / gain) for cold in colds]
        return sum(math.log(measured / by) ** 2 for measured, by in zip(gains, predicted, strict=True))

    low, high = min(sizes), max(sizes)
    tried: list[float] = [low / 2 * (high / low) ** (step / 100) for step in range(101)]
    best = min(tried, key=miss)
    return round(best), gain


class _TimedSteps:
    """Steps of one token with an executor, and the seconds of its operators in each."""

    def __init__(self, executor: CpuExecutor, tokens: int = 1, logits: bool = False) -> None:
        """tokens: of the context, with the one that is decoded; logits: the heads are computed."""
        self.executor = executor
        self._position, self._logits = tokens - 1, logits
        self._seconds: list[list[float]] = []
        self._kinds: list[str] = []

    def run(self, token: int) -> float:
        """Decode a token; seconds of the step beside layers and heads."""
        begin = time.perf_counter()
        self.executor.forward(self.batch(token))
        rest = time.perf_counter() - begin
        self.read()
        return rest - sum(seconds for kind, seconds in self._last() if kind != "embed")

    def read(self) -> None:
        """Take the operators' seconds as those of a step."""
        times = self.executor.operator_seconds()
        self._kinds = [kind for kind, _ in times]
        self._seconds.append([seconds for _, seconds in times])

    def forget(self) -> None:
        """Drop the steps so far."""
        self._seconds.clear()

    def batch(self, token: int) -> Batch:
        pages = np.arange(self._position // cpu.PAGE + 1, dtype=np.int32)[None]
        row, tokens = np.zeros(1, np.int32), np.full(1, token % _FEW, np.int32)
        return Batch(tokens, np.full(1, self._position, np.int32), row, pages, row if self._logits else row[:0])

    def seconds(self, *kinds: str) -> NDArray[np.float64]:
        """Median seconds of each operator of these kinds."""
        medians = np.median(np.array(self._seconds), axis=0)
        return np.asarray(medians[[kind in kinds for kind in self._kinds]])

    def layer_seconds(self) -> NDArray[np.float64]:
        """Median seconds of the operators of each layer."""
        return np.asarray(self.seconds(*_OPERATORS).reshape(-1, len(_OPERATORS)).sum(axis=1))

    def _last(self) -> Iterator[tuple[str, float]]:
        return zip(self._kinds, self._seconds[-1], strict=True)


@dataclass(frozen=True)
class _SparseLayer:
    """A layer of a sparse sample."""

    gate_type: str
    group: FitGroup


class _SparseSteps(_TimedSteps):
    """The same of sparse FFNs, with the rows and bytes that they read."""

    def __init__(self, executor: CpuExecutor, layers: Sequence[_SparseLayer]) -> None:
        super().__init__(executor)
        self._layers = layers
        self._counts: list[list[tuple[int, int]]] = []

    def read(self) -> None:
        super().read()
        self._counts.append([])
        for layer, ffn in zip(self._layers, self.executor.ffns.values(), strict=True):
            counts = ffn.counts()
            self._counts[-1].append((counts["rows"], counts["bytes"] - layer.group.dense_bytes))
            ffn.clear()

    def forget(self) -> None:
        super().forget()
        self._counts.clear()

    def times(self, gate_type: str) -> list[tuple[FitGroup, float, float, float]]:
        """(group, rows, bytes, seconds) of the layers of a type, medians."""
        counts = np.median(np.array(self._counts), axis=0)
        return [
            (layer.group, float(rows), float(nbytes), float(seconds))
            for layer, (rows, nbytes), seconds in zip(self._layers, counts, self.seconds("ffn"), strict=True)
            if layer.gate_type == gate_type
        ]


@dataclass(frozen=True)
class _RatedNeurons:
    """Gated neurons of one type; predictor: its inner and outer matrix."""

    layout: BundleLayout
    bundles: NDArray[np.uint8]
    gate: RawTensor
    predictor: tuple[RawTensor, RawTensor]

    def attach(self, ffn: CpuFfn, way: str, fraction: float) -> None:
        """Give an FFN a copy of the neurons, that fraction of which fires.

        Gates are normal, of variance 1: the quantile is the threshold that lets the fraction pass. The predictor's
        guesses are about normal, of variance 1/2.
        """
        quantile = NormalDist().inv_cdf(1 - fraction)
        predictor = None
        if way == "predicted":
            predictor = Predictor(_RANK, quantile * math.sqrt(0.5), 0), *self.predictor
        ffn.add_bundles(self.layout, self._rows(way), threshold=quantile, predictor=predictor)
        ffn.set_ways({1: way})

    def _rows(self, way: str) -> NDArray[np.uint8] | ApartBundles:
        """A copy in the form in which a load has neurons for a way."""
        if way == "predicted":
            return owned(self.bundles)
        return apart(self.layout, self.bundles, own_pages(apart_bytes(self.layout, len(self.bundles))))

    def group(self, way: str) -> FitGroup:
        """The layers of a way."""
        first, kind = ([self.gate], self.gate.type) if way == "exact" else (self.predictor, "Q8_0")
        return FitGroup(self.layout.d_model, way, kind, sum(matrix.data.nbytes for matrix in first))


class _CpuSamples(Samples):
    """All samples, in memory at once."""

    def __init__(self, engine: EngineConfig, effort: Effort, progress: Progress, stack: ExitStack) -> None:
        """stack: closes the samples."""
        total = len(_TYPES) + 2 + len(effort.rows) * len(RATED_ROWS) + 2
        super().__init__("measuring the CPU", total, effort.context, progress)
        self._effort = effort
        self._engine = replace(EngineConfig(), threads=engine.threads, isa=engine.isa, max_batch=1)
        self._stack = stack
        self._pack_gb_s = 0.0
        self._wide = self._sample_of_types()
        self._narrow = self._narrow_sample()
        self._attention = self._attention_sample()
        self._sparse = [self._sparse_sample(shape) for shape in effort.rows]

    def rates(self) -> dict[str, Any]:
        """Measure, as `cpu_rates` says."""
        self._run_in_turn()
        effort = self._effort
        d_model, d_ff = effort.wide
        row = {name: block_type(name).row_bytes(d_model) for name in _TYPES}
        nbytes = {name: (4 * d_model + 3 * d_ff) * row[name] for name in _TYPES}
        layers = dict(zip(_TYPES, self._wide.layer_seconds(), strict=True))
        heads = dict(zip(_TYPES, self._wide.seconds("head"), strict=True))
        narrow = float(self._narrow.layer_seconds().mean())
        op_us = self._operator_us(nbytes["Q8_0"], layers["Q8_0"], narrow)
        dense = {name: _rate(nbytes[name], layers[name], len(_OPERATORS) * op_us) for name in _TYPES}
        head = {name: _rate(effort.vocab * row[name], heads[name], op_us) for name in _TYPES}
        bundle, row_ns, extra = {}, {}, []
        for name in RATED_ROWS:
            fit = fit_rows([time for sample in self._sparse for time in sample.times(name)], max(dense.values()))
            bundle[name], row_ns[name] = fit.gb_s, fit.row_ns
            for group, seconds in fit.fixed.items():
                extra.append(1e6 * seconds - group.dense_bytes / (1e3 * dense[group.dense_type]) - op_us)
        attention, kv_bytes = float(median(self._attention.seconds("attention"))), effort.context * _KV_BYTES
        step_us, size, gain = self._warm_rates(narrow)
        return {
            "dense_gb_s": {name: figure(rate) for name, rate in dense.items()},
            "head_gb_s": {name: figure(rate) for name, rate in head.items()},
            "bundle_gb_s": {name: figure(rate) for name, rate in bundle.items()},
            "row_ns": {name: figure(value) for name, value in row_ns.items()},
            "op_us": figure(op_us),
            "sparse_us": figure(max(0.0, median(extra))),
            "step_us": figure(max(0.0, step_us)),
            "kv_gb_s": figure(_rate(kv_bytes, attention, op_us)),
            "pack_gb_s": figure(self._pack_gb_s),
            "cache_bytes": size,
            "cache_gain": figure(gain),
        }

    def _operator_us(self, wide_bytes: float, wide_s: float, narrow_s: float) -> float:
        """Fixed time of an operator: what layers of two widths take, separated into bytes and operators."""
        narrow_bytes = self._narrow_bytes
        per_byte = (wide_s - narrow_s) / (wide_bytes - narrow_bytes)
        return min(max(0.0, narrow_s - narrow_bytes * per_byte), narrow_s) * 1e6 / len(_OPERATORS)

    @property
    def _narrow_bytes(self) -> int:
        d_model, d_ff = self._effort.narrow
        return (4 * d_model + 3 * d_ff) * block_type("Q8_0").row_bytes(d_model)

    # ------------------------------------------------------------ steps

    def _run_in_turn(self) -> None:
        """Rounds of all samples."""
        self.tick()
        samples = (self._wide, self._narrow, self._attention, *self._sparse)
        for round_, _ in enumerate(self._paced()):
            for sample in samples:
                time.sleep(_PARKED)
                sample.run(round_)
                if not round_:
                    sample.forget()

    def _paced(self) -> Iterator[None]:
        """The rounds, one of warm-up included; fewer on a slow machine."""
        begin = time.perf_counter()
        for round_ in range(1 + self._effort.rounds):
            if round_ > _LEAST_ROUNDS and time.perf_counter() - begin > self._effort.seconds:
                return
            yield

    def _warm_rates(self, cold: float) -> tuple[float, int, float]:
        """(step_us, cache_bytes, cache_gain): from step after step of the narrow layers, and of the first of them.
        cold: seconds of such a layer from memory."""
        self.tick()
        steps, executor = self._narrow, self._narrow.executor
        beside = [steps.run(token) for token in range(2 + _REPEATS)][2:]
        gains, sizes = [], [round(mib * (1 << 20)) for mib in self._effort.warm_mib]
        batch = steps.batch(0)
        executor.embedded(batch)
        for size in sizes:
            layers = max(1, round(size / self._narrow_bytes))
            steps.forget()
            for repeat in range(2 + _REPEATS):
                executor.run_part(batch, None, executor.ffns[layers - 1].op.number + 1)
                steps.read()
                if repeat < 2:
                    steps.forget()
            gains.append(cold / float(steps.layer_seconds()[:layers].mean()))
        return 1e6 * median(beside), *fit_cache(sizes, gains)

    # ------------------------------------------------------------ samples

    def _sample_of_types(self) -> _TimedSteps:
        """A layer and a head of each type."""
        d_model, vocab = self._effort.wide[0], self._effort.vocab
        executor = self._executor(self.config(self._effort.wide, len(_TYPES), vocab=vocab))
        heads = []
        for layer, name in enumerate(_TYPES):
            self.tick()
            square, up, down, head = self._parts(name, self._effort.wide, vocab)
            heads.append(executor.matrix(head))
            begin = time.perf_counter()
            wire(executor, d_model, [layer], [square] * 3, square, [up, up, down])
            nbytes = 4 * square.data.nbytes + 3 * up.data.nbytes
            # what is packed as it is multiplied is written to caches, and takes as long with the product
            self._pack_gb_s = max(self._pack_gb_s, nbytes / (time.perf_counter() - begin) / 1e9)
        for matrix in heads:
            executor.head(self._norm(executor), matrix)
        return _TimedSteps(executor, logits=True)

    def _narrow_sample(self) -> _TimedSteps:
        """Layers of Q8_0 as large in all as any cache that is looked for."""
        self.tick()
        d_model = self._effort.narrow[0]
        layers = max(1, round(max(self._effort.warm_mib) * (1 << 20) / self._narrow_bytes))
        executor = self._executor(self.config(self._effort.narrow, layers, vocab=_FEW))
        square, up, down, _ = self._parts("Q8_0", self._effort.narrow)
        wire(executor, d_model, range(layers), [square] * 3, square, [up, up, down])
        return _TimedSteps(executor)

    def _attention_sample(self) -> _TimedSteps:
        """Attention over keys and values of the usual type, four heads of queries to one of keys."""
        self.tick()
        d_model, layers, tokens = 128, _ATTENTION_LAYERS, self._effort.context
        config = self.config((d_model, d_model), layers, _HEADS, _KV_HEADS, _FEW)
        executor = self._executor(config, tokens // cpu.PAGE)
        q, kv = (self._matrix("F16", rows * HEAD_DIM, d_model) for rows in (_HEADS, _KV_HEADS))
        out, square = (self._matrix("F16", d_model, cols) for cols in (_HEADS * HEAD_DIM, d_model))
        wire(executor, d_model, range(layers), [q, kv, kv], out, [square] * 3)
        for layer in range(layers):
            executor.cached(layer)[:] = 40  # bytes of small numbers: memory that nobody has written is not read
        return _TimedSteps(executor, tokens)

    def _sparse_sample(self, shape: tuple[int, int]) -> _SparseSteps:
        """A sparse FFN of each type, way and fraction."""
        kinds = [(name, way, fraction) for name in RATED_ROWS for way in WAYS for fraction in FRACTIONS]
        samples = {name: self._neurons(name, shape) for name in RATED_ROWS}
        config = self.config(shape, len(kinds), 1, 1, _FEW)
        layers = [replace(config.layers[0], ffn=FfnConfig(samples[name].gate.shape[0], "relu")) for name, *_ in kinds]
        executor = self._executor(replace(config, layers=tuple(layers)))
        unused = {}  # by how many neurons there are: matrices of a small type, which the ways do not read
        for layer, (name, way, fraction) in enumerate(kinds):
            neurons = samples[name]
            n = neurons.gate.shape[0]
            if n not in unused:
                unused[n] = [executor.matrix(self._matrix("Q4_0", *size)) for size in ((n, shape[0]), (shape[0], n))]
            up, down = unused[n]
            gate = executor.matrix(neurons.gate) if way == "exact" else up
            executor.ffn(layer, self._norm(executor), gate, up, down)
            neurons.attach(executor.ffns[layer], way, fraction)
        return _SparseSteps(executor, [_SparseLayer(name, samples[name].group(way)) for name, way, _ in kinds])

    def _neurons(self, name: str, shape: tuple[int, int]) -> _RatedNeurons:
        """Random neurons of a type: half as many of floats, which are larger."""
        self.tick()
        d_model, n = shape
        n //= 1 + (name in FLOAT_TYPES)
        layout, bundles = self.bundles(name, (d_model, n), cpu.choose_threads(self._engine.threads)[0])
        predictor = self.normal("Q8_0", _RANK, d_model), self.normal("Q8_0", n, _RANK)
        return _RatedNeurons(layout, bundles, self.normal(name, n, d_model), predictor)

    def _executor(self, config: ModelConfig, pages: int = 1) -> CpuExecutor:
        """An executor with an embedding, whose operators are timed; the caller wires the rest."""
        rotation = np.ones(HEAD_DIM // 2, np.float32), 1.0
        executor = CpuExecutor(config, self._engine, dict.fromkeys(config.ropes, rotation), pages=pages)
        self._stack.callback(executor.close)
        self._stack.enter_context(executor.timed())
        executor.embed(self.normal("F16", config.vocab_size, config.d_model))
        return executor

    def _norm(self, executor: CpuExecutor) -> Any:
        return executor.norm(np.ones(executor.d_model, np.float32))

    def _parts(self, type_name: str, shape: tuple[int, int], vocab: int = 0) -> list[RawTensor]:
        """Square, up and down of a layer of d_model, d_ff, and a head: each the beginning of one matrix."""
        d_model, d_ff = shape
        data = self._matrix(type_name, max(d_ff, vocab), d_model).data
        sizes = (d_model, d_model), (d_ff, d_model), (d_model, d_ff), (vocab, d_model)
        row_bytes = block_type(type_name).row_bytes
        return [RawTensor(type_name, (rows, cols), data[: rows * row_bytes(cols)]) for rows, cols in sizes]

    def _matrix(self, type_name: str, rows: int, cols: int) -> RawTensor:
        """A matrix of arbitrary values, neither infinite nor denormal, which would be slow."""
        if type_name in FLOAT_TYPES:
            return self.normal(type_name, rows, cols)
        nbytes = rows * block_type(type_name).row_bytes(cols)  # no half precision scale of bytes below 64 exceeds 2
        piece = self._random.integers(0, 64, min(nbytes, 1 << 20), np.uint8)
        return RawTensor(type_name, (rows, cols), np.resize(piece, nbytes))
