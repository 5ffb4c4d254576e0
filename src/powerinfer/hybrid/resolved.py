"""The outcome of deciding how a model is loaded, which is all that loading it depends on, and the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from powerinfer.config import EngineConfig
from powerinfer.devices.states import tokens_to_undo
from powerinfer.devices.wanted import gpu_names
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.kernels import cpu
from powerinfer.neurons import Indices
from powerinfer.sparsity.selection import DENSE, Selection

if TYPE_CHECKING:
    from powerinfer.placement.budget import Division, Workload
    from powerinfer.placement.disk import DiskPlan
    from powerinfer.placement.experts import Frequencies
    from powerinfer.placement.plan import Plan
    from powerinfer.placement.shapes import Model


@dataclass(frozen=True)
class UsedGpu:
    """The device beside the CPU. gpu: its name (`choose_device`), or those of several GPUs (`wanted_gpu`), None: there
    is none; reason: for people.
    spared: cores that automatic threads leave to the GPU's driver; the options have the threads that remain. chunk: of
    prompts, chosen for it, which the options have too; 0: not for it. first_chunk: chosen at first, before the GPU ran
    out of memory; 0: that one."""

    gpu: str | None = None
    reason: str = ""
    spared: int = 0
    chunk: int = 0
    first_chunk: int = 0


@dataclass(frozen=True)
class UsedPolicy:
    """The policy that says which experts the GPU has: a name of `placement.experts.EXPERT_POLICIES`, None: a trial
    chooses when the model is loaded; reason: for people."""

    name: str | None = "static"
    reason: str = "the default"


@dataclass(frozen=True)
class Placement:
    """The place of every part of a model.

    layers, head: the first layers, with their KV cache, and the head are on the GPU; draft: the draft head, too. plan:
    for their neurons or experts, None: these layers are dense. staging: bytes of a buffer through which the others
    stream for long prompts, 0: none; scratch: bytes of working memory on the GPU that experts or layers were placed by,
    None: an estimate. disk: what stays there, None: nothing. pages: of the KV cache on every device, None: as many as
    fit into the CPU's memory; kv_room: their limit in bytes then, None: no limit. firsts: of several GPUs the first
    layer of each, (): there is one; several: the plan over them, where one made that. refilled: neurons were placed
    anew, by what dense parts and steps took. spread: each layer's experts are on all of several GPUs.
    """

    layers: int = 0
    head: bool = False
    plan: Plan | None = None
    staging: int = 0
    scratch: int | None = None
    disk: DiskPlan | None = None
    pages: int | None = None
    kv_room: int | None = None
    draft: bool = False
    firsts: tuple[int, ...] = ()
    several: Plan | None = None
    refilled: bool = False
    spread: bool = False

    @property
    def neurons(self) -> Plan | None:
        """The plan, where it places neurons."""
        return None if self.plan is None or self.plan.claims.slots is not None else self.plan

    @property
    def frequencies(self) -> Frequencies | None:
        """Shares of the tokens that select each expert; None: not known."""
        return None if self.plan is None else self.plan.request.frequencies

    @property
    def experts(self) -> tuple[Indices, ...] | None:
        """The experts of each layer on the GPU, frequent ones first; None: the model has none, or they are not
        split."""
        if self.plan is None or self.plan.claims.slots is None:
            return None
        frequencies = self.frequencies

        def hot(layer: int, n: int) -> Indices:
            if frequencies is None or layer not in frequencies:
                return np.arange(n, dtype=np.int32)
            return np.argsort(-frequencies[layer], kind="stable")[:n].astype(np.int32)

        return tuple(hot(layer, n) for layer, n in enumerate(self.plan.claims.slots))

    @property
    def hot_neurons(self) -> dict[int, Indices]:
        """The neurons of each expert on the GPU, int32 [experts, some], ascending, of layers that are divided by these:
        those that fire most often."""
        if self.plan is None:
            return {}
        use = self.plan.request.model.inside
        return {layer: np.sort(use[layer].order[:, :n], axis=1) for layer, n in self.plan.claims.inside.items()}


@dataclass(frozen=True)
class Resolved:
    """All that loading a model depends on.

    engine: its options; selection: the selector with its prepared files; policy: over experts. vram: limit in bytes on
    the GPU without the driver, None: the device's memory. undo_tokens: as of `CpuExecutor`, None: what
    the options ask for.
    """

    checkpoint: Checkpoint
    engine: EngineConfig
    selection: Selection = DENSE
    device: UsedGpu = UsedGpu()
    placement: Placement = Placement()
    policy: UsedPolicy = UsedPolicy()
    vram: int | None = None
    undo_tokens: int | None = None

    @property
    def tokens_to_undo(self) -> int:
        """`undo_tokens`, known."""
        return tokens_to_undo(self.engine, self.checkpoint.config) if self.undo_tokens is None else self.undo_tokens

    @property
    def gpu(self) -> str:
        """The name of the GPU, where one is used."""
        assert self.device.gpu is not None
        return self.device.gpu

    @property
    def card_layers(self) -> list[tuple[str, int, int]]:
        """Each GPU by its name, with the first of its layers and their end."""
        firsts = self.placement.firsts or (0,)
        return list(zip(gpu_names(self.gpu), firsts, (*firsts[1:], self.placement.layers), strict=True))

    def with_chunk(self, tokens: int) -> Resolved:
        """The same with chunks of prompts that were chosen for its GPU."""
        if self.engine.prefill_chunk or tokens == self.engine.chunk:
            return self
        engine, device = replace(self.engine, prefill_chunk=tokens), replace(self.device, chunk=tokens)
        return replace(self, engine=engine, device=device)

    def with_fewer_tokens(self, tokens: int) -> Resolved:
        """The same with shorter chunks of prompts than were chosen for its GPU."""
        assert 0 < tokens < self.device.chunk
        first = self.device.first_chunk or self.device.chunk
        device = replace(self.device, chunk=tokens, first_chunk=first)
        return replace(self, engine=replace(self.engine, prefill_chunk=tokens), device=device)

    def placed(self, **changes: object) -> Resolved:
        """The same with changes of the placement."""
        return replace(self, placement=replace(self.placement, **changes))  # type: ignore[arg-type]


class Needs(NamedTuple):
    """Bytes that a load takes: ram, with the KV cache of one context; kv: for each further one; vram."""

    ram: int
    kv: int = 0
    vram: int = 0


def needs(resolved: Resolved) -> Needs:
    """The memory that the load takes, as the budgets count it."""
    from powerinfer.hardware.description import SIZES_ALONE
    from powerinfer.hardware.measure import measured
    from powerinfer.placement.budget import (
        in_ram,
        on_gpu,
        staged_in_ram,
        staged_on_gpu,
        streamed_in_ram,
        streamed_on_gpu,
    )
    from powerinfer.placement.several import bytes_to_exchange

    engine, selection, placement = resolved.engine, resolved.selection, resolved.placement
    disk, layers, staging = placement.disk, placement.layers, placement.staging
    if disk is not None and not layers:
        return Needs(sum(disk.held.values()))
    whole_plan = placement.several or placement.neurons
    if whole_plan is not None:
        placed = whole_plan.bytes
        moves = placement.experts is not None and resolved.policy.name != "static"
        cached, sent = bytes_to_exchange(whole_plan) if moves else (0, 0)
        return Needs(sum(placed["cpu"].values()) + cached, 0, sum(placed["gpu"].values()) + sent)
    model = model_of(resolved)
    if not layers:
        return Needs(ram_bytes(model, engine, selection), kv_bytes(model, engine))
    hardware = measured(engine, gpu=resolved.gpu, types=SIZES_ALONE)
    work, division = replace(workload(model, engine), scratch=placement.scratch), division_of(resolved)
    ram = sum((in_ram(model, work, division) if disk is None else disk.held).values())
    vram = sum(on_gpu(model, hardware, work, division, dense=True).values())
    if placement.experts is None:
        more = streamed_on_gpu(model, work, layers, staging) if staging else 0
        return Needs(ram + streamed_in_ram(model, work, layers, staging), 0, vram + more)
    return Needs(ram + staged_in_ram(staging), 0, vram + staged_on_gpu(staging))


def kept_on_gpus(resolved: Resolved) -> list[int]:
    """Bytes of weights and caches on each GPU, as the budgets count them."""
    from powerinfer.placement.budget import kept_on_gpu

    placement, beside = resolved.placement, ("runtime", "scratch", "staging")
    plans = [placement.neurons] if placement.several is None else [part.plan for part in placement.several.parts]
    if plans != [None]:
        footprints = [plan.bytes["gpu"] for plan in plans if plan is not None]
        return [sum(nbytes for use, nbytes in one.items() if use not in beside) for one in footprints]
    model = model_of(resolved)
    footprint = kept_on_gpu(model, workload(model, resolved.engine), _division(resolved), dense=True)
    return [sum(footprint.values())]


def division_of(resolved: Resolved) -> Division:
    """The part of the model that the GPU has."""
    from powerinfer.hardware.description import SIZES_ALONE
    from powerinfer.hardware.measure import measured

    return _division(resolved, measured(resolved.engine, gpu=resolved.gpu, types=SIZES_ALONE).host_bytes)


def _division(resolved: Resolved, host_bytes: int = 0) -> Division:
    from powerinfer.placement.budget import Division

    placement, experts = resolved.placement, resolved.placement.experts
    slots = None if experts is None else tuple(map(len, experts))
    cached = experts is not None and resolved.policy.name != "static"
    inside = {} if placement.plan is None else placement.plan.claims.inside
    return Division(placement.layers, placement.head, slots, cached, host_bytes, inside, placement.draft)


def model_of(resolved: Resolved) -> Model:
    """The model as the selector has its weights."""
    from powerinfer.placement.shapes import checkpoint_model, skipping_model

    checkpoint, selection, prepared = resolved.checkpoint, resolved.selection, resolved.engine.prepared
    model = checkpoint_model(checkpoint, prepared, fresh=selection.bundles is None)
    if not selection.in_experts:
        return model
    rows, predicted = selection.expert_rows is not None, selection.predictors is not None
    return skipping_model(model, checkpoint, prepared, predicted, rows, selection.on_gpu)


def ram_bytes(model: Model, engine: EngineConfig, selection: Selection = DENSE) -> int:
    """Bytes of RAM that the model takes without a GPU, with the KV cache of one context."""
    from powerinfer.placement.budget import least_ram

    return least_ram(model, workload(model, engine, selection.selector))


def fits(model: Model, engine: EngineConfig, ram: int, selection: Selection = DENSE) -> bool:
    """Whether so much RAM holds that."""
    return ram_bytes(model, engine, selection) <= ram


def workload(model: Model, engine: EngineConfig, selector: str = "all") -> Workload:
    """The settings of a load that memory depends on. selector: what one inside experts takes is part of the model."""
    from powerinfer.placement.budget import Workload

    selector = selector if model.config.whole_reason is None else "all"
    context, undo = context_of(model, engine), tokens_to_undo(engine, model.config)
    sizes = engine.kv_type, context, engine.chunk, engine.max_batch
    drafts = engine.drafts_for(model.config)
    return Workload(*sizes, selector=selector, undo_tokens=undo, drafts=drafts)


def kv_bytes(model: Model, engine: EngineConfig) -> int:
    """Bytes of the KV cache of one context."""
    return model.kv_bytes(engine.kv_type, context_of(model, engine), 1)


def context_of(model: Model, engine: EngineConfig) -> int:
    """Tokens of a context."""
    return engine.context or model.config.context_length


def pages_of(model: Model, engine: EngineConfig) -> int:
    """Pages of the KV cache of one context, shared by all requests."""
    return -(-context_of(model, engine) // cpu.PAGE)


def experts_said(experts: Sequence[Indices], total: int, divided: int = 0) -> str:
    """The number of experts on the GPU, for people; divided: layers of which it has some neurons of each."""
    more = f", and hot neurons of those of {divided} layers" if divided else ""
    return f"{sum(map(len, experts))} of {total} experts{more}"
