"""Measure models that do not fit on a GPU: hot neurons on it, cold ones on the CPU, against llama.cpp with CUDA.

    python -m benchmarks.hybrid.compare --models FOLDER --peer FOLDER_OF_BINARIES [--scale 0.25] [--minutes 9]
    python -m benchmarks.hybrid.compare --models FOLDER --gpu cpu --scale tiny           tries everything without a GPU

It makes the models (recipes.py), one at a time, and measures section by section:

    make       the model, its profile, predictor and bundles; before any other section what this machine can do
               (`powerinfer measure`), the budget of the layers that there are, and a text's logits on the CPU
    kernel     bandwidth of the sum over a layer's neurons, a tenth of which fires
    decode     tokens per second of 1, 8 and 32 requests together: this engine and llama.cpp in turn, round by round; of
               this engine also the share of the firing neurons that the GPU had, a trace, what the plan predicted
    ablation   what each idea brings: `dense`, whole layers on either side; `layers`, only the neurons that fire, both
               sides in turns; `random`, both sides at a time with any neurons; and `time`, the plan's, from `decode`;
               `exact` is the plan without a predictor
    prefill    tokens per second of a prompt: cold neurons streamed to the GPU, or by the CPU; llama.cpp
    budget     tokens per second by the budget
    peer       how many layers llama.cpp can put on the GPU within the budget: whole ones (-ngl), or all attention and
               the FFNs of some (-ot); in few tries, with all threads and with half of them. Its runs need that, and in
               the first round both come after all of this engine's

Before anything of this engine is timed, its logits of a text are compared with the CPU's: a wrong model is an error.

A card with less memory is stood in for by the budget: the GPU is as fast as it is. --scale takes a share of a model's
layers (by itself a quarter of falcon-40b and of reglu-70b, all of drelu-7b); the budget of both engines is then that
share of the card, but for what layers share: head, driver and working memory stay whole (`worker.card`). --times N
has a card with the N-th part of the whole model's bytes instead.

Every job is written down when it is done. Started again with the same --out, the script goes on where it was; with
--minutes it ends before a job that might take longer. --retry does jobs that failed again; the exit status is 1 where
any did. A model is removed when its jobs are done, unless --keep. table.py makes tables and plots of the JSON.

llama.cpp has no budget for VRAM: what it takes is read from nvidia-smi. `lib/llama_cpp.py FOLDER --cuda 90` builds it.
It reads the same files; it does not know of ReLU in them and computes the activation of their family, which costs the
same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.hybrid import recipes, worker
from benchmarks.lib import machine, programs, results
from benchmarks.lib.jobs import Jobs, Result, opened
from benchmarks.models import prepared
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.kernels import cpu
from powerinfer.placement.shapes import checkpoint_model
from powerinfer.sizes import read_size

SECTIONS = ("make", "kernel", "decode", "ablation", "prefill", "peer", "budget")
SHARES = (0.25, 0.5, 0.75, 1.0, 1.5)  # of the budget
STEPS = ("dense", "layers", "random")  # of the ablation, before the plan
KERNEL_TOKENS = (1, 8, 32)
MOST_TRIES = 3  # for one limit of the peer: each loads the model
HANGS = 240  # seconds, after which a program is taken not to end any more
LIMITS: dict[str, int | None] = {"make": None, "hardware": 2 * HANGS}  # of other tasks: measuring compiles all kernels
LLAMA_CPP = "llama.cpp"
EVERYTHING = 999  # as -ngl: all layers and the head


class Vram:
    """Peak of the memory in use on a GPU while in the context, without what was in use before, by default on entering
    it. None where unknown."""

    peak: int | None = None

    def __init__(self, gpu: str, before: int | None = None) -> None:
        self._gpu, self.before = gpu, before

    def __enter__(self) -> Vram:
        self._process: subprocess.Popen[str] | None = None
        if self._gpu == "cpu":
            return self
        command = ["nvidia-smi", "-i", self._gpu.partition(":")[2] or "0", "--query-gpu=memory.used"]
        command += ["--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return self
        self._seen = [self._read()]
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> int | None:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        return int(line) << 20 if line.isdigit() else None

    def _follow(self) -> None:
        while (used := self._read()) is not None:
            self._seen.append(used)

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._reader.join()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        known = [used for used in self._seen if used is not None]
        if known and self.before is None:
            self.before = known[0]
        self.peak = max(known) - self.before if known and self.before is not None else None


def run(task: Result) -> Result:
    """A task of worker.py in its own process; RuntimeError with its last line when it fails. One that noted a result
    before it did (`worker.decode`) has that, and the reason as `lacks`.

    With a stand-in for a GPU in this one: there is no memory of a device to be given back.
    """
    if task.get("gpu") == "cpu":
        return worker.perform(task)
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note.json"
        command = [sys.executable, "-m", "benchmarks.hybrid.worker", json.dumps(task | {"note": str(note)})]
        try:
            return dict(json.loads(programs.output(command, LIMITS.get(task["what"], HANGS)).splitlines()[-1]))
        except RuntimeError as error:
            if not note.exists():
                raise
            return json.loads(note.read_text()) | {"step": {"lacks": programs.reason(error)}}


@dataclass
class Peer:
    """llama.cpp with CUDA. folder: of its binaries; extra: further flags of each of them."""

    folder: Path
    gpu: str
    extra: list[str]

    def _command(self, name: str, model: Path, threads: int, flags: list[str]) -> list[str]:
        return [str(self.folder / name), "-m", str(model), "-t", str(threads), *flags, *self.extra]

    def knows(self, flag: str) -> bool:
        """Whether this build of its benchmark has the flag."""
        return flag in programs.output([str(self.folder / "llama-bench"), "--help"], HANGS)

    def not_mapped(self) -> list[str]:
        """Flags of its benchmark by which weights lie in memory of its own: what the CPU has is pinned."""
        return ["-lm", "none"] if self.knows("--load-mode") else ["-mmp", "0"]

    def alone(self, model: Path, threads: int, flags: list[str], tokens: int) -> tuple[float, int | None]:
        """Tokens per second of one request, and the peak of VRAM in bytes."""
        with Vram(self.gpu) as vram:
            rates = self.bench(model, threads, flags, ["-p", "0", "-n", str(tokens), "-r", "1"])
        return float(rates[0]["avg_ts"]), vram.peak

    def bench(self, model: Path, threads: int, flags: list[str], sizes: list[str]) -> list[Result]:
        """What its benchmark says of each size."""
        command = self._command("llama-bench", model, threads, flags)
        return list(json.loads(programs.output([*command, *sizes, "-o", "json"], HANGS)))

    def prompt(self, model: Path, limit: Result, tokens: int) -> Result:
        """As `worker.prefill`, with the flags that were found to fit."""
        rates = self.bench(model, limit["threads"], limit["flags"], ["-p", str(tokens), "-n", "0", "-r", "2"])
        return {"prefill_tok_s": {"llama.cpp": float(rates[0]["avg_ts"])}}

    def together(self, model: Path, threads: int, flags: list[str], batches: list[int], tokens: int) -> Result:
        """Tokens per second by the number of requests, each behind a prompt of one token."""
        command = self._command("llama-batched-bench", model, threads, flags)
        sizes = ["-npp", "1", "-ntg", str(tokens), "-npl", ",".join(map(str, batches))]
        cache = ["-c", str(max(batches) * (tokens + 2)), "-fit", "off", "--output-format", "jsonl"]
        lines = programs.output([*command, *sizes, *cache], HANGS).splitlines()
        runs = [json.loads(line) for line in lines if line.startswith("{")]
        return {str(one["pl"]): one["speed_tg"] for one in runs}

    def measure(self, model: Path, limit: Result, batches: list[int], tokens: int) -> Result:
        """As `worker.decode`, with the flags that were found to fit."""
        threads, flags = limit["threads"], limit["flags"]
        rate, used = self.alone(model, threads, flags, tokens)
        rates: Result = {"1": rate}
        several = [batch for batch in batches if batch > 1]
        result: Result = {"decode_tok_s": rates, "vram_used": used}
        try:
            rates |= self.together(model, threads, flags, several, min(tokens, 31)) if several else {}
        except (OSError, RuntimeError, ValueError) as error:
            result["together_error"] = programs.reason(error)
        return result


def ngl_flags(count: int, layers: int) -> list[str]:
    """The head and the last `count - 1` layers on the GPU as a whole; one more than there are layers is all."""
    return ["-ngl", str(EVERYTHING if count > layers else count)]


def ot_flags(count: int, layers: int) -> list[str]:
    """All attention, the head and the FFNs of the first `count` layers on the GPU."""
    flags = ["-ngl", str(EVERYTHING)]
    if count < layers:
        names = "|".join(map(str, range(count, layers)))
        flags += ["-ot", rf"blk\.({names})\.ffn_(up|gate|down)\.weight=CPU"]
    return flags


def ncmoe_flags(count: int, layers: int) -> list[str]:
    """All but experts on the GPU, and those of the last `count` layers."""
    return ["-ngl", str(EVERYTHING), "-ncmoe", str(layers - count)]


WAYS: dict[str, tuple[Callable[[int, int], list[str]], int]] = {
    "ngl": (ngl_flags, 1),
    "ot": (ot_flags, 0),
    "ncmoe": (ncmoe_flags, 0),
}
"""Of llama.cpp: flags for a count of units on the GPU, and units beyond the layers."""
DENSE_WAYS = ("ngl", "ot")
CACHE_FLAG = "--moe-cache-mib"  # of builds of llama.cpp that cache experts on the GPU


def limit(peer: Peer, model: Path, way: str, layers: int, budget: int, each: int, threads: int) -> Result:
    """The most units on the GPU within the budget, found by trying, and the better of two numbers of threads.

    each: about the bytes of a unit, for the first guesses.
    """
    flags, more = WAYS[way]
    fits, exceeds = -1, layers + more + 1
    at = min(layers + more, budget // each)
    tries: list[Result] = []
    known: dict[int, int] = {}
    while exceeds - fits > 1 and len(tries) < MOST_TRIES:
        tries.append({"count": at})
        try:
            tries[-1]["tok_s"], used = peer.alone(model, threads, flags(at, layers), 8)
        except RuntimeError as error:  # most likely the GPU's memory
            tries[-1]["error"] = programs.reason(error)
            exceeds, at = at, (fits + at) // 2
            continue
        if used is None:
            raise RuntimeError("nvidia-smi does not say how much VRAM is in use")
        tries[-1]["vram_used"] = known[at] = used
        fits, exceeds = (at, exceeds) if used <= budget else (fits, at)
        if len(known) > 1 and known[max(known)] > known[min(known)]:
            each = (known[max(known)] - known[min(known)]) // (max(known) - min(known))
        at = min(exceeds - 1, max(fits + 1, at + (budget - used) // max(1, each)))
    if fits < 0:
        raise RuntimeError(f"nothing fits into {budget} bytes: {tries}")
    best: Result = {"count": fits, "flags": flags(fits, layers), "tries": tries}
    return best | best_threads(peer, model, best["flags"], threads)


def best_threads(peer: Peer, model: Path, flags: list[str], threads: int) -> Result:
    """All of them, or half of them where that is faster."""
    rates = {n: peer.alone(model, n, flags, 16)[0] for n in sorted({threads, max(1, threads // 2)})}
    return {"threads": max(rates, key=lambda n: rates[n]), "tok_s_by_threads": rates}


def cached_limit(peer: Peer, model: Path, layers: int, budget: int, threads: int) -> Result:
    """A cache of experts on the GPU that fills what all but experts leaves of the budget, as far as a try tells, and
    the better of two numbers of threads."""
    flags = ncmoe_flags(0, layers)
    _, beside = peer.alone(model, threads, flags, 8)
    room = None if beside is None else (budget - beside) >> 20
    if room is None or room < 1:
        raise RuntimeError(f"no room for a cache: {beside} of {budget} bytes are in use")
    tries: list[Result] = []
    while len(tries) < MOST_TRIES and room > 0:
        cached = [*flags, CACHE_FLAG, str(room)]
        rate, used = peer.alone(model, threads, cached, 16)
        assert used is not None
        tries.append({"count": room, "tok_s": rate, "vram_used": used})
        if used <= budget:
            return {"count": room, "flags": cached, "tries": tries} | best_threads(peer, model, cached, threads)
        room += (budget - used) >> 20
    raise RuntimeError(f"no cache fits into {budget} bytes: {tries}")


# ---------------------------------------------------------------- jobs


@dataclass(kw_only=True)
class Measurement(Jobs):
    """What is measured."""

    arguments: argparse.Namespace
    peer: Peer | None


@dataclass(kw_only=True)
class LocalMeasurement(Measurement):
    """A measurement whose jobs are done in this process. before: bytes in use on the GPU before it used that."""

    before: int | None


M = TypeVar("M", bound=LocalMeasurement)


def jobs(measurement: Measurement, name: str) -> Iterator[tuple[str, Callable[[], Result]]]:
    """(key, work) of all jobs on a model but making it, in the order in which they are done."""
    arguments, peer = measurement.arguments, measurement.peer
    made = recipes.recipe(name, arguments.scale, arguments.distinct)
    model = recipes.path_of(arguments.models, name, arguments.scale)
    layers, sections = made.plan.n_layers, arguments.sections

    def vram() -> int | float:
        """Bytes; at the tiny scale room for a share of the neurons. Known when the model is there."""
        if not made.vram:
            return 0.5
        card = measurement.done[f"card/{name}"]
        if not arguments.times:
            return int(card["vram"])
        shared = card["fixed"]["head"] + checkpoint_model(open_checkpoint(model)).tables  # by all layers
        whole = shared + (model.stat().st_size - shared) / made.part
        return worker.part_of(int(whole / arguments.times), sum(card["fixed"].values()), made.part)

    def ours(policy: str, selector: str, share: float, batches: list[int], trace: Path | None = None) -> Result:
        task = basis(arguments, model) | {"what": "decode", "vram": vram(), "policy": policy, "selector": selector}
        task["vram"] = int(share * task["vram"]) if made.vram else share * task["vram"]
        task |= {"batches": batches, "tokens": arguments.tokens}
        task["most"] = max(arguments.batches)  # so that all runs have the same cache
        with Vram(arguments.gpu) as used:
            result = run(task | {"trace": None if trace is None else str(trace)})
        return result | {"vram_used": used.peak}

    def theirs(way: str, prompt: bool = False) -> Result:
        fitting = measurement.done.get(f"peer/{name}/{way}", {})
        if peer is None or "flags" not in fitting:
            raise RuntimeError(f"no flags are known to fit: section peer, job peer/{name}/{way}")
        if prompt:
            return peer.prompt(model, fitting, arguments.prompt)
        return peer.measure(model, fitting, arguments.batches, arguments.tokens)

    def our_prompt() -> Result:
        task = basis(arguments, model) | {"what": "prefill", "vram": vram(), "policy": "time"}
        return run(task | {"selector": "predicted", "prompt": arguments.prompt, "ways": arguments.prompt_ways})

    def found_limit(way: str) -> Result:
        assert peer is not None
        each = max(1, model.stat().st_size // (layers + 1))
        return limit(peer, model, way, layers, int(vram()), each, cpu.choose_threads(arguments.threads)[0])

    ways = arguments.ways if peer is not None and made.vram else ()
    limits = [(f"peer/{name}/{way}", lambda way=way: found_limit(way)) for way in ways if "peer" in sections]
    if "kernel" in sections:
        task = basis(arguments, model) | {"what": "kernel", "tokens": list(KERNEL_TOKENS)}
        yield f"kernel/{name}", lambda: run(task)
    for number in range(arguments.rounds):
        each: list[tuple[str, Callable[[], Result]]] = []
        if "decode" in sections:
            trace = arguments.out.with_name(f"{arguments.out.stem}-{name}-trace.json") if number == 0 else None
            plan = lambda trace=trace: ours("time", "predicted", 1, arguments.batches, trace)  # noqa: E731
            each.append((f"decode/{name}/{number}/powerinfer", plan))
            each += [(f"decode/{name}/{number}/{LLAMA_CPP}-{way}", lambda way=way: theirs(way)) for way in ways]
        if "ablation" in sections and number < arguments.ablation_rounds:
            steps = [(step, lambda step=step: ours(step, "predicted", 1, [1])) for step in STEPS]
            steps.append(("exact", lambda: ours("time", "exact", 1, [1])))
            each += [(f"ablation/{name}/{number}/{step}", work) for step, work in steps]
        if "prefill" in sections:
            each.append((f"prefill/{name}/{number}/powerinfer", our_prompt))
            each += [(f"prefill/{name}/{number}/{LLAMA_CPP}-{way}", lambda way=way: theirs(way, True)) for way in ways]
        if number == 0:  # ours first: where time ends early, the others can be measured another day
            each.sort(key=lambda job: LLAMA_CPP in job[0])
            first = next((at for at, job in enumerate(each) if LLAMA_CPP in job[0]), len(each))
            each[first:first] = limits
        shift = number % max(1, len(each))
        yield from each[shift:] + each[:shift]
    if "budget" in sections:
        for share in arguments.shares:
            yield f"budget/{name}/{share:g}", lambda share=share: ours("time", "predicted", share, [1])


def measure(measurement: Measurement) -> bool:
    """Do what is left of all models. False where time was over before all was done."""
    arguments = measurement.arguments
    for name in arguments.names:
        left = [(key, work) for key, work in jobs(measurement, name) if measurement.wanted(key)]
        model = recipes.path_of(arguments.models, name, arguments.scale)
        make_alone = set(arguments.sections) == {"make"} and not bundles_of(model).exists()
        if left or make_alone or ("make" in arguments.sections and measurement.wanted(f"make/{name}")):
            if measurement.over(f"make/{name}"):
                return False
            make = basis(arguments, model) | {"what": "make", "name": name, "scale": arguments.scale}
            make["distinct"] = arguments.distinct
            if measurement.wanted(f"make/{name}") or not bundles_of(model).exists():
                measurement.do(f"make/{name}", lambda make=make: run(make))
            if "error" in measurement.done[f"make/{name}"]:
                continue
        if left and not before(measurement, name):
            return False
        if left and (failed := failed_before(measurement, name)):
            print(f"{name}: no job can be done, {failed}", file=sys.stderr)
            left = []
        for key, work in left:
            if measurement.over(key):
                return False
            measurement.do(key, work)
        if not arguments.keep and set(arguments.sections) > {"make"}:
            prepared.remove(model)
    return True


def before(measurement: Measurement, name: str) -> bool:
    """What the jobs on a model need, until some of it fails. False where time was over."""
    arguments = measurement.arguments
    model, made = recipes.path_of(arguments.models, name, arguments.scale), recipes.recipe(name, arguments.scale)
    of_all = basis(arguments, model)
    card = of_all | {"what": "card", "vram": made.vram, "part": made.part, "policy": "time", "selector": "predicted"}
    card |= {"most": max(arguments.batches), "tokens": arguments.tokens}
    todo = {"hardware": of_all | {"what": "hardware"}, f"reference/{name}": of_all | {"what": "reference"}}
    if made.vram:
        todo[f"card/{name}"] = card
    for key, task in todo.items():
        lost = key.startswith("reference") and not worker.reference_of(model).exists()
        if measurement.wanted(key) or lost:
            if measurement.over(key):
                return False
            measurement.do(key, lambda task=task: run(task))
        if "error" in measurement.done[key]:
            break
    return True


def failed_before(measurement: Measurement, name: str) -> str:
    """Which of what the jobs on a model need failed, and why; "" where none of it did."""
    for key in ("hardware", f"reference/{name}", f"card/{name}"):
        if error := measurement.done.get(key, {}).get("error"):
            return f"{key} failed: {error}"
    return ""


def basis(arguments: argparse.Namespace, model: Path) -> Result:
    """What every task of a model has."""
    return {"model": str(model), "gpu": arguments.gpu, "threads": arguments.threads, "ram": arguments.ram}


def bundles_of(model: Path) -> Path:
    """The last file of a model's making."""
    return Path(f"{model}.powerinfer") / "neurons.safetensors"


