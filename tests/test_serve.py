"""The HTTP API, by the clients that people use, through a real socket."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel
from serving import SlowExecutor, client, post, served_llm, serving, until
from toy_model import BOS, ToyTokenizer, idle, reference_greedy, reference_logits

from powerinfer.runtime.engine import LLM
from powerinfer.runtime.params import SamplingParams
from powerinfer.serve import app as app_module
from powerinfer.serve.server import Server

pytestmark = pytest.mark.usefixtures("nothing_is_left")

CHAT = [{"role": "user", "content": "hello"}]
CHAT_PROMPT = "user: hello\nassistant: "


def ids(text: str) -> list[int]:
    return list(text.encode())


def expected(prompt: str, max_tokens: int) -> str:
    return ToyTokenizer().decode(reference_greedy(ids(prompt), max_tokens))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return served_llm(max_queue=32)


# ---------------------------------------------------------------- answers


def test_a_chat(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="toy", messages=CHAT, temperature=0, max_tokens=20)
    (choice,) = answer.choices
    assert choice.message.content == expected(CHAT_PROMPT, 20)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.id.startswith("chatcmpl-") and answer.model == "toy" and answer.object == "chat.completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(CHAT_PROMPT), 20)
    assert answer.usage.total_tokens == len(CHAT_PROMPT) + 20


def test_a_stream_is_the_answer_in_pieces(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model="toy", messages=CHAT, seed=3, max_completion_tokens=40)
    stream = api.chat.completions.create(
        model="toy",
        messages=CHAT,
        seed=3,
        max_completion_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_a_stream_as_it_is_sent(server: Server) -> None:
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 3, "stream": True}
    with client(server) as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_the_content_may_be_in_parts(api: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = api.chat.completions.create(
        model="toy", temperature=0, max_tokens=9,
        messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}],  # type: ignore[list-item,misc]
    )  # fmt: skip
    assert answer.choices[0].message.content == expected("system: x\nuser: one\ntwo\nassistant: ", 9)


def test_several_answers(api: openai.OpenAI) -> None:
    """Each has its own seed, and the first is the one that a request alone would get."""
    answer = api.chat.completions.create(model="toy", messages=CHAT, n=3, seed=5, temperature=1.5, max_tokens=20)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    alone = [
        api.chat.completions.create(model="toy", messages=CHAT, seed=5 + n, temperature=1.5, max_tokens=20)
        for n in range(3)
    ]
    assert [c.message.content for c in answer.choices] == [one.choices[0].message.content for one in alone]
    assert answer.usage is not None and answer.usage.prompt_tokens == len(CHAT_PROMPT)
    stream = api.chat.completions.create(
        model="toy", messages=CHAT, n=3, seed=5, temperature=1.5, max_tokens=20, stream=True
    )
    texts = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in answer.choices]


def test_completions_of_every_kind_of_prompt(api: openai.OpenAI) -> None:
    for prompt, texts in (
        ("hello", ["hello"]),
        (["one", "two"], ["one", "two"]),
        (ids("hello"), ["hello"]),
        ([ids("one"), ids("two")], ["one", "two"]),
    ):
        answer = api.completions.create(model="toy", prompt=prompt, temperature=0, max_tokens=12)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == [expected(text, 12) for text in texts]
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, texts))
    assert (
        api.completions.create(model="toy", prompt="hi", extra_body={"ignore_eos": True}).usage.completion_tokens == 16
    )  # type: ignore[union-attr]


def test_stops_and_penalties_reach_the_engine(server: Server, llm: LLM) -> None:
    text = expected("hello", 30)
    stop = next(c for n, c in enumerate(text) if n > 4 and text.index(c) == n)
    base = {"prompt": "hello", "temperature": 0, "max_tokens": 30}
    for more, params in (
        ({"stop": stop}, {"stop": [stop]}),
        ({"stop": ["~~~", stop]}, {"stop": ["~~~", stop]}),
        ({"stop_token_ids": [ord(stop)]}, {"stop_token_ids": [ord(stop)]}),
        ({"logit_bias": {"65": 50, "66": 20.5}}, {"logit_bias": {65: 50.0, 66: 20.5}}),
        ({"presence_penalty": 2, "frequency_penalty": 1.5}, {"presence_penalty": 2.0, "frequency_penalty": 1.5}),
        ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
        ({"temperature": 1.0, "seed": 1, "top_k": 3}, {"temperature": 1.0, "seed": 1, "top_k": 3}),
        ({"temperature": 2.0, "seed": 1, "top_p": 0.5}, {"temperature": 2.0, "seed": 1, "top_p": 0.5}),
        ({"temperature": 2.0, "seed": 1, "min_p": 0.5}, {"temperature": 2.0, "seed": 1, "min_p": 0.5}),
    ):
        status, answer = post(server, "/v1/completions", base | more)
        whole = llm.generate("hello", SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **params}))  # type: ignore[arg-type]
        assert status == 200, answer
        assert answer["choices"][0]["text"] == whole.text, more
        assert answer["choices"][0]["finish_reason"] == whole.finish_reason


class Report(BaseModel):
    done: bool
    mood: Literal["calm", "bored"]


def test_answers_that_match_a_schema(api: openai.OpenAI, server: Server) -> None:
    """The toy model writes random bytes where it is let."""
    answer = api.chat.completions.parse(model="toy", messages=CHAT, response_format=Report, max_tokens=300, n=3, seed=1)  # type: ignore[arg-type]
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Report)
    grammar = 'root ::= "yes" | "no, " [a-c]{3}'
    for stream in (False, True):
        body = {"prompt": ["one", "two"], "grammar": grammar, "temperature": 3.0, "max_tokens": 20, "n": 4, "seed": 1}
        with client(server) as http:
            sent = http.post("/v1/completions", json=body | {"stream": stream}).text
        texts = [""] * 8
        documents = [sent] if not stream else [event[6:] for event in sent.split("\n\n")[:-2]]
        for choice in (choice for document in documents for choice in json.loads(document)["choices"]):
            texts[choice["index"]] += choice["text"]
        assert all(re.fullmatch("yes|no, [abc]{3}", text) for text in texts) and len(set(texts)) > 2


# ---------------------------------------------------------------- logprobs


def true_logprobs(tokens: list[int]) -> np.ndarray:
    logits = reference_logits(tokens).astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def test_logprobs_of_a_chat(api: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "toy", "messages": CHAT, "logprobs": True, "top_logprobs": 3, "max_tokens": 8}
    answer = api.chat.completions.create(**arguments, seed=2, extra_body={"ignore_eos": True})
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 8
    tokens = ids(CHAT_PROMPT)
    for one in logprobs.content:
        true = true_logprobs(tokens)
        best = np.argsort(-true)[:3]
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(true[best], abs=1e-4)
        assert one.bytes is not None and one.token == bytes(one.bytes).decode(errors="replace")
        token = one.bytes[0] if one.bytes else 257
        assert one.logprob == pytest.approx(true[token], abs=1e-4)
        tokens.append(token)
    stream = api.chat.completions.create(**arguments, seed=2, stream=True, extra_body={"ignore_eos": True})
    streamed = [
        one for c in stream for x in c.choices if x.logprobs and x.logprobs.content for one in x.logprobs.content
    ]
    assert streamed == logprobs.content


def test_the_logprobs_of_a_prompt_as_lm_eval_asks(server: Server) -> None:
    prompt = ids("the whole text")
    body = {"prompt": [prompt], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("the whole text")
    assert len(logprobs["tokens"]) == len(prompt) + 1
    assert logprobs["tokens"][: len(prompt)] == list("the whole text")
    assert logprobs["text_offset"] == list(range(len(prompt) + 1))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for n in range(1, len(prompt)):
        true = true_logprobs(prompt[:n])
        assert logprobs["token_logprobs"][n] == pytest.approx(true[prompt[n]], abs=1e-4)
        # what lm-eval calls greedy
        greedy = logprobs["token_logprobs"][n] == max(logprobs["top_logprobs"][n].values())
        assert greedy == (prompt[n] == true.argmax())
    assert logprobs["token_logprobs"][-1] == pytest.approx(true_logprobs(prompt).max(), abs=1e-4)
    alone = post(server, "/v1/completions", body | {"max_tokens": 0})[1]
    assert alone["choices"][0]["text"] == "the whole text"
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-1]
    assert alone["usage"]["completion_tokens"] == 0


def test_echo_in_a_stream(api: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "toy", "prompt": "hello", "echo": True, "temperature": 0, "max_tokens": 6}
    whole = api.completions.create(**arguments, logprobs=2).choices[0]
    assert whole.text == "hello" + expected("hello", 6)
    chunks = [chunk.choices[0] for chunk in api.completions.create(**arguments, logprobs=2, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    assert [one for c in chunks if c.logprobs for one in c.logprobs.tokens or []] == whole.logprobs.tokens
    assert [one for c in chunks if c.logprobs for one in c.logprobs.text_offset or []] == whole.logprobs.text_offset


def test_where_tokens_begin_does_not_depend_on_stop_strings(api: openai.OpenAI) -> None:
    """Of which some begin in the text: it is held back until it is known that they do not go on there."""
    arguments: dict[str, Any] = {"model": "toy", "prompt": "hello", "temperature": 0, "max_tokens": 6, "logprobs": 0}
    plain = api.completions.create(**arguments).choices[0]
    assert plain.logprobs is not None and len(plain.logprobs.text_offset or []) == 6
    stops = [plain.text[at : at + 2] + "~" for at in range(4)]
    held = api.completions.create(**arguments, stop=stops).choices[0]
    assert held.text == plain.text and held.logprobs == plain.logprobs
    chunks = [chunk.choices[0] for chunk in api.completions.create(**arguments, stop=stops, stream=True)]
    assert [one for c in chunks if c.logprobs for one in c.logprobs.text_offset or []] == plain.logprobs.text_offset


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ({"prompt": {"a": 1}}, "prompt", "a valid string, or a valid list"),
        ({"prompt": ["a", 1]}, "prompt.1", "a valid string"),
        ({"prompt": [[1], "a"]}, "prompt.1", "a valid list"),
        ({"prompt": "a", "stop": ""}, "stop", "at least 1 character"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"prompt": "a", "logit_bias": {"3": "x"}}, "logit_bias.3", "a valid number"),
        ({}, "prompt", "Field required"),
    ],
)
def test_a_field_that_is_wrong_is_named(server: Server, body: Any, param: str, said: str) -> None:
    """As the client wrote it: without the kinds of values that it may have."""
    status, answer = post(server, "/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == param
    assert answer["error"]["message"].startswith(f"{param}: ") and said in answer["error"]["message"]


# ---------------------------------------------------------------- the other routes


def test_tokens_and_templates(server: Server) -> None:
    assert post(server, "/tokenize", {"content": "hé"})[1]["tokens"] == ids("hé")
    assert post(server, "/tokenize", {"prompt": "hé"})[1] == {"tokens": ids("hé"), "count": 3, "max_model_len": 512}
    pieces = post(server, "/tokenize", {"content": "ab", "with_pieces": True})[1]["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
    pieces = post(server, "/tokenize", {"content": "é", "with_pieces": True})[1]["tokens"]
    assert pieces == [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    assert post(server, "/detokenize", {"tokens": ids("hé")})[1]["content"] == "hé"
    assert post(server, "/apply-template", {"messages": CHAT})[1] == {"prompt": CHAT_PROMPT}
    options = {"messages": CHAT, "chat_template_kwargs": {"mood": "calm "}}
    assert post(server, "/apply-template", options)[1] == {"prompt": "user: hello\ncalm assistant: "}


def test_models_engine_health(api: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in api.models.list()] == ["toy"]
    assert api.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        api.models.retrieve("gpt-9")
    with client(server) as http:
        assert http.get("/health").json() == {"status": "ok"}
        engine = http.get("/v1/engine").json()
    assert engine["model"]["names"] == ["toy"] and engine["model"]["context"] == 512
    assert engine["stats"]["pages"] == 64 and engine["sparsity"] is None


def test_metrics(server: Server, api: openai.OpenAI) -> None:
    def figures() -> dict[str, float]:
        with client(server) as http:
            lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = figures()
    api.completions.create(model="toy", prompt="a prompt of some tokens, more than a page of the cache", max_tokens=4,
                           extra_body={"ignore_eos": True})  # fmt: skip
    post(server, "/v1/completions", {"prompt": "x", "n": 0})
    with client(server) as http:
        http.get("/" + "x" * 100)
    after = figures()
    generated, prompts = (f'powerinfer_{what}_tokens_total{{model="toy"}}' for what in ("generated", "prompt"))
    assert after[generated] == before[generated] + 4
    assert after[prompts] == before[prompts] + 54
    first = 'powerinfer_first_token_seconds_count{model="toy"}'
    assert after[first] == before.get(first, 0) + 1
    between = 'powerinfer_inter_token_seconds_count{model="toy"}'
    assert after[between] == before.get(between, 0) + 3
    assert after['powerinfer_kv_pages{model="toy"}'] == 64 and after['powerinfer_waiting_requests{model="toy"}'] == 0
    refused = 'powerinfer_requests_total{endpoint="/v1/completions",status="400"}'
    assert after[refused] == before.get(refused, 0) + 1
    assert after['powerinfer_requests_total{endpoint="other",status="404"}'] >= 1
    assert not any("xxxx" in name for name in after)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"grammar": "root ::= missing"}, None, "GBNF grammar"),
        ({"chat_template_kwargs": {"fail": 1}}, None, "chat template fails"),
        ({"best_of": 2}, "best_of", "best_of is not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"temperatur": 0.5}, "temperatur", "unknown field 'temperatur'; did you mean temperature?"),
        ({"mirostat": True}, "mirostat", "not supported"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: it must be at least 1, or -1 for no limit"),
        ({"max_tokens": -2}, "max_tokens", "max_tokens: it must be at least 1, or -1 for no limit"),
        ({"max_tokens": "10"}, "max_tokens", "valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": -1}, "temperature", "greater than or equal"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"logit_bias": {"9": True}}, "logit_bias", "a number or false"),
        ({"logit_bias": [[9]]}, "logit_bias.0", "at least 2 items"),
        ({"logit_bias": [[9, "x"]]}, "logit_bias", "a number or false"),
        ({"logit_bias": [["x" * 1000, 1]] * 17}, "logit_bias", "16384 characters"),
        ({"logit_bias": {"999": 1}}, None, "token 999"),
        ({"logit_bias": {"1": None}}, "logit_bias.1", "number"),
        ({"seed": -2}, "seed", "greater than or equal to -1"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for stream"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not set"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": None}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "not supported"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, None, "does not take these messages: never"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].type",
            "not supported",
        ),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_what_is_refused_is_named(server: Server, more: Any, param: str | None, says: str) -> None:
    status, answer = post(server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2} | more)
    assert status == 400, answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert says in answer["error"]["message"]
    if param is not None:
        assert answer["error"]["param"] == param


def test_what_asks_for_nothing_is_accepted(server: Server) -> None:
    more = {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "best_of": 1, "user": "me",
        "stop": None, "logit_bias": {}, "metadata": {"a": "b"}, "functions": None, "logprobs": None, "mirostat": 0,
        "n": None,
    }  # fmt: skip
    assert post(server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 2} | more)[0] == 200


def test_a_prompt_beyond_the_context(api: openai.OpenAI, server: Server) -> None:
    said = r"length is 512 tokens\. .* at least 604 tokens \(600 in"
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        api.completions.create(model="toy", prompt="x" * 600, max_tokens=4)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match=r"length is 512 tokens\. .* requested 600 tokens \(100 in"):
        api.completions.create(model="toy", prompt="x" * 100, max_tokens=500)
    status, answer = post(server, "/v1/completions", {"prompt": [300], "max_tokens": 1})
    assert status == 400 and "token 300" in answer["error"]["message"]


@pytest.mark.parametrize("prompt", [[], "", [[]], ["", "a"], [["a"]], [1, "a"], None, {}, 1, [[1], 2]])
def test_prompts_that_are_none(server: Server, prompt: Any) -> None:
    status, answer = post(server, "/v1/completions", {"prompt": prompt})
    assert status == 400 and answer["error"]["param"].startswith("prompt"), answer


def test_no_limit_of_tokens(server: Server) -> None:
    body = {"prompt": "abc", "ignore_eos": True}
    status, answer = post(server, "/v1/completions", body | {"max_tokens": -1})
    assert status == 200 and answer["usage"]["total_tokens"] == 512, "until the context is full"
    assert post(server, "/v1/completions", body)[1]["usage"]["completion_tokens"] == 16
    chat = {"messages": CHAT, "ignore_eos": True, "max_tokens": -1}
    status, answer = post(server, "/v1/chat/completions", chat)
    assert status == 200 and answer["usage"]["total_tokens"] == 512
    status, answer = post(server, "/v1/chat/completions", chat | {"max_completion_tokens": 3})
    assert status == 200 and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/messages", "no route /messages; did you mean /v1/messages?"),
        ("/v1/v1/completions", "; did you mean /v1/completions?"),
        ("/nowhere", "no route /nowhere"),
    ],
)
def test_a_wrong_base_url(server: Server, path: str, says: str) -> None:
    status, answer = post(server, path, {})
    assert status == 404 and answer["error"]["message"].endswith(says)


def test_names_of_models_without_regard_to_case(server: Server) -> None:
    status, answer = post(server, "/v1/completions", {"model": "TOY", "prompt": "a", "max_tokens": 1})
    assert status == 200 and answer["model"] == "TOY"


def test_errors_by_status(server: Server, api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        api.chat.completions.create(model="other", messages=CHAT)
    with client(server) as http:
        for method, path, options, status in (
            ("GET", "/nowhere", {}, 404),
            ("GET", "/v1/chat/completions", {}, 405),
            ("POST", "/health", {"json": {}}, 405),
            ("POST", "/v1/completions", {"content": b"{}"}, 415),
            ("POST", "/v1/completions", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
            ("POST", "/v1/completions", {"json": [1]}, 400),
            ("POST", "/v1/completions", {"content": b"", "headers": {"content-type": "application/json"}}, 400),
            ("DELETE", "/v1/models/toy", {}, 405),
        ):
            answer = http.request(method, path, **options)
            assert answer.status_code == status, (path, answer.text)
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]
            assert status != 405 or answer.json()["error"]["message"].endswith(f": use {answer.headers['allow']}")


def test_an_error_in_the_middle_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The status has been sent: the error is an event, and clients raise it. Before the first token comes a comment."""
    monkeypatch.setattr(app_module, "PING_SECONDS", 0.01)
    executor = SlowExecutor(0.05)
    llm = served_llm(executor)
    with serving(llm, timeout=0.4) as server:
        body = {"messages": CHAT, "ignore_eos": True, "stream": True}
        with client(server) as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            text = answer.read().decode()
        assert text.startswith(": ping") or ": ping\n\n" in text
        more = {"ignore_eos": True}
        error = json.loads(text.split("\n\n")[-3].removeprefix("data: "))["error"]
        assert error["type"] == "timeout_error" and "0.4 s" in error["message"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
            with pytest.raises(openai.APIError, match=r"longer than 0\.4 s"):
                list(
                    api.chat.completions.create(
                        model="toy", messages=CHAT, stream=True, extra_body={"ignore_eos": True}
                    )
                )
            with pytest.raises(openai.APIStatusError) as caught:
                api.chat.completions.create(model="toy", messages=CHAT, extra_body=more)
            assert caught.value.status_code == 504
        until(lambda: idle(llm))


# ---------------------------------------------------------------- a real model


@pytest.mark.model
def test_the_default_model(smollm2: Path) -> None:
    llm = LLM(smollm2, context=512)
    messages: Any = [{"role": "user", "content": "What is the capital of France? <|im_end|> €"}]
    direct = llm.chat(messages, llm.default_params(temperature=0, max_tokens=12))
    text = "The capital of France is Paris."
    tokens = llm.tokenizer.encode(text)
    rows: list[np.ndarray] = []
    llm.score(tokens, 0, lambda position, logits: rows.extend(logits.astype(np.float64)))
    with serving(llm) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
        arguments: dict[str, Any] = {"model": "toy", "messages": messages, "temperature": 0, "max_tokens": 12}
        whole = api.chat.completions.create(**arguments)
        assert whole.choices[0].message.content == direct.text
        stream = api.chat.completions.create(**arguments, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == direct.text
        echo = api.completions.create(model="toy", prompt=text, echo=True, max_tokens=0, logprobs=1).choices[0]
    assert echo.text == text and echo.logprobs is not None
    assert echo.logprobs.tokens is not None and "".join(echo.logprobs.tokens) == text
    expected = [row[token] - np.logaddexp.reduce(row) for row, token in zip(rows, tokens[1:], strict=False)]
    assert echo.logprobs.token_logprobs is not None
    assert echo.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)


# ---------------------------------------------------------------- whatever the schema allows, and what it does not


@pytest.mark.parametrize("examples", [3, pytest.param(8, marks=pytest.mark.rest)])
@pytest.mark.parametrize("valid", [True, False])
def test_no_request_is_a_server_error(server: Server, valid: bool, examples: int) -> None:
    import schemathesis  # its import takes a second of every process that runs tests
    from schemathesis import GenerationMode

    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    if not valid:  # of those that take anything
        operations = [operation for operation in operations if operation.method == "post"]
    assert len(operations) >= 5
    for operation in operations:

        @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            answer = case.call(timeout=30)
            assert answer.status_code < 500, case.as_curl_command()
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error if case.path.startswith("/api/") else error["message"]

        ask()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["", ["x", ""]])
def test_an_empty_prompt_begins_a_text_where_the_model_has_a_token_for_that(prompt: Any, stream: bool) -> None:
    """As in llama-server; otherwise there is nothing that could be continued."""
    llm = served_llm()
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": stream}
    with serving(llm) as server, client(server) as http:
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 400 and "the prompt is empty" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json=body | {"prompt": []}).status_code == 400
        llm.tokenizer.add_bos = True  # type: ignore[misc]
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not stream:
            text = ToyTokenizer().decode(reference_greedy([BOS], 3))
            assert answer.json()["choices"][-1]["text"] == text
    until(lambda: idle(llm))
