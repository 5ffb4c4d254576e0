"""Memory for some of the items that rest on disk, against a model of it in Python."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from test_reads import LONG, both_ways, open_reads, random_file

from powerinfer._native import ReadError, Reads, Resting, SlotMemory, Slots

ITEMS = 40
SIZE = 400_000
# Where the parts of item i rest: one behind the other; far apart; in groups of 7. Also at odd offsets. Past the cache
# small ones are copied to their slots, large ones are read there.
LAYOUTS = {
    "one part": [(128, 512, 512)],
    "neurons": [(4096, 8192, 8192), (86 * 4096, 64, 64)],
    "odd": [(13, 1000, 4099, 7, 29_000), (200_001, 4097, 4100), (0, 1, 3)],
    "large": [(64, 70_000, 8256)],
    "large odd": [(13, 70_000, 8200), (1, 70_000, 8000)],
}
Part = tuple[int, ...]


def array(items: Sequence[int]) -> np.ndarray:
    return np.array(items, np.int32)


def rests_at(part: Part, item: int) -> int:
    offset, _, stride, *groups = part
    each, outer = groups or (1 << 40, 0)
    return offset + item // each * outer + item % each * stride


def make(reads: Reads, layout: Sequence[Part], slots: int, memory: SlotMemory | None = None) -> Slots:
    parts = [Resting(0, offset, size, *rest) for offset, size, *rest in layout]
    return Slots(reads, parts, ITEMS, slots, memory)


def check_bytes(slots: Slots, layout: Sequence[Part], data: np.ndarray, item: int) -> None:
    for i, part in enumerate(layout):
        at = rests_at(part, item)
        np.testing.assert_array_equal(slots.part(item, i), data[at : at + part[1]])


def settle(slots: Slots, items: Sequence[int]) -> None:
    """Until what was fetched is there."""
    while not all(slots.held(item) for item in items):
        slots.fetch(array([]))


class Model:
    """What Slots are to do, where reads are over at once. of: of all that share memory and `common` slots."""

    def __init__(self, slots: int, common: int = 0, of: list[Model] | None = None) -> None:
        self.slots, self.all_common = slots, common
        self.of = [self] if of is None else of
        self.priority = np.zeros(ITEMS, np.float32)
        self.held: set[int] = set()
        self.pinned: set[int] = set()
        self.fetched: set[int] = set()  # and not pinned since, nor settled
        self.wanted = self.hits = self.misses = self.early = 0

    @property
    def common(self) -> int:
        """Slots that are had beyond a number of one's own are taken from these."""
        return self.all_common - sum(max(0, len(one.held) - one.slots) for one in self.of)

    @property
    def most(self) -> int:
        return max(self.slots, len(self.held)) + self.common

    def least(self, but: set[int]) -> list[int]:
        return sorted(self.held - but, key=lambda item: (self.priority[item], item))

    def want(self, items: Sequence[int]) -> int:
        some = 0
        for item in items:
            if item not in self.pinned and len(self.pinned) == self.most:
                break
            if item not in self.pinned:
                self.wanted += 1
                self.hits += item in self.held
                self.early += item in self.held & self.fetched
                self.fetched.discard(item)
            self.pinned.add(item)
            some += 1
        missing = self.pinned - self.held
        self.misses += len(missing)
        gone = len(self.held) + len(missing) - self.most
        self.held -= set(self.least(self.pinned)[: max(gone, 0)])
        self.held |= missing
        return some

    def fetch(self, items: Sequence[int]) -> int:
        victims = self.least(self.pinned | set(items))
        some = 0
        for item in items:
            if item not in self.held:
                if len(self.held) == self.most:
                    if not victims or self.priority[victims[0]] >= self.priority[item]:
                        break
                    self.held.remove(victims.pop(0))
                self.held.add(item)
                self.fetched.add(item)
            some += 1
        return some

    def settle(self) -> None:
        self.pinned.clear()
        self.fetched.clear()
        self.held -= set(self.least(set())[: max(0, len(self.held) - self.slots)])


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 13, ITEMS, ITEMS + 3])
@pytest.mark.parametrize(("engine", "direct"), [("uring", True), ("threads", False)])  # each with each: test_reads.py
def test_as_the_model_does(tmp_path: Path, engine: str, n: int, layout: str, direct: bool) -> None:
    parts = LAYOUTS[layout]
    data = random_file(tmp_path / "a", SIZE)
    slots, model = make(open_reads([tmp_path / "a"], engine, direct), parts, n), Model(n)
    rng = np.random.default_rng(n)
    read = 0
    for _ in range(25):
        if rng.random() < 0.3:
            model.priority[:] = slots.priority[:] = rng.integers(-2, 3, ITEMS)  # many are equal
        items = rng.integers(0, ITEMS, rng.integers(0, 12)).tolist()  # some of them twice
        if rng.random() < 0.3:
            before = set(model.held)
            assert slots.fetch(array(items)) == model.fetch(items)
            settle(slots, sorted(model.held - before))
        else:
            assert slots.want(array(items)) == model.want(items)
            slots.wait()
            read = model.misses
        assert {item for item in range(ITEMS) if slots.held(item)} == model.held
        for item in model.pinned:
            check_bytes(slots, parts, data, item)
        bytes_of_item = sum(part[1] for part in parts)
        stats = {"wanted": model.wanted, "hits": model.hits, "bytes": read * bytes_of_item, "early": model.early}
        assert slots.stats() == stats
        if rng.random() < 0.6:
            slots.let_go()
            model.pinned.clear()
    for item in model.held:  # also what was fetched and never wanted
        check_bytes(slots, parts, data, item)
    assert model.misses and (model.hits or n == 1)
    slots.clear()
    assert set(slots.stats().values()) == {0}
    assert (slots.items, slots.slots) == (ITEMS, n)


