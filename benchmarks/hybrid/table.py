"""Write tables and plots of docs/benchmarks.md from the newest result of compare.py that has the ablation, of a GPU.

    python -m benchmarks.hybrid.table [--check]                 --check: only say whether they are up to date
    python -m benchmarks.hybrid.table FILE [--plots FOLDER]     print the tables of another result

The plots are hybrid-ablation.png, hybrid-budget.png and hybrid-trace.png (matplotlib, of the `bench` extra), each as
far as its figures are there. Figures of a stand-in, or of the tiny scale, say nothing about speed: they are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hybrid.compare import STEPS
from benchmarks.lib.cells import fixed, number, percent, signed
from benchmarks.lib.machine import ROOT
from benchmarks.lib.plots import pyplot, save
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import RESULTS, of_kind
from benchmarks.lib.tables import distinct, items, origin, paragraphs, processor, table, update

PAGE = ROOT / "docs/benchmarks.md"
STEP_NAMES = {
    "dense": "whole layers, dense",
    "layers": "neurons, in turns",
    "random": "at a time, random",
    "time": "at a time, the plan",
}

Jobs = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
"""Heads and rows."""


def of(document: dict[str, Any], section: str, name: str) -> dict[str, list[Jobs]]:
    """Results of a model's section by what was measured, a list over the rounds; failed ones are left out."""
    found: dict[str, list[Jobs]] = {}
    for key, job in document["jobs"].items():
        parts = key.split("/")
        if parts[:2] == [section, name] and "error" not in job:
            found.setdefault(parts[-1], []).append(job | {"round": parts[2]})
    return found


def rate(runs: list[Jobs], batch: str = "1") -> float | None:
    """Median over the rounds; None where none has it."""
    values = [run["decode_tok_s"][batch] for run in runs if batch in run.get("decode_tok_s", {})]
    return median(values) if values else None


def ratio(ours: list[Jobs], theirs: list[Jobs], batch: str) -> float | None:
    """Median of the ratios within the rounds."""
    other = {run["round"]: run.get("decode_tok_s", {}).get(batch) for run in theirs}
    pairs = [(run["decode_tok_s"].get(batch), other.get(run["round"])) for run in ours]
    ratios = [a / b for a, b in pairs if a and b]
    return median(ratios) if ratios else None


def gib(nbytes: float | None) -> str:
    return fixed(None if nbytes is None else nbytes / 2**30, 1)


def about(document: dict[str, Any]) -> str:
    """Where the figures come from."""
    settings, commits = document["settings"], distinct(job["commit"] for job in document["jobs"].values())
    return (
        f"{origin(document, commits)}; GPU {settings['device']}; {processor(document)}, {document['memory_gib']} GiB, "
        f"{settings['threads'] or 'automatic'} threads. The budget stands in for a card of that size; the GPU is as "
        "fast as it is, which is faster than such a card. Medians over the rounds; ratios are medians of those within "
        "a round." + (f" Note: {document['note']}." if document.get("note") else "")
    )


def model_lines(document: dict[str, Any]) -> str:
    """What was cut of the models, and how they fire."""
    lines = []
    for name, model in document["models"].items():
        plan = model["plan"]
        cut = "" if plan["n_layers"] == model["whole_layers"] else f" of {model['whole_layers']}"
        own = document["jobs"].get(f"card/{name}", {}).get("vram")
        budget = f"budget {gib(own)} of {gib(model['vram'])} GiB" if model["vram"] else "tiny"
        lines.append(
            f"{name}: {plan['n_layers']}{cut} layers of {plan['d_model']} x {plan['d_ff']}, "
            f"{model['stored'].upper()}, {budget}; {percent(plan['active'], 0)} of the neurons fire for a token, and "
            f"{percent(model['hot_share_of_layer'], 0)} of a layer's carry 80 % of that ({model['about']})"
        )
    return items(lines)


def decode_table(document: dict[str, Any]) -> Table:
    batches = [str(batch) for batch in document["settings"]["batches"]]
    rows = []
    for name in document["models"]:
        engines = of(document, "decode", name)
        for label, runs in engines.items():
            used = [run["vram_used"] for run in runs if run.get("vram_used") is not None]
            rows.append([name, label, *(number(rate(runs, batch)) for batch in batches), gib(max(used, default=None))])
        for label in engines:
            if label != OURS and OURS in engines:
                ratios = [fixed(ratio(engines[OURS], engines[label], batch)) for batch in batches]
                rows.append([name, f"{OURS} by {label}", *ratios, ""])
    return ["decode, tokens a second", "", *(f"{batch} together" for batch in batches), "VRAM in use, GiB"], rows


def step_rates(document: dict[str, Any], name: str) -> dict[str, float]:
    """Tokens per second of the ablation's steps, in order, as far as they are known."""
    found = of(document, "ablation", name)
    found["time"] = of(document, "decode", name).get(OURS, [])
    rates = {step: rate(found.get(step, [])) for step in (*STEPS, "time")}
    return {step: value for step, value in rates.items() if value is not None}


