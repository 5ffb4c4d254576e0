"""The types of the rows of a model's bundles, for `pack` and for plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from powerinfer.config import LayerConfig, ModelConfig
from powerinfer.errors import RequestError
from powerinfer.formats.bundle_file import can_hold
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.quant import SHORT_BLOCKS, block_type
from powerinfer.formats.weight_types import BLOCKS, DOWN_TYPES, FLOAT_TYPES, PACKED_DOWN, ROW_TYPES, STORED_ROWS


@dataclass(frozen=True)
class RowTypes:
    """The types that gate and up, and down in each layer, will have in a bundle; notes: lines for the user about the
    choice."""

    gate: str
    downs: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def down(self) -> str:
        """The types of down, each once."""
        return ", ".join(dict.fromkeys(self.downs))


def choose_types(checkpoint: Checkpoint, gate_type: str | None = None, down_type: str | None = None) -> RowTypes:
    """The types of a model's rows: those asked for (of `ROW_TYPES`), else those that lose least.

    F16, BF16, Q8_0, Q4_0, Q4_1 and `STORED_ROWS` are kept, F32 becomes F16, any other quantised type Q8_0. Quantised
    down becomes Q8_0, unless the file stores it neuron by neuron already, or its blocks or codes can be kept
    (`PACKED_DOWN`, `SHORT_BLOCKS`), layer by layer;
    down of floats is kept, or follows the requested type (gate_type, --quantize): Q8_0 if that is a quantised type.
    Rows that are not whole blocks become F16. RequestError for a type that is not possible.
    """
    for matrix, name, allowed in (("up", gate_type, ROW_TYPES), ("down", down_type, DOWN_TYPES)):
        if name is not None:
            _check_type(checkpoint.config, matrix, name, allowed)
    rows = gate_and_up(checkpoint.config.layers)
    gates = {checkpoint.taken_type(name) for matrix in rows for name in tensor_names(checkpoint, matrix)}
    gate = gate_type or _nearest(gates, checkpoint.config.d_model, (*ROW_TYPES, *STORED_ROWS))
    requested = gate if gate_type is not None or checkpoint.quantize is not None else None
    stored = {layer: tensor_name(checkpoint, "down", layer) for layer in checkpoint.config.neurons}
    downs = _types_of_down(checkpoint, stored, requested) if down_type is None else dict.fromkeys(stored, down_type)
    changes = [(" and ".join(rows), gates, gate)]
    for new in dict.fromkeys(downs.values()):
        changes.append(("down", {checkpoint.taken_type(stored[at]) for at, kind in downs.items() if kind == new}, new))
    notes = (
        f"{matrix}: {', '.join(sorted(old))} becomes {new}"
        for matrix, old, new in changes
        if old != {BLOCKS.get(new, new)}
    )
    usual = next(iter(downs.values()), "F16")  # of layers without an FFN, which have no rows
    return RowTypes(gate, tuple(downs.get(layer, usual) for layer in range(checkpoint.config.n_layers)), tuple(notes))


def _check_type(config: ModelConfig, matrix: str, name: str, allowed: Sequence[str]) -> None:
    """RequestError for a type that a matrix' rows cannot have in bundles."""
    if name not in allowed:
        raise RequestError(f"bundles have no rows of type {name}; choose one of {', '.join(allowed)}")
    if not can_hold(config, matrix, name):
        across = name in BLOCKS and config.d_model % 32 == 0
        neurons = " and ".join(map(str, sorted(set(config.ffn_sizes))))
        noun = f"{neurons} neurons" if across else f"rows of {config.d_model} weights"
        raise RequestError(f"{noun} are not whole blocks of {name}; choose f16 or bf16")


def _types_of_down(checkpoint: Checkpoint, stored: Mapping[int, str], requested: str | None) -> dict[int, str]:
    """The types of down that lose least, by layer. stored: its tensors; requested: the type of gate and up, if it is
    not the file's."""
    kinds = {layer: checkpoint.taken_type(name) for layer, name in stored.items()}
    across = {
        layer: PACKED_DOWN.get(SHORT_BLOCKS.get(kind, kind), "")
        for layer, kind in kinds.items()
        if not by_neuron(stored[layer])
    }
    blocks = {layer: kind for layer, kind in across.items() if kind and can_hold(checkpoint.config, "down", kind)}
    requantised = {kind for layer, kind in kinds.items() if layer not in blocks}
    by_neurons = all(by_neuron(name) for layer, name in stored.items() if layer not in blocks)
    other = _type_of_down(checkpoint.config.d_model, requantised, by_neurons, requested) if requantised else ""
    return {layer: blocks.get(layer, other) for layer in kinds}


def _type_of_down(d_model: int, types: set[str], by_neurons: bool, requested: str | None) -> str:
    """The type of down in layers that have these types, and whose blocks are not kept. by_neurons: they are stored by
    neuron; requested: as of `_types_of_down`."""
    if not types <= FLOAT_TYPES and not by_neurons:
        return _fitting("Q8_0", d_model)
    if types <= FLOAT_TYPES and requested is not None:
        return requested if requested in FLOAT_TYPES else "Q8_0"
    return _nearest(types, d_model, DOWN_TYPES)


def gate_and_up(layers: Sequence[LayerConfig]) -> list[str]:
    """Matrices of gate and up that some of these layers have."""
    return ["gate", "up"] if any(layer.ffn.gated for layer in layers) else ["up"]


def tensor_name(checkpoint: Checkpoint, matrix: str, layer: int) -> str:
    """The tensor of a matrix; down's is `down_rows` where the file has it neuron by neuron."""
    name = f"layers.{layer}.{matrix}"
    return f"{name}_rows" if checkpoint.has(f"{name}_rows") else name


def tensor_names(checkpoint: Checkpoint, matrix: str) -> list[str]:
    ffns = enumerate(layer.ffn.neurons for layer in checkpoint.config.layers)
    return [tensor_name(checkpoint, matrix, number) for number, ffn in ffns if ffn and matrix in ffn.matrices]


def by_neuron(name: str) -> bool:
    return not name.endswith(".down")


def _nearest(types: set[str], d_model: int, allowed: Sequence[str]) -> str:
    """The type of rows that loses least of weights of these types, and is no larger than it must be."""
    if len(types) == 1 and types <= set(allowed):
        return next(iter(types))
    if types <= FLOAT_TYPES:
        return "F16" if "F16" in types or "BF16" not in types else "BF16"
    return _fitting("Q8_0", d_model)


def _fitting(name: str, d_model: int) -> str:
    return name if d_model % block_type(name).block == 0 else "F16"
