"""The trial of a GPU's working memory: what was measured once decides at every later start what is placed there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from powerinfer.formats.json_file import Between
from powerinfer.hybrid.trials import split_trial
from powerinfer.placement.budget import budgets, layers_that_fit
from powerinfer.sparsity.trials import Trial, TrialSubject

if TYPE_CHECKING:
    from powerinfer.hybrid.resolved import Resolved
    from powerinfer.placement.plan import Plan, PlanRequest

MARGIN = 8
"""The part of the measured working memory (an eighth) that stays free where neurons are placed by it."""


@dataclass(frozen=True)
class Working:
    """Bytes of working memory that neurons were placed by; measured: bytes that dense parts and steps took then. chunk:
    tokens of a prompt in a step, where they had to be fewer than was planned, 0: they did not."""

    working: Annotated[int, Between(0, 1 << 50)]
    measured: Annotated[int, Between(0, 1 << 50)]
    chunk: Annotated[int, Between(0, 1 << 16)] = 0


@dataclass(frozen=True)
class ExpertsMemory:
    """The memory that experts were placed by in a load that succeeded. working: bytes of working memory, None: the
    estimate; staging: bytes of a buffer for long prompts, where it had to be smaller than was planned, None: it did
    not; chunk: as of `Working`."""

    working: Annotated[int, Between(0, 1 << 50)] | None = None
    staging: Annotated[int, Between(0, 1 << 32)] | None = None
    chunk: Annotated[int, Between(0, 1 << 16)] = 0


MEMORY = TrialSubject("working memory", Working)
EXPERTS_MEMORY = TrialSubject("working memory of experts", ExpertsMemory)


def neurons_memory(resolved: Resolved, plan: Plan) -> Trial[Working]:
    """The trial of the working memory that neurons of a model are placed by, and of what was measured with that;
    `--retrial` measures again. A folder that cannot be written is no failure: later starts measure again."""
    facts = _facts(plan.request) | {
        "layers": f"{plan.claims.gpu_layers} {plan.claims.gpu_head}",
        "profile": plan.request.profile.digest,
        "policy": plan.request.policy,
        "staging": plan.claims.staging,
        "passes": plan.claims.passes,
    }
    return split_trial(MEMORY, resolved, facts)


def experts_memory(resolved: Resolved, request: PlanRequest) -> Trial[ExpertsMemory]:
    """The trial of the working memory that experts of a model are placed by: of the layers that are on the GPU by the
    estimate."""
    model, hardware, work = request.model, request.hardware, replace(request.workload, scratch=None)
    vram, _ = budgets(hardware, request.vram, request.ram)
    layers, head = layers_that_fit(model, hardware, work, vram, dense=True, experts=False)
    facts = _facts(request) | {"layers": f"{layers} {head}", "experts": resolved.engine.expert_policy}
    return split_trial(EXPERTS_MEMORY, resolved, facts)


def _facts(request: PlanRequest) -> dict[str, object]:
    """Facts that the working memory of any model depends on."""
    from powerinfer.placement.plan import GPU_ACCOUNTING

    gpu = request.hardware.gpu
    assert gpu is not None
    return {
        "vram": gpu.memory_bytes if request.vram is None else request.vram,
        "reserved": gpu.reserved_bytes,
        "work": replace(request.workload, scratch=None),
        "accounting": GPU_ACCOUNTING,
        "margin": MARGIN,
    }
