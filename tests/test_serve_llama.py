"""llama-server's own routes: what its clients send and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import ByteTokenizer, client, post, served_llm, serving, until
from test_tool_calls import QWEN, WEATHER
from toy_model import BOS, EOS, ToyExecutor, idle, reference_embedding, reference_greedy

from powerinfer.runtime.engine import LLM
from powerinfer.serve.llama_completion import CompletionBody
from powerinfer.serve.schema import ChatRequest
from powerinfer.serve.server import Server
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.sampling_defaults import SamplingDefaults
from powerinfer.text.tokenizer import Added, Vocabulary

PREFIX, SUFFIX, MIDDLE = 200, 201, 202  # bytes that stand for the marks of infilling
REPOSITORY, FILE = 203, 204
GREEDY = {"temperature": 0, "prompt": "hello"}
CHAT = [{"role": "user", "content": "hello"}]


class CodeTokenizer(ByteTokenizer):
    """Has the tokens for infilling that are named, and puts a token before a prompt."""

    add_bos, bos_id = True, BOS

    def __init__(self, **marks: int) -> None:
        added = tuple(Added(text, token, True) for text, token in marks.items())
        self.vocabulary = Vocabulary(piece=lambda token: None, size=258, byte_level=True, added=added)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return served_llm(ToyExecutor(n_pages=512), context=1024, max_batch=4)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    with serving(llm) as server:
        yield server


def answer(server: Server, **body: Any) -> Any:
    status, document = post(server, "/completion", GREEDY | body)
    assert status == 200, document
    return document


def stream(server: Server, path: str, body: Any) -> list[Any]:
    with client(server) as http:
        lines = http.post(path, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def expected(llm: LLM, prompt: str | list[int], n: int) -> list[int]:
    return reference_greedy(llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, n)


def without_eos(tokens: list[int]) -> list[int]:
    return [token for token in tokens if token != EOS]


def test_a_completion(server: Server, llm: LLM) -> None:
    tokens = expected(llm, "hello", 8)
    document = answer(server, n_predict=8, return_tokens=True)
    assert document["tokens"] == tokens
    assert document["content"] == llm.tokenizer.decode(tokens)
    assert document["prompt"] == llm.tokenizer.decode(llm.tokenizer.encode("hello"), skip_special=False)
    ended = tokens[-1] == EOS
    counts = {"tokens_predicted": len(tokens), "tokens_evaluated": len(llm.tokenizer.encode("hello"))}
    about = {"index": 0, "stop": True, "model": "toy", "truncated": False, "stopping_word": ""}
    assert document.items() >= (counts | about | {"stop_type": "eos" if ended else "limit"}).items()
    timings = document["timings"]
    assert timings["predicted_n"] == len(tokens)
    assert timings["prompt_n"] + timings["cache_n"] == document["tokens_evaluated"]
    assert timings["cache_n"] == document["tokens_cached"]
    assert all(value >= 0 for value in timings.values())
    assert timings["predicted_per_second"] == pytest.approx(1e3 * (len(tokens) - 1) / timings["predicted_ms"])
    assert answer(server, n_predict=8)["tokens"] == []


def test_a_stream_is_the_same_answer(server: Server, llm: LLM) -> None:
    whole = answer(server, n_predict=12, return_tokens=True, n_probs=3)
    *chunks, last = stream(server, "/completions", GREEDY | {"n_predict": 12, "n_probs": 3, "timings_per_token": True})
    assert [chunk["tokens"] for chunk in chunks] == [[token] for token in whole["tokens"]]
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [one for chunk in chunks for one in chunk["completion_probabilities"]] == whole["completion_probabilities"]
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert not any(chunk["stop"] for chunk in chunks) and last["stop"]
    assert last["content"] == "" and last["tokens"] == [] and "completion_probabilities" not in last
    assert last["generation_settings"]["stream"] is True
    assert whole["tokens_predicted"] == last["tokens_predicted"]


def test_probabilities_have_ids_and_bytes(server: Server) -> None:
    (one,) = answer(server, n_predict=1, n_probs=4)["completion_probabilities"]
    assert one["bytes"] == [one["id"]] and one["logprob"] <= 0
    assert one["top_logprobs"][0]["id"] == one["id"] and len(one["top_logprobs"]) == 4


def test_several_prompts_and_answers(server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    for prompts in (["hello", ids], [{"prompt_string": "hello"}, "hello"], [ids, [*ids[:-2], "lo"]]):
        documents = answer(server, prompt=prompts, n_predict=4)
        assert [one["index"] for one in documents] == [0, 1]
        assert documents[0]["content"] == documents[1]["content"]
        assert documents[0]["tokens_evaluated"] == len(ids)
    assert len(answer(server, n_predict=2, n_cmpl=3)) == 3
    assert answer(server, prompt=["hello"], n_predict=4)["content"] == documents[0]["content"]


def test_ids_and_texts_make_one_prompt(server: Server, llm: LLM) -> None:
    given = [72, "ello", 33.0]
    tokens = [72, *b"ello", 33]
    assert answer(server, prompt=given, n_predict=4, return_tokens=True)["tokens"] == expected(llm, tokens, 4)


def test_what_ends_an_answer(server: Server, llm: LLM) -> None:
    text = answer(server, n_predict=12, ignore_eos=True)["content"]
    document = answer(server, n_predict=12, ignore_eos=True, stop=["never", text[5]])
    assert (document["stop_type"], document["stopping_word"]) == ("word", text[5])
    assert document["content"] == text[: text.index(text[5])]
    biases = document["generation_settings"]["logit_bias"]
    assert biases == [{"token": EOS, "bias": None}]
    bias = {"logit_bias": [[EOS, 1000]]}
    document = answer(server, n_predict=12, **bias)
    assert (document["stop_type"], document["content"], document["tokens_predicted"]) == ("eos", "", 1)


def test_an_answer_ends_with_the_context(server: Server, llm: LLM) -> None:
    prompt = "x" * (llm.context - 6)
    room = llm.context - len(llm.tokenizer.encode(prompt))
    for n_predict in (-1, 100):
        document = answer(server, prompt=prompt, n_predict=n_predict, ignore_eos=True)
        assert document["tokens_predicted"] == room
        assert document["truncated"] and document["stop_type"] == "limit"
    assert not answer(server, prompt=prompt, n_predict=room, ignore_eos=True)["truncated"]
    status, document = post(server, "/completion", {"prompt": "x" * llm.context})
    assert status == 400
    error = document["error"]
    assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == llm.context
    assert error["n_prompt_tokens"] == len(llm.tokenizer.encode("x" * llm.context))


def test_a_prompt_that_is_only_computed(server: Server) -> None:
    document = answer(server, n_predict=0, prompt="compute this, and nothing more; " * 3)
    assert (document["content"], document["tokens_predicted"], document["timings"]["predicted_n"]) == ("", 0, 0)
    again = answer(server, n_predict=0, prompt="compute this, and nothing more; " * 3)
    assert again["tokens_cached"] > 0
    (last,) = stream(server, "/completion", GREEDY | {"n_predict": 0})
    assert last["stop"] and last["content"] == ""


def test_response_fields(server: Server) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/predicted_n", "nowhere", "content/nowhere"]
    document = answer(server, n_predict=3, ignore_eos=True, response_fields=fields)
    assert document.pop("content")
    assert document == {"generation_settings/n_predict": 3, "timings/predicted_n": 3}


def test_settings_are_those_of_the_answer(server: Server) -> None:
    asked = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 7, "repeat_penalty": 1.5,
        "repeat_last_n": -1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["zz"], "n_predict": 2,
    }  # fmt: skip
    settings = answer(server, **asked)["generation_settings"]
    assert settings.items() >= asked.items()
    del asked["repeat_last_n"]  # as many clients do not say it
    assert answer(server, **asked)["generation_settings"] == settings
    asked["repeat_last_n"] = -1
    settings = answer(server, **asked, samplers=["top_k", "dry"])["generation_settings"]
    off = {"top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "repeat_penalty": 1.0}
    assert settings.items() >= (off | {"top_k": 3}).items()
    assert settings["samplers"] == ["top_k", "dry"]
    assert answer(server, **asked, samplers="kd")["generation_settings"] == settings


def test_biases_as_pairs_and_of_texts(server: Server, llm: LLM) -> None:
    text = answer(server, n_predict=8, ignore_eos=True)["content"]
    first = ord(text[0])
    pairs: list[Any] = [[[first, False]], [[float(first), -1000]], [[text[0], -1000]]]
    for bias in (*pairs, {text[0]: False}, {str(first): -1000}):
        document = answer(server, n_predict=8, ignore_eos=True, logit_bias=bias)
        assert text[0] not in document["content"]
    body = {"messages": CHAT, "max_tokens": 4, "temperature": 0, "logit_bias": [["Q", 1000]]}
    assert post(server, "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == "QQQQ"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": []}, "prompt has 0 texts"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": [1, {}]}, "prompt must be a text"),
        ({"prompt": [True]}, "prompt must be a text"),
        ({"prompt": [999]}, "token 999"),
        ({"prompt": [1.5]}, "prompt must be a text"),
        ({"logit_bias": [[1.5, 1]]}, "a pair is a token id or a text"),
        ({"prompt": [-1]}, "token -1"),
        ({"prompt": {"text": "x"}}, "unknown field prompt.text"),
        ({"prompt": {"prompt_string": 3}}, "prompt.prompt_string must be a text"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["eA=="]}}, "prompt.multimodal_data is not supported"),
        ({"prompt": ["x"] * 1025}, "1 to 1024"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64},
         "repeat_penalty of the last 64 tokens is not supported: with repeat_last_n: -1"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2, "repeat_last_n": -1}, "differ"),
        ({"samplers": ["mirostat"]}, "samplers 'mirostat' is not supported"),
        ({"mirostat": 2}, "mirostat is not supported"),
        ({"post_sampling_probs": True}, "post_sampling_probs is not supported"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora is not supported"),
        ({"samplers": "kz"}, "samplers 'z' is not supported"),
        ({"n_predict": 3}, "max_tokens and n_predict differ"),
        ({"n_indent": 2, "n_cmpl": 2}, "for one answer"),
        ({"n_predct": 2}, "did you mean n_predict"),
    ],
)
def test_what_is_refused_is_named(server: Server, body: dict[str, Any], says: str) -> None:
    status, document = post(server, "/completion", GREEDY | {"max_tokens": 2} | body)
    assert status == 400 and says in document["error"]["message"]


def test_what_asks_for_nothing_is_accepted(server: Server) -> None:
    nothing = {
        "repeat_penalty": 1.0, "repeat_last_n": 64, "dry_multiplier": 0.0, "dry_base": 1.75, "xtc_threshold": 0.1,
        "mirostat_tau": 5.0, "cache_prompt": False, "id_slot": 0, "lora": [], "n_keep": 0, "response_fields": [],
        "samplers": ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], "n_indent": 0,
        "t_max_predict_ms": 0, "t_max_prompt_ms": 500, "return_progress": True, "seed": -1, "stop": [],
    }  # fmt: skip
    assert answer(server, n_predict=3, **nothing)["content"] == answer(server, n_predict=3)["content"]


@pytest.mark.parametrize(
    "off", [{"repeat_penalty": 1.0}, {"repeat_penalty": 1, "repeat_last_n": 64}, {"repeat_last_n": 0}]
)
def test_a_penalty_that_is_turned_off_is_not_the_models(off: dict[str, Any]) -> None:
    defaults = SamplingDefaults({"repetition_penalty": 1.1})
    for more, penalty in (({}, 1.1), (off, 1.0)):
        params = CompletionBody.model_validate({"prompt": "x"} | more).to_params(defaults, 4096)
        chat = ChatRequest.model_validate({"messages": CHAT} | more)
        chat.check()
        assert params.repetition_penalty == chat.params(defaults, 1, None).repetition_penalty == penalty


def test_a_chat_of_llama_servers_own_page_is_answered(server: Server) -> None:
    body = {
        "messages": CHAT, "max_tokens": 3, "return_progress": True, "reasoning_format": "auto", "temperature": 0.8,
        "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0,
        "xtc_threshold": 0.1, "typ_p": 1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        "backend_sampling": False, "timings_per_token": True,
    }  # fmt: skip
    chunks = stream(server, "/v1/chat/completions", body)
    assert chunks[-1]["choices"][0]["finish_reason"] and chunks[-1]["timings"]["predicted_n"] >= 1
    letters = {"samplers": "edkypmxt", "n_predict": 3, "typical_p": 1, "max_tokens": None}
    assert post(server, "/v1/chat/completions", body | letters)[0] == 200


def grammar_answer(server: Server, text: str, **body: Any) -> Any:
    """The answer of a model that is made to write a text."""
    return answer(server, grammar=f"root ::= {json.dumps(text)}", n_predict=len(text) + 16, **body)


def test_an_answer_ends_at_a_line_of_less_indentation(server: Server) -> None:
    document = grammar_answer(server, "a(\n    b\n  c\n d\ne", n_indent=2)
    assert document["content"] == "a(\n    b\n  c\n "
    assert document["stop_type"] == "limit" and document["has_new_line"] and not document["truncated"]
    body = GREEDY | {"grammar": 'root ::= "a\\n  b\\nc"', "n_predict": 64, "n_indent": 1}
    *chunks, last = stream(server, "/completion", body)
    assert "".join(chunk["content"] for chunk in chunks) == "a\n  b\n"
    assert last["tokens_predicted"] == len(chunks) == 7


def test_an_answer_ends_at_the_first_line_after_its_time(server: Server, llm: LLM) -> None:
    document = grammar_answer(server, "a" * 300 + "\nb\nc", t_max_predict_ms=1)
    assert document["content"] == "a" * 300 + "\n"
    assert document["stop_type"] == "limit"
    until(lambda: idle(llm))
    assert grammar_answer(server, "a\nb", t_max_predict_ms=60000)["content"] == "a\nb"


# --------------------------------------------------------------------------------------------------------------- infill


def infill_server(**marks: int) -> tuple[LLM, Any]:
    llm = served_llm(ToyExecutor(n_pages=64), context=256)
    tokenizer = CodeTokenizer(**marks)
    llm.tokenizer = llm._runner._tokenizer = tokenizer  # type: ignore[assignment]
    return llm, serving(llm)


MARKS = {"<|fim_prefix|>": PREFIX, "<|fim_suffix|>": SUFFIX, "<|fim_middle|>": MIDDLE}
REPOSITORY_MARKS = MARKS | {"<|repo_name|>": REPOSITORY, "<|file_sep|>": FILE}
CODE = {"input_prefix": "ab", "prompt": "c", "input_suffix": "de"}
BODY = CODE | {"n_predict": 4, "temperature": 0, "return_tokens": True}


def asked_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    whole = llm._runner.request

    def request(prompt: list[int], params: Any, **limits: Any) -> Any:
        seen.append((prompt, params))
        return whole(prompt, params, **limits)

    monkeypatch.setattr(llm._runner, "request", request)
    return seen


def test_infilling(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, running = infill_server(**MARKS)
    seen = asked_of(llm, monkeypatch)
    inside = [BOS, PREFIX, *b"abc", SUFFIX, *b"de", MIDDLE]
    with running as server:
        status, document = post(server, "/infill", BODY)
        assert status == 200 and document["tokens"] == expected(llm, inside, 4)
        assert seen[-1][0] == inside and seen[-1][1].max_tokens == 4
        extra = {"input_extra": [{"text": "other", "filename": "o.c", "time": 3}]}
        assert post(server, "/infill", BODY | extra | {"samplers": ["top_k", "infill"]})[0] == 200
        assert seen[-1][0] == [*b"\n\n--- snippet ---\n\nother", *inside]
        long = {"input_prefix": "p" * 999 + "P", "input_suffix": "S" + "s" * 999, "prompt": None}
        assert post(server, "/infill", BODY | long)[0] == 200
        prompt = seen[-1][0]
        assert len(prompt) <= llm.context - 4
        at = prompt.index(SUFFIX)
        assert prompt[at - 1] == ord("P") and prompt[at + 1] == ord("S")
        assert 2.5 < (at - 2) / (len(prompt) - at - 2) < 3.5
        for wrong in ({"input_prefix": None}, {"input_suffix": 3}, {"input_extra": [{}]}, {"prompt": ["x"]}):
            status, document = post(server, "/infill", BODY | wrong)
            assert status == 400 and next(iter(wrong)) in document["error"]["message"]


def test_infilling_in_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, running = infill_server(**REPOSITORY_MARKS)
    seen = asked_of(llm, monkeypatch)
    with running as server:
        extra = {"input_extra": [{"text": "one", "filename": "1.c"}, {"text": "two"}]}
        assert post(server, "/infill", BODY | extra)[0] == 200
    inside = [BOS, PREFIX, *b"abc", SUFFIX, *b"de", MIDDLE]
    files = [FILE, *b"1.c\none", FILE, *b"tmp\ntwo", FILE, *b"filename\n"]
    assert seen[-1][0] == [REPOSITORY, *b"myproject\n", *files, *inside]
    assert set(seen[-1][1].stop_token_ids) == {REPOSITORY, FILE}


def test_a_model_that_cannot_fill_in() -> None:
    _, running = infill_server(**{"<fim_prefix>": PREFIX})
    with running as server:
        status, document = post(server, "/infill", BODY)
    assert status == 400 and document["error"]["code"] == "no_infill"
    assert document["error"]["message"].endswith("it has no token for the suffix and the middle")


# --------------------------------------------------------------------------------------------------- state and the rest


def test_properties(server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(server) as http:
        document = http.get("/props").json()
        assert http.get("/props?model=toy").json() == document
        assert http.get("/props?model=other").status_code == 404
    assert document["total_slots"] == 4 and document["model_alias"] == "toy"
    assert document["default_generation_settings"]["n_ctx"] == llm.context
    assert document["default_generation_settings"]["params"]["temperature"] == 0.8
    assert document["default_generation_settings"]["params"]["n_predict"] == -1
    assert llm.template is not None and document["chat_template"] == llm.template.source
    assert "chat_template_tool_use" not in document
    monkeypatch.setattr(llm, "template", ChatTemplate("plain", tool_use="with tools"))
    with client(server) as http:
        document = http.get("/props").json()
    assert (document["chat_template"], document["chat_template_tool_use"]) == ("plain", "with tools")


def test_slots_show_what_runs() -> None:
    executor = ToyExecutor(n_pages=64)
    llm = served_llm(executor, max_batch=2)
    with serving(llm) as server, client(server) as http:
        idle_slot = {"n_ctx": llm.context, "speculative": False, "is_processing": False}
        assert http.get("/slots").json() == [{"id": 0} | idle_slot, {"id": 1} | idle_slot]
        executor.held = True
        body = GREEDY | {"n_predict": 9, "stream": True, "ignore_eos": True, "top_k": 5}
        executor.let(3)  # before, for the answer begins with a token, or after seconds without one
        with http.stream("POST", "/completion", json=body) as response:
            lines = response.iter_lines()
            until(lambda: llm.running() and llm.running()[0].generated == 3)
            slots = http.get("/slots").json()
            executor.held = False
            executor.let(20)
            assert sum('"stop":true' in line for line in lines) == 1
    assert [slot["is_processing"] for slot in slots] == [True, False]
    n = len(llm.tokenizer.encode("hello"))
    sizes = {"n_prompt_tokens": n, "n_prompt_tokens_processed": n, "n_prompt_tokens_cache": 0}
    assert slots[0].items() >= sizes.items() and slots[0]["params"]["top_k"] == 5
    assert slots[0]["next_token"] == [{"has_next_token": True, "has_new_line": False, "n_remain": 6, "n_decoded": 3}]
    assert "hello" not in json.dumps(slots)


def test_no_slot_is_free() -> None:
    executor = ToyExecutor(n_pages=64)
    llm = served_llm(executor, max_batch=1)
    with serving(llm) as server, client(server) as http:
        executor.held = True
        executor.let(1)
        with http.stream("POST", "/completion", json=GREEDY | {"n_predict": 4, "stream": True}) as response:
            until(lambda: len(llm.running()) == 1)
            assert http.get("/slots?fail_on_no_slot=1").status_code == 503
            executor.held = False
            executor.let(9)
            response.read()
        until(lambda: idle(llm))
        assert http.get("/slots?fail_on_no_slot=1").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "expected_status"),
    [
        ("POST", "/props", 501), ("POST", "/slots/0?action=save", 501), ("POST", "/lora-adapters", 501),
        ("POST", "/rerank", 501), ("POST", "/v1/rerank", 501), ("GET", "/cors-proxy?url=http://127.0.0.1", 403),
        ("GET", "/tools", 403), ("GET", "/v1/stream", 501),
    ],
)  # fmt: skip
def test_what_is_not_offered_says_so(server: Server, method: str, path: str, expected_status: int) -> None:
    with client(server) as http:
        refused = http.request(method, path, json={})
    assert refused.status_code == expected_status
    name = path.partition("?")[0].removesuffix("/0")
    assert refused.json()["error"]["message"].startswith(f"{name} is not offered: ")


def test_there_are_no_adapters(server: Server) -> None:
    with client(server) as http:
        assert http.get("/lora-adapters").json() == []


def test_routes_without_v1(server: Server) -> None:
    chat = {"messages": CHAT, "max_tokens": 4, "temperature": 0}
    plain, versioned = (post(server, path, chat)[1] for path in ("/chat/completions", "/v1/chat/completions"))
    assert plain["choices"] == versioned["choices"]
    with client(server) as http:
        assert http.get("/models").json() == http.get("/v1/models").json()
        assert http.get("/v1/health").json() == {"status": "ok"}
    body = {"messages": CHAT, "n_predict": 3, "ignore_eos": True}
    assert post(server, "/chat/completions", body)[1]["usage"]["completion_tokens"] == 3
    assert post(server, "/responses", {"input": "hello", "max_output_tokens": 2})[1]["object"] == "response"


def test_embeddings_of_llama_server(server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    for body in ({"content": "hello"}, {"input": [ids]}, {"input": [*ids[:-1], "o"]}):
        status, document = post(server, "/embedding", body)
        assert status == 200 and document == [
            {"index": 0, "embedding": [pytest.approx(reference_embedding(ids).tolist(), abs=1e-6)]}
        ]
    assert [one["index"] for one in post(server, "/embeddings", {"input": ["a", "b"]})[1]] == [0, 1]
    assert post(server, "/embedding", {})[0] == 400


def test_tokens_are_counted(server: Server, llm: LLM) -> None:
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        status, document = post(server, path, {"messages": CHAT})
        assert status == 200
        assert document["input_tokens"] == len(llm.encode_chat(CHAT))
    assert post(server, "/v1/responses/input_tokens", {"input": "hello"})[1] == document


# ---------------------------------------------------------------------------------------------------------------- chats


def test_timings_of_chats_and_texts(server: Server) -> None:
    body = {"max_tokens": 5, "ignore_eos": True, "timings_per_token": True, "stream_options": {"include_usage": True}}
    for path, asked in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "hello"})):
        chunks = stream(server, path, body | asked)
        counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
        assert sorted(counts) == counts and counts[-1] == 5
        assert ("timings" in chunks[0]) == (path == "/v1/completions")  # a chat's first chunk has no token
        last = chunks[-1]
        assert last["choices"] == [] and last["timings"]["prompt_n"] + last["timings"]["cache_n"] > 0
        plain = {name: value for name, value in body.items() if name != "stream_options"} | asked
        assert post(server, path, plain)[1]["timings"]["predicted_n"] == 5
        assert "timings" not in post(server, path, plain | {"timings_per_token": False})[1]


def test_the_last_message_is_continued(server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asked_of(llm, monkeypatch)
    for content in ("It is", "It is ", "e", "user: hello\nassistant", [{"type": "text", "text": "It is"}]):
        messages = [*CHAT, {"role": "assistant", "content": content}]
        body = {"messages": messages, "max_tokens": 2, "continue_final_message": True}
        assert post(server, "/v1/chat/completions", body)[0] == 200
        text = content if isinstance(content, str) else "It is"
        assert bytes(seen[-1][0]).decode().endswith(f"user: hello\nassistant: {text}")
        assert post(server, "/apply-template", body)[1]["prompt"] == bytes(seen[-1][0]).decode()
    claude = {"messages": [*CHAT, {"role": "assistant", "content": "It is"}], "max_tokens": 2}
    assert post(server, "/v1/messages", claude)[0] == 200
    assert bytes(seen[-1][0]).decode().endswith("assistant: It is")


@pytest.mark.parametrize(
    ("last", "more", "says"),
    [
        ({"role": "user", "content": "x"}, {}, "needs a last message that is the assistant's"),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_what_cannot_be_continued(server: Server, last: Any, more: Any, says: str) -> None:
    body = {"messages": [*CHAT, last], "max_tokens": 2, "continue_final_message": True} | more
    status, document = post(server, "/v1/chat/completions", body)
    assert status == 400 and says in document["error"]["message"]


def test_a_template_that_leaves_out_the_last_message() -> None:
    llm = served_llm()
    llm.template = ChatTemplate("{{ messages[0].content }}")
    body = {"messages": [*CHAT, {"role": "assistant", "content": "x"}], "continue_final_message": True}
    with serving(llm) as server:
        status, document = post(server, "/v1/chat/completions", body)
    assert status == 400 and "it cannot be continued" in document["error"]["message"]


def test_the_prompt_of_a_chat_with_tools(server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ tools | tojson if tools }}" + (llm.template.source if llm.template else "") + f"{{# {QWEN} #}}"
    monkeypatch.setattr(llm, "template", ChatTemplate(source))
    seen = asked_of(llm, monkeypatch)
    for more in ({}, {"tools": [WEATHER]}, {"tools": []}, {"tools": None}, {"add_generation_prompt": False}):
        body = {"messages": CHAT, "max_tokens": 2} | more
        status, document = post(server, "/apply-template", body)
        assert status == 200 and document["prompt"].endswith("assistant: ") == ("add_generation_prompt" not in more)
        assert ("get_weather" in document["prompt"]) == bool(more.get("tools"))
        assert post(server, "/v1/chat/completions", body)[0] == 200
        assert bytes(seen[-1][0]).decode() == document["prompt"]
