"""Write the tables and the plot of docs/selectors.md from the newest results of compare.py, silent.py and profiles.py.

    python -m benchmarks.sparse.table [--check]     --check: only say whether the tables are up to date

The plot is docs/sparse-speed.svg; drawing it needs matplotlib, of the `bench` extra.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from benchmarks.lib.cells import fixed, measured, middle, percent
from benchmarks.lib.machine import ROOT
from benchmarks.lib.plots import pyplot, save
from benchmarks.lib.results import merged, newest, of_one_machine
from benchmarks.lib.tables import distinct, items, origin, paragraphs, processor, table, write_tables

PLOT = ROOT / "docs/sparse-speed.svg"
RATE = "decode_tok_s"
PAPER = {"opt-30b": ("3 %", "26 %", "17 %"), "reglu-70b": ("18 %", "43 %", "26 %"), "drelu": ("10 %", "", "")}


def results() -> dict[str, Any] | None:
    """All results of compare.py on the newest one's machine as one: of every fraction and type the newest figures."""
    document = merged(of_one_machine("sparse"), "sparse", "type", "active")
    if document is not None:
        document["sparse"].sort(key=lambda entry: (entry["type"], entry["active"]))
        document["commit"] = distinct(entry["commit"] for entry in document["sparse"])
    return document


def rate(entry: dict[str, Any], engine: str) -> float | None:
    """Tokens per second, None where the engine failed or was left out."""
    return middle(entry["engines"].get(engine, {}).get(RATE))


def crossing(points: list[tuple[float, float]]) -> float | None:
    """Fraction active from which on a selector is no faster: where the line through (fraction, ratio) falls to 1.

    points: in order of the fraction. None where it begins below 1; infinity where it never falls to 1.
    """
    if not points or points[0][1] <= 1:
        return None
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 <= 1:
            return x0 + (y0 - 1) / (y0 - y1) * (x1 - x0)
    return math.inf


