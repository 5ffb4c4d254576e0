"""Measure a level of instruction sets against llama.cpp, on a quiet machine and beside other programs.

    python -m benchmarks.speed.processors --models FOLDER --peer FOLDER_OF_BINARIES --beside 0,1,2,4 --out FILE.json
    python -m benchmarks.speed.processors ... --isa avx2      the peer is then a build without what is newer
    python -m benchmarks.speed.processors ... --names r1b-F16 --minutes 4        a part; called again, it goes on
    python -m benchmarks.speed.processors ... --names --beside 4                 no model but beside busy processes
    python -m benchmarks.speed.processors ... --names --beside 0,loop            and one core at half its speed

Both engines run in turn, as in compare.py: prefill of 512 tokens and decode of 64 of every model of --names, then, for
every number of --beside, those of --busy-names beside so many processes that use all the time of a core that they get
(0: none; loop: one process, which stays on the last core, so that this one is half as fast for both engines). FOLDER is
what models/speed_models.py wrote, with models/expert_models.py's qwen3moe8-q4_0.gguf: 8 layers of the shape of
Qwen3-30B-A3B.

FILE is read first: rounds that it has are not measured again, and the models, or numbers of processes, that it lacks
are added. It must be of the same commit, level and machine. A file for each level; table.py sets them side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, results
from benchmarks.lib.programs import OURS, Engines, Runs, add_arguments, bandwidth, peer_facts, peers
from benchmarks.speed.compare import measure_round, speed_entry

NAMES = ("r1b-Q4_0", "r1b-Q8_0", "r1b-Q4_K_M", "r1b-F16", "qwen3moe8-q4_0")
BUSY_NAMES = ("smollm2-Q4_1",)
LOOP = "loop"
"""One busy process that stays on the last core."""
SAME = ("kind", "commit", "cpu", "isa", "peers", "prompt_tokens", "gen_tokens")
"""Fields that a file must share with a measurement that goes on in it."""


class Measurement:
    """A document that grows by rounds, written after each, until the time is over."""

    def __init__(self, document: dict[str, Any], out: Path, arguments: argparse.Namespace) -> None:
        self._document, self._out, self._arguments = document, out, arguments
        self._end = time.monotonic() + 60 * arguments.minutes
        self._longest = 0.0  # seconds of a round

    def measure(self, engines: Engines, model: Path, threads: int, beside: int | str | None = None) -> bool:
        """The rounds that an entry lacks; False where there is no time for them. beside: busy processes, or LOOP; None:
        of an entry without any."""
        part, key = ("speed", (model.stem, threads)) if beside is None else ("busy", (model.stem, threads, beside))
        entries = self._document[part]
        earlier = next((at for at, entry in enumerate(entries) if key_of(part, entry) == key), None)
        runs = {label: Runs() for label in engines.labels()}
        if earlier is not None:
            for label, rounds in entries[earlier]["rounds"].items():
                runs[label].rounds = list(rounds)

        def job(label: str) -> dict[str, Any]:
            loop = beside == LOOP
            with machine.busy(1 if loop else int(beside or 0), max(os.sched_getaffinity(0)) if loop else None):
                return engines.measure(label, model, threads)

        while len(runs[OURS].rounds) < self._arguments.rounds:
            begin = time.monotonic()
            if begin + self._longest > self._end:
                return False
            measure_round(engines, model, threads, self._arguments, runs, job)
            self._longest = max(self._longest, time.monotonic() - begin)
            entry = speed_entry(model, threads, engines.rates, runs)
            entry |= {} if beside is None else {"beside": beside}
            if earlier is None:
                earlier = len(entries)
                entries.append(entry)
            entries[earlier] = entry
            results.write_json(self._out, self._document)
        return True


def key_of(part: str, entry: dict[str, Any]) -> tuple[Any, ...]:
    names = ("model", "threads") if part == "speed" else ("model", "threads", "beside")
    return tuple(entry[name] for name in names)


def resumed(document: dict[str, Any], out: Path) -> dict[str, Any]:
    """The document of a file that is there, if the measurement may go on in it; exits where it may not."""
    if not out.exists():
        return document
    earlier: dict[str, Any] = json.loads(out.read_text())
    for name in SAME:
        if earlier.get(name) != document[name]:
            sys.exit(f"{out.name} is of another {name} ({earlier.get(name)}, not {document[name]}): give another --out")
    return earlier


def unlike_peer(isa: str | None, folder: Path, facts: dict[str, str]) -> str | None:
    """The reason why a peer's build cannot be compared at a level; None: it can."""
    newer = {"avx512f", "amx_int8"}.intersection(machine.cpu()["units"])
    if isa is None or isa.startswith(("avx512", "amx")) or not newer or facts.get("GGML_NATIVE") != "ON":
        return None
    build = "python -m benchmarks.lib.llama_cpp CACHE --avx2"
    return f"{folder.parent.name} is a build for all that this processor has, not for {isa}: {build} makes one"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of the files")
    parser.add_argument("--names", nargs="*", default=NAMES, help="models measured without other programs (all five)")
    parser.add_argument("--busy-names", nargs="+", default=BUSY_NAMES, help="models measured beside others (SmolLM2)")
    parser.add_argument("--beside", type=counts, default=[], metavar="N,N", help="busy processes; loop: one on a core")
    parser.add_argument("--isa", metavar="LEVEL", help="of this engine; default: the best of this processor")
    add_arguments(parser, retries=2)
    parser.set_defaults(gen_tokens=64)
    parser.add_argument("--threads", type=int, help="of both engines; default: a thread for each core")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no round that would end later")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/processors-LEVEL-DATE.json")
    parsed = parser.parse_args(arguments)
    if not parsed.peer and not parsed.build_peer:
        parser.error("give --peer FOLDER or --build-peer CACHE")
    return parsed


