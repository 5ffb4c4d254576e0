"""Short names of models on Hugging Face: `catalogue.json`, which comes with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from powerinfer.formats.json_file import Between, Length, checked, of_kind, parse_json

_FILE = Path(__file__).with_suffix(".json")

Name = Annotated[str, Length(120, 1, printable=True)]
Billions = Annotated[float, Between(0.01, 10000)]


@dataclass(frozen=True)
class Download:
    """The download of a model in one quantisation; None: safetensors, as they were published.

    gigabytes: of all of its files, rounded; estimated: computed from the model's shape; file: the GGUF model's (first)
    one.
    """

    gigabytes: Annotated[float, Between(0.01, 10000)]
    quantisation: Name | None = None
    file: Name | None = None
    estimated: bool = False


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
    aliases: Annotated[tuple[Name, ...], Length(20)] = ()

    @property
    def quantisation(self) -> str | None:
        """The usual quantisation."""
        return self.downloads[0].quantisation

    def full_name(self, tag: str | None = None) -> str:
        """owner/name:TAG, with the usual quantisation unless another is given."""
        tag = tag or self.quantisation
        return f"{self.repository}:{tag}" if tag else self.repository


@dataclass(frozen=True)
class _Catalogue:
    models: dict[Name, CatalogueModel]


@cache
def catalogue() -> Mapping[str, CatalogueModel]:
    """The models by their short names."""
    document = of_kind(parse_json(_FILE.read_bytes(), str(_FILE)), "catalogue", 1, str(_FILE))
    return checked(_Catalogue, document, str(_FILE)).models
