"""The steps of `powerinfer prepare`: measure, profile, train, pack, plan, report.

Each step does the work of the command of its name, unless its result is up to date, so an interrupted run resumes.
`check` and `check_budgets` find errors that would stop the work later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.config import EngineConfig, PlanConfig, TrainConfig
from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.prepare.counting import Task
from powerinfer.progress import Progress, Say, silent
from powerinfer.sparsity.selection import auto, check_neurons

if TYPE_CHECKING:
    from powerinfer.formats.bundle_file import BundleFile
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.hardware.description import Hardware
    from powerinfer.placement.plan import PlanRequest
    from powerinfer.placement.plan_document import PlanDocument

STEPS = ("measure", "profile", "train", "pack", "plan", "report")
DONE, SKIPPED, NOT_NEEDED = "done", "skipped", "not needed"
SPARE = 16 << 20  # bytes of the disk that small files may take


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step. state: `DONE`, `SKIPPED` (it was up to date) or `NOT_NEEDED`.

    said: for people; figures: for the document.
    """

    state: str
    text: str
    figures: dict[str, Any]


Step = Callable[["Progress"], StepOutcome]


@dataclass
class Work:
    """State that the steps share: the opened model, the options of each step, and results.

    task: of the profile, with its corpus; train: predictors are trained if the model can use them; force: every step is
    repeated; say: receives notes for the user. hardware, plan, plan_path: set by the steps that find them.
    """

    checkpoint: Checkpoint
    engine: EngineConfig
    training: TrainConfig
    planning: PlanConfig
    task: Task
    train: bool = True
    force: bool = False
    say: Say = silent
    hardware: Hardware | None = field(default=None, init=False)
    plan: PlanDocument | None = field(default=None, init=False)
    plan_path: Path = field(default=Path(), init=False)

    def __post_init__(self) -> None:
        if not self.samples_needed:
            self.task = replace(self.task, rows=0)

    @property
    def samples_needed(self) -> bool:
        """Whether predictors are trained, now or by a later `train` that only --no-train or the selector puts off."""
        config = self.checkpoint.config
        reads_both = config.fires_both_ways and self.engine.selector != "predicted"
        has_threshold = self.checkpoint.predictor_threshold is not None
        return config.rectified and not config.competing and not reads_both and not has_threshold

    @property
    def folder(self) -> Path:
        """Folder of the files of the steps."""
        from powerinfer.formats.prepared import prepared_folder

        return prepared_folder(self.checkpoint.path, self.engine.prepared)

    @property
    def rectified(self) -> bool:
        """Whether neurons that do not fire are exactly zero in some layer."""
        return self.checkpoint.config.partly_rectified

    @property
    def no_training_reason(self) -> str | None:
        """Reason for which no predictors are trained; None when they are."""
        config = self.checkpoint.config
        if not config.rectified:
            return f"activations of {config.activations_never_zero} are never exactly zero"
        if config.competing:
            return f"which neurons of the activation {config.competing} count is not predicted so far"
        if not self.train:
            return "--no-train"
        if self.engine.selector not in ("auto", "predicted"):
            return f"--selector {self.engine.selector} uses no predictor"
        if config.fires_both_ways and self.engine.selector != "predicted":
            return "neurons fire on both sides of zero, which takes large predictors: --selector predicted trains them"
        if self.checkpoint.predictor_threshold is not None:
            return "the model's file has its own predictors"
        return None

    def request(self, selector: str, assume: bool = False, fresh: bool = False) -> PlanRequest:
        """The plan's request for a selector, once the machine is measured.

        assume: neurons fire as in models of its family, as there is no profile yet; fresh: existing bundles and
        predictors are ignored, as they may be stale.
        """
        from powerinfer.placement.request import model_subject
        from powerinfer.placement.shapes import law_of

        assert self.hardware is not None, "the machine is measured first"
        active = law_of(self.checkpoint.config).active if assume else None
        subject = model_subject(self.checkpoint, self.engine.prepared, selector, active=active, fresh=fresh)
        subject = replace(subject, chosen=self.engine.selector == "auto")
        return subject.request(self.hardware, self.engine, self.planning)

    @cached_property
    def selector(self) -> str:
        """The selector that is planned for, once the profile and predictors are there.

        Where none was requested this is the fastest that `auto` may offer: with predictors, or with the calibrated
        thresholds where their plan is faster by as much as the engine's trial asks for.
        """
        from powerinfer.placement.shapes import checkpoint_model
        from powerinfer.sparsity.selector_trial import GAIN

        if self.engine.selector != "auto":
            return self.engine.selector
        predictors = bool(checkpoint_model(self.checkpoint, self.engine.prepared).predictors)
        faster = self.gain is not None and self.gain[0] < GAIN * self.gain[1]
        config = self.checkpoint.config
        return auto(config, config.unsplit_reason, predictors=predictors, thresholds=faster)[0]

    @property
    def run_with(self) -> str:
        """The selector to run with. Where only whole layers are planned for, `auto`: without a GPU it is `exact`."""
        return self.engine.selector if self.checkpoint.config.unsplit_reason is not None else self.selector

    @property
    def dense(self) -> bool:
        """Whether every neuron is computed for every token."""
        return self.engine.selector == "all" or (self.gain is not None and self.selector == "all")

    @cached_property
    def gain(self) -> tuple[float, float] | None:
        """Estimated seconds of a token with thresholds and with every neuron; None if that decides nothing."""
        from powerinfer.placement.plan import make_plan

        if self.rectified or self.engine.selector != "auto":
            return None
        sparse, dense = (make_plan(self.request(name, fresh=True)).choice.seconds for name in ("threshold", "all"))
        return sparse, dense


