"""Whether neurons that fire together should lie together on disk: replays what the samples of two profiles recorded.

    powerinfer profile -m MODEL --corpus TEXT --prepared TRAIN
    powerinfer profile -m MODEL --corpus OTHER --prepared TEST
    python -m benchmarks.disk.order MODEL --train TRAIN --test TEST [--layers 3 14 25] [--tokens 1200]

Orders are made from TRAIN, and used for TEST:

    file       the model's own
    frequency  those that fire most often first
    together   paths that are joined greedily, of two neurons that fire together most often first, as RIPPLE does
               (arXiv 2410.19274, section 4.2)

RAM has a share of each layer's neurons, at first the most frequent of TRAIN, then by `lfu`. What a token lacks is read
as `csrc/reads.cpp` does: across the gap that the disk's curve says, in reads of up to 64 KiB. A table has, of a token
and layer, the neurons that RAM lacks, the reads, their bytes, and the time that the disk takes; of the other orders by
how much that differs. The samples must have every token: `--samples` of `profile` large enough.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.rankings import Lfu
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.samples_file import SamplesFile, open_samples
from powerinfer.hardware.description import Disk

BLOCK = 4096
LONGEST = 64 << 10  # bytes of a joined read
CURVE = Disk({4096: 0.31, 16384: 0.81, 65536: 1.63, 262144: 2.16, 1 << 20: 2.71, 4 << 20: 2.50})
"""GB/s of the disk of docs/benchmarks.md, as it was measured with dReLU."""

Fired = NDArray[np.bool_]
Order = NDArray[np.int64]


class Bundle(NamedTuple):
    """nbytes: of a neuron; first: of these, those that `exact` does not read."""

    nbytes: int
    first: int


BUNDLES = (Bundle(1920, 640), Bundle(6912, 2304))
"""SmolLM2-135M's in Q8_0, a 7B model's in Q4_0."""


def fired(samples: SamplesFile, layer: int, neurons: int) -> Fired:
    """[rows, neurons]"""
    return np.unpackbits(samples.layers[layer][1], axis=1, bitorder="little")[:, :neurons].astype(bool)


def misses(active: Fired, frequency: NDArray[np.float64], slots: int) -> Fired:
    """What is read for each token, one after another: bool [tokens, neurons]. What the token uses stays, of the others
    those of highest priority, `slots` in all."""
    policy = Lfu(frequency[None].astype(np.float32))
    held = np.zeros(active.shape[1], bool)
    held[np.argsort(-frequency, kind="stable")[:slots]] = True
    read = np.empty_like(active)
    for now, missing in zip(active, read, strict=True):
        missing[:] = now & ~held
        held |= missing
        there = np.flatnonzero(held)
        priority = np.where(now, np.inf, policy.priority[0])[there]
        held[there[np.argsort(priority, kind="stable")[: max(0, len(there) - slots)]]] = False
        policy.observe(now[None].astype(np.int32), 1)
    return read


def read_sizes(missing: Fired, order: Order, bundle: Bundle, gap: int) -> NDArray[np.int64]:
    """Bytes of each read, of all tokens. order: neuron order[i] is bundle i."""
    token, at = np.nonzero(missing[:, order])
    begin = at * bundle.nbytes + bundle.first
    end = begin + bundle.nbytes - bundle.first
    starts, stops = begin // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
    apart = np.ones(len(at), bool)
    apart[1:] = (token[1:] != token[:-1]) | (begin[1:] - stops[:-1] > gap)
    sizes = []
    runs = np.append(np.flatnonzero(apart), len(at))
    for first, last in pairwise(runs.tolist()):
        while end[last - 1] - starts[first] > LONGEST:  # its first part, which ends before the first that does not fit
            fits = first + int(np.searchsorted(end[first:last], starts[first] + LONGEST, "right"))
            sizes.append(stops[fits - 1] - starts[first])
            first = fits
        sizes.append(stops[last - 1] - starts[first])
    return np.array(sizes, np.int64)


def together(active: Fired) -> Order:
    """The neurons of a layer as one path, greedily joined: of two that fire together most often first."""
    n = active.shape[1]
    both = active.astype(np.float32)
    rows, columns = np.triu_indices(n, 1)
    best = np.argsort(-(both.T @ both)[rows, columns], kind="stable")
    parent = list(range(n))
    links: list[list[int]] = [[] for _ in range(n)]

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, j in zip(rows[best].tolist(), columns[best].tolist(), strict=True):
        if len(links[i]) < 2 and len(links[j]) < 2 and root(i) != root(j):
            parent[root(i)] = root(j)
            links[i].append(j)
            links[j].append(i)
    path, before = [next(i for i in range(n) if len(links[i]) < 2)], -1
    while len(path) < n:
        before, here = path[-1], next(i for i in links[path[-1]] if i != before)
        path.append(here)
    return np.array(path)


def replayed(train: Fired, test: Fired, shares: Sequence[float]) -> Iterator[tuple[float, Bundle, str, list[float]]]:
    """(share, bundle, order, [neurons missing, reads, bytes, seconds] of a token)."""
    frequency = train.mean(axis=0)
    hot = np.argsort(-frequency, kind="stable")
    orders = {"file": np.arange(len(hot)), "frequency": hot, "together": together(train)}
    for share in shares:
        missing = misses(test, frequency, int(share * len(hot)))
        for bundle in BUNDLES:
            gap = CURVE.gap(bundle.nbytes - bundle.first + BLOCK)
            for name, order in orders.items():
                sizes = read_sizes(missing, order, bundle, gap)
                seconds = sum(map(CURVE.seconds, sizes.tolist()))
                figures = [int(missing.sum()), len(sizes), int(sizes.sum()), seconds]
                yield share, bundle, name, [one / len(test) for one in figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--train", required=True, help="folder of a profile with samples")
    parser.add_argument("--test", required=True, help="the same of another text")
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 14, 25])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2, 0.4, 0.6], help="of the neurons in RAM")
    parser.add_argument("--tokens", type=int, default=1200, help="of TEST: half from its beginning, half from its end")
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    samples = [open_samples(checkpoint, folder) for folder in (args.train, args.test)]
    found: dict[tuple[float, Bundle, str], list[list[float]]] = {}
    active = []
    for layer in args.layers:
        train, test = (fired(one, layer, checkpoint.config.ffn_sizes[layer]) for one in samples)
        half = args.tokens // 2
        test = np.concatenate([test[:half], test[-half:]])
        active.append(test.mean())
        for share, bundle, name, figures in replayed(train, test, args.shares):
            found.setdefault((share, bundle, name), []).append(figures)
    print(f"layers {args.layers}: {100 * np.mean(active):.1f} % of the neurons fire")
    print("| in RAM | bytes of a neuron | order | missing | reads | KiB | us |\n|---:|---:|---|---:|---:|---:|---:|")
    for (share, bundle, name), each in found.items():
        missing, *figures = np.mean(each, axis=0)
        plain = np.mean(found[share, bundle, "file"], axis=0)[1:]
        if name == "file":
            cells = [f"{one:.0f}" for one in figures * np.array([1, 1 / 1024, 1e6])]
        else:
            cells = [f"{100 * change:+.1f} %" for change in figures / plain - 1]
        head = f"{100 * share:.0f} % | {bundle.nbytes - bundle.first} | {name} | {missing:.0f}"
        print(f"| {head} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
