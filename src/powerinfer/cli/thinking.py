"""Flags of `run` and `chat` that concern thinking, and what tells thoughts from answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.text.thoughts import EFFORTS, Thinking
from powerinfer.text.tool_parser import AnswerParser

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM
    from powerinfer.runtime.params import SamplingParams

SWITCH = {"on": True, "true": True, "off": False, "false": False, "none": False}
VALUES = f"on, off, {', '.join(EFFORTS)}"


def thinking_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of models that think."""
    group = parser.add_argument_group("thinking")
    group.add_argument(
        "--think", type=read_think, metavar="VALUE", help=f"whether the model thinks before it answers: {VALUES}"
    )
    group.add_argument(
        "--reasoning-budget", type=_tokens, metavar="N", help="most tokens of a thought; -1: any number, 0: no thought"
    )
    group.add_argument("--hide-thinking", "--hidethinking", action="store_true", help="do not show thoughts")


def read_think(text: str) -> Thinking:
    """The value of --think; ArgumentTypeError for none."""
    value = text.lower()
    if value in SWITCH:
        return Thinking(True) if SWITCH[value] else Thinking(False, None, 0)
    if value not in EFFORTS:
        raise argparse.ArgumentTypeError(f"must be one of {VALUES}, not {text!r}")
    return Thinking(None, value)


def _tokens(text: str) -> int | None:
    try:
        tokens = int(text)
    except ValueError:
        tokens = -2
    if tokens < -1:
        raise argparse.ArgumentTypeError(f"must be a number of tokens, or -1, not {text!r}")
    return tokens


def asked_thinking(args: argparse.Namespace) -> Thinking:
    """Thinking as the flags say."""
    wanted: Thinking = args.think or Thinking()
    if args.reasoning_budget == 0:
        return Thinking(False, None, 0)
    limited = args.reasoning_budget not in (None, -1) and wanted.on is not False
    return replace(wanted, budget=args.reasoning_budget) if limited else wanted


def cannot_think(llm: LLM, wanted: Thinking) -> str:
    """The line for thinking that is asked of a model without thoughts; "" for others."""
    from powerinfer.runtime.thinking import thoughts_of

    unable = (wanted.on or wanted.effort is not None) and thoughts_of(llm) is None
    return "(this model does not think: its chat template has no thoughts)" if unable else ""


def thought_reader(
    llm: LLM, params: SamplingParams, prompt: Sequence[int] = (), wanted: Thinking | None = None
) -> tuple[AnswerParser | None, SamplingParams]:
    """Reader that tells reasoning from the answer to a prompt, and parameters that keep the marks in the text; None for
    a model that marks nothing. Where special tokens are to be shown, all is text."""
    from powerinfer.runtime.thinking import with_thoughts
    from powerinfer.text.tool_calls import reasoning_format

    channels, shown = reasoning_format(None if llm.template is None else llm.template.source), params
    params, form = with_thoughts(llm, wanted or Thinking(), params, channels, prompt)
    if form is None or not shown.skip_special_tokens:
        return None, params
    return form.parser(), params if channels is None else replace(params, skip_special_tokens=False)
