"""The rates of this CPU in decoding, from the executor's own operators over random weights that no cache holds.

Dense products and fixed times: transformers of two widths, timed operator by operator. Rows of bundles: FFNs in which
chosen fractions of the neurons fire, of two widths, so that a row's fixed time and its bytes part. Medians throughout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np

from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.errors import PowerInferError
from powerinfer.formats.bundle_memory import owned
from powerinfer.formats.quant import block_type
from powerinfer.formats.tensors import FLOAT_TYPES, NATIVE_TYPES, RawTensor
from powerinfer.hardware.description import OTHER, RATED_ROWS
from powerinfer.hardware.samples import FRACTIONS, HEAD_DIM, FitGroup, Samples, figure, fit_rows, wire
from powerinfer.kernels import cpu
from powerinfer.neurons import Predictor
from powerinfer.progress import Progress, silent
from powerinfer.system import available_memory


@dataclass(frozen=True)
class Effort:
    """Sizes of the measurements. Tests use smaller ones."""

    sample_bytes: int = 0  # weights of a sample; 0: twice the largest cache, within SAMPLE_BYTES
    steps: int = 10  # timed, of each sample; two more warm up
    wide: tuple[int, int] = (2048, 5632)  # d_model, d_ff
    narrow: tuple[int, int] = (512, 1408)
    rows: tuple[tuple[int, int], ...] = ((1024, 4096), (4096, 2048))  # d_model, d_ff of sparse FFNs
    context: int = 2048  # tokens that attention reads
    warm_mib: tuple[float, ...] = (16, 32, 64, 96, 128, 192)  # weights of the samples that caches may hold
    disk_bytes: int = 128 << 20
    disk_seconds: float = 0.25  # of each size of read


FULL = Effort()

SAMPLE_BYTES = (256 << 20, 384 << 20)
"""Minimum and maximum bytes of a sample's weights: larger caches, as in servers, are shared."""

_RANK = 128  # of the predictors
_VOCAB = 8192  # rows of a head that is timed
_FEW = 256  # rows of one that is not
_WARM_UP = 2
_LEAST_STEPS = 3
_SAMPLE_SECONDS = 0.6  # after which a sample gets only the minimum of steps
_OPERATORS = ("attention_input", "attention", "project", "ffn")  # of a layer


def cpu_rates(engine: EngineConfig, effort: Effort, progress: Progress = silent) -> dict[str, Any]:
    """The fields of a `Device` from `dense_gb_s` on. PowerInferError where memory is short."""
    nbytes = effort.sample_bytes or min(max(2 * largest_cache(), SAMPLE_BYTES[0]), SAMPLE_BYTES[1])
    free = available_memory()
    if free and free < 6 * nbytes:
        raise PowerInferError(
            f"measuring this machine takes {6 * nbytes >> 20} MiB of memory and {free >> 20} MiB are free; "
            "end other programs first"
        )
    work = _CpuSamples(engine, effort, nbytes, progress)
    op_us = work.operator_us()
    dense, head, beside, packed = {}, {}, [], []
    for name in sorted(NATIVE_TYPES):
        sample = work.dense(name, effort.wide)
        dense[name] = _rate(sample.layer_bytes, sample.layer_s, len(_OPERATORS) * op_us)
        head[name] = _rate(sample.head_bytes, sample.head_s, op_us)
        beside.append(sample.beside_s)
        packed.append(sample.pack_gb_s)
    dense[OTHER], head[OTHER] = min(dense.values()), min(head.values())
    bundle, row_ns, extra = {}, {}, []
    for name in RATED_ROWS:
        fit = fit_rows(work.sparse_times(name), max(dense.values()))
        bundle[name], row_ns[name] = fit.gb_s, fit.row_ns
        for group, seconds in fit.fixed.items():
            extra.append(1e6 * seconds - group.dense_bytes / (1e3 * dense[group.dense_type]) - op_us)
    size, gain = work.cache()
    return {
        "dense_gb_s": {name: figure(rate) for name, rate in dense.items()},
        "head_gb_s": {name: figure(rate) for name, rate in head.items()},
        "bundle_gb_s": {name: figure(rate) for name, rate in bundle.items()},
        "row_ns": {name: figure(value) for name, value in row_ns.items()},
        "op_us": figure(op_us),
        "sparse_us": figure(max(0.0, median(extra))),
        "step_us": figure(max(0.0, 1e6 * median(beside))),
        "kv_gb_s": figure(work.kv_gb_s(op_us)),
        "pack_gb_s": figure(max(packed)),  # once each: the least disturbed
        "cache_bytes": size,
        "cache_gain": figure(gain),
    }


