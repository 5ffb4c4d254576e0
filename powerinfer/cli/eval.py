"""Measure a model's quality on a text.

perplexity: the text is cut into windows of --context tokens (512, or the model's context if that is shorter) that do
not overlap, and the second half of each is scored, as llama-perplexity does. With a sparse --selector that half is
computed like decode, --step tokens at a time, because prompts are dense. JSON: perplexity, error (one standard error),
tokens, context; for a sparse model sparsity.

agreement: compares --selector with --against (default all) on a text that both are given token by token, in windows of
--context tokens of which the first 16 are a prompt. The model is loaded twice if --against is not all, or if neurons
are split between a GPU and the CPU; all is then that of the CPU alone. JSON: top1_agreement (share of positions at
which both find the same token most likely), mean_kl (of --against's distribution relative to --selector's, in nats),
max_abs_logit_diff, tokens (positions), active_fraction (neurons computed in full), candidate_fraction, recall (of a
predictor), bytes_per_token, selector, against, context, step.

The selector is used in every layer, as with --no-trial: this measures its quality, not its speed.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import (
    Output,
    config_flags,
    config_from,
    model_flag,
    open_llm,
    open_model,
    sparsity_summary,
    sparsity_text,
)
from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint

SELECTORS = EngineConfig.__dataclass_fields__["selector"].metadata["choices"]
DENSE = ("auto", "all")  # auto is dense or exact, which give the same answer


def configure(parser: argparse.ArgumentParser) -> None:
    measures = ("perplexity", "agreement")
    parser.add_argument("measure", choices=measures, metavar="perplexity|agreement", help="what to measure")
    parser.add_argument("--file", required=True, metavar="TEXT", help="a UTF-8 text file")
    model_flag(parser)
    parser.add_argument("--against", choices=SELECTORS, help="agreement: the selector to compare with (default all)")
    parser.add_argument("--tokens", type=int, metavar="N", help="agreement: compare at most N positions")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="tokens computed per step, like decode with a batch of N, up to --max-batch and 32; default: 1 for sparse "
        "selectors and agreement, otherwise as many as is fastest",
    )
    config_flags(parser, EngineConfig, "engine")


def execute(args: argparse.Namespace, out: Output) -> int:
    engine = replace(config_from(args, EngineConfig, recall_every=1), trial=False)
    _check(args, engine)
    text = _read(args.file)
    if not engine.context:  # 512 tokens, or the model's context if that is shorter
        engine = replace(engine, context=min(512, open_model(args.model, engine, out).config.context_length))
    measure = _perplexity if args.measure == "perplexity" else _agreement
    out.document(measure(args, engine, text, out))
    return 0


def _check(args: argparse.Namespace, engine: EngineConfig) -> None:
    if args.measure != "agreement" and (args.against is not None or args.tokens is not None):
        raise RequestError("--against and --tokens are options of eval agreement")
    if args.tokens is not None and args.tokens < 1:
        raise RequestError(f"--tokens must be at least 1, not {args.tokens}")
    if args.step is not None:
        from powerinfer.kernels.cpu import NEURON_TOKENS

        limit = min(NEURON_TOKENS, engine.max_batch)
        if not 1 <= args.step <= limit:
            raise RequestError(f"--step must be between 1 and {limit}: larger steps do not run sparsely")


def _perplexity(args: argparse.Namespace, engine: EngineConfig, text: str, out: Output) -> dict[str, Any]:
    from powerinfer.cli.progress import Bar
    from powerinfer.evaluate import perplexity_windows, windows_perplexity
    from powerinfer.runtime.runner import SCORE_ROWS

    windows: list[list[int]] = []

    def check(checkpoint: Checkpoint) -> None:
        windows.extend(perplexity_windows(checkpoint.tokenizer(), text, engine.context))

    with open_llm(args.model, engine, out, check) as llm, Bar() as bar:
        dense = args.step is None and engine.selector in DENSE
        result = windows_perplexity(llm, windows, bar, SCORE_ROWS if dense else args.step or 1)
        sparsity = None if dense else sparsity_summary(llm)
    out.line(f"perplexity {result.perplexity:.4f} +- {result.error:.4f}, {result.tokens} tokens scored")
    _show_sparsity(sparsity, out)
    return {**asdict(result), "context": engine.context, **({"sparsity": sparsity} if sparsity else {})}


def _agreement(args: argparse.Namespace, engine: EngineConfig, text: str, out: Output) -> dict[str, Any]:
    from powerinfer.cli.progress import Bar
    from powerinfer.evaluate import agreement, agreement_windows
    from powerinfer.sparsity.selection import select

    against, step = args.against or "all", args.step or 1
    one, another = _with_selector(engine, engine.selector, against), _with_selector(engine, against, engine.selector)
    checkpoint = open_model(args.model, engine, out)
    agreement_windows(checkpoint.tokenizer(), text, engine.context, args.tokens)
    for each in (one, another):
        select(checkpoint, each)  # refused now, and not once the other is loaded
    with open_llm(args.model, one, out) as llm, ExitStack() as stack:
        other = None
        if against != "all":
            other = stack.enter_context(open_llm(args.model, another, out))
        elif "gpu_share" in (llm.sparsity or {}):  # neurons are split: no device has a layer's dense matrices
            other = stack.enter_context(open_llm(args.model, replace(another, gpu="none", vram=None), out))
        bar = stack.enter_context(Bar())
        result = agreement(llm, other, text, engine.context, args.tokens, step, bar)
        sparsity = sparsity_summary(llm)
    out.line(f"{engine.selector} against {against}, {result.tokens} position{'s' * (result.tokens != 1)}")
    out.line(f"{'same top token':<18}{100 * result.top1_agreement:.2f} %")
    out.line(f"{'mean KL':<18}{result.mean_kl:.3g} nats")
    out.line(f"{'logits differ by':<18}{result.max_abs_logit_diff:.3g} at most")
    _show_sparsity(sparsity, out)
    shown = {name: (sparsity or {}).get(name) for name in ("candidate_fraction", "recall", "bytes_per_token")}
    about = {"selector": engine.selector, "against": against, "context": engine.context, "step": step}
    return {**asdict(result), **shown, **about}


def _with_selector(engine: EngineConfig, selector: str, other: str) -> EngineConfig:
    """The options with one of the two selectors that are compared; --threshold applies to the one that uses it."""
    mine = selector == "threshold" or other != "threshold"
    return replace(engine, selector=selector, threshold=engine.threshold if mine else None)


def _show_sparsity(sparsity: dict[str, Any] | None, out: Output) -> None:
    if sparsity is not None:
        out.line(f"{'neurons':<18}{sparsity_text(sparsity)}")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
