"""The subject of a plan, a model or a described shape with its profile and selector, and the request for the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.config import EngineConfig, ModelConfig, PlanConfig
from powerinfer.devices.states import tokens_to_undo
from powerinfer.devices.wanted import NO_GPU, wanted_gpu
from powerinfer.errors import RequestError, demand
from powerinfer.hardware.cards import NONE, described_machine, typical_card
from powerinfer.hardware.description import Device, Hardware, load
from powerinfer.neurons import Profile
from powerinfer.placement.budget import budgets, check_ram, no_layer_fits
from powerinfer.placement.chunks import with_long_chunks
from powerinfer.placement.disk_speed import Hits
from powerinfer.placement.experts import Frequencies
from powerinfer.placement.mixes import read_dtype, usual_dtype
from powerinfer.placement.plan import PlanRequest
from powerinfer.placement.power_law import Law, assumed_profile
from powerinfer.placement.shapes import (
    SELECTED_PER_FIRING,
    Model,
    checkpoint_model,
    described_model,
    find_shape,
    law_of,
    skipping_model,
)
from powerinfer.placement.spread import split_problem
from powerinfer.progress import Progress, Say, silent
from powerinfer.sparsity.selection import auto, check_experts, check_suited
from powerinfer.system import MOST_THREADS

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint

_LIMIT = 1 << 16
"""Requests, and tokens of a prompt at once."""

EVEN = Law(1.0, 0.8)
"""Every neuron fires for every token."""

FIRING = "that {:.1f} % of the neurons of experts fire for a token, and a step takes the time of its bytes"
"""The assumption of plans of selectors inside experts."""


PACKED = "that bundles are packed (`powerinfer pack`)"
"""The assumption of plans that skip neurons."""


@dataclass(frozen=True)
class Subject:
    """The subject of a plan. selector: of `cost.WAYS`; assumed: assumptions, lines for people; frequencies, hits: of
    experts, None: not known; chosen: the selector is that of `auto`."""

    model: Model
    profile: Profile
    selector: str
    assumed: tuple[str, ...] = ()
    frequencies: Frequencies | None = None
    hits: Hits | None = None
    chosen: bool = False

    def request(self, hardware: Hardware, engine: EngineConfig, planning: PlanConfig | None = None) -> PlanRequest:
        """The request for a plan on a machine under the engine's budgets, for a load and for `powerinfer plan` alike.
        RequestError for what cannot be.

        Where torch's CPU emulates the GPU (`--gpu cpu`) times mean nothing: as many neurons as fit are placed there.
        """
        planning = planning or PlanConfig()
        emulated = engine.gpu.startswith("cpu") and not planning.described and hardware.gpu is not None
        cached = engine.expert_policy not in ("static", "auto")
        stays = engine.expert_policy == "static" and not engine.adjust  # else experts move as a whole
        spread = engine.split_mode == "expert"
        gpus = len(hardware.all_cards) * _uses_gpus(engine)
        problem = split_problem(self.model.config, engine, gpus, planning.described)
        if problem is not None:
            raise RequestError(problem)
        made = PlanRequest(
            self.model if stays and not spread else replace(self.model, inside={}),
            self.profile,
            hardware,
            vram=engine.vram_bytes if _uses_gpus(engine) else 0,
            vrams=engine.vrams,
            ram=engine.ram,
            context=engine.context or self.model.config.context_length,
            batch=planning.batch,
            kv_type=engine.kv_type,
            selector=self.selector,
            policy="greedy" if emulated and planning.policy == "time" else planning.policy,
            chunk=engine.chunk,
            seed=planning.seed,
            time_limit=planning.time_limit,
            requests=engine.max_batch,
            insist=emulated,
            frequencies=self.frequencies,
            cached=cached,
            moves=cached or engine.adjust,
            hits=self.hits,
            chosen=self.chosen,
            undo_tokens=tokens_to_undo(engine, self.model.config),
            drafts=engine.drafts_for(self.model.config),
            spread=spread,
        )
        settled = made.settled()[0]
        return settled if engine.prefill_chunk else with_long_chunks(settled)


def _uses_gpus(engine: EngineConfig) -> bool:
    return engine.gpu != "none" and engine.vram_bytes != 0


def on_named_gpu(request: PlanRequest) -> PlanRequest | RequestError:
    """The same request; the error, with the smallest budget that does, if no layer fits on its machine's GPU."""
    vram, _ = budgets(request.hardware, request.vram, request.ram)
    claims = request.claims_if_any() if vram else None
    if request.on_cards and claims is not None:
        return claims if isinstance(claims, RequestError) else request
    if claims is None or isinstance(claims, RequestError):
        return request if claims is None else claims
    return request if claims.gpu_layers else no_layer_fits(request.model, request.hardware, request.workload, vram)


