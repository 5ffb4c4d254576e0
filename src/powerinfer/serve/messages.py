"""Anthropic's /v1/messages and /v1/messages/count_tokens: text, thinking and tool use, plain or as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from powerinfer.serve.api_error import ANTHROPIC_ROUTES, ApiError, not_supported
from powerinfer.serve.constraints import functions
from powerinfer.serve.dialect import (
    Block,
    BlockShape,
    Content,
    DialectBody,
    Id,
    Strict,
    TextPart,
    Tools,
    chat_request,
    format_of,
    function_call,
    function_choice,
    function_tool,
    needed,
    text_of,
)
from powerinfer.serve.schema import MAX_MESSAGES, MAX_PARTS, MAX_STOPS, ChatRequest, Int, Neutral, Stop
from powerinfer.serve.shapes import Usage

if TYPE_CHECKING:
    from powerinfer.runtime.params import SamplingParams
    from powerinfer.runtime.request import StreamEvent

MESSAGES_IGNORED = frozenset((
    "metadata", "service_tier", "cache_control", "inference_geo", "diagnostics", "user_profile_id", "anthropic_beta",
))  # fmt: skip
"""Fields that do not change the answer; what prompts have in common is cached without being asked."""

MESSAGES_LOGGED = frozenset(("speed",))

MESSAGES_NEUTRAL: Mapping[str, Neutral] = {
    "speed": ("standard",),
    "container": (),
    "mcp_servers": ([],),
    "context_management": lambda given: isinstance(given, dict) and _keep(given.get("edits") or []),
}
"""Fields of the API that this server does not have, with the values that ask for nothing."""


def _keep(edits: Any) -> bool:
    """Whether edits of the context leave all as it is, or concern thoughts, of which the template takes its own."""
    listed = isinstance(edits, list) and all(isinstance(edit, dict) for edit in edits)
    return listed and all(str(edit.get("type")).startswith("clear_thinking") for edit in edits)


class ThreadError(ApiError):
    """A request that goes on with messages of an earlier one, of which nothing is stored.

    By the code both SDKs' tool runners know that they must send the whole conversation.
    """

    def __init__(self, thread: Mapping[str, Any]) -> None:
        if thread.get("type") != "continue":
            raise not_supported(f"thread.type {str(thread.get('type'))[:64]!r}")
        super().__init__(404, "thread: nothing is stored between requests; send all messages", param="thread")

    def document(self, path: str = "") -> dict[str, Any]:
        document = super().document(path)
        document["error"]["details"] = {"error_code": "thread_not_found"}
        return document


BLOCK_IGNORED = ("cache_control",)
OF_BLOCK_IGNORED = {"tool_use": ("caller",), "thinking": ("signature",), "redacted_thinking": ("data",)}
TOOL_IGNORED = ("cache_control", "eager_input_streaming", "allowed_callers", "defer_loading", "input_examples")
SIGNATURE = ""  # of thinking: nothing is signed here
ROLES = ("user", "assistant", "system")
BLOCKS = {"text": ROLES, "thinking": ("assistant",), "redacted_thinking": ("assistant",),
          "tool_use": ("assistant",), "tool_result": ("user",)}  # fmt: skip
"""Roles in whose messages a block may be."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's tool_choice.type, and OpenAI's."""


MESSAGES_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    '"required"': '"any"',
    ".function.name": ".name",
    ".function.description": ".description",
    ".function.parameters": ".input_schema",
    ".function.strict": ".strict",
}
"""Names of fields, and a value, by those of chats; parts of names with a dot."""


class ContentBlock(Strict):
    """A text, earlier thinking, a use of a tool, or its result."""

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    thinking: str | None = None
    id: Id | None = None
    name: Id | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Id | None = None
    content: Content | None = None
    is_error: bool | None = None


class ClientMessage(Strict):
    """A turn of the conversation."""

    role: Annotated[str, Field(max_length=64)]
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True, max_length=MAX_PARTS)]


