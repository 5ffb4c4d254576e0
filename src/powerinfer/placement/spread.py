"""The experts of each layer spread over several GPUs (`--split-mode expert`), which compute them at the same time.

    GPU 1   layers 0 to 17: attention, cache, router, shared experts     some hot experts of every layer
    GPU 2   layers 18 to 31, and the head: the same                      the other hot experts of every layer

The parts of `several.py` claim room for what a layer's own GPU has, and for experts. Which GPU has how many of a
layer's is settled here: in proportion to the rates of the GPUs, so that all end at the same time, as far as each has
room. What a GPU needs to compute experts of another one's layers is part of what it reserves for steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.devices.card_link import card_link_bytes
from powerinfer.devices.link import EXPERT_BYTES
from powerinfer.devices.wanted import wanted_gpu
from powerinfer.hardware.description import Device
from powerinfer.placement.cost import ExpertsRead, expert_seconds, matrix_seconds, resident_seconds
from powerinfer.placement.experts import slots_in_least_time
from powerinfer.placement.shapes import Model
from powerinfer.placement.working_memory import experts_for_others

if TYPE_CHECKING:
    from powerinfer.placement.plan import PlanRequest
    from powerinfer.placement.several import Parts

FLAG = "--split-mode expert"

MEET_US = 50.0
"""Microseconds that two GPUs take to meet in a layer, both ways together: an assumption, which nobody has measured.
Four passes of PCIe take about 10, a GPU and a CPU take 150 on an H200 (`hardware.cards.SYNC_US`)."""

DRAWS = 1 << 10
"""Selections by which the time of the GPU that ends last is estimated."""


def split_problem(config: ModelConfig, engine: EngineConfig, gpus: int, described: bool = False) -> str | None:
    """The reason, with how to mend it, why the engine cannot spread the experts of a model of this configuration
    over that number of GPUs; None: it can, or nobody asks for it. described: these are of a described machine."""
    if engine.split_mode != "expert":
        return None
    if not config.experts:
        return f"{FLAG} is for models of experts: leave it out"
    if gpus < 2:
        return _too_few(engine, gpus, described)
    if engine.expert_policy == "auto":
        return f"--expert-policy auto may choose one that moves experts: give static, or leave out {FLAG}"
    other = f"--expert-policy {engine.expert_policy}" if engine.expert_policy != "static" else ""
    other = other or ("--adjust" if engine.adjust else "")
    other = other or ("--selector predicted" if engine.selector == "predicted" else "")
    return f"{other} does not work with {FLAG}: leave out one of them" if other else None


def _too_few(engine: EngineConfig, gpus: int, described: bool) -> str:
    """The same where there is one GPU, or none is used."""
    if engine.gpu == "none" or engine.vram_bytes == 0 or not (gpus or described):
        name, reason = wanted_gpu(engine)
        cause = f" ({reason})" if name is None else ""  # else a note has said it
        return f"{FLAG} is for several GPUs, and none is used{cause}: leave it out"
    cards = 'name two cards, as --card "RTX 3090, RTX 3060"'
    mend = cards if described else "name them with --gpu 0,1, or --vram 8GiB,12GiB"
    return f"{FLAG} is for several GPUs: {mend}, or leave it out"


def bytes_for_others(request: PlanRequest) -> tuple[int, int]:
    """Bytes in RAM, and on each GPU, of what the GPUs need to compute experts of each other's layers; 0 where these
    are not spread."""
    gpus = len(request.hardware.all_cards)
    if not request.spread or gpus < 2:
        return 0, 0
    config, tokens = request.model.config, request.workload.tokens
    in_ram, on_gpu = card_link_bytes(tokens, config)
    return gpus * (gpus - 1) * in_ram, (gpus - 1) * (on_gpu + experts_for_others(config, tokens))


def spread_experts(request: PlanRequest, parts: Parts) -> Parts:
    """The parts with each layer's experts spread over all GPUs, in the room that these have for experts."""
    model, claims = request.model, parts.claims
    sizes = [model.expert_bytes(layer)[0] for layer in range(model.config.n_layers)]
    rooms = [claimed.gpu.get("experts", 0) + max(0, claimed.gpu_left) for claimed in claims]
    slots = _slots(request, parts, sizes, sum(rooms))
    rates = [1 / _seconds(card.device, model) for card in request.hardware.all_cards]
    shares = _shares(slots, sizes, _amounts(rates, rooms, _bytes(slots, sizes)), rooms)
    on_gpus, spread = tuple(map(sum, zip(*shares, strict=True))), []
    for first, part, claimed, of_card in zip(parts.firsts, parts.requests, claims, shares, strict=True):
        slots_of_part = on_gpus[first : first + part.model.config.n_layers]
        nbytes = _bytes(of_card, sizes)
        left = claimed.gpu_left + claimed.gpu.get("experts", 0) - nbytes
        spread.append(replace(claimed, slots=slots_of_part, gpu=claimed.gpu | {"experts": nbytes}, gpu_left=left))
    return replace(parts, claims=tuple(spread), shares=shares)


