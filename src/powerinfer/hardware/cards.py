"""Machines described by a card's name and the kind of RAM: `powerinfer plan --card "RTX 4060" --ram 32GiB`.

`cards.json` has public figures of NVIDIA's cards. What a step reaches of them is assumed, alike for all, as the
constants below say; docs/hardware.md compares that with what others have measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated

from powerinfer.devices.torch_device import OLDEST
from powerinfer.errors import RequestError
from powerinfer.formats.json_file import Between, Length, Line, checked, of_kind, parse_json
from powerinfer.formats.mapped import shown
from powerinfer.hardware.description import OTHER, RATED_ROWS, Device, Gpu, Hardware, load

_FILE = Path(__file__).with_name("cards.json")

NONE = "none"
"""The name that stands for a machine without a card."""

DENSE, ROWS, CACHED = 0.75, 0.6, 0.6
"""Share of a card's bandwidth that dense products, scattered rows, and keys and values are assumed to reach."""
CPU_DENSE, CPU_ROWS, CPU_CACHED = 0.7, 0.6, 0.5
"""The same of RAM's."""
CORE_GB_S = 13.0
"""The most that a core reads in products: those of Q4_K and Q4_0 on a Xeon with AVX-512, docs/hardware.md."""
MXFP4_GB_S = 2.9
"""The most that a multiprocessor reads of MXFP4 for each GHz, whose products take more than their bytes: 745 GB/s of an
H200, docs/hardware.md."""
SYNC_US = 150.0
"""The time of both devices to meet in a layer: on an H200 beside 16 cores a layer of experts took so much longer than
its bytes (docs/hybrid.md)."""
BUS = 0.8
"""Share of PCIe's rate that copies reach."""
LANE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938}
"""The rate of a lane by PCIe's generation."""

CORES = 6
"""Performance cores, where --threads does not say."""
RAM = 32 << 30
"""Bytes of RAM, where --ram does not say."""

TYPICAL = ("GeForce RTX 4060", "GeForce RTX 3060 12 GB", "GeForce RTX 4060 Ti 16 GB", "GeForce RTX 3090")
"""A card for each amount of memory that many have: what is planned for where --vram alone describes a card."""

_DDR5 = 2022  # year of the first cards that are assumed to be beside DDR5
_OLD_RAM, _NEW_RAM = "ddr4-3200", "ddr5-5600"
_MOST_CHANNELS = 12
_SILENT = frozenset(("nvidia", "geforce", "rtx", "gtx", "gpu", "card", "graphics", "generation", "blackwell"))
_FOREIGN = frozenset(
    ("amd", "radeon", "rx", "instinct", "vega", "firepro", "intel", "arc", "iris", "uhd", "apple", "metal", "adreno")
)


@dataclass(frozen=True)
class Card:
    """gib, gb_s: memory and its bandwidth; pcie, lanes: of its bus; capability: CUDA's compute capability; sms, ghz:
    multiprocessors and their boost clock; year: in which it came."""

    gib: Annotated[int, Between(1, 1024)]
    gb_s: Annotated[float, Between(1, 1e5)]
    pcie: Annotated[int, Between(3, 5)]
    lanes: Annotated[int, Between(1, 16)]
    capability: Annotated[float, Between(1, 100)]
    sms: Annotated[int, Between(1, 1000)]
    ghz: Annotated[float, Between(0.1, 10)]
    year: Annotated[int, Between(2000, 2100)]

    @property
    def supported(self) -> bool:
        """Whether the engine's kernels run on it."""
        return (int(self.capability), round(10 * self.capability) % 10) >= OLDEST


@dataclass(frozen=True)
class _Cards:
    source: Line
    cards: Annotated[dict[str, Card], Length(1000, 1)]


@cache
def cards() -> dict[str, Card]:
    """Cards by their full names."""
    document = of_kind(parse_json(_FILE.read_bytes(), str(_FILE)), "cards", 1, str(_FILE))
    return checked(_Cards, document, str(_FILE)).cards


