"""The Python clients of OpenAI and of Anthropic, with their helpers for streams, types and tools."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import job
import openai
from pydantic import BaseModel

api = openai.OpenAI(base_url=f"{job.URL}/v1", api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=job.URL, api_key="none", max_retries=0)
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "read_file", "description": "Read a file", "parameters": job.PARAMETERS, "strict": True},
}
RESPONSES_TOOL: Any = {"type": "function", **CHAT_TOOL["function"]}


class Person(BaseModel):
    name: str
    age: int


def chat() -> str | None:
    messages: list[Any] = [{"role": "user", "content": job.PROMPT}]
    for _ in range(2):
        answer = api.chat.completions.create(model=job.MODEL, messages=messages, tools=[CHAT_TOOL]).choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or []:
            result = job.read_file(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return answer.content


def chat_streamed() -> str | None:
    messages: list[Any] = [{"role": "user", "content": job.PROMPT}]
    for _ in range(2):
        with api.chat.completions.stream(
            model=job.MODEL, messages=messages, tools=[CHAT_TOOL], stream_options={"include_usage": True}
        ) as stream:
            stream.until_done()
            completion = stream.get_final_completion()
        assert completion.usage and completion.usage.prompt_tokens > 50
        answer = completion.choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or []:
            result = job.read_file(**call.function.parsed_arguments or json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return answer.content


def chat_parsed() -> None:
    answer = api.chat.completions.parse(
        model=job.MODEL, messages=[{"role": "user", "content": job.PERSON_PROMPT}], response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Jo", age=3)


def responses_streamed() -> str | None:
    items: list[Any] = [{"role": "user", "content": job.PROMPT}]
    for _ in range(2):
        with api.responses.stream(model=job.MODEL, input=items, tools=[RESPONSES_TOOL]) as stream:
            stream.until_done()
            response = stream.get_final_response()
        items += response.output
        for item in response.output:
            if item.type == "function_call":
                result = job.read_file(**json.loads(item.arguments))
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    return response.output_text


def responses_parsed() -> None:
    answer = api.responses.parse(model=job.MODEL, input=job.PERSON_PROMPT, text_format=Person)
    assert answer.output_parsed == Person(name="Jo", age=3)


def messages_streamed() -> str | None:
    messages: list[Any] = [{"role": "user", "content": job.PROMPT}]
    tool: Any = {"name": "read_file", "description": "Read a file", "input_schema": job.PARAMETERS}
    for _ in range(2):
        with claude.messages.stream(model=job.MODEL, max_tokens=200, messages=messages, tools=[tool]) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": block.id, "content": job.read_file(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    return message.content[-1].text


def messages_tool_runner() -> str:
    tool = anthropic.beta_tool(job.read_file)
    runner = claude.beta.messages.tool_runner(
        model=job.MODEL, max_tokens=200, messages=[{"role": "user", "content": job.PROMPT}], tools=[tool]
    )
    return runner.until_done().content[-1].text


def messages_tool_runner_streamed() -> str:
    tool = anthropic.beta_tool(job.read_file)
    runner = claude.beta.messages.tool_runner(
        model=job.MODEL, max_tokens=200, messages=[{"role": "user", "content": job.PROMPT}], tools=[tool], stream=True
    )
    for stream in runner:
        message = stream.get_final_message()
    return message.content[-1].text


def messages_parsed() -> None:
    answer = claude.messages.parse(
        model=job.MODEL, max_tokens=200, messages=[{"role": "user", "content": job.PERSON_PROMPT}], output_format=Person
    )
    assert answer.parsed_output == Person(name="Jo", age=3)


job.run(
    chat, chat_streamed, chat_parsed, responses_streamed, responses_parsed, messages_streamed, messages_tool_runner,
    messages_tool_runner_streamed, messages_parsed,
)  # fmt: skip
