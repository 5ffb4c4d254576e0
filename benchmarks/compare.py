"""Measure this engine against llama.cpp, in turn, on the same files and the same number of threads.

    python benchmarks/compare.py --models FOLDER --peer [LABEL=]FOLDER_OF_BINARIES [--names smollm2-Q4_1 r1b-Q8_0]
    python benchmarks/compare.py --models FOLDER --build-peer CACHE

For every model and thread count, --rounds rounds (5); in each, every engine runs once, in an order that turns round
by round: prefill of 512 tokens and 128 decoded tokens. A run during which other processes or the hypervisor took more
than 0.15 cores is marked, and repeated up to --retries times. Figures are medians of the undisturbed runs (of all,
where fewer than three are undisturbed: `kept` says so); `ratio` is the median of the ratios within the rounds. Then
process start to first token with peak memory, on the first model. FOLDER is what make_models.py wrote.

Writes one JSON; table.py turns the newest into the table of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import machine
import peer as peer_build

NAMES = ("smollm2-Q4_1", "r1b-Q4_0", "r1b-Q8_0", "r1b-Q4_K_M", "r1b-F16", "r1b-BF16")
PROMPT = "The capital of France is"
OURS = "powerinfer"
RATES = ("prefill_tok_s", "decode_tok_s")


@dataclass
class Runs:
    """One engine's runs on one model with one thread count: a dict per round, None where every try failed."""

    rounds: list[dict[str, Any] | None] = field(default_factory=list)
    error: str = ""

    def values(self, name: str) -> list[float]:
        """Of the undisturbed rounds, or of all where those are fewer than three."""
        done = [run for run in self.rounds if run is not None and run.get(name) is not None]
        kept = [run for run in done if not run["disturbed"]]
        return [run[name] for run in (kept if len(kept) >= 3 else done)]

    def summary(self, names: tuple[str, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {"runs": sum(run is not None for run in self.rounds)}
        result["kept"] = sum(run is not None and not run["disturbed"] for run in self.rounds)
        if self.error:
            result["error"] = self.error
        for name in names:
            if values := self.values(name):
                result[name] = {"median": median(values), "min": min(values), "max": max(values)}
        return result


def ratios(ours: Runs, theirs: Runs, name: str) -> dict[str, Any] | None:
    """Ours by theirs, round by round; of the rounds in which both were undisturbed, where there are three."""
    both = [(a, b) for a, b in zip(ours.rounds, theirs.rounds, strict=True) if a is not None and b is not None]
    both = [(a, b) for a, b in both if a.get(name) and b.get(name)]
    kept = [(a, b) for a, b in both if not a["disturbed"] and not b["disturbed"]]
    pairs = [a[name] / b[name] for a, b in (kept if len(kept) >= 3 else both)]
    if not pairs:
        return None
    return {"median": round(median(pairs), 3), "min": round(min(pairs), 3), "max": round(max(pairs), 3)}


class Engines:
    """The programs to run: label -> what one run of it costs and gives.

    own: the command of this engine; settings: label -> further flags of its `bench`; rates: which are measured.
    """

    def __init__(
        self,
        own: list[str],
        peers: dict[str, Path],
        prompt_tokens: int,
        gen_tokens: int,
        settings: dict[str, list[str]] | None = None,
        rates: tuple[str, ...] = RATES,
    ) -> None:
        self.own, self.peers = own, peers
        self.prompt_tokens, self.gen_tokens = prompt_tokens, gen_tokens
        self.settings = {OURS: []} if settings is None else settings
        self.rates = rates

    def labels(self) -> list[str]:
        return [*self.settings, *self.peers]

    def measure(self, label: str, model: Path, threads: int) -> dict[str, Any]:
        """One run; RuntimeError when the program fails."""
        if label in self.settings:
            return self._ours(self.settings[label], model, threads)
        return self._theirs(self.peers[label], model, threads)

    def _ours(self, settings: list[str], model: Path, threads: int) -> dict[str, Any]:
        sizes = ["--prompt-tokens", str(self.prompt_tokens), "--gen-tokens", str(self.gen_tokens)]
        flags = ["--repeat", "1", "--threads", str(threads), "--context", "1024", "--json", *settings]
        document = json.loads(output([*self.own, "bench", "-m", str(model), *sizes, *flags]).splitlines()[-1])
        extra = ("bytes_per_token", "peak_rss_mb", "load_s", "choices", "sparsity")
        rates = {name: document[name]["median"] for name in self.rates}
        return rates | {name: document[name] for name in extra if name in document}

    def _theirs(self, folder: Path, model: Path, threads: int) -> dict[str, Any]:
        command = [str(folder / "llama-bench"), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]
        flags = {
            "prefill_tok_s": ["-p", str(self.prompt_tokens), "-n", "0"],
            "decode_tok_s": ["-p", "0", "-n", str(self.gen_tokens)],
        }
        return {name: json.loads(output([*command, *flags[name]]))[0]["avg_ts"] for name in self.rates}

    def start_commands(self, model: Path, threads: int) -> dict[str, list[str]]:
        """Whole processes that read a five-token prompt and give one token."""
        raw = ["--raw", "-m", str(model), "--max-tokens", "1", "--temperature", "0", "--threads", str(threads)]
        commands = {OURS: [*self.own, "run", *raw, PROMPT]}
        for label, folder in self.peers.items():
            base = [str(folder / "llama-completion"), "-m", str(model), "-p", PROMPT, "-n", "1", "-no-cnv"]
            base += ["--temp", "0", "-t", str(threads)]
            commands[f"{label}, defaults"] = base
            commands[f"{label}, best flags"] = [*base, "--no-warmup", "-c", "512"]
        return commands


def output(command: list[str], timeout: float | None = None) -> str:
    """What a program prints; RuntimeError with its last line when it fails, or has not ended after so many seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{Path(command[0]).name} had not ended after {timeout:.0f} seconds") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise RuntimeError(f"{Path(command[0]).name} ended with status {done.returncode}: {last}"[:300])
    return done.stdout


def timed_process(command: list[str]) -> dict[str, float]:
    """Wall seconds and peak resident MiB of a whole process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with status {process.returncode}")
    return {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_rss_mib": usage.ru_maxrss / 1024}


def reason(error: Exception) -> str:
    """An error in words that name no folder."""
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror}"
    return str(error) or type(error).__name__


def one_round(runs: dict[str, Runs], number: int, retries: int, quiet: float, job: Any) -> None:
    """Every engine once, the first one another each round; a disturbed run is tried again."""
    labels = list(runs)
    shift = number % len(labels)
    for label in labels[shift:] + labels[:shift]:
        if runs[label].error:
            runs[label].rounds.append(None)
            continue
        best: dict[str, Any] | None = None
        for _ in range(1 + retries):
            machine.wait_until_quiet(quiet)
            try:
                with machine.Load() as load:
                    result = job(label)
            except (OSError, RuntimeError, ValueError, KeyError, IndexError) as error:
                runs[label].error = reason(error)
                print(f"  {label}: {reason(error)}", file=sys.stderr)
                break
            result |= {"others": round(load.others, 3), "steal": round(load.steal, 3), "disturbed": load.disturbed}
            if best is None or load.others + load.steal < best["others"] + best["steal"]:
                best = result
            if not load.disturbed:
                break
        runs[label].rounds.append(best)


def compare_speed(engines: Engines, model: Path, threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    runs = {label: Runs() for label in engines.labels()}
    for number in range(arguments.rounds):
        one_round(
            runs,
            number,
            arguments.retries,
            arguments.quiet,
            lambda label: engines.measure(label, model, threads),
        )
        shown = [
            f"{label} {run[RATES[0]]:.0f}/{run[RATES[1]]:.1f}" + ("*" if run["disturbed"] else "")
            for label, run in ((label, engine.rounds[-1]) for label, engine in runs.items())
            if run is not None
        ]
        print(f"{model.stem} {threads} threads, round {number + 1}:", "; ".join(shown), file=sys.stderr)
    result: dict[str, Any] = {"model": model.stem, "threads": threads, "file_bytes": model.stat().st_size}
    result["engines"] = {label: run.summary(RATES) | constant_fields(run) for label, run in runs.items()}
    result["ratio"] = {
        label: {name: ratios(runs[OURS], run, name) for name in RATES} for label, run in runs.items() if label != OURS
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
    return script_result("python_share.py", model, threads)


def script_result(name: str, model: Path, threads: int) -> dict[str, Any] | None:
    """The document that another script of this folder prints about a model; None where it fails."""
    script = str(Path(__file__).with_name(name))
    try:
        return dict(json.loads(output([sys.executable, script, str(model), "--threads", str(threads)])))
    except (RuntimeError, ValueError) as error:
        print(f"nothing from {name}: {error}", file=sys.stderr)
        return None


def bandwidth(threads: list[int]) -> dict[str, float]:
    """Memory read bandwidth in GB/s by thread count, from a small program built on the spot; {} without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "bandwidth")
        here = Path(__file__).with_name("bandwidth.cpp")
        build = [os.environ.get("CXX", "c++"), "-O3", "-march=native", "-pthread", str(here), "-o", program]
        try:
            output(build)
            results = {str(n): median(float(output([program, str(n)])) for _ in range(5)) for n in threads}
        except (OSError, RuntimeError) as error:
            print(f"no bandwidth: {error}", file=sys.stderr)
            return {}
    return results


def peer_facts(folder: Path) -> dict[str, str]:
    """How a peer was built: its version and the settings of its CMake cache."""
    cache = folder.parent / "CMakeCache.txt"
    wanted = ("CMAKE_BUILD_TYPE", "CMAKE_CXX_FLAGS", "GGML_NATIVE", "GGML_OPENMP", "GGML_LLAMAFILE", "GGML_CPU_REPACK")
    wanted += ("GGML_CUDA", "CMAKE_CUDA_ARCHITECTURES", "GGML_CUDA_FA", "GGML_CUDA_GRAPHS")
    pairs = (line.split("=", 1) for line in cache.read_text().splitlines() if "=" in line) if cache.exists() else ()
    facts = {key.split(":")[0]: value for key, value in pairs if key.split(":")[0] in wanted}
    done = subprocess.run([str(folder / "llama-bench"), "--version"], capture_output=True, text=True)
    version = [line for line in (done.stdout + done.stderr).splitlines() if "version" in line or "built" in line]
    return {"version": "; ".join(line.strip() for line in version), **facts}


def labelled(argument: str) -> tuple[str, Path]:
    """`LABEL=FOLDER`, or a folder alone, labelled llama.cpp."""
    label, found, path = argument.rpartition("=")
    return (label if found else "llama.cpp"), Path(path)


def own_command() -> str:
    """The `powerinfer` beside the running Python, else the one that `make` installs."""
    beside = Path(sys.executable).with_name("powerinfer")
    return str(beside if beside.exists() else machine.ROOT / ".venv/bin/powerinfer")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder of make_models.py")
    parser.add_argument("--names", nargs="+", default=NAMES, help="models of that folder, without .gguf")
    parser.add_argument("--peer", type=labelled, nargs="+", default=[], metavar="[LABEL=]FOLDER")
    parser.add_argument("--build-peer", type=Path, metavar="CACHE", help="build llama.cpp there first")
    parser.add_argument("--powerinfer", default=own_command(), metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start-rounds", type=int, default=9, help="0: leave process start out")
    parser.add_argument("--retries", type=int, default=2, help="of a disturbed run")
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds to wait for a quiet machine before a run")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--gen-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/speed-DATE.json")
    arguments = parser.parse_args()
    if not arguments.peer and not arguments.build_peer:
        parser.error("give --peer FOLDER or --build-peer CACHE")
    return arguments


def main() -> None:
    arguments = parse()
    peers = dict(arguments.peer)
    if arguments.build_peer:
        peers["llama.cpp"] = peer_build.build(arguments.build_peer)
    engines = Engines(arguments.powerinfer.split(), peers, arguments.prompt_tokens, arguments.gen_tokens)
    document: dict[str, Any] = {"kind": "speed", **machine.description()}
    document["prompt_tokens"], document["gen_tokens"] = arguments.prompt_tokens, arguments.gen_tokens
    document["peers"] = {label: peer_facts(folder) for label, folder in peers.items()}
    document["read_bandwidth_gb_s"] = bandwidth(arguments.threads)
    out = arguments.out or machine.ROOT / f"benchmarks/results/speed-{document['date'][:16].replace(':', '')}.json"
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
            machine.write_json(out, document)  # after every step: an interrupted session keeps what it has


if __name__ == "__main__":
    main()
