"""Train predictors: small networks that select the neurons of a layer that will fire, before they are computed.

They are trained on the samples that `powerinfer profile` saves, a tenth of which is held out. A layer's predictor has
the smallest size at which it selects --recall of the firing neurons with at most --lost false positives, as a share of
all neurons; all together stay below --share of the model's bytes. Each is compared with the best low-rank predictor of
the same size, which needs no training and is used if it is as good. An interrupted run resumes.

JSON: path, bytes, share_of_model, type, recall, candidate_fraction, active_fraction (means of the layers),
recall_target, held_out_tokens, layers (each: rank, recall, precision, candidate_fraction, active_fraction, method,
steps, svd_recall, svd_candidate_fraction, svd_form), seconds, resumed (sizes of layers that an earlier run
finished), notes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig, TrainConfig
from powerinfer.formats.predictor_file import FIGURES


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--force", action="store_true", help="train even if the predictors are up to date")
    config_flags(parser, TrainConfig, "training")
    config_flags(parser, EngineConfig, "engine", only=("threads", "quantize", "prepared"))


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.kernels.cpu import choose_threads
    from powerinfer.prepare.training import current, describe, train

    engine, config = config_from(args, EngineConfig), config_from(args, TrainConfig)
    choose_threads(engine.threads)  # what is wrong with them is said before a model is fetched
    checkpoint = open_model(args.model, engine, out)
    file = None if args.force else current(checkpoint, engine.prepared, config)
    trained = None
    if file is None:
        with Bar() as bar:
            trained = train(checkpoint, engine.prepared, config, bar, engine.threads)
        file = trained.file
    document = describe(file)
    document["seconds"] = trained.seconds if trained else 0.0
    document["resumed"] = trained.resumed if trained else 0
    document["notes"] = list(trained.notes) if trained else []
    for line in table(file.training):
        out.line(line)
    size = f"{document['bytes'] / 1e6:.2f} MB of {file.type}"
    out.line(f"{document['path']}: {size}, {document['share_of_model']:.1%} of the model")
    if trained:
        earlier = f", {trained.resumed} sizes by an earlier run" if trained.resumed else ""
        out.line(f"trained in {trained.seconds:.1f} s{earlier}")
    else:
        out.line("up to date; nothing was done (--force trains again)")
    for note in document["notes"]:
        out.note(note)
    out.document(document)
    return 0


def table(training: Mapping[str, Any] | None) -> list[str]:
    """Lines of text: each layer's predictor on held-out samples, from `PredictorFile.training`."""
    from powerinfer.prepare.training import mean

    layers = (training or {}).get("layers", [])
    if not layers:
        return []
    lines = ["layer  rank  method    recall    precision  candidates  active    svd: recall  candidates"]
    for number, one in enumerate(layers):
        lines.append(f"{one.get('layer', number):>5}  {one['rank']:>4}  {one['method']:<8}  {_shares(one)}")
    means = {name: mean(layers, name) for name in FIGURES}
    rank = round(sum(one["rank"] for one in layers) / len(layers))
    return [*lines, f" mean  {rank:>4}            {_shares(means)}"]


def _shares(figures: Mapping[str, float]) -> str:
    widths = (6, 9, 10, 6, 11, 10)
    return "  ".join(f"{figures[name]:>{width}.2%}" for name, width in zip(FIGURES, widths, strict=True))
