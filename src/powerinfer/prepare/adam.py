"""Adam with the bits of `torch.optim.Adam`, whose first instance takes seconds: it loads torch's compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam


@dataclass
class Moments:
    """Of a tensor's gradients: the running means of them and of their squares, and the steps so far (float32 [])."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class Adam:
    """Steps of tensors by the gradients that they have; each group of tensors has a rate of its own.

    groups: of leaves that require gradients. betas: of the means of gradients and of their squares. fused: in one
    kernel a device, whose bits are others.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], betas: tuple[float, float], fused: bool = False) -> None:
        self.groups, self.betas, self.fused = groups, betas, fused
        self.moments: dict[Tensor, Moments] = {}

    @torch.no_grad()
    def step(self, rates: Sequence[float]) -> None:
        """One step, at a learning rate for each group; the gradients are gone afterwards."""
        for group, rate in zip(self.groups, rates, strict=True):
            tensors, gradients = [one for one in group if one.grad is not None], []
            for one in tensors:
                if one not in self.moments:
                    step = torch.zeros((), device=one.device if self.fused else None)  # where the kernel reads it
                    self.moments[one] = Moments(torch.zeros_like(one), torch.zeros_like(one), step)
                gradients.append(one.grad)
            moments = [self.moments[one] for one in tensors]
            adam(
                tensors, gradients, [one.exp_avg for one in moments], [one.exp_avg_sq for one in moments], [],
                [one.step for one in moments], fused=self.fused or None, amsgrad=False, beta1=self.betas[0],
                beta2=self.betas[1], lr=rate, weight_decay=0.0, eps=1e-8, maximize=False,
            )  # fmt: skip
            for one in group:
                one.grad = None
