"""Requests as agents and libraries send them by default, and what the log says of what they ask in vain.

A field that asks for nothing is taken, and so is one without which the answer is the same.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import SlowExecutor, client, post, served_llm, serving, until
from test_serve_dialects import TOOL
from test_tool_calls import QWEN, WEATHER
from toy_model import ToyExecutor

from powerinfer.runtime.engine import LLM
from powerinfer.serve.server import Server
from powerinfer.text.chat import ChatTemplate

pytestmark = pytest.mark.usefixtures("nothing_is_left")

CHAT = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": CHAT},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = served_llm(ToyExecutor(n_pages=512), context=4096)
    llm.template = ChatTemplate("{{ tools or '' }}" + (llm.template.source if llm.template else "") + f"{{# {QWEN} #}}")
    return llm


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """What the log says, by event."""
    caplog.set_level(logging.INFO, "powerinfer.serve")
    yield lambda: {record.getMessage(): record.facts for record in caplog.records}  # type: ignore[attr-defined]


TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"client_metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"]}),
    ("/v1/responses", {"include": ["file_search_call.results"], "stream_options": {"include_obfuscation": True}}),
    ("/v1/messages", {"thread": {"type": "create"}}),
    ("/v1/messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    ("/v1/responses", {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "parsed": 1}]},
                                 {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}",
                                  "parsed_arguments": {"a": 1}}, {"role": "user", "content": "hello"}]}),
    ("/v1/messages/count_tokens", {"context_management": {"edits": []}, "thread": {"type": "create"}}),
    ("/v1/messages", {"speed": "fast", "diagnostics": {"x": 1}, "model": ""}),
    ("/v1/chat/completions", {"model": "", "prediction": {"type": "content", "content": "x"}}),
    ("/v1/chat/completions", {"max_tokens": 2.0, "top_k": 40.0, "n": 1.0, "seed": 3.0}),
    ("/v1/completions", {"max_tokens": 2.0, "logprobs": 1.0}),
    ("/v1/messages", {"max_tokens": 16.0, "top_k": 5.0}),
    *(("/v1/chat/completions", {"messages": [*CHAT, {"role": "assistant", **more}, *CHAT]}) for more in (
        {"content": "x", "provider_specific_fields": {"x": 1}, "annotations": [{"x": 1}]},
        {"content": "x", "cache_control": {"type": "ephemeral"}, "reasoning_details": [{"type": "reasoning.text"}]},
        {"content": None, "refusal": "no"},
        {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]},
        {"content": [{"type": "refusal", "refusal": "no"}]},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), TAKEN, ids=lambda value: json.dumps(value)[:60])
def test_what_asks_for_nothing_is_taken(server: Server, path: str, more: dict[str, Any]) -> None:
    status, answer = post(server, path, LEAST[path] | more)
    assert status == 200, answer


def test_a_thought_by_reference_is_left_out(server: Server, logged: Any) -> None:
    """As the AI SDK sends it: what it refers to is not here, and the rest of the conversation is."""
    given = [{"role": "user", "content": "hello"}, {"type": "item_reference", "id": "rs_resp_1_0"},
             {"role": "assistant", "content": "x"}, {"role": "user", "content": "hello"}]  # fmt: skip
    status, answer = post(server, "/v1/responses", LEAST["/v1/responses"] | {"input": given})
    assert status == 200, answer
    assert logged()["thoughts are left out that were sent by reference: nothing is stored"]["count"] == 1
    given[1]["id"] = "msg_resp_1_0"
    status, answer = post(server, "/v1/responses", LEAST["/v1/responses"] | {"input": given})
    assert status == 400 and "nothing is stored" in answer["error"]["message"]


@pytest.mark.parametrize("more", [
    {"context_management": {"edits": 5}}, {"context_management": {"edits": {"type": "clear_thinking"}}},
    {"tools": [{"name": ["f"], "defer_loading": True, "input_schema": {}}, {"type": "tool_search_tool_regex"}]},
    {"tools": [{"name": ["f"], "defer_loading": False, "input_schema": {}}]},
])  # fmt: skip
def test_what_is_of_another_type_is_refused(server: Server, more: dict[str, Any]) -> None:
    status, answer = post(server, "/v1/messages", LEAST["/v1/messages"] | more)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_a_deferred_tool_without_a_name_is_not_offered(server: Server) -> None:
    tools = [{"name": ["f"], "defer_loading": True, "input_schema": {}}]
    assert post(server, "/v1/messages", LEAST["/v1/messages"] | {"tools": tools})[0] == 200


def test_a_thread_that_goes_on_is_refused_as_tool_runners_know_it(server: Server) -> None:
    """Both SDKs' then send the whole conversation."""
    status, answer = post(server, "/v1/messages", LEAST["/v1/messages"] | {"thread": {"type": "continue"}})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert answer["error"]["details"] == {"error_code": "thread_not_found"}


