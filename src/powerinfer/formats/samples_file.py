"""Samples on disk: the input of a layer's predictor for a token, and the neurons that fire for it.

For each layer `layers.N.x` F16 [rows, d_model], the residual stream before the FFN's norm (where attention and FFN read
the same, the layer's input), clipped to the range of F16, and `layers.N.active` U8 [rows, ceil(neurons / 8)]: bit i % 8
of byte i // 8 is neuron i. Rows are in the order of the text, and row r of every layer is the same token. `windows` I64
[number] holds the first row of each window of text, so that whole windows can be held out.

Of a layer of experts `layers.N.selected` U16 [rows, experts of a token] holds the experts that the token selected,
ascending, and `layers.N.active` U8 [rows, experts of a token * neurons of an expert / 8] the neurons of these; behind
them are those of a shared expert without gates. Layers without neurons have no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ExpertsConfig
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import Between
from powerinfer.formats.mapped import MappedFile
from powerinfer.formats.prepared import SAMPLES, PartFile, PreparedFile
from powerinfer.formats.quant import Bytes, Float32

_F16_MAX = 65504.0


@dataclass(frozen=True)
class _SamplesHeader:
    rows: Annotated[int, Between(1, 1 << 40)]
    about: dict[str, Any]


@dataclass(frozen=True)
class SamplesFile:
    """The samples of a model, mapped; call `file.check()` before they are read.

    layers: of each layer with neurons (x float16 [rows, d_model], active uint8 [rows, ceil(neurons / 8)]), read-only
    views; of experts active is of the neurons of a token, and selected has of each layer its experts, uint16 [rows,
    experts of a token]; else it is empty. windows: int64, the first row of each window, ascending from 0; details: how
    they were made.
    """

    rows: int
    layers: dict[int, tuple[NDArray[np.float16], Bytes]]
    windows: NDArray[np.int64]
    details: dict[str, Any]
    file: MappedFile
    selected: dict[int, NDArray[np.uint16]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path


def row_bytes(checkpoint: Checkpoint) -> int:
    """Bytes that one row takes, of all layers together."""
    layers = checkpoint.config.predicted_layers
    tensors = (one for layer in layers for one in _layer_tensors(checkpoint, layer, 1))
    return sum(shape[1] * (1 if dtype == "U8" else 2) for _, dtype, shape in tensors)


def open_samples(checkpoint: Checkpoint, prepared: str | None = None) -> SamplesFile:
    """The samples of a model, from the folder `prepared` (None: beside the model).

    ModelError, with the command that makes them, if there are none or they do not match the model as it is opened.
    """
    place = PreparedFile(SAMPLES, checkpoint, prepared)
    description, tensors, file = place.read()
    header = place.described(_SamplesHeader, description)
    rows = header.rows
    layers, selected = {}, {}
    for layer in checkpoint.config.predicted_layers:
        views = []
        for name, dtype, shape in _layer_tensors(checkpoint, layer, rows):
            tensor = place.holds(tensors, name, dtype, shape)
            if tensor.data.ctypes.data % 2:
                raise place.bad(f"holds {name} at an odd place")
            views.append(tensor.data)
        layers[layer] = (views[0].view("<f2").reshape(rows, -1), views[1].reshape(rows, -1))
        if views[2:]:
            selected[layer] = views[2].view("<u2").reshape(rows, -1)
    windows = tensors.pop("windows", None)
    if windows is None or windows.type != "I64" or len(windows.shape) != 1 or not windows.size:
        raise place.bad("does not say where its windows begin")
    file.check()
    for layer, chosen in selected.items():
        ffn = checkpoint.config.experts[layer]
        if int(chosen.max()) >= ffn.n_experts or (chosen[:, 1:] <= chosen[:, :-1]).any():
            raise place.bad(f"selects no {ffn.router.top_k} different ones of {ffn.n_experts} experts in layer {layer}")
    starts = np.frombuffer(windows.data.tobytes(), "<i8").astype(np.int64)
    if starts[0] != 0 or starts.max() >= rows or (starts[1:] <= starts[:-1]).any():
        raise place.bad("has windows that do not follow one another")
    place.holds_no_more(tensors)
    return SamplesFile(rows, layers, starts, header.about, file, selected)


class SamplesWriter:
    """Takes the rows for `write_samples`. resumed: it continues the file of an earlier process."""

    def __init__(self, checkpoint: Checkpoint, part: PartFile) -> None:
        self._checkpoint = checkpoint
        self._part = part
        self.resumed = part.resumed

    def put(
        self, layer: int, first: int, x: Float32, active: Bytes, selected: NDArray[np.integer[Any]] | None = None
    ) -> None:
        """Rows of a layer from `first` on: x [n, d_model] of any float type, active uint8 as of `SamplesFile`.

        selected: integers [n, experts of a token], of a layer of experts.
        """
        shapes = [(name, shape[1]) for name, _, shape in _layer_tensors(self._checkpoint, layer, 1)]
        arrays = [np.ascontiguousarray(np.clip(x, -_F16_MAX, _F16_MAX), "<f2"), np.ascontiguousarray(active)]
        if selected is not None:
            arrays.append(np.ascontiguousarray(selected, "<u2"))
        for (name, width), values in zip(shapes, arrays, strict=True):
            assert values.shape == (len(x), width), (name, values.shape)
            data = values.reshape(-1).view(np.uint8)
            self._part.put(name, first * width * values.itemsize, data)

    def sync(self) -> None:
        """Sync to disk."""
        self._part.sync()


@contextmanager
def write_samples(
    checkpoint: Checkpoint,
    prepared: str | None,
    rows: int,
    windows: NDArray[np.int64],
    details: Mapping[str, Any],
    resume: bool = False,
) -> Iterator[SamplesWriter]:
    """Write the samples of a model: the block puts the rows of every layer, in any order.

    windows: first rows, int64, ascending from 0; details: values of JSON. The file is renamed to its final name when
    the block succeeds; if it ends early, `resume` continues it in a call with the same arguments. PowerInferError if
    it cannot be written.
    """
    assert rows > 0 and len(windows) and windows[0] == 0
    place = PreparedFile(SAMPLES, checkpoint, prepared)
    description = {"rows": rows, "about": dict(details)}
    with place.fill(description, _tensors(checkpoint, rows, windows), resume) as part:
        part.put("windows", 0, np.ascontiguousarray(windows, "<i8").view(np.uint8))
        yield SamplesWriter(checkpoint, part)


def check_samples(checkpoint: Checkpoint, prepared: str | None, rows: int, windows: NDArray[np.int64]) -> None:
    """PowerInferError, before the work, if `write_samples` could not write the file."""
    PreparedFile(SAMPLES, checkpoint, prepared).check_writable(_tensors(checkpoint, rows, windows))


def _tensors(
    checkpoint: Checkpoint, rows: int, windows: NDArray[np.int64]
) -> list[tuple[str, str, tuple[int, ...]]]:
    layers = checkpoint.config.predicted_layers
    tensors = [tensor for layer in layers for tensor in _layer_tensors(checkpoint, layer, rows)]
    return [*tensors, ("windows", "I64", windows.shape)]


def _layer_tensors(checkpoint: Checkpoint, layer: int, rows: int) -> list[tuple[str, str, tuple[int, int]]]:
    """(name, dtype, shape) of the tensors of a layer."""
    ffn, x = checkpoint.config.layers[layer].ffn, (f"layers.{layer}.x", "F16", (rows, checkpoint.config.d_model))
    if not isinstance(ffn, ExpertsConfig):
        return [x, (f"layers.{layer}.active", "U8", (rows, -(-checkpoint.config.ffn_sizes[layer] // 8)))]
    top = ffn.router.top_k
    return [
        x,
        (f"layers.{layer}.active", "U8", (rows, (top * ffn.size + ffn.predicted_shared) // 8)),
        (f"layers.{layer}.selected", "U16", (rows, top)),
    ]
