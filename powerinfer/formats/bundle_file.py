"""Bundles on disk: gate, up and down of one neuron side by side; a layer is `layers.N.neurons` U8 [groups, bytes].

A part is the row of one neuron in one of `PART_TYPES`, its bytes in the order that the native module chooses, padded to
whole cache lines. 32 bundles make a group, the last one of a layer filled up with zeros. Down may also be `ACROSS`: its
scales lie behind each group. Biases stay in the model's own files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from powerinfer.config import ModelConfig
from powerinfer.formats.bundle_memory import owned
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.prepared import BUNDLES, LINE, PreparedFile
from powerinfer.formats.quant import Bytes, block_type
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout

PART_TYPES = ("F16", "BF16", "Q8_0", "Q4_0")
"""The types that a part can have."""

ACROSS = "Q4_0X32"
"""Down as files of Q4_0 have it: each block across the 32 neurons of a group, whose rows share their scales."""

DOWN_TYPES = (*PART_TYPES, ACROSS)

PartBytes = Callable[[str, int], tuple[int, int]]
"""part_bytes(type, k): bytes of a row of k elements, and of what a group's rows share; `kernels.cpu.part_bytes`."""


@dataclass(frozen=True)
class BundleFile:
    """The bundles of a model, mapped.

    layers: for each layer uint8 [groups, layout.group_bytes], read-only; source_type: the main type of the weights they
    were made from; file: `file.check()` tells whether it is still as long as when it was opened, to be asked before it
    is read.
    """

    layout: BundleLayout
    layers: tuple[Bytes, ...]
    source_type: str
    file: MappedFile

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.file.path

    @property
    def nbytes(self) -> int:
        """Bytes of all bundles."""
        return sum(layer.nbytes for layer in self.layers)

    def copied(self, layer: int) -> Bytes:
        """A layer, copied as `owned` does; the pages of the file are given back."""
        rows = self.layers[layer]
        self.file.populate(rows)
        own = owned(rows)
        self.file.release(rows)
        return own


def bundle_layout(config: ModelConfig, gate_type: str, down_type: str, part_bytes: PartBytes) -> BundleLayout:
    """The layout of the bundles of a model with parts of these types."""
    gate_bytes, _ = part_bytes(gate_type, config.d_model)
    down_bytes, shared_bytes = part_bytes(down_type, config.d_model)
    return BundleLayout(config.d_model, config.gated, gate_type, down_type, gate_bytes, down_bytes, shared_bytes)


def can_hold(config: ModelConfig, part: str, type_name: str) -> bool:
    """Whether rows of gate, up or down of this type are whole blocks."""
    if type_name == ACROSS:
        return part == "down" and not any(size % BUNDLE_GROUP for size in (*config.ffn_sizes, config.d_model))
    return type_name in PART_TYPES and config.d_model % block_type(type_name).block == 0


def n_groups(neurons: int) -> int:
    """Groups of the bundles of so many neurons, the last of which need not be full."""
    return -(-neurons // BUNDLE_GROUP)


def open_bundles(checkpoint: Checkpoint, prepared: str | None, part_bytes: PartBytes) -> BundleFile:
    """The bundles that were packed for a model, from the folder `prepared` (None: beside the model).

    ModelError, naming the command that makes them, if there are none or they do not suit the model as it is opened.
    """
    place = PreparedFile(BUNDLES, checkpoint, prepared)
    description, tensors, file = place.read()
    config = checkpoint.config
    for name, size in (("d_model", config.d_model), ("neurons", list(config.ffn_sizes)), ("n_layers", config.n_layers)):
        if description.get(name) != size:
            raise place.bad(f"states a {name} of {shown(description.get(name))}, and the model has {size}")
    if description.get("gated") is not config.gated:
        raise place.bad("is not of the model's kind of FFN")
    gate_type, down_type = str(description.get("gate_type")), str(description.get("down_type"))
    for part, name in (("up", gate_type), ("down", down_type)):
        if not can_hold(config, part, name):
            raise place.bad(f"holds parts of type {shown(name)}, which it cannot")
    layout = bundle_layout(config, gate_type, down_type, part_bytes)
    layers = []
    for layer, size in enumerate(config.ffn_sizes):
        groups = n_groups(size)
        tensor = tensors.pop(_name(layer), None)
        if tensor is None or tensor.type != "U8" or tensor.shape != (groups, layout.group_bytes):
            raise place.bad(f"does not hold layer {layer} as {groups} groups of {layout.group_bytes} bytes")
        if tensor.data.ctypes.data % LINE:
            raise place.bad(f"holds layer {layer} where no cache line begins")
        layers.append(tensor.data.reshape(tensor.shape))
    if tensors:
        raise place.bad(f"holds tensors that are not bundles, such as {shown(next(iter(tensors)))}")
    return BundleFile(layout, tuple(layers), str(description.get("source_type")), file)


@contextmanager
def write_bundles(
    checkpoint: Checkpoint, prepared: str | None, layout: BundleLayout
) -> Iterator[Callable[[int, Bytes], None]]:
    """Write the bundles of a model: the block calls what it is given with (layer, uint8 [groups, layout.group_bytes]).

    Layers in order, the groups of a layer in order and in as many pieces as one likes. The file appears under its name
    when the block has ended well. PowerInferError if it cannot be written.
    """
    config = checkpoint.config
    description = {
        "d_model": config.d_model,
        "neurons": list(config.ffn_sizes),
        "n_layers": config.n_layers,
        "gated": config.gated,
        "gate_type": layout.gate_type,
        "down_type": layout.down_type,
        "source_type": checkpoint.main_type,
    }
    shapes = [(n_groups(size), layout.group_bytes) for size in config.ffn_sizes]
    tensors = [(_name(layer), "U8", shape) for layer, shape in enumerate(shapes)]
    with PreparedFile(BUNDLES, checkpoint, prepared).write(description, tensors) as write:
        yield lambda layer, rows: write(_name(layer), rows)


def _name(layer: int) -> str:
    return f"layers.{layer}.neurons"
