"""Plans over several GPUs: each gets layers that follow each other, in proportion to what it can hold, or as many as it
can hold where it is faster than others.

    GPU 1   layers 0 to 17: attention, cache, hot neurons or experts
    GPU 2   layers 18 to 31, and the head

The planner of one GPU (`plan.py`) places what is in a part: it is given a model of these layers alone, and the GPU's
own budget and rates. RAM is shared: what the parts leave there, and it does not hold, stays on disk. Experts and dense
matrices that do are those of one model whose GPUs are one (`disk.plan_disk`); of single neurons each part gets some of
the RAM. A step goes through one part after another, so its time is the sum of theirs; all compute a layer's experts
where these are spread (`spread.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.config import AttentionConfig, LayerConfig
from powerinfer.devices.link import link_bytes
from powerinfer.devices.step_buffers import description_bytes
from powerinfer.errors import RequestError, VramError, demand
from powerinfer.hardware.description import Gpu, Hardware
from powerinfer.models.inventory import Inventory
from powerinfer.neurons import Profile
from powerinfer.placement import cost
from powerinfer.placement.budget import (
    Claims,
    Division,
    Footprint,
    budgets,
    claim,
    gib,
    in_ram,
    layers_that_fit,
    no_layer_fits,
    on_gpu,
    shared_in_ram,
    shared_on_gpu,
    staged_in_ram,
)
from powerinfer.placement.disk import resting_in_ram
from powerinfer.placement.shapes import Model
from powerinfer.placement.solver import GROUP
from powerinfer.placement.spread import bytes_for_others, spread_experts

if TYPE_CHECKING:
    from powerinfer.placement.plan import Plan, PlanRequest

Planned = Callable[["PlanRequest", "Parts"], "Plan | RequestError"]
"""The maker of a plan of a request with given parts."""

PLENTY = 1 << 46
"""Bytes of RAM of a part, whose real limit is that of all parts together."""

WORTH = 0.98
"""The share of a step's time with layers in proportion to the GPUs' memory that another division takes at most."""

TOGETHER = "{}: its layers, which read others' keys and values, stay on one GPU: name one with --gpu, or one card"


@dataclass(frozen=True)
class Parts:
    """The parts' requests, with plenty of RAM, the first layer of each, and their claims; shares: as of `Plan`."""

    firsts: tuple[int, ...]
    requests: tuple[PlanRequest, ...]
    claims: tuple[Claims, ...]
    shares: tuple[tuple[int, ...], ...] = ()

    @property
    def rank(self) -> tuple[int, bool]:
        """The number of layers on GPUs, and whether the head is there: more is better."""
        return self.firsts[-1] + self.claims[-1].gpu_layers, self.claims[-1].gpu_head

    @property
    def cold(self) -> list[int]:
        """Bytes in RAM of the neurons for which each GPU has no room."""
        return list(map(least_cold, self.requests, self.claims))

    def drop_buffers(self) -> Parts:
        """The same of layers as a whole, or experts, where RAM has no room for buffers for long prompts."""
        return replace(self, claims=tuple(map(_drop_buffers, self.requests, self.claims)))


def _drop_buffers(part: PlanRequest, claims: Claims) -> Claims:
    if claims.slots is None:
        return claims.without_buffers()
    place = part.model, part.hardware, part.workload, part.vram, 0, part.frequencies, part.cached
    return demand(claim(*place, disk=True))  # what fails with too little RAM fails for no experts


# ---------------------------------------------------------------- parts of a model


def part_of(model: Model, first: int, last: int) -> Model:
    """A model of the layers [first, last), numbered from 0, without a draft head, and without the head unless the last
    layer is among them."""
    span, ends = slice(first, last), last == model.config.n_layers
    config = replace(model.config, layers=tuple(_moved(one, first) for one in model.config.layers[span]), draft=None)
    inventory = _part_of_inventory(model.inventory, first, last, ends)
    head = model.head if ends else replace(model.head, panels=0, stored=0, file=0)
    return replace(
        model,
        config=config,
        bundles=model.bundles[span],
        attention=model.attention[span],
        ffn=model.ffn[span],
        experts=model.experts[span],
        beside=model.beside[span],
        vectors=4 * sum(inventory.vectors.values()),
        predictors=model.predictors[span],
        selected=model.selected[span],
        projections=model.projections if ends else (),
        head=head,
        inventory=inventory,
        inside={layer - first: use for layer, use in model.inside.items() if first <= layer < last},
    )


