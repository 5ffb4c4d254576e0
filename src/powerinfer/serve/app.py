"""The routes of the API."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from powerinfer import __version__
from powerinfer.errors import RequestError
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.thinking import with_thoughts
from powerinfer.serve.answers import Answers, Job, Limits, answers
from powerinfer.serve.api_error import NO_NAMES, ApiError, error_document, headers_of, is_ollama, shutting_down
from powerinfer.serve.constraints import Tools, constrained, read_chat_tools, wrong_tool
from powerinfer.serve.embeddings import EmbeddingsRequest
from powerinfer.serve.live import LIVE
from powerinfer.serve.messages import MESSAGES_NAMES, CountRequest, MessagesRequest, MessagesShape
from powerinfer.serve.overview import OVERVIEW, overview_row
from powerinfer.serve.page import add_page
from powerinfer.serve.prompts import (
    Input,
    Room,
    check_fit,
    check_ids,
    check_texts,
    echoes_of,
    encode_chat,
    encode_texts,
    fitted_chat,
    read_biases,
    render,
)
from powerinfer.serve.responses import RESPONSES_NAMES, ResponsesRequest, ResponsesShape
from powerinfer.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    Sampling,
    TokenizeRequest,
)
from powerinfer.serve.served import ServedModel
from powerinfer.serve.service import Service
from powerinfer.serve.shapes import AnswerShape, ChatShape, Logprobs, TextShape, Usage, add_logprobs, encode_json
from powerinfer.serve.thinking import Defaults, ThinkingWishes
from powerinfer.serve.work import read_json, run_in_worker
from powerinfer.text.tool_parser import AnswerFormat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from powerinfer.runtime.engine import LLM

LAST_WORD_SECONDS = 1.0  # that a client may take for it
PING_SECONDS = 10.0  # without an event, after which a stream sends a comment, so that no proxy gives it up


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A document, written without pydantic."""
    return Response(encode_json(document), status, headers, "application/json")


class StrictRequest(Request):
    """A request whose JSON is read as `read_json` does. `state.size`: bytes of its body."""

    async def json(self) -> Any:
        body = await self.body()
        self.state.size = len(body)
        return await read_json(body)


class StrictRoute(APIRoute):
    """Parses bodies as `StrictRequest` does, and takes of web pages only application/json, not sent unasked."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if request.method == "POST":
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json" and not _is_from_program(request):
                    raise ApiError(415, "send the body as Content-Type: application/json")
                if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
                    raise ApiError(415, "send the body as it is, without Content-Encoding")
                return await handler(StrictRequest(_as_json(request.scope), request.receive))
            return await handler(request)

        return strict


def _is_from_program(request: Request) -> bool:
    """Whether a request to Ollama's API comes from a program: a web page states its origin, and curl a form's type."""
    return is_ollama(request.url.path) and "origin" not in request.headers


def _as_json(scope: Scope) -> Scope:
    headers = [header for header in scope["headers"] if header[0] != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


class EventStream(Response):
    """Events as they come. close: called however the response ends, even if it never began; broken_off: makes what
    the server sends last if it ends before the stream does."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        media_type: str,
        close: Callable[[], Coroutine[Any, Any, None]],
        broken_off: Callable[[], bytes] = bytes,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events, self._close, self._broken_off = events, close, broken_off

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except asyncio.CancelledError:  # the server ends, or the client has left, who takes no last word
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORD_SECONDS):
                        await send({"type": "http.response.body", "body": self._broken_off()})
                raise
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._close()


