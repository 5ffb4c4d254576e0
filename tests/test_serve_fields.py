"""Every field of OpenAI's requests, as OpenAI's own client lists them, is honoured, without influence on an answer, or
refused by name. Fields that a later client adds must at least be refused by name.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from serving import client, served_llm, serving, until
from test_tool_calls import QWEN, WEATHER
from toy_model import BOS, D_MODEL, EOS, ToyExecutor, idle

from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.serve import app as app_module
from powerinfer.serve.server import Server
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.grammar import Grammar

CHAT = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
TEXT_SCHEMA = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "boolean"}}}
FUNCTION = {"type": "function", **WEATHER["function"]}


class Seen(NamedTuple):
    """What a request led to: the parameters and prompt of its first answer, and what was sent."""

    params: SamplingParams
    prompt: list[int]
    answer: Any


Check = Callable[[Seen], object]


class Route(NamedTuple):
    """least: a body without anything optional; honoured: field -> (what to send, what must follow); ignored and
    refused: field -> a value."""

    path: str
    lists: Any  # the client's parameters
    least: Mapping[str, Any]
    honoured: Mapping[str, tuple[Mapping[str, Any], Check]]
    ignored: Mapping[str, Any]
    refused: Mapping[str, Any]


def of_params(name: str, value: Any) -> tuple[Mapping[str, Any], Check]:
    """A field of SamplingParams with the same name."""
    return {name: value}, lambda seen: getattr(seen.params, name) == value


SAMPLING: dict[str, tuple[Mapping[str, Any], Check]] = {
    "frequency_penalty": of_params("frequency_penalty", 0.5),
    "presence_penalty": of_params("presence_penalty", -0.5),
    "temperature": of_params("temperature", 0.25),
    "top_p": of_params("top_p", 0.5),
    "seed": of_params("seed", 7),
    "max_tokens": of_params("max_tokens", 3),
    "stop": ({"stop": "x"}, lambda seen: seen.params.stop == ("x",)),
    "logit_bias": ({"logit_bias": {"65": -100}}, lambda seen: seen.params.logit_bias == {65: -100.0}),
    "n": ({"n": 2}, lambda seen: [one["index"] for one in seen.answer["choices"]] == [0, 1]),
    "model": ({"model": "toy"}, lambda seen: seen.answer["model"] == "toy"),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda seen: seen.answer[-1]["usage"]["completion_tokens"] > 0,
    ),
    "stream": ({"stream": True}, lambda seen: len(seen.answer) > 1 and "usage" not in seen.answer[-1]),
}
WITHOUT_INFLUENCE = {
    "user": "me",
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {},
}

ROUTES = [
    Route(
        "/v1/chat/completions",
        chat_create_params.CompletionCreateParamsStreaming,
        {"messages": CHAT, "max_tokens": 4},
        SAMPLING
        | {
            "messages": (
                {"messages": [{"role": "user", "content": "abcd"}]}, lambda seen: b"abcd" in bytes(seen.prompt),
            ),
            "max_completion_tokens": (
                {"max_tokens": None, "max_completion_tokens": 5}, lambda seen: seen.params.max_tokens == 5,
            ),
            "logprobs": (
                {"logprobs": True}, lambda seen: len(seen.answer["choices"][0]["logprobs"]["content"]) > 0,
            ),
            "top_logprobs": ({"logprobs": True, "top_logprobs": 3}, lambda seen: seen.params.logprobs == 3),
            "response_format": ({"response_format": SCHEMA}, lambda seen: seen.params.grammar is not None),
            "tools": ({"tools": [WEATHER]}, lambda seen: b"get_weather" in bytes(seen.prompt)),
            "tool_choice": (
                {"tools": [WEATHER], "tool_choice": "required"},
                lambda seen: isinstance(seen.params.grammar, Grammar),
            ),
            "parallel_tool_calls": (
                {"tools": [WEATHER], "parallel_tool_calls": False},
                lambda seen: seen.params.grammar.ends is not None,
            ),
        },
        WITHOUT_INFLUENCE
        | {"store": True, "reasoning_effort": "low", "prediction": {"type": "content", "content": "x"}}
        | {"speculative.n_max": 4, "speculative.n_min": 0, "speculative.p_min": 0.5},
        {
            "audio": {"voice": "x"}, "function_call": {"name": "f"}, "functions": [{"name": "f"}],
            "modalities": ["audio"], "moderation": {"model": "x"}, "verbosity": "low", "web_search_options": {"x": 1},
        },
    ),
    Route(
        "/v1/completions",
        completion_create_params.CompletionCreateParamsStreaming,
        {"prompt": "hello", "max_tokens": 4},
        SAMPLING
        | {
            "prompt": ({"prompt": "abcd"}, lambda seen: bytes(seen.prompt) == b"abcd"),
            "echo": ({"echo": True}, lambda seen: seen.answer["choices"][0]["text"].startswith("hello")),
            "logprobs": (
                {"logprobs": 2, "echo": True},
                lambda seen: len(seen.answer["choices"][0]["logprobs"]["tokens"]) > len("hello"),
            ),
        },
        {"user": "me"},
        {"best_of": 2, "suffix": "x"},
    ),
    Route(
        "/v1/embeddings",
        embedding_create_params.EmbeddingCreateParams,
        {"input": "hello"},
        {
            "input": ({"input": ["a", "b"]}, lambda seen: len(seen.answer["data"]) == 2),
            "model": ({"model": "toy"}, lambda seen: seen.answer["model"] == "toy"),
            "encoding_format": (
                {"encoding_format": "base64"}, lambda seen: isinstance(seen.answer["data"][0]["embedding"], str),
            ),
            "dimensions": ({"dimensions": 2}, lambda seen: len(seen.answer["data"][0]["embedding"]) == 2 < D_MODEL),
        },
        {"user": "me"},
        {},
    ),
    Route(
        "/v1/responses",
        response_create_params.ResponseCreateParamsStreaming,
        {"input": "hello", "max_output_tokens": 4},
        {name: SAMPLING[name] for name in ("temperature", "top_p", "model")}
        | {
            "input": ({"input": "abcd"}, lambda seen: b"abcd" in bytes(seen.prompt)),
            "instructions": ({"instructions": "abcd"}, lambda seen: b"system: abcd" in bytes(seen.prompt)),
            "max_output_tokens": ({"max_output_tokens": 5}, lambda seen: seen.params.max_tokens == 5),
            "text": ({"text": TEXT_SCHEMA}, lambda seen: seen.params.grammar is not None),
            "tools": ({"tools": [FUNCTION]}, lambda seen: b"get_weather" in bytes(seen.prompt)),
            "tool_choice": (
                {"tools": [FUNCTION], "tool_choice": "required"},
                lambda seen: isinstance(seen.params.grammar, Grammar),
            ),
            "parallel_tool_calls": (
                {"tools": [FUNCTION], "parallel_tool_calls": False},
                lambda seen: seen.answer["parallel_tool_calls"] is False and seen.params.grammar.ends is not None,
            ),
            "stream": ({"stream": True}, lambda seen: seen.answer[0]["type"] == "response.created"),
            "reasoning": (
                {"reasoning": {"effort": "low"}},
                lambda seen: seen.answer["reasoning"] == {"effort": "low", "summary": None},
            ),
            "truncation": ({"truncation": "auto"}, lambda seen: seen.answer["truncation"] == "auto"),
            "metadata": ({"metadata": {"a": "b"}}, lambda seen: seen.answer["metadata"] == {"a": "b"}),
        },
        {name: value for name, value in WITHOUT_INFLUENCE.items() if name != "metadata"}
        | {"max_tool_calls": 1, "stream_options": {"include_obfuscation": True}},
        {
            "store": True, "background": True, "background_options": {"x": 1}, "previous_response_id": "resp_1",
            "conversation": "conv_1", "prompt": {"id": "x"},
            "include": ["message.output_text.logprobs"], "top_logprobs": 2, "moderation": {"model": "x"},
            "context_management": [{"type": "compaction"}], "access_programs": ["x"], "image": "x",
        },
    ),
]  # fmt: skip


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(route, name, value, id=f"{route.path}-{name}")
        for route in ROUTES
        for name, value in getattr(route, kind).items()
    ]


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = served_llm(ToyExecutor(n_pages=512), context=4096)
    llm.template = ChatTemplate("{{ tools or '' }}" + (llm.template.source if llm.template else "") + f"{{# {QWEN} #}}")
    return llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    with serving(llm) as server:
        yield server


@pytest.fixture
def asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], SamplingParams]]]:
    """What the engine is asked."""
    seen: list[tuple[list[int], SamplingParams]] = []
    whole = llm._runner.request

    def request(prompt: list[int], params: SamplingParams, **limits: Any) -> Any:
        seen.append((prompt, params))
        return whole(prompt, params, **limits)

    monkeypatch.setattr(llm._runner, "request", request)
    yield seen
    until(lambda: idle(llm))


def sent(server: Server, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    """The status and the answer; of a stream its events."""
    with client(server) as http:
        answer = http.post(path, json=dict(body))
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        return answer.status_code, [json.loads(line) for line in lines if line != "[DONE]"]
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("route", "name", "case"), cases("honoured"))
def test_a_field_is_honoured(server: Server, asked: list[Any], route: Route, name: str, case: Any) -> None:
    more, holds = case
    status, answer = sent(server, route.path, {**route.least, **more})
    assert status == 200, answer
    prompt, params = asked[0] if asked else ([], SamplingParams())
    assert holds(Seen(params, [token for token in prompt if token not in (BOS, EOS)], answer))


def comparable(answer: Any) -> Any:
    """Without what differs between two requests, and what only repeats a field."""
    return {name: value for name, value in answer.items() if name not in ("id", "created", "created_at", "output")} | {
        "texts": [part["text"] for item in answer.get("output", ()) for part in item["content"]]
    }


@pytest.mark.parametrize(("route", "name", "value"), cases("ignored"))
def test_a_field_does_not_change_the_answer(
    server: Server, asked: list[Any], route: Route, name: str, value: Any
) -> None:
    body = {**route.least} | ({} if route.path == "/v1/embeddings" else {"temperature": 0})
    status, plain = sent(server, route.path, body)
    assert status == 200, plain
    status, answer = sent(server, route.path, body | {name: value})
    assert status == 200 and comparable(answer) == comparable(plain), answer
    assert len(asked) in (0, 2) and asked[:1] == asked[1:]


@pytest.mark.parametrize(("route", "name", "value"), cases("refused"))
def test_a_field_is_refused_by_name(server: Server, route: Route, name: str, value: Any) -> None:
    status, answer = sent(server, route.path, {**route.least, name: value})
    assert status == 400, answer
    error = answer["error"]
    assert error["param"] == name and f"{name} is not supported" in error["message"]
    assert error["code"] == "unsupported_parameter"
    assert sent(server, route.path, {**route.least, name: None})[0] == 200, "null asks for nothing"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_no_field_of_the_client_is_forgotten(server: Server, route: Route) -> None:
    known = {*route.honoured, *route.ignored, *route.refused}
    listed = set(route.lists.__annotations__)
    assert len(listed & known) > 3
    for name in listed - known:  # of a later client
        status, answer = sent(server, route.path, {**route.least, name: {"x": 1}})
        assert status == 400 and name in answer["error"]["message"], name
    assert len(known) == len(route.honoured) + len(route.ignored) + len(route.refused), "each is in one table"


# ---------------------------------------------------------------- fields of vLLM that load generators send


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_seed_of_minus_one_is_none(server: Server, asked: list[Any], path: str) -> None:
    """As in llama-server."""
    least = next(route.least for route in ROUTES if route.path == path)
    for seed in (-1, 0):
        status, answer = sent(server, path, {**least, "seed": seed})
        assert status == 200, answer
    assert [params.seed for _, params, *_ in asked] == [None, 0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids(server: Server, asked: list[Any], path: str) -> None:
    least = next(route.least for route in ROUTES if route.path == path)
    body = {**least, "max_tokens": 30, "seed": 3, "n": 2, "ignore_eos": True, "return_token_ids": True}
    status, whole = sent(server, path, body)
    assert status == 200, whole
    status, chunks = sent(server, path, body | {"stream": True})
    assert status == 200, chunks
    prompt = asked[0][0]
    for index, choice in enumerate(whole["choices"]):
        assert choice["prompt_token_ids"] == prompt and len(choice["token_ids"]) == 30
        text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
        assert bytes(token for token in choice["token_ids"] if token < 256).decode(errors="replace") == text
        own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert [token for one in own for token in one.get("token_ids", ())] == choice["token_ids"]
        assert [one["prompt_token_ids"] for one in own if "prompt_token_ids" in one] == [prompt]
    assert "token_ids" not in json.dumps(sent(server, path, body | {"return_token_ids": False})[1])


def test_an_exact_number_of_tokens(server: Server) -> None:
    body = {"prompt": "hello", "max_tokens": 40, "min_tokens": 40, "ignore_eos": True}
    status, answer = sent(server, "/v1/completions", body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 40
    for more, says in (
        ({"ignore_eos": False}, "not supported but with ignore_eos: true"),
        ({"stop": "x"}, "nothing else that ends an answer"),
        ({"guided_regex": "a"}, "nothing else that ends an answer"),
        ({"max_tokens": 39}, "min_tokens 40 is more than max_tokens 39"),
        ({"max_tokens": None}, "min_tokens 40 is more than max_tokens 16"),
    ):
        status, answer = sent(server, "/v1/completions", body | more)
        assert status == 400 and answer["error"]["param"] == "min_tokens" and says in answer["error"]["message"], answer
    chat = {"messages": CHAT, "min_tokens": 3, "ignore_eos": True}
    assert sent(server, "/v1/chat/completions", chat | {"max_completion_tokens": 3})[0] == 200
    assert sent(server, "/v1/chat/completions", chat | {"max_completion_tokens": 2})[0] == 400


def test_the_tokenizer_as_lm_eval_asks(server: Server, llm: LLM) -> None:
    with client(server) as http:
        about = http.get("/tokenizer_info").json()
    assert llm.template is not None
    assert about == {
        "bos_token": llm.tokenizer.token_text(BOS), "eos_token": llm.tokenizer.token_text(EOS), "add_bos_token": False,
        "chat_template": llm.template.source, "model_max_length": 4096,
    }  # fmt: skip


# ---------------------------------------------------------------- pings


@pytest.mark.parametrize(
    ("path", "body", "ping"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, b": ping\n\n"),
        ("/v1/completions", {"prompt": "x" * 300}, b": ping\n\n"),
        ("/v1/responses", {"input": "x" * 300}, b"event: response.in_progress\n"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 4}, b"event: ping\n"),
    ],
)
def test_a_stream_is_kept_alive_while_its_prompt_is_read(
    path: str, body: Any, ping: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two comments come while the engine is in its first step; then the answer."""
    monkeypatch.setattr(app_module, "PING_SECONDS", 0.01)
    executor = ToyExecutor()
    executor.held = True
    llm = served_llm(executor, prefill_chunk=64)
    with serving(llm) as server:
        raw = json.dumps(body | {"stream": True}).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            text = b""
            while text.count(ping) < 2:
                text += received(connection)
            until(lambda: executor.begun == 1)
            assert b"200 OK" in text
            executor.release()
            while not text.endswith(b"0\r\n\r\n"):  # the end of a chunked answer
                text += received(connection)
        until(lambda: idle(llm))
    assert b'"error":{' not in text


def received(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    assert piece, "the connection has ended"
    return piece