def _moved(layer: LayerConfig, by: int) -> LayerConfig:
    """A layer whose source of keys and values, if it has one, is numbered anew."""
    attention = layer.attention
    if not isinstance(attention, AttentionConfig) or attention.kv_from is None:
        return layer
    return replace(layer, attention=replace(attention, kv_from=attention.kv_from - by))


def _part_of_inventory(inventory: Inventory, first: int, last: int, ends: bool) -> Inventory:
    """The units of these layers and of what is around them, and their vectors; ends: with the head's."""
    units = tuple(
        unit if unit.layer is None else replace(unit, layer=unit.layer - first)
        for unit in inventory.units
        if unit.layer is None or first <= unit.layer < last
    )
    vectors = {}
    for name, elements in inventory.vectors.items():
        kind, _, inner = name.partition(".")
        number, _, rest = inner.partition(".")
        if not inner:
            if ends:
                vectors[name] = elements
        elif first <= int(number) < last:
            vectors[f"{kind}.{int(number) - first}.{rest}"] = elements
    return replace(inventory, units=units, vectors=vectors, draft=0, draft_units=(), gpu_draft=0)


def _part_of_profile(profile: Profile, span: slice) -> Profile:
    thresholds = None if profile.thresholds is None else profile.thresholds[span]
    return replace(
        profile,
        counts=profile.counts[span],
        corpus_counts=profile.corpus_counts[span],
        active=profile.active[span],
        reuse=profile.reuse[span],
        thresholds=thresholds,
    )


def _part_of_request(request: PlanRequest, first: int, last: int, card: Gpu, vram: int) -> PlanRequest:
    """The request for the layers [first, last) on one GPU, with plenty of RAM."""
    hardware = _with_one(replace(request.hardware, cpu=replace(request.hardware.cpu, memory_bytes=PLENTY)), card)
    frequencies = request.frequencies
    if frequencies is not None:
        frequencies = {at - first: shares for at, shares in frequencies.items() if first <= at < last}
    return replace(
        request,
        model=part_of(request.model, first, last),
        profile=_part_of_profile(request.profile, slice(first, last)),
        hardware=hardware,
        vram=vram,
        vrams=(),
        ram=PLENTY // 2,
        frequencies=frequencies,
        hits=None,
        chosen=False,
        for_others=bytes_for_others(request)[1],
    )


def _with_one(hardware: Hardware, card: Gpu) -> Hardware:
    """The machine with one of its GPUs."""
    return replace(hardware, gpu=card.device, sync_us=card.sync_us, copy_gb_s=card.copy_gb_s, cards=())


def requests_alone(request: PlanRequest) -> list[PlanRequest]:
    """The same request for each of the GPUs alone that may hold the whole model; of GPUs that are alike for one."""
    alike: list[tuple[Gpu, int]] = []
    requests, n_layers = [], request.model.config.n_layers
    for card, vram in _budgets_of_cards(request):
        if (card, vram) in alike:
            continue
        alike.append((card, vram))
        hardware = _with_one(request.hardware, card)
        alone = replace(request, hardware=hardware, vram=vram, vrams=(), spread=False)
        if _whole_bytes(alone, 0, n_layers, card, vram) <= vram:
            requests.append(alone)
    return requests


