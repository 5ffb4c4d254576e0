"""Writing a report: the page, and its plots as files beside it."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from powerinfer import __version__
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.prepared import prepared_folder, write_small
from powerinfer.progress import Progress, silent
from powerinfer.report import sections
from powerinfer.report.findings import Findings, next_steps
from powerinfer.report.page import Section, mark_of, page
from powerinfer.report.plots import need_matplotlib
from powerinfer.report.sections import Plots, Rows, Tile
from powerinfer.sparsity.verdict import verdict

PAGE = "index.html"
IMAGES = ("cumulative", "heat", "experts", "slots", "sparsity", "recall", "bytes", "neurons", "time")
"""The plots that a report can have; each is also written as NAME.png beside the page."""


@dataclass(frozen=True)
class Report:
    """A written report. images: the plots beside the page; made: False if it was up to date."""

    page: Path
    images: list[Path]
    is_new: bool


def write_report(prepared: Findings, folder: Path, force: bool = False, progress: Progress = silent) -> Report:
    """Write the report of a model into a folder, unless the existing one was made from the same files.

    RequestError if there is nothing to report on, or matplotlib is missing; PowerInferError if the folder cannot be
    written. Every file is written whole or not at all, the page last.
    """
    need_matplotlib()
    if all(one.value is None for one in prepared):
        raise RequestError(f"nothing is prepared for {prepared.model} yet; start with `{prepared.first.command}`")
    key = report_key(prepared)
    former = None if force else current(folder, key)
    if former is not None:
        return former
    document, images = compose(prepared, key, progress)
    try:
        for name, image in images.items():
            write_small(folder / f"{name}.png", image)
        for name in IMAGES:  # plots of an earlier report
            if name not in images:
                with suppress(FileNotFoundError):
                    os.unlink(folder / f"{name}.png")
        write_small(folder / PAGE, document.encode())
    except OSError as error:
        raise PowerInferError(
            f"cannot write the report into {folder} ({error.strerror or error}); --out FOLDER selects another place"
        ) from error
    return Report(folder / PAGE, [folder / f"{name}.png" for name in images], True)


def report_folder(model: str | Path, prepared: str | None = None) -> Path:
    """The default folder of a model's report."""
    return prepared_folder(model, prepared) / "report"


def report_key(prepared: Findings) -> str:
    """A key that changes with everything that a report shows."""
    facts: list[object] = [__version__, prepared.model, prepared.summary]
    facts += [prepared.measured, prepared.replayed, prepared.no_gain]
    for one in prepared:
        status = os.stat(one.path) if one.path is not None else None
        facts.append((one.noun, one.stale, one.command, status and (status.st_size, status.st_mtime_ns)))
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def current(folder: Path, key: str) -> Report | None:
    """The existing report, if it was made with this key and no plot is missing."""
    try:
        with open(folder / PAGE, encoding="utf-8", errors="replace") as file:
            made_with, *names = (mark_of(file.read(4096)) or "").split()
    except (OSError, ValueError):
        return None
    images = [folder / f"{name}.png" for name in names if name in IMAGES]
    return Report(folder / PAGE, images, False) if made_with == key and all(map(Path.is_file, images)) else None


def compose(prepared: Findings, key: str, progress: Progress = silent) -> tuple[str, dict[str, bytes]]:
    """The page, and the PNG images by name."""
    drawn = Plots(len(IMAGES), progress)
    shown: list[Section] = []
    tiles: list[Tile] = []
    columns: list[Rows] = []
    profile, predictor, plan = prepared.profile.value, prepared.predictor.value, prepared.plan.value
    if prepared.lacking:
        shown.append(_lacking(prepared))
    parts = []
    if profile is not None:
        parts.append(sections.activations(profile, drawn))
    if prepared.experts.value is not None:
        parts.append(sections.experts(prepared.experts.value, prepared.replayed, drawn))
    if predictor is not None:
        parts.append(sections.predictors(predictor, drawn))
    if plan is not None:
        parts.append(sections.placement(plan, drawn))
    if prepared.measured is not None:
        parts.append(sections.measured(prepared.measured))
    for section, figures, rows in parts:
        shown.append(section)
        tiles += figures
        columns.append(rows)
    if any(columns):
        layer_section = sections.layer_section(profile, predictor, columns, drawn)
        shown.append(layer_section)
    if steps := next_steps(prepared):
        shown.append(Section("Next", steps=steps))
    mark = " ".join([key, *drawn.files])
    return page(f"{prepared.model}: report", prepared.summary, tiles, shown, mark, verdict_of(prepared)), drawn.files


def verdict_of(prepared: Findings) -> str | None:
    """Whether sparse decoding is worth it for the model, as measured, else as estimated; None: neither is known. Of
    times that others disturbed nothing follows."""
    plan, measured = prepared.plan.value, prepared.measured
    if prepared.no_gain is not None and (plan is None or plan.selector == "all"):
        return f"{prepared.no_gain[:1].upper()}{prepared.no_gain[1:]}."
    if measured is not None and not measured.disturbed and (plan is None or not plan.gpu_layers):
        basis = f"on {measured.cpu}, measured at load"
        return verdict(sections.gain_of(measured), "Sparse decoding of the FFNs", basis)
    if plan is None or plan.selector == "all" or not plan.predicted.dense_tok_s:
        return None
    ratio = plan.predicted.decode_tok_s / plan.predicted.dense_tok_s
    return verdict(ratio, condition=f"on {plan.hardware}, as estimated")


def _lacking(prepared: Findings) -> Section:
    """Missing and stale files, with the commands that make them."""
    section = Section("What is missing")
    for one in prepared.lacking:
        section.steps.append((one.stale or f"There is no {one.noun} yet.", one.command))
    return section
