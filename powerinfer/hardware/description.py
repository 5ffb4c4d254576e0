"""What a machine can do, as the placement of a model needs to know it: measured here, or described in a JSON file.

A description is the JSON object of a `Hardware`, with `format` 1 and `kind` "hardware". Those that come with the
package lie in `machines/`; this machine's own lies in the user's cache folder (`measure.measured`). 1 GB/s is 1e9 bytes
a second, throughout.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.bundle_file import PART_TYPES
from powerinfer.formats.mapped import shown
from powerinfer.formats.prepared import write_small
from powerinfer.formats.safetensors_file import parse_json
from powerinfer.formats.tensors import NATIVE_TYPES

FORMAT = 1
KIND = "hardware"
OTHER = "other"
"""Stands in `Device.dense_gb_s` for every weight type that has no figure of its own."""

NO_GPU = "stand-in for a GPU"
"""How the name begins of torch's CPU device where it takes a GPU's place."""

MACHINES = Path(__file__).with_name("machines")

_LIMIT = 1 << 20  # bytes of a description
_MOST_BYTES = 1 << 50  # of a memory
_MOST_RATE = 1e6  # GB/s
_MOST_TIME = 1e9  # us or ns: a second of a row, a quarter of an hour of an operator
_MOST_TEXT = 2000  # characters
_MOST_FACTS = 64  # of a key, and read sizes of a disk


@dataclass(frozen=True)
class Device:
    """Something that computes, with its memory and its rates in decoding one token, all of its threads together.

    memory_bytes, reserved_bytes: what it has, and what of it others take (system, driver, runtime).
    threads: of the CPU that the rates hold for; 1 for a GPU.
    dense_gb_s: bytes of weights read in dense products, by weight type; `OTHER` stands for types that are not named.
    head_gb_s: the same for the output head, whose activations come in two parts where its weights are quantised.
    bundle_gb_s, row_ns: by the type of gate and up, the rate at which the rows of bundles are read that lie anywhere,
        and the time that one row takes besides its bytes. A row is one part of one bundle: gate, up or down. Down has
        the type that `pack` takes to that of gate: the same, and Q8_0 to Q4_0. seconds = bytes / rate + rows * row_ns.
    op_us: fixed time of an operator: its barriers and norms, on a GPU its launch. A layer has four, attention's input,
        attention, projection and FFN (and every norm that stands alone); the head is one more.
    step_us: fixed time of a step beside these: the embedding, waking the threads, Python.
    sparse_us: fixed time that an FFN takes beyond `op_us` when it goes sparse: its lists and its further barriers.
    kv_gb_s: bytes of keys and values that attention reads.
    cache_bytes, cache_gain: the rates hold for steps that read more than twice `cache_bytes`, so that every byte comes
        from memory; a step that reads up to `cache_bytes` finds them in the cache, `cache_gain` times as fast, and so
        are operators, which wait for the first bytes of their weights (`warm`). 0 and 1 where that is not known.
    """

    name: str
    memory_bytes: int
    reserved_bytes: int
    threads: int
    dense_gb_s: Mapping[str, float]
    head_gb_s: Mapping[str, float]
    bundle_gb_s: Mapping[str, float]
    row_ns: Mapping[str, float]
    op_us: float
    sparse_us: float
    step_us: float
    kv_gb_s: float
    cache_bytes: int = 0
    cache_gain: float = 1.0

    def warm(self, step_bytes: float) -> Device:
        """The device with the rates of steps that read `step_bytes` of weights, keys and values in all.

        From `cache_bytes` to twice as much the gain goes linearly back to none, in time per byte: steps read everything
        in turn, and of what does not fit less and less is still there when it is read again.
        """
        if not self.cache_bytes or step_bytes >= 2 * self.cache_bytes:
            return self
        cold = max(0.0, step_bytes / self.cache_bytes - 1)
        by = 1 / (cold + (1 - cold) / self.cache_gain)

        def faster(rates: Mapping[str, float]) -> dict[str, float]:
            return {name: by * rate for name, rate in rates.items()}

        return dataclasses.replace(
            self,
            dense_gb_s=faster(self.dense_gb_s),
            head_gb_s=faster(self.head_gb_s),
            bundle_gb_s=faster(self.bundle_gb_s),
            kv_gb_s=by * self.kv_gb_s,
            op_us=self.op_us / by,
        )

    def dense_seconds(self, type_name: str, nbytes: float) -> float:
        """Time of reading `nbytes` of weights of a type in dense products."""
        return nbytes / (1e9 * self.dense_gb_s.get(type_name, self.dense_gb_s[OTHER]))

    def head_seconds(self, type_name: str, nbytes: float) -> float:
        """The same for the output head."""
        return nbytes / (1e9 * self.head_gb_s.get(type_name, self.head_gb_s[OTHER]))

    def rows_seconds(self, gate_type: str, rows: float, nbytes: float) -> float:
        """Time of `rows` rows of bundles, `nbytes` in all."""
        return nbytes / (1e9 * self.bundle_gb_s[gate_type]) + 1e-9 * self.row_ns[gate_type] * rows


@dataclass(frozen=True)
class Disk:
    """read_gb_s: by the bytes of one read, what random reads give, `READERS` of them under way at a time."""

    read_gb_s: Mapping[int, float]

    def seconds(self, size: int) -> float:
        """Time that a read of `size` bytes adds while many are under way.

        Linear between the sizes that are known; a smaller read takes as long as the smallest, a larger one goes on at
        the rate of the largest.
        """
        sizes = sorted(self.read_gb_s)
        times = [one / (1e9 * self.read_gb_s[one]) for one in sizes]
        at = bisect.bisect_left(sizes, size)
        if at == 0:
            return times[0]
        if at == len(sizes):
            return times[-1] * size / sizes[-1]
        share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return times[at - 1] + share * (times[at] - times[at - 1])

    def rate(self, size: int) -> float:
        """Bytes a second of random reads of `size` bytes."""
        return size / self.seconds(size)


READERS = 8
"""Reads under way at a time for which a disk's figures hold."""


