"""The policy over experts (placement/experts.py) that decodes fastest with a model on this machine: tried, and saved.

`--expert-policy auto`: before a model is used, a short text is decoded under each policy, whole steps of the whole
model, the same tokens for each. Policies take turns, a block of steps at a time, and each finds its experts on the GPU
as it left them. What counts is a policy's time of a block by that of `static` in the same round. The choice is `static`
unless another one is clearly faster, and where the trial fails or is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import numpy as np

from powerinfer.devices.torch_device import current, gpu_failures
from powerinfer.formats.json_file import Between, Length
from powerinfer.hardware.gpu_rates import gpu_name
from powerinfer.hybrid.trials import decode_one, finished, split_trial
from powerinfer.placement.experts import EXPERT_POLICIES, Policy
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.trials import Outcome, Trial, TrialSubject, fastest, take_turns

if TYPE_CHECKING:
    import torch

    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.copier import Copier
    from powerinfer.hybrid.resolved import Resolved

BLOCK = 16
"""Steps that a policy decodes at a time, at most."""
ROUNDS = 8
"""Blocks of each policy."""
WARM_UP = 2
"""The first of them, which do not count: policies learn what the text selects."""
GAIN = 0.97
"""Another policy must take less than this share of the time of `static` (sparsity/trials.py)."""

Name = Literal["static", "lru", "lfu", "dynamic"]


@dataclass(frozen=True)
class TimedPolicies:
    """The choice of a policy. seconds: of a step, medians; reason: there is no measurement."""

    policy: Name
    seconds: Annotated[dict[str, Annotated[float, Between(0, 1e6)]], Length(len(EXPERT_POLICIES))] = field(
        default_factory=dict
    )
    reason: Annotated[str, Length(200)] = ""


POLICIES = TrialSubject("expert policies", TimedPolicies, fallback=TimedPolicies("static"), forgives=True)


@dataclass(frozen=True)
class TriedGpu:
    """A GPU that policies are tried on. copier: of its layers; make: a new policy, whose experts it has at first."""

    device: torch.device
    copier: Copier
    make: Callable[[str], Policy]


def measured(
    executor: SplitExecutor, gpus: Sequence[TriedGpu], sample: Sequence[int], progress: Progress = silent
) -> TimedPolicies:
    """Decode a text under every policy, by turns; `static` if the context holds too little of it.

    gpus: of the layers, which all have the same policy; sample: the token ids of a text. The KV cache must be empty.
    PowerInferError if a GPU fails.
    """
    size = min(BLOCK, executor.n_pages * executor.page_size // ROUNDS)
    if not size:
        return TimedPolicies("static", reason="the context is too short for a trial")
    policies = {name: [gpu.make(name) for gpu in gpus] for name in EXPERT_POLICIES}
    tokens = np.resize(np.asarray(sample or [0], np.int32), size * ROUNDS)

    def settle() -> float:
        for gpu in gpus:
            with current(gpu.device):
                gpu.copier.settle()
        return max(finished(gpu.device) for gpu in gpus)

    def block(name: Name, turn: int) -> float:
        progress("trial of policies", turn, ROUNDS)
        for gpu, policy in zip(gpus, policies[name], strict=True):
            with current(gpu.device):
                gpu.copier.follow(policy)
        begin = settle()
        for at in range(turn * size, (turn + 1) * size):
            decode_one(executor, tokens[at], at)
        return (settle() - begin) / size

    try:
        for gpu in gpus:
            with current(gpu.device):
                gpu.copier.start()
        with gpu_failures("trying policies of experts", "leave out --expert-policy"):
            seconds = take_turns(get_args(Name), ROUNDS, block, WARM_UP)
    finally:
        for gpu in gpus:
            gpu.copier.on = False
    progress("trial of policies", ROUNDS, ROUNDS)
    return TimedPolicies(fastest(seconds, "static", GAIN), {name: median(own) for name, own in seconds.items()})


def policy_trial(resolved: Resolved) -> Trial[TimedPolicies]:
    """The trial for a model that is placed like this."""
    placement = resolved.placement
    assert placement.experts is not None
    digest = sha256()
    for own in placement.experts:
        digest.update(b"layer" + own.tobytes())
    for layer, each in (placement.frequencies or {}).items():
        digest.update(b"%d " % layer + each.tobytes())
    facts = {
        "layers": f"{placement.layers} {placement.head}",
        "experts": digest.hexdigest()[:32],
        "kv_type": resolved.engine.kv_type,
        "steps": f"{ROUNDS} {BLOCK} {placement.pages}",
    }
    cards = resolved.card_layers
    if len(cards) > 1:
        facts["cards"] = "; ".join(f"{gpu_name(name)} from {begin}" for name, begin, _ in cards)
        resolved = replace(resolved, device=replace(resolved.device, gpu=cards[0][0]))
    return split_trial(POLICIES, resolved, facts)


def chosen(outcome: Outcome[TimedPolicies]) -> tuple[str, str]:
    """The policy to use, and why."""
    result = outcome.result
    times = ", ".join(f"{1e3 * own:.3g} ms with {name}" for name, own in result.seconds.items())
    return result.policy, outcome.reason(result.reason or f"a step takes {times}")
