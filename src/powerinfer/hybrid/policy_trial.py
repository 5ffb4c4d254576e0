"""Which policy over experts (placement/experts.py) decodes fastest with this model on this machine: tried, and saved.

`--expert-policy auto`: before a model is used, a short text is decoded under each policy, whole steps of the whole
model, the same tokens for each. Policies take turns, a block of steps at a time, and each finds its experts on the GPU
as it left them. What counts is a policy's time of a block by that of `static` in the same round. The choice is saved in
expert-policy.json: if it changed from run to run, so would the bits of the answers. It is `static` unless another one
is clearly faster, and where the trial fails or is interrupted. A choice is made anew at a later load if other programs
disturbed the trial and the machine is quiet then, and if a trial failed for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.devices.replayed_spans import UNRECORDED
from powerinfer.devices.streams import streams_of
from powerinfer.devices.torch_device import current, gpu_failures
from powerinfer.formats.json_file import Between, Length
from powerinfer.formats.prepared import prepared_folder
from powerinfer.hardware.gpu_rates import software
from powerinfer.placement.experts import EXPERT_POLICIES, Policy
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.saved_trials import Key, find_entry, keep_entry, trial_key
from powerinfer.system import quiet

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.experts import Copier, HybridExperts
    from powerinfer.hybrid.resolve import Resolved

KIND = "expert-policies"

BLOCK = 16
"""Steps that a policy decodes at a time, at most."""
ROUNDS = 8
"""Blocks of each policy."""
WARM_UP = 2
"""The first of them, which do not count: policies learn what the text selects."""
GAIN = 0.97
"""Another policy must take less than this share of the time of `static`, in the median of the rounds, and be faster in
all of them but one: else the difference may be chance."""

FAILURES = 2
"""Trials that fail, one after another: then `static` stays."""

INTERRUPTED = "its trial was interrupted; --retrial repeats it"

_WHY = 1 << 10  # characters

Seconds = dict[str, list[float]]
"""Of each policy the time of a step, in every round that counts."""

Name = Literal["static", "lru", "lfu", "dynamic"]


@dataclass(frozen=True)
class _Kept:
    """A choice in the file. why: there is no measurement; seconds: of a step, medians, otherwise; disturbed: cores that
    others took during the trial, 0 if it was not disturbed; failures: trials that failed, up to this one."""

    key: Key
    policy: Name
    seconds: Annotated[dict[str, Annotated[float, Between(0, 1e6)]], Length(len(EXPERT_POLICIES))]
    why: Annotated[str, Length(_WHY)]
    disturbed: Annotated[float, Between(0, 1e6)] = 0.0
    failures: Annotated[int, Between(0, FAILURES)] = 0


@dataclass(frozen=True)
class Chosen:
    """policy: a name of `EXPERT_POLICIES`; why: for people."""

    policy: str
    why: str


def choose(seconds: Mapping[str, Sequence[float]]) -> str:
    """The fastest policy that is clearly faster than `static`; otherwise that."""
    clear: list[tuple[float, str]] = []
    for name, own in seconds.items():
        shares = [one / base for one, base in zip(own, seconds["static"], strict=True)]
        if name != "static" and median(shares) < GAIN and sum(share >= 1 for share in shares) <= 1 < len(shares):
            clear.append((median(shares), name))
    return min(clear)[1] if clear else "static"


def measured(
    executor: SplitExecutor,
    ffns: Sequence[HybridExperts],
    make: Callable[[str], Policy],
    sample: Sequence[int],
    copier: Copier,
    progress: Progress = silent,
) -> Seconds:
    """Decode a text under every policy, by turns; empty if the context holds too little of it.

    make: a new policy, whose experts the GPU has at first; sample: the token ids of a text; copier: of the FFNs. The KV
    cache must be empty. PowerInferError if the GPU fails.
    """
    size = min(BLOCK, executor.n_pages * executor.page_size // ROUNDS)
    if not size:
        return {}
    policies = {name: make(name) for name in EXPERT_POLICIES}
    seconds: Seconds = {name: [] for name in policies}
    tokens = np.resize(np.asarray(sample or [0], np.int32), size * ROUNDS)
    device = executor.gpu.device
    with gpu_failures("trying policies of experts", "leave out --expert-policy"), current(device):
        for turn in range(ROUNDS):
            progress("trial of policies", turn, ROUNDS)
            for name in [*EXPERT_POLICIES[turn % len(policies) :], *EXPERT_POLICIES[: turn % len(policies)]]:
                for ffn in ffns:
                    ffn.follow(policies[name])
                # With `static` the GPU may call the CPU, so steps are recorded anew: before they are timed.
                copier.on = False
                for _ in range(UNRECORDED if executor.gpu.how else 0):
                    decode_one(executor, tokens[turn * size], turn * size)
                copier.on = True
                begin = _finished(device)
                for at in range(turn * size, (turn + 1) * size):
                    decode_one(executor, tokens[at], at)
                for ffn in ffns:
                    ffn.finish_copies()
                taken = _finished(device) - begin
                if turn >= WARM_UP:
                    seconds[name].append(taken / size)
    progress("trial of policies", ROUNDS, ROUNDS)
    return seconds


def _finished(device: torch.device) -> float:
    """The time when all that the device was given is done."""
    streams_of(device).finish()
    return time.perf_counter()


def decode_one(executor: SplitExecutor, token: np.int32, at: int) -> None:
    """A step of one token at a position; those before it have been computed."""
    pages = np.arange(at // executor.page_size + 1, dtype=np.int32)[None]
    nothing = np.zeros(1, np.int32)
    executor.forward(Batch(np.array([token], np.int32), np.array([at], np.int32), nothing, pages, nothing))


# ---------------------------------------------------------------- saved choices


class SavedChoices:
    """What was chosen for a model that is placed like this on a machine like this."""

    def __init__(self, resolved: Resolved) -> None:
        assert resolved.gpu is not None and resolved.experts is not None
        checkpoint, engine = resolved.checkpoint, resolved.engine
        self.path: Path = prepared_folder(checkpoint.path, engine.prepared) / "expert-policy.json"
        digest = sha256()
        for own in resolved.experts:
            digest.update(b"layer" + own.tobytes())
        for layer, each in (resolved.frequencies or {}).items():
            digest.update(b"%d " % layer + each.tobytes())
        facts = {
            "layers": f"{resolved.gpu_layers} {resolved.gpu_head}",
            "experts": digest.hexdigest()[:32],
            "kv_type": engine.kv_type,
            "steps": f"{ROUNDS} {BLOCK} {UNRECORDED} {resolved.pages}",
        }
        self._key = trial_key(checkpoint, engine, resolved.selection, ()) | software(resolved.gpu) | facts
        self._renew = engine.retrial
        self._failures = 0  # before the trial

    def find(self, anew: bool = True) -> Chosen | None:
        """What was chosen earlier; None: nothing, or it is to be chosen anew, if there can be a trial (`anew`)."""
        kept = None if self._renew else find_entry(self.path, KIND, _Kept, self._key)
        self._failures = 0 if kept is None else kept.failures
        if kept is None or (anew and (0 < kept.failures < FAILURES or (kept.disturbed and quiet()))):
            return None
        return Chosen(kept.policy, f"{kept.why or _times(kept.seconds)}, chosen earlier ({self.path})")

    def begin(self) -> None:
        """From now on a start that finds no choice has been interrupted."""
        self._keep("static", {}, INTERRUPTED)

    def keep(self, seconds: Seconds, disturbed: float = 0.0) -> Chosen:
        """Choose, and save it. disturbed: cores that others took during the trial, 0 if it was not disturbed."""
        if not seconds:
            return self._chosen("static", {}, "the context is too short for a trial")
        busy = f" while others took {disturbed:.1f} cores (repeated at a start when they do not)" if disturbed else ""
        medians = {name: median(own) for name, own in seconds.items()}
        return self._chosen(choose(seconds), medians, disturbed=disturbed, more=busy)

    def keep_failure(self, problem: str) -> Chosen:
        """Choose `static`, since a trial failed."""
        why, failures = f"the trial failed: {problem}"[:_WHY], min(FAILURES, self._failures + 1)
        return self._chosen("static", {}, why, failures=failures)

    def _chosen(
        self, policy: str, seconds: Mapping[str, float], why: str = "", more: str = "", **facts: float
    ) -> Chosen:
        problem = self._keep(policy, seconds, why, **facts)
        how = f"kept in {self.path}" if problem is None else f"cannot be kept: {problem}"
        return Chosen(policy, f"{why or _times(seconds)}{more}, {how}")

    def _keep(self, policy: str, seconds: Mapping[str, float], why: str, **facts: float) -> str | None:
        result: dict[str, Any] = {"policy": policy, "seconds": dict(seconds), "why": why, **facts}
        return keep_entry(self.path, KIND, _Kept, self._key, result)


def _times(seconds: Mapping[str, float]) -> str:
    return "a step takes " + ", ".join(f"{1e3 * own:.3g} ms with {name}" for name, own in seconds.items())
