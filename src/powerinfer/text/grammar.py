"""Constraints of an answer's text: a JSON schema, a regular expression, or a grammar.

A `Grammar` is data; `runtime.grammar` compiles it for a model's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powerinfer.errors import RequestError, single_line
from powerinfer.formats.windows import WINDOW
from powerinfer.text.schemas import enforceable

MAX_SOURCE = 1 << 17  # characters
MAX_DEPTH = 64  # of a schema
MAX_RULES = 500  # of a GBNF grammar, which is converted in Python in quadratic time

WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Optional space between JSON's tokens, as in llama.cpp: small models get lost in unbounded white space."""

JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": WHITESPACE,
    "lenient": False,
    "coerce_one_of": False,
}
"""llguidance's, for JSON: a keyword that it cannot enforce is an error."""

KINDS = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar", "gbnf": "GBNF grammar"}


@dataclass(frozen=True)
class Grammar:
    """kind: of `KINDS`; text: the source. RequestError if it is too large.

    Made by the class methods; `json_schema` takes a schema as a document, a JSON text, or a pydantic model's class.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"a grammar is one of {', '.join(KINDS)}, not {self.kind!r}")
        noun = KINDS[self.kind]
        if not isinstance(self.text, str) or not self.text.strip():
            raise RequestError(f"the {noun} must be a text that is not empty")
        if len(self.text) > MAX_SOURCE:
            raise RequestError(f"the {noun} has {len(self.text)} characters; at most {MAX_SOURCE} are allowed")
        if self.kind == "gbnf" and self.text.count("::=") > MAX_RULES:
            raise RequestError(f"the {noun} has more than {MAX_RULES} rules")

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def json_schema(cls, schema: Any) -> Grammar:
        """JSON that a schema (draft 2020-12) validates. Keywords that cannot be enforced are refused on compiling."""
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"the JSON schema is not valid JSON: {single_line(error)}") from None
        if schema is True:
            schema = {}
        if schema is False:
            raise RequestError("the JSON schema is false: nothing is valid")
        if not isinstance(schema, Mapping):
            raise RequestError(f"the JSON schema must be an object, not {type(schema).__name__}")
        check_depth(schema, "the JSON schema")
        return cls("json_schema", json_text(enforceable(schema)[0], "the JSON schema"))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression (Rust's syntax, without look-around) matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """llguidance's Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"""
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """llama.cpp's GBNF; a text that begins with %llguidance is Lark, as in llama.cpp."""
        return cls("lark" if isinstance(text, str) and text.lstrip().startswith("%llguidance") else "gbnf", text)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of some texts."""
        if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts) or not texts:
            raise RequestError("choice must be one or more texts that are not empty")
        return cls("lark", "start: " + " | ".join(map(literal, texts)))


@dataclass(frozen=True)
class LazyGrammar:
    """Constraint of a part of the answer, from where the part begins.

    position: (the answer's text so far, or its end, whether that is all) -> where in it the part goes on after its
    beginning; None: it has not begun.

    ends: makes, for one answer, a function that gets its text piece by piece and says whether the answer ends there;
    None: it may go on after the part.
    """

    grammar: Grammar
    position: Callable[[str, bool], int | None]
    ends: Callable[[], Callable[[str], bool]] | None = None


@dataclass(frozen=True)
class AfterThought:
    """Constraint of an answer behind a thought that may precede it.

    begin, end: marks of the thought; opened: the prompt has begun it. grammar: of what follows it, or of the whole
    answer if there is no thought; None: any text. budget: tokens after which the thought is ended; None: any number.
    """

    begin: str
    end: str
    opened: bool
    grammar: Grammar | LazyGrammar | None = None
    budget: int | None = None


def literal(text: str) -> str:
    """`text` as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def response_format(document: Any) -> Grammar | None:
    """The grammar of a request's `response_format`; None: any text. RequestError for what is not supported.

    OpenAI's {"type": "text"}, {"type": "json_object"} and {"type": "json_schema", "json_schema": {"name", "schema",
    "strict", "description"}}; with llama.cpp's {"type": "json_object", "schema": ...}. A schema is enforced whether or
    not it is strict.
    """
    if document is None:
        return None
    if not isinstance(document, Mapping):
        raise RequestError("response_format must be an object")
    kind = document.get("type")
    allowed: dict[Any, tuple[str, ...]] = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(f"response_format.type must be text, json_object or json_schema, not {str(kind)[:40]!r}")
    _check_keys(document, ("type", *allowed[kind]), "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = document.get("schema")
        return Grammar.json_object() if schema is None else Grammar.json_schema(schema)
    wrapper = document.get("json_schema")
    if not isinstance(wrapper, Mapping) or wrapper.get("schema") is None:
        raise RequestError("response_format.json_schema must be an object with a schema")
    _check_keys(wrapper, ("name", "schema", "strict", "description"), "response_format.json_schema")
    return Grammar.json_schema(wrapper["schema"])


def _check_keys(document: Mapping[str, Any], allowed: Sequence[str], path: str) -> None:
    for name in document:
        if name not in allowed:
            raise RequestError(f"{path}.{str(name)[:64]} is not supported; known are {', '.join(allowed)}")


def check_depth(document: Any, noun: str) -> None:
    """RequestError for a document that is nested deeper than `MAX_DEPTH`."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level for inner in _children(value)]
        if not level:
            return
    raise RequestError(f"{noun} is nested more than {MAX_DEPTH} deep")


_SCALARS = frozenset((str, int, float, bool, type(None)))  # most values: quicker to tell than that they hold no others


def _children(value: Any) -> list[Any]:
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    parts: list[Any] = []
    for at in range(0, len(inner), WINDOW):  # millions of numbers: quickly, but not in one go
        part = inner[at : at + WINDOW]
        if not _SCALARS.issuperset(map(type, part)):
            parts += [one for one in part if isinstance(one, Mapping | list | tuple)]
    return parts


def json_text(document: Any, noun: str) -> str:
    """`document` as compact JSON, in its own order; RequestError if JSON has no such values."""
    try:
        return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{noun} cannot be written as JSON: {single_line(error)}") from None
