"""Experts over torch tensors: the router, and the sum of a token's experts that are on the device. As in `gpu`, plain
torch defines what the Triton kernels compute, and sums have a fixed order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from powerinfer.config import ExpertsConfig, RouterConfig
from powerinfer.formats.quant import Float32
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import gpu, gpu_panels
from powerinfer.kernels.cpu import LANES, ExpertPanels
from powerinfer.kernels.gpu_types import BY_NEURON, NOT_A_NUMBER, Elsewhere, ExpertPredictor, Experts, Router, Weight
from powerinfer.neurons import BUNDLE_GROUP, Indices

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.triton_prompt_experts import TokenBlock

TURNED = 1 << 19  # elements of down at a time that become columns: of Q4_0 some 2 MiB are between

Biases = Sequence[Float32 | None]
"""Of experts' matrices, float32 [experts, out], in the order of `ExpertsConfig.matrices`; None where there is none."""


def resident(
    tensors: Iterable[RawTensor],
    index: Indices,
    config: ExpertsConfig,
    device: Any,
    biases: Biases = (),
    by_neuron: bool = False,
    predictor: tuple[float, RawTensor] | None = None,
    neurons: Indices | None = None,
) -> Experts:
    """Some experts on a torch device. tensors: [experts, out, in], in the order of `config.matrices`, one needed at a
    time; index: int32, at least one, the expert of each slot; by_neuron: as `Experts` has it; predictor: of all experts
    by neuron, its threshold and its second matrix [experts, size, rank]; neurons: of those, int32 [experts, some], the
    only ones of each to be here, ascending, None: all. ModelError for values that the device's type cannot hold."""
    if not by_neuron:
        return _experts(config, len(index), [_slots(tensor, index, device) for tensor in tensors], biases, index)
    import torch

    *first, down = tensors
    *gate, up = (_slots(tensor, index, device, neurons) for tensor in first)
    kind, size = gpu.gpu_type(down.type, config.size), config.size if neurons is None else neurons.shape[1]
    weight, shared = _columns(kind, len(index) * size, len(index) * config.size, down.shape[1], device)
    matrices = gate[0] if gate else None, up, weight
    activation, selects, group = (config.activation, config.threshold), None, None
    if predictor is not None:
        selects = ExpertPredictor(_slots(predictor[1], index, device, neurons), predictor[0])
    if neurons is not None and shared is not None:
        begin = np.arange(len(index), dtype=np.int32)[:, None] * (config.size // BUNDLE_GROUP)
        group = torch.from_numpy((begin + neurons[index] // BUNDLE_GROUP).astype(np.int32).reshape(-1)).to(device)
    more: dict[str, Any] = {"shared": shared, "predictor": selects, "group": group}
    experts = Experts(len(index), size, *matrices, *activation, by_neuron=True, **more)
    for slot, expert in enumerate(index):
        _put_down(experts, slot, down.matrix(int(expert)), None if neurons is None else neurons[expert])
    return experts


def tells_apart(down_type: str, size: int) -> bool:
    """Whether `resident` can tell the neurons of experts apart whose down has a type and rows of `size`."""
    return gpu.gpu_type(down_type, size) in BY_NEURON


def _columns(kind: str, neurons: int, sharing: int, d_model: int, device: Any) -> tuple[Weight, Tensor | None]:
    """Room for the columns of down, and for the scales of so many, with those that are not here."""
    import torch

    if kind not in gpu.SHARING:
        return gpu.empty(kind, neurons, d_model, device), None
    shared = torch.empty((sharing // BUNDLE_GROUP, d_model), dtype=torch.float16, device=device)
    return gpu.empty(gpu.SHARING[kind], neurons, d_model, device), shared


def _put_down(experts: Experts, slot: int, tensor: RawTensor, neurons: Indices | None = None) -> None:
    """The columns of an expert's down [d_model, size], or those of some neurons, become the rows of a slot. Some blocks
    of d_model at a time, for what is between takes memory; on the stream of this thread."""
    import torch

    d_model, size = tensor.shape
    stored, device = tensor.gathered().rows(), experts.down.data.device
    to = experts.down.data[slot * experts.size : (slot + 1) * experts.size]
    groups = size // BUNDLE_GROUP
    row_index = slice(None) if neurons is None else torch.from_numpy(neurons.astype(np.int64)).to(device)
    for first, last in gpu.pieces(-(-d_model // 32), 32 * size, TURNED):
        begin, end = 32 * first, min(32 * last, d_model)
        rows = end - begin
        own = gpu.empty(gpu.gpu_type(tensor.type, size), rows, size, device)
        gpu.overwrite(own, 0, dataclasses.replace(tensor, shape=(rows, size), data=stored[begin:end].reshape(-1)))
        if experts.shared is not None and own.scales is not None:
            experts.shared[slot * groups : (slot + 1) * groups, begin:end].copy_(own.scales.T)
        if own.type != "Q4_0":
            to[:, begin:end].copy_(own.data.T[row_index])
            continue
        pairs = own.data.view(rows, groups, 16)
        codes = torch.cat((pairs & 15, pairs >> 4), dim=-1).view(rows, size).T[row_index]
        low, high = codes.reshape(experts.size, rows // 32, 2, 16).unbind(dim=2)
        to[:, begin // 2 : end // 2].copy_((low | high << 4).view(experts.size, rows // 2))


def _experts(about: ExpertsConfig, n: int, weights: Sequence[Weight], biases: Biases, index: Indices) -> Experts:
    """biases: of all experts; index: those that are here."""
    import torch

    *gate, up, down = weights
    settings: dict[str, Any] = {"scales_input": about.router.scales_input}
    for part, bias in zip(about.matrices, biases, strict=False):
        if bias is not None:
            settings[f"{part}_bias"] = torch.from_numpy(bias[index].astype(np.float32).reshape(-1)).to(up.data.device)
    return Experts(n, about.size, gate[0] if gate else None, up, down, about.activation, about.threshold, **settings)


def replace(
    experts: Experts,
    slot: int,
    matrices: Sequence[RawTensor],
    expert: int = 0,
    biases: Biases = (),
    outer: RawTensor | None = None,
) -> None:
    """Put another expert in a slot. matrices: [out, in], in the order of `ExpertsConfig.matrices`; biases: of all;
    outer: its rows of a predictor, if there is one."""
    import torch

    if experts.predictor is not None:
        assert outer is not None
        gpu.overwrite(experts.predictor.outer, slot * experts.size, outer)
    if experts.by_neuron:
        *matrices, down = matrices
        _put_down(experts, slot, down)
    own = [weight for weight in (experts.gate, experts.up, experts.down) if weight is not None]
    for weight, tensor in zip(own, matrices, strict=not experts.by_neuron):
        gpu.overwrite(weight, slot * tensor.shape[0], tensor)
    for to, bias in zip(_held_biases(experts), biases, strict=False):
        if to is not None and bias is not None:
            rows = bias.shape[1]
            to[slot * rows : (slot + 1) * rows] = torch.from_numpy(bias[expert].astype(np.float32)).to(to.device)


def _held_biases(experts: Experts) -> list[Tensor | None]:
    """Biases on the device, in the order of `ExpertsConfig.matrices`."""
    return [experts.gate_bias] * (experts.gate is not None) + [experts.up_bias, experts.down_bias]


def takes_panels(experts: Experts, tensors: Sequence[RawTensor], panels: Sequence[ExpertPanels]) -> bool:
    """Whether rows from the CPU's panels are, to the bit, those that `resident` makes of the file's tensors."""
    same = (one.type == tensor.type for one, tensor in zip(panels, tensors, strict=True))
    return not experts.by_neuron and all(same) and all(one.type in gpu_panels.SAME_BITS for one in panels)


def put_panels(experts: Experts, slot: int, panels: Sequence[ExpertPanels], parts: Sequence[Tensor]) -> None:
    """Put another expert in a slot, of its panels on the device. parts: uint8, of each matrix, and behind these,
    float32 in bytes, of each bias that there is. On the stream of this thread."""
    import torch

    weights = [weight for weight in (experts.gate, experts.up, experts.down) if weight is not None]
    for weight, one, part in zip(weights, panels, parts, strict=False):
        gpu_panels.put(weight, slot * one.rows, one.type, one.k, part.view(one.rows // LANES, -1))
    biases = [bias for bias in _held_biases(experts) if bias is not None]
    for to, part in zip(biases, parts[len(weights) :], strict=True):
        rows = len(to) // experts.slots
        to[slot * rows : (slot + 1) * rows].copy_(part.view(torch.float32))


def from_rows(
    config: ExpertsConfig, tensors: Sequence[RawTensor], parts: Sequence[Tensor], index: Indices, biases: Biases = ()
) -> Experts:
    """Experts from their bytes on the device, as the file stores them, one behind the other. tensors, biases: of all,
    as of `resident`, of a type of `GPU_TYPES`; parts: uint8, of each matrix; index: these experts."""
    weights = []
    for tensor, part in zip(tensors, parts, strict=True):
        n, rows, cols = tensor.shape
        factors = None if tensor.scales is None else np.repeat(np.resize(tensor.scales, n)[index], rows)
        weights.append(gpu.stored(tensor.type, len(index) * rows, cols, part, factors))
    return _experts(config, len(index), weights, biases, index)


def from_panels(
    config: ExpertsConfig,
    panels: Sequence[ExpertPanels],
    parts: Sequence[Tensor],
    index: Indices,
    biases: Biases = (),
) -> Experts:
    """The same from the CPU's panels of these experts' matrices, as `gpu_panels` converts them."""
    weights = []
    for one, part in zip(panels, parts, strict=True):
        weights.append(gpu_panels.from_panels(one.type, one.k, part.view(len(index) * one.rows // LANES, -1)))
    return _experts(config, len(index), weights, biases, index)


def _slots(tensor: RawTensor, index: Indices, device: Any, among: Indices | None = None) -> Weight:
    """some: of each matrix the rows to be here, None: all."""
    n, rows, cols = tensor.shape
    neurons = np.arange(rows, dtype=np.int32) if among is None else among[index]
    row_map: Indices = (index[:, None] * rows + neurons).reshape(-1).astype(np.int32)
    return gpu.upload(dataclasses.replace(tensor, shape=(n * rows, cols)), device, row_map)


# ---------------------------------------------------------------------------------------------------------------------
# The router


def upload_router(
    weight: RawTensor, bias: Float32 | None, correction: Float32 | None, settings: RouterConfig, device: Any
) -> Router:
    """A router on a device; arguments as `Router` has them."""
    import torch

    of_bias, of_correction = (
        None if one is None else torch.from_numpy(np.array(one, np.float32)).to(device) for one in (bias, correction)
    )
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    return Router(settings, gpu.upload(weight, device), of_bias, of_correction, arrived)


def select(
    router: Router,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    sent: tuple[Tensor, Tensor] | None = None,
    elsewhere: Elsewhere | None = None,
) -> None:
    """`route` by the router's logits of x, float32 [T, d_model]; of one token by one Triton kernel."""
    if len(x) == 1 and gpu.which(x) == "triton":
        from powerinfer.kernels import triton_experts

        triton_experts.select(router, x, experts, weights, sent, elsewhere)
    else:
        logits = gpu.linear(router.weight, x, router.bias)
        route(logits, router.settings, router.correction, experts, weights, sent, elsewhere)


def route(
    logits: Tensor,
    about: RouterConfig,
    correction: Tensor | None,
    experts: Tensor,
    weights: Tensor,
    sent: tuple[Tensor, Tensor] | None = None,
    elsewhere: Elsewhere | None = None,
) -> None:
    """experts int32, weights float32 [T, top_k] = each token's experts, ascending, and their weights.

    logits: float32 [T, n]; correction: float32 [n], added to the scores for the selection alone. Experts are valid and
    differ whatever the logits are; of equal scores the first is selected. sent: memory of the host (`gpu_host`) that
    gets both, too; elsewhere: to settle, of at most `gpu.FEW` tokens.
    """
    if gpu.which(logits) == "triton":
        from powerinfer.kernels import triton_experts

        triton_experts.route(logits, about, correction, experts, weights, sent, elsewhere)
        return
    _route(logits, about, correction, experts, weights)
    if sent is not None:
        sent[0].copy_(experts)
        sent[1].copy_(weights)
    if elsewhere is not None:
        gpu.settle(elsewhere.table[experts.long()] < 0, elsewhere.answer)


def _route(logits: Tensor, settings: RouterConfig, correction: Tensor | None, experts: Tensor, weights: Tensor) -> None:
    import torch

    if settings.scoring == "sparsemixer":
        selected, shares = mix_experts(logits, settings)
        selected, places = selected.sort(dim=-1)
        experts.copy_(selected)
        torch.gather(shares, 1, places, out=weights)
        return
    scores = logits.sigmoid() if settings.scoring == "sigmoid" else logits.softmax(dim=-1)
    wanted = scores if correction is None else scores + correction
    wanted = wanted.nan_to_num(nan=NOT_A_NUMBER, neginf=NOT_A_NUMBER)
    if settings.groups > 1:
        grouped = wanted.unflatten(-1, (settings.groups, -1))
        best = grouped.sort(dim=-1, descending=True).values[..., : settings.group_best].sum(dim=-1)
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, _largest(best, settings.top_groups), False)
        wanted = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    selected = _largest(wanted, settings.top_k).sort(dim=-1).values
    own = scores.gather(1, selected)
    factor = settings.scale / (own.sum(dim=-1, keepdim=True) + 1e-20) if settings.normalise else settings.scale
    experts.copy_(selected)
    torch.mul(own, factor, out=weights)


def mix_experts(logits: Tensor, router: RouterConfig) -> tuple[Tensor, Tensor]:
    """The experts of each token by sparsemixer, int64 [T, top_k] as they are selected, and their weights."""
    import torch

    left, selectable = logits, logits.nan_to_num(nan=NOT_A_NUMBER, neginf=NOT_A_NUMBER)
    selected, shares = [], []
    for _ in range(router.top_k):
        best = _largest(selectable, 1)
        most = left.gather(1, best)
        far = most - logits > 2 * router.nearness * torch.maximum(logits.abs(), most)
        shares.append(left.masked_fill(far, -torch.inf).softmax(dim=-1).gather(1, best))
        selected.append(best)
        left, selectable = left.scatter(1, best, -torch.inf), selectable.scatter(1, best, -torch.inf)
    return torch.cat(selected, dim=1), torch.cat(shares, dim=1)


def _largest(x: Tensor, n: int) -> Tensor:
    return x.argsort(dim=-1, descending=True, stable=True)[:, :n]


# ---------------------------------------------------------------------------------------------------------------------
# The sum


class Routed:
    """Many tokens x, float32 [T, d_model], with the experts that a router selected for each, int32 [T, top_k] of n, -1:
    none, and their weights, float32 [T, top_k]. Sums of some of these experts after others use what is made of it."""

    def __init__(self, x: Tensor, experts: Tensor, weights: Tensor, n: int) -> None:
        self.x, self.experts, self.weights = x, experts, weights
        self._n = n
        self._blocks: list[TokenBlock] | None = None

    def blocks(self) -> list[TokenBlock]:
        """Blocks of its tokens, as Triton kernels take them."""
        if self._blocks is None:
            from powerinfer.kernels import triton_prompt_experts

            self._blocks = triton_prompt_experts.blocks(self.x, self.experts, self.weights, self._n)
        return self._blocks


def members(table: Tensor, slots: int) -> Tensor:
    """The expert in each slot, -1: none, int32 [slots]. table: int32, the slot of each expert, -1: none."""
    import torch

    numbers = torch.arange(len(table), dtype=torch.int32, device=table.device)
    places = torch.where(table < 0, slots, table).long()  # no data that the host would wait for
    return torch.full((slots + 1,), -1, dtype=torch.int32, device=table.device).scatter_(0, places, numbers)[:slots]


Part: TypeAlias = "tuple[Experts, Tensor, Tensor]"
"""Some of a layer's experts; the slot of each of all, as of `expert_sum`; and int32, the expert of each slot, -1:
none."""


def add_some(parts: Iterable[Part], routed: Routed, into: Tensor) -> None:
    """Add the weighted sums of the tokens' experts in some parts, no expert in two of them, to float32 [T, d_model]. A
    part is used until the next one is asked for."""
    if gpu.which(into) == "triton" and len(into) > gpu.FEW:
        from powerinfer.kernels import triton_prompt_experts

        triton_prompt_experts.add_experts(parts, routed.blocks(), into)
        return
    for experts, table, _ in parts:
        expert_sum(experts, routed.x, routed.experts, routed.weights, table, into)
        del experts  # the next one reuses its memory


def expert_sum(
    experts: Experts,
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    table: Tensor | None = None,
    into: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's experts that are here, float32 [T, d_model]; or `into`, that much more.

    x: float32 [T, d_model]; slots: int32 [T, top_k], -1 for an expert that is not here; weights: float32 [T, top_k].
    table: int32 [n], with which slots are experts: the slot of each of the model's. hidden: float32 [T, rank] of at
    most `gpu.FEW` tokens, what the predictor takes (`gpu.hide`); None: every neuron counts.
    """
    import torch

    if gpu.which(x) == "triton" and len(x) <= gpu.FEW:
        from powerinfer.kernels import triton_experts

        return triton_experts.expert_sum(experts, x, slots, weights, table, into, hidden)
    if gpu.which(x) == "triton":
        from powerinfer.kernels import triton_prompt_experts

        blocks = Routed(x, slots, weights, experts.slots if table is None else len(table)).blocks()
        into = torch.zeros_like(x) if into is None else into
        of_slots = None if table is None else members(table, experts.slots)
        triton_prompt_experts.add_experts([(experts, table, of_slots)], blocks, into)
        return into
    slots = slots if table is None else table[slots.long()]
    out = torch.zeros((*slots.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for slot in range(experts.slots):
        token, place = (slots == slot).nonzero(as_tuple=True)
        if len(token):
            of_token = None if hidden is None else hidden[token]
            out[token, place] = _expert(experts, slot, x[token], weights[token, place], of_token)
    total = out.sum(dim=1)
    return total if into is None else into.add_(total)


def _expert(experts: Experts, slot: int, x: Tensor, weights: Tensor, hidden: Tensor | None) -> Tensor:
    """What one expert gives for float32 [T, d_model], times the tokens' weights. hidden: as of `expert_sum`."""
    import torch

    def product(weight: Weight, bias: Tensor | None, x: Tensor) -> Tensor:
        rows = slice(slot * (weight.rows // experts.slots), (slot + 1) * (weight.rows // experts.slots))
        out = x @ gpu.values(weight, rows.start, rows.stop).T
        return out if bias is None else out + bias[rows]

    if experts.scales_input:
        x, weights = x * weights[:, None], torch.ones_like(weights)
    up = product(experts.up, experts.up_bias, x)
    if experts.gate is None:
        h = gpu.activate(experts.activation, up, None, experts.threshold)
    else:
        gate = product(experts.gate, experts.gate_bias, x)
        h = gpu.activate(experts.activation, gate, up, experts.threshold)
    if not experts.by_neuron:
        return weights[:, None] * product(experts.down, experts.down_bias, h)
    begin, end = slot * experts.size, (slot + 1) * experts.size
    if hidden is not None:
        assert experts.predictor is not None
        z = hidden @ gpu.values(experts.predictor.outer, begin, end).T
        h = h.masked_fill(z < experts.predictor.threshold, 0.0)
    scales = None
    if experts.group is not None and experts.shared is not None:
        scales = experts.shared[experts.group[begin:end].long()]
    elif experts.shared is not None:
        scales = experts.shared[begin // BUNDLE_GROUP : end // BUNDLE_GROUP].repeat_interleave(BUNDLE_GROUP, dim=0)
    return weights[:, None] * (h @ gpu.values(experts.down, begin, end, scales))


def add_many(expert: Experts, x: Tensor, into: Tensor) -> None:
    """Add the sum of an expert by neuron, in the only slot, for many tokens x, all float32 [T, d_model]: every neuron
    is computed."""
    import torch

    group = None
    if expert.shared is not None:
        group = torch.arange(expert.size, dtype=torch.int32, device=x.device) // BUNDLE_GROUP
    matrices = expert.gate, expert.up, expert.down, expert.shared, group
    neurons = gpu.Neurons(*matrices, None, None, expert.activation, expert.threshold)
    gpu.add_down(neurons, gpu.products(neurons, x, None, 0.0), into)


def shared_weight(x: Tensor, gate: Tensor) -> Tensor:
    """The weight of a shared expert, float32 [T, 1]: the sigmoid of x . gate, float32 [T, d_model] and [d_model]."""
    return (x * gate).sum(dim=-1, keepdim=True).sigmoid()
