"""Schemas as clients send them: what restricts nothing is left out, and what no grammar enforces, where it may be.

Python's jsonschema is the judge: a schema that was made weaker must hold for every document of the first one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from powerinfer.errors import RequestError
from powerinfer.runtime.grammar import refusal
from powerinfer.text.grammar import Grammar
from powerinfer.text.schemas import FORMATS, enforceable
from powerinfer.text.tools import MAX_SCHEMAS, read_tools

HARMLESS: dict[str, Any] = {
    **{f"format {name}": {"type": "string", "format": name}
       for name in ("path", "password", "byte", "binary", "regex", "ulid", "jwt", "e164", "emoji", "file-path")},
    "format of no text": {"type": "string", "format": ["x"]},
    "unique false": {"type": "array", "uniqueItems": False},
    "names are texts": {"type": "object", "propertyNames": {"type": "string"}},
    "any name": {"type": "object", "propertyNames": True},
    "not false": {"not": False},
    "if alone": {"type": "string", "if": {"minLength": 2}},
    "if with nothing": {"type": "string", "if": {"minLength": 2}, "then": True, "else": {}},
    "then alone": {"type": "string", "then": {"minLength": 2}},
    "no dependency": {"type": "object", "dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    "contains none or more": {"type": "array", "contains": {"type": "string"}, "minContains": 0},
    "counts of nothing": {"type": "array", "minContains": 2, "maxContains": 3},
    "unevaluated": {"type": "object", "unevaluatedProperties": {}, "unevaluatedItems": True},
    "annotations": {"type": "string", "title": "x", "description": "y", "default": 3, "examples": [1],
                    "readOnly": True, "deprecated": True, "$comment": "z", "contentEncoding": "base64"},
    "another dialect": {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "type": "string"},
}  # fmt: skip

BEYOND: dict[str, Any] = {
    "unique": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "names": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "not": {"type": "string", "not": {"const": "x"}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "dependent": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "contains": {"type": "array", "contains": {"const": 1}},
    "unevaluated": {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
    "look-ahead": {"type": "string", "pattern": "^(?=a)[a-z]+$"},
    "look-behind": {"type": "string", "pattern": "a(?<!b)"},
    "reference": {"type": "string", "pattern": r"^(a|b)\1$"},
    "names with look-ahead": {"type": "object", "patternProperties": {"^(?!b)a": {"type": "integer"}},
                              "additionalProperties": False},
    "options that overlap": {"oneOf": [{"type": "string"}, {"minLength": 2}]},
    "two lists of options": {"anyOf": [{"type": "string"}, {"type": "integer"}],
                             "oneOf": [{"minLength": 3}, {"type": "string"}]},
}  # fmt: skip

DOCUMENTS: list[Any] = ["", "a", "ab", "abc", "x", "aa", 1, [], [1], [1, 1], [1, 2], ["a"], {}, {"a": 1}, {"b": 2},
                        {"a": 1, "b": 2}, {"ab": 3}, {"c": "x"}]  # fmt: skip


def within(schema: Any) -> Any:
    """A schema in a place where an agent's function has it."""
    return {"type": "object", "properties": {"p": {"type": "array", "items": schema}}, "required": ["p"]}


