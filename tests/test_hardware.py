"""Descriptions of machines: what is read is what was written, and nothing absurd gets in."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.hardware import description as hardware
from powerinfer.hardware.description import RATED_ROWS, Disk, Hardware, load, ready_made, save


def document() -> dict[str, Any]:
    text = (hardware.MACHINES / "pc-low.json").read_text()
    return dict(json.loads(text))


def read(tmp_path: Path, value: Any) -> Hardware:
    path = tmp_path / "machine.json"
    path.write_text(value if type(value) is str else json.dumps(value))
    return load(path)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with one field set, or removed where `value` is ...."""
    whole = document()
    *way, last = path.split("/")
    inner = whole
    for name in way:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return whole


def test_ready_made_machines() -> None:
    """Those of the paper with its figures; every one says where its figures come from and what is assumed."""
    assert ready_made() == ["pc-16gb", "pc-8gb", "pc-high", "pc-low"]
    for name in ready_made():
        machine = load(name)
        assert machine.name == name and machine.source and "sync_us" in machine.assumed and not machine.key
        assert machine.gpu is not None and machine.disk is not None
        for device, bandwidth in ((machine.cpu, 100.0), (machine.gpu, 1100.0)):
            assert device.reserved_bytes < device.memory_bytes
            rates = (*device.dense_gb_s.values(), *device.bundle_gb_s.values(), device.kv_gb_s)
            assert all(0 < rate < bandwidth for rate in rates)
    high, low = load("pc-high"), load("pc-low")
    assert high.gpu is not None and low.gpu is not None
    assert high.gpu.memory_bytes == 24 << 30 and low.gpu.memory_bytes == 11 << 30
    assert max(high.cpu.dense_gb_s.values()) < 67.2 and max(low.cpu.dense_gb_s.values()) < 38.4
    assert "67.2 GB/s" in high.source and "38.4 GB/s" in low.source
    assert high.copy_gb_s < 31.5 and low.copy_gb_s < 15.75


def test_the_gap_across_which_a_disk_reads() -> None:
    """As many bytes as take as long as what a read takes beside its own; none where reads take no longer together."""
    sizes = [4096 << at for at in range(12)]
    for fixed, rate in ((10e-6, 3e9), (2e-6, 7e9), (40e-6, 1e9)):
        disk = Disk({size: size / (fixed + size / rate) / 1e9 for size in sizes})
        for size in (4096, 8192, 40_000):
            assert 0 <= fixed * rate - disk.gap(size) < 4096
    assert Disk({size: 2.0 for size in sizes}).gap(8192) == 0
    assert Disk({4096: 1e-6, 4 << 20: 1e6}).gap(4096) == 1 << 20  # the most
    for name in ready_made():
        found = load(name).disk
        assert found is not None
        gap = found.gap(9000)
        assert found.seconds(18_000 + gap) <= 2 * found.seconds(9000) < found.seconds(18_000 + gap + 4096)
        assert 0 < gap < 64 << 10


def test_saved_and_loaded_again(tmp_path: Path) -> None:
    for name in ready_made():
        machine = load(name)
        save(machine, tmp_path / "one.json")
        assert load(tmp_path / "one.json") == machine
        assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_a_machine_without_gpu_and_disk(tmp_path: Path) -> None:
    machine = Hardware("here", "measured", load("pc-low").cpu, key={"threads": "2"})
    save(machine, tmp_path / "one.json")
    assert load(tmp_path / "one.json") == machine


def test_save_that_cannot_be_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PowerInferError, match="cannot write"):
        save(load("pc-low"), tmp_path / "file" / "one.json")


