"""Loading a model as it was resolved: on the CPU alone, or with its first layers, or their hot neurons, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.devices import Executor
from powerinfer.devices.choices import Choice
from powerinfer.errors import GpuMemoryError, RequestError
from powerinfer.hybrid.disk import open_tier
from powerinfer.hybrid.resolve import (
    NOT_USED,
    Resolved,
    estimated_scratch,
    needs,
    with_fewer_experts,
    with_fewer_layers,
    with_scratch,
    without_gpu,
)
from powerinfer.kernels import cpu as cpu_kernels
from powerinfer.progress import Progress, Say, silent
from powerinfer.sparsity import Sparsity

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.stage import Stage
    from powerinfer.hybrid.experts import Copier, ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.hybrid.vram import Attempt
    from powerinfer.models.blocks import SplitFfns
    from powerinfer.neurons import Indices
    from powerinfer.placement.experts import Policy
    from powerinfer.placement.plan import Plan

Sample = Callable[[], Sequence[int]]
"""Returns the token ids of a text for measuring the model's speed."""


def load_resolved(
    resolved: Resolved, sample: Sample, progress: Progress = silent, say: Say = silent
) -> tuple[Executor, Sparsity]:
    """The model, and how its layers decode. ModelError for a checkpoint with tensors missing or left over.

    say: told if the GPU turns out to have too little memory and is not used.

    RequestError for options that cannot be met, PowerInferError if the GPU has too little memory.
    """
    from powerinfer.models import load
    from powerinfer.sparsity.attach import attach

    while resolved.gpu is not None:
        try:
            return _load_beside_gpu(resolved, sample, progress, say)
        except GpuMemoryError as error:
            resolved = _smaller(resolved, error)
            if resolved.gpu is None:
                say(NOT_USED.format(error))
    checkpoint, engine = resolved.checkpoint, resolved.engine
    own, predictors = resolved.selection.in_experts, resolved.selection.predictors
    disk = open_tier(resolved, say)
    executor = load(checkpoint, engine, progress, resolved.kv_room, in_experts=own, predictors=predictors, disk=disk)
    executor.choices.gpu = Choice(None, resolved.why)
    try:
        return executor, attach(executor, checkpoint, engine, resolved.selection, sample, progress)
    except BaseException:
        executor.close()
        raise


def _smaller(resolved: Resolved, problem: GpuMemoryError) -> Resolved:
    """What to load instead: fewer whole layers or, with `--gpu auto`, none. The problem again if there is nothing."""
    fewer = None
    if resolved.experts is not None:
        fewer = with_fewer_experts(resolved)
    elif resolved.plan is None:
        fewer = with_fewer_layers(resolved)
    if fewer is not None:
        return fewer
    if resolved.engine.gpu != "auto" or resolved.engine.adjust:
        raise problem
    return without_gpu(resolved, str(problem))


def load_split(
    resolved: Resolved,
    split: SplitFfns | None = None,
    progress: Progress = silent,
    stage: Stage | None = None,
    say: Say = silent,
) -> SplitExecutor:
    """The executor of a model whose first layers are on a GPU, at least one.

    split: makes the FFNs of these layers, and the checkpoint's matrices are not read; None: they are dense. stage:
    what the other layers stream through, of FFNs of matrices or bundles; None: they do not. say: told what is read from
    disk as it runs.
    Raises as `load_resolved` does.
    """
    from powerinfer.devices.cpu import CpuExecutor
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.streamed import StreamedLayers
    from powerinfer.devices.torch_device import MemoryShare, choose_device, gpu_failures
    from powerinfer.models import rotations
    from powerinfer.models.blocks import wire

    checkpoint, engine, selection = resolved.checkpoint, resolved.engine, resolved.selection
    config = checkpoint.config
    assert resolved.gpu is not None and (not resolved.gpu_head or resolved.gpu_layers == config.n_layers)
    device = choose_device(resolved.gpu)
    rotary = rotations(checkpoint, engine)
    gpu = streamed = None
    disk = open_tier(resolved, say)
    share = MemoryShare(device)
    cpu = CpuExecutor(config, engine, rotary, first_layer=resolved.gpu_layers, pages=resolved.pages, disk=disk)
    cpu.in_experts = selection.in_experts
    if resolved.spared:
        _, why = cpu_kernels.choose_threads(0)
        cpu.choices.threads = Choice(engine.threads, f"{why}, less {resolved.spared} for the GPU's driver")
    try:
        with gpu_failures("the model was loaded", "put fewer layers on it, or lower --context or --max-batch"):
            gpu = GpuLayers(
                config,
                device,
                layers=resolved.gpu_layers,
                pages=cpu.n_pages,
                kv_type=engine.kv_type,
                max_tokens=cpu.max_tokens,
                rotations=rotary,
                split=split is not None,
                states=cpu.n_states,
                share=share,
            )
            if stage is not None:
                streamed = StreamedLayers(cpu, gpu, stage)
            where: dict[str, Any] = {"split": split, "head": resolved.gpu_head, "last": streamed}
            wire(cpu, checkpoint, progress, gpu, neurons=selection, **where)
    except BaseException:
        if gpu is not None:
            gpu.close()
        share.end()
        cpu.close()
        raise
    checkpoint.finish()
    checkpoint.release()
    return SplitExecutor(cpu, gpu, streamed, resolved.why)


