"""What to run on a machine with a GPU that is there for a short time: few calls of ten minutes, each by itself.

    python -m benchmarks.hybrid.visit short --out DIR         for 13 minutes in all, in two runs of this call: below
    python -m benchmarks.hybrid.visit kernels --out DIR       the environment, tests on the GPU, kernels, launches
    python -m benchmarks.hybrid.visit llama.cpp --out DIR     builds the peer for this GPU
    python -m benchmarks.hybrid.visit falcon --out DIR        Falcon-40B in F16, 24 GB: decode, ablation; the peer;
                                                              a prompt of 2,048 tokens at twice the budget
    python -m benchmarks.hybrid.visit drelu --out DIR         7B, all on the GPU: decode, prompts, tiles; the peer
    python -m benchmarks.hybrid.visit reglu --out DIR         ReGLU-70B in Q4_0, 24 GB: decode; the peer
    python -m benchmarks.hybrid.visit experts --out DIR       Q4_0 experts in 8, 12 and 24 GB: decode; the peer
    python -m benchmarks.hybrid.visit CALL --trial ...        the same at a tiny scale, on torch's CPU device

A call's steps check first, then time (but for the machine's rates, which plans need): what is timed after a check that
failed is left out (but for --regardless), and no job times a model whose logits are not the CPU's. A step has a time
limit, the call --minutes. Every step writes what it has as it goes: into --work, where the next call goes on, and
copied to --out every ten seconds, so that little is lost when the call is killed. What is done is not done again,
unless it failed; what failed comes after what was not begun. A step that the end of the call cuts keeps its place, and
none is begun with less than half of the time that it is expected to take (`Step`).

`short` is what to begin with: what was never run on a GPU, whole models, and both engines' prompts, what decides most
first; what no time is left for is at its end. Layers of its models repeat (--distinct), but for ReGLU-70B's, and models
are removed behind their last step. On another machine of the same kind the second run goes on where --work has a copy
of what the first one's --out got, and --rates has its cache/*.json; models are made again before the first step that
needs them. short_table.py makes a table of that.

Models are made in --work, by default in memory where that has room, a folder for each call, and kept: Falcon's take 39
GB there, the 7B model 26 GB, ReGLU-70B's 20 GB, so remove what is not needed any more (--clear removes those of other
calls first). One that was removed is made again if a step still needs it. --ram says how much RAM there is beside them,
where that is not known before it is used. On a machine without a network: `carry.py` brings what is missing.

Where there is less time, --only takes some steps of a call, --scale fewer layers, --rates what such a machine was
measured to do before, --peer programs that were built elsewhere. On an H200 with 16 cores (2026-11-26): rates 53 s;
800 tests 142 s; Falcon-40B at --scale 0.1: made in 36 s, first decode 71 s with all that it needs, three of the
ablation 66 s, the peer's limits and decode 90 s; kernels of neurons of one shape 10 s. A day later: dReLU at --scale
0.25 made in 26 s, at 0.5 in 48, decode 45, the peer 11; ReGLU at 0.1 made in 82, decode 50, the peer 34; eight layers
of experts made in 40, two cards 47, the peer 25; matrices and neurons of five types with 1 to 8 tokens 45 s."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, results

CALLS = ("short", "kernels", "llama.cpp", "falcon", "drelu", "reglu", "experts")
ROOM = 42 << 30  # bytes of the largest model, with what is prepared for it
SLOWER = 5  # on torch's CPU device, and beside other programs
LEFT = 5.0  # seconds of a call that remain for writing down
SLICE = 10.0  # seconds after which what a step has written is copied
KERNEL_TESTS = (
    "test_gpu_kernels", "test_gpu_latent", "test_gpu_experts", "test_gpu_delta", "test_gpu_mamba",
    "test_gpu_short_conv", "test_gpu_panels", "test_gpu_pages", "test_gpu_words", "test_gpu_undone_states",
    "test_gpu_candidates",
)  # fmt: skip
LAYER_TESTS = (
    "test_gpu_layers", "test_gpu_wiring", "test_hybrid", "test_stage", "test_streamed", "test_hybrid_experts",
    "test_split_experts_on_disk", "test_split_neurons_on_disk", "test_gpu_bytes", "test_gpu_rates",
    "test_unlike_layers", "test_topk", "test_embeddings", "test_dense_hybrids", "test_column_order", "test_gemma3n",
    "test_gpu_drafts", "test_gpu_draft_model", "test_eagle", "test_several_gpus", "test_spread_experts",
    "test_working_memory", "test_prompt_recordings",
)  # fmt: skip
NEW_TESTS = (
    "test_host_calls", "test_flags", "test_gpu_candidates", "test_stage", "test_streamed", "test_several_gpus",
    "test_spread_experts", "test_hybrid_experts", "test_gpu_pages", "test_gpu_kernels", "test_gpu_experts",
)  # fmt: skip
NEW_ONLY = "cuda and (test_attention or not test_gpu_kernels) and (prompts or not test_gpu_experts)"
"""Of what was never run on a GPU: flags, exchange in place, steps ahead, registered memory, experts and attention of
prompts, several GPUs."""
SHAPES = {
    "falcon-40b": (8192, 32768, ("--plain",)),
    "drelu-7b": (4096, 14336, ("--activation", "drelu")),
    "reglu-70b": (8192, 28672, ()),
}
"""Width and neurons of a layer, and how gpu_kernels.py is told of its FFN."""
PROMPT, TIMES = 2048, 2  # tokens; the weights' bytes, as a multiple of the budget
CHECKER = "compute-sanitizer"
MOST_WORKERS = 12  # of the tests: each has a CUDA context
PROBE = """
import json, os, platform, shutil, sys
import torch, numpy
from powerinfer.kernels import cpu
from powerinfer.hardware.gpu_rates import software
told = {"python": sys.version.split()[0], "numpy": numpy.__version__, "isa": cpu.choose_isa(None)[0]}
told |= {"kernel": platform.release(), "cores": os.cpu_count(), "shm_gib": shutil.disk_usage("/dev/shm").free >> 30}
told |= {name: shutil.which(name) for name in ("nvcc", "cmake", "ninja", "c++", "nvidia-smi")}
told |= software(sys.argv[1])
if torch.cuda.is_available():
    about = torch.cuda.get_device_properties(0)
    told |= {"gpu_gib": about.total_memory >> 30, "processors": about.multi_processor_count}
    told |= {"l2_mib": about.L2_cache_size >> 20, "cuda": torch.version.cuda}
    told |= {"capability": torch.cuda.get_device_capability(0)}
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Step:
    """A program. seconds: that it may take; needs: steps without which its figures mean nothing; makes: a folder that
    it fills; expected: seconds that it is expected to take, 0: unknown; after: steps behind which it comes, whatever
    became of them; models: a folder that is removed when all steps that have it ended, well or not."""

    name: str
    command: tuple[str, ...]
    seconds: int
    needs: tuple[str, ...] = ()
    makes: Path | None = None
    expected: int = 0
    after: tuple[str, ...] = ()
    models: Path | None = None


