"""System messages where a chat template takes them.

Agents send several, and some of them later than the first message of the user. Many templates write but the first one,
or refuse another; some take none, or no two messages of the user in a row. What a template takes is seen by what it
writes of marks. What it does not take is told elsewhere: system messages at the beginning are joined, later ones become
a part of the message before them, and a first one that is not taken becomes the user's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

from powerinfer.errors import PowerInferError
from powerinfer.text.chat import ChatTemplate

_BREAK = "\n\n"  # between what were messages of their own


def placed(messages: Sequence[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """The conversation with its system messages, whose contents are texts, where the template writes them."""
    def writes(*roles: str) -> bool:
        return _writes(template.source, template.bos, template.eos, roles)

    shown, roles = list(messages), [message["role"] for message in messages]
    if not ("system" in roles or _follow_each_other(shown)) or not writes("user"):
        return shown
    if "system" in roles and not writes("system", "user"):
        shown = _told_by_user(shown)
    elif "system" in roles[1:] and not writes("system", "system", "user", "system", "assistant", "user"):
        shown = _joined(shown, "system")
        first = int(roles[0] == "system")
        shown = [*shown[:first], *_told_by_user(shown[first:])]
    if _follow_each_other(shown) and not writes("user", "user"):
        shown = _joined(shown, "user")
    return shown


def _follow_each_other(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two messages of the user follow each other."""
    return any(first["role"] == second["role"] == "user" for first, second in pairwise(messages))


def _joined(messages: Sequence[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    """The conversation with the messages of a role that follow each other in one."""
    joined: list[dict[str, Any]] = []
    for kind, group in groupby(messages, lambda message: message["role"]):
        run = list(group)
        if kind == role:
            run = [{**run[0], "content": _BREAK.join(message["content"] for message in run)}]
        joined += run
    return joined


def _told_by_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with system messages as the user's, but behind a result, whose part they become: templates in
    which turns alternate take no message of the user there."""
    messages_: list[dict[str, Any]] = []
    for kind, group in groupby(messages, lambda message: message["role"]):
        run = list(group)
        if kind == "system" and messages_ and messages_[-1]["role"] == "tool":
            contents = [messages_[-1]["content"], *(message["content"] for message in run)]
            messages_[-1] = {**messages_[-1], "content": _BREAK.join(contents)}
        else:
            messages_ += [{**message, "role": "user"} for message in run] if kind == "system" else run
    return messages_


@lru_cache(256)
def _writes(source: str, bos: str, eos: str, roles: tuple[str, ...]) -> bool:
    """Whether a template writes the contents of all messages of a chat."""
    marks = [f"q{at}7{role}7q" for at, role in enumerate(roles)]
    chat = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        text, _ = ChatTemplate(source, bos, eos).render(chat)
    except PowerInferError:
        return False
    return all(mark in text for mark in marks)
