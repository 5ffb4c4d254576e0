"""Calls of functions as text in a dialect: for templates that do not write earlier calls themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powerinfer.text.grammar import json_text
from powerinfer.text.marks import HOLE

if TYPE_CHECKING:
    from powerinfer.text.tool_calls import ToolFormat


def written(form: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """The text of the calls of one message, {"function": {"name", "arguments"}} each."""
    parts = [f"{form.call_begin}{_body(form, call, at)}{form.call_end}" for at, call in enumerate(calls)]
    text = ", ".join(parts) + "]" if form.listed else form.between.join(parts)
    text = text if not form.listed or form.section.endswith("[") else "[" + text
    return f"{form.section}{text}{form.end}".replace(HOLE, "0").strip()


def _body(form: ToolFormat, call: Mapping[str, Any], at: int) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if form.body == "object":
        named = {name: arguments} if form.named_by_key else {form.name_key: name, form.arguments_key: arguments}
        return json_text(named, "tool_calls")
    start = f"{form.name_begin}{name}{form.name_end}".replace(HOLE, str(call.get("id", at)))
    if form.body == "keywords":
        return start + ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items()) + ")"
    if form.body == "json":
        return start + json_text(arguments, "tool_calls")
    return start + "\n".join(_tagged(form, key, value) for key, value in arguments.items())


def _tagged(form: ToolFormat, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json_text(value, "an argument")
    end = form.key_end.replace(HOLE, form.word(_kind(value)))
    return f"{form.key_begin}{key}{end}{text}{form.value_end.replace(HOLE, key)}"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = ((str, "string"), (dict, "object"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "number")


def _literal(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
