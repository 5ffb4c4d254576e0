"""The prepared files of a model: which exist, and which cannot be used, and why."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.prepared import BUNDLES, EXPERTS, PREDICTOR, PROFILE, Kind, PreparedFile, opened_with
from powerinfer.hardware.description import ready_made
from powerinfer.placement.expert_slots import Comparison, kept
from powerinfer.placement.plan_document import PlanDocument, read_plan_document
from powerinfer.sparsity.selector_trial import MeasuredFfns, newest_trial
from powerinfer.sparsity.verdict import no_gain

if TYPE_CHECKING:
    from powerinfer.experts import ExpertProfile
    from powerinfer.formats.bundle_file import BundleFile
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.predictor_file import PredictorFile
    from powerinfer.neurons import Profile

T = TypeVar("T")


@dataclass(frozen=True)
class Finding(Generic[T]):
    """One kind of prepared file: `value` is its content, None if it is missing or cannot be used.

    path: None if it is missing; stale: why it cannot be used; command: makes it (again). usable: the model can use it.
    """

    noun: str
    value: T | None = None
    path: Path | None = None
    stale: str | None = None
    command: str = ""
    usable: bool = True


_NONE: Finding[Any] = Finding("", usable=False)


@dataclass(frozen=True)
class Findings:
    """The prepared files of a model. model: its name; about: a line that describes it.

    A model that is only described has a plan; no other file. measured: what the newest trial found; replayed:
    what policies over experts hit. open: the options
    that open the model, for a command line. no_gain: why skipping neurons cannot pay, None: it may.
    """

    model: str
    summary: str
    plan: Finding[PlanDocument]
    profile: Finding[Profile] = _NONE
    predictor: Finding[PredictorFile] = _NONE
    bundles: Finding[BundleFile] = _NONE
    experts: Finding[ExpertProfile] = _NONE
    measured: MeasuredFfns | None = None
    replayed: Comparison | None = None
    open: str | None = None
    no_gain: str | None = None

    def __iter__(self) -> Iterator[Finding[Any]]:
        yield from (one for one in self._files if one is not _NONE)

    @property
    def _files(self) -> tuple[Finding[Any], ...]:
        return self.profile, self.experts, self.predictor, self.bundles, self.plan

    @property
    def first(self) -> Finding[Any]:
        """The file that is made first for this model."""
        return self.profile if self.experts is _NONE else self.experts

    @property
    def lacking(self) -> list[Finding[Any]]:
        """Files that the model can use, but that are missing or stale."""
        return [one for one in self if one.value is None and one.usable]


def findings(checkpoint: Checkpoint, prepared: str | None = None) -> Findings:
    """The files in the folder `prepared` (None: beside the model). Invalid files are stale, not errors."""
    from powerinfer.formats.bundle_file import open_bundles
    from powerinfer.formats.expert_files import open_expert_profile
    from powerinfer.formats.predictor_file import open_predictor
    from powerinfer.formats.profile_file import open_profile
    from powerinfer.kernels.cpu import bundle_row_bytes

    config = checkpoint.config
    neurons = config.whole_reason is None  # else there is nothing to prepare
    trained = config.rectified and not config.competing and checkpoint.predictor_threshold is None
    if config.fires_both_ways:  # only where it is asked for
        trained = trained and PreparedFile(PREDICTOR, checkpoint, prepared).exists()
    profile = _finding(PROFILE, checkpoint, prepared, lambda: open_profile(checkpoint, prepared), neurons)
    experts: Finding[ExpertProfile] = _NONE
    if config.experts:
        experts = _finding(EXPERTS, checkpoint, prepared, lambda: open_expert_profile(checkpoint, prepared))
    return Findings(
        (config.name or checkpoint.path.name)[:200],
        f"{config.architecture}, {checkpoint.parameters / 1e6:,.0f} million weights in {checkpoint.quantisation}; "
        f"{_ffns(config.ffn_sizes)}, activation {config.activations}",
        _newest_plan(checkpoint, prepared, profile.value),
        profile,
        _finding(PREDICTOR, checkpoint, prepared, lambda: open_predictor(checkpoint, prepared), trained),
        _finding(BUNDLES, checkpoint, prepared, lambda: open_bundles(checkpoint, prepared, bundle_row_bytes), neurons),
        experts,
        newest_trial(checkpoint, prepared),
        kept(checkpoint, prepared) if experts.value is not None else None,
        PreparedFile(Kind("bench", "", "bench"), checkpoint, prepared).command.removeprefix("powerinfer bench "),
        no_gain(config) if neurons and not config.partly_rectified else None,
    )


def with_plan(prepared: Findings, plan: PlanDocument, path: Path, checkpoint: Checkpoint) -> Findings:
    """The same with the plan of the file `path`. RequestError if it is for a model of other sizes."""
    config = checkpoint.config
    if plan.sizes != config.ffn_sizes:
        raise RequestError(
            f"{path} is a plan for {_layers(plan.sizes)}, but {prepared.model} has {_layers(config.ffn_sizes)}"
        )
    return replace(prepared, plan=Finding("plan", plan, path))


def plan_findings(plan: PlanDocument, path: Path) -> Findings:
    """A plan alone, for a model that is not available."""
    return Findings((plan.model or path.name)[:200], _ffns(plan.sizes), Finding("plan", plan, path))


def _layers(sizes: Sequence[int]) -> str:
    """Number of layers, and of the neurons of each."""
    sizes_text = sorted({size for size in sizes if size})
    return f"{len(sizes)} layers" + (f" of {' or '.join(map(str, sizes_text))} neurons" if sizes_text else "")


def _ffns(sizes: Sequence[int]) -> str:
    """The same for those who have not read of neurons yet."""
    sizes_text = " or ".join(f"{size:,}" for size in sorted({size for size in sizes if size}))
    return f"{len(sizes)} layers" + f", each with an FFN of {sizes_text} neurons" * bool(sizes_text)


def _finding(
    kind: Kind, checkpoint: Checkpoint, prepared: str | None, read: Callable[[], T], usable: bool = True
) -> Finding[T]:
    place = PreparedFile(kind, checkpoint, prepared)
    if not place.exists():
        return Finding(kind.noun, command=place.command, usable=usable)
    value, stale = None, None
    try:
        value = read()
    except ModelError as error:
        stale = str(error)
    return Finding(kind.noun, value, place.path, stale, place.command, usable)


def _newest_plan(checkpoint: Checkpoint, prepared: str | None, profile: Profile | None) -> Finding[PlanDocument]:
    """The newest plan; there is one for each combination of budgets, context and machine."""
    place = PreparedFile(Kind("plan", "plan", "plan"), checkpoint, prepared)
    with suppress(OSError):
        plans = [(os.stat(path).st_mtime_ns, path) for path in place.path.parent.glob("plan-*.json")]
        if plans:
            _, path = max(plans)
            try:
                plan, stale = read_plan_document(path), None
            except PowerInferError as error:
                return Finding("plan", None, path, str(error), place.command)
            if plan.fingerprint != checkpoint.fingerprint:
                stale = f"{path} was made for another model, or the model has changed"
            elif plan.quantize != checkpoint.quantize:
                plan_types, opened = opened_with(plan.quantize), opened_with(checkpoint.quantize)
                stale = f"{path} was made {plan_types}, and the model is opened {opened}"
            elif profile is not None and plan.profile != profile.digest:
                stale = f"{path} was made from another profile"
            command = place.command + _options(plan)
            stale = stale and f"{stale}; `{command}` makes it again"
            return Finding("plan", None if stale else plan, path, stale, command)
    return Finding("plan", command=place.command)


def _options(plan: PlanDocument) -> str:
    """Options of the command that makes such a plan again."""
    options = {
        "vram": _vram(plan), "ram": _exact(plan.budgets.ram), "context": plan.context,
        "batch": plan.batch, "selector": plan.selector, "policy": plan.policy,
    }  # fmt: skip
    hardware = {"hardware": plan.hardware} if plan.hardware in ready_made() else {}
    flags = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in (options | hardware).items())
    return flags + _split_mode(plan)


def _vram(plan: PlanDocument) -> str:
    """The plan's --vram."""
    return ",".join(_exact(card.vram) for card in plan.cards) or _exact(plan.budgets.vram)


