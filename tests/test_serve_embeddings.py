"""/v1/embeddings, by OpenAI's client, through a real socket."""

from __future__ import annotations

import base64
import json
import logging
import socket
from typing import Any

import numpy as np
import openai
import pytest
from serving import post, served_llm, serving, until
from toy_model import D_MODEL, ToyExecutor, idle, reference_embedding

from powerinfer.runtime.engine import LLM
from powerinfer.serve.server import Server

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TEXTS = ["the boats went out", "x", "one after another " * 9]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return served_llm(max_queue=4, max_batch=2)


def expected(texts: list[str]) -> np.ndarray:
    return np.stack([reference_embedding(list(text.encode())) for text in texts])


def test_the_client_of_openai(api: openai.OpenAI) -> None:
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"user": "me"}):
        answer = api.embeddings.create(model="toy", input=TEXTS, **more)  # type: ignore[arg-type]
        assert (answer.object, answer.model) == ("list", "toy")
        assert [(one.object, one.index) for one in answer.data] == [("embedding", n) for n in range(len(TEXTS))]
        found = [
            np.frombuffer(base64.b64decode(one.embedding), "<f4") if isinstance(one.embedding, str) else one.embedding
            for one in answer.data
        ]
        assert np.array_equal(np.asarray(found, np.float32), expected(TEXTS))
        count = sum(map(len, TEXTS))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)


@pytest.mark.parametrize("given", ["x", ["x"], [120], [[120]]])
def test_every_kind_of_input(server: Server, given: Any) -> None:
    status, answer = post(server, "/v1/embeddings", {"input": given})
    assert status == 200 and answer["model"] == "toy"
    assert np.array_equal(np.asarray([answer["data"][0]["embedding"]], np.float32), expected(["x"]))


def test_many_inputs_are_more_than_the_queue(server: Server) -> None:
    status, answer = post(server, "/v1/embeddings", {"input": ["a"] * 2048, "encoding_format": "base64"})
    assert status == 200 and len(answer["data"]) == 2048
    assert answer["usage"] == {"prompt_tokens": 2048, "total_tokens": 2048}


def test_fewer_dimensions(server: Server) -> None:
    whole = expected(TEXTS).astype(np.float64)
    for width in (1, 4, D_MODEL):
        status, answer = post(server, "/v1/embeddings", {"input": TEXTS, "dimensions": width})
        assert status == 200
        found = np.asarray([one["embedding"] for one in answer["data"]])
        wanted = whole[:, :width] / np.linalg.norm(whole[:, :width], axis=1, keepdims=True)
        assert np.allclose(found, wanted, atol=1e-7)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["x", ""]}, "input", "empty"),
        ({"input": [[1], []]}, "input", "empty"),
        ({"input": ["x"] * 2049}, "input", "at most 2048"),
        ({"input": [1, "x"]}, None, "valid"),
        ({"input": [999]}, "input", "token 999"),
        ({"input": [-1]}, None, "input.0: Input should be greater than or equal to 0"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "x", "dimensions": D_MODEL + 1}, "dimensions", f"at most the model's {D_MODEL}"),
        ({"input": "x", "dimension": 4}, "dimension", "unknown field"),
        ({"input": "x", "stream": True}, "stream", "unknown field"),
        ({"input": "x", "add_special_tokens": False}, "add_special_tokens", "not supported"),
    ],
)
def test_what_is_refused(server: Server, body: Any, param: str | None, says: str) -> None:
    status, answer = post(server, "/v1/embeddings", body)
    assert status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert says in error["message"] and (param is None or error["param"] == param)


def test_a_text_beyond_the_context_and_another_model(api: openai.OpenAI) -> None:
    said = "context length is 512 tokens. However, you requested at least 513 tokens"
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        api.embeddings.create(model="toy", input=["x", "y" * 513])
    assert caught.value.code == "context_length_exceeded"
    assert len(api.embeddings.create(model="toy", input="y" * 512).data) == 1
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model="other", input="x")


def test_a_model_without_embeddings(server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "why_no_embeddings", "it has none")
    status, answer = post(server, "/v1/embeddings", {"input": "x"})
    assert status == 400 and answer["error"]["message"] == "it has none"
    assert answer["error"]["code"] == "no_embeddings"


def test_the_log_has_the_number_of_tokens(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "powerinfer.serve")
    assert post(server, "/v1/embeddings", {"input": "secret"})[0] == 200

    def logged() -> list[dict[str, Any]]:  # the request of a test before this one may be logged late
        every = [one.facts for one in caplog.records]  # type: ignore[attr-defined]
        return [facts for facts in every if facts.get("prompt_tokens") == 6]

    until(logged)
    (facts,) = logged()
    assert (facts["path"], facts["status"]) == ("/v1/embeddings", 200)
    assert "secret" not in str(facts)


def test_a_client_that_leaves() -> None:
    executor = ToyExecutor()
    llm = served_llm(executor, max_batch=1, max_queue=1)
    executor.held = True
    with serving(llm) as server:
        body = json.dumps({"input": "a" * 300})
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as connection:
            connection.sendall(
                f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            executor.wait_for(0)
        until(lambda: not llm._runner._driver._commands.empty())
        executor.release()
        until(lambda: idle(llm))
        assert llm.stats().aborted == 1 and executor.begun == 1


def test_a_text_that_takes_too_long() -> None:
    llm = served_llm()
    with serving(llm, timeout=1e-6) as server:
        status, answer = post(server, "/v1/embeddings", {"input": "x"})
        assert status == 504 and answer["error"]["code"] == "timeout"
