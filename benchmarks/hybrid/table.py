"""Tables and plots of what benchmarks/hybrid measured.

    python -m benchmarks.hybrid.table [FILE] [--plots FOLDER] [--docs]

Prints the tables. --plots writes hybrid-ablation.png, hybrid-budget.png and hybrid-trace.png (matplotlib, of the
`bench` extra), each as far as its figures are there. --docs puts tables and plots into docs/hybrid.md; figures of a
stand-in, or of the tiny scale, say nothing about speed and are not put there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hybrid.compare import STEPS
from benchmarks.lib.machine import ROOT
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import RESULTS, filled, header, number, percent, row

PAGE = ROOT / "docs/hybrid.md"
STEP_NAMES = {
    "dense": "whole layers, dense",
    "layers": "neurons, in turns",
    "random": "at a time, random",
    "time": "at a time, the plan",
}

Jobs = dict[str, Any]


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
    return "" if nbytes is None else f"{nbytes / 2**30:.1f}"


def about(document: dict[str, Any]) -> list[str]:
    """Where the figures come from, and what was cut."""
    settings, cpu = document["settings"], document["cpu"]
    commits = ", ".join(dict.fromkeys(job["commit"] for job in document["jobs"].values()))
    lines = [
        f"{document['date'][:10]}, commit {commits}; GPU {settings['device']}; {cpu['cores']} cores of {cpu['name']}, "
        f"{document['memory_gib']} GiB, {settings['threads'] or 'automatic'} threads. The budget stands in for a card "
        "of that size; the GPU is as fast as it is, which is faster than such a card. Medians over the rounds; ratios "
        "are medians of those within a round." + (f" Note: {document['note']}." if document.get("note") else ""),
        "",
    ]
    for name, model in document["models"].items():
        plan = model["plan"]
        cut = "" if plan["n_layers"] == model["whole_layers"] else f" of {model['whole_layers']}"
        own = document["jobs"].get(f"card/{name}", {}).get("vram")
        budget = f"budget {gib(own)} of {gib(model['vram'])} GiB" if model["vram"] else "tiny"
        lines.append(
            f"- {name}: {plan['n_layers']}{cut} layers of {plan['d_model']} x {plan['d_ff']}, "
            f"{model['stored'].upper()}, {budget}; {percent(plan['active'], 0)} of the neurons fire for a token, and "
            f"{percent(model['hot_share_of_layer'], 0)} of a layer's carry 80 % of that ({model['about']})"
        )
    return [*lines, ""]


def decode_rows(document: dict[str, Any]) -> list[str]:
    batches = [str(batch) for batch in document["settings"]["batches"]]
    lines = header("decode, tokens a second", "", *(f"{batch} together" for batch in batches), "VRAM in use, GiB")
    for name in document["models"]:
        engines = of(document, "decode", name)
        for label, runs in engines.items():
            used = [run["vram_used"] for run in runs if run.get("vram_used") is not None]
            rates = [rate(runs, batch) for batch in batches]
            shown = ["" if value is None else number(value) for value in rates]
            lines.append(row(name, label, *shown, gib(max(used, default=None))))
        for label in engines:
            if label != OURS and OURS in engines:
                ratios = [ratio(engines[OURS], engines[label], batch) for batch in batches]
                shown = ["" if value is None else f"{value:.2f}" for value in ratios]
                lines.append(row(name, f"{OURS} by {label}", *shown, ""))
    return [*lines, ""]


def step_rates(document: dict[str, Any], name: str) -> dict[str, float]:
    """Tokens per second of the ablation's steps, in order, as far as they are known."""
    found = of(document, "ablation", name)
    found["time"] = of(document, "decode", name).get(OURS, [])
    rates = {step: rate(found.get(step, [])) for step in (*STEPS, "time")}
    return {step: value for step, value in rates.items() if value is not None}


def ablation_rows(document: dict[str, Any]) -> list[str]:
    lines = header("one request, tokens a second", *STEP_NAMES.values(), "the plan, exact")
    for name in document["models"]:
        rates = step_rates(document, name)
        rates["exact"] = rate(of(document, "ablation", name).get("exact", [])) or 0.0
        lines.append(row(name, *(number(rates[step]) if rates.get(step) else "" for step in (*STEP_NAMES, "exact"))))
    return [*lines, ""]


def prefill_rows(document: dict[str, Any]) -> list[str]:
    """Of a prompt: this engine both ways, the best of the peer."""
    heads = ("cold neurons streamed", "by the CPU", "streamed from", "llama.cpp", "streamed by llama.cpp")
    lines = header(f"prompt of {document['settings'].get('prompt')} tokens, tokens a second", *heads)
    for name in document["models"]:
        engines = of(document, "prefill", name)
        ours = engines.pop(OURS, [])
        ways = {
            way: [run["prefill_tok_s"][way] for run in ours if way in run["prefill_tok_s"]]
            for way in ("streamed", "cpu")
        }
        rates = {way: median(values) for way, values in ways.items() if values}
        peer = max(
            (median([run["prefill_tok_s"]["llama.cpp"] for run in runs]) for runs in engines.values()), default=None
        )
        if not rates:
            continue
        least = ours[0]["streams_from"]
        by = f"{rates['streamed'] / peer:.2f}" if peer and "streamed" in rates else ""
        shown = [number(rates[way]) if way in rates else "" for way in ("streamed", "cpu")]
        lines.append(
            row(name, *shown, f"{least} tokens" if least else "never", "" if peer is None else number(peer), by)
        )
    return [*lines, ""]


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


