"""The families of models that this engine reads, one file each: `FOLDERS` for Hugging Face folders, `GGUFS` for GGUF.

A file that is added here is found; nothing lists them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from powerinfer.formats.family import Folder, Gguf

FILES = {file.name: import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)}
"""The modules by the names of their files."""

FOLDERS: dict[str, Folder] = {
    family.model_type: family for file in FILES.values() for family in getattr(file, "FOLDERS", ())
}
"""Families by `model_type`, which is `ModelConfig.architecture` of a folder."""

CLASSES: dict[str, Folder] = {name: family for family in FOLDERS.values() for name in family.classes}
"""Families by the class in a folder's `architectures`; of two that call it alike, the last in the file."""

GGUFS: dict[str, Gguf] = {
    family.architecture: family for file in FILES.values() for family in getattr(file, "GGUFS", ())
}
"""Families by `general.architecture`, which is `ModelConfig.architecture` of a GGUF file."""