def _slots(request: PlanRequest, parts: Parts, sizes: Sequence[int], room: int) -> list[int]:
    """The number of each layer's experts on GPUs that have so many bytes of room together: all, in a part whose GPU has
    room for them, since that has no buffers to stream others. sizes: bytes of an expert, by layer."""
    slots, frequencies, seconds = [0] * len(sizes), {}, {}
    for first, part, claimed in zip(parts.firsts, parts.requests, parts.claims, strict=True):
        gpu = part.hardware.gpu
        assert gpu is not None
        if claimed.slots == part.model.n_experts:
            slots[first : first + len(claimed.slots)] = claimed.slots
            continue
        for at in range(claimed.gpu_layers):
            if (n := part.model.n_experts[at]) == 0:
                continue
            alike = np.full(n, part.model.config.experts[at].router.top_k / n)
            frequency = alike if part.frequencies is None else part.frequencies[at]
            devices, sync = (part.hardware.cpu, gpu), 1e-6 * part.hardware.sync_us
            seconds[first + at] = expert_seconds(*devices, part.model, at, request.batch, frequency, sync)
            frequencies[first + at] = frequency
    rest = room - _bytes(slots, sizes)
    extra = slots_in_least_time(frequencies, seconds, {layer: sizes[layer] for layer in seconds}, rest)
    return [extra.get(layer, n) for layer, n in enumerate(slots)]


def _seconds(gpu: Device, model: Model) -> float:
    """The time that a GPU takes to read all experts."""
    return sum(matrix_seconds(gpu, matrices, panels=False) for matrices in model.experts)


def _amounts(rates: Sequence[float], rooms: Sequence[int], total: int) -> list[float]:
    """Bytes of each GPU, `total` in all: in proportion to the rates, but no more than there is room for."""
    amounts = [0.0] * len(rooms)
    unsettled, left = set(range(len(rooms))), float(total)
    while unsettled:
        rate = sum(rates[at] for at in unsettled)
        full = {at for at in unsettled if left * rates[at] / rate >= rooms[at]}
        for at in full or unsettled:
            amounts[at] = float(rooms[at]) if full else left * rates[at] / rate
        left -= sum(amounts[at] for at in full)
        unsettled = unsettled - full if full else set()
    return amounts


def _shares(
    slots: Sequence[int], sizes: Sequence[int], amounts: Sequence[float], rooms: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The number of each layer's experts on each GPU, in proportion to the GPUs' amounts. One for which no GPU has
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


def exchange_seconds(request: PlanRequest, layer: int, owner: int, other: int) -> float:
    """The time from a layer's input on its own GPU to the sum of another one's experts there, but for these: over both
    buses, and to meet. owner, other: numbers of the GPUs."""
    cards, experts = request.hardware.all_cards, request.model.config.experts[layer]
    width = experts.latents or request.model.config.d_model
    nbytes = request.batch * (2 * 4 * width + EXPERT_BYTES * experts.router.top_k)
    return 1e-6 * MEET_US + sum(nbytes / (1e9 * cards[at].copy_gb_s) for at in (owner, other))


def layer_seconds(
    request: PlanRequest, parts: Parts, owner: int, layers: Sequence[Mapping[str, float]]
) -> tuple[dict[str, float], ...]:
    """The terms of the time of a part's layers (`plan.SECONDS`), with all GPUs in place of the one that has its layers.
    layers: the terms as if that had all of their hot experts; owner: its number."""
    first, reads = parts.firsts[owner], parts.requests[owner].experts_read(parts.claims[owner])
    result = list(map(dict, layers))
    for at, read in reads.items():
        if read.hot:
            result[at]["gpu"] = _last_seconds(request, parts, first + at, owner, (read, layers[at]["gpu"]))
    return tuple(result)


def _last_seconds(
    request: PlanRequest, parts: Parts, layer: int, owner: int, alone: tuple[ExpertsRead, float]
) -> float:
    """The expected time of the GPU that ends last: which experts a step selects is chance, so one has more of them than
    its share. alone: what the step needs, and its time with all hot experts on the layer's own GPU."""
    model, (read, seconds), n = request.model, alone, request.model.n_experts[layer]
    shares = [share[layer] for share in parts.shares]
    devices = [card.device for card in request.hardware.all_cards]
    times = np.array([resident_seconds(device, model, layer, request.batch) for device in devices])
    begins = [
        seconds - read.hot * times[owner] if at == owner
        else share and exchange_seconds(request, layer, owner, at) + 3e-6 * device.op_us
        for at, (share, device) in enumerate(zip(shares, devices, strict=True))
    ]  # fmt: skip
    needed = max(1, round(read.hot + read.cold))
    colours = [*shares, n - sum(shares)]
    drawn = np.random.default_rng(0).multivariate_hypergeometric(colours, needed, DRAWS)[:, :-1]
    hot = read.hot / (needed * sum(shares) / n) * drawn
    return float((begins + hot * times).max(axis=1).mean())


def _bytes(experts: Sequence[int], sizes: Sequence[int]) -> int:
    """Bytes of that number of experts of each layer."""
    return sum(n * size for n, size in zip(experts, sizes, strict=True))
