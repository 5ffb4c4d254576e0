"""Ollama's /api/chat and /api/generate: their bodies as requests of this server, and answers as lines of JSON."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from powerinfer.runtime.params import MAX_TOP_LOGPROBS
from powerinfer.serve.api_error import OLLAMA_ROUTES, ApiError, not_supported
from powerinfer.serve.dialect import Block, BlockShape, Id, Strict, Tools, chat_request, function_call
from powerinfer.serve.llama_completion import CompletionBody, InfillBody, repetition_penalty
from powerinfer.serve.logs import log
from powerinfer.serve.schema import (
    MAX_CALLS,
    MAX_INT,
    MAX_MESSAGES,
    MAX_PARTS,
    Body,
    ChatRequest,
    Int,
    Integral,
    MinP,
    Neutral,
    Penalty,
    Repetition,
    Seed,
    Stops,
    Temperature,
    TokenIds,
    TopK,
    TopP,
    check_extra,
)
from powerinfer.serve.shapes import LOWEST_LOGPROB, Usage, encode_json

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM
    from powerinfer.runtime.request import StreamEvent
    from powerinfer.runtime.sampling import TokenLogprob

OPTIONS_IGNORED = frozenset(("num_keep", "mirostat_tau", "mirostat_eta", "penalize_newline"))
"""Options that do not change the answer: nothing is shifted out of the context, and there is no mirostat."""

OPTIONS_LOGGED = frozenset((
    "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock",
    "draft_num_predict",
))  # fmt: skip
"""Options of how a model is loaded and computed, which the flags of `serve` say."""

OPTIONS_NEUTRAL: Mapping[str, Neutral] = {
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "mirostat": (0,),
    **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), (False,)),
}

BODY_NEUTRAL: Mapping[str, Neutral] = {"shift": (False,), **dict.fromkeys(("width", "height", "steps"), (0,))}
BODY_LOGGED = frozenset(("shift",))

OLLAMA_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "json_schema": "format",
    "truncate_prompt_tokens": "truncate",
    "reasoning_budget": "think",
    "/v1/completions": "/api/generate",
}
"""Names of fields, by those of chats."""

ZERO = re.compile(r"[+-]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")  # of keep_alive


@lru_cache(256)
def _say_once(field: str, reason: str) -> None:
    """A line in the log, once: clients send these with every request."""
    log("warning", "a field has no effect", field=field, reason=reason)


class Options(Strict):
    """Options of sampling, by Ollama's names. num_predict: below 1: no limit but the context."""

    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT), Integral] | None = None
    num_ctx: Int | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Repetition | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_INT), Integral] | None = None
    seed: Seed | None = None
    stop: Stops | None = None

    def check(self, context: int) -> None:
        """ApiError for an option that this server does not have. context: of the model, in tokens."""
        extra = self.model_extra or {}
        check_extra(self, OPTIONS_IGNORED | OPTIONS_LOGGED, OPTIONS_NEUTRAL, frozenset(), "options.")
        for name in OPTIONS_LOGGED & extra.keys():
            _say_once(f"options.{name}", "the flags of serve say how a model is loaded")
        if self.num_ctx is not None and self.num_ctx > context:
            _say_once("options.num_ctx", f"the context has {context} tokens: serve --context sets it")

    def sampling(self, context: int) -> dict[str, Any]:
        """The same fields as chats and text completions have them. ApiError for a window of penalties."""
        same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
        return {name: getattr(self, name) for name in same} | {
            "max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None,
            "repetition_penalty": repetition_penalty(self.repeat_penalty, self.repeat_last_n, context),
        }


class OllamaBody(Body):
    """Fields that all bodies have."""

    options: Options | None = None
    keep_alive: Annotated[str, Field(max_length=64)] | float | None = None

    @property
    def ends(self) -> bool:
        """Whether keep_alive is 0: unload the model."""
        keep_alive = self.keep_alive
        return keep_alive == 0 or (isinstance(keep_alive, str) and ZERO.fullmatch(keep_alive.strip()) is not None)

    def check(self, context: int) -> None:
        """ApiError for a field that this server does not have."""
        self.check_extra(frozenset(), BODY_NEUTRAL, BODY_LOGGED)
        (self.options or Options()).check(context)
        if self.keep_alive is not None:
            _say_once("keep_alive", "serve --keep-alive is for all requests")