def find_card(text: str) -> tuple[str, Card]:
    """A card by its name, as people write it: "RTX 4060", "rtx4060ti 16gb", "4090 laptop".

    Where there are some with other memory, the one first in the table. RequestError, with the nearest, for another.
    """
    words, gib = _words(text)
    if words & _FOREIGN:
        raise RequestError(f"{shown(text)}: the engine computes on NVIDIA's cards alone; --card none plans for the CPU")
    alike = {name: card for name, card in cards().items() if words and _words(name)[0] == words}
    named = {name: card for name, card in alike.items() if gib in (None, card.gib)}
    if alike and not named:
        sizes = " or ".join(f"{card.gib} GB" for card in alike.values())
        raise RequestError(f"{shown(text)}: such a card has {sizes}")
    if not named and "gtx" in text.lower():
        raise RequestError(f"{shown(text)}: cards before the RTX 30 series are too old; --card none plans for the CPU")
    if not named:
        short = {_short(name): name for name in cards()}
        near = [short[one] for one in get_close_matches(_short(text), short, 1)]
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"no card {shown(text)}{hint}; `powerinfer plan --names` lists them, --card none is without")
    name, card = next(iter(named.items()))
    if not card.supported:
        raise RequestError(
            f"{name} is too old for the engine's kernels: its compute capability is {card.capability:g}, and "
            f"{'.'.join(map(str, OLDEST))} is needed; --card none plans for the CPU"
        )
    return name, card


def _words(text: str) -> tuple[frozenset[str], int | None]:
    """Words that tell a name from others, and the memory in it, in GiB."""
    text = text.lower().replace("max-q", "laptop").replace("mobile", "laptop").replace("notebook", "laptop")
    memory = re.search(r"(?<!\d)(\d{1,3}) ?-?gi?b?(?![a-z])", text)
    rest = text if memory is None else text[: memory.start()] + " " + text[memory.end() :]
    words = frozenset(re.findall(r"[a-z]+|\d+", rest)) - _SILENT
    return words, None if memory is None else int(memory[1])


def _short(text: str) -> str:
    return re.sub(r"nvidia|geforce|rtx|gtx|[^a-z0-9]", "", text.lower())


def memory_rate(text: str) -> tuple[str, float]:
    """(the name of a kind of RAM, its GB/s): "ddr5-5600" has two channels, "ddr5-4800x8" eight.

    RequestError for another text.
    """
    match = re.fullmatch(r"(lp)?ddr([345])(x?)[-_ ]?(\d{3,5})(?:x(\d{1,2}))?", text.strip().lower())
    channels = int(match[5] or 2) if match else 0
    if match is None or not 800 <= int(match[4]) <= 12800 or not 1 <= channels <= _MOST_CHANNELS:
        raise RequestError(
            f"--memory {shown(text)}: not a kind of RAM such as ddr4-3200 or ddr5-5600; ddr5-4800x8 has eight channels"
        )
    name = f"{(match[1] or '').upper()}DDR{match[2]}{match[3].upper()}-{match[4]}"
    return f"{channels} channels of {name}", int(match[4]) * 8 * channels / 1000


