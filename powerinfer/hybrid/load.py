"""Loading a model as it was resolved: on the CPU alone, or with its first layers, or their hot neurons, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from powerinfer.devices import Executor
from powerinfer.formats.checkpoint import Progress
from powerinfer.hybrid.resolve import Resolved
from powerinfer.sparsity import Sparsity

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.models.blocks import SplitFfns

Sample = Callable[[], Sequence[int]]
"""Returns the token ids of a text for measuring the model's speed."""


def load_resolved(resolved: Resolved, sample: Sample, progress: Progress | None = None) -> tuple[Executor, Sparsity]:
    """The model, and how its layers decode. ModelError for a checkpoint with tensors missing or left over.

    RequestError for options that cannot be met, PowerInferError if the GPU has too little memory.
    """
    from powerinfer.models import load
    from powerinfer.sparsity.attach import attach

    if resolved.gpu is not None:
        return _load_beside_gpu(resolved, sample, progress)
    checkpoint, engine = resolved.checkpoint, resolved.engine
    executor = load(checkpoint, engine, progress, resolved.kv_room)
    executor.choices["gpu"] = f"none ({resolved.why})"
    return executor, attach(executor, checkpoint, engine, resolved.selection, sample, progress)


def load_split(resolved: Resolved, split: SplitFfns | None = None, progress: Progress | None = None) -> SplitExecutor:
    """The executor of a model whose first layers are on a GPU, at least one.

    split: makes the FFNs of these layers, and the checkpoint's matrices are not read; None: they are dense. Raises as
    `load_resolved` does.
    """
    from powerinfer.devices.cpu import CpuExecutor
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.torch_device import choose_device, gpu_failures
    from powerinfer.models import rotations
    from powerinfer.models.blocks import wire

    checkpoint, engine, selection = resolved.checkpoint, resolved.engine, resolved.selection
    config = checkpoint.config
    assert resolved.gpu is not None and (not resolved.gpu_head or resolved.gpu_layers == config.n_layers)
    device = choose_device(resolved.gpu)
    rotary = rotations(checkpoint, engine)
    gpu = None
    cpu = CpuExecutor(config, engine, rotary, first_layer=resolved.gpu_layers, pages=resolved.pages)
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
            )
            wire(cpu, checkpoint, progress, gpu, neurons=selection, split=split, head=resolved.gpu_head)
    except BaseException:
        if gpu is not None:
            gpu.close()
        cpu.close()
        raise
    checkpoint.finish()
    checkpoint.release()
    return SplitExecutor(cpu, gpu)


def _load_beside_gpu(resolved: Resolved, sample: Sample, progress: Progress | None) -> tuple[SplitExecutor, Sparsity]:
    from powerinfer.hybrid.vram import hold_budget

    split = None if resolved.plan is None else _planned_split(resolved)
    executor = load_split(resolved, split, progress)
    executor.choices["gpu"] += f", {resolved.why}"
    try:
        sparsity = Sparsity() if split is None else _settled(executor, resolved, split, sample, progress)
        held = hold_budget(executor, resolved.engine.max_batch, resolved.vram, resolved.plan, split)
        if held is not None and held is not resolved.plan:
            executor.choices["gpu"] += f", {100 * held.choice.mass_on_gpu:.0f} % since memory was measured"
        sparsity.clear()  # counts of the measurements
    except BaseException:
        executor.close()
        raise
    how = "layers as a whole" if split is None else "neurons on both devices"
    executor.choices["selector"] = f"{sparsity.selector} ({how})"
    return executor, sparsity


def _planned_split(resolved: Resolved) -> NeuronSplit:
    """The neurons of the GPU's layers, where the plan places them."""
    from powerinfer.devices.stage import Stage
    from powerinfer.devices.torch_device import choose_device, gpu_failures
    from powerinfer.hybrid.ffn import NeuronSplit

    plan, selection = resolved.plan, resolved.selection
    assert plan is not None and selection.bundles is not None and resolved.gpu is not None
    stage = None
    if plan.staging:
        with gpu_failures("making room for prompts", "give less --vram"):
            stage = Stage(choose_device(resolved.gpu), plan.staging)
    placement = plan.placement(plan.request.profile)
    return NeuronSplit(selection.bundles, placement, selection.threshold, selection.predictors, stage)


def _settled(
    executor: SplitExecutor, resolved: Resolved, split: NeuronSplit, sample: Sample, progress: Progress | None
) -> Sparsity:
    """The `Sparsity` of the split layers, after the crossing is measured."""
    from powerinfer.hybrid.crossing import settle
    from powerinfer.hybrid.sparsity import HybridSparsity

    ffns, stage = split.ffns, split.stage
    if stage is not None:
        settle(stage, executor, ffns, resolved, sample, progress)
    elif any(len(ffn.cold) for ffn in ffns):
        executor.choices["prefill"] = "the CPU computes cold neurons (no room, or no long steps, to stream them)"
    return HybridSparsity(resolved.selection.selector, executor, ffns, stage)
