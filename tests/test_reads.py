"""Reads that go on while the caller computes, against the bytes of the files; the emulated disk and its faults."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from powerinfer._native import ReadError, Reads

BLOCK = Reads.ALIGN
PIECE = 512 << 10  # of reads.cpp
DEPTH = 256
UNTOUCHED = 0xA5
LONG = 1e5  # seconds

every_engine = pytest.mark.parametrize("engine", ["uring", "threads", "emulated"])
both_ways = pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])


def blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def random_file(path: Path, size: int, seed: int = 0) -> np.ndarray:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    data.tofile(path)
    return data


def open_reads(paths: Sequence[Path], engine: str, direct: bool = False) -> Reads:
    files = [(str(path), path.stat().st_size) for path in paths]
    if engine == "emulated":
        return Reads(files, direct, latency=0)
    try:
        return Reads(files, direct, engine)
    except ValueError as error:
        assert "io_uring cannot be used here" in str(error)
        pytest.skip(str(error))


class Batch:
    """Reads (file, offset, bytes) that were begun, into memory of their own with a block between them."""

    def __init__(self, reads: Reads, ranges: Sequence[tuple[int, int, int]]) -> None:
        self.reads, self.ranges, self.at, end = reads, ranges, [], 0
        for _, offset, size in ranges:
            self.at.append(end + offset % BLOCK)
            end += blocks(offset % BLOCK + size) + BLOCK
        raw = np.full(end + BLOCK, UNTOUCHED, np.uint8)
        self.memory = raw[-raw.ctypes.data % BLOCK :][:end]
        places = [(*one, at) for one, at in zip(ranges, self.at, strict=True)]
        self.ticket = reads.begin(places, self.memory)

    def check(self, files: Sequence[np.ndarray]) -> None:
        """Wait, and compare with the files; nothing else was written to, but past the cache the rest of a block."""
        self.reads.wait(self.ticket)
        other = np.ones(self.memory.size, bool)
        for (file, offset, size), at in zip(self.ranges, self.at, strict=True):
            np.testing.assert_array_equal(self.memory[at : at + size], files[file][offset : offset + size])
            mine = slice(at - at % BLOCK, blocks(at + size)) if self.reads.direct and size else slice(at, at + size)
            other[mine] = False
        assert (self.memory[other] == UNTOUCHED).all()


@every_engine
@both_ways
def test_the_bytes_of_the_files(tmp_path: Path, engine: str, direct: bool) -> None:
    rng = np.random.default_rng(1)
    paths = [tmp_path / name for name in "abcd"]
    sizes = 5 * PIECE + 4321, 3 * BLOCK, 77, 0
    files = [random_file(path, size, i) for i, (path, size) in enumerate(zip(paths, sizes, strict=True))]
    reads = open_reads(paths, engine, direct)
    assert reads.engine == engine and (direct or not reads.direct)

    def some(largest: int) -> tuple[int, int, int]:
        file = int(rng.integers(len(files)))
        offset = int(rng.integers(sizes[file] + 1))
        return file, offset, int(rng.integers(min(largest, sizes[file] - offset) + 1))

    ends = [(0, sizes[0] - 1, 1), (0, sizes[0] - BLOCK, BLOCK), (1, 2 * BLOCK, BLOCK), (2, 0, 77), (3, 0, 0)]
    batches = [
        Batch(reads, ends),
        Batch(reads, [(0, 0, sizes[0]), (0, 1, sizes[0] - 1), (0, PIECE, PIECE), (0, BLOCK, 2 * PIECE)]),
        Batch(reads, []),
        *(Batch(reads, [some(20_000) for _ in range(60)]) for _ in range(5)),
        *(Batch(reads, [some(4 * PIECE)]) for _ in range(5)),
        Batch(reads, [some(300) for _ in range(3 * DEPTH)]),
    ]
    for i in rng.permutation(len(batches)):
        batches[i].check(files)
        reads.wait(batches[i].ticket)  # nothing is left to wait for
    stats = reads.stats()
    ranges = [one for batch in batches for one in batch.ranges]
    assert (stats.reads, stats.bytes) == (len(ranges), sum(size for _, _, size in ranges))


@every_engine
def test_polling_brings_them_in(tmp_path: Path, engine: str) -> None:
    data = random_file(tmp_path / "a", 3 * DEPTH * BLOCK)
    reads = open_reads([tmp_path / "a"], engine, True)
    batch = Batch(reads, [(0, i * BLOCK, BLOCK) for i in range(3 * DEPTH)])  # more than are begun at once
    while not reads.done(batch.ticket):
        os.sched_yield()
    batch.check([data])
    assert reads.done(batch.ticket)
    assert reads.stats().active > 0


@every_engine
@both_ways
def test_a_thread_that_ends_leaves_its_reads(tmp_path: Path, engine: str, direct: bool) -> None:
    data = random_file(tmp_path / "a", 40 * PIECE)
    reads = open_reads([tmp_path / "a"], engine, direct)
    begun: list[Batch] = []
    for ranges in [(0, 9, 40 * PIECE - 9)], [(0, i * BLOCK, BLOCK) for i in range(DEPTH)]:
        thread = Thread(target=lambda ranges=ranges: begun.append(Batch(reads, ranges)))
        thread.start()
        thread.join()
    for batch in begun:
        batch.check([data])


def test_auto_is_what_works_here(tmp_path: Path) -> None:
    data = random_file(tmp_path / "a", 10_000)
    reads = Reads([(str(tmp_path / "a"), 10_000)], False)
    assert reads.engine in ("uring", "threads")
    Batch(reads, [(0, 5, 9_000)]).check([data])


@every_engine
@both_ways
@pytest.mark.parametrize("left", [0, 100, 3 * PIECE + BLOCK + 7])
def test_a_file_that_shrinks(tmp_path: Path, engine: str, direct: bool, left: int) -> None:
    path = tmp_path / "a"
    random_file(path, 5 * PIECE)
    reads = open_reads([path], engine, direct)
    os.truncate(path, left)
    for ranges in [(0, 0, 5 * PIECE)], [(0, 4 * PIECE, 9)], [(0, 0, min(left, 9))]:  # the last of what is still there
        with pytest.raises(ReadError, match="a changed while it was in use; load the model again"):
            reads.wait(Batch(reads, ranges).ticket)


@every_engine
def test_a_file_that_is_replaced(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "a"
    data = random_file(path, PIECE)
    reads = open_reads([path], engine)
    random_file(tmp_path / "b", PIECE, 1)
    os.replace(tmp_path / "b", path)  # the one that is open is still there
    Batch(reads, [(0, 7, PIECE - 7)]).check([data])


@every_engine
def test_a_file_that_is_overwritten(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "a"
    random_file(path, PIECE)
    reads = open_reads([path], engine)
    random_file(path, PIECE, 1)
    os.utime(path, ns=(1, 1))  # clocks of file systems are coarse
    batch = Batch(reads, [(0, 7, PIECE - 7)])
    with pytest.raises(ReadError, match="changed while it was in use"):
        reads.wait(batch.ticket)


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_an_error_of_the_system(tmp_path: Path, engine: str) -> None:
    data = random_file(tmp_path / "a", 4 * PIECE)
    reads = open_reads([tmp_path / "a"], engine)
    memory = mmap.mmap(-1, 4 * PIECE)
    buffer = np.frombuffer(memory, np.uint8)
    protect: Callable[[int], int] = lambda how: ctypes.CDLL(None).mprotect(  # noqa: E731
        ctypes.c_void_p(buffer.ctypes.data + PIECE), ctypes.c_size_t(PIECE), how
    )
    assert protect(mmap.PROT_READ) == 0
    ticket = reads.begin([(0, 0, 4 * PIECE, 0)], buffer)
    with pytest.raises(ReadError, match=f"^cannot read {tmp_path / 'a'}: {os.strerror(errno.EFAULT)}$"):
        reads.wait(ticket)
    assert protect(mmap.PROT_READ | mmap.PROT_WRITE) == 0
    reads.wait(reads.begin([(0, 0, 4 * PIECE, 0)], buffer))
    np.testing.assert_array_equal(buffer, data)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    def refused(path: str, size: int = 5) -> str:
        with pytest.raises(ReadError) as caught:
            Reads([(path, size)], True)
        return str(caught.value)

    (tmp_path / "a").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    assert refused(f"{tmp_path}/none") == f"cannot open {tmp_path}/none: {os.strerror(errno.ENOENT)}"
    assert refused(f"{tmp_path}/none\udcff") == f"cannot open {tmp_path}/none\udcff: {os.strerror(errno.ENOENT)}"
    assert refused(str(tmp_path)) == f"{tmp_path} is not a regular file"
    assert refused(f"{tmp_path}/pipe") == f"{tmp_path}/pipe is not a regular file"
    assert refused(f"{tmp_path}/a", 4) == f"{tmp_path}/a changed while it was in use; load the model again"
    assert issubclass(ReadError, OSError)


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    random_file(tmp_path / "a", 10_000)
    files = [(str(tmp_path / "a"), 10_000)]
    with pytest.raises(ValueError, match="'auto', 'uring' or 'threads', not 'aio'"):
        Reads(files, False, "aio")
    with pytest.raises(ValueError, match="latency"):
        Reads(files, False, latency=-1.0)
    reads = Reads(files, False, "threads")
    buffer = np.zeros(10_000, np.uint8)
    for bad in (1, 0, 5, 0), (-1, 0, 5, 0), (0, -1, 5, 0), (0, 0, -1, 0), (0, 9_999, 2, 0), (0, 2, 1 << 62, 0):
        with pytest.raises(ValueError, match=r"no such file|outside its file"):
            reads.begin([(0, 0, 1, 0), bad], buffer)
    for place in -1, 1:
        with pytest.raises(ValueError, match="no room"):
            reads.begin([(0, 0, 10_000, place)], buffer)
    for call in reads.wait, reads.done, reads.cancel:
        for ticket in -1, 0:
            with pytest.raises(ValueError, match="no such reads"):
                call(ticket)
    with pytest.raises(ValueError, match="patience"):
        reads.patience = float("nan")
    assert reads.stats().reads == 0
    past = Reads(files, True, "threads")
    if not past.direct:
        pytest.skip("this file system reads through its cache only")
    raw = np.zeros(4 * BLOCK, np.uint8)
    aligned = raw[-raw.ctypes.data % BLOCK :][: 2 * BLOCK]
    with pytest.raises(ValueError, match="aligned as the file is"):
        past.begin([(0, 1, 5, 2)], aligned)
    for offset, size, place in (0, 5, BLOCK + 1), (1, 5, 0), (5, 2 * BLOCK - 4, 5):
        with pytest.raises(ValueError, match="no room"):
            past.begin([(0, offset, size, place)], aligned)


def test_memory_lives_as_long_as_something_may_write_to_it(tmp_path: Path) -> None:
    random_file(tmp_path / "a", 100)
    reads = Reads([(str(tmp_path / "a"), 100)], False, latency=LONG)
    buffer = np.zeros(100, np.uint8)
    memory = weakref.ref(buffer)
    reads.begin([(0, 0, 100, 0)], buffer)
    del buffer
    assert memory() is not None
    del reads  # which does not wait for the disk to answer
    assert memory() is None


@both_ways
def test_the_emulated_disk_reads_in_order(tmp_path: Path, direct: bool) -> None:
    data = random_file(tmp_path / "a", 8 * BLOCK)
    reads = Reads([(str(tmp_path / "a"), 8 * BLOCK)], direct, latency=1e-3, rate=20e6)
    batches = [Batch(reads, [(0, (7 - i) * BLOCK, BLOCK)]) for i in range(8)]
    while not reads.done(batches[-1].ticket):
        seen = [reads.done(batch.ticket) for batch in reversed(batches)]  # the last first: it goes on meanwhile
        assert seen == sorted(seen)
    assert all(reads.done(batch.ticket) for batch in batches)
    for batch in batches:
        batch.check([data])


@pytest.mark.parametrize("at", range(6))
def test_a_fault_at_each_position(tmp_path: Path, at: int) -> None:
    """Of the six reads of three batches; what was not begun when its batch failed is counted, too."""
    data = random_file(tmp_path / "a", 2 * PIECE)
    files = [(str(tmp_path / "a"), 2 * PIECE)]
    ranges = [(0, 100, PIECE), (0, 5, PIECE + 3)]

    def works(reads: Reads, begun: Sequence[Batch]) -> list[bool]:
        good = []
        for batch in begun:
            try:
                batch.check([data])
                good.append(True)
            except ReadError as error:
                assert str(error) == f"cannot read {tmp_path / 'a'}: {os.strerror(errno.EIO)}"
                good.append(False)
        return good

    once = Reads(files, False, fail_at=at, failures=1, error=errno.EIO)
    assert works(once, [Batch(once, ranges) for _ in range(3)]) == [i != at // 2 for i in range(3)]
    assert works(once, [Batch(once, ranges)]) == [True]
    for_good = Reads(files, False, fail_at=at, error=errno.EIO)
    assert works(for_good, [Batch(for_good, ranges) for _ in range(3)]) == [i < at // 2 for i in range(3)]
    assert works(for_good, [Batch(for_good, ranges)]) == [False]


def test_an_emulated_end_of_the_file(tmp_path: Path) -> None:
    random_file(tmp_path / "a", 100)
    reads = Reads([(str(tmp_path / "a"), 100)], False, fail_at=0)
    with pytest.raises(ReadError, match="changed while it was in use"):
        reads.wait(Batch(reads, [(0, 0, 100)]).ticket)


def test_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    random_file(tmp_path / "a", 100)
    reads = Reads([(str(tmp_path / "a"), 100)], False, latency=LONG)
    reads.patience = 0.01
    batches = [Batch(reads, [(0, 0, 100), (0, 1, 9)]) for _ in range(3)]
    for batch in batches[0], batches[0], batches[1]:
        with pytest.raises(ReadError, match=r"^/.*/a: the disk has not answered for 0\.01 seconds$"):
            reads.wait(batch.ticket)
        assert not reads.done(batch.ticket)
    reads.cancel(batches[1].ticket)  # not its turn yet
    reads.cancel(batches[0].ticket)
    for batch in batches[:2]:
        assert reads.done(batch.ticket)
        reads.wait(batch.ticket)
    assert not reads.done(batches[2].ticket)


def test_a_disk_that_answers_late(tmp_path: Path) -> None:
    data = random_file(tmp_path / "a", 100)
    reads = Reads([(str(tmp_path / "a"), 100)], False, latency=0.1)
    reads.patience = 0.001
    batch = Batch(reads, [(0, 3, 90)])
    while not reads.done(batch.ticket):
        try:
            reads.wait(batch.ticket)
        except ReadError as error:
            assert "has not answered" in str(error)
    batch.check([data])
