"""Dialects of calls that are not to be read off a template: those that templates tell of in prose only, and those of a
shape of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from powerinfer.text import harmony
from powerinfer.text.marks import HOLE
from powerinfer.text.tool_calls import HARMONY, HERMES, LLAMA, PHI4_MINI, ToolFormat


class _DialectRow(NamedTuple):
    """A format, with the texts by which a template that has it is known: all of `has`, and none of `lacks`."""

    format: ToolFormat
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


GEMMA_4 = ToolFormat(
    "gemma4", call_begin="<|tool_call>call:", call_end="<tool_call|>", body="json", quote='<|"|>'
)
FUNCTIONARY_3_2 = ToolFormat(
    "functionary-v3.2", call_begin=">>>", name_end="\n", body="json", prompt_end=">>>", dropped=(">>>all\n",),
    text_arguments=True,
)  # fmt: skip
FIREFUNCTION = ToolFormat(
    "firefunction", section="functools[", listed=True, announced_in="text", announced_as="functions", clock="datetime",
    history="text",
)  # fmt: skip
_NS = "]<]minimax[>["
MINIMAX_M3 = ToolFormat(
    "minimax-m3", section=f"{_NS}<tool_call>\n", call_begin=f'{_NS}<invoke name="', call_end=f"{_NS}</invoke>",
    between="\n", end=f"\n{_NS}</tool_call>", body="tagged", name_end='">', key_begin=f"{_NS}<", key_end=">",
    value_end=f"{_NS}</{HOLE}>", nested=_NS,
)  # fmt: skip
MUSE = ToolFormat(
    "muse", section=f"to={HOLE}<|message|><atem:function_calls>\n", call_begin='<atem:invoke name="', name_end='">\n',
    call_end="\n</atem:invoke>", between="\n", end="\n</atem:function_calls>", body="tagged",
    key_begin='<atem:parameter name="', key_end='">', value_end="</atem:parameter>",
    dropped=("<|eom|>", "<|start|>assistant"),
)  # fmt: skip
GRANITE_3 = ToolFormat("granite3", section="<|tool_call|>", listed=True, history="text")
LFM2 = ToolFormat(
    "lfm2", section="<|tool_call_start|>", end="<|tool_call_end|>", listed=True, body="keywords", name_end="(",
    history="text",
)  # fmt: skip

_CALLING = (
    _DialectRow(HARMONY, harmony.CHANNELS),
    _DialectRow(GEMMA_4, ("<|tool_call>call:", "<tool_call|>")),
    _DialectRow(FUNCTIONARY_3_2, (">>>all", "recipient")),
    _DialectRow(MINIMAX_M3, (_NS, "<invoke name=", "tool_calls")),
    _DialectRow(FIREFUNCTION, ("functools[", "functions")),
    _DialectRow(MUSE, ("<atem:function_calls>", " to=", "<|eom|>")),
    _DialectRow(PHI4_MINI, ("<|tool|>", "message['tools']")),
    _DialectRow(replace(LLAMA, also=("<|python_tag|>",)), ("<|python_tag|>", "Respond in the format"), ("<function=",)),
    _DialectRow(LLAMA, ('"parameters": dictionary of argument name', "tools"), ("<function=",)),
)
_ANNOUNCING = (
    _DialectRow(LFM2, ("<|tool_list_start|>",)),
    _DialectRow(LFM2, ("List of tools: [", "<|tool_call_start|>")),
    _DialectRow(LFM2, ("List of tools: [",)),
    _DialectRow(GRANITE_3, ("<|tool_call|>", "<|start_of_role|>")),
    _DialectRow(replace(HERMES, history="text", announced_as="xml_tools"), ("xml_tools", "<tool_call>")),
    _DialectRow(replace(HERMES, history="text"), ("within <tools> </tools> XML", "within <tool_call> </tool_call>")),
)


def calling(source: str) -> ToolFormat | None:
    """The dialect of a template whose calls have a shape of their own."""
    return _first(_CALLING, source)


def announcing(source: str) -> ToolFormat | None:
    """The dialect of a template that only tells of calls."""
    return _first(_ANNOUNCING, source)


def _first(rows: tuple[_DialectRow, ...], source: str) -> ToolFormat | None:
    formats = (
        row.format
        for row in rows
        if all(text in source for text in row.has) and not any(text in source for text in row.lacks)
    )
    return next(formats, None)