def begin(measurement: type[M], arguments: argparse.Namespace, kind: str, settings: Result) -> M:
    """A measurement with these arguments, which waits for no quiet and does again what failed; makes the folder of
    models."""
    document = opened(arguments.out, kind, settings | {"device": gpu_name(arguments.gpu)})
    peer = None
    if arguments.peer is not None:
        peer = Peer(arguments.peer, arguments.gpu, [])
        document["peer"] = programs.peer_facts(arguments.peer)
    arguments.models.mkdir(parents=True, exist_ok=True)
    with Vram(arguments.gpu) as unused:
        pass
    given: dict[str, Any] = {"document": document, "arguments": arguments, "peer": peer, "before": unused.before}
    return measurement(out=arguments.out, quiet=0, retry=True, **given)


def gpu_name(gpu: str) -> str:
    """Of the device, or that it is stood in for."""
    if gpu == "cpu":
        return "none: torch's CPU device stands in"
    index = gpu.partition(":")[2] or "0"
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return machine.first_line("nvidia-smi", "-i", index, *query) or "unknown"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = tuple(recipes.RECIPES)
    parser.add_argument("--models", type=Path, required=True, metavar="FOLDER", help="where the models are made")
    parser.add_argument("--names", nargs="+", choices=known, default=known, help="models; default: all")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--scale", default="own", help="share of layers and budget, or tiny (default: %(default)s)")
    parser.add_argument("--gpu", default="cuda", help="cuda, cuda:1, or cpu, which stands in (default %(default)s)")
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="of llama.cpp's binaries, built with CUDA")
    parser.add_argument("--peer-flags", default="", metavar="FLAGS", help="more, that both of its programs take")
    ram = "RAM that there is, where it is not all there before it is used (such as 100GiB)"
    parser.add_argument("--ram", type=read_size, metavar="SIZE", help=ram)
    parser.add_argument("--threads", type=int, default=0, help="of both; 0: ours by itself, the peer's every core")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8, 32), help="requests together")
    parser.add_argument("--tokens", type=int, default=64, help="decoded by one request alone; several: 31 at most")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt; default: %(default)s")
    both = ("streamed", "cpu")
    parser.add_argument("--prompt-ways", nargs="+", choices=both, default=both, help="cold neurons; default: both")
    parser.add_argument("--ways", nargs="+", choices=DENSE_WAYS, default=DENSE_WAYS, help="of llama.cpp; default: both")
    parser.add_argument("--distinct", type=int, default=0, metavar="N", help="layers that differ; 0: all (default)")
    parser.add_argument("--times", type=float, metavar="N", help="the model's bytes, as a multiple of the card's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ablation-rounds", type=int, default=1)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the budget; default: %(default)s")
    parser.add_argument("--quiet", type=float, default=4.0, help="seconds to wait for a quiet machine before a job")
    parser.add_argument("--minutes", type=float, default=0, help="begin no job that might end later; 0: no limit")
    parser.add_argument("--retry", action="store_true", help="do failed jobs again")
    parser.add_argument("--keep", action="store_true", help="keep the models")
    parser.add_argument("--out", type=Path, default=results.RESULTS / "hybrid.json")
    arguments = parser.parse_args()
    for name in arguments.names:
        try:
            recipes.recipe(name, arguments.scale, arguments.distinct)
        except ValueError as error:
            parser.error(str(error))
    arguments.batches = list(arguments.batches)
    return arguments


