"""The Python API as its users meet it: types, misspelt names, wrong values, what it says about itself."""

from __future__ import annotations

import asyncio
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import InitVar, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from model_files import tiny_gguf
from toy_model import toy_llm

import powerinfer
from powerinfer import AsyncLLM, Completion, EngineConfig, SamplingParams, StreamEvent, TokenLogprob
from powerinfer.devices.choices import Choice, Choices, GpuPart
from powerinfer.errors import RequestError
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.options import EngineOptions, SamplingOptions
from powerinfer.runtime.request import Timings
from powerinfer.text.chat import ChatTemplate, MessageError, plain_messages
from powerinfer.text.grammar import AfterThought, Grammar, LazyGrammar

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{{ tools }}{{ extra }}"


def talker() -> LLM:
    """A model with a chat template."""
    llm = toy_llm()
    llm.template = ChatTemplate(TEMPLATE)
    return llm


# ---------------------------------------------------------------- types


def test_the_engines_keywords_are_its_configuration() -> None:
    keywords, options = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    assert list(keywords) == [field.name for field in fields(EngineConfig)]
    for field in fields(EngineConfig):
        chosen = [one for one in (keywords[field.name], *get_args(keywords[field.name])) if get_origin(one) is Literal]
        choices = tuple(one for literal in chosen for one in get_args(literal))
        assert choices == tuple(field.metadata.get("choices", ())), field.name
        if not choices:
            wanted = options[field.name] | str if field.metadata.get("size") else options[field.name]
            wanted = int | str | Sequence[int | str] | None if field.metadata.get("sizes") else wanted
            assert keywords[field.name] == wanted, field.name
        assert (type(None) in get_args(keywords[field.name])) == (type(None) in get_args(options[field.name]))


def test_the_keywords_of_sampling_are_its_parameters() -> None:
    names = {"Grammar": Grammar, "LazyGrammar": LazyGrammar, "AfterThought": AfterThought}
    keywords = get_type_hints(SamplingOptions, localns=names)
    params = get_type_hints(SamplingParams, localns=names)
    assert list(keywords) == list(params), "InitVars are among them, fields are too"
    for name, declared in params.items():
        wanted = declared.type if isinstance(declared, InitVar) else declared
        assert keywords[name] == wanted, name


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda llm: LLM("x", thread=4), r"LLM has no option 'thread'; did you mean threads\?"),
        (lambda llm: LLM("x", trial=False, retrial=True), "--no-trial makes none: leave out one of the two"),
        (lambda llm: LLM("x", zzz=4), r"LLM has no option 'zzz'; it has threads, context, "),
        (lambda llm: LLM("x", prefix_cache="no"), "prefix_cache must be True or False, not 'no'"),
        (lambda llm: AsyncLLM("x", thread=4), r"did you mean threads\?"),
        (lambda llm: SamplingParams(temprature=0), r"SamplingParams has no option 'temprature'; did you mean temp"),
        (lambda llm: llm.default_params(top_kk=1), r"did you mean top_k\?"),
        (lambda llm: llm.generate(None), "prompts must be a text or a list of prompts, not None"),
        (lambda llm: llm.generate(b"text"), "prompts must be a text or a list of prompts, not b'text'"),
        (lambda llm: llm.generate(["a", 3]), "a prompt is a text or a list of token ids, not 3"),
        (lambda llm: llm.generate([None]), "a prompt is a text or a list of token ids, not None"),
        (lambda llm: llm.generate([["a"]]), "a prompt is a text or a list of token ids, not "),
        (lambda llm: llm.generate([[True]]), "a prompt is a text or a list of token ids, not "),
        (lambda llm: llm.generate(CHAT), "messages are for chat and chat_stream"),
        (lambda llm: llm.generate([CHAT]), "messages are for chat and chat_stream"),
        (lambda llm: llm.generate("a", {"seed": 1}), r"params must be a SamplingParams, not dict: SamplingParams\("),
        (lambda llm: llm.generate("a", [GREEDY]), "takes one SamplingParams"),
        (lambda llm: llm.generate("a", max_tokens=5), r"generate has no option .*; it is one of SamplingParams"),
        (lambda llm: llm.stream("a", temperature=0), r"stream has no option .*; it is one of SamplingParams\(temper"),
        (lambda llm: llm.generate("a", parms=GREEDY), r"generate has no option 'parms'; did you mean params\?"),
        (lambda llm: llm.generate("a", stream=True), "; chat_stream and stream answer token by token"),
        (lambda llm: llm.chat(CHAT, stream=True), "; chat_stream and stream answer token by token"),
        (lambda llm: AsyncLLM.from_llm(llm).stream("a", max_tokens=5), r"it is one of SamplingParams\(max_tokens="),
        (lambda llm: LLM("x", n_ctx=512), "LLM has no option 'n_ctx'; here it is context"),
        (lambda llm: LLM("x", n_gpu_layers=9), "here it is gpu and vram"),
        (lambda llm: LLM(model_path="x"), "here it is model"),
        (lambda llm: llm.generate(["a"], {"seed": 1}), "params must be a SamplingParams or a list of them, not"),
        (lambda llm: llm.generate(["a"], [16]), "params must be a SamplingParams, not 16"),
        (lambda llm: llm.stream(CHAT), "messages are for chat and chat_stream"),
        (lambda llm: llm.stream(None), "a prompt is a text or a list of token ids, not None"),
        (lambda llm: llm.stream("a", 16), "params must be a SamplingParams, not 16"),
        (lambda llm: llm.chat("text"), "messages must be a list of .*; generate and stream take a plain text"),
        (lambda llm: llm.chat(CHAT[0]), "messages must be a list of "),
        (lambda llm: llm.chat(None), "messages must be a list of "),
        (lambda llm: llm.chat(["text"]), r"messages\[0\] must be .*not str"),
        (lambda llm: llm.chat([]), "at least one message"),
        (lambda llm: llm.chat(CHAT, 16), "params must be a SamplingParams, not 16"),
        (lambda llm: llm.chat(CHAT, temperature=0), "chat has no option 'temperature'; it is one of SamplingParams"),
        (lambda llm: llm.chat(CHAT, zzz=0), "chat has no option 'zzz'; it has tools, chat_template"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={"messages": []}), "may not set 'messages'"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={"self": 1}), "may not set 'self'"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={1: 2}), "may not set 1"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={"bos_token": ""}), "may not set 'bos_token'"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={"a b": 1}), "may not set 'a b'"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs=[1]), r"chat_template_kwargs must be a dict, not \[1\]"),
        (lambda llm: llm.chat([{"role": "wizard", "content": "x"}]), r"messages\[0\].role must be one of .*'wizard'"),
        (lambda llm: llm.chat([{"content": "x"}]), r"messages\[0\].role must be one of .*it is missing"),
        (lambda llm: llm.chat([{"role": "user"}]), r"messages\[0\].content is missing"),
        (lambda llm: llm.chat([{"role": "user", "content": 3}]), r"messages\[0\].content must be a text or .*int"),
        (lambda llm: AsyncLLM.from_llm(llm).stream("a", timout=3), r"no option 'timout'; did you mean timeout\?"),
        (lambda llm: AsyncLLM.from_llm(llm).chat_stream(CHAT, tool=[]), r"did you mean tools\?"),
        (lambda llm: AsyncLLM.from_llm(llm).stream("a", 16), "params must be a SamplingParams, not 16"),
    ],
)  # fmt: skip
def test_wrong_calls_get_one_line(call: Callable[[LLM], Any], says: str) -> None:
    llm = talker()
    with pytest.raises(RequestError, match=says) as raised:
        call(llm)
    assert "\n" not in str(raised.value)
    assert len(llm.generate("it still works", GREEDY).token_ids) == 4


