"""The blocks of a decoder-only transformer, wired in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from powerinfer.config import (
    SMOOTH,
    AttentionConfig,
    ChannelDeltaConfig,
    DeltaNetConfig,
    ExpertsConfig,
    FfnConfig,
    GatedAttentionConfig,
    LatentAttentionConfig,
    Mamba2Config,
    NoAttention,
    NoFfn,
    ParallelConfig,
    ShortConvConfig,
)
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.cpu_ffn import Weights
from powerinfer.formats import layout
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.tensors import ExpertWeights, RawTensor
from powerinfer.models import altup
from powerinfer.models.attention import attend, project
from powerinfer.models.builder import Builder, Matrix, Norm, OwnFfn, Tensors, vector
from powerinfer.models.delta_net import attend_gated, project_remembered, remember, remember_channels
from powerinfer.models.experts import select_early, sum_experts
from powerinfer.models.ffn import sum_neurons
from powerinfer.models.latent_attention import attend_latents, project_latents
from powerinfer.models.mamba import add_nothing, attend_beside, project_both, project_mamba, remember_mamba
from powerinfer.models.short_conv import convolve, project_convolved
from powerinfer.neurons import FfnVectors, Indices
from powerinfer.progress import Progress

if TYPE_CHECKING:
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.gpu_layer import FfnParts
    from powerinfer.devices.gpu_weights import GpuNorm
    from powerinfer.devices.streamed import StreamedLayers
    from powerinfer.formats.bundle_file import BundleFile


class SplitFfns(Protocol):
    """Makes FFNs of layers on a GPU as sums of parts. kind: of the FFNs, those of another are dense."""

    kind: type

    def __call__(self, cpu: CpuExecutor, layers: GpuLayers, layer: int, weights: Any, /) -> FfnParts:
        """weights: of the kind's wiring (`OwnFfn`). A bias of down is added by the layer."""
        ...


class Neurons(Protocol):
    """A model's neurons as bundles, None: there are none; predictors: layer -> its predictor, None: there are none."""

    @property
    def bundles(self) -> BundleFile | None: ...
    @property
    def predictors(self) -> Callable[[int], Weights] | None: ...
    def threshold(self, layer: int) -> float:
        """The magnitude up to which activations of a layer count as zero."""
        ...


class AttentionWiring(NamedTuple):
    """Of a kind of attention: called with (device, checkpoint, layer, norm of what it reads), and, perhaps after the
    FFN, with the norm of what it adds."""

    attend: Callable[..., None]
    project: Callable[..., None]


ATTENTIONS: dict[type, AttentionWiring] = {
    AttentionConfig: AttentionWiring(attend, project),
    GatedAttentionConfig: AttentionWiring(attend_gated, project),
    DeltaNetConfig: AttentionWiring(remember, project_remembered),
    ChannelDeltaConfig: AttentionWiring(remember_channels, project_remembered),
    LatentAttentionConfig: AttentionWiring(attend_latents, project_latents),
    Mamba2Config: AttentionWiring(remember_mamba, project_mamba),
    ParallelConfig: AttentionWiring(attend_beside, project_both),
    ShortConvConfig: AttentionWiring(convolve, project_convolved),
    NoAttention: AttentionWiring(add_nothing, add_nothing),
}
"""How each kind of attention is wired, by the class of `LayerConfig.attention`."""

FFNS: dict[type, Callable[..., None]] = {FfnConfig: sum_neurons, ExpertsConfig: sum_experts, NoFfn: add_nothing}
"""How each kind of FFN is wired, by the class of `LayerConfig.ffn`: called with (device, checkpoint, layer, norm of
what it reads, norm of what it adds, who else wires it: `OwnFfn` or None)."""


BEFORE: dict[type, Callable[..., None]] = {ExpertsConfig: select_early}
"""What a kind of FFN wires before attention, called with (device, checkpoint, layer, who else wires the FFN)."""


