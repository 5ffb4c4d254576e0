"""Write the tables of disks in docs/benchmarks.md, and the plots, from the newest results of compare.py: of the peer,
of predictors, and of experts whose neurons are silent.

    python -m benchmarks.disk.table [--check]     --check: only say whether the tables are up to date

The plots are docs/img/disk-speed.svg, speed over RAM, and docs/img/disk-hits.svg, hits over the memory for experts by
policy; drawing them needs matplotlib, of the `bench` extra.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median
from typing import Any

from benchmarks.disk.compare import (
    DISK,
    EXACT,
    OURS,
    OURS_RAM,
    PEER,
    PEER_RAM,
    PREDICTED,
    PREDICTED_RAM,
    WHOLE,
    key_of,
)
from benchmarks.lib.cells import fixed, measured, middle, number, percent
from benchmarks.lib.machine import ROOT
from benchmarks.lib.plots import pyplot, save
from benchmarks.lib.programs import RATES, Runs, ratios
from benchmarks.lib.results import of_kind
from benchmarks.lib.tables import items, origin, paragraphs, processor, table, write_tables

IMAGES = ROOT / "docs/img"
PREFILL, DECODE = RATES
LABELS = {
    "dense": "dense, SwiGLU (Mistral-7B's layers)",
    "relu": "dReLU, 10 % of the neurons active (Bamboo-7B's layers)",
    "experts": "128 experts, 8 a token (Qwen3-30B-A3B's layers)",
}
FIGURES = ("hit_rate", "hidden", "overlap")
COUNTED = 3  # rounds from which on a median is not marked


def names(document: dict[str, Any]) -> list[str]:
    """The models that were measured."""
    return [name for name in LABELS if "file_bytes" in document["jobs"].get(f"make/{name}", {})]


def rounds_of(document: dict[str, Any], name: str, share: float | None) -> int:
    """How many rounds any engine has."""
    parts = (key.split("/") for key in document["jobs"])
    wanted = key_of("", name, share, 0).split("/")[1:3]
    return max((int(part[3]) + 1 for part in parts if part[1:3] == wanted and len(part) == 4), default=0)


def runs_of(document: dict[str, Any], engine: str, name: str, share: float | None, rounds: int = 0) -> Runs:
    """An engine's runs, at least `rounds` of them: None where one failed or is missing."""
    jobs, count = document["jobs"], max(rounds, rounds_of(document, name, share))
    found = [jobs.get(key_of(engine, name, share, n), {"error": ""}) for n in range(count)]
    errors = [one["error"] for one in found if one.get("error")]
    return Runs([None if "error" in one else one for one in found], errors[0] if errors else "")


def disk_rates(document: dict[str, Any], name: str) -> tuple[float, dict[str, float]] | None:
    """(sequential GB/s, random GB/s by the bytes of a read) of the model's file, medians of the rounds."""
    jobs = document["jobs"].items()
    found = [job for key, job in jobs if key.startswith(f"{DISK}/{name}/") and "error" not in job]
    if not found:
        return None
    random = {size: median(one["random_gb_s"][size] for one in found) for size in found[0]["random_gb_s"]}
    return median(one["sequential_gb_s"] for one in found), random


# --- what the engine says of its reads


def of_disk(runs: Runs, figure: str) -> float | None:
    """The median of a figure of the reads while it decoded; None without any."""
    of_run = {"hidden": hidden, "overlap": overlap}.get(figure, lambda one: one["disk"].get(figure))
    values = [of_run(one) for one in runs.rounds if one is not None and one.get("disk")]
    known = [value for value in values if value is not None]
    return median(known) if known else None


def hidden(run: dict[str, Any]) -> float | None:
    """Of the time in which the disk read, the share in which no step waited."""
    disk = run["disk"]
    if not disk["read_gb_s"]:
        return None
    return float(1 - disk["stall_seconds"] / (disk["bytes"] / disk["read_gb_s"] / 1e9))


def overlap(run: dict[str, Any]) -> float | None:
    """The same by how much could be: all of the reading, or, where that takes longer, as long as steps compute."""
    disk, share = run["disk"], hidden(run)
    if share is None:
        return None
    reading = disk["bytes"] / disk["read_gb_s"] / 1e9
    computing = disk["bytes"] / disk["bytes_per_token"] / run[DECODE] - disk["stall_seconds"]
    return float(share * max(1.0, reading / computing))


def share_of_sequential(document: dict[str, Any], name: str, runs: Runs) -> float | None:
    """Bytes from disk by the time of decoding, relative to what the disk gives in order."""
    rates, speed, read = disk_rates(document, name), median_of(runs, DECODE), of_disk(runs, "bytes_per_token")
    return None if rates is None or speed is None or read is None else speed * read / 1e9 / rates[0]