def test_sizes_are_bytes_or_what_the_flags_take(tmp_path: Path) -> None:
    path, common = tiny_gguf("llama").write(tmp_path / "m.gguf"), {"gpu": "none", "trial": False, "context": 64}
    for given, ram in (("1.5GiB", 3 << 29), ("2GB", 2 * 10**9), ("none", None), (1 << 30, 1 << 30), (None, None)):
        with LLM(path, ram=given, vram="0", **common) as llm:
            assert (llm.engine.ram, llm.engine.vram) == (ram, 0)
    with pytest.raises(RequestError, match="and --ram is 1MiB"):
        LLM(path, ram="1MiB", **common)


def test_a_closed_model_says_so() -> None:
    llm = toy_llm()
    assert "closed" not in repr(llm)
    with llm:
        pass
    assert repr(llm).endswith(", closed)") and repr(AsyncLLM.from_llm(llm)).endswith(", closed)")
    with pytest.raises(RequestError, match="the model was closed"), llm:
        pass

    async def enter() -> None:
        async with AsyncLLM.from_llm(llm):
            pass

    with pytest.raises(RequestError, match="the model was closed"):
        asyncio.run(enter())


def test_token_ids_may_be_numpys() -> None:
    llm = toy_llm()
    ids = [104, 105]
    expected = llm.generate([ids], GREEDY)[0].token_ids
    for given in (tuple(ids), np.array(ids), np.array(ids, np.uint8), list(np.array(ids))):
        assert list(llm.stream(given, GREEDY))[-1].completion.token_ids == expected  # type: ignore[union-attr]


# ---------------------------------------------------------------- messages


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    plain = [{"role": "system", "content": "be"}, {"role": "user", "content": "one\ntwo"}]
    given = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    assert plain_messages(given) == plain
    llm = talker()
    assert llm.encode_chat(given) == llm.encode_chat(plain)
    assert llm.chat(given, GREEDY).text == llm.chat(plain, GREEDY).text


def test_what_a_message_has_beside_stays() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert plain_messages([call]) == [call | {"content": ""}]


