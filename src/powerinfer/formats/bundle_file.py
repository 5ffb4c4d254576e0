"""Bundles on disk: gate, up and down of one neuron side by side; a layer is `layers.N.neurons` U8 [groups, bytes].

A bundle is rows of gate, up and down, each padded to whole cache lines, its bytes in an order private to the native
module. Gate and up are in one of `ROW_TYPES` or `STORED_ROWS`, down in one of `DOWN_TYPES`. 32 bundles form a group,
the last one of a layer padded with zeros; the scales of types `ACROSS` follow each group. Biases stay in the model's
own files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from powerinfer.config import ModelConfig
from powerinfer.formats.bundle_memory import ApartBundles, apart, apart_bytes, owned
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.prepared import BUNDLES, LINE, PreparedFile
from powerinfer.formats.quant import Bytes, block_type
from powerinfer.formats.weight_types import BLOCKS, DOWN_TYPES, ROW_TYPES, STORED_ROWS
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout

RowBytes = Callable[[str, int], tuple[int, int]]
"""(type, k) -> bytes of a row of k elements, and of a group's shared scales; `kernels.cpu.bundle_row_bytes`."""


@dataclass(frozen=True)
class BundleFile:
    """The bundles of a model, mapped.

    layouts: of each layer; layers: for each uint8 [groups, layout.group_bytes], read-only, no groups where a layer has
    no FFN; source_type: the main type of the weights they were made from; file: call `file.check()` before reading, it
    raises if the file has been truncated since it was opened.
    """

    layouts: tuple[BundleLayout, ...]
    layers: tuple[Bytes, ...]
    source_type: str
    file: MappedFile

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    @property
    def types(self) -> tuple[str, str]:
        """The types of gate and up, and of down, each once."""
        downs = (layout.down_type for layout, rows in zip(self.layouts, self.layers, strict=True) if len(rows))
        return self.layouts[0].gate_type, ", ".join(dict.fromkeys(downs))

    @property
    def types_by_part(self) -> dict[str, str | None]:
        """The types of gate, up and down; of gate None if no layer has one."""
        gate, down = self.types
        return {"gate": gate if any(layout.gated for layout in self.layouts) else None, "up": gate, "down": down}

    @property
    def nbytes(self) -> int:
        """Bytes of all bundles."""
        return sum(layer.nbytes for layer in self.layers)

    def copied(self, layer: int) -> Bytes:
        """A layer, copied as by `owned`; the pages of the file are released."""
        rows = self.layers[layer]
        self.file.populate(rows)
        copy = owned(rows)
        self.file.release(rows)
        return copy

    @property
    def apart_bytes(self) -> tuple[int, ...]:
        """Bytes that `copied_apart` takes, by layer."""
        return tuple(apart_bytes(own, len(rows)) for own, rows in zip(self.layouts, self.layers, strict=True))

    def copied_apart(self, layer: int, memory: Bytes) -> ApartBundles:
        """The same without the rows of the first product, into `memory`, uint8 of the layer's `apart_bytes`."""
        rows = self.layers[layer]
        self.file.populate(rows)
        copy = apart(self.layouts[layer], rows, memory)
        self.file.release(rows)
        return copy


@dataclass(frozen=True)
class _BundlesHeader:
    """The description in a file. down_types: of every layer, where they are not alike."""

    d_model: int
    neurons: list[int]
    n_layers: int
    gated: list[bool]
    gate_type: str
    down_type: str
    source_type: str
    down_types: list[str] | None = None


def bundle_layouts(
    config: ModelConfig, gate_type: str, down_type: str | Sequence[str], bundle_row_bytes: RowBytes
) -> tuple[BundleLayout, ...]:
    """The layouts of the bundles of each layer, with rows of these types, of down perhaps another in each layer."""
    gate_bytes, _ = bundle_row_bytes(gate_type, config.d_model)
    downs = [down_type] * config.n_layers if isinstance(down_type, str) else down_type
    sizes = {down: (gate_bytes, *bundle_row_bytes(down, config.d_model)) for down in set(downs)}
    return tuple(
        BundleLayout(config.d_model, layer.ffn.gated, gate_type, down, *sizes[down])
        for layer, down in zip(config.layers, downs, strict=True)
    )


