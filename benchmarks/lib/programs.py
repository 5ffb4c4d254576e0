"""This engine and llama.cpp as programs that are run in turn, round by round, and what is made of their figures."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib import llama_cpp, machine
from powerinfer.system import Disturbance

PROMPT = "The capital of France is"
OURS = "powerinfer"
RATES = ("prefill_tok_s", "decode_tok_s")

Job = Callable[[str], dict[str, Any]]  # one run of the engine with that label


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


def output(command: list[str], timeout: float | None = None, prefix: Sequence[str] = ()) -> str:
    """What a program prints; RuntimeError with its last line if it fails or has not ended after `timeout` seconds.

    prefix: a command that becomes the program.
    """
    whole = [*prefix, *command]
    try:
        done = subprocess.run(whole, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout)
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


def one_round(runs: dict[str, Runs], number: int, retries: int, quiet: float, job: Job) -> None:
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
                with Disturbance() as load:
                    result = job(label)
            except (OSError, RuntimeError, ValueError, KeyError, IndexError) as error:
                runs[label].error = reason(error)
                print(f"  {label}: {reason(error)}", file=sys.stderr)
                break
            result |= {"others": round(load.other_cores, 3), "steal": round(load.steal, 3), "disturbed": load.disturbed}
            if best is None or load.cores < best["others"] + best["steal"]:
                best = result
            if not load.disturbed:
                break
        runs[label].rounds.append(best)


def script_result(name: str, model: Path, threads: int) -> dict[str, Any] | None:
    """The document that another script prints about a model; None where it fails. name: its module in benchmarks."""
    command = [sys.executable, "-m", f"benchmarks.{name}", str(model), "--threads", str(threads)]
    try:
        return dict(json.loads(output(command)))
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
    wanted += ("GGML_AVX2", "GGML_AVX512", "GGML_AMX_INT8")
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


def add_arguments(parser: argparse.ArgumentParser, retries: int) -> None:
    """The engines, and how often each of them runs."""
    parser.add_argument("--peer", type=labelled, nargs="+", default=[], metavar="[LABEL=]FOLDER")
    parser.add_argument("--build-peer", type=Path, metavar="CACHE", help="build llama.cpp there first")
    parser.add_argument("--powerinfer", default=own_command(), metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--retries", type=int, default=retries, help="of a disturbed run")
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds to wait for a quiet machine before a run")
    parser.add_argument("--gen-tokens", type=int, default=128)


def peers(arguments: argparse.Namespace) -> dict[str, Path]:
    """The peers by label, of `add_arguments`; one of them is built first if requested."""
    built = {"llama.cpp": llama_cpp.build(arguments.build_peer)} if arguments.build_peer else {}
    return dict(arguments.peer) | built