def _load_beside_gpu(
    resolved: Resolved, sample: Sample, progress: Progress, say: Say
) -> tuple[SplitExecutor, Sparsity]:
    if resolved.plan is not None:
        return _load_neurons(resolved, resolved.plan, sample, progress, say)
    if resolved.experts is not None:
        return _load_experts(resolved, resolved.experts, sample, progress, say)
    from powerinfer.hybrid.vram import hold_budget

    stage = _stage(resolved, resolved.staging)
    try:
        executor = load_split(resolved, None, progress, stage, say)
    except BaseException:
        if stage is not None:
            stage.close()
        raise
    try:
        settle = partial(_settle_layers, executor, resolved, progress)
        hold_budget(executor, resolved.engine.max_batch, resolved.vram, split=executor.streamed, settle=settle)
    except BaseException:
        executor.close()
        raise
    sparsity = Sparsity()
    sparsity.stage = None if executor.streamed is None else executor.streamed.stage
    executor.choices.selector = Choice(sparsity.selector, "layers as a whole")
    return executor, sparsity


def _settle_layers(executor: SplitExecutor, resolved: Resolved, progress: Progress) -> None:
    """As `_settle_prompts`, of layers that are on the CPU as a whole."""
    from powerinfer.hybrid.crossing import settle_layers

    if resolved.gpu_layers == resolved.checkpoint.config.n_layers:
        return
    if executor.streamed is not None and executor.streamed.spans:
        settle_layers(executor, resolved, progress)
    else:
        why = "no room, or no long steps, to stream them"
        executor.choices.prefill = Choice("the CPU computes the layers in RAM", why)


def _load_neurons(
    resolved: Resolved, plan: Plan, sample: Sample, progress: Progress, say: Say
) -> tuple[SplitExecutor, Sparsity]:
    """The model with its neurons placed by the plan, or by a better one once memory is measured."""
    from powerinfer.hybrid.fusion import Fusion
    from powerinfer.hybrid.sparsity import HybridSparsity
    from powerinfer.hybrid.step_trial import settle as settle_steps
    from powerinfer.hybrid.vram import Attempt, SavedMemory, hold_budget

    saved = SavedMemory(resolved)
    earlier = saved.find(plan)
    executor, split, attempt = _load_planned(
        resolved, Attempt(plan if earlier is None else earlier.plan), progress, say
    )
    limits = resolved.engine.max_batch, resolved.vram
    try:
        fusion = Fusion(executor, split.ffns, resolved)

        def settle() -> bool:
            if fusion.settle(sample, progress):
                return True
            _settle_prompts(executor, resolved, split, sample, progress)
            return False

        measured = None if earlier is None else earlier.measured
        held = hold_budget(executor, *limits, attempt, split, earlier=measured, settle=settle)
        assert held.plan is not None
        if held.measured is not None and (earlier is None or held.plan is not earlier.plan):
            saved.keep(held)
        if held.plan is not plan:
            executor.tell(f"{100 * held.plan.choice.mass_on_gpu:.0f} % since memory was measured")
        settle_steps(executor, split, resolved)
        for ffn in split.ffns:
            ffn.fill()
        sparsity = HybridSparsity(resolved.selection.selector, executor, split.ffns, split.stage)
        sparsity.clear()  # counts of the measurements
    except BaseException:
        executor.close()
        raise
    executor.choices.selector = Choice(sparsity.selector, "neurons on both devices")
    return executor, sparsity


