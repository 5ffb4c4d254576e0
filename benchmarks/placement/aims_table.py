"""Write the table of aims in docs/benchmarks.md from the newest results of aims.py, and of a GPU where there are some.

python -m benchmarks.placement.aims_table [--check]     --check: only say whether the table is up to date
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.hybrid.table import STEP_NAMES, shares_of, speaks, step_rates
from benchmarks.hybrid.table import of as runs_of
from benchmarks.hybrid.table import rate as rate_of
from benchmarks.lib.cells import percent, signed
from benchmarks.lib.machine import ROOT
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import newest, of_kind
from benchmarks.lib.tables import paragraphs, table, write_tables
from benchmarks.placement.table import MACHINES, commit_and_date

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


def decoded(name: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[dict[str, Any]]]] | None:
    """The newest document with decode rates of a model on a GPU: it, this engine's runs, and the peer's."""
    for document in reversed(of_kind("hybrid")):
        engines = runs_of(document, "decode", name)
        ours = engines.pop(OURS, [])
        if speaks(document) and ours:
            return document, ours, {name: runs for name, runs in engines.items() if rate_of(runs)}
    return None


def best(peers: dict[str, list[dict[str, Any]]], batch: str) -> float:
    """The peer's best rate with so many requests; 0 where it has none."""
    return max((rate_of(runs, batch) or 0.0 for runs in peers.values()), default=0.0)


def decode_of(name: str) -> Measured:
    def told() -> str:
        found = decoded(name)
        if found is None or not found[2]:
            return MISSING
        document, ours, peers = found
        model, budget = document["models"][name], document["jobs"][f"card/{name}"]["vram"] / 2**30
        cut = f"{model['plan']['n_layers']} of {model['whole_layers']} layers"
        own, peer = rate_of(ours) or 0.0, best(peers, "1")
        return f"{own / peer:.3g}x: {own:.0f} by {peer:.3g} tokens/s, {cut}, {budget:.1f} GiB"

    return told


def falcon_batches() -> str:
    found = decoded(FALCON)
    if found is None or not found[2]:
        return MISSING
    _, ours, peers = found
    said = []
    for batch in ("8", "32"):
        own, peer = rate_of(ours, batch), best(peers, batch)
        said.append(f"{own / peer:.1f}x at {batch}" if own and peer else f"{batch}: missing")
    many, most = rate_of(ours, "32"), max(best(peers, batch) for batch in ("1", "8", "32"))
    of_any = f" ({many / most:.1f}x the peer's best at any of these sizes)" if many else ""
    return f"Falcon-40B, as above: {', '.join(said)}{of_any}"


def neuron_kernels() -> str:
    """One token, a tenth of the neurons, of the documents of gpu_kernels.py: the newest of each type and shape, and of
    that the faster way."""
    shown = []
    shapes = (("F16/F16", True, 32768, "Falcon-40B"), ("Q4_0/Q4_0X32", False, 28672, "ReGLU-70B"))
    for kind, plain, d_ff, model in shapes:
        shares = [
            (max(found), document["device"].removeprefix("NVIDIA "))
            for document in of_kind("gpu-kernels")
            if (document["active"], document["plain"], document["d_ff"]) == (0.1, plain, d_ff)
            and document["device"] != "cpu"
            and (
                found := [
                    one["share"]
                    for one in document["kernels"]
                    if one["kernel"] in ("neurons", "fused") and (one["type"], one["tokens"]) == (kind, 1)
                ]
            )
        ]
        shown.append(f"{percent(shares[-1][0], 0)} ({model}, {shares[-1][1]})" if shares else "missing")
    return MISSING if set(shown) == {"missing"} else ", ".join(shown)


