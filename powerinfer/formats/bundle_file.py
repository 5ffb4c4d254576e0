"""Bundles on disk: gate, up and down of one neuron side by side; a layer is `layers.N.neurons` U8 [groups, bytes].

A part is the row of one neuron in one of `PART_TYPES`, its bytes in an order private to the native module, padded to
whole cache lines. 32 bundles form a group, the last one of a layer padded with zeros. Down may also be `ACROSS`: its
scales follow each group. Biases stay in the model's own files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from powerinfer.config import ModelConfig
from powerinfer.formats.bundle_memory import owned
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.prepared import BUNDLES, LINE, PreparedFile
from powerinfer.formats.quant import Bytes, block_type
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout

PART_TYPES = ("F16", "BF16", "Q8_0", "Q4_0")
"""The types of parts."""

ACROSS = "Q4_0X32"
"""Down as in Q4_0 files: each block across the 32 neurons of a group, whose rows share their scales."""

DOWN_TYPES = (*PART_TYPES, ACROSS)

PartBytes = Callable[[str, int], tuple[int, int]]
"""part_bytes(type, k): bytes of a row of k elements, and of a group's shared scales; `kernels.cpu.part_bytes`."""


@dataclass(frozen=True)
class BundleFile:
    """The bundles of a model, mapped.

    layers: for each layer uint8 [groups, layout.group_bytes], read-only; source_type: the main type of the weights they
    were made from; file: call `file.check()` before reading, it raises if the file has been truncated since it was
    opened.
    """

    layout: BundleLayout
    layers: tuple[Bytes, ...]
    source_type: str
    file: MappedFile

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    @property
    def nbytes(self) -> int:
        """Bytes of all bundles."""
        return sum(layer.nbytes for layer in self.layers)

    def copied(self, layer: int) -> Bytes:
        """A layer, copied as by `owned`; the pages of the file are released."""
        rows = self.layers[layer]
        self.file.populate(rows)
        own = owned(rows)
        self.file.release(rows)
        return own


@dataclass(frozen=True)
class _Description:
    """The description in a file."""

    d_model: int
    neurons: list[int]
    n_layers: int
    gated: bool
    gate_type: str
    down_type: str
    source_type: str


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
    """Number of groups of that number of neurons; the last may be partly filled."""
    return -(-neurons // BUNDLE_GROUP)


def open_bundles(checkpoint: Checkpoint, prepared: str | None, part_bytes: PartBytes) -> BundleFile:
    """The bundles of a model, from the folder `prepared` (None: beside the model).

    ModelError, with the command that makes them, if there are none or they do not match the model as it is opened.
    """
    place = PreparedFile(BUNDLES, checkpoint, prepared)
    description, tensors, file = place.read()
    config = checkpoint.config
    about = place.described(_Description, description)
    for name, size in (("d_model", config.d_model), ("neurons", list(config.ffn_sizes)), ("n_layers", config.n_layers)):
        if getattr(about, name) != size:
            raise place.bad(f"states a {name} of {getattr(about, name)}, and the model has {size}")
    if about.gated is not config.gated:
        raise place.bad("is not of the model's kind of FFN")
    gate_type, down_type = about.gate_type, about.down_type
    for part, name in (("up", gate_type), ("down", down_type)):
        if not can_hold(config, part, name):
            raise place.bad(f"holds parts of type {shown(name)}, which it cannot")
    layout = bundle_layout(config, gate_type, down_type, part_bytes)
    layers = []
    for layer, size in enumerate(config.ffn_sizes):
        tensor = place.holds(tensors, _name(layer), "U8", (n_groups(size), layout.group_bytes))
        if tensor.data.ctypes.data % LINE:
            raise place.bad(f"holds layer {layer} where no cache line begins")
        layers.append(tensor.data.reshape(tensor.shape))
    place.holds_no_more(tensors)
    return BundleFile(layout, tuple(layers), about.source_type, file)


@contextmanager
def write_bundles(
    checkpoint: Checkpoint, prepared: str | None, layout: BundleLayout
) -> Iterator[Callable[[int, Bytes], None]]:
    """Write the bundles of a model: the block calls the function with (layer, uint8 [groups, layout.group_bytes]).

    Layers in order, the groups of a layer in order and in any number of pieces. The file is renamed to its final name
    when the block succeeds. PowerInferError if it cannot be written.
    """
    config = checkpoint.config
    description = _Description(
        d_model=config.d_model,
        neurons=list(config.ffn_sizes),
        n_layers=config.n_layers,
        gated=config.gated,
        gate_type=layout.gate_type,
        down_type=layout.down_type,
        source_type=checkpoint.main_type,
    )
    shapes = [(n_groups(size), layout.group_bytes) for size in config.ffn_sizes]
    tensors = [(_name(layer), "U8", shape) for layer, shape in enumerate(shapes)]
    with PreparedFile(BUNDLES, checkpoint, prepared).write(asdict(description), tensors) as write:
        yield lambda layer, rows: write(_name(layer), rows)


def _name(layer: int) -> str:
    return f"layers.{layer}.neurons"
