"""Functions, formats and grammars over HTTP, through OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import openai
import pytest
from pydantic import BaseModel
from serving import client, post, served_llm
from test_tool_calls import ASKED, NOW, QWEN, TWO_CALLS, WEATHER
from toy_model import EOS, VOCAB, ToyExecutor

from powerinfer.devices import Batch
from powerinfer.runtime.engine import LLM
from powerinfer.serve.server import Server
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.tool_calls import ToolFormat

CHAT = [{"role": "user", "content": "hello"}]
TOOLS: Any = [WEATHER, NOW]


class Scripted(ToyExecutor):
    """Wants to write `script` after the prompt's last `mark`, and then to end; what a mask forbids costs it nothing."""

    script, mark = b"", b"assistant: "

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.ids = np.zeros(self.store.shape, np.int32)

    def written(self, text: bytes) -> bytes:
        """Of all text, what the model has written."""
        return text.rpartition(self.mark)[2]

    def forward(self, batch: Batch) -> np.ndarray:
        for token, position, row in zip(batch.tokens, batch.positions, batch.rows, strict=True):
            page = batch.page_table[row, position // self.page_size]
            self.ids[page, position % self.page_size] = token
        logits = super().forward(batch)
        for row, at in enumerate(batch.logit_rows.tolist()):
            count = int(batch.positions[at]) + 1
            pages = batch.page_table[batch.rows[at], : -(-count // self.page_size)]
            written = self.written(bytes(min(token, 255) for token in self.ids[pages].reshape(-1)[:count]))
            if self.script.startswith(written):
                logits[row, [*self.script, EOS][len(written)]] = 100
        return logits


@pytest.fixture(scope="module")
def llm() -> LLM:
    return served_llm(Scripted(n_pages=256), context=2048)


@pytest.fixture(autouse=True)
def script(llm: LLM) -> Iterator[Any]:
    """Sets what the model wants to write."""
    executor: Any = llm._runner._executor

    def write(text: str) -> None:
        executor.script = text.encode()

    write("")
    yield write


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>'


def test_a_model_that_calls(api: openai.OpenAI, script: Any) -> None:
    script(f"Let me see.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}")
    answer = api.chat.completions.create(model="toy", messages=CHAT, tools=TOOLS, max_tokens=400).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Let me see."
    calls: Any = answer.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)["city"]) for call in calls] == [
        ("get_weather", "Rome"), ("get_weather", "Oslo")]  # fmt: skip
    assert calls[0].id != calls[1].id and calls[0].type == "function"


def test_a_model_that_does_not_call(api: openai.OpenAI, script: Any) -> None:
    script("It is <tool> warm.")
    answer = api.chat.completions.create(model="toy", messages=CHAT, tools=TOOLS, max_tokens=99).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("stop", "It is <tool> warm.")
    assert answer.message.tool_calls is None


def test_streamed_calls(api: openai.OpenAI, script: Any) -> None:
    script(f"Well. {CALL}\n{CALL.replace('Rome', 'Oslo')}")
    with api.chat.completions.stream(model="toy", messages=CHAT, tools=TOOLS, max_tokens=400) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Well."
    calls: Any = final.message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 10, "arguments come in pieces"
    chunks: Any = [event.chunk for event in events if event.type == "chunk"]
    first = next(chunk.choices[0].delta.tool_calls[0] for chunk in chunks if chunk.choices[0].delta.tool_calls)
    assert (first.index, first.function.name, first.function.arguments) == (0, "get_weather", "")


@pytest.mark.parametrize("form", TWO_CALLS, ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [None, False])
def test_calls_that_are_not_parallel(
    api: openai.OpenAI, script: Any, monkeypatch: pytest.MonkeyPatch, form: ToolFormat, parallel: bool | None
) -> None:
    asked = {} if parallel is None else {"parallel_tool_calls": parallel}
    monkeypatch.setattr("powerinfer.serve.constraints.read_dialect", lambda template: form)
    script(TWO_CALLS[form])
    ask: Any = {"model": "toy", "messages": CHAT, "tools": TOOLS, "max_tokens": 400, "temperature": 0, **asked}
    plain = api.chat.completions.create(**ask)
    with api.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion()
    for answer in (plain.choices[0], streamed.choices[0]):
        calls: Any = answer.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [("now", "{}")] * (
            1 if parallel is False else 2
        )
        assert answer.finish_reason == "tool_calls" and not answer.message.content
    tokens = plain.usage.completion_tokens
    assert (tokens < len(TWO_CALLS[form])) == (parallel is False), "what follows the call is not generated"


