"""The ten first questions: what is taken for a right answer, and what the default models answer."""

from __future__ import annotations

import pytest

from benchmarks.quality import first_answers
from benchmarks.quality.first_answers import WANTED, answers, questions
from powerinfer import LLM
from powerinfer.hub import find_stored, full_name
from powerinfer.pinned import DEFAULT_MODELS

BY_TEXT = {entry.question: entry for entry in questions()}


def test_ten_questions_have_accepted_answers() -> None:
    assert len(BY_TEXT) == 10 and all(entry.accepted and all(entry.accepted) for entry in BY_TEXT.values())


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ("What is the capital of France?", "It is **Paris**.", True),
        ("What is the capital of France?", "Parisian food is good.", False),
        ("What is 2+2?", "2 + 2 = 4", True),
        ("What is 2+2?", "Four.", True),
        ("What is 2+2?", "It is 24, or 44.", False),
        ("What is 2+2?", "x" * first_answers.READ + " 4", False),
        ("What is 2+2?", "<think>\nIs it 4?\n</think>\n\nIt is 5.", False),
        ("What is the chemical formula of water?", "H₂O", True),
    ],
)
def test_what_is_a_right_answer(question: str, answer: str, right: bool) -> None:
    assert BY_TEXT[question].accepts(answer) is right


@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_a_default_model_answers_rightly(name: str) -> None:
    """At its defaults. Only where it was pulled before: half a gigabyte is too much to fetch here."""
    stored = find_stored(full_name(name))
    if stored is None:
        pytest.skip(f"{name} was not pulled")
    asked = questions()
    with LLM(stored.path, context=2048, gpu="none") as llm:
        right = [entry.accepts(text) for entry, text in zip(asked, answers(llm, asked, seed=1), strict=True)]
    assert sum(right) >= WANTED, [entry.question for entry, found in zip(asked, right, strict=True) if not found]
