"""OpenAI's /v1/responses: text, reasoning and function calls, plain or as typed events. Nothing is stored between
requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from powerinfer.serve.api_error import ApiError, not_supported
from powerinfer.serve.constraints import functions
from powerinfer.serve.dialect import (
    Block,
    BlockShape,
    Content,
    DialectBody,
    Id,
    Strict,
    Tools,
    chat_request,
    format_of,
    function_call,
    function_choice,
    function_tool,
    needed,
    sent,
    text_of,
)
from powerinfer.serve.logs import log
from powerinfer.serve.schema import IGNORED, MAX_MESSAGES, ChatRequest, Int, Neutral
from powerinfer.serve.shapes import Usage

if TYPE_CHECKING:
    from powerinfer.runtime.params import SamplingParams

RESPONSES_IGNORED = IGNORED - {"store"} | {"max_tool_calls"}  # of tools that the server calls: there are none

RESPONSES_NEUTRAL: Mapping[str, Neutral] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "background_options": (),
    "access_programs": (),
    "image": (),
    "include": lambda names: isinstance(names, list) and "message.output_text.logprobs" not in names,
    "top_logprobs": (0,),
    "moderation": (),
    "context_management": ([],),
    "stream_options": lambda options: isinstance(options, dict) and options.keys() <= {"include_obfuscation"},
}
"""Fields of the API that this server does not have, with the values that ask for nothing. What `include` names belongs
to tools of the server, but for logprobs; items of reasoning have their text anyway."""

RESPONSES_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "truncate_prompt_tokens": "truncation",
    ".function.name": ".name",
    ".function.description": ".description",
    ".function.parameters": ".parameters",
    ".function.strict": ".strict",
}
"""Names of fields, by those of chats."""

PARTS = ("input_text", "output_text", "text", "refusal")
PART_IGNORED = ("annotations", "logprobs", "parsed")
ITEM_IGNORED = ("id", "status", "phase", "created_by", "caller", "namespace", "parsed_arguments")
"""Fields without influence; OpenAI's client for Node adds `parsed` and `parsed_arguments` to what it got."""

TOOL_IGNORED = ("allowed_callers", "output_schema", "defer_loading")
ROLES = ("user", "assistant", "system", "developer")


class InputItem(Strict):
    """A message, reasoning, a call of a function, or its result."""

    type: Annotated[str, Field(max_length=64)] = "message"
    role: Annotated[str, Field(max_length=64)] | None = None
    content: Content | None = None
    call_id: Id | None = None
    name: Id | None = None
    arguments: str | None = None
    output: Content | None = None


class ResponsesRequest(DialectBody):
    """The body of /v1/responses."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    text: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    tools: Tools | None = None
    tool_choice: Annotated[str, Field(max_length=64)] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Annotated[dict[str, Any], Field(max_length=16)] | None = None

    def to_chat(self) -> ChatRequest:
        """The same as a chat. ApiError for what is wrong beyond types, or not supported."""
        self.check_extra(RESPONSES_IGNORED, RESPONSES_NEUTRAL)
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return chat_request(
            self,
            [*messages, *_messages(self.input)],
            RESPONSES_NAMES,
            max_tokens=self.max_output_tokens,
            tools=[
                function_tool(tool, "parameters", at, TOOL_IGNORED)
                for at, tool in functions(self.tools or [], "function")
            ],
            tool_choice=_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_response_format(self.text),
            reasoning=self.reasoning,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
        )


def _messages(value: str | list[InputItem]) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []  # before the next message of the assistant
    if lost := sum(map(_is_lost_thought, value)):
        log("warning", "thoughts are left out that were sent by reference: nothing is stored", count=lost)
    for at, item in enumerate(value):
        if _is_lost_thought(item):
            continue
        if item.type == "reasoning":
            thoughts += filter(None, [_reasoning(item, f"input[{at}]")])
            continue
        message = _message(item, f"input[{at}]")
        thought = "\n".join(thoughts)
        thoughts.clear()  # what no message of the assistant follows belongs to none
        if thought and message["role"] == "assistant":
            messages.append({**message, "reasoning_content": thought})
            continue
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant":  # one answer: a text, then its calls
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    if not messages:
        raise ApiError(400, "input has no message", param="input")
    return messages


def _is_lost_thought(item: InputItem) -> bool:
    """Whether an item refers to a thought. The AI SDK does so where it is not told that nothing is stored."""
    return item.type == "item_reference" and str((item.model_extra or {}).get("id")).startswith("rs_")


def _message(item: InputItem, path: str) -> dict[str, Any]:
    if item.type not in ("function_call", "function_call_output", "message"):
        hint = ": nothing is stored" if item.type == "item_reference" else ""
        raise not_supported(f"{path}.type {item.type!r}", hint)
    item.refuse_extra(path, ITEM_IGNORED)
    if item.type == "function_call":
        name, arguments = needed(item.name, f"{path}.name"), needed(item.arguments, f"{path}.arguments")
        call = function_call(needed(item.call_id, f"{path}.call_id"), name, arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output":
        output = text_of(needed(item.output, f"{path}.output"), PARTS, f"{path}.output", PART_IGNORED)
        return {"role": "tool", "content": output, "tool_call_id": needed(item.call_id, f"{path}.call_id")}
    if item.role not in ROLES:
        raise ApiError(400, f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    content = text_of(needed(item.content, f"{path}.content"), PARTS, f"{path}.content", PART_IGNORED)
    return {"role": item.role, "content": content}


def _reasoning(item: InputItem, path: str) -> str:
    """The text of an earlier item of reasoning; summaries are left out."""
    item.refuse_extra(path, ("id", "status", "summary", "encrypted_content"))
    return text_of(item.content or "", ("reasoning_text",), f"{path}.content", ())


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise not_supported(f"tool_choice.type {str(choice.get('type'))[:64]!r}")
    return function_choice(choice.get("name"))


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as /v1/chat/completions has it."""
    form = format_of(text, "text", {"verbosity": "medium"})
    if form is None:
        return None
    if not isinstance(form, dict):
        raise ApiError(400, "text.format must be an object", param="text.format")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