def build_app(service: Service) -> FastAPI:
    """The API over a service, without what `Gate` adds."""
    app = FastAPI(title="powerinfer", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = StrictRoute
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _internal_error)
    _add_answers(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    add_page(app)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/chat/completions")
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answer_chat(service, request, body, lambda params, *chat: ChatShape(*chat))

    @app.post("/responses")
    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        chat, shape = await _as_chat(request, body), partial(ResponsesShape, body)
        return await answer_chat(service, request, chat, shape, RESPONSES_NAMES)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await answer_chat(service, request, await _as_chat(request, body), MessagesShape, MESSAGES_NAMES)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        model = await service.use(body.model, request.state.leases)
        llm = model.llm

        def prepared() -> tuple[SamplingParams, list[Input], list[list[int]]]:
            body.logit_bias = read_biases(llm, body)
            params, texts = constrained(llm, body, body.to_params(llm.sampling)), body.prompts()
            wanted = params.max_tokens or 1 if body.generates else 0
            prompts = encode_texts(llm, texts, body.truncate_prompt_tokens, wanted)
            check_fit(llm, prompts, params if body.generates else None)
            return params, texts, prompts

        try:
            params, texts, prompts = await run_in_worker(request.state.size, prepared)
            echoes = await echoes_of(llm, body, texts, prompts)
        except Exception as error:
            raise refusal(model, error) from None
        shape = TextShape(*shape_of(model, request, body), echoes)
        return await answer(model, request, body, shape, prompts, params if body.generates else None)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        model = await service.use(body.model, request.state.leases)
        llm = model.llm
        if llm.why_no_embeddings is not None:
            raise ApiError(400, llm.why_no_embeddings, param="model", code="no_embeddings")

        def prepared() -> list[list[int]]:
            inputs = body.texts(llm.config.d_model)
            texts = encode_texts(llm, inputs, body.truncate_prompt_tokens, param="input")
            check_texts(llm, texts)
            return texts

        texts = await run_in_worker(request.state.size, prepared)
        count = request.state.facts["prompt_tokens"] = sum(map(len, texts))
        vectors = await embedded(model, texts, request.state.salt)
        name = body.model or model.name
        return await run_in_threadpool(lambda: json_response(body.answer(name, vectors, count)))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> Response:
        chat = await _as_chat(request, body)
        model = await service.use(chat.model, request.state.leases)
        count = partial(count_chat, model.llm, chat, service.thinking)
        try:
            return json_response({"input_tokens": await run_in_worker(request.state.size, count)})
        except Exception as error:
            raise refusal(model, error, MESSAGES_NAMES) from None

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        llm = (await service.use(body.model, request.state.leases)).llm
        text, special = body.text(), body.parse_special is not False

        def tokenized() -> Response:
            Room.counting(llm).check(llm, text, param="content")
            tokens = llm.tokenizer.encode(text, special=special, add_bos=None if body.adds else False)
            shown: Any = tokens
            if body.with_pieces:
                shown = [{"id": token, "piece": _piece(llm.tokenizer.token_bytes(token))} for token in tokens]
            return json_response({"tokens": shown, "count": len(tokens), "max_model_len": llm.context})

        return await run_in_worker(request.state.size, tokenized)

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request, model: str | None = None) -> Response:
        llm = service.peek(model, request.state.leases).llm  # a page of another origin may ask: it must load nothing
        tokenizer, template = llm.tokenizer, llm.template
        return json_response(
            {
                "bos_token": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
                "eos_token": None if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
                "add_bos_token": tokenizer.add_bos,
                "chat_template": None if template is None else template.source,
                "model_max_length": llm.context,
            }
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        llm = (await service.use(body.model, request.state.leases)).llm
        body.check_extra()
        check_ids(llm, body.tokens, "tokens")
        text = await run_in_worker(request.state.size, llm.tokenizer.decode, body.tokens, skip_special=False)
        return json_response({"content": text, "prompt": text})

    @app.post("/apply-template")
    async def apply_template(body: ChatRequest, request: Request) -> Response:
        model = await service.use(body.model, request.state.leases)
        body.check_extra()

        def rendered() -> str:
            body.take_defaults(service.thinking)
            return render(model.llm, body, read_chat_tools(model.llm, body))

        try:
            return json_response({"prompt": await run_in_worker(request.state.size, rendered)})
        except Exception as error:
            raise model.refusal(error) or error from None


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes if these are no text on their own, as in llama-server."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> Response:
        status = 200 if service.status == "ok" else 503
        return json_response(service.health(), status, headers_of(status))

    @app.get("/models")
    @app.get("/v1/models")
    async def models() -> Response:
        await service.refresh()
        return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})

    @app.post("/models/load")
    async def load(body: ModelRequest) -> Response:
        await service.preload(body.model)
        return json_response({"success": True})

    @app.post("/models/unload")
    async def unload(body: ModelRequest) -> Response:
        await service.unload(body.model)
        return json_response({"success": True})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        return json_response(_model(service, model_id))

    @app.get("/v1/engine")
    async def engine(request: Request, model: str | None = None) -> Response:
        if model is None and service.only is None:
            models = [{"name": one.name, "status": one.status, "loads": one.loads} for one in service.models]
            return json_response({"version": __version__, "models": models})
        return json_response(await run_in_threadpool(_describe, service.peek(model, request.state.leases)))

    @app.get(OVERVIEW)
    async def overview() -> Response:
        await service.refresh()
        return json_response({"object": "list", "data": [overview_row(model) for model in service.models]})

    @app.get(LIVE)
    async def live(request: Request, model: str | None = None) -> Response:
        served = service.peek(model, request.state.leases)
        return json_response(await run_in_threadpool(served.view.frame, served.llm))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


