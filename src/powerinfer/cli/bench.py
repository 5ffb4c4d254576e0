"""Measure how fast a model runs on this machine.

Prefill is the time from a prompt of --prompt-tokens to its first token, decode the time of --gen-tokens after a
one-token prompt; both greedy, after one warm-up round. The figures are medians of --repeat rounds.

--compare decodes the same tokens densely and sparsely in turn, and ends with the ratio. --selector auto, the default,
has the trial's choice of layers; --selector exact --no-trial skips neurons in every layer.

JSON: prefill_tok_s and decode_tok_s (median, min, max), bytes_per_token (weights read for one token), bandwidth_gb_s
(those bytes times the median decode speed), load_s, peak_rss_mb, choices (what was chosen and why); beside a GPU
streams_from (tokens of a step from which on it computes what is in RAM, too, or null: never). For a sparse model
bytes_per_token is what decoding actually read, and sparsity has: selector, active_fraction and candidate_fraction (of
the neurons), recall (of the predictors, on sampled tokens), bytes_per_token (of the FFNs), layers (the same for each,
with its ways by batch size and the reason); for one split between GPU and CPU active_fraction, gpu_share (of the
neurons that fired, those on the GPU), jobs (share of the FFNs in which the CPU had work), traded (neurons that --adjust
moved to the GPU) and streams_from. With --trace, trace: seconds of a step in total and by kind of work, overlap (1 -
the share of it in which neither device worked), path. Where weights are read from disk, disk: mode, bytes,
bytes_per_token, read_gb_s, stall_seconds, hit_rate (of neurons and experts on disk), guess_rate (of experts read
ahead), small_reads (of neurons) and joined_reads (in how many the disk read these) of the last round's decode. With
drafts (--speculate), speculation: their source, steps, drafted, accepted, places, tokens, seconds, plain_seconds, gain.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import (
    Output,
    config_flags,
    config_from,
    disk_text,
    model_argument,
    model_flag,
    open_llm,
)
from powerinfer.cli.neurons import neuron_rows
from powerinfer.config import EngineConfig
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.runtime.params import SamplingParams
from powerinfer.system import peak_memory

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.runtime.engine import LLM


PROMPT = 512  # tokens, if the context holds them
PROMPT_HELP = f"prompt length (default {PROMPT}, or what the context holds)"
TRACED = 8  # steps of a trace
LOOKUP = (
    "lookup finds drafts in what was written before, and here that begins with one token: `drafted` and `accepted` of "
    "`run --json`, or /stats in `chat`, say what it brings for a text of yours"
)


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help=PROMPT_HELP)
    parser.add_argument("--gen-tokens", type=int, default=128, metavar="N", help="tokens to decode (default 128)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="measured rounds (default 5)")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of steps on the GPU and the CPU")
    parser.add_argument("--compare", action="store_true", help="decode densely and sparsely in turn, for the ratio")
    config_flags(parser, EngineConfig, "engine")


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.formats.prepared import check_replaceable

    asked = 1 if args.prompt_tokens is None else args.prompt_tokens
    if min(asked, args.repeat) < 1 or args.gen_tokens < 2:
        raise RequestError("bench needs --prompt-tokens and --repeat of at least 1 and --gen-tokens of at least 2")
    engine = replace(config_from(args, EngineConfig), prefix_cache=False)  # every round computes its whole prompt

    def fit(checkpoint: Checkpoint) -> None:
        context = engine.context or checkpoint.config.context_length
        args.prompt_tokens = _prompt_tokens(args.prompt_tokens, args.gen_tokens, context)

    if args.compare and (args.trace is not None or args.prompt_tokens is not None):
        raise RequestError("--compare decodes after a prompt of one token: leave out --prompt-tokens and --trace")
    with open_llm(args.model, engine, out, fit) as llm:
        if args.compare:
            return _compare(llm, args, out)
        if args.trace:
            check_replaceable(Path(args.trace), b"traceEvents", "trace")
            with llm.traced():  # an error now, not after all rounds
                pass
        prefill, decode, tokens_a_step = _measure(llm, args)
        sparsity = llm.sparsity
        document = {
            "model": llm.config.name,
            "prompt_tokens": args.prompt_tokens,
            "gen_tokens": args.gen_tokens,
            "repeat": args.repeat,
            "prefill_tok_s": _spread(prefill),
            "decode_tok_s": _spread(decode),
            **_bytes_read(llm, _spread(decode)["median"] / tokens_a_step),
            "load_s": llm.load_s,
            "peak_rss_mb": peak_memory() / (1 << 20),
            "choices": llm.choices,
            **({"streams_from": llm.streams_from} if "prefill" in llm.choices else {}),
            **({"sparsity": sparsity} if sparsity else {}),
            **({"disk": _disk(llm.disk, args.gen_tokens)} if llm.disk else {}),
            **({"speculation": _speculation(llm)} if llm.drafts else {}),
            **({"trace": _trace(llm, Path(args.trace))} if args.trace else {}),
        }
        neurons = neuron_rows(llm, sparsity) if sparsity else {}
    _show(document, neurons, out)
    out.document(document)
    return 0


def _prompt_tokens(asked: int | None, gen_tokens: int, context: int) -> int:
    """Tokens of the prompt, None asks for the default. RequestError if the context does not hold the measurement."""
    room = context - 1  # each round generates one token after the prompt, or --gen-tokens after one token
    if gen_tokens > room:
        raise RequestError(
            f"--gen-tokens {gen_tokens} after a prompt of one token do not fit the context of {context} tokens: lower "
            "--gen-tokens or raise --context"
        )
    if asked is not None and asked > room:
        raise RequestError(
            f"--prompt-tokens {asked} and the token after them do not fit the context of {context} tokens: lower "
            "--prompt-tokens or raise --context"
        )
    return min(PROMPT, room) if asked is None else asked


def _measure(llm: LLM, args: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Prefill and decode rates of each measured round, and tokens that a step brought; afterwards `llm.sparsity` is
    that of the last decode."""
    from powerinfer.cli.progress import Bar

    vocab = llm.config.vocab_size
    prompt = [(7919 * i + 13) % vocab for i in range(args.prompt_tokens)]  # spread over the vocabulary, always the same
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    many = SamplingParams(max_tokens=args.gen_tokens, temperature=0.0, ignore_eos=True)
    prefill, decode, steps = [], [], 0
    with Bar() as bar:
        for i in range(args.repeat + 1):
            bar("measuring", i, args.repeat + 1)
            first = llm.generate([prompt], once)[0].timings.prefill_tok_s
            llm.clear_sparsity()  # every round decodes the same tokens
            before = llm.stats().steps + 1  # that of the prompt
            second = llm.generate([prompt[:1]], many)[0].timings.decode_tok_s
            assert first is not None and second is not None, "a round without tokens"
            if i:
                prefill.append(first)
                decode.append(second)
                steps += llm.stats().steps - before
    return prefill, decode, args.repeat * (args.gen_tokens - 1) / steps