def can_hold(config: ModelConfig, matrix: str, type_name: str) -> bool:
    """Whether rows of gate, up or down of this type are whole blocks."""
    if type_name in BLOCKS:
        return matrix == "down" and not any(size % BUNDLE_GROUP for size in (*config.ffn_sizes, config.d_model))
    return (
        type_name in (DOWN_TYPES if matrix == "down" else (*ROW_TYPES, *STORED_ROWS))
        and config.d_model % block_type(type_name).block == 0
    )


def n_groups(neurons: int) -> int:
    """Number of groups of that number of neurons; the last may be partly filled."""
    return -(-neurons // BUNDLE_GROUP)


def open_bundles(checkpoint: Checkpoint, prepared: str | None, bundle_row_bytes: RowBytes) -> BundleFile:
    """The bundles of a model, from the folder `prepared` (None: beside the model).

    ModelError, with the command that makes them, if there are none or they do not match the model as it is opened.
    """
    place = PreparedFile(BUNDLES, checkpoint, prepared)
    description, tensors, file = place.read()
    config = checkpoint.config
    header = place.described(_BundlesHeader, description)
    gated = [layer.ffn.gated for layer in config.layers]
    sizes = {"d_model": config.d_model, "neurons": list(config.ffn_sizes), "n_layers": config.n_layers}
    for name, size in sizes.items():
        if getattr(header, name) != size:
            raise place.bad(f"states a {name} of {getattr(header, name)}, and the model has {size}")
    if header.gated != gated:
        raise place.bad("is not of the model's kind of FFN")
    gate_type, downs = header.gate_type, header.down_types or [header.down_type] * config.n_layers
    if len(downs) != config.n_layers:
        raise place.bad(f"states {len(downs)} types of down, and the model has {config.n_layers} layers")
    for matrix, name in (("up", gate_type), *(("down", name) for name in dict.fromkeys(downs))):
        if not can_hold(config, matrix, name):
            raise place.bad(f"holds rows of type {shown(name)}, which it cannot")
    layouts = bundle_layouts(config, gate_type, downs, bundle_row_bytes)
    layers = []
    for layer, (size, layout) in enumerate(zip(config.ffn_sizes, layouts, strict=True)):
        if not size:
            layers.append(np.empty((0, layout.group_bytes), np.uint8))
            continue
        tensor = place.holds(tensors, _name(layer), "U8", (n_groups(size), layout.group_bytes))
        if tensor.data.ctypes.data % LINE:
            raise place.bad(f"holds layer {layer} where no cache line begins")
        layers.append(tensor.data.reshape(tensor.shape))
    place.holds_no_more(tensors)
    return BundleFile(layouts, tuple(layers), header.source_type, file)


@contextmanager
def write_bundles(
    checkpoint: Checkpoint, prepared: str | None, layouts: Sequence[BundleLayout]
) -> Iterator[Callable[[int, Bytes], None]]:
    """Write the bundles of a model: the block calls the function with (layer, uint8 [groups,
    group_bytes of its layout]).

    Layers in order, the groups of a layer in order and in any number of pieces. The file is renamed to its final name
    when the block succeeds. PowerInferError if it cannot be written.
    """
    config, downs = checkpoint.config, [layout.down_type for layout in layouts]
    description = _BundlesHeader(
        d_model=config.d_model,
        neurons=list(config.ffn_sizes),
        n_layers=config.n_layers,
        gated=[layout.gated for layout in layouts],
        gate_type=layouts[0].gate_type,
        down_type=downs[0],
        source_type=checkpoint.main_type,
        down_types=downs if len(set(downs)) > 1 else None,
    )
    shapes = [(n_groups(size), own.group_bytes) for size, own in zip(config.ffn_sizes, layouts, strict=True)]
    tensors = [(_name(layer), "U8", shape) for layer, shape in enumerate(shapes) if shape[0]]
    with PreparedFile(BUNDLES, checkpoint, prepared).write(asdict(description), tensors) as write:
        yield lambda layer, rows: write(_name(layer), rows)


def _name(layer: int) -> str:
    return f"layers.{layer}.neurons"
