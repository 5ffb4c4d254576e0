"""JSON: parsed strictly, and checked against a dataclass.

    hardware = checked(Hardware, parse_json(raw, str(path)), str(path))

The type hints are the schema. Of the types bool, int, float, str, Literal, `X | None`, list, tuple, dict (with keys of
str or int), Mapping, dataclasses and Any; `Annotated[int, Between(0, 9)]` and `Annotated[str, Length(80)]` set limits.
A field with a default may be absent; one that the dataclass lacks is an error, unless the class has
`extra_fields = True`. true is not a number, NaN and infinity are not floats. ValueError, TypeError or ArithmeticError
from `__post_init__` is reported like any other mistake.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import stat
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.mapped import MappedFile, shown

_MAX_JSON = 1 << 24  # bytes of a foreign file

T = TypeVar("T")


def parse_json(raw: bytes, source: str, infinite: bool = False) -> Any:
    """Foreign JSON; ModelError for bad UTF-8, duplicate keys, NaN, or excessive nesting. infinite: `Infinity`, which
    Python writes and JSON has not, is one."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key occurs twice")
        return result

    def constant(name: str) -> Any:
        if infinite and name == "Infinity":
            return math.inf
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError:
        raise ModelError(f"{source}: not valid UTF-8") from None
    except RecursionError:
        raise ModelError(f"{source}: nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{source}: not valid JSON ({error})") from None


def read_json(path: Path) -> tuple[dict[str, Any], MappedFile]:
    """The object in a JSON file of a model, and the file; ModelError if it is not an object of sane size."""
    file = MappedFile(path)
    if file.size > _MAX_JSON:
        raise ModelError(f"{path}: {file.size} bytes are absurd for such a file")
    value = parse_json(file.read(0, file.size), str(path), infinite=True)
    if type(value) is not dict:
        raise ModelError(f"{path}: not a JSON object")
    return value, file


def read_limited(path: Path, limit: int, pipe: bool = False) -> bytes:
    """The bytes of a file; RequestError if it cannot be read, ModelError if there are more than `limit`.

    pipe: accept pipes too, for paths that the user gave; reading one waits for its writer.
    """
    flags = 0 if pipe else os.O_NONBLOCK  # opening a named pipe waits for a writer
    try:
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            if not pipe and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RequestError(f"cannot read {path} (not a regular file)")
            raw = file.read(limit + 1)
    except OSError as error:
        raise RequestError(f"cannot read {path} ({error.strerror or error})") from None
    if len(raw) > limit:
        raise ModelError(f"{path} is too large: more than {limit} bytes")
    return raw


def of_kind(document: Any, kind: str, format: int, source: str) -> dict[str, Any]:
    """A document of our own without its `kind` and `format`; ModelError if they are others."""
    if type(document) is not dict or document.get("kind") != kind:
        kind_ = document.get("kind") if type(document) is dict else document
        raise ModelError(f"{source}: its kind is {shown(kind_)}, not {kind}")
    if type(document.get("format")) is not int or document["format"] != format:
        raise ModelError(f"{source}: its format is {shown(document.get('format'))}, and this version reads {format}")
    return {name: value for name, value in document.items() if name not in ("kind", "format")}


# ---------------------------------------------------------------- checked against type hints


@dataclass(frozen=True)
class Between:
    """Limits of a number, both included."""

    low: float
    high: float


@dataclass(frozen=True)
class Length:
    """Limits of a text in characters, of a list or table in entries. printable: a text without control characters."""

    largest: int
    smallest: int = 0
    printable: bool = False


Line = Annotated[str, Length(2000, printable=True)]
Share = Annotated[float, Between(0, 1)]
Count = Annotated[int, Between(0, 1 << 60)]
NonNegative = Annotated[float, Between(0, 1e15)]

_NUMBERS: dict[type, Between] = {int: Between(-(1 << 63), (1 << 63) - 1), float: Between(-1e300, 1e300)}
_LENGTH = Length(1 << 12)


class _FieldError(Exception):
    """(name of the field, what is wrong with it)"""


