"""Budgets: which dense parts of a model are placed on a GPU, and the room left for neurons in either memory.

Everything counts: weights, predictors, KV cache, working memory, driver and runtime. Weights and caches
are exact; a GPU's working memory is an estimate from above with a stated margin (`Model.gpu_scratch`), and what a load
really takes is measured once it is there (`hybrid/vram.py`).

Priority on the GPU: runtime and working memory; for one layer after another attention, norms, its KV cache
(attention runs where its cache is) and its predictor, or its FFN where every neuron is computed; the output head; what
is left is for hot neurons. A draft head is there only beside a whole model (`draft_fits`). The layers that do not fit
run on the CPU as a whole. A small part of the room for neurons is used for buffers that stream those in RAM, and these
layers, to the GPU for long prompts (devices/stage.py), if every neuron still fits. RAM holds runtime, working memory,
the embedding and every dense part that is not on the GPU; what is left is for the other neurons. Without a GPU the
engine keeps the dense matrices of the FFNs beside the bundles, for prompts; where RAM does not hold all of it, or not
the experts that a GPU does not have, `disk.plan_disk` says what stays on disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from mmap import PAGESIZE
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import AttentionConfig, ExpertsConfig
from powerinfer.devices.link import link_bytes
from powerinfer.devices.stage import (
    BUFFERS,
    buffer_bytes,
    expert_buffer,
    experts_held,
    layer_buffer,
    return_buffer,
)
from powerinfer.devices.states import UNDO_TOKENS
from powerinfer.devices.step_buffers import step_bytes
from powerinfer.errors import RequestError, VramError
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.bundle_memory import apart_bytes
from powerinfer.hardware.cards import memory_leaving
from powerinfer.hardware.description import Device, Hardware
from powerinfer.kernels import gpu as kernels
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.models.inventory import Matrix
from powerinfer.neurons import BUNDLE_GROUP
from powerinfer.placement.cost import any_of, divided_seconds, expert_seconds
from powerinfer.placement.experts import Frequencies, slots_by_frequency, slots_evenly, slots_in_least_time
from powerinfer.placement.shapes import Model
from powerinfer.placement.solver import GROUP
from powerinfer.system import total_memory

if TYPE_CHECKING:
    from powerinfer.placement.disk import DiskPlan

RUNTIME_BYTES = 80 << 20
"""RAM of the interpreter, its libraries, the tokenizer and the threads: 47 to 65 MiB with vocabularies of 16,000 and
49,000, and a margin."""

STAGED = 16
"""Staging gets at most 1/STAGED of the room for neurons on a GPU."""

PASSED = 4
"""The same where layers in RAM stream, too: then less is left than one more layer's attention, cache and predictor
take, of which a sixteenth would make buffers too small for the bus."""

EXPERT_STAGED = 8
"""Streaming experts gets at most 1/EXPERT_STAGED of their room: its buffers are of whole experts."""

DIVIDED = 0.95
"""Experts are divided by their neurons where the FFNs of a step then take at most this share of their time: a prompt is
computed with whole experts, by the CPU where they do not stream, so it has nothing of it."""

GIVES_WAY = 8
"""Layers on a GPU as a whole make room for what others need to stream there if there are so many of these."""

DISPLACED = 16
"""Unless they are asked for, drafts take at most 1/DISPLACED of what a GPU holds, for states that undo steps."""

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

Footprint = dict[str, int]
"""Bytes by use: runtime, scratch (working memory), staging (buffers for long prompts), embedding, norms (with biases),
attention, predictor, head, kv (with the states of sequences), panels (dense matrices of FFNs in RAM), ffn (neurons, or
dense FFNs on a GPU), experts (those that are on either device of layers on a GPU, or that RAM has of those on disk),
draft (a draft head), window (through which dense matrices on disk pass), passing (of layers in RAM that stream:
norms, biases, and a cache that passes through)."""


@dataclass(frozen=True)
class Workload:
    """The settings of a load that memory depends on.

    kv_type, context, batch: of the KV cache, which holds `batch` contexts of `context` tokens. chunk: tokens of a
    prompt that are computed at once; requests: that decode together; selector: one of `cost.WAYS`; scratch: bytes of
    working memory on a GPU, where that was measured, None: an estimate. moves: experts on a GPU are exchanged, so that
    every layer has use for some. undo_tokens: of a sequence in a step, whose states can be undone. drafts: requests may
    have some. for_others: bytes of working memory on a GPU that computes experts of other GPUs' layers, too.
    """

    kv_type: str
    context: int
    chunk: int
    requests: int = 1
    batch: int = 1
    selector: str = "all"
    scratch: int | None = None
    moves: bool = False
    undo_tokens: int = 0
    drafts: bool = False
    for_others: int = 0

    @property
    def tokens(self) -> int:
        """Maximum tokens of a step."""
        return max(self.chunk, self.requests)

    @property
    def predicted(self) -> bool:
        """Whether predictors are held."""
        return self.selector == "predicted"


@dataclass(frozen=True)
class Division:
    """The part of a model that a GPU has.

    layers: the first ones, with their KV cache; head: the output head; slots: of each layer the number of its experts
    there, None: all; cached: RAM has these experts, too. host_bytes: RAM that the GPU's libraries take. inside: of
    layers without slots the number of neurons of each expert there, which RAM has, too. draft: the draft head.
    """

    layers: int = 0
    head: bool = False
    slots: tuple[int, ...] | None = None
    cached: bool = False
    host_bytes: int = 0
    inside: Mapping[int, int] = field(default_factory=dict)
    draft: bool = False


class WholeLayers(NamedTuple):
    """The first layers, the head and the draft head that a GPU has as a whole. staging: bytes of a buffer through which
    the matrices of the other layers stream there for long prompts; 0: none is needed, or there is no room for it."""

    layers: int
    head: bool
    staging: int = 0
    draft: bool = False


ON_CPU = Division()
"""Nothing of the model is on a GPU."""


@dataclass(frozen=True)
class Claims:
    """gpu_layers: number of layers, from the first, with their attention, and their predictor if any, on the GPU;
    0: the GPU is not used; gpu_head, gpu_draft: the output head is there, and the draft head. The others are in RAM.

    gpu, cpu: bytes of all but the bundles, by use; gpu_left, cpu_left: what remains of the budgets, once there is room
    for what groups of bundles share, as if each group had neurons on both sides. cpu_neuron: bytes of a neuron in RAM
    beside that. staging: bytes of a buffer, 0 for none; what they take of either memory is not part of what is left.
    passes: the layers in RAM stream through them, too, as a whole. buffered: what more would be left for neurons on the
    GPU without all that, which is less where groups of neurons would share more bytes than there are. bundles: neurons
    are placed as bundles, which then go where there is room; panels: dense matrices of the FFNs are in RAM. slots: of
    each layer the number of its experts on the GPU; None: the model has none, or no GPU is used; inside: as of
    `Division`. disk: what stays on
    disk, but for neurons beside a GPU; None: nothing. slots_beside: neurons of each of the GPU's layers that RAM has
    room for beside those that it keeps, where others are read from disk; 0: none are. Then the bundles of the other
    layers are not part of what is left, and RAM has `cpu_gate` bytes of each neuron of the GPU's layers that the GPU
    does not have.
    """

    gpu_layers: int
    gpu_head: bool
    gpu: Footprint
    cpu: Footprint
    gpu_left: int
    cpu_left: int
    cpu_neuron: int
    bundles: bool
    panels: bool
    staging: int = 0
    slots: tuple[int, ...] | None = None
    inside: Mapping[int, int] = field(default_factory=dict)
    disk: DiskPlan | None = None
    slots_beside: int = 0
    cpu_gate: int = 0
    passes: bool = False
    buffered: int = 0
    gpu_draft: bool = False

    @property
    def whole(self) -> bool:
        """Layers are on the GPU as a whole, and no experts: nothing is split."""
        return self.gpu_layers > 0 and not self.bundles and self.slots is None

    def without_buffers(self) -> Claims:
        """The same without buffers for long prompts."""
        gpu, cpu = ({use: n for use, n in held.items() if use != "passing"} for held in (self.gpu, self.cpu))
        gpu_left = self.gpu_left + self.buffered
        cpu_left = self.cpu_left + staged_in_ram(self.staging) + self.cpu.get("passing", 0)
        return replace(
            self, gpu=gpu, cpu=cpu, gpu_left=gpu_left, cpu_left=cpu_left, staging=0, passes=False, buffered=0
        )


def budgets(hardware: Hardware, vram: int | None, ram: int | None) -> tuple[int, int]:
    """(VRAM, RAM) in bytes, of all GPUs together; None: all that is free. RequestError for more than there is.

    Without a GPU --vram is ignored; the plan's reasons say so.
    """
    gpu, cpu = hardware.gpu, hardware.cpu
    total = sum(card.device.memory_bytes for card in hardware.all_cards)
    if gpu is None:
        vram = 0
    elif vram is None:
        vram = total
    elif vram > total:
        now = " free: give less, or end other programs on it" if hardware.key else ""  # measured, not described
        raise VramError(f"--vram {gib(vram)}, but {gpu.name} has {gib(total)}{now}")
    if ram is None:
        ram = cpu.memory_bytes - cpu.reserved_bytes
    elif ram > cpu.memory_bytes:
        other = "; --card or --hardware describes another machine" if hardware.key else ""
        raise RequestError(f"--ram {gib(ram)}, but {hardware.name} has {gib(cpu.memory_bytes)}{other}")
    return vram, ram


def check_ram(ram: int, helps: str) -> None:
    """RequestError for more RAM than this machine, or its container, has. helps: what to do instead."""
    most = total_memory()
    if ram >= most + PAGESIZE:  # the limit of a container is in whole pages
        raise RequestError(f"--ram {gib(ram)}, but this machine has {gib(most)}: {helps}")


# ---------------------------------------------------------------- bytes in either memory


def on_gpu(model: Model, hardware: Hardware, work: Workload, division: Division, dense: bool = False) -> Footprint:
    """Bytes on a GPU that has at least one layer, as of `kept_on_gpu`, with those of its driver and of steps."""
    assert hardware.gpu is not None
    scratch = model.gpu_scratch(work.tokens, work.requests, division.layers) if work.scratch is None else work.scratch
    beside = {"runtime": hardware.gpu.reserved_bytes, "scratch": scratch + work.for_others}
    return beside | kept_on_gpu(model, work, division, dense)


def kept_on_gpu(model: Model, work: Workload, division: Division, dense: bool = False) -> Footprint:
    """Bytes of weights and caches on a GPU.

    Neurons do not count, but FFNs whose neurons are not told apart; with `dense` the FFNs are dense, and all count.
    """
    layers, head, slots = division.layers, division.head, division.slots
    held = {
        "norms": model.rotation_bytes + model.layer_vectors(dense, layers) + head * model.end_vectors,
        "attention": sum(map(_stored, model.attention[:layers])),
        "kv": model.gpu_kv_bytes(work.kv_type, work.context, work.batch, slice(layers))
        + model.gpu_state_bytes(work.requests, slice(layers), work.undo_tokens),
    }
    if work.predicted:
        held["predictor"] = sum(map(model.gpu_predictor, model.predictors[:layers]))
    elif slots is not None and any(map(model.expert_predictor, range(layers))):
        on_gpus = {layer: slots[layer] + (layer in division.inside) for layer in range(layers)}
        held["predictor"] = sum(model.gpu_expert_predictor(layer, n) for layer, n in on_gpus.items())
    kept = model.ffn if slots is None else model.beside
    whole = sum(_stored(kept[layer]) for layer in range(layers) if dense or model.whole_ffn(layer))
    if dense or whole:
        held["ffn"] = whole
    if slots is not None:
        held["experts"] = sum(slots[layer] * model.expert_bytes(layer)[0] for layer in range(layers))
        held["experts"] += sum(model.hot_bytes(layer, hot)[0] for layer, hot in division.inside.items())
        held["experts"] += division.cached * model.sent_expert(layers)
    if head:
        held["head"] = _stored((model.head, *model.projections[1:]))
    if division.draft:
        held["draft"] = model.gpu_draft_bytes(work.kv_type, work.context, work.batch, work.tokens)
    return held


def in_ram(model: Model, work: Workload, division: Division = ON_CPU, panels: bool = True) -> Footprint:
    """Bytes in RAM of what a GPU does not have.

    panels: all FFNs are dense, and those of the other layers count; else only those whose neurons are not told apart.
    """
    config, layers, head, slots = model.config, division.layers, division.head, division.slots
    inside = division.inside
    of_cache = slice(layers, config.n_layers + 1 - division.draft)
    held = {
        "runtime": RUNTIME_BYTES + (division.host_bytes if layers else 0),
        "scratch": _working_memory(model, work, division),
        "embedding": model.tables,
        "norms": model.vectors - model.layer_vectors(panels, layers) - head * model.end_vectors,
        "attention": sum(map(_panels, model.attention[layers:])),
        "head": _panels(model.projections[:1] if head else (model.head, *model.projections)),
        "kv": model.kv_bytes(work.kv_type, work.context, work.batch, of_cache)
        + model.state_bytes(work.requests, slice(layers, None), work.undo_tokens),
        "predictor": sum(map(_panels, model.predictors[layers:])) if work.predicted or model.in_experts else 0,
    }
    if model.inventory.draft and not division.draft:
        held["draft"] = model.inventory.draft
    every = range(layers, config.n_layers)
    dense = sum(_panels(model.ffn[layer] if panels else model.whole_ffn(layer)) for layer in every)
    if panels or dense:
        held["panels"] = dense
    if slots is not None:
        here = (model.n_experts[layer] - (0 if division.cached else slots[layer]) for layer in range(layers))
        cold = {layer: n for layer, n in enumerate(here) if n}
        held["experts"] = sum(
            model.hot_bytes(layer, inside[layer])[1] if layer in inside else n * model.expert_bytes(layer)[1]
            for layer, n in cold.items()
        )
        held["predictor"] += sum(_panels(model.ram_expert_predictor(layer)) for layer in cold)
    return held


def _working_memory(model: Model, work: Workload, division: Division) -> int:
    """Bytes in RAM of the CPU's working memory and, beside a GPU, of the buffers between the devices and of its steps,
    and of counters of neurons."""
    config, tokens, layers, head = model.config, work.tokens, division.layers, division.head
    rows = min(tokens, work.requests * UNDO_TOKENS) if work.drafts else work.requests
    drafted = work.requests if model.inventory.draft and not division.draft else 0
    nbytes = model.scratch_bytes(tokens, drafted + (0 if head else rows))
    if not layers:
        return nbytes
    vectors, inputs = (tokens, config.d_model, config.vocab_size), config.layer_inputs * layers
    nbytes += link_bytes(tokens, config) + step_bytes(*vectors, rows if head else 1, inputs=inputs, ahead=head)
    nbytes += 2 * 8 * sum(config.ffn_sizes[:layers]) + division.cached * model.sent_expert(layers)
    if division.draft:
        nbytes += model.draft_link_bytes(tokens) + step_bytes(*vectors, work.requests, inputs=config.d_model)
    return nbytes


def bundle_bytes(model: Model, predicted: bool) -> int:
    """All neurons beside dense matrices, in whole groups: as the file has them if gates are predicted, else without the
    rows of the first product, which the matrices have."""
    pairs = zip(model.config.ffn_sizes, model.bundles, strict=True)
    return sum(
        n_groups(size) * layout.group_bytes if predicted else apart_bytes(layout, n_groups(size))
        for size, layout in pairs
    )


def least_ram(model: Model, work: Workload) -> int:
    """The smallest --ram that a load without a GPU accepts: for dense matrices and, unless every neuron is computed,
    bundles beside them."""
    return sum(in_ram(model, work).values()) + (0 if work.selector == "all" else bundle_bytes(model, work.predicted))


def layers_that_fit(
    model: Model,
    hardware: Hardware,
    work: Workload,
    vram: int,
    dense: bool = False,
    experts: bool = True,
    passes_on: bool = False,
) -> tuple[int, bool]:
    """How many layers, from the first on, fit into a GPU budget, and whether the head fits too. dense: as `on_gpu`;
    experts: with all of theirs, else with none; passes_on: another GPU may have those behind them."""
    if hardware.gpu is None or not vram:
        return 0, False
    slots = None if experts else (0,) * model.config.n_layers

    def taken(layers: int, head: bool = False) -> int:
        return sum(on_gpu(model, hardware, work, Division(layers, head, slots), dense).values())

    every = model.config.n_layers
    layers = bisect_right(range(1, every + 1), vram, key=taken)
    layers = model.config.whole_caches(layers) if passes_on else model.config.whole_layers(layers)
    return layers, layers == every and taken(every, True) <= vram


def whole_layers(model: Model, hardware: Hardware, work: Workload, vram: int) -> WholeLayers:
    """Layers as a whole and the head, as of `layers_that_fit`, and what has room beside them."""
    layers, head = layers_that_fit(model, hardware, work, vram, dense=True)
    others = model.config.n_layers - layers
    if not layers or not others or work.chunk <= kernels.FEW or any(model.n_experts):
        return WholeLayers(layers, head, draft=head and draft_fits(model, hardware, work, vram))
    room = vram - sum(on_gpu(model, hardware, work, Division(layers), dense=True).values())
    wanted = streamed_buffer(model, work)
    found = streamed_buffer(model, work, max(0, room - streamed_on_gpu(model, work, layers, 0)) // staged_on_gpu(1))
    if found < wanted and others >= GIVES_WAY:
        fewer, _ = layers_that_fit(model, hardware, work, vram - streamed_on_gpu(model, work, 0, wanted), dense=True)
        if fewer:
            return WholeLayers(fewer, False, wanted)
    return WholeLayers(layers, head, found)


def _head_fits(model: Model, hardware: Hardware, work: Workload, vram: int, division: Division) -> bool:
    """`draft_fits`, where the GPU has all layers with all of their experts."""
    complete = division.head and division.slots == model.n_experts
    return complete and draft_fits(model, hardware, work, vram, division)


def draft_fits(
    model: Model, hardware: Hardware, work: Workload, vram: int, division: Division | None = None
) -> bool:
    """Whether a draft head is on a GPU that has all layers as a whole, and the output head: in what these leave, since
    with one of the layers the output head would leave, too. Elsewhere the CPU has it: one of experts reads a few of
    them there. division: the model there, with all experts; None: it has none."""
    if not model.inventory.gpu_draft:
        return False
    division = replace(division or Division(model.config.n_layers, True), draft=True)
    return sum(on_gpu(model, hardware, work, division, dense=True).values()) <= vram


def displaced_by_drafts(model: Model, work: Workload, layers: int, used: int) -> int:
    """Bytes of the states that undo steps with drafts, on a GPU that has the first layers and holds `used` bytes, where
    that is too much to take from other layers or experts; 0: it is little."""
    sizes = [model.gpu_state_bytes(work.requests, slice(layers), undo) for undo in (work.undo_tokens, 0)]
    more = sizes[0] - sizes[1]
    return more if DISPLACED * more > used else 0


def streamed_buffer(model: Model, work: Workload, limit: int = 1 << 62) -> int:
    """Bytes of a buffer through which layers in RAM stream to a GPU; 0 if `limit` is too little."""
    every = model.config.layers
    largest = max(_panels(one) + _panels(other) for one, other in zip(model.attention, model.ffn, strict=True))
    widest = max(model.config.widest_ffn, model.config.d_model, *(layer.attention.width for layer in every))
    return layer_buffer(largest, widest, _passed_page(model, work, 0), limit)


def streamed_on_gpu(model: Model, work: Workload, layers: int, staging: int, dense: bool = True) -> int:
    """Bytes on the GPU for streaming the layers behind the first `layers`: buffers of that size, a converted piece,
    norms and biases, and the cache of a layer, of each kind. dense: their FFNs are matrices; biases of neurons stream
    with these."""
    heads = {(one.cached_heads, one.head_dim): layer for layer, one in _attending(model, layers)}
    cache = sum(model.gpu_kv_bytes(work.kv_type, work.context, work.batch, slice(at, at + 1)) for at in heads.values())
    vectors = model.layer_vectors(dense, model.config.n_layers) - model.layer_vectors(dense, layers)
    return staged_on_gpu(staging) + vectors + cache


def streamed_in_ram(model: Model, work: Workload, layers: int, staging: int) -> int:
    """The same in RAM: buffers, and those for pages that come back; 0 without a buffer."""
    page = _passed_page(model, work, layers)
    return staging and staged_in_ram(staging) + BUFFERS * return_buffer(page, work.tokens, staging)


def _passed_page(model: Model, work: Workload, layers: int) -> int:
    """Bytes of the largest page of a layer, behind the first `layers`, that passes through the GPU."""
    return max(
        (model.kv_bytes(work.kv_type, 1, 1, slice(at, at + 1)) for at, _ in _attending(model, layers)), default=0
    )


def _attending(model: Model, layers: int) -> list[tuple[int, AttentionConfig]]:
    """The layers behind the first `layers` whose attention streams."""
    pairs = list(enumerate(layer.attention for layer in model.config.layers))[layers:]
    return [(at, one) for at, one in pairs if isinstance(one, AttentionConfig) and one.kv_from is None]


def no_layer_fits(model: Model, hardware: Hardware, work: Workload, vram: int, card: str = "") -> VramError:
    """The error for a GPU budget too small for one layer, with the smallest that is not, or of one of several GPUs with
    what is lacking. card: the name of that one, for people."""
    slots = (0,) * model.config.n_layers if any(model.n_experts) else None
    fewest = 1 if model.config.altup is None else model.config.n_layers
    held = on_gpu(model, hardware, work, Division(fewest, slots=slots), work.selector == "all" or slots is not None)
    none = "no layer" if fewest == 1 else f"not all {fewest} layers"
    parts = {"working memory": held["scratch"], "driver and libraries": held["runtime"], "KV cache": held["kv"]}
    takes = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in parts.items() if nbytes)
    holds, needed = f"{gib(vram)} of VRAM hold {none} of {model.name}", sum(held.values())
    less = "lower --context, --prefill-chunk or --max-batch"
    if card:
        lacks = f", {gib(needed - vram)} too little" if needed > vram else ""
        return VramError(f"{card}: {holds}{lacks} ({takes}): give it more, leave that card out, or {less}")
    mend = f"give --vram {gib(needed)} or more ({takes}), {less}, or use no GPU (--gpu none)"
    return VramError(f"{holds}: {mend}")


def _groups(model: Model, layers: int) -> int:
    """Groups of bundles of the first layers."""
    return sum(n_groups(size) for size in model.config.ffn_sizes[:layers])


def shared_on_gpu(model: Model, layers: int) -> int:
    """Bytes on the GPU of what the groups of bundles of that number of layers share, if each has neurons there."""
    return _groups(model, layers) * model.gpu_shared


def shared_in_ram(model: Model, gpu_layers: int) -> int:
    """The same in RAM; without layers on a GPU it is part of the neurons' own bytes."""
    shared = max(layout.shared_bytes for layout in model.bundles)
    return _groups(model, model.config.n_layers) * shared if gpu_layers else 0