def wire(
    executor: CpuExecutor,
    checkpoint: Checkpoint,
    progress: Progress,
    first: Sequence[GpuLayers] = (),
    *,
    neurons: Neurons | None = None,
    split: SplitFfns | None = None,
    head: bool = False,
    last: StreamedLayers | None = None,
) -> None:
    """Embedding, layers, head. Every tensor of the checkpoint is taken once.

    neurons: of the executor's FFNs if they have bundles, None: from the checkpoint's matrices. first: get the layers
    before the executor's, one after another, with FFNs made by `split` if given, and with `head` the last one the head,
    too. last: wires the executor's layers, and on a GPU too what streams there; None: the executor alone.
    """
    config = checkpoint.config
    embedding = wire_embedding(executor, checkpoint)
    ends: tuple[Any, Any] = (first[0], first[-1]) if first else (executor, executor)
    if config.altup is not None:  # all layers are on GPUs, or none is
        altup.expand(ends[0], checkpoint)
        for card in first[1:]:
            card.take_streams()
    for layer in range(config.n_layers):
        executor.keep_features(layer)
        gpu = next((card for card in first if layer < card.layers), None)
        if gpu is not None:
            of_gpu: OwnFfn[GpuNorm] | None = None
            if split is not None and isinstance(config.layers[layer].ffn, split.kind):
                of_gpu = partial(wire_split, executor, gpu, layer, split)
            wire_layer(gpu, checkpoint, layer, of_gpu)
        else:
            own: OwnFfn[Any] | None = None
            if neurons is not None and neurons.bundles is not None:
                own = partial(_bundled, last or executor, neurons, layer)
            if last is None:
                wire_layer(executor, checkpoint, layer, own)
            else:
                wire_layer(last, checkpoint, layer, own)
        checkpoint.release()  # packed: the file's pages need not stay in memory
        progress("loading weights", layer + 1, config.n_layers)
    executor.keep_features(config.n_layers)
    if config.altup is not None:
        altup.merge(ends[1], checkpoint)
    if first and head:
        wire_head(first[-1], checkpoint, embedding)
    else:
        wire_head(executor, checkpoint, embedding)


def wire_embedding(executor: CpuExecutor, checkpoint: Checkpoint) -> RawTensor:
    """The embedding, and its tensor."""
    config, embedding = checkpoint.config, checkpoint.take("embed")
    positions = checkpoint.take("positions") if config.positions == "learned" else None
    resting = checkpoint.rests_at("embed")
    place = None if resting is None else (checkpoint.files[resting[0]], resting[1])
    project = _projection(executor, checkpoint, "project_in")
    executor.embed(embedding, positions, project, config.embedding_scale, place)
    if config.layer_inputs:
        table, matrix = checkpoint.take("input_table"), executor.matrix(checkpoint.take("inputs_projection"))
        executor.layer_inputs(table, matrix, checkpoint.take("inputs_norm").float32())
    return embedding


def wire_layer(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, own: OwnFfn[Norm] | None) -> None:
    """Attention, then the FFN, with norms placed as `LayerConfig.norms` states."""
    config = checkpoint.config.layers[layer]
    if layer == 0 and checkpoint.config.embed_norm:
        builder.normalise(layer, builder.norm(np.ones(checkpoint.config.d_model, np.float32)))
    attention, ffn = ATTENTIONS[type(config.attention)], FFNS[type(config.ffn)]
    where = builder, checkpoint, layer
    of_input, of_output = config.ffn_factors
    factors = {"ffn_norm": of_input}
    attn_norm, attn_out_norm, ffn_norm, ffn_out_norm = (
        _norm(builder, checkpoint, f"layers.{layer}.{name}", factors.get(name, 1.0), _order(checkpoint, layer, name))
        for name in layout.NORMS
    )
    factor = checkpoint.config.residual_scale
    if factor != 1:
        attn_out_norm = builder.scale(factor)
    if factor * of_output != 1:
        ffn_out_norm = builder.scale(factor * of_output)
    if config.norms == "post":
        assert attn_norm is not None and ffn_norm is not None
        attention.attend(*where, None)
        attention.project(*where, None)
        builder.normalise(layer, attn_norm)
        ffn(*where, None, None, own)
        builder.normalise(layer, ffn_norm)
        return
    if type(config.ffn) in BEFORE:
        BEFORE[type(config.ffn)](*where, own)
    streams: Any = builder if checkpoint.config.altup is not None else None
    if streams is not None:
        altup.predict(streams, checkpoint, layer)
    attention.attend(*where, attn_norm)
    if streams is not None:
        altup.add_laurel(streams, checkpoint, layer, attn_norm)
    if config.parallel:  # the FFN reads x before the result of attention is added to it
        ffn(*where, attn_norm if config.shared_norm else ffn_norm, ffn_out_norm, own)
        attention.project(*where, attn_out_norm)
    else:
        attention.project(*where, attn_out_norm)
        if streams is not None:
            altup.halve(streams, layer)
        ffn(*where, ffn_norm, ffn_out_norm, own)
    if streams is not None:
        altup.correct(streams, checkpoint, layer)
    if checkpoint.config.layer_inputs:
        name = f"layers.{layer}.input_"
        gate, out = (builder.matrix(checkpoint.take(name + part)) for part in ("gate", "out"))
        activation = SMOOTH.get(config.ffn.activation, config.ffn.activation)
        builder.add_layer_input(layer, gate, out, _norm(builder, checkpoint, f"{name}norm"), activation)
    if config.out_scale:
        scale = checkpoint.take(f"layers.{layer}.out_scale").float32()
        builder.normalise(layer, builder.scale(float(scale[0])))


