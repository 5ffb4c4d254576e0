"""Ollama's API over the same requests as OpenAI's: what it answers, takes, leaves out and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import tiny_gguf
from serving import SlowExecutor, client, post, running, served_llm, serving, until
from sparse_models import tiny_llama
from test_serve_llama import MARKS, MIDDLE, PREFIX, SUFFIX, asked_of, infill_server
from test_serve_models import Toy, parsed
from test_serve_models import serving as serving_several
from test_serve_tools import CALL, CHAT
from test_thoughts import QWEN3, THOUGHT, YES, Writer
from test_tool_calls import QWEN, WEATHER
from toy_model import BOS, D_MODEL, idle

from benchmarks.models.gguf_writer import U32
from powerinfer.cli import serve
from powerinfer.cli.common import Output, config_from
from powerinfer.config import EngineConfig, ServeConfig
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.runtime.engine import LLM
from powerinfer.serve import app as app_module
from powerinfer.serve import ollama_bodies
from powerinfer.serve.ollama_models import _facts, _short
from powerinfer.serve.server import Server
from powerinfer.text.chat import ChatTemplate

CALLS = QWEN + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SHORT = {"num_predict": 12, "temperature": 0}
COUNTS = ("prompt_eval_count", "eval_count")
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def llm() -> LLM:
    made = served_llm(Writer(n_pages=256), context=4096)
    made.template = ChatTemplate(QWEN3)
    return made


@pytest.fixture(autouse=True)
def script(llm: LLM) -> Iterator[Any]:
    """Sets what the model wants to write, and its template; until then it is free."""
    executor: Any = llm._runner._executor

    def write(text: str, template: str = QWEN3) -> None:
        executor.script, executor.mark, llm.template = text.encode(), Writer.mark, ChatTemplate(template)

    write("")
    executor.mark = b"no prompt has this"
    yield write
    until(lambda: idle(llm))


@pytest.fixture
def asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine is asked: prompts and parameters."""
    return asked_of(llm, monkeypatch)


def ask(server: Server, path: str, **body: Any) -> Any:
    """The answer as a whole."""
    streams = {"stream": False} if path in ("/api/chat", "/api/generate") else {}
    status, answer = post(server, path, {"model": "toy", **streams, **body})
    assert status == 200, answer
    return answer


