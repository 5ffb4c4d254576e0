"""OpenAI's /v1/responses and Anthropic's /v1/messages, through the clients of both, through a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from pydantic import BaseModel
from serving import SlowExecutor, client, post, served_llm, serving, until
from test_serve_tools import CALL, CHAT, Scripted
from test_tool_calls import WEATHER
from toy_model import idle

from powerinfer.runtime.engine import LLM
from powerinfer.serve import app as app_module
from powerinfer.serve.server import Server

if TYPE_CHECKING:
    import anthropic  # by the tests that need it, for it takes a second

SCHEMA = WEATHER["function"]["parameters"]
TOOL: Any = {"type": "function", "name": "get_weather", "description": "The weather", "parameters": SCHEMA}
ANTHROPIC_TOOL: Any = {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}
OSLO = CALL.replace("Rome", "Oslo")
PROMPT = "user: hello\nassistant: "


@pytest.fixture(scope="module")
def llm() -> LLM:
    return served_llm(Scripted(n_pages=256), context=2048)


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as api:
        yield api


@pytest.fixture(autouse=True)
def script(llm: LLM) -> Iterator[Any]:
    """Sets what the model wants to write; until then it is free."""
    executor: Any = llm._runner._executor
    executor.mark = b"no prompt has this"

    def write(text: str) -> None:
        executor.script, executor.mark = text.encode(), Scripted.mark

    yield write
    until(lambda: idle(llm))


def prompt_tokens(server: Server, messages: list[dict[str, Any]], **more: Any) -> int:
    """Of the same conversation as a chat."""
    status, answer = post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1, **more})
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens"])


# ---------------------------------------------------------------- /v1/responses


def test_a_response_is_the_chat(api: openai.OpenAI) -> None:
    chat = api.chat.completions.create(model="toy", messages=CHAT, seed=3, temperature=1, top_p=0.9, max_tokens=20)  # type: ignore[arg-type]
    assert chat.choices[0].finish_reason == "length"
    more: Any = {"extra_body": {"seed": 3}, "temperature": 1, "top_p": 0.9, "max_output_tokens": 20}
    for given in ("hello", CHAT, [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]):
        answer = api.responses.create(model="toy", input=given, store=False, **more)  # type: ignore[arg-type]
        assert answer.output_text == chat.choices[0].message.content
        assert answer.status == "incomplete" and answer.incomplete_details
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[0].type == "message" and answer.output[0].status == "incomplete"
        assert answer.usage and chat.usage
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(PROMPT), 20)
        assert answer.usage.total_tokens == chat.usage.total_tokens
        assert (answer.object, answer.model, answer.temperature, answer.top_p) == ("response", "toy", 1, 0.9)
    assert api.responses.create(model="toy", input="hello", max_output_tokens=1).temperature == 0.8


def test_the_events_of_a_response(api: openai.OpenAI, script: Any) -> None:
    script("It is warm.")
    events = list(api.responses.create(model="toy", input="hello", max_output_tokens=30, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"} and len(kinds) > 12
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert last.response.output_text == text == "It is warm."
    assert last.response.status == "completed" and last.response.usage.output_tokens == len(text) + 1
    with api.responses.stream(model="toy", input="hello", max_output_tokens=30) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == text


def test_a_conversation_of_items(server: Server, api: openai.OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "short"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "20 C"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5 C"}]},
    ]  # fmt: skip
    answer = api.responses.create(model="toy", instructions="be", input=items, tools=[TOOL], max_output_tokens=1)
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}
        for n, city in ((1, "Rome"), (2, "Oslo"))
    ]
    chat = [
        {"role": "system", "content": "be"}, {"role": "system", "content": "short"},
        {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "20 C"},
        {"role": "tool", "tool_call_id": "c2", "content": "5 C"},
    ]  # fmt: skip
    function = {**TOOL}
    del function["type"]
    tools = [{"type": "function", "function": function}]
    assert answer.usage and answer.usage.input_tokens == prompt_tokens(server, chat, tools=tools)


def test_functions_of_a_response(api: openai.OpenAI, script: Any) -> None:
    script(f"Well. {CALL}\n{OSLO}")
    answer = api.responses.create(model="toy", input="hello", tools=[TOOL], max_output_tokens=400)
    text, *calls = answer.output
    assert answer.status == "completed" and text.type == "message" and answer.output_text == "Well."
    assert all(call.type == "function_call" and call.status == "completed" for call in calls)
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]  # type: ignore[union-attr]
    assert calls[0].call_id != calls[1].call_id  # type: ignore[union-attr]
    with api.responses.stream(model="toy", input="hello", tools=[TOOL], max_output_tokens=400) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 10 and pieces[0].output_index == 1 and pieces[-1].output_index == 2
    done: Any = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments)["city"] for event in done] == ["Rome", "Oslo"]
    # its own output is input again
    again = api.responses.create(
        model="toy", tools=[TOOL], tool_choice="none", max_output_tokens=1,
        input=[*CHAT, *(item.to_dict() for item in answer.output),
               *({"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls)],  # type: ignore[union-attr,list-item]
    )  # fmt: skip
    assert again.output


def test_a_demanded_function(api: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        answer = api.responses.create(
            model="toy", input="hello", tools=[TOOL], tool_choice=choice, max_output_tokens=900, temperature=1,  # type: ignore[arg-type]
            parallel_tool_calls=False, extra_body={"seed": 1},
        )  # fmt: skip
        (call,) = answer.output
        assert call.type == "function_call" and call.name == "get_weather"
    cut = api.responses.create(model="toy", input="hello", tools=[TOOL], tool_choice="required", max_output_tokens=70)
    assert cut.status == "incomplete" and cut.output[-1].status == "incomplete"  # type: ignore[union-attr]


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    born: int


def test_formats_of_a_response(api: openai.OpenAI, script: Any) -> None:
    script('{"name": "Ada", "born": 1815, "tags": 1}')
    answer = api.responses.parse(model="toy", input="hello", text_format=Person, max_output_tokens=200)
    person = answer.output_parsed
    assert person is not None and person.name == "Ada" and str(person.born).startswith("1815")
    script("{}")
    plain = api.responses.create(
        model="toy", input="hello", text={"format": {"type": "json_object"}}, max_output_tokens=50
    )
    assert plain.output_text == "{}" and plain.text and plain.text.format
    assert plain.text.format.type == "json_object"


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"store": True}, "store", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "middle"}, "truncation", "'auto' or 'disabled'"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "must be one of none, minimal"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"max_tokens": 3}, "max_tokens", "unknown field"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text, json_object or json_schema"),
        ({"text": {"format": 1}}, "text.format", "an object"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters", "not valid"),
        ({"tools": [{"type": "function", "name": "f", "x": 1}]}, "tools[0].x", "not supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"input": []}, None, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", "must be one of"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "no message"),
        ({"input": [{"type": "reasoning", "content": [{"type": "input_text", "text": "x"}]}]},
         "input[0].content[0].type", "not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "nothing is stored"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type", "not supported"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "missing"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 129}, None, "128"),
        ({"max_output_tokens": 0}, None, "max_output_tokens: it must be"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "maximum context length is"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_a_response_refuses(server: Server, more: Any, param: str | None, says: str) -> None:
    status, answer = post(server, "/v1/responses", {"input": "hello", "stream": True} | more)
    assert status == 400, answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert says in answer["error"]["message"]
    if param is not None:
        assert answer["error"]["param"] == param


def test_errors_of_responses(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        api.responses.create(model="other", input="hello")
    with pytest.raises(openai.BadRequestError, match="store is not supported"):
        api.responses.create(model="toy", input="hello", store=True)


# ---------------------------------------------------------------- /v1/messages


def test_a_message_is_the_chat(api: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    sampling = {"temperature": 1, "top_p": 0.9, "top_k": 40, "seed": 3}
    chat = api.chat.completions.create(model="toy", messages=CHAT, max_tokens=20, extra_body=sampling)  # type: ignore[arg-type]
    assert chat.choices[0].finish_reason == "length"
    for content in ("hello", [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]):
        answer = claude.messages.create(
            model="toy", messages=[{"role": "user", "content": content}], max_tokens=20, extra_body=sampling,  # type: ignore[typeddict-item]
            metadata={"user_id": "x"}, thinking={"type": "disabled"},
        )  # fmt: skip
        (block,) = answer.content
        assert block.type == "text" and block.text == chat.choices[0].message.content
        assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "max_tokens")
        assert answer.id.startswith("msg_") and answer.stop_sequence is None
        usage = answer.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(PROMPT) and usage.output_tokens == 20


def test_why_a_message_ends(claude: anthropic.Anthropic, script: Any) -> None:
    script("one STOP two")
    ask: Any = {"model": "toy", "messages": CHAT, "max_tokens": 40}
    answer = claude.messages.create(**ask)
    assert (answer.stop_reason, answer.content[0].text) == ("end_turn", "one STOP two")  # type: ignore[union-attr]
    answer = claude.messages.create(**ask, stop_sequences=["never", "STOP", "two"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert answer.content[0].text == "one "  # type: ignore[union-attr]
    answer = claude.messages.create(**ask, stop_sequences=["never"])
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    script("")
    assert claude.messages.create(**ask).content == []


def test_the_events_of_a_message(claude: anthropic.Anthropic, script: Any) -> None:
    script("It is warm.")
    ask: Any = {"model": "toy", "messages": CHAT, "max_tokens": 40, "stop_sequences": ["m."]}
    events: Any = list(claude.messages.create(**ask, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"} and len(kinds) > 8
    assert events[0].message.usage.input_tokens == len(PROMPT)
    assert (events[-2].delta.stop_reason, events[-2].delta.stop_sequence) == ("stop_sequence", "m.")
    with claude.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    whole = claude.messages.create(**ask)
    assert final.content[0].text == whole.content[0].text == "It is war"  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens == len("It is warm.")


def test_tools_of_a_message(claude: anthropic.Anthropic, script: Any) -> None:
    script(f"Well. {CALL}\n{OSLO}")
    ask: Any = {"model": "toy", "messages": CHAT, "tools": [ANTHROPIC_TOOL], "max_tokens": 400}
    answer = claude.messages.create(**ask)
    text, *uses = answer.content
    assert answer.stop_reason == "tool_use" and text.type == "text" and text.text == "Well."
    assert [(use.name, use.input["city"]) for use in uses] == [("get_weather", "Rome"), ("get_weather", "Oslo")]  # type: ignore[union-attr]
    with claude.messages.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.to_dict() | {"id": ""} for block in final.content[1:]] == [
        block.to_dict() | {"id": ""} for block in uses
    ]
    assert sum(event.type == "input_json" for event in events) > 10 and final.stop_reason == "tool_use"
    # the answer and the results are the next request's messages
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "20 C"} for use in uses]  # type: ignore[union-attr]
    again = claude.messages.create(**ask | {
        "messages": [*CHAT, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}],
        "tool_choice": {"type": "none"},
    })  # fmt: skip
    assert again.usage.input_tokens > len(PROMPT)


def test_one_tool_at_a_time(api: openai.OpenAI, claude: anthropic.Anthropic, script: Any) -> None:
    script(f"Well. {CALL}\n{OSLO}")
    ask: Any = {"model": "toy", "messages": CHAT, "tools": [ANTHROPIC_TOOL], "max_tokens": 400}
    ask["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    with claude.messages.stream(**ask) as stream:
        messages = [claude.messages.create(**ask), stream.get_final_message()]
    for message in messages:
        text, use = message.content
        assert text.type == "text" and text.text == "Well." and message.stop_reason == "tool_use"
        assert use.type == "tool_use" and use.input["city"] == "Rome"
    answer = api.responses.create(
        model="toy", input="hello", tools=[TOOL], max_output_tokens=400, parallel_tool_calls=False
    )
    assert [item.type for item in answer.output] == ["message", "function_call"] and answer.status == "completed"


def test_a_demanded_tool(claude: anthropic.Anthropic) -> None:
    ask: Any = {"model": "toy", "messages": CHAT, "tools": [ANTHROPIC_TOOL], "extra_body": {"seed": 1}}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        answer = claude.messages.create(**ask, max_tokens=900, tool_choice=choice)  # type: ignore[arg-type]
        (use,) = answer.content
        assert use.type == "tool_use" and use.name == "get_weather" and "city" in use.input
        assert answer.stop_reason == "tool_use"
    cut = claude.messages.create(**ask, max_tokens=70, tool_choice={"type": "any"})
    assert cut.stop_reason == "max_tokens" and cut.content == []  # its input is not complete


def test_a_message_in_a_format(claude: anthropic.Anthropic, script: Any) -> None:
    script('{"name": "Ada", "born": 1815, "tags": 1}')
    answer = claude.messages.parse(model="toy", messages=CHAT, max_tokens=200, output_format=Person)  # type: ignore[arg-type]
    assert answer.parsed_output is not None and answer.parsed_output.name == "Ada"


def test_the_tokens_of_a_message(server: Server, claude: anthropic.Anthropic) -> None:
    use = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Rome?"}, {"type": "text", "text": "Today."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}, use]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "no"}], "is_error": True},
            {"type": "text", "text": "And?"},
        ]},
    ]  # fmt: skip
    ask: Any = {"model": "toy", "messages": messages, "tools": [ANTHROPIC_TOOL], "system": "be brief"}
    count = claude.messages.count_tokens(**ask).input_tokens
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    chat = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "Rome?\nToday."},
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: no"}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    function = {"name": "get_weather", "description": "The weather", "parameters": SCHEMA}
    assert count == prompt_tokens(server, chat, tools=[{"type": "function", "function": function}])
    usage = claude.messages.create(**ask, max_tokens=1).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
    # what does not fit the context can be counted, too
    long: Any = [{"role": "user", "content": "x" * 3000}]
    assert claude.messages.count_tokens(model="toy", messages=long).input_tokens == len(PROMPT) - 5 + 3000


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "input length and `max_tokens` exceed context limit: 23 + 5000 > 2048, decrease input"),
        ({"thinking": {"type": "long"}}, "thinking.type must be enabled, disabled or adaptive"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"frequency_penalty": 1}, "unknown field"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system[0].type 'image' is not supported"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"input_schema": {"type": "object"}}]}, "tools[0].name is missing"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tool_choice": {"type": []}}, "tool_choice.type must be"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "boolean"),
        ({"output_config": {"effort": "much"}}, "output_config.effort must be one of none, minimal"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format must be"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role must be"),
        *(({"messages": [{"role": "user", "content": [{"type": kind, "x": {}}]}]}, f"type '{kind}' is not supported")
          for kind in ("image", "document", "thinking", "tool_use")),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": [{}]}]}]},
         "messages[0].content[0].citations is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0].type 'image' is not supported"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_a_message_refuses(server: Server, more: Any, says: str) -> None:
    body = {"messages": CHAT, "max_tokens": 9, "stream": True} | more
    status, answer = post(server, "/v1/messages", body)
    assert status == 400, answer
    assert answer.keys() == {"type", "error"} and answer["type"] == "error"
    assert answer["error"].keys() == {"type", "message"} and answer["error"]["type"] == "invalid_request_error"
    assert says in answer["error"]["message"]


def test_errors_of_messages(server: Server, claude: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="no model 'other'") as caught:
        claude.messages.create(model="other", messages=CHAT, max_tokens=1)  # type: ignore[arg-type]
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"
    with client(server) as http:
        for method, path, options, status in (
            ("GET", "/v1/messages", {}, 405),
            ("GET", "/v1/messages/nowhere", {}, 404),
            ("POST", "/v1/messages", {"content": b"{}"}, 415),
            ("POST", "/v1/messages", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
            ("POST", "/v1/messages/count_tokens", {"json": [1]}, 400),
            ("POST", "/v1/messages", {"content": b"x" * (9 << 20)}, 413),
        ):
            answer = http.request(method, path, **options)
            assert answer.status_code == status and answer.json()["type"] == "error", answer.text
        assert answer.json()["error"]["type"] == "request_too_large"


# ---------------------------------------------------------------- both


def test_errors_and_pings_in_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic

    monkeypatch.setattr(app_module, "PING_SECONDS", 0.01)
    llm = served_llm(SlowExecutor(0.05), context=2048)
    with serving(llm, timeout=0.4) as server, client(server) as http:
        with http.stream("POST", "/v1/messages", json={"messages": CHAT, "max_tokens": 1500, "stream": True}) as answer:
            text = answer.read().decode()
        assert 'event: ping\ndata: {"type": "ping"}\n\n' in text
        with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as claude:
            ask: Any = {"model": "toy", "messages": CHAT, "max_tokens": 1500}
            with pytest.raises(anthropic.APIStatusError, match=r"longer than 0.4 s"):
                list(claude.messages.create(**ask, stream=True))
            with pytest.raises(anthropic.APIStatusError) as caught:
                claude.messages.create(**ask)
            assert caught.value.status_code == 504
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
            last: Any = list(api.responses.create(model="toy", input="hello", stream=True))[-1]
        assert last.type == "response.failed" and last.response.status == "failed"
        assert "longer than 0.4 s" in last.response.error.message
        until(lambda: idle(llm))


@pytest.mark.parametrize("body", [{"messages": CHAT, "max_tokens": 1500}, {"input": "hello"}])
def test_a_client_that_leaves(body: dict[str, Any]) -> None:
    llm = served_llm(SlowExecutor(0.01), context=2048)
    path = "/v1/messages" if "messages" in body else "/v1/responses"
    with serving(llm) as server, client(server) as http:
        with http.stream("POST", path, json=body | {"stream": True, "temperature": 2}) as answer:
            next(answer.iter_lines())
        until(lambda: idle(llm), 5)
        figures = http.get("/metrics").text
    assert f'powerinfer_requests_total{{endpoint="{path}"' in figures


def test_the_key_in_anthropics_header(monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic

    monkeypatch.setenv("POWERINFER_API_KEY", "right")
    body = {"messages": CHAT, "max_tokens": 1}
    with serving(served_llm()) as server:
        for headers, status in (
            ({"x-api-key": "right", "anthropic-version": "2023-06-01"}, 200), ({"x-api-key": "wrong"}, 401),
            ({"authorization": "Bearer right"}, 200), ({"authorization": "Bearer wrong", "x-api-key": "right"}, 401),
            ({"x-api-key": ""}, 401), ({"x-api-key": "Bearer right"}, 401),
        ):  # fmt: skip
            assert post(server, "/v1/messages", body, headers=headers)[0] == status, headers
        for path in ("/v1/chat/completions", "/v1/messagesx"):  # it is of Anthropic's routes only
            assert post(server, path, body, headers={"x-api-key": "right"})[0] == 401
        with anthropic.Anthropic(base_url=server.url, api_key="right", max_retries=0) as claude:
            assert claude.messages.create(model="toy", **body).usage.output_tokens == 1  # type: ignore[call-overload]
        wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
        with wrong, pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(model="toy", **body)  # type: ignore[call-overload]
