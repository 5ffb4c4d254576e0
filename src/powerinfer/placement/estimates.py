"""Estimates of the catalogue's models on a machine, described or measured: what fits where, and how fast it decodes.

    estimate("qwen3-30b-a3b", "Q4_K_M", described_machine("RTX 4060", 32 << 30)).tok_s

Nothing is prepared: every neuron is computed, dense layers are on the GPU as a whole, and experts count as selected
equally often. That is what a first run of a model is like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from powerinfer.errors import PowerInferError, RequestError, demand
from powerinfer.formats.catalogue import CatalogueModel, Download, catalogue
from powerinfer.formats.catalogue_names import short_name
from powerinfer.hardware.description import Hardware
from powerinfer.neurons import Profile
from powerinfer.placement.budget import Claims, Footprint
from powerinfer.placement.chunks import with_long_chunks
from powerinfer.placement.context_cost import CONTEXT
from powerinfer.placement.mixes import read_dtype
from powerinfer.placement.plan import Plan, PlanRequest, place
from powerinfer.placement.power_law import assumed_profile
from powerinfer.placement.request import EVEN
from powerinfer.placement.shapes import Model, described_model, find_shape, shape_names
from powerinfer.progress import Progress, silent

RUNS_WELL = 10.0
"""Tokens a second from which a model runs well: faster than most people read."""
LARGER = 30.0
"""Tokens a second that a larger download than the usual one must keep."""

_REQUESTS = 8  # that decode together, as the engine's own default
_KEPT = 0.9  # of the experts on the GPU, or the weights beside a disk, that a longer context may not take away


@dataclass(frozen=True)
class Estimate:
    """An estimate of a model on a machine.

    tok_s: tokens a second of one request, in the middle of a context of `CONTEXT` tokens. context: tokens of the
    longest context that leaves the weights where they are. place: of gpu, split (some layers or experts on the GPU),
    ram and disk; where: the same in words, of the parts of the model.
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

    @property
    def flags(self) -> str:
        """The model and its context, as flags of `run`, `chat` and `serve`."""
        return f"-m {self.full_name} -c {self.estimate.context}"

    def json(self) -> dict[str, Any]:
        """A row of `powerinfer plan --card ... --json`."""
        about, download = self.estimate, self.download
        return {
            "name": self.full_name,
            "type": download.quantisation,
            "gigabytes": download.gigabytes,
            **asdict(about),
            "runs_well": about.runs_well,
            "command": f"powerinfer chat {self.flags}",
        }


def speed(tok_s: float) -> str:
    """Tokens a second as text, no more exactly than they are predicted."""
    return f"{tok_s:.0f}" if tok_s >= 10 else f"{tok_s:.1f}"


def shape_of(name: str, model: CatalogueModel) -> str | None:
    """The name of the shape of a model of the catalogue; None: it is not known."""
    shape = model.shape or name
    return shape if shape in _names() else None


def catalogue_shape(text: str) -> tuple[str, str | None] | None:
    """The shape and the quantisation of a model of the catalogue by its name, as `short_name` reads it, or by its
    repository; None: there is no such name, or its shape is not known."""
    short = short_name(text) or _by_repository(text)
    if short is None:
        return None
    name, tag = short
    model = catalogue()[name]
    shape = shape_of(name, model)
    return None if shape is None else (shape, tag or model.quantisation)


def _by_repository(text: str) -> tuple[str, str | None] | None:
    repository, _, tag = text.partition(":")
    models = catalogue().items()
    return next(((name, tag or None) for name, one in models if one.repository.lower() == repository.lower()), None)


@cache
def _names() -> frozenset[str]:
    return frozenset(shape_names())


@cache
def _model(shape: str, dtype: str) -> Model:
    return described_model(find_shape(shape).config, dtype, shape, 0.0)


@cache
def _profile(sizes: tuple[int, ...]) -> Profile:
    return assumed_profile(EVEN, sizes)


def estimate_request(
    shape: str, quantisation: str | None, hardware: Hardware, context: int = CONTEXT
) -> PlanRequest:
    """The request of which `estimate` makes a plan; arguments and errors as of that."""
    model = _model(shape, read_dtype(quantisation or "bf16"))
    profile = _profile(model.config.ffn_sizes)
    context = min(context, model.config.context_length)
    return with_long_chunks(
        PlanRequest(model, profile, hardware, context=context, requests=_REQUESTS, selector="all")
    )


