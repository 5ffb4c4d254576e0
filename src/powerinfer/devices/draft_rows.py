"""Rows of the output head on a GPU that a draft head reads: those of its draft vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.gpu_weights import Matrices
from powerinfer.devices.torch_device import import_torch
from powerinfer.kernels import gpu
from powerinfer.kernels.cpu import LANES
from powerinfer.kernels.draft_rows import first_tokens, recent_tokens
from powerinfer.kernels.gpu_types import Weight, tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

_AT_ONCE = 32  # panels that are copied together


class ListedRows:
    """The product with the first rows of a matrix, where they are, and with copies of some panels of the others.

    Copies may change between steps, also of a step that was recorded. Panels that there are none of have logits of
    minus infinity.
    """

    def __init__(self, weight: Weight) -> None:
        torch = import_torch()
        self._weight = weight
        self._first = first_tokens(weight.rows) // LANES
        self._places = recent_tokens(weight.rows) // LANES
        self._begin = _rows(weight, 0, self._first * LANES)
        room = self._places * LANES
        scales = None if weight.scales is None else weight.scales.new_zeros((room, *weight.scales.shape[1:]))
        data = weight.data.new_zeros((room, *weight.data.shape[1:]))
        self._copies = Weight(weight.type, room, weight.k, data, scales)
        self._bias = torch.full((room,), -torch.inf, device=weight.data.device)
        self._place_of: dict[int, int] = {}  # of each panel that was copied

    @property
    def nbytes(self) -> int:
        """Bytes on the device, of the copies."""
        return self._copies.nbytes + tensor_bytes(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [T, k] -> float32 [T, rows of both]."""
        activations = gpu.activations_of(x)
        parts = gpu.linear(self._begin, activations), gpu.linear(self._copies, activations, self._bias)
        return import_torch().cat(parts, dim=1)

    def list_panels(self, panels: NDArray[np.int32]) -> NDArray[np.int32]:
        """Have these panels, all the first among them, and no others; the panel of each place of the product."""
        wanted = set(panels[self._first :].tolist())
        assert len(wanted) <= self._places and len(panels) == self._first + len(wanted)
        gone = [place for panel, place in self._place_of.items() if panel not in wanted]
        self._place_of = {panel: place for panel, place in self._place_of.items() if panel in wanted}
        new = sorted(wanted - set(self._place_of))
        free = sorted(set(range(self._places)) - set(self._place_of.values()))[: len(new)]
        self._bias.view(-1, LANES)[gone] = -import_torch().inf
        for begin in range(0, len(new), _AT_ONCE):
            self._copy(new[begin : begin + _AT_ONCE], free[begin : begin + _AT_ONCE])
        self._place_of |= dict(zip(new, free, strict=True))
        order = np.zeros(self._first + self._places, np.int32)
        order[: self._first] = np.arange(self._first)
        for panel, place in self._place_of.items():
            order[self._first + place] = panel
        return order

    def _copy(self, panels: list[int], places: list[int]) -> None:
        for to, of in ((self._copies.data, self._weight.data), (self._copies.scales, self._weight.scales)):
            if to is not None and of is not None:
                rows = of[: of.shape[0] // LANES * LANES]
                to.view(-1, LANES, *to.shape[1:])[places] = rows.view(-1, LANES, *of.shape[1:])[panels]
        self._bias.view(-1, LANES)[places] = 0.0


def _rows(weight: Weight, begin: int, end: int) -> Weight:
    """Some rows of a matrix, where they are."""
    scales = None if weight.scales is None else weight.scales[begin:end]
    return Weight(weight.type, end - begin, weight.k, weight.data[begin:end], scales)


def listed_rows(product: object) -> ListedRows | None:
    """The listed rows of a matrix whose product this is; None: it is drafted from as a whole."""
    if not isinstance(product, Matrices) or len(product.weights) > 1 or product.bias is not None:
        return None
    weight = product.weights[0]
    return ListedRows(weight) if first_tokens(weight.rows) < weight.rows else None
