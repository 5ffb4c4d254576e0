"""One run of a benchmark, in a process of its own so that a device's memory is freed: a JSON task in, a result out.

    python -m benchmarks.hybrid.worker '{"what": "decode", "model": "m.gguf", "gpu": "cuda", "vram": 6442450944, ...}'

what: "decode" loads a model as `run` does, under a budget and a policy, and decodes; "prefill" computes a prompt, cold
neurons streaming to the GPU or computed by the CPU; "kernel" times the sum of a layer's neurons of which a tenth fires;
"hardware" measures the machine; "make" makes a model; "card" says what of a card's memory a part of a model gets;
"reference" computes a text on the CPU alone.

Nothing is timed before the model's logits of that text have been compared with those of the CPU, and a kernel's sum
with one in float64; what gives others fails. Every task may have `ram`, bytes that there are, of a machine whose memory
grows with use.

On torch's CPU device, which stands in for a GPU, the machine is not measured: plans are made for one on which splitting
pays for the smallest model, so that everything runs, and their predictions mean nothing.

Policies: `time` (the product's own), `ilp`, `greedy`, `random`; `layers`: neurons are used as `time` would, but a layer
has all of its neurons on one side, so both sides take turns; `dense`: no neurons, whole layers on the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.hybrid import gpu_kernels, recipes, step_times
from benchmarks.lib import results
from benchmarks.models import prepared
from powerinfer import LLM, SamplingParams
from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.replayed_spans import UNRECORDED
from powerinfer.formats.bundle_file import open_bundles
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hardware import measure
from powerinfer.hardware.description import Hardware, load
from powerinfer.hybrid.load import load_resolved
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.sparsity import HybridSparsity
from powerinfer.kernels import cpu
from powerinfer.kernels.gpu import FEW
from powerinfer.placement import budget
from powerinfer.placement.plan import Plan, make_plan
from powerinfer.placement.solver import GROUP
from powerinfer.system import peak_memory
from powerinfer.text.model_text import tokenizer_of

POLICIES = ("time", "ilp", "greedy", "random", "layers", "dense")
TRACED = 4  # steps
AT_ONCE = 16  # steps of which the calls are timed
ACTIVE = 0.10  # of the kernel's neurons
SETS = 8  # inputs of the kernel, in turn, so that its rows are not in a cache already
TEXT = 48  # tokens that are computed on the CPU and beside a GPU
ALONE = 8  # of them, one at a time: launched, recorded and replayed; those before in one step
TOGETHER = (2, 8, 32)  # requests, of two tokens each, as many of them as there is a cache for
FURTHEST = {"every": 0.25, "predicted": 0.5}
"""How far logits may be from the CPU's, as a share of the distance that the predictor's misses make, a few of a hundred
neurons that fire. The devices round activations of Q4_0 neurons and the products of prompts to different types, which
makes up to an eighth of that distance. Predictors on the CPU round what they read to 8 bits, so neurons next to the
threshold are selected on one device alone: of the dReLU shape 0.15 with two layers, beside torch's float32 likewise,
and 0.28 with eight. It is more than 1 if 32 of a layer's neurons are never selected, and 12 if each is selected in
place of its neighbour."""


def decode(task: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second by the number of requests, and what the engine says of itself.

    task: model, gpu, vram (bytes; or a share from 0 to 1, then room for the dense parts and that share of the neurons),
    selector, policy, batches, most (requests that there is a cache for), tokens (of one request alone), threads, trace
    (a path or None); perhaps note: a file for the result before a profiler runs, which may crash. RuntimeError for a
    model whose logits are not the CPU's.
    """
    batches, tokens = task["batches"], task["tokens"]
    engine = _engine(task, context_of(task["most"], tokens), task["most"])
    begin = time.perf_counter()
    llm, plan = _load(Path(task["model"]), engine, task["policy"])
    result: dict[str, Any] = {"vram": engine.vram, "load_s": time.perf_counter() - begin}
    with llm:
        off = checked(llm, Path(task["model"]), engine.selector, task["most"])
        result |= {"off": off, "decode_tok_s": {}}
        result["choices"] = {
            name: llm.choices[name] for name in ("gpu", "selector", "threads", "neurons") if name in llm.choices
        }
        for batch in batches:
            rate, report = decoded(llm, batch, tokens_of(batch, tokens))
            result["decode_tok_s"][str(batch)] = rate
            if report is not None and report["tokens"]:
                told = {name: report[name] for name in ("active_fraction", "gpu_share", "jobs", "tokens")}
                result.setdefault("sparsity", {})[str(batch)] = told
        if task["trace"]:
            result["trace"] = _traced(llm, Path(task["trace"]))
            result["at_once"] = _at_once(llm, result["trace"]["gpu_s"])
        result["memory"] = _memory(task["gpu"])
        if plan is not None:
            told = plan.document().json()
            result["plan"] = {name: told[name] for name in ("mass_on_gpu", "work_on_gpu", "gpu_layers", "bytes")}
            result["plan"] |= {name: told["predicted"][name] for name in ("ms_per_token", "at_position")}
        if task["trace"]:
            if "note" in task:
                results.write_json(Path(task["note"]), result)
            result["step"] = step_times.times(llm, task["gpu"], tokens)
    return result


