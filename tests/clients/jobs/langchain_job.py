"""LangChain's model and its agents, which LangGraph runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import job
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


@tool
def read_file(path: Path, tags: set[str] | None = None) -> str:
    """Read a file, perhaps with tags: types whose schemas are not only types."""
    return job.read_file(str(path))


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=job.MODEL, base_url=f"{job.URL}/v1", api_key="none", max_retries=0, **options)


def answer_of(result: dict[str, Any]) -> str:
    return result["messages"][-1].text


def agent() -> str:
    return answer_of(create_agent(model(), [read_file]).invoke({"messages": [("user", job.PROMPT)]}))


def agent_streamed() -> str:
    made = create_agent(model(streaming=True, stream_usage=True), [read_file])
    return answer_of([*made.stream({"messages": [("user", job.PROMPT)]}, stream_mode="values")][-1])


def agent_of_responses() -> str:
    made = create_agent(model(use_responses_api=True), [read_file])
    return answer_of(made.invoke({"messages": [("user", job.PROMPT)]}))


def with_reasoning_effort() -> str:
    made = create_agent(model(reasoning_effort="medium"), [read_file])
    return answer_of(made.invoke({"messages": [("user", job.PROMPT)]}))


def ollama() -> ChatOllama:
    return ChatOllama(model=job.MODEL, base_url=job.URL, validate_model_on_init=True, num_ctx=4096, temperature=0)


def agent_of_ollama() -> str:
    return answer_of(create_agent(ollama(), [read_file]).invoke({"messages": [("user", job.PROMPT)]}))


def structured_by_ollama() -> None:
    made = ollama().with_structured_output(Person, method="json_schema")
    assert made.invoke(job.PERSON_PROMPT) == Person(name="Jo", age=3)


def embeddings_by_ollama() -> None:
    made = OllamaEmbeddings(model=job.MODEL, base_url=job.URL)
    assert len(made.embed_documents(["one", "two"])) == 2 and made.embed_query("one")


def structured() -> None:
    made = model().with_structured_output(Person, method="json_schema")
    assert made.invoke(job.PERSON_PROMPT) == Person(name="Jo", age=3)


def structured_by_a_function() -> None:
    made = model().with_structured_output(Person, method="function_calling")
    assert made.invoke(job.PERSON_CALL_PROMPT) == Person(name="Jo", age=3)


def too_long() -> None:
    from langchain_core.exceptions import ContextOverflowError

    try:
        model().invoke("word " * 200_000)
    except ContextOverflowError:
        return
    raise AssertionError("it was no ContextOverflowError")


job.run(
    agent, agent_streamed, agent_of_responses, with_reasoning_effort, structured, structured_by_a_function, too_long,
    agent_of_ollama, structured_by_ollama, embeddings_by_ollama,
)  # fmt: skip
