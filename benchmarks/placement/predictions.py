"""The predicted time of a token against the measured one, on this machine.

    python -m benchmarks.placement.predictions MODEL[:all,exact,predicted] ... [--stand-in] [--out FILE]

Every call is one round for each model and selector: the machine's rates are measured, the plan's prediction made from
them, and the engine decodes. With --out FILE a round is added to what the file holds; the table takes medians over the
rounds, since rates of a machine that others share drift within minutes.

Without --stand-in: plans for the CPU alone, and `LLM.generate` as users run it, the trial of ways included.
With --stand-in: plans for this CPU and a described GPU (--gpu) that holds a share of the neurons (--shares) beside all
dense parts. No GPU is here: the plan's cold neurons, and only they, are given to the CPU's FFNs, which are timed within
decode steps; the GPU's half, and what both wait for, is taken as the plan has it. So is what a predictor takes, which
the plan puts on the GPU: here it is timed alone and taken off. Gates of `exact` are computed from matrices here.

What the profile and the predictor promise is measured before, over random tokens, as `profile` and `train` would.
The file of bundles is read again, bypassing the page cache: pages that were cached one at a time are slower to use.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import machine, results
from powerinfer import LLM, SamplingParams
from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor, Fired
from powerinfer.formats.bundle_file import n_groups, open_bundles
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.predictor_file import open_predictor
from powerinfer.formats.prepared import prepared_folder
from powerinfer.formats.quant import block_type, dequantize, quantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.hardware.description import Device, Hardware, load
from powerinfer.hardware.measure import measure
from powerinfer.kernels import cpu
from powerinfer.models import load as load_executor
from powerinfer.neurons import BUNDLE_GROUP, Predictor, Profile, Tier
from powerinfer.placement import cost
from powerinfer.placement.plan import Plan, PlanRequest, make_plan
from powerinfer.placement.shapes import checkpoint_model
from powerinfer.placement.solver import GROUP
from powerinfer.system import DISTURBED_CORES, Disturbance

PROFILED = 256  # tokens of the profile
GENERATED = 48
CONTEXT = 512
STEPS = 12  # of a block of a stand-in, and three that warm up
BLOCKS = 4
WAY = {"all": "dense", "exact": "exact", "predicted": "predicted"}
NEVER = 3e38  # a predictor's threshold that nothing reaches


class Counter:
    """Counts how often each neuron fires."""

    def __init__(self, layers: int, d_ff: int) -> None:
        self.counts = [np.zeros(d_ff, np.int64) for _ in range(layers)]

    def reads(self, layer: int, x: NDArray[np.float32]) -> None:
        pass

    def fires(self, layer: int, fired: Fired) -> None:
        self.counts[layer] += fired.counts


def random_tokens(vocab: int, n: int) -> NDArray[np.int32]:
    return np.random.default_rng(5).integers(0, vocab, n).astype(np.int32)


def step(executor: CpuExecutor, tokens: NDArray[np.int32], at: int, logits: bool = True) -> None:
    """Compute tokens of one sequence from position `at` on."""
    n = len(tokens)
    pages = np.arange(-(-(at + n) // executor.page_size), dtype=np.int32)[None]
    rows = np.full(1, n - 1, np.int32) if logits else np.empty(0, np.int32)
    executor.forward(Batch(tokens, np.arange(at, at + n, dtype=np.int32), np.zeros(n, np.int32), pages, rows))


class Subject:
    """A model with what its plans need: profile, and how many neurons its predictors name by those that fire."""

    def __init__(self, path: Path, prepared: Path, threads: int) -> None:
        self.path = path
        self.options: dict[str, Any] = {"threads": threads, "context": CONTEXT, "max_batch": 1}
        self.prepared = self._links(prepared)
        self.checkpoint = open_checkpoint(path)
        self.config = self.checkpoint.config
        counts, ratios = self._seen(prepared)
        layers, d_ff = self.config.n_layers, self.config.widest_ffn
        none = tuple(np.zeros((0, d_ff), np.int64) for _ in range(layers))
        active = tuple(np.zeros(101, np.int64) for _ in range(layers))
        self.profile = Profile(PROFILED, tuple(counts), (), (), none, active, (0.0,) * layers)
        self.model = checkpoint_model(self.checkpoint, self.prepared)
        if ratios:
            self.model = dataclasses.replace(self.model, selected=tuple(ratios))

    def _links(self, folder: Path) -> str:
        """A folder that shows the model's prepared files: trials are kept in it, and the model's own stays as it is."""
        own = folder / f"{self.path.name}.powerinfer"
        own.mkdir(parents=True, exist_ok=True)
        for file in prepared_folder(self.path).glob("*.safetensors"):
            link = own / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file)
        return str(own)

    def _seen(self, prepared: Path) -> tuple[list[NDArray[np.int64]], list[float]]:
        """(counts of each layer, selected neurons per neuron that fires), counted once and kept."""
        kept = prepared / f"{self.path.name}.npz"
        if kept.exists():
            with np.load(kept) as file:
                if str(file["fingerprint"]) == self.checkpoint.fingerprint:
                    return list(file["counts"]), file["ratios"].tolist()
        layers, d_ff, vocab = self.config.n_layers, self.config.widest_ffn, self.config.vocab_size
        counter = Counter(layers, d_ff)
        with LLM(self.path, selector="all", **self.options) as llm, llm._executor.observed(counter):
            step(llm._executor, random_tokens(vocab, PROFILED), 0)
        ratios = []
        if (Path(self.prepared) / "predictor.safetensors").exists():
            options = self.options | {"trial": False, "recall_every": 0, "prepared": self.prepared}
            with LLM(self.path, selector="predicted", **options) as llm:
                for at, token in enumerate(random_tokens(vocab, 24)):
                    step(llm._executor, np.full(1, token, np.int32), at)
                report = llm.sparsity
            assert report is not None
            ratios = [one["candidate_fraction"] / max(one["active_fraction"], 1e-6) for one in report["layers"]]
        np.savez(kept, fingerprint=self.checkpoint.fingerprint, counts=np.stack(counter.counts), ratios=ratios)
        return counter.counts, ratios

    def request(self, hardware: Hardware, selector: str, vram: int, context: int) -> PlanRequest:
        return PlanRequest(
            self.model,
            self.profile,
            hardware,
            vram=vram,
            ram=hardware.cpu.memory_bytes,
            context=context,
            selector=selector,
        )


def read_again(path: Path) -> None:
    """Have the system read a file in one go, whatever it has of it."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(1 << 24):
            pass