def counts(text: str) -> list[int | str]:
    """Numbers of processes, and LOOP, from `0,1,2,4,loop`."""
    numbers = [part if part == LOOP else int(part) for part in text.split(",")]
    if not all(number == LOOP or 0 <= int(number) <= 64 for number in numbers):
        raise ValueError
    return numbers


def main(given: list[str] | None = None) -> int:
    arguments = parse(given)
    threads = arguments.threads or machine.cpu()["cores"]
    found = peers(arguments)
    document: dict[str, Any] = {"kind": "processors", **machine.description(), "isa": arguments.isa}
    document["prompt_tokens"], document["gen_tokens"] = arguments.prompt_tokens, arguments.gen_tokens
    document["peers"] = {label: peer_facts(folder) for label, folder in found.items()}
    for label, folder in found.items():
        if problem := unlike_peer(arguments.isa, folder, document["peers"][label]):
            sys.exit(problem)
    out = arguments.out or results.path_of(document, f"processors-{arguments.isa or 'best'}")
    document = resumed(document, out)
    document.setdefault("read_bandwidth_gb_s", {})
    if str(threads) not in document["read_bandwidth_gb_s"]:
        document["read_bandwidth_gb_s"] |= bandwidth([threads])
    settings = {OURS: ["--isa", arguments.isa] if arguments.isa else []}
    own = arguments.powerinfer.split()
    engines = Engines(own, found, arguments.prompt_tokens, arguments.gen_tokens, settings)
    jobs = [(name, None) for name in arguments.names]
    jobs += [(name, beside) for name in arguments.busy_names for beside in arguments.beside]
    measurement = Measurement(document, out, arguments)
    document.setdefault("speed", [])
    document.setdefault("busy", [])
    for at, (name, beside) in enumerate(jobs):
        if not measurement.measure(engines, arguments.models / f"{name}.gguf", threads, beside):
            print(f"no time for {len(jobs) - at} of {len(jobs)} jobs: call it again", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