class CountRequest(DialectBody):
    """The body of /v1/messages/count_tokens: what the prompt consists of."""

    messages: Annotated[list[ClientMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None

    def to_chat(self) -> ChatRequest:
        """The same as a chat. ApiError for what is wrong beyond types, or not supported."""
        self.check_extra(MESSAGES_IGNORED, MESSAGES_NEUTRAL, MESSAGES_LOGGED)
        if self.thread not in (None, {"type": "create"}):
            raise ThreadError(self.thread)
        messages = [one for at, turn in enumerate(self.messages) for one in _turn(turn, f"messages[{at}]")]
        if self.system:
            messages.insert(0, {"role": "system", "content": text_of(self.system, ("text",), "system", BLOCK_IGNORED)})
        choice, parallel = _tool_choice(self.tool_choice)
        return chat_request(
            self,
            messages,
            MESSAGES_NAMES,
            tools=[_tool(tool, at) for at, tool in self._offered()],
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=_response_format(self.output_config),
            reasoning_effort=(self.output_config or {}).get("effort"),
            thinking=self.thinking,
            max_tokens=getattr(self, "max_tokens", None),
            stop=getattr(self, "stop_sequences", None),
            continue_final_message=self.messages[-1].role == "assistant" or None,
        )

    def _offered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The functions that the model learns of, with their places: deferred ones once a result refers to them, or at
        once if the server is to search for tools, which it cannot."""
        tools = self.tools or []
        searches = any(str(tool.get("type")).startswith("tool_search_tool") for tool in tools)
        blocks = (block for turn in self.messages if not isinstance(turn.content, str) for block in turn.content)
        parts = (part for block in blocks if isinstance(block.content, list) for part in block.content)
        named = [_reference(part) for part in parts]
        for at, tool in functions(tools, "custom", "function"):
            if searches or not tool.get("defer_loading") or tool.get("name") in named:
                yield at, tool


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: Int
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None


def _turn(turn: ClientMessage, path: str) -> list[dict[str, Any]]:
    """A turn as messages of a chat: results of tools are messages of their own."""
    turn.refuse_extra(path, ())
    if turn.role not in ROLES:
        raise ApiError(400, f"{path}.role must be user, assistant or system", param=f"{path}.role")
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []

    def flush() -> None:
        if texts or calls or thoughts:
            message = {"role": turn.role, "content": "\n".join(texts), "tool_calls": list(calls) or None}
            messages.append({**message, "reasoning_content": "\n".join(thoughts) or None})
        texts.clear()
        calls.clear()

    for at, block in enumerate(turn.content):
        block_path = f"{path}.content[{at}]"
        if turn.role not in BLOCKS.get(block.type, ()):
            hint = f" in a message of the role {turn.role}" if block.type in BLOCKS else ": this model takes text"
            raise not_supported(f"{block_path}.type {block.type!r}", hint)
        block.refuse_extra(block_path, (*BLOCK_IGNORED, *OF_BLOCK_IGNORED.get(block.type, ())))
        if block.type == "redacted_thinking":  # of another server: nothing here can read it
            continue
        if block.type == "thinking":
            thoughts.append(needed(block.thinking, f"{block_path}.thinking"))
        elif block.type == "text":
            texts.append(needed(block.text, f"{block_path}.text"))
        elif block.type == "tool_use":
            calls.append(_call(block, block_path))
        else:
            flush()
            messages.append(_result(block, block_path))
    flush()
    return messages or [{"role": turn.role, "content": ""}]


def _call(block: ContentBlock, path: str) -> dict[str, Any]:
    name, arguments = needed(block.name, f"{path}.name"), needed(block.input, f"{path}.input")
    return function_call(needed(block.id, f"{path}.id"), name, arguments)


def _reference(part: TextPart) -> str | None:
    """The name of the deferred tool to which a part of a result refers; None: it is no reference."""
    name = (part.model_extra or {}).get("tool_name")
    return name if part.type == "tool_reference" and isinstance(name, str) else None


def _worded(part: TextPart) -> TextPart:
    """A part of a result with a reference in words."""
    name = _reference(part)
    return part if name is None else TextPart(type="text", text=f"From now on the function {name} may be called.")


def _result(block: ContentBlock, path: str) -> dict[str, Any]:
    content = block.content or ""
    parts = content if isinstance(content, str) else [_worded(part) for part in content]
    text = text_of(parts, ("text",), f"{path}.content", BLOCK_IGNORED)
    # templates know results only, and whether it is an error may matter for what the model does next
    text = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "content": text, "tool_call_id": needed(block.tool_use_id, f"{path}.tool_use_id")}


def _tool(tool: Mapping[str, Any], at: int) -> dict[str, Any]:
    function = function_tool(tool, "input_schema", at, TOOL_IGNORED)
    needed(tool.get("input_schema"), f"tools[{at}].input_schema")
    return function


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """OpenAI's tool_choice and parallel_tool_calls."""
    if choice is None:
        return None, None
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use")
    for name, value in choice.items():
        if name not in ("type", "name", "disable_parallel_tool_use") and value is not None:
            raise not_supported(f"tool_choice.{name[:64]}")
    if single is not None and not isinstance(single, bool):
        raise ApiError(400, "tool_choice.disable_parallel_tool_use must be a boolean", param="tool_choice")
    parallel = None if single is None else not single
    if kind == "tool":
        return function_choice(choice.get("name")), parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise ApiError(400, "tool_choice.type must be auto, any, tool or none", param="tool_choice")
    return CHOICES[kind], parallel


def _response_format(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = format_of({name: value for name, value in (config or {}).items() if name != "effort"}, "output_config")
    if form is None:
        return None
    if not isinstance(form, dict) or form.keys() != {"type", "schema"} or form["type"] != "json_schema":
        raise ApiError(
            400, 'output_config.format must be {"type": "json_schema", "schema": {...}}', param="output_config"
        )
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


# ------------------------------------------------------------------------------------------------------------- answers


class MessagesShape(BlockShape):
    """The message object, and its events from message_start on."""

    prefix = "msg_"

    def __init__(self, params: SamplingParams, *chat: Any) -> None:
        super().__init__(*chat)
        self._stops = params.stop
        self._stop: str | None = None  # the one that ended the answer

    def ping(self) -> bytes:
        return b'event: ping\ndata: {"type": "ping"}\n\n'

    def full_answer(self, choices: list[dict[str, Any]], usage: Usage, ids: Sequence[list[int]] = ()) -> dict[str, Any]:
        content = [_content(block) for block in self._blocks if block.name is None or block.arguments is not None]
        return self._message(content, _usage(usage)) | self._outcome()

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _outcome(self) -> dict[str, Any]:
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        called = self._reason == "stop" and any(block.name is not None for block in self._blocks)
        reason = "stop_sequence" if self._stop is not None else reasons["tool_calls" if called else self._reason]
        return {"stop_reason": reason, "stop_sequence": self._stop}

    def _finish(self, event: StreamEvent) -> None:
        """Find the stop sequence: it is in the tokens, and not in the text."""
        done = event.completion
        if done is None or event.finish_reason != "stop" or not self._stops:
            return
        if done.token_ids and done.token_ids[-1] in self._tokenizer.eos_ids:
            return
        raw = self._tokenizer.decode(done.token_ids, skip_special=False)
        stops = [(at, stop) for stop in self._stops if (at := raw.find(stop)) >= 0]
        self._stop = min(stops)[1] if stops else None

    def _begun(self, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._message([], _usage(usage))}]

    def _opened(self, block: Block) -> Iterator[dict[str, Any]]:
        empty = Block(block.index, name=block.name, call_id=block.call_id, reasoning=block.reasoning)
        yield {"type": "content_block_start", "index": block.index, "content_block": _content(empty)}

    def _grown(self, block: Block, text: str) -> Iterator[dict[str, Any]]:
        delta = {"type": "text_delta", "text": text}
        if block.reasoning:
            delta = {"type": "thinking_delta", "thinking": text}
        if block.name is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_delta", "index": block.index, "delta": delta}

    def _closed(self, block: Block) -> Iterator[dict[str, Any]]:
        if block.reasoning:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": block.index, "delta": delta}
        yield {"type": "content_block_stop", "index": block.index}

    def _ended(self, usage: Usage) -> list[dict[str, Any]]:
        delta = {"type": "message_delta", "delta": self._outcome(), "usage": _usage(usage)}
        return [delta, {"type": "message_stop"}]

    def _broken(self, error: ApiError) -> dict[str, Any]:
        return error.document(ANTHROPIC_ROUTES)


def _content(block: Block) -> dict[str, Any]:
    if block.reasoning:  # clients send it back as it is
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.name is None:
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts the tokens that were cached apart."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }
