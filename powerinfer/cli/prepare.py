"""Find out all about a model that makes it run better, in one go: measure, profile, train, pack, plan, report.

Each step does what the verb of its name does and leaves the same files, in the folder MODEL.powerinfer or where
--prepared says. What is up to date is not done again, so the command can be stopped at any time and given again: it
goes on where it was. What can be known beforehand is checked before the long work begins: the corpus, the budgets, room
on the disk, torch.

Models with ReLU get a profile, predictors and bundles. Others (SwiGLU) never have a neuron that is exactly silent: they
get a profile with thresholds, no predictors, and bundles only where the plan finds that leaving neurons out pays.

JSON: model, folder, seconds, steps (by name: state "done", "skipped" (it was up to date) or "not needed"; seconds,
path, why (of what is not needed), and the verb's key figures), plan (the document of `powerinfer plan`).
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_flag
from powerinfer.config import EngineConfig, PlanConfig, ProfileConfig, TrainConfig
from powerinfer.errors import ModelError, PowerInferError, RequestError

if TYPE_CHECKING:
    from powerinfer.formats.bundle_file import BundleFile
    from powerinfer.formats.checkpoint import Checkpoint, Progress
    from powerinfer.placement.plan import PlanRequest
    from powerinfer.prepare.profile import Task
    from powerinfer.report.planned import PlanFacts

STEPS = ("measure", "profile", "train", "pack", "plan", "report")
ENGINE = ("context", "kv_type", "prefill_chunk", "selector", "quantize", "prepared", "vram", "ram", "threads", "isa")
DONE, SKIPPED, NOT_NEEDED = "done", "skipped", "not needed"
TRAINING = ("recall", "share", "device", "steps")
TERMINATED = 143  # what a shell reports for a program that SIGTERM ended
SPARE = 16 << 20  # bytes of the disk that small files may take


@dataclass(frozen=True)
class Outcome:
    """What a step came to. figures: for the document; said: for people."""

    state: str
    said: str
    figures: dict[str, Any]


def not_needed(why: str) -> Outcome:
    """The outcome of a step that has nothing to do."""
    return Outcome(NOT_NEEDED, why, {"path": None, "why": why})


class Display:
    """The steps one after another: one display of their progress, one line of what came of each."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.step = ""
        self.outcomes: dict[str, dict[str, Any]] = {}

    def take(self, name: str, step: Callable[[Progress], Outcome]) -> None:
        """The next step."""
        from powerinfer.cli.progress import Bar

        self.step = f"{STEPS.index(name) + 1}/{len(STEPS)} {name}"
        begin = time.perf_counter()
        with Bar() as bar:
            outcome = step(lambda label, done, total: bar(f"{self.step}: {label}", done, total))
        seconds = time.perf_counter() - begin
        what = {DONE: f"{seconds:.1f} s", SKIPPED: "up to date"}.get(outcome.state, outcome.state)
        self._out.line(f"{self.step:<12} {what}; {outcome.said}")
        self.outcomes[name] = {"state": outcome.state, "seconds": seconds, **outcome.figures}