def ablation_table(document: dict[str, Any]) -> Table:
    rows = []
    for name in document["models"]:
        rates = step_rates(document, name) | {"exact": rate(of(document, "ablation", name).get("exact", []))}
        rows.append([name, *(number(rates.get(step)) for step in (*STEP_NAMES, "exact"))])
    return ["one request, tokens a second", *STEP_NAMES.values(), "the plan, exact"], rows


def prefill_table(document: dict[str, Any]) -> Table:
    """Of a prompt: this engine both ways, the best of the peer."""
    rows = []
    for name in document["models"]:
        engines = of(document, "prefill", name)
        ours = engines.pop(OURS, [])
        ways = [
            [run["prefill_tok_s"][way] for run in ours if way in run["prefill_tok_s"]] for way in ("streamed", "cpu")
        ]
        streamed, by_cpu = (median(rates) if rates else None for rates in ways)
        peers = [median([run["prefill_tok_s"]["llama.cpp"] for run in runs]) for runs in engines.values()]
        peer = max(peers, default=None)
        if streamed or by_cpu:
            least = ours[0]["streams_from"]
            cells = [number(streamed), number(by_cpu), f"{least} tokens" if least else "never", number(peer)]
            rows.append([name, *cells, fixed(streamed / peer if streamed and peer else None)])
    prompt = f"prompt of {document['settings'].get('prompt')} tokens, tokens a second"
    heads = ["cold neurons streamed", "by the CPU", "streamed from", "llama.cpp", "streamed by llama.cpp"]
    return [prompt, *heads], rows


def shares_of(runs: list[Jobs]) -> dict[str, float]:
    """Of this engine's decode runs, medians of what is known: gpu_share and overlap; predicted and measured ms of a
    token, and how far the first is `off`, as a share of the second."""
    known = {
        "gpu_share": [run["sparsity"]["1"]["gpu_share"] for run in runs if run.get("sparsity", {}).get("1")],
        "overlap": [run["trace"]["overlap"] for run in runs if "trace" in run],
        "predicted": [run["plan"]["ms_per_token"] for run in runs if "plan" in run],
    }
    found = {name: median(values) for name, values in known.items() if values}
    if measured := rate(runs):
        found["measured"] = 1e3 / measured
        if "predicted" in found:
            found["off"] = found["predicted"] / found["measured"] - 1
    return found


def share_table(document: dict[str, Any]) -> Table:
    rows = []
    for name in document["models"]:
        if runs := of(document, "decode", name).get(OURS, []):
            shares = shares_of(runs)
            bounds = [run["at_once"] for run in runs if run.get("at_once")]
            between = [percent(median(one[end] for one in bounds), 0) for end in ("least", "most") if bounds]
            cells = [percent(shares.get("gpu_share"), 0), percent(shares.get("overlap"), 0), " to ".join(between)]
            cells += [fixed(shares.get("predicted")), fixed(shares.get("measured")), signed(shares.get("off"))]
            rows.append([name, *cells])
    heads = ["GPU's share of the firing neurons", "overlap", "in one replay", "predicted, ms", "measured, ms", "off"]
    return ["one request", *heads], rows


def kernel_table(document: dict[str, Any]) -> Table:
    rows = []
    for name in document["models"]:
        job = document["jobs"].get(f"kernel/{name}", {})
        for run in job.get("runs", ()):
            cells = [f"{run['fired']:g} of {job['neurons']}", str(run["tokens"]), number(run["gb_s"])]
            rows.append([name, *cells, percent(run["share_of_copy"], 0)])
    return ["kernel", "neurons that fire", "tokens", "GB/s", "of a copy's bandwidth"], rows


def failures(document: dict[str, Any]) -> str:
    return items(f"{key} failed: {job['error']}" for key, job in document["jobs"].items() if "error" in job)


def tables(document: dict[str, Any]) -> str:
    makers = (decode_table, ablation_table, prefill_table, share_table, kernel_table)
    made = [table(heads, rows) for heads, rows in (make(document) for make in makers) if rows]
    return paragraphs(about(document), model_lines(document), *made, failures(document))


# --- plots


def figures(document: dict[str, Any], results: Path) -> dict[str, dict[str, Any]]:
    """Plot -> model -> what it shows, as far as it was measured. results: the folder of the traces."""
    makers = {
        "ablation": lambda name: step_rates(document, name),
        "budget": lambda name: budget_points(document, name),
        "trace": lambda name: trace_of(document, results, name),
    }
    shown = {kind: {name: make(name) for name in document["models"]} for kind, make in makers.items()}
    shown = {kind: {name: one for name, one in models.items() if one} for kind, models in shown.items()}
    return {kind: models for kind, models in shown.items() if models}


