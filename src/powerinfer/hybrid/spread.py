"""Experts of a layer that are spread over GPUs: some on the one that has the layer, others on the other ones.

The owner has attention, cache, router and shared expert. Each helper gets what experts read and the tokens' selection,
adds up the experts that it has, and sends the sum back (devices/card_link.py); what no GPU has the CPU computes. All
GPUs read their experts at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.config import ExpertsConfig
from powerinfer.devices.card_link import CardLink
from powerinfer.devices.link import EXPERT_BYTES
from powerinfer.devices.torch_device import current, gpu_failures
from powerinfer.kernels import gpu, gpu_experts
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.neurons import Indices

if TYPE_CHECKING:
    from torch import Tensor, device

    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.link import Link
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.kernels.gpu_types import Experts


class ExpertShare:
    """The experts of a layer on a GPU that does not have the layer."""

    def __init__(
        self,
        link: CardLink,
        index: Indices,
        layer: int,
        config: ExpertsConfig,
        d_model: int,
        load: Callable[[device], Experts],
    ) -> None:
        """index: int32, the experts; load: brings them to a device, in this order. PowerInferError if the device runs
        out of memory."""
        import torch

        self._number = layer + 1
        self._link = link
        self._n, self._top_k = config.n_experts, config.router.top_k
        self._width = config.latents or d_model
        table = np.full(config.n_experts, -1, np.int32)
        table[index] = np.arange(len(index))
        with gpu_failures(f"loading experts of layer {layer}", "give less --vram"), current(link.device):
            self._part = load(link.device)
            self._slots = torch.from_numpy(table).to(link.device)
        link.expert_bytes += self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU."""
        return self._part.nbytes + int(self._slots.nbytes)

    def begin(self, buffers: Link, x: Tensor, adjacent: bool) -> None:
        """Send a step's inputs of experts, float32 [T, width], and what was selected, and have the sum computed.
        buffers: those of the layer, with the selection; adjacent: x is there, too."""
        tokens = len(x)
        few, packed = tokens <= NEURON_TOKENS, buffers.packed(tokens, self._top_k)
        if adjacent:
            self._link.send(packed, few)
        else:
            self._link.send(x, few)
            self._link.send(packed[-self._selection(tokens) :], few, at=x.numel())
        self._link.ask(self._number, partial(self._compute, tokens))

    def _selection(self, tokens: int) -> int:
        return tokens * self._top_k * EXPERT_BYTES // 4

    def _compute(self, tokens: int) -> None:
        """The helper's part."""
        import torch

        n = tokens * self._width
        received = self._link.received(n + self._selection(tokens), tokens <= NEURON_TOKENS)
        x = received[:n].view(tokens, self._width)
        numbers, weights = received[n:].chunk(2)
        experts = numbers.view(torch.int32).view(tokens, self._top_k)
        weights = weights.view(tokens, self._top_k)
        if tokens <= gpu.FEW:
            sums = gpu_experts.expert_sum(self._part, x, experts, weights, self._slots)
        else:
            sums = torch.zeros_like(x)
            members = gpu_experts.members(self._slots, self._part.slots)
            routed = gpu_experts.Routed(x, experts, weights, self._n)
            gpu_experts.add_some([(self._part, self._slots, members)], routed, sums)
        self._link.give(sums)

    def sums(self, tokens: int) -> Tensor:
        """The sum of the tokens' experts there, float32 [T, width], in memory of the owner; what it is given from now
        on waits for them."""
        self._link.join(self._number)
        return self._link.sums(tokens, self._width)


def connect(cards: Sequence[GpuLayers]) -> None:
    """Let each GPU exchange with all others, before their layers are wired."""
    for owner in cards:
        for number, helper in enumerate(cards):
            if helper is not owner:
                owner.exchange_with(helper, number)


def tell_exchanges(executor: SplitExecutor) -> None:
    """Say how long GPUs take to exchange, and why steps of theirs are launched kernel by kernel, if they are."""
    links = [link for card in executor.cards for link in card.card_links]
    times = [link.meet_us for link in links if link.meet_us is not None]
    texts = [f"{max(times):.0f} us an exchange"] if times else []
    problem = next((link.problem for link in links if link.problem), "")
    if problem:
        texts.append(f"launched kernel by kernel ({problem})")
    if texts:
        executor.tell("; ".join(texts))


def experts_on(
    links: Sequence[CardLink], spread: Sequence[Sequence[Indices]], layer: int
) -> list[tuple[CardLink, Indices]]:
    """The experts of a layer on other GPUs than its own, with the exchange with each. spread: as of `ExpertSplit`."""
    pairs = [(link, spread[link.number][layer]) for link in links] if spread else []
    return [(link, index) for link, index in pairs if len(index)]


def deal(experts: Indices, counts: Sequence[int]) -> list[Indices]:
    """The experts of a layer on each GPU, int32 ascending. experts: frequent ones first; counts: of each GPU, of which
    each gets frequent and rare ones alike."""
    assert sum(counts) == len(experts)
    hands: list[list[int]] = [[] for _ in counts]
    for expert in experts.tolist():
        shares = [len(one) / most if most > len(one) else np.inf for one, most in zip(hands, counts, strict=True)]
        hands[int(np.argmin(shares))].append(expert)
    return [np.array(sorted(one), np.int32) for one in hands]
