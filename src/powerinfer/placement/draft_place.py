"""The place of a smaller model that drafts for one that a GPU and RAM divide.

A draft reads all of the smaller model, and a GPU reads it faster. But there it takes the place of layers, neurons or
experts of the other model, whose steps become slower. So it is there as a whole where that is expected to gain more, by
the plans of both models, else in RAM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from powerinfer.errors import RequestError
from powerinfer.placement.budget import Division, budgets, in_ram, on_gpu
from powerinfer.placement.draft_gain import RIGHT
from powerinfer.placement.plan import PlanRequest, place

IN_RAM = "in RAM ({})"
ON_GPU = "on the GPU ({})"
EXPERTS = "a model of experts drafts there"
SEVERAL = "as any beside several GPUs"
NO_ROOM = "the GPU has no room for it and a layer of the model"
FASTER = "an estimated {:.2f} times the speed of {}"
EMULATED = "which torch's CPU emulates"
ALONE = "there the model does not fit"


@dataclass(frozen=True)
class DraftPlace:
    """The place of a smaller model. text: it, and why, for people; vram, ram: bytes that it takes there, beside those
    that the other model takes anyway; left: --vram of that one, None: as it was. Without `vram` it is in RAM, where it
    takes what any model does (ram: 0)."""

    text: str = ""
    vram: int = 0
    ram: int = 0
    left: int | None = None


def place_drafts(answers: PlanRequest, drafts: PlanRequest, most: int) -> DraftPlace:
    """The place of the model of `drafts`, beside that of `answers`, on the same machine, with a GPU.

    answers: with both budgets whole; most: drafts of a step. Both models' steps are those of the plans, of one token;
    `RIGHT` of the drafts count as right. A GPU that torch's CPU emulates has whatever fits.
    """
    if answers.on_cards:
        return DraftPlace(IN_RAM.format(SEVERAL))
    if any(drafts.model.n_experts):
        return DraftPlace(IN_RAM.format(EXPERTS))
    vram, _ = budgets(answers.hardware, answers.vram, answers.ram)
    nbytes, ram = bytes_on_gpu(drafts), bytes_beside_gpu(drafts)
    left = vram - nbytes
    beside = None if left <= 0 else place(_less_ram(replace(answers, vram=left), ram))
    if beside is None or isinstance(beside, RequestError) or not beside.claims.gpu_layers:
        return DraftPlace(IN_RAM.format(NO_ROOM))
    if answers.insist:
        return DraftPlace(ON_GPU.format(EMULATED), nbytes, ram, left)
    before = place(_less_ram(answers, sum(in_ram(drafts.model, drafts.workload).values())))
    if isinstance(before, RequestError):
        return DraftPlace(ON_GPU.format(ALONE), nbytes, ram, left)
    seconds = draft_seconds(drafts, nbytes)
    of_gpu, of_cpu = (
        best_speed(beside.choice.seconds, seconds[0], most),
        best_speed(before.choice.seconds, seconds[1], most),
    )
    if of_gpu > of_cpu:
        return DraftPlace(ON_GPU.format(FASTER.format(of_gpu / of_cpu, "drafts in RAM")), nbytes, ram, left)
    return DraftPlace(IN_RAM.format(FASTER.format(of_cpu / of_gpu, "drafts on the GPU, where layers would give way")))


def bytes_on_gpu(request: PlanRequest) -> int:
    """Bytes that a model takes as a whole on a GPU that has another one, too."""
    division = Division(request.model.config.n_layers, True)
    footprint = on_gpu(request.model, request.hardware, request.workload, division, dense=True)
    return sum(footprint.values()) - footprint["runtime"]


def bytes_beside_gpu(request: PlanRequest) -> int:
    """Bytes of RAM that it takes there."""
    footprint = in_ram(request.model, request.workload, Division(request.model.config.n_layers, True))
    return sum(footprint.values()) - footprint["runtime"]


def draft_seconds(drafts: PlanRequest, nbytes: int) -> tuple[float, float]:
    """Seconds of a draft on the GPU, of which the model takes so many bytes, and in RAM."""
    assert drafts.hardware.gpu is not None
    sizes = nbytes + drafts.hardware.gpu.reserved_bytes, 0
    plans = [place(replace(drafts, vram=vram, ram=None)) for vram in sizes]
    on_card, in_memory = (
        math.inf if isinstance(plan, RequestError) else plan.choice.seconds for plan in plans
    )
    return on_card, in_memory


def best_speed(step: float, draft: float, most: int) -> float:
    """The most expected tokens a second, of all numbers of drafts. step, draft: seconds."""
    tokens = right = 1.0
    best = 1 / step
    for count in range(1, most + 1):
        right *= RIGHT
        tokens += right
        best = max(best, tokens / (step + count * draft))
    return best


def _less_ram(request: PlanRequest, ram: int) -> PlanRequest:
    """The request with so much less RAM, where that is limited."""
    return request if request.ram is None else replace(request, ram=max(0, request.ram - ram))