@pytest.mark.sampled
@pytest.mark.parametrize("common", [1, 7, 60])
@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_shared_memory_as_the_model_does(tmp_path: Path, engine: str, common: int) -> None:
    """Of several layers, of different numbers of slots, one after another and each other's beforehand."""
    data, layout, sizes = random_file(tmp_path / "a", SIZE), LAYOUTS["neurons"], (3, 12, 5)
    reads = open_reads([tmp_path / "a"], engine)
    memory = SlotMemory(sum(sizes) + common, 8192 + 64, common)
    layers = [make(reads, layout, n, memory) for n in sizes]
    models: list[Model] = []
    models += [Model(n, common, models) for n in sizes]
    rng = np.random.default_rng(common)
    for step in range(120):
        at = step % len(sizes)
        slots, model = layers[at], models[at]
        if rng.random() < 0.3:
            model.priority[:] = slots.priority[:] = rng.integers(-2, 3, ITEMS)
        for _ in range(2):
            items = rng.integers(0, ITEMS, rng.integers(0, 14)).tolist()
            assert slots.want(array(items)) == model.want(items)
        ahead, its = layers[(at + 1) % len(sizes)], models[(at + 1) % len(sizes)]
        items, before = rng.integers(0, ITEMS, rng.integers(0, 9)).tolist(), set(its.held)
        assert ahead.fetch(array(items)) == its.fetch(items)
        slots.wait()
        settle(ahead, sorted(its.held - before))
        for own, of_model in zip(layers, models, strict=True):
            held = [item for item in range(ITEMS) if own.held(item)]
            assert set(held) == of_model.held
            for item in held:
                check_bytes(own, layout, data, item)
        slots.settle()
        model.settle()
        assert {item for item in range(ITEMS) if slots.held(item)} == model.held
        assert len(model.held) <= sizes[at]
    early = [model.early for model in models]
    assert [slots.stats()["early"] for slots in layers] == early and max(early) > 0
    places = {own.part(item, 0).ctypes.data for own in layers for item in range(ITEMS) if own.held(item)}
    assert len(places) == sum(len(model.held) for model in models), "each has a place of its own"