# ---------------------------------------------------------------- answers


def shape_of(model: ServedModel, request: Request, body: Sampling) -> tuple[str, str, Any, bool]:
    return request.state.request_id, body.model or model.name, model.llm.tokenizer, body.include_usage


async def _as_chat(request: Request, body: ResponsesRequest | CountRequest) -> ChatRequest:
    """The chat that a body of another API asks for."""
    return await run_in_worker(request.state.size, body.to_chat)


def count_chat(llm: LLM, chat: ChatRequest, defaults: Defaults) -> int:
    """The tokens of a conversation's prompt. defaults: of thinking, on which prompts may depend."""
    chat.take_defaults(defaults)
    return len(encode_chat(llm, chat, read_chat_tools(llm, chat))[0])


def refusal(model: ServedModel, error: Exception, names: Mapping[str, str] = NO_NAMES) -> Exception:
    """An error as the API tells it. names: of an API's fields that are called otherwise in OpenAI's chats."""
    refused = model.refusal(error)
    return error if refused is None else refused.renamed(names)


async def answer_chat(
    service: Service,
    request: Request,
    body: ChatRequest,
    shape: Callable[..., AnswerShape],
    names: Mapping[str, str] = NO_NAMES,
) -> Response:
    """The answer to a conversation. shape: makes one of the parameters and of `ChatShape`'s arguments; names: as of
    `refusal`."""
    model = await service.use(body.model, request.state.leases)
    llm = model.llm

    def prepared() -> tuple[ThinkingWishes, Tools, AnswerFormat | None, SamplingParams, list[int], int]:
        body.take_defaults(service.thinking)
        asked = body.asked_thinking()
        tools = read_chat_tools(llm, body)
        body.logit_bias = read_biases(llm, body)
        params = constrained(llm, body, body.to_params(llm.sampling), tools)
        fitting = replace(params, max_tokens=None) if body.ends_with_context else params
        tokens, dropped = fitted_chat(llm, body, tools, fitting)
        params, form = with_thoughts(llm, asked.thinking, params, tools.reads, tokens, asked.separate, body.begun)
        return asked, tools, form, params, tokens, dropped

    try:
        asked, tools, form, params, tokens, dropped = await run_in_worker(request.state.size, prepared)
    except Exception as error:
        raise refusal(model, error, names) from None
    if dropped:
        request.state.facts["dropped_turns"] = dropped
    answer_shape = shape(params, *shape_of(model, request, body), form)
    answer_shape.shows_reasoning = asked.shows
    try:
        return await answer(model, request, body, answer_shape, [tokens], params)
    except ApiError as error:  # the grammar of all functions says neither which one is wrong, nor where
        if error.status_code != 400 or params.rules is None:
            raise
        wrong = await run_in_worker(request.state.size, wrong_tool, tools.tools)
        names_of_functions = {"Lark grammar": "grammar of the functions"} if tools.form is not None else {}
        raise (wrong or error).renamed({**names, **names_of_functions}) from None


async def embedded(model: ServedModel, texts: list[list[int]], salt: bytes) -> NDArray[np.float32]:
    """The embeddings of checked texts. ApiError if there are none now."""
    begin = time.perf_counter()
    try:
        return await model.engine.embed(texts, salt=salt, timeout=model.timeout, queue_timeout=model.queue_timeout)
    except Exception as error:
        if type(error) is RequestError:  # the texts are fine: there is no engine any more
            raise ApiError(503, "the server is shutting down", code="aborted") from None
        raise model.refusal(error, time.perf_counter() - begin) or error from None


