"""Values from foreign metadata: of the right type and in range, or a ModelError that names the key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from powerinfer.errors import ModelError
from powerinfer.formats.mapped import shown

T = TypeVar("T")

_REQUIRED: Any = object()


class Fields:
    """Typed reads of a mapping; every key that is read is remembered, so that `unread` can name the others.

    source: a file name, the start of error messages; prefix: of every key; notes: where readers of the values leave
    lines for the user; names: of keys in the file, where it calls them otherwise.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        prefix: str = "",
        notes: list[str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()
        self._names = names or {}
        self.source = source
        self.notes = [] if notes is None else notes

    def prefixed(self, prefix: str) -> Fields:
        """Reads of the same mapping, of keys with another prefix."""
        return Fields(self._values, self.source, prefix, self.notes)

    def bad(self, key: str, problem: str) -> ModelError:
        """The error for a key with an unsupported value."""
        return ModelError(f"{self.source}: {self._prefix}{self._names.get(key, key)} {problem}")

    def get(self, key: str, default: T) -> Any | T:
        """The value as it is; `default` when the key is absent or null."""
        self._read.add(key)
        value = self._values.get(self._prefix + key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.get(key, None) is not None

    def _typed(self, key: str, default: Any, accept: Callable[[Any], Any], noun: str) -> Any:
        value = self.get(key, _REQUIRED)
        if value is _REQUIRED:
            if default is _REQUIRED:
                raise self.bad(key, "is missing")
            return default
        accepted = accept(value)
        if accepted is None:
            raise self.bad(key, f"is {shown(value)}, not {noun}")
        return accepted

    def integer(self, key: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
        """An integer from `low` to `high`; a list of equal ones counts as one."""

        def accept(value: Any) -> int | None:
            if type(value) is list and value and all(type(v) is int and v == value[0] for v in value):
                value = value[0]
            return value if type(value) is int and low <= value <= high else None

        return self._typed(key, default, accept, f"a number from {low} to {high}")

    def integers(self, key: str, count: int, low: int, high: int, default: Any = _REQUIRED) -> list[int]:
        """Integers of `count` layers, from `low` to `high`: one for all of them, or a list with one for each."""
        values = self.get(key, None)
        if type(values) is not list:
            return [self.integer(key, low, high, default)] * count
        if len(values) != count or not all(type(value) is int and low <= value <= high for value in values):
            raise self.bad(key, f"is {shown(values)}, not a number from {low} to {high} for every layer")
        return values

    def number(self, key: str, low: float, high: float, default: Any = _REQUIRED) -> Any:
        """A finite float from `low` to `high`."""

        def accept(value: Any) -> float | None:
            # compare before converting: a large integer may exceed every float
            right = type(value) in (int, float) and low <= value <= high
            return float(value) if right and math.isfinite(value) else None

        return self._typed(key, default, accept, f"a number from {low:g} to {high:g}")

    def numbers(self, key: str, count: int, low: float, high: float) -> list[float]:
        """Finite floats of `count` layers, from `low` to `high`: one for all of them, or a list."""
        values = self.get(key, None)
        if type(values) is not list:
            return [self.number(key, low, high)] * count
        right = [type(value) in (int, float) and low <= value <= high for value in values]
        if len(values) != count or not all(right):
            raise self.bad(key, f"is {shown(values)}, not a number from {low:g} to {high:g} for every layer")
        return [float(value) for value in values]

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        """A truth value."""
        return self._typed(key, default, lambda value: value if type(value) is bool else None, "true or false")

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        return self._typed(key, default, lambda value: value if type(value) is str else None, "a text")

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but these (absent and null pass): the engine does nothing that the key could ask for."""
        value = self.get(key, None)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.bad(key, f"is {shown(value)}, which this engine does not support")

    def peek(self, key: str) -> Any:
        """The value as it is, which does not count as read; None where there is none."""
        return self._values.get(self._prefix + key)

    def was_read(self, key: str) -> bool:
        """Whether somebody has asked for it."""
        return key in self._read

    def unread(self) -> list[str]:
        """Keys below the prefix that were not read."""
        start = len(self._prefix)
        keys = (key[start:] for key in self._values if key.startswith(self._prefix))
        return sorted(key for key in keys if key not in self._read)
