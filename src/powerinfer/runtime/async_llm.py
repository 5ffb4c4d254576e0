"""The same model for asyncio: `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from powerinfer.errors import QueueFullError
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.options import (
    ChatOptions,
    EmbeddingOptions,
    EngineOptions,
    Message,
    Prompt,
    RequestOptions,
    TemplateOptions,
    check_names,
    several,
)
from powerinfer.runtime.params import SamplingParams, chat_params, check_params
from powerinfer.runtime.request import AnswerRequest, Completion, EmbeddingRequest, Request, StreamEvent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.progress import Progress

Prepare = Callable[[], AnswerRequest]
MAX_COMPILING = 16  # grammars, of one model, under way and waiting
_compilers = ThreadPoolExecutor(4, "compile")

AsyncStream = AsyncGenerator[StreamEvent, None]
"""An answer, token by token; closing it, or cancelling the task that reads it, ends the request."""


class AsyncLLM:
    """A loaded model, for asyncio.

        async with AsyncLLM() as llm:
            print((await llm.generate("The capital of France is", timeout=60)).text)
            async for event in llm.chat_stream([{"role": "user", "content": "Why is the sky blue?"}]):
                print(event.text, end="", flush=True)

    Arguments and errors as of `LLM`; the model is loaded in the calling thread. Every call takes, beside `params`:

    salt: requests with different salts share nothing of the prefix cache, and take turns when they wait.
    timeout, queue_timeout: seconds until the end of the answer, and until its start; RequestTimeoutError after that.
    mask: which tokens may follow; used by this answer alone.

    QueueFullError if `max_queue` requests wait already.
    """

    def __init__(
        self, model: str | Path | None = None, *, progress: Progress | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        self.llm = LLM(model, progress=progress, **options)
        self._mailbox: _Mailbox | None = None
        self._compiling = 0

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    def _repr_html_(self) -> str:
        return self.llm._repr_html_()

    @classmethod
    def from_llm(cls, llm: LLM) -> AsyncLLM:
        """An engine for a model that is loaded already; both can be used at the same time."""
        self = cls.__new__(cls)
        self.llm = llm
        self._mailbox = None
        self._compiling = 0
        return self

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Answer a prompt token by token. A prompt that cannot be answered raises its error at the first iteration."""
        return self._stream(self._request(prompt, params, options), params)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Answer a prompt."""
        return await self._complete(self._request(prompt, params, options), params)

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """Answer a conversation token by token, through the model's chat template."""
        return self._stream(self._chat_request(messages, params, options), params)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Completion:
        """Answer a conversation, through the model's chat template."""
        return await self._complete(self._chat_request(messages, params, options), params)

    async def embed(self, texts: str | Sequence[Prompt], **options: Unpack[EmbeddingOptions]) -> NDArray[np.float32]:
        """The embeddings of texts, float32 [n, d_model], as of `LLM.embed`; the options are for each of them.

        Only `max_batch` of them are with the engine at a time, so that one call does not fill its queue.
        """
        check_names(options, EmbeddingOptions.__annotations__, "AsyncLLM's embed")
        turns = asyncio.Semaphore(self.llm.engine.max_batch)

        async def embed_text(text: Prompt) -> NDArray[np.float32]:
            async with turns:
                request = await asyncio.to_thread(partial(self.llm._embedding, text, **options))
                return await self._embedded(request)

        tasks = [asyncio.create_task(embed_text(text)) for text in several(texts)]
        try:
            vectors = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return np.stack(vectors) if vectors else np.empty((0, self.llm.config.d_model), np.float32)

    async def close(self) -> None:
        """End running requests, as aborted, and free the model."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        self.llm.__enter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _request(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> Prepare:
        """Makes the request, in any thread. The arguments are checked here."""
        check_params(params)
        check_names(options, RequestOptions.__annotations__, "AsyncLLM's call")

        def prepare() -> AnswerRequest:
            return self.llm._runner.request(self.llm.encode(prompt), params or self.llm.default_params(), **options)

        return prepare

    def _chat_request(
        self, messages: Sequence[Message], params: SamplingParams | None, options: ChatOptions
    ) -> Prepare:
        check_params(params)
        check_names(options, ChatOptions.__annotations__, "AsyncLLM's chat")
        template = {name: value for name, value in options.items() if name in TemplateOptions.__annotations__}
        limits: Any = {name: value for name, value in options.items() if name not in template}

        def prepare() -> AnswerRequest:
            tokens = self.llm.encode_chat(messages, **template)  # type: ignore[arg-type]
            return self.llm._runner.request(tokens, chat_params(params or self.llm.default_params()), **limits)

        return prepare

    async def _prepared(self, prepare: Prepare, params: SamplingParams | None) -> AnswerRequest:
        """Prepare a request in threads: templates and tokenisers take long for long prompts, and some grammars do."""
        grammars = self.llm._runner._grammars
        if params is not None and params.rules is not None and not grammars.knows(params.rules):
            await self._compile(partial(grammars.mask, params.rules))
        return await asyncio.to_thread(prepare)

    async def _compile(self, compile_: Callable[[], object]) -> None:
        """Compile in threads of its own, so that slow grammars do not hold up the tokenisation of other requests."""
        if self._compiling >= MAX_COMPILING:
            raise QueueFullError(f"{MAX_COMPILING} grammars are being compiled already: try again later")
        self._compiling += 1
        try:
            await asyncio.get_running_loop().run_in_executor(_compilers, compile_)
        finally:
            self._compiling -= 1

    async def _stream(self, prepare: Prepare, params: SamplingParams | None) -> AsyncStream:
        request = await self._prepared(prepare, params)
        answer = self._answer(request)
        request.all_tokens = True
        try:
            self.llm._runner.submit([request])
            while (event := await answer.next()) is not None:
                yield event
                if event.finish_reason is not None:
                    return
            assert request.error is not None
            raise request.error
        finally:
            self.llm._runner.abort([request])

    async def _complete(self, prepare: Prepare, params: SamplingParams | None) -> Completion:
        request = await self._prepared(prepare, params)
        await self._ended(request)
        if request.completion is None:
            assert request.error is not None
            raise request.error
        return request.completion

    async def _embedded(self, request: EmbeddingRequest) -> NDArray[np.float32]:
        await self._ended(request)
        if request.embedding is None:
            assert request.error is not None
            raise request.error
        return request.embedding

    async def _ended(self, request: Request) -> None:
        """Submit a request and wait for its end; whoever stops waiting aborts it."""
        answer = self._answer(request)
        try:
            self.llm._runner.submit([request])
            await answer.next()
        finally:
            self.llm._runner.abort([request])

    def _answer(self, request: Request) -> _AnswerQueue:
        """Mailbox for the events of a request."""
        loop = asyncio.get_running_loop()
        mailbox = self._mailbox
        if mailbox is None or mailbox.loop is not loop:
            mailbox = self._mailbox = _Mailbox(loop)
        answer = _AnswerQueue(loop)
        request.deliver = partial(mailbox.put, answer)
        return answer


class _AnswerQueue:
    """The events of one request, on its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[StreamEvent | None] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def receive(self, event: StreamEvent | None) -> None:
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> StreamEvent | None:
        while not self._events:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._events.popleft()


class _Mailbox:
    """Brings events from the engine's thread to an event loop, with one wake-up for all that a step brings."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[tuple[_AnswerQueue, StreamEvent | None]] = deque()
        self._called = False  # the loop has been told, and has not read yet

    def put(self, answer: _AnswerQueue, event: StreamEvent | None) -> None:
        """Deliver on the engine's thread. RuntimeError if the loop was closed."""
        self._events.append((answer, event))
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:
                self._called = False
                self._events.clear()
                raise

    def _hand_out(self) -> None:
        self._called = False  # before reading: what comes from now on makes another call
        while self._events:
            answer, event = self._events.popleft()
            answer.receive(event)
