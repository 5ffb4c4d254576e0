"""One run of a benchmark, in a process of its own so that a device's memory is freed: a JSON task in, a result out.

    python -m benchmarks.hybrid.worker '{"what": "decode", "model": "m.gguf", "gpu": "cuda", "vram": 6442450944, ...}'

what: "decode" loads a model as `run` does, under a budget and a policy, and decodes; "prefill" computes a prompt, cold
neurons streaming to the GPU or computed by the CPU; "kernel" times the sum of a
layer's neurons of which a tenth fires; "hardware" measures the machine; "make" makes a model.

On torch's CPU device, which stands in for a GPU, the machine is not measured: plans are made for one on which splitting
pays for the smallest model, so that everything runs, and their predictions mean nothing.

Policies: `time` (the product's own), `ilp`, `greedy`, `random`; `layers`: neurons are used as `time` would, but a layer
has all of its neurons on one side, so both sides take turns; `dense`: no neurons, whole layers on the GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.hybrid import recipes
from benchmarks.models import prepared
from powerinfer import LLM, SamplingParams
from powerinfer.config import EngineConfig
from powerinfer.formats.bundle_file import open_bundles
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hardware.description import Hardware, load
from powerinfer.hybrid.load import load_resolved
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.sparsity import HybridSparsity
from powerinfer.kernels import cpu
from powerinfer.placement import budget
from powerinfer.placement.plan import Plan, make_plan
from powerinfer.placement.solver import GROUP
from powerinfer.system import peak_memory

POLICIES = ("time", "ilp", "greedy", "random", "layers", "dense")
TRACED = 4  # steps
ACTIVE = 0.10  # of the kernel's neurons
SETS = 8  # inputs of the kernel, in turn, so that its rows are not in a cache already
KERNEL_RUNS = 40
COPIED = 1 << 30  # bytes of the copy that a kernel's bandwidth is held against


def decode(task: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second by the number of requests, and what the engine says of itself.

    task: model, gpu, vram (bytes; or a share from 0 to 1, then room for the dense parts and that share of the neurons),
    selector, policy, batches, most (requests that there is a cache for), tokens (of one request alone), threads, trace
    (a path or None).
    """
    batches, tokens = task["batches"], task["tokens"]
    engine = _engine(task, _context(task["most"], tokens), task["most"])
    begin = time.perf_counter()
    llm, plan = _load(Path(task["model"]), engine, task["policy"])
    result: dict[str, Any] = {"vram": engine.vram, "load_s": time.perf_counter() - begin, "decode_tok_s": {}}
    with llm:
        result["choices"] = {name: llm.choices[name] for name in ("gpu", "selector", "threads") if name in llm.choices}
        for batch in batches:
            rate, report = _decoded(llm, batch, _tokens(batch, tokens))
            result["decode_tok_s"][str(batch)] = rate
            if report is not None and report["tokens"]:
                told = {name: report[name] for name in ("active_fraction", "gpu_share", "jobs", "tokens")}
                result.setdefault("sparsity", {})[str(batch)] = told
        if task["trace"]:
            result["trace"] = _traced(llm, Path(task["trace"]))
        result["memory"] = _memory(task["gpu"])
    if plan is not None:
        told = plan.document().json()
        result["plan"] = {name: told[name] for name in ("mass_on_gpu", "work_on_gpu", "gpu_layers", "bytes")}
        result["plan"] |= {name: told["predicted"][name] for name in ("ms_per_token", "at_position")}
    return result


def _engine(task: dict[str, Any], context: int, batch: int) -> EngineConfig:
    engine = EngineConfig(
        threads=task["threads"],
        context=context,
        max_batch=batch,
        prefix_cache=False,
        selector="all" if task["policy"] == "dense" else task["selector"],
        gpu=task["gpu"],
    )
    return replace(engine, vram=_vram(Path(task["model"]), engine, task["vram"]))


