"""List local models: downloaded ones, registered paths, and those of a clone of the repository.

JSON: models (name, path, source, bytes, quantisation: null if the file cannot be opened, prepared: kinds of prepared
files, used: when it was last opened by its name, in seconds since the epoch, null of a clone's).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from powerinfer.cli.common import Output
from powerinfer.hub import StoredModel, list_cloned, list_stored


def configure(parser: argparse.ArgumentParser) -> None:
    del parser  # it has no flags of its own


def execute(args: argparse.Namespace, out: Output) -> int:
    return show(out)


def document(model: StoredModel) -> dict[str, object]:
    """A local model in JSON."""
    return {"name": model.name, "path": str(model.path), "source": model.source, "bytes": model.nbytes}


def show(out: Output) -> int:
    """Print the list."""
    from datetime import datetime

    rows = []
    for model in (*list_stored(), *list_cloned()):
        quantisation, prepared = _quantisation(model.path), _prepared(model)
        used = datetime.fromtimestamp(model.used).strftime("used %Y-%m-%d %H:%M") if model.used else "of this clone"
        size = f"{model.nbytes / 1e6:,.0f} MB"
        ready = f"prepared: {', '.join(prepared)}" if prepared else ""
        out.line(f"{model.name:<44} {size:>10}  {quantisation or '?':<6}  {used:<21}  {ready}".rstrip())
        facts = {"quantisation": quantisation, "prepared": prepared, "used": model.used or None}
        rows.append({**document(model), **facts})
    if not rows:
        out.note("no models yet; `powerinfer pull` downloads the default one, `powerinfer pull --names` lists others")
    out.document({"models": rows})
    return 0


def _quantisation(path: Path) -> str | None:
    """Usual name of a model's types, such as Q4_K_M; None if the model cannot be opened."""
    from powerinfer.errors import PowerInferError
    from powerinfer.formats.checkpoint import open_checkpoint

    try:
        return open_checkpoint(path).quantisation
    except (PowerInferError, OSError):
        return None


def _prepared(model: StoredModel) -> list[str]:
    """Usual names of the files that have been prepared for a model."""
    from powerinfer.formats.prepared import BUNDLES, PREDICTOR, PROFILE, prepared_folder

    folder = prepared_folder(model.path)
    kinds = [kind.noun for kind in (PROFILE, PREDICTOR, BUNDLES) if (folder / f"{kind.name}.safetensors").is_file()]
    return [*kinds, *(["plan"] if any(folder.glob("plan-*.json")) else [])]
