"""Write the tables of docs/serving.md from the newest results of this folder's scripts.

python -m benchmarks.serving.table [--check]
"""

from __future__ import annotations

from typing import Any

from benchmarks.lib.cells import fixed, number, percent
from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import newest
from benchmarks.lib.tables import paragraphs, table, write_tables

RIGHT = "200"


def command(result: dict[str, Any]) -> str:
    cpu, commit, date = result["cpu"]["name"], result["commit"], result["date"][:10]
    return f"{result['model']}, {cpu}, commit {commit}, {date}: `{result['command']}`"


def load_table(result: dict[str, Any]) -> str:
    heads = ["clients", "powerinfer, tokens/s", "llama.cpp", "ratio", "first token, ms", "llama.cpp"]
    heads += ["between tokens, ms", "llama.cpp"]
    rows = []
    for one in result["load"]:
        engines = one["engines"].values()
        rates = [number(engine["tok_s"]) for engine in engines]
        first = [number(1000 * engine["first_token_s"]) for engine in engines]
        between = [number(engine["between_tokens_ms"]) for engine in engines]
        rows.append([str(one["clients"]), *rates, fixed(one["ratio"]), *first, *between])
    return paragraphs(command(result), table(heads, rows, numbers=True))


def overhead_table(result: dict[str, Any]) -> str:
    first, again = result["prefix_first_token_ms"]
    rows = [
        ["time to the first token, over `LLM.stream`", f"{result['added_first_token_ms']:.2f} ms more"],
        ["time from one token to the next, over `LLM.stream`", f"{result['added_between_tokens_ms']:.3f} ms more"],
        [
            "first token of a prompt that begins with 1,000 known tokens",
            f"{again:.1f} ms instead of {first:.0f} ms, {result['prefix_ratio']:.0f} times sooner",
        ],
        ["a JSON schema's mask, of a token's time", percent(result["mask"]["cost"])],
    ]
    return paragraphs(command(result), table(["", "median"], rows))


def endurance_table(runs: dict[str, dict[str, Any]]) -> str:
    """runs: of each part the result that has it; one run may have measured several."""
    rows = []
    if "crowd" in runs:
        crowd = runs["crowd"]["crowd"]
        answers = crowd["statuses"].get(RIGHT, 0)
        refused = sum(count for status, count in crowd["statuses"].items() if status in ("429", "503"))
        others = sum(crowd["statuses"].values()) - refused - answers
        text = f"{answers} answers, {crowd['wrong']} wrong; {refused} refusals (429); {others} others"
        rows.append([f"64 clients, a queue of 16, {crowd['seconds'] / 60:g} minutes", text])
        memory = f"{crowd['resident_mib'][0]:.0f} and {crowd['resident_mib'][-1]:.0f} MiB"
        rows.append(["memory, after a tenth of that time and at its end", memory])
    if "leaving" in runs:
        leaving = runs["leaving"]["leaving"]
        text = "{running} run, {waiting} wait, {used_pages} pages are held".format_map(leaving["after"])
        rows.append([f"after {leaving['clients']} clients that left at random times", text])
    if "schemas" in runs:
        schemas = runs["schemas"]["schemas"]
        verdicts = schemas["verdicts"]
        refused = sum(count for name, count in verdicts.items() if name.startswith("refused"))
        text = ", ".join(f"{verdicts.get(one, 0)} {one}" for one in ("valid", "invalid", "cut off"))
        rows.append([f"answers to {schemas['schemas']} schemas", f"{text}; {refused} schemas refused (400)"])
    return paragraphs(*dict.fromkeys(map(command, runs.values())), table(["", ""], rows))


def isolation_table(result: dict[str, Any]) -> str:
    """Of each kind of body the route beside which the stream paused longest."""
    rows = []
    for name in dict.fromkeys(one["name"] for one in result["rows"]):
        worst = max((one for one in result["rows"] if one["name"] == name), key=lambda one: one["longest_s"])
        route = f"`{worst['route']}`: {worst['status']}" if worst["route"] else "the stream alone"
        rows.append([name, fixed(worst["longest_s"]), route])
    heads = [f"{result['megabytes']:g} MB of", "longest pause of a stream, s", "beside"]
    return paragraphs(command(result), table(heads, rows))


def tables() -> dict[str, str | None]:
    load, overhead = newest("serving-load"), newest("serving-overhead")
    isolation = newest("serving-isolation")
    runs = {part: run for part in ("crowd", "leaving", "schemas") if (run := newest("serving-endurance", part))}
    return {
        "load table": load and load_table(load),
        "overhead table": overhead and overhead_table(overhead),
        "isolation table": isolation and isolation_table(isolation),
        "endurance table": endurance_table(runs) if runs else None,
    }


PAGES = {ROOT / "docs/serving.md": tables}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
