"""Hardware descriptions, for the placement of models: measured on this machine, or described in a JSON file.

A description is the JSON object of a `Hardware`, with `format` 1 and `kind` "hardware". Those that come with the
package are in `machines/`; this machine's is in the user's cache folder (`measure.measured`). 1 GB/s is 1e9 bytes per
second.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from powerinfer.errors import ModelError, PowerInferError, RequestError
from powerinfer.formats.json_file import Between, Length, Line, checked, of_kind, parse_json, read_limited
from powerinfer.formats.mapped import shown
from powerinfer.formats.prepared import write_small
from powerinfer.formats.weight_types import GPU_TYPES, NATIVE_TYPES, STORED_ROWS

FORMAT = 1
KIND = "hardware"
OTHER = "other"
"""Key in `Device.dense_gb_s` of a described machine for all weight types without a figure of their own."""

RATED_ROWS = ("F16", "BF16", "Q8_0", "Q4_0")
"""Types of gate and up in bundles whose rates are measured."""

_RATED_AS = dict.fromkeys(("Q4_1", *STORED_ROWS), "Q4_0")  # rows of other types, as those that are read alike


@dataclass(frozen=True)
class RatedTypes:
    """Weight types whose rates on a GPU a placement reads: of dense products, and of gate and up in bundles.

    Without any it reads sizes alone, and no rate of the CPU either.
    """

    dense: frozenset[str] = frozenset()
    rows: frozenset[str] = frozenset()

    @classmethod
    def rated(cls, dense: Iterable[str], rows: Iterable[str]) -> RatedTypes:
        """The types that are measured for these: all where a GPU has other types, which count as the slowest."""
        types = frozenset(dense)
        return cls(types if types <= ALL_TYPES.dense else ALL_TYPES.dense, frozenset(map(_rated_as, rows)))


ALL_TYPES = RatedTypes(frozenset(GPU_TYPES), frozenset(RATED_ROWS))
"""All types that are measured."""

TABLES = ("dense_gb_s", "head_gb_s", "bundle_gb_s", "row_ns")
"""Fields of a `Device` by weight type."""

SIZES_ALONE = RatedTypes()
"""Sizes alone, as placing layers as a whole reads."""


def _rated_as(kind: str) -> str:
    return _RATED_AS.get(kind, kind)


NO_GPU = "stand-in for a GPU"
"""Prefix of the name of torch's CPU device when it emulates a GPU."""

MACHINES = Path(__file__).with_name("machines")

_LIMIT = 1 << 20  # bytes of a description
_MOST_BYTES = 1 << 50  # of a memory
_MOST_RATE = 1e6  # GB/s
_BLOCK = 4096  # bytes of a block of a disk
_MOST_GAP = 1 << 20  # bytes

_Bytes = Annotated[int, Between(0, _MOST_BYTES)]
_Rate = Annotated[float, Between(1e-9, _MOST_RATE)]
_Time = Annotated[float, Between(0, 1e9)]  # us or ns: a second of a row, a quarter of an hour of an operator