async def answer(
    model: ServedModel,
    request: Request,
    body: Sampling,
    shape: AnswerShape,
    prompts: list[list[int]],
    params: SamplingParams | None,
) -> Response:
    """A stream or a whole answer. params None: the answer is the prompt alone."""
    usage = Usage(prompts)
    if body.return_token_ids:
        shape.show_ids([prompt for prompt in prompts for _ in range(body.choices)])
    jobs = [
        Job(prompt, _nth(_fitted(params, model.llm.context - len(prompt)), n))
        for prompt in prompts
        for n in range(body.choices)
        if params is not None
    ]
    limits = Limits(
        model.timeout, model.queue_timeout, request.state.salt, model.llm.engine.max_batch, model.name
    )  # fmt: skip
    if body.timings_per_token:
        shape.show_timings([job.prompt for job in jobs])
    events = shape.watch(answers(model.engine, jobs, limits, model.metrics, PING_SECONDS))
    run = _Run(model, shape, events, usage, body.choices, len(prompts) * body.choices, request.state.facts)
    try:
        if not body.stream:
            return json_response(await run.full_answer())
        await run.begin()  # a refusal has a status of its own only before the stream begins
    except BaseException:
        await events.aclose()
        raise
    return EventStream(run.stream(), shape.media_type, run.close, lambda: b"".join(shape.failed(shutting_down())))


def _fitted(params: SamplingParams, room: int) -> SamplingParams:
    """The parameters of an answer for which the context has that much room."""
    limit = params.max_tokens
    return params if limit is None or limit <= room else replace(params, max_tokens=max(1, room))


def _nth(params: SamplingParams, n: int) -> SamplingParams:
    """The parameters of the nth answer to a prompt: a seed gives each its own."""
    return params if n == 0 or params.seed is None else replace(params, seed=params.seed + n)


class _Run:
    """Answers under way: events in, an object or the chunks of a stream out."""

    def __init__(
        self,
        model: ServedModel,
        shape: AnswerShape,
        events: Answers,
        usage: Usage,
        n: int,
        count: int,
        facts: dict[str, Any],
    ) -> None:
        self._model, self._shape, self._usage, self._n, self._count = model, shape, usage, n, count
        self._facts = facts
        self._begin = time.perf_counter()
        self._events = self._read(events)
        self._first: Any = None

    async def _read(self, events: Answers) -> Answers:
        """The events, counted, and with errors as the API tells them."""
        generated = 0
        try:
            async with aclosing(events):
                async for item in events:
                    if item is not None:
                        self._shape.observe(*item)
                        generated += item[1].token_id is not None
                        if item[1].completion is not None:
                            self._usage.add(item[1].completion, first=item[0] % self._n == 0)
                    yield item
        except Exception as error:
            raise self._model.refusal(error, time.perf_counter() - self._begin) or error from None
        finally:
            self._facts |= {"prompt_tokens": self._usage.prompt, "completion_tokens": generated}

    async def full_answer(self) -> dict[str, Any]:
        """The object of a request without `stream`."""
        texts: list[list[str]] = [[] for _ in range(self._count)]
        logprobs: list[Logprobs | None] = [None] * self._count
        reasons = ["length"] * self._count
        ids: list[list[int]] = [[] for _ in range(self._count)]
        for index in range(self._count):
            opening = self._shape.opening(index)
            texts[index].append((opening or {}).get("text", ""))
            logprobs[index] = (opening or {}).get("logprobs")
        async with aclosing(self._events) as events:
            async for item in events:
                if item is None:
                    continue
                index, event = item
                delta = self._shape.delta(index, event)
                texts[index].append(delta.text)
                ids[index] += [] if event.token_id is None else [event.token_id]
                logprobs[index] = add_logprobs(logprobs[index], delta.logprobs)
                reasons[index] = delta.finish_reason or reasons[index]
        parts = zip(texts, logprobs, reasons, strict=True)
        choices = [
            self._shape.choice(index, "".join(text), scores, reason)
            for index, (text, scores, reason) in enumerate(parts)
        ]
        return self._shape.full_answer(choices, self._usage, ids)

    async def close(self) -> None:
        """End what is still computed."""
        await self._events.aclose()

    async def begin(self) -> None:
        """Wait for the first event, or for as long as a client is left without any. ApiError if there will be none."""
        self._first = await anext(self._events, None)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The chunks, after `begin`."""
        for event in self._shape.begin(self._count, self._usage.begun(self._first and self._first[1])):
            yield event
        item = self._first
        try:
            while True:
                for event in [self._shape.ping()] if item is None else self._shape.progress(*item):
                    yield event
                item = await anext(self._events)
        except StopAsyncIteration:
            last = self._shape.end(self._usage)
        except ApiError as error:
            last = self._shape.failed(error)
        for event in last:
            yield event


# ---------------------------------------------------------------- the server itself


def _model(service: Service, name: str) -> dict[str, Any]:
    """A row of /v1/models, with llama-server's status. max_model_len: null for one that is not loaded."""
    model = service.find(name)
    if service.only is not None and not model.ready:
        raise model.not_ready()
    reason = {} if model.failure is None else {"reason": str(model.failure)}
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "powerinfer",
        "max_model_len": model.llm.context if model.ready else None,
        "status": {"value": "loaded" if model.ready else model.status} | reason,
    }