def _whole_bytes(request: PlanRequest, first: int, last: int, card: Gpu, vram: int) -> int:
    """Bytes on a GPU that has the layers [first, last), with all of their neurons and experts."""
    part = _part_of_request(request, first, last, card, vram)
    model, layers, experts = part.model, last - first, any(request.model.n_experts)
    dense, head = request.selector == "all" or experts, last == request.model.config.n_layers
    division = Division(layers, head, model.n_experts if experts else None, part.cached)
    nbytes = sum(on_gpu(model, part.hardware, part.workload, division, dense).values())
    if not dense:
        groups = sum(-(-size // GROUP) for size in model.config.ffn_sizes)
        nbytes += shared_on_gpu(model, layers) + groups * GROUP * model.gpu_neuron
    return nbytes


# ---------------------------------------------------------------- dividing the layers


def _budgets_of_cards(request: PlanRequest) -> list[tuple[Gpu, int]]:
    """Each GPU with its budget. VramError for a budget that a GPU does not have."""
    cards = request.hardware.all_cards
    if request.vram is not None and not request.vrams:
        raise VramError(f"--vram is the memory of each of {len(cards)} GPUs: give {len(cards)} sizes, as 8GiB,12GiB")
    vrams = request.vrams or tuple(card.device.memory_bytes for card in cards)
    for card, vram in zip(cards, vrams, strict=True):
        budgets(replace(request.hardware, gpu=card.device, cards=()), vram, None)
    return list(zip(cards, vrams, strict=True))


def _refusal(request: PlanRequest) -> RequestError | None:
    """The error for a model or a policy that is for one GPU."""
    config = request.model.config
    if request.policy == "random":
        return RequestError("--policy random is of one GPU: leave it out, or plan for one card")
    if config.n_layers < len(request.hardware.all_cards):
        return RequestError(f"{request.model.name} has {config.n_layers} layers: name at most as many GPUs")
    return None


def _weights(request: PlanRequest) -> list[int]:
    """Bytes of each layer on a GPU that has it whole, with its cache and its states; the last one's with the head."""
    model, work = request.model, request.workload
    sizes = []
    for layer in range(model.config.n_layers):
        only = slice(layer, layer + 1)
        nbytes = sum(one.stored for one in (*model.attention[layer], *model.ffn[layer]))
        nbytes += model.gpu_kv_bytes(work.kv_type, work.context, work.batch, only)
        nbytes += model.gpu_state_bytes(work.requests, only, work.undo_tokens)
        if work.predicted:
            nbytes += model.gpu_predictor(model.predictors[layer])
        sizes.append(nbytes)
    sizes[-1] += model.head.stored
    return sizes


def _divisions(request: PlanRequest, cards: Sequence[tuple[Gpu, int]]) -> Iterator[tuple[int, ...] | RequestError]:
    """First layers of the parts: in proportion to the GPUs' room, then one layer more for each, then as many as each
    holds. The error where a GPU holds no layer."""
    model, work = request.model, request.workload
    reach = [0, *accumulate(_weights(request))]
    scratch = model.gpu_scratch(work.tokens, work.requests, 0) + bytes_for_others(request)[1]
    rooms = [max(1, vram - card.device.reserved_bytes - scratch) for card, vram in cards]
    shares = [room / sum(rooms) for room in accumulate(rooms)]
    targets = [int(np.abs(np.array(reach) - share * reach[-1]).argmin()) for share in shares]
    for more in (0, 1, model.config.n_layers):
        yield _division(request, cards, [target + more for target in targets[:-1]])


def _division(
    request: PlanRequest, cards: Sequence[tuple[Gpu, int]], targets: Sequence[int]
) -> tuple[int, ...] | RequestError:
    """First layers of the parts, which end at most where `targets` say, where a GPU is full, and where layers that
    belong together begin."""
    model, n_layers = request.model, request.model.config.n_layers
    dense, firsts = request.selector == "all" or any(model.n_experts), [0]
    most = model.config.whole_caches(n_layers - 1)
    for number, ((card, vram), target) in enumerate(zip(cards, targets, strict=False)):
        first, behind = firsts[-1], len(cards) - number - 1
        part = _part_of_request(request, first, n_layers, card, vram)
        place = part.model, part.hardware, part.workload, vram
        fitting, _ = layers_that_fit(*place, dense=dense, experts=False, passes_on=True)
        if not fitting:
            return no_layer_fits(*place, numbered(number, card))
        last = min(first + fitting, max(target, first + 1), n_layers - behind, most)
        if last <= first:
            return RequestError(TOGETHER.format(model.name))
        firsts.append(last)
    return tuple(firsts)


def numbered(number: int, card: Gpu) -> str:
    """The name of a GPU of several, with its number, counted from 0: some are alike."""
    return f"{card.device.name} ({number + 1})"


def parts_of(request: PlanRequest, planned: Planned) -> Parts | RequestError:
    """The best division of the layers, by the number of those on GPUs, then by the time of a step. The error where a
    GPU holds none, or a model is for one. planned: makes the plan of a division."""
    refusal = _refusal(request)
    if refusal is not None:
        return refusal
    cards, n_layers = _budgets_of_cards(request), request.model.config.n_layers
    best: Parts | RequestError | None = None
    for firsts in _divisions(request, cards):
        parts = firsts if isinstance(firsts, RequestError) else _claimed(request, cards, firsts)
        if isinstance(parts, RequestError):
            best = best or parts
        elif not isinstance(best, Parts) or parts.rank > best.rank:
            best = parts
        if isinstance(best, Parts) and best.rank == (n_layers, True):
            break
    assert best is not None
    return best if isinstance(best, RequestError) else _faster(request, cards, best, planned)


def _faster(request: PlanRequest, cards: Sequence[tuple[Gpu, int]], usual: Parts, planned: Planned) -> Parts:
    """The division by which the fastest GPUs have what they hold, where it has as many layers on GPUs as the usual one,
    and its steps are shorter; not where neurons are in RAM, which takes a solver's time and changes little."""
    if request.spread:  # all have experts of all layers
        return usual
    firsts = _division(request, cards, _fastest_first(request, cards))
    if isinstance(firsts, RequestError) or firsts == usual.firsts:
        return usual
    parts = _claimed(request, cards, firsts)
    if isinstance(parts, RequestError) or parts.rank < usual.rank or any(parts.cold):
        return usual
    before, after = (_step_seconds(planned(request, one)) for one in (usual, parts))
    return parts if after < WORTH * before else usual


def _step_seconds(plan: Plan | RequestError) -> float:
    return math.inf if isinstance(plan, RequestError) else plan.choice.seconds


def _fastest_first(request: PlanRequest, cards: Sequence[tuple[Gpu, int]]) -> list[int]:
    """Ends of the parts but for the last, where each GPU, from the fastest on, has as many layers as it holds as a
    whole, the others at least one each, and the fastest those that none holds."""
    n_layers, layers = request.model.config.n_layers, [1] * len(cards)
    matrices = tuple(one for layer in (*request.model.attention, *request.model.ffn) for one in layer)

    def bytes_of(number: int, at: int) -> int:
        first = n_layers - number if at == len(cards) - 1 else sum(layers[:at])
        return _whole_bytes(request, first, first + number, *cards[at])

    order = sorted(range(len(cards)), key=lambda at: cost.matrix_seconds(cards[at][0].device, matrices, panels=False))
    for at in order:
        most = n_layers - sum(layers) + layers[at]
        layers[at] = max(1, bisect_right(range(1, most + 1), cards[at][1], key=partial(bytes_of, at=at)))
    layers[order[0]] += n_layers - sum(layers)
    return list(accumulate(layers))[:-1]


def _claimed(request: PlanRequest, cards: Sequence[tuple[Gpu, int]], firsts: tuple[int, ...]) -> Parts | RequestError:
    requests, claims = [], []
    spans = pairwise((*firsts, request.model.config.n_layers))
    for number, ((first, last), (card, vram)) in enumerate(zip(spans, cards, strict=True)):
        part = _part_of_request(request, first, last, card, vram)
        claimed = part.claims_if_any()
        if isinstance(claimed, RequestError):
            return claimed
        if not claimed.gpu_layers:
            return no_layer_fits(part.model, part.hardware, part.workload, vram, numbered(number, card))
        if any(request.model.n_experts) and claimed.slots is None:  # its layers have none
            claimed = replace(claimed, slots=(0,) * part.model.config.n_layers)
        requests.append(part)
        claims.append(claimed)
    return Parts(firsts, tuple(requests), tuple(claims))


# ---------------------------------------------------------------- all parts together


def parts_together(request: PlanRequest, parts: Parts | RequestError) -> tuple[Parts, Claims] | RequestError:
    """The parts, and their claims as those of one model: less than nothing may be left of RAM where all but neurons may
    stay on disk. The error where there is one, or what must be in RAM is not held there."""
    if isinstance(parts, RequestError):
        return parts
    parts = spread_experts(request, parts) if request.spread else parts
    claims = joined(request, parts)
    if claims.cpu_left < 0 and claims.staging and not claims.bundles:
        parts = parts.drop_buffers()
        parts = spread_experts(request, parts) if request.spread else parts
        claims = joined(request, parts)
    lacking = sum(parts.cold) - claims.cpu_left
    rests = request.hardware.disk is not None and claims.cpu_left >= 0 if claims.bundles else not _complete(claims)
    return too_little_ram(request, claims, lacking) if lacking > 0 and not rests else (parts, claims)


def _complete(claims: Claims) -> bool:
    """Whether GPUs have all layers as a whole: nothing that RAM has may stay on disk."""
    return claims.whole and claims.gpu_head


def too_little_ram(request: PlanRequest, claims: Claims, lacking: int) -> RequestError:
    """The error where RAM lacks so many bytes for what the GPUs leave, which may not stay on disk."""
    needed = gib(budgets(request.hardware, None, request.ram)[1] + lacking)
    return RequestError(
        f"{request.model.name} needs {needed} of RAM beside {len(request.hardware.all_cards)} GPUs, and what it lacks "
        f"does not stay on disk: give --ram {needed}, more --vram, or name one GPU"
    )


def joined(request: PlanRequest, parts: Parts) -> Claims:
    """Claims of parts as those of one model, with what is left of RAM, which may be less than nothing."""
    model, claims = request.model, parts.claims
    firsts, last = parts.firsts, claims[-1]
    layers = firsts[-1] + last.gpu_layers
    slots, inside = None, {}
    if any(own.slots is not None for own in claims):  # some parts may have no experts
        pairs = zip(parts.requests, claims, strict=True)
        slots = tuple(n for part, own in pairs for n in own.slots or (0,) * part.model.config.n_layers)
        inside = {first + at: n for first, own in zip(firsts, claims, strict=True) for at, n in own.inside.items()}
    claimed = replace(
        last,
        gpu_layers=layers,
        gpu=_sum(own.gpu for own in claims),
        gpu_left=sum(own.gpu_left for own in claims),
        slots=slots,
        inside=inside,
        staging=sum(own.staging for own in claims),
        buffered=sum(own.buffered for own in claims),
        cpu_neuron=max(own.cpu_neuron for own in claims),
        slots_beside=max(own.slots_beside for own in claims),
        cpu_gate=max(own.cpu_gate for own in claims),
    )
    cpu = in_ram(model, request.workload, request.division(claimed), panels=not claimed.bundles)
    cpu["scratch"] += extra_bytes(request, parts)
    passing = sum(own.cpu.get("passing", 0) for own in claims)
    cpu |= {"passing": passing} if passing else {}
    _, ram = budgets(request.hardware, None, request.ram)
    left = ram - sum(cpu.values()) - staged_in_ram(claimed.staging)
    if claimed.bundles:
        left -= shared_in_ram(model, layers)
    return replace(claimed, cpu=cpu, cpu_left=left)


def extra_bytes(request: PlanRequest, parts: Parts) -> int:
    """Bytes of working memory in RAM that several GPUs take, and one with all of their layers would not."""
    model, claims, tokens = request.model, parts.claims, request.workload.tokens
    d_model, head = model.config.d_model, claims[-1].gpu_head
    described = [description_bytes(tokens, d_model, ahead) for ahead in (False, head)]
    further = link_bytes(tokens, model.config) + 4 * tokens * d_model + described[0]
    nbytes = (len(claims) - 1) * further + described[0] - described[1]  # no step is launched ahead
    nbytes += bytes_for_others(request)[0]
    if request.cached:  # each sends experts through a buffer of its own, the first one is counted
        pairs = zip(parts.requests, claims, strict=True)
        nbytes += sum(part.model.sent_expert(claim.gpu_layers) for part, claim in pairs)
        nbytes -= model.sent_expert(parts.firsts[-1] + claims[-1].gpu_layers)
    for part, own in zip(parts.requests, claims, strict=True):
        if own.slots_beside:
            selects, threads = request.selector == "predicted", request.hardware.cpu.threads
            nbytes += resting_in_ram(part.model, own.gpu_layers, threads, own.staging, selects)[1]
    return nbytes


def bytes_to_exchange(plan: Plan) -> tuple[int, int]:
    """Bytes in RAM and on GPUs beyond those of a plan over several whose experts were to stay, once they are exchanged:
    RAM has those on GPUs, too, and either memory has one of each that is sent."""
    request, slots = plan.request, plan.claims.slots
    if request.cached or slots is None:
        return 0, 0
    sent = sum(part.plan.request.model.sent_expert(part.plan.claims.gpu_layers) for part in plan.parts)
    return sum(n * request.model.expert_bytes(layer)[1] for layer, n in enumerate(slots)) + sent, sent


def moving_experts(request: PlanRequest) -> int:
    """Bytes in RAM of experts on their way from the disk to GPUs, but for one of them."""
    model, routed = request.model, request.model.config.experts
    largest = max((model.expert_bytes(layer)[1] for layer in routed), default=0)
    return (len(request.hardware.all_cards) - 1) * largest


def _sum(footprints: Iterator[Footprint]) -> Footprint:
    total: Counter[str] = Counter()
    for one in footprints:
        total.update(one)
    return dict(total)


def least_cold(request: PlanRequest, claims: Claims) -> int:
    """Bytes in RAM of the neurons for which a part's GPU has no room."""
    if not claims.bundles:
        return 0
    sizes = [size for size in request.profile.sizes if size]
    groups = len(sizes) * -(-max(sizes) // GROUP) if sizes else 0
    on_gpu = claims.gpu_left // (GROUP * request.model.gpu_neuron)
    return max(0, groups - on_gpu) * GROUP * claims.cpu_neuron
