"""The threads of a pool: when they spin, when they park, and that neither loses a job."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from powerinfer import _native

THREADS = 3
PATIENCE = 20.0  # seconds, on a machine that does other things


def states() -> dict[int, str]:
    """Of this process's threads, as Linux has it: R runs or could, S sleeps."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        found[int(task.name)] = (task / "stat").read_text().rpartition(")")[2].split()[0]
    return found


def until(workers: set[int], state: str) -> bool:
    """Whether all of them come to that state."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        if all(found == state for thread, found in states().items() if thread in workers):
            return True
        time.sleep(0.002)
    return False


@pytest.fixture
def pool() -> tuple[_native.Pool, set[int]]:
    before = set(states())
    made = _native.Pool(THREADS)
    workers = set(states()) - before
    assert len(workers) == THREADS - 1
    return made, workers


def product(pool: _native.Pool) -> None:
    """A job with barriers, whose result depends on all threads."""
    rows, k = 96, 64
    data = np.ones((rows, k), np.float32)
    matrix = _native.pack_matrix(pool, _native.Arena(), "F32", rows, k, data.view(np.uint8).ravel())
    out = np.zeros((1, rows), np.float32)
    _native.matmul(pool, matrix, "", np.ones((1, k), np.float32), out)
    np.testing.assert_array_equal(out, np.full((1, rows), k, np.float32))


def test_idle_threads_park_and_work_again(pool: tuple[_native.Pool, set[int]]) -> None:
    made, workers = pool
    for _ in range(5):
        assert until(workers, "S")
        product(made)


def test_threads_that_are_kept_awake_do_not_park(pool: tuple[_native.Pool, set[int]]) -> None:
    made, workers = pool
    assert until(workers, "S")
    made.keep_awake()
    made.keep_awake()
    assert until(workers, "R")
    made.let_park()
    time.sleep(0.05)  # many times as long as they spin before they park
    seen = [states() for _ in range(20)]
    assert all(found[thread] == "R" for found in seen for thread in workers)
    product(made)
    made.let_park()
    assert until(workers, "S")
    product(made)


def test_no_job_is_lost_between_spinning_and_parking(pool: tuple[_native.Pool, set[int]]) -> None:
    """Pauses about as long as the threads spin, while another thread lets them park and wakes them."""
    made, _ = pool
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            made.keep_awake()
            time.sleep(0.0003)
            made.let_park()
            time.sleep(0.0012)

    other = threading.Thread(target=disturb, daemon=True)
    other.start()
    try:
        for n in range(300):
            product(made)
            time.sleep(1e-5 * (n % 200))
    finally:
        stop.set()
        other.join()


def test_a_pool_ends_while_its_threads_park_or_spin() -> None:
    for n in range(40):
        made = _native.Pool(THREADS)
        if n % 2:
            made.keep_awake()
        time.sleep(0.0002 * (n % 10))
        del made
