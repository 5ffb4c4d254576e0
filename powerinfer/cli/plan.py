"""Decide what of a model rests on the GPU, in RAM and on disk under budgets, and predict how fast it decodes.

Of a model (-m) only the headers are read, and its profile, which `powerinfer profile` makes. --shape plans for a model
that is only described: a published one by its name, or a config.json; how its neurons fire is then assumed, as
published for its family, or by --hot-share and --active. The machine is this one, measured, or a described one
(--hardware). Budgets count everything: weights, predictors, KV cache, working memory, driver and runtime.

The plan is kept beside the model as plan-KEY.json, under a key of all that it hangs on; not with --shape or --dry-run.

JSON: quantize (the option, or null), weight_type (of most of the FFNs' weights), fits (nothing is read from disk),
solve_s, mass_on_gpu (share of the activations), work_on_gpu (share of the bytes of weights that a step reads), optimal
(proven; null for greedy and random), policy, bytes (tier: part: bytes), activations (tier: share), layers (layer; gpu,
cpu, disk: neurons; mass_on_gpu; seconds by what takes them), predicted (decode_tok_s, ms_per_token, at_position,
policies), reasons, helps (the next budgets at which more fits), assumed, key, path, hardware.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_flag
from powerinfer.config import EngineConfig, PlanConfig
from powerinfer.errors import RequestError

if TYPE_CHECKING:
    from powerinfer.hardware.description import Hardware
    from powerinfer.neurons import Profile
    from powerinfer.placement.plan import Plan, PlanRequest
    from powerinfer.placement.power_law import Law
    from powerinfer.placement.shapes import Model

ENGINE = (
    "context", "kv_type", "prefill_chunk", "max_batch", "selector", "quantize", "prepared", "vram", "ram", "threads",
    "isa", "gpu",
)  # fmt: skip
MOST = 1 << 16  # requests, and tokens of a prompt at once
TIERS = {"gpu": "GPU", "cpu": "RAM", "disk": "disk"}


def configure(parser: argparse.ArgumentParser) -> None:
    model_flag(parser)
    parser.add_argument("--shape", metavar="NAME|FILE", help="plan for a model that is only described: opt-175b, ...")
    types = ("f16", "bf16", "q8_0", "q4_0")
    parser.add_argument("--dtype", choices=types, default="f16", help="type of a shape's weights (default f16)")
    parser.add_argument(
        "--hot-share",
        type=float,
        metavar="X",
        help="assume that this share of a layer's neurons carries 80 %% of its activations, instead of a profile",
    )
    parser.add_argument("--active", type=float, metavar="X", help="the same: fraction of neurons that fire for a token")
    parser.add_argument("--dry-run", action="store_true", help="do not keep the plan")
    config_flags(parser, PlanConfig, "plan")
    config_flags(parser, EngineConfig, "engine", only=ENGINE)


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.formats.prepared import prepared_folder
    from powerinfer.placement.plan import make_plan, save_plan

    wanted, engine = config_from(args, PlanConfig), config_from(args, EngineConfig)
    _check(args)
    check(wanted, engine)
    place: Path | None = None
    if args.shape is None:
        from powerinfer.formats.checkpoint import open_checkpoint
        from powerinfer.hub import resolve_model

        path = resolve_model(args.model, say=out.note)
        place = None if args.dry_run else prepared_folder(path, engine.prepared)
        request, assumed = model_request(args, wanted, engine, open_checkpoint(path, quantize=engine.quantize), out)
    else:
        request, assumed = shape_request(args, wanted, engine, out)
    plan = make_plan(request)
    kept = None if place is None else save_plan(plan, place)
    document = plan.document(kept) | {"assumed": assumed}
    _show(plan, document, out)
    out.document(document)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.shape is not None and args.model is not None:
        raise RequestError("give a model (-m) or a shape (--shape), not both")
    for name, value in (("--hot-share", args.hot_share), ("--active", args.active)):
        if value is not None and not 0 < value <= 1:
            raise RequestError(f"{name} is a share, above 0 and at most 1, not {value:g}")


def check(wanted: PlanConfig, engine: EngineConfig) -> None:
    """RequestError for options that no plan can have."""
    for name, count in (
        ("--batch", wanted.batch),
        ("--prefill-chunk", engine.prefill_chunk),
        ("--max-batch", engine.max_batch),
    ):
        if not 1 <= count <= MOST:
            raise RequestError(f"{name} must lie between 1 and {MOST}, not {count}")
    if not 0 <= wanted.time_limit < math.inf:
        raise RequestError(f"--time-limit must be a number of seconds, not {wanted.time_limit}")


def _request(
    wanted: PlanConfig, engine: EngineConfig, model: Model, profile: Profile, hardware: Hardware, selector: str
) -> PlanRequest:
    from powerinfer.placement.plan import PlanRequest

    return PlanRequest(
        model,
        profile,
        hardware,
        vram=engine.vram,
        ram=engine.ram,
        context=engine.context or model.config.context_length,
        batch=wanted.batch,
        kv_type=engine.kv_type,
        selector=selector,
        policy=wanted.policy,
        chunk=engine.prefill_chunk,
        seed=wanted.seed,
        time_limit=wanted.time_limit,
        requests=engine.max_batch,
    )


def _hardware(wanted: PlanConfig, engine: EngineConfig, out: Output) -> Hardware:
    from powerinfer.cli.progress import Bar
    from powerinfer.hardware.description import load
    from powerinfer.hardware.measure import gpu_beside, measured

    if wanted.hardware is not None:
        return load(wanted.hardware)
    gpu = gpu_beside(engine, out.note)
    with Bar() as bar:
        return measured(engine, bar, out.note, gpu)


def _law(args: argparse.Namespace, law: Law) -> tuple[Law, str]:
    """How neurons are taken to fire, and what to tell about it."""
    from dataclasses import replace

    law = replace(law, active=args.active or law.active, hot=args.hot_share or law.hot)
    where = "" if law.ratio == 1 else f", the last layer's {law.ratio:g} times as often as the first's"
    return law, (
        f"that {100 * law.active:g} % of the neurons fire for a token{where}, and {100 * law.hot:g} % of a layer's "
        "carry 80 % of its activations, by a power law"
    )


def shape_request(
    args: argparse.Namespace, wanted: PlanConfig, engine: EngineConfig, out: Output
) -> tuple[PlanRequest, list[str]]:
    """The request for a described model, and what is assumed about it."""
    from powerinfer.placement.power_law import assumed_profile
    from powerinfer.placement.shapes import NAMED, described_model, find_shape
    from powerinfer.sparsity.selectors import RECTIFIED

    shape = find_shape(args.shape)
    config = shape.config
    model = described_model(config, args.dtype, config.name or args.shape, shape.predictor)
    rectified = config.activation in RECTIFIED
    selector = engine.selector
    if selector == "auto":
        selector = "all" if not rectified else "predicted" if model.predictors else "exact"
    _check_selector(selector, model)
    law, text = _law(args, shape.law)
    assumed = [text] if selector != "all" else []
    if selector == "predicted":
        share = sum(one.stored for pair in model.predictors for one in pair) / _weights(model)
        assumed.append(
            f"predictors in Q8_0, {100 * share:.1f} % of the model's bytes, that name {NAMED:g} times the neurons "
            "that fire"
        )
    profile = assumed_profile(law, config.n_layers, config.d_ff)
    return _request(wanted, engine, model, profile, _hardware(wanted, engine, out), selector), assumed


def _weights(model: Model) -> int:
    return sum(one.stored for layer in (*model.attention, *model.ffn) for one in layer) + model.tables


def model_request(
    args: argparse.Namespace,
    wanted: PlanConfig,
    engine: EngineConfig,
    checkpoint: Any,
    out: Output,
    fresh: bool = False,
) -> tuple[PlanRequest, list[str]]:
    """The request for a model, from its headers, its profile and its predictor; and what is assumed about it.

    fresh: as if nothing were packed or trained yet.
    """
    from powerinfer.formats.prepared import PREDICTOR, PROFILE, PreparedFile
    from powerinfer.formats.profile_file import open_profile
    from powerinfer.placement.power_law import Law, assumed_profile
    from powerinfer.placement.shapes import checkpoint_model, law_of
    from powerinfer.sparsity.selectors import RECTIFIED

    config = checkpoint.config
    model = checkpoint_model(checkpoint, engine.prepared, fresh=fresh)
    selector = engine.selector
    if selector == "auto":
        selector = "exact" if config.activation in RECTIFIED else "all"
    _check_selector(selector, model)
    if selector == "predicted" and not model.predictors:
        command = PreparedFile(PREDICTOR, checkpoint, engine.prepared).command
        raise RequestError(f"there is no predictor of {checkpoint.path}: `{command}` makes it")
    given = args.hot_share is not None or args.active is not None
    assumed: list[str] = []
    place = PreparedFile(PROFILE, checkpoint, engine.prepared)
    if given:
        law, text = _law(args, law_of(config))
        profile = assumed_profile(law, config.n_layers, config.d_ff)
        assumed.append(text)
    elif selector == "all" and not place.exists():
        profile = assumed_profile(Law(1.0, 0.8), config.n_layers, config.d_ff)
        assumed.append(f"that all neurons count alike, since there is no profile; `{place.command}` makes it")
    elif not place.exists():
        raise RequestError(
            f"there is no profile of {checkpoint.path}: `{place.command}` makes it, or --hot-share X assumes a skew"
        )
    else:
        profile = open_profile(checkpoint, engine.prepared)
        if selector == "threshold" and profile.thresholds is None:
            raise RequestError(f"{place.path} has no thresholds; `{place.command}` calibrates them")
    return _request(wanted, engine, model, profile, _hardware(wanted, engine, out), selector), assumed


def _check_selector(selector: str, model: Model) -> None:
    from powerinfer.sparsity.selectors import selector_named

    unsuited = selector_named(selector, 1.0 if selector == "threshold" else None).unsuited(model.config)
    if unsuited is not None:
        raise RequestError(f"selector {selector}: {unsuited}")


# ---------------------------------------------------------------- for people


def _show(plan: Plan, document: dict[str, Any], out: Output) -> None:
    from powerinfer.placement.budget import gib

    request, budgets = plan.request, document["budgets"]
    out.line(
        f"{request.model.name}, {request.model.parameters / 1e9:.3g} G parameters, {request.model.weight_type}, on "
        f"{request.hardware.name}: {_size(budgets['vram'])} of VRAM, {_size(budgets['ram'])} of RAM; context "
        f"{request.context}, batch {request.batch}, selector {request.selector}, policy {request.policy}"
    )
    for line in document["assumed"]:
        out.line(f"assumed: {line}")
    out.line()
    _show_bytes(document, out)
    out.line()
    head = f"{'policy':<10}{'tokens/s':>10}{'activations on GPU':>21}{'work on GPU':>14}{'proven':>9}{'solved in':>12}"
    out.line(head)
    for name, other in document["predicted"]["policies"].items():
        proven = {True: "yes", False: "no", None: "-"}[other["optimal"]]
        solved = "-" if other["optimal"] is None else f"{1e3 * other['solve_s']:.0f} ms"
        mark = " *" if name == request.policy else ""
        out.line(
            f"{name + mark:<10}{other['decode_tok_s']:>10.2f}{_percent(other['mass_on_gpu']):>21}"
            f"{_percent(other['work_on_gpu']):>14}{proven:>9}{solved:>12}"
        )
    out.line()
    predicted = document["predicted"]
    out.line(f"predicted: {predicted['decode_tok_s']:.2f} tokens/s after {predicted['at_position']} tokens")
    for line in document["reasons"]:
        out.line(f"- {line}")
    for one in document["helps"]:
        beyond = "" if one["within_machine"] else ", more than this machine has"
        out.line(f"- {one['what']}: from {one['flag']} {gib(one['bytes'])}{beyond}")
    if document["path"] is not None:
        out.line(f"kept in {document['path']}")


def _show_bytes(document: dict[str, Any], out: Output) -> None:
    """What is where: a row for each part, a column for each tier."""
    tiers = document["bytes"]
    used = [tier for tier in TIERS if tiers[tier]]
    parts = list(dict.fromkeys(part for tier in TIERS for part in tiers[tier]))
    out.line(f"{'':<22}" + "".join(f"{TIERS[tier]:>12}" for tier in used))
    names = {"ffn": "neurons", "panels": "FFN, dense matrices", "kv": "KV cache", "norms": "norms, biases"}
    for part in parts:
        cells = "".join(f"{_size(tiers[tier][part]) if part in tiers[tier] else '-':>12}" for tier in used)
        out.line(f"{names.get(part, part):<22}{cells}")
    out.line(f"{'in all':<22}" + "".join(f"{_size(sum(tiers[tier].values())):>12}" for tier in used))
    neurons = [{tier: layer[tier] for tier in TIERS} for layer in document["layers"]]
    total = sum(sum(layer.values()) for layer in neurons)
    out.line(
        f"{'share of neurons':<22}"
        + "".join(f"{_percent(sum(layer[tier] for layer in neurons) / total):>12}" for tier in used)
    )
    shares = document["activations"]
    out.line(f"{'share of activations':<22}" + "".join(f"{_percent(shares[tier]):>12}" for tier in used))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