def compiled(schema: Any) -> RequestError | None:
    return refusal(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("strict", [True, False])
def test_what_restricts_nothing_is_left_out(name: str, strict: bool) -> None:
    for schema in (HARMLESS[name], within(HARMLESS[name])):
        made, dropped = enforceable(schema, strict)
        assert dropped == [] and compiled(made) is None
        for document in [*DOCUMENTS, *({"p": [one]} for one in DOCUMENTS)]:
            assert Draft202012Validator(made).is_valid(document) == Draft202012Validator(schema).is_valid(document)
        assert enforceable(made, strict) == (made, [])


@pytest.mark.parametrize("name", BEYOND)
def test_what_no_grammar_enforces_makes_a_weaker_schema(name: str) -> None:
    for schema in (BEYOND[name], within(BEYOND[name])):
        assert compiled(enforceable(schema)[0]) is not None, "a strict one is refused"
        made, dropped = enforceable(schema, strict=False)
        assert compiled(made) is None
        assert dropped or "oneOf" in json.dumps(schema)
        assert all(one.startswith("p[]: " if "p" in schema.get("properties", ()) else "the whole: ") for one in dropped)
        for document in [*DOCUMENTS, *({"p": [one]} for one in DOCUMENTS)]:
            if Draft202012Validator(schema).is_valid(document):
                assert Draft202012Validator(made).is_valid(document)


def test_names_of_properties_are_no_keywords() -> None:
    names = ("not", "if", "title", "format", "description", "uniqueItems", "pattern", "$schema", "default")
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(names)}
    assert enforceable(schema, strict=False) == (schema, [])
    values = {"enum": [{"not": {}, "title": 1}], "const": {"format": "x"}}
    assert enforceable(values, strict=False) == (values, [])


def test_formats_that_are_enforced_stay() -> None:
    for name in FORMATS:
        assert enforceable({"type": "string", "format": name})[0] == {"type": "string", "format": name}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "not": {}}, r"not supported: not \(at p\[\]\)"),
        ({"type": "string", "pattern": "("}, r"unclosed group \(at p\[\]\)"),
        ({"type": "string", "pattern": "(?=a)b"}, r"look-around.* \(at p\[\]\)"),
        ({"type": "wish"}, r"Invalid type: wish \(at p\[\]\)"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, r"use anyOf \(at p\[\]\)"),
    ],
)
def test_a_refusal_says_where(schema: Any, says: str) -> None:
    error = refusal(Grammar.json_schema(within(schema)))
    assert error is not None
    with pytest.raises(RequestError, match=says):
        raise error


# ---------------------------------------------------------------- functions


def function(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"p": schema}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def test_only_strict_functions_keep_everything() -> None:
    schema = {"type": "array", "uniqueItems": True, "description": "some"}
    loose, strict = read_tools([function("f", schema, strict=False), function("g", schema, strict=True)])
    assert loose.parameters["properties"] == {"p": {"type": "array"}} and loose.dropped == ("p: uniqueItems",)
    assert strict.parameters["properties"] == {"p": {"type": "array", "uniqueItems": True}} and strict.dropped == ()
    for tool in (loose, strict):
        assert tool.document["function"]["parameters"]["properties"] == {"p": schema}, "the model is told all of it"
    with pytest.raises(RequestError, match=r"tools\[0\].function.strict must be a boolean"):
        read_tools([function("f", schema, strict="yes")])


def test_schemas_that_are_too_large_together_are_enforced_in_outline() -> None:
    large = {"enum": [f"value {n}" for n in range(4000)], "type": "string"}
    small = {"type": "integer"}
    tools = read_tools([function("small", small), *(function(f"large{n}", large) for n in range(3))])
    assert tools[0].parameters["properties"] == {"p": small} and not tools[0].dropped
    outlined = [tool for tool in tools[1:] if tool.parameters["properties"] == {"p": {"type": "string"}}]
    assert len(outlined) == 2 and all("characters" in tool.dropped[0] for tool in outlined)
    assert sum(len(json.dumps(tool.parameters)) for tool in tools) < MAX_SCHEMAS * 1.1
    with pytest.raises(RequestError, match=r"strict functions have \d+ characters .* large1 has the largest"):
        read_tools([function("small", small), *(function(f"large{n}", large, strict=True) for n in range(1, 4))])


def test_descriptions_do_not_count() -> None:
    long = {"type": "string", "description": "x" * MAX_SCHEMAS}
    (tool,) = read_tools([function("f", long)])
    assert tool.parameters["properties"] == {"p": {"type": "string"}} and not tool.dropped