def test_a_call_that_the_model_begins_is_held_to_the_schema(api: openai.OpenAI, script: Any) -> None:
    script('<tool_call>\n{"name": "get_weather", "arguments": {"city": "A city with a long name", "unit": "K"}}')
    answer = api.chat.completions.create(model="toy", messages=CHAT, tools=TOOLS, max_tokens=300, seed=1).choices[0]
    calls: Any = answer.message.tool_calls
    arguments = json.loads(calls[0].function.arguments)
    assert arguments["city"].startswith("A city w") and len(arguments["city"]) == 8
    assert arguments.get("unit") in (None, "C", "F")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_calls_that_are_demanded(api: openai.OpenAI, choice: Any) -> None:
    for seed in range(4):
        answer = api.chat.completions.create(
            model="toy", messages=CHAT, tools=TOOLS, tool_choice=choice, max_tokens=900, seed=seed, temperature=1,
            parallel_tool_calls=False,
        ).choices[0]  # fmt: skip
        assert answer.message.content is None
        (call,) = answer.message.tool_calls or ()
        names = ["now"] if isinstance(choice, dict) else ["get_weather", "now"]
        assert call.type == "function" and call.function.name in names
        if answer.finish_reason == "tool_calls":
            json.loads(call.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_call_that_is_cut_off_is_no_text(server: Server, script: Any, stream: bool) -> None:
    script(f"{CALL}\n{CALL}")
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": len(CALL) + 16, "temperature": 0}
    with client(server) as http:
        answer = http.post("/v1/chat/completions", json={**body, "stream": stream})
    assert answer.status_code == 200 and "tool_call>" not in answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
        assert len(choice["message"]["tool_calls"]) == 1


def test_no_choice_shows_the_model_no_functions(api: openai.OpenAI, script: Any) -> None:
    script("Plain.")
    answer = api.chat.completions.create(model="toy", messages=CHAT, tools=TOOLS, tool_choice="none", max_tokens=9)
    alone = api.chat.completions.create(model="toy", messages=CHAT, max_tokens=9)
    shown = api.chat.completions.create(model="toy", messages=CHAT, tools=TOOLS, max_tokens=9)
    assert answer.usage and alone.usage and shown.usage
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens < shown.usage.prompt_tokens


def test_a_conversation_with_results(server: Server) -> None:
    status, answer = post(server, "/apply-template", {"messages": ASKED})
    assert status == 200
    assert (
        '<tool_call>\n{"name":"get_weather","arguments":{"city":"Paris","unit":"C"}}\n</tool_call>' in answer["prompt"]
    )
    assert "user: <tool_response>\n20 C\n</tool_response>" in answer["prompt"]


def test_a_template_that_knows_functions(llm: LLM, api: openai.OpenAI, script: Any) -> None:
    before, executor = llm.template, llm._runner._executor
    llm.template = ChatTemplate(QWEN + "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}")
    executor.mark = b"<|im_start|>assistant\n"  # type: ignore[attr-defined]
    try:
        script(CALL)
        answer = api.chat.completions.create(model="toy", messages=ASKED, tools=TOOLS, max_tokens=300).choices[0]  # type: ignore[call-overload]
    finally:
        llm.template = before
        del executor.mark  # type: ignore[attr-defined]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls[0].function.name == "get_weather"


TAGGED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}{{ '\\n' }}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["text"],
        },
    },
}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_that_a_model_writes_as_text(llm: LLM, api: openai.OpenAI, script: Any, choice: str) -> None:
    before, executor = llm.template, llm._runner._executor
    llm.template = ChatTemplate(TAGGED)
    executor.mark = b"<|im_start|>assistant\n"  # type: ignore[attr-defined]
    text = 'if x < 3:\n    say("17")'
    ask: Any = {"model": "toy", "messages": ASKED, "tools": [NOTE], "tool_choice": choice, "max_tokens": 400}
    try:
        arguments = f"<parameter=text>\n{text}\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
        script(f"<tool_call>\n<function=note>\n{arguments}</function>\n</tool_call>")
        with api.chat.completions.stream(**ask, temperature=0) as stream:
            pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
            answer = stream.get_final_completion().choices[0]
    finally:
        llm.template = before
        del executor.mark  # type: ignore[attr-defined]
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    (call,) = answer.message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"text": text, "times": 2} and len(pieces) > len(text) / 4


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    born: int
    tags: list[Literal["x", "y"]]


def test_parse_with_a_pydantic_model(api: openai.OpenAI, script: Any) -> None:
    script('{"name": "Ada", "born": 1815, "tags": ["x", "z"]}')
    answer = api.chat.completions.parse(model="toy", messages=CHAT, response_format=Person, max_tokens=300, seed=2)
    person = answer.choices[0].message.parsed
    assert person is not None and person.name == "Ada" and person.born == 1815


