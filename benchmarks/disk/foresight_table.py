"""Write the tables of docs/disk.md from the newest result of foresight.py.

python -m benchmarks.disk.foresight_table [--check]     --check: only say whether they are up to date
"""

from __future__ import annotations

from typing import Any

from benchmarks.lib.cells import fixed, number, percent
from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import newest
from benchmarks.lib.tables import table, write_tables

NAMES = {
    "last": "the last computed token's experts",
    "frequent": "the most frequent ones (`lfu`)",
    "state": "a linear map of the state before the token",
    "embedding": "routers of the token's embedding",
    "token": "what the token selected most often in other text",
    "fitted": "a linear map of state and embedding",
    "draft": "routers of the draft head's state",
    "fitted_draft": "a linear map of all three",
    "router2": "within the step: router, two layers before",
    "router": "the same, a layer before (the engine's)",
    "before": "the same, before its own attention",
    "half": "a guess of which 50 % is right",
    "likely": "a guess of which 75 % is right",
    "needed": "all that is needed, as nothing can know",
}


def mean(recall: list[float | None]) -> float | None:
    known = [one for one in recall if one is not None]
    return sum(known) / len(known) if known else None


def recall_rows(judged: list[dict[str, Any]]) -> list[list[str]]:
    by_stream = {(one["stream"], one["name"]): one for one in judged}
    rows = []
    for name in NAMES:
        if ("text", name) not in by_stream:
            continue
        cells = [NAMES[name]]
        for stream in ("text", "drafted"):
            one = by_stream[stream, name]
            cells += [percent(mean(one["recall"]), 0), percent(one["recall"][0], 0), percent(one["recall"][-1], 0)]
            cells += [percent(one["reads"], 0) if one["absent"] >= 0.005 else ""]
        rows.append(cells)
    return rows


SETTING = ("disk", "share")
WAY = ("within", "own", "ahead", "depth", "idle", "drafts", "right")


def gain_rows(simulated: list[dict[str, Any]], layers: int) -> list[list[str]]:
    """A row for each way, a column for each setting: gains over the same step that reads nothing before it."""
    settings = list(dict.fromkeys(tuple(one[key] for key in SETTING) for one in simulated))

    def key(one: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(one[name] for name in WAY)

    by_way: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for one in simulated:
        by_way.setdefault(key(one), {})[tuple(one[name] for name in SETTING)] = one
    plain = by_way[True, False, "", 0, False, False, 0.0]
    rows = []
    for found in by_way.values():
        way = found[settings[0]]
        step = by_way[True, False, "", 0, False, way["drafts"], way["right"]]
        cells = [step_of(way), what(way, layers)]
        for setting in settings:
            mine, base = found[setting]["seconds"], step[setting]["seconds"]
            if found is not step:
                cells.append(f"{100 * (base / mine - 1):+.1f} %")
            elif way["drafts"]:
                cells.append(f"{fixed(plain[setting]['seconds'] / mine)}x")
            else:
                cells.append(f"{number(1e3 * mine)} ms")
        rows.append(cells)
    return rows


def step_of(way: dict[str, Any]) -> str:
    return f"a draft, {percent(way['accepted'], 0)} right" if way["drafts"] else "no draft"


def what(way: dict[str, Any], layers: int) -> str:
    """What a step reads ahead."""
    if way["own"]:
        return "and by each layer's own router, before its attention"
    if not way["ahead"]:
        return "by the next layer's router (the engine's)" if way["within"] else "nothing"
    of_layers = "all layers" if way["depth"] == layers else "the first layer"
    return f"and {NAMES[way['ahead']]}: {of_layers}{', while the disk is idle' if way['idle'] else ''}"


def gains(document: dict[str, Any]) -> str:
    simulated = document["simulated"]
    settings = list(dict.fromkeys((one["disk"], one["share"]) for one in simulated))
    columns = [f"{disk}, {percent(share, 0)} in RAM" for disk, share in settings]
    return table(["a step", "read ahead", *columns], gain_rows(simulated, document["costs"]["layers"]))


def tables() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(("foresight recall", "foresight gain", "foresight routes"))
    first = ["known before", "recall", "first layer", "last layer", "reads right"]
    heads = [*first, "its draft: recall", "first layer", "last layer", "reads right"]
    if document := newest("foresight"):
        recall = table(heads, recall_rows(document["recall"]), numbers=True)
        found |= {"foresight recall": recall, "foresight gain": gains(document)}
    if document := newest("foresight-routes"):
        found["foresight routes"] = gains(document)
    return found


PAGES = {ROOT / "docs/disk.md": tables}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