def lines(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The answer in lines."""
    with client(server) as http:
        answer = http.post(path, json={"model": "toy", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("}\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_time_that_no_date_has_is_the_last_one() -> None:
    assert ollama_bodies.moment(1e18) == "9999-12-31T23:59:59.000000Z"
    assert ollama_bodies.moment(-5.0).startswith("1970-01-01T00:00:00")


def well_measured(answer: dict[str, Any]) -> None:
    assert answer["done"] is True and all(type(answer[name]) is int for name in COUNTS + DURATIONS)
    whole, *parts = (answer[name] for name in DURATIONS)
    assert answer["prompt_eval_duration"] > 0 and min(parts) >= 0 and sum(parts) <= whole < 60 * 10**9


# ---------------------------------------------------------------- chats


def test_a_chat_is_openais(server: Server) -> None:
    sampling = {"temperature": 1, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 3}
    chat = {"messages": CHAT, "max_tokens": 20, "repetition_penalty": 1.2, **sampling}
    status, wanted = post(server, "/v1/chat/completions", chat)
    assert status == 200, wanted
    options = sampling | {"num_predict": 20, "repeat_penalty": 1.2, "repeat_last_n": -1}
    found = ask(server, "/api/chat", messages=CHAT, options=options)
    assert found["message"] == {"role": "assistant", "content": wanted["choices"][0]["message"]["content"]}
    assert (found["model"], found["done_reason"]) == ("toy", "length") and found["created_at"].endswith("Z")
    assert (found["prompt_eval_count"], found["eval_count"]) == (wanted["usage"]["prompt_tokens"], 20)
    well_measured(found)


def test_a_stream_is_the_default(server: Server, script: Any) -> None:
    script("It is warm.")
    *pieces, last = lines(server, "/api/chat", messages=CHAT)
    assert "".join(piece["message"]["content"] for piece in pieces) == "It is warm." and len(pieces) > 5
    assert all(piece["done"] is False and piece["message"]["role"] == "assistant" for piece in pieces)
    assert last["message"] == {"role": "assistant", "content": ""} and last["done_reason"] == "stop"
    assert last["eval_count"] == len("It is warm.") + 1
    well_measured(last)
    *pieces, last = lines(server, "/api/generate", prompt="hello", stream=True, logprobs=True, top_logprobs=2)
    assert "".join(piece["response"] for piece in pieces) == "It is warm." and last["response"] == ""
    scores = [token for piece in (*pieces, last) for token in piece.get("logprobs", ())]
    assert "".join(token["token"] for token in scores).startswith("It is warm.")
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in scores)
    assert ask(server, "/api/generate", prompt="hello", logprobs=True, top_logprobs=2)["logprobs"] == scores


def test_calls_have_objects(server: Server, script: Any) -> None:
    script(f"Well. {CALL}\n{CALL.replace('Rome', 'Oslo')}", CALLS)
    found = ask(server, "/api/chat", messages=CHAT, tools=[WEATHER])
    *pieces, last = lines(server, "/api/chat", messages=CHAT, tools=[WEATHER])
    streamed = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    for calls in (found["message"]["tool_calls"], streamed):
        functions = [call["function"] for call in calls]
        assert [(one["index"], one["name"], one["arguments"]["city"]) for one in functions] == [
            (0, "get_weather", "Rome"), (1, "get_weather", "Oslo"),
        ]  # fmt: skip
        assert len({call["id"] for call in calls}) == 2
    assert found["message"]["content"] == "Well." and found["done_reason"] == last["done_reason"] == "stop"
    assert "".join(piece["message"]["content"] for piece in pieces) == "Well."
    # the answer is the next request's message, as it is
    more = [*CHAT, found["message"], {"role": "tool", "tool_name": "get_weather", "content": "20 C"}]
    assert ask(server, "/api/chat", messages=more, tools=[WEATHER], options=SHORT)["prompt_eval_count"] > 0
    cut = ask(server, "/api/chat", messages=CHAT, tools=[WEATHER], options={"num_predict": len("Well. ") + 60})
    assert cut["done_reason"] == "length" and "tool_calls" not in cut["message"], "its arguments are not whole"


def test_results_find_their_calls(server: Server, asked: list[Any], script: Any) -> None:
    """By an id, by the name of the function, or in their order."""
    script("", QWEN)
    calls = [("c1", "get_weather", {"city": "Rome"}), ("c2", "get_time", {}), ("c3", "get_weather", {"city": "Oslo"})]
    functions = [{"name": name, "arguments": given} for _, name, given in calls]
    results = [("c1", "get_weather", "20 C"), ("c2", "get_time", "noon"), ("c3", "get_weather", "5 C")]
    chat = [
        *CHAT,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": call[0], "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]},
        *({"role": "tool", "tool_call_id": known, "content": text} for known, _, text in results),
    ]  # fmt: skip
    assert post(server, "/v1/chat/completions", {"messages": chat, "max_tokens": 1})[0] == 200
    plain = {"role": "assistant", "tool_calls": [{"function": function} for function in functions]}
    by_name = [{"role": "tool", "tool_name": name, "content": text} for _, name, text in results]
    in_order = [{"role": "tool", "content": text} for _, _, text in results]
    for turn, told in ((plain, by_name), (plain, in_order), (chat[1], chat[2:])):
        ask(server, "/api/chat", messages=[*CHAT, turn, *told], options={"num_predict": 1})
        assert asked[-1][0] == asked[0][0]
    again = [(known, name) for known, name, _ in calls]
    message = ollama_bodies.OllamaMessage(role="tool", content="5 C", tool_name="get_time")
    assert ollama_bodies._result(message, again) == {"tool_call_id": "c2"} and again == [calls[0][:2], calls[2][:2]]
    assert ollama_bodies._result(message, again) == {"name": "get_time"}, "none of that name waits"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_thoughts_are_apart(server: Server, script: Any, path: str) -> None:
    script(THOUGHT + YES)
    body: Any = {"messages": CHAT} if path == "/api/chat" else {"prompt": "hello"}

    def parts(answer: dict[str, Any]) -> tuple[str, str]:
        message = answer.get("message", answer)
        return message.get("thinking", ""), message.get("content", message.get("response"))

    for think in ({}, {"think": True}, {"think": "low"}, {"think": 500}):
        assert parts(ask(server, path, **body, **think)) == ("Is it <b> warm?", YES)
        pieces = [parts(line) for line in lines(server, path, **body, **think)]
        assert tuple(map("".join, zip(*pieces, strict=True))) == ("Is it <b> warm?", YES)
    short = ask(server, path, **body, think=3, options={"num_predict": 40})
    assert 0 < len(parts(short)[0]) < len("Is it <b> warm?"), "a number is the most tokens of a thought"


def test_the_switch_of_thoughts_reaches_the_template(server: Server, asked: list[Any]) -> None:
    for think in (True, False):
        ask(server, "/api/chat", messages=CHAT, think=think, options=SHORT)
        chat = {"messages": CHAT, "max_tokens": 12, "temperature": 0, "enable_thinking": think}
        assert post(server, "/v1/chat/completions", chat)[0] == 200
        assert asked[-1][0] == asked[-2][0]
    assert asked[0][0] != asked[2][0]


def test_formats(server: Server, script: Any) -> None:
    script('{"warm": true, "cold": 1}')
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"],
              "additionalProperties": False}  # fmt: skip
    options = {"num_predict": 200, "temperature": 0}
    found = ask(server, "/api/chat", messages=CHAT, format=schema, think=False, options=options)
    assert json.loads(found["message"]["content"]).keys() == {"warm"}
    script("{}")
    assert ask(server, "/api/generate", prompt="x", format="json", raw=True, options=SHORT)["response"][0] in '{ \n\t\r'
    assert ask(server, "/api/chat", messages=CHAT, format="", options=SHORT)["message"]["content"] == "{}"


def test_the_last_message_is_continued(server: Server, asked: list[Any]) -> None:
    ask(server, "/api/chat", messages=[*CHAT, {"role": "assistant", "content": "The sky"}], options=SHORT)
    assert bytes(asked[-1][0]).endswith(b"The sky")


# ---------------------------------------------------------------- texts


def test_a_prompt_goes_through_the_template(server: Server, asked: list[Any]) -> None:
    ask(server, "/api/generate", prompt="hello", system="be brief", options=SHORT)
    chat = [{"role": "system", "content": "be brief"}, *CHAT]
    assert post(server, "/v1/chat/completions", {"messages": chat, "max_tokens": 1})[0] == 200
    assert asked[0][0] == asked[1][0]
    ask(server, "/api/generate", prompt="hello", raw=True, options={**SHORT, "stop": ["x", "y"]})
    assert bytes(asked[-1][0]) == b"hello" and asked[-1][1].stop == ("x", "y") and asked[-1][1].max_tokens == 12
    scored = ask(server, "/api/generate", prompt="hello", raw=True, logprobs=True, options=SHORT)
    assert len(scored["logprobs"]) == scored["eval_count"] and scored["logprobs"][0]["top_logprobs"] == []


def test_a_model_without_a_template_continues_the_text(server: Server, llm: LLM, asked: list[Any]) -> None:
    llm.template = None
    *_, last = lines(server, "/api/generate", prompt="hello", options=SHORT)
    assert bytes(asked[-1][0]) == b"hello" and last["eval_count"] == 12
    well_measured(last)
    status, answer = post(server, "/api/chat", {"messages": CHAT})
    assert status == 400 and answer["error"].endswith("has no chat template: use /api/generate")
    status, answer = post(server, "/api/generate", {"prompt": "x", "system": "y"})
    assert status == 400 and "system is not supported with a model without a chat template" in answer["error"]


def test_a_suffix_is_infilled(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, serves = infill_server(**MARKS)
    seen = asked_of(llm, monkeypatch)
    with serves as server:
        assert ask(server, "/api/generate", prompt="ab", suffix="de", options=SHORT)["eval_count"] == 12
        assert seen[-1][0] == [BOS, PREFIX, *b"ab", SUFFIX, *b"de", MIDDLE]
        assert "insert" in ask(server, "/api/show")["capabilities"]


def test_a_suffix_needs_its_tokens(server: Server) -> None:
    status, answer = post(server, "/api/generate", {"prompt": "ab", "suffix": "de"})
    assert status == 400 and "this model cannot fill in" in answer["error"]
    assert "insert" not in ask(server, "/api/show")["capabilities"]


# ---------------------------------------------------------------- options


HONOURED = {
    "num_predict": (7, "max_tokens", 7), "temperature": (0.25, "temperature", 0.25), "top_k": (5, "top_k", 5),
    "top_p": (0.5, "top_p", 0.5), "min_p": (0.1, "min_p", 0.1), "seed": (7, "seed", 7),
    "presence_penalty": (0.5, "presence_penalty", 0.5), "frequency_penalty": (0.5, "frequency_penalty", 0.5),
    "repeat_penalty": (1.3, "repetition_penalty", 1.3), "stop": ("x", "stop", ("x",)),
}  # fmt: skip


@pytest.mark.parametrize("raw", [True, False])
def test_options_reach_the_engine(server: Server, asked: list[Any], raw: bool) -> None:
    for name, (value, field, wanted) in HONOURED.items():
        options = {"num_predict": 2, "temperature": 1, name: value}
        ask(server, "/api/generate", prompt="hello", raw=raw, options=options)
        assert getattr(asked[-1][1], field) == wanted, name
    ask(server, "/api/generate", prompt="hello", raw=raw, options={"num_predict": 2, "repeat_last_n": 0})
    assert asked[-1][1].repetition_penalty == 1.0


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("limit", [{}, {"num_predict": -1}, {"num_predict": -2}, {"num_predict": 0},
                                   {"num_predict": 10**6}])  # fmt: skip
def test_an_answer_ends_with_the_context(raw: bool, limit: dict[str, int]) -> None:
    executor = Writer(n_pages=16)
    executor.script, executor.mark = b"x" * 600, b"hello" if raw else Writer.mark
    small = served_llm(executor, context=64)
    small.template = ChatTemplate("{{ messages[-1].content + '<|im_start|>assistant\n' }}")
    with serving(small) as server:
        found = ask(server, "/api/generate", prompt="hello", raw=raw, options=limit)
        assert found["done_reason"] == "length" and found["prompt_eval_count"] + found["eval_count"] == 64
        status, answer = post(server, "/api/generate", {"prompt": "hello" * 20, "raw": raw})
        assert status == 400 and "maximum context length is 64 tokens" in answer["error"]
        turns = [{"role": "user", "content": f"{n}" * 30} for n in range(9)]
        assert post(server, "/api/chat", {"messages": turns, "truncate": True, "stream": False})[0] == 200


LEFT_OUT: dict[str, Any] = {
    "num_ctx": 8192, "num_gpu": 99, "num_thread": 4, "num_batch": 512, "main_gpu": 0, "low_vram": False, "numa": True,
    "f16_kv": True, "use_mmap": True, "use_mlock": False,
}  # fmt: skip
NOTHING = {
    "num_keep": 24, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "tfs_z": 1, "typical_p": 1.0,
    "penalize_newline": True, "repeat_last_n": 64, "vocab_only": False, "embedding_only": False, "seed": -1, "stop": [],
    "temperature": None, "unknown": None, "num_ctx": 2048,
}  # fmt: skip


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed"])
def test_what_does_not_change_the_answer_is_logged_once(
    server: Server, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "powerinfer.serve")
    ollama_bodies._say_once.cache_clear()
    body: Any = {"messages": CHAT, "prompt": "hello", "input": "hello"}
    name = {"/api/chat": "messages", "/api/generate": "prompt", "/api/embed": "input"}[path]
    body = {name: body[name]} | ({} if name == "input" else {"stream": False})
    for more in ({**SHORT, **NOTHING}, {**SHORT, **LEFT_OUT}, {**SHORT, **LEFT_OUT}):
        status, answer = post(server, path, {**body, "keep_alive": "10m", "options": more})
        assert status == 200, answer
    facts = [record.facts for record in caplog.records if record.getMessage() == "a field has no effect"]  # type: ignore[attr-defined]
    assert sorted(fact["field"] for fact in facts) == sorted(["keep_alive", *(f"options.{name}" for name in LEFT_OUT)])
    assert all("serve" in fact["reason"] for fact in facts)


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        ("chat", {"options": {"temperatur": 1}}, "unknown field 'options.temperatur'; did you mean temperature?"),
        ("chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("chat", {"options": {"typical_p": 0.7}}, "options.typical_p is not supported"),
        ("chat", {"options": {"max_tokens": 5}}, "options.max_tokens is not supported: use options.num_predict"),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature: "),
        ("chat", {"options": {"num_predict": -3}}, "options.num_predict: "),
        ("chat", {"options": {"top_p": 2}}, "options.top_p: "),
        ("chat", {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "repeat_last_n: -1"),
        ("chat", {"options": [1]}, "options: "),
        ("chat", {"temperature": 1}, "temperature is not supported: use options.temperature"),
        ("chat", {"num_predict": 5}, "use options.num_predict"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format is not supported: use format"),
        ("chat", {"formt": "json"}, "unknown field 'formt'; did you mean format?"),
        ("chat", {"format": "xml"}, 'format must be "json" or a JSON schema'),
        ("chat", {"format": {"type": 5}}, "type"),
        ("chat", {"think": "much"}, "think must be one of none, minimal"),
        ("chat", {"think": 0}, "think"),
        ("chat", {"keep_alive": [1]}, "keep_alive"),
        ("chat", {"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
         "messages[0].images is not supported: this model takes text"),
        ("chat", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role must be one of"),
        ("chat", {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood is not supported"),
        ("chat", {"messages": [{"content": "x"}]}, "role"),
        ("chat", {"messages": [{"role": "user", "content": ["x"]}]}, "content"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
         "arguments"),
        ("generate", {"images": ["aGk="]}, "images is not supported: this model takes text"),
        ("generate", {"context": [1, 2]}, "context is not supported: send the conversation as messages to /api/chat"),
        ("generate", {"template": "{{ .Prompt }}"}, "template is not supported: send the whole prompt with raw: true"),
        ("generate", {"raw": True, "system": "x"}, "system is not supported with raw: true"),
        ("generate", {"raw": True, "think": True}, "think is not supported with raw: true"),
        ("generate", {"width": 512}, "width is not supported"),
        ("generate", {"messages": CHAT}, "messages is not supported: use prompt"),
        ("generate", {"prompt": 5}, "prompt"),
        ("embed", {"input": [1, 2]}, "input"),
        ("embed", {"input": ["a", ""]}, "a text has no tokens"),
        ("embed", {"input": "x" * 5000, "truncate": False}, "maximum context length"),
        ("embed", {"dimensions": D_MODEL + 1}, "dimensions must be at most"),
        ("embed", {"input": ["a"] * 2049}, "at most 2048"),
        ("show", {"verbos": True}, "unknown field 'verbos'"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_is_refused(server: Server, path: str, more: dict[str, Any], says: str) -> None:
    least: Any = {"chat": {"messages": CHAT}, "generate": {"prompt": "x"}, "embed": {"input": "x"}, "show": {}}[path]
    status, answer = post(server, f"/api/{path}", {**least, **more})
    assert status == 400 and answer.keys() == {"error"} and says in answer["error"], answer


# ---------------------------------------------------------------- errors, keys, pages


def test_a_model_that_there_is_not(server: Server) -> None:
    for path, body in (("chat", {"messages": CHAT}), ("generate", {}), ("embed", {"input": "x"}), ("show", {})):
        status, answer = post(server, f"/api/{path}", {"model": "nothing:7b", **body})
        assert status == 404 and answer.keys() == {"error"}
        assert answer["error"].startswith("model 'nothing:7b' not found: this server has toy; `powerinfer pull`")
    status, answer = post(server, "/v1/chat/completions", {"model": "nothing:7b", "messages": CHAT})
    assert status == 404 and answer["error"]["code"] == "model_not_found"


def test_what_is_not_offered_names_a_command(server: Server) -> None:
    told = {
        "pull": "powerinfer pull", "create": "powerinfer serve", "copy": "powerinfer serve", "push": "not published",
        "blobs/sha256:0": "powerinfer serve --models", "delete": "powerinfer rm",
    }  # fmt: skip
    with client(server) as http:
        for name, says in told.items():
            answer = http.request("DELETE" if name == "delete" else "POST", f"/api/{name}", json={"model": "toy"})
            assert answer.status_code == 501 and says in answer.json()["error"], answer.text
        assert http.post("/api/nowhere", json={}).json() == {"error": "no route /api/nowhere"}
        assert http.get("/api/chat").json() == {"error": "GET is not allowed here: use POST"}
        for path in ("/", "/api/tags", "/api/version"):
            assert http.head(path).status_code == 200
        assert "Ollama is running" in http.get("/").text, "clients look for it, and people do not see it"


def test_programs_need_not_name_the_type_of_the_body(server: Server) -> None:
    """curl does not, in Ollama's own examples; a page of another origin must."""
    body = json.dumps({"prompt": "hello", "stream": False, "options": SHORT})
    with client(server) as http:
        for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}):
            answer = http.post("/api/generate", content=body, headers=headers)
            assert answer.status_code == 200 and answer.json()["eval_count"] == 12, answer.text
            for origin in ("https://example.org", "null", server.url):
                answer = http.post("/api/generate", content=body, headers={**headers, "Origin": origin})
                assert answer.status_code == 415, answer.text
            assert http.post("/v1/completions", content=body, headers=headers).status_code == 415
        assert http.post("/api/generate", content="no JSON").json()["error"].startswith("the body is not JSON")


