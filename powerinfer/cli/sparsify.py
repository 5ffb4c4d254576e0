"""Make a dense model sparse: another activation, and training until the model has learnt to do with it.

The original is the teacher, so any text will do; text in the form that the model is used for is best. Writes a model of
the same format into --out, with a card (README.md), the steps (log.csv) and the state of the training
(training.safetensors), from which an interrupted run goes on. Needs torch.

JSON: path, source, architecture, recipe, target_zeros, tokens, corpora, own_text_tokens (written with --own-text, with
the prompts), perplexity_before, perplexity, ratio, zeros, zeros_by_layer (on held-out windows of the texts), limits
(thresholds of the layers), resumed (steps that an earlier run did), seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig, SparsifyConfig

MISSED = 0.02
"""How far the share of zeros may stay behind its target without a word."""


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="folder for the sparse model")
    parser.add_argument(
        "--corpus", action="append", default=[], metavar="PATH", help="text file, JSONL file or folder (repeatable)"
    )
    config_flags(parser, SparsifyConfig, "training")
    config_flags(parser, EngineConfig, "engine", only=("threads",))


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.sparsify import sparsify

    engine, config = config_from(args, EngineConfig), config_from(args, SparsifyConfig)
    checkpoint = open_model(args.model, engine, out)
    with Bar() as bar:
        made = sparsify(checkpoint, args.corpus, config, Path(args.out).expanduser(), bar, engine.threads, out.note)
    about = made.document
    out.line(f"perplexity {about['perplexity_before']:.3f} -> {about['perplexity']:.3f} ({about['ratio']:.3f} times)")
    out.line(f"{about['zeros']:.1%} of the neurons are zero for a token (target {config.zeros:.1%})")
    if about["zeros"] < config.zeros - MISSED:
        out.note(f"{about['zeros']:.1%} is less than --zeros asks for: train longer, with more --tokens")
    out.line(f"{made.path}: {about['tokens']:,} tokens in {about['seconds']:.0f} s")
    out.document(about)
    return 0