@dataclass
class Work:
    """What the steps share: the model as it is opened, the options of each, and what was found out so far.

    task: of the profile, its corpus read; plan, plan_path: the plan's document and its file, once they are there.
    """

    checkpoint: Checkpoint
    engine: EngineConfig
    training: TrainConfig
    planning: PlanConfig
    task: Task
    args: argparse.Namespace
    out: Output
    plan: PlanFacts | None = None
    plan_path: Path = Path()

    @property
    def folder(self) -> Path:
        """Where the files of the steps lie."""
        from powerinfer.formats.prepared import prepared_folder

        return prepared_folder(self.checkpoint.path, self.engine.prepared)

    @property
    def rectified(self) -> bool:
        """Whether silent neurons are exactly silent."""
        from powerinfer.sparsity.selectors import RECTIFIED

        return self.checkpoint.config.activation in RECTIFIED

    @property
    def why_no_training(self) -> str | None:
        """Why no predictors are trained; None when they are."""
        if not self.rectified:
            return f"with {self.checkpoint.config.activation} no neuron is ever exactly silent"
        if self.args.no_train:
            return "--no-train"
        if self.engine.selector not in ("auto", "predicted"):
            return f"--selector {self.engine.selector} asks no predictor"
        if self.checkpoint.predictor_threshold is not None:
            return "the model's file brings its own predictors"
        return None

    def request(self, selector: str, assume: bool = False, fresh: bool = False) -> PlanRequest:
        """What is planned, with a selector.

        assume: that neurons fire as in models of its family, while there is no profile; fresh: that nothing is packed
        or trained, whatever lies there, for that may be stale.
        """
        from powerinfer.cli import plan as verb
        from powerinfer.placement.shapes import law_of

        engine = dataclasses.replace(self.engine, selector=selector)
        args = argparse.Namespace(hot_share=None, active=law_of(self.checkpoint.config).active if assume else None)
        return verb.model_request(args, self.planning, engine, self.checkpoint, self.out, fresh)[0]

    @cached_property
    def selector(self) -> str:
        """The selector that is planned for, once the profile and predictors are there.

        Of `auto`: predicted where there are predictors, else exact where silence is exact; else threshold, where the
        plan is faster with it by as much as the engine's trial asks for, and all where it is not.
        """
        from powerinfer.sparsity.trial import GAIN

        if self.engine.selector != "auto":
            return self.engine.selector
        if self.rectified:
            return "predicted" if self.request("exact").model.predictors else "exact"
        return "threshold" if self.gain is not None and self.gain[0] < GAIN * self.gain[1] else "all"

    @property
    def dense(self) -> bool:
        """Whether every neuron is computed for every token."""
        return self.engine.selector == "all" or (self.gain is not None and self.selector == "all")

    @cached_property
    def gain(self) -> tuple[float, float] | None:
        """Seconds of a token that are predicted with thresholds and with every neuron; None if that decides nothing."""
        from powerinfer.placement.plan import make_plan

        if self.rectified or self.engine.selector != "auto":
            return None
        sparse, dense = (make_plan(self.request(name, fresh=True)).choice.seconds for name in ("threshold", "all"))
        return sparse, dense


# ---------------------------------------------------------------- the steps


def measure(work: Work, progress: Progress) -> Outcome:
    from powerinfer.hardware.measure import kept_at, known, measure_and_keep

    if work.planning.hardware is not None:
        return not_needed(f"--hardware {work.planning.hardware}")
    found = None if work.args.force else known(work.engine)
    hardware = found or measure_and_keep(work.engine, progress, work.out.note)
    cpu = hardware.cpu
    fastest = max(cpu.dense_gb_s.values())
    figures = {"path": str(kept_at(hardware.key)), "name": hardware.name, "dense_gb_s": dict(cpu.dense_gb_s)}
    return Outcome(SKIPPED if found else DONE, f"{cpu.name}, {fastest:.1f} GB/s of dense weights", figures)


def profile(work: Work, progress: Progress) -> Outcome:
    from powerinfer.cli import profile as verb

    made = verb.make(work.checkpoint, work.engine, work.task, work.out.note, progress, work.args.force)
    document = verb.describe(work.checkpoint, work.engine.prepared, made)
    shown = ("path", "tokens", "active_fraction", "hot_share", "reuse", "samples", "calibration")
    said = (
        f"{document['tokens']:,} tokens, {100 * document['active_fraction']:.1f} % of the neurons active, "
        f"{100 * document['hot_share']:.1f} % carry 80 % of activations"
    )
    return Outcome(DONE if made.seconds else SKIPPED, said, {name: document[name] for name in shown})


def train(work: Work, progress: Progress) -> Outcome:
    from powerinfer.cli import train as verb
    from powerinfer.prepare import training

    if (why := work.why_no_training) is not None:
        return not_needed(why)
    prepared, config = work.engine.prepared, work.training
    file = None if work.args.force else training.current(work.checkpoint, prepared, config)
    trained = None
    if file is None:
        trained = training.train(work.checkpoint, prepared, config, progress, work.engine.threads)
        file = trained.file
        for note in trained.notes:
            work.out.note(note)
    document = verb.describe(file)
    document.pop("layers")
    document["resumed"] = trained.resumed if trained else 0
    said = (
        f"{document['bytes'] / 1e6:.1f} MB, {100 * document['recall']:.1f} % of the firing neurons named, "
        f"{100 * document['candidate_fraction']:.1f} % of all"
    )
    return Outcome(DONE if trained else SKIPPED, said, document)


