"""Write the benchmark tables of docs/benchmarks.md, and the short one of the README.

python -m benchmarks.speed.table [--check]     --check: only say whether all are up to date (exit status 1: not)
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.lib.cells import fixed, measured, middle, percent
from benchmarks.lib.machine import ROOT
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import RESULTS, merged, newest, of_kind, of_one_machine
from benchmarks.lib.tables import items, origin, paragraphs, processor, table, write_tables
from benchmarks.speed.processors_table import processors_table

LABELS = {"prefill_tok_s": "prefill of {prompt_tokens}", "decode_tok_s": "decode of {gen_tokens}"}
MODELS = {"smollm2": "SmolLM2-135M", "r1b": "LLaMA 1.1B (random)"}
SHORT = (
    ("prefill_tok_s", "r1b-q4_0"),
    ("prefill_tok_s", "r1b-q4_k_m"),
    ("decode_tok_s", "smollm2-q4_1"),
    ("decode_tok_s", "r1b-q4_0"),
    ("decode_tok_s", "r1b-q4_k_m"),
)
"""The rows of the README: rate and model, with most threads."""


def speed(kind: str = "speed") -> dict[str, Any] | None:
    """All results of the newest one's machine as one: of every model and thread count the newest figures."""
    documents = of_one_machine(kind)
    document = merged(documents, "speed", "model", "threads")
    return document and document | {"python": [one for each in documents for one in each.get("python", ())]}


def model_label(name: str) -> str:
    family, _, block_type = name.partition("-")
    return f"{MODELS.get(family, family)} {block_type}"


def speed_table(document: dict[str, Any]) -> str:
    peers = list(document["peers"])
    rows = []
    for rate, label in LABELS.items():
        for entry in document["speed"]:
            engines = entry["engines"]
            cells = [f"{label.format_map(document)}, {model_label(entry['model'])}", str(entry["threads"])]
            cells.append(measured(engines[OURS], rate))
            for peer in peers:
                cells += [measured(engines[peer], rate), fixed(middle(entry["ratio"][peer][rate]))]
            rows.append(cells)
    return table(["", "threads", OURS, *(head for peer in peers for head in (peer, "ratio"))], rows)


def start_table(document: dict[str, Any]) -> str:
    start = document.get("start")
    if not start:
        return ""
    engines = {label: one for label, one in start["engines"].items() if "wall_s" in one}
    rows = [
        [label, fixed(middle(one["wall_s"])), fixed(middle(one["peak_rss_mib"]), 0)] for label, one in engines.items()
    ]
    about = f"Process start to first token, {model_label(start['model'])}, 5-token prompt, {start['threads']} threads:"
    return paragraphs(about, table(["", "seconds", "peak memory, MiB"], rows))


def derived_lines(document: dict[str, Any]) -> str:
    """Thread scaling, Python's share, and how much of the memory bandwidth decoding uses."""
    lines, above = [], False
    singles = {entry["model"]: entry["engines"][OURS] for entry in document["speed"] if entry["threads"] == 1}
    shares = {(one["model"], one["threads"]): one["python_share"] for one in document["python"]}
    for entry in document["speed"]:
        model, threads, own = entry["model"], entry["threads"], entry["engines"][OURS]
        if threads < 2 or "decode_tok_s" not in own:
            continue
        parts = []
        if single := middle(singles.get(model, {}).get("decode_tok_s")):
            parts.append(f"{own['decode_tok_s']['median'] / single:.2f} times one thread")
        if own.get("bytes_per_token") and entry["bandwidth"]:
            read = own["bytes_per_token"] * own["decode_tok_s"]["median"] / 1e9
            parts.append(
                f"{read:.1f} GB/s of weights, {percent(read / entry['bandwidth'], 0)} of the memory's bandwidth"
            )
            above |= read > entry["bandwidth"]
        if (model, threads) in shares:
            parts.append(f"{percent(shares[model, threads])} of a step in Python")
        if parts:
            lines.append(f"decode of {model_label(model)} with {threads} threads: " + ", ".join(parts))
    note = (
        "More than 100 %: a part of the weights came from the processor's caches, which keep some of them from\n"
        "one token to the next. The bandwidth is that of reading far more than the caches hold."
    )
    return paragraphs(items(lines), note if above else "") if lines else ""


def quality_table(document: dict[str, Any] | None) -> str:
    if not document:
        return ""
    rows = []
    for model in document["models"]:
        name = model_label(model["model"].removesuffix(".gguf"))
        for label, values in model["engines"].items():
            figures = ["transformers", "1", "0"]
            if label != "reference":
                figures = [label, fixed(values["top1_agreement"], 4), f"{values['mean_kl']:.2e}"]
            rows.append([name, *figures, fixed(values["perplexity"], 3)])
    about = (
        f"Against `transformers` in fp32 on the same dequantised weights ({document['text']}, "
        f"{document['models'][0]['scored_tokens']} scored tokens, windows of 512):"
    )
    return paragraphs(about, table(["", "engine", "top-1 agreement", "mean KL", "perplexity"], rows))


