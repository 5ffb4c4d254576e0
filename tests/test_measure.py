"""Measuring this machine: sane figures, fits that find what made the times, and files that are whole and believed
only where they hold."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer.cli.main import main
from powerinfer.config import EngineConfig
from powerinfer.devices.disk import Reads
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.weight_types import NATIVE_TYPES
from powerinfer.hardware import cpu_rates, description, disk_rates, measure
from powerinfer.hardware.cpu_rates import Effort, fit_cache
from powerinfer.hardware.description import RATED_ROWS, Device, load
from powerinfer.hardware.samples import FitGroup, fit_rows
from powerinfer.kernels import cpu

ONE = EngineConfig(threads=1)
LITTLE = Effort(
    wide=(256, 768),
    vocab=256,
    narrow=(128, 320),
    rows=((128, 256), (256, 256)),
    context=64,
    warm_mib=(0.125, 0.25),
    free_bytes=64 << 20,
    rounds=3,
    disk_bytes=16 << 20,
    disk_seconds=0.02,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWERINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_sane_figures(cache: Path) -> None:
    """Every rate is there, positive, and within what any memory gives."""
    steps: list[tuple[str, int, int]] = []
    found = measure.measure(ONE, lambda *state: steps.append(state), LITTLE)
    device = found.cpu
    assert set(device.dense_gb_s) == set(device.head_gb_s) == NATIVE_TYPES
    assert set(device.bundle_gb_s) == set(RATED_ROWS)
    rates = [*device.dense_gb_s.values(), *device.head_gb_s.values(), *device.bundle_gb_s.values(), device.kv_gb_s]
    assert all(1e-3 < rate < 2000 for rate in rates)
    assert all(rate <= 1.001 * max(device.dense_gb_s.values()) for rate in device.bundle_gb_s.values())
    assert all(0 <= value < 1e5 for value in device.row_ns.values())
    assert (
        0 <= device.op_us < 1e4 and 0 <= device.sparse_us < 1e4 and 0 <= device.step_us < 1e6 and device.cache_gain >= 1
    )
    assert device.threads == 1 and 0 <= device.reserved_bytes < device.memory_bytes
    assert found.gpu is None and found.sync_us == 0 and found.copy_gb_s == 0
    assert [entry.name for entry in cache.iterdir()] == []  # the disk's file is gone, and nothing was kept
    assert all(0 <= done < total for _, done, total in steps)
    of_cpu = [done for label, done, _ in steps if "CPU" in label]
    assert of_cpu == list(range(steps[0][2])), "the progress ends where it said"


def test_kept_and_taken_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure.saved_hardware(ONE) is None
    first = measure.measure_and_keep(ONE, effort=LITTLE)
    (path,) = cache.iterdir()
    assert path == measure.kept_at(first.key) and path.name.startswith("hardware-")
    assert load(path) == first == measure.saved_hardware(ONE)
    monkeypatch.setattr(measure, "measure", None)  # would be called
    assert measure.measured(ONE) == first


@pytest.mark.parametrize(
    ("what", "value"),
    [("__version__", "99.0"), ("METHOD", 99)],
)
def test_another_engine_or_machine_is_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, what: str, value: object
) -> None:
    machine = keep_something(ONE)
    assert measure.saved_hardware(ONE) == machine
    monkeypatch.setattr(measure, what, value)
    assert measure.saved_hardware(ONE) is None


def test_memory_that_grew_is_not_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is asked for, and nothing else changes."""
    machine = keep_something(ONE)
    monkeypatch.setattr(measure, "total_memory", lambda: 1 << 40)
    monkeypatch.setattr(measure, "available_memory", lambda: 1 << 39)
    found = measure.measured(ONE)
    grown = dataclasses.replace(machine.cpu, memory_bytes=1 << 40, reserved_bytes=1 << 39)
    assert found == dataclasses.replace(machine, cpu=grown, key=measure.machine_key(ONE))


@pytest.mark.parametrize(("where", "what"), [(cpu, "build"), (measure, "cpu_name")])
def test_another_build_or_cpu(cache: Path, monkeypatch: pytest.MonkeyPatch, where: object, what: str) -> None:
    keep_something(ONE)
    monkeypatch.setattr(where, what, lambda: "another")
    assert measure.saved_hardware(ONE) is None