def pack(work: Work, progress: Progress) -> Outcome:
    from powerinfer.cli import pack as verb
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.prepare import packing

    if work.dense and not work.request("all", fresh=True).claims().bundles:
        return not_needed(f"every neuron is computed, from the model's own matrices{_why_all(work)}")
    bundles, packed = packed_bundles(work), None
    if bundles is None:
        types = choose_types(work.checkpoint)
        packed = packing.pack(work.checkpoint, work.engine.prepared, types, progress)
        bundles = packed.bundles
        for note in types.notes:
            work.out.note(note)
    document = verb.describe(bundles, packed)
    parts = ", ".join(f"{part} {name}" for part, name in document["types"].items() if name)
    return Outcome(DONE if packed else SKIPPED, f"{document['bytes'] / 1e6:.1f} MB, {parts}", document)


def packed_bundles(work: Work) -> BundleFile | None:
    """The bundles that are there, of whatever types, if they can be used; None as well where all is made anew."""
    from powerinfer.formats.bundle_file import open_bundles
    from powerinfer.kernels.cpu import part_bytes

    if work.args.force:
        return None
    try:
        return open_bundles(work.checkpoint, work.engine.prepared, part_bytes)
    except ModelError:
        return None


def _why_all(work: Work) -> str:
    """How near leaving neurons out comes, where that was asked."""
    from powerinfer.report.planned import rate

    if work.gain is None:
        return ""
    sparse, dense = (1 / seconds for seconds in work.gain)
    return f": {rate(sparse)} tokens/s are predicted with the thresholds, {rate(dense)} without"


def plan(work: Work, progress: Progress) -> Outcome:
    from powerinfer.placement.plan import make_plan, plan_path, read_plan, save_plan
    from powerinfer.report.planned import rate
    from powerinfer.report.planned import read_plan as read_document

    request = work.request(work.selector)
    path = plan_path(work.folder, request)
    facts = None
    if not work.args.force:
        with suppress(ModelError):
            facts = read_document(path) if read_plan(work.folder, request) is not None else None
    known = facts is not None
    if facts is None:
        facts = read_document(save_plan(make_plan(request), work.folder))
    work.plan, work.plan_path = facts, path
    on_gpu = f"{100 * facts.mass_on_gpu:.1f} % of the activations on the GPU"
    said = f"{rate(facts.decode_tok_s)} tokens/s predicted with --selector {work.selector}, {on_gpu}"
    figures = {"path": str(path), "key": request.key, "selector": work.selector}
    return Outcome(SKIPPED if known else DONE, said, figures)


def report(work: Work, progress: Progress) -> Outcome:
    from powerinfer.report.findings import findings, with_plan
    from powerinfer.report.plots import need_matplotlib
    from powerinfer.report.writing import report_folder, write_report

    prepared = work.engine.prepared
    try:
        need_matplotlib()
    except RequestError as error:
        return not_needed(str(error))
    folder = report_folder(work.checkpoint.path, prepared)
    assert work.plan is not None, "the plan comes before the report"
    found = with_plan(findings(work.checkpoint, prepared), work.plan, work.plan_path, work.checkpoint)
    made = write_report(found, folder, work.args.force, progress)
    figures = {"path": str(made.page), "images": len(made.images)}
    return Outcome(DONE if made.made else SKIPPED, str(made.page), figures)


# ---------------------------------------------------------------- what can be known beforehand


def check(work: Work) -> None:
    """Everything that would stop the work later and can be known now; then the error says so, in one line."""
    from powerinfer.formats.predictor_file import open_predictor
    from powerinfer.formats.prepared import PREDICTOR, PreparedFile
    from powerinfer.kernels import cpu
    from powerinfer.prepare import training

    cpu.choices(work.engine)
    if work.why_no_training is None:
        training.need_torch()
        training.check(work.checkpoint, work.training)
    elif PreparedFile(PREDICTOR, work.checkpoint, work.engine.prepared).exists():
        open_predictor(work.checkpoint, work.engine.prepared)  # a stale one would stop the plan
    elif work.engine.selector == "predicted" and work.checkpoint.predictor_threshold is None:
        raise RequestError(f"--selector predicted needs predictors, and none are trained: {work.why_no_training}")
    check_folder(work.folder, needed_bytes(work))


