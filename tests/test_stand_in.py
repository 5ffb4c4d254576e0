"""The stand-in of `make test-clients`, through OpenAI's client: it does what the script in a prompt says."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from clients.stand_in import TITLE, stand_in
from serving import ByteTokenizer
from toy_model import VOCAB

from powerinfer.runtime.engine import LLM

SCRIPT = 'Read. SCRIPT [{"call": "read", "arguments": {"path": "a"}}, {"say": "It says WORD."}] Thanks.'
TOOL: Any = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return stand_in(ByteTokenizer(), VOCAB, 4096)


def test_a_script_is_followed_to_its_end(api: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": SCRIPT}]
    with api.chat.completions.stream(model="toy", messages=messages, tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("read", {"path": "a"})
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "code word: blue\n"}]
    texts = []
    for _ in range(2):
        answer = api.chat.completions.create(model="toy", messages=messages, tools=[TOOL]).choices[0].message
        texts.append(answer.content)
        messages += [answer, {"role": "user", "content": "And then?"}]
    assert texts == ["It says blue.", "There is nothing left to do."]


def test_without_the_function_there_is_a_title(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="toy", messages=[{"role": "user", "content": SCRIPT}])
    assert answer.choices[0].message.content == TITLE
