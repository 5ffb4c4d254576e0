"""Common parts of the APIs beside OpenAI's chat completions: /v1/responses, /v1/messages and Ollama's.

A body of theirs becomes a `ChatRequest`, and is answered as one. An answer is a list of blocks: texts, reasoning and
calls in the order in which the model writes them. `BlockShape` builds them; its subclasses write them as their API
does.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from powerinfer.serve.api_error import ApiError, not_supported
from powerinfer.serve.schema import MAX_PARTS, MAX_TEMPLATE_OPTIONS, Body, ChatRequest, Seed, Temperature, TopK, TopP
from powerinfer.serve.shapes import ChatShape, Delta, Logprobs, Usage, encode_json
from powerinfer.text.tool_parser import AnswerDelta, AnswerFormat, Reasoning, ToolDelta
from powerinfer.text.tools import MAX_TOOLS

if TYPE_CHECKING:
    from powerinfer.runtime.request import StreamEvent
    from powerinfer.text.tokenizer import Tokenizer

Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]
Id = Annotated[str, Field(max_length=256)]


class Strict(BaseModel):
    """A part of a body; fields that it does not list are kept, to be refused by name."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def refuse_extra(self, path: str, ignored: Sequence[str]) -> None:
        """ApiError for a field that is neither listed nor ignored, unless it holds nothing."""
        for name, value in (self.model_extra or {}).items():
            if name not in ignored and value not in (None, [], {}):
                raise not_supported(f"{path}.{name[:64]}")


class TextPart(Strict):
    """A part of a content."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = None


Content = str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class DialectBody(Body):
    """Fields of both bodies. seed and chat_template_kwargs: of this server, as in /v1/chat/completions."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stream: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_OPTIONS)] | None = None


def chat_request(
    body: Body,
    messages: list[dict[str, Any]],
    names: Mapping[str, str],
    kind: type[ChatRequest] = ChatRequest,
    **fields: Any,
) -> ChatRequest:
    """The chat that a body asks for. RequestValidationError for what no chat may have. names: of the body's fields, by
    those of the chat, where they differ."""
    same = ("model", "temperature", "top_p", "top_k", "seed", "stream", "chat_template_kwargs")
    values = {name: getattr(body, name, None) for name in same} | fields
    try:
        return kind.model_validate({"messages": messages, **{k: v for k, v in values.items() if v is not None}})
    except ValidationError as error:
        errors = error.errors()
        for one in errors:
            one["loc"] = (names.get(str(one["loc"][0]), one["loc"][0]), *one["loc"][1:])
        raise RequestValidationError(errors) from None


def text_of(content: Content, kinds: Sequence[str], path: str, ignored: Sequence[str]) -> str:
    """A content as one text: parts are joined by line breaks. ApiError for a part that is no text."""
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        part_path = f"{path}[{at}]"
        if part.type not in kinds:
            raise not_supported(f"{part_path}.type {part.type!r}", f": it may be {' or '.join(kinds)}")
        part.refuse_extra(part_path, ignored)
        texts.append(needed(part.refusal if part.type == "refusal" else part.text, f"{part_path}.text"))
    return "\n".join(texts)


def needed(value: Any, path: str) -> Any:
    """A field's value; ApiError if it is missing."""
    if value is None:
        raise ApiError(400, f"{path} is missing", param=path)
    return value


def function_tool(tool: Mapping[str, Any], parameters: str, at: int, ignored: Sequence[str]) -> dict[str, Any]:
    """A function of `tools` as /v1/chat/completions has it. parameters: the name of its schema. ApiError for others."""
    types = {"name": str, "description": str, parameters: dict, "strict": bool}
    for name, value in tool.items():
        if name in ("type", *ignored) or value in (None, [], {}, False):
            continue
        if name not in types:
            hint = f": write name, description and {parameters} beside type" if name == "function" else ""
            raise not_supported(f"tools[{at}].{name[:64]}", hint)
        if not isinstance(value, types[name]):
            raise ApiError(400, f"tools[{at}].{name} is not valid", param=f"tools[{at}].{name}")
    function = {"name": needed(tool.get("name"), f"tools[{at}].name"), "description": tool.get("description")}
    more = {"parameters": tool.get(parameters), "strict": tool.get("strict")}
    return {"type": "function", "function": function | more}


