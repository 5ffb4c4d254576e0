"""Dialects of calls read off templates in the shape of real ones: what is read, written, parsed and demanded."""

from __future__ import annotations

import contextlib
import json
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_chat import LLAMA31
from test_grammar import random_tokens
from test_tool_calls import ASKED, PHI, QWEN, TOOLS, TURNS_ONLY, Marked, check_calls, read
from toy_model import BOS, EOS, VOCAB

from powerinfer.errors import RequestError
from powerinfer.runtime.grammar import Grammars
from powerinfer.text import tool_dialects
from powerinfer.text.chat import ChatTemplate
from powerinfer.text.dialect_reading import read_dialect
from powerinfer.text.marks import HOLE
from powerinfer.text.tool_calls import GENERIC, HERMES, LLAMA, PHI4_MINI, ToolFormat
from powerinfer.text.tools import ToolChoice, read_tools

AROUND = (
    "{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>\n{% endif -%}"
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{%- if m.tool_calls %}CALLS{% endif %}<|end|>\n"
    "{% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
EACH, END = "{% for call in m.tool_calls %}{% set f = call.function %}", "{% endfor %}"
ITEMS = "{% for k, v in f.arguments.items() %}"
JSON, TEXT = "{{ f.arguments | tojson }}", "{{ v if v is string else v | tojson }}"
LINE = "{{ '\n' }}"  # a line break behind a tag of Jinja


def template(calls: str, around: str = AROUND) -> ChatTemplate:
    """A template that writes calls in a certain way."""
    return ChatTemplate(around.replace("CALLS", calls))


def each(text: str, between: str = "") -> str:
    """The calls of a message, one after the other."""
    return EACH + (f"{{{{ {between!r} if not loop.first }}}}" if between else "") + text + END


OBJECT = '{"name": "{{ f.name }}", "arguments": ' + JSON + '{{ "}" }}'
TEMPLATES = {
    "object in tags": each(LINE + "<tool_call>\n" + OBJECT + "\n</tool_call>"),
    "other keys, ids first": "<|START|>["
    + each(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": ' + JSON + '{{ "}" }}', ", "
    )
    + "]<|STOP|>",
    "named by its key": "<|tools|>[" + each('{"{{ f.name }}": ' + JSON + '{{ "}" }}', ", ") + "]<|/tools|>",
    "lines between tags": "\n<calls>\n" + each(OBJECT, "\n") + LINE + "</calls>",
    "name and arguments": each("[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON),
    "an id between": each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]" + JSON),
    "an id before": "<|calls|>"
    + each("<|call:begin|>{{ call.id }}<|call:name|>{{ f.name }}<|call:args|>" + JSON + "<|call:end|>"),
    "a namespace and a number": "<|calls_begin|>"
    + each("<|call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|call_argument|>" + JSON + "<|call_end|>")
    + "<|calls_end|>",
    "a fence": "<|calls_begin|>"
    + each("<|call_begin|>function<|sep|>{{ f.name }}\n```json\n" + JSON + "\n```<|call_end|>", "\n")
    + "<|calls_end|>",
    "the name in the tag": each("<function={{ f.name }}>" + JSON + "</function>"),
    "parameters in lines": each(
        LINE + "<tool_call>\n<function={{ f.name }}>\n" + ITEMS
        + "<parameter={{ k }}>\n" + TEXT + "\n</parameter>\n" + END + "</function>\n</tool_call>"
    ),
    "parameters as texts": each(  # Nemotron 3
        "<tool_call>\n<function={{ f.name }}>\n" + ITEMS
        + "<parameter={{ k }}>\n{% if v is mapping or (v is sequence and v is not string) %}{{ v | tojson }}{% else %}"
        + "{{ v }}{% endif %}{{ '\n' }}</parameter>\n" + END + "</function>\n</tool_call>\n"
    ),
    "parameters with attributes": "\n<calls>\n"
    + each(
        '<invoke name="{{ f.name }}">\n' + ITEMS + '<parameter name="{{ k }}">' + TEXT + "</parameter>\n" + END
        + "</invoke>\n"
    )
    + "</calls>",
    "keys and values": each(
        LINE + "<tool_call>{{ f.name }}\n" + ITEMS
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT + "</arg_value>\n" + END + "</tool_call>"
    ),
    "types told": "\n<|X|calls>\n"
    + each(
        '<|X|invoke name="{{ f.name }}">\n' + ITEMS
        + '<|X|parameter name="{{ k }}" string="{{ \'true\' if v is string else \'false\' }}">' + TEXT
        + "</|X|parameter>\n" + END + "</|X|invoke>\n"
    )
    + "</|X|calls>",
    "Python's literals": each(
        LINE + "<tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>{{ v }}</parameter>\n" + END
        + "</function>\n</tool_call>"
    ),
    "texts in marks": each(
        LINE + '<function name="{{ f.name }}">' + ITEMS + '<param name="{{ k }}">'
        + "{% if v is string and '\n' in v %}<![CDATA[{{ v }}]]>{% else %}" + TEXT + "{% endif %}</param>" + END
        + "</function>"
    ),
    "Python": "<|calls_start|>["
    + each(
        "{{ f.name }}(" + ITEMS
        + "{{ ', ' if not loop.first }}{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}" + END + ")",
        ", ",
    )
    + "]<|calls_end|>",
    "Python in lines": "<function_calls>"
    + each("{{ f.name }}(" + ITEMS + "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}" + END + ")", "\n")
    + "</function_calls>",
}  # fmt: skip
FORMS = {name: replace(read_dialect(template(calls)), tools=tuple(TOOLS)) for name, calls in TEMPLATES.items()}
TAGS = {"section": "<calls>\n", "call_begin": '<invoke name="', "body": "tagged"}
EXPECTED: dict[str, dict[str, Any]] = {
    "object in tags": {"call_begin": "<tool_call>\n", "call_end": "\n</tool_call>", "between": "\n"},
    "other keys, ids first": {"section": "<|START|>", "end": "<|STOP|>", "listed": True, "name_key": "tool_name",
                              "arguments_key": "parameters", "id_key": "tool_call_id", "id_first": True},
    "named by its key": {"section": "<|tools|>", "end": "<|/tools|>", "listed": True, "named_by_key": True},
    "lines between tags": {"section": "<calls>\n", "between": "\n", "end": "\n</calls>"},
    "name and arguments": {"call_begin": "[TOOL_CALLS]", "body": "json", "name_end": "[ARGS]"},
    "an id between": {"call_begin": "[TOOL_CALLS]", "body": "json", "name_end": f"[CALL_ID]{HOLE}[ARGS]"},
    "an id before": {"section": "<|calls|>", "call_begin": f"<|call:begin|>{HOLE}<|call:name|>",
                     "call_end": "<|call:end|>",
                     "body": "json", "name_end": "<|call:args|>"},
    "a namespace and a number": {"section": "<|calls_begin|>", "call_begin": "<|call_begin|>",
                                 "call_end": "<|call_end|>",
                                 "end": "<|calls_end|>", "body": "json", "name_begin": "functions.",
                                 "name_end": f":{HOLE}<|call_argument|>"},
    "a fence": {"section": "<|calls_begin|>", "call_begin": "<|call_begin|>function<|sep|>",
                "call_end": "\n```<|call_end|>",
                "between": "\n", "end": "<|calls_end|>", "body": "json", "name_end": "\n```json\n"},
    "the name in the tag": {"call_begin": "<function=", "call_end": "</function>", "body": "json", "name_end": ">"},
    "parameters in lines": {"call_begin": "<tool_call>\n<function=", "call_end": "\n</function>\n</tool_call>",
                            "between": "\n",
                            "body": "tagged", "name_end": ">\n", "key_begin": "<parameter=", "key_end": ">\n",
                            "value_end": "\n</parameter>"},
    "parameters with attributes": {**TAGS, "name_end": '">\n', "key_begin": '<parameter name="', "key_end": '">',
                                   "value_end": "</parameter>", "call_end": "\n</invoke>", "between": "\n",
                                   "end": "\n</calls>"},
    "keys and values": {"call_begin": "<tool_call>", "call_end": "\n</tool_call>", "between": "\n", "body": "tagged",
                        "name_end": "\n", "key_begin": "<arg_key>", "key_end": "</arg_key>\n<arg_value>",
                        "value_end": "</arg_value>"},
}  # fmt: skip


