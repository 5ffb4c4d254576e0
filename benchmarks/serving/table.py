"""Write the tables of docs/serving.md from the newest results of this folder's scripts.

python -m benchmarks.serving.table [--check]
"""

from __future__ import annotations

from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import newest, number, percent, table, write_tables

PAGE = ROOT / "docs/serving.md"
RIGHT = "200"


def _origin(result: dict[str, Any]) -> str:
    where = f"{result['model']}, {result['cpu']['name']}, commit {result['commit']}, {result['date'][:10]}"
    return f"{where}: `{result['command']}`\n\n"


def load_table(result: dict[str, Any]) -> str:
    head = [
        "clients",
        "powerinfer, tokens/s",
        "llama.cpp",
        "ratio",
        "first token, ms",
        "llama.cpp",
        "between tokens, ms",
    ]
    head += ["llama.cpp"]
    body = []
    for one in result["load"]:
        own, peer = one["engines"].values()
        cells = [number(own["tok_s"]), number(peer["tok_s"]), f"{one['ratio']:.2f}"]
        cells += [number(1000 * own["first_token_s"]), number(1000 * peer["first_token_s"])]
        cells += [number(own["between_tokens_ms"]), number(peer["between_tokens_ms"])]
        body.append([str(one["clients"]), *cells])
    return _origin(result) + table(head, body, numbers=True)


def overhead_table(result: dict[str, Any]) -> str:
    first, again = result["prefix_first_token_ms"]
    body = [
        ["time to the first token, over `LLM.stream`", f"{result['added_first_token_ms']:.2f} ms more"],
        ["time from one token to the next, over `LLM.stream`", f"{result['added_between_tokens_ms']:.3f} ms more"],
        [
            "first token of a prompt that begins with 1,000 known tokens",
            f"{again:.1f} ms instead of {first:.0f} ms, {result['prefix_ratio']:.0f} times sooner",
        ],
        ["a JSON schema's mask, of a token's time", percent(result["mask"]["cost"])],
    ]
    return _origin(result) + table(["", "median"], body)


def endurance_table(runs: dict[str, dict[str, Any]]) -> str:
    """runs: of each part the result that has it; one run may have measured several."""
    body = []
    if "crowd" in runs:
        crowd = runs["crowd"]["crowd"]
        refused = sum(count for status, count in crowd["statuses"].items() if status in ("429", "503"))
        others = sum(crowd["statuses"].values()) - refused - crowd["statuses"].get(RIGHT, 0)
        memory = crowd["resident_mib"]
        answers = f"{crowd['statuses'].get(RIGHT, 0)} answers, {crowd['wrong']} wrong"
        answers += f"; {refused} refusals (429); {others} others"
        body.append([f"64 clients, a queue of 16, {crowd['seconds'] / 60:g} minutes", answers])
        body.append(["memory, after a tenth of that time and at its end", f"{memory[0]:.0f} and {memory[-1]:.0f} MiB"])
    if "leaving" in runs:
        leaving = runs["leaving"]["leaving"]
        after = leaving["after"]
        left = f"{after['running']} run, {after['waiting']} wait, {after['used_pages']} pages are held"
        body.append([f"after {leaving['clients']} clients that left at random times", left])
    if "schemas" in runs:
        schemas = runs["schemas"]["schemas"]
        verdicts = schemas["verdicts"]
        refused = sum(count for name, count in verdicts.items() if name.startswith("refused"))
        text = ", ".join(f"{verdicts.get(one, 0)} {one}" for one in ("valid", "invalid", "cut off"))
        body.append([f"answers to {schemas['schemas']} schemas", f"{text}; {refused} schemas refused (400)"])
    return "".join(dict.fromkeys(map(_origin, runs.values()))) + table(["", ""], body)


def tables() -> dict[str, str | None]:
    load, overhead = newest("serving-load"), newest("serving-overhead")
    runs = {part: run for part in ("crowd", "leaving", "schemas") if (run := newest("serving-endurance", part))}
    return {
        "load table": load and load_table(load),
        "overhead table": overhead and overhead_table(overhead),
        "endurance table": endurance_table(runs) if runs else None,
    }


if __name__ == "__main__":
    write_tables(__doc__, PAGE, tables)
