"""Write the table of docs/speculation.md from the newest results of speculation.py.

python -m benchmarks.speed.speculation_table [--check]     --check: only say whether the table is up to date
"""

from __future__ import annotations

from typing import Any

from benchmarks.lib.cells import fixed, number, percent
from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import of_one_machine
from benchmarks.lib.tables import origin, paragraphs, processor, table, write_tables

HEADS = ("model", "drafts", "tokens/s", "without", "ratio", "right", "tokens a step")


def rows(entry: dict[str, Any]) -> list[list[str]]:
    """A row for each engine but the plain one: of llama.cpp's beside its own plain decoding."""
    found = []
    for name, rate in entry["median"].items():
        if name in ("off", "llama.cpp"):
            continue
        plain = "llama.cpp" if name.startswith("llama.cpp") else "off"
        drafted, accepted = entry["drafts"].get(name, (0, 0))
        right = percent(accepted / drafted, 0) if drafted else ""
        step = fixed(entry["tokens_per_step"].get(name), 1)
        ratio = entry["ratio"][name] if plain == "off" else rate / entry["median"][plain]
        without = entry["median"][plain]
        what = f"{entry['case']}, {entry['model']}"
        found.append([what, name, number(rate), number(without), fixed(ratio), right, step])
    return found


def body(document: dict[str, Any]) -> str:
    lines = [row for entry in document["speculation"] for row in rows(entry)]
    rounds = sorted({len(entry["tok_s"]["off"]) for entry in document["speculation"]})
    number = " or ".join(map(str, rounds))
    about = f"{document['threads']} threads, {document['gen_tokens']} tokens, medians of {number} rounds"
    return paragraphs(table(HEADS, lines), f"{about}; {processor(document)}; {origin(document)}.")


def tables() -> dict[str, str | None]:
    documents = of_one_machine("speculation")
    entries = {(entry["case"], entry["model"]): entry for one in documents for entry in one["speculation"]}
    whole = documents[-1] | {"speculation": list(entries.values())} if documents else None
    return {"speculation": None if whole is None else body(whole)}


PAGES = {ROOT / "docs/speculation.md": tables}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
