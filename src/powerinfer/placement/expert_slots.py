"""What the policies over experts (experts.py) hit with memory for some of the experts, by a profile and by a trace.

A profile predicts `static` and `lru`; a trace of other text measures all policies. The document is kept beside the
model for its report:

    {"format": 2, "kind": "expert-slots", and the fields of `Comparison`}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.rankings import DISK_POLICIES
from powerinfer.errors import PowerInferError
from powerinfer.experts import ExpertProfile, Selected
from powerinfer.formats.json_file import Between, Count, Length, NonNegative, checked, of_kind, parse_json, read_limited
from powerinfer.formats.prepared import prepared_folder, write_small
from powerinfer.formats.quant import block_type
from powerinfer.placement.experts import (
    EXPERT_POLICIES,
    Replayed,
    make_policy,
    replay,
    replay_on_disk,
    slots_by_frequency,
    slots_evenly,
)
from powerinfer.progress import Progress, silent

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint

FORMAT = 2
KIND = "expert-slots"
SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)
"""Shares of the experts that have slots, where nobody asks for others."""
TOKENS = 10_000
"""Of a trace that are replayed by default."""

_LIMIT = 1 << 20  # bytes of a document

Share = Annotated[float, Between(0, 1 + 1e-9)]  # sums of floats may round up


@dataclass(frozen=True)
class PolicyHits:
    """A policy with some slots. predicted: by the profile, measured: by the trace, share of the selections whose expert
    had a slot; low, high: of the parts of the profile's texts the one with the fewest hits, and the one with the most;
    copies: experts copied for a token; bytes: of these. None: not known."""

    predicted: Share | None
    low: Share | None
    high: Share | None
    measured: Share | None
    copies: NonNegative | None
    bytes: NonNegative | None


@dataclass(frozen=True)
class AtSlots:
    """slots: of a layer, on average; share: of all experts that they hold; bytes: of all slots."""

    slots: NonNegative
    share: Share
    bytes: Count
    policies: Annotated[dict[str, PolicyHits], Length(len(EXPERT_POLICIES), smallest=1)]


@dataclass(frozen=True)
class Comparison:
    """The policies with several numbers of slots. tokens: of the trace that were replayed, 0: there was none."""

    fingerprint: str
    tokens: Count
    at: Annotated[list[AtSlots], Length(1 << 10, smallest=1)]

    def off(self, policy: str) -> float | None:
        """The largest difference between what a policy was predicted to hit and what it hit; None: not known."""
        every = (one.policies[policy] for one in self.at if policy in one.policies)
        pairs = [(one.predicted, one.measured) for one in every]
        return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=None)


def expert_bytes(checkpoint: Checkpoint) -> dict[int, int]:
    """Bytes of one expert, of each layer that has experts, in the types that the model is opened with."""
    config, found = checkpoint.config, {}
    for layer, ffn in config.experts.items():
        shapes = {name: shape for name, shape in ffn.tensors(config.d_model) if name.startswith("experts_")}
        found[layer] = sum(
            math.prod(shape[1:-1]) * block_type(checkpoint.taken_type(f"layers.{layer}.{name}")).row_bytes(shape[-1])
            for name, shape in shapes.items()
        )
    return found


def predicted_hits(profile: ExpertProfile, policy: str, slots: Mapping[int, int]) -> float | None:
    """What a policy hits by a profile: `static` as often, `lru` as lately as experts are selected. None of others."""
    if policy not in ("static", "lru"):
        return None
    return _mean(profile, [getattr(one, f"{policy}_hits")[slots[one.layer]] for one in profile.layers])


def predicted_range(profile: ExpertProfile, policy: str, slots: Mapping[int, int]) -> tuple[float, float] | None:
    """The fewest and the most hits of a part of the profile's texts, with `static` by the counts of all other parts;
    None of other policies, and where the texts are one part. What a policy hits depends on the text: this says how
    much, as far as these texts differ."""
    if policy not in ("static", "lru") or profile.n_parts < 2:
        return None
    hits = [getattr(one, f"{policy}_hits_by_part")[:, slots[one.layer]] for one in profile.layers]
    of_part = np.average(np.stack(hits), axis=0, weights=[one.top_k for one in profile.layers])
    return float(of_part.min()), float(of_part.max())


def _mean(profile: ExpertProfile, hits: Sequence[float]) -> float:
    """Of layers, by their selections."""
    return float(np.average(hits, weights=[one.top_k for one in profile.layers]))


def compare(
    profile: ExpertProfile,
    nbytes: Mapping[int, int],
    slots: Sequence[float] = (),
    selected: Selected | None = None,
    fingerprint: str = "",
    progress: Progress = silent,
    *,
    disk: bool = False,
) -> Comparison:
    """All policies with several numbers of slots; disk: those of `DISK_POLICIES`, over experts that rest on disk.

    nbytes: of an expert, by layer; slots: of a layer, on average; (): `SHARES` of the experts. Policies begin with the
    most frequent experts of the profile; `static` and `dynamic` divide the slots among the layers by frequency, the
    others evenly. progress: ("replaying", policies done, policies).
    """
    experts = {one.layer: one.n_experts for one in profile.layers}
    of_all = sum(nbytes[layer] * n for layer, n in experts.items())
    mean = sum(experts.values()) / len(experts)
    counts = [min(n, mean) for n in slots] or [share * mean for share in SHARES]
    at = []
    for number, n in enumerate(counts):
        budget = round(n / mean * of_all)
        found = {}
        policies = DISK_POLICIES if disk else EXPERT_POLICIES
        for place, policy in enumerate(policies):
            progress("replaying", number * len(policies) + place, len(counts) * len(policies))
            found[policy] = (_with_disk if disk else _with)(profile, policy, nbytes, budget, selected)
        at.append(AtSlots(n, n / mean, budget, found))
    return Comparison(fingerprint, 0 if selected is None else max(map(len, selected.values())), at)


def _with(
    profile: ExpertProfile, policy: str, nbytes: Mapping[int, int], budget: int, selected: Selected | None
) -> PolicyHits:
    frequencies = profile.frequencies
    experts = {layer: len(each) for layer, each in frequencies.items()}
    if policy in ("static", "dynamic"):
        slots = slots_by_frequency(frequencies, nbytes, budget)
    else:
        slots = slots_evenly(experts, nbytes, budget)
    low, high = predicted_range(profile, policy, slots) or (None, None)
    predicted = predicted_hits(profile, policy, slots), low, high
    if selected is None:
        return PolicyHits(*predicted, None, None, None)
    return _measured(predicted, replay(make_policy(policy, slots, experts, frequencies), selected), nbytes)


def _with_disk(
    profile: ExpertProfile, policy: str, nbytes: Mapping[int, int], budget: int, selected: Selected | None
) -> PolicyHits:
    """Layers share the memory evenly, and each has slots for a token's experts at least. Of `lru` alone a profile says
    what it hits: memory for `static` has what a token needs, too, be it frequent or not."""
    experts = {one.layer: one.n_experts for one in profile.layers}
    least = {one.layer: one.top_k for one in profile.layers}
    slots = {layer: max(least[layer], n) for layer, n in slots_evenly(experts, nbytes, budget).items()}
    predicted: tuple[float | None, float | None, float | None] = None, None, None
    if policy == "lru":
        predicted = predicted_hits(profile, policy, slots), *(predicted_range(profile, policy, slots) or (None, None))
    if selected is None:
        return PolicyHits(*predicted, None, None, None)
    start = np.zeros((len(experts), max(experts.values())), np.float32)
    for row, layer in zip(start, selected, strict=True):
        row[: experts[layer]] = profile.frequencies[layer]
    return _measured(predicted, replay_on_disk(policy, start, selected, slots), nbytes)


def _measured(
    predicted: tuple[float | None, float | None, float | None], found: Replayed, nbytes: Mapping[int, int]
) -> PolicyHits:
    copies = sum(found.copies.values()) / found.tokens
    return PolicyHits(*predicted, found.hit_rate, copies, found.copied_bytes(nbytes))


def some_tokens(selected: Selected, corpus_tokens: Sequence[int], limit: int) -> Selected:
    """Up to `limit` tokens, the first ones of each corpus in equal shares; tokens of a corpus stay in their order."""
    begins = np.cumsum([0, *corpus_tokens])
    left = limit
    rows: list[NDArray[np.int64]] = []
    for at in np.argsort(corpus_tokens, kind="stable"):  # short texts leave their share to others
        take = min(corpus_tokens[at], left // (len(corpus_tokens) - len(rows)))
        rows.append(np.arange(begins[at], begins[at] + take))
        left -= take
    places: NDArray[np.int64] = np.sort(np.concatenate(rows))
    return {layer: each[places] for layer, each in selected.items()}


# ---------------------------------------------------------------- the document


def document(comparison: Comparison) -> dict[str, Any]:
    """As JSON."""
    return {"format": FORMAT, "kind": KIND, **dataclasses.asdict(comparison)}


def _path(checkpoint: Checkpoint, prepared: str | None) -> Path:
    return prepared_folder(checkpoint.path, prepared) / "expert-slots.json"


def keep(checkpoint: Checkpoint, prepared: str | None, comparison: Comparison) -> Path:
    """Write the document beside the model, for its report; OSError or PowerInferError if that fails."""
    path = _path(checkpoint, prepared)
    write_small(path, json.dumps(document(comparison), allow_nan=False).encode())
    return path


def kept(checkpoint: Checkpoint, prepared: str | None) -> Comparison | None:
    """What is kept for this model; None without it, or if it cannot be used."""
    path = _path(checkpoint, prepared)
    if not path.is_file():
        return None
    try:
        raw = parse_json(read_limited(path, _LIMIT), str(path))
        found = checked(Comparison, of_kind(raw, KIND, FORMAT, str(path)), str(path))
    except PowerInferError:
        return None
    whole = all("static" in one.policies and one.policies.keys() <= set(EXPERT_POLICIES) for one in found.at)
    return found if whole and found.fingerprint == checkpoint.fingerprint else None


def curve(profile: ExpertProfile, policy: str, points: int = 65) -> Iterator[tuple[float, float]]:
    """(share of the experts that have slots, predicted hits) of `static` or `lru`, experts all of one size."""
    for share, slots in _budgets(profile, policy, points):
        hits = predicted_hits(profile, policy, slots)
        assert hits is not None
        yield share, hits


def band(profile: ExpertProfile, policy: str, points: int = 65) -> Iterator[tuple[float, float, float]]:
    """(share, fewest, most) of the same over parts of the texts; nothing where they are one part."""
    for share, slots in _budgets(profile, policy, points):
        found = predicted_range(profile, policy, slots)
        if found is not None:
            yield share, *found


def _budgets(profile: ExpertProfile, policy: str, points: int) -> Iterator[tuple[float, dict[int, int]]]:
    """(share of the experts that have slots, slots of each layer), experts all of one size."""
    experts = {one.layer: one.n_experts for one in profile.layers}
    same = dict.fromkeys(experts, 1)
    total = sum(experts.values())
    for budget in np.unique(np.linspace(0, total, points).round().astype(np.int64)).tolist():
        if policy == "static":
            slots = slots_by_frequency(profile.frequencies, same, budget)
        else:
            slots = slots_evenly(experts, same, budget)
        yield budget / total, slots