# ---------------------------------------------------------------- the CPU alone


def alone(subject: Subject, hardware: Hardware, selector: str, repeat: int) -> dict[str, Any]:
    """A plan without a GPU, and what `LLM.generate` needs for a token, in milliseconds."""
    predicted = make_plan(subject.request(hardware, selector, 0, GENERATED)).document().predicted.ms_per_token
    options = subject.options | {"selector": selector, "recall_every": 0, "prepared": subject.prepared}
    if selector != "all":
        read_again((Path(subject.prepared) / "neurons.safetensors").resolve())
    many = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
    taken = []
    with LLM(subject.path, retrial=True, **options) as llm:
        for number in range(repeat + 1):
            llm.clear_sparsity()
            with Disturbance() as load:
                rate = llm.generate([[7]], many)[0].timings.decode_tok_s
            assert rate is not None
            if number:
                taken.append((load.cores, 1e3 / rate))
        report = llm.sparsity
    quiet = [ms for others, ms in taken if others <= DISTURBED_CORES]
    ways = [layer["ways"]["1"] for layer in report["layers"]] if report else ["dense"] * subject.config.n_layers
    return {
        "predicted_ms": predicted,
        "measured_ms": median(quiet or [ms for _, ms in taken]),
        "quiet": bool(quiet),
        "ways": {way: ways.count(way) for way in sorted(set(ways))},
        "active": report["active_fraction"] if report else None,
        "profiled": subject.profile.active_fraction() if selector != "all" else None,
    }


# ---------------------------------------------------------------- a GPU stood in for


class ColdCheckpoint:
    """A checkpoint whose FFNs have some of their neurons only. down: whether its columns matter, else they are 0."""

    def __init__(self, checkpoint: Checkpoint, cold: list[NDArray[np.int32]], down: bool) -> None:
        self._checkpoint, self._cold, self._down = checkpoint, cold, down

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def take(self, name: str) -> RawTensor:
        tensor: RawTensor = self._checkpoint.take(name)
        place, _, part = name.rpartition(".")
        if part.removesuffix("_bias") not in ("gate", "up", "down") or part == "down_bias":
            return tensor
        cold = self._cold[int(place.split(".")[1])]
        return self._columns(tensor, cold) if part == "down" else rows_of(tensor, cold)

    def _columns(self, tensor: RawTensor, cold: NDArray[np.int32]) -> RawTensor:
        shape = (tensor.shape[0], len(cold))
        if not self._down:
            row = block_type(tensor.type).row_bytes(len(cold))
            return RawTensor(tensor.type, shape, np.zeros(shape[0] * row, np.uint8))
        values = np.ascontiguousarray(dequantize(tensor.rows(), tensor.type)[:, cold])
        return RawTensor(tensor.type, shape, quantize(values, tensor.type).reshape(-1))


