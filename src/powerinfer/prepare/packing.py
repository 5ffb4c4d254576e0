"""Making bundles: the FFN weights of a model, neuron by neuron, in the types of its rows.

Gate and up are stored neuron by neuron in every model file, so their rows keep their codes if the type is kept. Down is
transposed: floats are copied unchanged, but the blocks of a quantised matrix run across the neurons. Those of Q4_0 are
kept, with scales that a group of neurons shares; other types are requantised along a neuron, to Q8_0. The error is
measured on the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ModelError
from powerinfer.formats.bundle_file import BundleFile, bundle_layouts, n_groups, open_bundles, write_bundles
from powerinfer.formats.bundle_memory import by_group, transposed
from powerinfer.formats.bundle_types import RowTypes, by_neuron, gate_and_up, tensor_name
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.quant import (
    SHORT_BLOCKS,
    Bytes,
    Float32,
    as_q8_0,
    as_short_blocks,
    block_type,
    dequantize,
    quantize,
)
from powerinfer.formats.tensors import convert
from powerinfer.formats.weight_types import ACROSS, BLOCKS, FLOAT_TYPES
from powerinfer.kernels import cpu
from powerinfer.neurons import BundleLayout
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.selection import check_neurons

Squares = NDArray[np.float64]
"""[sum of squared errors, sum of squared weights]."""

_SLAB = 1 << 20  # weights of a matrix that one thread processes at a time
_BLOCK = 256  # slabs are multiples of this many neurons, so that no block of any type is split


@dataclass(frozen=True)
class Packed:
    """The result of `pack`.

    error: matrix -> root of its weights' summed squared errors, relative to that of the weights as returned by the
    checkpoint; 0 if none changed. seconds: of the whole work.
    """

    bundles: BundleFile
    error: dict[str, float]
    seconds: float


def describe(bundles: BundleFile, packed: Packed | None) -> dict[str, Any]:
    """The bundles as a JSON document; packed: None where they were there already."""
    return {
        "path": str(bundles.path),
        "bytes": bundles.file.size,
        "types": bundles.types_by_part,
        "layers": len(bundles.layers),
        "error": packed.error if packed else None,
        "seconds": packed.seconds if packed else 0.0,
    }


def current(checkpoint: Checkpoint, prepared: str | None, types: RowTypes) -> BundleFile | None:
    """The existing bundles, if `pack` would make the same."""
    try:
        bundles = open_bundles(checkpoint, prepared, cpu.bundle_row_bytes)
    except ModelError:
        return None
    return bundles if bundles.types == (types.gate, types.down) else None


def pack(
    checkpoint: Checkpoint, prepared: str | None, types: RowTypes, progress: Progress = silent, threads: int = 0
) -> Packed:
    """Write the bundles of a model into the folder `prepared` (None: beside the model).

    Memory: about 40 MB for each core while d_model is below 4096, in proportion to it above, and one matrix where the
    checkpoint itself converts it (--quantize, types without kernels); the source's pages are released layer by layer.
    RequestError for FFNs whose neurons are not told apart, ModelError for weights that a type cannot hold,
    PowerInferError if the file cannot be written; no partial file remains. threads: of which 8 at most are used; 0:
    every core.
    progress: called with ("packing neurons", neurons done, neurons).
    """
    begin = time.perf_counter()
    config = checkpoint.config
    check_neurons(config, "pack")
    layouts = bundle_layouts(config, types.gate, types.downs, cpu.bundle_row_bytes)
    squares = {name: np.zeros(2) for name in (*gate_and_up(config.layers), "down")}
    step = max(1, _SLAB // config.d_model // _BLOCK) * _BLOCK
    groups = n_groups(min(step, config.widest_ffn))
    spaces = {layout: np.zeros((groups, layout.group_bytes), np.uint8) for layout in set(layouts)}
    cores = min(8, cpu.choose_threads(threads)[0])
    done = 0
    with write_bundles(checkpoint, prepared, layouts) as write, ThreadPoolExecutor(cores) as pool:
        for layer, layout in enumerate(layouts):
            matrices = _all_rows(layout) if config.ffn_sizes[layer] else []
            sources = [_Source(checkpoint, one, layer) for one in matrices]
            for slab in _slabs(sources, config.ffn_sizes[layer], step, pool, cores):
                count = len(slab[0][0])
                rows = spaces[layout][: n_groups(count)]
                for one, (data, error) in zip(matrices, slab, strict=True):
                    squares[one.name] += error
                    one.put(data, count, rows, layout, cores)
                write(layer, rows)
                done += count
                progress("packing neurons", done, config.n_neurons)
            checkpoint.release()
    errors = {name: float(np.sqrt(wrong / whole)) if wrong else 0.0 for name, (wrong, whole) in squares.items()}
    return Packed(open_bundles(checkpoint, prepared, cpu.bundle_row_bytes), errors, time.perf_counter() - begin)


@dataclass(frozen=True, slots=True)
class _Rows:
    name: str  # gate, up or down
    type: str

    def put(self, stored: Bytes, neurons: int, groups: Bytes, layout: BundleLayout, threads: int) -> None:
        """Write the result of `_Source.rows` into the bundles, uint8 [groups, layout.group_bytes]."""
        cpu.pack_bundle_rows(layout, self.name, neurons, stored.reshape(-1), groups, threads)


def _all_rows(layout: BundleLayout) -> list[_Rows]:
    gate = [_Rows("gate", layout.gate_type)] if layout.gated else []
    return [*gate, _Rows("up", layout.gate_type), _Rows("down", layout.down_type)]


def _slabs(
    sources: list[_Source], neurons: int, step: int, threads: ThreadPoolExecutor, turn: int
) -> Iterator[list[tuple[Bytes, Squares]]]:
    """`_Source.rows` of every matrix for each run of `step` neurons, in order, `turn` runs at a time."""

    def slab(at: int) -> list[tuple[Bytes, Squares]]:
        return [source.rows(at, min(at + step, neurons)) for source in sources]

    starts = range(0, neurons, step)
    for first in range(0, len(starts), turn):  # limits the memory of waiting results
        yield from threads.map(slab, starts[first : first + turn])


class _Source:
    """One matrix of one layer: the tensor it comes from, and its rows in the type of the bundles'."""

    def __init__(self, checkpoint: Checkpoint, rows: _Rows, layer: int) -> None:
        self._name = tensor_name(checkpoint, rows.name, layer)
        self._place = f"{checkpoint.path}: {self._name}"
        self._into = rows
        tensor = checkpoint.take(self._name)
        self._tensor = tensor if tensor.scales is None else convert(tensor, "Q8_0", lambda elements: None)
        self._type = self._tensor.type

    def rows(self, begin: int, end: int) -> tuple[Bytes, Squares]:
        """The neurons from `begin` to `end` as stored rows of its type, uint8 [neurons, row_bytes], contiguous.

        In a type of `ACROSS` they are whole groups, uint8 [groups, d_model * bytes of a block]. `begin` is a multiple
        of every block, and so is `end`, unless it is the number of neurons.
        """
        stored = self._tensor.rows()
        if by_neuron(self._name):
            return self._from_rows(stored[begin:end])
        kind = block_type(self._type)
        columns = stored[:, begin // kind.block * kind.nbytes : end // kind.block * kind.nbytes]
        if self._type == self._into.type and self._type in FLOAT_TYPES:
            return transposed(np.ascontiguousarray(columns).view(np.uint16)).view(np.uint8), np.zeros(2)
        if self._into.type == ACROSS.get(self._type):
            return by_group(columns, kind.nbytes), np.zeros(2)
        if self._type in SHORT_BLOCKS and self._into.type == ACROSS[SHORT_BLOCKS[self._type]]:
            return self._shortened(columns, SHORT_BLOCKS[self._type])
        return self._encoded(transposed(dequantize(columns, self._type)))

    def _shortened(self, columns: Bytes, target: str) -> tuple[Bytes, Squares]:
        """Columns, uint8 [d_model, bytes of their blocks], in blocks of 32 of the type `target`, and the error."""
        try:
            data = as_short_blocks(columns, self._type)
        except ModelError as error:
            raise ModelError(f"{self._place}: {error}") from None
        squares = _squares(dequantize(data, target), dequantize(columns, self._type))
        return by_group(data, block_type(target).nbytes), squares

    def _from_rows(self, stored: Bytes) -> tuple[Bytes, Squares]:
        if self._type == self._into.type:
            return stored, np.zeros(2)
        if self._into.type == "Q8_0" and self._type in ("Q4_0", "Q5_0"):
            return as_q8_0(stored, self._type), np.zeros(2)
        return self._encoded(dequantize(stored, self._type))

    def _encoded(self, values: Float32) -> tuple[Bytes, Squares]:
        """Values, float32 [neurons, d_model], in the bundles' type, and the error; ModelError if it cannot hold one."""
        across = BLOCKS.get(self._into.type)
        target = across or self._into.type
        if across:
            values = transposed(values)
        try:
            data = quantize(values, target)
        except ModelError as error:
            raise ModelError(f"{self._place}: {error}") from None
        back = dequantize(data, target)
        if not np.isfinite(back).all():
            flag = "--down-type" if self._into.name == "down" else "--type"
            hint = f"; `{flag} bf16` holds larger ones" if target == "F16" else ""
            raise ModelError(f"{self._place} has a weight that {target} cannot hold{hint}")
        return (by_group(data, block_type(target).nbytes) if across else data), _squares(back, values)


def _squares(new: Float32, values: Float32) -> Squares:
    wrong = np.square(new - values, dtype=np.float64).sum()
    return np.array([wrong, np.square(values, dtype=np.float64).sum()])
