"""The decision how a model is loaded: selector, prepared files, placement, devices, once before weights are read."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.devices.wanted import UNUSED_VRAM, gpu_names, lacks_torch, wanted_gpu
from powerinfer.errors import NoDraftsError, PowerInferError, RequestError, demand
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.hybrid.resolved import Resolved, UsedGpu, model_of, needs, workload
from powerinfer.progress import Progress, Say, silent
from powerinfer.sparsity.selection import select

NOT_USED = "the GPU is not used: {}"
NOT_SPREAD = "--split-mode expert is for models of experts on several GPUs{}: leave it out"
NONE_USED = ", and none is used ({})"


def resolve(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress = silent, say: Say = silent) -> Resolved:
    """Decide how a model is loaded, from its headers and what is prepared for it. No weights are read.

    A checkpoint loses its draft head where that cannot be used, or is expected to gain too little.
    say: lines where a GPU, a budget for one, a draft head, or a policy for what is on disk is not used.
    RequestError for options that cannot be met, ModelError for prepared files that do not suit the model,
    PowerInferError when a GPU that was requested by name cannot be used.
    """
    check_context(checkpoint.config, engine)
    if engine.ram is not None:
        from powerinfer.placement.budget import check_ram

        check_ram(engine.ram, "give less, or leave it out")
    resolved = _placed_with_draft(checkpoint, engine, progress, say)
    on_disk = None if resolved.placement.disk is None else resolved.placement.disk.about
    if engine.disk_policy != EngineConfig.disk_policy and not (on_disk and (on_disk.experts or on_disk.neurons)):
        say(f"--disk-policy {engine.disk_policy} is not used: neither experts nor neurons stay on disk")
    if resolved.placement.experts is None:
        return resolved
    from powerinfer.hybrid.expert_policy import with_policy

    return with_policy(resolved)


def check_context(config: ModelConfig, engine: EngineConfig) -> None:
    """RequestError for a context longer than the model's."""
    if engine.context > (most := config.context_length):
        raise RequestError(f"a context of {engine.context} tokens is more than the model's {most}; 0 is all of it")


def check_split(engine: EngineConfig, config: ModelConfig | None = None) -> None:
    """RequestError where experts are to be spread over GPUs and there is none, or the model does not permit it. config:
    None: the model is not known yet."""
    if engine.split_mode != "expert":
        return
    from powerinfer.placement.spread import split_problem

    name, reason = wanted_gpu(engine)
    if name is None:
        raise RequestError(NOT_SPREAD.format(NONE_USED.format(reason)))
    problem = None if config is None else split_problem(config, engine, len(gpu_names(name)))
    if problem is not None:
        raise RequestError(problem)


def _placed_with_draft(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress, say: Say) -> Resolved:
    if checkpoint.config.draft is None:
        return demand(permitted(_placed(checkpoint, engine, progress, say)))
    from powerinfer.placement.draft_gain import BESIDE_GPU, NO_ROOM, too_little_gain
    from powerinfer.placement.shapes import checkpoint_model

    lines: list[str] = []
    reason = too_little_gain(checkpoint_model(checkpoint, engine.prepared), engine)
    if reason is None:
        try:
            resolved = demand(permitted(_placed(checkpoint, engine, progress, lines.append)))
        except RequestError:  # perhaps of memory that the head is too much for
            reason = NO_ROOM
        else:
            if checkpoint.config.draft.eagle is not None and resolved.device.gpu is not None:
                raise NoDraftsError(f"--speculate {engine.speculate}: {BESIDE_GPU}")
            reason = draft_problem(resolved) or _displacement(resolved)
            if reason is None:
                for line in lines:
                    say(line)
                return resolved
    line = checkpoint.leave_draft(reason)
    resolved = demand(permitted(_placed(checkpoint, engine, progress, say)))
    say(line)
    return resolved


def draft_problem(resolved: Resolved) -> str | None:
    """The reason for which a draft head is left out where some of the model stays on disk; None: there is none."""
    from powerinfer.placement.draft_gain import problem_from_disk

    disk = resolved.placement.disk
    return None if disk is None else problem_from_disk(disk, model_of(resolved), resolved.engine.speculate)


def _displacement(resolved: Resolved) -> str | None:
    """The reason for which a draft head beside a GPU is left out, unless it was asked for: its states would take the
    place of much else. None: there is none, as where the whole model is there."""
    from powerinfer.placement.budget import displaced_by_drafts, gib
    from powerinfer.placement.draft_gain import DISPLACES

    placement = resolved.placement
    complete = placement.head and placement.plan is None
    if resolved.engine.speculate == "mtp" or not placement.layers or complete:
        return None
    model = model_of(resolved)
    nbytes = displaced_by_drafts(model, workload(model, resolved.engine), placement.layers, needs(resolved).vram)
    return DISPLACES.format(gib(nbytes)) if nbytes else None


def permitted(resolved: Resolved) -> Resolved | RequestError:
    """The same; the error where its options move neurons or experts that its placement does not move."""
    engine, placement = resolved.engine, resolved.placement
    moving = engine.expert_policy not in ("static", "auto")
    if engine.adjust and moving:
        return RequestError(f"--expert-policy {engine.expert_policy} moves experts by itself: leave out --adjust")
    if engine.adjust and placement.neurons is not None and placement.disk is not None:
        return RequestError("--adjust moves neurons between devices, and some of them rest on disk: leave it out")
    if engine.adjust and placement.plan is None:
        return RequestError("--adjust is for models whose neurons or experts are split between a GPU and the CPU")
    if moving and placement.experts is None:
        return RequestError(f"--expert-policy {engine.expert_policy} is for experts on a GPU: leave it out")
    if engine.split_mode == "expert" and not placement.spread:
        if placement.several is not None:
            return RequestError("--split-mode expert: no GPU has room for an expert: give more --vram, or leave it out")
        reason = "" if resolved.device.gpu else NONE_USED.format(resolved.device.reason)
        return RequestError(NOT_SPREAD.format(reason))
    return resolved


def _placed(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress, say: Say) -> Resolved:
    from powerinfer.hybrid.expert_selector import place_as_chosen, split_as_chosen

    selection = select(checkpoint, engine)
    name, reason = wanted_gpu(engine)
    if name is not None:
        from powerinfer.hybrid.beside_gpu import place_beside_gpu

        try:
            placed = place_beside_gpu(checkpoint, engine, selection, name, progress)
        except PowerInferError as error:  # whatever keeps the GPU from being used, its driver among them
            if engine.gpu != "auto":
                raise
            placed = str(error)
        if isinstance(placed, Resolved):
            return split_as_chosen(placed)
        reason = placed
        say(NOT_USED.format(reason))
    elif engine.vram:
        say(UNUSED_VRAM.format(reason))
    elif engine.gpu == "auto" and engine.vram is None and lacks_torch():
        say(NOT_USED.format(reason))
    return place_as_chosen(Resolved(checkpoint, engine, selection, UsedGpu(reason=reason)))


def on_cpu_alone(resolved: Resolved, reason: str) -> Resolved:
    """The same on the CPU alone. reason: for people. RequestError if --ram is too little for that."""
    from powerinfer.hybrid.expert_selector import place_as_chosen

    checkpoint, engine = resolved.checkpoint, resolved.engine
    if resolved.device.spared:
        engine = replace(engine, threads=0)
    if resolved.device.chunk:
        engine = replace(engine, prefill_chunk=0)
    selection = select(checkpoint, engine)
    return place_as_chosen(Resolved(checkpoint, engine, selection, UsedGpu(reason=reason)))
