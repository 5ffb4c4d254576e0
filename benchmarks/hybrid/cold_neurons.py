"""Time the CPU's part of a hybrid FFN alone: the cold neurons of a layer, for batches of several sizes.

    python -m benchmarks.hybrid.cold_neurons [--types F16/F16,Q4_0/Q4_0X32] [--tokens 1,8,16,32] [--threads N]

Random bundles of several layers, more than caches hold, whose neurons fire independently of each other, each with its
own probability, spread evenly on a logarithmic scale (--fires LEAST:MOST). `exact` computes every gate; `selected`
those of the neurons that fire and of one in five others, as an imperfect predictor would. Each line: milliseconds of
a layer, the bytes of the rows that some token needs (every gate, or those selected; up and down of firing neurons), and
these over the time.
"""

from __future__ import annotations

import argparse
import time
from statistics import NormalDist, median
from typing import Any

import numpy as np

from powerinfer.config import AttentionConfig, EngineConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.bundle_file import bundle_layouts, n_groups
from powerinfer.formats.bundle_memory import SomeBundles, own_pages
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import cpu
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout

SAMPLE = 1024  # neurons that are random; the others are copies of these, with biases of their own
IN_VAIN = 0.2


def random_rows(rng: Any, type_name: str, shape: tuple[int, int], deviation: float) -> RawTensor:
    """A tensor whose values have that deviation."""
    if type_name == "F16":
        data = (deviation * rng.standard_normal(shape, np.float32)).astype(np.float16)
        return RawTensor("F16", shape, data.view(np.uint8).reshape(-1))
    size, spread = {"Q4_0": (16, 4.63), "Q8_0": (32, 73.9)}[type_name]  # of evenly spread codes
    blocks = np.empty((shape[0] * shape[1] // 32, 2 + size), np.uint8)
    blocks[:, :2] = np.array([deviation / spread], np.float16).view(np.uint8)
    blocks[:, 2:] = rng.integers(0, 256, (len(blocks), size), np.uint8)
    return RawTensor(type_name, shape, blocks.reshape(-1))


def bundles(rng: Any, config: ModelConfig, layout: BundleLayout, layers: int) -> list[SomeBundles]:
    """Random bundles of that number of layers; activations of deviation 1 get products of deviation 1."""
    k, groups = layout.d_model, n_groups(config.widest_ffn)
    sample = np.zeros((SAMPLE // BUNDLE_GROUP, layout.group_bytes), np.uint8)
    parts = [("up", layout.gate_type), ("down", layout.down_type)]
    if layout.gated:
        parts.append(("gate", layout.gate_type))
    for name, type_name in parts:
        across = type_name == "Q4_0X32"
        shape = (SAMPLE * k // BUNDLE_GROUP, BUNDLE_GROUP) if across else (SAMPLE, k)
        rows = random_rows(rng, "Q4_0" if across else type_name, shape, k**-0.5)
        cpu.pack_bundle_rows(layout, name, SAMPLE, rows.data, sample, 1)
    out = own_pages(layers * groups * layout.group_bytes).reshape(layers, groups, layout.group_bytes)
    for layer in out:
        for begin in range(0, groups, len(sample)):
            layer[begin : begin + len(sample)] = sample[: groups - begin]
    index = np.arange(config.widest_ffn, dtype=np.int32)
    counts = np.full(groups, BUNDLE_GROUP, np.int32)
    return [SomeBundles(index, counts, layer.reshape(1, -1)) for layer in out]


def measure(args: argparse.Namespace, gate_type: str, down_type: str) -> None:
    rng = np.random.default_rng(5)
    k, n = args.d_model, args.neurons
    layer = LayerConfig(AttentionConfig(1, 1, 16, RopeConfig(dim=16)), FfnConfig(n, "relu", gated=args.gated))
    config = ModelConfig("cold", k, 32, 64, 1e-5, (layer,))
    engine = EngineConfig(threads=args.threads, context=64, isa=args.isa)
    executor = CpuExecutor(config, engine, dict.fromkeys(config.ropes, (np.ones(8, np.float32), 1.0)), first_layer=1)
    (layout,) = bundle_layouts(config, gate_type, down_type, cpu.bundle_row_bytes)
    least, most = args.fires
    p = np.exp(rng.uniform(np.log(least), np.log(most), n))
    bias = np.array([NormalDist().inv_cdf(one) for one in p], np.float32)
    biases = (bias, None) if args.gated else (None, bias)
    every = bundles(rng, config, layout, args.layers)
    parts = [executor.parts.bundled(0, layout, some, biases, count_fired=some is every[0]) for some in every]
    x = rng.standard_normal((max(args.tokens), k), np.float32)
    out = np.empty_like(x)
    fires = np.empty((len(x), n), bool)
    fired_for = np.empty(n, np.int64)
    for t in range(len(x)):
        parts[0].sum(x[t : t + 1], out[t : t + 1])
        parts[0].take_fired(fired_for)
        fires[t] = fired_for > 0
    selected = (fires | (rng.random(fires.shape) < IN_VAIN * p / (1 - p))).astype(np.uint8)
    for tokens in args.tokens:
        fired = fires[:tokens].any(0)
        scales = len(np.unique(np.flatnonzero(fired) // BUNDLE_GROUP)) * layout.shared_bytes
        rest = fired.sum() * (args.gated * layout.gate_bytes + layout.down_bytes) + scales
        for chosen, gates in ((None, n), (selected[:tokens], selected[:tokens].any(0).sum())):
            taken = []
            for _ in range(args.rounds):
                begin = time.perf_counter()
                for part in parts:
                    part.sum(x[:tokens], out[:tokens], chosen)
                taken.append((time.perf_counter() - begin) / len(parts))
            needed, way = gates * layout.gate_bytes + rest, "exact" if chosen is None else "selected"
            print(
                f"{gate_type}/{down_type} {tokens:3d} {way}: {1e3 * median(taken):8.2f} ms {needed / 1e6:7.1f} MB"
                f" {needed / median(taken) / 1e9:6.2f} GB/s (of the neurons {gates / n:.2f} gates, {fired.mean():.2f}"
                f" down; of a token {fires[:tokens].mean():.3f})",
                flush=True,
            )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="F16/F16,Q4_0/Q4_0X32", help="of gate and up, and of down")
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 16, 32])
    parser.add_argument("--d-model", type=int, default=4096)
    parser.add_argument("--neurons", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--fires", type=lambda text: [float(part) for part in text.split(":")], default=[0.002, 0.08])
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for types in args.types.split(","):
        measure(args, *types.split("/"))


if __name__ == "__main__":
    main()