def module(name: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *map(str, arguments))


def steps(arguments: argparse.Namespace) -> Iterator[Step]:
    """Of a call, in order."""
    work, trial = arguments.work, arguments.trial
    models, gpu = models_of(work, arguments.call), "cpu" if trial else "cuda"
    built = next(work.glob("llama.cpp/build-cuda-*/bin/llama-bench"), None)  # the folder alone is there while it builds
    peer = arguments.peer or (None if built is None else built.parent)
    ram = () if arguments.ram is None else ("--ram", arguments.ram)

    def tests(names: tuple[str, ...], tried: str) -> tuple[str, ...]:
        """All of them on the GPU; in a trial one of the first file."""
        files = [f"tests/{name}.py" for name in (names[:1] if trial else names)]
        chosen = f"cpu and {tried}" if trial else "cuda"
        # what other versions of pytest and of libraries warn of says nothing about this engine
        quiet = ("-o", "minversion=0", "-o", "filterwarnings=", "-o", "addopts=", "-p", "no:cacheprovider")
        workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        cases = "--cases", "sample" if trial else "all"
        workers = 0 if trial else workers
        return module("pytest", "-v", "-rfE", "--tb=short", *quiet, *cases, "-n", workers, "-k", chosen, *files)

    def compare(
        name: str,
        *sections: str,
        with_peer: bool = False,
        scale: str = "own",
        out: str = "",
        more: tuple[Any, ...] = (),
        models: Path = models,
    ) -> tuple[str, ...]:
        given: list[object] = ["--models", models, "--names", name, "--gpu", gpu, "--quiet", 0, "--retry", "--keep"]
        size = arguments.scale if scale == "own" else scale
        file = "-".join(filter(None, (name, out, size if size != "own" or not out else "")))
        given += ["--scale", "tiny" if trial else size, "--out", work / f"{file}.json", "--rounds", 1]
        given += ["--sections", *sections, *ram, *more]
        if trial:
            given += ["--tokens", 4, "--batches", 1, 2, "--prompt", 48, "--threads", 1]
        if with_peer and peer is not None:
            given += ["--peer", peer]
        return module("benchmarks.hybrid.compare", *given)

    def kernels(name: str, *more: object) -> tuple[str, ...]:
        """Those of a shape."""
        width, neurons, ffn = SHAPES[name]
        sizes = ("--d-model", 256 if trial else width, "--d-ff", 320 if trial else neurons)
        return module("benchmarks.hybrid.gpu_kernels", "--device", gpu, *sizes, *ffn, *more)

    def whole(file: str, *more: object) -> tuple[str, ...]:
        """Whole models, in a folder and a document of that name."""
        given: list[object] = ["--models", models / file, "--gpu", gpu, "--out", work / f"{file}.json", *ram, *more]
        if trial:
            given += ["--tiny", "--tokens", 4, "--threads", 1]
        return module("benchmarks.hybrid.whole", *given)

    with_peer = () if peer is None else ("--peer", peer, "--peer-only")
    prompts = ("--prompts", *((40,) if trial else (512, PROMPT)))
    if arguments.call == "short":
        yield Step("probe", (sys.executable, "-c", PROBE, gpu), 60, expected=8)
        layers = ("--layers", 3 if trial else 48)
        exchange = module("benchmarks.hybrid.exchange", "--device", gpu, *layers, "--out", work / "exchange.json")
        yield Step("exchange", exchange, 60, expected=15)
        yield Step("new tests", tests(NEW_TESTS, "order") + (() if trial else ("-k", NEW_ONLY)), 120, expected=60)
        if not trial:
            yield Step("hardware", module("powerinfer", "measure", "--gpu", gpu), 150, expected=55)
        few = models / "layers"
        cut: list[object] = ["--models", few, "--gpu", gpu, "--out", work / "experts.json", *ram, "--distinct", 4]
        cut += ["--tiny"] if trial else ["--layers", 8]
        layers = module("benchmarks.hybrid.experts", *cut, "--cards", 8, 12)
        yield Step("layers", layers, 150, makes=few, expected=65, models=few)
        cards = ("--cards", *((8,) if trial else (8, 12)))
        folder = models / "whole"
        yield Step("whole experts", whole("whole", *cards, *prompts), 240, expected=75, models=folder)
        if peer is not None:
            theirs = whole("whole", *cards, *prompts, *with_peer)
            yield Step("whole experts, peer", theirs, 340, expected=180, models=folder)
        short = whole("whole", *cards[:2], *prompts, "--chunks", 32 if trial else 512)
        yield Step("chunks of 512", short, 90, expected=25, models=folder)
        more, folder = ("--distinct", 4, "--batches", 1), models / "drelu"
        dense = compare("drelu-7b", "make", "decode", scale="1", more=more, models=folder)
        yield Step("drelu", dense, 280, expected=120, models=folder)
        if peer is not None:
            sections = ("make", "decode", "peer")
            dense = compare("drelu-7b", *sections, with_peer=True, scale="1", more=more, models=folder)
            yield Step("drelu, peer", dense, 120, expected=20, models=folder)
        local = ("--locality", 0.6, "--tokens", 256)
        folder = models / "local"
        tried = ("--policies", "lru" if trial else "auto")  # on torch's CPU device a trial takes minutes
        yield Step("locality", whole("local", *local, *cards, *tried), 200, expected=80, models=folder)
        if peer is not None:
            theirs = whole("local", *local, *cards, *with_peer)
            yield Step("locality, peer", theirs, 160, expected=50, models=folder)
        policies = ("static", "dynamic") if trial else ("static", "lru", "lfu", "dynamic")
        every = whole("local", *local, *cards[:2], "--policies", *policies)
        long = ("--shape", "llama-3.3-70b", "--times", TIMES, "--prompts", prompts[-1])
        long += () if trial else ("--layers", 20)
        yield Step("dense prompt", whole("dense", *long), 200, expected=60, models=models / "dense")
        if peer is not None:
            theirs = whole("dense", *long, *with_peer)
            yield Step("dense prompt, peer", theirs, 200, expected=60, models=models / "dense")
        yield Step("policies", every, 160, expected=60, models=folder)
        some = ("--tokens", 1, "--kernels", "neurons", "fused", "predict", "attention", "--contexts")
        some += (64,) if trial else (2048, 32768)
        for name, types in (("reglu-70b", "Q4_0/Q4_0X32"), ("drelu-7b", "F16/F16")):
            given = (*some, "--types", types, "Q8_0", "--out", work / f"kernels-{name}.json")
            yield Step(f"kernels {name}", kernels(name, *given), 90, expected=20)
        sizes = (256, 1, 40) if trial else (2048, 1, 512, PROMPT)
        given = ("--d-model", sizes[0], "--kernels", "experts", "--tokens", *sizes[1:])
        out = ("--device", gpu, "--out", work / "kernels-experts.json")
        yield Step("kernels experts", module("benchmarks.hybrid.gpu_kernels", *given, *out), 60, expected=20)
        made = few / f"qwen3-30b-a3b-{'tiny' if trial else 8}.gguf"
        given = ("--gpu", gpu, *(() if trial else ("--vram", "2GiB")), "--out", work / "driver-error.json")
        failing = module("benchmarks.hybrid.driver_error", made, *given)
        yield Step("driver error", failing, 70, expected=25, after=("layers",), models=few)
        checker = shutil.which(CHECKER)
        if trial or checker is not None:
            some = tests(("test_host_calls", "test_flags", "test_gpu_pages"), "order")
            watched = () if trial else (str(checker), "--error-exitcode", "9", "--target-processes", "all")
            yield Step("memory checker", (*watched, *some, "-n", "0"), 150, expected=60)
        folder = models / "reglu"
        reglu = compare("reglu-70b", "make", "decode", scale="0.1", more=("--batches", 1), models=folder)
        yield Step("reglu", reglu, 300, expected=100, models=folder)
    elif arguments.call == "kernels":
        yield Step("probe", (sys.executable, "-c", PROBE, gpu), 90)
        yield Step("host calls", tests(("test_host_calls", "test_flags"), "order"), 90)
        if not trial:  # every later call needs it, so it comes before what may fail or take long
            yield Step("hardware", module("powerinfer", "measure", "--gpu", gpu), 300)
        yield Step("kernel tests", tests(KERNEL_TESTS, "holds_the_values"), 200)
        for name in SHAPES:  # all kernels of the first, then those that depend on the neurons
            some = () if name == "falcon-40b" else ("--kernels", "neurons", "fused", "predict")
            given = ("--tokens", 1, 8, 32, *some, "--out", work / f"kernels-{name}.json")
            yield Step(f"kernels {name}", kernels(name, *given), 150, ("kernel tests",))
        yield Step("layer tests", tests(LAYER_TESTS, "unused_pages"), 300)
        small = "drelu-7b"
        yield Step("small model", compare(small, "make", scale="0.1"), 90, makes=models)
        made = models / f"{small}-{'tiny' if trial else '0.1'}.gguf"
        launches = ("--gpu", gpu, "--selector", "predicted", "--steps", 6 if trial else 32)
        yield Step("launches", module("benchmarks.hybrid.launches", made, *launches), 60, ("small model",))
    elif arguments.call == "llama.cpp":
        capability = arguments.capability
        folder = work / "llama.cpp"
        if arguments.source is not None and not (folder / "source").exists():
            unpack = (
                f"import tarfile; tarfile.open({str(arguments.source)!r}).extractall({str(folder)!r}, filter='data')"
            )
            yield Step("source", (sys.executable, "-c", unpack), 60)
        yield Step("build", module("benchmarks.lib.llama_cpp", folder, "--cuda", capability), 570)
    elif arguments.call == "falcon":
        yield Step("model", compare("falcon-40b", "make"), 420, makes=models)
        yield Step("ours", compare("falcon-40b", "decode", "ablation", "kernel"), 500, ("model",))
        if peer is not None:
            yield Step("peer", compare("falcon-40b", "decode", "peer", with_peer=True), 500, ("model",))
        more = ("--prompt", PROMPT, "--times", TIMES)
        prompt = compare("falcon-40b", "prefill", "peer", with_peer=True, out="prompt", more=more)
        yield Step("prompt", prompt, 500, ("model",))
    elif arguments.call == "drelu":
        yield Step("model", compare("drelu-7b", "make"), 300, makes=models)
        yield Step("ours", compare("drelu-7b", "decode", "prefill", "kernel"), 400, ("model",))
        if not trial:
            swept = (
                "--sweep",
                "--sweep-seconds",
                100,
                "--kernels",
                "neurons",
                "fused",
                "--types",
                "F16/F16",
                "--tokens",
                1,
            )
            yield Step("tiles", kernels("drelu-7b", *swept, "--out", work / "tiles.json"), 250)
        if peer is not None:
            yield Step("peer", compare("drelu-7b", "decode", "prefill", "peer", with_peer=True), 400, ("model",))
    elif arguments.call == "reglu":
        yield Step("model", compare("reglu-70b", "make"), 560, makes=models)
        yield Step("ours", compare("reglu-70b", "decode", "kernel"), 400, ("model",))
        if peer is not None:
            yield Step("peer", compare("reglu-70b", "decode", "peer", with_peer=True), 500, ("model",))
    else:
        those: list[object] = ["--models", models, "--gpu", gpu, "--out", work / "experts.json", *ram]
        those += ["--tiny"] if trial else []
        yield Step("model", module("benchmarks.hybrid.experts", *those, "--make"), 560, makes=models)
        yield Step("ours", module("benchmarks.hybrid.experts", *those), 400, ("model",))
        if peer is not None:
            yield Step("peer", module("benchmarks.hybrid.experts", *those, "--peer", peer), 560, ("model",))


