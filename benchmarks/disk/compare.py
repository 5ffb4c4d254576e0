"""Measure models that are larger than the RAM they get: weights read from disk, against llama.cpp's mmap.

    python -m benchmarks.disk.compare --models FOLDER --peer FOLDER_OF_BINARIES [--minutes 9] [--out FILE]
    python -m benchmarks.disk.compare --models FOLDER --engines disk powerinfer powerinfer-ram     without a peer

The models (models/disk_models.py) are made where they are missing: 15 GB with what is prepared for them. Of each there
are --rounds rounds; in each every engine runs once, the first one another each round:

    powerinfer       with --ram, of --share of the model's file, in a memory cgroup with the same limit: exceeding it
                     means being killed. Without swap, and the page cache counts (lib/memory_limit.py)
    powerinfer-ram   with all of the model in RAM and no limit
    predicted, predicted-ram    of `relu`: the same two with --selector predicted, the first of `silent`, too. The
                     others have --selector auto, which takes no predictor: its answers are exact
    whole, exact     of `silent`: as powerinfer, which chooses among these by a trial, with --selector all and exact: of
                     experts on disk all is read, or up, and of down the rows of neurons that fire
    llama.cpp        in the same cgroup; its weights are mapped, and the kernel drops pages where it needs room. They
                     are not repacked for its fastest kernels: that makes a copy of most of the model in memory
    llama.cpp-ram    as it is by default, with no limit
    disk             how fast the disk gives the model's file past the page cache: in order, and at random by size

Each decodes --gen-tokens behind one token, and computes a prompt of --prompt-tokens, both after a warm-up in the same
process. Before every process the page cache is dropped (`cache` says how), so all start cold. A program that has not
ended after --timeout seconds has failed, and so has one during which another program read the model's files: what is
in the page cache on that one's account costs nothing. A failure is written down as `error`. `memory` has the limit, by
which cgroups, the peak with the page cache, and the bytes that the whole process read from disk.

--sweep: the same with other limits, --sweep-rounds times, for the plot of speed over RAM. Once for each model: `plan`,
the speed that `powerinfer plan` predicts, and for `experts` `hits`, what policies hit of a recorded trace by the memory
for experts. Every job is written down when it is done; started again with the same --out, the script goes on where it
was, and with --minutes it ends before a job that might take longer. table.py makes tables and plots of the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import machine, memory_limit, page_cache, programs, results
from benchmarks.lib.file_rates import file_rates
from benchmarks.lib.jobs import Jobs, Result, opened
from benchmarks.models import disk_models

OURS, OURS_RAM, PEER, PEER_RAM, DISK = "powerinfer", "powerinfer-ram", "llama.cpp", "llama.cpp-ram", "disk"
PREDICTED, PREDICTED_RAM, EXACT, WHOLE = "predicted", "predicted-ram", "exact", "whole"
ENGINES = (OURS, OURS_RAM, PREDICTED, PREDICTED_RAM, EXACT, WHOLE, PEER, PEER_RAM, DISK)
LIMITED = (OURS, PREDICTED, EXACT, WHOLE, PEER)
ONLY = {PREDICTED: ("relu", "silent"), PREDICTED_RAM: ("relu",), EXACT: ("silent",), WHOLE: ("silent",)}
"""Engine -> models, of those that are not for all."""
PEER_LIMITED = ["--repack", "0", "-lm", "mmap"]
CONTEXT = 1024
FIELDS = ("disk", "bytes_per_token", "load_s", "peak_rss_mb", "choices")
"""What our own bench says beside the rates."""
DISK_SECONDS = 1.0  # for each size of reads
SLOTS = (4, 8, 16, 24, 32, 48, 64, 96, 112)  # experts of a layer


def ram_of(model: Path, share: float) -> int:
    """Bytes, whole MiB."""
    return int(share * model.stat().st_size) >> 20 << 20


def key_of(engine: str, name: str, share: float | None, number: int) -> str:
    """Of the job of an engine in a round. share: of the model's file in RAM, None: all of it, without a limit."""
    return f"{engine}/{name}/{'all' if share is None else f'{share:g}'}/{number}"


def drop(files: list[Path]) -> str:
    """Drop files from the page cache; says how. RuntimeError where more than a hundredth of them stays."""
    how = page_cache.drop(files)
    kept = sum(map(page_cache.cached, files))
    if kept > sum(path.stat().st_size for path in files) / 100:
        raise RuntimeError(f"{kept} bytes of the model's files stay in the page cache: does another program use them?")
    return how


