"""Layers that the CPU has and a GPU computes in steps of many tokens: their matrices stream there, layer by layer.

A product of many tokens costs a GPU little more than bringing the matrix there, and the CPU hundreds of times what
reading it costs. So from some number of tokens on (`Stage.least`) a step leaves the CPU where an operator streams, and
comes back behind it; operators that follow each other stay on the GPU:

    CPU   attention .. |                            | attention ..
    GPU                | x, FFN with its matrices, x |

The matrices are those that the CPU decodes with, in panels, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.gpu import GpuLayers
from powerinfer.devices.gpu_weights import GpuNorm, PanelMatrix
from powerinfer.devices.stage import Stage
from powerinfer.devices.step import Operator
from powerinfer.devices.trace import Trace, span
from powerinfer.formats.quant import Float32
from powerinfer.formats.tensors import RawTensor
from powerinfer.neurons import NO_VECTORS, FfnVectors


@dataclass(frozen=True)
class BothNorms:
    """A norm on either device."""

    cpu: _native.Norm
    gpu: GpuNorm


@dataclass(frozen=True)
class BothMatrices:
    """A matrix in RAM that may stream. kept: as of `PanelMatrix`."""

    cpu: _native.Matrix
    kept: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Span:
    """Operators [first, last) of a layer in the CPU's program, those of the GPU in their place, and the bytes that
    stream for these."""

    layer: int
    first: int
    last: int
    operators: tuple[Operator, ...]
    nbytes: int

    def then(self, other: Span) -> Span:
        """Both, one after another."""
        operators = self.operators + other.operators
        return Span(self.layer, self.first, other.last, operators, self.nbytes + other.nbytes)


class StreamedLayers:
    """The layers of a CPU's executor, wired by the same calls as on one device (`models.builder.Builder`).

    stage: what matrices pass through; `least` of it is the number of tokens of a step from which on they do. spans: of
    each layer, in the order of the program. ffns: no FFN is split.
    """

    ffns = ()

    def __init__(self, cpu: CpuExecutor, gpu: GpuLayers, stage: Stage) -> None:
        self.stage = stage
        self.spans: list[Span] = []
        self._cpu = cpu
        self._gpu = gpu

    # ---------------------------------------------------------------- wiring

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> BothMatrices:
        """As of `CpuExecutor`."""
        kept = None if row_map is None or row_map.min() >= 0 else np.flatnonzero(row_map >= 0)
        return BothMatrices(self._cpu.matrix(tensor, row_map), kept)

    def head_rows(self, heads: int, dim: int, interleaved: bool) -> NDArray[np.int32] | None:
        """As of `CpuExecutor`."""
        return self._cpu.head_rows(heads, dim, interleaved)

    def norm(self, weight: Float32, bias: Float32 | None = None) -> BothNorms:
        """A norm of the model's kind over rows of d_model."""
        return BothNorms(self._cpu.norm(weight, bias), self._gpu.norm(weight, bias))

    def scale(self, factor: float) -> BothNorms:
        """In place of a norm over rows of d_model: a factor."""
        return BothNorms(self._cpu.scale(factor), self._gpu.scale(factor))

    def attention(self, layer: int, norm: BothNorms | None, qkv: Sequence[BothMatrices], **more: Any) -> None:
        """On the CPU."""
        self._cpu.attention(layer, _of_cpu(norm), [one.cpu for one in qkv], **more)

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
        """On the CPU."""
        first = None if q_latent is None else q_latent.cpu
        self._cpu.latent_attention(layer, _of_cpu(norm), first, q_norm, q.cpu, kv.cpu, kv_norm, k_b)

    def latent_project(self, layer: int, v_b: RawTensor, matrix: BothMatrices, norm: BothNorms | None = None) -> None:
        """On the CPU."""
        self._cpu.latent_project(layer, v_b, matrix.cpu, _of_cpu(norm))

    def gate_attended(self, layer: int, norm: BothNorms | None, matrix: BothMatrices) -> None:
        """On the CPU."""
        self._cpu.gate_attended(layer, _of_cpu(norm), matrix.cpu)

    def delta_net(self, layer: int, norm: BothNorms | None, matrices: Sequence[BothMatrices], **more: Any) -> None:
        """On the CPU."""
        self._cpu.delta_net(layer, _of_cpu(norm), [one.cpu for one in matrices], **more)

    def project(
        self, layer: int, matrix: BothMatrices, bias: Float32 | None = None, norm: BothNorms | None = None
    ) -> None:
        """On the CPU."""
        self._cpu.project(layer, matrix.cpu, bias, _of_cpu(norm))

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
        """On both."""
        of_gate, first = None if gate is None else gate.cpu, self._cpu.operators
        self._cpu.ffn(layer, _of_cpu(norm), of_gate, up.cpu, down.cpu, vectors, _of_cpu(out_norm))
        matrices = self._streaming(*([up, down] if gate is None else [gate, up, down]))
        if matrices is not None:
            *own, of_up, of_down = matrices
            norms = _of_gpu(norm), _of_gpu(out_norm)
            self._gpu.ffn(layer, norms[0], own[0] if own else None, of_up, of_down, vectors, norms[1])
            self._add(layer, first, sum(one.panels.nbytes for one in matrices))

    def normalise(self, layer: int, norm: BothNorms) -> None:
        """On the CPU."""
        self._cpu.normalise(layer, norm.cpu)

    def head(self, norm: BothNorms | None, matrix: BothMatrices, projection: BothMatrices | None = None) -> None:
        """On the CPU."""
        self._cpu.head(_of_cpu(norm), matrix.cpu, None if projection is None else projection.cpu)

    def _streaming(self, *matrices: BothMatrices) -> list[PanelMatrix] | None:
        """Them, if all are in memory; others stay on disk and pass through a window."""
        found = []
        for one in matrices:
            native, panels = one.cpu, one.cpu.panels
            if panels is None:
                return None
            rows = native.rows if one.kept is None else len(one.kept)
            found.append(PanelMatrix(self.stage, native.type, rows, native.k, panels, one.kept))
        return found

    def _add(self, layer: int, first: int, nbytes: int) -> None:
        """What the GPU got last of a layer does what the CPU's operators from `first` on do."""
        own = Span(layer, first, self._cpu.operators, (self._gpu.streamed(layer)[-1],), nbytes)
        before = self.spans[-1] if self.spans else None
        if before is not None and (before.layer, before.last) == (layer, first):
            self.spans[-1] = before.then(own)
        else:
            self.spans.append(own)

    # ---------------------------------------------------------------- running

    def takes(self, tokens: int) -> bool:
        """Whether a step of that number of tokens is long enough."""
        return bool(self.spans) and self.stage.takes(tokens)

    def _together(self) -> list[Span]:
        """The spans, as one where one begins as the other ends."""
        found: list[Span] = []
        for own in self.spans:
            if found and found[-1].last == own.first:
                found[-1] = found[-1].then(own)
            else:
                found.append(own)
        return found

    def finish(self, batch: Batch, trace: Trace | None = None) -> Float32:
        """As `CpuExecutor.finish`, with what streams on the GPU."""
        at: int | None = None
        for own in self._together():
            with span(trace, "cpu", "layers", -1):
                x = self._cpu.run_part(batch, at, own.first)
            x[:] = self._gpu.run_streamed(batch, x, own.operators)
            at = own.last
        with span(trace, "cpu", "layers and head", -1):
            return self._cpu.finish(batch, at)

    def close(self) -> None:
        """Free the buffers; no step follows."""
        self.spans.clear()
        self.stage.close()


def _of_cpu(norm: BothNorms | None) -> _native.Norm | None:
    return None if norm is None else norm.cpu


def _of_gpu(norm: BothNorms | None) -> GpuNorm | None:
    return None if norm is None else norm.gpu