def test_a_thought_that_a_template_closes_is_no_part_of_calls() -> None:
    around = AROUND.replace("{{ m.content }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}")
    form = read_dialect(template(TEMPLATES["parameters as texts"], around))
    assert form == ToolFormat("read", **EXPECTED["parameters in lines"])


@pytest.mark.parametrize("name", EXPECTED)
def test_a_dialect_is_read_off_a_template(name: str) -> None:
    assert FORMS[name] == ToolFormat("read", **EXPECTED[name])


def test_types_and_literals_are_read() -> None:
    form = FORMS["types told"]
    assert form.key_end == f'" string="{HOLE}">' and form.word("string") == "true" and form.word("object") == "false"
    assert FORMS["Python's literals"].literals and not FORMS["keys and values"].literals
    assert FORMS["texts in marks"].value_marks == ("<![CDATA[", "]]>")
    assert (FORMS["Python"].body, FORMS["Python"].listed) == ("keywords", True)


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"},
        "flag": {"type": "boolean"}, "list": {"type": "array"}, "object": {"$ref": "#/$defs/any"},
        "either": {"type": ["string", "null"]},
        "code": {"enum": ["1", "2"]},
    },
    "$defs": {"any": {"type": "object"}},
}  # fmt: skip
WRITE = read_tools([{"type": "function", "function": {"name": "write_it", "parameters": SCHEMA}}])
VALUES: list[dict[str, Any]] = [
    {},
    {"text": "", "count": 0},
    {"text": "17", "count": 17, "ratio": 2.5, "flag": False, "list": [1, "a", None, {"b": True}],
    "object": {"k": [1.5]},
     "code": "2"},
    {"text": "def f(x):\n    return x < 3\n", "either": "yes"},
    {"text": "é 👍 \\n \\\\", "object": {}},
]  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_calls_that_a_template_writes_are_read_however_they_are_cut(name: str) -> None:
    form, rng = replace(FORMS[name], tools=tuple(WRITE)), random.Random(4)
    for values in VALUES:
        if name == "Python" and any("\\" in str(value) for value in values.values()):
            continue  # the template does not escape them
        call = {"type": "function", "id": "abcdef123", "function": {"name": "write_it",
        "arguments": json.dumps(values)}}
        asked = [ASKED[0], {"role": "assistant", "content": "Well.", "tool_calls": [call, call]}]
        messages, variables = form.conversation(asked, WRITE)
        text = template(TEMPLATES[name]).render(messages, add_generation_prompt=False, **variables)[0]
        answer = text.rpartition("<|assistant|>")[2].removesuffix("<|end|>\n")
        said, calls = read(form, [answer])
        assert said == "Well."
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [("write_it", values)] * 2
        assert read(form, list(answer)) == (said, calls)
        for _ in range(5):
            cuts = sorted(rng.randint(0, len(answer)) for _ in range(4))
            pieces = [answer[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
            assert read(form, pieces) == (said, calls), cuts


@pytest.mark.parametrize("name", FORMS)
def test_any_text_is_read_the_same_however_it_is_cut(name: str) -> None:
    form, rng = FORMS[name], random.Random(5)
    parts = [*form.begins, *(mark for mark in form.marks for _ in range(2)), "{", "}", '"name"', ":", ", ", "[",
    "]", " ", "\n",
             "x", "get_weather", '{"city": "Rome"}', "'", "city", "=", ")", "<", "7"]  # fmt: skip
    for _ in range(80):
        answer = "".join(rng.choices(parts, k=rng.randint(1, 14))).replace(HOLE, "1")
        whole = read(form, [answer])
        for _, arguments in whole[1]:
            json.loads(arguments)
        assert read(form, list(answer)) == whole, answer
        cut = rng.randint(0, len(answer))
        assert read(form, [answer[:cut], answer[cut:]]) == whole, (answer, cut)
        if not whole[1] and not form.dropped:
            assert whole[0] == answer, "without a call nothing is lost"


@pytest.mark.parametrize("name", FORMS)
def test_required_calls_are_valid(name: str) -> None:
    tokenizer, rng, form = Marked(), np.random.default_rng(5), FORMS[name]
    grammars = Grammars(tokenizer)  # type: ignore[arg-type]
    for choice, parallel in ((ToolChoice("required"), True), (ToolChoice("function", "get_weather"), False)):
        grammar = replace(form, parallel=parallel).grammar(TOOLS, choice, tokenizer.ids)
        assert grammar is not None
        endings = 0
        for _ in range(6):
            tokens, ended = random_tokens(grammars.compile(grammar).mask(), tokenizer, rng, 250)
            if ended:
                endings += 1
                text, calls = read(form, [tokenizer.text(tokens)])
                assert not text and calls
                check_calls(calls)
                assert parallel or len(calls) == 1
                assert choice.kind == "required" or {called for called, _ in calls} == {"get_weather"}
        assert endings


class Special(Marked):
    """Bytes, with marks of some dialects as special tokens."""

    special = ("<|calls_begin|>", "<|call_begin|>", "<|call_argument|>", "<|call_end|>", "<|calls_end|>", "<tool_call>",
               "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "|X|")  # fmt: skip
    vocab_size = VOCAB + len(special)
    special_ids = frozenset((BOS, EOS, *range(VOCAB, vocab_size)))
    ids = {text: VOCAB + at for at, text in enumerate(special)}  # noqa: RUF012


@pytest.mark.parametrize("name", ["a namespace and a number", "keys and values", "types told"])
def test_marks_that_are_special_tokens(name: str) -> None:
    tokenizer, rng, form = Special(), np.random.default_rng(6), FORMS[name]
    grammars = Grammars(tokenizer)  # type: ignore[arg-type]
    grammar, lazy = form.grammar(TOOLS, ToolChoice("required"), tokenizer.ids), form.lazy_grammar(TOOLS, tokenizer.ids)
    assert grammar is not None
    marks, endings = [mark for mark in tokenizer.special if any(mark in text for text in form.marks)], 0
    for _ in range(8):
        tokens, ended = random_tokens(grammars.compile(grammar).mask(), tokenizer, rng, 300)
        if not ended:
            continue
        endings += 1
        assert not any(tokenizer.holds(tokens, mark.encode()) for mark in marks)
        text, calls = read(form, [tokenizer.text(tokens)])
        assert not text
        check_calls(calls)
        mask = grammars.mask(lazy)
        for token in (*b"So: ", *tokens[:-1]):
            assert mask.allows(token), tokenizer.text(tokens)
            mask.accept(token)
    assert endings


@pytest.mark.parametrize("name", FORMS)
def test_a_mark_that_is_only_named_is_free_and_a_call_is_not(name: str) -> None:
    form, tokenizer = FORMS[name], Marked()
    call = {"type": "function", "id": "abcdef123", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages, variables = form.conversation([ASKED[0], {**ASKED[1], "tool_calls": [call]}], TOOLS)
    written = template(TEMPLATES[name]).render(messages, add_generation_prompt=False, **variables)[0]
    written = written.rpartition("<|assistant|>")[2].removesuffix("<|end|>\n").strip()
    mask = Grammars(tokenizer).mask(form.lazy_grammar(TOOLS))  # type: ignore[arg-type]
    for token in f"Not {form.begins[0]} now, but\n".encode():
        assert mask.allows(token) and mask.allowed() is None
        mask.accept(token)
    constrained = 0
    for token in written.encode():
        assert mask.allows(token), written
        constrained += not mask.allows(ord("#")) or not mask.allows(0)
        mask.accept(token)
    assert constrained > len("get_weather")


def test_arguments_as_text_may_come_in_any_order_and_none_that_must_be_there_lacks() -> None:
    form, properties = FORMS["parameters in lines"], {name: {"type": "string"} for name in "abcd"}
    for needed, allowed, refused in (
        ("ab", ("ab", "ba", "cab", "bda", "acbd"), ("", "a", "b", "cd", "aab")),
        ("", ("", "dc", "abcd"), ("e",)),
        ("abcd", ("abcd", "dcba"), ("abc",)),
    ):
        schema = {"type": "object", "properties": properties, "required": list(needed)}
        tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
        grammar = form.grammar(tools, ToolChoice("required"))
        for keys in (*allowed, *refused):
            text = "".join(f"<parameter={key}>\nx\n</parameter>\n" for key in keys)
            mask = Grammars(Marked()).mask(grammar)  # type: ignore[arg-type]
            fits = mask.accept_bytes(f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>".encode())
            assert fits == (keys in allowed), (needed, keys)


@pytest.mark.parametrize("name", ["parameters in lines", "types told", "Python", "Python's literals"])
@pytest.mark.parametrize(
    "schema",
    [True, None, "string", {"type": "string", "enum": [1, "a"]}, {"type": "string", "enum": []}, {"type": 3},
     {"type": "string", "maxLength": "x"}, {"type": "string", "minLength": -1, "maxLength": True}, {"$ref": "#/a/b"},
     {"$ref": "#/properties/v"}, {"anyOf": [{"$ref": "#/properties/v"}, 3]}, {"type": "array", "items": True},
     {"type": "array", "items": {"type": "array"}, "minItems": "x", "maxItems": 0}, {"enum": [None, {"a": []}]}],
)  # fmt: skip
def test_odd_schemas_fail_with_a_line_at_most(name: str, schema: Any) -> None:
    parameters = {"type": "object", "properties": {"v": schema, 'q"<\n': {}}, "required": ["v"]}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    form, grammars = replace(FORMS[name], tools=tuple(tools)), Grammars(Marked())  # type: ignore[arg-type]
    with contextlib.suppress(RequestError):
        grammars.mask(form.grammar(tools, ToolChoice("required")))
        grammars.mask(form.lazy_grammar(tools))
    answer = f"{form.section}{form.call_begin}f{form.name_end}{form.key_begin}v{form.key_end}[1, 'x'{form.value_end}"
    for _, arguments in read(form, [answer])[1]:
        json.loads(arguments)


def test_arguments_that_are_text_are_streamed() -> None:
    parser = FORMS["parameters in lines"].parser()
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    deltas = [parser.push(piece) for piece in ("New", " Yo", "rk\n", "\n</para", "meter>\n", "</function>")]
    assert ["".join(delta.arguments for delta in some) for some in deltas] == ["New", " Yo", "rk", r"\n", '"', "}"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "17", "17"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "integer"}, " 17 ", 17),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, "{'a': [None, 'x']}", {"a": [None, "x"]}),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, '["a", 1', '["a", 1'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "17", "17"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "17", 17),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "17 days", "17 days"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/text"}, "5", "5"),
        ({"allOf": [{"type": "string"}]}, "5", "5"),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({"type": "number"}, "NaN", "NaN"),
    ],
)
def test_values_as_text_are_read_by_the_schema(schema: Any, text: str, value: Any) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": {"text": {"type": "string"}}}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    form = replace(FORMS["keys and values"], tools=tuple(tools))
    answer = f"<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    ((_, arguments),) = read(form, [answer])[1]
    assert json.loads(arguments) == {"v": value}