@dataclass(frozen=True)
class Hardware:
    """A machine. source: where its figures come from; assumed: which of them nobody measured or published, "" for none.

    gpu, disk: None where there is none. sync_us: what a layer pays when both devices work on it: its input out, the
    partial sum back, waiting for each other (T_sync of arXiv 2312.12456, inequality 4). copy_gb_s: between the memories
    of CPU and GPU. host_bytes: what libraries and driver of the GPU take in RAM. All three are 0 without a GPU.
    key: what a measured machine's figures hang on (CPU, engine, threads ...); empty for a described one.
    """

    name: str
    source: str
    cpu: Device
    gpu: Device | None = None
    disk: Disk | None = None
    sync_us: float = 0.0
    copy_gb_s: float = 0.0
    assumed: str = ""
    key: Mapping[str, str] = field(default_factory=dict)
    host_bytes: int = 0


def ready_made() -> list[str]:
    """The names of the machines whose descriptions come with the package."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def load(path_or_name: str | Path) -> Hardware:
    """A ready-made machine by its name, else the description in a file.

    RequestError where neither is there; ModelError for a file that is no description or holds absurd figures.
    """
    name = str(path_or_name)
    if name in ready_made():
        return read(MACHINES / f"{name}.json")
    path = Path(name).expanduser()
    if not path.is_file():
        raise RequestError(f"no machine {shown(name)}: neither a file nor one of {', '.join(ready_made())}")
    return read(path)


def read(path: Path) -> Hardware:
    """The description in a file; ModelError if it is none."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_LIMIT + 1)
    except OSError as error:
        raise RequestError(f"cannot read {path} ({error.strerror or error})") from None
    if len(raw) > _LIMIT:
        raise ModelError(f"{path}: too large for the description of a machine")
    return _hardware(_Fields(parse_json(raw, str(path)), str(path), ""))


def save(hardware: Hardware, path: Path) -> None:
    """Write a description, whole or not at all. PowerInferError when that cannot be done."""
    document = {"format": FORMAT, "kind": KIND, **dataclasses.asdict(hardware)}
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        write_small(Path(path), text.encode())
    except OSError as error:
        raise PowerInferError(f"cannot write {path} ({error.strerror or error})") from error


# ---------------------------------------------------------------- reading what somebody wrote