@pytest.mark.parametrize(
    ("part", "where", "unsupported"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "messages[0].content[1].type 'image_url'", True),
        ({"type": "input_audio"}, "messages[0].content[1].type 'input_audio'", True),
        ({"type": "text"}, "messages[0].content[1].text", False),
        ("text", "messages[0].content[1]", False),
    ],
)
def test_other_parts_are_refused_by_name(part: Any, where: str, unsupported: bool) -> None:
    with pytest.raises(MessageError) as raised:
        plain_messages([{"role": "user", "content": [{"type": "text", "text": "x"}, part]}])
    assert (raised.value.path, raised.value.unsupported) == (where, unsupported)
    assert str(raised.value).startswith(where)


def test_the_template_gets_tools_and_variables() -> None:
    llm = talker()
    ids = llm.encode_chat(CHAT, tools=[{"name": "f"}], chat_template_kwargs={"extra": "more"})
    assert llm.tokenizer.decode(ids) == "user:hi\n[{'name': 'f'}]more"

    async def both() -> tuple[str, str]:
        model = AsyncLLM.from_llm(llm)
        options: Any = {"tools": [{"name": "f"}], "chat_template_kwargs": {"extra": "more"}, "salt": b"x"}
        streamed = [event async for event in model.chat_stream(CHAT, GREEDY, **options)]
        return (await model.chat(CHAT, GREEDY, **options)).text, "".join(event.text for event in streamed)

    assert asyncio.run(both()) == (llm.generate([ids], GREEDY)[0].text,) * 2


def test_only_a_text_to_continue_has_a_limit_by_default() -> None:
    llm = talker()
    prompt = llm.encode_chat(CHAT)
    endless = SamplingParams(temperature=0, ignore_eos=True)

    async def tokens(**given: int) -> list[int]:
        model, params = AsyncLLM.from_llm(llm), replace(endless, **given)
        answer = await model.chat(CHAT, params)
        streamed = [event async for event in model.chat_stream(CHAT, params)]
        return [answer.completion_tokens, len(streamed), (await model.generate(prompt, params)).completion_tokens]

    room = llm.context - len(prompt)
    assert room > 128
    assert asyncio.run(tokens()) == [room, room, 128]
    assert asyncio.run(tokens(max_tokens=128)) == [128, 128, 128], "a limit that the caller gave"
    assert llm.chat(CHAT, endless).completion_tokens == len(list(llm.chat_stream(CHAT, endless))) == room
    assert llm.chat(CHAT, llm.default_params(ignore_eos=True)).completion_tokens == room
    assert llm.generate([prompt], llm.default_params(ignore_eos=True))[0].completion_tokens == 128
    assert llm.generate([[104] * (llm.context - 3)], endless)[0].completion_tokens == 3, "no limit that nobody gave"
    with pytest.raises(RequestError, match="max_tokens 128"):
        llm.generate([[104] * (llm.context - 3)], replace(endless, max_tokens=128))


# ---------------------------------------------------------------- what it says about itself


@pytest.mark.parametrize("described", [EngineConfig, SamplingParams, Completion, Timings, StreamEvent, TokenLogprob])
def test_help_explains_every_field(described: type) -> None:
    text = pydoc.plain(pydoc.render_doc(described))
    assert len(described.__annotations__) >= 4
    for name in described.__annotations__:
        assert re.search(rf"^ \|  (\w+, )*{name}(, \w+)*(:| \(.+, default ).*\w", text, re.MULTILINE), name


def test_the_module_lists_what_is_for_users() -> None:
    assert [name for name in dir(powerinfer) if not name.startswith("__")] == sorted(powerinfer.__all__)
    assert all(hasattr(powerinfer, name) for name in dir(powerinfer))


def test_a_model_describes_itself() -> None:
    llm = toy_llm(context=256)
    llm._executor.choices = Choices(
        threads=Choice(2, "given"), gpu=Choice(None, "no CUDA device"), selector=Choice("exact in 3", "x (y)")
    )
    assert llm.choices == {"threads": "2 (given)", "gpu": "none (no CUDA device)", "selector": "exact in 3 (x (y))"}
    said = repr(llm)
    assert said == ("LLM(model='toy', size='1 layers', context=256, threads=2, selector='exact in 3', placement='CPU')")
    assert repr(AsyncLLM.from_llm(llm)) == f"Async{said}"
    llm._executor.choices.gpu = Choice(GpuPart(3, False, "<b>"), more=", given")
    assert llm.choices["gpu"] == "3 layers on <b>, given"
    page = llm._repr_html_()
    assert "<th>context</th><td>256</td>" in page and "3 layers on &lt;b&gt;, the rest on the CPU" in page


@pytest.mark.parametrize("api", [LLM, AsyncLLM])
def test_help_is_for_users(api: type) -> None:
    text = pydoc.plain(pydoc.render_doc(api))
    assert "<function" not in text and "0x" not in text and " _" not in text.replace(" __", "")
    assert "Unpack[EngineOptions]" in text.split("Method")[0], "where editors and readers find its keywords"


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "powerinfer", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[0]) == (0, "powerinfer"), done.stderr
