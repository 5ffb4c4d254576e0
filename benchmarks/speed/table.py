"""Write the benchmark tables of docs/benchmarks.md, and the short one of the README, from the newest results.

python -m benchmarks.speed.table [--check]     --check: only say whether both are up to date (exit status 1: not)
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import RESULTS, header, newest, number, of_kind, of_one_machine, percent, row, write_tables

LABELS = {"prefill_tok_s": "prefill of {prompt_tokens}", "decode_tok_s": "decode of {gen_tokens}"}
MODELS = {"smollm2": "SmolLM2-135M", "r1b": "LLaMA 1.1B (random)"}


def speed() -> dict[str, Any] | None:
    """All results of this machine as one: of every model and thread count, and of the rest, the newest figures."""
    documents = of_one_machine("speed")
    if not documents:
        return None
    merged: dict[str, Any] = {}
    entries: dict[tuple[str, int], dict[str, Any]] = {}
    for document in documents:
        bandwidth = merged.get("read_bandwidth_gb_s", {}) | document["read_bandwidth_gb_s"]
        python = [*merged.get("python", ()), *document.get("python", ())]
        merged = merged | document | {"read_bandwidth_gb_s": bandwidth, "python": python}
        for entry in document["speed"]:
            entries[entry["model"], entry["threads"]] = entry | {"commit": document["commit"]}
    merged["speed"] = list(entries.values())
    merged["commit"] = ", ".join(dict.fromkeys(entry["commit"] for entry in merged["speed"]))
    return merged


def model_label(name: str) -> str:
    family, _, block_type = name.partition("-")
    return f"{MODELS.get(family, family)} {block_type}"


def cell(engine: dict[str, Any], rate: str) -> str:
    if rate not in engine:
        return "fails"
    return number(engine[rate]["median"]) + ("" if engine["kept"] >= 3 else "*")


def speed_rows(document: dict[str, Any]) -> list[str]:
    peers = list(document["peers"])
    heads = ["", "threads", OURS, *(f"{peer} | ratio" for peer in peers)]
    rows = [row(*heads), "|---|---|" + "---|" * (1 + 2 * len(peers))]
    for rate, label in LABELS.items():
        for entry in document["speed"]:
            cells = [f"{label.format_map(document)}, {model_label(entry['model'])}", str(entry["threads"])]
            cells.append(cell(entry["engines"][OURS], rate))
            for peer in peers:
                ratio = entry["ratio"][peer][rate]
                cells += [cell(entry["engines"][peer], rate), f"{ratio['median']:.2f}" if ratio else ""]
            rows.append(row(*cells))
    return rows


def start_rows(document: dict[str, Any]) -> list[str]:
    start = document.get("start")
    if not start:
        return []
    rows = [
        "",
        f"Process start to first token, {model_label(start['model'])}, 5-token prompt, {start['threads']} threads:",
        "",
        "| | seconds | peak memory, MiB |",
        "|---|---|---|",
    ]
    for label, engine in start["engines"].items():
        if "wall_s" in engine:
            rows.append(f"| {label} | {engine['wall_s']['median']:.2f} | {engine['peak_rss_mib']['median']:.0f} |")
    return rows


def derived_lines(document: dict[str, Any]) -> list[str]:
    """Thread scaling, Python's share, and how much of the memory bandwidth decoding uses."""
    lines, above = [], False
    decode = {(entry["model"], entry["threads"]): entry["engines"] for entry in document["speed"]}
    for model, threads in list(decode):
        own = decode[model, threads][OURS]
        if threads < 2 or "decode_tok_s" not in own:
            continue
        parts = []
        single = decode.get((model, 1), {}).get(OURS, {})
        if "decode_tok_s" in single:
            parts.append(f"{own['decode_tok_s']['median'] / single['decode_tok_s']['median']:.2f} times one thread")
        bandwidth = document["read_bandwidth_gb_s"].get(str(threads))
        if own.get("bytes_per_token") and bandwidth:
            rate = own["bytes_per_token"] * own["decode_tok_s"]["median"] / 1e9
            parts.append(f"{rate:.1f} GB/s of weights, {100 * rate / bandwidth:.0f} % of the memory's bandwidth")
            above |= rate > bandwidth
        shares = [one for one in document.get("python", ()) if (one["model"], one["threads"]) == (model, threads)]
        if shares:
            parts.append(f"{100 * shares[-1]['python_share']:.1f} % of a step in Python")
        if parts:
            lines.append(f"- decode of {model_label(model)} with {threads} threads: " + ", ".join(parts))
    if above:
        lines.append(
            "\nMore than 100 %: a part of the weights came from the processor's caches, which keep some of them from\n"
            "one token to the next. The bandwidth is that of reading far more than the caches hold."
        )
    return ["", *lines] if lines else []


def quality_rows(document: dict[str, Any] | None) -> list[str]:
    if not document:
        return []
    rows = [
        "",
        f"Against `transformers` in fp32 on the same dequantised weights ({document['text']}, "
        f"{document['models'][0]['scored_tokens']} scored tokens, windows of 512):",
        "",
        "| | engine | top-1 agreement | mean KL | perplexity |",
        "|---|---|---|---|---|",
    ]
    for model in document["models"]:
        name = model_label(model["model"].removesuffix(".gguf"))
        for label, values in model["engines"].items():
            if label == "reference":
                rows.append(f"| {name} | transformers | 1 | 0 | {values['perplexity']:.3f} |")
            else:
                agreement, kl = f"{values['top1_agreement']:.4f}", f"{values['mean_kl']:.2e}"
                rows.append(f"| {name} | {label} | {agreement} | {kl} | {values['perplexity']:.3f} |")
    return rows


