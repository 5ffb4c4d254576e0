"""Conversations with calls of functions, as chat templates take them: with results, with short ids, or in words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from powerinfer.errors import RequestError
from powerinfer.formats.grammar import json_text


def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a request as transformers takes them. RequestError for malformed calls."""
    made = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    _name_results(made)
    return made


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as transformers takes it."""
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    if plain.get("content") is None:
        plain["content"] = ""
    calls = plain.pop("tool_calls", None)
    if not calls:
        return plain
    if not isinstance(calls, list | tuple) or message.get("role") != "assistant":
        raise RequestError(f"{where}.tool_calls must be a list, in a message of the assistant")
    plain["tool_calls"] = [_earlier_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return plain


def _earlier_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where}.function.arguments is not valid JSON") from None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments must be an object")
    plain: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    if isinstance(call.get("id"), str):
        plain["id"] = call["id"]
    return plain


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Give each result the name of its function, which some templates show."""
    names: dict[Any, str] = {}
    for message in messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls", ())}
        if message.get("role") == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of nine letters and digits, the same for a call and its result."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(changed.get("tool_call_id"), str):
        changed["tool_call_id"] = _shortened(changed["tool_call_id"])
    if "tool_calls" in changed:
        changed["tool_calls"] = [{**call, "id": _shortened(call.get("id", ""))} for call in changed["tool_calls"]]
    return changed


def _shortened(given: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", given):
        return given
    from hashlib import sha256

    return sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def on_channels(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for gpt-oss's template: reasoning is `thinking`, and a message has one call, with its result behind.

    The template shows the text beside a call as reasoning, and takes only one of them.
    """
    made: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        results = []
        calls = message.get("tool_calls", ())
        while calls and at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        made += _one_by_one(_thinking(message), calls, results) if calls else [_thinking(message)]
    return made


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**plain, "thinking": reasoning} if reasoning and message.get("role") == "assistant" else plain


def _one_by_one(
    message: dict[str, Any], calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A message for each call, each with the results that belong to it; other results go to the last one."""
    texts = [text for text in (message.get("thinking"), message["content"]) if text]
    rest = {name: value for name, value in message.items() if name not in ("thinking", "content", "tool_calls")}
    ids = [call.get("id") for call in calls]
    by_call: list[list[dict[str, Any]]] = [[] for _ in calls]
    for place, result in enumerate(results):
        given = result.get("tool_call_id")
        known = given is not None and given in ids
        by_call[ids.index(given) if known else min(place, len(calls) - 1)].append(result)
    made: list[dict[str, Any]] = []
    for number, (call, own) in enumerate(zip(calls, by_call, strict=True)):
        thinking = {"thinking": "\n\n".join(texts)} if texts and not number else {}
        made += [{**rest, "content": "", **thinking, "tool_calls": [call]}, *own]
    return made


_PROMPT = """You may call functions. These are the functions, as JSON:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object with its name and its arguments, between these tags:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>"""


def in_words(messages: list[dict[str, Any]], documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template without tools: they are in the system message, and results are the user's.

    Messages of one side that follow each other are one, for templates that demand turns.
    """
    turned: list[dict[str, Any]] = []
    for message in messages:
        turn = _turn(message)
        if turned and turn["role"] == turned[-1]["role"] != "system":
            turned[-1] = {**turned[-1], "content": f"{turned[-1]['content']}\n{turn['content']}"}
        else:
            turned.append(turn)
    if not documents:
        return turned
    tools = "\n".join(json_text(document, "tools") for document in documents)
    return with_system(turned, _PROMPT.format(tools=tools), {})


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        json_text({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, "tool_calls")
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return {"role": "assistant", "content": f"{message['content']}\n{text}" if message["content"] else text}


def with_system(messages: list[dict[str, Any]], text: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages with a text at the end of the system message, a new one if there is none, and fields in it."""
    if messages and messages[0].get("role") == "system" and isinstance(messages[0]["content"], str):
        first, rest = messages[0], messages[1:]
    else:
        first, rest = {"role": "system", "content": ""}, messages
    content = "\n\n".join(part for part in (first["content"], text) if part)
    return [{**first, "content": content, **fields}, *rest]
