"""Measure a model's quality, on a text or in tasks.

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

tasks: how often the right one of several choices is the most likely continuation, as lm-eval counts it without
examples: acc by the sum of log-probabilities, acc_norm by that sum divided by the choice's characters. Each --file
holds the items of one task, as HellaSwag and ARC are published, as LLM-Adapters has PIQA and ARC, or as lines of
{"context": ..., "choices": [...], "answer": index or text}. An item's beginning is computed once for all its choices;
the choices of a sparse --selector --step tokens at a time. That is for selectors that are not exact: auto, all and
exact give the same answer up to rounding, also where the activation makes zeros itself (relu, cats), and all at once is
fastest. JSON:
tasks (file, items, acc, acc_error, acc_norm, acc_norm_error, chance, cut: items longer than the context, of which the
end was scored), acc and acc_norm (means of the tasks), limit, context; for a sparse selector sparsity.

The selector is used in every layer, as with --no-trial: this measures its quality, not its speed. Texts are given, so
nothing is drafted (--speculate).
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
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
from powerinfer.text.model_text import tokenizer_of

if TYPE_CHECKING:
    from powerinfer.evaluate import Accuracy
    from powerinfer.formats.checkpoint import Checkpoint

SELECTORS = EngineConfig.__dataclass_fields__["selector"].metadata["choices"]
DENSE = ("auto", "all")  # auto is dense or exact, which give the same answer


def configure(parser: argparse.ArgumentParser) -> None:
    measures = ("perplexity", "agreement", "tasks")
    parser.add_argument("measure", choices=measures, metavar="|".join(measures), help="what to measure")
    parser.add_argument(
        "--file", required=True, action="append", metavar="FILE", help="UTF-8 text; tasks: items, repeatable"
    )
    model_flag(parser)
    parser.add_argument("--against", choices=SELECTORS, help="agreement: the selector to compare with (default all)")
    parser.add_argument("--tokens", type=int, metavar="N", help="agreement: compare at most N positions")
    parser.add_argument("--limit", type=int, metavar="N", help="tasks: only the first N items of each file")
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
    engine = replace(engine, speculate="off")
    if args.measure == "tasks":
        out.document(_tasks(args, engine, out))
        return 0
    text = _read(args.file[0])
    if not engine.context:  # 512 tokens, or the model's context if that is shorter
        engine = replace(engine, context=min(512, open_model(args.model, engine, out).config.context_length))
    measure = _perplexity if args.measure == "perplexity" else _agreement
    out.document(measure(args, engine, text, out))
    return 0


def _check(args: argparse.Namespace, engine: EngineConfig) -> None:
    if args.measure != "agreement" and (args.against is not None or args.tokens is not None):
        raise RequestError("--against and --tokens are options of eval agreement")
    if args.measure != "tasks" and (args.limit is not None or len(args.file) > 1):
        raise RequestError("--limit and several --file are options of eval tasks")
    if engine.speculate not in ("auto", "off"):
        raise RequestError("eval scores texts that are given, and drafts nothing: leave out --speculate")
    for name in ("tokens", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise RequestError(f"--{name} must be at least 1, not {value}")
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
        windows.extend(perplexity_windows(tokenizer_of(checkpoint), text, engine.context))

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
    first, another = _with_selector(engine, engine.selector, against), _with_selector(engine, against, engine.selector)
    checkpoint = open_model(args.model, engine, out)
    agreement_windows(tokenizer_of(checkpoint), text, engine.context, args.tokens)
    for each in (first, another):
        select(checkpoint, each)  # refused now, and not once the other is loaded
    with open_llm(args.model, first, out) as llm, ExitStack() as stack:
        other = None
        if against != "all":
            other = stack.enter_context(open_llm(args.model, another, out))
        elif "gpu_share" in (llm.sparsity or {}):  # neurons are split: no device has a layer's dense matrices
            another = replace(another, gpu="none", vram=None, split_mode="layer")
            other = stack.enter_context(open_llm(args.model, another, out))
        bar = stack.enter_context(Bar())
        result = agreement(llm, other, text, engine.context, args.tokens, step, bar)
        sparsity = sparsity_summary(llm)
    out.line(f"{engine.selector} against {against}, {result.tokens} position{'s' * (result.tokens != 1)}")
    out.line(f"{'same top token':<18}{100 * result.top1_agreement:.2f} %")
    out.line(f"{'mean KL':<18}{result.mean_kl:.3g} nats")
    out.line(f"{'logits differ by':<18}{result.max_abs_logit_diff:.3g} at most")
    _show_sparsity(sparsity, out)
    shown = {name: (sparsity or {}).get(name) for name in ("candidate_fraction", "recall", "bytes_per_token")}
    settings = {"selector": engine.selector, "against": against, "context": engine.context, "step": step}
    return {**asdict(result), **shown, **settings}


def _tasks(args: argparse.Namespace, engine: EngineConfig, out: Output) -> dict[str, Any]:
    from powerinfer.cli.progress import Bar
    from powerinfer.evaluate import accuracy, encode_items
    from powerinfer.runtime.runner import SCORE_ROWS
    from powerinfer.tasks import read_items

    read = [read_items(Path(path), args.limit) for path in args.file]
    checkpoint = open_model(args.model, engine, out)
    tokenizer, most = tokenizer_of(checkpoint), engine.context or checkpoint.config.context_length
    encoded = [encode_items(tokenizer, items, most) for items in read]
    if not engine.context:
        longest = max(len(tokens) - 1 for items in encoded for item in items for tokens in item.texts)
        engine = replace(engine, context=longest)
    dense = args.step is None and engine.selector in DENSE
    with open_llm(args.model, engine, out) as llm, Bar() as bar:
        results = [accuracy(llm, items, bar, SCORE_ROWS if dense else args.step or 1) for items in encoded]
        sparsity = None if dense else sparsity_summary(llm)
    names = [Path(path).name for path in args.file]
    for name, result in zip(names, results, strict=True):
        _show_accuracy(name, result, engine.context, out)
    means = {name: sum(getattr(result, name) for result in results) / len(results) for name in ("acc", "acc_norm")}
    if len(results) > 1:
        out.line(f"{'mean':<18}acc {100 * means['acc']:.1f} %, acc_norm {100 * means['acc_norm']:.1f} %")
    _show_sparsity(sparsity, out)
    tasks = [{"file": name, **asdict(result)} for name, result in zip(names, results, strict=True)]
    settings = {"limit": args.limit, "context": engine.context}
    return {"tasks": tasks, **means, **settings, **({"sparsity": sparsity} if sparsity else {})}


def _show_accuracy(name: str, result: Accuracy, context: int | None, out: Output) -> None:
    acc, norm = _share(result.acc, result.acc_error), _share(result.acc_norm, result.acc_norm_error)
    guessing = f"guessing: {100 * result.chance:.1f} %"
    out.line(f"{name:<18}acc {acc}, acc_norm {norm}, {result.items} items; {guessing}")
    if result.cut:
        out.line(f"{'':<18}{result.cut} longer than the context of {context} tokens: their ends were scored")


def _share(value: float, error: float) -> str:
    return f"{100 * value:.1f} +- {100 * error:.1f} %"


def _with_selector(engine: EngineConfig, selector: str, other: str) -> EngineConfig:
    """The options with one of the two selectors that are compared; --threshold applies to the one that uses it."""
    applies = selector == "threshold" or other != "threshold"
    return replace(engine, selector=selector, threshold=engine.threshold if applies else None)


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
