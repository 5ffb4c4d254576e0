"""Measure a model's quality on a text.

perplexity: the text is cut into windows of --context tokens that do not overlap, and the second half of each is
scored, as llama-perplexity does. JSON: perplexity, error (one standard error), tokens, context.
"""

from __future__ import annotations

import argparse
import dataclasses

from powerinfer.cli.common import Output, config_flags, model_flag, open_llm
from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("measure", choices=("perplexity",), help="what to measure")
    parser.add_argument("--file", required=True, metavar="TEXT", help="a UTF-8 text file")
    model_flag(parser)
    config_flags(parser, EngineConfig, "engine")


def execute(args: argparse.Namespace, out: Output) -> int:
    text = _read(args.file)
    window = getattr(args, "context", 512) or 512
    args.context = window
    from powerinfer.cli.progress import Bar

    with open_llm(args, out) as llm, Bar() as bar:
        from powerinfer.evaluate import perplexity

        result = perplexity(llm, text, context=window, progress=bar)
    out.line(f"perplexity {result.perplexity:.4f} +- {result.error:.4f}, {result.tokens} tokens scored")
    out.document({**dataclasses.asdict(result), "context": window})
    return 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