def median_of(runs: Runs, rate: str) -> float | None:
    values = runs.values(rate)
    return median(values) if values else None


def peak_share(runs: Runs) -> float | None:
    """The most memory that the process had, by the limit. The peak of the cgroup has the page cache of loading, too."""
    found = [(one["peak_rss_mb"], one["memory"]["limit"]) for one in runs.rounds if one is not None]
    return max((peak * (1 << 20) / limit for peak, limit in found if limit), default=None)


# --- tables


def rate_cell(value: float | None) -> str:
    return fixed(value) if value is not None and value < 10 else number(value)


def cell(runs: Runs, rate: str) -> str:
    summary = runs.summary((rate,))
    return measured(summary if rate in summary or runs.error else None, rate, rate_cell, COUNTED)


def part(runs: Runs, whole: Runs, rate: str) -> str:
    return percent(middle(ratios(runs, whole, rate)), 0)


def failures(runs: dict[str, Runs]) -> list[str]:
    return [f"{label}: {one.error}" for label, one in runs.items() if one.error]


def heading(document: dict[str, Any]) -> str:
    settings, by = document["settings"], document["limited_by"]
    limit = f"limited by a memory cgroup ({by}), no swap" if by else "without any limit: no memory cgroup was to be had"
    disks = []
    for name in names(document):
        if rates := disk_rates(document, name):
            random = ", ".join(f"{int(size) >> 10} KiB {rate:.2f}" for size, rate in rates[1].items())
            disks.append(f"{name} {rates[0]:.2f} GB/s in order, at random {random}")
    rounds = max(rounds_of(document, name, settings["share"]) for name in names(document))
    return (
        f"{origin(document)}, {settings['threads']} threads on {processor(document)}, kernel {document['kernel']}; "
        f"{limit}. Every process began with a cold page cache. Tokens per second, medians of {rounds} interleaved "
        f"runs; ratios are medians of those within a round; * fewer than {COUNTED} undisturbed runs. The disk past the "
        f"page cache: {'; '.join(disks)}."
    )


def speed_table(document: dict[str, Any]) -> str:
    settings = document["settings"]
    share = settings["share"]
    labels = {DECODE: f"decode of {settings['gen_tokens']}", PREFILL: f"prompt of {settings['prompt_tokens']}"}
    rows, failed = [], []
    for name in names(document):
        rounds = max(rounds_of(document, name, share), rounds_of(document, name, None))
        ours, theirs = (runs_of(document, engine, name, share, rounds) for engine in (OURS, PEER))
        ours_ram, theirs_ram = (runs_of(document, engine, name, None, rounds) for engine in (OURS_RAM, PEER_RAM))
        size = document["jobs"][f"make/{name}"]["file_bytes"] / 1e9
        sizes = [LABELS[name], fixed(size), fixed(share * size)]
        for rate, label in labels.items():
            cells = [cell(ours, rate), cell(ours_ram, rate), part(ours, ours_ram, rate), cell(theirs, rate)]
            ratio = fixed(middle(ratios(ours, theirs, rate)), 1)
            rows.append([*sizes, label, *cells, ratio, cell(theirs_ram, rate)])
            sizes = ["", "", ""]
        every = {OURS: ours, "llama.cpp, mmap": theirs, "all in RAM": ours_ram, "llama.cpp, all in RAM": theirs_ram}
        failed += [f"{name}, {error}" for error in failures(every)]
    heads = ["", "model, GB", "RAM, GB", "", OURS, "all in RAM", "of it", "llama.cpp, mmap", "ratio"]
    return paragraphs(heading(document), table([*heads, "llama.cpp, all in RAM"], rows, numbers=True), items(failed))


def reads_table(document: dict[str, Any]) -> str | None:
    """What decoding read; None where nothing has been measured that reads."""
    share, rows, any_reads = document["settings"]["share"], [], False
    for name in names(document):
        runs = runs_of(document, OURS, name, share)
        read, speed = of_disk(runs, "bytes_per_token"), median_of(runs, DECODE)
        any_reads |= read is not None
        plan = document["jobs"].get(f"plan/{name}/{share:g}", {}).get(DECODE)
        cells = [megabytes(read), fixed(of_disk(runs, "read_gb_s"))]
        cells.append(percent(share_of_sequential(document, name, runs), 0))
        cells += [percent(of_disk(runs, figure), 0) for figure in FIGURES]
        cells += [fixed(plan), fixed(speed / plan if plan and speed else None), percent(peak_share(runs), 0)]
        rows.append([name, *cells])
    heads = ["", "read a token, MB", "GB/s while reading", "of the disk's rate in order", "hits", "reading hidden"]
    heads += ["of what could be", "plan, tokens/s", "measured by plan", "peak memory by `--ram`"]
    return table(heads, rows, numbers=True) if any_reads else None


