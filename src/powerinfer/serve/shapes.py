"""Events of the engine as the objects of OpenAI's API: chat completions and text completions.

A shape turns each event into a `Delta`. A stream sends one chunk for each; a plain answer adds them up. What a stream
sends is the shape's, too, so that another API is another shape.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from powerinfer import __version__
from powerinfer.serve.timings import AnswerTimings
from powerinfer.text.tool_parser import AnswerDelta, AnswerFormat, AnswerParser, Reasoning, ToolDelta

if TYPE_CHECKING:
    from powerinfer.runtime.request import Completion, StreamEvent
    from powerinfer.runtime.sampling import TokenLogprob
    from powerinfer.serve.answers import Answers
    from powerinfer.serve.api_error import ApiError
    from powerinfer.text.tokenizer import StreamDecoder, Tokenizer

LOWEST_LOGPROB = -9999.0  # what OpenAI gives for minus infinity, which JSON does not have
DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"powerinfer-{__version__}"

Logprobs = dict[str, list[Any]]

encode_json = msgspec.json.Encoder().encode


def sent_event(document: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + encode_json(document) + b"\n\n"


class Delta(NamedTuple):
    """Addition of an event to an answer. reasoning: text before the answer, of a model that tells the two apart."""

    text: str
    logprobs: Logprobs | None
    finish_reason: str | None = None
    calls: tuple[ToolDelta, ...] = ()
    reasoning: str = ""


class Usage:
    """Numbers of tokens. The prompt of `n` answers counts once, as in OpenAI's API."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self.prompt = sum(map(len, prompts))
        self.generated = self.cached = 0

    def add(self, completion: Completion, first: bool) -> None:
        """first: it is the first answer to its prompt."""
        self.generated += completion.completion_tokens
        self.cached += completion.cached_tokens if first else 0

    def begun(self, event: StreamEvent | None) -> Usage:
        """Usage at the first event of the first answer."""
        usage = copy(self)
        usage.cached = event.cached_tokens if event is not None else 0
        return usage

    def document(self, reasoning: int | None = None) -> dict[str, Any]:
        """The API's usage object. reasoning: tokens of it, None: that is not known."""
        details = {} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **details,
        }