def by_type(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    kinds = dict.fromkeys(entry["type"] for entry in document["sparse"])
    return {kind: [entry for entry in document["sparse"] if entry["type"] == kind] for kind in kinds}


def ffn_ratio(entry: dict[str, Any], way: str) -> float | None:
    """Time of the FFN operator, relative to the dense one."""
    seconds = entry.get("ffn_seconds")
    return None if not seconds else seconds[way] / seconds["dense"]


# --- tables


def cell(entry: dict[str, Any], engine: str, base: str | None = None) -> str:
    """Speed, and in brackets the median of the ratios to the base within the rounds."""
    text, ratio = measured(entry["engines"].get(engine), RATE), middle(entry["ratio"].get(engine, {}).get(base))
    return text if ratio is None else f"{text} ({ratio:.2f})"


def speed_table(document: dict[str, Any]) -> str:
    peers = list(document["peers"])
    first = peers[0] if peers else "all"
    about = (
        f"{origin(document)}, {processor(document, units=True)}, {document['compiler']}; random LLaMA of shape "
        f"{document['shape']}, predictor of rank {document['predictor_rank']} in {document['predictor_type'].upper()}, "
        f"{document['threads']} threads. Tokens per second of decoding {document['gen_tokens']} tokens, medians of "
        f"interleaved runs; in brackets, of `exact` the ratio to `all` and of `predicted` that to {first}, medians of "
        "the ratios within a round; * fewer than three undisturbed runs."
    )
    heads = ["", "active", "`all`", "`exact`", "`predicted`", "`predicted`, trial", *peers, "MB a token, dense"]
    heads += ["predicted", "of read bandwidth", "FFN alone, by dense: exact", "predicted"]
    bases = {"all": None, "exact": "all", "predicted": first, "predicted-trial": first} | dict.fromkeys(peers)
    rows = []
    for entry in document["sparse"]:
        speed, most = rate(entry, "predicted"), limit(entry)
        share = speed / most if speed and most else None
        cells = [entry["type"], f"{100 * entry['active']:g} %"]
        cells += [cell(entry, engine, base) for engine, base in bases.items()]
        cells += [fixed(megabytes(entry, engine), 0) for engine in ("all", "predicted")]
        rows.append([*cells, percent(share, 0), *(fixed(ffn_ratio(entry, way)) for way in ("exact", "predicted"))])
    return paragraphs(about, table(heads, rows), crossing_lines(document))


def crossing_lines(document: dict[str, Any]) -> str:
    """Where sparse equals dense."""
    lines = []
    for kind, entries in by_type(document).items():
        for engine in ("exact", "predicted"):
            ratios = [(entry["active"], middle(entry["ratio"].get(engine, {}).get("all"))) for entry in entries]
            points = [(active, ratio) for active, ratio in ratios if ratio is not None]
            found = crossing(points)
            if found == math.inf:
                lines.append(f"`{engine}` in {kind} is faster than `all` up to {100 * points[-1][0]:g} % active")
            elif found is not None:
                lines.append(f"`{engine}` in {kind} is as fast as `all` at {100 * found:.0f} % active")
    return items(lines)


def activity_table(document: dict[str, Any]) -> str:
    heads = ["profile", "", "mean active", "80 % of activations: of a layer's neurons", "of all neurons"]
    heads += ["kept from token to token", "predictor: recall", "candidates"]
    rows: list[list[str]] = []
    for name, values in document["profiles"].items():
        rows.append([name, "paper", *PAPER[name], "", "", ""])
        for label, source in (("chosen", values["chosen"]), ("measured", values)):
            shares = source["hot_share_of_layer"]
            cells = [source["active_fraction"], sum(shares) / len(shares), source["hot_share_of_model"]]
            cells += [source.get(key) for key in ("overlap", "recall", "candidate_fraction")]
            rows.append(["", label, *map(percent, cells)])
    profile = next(iter(document["profiles"].values()))
    note = (
        f"Models of shape {document['shape']} with {len(profile['layers'])} layers, {profile['tokens']} random tokens; "
        f"commit {document['commit']}. The share of a layer is the mean over the layers; it is measured low where a "
        "neuron is expected less than about once in so many tokens, as in the quiet layers of opt-30b."
    )
    return paragraphs(table(heads, rows), note)


def silent_table(document: dict[str, Any]) -> str:
    """Models that are mostly silent: both rates of every engine."""
    peers = list(document["peers"])
    engines = [name for name in ("all", "exact", "predicted") if name in document["silent"][0]["engines"]]
    note = (
        f"{origin(document)}, {processor(document, units=True)}, {document['compiler']}; random weights in published "
        f"shapes, cut to their first blocks and a vocabulary of {document['vocab']:,}. "
        f"Tokens per second of a prompt of {document['prompt_tokens']}, and of decoding {document['gen_tokens']}; "
        "medians of interleaved runs; in brackets the ratio to llama.cpp, the median of the ratios within a round; "
        "* fewer than three undisturbed runs."
    )
    heads = ["model", "blocks", "type", "threads", "", *(f"`{name}`" for name in engines), *peers]
    heads += ["MB a token, `all`", "`exact`"]
    rows = []
    for entry in sorted(document["silent"], key=lambda entry: (entry["model"], entry["layers"], -entry["threads"])):
        for rate_name, title in (("prefill_tok_s", "prompt"), ("decode_tok_s", "decode")):
            about = [entry["model"], str(entry["layers"]), entry["type"], str(entry["threads"])]
            cells = [*(about if title == "prompt" else [""] * len(about)), title]
            for engine in (*engines, *peers):
                text = measured(entry["engines"].get(engine), rate_name)
                ratio = entry["ratio"].get(engine, {}).get(peers[0], {}).get(rate_name) if peers else None
                cells += [text if not ratio else f"{text} ({ratio['median']:.2f})"]
            read = ["all", "exact"] if title == "decode" else []
            rows.append(cells + [fixed(megabytes(entry, engine), 0) for engine in read] + [""] * (2 - len(read)))
    return paragraphs(note, table(heads, rows))


# --- plot


def draw(document: dict[str, Any]) -> None:
    """Tokens per second, bytes per token and the FFN alone against the fraction active, one column a type."""
    kinds = by_type(document)
    figure, axes = pyplot().subplots(3, len(kinds), figsize=(4.6 * len(kinds), 9), squeeze=False, sharex="col")
    for column, (kind, entries) in enumerate(kinds.items()):
        speeds, read, alone = (row[column] for row in axes)
        for engine, marker in (("all", "s"), ("exact", "o"), ("predicted", "^"), ("predicted-trial", "v")):
            line(speeds, entries, engine, lambda entry, engine=engine: rate(entry, engine), marker=marker)
            line(read, entries, engine, lambda entry, engine=engine: megabytes(entry, engine), marker=marker)
        for peer in document["peers"]:
            line(speeds, entries, peer, lambda entry, peer=peer: rate(entry, peer), linestyle="--", color="0.4")
        line(speeds, entries, "predicted: memory's limit", limit, linestyle=":", color="0.2")
        for way, color, marker in (("exact", "C1", "o"), ("predicted", "C2", "^")):
            line(alone, entries, way, lambda entry, way=way: ffn_ratio(entry, way), color=color, marker=marker)
        line(alone, entries, "in proportion", lambda entry: entry["active"], linestyle=":", color="0.2")
        alone.axhline(1, color="C0")
        speeds.set_title(kind)
        speeds.set_ylabel("tokens a second")
        read.set_ylabel("MB read a token")
        alone.set_ylabel("time of the FFN, by dense")
        alone.set_xlabel("neurons active, %")
        alone.legend(fontsize=8)
        for axis in (speeds, read, alone):
            axis.set_xscale("log")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        ticks = [100 * entry["active"] for entry in entries]
        alone.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        alone.minorticks_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=(len(labels) + 1) // 2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    save(figure, PLOT)


def line(axis: Any, entries: list[dict[str, Any]], label: str, value: Any, **style: Any) -> None:
    points = [(100 * entry["active"], value(entry)) for entry in entries]
    points = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, **style)


def megabytes(entry: dict[str, Any], engine: str) -> float | None:
    read = entry["engines"].get(engine, {}).get("bytes_per_token")
    return None if read is None else read / 1e6


def limit(entry: dict[str, Any]) -> float | None:
    """Tokens per second if `predicted` read its bytes at the measured bandwidth."""
    read = megabytes(entry, "predicted")
    return None if read is None or not entry["bandwidth"] else 1e3 * entry["bandwidth"] / read


def tables() -> dict[str, str | None]:
    speeds, activity = results(), newest("activity")
    silent = merged(of_one_machine("silent"), "silent", "model", "type", "threads")
    return {
        "silent table": silent and silent_table(silent),
        "sparse table": speeds and speed_table(speeds),
        "activity table": activity and activity_table(activity),
    }


PAGES = {ROOT / "docs/selectors.md": tables}

if __name__ == "__main__":
    write_tables(__doc__, PAGES, lambda: (speeds := results()) and draw(speeds))
