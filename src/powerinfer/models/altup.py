"""Wiring of `AltUpConfig`: several residual streams, of which layers compute with one, and LAuReL beside attention."""

from __future__ import annotations

from powerinfer.config import AltUpConfig
from powerinfer.formats.tensors import StreamMix
from powerinfer.models.builder import Matrix, Norm, StreamBuilder, Tensors


def expand(builder: StreamBuilder[Matrix, Norm], checkpoint: Tensors) -> None:
    """Wire what makes the other streams of the embedding."""
    builder.expand_streams(checkpoint.take("altup_in"))


def predict(builder: StreamBuilder[Matrix, Norm], checkpoint: Tensors, layer: int) -> None:
    """Wire what a layer begins with: the prediction of all streams, and x, the active one."""
    builder.predict_streams(layer, _mix(builder, checkpoint, layer, "predict"))


def add_laurel(builder: StreamBuilder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Wire x += norm(x) + laurel_norm(laurel_out . laurel_in . norm(x)), between attention and its projection."""
    assert norm is not None
    name = f"layers.{layer}.laurel_"
    inner, outer = (builder.matrix(checkpoint.take(name + part)) for part in ("in", "out"))
    builder.add_laurel(layer, norm, inner, outer, builder.norm(checkpoint.take(f"{name}norm").float32()))


def halve(builder: StreamBuilder[Matrix, Norm], layer: int) -> None:
    """Wire x *= the root of a half, once it has both what attention gives and what LAuReL does."""
    builder.normalise(layer, builder.scale(2**-0.5))


def correct(builder: StreamBuilder[Matrix, Norm], checkpoint: Tensors, layer: int) -> None:
    """Wire the correction of all streams by x, and x, what the layer's inputs meet."""
    scale = checkpoint.take(f"layers.{layer}.altup_scale").float32()
    mix = _mix(builder, checkpoint, layer, "correct")
    builder.correct_streams(layer, mix, scale if _settings(checkpoint).scaled else None)


def merge(builder: StreamBuilder[Matrix, Norm], checkpoint: Tensors) -> None:
    """Wire x, what the final norm reads, of all streams."""
    builder.merge_streams(checkpoint.take("altup_out"))


def _settings(checkpoint: Tensors) -> AltUpConfig:
    settings = checkpoint.config.altup
    assert settings is not None
    return settings


def _mix(builder: StreamBuilder[Matrix, Norm], checkpoint: Tensors, layer: int, part: str) -> StreamMix:
    name = f"layers.{layer}.altup_"
    norm = checkpoint.take(f"{name}norm").float32()
    return StreamMix(builder.norm(norm), *(checkpoint.take(name + one).float32() for one in ("router", part)))
