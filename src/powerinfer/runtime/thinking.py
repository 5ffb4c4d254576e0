"""Answers of a model that thinks: what they must match and how they are read, given what was asked and the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from powerinfer.text.grammar import AfterThought, Grammar, LazyGrammar
from powerinfer.text.thoughts import Thinking, ThoughtFormat, Thoughts, read_thoughts
from powerinfer.text.tool_parser import AnswerFormat

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM
    from powerinfer.runtime.params import SamplingParams
    from powerinfer.text.chat import ChatTemplate
    from powerinfer.text.tokenizer import Tokenizer

IN_VOCABULARY = ("<think>", "</think>")  # marks that are one token each where a model has been trained with them
TAIL_TOKENS = 64  # of a prompt, which say whether it has begun a thought


def thoughts_of(llm: LLM) -> Thoughts | None:
    """The way in which a model thinks; None if it does not."""
    return thoughts_by(llm.template, llm.tokenizer)


def thoughts_by(template: ChatTemplate | None, tokenizer: Tokenizer) -> Thoughts | None:
    """The way in which a model thinks, by its template, else by its vocabulary; None if it does not think.

    Many files of models that think have a plain template.
    """
    if template is None:
        return None
    thoughts = read_thoughts(template)
    if thoughts is None and all(len(tokenizer.encode(mark, add_bos=False)) == 1 for mark in IN_VOCABULARY):
        return Thoughts(*IN_VOCABULARY)
    return thoughts


def thinking_variables(llm: LLM, wanted: Thinking) -> dict[str, Any]:
    """The variables of the chat template that do what is wanted, as far as it can."""
    thoughts = thoughts_of(llm)
    return {} if thoughts is None else thoughts.variables(wanted)


def with_thoughts(
    llm: LLM,
    wanted: Thinking,
    params: SamplingParams,
    form: AnswerFormat | None,
    prompt: Sequence[int],
    separate: bool = True,
    begun: str | None = None,
) -> tuple[SamplingParams, AnswerFormat | None]:
    """Parameters and format of the answer to a prompt, if the model thinks before it; else as they are.

    params, form: of the answer without a thought. apart: thoughts are told apart from the answer. begun: the beginning
    of the answer, if the prompt has it; no thought follows one, unless it is in the middle of one.
    """
    thoughts = thoughts_of(llm)
    if thoughts is None:
        return params, form
    if begun is None:
        opened = thoughts.opened(llm.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special=False))
    else:
        opened = begun.rfind(thoughts.begin) > begun.rfind(thoughts.end)
    rules = params.rules
    assert not isinstance(rules, AfterThought)
    params = replace(params, grammar=_rules(thoughts, opened, rules, wanted))
    if thoughts.channels:
        return params, form
    if any(special in mark for mark in thoughts.marks for special in llm.tokenizer.special_tokens if special):
        params = replace(params, skip_special_tokens=False)
    return params, ThoughtFormat(thoughts, opened is True, form, separate)


def _rules(
    thoughts: Thoughts, opened: bool | None, rules: Grammar | LazyGrammar | None, wanted: Thinking
) -> Grammar | LazyGrammar | AfterThought | None:
    """Rules for the answer, its thought included. rules: of the rest."""
    budget = wanted.budget
    if thoughts.channels:  # its grammar has the thought in it; a model of this format thinks in any case
        limited = budget is not None and wanted.on is not False and not isinstance(rules, Grammar)
        return AfterThought(thoughts.begin, thoughts.end, False, rules, budget) if limited else rules
    none_follows = opened is False or (budget == 0 and not opened)
    if (rules is None and budget is None) or (none_follows and isinstance(rules, Grammar)):
        return rules
    return AfterThought(thoughts.begin, thoughts.end, opened is True, rules, budget)
