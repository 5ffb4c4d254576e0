"""Time the kernels of a GPU alone, as shares of the memory bandwidth that a copy reaches.

    python -m benchmarks.hybrid.gpu_kernels [--d-model 8192] [--d-ff 28672] [--active 0.1] [--sweep] [--out FILE]
    python -m benchmarks.hybrid.gpu_kernels --d-model 8192 --d-ff 32768 --plain         Falcon-40B's FFN, without gates
    python -m benchmarks.hybrid.gpu_kernels --d-model 4096 --d-ff 14336 --activation drelu
    python -m benchmarks.hybrid.gpu_kernels --sweep --kernels neurons --types F16/F16 --tokens 1      some of them

For every type of weights a matrix against 1, 8 and 32 tokens; for those of neurons a layer of which a share is
selected, all of which fire, gated (ReGLU or dReLU) or --plain, of one token also by one kernel (fused); then a
predictor, attention over long contexts, and the sum of a layer's experts, 8 a token of 128 as Qwen3-30B-A3B has them.
A kernel's reads are counted once, the neurons that any token selects for all tokens together. Weights are taken in turn
from copies that are larger in all than any cache, in steps that are recorded as CUDA graphs, so that neither caches nor
Python help or hinder; experts are there once, 350 MB of them, and calls of one token take others of them in turn.

--sweep tries other tiles for each of these and says which were fastest; it compiles dozens of kernels for each, so
choose what is swept where time is short. What is timed is written to --out as it comes. Without a GPU (--device cpu)
plain torch is timed, which only shows that the script runs. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.lib import machine, results
from powerinfer.config import AttentionConfig
from powerinfer.formats.quant import block_type
from powerinfer.formats.weight_types import FLOAT_TYPES
from powerinfer.hardware.samples import Samples
from powerinfer.kernels import gpu, gpu_experts, gpu_types

KERNELS = ("linear", "neurons", "fused", "predict", "attention", "experts")
TOKENS = (1, 8, 32)
TYPES = (("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q4_0", "Q4_0X32"))
UNCACHED = 512 << 20  # bytes that copies of weights come to
COPIED = 4 << 30  # bytes of the copy that kernels are held against, or a fourth of the memory that is left
CALLS = 16  # of a recorded step
REPEATS = 7
CONTEXT = 4096
EXPERTS, EXPERT_SIZE, TOP_K = 128, 768, 8
CHECKED = 4  # tokens
EXPERTS_SAME = 0.02  # activations of decode are rounded to 8 bits


def same(what: str, kind: str) -> float:
    """How far results may differ, as a share of their size: sums in another order, of types that are quantised of
    weights that may be rounded to float16; of a predictor some neurons next to the threshold."""
    return 0.02 if what == "predict" else 1e-4 if kind.partition("/")[0] in FLOAT_TYPES else 5e-4


Call = Callable[[int], Any]
"""A kernel on the i-th copy of what it reads, and what it gives."""


def random_weight(kind: str, rows: int, k: int, device: str) -> gpu.Weight:
    weight = gpu.empty(kind, rows, k, device)
    if weight.data.is_floating_point():
        weight.data.normal_(0, k**-0.5)
    else:
        info = torch.iinfo(weight.data.dtype)
        weight.data.random_(info.min, info.max + 1)
    if weight.scales is not None:
        weight.scales.fill_(0.2 * k**-0.5)
    return weight


def random_weights(kind: str, rows: int, k: int, device: str) -> list[gpu.Weight]:
    """As many as no cache holds."""
    copies = range(copies_of(gpu.weight_bytes(kind, rows, k), device))
    if kind not in gpu.CUT:
        return [random_weight(kind, rows, k, device) for _ in copies]
    sample = Samples("", 1, 0, lambda *_: None).normal(kind, rows, k)  # in random bytes some scales are not finite
    return [gpu.upload(sample, device) for _ in copies]


def random_neurons(
    types: tuple[str, str], n: int, d_model: int, device: str, activation: str = "relu", plain: bool = False
) -> gpu.Neurons:
    """A layer all of whose neurons fire if they are selected. plain: without gates."""
    gate, up, down = (random_weight(kind, n, d_model, device) for kind in (types[0], *types))
    across = types[1] == "Q4_0X32"
    shared = torch.full((-(-n // 32), d_model), 0.01, dtype=torch.float16, device=device) if across else None
    group = (torch.arange(n, device=device) // 32).int() if across else None
    high = torch.full((n,), 1e3, device=device)
    biases = (None if plain else high, high if plain or activation == "drelu" else None)
    return gpu.Neurons(None if plain else gate, up, down, shared, group, *biases, activation, 0.0)


def off(neurons: gpu.Neurons, x: torch.Tensor, selected: torch.Tensor, fused: bool = False) -> float:
    """How far the kernel's sum of the selected neurons is from plain torch's in float64, as a share of its size."""
    wide, total = x.double(), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for begin, end in gpu.pieces(neurons.n, neurons.up.k, 1 << 22):

        def rows(weight: gpu.Weight, bias: torch.Tensor | None, some: slice = slice(begin, end)) -> torch.Tensor:
            z = wide @ gpu.values(weight, some.start, some.stop).double().T
            return z if bias is None else z + bias[some]

        up = rows(neurons.up, neurons.up_bias)
        limit = neurons.threshold if neurons.limits is None else neurons.limits[begin:end]
        if neurons.gate is None:
            h = gpu.activate(neurons.activation, up, None, limit)
        else:
            least = None if neurons.product_limits is None else neurons.product_limits[begin:end]
            gate = rows(neurons.gate, neurons.gate_bias)
            h = gpu.activate(neurons.activation, gate, up, limit, product_limits=least)
        scales = None if neurons.shared is None else neurons.shared[(neurons.group[begin:end]).long()]  # type: ignore[index]
        down = gpu.values(neurons.down, begin, end, scales)
        total += h.masked_fill(selected[:, begin:end] == 0, 0) @ down.double()
    found = gpu.neuron_sum(neurons, x, selected, fused=fused)[0].double()
    return float((found - total).norm() / total.norm())


def seconds(call: Call, copies: int, device: str) -> float:
    """Of one call, the median over the repeats."""
    calls = max(CALLS, copies)
    if device == "cpu":
        call(0)
        begin = time.perf_counter()
        for i in range(copies):
            call(i)
        return (time.perf_counter() - begin) / copies
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call(0)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for i in range(calls):
            call(i % copies)
    times = []
    for _ in range(REPEATS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return median(times[1:])


def launched_seconds(call: Call) -> float:
    """The same of calls that are launched one by one, as prompts are, and are not recorded."""
    call(0)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(REPEATS + 1):
        begin.record()
        for _ in range(CALLS):
            call(0)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return median(times[1:])


def copy_gb_s(device: str) -> float:
    """Bytes read and written by a copy, 1e9 a second: launched, for in a recording copies are slower."""
    size = 1 << 24 if device == "cpu" else min(COPIED, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device == "cpu":
        return 2 * size / seconds(lambda _: target.copy_(source), 1, device) / 1e9
    times = []
    for _ in range(REPEATS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * size / median(times[1:]) / 1e9


def copies_of(nbytes: int, device: str) -> int:
    return 2 if device == "cpu" else -(-UNCACHED // nbytes)


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int, int, int, Call]]:
    """(what, type, tokens, bytes read, copies, call)."""
    device, d_model, d_ff = arguments.device, arguments.d_model, arguments.d_ff

    def wanted(what: str, kind: str) -> bool:
        return what in arguments.kernels and (arguments.types is None or kind in arguments.types)

    for kind in dict.fromkeys((*(kind for kind, _ in TYPES), *gpu.CUT)):
        if not wanted("linear", kind) or d_model % block_type(kind).block:
            continue
        nbytes = gpu.weight_bytes(kind, d_model, d_model)
        weights = random_weights(kind, d_model, d_model, device)
        for tokens in arguments.tokens:
            x = torch.randn(tokens, d_model, device=device)
            yield "linear", kind, tokens, nbytes, len(weights), lambda i, w=weights, x=x: gpu.linear(w[i], x)
    for types in [types for types in TYPES if wanted("neurons", "/".join(types)) or wanted("fused", "/".join(types))]:
        made = types, d_ff, d_model, device, arguments.activation, arguments.plain
        one = random_neurons(*made)
        active = int(one.nbytes * arguments.active)
        layers = [one] + [random_neurons(*made) for _ in range(min(copies_of(active, device), 4) - 1)]
        rows = sum(w.nbytes for w in (one.gate, one.up, one.down) if w is not None) // d_ff
        for tokens in arguments.tokens:
            x = torch.randn(tokens, d_model, device=device)
            chosen = np.random.default_rng(tokens).random((tokens, d_ff)) < arguments.active
            union = np.flatnonzero(chosen.any(axis=0))
            shared = 0 if one.shared is None else len(np.unique(union // 32)) * 2 * d_model
            selected = torch.from_numpy(chosen.astype(np.uint8)).to(device)
            to, fired = torch.zeros_like(x), torch.zeros(d_ff, dtype=torch.int64, device=device)
            for what in ("neurons", "fused") if tokens == 1 else ("neurons",):
                if what in arguments.kernels:
                    apart = off(one, x, selected, what == "fused")
                    if not apart <= same(what, "/".join(types)):
                        raise RuntimeError(f"not timed: {what} of {'/'.join(types)} is off by {apart:.3g} of its size")
                    given = x, selected, 0.0, to, fired, what == "fused"
                    call = lambda i, n=layers, given=given: gpu.neuron_sum(n[i], *given)  # noqa: E731
                    yield what, "/".join(types), tokens, len(union) * rows + shared, len(layers), call
    if wanted("predict", "Q8_0"):
        rank = d_model // 8
        nbytes = gpu.weight_bytes("Q8_0", rank, d_model) + gpu.weight_bytes("Q8_0", d_ff, rank)
        pairs = [
            (random_weight("Q8_0", rank, d_model, device), random_weight("Q8_0", d_ff, rank, device))
            for _ in range(copies_of(nbytes, device))
        ]
        for tokens in arguments.tokens:
            x, hot = torch.randn(tokens, d_model, device=device), d_ff // 4
            to = tuple(torch.empty(tokens, n, dtype=torch.uint8, device=device) for n in (hot, d_ff - hot))
            numbers = torch.arange(d_ff, dtype=torch.int32, device=device)
            given = numbers, x, 0.5, 8, to
            call = lambda i, p=pairs, given=given: (gpu.predict(*p[i], *given), given[-1][1])[1]  # noqa: E731
            yield "predict", "Q8_0", tokens, nbytes, len(pairs), call
    if "attention" in arguments.kernels:
        for context in arguments.contexts or (CONTEXT,):
            yield from attention_cases(device, d_model, arguments.tokens, context)
    if wanted("experts", "Q4_0"):
        yield from expert_cases(device, d_model, arguments.tokens)


def experts_off(experts: gpu_types.Experts, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> float:
    """How far the sum is from plain torch's in float64, as a share of its size, of the first tokens."""
    assert experts.gate is not None
    found, size, d_model = gpu_experts.expert_sum(experts, x, slots, weights)[:CHECKED], experts.size, x.shape[1]
    total = torch.zeros_like(found, dtype=torch.float64)

    def rows(weight: gpu.Weight, slot: int, n: int) -> torch.Tensor:
        return gpu.values(weight, slot * n, (slot + 1) * n).double()

    for token, own in enumerate(slots[:CHECKED].tolist()):
        for slot, weight in zip(own, weights[token].tolist(), strict=True):
            gate, up = (rows(one, slot, size) @ x[token].double() for one in (experts.gate, experts.up))
            total[token] += weight * (rows(experts.down, slot, d_model) @ (torch.nn.functional.silu(gate) * up))
    return float((found.double() - total).norm() / total.norm())


