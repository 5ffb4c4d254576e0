"""Write the tables and the plot of docs/selectors.md from the newest results of compare.py and profiles.py.

    python -m benchmarks.sparse.table [--check]     --check: only say whether the tables are up to date

The plot is docs/sparse-speed.svg; drawing it needs matplotlib, of the `bench` extra.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import header, newest, number, of_one_machine, percent, row, write_tables

PAGE = ROOT / "docs/selectors.md"
PLOT = ROOT / "docs/sparse-speed.svg"
RATE = "decode_tok_s"
PAPER = {"opt-30b": ("3 %", "26 %", "17 %"), "reglu-70b": ("18 %", "43 %", "26 %"), "drelu": ("10 %", "", "")}


def results() -> dict[str, Any] | None:
    """All results of compare.py on the newest one's machine as one: of every fraction and type the newest figures."""
    documents = of_one_machine("sparse")
    if not documents:
        return None
    entries = {}
    for document in documents:
        bandwidth = document["read_bandwidth_gb_s"].get(str(document["threads"]))
        for entry in document["sparse"]:
            entries[entry["type"], entry["active"]] = entry | {"bandwidth": bandwidth, "commit": document["commit"]}
    merged = documents[-1] | {"sparse": [entries[key] for key in sorted(entries)]}
    merged["commit"] = ", ".join(dict.fromkeys(entry["commit"] for entry in merged["sparse"]))
    return merged


def rate(entry: dict[str, Any], engine: str) -> float | None:
    """Tokens per second, None where the engine failed or was left out."""
    found = entry["engines"].get(engine, {}).get(RATE)
    return None if found is None else found["median"]


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


def share_of_bandwidth(entry: dict[str, Any], engine: str) -> float | None:
    """Bytes that were touched by tokens per second, relative to what the machine can read."""
    speed, read = rate(entry, engine), entry["engines"].get(engine, {}).get("bytes_per_token")
    if speed is None or read is None or not entry["bandwidth"]:
        return None
    return speed * read / 1e9 / entry["bandwidth"]


def ffn_ratio(entry: dict[str, Any], way: str) -> float | None:
    """Time of the FFN operator, relative to the dense one."""
    seconds = entry.get("ffn_seconds")
    return None if not seconds else seconds[way] / seconds["dense"]


# --- tables ----------------------------------------------------------------------------------------------------------


def cell(entry: dict[str, Any], engine: str, base: str | None = None) -> str:
    """Speed, and in brackets the median of the ratios to the base within the rounds."""
    speed = rate(entry, engine)
    if speed is None:
        return "fails" if engine in entry["engines"] else ""
    text = number(speed) + ("" if entry["engines"][engine]["kept"] >= 3 else "*")
    ratio = entry["ratio"].get(engine, {}).get(base) if base else None
    return f"{text} ({ratio['median']:.2f})" if ratio else text


def speed_table(document: dict[str, Any]) -> str:
    cpu, peers = document["cpu"], list(document["peers"])
    first = peers[0] if peers else "all"
    lines = [
        f"{document['date'][:10]}, commit {document['commit']}, {cpu['cores']} cores of {cpu['name']} "
        f"({', '.join(cpu['units'])}), {document['compiler']}; random LLaMA of shape {document['shape']}, predictor of "
        f"rank {document['predictor_rank']} in {document['predictor_type'].upper()}, {document['threads']} threads. "
        f"Tokens per second of decoding {document['gen_tokens']} tokens, medians of interleaved runs; in brackets, of "
        f"`exact` the ratio to `all` and of `predicted` that to {first}, medians of the ratios within a round; * fewer "
        "than three undisturbed runs.",
        "",
    ]
    heads = ["", "active", "`all`", "`exact`", "`predicted`", "`predicted`, trial", *peers, "MB a token, dense"]
    lines += header(*heads, "predicted", "of read bandwidth", "FFN alone, by dense: exact", "predicted")
    for entry in document["sparse"]:
        read = {name: entry["engines"].get(name, {}).get("bytes_per_token") for name in ("all", "predicted")}
        share = share_of_bandwidth(entry, "predicted")
        cells = [
            entry["type"],
            f"{100 * entry['active']:g} %",
            cell(entry, "all"),
            cell(entry, "exact", "all"),
            cell(entry, "predicted", first),
            cell(entry, "predicted-trial", first),
            *(cell(entry, peer) for peer in peers),
            *(f"{value / 1e6:.0f}" if value else "" for value in read.values()),
            f"{100 * share:.0f} %" if share else "",
            *(
                "" if value is None else f"{value:.2f}"
                for value in (ffn_ratio(entry, "exact"), ffn_ratio(entry, "predicted"))
            ),
        ]
        lines.append(row(*cells))
    return "\n".join([*lines, *crossing_lines(document), ""])


def crossing_lines(document: dict[str, Any]) -> list[str]:
    """Where sparse equals dense."""
    lines = []
    for kind in dict.fromkeys(entry["type"] for entry in document["sparse"]):
        entries = [entry for entry in document["sparse"] if entry["type"] == kind]
        for engine in ("exact", "predicted"):
            ratios = [(entry["active"], entry["ratio"].get(engine, {}).get("all")) for entry in entries]
            points = [(active, ratio["median"]) for active, ratio in ratios if ratio]
            found = crossing(points)
            if found == math.inf:
                lines.append(f"- `{engine}` in {kind} is faster than `all` up to {100 * points[-1][0]:g} % active")
            elif found is not None:
                lines.append(f"- `{engine}` in {kind} is as fast as `all` at {100 * found:.0f} % active")
    return ["", *lines] if lines else []


def activity_table(document: dict[str, Any]) -> str:
    heads = ["profile", "", "mean active", "80 % of activations: of a layer's neurons", "of all neurons"]
    heads += ["kept from token to token", "predictor: recall", "candidates"]
    lines = header(*heads)
    for name, values in document["profiles"].items():
        lines.append(row(name, "paper", *PAPER[name], *[""] * 3))
        for label, source in (("chosen", values["chosen"]), ("measured", values)):
            shares = source["hot_share_of_layer"]
            cells = [source["active_fraction"], sum(shares) / len(shares), source["hot_share_of_model"]]
            cells += [source.get(key) for key in ("overlap", "recall", "candidate_fraction")]
            lines.append(row("", label, *map(percent, cells)))
    tokens = next(iter(document["profiles"].values()))["tokens"]
    layers = len(next(iter(document["profiles"].values()))["layers"])
    note = (
        f"Models of shape {document['shape']} with {layers} layers, {tokens} random tokens; "
        f"commit {document['commit']}. The share of a layer is the mean over the layers; it is measured low where a "
        "neuron is expected less than about once in so many tokens, as in the quiet layers of opt-30b."
    )
    return "\n".join([*lines, "", note, ""])


# --- plot ------------------------------------------------------------------------------------------------------------


def draw(document: dict[str, Any]) -> None:
    """Tokens per second, bytes per token and the FFN alone against the fraction active, one column a type."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "powerinfer", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(entry["type"] for entry in document["sparse"]))
    figure, axes = pyplot.subplots(3, len(kinds), figsize=(4.6 * len(kinds), 9), squeeze=False, sharex="col")
    for column, kind in enumerate(kinds):
        entries = [entry for entry in document["sparse"] if entry["type"] == kind]
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
    figure.savefig(PLOT, metadata={"Date": None})


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
    return {
        "sparse table": speeds and speed_table(speeds),
        "activity table": activity and activity_table(activity),
    }


if __name__ == "__main__":
    write_tables(__doc__, PAGE, tables)
    if speeds := results():
        draw(speeds)
