"""The policy over experts that a load has: the one that was asked for, or chosen by a trial."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.hybrid.policy_trial import chosen, policy_trial
from powerinfer.hybrid.resolved import Resolved, UsedPolicy, needs
from powerinfer.placement.budget import gib


def with_policy(resolved: Resolved) -> Resolved:
    """The same with the policy over experts that was asked for or, for `auto`, chosen earlier. Others than `static`
    need all experts in RAM, as a GGUF file has them."""
    engine = resolved.engine
    if resolved.placement.experts is None:
        return resolved
    if engine.expert_policy != "auto":
        asked = "the default" if engine.expert_policy == "static" else "asked for: --expert-policy"
        return replace(resolved, policy=UsedPolicy(engine.expert_policy, asked))
    from powerinfer.system import available_memory

    tried = replace(resolved, policy=UsedPolicy(None))
    needed = needs(tried).ram
    reason = _static_reason(resolved, needed)
    if reason is not None:
        return replace(resolved, policy=UsedPolicy("static", reason))
    # Only a trial depends on the memory that is free at the moment: else bits would change from run to run.
    room = not 0 < available_memory() < needed
    outcome = policy_trial(tried).find(anew=room)
    if outcome is not None:
        return replace(resolved, policy=UsedPolicy(*chosen(outcome)))
    return tried if room else replace(resolved, policy=UsedPolicy("static", f"{_needed_text(needed)}: not tried"))


def _static_reason(resolved: Resolved, needed: int) -> str | None:
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
        return "others need experts as a GGUF file has them, without --quantize or types without kernels"
    if engine.ram is not None and needed > engine.ram:
        return _needed_text(needed)
    return None if engine.trial else "--no-trial: nothing was measured"


def _needed_text(nbytes: int) -> str:
    return f"others need all experts in RAM too, {gib(nbytes)} with all else"


def _experts_in_file(resolved: Resolved) -> bool:
    """Whether the experts of the layers on the GPU are used as the file has them."""
    checkpoint, config = resolved.checkpoint, resolved.checkpoint.config
    names = (f"layers.{at}.experts_{part}" for at in _split_layers(resolved) for part in config.experts[at].matrices)
    return all(map(checkpoint.as_stored, names))


def _split_layers(resolved: Resolved) -> list[int]:
    """Layers on the GPU that have experts."""
    return [layer for layer in resolved.checkpoint.config.experts if layer < resolved.placement.layers]
