"""Store the FFN weights of a model neuron by neuron, in a separate file, so that decode can skip inactive ones.

The file is written into the folder MODEL.powerinfer beside the model, or into --prepared; the model is not changed. It
is valid for one model, opened with one --quantize; if it is up to date nothing is done. The error of a part is the root
mean square of the change of its weights, relative to that of the weights: 0 if none changed. Then the model is loaded
and its logits from the bundles are compared with the dense ones on a short text, unless --no-check is given or the
model has no tokenizer.

Of experts without gates down is stored so, with the codes of the model's file: for --selector exact where RAM does not
hold all experts, so that of those on disk only the rows of neurons that fire are read. Where the model has a predictor,
a second file has up and down, for --selector predicted.

JSON: path, bytes, types (gate, null without a gate; up; down), layers, error (by part), seconds, agreement
(top1_agreement, mean_kl, max_abs_logit_diff, tokens, active_fraction: bundles against dense weights). error and
agreement are null if nothing was done, agreement also without the comparison. Of experts predicted, too: path and bytes
of the second file, null without it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import THRESHOLDED, EngineConfig, ModelConfig
from powerinfer.errors import RequestError
from powerinfer.formats import weight_types
from powerinfer.text.model_text import has_tokenizer

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint

CONTEXT = 128  # tokens of the check's windows
TYPES = ("auto", *map(str.lower, weight_types.ROW_TYPES))
DOWN_TYPES = ("auto", *map(str.lower, weight_types.DOWN_TYPES))


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument(
        "--type", choices=TYPES, default="auto", help="type of gate and up; auto: the model's own if possible"
    )
    parser.add_argument(
        "--down-type",
        choices=DOWN_TYPES,
        default="auto",
        metavar="TYPE",
        help=f"type of down: {', '.join(DOWN_TYPES)}; auto: types with blocks of 32 but q8_0 are kept unchanged "
        "(q4_0x32, ...), floats as gate, others q8_0",
    )
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="skip the comparison with the dense logits"
    )
    parser.add_argument("--force", action="store_true", help="make the file even if it is up to date")
    config_flags(parser, EngineConfig, "engine", only=("quantize", "prepared", "threads"))


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.prepare.expert_packing import applies
    from powerinfer.prepare.packing import current, describe, pack
    from powerinfer.sparsity.verdict import no_gain

    engine = config_from(args, EngineConfig)
    checkpoint = open_model(args.model, engine, out)
    if applies(checkpoint):
        return _pack_experts(checkpoint, args, engine, out)
    types = choose_types(checkpoint, _asked(args.type), _asked(args.down_type))
    bundles = None if args.force else current(checkpoint, engine.prepared, types)
    packed = None
    if bundles is None:
        with Bar() as bar:
            packed = pack(checkpoint, engine.prepared, types, bar, engine.threads)
        for note in types.notes:
            out.note(note)
        bundles = packed.bundles
    document = describe(bundles, packed)
    document["agreement"] = None
    if packed and args.check:
        if has_tokenizer(checkpoint):
            document["agreement"] = _agreement(checkpoint.config, args.model, engine, out)
        else:
            out.note("not compared with the dense weights: the model's files have no tokenizer")
    _show(document, any(layer.ffn.activation in THRESHOLDED for layer in checkpoint.config.layers), out)
    if not checkpoint.config.partly_rectified:
        out.line(no_gain(checkpoint.config))
    out.document(document)
    return 0


def _pack_experts(checkpoint: Checkpoint, args: argparse.Namespace, engine: EngineConfig, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.prepare.expert_packing import pack_experts, predicts

    if (args.type, args.down_type) != ("auto", "auto"):
        raise RequestError("experts keep the codes of the model's file: leave out --type and --down-type")
    with Bar() as bar:
        rows, seconds = pack_experts(checkpoint, engine.prepared, args.force, bar, engine.threads)
        bundles, more = None, None
        if predicts(checkpoint, engine.prepared):
            bundles, more = pack_experts(checkpoint, engine.prepared, args.force, bar, engine.threads, predicted=True)
    kinds = ", ".join(dict.fromkeys(one.layout.down_type for one in rows.layers.values()))
    document = {
        "path": str(rows.path),
        "bytes": rows.file.size,
        "types": {"gate": None, "up": None, "down": kinds},
        "layers": len(rows.layers),
        "error": None if seconds is None else {"down": 0.0},
        "seconds": (seconds or 0.0) + (more or 0.0),
        "agreement": None,
        "predicted": None if bundles is None else {"path": str(bundles.path), "bytes": bundles.file.size},
    }
    _show(document, False, out)
    if bundles is not None:
        note = ", up to date" if more is None else ""
        out.line(f"{bundles.path}: {bundles.file.size / 1e6:.1f} MB, for --selector predicted{note}")
    out.document(document)
    return 0


def _agreement(config: ModelConfig, model: str | None, engine: EngineConfig, out: Output) -> dict[str, Any]:
    """Agreement of the logits from bundles with the dense ones; SwiGLU models use all neurons."""
    from powerinfer.cli.common import open_llm
    from powerinfer.cli.progress import Bar
    from powerinfer.evaluate import agreement
    from powerinfer.runtime.engine import SAMPLE

    context = min(CONTEXT, config.context_length)
    engine = replace(engine, context=context, max_batch=1, trial=False, selector="exact")
    if not config.partly_rectified:
        engine = replace(engine, selector="threshold", threshold=1e-30)
    with open_llm(model, engine, out) as llm, Bar() as bar:
        return asdict(agreement(llm, None, SAMPLE, context, progress=bar))


def _show(document: dict[str, Any], cut: bool, out: Output) -> None:
    """cut: activations jump at thresholds."""
    types = ", ".join(f"{part} {name}" for part, name in document["types"].items() if name)
    out.line(f"{document['path']}: {document['bytes'] / 1e6:.1f} MB, {document['layers']} layers, {types}")
    if document["error"] is None:
        out.line("up to date; nothing was done (--force packs again)")
        return
    error = ", ".join(f"{part} {value:.2g}" for part, value in document["error"].items())
    out.line(f"packed in {document['seconds']:.1f} s; relative error of the weights: {error}")
    if document["agreement"] is not None:
        agreement = document["agreement"]
        out.line(
            f"against the dense weights, {agreement['tokens']} tokens: logits differ by "
            f"{agreement['max_abs_logit_diff']:.2g} at most, mean KL {agreement['mean_kl']:.2g} nats, "
            f"same top token {100 * agreement['top1_agreement']:.0f} %"
        )
        if cut:
            out.line(
                "the same quality, not the same words: neurons near their thresholds fire or not by the last digit of "
                "a sum, and neither answer is the worse one"
            )


def _asked(name: str) -> str | None:
    return None if name == "auto" else name.upper()