def budget_points(document: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """(GiB of VRAM, tokens per second) in order of the budget."""
    runs = [run for several in of(document, "budget", name).values() for run in several]
    return sorted((run["vram"] / 2**30, run["decode_tok_s"]["1"]) for run in runs)


def draw(document: dict[str, Any], results: Path, folder: Path) -> list[Path]:
    """The plots that there are figures for."""
    plots, paths = pyplot("agg", font=10), []
    for kind, models in figures(document, results).items():
        figure = {"ablation": draw_ablation, "budget": draw_budgets, "trace": draw_traces}[kind](plots, models)
        figure.tight_layout()
        paths.append(folder / f"hybrid-{kind}.png")
        save(figure, paths[-1], dpi=120)
        plots.close(figure)
    return paths


def draw_ablation(plots: Any, models: dict[str, dict[str, float]]) -> Any:
    figure, axes = plots.subplots(1, len(models), figsize=(3.6 * len(models), 3.6), squeeze=False)
    for axis, (name, rates) in zip(axes[0], models.items(), strict=True):
        bars = axis.bar([STEP_NAMES[step].replace(", ", ",\n") for step in rates], list(rates.values()))
        axis.bar_label(bars, [number(value) for value in rates.values()])
        axis.tick_params(axis="x", labelsize=7)
        axis.set_title(name)
        axis.set_ylabel("tokens a second, one request")
    return figure


def draw_budgets(plots: Any, models: dict[str, list[tuple[float, float]]]) -> Any:
    figure, axis = plots.subplots(figsize=(5.4, 3.6))
    for name, points in models.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set_xlabel("VRAM budget, GiB")
    axis.set_ylabel("tokens a second, one request")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def draw_traces(plots: Any, models: dict[str, list[dict[str, Any]]]) -> Any:
    figure, axes = plots.subplots(len(models), 1, figsize=(9, 2.2 * len(models)), squeeze=False)
    for axis, (name, spans) in zip(axes[:, 0], models.items(), strict=True):
        draw_token(axis, name, spans)
    return figure


def trace_of(document: dict[str, Any], results: Path, name: str) -> list[dict[str, Any]]:
    """Spans of a model's trace; [] where there is none."""
    runs = [run for run in of(document, "decode", name).get(OURS, []) if "trace" in run]
    path = results / runs[0]["trace"]["path"] if runs else None
    if path is None or not path.exists():
        return []
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def last_token(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans of the last step: from the last embedding on."""
    begin = max(span["ts"] for span in spans if span["cat"] == "embedding")
    return [span for span in spans if span["ts"] >= begin]


def draw_token(axis: Any, name: str, spans: list[dict[str, Any]]) -> None:
    """One step, a lane for each of GPU, CPU and waiting."""
    step = last_token(spans)
    begin = min(span["ts"] for span in step)
    kinds = sorted({span["cat"] for span in step})
    colours = [f"C{place}" for place in range(10)] + ["black", "gold", "navy"]
    for place, kind in enumerate(kinds):
        some = [span for span in step if span["cat"] == kind]
        for lane in {span["tid"] for span in some}:
            bars = [(1e-3 * (s["ts"] - begin), 1e-3 * s["dur"]) for s in some if s["tid"] == lane]
            axis.broken_barh(bars, (-lane - 0.4, 0.8), facecolor=colours[place], label=kind)
    axis.set_yticks([0, -1, -2], ["GPU", "CPU", "CPU waits"])
    axis.set_title(f"{name}: one token", fontsize=9)
    axis.set_xlabel("milliseconds")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(handles.values(), handles.keys(), fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))


def speaks(document: dict[str, Any]) -> bool:
    """Whether the figures say something about speed."""
    return document["settings"]["gpu"] != "cpu" and document["settings"]["scale"] != "tiny"


def newest_ablation() -> dict[str, Any] | None:
    """The newest result of a GPU with more than the plan itself."""
    found = (one for one in reversed(of_kind("hybrid")) if speaks(one))
    return next((one for one in found if any(len(step_rates(one, name)) > 1 for name in one["models"])), None)


def page_tables() -> dict[str, str | None]:
    document = newest_ablation()
    if document is None:
        return {"hybrid table": None}
    shown = [f"![{kind}](hybrid-{kind}.png)" for kind in figures(document, RESULTS)]
    return {"hybrid table": "\n".join([tables(document), "", *shown, ""])}


PAGES = {PAGE: page_tables}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to draw the plots of FILE")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1: not up to date")
    arguments = parser.parse_args()
    if arguments.file is not None:
        document = json.loads(arguments.file.read_text())
        print(tables(document))
        if arguments.plots:
            draw(document, arguments.file.parent, arguments.plots)
        return
    update(PAGES, arguments.check)
    if not arguments.check and (shown := newest_ablation()):
        draw(shown, RESULTS, PAGE.parent)


if __name__ == "__main__":
    main()
