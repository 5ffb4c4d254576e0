"""The types of the rows of a model's bundles, for `pack` and for plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powerinfer.config import LayerConfig, ModelConfig
from powerinfer.errors import RequestError
from powerinfer.formats.bundle_file import can_hold
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.quant import block_type
from powerinfer.formats.weight_types import BLOCKS, DOWN_TYPES, FLOAT_TYPES, PACKED_DOWN, ROW_TYPES


@dataclass(frozen=True)
class RowTypes:
    """The types that gate and up, and down, will have in a bundle; notes: lines for the user about the choice."""

    gate: str
    down: str
    notes: tuple[str, ...] = ()


def choose_types(checkpoint: Checkpoint, gate_type: str | None = None, down_type: str | None = None) -> RowTypes:
    """The types of a model's rows: those asked for (of `ROW_TYPES`), else those that lose least.

    F16, BF16, Q8_0, Q4_0 and Q4_1 are kept, F32 becomes F16, any other quantised type Q8_0. Quantised down becomes
    Q8_0, unless the file stores it neuron by neuron already, or its blocks can be kept (`PACKED_DOWN`); down of floats
    is kept, or follows the requested type (gate_type, --quantize): Q8_0 if that is a quantised type. Rows that are not
    whole blocks become F16. RequestError for a type that is not possible.
    """
    for matrix, name, allowed in (("up", gate_type, ROW_TYPES), ("down", down_type, DOWN_TYPES)):
        if name is not None:
            _check_type(checkpoint.config, matrix, name, allowed)
    rows = gate_and_up(checkpoint.config.layers)
    gates = {checkpoint.taken_type(name) for matrix in rows for name in tensor_names(checkpoint, matrix)}
    downs = {checkpoint.taken_type(name) for name in tensor_names(checkpoint, "down")}
    gate = gate_type or _nearest(gates, checkpoint.config.d_model, ROW_TYPES)
    requested = gate if gate_type is not None or checkpoint.quantize is not None else None
    down = down_type or _type_of_down(checkpoint, downs, requested)
    changes = ((" and ".join(rows), gates, gate), ("down", downs, down))
    notes = (
        f"{matrix}: {', '.join(sorted(old))} becomes {new}"
        for matrix, old, new in changes
        if old != {BLOCKS.get(new, new)}
    )
    return RowTypes(gate, down, tuple(notes))


def _check_type(config: ModelConfig, matrix: str, name: str, allowed: Sequence[str]) -> None:
    """RequestError for a type that a matrix' rows cannot have in bundles."""
    if name not in allowed:
        raise RequestError(f"bundles have no rows of type {name}; choose one of {', '.join(allowed)}")
    if not can_hold(config, matrix, name):
        across = name in BLOCKS and config.d_model % 32 == 0
        neurons = " and ".join(map(str, sorted(set(config.ffn_sizes))))
        noun = f"{neurons} neurons" if across else f"rows of {config.d_model} weights"
        raise RequestError(f"{noun} are not whole blocks of {name}; choose f16 or bf16")


def _type_of_down(checkpoint: Checkpoint, types: set[str], requested: str | None) -> str:
    """The type of down that loses least of weights of these types. requested: the type of gate and up, if it is not
    the file's."""
    d_model = checkpoint.config.d_model
    stored_by_neuron = [by_neuron(name) for name in tensor_names(checkpoint, "down")]
    if _crosses_neurons(types) and not any(stored_by_neuron) and d_model % 32 == 0:
        return PACKED_DOWN[next(iter(types))]
    if not types <= FLOAT_TYPES and not all(stored_by_neuron):
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


def _crosses_neurons(types: set[str]) -> bool:
    return len(types) == 1 and types <= PACKED_DOWN.keys()


def _nearest(types: set[str], d_model: int, allowed: Sequence[str]) -> str:
    """The type of rows that loses least of weights of these types, and is no larger than it must be."""
    if len(types) == 1 and types <= set(allowed):
        return next(iter(types))
    if types <= FLOAT_TYPES:
        return "F16" if "F16" in types or "BF16" not in types else "BF16"
    return _fitting("Q8_0", d_model)


def _fitting(name: str, d_model: int) -> str:
    return name if d_model % block_type(name).block == 0 else "F16"
