"""Serve models over HTTP: OpenAI's API, and llama-server's own routes.

http://127.0.0.1:8080/v1 is the base URL for clients; any API key will do unless one is set. One model is loaded at
once. Of several (--models, or -m more than once) each is loaded when a request names it, and unloaded when it is idle
or another one needs its memory. The log is on stderr: short lines on a terminal, else one JSON object a line. Ctrl-C or
SIGTERM lets running requests finish first; a second one does not. docs/serving.md describes the API.

JSON: nothing but {} when the server has ended.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.cli.common import (
    Output,
    config_flags,
    config_from,
    load_llm,
    model_argument,
    model_path,
    printable,
    shown_name,
    small_model_note,
)
from powerinfer.cli.main import INTERRUPTED
from powerinfer.cli.progress import Bar
from powerinfer.cli.screen import styled
from powerinfer.config import EngineConfig, ServeConfig
from powerinfer.errors import NoDraftsError, RequestError, install_extra
from powerinfer.progress import silent

if TYPE_CHECKING:
    from powerinfer.hybrid.resolved import Needs
    from powerinfer.progress import Progress
    from powerinfer.runtime.engine import LLM
    from powerinfer.serve.served import Budget, ModelSource
    from powerinfer.serve.server import Server

MAX_QUEUE = 32
SHOWN = 8  # names of models
UNLIMITED = 1 << 30  # requests, where --max-queue is 0
MAX_NAME = 128
LOADED = 4  # models whose requests are expected at a time, where --max-models says nothing


def configure(parser: argparse.ArgumentParser) -> None:
    model_argument(parser, many=True)
    parser.add_argument(
        "-m",
        "-hf",
        "--model",
        action="append",
        metavar="[NAME=]MODEL",
        help="GGUF file, model folder or name of a model, and its name in the API; more than once: several models; "
        "default: the default model",
    )
    parser.add_argument(
        "--models",
        nargs="?",
        const="",
        metavar="DIR",
        help="several models: the GGUF files and model folders in DIR; without DIR those of `powerinfer list`",
    )
    config_flags(parser, ServeConfig, "server")
    config_flags(parser, EngineConfig, "engine", defaults={"max_queue": MAX_QUEUE})


def execute(args: argparse.Namespace, out: Output) -> int:
    try:
        from powerinfer.serve import logs, server
    except ImportError as error:
        raise RequestError(f"`serve` needs {error.name}: {install_extra('serve')}") from None

    config: ServeConfig = config_from(args, ServeConfig)
    engine: EngineConfig = config_from(args, EngineConfig)
    server.check(config)
    several = args.models is not None or len(args.model or ()) > 1
    _check_flags(args, several)
    if config.log_format == "text" or (config.log_format == "auto" and sys.stderr.isatty()):
        from powerinfer.cli.log_lines import LogLines, is_shown

        logs.set_up(LogLines(), is_shown if sys.stderr.isatty() else None)
    else:
        logs.set_up()
    if config.ray is not None:
        _serve_on_ray(args, config, engine, out)
        out.document({})
        return 0
    _check_engine(engine)
    running = (_serve_several if several else _serve_one)(args, config, engine, out)
    if sys.stderr.isatty():  # beside the log, for who looks on
        running.say = out.note
        if several:
            names, count = running.service.names, len(running.service.names)
            title = f"{count} model{'s' * (count != 1)}, each loaded when a request names it"
            out.note(_addresses(running.url, title, config, names))
    try:
        running.live()
    finally:
        gc.unfreeze()  # the server's cycles refer to the model, which is native: collected at the end, it is no leak
    out.document({})
    return INTERRUPTED if running.force_exit else 0


def _addresses(url: str, title: str, config: ServeConfig, models: Sequence[str] = ()) -> str:
    """Text for a person who starts a server, as a block of lines. models: of one that has several."""
    from powerinfer.serve.server import checked_keys

    more = len(models) - SHOWN
    listed = ", ".join(models[:SHOWN]) + (f" and {more} more, see {url}/v1/models" if more > 0 else "")
    rows = {
        **({"models": printable(listed)} if models else {}),
        "chat in a browser": f"{url}/",
        "OpenAI's API": f"{url}/v1",
        "Anthropic's API": url,
        "Ollama's API": url,
        "API key": "needed" if checked_keys(config) else "any, or none",
        "to end": "Ctrl-C",
    }
    lines = "".join(f"  {name:<20}{value}\n" for name, value in rows.items())
    return f"\n{styled(printable(title), 'bold', sys.stderr)}\n\n{lines}"


def _check_flags(args: argparse.Namespace, several: bool) -> None:
    """RequestError for flags that are for one model, or for several, and there is another number."""
    for flag in ("keep_alive", "max_models") if not several else ("alias", "prepared", "ray"):
        if flag in vars(args):
            wanted = "several models: --models, or -m more than once" if not several else "one model"
            raise RequestError(f"--{flag.replace('_', '-')} is for {wanted}")


def _check_engine(engine: EngineConfig) -> None:
    """RequestError for options with which no model could be loaded, PowerInferError for a GPU that cannot be used: both
    before the server listens."""
    from powerinfer.devices.wanted import wanted_gpu
    from powerinfer.hardware.measure import gpu_beside
    from powerinfer.hybrid.resolve import check_split
    from powerinfer.placement.budget import check_ram
    from powerinfer.runtime.options import engine_config

    engine_config(asdict(engine))
    check_split(engine)
    if engine.ram is not None:
        check_ram(engine.ram, "give less, or leave it out")
    if engine.gpu == "auto":  # of which a load says why it is not used
        wanted_gpu(engine)
    else:
        gpu_beside(engine, silent)


def _check_model(path: Path, engine: EngineConfig) -> None:
    """RequestError for a context, drafts or spread experts that a model cannot have; its headers are read only where
    some are named."""
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.hybrid.resolve import check_context, check_split
    from powerinfer.runtime.draft_sources import smaller_model_of

    if not engine.context and engine.speculate in ("auto", "lookup", "off") and engine.split_mode == "layer":
        return
    checkpoint = open_checkpoint(path, quantize=engine.quantize, draft_head=engine.reads_draft_head)
    check_context(checkpoint.config, engine)
    check_split(engine, checkpoint.config)
    smaller_model_of(checkpoint, engine)


def _resolve_model(args: argparse.Namespace, config: ServeConfig, out: Output) -> tuple[tuple[str, ...], Path]:
    """The names and the path of the model."""
    name, model = _named(args.model[0]) if args.model else (None, None)
    path = model_path(model, out)
    return tuple(config.alias) or (name or shown_name(model, path),), path


def _serve_on_ray(args: argparse.Namespace, config: ServeConfig, engine: EngineConfig, out: Output) -> None:
    try:
        from powerinfer.serve import ray_app
    except ImportError as error:
        raise RequestError(f"--ray needs {error.name}: {install_extra('ray')}") from None

    names, path = _resolve_model(args, config, out)
    ray_app.run(path, names, engine, config, _requests(engine))


def _serve_one(args: argparse.Namespace, config: ServeConfig, engine: EngineConfig, out: Output) -> Server:
    from powerinfer.serve import logs, server
    from powerinfer.serve.served import ModelSource

    names, path = _resolve_model(args, config, out)
    _check_model(path, engine)
    shown = sys.stderr.isatty()

    def load(progress: Progress, budget: Budget) -> LLM:
        with Bar() if shown else nullcontext(silent) as bar:

            def report(label: str, done: int, total: int) -> None:
                progress(label, done, total)
                bar(label, done, total)

            llm = load_llm(path, engine, report)
            llm.prepare()
        logs.log_notes(llm.notes)
        if shown:
            requests = f"{engine.max_batch} requests at a time" if engine.max_batch > 1 else "one request at a time"
            out.note(_addresses(created.url, f"{names[0]}, context of {llm.context} tokens, {requests}", config))
            small_model_note(_named(args.model[0])[1] if args.model else None, out)
        return llm

    created = server.make_server([ModelSource(names, load)], config, _requests(engine))
    return created


def _serve_several(args: argparse.Namespace, config: ServeConfig, engine: EngineConfig, out: Output) -> Server:
    from powerinfer.runtime.draft_sources import smaller_model
    from powerinfer.serve import logs, server
    from powerinfer.serve.served import Budget
    from powerinfer.serve.service import ServicePolicy

    with Bar() as bar:
        smaller_model(engine, engine.context, bar)  # raises what is wrong for every model
    named = _named_models(args, out)
    list_sources = partial(_sources, args.models, named, engine)
    sources = list_sources()
    if not sources:
        folder = args.models or "`powerinfer list`"
        logs.log("warning", f"no models in {folder} yet: GGUF files and model folders are served once they are there")
    if engine.vrams:
        raise RequestError("--vram of several GPUs is for one model: give one -m, or one size")
    policy = ServicePolicy(
        Budget(engine.ram, engine.vram_bytes), config.max_models, config.keep_alive, engine.max_queue or UNLIMITED,
        engine.max_batch, list_sources,
    )  # fmt: skip
    loaded = config.max_models or max(len(sources), LOADED)
    return server.make_server(sources, config, min(UNLIMITED, loaded * _requests(engine)), policy)


def _requests(engine: EngineConfig) -> int:
    return engine.max_batch + (engine.max_queue or UNLIMITED)


def _named_models(args: argparse.Namespace, out: Output) -> Mapping[str, Path]:
    """The models of -m by name. RequestError if two have the same one."""
    models: dict[str, Path] = {}
    for text in args.model or ():
        name, model = _named(text)
        path = model_path(model, out)
        _add(models, {name or shown_name(model, path): path})
    return models


def _sources(folder: str | None, named: Mapping[str, Path], engine: EngineConfig) -> list[ModelSource]:
    """All models that there are now: those given, and those of --models. folder: None: not said; "": the local ones."""
    from powerinfer.hub import list_cloned, list_stored, models_in

    models: dict[str, Path] = {}
    if folder:
        models = models_in(folder)
    elif folder is not None:
        models = {model.name: model.path for model in (*list_cloned(), *list_stored())}
    _add(models, named)
    return [_source(name, path, engine) for name, path in models.items()]


def _add(models: dict[str, Path], more: Mapping[str, Path]) -> None:
    for name, path in more.items():
        if models.setdefault(name, path) != path:
            raise RequestError(f"{models[name]} and {path} are both named {name}: -m NAME=MODEL names one")


def _source(name: str, path: Path, engine: EngineConfig) -> ModelSource:
    from powerinfer.runtime.draft_sources import drafts_for_itself
    from powerinfer.serve.served import ModelSource

    if drafts_for_itself(engine, path):
        engine = replace(engine, speculate="off")
    return ModelSource((name,), partial(_load, name, path, engine), partial(_needs, path, engine), path)


def _load(name: str, path: Path, engine: EngineConfig, progress: Progress, budget: Budget) -> LLM:
    """One of several models, without drafts where it cannot have those of --speculate. Not by `load_llm`: what is
    frozen there would stay when the model is unloaded."""
    from powerinfer.runtime.engine import LLM
    from powerinfer.serve import logs

    within = replace(engine, ram=budget.ram, vram=budget.vram)
    try:
        llm = LLM(path, progress=progress, **asdict(within))
    except NoDraftsError as error:
        logs.log("warning", f"it answers without drafts: {error}", model=name)
        llm = LLM(path, progress=progress, **asdict(replace(within, speculate="off")))
    llm.prepare()
    logs.log_notes(llm.notes, model=name)
    return llm


def _needs(path: Path, engine: EngineConfig, budget: Budget) -> Needs:
    """Memory of a model within a budget, from its headers. PowerInferError if that is not enough."""
    from powerinfer.placement.budget import gib

    within = replace(engine, vram=budget.vram)
    try:
        return _read_needs(path, replace(within, ram=budget.ram))
    except RequestError:
        if engine.ram is not None:
            raise
        least = _read_needs(path, within)  # raises what has another cause
        if budget.ram is None or least.ram <= budget.ram:
            raise
        raise RequestError(
            f"it needs {gib(least.ram)} of RAM, and {gib(budget.ram)} are free: lower --context, or use a smaller model"
        ) from None


def _read_needs(path: Path, engine: EngineConfig) -> Needs:
    """Memory of a model, and of the smaller one that drafts for it, if it can."""
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.hybrid.resolve import resolve
    from powerinfer.hybrid.resolved import needs
    from powerinfer.runtime.draft_sources import join_head, smaller_model
    from powerinfer.text.model_text import tokenizer_of

    checkpoint = open_checkpoint(path, quantize=engine.quantize, draft_head=engine.reads_draft_head)
    smaller = smaller_model(engine, checkpoint.config.context_length, silent)
    try:
        join_head(checkpoint, engine, silent)
        if smaller is None:
            return needs(resolve(checkpoint, engine))
        smaller.check_vocabulary(tokenizer_of(checkpoint))
        beside = smaller.leave_room(engine, checkpoint)
    except NoDraftsError:
        return _read_needs(path, replace(engine, speculate="off"))
    of_model = needs(resolve(checkpoint, beside))
    return of_model._replace(ram=of_model.ram + smaller.ram_bytes, vram=of_model.vram + smaller.vram_bytes)


def _named(argument: str) -> tuple[str | None, str]:
    """(name, model) of NAME=MODEL; None where it is a model alone."""
    name, separator, model = argument.partition("=")
    if not separator or not model or Path(argument).expanduser().exists():
        return None, argument
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise RequestError(f"the name of a model has 1 to {MAX_NAME} printable characters, not {name!r}")
    return name, model
