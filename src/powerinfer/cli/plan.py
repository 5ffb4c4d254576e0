"""Decide which parts of a model are placed on the GPU, in RAM and on disk, and predict its decode speed.

For a model (-m) only its headers and its profile (`powerinfer profile`) are read. --shape plans for a model that is
only described: a published one by its name, or a config.json; how its neurons fire is then assumed, as published for
its family, or from --hot-share and --active. The machine is this one, measured, or a described one: a PC with a card
and some RAM (--card "RTX 4060" --ram 32GiB), or --hardware. Budgets include everything: weights, predictors, KV cache,
working memory, driver and runtime. --selector auto assumes that bundles are packed.

--card without a model lists the models of the catalogue for that PC: what runs, how fast, and what to type. Nothing is
measured or downloaded, and this machine does not matter. --names lists the names of cards, shapes and machines.

The plan is saved beside the model as plan-KEY.json; the key depends on every input. Not with --shape or --dry-run.

JSON: quantize (the option, or null), weight_type (of most FFN weights), fits (nothing is read from disk), loads (a
load takes it), solve_s, mass_on_gpu (share of the activations), work_on_gpu (share of the bytes of weights that a
step reads), optimal (proven; null for greedy and random), policy, bytes (tier: part: bytes), activations (tier:
share), layers (layer; gpu, cpu, disk: neurons; mass_on_gpu; seconds by component), predicted (the estimate:
decode_tok_s, dense_tok_s with every neuron computed, skipping_tok_s with --selector exact inside experts,
ms_per_token, at_position, policies; none where a load places layers as a whole), reasons, helps (the next budgets at
which more fits), assumed, key, path, hardware, cards (each of several GPUs: name, vram, first_layer, layers, head,
bytes by part, experts), split_mode. With --card alone: hardware (name, source, assumed), context, models
(name, type, gigabytes, tok_s, context: the longest that leaves the weights where they are, place: gpu, split, ram or
disk, where, runs_well, command). With --names: cards, shapes, hardware, dtypes.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig, PlanConfig
from powerinfer.errors import NoDraftsError, RequestError, demand
from powerinfer.placement.plan_document import tenths_of_percent

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.placement.estimates import Offer
    from powerinfer.placement.plan import Plan, PlanRequest
    from powerinfer.placement.plan_document import PlanDocument
    from powerinfer.placement.request import Subject
    from powerinfer.placement.shapes import Model
    from powerinfer.runtime.draft_sources import SmallerModel

ENGINE = (
    "context", "kv_type", "prefill_chunk", "max_batch", "selector", "quantize", "prepared", "vram", "ram", "threads",
    "isa", "gpu", "expert_policy", "split_mode", "speculate",
)  # fmt: skip
COUNTED = frozenset(("card", "hardware", "memory", "vram", "ram", "threads", "gpu", "context"))
"""Options of the table of all models."""
NUMBERS = (2, 3, 4)
"""Columns of that table that stand to the right."""
EMULATED = "that the GPU is to hold what fits, however slow it is: torch's CPU emulates it"
HEAD = (
    "that {:.0%} of drafts are right: with the model's head, {:,.0f} MB, decoding is {:.2f} times as fast, by the "
    "bytes that steps read"
)
"""The assumption of plans of models with a draft head."""
TIER_NAMES = {"gpu": "GPU", "cpu": "RAM", "disk": "disk"}


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--shape", metavar="NAME|FILE", help="plan for a described model: opt-175b, ...")
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="type of a shape's weights: q4_k_m, q8_0, f16 ... (default q4_k_m; of gpt-oss mxfp4, of ReLU models q4_0)",
    )
    parser.add_argument("--names", action="store_true", help="list cards, shapes, machines and types by name")
    parser.add_argument(
        "--hot-share",
        type=float,
        metavar="X",
        help="instead of a profile: share of a layer's neurons that carries 80 %% of its activations",
    )
    parser.add_argument(
        "--active", type=float, metavar="X", help="instead of a profile: fraction of neurons that fire for a token"
    )
    parser.add_argument("--dry-run", action="store_true", help="do not save the plan")
    config_flags(parser, PlanConfig, "plan")
    config_flags(parser, EngineConfig, "engine", only=ENGINE)


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.prepared import prepared_folder
    from powerinfer.placement.context_cost import CONTEXT, context_cost, contexts_that_fit
    from powerinfer.placement.plan import save_plan
    from powerinfer.placement.request import check_options, model_subject, plan_request, shape_subject
    from powerinfer.runtime.draft_sources import smaller_model_of

    if args.names:
        return _names(out)
    planning, engine = config_from(args, PlanConfig), config_from(args, EngineConfig)
    _check(args)
    check_options(planning, engine, args.shape is not None)
    if planning.card is not None and args.model is None and args.shape is None:
        _check_catalogue(args)
        return _catalogue(planning, engine, out)
    folder: Path | None = None
    smaller: SmallerModel | None = None
    if args.shape is None and planning.described:
        _plan_from_catalogue(args, out)
    if args.shape is None:
        _refuse_shape(args.model)
        checkpoint = open_model(args.model, engine, out, draft_head=True)
        smaller = smaller_model_of(checkpoint, engine)
        folder = None if args.dry_run else prepared_folder(checkpoint.path, engine.prepared)
        subject = model_subject(checkpoint, engine.prepared, engine.selector, args.hot_share, args.active)
        engine = _leave_room(smaller, checkpoint, subject, engine, planning, out)
    else:
        _refuse_drafts(engine.speculate)
        subject = shape_subject(args.shape, args.dtype, engine.selector, args.hot_share, args.active)
    with Bar() as bar:
        request = plan_request(subject, engine, planning, bar, out.note)
    request, plan = _weigh_head(request, engine, out)
    if planning.described and not engine.context and request.context > CONTEXT:
        plan = _shortened(plan, request) if isinstance(plan, RequestError) else plan
        context = request.context if isinstance(plan, RequestError) else plan.request.context
        text = f"context: the model's longest, {context} tokens, as -c does not say"
        if context < request.context:
            text = f"context: {context} tokens, since the model's {request.context} do not fit and -c does not say"
        out.note(f"{text}; the table of all models (--card alone) counts with {CONTEXT}")
    plan = _demanded(plan, smaller)
    saved = None if folder is None else save_plan(plan, folder)
    machine = request.hardware.assumed if planning.hardware is None else ""
    emulated = [EMULATED] if request.insist else []
    assumed = [*subject.assumed, *emulated, *([machine] if machine else []), *_head_assumption(request.model)]
    document = plan.document(saved)
    reasons = [*document.reasons, *_faster_card(plan), *_cost_of_drafts(plan, engine)]
    reasons += [*context_cost(plan, engine), *contexts_that_fit(plan, engine)]
    document = replace(document, assumed=assumed, reasons=reasons)
    if smaller is not None:
        document = replace(document, helps=smaller.add_share(document.helps))
    _show(plan, document, out)
    out.document(document.json())
    return 0


def _faster_card(plan: Plan) -> list[str]:
    """A line on the GPU, of several, that is predicted to be faster alone; none where none is."""
    from powerinfer.placement.plan import comparison, place
    from powerinfer.placement.several import WORTH, requests_alone

    outcomes = map(place, requests_alone(plan.request)) if plan.parts else ()
    plans = [one for one in outcomes if not isinstance(one, RequestError)]
    alone = min(plans, key=lambda one: one.choice.seconds, default=plan)
    gpu, is_worth_it = alone.request.hardware.gpu, alone.choice.seconds <= WORTH * plan.choice.seconds
    return [comparison(plan, alone, f"{gpu.name} alone")] if gpu is not None and is_worth_it else []


def _cost_of_drafts(plan: Plan, engine: EngineConfig) -> list[str]:
    """A line on drafts that no speed counts, though their states may take the place of weights; none where there are no
    drafts, or those of a head, whose gain is assumed."""
    from powerinfer.placement.budget import gib
    from powerinfer.placement.plan import place

    request = plan.request
    if not request.drafts or request.model.config.draft is not None:
        return []
    line = f"no speed here counts the drafts of --speculate {engine.speculate}: how many are right depends on the text"
    if not request.undo_tokens:
        return [line]
    without = place(replace(request, drafts=False, undo_tokens=0))
    if isinstance(without, RequestError):
        return [line]
    states = [sum(held.get("kv", 0) for held in made.bytes.values()) for made in (plan, without)]
    rate, before = (request.batch / made.choice.seconds for made in (plan, without))
    slower = f", which makes {rate:.2f} tokens/s of {before:.2f}" if rate < before else ""
    return [f"{line}; the states that undo them take {gib(states[0] - states[1])}{slower}"]


def _refuse_drafts(speculate: str) -> None:
    """RequestError for drafts that a model which is only described cannot have."""
    from powerinfer.runtime.draft_sources import WAYS

    if speculate == "mtp" or speculate not in WAYS:
        lacks = "draft head" if speculate == "mtp" else "vocabulary"
        raise RequestError(f"--speculate {speculate}: a shape has no {lacks}: give -m MODEL, or off")


def _demanded(plan: Plan | RequestError, smaller: SmallerModel | None) -> Plan:
    """The plan. RequestError if there is none, which names the share of a smaller model, too."""
    if smaller is None or not isinstance(plan, RequestError):
        return demand(plan)
    raise smaller.error_with_share(plan)


def _leave_room(
    smaller: SmallerModel | None,
    checkpoint: Checkpoint,
    subject: Subject,
    engine: EngineConfig,
    planning: PlanConfig,
    out: Output,
) -> EngineConfig:
    """The options without what the model of --speculate takes of --vram and --ram, which a line says."""
    from powerinfer.cli.progress import Bar
    from powerinfer.placement.budget import gib
    from powerinfer.placement.request import plan_request

    if smaller is None:
        return engine
    with Bar() as bar:
        if planning.described:
            beside = smaller.plan_beside(plan_request(subject, engine, planning, bar), engine)
        else:
            beside = smaller.leave_room(engine, checkpoint, bar)
    rest = "--ram without it is planned for" if engine.ram is not None else "--ram SIZE would count it"
    vram = f"{gib(smaller.vram_bytes)} of VRAM and " if smaller.vram_bytes else ""
    place = f"; it is {smaller.place}" if smaller.place else ""
    out.note(f"--speculate {smaller.name} takes {vram}{gib(smaller.ram_bytes)} of RAM beside the plan: {rest}{place}")
    return beside


def _weigh_head(
    request: PlanRequest, engine: EngineConfig, out: Output
) -> tuple[PlanRequest, Plan | RequestError]:
    """The request and its plan, without the model's draft head where a load leaves that out."""
    from powerinfer.devices.states import tokens_to_undo
    from powerinfer.formats.source import NO_EAGLE, NO_MTP
    from powerinfer.placement.draft_gain import drop_head
    from powerinfer.placement.plan import place

    plan = place(request)
    if request.model.config.draft is None or not (reason := _no_head(plan, request, engine)):
        return request, plan
    if request.model.config.draft.eagle is not None:
        raise NoDraftsError(f"--speculate {engine.speculate}: {NO_EAGLE}: {reason}")
    out.note(f"{NO_MTP}: {reason}")
    model = drop_head(request.model)
    drafts = engine.drafts_for(model.config)
    request = replace(request, model=model, undo_tokens=tokens_to_undo(engine, model.config), drafts=drafts)
    return request, place(request)