@dataclass(frozen=True)
class Device:
    """Something that computes, with its memory and its rates in decoding one token, all of its threads together.

    memory_bytes, reserved_bytes: its memory, and the part used by others (system, driver, runtime).
    threads: of the CPU that the rates hold for; 1 for a GPU.
    dense_gb_s: bytes of weights read in dense products, by weight type; `OTHER`: all other types, without it as the
        slowest.
    head_gb_s: the same for the output head, whose activations come in two parts where its weights are quantised.
    bundle_gb_s, row_ns: by the type of gate and up, the rate of reading scattered rows of bundles, and
        the fixed time of a row. A row is that of gate, up or down in a bundle. Down has
        the type that `pack` combines with it. seconds = bytes / rate + rows * row_ns.
    op_us: fixed time of an operator: its barriers and norms, on a GPU its launch. A layer has four, attention's input,
        attention, projection and FFN (and every norm that stands alone); the head is one more.
    step_us: fixed time of a step beside these: the embedding, waking the threads, Python.
    sparse_us: fixed time of a sparse FFN beyond `op_us`: lists and additional barriers.
    kv_gb_s: bytes of keys and values that attention reads.
    pack_gb_s: bytes of weights as files have them that are multiplied, each being packed for it; 0 if unknown.
    cache_bytes, cache_gain: the rates hold for steps that read more than twice `cache_bytes`, so that every byte comes
        from memory; a step that reads up to `cache_bytes` finds them in the cache, `cache_gain` times as fast, and so
        are operators, which wait for the first bytes of their weights (`warm`). 0 and 1 if unknown.
    """

    name: Line
    memory_bytes: Annotated[int, Between(1, _MOST_BYTES)]
    reserved_bytes: _Bytes
    threads: Annotated[int, Between(1, 1 << 16)]
    dense_gb_s: Mapping[str, _Rate]
    head_gb_s: Mapping[str, _Rate]
    bundle_gb_s: Mapping[str, _Rate]
    row_ns: Mapping[str, _Time]
    op_us: _Time
    sparse_us: _Time
    step_us: _Time
    kv_gb_s: _Rate
    pack_gb_s: Annotated[float, Between(0, _MOST_RATE)] = 0.0
    cache_bytes: _Bytes = 0
    cache_gain: Annotated[float, Between(1, 1000)] = 1.0

    def warm(self, step_bytes: float) -> Device:
        """The device with the rates of steps that read `step_bytes` of weights, keys and values in all.

        From `cache_bytes` to twice as much the gain decreases linearly to none, in time per byte: steps read everything
        in turn, so ever less of it is still cached when it is read again.
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
        return nbytes / (1e9 * _rate(self.dense_gb_s, type_name))

    def head_seconds(self, type_name: str, nbytes: float) -> float:
        """The same for the output head."""
        return nbytes / (1e9 * _rate(self.head_gb_s, type_name))

    def lacks(self, types: RatedTypes) -> RatedTypes:
        """The types without a rate."""
        dense = frozenset[str]() if OTHER in self.dense_gb_s else types.dense - self.dense_gb_s.keys()
        return RatedTypes(dense, types.rows - self.bundle_gb_s.keys())

    def joined(self, other: Device) -> Device:
        """The device with the rates, too, that only the other has."""
        tables: dict[str, Any] = {name: {**getattr(other, name), **getattr(self, name)} for name in TABLES}
        return dataclasses.replace(self, **tables)

    def rows_seconds(self, gate_type: str, rows: float, nbytes: float) -> float:
        """Time of `rows` rows of bundles, `nbytes` in all."""
        kind = _rated_as(gate_type)
        return nbytes / (1e9 * self.bundle_gb_s[kind]) + 1e-9 * self.row_ns[kind] * rows


def unmeasured(name: str = "", memory_bytes: int = 1, reserved_bytes: int = 0) -> Device:
    """A device without rates."""
    return Device(name, memory_bytes, reserved_bytes, 1, {}, {}, {}, {}, 0.0, 0.0, 0.0, 1.0)


def _rate(rates: Mapping[str, float], kind: str) -> float:
    return rates[kind] if kind in rates else rates.get(OTHER) or min(rates.values())


@dataclass(frozen=True)
class Disk:
    """read_gb_s: by the bytes of one read, rate of random reads, `READERS` of them in flight. latency_us: of one alone,
    from its beginning to its end, beyond what its bytes take; 0 if unknown."""

    read_gb_s: Annotated[Mapping[Annotated[int, Between(1, _MOST_BYTES)], _Rate], Length(64, smallest=1)]
    latency_us: _Time = 0.0

    def seconds(self, size: int) -> float:
        """Time that a read of `size` bytes adds while many are in flight.

        Linear between the sizes that are known; a smaller read takes as long as the smallest, a larger one goes on at
        the rate of the largest.
        """
        sizes = sorted(self.read_gb_s)
        times = [one / (1e9 * self.read_gb_s[one]) for one in sizes]
        return float(np.interp(size, sizes, times)) * max(1.0, size / sizes[-1])

    def gap(self, size: int) -> int:
        """Bytes between two reads of `size` bytes up to which one read of all of it takes no longer than both, in whole
        blocks."""
        seconds, gap = self.seconds(size), 0
        while gap < _MOST_GAP and self.seconds(2 * size + gap + _BLOCK) <= 2 * seconds:
            gap += _BLOCK
        return gap

    def rate(self, size: int) -> float:
        """Bytes a second of random reads of `size` bytes."""
        return size / self.seconds(size)


READERS = 64
"""Number of reads in flight for which a disk's figures hold."""


@dataclass(frozen=True)
class Gpu:
    """A further GPU of a machine. sync_us, copy_gb_s: as of `Hardware`."""

    device: Device
    sync_us: _Time = 0.0
    copy_gb_s: Annotated[float, Between(0, _MOST_RATE)] = 0.0