def test_unknown_machine() -> None:
    with pytest.raises(RequestError, match="pc-high, pc-low"):
        load("pc-huge")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kind", "plan", "kind"),
        ("kind", ["hardware"], "kind"),
        ("format", 2, "format"),
        ("format", True, "format"),
        ("name", 5, "name"),
        ("name", "a\x1b[2Jb", "name"),
        ("source", "x" * 3000, "source"),
        ("assumed", ..., "assumed is missing"),
        ("sync_us", ..., "sync_us is missing"),
        ("copy_gb_s", ..., "copy_gb_s is missing"),
        ("cpu", None, "cpu"),
        ("cpu", ..., "cpu"),
        ("gpu", [], "gpu"),
        ("cpu/memory_bytes", 0, "memory_bytes"),
        ("cpu/memory_bytes", -1, "memory_bytes"),
        ("cpu/memory_bytes", 1e9, "memory_bytes"),
        ("cpu/memory_bytes", 10**300, "memory_bytes"),
        ("cpu/memory_bytes", True, "memory_bytes"),
        ("cpu/reserved_bytes", 65 << 30, "reserved_bytes"),
        ("cpu/threads", 0, "threads"),
        ("cpu/threads", "8", "threads"),
        ("cpu/op_us", -1, "op_us"),
        ("cpu/op_us", 1e300, "op_us"),
        ("cpu/kv_gb_s", 0, "kv_gb_s"),
        ("cpu/cache_gain", 0.5, "cache_gain"),
        ("cpu/cache_bytes", -1, "cache_bytes"),
        ("cpu/turbo", 1, "turbo"),
        ("cpu/dense_gb_s/other", ..., "lacks other"),
        ("cpu/dense_gb_s/F16", 0, "F16"),
        ("cpu/dense_gb_s/F16", 1e-300, "F16"),
        ("cpu/dense_gb_s/F16", 10**300, "F16"),
        ("cpu/dense_gb_s/F16", None, "F16"),
        ("cpu/dense_gb_s/F99", 1, "F99"),
        ("cpu/head_gb_s/other", ..., "lacks other"),
        ("cpu/step_us", -1, "step_us"),
        ("cpu/bundle_gb_s/Q8_0", ..., "lacks Q8_0"),
        ("cpu/bundle_gb_s/Q6_K", 1, "Q6_K"),
        ("cpu/row_ns", 3, "row_ns"),
        ("cpu/row_ns/F16", -0.5, "F16"),
        ("disk/read_gb_s", {}, "length of 0, not 1 to"),
        ("disk/read_gb_s/0", 1, "a key of disk.read_gb_s is"),
        ("disk/read_gb_s/-4096", 1, "a key of disk.read_gb_s is"),
        ("disk/read_gb_s/4e3", 1, "a key of disk.read_gb_s is"),
        ("disk/read_gb_s/" + "9" * 5000, 1, "a key of disk.read_gb_s is"),
        ("disk/read_gb_s/4096", 0, "4096"),
        ("disk/seek_ms", 4, "seek_ms"),
        ("disk/read_gb_s", {str(size): 1 for size in range(1, 1000)}, "length of 999, not 1 to"),
        ("copy_gb_s", 0, "copy_gb_s"),
        ("cards", [{"device": document()["gpu"]}], "a machine with a GPU needs copy_gb_s"),
        ("sync_us", "NaN", "sync_us"),
        ("key", {"a": 1}, "key"),
        ("key", {str(n): "" for n in range(1000)}, "length of 1000, not 0 to"),
        ("speed", 1, "speed"),
    ],
)
def test_absurd_fields(tmp_path: Path, path: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, changed(path, value))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 300


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"format": 1}', "\ufeff{}", "[" * 100_000, '{"a": NaN}', '{"a": 1, "a": 1}', "9" * 5000],
)
def test_no_description(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelError, match=r"machine\.json"):
        read(tmp_path, text)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_figures_that_are_no_numbers(tmp_path: Path, constant: str) -> None:
    with pytest.raises(ModelError):
        read(tmp_path, json.dumps(document()).replace('"op_us": 5.0', f'"op_us": {constant}'))


