"""How a model is loaded: selector, prepared files, placement and devices, decided once before its weights are read."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import EngineConfig
from powerinfer.devices.wanted import UNUSED_VRAM, lacks_torch, wanted_gpu
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.hybrid.resolved import Device, Policy, Resolved, needs
from powerinfer.progress import Progress, Say, silent
from powerinfer.sparsity.selection import select

NOT_USED = "the GPU is not used: {}"


def resolve(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress = silent, say: Say = silent) -> Resolved:
    """Decide how a model is loaded, from its headers and what is prepared for it. No weights are read.

    say: told where a GPU, a budget for one, or a policy for what is on disk is not used.
    RequestError for options that cannot be met, ModelError for prepared files that do not suit the model,
    PowerInferError when a GPU that was requested by name cannot be used.
    """
    resolved = _placed(checkpoint, engine, progress, say)
    placement, moving = resolved.placement, engine.expert_policy not in ("static", "auto")
    if engine.adjust and moving:
        raise RequestError(f"--expert-policy {engine.expert_policy} moves experts by itself: leave out --adjust")
    if engine.adjust and placement.neurons is not None and placement.disk is not None:
        raise RequestError("--adjust moves neurons between devices, and some of them rest on disk: leave it out")
    if engine.adjust and placement.plan is None:
        raise RequestError("--adjust is for models whose neurons or experts are split between a GPU and the CPU")
    if moving and placement.experts is None:
        raise RequestError(f"--expert-policy {engine.expert_policy} is for experts on a GPU: leave it out")
    on_disk = None if placement.disk is None else placement.disk.about
    if engine.disk_policy != EngineConfig.disk_policy and not (on_disk and (on_disk.experts or on_disk.neurons)):
        say(f"--disk-policy {engine.disk_policy} is not used: neither experts nor neurons stay on disk")
    return with_policy(resolved)


def _placed(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress, say: Say) -> Resolved:
    from powerinfer.hybrid.in_ram import place_in_ram

    selection = select(checkpoint, engine)
    name, why = wanted_gpu(engine)
    if name is not None:
        from powerinfer.hybrid.beside_gpu import place_beside_gpu

        try:
            placed = place_beside_gpu(checkpoint, engine, selection, name, progress)
        except PowerInferError as error:  # whatever keeps the GPU from being used, its driver among them
            if engine.gpu != "auto":
                raise
            placed = str(error)
        if isinstance(placed, Resolved):
            return placed
        why = placed
        say(NOT_USED.format(why))
    elif engine.vram:
        say(UNUSED_VRAM.format(why))
    elif engine.gpu == "auto" and engine.vram is None and lacks_torch():
        say(NOT_USED.format(why))
    return place_in_ram(Resolved(checkpoint, engine, selection, Device(why=why)))


def without_gpu(resolved: Resolved, why: str) -> Resolved:
    """The same on the CPU alone. why: the reason, for people. RequestError if --ram is too little for that."""
    from powerinfer.hybrid.in_ram import place_in_ram

    checkpoint, engine = resolved.checkpoint, resolved.engine
    if resolved.device.spared:
        engine = replace(engine, threads=0)
    return place_in_ram(Resolved(checkpoint, engine, select(checkpoint, engine), Device(why=why)))


# ---------------------------------------------------------------- the policy over experts


def with_policy(resolved: Resolved) -> Resolved:
    """With the policy over experts that was asked for or, for `auto`, chosen earlier. Others than `static` need all
    experts in RAM, as a GGUF file has them."""
    engine = resolved.engine
    if resolved.placement.experts is None:
        return resolved
    if engine.expert_policy != "auto":
        asked = "the default" if engine.expert_policy == "static" else "asked for: --expert-policy"
        return replace(resolved, policy=Policy(engine.expert_policy, asked))
    tried = replace(resolved, policy=Policy(None))
    needed = needs(tried).ram
    why = _why_static(resolved, needed)
    if why is not None:
        return replace(resolved, policy=Policy("static", why))
    from powerinfer.hybrid.policy_trial import chosen, policy_trial
    from powerinfer.system import available_memory

    # Only a trial depends on the memory that is free at the moment: else bits would change from run to run.
    room = not 0 < available_memory() < needed
    outcome = policy_trial(tried).find(anew=room)
    if outcome is not None:
        return replace(resolved, policy=Policy(*chosen(outcome)))
    return tried if room else replace(resolved, policy=Policy("static", f"{_others_need(needed)}: not tried"))


def _why_static(resolved: Resolved, needed: int) -> str | None:
    """The reason for leaving experts where they are; None: others may be tried. needed: bytes of RAM of these."""
    checkpoint, engine, experts = resolved.checkpoint, resolved.engine, resolved.placement.experts
    assert experts is not None
    n_experts = sum(checkpoint.config.experts[at].n_experts for at in _split_layers(resolved))
    on_gpu = sum(map(len, experts))
    if on_gpu in (0, n_experts):
        return "all experts are on the GPU" if on_gpu else "no expert is on the GPU"
    if engine.adjust:
        return "--adjust moves experts between requests"
    if resolved.placement.disk is not None:
        return "others would read experts from disk for the GPU, beside those that are computed"
    if not checkpoint.path.is_file() or not _experts_in_file(resolved):
        return "others need experts as a GGUF file has them, without --quantize or types IQ1 to IQ3"
    if engine.ram is not None and needed > engine.ram:
        return _others_need(needed)
    return None if engine.trial else "--no-trial: nothing was measured"


def _others_need(nbytes: int) -> str:
    from powerinfer.placement.budget import gib

    return f"others need all experts in RAM too, {gib(nbytes)} with all else"


def _experts_in_file(resolved: Resolved) -> bool:
    """Whether those of the layers on the GPU are used as the file has them."""
    checkpoint, config = resolved.checkpoint, resolved.checkpoint.config
    names = (f"layers.{at}.experts_{part}" for at in _split_layers(resolved) for part in config.experts[at].matrices)
    return all(map(checkpoint.as_stored, names))


def _split_layers(resolved: Resolved) -> list[int]:
    """Layers on the GPU that have experts."""
    return [layer for layer in resolved.checkpoint.config.experts if layer < resolved.placement.layers]
