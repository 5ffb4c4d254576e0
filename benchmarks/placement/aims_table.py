"""Write the table of aims in docs/hybrid.md from the newest results of aims.py.

python -m benchmarks.placement.aims_table [--check]     --check: only say whether the table is up to date
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import newest, percent, table, write_tables
from benchmarks.placement.table import MACHINES

PAGE = ROOT / "docs/hybrid.md"
MISSING = "missing: not measured on a GPU"
NOTHING = "nothing: {}"  # that a simulation could say

Cases = dict[tuple[str, str], dict[str, Any]]
"""By model and machine the cases of aims.py."""
Cell = Callable[[Cases, str], str]
"""What is simulated for a machine."""


@dataclass(frozen=True)
class Aim:
    what: str
    least: str
    aim: str
    simulated: Cell


def not_simulated(why: str) -> Cell:
    return lambda *_: NOTHING.format(why)


def of(model: str, say: Callable[[dict[str, Any], dict[str, Any]], str]) -> Cell:
    """say: of the steps simulated with the plan's placement, and of those with a random one."""

    def cell(cases: Cases, where: str) -> str:
        policies = cases[model, where]["policies"]
        plan, random = policies["time"], policies["random"]
        return f"{plan['why']}" if "why" in plan else "simulated: " + say(plan, random)

    return cell


def rate(plan: dict[str, Any], _: dict[str, Any]) -> str:
    return f"{plan['tok_s']:.1f} tokens/s"


def shares(plan: dict[str, Any], _: dict[str, Any]) -> str:
    off = plan["predicted_tok_s"] / plan["tok_s"] - 1
    return f"{percent(plan['gpu_share'], 0)}; {percent(plan['busy'], 0)}; {100 * off:+.1f} % of the simulated"


def ablation(plan: dict[str, Any], random: dict[str, Any]) -> str:
    return f"random {random['tok_s']:.1f}, the plan {plan['tok_s']:.1f} tokens/s"


AIMS = [
    Aim("decode, Falcon-40B shape, F16, 24 GB, by llama.cpp's best placement", "4x", "11.69x", of("falcon-40b", rate)),
    Aim("decode, ReGLU-70B shape, Q4_0, 24 GB, by the same", "2x", "4.28x", of("llama-70b", rate)),
    Aim(
        "decode, 7B dReLU shape, F16, all on the GPU, by llama.cpp", "1.4x", "1.6x, 60 % of the roofline",
        of("bamboo-7b", rate),
    ),
    Aim(
        "decode, Qwen3-30B-A3B shape, Q4_0, 8 GB and 12 GB, by the best of `-ncmoe` and `--moe-cache-mib`", "1.2x",
        "2x", not_simulated("no experts"),
    ),
    Aim("batches of 8 and 32, hybrid, by llama.cpp", "3x at 32", "4.4x", not_simulated("one request")),
    Aim(
        "kernel of neurons at 10 % active, of a copy's bandwidth: F16, Q4_0", "60 %, 50 %", "80 %, 70 %",
        not_simulated("rates are assumed"),
    ),
    Aim(
        "Falcon-40B: the GPU's share of the firing neurons; overlap; plan against measured", "60 %; 70 %; 25 %",
        "70 %; 90 %; 10 %", of("falcon-40b", shares),
    ),
    Aim(
        "Falcon-40B: dense split, + selectors, + overlap with random placement, + plan", "each step shown", "",
        of("falcon-40b", ablation),
    ),
    Aim(
        "prompt of 2,048 tokens, weights twice the budget, by llama.cpp", "1x", "1.5x",
        not_simulated("decode steps only"),
    ),
]  # fmt: skip


def aims_table(result: dict[str, Any]) -> str:
    cases: Cases = {(one["model"], one["machine"]): one for one in result["aims"]}
    head = ["", "at least", "aim", "on a GPU", *MACHINES.values()]
    body = [
        [one.what, one.least, one.aim, MISSING, *(one.simulated(cases, where) for where in MACHINES)] for one in AIMS
    ]
    where = f"`python -m benchmarks.placement.aims`; commit {result['commit']}, {result['date'][:10]}"
    text = f"{where}. Context of {result['context']} tokens, half of them in the cache.\n\n"
    return text + table(head, body)


def tables() -> dict[str, str | None]:
    result = newest("placement-aims")
    return {"aims table": result and aims_table(result)}


if __name__ == "__main__":
    write_tables(__doc__, PAGE, tables)