def test_deferred_tools_are_told_of_once_a_result_refers_to_them(server: Server) -> None:
    """As Claude Code has most of its own, to save tokens."""
    find, read = ({"name": name, "input_schema": {"type": "object"}} for name in ("find", "read"))
    deferred, search = {**read, "defer_loading": True}, {"type": "tool_search_tool_regex_20251119", "name": "search"}
    asked: list[dict[str, Any]] = [
        *CHAT,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "find", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
            {"type": "tool_reference", "tool_name": "read"}]}]},
    ]  # fmt: skip

    def count(messages: list[Any], *tools: dict[str, Any]) -> int:
        status, answer = post(server, "/v1/messages/count_tokens", {"messages": messages, "tools": tools})
        assert status == 200, answer
        return int(answer["input_tokens"])

    assert count(CHAT, find, deferred) == count(CHAT, find) < count(CHAT, find, read)
    assert count(asked, find, deferred) == count(asked, find, read) > count(asked, find)
    assert count(CHAT, search, deferred) == count(CHAT, read), "the server has no search"


def test_a_refusal_is_what_the_assistant_said(server: Server) -> None:
    for message in ({"refusal": "I shall not"}, {"content": [{"type": "refusal", "refusal": "I shall not"}]}):
        turns = [*CHAT, {"role": "assistant", **message}, *CHAT]
        status, answer = post(server, "/apply-template", {"messages": turns})
        assert status == 200 and "assistant: I shall not\n" in answer["prompt"], answer


def test_a_refusal_among_the_items_of_a_response(server: Server) -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    status, answer = post(server, "/v1/responses", LEAST["/v1/responses"] | {"input": [*CHAT, said, *CHAT]})
    assert status == 200, answer


def test_a_field_without_effect_is_logged(server: Server, logged: Any) -> None:
    assert post(server, "/v1/messages", LEAST["/v1/messages"] | {"speed": "fast"})[0] == 200
    until(lambda: "request" in logged())
    lines = logged()
    assert lines["a field has no effect"]["field"] == "speed"
    assert lines["a field has no effect"]["request_id"] == lines["request"]["request_id"]


@pytest.mark.parametrize(
    ("path", "more", "types"),
    [
        ("/v1/responses", [{"type": "web_search", "external_web_access": False}], ["web_search"]),
        ("/v1/responses", [{"type": "namespace", "name": "n", "tools": [TOOL]}, {"type": "custom", "name": "patch"},
                           {"type": "local_shell"}], ["custom", "local_shell", "namespace"]),
        ("/v1/messages", [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "w"}],
         ["bash_20250124", "web_search_20250305"]),
        ("/v1/chat/completions", [{"type": "custom", "custom": {"name": "x"}}], ["custom"]),
    ],
)  # fmt: skip
def test_tools_that_are_no_functions_are_left_out(
    server: Server, logged: Any, path: str, more: list[Any], types: list[str]
) -> None:
    function: dict[str, Any] = {
        "/v1/responses": TOOL,
        "/v1/messages": {"name": "get_weather", "input_schema": {"type": "object"}},
        "/v1/chat/completions": WEATHER,
    }[path]
    status, answer = post(server, path, LEAST[path] | {"tools": [*more, function]})
    assert status == 200, answer
    assert logged()["tools that are no functions are left out"]["types"] == types
    # nothing is left to be called
    demanded = {"type": "any"} if path == "/v1/messages" else "required"
    status, answer = post(server, path, LEAST[path] | {"tools": more, "tool_choice": demanded})
    assert status == 400 and "needs tools" in answer["error"]["message"]


