"""Whether a model answers ten questions that people ask first, sampled as it is when nothing is said about sampling.

    python -m benchmarks.quality.first_answers [-m MODEL] [--seeds 5] [--max-tokens 128]

The questions and the answers that are accepted are in first_answers.json. An answer is right if one of these is in its
first 200 characters, as whole words. Each question is asked alone, once for each seed. Exits with 1 if a seed has fewer
than 9 right answers.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powerinfer import LLM

QUESTIONS = Path(__file__).with_suffix(".json")
READ = 200  # characters of an answer
MAX_TOKENS = 128  # of an answer; one with a thought before it needs more
WANTED = 9  # right answers of ten, with every seed


@dataclass(frozen=True)
class Question:
    """A question, and texts of which a right answer has one."""

    question: str
    accepted: list[str]

    def accepts(self, answer: str) -> bool:
        begin = answer.rpartition("</think>")[2].strip()[:READ]
        words = "|".join(re.escape(text) for text in self.accepted)
        return re.search(rf"(?<!\w)({words})(?!\w)", begin, re.IGNORECASE) is not None


def questions() -> list[Question]:
    return [Question(**entry) for entry in json.loads(QUESTIONS.read_text(encoding="utf-8"))]


def answers(llm: LLM, asked: Sequence[Question], seed: int, max_tokens: int = MAX_TOKENS) -> list[str]:
    """The answers to all questions, each in a conversation of its own."""
    params = llm.default_params(seed=seed, max_tokens=max_tokens)
    prompts = [llm.encode_chat([{"role": "user", "content": entry.question}]) for entry in asked]
    return [answer.text.strip() for answer in llm.generate(prompts, params)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="default: the default model")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N")
    arguments = parser.parse_args()
    asked = questions()
    with LLM(arguments.model, context=max(2048, 2 * arguments.max_tokens)) as llm:
        given = [answers(llm, asked, seed, arguments.max_tokens) for seed in range(1, arguments.seeds + 1)]
        print(f"{llm.config.architecture} {llm.sampling.values}")
    for question, texts in zip(asked, zip(*given, strict=True), strict=True):
        right = [question.accepts(text) for text in texts]
        shown = texts[right.index(False) if False in right else 0]
        print(f"{sum(right)} of {len(right)}  {question.question}  {' '.join(shown.split())[:100]}")
    counts = [sum(question.accepts(text) for question, text in zip(asked, texts, strict=True)) for texts in given]
    print(f"right answers of {len(asked)}, by seed: {', '.join(map(str, counts))}")
    if min(counts) < WANTED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