MUSE = (
    "{{ tools | tojson }}{% for m in messages %}<|start|>{{ m.role }}{% for c in m.tool_calls or [] %}"
    "{% if not loop.first %}<|eom|><|start|>assistant{% endif %} to={{ c.function.name }}<|message|>"
    '<atem:function_calls>\n<atem:invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<atem:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</atem:parameter>\n{% endfor %}'
    "</atem:invoke>\n</atem:function_calls>{% else %}<|message|>{{ m.content }}{% endfor %}<|eot|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (LLAMA31, LLAMA),
        (PHI, PHI4_MINI),
        (QWEN, ToolFormat("read", **EXPECTED["object in tags"])),
        (TURNS_ONLY, GENERIC),
        (MUSE, tool_dialects.MUSE),
    ],
)
def test_the_dialect_of_a_template(source: str, form: ToolFormat) -> None:
    assert read_dialect(ChatTemplate(source)) == form
    messages, variables = form.conversation(ASKED, TOOLS)
    text = ChatTemplate(source).render(messages, **variables)[0]
    assert '{"name": "get_weather"' in text or '{"name":"get_weather"' in text, "the earlier call, too"


@pytest.mark.parametrize(
    "source",
    [
        "<|python_tag|> Respond in the format {{ tools }} <function={{ name }}>{{ arguments }}</function>",
        "<|python_tag|> Respond in the format {{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "calls in <tool_call> tags as <tool_calls>[...]</tool_calls> {{ tools }}",
        "{{ ns ~ '<tool_call>' }}{{ ns }}<invoke name='{{ n }}'> {{ tools }}",
        "]<]minimax[>[<invoke name={{ tools }}{% for m in messages %}{{ m.tool_calls or m.content }}{% endfor %}",
        "<|tool_call>call:<tool_call|>{% for m in messages %}{{ m.tool_calls | tojson }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_only_names_the_marks_of_a_known_dialect_has_none(source: str) -> None:
    assert replace(read_dialect(ChatTemplate(source)), no_system=False) == GENERIC


NO_CALLS = AROUND.replace("{%- if m.tool_calls %}CALLS{% endif %}", "")
GEMMA_2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_RESULTS = AROUND.replace("{%- for m in messages -%}", "{% for m in messages if m.role != 'tool' %}")
LEFT_OUT = {  # what is not understood: nested parameters, names twice, calls that are not all there
    "nested": each("]~[<call>]~[<{{ f.name }}>" + ITEMS + "]~[<{{ k }}>{{ v }}]~[</{{ k }}>" + END),
    "lost arguments": each("<call>{{ f.name }}: {{ f.arguments.keys() | list }}</call>"),
    "only words": "I call {{ m.tool_calls[0].function.name }} with {{ m.tool_calls[0].function.arguments }}.",
}  # fmt: skip


@pytest.mark.parametrize("calls", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_is_not_understood_is_told_in_words(calls: str) -> None:
    form = read_dialect(template(calls))
    assert form == GENERIC
    messages, variables = form.conversation(ASKED, TOOLS)
    text = template(calls).render(messages, **variables)[0]
    assert "You may call functions" in text and "<tool_response>\n20 C\n</tool_response>" in text and not variables


def test_a_template_that_writes_no_results_gets_them_in_words() -> None:
    assert read_dialect(template(TEMPLATES["object in tags"], NO_RESULTS)) == GENERIC


def test_a_template_without_calls_or_without_system_messages() -> None:
    assert read_dialect(None) == read_dialect(ChatTemplate(NO_CALLS)) == GENERIC
    form = read_dialect(ChatTemplate(GEMMA_2))
    assert form == replace(GENERIC, no_system=True)
    messages, variables = form.conversation(ASKED, TOOLS[:1])
    text = ChatTemplate(GEMMA_2).render(messages, **variables)[0]
    assert text.startswith("<user>You may call functions.") and "Weather in Paris?<assistant><tool_call>" in text
    assert text.endswith("<user><tool_response>\n20 C\n</tool_response>\nAnd in Rome?")
    alone, _ = form.conversation([{"role": "assistant", "content": "Hi"}], TOOLS[:1])
    assert alone[0]["role"] == "user"


def test_a_template_that_tells_of_no_functions_but_writes_calls() -> None:
    around = AROUND.partition("{% endif -%}")[2]
    form = read_dialect(template(TEMPLATES["a fence"], around))
    assert form == replace(FORMS["a fence"], announced_in="words", tools=())
    messages, _ = form.conversation(ASKED[:1], TOOLS[:1])
    assert "<|call_begin|>function<|sep|>name_of_function\n```json\n" in messages[0]["content"], "in its own form"


def test_messages_are_spelled_as_the_template_takes_them() -> None:
    refusal = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    form = read_dialect(template(refusal + TEMPLATES["object in tags"]))
    assert form.single
    calls = [{"id": name, "function": {"name": "now", "arguments": {}}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "ba"]
    made, _ = form.conversation([ASKED[0], {"role": "assistant", "content": "Hm.", "tool_calls": calls}, *results])
    shown = [(message["role"], message["content"]) for message in made[1:]]
    assert shown == [("assistant", "Hm."), ("tool", "A"), ("assistant", ""), ("tool", "B")]
    form = read_dialect(template(EACH + "<call>{{ f.name + '<args>' + f.arguments }}</call>{% endfor %}"))
    assert form.text_arguments
    made, _ = form.conversation(ASKED)
    assert json.loads(made[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris", "unit": "C"}
    none = template(TEMPLATES["object in tags"], AROUND.replace("m.tool_calls", "m.tool_calls and m.content is none"))
    form = read_dialect(none)
    assert form.no_content
    said = form.conversation([{**ASKED[1], "content": "Well."}])[0]
    assert [(message["content"], "tool_calls" in message) for message in said] == [("Well.", False), (None, True)]
    short = "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    assert read_dialect(template(short + TEMPLATES["name and arguments"])).short_ids
    named = EACH + "<|call|>{{ call.id }}<|args|>{{ f.arguments | tojson }}<|/call|>{% endfor %}"
    form = read_dialect(template(named))
    assert (form.named_ids, form.name_begin, form.name_end) == (True, "functions.", f":{HOLE}<|args|>")
    made, _ = form.conversation([*ASKED, *ASKED[1:]])
    ids = [call["id"] for message in made for call in message.get("tool_calls", [{"id": message.get("tool_call_id")}])]
    assert [given for given in ids if given] == [f"functions.get_weather:{number}" for number in (0, 0, 1, 1)]
    whole = AROUND.replace("{{ tool | tojson }}", "{{ tool.function.name + tool.function.description }}")
    assert read_dialect(template(TEMPLATES["object in tags"], whole)).whole_documents


M3 = tool_dialects.MINIMAX_M3


def elements(value: Any) -> str:
    """A value in MiniMax-M3's tags."""
    items = value.items() if isinstance(value, dict) else None
    if isinstance(value, list):
        items = [("item", one) for one in value]
    if items is None:
        return value if isinstance(value, str) else json.dumps(value)
    return "".join(f"{M3.nested}<{key}>{elements(inner)}{M3.nested}</{key}>" for key, inner in items)


def test_nested_tags_are_objects_and_lists() -> None:
    points = {"points": [[1, 2], [3, 4]]}
    either = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"n": {"type": "string"}}}]}
    schema = {"type": "object", "properties": {"v": either, "w": {"type": "array"}, "s": {"type": "string"}}}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    values = {"v": {"n": "7"}, "w": ["a", {"b": [True]}], "s": "]<]minimax[>[<b>"}
    form = replace(M3, tools=(*TOOLS, *tools))
    calls = [("draw-points", points), ("f", values), ("now", {}), ("f", {"v": "plain", "w": []})]
    body = "\n".join(f"{M3.call_begin}{name}{M3.name_end}{elements(given)}{M3.call_end}" for name, given in calls)
    answer = f"Now.{M3.section}{body}{M3.end}"
    said, found = read(form, [answer])
    assert (said, [(name, json.loads(arguments)) for name, arguments in found]) == ("Now.", calls)
    assert read(form, list(answer)) == (said, found)
    mask = Grammars(Marked()).mask(M3.grammar(TOOLS, ToolChoice("required")))  # type: ignore[arg-type]
    call = f"{M3.section}{M3.call_begin}draw-points{M3.name_end}{elements(points)}{M3.call_end}{M3.end}"
    for token in call.encode():
        assert mask.allows(token)
        mask.accept(token)


FALCON_H1 = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "Signatures are within <tools> </tools> XML tags.\n<tools>\n"
    "{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}"
    "\n</tools>\nCalls are within <tool_call> </tool_call> tags, as:\n<tool_call>\n"
    "{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' or not tools %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_falcon_h1_is_told_of_functions_by_its_template_which_writes_no_calls() -> None:
    source = ChatTemplate(FALCON_H1)
    form = read_dialect(source)
    assert form == replace(HERMES, history="text")
    call = {"type": "function", "id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "x", "content": "a result"})
    messages, variables = form.conversation([ASKED[0], *turns], TOOLS)
    text, _ = source.render(messages, **variables)
    assert text.count("<tools>\n[") == 1 and "a result" in text
    past = text.partition("</tools>\n")[2].partition("<|im_start|>assistant\n")[2]
    assert read(form, [past.partition("<|im_end|>")[0]]) == ("", [("f", '{"a":1}')])
    reversed_keys = '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>'
    assert read(form, list(reversed_keys)) == ("", [("f", '{"a": 1}')])


def test_a_template_that_takes_long_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer.text.dialect_reading.SECONDS", 0.1)
    slow = template("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}")
    begin = time.monotonic()
    assert read_dialect(slow) == GENERIC
    assert time.monotonic() - begin < 10, "one rendering has a limit, and all together"


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"),
    [
        (tool_dialects.GEMMA_4, 'Hm.<|tool_call>call:f{a:<|"|>x "y" {<|"|>,n:[1,{b:true}]}<tool_call|>', "Hm.",
         [("f", {"a": 'x "y" {', "n": [1, {"b": True}]})]),
        (tool_dialects.FUNCTIONARY_3_2, "all\nLet me look.>>>f\n{\"a\": 1}>>>g\n{}", "Let me look.", [("f",
        {"a": 1}), ("g", {})]),
        (tool_dialects.FUNCTIONARY_3_2, 'f\n{"a": 1}', "", [("f", {"a": 1})]),
        (tool_dialects.LFM2, "<|tool_call_start|>[f(a='it\\'s', b=[True, None]), g()]<|tool_call_end|>Done", "Done",
         [("f", {"a": "it's", "b": [True, None]}), ("g", {})]),
        (tool_dialects.LFM2, "<|tool_call_start|>[f(a='it's \"so\" 'x'', b='')]<|tool_call_end|>", "",
         [("f", {"a": "it's \"so\" 'x'", "b": ""})]),
        (tool_dialects.MUSE, ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">'
            ' x\ny</atem:parameter>\n<atem:parameter name="n">1</atem:parameter>\n</atem:invoke>\n'
            '</atem:function_calls><|eom|><|start|>assistant to=g<|message|><atem:function_calls>\n'
            '<atem:invoke name="g">\n</atem:invoke>\n</atem:function_calls>', "",
         [("f", {"a": " x\ny", "n": 1}), ("g", {})]),
        (tool_dialects.MUSE, "Let 4 to=5, <|eom|><|start|>assistant to=g<|message|><atem:function_calls>\n<atem:invoke "
            'name="g">\n</atem:invoke>\n</atem:function_calls>', "Let 4 to=5, ", [("g", {})]),
        (tool_dialects.GRANITE_3, '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
        (tool_dialects.FIREFUNCTION, 'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "argumen'
            'ts": {}}]', "",
         [("f", {"a": 1}), ("g", {})]),
        (FORMS["parameters in lines"], "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "", [("f",
        {"a": 1})]),
        (FORMS["an id between"], "[TOOL_CALLS]f[ARGS]{}", "", [("f", {})]),
        (FORMS["a namespace and a number"], "<|calls_begin|><|call_begin|>f<|call_argument|>{}<|call_end|><|"
            "calls_end|>", "",
         [("f", {})]),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}</tool_call>', "", [("f", {"a": "x\ny"})]),
        (HERMES, '<tool_call>{"name":"f","arguments":"hi"}</tool_call>', "", [("f", "hi")]),
        (HERMES, '<tool_call>{"name":"f","arguments":[1]}</tool_call>', "", [("f", [1])]),
        (HERMES, '<tool_call>\n{"name":"f","arguments":{}}\n{"name":"g","arguments":{}}\n</tool_call>', "", [("f",
        {}), ("g", {})]),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a": {"b": oops', "", [("f", {"a": {"b": "oops"}})]),
        (HERMES, f'<tool_call>{{"name":"f","arguments":{"1" * 5000}}}</tool_call>', "", [("f", "1" * 5000)]),
        (HERMES, '<tool_call>{"name":"f","arguments":[1e999]}</tool_call>', "", [("f", [float("inf")])]),
        (HERMES, '<tool_call>{"name":"f\\ud800","arguments":["\\ud800"]}</tool_call>', "", [("f\ufffd", ["\ufffd"])]),
        (tool_dialects.MINIMAX_M3, '{0}<tool_call>{0}<invoke name="f">{0}<a>{0}<b>["\\ud800"]{0}</b>{0}</a>{0}</invoke>'
            .format("]<]minimax[>["), "", [("f", {"a": {"b": ["\ufffd"]}})]),
    ],
)  # fmt: skip
def test_answers_of_other_shapes(form: ToolFormat, answer: str, text: str, calls: list[tuple[str, Any]]) -> None:
    said, found = read(form, [answer])
    assert (said, [(name, json.loads(arguments)) for name, arguments in found]) == (text, calls)
    assert read(form, list(answer)) == (said, found)


