"""Make a dense model sparse: another activation, and training until the model has learnt to do with it.

The original is the teacher, so any text will do; text in the form that the model is used for is best. Writes a model of
the same format (or --format: a GGUF file, or a Hugging Face folder in --type bf16, f16 or f32) into --out, with a card
(README.md), the steps (log.csv), and the state of the training (training.safetensors), from which an interrupted run
goes on; of one that was finished (finished.json) the figures are given again. Needs torch.

JSON: path, source, architecture, recipe, target_zeros, gate_zeros (as asked, or null), tokens, corpora, own_text_tokens
(written with --own-text, with the prompts), perplexity_before, perplexity, ratio, zeros, zeros_by_layer (on held-out
windows of the texts), limits (thresholds of the layers, of product those of the gates; of topk how many neurons of a
bank count), options (flags of the training), start (file of --start), resumed (steps that an earlier run did), seconds
(of all runs).

--estimate says what a training would take, of a model (-m), of which only the headers are read, or of a published one
by its name or a config.json (--shape). JSON: model, parameters, active_parameters (multiplied with for a token),
recipe, tokens, stages (name, tokens, flops of a token, weights that are trained), flops, memory (place of moments and
weights; bytes of device and ram), share (of a device's peak), devices (name, flops_s, hours, fits: the first place for
which it has the memory, or null), here (--measure: device, flops_s, peak_flops_s, hours; or null).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from powerinfer.cli.common import Output, agreed, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig, SparsifyConfig
from powerinfer.errors import RequestError

ASKED = 0.5
"""Hours from which on a training is begun only after a question, at a terminal."""
MISSED = 0.02
"""Distance of the share of zeros from its target that needs no word."""


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--out", metavar="FOLDER", help="folder for the sparse model")
    parser.add_argument(
        "--corpus",
        action="append",
        default=[],
        metavar="PATH",
        help="text file, JSONL file or folder (repeatable); default: a small built-in sample, which teaches little",
    )
    parser.add_argument(
        "--start", metavar="MODEL", help="a model that this recipe made out of the same original: train it further"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask before a training of hours")
    config_flags(parser, SparsifyConfig, "training")
    config_flags(parser, EngineConfig, "engine", only=("threads",))
    paper = parser.add_argument_group("estimate")
    paper.add_argument("--estimate", action="store_true", help="do not train, say what it would take")
    paper.add_argument("--shape", metavar="NAME|FILE", help="of a described model: qwen3-4b, llama-3.1-8b, ...")
    paper.add_argument("--measure", action="store_true", help="time a few steps on this machine, with random weights")
    paper.add_argument(
        "--share", type=float, metavar="X", help="share of a device's peak (default: as measured, else 0.35)"
    )


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer_train import Listener, sparsify
    from powerinfer_train.recipes import check_options

    engine, config = config_from(args, EngineConfig), config_from(args, SparsifyConfig)
    check_options(config)
    if args.estimate:
        return _estimate(args, engine, config, out)
    if args.shape is not None or args.measure or args.share is not None:
        raise RequestError("--shape, --measure and --share are for --estimate")
    if args.out is None:
        raise RequestError("missing: --out (folder for the sparse model); see `powerinfer sparsify --help`")
    checkpoint = open_model(args.model, engine, out)
    start = open_model(args.start, engine, out) if args.start else None
    folder = Path(args.out).expanduser()
    with Bar() as bar:

        def agree(hours: float) -> None:
            bar.close()
            _agree(hours, config, args.yes, out)

        listener = Listener(bar, out.note, agree)
        result = sparsify(checkpoint, args.corpus, config, folder, listener, engine.threads, start)
    document = result.document
    before, after = document["perplexity_before"], document["perplexity"]
    out.line(f"perplexity {before:.3f} -> {after:.3f} ({document['ratio']:.3f} times)")
    out.line(f"{document['zeros']:.1%} of the neurons are zero for a token (target {config.zeros:.1%})")
    if document["zeros"] < config.zeros - MISSED:
        out.note(f"{document['zeros']:.1%} is less than --zeros asks for: train longer, with more --tokens")
    out.line(f"{result.path}: {document['tokens']:,} tokens in {document['seconds']:.0f} s")
    out.document(document)
    return 0


def _agree(hours: float, config: SparsifyConfig, yes: bool, out: Output) -> None:
    """Say how long a training takes; at a terminal ask if that is long. RequestError for a no."""
    out.note(
        f"training on {config.tokens:,} tokens takes about {_time(hours)} on this machine; Ctrl-C stops it, and the "
        "same command goes on; fewer --tokens take less (--estimate tells more)"
    )
    if hours < ASKED or yes or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return
    if not agreed("begin?"):
        raise RequestError("nothing was trained; --yes begins without a question")


def _estimate(args: argparse.Namespace, engine: EngineConfig, config: SparsifyConfig, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.placement.shapes import find_shape
    from powerinfer_train import measured
    from powerinfer_train.estimate import estimate
    from powerinfer_train.recipes import code_bytes, code_bytes_of_k_quants

    if args.shape is not None and args.model is not None:
        raise RequestError("give a model (-m) or a shape (--shape), not both")
    if args.shape is None:
        checkpoint = open_model(args.model, engine, out)
        model, codes = checkpoint.config, code_bytes(checkpoint, config)
    else:
        model = find_shape(args.shape).config
        codes = code_bytes_of_k_quants(model, config)
    if args.measure and codes:
        raise RequestError("--measure times a training of all weights: leave it out, or --type same")
    estimate(model, config, args.share, None)  # refuses before anything is measured
    rates = None
    if args.measure:
        with Bar() as bar:
            rates = measured(model, config, engine.threads, bar)
    result = estimate(model, config, args.share, rates, codes)
    weights, active = result["parameters"] / 1e9, result["active_parameters"] / 1e9
    out.line(f"{result['model']}: {weights:.2f} billion weights, {active:.2f} of them multiplied with for a token")
    for number, stage in enumerate(result["stages"], 1):
        trained = f"{stage['weights'] / 1e9:.2f} billion weights trained"
        work = f"{stage['tokens']:,} tokens of {stage['flops'] / 1e9:.1f} GFLOP"
        out.line(f"stage {number}, {stage['name']}: {work}, {trained}")
    for place in result["memory"]:
        ram = f" and {place['ram'] / 2**30:.0f} GiB of RAM" if place["ram"] else ""
        out.line(f"memory, {place['place']}: {place['device'] / 2**30:.1f} GiB of the device{ram}")
    for device in result["devices"]:
        fits = f"fits with {device['fits']}" if device["fits"] else "does not fit"
        rate = f"{result['share']:.0%} of {device['flops_s'] / 1e12:.0f} TFLOP/s"
        out.line(f"{device['name']}: {_time(device['hours'])} ({rate}), {fits}")
    if result["here"] is not None:
        machine = result["here"]
        rate = f"{machine['flops_s'] / 1e12:.3g} of {machine['peak_flops_s'] / 1e12:.3g} TFLOP/s, measured"
        out.line(f"this machine ({machine['device']}): {_time(machine['hours'])} ({rate})")
    out.document(result)
    return 0


def _time(hours: float) -> str:
    for unit, of_an_hour in (("hours", 1), ("minutes", 60)):
        if hours * of_an_hour >= 1:
            return f"{hours * of_an_hour:.1f} {unit}"
    return f"{hours * 3600:.1f} seconds"
