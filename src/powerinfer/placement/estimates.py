"""Estimates of the catalogue's models on a machine, described or measured: what fits where, and how fast it decodes.

    estimate("qwen3-30b-a3b", "Q4_K_M", described_machine("RTX 4060", 32 << 30)).tok_s

Nothing is prepared: every neuron is computed, dense layers are on the GPU as a whole, and experts count as selected
equally often. That is what a first run of a model is like.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.catalogue import CatalogueModel, Download, catalogue
from powerinfer.hardware.description import Device, Hardware
from powerinfer.placement.budget import budgets, in_ram, whole_layers
from powerinfer.placement.cost import attention_seconds, end_seconds, matrix_seconds
from powerinfer.placement.mixes import read_dtype
from powerinfer.placement.plan import PlanRequest, make_plan
from powerinfer.placement.power_law import assumed_profile
from powerinfer.placement.request import EVEN
from powerinfer.placement.shapes import Model, described_model, find_shape, shape_names

CONTEXT = 4096
"""Tokens of context that estimates are for."""

RUNS_WELL = 10.0
"""Tokens a second from which a model runs well: faster than most people read."""

_REQUESTS = 8  # that decode together, as the engine's own default
_CHUNK = 512
_KEPT = 0.9  # of the experts on the GPU that a longer context may not take away


@dataclass(frozen=True)
class WholeLayers:
    """Layers on a GPU as a whole, the first ones, and the output head; the others are in RAM. seconds: of a token;
    fits: RAM holds them."""

    layers: int
    head: bool
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Estimate:
    """An estimate of a model on a machine.

    tok_s: tokens a second of one request, in the middle of a context of `CONTEXT` tokens. context: tokens of the
    longest context that leaves the weights where they are. place: of gpu, split (some layers or experts on the GPU),
    ram and disk; where: the same in words.
    """

    tok_s: float
    context: int
    place: str
    where: str

    @property
    def runs_well(self) -> bool:
        return self.tok_s >= RUNS_WELL and self.place != "disk"


@dataclass(frozen=True)
class Offer:
    """A model of the catalogue for a machine: its name, which of its downloads, and its estimate."""

    name: str
    model: CatalogueModel
    download: Download
    estimate: Estimate

    @property
    def full_name(self) -> str:
        """The name that stands for this download."""
        usual = self.download == self.model.downloads[0]
        return self.name if usual else f"{self.name}:{self.download.quantisation}"


def shape_of(name: str, model: CatalogueModel) -> str | None:
    """The name of the shape of a model of the catalogue; None: it is not known."""
    shape = model.shape or name
    return shape if shape in _names() else None


@cache
def _names() -> frozenset[str]:
    return frozenset(shape_names())


@cache
def _model(shape: str, dtype: str) -> Model:
    return described_model(find_shape(shape).config, dtype, shape, 0.0)


def estimate(shape: str, quantisation: str | None, hardware: Hardware, context: int = CONTEXT) -> Estimate | None:
    """The estimate of a published model, by the name of its shape, in a file's quantisation (None: BF16).

    None where it does not fit the machine. RequestError for a shape or a type that is not known.
    """
    model = _model(shape, read_dtype(quantisation or "bf16"))
    profile = assumed_profile(EVEN, model.config.ffn_sizes)
    context = min(context, model.config.context_length)
    request = PlanRequest(
        model, profile, hardware, context=context, chunk=_CHUNK, requests=_REQUESTS, selector="all"
    )
    try:
        return _of_experts(request) if any(model.n_experts) else _of_dense(request)
    except PowerInferError:
        return None


def _of_dense(request: PlanRequest) -> Estimate:
    model = request.model
    whole = by_whole_layers(request)
    if whole is None or not whole.fits:
        plan = make_plan(replace(request, vram=0))
        seconds, disk = plan.choice.seconds, plan.claims.disk is not None
        where = "read from disk" if disk else "in RAM"
        return Estimate(1 / seconds, _context(request, None), "disk" if disk else "ram", where)
    every = model.config.n_layers
    place = "gpu" if whole.layers == every and whole.head else "split"
    where = "on the GPU" if place == "gpu" else f"{whole.layers} of {every} layers on the GPU"
    if whole.layers == every and not whole.head:
        where = "on the GPU, the output head in RAM"
    return Estimate(1 / whole.seconds, _context(request, whole), place, where)


def _of_experts(request: PlanRequest) -> Estimate:
    plan, model = make_plan(request), request.model
    claims, every = plan.claims, sum(model.n_experts)
    if claims.slots is None:
        disk = claims.disk is not None
        place, where = ("disk", "experts read from disk") if disk else ("ram", "in RAM")
    else:
        share = 100 * sum(claims.slots) / every
        there = f"{share:.0f} % of the experts on the GPU"
        place = "disk" if claims.disk is not None else "gpu" if share == 100 and claims.gpu_head else "split"
        others = {"disk": f"{there}, others read from disk", "split": f"{there}, others in RAM"}
        where = others.get(place, "on the GPU")
        if claims.gpu_layers < model.config.n_layers:
            where = f"{claims.gpu_layers} of {model.config.n_layers} layers on the GPU, {where}"
    return Estimate(1 / plan.choice.seconds, _context(request, None), place, where)


def by_whole_layers(request: PlanRequest) -> WholeLayers | None:
    """The placement of a load without bundles, of a model without experts: whole layers on the GPU. None: none fits."""
    model, hardware, work = request.model, request.hardware, replace(request.workload, selector="all")
    gpu, cpu = hardware.gpu, hardware.cpu
    vram, ram = budgets(hardware, request.vram, request.ram)
    layers, head, _ = whole_layers(model, hardware, work, vram)
    if gpu is None or not layers:
        return None
    seconds = 1e-6 * (cpu.step_us + 2 * hardware.sync_us)
    for layer in range(model.config.n_layers):
        seconds += _layer_seconds(gpu if layer < layers else cpu, request, layer, layer >= layers)
    seconds += end_seconds(gpu if head else cpu, model, not head)
    if head:
        seconds += 4 * request.batch * model.config.vocab_size / (1e9 * hardware.copy_gb_s)
    needed = sum(in_ram(model, work, layers, head, hardware.host_bytes).values())
    return WholeLayers(layers, head, seconds, needed <= ram)


def _layer_seconds(device: Device, request: PlanRequest, layer: int, panels: bool) -> float:
    attention = attention_seconds(
        device, request.model, layer, request.kv_type, request.past, request.batch, panels, ffn=False
    )
    return attention + matrix_seconds(device, request.model.ffn[layer], panels) + 1e-6 * device.op_us


def _context(request: PlanRequest, whole: WholeLayers | None) -> int:
    """Tokens of the longest context, a multiple of that of the request, with which the weights stay where they are."""
    longest, tried = request.context, 2 * request.context
    base = _placed(request)
    most = request.model.config.context_length
    while longest < most:
        tried = min(tried, most)
        with suppress(RequestError):
            if _keeps(base, _placed(replace(request, context=tried))):
                longest, tried = tried, 2 * tried
                continue
        break
    return longest


def _placed(request: PlanRequest) -> Mapping[str, int]:
    """Numbers that a context which is too long makes smaller."""
    model, work = request.model, replace(request.workload, selector="all")
    vram, ram = budgets(request.hardware, request.vram, request.ram)
    if any(model.n_experts):
        claims = request.claims()
        disk = 0 if claims.disk is None else sum(claims.disk.about.experts.values())
        return {
            "layers": claims.gpu_layers, "head": claims.gpu_head, "experts": sum(claims.slots or ()),
            "whole": claims.disk is None, "disk": disk,
        }  # fmt: skip
    layers, head, _ = whole_layers(model, request.hardware, work, vram)
    held = sum(in_ram(model, work, layers, head, request.hardware.host_bytes).values())
    return {"layers": layers, "head": head, "whole": held <= ram}


def _keeps(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    few = ("experts", "disk")
    return all(n >= (_KEPT * before[name] if name in few else before[name]) for name, n in now.items())


def offers(hardware: Hardware, context: int = CONTEXT) -> list[Offer]:
    """The catalogue's models that the machine can run, of known shapes: those that run well first, large ones before
    small ones, then the others, fast ones first."""
    found = []
    for name, model in catalogue().items():
        shape = shape_of(name, model)
        made = None if shape is None else offer(name, model, shape, hardware, context)
        if made is not None:
            found.append(made)
    return sorted(found, key=_order)


def offer(name: str, model: CatalogueModel, shape: str, hardware: Hardware, context: int = CONTEXT) -> Offer | None:
    """A model in the largest of its downloads that runs well, else in the usual one; None where that does not fit."""
    best = None
    for download in model.downloads:
        found = estimate(shape, download.quantisation, hardware, context)
        if found is not None and (best is None or found.runs_well):
            best = Offer(name, model, download, found)
    return best


def _order(offered: Offer) -> tuple[bool, float, float]:
    well = offered.estimate.runs_well
    return not well, -offered.model.parameters if well else 0.0, -offered.estimate.tok_s
