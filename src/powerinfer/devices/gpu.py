"""The first layers of a model on a GPU: weights, paged cache and the list of operators that a step runs.

The device may also be torch's CPU, which then emulates a GPU: the same operators in torch's own arithmetic.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import (
    GAUSSIAN,
    SMOOTH,
    ChannelDeltaConfig,
    DeltaNetConfig,
    ExpertsConfig,
    FfnConfig,
    GatedAttentionConfig,
    LatentAttentionConfig,
    Mamba2Config,
    ModelConfig,
    ParallelConfig,
    RopeConfig,
    ShortConvConfig,
)
from powerinfer.devices.batch import Batch, LogitsNeed, StoppedError
from powerinfer.devices.card_link import CardLink
from powerinfer.devices.choices import Choice
from powerinfer.devices.cpu import Rotation
from powerinfer.devices.draft_rows import ListedRows, listed_rows
from powerinfer.devices.flags import LateAnswerError
from powerinfer.devices.gpu_latent import LatentInput, LatentOutput
from powerinfer.devices.gpu_layer import FfnParts, GpuLayer
from powerinfer.devices.gpu_streams import GpuStreams
from powerinfer.devices.gpu_weights import (
    GpuNorm,
    HeadMatrices,
    Matrices,
    PanelMatrix,
    StoredMatrix,
    StreamedMatrices,
)
from powerinfer.devices.link import WAYS, Link, Way
from powerinfer.devices.next_step import Embedding, NextStep
from powerinfer.devices.prompt_recordings import PromptRecordings
from powerinfer.devices.recording import (
    LEAST_SHAPES,
    MOST_SHAPES,
    PROMPTS_BYTES,
    RECORDED_BYTES,
    Recorder,
    Recordings,
    recorder_of,
)
from powerinfer.devices.replayed_spans import UNRECORDED, ReplayedSpans
from powerinfer.devices.states import Slots
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.step_buffers import PassedRows, StepBuffers
from powerinfer.devices.streams import free_workspaces, streams_of
from powerinfer.devices.torch_device import (
    MemoryShare,
    current,
    gpu_failures,
    held_beside_tensors,
    import_torch,
    memory_taken,
)
from powerinfer.devices.trace import Trace, span
from powerinfer.errors import GpuMemoryError
from powerinfer.formats.quant import Float32
from powerinfer.formats.tensors import RawTensor, StreamMix
from powerinfer.kernels import cpu, gpu, gpu_delta, gpu_mamba, gpu_short_conv, gpu_states
from powerinfer.kernels.gpu_types import States
from powerinfer.neurons import NO_VECTORS, FfnVectors, Indices

if TYPE_CHECKING:
    from torch import Tensor, device
else:
    Tensor = device = Any


R = TypeVar("R")

GpuMatrix = StoredMatrix | PanelMatrix
"""A matrix as operators take it: one to be uploaded, or one that stays in RAM and streams to the device in every
step."""


_CALLERS: dict[Way, str] = {
    "flags": "the GPU calls the CPU by flags",
    "calls": "the GPU calls the CPU",
    "waits": "the host waits for the GPU",
}


class CacheSize(NamedTuple):
    """A cache's type and pages; states: slots for the states of sequences, of a model whose layers have any;
    undo_tokens: as of `StateMemory`; first: the first layer that has its part here, of a further GPU its own first;
    drafts: it is that of a draft head, a layer by itself behind those of the model (`with_draft`)."""

    kv_type: str
    pages: int
    states: int = 0
    undo_tokens: int = 0
    first: int = 0
    drafts: bool = False


@dataclass(frozen=True)
class OutputMatrix:
    """An output head. rows: its product, behind that of `inner`; bias: float32 [vocab_size], before scale and cap."""

    rows: Callable[[Tensor], Tensor]
    inner: Matrices | None
    bias: Tensor | None
    scale: float
    cap: float | None
    for_codes: bool  # as of `gpu.norm`

    def make(self, x: Tensor) -> Tensor:
        """Logits, float32 [R, vocab_size], of normalised rows [R, d_model]."""
        logits = self.rows(x if self.inner is None else self.inner(x))
        if self.bias is not None:
            logits.add_(self.bias)
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits


class StepObserver(Protocol):
    """An observer of steps, which changes between them what they read."""

    @property
    def gpu_bytes(self) -> int:
        """Bytes on the device that it keeps."""
        ...

    def rehearse(self) -> None:
        """Do once what it does beside a step."""
        ...

    def end(self, tokens: int) -> None:
        """A step of that many tokens has ended, and its result is there."""
        ...

    def forget(self) -> None:
        """A step has failed; it may be run again."""
        ...


class GpuLayers:
    """The first layers of a model on a device. `models` wires them with the methods from `matrix` to `head`.

    An FFN is dense (`ffn`), or a sum of parts some of which other devices compute (`split_ffn`). `run` takes the
    residual stream after the embedding and returns it after these layers, or the logits. Operators of other layers,
    whose matrices stream, may be wired too: `run_streamed` runs them (devices/streamed.py).

    The same step gives the same bits on every run. How a token's sums are rounded may depend on the number of tokens
    in its step.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: device,
        *,
        layers: int,
        cache: CacheSize,
        max_tokens: int,
        rotations: Mapping[RopeConfig, Rotation],
        split: bool = False,
        share: MemoryShare | None = None,
    ) -> None:
        """layers: the end of those that are here, from the cache's first on. rotations: of every rotary embedding of
        these layers; split: their FFNs are wired by `split_ffn`; share: theirs of the device's memory, which ends with
        them; None: one of their own."""
        torch = import_torch()
        kv_type, pages, states, undo_tokens, self._first, drafts = cache
        assert 0 < layers <= config.n_layers and pages > 0 and max_tokens > 0
        self.layers = layers
        self.page_size = cpu.PAGE
        self.n_pages = pages
        self.max_tokens = max_tokens
        self.vocab_size = config.vocab_size
        self.d_model = config.d_model
        self.device = device
        self.share = share or MemoryShare(device)
        self.trace: Trace | None = None
        self.streams: GpuStreams | None = None  # None: the residual stream is the only one
        self.rehearses = False  # a step of no text, whose result nobody reads
        self.observer: StepObserver | None = None
        self.link = Link(device, max_tokens, config) if split else None
        self.card_links: list[CardLink] = []  # to GPUs that compute some experts of these layers
        self._helped: list[CardLink] = []  # of GPUs for whose layers this one does
        self.next_step: NextStep | None = None  # None: no step is launched ahead of its tokens
        self.few_tokens = self.few_steps = 0
        self.bytes_per_token = 0
        self._config = config
        self._cuda = device.type == "cuda"
        self._streams = streams_of(device)
        self._bytes: Counter[str] = Counter()
        self._layers = [GpuLayer(index, one.parallel) for index, one in enumerate(config.layers)]
        self._head: Operator | None = None
        self._output: OutputMatrix | None = None
        self._listed: ListedRows | None = None
        self._final_norm: GpuNorm | None = None
        self._operators: list[Operator] | None = None
        self._shares: bool | None = None
        numbers = config.layer_inputs
        self._inputs_here = slice(None) if drafts else slice(self._first * numbers, layers * numbers)
        self._attended_for_codes: set[int] = set()  # layers whose attention `project` multiplies as codes
        self._rotations = {rope: (self._vector(rotation[0]), rotation[1]) for rope, rotation in rotations.items()}
        self._new_cache = partial(gpu.new_cache, kv_type, pages)
        self._undo_tokens = undo_tokens
        self._make_caches(states, undo_tokens)
        changed = config.residual_scale != 1 or any(
            layer.norms in ("output", "both") or layer.ffn_factors[1] != 1 for layer in config.layers[:layers]
        )
        self.ways, self._no_way = WAYS[-1:], ""
        if self.link is not None:
            with current(device):
                self.ways, self._no_way = self.link.try_ways()
        self._way, self._way_reason, self._way_origin = self.ways[0], "", ""
        vectors = max_tokens, config.d_model, config.vocab_size
        self.buffers = StepBuffers(
            device,
            *vectors,
            totals=split and changed,
            inputs=config.d_model if drafts else config.layer_inputs * (layers - self._first),
            undo_tokens=undo_tokens,
        )
        static = gpu.which(torch.empty(0, device=device)) == "triton"  # torch's own operators look at the data
        self._recorder = recorder_of(device) if static else None
        self._recordings: Recordings | None = None
        self._recorded_at = self.buffers.addresses
        self.prompts = PromptRecordings()
        self._shapes = self._most_shapes = MOST_SHAPES
        self._passed = self._recorded_bytes = 0
        self._most_held = 0  # by torch in the largest step, beside tensors that are kept
        self._latest_logits: Float32 | None = None  # of a step that brought candidates, once they were asked for

    def _make_caches(self, states: int, undo_tokens: int) -> None:
        """Caches, and states, of these layers, empty."""
        config, device, layers = self._config, self.device, range(self._first, self.layers)
        kinds = [config.layers[layer].attention for layer in layers]
        heads = [(kind.cached_heads, kind.head_dim, "k" if kind.latents else "kv") for kind in kinds]
        caches = [tuple(self._new_cache(n, dim, device) for _ in parts) for n, dim, parts in heads]
        self._cache = dict(zip(layers, caches, strict=True))
        remembered = {layer: kind for layer, kind in config.states.items() if layer in layers}
        layer_states = gpu_states.new_states(list(remembered.values()), states, device, undo_tokens)
        self._states = dict(zip(remembered, layer_states, strict=True))
        self._passing: dict[tuple[int, int], tuple[gpu.Cached, ...]] = {}  # by kv heads and their dimensions
        most = max(layer.attention.cached_heads for layer in config.layers)
        self._arrived = import_torch().zeros(gpu.FEW * most, dtype=import_torch().int32, device=device)
        self._bytes["kv"] = sum(part.nbytes for pair in self._cache.values() for part in pair)
        self._bytes["kv"] += sum(part.nbytes for part in self._states.values())

    # ---------------------------------------------------------------- weights

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> StoredMatrix:
        """A matrix [out, in], to be uploaded by the operator that takes it. row_map: see `StoredMatrix`."""
        return StoredMatrix(tensor, row_map)

    def _products(
        self, part: str, *matrices: GpuMatrix, biases: Sequence[Float32 | None] = ()
    ) -> Matrices | StreamedMatrices:
        """Matrices that multiply the same rows, with their biases: uploaded, or such that stream, all of them; part: of
        `memory`."""
        stored = [one for one in matrices if isinstance(one, StoredMatrix)]
        if stored:
            return self._upload(part, *stored, biases=biases)
        panels = [one for one in matrices if isinstance(one, PanelMatrix)]
        uploaded = [self._optional_vector(bias) for bias in biases] or [None] * len(panels)
        return StreamedMatrices(panels, uploaded, self.device)

    def _upload(self, part: str, *matrices: StoredMatrix, biases: Sequence[Float32 | None] = ()) -> Matrices:
        """Matrices that multiply the same rows, with their biases; part: of `memory`."""
        uploaded = [self._optional_vector(bias) for bias in biases] or [None] * len(matrices)
        together = Matrices(matrices, uploaded, self.device)
        self._bytes[part] += together.nbytes
        self.bytes_per_token += together.nbytes
        return together

    def _upload_heads(self, tensor: RawTensor) -> HeadMatrices:
        """Matrices [heads, out, in] of attention."""
        heads = HeadMatrices(tensor, self.device)
        self._bytes["attention"] += heads.nbytes
        self.bytes_per_token += heads.nbytes
        return heads

    def head_rows(self, heads: int, dim: int, interleaved: int) -> NDArray[np.int32] | None:
        """The row map of a matrix whose rows are `heads` heads of `dim` dimensions: rotary pairs of the first
        `interleaved` moved to (i, i + interleaved/2). None: as they are."""
        if not interleaved:
            return None
        within = np.arange(dim)
        within[:interleaved] = np.arange(interleaved).reshape(-1, 2).T.reshape(-1)
        return (np.arange(heads)[:, None] * dim + within).reshape(-1).astype(np.int32)

    def norm(
        self, weight: Float32, bias: Float32 | None = None, order: Indices | None = None, eps: float | None = None
    ) -> GpuNorm:
        """A norm of the model's kind over rows of d_model. order: number i of the result is that of number order[i];
        eps: None, the model's."""
        config, moved = self._config, slice(None) if order is None else order
        vectors = self._vector(weight[moved]), self._optional_vector(None if bias is None else bias[moved])
        eps = config.norm_eps if eps is None else eps
        return GpuNorm(*vectors, eps, config.norm == "layer", order=self._order(order))

    def _order(self, order: Indices | None) -> Tensor | None:
        if order is None:
            return None
        uploaded = import_torch().from_numpy(order.copy()).to(self.device)
        self._bytes["norms"] += uploaded.nbytes
        return uploaded

    def scale(self, factor: float) -> GpuNorm:
        """A factor in place of a norm over rows of d_model."""
        return GpuNorm(import_torch().full((1,), factor, device=self.device), None, 0.0, False, plain=True)

    def _rms(self, weight: Float32 | None) -> GpuNorm | None:
        return None if weight is None else GpuNorm(self._vector(weight), None, self._config.norm_eps, False)

    def _vector(self, values: Float32) -> Tensor:
        vector = import_torch().from_numpy(np.array(values, np.float32)).to(self.device)
        self._bytes["norms"] += vector.nbytes
        return vector

    def _optional_vector(self, values: Float32 | None) -> Tensor | None:
        return None if values is None else self._vector(values)

    def cache(self, layer: int) -> tuple[gpu.Cached, ...]:
        """The keys and values of a layer. Those of layers that stream are not kept here: layers whose heads are alike
        share the memory."""
        if layer < self.layers:
            return self._cache[layer]
        attention = self._config.layers[layer].attention
        assert not attention.latents
        heads = attention.n_kv_heads, attention.head_dim
        if heads not in self._passing:
            self._passing[heads] = self._new_cache(*heads, self.device), self._new_cache(*heads, self.device)
            self._bytes["kv"] += sum(part.nbytes for part in self._passing[heads])
        return self._passing[heads]

    # ---------------------------------------------------------------- operators, in the order in which they run

    def attention(
        self,
        layer: int,
        norm: GpuNorm | None,
        qkv: Sequence[GpuMatrix],
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
        settings = self._config.layers[layer].heads
        if settings.kv_from is not None:
            return self._attend_elsewhere(layer, norm, qkv[0], biases[0], q_norm, sinks)
        heads, kv, dim = settings.n_heads, settings.n_kv_heads, settings.head_dim
        matrices = self._products("attention", *qkv, biases=biases)
        norms, width = (self._rms(q_norm), self._rms(k_norm)), settings.qk_norm == "width"
        separate, clip = settings.qk_norm == "separate", settings.qkv_clip
        rotation = None if settings.rope is None else self._rotations[settings.rope]
        together = None
        last = settings.rotates_first
        if norms[0] is not None and norms[1] is not None and not (width or last or separate) and rotation is not None:
            together = gpu.HeadNorms(norms[0].weight, norms[1].weight, self._config.norm_eps)
        keys, values = self.cache(layer)
        cache = keys, values
        uploaded_sinks = self._optional_vector(sinks)
        v_norm = self._rms(np.ones(dim, np.float32) if settings.v_norm else None)

        def run(step: Step) -> None:
            tokens = len(step.x)
            products = matrices(step.normalised(norm, matrices.for_codes)).view(tokens, -1, dim)
            if clip is not None:
                products = products.clamp(-clip, clip)
            q, k, v = products[:, :heads], products[:, heads : heads + kv], products[:, -kv:]
            if v_norm is not None:
                v = _normalised_heads(v_norm, v, False)
            elif settings.keys_as_values:
                v = v.clone()  # keys are rotated in place
            if last and rotation is not None:
                q, k = (gpu.rotate(part, step.positions, *rotation) for part in (q, k))
            if together is None:
                q, k = (_normalised_heads(own, part, width) for own, part in zip(norms, (q, k), strict=True))
            for_codes = layer in self._attended_for_codes
            attended = cache, step.contexts, settings, uploaded_sinks, for_codes, self._arrived
            if rotation is None or last:
                gpu.store_kv(keys, values, k, v, step.slots)
                step.attended = gpu.attention(q, *attended)
            else:
                new = gpu.NewHeads(k, v, step.slots, rotation, together)
                step.attended = gpu.attend(q, new, *attended)

        self._add(layer, "attention", run)

    def _attend_elsewhere(
        self,
        layer: int,
        norm: GpuNorm | None,
        q: GpuMatrix,
        bias: Float32 | None,
        q_norm: Float32 | None,
        sinks: Float32 | None,
    ) -> None:
        """`attention` of a layer that reads the keys and values of another one."""
        settings = self._config.layers[layer].heads
        assert settings.kv_from is not None and settings.qk_norm in (None, "head") and settings.qkv_clip is None
        matrix, of_q, uploaded = self._products("attention", q, biases=[bias]), self._rms(q_norm), sinks
        rotation = None if settings.rope is None else self._rotations[settings.rope]
        keys, values = self.cache(settings.kv_from)
        sink_scores = self._optional_vector(uploaded)

        def run(step: Step) -> None:
            products = matrix(step.normalised(norm, matrix.for_codes)).view(len(step.x), settings.n_heads, -1)
            heads = _normalised_heads(of_q, products, False)
            if rotation is not None:
                heads = gpu.rotate(heads.contiguous(), step.positions, *rotation)
            for_codes = layer in self._attended_for_codes
            attended = (keys, values), step.contexts, settings, sink_scores, for_codes, self._arrived
            step.attended = gpu.attention(heads, *attended)

        self._add(layer, "attention", run)

    def latent_attention(
        self,
        layer: int,
        norm: GpuNorm | None,
        q_latent: StoredMatrix | None,
        q_norm: Float32 | None,
        q: StoredMatrix,
        kv: StoredMatrix,
        kv_norm: Float32,
        k_b: RawTensor,
    ) -> None:
        """The same, of `LatentAttentionConfig`: attended = each head's sum of latents, [heads, T, latents].

        Arguments as of `CpuExecutor.latent_attention`.
        """
        attention = self._config.layers[layer].attention
        assert isinstance(attention, LatentAttentionConfig)
        weights = [None if one is None else self._vector(one) for one in (q_norm, kv_norm)]
        of_q, of_kv = (None if one is None else GpuNorm(one, None, attention.norm_eps, False) for one in weights)
        assert of_kv is not None
        first = self._upload("attention", q if q_latent is None else q_latent, kv)
        second = None if q_latent is None else self._upload("attention", q)
        (cache,) = self._cache[layer]
        still = import_torch().zeros(attention.rope_dim // 2, device=self.device), 1.0  # angles of nothing that turns
        rotation = still if attention.rope is None else self._rotations[attention.rope]
        inputs = first, second, of_q, of_kv, self._upload_heads(k_b), rotation, cache
        self._add(layer, "attention", LatentInput(attention, norm, *inputs))

    def latent_project(self, layer: int, v_b: RawTensor, matrix: StoredMatrix, norm: GpuNorm | None = None) -> None:
        """x += norm(matrix . each head's v_b . attended)."""
        heads, out = self._upload_heads(v_b), self._upload("attention", matrix)
        self._add(layer, "project", LatentOutput(heads, out, norm))

    def gate_attended(self, layer: int, norm: GpuNorm | None, matrix: GpuMatrix) -> None:
        """attended *= sigmoid(matrix . norm(x)); or, with a row for each head, each head's part *= its softplus."""
        from torch.nn.functional import softplus

        gate, attention = self._products("attention", matrix), self._config.layers[layer].attention
        by_head = isinstance(attention, GatedAttentionConfig) and attention.by_head

        def run(step: Step) -> None:
            assert step.attended is not None
            values = gate(step.normalised(norm, gate.for_codes))
            if by_head:
                step.attended.unflatten(-1, (attention.n_heads, -1)).mul_(softplus(values)[..., None])
            else:
                step.attended.mul_(values.sigmoid_())

        self._add(layer, "gate", run)

    def delta_net(
        self,
        layer: int,
        norm: GpuNorm | None,
        matrices: Sequence[StoredMatrix],
        *,
        further: Sequence[StoredMatrix] = (),
        taps: Float32,
        decay: Float32,
        dt_bias: Float32,
        out_norm: Float32,
    ) -> None:
        """Wire as `CpuExecutor.delta_net` does."""
        settings = self._config.layers[layer].attention
        assert isinstance(settings, DeltaNetConfig)
        products, states = self._upload("attention", *matrices), self._states[layer]
        vectors = self._vector(taps), self._vector(decay), self._vector(dt_bias), self._vector(out_norm)
        net = gpu_delta.DeltaNet(settings, *vectors, self._config.norm_eps)
        seconds = [self._upload("attention", matrix) for matrix in further]

        def multiplied(step: Step) -> Tensor:
            rows = products(step.normalised(norm, products.for_codes))
            if not isinstance(settings, ChannelDeltaConfig):
                return rows
            sizes = [settings.channels, settings.rank, settings.n_value_heads, settings.rank]
            inputs, of_gate, beta, of_alpha = rows.split(sizes, dim=1)
            gate, alpha = (second(part) for second, part in zip(seconds, (of_gate, of_alpha), strict=True))
            return import_torch().cat((inputs, gate, beta, alpha), dim=1)

        def run(step: Step) -> None:
            assert step.runs is not None
            of_layer = multiplied(step)
            self._replay_and_keep(gpu_delta.replay, net, of_layer, states, step)
            step.attended = gpu_delta.delta_net(net, of_layer, states, step.runs, step.rows)

        self._add(layer, "delta_net", run)

    def mamba(
        self,
        layer: int,
        norm: GpuNorm | None,
        matrices: Sequence[StoredMatrix],
        *,
        biases: Sequence[Float32 | None],
        taps: Float32,
        taps_bias: Float32 | None,
        of_heads: Sequence[Float32],
        out_norm: Float32 | None,
    ) -> None:
        """Wire as `CpuExecutor.mamba` does."""
        settings = self._config.states[layer]
        assert isinstance(settings, Mamba2Config)
        beside = isinstance(self._config.layers[layer].attention, ParallelConfig)
        products, states = self._upload("attention", *matrices, biases=biases), self._states[layer]
        bias = self._vector(np.zeros(settings.channels, np.float32) if taps_bias is None else taps_bias)
        a, d, step_bias = map(self._vector, of_heads)
        vectors = a, d, step_bias, self._optional_vector(out_norm), self._config.norm_eps
        net = gpu_mamba.Mamba(settings, self._vector(taps), bias, *vectors)

        def run(step: Step) -> None:
            assert step.runs is not None
            of_layer = products(step.normalised(norm, products.for_codes))
            self._replay_and_keep(gpu_mamba.replay, net, of_layer, states, step)
            of_step = of_layer, states, step.runs, step.rows
            if beside:
                step.beside = gpu_mamba.mamba(net, *of_step)
            else:
                step.attended = gpu_mamba.mamba(net, *of_step)

        self._add(layer, "mamba", run)

    def short_conv(
        self,
        layer: int,
        norm: GpuNorm | None,
        matrices: Sequence[StoredMatrix],
        *,
        biases: Sequence[Float32 | None],
        taps: Float32,
        taps_bias: Float32 | None,
    ) -> None:
        """Wire as `CpuExecutor.short_conv` does."""
        settings = self._config.layers[layer].attention
        assert isinstance(settings, ShortConvConfig)
        products, states = self._upload("attention", *matrices, biases=biases), self._states[layer]
        net = gpu_short_conv.ShortConv(settings, self._vector(taps), self._optional_vector(taps_bias))

        def run(step: Step) -> None:
            assert step.runs is not None
            of_layer = products(step.normalised(norm, products.for_codes))
            self._replay_and_keep(gpu_short_conv.replay, net, of_layer, states, step)
            step.attended = gpu_short_conv.short_conv(net, of_layer, states, step.runs, step.rows)

        self._add(layer, "short_conv", run)

    def _replay_and_keep(
        self, replay: Callable[..., None], net: Any, products: Tensor, states: States, step: Step
    ) -> None:
        """Replay what the step replays, and keep the inputs of its tokens, if they may be undone."""
        if step.replay is not None:
            replay(net, states, step.replay)
        if step.input_places is not None:
            gpu_states.keep_inputs(net.about, products, states, step.input_places)

    def project(
        self,
        layer: int,
        matrix: GpuMatrix,
        bias: Float32 | None = None,
        norm: GpuNorm | None = None,
        order: Indices | None = None,
        reads: GpuNorm | None = None,
    ) -> None:
        """x += norm(matrix . attended). order: that of the matrix's columns, None: as they are; reads: norm of what is
        attended, in their order."""
        out, columns = self._products("attention", matrix, biases=[bias]), self._order(order)
        gated = isinstance(self._config.layers[layer].attention, GatedAttentionConfig)
        if out.for_codes and not gated and order is None and reads is None:
            self._attended_for_codes.add(layer)  # a gate writes to it

        def run(step: Step) -> None:
            assert step.attended is not None
            attended = step.attended if columns is None else step.attended.index_select(1, columns)
            attended = attended if reads is None else reads(attended, for_codes=out.for_codes)
            step.add_product(out, attended, norm)
            step.attended = None

        self._add(layer, "project", run)

    def project_beside(
        self, layer: int, matrix: GpuMatrix, bias: Float32 | None = None, norm: GpuNorm | None = None
    ) -> None:
        """The same of what Mamba2 beside attention gives."""
        out = self._products("attention", matrix, biases=[bias])

        def run(step: Step) -> None:
            assert step.beside is not None
            step.add_product(out, step.beside, norm)
            step.beside = None

        self._add(layer, "project", run)

    def ffn(
        self,
        layer: int,
        norm: GpuNorm | None,
        gate: GpuMatrix | None,
        up: GpuMatrix,
        down: GpuMatrix,
        vectors: FfnVectors = NO_VECTORS,
        out_norm: GpuNorm | None = None,
    ) -> None:
        """x += out_norm(down . (act(gate . n) * (up . n))) with n = norm(x), or down . act(up . n) without a gate."""
        inputs = [up] if gate is None else [gate, up]
        first = self._products("ffn", *inputs, biases=(vectors.gate_bias, vectors.up_bias)[2 - len(inputs) :])
        second = self._products("ffn", down, biases=[vectors.down_bias])
        limits, product_limits = self._optional_vector(vectors.limits), self._optional_vector(vectors.product_limits)
        config = self._config.layers[layer].ffn
        assert isinstance(config, FfnConfig), config.title
        neurons, plain = up.rows, gate is None  # not the matrices themselves
        inner = None
        if vectors.inner_norm is not None:
            inner = GpuNorm(self._vector(vectors.inner_norm), None, self._config.norm_eps, False)
        for_codes = second.for_codes and inner is None
        limit = config.limit if limits is None else limits
        top = int(config.threshold) if config.activation == "topk" else 0

        activation = SMOOTH.get(config.activation, config.activation)

        def run(step: Step) -> None:
            product = first(step.normalised(norm, first.for_codes))
            if plain:
                hidden = gpu.activate(activation, product, None, limit, top, None, for_codes)
            else:
                halves = product[:, :neurons], product[:, neurons:]
                if config.activation == GAUSSIAN:
                    halves = gpu.exceeding(halves[0], config.threshold), halves[1]
                hidden = gpu.activate(activation, *halves, limit, top, product_limits, for_codes)
                del halves
            del product  # its memory is what the next products take
            if inner is not None:
                hidden = inner(hidden, for_codes=second.for_codes)
            step.add_product(second, hidden, out_norm)

        self._add(layer, "ffn", run)

    def split_ffn(
        self,
        layer: int,
        norm: GpuNorm | None,
        parts: FfnParts,
        bias: Float32 | None = None,
        out_norm: GpuNorm | None = None,
    ) -> None:
        """x += out_norm(sum of the parts, given norm(x), + bias of down)."""
        gpu_layer, of_down = self._layers[layer], self._optional_vector(bias)
        after = []
        if of_down is not None:
            after.append(gpu_layer.operator("bias", lambda step: step.add_part(of_down)))
        if self.buffers.totals:  # of all layers, though only some may normalise them
            after.append(gpu_layer.operator("normalise", lambda step: step.add(_normalised(out_norm, step.target))))
        read = gpu_layer.operator("norm", lambda step: step.write_read(norm, parts.sent(step)))
        gpu_layer.add_parts(read, parts, after)
        self._rewired()

    def add_layer_input(
        self, layer: int, gate: GpuMatrix, out: GpuMatrix, norm: GpuNorm | None, activation: str
    ) -> None:
        """x += norm(out . (activation(gate . x) * what the layer gets of the token))."""
        first, second = self._products("attention", gate), self._products("attention", out)
        numbers = self._config.layer_inputs
        at = (layer - self._first) * numbers
        columns = slice(at, at + numbers)

        def run(step: Step) -> None:
            assert step.inputs is not None
            hidden = gpu.activate(activation, first(step.x), step.inputs[:, columns], 0.0, for_codes=second.for_codes)
            if self.streams is None:
                step.add_product(second, hidden, norm)
            else:
                self.streams.add(_normalised(norm, second(hidden)))

        self._add(layer, "layer input", run)

    def expand_streams(self, matrices: RawTensor) -> None:
        """Wire as `CpuExecutor.expand_streams` does."""
        altup = self._config.altup
        assert altup is not None
        products = self._upload("attention", *(self.matrix(matrices.matrix(one)) for one in range(altup.streams - 1)))
        streams = self.take_streams()
        self._add(0, "streams", lambda step: streams.expand(step.x, products(step.x)))

    def take_streams(self) -> GpuStreams:
        """Have several residual streams, which these layers make, or the GPU that has those before them."""
        assert self._config.altup is not None
        self.streams = GpuStreams(self._config.altup, self.max_tokens, self.d_model, self.device)
        return self.streams

    def predict_streams(self, layer: int, mix: StreamMix) -> None:
        """Wire as `CpuExecutor.predict_streams` does."""
        assert self.streams is not None
        streams, parts = self.streams, (mix.norm, self._vector(mix.router), self._vector(mix.weights))
        self._add(layer, "streams", lambda step: step.set(streams.predict(len(step.x), *parts)))

    def add_laurel(self, layer: int, norm: GpuNorm, inner: GpuMatrix, outer: GpuMatrix, out_norm: GpuNorm) -> None:
        """x += norm(x) + out_norm(outer . inner . norm(x))."""
        first, second = self._products("attention", inner), self._products("attention", outer)

        def run(step: Step) -> None:
            read = step.normalised(norm, first.for_codes)
            step.add(read + out_norm(second(first(read))))

        self._add(layer, "laurel", run)

    def correct_streams(self, layer: int, mix: StreamMix, scale: Float32 | None) -> None:
        """Wire as `CpuExecutor.correct_streams` does."""
        assert self.streams is not None
        streams, parts = self.streams, (mix.norm, self._vector(mix.router), self._vector(mix.weights))
        factors = self._optional_vector(scale)
        self._add(layer, "streams", lambda step: step.set(streams.correct(step.x, *parts, factors)))

    def merge_streams(self, matrices: RawTensor) -> None:
        """Wire as `CpuExecutor.merge_streams` does."""
        assert self.streams is not None
        streams = self.streams
        products = [self._upload("attention", self.matrix(matrices.matrix(one))) for one in range(streams.n - 1)]
        self._add(self.layers - 1, "streams", lambda step: step.set(streams.merge(len(step.x), products)))

    def normalise(self, layer: int, norm: GpuNorm) -> None:
        """x = norm(x)."""
        self._add(layer, "normalise", lambda step: step.set(norm(step.x)))

    def head(
        self,
        norm: GpuNorm | None,
        matrix: StoredMatrix,
        projection: StoredMatrix | None = None,
        bias: Float32 | None = None,
    ) -> None:
        """logits = the config's scale * (matrix . projection . norm(x) + bias), capped as it says."""
        out = self._upload("head", matrix)
        inner = None if projection is None else self._upload("head", projection)
        scale, cap, added = self._config.logit_scale, self._config.logit_cap, self._optional_vector(bias)
        self._end(norm, OutputMatrix(out, inner, added, scale, cap, (inner or out).for_codes))

    def _end(self, norm: GpuNorm | None, output: OutputMatrix) -> None:
        """A step ends in logits of norm(x)."""

        def run(step: Step) -> None:
            if not len(step.logit_rows):
                return
            x = step.x.index_select(0, step.logit_rows)
            self.buffers.give(step, output.make(x if norm is None else norm(x, for_codes=output.for_codes)))

        self._head, self._final_norm, self._output = Operator("head", -1, run), norm, output
        self._rewired()

    def share_output(self, other: GpuLayers) -> None:
        """The draft head has the output head of these layers, which have one."""
        self._output = other._output

    def draft_input(
        self, embedding: RawTensor | None, embed_norm: GpuNorm, hidden_norm: GpuNorm, matrix: RawTensor
    ) -> None:
        """x = matrix . [embed_norm(the step's inputs), hidden_norm(x)]: the draft head begins. The CPU looks up
        embeddings, in the model's."""
        assert embedding is None
        join = self._upload("attention", self.matrix(matrix))

        def run(step: Step) -> None:
            assert step.inputs is not None
            step.set(join(import_torch().cat((embed_norm(step.inputs), hidden_norm(step.x)), dim=1)))

        self._add(self._first, "draft input", run)

    def draft_head(self, norm: GpuNorm, matrix: RawTensor | None) -> None:
        """The draft head's logits, with the output head that it shares, of its draft vocabulary."""
        assert matrix is None and self._output is not None
        output = self._output
        plain = output.bias is None and output.cap is None  # else what is not listed would have a logit
        self._listed = listed_rows(output.rows) if plain else None
        if self._listed is not None:
            self._bytes["head"] += self._listed.nbytes
            output = replace(output, rows=self._listed)
        self._end(norm, output)

    @property
    def lists(self) -> bool:
        """Whether a draft head's logits are of listed tokens alone."""
        return self._listed is not None

    def list_panels(self, panels: NDArray[np.int32]) -> NDArray[np.int32]:
        """List panels as `DraftHead` does. PowerInferError when the device fails."""
        assert self._listed is not None
        failures = gpu_failures("copying rows of the output head", "lower --vram")
        with failures, current(self.device), import_torch().inference_mode():
            return self._listed.list_panels(panels)

    def count(self, part: str, nbytes: int) -> None:
        """Count bytes on the device, of an FFN of parts, as a part of `memory`."""
        self._bytes[part] += nbytes

    @property
    def has_head(self) -> bool:
        """Whether a step ends in logits."""
        return self._head is not None

    @property
    def place(self) -> str:
        """The name of the device."""
        return str(self.device)

    @property
    def cards(self) -> tuple[GpuLayers, ...]:
        """The devices that have layers, each as its own: this one."""
        return (self,)

    def exchange_with(self, helper: GpuLayers, number: int) -> None:
        """Let another GPU, of that number, compute some experts of these layers, before these are wired. Where both
        cannot exchange in recordings, nothing of these layers is recorded."""
        link = CardLink(self.device, helper.device, self.max_tokens, self._config, number, helper.share)
        self.card_links.append(link)
        helper._helped.append(link)
        self._recorder = self._recorder if link.records else None

    def _add(self, layer: int, kind: str, run: Callable[[Step], None]) -> None:
        self._layers[layer].add(kind, run)
        self._rewired()

    @property
    def operators(self) -> list[Operator]:
        """All that a step runs, in order."""
        if self._operators is None:
            layers = self._layers[self._first : self.layers]
            self._operators = [operator for layer in layers for operator in layer.operators()]
            self._operators += [] if self._head is None else [self._head]
        return self._operators

    @property
    def shares(self) -> bool:
        """Whether the CPU has a part in steps of few tokens."""
        if self._shares is None:  # asked in every step
            self._shares = not all(one.static for one in self.operators)
        return self._shares

    def _rewired(self) -> None:
        self._operators = self._recordings = self._shares = None

    def changed(self, layer: int) -> None:
        """A layer's FFN parts have other neurons, or run another way: record their launches again."""
        self.drop_next()
        before, self._operators, self._shares = self._operators, None, None
        if self._recordings is not None and self.operators == before:
            self._recordings.forget(layer)
        else:
            self._recordings = None

    @contextmanager
    def noted(self, trace: Trace) -> Iterator[None]:
        """Trace static operators within this context, as they are replayed or one by one; the others add their own
        spans. What is replayed is recorded anew, within the context and after it."""
        self.drop_next()
        self.trace, self._recordings = trace, None
        try:
            yield
        finally:
            self.trace = self._recordings = None

    # ---------------------------------------------------------------- running

    def run(
        self, batch: Batch, x: Float32 | PassedRows, slots: Slots | None = None, inputs: Float32 | None = None
    ) -> NDArray[Any]:
        """x float32 [T, d_model] after the embedding, or the layers of another GPU -> x after these layers, or what
        `Executor.forward` returns.

        slots: of the sequences' states; None: each row of the page table has one of its own; inputs: float32
        [T, layers * numbers] that the layers get of tokens, None: zeros, where they get any.

        The batch must have been checked, as the CPU's program does when it embeds: pages within the cache, positions
        within the page table. The result is a view that stays valid until the next call. PowerInferError when the
        device fails or runs out of memory; further steps can then be run. One that runs out of the memory that its
        share allows is run again without that limit: what torch keeps may be in pieces that it cannot use. So is, once,
        one in which the device was not answered in time, of layers without states.
        """
        run = partial(self._run, self._download, batch, x, slots, inputs)
        result = self._run_again(run)
        self.end_step(len(batch.tokens))
        return result

    def end_step(self, tokens: int) -> None:
        """Tell the observer, if there is one, that a step of so many tokens has ended, and its result is there."""
        if self.observer is not None:
            with gpu_failures("exchanging experts", "give less --vram"), current(self.device):
                self.observer.end(tokens)

    def pass_on(
        self, batch: Batch, x: Float32 | PassedRows, slots: Slots | None = None, inputs: Float32 | None = None
    ) -> PassedRows:
        """x after these layers for another GPU that has those behind them: nothing is waited for. Arguments and errors
        as of `run`. What fails later is raised by `check_passed`, once the result of the other GPU is there; behind
        that comes `end_step`."""
        return self._run_again(partial(self._run, self._pass_on, batch, x, slots, inputs))

    def _pass_on(self, step: Step) -> PassedRows:
        streams = () if self.streams is None else self.streams.passed(len(step.x))
        return self.buffers.pass_on(step, streams)

    def check_passed(self) -> None:
        """PowerInferError if a part of the CPU failed in a step that was passed on."""
        if self.link is not None:
            self.link.check()
        for link in self.card_links:
            link.check()

    def _run_again(self, run: Callable[[], R]) -> R:
        """Run, and again where that may help."""
        late = False
        while True:
            try:
                return run()
            except LateAnswerError:
                if late or self._states:
                    raise
                late = True
            except GpuMemoryError:
                shares = self.share, *(link.share for link in self.card_links)
                if not (self.prompts.give_way() or any([share.lift() for share in shares])):
                    raise

    def launch_ahead(self, embedding: Embedding) -> str | None:
        """Launch steps ahead of their tokens, where a batch has a successor, and the step is one recording; of layers
        that have the head. The reason why this device cannot, by a trial; None: it does."""
        assert self.has_head and not self._first
        try:
            next_step = NextStep(self._streams, embedding, self.buffers, self.link)
        except RuntimeError as error:
            return str(error)
        with current(self.device):
            reason = next_step.trial(self.device)
        if reason is None:
            self.next_step = next_step
            self.buffers.pair()
        return reason

    def awaits(self, batch: Batch) -> bool:
        """Whether the step of a batch was launched ahead, so that `collect` has its result."""
        return self.next_step is not None and self.next_step.batch is batch

    @property
    def launched_ahead(self) -> bool:
        """Whether a step was launched ahead: until `drop_next` the CPU's part of the model may be computing."""
        return self.next_step is not None and self.next_step.batch is not None

    def collect(self, batch: Batch) -> NDArray[Any]:
        """The result of a step that was launched ahead. Errors as of `run`; LateAnswerError where that may be run, in
        its place."""
        next_step = self.next_step
        assert next_step is not None
        try:
            with next_step.context:
                next_step.answer_calls()
                if next_step.go_on(batch):
                    self._count(len(batch.tokens))
                batch.overlap()
                result = self._download(next_step.step)
        except BaseException as error:
            self._break_off(error, len(batch.tokens))
            raise
        self._latest_logits = None
        if next_step.step.needs == LogitsNeed.CANDIDATES:
            batch.logits = partial(self._logits_of, next_step.step)
        return result

    def _launch_next(self, batch: Batch, step: Step, recordings: Recordings | None) -> None:
        """Launch the step behind that of a batch, which is under way, where all but its tokens is known."""
        next_step = self.next_step
        if next_step is None or batch.successor is None or recordings is None or self.trace is not None:
            return
        if step.needs == LogitsNeed.LOGITS or self.observer is not None:
            return
        run = recordings.whole_run(step)
        if run is not None and next_step.start(batch, step, run):
            self._count(len(batch.tokens))

    def drop_next(self) -> None:
        """End a step that was launched ahead, and whose result nobody wants."""
        if self.next_step is None:
            return
        if self.next_step.batch is not None:
            self.next_step.batch = None
            with current(self.device), self._finished_after_failure():
                self.next_step.answer_calls()
                self.buffers.wait()
        self.next_step.forget()

    @property
    def launched_afterwards(self) -> str:
        """The reason why no step is launched ahead of its tokens where the device could; empty: there is none."""
        if self.observer is not None:
            return "experts are exchanged between steps"
        waits = self.way == "waits"
        if not all(one.static or (one.called is not None and not waits) for one in self.operators):
            return "the host waits for the GPU within a step"
        return ""

    def _count(self, tokens: int) -> None:
        if tokens <= cpu.NEURON_TOKENS:
            self.few_tokens += tokens
            self.few_steps += 1

    def _download(self, step: Step) -> NDArray[Any]:
        if self.next_step is not None and self.next_step.batch is not None:
            return self.next_step.tokens()
        result = self.buffers.download(step, logits=self.has_head)
        self.check_passed()
        return result

    def _run(
        self,
        end: Callable[[Step], R],
        batch: Batch,
        x: Float32 | PassedRows,
        slots: Slots | None,
        inputs: Float32 | None,
    ) -> R:
        try:
            with current(self.device):
                self.drop_next()
                padded = self.prompts.padded(len(batch.tokens))
                step = self._begin(batch, x, slots, inputs, padded)
                recordings = None
                if self._recorder is not None and len(batch.tokens) <= gpu.FEW:
                    recordings = self._recorded(self._recorder)
                elif padded and self._recorder is not None and self.trace is None:
                    recordings = self.prompts.recordings(self.operators, self.buffers.addresses)
                if recordings is None or not recordings.static:  # the host acts in the step
                    batch.overlap()
                with import_torch().inference_mode():
                    if recordings is None:
                        self._launch(step, self.operators, batch)
                    else:
                        recordings.run(step)
                self._launch_next(batch, step, None if padded else recordings)
                batch.overlap()
                result = end(step)
        except BaseException as error:
            self._break_off(error, len(batch.tokens))
            raise
        self._latest_logits = None
        if step.needs == LogitsNeed.CANDIDATES:
            batch.logits = partial(self._logits_of, step)
        self._count(len(batch.tokens))
        return result

    def _break_off(self, error: BaseException, tokens: int) -> None:
        """Wait for what is under way of a step of so many tokens, which failed with that error; PowerInferError where
        it is the device's. In place of contexts, which every step would enter."""
        failures = gpu_failures(f"computing {tokens} tokens", "lower --prefill-chunk, --max-batch or --vram")
        with failures, current(self.device), self._finished_after_failure():
            raise error

    @contextmanager
    def _finished_after_failure(self) -> Iterator[None]:
        """Wait where a step is broken off: the device may still read what the next one writes, and call the CPU."""
        try:
            yield
        except BaseException:
            self.break_off()
            raise

    def break_off(self) -> None:
        """A step is broken off: wait for what the device was given of it, and let the observer forget it."""
        self.finish()
        if self.observer is not None:
            self.observer.forget()

    def finish(self) -> None:
        """Wait for all that the device was given, be it that it fails; it waits for the CPU no more."""
        if self.link is not None:
            self.link.release()
        if self.next_step is not None:
            self.next_step.release()
        with suppress(RuntimeError):  # again and again: the owner may still write lower numbers
            while not all([link.release() for link in self.card_links]):
                pass
        for link in self.card_links:
            link.finish()
        with suppress(RuntimeError):
            self._streams.finish()

    def _launch(self, step: Step, operators: Sequence[Operator], batch: Batch) -> None:
        for operator in operators:
            if batch.stop is not None and batch.stop[0]:
                raise StoppedError
            with span(self.trace if operator.static else None, "gpu", operator.kind, operator.layer):
                operator.run(step)

    def streamed(self, layer: int) -> Sequence[Operator]:
        """The operators of a layer that is not one of the first."""
        assert layer >= self.layers
        return self._layers[layer].operators()

    def latest(self, layer: int) -> Operator:
        """The operator that such a layer got last, if it is not of its FFN of parts."""
        operator = self._layers[layer].latest
        assert layer >= self.layers and operator is not None
        return operator

    def streamed_ffn(self, layer: int) -> Sequence[Operator]:
        """Operators of the FFN of parts of such a layer."""
        assert layer >= self.layers
        return self._layers[layer].ffn_operators()

    def run_streamed(self, batch: Batch, x: Float32, operators: Sequence[Operator]) -> Float32:
        """x float32 [T, d_model] after these operators, of layers whose matrices stream; else as `run`, but once."""
        assert not self.has_head
        failures = gpu_failures(f"computing {len(batch.tokens)} tokens", "lower --prefill-chunk, --max-batch or --vram")
        try:
            with failures, current(self.device), self._finished_after_failure():
                step = self._begin(batch, x, None)
                with import_torch().inference_mode():
                    self._launch(step, operators, batch)
                return self.buffers.download(step, logits=False)
        except GpuMemoryError:
            self.share.lift()  # the next one has what there is
            raise

    def hidden_states(self, rows: NDArray[np.int32]) -> Float32:
        """Return as `Executor.hidden_states` does; of layers that have the head. PowerInferError when the device
        fails."""
        assert self.has_head
        torch = import_torch()
        failures = gpu_failures(f"normalising {len(rows)} tokens", "lower --prefill-chunk or --vram")
        with failures, current(self.device), torch.inference_mode():
            x = self.buffers.residual(torch.from_numpy(rows).to(self.device))
            values: Float32 = _normalised(self._final_norm, x).cpu().numpy()
        return values

    def _logits_of(self, step: Step) -> Float32:
        """Logits of the last step, float32 [R, vocab_size], which brought candidates alone: the head computes them
        again, the same bits. PowerInferError when the device fails."""
        if self._latest_logits is None:
            assert self._head is not None
            self.drop_next()  # it is void
            again = replace(step, needs=LogitsNeed.LOGITS)
            failures = gpu_failures("computing the logits of a step again", "lower --max-batch or --vram")
            with failures, current(self.device), self._finished_after_failure(), import_torch().inference_mode():
                if self.next_step is not None and self.next_step.restorable:
                    self.buffers.restore(again)
                self._head.run(again)
                self._latest_logits = self.buffers.download(again, logits=True)
        return self._latest_logits

    def logits(self, hidden: Float32, needs: LogitsNeed = LogitsNeed.LOGITS) -> NDArray[Any]:
        """Logits, float32 [R, vocab_size], in memory of their own, of hidden states [R, d_model] as of `hidden_states`;
        or `CANDIDATES` at temperature 1. Of layers that have the head. PowerInferError when the device fails."""
        assert self._output is not None
        torch = import_torch()
        if not len(hidden):
            return np.empty((0, self.vocab_size), np.float32)
        failures = gpu_failures(f"computing the logits of {len(hidden)} drafts", "lower --max-batch or --vram")
        with failures, current(self.device), torch.inference_mode():
            logits = self._output.make(torch.from_numpy(hidden).to(self.device))
            if needs == LogitsNeed.CANDIDATES:
                return self.buffers.candidates(logits)
            values: Float32 = logits.cpu().numpy()
        return values

    def _begin(
        self,
        batch: Batch,
        x: Float32 | PassedRows,
        slots: Slots | None,
        inputs: Float32 | None = None,
        padded: int = 0,
    ) -> Step:
        """Upload a step. padded: as of `StepBuffers.upload`."""
        if not self._states:
            slots = None
        elif slots is None:
            numbers = np.arange(len(batch.page_table), dtype=np.int32)
            slots = numbers, numbers
        of_layers = None if inputs is None else inputs[:, self._inputs_here]
        step = self.buffers.upload(batch, x, slots, of_layers, padded)
        if self.streams is not None and isinstance(x, PassedRows):
            self.streams.take(x.streams)
        if self.link is not None:
            step.read = self.link.read(padded or len(batch.tokens))
            self.link.begin_step()
        for link in self.card_links:
            link.begin_step()
        if self.next_step is not None:
            self.next_step.begin()
        if self.has_head:
            step.needs = batch.needs
            self.buffers.make_room(len(batch.logit_rows))  # may reallocate, so before the step is recorded
        return step

    @property
    def records(self) -> bool:
        """Whether steps of few tokens are recorded."""
        return self._recorder is not None

    @property
    def caller(self) -> Choice[str] | None:
        """The choice of who acts in steps of few tokens in which the CPU has a part. None: it has none, or nothing is
        recorded."""
        if self._recorder is None or not self.shares:
            return None
        return Choice(_CALLERS[self.way], "; ".join(filter(None, (self._way_reason, self._no_way))), self._way_origin)

    @property
    def way(self) -> Way:
        """The way in which both devices exchange in steps that are recorded."""
        called = self._recorder is not None and any(one.called for one in self.operators)
        return self._way if called else "waits"

    def step_seconds(self, way: Way, steps: int) -> float:
        """Seconds of a step of one token, the median of so many that are replayed. way: until the next time. The cache
        must be empty. PowerInferError when the device fails."""
        self.drop_next()
        self._way, self._recordings = way, None
        times, rng = [], np.random.default_rng(0)
        for _ in range(UNRECORDED + steps):
            x = rng.standard_normal((1, self.d_model), np.float32)  # of zeros predictors select every neuron
            begin = time.perf_counter()
            self._rehearse(1, 1, x=x)
            times.append(time.perf_counter() - begin)
        return median(times[UNRECORDED:])

    def exchange(self, way: Way, reason: str, origin: str = "") -> None:
        """Exchange in one of `ways` from now on, or in one behind it. origin: of the reason, for people, with what
        separates it."""
        self.drop_next()
        self.ways = self.ways[self.ways.index(way) :]
        self._way, self._recordings, self._way_reason, self._way_origin = way, None, reason, origin

    def record(self, recorder: Recorder | None, way: Way = WAYS[0]) -> None:
        """Record steps of few tokens with `recorder` and replay them; None: launch every time. way: in which both
        devices exchange, or the next one that they can."""
        self.drop_next()
        self._recorder, self._recordings = recorder, None
        if not all(link.records for link in self.card_links):
            self._recorder = None
        self.prompts.use(recorder if self.prompts.sizes else None)
        self._way = next(one for one in self.ways if WAYS.index(one) >= WAYS.index(way))

    @property
    def prompts_problem(self) -> str | None:
        """The reason why chunks of prompts cannot be padded, and so not recorded; None: they can."""
        if self.shares or not self.has_head or self._first:
            return "a part of the model is elsewhere"
        if self._states:
            return "layers have states"
        return None if self.streams is None and not self.buffers.inputs else "layers get inputs of their own"

    def pad_prompts(self, sizes: Sequence[int]) -> None:
        """Pad chunks of up to sizes[-1] tokens, more than FEW, to one of these numbers, ascending; (): none. They are
        launched until `record_prompts`."""
        assert not sizes or (self.prompts_problem is None and sizes[0] > gpu.FEW and sizes[-1] <= self.max_tokens)
        self.prompts.give_way()
        self.prompts.sizes = tuple(sizes)

    def record_prompts(self, room: int | None = None) -> bool:
        """Record and replay such chunks where that takes at most so many bytes, None: what is free; whether it does.
        The cache must be empty. PowerInferError when the device fails."""
        largest, recorder = self.prompts.sizes[-1], recorder_of(self.device) or self._recorder
        self.prompts.give_way()
        self._rehearse(largest, 1)  # what a launched one takes is there
        if self._cuda:  # recording frees what torch keeps, and that would count against what it takes
            import_torch().cuda.empty_cache()
        before = self._memory_taken()
        self.prompts.use(recorder)
        for _ in range(UNRECORDED):
            self._rehearse(largest, 1)
        after = self._memory_taken()
        passed, per_shape = (max(0, now - then) for now, then in zip(after, before, strict=True))
        left = PROMPTS_BYTES if room is None else min(PROMPTS_BYTES, room - passed)
        shapes = min(MOST_SHAPES, left // per_shape) if per_shape else MOST_SHAPES * (left >= 0)
        if not self.prompts.records or shapes < 1:  # it gave way where the device ran out of memory
            self.prompts.give_way()
            return False
        self.prompts.use(recorder, shapes, shapes * per_shape, passed)
        return True

    def prompt_seconds(self, tokens: int, steps: int) -> float:
        """Seconds of a chunk of so many tokens, the median of so many that are as all that follow. The cache must be
        empty. PowerInferError when the device fails."""
        times, rng = [], np.random.default_rng(0)
        for _ in range(UNRECORDED + steps):
            x = rng.standard_normal((tokens, self.d_model), np.float32)  # of zeros all select the same experts
            begin = time.perf_counter()
            self._rehearse(tokens, 1, x=x)
            times.append(time.perf_counter() - begin)
        return median(times[UNRECORDED:])

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Steps within this context are launched one operator after another, by the host."""
        before, self._recorder = self._recorder, None
        try:
            yield
        finally:
            self._recorder = before

    def _recorded(self, recorder: Recorder) -> Recordings:
        operators = self.operators
        if self._recordings is None or self._recorded_at != self.buffers.addresses:
            way = self.way if self.trace is None else "waits"
            if self.trace is not None:
                spans = ReplayedSpans(recorder, self.trace)
                operators, recorder = spans.marked(operators), spans.record
            elif way != "waits":
                operators = [operator.as_called() for operator in operators]
            for link in self.card_links:
                recorder = link.recording(recorder)
            if way == "flags":
                assert self.link is not None and self.link.flags is not None
                recorder = self.link.flags.answering(recorder)
            self.buffers.sleep(way == "calls")  # the driver's thread that makes the calls needs a core
            self._recordings = Recordings(operators, recorder, self._shapes)
            self._recorded_at = self.buffers.addresses
        return self._recordings

    def memory(self) -> dict[str, int]:
        """Bytes on the device by part: attention, norms (with all biases), head, kv, ffn, scratch, allocator.

        scratch: buffers that are kept from step to step and, once steps were rehearsed, the operators' temporaries and
        the maximum of recordings; allocator: CUDA memory that torch holds, or held in the largest step, beside all
        tensors, these and others', and beside the temporaries.
        """
        parts = {part: self._bytes[part] for part in ("attention", "norms", "head", "kv", "ffn")}
        parts["ffn"] += sum(link.expert_bytes for link in self._helped)
        link = sum(one.gpu_bytes for one in (self.link, self.observer) if one is not None)
        streams = 0 if self.streams is None else self.streams.nbytes
        buffers = self.buffers.nbytes + int(self._arrived.nbytes) + link + streams
        passed = self._passed + self.prompts.passed + sum(link.temporaries for link in self._helped)
        parts["scratch"] = buffers + passed + self.recorded_bytes
        if self._cuda:
            beside_tensors = max(self._most_held, held_beside_tensors(self.device))
            parts["allocator"] = max(0, beside_tensors - passed)
        return parts

    @property
    def recorded_bytes(self) -> int:
        """Maximum bytes of recordings, which are the driver's, not torch's; once steps were rehearsed."""
        return self._recorded_bytes + self.prompts.nbytes + sum(link.recorded_bytes for link in self._helped)

    def record_less(self, nbytes: int) -> int:
        """Keep recordings of fewer shapes, so that their maximum is so many bytes less, or as many as `LEAST_SHAPES`
        allow; the bytes that it is less."""
        if not self._recorded_bytes:
            return 0
        of_shape, least = self._recorded_bytes // self._shapes, min(LEAST_SHAPES, self._shapes)
        shapes = max(least, self._shapes - -(-nbytes // of_shape))
        freed = (self._shapes - shapes) * of_shape
        self.drop_next()
        self._shapes = self._most_shapes = shapes
        self._recorded_bytes -= freed
        self._recordings = None
        return freed

    def rehearse(self, logit_rows: int) -> int:
        """Run steps that launch every kernel: the largest, with that number of rows of logits, those that are recorded,
        and single tokens early and late in a context. The cache must be empty.

        This compiles kernels and allocates memory, so that PowerInferError is raised now if there is too little.
        Returns the peak bytes of the operators' temporaries; 0 in emulation, where they are unknown.
        """
        torch, allocated = import_torch(), 0
        if self._cuda:
            free_workspaces()
            allocated = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        largest = min(self.max_tokens, self.n_pages * self.page_size)
        few = sorted({min(gpu.FEW, logit_rows, largest), 1}, reverse=True)
        for pages in (1 << power for power in range(1, self.n_pages.bit_length())):  # contexts are read in more splits
            self._rehearse(1, logit_rows, pages * self.page_size - 1)
        sizes = [gpu.FEW, gpu.FEW // 2, 8, 3, 2]  # columns of product tiles, and where parts of buffers begin
        if any(isinstance(layer.ffn, ExpertsConfig) for layer in self._config.layers):  # those of tokens of an expert
            sizes = [1 << power for power in reversed(range(gpu.FEW.bit_length(), largest.bit_length()))] + sizes
        for tokens in sizes:
            self._rehearse(min(tokens, largest), logit_rows)
        peak = self._rehearse_largest(largest, logit_rows)
        kinds = LogitsNeed if self.has_head else [LogitsNeed.LOGITS]
        recorded = [(tokens, needs) for tokens in few for needs in kinds]
        for tokens, needs in recorded:
            self._rehearse(tokens, logit_rows, needs=needs)
        if self._states and self._undo_tokens:
            self._rehearse(1, logit_rows, 1, replayed=1)
        if self._cuda:
            self._passed = max(peak, torch.cuda.max_memory_allocated(self.device)) - allocated
            torch.cuda.empty_cache()
        if self.observer is not None:
            self._passed += self._rehearse_observer(self.observer)
        if self._recorder is None:
            return self._passed
        before, per_shape = self._memory_taken(), 0
        for tokens, needs in recorded:  # recording takes memory of torch, for all shapes, and of the driver
            self._rehearse(tokens, logit_rows, needs=needs)
            after = self._memory_taken()
            self._passed += max(0, after[0] - before[0])
            before, per_shape = after, max(per_shape, after[1] - before[1])
        if per_shape:
            self._shapes = max(1, min(self._most_shapes, RECORDED_BYTES // per_shape))
            self._recorded_bytes = self._shapes * per_shape
            self._recordings = None
        return self._passed

    def rehearse_exchanges(self) -> None:
        """Run the largest step, and one that is recorded, and note what other GPUs take that compute some of its
        experts. The cache must be empty."""
        if not self.card_links:
            return
        with ExitStack() as noted:
            for link in self.card_links:
                noted.enter_context(link.measured())
            self._rehearse(min(self.max_tokens, self.n_pages * self.page_size), 1)
        self._rehearse(1, 1)
        before = [sum(memory_taken(link.device)) for link in self.card_links]
        self._rehearse(1, 1)
        for link, nbytes in zip(self.card_links, before, strict=True):
            link.recorded_bytes = self._shapes * max(0, sum(memory_taken(link.device)) - nbytes)
        self._recordings = None

    def _rehearse_largest(self, tokens: int, logit_rows: int) -> int:
        """Note what torch holds in the largest step, where nothing is left from others; the peak of what tensors took
        before it."""
        if not self._cuda:
            self._rehearse(tokens, logit_rows)
            return 0
        cuda = import_torch().cuda
        peak = int(cuda.max_memory_allocated(self.device))
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(self.device)
        self._rehearse(tokens, logit_rows)
        self._most_held = held_beside_tensors(self.device, most=True)
        return peak

    def _rehearse(
        self,
        tokens: int,
        logit_rows: int,
        first: int = 0,
        x: Float32 | None = None,
        replayed: int = 0,
        needs: LogitsNeed = LogitsNeed.LOGITS,
    ) -> None:
        """x: of the tokens, by default zeros; replayed: tokens before them."""
        self.rehearses = True
        try:
            self._rehearse_once(tokens, logit_rows, first, x, replayed, needs)
        finally:
            self.rehearses = False

    def _rehearse_once(
        self, tokens: int, logit_rows: int, first: int, x: Float32 | None, replayed: int, needs: LogitsNeed
    ) -> None:
        places, rows = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32)
        pages = np.arange(-(-(first + tokens) // self.page_size), dtype=np.int32)[None]
        zero = np.zeros(1, np.int32)
        batch = Batch(
            rows, first + places, rows, pages, places[:logit_rows], replayed=zero + replayed, undo_states=zero,
            needs=needs,
        )  # fmt: skip
        x = np.zeros((tokens, self.d_model), np.float32) if x is None else x
        self.run(batch, x)
        streamed = [operator for layer in range(self.layers, len(self._layers)) for operator in self.streamed(layer)]
        if tokens > gpu.FEW and streamed:
            self.run_streamed(batch, x, streamed)

    def _rehearse_observer(self, observer: StepObserver) -> int:
        """Bytes of temporaries beside steps; 0 in emulation."""
        cuda = import_torch().cuda
        if self._cuda:
            cuda.reset_peak_memory_stats(self.device)
        with gpu_failures("exchanging experts", "give less --vram"), current(self.device):
            observer.rehearse()
            self._streams.finish()
        if not self._cuda:
            return 0
        return int(cuda.max_memory_allocated(self.device)) - int(cuda.memory_allocated(self.device))

    def _memory_taken(self) -> tuple[int, int]:
        return memory_taken(self.device)

    def close(self) -> None:
        """Free all memory; the layers cannot be used afterwards."""
        try:
            if self.launched_ahead:
                self.finish()
            for link in self.card_links:
                link.close()
            for layer in self._layers:
                layer.close()
            self._layers.clear()
            self.prompts.use(None)
            self._head = self._final_norm = self._output = self._listed = self._operators = None
            self._recorder = self._recordings = self.streams = self.observer = self.next_step = None
            self.card_links, self._helped = [], []
            for name in ("_arrived", "_cache", "_passing", "_states", "buffers", "link", "_rotations"):
                self.__dict__.pop(name, None)
            if self._cuda:
                free_workspaces()  # they may lie between weights
                import_torch().cuda.empty_cache()
        finally:
            self.share.end()


def _normalised(norm: GpuNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _normalised_heads(norm: GpuNorm | None, heads: Tensor, width: bool) -> Tensor:
    """heads float32 [T, n, head_dim], each normalised by itself or, with `width`, all heads of a token together; where
    the norm has weights of all heads, but is not over their width, each has LayerNorm with its own."""
    if norm is None:
        return heads
    if not width and len(norm.weight) > heads.shape[-1]:
        of_heads = norm.weight.view(heads.shape[1:])
        return gpu.norm(heads, of_heads.new_ones(heads.shape[-1]), None, norm.eps, True) * of_heads
    return norm(heads.reshape(len(heads) if width else -1, norm.weight.shape[0])).view(heads.shape)