class AnswerBody(OllamaBody):
    """Fields that /api/chat and /api/generate share. think: also a degree, or the most tokens of a thought."""

    stream: bool | None = None
    format: Annotated[str, Field(max_length=64)] | dict[str, Any] | None = None
    think: bool | Annotated[int, Field(ge=1, le=MAX_INT)] | Annotated[str, Field(max_length=64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Integral] | None = None
    truncate: bool | None = None

    def check(self, context: int) -> None:
        super().check(context)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def response_format(self) -> dict[str, Any] | None:
        """`format` as chats have it. ApiError for what is none."""
        if isinstance(self.format, dict):
            return {"type": "json_schema", "json_schema": {"schema": self.format}}
        if self.format not in (None, "", "json"):
            raise ApiError(400, 'format must be "json" or a JSON schema', param="format")
        return {"type": "json_object"} if self.format else None

    def chat(self, llm: LLM, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> ChatRequest:
        """A chat with the body's fields. ApiError for what is wrong beyond types, or not supported."""
        budget = self.think if type(self.think) is int else None
        last = messages[-1]
        return chat_request(
            self,
            messages,
            OLLAMA_NAMES,
            OllamaChat,
            **(self.options or Options()).sampling(llm.context),
            stream=self.streams,
            response_format=self.response_format,
            tools=tools,
            think=self.think if budget is None else True,
            reasoning_budget=budget,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            truncate_prompt_tokens=-1 if self.truncate else None,
            continue_final_message=(last["role"] == "assistant" and not last.get("tool_calls")) or None,
            timings_per_token=True,
        )


class OllamaChat(ChatRequest):
    """A chat whose answer may be shorter than num_predict because the context ends."""

    ends_with_context: ClassVar[bool] = True


class CallFunction(Strict):
    """The function that was called."""

    name: Id
    arguments: dict[str, Any] | None = None


class Call(Strict):
    """An earlier call of a function."""

    id: Id | None = None
    function: CallFunction


class OllamaMessage(Strict):
    """A message of a conversation."""

    role: Annotated[str, Field(max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any], Field(max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_name: Id | None = None
    tool_call_id: Id | None = None


class ChatBody(AnswerBody):
    """The body of /api/chat. Without messages the model is loaded, or unloaded."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None

    @property
    def asks_nothing(self) -> bool:
        return not self.messages

    def to_chat(self, llm: LLM) -> ChatRequest:
        """The same as a chat. ApiError for what is wrong beyond types, or not supported."""
        return self.chat(llm, list(_messages(self.messages or ())), self.tools)


def _messages(sent: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Messages of a chat. Results belong to calls by an id there, and by a name or their order here."""
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    count = 0
    for at, message in enumerate(sent):
        path = f"messages[{at}]"
        message.refuse_extra(path, ())
        if message.images:
            raise not_supported(f"{path}.images", ": this model takes text")
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        calls = []
        for call in message.tool_calls or ():
            call.refuse_extra(f"{path}.tool_calls", ("type",))
            call.function.refuse_extra(f"{path}.tool_calls.function", ("index",))
            count += 1
            call_id = call.id or f"call_{count}"
            waiting.append((call_id, call.function.name))
            calls.append(function_call(call_id, call.function.name, call.function.arguments or {}))
        if calls:
            plain["tool_calls"] = calls
        if message.role == "tool":
            plain |= _result(message, waiting)
        yield plain


def _result(message: OllamaMessage, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """The call to which a result belongs, which is then no more among those that wait."""
    if message.tool_call_id is not None:
        waiting[:] = [call for call in waiting if call[0] != message.tool_call_id]
        return {"tool_call_id": message.tool_call_id}
    matching = [call for call in waiting if message.tool_name in (None, call[1])]
    if not matching:
        return {} if message.tool_name is None else {"name": message.tool_name}
    waiting.remove(matching[0])
    return {"tool_call_id": matching[0][0]}


class GenerateBody(AnswerBody):
    """The body of /api/generate. Without a prompt the model is loaded, or unloaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: TokenIds | None = None
    raw: bool | None = None
    images: Annotated[list[Any], Field(max_length=MAX_PARTS)] | None = None

    @property
    def asks_nothing(self) -> bool:
        return not self.prompt and not self.suffix

    def is_text(self, llm: LLM) -> bool:
        """Whether the prompt is continued as it is: not through the chat template."""
        return bool(self.raw or self.suffix) or llm.template is None

    def check(self, context: int) -> None:
        super().check(context)
        if self.images:
            raise not_supported("images", ": this model takes text")
        if self.context:
            raise not_supported("context", ": send the conversation as messages to /api/chat")
        if self.template:
            raise not_supported("template", ": send the whole prompt with raw: true")

    def to_chat(self, llm: LLM) -> ChatRequest:
        """The prompt as a chat. ApiError for what is wrong beyond types, or not supported."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat(llm, [*system, {"role": "user", "content": self.prompt or ""}])

    def to_completion(self, llm: LLM) -> CompletionBody:
        """The prompt as a text. ApiError for what is wrong beyond types, or not supported."""
        reason = "raw: true" if self.raw else "suffix" if self.suffix else "a model without a chat template"
        if self.system:
            raise not_supported("system", f" with {reason}: write it into the prompt")
        if self.think not in (None, False):
            raise not_supported("think", f" with {reason}")
        fields = {
            **(self.options or Options()).sampling(llm.context),
            "model": self.model,
            "stream": self.streams,
            "response_format": self.response_format,
            "timings_per_token": True,
        }
        values = {name: value for name, value in fields.items() if value is not None}
        if self.suffix:
            return InfillBody(input_prefix=self.prompt or "", input_suffix=self.suffix, **values)
        return CompletionBody(prompt=self.prompt, **values)


# ------------------------------------------------------------------------------------------------------------- answers


_LAST = 253402300799.0
"""The last second of the year 9999: file systems have later ones, a date has not."""


def moment(seconds: float | None = None) -> str:
    """A time as RFC 3339 has it. seconds: of the clock of `time.time`, None: now."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(min(max(0.0, seconds), _LAST), UTC)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


class OllamaShape(BlockShape):
    """Lines of JSON, the last one with the figures. began, loaded: when the request came and when its model was there,
    by the clock of `time.perf_counter`; generates: the answer is that of /api/generate."""

    media_type = "application/x-ndjson"

    def __init__(self, began: float, loaded: float, generates: bool, *chat: Any) -> None:
        super().__init__(*chat)
        self._began, self._loaded, self._generates = began, loaded, generates
        self._logprobs: list[dict[str, Any]] = []  # of tokens that no line had yet

    def ping(self) -> bytes:
        """An empty piece: there are no comments between lines of JSON."""
        return self._encoded(self._line())

    def observe(self, index: int, event: StreamEvent) -> None:
        super().observe(index, event)
        if event.logprobs is not None:
            top = [_token(one) for one in event.logprobs.top]
            self._logprobs.append({**_token(event.logprobs), "top_logprobs": top})

    def progress(self, index: int, event: StreamEvent) -> list[bytes]:
        lines = list(self._advance(event))
        if self._logprobs:
            lines = lines or [self._line()]
            lines[-1]["logprobs"], self._logprobs = self._logprobs, []
        return [self._encoded(line) for line in lines]

    def full_answer(self, choices: list[dict[str, Any]], usage: Usage, ids: Sequence[list[int]] = ()) -> dict[str, Any]:
        texts, thoughts = ("".join(block.text for block in self._blocks if block.name is None and
                                   block.reasoning == reasoning) for reasoning in (False, True))  # fmt: skip
        scores = {"logprobs": self._logprobs} if self._logprobs else {}
        return self._final(usage, texts, thoughts, list(filter(None, map(self._call, self._blocks)))) | scores

    def _encoded(self, event: dict[str, Any]) -> bytes:
        return encode_json(event) + b"\n"

    def _line(self, text: str = "", thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """A piece of the answer."""
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if self._generates:
            piece: dict[str, Any] = {"response": text, **more}
        else:
            more |= {"tool_calls": list(calls)} if calls else {}
            piece = {"message": {"role": "assistant", "content": text, **more}}
        return {"model": self._model, "created_at": moment(), **piece, "done": False}

    def _call(self, block: Block) -> dict[str, Any] | None:
        """A call; None: the block is none, or is cut off."""
        if block.name is None or not block.complete or block.arguments is None:
            return None
        number = sum(one.name is not None for one in self._blocks[: block.index])
        return {
            "id": block.call_id,
            "function": {"index": number, "name": block.name, "arguments": block.arguments},
        }

    def _begun(self, usage: Usage) -> list[dict[str, Any]]:
        return []

    def _opened(self, block: Block) -> Iterator[dict[str, Any]]:
        yield from ()

    def _grown(self, block: Block, text: str) -> Iterator[dict[str, Any]]:
        if block.name is None:
            yield self._line(thought=text) if block.reasoning else self._line(text)

    def _closed(self, block: Block) -> Iterator[dict[str, Any]]:
        if (call := self._call(block)) is not None:
            yield self._line(calls=[call])

    def _ended(self, usage: Usage) -> list[dict[str, Any]]:
        return [self._final(usage)]

    def _final(self, usage: Usage, *answer: Any) -> dict[str, Any]:
        times = self._timings[0].document()
        return self._line(*answer) | {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": nanoseconds(time.perf_counter() - self._began),
            "load_duration": nanoseconds(self._loaded - self._began),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": nanoseconds(times["prompt_ms"] / 1e3),
            "eval_count": usage.generated,
            "eval_duration": nanoseconds(times["predicted_ms"] / 1e3),
        }

    def _broken(self, error: ApiError) -> dict[str, Any]:
        return error.document(OLLAMA_ROUTES)


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LOWEST_LOGPROB), "bytes": list(token.bytes)}
