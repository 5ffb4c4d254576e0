"""Matrices whose columns are in an order of their own (`MadeTensor.order`), as GPTQ with act-order leaves them.

Neurons may be in any order: they take that of down. What else reads a matrix's rows is put in the order of its columns
as it is made: a norm's result, where all that read it agree (`layout.ordered_readers`), and what attention gives. Where
that cannot be, the matrix becomes F16, with its columns in their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from powerinfer.config import AttentionConfig, ExpertsConfig, FfnConfig, LayerConfig, ModelConfig
from powerinfer.formats.folder_modules import as_f16
from powerinfer.formats.layout import ordered_readers
from powerinfer.formats.quant import Bytes
from powerinfer.formats.source import SingleTensor
from powerinfer.formats.tensors import MadeTensor, RawTensor, StackedTensor, StoredTensor
from powerinfer.neurons import Indices

_OF_NEURONS = ("gate", "up", "gate_bias", "up_bias", "threshold", "product_threshold", "predictor_out")
"""Tensors with a row or a number for each neuron of an FFN."""


def settle_columns(config: ModelConfig, tensors: dict[str, StoredTensor], source: str) -> None:
    """Leave an order to those matrices alone whose readers get their input in it. source: the beginning of errors."""
    if not any(order is not None for tensor in tensors.values() for order in _orders(tensor)):
        return
    read_in_order: set[str] = set()
    for number, layer in enumerate(config.layers):
        prefix = f"layers.{number}."
        _order_neurons(layer, prefix, tensors)
        if isinstance(layer.attention, AttentionConfig):
            read_in_order.add(f"{prefix}o")
        for parts in ordered_readers(layer).values():
            first, *more = (next(_orders(tensors[prefix + part])) for part in parts)
            if first is not None and all(one is not None and np.array_equal(one, first) for one in more):
                read_in_order |= {prefix + part for part in parts}
    for name in tensors.keys() - read_in_order:
        tensors[name] = _settled(tensors[name], f"{source}: tensor {name}")


def _orders(tensor: StoredTensor) -> Iterator[Indices | None]:
    for part in tensor.parts if isinstance(tensor, StackedTensor) else (tensor,):
        yield part.order


def _order_neurons(layer: LayerConfig, prefix: str, tensors: dict[str, StoredTensor]) -> None:
    """The neurons of a layer, or of each of its experts, in the order of the columns of down."""
    ffn = layer.ffn
    if isinstance(ffn, FfnConfig) and ffn.neurons and ffn.activation != "topk":  # whose neurons are in banks
        _take_order(tensors, prefix, "down", _OF_NEURONS)
    elif isinstance(ffn, ExpertsConfig) and not ffn.bias:
        _take_order(tensors, prefix, "shared_down", ("shared_gate", "shared_up"))
        _take_order(tensors, prefix, "experts_down", ("experts_gate", "experts_up"))


def _take_order(tensors: dict[str, StoredTensor], prefix: str, down: str, of_neurons: Sequence[str]) -> None:
    stored = tensors.get(prefix + down)
    if stored is None or all(order is None for order in _orders(stored)):
        return
    orders = list(_orders(stored))
    for name in of_neurons:
        if (tensor := tensors.get(prefix + name)) is not None:
            parts = [_with_rows(part, order) for part, order in zip(_parts(tensor), orders, strict=True)]
            tensors[prefix + name] = _like(tensor, parts)
    tensors[prefix + down] = _like(stored, [replace(part, order=None) for part in _parts(stored)])


def _parts(tensor: StoredTensor) -> Sequence[SingleTensor]:
    return tensor.parts if isinstance(tensor, StackedTensor) else (tensor,)


def _like(tensor: StoredTensor, parts: Sequence[SingleTensor]) -> StoredTensor:
    return StackedTensor(tuple(parts)) if isinstance(tensor, StackedTensor) else parts[0]


def _with_rows(tensor: SingleTensor, order: Indices | None) -> SingleTensor:
    """Rows, or numbers of a vector, in that order."""
    if order is None:
        return tensor
    rows = tensor.shape[0]
    if isinstance(tensor, MadeTensor):
        make = tensor.make
        return replace(tensor, make=lambda *sources: _moved(make(*sources), rows, order))
    return MadeTensor(tensor.type, tensor.shape, (tensor,), lambda data: _moved(data, rows, order), tensor.scales)


def _moved(data: Bytes, rows: int, order: Indices) -> Bytes:
    return data.reshape(rows, -1)[order].reshape(-1)


def _settled(tensor: StoredTensor, title: str) -> StoredTensor:
    """The same in F16, with every column in its place; as it is where they are. title: the beginning of an error."""
    if all(order is None for order in _orders(tensor)):
        return tensor
    return _like(tensor, [_floats(part, title) for part in _parts(tensor)])


def _floats(tensor: SingleTensor, title: str) -> SingleTensor:
    assert isinstance(tensor, MadeTensor)
    rows, cols = tensor.shape

    def make(*sources: Bytes) -> Bytes:
        raw = RawTensor(tensor.type, tensor.shape, tensor.make(*sources), tensor.scales, tensor.order)
        return as_f16(title, rows, cols, raw.values)

    return replace(tensor, type="F16", make=make, scales=None, order=None)