def test_threads_and_instruction_sets_have_files_of_their_own(cache: Path) -> None:
    keep_something(ONE)
    assert measure.saved_hardware(EngineConfig(threads=3)) is None
    assert measure.saved_hardware(EngineConfig(threads=1, isa="scalar")) is None
    keep_something(EngineConfig(threads=3))
    assert measure.saved_hardware(ONE) is not None and len(list(cache.iterdir())) == 2


def keep_something(engine: EngineConfig) -> description.Hardware:
    """The description of another machine, as if it had been measured here."""
    machine = dataclasses.replace(load("pc-low"), key=measure.machine_key(engine))
    description.save(machine, measure.kept_at(machine.key))
    return machine


@pytest.mark.parametrize("text", ["", "{", "null", '{"format": 1, "kind": "hardware"}', "\x00" * 100])
def test_a_damaged_file_counts_as_none(cache: Path, text: str) -> None:
    keep_something(ONE)
    (path,) = cache.iterdir()
    path.write_text(text)
    assert measure.saved_hardware(ONE) is None
    path.unlink()
    path.mkdir()
    assert measure.saved_hardware(ONE) is None


@pytest.mark.parametrize("where", ["fsync", "replace", "write"])
def test_figures_that_cannot_be_kept(cache: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A full disk costs a remark; nothing half-written stays, and what was there stays."""
    kept = keep_something(ONE)
    said: list[str] = []
    monkeypatch.setattr(measure, "measure", lambda *_: dataclasses.replace(kept, source="later"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, where, full)
    assert measure.measure_and_keep(ONE, say=said.append).source == "later"
    monkeypatch.undo()
    monkeypatch.setenv("POWERINFER_CACHE", str(cache))
    assert len(said) == 1 and "no space left" in said[0]
    assert len(list(cache.iterdir())) == 1 and measure.saved_hardware(ONE) == kept


def test_interrupted_while_measuring(cache: Path) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if "disk" in label:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.measure_and_keep(ONE, stop, effort=LITTLE)
    assert list(cache.iterdir()) == []


def test_too_little_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rates, "available_memory", lambda: 1 << 20)
    with pytest.raises(PowerInferError, match="MiB are free"):
        measure.measure(ONE, effort=LITTLE)


def test_wrong_requests(cache: Path) -> None:
    for engine in (EngineConfig(threads=-1), EngineConfig(isa="mmx")):
        with pytest.raises(RequestError):
            measure.measured(engine)


# ---------------------------------------------------------------- fits


def made_up(gb_s: float, row_ns: float, fixed: dict[FitGroup, float], noise: float) -> list[Any]:
    random = np.random.default_rng(1)
    times = []
    for group, seconds in fixed.items():
        for rows in (50, 200, 700, 1500):
            nbytes = rows * 0.6 * group.d_model * (1 if group.way == "exact" else 0.8)
            taken = seconds + nbytes / (1e9 * gb_s) + 1e-9 * row_ns * rows
            times.append((group, rows, nbytes, taken * (1 + noise * random.standard_normal())))
    return times


GROUPS = {
    FitGroup(d_model, way, "Q8_0", 1000): (1 + d_model / 4096) * 1e-4
    for d_model in (1024, 4096)
    for way in ("exact", "p")
}


@pytest.mark.parametrize(("gb_s", "row_ns"), [(10.0, 20.0), (30.0, 0.0), (3.0, 100.0)])
def test_rows_are_fitted(gb_s: float, row_ns: float) -> None:
    fit = fit_rows(made_up(gb_s, row_ns, GROUPS, 0.0), 50.0)
    assert fit.gb_s == pytest.approx(gb_s) and fit.row_ns == pytest.approx(row_ns, abs=1e-6)
    assert fit.fixed == pytest.approx(GROUPS)
    noisy = fit_rows(made_up(gb_s, row_ns, GROUPS, 0.01), 50.0)
    assert noisy.gb_s == pytest.approx(gb_s, rel=0.15) and noisy.row_ns == pytest.approx(row_ns, abs=8)


def test_rows_are_read_no_faster_than_memory_and_take_no_time_back() -> None:
    bounded = fit_rows(made_up(90.0, 20.0, GROUPS, 0.0), 50.0)
    assert bounded.gb_s == 50.0 and 0 < bounded.row_ns < 20
    backwards = fit_rows(made_up(10.0, -20.0, GROUPS, 0.0), 50.0)
    assert backwards.row_ns == 0 and 10 < backwards.gb_s < 20


@pytest.mark.parametrize(("size", "gain"), [(20e6, 2.0), (60e6, 3.0)])
def test_the_cache_is_found(size: int, gain: float) -> None:
    device = dataclasses.replace(load("pc-low").cpu, cache_bytes=int(size), cache_gain=gain)
    sizes = LITTLE_SIZES
    gains = [device.warm(nbytes).dense_gb_s["F16"] / device.dense_gb_s["F16"] for nbytes in sizes]
    found, by = fit_cache(sizes, gains)
    assert found == pytest.approx(size, rel=0.05) and by == pytest.approx(gain)
    assert fit_cache(sizes, [1.01, 1.0, 0.99, 1.02, 1.0]) == (0, 1.0)


LITTLE_SIZES = (8 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20)


# ---------------------------------------------------------------- the disk


def test_disk_reads(tmp_path: Path) -> None:
    disk = disk_rates.disk_rates(tmp_path / "new", 16 << 20, 0.02)
    assert disk is None or (tuple(disk.read_gb_s) == disk_rates.SIZES and min(disk.read_gb_s.values()) > 0)
    assert disk is None or disk.latency_us > 0
    assert list((tmp_path / "new").iterdir()) == []


def test_disk_reads_without_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def through_the_cache(files: Any, direct: bool) -> Reads:
        return Reads(files, False)

    monkeypatch.setattr(disk_rates, "Reads", through_the_cache)
    disk = disk_rates.disk_rates(tmp_path, 16 << 20, 0.02)
    assert disk is not None and min(disk.read_gb_s.values()) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["write", "fsync", "statvfs"])
def test_a_disk_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, where, fail)
    assert disk_rates.disk_rates(tmp_path, 16 << 20, 0.02) is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(files: Any, direct: bool) -> Reads:
        return Reads(files, direct, fail_at=5, error=errno.EIO)

    monkeypatch.setattr(disk_rates, "Reads", failing)
    assert disk_rates.disk_rates(tmp_path, 16 << 20, 0.02) is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_of_known_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated one serves one read after another, so that its rate is known, but for the time of other programs."""

    def slow(files: Any, direct: bool) -> Reads:
        return Reads(files, direct, latency=0.002, rate=1e9)

    monkeypatch.setattr(disk_rates, "Reads", slow)
    disk = disk_rates.disk_rates(tmp_path, 16 << 20, 0.02)
    assert disk is not None and disk.latency_us >= 2000
    for size, found in disk.read_gb_s.items():
        assert 0 < found <= 1.001 * size / (0.002e9 + size)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert disk_rates.disk_rates(tmp_path / "file" / "x", 16 << 20, 0.02) is None


# ---------------------------------------------------------------- the verb


def test_the_verb(cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def small(engine: EngineConfig, progress: Any = None, say: Any = None, **more: Any) -> description.Hardware:
        return real(engine, progress, say, LITTLE, **more)

    real = measure.measure_and_keep
    monkeypatch.setattr(measure, "measure_and_keep", small)
    documents = []
    for arguments in ([], [], ["--force"]):
        assert main(["measure", "--json", "--threads", "1", *arguments]) == 0
        documents.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [one["measured"] for one in documents] == [True, False, True]
    assert documents[0]["hardware"] == documents[1]["hardware"] != documents[2]["hardware"]
    kept = load(documents[0]["path"])
    assert json.loads(json.dumps(dataclasses.asdict(kept))) == documents[2]["hardware"]
    assert {field.name for field in dataclasses.fields(Device)} == set(documents[0]["hardware"]["cpu"])
    assert main(["measure", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "GB/s" in shown and "measured earlier" in shown and "--force" in shown
    assert main(["measure", "--threads", "-3"]) == 2