def test_less_of_shared_memory(tmp_path: Path) -> None:
    data, layout = random_file(tmp_path / "a", SIZE), LAYOUTS["one part"]
    memory = SlotMemory(20, 512, 4)
    first, second = (make(open_reads([tmp_path / "a"], "threads"), layout, 8, memory) for _ in range(2))
    assert first.want(array(range(20))) == 12 and second.want(array(range(20))) == 8
    with pytest.raises(ValueError, match="not so many slots"):
        make(open_reads([tmp_path / "a"], "threads"), layout, 1, memory)
    memory.use(10)
    assert sum(one.held(item) for one in (first, second) for item in range(ITEMS)) == 10
    assert first.want(array(range(30, 40))) == 10, "what is left of the memory, whosever it was"
    assert second.want(array([3])) == 0
    for one in first, second:
        one.wait()
        one.settle()
    memory.use(20)
    assert second.want(array(range(10, 22))) == 12
    second.wait()
    for item in range(10, 22):
        check_bytes(second, layout, data, item)
    del first
    assert make(open_reads([tmp_path / "a"], "threads"), layout, 8, memory).want(array(range(8))) == 8


def test_shared_memory_while_items_are_being_read(tmp_path: Path) -> None:
    data, layout = random_file(tmp_path / "a", SIZE), LAYOUTS["one part"]
    reads = Reads([(str(tmp_path / "a"), SIZE)], False, latency=1e-3)
    memory = SlotMemory(12, 512, 4)
    first, second = (make(reads, layout, 4, memory) for _ in range(2))
    assert first.fetch(array(range(20))) == 8
    first.settle()
    assert second.want(array([30, 31, 32, 33, 34])) == 4, "what is being read stays where it is"
    second.wait()
    second.settle()
    settle(first, range(8))
    first.settle()
    assert [item for item in range(ITEMS) if first.held(item)] == [4, 5, 6, 7], "of equals the lowest leave"
    assert second.want(array(range(10, 20))) == 8
    del second  # which waits for its reads
    other = make(reads, layout, 4, memory)
    assert other.want(array(range(10, 20))) == 8
    memory.use(6)  # which waits, too
    assert sum(one.held(item) for one in (first, other) for item in range(ITEMS)) <= 6
    for one in first, other:
        for item in range(ITEMS):
            if one.held(item):
                check_bytes(one, layout, data, item)


def test_memory_of_another_size_is_refused(tmp_path: Path) -> None:
    random_file(tmp_path / "a", SIZE)
    reads = open_reads([tmp_path / "a"], "threads")
    for slot_bytes in (448, 520):
        with pytest.raises(ValueError, match="do not fit"):
            make(reads, LAYOUTS["one part"], 2, SlotMemory(4, slot_bytes))
    for bad in ((0, 512, 0), (4, 512, 4), (4, 512, -1), (4, 0, 0), (1 << 30, 1 << 40, 0)):
        with pytest.raises(ValueError, match=r"slot"):
            SlotMemory(*bad)


@both_ways
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lines(tmp_path: Path, layout: str, direct: bool) -> None:
    random_file(tmp_path / "a", SIZE)
    reads = open_reads([tmp_path / "a"], "threads", direct)
    slots = make(reads, LAYOUTS[layout], 9)
    if reads.direct and layout == "large odd":
        assert slots.lines is None
        return
    items = [3, 39, 0, 17, 25]
    assert slots.want(array(items)) == 5
    slots.wait()
    lines = slots.lines
    assert lines is not None
    memory = {slots.part(item, 0).ctypes.data - 64 * int(lines[item]) for item in items}
    assert len(memory) == 1 and memory.pop() % 4096 == 0
    assert slots.slot_bytes % 64 == 0
    if layout == "neurons":
        assert slots.slot_bytes == 8192 + 64
    if layout == "large":
        assert slots.slot_bytes == (18 * 4096 if reads.direct else 70_016)