def wire_split(
    executor: CpuExecutor,
    gpu: GpuLayers,
    layer: int,
    split: SplitFfns,
    norm: GpuNorm | None,
    given: Any,
    out_norm: GpuNorm | None,
) -> None:
    """Wire an FFN that `split` makes (`OwnFfn`)."""
    bias = None if isinstance(given, ExpertWeights) else given.down_bias
    gpu.split_ffn(layer, norm, split(executor, gpu, layer, given), bias, out_norm)


def _bundled(
    builder: CpuExecutor | StreamedLayers,
    neurons: Neurons,
    layer: int,
    norm: Any,
    vectors: FfnVectors,
    out_norm: Any,
) -> None:
    bundles, threshold = neurons.bundles, neurons.threshold(layer)
    assert bundles is not None
    bundles.file.check()
    weights = None if neurons.predictors is None else neurons.predictors(layer)
    norms: dict[str, Any] = {"norm": norm, "out_norm": out_norm}
    rows = bundles.copied(layer)
    builder.bundled_ffn(
        layer, bundles.layouts[layer], rows, **norms, vectors=vectors, threshold=threshold, predictor=weights
    )


def wire_head(builder: Builder[Matrix, Norm], checkpoint: Tensors, embedding: RawTensor) -> None:
    config = checkpoint.config
    norm = _norm(builder, checkpoint, "final_norm")
    matrix = builder.matrix(embedding if config.tied_embeddings else checkpoint.take("head"))
    builder.head(norm, matrix, _projection(builder, checkpoint, "project_out"), vector(checkpoint, "head_bias"))


def _order(checkpoint: Tensors, layer: int, norm: str) -> Indices | None:
    """The order of the columns of what reads the result of a norm; None: as they are."""
    config = checkpoint.config.layers[layer]
    for part in layout.ordered_readers(config).get(norm, ())[:1]:  # the same of all
        return checkpoint.order(f"layers.{layer}.{part}")
    return None


def _norm(
    builder: Builder[Matrix, Norm],
    checkpoint: Tensors,
    name: str,
    factor: float = 1.0,
    order: Indices | None = None,
) -> Norm | None:
    """A norm whose result is multiplied by a factor, in that order; None if the model has no tensor of that name."""
    if not checkpoint.has(name):
        return None
    weight, bias = checkpoint.take(name).float32(), vector(checkpoint, name + "_bias")
    if factor != 1:
        weight, bias = weight * np.float32(factor), None if bias is None else bias * np.float32(factor)
    return builder.norm(weight, bias, order, checkpoint.config.out_norm_eps if name.endswith("out_norm") else None)


def _projection(builder: Builder[Matrix, Norm], checkpoint: Tensors, name: str) -> Matrix | None:
    return builder.matrix(checkpoint.take(name)) if checkpoint.config.embed_dim else None
