"""Decide which parts of a model are placed on the GPU, in RAM and on disk, and predict its decode speed.

For a model (-m) only its headers and its profile (`powerinfer profile`) are read. --shape plans for a model that is
only described: a published one by its name, or a config.json; how its neurons fire is then assumed, as published for
its family, or from --hot-share and --active. The machine is this one, measured, or a described one (--hardware).
Budgets include everything: weights, predictors, KV cache, working memory, driver and runtime. --selector auto assumes
that bundles are packed.

The plan is saved beside the model as plan-KEY.json; the key depends on every input. Not with --shape or --dry-run.

JSON: quantize (the option, or null), weight_type (of most FFN weights), fits (nothing is read from disk), loads (a
load takes it), solve_s, mass_on_gpu (share of the activations), work_on_gpu (share of the bytes of weights that a
step reads), optimal (proven; null for greedy and random), policy, bytes (tier: part: bytes), activations (tier:
share), layers (layer; gpu, cpu, disk: neurons; mass_on_gpu; seconds by component), predicted (the estimate:
decode_tok_s, dense_tok_s with every neuron computed, ms_per_token, at_position, policies), reasons, helps (the next
budgets at which more fits), assumed, key, path, hardware.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig, PlanConfig
from powerinfer.errors import RequestError
from powerinfer.placement.plan_document import tenths_of_percent

if TYPE_CHECKING:
    from powerinfer.placement.plan import Plan
    from powerinfer.placement.plan_document import PlanDocument

ENGINE = (
    "context", "kv_type", "prefill_chunk", "max_batch", "selector", "quantize", "prepared", "vram", "ram", "threads",
    "isa", "gpu", "expert_policy",
)  # fmt: skip
EMULATED = "that the GPU is to hold what fits, however slow it is: torch's CPU emulates it"
TIER_NAMES = {"gpu": "GPU", "cpu": "RAM", "disk": "disk"}


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--shape", metavar="NAME|FILE", help="plan for a described model: opt-175b, ...")
    types = ("f16", "bf16", "q8_0", "q4_0", "mxfp4")
    parser.add_argument("--dtype", choices=types, default="f16", help="type of a shape's weights (default f16)")
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
    from powerinfer.placement.plan import make_plan, save_plan
    from powerinfer.placement.request import check_options, model_subject, plan_request, shape_subject

    planning, engine = config_from(args, PlanConfig), config_from(args, EngineConfig)
    _check(args)
    check_options(planning, engine)
    place: Path | None = None
    if args.shape is None:
        checkpoint = open_model(args.model, engine, out)
        place = None if args.dry_run else prepared_folder(checkpoint.path, engine.prepared)
        subject = model_subject(checkpoint, engine.prepared, engine.selector, args.hot_share, args.active)
    else:
        subject = shape_subject(args.shape, args.dtype, engine.selector, args.hot_share, args.active)
    with Bar() as bar:
        request = plan_request(subject, engine, planning, bar, out.note)
    plan = make_plan(request)
    kept = None if place is None else save_plan(plan, place)
    document = replace(plan.document(kept), assumed=[*subject.assumed, *([EMULATED] if request.insist else [])])
    _show(plan, document, out)
    out.document(document.json())
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.shape is not None and args.model is not None:
        raise RequestError("give a model (-m) or a shape (--shape), not both")
    for name, value in (("--hot-share", args.hot_share), ("--active", args.active)):
        if value is not None and not 0 < value <= 1:
            raise RequestError(f"{name} is a share, above 0 and at most 1, not {value:g}")


# ---------------------------------------------------------------- text output


def _show(plan: Plan, document: PlanDocument, out: Output) -> None:
    from powerinfer.placement.budget import gib

    request, budgets = plan.request, document.budgets
    out.line(
        f"{request.model.name}, {request.model.parameters / 1e9:.3g} G parameters, {request.model.weight_type}, on "
        f"{request.hardware.name}: {_size(budgets.vram)} of VRAM, {_size(budgets.ram)} of RAM; context "
        f"{request.context}, batch {request.batch}, selector {request.selector}, policy {request.policy}"
    )
    for line in document.assumed:
        out.line(f"assumed: {line}")
    out.line()
    ffn = "neurons" if plan.claims.slots is None else "FFNs beside experts"
    _show_bytes(document, out, ffn, "KV cache, states" if plan.request.model.config.states else "KV cache")
    out.line()
    used = any(other.work_on_gpu for other in document.predicted.policies.values())
    if used and plan.claims.slots is None:  # else they all say the same
        _show_policies(request.policy, document, out)
        out.line()
    estimate = document.predicted
    differs = estimate.dense_tok_s is not None and estimate.dense_tok_s != estimate.decode_tok_s
    dense = f"; with every neuron computed (dense) {estimate.dense_tok_s:.2f}" if differs else ""
    out.line(f"estimated: {estimate.decode_tok_s:.2f} tokens/s after {estimate.at_position} tokens{dense}")
    for line in document.reasons:
        out.line(f"- {line}")
    for one in document.helps:
        beyond = "" if one.within_machine else ", more than this machine has"
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
    names = {"ffn": ffn, "panels": "FFN, matrices", "kv": kv, "norms": "norms, biases"}
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


def _size(nbytes: int) -> str:
    if 0 < nbytes < 1 << 20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