@dataclass(frozen=True)
class Hardware:
    """A machine. source: where its figures come from; assumed: those that were neither measured nor
    published, "" for none.

    gpu, disk: None where there is none. sync_us: the cost of a layer on both devices: its input out, the partial
    sum back, waiting for each other (T_sync of arXiv 2312.12456, inequality 4). copy_gb_s: between the memories
    of CPU and GPU. host_bytes: RAM of the GPU's libraries and driver. All three are 0 without a GPU.
    key: everything that a measured machine's figures depend on (CPU, engine, threads ...); empty for a described one.
        Of a measured one the rates of some types may be missing, until something reads them.
    disturbed: cores that other programs took while it was measured, 0 if it was not disturbed.
    cards: its GPUs behind `gpu`, over all of which a model may be placed.
    """

    name: Line
    source: Line
    cpu: Device
    gpu: Device | None = None
    disk: Disk | None = None
    sync_us: _Time = 0.0
    copy_gb_s: Annotated[float, Between(0, _MOST_RATE)] = 0.0
    assumed: Line = ""
    key: Annotated[Mapping[Line, Line], Length(64)] = field(default_factory=dict)
    host_bytes: _Bytes = 0
    disturbed: Annotated[float, Between(0, 1e6)] = 0.0
    cards: Annotated[tuple[Gpu, ...], Length(16)] = ()

    @property
    def all_cards(self) -> tuple[Gpu, ...]:
        """All GPUs of the machine, `gpu` first."""
        first = () if self.gpu is None else (Gpu(self.gpu, self.sync_us, self.copy_gb_s),)
        return first + self.cards

    def with_cards(self, machines: Sequence[Hardware]) -> Hardware:
        """The same with the GPUs of other descriptions of the machine behind its own."""
        return dataclasses.replace(self, cards=tuple(card for one in machines for card in one.all_cards))

    def only(self, types: RatedTypes) -> Hardware:
        """A measured machine without the rates of other types on its GPU."""
        if self.gpu is None or not self.key:
            return self
        columns = zip(TABLES, (types.dense, types.dense, types.rows, types.rows), strict=True)
        tables: dict[str, Any] = {
            name: {kind: rate for kind, rate in getattr(self.gpu, name).items() if kind in rated}
            for name, rated in columns
        }
        return dataclasses.replace(self, gpu=dataclasses.replace(self.gpu, **tables))


def ready_made() -> list[str]:
    """The names of the machines whose descriptions come with the package."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def load(path_or_name: str | Path) -> Hardware:
    """A built-in machine by its name, else the description in a file.

    RequestError if there is neither; ModelError for a file that is not a description, or has absurd figures or too few.
    """
    name = str(path_or_name)
    if name in ready_made():
        return _read_whole(MACHINES / f"{name}.json")
    path = Path(name).expanduser()
    if not path.is_file():
        raise RequestError(f"no machine {shown(name)}: neither a file nor one of {', '.join(ready_made())}")
    return _read_whole(path)


def _read_whole(path: Path) -> Hardware:
    """The description in a file, which must have the rates of all types."""
    hardware = read(path)
    for name, device, types in _devices(hardware):
        for table, required in zip(TABLES, (types, types, RATED_ROWS, RATED_ROWS), strict=True):
            rates = getattr(device, table)
            if (lacking := sorted(set(required) - rates.keys())) and OTHER not in rates:
                described = OTHER if required is types else lacking[0]
                mend = f"{lacking[0]}: `powerinfer measure` measures it" if hardware.key else described
                raise ModelError(f"{path}: {name}.{table} lacks {mend}")
    return hardware


def read(path: Path) -> Hardware:
    """The description in a file; ModelError if it is invalid."""
    document = of_kind(parse_json(read_limited(path, _LIMIT), str(path)), KIND, FORMAT, str(path))
    for name in ("sync_us", "copy_gb_s", "assumed"):  # defaults, but a description must state them
        if name not in document:
            raise ModelError(f"{path}: {name} is missing")
    hardware = checked(Hardware, document, str(path))
    _refuse_absurd(hardware, str(path))
    return hardware


def save(hardware: Hardware, path: Path) -> None:
    """Write a description, whole or not at all. PowerInferError when that cannot be done."""
    document = {"format": FORMAT, "kind": KIND, **dataclasses.asdict(hardware)}
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        write_small(Path(path), text.encode())
    except OSError as error:
        raise PowerInferError(f"cannot write {path} ({error.strerror or error})") from error


def _refuse_absurd(hardware: Hardware, source: str) -> None:
    """ModelError for inconsistent figures."""
    for name, device, _ in _devices(hardware):
        if device.reserved_bytes > device.memory_bytes:
            raise ModelError(f"{source}: {name}.reserved_bytes is more than {name}.memory_bytes")
        dense = (*NATIVE_TYPES, OTHER)
        for table, allowed in zip(TABLES, (dense, dense, RATED_ROWS, RATED_ROWS), strict=True):
            for kind in sorted(getattr(device, table).keys() - set(allowed)):
                raise ModelError(f"{source}: {name}.{table} has {shown(kind)}, which is no weight type there")
    if any(card.copy_gb_s < 1e-9 for card in hardware.all_cards):
        raise ModelError(f"{source}: a machine with a GPU needs copy_gb_s")


def _devices(hardware: Hardware) -> list[tuple[str, Device, Iterable[str]]]:
    """(field, device, types of matrices there)."""
    gpus = [("gpu", hardware.gpu)] if hardware.gpu is not None else []
    gpus += [(f"cards[{at}].device", card.device) for at, card in enumerate(hardware.cards)]
    return [("cpu", hardware.cpu, NATIVE_TYPES), *((name, gpu, GPU_TYPES) for name, gpu in gpus)]