def steps(work: Work) -> Iterator[tuple[str, Step]]:
    """(name, function) of each step, to be called in this order. RequestError, after the first, if the budgets do not
    hold the model."""
    yield "measure", partial(measure, work)
    check_budgets(work)
    for name, step in (("profile", profile), ("train", train), ("pack", pack), ("plan", plan), ("report", report)):
        yield name, partial(step, work)


# ---------------------------------------------------------------- the steps


def measure(work: Work, progress: Progress) -> StepOutcome:
    from powerinfer.hardware.description import load
    from powerinfer.hardware.measure import gpu_beside, kept_at, measure_and_keep, memories, saved_hardware
    from powerinfer.placement.request import described

    if work.planning.described:  # not a machine as large as --ram, which is a budget of the profile, too
        machine = described(work.planning, work.engine)
        assert machine is not None
        work.hardware = machine[0] if work.planning.hardware is None else load(work.planning.hardware)
        return _not_needed(f"the plan is for {work.hardware.name}")
    gpu = gpu_beside(work.engine, work.say)
    cached = None if work.force else saved_hardware(work.engine, gpu)
    if cached is None:
        work.hardware = memories(work.engine, gpu)
        check_bytes(work)
    hardware = cached or measure_and_keep(work.engine, progress, work.say, gpu=gpu, again=work.force)
    work.hardware, cpu = hardware, hardware.cpu
    fastest = max(cpu.dense_gb_s.values())
    figures = {"path": str(kept_at(hardware.key)), "name": hardware.name, "dense_gb_s": dict(cpu.dense_gb_s)}
    return StepOutcome(SKIPPED if cached else DONE, f"{cpu.name}, {fastest:.1f} GB/s of dense weights", figures)


def profile(work: Work, progress: Progress) -> StepOutcome:
    from powerinfer.prepare import profiling

    profiled = profiling.profile(work.checkpoint, work.engine, work.task, work.say, progress, work.force)
    document = profiling.describe(work.checkpoint, work.engine.prepared, profiled)
    shown = ("path", "tokens", "active_fraction", "hot_share", "reuse", "samples", "calibration")
    text = (
        f"{document['tokens']:,} tokens, {100 * document['active_fraction']:.1f} % of the neurons active, "
        f"{100 * document['hot_share']:.1f} % carry 80 % of activations"
    )
    return StepOutcome(DONE if profiled.seconds else SKIPPED, text, {name: document[name] for name in shown})