def test_bytes_that_are_no_text_and_files_too_large(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match="UTF-8"):
        load(path)
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(ModelError, match="too large"):
        load(path)
    with pytest.raises(RequestError):
        load(tmp_path)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)
PLACES = ["name", "cpu", "sync_us", "key", "disk/read_gb_s", "cpu/threads", "cpu/memory_bytes", "gpu/dense_gb_s/F16"]


@given(st.sampled_from(PLACES), VALUES)
def test_any_value_anywhere(tmp_path_factory: pytest.TempPathFactory, place: str, value: Any) -> None:
    """Refused with one kind of error, or taken as it is and written back the same."""
    folder = tmp_path_factory.mktemp("machine")
    try:
        machine = read(folder, changed(place, value))
    except ModelError:
        return
    save(machine, folder / "again.json")
    assert load(folder / "again.json") == machine
    assert machine.cpu.threads >= 1 and machine.sync_us >= 0


def test_rates_become_seconds() -> None:
    cpu = load("pc-high").cpu
    own = copy.deepcopy(cpu)
    own.dense_gb_s.update({"F16": 10.0, "other": 5.0})  # type: ignore[attr-defined]
    own.bundle_gb_s.update({"Q4_0": 2.0})  # type: ignore[attr-defined]
    own.row_ns.update({"Q4_0": 100.0})  # type: ignore[attr-defined]
    assert own.dense_seconds("F16", 10**9) == pytest.approx(0.1)
    assert own.dense_seconds("Q5_K", 10**9) == pytest.approx(0.2)
    own.head_gb_s.update({"other": 4.0})  # type: ignore[attr-defined]
    assert own.head_seconds("Q4_0", 10**9) == pytest.approx(0.25)
    assert own.rows_seconds("Q4_0", 1000, 2 * 10**6) == pytest.approx(1e-3 + 1e-4)
    assert set(own.bundle_gb_s) == set(RATED_ROWS)


def test_small_steps_come_from_the_cache() -> None:
    """Time per byte: a third up to the cache's size, whole from twice of it, halfway in the middle."""
    cold = dataclasses.replace(load("pc-low").cpu, cache_bytes=100, cache_gain=3.0)
    assert cold.warm(200) is cold and cold.warm(10**9) is cold
    full = cold.warm(100)
    assert full == cold.warm(1)
    for name in ("dense_gb_s", "head_gb_s", "bundle_gb_s"):
        before, after = getattr(cold, name), getattr(full, name)
        assert dict(after) == pytest.approx({name: 3 * rate for name, rate in before.items()})
    assert full.kv_gb_s == pytest.approx(3 * cold.kv_gb_s) and full.op_us == pytest.approx(cold.op_us / 3)
    assert full.row_ns == cold.row_ns and full.step_us == cold.step_us
    middle = cold.warm(150)
    assert middle.dense_seconds("F16", 1) == pytest.approx(
        (full.dense_seconds("F16", 1) + cold.dense_seconds("F16", 1)) / 2
    )
    unknown = load("pc-low").cpu
    assert unknown.warm(1) is unknown


def test_disk_reads_between_the_known_sizes() -> None:
    """4 KiB take 4.096 us, 64 KiB 16.384 us: linear in between, the same below, proportional above."""
    disk = Disk({65536: 4.0, 4096: 1.0})
    assert disk.seconds(4096) == disk.seconds(1) == pytest.approx(4.096e-6)
    assert disk.seconds(65536) == pytest.approx(16.384e-6)
    assert disk.seconds((4096 + 65536) // 2) == pytest.approx((4.096e-6 + 16.384e-6) / 2)
    assert disk.seconds(10 * 65536) == pytest.approx(163.84e-6)
    assert disk.rate(65536) == pytest.approx(4e9) and disk.rate(1 << 30) == pytest.approx(4e9)
    assert disk.rate(2048) == pytest.approx(0.5e9)
    times = [disk.seconds(size) for size in range(1, 200_000, 1000)]
    assert times == sorted(times)