def test_a_stream_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "PING_SECONDS", 0.01)
    slow = served_llm(SlowExecutor(0.05, n_pages=512), context=4096)
    body = {"prompt": "x", "raw": True, "options": {"seed": 5}}
    with serving(slow, timeout=0.4) as server, client(server) as http:
        *pieces, last = [json.loads(line) for line in http.post("/api/generate", json=body).text.splitlines()]
        assert "0.4 s" in last["error"] and last.keys() == {"error"}
        assert {piece["done"] for piece in pieces} == {False} and {"response": ""}.items() <= pieces[0].items()
        status, answer = post(server, "/api/generate", {**body, "stream": False})
        assert status == 504 and answer.keys() == {"error"}
    slow = served_llm(SlowExecutor(0.05, n_pages=512), context=4096)
    with (
        serving(slow, drain=0.1) as server,
        client(server) as http,
        http.stream("POST", "/api/generate", json=body) as answer,
    ):
        found = answer.iter_text()
        text = next(found)
        server.should_exit = True
        text += "".join(found)
    assert json.loads(text.splitlines()[-1]) == {"error": "the server is shutting down: the answer is not complete"}


def test_a_client_that_leaves_frees_its_slot() -> None:
    slow = served_llm(SlowExecutor(0.02, n_pages=512), context=4096)
    body = {"prompt": "x", "raw": True, "options": {"seed": 5}}
    with serving(slow) as server, client(server) as http:
        with http.stream("POST", "/api/generate", json=body) as answer:
            assert json.loads(next(answer.iter_lines()))["done"] is False
        until(lambda: idle(slow))
        figures = http.get("/metrics").text
        assert 'powerinfer_requests_total{endpoint="/api/generate",status="499"} 1.0' in figures