def _load_experts(
    resolved: Resolved, experts: Sequence[Indices], sample: Sample, progress: Progress, say: Say
) -> tuple[SplitExecutor, Sparsity]:
    from powerinfer.hybrid.experts import Copier, ExpertSparsity

    if resolved.policy is None:
        policy, why = _tried_policies(resolved, experts, sample, progress)
        resolved = replace(resolved, policy=policy, why_policy=why)
    name = resolved.policy
    assert name is not None
    copier = None if name == "static" else Copier(_policy(resolved, experts, name))
    loaded, working, estimate = None, None, estimated_scratch(resolved)
    try:
        loaded, working = _split_of_experts(resolved, experts, copier, progress, sample, say)
    except GpuMemoryError:
        if resolved.scratch is None or resolved.scratch >= estimate:
            raise
        working = estimate  # what was measured, now or at an earlier start, does not hold
    if loaded is None or (working is not None and resolved.engine.expert_policy != "auto"):  # its choice is of these
        assert working is not None
        if loaded is not None:
            loaded[0].close()
        return _load_other_experts(resolved, working, sample, progress, say)
    executor, split = loaded
    if resolved.scratch is not None and resolved.scratch < estimate:
        executor.tell("since memory was measured")
    sparsity = ExpertSparsity(executor, split.ffns, name)
    sparsity.clear()  # counts of the measurements
    if copier is not None:
        copier.on = True
    executor.choices.experts = Choice(name, resolved.why_policy)
    inside = ", exact (neurons inside them, too)" * resolved.selection.in_experts
    executor.choices.selector = Choice(sparsity.selector, "experts on both devices", inside)
    return executor, sparsity


def _load_other_experts(
    resolved: Resolved, working: int, sample: Sample, progress: Progress, say: Say
) -> tuple[SplitExecutor, Sparsity]:
    """The model again, with experts placed by another working memory than before, which later starts take, too."""
    from powerinfer.hybrid.vram import Working, experts_memory

    try:
        other = with_scratch(resolved, working)
    except RequestError:
        other = with_scratch(resolved, estimated_scratch(resolved))
    assert other.scratch is not None and other.experts is not None
    experts_memory(resolved).keep(Working(other.scratch, other.scratch))
    return _load_experts(other, other.experts, sample, progress, say)


def _smaller_scratch(resolved: Resolved, split: ExpertSplit, used: int | None) -> int | None:
    """The working memory to place experts by instead of an estimate, where it leaves room for one more; None: it does
    not, or nothing was measured. used: what dense parts and the largest steps take."""
    from powerinfer.hardware.measure import measured
    from powerinfer.hybrid.vram import MARGIN, neuron_bytes

    if used is None or resolved.scratch is not None or not any(len(ffn.cold) for ffn in split.ffns):
        return None
    gpu = measured(resolved.engine, gpu=resolved.gpu).gpu
    assert gpu is not None
    limit = gpu.memory_bytes - gpu.reserved_bytes if resolved.vram is None else resolved.vram
    estimate = estimated_scratch(resolved)
    placed = needs(resolved).vram - gpu.reserved_bytes - estimate
    working = max(0, used + neuron_bytes(split) - placed)
    found = working + working // MARGIN
    least = min(ffn.expert_bytes for ffn in split.ffns if len(ffn.cold))
    return found if limit - placed - found >= least and found < estimate else None


def _split_of_experts(
    resolved: Resolved,
    experts: Sequence[Indices],
    copier: Copier | None,
    progress: Progress,
    sample: Sample | None,
    say: Say = silent,
) -> tuple[tuple[SplitExecutor, ExpertSplit], int | None]:
    """The model within its budget, and as `_smaller_scratch`; the copier is off. sample: None: how prompts are computed
    is not measured."""
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.step_trial import settle as settle_steps
    from powerinfer.hybrid.vram import hold_budget

    split = ExpertSplit(experts, resolved.engine.adjust, _stage(resolved, resolved.staging), copier)
    try:
        executor = load_split(resolved, split, progress, say=say)
    except BaseException:
        split.close()
        raise
    if copier is not None:
        copier.on = False  # what is measured is no text
    try:
        settle = None if sample is None else partial(_settle_prompts, executor, resolved, split, sample, progress)
        limits = resolved.engine.max_batch, resolved.vram
        held = hold_budget(executor, *limits, split=split, settle=settle or (lambda: None))
        working = _smaller_scratch(resolved, split, held.measured)
        settle_steps(executor, split, resolved, copier is not None)
    except BaseException:
        executor.close()
        raise
    return (executor, split), working