def estimate(shape: str, quantisation: str | None, hardware: Hardware, context: int = CONTEXT) -> Estimate | None:
    """The estimate of a published model, by the name of its shape, in a file's quantisation (None: BF16).

    None where it does not fit the machine. RequestError for a shape or a type that is not known.
    """
    request = estimate_request(shape, quantisation, hardware, context)
    try:
        plan = demand(place(request))
        return Estimate(1 / plan.choice.seconds, _context(request, plan.claims), *_where(plan))
    except PowerInferError:
        return None


def _where(plan: Plan) -> tuple[str, str]:
    """`place` and `where` of an estimate."""
    claims, config = plan.claims, plan.request.model.config
    experts, disk = sum(plan.request.model.n_experts), claims.disk is not None
    if not claims.gpu_layers:
        return ("disk", "RAM, experts disk" if experts else "RAM, disk") if disk else ("ram", "RAM")
    every, others = claims.gpu_layers == config.n_layers, ", RAM, disk" if disk else ", RAM"
    if experts:
        share = 100 * sum(claims.slots or ()) // experts
        there = f"{'' if every else f'{claims.gpu_layers} layers, '}{share} % of experts GPU"
        whole = share == 100 and claims.gpu_head
    else:
        there = "GPU, output head" if every else f"{claims.gpu_layers} of {config.n_layers} layers GPU"
        others = " RAM" if every else others
        whole = every and claims.gpu_head
    if whole and not disk:
        return "gpu", "GPU"
    return "disk" if disk else "split", there + others


def _context(request: PlanRequest, base: Claims) -> int:
    """Tokens of the longest context, doubled from that of the request, with which the weights stay where `base` has
    them."""
    longest, most = request.context, request.model.config.context_length
    while longest < most:
        tried = min(2 * longest, most)
        claims = replace(request, context=tried).claims_if_any()
        if isinstance(claims, RequestError) or not _stays(base, claims):
            break
        longest = tried
    return longest


def _stays(base: Claims, claims: Claims) -> bool:
    """Whether the weights are where `base` has them, but for a few experts, or a few of those that RAM has beside a
    disk."""
    if (claims.gpu_layers, claims.gpu_head) < (base.gpu_layers, base.gpu_head) or (claims.disk and not base.disk):
        return False

    def stay(held: Footprint, before: Footprint, *uses: str) -> bool:
        return sum(held.get(use, 0) for use in uses) >= _KEPT * sum(before.get(use, 0) for use in uses)

    rest = base.disk is None or stay(claims.cpu, base.cpu, "attention", "head", "panels", "experts")
    return rest and stay(claims.gpu, base.gpu, "experts")


def offers(hardware: Hardware, context: int = CONTEXT, progress: Progress = silent) -> list[Offer]:
    """The catalogue's models that the machine can run, of known shapes: those that run well first, large ones before
    small ones, then the others, fast ones first."""

    @cache
    def known(shape: str, quantisation: str | None) -> Estimate | None:
        return estimate(shape, quantisation, hardware, context)

    found = []
    for at, (name, model) in enumerate(catalogue().items()):
        progress("estimate", at, len(catalogue()))
        shape = shape_of(name, model)
        made = None if shape is None else offer(name, model, partial(known, shape))
        if made is not None:
            found.append(made)
    return sorted(reversed(found), key=_order)  # of models that are alike the catalogue has the newest last


def offer(name: str, model: CatalogueModel, estimated: Callable[[str | None], Estimate | None]) -> Offer | None:
    """A model in the largest of its downloads that is fast and all on the GPU, else in the usual one; None where that
    does not fit. estimated: gives the estimate of a quantisation."""
    best: Offer | None = None
    for download in model.downloads:
        found = estimated(download.quantisation)
        if found is not None and (best is None or (found.place == "gpu" and found.tok_s >= LARGER)):
            best = Offer(name, model, download, found)
    return best


def _order(offered: Offer) -> tuple[bool, float, float]:
    well = offered.estimate.runs_well
    return not well, -offered.model.parameters if well else 0.0, -offered.estimate.tok_s
