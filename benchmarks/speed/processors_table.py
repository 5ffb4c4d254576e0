"""The tables of docs/benchmarks.md with the levels of instruction sets side by side, of processors.py's results."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.cells import fixed, measured, middle, number, percent
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import merged, of_kind
from benchmarks.lib.tables import distinct, items, origin, paragraphs, processor, table
from benchmarks.speed.processors import LOOP

LEVELS = {"avx2": "AVX2", "avx512": "AVX-512", "amx": "AMX"}
"""What the names of levels begin with -> the level in a table."""

KINDS = ("processors", "speed", "speed-beside", "experts")
"""Kinds of results that a level's figures come from; those of the first replace all others on that level."""

MODELS = {
    "r1b-q4_0": "1.1B Q4_0",
    "r1b-q8_0": "1.1B Q8_0",
    "r1b-q4_k_m": "1.1B Q4_K_M",
    "r1b-f16": "1.1B F16",
    "qwen3moe8-q4_0": "8 layers of Qwen3-30B-A3B, Q4_0",
    "smollm2-q4_1": "SmolLM2-135M Q4_1",
}
RATES = {"prefill_tok_s": "prefill", "decode_tok_s": "decode"}


def level_of(document: dict[str, Any]) -> str | None:
    """The level that this engine computed with, by what its runs say; None for one that no table has."""
    entries = [*document["speed"], *document.get("busy", ())]
    names = {entry["engines"][OURS].get("choices", {}).get("isa", "") for entry in entries}
    levels = {level for name in names for level in LEVELS if name.startswith(level)}
    return levels.pop() if len(levels) == 1 else None


def results_by_level() -> dict[str, list[dict[str, Any]]]:
    """The results on the machine of each level's newest one, oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        added: dict[str, list[dict[str, Any]]] = {}
        for document in of_kind(kind):
            if (level := level_of(document)) is not None:
                added.setdefault(level, []).append(document)
        for level, documents in added.items():
            if level not in found:
                found[level] = [one for one in documents if one["cpu"] == documents[-1]["cpu"]]
    return {level: found[level] for level in LEVELS if level in found}


def fastest_peer(entry: dict[str, Any], rate: str) -> str | None:
    """llama.cpp's faster build; None where all of them failed."""
    engines = entry["engines"]
    done = [peer for peer in entry["ratio"] if rate in engines[peer]]
    return max(done, key=lambda peer: middle(engines[peer][rate]) or 0.0, default=None)


def entry_cells(entry: dict[str, Any] | None, rate: str) -> list[str]:
    """Our rate, llama.cpp's and their ratio."""
    if entry is None:
        return ["", "", ""]
    peer = fastest_peer(entry, rate)
    ours = measured(entry["engines"][OURS], rate)
    if peer is None:
        return [ours, "fails", ""]
    return [ours, measured(entry["engines"][peer], rate), fixed(middle(entry["ratio"][peer][rate]))]


def quiet_table(levels: dict[str, dict[tuple[str, int], dict[str, Any]]]) -> str:
    """levels: by level its entries, by model and threads."""
    most = {level: max(threads for _, threads in entries) for level, entries in levels.items()}
    rows = []
    for rate, label in RATES.items():
        for model, name in MODELS.items():
            found = [entries.get((model, most[level])) for level, entries in levels.items()]
            rows.append([f"{label}, {name}", *(cell for entry in found for cell in entry_cells(entry, rate))])
    rows = [row for row in rows if any(row[1:])]
    heads = [cell for level in levels for cell in (LEVELS[level], "llama.cpp", "ratio")]
    return table(["tokens a second", *heads], rows, numbers=True)


def busy_table(levels: dict[str, dict[tuple[str, int, int | str], dict[str, Any]]]) -> str:
    """levels: by level its entries, by model, threads and busy processes. Shares are of the same engine without any."""
    jobs = {(model, beside) for entries in levels.values() for model, _, beside in entries}
    rows = []
    for rate, label in RATES.items():
        for model, beside in sorted(jobs, key=lambda job: (job[0], str(job[1]))):
            row = [f"{label}, {MODELS.get(model, model)}", "1, on one core" if beside == LOOP else str(beside)]
            for entries in levels.values():
                found = {key[2]: entry for key, entry in entries.items() if key[0] == model}
                row += busy_cells(rate, found.get(beside), found.get(0))
            if any(row[2:]):
                rows.append(row)
    heads = [cell for level in levels for cell in (LEVELS[level], "share", "llama.cpp", "share")]
    return table(["tokens a second", "busy processes", *heads], rows, numbers=True) if rows else ""


def busy_cells(rate: str, entry: dict[str, Any] | None, quiet: dict[str, Any] | None) -> list[str]:
    """Of both engines the rate, and its share of that on a quiet machine."""
    if entry is None or rate not in entry["engines"][OURS]:
        return ["", "", "", ""]
    row = []
    for engine in (OURS, fastest_peer(entry, rate)):
        speed = middle(entry["engines"].get(engine, {}).get(rate))
        whole = middle(quiet["engines"].get(engine, {}).get(rate)) if quiet else None
        row += [number(speed) or "fails", percent(speed / whole, 0) if speed and whole else ""]
    return row


def about(level: str, documents: list[dict[str, Any]]) -> str:
    newest = documents[-1]
    entries = [entry for document in documents for entry in (*document["speed"], *document.get("busy", ()))]
    runs = {entry["engines"][OURS]["runs"] for entry in entries}
    rounds = f"{min(runs)} to {max(runs)}" if len(runs) > 1 else str(max(runs))
    isas = distinct(entry["engines"][OURS]["choices"]["isa"].split()[0] for entry in entries)
    commits = distinct(document["commit"] for document in documents)
    return f"{LEVELS[level]}: {origin(newest, commits)}, {processor(newest)}, level {isas}, {rounds} rounds"


def processors_table() -> str | None:
    """Of every level the tables of a quiet and of a busy machine; None without results."""
    found = results_by_level()
    if not found:
        return None
    quiet: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    busy: dict[str, dict[tuple[str, int, int | str], dict[str, Any]]] = {}
    for level, documents in found.items():
        whole = merged(documents, "speed", "model", "threads")
        assert whole is not None
        if whole["speed"]:
            quiet[level] = {(one["model"].lower(), one["threads"]): one for one in whole["speed"]}
        entries = [entry for document in documents for entry in document.get("busy", ())]
        if entries:
            busy[level] = {(one["model"].lower(), one["threads"], one["beside"]): one for one in entries}
    lines = items(about(level, documents) for level, documents in found.items())
    return paragraphs(quiet_table(quiet), busy_table(busy), lines)