def _split_mode(plan: PlanDocument) -> str:
    """The option by which a plan spreads experts over GPUs, if it does."""
    return "" if plan.split_mode == "layer" else f" --split-mode {shlex.quote(plan.split_mode)}"


def next_steps(prepared: Findings) -> list[tuple[str, str]]:
    """Purpose and command of the next steps: what makes the next missing file, or what uses them all."""
    if prepared.open is None:
        assert prepared.plan.value is not None
        limits = f"--vram {_vram(prepared.plan.value)} --ram {_exact(prepared.plan.value.budgets.ram)}"
        return [("With the model and a text at hand:", f"powerinfer prepare -m MODEL --corpus TEXT {limits}")]
    if prepared.lacking:
        missing = prepared.lacking[0]
        return [(f"Make the {missing.noun}{' again' if missing.stale else ''}:", missing.command)]
    plan, limits = prepared.plan.value, ""
    if plan is not None and plan.gpu_layers and plan.hardware not in ready_made():
        limits = f" --vram {_vram(plan)} --ram {_exact(plan.budgets.ram)}{_split_mode(plan)}"
    selector = " --selector predicted" if prepared.predictor.value is not None else ""
    return [
        ("Measure what the model reaches on this machine:", f"powerinfer bench {prepared.open}{selector}{limits}"),
        ("Use it:", f'powerinfer run "Once upon a time" {prepared.open}{selector}{limits}'),
    ]


def _exact(nbytes: int) -> str:
    """Bytes as text, in the largest unit that leaves no fraction: the plan's key depends on every byte."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
    return next(
        (f"{nbytes // unit}{name}" for name, unit in units.items() if nbytes and not nbytes % unit), f"{nbytes}B"
    )