def rows_of(tensor: RawTensor, rows: NDArray[np.int32]) -> RawTensor:
    """Some rows of a matrix, or elements of a vector."""
    if len(tensor.shape) == 1:
        return RawTensor(tensor.type, (len(rows),), tensor.data.reshape(tensor.shape[0], -1)[rows].reshape(-1))
    return RawTensor(tensor.type, (len(rows), tensor.shape[1]), tensor.rows()[rows].reshape(-1))


class StandIn:
    """The CPU's half of a plan: its cold neurons in the FFNs of an executor."""

    def __init__(self, subject: Subject, plan: Plan, selector: str) -> None:
        placement = plan.placement(subject.profile)
        parts = [placement.split_by_tier(layer)[Tier.CPU] for layer in range(subject.config.n_layers)]
        self.empty = [not len(part) for part in parts]
        self.cold = [part if len(part) else np.arange(GROUP, dtype=np.int32) for part in parts]
        self._subject, self._selector = subject, selector
        checkpoint = open_checkpoint(subject.path)
        engine = EngineConfig(**subject.options)
        cut: Any = ColdCheckpoint(checkpoint, self.cold, selector == "all")
        self.executor = load_executor(cut, engine)
        self.bundles = open_bundles(checkpoint, subject.prepared, cpu.bundle_row_bytes) if selector != "all" else None
        self.predictors = open_predictor(checkpoint, subject.prepared).layers if selector == "predicted" else None

        self.rows = [self._rows(layer, cold) for layer, cold in enumerate(self.cold)]

    def _rows(self, layer: int, cold: NDArray[np.int32]) -> Any:
        """The cold neurons' bundles; the scales that groups of them share are others', which takes as long."""
        if self.bundles is None:
            return None
        layout, held = self.bundles.layouts[layer], self.bundles.layers[layer]
        bundles, groups = BUNDLE_GROUP * layout.pitch, n_groups(len(cold))
        rows = np.zeros((groups, layout.group_bytes), np.uint8)
        picked = np.zeros((groups * BUNDLE_GROUP, layout.pitch), np.uint8)
        picked[: len(cold)] = held[:, :bundles].reshape(-1, layout.pitch)[cold]
        rows[:, :bundles] = picked.reshape(groups, bundles)
        rows[:, bundles:] = held[:groups, bundles:]
        return rows

    def _sparsify(self, threshold: float | None) -> None:
        assert self.bundles is not None
        for layer, cold in enumerate(self.cold):
            predictor = None
            if self.predictors is not None:
                one = self.predictors[layer]
                about = Predictor(one.predictor.rank, one.predictor.threshold if threshold is None else threshold, 0)
                predictor = about, one.inner, rows_of(one.outer, cold)
            self.executor.ffns[layer].add_bundles(self.bundles.layouts[layer], self.rows[layer], predictor=predictor)
            self.executor.ffns[layer].set_ways({1: WAY[self._selector]})

    def seconds(self, fixed: float) -> tuple[NDArray[np.float64], float]:
        """([layers]: what the FFNs take, cores that others used meanwhile). fixed: a sparse FFN without products."""
        blocks = sorted((self._block(fixed) for _ in range(BLOCKS)), key=lambda block: block[1])
        quiet = [block for block in blocks if block[1] <= DISTURBED_CORES] or blocks[:1]
        return np.where(self.empty, 0.0, np.median([block[0] for block in quiet], axis=0)), quiet[-1][1]

    def _block(self, fixed: float) -> tuple[NDArray[np.float64], float]:
        with Disturbance() as load:
            if self._selector != "all":
                self._sparsify(None)
            seconds = self._steps()
            if self.predictors is not None:
                self._sparsify(NEVER)
                seconds = seconds - np.maximum(0.0, self._steps() - fixed)
        return seconds, load.cores

    def _steps(self) -> NDArray[np.float64]:
        tokens = random_tokens(self._subject.config.vocab_size, STEPS + 3)
        taken = []
        with self.executor.timed():
            for at, token in enumerate(tokens):
                step(self.executor, np.full(1, token, np.int32), at)
                taken.append(self.executor.ffn_seconds())
        return np.asarray(np.median(np.array(taken[3:]), axis=0))


