"""Ollama's Python client: chats with functions and thoughts, texts, formats, embeddings, models, errors."""

from __future__ import annotations

from typing import Any

import job
import ollama
from pydantic import BaseModel

api = ollama.Client(host=job.URL)
later = ollama.AsyncClient(host=job.URL)
OPTIONS: Any = {"temperature": 0, "num_ctx": 4096, "num_predict": 300}


class Person(BaseModel):
    name: str
    age: int


def chat() -> str | None:
    messages: list[Any] = [{"role": "user", "content": job.PROMPT}]
    for _ in range(2):
        answer = api.chat(model=job.MODEL, messages=messages, tools=[job.read_file], think=True, options=OPTIONS)
        assert answer.done and answer.done_reason == "stop" and answer.message.thinking
        assert answer.total_duration and answer.eval_count and answer.eval_duration
        messages.append(answer.message)
        for call in answer.message.tool_calls or []:
            result = job.read_file(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    return answer.message.content


async def chat_streamed() -> str:
    messages: list[Any] = [{"role": "user", "content": job.PROMPT}]
    for _ in range(2):
        text, thought = "", ""
        calls: list[Any] = []
        async for part in await later.chat(
            model=f"{job.MODEL}:latest", messages=messages, tools=[job.read_file], stream=True, keep_alive="10m"
        ):
            text, thought = text + (part.message.content or ""), thought + (part.message.thinking or "")
            calls += part.message.tool_calls or []
        assert part.done and part.prompt_eval_count and part.prompt_eval_count > 50
        messages.append(ollama.Message(role="assistant", content=text, thinking=thought, tool_calls=calls or None))
        for call in calls:
            messages.append({"role": "tool", "content": job.read_file(**call.function.arguments)})
    assert thought == "That is it."
    return text


def chat_parsed() -> None:
    schema = Person.model_json_schema()
    answer = api.chat(model=job.MODEL, messages=[{"role": "user", "content": job.PERSON_PROMPT}], format=schema)
    assert Person.model_validate_json(answer.message.content or "") == Person(name="Jo", age=3)


def generate() -> None:
    answer = api.generate(model=job.MODEL, prompt=job.PERSON_PROMPT, system="Be brief.", format="json", options=OPTIONS)
    assert Person.model_validate_json(answer.response or "") == Person(name="Jo", age=3)
    pieces = [part.response for part in api.generate(model=job.MODEL, prompt=job.PERSON_PROMPT, stream=True)]
    assert "".join(filter(None, pieces)) == answer.response and len(pieces) > 3
    assert api.generate(model=job.MODEL).done_reason == "load"


def embed() -> None:
    found = api.embed(model=job.MODEL, input=["one", "two"])
    assert len(found.embeddings) == 2 and found.prompt_eval_count
    assert api.embeddings(model=job.MODEL, prompt="one").embedding == found.embeddings[0]


def models() -> None:
    (listed,) = api.list().models
    (loaded,) = api.ps().models
    assert listed.model == loaded.model == f"{job.MODEL}:latest" and listed.digest == loaded.digest
    assert listed.modified_at and loaded.expires_at and loaded.context_length
    shown = api.show(listed.model)
    assert shown.template and shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo and shown.modelinfo["stand-in.context_length"] == loaded.context_length


def errors() -> None:
    for ask, status, says in (
        (lambda: api.chat(model="nothing", messages=[{"role": "user", "content": "x"}]), 404, "not found"),
        (lambda: list(api.generate(model="nothing", prompt="x", stream=True)), 404, "not found"),
        (lambda: api.chat(model=job.MODEL, messages=[{"role": "user", "images": [b"x"]}]), 400, "takes text"),
        (lambda: api.pull("nothing"), 501, "powerinfer pull"),
        (lambda: api.delete("nothing"), 501, "powerinfer rm"),
    ):
        try:
            ask()
        except ollama.ResponseError as error:
            assert error.status_code == status and says in error.error, error
        else:
            raise AssertionError(f"there is no error {status}")


job.run(chat, chat_streamed, chat_parsed, generate, embed, models, errors)
