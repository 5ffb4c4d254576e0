"""All modes of instructor for OpenAI's and Anthropic's routes: each gets an object of a type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import instructor
import job
import openai
from pydantic import BaseModel

MODES = instructor.Mode


class Person(BaseModel):
    name: str
    age: int


def check(people: Any) -> None:
    """The answer, which is of a class that instructor made of `Person`, is right."""
    (person,) = [people] if isinstance(people, Person) else people
    assert (person.name, person.age) == ("Jo", 3), person


def chat(mode: instructor.Mode, prompt: str) -> Callable[[], None]:
    def ask() -> None:
        api = instructor.from_openai(openai.OpenAI(base_url=f"{job.URL}/v1", api_key="none", max_retries=0), mode=mode)
        wanted: Any = Iterable[Person] if mode in PARALLEL else Person
        check(
            api.chat.completions.create(
                model=job.MODEL, messages=[{"role": "user", "content": prompt}], response_model=wanted, max_retries=0
            )
        )

    ask.__name__ = mode.name.lower()
    return ask


def message(mode: instructor.Mode, prompt: str) -> Callable[[], None]:
    def ask() -> None:
        claude = anthropic.Anthropic(base_url=job.URL, api_key="none", max_retries=0)
        wanted: Any = Iterable[Person] if mode in PARALLEL else Person
        person = instructor.from_anthropic(claude, mode=mode).messages.create(
            model=job.MODEL, max_tokens=2000, messages=[{"role": "user", "content": prompt}], response_model=wanted,
            max_retries=0,
        )  # fmt: skip
        check(person)

    ask.__name__ = mode.name.lower()
    return ask


PARALLEL = (MODES.PARALLEL_TOOLS, MODES.ANTHROPIC_PARALLEL_TOOLS)
CALLS = [
    MODES.FUNCTIONS, MODES.TOOLS, MODES.TOOLS_STRICT, MODES.PARALLEL_TOOLS, MODES.RESPONSES_TOOLS,
    MODES.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
]  # fmt: skip
TEXTS = [MODES.JSON, MODES.JSON_O1, MODES.JSON_SCHEMA, MODES.MD_JSON]
CLAUDE_CALLS = [MODES.ANTHROPIC_TOOLS, MODES.ANTHROPIC_REASONING_TOOLS, MODES.ANTHROPIC_PARALLEL_TOOLS]
job.run(
    *(chat(mode, job.PERSON_CALL_PROMPT) for mode in CALLS),
    *(chat(mode, job.PERSON_PROMPT) for mode in TEXTS),
    *(message(mode, job.PERSON_CALL_PROMPT) for mode in CLAUDE_CALLS),
    message(MODES.ANTHROPIC_JSON, job.PERSON_PROMPT),
)