def check_options(planning: PlanConfig, engine: EngineConfig, is_shape: bool = False) -> None:
    """RequestError for options that no plan can have. is_shape: of a model that is only described, for which the
    machine may be, too."""
    for name, count in (
        ("--batch", planning.batch),
        ("--prefill-chunk", engine.chunk),
        ("--max-batch", engine.max_batch),
    ):
        if not 1 <= count <= _LIMIT:
            raise RequestError(f"{name} must lie between 1 and {_LIMIT}, not {count}")
    if not 0 <= engine.threads <= MOST_THREADS:
        raise RequestError(f"--threads must lie between 0 (automatic) and {MOST_THREADS}, not {engine.threads}")
    if not 0 <= planning.time_limit < math.inf:
        raise RequestError(f"--time-limit must be a number of seconds, not {planning.time_limit}")
    if planning.hardware is not None and planning.card is not None:
        raise RequestError("--hardware describes a machine with its card: leave out --card, or --hardware")
    if planning.memory is not None and planning.card is None:
        raise RequestError("--memory is the RAM of a PC that --card describes: give --card NAME, or --card none")
    if (planning.card or "").strip().lower() == NONE and engine.vram:
        raise RequestError("--vram is the memory of a card, and --card none has none: leave out one of the two")
    if planning.card is not None and engine.gpu != "auto":
        raise RequestError("--gpu is of this machine: leave it out; --card none describes a PC without a GPU")
    if engine.gpu == "none" and engine.vram:
        raise RequestError(NO_GPU)
    if engine.ram is not None and not planning.described and not is_shape:
        check_ram(engine.ram, "give less, or describe another machine (--card NAME, --hardware)")


def described(
    planning: PlanConfig, engine: EngineConfig, is_shape: bool = False
) -> tuple[Hardware, EngineConfig] | None:
    """The described machine, and the engine with what remains of its budgets; None: this machine is planned for.

    --ram is the RAM of a machine that --card describes, and of one of --hardware if it is more than that has. is_shape:
    for a model that is only described --vram describes a card where this machine has none. planning: as `check_options`
    lets pass.
    """
    if planning.hardware is not None:
        hardware = load(planning.hardware)
        if engine.ram is None or engine.ram <= hardware.cpu.memory_bytes:
            return hardware, engine
        return replace(hardware, cpu=replace(hardware.cpu, memory_bytes=engine.ram)), replace(engine, ram=None)
    if planning.card is not None:
        machine = described_machine(planning.card, engine.ram, planning.memory, engine.threads)
        return machine, replace(engine, ram=None)
    if not is_shape or not engine.vram_bytes or wanted_gpu(engine)[0] is not None:
        return None
    card = ", ".join(map(typical_card, engine.vrams or (engine.vram_bytes,)))
    machine = described_machine(card, engine.ram, None, engine.threads)
    return replace(machine, assumed=f"{card}, as --card does not say; {machine.assumed}"), replace(engine, ram=None)


def _as_large(hardware: Hardware, engine: EngineConfig) -> Hardware:
    """The machine with the memories of the engine's budgets, where these are larger: for a model that is only
    described."""
    cpu, gpu = hardware.cpu, hardware.gpu
    larger = replace(hardware, cpu=replace(cpu, memory_bytes=max(cpu.memory_bytes, engine.ram or 0)))
    if gpu is None:
        return larger
    first, *further = engine.vrams or (engine.vram_bytes or 0,)
    pairs = zip(hardware.cards, further, strict=False)
    cards = tuple(replace(card, device=_enlarged(card.device, vram)) for card, vram in pairs)
    return replace(larger, gpu=_enlarged(gpu, first), cards=cards + hardware.cards[len(cards) :])


