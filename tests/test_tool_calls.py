"""Tool calls: what templates get, what grammars demand, and what is read from answers, cut at every position."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from test_chat import LLAMA31
from test_grammar import bits, random_tokens
from toy_model import BOS, EOS, VOCAB, ToyTokenizer

from powerinfer.errors import RequestError
from powerinfer.runtime.grammar import Grammars, LazyMask
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.tool_calls import (
    GENERIC,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PHI4_MINI,
    ToolFormat,
)
from powerinfer.text.tool_parser import ToolDelta
from powerinfer.text.tools import ToolChoice, read_tool_choice, read_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
POINTS = {
    "type": "function",
    "function": {
        "name": "draw-points",
        "parameters": {
            "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
            "type": "object",
            "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2}},
            "required": ["points"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = read_tools([WEATHER, POINTS, NOW])
FORMATS = [HERMES, GENERIC, LLAMA, MISTRAL, MISTRAL_NAMED, PHI4_MINI]


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and its calls; checks the order of the deltas."""
    numbers = count()
    parser = form.parser(lambda: f"id{next(numbers)}")
    text, calls = "", []
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    for delta in deltas:
        if isinstance(delta, str):
            assert delta
            text += delta
        elif delta.name is not None:
            assert (delta.index, delta.id) == (len(calls), f"id{len(calls)}")
            calls.append([delta.name, delta.arguments])
        else:
            assert delta.index == len(calls) - 1 and delta.id is None and delta.arguments
            calls[-1][1] += delta.arguments
    assert parser.calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


