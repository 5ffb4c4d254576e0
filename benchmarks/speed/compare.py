"""Measure this engine against llama.cpp, in turn, on the same files and the same number of threads.

    python -m benchmarks.speed.compare --models FOLDER --peer [LABEL=]FOLDER_OF_BINARIES [--names smollm2-Q4_1 r1b-Q8_0]
    python -m benchmarks.speed.compare --models FOLDER --build-peer CACHE

For every model and thread count, --rounds rounds (5); in each, every engine runs once, in an order that turns round
by round: prefill of 512 tokens and 128 decoded tokens. A run during which other processes or the hypervisor took more
than 0.15 cores is marked, and repeated up to --retries times. Figures are medians of the undisturbed runs (of all,
where fewer than three are undisturbed: `kept` says so); `ratio` is the median of the ratios within the rounds. Then
process start to first token with peak memory, on the first model. FOLDER is what models/speed_models.py wrote.

Writes one JSON; table.py turns the newest into the table of the README.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import cells, machine, results
from benchmarks.lib.programs import (
    OURS,
    PROMPT,
    Engines,
    Job,
    Runs,
    add_arguments,
    bandwidth,
    one_round,
    peer_facts,
    peers,
    ratios,
    reason,
    script_result,
    timed_process,
)

NAMES = ("smollm2-Q4_1", "r1b-Q4_0", "r1b-Q8_0", "r1b-Q4_K_M", "r1b-F16", "r1b-BF16")


def compare_speed(engines: Engines, model: Path, threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    runs = {label: Runs() for label in engines.labels()}
    for _ in range(arguments.rounds):
        measure_round(engines, model, threads, arguments, runs)
    return speed_entry(model, threads, engines.rates, runs)


def measure_round(
    engines: Engines,
    model: Path,
    threads: int,
    arguments: argparse.Namespace,
    runs: dict[str, Runs],
    job: Job | None = None,
) -> None:
    """The next round of all engines, shown on stderr. job: what runs one of them, where that is more than measuring."""
    number = len(runs[OURS].rounds)
    job = job or (lambda label: engines.measure(label, model, threads))
    one_round(runs, number, arguments.retries, arguments.quiet, job)
    shown = [
        f"{label} {'/'.join(cells.number(run[name]) for name in engines.rates)}" + "*" * run["disturbed"]
        for label, run in ((label, engine.rounds[-1]) for label, engine in runs.items())
        if run is not None
    ]
    print(f"{model.stem} {threads} threads, round {number + 1}:", "; ".join(shown), file=sys.stderr)


def speed_entry(model: Path, threads: int, rates: tuple[str, ...], runs: dict[str, Runs]) -> dict[str, Any]:
    """The figures of a model and a number of threads, and the rounds that they come from."""
    result: dict[str, Any] = {"model": model.stem, "threads": threads, "file_bytes": model.stat().st_size}
    result["engines"] = {label: run.summary(rates) | constant_fields(run) for label, run in runs.items()}
    result["ratio"] = {
        label: {name: ratios(runs[OURS], run, name) for name in rates} for label, run in runs.items() if label != OURS
    }
    result["rounds"] = {label: run.rounds for label, run in runs.items()}
    for rounds in result["rounds"].values():
        for run in rounds:
            if run is not None:
                run.pop("choices", None)
    return result


def constant_fields(run: Runs) -> dict[str, Any]:
    """What our own bench says beside the rates, of its last run."""
    done = [entry for entry in run.rounds if entry is not None]
    names = ("bytes_per_token", "choices")
    result = {name: done[-1][name] for name in names if done and name in done[-1]}
    if peaks := run.values("peak_rss_mb"):
        result["peak_rss_mb"] = round(max(peaks), 1)
    return result


def compare_start(engines: Engines, model: Path, threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Process start to first token: wall, CPU seconds and peak memory; the file is in the page cache."""
    commands = engines.start_commands(model, threads)
    runs = {label: Runs() for label in commands}
    for label, command in commands.items():
        try:
            timed_process(command)  # not counted: the file into the page cache
        except (OSError, RuntimeError) as error:
            runs[label].error = reason(error)
    for number in range(arguments.start_rounds):
        one_round(runs, number, arguments.retries, arguments.quiet, lambda label: timed_process(commands[label]))
    names = ("wall_s", "cpu_s", "peak_rss_mib")
    summary = {label: run.summary(names) for label, run in runs.items()}
    return {"model": model.stem, "threads": threads, "prompt": PROMPT, "engines": summary}


def python_share(model: Path, threads: int) -> dict[str, Any] | None:
    """Python's share of a decode step, from python_share.py; None where this Python has no powerinfer."""
    return script_result("speed.python_share", model, threads)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of models/speed_models.py")
    parser.add_argument("--names", nargs="+", default=NAMES, help="models of that folder, without .gguf")
    add_arguments(parser, retries=2)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--start-rounds", type=int, default=9, help="0: leave process start out")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument(
        "--kind",
        default="speed",
        help="of the result: experts for the table of docs/benchmarks.md, speed-beside for a machine beside the first",
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/KIND-DATE.json")
    arguments = parser.parse_args()
    if not arguments.peer and not arguments.build_peer:
        parser.error("give --peer FOLDER or --build-peer CACHE")
    return arguments


def main() -> None:
    arguments = parse()
    engines = Engines(arguments.powerinfer.split(), peers(arguments), arguments.prompt_tokens, arguments.gen_tokens)
    document: dict[str, Any] = {"kind": arguments.kind, **machine.description()}
    document["prompt_tokens"], document["gen_tokens"] = arguments.prompt_tokens, arguments.gen_tokens
    document["peers"] = {label: peer_facts(folder) for label, folder in engines.peers.items()}
    document["read_bandwidth_gb_s"] = bandwidth(arguments.threads)
    out = arguments.out or results.path_of(document)
    models = [arguments.models / f"{name}.gguf" for name in arguments.names]
    if arguments.start_rounds:
        document["start"] = compare_start(engines, models[0], max(arguments.threads), arguments)
    machine.wait_until_quiet(arguments.quiet)
    shares = [python_share(models[0], threads) for threads in arguments.threads]
    document["python"] = [{"model": models[0].stem, **share} for share in shares if share is not None]
    document["speed"] = []
    for model in models:
        for threads in arguments.threads:
            document["speed"].append(compare_speed(engines, model, threads, arguments))
            results.write_json(out, document)  # after every step: an interrupted session keeps what it has


if __name__ == "__main__":
    main()