def _head_assumption(model: Model) -> list[str]:
    """The assumption of a draft head's gain, if there is one."""
    from powerinfer.placement.draft_gain import RIGHT, draft_gain

    if model.config.draft is None:
        return []
    return [HEAD.format(RIGHT, model.inventory.draft / 1e6, draft_gain(model))]


def _no_head(plan: Plan | RequestError, request: PlanRequest, engine: EngineConfig) -> str | None:
    """The reason for which a load leaves the draft head out, for people; None: it does not."""
    from powerinfer.placement.budget import displaced_by_drafts, gib
    from powerinfer.placement.draft_gain import BESIDE_GPU, DISPLACES, NO_ROOM, problem_from_disk, too_little_gain

    draft = request.model.config.draft
    if draft is not None and draft.eagle is not None and not isinstance(plan, RequestError) and plan.claims.gpu_layers:
        return BESIDE_GPU
    if reason := too_little_gain(request.model, engine):
        return reason
    if isinstance(plan, RequestError):
        return NO_ROOM
    claims, used = plan.claims, sum(plan.bytes["gpu"].values())
    disk = plan.on_disk if claims.disk is None else claims.disk
    if disk is not None and (reason := problem_from_disk(disk, plan.request.model, engine.speculate)):
        return reason
    complete = not claims.gpu_layers or (claims.whole and claims.gpu_head)
    if complete or engine.speculate == "mtp":
        return None
    nbytes = displaced_by_drafts(plan.request.model, plan.request.workload, claims.gpu_layers, used)
    return DISPLACES.format(gib(nbytes)) if nbytes else None


