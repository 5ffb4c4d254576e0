"""gpt-oss's answers, cut at every place; the grammars of its calls; what its template gets; the server and `run`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import openai
import pytest
from jsonschema import Draft202012Validator
from serving import client, post, served_llm
from test_grammar import random_tokens
from test_serve_tools import Scripted
from test_tool_calls import NOW, WEATHER, Marked
from toy_model import VOCAB, toy_llm

from powerinfer.cli.common import Output
from powerinfer.cli.main import INTERRUPTED
from powerinfer.cli.run import answer
from powerinfer.cli.thinking import thought_reader
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.grammar import Grammars
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import StreamEvent
from powerinfer.serve.messages import CountRequest
from powerinfer.serve.responses import ResponsesRequest
from powerinfer.serve.server import Server
from powerinfer.text.chat import ChatTemplate, plain_messages
from powerinfer.text.dialect_reading import read_dialect
from powerinfer.text.grammar import Grammar
from powerinfer.text.harmony import MARKS
from powerinfer.text.tool_calls import HARMONY, HERMES, ToolFormat, reasoning_format
from powerinfer.text.tool_parser import Reasoning, ToolDelta
from powerinfer.text.tools import ToolChoice, read_tools

TOOLS = read_tools([WEATHER, NOW])
ROME = '{"city": "Rome"}'

# The parts of gpt-oss's template that concern the messages of a conversation.
TEMPLATE = """\
{%- set last_tool_call = namespace(name=none) %}
{%- if tools %}{{- "<|start|>developer<|message|># Tools\\n\\n" }}
{%- for tool in tools %}{{- "type " + tool.function.name + "\\n" }}{% endfor %}{{- "<|end|>" }}{% endif %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message %}
            {%- if "<|channel|>analysis<|message|>" in message.content %}
                {{- raise_exception("channel tags") }}
            {%- endif %}
        {%- endif %}
        {%- if "thinking" in message %}
            {%- if "<|channel|>analysis<|message|>" in message.thinking %}{{- raise_exception("tags") }}{% endif %}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set future_final_message = namespace(found=false) %}
            {%- for future_message in messages[loop.index:] %}
                {%- if future_message.role == 'assistant' and "tool_calls" not in future_message %}
                    {%- set future_final_message.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
            {%- elif message.content and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {%- elif message.thinking and not future_final_message.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=" }}
            {{- "functions." + tool_call.name + "<|channel|>commentary " }}
            {{- (tool_call.content_type if tool_call.content_type is defined else "json") + "<|message|>" }}
            {{- tool_call.arguments|tojson }}
            {{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif "thinking" in message %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}
            {{- raise_exception("Message has tool role, but there was no previous assistant message with a call!") }}
        {%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

Read = tuple[str, str, list[tuple[str, str]]]


def read(pieces: Sequence[str], form: ToolFormat = HARMONY, cut: bool = False) -> Read:
    """The reasoning of an answer, its text and its calls; checks the deltas."""
    numbers = count()
    parser = form.parser(lambda: f"id{next(numbers)}")
    reasoning, text, calls = "", "", []
    for delta in [*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish(cut)]:
        if isinstance(delta, str):
            assert delta
            text += delta
        elif isinstance(delta, Reasoning):
            assert delta.text
            reasoning += delta.text
        elif delta.name is not None:
            assert (delta.index, delta.id) == (len(calls), f"id{len(calls)}")
            calls.append([delta.name, delta.arguments])
        else:
            assert delta.index == len(calls) - 1 and delta.id is None and delta.arguments
            calls[-1][1] += delta.arguments
    assert parser.calls == len(calls)
    return reasoning, text, [(name, arguments) for name, arguments in calls]


THOUGHT = "<|channel|>analysis<|message|>Is it <b> warm?<|end|><|start|>assistant"
ANSWERS: list[tuple[str, Read]] = [
    (f"{THOUGHT}<|channel|>final<|message|>Yes, 20 < 30.", ("Is it <b> warm?", "Yes, 20 < 30.", [])),
    (f"{THOUGHT}<|channel|>final<|message|>Yes.<|return|>", ("Is it <b> warm?", "Yes.", [])),
    ("<|channel|>final<|message|>Yes.", ("", "Yes.", [])),
    ("<|channel|>commentary to=assistant<|message|>Yes.<|return|>", ("", "Yes.", [])),
    ("<|channel|>commentary to=assistant<|channel|>final<|message|>Yes.<|return|>", ("", "Yes.", [])),
    ("<|channel|>analysis<|channel|>final<|message|>Yes.<|return|>", ("", "Yes.", [])),
    ("<|channel|>analysis<|end|><|start|>assistant<|channel|>final<|message|>Yes.", ("", "Yes.", [])),
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{'a': \"x\ny\"<|call|>",
     ("", "", [("now", '{"a": "x\\ny"}')])),
    (f"{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}<|call|>",
     ("Is it <b> warm?", "", [("get_weather", ROME)])),
    (f"{THOUGHT} to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{ROME}",
     ("Is it <b> warm?", "", [("get_weather", ROME)])),
    (f"{THOUGHT} to=functions.get_weather<|channel|>commentary json<|message|>{ROME}",
     ("Is it <b> warm?", "", [("get_weather", ROME)])),
    (f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{ROME}<|call|>",
     ("", "", [("get_weather", ROME)])),
    ("<|channel|>analysis to=functions.now code<|message|>{}<|call|>", ("", "", [("now", "{}")])),
    ("<|channel|>commentary to=functions.now<|message|><|call|>", ("", "", [("now", "{}")])),
    ("<|channel|>commentary to=functions.now<|message|>", ("", "", [("now", "{}")])),
    ("<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
     "<|constrain|>json<|message|>{}<|call|>", ("", "I will look.", [("now", "{}")])),
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>"
     "commentary to=functions.now <|constrain|>json<|message|>{}<|call|>", ("", "", [("now", "{}"), ("now", "{}")])),
    ("<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|><|start|>"
     "assistant<|channel|>final<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B", ("One.\n\nTwo.",
     "A\n\nB", [])),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", ("print(1)", "", [])),
    ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes", ("Hm", "Yes", [])),
    ("<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Yes", ("Hm", "Yes", [])),
    ("<|channel|>final<|message|>Yes<|end|><|start|>user<|message|>And now?<|end|>", ("", "Yes", [])),
    ("<|channel|>final<|message|>a <|en", ("", "a <|en", [])),
    ("<|channel|>final<|message|>", ("", "", [])),
    ("<|channel|>analysis", ("", "", [])),
    ("", ("", "", [])),
    ('{"city": "Rome"}', ("", '{"city": "Rome"}', [])),
    ("Plain text, to=functions.now and all", ("", "Plain text, to=functions.now and all", [])),
    ("<|message|>unnamed", ("", "unnamed", [])),
    ("<|channel|>other<|message|>unknown", ("", "unknown", [])),
    (f"<|channel|>{'x' * 600} is no header", ("", f"{'x' * 600} is no header", [])),
    ("<|channel|>commentary to=functions.no,name<|message|>{}", ("{}", "", [])),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_answers_are_read_the_same_however_they_are_cut(number: int) -> None:
    whole, wanted = ANSWERS[number]
    assert read([whole]) == wanted and read(list(whole)) == wanted
    for cut in range(len(whole) + 1):
        assert read([whole[:cut], whole[cut:]]) == wanted, cut
    rng = random.Random(number)
    for _ in range(20):
        cuts = sorted(rng.randint(0, len(whole)) for _ in range(4))
        pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert read(pieces) == wanted, cuts


def test_any_text_is_read_the_same_however_it_is_cut() -> None:
    rng = random.Random(3)
    parts = [*MARKS, "assistant", "analysis", "final", "commentary", " to=functions.now", "to=", " ", "\n", "json"]
    parts += ["{}", "x", "<", "<|", "user", "to=python"]
    for _ in range(3000):
        whole = "".join(rng.choices(parts, k=rng.randint(1, 14)))
        once = read([whole])
        assert read(list(whole)) == once, whole
        cut = rng.randint(0, len(whole))
        assert read([whole[:cut], whole[cut:]]) == once, (whole, cut)
        without = read([whole], replace(HARMONY, may_call=False))  # type: ignore[call-arg]
        assert not without[2]


def test_what_is_certain_is_told_at_once() -> None:
    parser = HARMONY.parser(lambda: "id")
    assert parser.push("<|channel|>ana") == [] == parser.push("lysis<|message|>")
    assert parser.push("So <|e") == [Reasoning("So ")] and parser.push("q") == [Reasoning("<|eq")]
    assert parser.push("<|end|><|start|>assistant<|channel|>final<|message|>Y") == ["Y"] and parser.push("es") == ["es"]
    parser = HARMONY.parser(lambda: "id")
    assert parser.push(" to=functions.now<|channel|>commentary json<|message|>") == [ToolDelta(0, "id", "now", "")]
    assert parser.push('{"a') == [ToolDelta(0, None, None, '{"a')]
    assert parser.finish(cut=True) == []


@pytest.mark.parametrize("text", ["t", "to", "to=5", "to=5 <", "<", "<|", "  t", "<|mess"])
def test_a_short_answer_without_a_header(text: str) -> None:
    """As a grammar may demand it; a header could begin like this, but the answer has ended."""
    assert read([text]) == ("", text, []) and read(list(text)) == ("", text, [])
    assert read([text], cut=True) == ("", "", []), "a header that was cut off"
    first = "<|channel|>final<|message|>Yes.<|end|>"
    assert read([first, text]) == ("", f"Yes.\n\n{text}", [])


@pytest.mark.parametrize("text", ["", " ", "\n", "<|start|>", "<|channel|>final", "to=functions.now<|channel|>json"])
def test_a_header_without_text_is_no_answer(text: str) -> None:
    assert read([text]) == ("", "", [])


def test_an_answer_ends_with_its_only_call() -> None:
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    alone = replace(HARMONY, parallel=False)
    assert read([call, "<|start|>assistant", call], alone) == ("", "", [("now", "{}")])
    parser = alone.parser()
    parser.push(call)
    assert parser.ended


def test_without_functions_a_call_is_reasoning() -> None:
    form = reasoning_format(TEMPLATE)
    assert form is not None and form.reasons and not HERMES.reasons and reasoning_format(None) is None
    whole = f"<|channel|>commentary to=functions.now <|constrain|>json<|message|>{ROME}<|call|>"
    assert read([whole], form) == (ROME, "", [])
    assert read_dialect(ChatTemplate(TEMPLATE)) == HARMONY and reasoning_format("{{ messages }} <|im_start|>") is None


# ---------------------------------------------------------------- grammars


class Channels(Marked):
    """Bytes, with the marks of the format as special tokens."""

    special = MARKS
    vocab_size = VOCAB + len(special)
    special_ids = frozenset((256, 257, *range(VOCAB, vocab_size)))
    ids = {text: VOCAB + at for at, text in enumerate(special)}  # noqa: RUF012


def spelled(text: str, special: bool) -> list[int]:
    """The tokens of a text with marks."""
    ids, at = [], 0
    while at < len(text):
        mark = next((mark for mark in MARKS if special and text.startswith(mark, at)), None)
        ids += list(text[at].encode()) if mark is None else [Channels.ids[mark]]
        at += 1 if mark is None else len(mark)
    return ids


def accepted(grammar: Grammar, text: str, special: bool) -> bool:
    mask = Grammars(Channels()).compile(grammar).mask()  # type: ignore[arg-type]
    for token in spelled(text, special):
        if not mask.allows(token):
            return False
        mask.accept(token)
    return True


@pytest.mark.parametrize("special", [False, True])
def test_calls_that_are_demanded(special: bool) -> None:
    marks = Channels.ids if special else {}
    grammar = HARMONY.grammar(TOOLS, ToolChoice("function", "get_weather"), marks)
    assert grammar is not None and HARMONY.grammar(TOOLS, ToolChoice("auto"), marks) is None
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}"
    thought = "<|channel|>analysis<|message|>A city\nand so on.<|end|><|start|>assistant"
    assert accepted(grammar, call, special) and accepted(grammar, thought + call, special)
    for header in ("<|channel|>commentary json", " json", "<|channel|>commentary code", " <|constrain|>json", ""):
        assert accepted(grammar, f" to=functions.get_weather{header}<|message|>{ROME}", special), header
    assert not accepted(grammar, "<|channel|>final<|message|>Yes", special)
    assert not accepted(grammar, call.replace("get_weather", "now"), special)
    assert not accepted(grammar, call.replace('"Rome"', "3"), special)
    rng, tokenizer, endings = np.random.default_rng(5), Channels(), 0
    either = HARMONY.grammar(TOOLS, ToolChoice("required"), marks)
    assert either is not None and accepted(either, call.replace("get_weather", "now").replace(ROME, "{}"), special)
    for _ in range(6):
        tokens, ended = random_tokens(Grammars(tokenizer).compile(either).mask(), tokenizer, rng, 300)  # type: ignore[arg-type]
        endings += ended
        if ended:
            _, text, calls = read([tokenizer.text(tokens)])
            assert not text and len(calls) == 1
            parameters = {tool.name: tool.parameters for tool in TOOLS}
            Draft202012Validator(parameters[calls[0][0]]).validate(json.loads(calls[0][1]))
    assert endings or not special, "text before a call may go on for long"


@pytest.mark.parametrize("special", [False, True])
def test_json_is_the_answer_and_may_follow_reasoning(special: bool) -> None:
    marks = Channels.ids if special else {}
    asked = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    alone = HARMONY.grammar([], ToolChoice("required"), marks, instead=asked)
    beside = HARMONY.grammar(TOOLS, ToolChoice("required"), marks, instead=asked)
    assert alone is not None and beside is not None
    final = '<|channel|>final<|message|>{"a": 3}'
    thought = "<|channel|>analysis<|message|>Three.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for text, in_both in ((final, True), (thought + final, True), (thought + call, False)):
        assert accepted(beside, text, special) and accepted(alone, text, special) == in_both
    for grammar in (alone, beside):
        assert not accepted(grammar, "<|channel|>final<|message|>Yes", special)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("head", [
    "<|channel|>commentary to=functions.", " to=functions.",
    "<|channel|>analysis<|message|>Well to=functions.<|end|><|start|>assistant to=functions.",
    "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>commentary to=functions.",
])  # fmt: skip
def test_calls_that_the_model_begins_are_held_to_the_schema(head: str, special: bool) -> None:
    lazy = HARMONY.lazy_grammar(TOOLS, Channels.ids if special else {})
    mask = Grammars(Channels()).mask(lazy)  # type: ignore[arg-type]
    for token in spelled(head, special):
        assert mask.allowed() is None
        mask.accept(token)
    assert mask.allowed() is not None and not mask.allows(ord("x"))
    rest = (
        "<|channel|>commentary json<|message|>"
        if head.endswith(" to=functions.") and "commentary" not in head
        else (" <|constrain|>json<|message|>")
    )
    for token in spelled(f"get_weather{rest}{ROME[:-2]}", special):
        assert mask.allows(token), chr(token)
        mask.accept(token)
    assert not mask.allows(ord("\n")), "in a string"
    for token in spelled('"}', special):
        assert mask.allows(token)
        mask.accept(token)
    assert mask.allowed() is None, "what follows is free"
    mask.accept(ord("!"))
    assert mask.allowed() is None


def test_a_call_behind_the_beginning_of_a_part_of_the_text() -> None:
    """What looks like a call where the text was cut is none, but hides no call after it."""
    position = HARMONY.lazy_grammar(TOOLS).position
    text = "to=functions.x is how.<|end|><|start|>assistant to=functions."
    assert position(text + "now", False) == len(text) and position(text + "now", True) == len("to=functions.")


def test_text_about_calls_is_no_call() -> None:
    lazy = HARMONY.lazy_grammar(TOOLS)
    for text in ("<|channel|>final<|message|>Write to=functions.now", "to=functions is", "<|message|>to=functions."):
        assert lazy.position(text, True) is None
    assert lazy.position("to=functions.now", True) == len("to=functions.")
    assert lazy.position("to=functions.now", False) is None, "in the middle of an answer"


# ---------------------------------------------------------------- conversations


def rendered(messages: list[dict[str, Any]], tools: bool = False) -> str:
    plain, options = HARMONY.conversation(plain_messages(messages), TOOLS if tools else [])
    return ChatTemplate(TEMPLATE).render(plain, **options)[0]


def called(*cities: str) -> list[dict[str, Any]]:
    return [
        {"id": f"c{at}", "type": "function",
         "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
        for at, city in enumerate(cities)
    ]  # fmt: skip


ASK: dict[str, Any] = {"role": "user", "content": "Is it warm?"}
HEAD = "<|start|>user<|message|>Is it warm?<|end|>"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_a_call_without_content(content: dict[str, Any]) -> None:
    found = rendered([ASK, {"role": "assistant", **content, "tool_calls": called("Rome")}], tools=True)
    assert found == (
        "<|start|>developer<|message|># Tools\n\ntype get_weather\ntype now\n<|end|>" + HEAD + "<|start|>assistant "
        'to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|><|start|>assistant'
    )


def test_several_calls_and_their_results() -> None:
    """The template takes one of a message; results come behind their calls, whatever their order."""
    turn = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Two.",
        "tool_calls": called("Rome", "Oslo"),
    }
    results = [{"role": "tool", "tool_call_id": f"c{at}", "content": f"{20 - at}"} for at in (1, 0)]
    found = rendered([ASK, turn, *results])
    begin = "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
    back = "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
    assert found == (
        HEAD + "<|start|>assistant<|channel|>analysis<|message|>Two.\n\nI look.<|end|>"
        f'{begin}{{"city": "Rome"}}<|call|>{back}"20"<|end|>{begin}{{"city": "Oslo"}}<|call|>{back}"19"<|end|>'
        "<|start|>assistant"
    )
    unnamed = [{"role": "tool", "content": f"{at}"} for at in range(3)]
    assert rendered([ASK, turn, *unnamed]).count(back) == 3, "no result is lost"


def test_earlier_reasoning_is_no_content() -> None:
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert rendered([ASK, turn, ASK]) == (
        f"{HEAD}<|start|>assistant<|channel|>final<|message|>Yes.<|end|>{HEAD}<|start|>assistant"
    )


# ---------------------------------------------------------------- the server

CALLED = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ROME
FINAL = f"{THOUGHT}<|channel|>final<|message|>Yes, warm."


class Writer(Scripted):
    """The same, where the script has the mark in it, too."""

    mark = b"<|start|>assistant"

    def written(self, text: bytes) -> bytes:
        _, *rests = text.split(self.mark)
        since = [self.mark.join(rests[at:]) for at in range(len(rests))]
        return next((rest for rest in since if self.script.startswith(rest)), text)


@pytest.fixture(scope="module")
def llm() -> LLM:
    made = served_llm(Writer(n_pages=256), context=4096)
    made.template = ChatTemplate(TEMPLATE)
    return made


@pytest.fixture(autouse=True)
def script(llm: LLM) -> Iterator[Any]:
    """Sets what the model wants to write."""
    executor: Any = llm._runner._executor

    def write(text: str) -> None:
        executor.script = text.encode()

    write("")
    yield write


REASONING_TOKENS = len("Is it <b> warm?") - 1  # `<` might begin a mark, and counts with the token after it
ASKED: Any = {"model": "toy", "messages": [ASK], "max_tokens": 400, "temperature": 0}


@pytest.mark.parametrize("tools", [False, True])
def test_chat_completions(api: openai.OpenAI, script: Any, tools: bool) -> None:
    more: Any = {"tools": [WEATHER, NOW]} if tools else {}
    script(FINAL)
    plain: Any = api.chat.completions.create(**ASKED, **more)
    message = plain.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes, warm.", "Is it <b> warm?")
    assert message.tool_calls is None and plain.choices[0].finish_reason == "stop"
    assert plain.usage.completion_tokens_details.reasoning_tokens == REASONING_TOKENS
    chunks: Any = list(api.chat.completions.create(**ASKED, **more, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Yes, warm."
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert "".join(thoughts) == "Is it <b> warm?" and len(thoughts) > 5


def test_chat_completions_that_call(api: openai.OpenAI, script: Any) -> None:
    script(THOUGHT + CALLED)
    ask = ASKED | {"tools": [WEATHER, NOW]}
    plain: Any = api.chat.completions.create(**ask).choices[0]
    with api.chat.completions.stream(**ask) as stream:
        streamed: Any = stream.get_final_completion().choices[0]
    for choice in (plain, streamed):
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
        assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert plain.message.reasoning_content == "Is it <b> warm?"


def test_chat_completions_where_nothing_may_be_called(api: openai.OpenAI, script: Any) -> None:
    script(THOUGHT + CALLED)
    found: Any = api.chat.completions.create(**ASKED, tools=[WEATHER], tool_choice="none").choices[0]
    assert found.message.tool_calls is None and found.finish_reason == "stop" and found.message.content == ""


def test_a_format_that_is_asked_for(api: openai.OpenAI, script: Any) -> None:
    script(f'{THOUGHT.replace("<b> ", "")}<|channel|>final<|message|>{{"a": 3}}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    message: Any = api.chat.completions.create(**ASKED, response_format=asked).choices[0].message
    assert json.loads(message.content) == {"a": 3} and message.reasoning_content == "Is it warm?"


@pytest.mark.parametrize("cut", [3, len(THOUGHT) - 30, len(THOUGHT) - 4, len(THOUGHT) + 30])
def test_an_answer_that_is_cut_off(server: Server, script: Any, cut: int) -> None:
    script(FINAL)
    status, plain = post(server, "/v1/chat/completions", ASKED | {"max_tokens": cut})
    (choice,) = plain["choices"]
    assert status == 200 and choice["finish_reason"] == "length"
    shown = choice["message"].get("reasoning_content", "") + choice["message"]["content"]
    assert "<|" not in shown and "Is it <b> warm?Yes, warm.".startswith(shown)


def test_responses(api: openai.OpenAI, script: Any) -> None:
    script(THOUGHT + CALLED)
    tools: Any = [{"type": "function", **WEATHER["function"]}]  # type: ignore[dict-item]
    ask: Any = {"model": "toy", "input": "Is it warm?", "tools": tools, "max_output_tokens": 400, "temperature": 0}
    plain = api.responses.create(**ask)
    events = list(api.responses.create(**ask, stream=True))
    streamed: Any = events[-1]
    for response in (plain, streamed.response):
        thought, call = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Is it <b> warm?") and thought.summary == []
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Rome"})
        assert response.usage.output_tokens_details.reasoning_tokens == REASONING_TOKENS
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Is it <b> warm?"
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.function_call_arguments.delta")
    # what came goes back, and the template shows it
    result = {"type": "function_call_output", "call_id": plain.output[1].call_id, "output": "20 C"}
    script("<|channel|>final<|message|>Yes.")
    given: Any = [{"role": "user", "content": "Is it warm?"}, *(item.model_dump() for item in plain.output), result]
    after = api.responses.create(**(ask | {"input": given}))
    assert after.output_text == "Yes."
    wanted = rendered([
        ASK,
        {"role": "assistant", "content": None, "reasoning_content": "Is it <b> warm?", "tool_calls": called("Rome")},
        {"role": "tool", "content": "20 C"},
    ], tools=True).replace("type now\n", "")  # fmt: skip
    assert after.usage is not None and after.usage.input_tokens == len(wanted)


def test_messages(server: Server, script: Any) -> None:
    from anthropic import Anthropic  # which takes a second

    script(THOUGHT + CALLED)
    tool: Any = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]
    ask: Any = {"model": "toy", "max_tokens": 400, "messages": [ASK], "tools": [tool]}
    with Anthropic(base_url=server.url.removesuffix("/v1"), api_key="x") as api:
        plain = api.messages.create(**ask)
        with api.messages.stream(**ask) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        for message in (plain, streamed):
            thought, use = message.content
            assert thought.type == "thinking" and thought.thinking == "Is it <b> warm?"
            assert use.type == "tool_use" and use.input == {"city": "Rome"} and message.stop_reason == "tool_use"
        assert kinds.count("content_block_start") == 2 and "thinking" in kinds
        script("<|channel|>final<|message|>Yes.")
        back: Any = [block.model_dump(exclude_none=True) for block in plain.content]
        result: Any = {"type": "tool_result", "tool_use_id": back[1]["id"], "content": "20 C"}
        turns: Any = [ASK, {"role": "assistant", "content": back}, {"role": "user", "content": [result]}]
        after = api.messages.create(**(ask | {"messages": turns}))
        count_ = api.messages.count_tokens(model="toy", messages=turns, tools=[tool]).input_tokens
    assert after.content[0].type == "text" and after.content[0].text == "Yes."
    wanted = rendered([
        ASK,
        {"role": "assistant", "content": None, "reasoning_content": "Is it <b> warm?", "tool_calls": called("Rome")},
        {"role": "tool", "content": "20 C"},
    ], tools=True).replace("type now\n", "")  # fmt: skip
    assert count_ == len(wanted)


def thought_item(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_reasoning_items_belong_to_the_message_behind_them() -> None:
    """Several of one message are joined; what a message of others follows does not go on to a later answer."""
    said, asked = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Is it?"}
    call = {"type": "function_call", "call_id": "c0", "name": "now", "arguments": "{}"}
    items = [asked, thought_item("A"), thought_item("B"), said, thought_item("C"), asked, said, thought_item("D"), call]
    chat = ResponsesRequest.model_validate({"model": "toy", "input": items}).to_chat()
    assert [(one.role, one.reasoning_content) for one in chat.messages] == [
        ("user", None), ("assistant", "A\nB"), ("user", None), ("assistant", None), ("assistant", "D"),
    ]  # fmt: skip


def test_a_turn_of_thinking_alone_keeps_it() -> None:
    blocks = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("A", "B")]
    turns = [ASK, {"role": "assistant", "content": blocks}, ASK]
    chat = CountRequest.model_validate({"model": "toy", "messages": turns}).to_chat()
    assert [(one.role, one.content, one.reasoning_content) for one in chat.messages] == [
        ("user", "Is it warm?", None), ("assistant", "", "A\nB"), ("user", "Is it warm?", None),
    ]  # fmt: skip


def test_thinking_of_the_user_is_refused(server: Server) -> None:
    block = {"type": "thinking", "thinking": "x", "signature": ""}
    with client(server) as http:
        body = {"model": "toy", "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
        answer_ = http.post("/v1/messages", json=body)
    assert answer_.status_code == 400 and "messages[0].content[0].type 'thinking'" in answer_.text


# ---------------------------------------------------------------- the command line


def test_run_prints_the_answer_alone(llm: LLM, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script(FINAL)
    params = SamplingParams(max_tokens=200, temperature=0)
    reader, own = thought_reader(llm, params)
    assert reader is not None and not own.skip_special_tokens
    tokens = llm.encode_chat([ASK])
    status, document = answer(llm.stream(tokens, own), Output(json_mode=False), reader=reader)
    out, err = capsys.readouterr()
    assert (status, out, err) == (0, "Yes, warm.", "")
    assert document["text"] == "Yes, warm." and document["reasoning"] == "Is it <b> warm?"
    assert document["finish_reason"] == "stop"
    reader, _ = thought_reader(llm, params)
    _, document = answer(llm.stream(tokens, replace(own, max_tokens=40)), Output(json_mode=True), reader=reader)
    assert (document["text"], document["reasoning"], document["finish_reason"]) == ("", "Is it <b> ", "length")
    assert thought_reader(llm, replace(params, skip_special_tokens=False))[0] is None, "asked to see all"
    assert thought_reader(toy_llm(), params) == (None, params)


class Interrupted:
    """A stream that Ctrl-C ends."""

    closed = False

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def __iter__(self) -> Iterator[StreamEvent]:
        for at, text in enumerate(self._texts):
            yield StreamEvent(text, at)
        raise KeyboardInterrupt

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("more", "wanted"), [(" 3 <", ("Is 2 < 3 <", "Hm.")), ("<|end|><|start|>assist", ("Is 2 <", "Hm."))]
)
def test_run_interrupted_shows_what_was_held(
    more: str, wanted: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It might have begun a mark; the beginning of a header is none of the answer."""
    events: Any = Interrupted("<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Is 2 <", more)
    status, document = answer(events, Output(json_mode=False), reader=HARMONY.parser())
    assert (status, events.closed, document["finish_reason"]) == (INTERRUPTED, True, "abort")
    assert (document["text"], document["reasoning"]) == wanted and capsys.readouterr().out == wanted[0]
