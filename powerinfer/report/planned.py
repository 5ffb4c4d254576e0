"""The document of a plan, as `powerinfer plan` keeps it and --json ends with it, read back for a report.

The file may come from anywhere, so every figure is checked before it is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.json_file import parse_json
from powerinfer.formats.mapped import shown

TIERS = ("gpu", "cpu", "disk")
_LIMIT = 16 << 20  # bytes of a document: a line a layer
_MOST_LAYERS = 1 << 12
_MOST_WORDS = 256  # reasons, policies, parts

Document = dict[str, Any]


@dataclass(frozen=True)
class LayerPlan:
    """A layer of a plan. gpu, cpu, disk: neurons; seconds: of its FFN for a token, by what takes them."""

    gpu: int
    cpu: int
    disk: int
    mass_on_gpu: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class Help:
    """A budget at which more fits: what, the flag that gives it, its bytes, and whether the machine has so many."""

    what: str
    flag: str
    nbytes: int
    within_machine: bool


@dataclass(frozen=True)
class PlanFacts:
    """What a plan's document says.

    fingerprint, profile: of the model and of the profile that it was made for, "" for none; quantize: how the model was
    opened, None as it is. budgets: tier -> bytes;
    bytes: tier -> part -> bytes; policies: name -> (tokens a second, mass on the GPU).
    """

    document: Document
    model: str
    fingerprint: str
    profile: str
    quantize: str | None
    fits: bool
    policy: str
    selector: str
    context: int
    batch: int
    budgets: dict[str, int]
    hardware: str
    mass_on_gpu: float
    decode_tok_s: float
    bytes: dict[str, dict[str, int]]
    layers: list[LayerPlan]
    policies: dict[str, tuple[float, float]]
    reasons: list[str]
    assumed: list[str]
    helps: list[Help]

    @property
    def sizes(self) -> tuple[int, int]:
        """(layers, neurons of a layer)."""
        return len(self.layers), self.layers[0].gpu + self.layers[0].cpu + self.layers[0].disk


def rate(tok_s: float) -> str:
    """Tokens a second for people: three digits, or all before the point."""
    return f"{tok_s:,.0f}" if tok_s >= 100 else f"{tok_s:.3g}"


def read_plan(path: Path) -> PlanFacts:
    """The plan in a file: the JSON document of `powerinfer plan`, alone or as the last of several lines.

    RequestError if the file cannot be read, ModelError if it holds no plan.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(_LIMIT + 1)
    except OSError as error:
        raise RequestError(f"cannot read {path} ({error.strerror or error})") from None
    if len(raw) > _LIMIT:
        raise ModelError(f"{path} is larger than any plan")
    try:
        document = parse_json(raw, str(path))
    except ModelError:
        document = parse_json(raw.rstrip().rpartition(b"\n")[2], str(path))
    try:
        return plan_facts(document)
    except ModelError as error:
        raise ModelError(f"{path} holds no plan: {error}; `powerinfer plan --json > FILE` writes one") from None


def plan_facts(document: Any) -> PlanFacts:
    """What a plan's document says; ModelError where it does not say what it should."""
    root = _Fields(document, "")
    predicted = root.within("predicted")
    tiers, budgets = root.within("bytes"), root.within("budgets")
    layers = root.list("layers", _MOST_LAYERS)
    if not layers:
        raise ModelError("no layers")
    policies = predicted.within("policies")
    return PlanFacts(
        document,
        root.text("model"),
        root.text("fingerprint"),
        root.text("profile"),
        root.text("quantize") if document.get("quantize") is not None else None,
        root.flag("fits"),
        root.text("policy"),
        root.text("selector"),
        root.count("context"),
        root.count("batch"),
        {"gpu": budgets.count("vram"), "cpu": budgets.count("ram")},
        root.text("hardware"),
        root.number("mass_on_gpu", 1.0),
        predicted.number("decode_tok_s"),
        {tier: {part: tiers.within(tier).count(part) for part in tiers.within(tier).names()} for tier in TIERS},
        [_layer(one, number) for number, one in enumerate(layers)],
        {
            name: (policies.within(name).number("decode_tok_s"), policies.within(name).number("mass_on_gpu", 1.0))
            for name in policies.names()
        },
        [_text(one, "reasons") for one in root.list("reasons", _MOST_WORDS)],
        [_text(one, "assumed") for one in root.list("assumed", _MOST_WORDS)] if "assumed" in root.names() else [],
        [_help(one, number) for number, one in enumerate(root.list("helps", _MOST_WORDS))],
    )


def _help(one: Any, number: int) -> Help:
    fields = _Fields(one, f"helps[{number}].")
    return Help(fields.text("what"), fields.text("flag"), fields.count("bytes"), fields.flag("within_machine"))


def _layer(one: Any, number: int) -> LayerPlan:
    layer = _Fields(one, f"layers[{number}].")
    seconds = layer.within("seconds")
    parts = {name: seconds.number(name) for name in seconds.names()}
    gpu, cpu, disk = map(layer.count, TIERS)
    return LayerPlan(gpu, cpu, disk, layer.number("mass_on_gpu", 1.0), parts)


class _Fields:
    """The fields of a JSON object, each checked as it is asked for; where: the path to the object, for errors."""

    def __init__(self, value: Any, where: str) -> None:
        if type(value) is not dict:
            raise ModelError(f"{where or 'it'} is not an object")
        self._values: Document = value
        self._where = where

    def _take(self, name: str, kinds: tuple[type, ...], what: str) -> Any:
        value = self._values.get(name)
        if type(value) not in kinds:
            raise ModelError(f"{self._where}{name} is {shown(value)}, not {what}")
        return value

    def within(self, name: str) -> _Fields:
        return _Fields(self._values.get(name), f"{self._where}{name}.")

    def names(self) -> list[str]:
        if len(self._values) > _MOST_WORDS:
            raise ModelError(f"{self._where} has {len(self._values)} entries")
        return list(self._values)

    def list(self, name: str, most: int) -> list[Any]:
        value = self._take(name, (list,), "a list")
        if len(value) > most:
            raise ModelError(f"{self._where}{name} has {len(value)} entries")
        return list(value)

    def flag(self, name: str) -> bool:
        return bool(self._take(name, (bool,), "true or false"))

    def text(self, name: str) -> str:
        return _text(self._values.get(name), self._where + name)

    def number(self, name: str, most: float = 1e15) -> float:
        value = self._take(name, (int, float), "a number")
        if not (math.isfinite(value) and 0 <= value <= most * (1 + 1e-9)):
            raise ModelError(f"{self._where}{name} is {shown(value)}")
        return float(value)

    def count(self, name: str) -> int:
        value = self._take(name, (int,), "a whole number")
        if not 0 <= value < 1 << 60:
            raise ModelError(f"{self._where}{name} is {shown(value)}")
        return int(value)


def _text(value: Any, where: str) -> str:
    if type(value) is not str or len(value) > 2000:
        raise ModelError(f"{where} is {shown(value)}, not a text")
    return value