@pytest.mark.parametrize("deep", ["[" * 5000, '{"a":' * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "]" * 5000])
def test_arguments_that_are_nested_without_end_are_json(deep: str) -> None:
    begins = {HERMES: '<tool_call>{"name":"f","arguments":', FORMS["an id between"]: "[TOOL_CALLS]f[ARGS]"}
    for form, begin in begins.items():
        _, ((name, arguments),) = read(form, [begin + deep])
        assert name == "f" and isinstance(json.loads(arguments), list | dict)


def test_a_template_that_writes_much_around_calls_is_told_in_words() -> None:
    for much in ("{", '{"a":', "<think"):
        source = template("{{ '" + much + "' * 20000 }}" + each("<call>{{ f | tojson }}</call>"))
        begin = time.process_time()
        assert read_dialect(source) == GENERIC
        assert time.process_time() - begin < 3.0


def test_a_call_in_python_may_leave_out_any_of_many_arguments() -> None:
    def accepts(required: list[str], text: str) -> bool:
        names = [f"a{at}" for at in range(40)]
        schema: dict[str, Any] = {"type": "object", "required": required}
        schema["properties"] = {name: {"type": "integer"} for name in names}
        tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
        grammar = FORMS["Python"].grammar(tools, ToolChoice("required"))
        mask = Grammars(Marked()).mask(grammar)  # type: ignore[arg-type]
        begin, end = (mark.strip() for mark in (FORMS["Python"].section, FORMS["Python"].end))
        for token in f"{begin}[{text}]{end}".encode():
            if not mask.allows(token):
                return False
            mask.accept(token)
        return True

    for text, required, fits in (
        ("f()", [], True), ("f(a0=1)", [], True), ("f(a39=1)", [], True), ("f(a3=1, a7=2, a39=3)", [], True),
        ("f(a7=1, a3=2)", [], False), ("f(a7=1, a7=2)", [], False), ("f(a1=1 a2=2)", [], False),
        ("f()", ["a5"], False), ("f(a6=1)", ["a5"], False), ("f(a1=1)", ["a5"], False), ("f(a5=1)", ["a5"], True),
        ("f(a1=1, a5=2, a6=3)", ["a5"], True), ("f(a5=2, a39=3)", ["a5", "a39"], True), ("f(a39=3)", ["a39"], True),
        ("f(a5=2)", ["a5", "a39"], False), ("f(a0=1, a39=1)", ["a0", "a39"], True),
    ):  # fmt: skip
        assert accepts(required, text) == fits, (text, required)


