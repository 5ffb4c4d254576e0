"""The FFNs of the CPU's executor: a sum over neurons, as parts from matrices (dense) or from bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.config import FfnConfig, ModelConfig
from powerinfer.formats.bundle_memory import ApartBundles, SomeBundles
from powerinfer.formats.mapped import is_mapped
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.neurons import BUNDLE_GROUP, NeuronVectors

if TYPE_CHECKING:
    from powerinfer.devices.disk_neurons import NeuronSlots
    from powerinfer.neurons import BundleLayout, Predictor

Float32 = NDArray[np.float32]

Weights = tuple["Predictor", RawTensor, RawTensor]
"""A layer's predictor with its matrices in [rank, d_model] and out [neurons, rank]."""

Selecting = tuple["Predictor", RawTensor | None, RawTensor]
"""The same; without `in` what it reads is relu(in . x)."""


def pack(
    pool: _native.Pool, arena: _native.Arena, tensor: RawTensor, row_map: NDArray[np.int32] | None = None
) -> _native.Matrix:
    """A matrix [out, in] in panels. row_map: packed row r is row row_map[r] of the tensor, zeros where it is -1."""
    rows, cols = tensor.shape
    data, scales = tensor.data, tensor.row_scales()
    return _native.pack_matrix(pool, arena, tensor.type, rows, cols, data, row_map, scales, is_mapped(data))


class PartMaker:
    """Makes the parts of an executor's FFNs. pack: `pack` into its memory. ValueError for shapes that are wrong."""

    def __init__(
        self, config: ModelConfig, workspace: _native.Workspace, pack: Callable[[RawTensor], _native.Matrix]
    ) -> None:
        self.config = config
        self._workspace = workspace
        self._pack = pack

    def dense(
        self,
        layer: int,
        gate: _native.Matrix | None,
        up: _native.Matrix,
        down: _native.Matrix,
        vectors: NeuronVectors,
        inner: _native.Norm | None = None,
    ) -> _native.DenseNeurons:
        """Neurons as matrices. inner: norm of their products, before down."""
        return _native.DenseNeurons(self._spec(layer, vectors), gate, up, down, inner)

    def bundled(
        self,
        layer: int,
        layout: BundleLayout,
        bundles: NDArray[np.uint8] | SomeBundles | ApartBundles,
        vectors: NeuronVectors = (),
        *,
        neurons: int | None = None,
        threshold: float = 0.0,
        count_fired: bool = False,
    ) -> _native.NeuronSum:
        """Neurons as bundles, and the sum that they add to the output.

        bundles: uint8 [groups, layout.group_bytes] of all the layer's neurons, or those of some, or their rows without
        those that a matrix has; they are kept. neurons: their number, None: that of the layer. threshold: activations
        up to this magnitude count as zero; count_fired: for each neuron, too, the tokens that it fires for.
        """
        gate_type, neurons = layout.gate_type if layout.gated else None, neurons or self.config.ffn_sizes[layer]
        types = (self.config.d_model, gate_type, layout.gate_type, layout.down_type)
        if isinstance(bundles, ApartBundles):
            spec = self._spec(layer, vectors)
            native = _native.apart_bundles(neurons, *types, spec, bundles.up, bundles.down)
            return _native.NeuronSum(self._workspace, native, threshold, count_fired)
        if isinstance(bundles, SomeBundles):
            rows, neurons, counts = bundles.rows, len(bundles.index), bundles.counts
            vectors = [_placed(bundles, one) for one in vectors]
        else:
            rows, counts = bundles, None
        places = (layout.pitch, layout.gate_at if layout.gated else 0, layout.up_at, layout.down_at)
        native = _native.Bundles(rows, neurons, *types, *places, self._spec(layer, vectors), counts)
        return _native.NeuronSum(self._workspace, native, threshold, count_fired)

    def least_slots(self, neurons: int) -> int:
        """The fewest slots with which neurons on disk can be computed."""
        return _native.least_slots(self._workspace, neurons)

    def resting(
        self,
        layer: int,
        slots: NeuronSlots,
        vectors: NeuronVectors = (),
        threshold: float = 0.0,
        count_fired: bool = False,
    ) -> _native.NeuronSum:
        """Neurons as bundles on disk; arguments as of `bundled`."""
        layout, left_out = slots.layout, slots.left_out
        native = _native.resting_bundles(
            slots.slots,
            self.config.d_model,
            layout.gate_type if layout.gated else None,
            layout.gate_type,
            layout.down_type,
            layout.gate_at if layout.gated and not left_out else None,
            layout.up_at - left_out if layout.up_at >= left_out else None,
            layout.down_at - left_out,
            self._spec(layer, vectors),
            slots.shared,
        )
        return _native.NeuronSum(self._workspace, native, threshold, count_fired)

    def predictor(self, weights: Selecting | None) -> _native.Predictor | None:
        """The predictor that selects among all of a layer's neurons, of experts those of all of them."""
        if weights is None:
            return None
        config, inner, outer = weights
        of_input = None if inner is None else self._pack(inner)
        return _native.Predictor(of_input, self._pack(outer), config.threshold, config.floor)

    def _spec(self, layer: int, vectors: NeuronVectors) -> _native.NeuronSpec:
        config = self.config.layers[layer].ffn
        assert isinstance(config, FfnConfig), config.title
        lacking: list[None] = [None] * (4 - len(vectors))
        gate_bias, up_bias, limits, product_limits = list(vectors) + lacking
        return _native.NeuronSpec(
            config.activation, config.threshold, gate_bias, up_bias, limits, product_limits, config.curve
        )