def main() -> int:
    arguments = parse()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # models are made by threads of their own
    settings = {"scale": arguments.scale, "gpu": arguments.gpu, "device": gpu_name(arguments.gpu)}
    settings |= {
        name: getattr(arguments, name)
        for name in ("threads", "batches", "tokens", "prompt", "peer_flags", "ram", "times", "distinct")
    }
    document = opened(arguments.out, "hybrid", settings)
    models = document.setdefault("models", {})
    for name in arguments.names:
        if name not in models:  # it takes some seconds
            models[name] = recipes.recipe(name, arguments.scale, arguments.distinct).document()
            models[name]["whole_layers"] = recipes.RECIPES[name].layers
    peer = None
    if arguments.peer is not None:
        peer = Peer(arguments.peer, arguments.gpu, arguments.peer_flags.split())
        document["peer"] = programs.peer_facts(arguments.peer)
    arguments.models.mkdir(parents=True, exist_ok=True)
    left = {name: getattr(arguments, name) for name in ("out", "quiet", "minutes", "retry")}
    if not measure(Measurement(document=document, arguments=arguments, peer=peer, **left)):
        print("time is over: start it again with the same --out to go on", file=sys.stderr)
    return int(any("error" in job for job in document["jobs"].values()))


if __name__ == "__main__":
    sys.exit(main())
