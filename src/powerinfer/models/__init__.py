"""Wiring: a checkpoint becomes an executor. A family of models is data in `ModelConfig`, not code here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from powerinfer.config import EngineConfig, RopeConfig
from powerinfer.devices.cpu import CpuExecutor, Drafting, Rotation
from powerinfer.devices.cpu_ffn import Weights
from powerinfer.devices.disk import DiskTier
from powerinfer.devices.states import tokens_to_undo
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.models.blocks import wire
from powerinfer.models.draft import wire_draft
from powerinfer.models.rope import rope_frequencies
from powerinfer.progress import Progress, silent

__all__ = ["load", "rotations"]


def load(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    progress: Progress = silent,
    room: int | None = None,
    *,
    in_experts: bool = False,
    predictors: Callable[[int], Weights] | None = None,
    disk: DiskTier | None = None,
    drafting: Drafting | None = None,
) -> CpuExecutor:
    """Pack the weights and wire the model on the CPU.

    Memory beyond the packed weights stays within one layer's file pages.
    progress: called with ("loading weights", layers done, layers); room: bytes that the KV cache must not exceed,
    enough for one context. in_experts: of experts that allow it, compute only the neurons that fire, in small steps;
    predictors: of each layer, what selects those that are computed. disk: what stays there, nothing of a draft head,
    which is wired where the checkpoint has one; drafting: what drafts need beside it, None: what the options ask for.
    ModelError for a checkpoint with tensors missing or left over, RequestError for options that cannot be met.
    """
    drafts = checkpoint.config.draft is not None
    drafting = drafting or Drafting(tokens_to_undo(engine, checkpoint.config))
    drafting = replace(drafting, head=drafts)
    rotary = rotations(checkpoint, engine)
    executor = CpuExecutor(checkpoint.config, engine, rotary, room=room, disk=disk, drafting=drafting)
    executor.in_experts, executor.expert_predictors = in_experts, predictors
    try:
        with checkpoint.names_damage():
            wire(executor, checkpoint, progress)
            if drafts:
                wire_draft(executor, checkpoint)
        checkpoint.finish()
    except BaseException:
        executor.close()
        raise
    checkpoint.release()
    return executor


def rotations(checkpoint: Checkpoint, engine: EngineConfig) -> dict[RopeConfig, Rotation]:
    """(frequencies, factor) of each rotary embedding of the model."""
    context = engine.context or checkpoint.config.context_length
    return {rope: rope_frequencies(rope, context) for rope in checkpoint.config.with_draft.ropes}