class _Fields:
    """A JSON object that must hold certain fields and no others: take each, then `finish`."""

    def __init__(self, value: Any, where: str, name: str) -> None:
        self._where = where
        self._name = name
        if type(value) is not dict:
            raise self.bad(f"{name or 'it'} is not a JSON object")
        self._rest: dict[str, Any] = dict(value)

    def bad(self, why: str) -> ModelError:
        return ModelError(f"{self._where}: not the description of a machine, {why}")

    def take(self, name: str) -> Any:
        if name not in self._rest:
            raise self.bad(f"{self._name}{name} is missing")
        return self._rest.pop(name)

    def inner(self, name: str) -> _Fields:
        return _Fields(self.take(name), self._where, f"{self._name}{name}.")

    def optional(self, name: str) -> _Fields | None:
        if self._rest.get(name) is None:
            self._rest.pop(name, None)
            return None
        return self.inner(name)

    def finish(self) -> None:
        for name in self._rest:
            raise self.bad(f"unknown field {self._name}{shown(name)}")

    def text(self, name: str) -> str:
        return self._text(name, self.take(name))

    def whole(self, name: str, least: int, most: int, missing: int | None = None) -> int:
        """A whole number; missing: what stands for a field that need not be there."""
        value = self.take(name) if missing is None else self._rest.pop(name, missing)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(f"{self._name}{name} is {shown(value)}, not a whole number from {least} to {most}")
        return value

    def number(self, name: str, most: float, zero: bool = True) -> float:
        return self._number(name, self.take(name), most, zero)

    def numbers(self, name: str, allowed: frozenset[str], needed: frozenset[str], most: float, zero: bool) -> Any:
        """A table of numbers by weight type."""
        table = self.inner(name)
        names = table._rest.keys()
        for one in sorted(names - allowed):
            raise self.bad(f"{self._name}{name} has {shown(one)}, which is no weight type there")
        for one in sorted(needed - names):
            raise self.bad(f"{self._name}{name} lacks {one}")
        return {one: table.number(one, most, zero) for one in list(names)}

    def texts(self, name: str) -> dict[str, str]:
        table = self.inner(name)
        if len(table._rest) > _MOST_FACTS:
            raise self.bad(f"{self._name}{name} is too long")
        return {self._text(name, one): table.text(one) for one in list(table._rest)}

    def sizes(self, name: str) -> dict[int, float]:
        """A table of rates by sizes in bytes, which JSON writes as texts."""
        table = self.inner(name)
        if not 0 < len(table._rest) <= _MOST_FACTS:
            raise self.bad(f"{self._name}{name} must hold between 1 and {_MOST_FACTS} sizes")
        result = {}
        for one in list(table._rest):
            if not (one.isascii() and one.isdigit() and len(one) < 16 and 0 < int(one) <= _MOST_BYTES):
                raise self.bad(f"{self._name}{name} has {shown(one)}, which is no size in bytes")
            result[int(one)] = table.number(one, _MOST_RATE, zero=False)
        return dict(sorted(result.items()))

    def _text(self, name: str, value: Any) -> str:
        if type(value) is not str or len(value) > _MOST_TEXT or not value.isprintable():
            raise self.bad(f"{self._name}{name} is not a line of text")
        return value

    def _number(self, name: str, value: Any, most: float, zero: bool) -> float:
        good = type(value) in (int, float) and 0 <= value <= most and math.isfinite(value)
        if not good or not (zero or value >= 1e-9):
            least = "" if zero else "more than "
            raise self.bad(f"{self._name}{name} is {shown(value)}, not a number from {least}0 to {most:g}")
        return float(value)


def _hardware(fields: _Fields) -> Hardware:
    found, kind = fields.take("format"), fields.take("kind")
    if kind != KIND:
        raise fields.bad(f"its kind is {shown(kind)}")
    if type(found) is not int or found != FORMAT:
        raise fields.bad(f"its format is {shown(found)}, and this version reads {FORMAT}")
    gpu, disk = fields.optional("gpu"), fields.optional("disk")
    hardware = Hardware(
        name=fields.text("name"),
        source=fields.text("source"),
        cpu=_device(fields.inner("cpu")),
        gpu=None if gpu is None else _device(gpu),
        disk=None if disk is None else _disk(disk),
        sync_us=fields.number("sync_us", _MOST_TIME),
        copy_gb_s=fields.number("copy_gb_s", _MOST_RATE),
        assumed=fields.text("assumed"),
        key=fields.texts("key"),
        host_bytes=fields.whole("host_bytes", 0, _MOST_BYTES, missing=0),
    )
    fields.finish()
    if hardware.gpu is not None and hardware.copy_gb_s < 1e-9:
        raise fields.bad("a machine with a GPU needs copy_gb_s")
    return hardware


def _device(fields: _Fields) -> Device:
    memory = fields.whole("memory_bytes", 1, _MOST_BYTES)
    dense, parts = frozenset((*NATIVE_TYPES, OTHER)), frozenset(PART_TYPES)
    device = Device(
        name=fields.text("name"),
        memory_bytes=memory,
        reserved_bytes=fields.whole("reserved_bytes", 0, memory),
        threads=fields.whole("threads", 1, 1 << 16),
        dense_gb_s=fields.numbers("dense_gb_s", dense, frozenset((OTHER,)), _MOST_RATE, zero=False),
        head_gb_s=fields.numbers("head_gb_s", dense, frozenset((OTHER,)), _MOST_RATE, zero=False),
        bundle_gb_s=fields.numbers("bundle_gb_s", parts, parts, _MOST_RATE, zero=False),
        row_ns=fields.numbers("row_ns", parts, parts, _MOST_TIME, zero=True),
        op_us=fields.number("op_us", _MOST_TIME),
        sparse_us=fields.number("sparse_us", _MOST_TIME),
        step_us=fields.number("step_us", _MOST_TIME),
        kv_gb_s=fields.number("kv_gb_s", _MOST_RATE, zero=False),
        cache_bytes=fields.whole("cache_bytes", 0, _MOST_BYTES),
        cache_gain=fields.number("cache_gain", 1000.0),
    )
    fields.finish()
    if device.cache_gain < 1:
        raise fields.bad(f"a cache_gain of {device.cache_gain:g} is below 1")
    return device


def _disk(fields: _Fields) -> Disk:
    disk = Disk(fields.sizes("read_gb_s"))
    fields.finish()
    return disk
