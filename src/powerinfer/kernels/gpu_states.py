"""The states of sequences in torch tensors, in slots, for layers that keep one for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from powerinfer.config import StateKind
from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_types import DeltaNet, Mamba, ShortConv, States

if TYPE_CHECKING:
    from torch import Tensor

Rule = Callable[[int, "Tensor", "Tensor"], "tuple[Tensor, Tensor]"]
"""The rule by which a token changes states: called with its number in the step, what the convolution gives for it,
float32 [channels], and the states of the heads, float32 [heads, n, m]; gives the new ones and what the heads give,
float32 [heads, value_dim].
"""


def state_bytes(kind: StateKind) -> int:
    """Bytes of a sequence's state in a layer."""
    return 4 * sum(map(prod, _shapes(kind)))


def _shapes(kind: StateKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the window, and of the heads."""
    return (kind.taps - 1, kind.channels), (kind.n_value_heads, kind.value_dim, kind.key_dim)


def new_states(kinds: Sequence[StateKind], slots: int, device: Any) -> list[States]:
    """Slots for the states of some layers, in one piece of memory."""
    import torch

    if not kinds:
        return []
    shapes = [(slots, *shape) for kind in kinds for shape in _shapes(kind)]
    sizes = list(map(prod, shapes))
    parts = torch.zeros(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [States(*pair) for pair in zip(views[::2], views[1::2], strict=True)]


def scan(
    net: DeltaNet | Mamba | ShortConv, inputs: Tensor, states: States, runs: Tensor, rows: Tensor, rule: Rule
) -> Tensor:
    """Run T tokens, one after another. Returns what the heads give, float32 [T, heads, value_dim]; the states change.

    inputs: of the convolution, float32 [T, channels]; runs, rows: as of `gpu_delta.delta_net`.
    """
    import torch

    kind = net.about
    out = torch.empty((len(inputs), kind.n_value_heads, kind.value_dim), dtype=torch.float32, device=inputs.device)
    of_token = runs[rows.long()].long()
    for t in range(len(inputs)):  # nothing depends on the data but the slots
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