def function_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """An earlier call as /v1/chat/completions has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_choice(name: Any) -> dict[str, Any]:
    """`tool_choice` for a certain function, as /v1/chat/completions has it."""
    return {"type": "function", "function": {"name": name}}


def format_of(settings: Mapping[str, Any] | None, path: str, neutral: Mapping[str, Any] | None = None) -> Any:
    """The field `format` of some settings; ApiError for any other, but with the value that asks for nothing."""
    for name, value in (settings or {}).items():
        if name != "format" and value is not None and value != (neutral or {}).get(name):
            raise not_supported(f"{path}.{name[:64]}")
    return (settings or {}).get("format")


# ------------------------------------------------------------------------------------------------------------- answers


@dataclass
class Block:
    """A text, reasoning, or the arguments of a call of the function `name`. index: its number in the answer."""

    index: int
    text: str = ""
    reasoning: bool = False
    name: str | None = None
    call_id: str = ""
    complete: bool = False

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Arguments of a call, parsed; None if it was cut off."""
        try:
            read = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            return None
        return read if isinstance(read, dict) else None


class BlockShape(ChatShape):
    """An answer in blocks, and a stream of typed events that build it. There is one answer."""

    def __init__(
        self, request_id: str, model: str, tokenizer: Tokenizer, include_usage: bool, form: AnswerFormat | None = None
    ) -> None:
        super().__init__(request_id, model, tokenizer, include_usage, form)
        self._parser = None if form is None else form.parser()
        self._blocks: list[Block] = []
        self._reason = "length"

    @abstractmethod
    def _opened(self, block: Block) -> Iterator[dict[str, Any]]:
        """Events that begin a block."""

    @abstractmethod
    def _grown(self, block: Block, text: str) -> Iterator[dict[str, Any]]:
        """Events of text that was added to a block."""

    @abstractmethod
    def _closed(self, block: Block) -> Iterator[dict[str, Any]]:
        """Events that end a block."""

    @abstractmethod
    def _begun(self, usage: Usage) -> list[dict[str, Any]]:
        """Events before the first block."""

    @abstractmethod
    def _ended(self, usage: Usage) -> list[dict[str, Any]]:
        """Events after the last block."""

    @abstractmethod
    def _broken(self, error: ApiError) -> dict[str, Any]:
        """The event that ends a stream with an error."""

    def _encoded(self, event: dict[str, Any]) -> bytes:
        """An event as a stream has it."""
        return sent(event)

    def begin(self, count: int, usage: Usage) -> list[bytes]:
        return [self._encoded(event) for event in self._begun(usage)]

    def progress(self, index: int, event: StreamEvent) -> list[bytes]:
        return [self._encoded(one) for one in self._advance(event)]

    def end(self, usage: Usage) -> list[bytes]:
        return [self._encoded(event) for event in self._ended(usage)]

    def failed(self, error: ApiError) -> list[bytes]:
        return [self._encoded(self._broken(error))]

    def opening(self, index: int) -> dict[str, Any]:
        return {}

    def delta(self, index: int, event: StreamEvent) -> Delta:
        """Delta of a plain answer: the block grows, and nothing is sent."""
        for _ in self._advance(event):
            pass
        return Delta("", None, event.finish_reason)

    def choice(self, index: int, text: str, logprobs: Logprobs | None, finish_reason: str) -> dict[str, Any]:
        return {}

    def _advance(self, event: StreamEvent) -> Iterator[dict[str, Any]]:
        """Add an event to the blocks; what a stream sends for it."""
        pieces: list[AnswerDelta] = [event.text]
        if self._parser is not None:
            pieces = self._read(self._parser, event.text, event.finish_reason)
        for piece in pieces:
            yield from self._add(piece)
        if event.finish_reason is not None:
            self._reason = event.finish_reason
            self._finish(event)
            yield from self._close(self._reason != "length")

    def _finish(self, event: StreamEvent) -> None:
        """The last event has come."""

    def _add(self, piece: AnswerDelta) -> Iterator[dict[str, Any]]:
        if isinstance(piece, ToolDelta):
            text = piece.arguments
            if piece.name is not None:
                yield from self._open(Block(len(self._blocks), name=piece.name, call_id=piece.id or ""))
        else:
            reasoning = isinstance(piece, Reasoning)
            text = piece.text if isinstance(piece, Reasoning) else piece
            last = self._blocks[-1] if self._blocks else None
            if text and (last is None or last.name is not None or last.reasoning != reasoning):
                yield from self._open(Block(len(self._blocks), reasoning=reasoning))
        if text:
            self._blocks[-1].text += text
            yield from self._grown(self._blocks[-1], text)

    def _open(self, block: Block) -> Iterator[dict[str, Any]]:
        yield from self._close(True)
        self._blocks.append(block)
        yield from self._opened(block)

    def _close(self, complete: bool) -> Iterator[dict[str, Any]]:
        if self._blocks:
            self._blocks[-1].complete = complete
            yield from self._closed(self._blocks[-1])


def sent(event: dict[str, Any]) -> bytes:
    """A server-sent event with its type as its name, which clients of both APIs read."""
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + encode_json(event) + b"\n\n"
