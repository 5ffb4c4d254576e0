"""Shape of a message's content that a chat template reads: a text, or a list of parts.

Most read a text. Some of models that also take pictures read [{"type": "text", "text": ...}], for all roles or for one:
a system message of Gemma 3's first template. What a template reads is seen by what it writes: contents that are marks
are rendered as texts, and those that are missing then as lists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from powerinfer.text import sandbox

_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_MARKS = {role: f"q7{role}7q" for role in ("system", "user", "assistant", "tool")}
_CHATS = (  # the first has most roles; not every template takes all of them
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("user",),
    ("system", "user"),
    ("user", "call", "tool"),
)


@lru_cache(64)
def roles_with_parts(source: str, bos: str = "", eos: str = "") -> frozenset[str]:
    """The roles whose contents the template `source` reads as lists of parts alone."""
    if "text" not in source:  # it reads no part's text
        return frozenset()
    try:
        texts = _written(source, bos, eos, parts=False)
        return frozenset() if texts == _MARKS.keys() else _written(source, bos, eos, parts=True) - texts
    except sandbox.TemplateLimit:  # the rendering of the messages says it
        return frozenset()


def shaped(message: Any, roles: frozenset[str]) -> Any:
    """A message with its content as a list of parts if its role is one of `roles`."""
    if isinstance(message, dict) and message.get("role") in roles and isinstance(message.get("content"), str):
        return {**message, "content": _part(message["content"])}
    return message


def _part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _written(source: str, bos: str, eos: str, parts: bool) -> frozenset[str]:
    """The roles whose contents the template writes."""
    roles_read: set[str] = set()
    for roles in _CHATS:
        if roles_read.issuperset(set(roles) - {"call"}):
            continue
        messages = [_message(role, parts) for role in roles]
        variables: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
        variables |= {"tools": None, "documents": None}
        variables.update((name, token) for name, token in (("bos_token", bos), ("eos_token", eos)) if token)
        try:
            text = sandbox.render(source, variables)
        except (sandbox.TemplateRefused, sandbox.Failed):
            continue
        roles_read |= {role for role, mark in _MARKS.items() if mark in text}
    return frozenset(roles_read)


def _message(role: str, parts: bool) -> dict[str, Any]:
    if role == "call":
        return {"role": "assistant", "content": _part("") if parts else "", "tool_calls": [_CALL]}
    more = {"tool_call_id": _CALL["id"], "name": "f"} if role == "tool" else {}
    return {"role": role, "content": _part(_MARKS[role]) if parts else _MARKS[role], **more}
