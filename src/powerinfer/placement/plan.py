"""A plan: what of a model is placed on the GPU, in RAM and on disk, why, and the predicted time of a token.

    plan = make_plan(PlanRequest(model, profile, hardware, vram=8 << 30, ram=16 << 30))
    placement = plan.placement(profile)

The dense parts claim their room first (`budget.py`), whole layers where every neuron is computed, and experts with
them; single neurons share what is left, as a policy decides (`solver.py`) by what they cost (`cost.py`). A plan is kept
beside the model as plan-KEY.json, under a key of all it depends on, so another budget, context, machine, profile or
version is another plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer import __version__
from powerinfer.config import DEFAULT_CHUNK, ExpertsConfig
from powerinfer.devices.disk import OnDisk
from powerinfer.errors import ModelError, PowerInferError, RamError, RequestError, VramError, demand
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.prepared import write_small
from powerinfer.hardware.cards import memory_leaving
from powerinfer.hardware.description import Device, Hardware
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.models.inventory import Matrix
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, Indices, NeuronPlacement, Profile, Tier
from powerinfer.placement import cost, several, solver, spread
from powerinfer.placement.budget import (
    Claims,
    Division,
    Footprint,
    WholeLayers,
    Workload,
    budgets,
    claim,
    claim_layers,
    gib,
    in_ram,
    least_ram,
    on_gpu,
    shared_in_ram,
    shared_on_gpu,
    staged_beside,
    staged_in_ram,
    staged_on_gpu,
    staging_from_disk,
)
from powerinfer.placement.disk import (
    APART,
    DiskPlan,
    better_densely,
    free_for,
    plan_disk,
    resting_bytes,
    resting_in_ram,
    within,
)
from powerinfer.placement.disk_speed import Decoding, Hits, OnGpu, Prediction, predict
from powerinfer.placement.experts import Frequencies
from powerinfer.placement.plan_document import (
    FORMAT,
    Budgets,
    CardPlan,
    Help,
    LayerPlan,
    PlanDocument,
    PolicyResult,
    Predicted,
    read_plan_document,
)
from powerinfer.placement.shapes import Model
from powerinfer.placement.solver import GROUP

GPU_ACCOUNTING = 19
"""Incremented when bytes or times on a GPU are counted differently, so that earlier plans with one are not reused."""

RAM_ACCOUNTING = 4
"""Incremented when bytes in RAM are counted differently."""

POLICIES = ("time", "ilp", "greedy", "random")
"""time: least predicted time of a token; ilp: the paper's program, most activations on the GPU; greedy: groups by
impact; random: random neurons, the baseline."""

_NAMES = {Tier.GPU: "gpu", Tier.CPU: "cpu", Tier.DISK: "disk"}

SECONDS = ("gpu", "cpu", "sync", "disk", "other")
"""The terms of a layer's time: other + max(gpu, cpu + sync) + disk."""

_IN_TURN = "a step goes from one GPU to the next, and only one of them computes at a time"
_AT_ONCE = (
    "a step goes from one GPU to the next, and all of them compute each layer's experts at the same time; that "
    f"{spread.MEET_US:g} us pass until two GPUs have met in a layer is assumed"
)

Float64 = NDArray[np.float64]
_Groups = Sequence[int] | solver.Numbers