class AnswerShape(ABC):
    """One kind of answer. name: of the whole object; chunk_name: of a chunk of a stream."""

    name = chunk_name = prefix = ""
    media_type = "text/event-stream"  # of a stream
    reasoning_tokens: int | None = None  # so far; None: reasoning is not told apart
    shows_reasoning = True

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, include_usage: bool) -> None:
        self._id = self.prefix + request_id
        self._model = model
        self._created = int(time.time())
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._prompts: Sequence[list[int]] | None = None
        self._ids: dict[int, list[int]] = {}  # by answer: of tokens that no chunk had yet
        self._chunked: set[int] = set()  # answers that had a chunk
        self._timings: list[AnswerTimings] = []  # by answer, if they are wanted

    def show_ids(self, prompts: Sequence[list[int]]) -> None:
        """Return token ids, as vLLM does: of each answer's prompt, and of the tokens generated."""
        self._prompts = prompts

    def show_timings(self, prompts: Sequence[list[int]]) -> None:
        """Add llama-server's `timings` to every chunk with tokens and to the end; of several answers each its own."""
        self._timings = [AnswerTimings(len(prompt)) for prompt in prompts]

    def watch(self, events: Answers) -> Answers:
        """The events of the answers, of which a shape may end some earlier."""
        return events

    def observe(self, index: int, event: StreamEvent) -> None:
        """An event has come, before it becomes a delta."""
        if self._timings:
            self._timings[index].add(event)

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the first chunk of an answer; None: there is none."""

    @abstractmethod
    def delta(self, index: int, event: StreamEvent) -> Delta:
        """Addition of an event to answer `index`."""

    @abstractmethod
    def chunk_choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for a delta, one chunk each."""

    @abstractmethod
    def choice(self, index: int, text: str, logprobs: Logprobs | None, finish_reason: str) -> dict[str, Any]:
        """A whole answer."""

    def full_answer(self, choices: list[dict[str, Any]], usage: Usage, ids: Sequence[list[int]] = ()) -> dict[str, Any]:
        """The answer to a request without `stream`. ids: of the tokens of each answer."""
        if self._prompts is not None:
            for prompt, choice, own in zip(self._prompts, choices, ids, strict=True):
                choice |= {"prompt_token_ids": prompt, "token_ids": own}
        return self._with_usage(self._envelope(self.name, choices), usage)

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk of a stream."""
        document = self._envelope(self.chunk_name, [choice])
        return document | {"usage": None} if self._include_usage else document

    def last_chunk(self, usage: Usage) -> dict[str, Any] | None:
        """The chunk with the numbers of tokens, if it was asked for."""
        if not self._include_usage:
            return None
        return self._with_usage(self._envelope(self.chunk_name, []), usage)

    def _with_usage(self, document: dict[str, Any], usage: Usage) -> dict[str, Any]:
        document |= {"usage": usage.document(self.reasoning_tokens)}
        return document if len(self._timings) != 1 else document | {"timings": self._timings[0].document()}

    def begin(self, count: int, usage: Usage) -> list[bytes]:
        """The beginning of a stream of `count` answers."""
        openings = [self.opening(index) for index in range(count)]
        return [sent_event(self.chunk(opening)) for opening in openings if opening is not None]

    def ping(self) -> bytes:
        """Bytes that a stream sends while there is nothing else."""
        return b": ping\n\n"

    def progress(self, index: int, event: StreamEvent) -> list[bytes]:
        """Chunks that a stream sends for an event of answer `index`."""
        choices = self.chunk_choices(index, self.delta(index, event))
        if self._prompts is not None:
            ids = self._ids.setdefault(index, [])
            ids += [] if event.token_id is None else [event.token_id]
            if choices:
                self._ids[index] = []
                choices[0] |= {"token_ids": ids}
                if index not in self._chunked:
                    self._chunked.add(index)
                    choices[0] |= {"prompt_token_ids": self._prompts[index]}
        more = {"timings": self._timings[index].document()} if self._timings else {}
        return [sent_event(self.chunk(choice) | more) for choice in choices]

    def end(self, usage: Usage) -> list[bytes]:
        """The end of a stream."""
        last = self.last_chunk(usage)
        return [*([] if last is None else [sent_event(last)]), DONE]

    def failed(self, error: ApiError) -> list[bytes]:
        """The end of a stream that an error ends."""
        return [sent_event(error.document()), DONE]

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


class ChatShape(AnswerShape):
    """/v1/chat/completions. form: how the model writes calls and reasoning; None: its text is the answer."""

    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, include_usage: bool, form: AnswerFormat | None = None
    ) -> None:
        super().__init__(request_id, model, tokenizer, include_usage)
        self._form = form
        self._parsers: dict[int, AnswerParser] = {}  # by answer
        self._calls: dict[int, list[dict[str, Any]]] = {}
        self._reasoning: dict[int, str] = {}
        self.reasoning_tokens = 0 if form is not None and form.reasons else None

    def opening(self, index: int) -> dict[str, Any]:
        return self._part(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, event: StreamEvent) -> Delta:
        delta = Delta(event.text, None, event.finish_reason)
        if event.logprobs is not None and event.token_id is not None:
            token = _token(event.logprobs)
            token["top_logprobs"] = [_token(top) for top in event.logprobs.top]
            delta = delta._replace(logprobs={"content": [token]})
        return delta if self._form is None else self._parsed(index, delta, self._form)

    def _parsed(self, index: int, delta: Delta, form: AnswerFormat) -> Delta:
        """The delta with calls and reasoning taken out of its text."""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = form.parser()
        deltas = self._read(parser, delta.text, delta.finish_reason)
        calls = tuple(one for one in deltas if isinstance(one, ToolDelta))
        self._keep(index, calls)
        reasoning = "".join(one.text for one in deltas if isinstance(one, Reasoning))
        self._reasoning[index] = self._reasoning.get(index, "") + reasoning
        called = delta.finish_reason == "stop" and parser.calls
        return delta._replace(
            text="".join(one for one in deltas if isinstance(one, str)),
            finish_reason="tool_calls" if called else delta.finish_reason,
            calls=calls,
            reasoning=reasoning,
        )

    def _read(self, parser: AnswerParser, text: str, finish_reason: str | None) -> list[AnswerDelta]:
        """Deltas of a token, without reasoning that is not to be shown; a token of reasoning is counted."""
        within = parser.thinks
        deltas = pieces(parser, text, finish_reason)
        texts: list[AnswerDelta] = [one for one in deltas if not isinstance(one, Reasoning)]
        if self.reasoning_tokens is not None:
            self.reasoning_tokens += len(texts) < len(deltas) or (within and parser.thinks and finish_reason is None)
        return deltas if self.shows_reasoning else texts

    def _keep(self, index: int, calls: Sequence[ToolDelta]) -> None:
        entries = self._calls.setdefault(index, [])
        for call in calls:
            if call.name is not None:
                function = {"name": call.name, "arguments": ""}
                entries.append({"id": call.id, "type": "function", "function": function})
            entries[-1]["function"]["arguments"] += call.arguments

    def chunk_choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        choices = []
        if delta.reasoning:
            choices.append(self._part(index, {"reasoning_content": delta.reasoning}))
        if delta.text or delta.logprobs:
            choices.append(self._part(index, {"content": delta.text}, delta.logprobs))
        choices += [self._part(index, {"tool_calls": [_call_chunk(call)]}) for call in delta.calls]
        if delta.finish_reason is not None:
            choices.append({**self._part(index, {}), "finish_reason": delta.finish_reason})
        return choices

    def choice(self, index: int, text: str, logprobs: Logprobs | None, finish_reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls := self._calls.get(index):
            message |= {"content": text or None, "tool_calls": calls}
        if reasoning := self._reasoning.get(index):
            message["reasoning_content"] = reasoning
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    @staticmethod
    def _part(index: int, delta: dict[str, Any], logprobs: Logprobs | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LOWEST_LOGPROB), "bytes": list(token.bytes)}


def pieces(parser: AnswerParser, text: str, finish_reason: str | None) -> list[AnswerDelta]:
    """Text, reasoning and calls in a piece of an answer, in their order."""
    deltas = list(parser.push(text))
    return deltas if finish_reason is None else [*deltas, *parser.finish(cut=finish_reason == "length")]


def _call_chunk(call: ToolDelta) -> dict[str, Any]:
    """A piece of a call in a chunk of a stream."""
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


class Echo(NamedTuple):
    """A prompt that the answer begins with."""

    text: str
    logprobs: Logprobs | None


class TextShape(AnswerShape):
    """/v1/completions. echoes: by answer, the prompts that the answers begin with."""

    name = chunk_name = "text_completion"
    prefix = "cmpl-"

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, include_usage: bool, echoes: Sequence[Echo] = ()
    ) -> None:
        super().__init__(request_id, model, tokenizer, include_usage)
        self._echoes = echoes
        # Of the text so far, by answer: where a token's begins does not depend on when it is certain.
        self._lengths = {index: len(echo.text) for index, echo in enumerate(echoes)}
        self._decoders: dict[int, StreamDecoder] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self.choice(index, *self._echoes[index], None) if self._echoes else None

    def delta(self, index: int, event: StreamEvent) -> Delta:
        if event.logprobs is None or event.token_id is None:
            return Delta(event.text, None, event.finish_reason)
        at, decoder = self._lengths.get(index, 0), self._decoders.setdefault(index, self._tokenizer.stream())
        self._lengths[index] = at + len(decoder.push(event.token_id))
        return Delta(
            event.text, text_logprobs(self._tokenizer, event.token_id, event.logprobs, at), event.finish_reason
        )

    def chunk_choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        return [self.choice(index, *delta[:3])] if delta.text or delta.logprobs or delta.finish_reason else []

    def choice(self, index: int, text: str, logprobs: Logprobs | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def text_logprobs(tokenizer: Tokenizer, token: int, logprobs: TokenLogprob | None, offset: int) -> Logprobs:
    """A token's entry in the logprobs of a text completion; logprobs None: the first token of a prompt has none."""
    text = _name(tokenizer.token_bytes(token))
    if logprobs is None:
        return {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [offset]}
    top: dict[str, float] = {}
    for one in logprobs.top:  # of tokens with the same text, the likeliest
        top.setdefault(_name(one.bytes), max(one.logprob, LOWEST_LOGPROB))
    logprob = max(logprobs.logprob, LOWEST_LOGPROB)
    top[text] = logprob
    return {"tokens": [text], "token_logprobs": [logprob], "top_logprobs": [top], "text_offset": [offset]}


def _name(data: bytes) -> str:
    """A token as OpenAI names it here: its text, or the bytes of one that has no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def add_logprobs(total: Logprobs | None, more: Logprobs | None) -> Logprobs | None:
    """Both, in order; `total` is changed."""
    if total is None or more is None:
        return total or more
    for name, entries in more.items():
        total[name] += entries
    return total