PARIS = '{"city": "Paris", "unit": "C"}'
HARD = '{"city": "a\\"}]</tool_call>\\\\", "n": [1, {"x": {}}], "é": "\\u00e9 👍"}'
ANSWERS: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "No calls < here <tool_cal", "No calls < here <tool_cal", []),
    (HERMES, "  spaces \n\n", "  spaces \n\n", []),
    (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", [("weather", PARIS)]),
    (HERMES, f'Wait.\n\n<tool_call>{{"arguments":{HARD},"name":"weather"}}</tool_call>\nDone', "Wait.\nDone",
     [("weather", HARD)]),
    (HERMES, f'\n<tool_call>\n{{"name": "a", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n{{"name": "b", '
             '"arguments": {}}\n</tool_call>\n', "", [("a", PARIS), ("b", "{}")]),
    (HERMES, '<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    (HERMES, ' <think>\n<tool_call>{"name": "a"}</tool_call> <</think>\n<tool_call>{"name": "b"}</tool_call>',
     ' <think>\n<tool_call>{"name": "a"}</tool_call> <</think>', [("b", "{}")]),
    (HERMES, '<think><tool_call>{"name": "a"}</tool_call></t', '<think><tool_call>{"name": "a"}</tool_call></t', []),
    (HERMES, 'I <think>?<tool_call>{"name": "a"}</tool_call>', "I <think>?", [("a", "{}")]),
    (HERMES, " <thin", " <thin", []),
    (HERMES, '<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', "", [("a", '{"b": 1}')]),
    (HERMES, '<tool_call>{"name": "a", "arguments": null, "extra": [1, "]"]}</tool_call>', "", [("a", "{}")]),
    (HERMES, '<tool_call>{"name": "a", "arguments": {"b": [1, 2', "", [("a", '{"b": [1, 2]}')]),
    (HERMES, "<tool_call>\nnothing</tool_call> x", "<tool_call>\nnothing</tool_call> x", []),
    (HERMES, '<tool_call>{"thing": 3}</tool_call>', '<tool_call>{"thing": 3}</tool_call>', []),
    (HERMES, '<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    (HERMES, '<tool_call>{bad <tool_call>{"name": "a"}</tool_call>', "<tool_call>{bad", [("a", "{}")]),
    (HERMES, '<tool_call>\n{"name": "a', '<tool_call>\n{"name": "a', []),
    (HERMES, "text <tool_call>", "text <tool_call>", []),
    (LLAMA, f'{{"name": "get_weather", "parameters": {PARIS}}}', "", [("get_weather", PARIS)]),
    (LLAMA, f' {{"type": "function", "name": "a", "parameters": {HARD}}}; {{"name": "b", "parameters": {{}}}}', "",
     [("a", HARD), ("b", "{}")]),
    (LLAMA, f'<|python_tag|>{{"name": "a", "parameters": {PARIS}}}', "", [("a", PARIS)]),
    (LLAMA, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    (LLAMA, '{"answer": {"name": "x"}} ', '{"answer": {"name": "x"}} ', []),
    (LLAMA, 'As JSON: {"name": "a", "parameters": {}}', 'As JSON: {"name": "a", "parameters": {}}', []),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "a", "arguments": {HARD}, "id": "1"}}, {{"name": "b", "arguments": {{}}}}]', "",
     [("a", HARD), ("b", "{}")]),
    (MISTRAL, f'I see.[TOOL_CALLS][{{"name": "a", "arguments": {PARIS}}}]', "I see.", [("a", PARIS)]),
    (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    (MISTRAL_NAMED, f"[TOOL_CALLS]weather[ARGS]{HARD}[TOOL_CALLS]b[ARGS] {{}}", "", [("weather", HARD), ("b", "{}")]),
    (MISTRAL_NAMED, "x[TOOL_CALLS]no name", "x[TOOL_CALLS]no name", []),
    (PHI4_MINI, f'<|tool_call|>[{{"name": "a", "arguments": {HARD}}}]<|/tool_call|>', "", [("a", HARD)]),
    (PHI4_MINI, f'functools[{{"name": "a", "arguments": {PARIS}}}, {{"name": "b", "arguments": {{}}}}]', "",
     [("a", PARIS), ("b", "{}")]),
    (PHI4_MINI, "functools is a module", "functools is a module", []),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_answers_are_read_the_same_however_they_are_cut(number: int) -> None:
    form, answer, text, calls = ANSWERS[number]
    assert read(form, [answer]) == (text, calls)
    assert read(form, list(answer)) == (text, calls)
    for cut in range(len(answer) + 1):
        assert read(form, [answer[:cut], answer[cut:]]) == (text, calls), cut
    rng = random.Random(number)
    for _ in range(20):
        cuts = sorted(rng.randint(0, len(answer)) for _ in range(4))
        pieces = [answer[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert read(form, pieces) == (text, calls), cuts


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_any_text_is_read_the_same_however_it_is_cut(form: ToolFormat) -> None:
    rng = random.Random(3)
    parts = [*form.begins, *form.marks, "{", "}", '"name"', ":", '"a"', ", ", '"arguments"', "\\", "[",
             "]", " ", "\n", "x", '"parameters": {"q": 1}', '{"name": "f", ']  # fmt: skip
    for _ in range(300):
        answer = "".join(rng.choices(parts, k=rng.randint(1, 14)))
        whole = read(form, [answer])
        assert read(form, list(answer)) == whole, answer
        cut = rng.randint(0, len(answer))
        assert read(form, [answer[:cut], answer[cut:]]) == whole, (answer, cut)
        if not whole[1]:
            assert whole[0] == answer, "without a call nothing is lost"


def test_a_name_is_told_before_the_arguments_are_complete() -> None:
    parser = HERMES.parser(lambda: "id")
    assert parser.push("Hm <tool") == ["Hm"]
    assert parser.push('_call>\n{"name": "f", "argu') == [ToolDelta(0, "id", "f", "")]
    assert parser.push('ments": {"a": "x') == [ToolDelta(0, None, None, '{"a": "x')]
    assert parser.push('y"}') == [ToolDelta(0, None, None, 'y"}')]
    assert parser.push("}\n</tool_call>") == [] == parser.finish()


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("Hm <tool_call>", "Hm"),
        ('Hm <tool_call>\n{"', "Hm"),
        ('Hm <tool_call>\n{"name": "f', "Hm"),
        ("Hm <tool_call> is a mark", "Hm <tool_call> is a mark"),
        ("1 <", "1 <"),
    ],
)
def test_a_call_that_is_cut_off_without_a_name_is_dropped(text: str, rest: str) -> None:
    parser = HERMES.parser()
    said = parser.push(text) + parser.finish(cut=True)
    assert "".join(str(one) for one in said) == rest
    again = HERMES.parser()
    assert "".join(map(str, again.push(text) + again.finish())) == text, "it is text where the model ended it"


def test_a_second_call_that_is_cut_off_is_dropped() -> None:
    whole = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for end in range(1, len("\n<tool_call>\n{")):
        parser = HERMES.parser()
        said = parser.push(whole + "\n<tool_call>\n{"[:end]) + parser.finish(cut=True)
        assert not any(isinstance(one, str) for one in said)


def test_the_end_of_a_call_that_is_cut_off_is_no_text() -> None:
    """Behind one call or two, whether it may be followed by others or not."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for form in (HERMES, replace(HERMES, required=True), replace(HERMES, parallel=False)):
        for text in (call, f"{call}\n{call}"):
            for left_out in range(1, len("</tool_call>")):
                parser = form.parser()
                said = parser.push(text[:-left_out]) + parser.finish(cut=True)
                assert not any(isinstance(one, str) for one in said), (form, text, left_out)
    parser = HERMES.parser()
    said = parser.push(call + " </tool") + parser.finish()
    assert str(said[-1]).strip() == "</tool", "which the model wrote, and ended"


def test_nothing_of_a_call_that_is_required_is_text() -> None:
    parser = replace(HERMES, required=True).parser()
    assert parser.push("<tool_") + parser.finish(cut=True) == []


def test_ids() -> None:
    first, second = (HERMES.parser().push('<tool_call>{"name": "a"}')[0].id for _ in range(2))  # type: ignore[union-attr]
    assert first != second and first.startswith("call_")
    assert len(MISTRAL.parser().push('[TOOL_CALLS][{"name": "a"}')[0].id) == 9  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------------- grammars


class Marked(ToyTokenizer):
    """Bytes, with the beginnings and ends of all formats that are special tokens in their models."""

    special = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>")
    vocab_size = VOCAB + len(special)
    special_ids = frozenset((BOS, EOS, *range(VOCAB, vocab_size)))
    ids = {text: VOCAB + at for at, text in enumerate(special)}  # noqa: RUF012

    def token_bytes(self, token: int) -> bytes:
        return self.special[token - VOCAB].encode() if token >= VOCAB else super().token_bytes(token)

    def holds(self, tokens: list[int], spelled: bytes) -> bool:
        """Whether some text is spelled by tokens that are not special."""
        return spelled in bytes(token if token < 256 else 0 for token in tokens)

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.token_bytes(token) for token in tokens).decode()


def check_calls(calls: list[tuple[str, str]]) -> None:
    parameters = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in calls:
        Draft202012Validator(parameters[name]).validate(json.loads(arguments))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_required_calls_are_valid(form: ToolFormat, special: bool) -> None:
    tokenizer, rng = Marked(), np.random.default_rng(5)
    grammars = Grammars(tokenizer)  # type: ignore[arg-type]
    names = tokenizer.ids if special else {}
    wanted = [
        (ToolChoice("required"), True),
        (ToolChoice("required"), False),
        (ToolChoice("function", "draw-points"), True),
    ]
    for choice, parallel in wanted:
        grammar = replace(form, parallel=parallel).grammar(TOOLS, choice, names)
        assert grammar is not None
        endings = 0
        for _ in range(6):
            tokens, ended = random_tokens(grammars.compile(grammar).mask(), tokenizer, rng, 200)
            if ended:
                endings += 1
                for mark in {form.body == "json"}.intersection(names):
                    assert names[mark] in tokens and not tokenizer.holds(tokens, mark.encode())
                text, calls = read(form, [tokenizer.text(tokens)])
                assert not text and calls
                check_calls(calls)
                assert parallel or len(calls) == 1
                assert choice.kind == "required" or [name for name, _ in calls] == ["draw-points"]
        assert endings > 1


NOW_CALL = '{"name": "now", "arguments": {}}'
TWO_CALLS = {
    HERMES: f"<tool_call>\n{NOW_CALL}\n</tool_call>\n<tool_call>\n{NOW_CALL}\n</tool_call>",
    LLAMA: '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
    MISTRAL: f"[TOOL_CALLS][{NOW_CALL}, {NOW_CALL}]",
    MISTRAL_NAMED: "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
    PHI4_MINI: f"<|tool_call|>[{NOW_CALL}, {NOW_CALL}]<|/tool_call|>",
}


@pytest.mark.parametrize("form", TWO_CALLS, ids=lambda form: form.name)
def test_an_answer_may_call_twice_where_calls_are_parallel(form: ToolFormat) -> None:
    grammars, text = Grammars(Marked()), TWO_CALLS[form]  # type: ignore[arg-type]
    assert read(form, [text]) == ("", [("now", "{}")] * 2)
    for parallel in (True, False):
        grammar = replace(form, parallel=parallel).grammar(TOOLS, ToolChoice("required"))
        assert grammar is not None
        assert grammars.compile(grammar).mask().accept_bytes(text.encode()) == parallel


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (MISTRAL, f"[TOOL_CALLS] [{NOW_CALL}]"),
        (MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdef123"}]'),
        (MISTRAL_NAMED, "[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}"),
        (HERMES, f"<tool_call>{NOW_CALL}</tool_call>"),
        (HERMES, f"<tool_call>\n\n{NOW_CALL} \n</tool_call>"),
    ],
)
def test_calls_that_are_demanded_may_have_what_models_write_beside_them(form: ToolFormat, text: str) -> None:
    assert read(form, [text]) == ("", [("now", "{}")])
    grammar = form.grammar(TOOLS, ToolChoice("required"))
    assert Grammars(Marked()).mask(grammar).accept_bytes(text.encode())  # type: ignore[arg-type]


@pytest.mark.parametrize("form", TWO_CALLS, ids=lambda form: form.name)
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_one_call_is_read_where_calls_are_not_parallel(form: ToolFormat, piece: int) -> None:
    before = "" if form.bare else "Well. "
    text = before + TWO_CALLS[form] + " Done."
    pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
    assert read(replace(form, parallel=False), pieces) == (before.strip(), [("now", "{}")])
    broken = f"{before}{form.begins[0]}{'[' if form.listed else ''}"
    broken += "now[ARGS]3" if form.body == "json" else '{"name": "now", x}'
    assert read(replace(form, parallel=False), [broken + TWO_CALLS[form]])[1] == [("now", "{}")]


@pytest.mark.parametrize("form", TWO_CALLS, ids=lambda form: form.name)
@pytest.mark.parametrize("constrained", [True, False])
def test_an_answer_that_may_be_text_ends_with_its_only_call(form: ToolFormat, constrained: bool) -> None:
    # also if the call does not begin as the grammar demands, and so is not constrained
    grammars, text = Grammars(Marked()), ("" if form.bare else "Is 5 < 6? ") + TWO_CALLS[form]  # type: ignore[arg-type]
    for parallel in (True, False):
        lazy = replace(form, parallel=parallel).lazy_grammar(TOOLS)
        if not constrained:
            lazy = replace(lazy, position=lambda text, whole: None)
        mask, taken = grammars.mask(lazy), bytearray()
        for token in text.encode():
            assert mask.allows(token), taken
            taken.append(token)
            if mask.accept(token):
                break
        calls = read(form, [taken.decode()])[1]
        assert calls == [("now", "{}")] * (2 if parallel else 1)
        assert parallel == (taken.decode() == text)


def test_text_may_follow_from_no_choice_and_auto() -> None:
    assert HERMES.grammar(TOOLS, ToolChoice("auto")) is None and HERMES.grammar(TOOLS, ToolChoice("none")) is None


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_calls_that_the_model_begins_are_held_to_the_schema(form: ToolFormat) -> None:
    tokenizer, rng = Marked(), np.random.default_rng(6)
    compiled = Grammars(tokenizer).compile(form.call_grammar(TOOLS, tokenizer.ids))  # type: ignore[arg-type]
    position = form.lazy_grammar(TOOLS, tokenizer.ids).position
    begin = "" if form.bare else f"Well, {form.begins[0]}{'[' if form.listed else '{'}"
    begin += '{"name" :"' if form.bare else ""
    spelled = [tokenizer.ids[form.begins[0]]] if form.begins[0] in tokenizer.ids and not form.bare else None
    for _ in range(6):
        mask = LazyMask(compiled, position)
        tokens = [*b"Well, ", *spelled] if spelled else list(begin.encode())
        for token in tokens:
            assert mask.allowed() is None
            assert not mask.accept(token)
        while mask.allowed() is not None and len(tokens) < 400:
            logits = rng.normal(0, 3, tokenizer.vocab_size)
            logits[[ord('"'), ord("}"), ord("]")]] += 4
            logits[~bits(mask.allowed(), tokenizer.vocab_size)] = -np.inf
            tokens.append(int(logits.argmax()))
            assert not mask.accept(tokens[-1])
        assert len(tokens) < 400
        text, calls = read(form, [tokenizer.text(tokens)])
        assert text == ("" if form.bare else "Well,") and calls
        check_calls(calls)


def test_a_call_that_begins_otherwise_is_not_constrained() -> None:
    compiled = Grammars(Marked()).compile(HERMES.call_grammar(TOOLS))  # type: ignore[arg-type]
    mask = LazyMask(compiled, HERMES.call_position)
    for token in b"x" * 1000 + b"<tool_call> is a mark, <tool_call>\n":
        mask.accept(token)
    assert mask.allowed() is None
    mask.accept(ord("{"))
    assert mask.allowed() is not None
    mask = LazyMask(compiled, lambda text, whole: text.find("!") if "!" in text else None)
    for token in b"so!":
        mask.accept(token)
    assert mask.allowed() is None


# ----------------------------------------------------------------------------------------------- templates and requests

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call>" }}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}"""
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not "
    "none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + "
    "'<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
TURNS_ONLY = (
    "{% for message in messages %}{% if loop.index0 and message['role'] == messages[loop.index0 - 1]['role'] %}"
    "{{ raise_exception('turns') }}{% endif %}[{{ message['role'] }}: {{ message['content'] }}]{% endfor %}"
)
ASKED = [
    {"role": "user", "content": "Weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "20 C"},
    {"role": "user", "content": "And in Rome?"},
]  # fmt: skip


def test_a_template_gets_tools_and_arguments_as_transformers_gives_them() -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, options = HERMES.conversation(ASKED, TOOLS[:1])
    text, _ = ChatTemplate(QWEN).render(messages, add_generation_prompt=False, **options)
    objects = json.loads(json.dumps(ASKED))
    objects[1]["content"] = ""
    objects[1]["tool_calls"][0]["function"]["arguments"] = json.loads(PARIS)
    (expected,), _ = render_jinja_template([objects], tools=[WEATHER], chat_template=QWEN, add_generation_prompt=False)
    assert text == expected and '"arguments": {"city": "Paris", "unit": "C"}' in text


def test_the_template_of_llama() -> None:
    messages, options = LLAMA.conversation(ASKED, TOOLS[:1])
    text, _ = ChatTemplate(LLAMA31, "<s>").render(messages, add_generation_prompt=False, **options)
    assert '{"name": "get_weather", "parameters": {"city": "Paris", "unit": "C"}}' in text
    assert '"description": "The weather of a city"' in text


def test_the_template_of_phi() -> None:
    messages, options = PHI4_MINI.conversation(ASKED[:1], TOOLS[:1])
    text, _ = ChatTemplate(PHI).render(messages, add_generation_prompt=False, **options)
    listed = text.partition("<|tool|>")[2].partition("<|/tool|>")[0]
    assert json.loads(listed) == [WEATHER["function"]] and text.startswith("<|system|><|tool|>")


def test_a_template_without_tools_gets_them_in_words() -> None:
    messages, options = GENERIC.conversation([{"role": "system", "content": "Be brief."}, *ASKED], TOOLS[:1])
    text, _ = ChatTemplate(TURNS_ONLY).render(messages, add_generation_prompt=False, **options)
    assert text.startswith("[system: Be brief.\n\nYou may call functions.") and '"name":"get_weather"' in text
    assert (
        '[assistant: <tool_call>\n{"name":"get_weather","arguments":{"city":"Paris","unit":"C"}}\n</tool_call>]' in text
    )
    assert text.endswith("[user: <tool_response>\n20 C\n</tool_response>\nAnd in Rome?]")


def test_mistral_gets_short_ids() -> None:
    messages, _ = MISTRAL.conversation(ASKED, TOOLS)
    call, result = messages[1]["tool_calls"][0], messages[2]
    assert call["id"] == result["tool_call_id"] and len(call["id"]) == 9 and call["id"].isalnum()
    assert result["name"] == "get_weather"
    kept = [{"role": "assistant", "content": "", "tool_calls": [
        {"id": "abcDEF123", "function": {"name": "f", "arguments": {}}}]}]  # fmt: skip
    assert MISTRAL.conversation(kept, [])[0][0]["tool_calls"][0]["id"] == "abcDEF123"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "assistant", "tool_calls": "x"}, "must be a list"),
        ({"role": "user", "tool_calls": [{}]}, "in a message of the assistant"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "function with a name"),
    ],
)
def test_malformed_calls_in_a_conversation(message: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        HERMES.conversation([message])


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}),
        ("{", {}),
        ("", {}),
        (None, {}),
        ("[1]", {"arguments": [1]}),
        ('"hi"', {"arguments": "hi"}),
        ("hi", {"arguments": "hi"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
        ('{"a": ' + "1" * 5000, {"a": "1" * 5000}),
    ],
)
def test_arguments_of_an_earlier_call_are_an_object_whatever_the_model_wrote(arguments: Any, taken: Any) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    (made,), _ = HERMES.conversation([message])
    assert made["tool_calls"][0]["function"]["arguments"] == taken