# ---------------------------------------------------------------- embeddings


def test_embeddings(server: Server, llm: LLM) -> None:
    _, wanted = post(server, "/v1/embeddings", {"input": ["abc", "de"]})
    vectors = [row["embedding"] for row in wanted["data"]]
    found = ask(server, "/api/embed", input=["abc", "de"])
    assert found["embeddings"] == vectors and found["prompt_eval_count"] == 5
    assert found["total_duration"] > found["load_duration"] >= 0 and found["model"] == "toy"
    assert ask(server, "/api/embed", input="abc")["embeddings"] == vectors[:1]
    assert ask(server, "/api/embed", input="")["embeddings"] == ask(server, "/api/embed", input=[])["embeddings"] == []
    short = ask(server, "/api/embed", input="abc", dimensions=2)["embeddings"][0]
    _, wanted = post(server, "/v1/embeddings", {"input": "abc", "dimensions": 2})
    assert short == wanted["data"][0]["embedding"]
    assert post(server, "/api/embeddings", {"prompt": "abc"})[1] == {"embedding": vectors[0]}
    assert post(server, "/api/embeddings", {"model": "toy"})[1] == {"embedding": []}
    fits, longer = "x" * llm.context, "x" * llm.context + "y" * 9
    assert ask(server, "/api/embed", input=longer)["embeddings"] == ask(server, "/api/embed", input=fits)["embeddings"]


