"""The jobs of a long measurement, in a document that is written after each of them: one that was stopped goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, programs, results
from powerinfer.errors import PowerInferError
from powerinfer.system import Disturbance

Result = dict[str, Any]
MAKE = "make"
"""The section of jobs that make models, which take longer than any other."""


@dataclass
class Jobs:
    """document: has under `jobs` what became of each, by its key, SECTION/...; out: its file; quiet: seconds to wait
    for a quiet machine before a job; minutes: begin none that might end later, 0: any; retry: do failed ones again.
    """

    document: Result
    out: Path
    quiet: float
    minutes: float = 0
    retry: bool = False
    begun: float = field(default_factory=lambda: time.monotonic())
    longest: dict[str, float] = field(default_factory=dict)  # seconds, of the jobs of a section

    @property
    def done(self) -> dict[str, Result]:
        done: dict[str, Result] = self.document["jobs"]
        return done

    def wanted(self, key: str) -> bool:
        """Whether the job is still to be done."""
        found = self.done.get(key)
        return found is None or (self.retry and "error" in found)

    def over(self, key: str) -> bool:
        """Whether the job might not end in time if it takes as long as any of its section, or else any but make did."""
        left = 60 * self.minutes - (time.monotonic() - self.begun)
        others = [seconds for section, seconds in self.longest.items() if section != MAKE]
        return bool(self.minutes) and left < self.longest.get(_section(key), max(others, default=0.0))

    def note(self, key: str, result: Result) -> None:
        """Write down what a job has so far: it is done though the process should end before the job does."""
        self.done[key] = result | {"commit": machine.commit()}
        results.write_json(self.out, self.document)

    def do(self, key: str, work: Callable[[], Result]) -> None:
        """Do a job and write down what came of it."""
        machine.wait_until_quiet(self.quiet)
        begin = time.monotonic()
        with Disturbance() as load:
            try:
                result = work()
            except (OSError, RuntimeError, ValueError, KeyError, IndexError, PowerInferError) as error:
                result = {"error": programs.reason(error)}
        taken = time.monotonic() - begin
        self.longest[_section(key)] = max(self.longest.get(_section(key), 0.0), taken)
        others = {"others": round(load.other_cores, 3), "steal": round(load.steal, 3), "disturbed": load.disturbed}
        self.done[key] = result | others | {"wall_s": round(taken, 1), "commit": machine.commit()}
        results.write_json(self.out, self.document)
        print(f"{key}: {_said(result)} ({taken:.0f} s)", file=sys.stderr, flush=True)


def opened(out: Path, kind: str, settings: Result) -> Result:
    """The document that is gone on with, or a new one. SystemExit where it was measured otherwise."""
    if not out.exists():
        return {"kind": kind, **machine.description(), "settings": settings, "jobs": {}}
    document: Result = json.loads(out.read_text())
    if document.get("settings") != json.loads(json.dumps(settings)):
        sys.exit(f"{out} was measured with other settings; give another --out, or remove it")
    return document


def _section(key: str) -> str:
    return key.partition("/")[0]


def _said(result: Result) -> str:
    """A result in a few words."""
    if "error" in result:
        return str(result["error"])
    rates = result.get("decode_tok_s") or result.get("prefill_tok_s", {})
    if isinstance(rates, dict):
        return ", ".join(f"{batch}: {rate:.1f} tok/s" for batch, rate in rates.items()) or "done"
    return f"{rates:.2f} tok/s"
