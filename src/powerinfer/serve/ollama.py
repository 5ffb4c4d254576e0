"""Ollama's API, for its clients; what of it this server does not have is refused with the command that does it."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from powerinfer import __version__
from powerinfer.serve.api_error import ApiError
from powerinfer.serve.app import answer, answer_chat, embedded, json_response, refusal, shape_of
from powerinfer.serve.embeddings import MAX_INPUTS, shortened
from powerinfer.serve.llama_server import add_refusal, params_and_prompts
from powerinfer.serve.ollama_bodies import (
    OLLAMA_NAMES,
    AnswerBody,
    ChatBody,
    GenerateBody,
    OllamaBody,
    OllamaShape,
    moment,
    nanoseconds,
)
from powerinfer.serve.ollama_models import listed, running, shown
from powerinfer.serve.prompts import Room, check_texts, encode_texts
from powerinfer.serve.schema import MAX_INT, MAX_PROMPT_TOKENS, Body, Integral
from powerinfer.serve.served import ServedModel
from powerinfer.serve.service import Service
from powerinfer.serve.work import run_in_worker

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM

VERSION = "0.14.2"
"""Version of Ollama, whose API this is: clients refuse old ones."""

REFUSED = (
    ("POST", "/api/pull", "`powerinfer pull MODEL` downloads a model"),
    ("POST", "/api/push", "models are not published by this program"),
    ("POST", "/api/create", "`powerinfer serve -m NAME=MODEL` names a file, `--quantize` makes its weights smaller"),
    ("POST", "/api/blobs/{digest}", "files are copied into the folder of `powerinfer serve --models FOLDER`"),
    ("POST", "/api/copy", "`powerinfer serve -m NAME=MODEL` gives a model another name"),
    ("DELETE", "/api/delete", "`powerinfer rm MODEL` removes a model"),
)
"""Method, path and what to do instead."""


class ShowBody(Body):
    """The body of /api/show. name: what older clients call `model`; verbose: lists of the metadata, which are left
    out."""

    name: Annotated[str, Field(max_length=1024)] | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class EmbedBody(OllamaBody):
    """The body of /api/embed. truncate: false: a text that is too long is an error, else its beginning counts."""

    input: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPT_TOKENS)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0, le=MAX_INT), Integral] | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] * bool(self.input) if isinstance(self.input, str) else self.input


class EmbeddingsBody(OllamaBody):
    """The body of /api/embeddings, which /api/embed replaces."""

    prompt: str | None = None


def add_ollama(app: FastAPI, service: Service) -> None:
    """The routes."""
    _add_answers(app, service)
    _add_embeddings(app, service)
    _add_models(app, service)
    for method, path, instead in REFUSED:
        add_refusal(app, method, path, 501, instead)


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/api/chat")
    async def chat(body: ChatBody, request: Request) -> Response:
        began = time.perf_counter()
        if body.asks_nothing:
            return await _loaded(service, request, body, {"message": {"role": "assistant", "content": ""}})
        return await _answer(service, request, body, began, False)

    @app.post("/api/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        began = time.perf_counter()
        if body.asks_nothing:
            return await _loaded(service, request, body, {"response": ""})
        model = await service.use(body.model, request.state.leases)
        if not body.is_text(model.llm):
            return await _answer(service, request, body, began, True)
        loaded = time.perf_counter()
        body.check(model.llm.context)
        try:
            asked = await run_in_worker(request.state.size, body.to_completion, model.llm)
            params, prompts = await run_in_worker(request.state.size, params_and_prompts, model.llm, asked)
            params = replace(params, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        except Exception as error:
            raise refusal(model, error, OLLAMA_NAMES) from None
        shape = OllamaShape(began, loaded, True, *shape_of(model, request, asked))
        return await answer(model, request, asked, shape, prompts, params)


async def _answer(
    service: Service, request: Request, body: ChatBody | GenerateBody, began: float, generates: bool
) -> Response:
    model = await service.use(body.model, request.state.leases)
    loaded = time.perf_counter()
    body.check(model.llm.context)
    try:
        asked = await run_in_worker(request.state.size, body.to_chat, model.llm)
    except Exception as error:
        raise refusal(model, error, OLLAMA_NAMES) from None

    def shape(params: Any, *chat: Any) -> OllamaShape:
        return OllamaShape(began, loaded, generates, *chat)

    return await answer_chat(service, request, asked, shape, OLLAMA_NAMES)


async def _loaded(service: Service, request: Request, body: AnswerBody, empty: dict[str, Any]) -> Response:
    """The answer to a request for nothing, which is to load a model, or with keep_alive 0 to unload it."""
    reason = "unload" if body.ends else "load"
    if body.ends:
        await service.unload(service.find(body.model).name)
    else:
        model = await service.use(body.model, request.state.leases)
        body.check(model.llm.context)
    name = body.model or service.find(body.model).name
    return json_response({"model": name, "created_at": moment(), **empty, "done": True, "done_reason": reason})


# ---------------------------------------------------------------------------------------------------------- embeddings


def _add_embeddings(app: FastAPI, service: Service) -> None:
    @app.post("/api/embed")
    async def embed(body: EmbedBody, request: Request) -> Response:
        began = time.perf_counter()
        model = await _embedder(service, request, body)
        loaded, llm = time.perf_counter(), model.llm
        if (body.dimensions or 0) > llm.config.d_model:
            raise ApiError(400, f"dimensions must be at most the model's {llm.config.d_model}", param="dimensions")
        cuts = body.truncate is not False
        texts = await run_in_worker(request.state.size, _tokens, llm, body.texts, "input", cuts)
        vectors = await _vectors(model, request, texts, body.dimensions)
        return await run_in_threadpool(json_response, {
            "model": body.model or model.name,
            "embeddings": vectors,
            "total_duration": nanoseconds(time.perf_counter() - began),
            "load_duration": nanoseconds(loaded - began),
            "prompt_eval_count": sum(map(len, texts)),
        })  # fmt: skip

    @app.post("/api/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        model = await _embedder(service, request, body)
        prompts = [body.prompt] if body.prompt else []
        texts = await run_in_worker(request.state.size, _tokens, model.llm, prompts, "prompt", True)
        vectors = await _vectors(model, request, texts)
        return json_response({"embedding": vectors[0] if vectors else []})


async def _embedder(service: Service, request: Request, body: OllamaBody) -> ServedModel:
    model = await service.use(body.model, request.state.leases)
    body.check(model.llm.context)
    if model.llm.why_no_embeddings is not None:
        raise ApiError(400, model.llm.why_no_embeddings, param="model", code="no_embeddings")
    return model


def _tokens(llm: LLM, inputs: list[str], field: str, cuts: bool) -> list[list[int]]:
    """The tokens of each text. cuts: of one that is too long, those of its beginning. ApiError for what cannot be."""
    if len(inputs) > MAX_INPUTS:
        raise ApiError(400, f"{field} has {len(inputs)} texts: at most {MAX_INPUTS} at a time", param=field)
    if not cuts:
        texts = encode_texts(llm, inputs, param=field)
    else:
        begun = [llm.tokenizer.start_of(text, llm.context) for text in inputs]
        Room.counting(llm).check(llm, *begun, param=field)
        texts = [llm.tokenizer.encode(text)[: llm.context] for text in begun]
    check_texts(llm, texts)
    return texts


async def _vectors(
    model: ServedModel, request: Request, texts: list[list[int]], width: int | None = None
) -> list[list[float]]:
    request.state.facts["prompt_tokens"] = sum(map(len, texts))
    if not texts:
        return []
    vectors = await embedded(model, texts, request.state.salt)
    numbers: list[list[float]] = (shortened(vectors, width) if width else vectors).tolist()
    return numbers


# -------------------------------------------------------------------------------------------------------------- models


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/api/version")
    async def version() -> Response:
        return json_response({"version": VERSION, "powerinfer": __version__})

    @app.get("/api/tags")
    async def tags(request: Request) -> Response:
        await service.refresh()
        if service.only is not None and not service.only.ready:
            raise service.only.not_ready()
        models = [(name, service.find(name)) for name in service.names]
        rows = [partial(listed, model, _leased_engine(model, request), name) for name, model in models]
        return json_response({"models": await run_in_threadpool(lambda: [row() for row in rows])})

    @app.get("/api/ps")
    async def ps(request: Request) -> Response:
        loaded = [(model, llm) for model in service.models if (llm := _leased_engine(model, request)) is not None]
        rows = await run_in_threadpool(lambda: [running(*pair, service.keep_alive) for pair in loaded])
        return json_response({"models": rows})

    @app.post("/api/show")
    async def show(body: ShowBody, request: Request) -> Response:
        body.check_extra(frozenset(), {}, frozenset())
        model = service.find(body.model or body.name or None)
        try:
            return json_response(await run_in_threadpool(shown, model, _leased_engine(model, request)))
        except Exception as error:
            raise refusal(model, error) from None


def _leased_engine(model: ServedModel, request: Request) -> LLM | None:
    """The model's engine, until the request has ended; None: it is not loaded. That is no use of it."""
    if not model.ready:
        return None
    model.take(request.state.leases, counts=False)
    return model.llm