def test_definitions_that_nothing_refers_to_are_no_part_of_a_grammar() -> None:
    schema = {"$defs": {"d": {"enum": [*range(3000)]}}, "type": "object"}
    for inner, most in (({"type": "integer"}, 1 << 16), ({"$ref": "#/$defs/d"}, 0)):
        parameters = {**schema, "properties": {f"a{at}": inner for at in range(90)}}
        tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        form = FORMS["types told"]
        if most:
            grammar = form.grammar(tools, ToolChoice("required"))
            assert grammar is not None and len(grammar.text) < most
        else:
            with pytest.raises(RequestError, match="the schema of f is too large"):
                form.grammar(tools, ToolChoice("required"))


@pytest.mark.parametrize("reference", ["#", "#/properties/x", "#/$defs/d"])
def test_values_that_refer_to_any_part_of_the_schema(reference: str) -> None:
    inner = {"type": "array", "items": {"$ref": reference}}
    parameters = {"type": "object", "$defs": {"d": {"type": "integer"}},
                  "properties": {"x": {"type": "integer"}, "y": inner}, "required": ["y"]}  # fmt: skip
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    for name in ("parameters in lines", "types told"):
        Grammars(Marked()).mask(FORMS[name].grammar(tools, ToolChoice("required")))  # type: ignore[arg-type]