# ---------------------------------------------------------------- models


def test_a_tag_may_be_left_out(server: Server) -> None:
    for name in ("toy", "toy:latest", "TOY:LATEST", "", None):
        assert ask(server, "/api/generate", model=name, prompt="x", options=SHORT)["model"] == (name or "toy")
    assert post(server, "/v1/completions", {"model": "toy:latest", "prompt": "x", "max_tokens": 1})[0] == 200


def test_loading_and_unloading_by_asking_for_nothing(server: Server) -> None:
    found = ask(server, "/api/generate")
    assert found.items() >= {"model": "toy", "response": "", "done": True, "done_reason": "load"}.items()
    with client(server) as http:
        answer = http.post("/api/chat", json={"model": "toy", "messages": []}).json()
        assert answer["message"] == {"role": "assistant", "content": ""} and answer["done_reason"] == "load"
        answer = http.post("/api/generate", json={"model": "toy", "keep_alive": 0})
        assert answer.status_code == 400 and "stays loaded" in answer.json()["error"]
    with serving_several(Toy("one"), Toy("two"), keep_alive=300) as several, client(several) as http:
        assert http.get("/api/ps").json() == {"models": []}
        assert http.post("/api/generate", json={"model": "one"}).json()["done_reason"] == "load"
        (row,) = http.get("/api/ps").json()["models"]
        assert (row["name"], row["size"], row["size_vram"], row["context_length"]) == ("one:latest", 1, 0, 512)
        for keep_alive in (0, "0", "0s", 0.0):
            assert http.post("/api/generate", json={"model": "one"}).status_code == 200
            until(lambda: not several.service.models[0].busy)
            body = {"model": "one", "messages": [], "keep_alive": keep_alive}
            assert http.post("/api/chat", json=body).json()["done_reason"] == "unload"
            assert http.get("/api/ps").json() == {"models": []}