def expert_cases(device: str, d_model: int, sizes: Sequence[int]) -> Iterator[tuple[str, str, int, int, int, Call]]:
    """Of random tokens, each with experts of its own; what no token selects is not counted."""
    n = 2 * TOP_K if device == "cpu" else EXPERTS
    kinds = [random_weight("Q4_0", n * EXPERT_SIZE, d_model, device) for _ in "gu"]
    down = random_weight("Q4_0", n * d_model, EXPERT_SIZE, device)
    experts = gpu_types.Experts(n, EXPERT_SIZE, *kinds, down, "silu", 0.0)
    each = sum(one.nbytes for one in (*kinds, down)) // n
    for tokens in sizes:
        x = torch.randn(tokens, d_model, device=device)
        if tokens == 1:  # the experts of one selection fit into a cache
            slots = torch.randperm(n, device=device).int().view(-1, 1, TOP_K)
        else:
            slots = torch.rand(1, tokens, n, device=device).topk(TOP_K).indices.int()
        weights = torch.full((tokens, TOP_K), 1 / TOP_K, device=device)
        apart = experts_off(experts, x, slots[0], weights)
        if not apart <= EXPERTS_SAME:
            raise RuntimeError(f"not timed: experts of {tokens} tokens are off by {apart:.3g} of their sum's size")
        given = x, slots, weights
        call = lambda i, given=given: gpu_experts.expert_sum(experts, given[0], given[1][i], given[2])  # noqa: E731
        yield "experts", "Q4_0", tokens, each * len(slots[0].unique()), len(slots), call