def _engine(task: dict[str, Any], context: int, batch: int) -> EngineConfig:
    engine = EngineConfig(
        threads=task["threads"],
        context=context,
        max_batch=batch,
        prefix_cache=False,
        selector="all" if task["policy"] == "dense" else task["selector"],
        gpu=task["gpu"],
        ram=task.get("ram"),
    )
    return replace(engine, vram=_vram(Path(task["model"]), engine, task["vram"]))


def prefill(task: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of a prompt, with the cold neurons streamed and by the CPU, and when the engine streams.

    task: as of `decode`, with prompt (tokens) and ways (of those two) in place of batches, most, tokens and trace.
    """
    tokens = task["prompt"]
    engine = _engine(task, cpu.PAGE * (1 + -(-tokens // cpu.PAGE)), 1)
    llm, plan = _load(Path(task["model"]), engine, task["policy"])
    with llm:
        off: dict[str, float] = {}
        prompt = [1 + (7919 * number) % (llm.config.vocab_size - 1) for number in range(tokens)]
        once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        stage = llm._sparsity.stage if isinstance(llm._sparsity, HybridSparsity) else None
        result: dict[str, Any] = {"vram": engine.vram, "off": off, "choice": llm.choices.get("prefill")}
        model = Path(task["model"])
        result["prefill_tok_s"] = {}
        result["streams_from"] = None if stage is None else stage.least
        for way, least in (("streamed", FEW + 1), ("cpu", None)):  # fewer tokens are replayed, and never stream
            if stage is not None:
                stage.least = least
            if way in task["ways"] and (stage is not None or way == "cpu"):
                off |= {f"{name}, {way}": value for name, value in checked(llm, model, engine.selector, 1).items()}
                result["prefill_tok_s"][way] = [llm.generate([prompt], once)[0].timings.prefill_tok_s for _ in "12"][-1]
        result["memory"] = _memory(task["gpu"])
    if plan is not None:
        result["bytes"] = plan.bytes
    return result


def card(task: dict[str, Any]) -> dict[str, Any]:
    """The budget of a part of a model's layers, in bytes: that part of a card's memory, less what all layers share.

    The output head, the driver and libraries, and the working memory of a step are as large for few layers as for many.
    task: as of `decode`, with vram (the card's) and part (from 0 to 1).
    """
    engine = _engine(task, context_of(task["most"], task["tokens"]), task["most"])
    plan = resolve(open_checkpoint(Path(task["model"])), engine).placement.neurons
    assert plan is not None
    fixed = {name: plan.bytes["gpu"].get(name, 0) for name in ("head", "runtime", "scratch")}
    return {"vram": part_of(task["vram"], sum(fixed.values()), task["part"]), "fixed": fixed}


def part_of(whole: int, fixed: int, part: float) -> int:
    """A part of some bytes of which `fixed` do not shrink. RuntimeError where these are all of it."""
    if fixed >= whole:
        raise RuntimeError(f"a card of {whole} bytes does not hold what all layers share, {fixed} bytes")
    return fixed + int(part * (whole - fixed))


# ---------------------------------------------------------------- what is right


def reference(task: dict[str, Any]) -> dict[str, Any]:
    """A text's logits on the CPU alone, with every neuron and with those that are predicted; kept for `checked`.

    task: model, threads.
    """
    path = Path(task["model"])
    most = max(TOGETHER)
    engine = {"threads": task["threads"], "context": 2 * TEXT, "max_batch": most, "prefix_cache": False, "trial": False}
    found: dict[str, dict[str, np.ndarray]] = {}
    with LLM(path, gpu="none", selector="predicted", **engine) as llm:
        found["predicted"] = logits_of(llm, most)
        with llm.every_neuron():
            found["every"] = logits_of(llm, most)
    np.savez(reference_of(path), **{f"{name} {of}": own for name, each in found.items() for of, own in each.items()})
    return {"apart": apart(found["predicted"]["alone"], found["every"]["alone"])}


def checked(llm: LLM, model: Path, selector: str, most: int) -> dict[str, float]:
    """How far a model's logits are from the CPU's: with every neuron and, of `predicted`, with those selected. most:
    requests that it takes together.

    RuntimeError where that is too far for the same model.
    """
    off: dict[str, float] = {}
    with np.load(reference_of(model)) as wanted:
        misses = apart(wanted["predicted alone"], wanted["every alone"])

        def compare(name: str) -> None:
            off.update((f"{name} {of}", apart(own, wanted[f"{name} {of}"])) for of, own in logits_of(llm, most).items())

        if selector == "predicted":
            compare("predicted")
        with llm.every_neuron() if selector == "predicted" else nullcontext():
            compare("every")
    wrong = [
        f"{value:.3g} ({name}), more than {most:.3g}"
        for name, value in off.items()
        if not value <= (most := FURTHEST[name.split()[0]] * misses)
    ]
    if wrong:
        raise RuntimeError(f"not timed: logits are off by {', '.join(wrong)} of the CPU's")
    return off


def logits_of(llm: LLM, most: int) -> dict[str, np.ndarray]:
    """alone: float32 [ALONE, vocab] of the last tokens of the text; by a number of requests, up to `most`, as far as
    there is a cache for these: [requests, vocab] of their second tokens, computed together, launched, recorded and
    replayed."""
    rng, rows = np.random.default_rng(5), []
    text = rng.integers(1, llm.config.vocab_size, TEXT).tolist()
    llm.score(text, TEXT - ALONE, lambda _, logits: rows.append(logits.copy()), step=1)
    found = {"alone": np.concatenate(rows)}
    executor = llm._executor
    for requests in (number for number in TOGETHER if number <= min(most, executor.n_pages)):
        each, pages = np.arange(requests, dtype=np.int32), np.arange(requests, dtype=np.int32)[:, None]
        tokens = rng.integers(1, llm.config.vocab_size, (2, requests)).astype(np.int32)
        executor.forward(Batch(tokens[0], np.zeros(requests, np.int32), each, pages, each))
        for _ in range(UNRECORDED + 1):
            last = executor.forward(Batch(tokens[1], np.ones(requests, np.int32), each, pages, each)).copy()
        found[str(requests)] = last
    return found


def apart(ours: np.ndarray, wanted: np.ndarray) -> float:
    """Their distance, as a share of the size of those that are wanted; not a number if any is none."""
    difference = np.square(ours - wanted, dtype=np.float64).mean() / np.square(wanted, dtype=np.float64).mean()
    return float(np.sqrt(difference))


def reference_of(model: Path) -> Path:
    return Path(f"{model}.powerinfer") / "reference-logits.npz"


# ---------------------------------------------------------------- budgets and plans


def context_of(most: int, tokens: int) -> int:
    """Tokens of the cache, which the requests share; whole pages for each, and one to begin with."""
    pages = {batch: 1 + -(-(1 + tokens_of(batch, tokens)) // cpu.PAGE) for batch in (1, most)}
    return cpu.PAGE * max(batch * each for batch, each in pages.items())


def tokens_of(batch: int, tokens: int) -> int:
    """That a request decodes: several share the time that one alone may take, and with it the cache."""
    return tokens if batch == 1 else min(tokens, cpu.PAGE - 1)


def _vram(model: Path, engine: EngineConfig, vram: int | float) -> int:
    """The budget in bytes."""
    if isinstance(vram, int):
        return vram
    plan = resolve(open_checkpoint(model), replace(engine, selector="predicted")).placement.neurons
    assert plan is not None
    shape, config = plan.request.model, plan.request.model.config
    return plan.request.vram_for() + int(vram * shape.bundle.stride * config.n_neurons)


def _load(model: Path, engine: EngineConfig, policy: str) -> tuple[LLM, Plan | None]:
    """The model as the engine resolves it, or with its plan's neurons elsewhere."""
    checkpoint = open_checkpoint(model)
    resolved = resolve(checkpoint, engine)
    if resolved.device.gpu is None:
        raise RuntimeError(f"the GPU is not used: {resolved.device.reason}")
    plan = resolved.placement.neurons
    if plan is not None and policy == "layers":
        plan = whole_layers(plan)
    elif plan is not None and policy != "time":
        plan = make_plan(replace(plan.request, policy=policy))
    executor, sparsity = load_resolved(resolved if plan is None else resolved.placed(plan=plan), lambda: [1])
    llm = LLM.from_parts(executor, tokenizer_of(checkpoint), checkpoint.config, engine, sparsity=sparsity)
    return llm, None if policy == "layers" else plan  # what would be predicted is not what is run


def whole_layers(plan: Plan) -> Plan:
    """The same room on the GPU, filled with all neurons of one layer after another."""
    groups = -(-max(plan.request.profile.sizes) // GROUP)
    full = sum(plan.choice.gpu) // groups
    gpu = tuple(groups if layer < full else 0 for layer in range(len(plan.choice.gpu)))
    return replace(plan, choice=replace(plan.choice, gpu=gpu, kept=(groups,) * len(gpu)))


def decoded(llm: LLM, batch: int, tokens: int) -> tuple[float, dict[str, Any] | None]:
    """Tokens per second of `batch` requests decoding together, after one warm-up round."""
    params = SamplingParams(max_tokens=1 + tokens, temperature=0.0, ignore_eos=True)
    prompts = [[1 + number % (llm.config.vocab_size - 1)] for number in range(batch)]
    for _ in range(2):
        llm.clear_sparsity()
        rates = [one.timings.decode_tok_s for one in llm.generate(prompts, params)]
    return sum(rate for rate in rates if rate is not None), llm.sparsity


def _traced(llm: LLM, path: Path) -> dict[str, Any]:
    """What takes the time of a few steps of one request; the spans as a Chrome trace at the path."""
    params = SamplingParams(max_tokens=TRACED + UNRECORDED, temperature=0.0, ignore_eos=True)
    with llm.traced() as trace:
        llm.generate([[1]], params)
    path.write_text(json.dumps(trace.document()) + "\n")
    return trace.summary() | {"path": path.name}


def _at_once(llm: LLM, gpu_s: float) -> dict[str, Any] | None:
    """Of steps that are one replay, which no trace sees into, how far the devices overlap; None where none is split.

    The GPU's calls of the CPU say how long it waited and worked. How long the GPU works is known of traced steps
    (gpu_s), but not when, so the share of a step in which either works is between two bounds.
    """
    if not isinstance(llm._sparsity, HybridSparsity) or not llm._sparsity.ffns:
        return None
    for ffn in llm._sparsity.ffns:
        ffn.take_seconds()
    params = SamplingParams(max_tokens=AT_ONCE, temperature=0.0, ignore_eos=True)
    rate = llm.generate([[1]], params)[0].timings.decode_tok_s
    seconds = [ffn.take_seconds() for ffn in llm._sparsity.ffns]
    assert rate is not None
    waited, worked = (sum(each) / AT_ONCE for each in zip(*seconds, strict=True))
    return {"steps": llm.choices.get("steps"), "waited_s": waited, **bounds(1 / rate, worked, gpu_s)}


def bounds(step_s: float, cpu_s: float, gpu_s: float) -> dict[str, float]:
    """Of the share of a step in which one of the devices works, or both: if they work at the same time as far as they
    can, and if they never do."""
    least, most = max(cpu_s, gpu_s) / step_s, (cpu_s + gpu_s) / step_s
    return {"step_s": step_s, "cpu_s": cpu_s, "gpu_s": gpu_s, "least": min(1.0, least), "most": min(1.0, most)}


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
    are read and written. task: model, gpu, tokens (a list). RuntimeError for a sum that is not that of float64.
    """

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
        off = gpu_kernels.off(neurons, *inputs[0])
        most = gpu_kernels.same("neurons", neurons.up.type)
        if not off <= most:
            raise RuntimeError(f"not timed: the sum is off by {off:.3g} of its size, more than {most}")
        calls = [_sum(neurons, x, selected) for x, selected in inputs]
        fired = [int((call()[1] > 0).sum()) for call in calls]
        bytes_read = median(fired) * neurons.nbytes / neurons.n
        seconds = gpu_kernels.seconds(lambda i, calls=calls: calls[i](), SETS, str(device))
        runs.append({"tokens": tokens, "fired": median(fired), "bytes": bytes_read, "seconds": seconds, "off": off})
    copied = gpu_kernels.copy_gb_s(str(device))
    for run in runs:
        run["gb_s"] = run["bytes"] / run["seconds"] / 1e9
        run["share_of_copy"] = run["gb_s"] / copied
    return {"neurons": neurons.n, "kernel": gpu.which(neurons.up.data), "copy_gb_s": copied, "runs": runs}


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

    to, fired = x.clone(), selected[0].long()
    return lambda: gpu.neuron_sum(neurons, x, selected, 0.0, to, fired)


# ---------------------------------------------------------------- tasks


def hardware(task: dict[str, Any]) -> dict[str, Any]:
    """What the machine is measured to do; kept, and taken by every later run."""
    return asdict(measure.measured(EngineConfig(threads=task["threads"]), gpu=task["gpu"]))


def make(task: dict[str, Any]) -> dict[str, Any]:
    """Model, profile, predictor and bundles; the bytes of its file."""
    path = Path(task["model"])
    begin = time.perf_counter()
    made = recipes.recipe(task["name"], task["scale"], task["distinct"])
    prepared.prepare(path, made.plan, made.stored, cpu.choose_threads(task["threads"])[0])
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
    works = (decode, prefill, kernel, hardware, make, card, reference)
    work = {work.__name__: work for work in works}[task["what"]]
    with memory_of(task.get("ram")), rates_once():
        return _performed(work, task)


def rates_once() -> AbstractContextManager[Any]:
    """The machine's rates are those that were measured first, though other programs disturbed that (`disturbed`): to
    measure again in every job would take minutes, and their plans would differ."""
    return mock.patch.object(measure, "quiet", lambda: False)


@contextmanager
def hardware_of(gpu: str, ram: int | None) -> Iterator[None]:
    """The machine's rates are measured once, or `stand_in`'s where torch's CPU device is the GPU; ram: as of
    `memory_of`."""
    emulated = mock.patch.object(measure, "measured", lambda *_, **__: stand_in())
    with emulated if gpu == "cpu" else nullcontext(), memory_of(ram), rates_once():
        yield


@contextmanager
def memory_of(ram: int | None) -> Iterator[None]:
    """That many bytes are there and free, whatever the machine says: it may have more once they are used."""
    with ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("powerinfer.")]:
            for name in ("total_memory", "available_memory"):
                if ram is not None and hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda: ram))
        yield


def _performed(work: Callable[[dict[str, Any]], dict[str, Any]], task: dict[str, Any]) -> dict[str, Any]:
    if task.get("gpu") != "cpu":
        return work(task)
    import torch

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
