"""System messages of agents under templates that take one at the beginning, none, or no two of the user in a row."""

from __future__ import annotations

from typing import Any

import pytest
from serving import post, served_llm, serving

from powerinfer.text.chat import ChatTemplate
from powerinfer.text.system_messages import placed

TURNS = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
ALTERNATE = (
    "{% set ns = namespace(last='') %}{% for m in messages if m.role in ('user', 'assistant') %}"
    "{% if m.role == ns.last %}{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.last = m.role %}"
    "{% endfor %}"
)
FIRST = (  # the others are left out, as by MiniMax-M2's and SmolLM3's
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}[{{ m.role }}: {{ m.content }}]{% endif %}"
    "{% endfor %}"
)
REFUSED = (  # as by Qwen3.5's
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}"
    "{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
)
LAST = (  # one takes the place of another, as by DeepSeek-R1's
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}"
    "{% if ns.s %}[system: {{ ns.s }}]{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
)
NONE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + ALTERNATE + TURNS
LEFT_OUT = "{% for m in messages if m.role != 'system' %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def chat(text: str) -> list[dict[str, Any]]:
    """Messages by the first letters of their roles: "s:A u:B"."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in text.split()]


@pytest.mark.parametrize(
    ("source", "given", "written"),
    [
        (TURNS, "s:A s:B u:C s:D u:E", "[system: A][system: B][user: C][system: D][user: E]"),
        *((source, given, written) for source in (FIRST, REFUSED, LAST) for given, written in (
            ("s:A u:B a:C u:D", "[system: A][user: B][assistant: C][user: D]"),
            ("s:A s:B u:C u:D", "[system: A\n\nB][user: C][user: D]"),
            ("s:A u:B s:C s:D a:E", "[system: A][user: B][user: C\n\nD][assistant: E]"),
            ("s:A u:B a:C t:D s:E s:F", "[system: A][user: B][assistant: C][tool: D\n\nE\n\nF]"),
            ("u:A s:B", "[user: A][user: B]"),
        )),
        (ALTERNATE + FIRST, "s:A u:B s:C u:D a:E u:F", "[system: A][user: B\n\nC\n\nD][assistant: E][user: F]"),
        (ALTERNATE + TURNS, "u:A u:B a:C", "[user: A\n\nB][assistant: C]"),
        (NONE, "s:A u:B a:C", "[user: A\n\nB][assistant: C]"),
        (NONE, "s:A s:B u:C a:D t:E s:F", "[user: A\n\nB\n\nC][assistant: D][tool: E\n\nF]"),
        (LEFT_OUT, "s:A u:B", "[user: A][user: B]"),
    ],
)  # fmt: skip
def test_every_message_is_written(source: str, given: str, written: str) -> None:
    template, messages = ChatTemplate(source), chat(given)
    before = [dict(message) for message in messages]
    assert template.render(placed(messages, template))[0] == written
    assert messages == before


def test_what_the_template_takes_stays() -> None:
    for source, given in ((TURNS, "s:A s:B u:C u:D s:E"), (FIRST, "s:A u:B u:C a:D"), (NONE, "u:A a:B u:C")):
        assert placed(chat(given), ChatTemplate(source)) == chat(given)


def test_a_template_that_fails_is_left_to_its_rendering() -> None:
    assert placed(chat("s:A s:B u:C"), ChatTemplate("{{ 1 // 0 }}")) == chat("s:A s:B u:C")


def test_the_messages_of_agents() -> None:
    """Codex sends two developer messages and two of the user; Claude Code a system message after the user's."""
    llm = served_llm()
    llm.template = ChatTemplate(ALTERNATE + REFUSED)
    turns = [("developer", "A"), ("developer", "B"), ("user", "C"), ("user", "D"), ("system", "E")]
    with serving(llm) as server:
        messages = [{"role": role, "content": text} for role, text in turns]
        status, answer = post(server, "/apply-template", {"messages": messages})
        assert (status, answer.get("prompt")) == (200, "[system: A\n\nB][user: C\n\nD\n\nE]"), answer
