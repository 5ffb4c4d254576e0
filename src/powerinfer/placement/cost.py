"""The predicted time of one decode step, from bytes, rates and how often neurons fire. Pure functions over numpy.

A layer's attention runs on one device. Of its FFN, device d holds a set S_d of neurons and does, in seconds,

    T_d = fixed_d + sum over i in S_d of ( each_d + P(selected_i) selected_d + P(fired_i) fired_d + P(active_i) active_d
    )

where `each_d` is spent on every neuron, `selected_d` on those whose first row is computed, `fired_d` on those whose
first row fires, `active_d` on those whose product is not zero. By the way that a layer goes (docs/selectors.md):

    way          every neuron        selected        fired        active
    all          whole bundle        -            -            -
    exact        first row           -            up row       down row
    predicted    -                   first row    up row       down row

A dense byte costs 1 / dense_gb_s, a row of a bundle bytes / bundle_gb_s + row_ns (`Device`). Where rows of down share
scales (`BundleLayout.shared_bytes`), these are read once for each group of bundles with an active neuron; that counts
as the work of its neurons, by how often each is active. A plain FFN's first row is
up, a gated one's gate; a gated one's up row is read where the gate fires. A GPU that has all neurons of a layer goes as
`all` in steps in which it looks none up (`dense_layers`). With both devices at work

    T_layer = T_attention + T_predictor + max(T_gpu, T_cpu + T_sync) + T_disk

and a token takes the sum over the layers, and embedding and head. Every layer uses the fastest way that the selector
allows, like the engine's trial. T_disk is the time of reading what is needed of the neurons on disk;
the CPU computes them, so they count in T_cpu too.

Simplifications: the mean of a maximum is not less than the maximum of the means used here; neurons are assumed to fire
independently of each other (this matters for batches, and for the chance that the CPU has nothing to do); nothing read
from disk is cached; a row costs its bytes, however many tokens it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import (
    AttentionKind,
    FfnConfig,
    FfnKind,
    GatedAttentionConfig,
    ModelConfig,
    NoAttention,
    NoFfn,
    ParallelConfig,
    ShortConvConfig,
    StateKind,
)
from powerinfer.formats.weight_types import FLOAT_TYPES
from powerinfer.hardware.description import Device, Disk
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.models.inventory import Matrix
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, Indices, Profile
from powerinfer.placement.shapes import Model

Float64 = NDArray[np.float64]

WAYS = {
    "all": ("all",),
    "exact": ("exact", "all"),
    "threshold": ("exact", "all"),
    "predicted": ("predicted", "exact", "all"),
}
"""The ways that a selector allows; the first is its own."""

DENSE_TOKENS = 16
"""Tokens for which no neuron of a layer that is on the GPU is looked up, where nobody knows how often they fire."""

LEAST_SAVED = 0.1
"""Share of the bytes of a layer's neurons that kernels which look for them must not read to be worth it: a 7B model of
which a tenth fires decoded 32 requests at half of the speed of dense products, and 8 as fast as its bytes allow."""

_STREAM = 1 << 20  # bytes of a read of consecutive neurons

EACH, SELECTED, FIRED, ACTIVE, SHARED = _KINDS = range(5)

_UP_FIRES = 0.8
"""Of the neurons of a dReLU whose gates fire, the share whose up fires, too (arXiv 2406.06282, section 4)."""
_PRODUCTS_FIRE = 0.65
"""Of the neurons with thresholds of products whose gates fire, the share whose products do: as in smollm2-sparse."""


@dataclass(frozen=True, eq=False)
class Expected:
    """Of every layer's groups, from the first: float64 [layers, groups + 1, 5], how many of the neurons so far there
    are (EACH), for how many a step needs the first row (SELECTED), up (FIRED) and down (ACTIVE), and of how many groups
    of bundles the scales of down (SHARED).

    idle: float64 [layers, groups + 1], probability that no neuron from there on is selected.
    """

    sums: Float64
    idle: Float64

    @property
    def all(self) -> Float64:
        """Of whole layers, [layers, 5]."""
        return np.asarray(self.sums[:, -1])


def expected(
    profile: Profile,
    order: Sequence[Indices],
    config: ModelConfig,
    selected: Sequence[float],
    batch: int,
    group: int,
    every: bool = False,
) -> Expected:
    """Expected neurons needed in a step of `batch` tokens, by layer and group: `group` neurons of its `order`.

    selected: for each layer, neurons that a predictor selects per neuron that fires. A neuron is needed when some token
    needs it: 1 - (1 - p) ** batch. every: all are computed, and only how many there are counts.
    """
    groups = -(-max(profile.sizes) // group)
    starts = np.arange(groups) * group
    sums = np.zeros((profile.n_layers, groups + 1, len(_KINDS)))
    idle = np.ones((profile.n_layers, groups + 1))
    if every:
        sums[..., EACH] = np.minimum(np.arange(groups + 1) * group, np.array(profile.sizes)[:, None])
        return Expected(sums, idle)
    for layer in range(profile.n_layers):
        p = profile.fraction(layer)[order[layer]]
        active, fired, guessed = (
            any_of(needed(p, config.layers[layer].ffn, kind, selected[layer]), batch)
            for kind in (ACTIVE, FIRED, SELECTED)
        )
        shared = _groups_read(any_of(profile.fraction(layer), batch))[order[layer]]
        for kind, values in enumerate((np.ones_like(p), guessed, fired, active, shared)):
            sums[layer, 1:, kind] = np.cumsum(by_group(values, starts))
        silent = by_group(np.log1p(-np.minimum(guessed, 1 - 1e-15)), starts)
        idle[layer, :-1] = np.exp(np.cumsum(silent[::-1])[::-1])
    return Expected(sums, idle)


def by_group(values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[Any]:
    """Sums of the values from each start up to the next; 0 for groups that a smaller layer does not have."""
    missing = max(0, int(starts.max(initial=-1)) + 1 - len(values))
    return np.asarray(np.add.reduceat(np.pad(values, (0, missing)), starts))


def needed(active: Float64, ffn: FfnKind, kind: int, selected: float) -> Float64:
    """Share of the tokens that need each neuron. active: for which it fires; kind: `ACTIVE`, `FIRED` (its gate does) or
    `SELECTED` (by a predictor that selects `selected` times as many as fire)."""
    if kind == SELECTED:
        return np.minimum(1.0, selected * active)
    if kind == FIRED and isinstance(ffn, FfnConfig) and ffn.product_thresholds:
        return np.minimum(1.0, active / _PRODUCTS_FIRE)
    return np.minimum(1.0, active / _UP_FIRES) if kind == FIRED and ffn.activation == "drelu" else active


def any_of(p: Float64, batch: int) -> Float64:
    """Probability that one of `batch` tokens needs what each needs with probability p, independently."""
    return p if batch == 1 else np.asarray(-np.expm1(batch * np.log1p(-np.minimum(p, 1 - 1e-15))))


def _groups_read(active: Float64) -> Float64:
    """[neurons]: how many groups of bundles have an active neuron, divided among their neurons by probability."""
    starts = np.arange(0, len(active), BUNDLE_GROUP)
    some = -np.expm1(np.add.reduceat(np.log1p(-np.minimum(active, 1 - 1e-15)), starts))
    expected = np.add.reduceat(active, starts)
    each = np.divide(some, expected, out=np.zeros_like(some), where=expected > 0)
    return np.asarray(active * np.repeat(each, BUNDLE_GROUP)[: len(active)])


def dense_tokens(frequency: Float64 | None, gated: bool, predicts: bool) -> int:
    """The fewest tokens of a step for which a GPU that has all neurons of a layer looks none up, since too few are left
    out; more than NEURON_TOKENS if there are none.

    frequency: float64 [neurons], the share of tokens for which each fires; predicts: a predictor selects some.
    """
    if frequency is None:
        return DENSE_TOKENS
    skipped = 1.0 if predicts else 1 - 1 / (2 + gated)  # `exact` reads the first row of all neurons
    silent = 1 - np.clip(frequency, 0, 1)
    left_out = np.array([(silent**tokens).mean() for tokens in range(1, NEURON_TOKENS + 1)])  # by all of so many
    return 1 + int((skipped * left_out >= LEAST_SAVED).sum())


def dense_layers(profile: Profile, model: Model, way: str, batch: int) -> list[bool]:
    """Flags by layer: a GPU that has all of its neurons looks none up in a step of that many tokens."""

    def dense(layer: int) -> bool:
        if way == "all" or not profile.sizes[layer]:
            return False
        layout = model.bundles[layer]
        fewest = dense_tokens(profile.fraction(layer), layout.gated, way == "predicted")
        return batch >= max(fewest, 1 if layout.down_type in FLOAT_TYPES else 2)  # of one token rows are looked up

    return list(map(dense, range(profile.n_layers)))


def neuron_seconds(
    device: Device, bundles: BundleLayout, way: str, panels: tuple[Matrix, ...] = (), neurons: int = 1
) -> Float64:
    """[EACH, SELECTED, FIRED, ACTIVE, SHARED]: seconds of a device per unit of each kind.

    panels: the layer's dense matrices, if the device keeps them; `all` and the first rows of `exact` are then computed
    from them, otherwise from the bundles.
    """
    seconds = np.zeros(len(_KINDS))
    if way == "all":
        if panels:
            seconds[EACH] = sum(device.dense_seconds(one.type, one.panels) for one in panels) / neurons
        else:
            seconds[EACH] = device.dense_seconds(bundles.gate_type, bundles.stride)
        return seconds
    first = device.rows_seconds(bundles.gate_type, 1, bundles.gate_bytes)
    if way == "predicted":
        seconds[SELECTED] = first
    else:
        seconds[EACH] = device.dense_seconds(panels[0].type, panels[0].panels) / neurons if panels else first
    if bundles.gated:
        seconds[FIRED] = first  # up has the size and the type of gate
    seconds[ACTIVE] = device.rows_seconds(bundles.gate_type, 1, bundles.down_bytes)
    seconds[SHARED] = device.rows_seconds(bundles.gate_type, 0, bundles.shared_bytes)
    return seconds


def fixed_seconds(device: Device, way: str) -> float:
    """Time of an FFN on a device, apart from its neurons."""
    return 1e-6 * (device.op_us + (0.0 if way == "all" else device.sparse_us))


def matrix_seconds(device: Device, matrices: tuple[Matrix, ...], panels: bool) -> float:
    """Time of dense products with these matrices, in panels (CPU) or in the types of a GPU."""
    if panels:
        return sum(device.dense_seconds(one.type, one.panels) for one in matrices)
    return sum(device.dense_seconds(one.gpu_type, one.stored) for one in matrices)


def _further(attention: AttentionKind) -> int:
    """Launches of a kind of attention on a GPU beyond those of input, attention and projection."""
    if isinstance(attention, ShortConvConfig):
        return 0
    if isinstance(attention, StateKind):
        return 3  # convolution, what it keeps, the norm with its gate
    if isinstance(attention, ParallelConfig):
        return 6  # those of Mamba2 beside it
    if isinstance(attention, GatedAttentionConfig):
        return 3  # product of the gate, sigmoid, multiplication
    return 2 if attention.latents else 0  # products with a matrix of each head


def attention_seconds(
    device: Device, model: Model, layer: int, kv_type: str, past: int, batch: int, panels: bool, ffn: bool = True
) -> float:
    """A layer's attention, `past` tokens of each of `batch` requests in the cache: input, attention, projection.

    With `ffn` also the FFN, if its neurons are not told apart.
    """
    config = model.config.layers[layer]
    window = config.attention.window
    seen = past if window is None else min(past, window)
    kv = (model.kv_bytes if panels else model.gpu_kv_bytes)(kv_type, max(1, seen), batch, slice(layer, layer + 1))
    kv += 2 * batch * model.layer_state(layer)  # read and written
    norms = 2 if config.norms == "post" else 0  # separate operators
    further = 0 if panels else _further(config.attention)
    operators = 0 if isinstance(config.attention, NoAttention) else 3 + further
    fixed = 1e-6 * (operators + norms) * device.op_us
    whole = 0.0
    if ffn:
        needed, predictor = config.ffn.share_read(batch), model.expert_predictor(layer)
        whole = needed * model.step_share(layer, batch) * matrix_seconds(device, model.whole_ffn(layer), panels)
        whole += needed * matrix_seconds(device, predictor[1:], panels) + matrix_seconds(device, predictor[:1], panels)
    return matrix_seconds(device, model.attention[layer], panels) + kv / (1e9 * device.kv_gb_s) + fixed + whole


def end_seconds(device: Device, model: Model, panels: bool) -> float:
    """Output head, with the projection of its input."""
    type_name, nbytes = (model.head.type, model.head.panels) if panels else (model.head.gpu_type, model.head.stored)
    head = device.head_seconds(type_name, nbytes)
    return head + matrix_seconds(device, model.projections, panels) + 1e-6 * device.op_us


@dataclass(frozen=True, eq=False)
class FfnTime:
    """[layers, groups + 1] each: times of GPU and CPU for FFNs whose first k groups are on the GPU, and T_sync."""

    gpu: Float64
    cpu: Float64
    sync: Float64

    @property
    def total(self) -> Float64:
        """max(T_gpu, T_cpu + T_sync)."""
        return np.asarray(np.maximum(self.gpu, self.cpu + self.sync))


def split_time(
    cpu: Device, gpu: Device, expected: Expected, model: Model, way: str, sync: float, dense: Sequence[bool] = ()
) -> FfnTime:
    """FFNs split between both devices, or wholly on one of them. dense: the layers of `dense_layers`.

    If no neuron on the CPU is needed, there is neither a job nor a wait; a predictor tells in advance.
    """
    groups = np.arange(expected.sums.shape[1])
    on_gpu = by_layer(expected.sums, [neuron_seconds(gpu, layout, way) for layout in model.bundles])
    on_gpu += np.where(groups > 0, fixed_seconds(gpu, way), 0.0) * _ffns(model)
    left = expected.all[:, None, :] - expected.sums
    for layer in np.flatnonzero(dense):
        hot = left[layer, :, EACH] == 0
        seconds = expected.sums[layer, hot] @ neuron_seconds(gpu, model.bundles[layer], "all")
        on_gpu[layer, hot] = seconds + fixed_seconds(gpu, "all")
    on_cpu = by_layer(left, [neuron_seconds(cpu, layout, way) for layout in model.bundles])
    busy = 1 - expected.idle if way == "predicted" else (groups < groups[-1]) * _ffns(model)
    return FfnTime(on_gpu, on_cpu + busy * fixed_seconds(cpu, way), busy * sync)


def cpu_time(cpu: Device, expected: Expected, model: Model, way: str, panels: bool) -> FfnTime:
    """FFNs on the CPU alone, from the dense matrices if `panels`, else from bundles; infinite for k > 0."""
    layers, nothing = model.config.n_layers, np.zeros(expected.sums.shape[:2])
    kept = model.ffn if panels else ((),) * layers
    about = zip(model.bundles, kept, model.config.ffn_sizes, strict=True)
    each = [neuron_seconds(cpu, layout, way, matrices, max(1, size)) for layout, matrices, size in about]
    seconds = np.full_like(nothing, np.inf)
    seconds[:, 0] = np.sum(expected.all * np.array(each), axis=1) + fixed_seconds(cpu, way) * _ffns(model)[:, 0]
    return FfnTime(nothing, seconds, nothing.copy())


def _ffns(model: Model) -> Float64:
    """[layers, 1]: 1 of a layer that has an FFN, else 0."""
    return np.array([[float(not isinstance(layer.ffn, NoFfn))] for layer in model.config.layers])


@dataclass(frozen=True)
class ExpertsRead:
    """Of a layer's experts, what a step is expected to need: hot, cold: experts on the GPU and on the CPU; some_cold:
    probability that there is a cold one; hits: share of a token's experts that is on the GPU. inside: neurons of each
    expert there, of a layer that is divided by these: then hot and cold are as many experts as have these neurons, and
    hits the share of those that fire."""

    hot: float
    cold: float
    some_cold: float
    hits: float
    inside: int = 0


def experts_read(n: int, top_k: int, slots: int, batch: int, frequency: Float64 | None) -> ExpertsRead:
    """n: experts, of which each of `batch` tokens has top_k; slots: how many are on the GPU. frequency: float64 [n],
    the share of the tokens that select each, those on the GPU being the most frequent; None: all are alike."""
    each = np.full(n, top_k / n) if frequency is None else np.sort(frequency)[::-1]
    needed = any_of(each, batch)
    none_cold = float(np.prod(1 - needed[slots:])) if slots < n else 1.0
    total = float(each.sum())
    hits = float(each[:slots].sum()) / total if total else 0.0
    return ExpertsRead(float(needed[:slots].sum()), float(needed[slots:].sum()), 1 - none_cold, hits)


def divided_read(model: Model, layer: int, inside: int, batch: int, frequency: Float64) -> ExpertsRead:
    """Needs of a step of a layer of which the GPU has that many neurons of each expert, the busiest."""
    experts = model.config.experts[layer]
    needed, fires = float(any_of(frequency, batch).sum()), model.inside[layer].fires
    share = inside / experts.size
    hits = float(fires[:inside].sum() / max(fires.sum(), 1e-30))
    return ExpertsRead(needed * share, needed * (1 - share), 1.0, hits, inside)


def divided_seconds(
    cpu: Device, gpu: Device, model: Model, layer: int, batch: int, needed: float, sync: float
) -> Float64:
    """[groups + 1, 3]: times of the GPU, the CPU and their exchange for a layer's FFN in a step, by how many groups of
    neurons of each expert are on the GPU, the busiest. needed: experts that the step needs."""
    experts, ends = model.config.experts[layer], np.arange(0, model.config.experts[layer].size + 1, BUNDLE_GROUP)
    fires = model.inside[layer].fires
    fires = np.minimum(1.0, fires * model.firing / max(float(fires.mean()), 1e-30))  # as whole experts are counted
    selects = np.minimum(1.0, model.selected[layer] * fires)
    until = [np.concatenate([[0.0], np.cumsum(any_of(each, batch))])[ends] / experts.size for each in (selects, fires)]
    (inner, outer), rows = model.expert_predictor(layer), model.neurons_inside(layer, True)
    neurons, hot = experts.n_experts * experts.size, ends / experts.size
    of_rows = neurons / rows * needed / experts.n_experts
    seconds = np.zeros((len(ends), 3))
    for at, device in enumerate((gpu, cpu)):
        panels = device is cpu
        counts = [each if device is gpu else each[-1] - each for each in until]
        shares = np.array([model.read_share(layer, *pair) for pair in zip(*counts, strict=True)])
        part = hot if device is gpu else 1 - hot
        weights = needed / experts.n_experts * shares * matrix_seconds(device, model.experts[layer], panels)
        predictor = of_rows * part * matrix_seconds(device, (outer,), panels)
        first = model.ram_expert_predictor(layer) if panels else (inner,)
        seconds[:, at] = weights + predictor + (part > 0) * matrix_seconds(device, first, panels)
    beside = model.step_share(layer, batch) * matrix_seconds(gpu, model.beside[layer], False)
    seconds[:, 0] += beside + 3e-6 * gpu.op_us
    seconds[:-1, 1] += 1e-6 * cpu.op_us
    seconds[:-1, 2] = sync
    return seconds


def _experts_seconds(device: Device, model: Model, layer: int, batch: int, panels: bool) -> tuple[float, float]:
    """The time that a step takes for all experts of a layer beside a GPU, and that for what it reads of a predictor
    whichever it needs."""
    predictor = model.expert_predictor(layer) if panels or model.selects_on_gpu(layer) else ()
    share = model.step_share(layer, batch) if panels or model.skips_on_gpu else 1.0
    seconds = share * matrix_seconds(device, model.experts[layer], panels)
    first = model.ram_expert_predictor(layer) if panels else predictor[:1]
    return seconds + matrix_seconds(device, predictor[1:], panels), matrix_seconds(device, first, panels)


def resident_seconds(gpu: Device, model: Model, layer: int, batch: int) -> float:
    """The time that a step takes for one expert of a layer on a GPU, with its rows of a predictor."""
    return _experts_seconds(gpu, model, layer, batch, False)[0] / model.n_experts[layer]


def expert_seconds(
    cpu: Device, gpu: Device, model: Model, layer: int, batch: int, frequency: Float64, sync: float
) -> Float64:
    """[n + 1]: time of a layer's FFN in a step by how many of its n experts are on the GPU, as `split_experts` has it.
    frequency: as of `experts_read`, of the layer."""
    n = model.n_experts[layer]
    needed = any_of(np.sort(frequency)[::-1], batch)
    hot = np.concatenate([[0.0], np.cumsum(needed)])
    some_cold = 1 - np.concatenate([np.cumprod((1 - needed)[::-1])[::-1], [1.0]])
    cold = np.maximum(hot[-1] - hot, 0.0)
    share = model.step_share(layer, batch) if model.skips_on_gpu else 1.0
    beside = share * matrix_seconds(gpu, model.beside[layer], False) + 3e-6 * gpu.op_us
    (of_gpu, gpu_more), (of_cpu, cpu_more) = (
        _experts_seconds(device, model, layer, batch, device is cpu) for device in (gpu, cpu)
    )
    hides = bool(model.config.experts[layer].latents)  # for the CPU's experts, too
    on_gpu = beside + hot / n * of_gpu + ((hot > 0) | hides) * gpu_more
    on_cpu = cold / n * of_cpu + some_cold * (cpu_more + 1e-6 * cpu.op_us)
    return np.asarray(np.maximum(on_gpu, on_cpu + np.where(np.arange(n + 1) < n, sync, 0.0)))


def split_experts(
    cpu: Device,
    gpu: Device,
    model: Model,
    reads: Mapping[int, ExpertsRead],
    layers: int,
    groups: int,
    batch: int,
    sync: float,
) -> FfnTime:
    """FFNs of the first layers, [layers, groups + 1], that do not depend on groups of neurons. reads: of those that
    have experts; others are on the GPU as a whole."""
    times = np.zeros((3, layers, groups + 1))
    for layer in range(layers):
        if isinstance(model.config.layers[layer].ffn, NoFfn):
            continue
        beside, read = matrix_seconds(gpu, model.beside[layer], False), reads.get(layer)
        share = model.step_share(layer, batch) if model.skips_on_gpu else 1.0
        if read is None:
            share = model.config.layers[layer].ffn.share_read(batch)
        times[0, layer] = share * beside + 1e-6 * gpu.op_us
        if read is not None and read.inside:
            divided = divided_seconds(cpu, gpu, model, layer, batch, read.hot + read.cold, sync)
            times[:, layer] = divided[read.inside // BUNDLE_GROUP][:, None]
        elif read is not None:
            n = model.n_experts[layer]
            of_gpu, more = _experts_seconds(gpu, model, layer, batch, False)
            hides = read.hot > 0 or bool(model.config.experts[layer].latents)  # for the CPU's experts, too
            times[0, layer] += read.hot / n * of_gpu + hides * more + 2e-6 * gpu.op_us
            of_cpu, more = _experts_seconds(cpu, model, layer, batch, True)
            times[1, layer] = read.cold / n * of_cpu + read.some_cold * (more + 1e-6 * cpu.op_us)
            times[2, layer] = sync if read.cold else 0.0
    return FfnTime(*times)


def disk_seconds(
    disk: Disk, expected: Expected, bundles: Sequence[BundleLayout], selector: str, firsts: bool = False
) -> Float64:
    """[layers, groups + 1]: time to read from disk, for one step, the needed neurons from each group on.

    `all` streams them. `predicted` reads the selected bundles. `exact` needs the first row of each neuron, which RAM
    has or, with `firsts`, is read, and the rest of those that fire; or streams them all, if that is faster.
    """
    n, selected, fired, *_ = np.moveaxis(expected.all[:, None, :] - expected.sums, -1, 0)

    def each(seconds: Callable[[BundleLayout], float]) -> Float64:
        """[layers, 1], of the bundles of each layer."""
        return np.array([[seconds(layout)] for layout in bundles])

    streamed = n * each(lambda own: own.stride) / disk.rate(_STREAM)
    if selector == "all":
        return np.asarray(streamed)
    if selector == "predicted":
        return np.asarray(np.minimum(streamed, selected * each(lambda own: disk.seconds(own.stride))))
    first = each(lambda own: disk.seconds(own.gate_bytes) if firsts else 0.0)
    rest = each(lambda own: disk.seconds(own.stride - own.gate_bytes))
    return np.asarray(np.minimum(streamed, n * first + fired * rest))


def by_layer(sums: Float64, each: Sequence[Float64]) -> Float64:
    """Sums of `Expected`, [layers, groups + 1, 5], times what a unit of each kind comes to in each layer."""
    return np.stack([own @ unit for own, unit in zip(sums, each, strict=True)])


def neuron_bytes(bundles: BundleLayout, way: str) -> Float64:
    """[EACH, SELECTED, FIRED, ACTIVE, SHARED]: bytes read per unit of each kind."""
    nbytes = np.zeros(len(_KINDS))
    if way == "all":
        nbytes[EACH] = bundles.stride
        return nbytes
    nbytes[SELECTED if way == "predicted" else EACH] = bundles.gate_bytes
    nbytes[FIRED] = bundles.gate_bytes if bundles.gated else 0.0
    nbytes[ACTIVE] = bundles.down_bytes
    nbytes[SHARED] = bundles.shared_bytes
    return nbytes
