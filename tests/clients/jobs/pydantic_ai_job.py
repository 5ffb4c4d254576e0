"""Agents of pydantic-ai, on the chats, the responses and the messages of the server."""

from __future__ import annotations

from pathlib import Path

import job
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=f"{job.URL}/v1", api_key="none")


class Person(BaseModel):
    name: str
    age: int


def chats() -> Model:
    return OpenAIChatModel(job.MODEL, provider=openai)


def responses() -> Model:
    return OpenAIResponsesModel(job.MODEL, provider=openai)


def messages() -> Model:
    return AnthropicModel(job.MODEL, provider=AnthropicProvider(base_url=job.URL, api_key="none"))


def read_file(path: Path, tags: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """Read a file, perhaps with tags: types whose schemas are not only types."""
    return job.read_file(str(path))


async def answer(model: Model) -> str:
    return (await Agent(model, tools=[read_file]).run(job.PROMPT)).output


async def streamed(model: Model) -> str:
    async with Agent(model, tools=[read_file]).run_stream(job.PROMPT) as result:
        return await result.get_output()


async def chat() -> str:
    return await answer(chats())


async def chat_streamed() -> str:
    return await streamed(chats())


async def response() -> str:
    return await answer(responses())


async def response_streamed() -> str:
    return await streamed(responses())


async def message() -> str:
    return await answer(messages())


async def message_streamed() -> str:
    return await streamed(messages())


async def native_output() -> None:
    agent = Agent(chats(), output_type=NativeOutput(Person))
    assert (await agent.run(job.PERSON_PROMPT)).output == Person(name="Jo", age=3)


async def tool_output() -> None:
    agent = Agent(chats(), output_type=ToolOutput(Person, name="Person"))
    assert (await agent.run(job.PERSON_CALL_PROMPT)).output == Person(name="Jo", age=3)


job.run(chat, chat_streamed, response, response_streamed, message, message_streamed, native_output, tool_output)
