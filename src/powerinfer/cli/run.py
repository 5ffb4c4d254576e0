"""Answer one prompt; the text streams to stdout as it is generated.

The prompt is formatted by the model's chat template; --raw passes it unchanged, for the model to continue, and so does
a model without a template. Text that is piped in follows PROMPT after a blank line; without PROMPT, or with -, it is
the prompt. `run MODEL PROMPT` is `run PROMPT -m MODEL`. The answer ends where the model ends it, or with the context.
Ctrl-C ends it and keeps what was generated.

Of a model that thinks before it answers only the answer is on stdout; its thoughts are shown dimmed on a terminal's
stderr. --think off turns them off where the model can do without, --reasoning-budget limits them.

JSON: text, reasoning (of a model that thinks), token_ids, prompt_tokens, completion_tokens, cached_tokens,
finish_reason, timings (load_s, ttft_s, prefill_tok_s, decode_tok_s), sampling (temperature, top_k, ...; defaults: where
those come from that no flag gave: generation_config.json, GGUF metadata, model card, powerinfer, or powerinfer for this
model), logprobs if requested; for a sparse model sparsity (selector, active_fraction, recall, ...: over all layers);
with drafts (--speculate) drafted and accepted, how many of these were right; where weights are read from disk, disk
(mode, bytes, read_gb_s, stall_seconds, hit_rate, guess_rate, small_reads, joined_reads).
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import (
    SAMPLING,
    Output,
    checked_text,
    config_flags,
    config_from,
    disk_text,
    model_flag,
    open_llm,
    refuse_model_as_prompt,
    small_model_note,
    sparsity_summary,
    with_model_defaults,
)
from powerinfer.cli.keys import unechoed
from powerinfer.cli.main import INTERRUPTED
from powerinfer.cli.screen import has_styles
from powerinfer.cli.thinking import asked_thinking, cannot_think, thinking_flags, thought_reader
from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError
from powerinfer.progress import Progress, silent
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import Completion
from powerinfer.runtime.thinking import thinking_variables
from powerinfer.text.model_text import chat_template_of
from powerinfer.text.tool_parser import AnswerDelta, AnswerParser, Reasoning

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.runtime.engine import LLM, Stream
    from powerinfer.runtime.sampling import TokenLogprob
    from powerinfer.text.thoughts import Thinking

LARGEST = 16 << 20  # bytes of a prompt on stdin: more tokens than any context
PATIENCE = 2.0  # seconds before it is said that the rest of the prompt is awaited on stdin


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; -: read it from stdin")
    parser.add_argument("-p", "--prompt", dest="flagged", metavar="PROMPT", help="the prompt, as a flag")
    model_flag(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="no chat template: the model continues the prompt")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print speed, and what was chosen and why, to stderr"
    )
    parser.add_argument(
        "--json-schema",
        dest="schema",
        metavar="SCHEMA",
        help="the answer is JSON that this schema validates: a file, or its text",
    )
    parser.add_argument(
        "--grammar", dest="gbnf", metavar="FILE", help="the answer matches this grammar, in llama.cpp's GBNF"
    )
    parser.add_argument("--regex", dest="pattern", metavar="PATTERN", help="the answer matches this regular expression")
    thinking_flags(parser)
    config_flags(parser, SamplingParams, SAMPLING, {"max_tokens": None})
    config_flags(parser, EngineConfig, "engine")


def execute(args: argparse.Namespace, out: Output) -> int:
    constraint = _constraint(args)
    params = config_from(args, SamplingParams, **constraint)
    if constraint:
        out.verbatim()
    _check_flags(args, params)
    prompt = _prompt(args.flagged if args.prompt is None else args.prompt, out)
    check = silent if args.system is None else _check_system
    with open_llm(args.model, config_from(args, EngineConfig), out, check, alone="max_batch" not in args) as llm:
        if llm.template is None and not args.raw:
            out.note("this model has no chat template: it continues the prompt, as with --raw")
            args.raw = True
        params = with_model_defaults(params, llm, args)
        wanted, reader = asked_thinking(args), None
        tokens = llm.encode(prompt) if args.raw else _chat(llm, prompt, args.system, wanted)
        if not args.raw:
            reader, params = thought_reader(llm, params, tokens, wanted)
            if reason := cannot_think(llm, wanted):
                out.note(reason)
        with unechoed(), reading() as progress:
            events = llm.stream(tokens, params, progress=progress)
            status, document = answer(events, out, reader=reader, hide=args.hide_thinking)
        document["sampling"] = describe_sampling(llm, params)
        out.text("" if document["text"].endswith("\n") else "\n")
        small_model_note(args.model, out)
        if args.verbose:
            _explain(llm, document, out)
        if reason := describe_end(document, params.max_tokens):
            out.aside(reason)
        sparsity = sparsity_summary(llm)
        more = {name: value for name, value in (("sparsity", sparsity), ("disk", llm.disk)) if value}
        out.document({**document, **more})
    return status


def _check_flags(args: argparse.Namespace, params: SamplingParams) -> None:
    """RequestError for flags that do not go together."""
    template_flags = {"--system": args.system, "--think": args.think, "--reasoning-budget": args.reasoning_budget}
    for flag, value in template_flags.items():
        if args.raw and value is not None:
            raise RequestError(f"{flag} needs the chat template, which --raw does not use")
    if params.logprobs is not None and not args.json:
        raise RequestError("--logprobs are written with --json alone: give it, too, or leave them out")
    if args.prompt is not None and args.flagged is not None:
        raise RequestError("give the prompt once: as PROMPT or with --prompt")
    if args.prompt is not None and args.model is None:
        refuse_model_as_prompt(args.prompt)


def _constraint(args: argparse.Namespace) -> dict[str, str]:
    """Constraint of the answer, as fields of SamplingParams."""
    constraint: dict[str, str] = {}
    if args.schema is not None:
        inline = args.schema.lstrip()[:1] == "{"
        constraint["json_schema"] = checked_text(args.schema, "the schema") if inline else _file(args.schema)
    if args.gbnf is not None:
        constraint["grammar"] = _file(args.gbnf)
    if args.pattern is not None:
        constraint["regex"] = checked_text(args.pattern, "the regular expression")
    return constraint


def _file(path: str) -> str:
    try:
        return checked_text(Path(path).read_bytes(), path)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None


def _check_system(checkpoint: Checkpoint) -> None:
    if chat_template_of(checkpoint) is None:
        raise RequestError("--system needs a chat template, and this model has none")


def _prompt(prompt_argument: str | None, out: Output) -> str:
    """PROMPT and what is piped in, or one of them."""
    if prompt_argument in (None, "-"):
        piped = "" if sys.stdin is None or sys.stdin.isatty() else _piped()
        if not piped.strip():
            raise RequestError('no prompt; `powerinfer run "..."`, or pipe one in; `powerinfer chat` is a conversation')
        return piped
    prompt = checked_text(prompt_argument or "", "the prompt")
    piped = _piped().strip("\n") if _is_piped(out) else ""
    return f"{prompt}\n\n{piped}" if piped else prompt


def _is_piped(out: Output) -> bool:
    """Whether stdin is a file or a pipe, not a terminal or nothing. Says what it waits for if nothing arrives."""
    try:
        fd = sys.stdin.fileno()
        mode = os.fstat(fd).st_mode
    except (AttributeError, OSError, ValueError):  # it is closed, or no file of this process
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        from select import select

        if not select([fd], [], [], PATIENCE)[0]:
            out.note("reading the rest of the prompt from stdin; without one: < /dev/null")
        return True
    return stat.S_ISREG(mode)


def _piped() -> str:
    """The text on stdin; RequestError if it is binary or too large."""
    raw = sys.stdin.buffer.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise RequestError(f"the prompt on stdin is larger than {LARGEST >> 20} MiB")
    text = checked_text(raw, "the prompt on stdin")
    if "\0" in text:
        raise RequestError("the prompt on stdin is binary data, not text")
    return text


def _chat(llm: LLM, prompt: str, system: str | None, wanted: Thinking) -> list[int]:
    """The tokens of a conversation with one message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = [*first, {"role": "user", "content": prompt}]
    return llm.encode_chat(messages, chat_template_kwargs=thinking_variables(llm, wanted))


