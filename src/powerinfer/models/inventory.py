"""The inventory of a model: its matrices and vectors, by the operator that uses them, from headers alone.

The wiring runs over a builder that records instead of building, so a model has no second list of its matrices: what a
family's wiring gives to an operator is what memory is planned for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ModelConfig
from powerinfer.devices.cpu import head_rows
from powerinfer.formats.layout import draft_shapes, is_matrix, is_router, shapes
from powerinfer.formats.quant import Float32, block_type
from powerinfer.formats.tensors import ExpertWeights, RawTensor, StreamMix
from powerinfer.kernels import cpu, gpu
from powerinfer.models import altup
from powerinfer.models.blocks import wire_head, wire_layer
from powerinfer.models.builder import Vector
from powerinfer.models.draft import wire_draft
from powerinfer.neurons import NO_VECTORS, FfnVectors, Indices


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix: its type, its bytes in panels (CPU), those on a GPU with the type that it gets there, and in a file."""

    type: str
    panels: int
    stored: int
    gpu_type: str = field(repr=False)  # follows from type and bytes, so that plans need no other key
    file: int = field(repr=False)
    name: str = field(repr=False, default="")  # canonical; "": a predictor's


def matrix(type_name: str, rows: int, cols: int, packed_rows: int | None = None, name: str = "") -> Matrix:
    """A matrix [rows, cols]; packed_rows: those in panels, None: as many."""
    panels = cpu.matrix_bytes(type_name, packed_rows or rows, cols)
    on_gpu, in_file = gpu.weight_bytes(type_name, rows, cols), rows * block_type(type_name).row_bytes(cols)
    return Matrix(type_name, panels, on_gpu, gpu.gpu_type(type_name, cols), in_file, name)