def models_of(work: Path, call: str) -> Path:
    """The folder of a call's models."""
    return work / "models" / call


def default_work(memory: Path = Path("/dev/shm"), disk: Path = Path("/tmp")) -> Path:
    """In memory, where a call has begun there already or a model has room; else on disk."""
    own = memory / "powerinfer"
    roomy = memory.is_dir() and shutil.disk_usage(memory).free >= ROOM
    return own if own.exists() or roomy else disk / "powerinfer"


class Visit:
    """The steps of a call. work: what is kept; out: where copies go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.begun = time.time()
        self.ends = time.monotonic() + 60 * arguments.minutes - LEFT
        self.file = arguments.work / "visit.json"
        self.log = arguments.work / f"{arguments.call}.log"
        self.done: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self) -> bool:
        """Whether every step has succeeded."""
        for step in self.left():
            key = self.key(step.name)
            left = self.ends - time.monotonic()
            needs = () if self.arguments.regardless else step.needs
            missing = [one for one in needs if not self.succeeded(one)]
            least = 1 if self.arguments.trial else max(1, step.expected / 2)
            if missing or left < least:
                state = "failed" if all(self.key(one) in self.done for one in missing) else "was not run"
                why = f"{', '.join(missing)} {state}" if missing else "no time left"
                self.done[key] = self.done.get(key, {}) | {"rc": None, "why": why}  # it still was begun, if it was
            else:
                longest = step.seconds * (SLOWER if self.arguments.trial else 1)
                self.done[key] = self.one(step, min(longest, left), left < longest)
            self.written()
            self.remove_models()
        self.told()
        return all(self.succeeded(step.name) for step in self.chosen())

    def chosen(self) -> list[Step]:
        """The steps of the call, or those of them that were asked for."""
        every = [*steps(self.arguments)]
        only = self.arguments.only or [step.name for step in every]
        if unknown := set(only) - {step.name for step in every}:
            sys.exit(
                f"{self.arguments.call} has no step {sorted(unknown)[0]!r}: {', '.join(one.name for one in every)}"
            )
        return [step for step in every if step.name in only]

    def key(self, name: str) -> str:
        """Of a step of this call, among what is done: models of other scales are others."""
        scale = "" if self.arguments.scale == "own" else f" {self.arguments.scale}"
        return f"{self.arguments.call}{scale}/{name}"

    def succeeded(self, name: str) -> bool:
        return self.done.get(self.key(name), {}).get("rc") == 0

    def ended(self, name: str) -> bool:
        """Whether a step came to its end, well or not: the end of a call did not cut it."""
        found = self.done.get(self.key(name), {})
        return "seconds" in found and not found.get("cut")

    def remove_models(self) -> None:
        """Remove the models of which every step of the call ended; one that is done again makes its own again."""
        every = [*steps(self.arguments)]
        waiting = {step.models for step in every if not self.ended(step.name)}
        for folder in {step.models for step in every} - waiting - {None}:
            shutil.rmtree(folder, ignore_errors=True)

    def left(self) -> list[Step]:
        """The steps to do: those that failed, and those behind them, after those that were not begun, or cut; and those
        that make what is gone, before the first that needs it."""
        left, last = [step for step in self.chosen() if not self.succeeded(step.name)], list[str]()
        for step in left:
            if self.ended(step.name) or {*step.needs, *step.after} & set(last):
                last.append(step.name)
        left.sort(key=lambda step: step.name in last)
        for step in self.chosen():
            if self.succeeded(step.name) and step.makes is not None and not step.makes.exists():
                behind = (at for at, other in enumerate(left) if step.name in (*other.needs, *other.after))
                if (at := next(behind, None)) is not None:
                    left.insert(at, step)
        return left

    def one(self, step: Step, limit: float, short: bool) -> dict[str, Any]:
        """A step's exit status and seconds; its output goes to the log as it comes. short: the limit is the call's end,
        and less than the step may take."""
        print(f"--- {step.name}", flush=True)
        begin, at = time.monotonic(), self.log.stat().st_size if self.log.exists() else 0
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "POWERINFER_CACHE": str(self.arguments.work / "cache")}
        environment["TRITON_CACHE_DIR"] = str(self.arguments.work / "triton")
        with self.log.open("ab") as log:
            log.write(f"--- {step.name}: {' '.join(step.command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                step.command, stdout=log, stderr=subprocess.STDOUT, cwd=machine.ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                while (left := begin + limit - time.monotonic()) > SLICE:
                    try:
                        process.wait(SLICE)
                        break
                    except subprocess.TimeoutExpired:
                        self.copied()
                rc: int | None = process.wait(max(0.0, left))
                why = ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                ended = "cut by the call's end after" if short else "took more than"
                rc, why = None, f"{ended} {limit:.0f} s"
        with self.log.open("rb") as log:
            log.seek(at)
            text = log.read().decode(errors="replace")
        last = [line for line in text.splitlines() if line.strip()][-1][-2000:]
        found = {"rc": rc, "why": why, "seconds": round(time.monotonic() - begin, 1), "last": last}
        return found | ({"cut": True} if rc is None and short else {})

    def written(self) -> None:
        """What is known so far, here and where copies go."""
        results.write_json(self.file, self.done)
        self.copied()

    def copied(self) -> None:
        """What this call has written, where copies go."""
        if self.arguments.out is not None:
            self.arguments.out.mkdir(parents=True, exist_ok=True)
            for pattern in ("*.json", "*.log", "cache/*.json"):
                for path in self.arguments.work.glob(pattern):
                    if path.stat().st_mtime >= self.begun:
                        copy = self.arguments.out / path.relative_to(self.arguments.work)
                        copy.parent.mkdir(exist_ok=True)
                        shutil.copyfile(path, copy)

    def told(self) -> None:
        """A line for each step of the call."""
        for key, one in self.done.items():
            if not key.startswith(self.key("")):
                continue
            state = "ok" if one["rc"] == 0 else one["why"] or f"status {one['rc']}"
            print(f"{key:<24}{one.get('seconds', 0):8.1f} s  {state:<28} {one.get('last', '')[:160]}")


def keep_rates(files: list[Path], folder: Path) -> None:
    """Rates of the machine from files of `powerinfer measure`, measured on one of the same kind with the same software,
    as if this build had measured them here. SystemExit where they are of something else."""
    from powerinfer.config import EngineConfig
    from powerinfer.hardware import measure
    from powerinfer.hardware.description import read, save

    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        found = read(path)
        if "threads" not in found.key:
            sys.exit(f"{path} was not measured: it does not say of which machine it is")
        threads = int(found.key["threads"])
        key = measure.machine_key(EngineConfig(threads=threads), found.key.get("gpu"))
        other = [name for name in key if name not in ("build", measure.MEMORY) and key[name] != found.key.get(name)]
        if other:
            told = ", ".join(f"{name} {found.key.get(name)}, not {key[name]}" for name in other)
            sys.exit(f"{path} is of another machine: {told}")
        if found.disturbed:
            print(f"{path}: the machine was disturbed while it was measured ({found.disturbed:.0%})")
        save(replace(found, key=key, disturbed=0.0), folder / measure.kept_at(key).name)  # or it is measured again


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--work", type=Path, default=default_work(), help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results are copied")
    parser.add_argument("--minutes", type=float, default=9.0, help="that the call may take; default: %(default)s")
    parser.add_argument("--ram", metavar="SIZE", help="such as 100GiB; default: what the machine says")
    parser.add_argument("--source", type=Path, metavar="FILE.tgz", help="of llama.cpp (lib/llama_cpp.py --archive)")
    parser.add_argument("--capability", default="90", help="of the GPU, for llama.cpp; default: %(default)s")
    parser.add_argument("--regardless", action="store_true", help="time what a check that failed would leave out")
    parser.add_argument("--clear", action="store_true", help="remove the models of other calls, first")
    parser.add_argument("--trial", action="store_true", help="at a tiny scale, on torch's CPU device")
    parser.add_argument("--only", nargs="+", metavar="STEP", help='of the call\'s, by name, such as "kernel tests"')
    parser.add_argument("--scale", default="own", help="share of the models' layers; default: each model's own")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="of llama.cpp's programs, built beforehand")
    parser.add_argument(
        "--rates", type=Path, nargs="+", default=[], metavar="FILE", help="measured before: `keep_rates`"
    )
    arguments = parser.parse_args(argv)
    arguments.work.mkdir(parents=True, exist_ok=True)
    keep_rates(arguments.rates, arguments.work / "cache")
    if arguments.clear:
        for other in CALLS:
            if other != arguments.call:  # called again, it goes on with its own
                shutil.rmtree(models_of(arguments.work, other), ignore_errors=True)
    return 0 if Visit(arguments).run() else 1


if __name__ == "__main__":
    sys.exit(main())