def _enlarged(device: Device, nbytes: int) -> Device:
    """A device with so much memory, if it has less."""
    return replace(device, memory_bytes=max(device.memory_bytes, nbytes))


def plan_request(
    subject: Subject, engine: EngineConfig, planning: PlanConfig, progress: Progress = silent, say: Say = silent
) -> PlanRequest:
    """The request for a plan on the machine that is planned for: a described one, else this one, measured.

    say: receives notes for the user. RequestError for budgets that are too small, before anything is measured.
    """
    from powerinfer.hardware.measure import gpu_beside, measured

    def request(hardware: Hardware) -> PlanRequest:
        made = subject.request(hardware if subject.model.fingerprint else _as_large(hardware, engine), engine, planning)
        return made if gpu is None or engine.gpu == "auto" else demand(on_named_gpu(made))

    machine = described(planning, engine, is_shape=not subject.model.fingerprint)
    if machine is not None:
        hardware, engine = machine
        return subject.request(hardware, engine, replace(planning, hardware=hardware.name))
    gpu = gpu_beside(engine, say)
    types = subject.model.rated_types
    return request(measured(engine, progress, say, gpu, lambda memories: request(memories).claims(), types))


def shape_subject(
    name: str, dtype: str | None, selector: str, hot: float | None = None, active: float | None = None
) -> Subject:
    """A model that is only described: a published shape or a config.json. RequestError if there is none.

    dtype: as of `read_dtype`, None: the usual one; hot, active: shares that replace those published for its family, see
    `Law`.
    """
    shape, usual = find_shape(name), dtype is None
    config = shape.config
    dtype = usual_dtype(config) if dtype is None else read_dtype(dtype)
    model = described_model(config, dtype, config.name or name, shape.predictor)
    chosen = selector == "auto"
    if chosen:
        selector, _ = auto(config, config.unsplit_reason, predictors=bool(model.predictors))
    if any(model.n_experts):
        _check_experts(selector, hot, active)
    _check_selector(selector, config)
    profile, text = _assumed(config, EVEN if selector == "all" else shape.law, hot, active)
    assumed = [text] if selector != "all" else []
    if usual:
        assumed.append(f"weights in {dtype.upper()}; --dtype names another type")
    if selector != "all":
        assumed.append(PACKED)
    if selector == "predicted":
        share = sum(one.stored for pair in model.predictors for one in pair) / model.weight_bytes
        assumed.append(
            f"predictors in Q8_0, {100 * share:.1f} % of the model's bytes, that select {SELECTED_PER_FIRING:g} "
            "times the neurons that fire"
        )
    return Subject(model, profile, selector, tuple(assumed), chosen=chosen)


def _check_selector(selector: str, config: ModelConfig) -> None:
    """RequestError if a model of this configuration has no plans with the selector."""
    check_suited(selector, config)
    if selector != "all" and config.unsplit_reason is not None:
        raise RequestError(f"selector {selector}: {config.unsplit_reason}: leave out --selector")