# ---------------------------------------------------------------- placing the dense parts


def claim(
    model: Model,
    hardware: Hardware,
    work: Workload,
    vram: int | None,
    ram: int | None,
    frequencies: Frequencies | None = None,
    cached: bool = False,
    disk: bool = False,
) -> Claims | RequestError:
    """Place the dense parts, whole layers where every neuron is computed, and experts. Without a layer on a GPU, and
    with `disk` of whole layers, less than nothing may be left of RAM. Returns the error, with the minimum, if they do
    not fit into RAM and VRAM together; RequestError for budgets beyond the machine's.

    frequencies: how often each expert is selected, None: not known; cached: RAM has those on the GPU too."""
    vram, ram = budgets(hardware, vram, ram)
    if any(model.n_experts):
        found = _claim_experts(model, hardware, work, (vram, ram), frequencies, cached)
        if found is not None and found.cpu_left < 0 and not disk:
            return _too_large(model, found.gpu, found.cpu, ram, hardware)
        if found is not None:
            return found
        vram = 0
    elif work.selector == "all":
        whole = whole_layers(model, hardware, work, vram)
        if whole[0]:
            return claim_layers(model, hardware, work, (vram, ram), whole, disk)
        vram = 0
    layers, head = layers_that_fit(model, hardware, work, vram)
    if not layers:
        cpu, neuron = in_ram(model, work), model.bundle.stride - (0 if work.predicted else model.bundle.gate_bytes)
        return Claims(0, False, {}, cpu, 0, ram - sum(cpu.values()), neuron, work.selector != "all", panels=True)
    division = Division(layers, head, host_bytes=hardware.host_bytes)
    gpu, cpu = on_gpu(model, hardware, work, division), in_ram(model, work, division, panels=False)
    left = ram - sum(cpu.values())
    if left < 0:
        return _too_large(model, gpu, cpu, ram, hardware)
    room, shared = vram - sum(gpu.values()), shared_on_gpu(model, layers)
    gpu_left = max(0, room - shared)
    left = max(0, left - shared_in_ram(model, layers))
    passing = _passing(model, work, layers, room, left)
    cold = gpu_left // (GROUP * model.gpu_neuron) < sum(-(-size // GROUP) for size in model.config.ffn_sizes[:layers])
    alone = _staging(model, work, gpu_left, left) if cold else 0
    staging, beside, returned = passing or (alone, 0, 0)
    before, gpu_left = gpu_left, max(0, room - shared - staged_on_gpu(staging) - beside)
    left -= staged_in_ram(staging) + returned
    if passing:
        gpu, cpu = gpu | {"passing": beside}, cpu | {"passing": returned}
    held, buffered = (gpu, cpu, gpu_left, left), before - gpu_left
    pitch, passes = model.bundle.pitch, passing is not None
    return Claims(layers, head, *held, pitch, True, False, staging, passes=passes, buffered=buffered)


