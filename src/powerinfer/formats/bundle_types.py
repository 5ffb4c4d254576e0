"""The types of the rows of a model's bundles, for `pack` and for plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powerinfer.config import LayerConfig
from powerinfer.errors import RequestError
from powerinfer.formats.bundle_file import can_hold
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.quant import block_type
from powerinfer.formats.weight_types import ACROSS, BLOCKS, DOWN_TYPES, FLOAT_TYPES, ROW_TYPES


@dataclass(frozen=True)
class RowTypes:
    """The types that gate and up, and down, will have in a bundle; notes: lines for the user about the choice."""

    gate: str
    down: str
    notes: tuple[str, ...] = ()


def choose_types(checkpoint: Checkpoint, gate_type: str | None = None, down_type: str | None = None) -> RowTypes:
    """The types of a model's rows: those asked for (of `ROW_TYPES`), else those that lose least.

    F16, BF16, Q8_0, Q4_0 and Q4_1 are kept, F32 becomes F16, any other quantised type Q8_0. Quantised down becomes
    Q8_0, unless the file stores it neuron by neuron already, or its blocks can be kept (`ACROSS`); down of floats is
    kept, or follows the requested type (gate_type, --quantize): Q8_0 if that is a quantised type. Rows that are not
    whole blocks become F16. RequestError for a type that is not possible.
    """
    d_model = checkpoint.config.d_model
    for matrix, name, known in (("up", gate_type, ROW_TYPES), ("down", down_type, DOWN_TYPES)):
        if name is not None and name not in known:
            raise RequestError(f"bundles have no rows of type {name}; choose one of {', '.join(known)}")
        if name is not None and not can_hold(checkpoint.config, matrix, name):
            across = name in BLOCKS and d_model % 32 == 0
            neurons = " and ".join(map(str, sorted(set(checkpoint.config.ffn_sizes))))
            what = f"{neurons} neurons" if across else f"rows of {d_model} weights"
            raise RequestError(f"{what} are not whole blocks of {name}; choose f16 or bf16")
    rows = gate_and_up(checkpoint.config.layers)
    gates = {checkpoint.taken_type(name) for matrix in rows for name in tensor_names(checkpoint, matrix)}
    downs = {checkpoint.taken_type(name) for name in tensor_names(checkpoint, "down")}
    gate = gate_type or _nearest(gates, d_model, ROW_TYPES)
    if down_type is not None:
        down = down_type
    elif _across(downs) and not any(map(by_neuron, tensor_names(checkpoint, "down"))) and d_model % 32 == 0:
        down = ACROSS[next(iter(downs))]
    elif not downs <= FLOAT_TYPES and not all(by_neuron(name) for name in tensor_names(checkpoint, "down")):
        down = _fitting("Q8_0", d_model)
    elif downs <= FLOAT_TYPES and (gate_type is not None or checkpoint.quantize is not None):
        down = gate if gate in FLOAT_TYPES else "Q8_0"
    else:
        down = _nearest(downs, d_model, DOWN_TYPES)
    changes = ((" and ".join(gate_and_up(checkpoint.config.layers)), gates, gate), ("down", downs, down))
    notes = (
        f"{matrix}: {', '.join(sorted(old))} becomes {new}"
        for matrix, old, new in changes
        if old != {BLOCKS.get(new, new)}
    )
    return RowTypes(gate, down, tuple(notes))


def gate_and_up(layers: Sequence[LayerConfig]) -> list[str]:
    """Of gate and up, those that some of these layers have."""
    return ["gate", "up"] if any(layer.ffn.gated for layer in layers) else ["up"]


def tensor_name(checkpoint: Checkpoint, matrix: str, layer: int) -> str:
    """The tensor of a matrix; down's is `down_rows` where the file has it neuron by neuron."""
    name = f"layers.{layer}.{matrix}"
    return f"{name}_rows" if checkpoint.has(f"{name}_rows") else name


def tensor_names(checkpoint: Checkpoint, matrix: str) -> list[str]:
    every = enumerate(layer.ffn.neurons for layer in checkpoint.config.layers)
    return [tensor_name(checkpoint, matrix, number) for number, ffn in every if ffn and matrix in ffn.matrices]


def by_neuron(name: str) -> bool:
    return not name.endswith(".down")


def _across(types: set[str]) -> bool:
    return len(types) == 1 and types <= ACROSS.keys()


def _nearest(types: set[str], d_model: int, known: Sequence[str]) -> str:
    """The type of rows that loses least of weights of these types, and is no larger than it must be."""
    if len(types) == 1 and types <= set(known):
        return next(iter(types))
    if types <= FLOAT_TYPES:
        return "F16" if "F16" in types or "BF16" not in types else "BF16"
    return _fitting("Q8_0", d_model)


def _fitting(name: str, d_model: int) -> str:
    return name if d_model % block_type(name).block == 0 else "F16"