@dataclass(frozen=True)
class Unit:
    """Matrices that one operator uses together.

    use: "attention", "heads" (matrices of single heads, or of residual streams), "router", "experts" (those that a
    router selects), "panels" (dense FFNs and shared experts), "head" or "projection"; layer: None for what is around
    the layers.
    """

    use: str
    layer: int | None
    matrices: tuple[Matrix, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Canonical names of the matrices."""
        return tuple(one.name for one in self.matrices)

    @cached_property
    def panels(self) -> int:
        """Bytes in RAM, as panels."""
        return sum(one.panels for one in self.matrices)

    @cached_property
    def file(self) -> int:
        """Bytes in the file."""
        return sum(one.file for one in self.matrices)

    def only(self, names: Collection[str]) -> Unit:
        """A unit of the matrices with these names."""
        return Unit(self.use, self.layer, tuple(one for one in self.matrices if one.name in names))

    def first(self, n: int) -> Unit:
        """A unit of the first n matrices."""
        return Unit(self.use, self.layer, self.matrices[:n])

    def after(self, n: int) -> Unit:
        """A unit of the matrices behind the first n."""
        return Unit(self.use, self.layer, self.matrices[n:])


@dataclass(frozen=True)
class Inventory:
    """units: in the order in which a step uses them; vectors: elements of norms, biases, thresholds and taps, by
    canonical name; tables: bytes of the embedding and of learned positions, as a file has them; parameters: weights.
    draft, gpu_draft: bytes in RAM, or on a GPU, of a draft head, which is no part of the rest; 0: there is none, or it
    cannot be there; draft_units: its units."""

    units: tuple[Unit, ...]
    vectors: Mapping[str, int]
    tables: int
    parameters: int
    draft: int = 0
    draft_units: tuple[Unit, ...] = ()
    gpu_draft: int = 0

    def of_layer(self, layer: int, *uses: str) -> tuple[Unit, ...]:
        """The units of a layer that have one of these uses."""
        return tuple(unit for unit in self._by_layer[layer] if unit.use in uses)

    def around(self, use: str) -> tuple[Matrix, ...]:
        """Matrices of a use that belong to no layer."""
        return tuple(one for unit in self._by_layer.get(None, ()) if unit.use == use for one in unit.matrices)

    @cached_property
    def _by_layer(self) -> dict[int | None, list[Unit]]:
        found: dict[int | None, list[Unit]] = {}
        for unit in self.units:
            found.setdefault(unit.layer, []).append(unit)
        return found


def take_inventory(config: ModelConfig, type_of: Callable[[str], str]) -> Inventory:
    """The inventory of a model of that configuration. type_of: of a matrix by its canonical name, as it is loaded;
    routers are F32 whatever it says, for their products are computed exactly."""
    headers, recorder = Headers(config, type_of), Recorder(config.n_layers)
    embedding = headers.take("embed")
    tables = [embedding] + ([headers.take("positions")] if config.positions == "learned" else [])
    if config.layer_inputs:
        tables.append(headers.take("input_table"))
        recorder.add("projection", None, recorder.matrix(headers.take("inputs_projection")))
        headers.take("inputs_norm")
    if config.embed_dim:
        recorder.add("projection", None, recorder.matrix(headers.take("project_in")))
    if config.altup is not None:
        altup.expand(recorder, headers)
    for layer, about in enumerate(config.layers):
        first = len(recorder.units)
        wire_layer(recorder, headers, layer, None)
        # A kind of FFN may be wired by any operator: its configuration says which tensors are its own.
        of_ffn = {f"layers.{layer}.{name}" for name, _ in about.ffn.tensors(config.d_model)}
        recorder.units[first:] = [
            replace(unit, use="panels") if unit.use == "attention" and of_ffn.issuperset(unit.names) else unit
            for unit in recorder.units[first:]
        ]
    if config.altup is not None:
        altup.merge(recorder, headers)
    wire_head(recorder, headers, embedding)
    known = headers.known
    matrices = {name for unit in recorder.units for name in unit.names}
    large = matrices | {"embed", "positions", "input_table"}
    vectors = {name: prod(known[name]) for name in headers.taken if name not in large}
    nbytes = sum(prod(one.shape[:-1]) * block_type(one.type).row_bytes(one.shape[-1]) for one in tables)
    draft = (0, (), 0) if config.draft is None else _draft(config, type_of)
    return Inventory(tuple(recorder.units), vectors, nbytes, sum(map(prod, known.values())), *draft)


def _draft(config: ModelConfig, type_of: Callable[[str], str]) -> tuple[int, tuple[Unit, ...], int]:
    """(bytes in RAM of the draft head: matrices in panels, its own embedding as a file has it, vectors; its units; its
    bytes on a GPU: 0 of one with an embedding or output head of its own, and of an EAGLE head)."""
    headers, recorder = Headers(config, type_of), Recorder(config.n_layers)
    headers.known.update(draft_shapes(config))
    wire_draft(recorder, headers)
    draft, units = config.draft, tuple(recorder.units)
    assert draft is not None
    vectors = 4 * sum(prod(shape) for name, shape in draft_shapes(config) if not is_matrix(name, shape))
    vectors += 0 if draft.final_norm else 4 * config.d_model
    in_ram = sum(unit.panels for unit in units) + recorder.tables + vectors
    alone = draft.embedding or draft.head or draft.eagle
    return in_ram, units, 0 if alone else sum(one.stored for unit in units for one in unit.matrices) + vectors


@dataclass(frozen=True, slots=True)
class Header(RawTensor):
    """A tensor without its data, of which every value is taken for zero."""

    name: str = ""

    def float32(self) -> Float32:
        return np.broadcast_to(np.float32(0), self.shape)


class Headers:
    """A checkpoint as the wiring sees it, with `Header`s for tensors. known: their shapes by canonical name; taken: the
    names that were asked for."""

    def __init__(self, config: ModelConfig, type_of: Callable[[str], str]) -> None:
        self.config = config
        self.known = dict(shapes(config))
        self.taken: dict[str, None] = {}
        self._type_of = type_of

    def has(self, name: str) -> bool:
        return name in self.known

    def take(self, name: str) -> Header:
        self.taken[name] = None
        shape = self.known[name]
        exact = is_router(name) or not is_matrix(name, shape)
        return Header("F32" if exact else self._type_of(name), shape, _NO_DATA, name=name)

    def take_some(self, name: str, index: Any) -> Header:
        raise AssertionError("no wiring of a whole model takes some rows")

    def order(self, name: str) -> None:
        """None: it changes no size."""

    def rest(self, name: str) -> Any:
        raise AssertionError("what is recorded rests nowhere")

    def skip(self, name: str) -> None:
        self.taken[name] = None

    def check_unchanged(self) -> None:
        """Nothing: there is no file."""


class Recorder:
    """A `Builder` that records what is wired, as units; a matrix is a `Matrix`, a norm nothing but there."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.units: list[Unit] = []
        self.tables = 0  # bytes of the draft head's own embedding

    def add(self, use: str, layer: int | None, *matrices: Matrix) -> None:
        """Record a unit."""
        if matrices:
            self.units.append(Unit(use, layer, matrices))

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> Matrix:
        assert isinstance(tensor, Header)
        rows, cols = tensor.shape
        return matrix(tensor.type, rows, cols, None if row_map is None else len(row_map), tensor.name)

    def _stack(self, tensor: RawTensor) -> Matrix:
        """Matrices [n, out, in], one below the other, each in whole panels."""
        assert isinstance(tensor, Header)
        n, rows, cols = tensor.shape
        return matrix(tensor.type, n * rows, cols, n * cpu.round_up(rows, cpu.LANES), tensor.name)

    def head_rows(self, heads: int, dim: int, interleaved: int) -> NDArray[np.int32] | None:
        return head_rows(heads, dim, interleaved)

    def norm(
        self, weight: Float32, bias: Vector = None, order: Indices | None = None, eps: float | None = None
    ) -> bool:
        return True

    def scale(self, factor: float) -> bool:
        return True

    def attention(self, layer: int, norm: bool | None, qkv: Sequence[Matrix], **vectors: Any) -> None:
        self.add("attention", layer, *qkv)

    def latent_attention(
        self,
        layer: int,
        norm: bool | None,
        q_latent: Matrix | None,
        q_norm: Vector,
        q: Matrix,
        kv: Matrix,
        kv_norm: Float32,
        k_b: RawTensor,
    ) -> None:
        self.add("attention", layer, *([] if q_latent is None else [q_latent]), q, kv)
        self.add("heads", layer, self._stack(k_b))

    def latent_project(self, layer: int, v_b: RawTensor, matrix: Matrix, norm: bool | None = None) -> None:
        self.add("heads", layer, self._stack(v_b))
        self.add("attention", layer, matrix)

    def gate_attended(self, layer: int, norm: bool | None, matrix: Matrix) -> None:
        self.add("attention", layer, matrix)

    def delta_net(
        self,
        layer: int,
        norm: bool | None,
        matrices: Sequence[Matrix],
        *,
        further: Sequence[Matrix] = (),
        **vectors: Any,
    ) -> None:
        self.add("attention", layer, *matrices, *further)

    def mamba(self, layer: int, norm: bool | None, matrices: Sequence[Matrix], **vectors: Any) -> None:
        self.add("attention", layer, *matrices)

    def short_conv(self, layer: int, norm: bool | None, matrices: Sequence[Matrix], **vectors: Any) -> None:
        self.add("attention", layer, *matrices)

    def project(
        self,
        layer: int,
        matrix: Matrix,
        bias: Vector = None,
        norm: bool | None = None,
        order: Indices | None = None,
        reads: bool | None = None,
    ) -> None:
        self.add("attention", layer, matrix)

    def project_beside(self, layer: int, matrix: Matrix, bias: Vector = None, norm: bool | None = None) -> None:
        self.add("attention", layer, matrix)

    def ffn(
        self,
        layer: int,
        norm: bool | None,
        gate: Matrix | None,
        up: Matrix,
        down: Matrix,
        vectors: FfnVectors = NO_VECTORS,
        out_norm: bool | None = None,
    ) -> None:
        self.add("panels", layer, *([] if gate is None else [gate]), up, down)

    def early_router(self, layer: int, router: Matrix, correction: Vector = None) -> None:
        self.add("router", layer, router)

    def experts(self, layer: int, norm: bool | None, weights: ExpertWeights, out_norm: bool | None = None) -> None:
        if not weights.early:
            self.add("router", layer, self.matrix(weights.router))
        self.add("experts", layer, *map(self._stack, weights.experts()))
        self.add("panels", layer, *map(self.matrix, [*weights.shared, *weights.latents]))

    def add_layer_input(self, layer: int, gate: Matrix, out: Matrix, norm: bool | None, activation: str) -> None:
        self.add("attention", layer, gate, out)

    def normalise(self, layer: int, norm: bool) -> None:
        """Nothing: a norm is no matrix."""

    def expand_streams(self, matrices: RawTensor) -> None:
        self.add("heads", 0, self._stack(matrices))

    def predict_streams(self, layer: int, mix: StreamMix) -> None:
        """Nothing: coefficients are vectors."""

    def add_laurel(self, layer: int, norm: bool, inner: Matrix, outer: Matrix, out_norm: bool) -> None:
        self.add("attention", layer, inner, outer)

    def correct_streams(self, layer: int, mix: StreamMix, scale: Vector) -> None:
        """Nothing: coefficients are vectors."""

    def merge_streams(self, matrices: RawTensor) -> None:
        self.add("heads", self.layers - 1, self._stack(matrices))

    def head(self, norm: bool | None, matrix: Matrix, projection: Matrix | None = None, bias: Vector = None) -> None:
        self.add("head", None, matrix)
        self.add("projection", None, *([] if projection is None else [projection]))

    def draft_input(self, embedding: RawTensor | None, embed_norm: bool, hidden_norm: bool, matrix: RawTensor) -> None:
        if embedding is not None:
            rows, cols = embedding.shape
            self.tables += rows * block_type(embedding.type).row_bytes(cols)
        self.add("projection", None, self.matrix(matrix))

    def eagle_input(
        self,
        norms: Sequence[bool],
        matrix: RawTensor,
        embedding: RawTensor | None,
        embed_norm: bool,
        hidden_norm: bool,
    ) -> None:
        self.draft_input(embedding, embed_norm, hidden_norm, matrix)

    def eagle_head(self, norm: bool, matrix: RawTensor | None, tokens: Vector) -> None:
        self.draft_head(norm, matrix)

    def draft_head(self, norm: bool, matrix: RawTensor | None) -> None:
        self.add("head", None, *([] if matrix is None else [self.matrix(matrix)]))


_NO_DATA: NDArray[np.uint8] = np.empty(0, np.uint8)
