"""Prompts that are too long: refused with both numbers, or shortened as far as the request asks for it."""

from __future__ import annotations

import logging
import re
from itertools import pairwise
from typing import Any

import numpy as np
import openai
import pytest
from serving import post, served_llm, until
from toy_model import BOS, ToyTokenizer, reference_embedding, reference_greedy

from powerinfer.runtime.engine import LLM
from powerinfer.serve.server import Server
from powerinfer.text.chat import drop_oldest

pytestmark = pytest.mark.usefixtures("nothing_is_left")

CONTEXT = 256


# ---------------------------------------------------------------- turns


def lengths(messages: Any) -> list[int]:
    """An encoding in which a message has as many tokens as its content says."""
    return [0] * sum(int(message["content"]) for message in messages)


def talk(*turns: str) -> list[dict[str, str]]:
    """Messages as "s10" (system), "u10" (user), "a10" (assistant), "t10" (tool)."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[one[0]], "content": one[1:]} for one in turns]


@pytest.mark.parametrize(
    ("messages", "limit", "kept", "dropped"),
    [
        ("u10", 10, "u10", 0),
        ("u10", 9, "u10", 0),
        ("s5 u10 a10 u10", 35, "s5 u10 a10 u10", 0),
        ("s5 u10 a10 u10", 34, "s5 u10", 1),
        ("s5 u10 a10 u10", 15, "s5 u10", 1),
        ("s5 u10 a10 u10", 14, "s5 u10", 1),
        ("s5 u1 a1 u2 a2 u3 a3 u4", 19, "s5 u2 a2 u3 a3 u4", 1),
        ("s5 u1 a1 u2 a2 u3 a3 u4", 18, "s5 u3 a3 u4", 2),
        ("s5 u1 a1 u2 a2 u3 a3 u4", 15, "s5 u3 a3 u4", 2),
        ("s5 u1 a1 u2 a2 u3 a3 u4", 0, "s5 u4", 3),
        ("s2 s3 u1 a1 u2", 7, "s2 s3 u2", 1),
        ("u1 a1 t1 a1 u2 a1 t9", 12, "u2 a1 t9", 1),
        ("u1 a1 t1 a1 u2 a1 t9", 1, "u2 a1 t9", 1),
        ("a9 u1 a1 u2", 4, "u1 a1 u2", 1),
        ("u1 u2 u3", 5, "u2 u3", 1),
        ("u1 s4 a1 u2", 3, "u2", 1),
        ("s9", 1, "s9", 0),
        ("s9 a1", 1, "s9 a1", 0),
    ],
)
def test_the_oldest_turns_are_left_out(messages: str, limit: int, kept: str, dropped: int) -> None:
    given = talk(*messages.split())
    found, prompt, turns = drop_oldest(given, lengths, limit)
    assert (found, prompt, turns) == (talk(*kept.split()), lengths(talk(*kept.split())), dropped)


def test_as_few_turns_as_possible_whatever_their_number() -> None:
    for turns in range(1, 12):
        given = talk(*(["s3"] + [f"{who}{n % 4 + 1}" for n in range(turns) for who in "ua"] + ["u2"]))
        sizes = [len(lengths(given[:1] + given[1 + 2 * n :])) for n in range(turns + 1)]
        for limit in range(sizes[0] + 2):
            calls = []

            def encode(messages: Any, calls: list[Any] = calls) -> list[int]:
                calls.append(messages)
                return lengths(messages)

            _, prompt, dropped = drop_oldest(given, encode, limit)
            wanted = next((n for n, size in enumerate(sizes) if size <= limit), turns)
            assert dropped == wanted and len(prompt) == sizes[wanted]
            assert len(calls) <= 3 + turns.bit_length()
    assert all(before > after for before, after in pairwise(sizes))


# ---------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def llm() -> LLM:
    return served_llm(context=CONTEXT)


def answered(text: str, max_tokens: int) -> str:
    return ToyTokenizer().decode(reference_greedy(list(text.encode()), max_tokens))


SYSTEM = {"role": "system", "content": "be brief"}
TURNS = [{"role": role, "content": f"{role} {n} " * 4} for n in range(8) for role in ("user", "assistant")]
LAST = {"role": "user", "content": "and now?"}
LONG = [SYSTEM, *TURNS, LAST]


def written(messages: list[dict[str, str]]) -> str:
    return "".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant: "


def fitting(limit: int) -> list[dict[str, str]]:
    return next(cut for n in range(9) if len(written(cut := [SYSTEM, *TURNS[2 * n :], LAST])) <= limit)


def test_nothing_is_cut_unasked(server: Server) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": LONG, "max_tokens": 9}),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 9}),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 9, "truncation": "disabled"}),
        ("/v1/messages", {"system": "x", "messages": [*TURNS, LAST], "max_tokens": 9}),
        ("/v1/completions", {"prompt": written(LONG), "max_tokens": 9}),
    ):
        status, answer = post(server, path, body)
        assert status == 400, answer
        said = answer["error"]["message"]
        if path == "/v1/messages":
            assert re.fullmatch(rf"prompt is too long: at least \d+ tokens > {CONTEXT} maximum", said)
        else:
            assert said.startswith(f"This model's maximum context length is {CONTEXT} tokens. However, you requested ")
            assert "in the prompt, 9 in the completion" in said


@pytest.mark.parametrize("max_tokens", [9, 60, None])
def test_the_oldest_turns_of_a_chat(server: Server, max_tokens: int | None) -> None:
    kept = fitting(CONTEXT - (max_tokens or CONTEXT // 8 + 1))
    assert SYSTEM in kept and LAST in kept and 2 < len(kept) < len(LONG)
    more = {} if max_tokens is None else {"max_tokens": max_tokens}
    body = {"messages": LONG, "temperature": 0, "truncate_prompt_tokens": -1, **more}
    status, answer = post(server, "/v1/chat/completions", body)
    assert status == 200, answer
    prompt = written(kept)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == answered(prompt, max_tokens or CONTEXT - len(prompt))


def test_the_client_of_openai_and_responses(server: Server) -> None:
    kept = written(fitting(CONTEXT - 9))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
        answer = api.responses.create(
            model="toy",
            input=LONG,
            truncation="auto",
            max_output_tokens=9,
            temperature=0,  # type: ignore[arg-type]
        )
    assert answer.truncation == "auto" and answer.output_text == answered(kept, 9)
    assert answer.usage is not None and answer.usage.input_tokens == len(kept)


def test_a_number_of_tokens(server: Server) -> None:
    for limit in (220, 150, len(written([SYSTEM, LAST]))):
        body = {"messages": LONG, "max_tokens": 5, "temperature": 0, "truncate_prompt_tokens": limit}
        status, answer = post(server, "/v1/chat/completions", body)
        assert status == 200 and answer["choices"][0]["message"]["content"] == answered(written(fitting(limit)), 5)
    short = len(written([SYSTEM, LAST])) - 1
    status, answer = post(server, "/v1/chat/completions", body | {"truncate_prompt_tokens": short})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert f"{short + 1} tokens, more than truncate_prompt_tokens {short}" in answer["error"]["message"]


def test_a_last_turn_that_does_not_fit(server: Server) -> None:
    messages = [*TURNS, {"role": "user", "content": "x" * 300}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages, "truncate_prompt_tokens": -1, "max_tokens": 5}),
        ("/v1/responses", {"input": messages, "truncation": "auto", "max_output_tokens": 5}),
    ):
        status, answer = post(server, path, body)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
        assert "in the prompt, 5 in the completion" in answer["error"]["message"]


def test_the_log_says_how_many(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "powerinfer.serve")
    for more in ({"truncate_prompt_tokens": -1, "messages": LONG}, {"messages": [LAST]}):
        assert post(server, "/v1/chat/completions", {"max_tokens": 9, **more})[0] == 200
    until(lambda: len(caplog.records) == 2)
    facts: list[dict[str, Any]] = [record.facts for record in caplog.records]  # type: ignore[attr-defined]
    left = len(TURNS) // 2 - (len(fitting(CONTEXT - 9)) - 2) // 2
    assert facts[0]["dropped_turns"] == left and "dropped_turns" not in facts[1]


def test_the_end_of_a_text(server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(LONG)
    for asked, max_tokens, kept in ((-1, 9, CONTEXT - 9), (100, 5, 100), (len(text) + 5, None, None)):
        body = {
            "prompt": [text, text[:50]],
            "temperature": 0,
            "truncate_prompt_tokens": asked,
            "max_tokens": max_tokens,
        }
        status, answer = post(server, "/v1/completions", body)
        if kept is None:
            assert status == 400
            continue
        wanted = [answered(text[-kept:], max_tokens), answered(text[:50][-kept:], max_tokens)]
        assert status == 200 and [one["text"] for one in answer["choices"]] == wanted
    monkeypatch.setattr(llm.tokenizer, "add_bos", True)
    body = {"prompt": text, "temperature": 0, "truncate_prompt_tokens": 20, "max_tokens": 7}
    status, answer = post(server, "/v1/completions", body)
    start = [BOS, *text[-19:].encode()]
    assert status == 200 and answer["choices"][0]["text"] == ToyTokenizer().decode(reference_greedy(start, 7))
    assert answer["usage"]["prompt_tokens"] == 20


def test_texts_to_embed(server: Server) -> None:
    text = "x y " * 100
    for asked, kept in ((-1, CONTEXT), (30, 30)):
        status, answer = post(server, "/v1/embeddings", {"input": text, "truncate_prompt_tokens": asked})
        assert status == 200 and answer["usage"]["prompt_tokens"] == kept
        found = np.asarray(answer["data"][0]["embedding"], np.float32)
        assert np.array_equal(found, reference_embedding(list(text[-kept:].encode())))


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/chat/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/chat/completions", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("/v1/chat/completions", {"truncate_prompt_tokens": "auto"}, "truncate_prompt_tokens"),
        ("/v1/chat/completions", {"n_keep": 5}, "n_keep"),
        ("/v1/chat/completions", {"n_discard": 5}, "n_discard"),
        ("/v1/chat/completions", {"truncation_side": "right"}, "truncation_side"),
        ("/v1/chat/completions", {"truncation": "auto"}, "truncation"),
        ("/v1/completions", {"truncate_prompt_tokens": 5, "echo": True}, "truncate_prompt_tokens"),
        ("/v1/responses", {"truncation": "middle"}, "truncation"),
        ("/v1/responses", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_is_refused(server: Server, path: str, more: Any, param: str) -> None:
    given: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [LAST]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/v1/embeddings": {"input": "x"},
    }
    status, answer = post(server, path, given[path] | more)
    assert status == 400 and answer["error"]["param"] == param, answer
