"""Write the tables of plans in docs/benchmarks.md from the newest results of compare.py.

python -m benchmarks.placement.table [--check]     --check: only say whether the tables are up to date
"""

from __future__ import annotations

from typing import Any

from benchmarks.lib.cells import fixed, percent
from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import newest
from benchmarks.lib.tables import paragraphs, table, write_tables

NAMES = {"opt": "OPT", "falcon": "Falcon", "llama": "LLaMA", "bamboo": "Bamboo"}
MACHINES = {"pc-high": "PC-High", "pc-low": "PC-Low"}


def source(result: dict[str, Any], part: str) -> str:
    """The command that measures a part, with the options that the result was made with; machine, commit and date."""
    options = "".join(result["command"].partition(" --")[1:])
    where = f"{result['cpu']['name']}, {commit_and_date(result)}"
    return f"`python -m benchmarks.placement.compare {part}{options}`; {where}."


def commit_and_date(result: dict[str, Any]) -> str:
    return f"commit {result['commit']}, {result['date'][:10]}"


def model_name(entry: dict[str, Any]) -> str:
    family, _, size = entry["model"].partition("-")
    return f"{NAMES[family]}-{size.upper()} {entry['dtype'].upper()}"


def solve_table(result: dict[str, Any]) -> str:
    rows, notes = [], []
    for one in result["solve"]:
        times = f"{1e3 * one['median_s']:.0f} ms ({1e3 * min(one['seconds']):.0f} to {1e3 * max(one['seconds']):.0f})"
        mass = [percent(one["mass"]), percent(one["greedy_mass"])]
        room, proven = f"{100 * one['budget']:g} %", "yes" if one["optimal"] else "no"
        rows.append([str(one["least_groups"]), room, times, proven, *mass])
        if plain := one["plain"]:
            seconds, found = f"{plain['seconds']:.0f} s", "found no answer"
            if plain["mass"] is not None:
                found = f"had found {percent(plain['mass'])}"
            ended = f"after {seconds} (limit {plain['limit_s']:g} s) it {found}, and proved none"
            notes.append(
                "The program as it stands, 73,728 binaries for groups and 96 for layers, given to HiGHS with a C_l of "
                f"{one['least_groups']} groups and room for {room}: "
                + (f"it proved the same in {seconds}." if plain["proven"] else f"{ended}.")
            )
    heads = ["C_l, in groups", "room for", "solved in", "proven", "activations on the GPU", "greedy"]
    about = f"{source(result, 'solve')} Median, least and most of the repeats."
    return paragraphs(about, table(heads, rows), *notes)


def policy_table(result: dict[str, Any]) -> str:
    order = ("ilp", "time", "greedy", "random")
    rows, gains = [], []
    for one in result["policies"]:
        policies = one["policies"]
        shares = [percent(policies[name]["mass_on_gpu"]) for name in order]
        rates = [fixed(policies[name]["decode_tok_s"], 1) for name in order]
        rates[1] = f"**{rates[1]}**"
        where = [model_name(one), MACHINES[one["machine"]], f"{100 * one['budget']:g} %"]
        rows.append([*where, *shares, *rates])
        gains.append((policies["time"]["decode_tok_s"] / policies["ilp"]["decode_tok_s"], ", ".join(where)))
    solved = [each for one in result["policies"] for each in one["policies"].values()]
    proven = all(one["policies"][name]["optimal"] for one in result["policies"] for name in ("ilp", "time"))
    about = (
        f"{source(result, 'policies')} {'All' if proven else 'Not all'} answers of ilp and time are proven optimal; "
        f"the slowest took {max(each['solve_s'] for each in solved):.1f} s. The largest gain of time over ilp: "
        "{:.2f} times ({}).".format(*max(gains))
    )
    heads = ["", "machine", "room for", "activations on the GPU: ilp", "**time**", "greedy", "random"]
    return paragraphs(about, table([*heads, "predicted tokens/s: ilp", "**time**", "greedy", "random"], rows))


def paper_table(result: dict[str, Any]) -> str:
    rows = []
    for one in result["paper"]:
        made, reported = one["simulated"], one["paper_tok_s"]
        cells = [percent(one["work_on_gpu"]), percent(one["mass_on_gpu"]), str(one["gpu_layers"])]
        cells += [fixed(one["tok_s"], 1), fixed(made["tok_s"], 1), percent(made["busy"]), percent(made["both"])]
        rows.append([model_name(one), MACHINES[one["machine"]], *cells, "" if reported is None else f"{reported:g}"])
    heads = ["", "machine", "work on the GPU", "activations on the GPU", "layers with attention there"]
    heads += ["predicted tokens/s", "simulated", "a device busy", "both", "PowerInfer measured"]
    about = f"{source(result, 'paper')} Context of 640 tokens, of which 320 are in the cache."
    return paragraphs(about, table(heads, rows))


def tables() -> dict[str, str | None]:
    makers = {"solve": solve_table, "policies": policy_table, "paper": paper_table}
    results = {part: newest("placement", part) for part in makers}
    return {f"{part} table": result and makers[part](result) for part, result in results.items()}


PAGES = {ROOT / "docs/benchmarks.md": tables}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
