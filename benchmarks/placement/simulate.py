"""Decode steps of a plan, simulated: neurons drawn token by token, and both devices' time from layer to layer.

A plan counts with the mean of every part, and the mean of a maximum is more than the maximum of means; it also says
nothing about how long a device has nothing to do. Here each token's neurons are drawn from the profile, each
independently of the others, and a layer's two parts take what these take at the machine's rates (`placement.cost`):

    GPU   what only it does ("other") | hot neurons .......... | waits for the sum | next layer
    CPU                               | half of T_sync, its neurons, half of T_sync |

What a layer takes beside its neurons, the ends of a step, and reads from disk are the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.neurons import BUNDLE_GROUP, Tier
from powerinfer.placement import cost
from powerinfer.placement.plan import Plan
from powerinfer.placement.solver import GROUP


@dataclass(frozen=True)
class _Part:
    """The neurons of a layer on one device. index: int; each: seconds per unit, as `cost.neuron_seconds`; rest: seconds
    beside them."""

    index: NDArray[np.int64]
    each: NDArray[np.float64]
    rest: float

    def seconds(self, needed: dict[int, NDArray[np.bool_]]) -> float:
        """needed: bool [neurons of the layer], by kind (`cost.SELECTED`, ...)."""
        counts = np.zeros(len(self.each))
        counts[cost.EACH] = len(self.index)
        for kind, own in needed.items():
            counts[kind] = np.count_nonzero(own[self.index])
        counts[cost.SHARED] = len(np.unique(self.index[needed[cost.ACTIVE][self.index]] // BUNDLE_GROUP))
        return self.rest + float(counts @ self.each)


@dataclass(frozen=True)
class _Layer:
    """thresholds: by kind, of each neuron how often it is needed; times: the plan's, by term."""

    thresholds: dict[int, NDArray[np.float64]]
    hot: _Part
    cold: _Part
    times: dict[str, float]


def simulated(plan: Plan, tokens: int = 32, seed: int = 0) -> dict[str, Any]:
    """Of a plan for one request with neurons told apart: tok_s; slowest, fastest: tokens a second of the 95th and the
    5th percentile of the steps; busy: share of the time in which a device works; both: in which both do; gpu_share: of
    the neurons that fire, those on the GPU."""
    request, choice = plan.request, plan.choice
    assert request.batch == 1 and request.goes != "all" and request.hardware.gpu is not None
    layers, first = _layers(plan), plan.claims.gpu_layers
    half = 0.5e-6 * request.hardware.sync_us
    ends = choice.seconds - sum(_planned(one.times) for one in layers)
    rng = np.random.default_rng(seed)
    steps, sums = [], np.zeros(4)  # seconds in which a device works, in which both do; neurons that fire, on the GPU
    for _ in range(tokens):
        seconds = ends
        sums[0] += ends
        for number, layer in enumerate(layers):
            u = rng.random(len(layer.thresholds[cost.ACTIVE]))
            needed = {kind: u < own for kind, own in layer.thresholds.items()}
            active = needed[cost.ACTIVE]
            sums[2:] += np.count_nonzero(active), np.count_nonzero(active[layer.hot.index])
            seconds += layer.times["other"] + layer.times["disk"]
            sums[0] += layer.times["other"]
            on_cpu = layer.cold.seconds(needed)
            if number >= first:
                seconds += on_cpu
                sums[0] += on_cpu
                continue
            on_gpu = layer.hot.seconds(needed)
            if len(layer.cold.index) == 0 or not _called(needed, layer.cold):
                seconds += on_gpu
                sums[0] += on_gpu
                continue
            seconds += max(on_gpu, half + on_cpu + half)
            together = max(0.0, min(on_gpu, half + on_cpu) - half)
            sums[:2] += on_gpu + on_cpu - together, together
        steps.append(seconds)
    whole = float(np.sum(steps))
    return {
        "tokens": tokens,
        "tok_s": tokens / whole,
        "slowest": float(1 / np.quantile(steps, 0.95)),
        "fastest": float(1 / np.quantile(steps, 0.05)),
        "busy": float(sums[0] / whole),
        "both": float(sums[1] / whole),
        "gpu_share": float(sums[3] / sums[2]) if sums[2] else 0.0,
    }


def _called(needed: dict[int, NDArray[np.bool_]], cold: _Part) -> bool:
    """Whether the CPU has anything to do: a predictor tells in advance that it has not."""
    return cost.SELECTED not in needed or bool(needed[cost.SELECTED][cold.index].any())


def _planned(times: dict[str, float]) -> float:
    return times["other"] + max(times["gpu"], times["cpu"] + times["sync"]) + times["disk"]


def _layers(plan: Plan) -> list[_Layer]:
    request, choice = plan.request, plan.choice
    model, profile, gpu, cpu = request.model, request.profile, request.hardware.gpu, request.hardware.cpu
    assert gpu is not None
    way, placement = cost.WAYS[request.goes][0], plan.placement(profile)
    orders = [profile.order(layer) for layer in range(profile.n_layers)]
    expected = cost.expected(profile, orders, model.config, model.selected, 1, GROUP)
    found = []
    for layer in range(profile.n_layers):
        tiers, p = placement.split_by_tier(layer), profile.fraction(layer)
        ffn = model.config.layers[layer].ffn
        kinds = (cost.ACTIVE, cost.FIRED, *((cost.SELECTED,) if way == "predicted" else ()))
        thresholds = {kind: cost.needed(p, ffn, kind, model.selected[layer]) for kind in kinds}
        hot, times = tiers[Tier.GPU].astype(np.int64), choice.layer_seconds[layer]
        cold = np.setdiff1d(np.arange(len(p)), hot)
        here = expected.sums[layer, choice.gpu[layer]]
        each = [cost.neuron_seconds(device, model.bundles[layer], way) for device in (gpu, cpu)]
        rest = times["gpu"] - float(here @ each[0]) if layer < plan.claims.gpu_layers else 0.0
        fixed = cost.fixed_seconds(cpu, way)
        found.append(_Layer(thresholds, _Part(hot, each[0], rest), _Part(cold, each[1], fixed), times))
    return found
