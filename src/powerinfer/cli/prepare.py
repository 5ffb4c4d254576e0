"""Prepare a model in one command: measure, profile, train, pack, plan and report.

Each step does what the command of its name does and writes the same files, into MODEL.powerinfer or the folder of
--prepared. Steps that are up to date are skipped, so the command can be stopped at any time and run again: it resumes.
Everything that can be checked before the long work is checked first: the corpus, the budgets, disk space, torch.

ReLU models get a profile, predictors and bundles; those of cats get predictors only with --selector predicted, those of
topk none, and a plan of whole layers. Others (SwiGLU) never have a neuron that is exactly zero: they get a profile with
thresholds, no predictors, and bundles only if skipping neurons is predicted to be faster. With --selector auto the plan
is for the fastest selector that this allows, and the last line says how to run it.

JSON: model, folder, seconds, steps (by name: state "done", "skipped" (up to date) or "not needed"; seconds, path, why
(not needed), and the key figures of the command), plan (the document of `powerinfer plan`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig, PlanConfig, ProfileConfig, TrainConfig
from powerinfer.sizes import exact_size

if TYPE_CHECKING:
    from powerinfer.prepare.pipeline import Step, Work

ENGINE = ("context", "kv_type", "prefill_chunk", "selector", "quantize", "prepared", "vram", "ram", "threads", "isa")
TRAINING = ("recall", "share", "device", "steps")


class StepDisplay:
    """Runs steps in order, with one progress bar and one line of result for each."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self.step = ""
        self.outcomes: dict[str, dict[str, Any]] = {}

    def take(self, name: str, step: Step) -> None:
        """Run the next step."""
        from powerinfer.cli.progress import Bar
        from powerinfer.prepare.pipeline import DONE, SKIPPED, STEPS

        self.step = f"{STEPS.index(name) + 1}/{len(STEPS)} {name}"
        begin = time.perf_counter()
        with Bar() as bar:
            outcome = step(lambda label, done, total: bar(f"{self.step}: {label}", done, total))
        seconds = time.perf_counter() - begin
        fate = {DONE: f"{seconds:.1f} s", SKIPPED: "up to date"}.get(outcome.state, outcome.state)
        self._out.line(f"{self.step:<12} {fate}; {outcome.text}")
        self.outcomes[name] = {"state": outcome.state, "seconds": seconds, **outcome.figures}


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--no-train", dest="train", action="store_false", help="train no predictors")
    parser.add_argument("--force", action="store_true", help="repeat every step")
    config_flags(parser, ProfileConfig, "profile")
    config_flags(parser, TrainConfig, "training", only=TRAINING)
    config_flags(parser, PlanConfig, "plan")
    config_flags(parser, EngineConfig, "engine", only=ENGINE)


def _flags(work: Work) -> str:
    """Flags to run a model with as it was prepared. `auto` is `exact` where RAM holds the bundles, or reads the rest
    of them from disk in less time than the dense weights."""
    engine, plain = work.engine, EngineConfig()
    selector = "auto" if engine.selector == "auto" and work.run_with == "exact" else work.run_with
    values = {name: getattr(engine, name) for name in ENGINE} | {"selector": selector}
    changed = {name: value for name, value in values.items() if value != getattr(plain, name)}
    sizes = {"ram": exact_size(engine.ram)} if engine.ram is not None else {}
    if engine.vram_bytes is not None:
        sizes["vram"] = ",".join(map(exact_size, engine.vrams or (engine.vram_bytes,)))
    flags = ((name.replace("_", "-"), str(value)) for name, value in (changed | sizes).items())
    return "".join(f" --{name} {quote(value)}" for name, value in flags)


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.prepare.pipeline import check, steps
    from powerinfer.sparsity.verdict import no_gain

    begin = time.perf_counter()
    work = opened(args, out)
    check(work)
    display = StepDisplay(out)
    with stoppable(display, out):
        for name, step in steps(work):
            display.take(name, step)
    out.line(f'\nready: powerinfer run "..." -m {quote(str(work.checkpoint.path))}{_flags(work)}')
    if not work.rectified and work.selector == "all":
        out.line(no_gain(work.checkpoint.config))
    document = {
        "model": str(work.checkpoint.path),
        "folder": str(work.folder),
        "seconds": time.perf_counter() - begin,
        "steps": display.outcomes,
        "plan": work.plan.json() if work.plan is not None else None,
    }
    out.document(document)
    return 0


def opened(args: argparse.Namespace, out: Output) -> Work:
    """Open the model and read the corpus."""
    from powerinfer.cli.progress import Bar
    from powerinfer.placement.request import check_options
    from powerinfer.prepare import profiling
    from powerinfer.prepare.pipeline import Work

    engine, profiled, planning = (config_from(args, kind) for kind in (EngineConfig, ProfileConfig, PlanConfig))
    training = TrainConfig(**{name: value for name, value in vars(args).items() if name in TRAINING})
    profiling.check(profiled)
    check_options(planning, engine)
    checkpoint = open_model(args.model, engine, out)
    for note in checkpoint.notes:
        out.note(note)
    with Bar() as bar:
        task = profiling.read(checkpoint, profiled, out.note, bar)
    return Work(checkpoint, engine, training, planning, task, args.train, args.force, out.note)


@contextmanager
def stoppable(display: StepDisplay, out: Output) -> Iterator[None]:
    """If Ctrl-C or SIGTERM ends the work, a line says how to resume."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        out.note(f"stopped in step {display.step}; the same command goes on from there")
        raise
