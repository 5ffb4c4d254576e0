"""Whether lm-eval, through the server, scores what `transformers` and this engine score without it.

    python -m benchmarks.quality.multiple_choice MODEL.gguf [--lm-eval SAMPLES.jsonl]

The questions are lm_eval/trivia.jsonl, four answers each. As in lm-eval, the answer with the highest sum of its tokens'
log-probabilities after the question is chosen (acc), or with the highest sum per character (acc_norm). MODEL is a LLaMA
as a GGUF file; `transformers` computes in fp32 on the weights that its blocks stand for. SAMPLES is what
`lm_eval --log_samples` wrote (docs/serving.md). Needs the `test` extra (torch, transformers, gguf).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.logits import log_softmax, reference_model
from powerinfer import LLM

QUESTIONS = Path(__file__).parent / "lm_eval" / "trivia.jsonl"

Rows = Callable[[Sequence[int], int], np.ndarray]
"""(tokens, position of the first row) -> log-probabilities of what follows it and the others, float64 [n, vocab]."""


def transformers_rows(path: Path) -> Rows:
    import torch

    model = reference_model(path)

    def rows(tokens: Sequence[int], first: int) -> np.ndarray:
        with torch.inference_mode():
            return log_softmax(model(torch.tensor([list(tokens)])).logits[0, first:].numpy())

    return rows


def powerinfer_rows(llm: LLM) -> Rows:
    def rows(tokens: Sequence[int], first: int) -> np.ndarray:
        found: list[np.ndarray] = []
        llm.score(tokens, first, lambda _, logits: found.append(log_softmax(logits)))
        return np.concatenate(found)

    return rows


def sums(llm: LLM, questions: Sequence[dict[str, Any]], rows: Rows) -> np.ndarray:
    """The sum of the log-probabilities of each answer's tokens, float64 [questions, 4]."""
    found = []
    for one in questions:
        asked = llm.tokenizer.encode(one["question"], add_bos=False)
        for choice in one["choices"]:
            whole = llm.tokenizer.encode(f"{one['question']} {choice}", add_bos=False)
            answer = np.asarray(whole[len(asked) :])
            found.append(rows(whole[:-1], len(asked) - 1)[np.arange(len(answer)), answer].sum())
    return np.reshape(found, (len(questions), 4))


def line(label: str, found: np.ndarray, reference: np.ndarray, questions: Sequence[dict[str, Any]]) -> str:
    lengths = np.asarray([[len(choice) for choice in one["choices"]] for one in questions])
    right = np.asarray([one["answer"] for one in questions])
    shares = [np.mean(scores.argmax(axis=1) == right) for scores in (found, found / lengths)]
    return f"| {label} | {shares[0]:.4f} | {shares[1]:.4f} | {np.abs(found - reference).max():.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lm-eval", type=Path, metavar="SAMPLES")
    arguments = parser.parse_args()
    questions = [json.loads(text) for text in QUESTIONS.read_text().splitlines()]
    with LLM(arguments.model, context=512, gpu="none") as llm:
        reference = sums(llm, questions, transformers_rows(arguments.model))
        scores = {"transformers, fp32": reference, "powerinfer, LLM.score": sums(llm, questions, powerinfer_rows(llm))}
    if arguments.lm_eval:
        samples = sorted(map(json.loads, arguments.lm_eval.read_text().splitlines()), key=lambda one: one["doc_id"])
        scores["powerinfer, lm-eval"] = np.asarray(
            [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples]
        )
    print(f"| {len(questions)} questions | acc | acc_norm | largest difference of a sum |\n|---|---|---|---|")
    for label, found in scores.items():
        print(line(label, found, reference, questions))


if __name__ == "__main__":
    main()
