"""Show what memory for some of a model's experts would hit, under each policy.

A fast memory holds a number of experts of each layer. static: the most frequent ones of the profile; lru: those that
were selected last; lfu: those selected most often of late; dynamic: static at first, then experts change places with
ones that have become clearly more frequent, a few a step. By the profile (`powerinfer profile`) alone the hits of
static and lru are predicted, with the range of parts of its texts: what a policy hits depends on the text. --trace
FILE, which `powerinfer profile --trace FILE` recorded on other text, is decoded under all of them, a token at a time.
Its result is kept for `powerinfer report`.

--disk: the same of RAM, where the experts rest on disk (docs/disk.md) and each one that RAM lacks is read in place of
another. Beside static, lru and lfu, window: those that the last tokens selected most often.

JSON: path (of the profile), tokens (of it), trace (null, or path, tokens: replayed ones, same_text: it is the text of
the profile), disk, expert_bytes (of one, mean over the layers), at (slots of a layer, on average; share of all experts;
bytes of all slots; policies: by name predicted, measured (shares of the selections that hit), low, high (the range of
predicted over parts of the profile's texts), copies (experts copied, or read, for a token), bytes (of these); null: not
known), off, off_lru (largest difference between predicted and measured hits of static, and of lru).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig
from powerinfer.errors import PowerInferError, RequestError

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.expert_files import TraceFile


def configure(parser: argparse.ArgumentParser) -> None:
    from powerinfer.placement.expert_slots import TOKENS

    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--trace", metavar="FILE", help="replay this trace, of `powerinfer profile --trace FILE`")
    parser.add_argument("--disk", action="store_true", help="of RAM, where the experts rest on disk")
    parser.add_argument(
        "--slots",
        metavar="N,N,...",
        help="experts of a layer that have a slot, on average; default: 1/8 to 3/4 of them",
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"maximum number of tokens to replay (default {TOKENS})"
    )
    config_flags(parser, EngineConfig, "engine", only=("quantize", "prepared"))


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.expert_files import open_expert_profile_file
    from powerinfer.placement import expert_slots

    slots = _slots(args.slots)
    if args.tokens < 1:
        raise RequestError(f"--tokens must be a whole number of at least 1, not {args.tokens}")
    engine = config_from(args, EngineConfig)
    checkpoint = open_model(args.model, engine, out)
    if not checkpoint.config.experts:
        raise RequestError("this model has no experts; `powerinfer inspect` shows what it has")
    file = open_expert_profile_file(checkpoint, engine.prepared)
    trace = _trace(args, checkpoint, engine.prepared)
    selected = None if trace is None else expert_slots.some_tokens(trace.selected, trace.corpus_tokens, args.tokens)
    nbytes = expert_slots.expert_bytes(checkpoint)
    with Bar() as bar:
        hits = expert_slots.compare(file.profile, nbytes, slots, selected, checkpoint.fingerprint, bar, disk=args.disk)
    if trace is not None and not args.disk:
        try:
            expert_slots.keep(checkpoint, engine.prepared, hits)
        except (OSError, PowerInferError) as error:
            out.note(f"the result is not kept for a report: {error}")
    same = trace is not None and trace.details.get("key") == file.details.get("key")
    document = {
        "path": str(file.path),
        "tokens": file.profile.tokens,
        "trace": None if trace is None else {"path": str(trace.path), "tokens": hits.tokens, "same_text": same},
        "expert_bytes": sum(nbytes.values()) / len(nbytes),
        "disk": args.disk,
        "at": expert_slots.document(hits)["at"],
        "off": hits.off("static"),
        "off_lru": hits.off("lru"),
    }
    _show(document, out)
    out.document(document)
    return 0


def _slots(text: str | None) -> list[float]:
    try:
        slots = [float(one) for one in text.split(",")] if text else []
    except ValueError:
        slots = [0.0]
    if not all(0 < one < 1 << 16 for one in slots) or len(slots) > 64:
        raise RequestError(f"--slots must be up to 64 positive numbers, such as 16,32,64, not {text}")
    return slots


def _trace(args: argparse.Namespace, checkpoint: Checkpoint, prepared: str | None) -> TraceFile | None:
    from powerinfer.formats.expert_files import open_trace, trace_place

    return None if args.trace is None else open_trace(checkpoint, trace_place(checkpoint, prepared, Path(args.trace)))


def _show(document: dict[str, Any], out: Output) -> None:
    trace = document["trace"]
    out.line(f"{document['path']}: {document['tokens']} tokens; an expert has {document['expert_bytes'] / 1e6:.2f} MB")
    if trace is not None:
        out.line(f"{trace['path']}: {trace['tokens']} tokens replayed")
    for line in table(document["at"], document["disk"]):
        out.line(line)
    for name, key in (("static", "off"), ("lru", "off_lru")):
        if document[key] is not None:
            out.line(f"{name}: predicted and measured hits differ by at most {100 * document[key]:.1f} points")
    if trace is None:
        policies = "all but lru" if document["disk"] else "lfu and dynamic"
        out.note(f"{policies} need a trace of other text: `powerinfer profile --trace FILE`, and --trace FILE here")
    elif trace["same_text"]:
        out.note("the trace is of the same text as the profile: the hits of static are too good; use other text")


def ranged(hits: dict[str, Any]) -> str:
    """Predicted hits of a policy, and their range over parts of the text."""
    if hits["low"] is None:
        return _percent(hits["predicted"])
    return f"{_percent(hits['predicted'])} ({100 * hits['low']:.1f} to {100 * hits['high']:.1f})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def table(rows: list[dict[str, Any]], disk: bool = False) -> list[str]:
    """A line for each policy with each number of slots."""
    lines = [
        f"{'slots':>7} {'of all':>8} {'memory':>10}  {'policy':<8} {'predicted (range)':>24} {'measured':>9}  "
        f"{'read' if disk else 'copied'} a token"
    ]
    for row in rows:
        place = f"{row['slots']:>7.4g} {100 * row['share']:>6.1f} % {row['bytes'] / 2**30:>6.2f} GiB"
        for name, hit in row["policies"].items():
            hits = f"{ranged(hit):>24} {_percent(hit['measured']):>9}"
            copies = "" if hit["copies"] is None else f"  {hit['copies']:.2f} experts, {hit['bytes'] / 1e6:.1f} MB"
            if hit["predicted"] is not None or hit["measured"] is not None:
                lines.append(f"{place}  {name:<8} {hits}{copies}")
                place = " " * len(place)
    return lines
