"""The states of sequences in torch tensors, in slots, for layers that keep one for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from powerinfer.config import DeltaNetConfig, Mamba2Config, StateKind
from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_types import DeltaNet, Mamba, Replay, ShortConv, States

if TYPE_CHECKING:
    from torch import Tensor

Rule = Callable[[int, "Tensor", "Tensor"], "tuple[Tensor, Tensor]"]
"""The rule by which a token changes states: called with its number in the step, what the convolution gives for it,
float32 [channels], and the states of the heads, float32 [heads, n, m]; gives the new ones and what the heads give,
float32 [heads, value_dim].
"""


def state_bytes(kind: StateKind, undo_tokens: int = 0) -> int:
    """Bytes of a sequence's state in a layer; undo_tokens: of so many the inputs are kept, too."""
    return 4 * sum(map(prod, _shapes(kind, 1, undo_tokens)))


def _shapes(kind: StateKind, slots: int, undo_tokens: int) -> list[tuple[int, ...]]:
    """Shapes of `States`."""
    inputs = sum(part.stop - part.start for part in _input_columns(kind))
    heads = slots, kind.n_value_heads, kind.value_dim, kind.key_dim
    return [(slots, kind.taps - 1, kind.channels), heads, (slots * undo_tokens, inputs)]


def _input_columns(kind: StateKind) -> list[slice]:
    """Columns of a layer's products that `States.inputs` has."""
    if isinstance(kind, Mamba2Config):
        return [slice(kind.width, kind.width + kind.channels + kind.n_heads)]
    if not kind.n_key_heads:
        return [slice(0, 2 * kind.channels)]
    gates = kind.channels + kind.width
    decays = kind.decays if isinstance(kind, DeltaNetConfig) else kind.n_value_heads
    return [slice(0, kind.channels), slice(gates, gates + kind.n_value_heads + decays)]


def new_states(kinds: Sequence[StateKind], slots: int, device: Any, undo_tokens: int = 0) -> list[States]:
    """Slots for the states of some layers, in one piece of memory."""
    import torch

    if not kinds:
        return []
    shapes = [shape for kind in kinds for shape in _shapes(kind, slots, undo_tokens)]
    sizes = list(map(prod, shapes))
    parts = torch.zeros(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [States(*views[at : at + 3]) for at in range(0, len(views), 3)]


def keep_inputs(kind: StateKind, products: Tensor, states: States, places: Tensor) -> None:
    """Write to `States.inputs` what may be replayed of T tokens. products: of the layer; places: int64 [T], rows."""
    at = 0
    for part in _input_columns(kind):
        size = part.stop - part.start
        states.inputs[:, at : at + size].index_copy_(0, places, products[:, part])
        at += size


def replayed_inputs(states: States, replay: Replay) -> Tensor:
    """Rows of `States.inputs`, float32 [n, numbers of a token]."""
    return states.inputs.index_select(0, replay.inputs)


def scan(
    net: DeltaNet | Mamba | ShortConv, inputs: Tensor, states: States, runs: Tensor, rows: Tensor, rule: Rule
) -> Tensor:
    """Run T tokens, one after another. Returns what the heads give, float32 [T, heads, value_dim]; the states change.

    inputs: of the convolution, float32 [T, channels]; runs, rows: as of `gpu_delta.delta_net`, or of `Replay`.
    """
    import torch

    kind = net.about
    out = torch.empty((len(inputs), kind.n_value_heads, kind.value_dim), dtype=torch.float32, device=inputs.device)
    of_token = runs[rows.long()].long()
    for t in range(len(inputs)):  # nothing else depends on the data but the slots
        if of_token[t, 0] + of_token[t, 1] <= t:
            continue
        slot = torch.where(of_token[t, 0] == t, of_token[t, 2], of_token[t, 3]).view(1)
        window, heads = (
            part.index_select(0, slot.clamp(min=0))[0].masked_fill(slot < 0, 0)
            for part in (states.window, states.heads)
        )
        window = torch.cat([window, inputs[t : t + 1]])
        mixed = (net.taps * window).sum(dim=0)
        if net.conv_bias is not None:
            mixed = mixed + net.conv_bias
        heads, out[t] = rule(t, gpu.activated(mixed, kind.activation) if kind.activation else mixed, heads)
        states.window.index_copy_(0, of_token[t, 3:], window[None, 1:])
        states.heads.index_copy_(0, of_token[t, 3:], heads[None])
    return out