def test_arguments_of_an_earlier_call_that_are_nested_without_end_are_refused() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": ' + "[" * 5000}}]}
    messages, _ = HERMES.conversation([message])
    with pytest.raises(RequestError, match="nested more than 64 deep"):
        ChatTemplate("{{ messages }}").render(messages)


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ({}, "must be a list"),
        ([WEATHER] * 129, "at most 128"),
        ([{"type": "web_search"}], "type.*function"),
        ([{"type": "function", "function": {"name": "a b"}}], "letters"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], "schema of an object"),
        ([{"type": "function", "function": {"name": "a", "description": 3}}], "must be a text"),
        ([NOW, NOW], "same name"),
    ],
)
def test_tools_that_are_refused(tools: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        read_tools(tools)


def test_tool_choice() -> None:
    assert read_tool_choice(None, TOOLS) == ToolChoice("auto") and read_tool_choice(None, []) == ToolChoice("none")
    assert read_tool_choice("required", TOOLS) == ToolChoice("required")
    named = {"type": "function", "function": {"name": "now"}}
    assert read_tool_choice(named, TOOLS) == ToolChoice("function", "now")
    for wrong in ({"type": "function", "function": {"name": "then"}}, {"type": "function"}, "any", 3):
        with pytest.raises(RequestError):
            read_tool_choice(wrong, TOOLS)
    with pytest.raises(RequestError, match="needs tools"):
        read_tool_choice("required", [])