def experts_decode() -> str:
    """One request, of the newest document of experts.py, in cards of 8 and of 12 GiB."""
    said: list[str] = []
    for document in reversed(of_kind("hybrid-experts")):
        jobs = document["jobs"]
        for card in () if document["settings"]["gpu"] == "cpu" else ("8", "12"):
            own = jobs.get(f"experts/{card}/{OURS}", {}).get("decode_tok_s", {}).get("1")
            peers = [job for key, job in jobs.items() if key.startswith(f"experts/{card}/") and OURS not in key]
            peer = max((job.get("decode_tok_s", {}).get("1", 0.0) for job in peers), default=0.0)
            if own and peer:
                said.append(f"{card} GB: {own / peer:.2f}x, {own:.0f} by {peer:.0f} tokens/s")
        if said:
            return f"{'; '.join(said)}; {jobs['make'].get('layers', '?')} of 48 layers"
    return MISSING


def long_prompt() -> str:
    """The newest document with a prompt of a multiple of the budget, of both engines."""
    for document in reversed(of_kind("hybrid")):
        settings = document["settings"]
        if not speaks(document) or (settings.get("times"), settings.get("prompt")) != (2, 2048):
            continue
        for name, model in document["models"].items():
            engines = runs_of(document, "prefill", name)
            rates = {
                engine: [max(run["prefill_tok_s"].values()) for run in runs if run["prefill_tok_s"]]
                for engine, runs in engines.items()
            }
            own, peers = rates.pop(OURS, []), [rate for each in rates.values() for rate in each]
            if own and peers:
                cut = f"{model['plan']['n_layers']} of {model['whole_layers']} layers"
                return f"{max(own) / max(peers):.2f}x: {max(own):.0f} by {max(peers):.0f} tokens/s, {name}, {cut}"
    return MISSING


def falcon_shares() -> str:
    found = decoded(FALCON)
    if found is None:
        return MISSING
    shares = shares_of(found[1])
    told = [percent(shares.get(name), 0) for name in ("gpu_share", "overlap")]
    return "; ".join(cell or "missing" for cell in (*told, signed(shares.get("off"))))


def falcon_ablation() -> str:
    found = decoded(FALCON)
    steps = {} if found is None else step_rates(found[0], FALCON)
    if len(steps) < 2:
        return MISSING
    return "; ".join(f"{STEP_NAMES[step]}: {value:.0f}" for step, value in steps.items()) + " tokens/s"


AIMS = [
    Aim(
        "decode, Falcon-40B shape, F16, 24 GB, by llama.cpp's best placement", "4x", "11.69x", of("falcon-40b", rate),
        decode_of(FALCON),
    ),
    Aim(
        "decode, ReGLU-70B shape, Q4_0, 24 GB, by the same", "2x", "4.28x", of("llama-70b", rate),
        decode_of("reglu-70b"),
    ),
    Aim(
        "decode, 7B dReLU shape, F16, all on the GPU, by llama.cpp", "1.4x", "1.6x, 60 % of the roofline",
        of("bamboo-7b", rate), decode_of("drelu-7b"),
    ),
    Aim(
        "decode, Qwen3-30B-A3B shape, Q4_0, 8 GB and 12 GB, by the best of `-ncmoe` and `--moe-cache-mib`", "1.2x",
        "2x", not_simulated("no experts"), experts_decode,
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
        not_simulated("decode steps only"), long_prompt,
    ),
]  # fmt: skip


def aims_table(result: dict[str, Any]) -> str:
    cases: Cases = {(one["model"], one["machine"]): one for one in result["aims"]}
    heads = ["", "at least", "aim", "on a GPU", *MACHINES.values()]
    rows = [
        [one.what, one.least, one.aim, one.measured(), *(one.simulated(cases, where) for where in MACHINES)]
        for one in AIMS
    ]
    about = f"`python -m benchmarks.placement.aims`; {commit_and_date(result)}. Context of {result['context']} tokens, "
    return paragraphs(about + "half of them in the cache.", table(heads, rows))


def tables() -> dict[str, str | None]:
    result = newest("placement-aims")
    return {"aims table": result and aims_table(result)}


PAGES = {ROOT / "docs/benchmarks.md": tables}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
