"""Serve a model over HTTP: OpenAI's API, and llama-server's routes for tokens.

http://127.0.0.1:8080/v1 is the base URL for clients; any API key will do unless one is set. The log, one JSON object a
line, is on stderr. Ctrl-C or SIGTERM lets running requests finish first; a second one does not. docs/serving.md
describes the API.

JSON: nothing but {} when the server has ended.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.cli.common import Output, agreed, config_flags, config_from, load_llm, model_flag
from powerinfer.cli.main import INTERRUPTED
from powerinfer.config import EngineConfig, ServeConfig
from powerinfer.errors import RequestError

if TYPE_CHECKING:
    from powerinfer.progress import Progress
    from powerinfer.runtime.engine import LLM

MAX_QUEUE = 32
UNLIMITED = 1 << 30  # requests, where --max-queue is 0


def configure(parser: argparse.ArgumentParser) -> None:
    model_flag(parser)
    config_flags(parser, ServeConfig, "server")
    config_flags(parser, EngineConfig, "engine", defaults={"max_queue": MAX_QUEUE})


def execute(args: argparse.Namespace, out: Output) -> int:
    try:
        from powerinfer.serve import logs, server
    except ImportError as error:
        raise RequestError(f"`serve` needs {error.name}: pip install 'powerinfer[serve]'") from None
    from powerinfer.hub import resolve_model

    config: ServeConfig = config_from(args, ServeConfig)
    engine: EngineConfig = config_from(args, EngineConfig)
    server.check(config)
    path = resolve_model(args.model, say=out.note, agree=agreed)

    def load(progress: Progress) -> LLM:
        llm = load_llm(path, engine, progress)
        for note in llm.notes:
            logs.log("info", note)
        return llm

    logs.set_up()
    names = list(config.alias) or [_name(args.model, path)]
    made = server.make_server(load, names, config, engine.max_batch + (engine.max_queue or UNLIMITED))
    try:
        made.live()
    finally:
        gc.unfreeze()  # the server's cycles refer to the model, which is native: collected at the end, it is no leak
    out.document({})
    return INTERRUPTED if made.force_exit else 0


def _name(model: str | None, path: Path) -> str:
    """The name of a model in the API: what -m says, a path without its folders and ending."""
    from powerinfer.hub import DEFAULT_MODEL

    if model is None:
        return DEFAULT_MODEL
    return path.stem if path.suffix == ".gguf" else path.name