def _shortened(error: RequestError, request: PlanRequest) -> Plan | RequestError:
    """The plan of a context that fits: the longest, halved until it does. The error of the longest if none does."""
    from powerinfer.placement.context_cost import CONTEXT
    from powerinfer.placement.plan import place

    tried = request
    while tried.context > CONTEXT:
        tried = replace(request, context=max(CONTEXT, tried.context // 2))
        if not isinstance(tried.claims_if_any(), RequestError) and not isinstance(plan := place(tried), RequestError):
            return plan
    return error


def _plan_from_catalogue(args: argparse.Namespace, out: Output) -> None:
    """Plan by its shape for a model of the catalogue that is not on this machine."""
    from powerinfer.placement.estimates import catalogue_shape

    shape = None if args.model is None or _is_here(args.model) else catalogue_shape(args.model)
    if shape is not None:
        out.note(f"{args.model} is not on this machine: the plan is that of its published sizes")
        args.model, (args.shape, args.dtype) = None, shape


def _refuse_shape(model: str | None) -> None:
    """RequestError for a name that only a shape has."""
    from powerinfer.formats.catalogue_names import short_name
    from powerinfer.placement.shapes import shape_names

    if model is not None and model.lower() in shape_names() and short_name(model) is None and not _is_here(model):
        raise RequestError(f"no model {model}, but a shape has this name: --shape {model} plans for it")


def _is_here(model: str) -> bool:
    from powerinfer.hub import local_model

    with suppress(RequestError):
        return Path(model).expanduser().exists() or bool(local_model(model))
    return False


def _check(args: argparse.Namespace) -> None:
    if args.dtype is not None and args.shape is None:
        raise RequestError("--dtype is the type of a shape's weights: leave it out, or give --shape NAME")
    if args.shape is not None and args.model is not None:
        raise RequestError("give a model (-m) or a shape (--shape), not both")
    for name, value in (("--hot-share", args.hot_share), ("--active", args.active)):
        if value is not None and not 0 < value <= 1:
            raise RequestError(f"{name} is a share, above 0 and at most 1, not {value:g}")


def _check_catalogue(args: argparse.Namespace) -> None:
    """RequestError for a flag that the table of all models does not count with."""
    for name in [*(field.name for field in fields(PlanConfig)), *ENGINE, "hot_share", "active"]:
        if name not in COUNTED and getattr(args, name, None) is not None:
            flag = "--" + name.replace("_", "-")
            raise RequestError(f"{flag} is for the plan of one model: leave it out, or give -m MODEL or --shape NAME")


def _catalogue(planning: PlanConfig, engine: EngineConfig, out: Output) -> int:
    """The catalogue's models on a described PC."""
    from powerinfer.cli.progress import Bar
    from powerinfer.placement.budget import budgets
    from powerinfer.placement.context_cost import CONTEXT
    from powerinfer.placement.estimates import offers
    from powerinfer.placement.request import described

    machine = described(planning, engine)
    assert machine is not None
    hardware, context = machine[0], engine.context or CONTEXT
    if hardware.cards or engine.vrams:
        raise RequestError(
            "the table of all models is for one card, with one size of --vram: name one, or add a model that several "
            "are to share, as -m qwen3-14b (`powerinfer pull --names` lists them)"
        )
    vram, _ = budgets(hardware, 0 if engine.gpu == "none" else engine.vram_bytes, None)
    hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=vram) if hardware.gpu and vram else None)
    with Bar() as bar:
        rows = offers(hardware, context, bar)
    if not rows:
        raise RequestError(f"{hardware.name} holds no model of the catalogue: give more --ram, or a smaller --context")
    out.line(f"{hardware.name[:1].upper()}{hardware.name[1:]}. {hardware.source}")
    out.line(f"assumed: {hardware.assumed}")
    out.line()
    head = ("model", "type", "download", "tokens/s", "context", "where", "powerinfer chat ...")
    cells = [head, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    slow = next((at for at, row in enumerate(rows, 1) if not row.estimate.runs_well), len(cells))
    for at, texts in enumerate(cells):
        if at == slow:
            out.line("slower than most people read, or read from disk:")
        sides = ("><"[place not in NUMBERS] for place in range(len(head)))
        padded = (f"{text:{side}{n}}" for text, side, n in zip(texts, sides, widths, strict=True))
        out.line("  ".join(padded).rstrip())
    out.line()
    out.line(f"tokens/s: predicted, of one request that has filled half of {context} tokens, or of its model's context")
    out.line("context: the longest that leaves the weights where they are; -c asks for it")
    out.document(
        {
            "hardware": {"name": hardware.name, "source": hardware.source, "assumed": hardware.assumed},
            "context": context,
            "models": [row.json() for row in rows],
        }
    )
    return 0


def _cells(row: Offer) -> tuple[str, ...]:
    """A row of the table of all models."""
    from powerinfer.placement.estimates import speed

    estimate, download = row.estimate, row.download
    size = f"{download.gigabytes:g} GB"
    return (
        row.full_name, download.quantisation or "BF16", size, speed(estimate.tok_s), str(estimate.context),
        estimate.where, row.flags,
    )  # fmt: skip


def _names(out: Output) -> int:
    from shutil import get_terminal_size
    from textwrap import fill

    from powerinfer.hardware.cards import cards
    from powerinfer.hardware.description import ready_made
    from powerinfer.placement.mixes import DTYPES
    from powerinfer.placement.shapes import shape_names

    supported = [name for name, card in cards().items() if card.supported]
    names = {"cards": supported, "shapes": shape_names(), "hardware": ready_made(), "dtypes": list(DTYPES)}
    width = min(get_terminal_size().columns, 100)
    for kind, members in names.items():
        listed = ", ".join(name.replace(" ", "\N{NO-BREAK SPACE}") for name in members)
        text = f"--{kind.removesuffix('s')}: {listed}"
        lines = fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        out.line(lines.replace("\N{NO-BREAK SPACE}", " "))
    out.document(names)
    return 0


# ---------------------------------------------------------------- text output


def _show(plan: Plan, document: PlanDocument, out: Output) -> None:
    from powerinfer.placement.budget import gib
    from powerinfer.placement.shapes import law_of

    request, budgets = plan.request, document.budgets
    types = request.model.quantisation or request.model.weight_type
    out.line(
        f"{request.model.name}, {request.model.parameters / 1e9:.3g} G parameters, {types}, on "
        f"{request.hardware.name}: {_size(budgets.vram)} of VRAM, {_size(budgets.ram)} of RAM; context "
        f"{request.context}, batch {request.batch}, selector {document.selector}, policy {request.policy}"
    )
    if not request.hardware.key:
        out.line(f"{request.hardware.name}: {request.hardware.source}")
    for line in document.assumed:
        out.line(f"assumed: {line}")
    out.line()
    ffn = "neurons" if plan.claims.slots is None else "FFNs beside experts"
    _show_bytes(document, out, ffn, "KV cache, states" if plan.request.model.config.states else "KV cache")
    _show_cards(document, sum(request.model.n_experts), out)
    out.line()
    used = any(other.work_on_gpu for other in document.predicted.policies.values())
    if used and plan.claims.slots is None:  # else they all say the same
        _show_policies(request.policy, document, out)
        out.line()
    estimate = document.predicted
    differs = estimate.dense_tok_s is not None and estimate.dense_tok_s != estimate.decode_tok_s
    dense = f"; with every neuron computed (dense) {estimate.dense_tok_s:.2f}" if differs else ""
    out.line(f"estimated: {estimate.decode_tok_s:.2f} tokens/s after {estimate.at_position} tokens{dense}")
    if estimate.skipping_tok_s is not None:
        fire = f"{100 * law_of(request.model.config).active:.1f} % of the neurons of experts fire for a token"
        out.line(f"with --selector exact: {estimate.skipping_tok_s:.2f}, if {fire}")
    for line in document.reasons:
        out.line(f"- {line}")
    for one in document.helps:
        beyond = "" if one.within_machine else f", more than {'this' if request.hardware.key else 'that'} machine has"
        out.line(f"- {one.what}: from {one.flag} {gib(one.bytes)}{beyond}")
    if document.path is not None:
        out.line(f"saved in {document.path}")


def _show_policies(chosen: str, document: PlanDocument, out: Output) -> None:
    head = f"{'policy':<10}{'tokens/s':>10}{'activations on GPU':>21}{'work on GPU':>14}{'proven':>9}{'solved in':>12}"
    out.line(head)
    for name, other in document.predicted.policies.items():
        proven = {True: "yes", False: "no", None: "-"}[other.optimal]
        solved = "-" if other.optimal is None else f"{1e3 * other.solve_s:.0f} ms"
        mark = " *" if name == chosen else ""
        out.line(
            f"{name + mark:<10}{other.decode_tok_s:>10.2f}{tenths_of_percent(other.mass_on_gpu):>21}"
            f"{tenths_of_percent(other.work_on_gpu):>14}{proven:>9}{solved:>12}"
        )


def _show_bytes(document: PlanDocument, out: Output, ffn: str, kv: str) -> None:
    """Bytes: a row for each use, a column for each tier. ffn, kv: what these uses are."""
    tiers = document.bytes
    used = [tier for tier in TIER_NAMES if tiers[tier]]
    parts = list(dict.fromkeys(part for tier in TIER_NAMES for part in tiers[tier]))
    out.line(f"{'':<22}" + "".join(f"{TIER_NAMES[tier]:>12}" for tier in used))
    names = {"ffn": ffn, "panels": "FFN, matrices", "kv": kv, "norms": "norms, biases", "draft": "draft head"}
    for part in parts:
        cells = "".join(f"{_size(tiers[tier][part]) if part in tiers[tier] else '-':>12}" for tier in used)
        out.line(f"{names.get(part, part):<22}{cells}")
    out.line(f"{'in all':<22}" + "".join(f"{_size(sum(tiers[tier].values())):>12}" for tier in used))
    neurons = [{tier: getattr(layer, tier) for tier in TIER_NAMES} for layer in document.layers]
    total = sum(sum(layer.values()) for layer in neurons)
    if not total or "experts" in parts:  # neurons are not told apart
        return
    out.line(
        f"{'share of neurons':<22}"
        + "".join(f"{tenths_of_percent(sum(layer[tier] for layer in neurons) / total):>12}" for tier in used)
    )
    shares = document.activations
    out.line(f"{'share of activations':<22}" + "".join(f"{tenths_of_percent(shares[tier]):>12}" for tier in used))


def _show_cards(document: PlanDocument, experts: int, out: Output) -> None:
    """A row for each of several GPUs: its layers, its experts where all layers' are spread, what it holds, and of how
    much. experts: number of the model's."""
    if not document.cards:
        return
    out.line()
    width, is_spread = max(len(card.name) for card in document.cards), document.split_mode == "expert"
    for card in document.cards:
        last = card.first_layer + card.layers - 1
        layers = f"layers {card.first_layer} to {last}" if card.layers > 1 else f"layer {last}"
        layers += " and the head" * card.head + f"; {card.experts} of all layers' {experts} experts" * is_spread
        ffns = sum(card.bytes.get(part, 0) for part in ("ffn", "experts"))
        out.line(
            f"{card.name:<{width}}  {layers}: {_size(sum(card.bytes.values()))} of "
            f"{_size(card.vram)}, {_size(card.bytes.get('kv', 0))} of it cache, {_size(ffns)} FFNs"
        )


def _size(nbytes: int) -> str:
    if 0 < nbytes < 1 << 20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