def claim_layers(
    model: Model,
    hardware: Hardware,
    work: Workload,
    limits: tuple[int, int],
    placed: WholeLayers,
    disk: bool = False,
) -> Claims | RequestError:
    """The first layers on the GPU as a whole, at least one, the head, and a buffer that streams the others if RAM has
    room for it; placed: as `whole_layers` gives them. The error if RAM does not hold the others: with `disk` less than
    nothing may be left, unless the head is on the GPU. limits: VRAM and RAM."""
    (vram, ram), (layers, head, staging, draft) = limits, placed
    division = Division(layers, head, host_bytes=hardware.host_bytes, draft=draft)
    gpu, cpu = on_gpu(model, hardware, work, division, dense=True), in_ram(model, work, division)
    gpu_left, left = vram - sum(gpu.values()), ram - sum(cpu.values())
    streamed = streamed_in_ram(model, work, layers, staging)
    staging = staging if streamed <= left else 0
    if staging:
        passing = streamed_on_gpu(model, work, layers, 0)
        gpu, cpu = gpu | {"passing": passing}, cpu | {"passing": streamed - staged_in_ram(staging)}
        gpu_left, left = gpu_left - staged_on_gpu(staging) - passing, left - streamed
    if left < 0 and (head or not disk):
        needed, held = gib(sum(cpu.values())), "layer" if layers == 1 else f"{layers} layers"
        return RequestError(
            f"{model.name} needs {needed} of RAM beside the {held} that --vram holds: give --ram {needed}, or more "
            "--vram"
        )
    result = gpu, cpu, gpu_left, left
    return Claims(layers, head, *result, 0, False, True, staging, passes=staging > 0, gpu_draft=draft)


