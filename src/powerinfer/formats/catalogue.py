"""Short names of models on Hugging Face: `catalogue.json`, which comes with the package.

A model may be listed in several quantisations, the usual one first; `choose` takes the largest that runs well in the
memory of a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import log2
from pathlib import Path
from typing import Annotated

from powerinfer.formats.json_file import Between, Length, checked, of_kind, parse_json

_FILE = Path(__file__).with_suffix(".json")

Name = Annotated[str, Length(120, 1, printable=True)]
Names = Annotated[tuple[Name, ...], Length(20)]
Billions = Annotated[float, Between(0.01, 10000)]

_GB = 1e9
_ROOM = (1.1, 1 * _GB)
"""Memory for a download: this multiple of its bytes, and this more: working memory, a context of 8192 tokens."""
_SYSTEM = int(1.5 * _GB)
"""RAM that is left to the system and other programs."""
_DRIVER = int(0.7 * _GB)
"""GPU memory that is left to the driver and the desktop."""


@dataclass(frozen=True)
class Memory:
    """Bytes of RAM and of the GPU's memory, of a whole machine; gpu is 0 where none is used."""

    ram: int
    gpu: int = 0

    @property
    def usable(self) -> int:
        """Bytes for a model, on both together."""
        return max(0, self.ram - _SYSTEM) + self.usable_gpu

    @property
    def usable_gpu(self) -> int:
        """Bytes for a model on the GPU."""
        return max(0, self.gpu - _DRIVER)

    def __str__(self) -> str:
        gpu = f" and {gigabytes(self.gpu)} of GPU memory" if self.gpu else ""
        return f"{gigabytes(self.ram)} of RAM{gpu}"


@dataclass(frozen=True)
class Download:
    """The download of a model in one quantisation; None: safetensors, as they were published.

    gigabytes: of all of its files, rounded; estimated: computed from the model's shape; file: the GGUF model's (first)
    one.
    """

    gigabytes: Billions
    quantisation: Name | None = None
    file: Name | None = None
    estimated: bool = False

    @property
    def needed(self) -> int:
        """Bytes of memory in which it runs without reading weights from disk."""
        factor, more = _ROOM
        return int(factor * self.gigabytes * _GB + more)

    @property
    def size(self) -> str:
        """Gigabytes as text."""
        return f"{'about ' * self.estimated}{self.gigabytes:g} GB"


@dataclass(frozen=True)
class CatalogueModel:
    """repository: owner/name; downloads: the usual one first, then larger ones; parameters: billions of them, active:
    those of a token, of a mixture of experts; shape: its name in `placement.shapes`; aliases: further names.
    """

    repository: Name
    downloads: Annotated[tuple[Download, ...], Length(20, 1)]
    parameters: Billions
    active: Billions | None = None
    shape: Name | None = None
    aliases: Names = ()

    @property
    def quantisation(self) -> str | None:
        """The usual quantisation."""
        return self.downloads[0].quantisation

    def full_name(self, tag: str | None = None) -> str:
        """owner/name:TAG, with the usual quantisation unless another is given."""
        tag = tag or self.quantisation
        return f"{self.repository}:{tag}" if tag else self.repository

    def download(self, tag: str | None) -> Download | None:
        """The download of that quantisation, if it is listed."""
        wanted = (tag or "").lower()
        return next((one for one in self.downloads if (one.quantisation or "").lower() == wanted), None)

    def choose(self, memory: Memory) -> tuple[Download, str] | None:
        """Download for a machine, and the reason as the end of a sentence; None if nothing fits.

        The largest of which all fits the GPU, else the usual one: in RAM a larger one would be slower for little gain.
        """
        usual, *larger = self.downloads
        for one in sorted(larger, key=lambda one: one.gigabytes, reverse=True):
            if one.needed <= memory.usable_gpu:
                return one, f"the largest listed that fits the GPU's {gigabytes(memory.gpu)} whole"
        if usual.needed > memory.usable:
            return None
        memory_text = f"the GPU's {gigabytes(memory.gpu)} whole" if usual.needed <= memory.usable_gpu else str(memory)
        return usual, f"which fits {memory_text}"


@dataclass(frozen=True)
class UnsupportedFamily:
    """A family of models that people ask for and this engine does not run.

    names: beginnings of their names, in the form of `catalogue_names.name_form`; architectures: as files state them.
    """

    family: Name
    names: Names
    architectures: Names


@dataclass(frozen=True)
class _Catalogue:
    models: dict[Name, CatalogueModel]
    unsupported: list[UnsupportedFamily]


@cache
def _read() -> _Catalogue:
    document = of_kind(parse_json(_FILE.read_bytes(), str(_FILE)), "catalogue", 1, str(_FILE))
    return checked(_Catalogue, document, str(_FILE))


def catalogue() -> Mapping[str, CatalogueModel]:
    """The models by their short names."""
    return _read().models


def unsupported_families() -> list[UnsupportedFamily]:
    """Families with a name that is answered with a line of its own."""
    return _read().unsupported


def gigabytes(nbytes: float) -> str:
    """Bytes as text, in the unit in which downloads are stated."""
    return f"{nbytes / _GB:.3g} GB"


RAM_SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
GPU_SIZES = (4, 6, 8, 12, 16, 24, 32, 48, 80, 96)
"""GiB of memory that computers and GPUs have."""


def ram_for(download: Download, gpu: int = 0) -> int | None:
    """GiB of RAM that a computer has which runs it, beside so many of a GPU; None: more than computers have."""
    sizes = (n for n in RAM_SIZES if download.needed <= _computer(n, gpu).usable)
    return next(sizes, None)


def gpu_for(download: Download) -> int | None:
    """GiB of memory of a GPU that holds all of it; None: more than one has."""
    return next((n for n in GPU_SIZES if download.needed <= _computer(0, n).usable_gpu), None)


def _computer(ram: int, gpu: int) -> Memory:
    return Memory(int(0.97 * (ram << 30)), gpu << 30)  # 3 % of RAM are the firmware's and the kernel's


def nearest(parameters: float | None, experts: bool, memory: Memory) -> str | None:
    """The name of the first model that fits a machine, of the same kind (a mixture of experts or not), of about the
    size that is nearest to so many billions of parameters (None: the largest); of the other kind if none of it fits.
    """
    fitting = [(name, one) for name, one in catalogue().items() if one.choose(memory) is not None]
    alike = [(name, one) for name, one in fitting if (one.active is not None) == experts] or fitting
    wanted = parameters or max((one.parameters for _, one in alike), default=0.0)
    distances = [(int(6 * abs(log2(one.parameters / wanted))), name) for name, one in alike]
    return min(distances, key=lambda pair: pair[0])[1] if distances else None