def check_alone(files: list[Path], ram: int | None) -> None:
    """RuntimeError where the page cache has more of the files than the limit, in bytes, allows: another program read
    them meanwhile, and what was in its share of the memory has cost the program under the limit nothing.
    """
    kept = sum(map(page_cache.cached, files))
    if ram is not None and kept > ram:
        raise RuntimeError(f"{kept} bytes of the model's files are in the page cache: another program has read them")


@dataclass(kw_only=True)
class Measurement(Jobs):
    """What is measured."""

    arguments: argparse.Namespace

    def predicted(self, model: Path, ram: int | None) -> Result:
        return self.ours(model, ram, "predicted")

    def exact(self, model: Path, ram: int | None) -> Result:
        return self.ours(model, ram, "exact")

    def whole(self, model: Path, ram: int | None) -> Result:
        return self.ours(model, ram, "all")

    def ours(self, model: Path, ram: int | None, selector: str = "auto") -> Result:
        """Rates of one process. ram: bytes, None: no limit."""
        about = self.arguments
        files = disk_models.prepared_files(model)
        cache = drop(files)
        sizes = ["--prompt-tokens", str(about.prompt_tokens), "--gen-tokens", str(about.gen_tokens), "--repeat", "1"]
        command = [*about.powerinfer.split(), "bench", "-m", str(model), *sizes, "--json", *self._common(selector)]
        command += [] if ram is None else ["--ram", f"{ram}B"]
        text, usage = memory_limit.output(command, ram, about.timeout)
        check_alone(files, ram)
        document = json.loads(text.splitlines()[-1])
        result = {name: document[name]["median"] for name in programs.RATES}
        result |= {name: document[name] for name in FIELDS if name in document}
        if "sparsity" in document:
            result["sparsity"] = {name: value for name, value in document["sparsity"].items() if name != "layers"}
        return result | {"cache": cache, "memory": usage.document()}

    def theirs(self, model: Path, ram: int | None) -> Result:
        """The same of llama.cpp, a process for each rate."""
        about = self.arguments
        command = [str(about.peer / "llama-bench"), "-m", str(model), "-t", str(about.threads), "-r", "1", "-o", "json"]
        command += [] if ram is None else PEER_LIMITED
        sizes = {
            "decode_tok_s": ["-p", "0", "-n", str(about.gen_tokens)],
            "prefill_tok_s": ["-p", str(about.prompt_tokens), "-n", "0"],
        }
        result: Result = {"memory": {}}
        for rate, flags in sizes.items():
            result["cache"] = drop([model])
            text, usage = memory_limit.output([*command, *flags], ram, about.timeout)
            check_alone([model], ram)
            result[rate] = json.loads(text)[0]["avg_ts"]
            result["memory"][rate] = usage.document()
        return result

    def plan(self, model: Path, ram: int, selector: str = "auto") -> Result:
        """What `plan` predicts of decoding."""
        command = [*self.arguments.powerinfer.split(), "plan", "-m", str(model), "--ram", f"{ram}B", "--json"]
        text = programs.output([*command, "--dry-run", *self._common(selector)], self.arguments.timeout)
        document = json.loads(text.splitlines()[-1])
        return {"decode_tok_s": document["predicted"]["decode_tok_s"]}

    def hits(self, model: Path) -> Result:
        """What policies over experts hit of the trace, by the experts of a layer that are in memory."""
        command = [*self.arguments.powerinfer.split(), "experts", "-m", str(model), "--json"]
        command += ["--trace", str(disk_models.trace_of(model)), "--slots", ",".join(map(str, SLOTS))]
        document = json.loads(programs.output(command, self.arguments.timeout).splitlines()[-1])
        return {name: document[name] for name in ("tokens", "expert_bytes", "at")}

    def _common(self, selector: str) -> list[str]:
        common = ["--threads", str(self.arguments.threads), "--context", str(CONTEXT), "--gpu", "none"]
        return common if selector == "auto" else [*common, "--selector", selector]