def test_the_server_is_known_by_its_version(server: Server) -> None:
    with client(server) as http:
        version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "VS Code asks for that"


def test_what_models_are(tmp_path: Path) -> None:
    """Of a folder: one that is loaded and one that is not say the same, and one that cannot be read does no harm."""
    for name in ("one", "two"):
        tiny_llama(tmp_path / f"{name}.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    args = parsed(["--models", str(tmp_path), "--port", "0", "--threads", "1"])
    several = serve._serve_several(args, config_from(args, ServeConfig), config_from(args, EngineConfig), Output(False))
    with running(several), client(several) as http:

        def rows() -> dict[str, Any]:
            return {row["name"]: row for row in http.get("/api/tags").json()["models"]}

        before = rows()
        shown = http.post("/api/show", json={"model": "one"}).json()
        assert http.get("/api/ps").json() == {"models": []}, "nothing was loaded for that"
        assert http.post("/api/generate", json={"model": "one"}).json()["done_reason"] == "load"
        assert rows() == before and before.keys() == {"broken:latest", "one:latest", "two:latest"}
        one, two = before["one:latest"], before["two:latest"]
        assert one["size"] == (tmp_path / "one.gguf").stat().st_size and len(one["digest"]) == 64
        assert one["digest"] != two["digest"] and one["details"] == two["details"]
        assert one["details"].items() >= {"format": "gguf", "family": "llama", "quantization_level": "F32"}.items()
        assert one["details"]["parameter_size"].endswith("K") and before["broken:latest"]["size"] == 0
        status = http.post("/api/show", json={"name": "broken"})
        assert status.status_code == 500 and "broken.gguf" in status.json()["error"]
        assert http.post("/api/show", json={"model": "one:latest"}).json() == shown
        assert shown["template"] and shown["details"] == one["details"] and shown["capabilities"] == ["completion"]
        info = shown["model_info"]
        assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 128)
        assert info["general.parameter_count"] > 0 and info["llama.attention.head_count"] > 0
        assert not any(isinstance(value, list) for value in info.values())
        tiny_llama(tmp_path / "two.gguf", activation="silu")
        assert rows()["two:latest"]["digest"] != two["digest"], "another file"
        (tmp_path / "one.gguf").unlink()
        assert rows()["one:latest"]["details"] == one["details"], "it is loaded"


def test_what_a_model_can_do(server: Server, script: Any) -> None:
    assert ask(server, "/api/show")["capabilities"] == ["completion", "thinking"]
    script("", QWEN)
    assert ask(server, "/api/show", verbose=True)["capabilities"] == ["completion", "tools"]
    assert ask(server, "/api/show", name="toy")["template"] == QWEN


def test_a_quantisation_has_its_usual_name(tmp_path: Path) -> None:
    for number, level in ((15, "Q4_K_M"), (999, "F32")):
        path = tiny_gguf().add("general.file_type", U32, number).write(tmp_path / f"{number}.gguf")
        assert _facts(open_checkpoint(path)).details["quantization_level"] == level


def test_numbers_of_weights() -> None:
    wanted = {0: "", 12: "12", 1500: "1.50K", 134_515_008: "134.52M", 8_030_000_000: "8.0B"}
    assert {count: _short(count) for count in wanted} == wanted