def test_what_is_not_enforced_is_logged(server: Server, logged: Any) -> None:
    parameters = {"type": "object", "properties": {"p": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    status, answer = post(server, "/v1/chat/completions", LEAST["/v1/chat/completions"] | {"tools": [tool]})
    assert status == 200, answer
    assert logged()["schemas are not enforced as a whole"]["left_out"] == ["f: p: uniqueItems"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
def test_a_demanded_call_beside_a_format_of_texts(server: Server, path: str) -> None:
    """As instructor asks: the format is of texts, and there will be none."""
    tool: dict[str, Any] = {"name": "f", "description": "x"}
    more: dict[str, Any] = {
        "/v1/responses": {
            "tools": [{"type": "function", **tool, "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        },
        "/v1/messages": {
            "tools": [{**tool, "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        "/v1/chat/completions": {
            "tools": [{"type": "function", "function": {**tool, "parameters": SCHEMA}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    }[path]
    status, answer = post(server, path, LEAST[path] | more)
    assert status == 200, answer


# ---------------------------------------------------------------- refusals in the words of each API


@pytest.mark.parametrize(
    ("path", "more", "param", "says"),
    [
        ("/v1/chat/completions", {"repeat_penalty": 1.1}, "repeat_penalty", "use repetition_penalty"),
        ("/v1/completions", {"num_predict": 5}, "num_predict", "use max_tokens"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions", "use tools"),
        ("/v1/chat/completions", {"reasoning_effort": "huge"}, "reasoning_effort", "xhigh, max; not 'huge'"),
        ("/v1/chat/completions", {"format": "json"}, "format", "use response_format"),
        ("/v1/chat/completions", {"system": "x"}, "system", "use messages"),
        ("/v1/responses", {"response_format": {"type": "text"}}, "response_format", "use text.format"),
        ("/v1/responses", {"reasoning_effort": "low"}, "reasoning_effort", "use reasoning.effort"),
        ("/v1/responses", {"reasoning_budget": 5}, "reasoning_budget", "use reasoning.max_tokens"),
        ("/v1/responses", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function",
         "write name, description and parameters beside type"),
        ("/v1/messages", {"stop": ["x"]}, None, "use stop_sequences"),
        ("/v1/messages", {"reasoning_effort": "low"}, None, "use output_config.effort"),
        ("/v1/messages", {"reasoning_budget": 5}, None, "use thinking.budget_tokens"),
        ("/v1/messages", {"tools": [{"type": "function", "function": {"name": "f"}}]}, None,
         "write name, description and input_schema beside type"),
        ("/v1/chat/completions", {"max_tokens": 2.5}, "max_tokens", "integer"),
        ("/v1/chat/completions", {"logit_bias": {"99999": 1}}, "logit_bias", "token 99999"),
        ("/v1/chat/completions",
         {"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"name": 3, "arguments": "{}"}}]}]},
         "messages[1].tool_calls[0]", "must have a function with a name"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: it must be"),
        ("/v1/responses", {"max_output_tokens": 5000}, "max_output_tokens", "lower max_output_tokens"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "text.format."),
        ("/v1/responses", {"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name must have"),
        ("/v1/messages", {"tools": [{"name": "a b", "input_schema": {}}]}, None, "tools[0].name must have"),
        ("/v1/messages", {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, None, "tools[0].input_schema "),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, None, 'tool_choice "any" needs tools'),
        ("/v1/messages", {"thread": {"type": "fork"}}, None, "thread.type 'fork' is not supported"),
        ("/v1/messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, None,
         "context_management is not supported"),
        *(("/v1/messages", {"messages": [{"role": "user", "content": [{"type": kind, **more}]}]}, None,
           f"type '{kind}' is not supported: this model takes text") for kind, more in (
            ("image", {"source": {"type": "base64"}}), ("document", {"source": {"type": "text"}}))),
        *(("/v1/responses", {"input": [{"type": kind, **more}]}, "input[0].type", f"'{kind}' is not supported")
          for kind, more in (("custom_tool_call", {"call_id": "c", "name": "n", "input": "i"}),
                             ("local_shell_call", {"action": {"x": 1}}), ("compaction", {"encrypted_content": "x"}))),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_refusal_is_in_the_words_of_its_api(
    server: Server, path: str, more: dict[str, Any], param: str | None, says: str
) -> None:
    status, answer = post(server, path, LEAST[path] | more)
    assert status == 400, answer
    assert says in answer["error"]["message"] and answer["error"].get("param") == param
    assert "max_tokens " not in answer["error"]["message"] or path != "/v1/responses"


def test_a_context_that_is_full(server: Server) -> None:
    """Claude Code takes the numbers out of the first message, and asks again for as many tokens as fit."""
    status, answer = post(server, "/v1/messages", LEAST["/v1/messages"] | {"max_tokens": 5000})
    assert status == 400
    assert answer["error"]["message"].startswith("input length and `max_tokens` exceed context limit: 23 + 5000 > 4096")
    long = [{"role": "user", "content": "x" * 4100}]
    status, answer = post(server, "/v1/messages", {"messages": long, "max_tokens": 5})
    assert status == 400 and answer["error"]["message"] == "prompt is too long: at least 4100 tokens > 4096 maximum"
    assert answer["error"]["type"] == "invalid_request_error"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as api,
        pytest.raises(openai.BadRequestError, match=r"This model's maximum context length is 4096 tokens") as caught,
    ):
        api.chat.completions.create(model="toy", messages=long, max_tokens=5)  # type: ignore[arg-type]
    assert caught.value.code == "context_length_exceeded"


# ---------------------------------------------------------------- HTTP


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", "/metrics", "/nowhere", "/v1/completions"])
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    with client(server) as http:
        head, get = http.head(path), http.get(path)
        assert head.status_code == get.status_code and head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
        assert http.get("/health").status_code == 200, "the connection goes on"


def test_a_slash_behind_an_address(server: Server) -> None:
    with client(server) as http:
        assert http.get("/health/").status_code == 200
        assert http.post("/v1/completions/", json=LEAST["/v1/completions"]).status_code == 200


def test_a_body_that_is_coded(server: Server) -> None:
    body = json.dumps(LEAST["/v1/completions"]).encode()
    headers = {"Content-Type": "application/json"}
    with client(server) as http:
        for coding, data, status in (("gzip", gzip.compress(body), 415), ("identity", body, 200)):
            answer = http.post("/v1/completions", content=data, headers={**headers, "Content-Encoding": coding})
            assert answer.status_code == status, answer.text
            assert status == 200 or "Content-Encoding" in answer.json()["error"]["message"]


def test_the_id_of_a_request_by_anthropic_s_name(server: Server) -> None:
    with client(server) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = http.post(path, json=LEAST[path])
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert "request-id" not in http.get("/health").headers


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", "authorization,content-type,x-stainless-lang,x-stainless-retry-count"),
        ("/v1/messages", "x-api-key,anthropic-version,anthropic-dangerous-direct-browser-access,anthropic-beta"),
    ],
)
def test_the_official_clients_in_a_browser(path: str, asked: str) -> None:
    origin = "https://a.example"
    question = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    with serving(served_llm(), cors=[origin]) as other, client(other) as http:
        answer = http.options(path, headers={**question, "Origin": origin})
        assert answer.status_code == 200
        assert {*answer.headers["access-control-allow-headers"].split(",")} >= {*asked.split(",")}
        foreign = http.options(path, headers={**question, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in foreign.headers


def test_the_cache_is_known_when_a_message_begins(server: Server) -> None:
    long = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 4}]
    body = {"messages": long, "max_tokens": 2, "stream": True}
    found = []
    for _ in range(2):
        with client(server) as http:
            lines = http.post("/v1/messages", json=body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        first = events[0]["message"]["usage"]
        last = next(one["usage"] for one in events if one["type"] == "message_delta")
        assert first["cache_read_input_tokens"] == last["cache_read_input_tokens"]
        assert first["input_tokens"] == last["input_tokens"]
        found.append(first["cache_read_input_tokens"])
    assert found[1] > 0


def test_parts_of_characters_have_names_of_their_own(server: Server) -> None:
    body = {"prompt": "é😀", "max_tokens": 0, "echo": True, "logprobs": 5}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    scores = answer["choices"][0]["logprobs"]
    assert scores["tokens"] == [f"bytes:\\x{byte:02x}" for byte in "é😀".encode()]
    for name, own, top in zip(*(scores[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top is None or top[name] == own


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/completions", {"prompt": "x"}, '"code":"aborted"}}\n\ndata: [DONE]\n\n'),
        ("/v1/responses", {"input": "x"}, '"type":"response.failed"'),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 4000}, '"type":"overloaded_error"'),
    ],
)
def test_a_stream_that_the_end_of_the_server_breaks_off(path: str, body: dict[str, Any], last: str) -> None:
    least = {"/v1/completions": {"max_tokens": 4000, "ignore_eos": True}}.get(path, {})
    llm = served_llm(SlowExecutor(0.05, n_pages=512), context=4096)
    with (
        serving(llm, drain=0.1) as server,
        client(server) as http,
        http.stream("POST", path, json={**body, **least, "stream": True, "seed": 5}) as answer,
    ):
        pieces = answer.iter_text()
        text = next(pieces)
        server.should_exit = True
        text += "".join(pieces)
        assert last in text.rpartition("data: {")[2], text[-300:]
