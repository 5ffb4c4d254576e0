"""Print what the call `short` of visit.py measured, against what the GPU path is to reach.

    python -m benchmarks.hybrid.short_table DIR         DIR: where that call wrote its results

A ratio is this engine's rate by the best of llama.cpp's ways (and, of prompts, of its -ub) within the same budget, both
as measured in this call, of one run each. VRAM is what either had in use at its peak; where this engine's exceeds the
budget, the row says so. Rows whose figures are missing say so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hybrid.table import gib, rate
from benchmarks.hybrid.table import of as runs_of
from benchmarks.lib.cells import number
from benchmarks.lib.programs import OURS
from benchmarks.lib.tables import items, paragraphs, processor, table

MISSING = "not measured"
LONG, SHORT = "2048", "512"  # tokens of prompts
Document = dict[str, Any]


class Found(NamedTuple):
    """Tokens a second, 0: not known; bytes of VRAM that were in use, and that were allowed."""

    rate: float = 0.0
    used: int | None = None
    budget: int | None = None


class Row(NamedTuple):
    """What is to be reached: ratios of two rates, in tokens a second, 0: not known; `most`: the aim is at most that, of
    one figure; `vram`: in words."""

    what: str
    least: float
    aim: float
    own: float
    peer: float
    most: bool = False
    vram: str = ""

    @property
    def reached(self) -> float:
        return self.own if self.most else self.own / self.peer if self.peer else 0.0

    def cells(self) -> list[str]:
        unit = " ms" if self.most else "x"
        limits = [f"{one:g}{unit}" for one in (self.least, self.aim)]
        if not self.reached:
            known = f"{number(self.own)} tokens/s, the other {MISSING}" if self.own else MISSING
            return [self.what, *limits, known, "", self.vram]
        good = [self.reached <= one if self.most else self.reached >= one for one in (self.least, self.aim)]
        verdict = "the aim" if good[1] else "at least" if good[0] else "no"
        told = f"{self.reached:.2f}{unit}"
        if not self.most:
            told += f": {number(self.own)} by {number(self.peer)} tokens/s"
        return [self.what, *limits, told, verdict, self.vram]


def loaded(folder: Path, name: str) -> Document:
    path = folder / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"jobs": {}}


def jobs_of(document: Document, *begins: str) -> list[Document]:
    """The jobs that succeeded, whose keys begin so."""
    key = "/".join(begins)
    return [job for name, job in document["jobs"].items() if name.startswith(key) and "error" not in job]


def compared(what: str, least: float, aim: float, own: Found, peer: Found) -> Row:
    over = own.used is not None and own.budget is not None and own.used > own.budget
    told = f"{gib(own.used)}{f', over the budget of {gib(own.budget)}' if over else ''}; {gib(peer.used)}"
    return Row(what, least, aim, own.rate, peer.rate, vram=told if own.used or peer.used else "")


def found_in(job: Document, rate: float | None) -> Found:
    return Found(rate or 0.0, job.get("vram_used"), job.get("vram"))


def decode(document: Document, *begins: str) -> Found:
    """The fastest."""
    jobs = jobs_of(document, *begins)
    return max((found_in(job, job["decode_tok_s"]["1"]) for job in jobs), key=lambda one: one.rate, default=Found())


def prompt(document: Document, tokens: str, *begins: str) -> Found:
    """The best rate of a prompt, with whatever -ub."""
    rates = [
        found_in(job, value)
        for job in jobs_of(document, *begins)
        for name, value in job["prompt_tok_s"].items()
        if name.split(",")[0] == tokens
    ]
    return max(rates, key=lambda one: one.rate, default=Found())


def fixed_cost(document: Document, name: str) -> float:
    """Milliseconds in which a GPU that has the whole model waits for the host between two steps; 0: unknown."""
    runs = runs_of(document, "decode", name).get(OURS, [])
    return next((float(run["step"]["idle_ms"]) for run in runs if "idle_ms" in run.get("step", {})), 0.0)


def rows(folder: Path) -> Iterator[Row]:
    whole, local, dense = (loaded(folder, name) for name in ("whole", "local", "dense"))
    for card in ("8", "12"):
        rates = decode(whole, "ours", card, "static", "auto"), decode(whole, "theirs", f"{card}/")
        yield compared(f"Qwen3-30B-A3B, Q4_0, whole, {card} GB: decode", 1.5, 2.5, *rates)
    for card in ("8", "12"):
        rates = decode(local, "ours", card, "auto", "auto"), decode(local, "theirs", f"{card}/")
        yield compared(f"the same with locality, policy auto, {card} GB: decode", 2, 3, *rates)
    for tokens, least, aim in ((SHORT, 1, 2), (LONG, 1.5, 3)):
        for card in ("8", "12"):
            rates = prompt(whole, tokens, "ours", card, "static", "auto"), prompt(whole, tokens, "theirs", f"{card}/")
            yield compared(f"the same, {card} GB: prompt of {int(tokens):,}", least, aim, *rates)
    rates = prompt(dense, LONG, "ours"), prompt(dense, LONG, "theirs")
    layers = dense.get("settings", {}).get("layers")
    size = f", {layers} of 80 layers" if layers else ""
    yield compared(f"dense 70B shape{size}, Q4_0, weights twice the budget: prompt of 2,048", 1.2, 2, *rates)
    drelu = loaded(folder, "drelu-7b-1")
    engines = runs_of(drelu, "decode", "drelu-7b")
    best = lambda runs: found_in(runs[0], rate(runs)) if runs else Found()  # noqa: E731
    own, peer = best(engines.pop(OURS, [])), max(map(best, engines.values()), key=lambda one: one.rate, default=Found())
    yield compared("7B dReLU, F16, whole: decode", 1.5, 2.2, own, peer)
    yield Row("one request's fixed host cost (7B dReLU)", 0.2, 0.1, fixed_cost(drelu, "drelu-7b"), 0.0, True)


def beside(folder: Path) -> Iterator[str]:
    """What else was measured."""
    exchange = loaded(folder, "exchange")
    if "layer_us" in exchange:
        told = ", ".join(f"{name} {us:.1f}" for name, us in exchange["layer_us"].items())
        yield f"an exchange adds to a layer, us: {told}"
    if "kernel_us" in exchange:
        told = ", ".join(f"{name} {us:.2f}" for name, us in exchange["kernel_us"].items())
        yield f"a kernel that does nothing, us: {told}"
    for name in ("whole", "local", "dense", "experts"):
        for key, job in loaded(folder, name)["jobs"].items():
            if "error" in job:
                yield f"{name}, {key} failed: {job['error']}"
                continue
            rates = [f"decode {number(job['decode_tok_s']['1'])}"] if job.get("decode_tok_s") else []
            rates += [f"prompt of {size} {number(one)}" for size, one in job.get("prompt_tok_s", {}).items()]
            rates += [f"{part} {value:.3f}" for part, value in job.get("step", {}).items() if part.endswith("_ms")]
            if rates:
                yield f"{name}, {key}: {', '.join(rates)}"
    reglu = runs_of(loaded(folder, "reglu-70b-0.1"), "decode", "reglu-70b").get(OURS, [])
    if own := rate(reglu):
        yield f"ReGLU-70B, 8 of 80 layers, Q4_0: decode {number(own)} tokens/s"
    for key, step in (loaded(folder, "visit") | {"jobs": None}).items():
        if step is not None and step.get("rc") != 0:
            yield f"{key}: {step.get('why') or 'status ' + str(step.get('rc'))}"


def report(folder: Path) -> str:
    whole = loaded(folder, "whole")
    text = (
        f"{whole['settings']['device']}; {processor(whole)}, commit {whole['commit']}" if "settings" in whole else ""
    )
    heads = ["", "at least", "aim", "measured", "reached", "VRAM in use, GiB: this engine; the other"]
    return paragraphs(text, table(heads, (row.cells() for row in rows(folder))), items(beside(folder)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    print(report(parser.parse_args(argv).folder))


if __name__ == "__main__":
    main()
