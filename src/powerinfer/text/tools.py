"""The functions that a request offers, and which of them the model must call: OpenAI's `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from powerinfer.errors import RequestError
from powerinfer.text.grammar import MAX_SOURCE, check_depth, json_text
from powerinfer.text.schemas import enforceable

MAX_TOOLS = 128
MAX_SCHEMAS = MAX_SOURCE * 3 // 4  # characters of all functions' schemas; the grammar around them has the rest
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Longest name of a function."""


class Tool(NamedTuple):
    """A function that a model may call.

    parameters: JSON schema of its arguments, as a grammar can enforce it (`schemas.enforceable`); document: as the
    template gets it. strict: all of the schema is to be enforced; dropped: what of it is not.
    """

    name: str
    parameters: dict[str, Any]
    document: dict[str, Any]
    strict: bool = False
    dropped: tuple[str, ...] = ()


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
    tools = _fitting([_tool(entry, f"tools[{at}]") for at, entry in enumerate(document)])
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("two tools have the same name")
    return tools


def _tool(entry: Any, path: str) -> Tool:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or entry.get("type") != "function":
        raise RequestError(f'{path} must be {{"type": "function", "function": {{...}}}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{path}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f"{path}.function.parameters must be the JSON schema of an object")
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{path}.function.description must be a text")
    json_text(parameters, f"{path}.function.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{path}.function.strict must be a boolean")
    strict = function.get("strict") is True
    schema, dropped = enforceable({**parameters, "type": "object"}, strict)
    fields = {key: value for key, value in function.items() if key != "strict" and value is not None}
    document = {"type": "function", "function": {**fields, "parameters": dict(parameters)}}
    return Tool(name, schema, document, strict, tuple(dropped))


def _fitting(tools: list[Tool]) -> list[Tool]:
    """The tools, of whose schemas the largest are enforced in outline only where all together are too large.

    RequestError if the strict ones are.
    """
    sizes = [len(json_text(tool.parameters, "parameters")) for tool in tools]
    for way in (_outline, lambda schema: {"type": "object"}):
        for at in sorted(range(len(tools)), key=lambda at: -sizes[at]):
            if sum(sizes) <= MAX_SCHEMAS:
                return tools
            if not tools[at].strict:
                note = f"the schema of {sizes[at]} characters"
                tools[at] = tools[at]._replace(parameters=way(tools[at].parameters), dropped=(note,))
                sizes[at] = len(json_text(tools[at].parameters, "parameters"))
    if sum(sizes) <= MAX_SCHEMAS:
        return tools
    largest = tools[max(range(len(tools)), key=lambda at: sizes[at])].name
    raise RequestError(
        f"the schemas of the strict functions have {sum(sizes)} characters together; at most {MAX_SCHEMAS} can be "
        f"enforced, and {largest} has the largest: offer fewer functions, or not as strict"
    )


def _outline(schema: dict[str, Any]) -> dict[str, Any]:
    """The types of an object's properties."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {"type": "object"}
    kinds = {
        name: {"type": inner["type"]} if isinstance(inner, Mapping) and "type" in inner else {}
        for name, inner in properties.items()
    }
    return {"type": "object", "properties": kinds}


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
        raise RequestError('tool_choice "required" needs tools that are functions')
    return ToolChoice(str(document) if tools else "none")
