"""Write a report on a model's prepared data: a page with plots and figures, and the plots as PNG files.

The page is self-contained. It shows the profile, the predictors, the bundles and the plan, as far as they exist, and
the commands that make what is missing. --plan FILE shows a plan that `powerinfer plan --json > FILE` wrote; without -m,
that plan alone, for example of a --shape. Needs matplotlib: pip install '.[report]' in a clone.

JSON: path (of the page), images, made (false: it was up to date), shown (profile, predictor, bundles, plan: whether the
page has it), missing (noun, command, stale: why the existing one cannot be used, or null), seconds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output, config_flags, config_from, model_argument, model_flag, open_model
from powerinfer.config import EngineConfig

if TYPE_CHECKING:
    from powerinfer.report.findings import Findings
    from powerinfer.report.writing import Report


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser)
    model_flag(parser)
    parser.add_argument("--plan", metavar="FILE", help="show this plan, the document of `powerinfer plan --json`")
    parser.add_argument("--out", metavar="FOLDER", help="output folder; default: MODEL.powerinfer/report")
    parser.add_argument("--force", action="store_true", help="write it even if it is up to date")
    config_flags(parser, EngineConfig, "engine", only=("quantize", "prepared"))


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.placement.plan_document import read_plan_document
    from powerinfer.report.findings import findings, plan_findings, with_plan
    from powerinfer.report.writing import report_folder, write_report

    begin = time.perf_counter()
    plan = read_plan_document(Path(args.plan), pipe=True) if args.plan else None
    if plan is not None and args.model is None:
        facts = plan_findings(plan, Path(args.plan))
        folder = Path(args.out or f"{args.plan}.report")
    else:
        engine = config_from(args, EngineConfig)
        checkpoint = open_model(args.model, engine, out)
        facts = findings(checkpoint, engine.prepared)
        if plan is not None:
            facts = with_plan(facts, plan, Path(args.plan), checkpoint)
        folder = Path(args.out) if args.out else report_folder(checkpoint.path, engine.prepared)
    with Bar() as bar:
        report = write_report(facts, folder, args.force, bar)
    document = describe(facts, report) | {"seconds": time.perf_counter() - begin}
    _show(document, out)
    out.document(document)
    return 0


def describe(facts: Findings, report: Report) -> dict[str, Any]:
    """The report as a document."""
    return {
        "path": str(report.page),
        "images": [str(path) for path in report.images],
        "made": report.is_new,
        "shown": {one.noun: one.value is not None for one in facts},
        "missing": [{"noun": one.noun, "command": one.command, "stale": one.stale} for one in facts.lacking],
    }


def _show(document: dict[str, Any], out: Output) -> None:
    shown = ", ".join(noun for noun, there in document["shown"].items() if there)
    out.line(f"{document['path']}: {shown}, {len(document['images'])} plots")
    if not document["made"]:
        out.line("up to date; nothing was done (--force writes it again)")
    for one in document["missing"]:
        out.line(f"{'stale' if one['stale'] else 'missing'}: {one['noun']}; `{one['command']}`")
