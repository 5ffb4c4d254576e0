"""Remove a local model from the cache, with its prepared files.

Of a registered path only the name is removed: its files stay. Asks first, unless --yes is given.

JSON: removed (name, path, source, bytes); null if the answer was no.
"""

from __future__ import annotations

import argparse
import sys

from powerinfer.cli.common import Output, agreed
from powerinfer.cli.list import document
from powerinfer.errors import RequestError
from powerinfer.hub import local_model, remove


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="the name of a local model; `powerinfer list` shows them")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def execute(args: argparse.Namespace, out: Output) -> int:
    model = local_model(args.model)
    extent = "the name only, its files stay" if model.source == "local" else f"{model.nbytes / 1e6:,.0f} MB"
    if not args.yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise RequestError(f"rm asks at a terminal; `powerinfer rm {args.model} --yes` removes it ({extent})")
        if not agreed(f"remove {model.name} ({extent})?"):
            out.document({"removed": None})
            return 0
    remove(model.name)
    out.line(f"removed {model.name} ({extent})")
    out.document({"removed": document(model)})
    return 0