def _tried_policies(
    resolved: Resolved, experts: Sequence[Indices], sample: Sample, progress: Progress
) -> tuple[str, str]:
    """As `chosen`: the policy that decodes fastest, chosen earlier or now. Nothing of the trial is left in memory."""
    from powerinfer.hybrid.experts import Copier
    from powerinfer.hybrid.policy_trial import chosen, measured, policy_trial

    trial = policy_trial(resolved)
    earlier = trial.find()
    if earlier is not None:
        return chosen(earlier)
    make = partial(_policy, resolved, experts)
    copier = Copier(make("static"))
    try:
        (executor, split), _ = _split_of_experts(resolved, experts, copier, progress, None)
    except RequestError as error:
        return "static", str(error)
    try:
        return chosen(trial.run(lambda: measured(executor, split.ffns, make, sample(), copier, progress)))
    finally:
        executor.close()


def _policy(resolved: Resolved, experts: Sequence[Indices], name: str) -> Policy:
    """What says from step to step which experts the GPU has, at first those of the plan."""
    from powerinfer.placement.experts import make_policy

    every = resolved.checkpoint.config.experts
    slots = {layer: len(experts[layer]) for layer in every if layer < resolved.gpu_layers}
    sizes = {layer: every[layer].n_experts for layer in slots}
    known = resolved.frequencies or {layer: np.full(n, every[layer].router.top_k / n) for layer, n in sizes.items()}
    return make_policy(name, slots, sizes, {layer: known[layer] for layer in slots})


def _load_planned(
    resolved: Resolved, attempt: Attempt, progress: Progress, say: Say
) -> tuple[SplitExecutor, NeuronSplit, Attempt]:
    """The model by the plan, or with fewer neurons on the GPU if that runs out of memory before all is loaded."""
    while True:
        assert attempt.plan is not None
        split = None
        try:
            split = _planned_split(resolved, attempt.plan)
            stage = split.stage if attempt.plan.claims.passes else None
            return load_split(resolved, split, progress, stage, say), split, attempt
        except GpuMemoryError:
            if split is not None:
                split.close()
            less = attempt.after_failure()
            if less is None or less.plan is None or not less.plan.loads:
                raise
            attempt, say = less, silent  # what is read from disk was said


def _planned_split(resolved: Resolved, plan: Plan) -> NeuronSplit:
    """The neurons of the GPU's layers, where the plan places them."""
    from powerinfer.hybrid.ffn import NeuronSplit

    selection = resolved.selection
    assert selection.bundles is not None
    stage = _stage(resolved, plan.staging)
    placement = plan.placement(plan.request.profile)
    frequency = plan.request.profile.fraction
    return NeuronSplit(selection.bundles, placement, selection.threshold, selection.predictors, stage, frequency)


def _stage(resolved: Resolved, nbytes: int) -> Stage | None:
    """Buffers of that size for long prompts; 0: none."""
    from powerinfer.devices.stage import Stage
    from powerinfer.devices.torch_device import choose_device, gpu_failures

    if not nbytes:
        return None
    assert resolved.gpu is not None
    with gpu_failures("making room for prompts", "give less --vram"):
        return Stage(choose_device(resolved.gpu), nbytes)


def _settle_prompts(
    executor: SplitExecutor, resolved: Resolved, split: NeuronSplit | ExpertSplit, sample: Sample, progress: Progress
) -> None:
    """Measure the crossing, if cold neurons can be streamed, or layers: these stream from the crossing of neurons on,
    where any are cold. GpuMemoryError if the GPU has too little memory for it."""
    from powerinfer.hybrid.crossing import settle, settle_layers
    from powerinfer.kernels.gpu import FEW

    if not any(len(ffn.cold) for ffn in split.ffns):
        if executor.streamed is not None:
            settle_layers(executor, resolved, progress)
        return
    if resolved.plan is not None and resolved.disk is not None and split.stage is not None:
        split.stage.least = FEW + 1  # the CPU would read what is cold once for each FEW tokens
        what = "what is cold, some of it from disk, streams"
        executor.choices.prefill = Choice(f"{what} from {FEW + 1} tokens, which reads it once")
        return
    if split.stage is not None and all(ffn.stage is not None for ffn in split.ffns):
        settle(split.stage, executor, split.ffns, resolved, sample, progress)
    else:
        why = "no room, or no long steps, to stream them"
        if resolved.disk is not None and resolved.plan is None:
            why = "it reads from disk"
        if split.stage is not None:
            why = "they are not as a GGUF file has them"
        executor.choices.prefill = Choice("the CPU computes what is cold", why)
    if (
        resolved.plan is not None
        and executor.streamed is None
        and not executor.gpu.has_head
        and split.stage is not None
        and executor.choices.prefill is not None
    ):
        more = "; the layers in RAM stay on the CPU (no room to stream them)"
        executor.choices.prefill = executor.choices.prefill.add(more)
