"""How a model is loaded: selector, prepared files, plan and devices, decided once before its weights are read.

With bundles, and a profile that says which neurons are hot, the plan of `placement` decides under the budgets. Without
them whole layers are placed on the GPU, as many as fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from powerinfer.config import EngineConfig
from powerinfer.devices.wanted import UNUSED_VRAM, lacks_torch, wanted_gpu
from powerinfer.errors import PowerInferError, RamError, RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.kernels import cpu
from powerinfer.neurons import Indices
from powerinfer.progress import Progress, Say, silent
from powerinfer.sparsity.selection import DENSE, Selection, select

if TYPE_CHECKING:
    from powerinfer.hardware.description import Hardware
    from powerinfer.placement.budget import Workload
    from powerinfer.placement.disk import DiskPlan
    from powerinfer.placement.disk_speed import Prediction
    from powerinfer.placement.experts import Frequencies
    from powerinfer.placement.plan import Plan, PlanRequest
    from powerinfer.placement.shapes import Model

NOT_USED = "the GPU is not used: {}"

_MOST_GROWTH = 8  # of weights as they are loaded: types without kernels become others
_SHORT = 256  # tokens: a shorter context is not suggested


@dataclass(frozen=True)
class Resolved:
    """All that loading a model depends on.

    selection: the selector with its prepared files. gpu: name of the device (`choose_device`), None: the CPU alone;
    why: the reason for the devices, for people. gpu_layers, gpu_head: the first layers, with their KV cache, and the
    head are on the GPU. plan: places single neurons; None: layers on the GPU are dense. pages: of the KV cache on
    every device, None: as many as fit into the CPU's memory; kv_room: their limit in bytes then, None: no limit. vram:
    limit in bytes on the GPU without the driver, None: the device's memory. experts: for each layer those on the GPU,
    None: the model has none, or they are not split; frequencies: of experts, None: not known; staging: bytes of a
    buffer that streams the others, or matrices of the other layers, there for long prompts, 0: none. policy: says which
    experts the GPU has, a name of `placement.experts.EXPERT_POLICIES`, None: a trial chooses when the model is loaded;
    why_policy: for people. disk: what stays there, None: nothing; disk_speed: how fast that is, None: the machine was
    not measured; whole_context: the longest --context with which nothing would stay there, None: there is none worth
    it; whole_dense: nothing would stay there with --selector all. by_predictors: bytes of dense weights that a step
    reads with --selector predicted, None: there are no predictors, or that is more than half of what it reads now.
    spared: cores that automatic threads leave to the GPU's driver; engine has the threads that remain. scratch: bytes
    of working memory that experts were placed by, None: an estimate.
    """

    checkpoint: Checkpoint
    engine: EngineConfig
    selection: Selection = DENSE
    gpu: str | None = None
    why: str = ""
    gpu_layers: int = 0
    gpu_head: bool = False
    plan: Plan | None = None
    pages: int | None = None
    kv_room: int | None = None
    vram: int | None = None
    experts: tuple[Indices, ...] | None = None
    frequencies: Frequencies | None = None
    staging: int = 0
    policy: str | None = "static"
    why_policy: str = "the default"
    disk: DiskPlan | None = None
    disk_speed: Prediction | None = None
    whole_context: int | None = None
    whole_dense: bool = False
    by_predictors: int | None = None
    spared: int = 0
    scratch: int | None = None


def resolve(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress = silent, say: Say = silent) -> Resolved:
    """Decide how a model is loaded, from its headers and what is prepared for it. No weights are read.

    say: told where a GPU, a budget for one, or a policy for what is on disk is not used.
    RequestError for options that cannot be met, ModelError for prepared files that do not suit the model,
    PowerInferError when a GPU that was requested by name cannot be used.
    """
    resolved = _resolve(checkpoint, engine, progress, say)
    if engine.adjust and engine.expert_policy not in ("static", "auto"):
        raise RequestError(f"--expert-policy {engine.expert_policy} moves experts by itself: leave out --adjust")
    if engine.adjust and resolved.plan is not None and resolved.disk is not None:
        raise RequestError("--adjust moves neurons between devices, and some of them rest on disk: leave it out")
    if engine.adjust and resolved.plan is None and resolved.experts is None:
        raise RequestError("--adjust is for models whose neurons or experts are split between a GPU and the CPU")
    if engine.expert_policy not in ("static", "auto") and resolved.experts is None:
        raise RequestError(f"--expert-policy {engine.expert_policy} is for experts on a GPU: leave it out")
    on_disk = None if resolved.disk is None else resolved.disk.about
    if engine.disk_policy != EngineConfig.disk_policy and not (on_disk and (on_disk.experts or on_disk.neurons)):
        say(f"--disk-policy {engine.disk_policy} is not used: neither experts nor neurons stay on disk")
    return _with_policy(resolved)


def _with_policy(resolved: Resolved) -> Resolved:
    """With the policy over experts that was asked for or, for `auto`, chosen earlier. Others than `static` need all
    experts in RAM, as a GGUF file has them."""
    engine, checkpoint, experts = resolved.engine, resolved.checkpoint, resolved.experts
    if experts is None:
        return resolved
    if engine.expert_policy != "auto":
        asked = "the default" if engine.expert_policy == "static" else "asked for: --expert-policy"
        return replace(resolved, policy=engine.expert_policy, why_policy=asked)
    from powerinfer.placement.budget import gib
    from powerinfer.system import available_memory

    here, every = sum(map(len, experts)), sum(checkpoint.config.experts[at].n_experts for at in _split_layers(resolved))
    tried = replace(resolved, policy=None)
    needed = needs(tried).ram
    short = f"others need all experts in RAM too, {gib(needed)} with all else"
    why: str | None = None
    if here in (0, every):
        why = "all experts are on the GPU" if here else "no expert is on the GPU"
    elif engine.adjust:
        why = "--adjust moves experts between requests"
    elif resolved.disk is not None:
        why = "others would read experts from disk for the GPU, beside those that are computed"
    elif not checkpoint.path.is_file() or not _experts_in_file(resolved):
        why = "others need experts as a GGUF file has them, without --quantize or types IQ1 to IQ3"
    elif engine.ram is not None and needed > engine.ram:
        why = short
    elif not engine.trial:
        why = "--no-trial: nothing was measured"
    if why is not None:
        return replace(resolved, policy="static", why_policy=why)
    from powerinfer.hybrid.policy_trial import chosen, policy_trial

    # Only a trial depends on the memory that is free at the moment: else bits would change from run to run.
    room = not 0 < available_memory() < needed
    outcome = policy_trial(tried).find(anew=room)
    if outcome is not None:
        policy, why = chosen(outcome)
        return replace(resolved, policy=policy, why_policy=why)
    return tried if room else replace(resolved, policy="static", why_policy=f"{short}: not tried")


def _experts_in_file(resolved: Resolved) -> bool:
    """Whether those of the layers on the GPU are used as the file has them."""
    checkpoint, config = resolved.checkpoint, resolved.checkpoint.config
    names = (f"layers.{at}.experts_{part}" for at in _split_layers(resolved) for part in config.experts[at].matrices)
    return all(map(checkpoint.as_stored, names))


def _split_layers(resolved: Resolved) -> list[int]:
    """Layers on the GPU that have experts."""
    return [layer for layer in resolved.checkpoint.config.experts if layer < resolved.gpu_layers]


def _resolve(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress, say: Say) -> Resolved:
    selection = select(checkpoint, engine)
    name, why = wanted_gpu(engine)
    if name is not None:
        try:
            found = _beside_gpu(checkpoint, engine, selection, name, progress)
        except PowerInferError as error:
            if engine.gpu != "auto":
                raise
            found = str(error)
        if isinstance(found, Resolved):
            return found
        why = found
        say(NOT_USED.format(why))
    elif engine.vram:
        say(UNUSED_VRAM.format(why))
    elif engine.gpu == "auto" and engine.vram is None and lacks_torch():
        say(NOT_USED.format(why))
    return _on_cpu(Resolved(checkpoint, engine, selection, why=why))


class Needs(NamedTuple):
    """Bytes that a load takes: ram, with the KV cache of one context; kv: for each further one; vram."""

    ram: int
    kv: int = 0
    vram: int = 0


def needs(resolved: Resolved) -> Needs:
    """What the load that was resolved takes, as the budgets count it."""
    from powerinfer.hardware.measure import measured
    from powerinfer.placement.budget import (
        in_ram,
        on_gpu,
        staged_in_ram,
        staged_on_gpu,
        streamed_in_ram,
        streamed_on_gpu,
    )

    checkpoint, engine, selection = resolved.checkpoint, resolved.engine, resolved.selection
    if resolved.disk is not None and resolved.gpu is None:
        return Needs(sum(resolved.disk.held.values()))
    if resolved.plan is not None:
        placed = resolved.plan.bytes
        return Needs(sum(placed["cpu"].values()), 0, sum(placed["gpu"].values()))
    model = _model(checkpoint, engine, selection)
    if resolved.gpu is None:
        return Needs(_ram_bytes(model, engine, selection), _kv_bytes(model, engine))
    hardware, work = (
        measured(engine, gpu=resolved.gpu),
        replace(_workload(model, engine, "all"), scratch=resolved.scratch),
    )
    layers, head = resolved.gpu_layers, resolved.gpu_head
    slots = None if resolved.experts is None else [len(own) for own in resolved.experts]
    cached = resolved.policy != "static"
    ram = sum(in_ram(model, work, layers, head, hardware.host_bytes, slots=slots, cached=cached).values())
    if resolved.disk is not None:
        ram = sum(resolved.disk.held.values())
    vram = sum(on_gpu(model, hardware, work, layers, head, True, slots).values())
    if resolved.experts is None:
        more = streamed_on_gpu(model, work, layers, resolved.staging) if resolved.staging else 0
        return Needs(ram + streamed_in_ram(model, work, layers, resolved.staging), 0, vram + more)
    return Needs(ram + staged_in_ram(resolved.staging), 0, vram + staged_on_gpu(resolved.staging))


def _model(checkpoint: Checkpoint, engine: EngineConfig, selection: Selection) -> Model:
    """The model as the selector has its weights."""
    from powerinfer.placement.shapes import checkpoint_model

    model = checkpoint_model(checkpoint, engine.prepared, fresh=selection.bundles is None)
    return model.by_neuron(selection.predictors is not None) if selection.in_experts else model


def without_gpu(resolved: Resolved, why: str) -> Resolved:
    """The same on the CPU alone. why: the reason, for people. RequestError if --ram is too little for that."""
    checkpoint, engine = resolved.checkpoint, resolved.engine
    if resolved.spared:
        engine = replace(engine, threads=0)
    return _on_cpu(Resolved(checkpoint, engine, select(checkpoint, engine), why=why))


def with_fewer_layers(resolved: Resolved) -> Resolved | None:
    """Without buffers for long prompts, if there are any; without the head on the GPU; or, if that is not there, one
    layer less. None if one layer is left.

    Only where layers are on the GPU as a whole. RequestError if --ram does not hold the rest.
    """
    from powerinfer.hardware.measure import measured
    from powerinfer.placement.shapes import checkpoint_model

    assert resolved.plan is None and resolved.gpu is not None
    if resolved.staging:
        return replace(resolved, staging=0)
    layers = resolved.gpu_layers - (not resolved.gpu_head)
    if not layers:
        return None
    fewer = replace(resolved, gpu_layers=layers, gpu_head=False)
    model = checkpoint_model(resolved.checkpoint, resolved.engine.prepared, fresh=True)
    return _within_ram(fewer, model, measured(resolved.engine, gpu=resolved.gpu))


def with_fewer_experts(resolved: Resolved) -> Resolved | None:
    """Without buffers for long prompts, if there are any; or with an eighth fewer on the GPU, at least one. None if
    there are none. RequestError if --ram does not hold the rest, and it may not stay on disk."""
    from powerinfer.hardware.measure import measured
    from powerinfer.placement.budget import gib
    from powerinfer.placement.disk import plan_disk, within
    from powerinfer.placement.experts import fewer_slots
    from powerinfer.system import available_memory

    assert resolved.experts is not None
    if resolved.staging:
        return replace(resolved, staging=0)
    if not any(len(own) for own in resolved.experts):
        return None
    sizes = {layer: one.n_experts for layer, one in resolved.checkpoint.config.experts.items()}
    kept = fewer_slots({layer: len(resolved.experts[layer]) for layer in sizes}, sizes)
    experts = tuple(own[: kept.get(layer, 0)] for layer, own in enumerate(resolved.experts))
    every = sum(sizes.values())
    fewer = replace(resolved, experts=experts, why=_how_many(experts, every), disk=None)
    engine, checkpoint = resolved.engine, resolved.checkpoint
    ram = engine.ram
    if ram is None and resolved.disk is not None:
        ram = within(available_memory())
    if ram is None or (needed := needs(fewer).ram) <= ram:
        return fewer
    if resolved.policy is None:
        static = replace(resolved, policy="static", why_policy="others need more RAM than there is")
        return with_fewer_experts(static)
    if engine.disk == "none":
        raise RequestError(f"the experts that --vram does not hold need {gib(needed)} of RAM: give --ram {gib(needed)}")
    model, hardware = _model(checkpoint, engine, resolved.selection), measured(engine, gpu=resolved.gpu)
    disk = plan_disk(
        model,
        _workload(model, engine, "all"),
        ram,
        cpu.choose_threads(engine.threads)[0],
        first=resolved.gpu_layers,
        head=resolved.gpu_head,
        host_bytes=hardware.host_bytes,
        slots=[len(own) for own in experts],
        cached=resolved.policy != "static",
        whole=needed,
    )
    return replace(fewer, disk=disk)


def with_scratch(resolved: Resolved, nbytes: int) -> Resolved:
    """With experts placed by that much working memory on the GPU. RequestError where that cannot be."""
    from powerinfer.hardware.measure import measured

    checkpoint, engine = resolved.checkpoint, resolved.engine
    request = _planned(resolved, _model(checkpoint, engine, resolved.selection))
    other = replace(resolved, scratch=nbytes, disk=None)
    found = _split_experts(other, request, measured(engine, gpu=resolved.gpu))
    if isinstance(found, str):
        raise RequestError(found)
    return replace(found, vram=resolved.vram)


def estimated_scratch(resolved: Resolved) -> int:
    """Bytes of working memory on the GPU that experts are placed by where nothing was measured."""
    return needs(replace(resolved, scratch=None)).vram - needs(replace(resolved, scratch=0)).vram


def _how_many(experts: Sequence[Indices], every: int) -> str:
    return f"{sum(map(len, experts))} of {every} experts"


# ---------------------------------------------------------------- the CPU alone


def _on_cpu(resolved: Resolved) -> Resolved:
    """The same within --ram, or within the free memory if that does not hold the model; `auto` does not use bundles if
    the model fits without them."""
    from powerinfer.system import available_memory

    checkpoint, engine, selection = resolved.checkpoint, resolved.engine, resolved.selection
    ram, free = engine.ram, available_memory()
    if ram is None and not 0 < free < _MOST_GROWTH * checkpoint.file_bytes:
        return resolved
    model = _model(checkpoint, engine, selection)
    if ram is None:
        return _within_free_memory(resolved, model, free)
    beside = selection.bundles is not None and engine.selector == "auto"
    dense = engine.disk == "none" or _ram_bytes(model, engine) <= ram
    if beside and dense and _ram_bytes(model, engine, selection) > ram:
        selection = select(checkpoint, engine, "--ram does not hold bundles beside the dense weights")
    total, kv = _ram_bytes(model, engine, selection), _kv_bytes(model, engine)
    if total <= ram:
        return replace(resolved, selection=selection, kv_room=ram - total + kv if engine.ram else None)
    if engine.disk == "none":
        raise _too_little_ram(checkpoint, engine, selection, model, total)
    placed = _on_disk(resolved, model, ram, whole=total)
    context, fits = _whole_context(placed, model, ram), selection.bundles is not None and dense
    return replace(
        placed, kv_room=kv, disk_speed=_disk_speed(placed, model, ram), whole_context=context, whole_dense=fits
    )


def _within_free_memory(resolved: Resolved, model: Model, free: int) -> Resolved:
    """The same without --ram: with what the free memory does not hold on disk. The KV cache of a context that was not
    asked for takes memory as it fills, so little of it counts. RequestError if a container holds not even that."""
    from powerinfer.placement.disk import within

    engine = resolved.engine
    short = replace(engine, context=engine.context or min(_SHORT, model.config.context_length))
    whole = _ram_bytes(model, short)
    if whole <= free:
        return resolved

    def place(ram: int) -> Resolved:
        placed = _on_disk(replace(resolved, engine=short), model, ram)
        context = _whole_context(placed, model, ram) if engine.context else None
        return replace(placed, engine=engine, disk_speed=_disk_speed(placed, model, ram), whole_context=context)

    return _placed_within(place, model, None if engine.disk == "none" else within(free), whole) or resolved


def _placed_within(place: Callable[[int], Resolved], model: Model, ram: int | None, whole: int) -> Resolved | None:
    """What `place` makes of `ram`, None: nothing may stay on disk. Where that is too little a container gets what takes
    least memory; elsewhere, and where it holds all of the model, None: the system may still find the memory.

    RequestError where a container does not hold the least: it would kill the process. whole: bytes that hold the model.
    """
    from powerinfer.placement.budget import gib
    from powerinfer.system import container_memory

    least, limit = whole, container_memory()
    try:
        if ram is not None:
            return place(ram)
    except RamError as error:
        least = min(whole, error.least)
    except RequestError:  # parts of this model cannot stay on disk
        pass
    if limit is None or whole <= limit:
        return None
    if least < whole and least <= limit:
        return place(least)
    disk = "" if least == whole else " even if its weights stay on disk"
    raise RamError(
        f"{model.name} needs {gib(least)} of RAM{disk}, and this container leaves it {gib(limit)}: give the container "
        "more memory, or a lower --context or --prefill-chunk, or take a smaller model",
        least,
    )


def _on_disk(resolved: Resolved, model: Model, ram: int, host_bytes: int = 0, whole: int | None = None) -> Resolved:
    """The same with what does not fit into `ram` on disk. RequestError if the rest does not fit; `auto` does not use
    bundles then, nor where dense weights are read in less time. host_bytes: of a GPU's libraries; whole: bytes that
    hold the model."""
    from powerinfer.placement.disk import better_densely

    if resolved.selection.bundles is None or resolved.engine.selector != "auto":
        return _planned_on_disk(resolved, model, ram, host_bytes, whole)

    def densely(why: str) -> Resolved:
        dense = replace(resolved, selection=select(resolved.checkpoint, resolved.engine, why))
        fits = None if whole is None else _ram_bytes(model, resolved.engine)
        return _planned_on_disk(dense, model, ram, host_bytes, fits)

    placed = None
    with suppress(RequestError):
        placed = _planned_on_disk(resolved, model, ram, host_bytes, whole)
    if placed is None:
        return densely("RAM does not hold what bundles on disk need")
    dense, chosen = None, placed
    with suppress(RequestError):
        dense = densely("dense weights are read in less time than single neurons")
    if dense is not None and placed.disk is not None and better_densely(dense.disk, placed.disk):
        why = dense.selection.why if dense.disk else "RAM does not hold bundles beside the dense weights"
        chosen = replace(dense, selection=replace(dense.selection, why=why))
    neurons = placed.disk is not None and placed.disk.about.neurons
    return replace(chosen, by_predictors=_by_predictors(chosen, ram, host_bytes) if neurons else None)


def _by_predictors(chosen: Resolved, ram: int, host_bytes: int) -> int | None:
    """`Resolved.by_predictors`: `auto` is exact, or dense, so it is for the user to choose them."""
    if chosen.disk is None:
        return None
    engine = replace(chosen.engine, selector="predicted")
    with suppress(PowerInferError):  # none are prepared, or RAM does not hold them
        selection = select(chosen.checkpoint, engine)
        model = _model(chosen.checkpoint, engine, selection)
        other = replace(chosen, engine=engine, selection=selection)
        plan = _planned_on_disk(other, model, ram, host_bytes, None).disk
        if plan is None or 2 * plan.streamed >= chosen.disk.streamed:
            return None
        if plan.reading is None or chosen.disk.reading is None or plan.reading < chosen.disk.reading:
            return plan.streamed
    return None


def _planned_on_disk(resolved: Resolved, model: Model, ram: int, host_bytes: int, whole: int | None) -> Resolved:
    from powerinfer.formats.prepared import PROFILE, PreparedFile
    from powerinfer.formats.profile_file import open_profile
    from powerinfer.placement.disk import plan_disk

    engine, selection, checkpoint = resolved.engine, resolved.selection, resolved.checkpoint
    bundled, profile = selection.bundles is not None, None
    if bundled and PreparedFile(PROFILE, checkpoint, engine.prepared).exists():
        profile = open_profile(checkpoint, engine.prepared)
    work = _workload(model, engine, selection.selector if bundled else "all")
    threads, _ = cpu.choose_threads(engine.threads)
    first = resolved.gpu_layers
    plan = plan_disk(
        model, work, ram, threads, bundled, first=first, host_bytes=host_bytes, whole=whole, profile=profile
    )
    return replace(resolved, disk=plan if plan.about.anything else None)


def _disk_speed(resolved: Resolved, model: Model, ram: int) -> Prediction | None:
    """How fast the model decodes, as `powerinfer plan` says it; None if the machine, or how often neurons fire, is not
    known."""
    from powerinfer.formats.prepared import PROFILE, PreparedFile
    from powerinfer.formats.profile_file import open_profile
    from powerinfer.hardware.measure import known
    from powerinfer.placement.plan import make_plan
    from powerinfer.placement.request import Subject, even_profile, expert_subject

    checkpoint, engine = resolved.checkpoint, resolved.engine
    hardware = None if resolved.disk is None else known(engine)
    if resolved.disk is None or hardware is None or hardware.disk is None:
        return None
    if any(model.n_experts):
        subject = expert_subject(model, checkpoint, engine.prepared)
    elif not resolved.disk.about.neurons:
        subject = Subject(model, even_profile(model), "all")
    elif PreparedFile(PROFILE, checkpoint, engine.prepared).exists():
        subject = Subject(model, open_profile(checkpoint, engine.prepared), resolved.selection.selector)
    else:
        return None
    with suppress(RequestError):  # --ram is more than the machine has
        return make_plan(subject.request(hardware, replace(engine, ram=ram, gpu="none"))).from_disk
    return None


def _ram_bytes(model: Model, engine: EngineConfig, selection: Selection | None = None) -> int:
    """Bytes of RAM that the model takes with the KV cache of one context. selection: None: every neuron is computed."""
    from powerinfer.placement.budget import least_ram

    more = 0 if selection is None else selection.in_experts_bytes
    return more + least_ram(model, _workload(model, engine, "all" if selection is None else selection.selector))


def _workload(model: Model, engine: EngineConfig, selector: str) -> Workload:
    """selector: one inside experts takes the memory of its predictors alone."""
    from powerinfer.placement.budget import Workload

    context = _context(model, engine)
    selector = selector if model.config.why_whole is None else "all"
    return Workload(engine.kv_type, context, engine.prefill_chunk, engine.max_batch, selector=selector)


def _kv_bytes(model: Model, engine: EngineConfig) -> int:
    return model.kv_bytes(engine.kv_type, _context(model, engine), 1)


def _context(model: Model, engine: EngineConfig) -> int:
    return engine.context or model.config.context_length


def _whole_context(placed: Resolved, model: Model, ram: int, host_bytes: int = 0) -> int | None:
    """The longest context, in whole pages, with which nothing stays on disk; None where nothing does, or where that is
    too short to be suggested. placed: by `_on_disk`, with these arguments."""
    engine, selection = placed.engine, placed.selection
    if placed.disk is None:
        return None

    def too_long(pages: int) -> bool:
        shorter = replace(engine, context=pages * cpu.PAGE)
        if engine.selector != "auto" and selection.bundles is not None:
            return _ram_bytes(model, shorter, selection) > ram
        if not placed.gpu_layers and _ram_bytes(model, shorter) <= ram:
            return False
        try:
            dense = replace(placed, engine=shorter, selection=DENSE)
            return _on_disk(dense, model, ram, host_bytes).disk is not None
        except RequestError:
            return True

    context = _context(model, engine)
    tokens = bisect_left(range(1, context // cpu.PAGE), True, key=too_long) * cpu.PAGE
    return tokens if tokens >= min(context // 2, _SHORT) else None


def _too_little_ram(
    checkpoint: Checkpoint, engine: EngineConfig, selection: Selection, model: Model, total: int
) -> RequestError:
    """The error for a --ram too small for one context, with what would help."""
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.placement.budget import gib
    from powerinfer.placement.shapes import checkpoint_model

    ram, context, kv = engine.ram or 0, _context(model, engine), _kv_bytes(model, engine)
    helps = [f"give --ram {gib(total)}"]
    page = model.kv_bytes(engine.kv_type, 1, 1)
    tokens = (ram - total + kv) // page * cpu.PAGE
    if tokens >= min(context // 2, _SHORT):
        helps.append(f"--context {tokens}")
    if _ram_bytes(model, replace(engine, kv_type="q8_0"), selection) <= ram:
        helps.append("--kv-type q8_0")
    if _ram_bytes(model, engine) <= ram:
        helps.append("--selector all")
    for kind in ("q8_0", "q4_0") if engine.quantize is None else ():
        with suppress(PowerInferError):  # nothing to quantise
            smaller = checkpoint_model(open_checkpoint(checkpoint.path, quantize=kind), engine.prepared, fresh=True)
            if _ram_bytes(smaller, engine) <= ram:
                helps.append(f"--quantize {kind}")
                break
    if len(helps) == 1:
        helps.append("a smaller model, or one in fewer bits")
    return RequestError(
        f"{model.name} needs {gib(total)} of RAM, {gib(kv)} of it for a context of {context} tokens, and --ram is "
        f"{gib(ram)}: {', or '.join(helps)}"
    )


# ---------------------------------------------------------------- beside a GPU


def _beside_gpu(
    checkpoint: Checkpoint, engine: EngineConfig, selection: Selection, gpu: str, progress: Progress
) -> Resolved | str:
    """What is placed where; the reason if the GPU is not used."""
    from powerinfer.devices.torch_device import choose_device
    from powerinfer.formats.prepared import PROFILE, PreparedFile
    from powerinfer.hardware.measure import measured

    if selection.in_experts and selection.predictors is not None:
        raise RequestError("predictors select inside experts on the CPU alone so far: leave out --gpu or --selector")
    choose_device(gpu)
    whole = checkpoint.config.why_not_split
    if selection.bundles is not None and whole is not None:
        if engine.selector != "auto":
            raise RequestError(f"--selector {engine.selector}: {whole}: leave out --selector, or use --gpu none")
        selection = select(checkpoint, engine, whole)
    profile = PreparedFile(PROFILE, checkpoint, engine.prepared)
    if selection.bundles is not None and not profile.exists():
        if engine.selector != "auto":
            raise RequestError(
                f"which neurons are hot is not known: `{profile.command}` finds out, or leave --selector"
            )
        lacking = f"no profile says which neurons are hot; {profile.command} makes it"
        selection = select(checkpoint, engine, lacking)
    model = _model(checkpoint, engine, selection)
    pages = -(-_context(model, engine) // cpu.PAGE)  # one full context, shared by all requests
    spared, engine = cpu.spared_cores(engine.threads, gpu), cpu.beside_gpu(engine, gpu)
    resolved = Resolved(checkpoint, engine, selection, gpu, pages=pages, spared=spared)
    place: Callable[[Hardware], Resolved | str]
    check: Callable[[Hardware], object]
    if any(model.n_experts):
        of_experts = _planned(resolved, model)
        place, check = partial(_split_experts, resolved, of_experts), lambda memories: of_experts(memories).claims()
    elif selection.bundles is None:
        place = check = partial(_whole_layers, resolved, model)
    else:
        request = _planned(resolved, model)
        place, check = partial(_split_neurons, resolved, request), lambda memories: request(memories).claims()
    hardware = measured(engine, progress, gpu=gpu, check=check)
    assert hardware.gpu is not None
    found = place(hardware)
    if isinstance(found, str) or engine.vram is None:
        return found
    return replace(found, vram=engine.vram - hardware.gpu.reserved_bytes)


def _whole_layers(resolved: Resolved, model: Model, hardware: Hardware) -> Resolved:
    """The first layers on the GPU, as many as fit into --vram. RequestError if none does."""
    from powerinfer.placement.budget import budgets, no_layer_fits, whole_layers

    engine = resolved.engine
    work, (vram, _) = _workload(model, engine, "all"), budgets(hardware, engine.vram, engine.ram)
    layers, head, staging = whole_layers(model, hardware, work, vram)
    if not layers:
        raise no_layer_fits(model, hardware, work, vram, dense=True)
    why = f"whole layers ({resolved.selection.why})"
    placed = replace(resolved, gpu_layers=layers, gpu_head=head, why=why, staging=staging)
    return _within_ram(placed, model, hardware)


def _within_ram(resolved: Resolved, model: Model, hardware: Hardware) -> Resolved:
    """The same within --ram or the free memory, without the buffers for long prompts or with what that does not hold on
    disk, where layers are on the GPU as a whole. RequestError if --ram does not hold the rest."""
    from powerinfer.placement.budget import gib, in_ram, streamed_in_ram

    engine, layers, head, ram = resolved.engine, resolved.gpu_layers, resolved.gpu_head, resolved.engine.ram
    if ram is None:
        return _layers_in_free_memory(resolved, model, hardware)
    work = _workload(model, engine, "all")
    needed = sum(in_ram(model, work, layers, head, hardware.host_bytes).values())
    if needed + streamed_in_ram(model, work, layers, resolved.staging) <= ram:
        return replace(resolved, disk=None)
    resolved = replace(resolved, staging=0)
    if needed <= ram:
        return replace(resolved, disk=None)
    if engine.disk != "none" and not head:
        placed = _on_disk(resolved, model, ram, hardware.host_bytes)
        return replace(placed, whole_context=_whole_context(placed, model, ram, hardware.host_bytes))
    held = "layer" if layers == 1 else f"{layers} layers"
    raise RequestError(
        f"{model.name} needs {gib(needed)} of RAM beside the {held} that --vram holds: give --ram "
        f"{gib(needed)}, or more --vram"
    )


def _layers_in_free_memory(resolved: Resolved, model: Model, hardware: Hardware) -> Resolved:
    """As `_within_free_memory`, beside layers on the GPU. RequestError likewise."""
    from powerinfer.placement.budget import in_ram
    from powerinfer.placement.disk import within
    from powerinfer.system import available_memory

    engine, free, where = resolved.engine, available_memory(), (resolved.gpu_layers, resolved.gpu_head)
    short = replace(engine, context=engine.context or min(_SHORT, model.config.context_length))
    needed = sum(in_ram(model, _workload(model, short, "all"), *where, hardware.host_bytes).values())
    if not 0 < free < needed:
        return replace(resolved, disk=None)

    def place(ram: int) -> Resolved:
        placed = _on_disk(replace(resolved, engine=short, staging=0), model, ram, hardware.host_bytes)
        return replace(placed, engine=engine)

    stays = engine.disk == "none" or resolved.gpu_head
    return _placed_within(place, model, None if stays else within(free), needed) or replace(resolved, disk=None)


def _planned(resolved: Resolved, model: Model) -> Callable[[Hardware], PlanRequest]:
    """Gives the request for a plan on a machine. RequestError, from it, if no layer fits on the GPU, or RAM does not
    hold experts that may not stay on disk."""
    from powerinfer.formats.profile_file import open_profile
    from powerinfer.placement.disk import within
    from powerinfer.placement.request import Subject, expert_subject, on_named_gpu
    from powerinfer.system import available_memory

    if any(model.n_experts):
        subject = expert_subject(model, resolved.checkpoint, resolved.engine.prepared)
    else:
        profile = open_profile(resolved.checkpoint, resolved.engine.prepared)
        subject = Subject(model, profile, resolved.selection.selector)
    engine = replace(resolved.engine, gpu=str(resolved.gpu))

    def request(hardware: Hardware) -> PlanRequest:
        described = hardware.cpu.memory_bytes
        ram = min(available_memory() or described, described) if engine.ram is None else engine.ram
        made, rests = subject.request(hardware, replace(engine, ram=ram)), any(model.n_experts)
        if rests and engine.disk == "none":
            made.in_memory()  # before anything says what would do if they stayed on disk
            rests = False
        made = on_named_gpu(made)
        if rests and engine.ram is None and made.claims().disk is not None:
            return replace(made, ram=within(ram))
        return made

    return request


def _split_neurons(
    resolved: Resolved, request: Callable[[Hardware], PlanRequest], hardware: Hardware
) -> Resolved | str:
    """A plan that places single neurons; the reason if that is slower than the CPU alone."""
    from powerinfer.placement.budget import gib
    from powerinfer.placement.disk import better_densely, within
    from powerinfer.placement.plan import make_plan

    plan = make_plan(request(hardware))
    name, ram = plan.request.model.name, plan.request.ram
    if resolved.engine.ram is None and ram is not None and plan.on_disk is not None:
        plan = make_plan(replace(plan.request, ram=within(ram)))
    if not plan.claims.gpu_layers:
        return plan.reasons[0]
    engine = resolved.engine
    disk = plan.on_disk if engine.disk != "none" else None
    if not plan.fits and engine.disk != "none" and engine.selector == "auto":
        with suppress(RequestError):  # that needs more memory than there is, too
            dense = _without_neurons(resolved, hardware, "--vram and --ram do not hold all neurons")
            if disk is None or better_densely(dense.disk, disk):
                return dense
    if not plan.fits and disk is None:
        reads = "--ram does not hold what reading them from disk takes"
        if engine.disk == "none":
            reads = "--disk none forbids to read them"
        enough = [one.bytes for one in plan.helps if one.flag == "--ram"]
        needed = max(enough) if engine.disk == "none" else min(enough)
        raise RequestError(
            f"the neurons of {name} do not fit in --vram and --ram, and {reads}: give --ram {gib(needed)}, or more "
            "--vram"
        )
    why = f"{100 * plan.choice.mass_on_gpu:.0f} % of the activations on the GPU"
    there = replace(resolved, gpu_layers=plan.claims.gpu_layers, gpu_head=plan.claims.gpu_head, plan=plan, why=why)
    return replace(there, disk=disk)


def _without_neurons(resolved: Resolved, hardware: Hardware, why: str) -> Resolved:
    """Whole layers on the GPU, without bundles: what RAM does not hold of the others is read from disk."""
    selection = select(resolved.checkpoint, resolved.engine, why)
    model = _model(resolved.checkpoint, resolved.engine, selection)
    return _whole_layers(replace(resolved, selection=selection), model, hardware)


def _split_experts(
    resolved: Resolved, request: Callable[[Hardware], PlanRequest], hardware: Hardware
) -> Resolved | str:
    """A plan that places experts; the reason if that is slower than the CPU alone."""
    from powerinfer.hybrid.vram import experts_memory
    from powerinfer.placement.plan import make_plan

    if resolved.scratch is None:
        found = experts_memory(resolved).find()
        resolved = replace(resolved, scratch=None if found is None else found.result.working)
    plan = make_plan(replace(request(hardware), scratch=resolved.scratch))
    claims = plan.claims
    if claims.slots is None:
        return plan.reasons[0]
    known = plan.request.frequencies
    hot = []
    for layer, n in enumerate(claims.slots):
        order = np.arange(n) if known is None or layer not in known else np.argsort(-known[layer], kind="stable")[:n]
        hot.append(order.astype(np.int32))
    why = _how_many(hot, sum(plan.request.model.n_experts))
    placed = replace(resolved, gpu_layers=claims.gpu_layers, gpu_head=claims.gpu_head, why=why)
    placed = replace(placed, experts=tuple(hot), frequencies=known, staging=claims.staging)
    return replace(placed, disk=claims.disk, disk_speed=plan.from_disk)
