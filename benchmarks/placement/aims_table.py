"""Write the table of aims in docs/hybrid.md from the newest results of aims.py, and of a GPU where there are some.

python -m benchmarks.placement.aims_table [--check]     --check: only say whether the table is up to date
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.hybrid.table import of as runs_of
from benchmarks.hybrid.table import rate as rate_of
from benchmarks.hybrid.table import step_rates
from benchmarks.lib.machine import ROOT
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import newest, of_kind, percent, table, write_tables
from benchmarks.placement.table import MACHINES

PAGE = ROOT / "docs/hybrid.md"
MISSING = "missing: not measured on a GPU"
NOTHING = "nothing: {}"  # that a simulation could say

Cases = dict[tuple[str, str], dict[str, Any]]
"""By model and machine the cases of aims.py."""
Cell = Callable[[Cases, str], str]
"""What is simulated for a machine."""
Measured = Callable[[], str]
"""What was measured on a GPU, from the newest results."""
FALCON = "falcon-40b"


@dataclass(frozen=True)
class Aim:
    what: str
    least: str
    aim: str
    simulated: Cell
    measured: Measured = lambda: MISSING


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


def rates(batch: str) -> tuple[float, dict[str, float]] | None:
    """Tokens per second of Falcon-40B on a GPU: this engine, and the peer's best by the number of requests."""
    document = newest("hybrid", "peer")
    if document is None or FALCON not in document["models"]:
        return None
    engines = runs_of(document, "decode", FALCON)
    ours, peers = rate_of(engines.pop(OURS, []), batch), list(engines.values())
    best = {str(size): max(rate_of(runs, str(size)) or 0.0 for runs in peers) for size in (1, 8, 32)} if peers else {}
    return None if ours is None or not best else (ours, best)


def falcon_decode() -> str:
    found = rates("1")
    if found is None:
        return MISSING
    ours, best = found
    document = newest("hybrid", "peer")
    assert document is not None
    model, budget = document["models"][FALCON], document["jobs"][f"card/{FALCON}"]["vram"] / 2**30
    cut = f"{model['plan']['n_layers']} of {model['whole_layers']} layers"
    return f"{ours / best['1']:.1f}x: {ours:.0f} by {best['1']:.1f} tokens/s, {cut}, {budget:.1f} GiB"


def falcon_batches() -> str:
    few, many = rates("8"), rates("32")
    if few is None or many is None:
        return MISSING
    best = max(many[1].values())
    return (
        f"Falcon-40B, as above: {few[0] / few[1]['8']:.1f}x at 8, {many[0] / many[1]['32']:.1f}x at 32 "
        f"({many[0] / best:.1f}x the peer's best at any of these sizes)"
    )


def neuron_kernels() -> str:
    """One token, of the documents of gpu_kernels.py."""
    found = {
        one["type"]: one["share"]
        for document in of_kind("gpu-kernels")
        for one in document["kernels"]
        if one["kernel"] == "neurons" and one["tokens"] == 1
    }
    shown = [found.get(kind) for kind in ("F16/F16", "Q4_0/Q4_0X32")]
    return ", ".join("missing" if share is None else percent(share, 0) for share in shown) if any(shown) else MISSING


def falcon_shares() -> str:
    document = newest("hybrid", "peer")
    runs = [] if document is None else runs_of(document, "decode", FALCON).get(OURS, [])
    if not runs:
        return MISSING
    run = runs[0]
    off = run["plan"]["ms_per_token"] * run["decode_tok_s"]["1"] / 1e3 - 1
    share = percent(run["sparsity"]["1"]["gpu_share"], 0)
    return f"{share}; {percent(run['trace']['overlap'], 0)}; {100 * off:+.0f} %"


def falcon_ablation() -> str:
    document = newest("hybrid", "peer")
    steps = {} if document is None else step_rates(document, FALCON)
    return f"{', '.join(f'{value:.0f}' for value in steps.values())} tokens/s" if steps else MISSING


AIMS = [
    Aim(
        "decode, Falcon-40B shape, F16, 24 GB, by llama.cpp's best placement", "4x", "11.69x", of("falcon-40b", rate),
        falcon_decode,
    ),
    Aim("decode, ReGLU-70B shape, Q4_0, 24 GB, by the same", "2x", "4.28x", of("llama-70b", rate)),
    Aim(
        "decode, 7B dReLU shape, F16, all on the GPU, by llama.cpp", "1.4x", "1.6x, 60 % of the roofline",
        of("bamboo-7b", rate),
    ),
    Aim(
        "decode, Qwen3-30B-A3B shape, Q4_0, 8 GB and 12 GB, by the best of `-ncmoe` and `--moe-cache-mib`", "1.2x",
        "2x", not_simulated("no experts"),
    ),
    Aim("batches of 8 and 32, hybrid, by llama.cpp", "3x at 32", "4.4x", not_simulated("one request"), falcon_batches),
    Aim(
        "kernel of neurons at 10 % active, of a copy's bandwidth: F16, Q4_0", "60 %, 50 %", "80 %, 70 %",
        not_simulated("rates are assumed"), neuron_kernels,
    ),
    Aim(
        "Falcon-40B: the GPU's share of the firing neurons; overlap; plan against measured", "60 %; 70 %; 25 %",
        "70 %; 90 %; 10 %", of("falcon-40b", shares), falcon_shares,
    ),
    Aim(
        "Falcon-40B: dense split, + selectors, + overlap with random placement, + plan", "each step shown", "",
        of("falcon-40b", ablation), falcon_ablation,
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
        [one.what, one.least, one.aim, one.measured(), *(one.simulated(cases, where) for where in MACHINES)]
        for one in AIMS
    ]
    where = f"`python -m benchmarks.placement.aims`; commit {result['commit']}, {result['date'][:10]}"
    text = f"{where}. Context of {result['context']} tokens, half of them in the cache.\n\n"
    return text + table(head, body)


def tables() -> dict[str, str | None]:
    result = newest("placement-aims")
    return {"aims table": result and aims_table(result)}


if __name__ == "__main__":
    write_tables(__doc__, PAGE, tables)