def train(work: Work, progress: Progress) -> StepOutcome:
    from powerinfer.prepare import training

    if (reason := work.no_training_reason) is not None:
        return _not_needed(reason)
    prepared, config = work.engine.prepared, work.training
    file = None if work.force else training.current(work.checkpoint, prepared, config)
    trained = None
    if file is None:
        trained = training.train(work.checkpoint, prepared, config, progress, work.engine.threads)
        file = trained.file
        for note in trained.notes:
            work.say(note)
    document = training.describe(file)
    document.pop("layers")
    document["resumed"] = trained.resumed if trained else 0
    text = (
        f"{document['bytes'] / 1e6:.1f} MB, {100 * document['recall']:.1f} % of the firing neurons selected, "
        f"{100 * document['candidate_fraction']:.1f} % of all"
    )
    return StepOutcome(DONE if trained else SKIPPED, text, document)


def pack(work: Work, progress: Progress) -> StepOutcome:
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.prepare import packing

    if work.dense and not work.request("all", fresh=True).claims().bundles:
        return _not_needed(f"every neuron is computed, from the model's own matrices{_speeds_reason(work)}")
    bundles, packed = _packed_bundles(work), None
    if bundles is None:
        types = choose_types(work.checkpoint)
        packed = packing.pack(work.checkpoint, work.engine.prepared, types, progress, work.engine.threads)
        bundles = packed.bundles
        for note in types.notes:
            work.say(note)
    document = packing.describe(bundles, packed)
    parts = ", ".join(f"{part} {name}" for part, name in document["types"].items() if name)
    return StepOutcome(DONE if packed else SKIPPED, f"{document['bytes'] / 1e6:.1f} MB, {parts}", document)


def _packed_bundles(work: Work) -> BundleFile | None:
    """The existing bundles, of any types; None if they cannot be used, or if every step is repeated."""
    from powerinfer.formats.bundle_file import open_bundles
    from powerinfer.kernels.cpu import bundle_row_bytes

    with suppress(ModelError):
        return None if work.force else open_bundles(work.checkpoint, work.engine.prepared, bundle_row_bytes)
    return None


def _speeds_reason(work: Work) -> str:
    """The estimated speeds with and without thresholds, if they decided."""
    from powerinfer.placement.plan_document import rate

    if work.gain is None:
        return ""
    sparse, dense = (1 / seconds for seconds in work.gain)
    return f": {rate(sparse)} tokens/s are estimated with the thresholds, {rate(dense)} without"


def plan(work: Work, progress: Progress) -> StepOutcome:
    from powerinfer.placement.plan import kept_document, make_plan, plan_path, save_plan
    from powerinfer.placement.plan_document import rate

    request = work.request(work.selector)
    path = plan_path(work.folder, request)
    facts = None
    if not work.force:
        with suppress(ModelError):
            facts = kept_document(work.folder, request)
    is_saved = facts is not None
    if facts is None:
        plan_ = make_plan(request)
        facts = plan_.document(save_plan(plan_, work.folder))
    work.plan, work.plan_path = facts, path
    on_gpu = f"{100 * facts.mass_on_gpu:.1f} % of the activations on the GPU"
    text = f"{rate(facts.predicted.decode_tok_s)} tokens/s estimated with --selector {request.selector}, {on_gpu}"
    figures = {"path": str(path), "key": request.key, "selector": request.selector}
    return StepOutcome(SKIPPED if is_saved else DONE, text, figures)


def report(work: Work, progress: Progress) -> StepOutcome:
    from powerinfer.report.findings import findings, with_plan
    from powerinfer.report.plots import need_matplotlib
    from powerinfer.report.writing import report_folder, write_report

    prepared = work.engine.prepared
    try:
        need_matplotlib()
    except RequestError as error:
        return _not_needed(str(error))
    folder = report_folder(work.checkpoint.path, prepared)
    assert work.plan is not None, "the plan comes before the report"
    prepared_files = with_plan(findings(work.checkpoint, prepared), work.plan, work.plan_path, work.checkpoint)
    report_ = write_report(prepared_files, folder, work.force, progress)
    figures = {"path": str(report_.page), "images": len(report_.images)}
    return StepOutcome(DONE if report_.is_new else SKIPPED, str(report_.page), figures)


