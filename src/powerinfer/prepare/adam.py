"""Adam with the bits of `torch.optim.Adam`, whose first instance takes seconds: it loads torch's compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam


@dataclass
class Moments:
    """Moments of a tensor: running means of its gradients and of their squares, and the steps so far, float32 []."""

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

    def step(self, rates: Sequence[float]) -> None:
        """One step, at a learning rate for each group; the gradients are gone afterwards."""
        with torch.no_grad():
            for group, rate in zip(self.groups, rates, strict=True):
                tensors = [tensor for tensor in group if tensor.grad is not None]
                for tensor in tensors:
                    if tensor not in self.moments:
                        device = tensor.device if self.fused else None  # where the kernel reads it
                        step = torch.zeros((), device=device)
                        self.moments[tensor] = Moments(torch.zeros_like(tensor), torch.zeros_like(tensor), step)
                moments, gradients = [self.moments[tensor] for tensor in tensors], [tensor.grad for tensor in tensors]
                adam(
                    tensors, gradients, [one.exp_avg for one in moments], [one.exp_avg_sq for one in moments], [],
                    [one.step for one in moments], fused=self.fused or None, amsgrad=False, beta1=self.betas[0],
                    beta2=self.betas[1], lr=rate, weight_decay=0.0, eps=1e-8, maximize=False,
                )  # fmt: skip
                for tensor in group:
                    tensor.grad = None