def check_budgets(work: Work) -> None:
    """RequestError where the budgets, or the machine, do not hold the model however its neurons fire."""
    from powerinfer.placement.plan import make_plan

    selector = work.engine.selector
    if selector in ("auto", "predicted"):  # predictors only add to it, and are not there yet
        selector = "exact" if work.rectified else "all"
    make_plan(work.request(selector, assume=True, fresh=True))


def needed_bytes(work: Work) -> int:
    """About the bytes that the steps will write; files that they replace stay until then, so they do not count."""
    from powerinfer.formats.bundle_file import bundle_layout
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.formats.samples_file import row_bytes
    from powerinfer.kernels.cpu import part_bytes
    from powerinfer.prepare.profile import current as current_profile
    from powerinfer.prepare.training import model_bytes

    config, prepared = work.checkpoint.config, work.engine.prepared
    neurons = config.n_layers * config.d_ff
    total = SPARE
    if work.args.force or current_profile(work.checkpoint, prepared, work.task) is None:
        total += 8 * neurons * len(work.task.windows.corpora) + work.task.rows * row_bytes(work.checkpoint)
        if work.why_no_training is None:
            total += 2 * int(work.training.share * model_bytes(work.checkpoint))  # sizes that are tried count too
    if (work.rectified or work.engine.selector == "threshold") and packed_bundles(work) is None:
        types = choose_types(work.checkpoint)
        total += neurons * bundle_layout(config, types.gate, types.down, part_bytes).stride
    return total


def check_folder(folder: Path, needed: int) -> None:
    """PowerInferError where the folder cannot be written, or the disk lacks room for `needed` bytes."""
    import tempfile
    from shutil import disk_usage

    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        usage = disk_usage(folder)
        if not there:
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


# ---------------------------------------------------------------- the verb


def configure(parser: argparse.ArgumentParser) -> None:
    model_flag(parser)
    parser.add_argument("--no-train", action="store_true", help="train no predictors")
    parser.add_argument("--force", action="store_true", help="do everything anew")
    config_flags(parser, ProfileConfig, "profile")
    config_flags(parser, TrainConfig, "training", only=TRAINING)
    config_flags(parser, PlanConfig, "plan")
    config_flags(parser, EngineConfig, "engine", only=ENGINE)


def execute(args: argparse.Namespace, out: Output) -> int:
    begin = time.perf_counter()
    work = opened(args, out)
    check(work)
    display = Display(out)
    with stoppable(display, out):
        display.take("measure", lambda progress: measure(work, progress))
        check_budgets(work)
        for name, step in (("profile", profile), ("train", train), ("pack", pack), ("plan", plan), ("report", report)):
            display.take(name, partial(step, work))
    out.line(f"\nready: powerinfer run -m {work.checkpoint.path} --selector {work.selector}")
    document = {
        "model": str(work.checkpoint.path),
        "folder": str(work.folder),
        "seconds": time.perf_counter() - begin,
        "steps": display.outcomes,
        "plan": work.plan.document if work.plan is not None else None,
    }
    out.document(document)
    return 0


def opened(args: argparse.Namespace, out: Output) -> Work:
    """The model and the corpus, as far as the flags name any that can be read."""
    from powerinfer.cli import plan, profile
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.hub import resolve_model

    engine, profiling, planning = (config_from(args, kind) for kind in (EngineConfig, ProfileConfig, PlanConfig))
    training = TrainConfig(**{name: value for name, value in vars(args).items() if name in TRAINING})
    profile.check(profiling)
    plan.check(planning, engine)
    checkpoint = open_checkpoint(resolve_model(args.model, say=out.note), quantize=engine.quantize)
    for note in checkpoint.notes:
        out.note(note)
    with Bar() as bar:
        task = profile.read(checkpoint, profiling, out.note, bar)
    return Work(checkpoint, engine, training, planning, task, args, out)


@contextmanager
def stoppable(display: Display, out: Output) -> Iterator[None]:
    """SIGTERM ends the work like Ctrl-C does: files that are not complete go, and a line says how to go on."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        out.note(f"stopped in step {display.step}; the same command goes on from there")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