def attention_cases(
    device: str, d_model: int, sizes: Sequence[int], context: int
) -> Iterator[tuple[str, str, int, int, int, Call]]:
    dim = 128
    heads, pages = d_model // dim, context // gpu.PAGE
    for kv_heads, tokens in itertools.product((max(1, heads // 8), heads), sizes):
        shape = (tokens * pages, gpu.PAGE, kv_heads, dim)
        nbytes = 2 * 2 * int(np.prod(shape))
        caches = [
            tuple(gpu.Cached(torch.randn(shape, device=device).half()) for _ in "kv")
            for _ in range(min(copies_of(nbytes, device), 8))
        ]
        table = torch.arange(tokens * pages, dtype=torch.int32, device=device).view(tokens, pages)
        rows = torch.arange(tokens, dtype=torch.int32, device=device)
        positions = torch.full((tokens,), context - 1, dtype=torch.int32, device=device)
        q = torch.randn(tokens, heads, dim, device=device)

        given = gpu.Contexts(table, rows, positions), AttentionConfig(heads, kv_heads, dim)

        def call(i: int, q: Any = q, caches: Any = caches, given: Any = given) -> None:
            gpu.attention(q, caches[i], *given)

        yield "attention", f"F16, {heads} heads on {kv_heads}, {context} tokens", tokens, nbytes, len(caches), call


@contextmanager
def tiles(what: str, kind: str, tokens: int) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Goes through other tiles for a case, which stand in the kernels' tables while one is looked at."""
    from powerinfer.kernels import triton_fused, triton_kernels, triton_neurons

    first, _, down = kind.partition("/")
    turns = triton_kernels.in_turn(first, tokens)
    tables: list[tuple[dict[str, Any], str]] = []
    if what in ("linear", "predict"):
        tables = [(triton_kernels.ONE if turns else triton_kernels.SEVERAL, first)]
    elif what == "neurons":
        tables = [
            (triton_neurons.DOT_ONE if turns else triton_neurons.DOT_SEVERAL, first),
            (triton_neurons.ADD_SEVERAL if tokens > 1 else triton_neurons.ADD_ONE, down),
        ]
    elif what == "fused":
        tables = [(triton_fused.PRODUCTS, first), (triton_fused.DOWN, down)]
    before = [table[name] for table, name in tables]

    def choices() -> Iterator[tuple[Any, ...]]:
        for number, ((table, name), own) in enumerate(zip(tables, before, strict=True)):
            least = 1 if tokens == 1 or (turns and number == 0) else 16
            each = (1,) if what == "fused" and number == 1 else (0.5, 1, 2)  # the warps are those of products
            for rows, columns, warps in itertools.product((0.5, 1, 2, 4), (0.5, 1, 2), each):
                tile = triton_kernels.Tile(int(own.rows * rows), int(own.columns * columns), int(own.warps * warps))
                if tile.warps and tile.rows >= least and tile.columns >= 32:
                    table[name] = tile
                    yield (*(t[n] for t, n in tables),)
            table[name] = own

    try:
        yield choices()
    finally:
        for (table, name), own in zip(tables, before, strict=True):
            table[name] = own


def swept(
    what: str, kind: str, tokens: int, call: Call, copies: int, device: str, most: float | None
) -> dict[str, Any]:
    """The fastest tiles of those tried, in at most so many seconds. Those that give another result are not timed."""
    from triton.errors import TritonError

    tried, wrong, begin = [], 0, time.monotonic()
    if what in ("attention", "experts"):  # they have no tables of tiles
        return {}
    wanted = computed(call)
    with tiles(what, kind, tokens) as choices:
        for chosen in choices:
            if most is not None and time.monotonic() - begin > most:
                break
            try:
                if not float((computed(call) - wanted).norm()) <= same(what, kind) * float(wanted.norm()):
                    wrong += 1
                    continue
                tried.append((seconds(call, copies, device), [list(tile) for tile in chosen]))
            except (TritonError, RuntimeError):  # too large for the GPU, or the compiler refuses it
                continue
    best = sorted(tried, key=lambda one: one[0])[:3]
    told = [{"us": round(1e6 * s, 2), "tiles": chosen} for s, chosen in best]
    return {"tried": len(tried), "wrong": wrong, "best": told}


def computed(call: Call) -> torch.Tensor:
    """What a kernel computes of the first copy: alone, or the first of what it returns, to which it may add."""
    for _ in range(2):
        found = call(0)
        tensor = found[0] if isinstance(found, tuple) else found
        assert isinstance(tensor, torch.Tensor)
        result = tensor.double().clone()
        tensor.zero_()
    return result


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = arguments.device
    peak = copy_gb_s(device)
    timed: list[dict[str, Any]] = []
    name = "torch on the CPU" if device == "cpu" else torch.cuda.get_device_name()
    sizes = {key: getattr(arguments, key) for key in ("d_model", "d_ff", "active", "activation", "plain")}
    document = {
        "kind": "gpu-kernels",
        **machine.description(),
        "device": name,
        "torch": torch.__version__,
        **sizes,
        "copy_gb_s": peak,
    }
    document["kernels"] = timed
    for what, kind, tokens, nbytes, copies, call in cases(arguments):
        with torch.inference_mode():
            launched = device != "cpu" and what == "experts" and tokens > gpu.FEW
            s = launched_seconds(call) if launched else seconds(call, copies, device)
            case = {"kernel": what, "type": kind, "tokens": tokens, "bytes": nbytes, "us": round(1e6 * s, 2)}
            case |= {"gb_s": round(nbytes / s / 1e9, 1), "share": round(nbytes / s / 1e9 / peak, 3)}
            if what == "experts":
                flops = 6 * tokens * TOP_K * EXPERT_SIZE * arguments.d_model
                case["tflop_s"] = round(flops / s / 1e12, 3)
            if arguments.sweep:
                case |= swept(what, kind, tokens, call, copies, device, arguments.sweep_seconds)
        timed.append(case)
        print(json.dumps(case), flush=True)
        if arguments.out is not None:
            results.write_json(arguments.out, document)
    return document


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--d-model", type=int, default=8192)
    parser.add_argument("--d-ff", type=int, default=28672, help="neurons of a layer that are on the GPU")
    parser.add_argument("--active", type=float, default=0.1, help="share of them that a token needs")
    parser.add_argument("--activation", default="relu", choices=("relu", "drelu"))
    parser.add_argument("--plain", action="store_true", help="neurons without gates")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="default: all")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="as the results name them, such as F16/F16")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="default: 1 8 32")
    parser.add_argument("--contexts", nargs="+", type=int, help=f"of attention; default: {CONTEXT}")
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--sweep-seconds", type=float, metavar="N", help="that it may take of each; default: no limit")
    parser.add_argument("--out", type=Path, help="write the document there too")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here")
    if arguments.plain and arguments.activation == "drelu":
        parser.error("dReLU has gates")
    if arguments.device == "cpu" and arguments.sweep:
        parser.error("tiles are those of Triton's kernels, which need a GPU")
    document = measure(arguments)
    print(json.dumps(document))
    return document


if __name__ == "__main__":
    main()
