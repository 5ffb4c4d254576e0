"""Experts over torch tensors: the router, and the sum of a token's experts that are on the device. As in `gpu`, plain
torch defines what the Triton kernels compute, and sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.config import ExpertsConfig, RouterConfig
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_types import NOT_A_NUMBER, Experts, Weight
from powerinfer.neurons import Indices

if TYPE_CHECKING:
    from torch import Tensor


def resident(tensors: Sequence[RawTensor], index: Indices, about: ExpertsConfig, device: Any) -> Experts:
    """Some experts on a torch device. tensors: [experts, out, in], in the order of `about.matrices`; index: int32
    ascending, at least one, the expert of each slot. ModelError for values that the device's type cannot hold."""
    *gate, up, down = (_slots(tensor, index, device) for tensor in tensors)
    return Experts(len(index), about.size, gate[0] if gate else None, up, down, about.activation, about.threshold)


def replace(experts: Experts, slot: int, matrices: Sequence[RawTensor]) -> None:
    """Put another expert in a slot. matrices: [out, in], in the order of `ExpertsConfig.matrices`."""
    own = [weight for weight in (experts.gate, experts.up, experts.down) if weight is not None]
    for weight, tensor in zip(own, matrices, strict=True):
        gpu.overwrite(weight, slot * tensor.shape[0], tensor)


def from_rows(about: ExpertsConfig, tensors: Sequence[RawTensor], parts: Sequence[Tensor], n: int) -> Experts:
    """n experts from their bytes on the device, as the file stores them, one behind the other. tensors: as of
    `resident`, of a type of `GPU_TYPES`; parts: uint8, of each matrix."""
    weights = []
    for tensor, part in zip(tensors, parts, strict=True):
        _, rows, cols = tensor.shape
        weights.append(gpu.stored(tensor.type, n * rows, cols, part))
    *gate, up, down = weights
    return Experts(n, about.size, gate[0] if gate else None, up, down, about.activation, about.threshold)


def _slots(tensor: RawTensor, index: Indices, device: Any) -> Weight:
    n, rows, cols = tensor.shape
    row_map: Indices = (index[:, None] * rows + np.arange(rows, dtype=np.int32)).reshape(-1).astype(np.int32)
    return gpu.upload(RawTensor(tensor.type, (n * rows, cols), tensor.data), device, row_map)


def slot_bytes(tensors: Sequence[tuple[str, int, int]]) -> int:
    """Bytes on a device of an expert with matrices of that (type, rows, columns)."""
    return sum(gpu.weight_bytes(*one) for one in tensors)


# ---------------------------------------------------------------------------------------------------------------------
# The router


def route(logits: Tensor, about: RouterConfig, correction: Tensor | None, experts: Tensor, weights: Tensor) -> None:
    """experts int32, weights float32 [T, top_k] = each token's experts, ascending, and their weights.

    logits: float32 [T, n]; correction: float32 [n], added to the scores for the selection alone. Experts are valid and
    differ whatever the logits are; of equal scores the first is selected.
    """
    if gpu.which(logits) == "triton":
        from powerinfer.kernels import triton_experts

        triton_experts.route(logits, about, correction, experts, weights)
        return
    import torch

    scores = logits.sigmoid() if about.scoring == "sigmoid" else logits.softmax(dim=-1)
    wanted = scores if correction is None else scores + correction
    wanted = wanted.nan_to_num(nan=NOT_A_NUMBER, neginf=NOT_A_NUMBER)
    if about.groups > 1:
        grouped = wanted.unflatten(-1, (about.groups, -1))
        best = grouped.sort(dim=-1, descending=True).values[..., : about.group_best].sum(dim=-1)
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, _largest(best, about.top_groups), False)
        wanted = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    selected = _largest(wanted, about.top_k).sort(dim=-1).values
    own = scores.gather(1, selected)
    factor = about.scale / (own.sum(dim=-1, keepdim=True) + 1e-20) if about.normalise else about.scale
    experts.copy_(selected)
    torch.mul(own, factor, out=weights)


def _largest(x: Tensor, n: int) -> Tensor:
    return x.argsort(dim=-1, descending=True, stable=True)[:, :n]


# ---------------------------------------------------------------------------------------------------------------------
# The sum


def expert_sum(experts: Experts, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts that are here, float32 [T, d_model].

    x: float32 [T, d_model]; slots: int32 [T, top_k], -1 for an expert that is not here; weights: float32 [T, top_k].
    """
    if gpu.which(x) == "triton":
        from powerinfer.kernels import triton_experts

        return triton_experts.expert_sum(experts, x, slots, weights)
    import torch

    out = torch.zeros((*slots.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for slot in range(experts.slots):
        token, place = (slots == slot).nonzero(as_tuple=True)
        if len(token):
            out[token, place] = _expert(experts, slot, x[token], weights[token, place])
    return out.sum(dim=1)


def _expert(experts: Experts, slot: int, x: Tensor, weights: Tensor) -> Tensor:
    """What one expert gives for float32 [T, d_model], times the tokens' weights."""

    def product(weight: Weight, x: Tensor) -> Tensor:
        rows = weight.rows // experts.slots
        return x @ gpu.values(weight, slot * rows, (slot + 1) * rows).T

    up = product(experts.up, x)
    if experts.gate is None:
        h = gpu.activate(experts.activation, up, None, experts.threshold)
    else:
        h = gpu.activate(experts.activation, product(experts.gate, x), up, experts.threshold)
    return product(experts.down, h * weights[:, None])


def shared_weight(x: Tensor, gate: Tensor) -> Tensor:
    """The weight of a shared expert, float32 [T, 1]: the sigmoid of x . gate, float32 [T, d_model] and [d_model]."""
    return (x * gate).sum(dim=-1, keepdim=True).sigmoid()
