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


@dataclass(frozen=True)
class CatalogueModel:
    """repository: owner/name; quantisation: the one to download, of several GGUF models; None: safetensors.

    file: the GGUF model's (first) file; gigabytes: to download, rounded, None where that is not known.
    """

    repository: Name
    quantisation: Name | None = None
    file: Name | None = None
    gigabytes: Annotated[float, Between(0.01, 1000)] | None = None

    def full_name(self, tag: str | None = None) -> str:
        """owner/name:TAG, with its own quantisation unless another is given."""
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
