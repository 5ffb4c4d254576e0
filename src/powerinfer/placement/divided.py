"""The experts of each layer divided between several GPUs (`--split-mode expert`), which compute them at the same time.

    GPU 1   layers 0 to 17: attention, cache, router, shared experts     some hot experts of every layer
    GPU 2   layers 18 to 31, and the head: the same                      the other hot experts of every layer

The parts of `several.py` claim room for what a layer's own GPU has, and for experts. Which GPU has how many of a
layer's is settled here: in proportion to the rates of the GPUs, so that all end at the same time, as far as each has
room. What a GPU needs to compute experts of another one's layers is part of what it reserves for steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.devices.card_link import card_link_bytes
from powerinfer.hardware.description import Device
from powerinfer.placement.cost import expert_seconds, matrix_seconds
from powerinfer.placement.experts import slots_in_least_time
from powerinfer.placement.shapes import Model
from powerinfer.placement.working_memory import experts_for_others

if TYPE_CHECKING:
    from powerinfer.placement.plan import PlanRequest
    from powerinfer.placement.several import Parts

FLAG = "--split-mode expert"


def split_problem(config: ModelConfig, engine: EngineConfig, gpus: int) -> str | None:
    """The reason, with how to mend it, why the engine cannot divide the experts of a model of this configuration
    between that number of GPUs; None: it can, or nobody asks for it."""
    if engine.split_mode != "expert":
        return None
    if not config.experts:
        return f"{FLAG} is for models of experts: leave it out"
    if gpus < 2:
        return f"{FLAG} is for several GPUs: name them with --gpu 0,1, or --vram 8GiB,12GiB, or leave it out"
    if engine.expert_policy != "static":
        return f"--expert-policy {engine.expert_policy} moves experts on one GPU: leave it out, or {FLAG}"
    if engine.adjust:
        return f"--adjust moves experts on one GPU: leave it out, or {FLAG}"
    if engine.selector == "predicted":
        return f"--selector predicted is for experts on the GPU of their layer: leave it out, or {FLAG}"
    return None


def bytes_for_others(request: PlanRequest) -> tuple[int, int]:
    """Bytes in RAM, and on each GPU, of what the GPUs need to compute experts of each other's layers; 0 where these
    are not divided."""
    gpus = len(request.hardware.all_cards)
    if not request.divided or gpus < 2:
        return 0, 0
    config, tokens = request.model.config, request.workload.tokens
    in_ram, on_gpu = card_link_bytes(tokens, config)
    return gpus * (gpus - 1) * in_ram, (gpus - 1) * on_gpu + experts_for_others(config, tokens)


def divide(request: PlanRequest, parts: Parts) -> Parts:
    """The parts with each layer's experts divided between all GPUs, in the room that these have for experts."""
    model, claims = request.model, parts.claims
    sizes = [model.expert_bytes(layer)[0] for layer in range(model.config.n_layers)]
    rooms = [claimed.gpu.get("experts", 0) + max(0, claimed.gpu_left) for claimed in claims]
    slots = _slots(request, parts, sizes, sum(rooms))
    rates = [1 / _seconds(card.device, model) for card in request.hardware.all_cards]
    shares = _shares(slots, sizes, _amounts(rates, rooms, _bytes(slots, sizes)), rooms)
    on_gpus, divided = tuple(map(sum, zip(*shares, strict=True))), []
    for first, part, claimed, of_card in zip(parts.firsts, parts.requests, claims, shares, strict=True):
        slots_of_part = on_gpus[first : first + part.model.config.n_layers]
        nbytes = _bytes(of_card, sizes)
        left = claimed.gpu_left + claimed.gpu.get("experts", 0) - nbytes
        divided.append(replace(claimed, slots=slots_of_part, gpu=claimed.gpu | {"experts": nbytes}, gpu_left=left))
    return replace(parts, claims=tuple(divided), shares=shares)


def _slots(request: PlanRequest, parts: Parts, sizes: Sequence[int], room: int) -> list[int]:
    """Of each layer the number of its experts on GPUs that have so many bytes of room together. sizes: bytes of an
    expert, by layer."""
    frequencies, seconds = {}, {}
    for first, part, claimed in zip(parts.firsts, parts.requests, parts.claims, strict=True):
        gpu = part.hardware.gpu
        assert gpu is not None
        for at in range(claimed.gpu_layers):
            if (n := part.model.n_experts[at]) == 0:
                continue
            alike = np.full(n, part.model.config.experts[at].router.top_k / n)
            frequency = alike if part.frequencies is None else part.frequencies[at]
            devices, sync = (part.hardware.cpu, gpu), 1e-6 * part.hardware.sync_us
            seconds[first + at] = expert_seconds(*devices, part.model, at, request.batch, frequency, sync)
            frequencies[first + at] = frequency
    slots = slots_in_least_time(frequencies, seconds, {layer: sizes[layer] for layer in seconds}, room)
    return [slots.get(layer, 0) for layer in range(len(sizes))]


def _seconds(gpu: Device, model: Model) -> float:
    """The time that a GPU takes to read all experts."""
    return sum(matrix_seconds(gpu, matrices, panels=False) for matrices in model.experts)


def _amounts(rates: Sequence[float], rooms: Sequence[int], total: int) -> list[float]:
    """Bytes of each GPU, `total` in all: in proportion to the rates, but no more than there is room for."""
    amounts = [0.0] * len(rooms)
    open_ones, left = set(range(len(rooms))), float(total)
    while open_ones:
        rate = sum(rates[at] for at in open_ones)
        full = {at for at in open_ones if left * rates[at] / rate >= rooms[at]}
        for at in full or open_ones:
            amounts[at] = float(rooms[at]) if full else left * rates[at] / rate
        left -= sum(amounts[at] for at in full)
        open_ones = open_ones - full if full else set()
    return amounts


def _shares(
    slots: Sequence[int], sizes: Sequence[int], amounts: Sequence[float], rooms: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """For each GPU the number of each layer's experts, in proportion to the GPUs' amounts. One for which no GPU has
    room, since what is left is in pieces, is on none."""
    total = max(1, _bytes(slots, sizes))
    shares = [[int(amount * n / total) for n in slots] for amount in amounts]
    nbytes = [_bytes(share, sizes) for share in shares]
    for layer, n in enumerate(slots):
        for _ in range(n - sum(share[layer] for share in shares)):
            fits = [at for at, room in enumerate(rooms) if nbytes[at] + sizes[layer] <= room]
            if fits:
                at = max(fits, key=lambda at: amounts[at] - nbytes[at])
                shares[at][layer] += 1
                nbytes[at] += sizes[layer]
    return tuple(map(tuple, shares))


def _bytes(experts: Sequence[int], sizes: Sequence[int]) -> int:
    """Bytes of that number of experts of each layer."""
    return sum(n * size for n, size in zip(experts, sizes, strict=True))