def _compare(llm: LLM, args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.comparison import SIDES, compare
    from powerinfer.sparsity.verdict import verdict

    params = SamplingParams(max_tokens=args.gen_tokens, temperature=0.0, ignore_eos=True)
    total, begun = (args.repeat + 1) * len(SIDES), 0
    with Bar() as bar:

        def watch(side: str, tokens: int) -> None:
            nonlocal begun
            begun += tokens == 1
            bar("measuring", begun - 1, total)

        comparison = compare(llm, [13 % llm.config.vocab_size], params, args.repeat, watch)
    for name, run in (("dense", comparison.dense), ("sparse", comparison.sparse)):
        low, high = min(run.tok_s), max(run.tok_s)
        read = "" if run.bytes_per_token is None else f", {run.bytes_per_token / 1e6:.1f} MB of weights a token"
        out.line(f"{name:<14}{run.median:>10.1f} tok/s   ({low:.1f} to {high:.1f}){read}")
    for name, text in (neuron_rows(llm, comparison.sparsity) | {"selector": llm.choices["selector"]}).items():
        out.line(f"{name:<14}{text}")
    out.line(f"{'tokens':<14}the first {comparison.same_tokens[0]} of {comparison.same_tokens[1]} are the same")
    out.line(verdict(comparison.ratio))
    if comparison.disturbed:
        out.note(f"other programs took {comparison.disturbed:.1f} cores meanwhile: on a quiet machine it may differ")
    load = {"sparsity": comparison.sparsity, "load_s": llm.load_s, "choices": llm.choices}
    out.document({"model": llm.config.name, "repeat": args.repeat, **comparison.document(), **load})
    return 0


def _trace(llm: LLM, path: Path) -> dict[str, Any]:
    """Decode a few more tokens and write their trace."""
    import json

    from powerinfer.devices.replayed_spans import UNRECORDED
    from powerinfer.formats.prepared import write_small

    with llm.traced() as trace:
        llm.generate([[1]], SamplingParams(max_tokens=TRACED + UNRECORDED, temperature=0.0, ignore_eos=True))
    try:
        write_small(path, json.dumps(trace.document()).encode())
    except OSError as error:
        raise PowerInferError(f"cannot write {path}: {error.strerror}") from None
    return {**trace.summary(), "path": str(path)}


def _spread(values: list[float]) -> dict[str, float]:
    from statistics import median

    return {"median": median(values), "min": min(values), "max": max(values)}


def _bytes_read(llm: LLM, steps_s: float) -> dict[str, Any]:
    read = llm.bytes_per_token
    return {"bytes_per_token": read, "bandwidth_gb_s": None if read is None else read * steps_s / 1e9}


def _disk(disk: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {**disk, "bytes_per_token": disk["bytes"] / tokens}


def _speculation(llm: LLM) -> dict[str, Any]:
    stats = llm.stats().speculation
    return {"drafts": llm.drafts, **asdict(stats), "gain": stats.gain}


def _show(document: dict[str, Any], neurons: dict[str, str], out: Output) -> None:
    for name, label in (("prefill_tok_s", "prefill"), ("decode_tok_s", "decode")):
        rate = document[name]
        out.line(f"{label:<14}{rate['median']:>10.1f} tok/s   ({rate['min']:.1f} to {rate['max']:.1f})")
    if document["bytes_per_token"] is not None:
        megabytes = document["bytes_per_token"] / 1e6
        out.line(f"{'weights':<14}{megabytes:>10.1f} MB a token, read at {document['bandwidth_gb_s']:.1f} GB/s")
    for name, text in neurons.items():
        out.line(f"{name:<14}{text}")
    if "disk" in document:
        disk = document["disk"]
        out.line(f"{'disk':<14}{disk['bytes_per_token'] / 1e6:>10.1f} MB a token; {disk_text(disk)}")
    if "speculation" in document:
        drafts = document["speculation"]
        text = f"{drafts['accepted']} of {drafts['drafted']} drafts right"
        if steps := drafts["steps"]:
            brought = f"{drafts['tokens'] / steps:.1f} tokens a step, {drafts['gain']:.2f} times as fast as without"
            text += f"; {steps} steps had some, which brought {brought}"
        out.line(f"{'drafts':<14}{text}")
        if drafts["drafts"] == "lookup":
            out.note(LOOKUP)
    if "trace" in document:
        trace = document["trace"]
        out.line(
            f"{'trace':<14}{1e3 * trace['step_s']:.2f} ms a step: GPU {1e3 * trace['gpu_s']:.2f}, CPU "
            f"{1e3 * trace['cpu_s']:.2f}, both {1e3 * trace['both_s']:.2f}, neither "
            f"{1e3 * trace['neither_s']:.2f}; {trace['path']}"
        )
    out.line(f"{'peak memory':<14}{document['peak_rss_mb']:>10.1f} MiB")
    for name, reason in document["choices"].items():
        out.line(f"{name:<14}{reason}")