class CpuFfn:
    """The FFN of a layer: its neurons as matrices, as bundles, or both, and which of these each small step uses.

    op: the operator; matrices: gate (or None), up and down, where it has them; layout, predictor: of the bundles it
    has. neurons: their number.
    """

    def __init__(
        self,
        parts: PartMaker,
        layer: int,
        op: _native.Ffn,
        vectors: NeuronVectors,
        *,
        matrices: Sequence[_native.Matrix | None] = (),
        layout: BundleLayout | None = None,
        predictor: _native.Predictor | None = None,
    ) -> None:
        self.op = op
        self.matrices = [one for one in matrices if one is not None]
        self.neurons = self.matrices[0].rows if matrices else parts.config.ffn_sizes[layer]
        self._parts = parts
        self._layer = layer
        self._vectors = vectors
        self._layout = layout
        self._predictor = predictor

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(one.nbytes for one in self.matrices)

    @property
    def predictor_bytes(self) -> int:
        """Bytes of the predictor."""
        return 0 if self._predictor is None else self._predictor.nbytes

    def add_bundles(
        self,
        layout: BundleLayout,
        rows: NDArray[np.uint8] | ApartBundles,
        *,
        threshold: float = 0.0,
        predictor: Weights | None = None,
        recall_every: int = 0,
        dense_above: float = 1.0,
    ) -> None:
        """Give an FFN of matrices its neurons as bundles too; it stays dense until `set_ways` says otherwise.

        rows: uint8 [groups, layout.group_bytes], or without a predictor those apart; kept. threshold: activations up to
        this magnitude count as zero; recall_every: steps between samples of the predictor's recall, 0 for none;
        dense_above: of the neurons, the share from which on a step of `exact`, whose gates are known, computes the rest
        from the matrices. ValueError for shapes that are not the layer's.
        """
        neurons = self._parts.bundled(
            self._layer, layout, rows, self._vectors, neurons=self.neurons, threshold=threshold
        )
        self._set_bundled(neurons, layout, self._parts.predictor(predictor), recall_every)
        self.op.dense_above = dense_above

    def add_resting(
        self, slots: NeuronSlots, *, threshold: float = 0.0, predictor: Weights | None = None
    ) -> _native.NeuronSum:
        """The same of neurons on disk. Without a predictor the first of the matrices, of gates where there are any,
        must be in memory. ValueError as of `add_bundles`."""
        neurons = self._parts.resting(self._layer, slots, self._vectors, threshold)
        self._set_bundled(neurons, slots.layout, self._parts.predictor(predictor))
        return neurons

    def _set_bundled(
        self,
        neurons: _native.NeuronSum,
        layout: BundleLayout,
        predictor: _native.Predictor | None,
        recall_every: int = 0,
    ) -> None:
        self.op.set_bundled(neurons, predictor, recall_every)
        self._layout, self._predictor = layout, predictor

    @property
    def bundled(self) -> bool:
        """Whether it has its neurons as bundles."""
        return self._layout is not None

    def set_ways(self, ways: Mapping[int, str]) -> None:
        """Set how steps of few tokens run: number of tokens -> "dense", "exact" or "predicted".

        A number in between uses the way of the next larger one; more than the largest are dense. ValueError where it
        lacks what a way needs: matrices, bundles, or a predictor.
        """
        by_tokens = []
        for tokens in range(1, NEURON_TOKENS + 1):
            larger = [size for size in ways if size >= tokens]
            by_tokens.append(ways[min(larger)] if larger else "dense")
        self.op.set_ways(by_tokens)

    def foresee(self, after: CpuFfn) -> None:
        """Let small steps begin to read neurons of `after`, a further layer, that rest on disk, where both use
        predictors: those that its predictor selects of this one's input."""
        self.op.foresee(after.op)

    def predict(self, on: bool) -> None:
        """Whether small steps use the predictor, if it has one; else those of bundles alone compute every gate."""
        if self._predictor is not None:
            self.set_ways({NEURON_TOKENS: "predicted" if on else "exact"})

    def counts(self) -> dict[str, int]:
        """Counts of what an FFN of bundles did in sparse steps since the last `clear`, summed over their tokens.

        tokens, active and candidates (neurons that were computed), sampled_tokens, sampled_active, sampled_found (of
        those active, the ones that were candidates); steps, and in these rows of bundles and bytes of weights read.
        """
        assert self._layout is not None
        counts, layout = self.op.counts(), self._layout
        rows = [counts.pop(name) for name in ("first_rows", "up_rows", "down_rows", "shared_scales")]
        sizes = (layout.gate_bytes, layout.gate_bytes, layout.down_bytes, layout.shared_bytes)
        exact = counts.pop("exact_steps")
        counts["rows"] = sum(rows[:3])
        counts["bytes"] = sum(number * nbytes for number, nbytes in zip(rows, sizes, strict=True))
        counts["bytes"] += (counts["steps"] - exact) * self.predictor_bytes
        if self.matrices:  # whose first product finds what fires
            counts["bytes"] += exact * self.matrices[0].nbytes
        return counts

    def clear(self) -> None:
        """Reset the counters."""
        self.op.clear()

    def count_fired(self, on: bool) -> None:
        """Start or stop counting, for each neuron, the tokens that it fires for, in steps of up to `NEURON_TOKENS`."""
        self.op.count_fired(on)

    def take_fired(self) -> tuple[int, NDArray[np.int64]]:
        """(tokens, int64 [neurons] those that each fired for) since the last call, while they are counted."""
        fired = np.empty(self.neurons, np.int64)
        return self.op.take_fired(fired), fired


def _placed(bundles: SomeBundles, values: Float32 | None) -> Float32 | None:
    if values is None:
        return None
    placed = np.zeros(len(bundles.counts) * BUNDLE_GROUP, np.float32)
    placed[bundles.places] = values[bundles.index]
    return placed