def share_rows(document: dict[str, Any]) -> list[str]:
    heads = ("GPU's share of the firing neurons", "overlap", "in one replay", "predicted, ms", "measured, ms", "off")
    lines = header("one request", *heads)
    for name in document["models"]:
        runs = of(document, "decode", name).get(OURS, [])
        if not runs:
            continue
        shares = shares_of(runs)
        bounds = [run["at_once"] for run in runs if run.get("at_once")]
        between = [f"{percent(median(one[end] for one in bounds), 0)}" for end in ("least", "most") if bounds]
        lines.append(
            row(
                name,
                percent(shares.get("gpu_share"), 0),
                percent(shares.get("overlap"), 0),
                " to ".join(between),
                *(f"{shares[one]:.2f}" if one in shares else "" for one in ("predicted", "measured")),
                f"{100 * shares['off']:+.0f} %" if "off" in shares else "",
            )
        )
    return [*lines, ""]


def kernel_rows(document: dict[str, Any]) -> list[str]:
    lines = header("kernel", "neurons that fire", "tokens", "GB/s", "of a copy's bandwidth")
    for name in document["models"]:
        job = document["jobs"].get(f"kernel/{name}", {})
        for run in job.get("runs", ()):
            cells = (f"{run['fired']:g} of {job['neurons']}", str(run["tokens"]), number(run["gb_s"]))
            lines.append(row(name, *cells, percent(run["share_of_copy"], 0)))
    return [*lines, ""]


def failures(document: dict[str, Any]) -> list[str]:
    return [f"- {key} failed: {job['error']}" for key, job in document["jobs"].items() if "error" in job]


def tables(document: dict[str, Any]) -> str:
    parts = (decode_rows, ablation_rows, prefill_rows, share_rows, kernel_rows)
    filled_in = [lines for lines in (part(document) for part in parts) if len(lines) > len(header("")) + 1]
    return "\n".join(line for lines in (about(document), *filled_in, failures(document)) for line in lines)


# --- plots -----------------------------------------------------------------------------------------------------------


def budget_points(document: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """(GiB of VRAM, tokens per second) in order of the budget."""
    runs = [run for several in of(document, "budget", name).values() for run in several]
    return sorted((run["vram"] / 2**30, run["decode_tok_s"]["1"]) for run in runs)


def draw(document: dict[str, Any], results: Path, folder: Path) -> list[Path]:
    """The plots that there are figures for. results: the folder of the traces."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    names = list(document["models"])
    drawn = []

    def save(figure: Any, kind: str) -> None:
        figure.tight_layout()
        drawn.append(folder / f"hybrid-{kind}.png")
        figure.savefig(drawn[-1], dpi=120, metadata={"Software": None})
        pyplot.close(figure)

    bars = {name: step_rates(document, name) for name in names}
    bars = {name: rates for name, rates in bars.items() if rates}
    if bars:
        figure, axes = pyplot.subplots(1, len(bars), figsize=(3.6 * len(bars), 3.6), squeeze=False)
        for axis, (name, rates) in zip(axes[0], bars.items(), strict=True):
            drawn_bars = axis.bar([STEP_NAMES[step].replace(", ", ",\n") for step in rates], list(rates.values()))
            axis.bar_label(drawn_bars, [number(value) for value in rates.values()])
            axis.tick_params(axis="x", labelsize=7)
            axis.set_title(name)
            axis.set_ylabel("tokens a second, one request")
        save(figure, "ablation")
    lines = {name: budget_points(document, name) for name in names}
    lines = {name: points for name, points in lines.items() if points}
    if lines:
        figure, axis = pyplot.subplots(figsize=(5.4, 3.6))
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set_xlabel("VRAM budget, GiB")
        axis.set_ylabel("tokens a second, one request")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        save(figure, "budget")
    traces = {name: trace_of(document, results, name) for name in names}
    traces = {name: spans for name, spans in traces.items() if spans}
    if traces:
        figure, axes = pyplot.subplots(len(traces), 1, figsize=(9, 2.2 * len(traces)), squeeze=False)
        for axis, (name, spans) in zip(axes[:, 0], traces.items(), strict=True):
            draw_token(axis, name, spans)
        save(figure, "trace")
    return drawn


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "hybrid.json")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--docs", action="store_true")
    arguments = parser.parse_args()
    document = json.loads(arguments.file.read_text())
    body = tables(document)
    print(body)
    if arguments.docs and not speaks(document):
        sys.exit("measured on a stand-in or at the tiny scale: not for the docs")
    folder = PAGE.parent if arguments.docs else arguments.plots
    plots = draw(document, arguments.file.parent, folder) if folder else []
    if arguments.docs:
        shown = [f"![{path.stem.removeprefix('hybrid-')}]({path.name})" for path in plots]
        new = "\n".join([body, "", *shown, ""])
        PAGE.write_text(filled(PAGE.read_text(), "hybrid table", new))


if __name__ == "__main__":
    main()