def stand_in(subject: Subject, here: Hardware, gpu: Hardware, selector: str, share: float) -> dict[str, Any]:
    """A plan for this CPU and a GPU that holds that share of the neurons, and the time with the measured CPU's half."""
    hardware = Hardware(
        "stand-in", "", here.cpu, gpu.gpu, None, sync_us=gpu.sync_us, copy_gb_s=gpu.copy_gb_s, assumed=gpu.assumed
    )
    model, config = subject.model, subject.config
    held = math.ceil(share * config.n_layers * (config.widest_ffn // GROUP))
    vram = subject.request(hardware, selector, 1 << 50, CONTEXT).vram_for(held)
    plan = make_plan(subject.request(hardware, selector, vram, CONTEXT))
    groups = plan.choice.gpu
    expected = cost.expected(
        subject.profile,
        [subject.profile.order(layer) for layer in range(config.n_layers)],
        config,
        model.selected,
        1,
        GROUP,
    )
    fixed = cost.fixed_seconds(here.cpu, selector)
    on_cpu = np.zeros(config.n_layers)
    for layer, k in enumerate(groups):
        left = expected.sums[layer, -1] - expected.sums[layer, k]
        each = cost.neuron_seconds(here.cpu, model.bundles[layer], selector, model.ffn[layer], config.widest_ffn)
        on_cpu[layer] = left @ each + fixed if left[0] else 0.0
    half = StandIn(subject, plan, selector)
    measured, others = half.seconds(fixed)
    half.executor.close()
    gpu_s, sync = (np.array([layer[name] for layer in plan.choice.layer_seconds]) for name in ("gpu", "sync"))
    own = np.array([layer["cpu"] for layer in plan.choice.layer_seconds])
    rest = plan.choice.seconds - float(np.maximum(gpu_s, own + sync).sum())
    return {
        "share": share,
        "quiet": others <= DISTURBED_CORES,
        "neurons_on_gpu": GROUP * sum(groups) / (config.n_neurons),
        "mass_on_gpu": plan.choice.mass_on_gpu,
        "predicted_ms": 1e3 * (rest + float(np.maximum(gpu_s, on_cpu + sync).sum())),
        "measured_ms": 1e3 * (rest + float(np.maximum(gpu_s, measured + sync).sum())),
        "predicted_cpu_ms": 1e3 * float(on_cpu.sum()),
        "measured_cpu_ms": 1e3 * float(measured.sum()),
    }


# ---------------------------------------------------------------- rounds


def measured_quietly(engine: EngineConfig) -> tuple[Hardware, bool]:
    """This machine, and whether others left it alone meanwhile."""
    with Disturbance() as load:
        here = measure(engine)
    return here, load.cores <= DISTURBED_CORES


def brief(device: Device) -> dict[str, Any]:
    """The rates that a round's predictions were made from."""
    return {name: value for name, value in dataclasses.asdict(device).items() if name not in ("name", "memory_bytes")}


@contextmanager
def added_to(path: Path | None) -> Iterator[list[dict[str, Any]]]:
    """The rounds of a result, which is written again at the end."""
    document: dict[str, Any] = {"kind": "plan", **machine.description(), "rounds": []}
    if path is not None and path.exists():
        document["rounds"] = json.loads(path.read_text())["rounds"]
    before = len(document["rounds"])
    yield document["rounds"]
    if len(document["rounds"]) == before:
        return
    if path is not None:
        results.write_json(path, document)
    else:
        print(json.dumps(document["rounds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[:SELECTORS]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5, help="generations of each selector (default 5)")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--gpu", default="pc-8gb", help="machine whose GPU is stood in for (default %(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=(0.25, 0.5, 0.75), help="of the neurons, on it")
    parser.add_argument("--work", type=Path, default=Path("plan-check"), help="folder for what is kept meanwhile")
    parser.add_argument("--profile-only", action="store_true", help="only what need not be timed; it is kept in --work")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for text in arguments.models:
        name, _, selectors = text.partition(":")
        with added_to(arguments.out) as rounds:
            subject = Subject(Path(name), arguments.work, arguments.threads)
            if arguments.profile_only:
                continue
            here, quiet = measured_quietly(EngineConfig(threads=arguments.threads))
            gpu = load(arguments.gpu)
            one: dict[str, Any] = {
                "commit": machine.commit(),
                "model": subject.path.stem,
                "stand_in": arguments.gpu if arguments.stand_in else None,
                "threads": arguments.threads,
                "cpu": brief(here.cpu),
                "selectors": {},
            }
            for selector in (selectors or "all").split(","):
                gc.collect()
                if arguments.stand_in:
                    result: Any = [stand_in(subject, here, gpu, selector, share) for share in arguments.shares]
                else:
                    result = alone(subject, here, selector, arguments.repeat)
                for each in result if arguments.stand_in else [result]:
                    each["quiet"] &= quiet
                one["selectors"][selector] = result
                for each in result if arguments.stand_in else [result]:
                    off = each["predicted_ms"] / each["measured_ms"] - 1
                    told = "" if each["quiet"] else "disturbed, "
                    told += ", ".join(f"{key} {value:.4g}" for key, value in each.items() if type(value) is float)
                    print(f"{subject.path.stem} {selector}: {100 * off:+.1f} %; {told}", file=sys.stderr, flush=True)
            rounds.append(one)


if __name__ == "__main__":
    main()
