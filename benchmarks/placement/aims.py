"""What the GPU path is to reach, row by row: nothing of it is measured; where it can say something, a simulation.

    python -m benchmarks.placement.aims             simulates; writes benchmarks/results/placement-aims-DATE.json
    python -m benchmarks.placement.aims_table       writes the table of docs/benchmarks.md from it

Decode steps of one request are simulated (simulate.py) for the paper's two machines, with whole models and their real
memory, as `placement.compare paper` does, with the plan's placement and with a random one of the same room.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.lib import machine, results
from benchmarks.placement.compare import MACHINES, request
from benchmarks.placement.simulate import simulated
from powerinfer.errors import RequestError
from powerinfer.hardware.description import load
from powerinfer.neurons import Profile
from powerinfer.placement.plan import PlanRequest, make_plan

MODELS = (("falcon-40b", "f16"), ("llama-70b", "q4_0"), ("bamboo-7b", "f16"))
CONTEXT = 640


def one(asked: PlanRequest) -> dict[str, Any]:
    """A plan, and its steps simulated; why not, where the machine does not hold the model or no neurons are split."""
    try:
        plan = make_plan(asked)
    except RequestError as error:
        return {"why": str(error)}
    if not plan.document().fits:
        return {"why": "does not fit"}
    predicted = plan.document().predicted.decode_tok_s
    return {"predicted_tok_s": predicted, **simulated(plan), "work_on_gpu": plan.document().work_on_gpu}


def cases() -> list[dict[str, Any]]:
    profiles: dict[str, Profile] = {}
    found = []
    for name, dtype in MODELS:
        for where in MACHINES:
            asked = request(name, dtype, load(where), CONTEXT, profiles)
            policies = {policy: one(replace(asked, policy=policy)) for policy in ("time", "random")}
            found.append({"model": name, "dtype": dtype, "machine": where, "policies": policies})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    document = {"kind": "placement-aims", **machine.description(), "context": CONTEXT, "aims": cases()}
    results.write_json(results.path_of(document), document)


if __name__ == "__main__":
    main()