def megabytes(count: float | None) -> str:
    return fixed(None if count is None else count / 1e6, 0)


def neurons_table(document: dict[str, Any], peers: dict[str, Any] | None) -> str:
    """How a model with predictors decodes, by selector. peers: of this or another run, the speed of llama.cpp."""
    name, share, jobs = "relu", document["settings"]["share"], document["jobs"]
    theirs = None if peers is None else median_of(runs_of(peers, PEER, name, share), DECODE)
    rounds = max(rounds_of(document, name, share), rounds_of(document, name, None))
    rows, limited = [], {}
    for label, engine, in_ram, plan in (
        ("`auto`, which is `exact`", OURS, OURS_RAM, "plan"),
        ("`predicted`", PREDICTED, PREDICTED_RAM, "plan-predicted"),
    ):
        ours, whole = runs_of(document, engine, name, share, rounds), runs_of(document, in_ram, name, None, rounds)
        speed, reads = median_of(ours, DECODE), of_disk(ours, "joined_reads")
        cells = [cell(ours, DECODE), cell(whole, DECODE), part(ours, whole, DECODE)]
        cells.append(megabytes(of_disk(ours, "bytes_per_token")))
        cells.append(fixed(None if reads is None else reads / document["settings"]["gen_tokens"], 0))
        cells += [percent(of_disk(ours, figure), 0) for figure in FIGURES]
        cells.append(fixed(jobs.get(f"{plan}/{name}/{share:g}", {}).get(DECODE)))
        rows.append([label, *cells, fixed(speed / theirs if speed and theirs else None, 1)])
        limited[engine] = ours
    source = "llama.cpp was not measured"
    if peers is not None and theirs is not None:
        source = f"llama.cpp's {theirs:.2f} of {'this run' if peers is document else peers['date'][:10]}"
    rates = disk_rates(document, name)
    disk = f" The disk: {rates[0]:.2f} GB/s in order, 4 KiB at random {rates[1]['4096']:.2f}." if rates else ""
    about = f"{origin(document)}, {rounds} interleaved rounds, of `relu` with {share:g} of its bytes as RAM; {source}."
    heads = ["decode", "from disk", "all in RAM", "of it", "read a token, MB", "in reads", "hits", "reading hidden"]
    heads += ["of what could be", "plan, tokens/s", "by llama.cpp, mmap"]
    return paragraphs(about + disk, table(heads, rows, numbers=True), items(failures(limited)))


def silent_table(document: dict[str, Any]) -> str:
    """How a model of experts decodes most of whose neurons are silent, by what is read of those on disk."""
    name, settings = "silent", document["settings"]
    share, size = settings["share"], document["jobs"][f"make/{name}"]["file_bytes"] / 1e9
    rounds = rounds_of(document, name, share)
    labels = {OURS: "`auto`", WHOLE: "whole experts", EXACT: "`exact`", PREDICTED: "`predicted`"}
    labels[PEER] = "llama.cpp, mmap"
    runs = {engine: runs_of(document, engine, name, share, rounds) for engine in labels}
    rows = []
    for engine, label in labels.items():
        cells = []
        for rate in RATES[::-1]:
            ratio = None if engine == PEER else middle(ratios(runs[engine], runs[PEER], rate))
            cells += [cell(runs[engine], rate), fixed(ratio, 1)]
        cells += [megabytes(of_disk(runs[engine], "bytes_per_token")), percent(of_disk(runs[engine], "hit_rate"), 0)]
        peak = None if engine == PEER else peak_share(runs[engine])
        rows.append([label, *cells, percent(peak, 0)])
    rates = disk_rates(document, name)
    disk = f" The disk: {rates[0]:.2f} GB/s in order, 4 KiB at random {rates[1]['4096']:.2f}." if rates else ""
    about = f"{origin(document)}, {settings['threads']} threads on {processor(document)}; {rounds} interleaved rounds, "
    about += f"{size:.2f} GB with {share:g} of its bytes as RAM, medians; decode of {settings['gen_tokens']}, prompt "
    about += f"of {settings['prompt_tokens']}, tokens/s, and by llama.cpp's.{disk}"
    heads = ["", "decode", "ratio", "prompt", "ratio", "read a token, MB", "hits", "peak memory by `--ram`"]
    return paragraphs(about, table(heads, rows, numbers=True), items(failures(runs)))


