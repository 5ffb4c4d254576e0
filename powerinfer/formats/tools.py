"""The functions that a request offers, and which of them the model must call: OpenAI's `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from powerinfer.errors import RequestError
from powerinfer.formats.grammar import check_depth, json_text

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Of a function."""


class Tool(NamedTuple):
    """A function that a model may call. parameters: JSON schema of its arguments; document: as the template gets it."""

    name: str
    parameters: dict[str, Any]
    document: dict[str, Any]


class ToolChoice(NamedTuple):
    """kind: "none", "auto", "required"; or "function": the one called `name`."""

    kind: str
    name: str = ""


def read_tools(document: Any) -> list[Tool]:
    """The functions of OpenAI's `tools`; RequestError for what is none."""
    if document is None:
        return []
    if not isinstance(document, list | tuple) or len(document) > MAX_TOOLS:
        raise RequestError(f"tools must be a list of at most {MAX_TOOLS} functions")
    check_depth(list(document), "tools")
    tools = [_tool(entry, f"tools[{at}]") for at, entry in enumerate(document)]
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("two tools have the same name")
    return tools


def _tool(entry: Any, where: str) -> Tool:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or entry.get("type") != "function":
        raise RequestError(f'{where} must be {{"type": "function", "function": {{...}}}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{where}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f"{where}.function.parameters must be the JSON schema of an object")
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{where}.function.description must be a text")
    json_text(parameters, f"{where}.function.parameters")
    given = {key: value for key, value in function.items() if key != "strict" and value is not None}
    document = {"type": "function", "function": {**given, "parameters": dict(parameters)}}
    return Tool(name, {**parameters, "type": "object"}, document)


def read_tool_choice(document: Any, tools: Sequence[Tool]) -> ToolChoice:
    """OpenAI's `tool_choice`; missing: "auto" if there are tools. RequestError for what is not supported."""
    if document is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(document, Mapping) and document.get("type") == "function":
        function = document.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in [tool.name for tool in tools]:
            raise RequestError(f"tool_choice names {str(name)[:64]!r}, which is not among the tools")
        return ToolChoice("function", str(name))
    if document not in ("none", "auto", "required"):
        raise RequestError('tool_choice must be "none", "auto", "required" or a function')
    if document == "required" and not tools:
        raise RequestError('tool_choice "required" needs tools')
    return ToolChoice(str(document) if tools else "none")