def test_parse_of_calls(api: openai.OpenAI, script: Any) -> None:
    script('<tool_call>\n{"name": "Person", "arguments": {"name": "Grace", "born": 1906, "tags": []}}\n</tool_call>')
    answer = api.chat.completions.parse(
        model="toy", messages=CHAT, tools=[openai.pydantic_function_tool(Person)], max_tokens=300
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert calls[0].function.parsed_arguments == Person(name="Grace", born=1906, tags=[])


def test_a_format_beside_functions(api: openai.OpenAI, script: Any) -> None:
    ada = '{"name": "Ada", "born": 1, "tags": []}'
    answers = []
    for text in (f'<tool_call>\n{{"name": "Person", "arguments": {ada}}}\n</tool_call>', ada):
        script(text)
        tools = [openai.pydantic_function_tool(Person)]
        answers.append(api.chat.completions.parse(model="toy", messages=CHAT, tools=tools, response_format=Person))
    called, told = (answer.choices[0].message for answer in answers)
    assert called.tool_calls and called.tool_calls[0].function.parsed_arguments == told.parsed == Person(
        **json.loads(ada)
    )
    script('<tool_call>\n{"name": "Other", "arguments": {}}')  # no such function: only "Person" can follow
    answer = api.chat.completions.create(
        model="toy", messages=CHAT, tools=tools, max_tokens=40, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.tool_calls and answer.choices[0].message.tool_calls[0].function.name == "Person"  # type: ignore[union-attr]


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "{}"),
    ({"response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}}, '{"a":1}'),
    ({"json_schema": {"enum": ["é"]}}, '"é"'),
    ({"grammar": 'root ::= "yes" | "no"'}, "no"),
    ({"guided_json": {"const": 3}}, "3"),
    ({"guided_json": '{"const": 4}'}, "4"),
    ({"guided_regex": "a{3}"}, "aaa"),
    ({"guided_choice": ["one", "two"]}, "two"),
    ({"guided_grammar": 'root ::= "x"'}, "x"),
    ({"structured_outputs": {"regex": "b{2}"}}, "bb"),
    ({"structured_outputs": {"json_object": True}}, "{}"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "text"), FIELDS)
def test_fields_of_other_servers(server: Server, script: Any, path: str, fields: dict[str, Any], text: str) -> None:
    script(text)
    body = {"messages": CHAT} if "chat" in path else {"prompt": "assistant: "}
    status, answer = post(server, path, {**body, **fields, "max_tokens": 40, "temperature": 0})
    assert status == 200, answer
    choice = answer["choices"][0]
    assert (choice["message"]["content"] if "chat" in path else choice["text"]) == text
    assert choice["finish_reason"] == "stop"


def offering(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A function whose argument has a schema."""
    parameters = {"type": "object", "properties": {"p": schema}}
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, **more}}]}


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, None, "not"),
    ({"json_schema": {"uniqueItems": True, "type": "array"}}, None, "uniqueItems"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"grammar": "root = 1"}, None, "GBNF"),
    ({"guided_regex": "("}, None, "regular expression"),
    ({"guided_regex": "(?=a)b"}, None, "look-around"),
    ({"guided_regex": "a" * 200_000}, "guided_regex", "at most 131072"),
    ({"guided_regex": "a", "json_schema": {}}, "json_schema", "exclude each other"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "takes one of"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "takes one of"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0] must be"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "must be"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "no other format"),
    ({"tools": [WEATHER], "guided_regex": "a"}, None, "only JSON"),
    (offering({"not": {}}, strict=True), "tools[0]", "f: the JSON schema has keywords that are not supported: not"),
    (offering({"type": "wish"}), "tools[0]", "f: the JSON schema is not supported: Invalid type: wish (at p)"),
    (offering({"type": "string", "pattern": "("}), "tools[0]", "tools[0], f: "),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(server: Server, fields: dict[str, Any], param: str | None, message: str, stream: bool) -> None:
    status, answer = post(server, "/v1/chat/completions", {"messages": CHAT, **fields, "stream": stream})
    assert status == 400, answer
    assert answer["error"]["param"] == param and message in answer["error"]["message"]
    assert "Lark" not in answer["error"]["message"] or "grammar" in fields


def test_a_template_whose_calls_are_not_known(
    llm: LLM, server: Server, script: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before, llm.template = llm.template, ChatTemplate("{{ tools }}{{ messages[0].content }}assistant: ")
    try:
        script(CALL)
        status, answer = post(server, "/v1/chat/completions", {"messages": CHAT, "tools": [WEATHER]})
    finally:
        llm.template = before
    assert status == 200, answer
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert [record.getMessage() for record in caplog.records if "told in words" in record.getMessage()]


def test_a_demanded_call_has_a_grammar_of_the_whole_vocabulary(llm: LLM) -> None:
    assert llm._runner._grammars._vocabulary.mask_words == -(-VOCAB // 32)
