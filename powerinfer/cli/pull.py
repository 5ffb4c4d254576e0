"""Download a model into the cache, or list local models.

NAME is a known name, a Hugging Face repository (owner/name, or owner/name:Q4_K_M for one GGUF model of several) or
a local path, which is registered under its own name and not copied. Without NAME the default model is downloaded.
An interrupted pull resumes when it is run again.
"""

from __future__ import annotations

import argparse

from powerinfer.cli.common import Output
from powerinfer.hub import DEFAULT_MODEL, StoredModel, list_stored, pull


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="NAME", help=f"default: {DEFAULT_MODEL}")
    parser.add_argument("--list", action="store_true", help="list local models; downloads nothing")


def execute(args: argparse.Namespace, out: Output) -> int:
    if args.list:
        models = list_stored()
        for model in models:
            out.line(f"{model.name:<40} {model.nbytes / 1e6:>10.1f} MB  {model.source}")
        if not models:
            out.note("no models yet; `powerinfer pull` downloads the default one")
        out.document({"models": [_document(model) for model in models]})
        return 0
    model = pull(args.model, say=out.note)
    out.line(str(model.path))
    out.document(_document(model))
    return 0


def _document(model: StoredModel) -> dict[str, object]:
    return {"name": model.name, "path": str(model.path), "source": model.source, "bytes": model.nbytes}