@pytest.mark.parametrize("engine", ["uring", "threads"])
@pytest.mark.parametrize("gap", [0, 8192, 20_000, 1 << 20])
def test_neighbours_are_read_at_once(tmp_path: Path, engine: str, gap: int) -> None:
    """All that is missing, in whatever order it is wanted, across at most `gap` bytes and 64 KiB."""
    data = random_file(tmp_path / "a", SIZE)
    reads = open_reads([tmp_path / "a"], engine, True)
    if not reads.direct:
        pytest.skip("this file system is not read past the cache")
    reads.gap = gap
    layout = [(128, 1500, 9000)]
    slots = make(reads, layout, ITEMS)
    rng = np.random.default_rng(gap)
    small = joined = 0
    for _ in range(6):
        missing = [item for item in rng.permutation(ITEMS)[:12].tolist() if not slots.held(item)]
        assert slots.want(array(missing)) == len(missing)
        slots.wait()
        begin, end = 0, -(1 << 30)  # of the last read, in whole blocks
        for item in sorted(missing):
            offset = rests_at(layout[0], item)
            if offset - end > gap or offset + 1500 - begin > 64 << 10:
                begin = offset // 4096 * 4096
                joined += 1
            end = -(-(offset + 1500) // 4096) * 4096
            check_bytes(slots, layout, data, item)
        small += len(missing)
        slots.let_go()
    stats = reads.stats()
    assert (stats.small, stats.joined) == (small, joined)
    assert (joined == small) is (gap == 0)


def test_what_is_fetched_is_not_read_twice(tmp_path: Path) -> None:
    data = random_file(tmp_path / "a", SIZE)
    reads = Reads([(str(tmp_path / "a"), SIZE)], False, latency=1e-3)
    parts = LAYOUTS["neurons"]
    slots = make(reads, parts, 4)
    assert slots.fetch(array([5, 6])) == slots.fetch(array([6, 5])) == 2
    assert slots.want(array([6, 7, 5])) == 3
    slots.wait()
    for item in 5, 6, 7:
        check_bytes(slots, parts, data, item)
    assert reads.stats().reads == 3 * len(parts)
    assert slots.stats() == {"wanted": 3, "hits": 2, "bytes": 8192 + 64, "early": 2}


def test_wants_wait_for_room_that_is_being_read_into(tmp_path: Path) -> None:
    data = random_file(tmp_path / "a", SIZE)
    reads = Reads([(str(tmp_path / "a"), SIZE)], False, latency=1e-3)
    parts = LAYOUTS["odd"]
    slots = make(reads, parts, 2)
    for _ in range(3):
        slots.priority[:] = 0
        slots.priority[[1, 2]] = 9  # what is being read stays, whatever its priority
        assert slots.fetch(array([1])) == slots.fetch(array([2])) == 1
        assert slots.fetch(array([3])) == 0
        assert slots.want(array([3, 4, 5])) == 2
        slots.wait()
        for item in 3, 4:
            check_bytes(slots, parts, data, item)
        slots.let_go()


def test_fewer_slots(tmp_path: Path) -> None:
    data = random_file(tmp_path / "file", SIZE)
    layout = LAYOUTS["one part"]
    slots = make(open_reads([tmp_path / "file"], "threads"), layout, 16)
    slots.want(array(range(16)))
    slots.wait()
    slots.let_go()
    slots.memory.use(5)
    kept = [item for item in range(ITEMS) if slots.held(item)]
    assert len(kept) == 5
    assert slots.want(array(kept)) == 5 and slots.want(array([20])) == 0, "there is no room beside those"
    slots.let_go()
    assert slots.stats()["hits"] == 5
    slots.fetch(array([20, 21]))  # of no higher priority than others
    slots.priority[22] = 1
    slots.fetch(array([22]))
    slots.memory.use(16)  # waits for that
    assert slots.held(22) and sum(slots.held(item) for item in range(ITEMS)) == 5
    assert slots.want(array(range(10, 26))) == 16
    slots.wait()
    for item in range(10, 26):
        check_bytes(slots, layout, data, item)
    for n in (0, 17):
        with pytest.raises(ValueError, match="not so many slots"):
            slots.memory.use(n)


def test_what_is_pinned_stays(tmp_path: Path) -> None:
    random_file(tmp_path / "a", SIZE)
    slots = make(open_reads([tmp_path / "a"], "threads"), LAYOUTS["one part"], 3)
    slots.priority[:] = np.arange(ITEMS)
    slots.priority[7] = np.nan  # has its place, too
    assert slots.want(array([0, 1])) == 2
    assert slots.want(array([2, 3])) == 1
    slots.wait()
    assert slots.fetch(array([30])) == 0
    assert slots.want(array([9])) == 0
    slots.let_go()
    assert slots.fetch(array([30, 7, 8])) == 3
    settle(slots, [30, 7, 8])
    assert slots.want(array([4])) == 1
    slots.wait()
    assert [item for item in range(ITEMS) if slots.held(item)] == [4, 7, 30]


@pytest.mark.parametrize("at", range(0, 24, 5))
def test_after_a_fault(tmp_path: Path, at: int) -> None:
    """The items of failed reads are not there, nothing is pinned, and the next time they are read."""
    data = random_file(tmp_path / "a", SIZE)
    parts = LAYOUTS["neurons"]
    reads = Reads([(str(tmp_path / "a"), SIZE)], False, fail_at=at, failures=1, error=errno.EIO)
    slots = make(reads, parts, 5)
    rng = np.random.default_rng(at)
    faults, begun, guessed = 0, 0, False
    for step in range(12):
        items = rng.permutation(ITEMS)[:3].tolist()
        missing = len(parts) * sum(not slots.held(item) for item in items)
        guessed |= step % 3 == 2 and begun <= at < begun + missing
        begun += missing  # up to the fault
        if step % 3 == 2:
            slots.priority[items] = step
            assert slots.fetch(array(items)) == 3
        assert slots.want(array(items)) == 3
        try:
            slots.wait()
        except ReadError as error:
            faults += 1
            assert "cannot read" in str(error)
            assert not all(slots.held(item) for item in items)
            with pytest.raises(ValueError, match="not in memory"):
                check_bytes(slots, parts, data, next(item for item in items if not slots.held(item)))
            assert slots.want(array(range(5))) == 5  # nothing else is pinned
            slots.wait()
            slots.let_go()
            assert slots.want(array(items)) == 3
            slots.wait()
        for item in items:
            check_bytes(slots, parts, data, item)
        slots.let_go()
        slots.wait()
    assert faults == (not guessed)  # what `fetch` could not read is read again where somebody wants it


def test_nobody_hears_of_what_nobody_wants(tmp_path: Path) -> None:
    """A fault of `fetch` alone; then one of a batch of which something is wanted meanwhile."""
    data = random_file(tmp_path / "a", SIZE)
    files = [(str(tmp_path / "a"), SIZE)]
    parts = LAYOUTS["one part"]
    slots = make(Reads(files, False, latency=0, fail_at=0, failures=1, error=errno.EIO), parts, 1)
    assert slots.fetch(array([1])) == 1
    assert slots.want(array([2])) == 1
    slots.wait()
    check_bytes(slots, parts, data, 2)
    slots = make(Reads(files, False, latency=0.05, fail_at=0, failures=1, error=errno.EIO), parts, 3)
    assert slots.fetch(array([1, 2])) == 2
    assert slots.want(array([1, 5, 6])) == 3
    slots.wait()
    for item in 1, 5, 6:
        check_bytes(slots, parts, data, item)


def test_guesses_fail_without_those_that_were_right(tmp_path: Path) -> None:
    """What is wanted of a batch that could not be read is read again by itself; if that fails, it is told."""
    data = random_file(tmp_path / "a", SIZE)
    parts = LAYOUTS["one part"]
    for failures in 1, -1:
        reads = Reads([(str(tmp_path / "a"), SIZE)], False, latency=0.05, fail_at=0, failures=failures, error=errno.EIO)
        slots = make(reads, parts, 8)
        assert slots.fetch(array([1, 2, 3])) == 3
        assert slots.want(array([2])) == 1
        if failures == 1:
            slots.wait()
            check_bytes(slots, parts, data, 2)
        else:
            with pytest.raises(ReadError, match="cannot read"):
                slots.wait()
        assert [item for item in (1, 2, 3) if slots.held(item)] == [2] * (failures == 1)


def test_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    random_file(tmp_path / "a", SIZE)
    reads = Reads([(str(tmp_path / "a"), SIZE)], False, latency=LONG)
    reads.patience = 0.01
    slots = make(reads, LAYOUTS["one part"], 2)
    assert slots.want(array([1])) == 1
    with pytest.raises(ReadError, match="has not answered"):
        slots.wait()
    slots.wait()  # nothing is pinned
    assert slots.want(array([2])) == 1  # into the other slot
    slots.let_go()
    with pytest.raises(ReadError, match="has not answered"):
        slots.want(array([3]))
    assert slots.want(array([1, 2])) == 2  # still the same reads
    assert reads.stats().reads == 2
    with pytest.raises(ReadError, match="has not answered"):
        slots.wait()
    assert slots.fetch(array([5])) == 0
    del slots  # which does not wait for the disk to answer
    assert reads.stats().reads == 2


def test_a_disk_that_answers_late(tmp_path: Path) -> None:
    data = random_file(tmp_path / "a", SIZE)
    reads = Reads([(str(tmp_path / "a"), SIZE)], False, latency=0.02)
    reads.patience = 0.001
    parts = LAYOUTS["neurons"]
    slots = make(reads, parts, 1)
    for item in 4, 5:
        there = False
        while not there:
            try:
                there = slots.want(array([item])) == 1
                slots.wait()
            except ReadError as error:
                there = False
                assert "has not answered" in str(error)
        check_bytes(slots, parts, data, item)
        slots.let_go()


def test_what_cannot_be_made(tmp_path: Path) -> None:
    random_file(tmp_path / "a", SIZE)
    reads = open_reads([tmp_path / "a"], "threads")
    good = Resting(0, 0, 512, 512)
    for parts, items, slots in ([], 4, 1), ([good], 0, 1), ([good], 4, 0), ([good], 1 << 31, 1), ([good], 4, 1 << 40):
        with pytest.raises(ValueError, match=r"parts|slot"):
            Slots(reads, parts, items, slots)
    for bad in (
        Resting(1, 0, 512, 512),
        Resting(0, -1, 512, 512),
        Resting(0, 0, 0, 512),
        Resting(0, 0, 512, -1),
        Resting(0, 0, 512, 1 << 62),
        Resting(0, 0, 512, 512, 0, 0),
        Resting(0, 0, 512, 512, 2, SIZE),
        Resting(0, SIZE - 600, 512, 512),
    ):
        with pytest.raises(ValueError, match=r"no such file|outside its file|have bytes"):
            Slots(reads, [good, bad], 4, 1)
    slots = Slots(reads, [good], 4, 1)
    for item in -1, 4:
        with pytest.raises(ValueError, match="no such item"):
            slots.want(array([0, item]))
        with pytest.raises(ValueError, match="no such item"):
            slots.held(item)
        with pytest.raises(ValueError, match="no such item"):
            slots.part(item, 0)
    with pytest.raises(ValueError, match="or part"):
        slots.part(0, 1)
    with pytest.raises(ValueError, match="not in memory"):
        slots.part(0, 0)
    priority = slots.priority
    del slots
    priority[:] = 3  # keeps the slots alive
    assert priority.tolist() == [3, 3, 3, 3]
