"""Large requests beside others: what one asks for never keeps the event loop or other threads from running."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import ByteTokenizer, client, post, served_llm
from test_tokenizer import HARD, byte_level_metadata

from powerinfer.formats import windows
from powerinfer.runtime.engine import LLM
from powerinfer.serve import work
from powerinfer.serve.api_error import ApiError
from powerinfer.serve.server import Server
from powerinfer.text import tokenizer as tokenizer_module
from powerinfer.text.tokenizer_gguf import tokenizer_from_gguf

CONTEXT = 512
HOSTILE = {"digits": "1", "a letter": "a", "a long word": "supercalifragilistic", "spaces": " ", "marks": "<|im_"}


@given(st.text("<|a>", max_size=80), st.integers(0, 80))
def test_a_pattern_in_windows_is_found_where_it_is(text: str, start: int) -> None:
    pattern = re.compile(re.escape("<|a|>") + "|" + re.escape("<|a|") + "|a>")
    whole = windows.WINDOW
    windows.WINDOW = 3
    try:
        found = windows.find(pattern, text, start, 5)
    finally:
        windows.WINDOW = whole
    wanted = pattern.search(text, start)
    assert (found and found.span()) == (wanted and wanted.span())


@pytest.mark.parametrize("special", [True, False])
def test_long_texts_have_the_tokens_of_short_ones(special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata("qwen2"))
    text = "\n".join(HARD) * 4
    assert len(text) > tokenizer_module.LONG
    found = tokenizer.encode(text, special=special)
    monkeypatch.setattr(tokenizer_module, "LONG", 1 << 30)
    assert found == tokenizer.encode(text, special=special)


@pytest.mark.parametrize("text", [*HOSTILE.values(), "The quick brown fox. "])
def test_what_exceeds_a_limit_is_known_without_all_of_its_tokens(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata("gpt-2"))
    monkeypatch.setattr(tokenizer_module, "PIECE", 1000)
    whole = (text * 10_000)[:10_000]
    count = len(tokenizer.encode(whole))
    for limit in (1, 10, count // 4, count - 1, count, count + 1):
        least = tokenizer.excess(whole, limit)
        assert least == 0 or limit < least <= count, "it is never said of a text that fits"
    assert tokenizer.excess(whole, count // 4) > 0 or count < 8 * tokenizer_module.SEAM


def test_the_ends_of_a_text_have_its_first_and_its_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata("qwen2"))
    monkeypatch.setattr(tokenizer_module, "PIECE", 100)
    text = "\n".join(HARD) * 8
    for count in (1, 10, 200):
        end = tokenizer.end_of(text, count)
        assert text.endswith(end) and tokenizer.encode(end)[-count:] == tokenizer.encode(text)[-count:]
        begin = tokenizer.start_of(text, count)
        assert text.startswith(begin) and tokenizer.encode(begin)[:count] == tokenizer.encode(text)[:count]
    assert max(len(tokenizer.end_of(text, 1)), len(tokenizer.start_of(text, 1))) < len(text)


def test_other_threads_run_while_a_text_is_encoded() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata("gpt-2"))
    tokenizer.encode("x" * 5000)  # the library is loaded
    beats: list[float] = []
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.005):
            beats.append(time.perf_counter())

    thread = threading.Thread(target=beat)
    thread.start()
    begin = time.perf_counter()
    tokenizer.encode("1" * 300_000, special=False)
    end = time.perf_counter()
    ended.set()
    thread.join()
    # a library that lets nobody run leaves time for one, before it begins
    assert sum(begin + (end - begin) / 4 < at < end - (end - begin) / 4 for at in beats) >= 2


# ---------------------------------------------------------------- JSON


def test_what_a_body_may_consist_of() -> None:
    most = work.MAX_VALUES
    good: list[bytes] = [
        json.dumps({"x": "[" * 2 * most}).encode(),
        json.dumps({"x": '"\\' * 2 * most}).encode(),
        json.dumps({"x": [1] * 2 * most}).encode(),
        json.dumps({"x": [[]] * (most - 3)}).encode(),
    ]
    for body in good:
        assert work._read_json(body) == json.loads(body)
    for body in (
        b'{"x": [' + b"[]," * most + b"1]}",
        b'{"x": [' + b"{}," * most + b"1]}",
        b'{"x": [' + b'"",' * most + b"1]}",
        b'{"x": [' + b'"\\"[",' * most + b"1]}",
        b'{"x": "' + b"[" * most + b'", "y": [' + b"[]," * most + b"1]}",
    ):
        with pytest.raises(ApiError, match="more than 100000 lists"):
            work._read_json(body)


# ---------------------------------------------------------------- over HTTP


class WaitingTokenizer(ByteTokenizer):
    """Once `entered` is asked for, encodes only when `go` is set."""

    def __init__(self) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.go.set()

    def excess(self, text: str, limit: int) -> int:
        self.entered.set()
        assert self.go.wait(30)
        return super().excess(text, limit)


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = served_llm(context=CONTEXT)
    llm.tokenizer = WaitingTokenizer()  # type: ignore[assignment]
    return llm


ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/embeddings": lambda text: {"input": text},
    "/tokenize": lambda text: {"content": text},
    "/apply-template": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/completion": lambda text: {"prompt": [1, text]},
    "/embedding": lambda text: {"content": text},
}


@pytest.mark.parametrize("size", [600, (1 << 20) + 1])
@pytest.mark.parametrize("path", ROUTES)
def test_others_are_answered_while_a_text_is_looked_at(
    path: str, size: int, server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = llm.tokenizer
    monkeypatch.setattr("powerinfer.serve.prompts.MAX_COUNTED", CONTEXT)
    tokenizer.go.clear()
    tokenizer.entered.clear()
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(post(server, path, ROUTES[path]("a" * size))))
    thread.start()
    try:
        assert tokenizer.entered.wait(30)
        with client(server) as http:
            assert http.get("/health").status_code == 200
            assert not answers, "the text is still looked at"
    finally:
        tokenizer.go.set()
        thread.join(30)
    ((status, answer),) = answers
    assert status == 400, answer
    assert f"least {size} tokens" in answer["error"]["message"] or f"({size} in the" in answer["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_text_that_cannot_fit_is_never_encoded(
    path: str, server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*args: Any, **options: Any) -> list[int]:
        raise AssertionError("it is too long")

    monkeypatch.setattr("powerinfer.serve.prompts.MAX_COUNTED", CONTEXT)
    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    status, answer = post(server, path, ROUTES[path]("a" * 2000))
    assert status == 400, answer
    if "code" in answer["error"]:
        counted = path in ("/tokenize", "/apply-template")
        assert answer["error"]["code"] == ("text_too_long" if counted else "context_length_exceeded")


def test_turns_that_are_left_out_are_never_encoded(
    server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is longer than the context is known to be without its tokens."""
    seen: list[int] = []
    whole = llm.tokenizer.encode_masked

    def encode(text: str, *spans: Any, **options: Any) -> list[int]:
        seen.append(len(text))
        return whole(text, *spans, **options)

    monkeypatch.setattr(llm.tokenizer, "encode_masked", encode)
    turns = [{"role": "user", "content": "a" * 2000}, {"role": "assistant", "content": "b"}]
    body = {"messages": [*turns, {"role": "user", "content": "hello"}], "truncate_prompt_tokens": -1, "max_tokens": 1}
    status, answer = post(server, "/v1/chat/completions", body)
    assert status == 200 and answer["usage"]["prompt_tokens"] < 100
    assert seen and max(seen) < CONTEXT
    status, answer = post(server, "/v1/chat/completions", {**body, "messages": turns[:1]})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_a_long_text_may_be_shortened(server: Server) -> None:
    body = {"prompt": "a" * 2000, "truncate_prompt_tokens": 10, "max_tokens": 1}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200 and answer["usage"]["prompt_tokens"] == 10