def described_machine(
    card: str | None = None, ram: int | None = None, memory: str | None = None, threads: int = 0
) -> Hardware:
    """A machine with a card, or several ("RTX 4090, RTX 3060"; "none" or None: without one), and that RAM, in bytes, of
    a kind that `memory_rate` reads.

    RequestError for a card, or a kind of RAM, that is not known.
    """
    base = load("pc-16gb")  # its disk, system and fixed times
    named = [] if card is None or card.strip().lower() == NONE else [find_card(one) for one in card.split(",")]
    old = bool(named) and all(published.year < _DDR5 for _, published in named)
    kind = memory or (_OLD_RAM if old else _NEW_RAM)
    if ram == 0:
        raise RequestError("--ram is the memory of the described PC: more than 0")
    ram, threads = ram or RAM, threads or CORES
    modules, gb_s = memory_rate(kind)
    limit = CORE_GB_S * threads
    cpu = _with_rates(base.cpu, min(limit, CPU_DENSE * gb_s), min(limit, CPU_ROWS * gb_s), CPU_CACHED * gb_s)
    cpu = replace(
        cpu, name="CPU", memory_bytes=ram, reserved_bytes=min(_SYSTEM, ram // 4), threads=threads,
        pack_gb_s=base.cpu.pack_gb_s * threads / base.cpu.threads,
    )  # fmt: skip
    source = f"As published: {modules} ({gb_s:.4g} GB/s)"
    guessed = "" if memory else f"{kind}, as --memory does not say; "
    assumed = f"{guessed}{threads} cores; {_ASSUMED}"
    if not named:
        title = f"a PC without a GPU, {ram / 2**30:.3g} GiB of {kind.upper()}"
        return Hardware(title, source, cpu, disk=base.disk, assumed=assumed)
    assert base.gpu is not None
    (first, figures), *further = (_described_gpu(base.gpu, *one) for one in named)
    for _, text in further:
        figures += f"; {text}"
    return Hardware(
        f"a PC with {' and '.join(name for name, _ in named)}, {ram / 2**30:.3g} GiB of {kind.upper()}",
        f"{source}; {figures}",
        cpu,
        first.device,
        base.disk,
        sync_us=first.sync_us,
        copy_gb_s=first.copy_gb_s,
        assumed=assumed,
        host_bytes=_HOST_BYTES,
        cards=tuple(gpu for gpu, _ in further),
    )


def _described_gpu(base: Device, name: str, card: Card) -> tuple[Gpu, str]:
    """A card as a GPU of a machine, and its published figures as text."""
    gpu = _with_rates(base, DENSE * card.gb_s, ROWS * card.gb_s, CACHED * card.gb_s)
    mxfp4 = min(DENSE * card.gb_s, MXFP4_GB_S * card.sms * card.ghz)
    gpu = replace(gpu, name=f"NVIDIA {name}", memory_bytes=card.gib << 30)
    gpu = replace(gpu, dense_gb_s={**gpu.dense_gb_s, "MXFP4": mxfp4})
    bus = card.lanes * LANE_GB_S[card.pcie]
    text = f"NVIDIA {name} ({card.gib} GB, {card.gb_s:g} GB/s), PCIe {card.pcie}.0 x{card.lanes} ({bus:.3g} GB/s)"
    return Gpu(gpu, SYNC_US, BUS * bus), text


_SYSTEM = 4 << 30
"""RAM of the system, of which it has at most a quarter."""

_HOST_BYTES = 785 << 20
"""RAM of torch, its libraries and the driver: as measured beside an H200."""

_ASSUMED = (
    f"products read {100 * DENSE:.0f} % of a card's bandwidth and {100 * CPU_DENSE:.0f} % of RAM's, at most "
    f"{CORE_GB_S:g} GB/s a core; {SYNC_US:g} us for a card and the CPU to meet in a layer; 4 GiB of RAM, at most a "
    "quarter, and 1 GiB of VRAM for system and driver; fixed times and disk as of pc-16gb"
)


def memory_leaving(nbytes: int, cpu: Device) -> int:
    """RAM of a described machine whose system leaves so many bytes of it. cpu: as it is with other RAM."""
    if cpu.reserved_bytes == cpu.memory_bytes // 4:
        return min(nbytes + _SYSTEM, -(-4 * nbytes // 3))
    return nbytes + cpu.reserved_bytes


def _with_rates(device: Device, dense: float, rows: float, cached: float) -> Device:
    """The device with these rates, GB/s, whatever the type of weights."""
    products = {OTHER: dense}
    bundles = dict.fromkeys(RATED_ROWS, rows)
    return replace(device, dense_gb_s=products, head_gb_s=products, bundle_gb_s=bundles, kv_gb_s=cached)


def typical_card(vram: int) -> str:
    """The name of the card of `TYPICAL` with the least memory that has so many bytes, else of the largest."""
    published = cards()
    fits = [name for name in TYPICAL if published[name].gib << 30 >= vram]
    return min(fits, key=lambda name: published[name].gib) if fits else TYPICAL[-1]
