"""Sampling as a model's publisher wants it: a folder's `generation_config.json`, a GGUF file's `general.sampling.*`.

The names in a GGUF file are those of llama.cpp, whose converter copies them from `generation_config.json`
(https://github.com/ggml-org/llama.cpp/pull/17120). A value of the wrong type or out of range is ignored with a note:
the model runs without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powerinfer.formats.json_file import read_json
from powerinfer.formats.mapped import shown

# Field of `SamplingParams` -> (type, smallest, largest value, whether the smallest itself is allowed).
_LIMITS: dict[str, tuple[type, float, float, bool]] = {
    "temperature": (float, 0, 100, True),
    "top_k": (int, -1, 1 << 31, True),
    "top_p": (float, 0, 1, False),
    "min_p": (float, 0, 1, True),
    "repetition_penalty": (float, 0, 100, False),
}
_GGUF = "general.sampling."
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}  # the others have the same name


@dataclass(frozen=True)
class SamplingDefaults:
    """values: fields of `SamplingParams`; source: where they come from; notes: lines for the user, on what was ignored.

    Without values the source is "": `SamplingParams`' own defaults apply.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()

    def with_given(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a request, and the defaults for the rest.

        A given temperature of 0 asks for the most likely token: then there are no defaults, and no penalty.
        """
        return dict(stated) if stated.get("temperature") == 0 else {**self.values, **stated}


def folder_defaults(folder: Path) -> SamplingDefaults:
    """The defaults in a folder's generation_config.json; none without that file. ModelError if it is not JSON.

    `do_sample: false` means greedy.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    document = read_json(path)[0]
    stated = {name: document.get(name) for name in _LIMITS}
    greedy = document.get("do_sample")
    defaults = _checked(stated, {name: name for name in _LIMITS}, path.name)
    if greedy is not None and type(greedy) is not bool:
        return _with_note(defaults, f"{path.name}: do_sample is {shown(greedy)}, not true or false; ignored")
    if greedy is False:
        penalty = {name: value for name, value in defaults.values.items() if name == "repetition_penalty"}
        return SamplingDefaults({"temperature": 0.0, **penalty}, path.name, defaults.notes)
    return defaults


GGUF_KEYS = {name: _GGUF + _GGUF_NAMES.get(name, name) for name in _LIMITS}


def gguf_defaults(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults in a GGUF file's metadata."""
    stated = {name: metadata.get(key) for name, key in GGUF_KEYS.items()}
    # float32 in the file: 0.95 reads as 0.949999988, and an explicit 0.95 would not give the same answer
    stated = {name: float(f"{value:.7g}") if type(value) is float else value for name, value in stated.items()}
    return _checked(stated, GGUF_KEYS, "GGUF metadata")


def _checked(stated: Mapping[str, Any], keys: Mapping[str, str], source: str) -> SamplingDefaults:
    """Values that are stated (None: not stated) and valid; keys: what the file calls each field."""
    values, notes = {}, []
    for name, value in stated.items():
        if value is None:
            continue
        kind, low, high, closed = _LIMITS[name]
        right = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
        if right and low <= value <= high and (closed or value > low):
            values[name] = kind(value)
        else:
            lower = "from" if closed else "above"
            upper = "to" if closed else "and at most"
            noun = f"{'number' if kind is float else 'whole number'} {lower} {low} {upper} {high}"
            notes.append(f"{source}: {keys[name]} is {shown(value)}, not a {noun}; ignored")
    return SamplingDefaults(values, source if values else "", tuple(notes))


def _with_note(defaults: SamplingDefaults, note: str) -> SamplingDefaults:
    return SamplingDefaults(defaults.values, defaults.source, (*defaults.notes, note))