def _not_needed(reason: str) -> StepOutcome:
    return StepOutcome(NOT_NEEDED, reason, {"path": None, "why": reason})


# ---------------------------------------------------------------- checks before the work


def check(work: Work) -> None:
    """Raise now the error that would stop the work later; budgets are checked once the machine is known."""
    from powerinfer.devices.choices import machine_choices
    from powerinfer.formats.predictor_file import open_predictor
    from powerinfer.formats.prepared import PREDICTOR, PreparedFile
    from powerinfer.prepare import training

    check_neurons(work.checkpoint.config, "prepare")
    machine_choices(work.engine)
    if work.no_training_reason is None:
        training.need_torch()
        training.check(work.checkpoint, work.training)
    elif PreparedFile(PREDICTOR, work.checkpoint, work.engine.prepared).exists():
        open_predictor(work.checkpoint, work.engine.prepared)  # a stale one would stop the plan
    elif work.engine.selector == "predicted" and work.checkpoint.predictor_threshold is None:
        raise RequestError(f"--selector predicted needs predictors, and none are trained: {work.no_training_reason}")
    check_folder(work.folder, needed_bytes(work))


def check_budgets(work: Work) -> None:
    """RequestError if the budgets or the machine do not hold the model, however its neurons fire."""
    from powerinfer.placement.plan import make_plan

    make_plan(_least_request(work))


def check_bytes(work: Work) -> None:
    """RequestError if the budgets do not even hold the dense part, which does not depend on the machine's rates."""
    _least_request(work).claims()


def _least_request(work: Work) -> PlanRequest:
    selector = work.engine.selector
    if selector in ("auto", "predicted"):  # predictors only add to it, and are not there yet
        selector, _ = auto(work.checkpoint.config, work.checkpoint.config.unsplit_reason)
    return work.request(selector, assume=True, fresh=True)


def needed_bytes(work: Work) -> int:
    """Estimate of the bytes that the steps will write. Files that they replace stay until then and do not count."""
    from powerinfer.formats.bundle_file import bundle_layouts
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.formats.samples_file import row_bytes
    from powerinfer.kernels.cpu import bundle_row_bytes
    from powerinfer.prepare.counting import current as current_profile
    from powerinfer.prepare.training import model_bytes

    config, prepared = work.checkpoint.config, work.engine.prepared
    neurons = config.n_neurons
    total = SPARE
    if work.force or current_profile(work.checkpoint, prepared, work.task) is None:
        total += 8 * neurons * len(work.task.windows.corpora) + work.task.rows * row_bytes(work.checkpoint)
        if work.no_training_reason is None:
            total += 2 * int(work.training.share * model_bytes(work.checkpoint))  # sizes that are tried count too
    if (work.rectified or work.engine.selector == "threshold") and _packed_bundles(work) is None:
        types = choose_types(work.checkpoint)
        layouts = bundle_layouts(config, types.gate, types.downs, bundle_row_bytes)
        total += sum(size * layout.stride for size, layout in zip(config.ffn_sizes, layouts, strict=True))
    return total


def check_folder(folder: Path, needed: int) -> None:
    """PowerInferError if the folder cannot be written, or the disk has less than `needed` bytes free."""
    import tempfile
    from shutil import disk_usage

    exists = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        usage = disk_usage(folder)
        if not exists:
            folder.rmdir()
    except OSError as error:
        raise PowerInferError(
            f"cannot write into {folder} ({error.strerror or error}); --prepared PATH chooses another folder"
        ) from error
    if usage.total and usage.free < needed:  # some file systems know nothing and say 0 of 0
        raise PowerInferError(
            f"{folder} needs room for {needed / 1e6:,.0f} MB, and {usage.free / 1e6:,.0f} MB are free; --prepared PATH "
            "chooses another folder, and a smaller --samples needs less"
        )