@contextmanager
def reading() -> Iterator[Progress]:
    """Display of how much of a prompt is computed, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield silent
        return
    from powerinfer.cli.progress import Bar

    with Bar() as bar:

        def progress(label: str, done: int, total: int) -> None:
            if done < total:
                bar(label, done, total)
            else:
                bar.close()

        yield progress


def describe_end(document: dict[str, Any], max_tokens: int | None) -> str:
    """The line for an answer that a limit ended, or that is a thought alone; "" for others.

    max_tokens: None where the limit was the context.
    """
    cut, empty = document["finish_reason"] == "length", not document["text"].strip()
    limit = "the context is full" if max_tokens is None else f"ended by --max-tokens {max_tokens}"
    if document.get("reasoning") and empty and document["finish_reason"] != "abort":
        return f"({limit} while it was thinking)" if cut else "(it thought, and ended without an answer)"
    return f"({limit})" if cut else ""


def answer(
    events: Stream, out: Output, *, trim: bool = False, reader: AnswerParser | None = None, hide: bool = False
) -> tuple[int, dict[str, Any]]:
    """Print a stream as it arrives; (exit status, document). Ctrl-C ends it, with the text so far.

    trim: print it without the white space that it begins with. reader: tells reasoning from the answer
    (`thought_reader`): it is shown on stderr if that is a terminal, and is in the document. hide: only how long it was
    is shown.
    """
    shown = _ShownAnswer(out, trim, hide)
    ids = shown.ids

    def texts() -> dict[str, Any]:
        return {} if reader is None else {"text": shown.text, "reasoning": "".join(shown.thoughts)}

    try:
        for event in events:
            if event.token_id is not None:
                ids.append(event.token_id)
            deltas: list[AnswerDelta] = [event.text]
            if reader is not None:
                deltas = [*reader.push(event.text)]
                deltas += [] if event.completion is None else reader.finish(event.finish_reason == "length")
            shown.add(deltas)
            if event.completion is not None:
                return 0, describe(event.completion) | texts()
    except KeyboardInterrupt:
        events.close()
        shown.add([] if reader is None else reader.finish(cut=True))
    finally:
        out.flush()
    document = {"text": shown.text, "token_ids": ids, "completion_tokens": len(ids), "finish_reason": "abort"}
    return INTERRUPTED, document | texts()


class _ShownAnswer:
    """An answer that is printed as it arrives; arguments as of `answer`."""

    def __init__(self, out: Output, trim: bool, hide: bool) -> None:
        self.pieces: list[str] = []
        self.thoughts: list[str] = []
        self.ids: list[int] = []  # of all tokens so far
        self._out, self._trim, self._hide = out, trim, hide
        self._marked = not hide and not has_styles(sys.stderr)  # words tell thoughts from the answer if nothing is dim

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, deltas: Sequence[AnswerDelta]) -> None:
        for delta in deltas:
            if isinstance(delta, str):
                self._add_text(delta)
            elif isinstance(delta, Reasoning):
                if self._marked and not self.thoughts:
                    self._out.thought("The thoughts:\n\n")
                self.thoughts.append(delta.text)
                self._out.thought("" if self._hide else delta.text)

    def _add_text(self, piece: str) -> None:
        if piece and self.thoughts and not any(self.pieces):
            self._out.thought(f"({len(self.ids)} tokens of thought)" if self._hide else "")
            self._out.thought("\n\nThe answer:\n\n" if self._marked else "\n\n")
        self.pieces.append(piece)
        self._out.text(piece.lstrip() if self._trim else piece)
        self._trim = self._trim and not piece.strip()


def describe(completion: Completion) -> dict[str, Any]:
    """A completion as the JSON document of `run`."""
    document: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "cached_tokens": completion.cached_tokens,
        "finish_reason": completion.finish_reason,
        "timings": asdict(completion.timings),
    }
    if completion.drafted:
        document |= {"drafted": completion.drafted, "accepted": completion.accepted}
    if completion.logprobs is not None:
        document["logprobs"] = [
            _logprob(one) | {"top": [_logprob(top) for top in one.top]} for one in completion.logprobs
        ]
    return document


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "text": token.text, "bytes": list(token.bytes), "logprob": token.logprob}


def describe_sampling(llm: LLM, params: SamplingParams) -> dict[str, Any]:
    """Settings by which an answer was sampled; defaults: where values come from that no flag gave."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: getattr(params, name) for name in names}
    defaults = any(values[name] == value for name, value in llm.sampling.values.items())
    return {**values, "defaults": llm.sampling.source if defaults else "powerinfer"}


def _explain(llm: LLM, document: dict[str, Any], out: Output) -> None:
    rows = {**llm.choices, **{name: f"{value:.3f}" for name, value in document.get("timings", {}).items() if value}}
    rows |= {name: value for name, value in document.items() if name.endswith("_tokens")}
    rows |= {name: document[name] for name in ("drafted", "accepted") if name in document}
    rows["sampling"] = ", ".join(f"{name} {value}" for name, value in document["sampling"].items())
    if (sparsity := llm.sparsity) is not None:
        from powerinfer.cli.neurons import neuron_rows

        rows |= neuron_rows(llm, sparsity)
    if llm.disk is not None:
        rows["disk reads"] = disk_text(llm.disk)
    if llm.checkpoint is not None and llm.checkpoint.unread:
        from powerinfer.formats.source import printable

        rows["keys not read"] = printable(", ".join(sorted(llm.checkpoint.unread)), 2000)
    for name, value in rows.items():
        out.aside(f"{name:<18}{value}")