# ------------------------------------------------------------------------------------------------------------- answers


class ResponsesShape(BlockShape):
    """The response object, and its events from response.created on."""

    prefix = "resp_"

    def __init__(self, asked: ResponsesRequest, params: SamplingParams, *chat: Any) -> None:
        super().__init__(*chat)
        self._asked, self._params = asked, params
        self._sent = 0

    def ping(self) -> bytes:
        """An event: Codex gives up a stream that has only comments."""
        return sent(self._event("response.in_progress", response=self._response("in_progress")))

    def full_answer(self, choices: list[dict[str, Any]], usage: Usage, ids: Sequence[list[int]] = ()) -> dict[str, Any]:
        return self._response(self._status, usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str, usage: Usage | None = None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        asked = self._asked
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": (asked.model_extra or {}).get("metadata") or {},
            "model": self._model,
            "output": [self._item(block) for block in self._blocks],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | (asked.reasoning or {}),
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": (asked.text or {}).get("format") or {"type": "text"}},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.tools or [],
            "top_p": self._params.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": None if usage is None else _usage(usage, self.reasoning_tokens or 0),
        }

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        """A block as an item; status: None: whether it is complete."""
        status = status or ("completed" if block.complete else "incomplete")
        item = {"id": self._item_id(block), "status": status}
        if block.name is not None:
            return {
                "type": "function_call", **item, "call_id": block.call_id, "name": block.name, "arguments": block.text,
            }  # fmt: skip
        if block.reasoning:
            return {"type": "reasoning", **item, "summary": [], "content": [_thought(block.text)]}
        return {"type": "message", **item, "role": "assistant", "content": [_part(block.text)]}

    def _item_id(self, block: Block) -> str:
        kind = "fc" if block.name is not None else "rs" if block.reasoning else "msg"
        return f"{kind}_{self._id}_{block.index}"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _event_in(self, kind: str, block: Block, **fields: Any) -> dict[str, Any]:
        """An event about a block's content."""
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return self._event(kind, **place, **({"content_index": 0} if block.name is None else {}), **fields)

    def _begun(self, usage: Usage) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def _opened(self, block: Block) -> Iterator[dict[str, Any]]:
        item = self._item(block, "in_progress")
        if block.name is None:
            item["content"] = []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.name is None:
            part = _thought("") if block.reasoning else _part("")
            yield self._event_in("response.content_part.added", block, part=part)

    def _grown(self, block: Block, text: str) -> Iterator[dict[str, Any]]:
        if block.reasoning:
            yield self._event_in("response.reasoning_text.delta", block, delta=text)
        elif block.name is None:
            yield self._event_in("response.output_text.delta", block, delta=text, logprobs=[])
        else:
            yield self._event_in("response.function_call_arguments.delta", block, delta=text)

    def _closed(self, block: Block) -> Iterator[dict[str, Any]]:
        if block.reasoning:
            yield self._event_in("response.reasoning_text.done", block, text=block.text)
            yield self._event_in("response.content_part.done", block, part=_thought(block.text))
        elif block.name is None:
            yield self._event_in("response.output_text.done", block, text=block.text, logprobs=[])
            yield self._event_in("response.content_part.done", block, part=_part(block.text))
        else:
            yield self._event_in("response.function_call_arguments.done", block, name=block.name, arguments=block.text)
        yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _ended(self, usage: Usage) -> list[dict[str, Any]]:
        return [self._event(f"response.{self._status}", response=self._response(self._status, usage))]

    def _broken(self, error: ApiError) -> dict[str, Any]:
        code = "rate_limit_exceeded" if error.status_code == 429 else "server_error"
        failure = {"code": code, "message": str(error.detail)}
        return self._event("response.failed", response=self._response("failed", error=failure))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _usage(usage: Usage, reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.generated,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.prompt + usage.generated,
    }
