"""Layers that the CPU has and a GPU computes in steps of many tokens: their weights stream there, layer by layer.

A product of many tokens costs a GPU little more than bringing the matrix there, and the CPU hundreds of times what
reading it costs. So from some number of tokens on (`Stage.least`) a step leaves the CPU where an operator streams, and
comes back behind it; operators that follow each other stay on the GPU. Where attention does not stream (latents, layers
with states), each FFN does by itself:

    CPU   attention .. |                             | attention ..
    GPU                | x, FFN with its matrices, x |

The matrices are those that the CPU decodes with, in panels, or the neurons' bundles, and stay where they are; so does
the cache (`passed_cache.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.config import AttentionConfig, FfnConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.cpu_ffn import Weights
from powerinfer.devices.gpu import GpuLayers
from powerinfer.devices.gpu_weights import GpuNorm, PanelMatrix
from powerinfer.devices.passed_cache import PassedCache, earlier_tokens
from powerinfer.devices.stage import Stage
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.trace import Trace, span
from powerinfer.formats.bundle_memory import SomeBundles, gather
from powerinfer.formats.quant import Bytes, Float32
from powerinfer.formats.tensors import RawTensor
from powerinfer.neurons import BUNDLE_GROUP, NO_VECTORS, BundleLayout, FfnVectors, Indices


@dataclass(frozen=True)
class BothNorms:
    """A norm on either device."""

    cpu: _native.Norm
    gpu: GpuNorm


@dataclass(frozen=True)
class BothMatrices:
    """A matrix in RAM that may stream. kept: as of `PanelMatrix`."""

    cpu: _native.Matrix
    rows_kept: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class StreamedSpan:
    """Operators [first, last) of a layer in the CPU's program, those of the GPU in their place, and the bytes that
    stream for these."""

    layer: int
    first: int
    last: int
    operators: tuple[Operator, ...]
    nbytes: int

    def then(self, other: StreamedSpan) -> StreamedSpan:
        """Both, one after another."""
        operators = self.operators + other.operators
        return StreamedSpan(self.layer, self.first, other.last, operators, self.nbytes + other.nbytes)


class _StreamedNeurons:
    """All neurons of a layer in RAM as an FFN of one part (`FfnParts`), which streams."""

    def __init__(
        self,
        layer: int,
        gpu: GpuLayers,
        stage: Stage,
        layout: BundleLayout,
        groups: Bytes,
        config: FfnConfig,
        vectors: FfnVectors,
        threshold: float,
    ) -> None:
        """groups: uint8 [groups, layout.group_bytes], those that the CPU computes with; threshold: as of `Stage`."""
        self._layer = layer
        self._gpu = gpu
        self._stage = stage
        self._layout = layout
        self._settings = config, vectors.neuron_vectors, threshold
        full = config.size // BUNDLE_GROUP
        counts = np.zeros(len(groups), np.int32)
        counts[:full] = BUNDLE_GROUP
        index = np.arange(config.size, dtype=np.int32)
        stage.registered.note(groups.reshape(-1))
        self._parts = [SomeBundles(index[: full * BUNDLE_GROUP], counts, groups[:full].reshape(1, -1))]
        if config.size % BUNDLE_GROUP:  # of the last group, which has fewer, a copy without gaps
            self._parts.append(gather(layout, groups, index[full * BUNDLE_GROUP :]))

    def ahead(self) -> list[Operator]:
        return []

    def sent(self, _: Step) -> None:
        return None

    def begin(self) -> list[Operator]:
        return []

    def finish(self) -> list[Operator]:
        return [Operator("streamed neurons", self._layer, self._add)]

    def _add(self, step: Step) -> None:
        assert step.read is not None
        pieces = 1 if self._gpu.rehearses else None  # one piece takes as much memory as all
        for part in self._parts:
            self._stage.add_sum(step.target, step.read, self._layout, part, *self._settings, pieces)
        step.normed = None

    def close(self) -> None:
        self._parts = []


class StreamedLayers:
    """The layers of a CPU's executor, wired by the same calls as on one device (`models.builder.Builder`).

    stage: what matrices pass through; `least` of it is the number of tokens of a step from which on they do. spans: of
    each layer, in the order of the program. ffns: none of their FFNs is split.
    """

    ffns = ()

    def __init__(self, cpu: CpuExecutor, gpu: GpuLayers, stage: Stage) -> None:
        self.stage = stage
        self.spans: list[StreamedSpan] = []
        self._cpu = cpu
        self._gpu = gpu
        self._cache = PassedCache(cpu, gpu, stage)
        self._attending: int | None = None  # the layer whose attention was wired on the GPU

    # ---------------------------------------------------------------- wiring

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> BothMatrices:
        """Wire as `CpuExecutor` does."""
        numbers = None if row_map is None or row_map.min() >= 0 else np.flatnonzero(row_map >= 0)
        return BothMatrices(self._cpu.matrix(tensor, row_map), numbers)

    def head_rows(self, heads: int, dim: int, interleaved: int) -> NDArray[np.int32] | None:
        """Wire as `CpuExecutor` does."""
        return self._cpu.head_rows(heads, dim, interleaved)

    def norm(
        self, weight: Float32, bias: Float32 | None = None, order: Indices | None = None, eps: float | None = None
    ) -> BothNorms:
        """A norm of the model's kind over rows of d_model, in that order. eps: None, the model's."""
        return BothNorms(self._cpu.norm(weight, bias, order, eps), self._gpu.norm(weight, bias, order, eps))

    def scale(self, factor: float) -> BothNorms:
        """A factor in place of a norm over rows of d_model."""
        return BothNorms(self._cpu.scale(factor), self._gpu.scale(factor))

    def attention(
        self,
        layer: int,
        norm: BothNorms | None,
        qkv: Sequence[BothMatrices],
        *,
        biases: Sequence[Float32 | None] = (None, None, None),
        **more: Any,
    ) -> None:
        """Wire on both; on the CPU where Mamba2 is beside it, or it reads the keys and values of another layer."""
        first = self._cpu.operators
        self._cpu.attention(layer, _cpu_norm(norm), [one.cpu for one in qkv], biases=biases, **more)
        attention = self._cpu.config.layers[layer].attention
        if not isinstance(attention, AttentionConfig) or attention.kv_from is not None:
            return
        matrices = self._streaming(*qkv)
        rows = [None if b is None or m.rows_kept is None else b[m.rows_kept] for b, m in zip(biases, qkv, strict=True)]
        gpu_biases = [of if kept is None else kept for of, kept in zip(biases, rows, strict=True)]
        self._gpu.attention(layer, _gpu_norm(norm), matrices, biases=gpu_biases, **more)
        before = Operator("cache", layer, lambda _: self._cache.bring(layer, attention.window))
        behind = Operator("cache", layer, lambda _: self._cache.give_back(layer))
        self._add(layer, first, matrices, before, self._gpu.latest(layer), behind)
        self._attending = layer

    def latent_attention(
        self,
        layer: int,
        norm: BothNorms | None,
        q_latent: BothMatrices | None,
        q_norm: Float32 | None,
        q: BothMatrices,
        kv: BothMatrices,
        kv_norm: Float32,
        k_b: RawTensor,
    ) -> None:
        """Wire on the CPU."""
        first = None if q_latent is None else q_latent.cpu
        self._cpu.latent_attention(layer, _cpu_norm(norm), first, q_norm, q.cpu, kv.cpu, kv_norm, k_b)

    def latent_project(self, layer: int, v_b: RawTensor, matrix: BothMatrices, norm: BothNorms | None = None) -> None:
        """Wire on the CPU."""
        self._cpu.latent_project(layer, v_b, matrix.cpu, _cpu_norm(norm))

    def gate_attended(self, layer: int, norm: BothNorms | None, matrix: BothMatrices) -> None:
        """Wire on both."""
        first = self._cpu.operators
        self._cpu.gate_attended(layer, _cpu_norm(norm), matrix.cpu)
        (streaming,) = self._streaming(matrix)
        self._gpu.gate_attended(layer, _gpu_norm(norm), streaming)
        self._add(layer, first, [streaming])

    def delta_net(
        self,
        layer: int,
        norm: BothNorms | None,
        matrices: Sequence[BothMatrices],
        *,
        further: Sequence[BothMatrices] = (),
        **more: Any,
    ) -> None:
        """Wire on the CPU."""
        first, second = ([one.cpu for one in some] for some in (matrices, further))
        self._cpu.delta_net(layer, _cpu_norm(norm), first, further=second, **more)

    def mamba(self, layer: int, norm: BothNorms | None, matrices: Sequence[BothMatrices], **more: Any) -> None:
        """Wire on the CPU."""
        self._cpu.mamba(layer, _cpu_norm(norm), [one.cpu for one in matrices], **more)

    def short_conv(self, layer: int, norm: BothNorms | None, matrices: Sequence[BothMatrices], **more: Any) -> None:
        """Wire on the CPU."""
        self._cpu.short_conv(layer, _cpu_norm(norm), [one.cpu for one in matrices], **more)

    def project(
        self,
        layer: int,
        matrix: BothMatrices,
        bias: Float32 | None = None,
        norm: BothNorms | None = None,
        order: Indices | None = None,
        reads: BothNorms | None = None,
    ) -> None:
        """Wire where attention is: on both, or on the CPU."""
        first = self._cpu.operators
        self._cpu.project(layer, matrix.cpu, bias, _cpu_norm(norm), order, _cpu_norm(reads))
        if layer == self._attending:
            (streaming,) = self._streaming(matrix)
            self._gpu.project(layer, streaming, bias, _gpu_norm(norm), order, _gpu_norm(reads))
            self._add(layer, first, [streaming])

    def project_beside(
        self, layer: int, matrix: BothMatrices, bias: Float32 | None = None, norm: BothNorms | None = None
    ) -> None:
        """Wire on the CPU."""
        self._cpu.project_beside(layer, matrix.cpu, bias, _cpu_norm(norm))

    def ffn(
        self,
        layer: int,
        norm: BothNorms | None,
        gate: BothMatrices | None,
        up: BothMatrices,
        down: BothMatrices,
        vectors: FfnVectors = NO_VECTORS,
        out_norm: BothNorms | None = None,
    ) -> None:
        """Wire on both."""
        of_gate, first = None if gate is None else gate.cpu, self._cpu.operators
        self._cpu.ffn(layer, _cpu_norm(norm), of_gate, up.cpu, down.cpu, vectors, _cpu_norm(out_norm))
        matrices = self._streaming(*([up, down] if gate is None else [gate, up, down]))
        *gates, of_up, of_down = matrices
        norms = _gpu_norm(norm), _gpu_norm(out_norm)
        self._gpu.ffn(layer, norms[0], gates[0] if gates else None, of_up, of_down, vectors, norms[1])
        self._add(layer, first, matrices)

    def bundled_ffn(
        self,
        layer: int,
        layout: BundleLayout,
        bundles: Bytes,
        *,
        norm: BothNorms | None = None,
        out_norm: BothNorms | None = None,
        vectors: FfnVectors = NO_VECTORS,
        threshold: float = 0.0,
        predictor: Weights | None = None,
    ) -> None:
        """Wire on both; on the GPU all gates are computed. Arguments as of `CpuExecutor`."""
        first = self._cpu.operators
        options: dict[str, Any] = {"norm": _cpu_norm(norm), "out_norm": _cpu_norm(out_norm), "predictor": predictor}
        self._cpu.bundled_ffn(layer, layout, bundles, vectors=vectors, threshold=threshold, **options)
        config = self._cpu.config.layers[layer].neurons
        parts = _StreamedNeurons(layer, self._gpu, self.stage, layout, bundles, config, vectors, threshold)
        self._gpu.split_ffn(layer, _gpu_norm(norm), parts, vectors.down_bias, _gpu_norm(out_norm))
        self._add_span(layer, first, self._gpu.streamed_ffn(layer), bundles.nbytes)

    def add_layer_input(
        self, layer: int, gate: BothMatrices, out: BothMatrices, norm: BothNorms | None, activation: str
    ) -> None:
        """Wire on the CPU."""
        self._cpu.add_layer_input(layer, gate.cpu, out.cpu, _cpu_norm(norm), activation)

    def normalise(self, layer: int, norm: BothNorms) -> None:
        """Wire on both."""
        first = self._cpu.operators
        self._cpu.normalise(layer, norm.cpu)
        self._gpu.normalise(layer, norm.gpu)
        self._add(layer, first)

    def head(
        self,
        norm: BothNorms | None,
        matrix: BothMatrices,
        projection: BothMatrices | None = None,
        bias: Float32 | None = None,
    ) -> None:
        """Wire on the CPU."""
        self._cpu.head(_cpu_norm(norm), matrix.cpu, None if projection is None else projection.cpu, bias)

    def _streaming(self, *matrices: BothMatrices) -> list[PanelMatrix]:
        streaming = []
        for matrix in matrices:
            native, panels = matrix.cpu, matrix.cpu.panels
            assert panels is not None, "a matrix on disk does not stream"
            self.stage.registered.note(panels.reshape(-1))
            rows = native.rows if matrix.rows_kept is None else len(matrix.rows_kept)
            streaming.append(PanelMatrix(self.stage, native.type, rows, native.k, panels, matrix.rows_kept))
        return streaming

    def _add(self, layer: int, first: int, matrices: Sequence[PanelMatrix] = (), *operators: Operator) -> None:
        """Note that these operators, () for what the GPU got last of a layer, do what the CPU's from `first` on do."""
        nbytes = sum(one.panels.nbytes for one in matrices)
        self._add_span(layer, first, operators or (self._gpu.latest(layer),), nbytes)

    def _add_span(self, layer: int, first: int, operators: Sequence[Operator], nbytes: int) -> None:
        """Note that these operators do what the CPU's from `first` on do; nbytes: that stream for them."""
        added = StreamedSpan(layer, first, self._cpu.operators, tuple(operators), nbytes)
        before = self.spans[-1] if self.spans else None
        if before is not None and (before.layer, before.last) == (layer, first):
            self.spans[-1] = before.then(added)
        else:
            self.spans.append(added)

    # ---------------------------------------------------------------- running

    def takes(self, batch: Batch) -> bool:
        """Whether a step has tokens enough. What holds for a matrix holds for the cache of a sequence: that of those
        with few tokens in the step must not be larger than a layer's matrices."""
        if not self.spans or not self.stage.takes(len(batch.tokens)):
            return False
        counts = np.bincount(batch.rows, minlength=len(batch.page_table))
        few = [not self.stage.takes(count) for count in counts.tolist()]
        beside = int(earlier_tokens(batch)[few].sum()) * self._cache.token_bytes
        return beside <= max(own.nbytes for own in self.spans)

    def _together(self) -> list[StreamedSpan]:
        """The spans, as one where one begins as the other ends."""
        joined: list[StreamedSpan] = []
        for part in self.spans:
            if joined and joined[-1].last == part.first:
                joined[-1] = joined[-1].then(part)
            else:
                joined.append(part)
        return joined

    def run(self, batch: Batch, x: Float32, operators: Sequence[Operator]) -> Float32:
        """x float32 [T, d_model] after operators of spans; as of `GpuLayers.run_streamed`."""
        self._cache.begin(batch)
        out = self._gpu.run_streamed(batch, x, operators)
        self._cache.end()
        return out

    def finish(self, batch: Batch, trace: Trace | None = None) -> Float32:
        """Finish as `CpuExecutor` does, with what streams on the GPU."""
        at: int | None = None
        for part in self._together():
            with span(trace, "cpu", "layers", -1):
                x = self._cpu.run_part(batch, at, part.first)
            x[:] = self.run(batch, x, part.operators)
            at = part.last
        with span(trace, "cpu", "layers and head", -1):
            return self._cpu.finish(batch, at)

    def close(self) -> None:
        """Free the buffers; no step follows."""
        self.spans.clear()
        self._cache.close()
        self.stage.close()


def _cpu_norm(norm: BothNorms | None) -> _native.Norm | None:
    return None if norm is None else norm.cpu


def _gpu_norm(norm: BothNorms | None) -> GpuNorm | None:
    return None if norm is None else norm.gpu