def model_subject(
    checkpoint: Checkpoint,
    prepared: str | None,
    selector: str,
    hot: float | None = None,
    active: float | None = None,
    fresh: bool = False,
) -> Subject:
    """A model, from its headers, its profile and its predictor in the folder `prepared`.

    selector: `auto` assumes that the model will have bundles; hot, active: shares that are assumed instead of a
    profile; fresh: as if nothing were packed or trained yet. RequestError, with the command that makes it, if something
    is missing.
    """
    from powerinfer.formats.expert_rows import kind_of
    from powerinfer.formats.prepared import BUNDLES, PREDICTOR, PROFILE, PreparedFile
    from powerinfer.formats.profile_file import open_profile

    config = checkpoint.config
    model = checkpoint_model(checkpoint, prepared, fresh=fresh)
    chosen = selector == "auto"
    if chosen:
        selector, _ = auto(config, config.unsplit_reason)
    if any(model.n_experts):
        inside = selector in ("exact", "predicted")
        _check_experts("all" if inside else selector, hot, active)
        if not inside:
            return expert_subject(model, checkpoint, prepared)
        check_experts(selector, checkpoint)
        predicted = selector == "predicted"
        rows = PreparedFile(kind_of(predicted), checkpoint, prepared).exists()
        model = skipping_model(model, checkpoint, prepared, predicted, rows)
    else:
        _check_selector(selector, config)
    bundles = PreparedFile(BUNDLES, checkpoint, prepared)
    packed = () if selector == "all" or bundles.exists() else (f"that bundles are packed: `{bundles.command}` does it",)
    if selector == "predicted" and not model.predictors:
        command = PreparedFile(PREDICTOR, checkpoint, prepared).command
        raise RequestError(f"there is no predictor of {checkpoint.path}: `{command}` makes it")
    if model.in_experts:
        subject = expert_subject(model, checkpoint, prepared)
        return replace(subject, assumed=(*subject.assumed, *_assumed_inside(model)))
    if hot is not None or active is not None:
        profile, text = _assumed(config, law_of(config), hot, active)
        return Subject(model, profile, selector, (text, *packed), chosen=chosen)
    place = PreparedFile(PROFILE, checkpoint, prepared)
    if not place.exists():
        if selector != "all":
            raise RequestError(
                f"there is no profile of {checkpoint.path}: `{place.command}` makes it, or --hot-share X assumes a skew"
            )
        text = f"that all neurons count alike, since there is no profile; `{place.command}` makes it"
        assumed = (text,) if config.whole_reason is None else ()
        return Subject(model, even_profile(model), selector, assumed, chosen=chosen)
    profile = open_profile(checkpoint, prepared)
    if selector == "threshold" and profile.thresholds is None:
        raise RequestError(f"{place.path} has no thresholds; `{place.command}` calibrates them")
    return Subject(model, profile, selector, packed, chosen=chosen)


def _check_experts(selector: str, hot: float | None, active: float | None) -> None:
    """RequestError for options that plans of models of experts do not have."""
    if hot is not None or active is not None:
        raise RequestError("--hot-share and --active are for models without experts: leave them out")
    if selector != "all":
        raise RequestError(
            f"--selector {selector}: plans of experts count every neuron, or with the file of a model (-m FILE.gguf) "
            "exact or predicted: leave out --selector"
        )


def _assumed_inside(model: Model) -> list[str]:
    """Assumptions of plans of neurons inside experts."""
    ratios = [ratio for layer, ratio in enumerate(model.selected) if model.expert_predictor(layer)]
    texts = [FIRING.format(100 * model.firing)]
    if ratios:
        texts.append(f"that predictors inside experts select {np.mean(ratios):.2g} times the neurons that fire")
    return texts


def expert_subject(model: Model, checkpoint: Checkpoint, prepared: str | None) -> Subject:
    """A model of experts, with what its profile says of them. ModelError for a profile of another model."""
    from powerinfer.formats.expert_files import open_expert_profile
    from powerinfer.formats.prepared import EXPERTS, PreparedFile

    subject = Subject(model, even_profile(model), "all")
    place = PreparedFile(EXPERTS, checkpoint, prepared)
    if place.exists():
        use = open_expert_profile(checkpoint, prepared)
        hits = {one.layer: np.maximum(one.static_hits, one.lru_hits) for one in use.layers}
        inside = use.neuron_use if model.in_experts and model.predictors else {}
        return replace(subject, model=replace(model, inside=inside), frequencies=use.frequencies, hits=hits)
    text = f"that all experts are selected equally often, since there is no profile; `{place.command}` makes it"
    return replace(subject, assumed=(text,))


def even_profile(model: Model) -> Profile:
    """Of a model whose neurons are all computed."""
    return assumed_profile(EVEN, model.config.ffn_sizes)


def _assumed(config: ModelConfig, law: Law, hot: float | None, active: float | None) -> tuple[Profile, str]:
    """The profile of a law, with these shares where they are given, and a line about it."""
    law = replace(law, active=active or law.active, hot=hot or law.hot)
    where = "" if law.ratio == 1 else f", the last layer's {law.ratio:g} times as often as the first's"
    return assumed_profile(law, config.ffn_sizes), (
        f"that {100 * law.active:g} % of the neurons fire for a token{where}, and {100 * law.hot:g} % of a layer's "
        "carry 80 % of its activations, by a power law"
    )