def _describe(model: ServedModel) -> dict[str, Any]:
    """/v1/engine: what runs, where it is placed and why, and what its sparse layers do."""
    llm = model.llm
    config = llm.config
    return {
        "version": __version__,
        "process": os.getpid(),
        "model": {
            "names": model.source.names,
            "name": config.name,
            "architecture": config.architecture,
            "layers": config.n_layers,
            "neurons": config.n_neurons,
            "vocabulary": config.vocab_size,
            "context": llm.context,
            "bytes": llm.checkpoint.file_bytes if llm.checkpoint else None,
        },
        "options": asdict(llm.engine),
        "choices": llm.choices,
        "load_s": llm.load_s,
        "bytes_per_token": llm.bytes_per_token,
        "sparsity": llm.sparsity,
        "disk": llm.disk,
        "stats": asdict(llm.stats()),
    }


def _no_route(request: Request) -> str:
    """The message for a path that there is not: what a client of a wrong base URL asks for."""
    path = request.url.path
    message = f"no route {path[:128]}"
    paths = {getattr(route, "path", "") for route in request.app.routes}
    right = f"/v1{path}" if not path.startswith("/v1/") else path.removeprefix("/v1")
    return f"{message}; did you mean {right}?" if right in paths else message


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        headers = dict(error.headers or {})
        right = f": use {headers['Allow']}" if "Allow" in headers else ""
        messages = {404: _no_route(request), 405: f"{request.method} is not allowed here{right}"}
        message = messages.get(error.status_code, str(error.detail))
        document = error_document(error.status_code, message, path=request.url.path)
        return json_response(document, error.status_code, headers)
    return json_response(error.document(request.url.path), error.status_code, dict(error.headers or {}))


async def _validation_error(request: Request, error: Exception) -> Response:
    """The first field that is wrong, without the value, which may be long."""
    assert isinstance(error, RequestValidationError)
    field, message = _wrong(error.errors())
    return json_response(error_document(400, f"{field}: {message}", field, "invalid_value", request.url.path), 400)


_KINDS = ("str", "int", "float", "bool")


def _wrong(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(field, what is wrong with it). A field that may be of several kinds has errors for each of them, with the kind
    in the place of a name: of these those count that lie deepest, then those about a value, not about its kind."""
    field = _field(errors[0])[:1]
    meant = [error for error in errors if _field(error)[:1] == field]
    deepest = max(len(_field(error)) for error in meant)
    meant = [error for error in meant if len(_field(error)) == deepest]
    meant = [error for error in meant if not error["type"].endswith("_type")] or meant
    # Each kind stops at its first error: the one that gets furthest in a list is the one that is meant.
    field = max(map(_field, meant), key=lambda names: [int(name) for name in names if name.isdigit()])
    messages = list(dict.fromkeys(str(error["msg"]) for error in meant if _field(error) == field))
    return ".".join(field)[:256] or "body", _joined(messages)


def _field(error: Mapping[str, Any]) -> list[str]:
    """The names and places in lists that lead to the field of an error; [] for the whole text."""
    parts = error["loc"][1:] if error["loc"][:1] in (("body",), ("query",)) else error["loc"]
    names = [part for part in parts if str(part).isdigit() or (part.isidentifier() and part not in _KINDS)]
    return [str(name)[:64] for name in names] if names and type(names[0]) is str else []


def _joined(messages: Sequence[str]) -> str:
    """The first message, or all of them as one where each says what the input should be."""
    begin = "Input should be "
    if len(messages) > 1 and all(message.startswith(begin) for message in messages):
        return begin + ", or ".join(message.removeprefix(begin) for message in messages)
    return messages[0]


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer for the client; the error itself goes on to the gate, which logs it."""
    message = "internal error: the log has the cause"
    return json_response(error_document(500, message, path=request.url.path), 500)
