"""benchmarks/disk/order.py: it reads what slots and reads of the engine do, and finds who fires together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_reads import open_reads, random_file

from benchmarks.disk import order
from powerinfer._native import Resting, Slots
from powerinfer.devices.rankings import Lfu

NEURONS, TOKENS, SLOTS = 200, 60, 90


def activity(seed: int) -> np.ndarray:
    """Up to 80 of 200 neurons for each token, in groups of 10 that fire together and are spread over the layer."""
    rng = np.random.default_rng(seed)
    groups = rng.random((TOKENS, NEURONS // 10)) < np.linspace(0.05, 0.5, NEURONS // 10)
    return np.tile(groups, 10) & (rng.random((TOKENS, NEURONS)) < 0.9)


@pytest.mark.parametrize("bundle", [order.Bundle(1920, 640), order.Bundle(6912, 2304)])
@pytest.mark.parametrize("gap", [0, 24 << 10])
def test_it_reads_what_the_engine_reads(bundle: order.Bundle, gap: int, tmp_path: Path) -> None:
    active = activity(1)
    assert active.sum(axis=1).max() <= SLOTS
    random_file(tmp_path / "a", NEURONS * bundle.nbytes)
    reads = open_reads([tmp_path / "a"], "threads", True)
    if not reads.direct:
        pytest.skip("this file system is not read past the cache")
    reads.gap = gap
    part = Resting(0, bundle.first, bundle.nbytes - bundle.first, bundle.nbytes)
    slots = Slots(reads, [part], NEURONS, SLOTS)
    frequency = activity(2).mean(axis=0)
    hot = np.argsort(-frequency, kind="stable")
    slots.want(np.sort(hot[:SLOTS]).astype(np.int32))
    slots.wait()
    slots.let_go()
    before = reads.stats().joined
    policy = Lfu(frequency[None].astype(np.float32))
    missing = order.misses(active, frequency, SLOTS)
    for now, read in zip(active, missing, strict=True):
        slots.priority[:] = policy.priority[0]
        assert np.flatnonzero(read).tolist() == [i for i in np.flatnonzero(now).tolist() if not slots.held(i)]
        assert slots.want(np.flatnonzero(now).astype(np.int32)) == now.sum()
        slots.wait()
        slots.let_go()
        policy.observe(now[None].astype(np.int32), 1)
    sizes = order.read_sizes(missing, np.arange(NEURONS), bundle, gap)
    assert len(sizes) == reads.stats().joined - before
    assert len(sizes) < missing.sum()


def test_an_order_by_what_fires_together_saves_reads() -> None:
    train, test = activity(2), activity(1)
    path = order.together(train)
    assert sorted(path.tolist()) == list(range(NEURONS))
    groups = path % (NEURONS // 10)
    assert (groups[1:] != groups[:-1]).sum() < 2 * NEURONS // 10  # a group is mostly in one piece
    figures = {(share, bundle, name): found for share, bundle, name, found in order.replayed(train, test, [0.2, 0.5])}
    for share, bundle, name in figures:
        plain = figures[share, bundle, "file"]
        assert figures[share, bundle, name][0] == plain[0] > 0
        if name == "together":
            assert figures[share, bundle, name][1] < plain[1] and figures[share, bundle, name][3] < plain[3]