def prefill(task: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of a prompt, with the cold neurons streamed and by the CPU, and when the engine streams.

    task: as of `decode`, with prompt (tokens) in place of batches, most, tokens and trace.
    """
    tokens = task["prompt"]
    engine = _engine(task, cpu.PAGE * (1 + -(-tokens // cpu.PAGE)), 1)
    llm, plan = _load(Path(task["model"]), engine, task["policy"])
    with llm:
        prompt = [1 + (7919 * number) % (llm.config.vocab_size - 1) for number in range(tokens)]
        once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        stage = llm._sparsity.stage if isinstance(llm._sparsity, HybridSparsity) else None
        result: dict[str, Any] = {"vram": engine.vram, "choice": llm.choices.get("prefill"), "prefill_tok_s": {}}
        result["streams_from"] = None if stage is None else stage.least
        for way, least in (("streamed", 1), ("cpu", None)):
            if stage is not None:
                stage.least = least
            if stage is not None or way == "cpu":
                result["prefill_tok_s"][way] = [llm.generate([prompt], once)[0].timings.prefill_tok_s for _ in "12"][-1]
        result["memory"] = _memory(task["gpu"])
    if plan is not None:
        result["bytes"] = plan.bytes
    return result


def _context(most: int, tokens: int) -> int:
    """Tokens of the cache, which the requests share; whole pages for each, and one to begin with."""
    pages = {batch: 1 + -(-(1 + _tokens(batch, tokens)) // cpu.PAGE) for batch in (1, most)}
    return cpu.PAGE * max(batch * each for batch, each in pages.items())


def _tokens(batch: int, tokens: int) -> int:
    """That a request decodes: several share the time that one alone may take, and with it the cache."""
    return tokens if batch == 1 else min(tokens, cpu.PAGE - 1)


def _vram(model: Path, engine: EngineConfig, vram: int | float) -> int:
    """The budget in bytes."""
    if isinstance(vram, int):
        return vram
    plan = resolve(open_checkpoint(model), replace(engine, selector="predicted")).plan
    assert plan is not None
    shape, config = plan.request.model, plan.request.model.config
    return plan.request.vram_for() + int(vram * shape.bundle.stride * config.n_neurons)


def _load(model: Path, engine: EngineConfig, policy: str) -> tuple[LLM, Plan | None]:
    """The model as the engine resolves it, or with its plan's neurons elsewhere."""
    checkpoint = open_checkpoint(model)
    resolved = resolve(checkpoint, engine)
    if resolved.gpu is None:
        raise RuntimeError(f"the GPU is not used: {resolved.why}")
    plan = resolved.plan
    if plan is not None and policy == "layers":
        plan = whole_layers(plan)
    elif plan is not None and policy != "time":
        plan = make_plan(replace(plan.request, policy=policy))
    executor, sparsity = load_resolved(replace(resolved, plan=plan), lambda: [1])
    llm = LLM.from_parts(executor, checkpoint.tokenizer(), checkpoint.config, engine, sparsity=sparsity)
    return llm, None if policy == "layers" else plan  # what would be predicted is not what is run


def whole_layers(plan: Plan) -> Plan:
    """The same room on the GPU, filled with all neurons of one layer after another."""
    groups = -(-max(plan.request.profile.sizes) // GROUP)
    full = sum(plan.choice.gpu) // groups
    gpu = tuple(groups if layer < full else 0 for layer in range(len(plan.choice.gpu)))
    return replace(plan, choice=replace(plan.choice, gpu=gpu, kept=(groups,) * len(gpu)))


def _decoded(llm: LLM, batch: int, tokens: int) -> tuple[float, dict[str, Any] | None]:
    """Tokens per second of `batch` requests decoding together, after one warm-up round."""
    params = SamplingParams(max_tokens=1 + tokens, temperature=0.0, ignore_eos=True)
    prompts = [[1 + number % (llm.config.vocab_size - 1)] for number in range(batch)]
    for _ in range(2):
        llm.clear_sparsity()
        rates = [one.timings.decode_tok_s for one in llm.generate(prompts, params)]
    return sum(rate for rate in rates if rate is not None), llm.sparsity


def _traced(llm: LLM, path: Path) -> dict[str, Any]:
    """What takes the time of a few steps of one request; the spans as a Chrome trace at the path."""
    params = SamplingParams(max_tokens=1 + TRACED, temperature=0.0, ignore_eos=True)
    llm.generate([[1]], params)
    with llm.traced() as trace:
        llm.generate([[1]], params)
    path.write_text(json.dumps(trace.document()) + "\n")
    return trace.summary() | {"path": path.name}


def _memory(gpu: str) -> dict[str, int]:
    """Peaks in bytes: of this process in RAM, and of what torch reserved on the GPU; driver and runtime take more."""
    result = {"ram": peak_memory()}
    if gpu.startswith("cuda"):
        import torch

        result["torch"] = torch.cuda.max_memory_reserved()
    return result


# ---------------------------------------------------------------- the kernel


def kernel(task: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second of the sum over one layer's neurons, all on the device, of which a tenth is selected and fires.

    Only the rows of those neurons are counted. Compared with a copy within the device's memory, whose bytes
    are read and written. task: model, gpu, tokens (a list).
    """
    import torch

    from powerinfer.devices.torch_device import choose_device
    from powerinfer.kernels import gpu

    checkpoint, device = open_checkpoint(Path(task["model"])), choose_device(task["gpu"])
    config = checkpoint.config
    bundles = open_bundles(checkpoint, None, cpu.bundle_row_bytes)
    every = np.arange(config.widest_ffn, dtype=np.int32)
    middle = config.n_layers // 2
    neurons = gpu.resident(bundles.layouts[middle], bundles.layers[middle], every, device, config.layers[middle].ffn)
    runs = []
    for tokens in task["tokens"]:
        inputs = [_firing(neurons, tokens, device, number) for number in range(SETS)]
        calls = [_sum(neurons, x, selected) for x, selected in inputs]
        fired = [int((call()[1] > 0).sum()) for call in calls]
        bytes_read = median(fired) * neurons.nbytes / neurons.n
        seconds = _seconds(calls, device)
        runs.append({"tokens": tokens, "fired": median(fired), "bytes": bytes_read, "seconds": seconds})
    source = torch.ones(COPIED if device.type == "cuda" else COPIED >> 6, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / _seconds([lambda: target.copy_(source)], device)
    for run in runs:
        run["gb_s"] = run["bytes"] / run["seconds"] / 1e9
        run["share_of_copy"] = run["bytes"] / run["seconds"] / copied
    return {"neurons": neurons.n, "kernel": gpu.which(source), "copy_gb_s": copied / 1e9, "runs": runs}


def _firing(neurons: Any, tokens: int, device: Any, seed: int) -> tuple[Any, Any]:
    """Inputs, and selected neurons that all fire: a tenth of the layer's, or all that fire, the same for each token."""
    import torch

    from powerinfer.kernels import gpu

    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((1, neurons.up.k), np.float32)).to(device).repeat(tokens, 1)
    fires = np.flatnonzero(gpu.neuron_sum(neurons, x)[1].cpu().numpy())
    selected = np.zeros((tokens, neurons.n), np.uint8)
    selected[:, rng.permutation(fires)[: round(ACTIVE * neurons.n)]] = 1
    return x, torch.from_numpy(selected).to(device)


def _sum(neurons: Any, x: Any, selected: Any) -> Callable[[], Any]:
    from powerinfer.kernels import gpu

    return lambda: gpu.neuron_sum(neurons, x, selected)


def _seconds(calls: list[Callable[[], Any]], device: Any) -> float:
    """Median of a call, by the device's own clock; on CUDA replayed from a recording, as decode steps are."""
    import torch

    if device.type != "cuda":
        taken = []
        for number in range(KERNEL_RUNS // 4):
            begin = time.perf_counter()
            calls[number % len(calls)]()
            taken.append(time.perf_counter() - begin)
        return median(taken)
    recordings = []
    for call in calls:
        for _ in range(3):
            call()  # compiled, and its memory found
        torch.cuda.synchronize(device)
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording):
            call()
        recordings.append(recording)
    taken = []
    for number in range(KERNEL_RUNS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        recordings[number % len(recordings)].replay()
        last.record()
        last.synchronize()
        taken.append(1e-3 * first.elapsed_time(last))
    return median(taken)


# ---------------------------------------------------------------- tasks


def hardware(task: dict[str, Any]) -> dict[str, Any]:
    """What the machine is measured to do; kept, and taken by every later run."""
    from powerinfer.hardware import measure

    return asdict(measure.measured(EngineConfig(threads=task["threads"]), gpu=task["gpu"]))


def make(task: dict[str, Any]) -> dict[str, Any]:
    """Model, profile, predictor and bundles; the bytes of its file."""
    path = Path(task["model"])
    begin = time.perf_counter()
    made = recipes.recipe(task["name"], task["scale"])
    prepared.prepare(path, made.plan, made.stored, task["threads"])
    return {"seconds": time.perf_counter() - begin, "file_bytes": path.stat().st_size}


def stand_in() -> Hardware:
    """A described machine, with a CPU a thousand times slower."""
    whole = load("pc-high")
    cpu = whole.cpu

    def slower(rates: Mapping[str, float]) -> dict[str, float]:
        return {name: rate / 1000 for name, rate in rates.items()}

    return replace(whole, cpu=replace(cpu, dense_gb_s=slower(cpu.dense_gb_s), bundle_gb_s=slower(cpu.bundle_gb_s)))


def perform(task: dict[str, Any]) -> dict[str, Any]:
    """The result of a task."""
    work = {"decode": decode, "prefill": prefill, "kernel": kernel, "hardware": hardware, "make": make}[task["what"]]
    if task.get("gpu") != "cpu":
        return work(task)
    import torch

    from powerinfer.hardware import measure

    torch.set_num_threads(1)  # two pools of threads on the same cores wait for each other
    small = mock.patch.object(budget, "STAGED", 2)  # of tiny models a sixteenth holds nothing
    with small, mock.patch.object(measure, "measured", lambda *_, **__: stand_in()):
        return work(task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=json.loads, help="JSON, as above")
    print(json.dumps(perform(parser.parse_args().task)))


if __name__ == "__main__":
    main()
