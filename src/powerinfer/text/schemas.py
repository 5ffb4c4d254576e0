"""JSON schemas of requests, as a grammar can enforce them.

Clients send the schemas of their own types: with annotations, with keywords that restrict nothing, and with some that
no grammar can enforce. Annotations and what restricts nothing are left out of every schema. The schema of a function
that is not strict loses what cannot be enforced, too: it is then a weaker schema, which every valid document matches.
In a strict one these stay, and compiling refuses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FORMATS = frozenset((
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
))  # fmt: skip
"""Formats that are enforced; every other is an annotation (JSON Schema 2020-12, validation, 7.2.1)."""

ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType", "contentSchema", "externalDocs", "xml",
))  # fmt: skip

OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are objects of schemas."""

OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
OF_ONE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else",
          "unevaluatedItems", "unevaluatedProperties")  # fmt: skip


def _is_any(schema: Any) -> bool:
    return schema is True or schema == {}


def _only_strings(names: Any) -> bool:
    return _is_any(names) or (isinstance(names, Mapping) and {**names} == {"type": "string"})


NOTHING: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda value, schema: value is False,
    "propertyNames": lambda value, schema: _only_strings(value),
    "not": lambda value, schema: value is False,
    "if": lambda value, schema: _is_any(schema.get("then", True)) and _is_any(schema.get("else", True)),
    "then": lambda value, schema: "if" not in schema or _is_any(value),
    "else": lambda value, schema: "if" not in schema or _is_any(value),
    "dependencies": lambda value, schema: value == {},
    "dependentRequired": lambda value, schema: value == {},
    "dependentSchemas": lambda value, schema: value == {},
    "contains": lambda value, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: "contains" not in schema or value == 0,
    "maxContains": lambda value, schema: "contains" not in schema,
    "unevaluatedItems": lambda value, schema: _is_any(value),
    "unevaluatedProperties": lambda value, schema: _is_any(value),
}
"""Keywords that a grammar does not have, with the values, in their schema, that restrict nothing."""

NOT_ENFORCED = frozenset((*NOTHING, "$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor"))
"""Keywords that no grammar enforces."""

_LOOKS = re.compile(r"\\(?:[1-9]|k<|.)|\(\?<?[=!]", re.DOTALL)


def enforceable_pattern(pattern: str) -> bool:
    """Whether a regular expression is a regular one: without look-around and without references to groups."""
    return all(found[0][0] == "\\" and found[0][1] not in "123456789k" for found in _LOOKS.finditer(pattern))


def enforceable(schema: Any, strict: bool = True) -> tuple[Any, list[str]]:
    """The schema for a grammar, and what it does not have any more of what restricts: "place: keyword".

    strict: whether that is nothing. The schema has at most `grammar.MAX_DEPTH` levels.
    """
    dropped: list[str] = []
    return _enforceable(schema, strict, "", dropped), dropped


def _enforceable(schema: Any, strict: bool, path: str, dropped: list[str]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    kept_keywords: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ANNOTATIONS or (name in NOTHING and NOTHING[name](value, schema)):
            continue
        if name == "format" and not (isinstance(value, str) and value in FORMATS):
            continue
        if name == "$schema" and not (isinstance(value, str) and "json-schema.org" in value):
            continue
        if not strict and _is_beyond(name, schema):
            dropped.append(f"{path or 'the whole'}: {name}")
        elif not strict and name == "oneOf":  # options that may overlap: at least one of them is weaker, and possible
            kept_keywords["anyOf"] = _inner(name, value, strict, path, dropped)
        else:
            kept_keywords[name] = _inner(name, value, strict, path, dropped)
    return kept_keywords


def _is_beyond(name: str, schema: Mapping[str, Any]) -> bool:
    """Whether no grammar can enforce a keyword of a schema."""
    if name in NOT_ENFORCED or (name == "oneOf" and "anyOf" in schema):
        return True
    if name == "pattern":
        return isinstance(schema[name], str) and not enforceable_pattern(schema[name])
    if name in ("patternProperties", "additionalProperties"):  # names that the one allows are none of the other's
        names = schema.get("patternProperties")
        return isinstance(names, Mapping) and not all(map(enforceable_pattern, names))
    return False


def _inner(name: str, value: Any, strict: bool, path: str, dropped: list[str]) -> Any:
    """The value of a keyword, with the schemas in it made enforceable."""
    if name in OF_SCHEMAS and isinstance(value, Mapping):
        return {
            key: _enforceable(one, strict, _place(path, str(key)[:64]), dropped) for key, one in value.items()
        }
    if name in OF_LISTS and isinstance(value, list | tuple):
        return [_enforceable(one, strict, path, dropped) for one in value]
    if name == "items" and isinstance(value, list | tuple):
        return [_enforceable(one, strict, _place(path, "[]"), dropped) for one in value]
    if name in OF_ONE:
        return _enforceable(value, strict, _place(path, "[]") if name == "items" else path, dropped)
    return value


def _place(path: str, name: str) -> str:
    return f"{path}{name}" if name == "[]" else f"{path}.{name}" if path else name


def place_of(schema: Any, test: Callable[[str, Any], bool]) -> str | None:
    """Path in a schema to the first keyword that passes a test of (name, value); None: there is none. "": its top."""
    level: list[tuple[str, Any]] = [("", schema)]
    while level:
        inner: list[tuple[str, Any]] = []
        for path, part in level:
            if not isinstance(part, Mapping):
                continue
            if any(test(name, value) for name, value in part.items()):
                return path
            inner += _schemas_in(part, path)
        level = inner
    return None


def _schemas_in(schema: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    """The schemas directly within one, each with its place."""
    schemas: list[tuple[str, Any]] = []
    for name, value in schema.items():
        if name in OF_SCHEMAS and isinstance(value, Mapping):
            schemas += [(_place(path, str(key)[:64]), one) for key, one in value.items()]
        elif name in OF_LISTS and isinstance(value, Sequence):
            schemas += [(path, one) for one in value]
        elif name in OF_ONE:
            place = _place(path, "[]") if name == "items" else path
            schemas += [(place, one) for one in (value if isinstance(value, list | tuple) else [value])]
    return schemas