def heading(document: dict[str, Any]) -> str:
    return (
        f"{origin(document)}, {processor(document, units=True)}, {document['compiler']}. Tokens per second, medians of "
        f"{runs(document)} interleaved runs; the ratio is the median of the ratios within a round; * fewer than three "
        "undisturbed runs."
    )


def runs(document: dict[str, Any]) -> str:
    numbers = [entry["engines"][OURS]["runs"] for entry in document["speed"]]
    return f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else str(numbers[0])


def short_table(document: dict[str, Any]) -> str:
    """Each row beside the faster one of llama.cpp's builds, and beside it the row's ratio on another machine."""
    most = max(entry["threads"] for entry in document["speed"])
    entries = {entry["model"].lower(): entry for entry in document["speed"] if entry["threads"] == most}
    heads = ["tokens per second", OURS, "llama.cpp", "ratio"]
    rows = []
    for rate, model in SHORT:
        entry = entries[model]
        engines = entry["engines"]
        peer = max(
            (one for one in document["peers"] if rate in engines[one]), key=lambda one: middle(engines[one][rate])
        )
        label = f"{LABELS[rate].format_map(document)} tokens, {model_label(entry['model'])}"
        ratio = fixed(middle(entry["ratio"][peer][rate]))
        rows.append([label, measured(engines[OURS], rate), measured(engines[peer], rate), ratio])
    about = f"{document['date'][:10]}, {most} threads on {processor(document)}"
    if other := newest("speed-beside"):
        (peer,) = other["peers"]
        ratios = {entry["model"].lower(): entry["ratio"][peer] for entry in other["speed"]}
        heads.append("ratio on AMD")
        for row, (rate, model) in zip(rows, SHORT, strict=True):
            row.append("{median:.2f} ({min:.2f} to {max:.2f})".format_map(ratios[model][rate]))
        about += f"; ratio on AMD: {processor(other)}, {other['date'][:10]}, median and\nrange of {runs(other)} rounds"
    return paragraphs(table(heads, rows, numbers=True), about + ".")


def newest_speed() -> dict[str, Any]:
    return speed() or sys.exit(f"no speed result in {RESULTS}; run benchmarks/speed/compare.py first")


def benchmark_table() -> str:
    document = newest_speed()
    parts = [heading(document), speed_table(document), derived_lines(document), start_table(document)]
    parts.append(quality_table(newest("quality")))
    if other := speed("speed-beside"):
        parts += ["Another machine. " + heading(other), speed_table(other), derived_lines(other)]
    return paragraphs(*parts)


def bandwidth_table(kind: str) -> str | None:
    """Of results of a kind, say models of experts: the speed of both engines, and how much of the memory bandwidth
    decode uses. A table for each machine, the newest first."""
    left, tables = of_kind(kind), []
    while left:
        cpu = left[-1]["cpu"]
        tables.append(_bandwidths_on([one for one in left if one["cpu"] == cpu]))
        left = [one for one in left if one["cpu"] != cpu]
    return "\n".join(tables) or None


def _bandwidths_on(documents: list[dict[str, Any]]) -> str:
    """documents: of one machine, oldest first."""
    document = merged(documents, "speed", "model", "threads")
    assert document is not None
    (peer,) = document["peers"]
    rows = []
    for entry in document["speed"]:
        own = entry["engines"][OURS]
        peak = own["peak_rss_mb"] * 2**20 / entry["file_bytes"] if "peak_rss_mb" in own else None
        for rate, label in LABELS.items():
            read = own["bytes_per_token"] * own[rate]["median"] / 1e9
            share = read / entry["bandwidth"] if "decode" in rate else None
            cells = [entry["model"], str(entry["threads"]), label.format_map(entry), measured(own, rate)]
            cells += [measured(entry["engines"][peer], rate), fixed(middle(entry["ratio"][peer][rate]))]
            rows.append([*cells, percent(share, 0), fixed(peak)])
    heads = ["model", "threads", "", OURS, peer, "ratio", "read bandwidth", "peak memory by file"]
    return paragraphs(heading(documents[-1]), table(heads, rows, numbers=True))


PAGES = {
    ROOT / "docs/benchmarks.md": lambda: {
        "benchmark table": benchmark_table(),
        "expert figures": bandwidth_table("experts"),
        "few bits table": bandwidth_table("few-bits"),
        "new families table": bandwidth_table("families"),
        "processors table": processors_table(),
    },
    ROOT / "README.md": lambda: {"speed table": short_table(newest_speed())},
}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
