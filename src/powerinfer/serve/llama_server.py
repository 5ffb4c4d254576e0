"""llama-server's own routes, for its clients; what of them this server does not have is refused with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from powerinfer import __version__
from powerinfer.runtime.params import SamplingParams
from powerinfer.serve.api_error import NO_NAMES, ApiError, ContextError
from powerinfer.serve.app import answer, count_chat, embedded, json_response, refusal
from powerinfer.serve.constraints import constrained
from powerinfer.serve.llama_completion import (
    CompletionBody,
    CompletionShape,
    InfillBody,
    read_prompts,
    settings,
)
from powerinfer.serve.prompts import check_texts, read_biases
from powerinfer.serve.responses import RESPONSES_NAMES, ResponsesRequest
from powerinfer.serve.schema import MAX_PROMPT_TOKENS, Body, ChatRequest
from powerinfer.serve.served import ServedModel
from powerinfer.serve.service import Service
from powerinfer.serve.work import run_in_worker

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM
    from powerinfer.runtime.request import RunningRequest

REFUSED = (
    ("POST", "/props", 501, "properties are set at the start, by the flags of serve"),
    ("POST", "/slots/{slot}", 501, "slots are not saved or erased: the prefix cache keeps what prompts share"),
    ("POST", "/lora-adapters", 501, "there are no LoRA adapters: merge one into the model's file"),
    ("POST", "/rerank", 501, "models with a head that ranks are not among those that can be loaded"),
    ("POST", "/reranking", 501, "models with a head that ranks are not among those that can be loaded"),
    ("POST", "/v1/rerank", 501, "models with a head that ranks are not among those that can be loaded"),
    ("POST", "/v1/reranking", 501, "models with a head that ranks are not among those that can be loaded"),
    ("POST", "/v1/audio/transcriptions", 501, "models take text, no audio"),
    ("POST", "/v1/chat/completions/control", 501, "a running answer cannot be changed: close it and ask again"),
    ("GET", "/v1/stream", 501, "streams are not kept: an answer ends when its client leaves"),
    ("GET", "/cors-proxy", 403, "this server fetches nothing for others"),
    ("POST", "/cors-proxy", 403, "this server fetches nothing for others"),
    ("GET", "/tools", 403, "this server has no tools of its own"),
    ("POST", "/tools", 403, "this server has no tools of its own"),
)
"""Method, path, status and reason."""


class EmbeddingBody(Body):
    """The body of /embedding. input or content: as `prompt` of /completion."""

    input: str | dict[str, Any] | Annotated[list[Any], Field(max_length=MAX_PROMPT_TOKENS)] | None = None
    content: str | dict[str, Any] | Annotated[list[Any], Field(max_length=MAX_PROMPT_TOKENS)] | None = None


def add_llama_server(app: FastAPI, service: Service) -> None:
    """The routes."""
    _add_completions(app, service)
    _add_counts(app, service)
    _add_properties(app, service)
    for method, path, status, reason in REFUSED:
        add_refusal(app, method, path, status, reason)


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/completion")
    @app.post("/completions")
    async def completion(body: CompletionBody, request: Request) -> Response:
        return await _completed(await service.use(body.model, request.state.leases), request, body)

    @app.post("/infill")
    async def infill(body: InfillBody, request: Request) -> Response:
        return await _completed(await service.use(body.model, request.state.leases), request, body)

    @app.post("/embedding")
    @app.post("/embeddings")
    async def embedding(body: EmbeddingBody, request: Request) -> Response:
        model = await service.use(body.model, request.state.leases)
        llm = model.llm
        body.check_extra(neutral={"embd_normalize": (2,), "encoding_format": ("float",)})
        if llm.why_no_embeddings is not None:
            raise ApiError(400, llm.why_no_embeddings, param="model", code="no_embeddings")
        field = "content" if body.input is None else "input"
        texts = await run_in_worker(request.state.size, read_prompts, llm, getattr(body, field), field)
        check_texts(llm, texts)
        request.state.facts["prompt_tokens"] = sum(map(len, texts))
        vectors = await embedded(model, texts, request.state.salt)
        rows = [{"index": index, "embedding": [vector.tolist()]} for index, vector in enumerate(vectors)]
        return await run_in_threadpool(json_response, rows)


async def _completed(model: ServedModel, request: Request, body: CompletionBody) -> Response:
    try:
        params, prompts, shape = await run_in_worker(
            request.state.size, _prepared, model.llm, body, body.model or model.name
        )  # fmt: skip
    except Exception as error:
        raise model.refusal(error) or error from None
    return await answer(model, request, body, shape, prompts, params)


def _prepared(
    llm: LLM, body: CompletionBody, name: str
) -> tuple[SamplingParams, list[list[int]], CompletionShape]:  # fmt: skip
    """The parameters, the prompts, and what the answers look like. ApiError for what cannot be answered."""
    params, prompts = params_and_prompts(llm, body)
    if body.ends_early and len(prompts) * body.choices > 1:
        raise ApiError(400, "n_indent and t_max_predict_ms are for one answer", param="n_indent")
    return params, prompts, CompletionShape(body, params, prompts, llm.context, name, llm.tokenizer)


def params_and_prompts(llm: LLM, body: CompletionBody) -> tuple[SamplingParams, list[list[int]]]:
    """The parameters and the prompts of a completion. ApiError for what cannot be answered."""
    body.logit_bias = read_biases(llm, body)
    params = constrained(llm, body, body.to_params(llm.sampling, llm.context))
    if body.ignore_eos:  # llama-server's forbids the tokens that end an answer
        biases = dict.fromkeys(sorted(llm.tokenizer.eos_ids), -math.inf)
        params = replace(params, logit_bias={**params.logit_bias, **biases})
    prompts, ends = body.prompts(llm)
    params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, "the prompt is empty: it needs at least one token", param="prompt")
        if len(prompt) >= llm.context:
            raise ContextError(len(prompt), 0, llm.context)
    return params, prompts


def _add_counts(app: FastAPI, service: Service) -> None:
    async def counted(request: Request, chat: ChatRequest, names: Mapping[str, str] = NO_NAMES) -> Response:
        model = await service.use(chat.model, request.state.leases)
        try:
            tokens = await run_in_worker(request.state.size, count_chat, model.llm, chat, service.thinking)
        except Exception as error:
            raise refusal(model, error, names) from None
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    @app.post("/chat/completions/input_tokens")
    @app.post("/v1/chat/completions/input_tokens")
    async def chat_tokens(body: ChatRequest, request: Request) -> Response:
        body.check_extra()
        return await counted(request, body)

    @app.post("/responses/input_tokens")
    @app.post("/v1/responses/input_tokens")
    async def responses_tokens(body: ResponsesRequest, request: Request) -> Response:
        return await counted(request, await run_in_worker(request.state.size, body.to_chat), RESPONSES_NAMES)


def _add_properties(app: FastAPI, service: Service) -> None:
    @app.get("/props")
    async def props(request: Request, model: str | None = None) -> Response:
        return json_response(_properties(service.peek(model, request.state.leases)))

    @app.get("/slots")
    async def slots(request: Request, model: str | None = None, fail_on_no_slot: str | None = None) -> Response:
        llm = service.peek(model, request.state.leases).llm
        busy = {running.row: running for running in llm.running()}
        if fail_on_no_slot and len(busy) >= llm.engine.max_batch:
            raise ApiError(503, "no slot available: every one computes a request", code="no_slot")
        return json_response([_slot(llm, number, busy.get(number)) for number in range(llm.engine.max_batch)])

    @app.get("/lora-adapters")
    async def lora_adapters() -> Response:
        return json_response([])


def _properties(model: ServedModel) -> dict[str, Any]:
    llm = model.llm
    tokenizer, checkpoint, template = llm.tokenizer, llm.checkpoint, llm.template
    for_tools = {}
    if template is not None and template.tool_use is not None:
        for_tools["chat_template_tool_use"] = template.tool_use

    def text_of(token: int | None) -> str:
        return "" if token is None else tokenizer.token_text(token)

    return {
        "default_generation_settings": {"params": settings(llm.default_params(max_tokens=None)), "n_ctx": llm.context},
        "total_slots": llm.engine.max_batch,
        "model_alias": model.name,
        "model_path": "" if checkpoint is None else str(checkpoint.path),
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": "" if template is None else template.source,
        **for_tools,
        "bos_token": text_of(tokenizer.bos_id),
        "eos_token": text_of(tokenizer.eos_id),
        "build_info": f"powerinfer-{__version__}",
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


def _slot(llm: LLM, number: int, running: RunningRequest | None) -> dict[str, Any]:
    """A place of the batch, and what it computes, without texts."""
    drafts = llm.drafts is not None
    slot = {"id": number, "n_ctx": llm.context, "speculative": drafts, "is_processing": running is not None}
    if running is None:
        return slot
    computed = min(running.computed, running.prompt_tokens)
    return slot | {
        "n_prompt_tokens": running.prompt_tokens,
        "n_prompt_tokens_processed": max(0, computed - running.cached_tokens),
        "n_prompt_tokens_cache": running.cached_tokens,
        "params": {} if running.params is None else settings(running.params),
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": running.has_new_line,
                "n_remain": max(0, running.max_new - running.generated),
                "n_decoded": running.generated,
            }
        ],
    }


def add_refusal(app: FastAPI, method: str, path: str, status: int, reason: str) -> None:
    """A route that only says why it is not offered."""

    @app.api_route(path, methods=[method], include_in_schema=False)
    async def refused() -> Response:
        raise ApiError(status, f"{path.partition('/{')[0]} is not offered: {reason}", code="not_supported")
