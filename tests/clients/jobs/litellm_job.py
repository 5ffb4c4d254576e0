"""LiteLLM by three of its providers, and its errors."""

from __future__ import annotations

import json
from typing import Any

import job
import litellm
from pydantic import BaseModel

litellm.suppress_debug_info = True
TOOL: Any = {
    "type": "function",
    "function": {"name": "read_file", "description": "Read a file", "parameters": job.PARAMETERS},
}


class Person(BaseModel):
    name: str
    age: int


def loop(provider: str, base: str, stream: bool, **options: Any) -> str | None:
    messages: list[Any] = [{"role": "user", "content": job.PROMPT}]
    for _ in range(2):
        answer: Any = litellm.completion(
            f"{provider}/{job.MODEL}", messages, tools=[TOOL], stream=stream, api_base=base, api_key="none",
            num_retries=0, **options,
        )  # fmt: skip
        if stream:
            answer = litellm.stream_chunk_builder(list(answer))
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            result = job.read_file(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content


def openai() -> str | None:
    return loop("openai", f"{job.URL}/v1", stream=False)


def openai_streamed() -> str | None:
    return loop("openai", f"{job.URL}/v1", stream=True, stream_options={"include_usage": True})


def hosted_vllm() -> str | None:
    return loop("hosted_vllm", f"{job.URL}/v1", stream=True, reasoning_effort="medium")


def anthropic() -> str | None:
    return loop("anthropic", job.URL, stream=True, max_tokens=200)


def structured() -> None:
    answer: Any = litellm.completion(
        f"openai/{job.MODEL}", [{"role": "user", "content": job.PERSON_PROMPT}], api_base=f"{job.URL}/v1",
        api_key="none", response_format=Person,
    )  # fmt: skip
    assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Jo", age=3)


def too_long() -> None:
    messages = [{"role": "user", "content": "word " * 200_000}]
    try:
        litellm.completion(f"openai/{job.MODEL}", messages, api_base=f"{job.URL}/v1", api_key="none", num_retries=0)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("it was no ContextWindowExceededError")


job.run(openai, openai_streamed, hosted_vllm, anthropic, structured, too_long)
