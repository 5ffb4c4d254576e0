"""OpenAI's Agents SDK, on chats and on responses, plain and streamed."""

from __future__ import annotations

import agents
import job
import openai
from pydantic import BaseModel

agents.set_tracing_disabled(True)  # it would be sent to OpenAI
api = openai.AsyncOpenAI(base_url=f"{job.URL}/v1", api_key="none", max_retries=0)


class Person(BaseModel):
    name: str
    age: int


def agent(responses: bool = False) -> agents.Agent:
    model = (agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel)(job.MODEL, api)
    return agents.Agent(
        name="reader", instructions="Read files.", model=model, tools=[agents.function_tool(job.read_file)]
    )


async def streamed(made: agents.Agent) -> str:
    result = agents.Runner.run_streamed(made, job.PROMPT)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def chat() -> str:
    return (await agents.Runner.run(agent(), job.PROMPT)).final_output


async def chat_streamed() -> str:
    return await streamed(agent())


async def response() -> str:
    return (await agents.Runner.run(agent(responses=True), job.PROMPT)).final_output


async def response_streamed() -> str:
    return await streamed(agent(responses=True))


async def handoff() -> None:
    reader = agent()
    first = agents.Agent(name="first", model=reader.model, handoffs=[reader])
    prompt = (
        'SCRIPT [{"call": "transfer_to_reader", "arguments": {}}, '
        '{"call": "read_file", "arguments": {"path": "notes.txt"}}, {"say": "It says WORD, yes."}]'
    )
    result = await agents.Runner.run(first, prompt)
    assert result.final_output == job.ANSWER and result.last_agent.name == "reader"


async def output_type() -> None:
    made = agents.Agent(name="who", model=agent().model, output_type=Person)
    assert (await agents.Runner.run(made, job.PERSON_PROMPT)).final_output == Person(name="Jo", age=3)


job.run(chat, chat_streamed, response, response_streamed, handoff, output_type)
