"""Results as JSON files in benchmarks/results/."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.tables import distinct

RESULTS = ROOT / "benchmarks/results"


def write_json(path: Path, document: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(data)
    os.replace(beside, path)
    print(path, file=sys.stderr)


def path_of(document: dict[str, Any], name: str | None = None) -> Path:
    """Where a result is written by default: its name, or else its kind, and its date."""
    return RESULTS / f"{name or document['kind']}-{document['date'][:16].replace(':', '')}.json"


def of_kind(kind: str) -> list[dict[str, Any]]:
    """All results of a kind, oldest first by the date inside them."""
    documents = (json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json")))
    return sorted((one for one in documents if one.get("kind") == kind), key=lambda document: document["date"])


def newest(kind: str, part: str | None = None) -> dict[str, Any] | None:
    """The latest result of a kind, of those that have a part where one is given."""
    return next((one for one in reversed(of_kind(kind)) if part is None or part in one), None)


def of_one_machine(kind: str) -> list[dict[str, Any]]:
    """The results of a kind that were measured on the newest one's processor, oldest first."""
    documents = of_kind(kind)
    return [one for one in documents if one["cpu"] == documents[-1]["cpu"]]


def merged(documents: list[dict[str, Any]], part: str, *key: str) -> dict[str, Any] | None:
    """Results as one: of every entry of a part the newest, with all that its document says and memory's `bandwidth`.

    documents: oldest first. key: the fields that tell entries apart. None without documents.
    """
    entries = {}
    for document in documents:
        for entry in document[part]:
            known = document | entry
            known["bandwidth"] = document["read_bandwidth_gb_s"].get(str(known["threads"]))
            entries[tuple(known[name] for name in key)] = known
    whole = {name: value for document in documents for name, value in document.items()}
    found = list(entries.values())
    return whole | {part: found, "commit": distinct(entry["commit"] for entry in found)} if documents else None