# --- plots


def speeds(document: dict[str, Any], engine: str, name: str) -> list[tuple[float, float]]:
    """(RAM in GB, tokens per second of decoding) of every share that was measured, in its order."""
    shares = {key.split("/")[2] for key in document["jobs"] if key.startswith(f"{engine}/{name}/")} - {"all"}
    size = document["jobs"][f"make/{name}"]["file_bytes"] / 1e9
    found = ((share, median_of(runs_of(document, engine, name, share), DECODE)) for share in sorted(map(float, shares)))
    return [(share * size, speed) for share, speed in found if speed is not None]


def hits(document: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Policy -> (share of the experts in memory, share of the selections of the trace that hit), in per cent."""
    found: dict[str, list[tuple[float, float]]] = {}
    for at in document["jobs"].get("hits/experts", {}).get("at", []):
        for policy, one in at["policies"].items():
            if one["measured"] is not None:
                found.setdefault(policy, []).append((100 * at["share"], 100 * one["measured"]))
    return found


def draw(document: dict[str, Any]) -> None:
    """Both plots, as far as there is something to draw."""
    plots = pyplot()
    models = [name for name in names(document) if speeds(document, OURS, name) and speeds(document, PEER, name)]
    if models:
        figure, axes = plots.subplots(1, len(models), figsize=(3.6 * len(models), 3.2), squeeze=False)
        for axis, name in zip(axes[0], models, strict=True):
            _draw_speeds(axis, document, name)
        axes[0][0].set_ylabel("tokens a second")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize=8, frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.92))
        save(figure, IMAGES / "disk-speed.svg", bbox_inches="tight")
        plots.close(figure)
    if found := hits(document):
        figure, axis = plots.subplots(figsize=(4.6, 3.4))
        for (policy, points), marker in zip(sorted(found.items()), "sov^", strict=False):
            axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=policy)
        axis.plot([0, 100], [0, 100], linestyle=":", color="0.2", label="used alike and at random")
        axis.set(xlim=(0, 100), ylim=(0, 100), xlabel="experts in RAM, %", ylabel="selections that hit, %")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        save(figure, IMAGES / "disk-hits.svg", bbox_inches="tight")
        plots.close(figure)


def _draw_speeds(axis: Any, document: dict[str, Any], name: str) -> None:
    for engine, label, marker in ((OURS, OURS, "o"), (PEER, "llama.cpp, mmap", "s")):
        axis.plot(*zip(*speeds(document, engine, name), strict=True), marker=marker, label=label)
    for number_, (engine, label) in enumerate(((OURS_RAM, "all in RAM"), (PEER_RAM, "llama.cpp, all in RAM"))):
        if speed := median_of(runs_of(document, engine, name, None), DECODE):
            axis.axhline(speed, linestyle="--", color=f"C{number_}", label=label, linewidth=1)
    size = document["jobs"][f"make/{name}"]["file_bytes"] / 1e9
    axis.axvline(size, linestyle=":", color="0.2", label="the model's file")
    axis.set(yscale="log", xlabel="RAM, GB", title=name, xlim=(0, 1.05 * size))
    axis.grid(alpha=0.3, which="both")


def has_measured(document: dict[str, Any], engine: str, names: Collection[str]) -> bool:
    """Whether an engine was measured with all of these models, with the RAM of the tables."""
    share = document["settings"]["share"]
    return all(key_of(engine, name, share, 0) in document["jobs"] for name in names)


def latest(engine: str, names: Collection[str]) -> dict[str, Any] | None:
    """The newest result in which an engine was measured with all of these models."""
    return next((one for one in reversed(of_kind("disk")) if has_measured(one, engine, names)), None)


def tables() -> dict[str, str | None]:
    document, neurons, silent = latest(PEER, LABELS), latest(PREDICTED, ["relu"]), latest(EXACT, ["silent"])
    peers = neurons if neurons is not None and has_measured(neurons, PEER, ["relu"]) else document
    return {
        "disk speed": None if document is None else speed_table(document),
        "disk reads": None if document is None else reads_table(document),
        "disk neurons": None if neurons is None else neurons_table(neurons, peers),
        "disk silent": None if silent is None else silent_table(silent),
    }


PAGES = {ROOT / "docs/benchmarks.md": tables}

if __name__ == "__main__":
    write_tables(__doc__, PAGES, lambda: (result := latest(PEER, LABELS)) and draw(result))
