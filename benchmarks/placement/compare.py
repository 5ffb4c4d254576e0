"""Measure the placement solver, and compare its policies with one another and with what PowerInfer's paper reports.

    python -m benchmarks.placement.compare [solve] [policies] [paper] [--repeat 5] [--plain SECONDS]

Three parts, all of described models with assumed power laws, so nothing but this machine's solving times is measured:

  solve     the paper's integer program on the shape of OPT-175B (96 layers of 49152 neurons in groups of 64), for
            several budgets and least numbers C_l of groups; --plain also gives HiGHS the program as it stands, with a
            binary for each group, under a time limit
  policies  ilp, time, greedy and random with room on the GPU for 25, 50 and 75 % of the neurons beside all that is
            dense; most of that is more than the real cards hold, whose speed is kept
  paper     the machines of the paper with their real memory, beside the paper's own figures; steps also simulated,
            neuron by neuron (simulate.py)

Writes benchmarks/results/placement-DATE.json; table.py makes the tables of docs/benchmarks.md from it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.lib import machine, results
from benchmarks.placement.simulate import simulated
from powerinfer.hardware.description import Hardware, load
from powerinfer.neurons import Profile
from powerinfer.placement.plan import PlanRequest, make_plan
from powerinfer.placement.power_law import FAMILIES, assumed_profile
from powerinfer.placement.shapes import described_model, find_shape
from powerinfer.placement.solver import GROUP, greedy, mass_costs, solve

SHARES = (0.1, 0.25, 0.5, 0.75)
LEAST = (1, 5, 40)
MODELS = ("opt-30b", "falcon-40b", "llama-70b")
MACHINES = ("pc-high", "pc-low")

# arXiv 2312.12456, figures 10, 11 and 13: tokens a second of PowerInfer, 512 tokens generated; F16 read off the bars.
PAPER = [
    ("opt-30b", "f16", "pc-high", 16.0), ("falcon-40b", "f16", "pc-high", 13.0), ("opt-66b", "f16", "pc-high", 2.0),
    ("llama-70b", "f16", "pc-high", 2.0), ("bamboo-7b", "f16", "pc-low", 26.0), ("opt-13b", "f16", "pc-low", 13.0),
    ("llama-13b", "f16", "pc-low", 9.5), ("opt-30b", "f16", "pc-low", None), ("opt-66b", "q4_0", "pc-high", 12.0),
    ("opt-175b", "q4_0", "pc-high", 1.9), ("falcon-40b", "q4_0", "pc-high", 29.0),
    ("llama-70b", "q4_0", "pc-high", 10.0), ("opt-30b", "q4_0", "pc-low", 13.0), ("opt-66b", "q4_0", "pc-low", 5.3),
    ("falcon-40b", "q4_0", "pc-low", 16.0), ("llama-70b", "q4_0", "pc-low", 4.2),
]  # fmt: skip


def impact_of(profile: Profile) -> np.ndarray:
    """v of every group, [layers, groups]."""
    starts = np.arange(0, max(profile.sizes), GROUP)
    orders = (profile.order(layer) for layer in range(profile.n_layers))
    groups = [np.add.reduceat(counts[order], starts) for counts, order in zip(profile.counts, orders, strict=True)]
    return np.stack(groups).astype(np.float64)


def solve_times(repeat: int, plain: float) -> list[dict[str, Any]]:
    shape = find_shape("opt-175b")
    impact = impact_of(assumed_profile(shape.law, shape.config.ffn_sizes))
    found = []
    for least in LEAST:
        fewest = [least] * len(impact)
        for share in SHARES:
            room = int(share * impact.size)
            answers = [solve(mass_costs(impact, fewest), None, room, None) for _ in range(repeat)]
            taken = greedy(impact, fewest, room)
            entry = {
                "least_groups": least,
                "budget": share,
                "seconds": [one.seconds for one in answers],
                "median_s": statistics.median(one.seconds for one in answers),
                "optimal": all(one.optimal for one in answers),
                "mass": float(-answers[0].cost / impact.sum()),
                "greedy_mass": float(sum(impact[n, :k].sum() for n, k in enumerate(taken)) / impact.sum()),
                "plain": plain_program(impact, least, room, plain) if plain and (least, share) == (5, 0.25) else None,
            }
            print(entry, flush=True)
            found.append(entry)
    return found


def plain_program(impact: np.ndarray, least: int, room: int, limit: float) -> dict[str, Any]:
    """Eq. 2 under Ineq. 6 to 8, each group a binary, by HiGHS."""
    import highspy

    layers, groups = impact.shape
    n = impact.size
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = n + layers, 1 + 2 * layers
    lp.col_cost_ = np.concatenate([-impact.reshape(-1) / impact.max(), np.zeros(layers)])
    lp.col_lower_, lp.col_upper_ = np.zeros(n + layers), np.ones(n + layers)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * (n + layers)
    infinity = highspy.kHighsInf
    lp.row_lower_ = np.concatenate([[-infinity], np.full(layers, -infinity), np.zeros(layers)])
    lp.row_upper_ = np.concatenate([[room], np.zeros(layers), np.full(layers, infinity)])
    of_layer = np.repeat(np.arange(layers), groups)
    rows = np.stack([np.zeros(n, np.int64), 1 + of_layer, 1 + layers + of_layer], axis=1).reshape(-1)
    of_y = np.stack([1 + np.arange(layers), 1 + layers + np.arange(layers)], axis=1).reshape(-1)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate([3 * np.arange(n + 1), 3 * n + 2 * np.arange(1, layers + 1)])
    lp.a_matrix_.index_ = np.concatenate([rows, of_y])
    lp.a_matrix_.value_ = np.concatenate([np.ones(3 * n), np.tile([-float(groups), -float(least)], layers)])
    highs = highspy.Highs()
    for name, value in (("output_flag", False), ("mip_rel_gap", 0.0), ("time_limit", limit), ("threads", 1)):
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    begin = time.perf_counter()
    highs.run()
    proven = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    mass = float(-highs.getInfo().objective_function_value * impact.max() / impact.sum())
    found = mass if np.isfinite(mass) else None
    return {"seconds": time.perf_counter() - begin, "limit_s": limit, "proven": proven, "mass": found}


def request(name: str, dtype: str, hardware: Hardware, context: int, profiles: dict[str, Profile]) -> PlanRequest:
    shape = find_shape(name)
    if name not in profiles:
        profiles[name] = assumed_profile(shape.law, shape.config.ffn_sizes)
    model = described_model(shape.config, dtype, name, shape.predictor)
    return PlanRequest(model, profiles[name], hardware, context=context, selector="predicted", insist=True)


def policies(profiles: dict[str, Profile]) -> list[dict[str, Any]]:
    found = []
    for dtype in ("f16", "q4_0"):
        for name in MODELS:
            for where in MACHINES:
                hardware = load(where)
                large = replace(hardware.cpu, memory_bytes=1 << 42)
                for share in SHARES[1:]:
                    base = request(name, dtype, replace(hardware, cpu=large), 2048, profiles)
                    groups = round(share * base.profile.n_layers * max(base.profile.sizes) / GROUP)
                    room = base.vram_for(groups)
                    card = replace(hardware.gpu, memory_bytes=room)
                    plan = make_plan(replace(base, hardware=replace(base.hardware, gpu=card)))
                    entry = {"model": name, "dtype": dtype, "machine": where, "budget": share, "vram": room}
                    entry["policies"] = plan.document().json()["predicted"]["policies"]
                    print(entry, flush=True)
                    found.append(entry)
    return found


def paper(profiles: dict[str, Profile]) -> list[dict[str, Any]]:
    found = []
    for name, dtype, where, reported in PAPER:
        plan = make_plan(request(name, dtype, load(where), 640, profiles))
        document = plan.document().json()
        kept = ("fits", "mass_on_gpu", "work_on_gpu", "gpu_layers", "optimal", "solve_s", "bytes")
        entry = {"model": name, "dtype": dtype, "machine": where, "paper_tok_s": reported}
        entry |= {key: document[key] for key in kept} | {"tok_s": document["predicted"]["decode_tok_s"]}
        entry["simulated"] = simulated(plan)
        print(entry, flush=True)
        found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=("solve", "policies", "paper", []), help="default: all")
    parser.add_argument("--repeat", type=int, default=5, metavar="N")
    parser.add_argument("--plain", type=float, default=0.0, metavar="SECONDS")
    arguments = parser.parse_args()
    result = {"kind": "placement", **machine.description(), "families": {n: vars(law) for n, law in FAMILIES.items()}}
    profiles: dict[str, Profile] = {}
    parts = arguments.parts or ["solve", "policies", "paper"]
    if "solve" in parts:
        result["solve"] = solve_times(arguments.repeat, arguments.plain)
    if "policies" in parts:
        result["policies"] = policies(profiles)
    if "paper" in parts:
        result["paper"] = paper(profiles)
    results.write_json(results.path_of(result, f"placement-{'-'.join(parts)}"), result)


if __name__ == "__main__":
    main()