def _passing(model: Model, work: Workload, layers: int, room: int, left: int) -> tuple[int, int, int] | None:
    """Bytes of a staging buffer through which the layers behind the first `layers` stream, too, and what that takes
    beside buffers on the GPU and in RAM; None: there are none, or there is no room for it. room: bytes on the GPU, with
    those that groups of neurons would share: without neurons there nothing is shared."""
    if layers == model.config.n_layers or work.chunk <= kernels.FEW:
        return None
    beside = streamed_on_gpu(model, work, layers, 0, dense=False)
    limit = max(0, room - beside) // (PASSED * staged_on_gpu(1))
    staging = buffer_bytes(model.bundle, model.config.widest_ffn, limit)
    if not staging or not streamed_buffer(model, work, staging):
        return None
    returned = streamed_in_ram(model, work, layers, staging) - staged_in_ram(staging)
    gpu_left = max(0, room - shared_on_gpu(model, layers) - staged_on_gpu(staging) - beside)
    held = gpu_left // (GROUP * model.gpu_neuron)
    held += max(0, left - staged_in_ram(staging) - returned) // (GROUP * model.bundle.pitch)
    every = sum(-(-size // GROUP) for size in model.config.ffn_sizes)
    return (staging, beside, returned) if held >= every else None


def _claim_experts(
    model: Model,
    hardware: Hardware,
    work: Workload,
    limits: tuple[int, int],
    frequencies: Frequencies | None,
    cached: bool,
) -> Claims | None:
    """Attention, shared experts and dense FFNs of the first layers on the GPU, as many as fit, then the head, then
    experts: those that take least time or, where experts move, those that are selected most often. None: no layer fits.
    limits: VRAM and RAM, of which less than nothing may be left; then there are no buffers for long prompts."""
    vram, ram = limits
    layers, head = layers_that_fit(model, hardware, work, vram, dense=True, experts=False)
    if not layers:
        return None
    none = Division(layers, head, (0,) * model.config.n_layers, cached, hardware.host_bytes)
    room = vram - sum(on_gpu(model, hardware, work, none, dense=True).values())
    own = [layer for layer in range(layers) if model.n_experts[layer]]
    nbytes = {layer: model.expert_bytes(layer)[0] for layer in own}
    about = {layer: _alike(model, layer) if frequencies is None else frequencies[layer] for layer in own}
    assert hardware.gpu is not None
    devices, sync = (hardware.cpu, hardware.gpu), 1e-6 * hardware.sync_us
    seconds = {layer: expert_seconds(*devices, model, layer, work.batch, about[layer], sync) for layer in own}

    def claims(staging: int, divides: bool) -> Claims:
        rest, inside = room - staged_on_gpu(staging), dict[int, int]()
        if not work.moves:
            found = slots_in_least_time(about, seconds, nbytes, rest)
            if divides:
                time = sum(float(seconds[layer][n]) for layer, n in found.items())
                found, inside = _divided(model, devices, work, about, sync, rest, time) or (found, inside)
        elif frequencies is None:
            found = slots_evenly({layer: model.n_experts[layer] for layer in own}, nbytes, rest)
        else:
            found = slots_by_frequency(about, nbytes, rest)
        slots = tuple(found.get(layer, 0) for layer in range(model.config.n_layers))
        division = replace(none, slots=slots, inside=inside)
        division = replace(division, draft=_head_fits(model, hardware, work, vram, division))
        gpu, cpu = on_gpu(model, hardware, work, division, dense=True), in_ram(model, work, division)
        left = ram - sum(cpu.values()) - staged_in_ram(staging)
        gpu_left = vram - sum(gpu.values()) - staged_on_gpu(staging)
        result = gpu, cpu, gpu_left, left
        return Claims(layers, head, *result, 0, False, True, staging, slots, inside, gpu_draft=division.draft)

    staging = _expert_staging(model, work, own, room)
    if _may_divide(model, work, own):
        result = claims(staging, True)
        if result.cpu_left >= 0 and (result.gpu_left >= 0 or not result.inside):
            return result
    result = claims(staging, False)
    return result if result.cpu_left >= 0 else claims(0, False)


def _may_divide(model: Model, work: Workload, layers: Sequence[int]) -> bool:
    """Whether the GPU may have the busiest neurons of each expert of the layers, instead of whole experts."""
    return work.batch <= NEURON_TOKENS and all(map(model.may_divide, layers))


def _divided(
    model: Model,
    devices: tuple[Device, Device],
    work: Workload,
    frequencies: Frequencies,
    sync: float,
    room: int,
    time: float,
) -> tuple[dict[int, int], dict[int, int]] | None:
    """Layers of which the GPU has all experts, with their number, and others of which it has the busiest neurons of
    each expert, with theirs, within `room` bytes; None where that takes more than `DIVIDED` of the time of whole
    experts, `time` seconds. devices: CPU and GPU; frequencies: how often the layers' experts are selected."""
    batch, size = work.batch, {layer: model.config.experts[layer].size for layer in frequencies}
    needed = {layer: float(any_of(each, batch).sum()) for layer, each in frequencies.items()}
    times = {layer: divided_seconds(*devices, model, layer, batch, needed[layer], sync) for layer in frequencies}
    seconds = {layer: np.maximum(each[:, 0], each[:, 1] + each[:, 2]) for layer, each in times.items()}
    shared = {layer: model.hot_bytes(layer, 0)[0] for layer in frequencies}
    nbytes = {layer: model.hot_bytes(layer, BUNDLE_GROUP)[0] - shared[layer] for layer in frequencies}
    fires = {layer: model.inside[layer].fires.reshape(-1, BUNDLE_GROUP).sum(axis=1) for layer in frequencies}
    left = room - sum(shared.values())
    groups = slots_in_least_time(fires, seconds, nbytes, left) if left > 0 else dict.fromkeys(frequencies, 0)
    hot = {layer: n * BUNDLE_GROUP for layer, n in groups.items()}
    if sum(float(seconds[layer][n]) for layer, n in groups.items()) > DIVIDED * time:
        return None
    all_neurons = {layer: len(frequencies[layer]) for layer, n in hot.items() if n == size[layer]}
    return all_neurons, {layer: n for layer, n in hot.items() if 0 < n < size[layer]}


def _alike(model: Model, layer: int) -> NDArray[np.float64]:
    """How often each expert of a layer is selected if none is preferred."""
    about = model.config.layers[layer].ffn
    assert isinstance(about, ExpertsConfig)
    return np.full(about.n_experts, about.router.top_k / about.n_experts)


def _expert_staging(model: Model, work: Workload, layers: Sequence[int], room: int) -> int:
    """Bytes of a buffer that streams experts of these layers; 0 if none is needed, there is little room, or the GPU
    has them in another type than the file."""
    every = {layer: model.expert_bytes(layer)[0] for layer in layers}
    if work.chunk <= kernels.FEW or sum(model.n_experts[layer] * each for layer, each in every.items()) <= room:
        return 0
    stays = (one.type == one.gpu_type != kernels.FACTORED for layer in layers for one in model.experts[layer])
    if not model.in_place or not all(stays):
        return 0
    size = expert_buffer(_largest_expert(model, layers), max(model.n_experts))
    return size if EXPERT_STAGED * staged_on_gpu(size) <= room else 0


def _largest_expert(model: Model, layers: Sequence[int]) -> list[int]:
    """Bytes on the GPU of each matrix of the largest expert of these layers."""
    largest = max(layers, key=lambda layer: model.expert_bytes(layer)[0])
    return [one.stored // model.n_experts[largest] for one in model.experts[largest]]


def fewer_experts_staged(model: Model, layers: int, staging: int) -> int:
    """Bytes of a buffer that holds half as many experts of the first layers as one of `staging` bytes; 0: less than
    one."""
    matrices = _largest_expert(model, [layer for layer in range(layers) if model.n_experts[layer]])
    experts = max(model.n_experts)
    held = experts_held(staging, matrices, experts)
    return expert_buffer(matrices, experts, held // 2) if held > 1 else 0


def _too_large(model: Model, gpu: Footprint, cpu: Footprint, ram: int, hardware: Hardware) -> RequestError:
    needed, beside = sum(cpu.values()), sum(gpu.values())
    if not hardware.key and ram == hardware.cpu.memory_bytes - hardware.cpu.reserved_bytes:
        mend = f"give --ram {gib(memory_leaving(needed, hardware.cpu))} or more: {hardware.name} has {gib(ram)} for it"
    elif needed > hardware.cpu.memory_bytes:
        types = "" if model.fingerprint else f"--dtype (weights of {model.weight_type} are assumed), "
        context = "a lower --context, " if needed - cpu["kv"] <= hardware.cpu.memory_bytes else ""
        mend = f"{hardware.name} has {gib(hardware.cpu.memory_bytes)} of RAM; what helps is {context}{types}"
        mend += "or another machine's --hardware"
    else:
        mend = f"give --ram {gib(needed)} or more beside {gib(beside)} of VRAM, not {gib(ram)}"
        mend += ", or more --vram" if cpu.get("experts") else ""
    experts = any(model.n_experts)
    parts = {"attention": ("attention",), "KV cache": ("kv",), "embedding and head": ("embedding", "head")}
    if experts:
        parts["experts and FFNs"] = ("experts", "panels", "ffn")
    sizes = {name: sum(held.get(use, 0) for held in (cpu, gpu) for use in uses) for name, uses in parts.items()}
    sizes["the rest"] = needed + beside - sum(sizes.values())
    what = "" if experts else " for the dense part"
    return RequestError(
        f"{model.name} needs at least {gib(needed + beside)} of RAM + VRAM{what}: {mend} "
        f"({', '.join(f'{name} {gib(size)}' for name, size in sizes.items())})"
    )


def _staging(model: Model, work: Workload, gpu_left: int, left: int) -> int:
    """Bytes of a staging buffer: the most with which all neurons still fit. 0 if no prompt needs one."""
    sizes = [-(-size // GROUP) for size in model.config.ffn_sizes]
    gpu_group, ram_group = GROUP * model.gpu_neuron, GROUP * model.bundle.pitch
    if work.chunk <= kernels.FEW:
        return 0
    limit = gpu_left // (STAGED * staged_on_gpu(1))
    while size := buffer_bytes(model.bundle, model.config.widest_ffn, limit):
        room = (gpu_left - staged_on_gpu(size)) // gpu_group + max(0, left - staged_in_ram(size)) // ram_group
        if room >= sum(sizes):
            return size
        limit = size // 2
    return 0


def staged_on_gpu(staging: int) -> int:
    """Bytes on the GPU for buffers of that size, and for a converted piece."""
    return (BUFFERS + 1) * staging


def staged_in_ram(staging: int) -> int:
    """The same in RAM."""
    return BUFFERS * staging


def staging_from_disk(model: Model, work: Workload, gpu_left: int, left: int) -> int:
    """Bytes of a staging buffer where not all neurons fit, which takes little of what is left of either memory; 0 if no
    prompt needs one."""
    if work.chunk <= kernels.FEW:
        return 0
    limit = min(gpu_left // (STAGED * staged_on_gpu(1)), left // (STAGED * staged_in_ram(1)))
    return buffer_bytes(model.bundle, model.config.widest_ffn, limit)


def staged_beside(model: Model, neurons: int) -> int:
    """Bytes on the GPU of the buffers for that number of bytes of neurons there."""
    limit = neurons // ((STAGED - 1) * staged_on_gpu(1))
    return staged_on_gpu(buffer_bytes(model.bundle, model.config.widest_ffn, limit))


def _panels(matrices: tuple[Matrix, ...]) -> int:
    return sum(one.panels for one in matrices)


def _stored(matrices: tuple[Matrix, ...]) -> int:
    return sum(one.stored for one in matrices)


def gib(nbytes: float) -> str:
    """Bytes as text, rounded up, in the format of the flags."""
    unit, name = next((pair for pair in _UNITS if nbytes >= pair[0]), (1, "B"))
    return f"{-int(-nbytes * 100 // unit) / 100:.2f}{name}".replace(".00", "")
