"""Experts without gates, neuron by neuron, where they are read from disk: of layer N `layers.N.rows`, U8 [experts,
bytes], and where rows of down share scales, group by group, `layers.N.scales`, U8 [experts, bytes]. One file has down,
for `exact`, which reads up from the model's file; another one, for `predicted`, bundles of up and down.

A row has the codes of the model's file in an order private to the native module, that of bundles (bundle_file.py),
padded to whole cache lines. Scales lie apart from rows: they are read with an expert, of rows only those of neurons
that fire, or that a predictor selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from powerinfer.config import ExpertsConfig, ModelConfig
from powerinfer.formats.bundle_file import RowBytes, n_groups
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.mapped import MappedFile
from powerinfer.formats.prepared import EXPERT_BUNDLES, EXPERT_ROWS, LINE, Kind, PreparedFile
from powerinfer.formats.quant import Bytes
from powerinfer.formats.weight_types import ACROSS
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout


@dataclass(frozen=True)
class ExpertRows:
    """A layer's experts. layout: of their neurons; rows, scales: uint8 [experts, bytes], None: rows share no scales."""

    layout: BundleLayout
    rows: Bytes
    scales: Bytes | None


@dataclass(frozen=True)
class ExpertRowsFile:
    """A prepared file, mapped. layers: by layer; file: call `file.check()` before reading."""

    layers: Mapping[int, ExpertRows]
    file: MappedFile

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path


@dataclass(frozen=True)
class _RowsHeader:
    """The description in a file; lists are of `layers`."""

    d_model: int
    layers: list[int]
    experts: list[int]
    neurons: list[int]
    down_types: list[str]


@dataclass(frozen=True)
class _PairsHeader(_RowsHeader):
    """The same with up."""

    up_types: list[str]


def kind_of(predicted: bool) -> Kind:
    """The kind of file that a selector reads: `predicted`, or `exact`."""
    return EXPERT_BUNDLES if predicted else EXPERT_ROWS


def resting_layers(config: ModelConfig) -> dict[int, ExpertsConfig]:
    """The layers whose experts can be read from disk neuron by neuron: without gates."""
    return {at: ffn for at, ffn in config.experts.items() if not ffn.gated and ffn.whole_reason is None}


def row_layouts(checkpoint: Checkpoint, bundle_row_bytes: RowBytes, predicted: bool) -> dict[int, BundleLayout]:
    """The layouts of the neurons of these layers. predicted: with up, which else is elsewhere."""
    layouts = {}
    for layer, ffn in resting_layers(checkpoint.config).items():
        width = ffn.row_width(checkpoint.config.d_model)
        up, down = (checkpoint.taken_type(f"layers.{layer}.experts_{name}") for name in ("up", "down"))
        down = ACROSS.get(down, down)
        up_bytes = bundle_row_bytes(up, width)[0] if predicted else 0
        layouts[layer] = BundleLayout(width, False, up, down, up_bytes, *bundle_row_bytes(down, width))
    return layouts


def _shapes(config: ExpertsConfig, layout: BundleLayout) -> dict[str, tuple[int, int]]:
    n = config.n_experts
    shapes = {"rows": (n, config.size * layout.pitch)}
    return shapes | ({"scales": (n, n_groups(config.size) * layout.shared_bytes)} if layout.shared_bytes else {})


def _header(config: ModelConfig, layouts: Mapping[int, BundleLayout], predicted: bool) -> _RowsHeader:
    ffns = [config.experts[layer] for layer in layouts]
    downs = [layout.down_type for layout in layouts.values()]
    experts, neurons = [one.n_experts for one in ffns], [one.size for one in ffns]
    of_rows = config.d_model, list(layouts), experts, neurons, downs
    ups = [layout.gate_type for layout in layouts.values()]
    return _PairsHeader(*of_rows, ups) if predicted else _RowsHeader(*of_rows)


def open_expert_rows(
    checkpoint: Checkpoint, prepared: str | None, bundle_row_bytes: RowBytes, predicted: bool = False
) -> ExpertRowsFile:
    """The rows of a model, from the folder `prepared` (None: beside the model). predicted: with up. ModelError, with
    the command that makes them, if there are none or they do not match the model as it is opened."""
    place = PreparedFile(kind_of(predicted), checkpoint, prepared)
    description, tensors, file = place.read()
    layouts = row_layouts(checkpoint, bundle_row_bytes, predicted)
    header = _header(checkpoint.config, layouts, predicted)
    if place.described(type(header), description) != header:
        raise place.bad("is of other layers, experts or types than the model's")
    layers = {}
    for layer, layout in layouts.items():
        views = {}
        for name, shape in _shapes(checkpoint.config.experts[layer], layout).items():
            tensor = place.holds(tensors, f"layers.{layer}.{name}", "U8", shape)
            if tensor.data.ctypes.data % LINE:
                raise place.bad(f"holds layer {layer} where no cache line begins")
            views[name] = tensor.data.reshape(shape)
        layers[layer] = ExpertRows(layout, views["rows"], views.get("scales"))
    place.holds_no_more(tensors)
    return ExpertRowsFile(layers, file)


@contextmanager
def write_expert_rows(
    checkpoint: Checkpoint, prepared: str | None, layouts: Mapping[int, BundleLayout], predicted: bool
) -> Iterator[Callable[[int, int, Bytes], None]]:
    """Write the rows of a model, `row_layouts`: the block calls the function with (layer, first expert, uint8 [groups,
    group_bytes of its layout]), of some experts' whole groups. The file is renamed to its final name when the block
    succeeds. PowerInferError if it cannot be written."""
    config = checkpoint.config
    shapes = {layer: _shapes(config.experts[layer], layout) for layer, layout in layouts.items()}
    tensors = [(f"layers.{layer}.{name}", "U8", one) for layer, own in shapes.items() for name, one in own.items()]
    description = asdict(_header(config, layouts, predicted))
    with PreparedFile(kind_of(predicted), checkpoint, prepared).fill(description, tensors, keep=False) as part:

        def write(layer: int, first: int, groups: Bytes) -> None:
            bundles = BUNDLE_GROUP * layouts[layer].pitch
            for name, data in (("rows", groups[:, :bundles]), ("scales", groups[:, bundles:])):
                if name in shapes[layer]:
                    part.put(f"layers.{layer}.{name}", first * shapes[layer][name][1], data.copy().reshape(-1))

        yield write
