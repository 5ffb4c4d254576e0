"""Write the tables of docs/hardware.md: machines that come with the package, and the newest result of predictions.py.

python -m benchmarks.placement.predictions_table [--check]     --check: only say whether the tables are up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.lib.cells import percent, signed
from benchmarks.lib.machine import ROOT
from benchmarks.lib.results import newest
from benchmarks.lib.tables import distinct, items, origin, paragraphs, processor, table, write_tables
from powerinfer.hardware.description import Device, load, ready_made

Case = tuple[str, str, float | None]  # model, selector, share of the neurons on a stood-in GPU


def cases(document: dict[str, Any]) -> dict[Case, list[dict[str, Any]]]:
    """The rounds of every case, without those in which other programs ran, where there are others."""
    found: dict[Case, list[dict[str, Any]]] = {}
    for one in document["rounds"]:
        for selector, result in one["selectors"].items():
            for each in result if one["stand_in"] else [result]:
                case = (one["model"], selector, each.get("share"))
                found.setdefault(case, []).append(each | {"landed": not one["commit"].endswith("+changes")})
    return {case: [one for one in rounds if one["quiet"]] or rounds for case, rounds in found.items()}


def off(rounds: list[dict[str, Any]], part: str = "") -> float:
    """Median over the rounds of predicted by measured, less 1."""
    return median(one[f"predicted_{part}ms"] / one[f"measured_{part}ms"] for one in rounds) - 1


def middle(rounds: list[dict[str, Any]], name: str) -> str:
    value = median(one[name] for one in rounds)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def count(rounds: list[dict[str, Any]]) -> str:
    """How many rounds there are: * other programs ran in all of them; + the code had not landed yet."""
    disturbed = not any(one["quiet"] for one in rounds)
    return f"{len(rounds)}" + "*" * disturbed + "+" * (not all(one["landed"] for one in rounds))


def heading(document: dict[str, Any]) -> str:
    threads, commits = document["rounds"][0]["threads"], distinct(one["commit"] for one in document["rounds"])
    return (
        f"{origin(document, commits)}, {threads} threads on {processor(document, units=True)}. Milliseconds a token, "
        "medians of the rounds; in each round the machine was measured again, and off is the median of predicted by "
        "measured. * other programs ran meanwhile; + measured before the code had landed."
    )


def compared(rounds: list[dict[str, Any]], part: str = "") -> list[str]:
    return [*(middle(rounds, f"{kind}_{part}ms") for kind in ("measured", "predicted")), signed(off(rounds, part))]


def alone_table(found: dict[Case, list[dict[str, Any]]]) -> str:
    rows = []
    for (model, selector, share), rounds in sorted(found.items(), key=lambda item: item[0][:2]):
        if share is None:
            ways = ", ".join(f"{way} {count}" for way, count in rounds[-1]["ways"].items())
            rows.append([model, f"`{selector}`", ways, count(rounds), *compared(rounds)])
    return table(["model", "selector", "layers by way", "rounds", "measured", "predicted", "off"], rows)


def stand_in_table(found: dict[Case, list[dict[str, Any]]]) -> str:
    heads = ["model", "selector", "neurons on the GPU", "of the activations", "rounds", "token: measured", "predicted"]
    heads += ["off", "the CPU's FFNs: measured", "predicted", "off"]
    rows = []
    for (model, selector, share), rounds in sorted(found.items(), key=lambda item: (*item[0][:2], item[0][2] or 0)):
        if share is not None:
            shares = [median(one[name] for one in rounds) for name in ("neurons_on_gpu", "mass_on_gpu")]
            cells = [*(percent(one, 0) for one in shares), count(rounds), *compared(rounds), *compared(rounds, "cpu_")]
            rows.append([model, f"`{selector}`", *cells])
    return table(heads, rows)


def summary(found: dict[Case, list[dict[str, Any]]]) -> Iterator[str]:
    """How many cases came how near."""
    for name, wanted in (("for the CPU alone", False), ("with a GPU stood in for", True)):
        own = {case: rounds for case, rounds in found.items() if (case[2] is not None) == wanted}
        for kind, quiet in (("undisturbed", True), ("disturbed", False)):
            offs = [abs(off(rounds)) for rounds in own.values() if any(one["quiet"] for one in rounds) == quiet]
            if offs:
                near = [sum(one <= most for one in offs) for most in (0.1, 0.2)]
                yield (
                    f"{name}, {kind}: {near[0]} of {len(offs)} predictions within 10 %, {near[1]} within 20 %, the "
                    f"worst {100 * max(offs):.0f} % off"
                )


def predictions() -> str:
    document = newest("plan")
    if document is None:
        sys.exit("no result of benchmarks/placement/predictions.py")
    found = cases(document)
    return paragraphs(heading(document), alone_table(found), stand_in_table(found), items(summary(found)))


def rates(device: Device) -> str:
    """Dense and scattered, of the types that differ."""

    def range_of(values: list[float]) -> str:
        low, high = min(values), max(values)
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"

    return f"{range_of(list(device.dense_gb_s.values()))} / {range_of(list(device.bundle_gb_s.values()))}"


def machines() -> str:
    heads = ["name", "CPU, threads", "RAM, GiB", "dense / scattered, GB/s", "GPU", "VRAM, GiB"]
    heads += ["dense / scattered, GB/s", "between them, GB/s", "4 KiB / 1 MiB reads, GB/s"]
    rows = []
    for name in ready_made():
        one = load(name)
        assert one.gpu is not None and one.disk is not None
        cells = [f"`{name}`", f"{one.cpu.name}, {one.cpu.threads}", f"{one.cpu.memory_bytes >> 30}", rates(one.cpu)]
        cells += [one.gpu.name, f"{one.gpu.memory_bytes >> 30}", rates(one.gpu), f"{one.copy_gb_s:g}"]
        rows.append([*cells, f"{one.disk.rate(4096) / 1e9:.2g} / {one.disk.rate(1 << 20) / 1e9:.2g}"])
    return table(heads, rows)


PAGES = {ROOT / "docs/hardware.md": lambda: {"machines table": machines(), "predictions table": predictions()}}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
