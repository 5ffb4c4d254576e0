"""The document of a plan: saved beside the model, printed by `powerinfer plan --json`, and shown in a report.

    {"format": 1, "kind": "plan", and the fields of `PlanDocument`}

A document may come from anywhere, so it is checked whole when it is read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from powerinfer.errors import ModelError
from powerinfer.formats.json_file import Between, Count, Length, NonNegative, checked, of_kind, parse_json, read_limited

FORMAT = 1
KIND = "plan"
TIERS = ("gpu", "cpu", "disk")

_LIMIT = 1 << 24  # bytes of a document

Share = Annotated[float, Between(0, 1 + 1e-9)]  # sums of floats may round up
Text = Annotated[str, Length(2000)]


@dataclass(frozen=True)
class LayerPlan:
    """A layer of a plan. gpu, cpu, disk: neurons; seconds: of its FFN for a step, by component; experts: those on the
    GPU; experts_in_ram: where a layer's rest on disk, how many of the others RAM holds at a time; inside: neurons of
    each of its experts on the GPU, of a layer that is divided by these."""

    layer: Count
    gpu: Count
    cpu: Count
    disk: Count
    mass_on_gpu: Share
    seconds: dict[str, NonNegative]
    experts: Count = 0
    experts_in_ram: Count = 0
    inside: Count = 0


@dataclass(frozen=True)
class CardPlan:
    """One of several GPUs: its name, its budget in bytes, its layers, whether it has the head, its bytes by use, and
    how many experts it has, of all layers where these are spread over GPUs."""

    name: Text
    vram: Count
    first_layer: Count
    layers: Count
    head: bool
    bytes: dict[str, Count]
    experts: Count = 0


@dataclass(frozen=True)
class Budgets:
    """Bytes."""

    vram: Count
    ram: Count


@dataclass(frozen=True)
class PolicyResult:
    """The result of a policy. optimal: whether it is proven optimal; None: the policy has no optimum."""

    decode_tok_s: NonNegative
    mass_on_gpu: Share
    work_on_gpu: Share
    optimal: bool | None
    solve_s: NonNegative


@dataclass(frozen=True)
class Predicted:
    """at_position: tokens in the cache at the estimated step; policies: by name.

    dense_tok_s: computing every neuron, within the same budgets; None: they do not hold that, or it is not known.
    skipping_tok_s: of experts, with the selector `exact`; None: the same, or this is that, or there are none. Where
    weights stay on disk: disk_bytes: read for a token; disk_hits: of the experts and neurons there that
    a token needs, the share that RAM has, None: none are there; prompt_disk_bytes: read for a piece of a prompt.
    """

    decode_tok_s: NonNegative
    ms_per_token: NonNegative
    at_position: Count
    policies: dict[str, PolicyResult]
    dense_tok_s: NonNegative | None = None
    skipping_tok_s: NonNegative | None = None
    disk_bytes: NonNegative = 0.0
    disk_hits: Share | None = None
    prompt_disk_bytes: NonNegative = 0.0


@dataclass(frozen=True)
class Help:
    """A budget at which more fits: what, the flag that gives it, its bytes, and whether the machine has them."""

    what: Text
    flag: Text
    bytes: Count
    within_machine: bool


@dataclass(frozen=True)
class PlanDocument:
    """A plan.

    key: of `PlanRequest.key`; fingerprint, profile: of the model and of the profile that it was made for; quantize: how
    the model was opened, None: as it is. fits: nothing is read from disk; loads: a load takes it. bytes: tier -> part
    -> bytes; activations: tier -> share. path: its file, None: not saved; assumed: lines about figures that were not
    measured. cards: where there are several GPUs, each by itself; split_mode: the engine's option.
    """

    key: Text
    model: Text
    fingerprint: Text
    quantize: Text | None
    weight_type: Text
    profile: Text
    policy: Text
    selector: Text
    budgets: Budgets
    context: Count
    batch: Count
    kv_type: Text
    fits: bool
    optimal: bool | None
    solve_s: NonNegative
    mass_on_gpu: Share
    work_on_gpu: Share
    bytes: dict[str, dict[str, Count]]
    activations: dict[str, Share]
    gpu_layers: Count
    layers: Annotated[list[LayerPlan], Length(1 << 12, smallest=1)]
    predicted: Predicted
    reasons: list[Text]
    helps: list[Help]
    hardware: Text
    path: Text | None = None
    loads: bool = True
    assumed: list[Text] = dataclasses.field(default_factory=list)
    cards: list[CardPlan] = dataclasses.field(default_factory=list)
    split_mode: Text = "layer"

    def __post_init__(self) -> None:
        for name, tiers in (("bytes", self.bytes), ("activations", self.activations)):
            if set(tiers) != set(TIERS):
                raise ValueError(f"{name} does not have just {', '.join(TIERS)}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Neurons of each layer."""
        return tuple(layer.gpu + layer.cpu + layer.disk for layer in self.layers)

    def json(self) -> dict[str, Any]:
        """The document, values of JSON."""
        return {"format": FORMAT, "kind": KIND, **dataclasses.asdict(self)}


def read_plan_document(path: Path, pipe: bool = False) -> PlanDocument:
    """The plan in a file: the whole file, or its last line. pipe: the path may be a pipe.

    RequestError if the file cannot be read, ModelError if it holds no plan.
    """
    raw = read_limited(path, _LIMIT, pipe)
    try:
        try:
            document = parse_json(raw, str(path))
        except ModelError:
            document = parse_json(raw.rstrip().rpartition(b"\n")[2], str(path))
        return checked(PlanDocument, of_kind(document, KIND, FORMAT, str(path)), str(path))
    except ModelError as error:
        raise ModelError(f"{error}; `powerinfer plan` makes a plan") from None


def tenths_of_percent(share: float) -> str:
    """A share as text: tenths of a percent."""
    return f"{100 * share:.1f} %"


def rate(tok_s: float) -> str:
    """Tokens a second as text: three significant digits, whole numbers from 100 on."""
    return f"{tok_s:,.0f}" if tok_s >= 100 else f"{tok_s:.3g}"
