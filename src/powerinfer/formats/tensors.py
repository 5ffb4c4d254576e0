"""A tensor as it is stored, and its conversion to a type that the kernels take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from powerinfer.formats.quant import Bytes, Float32, block_type, dequantize, nvfp4_as_q8_0, quantize
from powerinfer.neurons import Indices
from powerinfer.system import usable_cores

_PIECE = 1 << 21  # elements converted by one thread at a time


@dataclass(frozen=True, slots=True)
class RawTensor:
    """type: a name of `quant.BLOCK_TYPES`; shape: row-major, elements; data: its bytes, uint8 1-D, contiguous.

    `data` is often a read-only view of a mapped file. Where a file interleaves tensors it is [runs, bytes] of a
    larger one, until `gathered` puts the runs together. scales: factors of the values beside those in the blocks, one
    for the tensor or for each of its matrices. order: the data's column j is column order[j] of the matrix; None: j.
    """

    type: str
    shape: tuple[int, ...]
    data: Bytes
    scales: Float32 | None = None
    order: Indices | None = None

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.data.nbytes

    def rows(self) -> Bytes:
        """The bytes row by row, uint8 [rows, row_bytes]; a 1-D tensor is one row."""
        cols = self.shape[-1]
        return self.data.reshape(self.size // cols, block_type(self.type).row_bytes(cols))

    def gathered(self) -> RawTensor:
        """The tensor with its data 1-D and contiguous; a copy only where it is not."""
        return self if self.data.ndim == 1 else replace(self, data=self.data.reshape(-1))

    def row_scales(self) -> Float32 | None:
        """The factor of each row, [rows]; None where there are none."""
        if self.scales is None:
            return None
        rows = self.size // self.shape[-1]
        return np.repeat(self.scales, rows // len(self.scales))

    def subset(self, index: Indices) -> RawTensor:
        """Matrices of the index, of a tensor [n, out, in]: a copy."""
        data = self.data.reshape(self.shape[0], -1)[index]
        scales = self.scales if self.scales is None or len(self.scales) == 1 else self.scales[index]
        return replace(self, shape=(len(index), *self.shape[1:]), data=data.reshape(-1), scales=scales)

    def matrix(self, number: int) -> RawTensor:
        """The matrix of that number, of a tensor [n, out, in]."""
        scales = self.scales if self.scales is None or len(self.scales) == 1 else self.scales[number : number + 1]
        return replace(self, shape=self.shape[1:], data=self.data.reshape(self.shape[0], -1)[number], scales=scales)

    def samples(self) -> Iterator[bytes]:
        """Some bytes of the beginning, the middle and the end."""
        runs = self.data.reshape(1, -1) if self.data.ndim == 1 else self.data
        middle = runs[len(runs) // 2]
        half = len(middle) // 2
        yield from (runs[0, :256].tobytes(), middle[half : half + 256].tobytes(), runs[-1, -256:].tobytes())
        if self.scales is not None:
            yield self.scales.tobytes()

    def float32(self) -> Float32:
        """The values, float32 of `shape`; a read-only view where the tensor is stored as F32 and aligned."""
        if self.type == "F32" and self.data.ctypes.data % 4 == 0 and self.scales is None:
            return self.data.view("<f4").reshape(self.shape)
        return self.values(0, self.size // self.shape[-1]).reshape(self.shape)

    def values(self, begin: int, end: int) -> Float32:
        """The values of some rows, float32 [rows, cols]."""
        values, scales = dequantize(self.rows()[begin:end], self.type), self.row_scales()
        if scales is not None:
            values *= scales[begin:end, None]
        if self.order is None:
            return values
        in_order = np.empty_like(values)
        in_order[:, self.order] = values
        return in_order


def float32_tensor(values: Float32) -> RawTensor:
    """A tensor of these values."""
    return RawTensor("F32", values.shape, np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8))


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that a file has in another order, as a checkpoint asks for it: made of `sources` by each `gathered`.

    make: their data, uint8 1-D each, to that of the tensor. scales, order: as of a `RawTensor`. kind: in which way a
    folder stores the matrix, a word for people; "": it is not quantised there.
    """

    type: str
    shape: tuple[int, ...]
    sources: tuple[RawTensor, ...]
    make: Callable[..., Bytes]
    scales: Float32 | None = None
    order: Indices | None = None
    kind: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * block_type(self.type).row_bytes(self.shape[-1])

    def gathered(self) -> RawTensor:
        """Made anew, a copy."""
        data = self.make(*(one.gathered().data for one in self.sources))
        return RawTensor(self.type, self.shape, data, self.scales, self.order)

    def runs(self, count: int, first: int, nbytes: int) -> MadeTensor:
        """`nbytes` bytes from `first` on of each of `count` parts of the data, as another tensor's; with this one's
        shape."""

        def make(*sources: Bytes) -> Bytes:
            parts = self.make(*sources).reshape(count, -1)
            return np.ascontiguousarray(parts[:, first : first + nbytes]).reshape(-1)

        return replace(self, make=make)

    def samples(self) -> Iterator[bytes]:
        for source in self.sources:
            yield from source.samples()
        if self.scales is not None:
            yield self.scales.tobytes()


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """Tensors of one type and shape, stored apart, as one with a first dimension more: what a checkpoint asks of a
    stored tensor. `gathered` gives a `RawTensor`."""

    parts: tuple[RawTensor | MadeTensor, ...]

    @property
    def type(self) -> str:
        return self.parts[0].type

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def scales(self) -> Float32 | None:
        """Factors of the values beside those in the blocks, as of a `RawTensor`."""
        scales = [part.scales for part in self.parts]
        if all(one is None for one in scales):
            return None
        return np.array([1 if one is None else one[0] for one in scales], np.float32)

    def gathered(self) -> RawTensor:
        """All of it in one array, a copy."""
        nbytes = self.nbytes // len(self.parts)
        data = np.empty(self.nbytes, np.uint8)
        for number, part in enumerate(self.parts):
            data[number * nbytes : (number + 1) * nbytes] = part.gathered().data
        return RawTensor(self.type, self.shape, data, self.scales)

    def samples(self) -> Iterator[bytes]:
        for part in (self.parts[0], self.parts[len(self.parts) // 2], self.parts[-1]):
            yield from part.samples()


StoredTensor = RawTensor | StackedTensor | MadeTensor


@dataclass(frozen=True, slots=True)
class RestingTensor:
    """Matrices [n, out, in] that stay in their files. places: of each (number of the file, offset), its rows one behind
    another. scales: as of a `RawTensor`."""

    type: str
    shape: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    scales: Float32 | None = None

    def matrix(self, number: int, data: Bytes) -> RawTensor:
        """The matrix of that number, of what was read of it."""
        scales = self.scales if self.scales is None or len(self.scales) == 1 else self.scales[number : number + 1]
        return RawTensor(self.type, self.shape[1:], data, scales)

    @property
    def each_nbytes(self) -> int:
        """Bytes of one matrix."""
        return self.shape[1] * block_type(self.type).row_bytes(self.shape[2])


class SeparateNorms(NamedTuple):
    """Norms of `ExpertsConfig.separate`, as a device has them: of what the router and the shared expert read, of what
    that one and the others give."""

    router: Any
    shared: Any
    shared_out: Any
    experts_out: Any


class StreamMix(NamedTuple):
    """Coefficients of residual streams (`AltUpConfig`): weights . tanh(router . norm(row) / d_model) of a row.

    norm: as a device has it; router: float32 [streams, d_model]; weights: float32 [coefficients, streams].
    """

    norm: Any
    router: Float32
    weights: Float32


class ExpertWeights(NamedTuple):
    """A layer's experts: the router [experts, d_model]; gives the experts' matrices [experts, out, in], large, one
    after another; those of the shared expert; float32 vectors that a layer may lack. some: gives the matrices of some
    experts alone; resting: says where they lie, ModelError where not as they are used; check: ChangedError if the file
    that the matrices may be views of was changed."""

    router: RawTensor
    early: bool  # the router reads what the layer gets, before attention
    experts: Callable[[], Iterator[RawTensor]]
    shared: Sequence[RawTensor]
    correction: Float32 | None
    shared_weight: Float32 | None
    router_bias: Float32 | None
    biases: Sequence[Float32 | None]  # of the experts' matrices, [experts, out]
    norm: Float32 | None  # of their input, float32 [d_model], where it is an RMS norm
    latents: Sequence[RawTensor]  # matrices before the experts and behind them; none: they read and give the layer's
    some: Callable[[Indices], Iterator[RawTensor]]
    resting: Callable[[], Sequence[RestingTensor]]
    check: Callable[[], None]
    factors: Float32 | None = None  # of the weights of experts, float32 [experts]
    separate: SeparateNorms | None = None

    @property
    def norms(self) -> list[Any]:
        """The norms of `separate`, none without."""
        return list(self.separate or ())


def convert(tensor: RawTensor, type_name: str, tick: Callable[[int], None]) -> RawTensor:
    """The tensor in another type, a new array; `tick` gets the number of elements done, now and then.

    ModelError if a value cannot be held by the type or a type cannot be read or written.
    """
    rows = tensor.rows()
    cols = tensor.shape[-1]
    kind = block_type(type_name)
    out = np.empty((len(rows), kind.row_bytes(cols)), np.uint8)
    scales = tensor.row_scales()

    def piece(start: int, end: int) -> None:
        if (tensor.type, type_name) == ("NVFP4", "Q8_0"):
            out[start:end] = nvfp4_as_q8_0(rows[start:end], None if scales is None else scales[start:end, None])
        else:
            out[start:end] = quantize(tensor.values(start, end), type_name)

    for done in map_pieces(len(rows), cols, piece):
        tick((done.stop - done.start) * cols)
    return RawTensor(type_name, tensor.shape, out.reshape(-1))


def map_pieces(rows: int, cols: int, work: Callable[[int, int], None]) -> Iterator[range]:
    """Pieces of the rows, once `work`, which threads do at the same time, has done them: it gets the first row and the
    end."""
    step = max(1, _PIECE // cols)
    pieces = [range(start, min(start + step, rows)) for start in range(0, rows, step)]

    def done(piece: range) -> range:
        work(piece.start, piece.stop)
        return piece

    if len(pieces) == 1:
        yield done(pieces[0])
    else:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(len(pieces), 8, usable_cores()[0])) as pool:
            yield from pool.map(done, pieces)


def transpose(tensor: RawTensor, type_name: str, tick: Callable[[int], None]) -> RawTensor:
    """A matrix [n, m], or each of [heads, n, m], as [m, n] in another type, a new array; F32, F16 and BF16 keep their
    bits where the type stays.

    `tick` and errors as `convert`.
    """
    *outer, n, m = tensor.shape
    if outer:
        parts_ = np.split(tensor.rows(), math.prod(outer))
        scales: list[Float32 | None] = [None] * len(parts_)
        if tensor.scales is not None:
            scales = list(np.resize(tensor.scales, (len(parts_), 1)))
        matrices = (RawTensor(tensor.type, (n, m), one.reshape(-1), of) for one, of in zip(parts_, scales, strict=True))
        parts = [transpose(matrix, type_name, tick).data for matrix in matrices]
        return RawTensor(type_name, (*outer, m, n), np.concatenate(parts))
    rows = tensor.rows()
    kind = block_type(type_name)
    same = type_name == tensor.type and kind.block == 1 and tensor.scales is None
    out = np.empty((m, kind.row_bytes(n)), np.uint8)
    # Columns of the source whose values, as float32, fill a piece; whole blocks of any type.
    step = max(1, _PIECE // n // 256) * 256
    for start in range(0, m, step):
        wide = min(step, m - start)
        source = block_type(tensor.type)
        begin, end = (source.row_bytes(at) for at in (start, start + wide))
        part = np.ascontiguousarray(rows[:, begin:end])
        if same:
            transposed = np.ascontiguousarray(part.view(f"<u{kind.nbytes}").T).view(np.uint8)
        else:
            values = dequantize(part, tensor.type).T
            values = values if tensor.scales is None else values * tensor.scales
            transposed = quantize(np.ascontiguousarray(values), type_name)
        out[start : start + wide] = transposed
        tick(wide * n)
    return RawTensor(type_name, (m, n), out.reshape(-1))
