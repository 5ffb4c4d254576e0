"""Count how often each neuron of a model fires over a text.

The counts are written to MODEL.powerinfer/profile.safetensors, or to the folder of --prepared; training samples (the
input of a predictor and which neurons fired), evenly spread over the text, to samples.safetensors beside it. If both
are up to date nothing is done. An interrupted run resumes when it is repeated with the same options.

Neurons whose activation is never exactly zero (SwiGLU) count as firing above a threshold of their layer, which is
calibrated first: the largest quantile of the magnitudes, the same for all layers, that costs at most --perplexity-cost.
`--selector threshold` uses these thresholds by default.

Of a model of experts the selections of its experts are counted instead, into experts.safetensors. --trace FILE also
leaves what every token selected, for `powerinfer experts`. Samples are of models whose neurons inside experts can be
predicted, after a ReLU. --perplexity-cost does not apply.

JSON: path, tokens, window, corpora (name, tokens), active_fraction, hot_share (share of the model's neurons that carry
80 % of the activations), reuse (of the neurons that fire for a token, the share that fired for the previous one),
overlap (of the most frequent 20 % of the neurons: first, second, share, for each pair of corpora), layers (layer,
active_fraction, hot_share, reuse, threshold or null), samples (path, bytes, rows; null: none), calibration (null, or
quantile, perplexity, perplexity_dense, cost, asked, tokens), seconds, tok_s (null if nothing was done). Of a model of
experts: path, tokens, window, corpora, top_10, top_25 and top_50 (share of the selections of the most frequent 10, 25
and 50 % of the experts), gini (of the counts), reuse (of the experts that a token selects, the share that the previous
one selected), overlap, layers (layer, experts, top_k, top_10, top_25, top_50, gini, reuse, never: experts never
selected, foretold: share of the next layer's selections that this layer's foretell, null in the last), samples (path,
bytes, rows; null: none), trace (path, bytes; null: none), seconds, tok_s.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig, ProfileConfig
from powerinfer.errors import RequestError

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint

TOPS = ("top_10", "top_25", "top_50")
ENGINE = ("threads", "quantize", "prepared", "kv_type", "isa")


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    config_flags(parser, ProfileConfig, "profile")
    parser.add_argument("--trace", metavar="FILE", help="also write what every token selects (models of experts)")
    parser.add_argument("--force", action="store_true", help="profile even if it is up to date")
    config_flags(parser, EngineConfig, "engine", only=ENGINE)


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.kernels.cpu import choose_threads
    from powerinfer.prepare import profiling

    options, engine = config_from(args, ProfileConfig), config_from(args, EngineConfig)
    profiling.check(options)
    choose_threads(engine.threads)  # what is wrong with them is said before a model is fetched
    checkpoint = open_model(args.model, engine, out)
    if checkpoint.config.experts:
        return _experts(args, options, engine, checkpoint, out)
    if args.trace is not None:
        raise RequestError("--trace is for models of experts, and this model has none: leave it out")
    with Bar() as bar:
        task = profiling.read(checkpoint, options, out.note, bar)
        profile = profiling.profile(checkpoint, engine, task, out.note, bar, args.force)
    document = profiling.describe(checkpoint, engine.prepared, profile)
    _show(document, out)
    out.document(document)
    return 0


def _experts(
    args: argparse.Namespace, options: ProfileConfig, engine: EngineConfig, checkpoint: Checkpoint, out: Output
) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.prepare import expert_profiling, profiling

    with Bar() as bar:
        task = profiling.read(checkpoint, options, out.note, bar)
        trace = None if args.trace is None else Path(args.trace)
        profile = expert_profiling.profile_experts(checkpoint, engine, task, trace, out.note, bar, args.force)
    document = expert_profiling.describe(profile)
    _show_experts(document, out)
    out.document(document)
    return 0


def _show_experts(document: dict[str, Any], out: Output) -> None:
    _show_work(document, out)
    _show_samples(document, out)
    if document["trace"]:
        out.line(f"{document['trace']['path']}: the trace, {document['trace']['bytes'] / 1e6:.1f} MB")
    for line in expert_lines(document):
        out.line(line)
    for pair in document["overlap"]:
        share = f"{100 * pair['share']:.1f} %"
        out.line(f"overlap of the most frequent 20 %, {pair['first']} and {pair['second']}: {share}")


def expert_lines(document: dict[str, Any]) -> Iterator[str]:
    """Lines about how unevenly experts are used, of all layers and by layer."""
    tops = ", ".join(f"{name[4:]} % of the experts have {100 * document[name]:.1f} %" for name in TOPS)
    yield f"of the selections, the most frequent {tops}"
    yield f"{100 * document['reuse']:.1f} % of a token's experts are also those of the token before it"
    heads = " ".join(f"{f'top {name[4:]} %':>8}" for name in TOPS)
    yield f"{'layer':>5} {'experts':>8} {heads} {'Gini':>6} {'reuse':>7} {'never':>6}"
    for layer in document["layers"]:
        tops = " ".join(f"{100 * layer[name]:>6.1f} %" for name in TOPS)
        yield (
            f"{layer['layer']:>5} {layer['experts']:>8} {tops} {layer['gini']:>6.3f} {100 * layer['reuse']:>5.1f} % "
            f"{layer['never']:>6}"
        )


def _show_work(document: dict[str, Any], out: Output) -> None:
    out.line(f"{document['path']}: {document['tokens']} tokens in windows of {document['window']}")
    if document["tok_s"] is None:
        out.line("up to date; nothing was done (--force profiles again)")
    else:
        out.line(f"profiled in {document['seconds']:.1f} s, {document['tok_s']:.0f} tokens/s")


def _show_samples(document: dict[str, Any], out: Output) -> None:
    if document["samples"]:
        size = document["samples"]["bytes"] / 1e6
        out.line(f"{document['samples']['path']}: {document['samples']['rows']} samples, {size:.1f} MB")


def _show(document: dict[str, Any], out: Output) -> None:
    _show_work(document, out)
    _show_samples(document, out)
    calibration = document["calibration"]
    if calibration:
        out.line(
            f"thresholds at quantile {calibration['quantile']:.3f}: perplexity {calibration['perplexity']:.4f}, dense "
            f"{calibration['perplexity_dense']:.4f} ({100 * calibration['cost']:+.2f} %, "
            f"asked for {100 * calibration['asked']:g} %) on {calibration['tokens']} tokens held out"
        )
    out.line(
        f"{100 * document['active_fraction']:.1f} % of the neurons fire for a token, {100 * document['reuse']:.1f} % "
        f"of these for the one before too; {100 * document['hot_share']:.1f} % of all carry 80 % of the activations"
    )
    for pair in document["overlap"]:
        share = "none fires" if pair["share"] is None else f"{100 * pair['share']:.1f} %"
        out.line(f"overlap of the most frequent 20 %, {pair['first']} and {pair['second']}: {share}")
    out.line(f"{'layer':>5} {'active':>8} {'hot':>8} {'reuse':>8}" + "  threshold" * bool(calibration))
    for layer in document["layers"]:
        shares = " ".join(f"{100 * layer[name]:>6.1f} %" for name in ("active_fraction", "hot_share", "reuse"))
        out.line(f"{layer['layer']:>5} {shares}" + (f" {layer['threshold']:>10.3g}" if calibration else ""))