def jobs(measurement: Measurement, name: str) -> Iterator[tuple[str, Callable[[], Result]]]:
    """(key, work) of all jobs on a model but making it, in the order in which they are done."""
    arguments = measurement.arguments
    model = disk_models.path_of(arguments.models, name)
    run = {OURS: measurement.ours, OURS_RAM: measurement.ours, PEER: measurement.theirs, PEER_RAM: measurement.theirs}
    run |= {PREDICTED: measurement.predicted, PREDICTED_RAM: measurement.predicted}
    run |= {EXACT: measurement.exact, WHOLE: measurement.whole}
    engines = [engine for engine in arguments.engines if name in ONLY.get(engine, (name,))]

    def job(engine: str, share: float | None, number: int) -> tuple[str, Callable[[], Result]]:
        if engine == DISK:
            return f"{DISK}/{name}/{number}", lambda: file_rates(model, DISK_SECONDS)
        work = run[engine]
        return key_of(engine, name, share, number), lambda: work(model, None if share is None else ram_of(model, share))

    def in_turn(shares: list[float], number: int, engines: list[str]) -> list[tuple[str, Callable[[], Result]]]:
        each = [job(engine, share, number) for share in shares for engine in engines if engine in LIMITED]
        each += [job(engine, None, number) for engine in engines if engine not in LIMITED]
        shift = number % max(1, len(each))
        return each[shift:] + each[:shift]

    for number in range(arguments.rounds):
        yield from in_turn([arguments.share], number, engines)
    for number in range(arguments.sweep_rounds):
        yield from in_turn(arguments.sweep, number, [engine for engine in engines if engine in LIMITED])
    if PREDICTED_RAM in engines:
        key = f"plan-predicted/{name}/{arguments.share:g}"
        yield key, lambda: measurement.plan(model, ram_of(model, arguments.share), "predicted")
    if OURS in arguments.engines:
        yield f"plan/{name}/{arguments.share:g}", lambda: measurement.plan(model, ram_of(model, arguments.share))
        if name == "experts":
            yield f"hits/{name}", lambda: measurement.hits(model)


def measure(measurement: Measurement) -> bool:
    """Do what is left of all models. False where time was over before all was done."""
    arguments = measurement.arguments
    for name in arguments.names:
        left = [(key, work) for key, work in jobs(measurement, name) if measurement.wanted(key)]
        if not left:
            continue

        def make(name: str = name) -> Result:
            model = disk_models.make(arguments.models, name, arguments.threads, arguments.layers)
            return {"file_bytes": model.stat().st_size, "layers": arguments.layers or disk_models.LAYERS[name]}

        if measurement.over(f"make/{name}"):
            return False
        measurement.do(f"make/{name}", make)
        if "error" in measurement.done[f"make/{name}"]:
            continue
        for key, work in left:
            if measurement.over(key):
                return False
            measurement.do(key, work)
    return True


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = tuple(disk_models.LAYERS)
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where the models are made")
    parser.add_argument("--names", nargs="+", choices=known, default=known, help="models; default: all")
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="of llama.cpp's binaries")
    parser.add_argument("--powerinfer", default=programs.own_command(), metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: all; without --peer, our own")
    parser.add_argument("--share", type=float, default=0.5, help="of the model's file, in RAM; default: %(default)s")
    parser.add_argument("--sweep", type=float, nargs="*", default=(0.35, 0.65, 0.8), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep-rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, metavar="N", help="of models that are made; default: about 3 GB")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--gen-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one process; default: %(default)s")
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds to wait for a quiet machine before a job")
    parser.add_argument("--minutes", type=float, default=0, help="begin no job that might end later; 0: no limit")
    parser.add_argument("--retry", action="store_true", help="do failed jobs again")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/disk-DATE.json")
    arguments = parser.parse_args()
    if arguments.engines is None:
        arguments.engines = [engine for engine in ENGINES if arguments.peer or engine not in (PEER, PEER_RAM)]
    if arguments.peer is None and {PEER, PEER_RAM} & set(arguments.engines):
        parser.error("give --peer FOLDER")
    for share in (arguments.share, *arguments.sweep):
        if not 0 < share <= 4:
            parser.error(f"{share:g} is not a share of a model's file")
    arguments.sweep = [share for share in arguments.sweep if share != arguments.share]
    return arguments


def main() -> int:
    arguments = parse()
    settings = {name: getattr(arguments, name) for name in ("share", "threads", "prompt_tokens", "gen_tokens")}
    if arguments.out is None:
        arguments.out = results.path_of({"kind": "disk", **machine.description()})
    document = opened(arguments.out, "disk", settings)
    if arguments.peer is not None:
        document["peer"] = programs.peer_facts(arguments.peer)
    with memory_limit.Group(1 << 30) as group:
        document["limited_by"] = group.by
    if group.by is None:
        print("no memory cgroup can be made here: nothing is limited", file=sys.stderr)
    left = {name: getattr(arguments, name) for name in ("out", "quiet", "minutes", "retry")}
    if not measure(Measurement(document=document, arguments=arguments, **left)):
        print(f"time is over: start it again with --out {arguments.out} to go on", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
