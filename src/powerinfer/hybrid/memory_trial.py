"""The trial of a GPU's working memory: what was measured once decides at every later start what is placed there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from powerinfer.formats.json_file import Between
from powerinfer.hybrid.trials import split_trial
from powerinfer.sparsity.trials import Subject, Trial

if TYPE_CHECKING:
    from powerinfer.hybrid.resolved import Resolved
    from powerinfer.placement.plan import Plan

MARGIN = 8
"""Where neurons move, this part of the measured working memory (an eighth) stays free."""


@dataclass(frozen=True)
class Working:
    """Bytes of working memory that neurons were placed by; measured: bytes that dense parts and steps took then."""

    working: Annotated[int, Between(0, 1 << 50)]
    measured: Annotated[int, Between(0, 1 << 50)]


MEMORY = Subject("working memory", Working)


def neurons_memory(resolved: Resolved, plan: Plan) -> Trial[Working]:
    """The trial of the working memory that neurons of a model are placed by, and of what was measured with that;
    `--retrial` measures again. A folder that cannot be written is no failure: later starts measure again."""
    from powerinfer.placement.plan import GPU_ACCOUNTING

    request, gpu = plan.request, plan.request.hardware.gpu
    assert gpu is not None
    facts = {
        "vram": gpu.memory_bytes if request.vram is None else request.vram,
        "reserved": gpu.reserved_bytes,
        "layers": f"{plan.claims.gpu_layers} {plan.claims.gpu_head}",
        "profile": request.profile.digest,
        "policy": request.policy,
        "work": request.workload,
        "staging": plan.claims.staging,
        "passes": plan.claims.passes,
        "accounting": GPU_ACCOUNTING,
        "margin": MARGIN,
    }
    return split_trial(MEMORY, resolved, facts)


def experts_memory(resolved: Resolved) -> Trial[Working]:
    """The trial of the working memory that experts of a model are placed by: what was measured or, where that did not
    hold, the estimate. It does not depend on --vram."""
    engine = resolved.engine
    sizes = engine.context, engine.max_batch, engine.prefill_chunk, engine.kv_type, engine.threads
    return split_trial(MEMORY, resolved, {"experts": engine.expert_policy, "work": sizes, "margin": MARGIN})
