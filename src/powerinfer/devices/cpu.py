"""The CPU executor: packed weights, paged cache and the list of native operators that a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.config import (
    DeltaNetConfig,
    EngineConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    Mamba2Config,
    ModelConfig,
    ParallelConfig,
    RopeConfig,
    RouterConfig,
)
from powerinfer.devices.batch import Batch, StoppedError
from powerinfer.devices.choices import CachePages, Choice, StateSlots, machine_choices
from powerinfer.devices.cpu_experts import (
    ByNeuron,
    ExpertFfn,
    SharedNeurons,
    SharedPlace,
    bundle,
    bundle_down,
    rebundle,
    shared_alone,
    shared_place,
)
from powerinfer.devices.cpu_ffn import CpuFfn, PartMaker, Selecting, Weights, pack
from powerinfer.devices.disk import DiskTier
from powerinfer.devices.drafter import CpuDraftHead, EagleHead
from powerinfer.devices.file_rows import ROOM, FileRows
from powerinfer.devices.states import Slots, StateMemory, state_bytes, state_slots
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.mapped import MappedFile
from powerinfer.formats.quant import block_type
from powerinfer.formats.tensors import ExpertWeights, RawTensor, RestingTensor, StreamMix, convert
from powerinfer.kernels import cpu
from powerinfer.kernels.candidates import any_tokens
from powerinfer.neurons import NO_VECTORS, FfnVectors, Indices
from powerinfer.system import available_memory

if TYPE_CHECKING:
    from powerinfer.devices.link import Link
    from powerinfer.devices.trace import Trace
    from powerinfer.formats.bundle_memory import SomeBundles
    from powerinfer.neurons import BundleLayout

Float32 = NDArray[np.float32]

Rotation = tuple[Float32, float]
"""A rotary embedding: frequencies float32 [rotated pairs], radians per position, and what sine and cosine are
multiplied by."""


Routed = dict[int, NDArray[np.int32]]
"""Experts that each token of a step selected, by layer, ascending, int32 [tokens, experts of a token]."""


@dataclass(frozen=True)
class Fired:
    """The neurons of an FFN that fired for the tokens of a call: views that hold until the next FFN runs.

    counts: int64 [neurons], tokens that each fired for; active: uint8 [tokens, ceil(neurons / 8)], bit i % 8 of byte i
    // 8 is neuron i; magnitudes: int64 [bins], of the activations' magnitudes, zeros unless asked for. Bin b holds
    those from `magnitude(b)` up to `magnitude(b + 1)`, the outermost also what lies beyond.
    """

    counts: NDArray[np.int64]
    active: NDArray[np.uint8]
    magnitudes: NDArray[np.int64]


def magnitude(bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """The magnitudes at which bins of `Fired.magnitudes` begin."""
    octave, part = np.divmod(bins, _native.Watch.BINS_PER_OCTAVE)
    return np.ldexp(1 + part / _native.Watch.BINS_PER_OCTAVE, (octave + _native.Watch.LOWEST_OCTAVE).astype(np.int64))


class Observer(Protocol):
    """Observes a running executor; arrays are views that are valid during the call."""

    def reads(self, layer: int, x: NDArray[np.float32]) -> None:
        """Called before an FFN. x: float32 [tokens, d_model], what its norm reads, and what a predictor does."""
        ...

    def fires(self, layer: int, fired: Fired) -> None:
        """Called after it."""
        ...


class ExpertObserver(Protocol):
    """Observes the experts of a running executor; arrays are views that are valid during the call."""

    def reads(self, layer: int, x: NDArray[np.float32]) -> None:
        """Called before the experts of a layer, as `Observer` says."""
        ...

    def fires(self, layer: int, selected: NDArray[np.int32], active: NDArray[np.uint8]) -> None:
        """Called after them. selected: int32 [tokens, top_k], ascending for each token; active: uint8 [tokens, (top_k *
        size + predicted_shared) / 8], of their neurons those that fired, as of `Fired`."""
        ...


@dataclass(frozen=True)
class _Observed:
    by: Observer | None
    watch: _native.Watch
    thresholds: Sequence[float] | None  # of the layers


class ExpertSum:
    """Experts of a layer, which the caller selects for each token. ModelError, of what needs one that rests on disk and
    cannot be read."""

    def __init__(
        self,
        pool: _native.Pool,
        program: _native.Program,
        config: ExpertsConfig,
        of_all: _native.ExpertMatrices,
        matrices: Sequence[_native.Matrix],
        by_neuron: ByNeuron | None = None,
        resting: tuple[DiskTier, _native.Slots, _native.RouterSpec] | None = None,
        norm: _native.Norm | None = None,
    ) -> None:
        """of_all: the experts of config, with these matrices; by_neuron: up and down, where they are no matrices;
        resting: where they are, what memory they have and how they are selected, where they rest on disk, and there are
        no matrices; norm: of what they are given, which a predictor reads as it is."""
        self.nbytes = sum(one.nbytes for one in matrices) + (0 if by_neuron is None else by_neuron.groups.nbytes)
        router = _native.RouterSpec(config.router.top_k, scales_input=config.router.scales_input)
        self._reading: Callable[[], AbstractContextManager[None]] = nullcontext
        if resting is not None:
            disk, slots, router = resting
            self.nbytes += slots.slots * slots.slot_bytes
            self._reading = disk.reading
        self.by_neuron = by_neuron
        self.rank = 0 if by_neuron is None else by_neuron.rank
        self._pool = pool
        self._program = program
        self._matrices = matrices
        self._n = config.n_experts
        self._top_k = config.router.top_k
        self._latents = config.latents
        self.op = program.expert_sum(of_all, router, norm)

    def set_whole(self, on: bool) -> None:
        """Whether every neuron of the experts is computed, where those could be left out that do not fire."""
        self.op.set_whole(on)

    def sum(
        self,
        x: Float32,
        selected: NDArray[np.int32],
        weights: Float32,
        out: Float32,
        hidden: Float32 | None = None,
    ) -> bool:
        """out = the weighted sum of each token's experts; x and out float32 [T, d_model].

        selected int32, weights float32 [T, top_k]; -1 selects none. hidden: float32 [T, rank], for a predictor without
        its first matrix, in steps of few tokens. False if no expert is selected: then out is zero, and nothing was
        computed.
        """
        with self._reading():
            return self.op.sum(self._program, x, selected, weights, out, hidden)

    def order(self, selected: NDArray[np.int32], weights: Float32) -> None:
        """The same in two parts: what does not need x, then, as the next call to any layer's experts, `sum_ordered`."""
        with self._reading():
            self.op.order(self._program, selected, weights)

    def fetch(self) -> bool:
        """Read, between the two, a little more of what the ordered experts' sum begins with into the caches of the
        threads' cores. False once they hold what they can."""
        return self.op.fetch(self._program)

    def sum_ordered(self, x: Float32, out: Float32, hidden: Float32 | None = None) -> bool:
        """`sum` of the experts in `order`, of as many tokens. ValueError without it."""
        with self._reading():
            return self.op.sum_ordered(self._program, x, out, hidden)

    def calls(
        self, link: Link, layer: int, tokens: int, places: NDArray[np.int32], tally: NDArray[np.int64], *, ahead: bool
    ) -> tuple[_native.ExpertCall, ...]:
        """The same for a GPU to call, of a layer; ahead: in two parts, the first of which fetches all it can. Not of
        experts on disk.

        places: int32 [experts], of each of the layer's its number here, -1: it is elsewhere; tally: int64
        [experts + 1], added to: tokens that select each, and selections of experts elsewhere.
        """
        x, selected, weights, out = link.received_experts(tokens, self._top_k, layer, self._latents)
        arguments = link.calls, self.op, self._program, x, selected, weights, out, places, tally
        parts, hidden = ("order", "sum_ordered") if ahead else ("all",), link.received_hidden(tokens, self.rank)
        return tuple(_native.ExpertCall(*arguments, part, hidden) for part in parts)

    def panels(self) -> list[cpu.ExpertPanels] | None:
        """Their matrices as they are in memory, in the order of `ExpertsConfig.matrices`; None where neurons are told
        apart, experts rest on disk, or share panels."""
        result = list[cpu.ExpertPanels]()
        for matrix in self._matrices:
            panels, rows = matrix.panels, matrix.rows // self._n
            if self.by_neuron is not None or panels is None or matrix.rows % (self._n * cpu.LANES):
                return None
            result.append(cpu.ExpertPanels(matrix.type, rows, matrix.k, panels.reshape(self._n, -1)))
        return result or None

    def replace(self, place: int, matrices: Sequence[RawTensor]) -> None:
        """Put another expert in a place; not while a step runs. matrices: [out, in], as they were packed."""
        if (bundled := self.by_neuron) is not None:
            rebundle(bundled.layout, bundled.groups, self._n, place, matrices, self._pool.threads)
        for packed, tensor in zip(self._matrices, matrices, strict=bundled is None):
            first = place * (packed.rows // self._n)
            _native.repack(self._pool, packed, first, tensor.shape[0], tensor.gathered().data, tensor.row_scales())


@dataclass(frozen=True)
class Drafting:
    """Settings of an executor for drafts.

    undo_tokens: tokens of a sequence in a step whose states can be undone; head: the config's draft head is wired, too;
    pool: another executor's threads, for two that never run at the same time, None: it has its own.
    """

    undo_tokens: int = 0
    head: bool = False
    pool: _native.Pool | None = None


class CpuExecutor:
    """A model on the CPU. `models` wires it with the methods from `embed` to `head`; then `forward` runs it.

    It may also have only the layers from `first_layer` on, or none, if those before run elsewhere, and may then lack
    the head: `embedded` and `finish` run its two parts.

    A token's logits have the same bits whatever the batch, the chunk, the cache page and the number of threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        rotations: Mapping[RopeConfig, Rotation],
        *,
        first_layer: int = 0,
        pages: int | None = None,
        room: int | None = None,
        disk: DiskTier | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """rotations: of every rotary embedding of these layers. disk: what stays there, None: nothing; drafting: what
        drafts need of it, None: nothing.

        first_layer: the first that it is to have, n_layers for none; pages: of the KV cache, None: chosen here,
        and room: the most bytes that they may take then. RequestError for options that cannot be met.
        """
        drafting = drafting or Drafting()
        self.choices = machine_choices(engine)
        assert self.choices.isa is not None and self.choices.threads is not None
        self.config = config
        wired = config.with_draft if drafting.head else replace(config, draft=None)
        self._layers = wired.layers
        self._norm_eps = config.norm_eps  # of the norms that are wired
        self._eagle = config.draft.eagle if drafting.head and config.draft is not None else None
        self.drafter: CpuDraftHead | None = None
        self.disk = disk
        if disk is not None:
            self.choices.disk = Choice(disk.about.why)
        self.first_layer = first_layer
        self.page_size = cpu.PAGE
        self.max_tokens = max(engine.chunk, engine.max_batch)
        self.vocab_size = config.vocab_size
        self.bytes_per_token = 0
        self.neuron_tokens = _native.NEURON_TOKENS  # maximum tokens of a step whose FFNs may be sparse
        self.d_model = config.d_model
        self.ffns: dict[int, CpuFfn] = {}  # by layer
        self.in_experts = False  # experts that follow are computed by neuron, where they can be
        self.expert_predictors: Callable[[int], Weights] | None = None  # what selects in them, by layer
        self.expert_ffns: dict[int, ExpertFfn] = {}  # those that are, by layer
        self._recall_every = engine.recall_every
        self._experts: dict[int, _native.Experts] = {}  # by layer
        self._early_routers: dict[int, _native.EarlyRouter] = {}
        self._embedded = 0  # operators up to the embedding's
        self._file_rows: FileRows | None = None  # of the embedding
        self.looks_up = False  # the embedding is a row of a table, and all that a step of few tokens begins with
        self.mapped: list[MappedFile] = []  # files that steps read views of
        self._pool = drafting.pool or _native.Pool(self.choices.threads.value)
        self._workspace = _native.Workspace(self._pool, self.choices.isa.value)
        self._pack = partial(pack, self._pool, _native.Arena())
        self.parts = PartMaker(wired, self._workspace, self._pack)
        self._program = self._empty_program(wired, engine, pages, room, drafting.undo_tokens)
        self._embedding: _native.Table | None = None
        self._head: _native.Matrix | None = None
        self._draft_from: int | None = None  # the first operator of the draft head
        self._fused = 0  # the end of those that project an EAGLE head's features
        self._stores = 0  # the end of the operators that store keys and values, so far
        self._of_model = False, 0  # `in_experts` and `bytes_per_token`, while that is wired
        self._ropes = {rope: self._program.add_rope(*rotation) for rope, rotation in rotations.items()}
        self._observed: _Observed | None = None
        self._expert_observer: ExpertObserver | None = None
        self.slots: Slots | None = None  # of the states of a step
        self.undo_tokens = drafting.undo_tokens
        self._logits = np.empty((0, cpu.round_up(config.vocab_size, cpu.LANES)), np.float32)

    def _empty_program(
        self, config: ModelConfig, engine: EngineConfig, pages: int | None, room: int | None, undo_tokens: int
    ) -> _native.Program:
        """A program without operators, and its KV cache; arguments as of the executor."""
        reason = "given"
        layers = config.n_layers - self.first_layer
        if pages is None:
            pages, reason = choose_pages(
                config, engine, engine.context or config.context_length, self.first_layer, room, undo_tokens
            )
        self.n_pages = pages
        # Without layers here the cache still defines the pages; they are never written, so they use no memory.
        attentions = [layer.attention for layer in config.layers[self.first_layer :] or config.layers[-1:]]
        self._states, self.n_states = None, 0
        if config.states:
            self.n_states = state_slots(engine.max_batch, engine.prefix_cache, undo_tokens)
            self._states = StateMemory(config, self.n_states, self.first_layer, undo_tokens)
        self._cache = cache = _native.Cache(
            engine.kv_type,
            [(one.cached_heads, one.head_dim) for one in attentions],
            pages,
            [one.latents for one in attentions],
        )
        self.choices.kv_cache = Choice(CachePages(pages, engine.kv_type, cache.nbytes * bool(layers)), reason)
        if self._states is not None:
            slots = StateSlots(self.n_states, state_bytes(config, undo_tokens=undo_tokens))
            self.choices.states = Choice(slots, f"{engine.max_batch} requests")
        return _native.Program(
            self._workspace,
            cache,
            self.max_tokens,
            config.d_model,
            max(config.widest_ffn, config.layer_inputs, 1),
            [one.n_heads for one in attentions],
            config.embed_dim or config.d_model,
            None if self._states is None else self._states.native,
            max((kind.width for kind in attentions), default=0),
        )

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> _native.Matrix:
        """Pack a matrix [out, in]. row_map: packed row r is row row_map[r] of the tensor, zeros where it is -1."""
        packed = None if self.disk is None else self.disk.matrix(tensor, row_map)
        packed = packed or self._pack(tensor, row_map)
        self.bytes_per_token += packed.nbytes
        return packed

    def head_rows(self, heads: int, dim: int, interleaved: int) -> NDArray[np.int32] | None:
        """The row map of a matrix whose rows are `heads` heads of `dim` dimensions, as of the function `head_rows`."""
        return head_rows(heads, dim, interleaved)

    def norm(
        self, weight: Float32, bias: Float32 | None = None, order: Indices | None = None, eps: float | None = None
    ) -> _native.Norm:
        """A norm of the model's kind over rows of d_model. order: number i of the result is that of number order[i];
        eps: None, the model's."""
        eps = self._norm_eps if eps is None else eps
        return _native.Norm(weight, eps, bias, self.config.norm == "layer", order=order)

    def scale(self, factor: float) -> _native.Norm:
        """A factor in place of a norm over rows of d_model."""
        return _native.Norm(np.full(self.d_model, factor, np.float32), 0.0, plain=True)

    def embed(
        self,
        tensor: RawTensor,
        positions: RawTensor | None = None,
        projection: _native.Matrix | None = None,
        scale: float = 1.0,
        place: tuple[MappedFile, int] | None = None,
    ) -> None:
        """x = projection . (scale * row of the embedding) + row of positions.

        Rows are looked up in the model file's own type. place: (file, offset) of the embedding, None: it is in memory.
        """
        if place is not None:
            self._file_rows = FileRows(*place, tensor, self.max_tokens, ROOM if self.disk is None else 0)
            tensor = replace(tensor, data=self._file_rows.data)
        table = self._table(tensor)
        rows = self._table(replace(positions, data=positions.data.copy())) if positions is not None else None
        self._program.embed(table, rows, self.config.position_offset, projection, scale)
        self._embedded, self._embedding = self._program.size, table
        self.looks_up = projection is None and self.disk is None

    def layer_inputs(self, table: RawTensor, projection: _native.Matrix, norm: Float32) -> None:
        """Numbers that every layer gets of a token beside the residual stream, from a table of the model's file and
        from the embedding. projection: of all layers, one after another; norm: float32 [numbers of a layer]."""
        d_model, numbers = self.d_model, len(norm)
        of_layer = _native.Norm(norm, self.config.norm_eps)
        scales = d_model**-0.5, numbers**0.5, 2**-0.5
        self._program.layer_inputs(self._table(table), projection, of_layer, *scales)
        self._embedded, self.looks_up = self._program.size, False

    def add_layer_input(
        self, layer: int, gate: _native.Matrix, out: _native.Matrix, norm: _native.Norm | None, activation: str
    ) -> None:
        """x += norm(out . (activation(gate . x) * what the layer gets of the token))."""
        self._program.add_layer_input(layer * self.config.layer_inputs, gate, out, norm, activation)

    def step_inputs(self, tokens: int) -> Float32 | None:
        """Numbers that the layers get of the tokens of the step that was embedded, float32 [tokens, layers * numbers]:
        a view; None: they get nothing."""
        return self._program.layer_input_rows(tokens) if self.config.layer_inputs else None

    def _table(self, tensor: RawTensor) -> _native.Table:
        rows, cols = tensor.shape
        self.bytes_per_token += tensor.data.nbytes // rows
        return _native.Table(tensor.type, rows, cols, tensor.data)

    def attention(
        self,
        layer: int,
        norm: _native.Norm | None,
        qkv: Sequence[_native.Matrix],
        *,
        biases: Sequence[Float32 | None] = (None, None, None),
        q_norm: Float32 | None = None,
        k_norm: Float32 | None = None,
        sinks: Float32 | None = None,
    ) -> None:
        """attended = attention(norm(x)): projections, rotary embedding, cache store, softmax over the pages.

        qkv, biases: of the layer's `projections`. q_norm, k_norm: float32 [head_dim], or [heads * head_dim] where the
        layer's qk_norm is "width" or "separate". sinks: float32 [heads], scores in the softmax that belong to no value.
        """
        settings = self._layers[layer].heads
        stores = settings.kv_from is None
        q, k, v = qkv[0], qkv[1] if stores else None, qkv[-1] if stores else None
        q_bias, k_bias, v_bias = biases[0], biases[1] if stores else None, biases[len(qkv) - 1] if stores else None
        of_v = np.ones(settings.head_dim, np.float32) if settings.v_norm and stores else None
        eps, separate = self._norm_eps, settings.qk_norm == "separate"
        of_q, of_k = (None if w is None else _native.Norm(w, eps, None, separate) for w in (q_norm, k_norm))
        of_v_ = None if of_v is None else _native.Norm(of_v, eps)
        place = layer - self.first_layer
        rope = -1 if settings.rope is None else self._ropes[settings.rope]
        self._program.attention_input(
            place, settings, norm, q, k, v, q_bias, k_bias, v_bias, of_q, of_k, rope, of_v_, settings.rotates_first,
            separate,
        )
        self._stores = self._program.size
        source = -1 if settings.kv_from is None else settings.kv_from - self.first_layer
        self._program.attention(place, settings, sinks, source)

    def gate_attended(self, layer: int, norm: _native.Norm | None, matrix: _native.Matrix) -> None:
        """attended *= sigmoid(matrix . norm(x)); or, with a row for each head, each head's part *= its softplus."""
        self._program.gate_attended(layer - self.first_layer, norm, matrix)

    def delta_net(
        self,
        layer: int,
        norm: _native.Norm | None,
        matrices: Sequence[_native.Matrix],
        *,
        further: Sequence[_native.Matrix] = (),
        taps: Float32,
        decay: Float32,
        dt_bias: Float32,
        out_norm: Float32,
    ) -> None:
        """attended = Gated DeltaNet of norm(x), with the state of each sequence.

        matrices: of queries, keys, values, gate, beta, alpha. taps: float32 [taps, channels] of the convolution; decay,
        dt_bias: float32 [value heads], the logarithm of a head's decay is decay * softplus(alpha + dt_bias); out_norm:
        float32 [value_dim], of each value head. further: where each channel of a key decays by itself, the matrices
        that make the gate and alpha of what the first ones give; dt_bias: float32 [keys].
        """
        settings = self._layers[layer].attention
        assert isinstance(settings, DeltaNetConfig)
        of_heads = _native.Norm(out_norm, self.config.norm_eps)
        self._program.delta_net(
            layer - self.first_layer, self._state_layer(layer), norm, [*matrices, *further], taps, decay, dt_bias,
            of_heads, settings.n_key_heads, settings.tiled, settings.activation,
        )  # fmt: skip

    def mamba(
        self,
        layer: int,
        norm: _native.Norm | None,
        matrices: Sequence[_native.Matrix],
        *,
        biases: Sequence[Float32 | None],
        taps: Float32,
        taps_bias: Float32 | None,
        of_heads: Sequence[Float32],
        out_norm: Float32 | None,
    ) -> None:
        """attended = Mamba2 of norm(x), with the state of each sequence.

        matrices, biases: of the gate, of x with B and C, of dt. taps: float32 [taps, channels] of the convolution, and
        its bias, or None; of_heads: float32 [heads] each, a, d and the bias of the step; out_norm: float32 [width].
        """
        settings = self.config.states[layer]
        assert isinstance(settings, Mamba2Config)
        parts = [] if out_norm is None else np.split(out_norm, settings.norm_groups)
        norms = [_native.Norm(np.ascontiguousarray(part), self.config.norm_eps) for part in parts]
        self._program.mamba(
            layer - self.first_layer, self._state_layer(layer), norm, matrices, biases, taps, taps_bias, of_heads,
            settings.step_limits, (settings.scales[0], settings.scales[4]), norms, settings.norm == "gated",
            settings.activation, self._mamba_offset(layer),
        )  # fmt: skip

    def short_conv(
        self,
        layer: int,
        norm: _native.Norm | None,
        matrices: Sequence[_native.Matrix],
        *,
        biases: Sequence[Float32 | None],
        taps: Float32,
        taps_bias: Float32 | None,
    ) -> None:
        """attended = a gated short convolution of norm(x), with the state of each sequence.

        matrices, biases: of x, b and c. taps: float32 [taps, channels] of the convolution, and its bias, or None.
        """
        place, state = layer - self.first_layer, self._state_layer(layer)
        self._program.short_conv(place, state, norm, matrices, biases, taps, taps_bias)

    def latent_attention(
        self,
        layer: int,
        norm: _native.Norm | None,
        q_latent: _native.Matrix | None,
        q_norm: Float32 | None,
        q: _native.Matrix,
        kv: _native.Matrix,
        kv_norm: Float32,
        k_b: RawTensor,
    ) -> None:
        """The same, of `LatentAttentionConfig`: attended = each head's sum of latents.

        q_latent: makes the latents of queries, None: q, of all heads, reads norm(x) itself; kv: makes latents and the
        rotated part of keys; rotated rows in the order of `head_rows`. q_norm, kv_norm: of latents. k_b: as the tensor.
        """
        settings = self._layers[layer].attention
        assert isinstance(settings, LatentAttentionConfig)
        place = layer - self.first_layer
        rope = -1 if settings.rope is None else self._ropes[settings.rope]
        of_q = _native.Norm(q_norm, settings.norm_eps) if q_norm is not None else None
        of_kv, heads = _native.Norm(kv_norm, settings.norm_eps), self._stack(k_b)
        self._program.latent_input(place, settings, norm, q_latent, of_q, q, kv, of_kv, heads, rope)
        self._stores = self._program.size
        self._program.attention(place, settings)

    def latent_project(
        self, layer: int, v_b: RawTensor, matrix: _native.Matrix, norm: _native.Norm | None = None
    ) -> None:
        """x += norm(matrix . each head's v_b . attended)."""
        self._program.latent_project(layer - self.first_layer, self._stack(v_b), matrix, norm)

    def project(
        self,
        layer: int,
        matrix: _native.Matrix,
        bias: Float32 | None = None,
        norm: _native.Norm | None = None,
        order: Indices | None = None,
        reads: _native.Norm | None = None,
    ) -> None:
        """x += norm(matrix . attended). order: that of the matrix's columns, None: as they are; reads: norm of what is
        attended, in their order."""
        if order is not None:
            reads = _native.Norm(np.ones(len(order), np.float32), 0.0, plain=True, order=order)
        self._program.project(layer - self.first_layer, matrix, bias, norm, reads=reads)

    def project_beside(
        self, layer: int, matrix: _native.Matrix, bias: Float32 | None = None, norm: _native.Norm | None = None
    ) -> None:
        """The same of what Mamba2 beside attention gives."""
        self._program.project(layer - self.first_layer, matrix, bias, norm, self._mamba_offset(layer))

    def _state_layer(self, layer: int) -> int:
        """The number of a layer among those here that have states."""
        return [one for one in self.config.states if one >= self.first_layer].index(layer)

    def _mamba_offset(self, layer: int) -> int:
        """The place of what Mamba2 gives in a row of what is attended: behind what attention beside it gives."""
        kind = self._layers[layer].attention
        return cpu.round_up(kind.attention.width, cpu.LANES) if isinstance(kind, ParallelConfig) else 0

    def ffn(
        self,
        layer: int,
        norm: _native.Norm | None,
        gate: _native.Matrix | None,
        up: _native.Matrix,
        down: _native.Matrix,
        vectors: FfnVectors = NO_VECTORS,
        out_norm: _native.Norm | None = None,
    ) -> None:
        """x += out_norm(down . (act(gate . n) * (up . n))) with n = norm(x), or down . act(up . n) without a gate."""
        of_neurons = vectors.neuron_vectors
        inner = None if vectors.inner_norm is None else _native.Norm(vectors.inner_norm, self.config.norm_eps)
        dense = self.parts.dense(layer, gate, up, down, of_neurons, inner)
        op = self._program.ffn(_native.FfnSpec(norm, out_norm, vectors.down_bias), dense)
        if self._layers[layer].ffn.neurons is not None:
            self.ffns[layer] = CpuFfn(self.parts, layer, op, of_neurons, matrices=(gate, up, down))

    def bundled_ffn(
        self,
        layer: int,
        layout: BundleLayout,
        bundles: NDArray[np.uint8] | SomeBundles,
        *,
        norm: _native.Norm | None = None,
        out_norm: _native.Norm | None = None,
        vectors: FfnVectors = NO_VECTORS,
        threshold: float = 0.0,
        predictor: Weights | None = None,
    ) -> None:
        """The same where the layer has its neurons as bundles alone; arguments as of `PartMaker.bundled`.

        predictor: selects, of all neurons, those that are computed in steps of up to `neuron_tokens`. ValueError for
        shapes that are not the layer's.
        """
        of_neurons = vectors.neuron_vectors
        neurons = self.parts.bundled(layer, layout, bundles, of_neurons, threshold=threshold)
        selects = self.parts.predictor(predictor)
        op = self._program.ffn(_native.FfnSpec(norm, out_norm, vectors.down_bias), None, neurons, selects)
        self.ffns[layer] = CpuFfn(self.parts, layer, op, of_neurons, layout=layout, predictor=selects)

    def experts(
        self, layer: int, norm: _native.Norm | None, weights: ExpertWeights, out_norm: _native.Norm | None = None
    ) -> None:
        """x += out_norm(the sum of each token's weighted experts of n = norm(x), and of the shared expert).

        Experts that stay on disk are not asked for; a router that reads what the layer gets was given to
        `early_router`.
        """
        config = self._layers[layer].ffn
        assert isinstance(config, ExpertsConfig)
        spec, slots = _native.NeuronSpec(config.activation, config.threshold), None
        by_neuron: ByNeuron | None = None
        make_ffn: Callable[[_native.Experts], ExpertFfn] | None = None
        router = None if weights.early else self.matrix(weights.router)
        latents = list(map(self.matrix, weights.latents))
        if self.disk is not None and layer in self.disk.about.experts:
            if self.in_experts and layer in self.disk.rows:
                around = _latents(latents)
                of_all, slots, by_neuron, make_ffn = self._resting_rows(self.disk, layer, spec, weights, around)
            else:
                resting, around = weights.resting(), _latents(latents)
                of_all, slots = self._resting(self.disk, layer, spec, resting, weights.biases, around)
        elif self.in_experts and config.whole_reason is None:
            predictor = None if self.expert_predictors is None else self.expert_predictors(layer)
            of_all, first, by_neuron = self._bundled_experts(
                config, spec, weights.experts(), predictor, weights.shared, _latents(latents)
            )
            make_ffn = partial(_expert_ffn, config, by_neuron, 0 if first is None else first.nbytes)
        else:
            *gate, up, down = (self._stack(tensor, config.router.top_k) for tensor in weights.experts())
            of_gate, more = gate[0] if gate else None, _biases(config, weights.biases) | _latents(latents)
            of_all = _native.ExpertMatrices(config.n_experts, config.size, spec, of_gate, up, down, **more)
        of_shared = None
        if weights.shared:
            *gate, up, down = self._shared_matrices(config, weights.shared, by_neuron)
            of_shared = _native.DenseNeurons(spec, gate[0] if gate else None, up, down)
        self._experts[layer] = self._program.experts(
            _native.FfnSpec(norm, out_norm),
            _router(
                config.router, None if weights.early else weights.correction, weights.router_bias, weights.factors
            ),
            router,
            of_all,
            of_shared,
            weights.shared_weight,
            None if by_neuron is None or by_neuron.beside is None else by_neuron.beside.sum,
            weights.norms,
        )
        if make_ffn is not None:
            self.expert_ffns[layer] = make_ffn(self._experts[layer])
        if self.disk is not None and slots is not None:
            self._foresee(self.disk, layer, weights.router)
            self.disk.add_experts(layer, self._experts[layer], slots)

    def early_router(self, layer: int, router: _native.Matrix, correction: Float32 | None = None) -> None:
        """Select the experts of a layer from x as it is; router: [experts, d_model]."""
        config = self._layers[layer].ffn
        assert isinstance(config, ExpertsConfig)
        self._early_routers[layer] = self._program.early_router(_router(config.router, correction, None), router)

    def _resting(
        self,
        disk: DiskTier,
        layer: int,
        spec: _native.NeuronSpec,
        experts: Sequence[RestingTensor],
        biases: Sequence[Float32 | None],
        latents: Mapping[str, _native.Matrix],
    ) -> tuple[_native.ExpertMatrices, _native.Slots]:
        """Experts that stay on disk, and the memory for some of them. latents: as native experts take them."""
        config = self.config.experts[layer]
        if self.in_experts and config.whole_reason is None:
            raise RequestError("experts on disk are computed whole: choose --selector all")
        slots = disk.expert_slots(layer, experts)
        *gate, up, down = map(_disk_matrix, experts)
        self.bytes_per_token += sum(one.each_nbytes for one in experts) * config.router.top_k
        more = {**_biases(config, biases), **latents}
        of_gate = gate[0] if gate else None
        n, size = config.n_experts, config.size
        return _native.ExpertMatrices(n, size, spec, of_gate, up, down, **more, slots=slots), slots

    def _resting_rows(
        self,
        disk: DiskTier,
        layer: int,
        spec: _native.NeuronSpec,
        weights: ExpertWeights,
        latents: Mapping[str, Any],
    ) -> tuple[_native.ExpertMatrices, _native.Slots, ByNeuron, Callable[[_native.Experts], ExpertFfn]]:
        """Experts on disk whose neurons are told apart, the memory for some of them, the bundles of the shared expert,
        and what makes the layer's FFN of its operator. latents: as native experts take them."""
        config, (up, down) = self.config.experts[layer], weights.resting()
        n, size, top, layout = config.n_experts, config.size, config.router.top_k, disk.rows[layer].layout
        predicts = self.expert_predictors is not None
        slots = disk.expert_row_slots(layer, None if predicts else up)
        place = self._shared_place(config, (up, down), weights.shared, predicts)
        beside, of_shared = self._bundle_shared(config, spec, weights.shared, place, predicts), None
        if place == "behind":
            *of_up, of_down = (one.gathered() for one in weights.shared[-1 - predicts :])
            alone, threads = shared_alone(config), self._pool.threads
            if predicts:
                _, of_shared = bundle(alone, self.d_model, None, of_up[0], of_down, threads)
            else:
                _, of_shared = bundle_down(alone, self.d_model, up.type, of_down, None, threads)
        width = config.row_width(self.d_model)
        native = _native.expert_rows(slots, n, size, width, up.type, layout.down_type, spec, predicts, of_shared)
        neurons, predictor, matrix = _native.NeuronSum(self._workspace, native), None, None
        if self.expert_predictors is not None:
            predictor = self._expert_predictor(config, self.expert_predictors(layer), place)
        else:
            matrix = _disk_matrix(up)
        of_all = _native.ExpertMatrices(
            n, size, spec, None, matrix, None, bundled=neurons, predictor=predictor, slots=slots, **latents
        )
        of_matrix = 0 if predicts else up.each_nbytes
        more, expert = config.shared_size * (place == "behind"), of_matrix + size * layout.stride
        beside_bytes = 0 if beside is None else beside.groups.nbytes
        self.bytes_per_token += expert * top + more * layout.stride + beside_bytes
        by_neuron = ByNeuron(neurons, layout, np.empty(0, np.uint8), predictor, more, beside)
        rows_of_shared = more + (config.shared_size if beside is not None else 0)
        outer_row = 0.0 if predictor is None else predictor.outer_nbytes / (n * size + rows_of_shared)
        return of_all, slots, by_neuron, partial(
            ExpertFfn,
            sum=neurons,
            layout=layout,
            gate_row=layout.gate_bytes if predicts else up.each_nbytes / size,
            predictor=(0 if predictor is None else predictor.inner_nbytes, outer_row),
            neurons=top * size + rows_of_shared,
            nbytes=expert * top + more * layout.stride + beside_bytes + rows_of_shared * of_matrix // size,
            shared=beside,
        )

    def _foresee(self, disk: DiskTier, layer: int, router: RawTensor) -> None:
        """Read a layer's experts as soon as they are known: by a router before attention, or, of `prefetch`, in the
        last layer before it that has experts, which then computes the router, too."""
        op = self._experts[layer]
        before = max((other for other in self._experts if other < layer), default=-1)
        if layer in self._early_routers:
            self._early_routers[layer].foresee(op)
        elif disk.about.prefetch and before in disk.about.experts:
            self._experts[before].foresee(op, self._guessing(router))

    def _guessing(self, router: RawTensor) -> _native.Matrix:
        """The matrix of a router for guesses, which need not be exact."""
        small = router.shape[1] % block_type("Q8_0").block == 0
        return self.matrix(convert(router, "Q8_0", lambda elements: None) if small else router)

    def foresee(self, before: ExpertSum, after: ExpertSum, router: RawTensor) -> None:
        """Steps of few tokens read experts of the second one early, those that a router would select by the input of
        the first; of experts on disk. router: [experts, d_model]."""
        before.op.foresee(after.op, self._guessing(router))

    def expert_sum(
        self,
        layer: int,
        experts: Iterable[RawTensor],
        biases: Sequence[Float32 | None] = (),
        predicted: tuple[Selecting, Float32 | None] | None = None,
        among: Indices | None = None,
    ) -> ExpertSum:
        """Some experts of a layer, which the caller selects; no operator. experts, biases: as of `experts`. Experts of
        latents get latents, and their sum is one. predicted: what selects among the neurons of these experts, and the
        weights of the norm of their input, which they then are given as it is before; of experts of latents without its
        first matrix, for which they are given what that makes of the layer's input, and without norm; among: the only
        neurons of each that it selects, int32 [experts, some], ascending, of which alone it has rows."""
        config = self._layers[layer].ffn
        assert isinstance(config, ExpertsConfig)
        tensors = iter(experts)
        first = next(tensors)
        n, top, spec = first.shape[0], config.router.top_k, _native.NeuronSpec(config.activation, config.threshold)
        subset = replace(config, n_experts=n)
        if self.in_experts and config.whole_reason is None:
            weights, norm = predicted or (None, None)
            latents, stacked = self._latent_shapes(config), chain([first], tensors)
            of_some, gate, by_neuron = self._bundled_experts(subset, spec, stacked, weights, (), latents, among)
            gates, of_input = [] if gate is None else [gate], None if norm is None else self.norm(norm)
            if weights is not None and weights[1] is None:
                by_neuron = replace(by_neuron, rank=weights[2].shape[1])
            return ExpertSum(self._pool, self._program, subset, of_some, gates, by_neuron, norm=of_input)
        matrices = [self._stack(tensor, top) for tensor in chain([first], tensors)]
        *gates, up, down = matrices
        more = _biases(config, biases) | self._latent_shapes(config)
        of_some = _native.ExpertMatrices(n, config.size, spec, gates[0] if gates else None, up, down, **more)
        return ExpertSum(self._pool, self._program, subset, of_some, matrices)

    def _latent_shapes(self, config: ExpertsConfig) -> dict[str, _native.Matrix]:
        """Matrices that native experts take for those around them where their caller multiplies with these."""
        shapes = {"latent_in": (config.latents, self.d_model), "latent_out": (self.d_model, config.latents)}
        return {name: _native.disk_matrix("F32", *shape, 0, 0) for name, shape in shapes.items() if config.latents}

    def resting_sum(
        self,
        layer: int,
        experts: Sequence[RestingTensor],
        biases: Sequence[Float32 | None] = (),
        correction: Float32 | None = None,
        router_bias: Float32 | None = None,
    ) -> ExpertSum:
        """All experts of a layer, which stay on disk, as of `expert_sum`: memory has as many of them as the disk's
        description says. correction, router_bias: as of `experts`."""
        assert self.disk is not None
        config = self.config.experts[layer]
        spec = _native.NeuronSpec(config.activation, config.threshold)
        of_all, slots = self._resting(self.disk, layer, spec, experts, biases, self._latent_shapes(config))
        resting = self.disk, slots, _router(config.router, correction, router_bias)
        expert_sum = ExpertSum(self._pool, self._program, config, of_all, (), resting=resting)
        self.disk.add_experts(layer, expert_sum.op, slots)
        return expert_sum

    def _shared_matrices(
        self, config: ExpertsConfig, shared: Sequence[RawTensor], by_neuron: ByNeuron | None
    ) -> list[_native.Matrix]:
        """The matrices of a shared expert; those that rest in bundles are made of them as they are multiplied."""
        if by_neuron is None or not (by_neuron.more or by_neuron.beside):
            return list(map(self.matrix, shared))
        neurons, first = by_neuron.sum, config.n_experts * config.size
        if by_neuron.beside is not None:
            neurons, first = by_neuron.beside.sum, 0
        of_rows = neurons.matrix("up", first, config.shared_size) if by_neuron.predictor else self.matrix(shared[0])
        return [of_rows, neurons.matrix("down", first, config.shared_size)]

    def _bundled_experts(
        self,
        config: ExpertsConfig,
        spec: _native.NeuronSpec,
        experts: Iterable[RawTensor],
        weights: Selecting | None,
        shared: Sequence[RawTensor],
        latents: Mapping[str, _native.Matrix],
        among: Indices | None = None,
    ) -> tuple[_native.ExpertMatrices, _native.Matrix | None, ByNeuron]:
        """The experts, the matrix of their first product unless there is a predictor, and their bundles. weights: of
        the predictor; shared: matrices of a shared expert, which without gates is bundled, too; latents: as native
        experts take them; among: as of `expert_sum`."""
        n, top, size = config.n_experts, min(config.router.top_k, config.n_experts), config.size
        if config.gated:
            gate, by_neuron = self._gated_bundles(config, spec, experts, weights)
        elif weights is None:
            gate, by_neuron = self._plain_bundles(config, spec, experts, shared)
        else:
            gate, by_neuron = None, self._predicted_bundles(config, spec, experts, weights, shared)
        of_shared = by_neuron.more * by_neuron.layout.stride
        self.bytes_per_token += (by_neuron.groups.nbytes - of_shared) * top // n + of_shared
        self.bytes_per_token += 0 if by_neuron.beside is None else by_neuron.beside.groups.nbytes
        of_gate, of_up = (gate, None) if config.gated else (None, gate)
        of_all = _native.ExpertMatrices(
            n, size, spec, of_gate, of_up, None, bundled=by_neuron.sum, predictor=by_neuron.predictor,
            recall_every=self._recall_every, among=None if among is None else among.reshape(-1),
            latent_in=latents.get("latent_in"), latent_out=latents.get("latent_out"),
        )  # fmt: skip
        return of_all, gate, by_neuron

    def _gated_bundles(
        self,
        config: ExpertsConfig,
        spec: _native.NeuronSpec,
        experts: Iterable[RawTensor],
        weights: Selecting | None,
    ) -> tuple[_native.Matrix | None, ByNeuron]:
        """Experts with gates, with a matrix of these, or in the bundles too where a predictor selects."""
        tensors, predictor = iter(experts), self.parts.predictor(weights)
        gate = None if predictor else self._stack(next(tensors), config.router.top_k)
        of_rows = next(tensors) if predictor else None
        width = config.row_width(self.d_model)
        layout, rows = bundle(config, width, of_rows, next(tensors), next(tensors), self._pool.threads)
        gate_at = layout.gate_at if predictor else layout.up_at  # which is not read
        neurons = self._neuron_sum(layout, rows, config.n_experts * config.size, spec, gate_at)
        return gate, ByNeuron(neurons, layout, rows, predictor)

    def _plain_bundles(
        self,
        config: ExpertsConfig,
        spec: _native.NeuronSpec,
        experts: Iterable[RawTensor],
        shared: Sequence[RawTensor],
    ) -> tuple[_native.Matrix, ByNeuron]:
        """Experts without gates, with a matrix of up and bundles of down. shared: matrices of a shared expert."""
        of_up, of_down = experts
        up = self._stack(of_up, config.router.top_k)
        place = self._shared_place(config, (of_up, of_down), shared, False)
        more, of_shared = (config.shared_size, shared[-1]) if place == "behind" else (0, None)
        width, threads = config.row_width(self.d_model), self._pool.threads
        layout, rows = bundle_down(config, width, of_up.type, of_down, of_shared, threads)
        n_rows = config.n_experts * config.size + more
        neurons = self._sum_of_down(layout, rows, n_rows, of_up.type, spec)
        beside = self._bundle_shared(config, spec, shared, place, False)
        return up, ByNeuron(neurons, layout, rows, more=more, beside=beside)

    def _predicted_bundles(
        self,
        config: ExpertsConfig,
        spec: _native.NeuronSpec,
        experts: Iterable[RawTensor],
        weights: Selecting,
        shared: Sequence[RawTensor],
    ) -> ByNeuron:
        """Experts without gates, up and down as bundles, among which a predictor selects. shared: matrices of a shared
        expert."""
        up, down = experts
        place = self._shared_place(config, (up, down), shared, True)
        more, of_rows = (config.shared_size, shared) if place == "behind" else (0, ())
        predictor = self._expert_predictor(config, weights, place)
        width = config.row_width(self.d_model)
        layout, rows = bundle(config, width, None, up, down, self._pool.threads, of_rows)
        neurons = self._neuron_sum(layout, rows, config.n_experts * config.size + more, spec)
        return ByNeuron(neurons, layout, rows, predictor, more, self._bundle_shared(config, spec, shared, place, True))

    def _expert_predictor(
        self, config: ExpertsConfig, weights: Selecting, place: SharedPlace
    ) -> _native.Predictor | None:
        """A predictor of the neurons of experts without gates, and of a shared one, if it has bundles."""
        settings, inner, outer = weights
        n_rows = min(outer.shape[0], config.n_experts * config.size + (config.shared_size if place else 0))
        outer_rows = RawTensor(outer.type, (n_rows, outer.shape[1]), outer.rows()[:n_rows].reshape(-1))
        return self.parts.predictor((settings, inner, outer_rows))

    def _shared_place(
        self,
        config: ExpertsConfig,
        experts: Sequence[RawTensor] | Sequence[RestingTensor],
        shared: Sequence[RawTensor],
        predicted: bool,
    ) -> SharedPlace:
        """Place of the bundles of a shared expert, beside up and down of others."""
        types, shared_types = [one.type for one in experts], [one.type for one in shared]
        return shared_place(config, self.d_model, types, shared_types, predicted=predicted)

    def _bundle_shared(
        self,
        config: ExpertsConfig,
        spec: _native.NeuronSpec,
        shared: Sequence[RawTensor],
        place: SharedPlace,
        predicted: bool,
    ) -> SharedNeurons | None:
        """The bundles of a shared expert that has its own. predicted: up is in them, too."""
        if place != "apart":
            return None
        up, down = (one.gathered() for one in shared)
        alone, threads = shared_alone(config), self._pool.threads
        if predicted:
            layout, rows = bundle(alone, self.d_model, None, up, down, threads)
            return SharedNeurons(self._neuron_sum(layout, rows, alone.size, spec), layout, layout.gate_bytes, rows)
        layout, rows = bundle_down(alone, self.d_model, up.type, down, None, threads)
        first_row = cpu.matrix_bytes(up.type, alone.size, self.d_model) / alone.size
        return SharedNeurons(self._sum_of_down(layout, rows, alone.size, up.type, spec), layout, first_row, rows)

    def _neuron_sum(
        self,
        layout: BundleLayout,
        rows: NDArray[np.uint8],
        neurons: int,
        spec: _native.NeuronSpec,
        gate_at: int | None = None,
    ) -> _native.NeuronSum:
        """The sum of neurons whose bundles have up and down; gate_at: and gates there, None: they have none."""
        gate_type = None if gate_at is None else layout.gate_type
        ends = layout.gate_type, layout.down_type, layout.pitch, gate_at or 0, layout.up_at, layout.down_at
        native = _native.Bundles(rows, neurons, layout.d_model, gate_type, *ends, spec)
        return _native.NeuronSum(self._workspace, native)

    def _sum_of_down(
        self, layout: BundleLayout, rows: NDArray[np.uint8], neurons: int, up_type: str, spec: _native.NeuronSpec
    ) -> _native.NeuronSum:
        """The sum of neurons without gates whose bundles have down alone."""
        types = None, up_type, layout.down_type
        native = _native.apart_bundles(neurons, layout.d_model, *types, spec, None, rows)
        return _native.NeuronSum(self._workspace, native)

    def _stack(self, tensor: RawTensor, read: int | None = None) -> _native.Matrix:
        """Matrices [n, out, in] one below the other, each in whole panels; `read` of them, None: all, are read for a
        token."""
        n, rows, cols = tensor.shape
        padded = cpu.round_up(rows, cpu.LANES)
        places = np.arange(n)[:, None] * rows + np.where(np.arange(padded) < rows, np.arange(padded), -n * rows)
        row_map = None if padded == rows else np.maximum(places, -1).reshape(-1).astype(np.int32)
        packed = self._pack(replace(tensor, shape=(n * rows, cols)), row_map)
        self.bytes_per_token += packed.nbytes if read is None else packed.nbytes * min(read, n) // n
        return packed

    def normalise(self, layer: int, norm: _native.Norm) -> None:
        """x = norm(x)."""
        self._program.normalise(norm)

    def expand_streams(self, matrices: RawTensor) -> None:
        """Residual streams: x, and what each of the matrices [streams - 1, d_model, d_model] makes of it, brought to
        its magnitude."""
        assert self.config.altup is not None
        self._program.expand_streams(self.config.altup.streams, self.config.altup.active, self._stack(matrices))

    def predict_streams(self, layer: int, mix: StreamMix) -> None:
        """Each stream += a sum of all of them, by what `mix` makes of the active one; x = the active one."""
        self._program.predict_streams(mix.norm, mix.router, mix.weights)

    def add_laurel(
        self,
        layer: int,
        norm: _native.Norm,
        inner: _native.Matrix,
        outer: _native.Matrix,
        out_norm: _native.Norm,
    ) -> None:
        """x += norm(x) + out_norm(outer . inner . norm(x))."""
        self._program.add_laurel(norm, inner, outer, out_norm)

    def correct_streams(self, layer: int, mix: StreamMix, scale: Float32 | None) -> None:
        """Each stream += (1 + a coefficient that `mix` makes of x) * (x - the active one); x = scale * the active one.
        What is added by `add_layer_input` then goes to all streams but the first."""
        self._program.correct_streams(mix.norm, mix.router, mix.weights, scale)

    def merge_streams(self, matrices: RawTensor) -> None:
        """x = the mean of the first stream and of what each matrix makes of another, brought to its magnitude."""
        self._program.merge_streams(self._stack(matrices))

    def head(
        self,
        norm: _native.Norm | None,
        matrix: _native.Matrix,
        projection: _native.Matrix | None = None,
        bias: Float32 | None = None,
    ) -> None:
        """logits = the config's scale * (matrix . projection . norm(x) + bias), capped as it says."""
        self._program.head(norm, matrix, projection, self.config.logit_scale, self.config.logit_cap or 0.0, bias)
        self._head = matrix
        if self.disk is not None and self.disk.window is not None:
            self._program.set_window(self.disk.window)

    def draft_input(
        self, embedding: RawTensor | None, embed_norm: _native.Norm, hidden_norm: _native.Norm, matrix: RawTensor
    ) -> None:
        """x = matrix . [embed_norm(row of the embedding), hidden_norm(x)]: the draft head begins, behind all of the
        model. embedding: its own, None: the model's."""
        table, join = self._begin_draft(embedding), self.matrix(matrix)
        self._program.draft_input(table, embed_norm, hidden_norm, join, self.config.embedding_scale)

    def _begin_draft(self, embedding: RawTensor | None) -> _native.Table:
        """Begin the draft head, whose operators follow. Returns its embedding."""
        self._draft_from, self._of_model = self._program.size, (self.in_experts, self.bytes_per_token)
        self.in_experts = False
        if embedding is not None:
            return self._table(replace(embedding, data=embedding.data.copy()))
        assert self._embedding is not None
        return self._embedding

    def draft_head(self, norm: _native.Norm, matrix: RawTensor | None) -> None:
        """The logits of the draft head, as of `head`; None: with the model's, and only norm(x) where another device has
        that. It ends: what is asked of the executor's layers, and how much a token reads, is about the model."""
        assert self._draft_from is not None
        first, of_model = self._draft_from, self._head
        output = of_model if matrix is None else self.matrix(matrix)
        if output is None:
            self.normalise(self.config.n_layers, norm)
        else:
            self._program.head(norm, output, None, self.config.logit_scale, self.config.logit_cap or 0.0, None)
        self._end_draft()
        run = partial(self._run, first=first)
        self.drafter = CpuDraftHead(self._program, run, self.vocab_size, self._stores, output=output is not None)

    def _end_draft(self) -> None:
        """End the draft head: what was wired since `_begin_draft` is no part of the model."""
        for parts in (self.ffns, self._experts):
            parts.pop(self.config.n_layers, None)
        self.in_experts, self.bytes_per_token = self._of_model

    def keep_features(self, layer: int) -> None:
        """Features of an EAGLE head: x, which that layer gets, if the head reads it."""
        layers = () if self._eagle is None else self._eagle.layers
        for place, one in enumerate(layers):
            if one == layer:
                self._program.keep_feature(place, len(layers))

    def eagle_input(
        self,
        norms: Sequence[_native.Norm],
        matrix: RawTensor,
        embedding: RawTensor | None,
        embed_norm: _native.Norm,
        hidden_norm: _native.Norm,
    ) -> None:
        """x = matrix . norms(features), and attention that follows reads [embed_norm(row of the embedding),
        hidden_norm(x)]: an EAGLE head begins. norms: as of `Program.fuse`; embedding: as of `draft_input`."""
        assert self._eagle is not None
        table, fuse = self._begin_draft(embedding), self.matrix(matrix)
        self._program.fuse(norms, fuse)
        self._fused, self._norm_eps = self._program.size, self._eagle.norm_eps
        self._program.draft_input(table, embed_norm, hidden_norm, None, 1.0, self._eagle.normed)

    def eagle_head(self, norm: _native.Norm, matrix: RawTensor | None, tokens: Float32 | None) -> None:
        """The logits of an EAGLE head, which ends, as of `draft_head`. tokens: the model's token of each row."""
        assert self._eagle is not None and tokens is not None
        first, output = self._draft_from, self._head if matrix is None else self.matrix(matrix)
        assert first is not None and output is not None
        self._program.head(norm, output)
        self._norm_eps = self.config.norm_eps
        self._end_draft()
        self.drafter = EagleHead(
            self._program, partial(self._run, first=first), self._stores, tokens=tokens.astype(np.int32),
            vocab_size=self.vocab_size, fused=self._fused, normed=self._eagle.normed_output,
        )  # fmt: skip

    @property
    def list_draft_panels(self) -> Callable[[NDArray[np.int32]], None] | None:
        """A call by which logits of some panels alone are made, as of `DraftHead.list_panels`; None: of all."""
        return self._program.list_draft_panels if self._program.lists_draft_panels else None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A context in which operators are timed."""
        self._program.timed = True
        self.operator_seconds()
        try:
            yield
        finally:
            self._program.timed = False

    def operator_seconds(self) -> list[tuple[str, float]]:
        """(kind, seconds) of each operator, in their order, since the last call, while `timed`."""
        return self._program.take_times()

    def expert_operator(self, layer: int) -> _native.Experts:
        """The operator of a layer's experts that was wired last."""
        return self._experts[layer]

    def ffn_seconds(self) -> list[float]:
        """Seconds spent in each layer's FFN since the last call, while `timed`."""
        times = self.operator_seconds()
        return [times[ffn.op.number][1] for ffn in self.ffns.values()]

    # ---------------------------------------------------------------- running

    def forward(self, batch: Batch) -> Float32:
        self._make_room(batch)
        if self._expert_observer is not None:
            self._run_experts(batch, self._expert_observer)
        elif self._observed is None:
            self._run(batch, 0, self.operators)
        else:
            self._run_observed(batch, self._observed)
        self.end(batch)
        return self._logits[: len(batch.logit_rows), : self.vocab_size]

    def hidden_states(self, rows: NDArray[np.int32]) -> Float32:
        """Return as `Executor` says; of one that has the head."""
        out = np.empty((len(rows), self.d_model), np.float32)
        self._program.hidden_states(rows, out)
        return out

    @property
    def pool(self) -> _native.Pool:
        """Threads of the executor."""
        return self._pool

    @contextmanager
    def awake(self) -> Iterator[None]:
        """A context within which its threads wait for work without giving up their cores: to wake them takes longer
        than to compute a few neurons."""
        self._pool.keep_awake()
        try:
            yield
        finally:
            self._pool.let_park()

    def embedded(self, batch: Batch) -> Float32:
        """Check the batch and embed its tokens: the residual stream, float32 [T, d_model], where `finish` reads it."""
        self._make_room(batch)
        self._run(batch, 0, self._embedded)
        return self._program.residual(len(batch.tokens))

    def embedding(self, batch: Batch) -> Float32:
        """The same without a step that follows: no states change."""
        numbers = np.arange(len(batch.page_table), dtype=np.int32)
        self.slots = None if self._states is None else (numbers, numbers)
        self._run(replace(batch, logit_rows=batch.logit_rows[:0]), 0, self._embedded)
        return self._program.residual(len(batch.tokens))

    def answer_tokens(
        self,
        flags: _native.HostFlags,
        number: int,
        seconds: float,
        brought: tuple[NDArray[Any], ...],
        batch: Batch,
        rows: Float32,
    ) -> bool:
        """Wait until a GPU has written that number and, before it, its largest logits: int64 [T], their tokens, and
        float32 [T]; make the tokens those of the batch, put their embeddings into rows, float32 [T, d_model], and
        answer the number. False: it has not within these seconds. Of executors that look rows up.

        Of a batch with `draws` it writes candidates, int32 [T, WORDS]. Where not all tokens can be drawn out of these,
        the others are -1, and the number is not answered."""
        present = None if self._file_rows is None else self._file_rows.present
        drawn = () if batch.draws is None else (batch.draws,)
        arguments: tuple[Any, ...] = (flags, number, seconds, *brought, *drawn)
        arguments = *arguments, batch.positions, batch.tokens, rows, present
        program = self._program
        answer: Callable[..., bool | None] = program.answer_draws if drawn else program.answer_tokens
        answered = answer(*arguments)
        if answered is False:
            assert self._file_rows is not None
            tokens = any_tokens(brought[0], batch.tokens) if drawn else brought[0].astype(np.int32)
            self._file_rows.fetch(tokens)
            answered = answer(*arguments)
        return answered is not None

    def finish(self, batch: Batch, first: int | None = None) -> Float32:
        """Run everything after the embedding, or from operator `first` on, on the current residual stream; logits as
        from `forward`."""
        self._run(batch, self._embedded if first is None else first, self.operators)
        return self._logits[: len(batch.logit_rows), : self.vocab_size]

    def run_part(self, batch: Batch, first: int | None, last: int) -> Float32:
        """Run a part of that, operators `first` (None: the first after the embedding) up to `last`, if there are any.
        Returns the residual stream, float32 [T, d_model], where what follows reads it."""
        first = self._embedded if first is None else first
        if first < last:
            self._run(batch, first, last)
        return self._program.residual(len(batch.tokens))

    def cached(self, layer: int) -> NDArray[np.uint8]:
        """The cache of a layer, uint8 [pages, kv_heads, bytes of a head], for a head as `kernels.gpu_pages` has it. It
        may be written while no step runs."""
        return self._cache.heads(layer - self.first_layer)

    @property
    def operators(self) -> int:
        """The number of the model's that are wired so far."""
        return self._program.size if self._draft_from is None else self._draft_from

    def end(self, batch: Batch) -> None:
        """The batch was computed in all layers, on this device and others. ChangedError if a file was changed that was
        read for it."""
        if self.disk is not None:
            self.disk.check()
        for file in self.mapped:
            file.check_unchanged()
        if self._states is not None:
            self._states.end(batch)
        if self.disk is not None:
            self.disk.observe(len(batch.tokens))

    def _make_room(self, batch: Batch) -> None:
        """Make room for the logits of a batch, and for the states of its sequences; a step begins."""
        if self.disk is not None:
            self.disk.begin(len(batch.tokens), self._program.forget)
        if self._states is not None:
            self.slots = self._states.begin(batch)
        if len(batch.logit_rows) > len(self._logits):
            self._logits = np.empty((len(batch.logit_rows), self._logits.shape[1]), np.float32)

    def _run(self, batch: Batch, first: int, last: int, logits: Float32 | None = None) -> None:
        """Operators `first` up to `last` of a call. logits: where they go, None: those of the model."""
        drafts = self._draft_from is not None and first >= self._draft_from
        if self._file_rows is not None and (first < self._embedded or drafts):
            self._file_rows.fetch(batch.tokens)
        for file in self.mapped:
            file.check_unchanged()
        if self.disk is None:
            return self._run_operators(batch, first, last, self._logits if logits is None else logits)
        self.disk.check()
        with self.disk.reading():
            self._run_operators(batch, first, last, self._logits if logits is None else logits)
        self.disk.check()

    def _run_operators(self, batch: Batch, first: int, last: int, logits: Float32) -> None:
        read_states, states = self.slots or (None, None)
        finished = self._program.run(
            batch.tokens,
            batch.positions,
            batch.rows,
            batch.page_table,
            batch.logit_rows,
            logits,
            first,
            last,
            self.vocab_size,
            read_states,
            states,
            batch.stop,
            batch.replayed,
            batch.undo_states,
            batch.alone,
        )
        if not finished:
            raise StoppedError

    def _run_observed(self, batch: Batch, observed: _Observed) -> None:
        """A call in parts, observing every FFN."""
        tokens, at, watch, observer = len(batch.tokens), 0, observed.watch, observed.by
        for layer, ffn in self._watched():
            self._run(batch, at, ffn.op.number)
            if observer is not None:
                x = self._program.residual(tokens)
                x.flags.writeable = False
                observer.reads(layer, x)
            watch.clear()
            if observed.thresholds is not None:
                watch.threshold = observed.thresholds[layer]
            at = ffn.op.number + 1
            self._run(batch, ffn.op.number, at)
            if watch.damaged:
                raise _not_finite(layer)
            if observer is not None:
                active = watch.active(tokens)[:, : -(-ffn.neurons // 8)]
                observer.fires(layer, Fired(watch.counts[: ffn.neurons], active, watch.magnitudes.sum(axis=0)))
        self._run(batch, at, self.operators)

    def _watched(self) -> list[tuple[int, CpuFfn]]:
        """The FFNs that can be observed, with their layers."""
        return [(layer, ffn) for layer, ffn in self.ffns.items() if ffn.matrices]

    @contextmanager
    def observed(
        self,
        observer: Observer | None,
        thresholds: Sequence[float] | None = None,
        *,
        silence: bool = False,
        measure: bool = False,
    ) -> Iterator[None]:
        """A context in which `observer`, if any, sees every FFN; all of them run densely.

        A neuron fires for a token when its product h is not zero; with `thresholds`, of the layers, when its activation
        exceeds its layer's in magnitude, before it is multiplied with what up gives. silence: what does not fire is
        left out, as selector `threshold` does. measure: count magnitudes, only with `thresholds`. `forward` raises
        ModelError for activations of numbers that are not finite.
        """
        assert thresholds is None or len(thresholds) == len(self._watched())
        assert thresholds is not None or not (silence or measure)
        watch = _native.Watch(self._program)
        watch.gate, watch.silence, watch.measure = thresholds is not None, silence, measure
        self._program.set_watch(watch)
        self._observed = _Observed(observer, watch, thresholds)
        try:
            yield
        finally:
            self._observed = None
            self._program.set_watch(None)

    @contextmanager
    def routed(self) -> Iterator[Callable[[], Routed]]:
        """A context in which steps keep what their tokens select; what it gives reads that of the last `forward`.

        That raises ModelError for a router's weights that are not finite.
        """
        for op in self._experts.values():
            op.record(True)
        try:
            yield self._routed
        finally:
            for op in self._experts.values():
                op.record(False)

    def _routed(self) -> Routed:
        return {layer: self._selected(layer) for layer in self._experts}

    def _selected(self, layer: int) -> NDArray[np.int32]:
        selected, damaged = self._experts[layer].selected()
        if damaged:
            raise _not_finite(layer)
        return np.array(selected, np.int32).reshape(-1, self.config.experts[layer].router.top_k)

    @contextmanager
    def observed_experts(self, observer: ExpertObserver) -> Iterator[None]:
        """A context in which `observer` sees every layer of experts; of executors that compute these whole.

        `forward` raises ModelError for a router's weights that are not finite.
        """
        assert not self.expert_ffns
        for op in self._experts.values():
            op.record(True, fired=True)
        self._expert_observer = observer
        try:
            yield
        finally:
            self._expert_observer = None
            for op in self._experts.values():
                op.record(False)

    def _run_experts(self, batch: Batch, observer: ExpertObserver) -> None:
        """A call in parts, observing the experts of every layer."""
        tokens, at = len(batch.tokens), 0
        for layer, op in self._experts.items():
            self._run(batch, at, op.number)
            x = self._program.residual(tokens)
            x.flags.writeable = False
            observer.reads(layer, x)
            at = op.number + 1
            self._run(batch, op.number, at)
            selected, config = self._selected(layer), self.config.experts[layer]
            fired = np.empty((selected.size, -(-config.size // 8)), np.uint8)
            op.fired(fired)
            active = fired.reshape(tokens, -1)
            if config.predicted_shared:
                of_shared = np.empty((tokens, config.predicted_shared // 8), np.uint8)
                op.fired_shared(of_shared)
                active = np.concatenate((active, of_shared), axis=1)
            observer.fires(layer, selected, active)
        self._run(batch, at, self.operators)

    def traced(self) -> AbstractContextManager[Trace]:
        """RequestError: tracing shows what a GPU and the CPU do side by side."""
        raise RequestError("there is nothing to trace: no layer runs on a GPU (--gpu)")

    def close(self) -> None:
        names = "_observed _expert_observer _program _cache _states _ropes ffns _experts _early_routers expert_ffns"
        names += " drafter _head _embedding"
        for name in (*names.split(), "disk", "parts", "_pack", "_workspace", "_pool", "_logits"):
            self.__dict__.pop(name, None)


def _not_finite(layer: int) -> ModelError:
    return ModelError(f"layer {layer} computes numbers that are not finite: the model's weights may be damaged")


def head_rows(heads: int, dim: int, interleaved: int) -> NDArray[np.int32] | None:
    """The row map of a matrix whose rows are `heads` heads of `dim` dimensions: padded to whole lanes, rotary pairs of
    the first `interleaved` brought to (i, i + interleaved/2).

    None where the rows are right as they are.
    """
    padded = cpu.round_up(dim, cpu.LANES)
    if padded == dim and not interleaved:
        return None
    within = np.full(padded, -1, np.int64)
    within[:dim] = np.arange(dim)
    within[:interleaved] = np.arange(interleaved).reshape(-1, 2).T.reshape(-1)
    rows = np.arange(heads)[:, None] * dim + within
    return np.where(within < 0, -1, rows).reshape(-1).astype(np.int32)


def choose_pages(
    config: ModelConfig,
    engine: EngineConfig,
    context: int,
    first_layer: int = 0,
    room: int | None = None,
    undo_tokens: int = 0,
) -> tuple[int, str]:
    """(pages, reason): room for `max_batch` whole contexts, as far as a quarter of the free memory goes.

    first_layer: the first that has its cache here; room: bytes that it must not exceed, enough for one context;
    undo_tokens: as of `Drafting`.
    RequestError when not even one context fits the memory.
    """
    page = sum(cpu.kv_page_bytes(engine.kv_type, layer.attention) for layer in config.layers[first_layer:])
    pages = -(-context // cpu.PAGE)
    slot = state_bytes(config, slice(first_layer, None), undo_tokens)
    states = state_slots(engine.max_batch, engine.prefix_cache, undo_tokens) * slot
    free = available_memory() or 1 << 62
    memory = max(0, free - states)
    if pages * page > memory or states > free:
        beside = f" beside {states >> 20} MiB of states" if states else ""
        raise RequestError(
            f"a context of {context} tokens needs a KV cache of {pages * page >> 20} MiB and {memory >> 20} MiB are "
            f"free{beside}: lower --context{' or --max-batch' if states else ''} or choose --kv-type q8_0"
        )
    wanted = pages * max(1, engine.max_batch)
    limit = max(pages, memory // 4 // page) if page else wanted
    if room is not None and page and room // page < min(wanted, limit):
        return max(pages, room // page), "as many as its RAM holds"
    if wanted <= limit:
        return wanted, f"{engine.max_batch} contexts of {context}"
    return limit, "a quarter of the free memory" if limit > pages else "one context"


def _disk_matrix(experts: RestingTensor) -> _native.Matrix:
    """The matrices of experts on disk, one below the other; only the slots know where each is."""
    n, rows, cols = experts.shape
    return _native.disk_matrix(experts.type, n * rows, cols, *experts.places[0], factors=experts.scales)


def _latents(matrices: Sequence[_native.Matrix]) -> dict[str, Any]:
    return dict(zip(("latent_in", "latent_out"), matrices, strict=False))


def _biases(config: ExpertsConfig, biases: Sequence[Float32 | None]) -> dict[str, Any]:
    return {f"{part}_bias": bias for part, bias in zip(config.matrices, biases, strict=False)}


def _expert_ffn(config: ExpertsConfig, by_neuron: ByNeuron, of_gates: int, op: _native.Experts) -> ExpertFfn:
    """The FFN of an operator. of_gates: bytes of the matrix of the first product, 0: a predictor selects before it."""
    n, size, top, layout, more = config.n_experts, config.size, config.router.top_k, by_neuron.layout, by_neuron.more
    beside, predictor = by_neuron.beside, by_neuron.predictor
    beside_rows = 0 if beside is None else config.shared_size
    routed = (of_gates + by_neuron.groups.nbytes - more * layout.stride) * top // n
    shared = more * layout.stride + more * of_gates // (n * size)
    if beside is not None:
        shared = beside.groups.nbytes + (0 if predictor else round(beside.first_row * beside_rows))
    outer_row = 0.0 if predictor is None else predictor.outer_nbytes / (n * size + more + beside_rows)
    return ExpertFfn(
        op,
        by_neuron.sum,
        layout,
        gate_row=of_gates / (n * size) if of_gates else layout.gate_bytes,
        predictor=(0 if predictor is None else predictor.inner_nbytes, outer_row),
        neurons=top * size + more + beside_rows,
        nbytes=routed + shared,
        shared=beside,
    )


def _router(
    config: RouterConfig, correction: Float32 | None, bias: Float32 | None, factors: Float32 | None = None
) -> _native.RouterSpec:
    return _native.RouterSpec(
        config.top_k,
        config.scoring,
        config.normalise,
        config.scale,
        correction,
        config.groups,
        config.top_groups,
        config.group_best,
        bias,
        factors,
        config.scales_input,
        config.nearness,
    )