def checked(kind: type[T], value: Any, source: str) -> T:
    """`value`, parsed JSON, as a `kind`; ModelError, beginning with `source` and naming the field, if it is none."""
    try:
        result: T = _read(kind, value, "", None)
    except _FieldError as error:
        name, problem = error.args
        raise ModelError(f"{source}: {f'{name} {problem}'.strip()}") from None
    return result


def _read(kind: Any, value: Any, name: str, limit: Between | Length | None) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _read(inner[0], value, name, inner[1])
    if origin in (Union, types.UnionType):
        (member,) = (one for one in inner if one is not type(None))
        return None if value is None else _read(member, value, name, limit)
    if kind in (int, float):
        return _number(kind, value, name, limit if isinstance(limit, Between) else _NUMBERS[kind])
    if kind is bool:
        return _only(type(value) is bool, value, name, "true or false")
    if origin is Literal:
        return _only(type(value) is str and value in inner, value, name, f"one of {', '.join(inner)}")
    length = limit if isinstance(limit, Length) else _LENGTH
    if kind is str:
        good = type(value) is str and (value.isprintable() or not length.printable)
        return _sized(_only(good, value, name, "a line of text" if length.printable else "a text"), name, length)
    if origin in (dict, Mapping):
        return dict(_entries(inner[0], inner[1], _sized(_object(value, name), name, length), name))
    if origin in (list, tuple):
        items = _sized(_only(type(value) is list, value, name, "a list"), name, length)
        return origin(_items(inner, origin is tuple and inner[-1] is not ..., items, name))
    return _record(kind, _object(value, name), name)


def _only(good: bool, value: Any, name: str, noun: str) -> Any:
    if not good:
        raise _FieldError(name, f"is {shown(value)}, not {noun}")
    return value


def _number(kind: type, value: Any, name: str, limit: Between) -> Any:
    right = type(value) is int or (kind is float and type(value) is float)
    noun = "a whole number" if kind is int else "a number"
    # compared before it is converted: an integer may be beyond any float; NaN is not between anything
    return kind(_only(right and limit.low <= value <= limit.high, value, name, f"{noun} {_range(limit)}"))


def _range(limit: Between) -> str:
    low, high = (str(end) if type(end) is int else f"{end:g}" for end in (limit.low, limit.high))
    return f"from {low} to {high}"


def _sized(value: Any, name: str, length: Length) -> Any:
    if not length.smallest <= len(value) <= length.largest:
        raise _FieldError(name, f"has a length of {len(value)}, not {length.smallest} to {length.largest}")
    return value


def _object(value: Any, name: str) -> Any:
    return _only(type(value) is dict, value, name, "a JSON object")


def _items(kinds: tuple[Any, ...], fixed: bool, values: list[Any], name: str) -> Iterable[Any]:
    if fixed and len(values) != len(kinds):
        raise _FieldError(name, f"has a length of {len(values)}, not {len(kinds)}")
    for at, value in enumerate(values):
        yield _read(kinds[at] if fixed else kinds[0], value, f"{name}[{at}]", None)


def _canonical(key: str) -> bool:
    """Whether a text is a whole number as it is written here: "07" would be another key of the same number as "7"."""
    return key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key


def _entries(keys: Any, values: Any, table: dict[str, Any], name: str) -> Iterable[tuple[Any, Any]]:
    converts = int in (keys, *get_args(keys))  # JSON has texts only for keys
    for key, value in table.items():
        value_key = int(key) if converts and _canonical(key) else key
        entry_name = f"{name}.{shown(key)[1:-1]}"
        yield _read(keys, value_key, f"a key of {name}", None), _read(values, value, entry_name, None)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _record(kind: Any, value: dict[str, Any], name: str) -> Any:
    prefix = f"{name}." if name else ""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for key in value:
        if key not in fields and not getattr(kind, "extra_fields", False):
            raise _FieldError(f"{prefix}{shown(key)[1:-1]}", "is not known")
    fields_read = {}
    for field in fields.values():
        if field.name in value:
            fields_read[field.name] = _read(_hints(kind)[field.name], value[field.name], prefix + field.name, None)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise _FieldError(prefix + field.name, "is missing")
    try:
        return kind(**fields_read)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise _FieldError(name, str(error)) from None
