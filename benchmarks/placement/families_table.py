"""The families that run and llama.cpp's architectures beside them: the tables of docs/models.md.

    python -m benchmarks.placement.families_table [--check]

Nothing is measured: families are those of src/powerinfer/formats/families, of which families.json says what they are
called, how large they are and since which version they run. It has llama.cpp's names of architectures, too, and why
some of them are not here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.tables import Pages, paragraphs, table, write_tables
from powerinfer.formats import families
from powerinfer.formats.family import Folder, Gguf

FILE = Path(__file__).with_name("families.json")
ZERO = ("relu", "relu2", "drelu", "fatrelu")
"""Activations whose zeros are exact."""


def silent(folders: Sequence[Folder], ggufs: Sequence[Gguf]) -> str:
    """Whether neurons are exactly zero; FFNs without a gate have squared ReLU where folders are all there is."""
    zero = any(family.activation in ZERO for family in ggufs)
    return "yes" if zero or (not ggufs and not all(family.gated for family in folders)) else ""


def folder_types(folders: Sequence[Folder]) -> list[str]:
    """`model_type` of config.json: of folders of texts alone, and of published ones with a part for pictures, whose
    class is called like it: gemma4 of Gemma4ForConditionalGeneration."""
    types = [name for family in folders for name in (family.model_type, *family.other_types)]
    classes = (family.vision_class.removesuffix("ForConditionalGeneration") for family in folders)
    outer = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in classes if name]
    return list(dict.fromkeys([*types, *outer]))


def document() -> dict[str, Any]:
    described: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return described


def families_table() -> str:
    """ValueError for a family that families.json does not describe."""
    described = document()["families"]
    if missing := families.FILES.keys() - described.keys():
        raise ValueError(f"{FILE.name} has no entry for {', '.join(sorted(missing))}")
    body = []
    for file, module in families.FILES.items():
        name, sizes, since, *where = described[file]  # where: the layers that have silent neurons, if not all
        folders: Sequence[Folder] = getattr(module, "FOLDERS", ())
        ggufs: Sequence[Gguf] = getattr(module, "GGUFS", ())
        types = ", ".join(f"`{name}`" for name in folder_types(folders))
        files = ", ".join(f"`{family.architecture}`" for family in ggufs)
        body.append([name, sizes, types, files, where[0] if where else silent(folders, ggufs), since])
    body.sort(key=lambda row: row[0].lower())
    return table(["models", "sizes", "folders", "GGUF files", "silent neurons", "since"], body)


def architectures_table() -> str:
    """llama.cpp's architectures: those that run, and the others by why they do not."""
    described = document()
    names, missing = described["architectures"], described["missing"]
    runs = [name for name in names if name in families.GGUFS]
    why = {name: reason for reason, some in missing.items() for name in some}
    groups = {reason: [name for name in names if why.get(name) == reason and name not in runs] for reason in missing}
    groups[described["others"]] = [name for name in names if name not in runs and name not in why]
    ours = [name for name in families.GGUFS if name not in names]
    body = [["run", str(len(runs)), ", ".join(runs)]]
    body += [[reason, str(len(some)), ", ".join(some)] for reason, some in groups.items() if some]
    body.append(["only here", str(len(ours)), ", ".join(ours)])
    lead = f"The {len(names)} names of architectures of {described['source']}."
    return paragraphs(lead, table(["", "", "architectures"], body))


PAGES: Pages = {
    ROOT / "docs/models.md": lambda: {"families": families_table(), "architectures": architectures_table()}
}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
