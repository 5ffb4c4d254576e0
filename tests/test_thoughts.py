"""Thoughts of models that mark them: templates, answers cut at every place, masks, budgets, the server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from serving import client, post, served_llm, serving
from test_grammar import bits
from test_serve_tools import Scripted
from test_tool_calls import NOW, WEATHER
from toy_model import EOS, VOCAB, ToyTokenizer

from powerinfer.cli.chat import ChatSession, Interrupts
from powerinfer.cli.common import Output, Parser
from powerinfer.cli.run import answer, describe_end
from powerinfer.cli.thinking import asked_thinking, thinking_flags, thought_reader
from powerinfer.errors import RequestError
from powerinfer.runtime.engine import LLM
from powerinfer.runtime.grammar import Grammars
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.thinking import thoughts_of
from powerinfer.serve.server import Server
from powerinfer.text.chat import ChatTemplate, plain_messages
from powerinfer.text.grammar import AfterThought, Grammar
from powerinfer.text.thoughts import Thinking, ThoughtFormat, Thoughts, read_thoughts
from powerinfer.text.tool_calls import HERMES
from powerinfer.text.tool_parser import Reasoning, ToolDelta
from powerinfer.text.tools import read_tools

TOOLS = read_tools([WEATHER, NOW])
USER = {"role": "user", "content": "Is it warm?"}


def turns(assistant: str, prompt: str, before: str = "") -> str:
    """A template. assistant: of a message `m`; prompt: what the answer begins with."""
    return (
        f"{before}{{% for m in messages %}}{{% if m.role == 'assistant' %}}<|im_start|>assistant\n{assistant}"
        "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{prompt}{{% endif %}}"
    )


# In the shape of templates of models.
KEPT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
DROPPED = "{{ m.content.split('</think>')[-1] }}"
QWEN3 = turns(
    "<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{{ m.content }}",
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
)
QWEN35 = turns(
    KEPT, "<think>\n{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n{% endif %}"
)
R1 = turns(DROPPED, "<think>\n")
V31 = turns(DROPPED, "{% if thinking %}<think>{% else %}</think>{% endif %}")
GLM = turns(
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% else %}</think>{% endif %}{{ m.content }}",
    "{{ '</think>' if enable_thinking is false else '<think>' }}",
)
SEED = turns(
    "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content | trim }}</seed:think>\n{% endif %}{{ m.content }}",
    "{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}",
    "{% if thinking_budget is defined %}At most {{ thinking_budget }} tokens of thought.\n{% endif %}",
)
MINISTRAL = turns(
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part['type'] == 'thinking' %}[THINK]{{ part['thinking'] }}[/THINK]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}",
    "",
)
GRANITE = turns(
    "{{ m.content }}", "",
    "{% if thinking %}Write your thoughts between <think></think> and your response between <response></response>.\n"
    "{% endif %}",
)  # fmt: skip
COMMAND = turns(
    "{% if m.thinking %}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{% endif %}"
    "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>",
    "{% if not reasoning %}<|START_THINKING|><|END_THINKING|>{% endif %}",
)
GEMMA = turns(
    "{% if m.reasoning_content and m.tool_calls %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call>{{ c.function.name }}<tool_call|>{% endfor %}",
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}",
    "{% if enable_thinking %}<|think|>\n{% endif %}",
)
HUNYUAN = turns(
    "<think:open>{{ m.reasoning or '' }}</think:open>{{ m.content }}",
    "{% if reasoning_effort not in ['no_think', 'low', 'high'] %}{{ raise_exception('no such effort') }}{% endif %}"
    "<think:open>{% if reasoning_effort == 'no_think' %}</think:open>{% endif %}",
    "{% set reasoning_effort = reasoning_effort or 'no_think' %}",
)
NEMOTRON = turns(
    "{% if m.reasoning_content and (loop.index0 > last.at or not cut) %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% else %}<think></think>{% endif %}{{ m.content.split('</think>')[-1] }}",
    "{{ '<think>\n' if enable_thinking else '<think></think>' }}",
    "{% set enable_thinking = enable_thinking if enable_thinking is defined else True %}"
    "{% set cut = truncate_history_thinking if truncate_history_thinking is defined else True %}"
    "{% set last = namespace(at=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}",
)
PLAIN = turns("{{ m.content }}", "")

ON, OFF = Thinking(on=True), Thinking(on=False, budget=0)
THINK = ("<think>", "</think>")
READ: list[tuple[str, str, tuple[str, str], tuple[str, str], dict[str, Any], tuple[Any, Any, Any]]] = [
    # name, template, marks, marks of the answer, variables for off, opened: by default, if on, if off
    ("Qwen3", QWEN3, THINK, ("", ""), {"enable_thinking": False}, (None, None, False)),
    ("Qwen3.5", QWEN35, THINK, ("", ""), {"enable_thinking": False}, (True, True, False)),
    ("R1", R1, THINK, ("", ""), {}, (True, True, True)),
    ("DeepSeek-V3.1", V31, THINK, ("", ""), {"thinking": False}, (False, True, False)),
    ("GLM", GLM, THINK, ("", ""), {"enable_thinking": False}, (True, True, False)),
    ("Seed-OSS", SEED, ("<seed:think>", "</seed:think>"), ("", ""), {"thinking_budget": 0}, (None, None, False)),
    ("Ministral", MINISTRAL, ("[THINK]", "[/THINK]"), ("", ""), {}, (None, None, None)),
    ("Granite", GRANITE, THINK, ("<response>", "</response>"), {"thinking": False}, (None, None, None)),
    ("Command", COMMAND, ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
     {"reasoning": False}, (False, None, False)),
    ("Gemma", GEMMA, ("<|channel>thought", "<channel|>"), ("", ""), {"enable_thinking": False}, (False, None, False)),
    ("Hunyuan", HUNYUAN, ("<think:open>", "</think:open>"), ("", ""), {"reasoning_effort": "no_think"},
     (False, True, False)),
    ("Nemotron 3", NEMOTRON, THINK, ("", ""), {"enable_thinking": False}, (True, True, False)),
]  # fmt: skip


@pytest.mark.parametrize(("source", "marks", "answer", "off", "opened"), [row[1:] for row in READ], ids=[
    row[0] for row in READ])  # fmt: skip
def test_marks_and_switches_of_a_template(
    source: str, marks: tuple[str, str], answer: tuple[str, str], off: dict[str, Any], opened: tuple[Any, ...]
) -> None:
    template = ChatTemplate(source)
    thoughts = read_thoughts(template)
    assert thoughts is not None and (thoughts.begin, thoughts.end) == marks and thoughts.answer == answer
    assert thoughts.variables(OFF) == off and thoughts.variables(Thinking()) == {}
    prompts = [template.render([USER], **thoughts.variables(wanted))[0] for wanted in (Thinking(), ON, OFF)]
    assert [thoughts.opened(prompt) for prompt in prompts] == list(opened)


@pytest.mark.parametrize("source", [PLAIN, turns("{{ m.content }}", "", "Think before you answer.\n"), "{{ think"])
def test_a_template_without_marks(source: str) -> None:
    assert read_thoughts(ChatTemplate(source)) is None and read_thoughts(None) is None


def test_thoughts_of_earlier_turns_are_kept() -> None:
    source = turns("{{ m.content }}", "<think></think>", "{% if clear_thinking %}{{ preserve_thinking }}{% endif %}")
    found = read_thoughts(ChatTemplate(source))
    assert found is not None and found.variables(Thinking(keep=True)) == {
        "clear_thinking": False, "preserve_thinking": True,
    }  # fmt: skip
    assert found.variables(Thinking(keep=False)) == {"clear_thinking": True, "preserve_thinking": False}
    template, turn = ChatTemplate(NEMOTRON), {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    thoughts = read_thoughts(template)
    assert thoughts is not None
    for keep, shown in ((None, False), (True, True), (False, False)):
        prompt = template.render([USER, turn, USER], **thoughts.variables(Thinking(keep=keep)))[0]
        assert ("Hm." in prompt) == shown


def test_marks_in_the_vocabulary(llm: LLM) -> None:
    plain: Any = SimpleNamespace(template=ChatTemplate(PLAIN), tokenizer=Marked())
    assert thoughts_of(plain) == Thoughts("<think>", "</think>")
    assert thoughts_of(SimpleNamespace(template=None, tokenizer=Marked())) is None  # type: ignore[arg-type]
    assert thoughts_of(SimpleNamespace(template=plain.template, tokenizer=llm.tokenizer)) is None  # type: ignore[arg-type]


def test_a_model_that_does_not_think_costs_no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: pytest.fail("rendered"))
    assert read_thoughts(ChatTemplate(PLAIN)) is None


def test_a_template_that_takes_too_long_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer.text.thoughts.SECONDS", -1.0)
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: pytest.fail("rendered"))
    found = read_thoughts(ChatTemplate(QWEN3 + "{# another #}"))
    assert found == Thoughts("<think>", "</think>"), "its marks are known ones"


def test_efforts() -> None:
    found = read_thoughts(ChatTemplate(HUNYUAN))
    assert found is not None and found.efforts == ("no_think", "low", "high")
    for effort, value in {"minimal": "low", "low": "low", "medium": "low", "high": "high", "max": "high"}.items():
        assert found.variables(Thinking(effort=effort)) == {"reasoning_effort": value}
    written = read_thoughts(ChatTemplate(turns(KEPT, "", "Reasoning: {{ reasoning_effort or 'medium' }}\n")))
    assert written is not None and written.efforts == ("low", "medium", "high")
    assert written.variables(Thinking(effort="xhigh")) == {"reasoning_effort": "high"}
    assert found.variables(ON) == {"reasoning_effort": "low"} and written.variables(ON) == {}
    switched = read_thoughts(ChatTemplate(V31))
    assert switched is not None and switched.variables(Thinking(effort="low")) == {"thinking": True}
    budget = read_thoughts(ChatTemplate(SEED))
    assert budget is not None and budget.variables(Thinking(budget=64)) == {"thinking_budget": 64}


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_an_earlier_thought_has_the_name_that_the_template_reads(name: str) -> None:
    turn = {"role": "assistant", "content": "Yes.", name: "Hm."}
    for source, shown in (
        (QWEN3, "<think>\nHm.\n</think>\n\nYes."), (COMMAND, "<|START_THINKING|>Hm.<|END_THINKING|>"),
        (HUNYUAN, "<think:open>Hm.</think:open>Yes."), (MINISTRAL, "[THINK]Hm.[/THINK]Yes."),
    ):  # fmt: skip
        assert shown in ChatTemplate(source).render([USER, turn, USER])[0]
    assert "Hm." not in ChatTemplate(PLAIN).render(plain_messages([USER, turn]))[0]


# ------------------------------------------------------------------------------------------------------------ answers

Read = tuple[str, str, list[tuple[str, str]]]
MARKS = Thoughts("<think>", "</think>")
WRAPPED = Thoughts("<think>", "</think>", ("<response>", "</response>"))
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def read(pieces: Sequence[str], form: ThoughtFormat, cut: bool = False) -> Read:
    """The reasoning of an answer, its text and its calls."""
    parser = form.parser(lambda: "id")
    reasoning, text, calls = "", "", []
    for delta in [*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish(cut)]:
        if isinstance(delta, str):
            assert delta
            text += delta
        elif isinstance(delta, Reasoning):
            assert delta.text
            reasoning += delta.text
        elif isinstance(delta, ToolDelta) and delta.name is not None:
            calls.append([delta.name, delta.arguments])
        else:
            calls[-1][1] += delta.arguments
    assert parser.calls == len(calls)
    return reasoning, text, [(name, arguments) for name, arguments in calls]


FREE, OPENED = ThoughtFormat(MARKS, False, HERMES), ThoughtFormat(MARKS, True, HERMES)
TOKENS = ThoughtFormat(Thoughts("<|think|>", "<|/think|>"), False, HERMES)
TURNS = ThoughtFormat(
    Thoughts("to=self<|text|>", "<|eom|>", ("<|start|>to=user<|text|>", "<|eot|>"), "to=user<|text|>"), False
)
NAMED = "<tool_call> is a tag, and so is\n" + CALL
ANSWERS: list[tuple[ThoughtFormat, str, Read]] = [
    (FREE, "<think>\nIs it <b> warm?\n</think>\n\nYes, 20 < 30.", ("Is it <b> warm?", "Yes, 20 < 30.", [])),
    (FREE, "\n<think>Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    (FREE, "Yes.\n<think>is a tag</think>", ("", "Yes.\n<think>is a tag</think>", [])),
    (FREE, "  <thin> ice", ("", "  <thin> ice", [])),
    (FREE, "<think>\n\n</think>\n\nYes.", ("", "Yes.", [])),
    (FREE, f"<think>{NAMED}</think>No.", (NAMED, "No.", [])),
    (FREE, f"<think>Now.</think>\n{CALL}", ("Now.", "", [("now", "{}")])),
    (FREE, f"<think>Now.</think>Well.\n{CALL}", ("Now.", "Well.", [("now", "{}")])),
    (FREE, "<think>One.</think>\n<think>Two.</think>Yes.", ("One.\n\nTwo.", "Yes.", [])),
    (FREE, f"<think>\n{CALL}", (CALL, "", [])),
    (FREE, "", ("", "", [])),
    (FREE, " \n", ("", " \n", [])),
    (OPENED, "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
    (OPENED, "</think>Yes.", ("", "Yes.", [])),
    (OPENED, f"Hm. {CALL}", (f"Hm. {CALL}", "", [])),
    (OPENED, "a </thin </think >", ("a </thin </think >", "", [])),
    (ThoughtFormat(MARKS, False), f"<think>Hm.</think>{CALL}", ("Hm.", CALL, [])),
    (ThoughtFormat(WRAPPED, False), "<think>Hm.</think>\n<response>Yes.</response>\n", ("Hm.", "Yes.", [])),
    (ThoughtFormat(WRAPPED, False), "<response>Yes.</response>", ("", "Yes.", [])),
    (ThoughtFormat(WRAPPED, False), "<think>Hm.</think>Yes </re", ("Hm.", "Yes </re", [])),
    (ThoughtFormat(MARKS, False, HERMES, separate=False), f"<think>\n{NAMED}\n</think>\n\nNo.",
     ("", f"<think>\n{NAMED}\n</think>\n\nNo.", [])),
    (ThoughtFormat(MARKS, True, HERMES, separate=False), f"Hm.\n</think>\n\n{CALL}",
     ("", "<think>\nHm.\n</think>", [("now", "{}")])),
    (OPENED, "<think>Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    (OPENED, "\n <think>\n</think>Yes <think>.", ("", "Yes <think>.", [])),
    (TOKENS, "<|think|>Hm.<|/think|>Yes.<|think|>\n<|/think|>", ("Hm.", "Yes.", [])),
    (TOKENS, f"Yes.<|think|>Not {CALL}<|/think|>No.<|/think|>", (f"Not {CALL}", "Yes.No.", [])),
    (TOKENS, f"<|think|>Hm.<|/think|>Well.<|think|>So.<|/think|>{CALL}", ("Hm.\n\nSo.", "Well.", [("now", "{}")])),
    (TURNS, "Hm.<|eom|><|start|>to=user<|text|>Yes.<|eot|>", ("", "Hm.<|eom|><|start|>to=user<|text|>Yes.", [])),
    (TURNS, " to=self<|text|>Hm.<|eom|><|start|>to=user<|text|>Yes.<|eot|>", ("Hm.", "Yes.", [])),
    (TURNS, " to=user<|text|>Yes.<|eot|>", ("", "Yes.", [])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "wanted"), ANSWERS)
def test_answers_whatever_the_pieces(form: ThoughtFormat, text: str, wanted: Read) -> None:
    assert read([text], form) == wanted and read(list(text), form) == wanted
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]], form) == wanted
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], form) == wanted


def test_text_is_not_held_back() -> None:
    parser = FREE.parser()
    assert parser.push("<think>\nIs") == [Reasoning("Is")] and parser.push(" it") == [Reasoning(" it")]
    assert parser.push("</thi") == [] and parser.push("rd>") == [Reasoning("</third>")]
    assert parser.push("</think>\n\n") == [] and parser.push("Y") == ["Y"]


@pytest.mark.parametrize(("text", "wanted"), [
    ("<thi", ("", "", [])), ("<think>Hm. </thi", ("Hm.", "", [])), ("<think>Hm.</think>\n", ("Hm.", "", [])),
    ("<think>Hm.</think><thi", ("Hm.", "", [])), ("<think>Hm", ("Hm", "", [])),
])  # fmt: skip
def test_an_answer_that_is_cut_off_shows_no_part_of_a_mark(text: str, wanted: Read) -> None:
    assert read([text], FREE, cut=True) == wanted and read(list(text), FREE, cut=True) == wanted


# -------------------------------------------------------------------------------------------------------------- masks


class Marked(ToyTokenizer):
    """Bytes, with marks that are tokens, and some that go beyond a mark."""

    special = ("<think>", "</think>", "\n\n", ">{", ">\n\n", "é")
    vocab_size = VOCAB + len(special)
    ids = {text: VOCAB + at for at, text in enumerate(special)}  # noqa: RUF012

    def token_bytes(self, token: int) -> bytes:
        return self.special[token - VOCAB].encode() if token >= VOCAB else super().token_bytes(token)

    def encode(self, text: str, *, special: bool = True, add_bos: bool | None = None) -> list[int]:
        return [self.ids[text]] if text in self.ids else list(text.encode())


JSON = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                            "additionalProperties": False})  # fmt: skip
GRAMMARS = Grammars(Marked())  # type: ignore[arg-type]


def spelled(*pieces: str | int) -> list[int]:
    return [token for piece in pieces for token in ([piece] if isinstance(piece, int) else piece.encode())]


def taken(rules: AfterThought, tokens: Sequence[int]) -> int:
    """How many tokens a mask allows, one after another; what `allows` says is what the whole mask says."""
    mask = GRAMMARS.mask(rules)
    for at, token in enumerate(tokens):
        words = mask.allowed()
        whole = np.ones(Marked.vocab_size, bool) if words is None else bits(words, Marked.vocab_size)
        for one in {token, EOS, ord("{"), ord("x"), ord("\n"), *Marked.ids.values()}:
            assert not mask.allows(one) or whole[one] or mask._spelling.token_bytes(one) == b"", (at, one)  # type: ignore[union-attr]
        if not mask.allows(token):
            return at
        mask.accept(token)
    return len(tokens)


BEGIN, END, BREAK, AFTER, GAP, ACUTE = Marked.ids.values()
ANSWER = '{"a":3}'


@pytest.mark.parametrize("tokens", [
    spelled(BEGIN, "well", END, BREAK, ANSWER), spelled("<think>well</think>\n\n", ANSWER), spelled(ANSWER),
    spelled("<think>", ANSWER, "</think", GAP, ANSWER), spelled(BEGIN, END, ANSWER),
    spelled(BEGIN, "</think", AFTER, ANSWER[1:]),
])  # fmt: skip
def test_a_grammar_applies_behind_a_thought(tokens: list[int]) -> None:
    rules = AfterThought("<think>", "</think>", False, JSON)
    assert taken(rules, tokens) == len(tokens)
    opened = AfterThought("<think>", "</think>", True, JSON)
    if BEGIN in tokens[:1]:
        assert taken(opened, tokens[1:]) == len(tokens) - 1


@pytest.mark.parametrize(("tokens", "count"), [
    (spelled("x"), 0), (spelled("<tx"), 2), (spelled(EOS), 0), (spelled(BEGIN, EOS), 1),
    (spelled(BEGIN, "x", END, "x"), 3),
    (spelled(BEGIN, END, EOS), 2), (spelled(BEGIN, END, " " * 9), 10), (spelled("\n", BEGIN), 0),
    (spelled("<think>", END, '{"b"'), 10),
])  # fmt: skip
def test_what_a_grammar_does_not_allow(tokens: list[int], count: int) -> None:
    assert taken(AfterThought("<think>", "</think>", False, JSON), tokens) == count


def test_a_token_that_ends_a_thought_and_goes_beyond_must_fit() -> None:
    number = Grammar.regex("[0-9]+")
    head = spelled(BEGIN, "x</think")
    assert taken(AfterThought("<think>", "</think>", False, number), [*head, AFTER]) == len(head)
    assert taken(AfterThought("<think>", "</think>", False, number), [*head, GAP, ord("7")]) == len(head) + 2


def test_a_call_in_a_thought_is_free_and_one_behind_it_is_not() -> None:
    lazy = HERMES.lazy_grammar(TOOLS)
    for opened in (False, True):
        mask = GRAMMARS.mask(AfterThought("<think>", "</think>", opened, lazy))
        for token in spelled(*([] if opened else [BEGIN]), "Not <tool_call> now.", END):
            assert mask.allowed() is None and mask.allows(token)
            assert not mask.accept(token)
        for token in spelled("\n<tool_call>\n{"):
            assert mask.allows(token)
            mask.accept(token)
        assert not mask.allows(ord("x")) and mask.allows(ord('"'))
    mask = GRAMMARS.mask(AfterThought("<think>", "</think>", False, lazy))
    for token in spelled("<tool_call>\n{"):
        mask.accept(token)
    assert not mask.allows(ord("x")), "without a thought, too"


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("grammar", [None, JSON])
@pytest.mark.parametrize("opened", [False, True])
def test_a_budget_ends_a_thought(budget: int, grammar: Grammar | None, opened: bool) -> None:
    rules = AfterThought("<think>", "</think>", opened, grammar, budget)
    begin = [] if opened else [BEGIN]
    assert taken(rules, spelled(*begin, "x" * 9)) == len(begin) + budget
    tokens = spelled(*begin, "x" * budget, END, BREAK, ANSWER)
    assert taken(rules, tokens) == len(tokens)
    early = spelled(*begin, END, ANSWER)
    assert taken(rules, early) == len(early), "one that ends before"


def test_a_budget_completes_what_has_begun() -> None:
    rules = AfterThought("<think>", "</think>", True, None, 5)
    half = spelled("xxxx", "é".encode()[0])
    assert taken(rules, [*half, "é".encode()[1], END]) == len(half) + 2, "a character"
    assert taken(rules, spelled("x</thx")) == 5 and taken(rules, spelled("x</think>yes")) == 12, "a mark"
    assert taken(rules, spelled(*[0xC3] * 9)) == 8, "what never becomes a character ends, too"


# ----------------------------------------------------------------------------------------------------------- the server


class Writer(Scripted):
    """Wants to write `script` behind the beginning of the answer, which the prompt may have begun already."""

    mark = b"<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def llm() -> LLM:
    made = served_llm(Writer(n_pages=256), context=4096)
    made.template = ChatTemplate(QWEN3)
    return made


@pytest.fixture(autouse=True)
def script(llm: LLM) -> Iterator[Any]:
    """Sets what the model wants to write, and its template."""
    executor: Any = llm._runner._executor

    def write(text: str, template: str = QWEN3) -> None:
        executor.script, llm.template = text.encode(), ChatTemplate(template)

    write("")
    yield write


ASK: Any = {"model": "toy", "messages": [USER], "max_tokens": 400, "temperature": 0}
THOUGHT, YES = "<think>\nIs it <b> warm?\n</think>\n\n", "Yes, warm."
LONG = f"<think>\n{'Well. ' * 40}</think>\n\n{YES}"


@pytest.mark.parametrize("template", [QWEN3, QWEN35])
@pytest.mark.parametrize("tools", [False, True])
def test_chat_completions(api: openai.OpenAI, script: Any, template: str, tools: bool) -> None:
    script(THOUGHT + YES, template)
    more: Any = {"tools": [WEATHER, NOW]} if tools else {}
    plain: Any = api.chat.completions.create(**ASK, **more)
    message = plain.choices[0].message
    assert (message.content, message.reasoning_content) == (YES, "Is it <b> warm?")
    assert message.tool_calls is None and plain.choices[0].finish_reason == "stop"
    tokens = plain.usage.completion_tokens_details.reasoning_tokens
    assert tokens == len("Is it <b> warm?\n") - 1 + (template == QWEN3), "`<` might begin a mark"
    chunks: Any = list(api.chat.completions.create(**ASK, **more, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == YES
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert "".join(thoughts) == "Is it <b> warm?" and len(thoughts) > 5


@pytest.mark.parametrize("template", [QWEN3, QWEN35])
def test_only_what_follows_a_thought_is_a_call(api: openai.OpenAI, script: Any, template: str) -> None:
    script(f"<think>\nNot <tool_call> now, nor\n{CALL}\n</think>\n\n{YES}", template)
    choice: Any = api.chat.completions.create(**ASK, tools=[WEATHER, NOW]).choices[0]
    assert choice.message.tool_calls is None and choice.message.content == YES and choice.finish_reason == "stop"
    assert choice.message.reasoning_content == f"Not <tool_call> now, nor\n{CALL}"
    script(f"<think>\nNot <tool_call> now.\n</think>\n\n{CALL}", template)
    ask = ASK | {"tools": [WEATHER, NOW]}
    plain: Any = api.chat.completions.create(**ask).choices[0]
    with api.chat.completions.stream(**ask) as stream:
        streamed: Any = stream.get_final_completion().choices[0]
    for choice in (plain, streamed):
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
        assert choice.finish_reason == "tool_calls" and not choice.message.content


@pytest.mark.parametrize("template", [QWEN3, QWEN35])
def test_a_thought_may_precede_what_is_demanded(api: openai.OpenAI, script: Any, template: str) -> None:
    schema = {"name": "x", "schema": json.loads(JSON.text)}
    more: Any = {"response_format": {"type": "json_schema", "json_schema": schema}}
    script(THOUGHT + '{"a": 5}', template)
    message: Any = api.chat.completions.create(**ASK, **more).choices[0].message
    assert json.loads(message.content) == {"a": 5} and message.reasoning_content == "Is it <b> warm?"
    script(THOUGHT + CALL, template)
    choice: Any = api.chat.completions.create(**ASK, tools=[WEATHER, NOW], tool_choice="required").choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert choice.message.reasoning_content == "Is it <b> warm?" and choice.message.content is None


def test_a_thought_that_never_ends_is_reasoning(server: Server, script: Any) -> None:
    script(f"<think>\n{CALL}" + "x" * 400)
    _, answer = post(server, "/v1/chat/completions", ASK | {"tools": [WEATHER, NOW], "max_tokens": 99})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"].startswith(CALL) and "tool_calls" not in choice["message"]


@pytest.mark.parametrize(("begun", "rest", "thought", "text"), [
    ("Yes", ", <think> is a tag.", None, ", <think> is a tag."),
    ("<think>Is it", " warm?</think>Yes.", "warm?", "Yes."),
    ("<think>Hm.</think>Yes", ".", None, "."),
])  # fmt: skip
def test_an_answer_that_has_begun(
    server: Server, script: Any, begun: str, rest: str, thought: str | None, text: str
) -> None:
    script(begun + rest, turns("{{ m.content }}", "<think>{{ '</think>' if enable_thinking is false }}"))
    body = ASK | {"messages": [USER, {"role": "assistant", "content": begun}], "continue_final_message": True}
    status, answer = post(server, "/v1/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, text)


BUDGETS: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", more) for more in (
        {"reasoning_budget": 9}, {"thinking_budget_tokens": 9}, {"thinking_token_budget": 9}, {"thinking_budget": 9},
        {"reasoning": {"max_tokens": 9}}, {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"reasoning_budget": 9, "tools": [WEATHER]}, {"reasoning_budget": 9, "grammar": 'root ::= "Y" [a-z]*'},
    )),
    ("/v1/responses", {"reasoning": {"max_tokens": 9}}),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), BUDGETS)
@pytest.mark.parametrize("template", [QWEN3, QWEN35])
def test_a_budget_ends_the_thought(
    server: Server, script: Any, path: str, more: dict[str, Any], template: str
) -> None:
    script(LONG, template)
    body = {"max_tokens": 60, "temperature": 0, **more}
    body |= {"input": "Hi"} if "responses" in path else {"messages": [USER]}
    if "responses" in path:
        body["max_output_tokens"] = body.pop("max_tokens")
    status, answer = post(server, path, body)
    assert status == 200, answer
    text = json.dumps(answer)
    assert "think>" not in text and "Well. Well" not in text
    thought = {
        "/v1/chat/completions": lambda: answer["choices"][0]["message"]["reasoning_content"],
        "/v1/responses": lambda: answer["output"][0]["content"][0]["text"],
        "/v1/messages": lambda: answer["content"][0]["thinking"],
    }[path]()
    assert thought in ("Well. We", "Well. Wel"), "nine tokens of bytes, the line break among them where it is generated"
    if "grammar" in more:
        assert answer["choices"][0]["message"]["content"].startswith("Y")


def test_a_budget_changes_nothing_before_it_is_spent(llm: LLM, script: Any) -> None:
    """The same seed draws the same tokens, alone and among others."""
    script("", QWEN35)
    prompt = llm.encode_chat([USER])  # type: ignore[list-item]
    free = SamplingParams(seed=5, temperature=1, max_tokens=40, ignore_eos=True)
    rules = [AfterThought("<think>", "</think>", True, None, budget) for budget in (0, 7, 30, 99)]
    limited = [SamplingParams(seed=5, temperature=1, max_tokens=40, ignore_eos=True, grammar=one) for one in rules]
    alone = llm.generate([prompt], free)[0].token_ids
    together = [answer.token_ids for answer in llm.generate([prompt] * 4, limited)]
    for tokens, budget in zip(together, (0, 7, 30, 99), strict=True):
        assert tokens[: min(budget, 40)] == alone[: min(budget, 40)]
        assert bytes(tokens[budget : budget + 8]) == (b"" if budget == 99 else b"</think>")
    assert [llm.generate([prompt], one)[0].token_ids for one in limited] == together


OFF_FIELDS: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", more) for more in (
        {"reasoning_effort": "none"}, {"reasoning": {"enabled": False}}, {"reasoning": {"effort": "none"}},
        {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_budget": 0},
        {"thinking": {"type": "disabled"}}, {"thinking": False}, {"think": False}, {"think": "none"},
        {"reasoning_effort": "high", "enable_thinking": False},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    )),
    ("/v1/responses", {"reasoning": {"effort": "none"}}),
    ("/v1/messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), OFF_FIELDS)
def test_thinking_is_turned_off(server: Server, script: Any, path: str, more: dict[str, Any]) -> None:
    script(f"<think>\n\n</think>\n\n{YES}")
    body = {"max_tokens": 60, "temperature": 0, **more}
    body |= {"input": "Hi"} if "responses" in path else {"messages": [USER]}
    if "responses" in path:
        body["max_output_tokens"] = body.pop("max_tokens")
    status, answer = post(server, path, body)
    assert status == 200 and YES in json.dumps(answer) and "think>" not in json.dumps(answer)
    usage = answer["usage"]
    tokens = usage.get("completion_tokens", usage.get("output_tokens"))
    assert tokens == len(YES) + 1, "the prompt has ended the thought"


def test_thinking_is_turned_off_where_the_template_cannot(server: Server, script: Any) -> None:
    script("<think>\nWell.", R1)
    _, answer = post(server, "/v1/chat/completions", ASK | {"reasoning_effort": "none", "max_tokens": 20})
    message = answer["choices"][0]["message"]
    assert "reasoning_content" not in message and answer["usage"]["completion_tokens"] == 20
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_thinking_is_turned_on(server: Server) -> None:
    for more in ({"reasoning_effort": "low"}, {"enable_thinking": True}, {"reasoning": {"enabled": True}}):
        for template, shown in ((V31, "<think>"), (COMMAND, "<|im_start|>assistant\n")):
            server.service.models[0].llm.template = ChatTemplate(template)
            status, answer = post(server, "/apply-template", {"messages": [USER], **more})
            assert status == 200 and answer["prompt"].endswith(shown)


def test_thoughts_that_are_not_told_apart_or_not_shown(server: Server, script: Any) -> None:
    script(f"<think>\nNot {CALL}\n</think>\n\n{YES}")
    path = "/v1/chat/completions"
    _, raw = post(server, path, ASK | {"reasoning_format": "none", "tools": [WEATHER, NOW]})
    assert raw["choices"][0]["message"]["content"] == f"<think>\nNot {CALL}\n</think>\n\n{YES}"
    assert "tool_calls" not in raw["choices"][0]["message"]
    for more in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        _, hidden = post(server, path, ASK | more)
        assert hidden["choices"][0]["message"] == {"role": "assistant", "content": YES, "refusal": None}
        assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] > 10
        with client(server) as http:
            streamed = http.post(path, json=ASK | more | {"stream": True}).text
        assert "reasoning_content" not in streamed and "tool_call" not in streamed
    script(THOUGHT + YES)
    thinking = {"type": "adaptive", "display": "omitted"}
    _, message = post(server, "/v1/messages", {"messages": [USER], "max_tokens": 99, "temperature": 0,
                                               "thinking": thinking})  # fmt: skip
    assert [block["type"] for block in message["content"]] == ["text"]


def test_responses(api: openai.OpenAI, script: Any) -> None:
    script(THOUGHT + YES)
    asked: Any = {"model": "toy", "input": "Warm?", "max_output_tokens": 400, "temperature": 0}
    plain = api.responses.create(**asked, reasoning={"summary": "auto"})
    thought, message = plain.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "Is it <b> warm?"
    assert message.type == "message" and plain.output_text == YES
    assert plain.reasoning is not None and plain.reasoning.summary == "auto" and plain.reasoning.effort is None
    assert plain.usage is not None and plain.usage.output_tokens_details.reasoning_tokens > 10
    events = list(api.responses.create(**asked, reasoning={"effort": None, "summary": None}, stream=True))
    assert "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == "Is it <b> warm?"
    script(YES)
    again = [{"role": "user", "content": "Warm?"}, *(item.model_dump(exclude_none=True) for item in plain.output)]
    assert api.responses.create(**asked | {"input": again}).output_text == YES


def test_messages(server: Server, script: Any) -> None:
    script(THOUGHT + YES)
    body = {"messages": [USER], "max_tokens": 200, "temperature": 0, "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"}}  # fmt: skip
    status, plain = post(server, "/v1/messages", body)
    thought, text = plain["content"]
    assert status == 200 and thought == {"type": "thinking", "thinking": "Is it <b> warm?", "signature": ""}
    assert text == {"type": "text", "text": YES}
    status, refused = post(server, "/v1/messages", body | {"output_config": {"effort": "much"}})
    assert status == 400 and refused["error"]["message"].startswith("output_config.effort must be one of none, minimal")
    assert post(server, "/v1/messages/count_tokens", {"messages": [USER], "thinking": {"type": "adaptive"}})[0] == 200
    with client(server) as http:
        streamed = http.post("/v1/messages", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(one["thinking"] for one in deltas if one["type"] == "thinking_delta") == "Is it <b> warm?"
    signed = [one["type"] for one in deltas].index("signature_delta")
    assert all(one["type"] == "text_delta" for one in deltas[signed + 1 :])
    again = [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, thought, text]}, USER]
    assert post(server, "/v1/messages", {**body, "messages": again})[0] == 200


ALL_FIELDS: list[tuple[str, dict[str, Any]]] = [
    *BUDGETS, *OFF_FIELDS,
    *(("/v1/chat/completions", {"reasoning_effort": effort}) for effort in ("minimal", "medium", "xhigh", None)),
    ("/v1/chat/completions", {"reasoning": {"effort": None, "exclude": None}, "reasoning_format": "deepseek"}),
    ("/v1/chat/completions", {"reasoning_budget": -1, "include_reasoning": True}),
    ("/v1/responses", {"reasoning": {"effort": "medium", "summary": "auto"}}),
    ("/v1/messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), ALL_FIELDS)
def test_a_model_that_cannot_think_takes_the_fields(
    server: Server, script: Any, path: str, more: dict[str, Any]
) -> None:
    script(YES, PLAIN)
    body = {"max_tokens": 20, "temperature": 0, **more}
    body |= {"input": "Hi"} if "responses" in path else {"messages": [USER]}
    if "responses" in path:
        body["max_output_tokens"] = body.pop("max_tokens")
    status, answer = post(server, path, body)
    assert status == 200 and ("grammar" in more or YES in json.dumps(answer))


@pytest.mark.parametrize(("more", "param"), [
    ({"reasoning_effort": "much"}, "reasoning_effort"), ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"reasoning": {"depth": 3}}, "reasoning.depth"), ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
    ({"reasoning_budget": -2}, "reasoning_budget"), ({"reasoning_format": "xml"}, "reasoning_format"),
    ({"thinking": {"type": "long"}}, "thinking.type"),
    ({"thinking": {"budget_tokens": True}}, "thinking.budget_tokens"), ({"think": "much"}, "think"),
])  # fmt: skip
def test_values_that_are_none(server: Server, more: dict[str, Any], param: str) -> None:
    status, answer = post(server, "/v1/chat/completions", ASK | more)
    assert status == 400 and answer["error"]["param"] == param


def test_defaults_of_the_server() -> None:
    executor, path = Writer(n_pages=64), "/v1/chat/completions"
    executor.script = LONG.encode()
    own = served_llm(executor)
    own.template = ChatTemplate(QWEN3)
    with serving(own, reasoning_format="none", reasoning_budget=9) as server:
        _, raw = post(server, path, ASK | {"max_tokens": 40})
        assert raw["choices"][0]["message"]["content"].startswith("<think>\nWell. We</think>")
        more = {"reasoning_format": "deepseek", "reasoning_budget": 12, "max_tokens": 40}
        _, apart = post(server, path, ASK | more)
        assert apart["choices"][0]["message"]["reasoning_content"] == "Well. Well."


def test_what_is_only_counted_or_rendered_has_the_defaults_of_the_server() -> None:
    own = served_llm()
    own.template = ChatTemplate(QWEN3)
    with serving(own, reasoning_budget=0) as server:
        body, closed = {"messages": [USER]}, len("<think>\n\n</think>\n\n")
        plain = post(server, "/apply-template", {**body, "enable_thinking": True, "reasoning_budget": -1})[1]["prompt"]
        assert len(post(server, "/apply-template", body)[1]["prompt"]) == len(plain) + closed
        for path in ("/v1/messages/count_tokens", "/chat/completions/input_tokens"):
            assert post(server, path, body)[1]["input_tokens"] == len(plain) + closed


@pytest.mark.parametrize("given", [
    {"reasoning_content": "Hm."}, {"reasoning": "Hm."}, {"thinking": "Hm."},
    {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]},
    {"reasoning_content": "Hm.", "reasoning": "Hm.", "reasoning_details": None},
    {"reasoning_details": [{"summary": "Hm."}]}, {"thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]},
])  # fmt: skip
def test_an_earlier_thought_is_sent_back(server: Server, given: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", "content": "Yes.", **given}, USER]
    status, answer = post(server, "/apply-template", {"messages": messages})
    assert status == 200 and "<think>\nHm.\n</think>\n\nYes." in answer["prompt"]


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("template", [QWEN3, QWEN35])
def test_run_prints_the_answer_alone(
    llm: LLM, script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    script(THOUGHT + YES, template)
    tokens, params = llm.encode_chat([USER]), SamplingParams(max_tokens=200, temperature=0)  # type: ignore[list-item]
    cases = ((False, False, "xterm"), (True, False, "xterm"), (True, False, "dumb"), (True, True, "dumb"))
    for terminal, hide, term in cases:
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr("sys.stderr.isatty", lambda shown=terminal: shown)
        reader, own = thought_reader(llm, params, tokens)
        status, document = answer(llm.stream(tokens, own), Output(json_mode=False), reader=reader, hide=hide)
        out, err = capsys.readouterr()
        assert (status, out) == (0, YES) and document["reasoning"] == "Is it <b> warm?" and document["text"] == YES
        shown = err.replace("\x1b[2m", "").replace("\x1b[0m", "")
        marked = ("The thoughts:\n\n", "The answer:\n\n") if term == "dumb" else ("", "")
        assert shown == ("" if not terminal else shown if hide else "Is it <b> warm?\n\n".join(marked))
        assert not hide or ("tokens of thought)\n\n" in shown and "warm" not in shown)
    limited = Thinking(budget=4)
    reader, own = thought_reader(llm, params, tokens, limited)
    _, document = answer(llm.stream(tokens, own), Output(json_mode=True), reader=reader)
    assert document["reasoning"] in ("Is i", "Is")
    assert thought_reader(llm, SamplingParams(skip_special_tokens=False), tokens)[0] is None, "asked to see all"


@pytest.mark.parametrize(("words", "wanted"), [
    ([], Thinking()), (["--think", "on"], ON), (["--think=false"], Thinking(False, None, 0)),
    (["--think", "low"], Thinking(effort="low")), (["--reasoning-budget", "64"], Thinking(budget=64)),
    (["--reasoning-budget=-1"], Thinking()), (["--reasoning-budget", "0"], Thinking(False, None, 0)),
    (["--think", "on", "--reasoning-budget", "5"], Thinking(True, None, 5)),
    (["--think", "off", "--reasoning-budget", "5"], Thinking(False, None, 0)),
])  # fmt: skip
def test_flags(words: list[str], wanted: Thinking) -> None:
    parser = Parser(prog="run")
    thinking_flags(parser)
    assert asked_thinking(parser.parse_args(words)) == wanted


@pytest.mark.parametrize("words", [["--think", "much"], ["--reasoning-budget", "-2"], ["--reasoning-budget", "x"]])
def test_flags_that_are_refused(words: list[str]) -> None:
    parser = Parser(prog="run")
    thinking_flags(parser)
    with pytest.raises(RequestError, match="must be"):
        parser.parse_args(words)


@pytest.mark.parametrize(("text", "most", "says"), [
    (THOUGHT + YES, 200, ""), (THOUGHT + YES, len(THOUGHT) + 1, "(ended by --max-tokens {})"),
    (THOUGHT + YES, 12, "(ended by --max-tokens {} while it was thinking)"),
    (THOUGHT, 200, "(it thought, and ended without an answer)"),
])  # fmt: skip
def test_how_an_answer_ended(llm: LLM, script: Any, text: str, most: int, says: str) -> None:
    script(text)
    params = SamplingParams(max_tokens=most, temperature=0)
    tokens = llm.encode_chat([USER])  # type: ignore[list-item]
    reader, own = thought_reader(llm, params, tokens)
    _, document = answer(llm.stream(tokens, own), Output(json_mode=True), reader=reader)
    assert describe_end(document, most) == says.format(most)


@pytest.mark.parametrize(("template", "value", "says"), [
    (turns("{{ m.content }}", ""), "on", "(this model does not think"), (QWEN3, "on", "(thinking: on)"),
    (turns("{{ m.content }}", ""), "low", "(this model does not think"), (QWEN3, "low", "(thinking: low)"),
    (turns("{{ m.content }}", ""), "off", "(thinking: off)"),
])  # fmt: skip
def test_a_model_that_cannot_think_says_so(
    llm: LLM, script: Any, capsys: pytest.CaptureFixture[str], template: str, value: str, says: str
) -> None:
    script(YES, template)
    talk = ChatSession(llm, SamplingParams(max_tokens=9), Output(json_mode=False), None, False)
    assert talk.handle(f"/think {value}", Interrupts()) and says in capsys.readouterr().err


def test_chat_thinks_as_it_is_told(llm: LLM, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script(f"<think>\n\n</think>\n\n{YES}")
    params = SamplingParams(max_tokens=60, temperature=0)
    talk, interrupts = ChatSession(llm, params, Output(json_mode=False), None, False), Interrupts()
    assert talk.handle("/think off", interrupts) and talk.handle("Warm?", interrupts)
    assert talk.handle("/think much", interrupts)
    out, err = capsys.readouterr()
    assert out == f"{YES}\n" and "(thinking: off)" in err and "/think takes one of on, off, minimal" in err
    assert talk.turns[0]["completion_tokens"] == len(YES) + 1, "the prompt has ended the thought"
    script(THOUGHT + YES)
    assert talk.handle("/think on", interrupts) and talk.handle("Warm?", interrupts)
    assert talk.turns[1]["reasoning"] == "Is it <b> warm?" and talk.messages[-1]["content"] == YES
