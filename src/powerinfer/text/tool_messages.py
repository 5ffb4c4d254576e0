"""Conversations with calls of functions, as chat templates take them: with results, with short ids, or in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from powerinfer.errors import RequestError
from powerinfer.text.call_values import closed
from powerinfer.text.grammar import json_text


def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a request as transformers takes them. RequestError for malformed calls."""
    messages_ = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    _name_results(messages_)
    return messages_


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A message as transformers takes it."""
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    if plain.get("content") is None:
        plain["content"] = ""
    calls = plain.pop("tool_calls", None)
    if not calls:
        return plain
    if not isinstance(calls, list | tuple) or message.get("role") != "assistant":
        raise RequestError(f"{path}.tool_calls must be a list, in a message of the assistant")
    plain["tool_calls"] = [_earlier_call(call, f"{path}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return plain


def _earlier_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path} must have a function with a name")
    arguments = _arguments(function.get("arguments"))
    plain: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    if isinstance(call.get("id"), str):
        plain["id"] = call["id"]
    return plain


def _arguments(value: Any) -> Mapping[str, Any]:
    """The arguments of an earlier call as an object, which templates take, however the model wrote them: what was cut
    off is closed, and a value other than an object becomes that of `arguments`."""
    if isinstance(value, str):
        text = value.strip() or "{}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = json.loads(closed(text)) if text.startswith("{") else value  # whose depth and numbers are limited
    return value if isinstance(value, Mapping) else {} if value is None else {"arguments": value}


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


def _shortened(call_id: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    from hashlib import sha256

    return sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def with_named_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids that are the function's name and a number, as Kimi K2 writes calls."""
    names: dict[Any, str] = {}
    renamed, number = [], 0
    for message in messages:
        changed = dict(message)
        if "tool_calls" in changed:
            calls = []
            for call in changed["tool_calls"]:
                calls.append({**call, "id": f"functions.{call['function']['name']}:{number}"})
                names[call.get("id")] = calls[-1]["id"]
                number += 1
            changed["tool_calls"] = calls
        if changed.get("tool_call_id") in names:
            changed["tool_call_id"] = names[changed["tool_call_id"]]
        renamed.append(changed)
    return renamed


def on_channels(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for gpt-oss's template: reasoning is `thinking`, and a message has one call, with its result behind.

    The template shows the text beside a call as reasoning, and takes only one of them.
    """
    turns: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        results = []
        calls = message.get("tool_calls", ())
        while calls and at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        if calls:
            spoken = _thinking(message)
            texts = [text for text in (spoken.pop("thinking", None), spoken["content"]) if text]
            message = {**spoken, "content": "", **({"thinking": "\n\n".join(texts)} if texts else {})}
            turns += _split_calls(message, calls, results)
        else:
            turns.append(_thinking(message))
    return turns


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**plain, "thinking": reasoning} if reasoning and message.get("role") == "assistant" else plain


def _split_calls(
    message: dict[str, Any], calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A message for each call, each with the results that belong to it; other results go to the last one.

    What the message says is in the first."""
    first = {name: value for name, value in message.items() if name != "tool_calls"}
    rest = {"role": message["role"], "content": ""}
    ids = [call.get("id") for call in calls]
    by_call: list[list[dict[str, Any]]] = [[] for _ in calls]
    for place, result in enumerate(results):
        result_id = result.get("tool_call_id")
        matches = result_id is not None and result_id in ids
        by_call[ids.index(result_id) if matches else min(place, len(calls) - 1)].append(result)
    split: list[dict[str, Any]] = []
    for number, (call, answered) in enumerate(zip(calls, by_call, strict=True)):
        split += [{**(rest if number else first), "tool_calls": [call]}, *answered]
    return split


_PROMPT = """You may call functions. These are the functions, as JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments in this form:
{example}"""


def told_in_words(
    messages: list[dict[str, Any]], documents: list[dict[str, Any]], example: str, no_system: bool
) -> list[dict[str, Any]]:
    """The conversation for a template without tools: they are in the system message, or, where the template takes none,
    in the first one of the user. example: a call as the model is to write it."""
    text = _PROMPT.format(tools="\n".join(json_text(document, "tools") for document in documents), example=example)
    if not no_system:
        return with_system(messages, text, {})
    first = next((at for at, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is None:
        return [{"role": "user", "content": text}, *messages]
    asked = {**messages[first], "content": f"{text}\n\n{messages[first]['content']}"}
    return [*messages[:first], asked, *messages[first + 1 :]]


def with_calls_as_text(
    messages: list[dict[str, Any]], written: Callable[[Sequence[Mapping[str, Any]]], str], results: bool
) -> list[dict[str, Any]]:
    """The conversation for a template that does not write calls: they are text. results: the template takes results of
    functions; else they are the user's, and messages of one side that follow each other are one."""
    texts: list[dict[str, Any]] = []
    for message in messages:
        turn = _turn(message, written, results)
        merges = not results and texts and turn["role"] == texts[-1]["role"] != "system"
        if merges:
            texts[-1] = {**texts[-1], "content": f"{texts[-1]['content']}\n{turn['content']}"}
        else:
            texts.append(turn)
    return texts


def _turn(
    message: dict[str, Any], written: Callable[[Sequence[Mapping[str, Any]]], str], results: bool
) -> dict[str, Any]:
    if message.get("role") == "tool" and not results:
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    text = written(message["tool_calls"])
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**plain, "content": f"{message['content']}\n{text}" if message["content"] else text}


def split_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that takes one call in a message: each has one, with its result behind."""
    split: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls, results = message.get("tool_calls", ()), []
        while len(calls) > 1 and at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        split += _split_calls(message, calls, results) if len(calls) > 1 else [message]
    return split


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON text."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    converted = []
    for message in messages:
        calls = {"tool_calls": [changed(call) for call in message["tool_calls"]]} if "tool_calls" in message else {}
        converted.append({**message, **calls})
    return converted


def drop_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls without their content; if it says something it is a message of its own."""
    split: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            if message["content"]:
                split.append({name: value for name, value in message.items() if name != "tool_calls"})
            split.append({**message, "content": None})
        else:
            split.append(message)
    return split


def with_system(messages: list[dict[str, Any]], text: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages with a text at the end of the system message, a new one if there is none, and fields in it."""
    if messages and messages[0].get("role") == "system" and isinstance(messages[0]["content"], str):
        first, rest = messages[0], messages[1:]
    else:
        first, rest = {"role": "system", "content": ""}, messages
    content = "\n\n".join(part for part in (first["content"], text) if part)
    return [{**first, "content": content, **fields}, *rest]


def fill_fields(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Functions with all that some templates ask for: descriptions, required arguments, types of what is in objects and
    lists."""
    filled = []
    for document in documents:
        function = document["function"]
        schema = {"properties": {}, "required": [], **_fill_schema(function["parameters"], 0)}
        filled.append({**document, "function": {"description": "", **function, "parameters": schema}})
    return filled


def _fill_schema(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return schema
    added: dict[str, Any] = {"description": ""} if depth else {}
    if schema.get("type") == "object" and depth:
        added["additionalProperties"] = {}
    if schema.get("type") == "array":
        added["items"] = {}
    filled = {key: value for key, value in schema.items() if not (key in added and isinstance(value, bool))}
    if isinstance(properties := schema.get("properties"), Mapping):
        filled["properties"] = {name: _fill_schema(value, depth + 1) for name, value in properties.items()}
    if "items" in filled:
        filled["items"] = _fill_schema(filled["items"], depth + 1)
    return {**added, **filled}


_DEPTH = 8
