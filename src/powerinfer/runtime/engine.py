"""The Python API: `LLM`, a model that answers prompts and conversations."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.devices import Executor
from powerinfer.devices.states import tokens_to_undo
from powerinfer.errors import CLOSED, RequestError
from powerinfer.progress import Progress, silent
from powerinfer.runtime.draft_sources import join_head, load_with_drafts, smaller_model
from powerinfer.runtime.live import Live
from powerinfer.runtime.options import (
    EmbeddingOptions,
    EngineOptions,
    Message,
    Prompt,
    SamplingOptions,
    TemplateOptions,
    check_prompts,
    engine_config,
    several,
    template_variables,
    token_ids,
    told_names,
)
from powerinfer.runtime.params import SamplingParams, chat_params, check_each, check_params
from powerinfer.runtime.request import (
    AnswerRequest,
    Completion,
    EmbeddingRequest,
    Request,
    RunningRequest,
    StreamEvent,
)
from powerinfer.runtime.runner import SCORE_ROWS, Runner
from powerinfer.sparsity import Sparsity
from powerinfer.system import limited_threads
from powerinfer.text.chat import NO_TEMPLATE, encode_chat, plain_messages
from powerinfer.text.model_text import chat_template_of, sampling_defaults_of, tokenizer_of
from powerinfer.text.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.devices.disk import DiskTier
    from powerinfer.devices.trace import Trace
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.runtime.driver import EngineStats
    from powerinfer.runtime.runner import UseLogits
    from powerinfer.runtime.sampling import TokenMask
    from powerinfer.runtime.speculation import DraftSource
    from powerinfer.text.chat import ChatTemplate
    from powerinfer.text.tokenizer import Tokenizer

POLL = 0.1  # seconds between two calls of a stream's `progress`

SAMPLE = (
    "The sea was calm that morning, and the boats went out one after another. Nobody spoke of the storm; there were "
    "nets to mend, 24 baskets to fill, and a letter to answer before the post left at noon."
)
"""A text for measuring a model at load."""

Stream = Generator[StreamEvent, None, None]
"""An answer, token by token; closing it ends the request."""


def _to_stderr(line: str) -> None:
    """A line about a download, for those who open a model that is not there yet."""
    print(line, file=sys.stderr, flush=True)


class LLM:
    """A loaded model.

        with LLM() as llm:  # the default model; LLM("model.gguf", threads=4, context=8192)
            print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)
            print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)
            for event in llm.stream("Once upon a time"):
                print(event.text, end="", flush=True)

    `model` is a GGUF file, a Hugging Face folder, or a name that `powerinfer pull` knows; None is the default model.
    The keywords are the fields of `EngineConfig`, sizes as bytes or as texts such as "8GiB"; what is not given is
    chosen for the machine and the model.
    `progress(label, done, total)` is called while the model loads, `check(checkpoint)` before its weights are read; it
    may raise. `alone`: requests come one at a time, so `max_batch` is 1 where layers keep states that drafts undo, of
    which each request more takes memory.

    Raises RequestError (no such model, invalid option) or ModelError (a file that cannot be run).
    Thread-safe: concurrent requests are batched. After a fork the model can only be used in the process that loaded it.

    tokenizer: makes tokens of texts, and texts of tokens.
    template: the model's chat template; None if it has none.
    config: what the model is: its layers, widths and context.
    engine: how it runs, an `EngineConfig`.
    load_s: seconds that loading took.
    sampling: the model's own defaults.
    checkpoint: the model's files.
    notes: lines for the user about how the model was loaded.
    """

    tokenizer: Tokenizer
    config: ModelConfig
    engine: EngineConfig
    template: ChatTemplate | None
    sampling: SamplingDefaults
    load_s: float
    checkpoint: Checkpoint | None
    notes: list[str]

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        progress: Progress | None = None,
        check: Callable[[Checkpoint], object] | None = None,
        alone: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        begin = time.perf_counter()
        engine = engine_config(options)
        progress = progress or silent
        from powerinfer.formats.checkpoint import open_checkpoint
        from powerinfer.hub import pinned_at, recommended_sampling, resolve_model

        path = resolve_model(model, say=_to_stderr, progress=progress)
        checkpoint = open_checkpoint(
            path, quantize=engine.quantize, progress=progress, draft_head=engine.reads_draft_head
        )
        if check is not None:
            check(checkpoint)
        join_head(checkpoint, engine, progress)
        if alone and tokens_to_undo(engine, checkpoint.config):
            engine = replace(engine, max_batch=1)
        tokenizer = tokenizer_of(checkpoint)
        sampling = sampling_defaults_of(checkpoint)
        threads, line = limited_threads(engine.threads)
        engine, notes = replace(engine, threads=threads), checkpoint.notes + ([] if line is None else [line])
        notes.extend((*tokenizer.notes, *sampling.notes))
        template, pinned = chat_template_of(checkpoint), pinned_at(path)
        if template is not None and pinned is not None:
            template = template.with_variables(pinned.template)
        sampling = sampling if sampling.values else recommended_sampling(checkpoint.path)
        smaller = smaller_model(engine, checkpoint.config.context_length, progress)
        if smaller is not None:  # before weights are read
            smaller.check_vocabulary(tokenizer)
            notes.extend(filter(None, [smaller.size_note(checkpoint)]))
        loaded = load_with_drafts(
            checkpoint, engine, smaller, lambda: tokenizer.encode(SAMPLE), progress, notes
        )
        executor, sparsity, source = loaded
        try:
            load_s = time.perf_counter() - begin
            self._set_up(executor, tokenizer, checkpoint.config, engine, sparsity, load_s, source)
        except BaseException:
            if source is not None:
                source.close()
            executor.close()
            raise
        self.checkpoint = checkpoint
        self.template = template
        self.sampling = sampling
        self.notes = notes
        if engine.adjust:
            self._runner.when_idle(sparsity.adjust)

    @classmethod
    def from_parts(
        cls,
        executor: Executor,
        tokenizer: Tokenizer,
        config: ModelConfig,
        engine: EngineConfig | None = None,
        sparsity: Sparsity | None = None,
        source: DraftSource | None = None,
    ) -> LLM:
        """An LLM on an executor that is there already, without a chat template.

        sparsity: how its layers decode; None: densely. source: of drafts, None: there are none.
        """
        llm = cls.__new__(cls)
        llm._set_up(executor, tokenizer, config, engine or EngineConfig(), sparsity or Sparsity(), 0.0, source)
        return llm

    def _set_up(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        config: ModelConfig,
        engine: EngineConfig,
        sparsity: Sparsity,
        load_s: float,
        source: DraftSource | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.engine = engine
        self.template = None
        self.sampling = SamplingDefaults()
        self.load_s = load_s
        self.checkpoint = None
        self.notes = []
        self._sparsity = sparsity
        self._executor = executor
        longest = config.context_length
        self._runner = Runner(
            executor, tokenizer, engine.context or longest, engine, load_s, longest, source,
            drafts_alone=sparsity.drafts_alone,
        )  # fmt: skip

    def __repr__(self) -> str:
        described = [f"{name}={value!r}" for name, value in self._described().items()]
        return f"LLM({', '.join(described + ['closed'] * self._runner.closed)})"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in self._described().items())
        return f"<table>{''.join(rows)}</table>"

    def _described(self) -> dict[str, str | int]:
        """Description of the model and how it runs, for people."""
        checkpoint, choices = self.checkpoint, self._executor.choices
        named = [] if checkpoint is None else [checkpoint.path.name]
        size = f"{self.config.n_layers} layers"
        if checkpoint is not None:
            size = f"{checkpoint.parameters / 1e6:,.0f} M parameters, {checkpoint.quantisation}"
        gpu = None if choices.gpu is None else choices.gpu.value
        return {
            "model": self.config.name or next(iter(named), self.config.architecture),
            "size": size,
            "context": self.context,
            "threads": self.engine.threads if choices.threads is None else choices.threads.value,
            "selector": self._sparsity.selector if choices.selector is None else choices.selector.value,
            "placement": "CPU" if gpu is None else f"{gpu}, the rest on the CPU",
        }

    @property
    def context(self) -> int:
        """Maximum number of tokens of a prompt with its answer."""
        return self._runner.context

    @property
    def choices(self) -> dict[str, str]:
        """Choices for this machine (instruction set, threads, ...), with their reasons."""
        return self._executor.choices.texts()

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of weights read per decoded token; for a sparse model as measured so far; None if unknown."""
        return self._runner.ask(lambda: self._sparsity.bytes_per_token(self._executor.bytes_per_token))

    @property
    def sparsity(self) -> dict[str, Any] | None:
        """Ways of the layers, and statistics since the last clear (`Sparsity.report`); None for a dense model."""
        return self._runner.ask(self._sparsity.report)

    @property
    def streams_from(self) -> int | None:
        """The number of tokens of a step from which on a GPU computes what is in RAM, too; None: never."""
        return self._sparsity.streams_from

    def clear_sparsity(self) -> None:
        """Reset the counters of `sparsity` and `disk` and, for a sparse model, `bytes_per_token`."""
        self._runner.ask(self._sparsity.clear)
        if (tier := self._tier) is not None:
            self._runner.ask(tier.clear)

    @property
    def disk(self) -> dict[str, Any] | None:
        """Counts of reads from disk since the last clear (`DiskTier.report`); None where RAM holds the model."""
        tier = self._tier
        return None if tier is None else self._runner.ask(tier.report)

    @property
    def _tier(self) -> DiskTier | None:
        return getattr(self._executor, "disk", None)  # a model that was closed has none

    def default_params(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """`SamplingParams` with the model's own defaults for what is not given.

            llm.generate("Once upon a time", llm.default_params(seed=1))

        They apply wherever params are None; a SamplingParams is used exactly as it is.
        """
        return SamplingParams(**self.sampling.with_given(options))

    def stats(self) -> EngineStats:
        """Counts of the engine since the model was loaded, and what it is doing. Does not wait for a step."""
        return self._runner.stats()

    @property
    def drafts(self) -> str | None:
        """The source of drafts: "mtp", "eagle", "lookup" or "model"; None: the model decodes without."""
        return self._runner.drafts

    def running(self) -> list[RunningRequest]:
        """Progress of the running requests. Does not wait for a step."""
        return self._runner.running()

    def live(self) -> Live:
        """The neurons as they fire. One at a time, to be closed."""
        return Live(self._executor, self._sparsity, self.config, self._runner)

    def traced(self) -> AbstractContextManager[Trace]:
        """Trace the steps on GPU and CPU within this context; not while requests run.

        RequestError without a GPU, or if the model was closed.
        """
        return self._runner.enter(self._executor.traced)

    def every_neuron(self) -> AbstractContextManager[None]:
        """Decode densely within this context, as with selector `all`; not while requests run.

        RequestError if the model was closed.
        """
        return self._runner.enter(self._sparsity.suspended)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too, but means one prompt
        self, prompts: str, params: SamplingParams | None = None, progress: Progress | None = None
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]: ...

    @told_names
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
    ) -> Completion | list[Completion]:
        """Answer one prompt, or several together, in their order.

            llm.generate("The capital of France is").text
            [answer.text for answer in llm.generate(["One", "Two"], SamplingParams(temperature=0))]

        A prompt is text, in which special tokens are recognised, or token ids. `params` is one for all or one for each;
        None: `default_params`. An answer has 128 tokens at most unless `params` says otherwise: a text has no end by
        itself (`finish_reason` "length").
        `progress("answers", done, total)` is called as answers complete.
        """
        if isinstance(prompts, str):
            if isinstance(params, Sequence):
                raise RequestError("one prompt takes one SamplingParams")
            check_params(params)
            return self._complete([prompts], [params or self.default_params()], progress)[0]
        check_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params()] * len(prompts)
        check_each(params, len(prompts))
        return self._complete(prompts, params, progress)

    @told_names
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        mask: TokenMask | None = None,
        progress: Progress | None = None,
    ) -> Stream:
        """Answer a prompt token by token. Closing the iterator, or leaving its loop, ends the request.

            for event in llm.stream("Once upon a time"):
                print(event.text, end="", flush=True)

        mask: which tokens may follow; used by this answer alone. `progress("reading the prompt", done, total)` is
        called, in tokens, until the first event and before it.
        """
        check_params(params)
        request = self._runner.request(self.encode(prompt), params or self.default_params(), mask=mask)
        return self._follow(request, progress or silent)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Completion:
        """Answer a conversation through the model's chat template.

            llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text

        A content is a text, or OpenAI's list of parts {"type": "text", "text": ...}. `tools`, and the variables in
        `chat_template_kwargs` such as {"enable_thinking": False}, are given to the template. The answer ends where the
        model ends it, or with the context, unless `params` has a `max_tokens`.
        """
        check_params(params)
        tokens = self.encode_chat(messages, **template)
        return self._complete([tokens], [chat_params(params or self.default_params())], None)[0]

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **template: Unpack[TemplateOptions],
    ) -> Stream:
        """Answer a conversation token by token; arguments as of `chat`. Earlier turns are found in the prefix cache."""
        check_params(params)
        return self.stream(self.encode_chat(messages, **template), chat_params(params or self.default_params()))

    def embed(self, texts: str | Sequence[Prompt], progress: Progress | None = None) -> NDArray[np.float32]:
        """The embeddings of texts, float32 [n, d_model]: each the mean of its tokens' hidden states after the final
        norm, scaled to length 1.

        A text is one, or token ids; one text alone gives one row. `progress("embeddings", done, total)` is called as
        they complete. RequestError for a model that has none (`why_no_embeddings`).
        """
        requests = [self._embedding(text) for text in several(texts)]
        self._run(requests, "embeddings", progress)
        vectors = [request.embedding for request in requests if request.embedding is not None]
        return np.stack(vectors) if vectors else np.empty((0, self.config.d_model), np.float32)

    @property
    def why_no_embeddings(self) -> str | None:
        """Reason for which this model cannot embed texts; None if it can."""
        if self.config.embed_dim:
            return "this model projects its hidden states to another width before its head: it has no embeddings"
        return None

    def _embedding(self, prompt: Prompt, **options: Unpack[EmbeddingOptions]) -> EmbeddingRequest:
        if self.why_no_embeddings is not None:
            raise RequestError(self.why_no_embeddings)
        return self._runner.embedding(self.encode(prompt), **options)

    def prepare(self) -> None:
        """Build now what the first long text and the first grammar would build: while that lasts no other thread runs,
        and requests of a server are answered in threads."""
        self.tokenizer.prepare()
        self._runner.prepare()

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, ready to be answered. Special tokens in a text are recognised."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)

    def encode_chat(self, messages: Sequence[Message], **template: Unpack[TemplateOptions]) -> list[int]:
        """The token ids of a conversation, ready to be answered. Special tokens inside contents are plain text."""
        variables = template_variables(template)
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise RequestError(
                'messages must be a list of {"role": ..., "content": ...}; generate and stream take a plain text'
            )
        if self.template is None:
            raise RequestError(NO_TEMPLATE)
        return encode_chat(self.tokenizer, self.template, plain_messages(messages), **variables)

    def score(
        self, tokens: Sequence[int], first: int, use: Callable[[int, NDArray[np.float32]], None], step: int = SCORE_ROWS
    ) -> None:
        """Compute a text and pass its logits to `use(position, float32 [n, vocab])`, from position `first` on.

        From there on up to `step` tokens are computed per step; steps of 1 to 32 tokens are sparse, like decode. `use`
        is called on the model's thread, where it must not wait for an answer.
        """
        self._runner.score([tokens], [first], lambda _, at, logits: use(at, logits), step)

    def score_texts(
        self, texts: Sequence[Sequence[int]], firsts: Sequence[int], use: UseLogits, step: int = SCORE_ROWS
    ) -> None:
        """Score texts like `score`, with `use(text, position, logits)`; computed together, and once what they share.

        texts: token ids; firsts: of each the position from which its logits are wanted.
        """
        self._runner.score(texts, firsts, use, step)

    def close(self) -> None:
        """End running requests and free the model, its threads and its memory. What needs it says then that it was
        closed; the tokenizer, `choices` and `stats` can still be asked."""
        self._runner.close()

    def __enter__(self) -> LLM:
        if self._runner.closed:
            raise RequestError(CLOSED)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _complete(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], progress: Progress | None
    ) -> list[Completion]:
        """Answer prompts together."""
        runner = self._runner
        requests = [runner.request(self.encode(prompt), one) for prompt, one in zip(prompts, params, strict=True)]
        self._run(requests, "answers", progress)
        return [request.completion for request in requests if request.completion is not None]

    def _run(self, requests: Sequence[Request], label: str, progress: Progress | None) -> None:
        """Run requests together until all have ended. An error, which is raised, or Ctrl-C ends the others."""
        ended: SimpleQueue[Request] = SimpleQueue()
        for request in requests:
            request.deliver = partial(_ended, ended, request)
        try:
            self._runner.submit(requests)
            for done in range(1, len(requests) + 1):
                if ended.get().error is not None:
                    break
                if progress is not None:
                    progress(label, done, len(requests))
        finally:
            self._runner.abort(requests)
        for request in requests:
            if request.error is not None:
                raise request.error

    def _follow(self, request: AnswerRequest, progress: Progress) -> Stream:
        events: SimpleQueue[StreamEvent | None] = SimpleQueue()
        request.deliver, request.all_tokens = events.put, True
        try:
            self._runner.submit([request])
            event = _first(events, request, progress)
            while event is not None:
                yield event
                if event.finish_reason is not None:
                    return
                event = events.get()
            assert request.error is not None
            raise request.error
        finally:
            self._runner.abort([request])


def _ended(queue: SimpleQueue[Request], request: Request, event: StreamEvent | None) -> None:
    queue.put(request)


def _first(events: SimpleQueue[StreamEvent | None], request: Request, progress: Progress) -> StreamEvent | None:
    """The first event of a request; meanwhile the progress of its prompt."""
    while progress is not silent:
        with suppress(Empty):
            event = events.get(timeout=POLL)
            progress("reading the prompt", request.n_prompt, request.n_prompt)
            return event
        progress("reading the prompt", min(request.computed, request.n_prompt - 1), request.n_prompt)
    return events.get()
