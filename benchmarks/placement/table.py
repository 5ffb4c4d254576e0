"""Write the tables of docs/plan.md from the newest results of compare.py.

python -m benchmarks.placement.table [--check]     --check: only say whether the tables are up to date
"""

from __future__ import annotations

from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import newest, percent, table, write_tables

PAGE = ROOT / "docs/plan.md"
NAMES = {"opt": "OPT", "falcon": "Falcon", "llama": "LLaMA", "bamboo": "Bamboo"}
MACHINES = {"pc-high": "PC-High", "pc-low": "PC-Low"}


def origin(result: dict[str, Any], part: str, more: str) -> str:
    """The command that measures a part, with the options that the result was made with; machine, commit and date."""
    options = "".join(result["command"].partition(" --")[1:])
    where = f"{result['cpu']['name']}, commit {result['commit']}, {result['date'][:10]}"
    return f"`python -m benchmarks.placement.compare {part}{options}`; {where}. {more}\n\n"


def model_name(entry: dict[str, Any]) -> str:
    family, _, size = entry["model"].partition("-")
    return f"{NAMES[family]}-{size.upper()} {entry['dtype'].upper()}"


def solve_table(result: dict[str, Any]) -> str:
    head = ["C_l, in groups", "room for", "solved in", "proven", "activations on the GPU", "greedy"]
    body = []
    for one in result["solve"]:
        times = f"{1e3 * one['median_s']:.0f} ms ({1e3 * min(one['seconds']):.0f} to {1e3 * max(one['seconds']):.0f})"
        mass = [percent(one["mass"]), percent(one["greedy_mass"])]
        proven = "yes" if one["optimal"] else "no"
        body.append([str(one["least_groups"]), f"{100 * one['budget']:g} %", times, proven, *mass])
    text = origin(result, "solve", "Median, least and most of the repeats.") + table(head, body)
    for one in result["solve"]:
        plain = one["plain"]
        if plain:
            proven = f"it proved the same in {plain['seconds']:.0f} s"
            answer = "found no answer" if plain["mass"] is None else f"had found {percent(plain['mass'])}"
            ended = f"after {plain['seconds']:.0f} s (limit {plain['limit_s']:g} s) it {answer}, and proved none"
            text += (
                "\nThe program as it stands, 73,728 binaries for groups and 96 for layers, given to HiGHS with a C_l "
                f"of {one['least_groups']} groups and room for {100 * one['budget']:g} %: "
                f"{proven if plain['proven'] else ended}.\n"
            )
    return text


def policy_table(result: dict[str, Any]) -> str:
    order = ("ilp", "time", "greedy", "random")
    head = ["", "machine", "room for", "activations on the GPU: ilp", "**time**", "greedy", "random"]
    head += ["predicted tokens/s: ilp", "**time**", "greedy", "random"]
    body = []
    for one in result["policies"]:
        found = [one["policies"][name] for name in order]
        shares = [percent(each["mass_on_gpu"]) for each in found]
        rates = [f"{each['decode_tok_s']:.1f}" for each in found]
        rates[1] = f"**{rates[1]}**"
        body.append([model_name(one), MACHINES[one["machine"]], f"{100 * one['budget']:g} %", *shares, *rates])
    slowest = max(each["solve_s"] for one in result["policies"] for each in one["policies"].values())
    proven = all(one["policies"][name]["optimal"] for one in result["policies"] for name in ("ilp", "time"))
    best = max(
        (one["policies"]["time"]["decode_tok_s"] / one["policies"]["ilp"]["decode_tok_s"], model_name(one), one)
        for one in result["policies"]
    )
    more = (
        f"{'All' if proven else 'Not all'} answers of ilp and time are proven optimal; the slowest took {slowest:.1f} "
        f"s. The largest gain of time over ilp: {best[0]:.2f} times ({best[1]}, {MACHINES[best[2]['machine']]}, "
        f"{100 * best[2]['budget']:g} %)."
    )
    return origin(result, "policies", more) + table(head, body)


def paper_table(result: dict[str, Any]) -> str:
    head = ["", "machine", "work on the GPU", "activations on the GPU", "layers with attention there"]
    head += ["predicted tokens/s", "simulated", "a device busy", "both", "PowerInfer measured"]
    body = []
    for one in result["paper"]:
        reported = "" if one["paper_tok_s"] is None else f"{one['paper_tok_s']:g}"
        shares = [percent(one["work_on_gpu"]), percent(one["mass_on_gpu"])]
        made = one["simulated"]
        rates = [
            f"{one['tok_s']:.1f}",
            f"{made['tok_s']:.1f}",
            percent(made["busy"]),
            percent(made["both"]),
            reported,
        ]
        body.append([model_name(one), MACHINES[one["machine"]], *shares, str(one["gpu_layers"]), *rates])
    return origin(result, "paper", "Context of 640 tokens, of which 320 are in the cache.") + table(head, body)


def tables() -> dict[str, str | None]:
    makers = {"solve": solve_table, "policies": policy_table, "paper": paper_table}
    results = {part: newest("placement", part) for part in makers}
    return {f"{part} table": result and makers[part](result) for part, result in results.items()}


if __name__ == "__main__":
    write_tables(__doc__, PAGE, tables)