def test_a_limit_of_a_length_that_is_no_number_limits_nothing() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"maxLength": True}}}}
    tools = read_tools([{"type": "function", "function": function}])
    grammar = FORMS["parameters in lines"].grammar(tools, ToolChoice("required"))
    Grammars(Marked()).mask(grammar)  # type: ignore[arg-type]


def test_an_enumeration_of_which_a_part_is_no_text() -> None:
    listed = {"type": "array", "items": {"type": "string", "enum": [1]}}
    for schema in ({"type": "string", "enum": ["a", None, 1]}, listed):
        function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
        tools = read_tools([{"type": "function", "function": function}])
        for form in (FORMS["parameters in lines"], tool_dialects.LFM2):
            assert form.grammar(tools, ToolChoice("required")) is not None


def test_a_long_answer_takes_time_in_proportion() -> None:
    for form, answer in (
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "' + "line\\n" * 8000 + '"}}</tool_call>'),
        (FORMS["parameters in lines"], "<tool_call>\n<function=get_weather>\n<parameter=city>\n" + "line\n" * 8000),
        (FORMS["keys and values"], "<tool_call>" * 4000),
        (HERMES, "<tool_call>{" * 4000),
        (HERMES, "\n" * 40_000),
        (FORMS["a fence"], "<|calls_begin|>" + " " * 40_000),
    ):
        parser, begin = form.parser(), time.process_time()
        for at in range(0, len(answer), 5):
            parser.push(answer[at : at + 5])
        parser.finish()
        assert time.process_time() - begin < 1.0, form.name