@dataclass(frozen=True)
class PlanRequest:
    """All that a plan depends on.

    vram, ram: budgets in bytes, everything counted; None: all that the machine has. context: tokens of each of `batch`
    requests; chunk: tokens of a prompt that are computed at once; selector: one of `cost.WAYS`; policy: of `POLICIES`.
    seed: of the policy `random`. time_limit: seconds for the solver. requests: that decode together in the caches of
    `batch`, which only working memory counts; 0: as many as `batch`. insist: use the GPU even if it is slower than the
    CPU. frequencies: of experts, how often each is selected; None: that is not known. cached: experts on the GPU are
    in RAM too. hits: of experts on disk, None: not known. chosen: the selector is what `auto` would take if RAM has
    room for bundles beside dense matrices. profiled: the profile says how often neurons fire. scratch, moves,
    undo_tokens, drafts, for_others: as of `Workload`. vrams: the budget of each of several GPUs of the machine, of
    which `vram` is the sum; (): all that each has. spread: a layer's experts are on all of them (`spread.py`).
    """

    model: Model
    profile: Profile
    hardware: Hardware
    vram: int | None = None
    ram: int | None = None
    context: int = 4096
    batch: int = 1
    kv_type: str = "f16"
    selector: str = "exact"
    policy: str = "time"
    chunk: int = 512
    seed: int = 0
    time_limit: float = solver.TIME_LIMIT
    requests: int = 0
    insist: bool = False
    frequencies: Frequencies | None = None
    cached: bool = False
    hits: Hits | None = None
    chosen: bool = False
    profiled: bool = True
    scratch: int | None = None
    moves: bool = False
    undo_tokens: int = 0
    drafts: bool = False
    vrams: tuple[int, ...] = ()
    spread: bool = False
    for_others: int = 0

    def __post_init__(self) -> None:
        """RequestError for contradictory options."""
        config = self.model.config
        assert self.selector in cost.WAYS and self.policy in POLICIES
        assert self.profile.sizes == config.ffn_sizes
        if not 0 < self.context <= config.context_length:
            limit = f"{self.model.name} takes 1 to {config.context_length}"
            raise RequestError(f"--context {self.context}: {limit} tokens")
        sizes, gpus = len(self.vrams), len(self.hardware.all_cards)
        if sizes and gpus and sizes != gpus:
            present = "there is 1 GPU" if gpus == 1 else f"there are {gpus} GPUs"
            raise VramError(f"--vram has {sizes} sizes, and {present}: give a size for each")
        if self.selector == "predicted" and not self.model.predictors:
            raise RequestError("--selector predicted needs a predictor; `powerinfer train` makes one")

    @property
    def together(self) -> int:
        """Requests that decode together."""
        return max(self.requests, self.batch)

    @property
    def workload(self) -> Workload:
        """The settings that memory depends on."""
        own = self.kv_type, self.context, self.chunk, self.together, self.batch, self.selector
        return Workload(*own, self.scratch, self.moves, self.undo_tokens, self.drafts, self.for_others)

    def claims(self) -> Claims:
        """Where the dense parts are placed. RequestError, with the minimum, if the budgets are too small for them."""
        return demand(self.claims_if_any())

    @property
    def on_cards(self) -> bool:
        """Whether the model is placed on several GPUs."""
        return len(self.hardware.all_cards) > 1 and self.vram != 0

    @cached_property
    def parts(self) -> several.Parts | RequestError:
        """The parts of several GPUs; the error where one of them holds no layer."""
        return several.parts_of(self, _plan_on_cards)

    def claims_if_any(self) -> Claims | RequestError:
        """The claims; the error where the budgets are too small."""
        if self.on_cards:
            together = several.parts_together(self, self.parts)
            return together if isinstance(together, RequestError) else self.rest_of_parts(*together)
        model, work = self.model, self.workload
        claims = claim(model, self.hardware, work, self.vram, self.ram, self.frequencies, self.cached, disk=True)
        return claims if isinstance(claims, RequestError) else self._rest_on_disk(claims)

    def claims_of_layers(self, placed: WholeLayers, rests: bool = True) -> Claims | RequestError:
        """The claims of the first layers, at least one, as a whole, with a buffer that streams the others. The error
        where RAM does not hold these, and they do not stay on disk (rests: they may, unless the GPU has the head)."""
        limits = budgets(self.hardware, self.vram, self.ram)
        claims = claim_layers(self.model, self.hardware, self.workload, limits, placed, rests)
        return claims if isinstance(claims, RequestError) else self._rest_on_disk(claims)

    def ram_flag(self, budget: int) -> int:
        """--ram for a budget of so many bytes: of a described machine it is all of the RAM, the system's included."""
        is_budget = self.ram is not None or self.hardware.key
        return budget if is_budget else memory_leaving(budget, self.hardware.cpu)

    def more_ram(self, goal: str, budget: int) -> Help:
        """The --ram with which there is a budget of so many bytes."""
        nbytes = self.ram_flag(budget)
        return Help(goal, "--ram", nbytes, nbytes <= self.hardware.cpu.memory_bytes)

    def rest_of_parts(self, parts: several.Parts, claims: Claims) -> Claims | RequestError:
        """The claims of parts together, with what RAM does not hold on disk, but for neurons."""
        if claims.bundles:
            return claims
        return self._rest_on_disk(claims, several.extra_bytes(self, parts) + several.moving_experts(self))

    def _rest_on_disk(self, claims: Claims, beside: int = 0) -> Claims | RequestError:
        """The claims with what RAM does not hold on disk; the error where it does not hold the least. beside: bytes of
        working memory in RAM for more GPUs than one."""
        model, work = self.model, self.workload
        _, ram = budgets(self.hardware, self.vram, self.ram)
        whole = least_ram(model, work)
        if claims.cpu_left >= 0 if claims.gpu_layers else ram >= whole:
            return claims
        ram = (within(ram) if self.ram is None else ram) - beside
        threads = self.hardware.cpu.threads
        if claims.gpu_layers:
            disk = plan_disk(model, work, ram, threads, self.division(claims), whole=sum(claims.cpu.values()) - beside)
        else:
            bundled = self.selector != "all"
            profile = self.profile if self.profiled else None
            disk = plan_disk(model, work, ram, threads, bundled=bundled, whole=whole, profile=profile)
        if isinstance(disk, RamError) and beside:
            needed = gib(self.ram_flag(disk.least + beside if self.ram is not None else free_for(disk.least + beside)))
            more = f"{gib(ram)} are left for it beside several GPUs: give --ram {needed}"
            return RamError(disk.needs, more, disk.least + beside, disk.lower)
        if isinstance(disk, RamError) and self.ram is None:
            more = f"{self.hardware.name} has {gib(ram)} for it: give --ram {gib(self.ram_flag(free_for(disk.least)))}"
            return RamError(disk.needs, more, disk.least, disk.lower)
        if isinstance(disk, RequestError):
            return disk
        disk = replace(disk, held=disk.held | {"scratch": disk.held["scratch"] + beside})
        left = ram + beside - sum(disk.held.values())
        resting = disk if disk.about.anything else None  # else RAM holds all but the embedding
        return replace(claims, cpu=disk.held, cpu_left=left, bundles=False, disk=resting)

    def division(self, claims: Claims) -> Division:
        """The part of the model that the GPU has."""
        memory = self.cached, self.hardware.host_bytes
        return Division(claims.gpu_layers, claims.gpu_head, claims.slots, *memory, claims.inside, claims.gpu_draft)

    def claims_without_disk(self) -> Claims | RequestError:
        """The claims; the error, with the minimum, where a GPU is used and something would stay on disk."""
        if self.on_cards:
            return self.claims_if_any()
        return claim(self.model, self.hardware, self.workload, self.vram, self.ram, self.frequencies, self.cached)

    def settled(self, rests: bool = True, ram: str = "RAM") -> tuple[PlanRequest, str]:
        """The same with the selector that a load without a GPU takes, and the reason, for people, if that is another:
        `auto` uses no bundles where RAM holds only the dense matrices, or not what bundles on disk need beside them, or
        where dense matrices are read in less time. rests: weights may stay on disk; ram: what people call the budget.
        """
        if not self.chosen or self.selector == "all":
            return self, ""
        dense, bundled = replace(self, selector="all", chosen=False), self.claims_if_any()
        known = None if isinstance(bundled, RequestError) else bundled
        beside = self.hardware.gpu is not None and self.vram != 0 if known is None else known.gpu_layers > 0
        _, budget = budgets(self.hardware, self.vram, self.ram)
        both, alone = (least_ram(self.model, one.workload) for one in (self, dense))
        if beside or budget >= both:
            return self, ""
        if budget >= alone or not rests:
            return dense, f"{ram} does not hold bundles beside the dense weights"
        if known is None:
            return dense, f"{ram} does not hold what bundles on disk need"
        other = dense.claims_if_any()
        if isinstance(other, RequestError) or known.disk is None:
            return self, ""
        if other.disk is None:
            return dense, f"{ram} does not hold bundles beside the dense weights"
        if better_densely(other.disk, known.disk):
            return dense, "dense weights are read in less time than single neurons"
        return self, ""

    def vram_for(self, groups: int = 0) -> int:
        """Bytes of VRAM for all dense parts and that number of groups of neurons, buffers for cold ones included."""
        layers = self.model.config.n_layers
        held = sum(on_gpu(self.model, self.hardware, self.workload, Division(layers, True)).values())
        return held + shared_on_gpu(self.model, layers) + groups * GROUP * self.model.gpu_neuron

    @property
    def goes(self) -> str:
        """The selector of a step: with too many tokens predictors do not run."""
        return "exact" if self.selector == "predicted" and self.batch > NEURON_TOKENS else self.selector

    def experts_read(self, claims: Claims) -> dict[int, cost.ExpertsRead]:
        """Of each layer with experts on both devices what a step is expected to need."""
        reads = {}
        for layer, slots in enumerate((claims.slots or ())[: claims.gpu_layers]):
            about = self.model.config.layers[layer].ffn
            if isinstance(about, ExpertsConfig):
                own = None if self.frequencies is None else self.frequencies[layer]
                n, top_k, hot = about.n_experts, about.router.top_k, claims.inside.get(layer, 0)
                reads[layer] = cost.experts_read(n, top_k, slots, self.batch, own)
                if hot:
                    frequency = np.full(n, top_k / n) if own is None else own
                    reads[layer] = cost.divided_read(self.model, layer, hot, self.batch, frequency)
        return reads

    @property
    def past(self) -> int:
        """Tokens in the cache at the predicted step: a request that fills its context is half way on average."""
        return max(1, self.context // 2)

    @cached_property
    def key(self) -> str:
        """16 hex digits that change with everything the plan depends on."""
        facts: dict[str, Any] = {
            "format": FORMAT,
            "version": __version__,
            "model": hashlib.sha256(repr(self.model).encode()).hexdigest(),
            "profile": self.profile.digest,
            "hardware": dataclasses.asdict(self.hardware.only(self.model.rated_types)),
            "group": GROUP,
            "ram_method": RAM_ACCOUNTING,
        }
        if (draft := self.model.config.draft) is not None:
            facts["draft"] = hashlib.sha256(repr((draft, self.model.inventory.draft)).encode()).hexdigest()
        own = ("model", "profile", "hardware", "requests", "insist", "frequencies", "hits")
        for name, known in (("experts", self.frequencies), ("hits", self.hits)):
            if known is not None:
                pairs = sorted((layer, each.tobytes()) for layer, each in known.items())
                facts[name] = hashlib.sha256(repr(pairs).encode()).hexdigest()
        if self.model.inside:
            uses = hashlib.sha256(repr(sorted(self.model.inside)).encode())
            for _, use in sorted(self.model.inside.items()):
                uses.update(use.order.tobytes() + use.fires.tobytes())
            facts["neurons of experts"] = uses.hexdigest()
        facts |= {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in own}
        if self.hardware.gpu is None:
            del facts["hardware"]["host_bytes"]
        else:
            facts |= {"gpu_method": GPU_ACCOUNTING, "insist": self.insist}
        if self.together != self.batch:
            facts["requests"] = self.together
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Choice:
    """Which neurons a policy places where: of each layer's order the first `gpu` groups, then up to `kept` in RAM.

    layer_seconds: of each layer for one step, by term: gpu and cpu (neurons; concurrent), sync, disk,
    other (predictor, and attention unless it is part of gpu); seconds: of the step. mass: for each layer, of its
    activations, the share that the GPU computes; mass_on_gpu: of the model's. work: bytes of weights that a step reads,
    the dense ones included; work_on_gpu: the share of it that the GPU reads. optimal: whether the policy's best is
    proven, None for heuristic policies. solve_s: seconds of solving.
    """

    gpu: tuple[int, ...]
    kept: tuple[int, ...]
    layer_seconds: tuple[dict[str, float], ...]
    seconds: float
    mass: tuple[float, ...]
    mass_on_gpu: float
    work_on_gpu: float
    optimal: bool | None
    solve_s: float
    work: float = 0.0


@dataclass(frozen=True, eq=False)
class PlanPart:
    """A GPU's part of a plan over several: the layers from `first` on, as many as the plan's model has or, of the last
    part, as its claims say. name: of the GPU; plan: of a model of these layers alone, with the head in the last."""

    first: int
    name: str
    plan: Plan

    @property
    def last(self) -> int:
        """The end of its layers on the GPU."""
        return self.first + self.plan.claims.gpu_layers


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer to a request: placement of the dense parts (claims) and of the neurons (choice).

    others: the choice of every policy, the plan's own included; reasons: explanations, as text; helps: the next budgets
    at which more fits. from_disk: what is read while decoding, of what stays on disk as `claims` say. settled: the
    selector, where that is another than the request's. parts: of each GPU, where there are several; what the plan says
    of the GPU is then their sum. shares: for each of these GPUs how many of each layer's experts it has, where they are
    spread over all; (): a layer's are on its own.
    """

    request: PlanRequest
    claims: Claims
    choice: Choice
    others: dict[str, Choice]
    reasons: tuple[str, ...]
    helps: tuple[Help, ...]
    from_disk: Prediction | None = None
    settled: str | None = None
    parts: tuple[PlanPart, ...] = ()
    shares: tuple[tuple[int, ...], ...] = ()

    @property
    def selector(self) -> str:
        """The selector of its steps."""
        return self.settled or self.request.selector

    @property
    def experts_of_parts(self) -> list[int]:
        """The number of experts that each of several GPUs has."""
        return [sum(n) for n in self.shares or [part.plan.claims.slots or () for part in self.parts]]

    @property
    def neurons(self) -> list[dict[Tier, int]]:
        """For each layer, how many neurons are placed where."""
        sizes = self.request.profile.sizes
        if self.claims.disk is not None:
            there = [size if layer < self.claims.gpu_layers else 0 for layer, size in enumerate(sizes)]
            each = zip(there, self.claims.disk.kept(sizes), sizes, strict=True)
            in_ram = [(gpu, 0 if gpu else n, size) for gpu, n, size in each]
            return [{Tier.GPU: gpu, Tier.CPU: n, Tier.DISK: size - gpu - n} for gpu, n, size in in_ram]
        if not self.claims.bundles:  # layers on a GPU are there as a whole, apart from experts
            first = self.claims.gpu_layers
            both = [(size, 0) if layer < first else (0, size) for layer, size in enumerate(sizes)]
            return [{Tier.GPU: gpu, Tier.CPU: cpu, Tier.DISK: 0} for gpu, cpu in both]
        result = []
        for size, gpu, kept in zip(sizes, self.choice.gpu, self.choice.kept, strict=True):
            on_gpu, in_memory = min(gpu * GROUP, size), min(kept * GROUP, size)
            result.append({Tier.GPU: on_gpu, Tier.CPU: in_memory - on_gpu, Tier.DISK: size - in_memory})
        return result

    @property
    def bytes(self) -> dict[str, Footprint]:
        """Bytes by tier and use."""
        tiers: dict[str, Footprint] = {"gpu": dict(self.claims.gpu), "cpu": dict(self.claims.cpu), "disk": {}}
        if self.claims.disk is not None:
            tiers["disk"] = dict(self.claims.disk.resting)
        if self.claims.bundles:
            for tier, name in _NAMES.items():
                tiers[name]["ffn"] = tiers[name].get("ffn", 0) + sum(layer[tier] for layer in self._neuron_bytes)
        if self.staging:
            own = staged_in_ram(self.staging)
            tiers["gpu"]["staging"] = tiers["cpu"]["staging"] = own
            tiers["gpu"]["scratch"] += staged_on_gpu(self.staging) - own
        return {name: {part: n for part, n in parts.items() if n} for name, parts in tiers.items()}

    @property
    def staging(self) -> int:
        """Bytes of a buffer that streams cold neurons, and layers in RAM, to the GPU for long prompts; 0: there are
        none."""
        beside = self.neurons[: self.claims.gpu_layers]
        split = any(layer[Tier.CPU] or (layer[Tier.DISK] and self.claims.slots_beside) for layer in beside)
        return self.claims.staging if split or self.claims.passes or self.claims.slots is not None else 0

    @cached_property
    def _orders(self) -> list[Indices]:
        return _orders(self.request, self.request.policy)

    @property
    def _neuron_bytes(self) -> list[dict[Tier, int]]:
        """For each layer, the bytes of its neurons in each tier, including what their groups share."""
        if self.parts:
            return [nbytes for part in self.parts for nbytes in part.plan._neuron_bytes]
        model, claims = self.request.model, self.claims
        orders = self._orders
        result = []
        for layer, neurons in enumerate(self.neurons):
            bundles = model.bundles[layer]
            held = {tier: bundles.stride * count for tier, count in neurons.items()}
            if not claims.gpu_layers and not self.request.workload.predicted:  # matrices have the first rows
                held[Tier.CPU] -= bundles.gate_bytes * neurons[Tier.CPU]
            if layer < claims.gpu_layers and claims.cpu_gate:  # what RAM has of these is not read
                held[Tier.DISK] -= bundles.gate_bytes * neurons[Tier.DISK]
            if layer < claims.gpu_layers:
                first, last = neurons[Tier.GPU], neurons[Tier.GPU] + neurons[Tier.CPU]
                here, there = (len(np.unique(part // BUNDLE_GROUP)) for part in np.split(orders[layer][:last], [first]))
                if claims.slots_beside and neurons[Tier.DISK]:
                    there = n_groups(model.config.ffn_sizes[layer])  # of all that may come into memory
                held[Tier.GPU] = model.gpu_neuron_of(layer) * first + model.gpu_shared * here
                each = claims.cpu_neuron if claims.slots_beside else bundles.pitch
                held[Tier.CPU] = each * neurons[Tier.CPU] + bundles.shared_bytes * there
                held[Tier.CPU] += claims.cpu_gate * (neurons[Tier.CPU] + neurons[Tier.DISK])
            elif claims.gpu_layers and not neurons[Tier.DISK]:  # whole groups, as the file has them
                held[Tier.CPU] = n_groups(model.config.ffn_sizes[layer]) * bundles.group_bytes
            result.append(held)
        return result

    @property
    def activations(self) -> dict[str, float]:
        """Share of the model's activations in each tier; 0 everywhere if no neuron fires."""
        profile, orders = self.request.profile, self._orders
        sums = dict.fromkeys(Tier, 0)
        for layer, neurons in enumerate(self.neurons):
            counts, at = profile.counts[layer][orders[layer]], 0
            for tier in Tier:  # an order has the GPU's first, then the CPU's
                sums[tier] += int(counts[at : at + neurons[tier]].sum())
                at += neurons[tier]
        return {name: sums[tier] / max(1, sum(sums.values())) for tier, name in _NAMES.items()}

    @cached_property
    def dense_tok_s(self) -> float | None:
        """Estimated tokens per second if every neuron is computed, within the same budgets; None: no room."""
        request = self.request
        if self.selector == "all" and request.model.firing == 1:
            return request.batch / self.choice.seconds
        model = request.model.computed_whole() if request.model.in_experts else request.model
        dense = place(replace(request, model=model, selector="all", policy="time"))
        return None if isinstance(dense, RequestError) else request.batch / dense.choice.seconds

    @cached_property
    def skipping_tok_s(self) -> float | None:
        """Estimated tokens per second with `exact` inside experts, where this plan is without that, within the same
        budgets; None: neurons inside them cannot be told apart, or there is no room."""
        model = self.request.model
        if model.in_experts or not any(model.n_experts) or not model.may_skip:
            return None
        skipping = place(replace(self.request, model=model.by_neuron()))
        return None if isinstance(skipping, RequestError) else self.request.batch / skipping.choice.seconds

    @property
    def fits(self) -> bool:
        """Nothing is read from disk."""
        return self.claims.disk is None and not any(layer[Tier.DISK] for layer in self.neurons)

    @property
    def loads(self) -> bool:
        """It can be loaded: what does not fit is read from disk, neurons beside a GPU when they are needed."""
        if self.fits or self.claims.disk is not None:
            return True
        if self.parts:
            return all(part.plan.loads for part in self.parts)
        if not self.claims.slots_beside:
            return False
        return _left_for_neurons(self.claims, _cold(self.request, self.claims, self.choice.gpu)) >= 0

    @property
    def on_disk(self) -> DiskPlan | None:
        """What stays on disk of the GPU's layers: neurons. Of all of these layers, since those that leave the GPU when
        memory is measured rest there, too. None: nothing, or the plan cannot be loaded."""
        beside = self.claims.slots_beside
        if self.fits or not self.loads:
            return None
        if self.parts:
            return self._on_disk_of_parts
        each = zip(self.request.profile.sizes, self.neurons[: self.claims.gpu_layers], strict=False)
        slots = {layer: min(size, own[Tier.CPU] + beside) for layer, (size, own) in enumerate(each) if size}
        reading = self._read(APART)
        return DiskPlan(OnDisk(neurons=slots), self.bytes["cpu"], 0, self.bytes["disk"], reading)

    @property
    def _on_disk_of_parts(self) -> DiskPlan | None:
        of_parts = [(part.first, part.plan.on_disk) for part in self.parts if self.claims.disk is None]
        resting = [(first, one) for first, one in of_parts if one is not None]
        slots = {first + layer: n for first, one in resting for layer, n in one.about.neurons.items()}
        reading = math.fsum(one.reading or 0 for _, one in resting)
        return DiskPlan(OnDisk(neurons=slots), self.bytes["cpu"], 0, self.bytes["disk"], reading) if slots else None

    def _read(self, apart: int = 0) -> float:
        """Bytes of the neurons that a step needs and neither memory has, each counted as so many more."""
        request, nbytes = self.request, 0.0
        selects = request.selector == "predicted"
        for layer, own in enumerate(self.neurons[: self.claims.gpu_layers]):
            rest = request.profile.fraction(layer)[self._orders[layer][own[Tier.GPU] + own[Tier.CPU] :]]
            ffn, kind = request.model.config.layers[layer].ffn, cost.SELECTED if selects else cost.FIRED
            share = cost.any_of(cost.needed(rest, ffn, kind, request.model.selected[layer]), request.batch)
            nbytes += float(share.sum()) * (resting_bytes(request.model.bundles[layer], selects) + apart)
        return nbytes

    def placement(self, profile: Profile) -> NeuronPlacement:
        """The tier of every neuron. profile: the one that the plan was made from."""
        assert profile.digest == self.request.profile.digest
        numbers = [np.arange(-(-size // GROUP)) for size in profile.sizes]
        tiers = tuple(
            np.where(own < gpu, Tier.GPU, np.where(own < kept, Tier.CPU, Tier.DISK)).astype(np.int8)
            for own, gpu, kept in zip(numbers, self.choice.gpu, self.choice.kept, strict=True)
        )
        return NeuronPlacement(profile.sizes, GROUP, tiers, tuple(self._orders))

    def document(self, path: Path | None = None) -> PlanDocument:
        """The plan as a document; path: of its file."""
        request, choice, read = self.request, self.choice, self.from_disk
        vram, ram = budgets(request.hardware, request.vram, request.ram)
        slots = self.claims.slots or (0,) * request.model.config.n_layers
        of_ram = {} if self.claims.disk is None else self.claims.disk.about.experts
        return PlanDocument(
            key=request.key,
            model=request.model.name,
            fingerprint=request.model.fingerprint,
            quantize=request.model.quantize,
            weight_type=request.model.weight_type,
            profile=request.profile.digest,
            policy="layers" if self.claims.whole else request.policy,
            selector=self.selector,
            budgets=Budgets(vram, ram),
            context=request.context,
            batch=request.batch,
            kv_type=request.kv_type,
            fits=self.fits,
            loads=self.loads,
            optimal=choice.optimal,
            solve_s=choice.solve_s,
            mass_on_gpu=choice.mass_on_gpu,
            work_on_gpu=choice.work_on_gpu,
            bytes=self.bytes,
            activations=self.activations,
            gpu_layers=self.claims.gpu_layers,
            layers=[
                LayerPlan(
                    number,
                    own[Tier.GPU],
                    own[Tier.CPU],
                    own[Tier.DISK],
                    mass,
                    seconds,
                    experts,
                    of_ram.get(number, 0),
                    self.claims.inside.get(number, 0),
                )
                for number, (own, mass, seconds, experts) in enumerate(
                    zip(self.neurons, choice.mass, choice.layer_seconds, slots, strict=True)
                )
            ],
            predicted=Predicted(
                decode_tok_s=request.batch / choice.seconds,
                ms_per_token=1e3 * choice.seconds / request.batch,
                at_position=request.past,
                dense_tok_s=self.dense_tok_s,
                skipping_tok_s=self.skipping_tok_s,
                policies={
                    name: PolicyResult(
                        request.batch / one.seconds, one.mass_on_gpu, one.work_on_gpu, one.optimal, one.solve_s
                    )
                    for name, one in self.others.items()
                },
                disk_bytes=(read.nbytes if read else self._read() if self.claims.slots_beside else 0.0) / request.batch,
                disk_hits=None if read is None else read.hits,
                prompt_disk_bytes=0.0 if read is None else read.prompt_bytes,
            ),
            reasons=list(self.reasons),
            helps=list(self.helps),
            hardware=request.hardware.name,
            path=None if path is None else str(path),
            cards=list(map(_card_plan, self.parts, self.experts_of_parts)),
            split_mode="expert" if self.shares else "layer",
        )


def _card_plan(part: PlanPart, experts: int) -> CardPlan:
    claims, vram = part.plan.claims, part.plan.request.vram
    nbytes = part.plan.bytes["gpu"]
    head = bool(nbytes.get("head"))
    return CardPlan(part.name, vram or 0, part.first, claims.gpu_layers, head, nbytes, experts)


# ---------------------------------------------------------------- making one


def make_plan(request: PlanRequest) -> Plan:
    """`place`, whose error is raised."""
    return demand(place(request))


def place(request: PlanRequest) -> Plan | RequestError:
    """The place of whole layers, neurons and experts, for a load and for `powerinfer plan`. The error if the budgets
    are too small for the dense part, or for the model without a disk."""
    plan = _split_plan(request)
    if isinstance(plan, RequestError) or request.policy != "time" or request.insist:
        return plan
    if not plan.claims.gpu_layers or plan.claims.whole:
        return plan
    alone = place(replace(request, vram=0).settled()[0])
    if isinstance(alone, RequestError) or alone.choice.seconds >= plan.choice.seconds:
        return plan
    slower = f"with the GPU a step would take {1e3 * plan.choice.seconds:.1f} ms: the CPU alone is faster"
    reasons = slower, *alone.reasons[1:]  # the first: no GPU
    return replace(alone, request=request, reasons=reasons, settled=alone.selector)


def _split_plan(request: PlanRequest) -> Plan | RequestError:
    """The plan with the GPU, even where the CPU alone is faster."""
    if request.on_cards:
        plan = _plan_on_cards(request, request.parts)
        return _compare_layers(plan) if isinstance(plan, Plan) and request.spread else plan
    claims = request.claims_if_any()
    if isinstance(claims, RequestError):
        return claims
    if claims.disk is not None and not claims.gpu_layers:
        return _from_disk(request, claims, claims.disk)
    if (lacking := _lacks_disk(request, claims)) is not None:
        return lacking
    plan = _solved(request, claims)
    if claims.inside:
        return _compare_undivided(plan)
    return _with_slots(plan) if claims.disk is None else _with_reads(plan, claims.disk)


def _plan_on_cards(request: PlanRequest, known: several.Parts | RequestError) -> Plan | RequestError:
    """The plan of the parts of several GPUs, each made as for one."""
    together = several.parts_together(request, known)
    if isinstance(together, RequestError):
        return together
    parts, claims = together
    plans = _plans_of_parts(request, parts, claims.cpu_left) if claims.bundles else list(map(_solved, *_pairs(parts)))
    if isinstance(plans, RequestError):
        return plans
    if parts.shares:
        plans = [_time_together(request, parts, number, plan) for number, plan in enumerate(plans)]
    parts = replace(parts, claims=tuple(plan.claims for plan in plans))
    settled = request.rest_of_parts(parts, several.joined(request, parts))
    if isinstance(settled, RequestError):
        return settled
    names = [several.numbered(at, card) for at, card in enumerate(request.hardware.all_cards)]
    choice = _joined_choice(request, [plan.choice for plan in plans], plans)
    by_policy = {
        policy: _joined_choice(request, [plan.others.get(policy, plan.choice) for plan in plans], plans)
        for policy in POLICIES
        if policy != "random" and any(policy in plan.others for plan in plans)
    }
    reasons = (*_reasons(request, settled, choice), _AT_ONCE if parts.shares else _IN_TURN)
    named = tuple(PlanPart(*each) for each in zip(parts.firsts, names, plans, strict=True))
    plan = Plan(request, settled, choice, by_policy, reasons, (), parts=named, shares=parts.shares)
    if plan.fits:
        return plan
    plan = replace(plan, helps=_helps_of_parts(plan, sum(together[0].cold) - claims.cpu_left))
    return plan if settled.disk is None else _with_reads(plan, settled.disk)


def _pairs(parts: several.Parts) -> tuple[Sequence[PlanRequest], Sequence[Claims]]:
    return parts.requests, parts.claims


def _plans_of_parts(request: PlanRequest, parts: several.Parts, left: int) -> list[Plan] | RequestError:
    """The plans of neurons of each part, which share so many bytes of RAM."""
    spare = left - sum(parts.cold)
    if spare < 0:
        return _plans_within(parts, left)
    plans = []
    for part, claimed, least in zip(*_pairs(parts), parts.cold, strict=True):
        plan = _split_plan(replace(part, ram=several.PLENTY // 2 - claimed.cpu_left + least + spare))
        if isinstance(plan, RequestError):
            return plan
        cold = sum(plan.choice.kept) - sum(plan.choice.gpu)
        spare -= max(0, cold * GROUP * claimed.cpu_neuron - least)
        plans.append(plan)
    return plans


def _plans_within(parts: several.Parts, left: int) -> list[Plan] | RequestError:
    """The same where some neurons stay on disk: RAM is divided in proportion to what each part would take, but for
    those that need more to read from disk, which get that."""
    cold, least, first = parts.cold, dict[int, int](), list[Plan]()
    while sum(least.values()) <= left:
        rest = left - sum(least.values())
        divided = sum(nbytes for number, nbytes in enumerate(cold) if number not in least)
        shares = [least.get(number, rest * nbytes // max(1, divided)) for number, nbytes in enumerate(cold)]
        plans: list[Plan] = []
        for part, claimed, share in zip(*_pairs(parts), shares, strict=True):
            plan = _split_plan(replace(part, ram=several.PLENTY // 2 - claimed.cpu_left + share))
            if isinstance(plan, RequestError):
                return plan
            plans.append(plan)
        first = first or plans
        short = {at: shares[at] + _short(plan) for at, plan in enumerate(plans) if at not in least and not plan.loads}
        if not short:
            return plans
        least |= short
    return first


def _short(plan: Plan) -> int:
    """Bytes of RAM that a part lacks to read neurons from disk."""
    return min(one.bytes for one in plan.helps if one.flag == "--ram") - (plan.request.ram or 0)


def _helps_of_parts(plan: Plan, lacking: int) -> tuple[Help, ...]:
    """The RAM in which neurons are read from disk, where the parts lack that, and in which everything is, which lacks
    so many bytes."""
    request = plan.request
    _, ram = budgets(request.hardware, request.vram, request.ram)
    helps = [request.more_ram("everything in memory", ram + lacking)]
    if not plan.loads:
        more = sum(_short(part.plan) for part in plan.parts if not part.plan.loads)
        if more < lacking:
            helps.insert(0, request.more_ram("neurons are read from disk", ram + more))
    return tuple(helps)


def _joined_choice(request: PlanRequest, choices: Sequence[Choice], plans: Sequence[Plan]) -> Choice:
    """Choices of parts as that of one model."""
    layers = [seconds for one in choices for seconds in one.layer_seconds]
    ends = choices[-1].seconds - math.fsum(map(_layer_seconds, choices[-1].layer_seconds))
    for plan in plans[1:]:  # its own launch, and the residual stream goes there
        gpu = plan.request.hardware.gpu
        assert gpu is not None
        ends += 1e-6 * (gpu.step_us + plan.request.hardware.sync_us)
    mass = [share for one in choices for share in one.mass]
    weights = [int(counts.sum()) for counts in request.profile.counts]
    if any(request.model.n_experts):
        weights = [int(n > 0) for n in request.model.n_experts]
    carried = math.fsum(share * weight for share, weight in zip(mass, weights, strict=True))
    work = math.fsum(one.work for one in choices)
    optimal = [one.optimal for one in choices]
    return Choice(
        gpu=tuple(n for one in choices for n in one.gpu),
        kept=tuple(n for one in choices for n in one.kept),
        layer_seconds=tuple(layers),
        seconds=math.fsum(map(_layer_seconds, layers)) + ends,
        mass=tuple(mass),
        mass_on_gpu=carried / max(1, sum(weights)),
        work_on_gpu=math.fsum(one.work_on_gpu * one.work for one in choices) / work,
        optimal=None if None in optimal else all(optimal),
        solve_s=math.fsum(one.solve_s for one in choices),
        work=work,
    )


def _layer_seconds(layer: Mapping[str, float]) -> float:
    """The time of a layer (`SECONDS`)."""
    gpu, cpu, sync, disk, other = (layer[term] for term in SECONDS)
    return other + max(gpu, cpu + sync) + disk


def _time_together(request: PlanRequest, parts: several.Parts, number: int, plan: Plan) -> Plan:
    """The plan of a part with the time of experts that are spread over all GPUs."""

    def timed(choice: Choice) -> Choice:
        layers = spread.layer_seconds(request, parts, number, choice.layer_seconds)
        less = math.fsum(map(_layer_seconds, choice.layer_seconds)) - math.fsum(map(_layer_seconds, layers))
        return replace(choice, layer_seconds=layers, seconds=choice.seconds - less)

    by_policy = {policy: timed(choice) for policy, choice in plan.others.items()}
    return replace(plan, choice=timed(plan.choice), others=by_policy)


def _compare_layers(plan: Plan) -> Plan:
    """A plan that spreads layers' experts over GPUs, with what it predicts where each GPU has its layers' own."""
    return _add_speed(plan, replace(plan.request, spread=False), "--split-mode layer")


def _compare_undivided(plan: Plan) -> Plan:
    """A plan that divides experts, with what it predicts of whole ones in the same memory."""
    model = replace(plan.request.model, inside={})
    return _add_speed(plan, replace(plan.request, model=model), "whole experts in the same memory")


def _add_speed(plan: Plan, request: PlanRequest, name: str) -> Plan:
    """A plan with a line on the speed of another request's. name: of that, for people."""
    other = _split_plan(request)
    if isinstance(other, RequestError):
        return plan
    return replace(plan, reasons=(*plan.reasons, comparison(plan, other, name)))


def comparison(plan: Plan, other: Plan, name: str) -> str:
    """A line that says whether a plan is predicted to be faster than another one of the same batch. name: of that, for
    people."""
    speed, reference = (f"{plan.request.batch / made.choice.seconds:.4g}" for made in (plan, other))
    if speed == reference:
        return f"as fast as {name}: {speed} tokens/s"
    faster = "faster" if plan.choice.seconds < other.choice.seconds else "slower"
    return f"{faster} than {name}: {speed} tokens/s, not {reference}"


def _with_slots(plan: Plan) -> Plan:
    """A plan with neurons on disk beside a GPU, with what reading them takes of RAM; the plan as it is where they would
    not be read."""
    if plan.fits or not _may_rest(plan.request, plan.claims):
        return plan
    claims, lacking = _claims_with_slots(plan.request, plan.claims)
    if claims is not None:
        found = replace(_solved(plan.request, claims), helps=plan.helps)  # where all fits nothing is needed beside
        if found.loads:
            return found
        lacking = -_left_for_neurons(claims, _cold(plan.request, claims, found.choice.gpu))
    _, ram = budgets(plan.request.hardware, plan.request.vram, plan.request.ram)
    least = plan.request.more_ram("neurons are read from disk", ram + lacking)
    if any(one.flag == "--ram" and one.bytes <= least.bytes for one in plan.helps):  # of so small a model it takes more
        return plan
    return replace(plan, helps=(*plan.helps[:-1], least, *plan.helps[-1:]))


def _may_rest(request: PlanRequest, claims: Claims) -> bool:
    """Whether neurons that fit into neither memory may be read from disk beside a GPU, if RAM has room for that."""
    return bool(claims.gpu_layers) and claims.bundles and claims.slots is None and request.selector != "all"


def _claims_with_slots(request: PlanRequest, claims: Claims) -> tuple[Claims | None, int]:
    """With what reading neurons from disk beside a GPU takes, if as many as have room are on the GPU. None, and how
    many bytes of RAM are lacking, where it does not hold that: with the neurons of the layers that the GPU does not
    have, and, without a predictor, the gates of the others."""
    selects = request.selector == "predicted"
    model, threads, first = request.model, request.hardware.cpu.threads, claims.gpu_layers
    claims = claims.without_buffers()
    gpu_left, cpu_left = claims.gpu_left, claims.cpu_left
    neuron = max(resting_bytes(layout, selects) for layout in model.bundles)
    gate = 0 if selects else max(layout.gate_bytes for layout in model.bundles)
    each = zip(model.config.ffn_sizes[first:], model.bundles[first:], strict=True)
    others = sum(n_groups(size) * BUNDLE_GROUP * layout.pitch for size, layout in each)
    limit = cpu_left
    while True:
        staging = staging_from_disk(model, request.workload, gpu_left, limit)
        slots, nbytes = resting_in_ram(model, first, threads, staging, selects)
        cpu = claims.cpu | {"scratch": claims.cpu["scratch"] + nbytes}
        own = replace(claims, cpu=cpu, cpu_neuron=neuron, cpu_gate=gate, slots_beside=slots, staging=staging)
        own = replace(own, gpu_left=gpu_left - staged_on_gpu(staging), buffered=staged_on_gpu(staging))
        own = replace(own, cpu_left=cpu_left - staged_in_ram(staging) - nbytes - others)
        left = _left_for_neurons(own, _fewest_cold(request, own))
        if left >= 0:
            return own, 0
        if not staging:
            return None, -left
        limit //= 2


def with_less_vram(plan: Plan, lacking: int) -> Plan | RequestError | None:
    """The plan with `lacking` fewer bytes of neurons on the GPU; None if there are not that many, the error if these do
    not fit into RAM either, and there is no disk."""
    claims = plan.claims
    spare = claims.gpu_left - sum(plan.choice.gpu) * GROUP * plan.request.model.gpu_neuron
    return with_working_memory(plan, claims.gpu["scratch"] + spare + lacking)


def with_working_memory(plan: Plan, nbytes: int) -> Plan | RequestError | None:
    """The plan with `nbytes` of working memory on the GPU in place of its own; None if they leave less than nothing,
    the error if neurons then do not fit into RAM either, and there is no disk.

    The dense parts stay where they are, and only the request's own policy is solved.
    """
    claims = plan.claims
    left = claims.gpu_left + claims.gpu["scratch"] - nbytes
    if left < 0:
        return None
    claims = replace(claims, gpu=claims.gpu | {"scratch": nbytes}, gpu_left=left)
    if (lacking := _lacks_disk(plan.request, claims)) is not None:
        return lacking
    return _solved(plan.request, claims, (plan.request.policy,))


def _solved(request: PlanRequest, claims: Claims, policies: Sequence[str] = POLICIES) -> Plan:
    """Place the neurons into the memory that the dense parts leave. policies: those to solve, the request's own too."""
    tables = {False: _tables(request, claims, _orders(request, "time"))}
    if claims.whole:
        policies = (request.policy,)
    shuffled = claims.gpu_layers and claims.bundles and "random" in policies
    tables[True] = _tables(request, claims, _orders(request, "random")) if shuffled else tables[False]
    others: dict[str, Choice] = {}
    for policy in reversed(policies):  # `time` starts with the answers of the others
        others[policy] = _choose(request, claims, tables[policy == "random"], policy, others)
    others = {policy: others[policy] for policy in policies}
    choice = others[request.policy]
    helps = _helps(request, claims, choice, tables[False])
    return Plan(request, claims, choice, {} if claims.whole else others, _reasons(request, claims, choice), helps)


def _from_disk(request: PlanRequest, claims: Claims, disk: DiskPlan) -> Plan | RequestError:
    """The plan for the CPU alone where weights stay on disk: there is nothing to choose. The error where the machine
    has no disk."""
    model, hardware = request.model, request.hardware
    if hardware.disk is None:
        return RequestError(
            f"{model.name} needs {gib(least_ram(model, request.workload))} of RAM, and {hardware.name} describes no "
            "disk to read the rest from"
        )
    read = predict(
        disk,
        model,
        hardware.cpu,
        hardware.disk,
        Decoding(request.workload, request.past, request.profile, request.hits),
    )
    nothing = (0,) * model.config.n_layers
    choice = Choice(
        gpu=nothing,
        kept=tuple(n // GROUP for n in disk.kept(request.profile.sizes)),
        layer_seconds=tuple(
            dict.fromkeys(SECONDS, 0.0) | {"other": own, "disk": waited} for own, waited in read.layers
        ),
        seconds=read.seconds,
        mass=(0.0,) * model.config.n_layers,
        mass_on_gpu=0.0,
        work_on_gpu=0.0,
        optimal=None,
        solve_s=0.0,
    )
    reasons = _why_no_gpu(request), *read.reasons(disk, request.hits is not None)
    return Plan(request, claims, choice, dict.fromkeys(POLICIES, choice), reasons, _helps_of_ram(request), read)


def _with_reads(plan: Plan, disk: DiskPlan) -> Plan:
    """A plan of experts or layers on a GPU and in RAM, with the time that reading the others takes."""
    request, claims, choice = plan.request, plan.claims, plan.choice
    if request.hardware.disk is None:
        unknown = f"a step reads {disk.why}; {request.hardware.name} describes no disk, so the estimate is without that"
        return replace(plan, reasons=(*plan.reasons, unknown))
    reads, on_gpu = request.experts_read(claims), []
    for layer, own in enumerate(choice.layer_seconds[: claims.gpu_layers]):
        seconds = own["other"] + max(own["gpu"], own["cpu"] + own["sync"])
        found = OnGpu(seconds)
        if layer in reads:
            assert claims.slots is not None
            with_ram = claims.slots[layer] + disk.about.experts.get(layer, 0)
            beside = replace(claims, slots=(*claims.slots[:layer], with_ram, *claims.slots[layer + 1 :]))
            missed = request.experts_read(beside)[layer].cold
            found = OnGpu(seconds, own["other"], claims.slots[layer], reads[layer].cold, missed)
        on_gpu.append(found)
    whole = math.fsum(own["other"] + max(own["gpu"], own["cpu"] + own["sync"]) for own in choice.layer_seconds)
    decoding = Decoding(request.workload, request.past, request.profile, request.hits)
    read = predict(
        disk, request.model, request.hardware.cpu, request.hardware.disk, decoding, on_gpu, choice.seconds - whole
    )
    layer_seconds = [own | {"disk": waited} for own, (_, waited) in zip(choice.layer_seconds, read.layers, strict=True)]
    choice = replace(choice, seconds=read.seconds, layer_seconds=tuple(layer_seconds))
    known = request.frequencies is not None
    reasons = *plan.reasons, *read.reasons(disk, known, "that a token needs and the GPU does not have")
    others = dict.fromkeys(plan.others, choice)
    return replace(plan, choice=choice, others=others, reasons=reasons, from_disk=read)


def _helps_of_ram(request: PlanRequest) -> tuple[Help, ...]:
    """The RAM in which nothing is read from disk."""
    model, work = request.model, request.workload
    goals = [("everything in memory", least_ram(model, work))]
    if request.chosen and work.selector != "all":
        goals.insert(0, ("the dense weights in memory", least_ram(model, replace(work, selector="all"))))
    return tuple(request.more_ram(what, nbytes) for what, nbytes in goals)


@dataclass(frozen=True, eq=False)
class _Tables:
    """Costs of neurons in an order, float64 [layers, groups + 1] by the number of groups on the GPU.

    costs: as `solver.solve` takes them, the fastest way's; parts: of them and of attention (other; gpu where the CPU's
    neurons do not wait for it), by what takes them. disk: as the solver takes it.
    ends: seconds outside of the layers. mass: activations of the first groups; work: bytes of theirs that a step reads,
    on the selector's own way.
    """

    costs: Float64
    parts: dict[str, Float64]
    disk: Float64 | None
    ends: float
    mass: Float64
    work: Float64


def _orders(request: PlanRequest, policy: str) -> list[Indices]:
    profile = request.profile
    if policy != "random":
        return [profile.order(layer) for layer in range(profile.n_layers)]
    rng = np.random.default_rng(request.seed)
    return [rng.permutation(size).astype(np.int32) for size in profile.sizes]


def _tables(request: PlanRequest, claims: Claims, orders: Sequence[Indices]) -> _Tables:
    model, hardware, selector = request.model, request.hardware, request.goes
    config, cpu, gpu = model.config, hardware.cpu, hardware.gpu
    expected = cost.expected(
        request.profile, orders, config, model.selected, request.batch, GROUP, every=selector == "all"
    )
    if not claims.gpu_layers:
        cpu = cpu.warm(_step_bytes(request, claims, expected))
    layers, first, groups = config.n_layers, claims.gpu_layers, expected.sums.shape[1] - 1
    devices = [gpu if gpu is not None and layer < first else cpu for layer in range(layers)]
    whole_ffn = [not claims.bundles and layer < first for layer in range(layers)]
    attention = np.array([
        cost.attention_seconds(
            device, model, layer, request.kv_type, request.past, request.batch, panels=device is cpu, ffn=not whole
        )
        for layer, (device, whole) in enumerate(zip(devices, whole_ffn, strict=True))
    ])  # fmt: skip
    parallel = np.array([layer.parallel for layer in config.layers])
    beside_attention = np.where(parallel, attention, 0.0)  # the CPU's neurons do not wait for attention
    ways = []
    for way in cost.WAYS[selector][: 1 if first else None]:  # with a GPU every layer uses the selector's own way
        ffn = _ffn_time(request, claims, expected, cpu, way)
        if first:
            ffn.gpu[:first] += beside_attention[:first, None]
        other = np.zeros(layers)
        if way == "predicted":
            pairs = zip(devices, model.predictors, strict=True)
            other[:] = [cost.matrix_seconds(device, own, panels=device is cpu) for device, own in pairs]
        ways.append((ffn, np.broadcast_to(other[:, None], ffn.gpu.shape)))
    totals = np.array([ffn.total + other for ffn, other in ways])
    best = totals.argmin(axis=0)

    def of_best(arrays: list[Float64]) -> Float64:
        return np.asarray(np.take_along_axis(np.array(arrays), best[None], axis=0)[0])

    parts = {name: of_best([getattr(ffn, name) for ffn, _ in ways]) for name in ("gpu", "cpu", "sync")}
    apart = np.where(parallel & (np.arange(layers) < first), 0.0, attention)
    parts["other"] = of_best([other for _, other in ways]) + apart[:, None]
    disk = None
    if hardware.disk is not None:
        no_gates = request.selector == "predicted"  # in RAM, though a step of many tokens goes as `exact` does
        disk = cost.disk_seconds(hardware.disk, expected, model.bundles, selector, no_gates)
    mass = np.zeros((layers, groups + 1))
    for layer, order in enumerate(orders):
        each = cost.by_group(request.profile.counts[layer][order], np.arange(groups) * GROUP)
        mass[layer, 1:] = np.cumsum(each)
    work = cost.by_layer(expected.sums, _step_neurons(model, selector))
    return _Tables(of_best(list(totals)), parts, disk, _ends(request, claims, cpu), mass, work)


def _ffn_time(request: PlanRequest, claims: Claims, expected: cost.Expected, cpu: Device, way: str) -> cost.FfnTime:
    """The time of FFNs on a way: of the GPU's layers split by neurons or experts, or there as a whole."""
    model, gpu, first = request.model, request.hardware.gpu, claims.gpu_layers
    ffn, sync = cost.cpu_time(cpu, expected, model, way, claims.panels), 1e-6 * request.hardware.sync_us
    if gpu is None or not first:
        return ffn
    if claims.bundles:
        dense = cost.dense_layers(request.profile, model, way, request.batch)
        split = cost.split_time(cpu, gpu, expected, model, way, sync, dense)
    else:
        reads, groups = request.experts_read(claims), expected.sums.shape[1] - 1
        split = cost.split_experts(cpu, gpu, model, reads, first, groups, request.batch, sync)
    for total, part in ((ffn.gpu, split.gpu), (ffn.cpu, split.cpu), (ffn.sync, split.sync)):
        total[:first] = part[:first]
    return ffn


def _ends(request: PlanRequest, claims: Claims, cpu: Device) -> float:
    """Head, embedding, and transfers between devices: a token's row in, the last layer's to the CPU, logits back."""
    model, hardware = request.model, request.hardware
    on_gpu = hardware.gpu is not None and claims.gpu_head
    head = hardware.gpu if hardware.gpu is not None and on_gpu else cpu
    seconds = cost.end_seconds(head, model, panels=not on_gpu) + 1e-6 * cpu.step_us
    if hardware.gpu is not None and claims.gpu_layers:
        seconds += 1e-6 * (2 * hardware.sync_us + hardware.gpu.step_us)
    if on_gpu:
        seconds += 4 * request.batch * model.config.vocab_size / (1e9 * hardware.copy_gb_s)
    return seconds


def _step_bytes(request: PlanRequest, claims: Claims, expected: cost.Expected) -> float:
    """Bytes that a step without a GPU reads: dense matrices, keys and values, and the FFNs' on the selector's way."""
    model = request.model
    dense = sum(one.panels for layer in model.attention for one in layer) + model.head.panels
    whole = sum(_whole_bytes(request, layer, panels=True) for layer in range(model.config.n_layers))
    kv = whole + model.kv_bytes(request.kv_type, request.past, request.batch)
    if request.goes == "predicted":
        dense += sum(one.panels for pair in model.predictors for one in pair)
    if request.goes == "all" and claims.panels:
        told_apart = (each for each, size in zip(model.ffn, model.config.ffn_sizes, strict=True) if size)
        return float(dense + kv + sum(one.panels for layer in told_apart for one in layer))
    return float(dense + kv + (expected.all * _step_neurons(model, request.goes)).sum())


def _whole_bytes(request: PlanRequest, layer: int, panels: bool = False) -> float:
    """Bytes that a step reads of an FFN whose neurons are not told apart: in panels (CPU), or as a GPU stores them."""
    model, batch = request.model, request.batch

    def total(matrices: Sequence[Matrix]) -> int:
        return sum(one.panels if panels else one.stored for one in matrices)

    predictor, share = model.expert_predictor(layer), model.config.layers[layer].ffn.share_read(batch)
    needed = model.step_share(layer, batch) * total(model.whole_ffn(layer)) + total(predictor[1:])
    return share * needed + total(predictor[:1])


def _step_neurons(model: Model, selector: str) -> list[Float64]:
    """`cost.neuron_bytes` of each layer, on the selector's own way."""
    return [cost.neuron_bytes(layout, cost.WAYS[selector][0]) for layout in model.bundles]


def _choose(request: PlanRequest, claims: Claims, tables: _Tables, policy: str, others: Mapping[str, Choice]) -> Choice:
    """Place the neurons by a policy. others: the choices of policies so far."""
    gpu, kept, optimal, solve_s = _placed(request, claims, tables, policy, others)
    if claims.slots_beside and not _are_kept(request, claims, gpu, kept):
        kept, optimal = _kept_beside(request, claims, tables, gpu), None
    rows = np.arange(len(gpu))
    read = np.zeros(len(gpu)) if tables.disk is None else tables.disk[rows, kept]
    parts = {name: values[rows, gpu] for name, values in tables.parts.items()} | {"disk": read}
    seconds = math.fsum(parts["other"]) + math.fsum(np.maximum(parts["gpu"], parts["cpu"] + parts["sync"]))
    on_gpu, whole = tables.mass[rows, gpu], tables.mass[:, -1]
    work_on_gpu, work = _work(request, claims, float(tables.work[rows, gpu].sum()), float(tables.work[:, -1].sum()))
    if claims.slots is not None:
        reads = request.experts_read(claims)
        whole = np.sign(np.array(request.model.n_experts, np.float64))
        on_gpu = np.array([reads[layer].hits if layer in reads else 0.0 for layer in range(len(gpu))])
    return Choice(
        gpu=tuple(map(int, gpu)),
        kept=tuple(map(int, kept)),
        layer_seconds=tuple({name: float(values[layer]) for name, values in parts.items()} for layer in rows),
        seconds=seconds + math.fsum(read) + tables.ends,
        mass=tuple(float(a / b) if b else 0.0 for a, b in zip(on_gpu, whole, strict=True)),
        mass_on_gpu=float(on_gpu.sum() / whole.sum()) if whole.sum() else 0.0,
        work_on_gpu=work_on_gpu / work,
        optimal=optimal,
        solve_s=solve_s,
        work=work,
    )


def _capacities(request: PlanRequest, claims: Claims) -> tuple[int, int | None]:
    """Groups of neurons for which the GPU and RAM have room; None: RAM has room for all that the GPU does not have."""
    model = request.model
    room = claims.gpu_left // (GROUP * model.gpu_neuron) if claims.bundles else 0
    everything = claims.cpu_neuron * model.config.n_neurons
    if claims.slots_beside:  # at most: fewer on the GPU leave less room beside their gates
        whole = sum(_groups(request)[claims.gpu_layers :])
        return room, _groups_in_ram(claims, _fewest_cold(request, claims)) + whole
    # Without bundles the panels are in RAM already; with room for all of them groups need not be counted.
    if not claims.bundles or everything <= claims.cpu_left:
        return room, None
    return room, claims.cpu_left // (GROUP * claims.cpu_neuron)


def _groups(request: PlanRequest) -> list[int]:
    """Groups of neurons of each layer, counted as if all that have an FFN were as wide as the widest."""
    sizes = request.profile.sizes
    return [-(-max(sizes) // GROUP) if size else 0 for size in sizes]


def _lacks_disk(request: PlanRequest, claims: Claims) -> RequestError | None:
    """The error where neurons fit into neither memory and the machine has no disk."""
    model, hardware = request.model, request.hardware
    room, ram = _capacities(request, claims)
    every = sum(_groups(request))
    if ram is None or hardware.disk is not None or room + ram >= every:
        return None
    missing = claims.cpu_neuron * model.config.n_neurons - (room + ram) * GROUP * claims.cpu_neuron
    return RequestError(
        f"{model.name} needs {gib(missing)} more of RAM or VRAM, and {hardware.name} describes no disk to read neurons "
        "from"
    )


def _placed(
    request: PlanRequest, claims: Claims, tables: _Tables, policy: str, others: Mapping[str, Choice]
) -> tuple[solver.Numbers, solver.Numbers, bool | None, float]:
    """(groups of each layer on the GPU, groups kept in memory, whether that is optimal, seconds) of a policy."""
    if not claims.bundles:  # then the dense parts are all that is placed
        layers, most = request.profile.n_layers, tables.costs.shape[1] - 1
        proven = (policy in ("time", "ilp") and not claims.whole) or None
        there = np.where(np.arange(layers) < claims.gpu_layers * claims.whole, most, 0)
        return there, np.full(layers, most), proven, 0.0
    groups = np.zeros((2, request.profile.n_layers), np.int64)
    numbers = np.array(request.profile.layers, np.int64)  # layers without an FFN have nothing to place
    *placed, optimal, seconds = _place(request, claims, tables, policy, others, numbers)
    groups[:, numbers] = placed
    return groups[0], groups[1], optimal, seconds


def _place(
    request: PlanRequest,
    claims: Claims,
    tables: _Tables,
    policy: str,
    choices: Mapping[str, Choice],
    numbers: solver.Numbers,
) -> tuple[solver.Numbers, solver.Numbers, bool | None, float]:
    """The same of the layers of these numbers."""
    costs, disk = tables.costs[numbers], None if tables.disk is None else tables.disk[numbers]
    layers, groups = costs.shape[0], costs.shape[1] - 1
    room, ram = _capacities(request, claims)
    if policy == "time":
        solved = [choices[name] for name in ("ilp", "greedy") if name in choices]
        starts = [(np.array(one.gpu)[numbers], np.array(one.kept)[numbers]) for one in solved]
        answer = solver.solve(costs, None if ram is None else disk, room, ram, request.time_limit, starts)
        kept = answer.kept if ram is None else solver.top_up(answer.gpu, answer.kept, ram, groups)
        return answer.gpu, kept, answer.optimal, answer.seconds
    impact = np.diff(tables.mass[numbers], axis=1)
    allowed = numbers < claims.gpu_layers
    bundles = [request.model.bundles[layer] for layer in numbers]
    fewest = {layout: _least(request, layout) for layout in set(bundles)}
    least = [fewest[layout] if on else None for layout, on in zip(bundles, allowed, strict=True)]
    optimal: bool | None = None
    solve_s = 0.0
    if policy == "ilp":
        answer = solver.solve(solver.mass_costs(impact, least), None, room, None, request.time_limit)
        gpu, optimal, solve_s = answer.gpu, answer.optimal, answer.seconds
    elif policy == "greedy":
        gpu = solver.greedy(impact, least, room)
    else:
        gpu = solver.random_groups(layers, groups, room, allowed, request.seed)
    return gpu, solver.fill(gpu, disk, ram, groups), optimal, solve_s


def _kept_beside(request: PlanRequest, claims: Claims, tables: _Tables, gpu: solver.Numbers) -> solver.Numbers:
    """Groups kept in memory where neurons rest on disk: layers that run on the CPU as a whole have all of theirs, those
    on the GPU share what is left."""
    first, groups = claims.gpu_layers, np.array(_groups(request), np.int64)
    assert tables.disk is not None
    in_ram = _groups_in_ram(claims, _cold(request, claims, gpu))
    numbers = np.array([layer for layer in request.profile.layers if layer < first], np.int64)
    groups[numbers] = solver.fill(gpu[numbers], tables.disk[numbers], in_ram, tables.costs.shape[1] - 1)
    return groups


def _are_kept(request: PlanRequest, claims: Claims, gpu: _Groups, kept: _Groups) -> bool:
    """Whether RAM has room for these groups where neurons rest on disk, those of layers on the CPU as a whole among
    them."""
    first, groups = claims.gpu_layers, _groups(request)
    in_ram = int(sum(kept[:first]) - sum(gpu[:first]))
    return in_ram <= _groups_in_ram(claims, _cold(request, claims, gpu)) and list(kept[first:]) == groups[first:]


def _groups_in_ram(claims: Claims, cold: int) -> int:
    """Groups of neurons of the GPU's layers that RAM keeps where others of these layers rest on disk. cold: neurons
    that the GPU does not have."""
    return max(0, _left_for_neurons(claims, cold)) // (GROUP * claims.cpu_neuron)


def _left_for_neurons(claims: Claims, cold: int) -> int:
    """Bytes of RAM for these groups beside the gates of so many neurons; less than 0: it does not hold the gates."""
    return claims.cpu_left - claims.cpu_gate * cold


def _cold(request: PlanRequest, claims: Claims, gpu: _Groups) -> int:
    """Neurons of the GPU's layers that are not there. gpu: groups that are, by layer."""
    sizes = request.profile.sizes[: claims.gpu_layers]
    return sum(max(0, size - int(n) * GROUP) for size, n in zip(sizes, gpu, strict=False))


def _fewest_cold(request: PlanRequest, claims: Claims) -> int:
    """The same where the GPU has as many groups as it has room for."""
    on_gpu = claims.gpu_left // (GROUP * request.model.gpu_neuron) * GROUP
    return max(0, sum(request.profile.sizes[: claims.gpu_layers]) - on_gpu)


def _work(request: PlanRequest, claims: Claims, of_neurons: float, of_all_neurons: float) -> tuple[float, float]:
    """Bytes of weights that the GPU reads in a step, and both devices."""
    model, first = request.model, claims.gpu_layers
    reads = request.experts_read(claims)
    attention = []
    if claims.whole:
        of_neurons = of_all_neurons = 0.0
    for layer, own in enumerate(model.attention):
        held: float = sum(one.stored for one in own)
        if claims.whole:
            share = model.config.layers[layer].ffn.share_read(request.batch)
            held += share * sum(one.stored for one in model.ffn[layer])
        elif layer in reads:  # and what the CPU reads of the layer's experts
            held += sum(one.stored for one in model.beside[layer]) + reads[layer].hot * model.expert_bytes(layer)[0]
            of_all_neurons += reads[layer].cold * model.expert_bytes(layer)[0]
        else:
            held += _whole_bytes(request, layer)
        attention.append(held)
    predictors = [sum(one.stored for one in pair) for pair in model.predictors if request.selector == "predicted"]
    whole = sum(attention) + sum(predictors) + model.head.stored + of_all_neurons
    gpu = sum(attention[:first]) + sum(predictors[:first]) + claims.gpu_head * model.head.stored
    return gpu + of_neurons, whole


def _least(request: PlanRequest, bundles: BundleLayout) -> int | None:
    """C_l in groups, of a layer with such bundles: Ineq. 4 with the times of whole bundles."""
    hardware = request.hardware
    if hardware.gpu is None or any(request.model.n_experts):
        return None
    rows = 3 if bundles.gated else 2
    gpu_s, cpu_s = (
        device.rows_seconds(bundles.gate_type, rows, bundles.stride) for device in (hardware.gpu, hardware.cpu)
    )
    least = solver.least_groups(gpu_s, cpu_s, 1e-6 * hardware.sync_us)
    return 1 if least is None and request.insist else least


def _reasons(request: PlanRequest, claims: Claims, choice: Choice) -> tuple[str, ...]:
    """Explanations of the placement."""
    config = request.model.config
    reasons = []
    if not claims.gpu_layers:
        reasons.append(_why_no_gpu(request))
    elif claims.whole and not claims.gpu_head:
        every = "the output head does not fit" if claims.gpu_layers == config.n_layers else "a load does not split them"
        held = f"{claims.gpu_layers} of {config.n_layers} layers"
        reasons.append(f"{held} are on the GPU as a whole: {every}")
    elif claims.gpu_layers < config.n_layers:
        reasons.append(
            f"attention and KV cache of {claims.gpu_layers} of {config.n_layers} layers fit on the GPU; "
            "the other layers run on the CPU as a whole"
        )
    elif not claims.gpu_head:
        reasons.append("attention of all layers is on the GPU; the output head does not fit")
    if not claims.bundles and not claims.whole:
        reasons.append(_what_is_read(request, claims))
    if claims.bundles:
        each = zip(config.ffn_sizes, choice.kept, request.model.bundles, strict=True)
        read = (
            max(0, n - kept * GROUP) * (layout.stride - (layout.gate_bytes if claims.cpu_gate else 0))
            for n, kept, layout in each
        )
        if on_disk := sum(read):
            size = gib(on_disk)
            if claims.slots_beside and request.selector == "predicted":
                reasons.append(f"{size} of neurons stay on disk and are read when they are selected")
            elif claims.slots_beside:
                reasons.append(f"{size} of neurons stay on disk and are read when they fire; RAM has their gates")
            else:
                refused = "places whole layers instead" if request.chosen else "is refused"
                gates = "" if request.selector == "predicted" else ", and the gates of those of the other layers"
                reasons.append(
                    f"{size} of neurons fit into neither memory, and a load {refused}: to read them from disk RAM must "
                    f"hold those that are being read, and all of layers that are not on the GPU{gates}"
                )
    if choice.optimal is False:
        reasons.append(f"not proven to be optimal: the solver's {request.time_limit:g} s ran out")
    return *reasons, *_reasons_of_chunks(request, claims)


def _reasons_of_chunks(request: PlanRequest, claims: Claims) -> tuple[str, ...]:
    """Explanation of how long a step with a prompt is, where that is not the usual number of tokens."""
    if not claims.staging or request.chunk <= DEFAULT_CHUNK:
        return ()
    return (f"prompts are computed {request.chunk} tokens at a time, since what streams does so every time",)


def _why_no_gpu(request: PlanRequest) -> str:
    hardware = request.hardware
    vram, _ = budgets(hardware, request.vram, request.ram)
    if vram:
        part = "the attention of one layer"
        if request.selector == "all":
            part = "one layer without experts" if any(request.model.n_experts) else "one layer"
        return f"no GPU is used: {gib(vram)} do not hold driver, scratch and {part}"
    unused = f", so {gib(request.vram)} of VRAM stay unused; --hardware describes another" if request.vram else ""
    return f"no GPU is used: {'--vram is 0' if hardware.gpu else f'{hardware.name} has none{unused}'}"


def _what_is_read(request: PlanRequest, claims: Claims) -> str:
    """Of the FFNs, where they are matrices in RAM."""
    model = request.model
    layers = range(model.config.n_layers)
    whole = sum(one.panels for layer in layers for one in model.whole_ffn(layer))
    if not whole:
        return "every neuron is computed, from dense matrices in RAM"
    read = sum(_whole_bytes(request, layer, panels=True) for layer in layers)
    titles = dict.fromkeys(model.config.layers[layer].ffn.title for layer in layers if model.whole_ffn(layer))
    if claims.slots is not None:
        hot, every = sum(claims.slots), sum(model.n_experts)
        reads = request.experts_read(claims).values()
        hits = sum(one.hits for one in reads) / max(1, sum(map(bool, model.n_experts)))
        known = "as profiled" if request.frequencies is not None else "if all are selected equally often"
        others = ""
        if claims.disk is not None:
            others = f"; of the others RAM holds {sum(claims.disk.about.experts.values())} at a time"
        inside = claims.inside.values()
        if inside:
            count = f"{min(inside)} to {max(inside)}" if min(inside) < max(inside) else f"{min(inside)}"
            others = f", and of each expert of {len(inside)} layers the {count} neurons that fire most often"
        return f"{hot} of {every} experts are on the GPU{others}, {100 * hits:.0f} % of what tokens select ({known})"
    return f"of {', '.join(titles)}, a step reads {gib(int(read))} of {gib(whole)} in RAM"


def _helps(request: PlanRequest, claims: Claims, choice: Choice, tables: _Tables) -> tuple[Help, ...]:
    """The next budgets at which more fits."""
    model, hardware, layers, work = request.model, request.hardware, request.model.config.n_layers, request.workload
    vram, _ = budgets(hardware, request.vram, request.ram)
    helps = []
    if hardware.gpu is not None and vram and (any(model.n_experts) or work.selector == "all"):
        of_ram: tuple[Help, ...] = ()
        if claims.disk is not None:
            needed = sum(in_ram(model, work, request.division(claims)).values())
            of_ram = (request.more_ram("everything in memory", needed),)
        return _helps_of_layers(request, vram, hardware.gpu.memory_bytes) + of_ram
    if hardware.gpu is not None and vram:
        dense = model, hardware, work
        what = "attention, KV cache and predictors" if work.predicted else "attention and KV cache"
        goals = [(f"{what} of all layers on the GPU", sum(on_gpu(*dense, Division(layers)).values()))]
        goals.append(("the output head on the GPU", sum(on_gpu(*dense, Division(layers, True)).values())))
        for share in (0.5, 0.8, 1.0):
            what = "all neurons" if share == 1 else f"neurons that carry {100 * share:g} % of the activations"
            groups = _groups_for(tables.mass, share)
            staged = 0 if share == 1 else staged_beside(model, groups * GROUP * model.gpu_neuron)
            goals.append((f"room on the GPU for {what}", request.vram_for(groups) + staged))
        more = [(what, nbytes) for what, nbytes in goals if nbytes > vram]
        helps = [Help(what, "--vram", nbytes, nbytes <= hardware.gpu.memory_bytes) for what, nbytes in more]
    groups = sum(_groups(request))
    if claims.bundles and sum(choice.kept) < groups:
        neurons = (groups - sum(choice.gpu)) * GROUP * claims.cpu_neuron
        nbytes = sum(claims.cpu.values()) + shared_in_ram(model, claims.gpu_layers) + neurons
        helps.append(request.more_ram("everything in memory", nbytes))
    return tuple(helps)


def _helps_of_layers(request: PlanRequest, vram: int, most: int) -> tuple[Help, ...]:
    """The same for layers as a whole, with experts or without, in VRAM. most: that of the machine."""
    model, layers = request.model, request.model.config.n_layers

    def needed(head: bool, share: float) -> int:
        division = Division(layers, head, tuple(math.ceil(share * n) for n in model.n_experts))
        return sum(on_gpu(model, request.hardware, request.workload, division, dense=True).values())

    if not any(model.n_experts):
        every = needed(True, 0.0)
        return (Help("all layers on the GPU", "--vram", every, every <= most),) if every > vram else ()
    goals = [("attention and KV cache of all layers on the GPU", needed(False, 0.0))]
    goals.append(("the output head on the GPU", needed(True, 0.0)))
    for share in (0.25, 0.5, 0.75, 1.0):
        what = "all experts" if share == 1 else f"{100 * share:g} % of the experts"
        goals.append((f"room on the GPU for {what}", needed(True, share)))
    return tuple(Help(what, "--vram", nbytes, nbytes <= most) for what, nbytes in goals if nbytes > vram)


def _groups_for(mass: Float64, share: float) -> int:
    """The number of most frequent groups that carry that share of the model's activations."""
    each = np.sort(np.diff(mass, axis=1), axis=None)[::-1]
    if share == 1 or not len(each):
        return len(each)
    carried = np.cumsum(each)
    return int(np.searchsorted(carried, share * carried[-1]) + 1) if carried[-1] else 0


# ---------------------------------------------------------------- saved plans


def plan_path(folder: Path, request: PlanRequest) -> Path:
    """The file of a request's plan, in the folder of its model's prepared files."""
    return folder / f"plan-{request.key}.json"


def save_plan(plan: Plan, folder: Path) -> Path:
    """Save a plan; its path. PowerInferError if it cannot be written; then no partial file remains."""
    path = plan_path(folder, plan.request)
    text = json.dumps(plan.document(path).json(), indent=1, allow_nan=False) + "\n"
    try:
        write_small(path, text.encode())
    except OSError as error:
        raise PowerInferError(
            f"cannot write {path} ({error.strerror or error}); --prepared PATH chooses another folder"
        ) from error
    return path


def kept_document(folder: Path, request: PlanRequest) -> PlanDocument | None:
    """The document of exactly this request's plan; None if there is none. ModelError for a file that is none."""
    path = plan_path(folder, request)
    if not path.is_file():
        return None
    document = read_plan_document(path)
    if document.key != request.key:
        raise ModelError(f"{path}: not the plan that its name says (another key); `powerinfer plan` makes it again")
    return document