def heading(document: dict[str, Any]) -> list[str]:
    cpu = document["cpu"]
    units = ", ".join(cpu["units"])
    return [
        f"{document['date'][:10]}, commit {document['commit']}, {cpu['cores']} cores of {cpu['name']} ({units}), "
        f"{document['compiler']}. Tokens per second, medians of {runs(document)} interleaved runs; the ratio is "
        "the median of the ratios within a round; * fewer than three undisturbed runs.",
        "",
    ]


def runs(document: dict[str, Any]) -> str:
    numbers = [entry["engines"][OURS]["runs"] for entry in document["speed"]]
    return f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else str(numbers[0])


SHORT = (
    ("prefill_tok_s", "r1b-q4_0"),
    ("prefill_tok_s", "r1b-q4_k_m"),
    ("decode_tok_s", "smollm2-q4_1"),
    ("decode_tok_s", "r1b-q4_0"),
    ("decode_tok_s", "r1b-q4_k_m"),
)
"""The rows of the README: rate and model, with most threads."""


def short_table(document: dict[str, Any]) -> str:
    """Each row beside the faster one of llama.cpp's builds."""
    rows = header("tokens per second", OURS, "llama.cpp", "ratio", numbers=True)
    most = max(entry["threads"] for entry in document["speed"])
    entries = {entry["model"].lower(): entry for entry in document["speed"] if entry["threads"] == most}
    for rate, model in SHORT:
        entry = entries[model]
        engines = entry["engines"]
        peer = max(
            (one for one in document["peers"] if rate in engines[one]), key=lambda one: engines[one][rate]["median"]
        )
        label = f"{LABELS[rate].format_map(document)} tokens, {model_label(entry['model'])}"
        ratio = entry["ratio"][peer][rate]["median"]
        rows.append(row(label, cell(engines[OURS], rate), cell(engines[peer], rate), f"{ratio:.2f}"))
    cpu = document["cpu"]
    rows += ["", f"{document['date'][:10]}, {most} threads on {cpu['cores']} cores of {cpu['name']}."]
    if other := newest("speed-beside"):
        (peer,), cpu = other["peers"], other["cpu"]
        ratios = {entry["model"].lower(): entry["ratio"][peer] for entry in other["speed"]}
        ranges = [ratios[model][rate] for rate, model in SHORT]
        shown = ", ".join(f"{one['median']:.2f} ({one['min']:.2f} to {one['max']:.2f})" for one in ranges)
        rows += [f"The ratios on {cpu['cores']} cores of {cpu['name']} ({other['date'][:10]}, medians and ranges of"]
        rows += [f"{runs(other)} rounds): {shown}."]
    return "\n".join(rows) + "\n"


def measured() -> dict[str, Any]:
    document = speed()
    if document is None:
        sys.exit(f"no speed result in {RESULTS}; run benchmarks/speed/compare.py first")
    return document


def table() -> str:
    document = measured()
    lines = heading(document) + speed_rows(document) + derived_lines(document) + start_rows(document)
    lines += quality_rows(newest("quality"))
    if other := newest("speed-beside"):
        lines += ["", "Another machine. " + heading(other)[0], "", *speed_rows(other), *derived_lines(other)]
    return "\n".join(lines) + "\n"


def experts_table() -> str | None:
    """Of models of experts: the speed of both engines, and how much of the memory bandwidth decode uses. A table for
    each machine, the newest first."""
    left, tables = of_kind("experts"), []
    while left:
        cpu = left[-1]["cpu"]
        tables.append(_experts_on([one for one in left if one["cpu"] == cpu]))
        left = [one for one in left if one["cpu"] != cpu]
    return "\n".join(tables) or None


def _experts_on(documents: list[dict[str, Any]]) -> str:
    """documents: of one machine, oldest first."""
    newest_of = {(one["model"], one["threads"]): (one, document) for document in documents for one in document["speed"]}
    (peer,) = documents[-1]["peers"]
    rows = header("model", "threads", "", OURS, peer, "ratio", "read bandwidth", "peak memory by file", numbers=True)
    for entry, document in newest_of.values():
        own, threads = entry["engines"][OURS], entry["threads"]
        peak = f"{own['peak_rss_mb'] * 2**20 / entry['file_bytes']:.2f}" if "peak_rss_mb" in own else ""
        for rate, label in LABELS.items():
            ratio = entry["ratio"][peer][rate]
            read = own["bytes_per_token"] * own[rate]["median"] / 1e9
            share = percent(read / document["read_bandwidth_gb_s"][str(threads)], 0) if "decode" in rate else ""
            cells = [entry["model"], str(threads), label.format_map(document), cell(own, rate)]
            cells += [cell(entry["engines"][peer], rate), f"{ratio['median']:.2f}" if ratio else "", share, peak]
            rows.append(row(*cells))
    return "\n".join([*heading(documents[-1]), *rows]) + "\n"


if __name__ == "__main__":
    write_tables(
        __doc__,
        {
            ROOT / "docs/experts.md": lambda: {"expert figures": experts_table()},
            ROOT / "docs/benchmarks.md": lambda: {"benchmark table": table()},
            ROOT / "README.md": lambda: {"speed table": short_table(measured())},
        },
    )