def _rate(nbytes: float, seconds: float, fixed_us: float) -> float:
    """GB/s of a measurement, fixed times subtracted, at most half of it."""
    return nbytes / max(seconds - 1e-6 * fixed_us, 0.5 * seconds) / 1e9


def largest_cache() -> int:
    """Bytes of the largest cache of the first core; 32 MiB if unknown."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=32 << 20)


# ---------------------------------------------------------------- fits


def fit_cache(sizes: Sequence[int], gains: Sequence[float]) -> tuple[int, float]:
    """(bytes, gain) of `Device.warm` that best match the gains of samples of these sizes; (0, 1.0) for no gain."""
    gain = max(gains)
    if gain < 1.05:
        return 0, 1.0

    def miss(size: float) -> float:
        colds = [min(1.0, max(0.0, nbytes / size - 1)) for nbytes in sizes]
        told = [1 / (cold + (1 - cold) / gain) for cold in colds]
        return sum(math.log(own / one) ** 2 for own, one in zip(gains, told, strict=True))

    low, high = min(sizes), max(sizes)
    tried: list[float] = [low / 2 * (high / low) ** (step / 100) for step in range(101)]
    best = min(tried, key=miss)
    return round(best), gain


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class Sample:
    """Bytes and seconds of a layer and of the head of a dense transformer; beside_s: of a step, outside of both.
    pack_gb_s: of packing the layers: what is packed as it is multiplied is written to caches, and takes as long with
    the product."""

    layer_bytes: int
    layer_s: float
    head_bytes: int
    head_s: float
    beside_s: float
    pack_gb_s: float


class _CpuSamples(Samples):
    """The samples, one after another; each is freed before the next is made."""

    def __init__(self, engine: EngineConfig, effort: Effort, nbytes: int, progress: Progress) -> None:
        total = 4 + len(NATIVE_TYPES) + len(RATED_ROWS) + len(effort.warm_mib)
        super().__init__("measuring the CPU", total, effort.context, progress)
        self._effort = effort
        self._nbytes = nbytes
        self._engine = replace(EngineConfig(), threads=engine.threads, isa=engine.isa, max_batch=1)

    def operator_us(self) -> float:
        """Fixed time of an operator: what layers of two widths take, separated into bytes and operators."""
        wide, narrow = (self.dense("Q8_0", shape) for shape in (self._effort.wide, self._effort.narrow))
        per_byte = (wide.layer_s - narrow.layer_s) / (wide.layer_bytes - narrow.layer_bytes)
        fixed = narrow.layer_s - narrow.layer_bytes * per_byte
        return min(max(0.0, fixed), narrow.layer_s) * 1e6 / len(_OPERATORS)

    def cache(self) -> tuple[int, float]:
        """(cache_bytes, cache_gain): from ever smaller samples of small layers."""
        shape = self._effort.narrow
        cold = self.dense("Q8_0", shape).layer_s
        sizes = [round(mib * (1 << 20)) for mib in self._effort.warm_mib]
        return fit_cache(sizes, [cold / self.dense("Q8_0", shape, nbytes).layer_s for nbytes in sizes])

    def dense(self, type_name: str, shape: tuple[int, int], nbytes: int = 0) -> Sample:
        """A transformer of one type, of `nbytes` of weights."""
        self.tick()
        d_model, d_ff = shape
        row = block_type(type_name).row_bytes(d_model)
        layer_bytes = (4 * d_model + 3 * d_ff) * row
        layers = max(1, round((nbytes or self._nbytes) / layer_bytes))
        heads = d_model // HEAD_DIM
        vocab = _VOCAB if not nbytes else _FEW  # the head of a small sample must not count
        with self._transformer(layers, d_model, d_ff, heads, heads, vocab) as executor:
            square, up, down = (
                self._matrix(type_name, rows, cols)
                for rows, cols in ((d_model, d_model), (d_ff, d_model), (d_model, d_ff))
            )
            begin = time.perf_counter()
            wire(executor, d_model, layers, [square] * 3, square, [up, up, down])
            packed = layers * layer_bytes / (time.perf_counter() - begin) / 1e9
            executor.head(self._norm(executor), executor.matrix(self._matrix(type_name, vocab, d_model)))
            seconds, beside = self._operators(executor, logits=True)
            layer_s = sum(seconds[name] for name in _OPERATORS) / layers
            return Sample(layer_bytes, layer_s, vocab * row, seconds["head"], seconds["embed"] + beside, packed)

    def kv_gb_s(self, op_us: float) -> float:
        """Attention over keys and values of the usual type, four heads of queries to one of keys."""
        self.tick()
        heads, kv_heads, d_model = 32, 8, 128
        tokens = self._effort.context // cpu.PAGE * cpu.PAGE
        each = 2 * 2 * kv_heads * HEAD_DIM  # bytes that a token has in a layer: keys and values in F16
        layers = max(1, round(self._nbytes / (tokens * each)))
        with self._transformer(layers, d_model, d_model, heads, kv_heads) as executor:
            q, kv = (self._matrix("F16", rows * HEAD_DIM, d_model) for rows in (heads, kv_heads))
            out, square = (self._matrix("F16", d_model, cols) for cols in (heads * HEAD_DIM, d_model))
            wire(executor, d_model, layers, [q, kv, kv], out, [square] * 3)
            self._fill(executor, tokens)
            seconds = self._operators(executor, tokens)[0]["attention"] / layers
        return _rate(tokens * each, seconds, op_us)

    def _fill(self, executor: CpuExecutor, tokens: int) -> None:
        """Write keys and values into all pages; cheaply, since every page is the beginning of a text of its own."""
        nothing = np.empty(0, np.int32)
        texts = executor.max_tokens // cpu.PAGE
        for first in range(0, tokens // cpu.PAGE, texts):
            pages = np.arange(first, min(first + texts, tokens // cpu.PAGE), dtype=np.int32)[:, None]
            rows = np.repeat(np.arange(len(pages), dtype=np.int32), cpu.PAGE)
            positions = np.tile(np.arange(cpu.PAGE, dtype=np.int32), len(pages))
            executor.forward(Batch(rows % executor.vocab_size, positions, rows, pages, nothing))

    def sparse_times(self, type_name: str) -> list[tuple[FitGroup, float, float, float]]:
        """(group, rows, bytes, seconds) of sparse FFNs, both ways, every fraction, both widths."""
        self.tick()
        return [entry for shape in self._effort.rows for entry in self._sparse(type_name, shape)]

    def _sparse(self, type_name: str, shape: tuple[int, int]) -> Iterator[tuple[FitGroup, float, float, float]]:
        d_model, d_ff = shape
        layout, bundles = self.bundles(type_name, shape, cpu.choose_threads(self._engine.threads)[0])
        layers = -(-round(self._nbytes / (d_ff * layout.stride)) // len(FRACTIONS)) * len(FRACTIONS) or len(FRACTIONS)
        gate, down = self.normal(type_name, d_ff, d_model), self._matrix(type_name, d_model, d_ff)
        inner, outer = self.normal("Q8_0", _RANK, d_model), self.normal("Q8_0", d_ff, _RANK)
        tiny = self._matrix("F16", HEAD_DIM, d_model), self._matrix("F16", d_model, HEAD_DIM)
        with self._transformer(layers, d_model, d_ff, 1, 1) as executor:
            up, down_matrix = executor.matrix(gate), executor.matrix(down)  # not used: shared by all layers
            for layer in range(layers):
                executor.attention(layer, self._norm(executor), [executor.matrix(tiny[0]) for _ in range(3)])
                executor.project(layer, executor.matrix(tiny[1]))
                executor.ffn(layer, self._norm(executor), executor.matrix(gate), up, down_matrix)
                # Gates are normal, of variance 1: the quantile is the threshold that lets the fraction pass. The
                # predictor's guesses are about normal, of variance 1/2.
                quantile = NormalDist().inv_cdf(1 - FRACTIONS[layer % len(FRACTIONS)])
                predictor = (Predictor(_RANK, quantile * math.sqrt(0.5), 0), inner, outer)
                executor.ffns[layer].add_bundles(layout, owned(bundles), threshold=quantile, predictor=predictor)
            ways = {
                "exact": FitGroup(d_model, "exact", type_name, gate.data.nbytes),
                "predicted": FitGroup(d_model, "predicted", "Q8_0", inner.data.nbytes + outer.data.nbytes),
            }
            for way, group in ways.items():
                for layer in range(layers):
                    executor.ffns[layer].set_ways({1: way})
                yield from self._fractions(executor, group)

    def _fractions(self, executor: CpuExecutor, group: FitGroup) -> Iterator[tuple[FitGroup, float, float, float]]:
        """(group, rows, bytes, seconds) of each fraction: means over its layers of medians over the steps."""
        table: list[list[tuple[float, float, float]]] = []
        with executor.timed():
            for step in self._paced():
                self._step(executor, 0, step)
                table.append([])
                for layer, seconds in enumerate(executor.ffn_seconds()):
                    counts = executor.ffns[layer].counts()
                    executor.ffns[layer].clear()
                    table[-1].append((counts["rows"], counts["bytes"] - group.dense_bytes, seconds))
        medians = np.median(np.array(table[_WARM_UP:]), axis=0)
        for at in range(len(FRACTIONS)):
            rows, nbytes, seconds = medians[at :: len(FRACTIONS)].mean(axis=0)
            yield group, float(rows), float(nbytes), float(seconds)

    # ------------------------------------------------------------ samples

    @contextmanager
    def _transformer(
        self, layers: int, d_model: int, d_ff: int, heads: int, kv_heads: int, vocab: int = _FEW
    ) -> Iterator[CpuExecutor]:
        """An executor with an embedding; the caller wires the rest."""
        config = self.config((d_model, d_ff), layers, heads, kv_heads, vocab)
        rotation = np.ones(HEAD_DIM // 2, np.float32), 1.0
        executor = CpuExecutor(config, self._engine, dict.fromkeys(config.ropes, rotation))
        try:
            executor.embed(self.normal("F16", vocab, d_model))
            yield executor
        finally:
            executor.close()

    def _norm(self, executor: CpuExecutor) -> Any:
        return executor.norm(np.ones(executor.d_model, np.float32))

    def _matrix(self, type_name: str, rows: int, cols: int) -> RawTensor:
        """A matrix of arbitrary values, neither infinite nor denormal, which would be slow."""
        if type_name in FLOAT_TYPES:
            return self.normal(type_name, rows, cols)
        nbytes = rows * block_type(type_name).row_bytes(cols)  # no half precision scale of bytes below 64 exceeds 2
        piece = self._random.integers(0, 64, min(nbytes, 1 << 20), np.uint8)
        return RawTensor(type_name, (rows, cols), np.resize(piece, nbytes))

    # ------------------------------------------------------------ steps

    def _paced(self) -> Iterator[int]:
        """The numbers of a sample's steps, warm-up included; fewer on a slow machine."""
        begin = time.perf_counter()
        for step in range(_WARM_UP + self._effort.steps):
            if step >= _WARM_UP + _LEAST_STEPS and time.perf_counter() - begin > _SAMPLE_SECONDS:
                return
            yield step

    def _operators(
        self, executor: CpuExecutor, tokens: int = 0, logits: bool = False
    ) -> tuple[dict[str, float], float]:
        """(seconds of each kind of operator, seconds beside them) of a step after `tokens` others, medians."""
        taken: dict[str, list[float]] = {}
        beside = []
        with executor.timed():
            for step in self._paced():
                executor.time_operators(True)
                begin = time.perf_counter()
                self._step(executor, max(0, tokens - 1), step, logits)
                whole = time.perf_counter() - begin
                times = executor.time_operators(True)
                beside.append(whole - sum(times.values()))
                for name, seconds in times.items():
                    taken.setdefault(name, []).append(seconds)
        return {name: median(values[_WARM_UP:]) for name, values in taken.items()}, median(beside[_WARM_UP:])

    def _step(self, executor: CpuExecutor, position: int, token: int, logits: bool = False) -> None:
        pages = np.arange(position // cpu.PAGE + 1, dtype=np.int32)[None]
        one = np.full(1, token % executor.vocab_size, np.int32)
        zero = np.zeros(1, np.int32)
        executor.forward(Batch(one, np.full(1, position, np.int32), zero, pages, zero if logits else zero[:0]))
