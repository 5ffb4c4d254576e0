"""What the server adds to the Python API, what a shared prefix saves, and what a mask costs, in one process each.

    python -m benchmarks.serving.overhead MODEL.gguf [--repeat 15]

* The time to the first token and between tokens: one request at a time, through the server and through `LLM.stream`, in
  turn, the same prompt of 32 tokens, 64 tokens of answer.
* The time to the first token of a prompt of 1,000 tokens, and of one that begins with the same 1,000.
* Tokens per second with and without a JSON schema.

Medians. Writes one JSON; serving.table turns the newest into the table of docs/serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib import machine, results
from benchmarks.serving.servers import Answer, Server, ask, ours, prompt, running
from powerinfer import LLM, SamplingParams
from powerinfer.formats.checkpoint import open_checkpoint

TOKENS, PROMPT, PREFIX, CONTEXT = 64, 32, 1000, 2048
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "minItems": 40, "items": {"type": "string", "maxLength": 12}}},
    "required": ["items"],
}


def through_server(server: Server, tokens: list[int], more: dict[str, Any] | None = None) -> Answer:
    body = {"prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    return asyncio.run(ask(server.port, body | (more or {})))


def through_python(llm: LLM, tokens: list[int], json_schema: dict[str, Any] | None = None) -> Answer:
    answer, start = Answer(200), time.perf_counter()
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=json_schema is None, json_schema=json_schema)
    for event in llm.stream(tokens, params):
        if event.token_id is not None:
            answer.times.append(time.perf_counter() - start)
    return answer


def between(answer: Answer, tokens: int) -> float:
    """Seconds from one token to the next; a server's events may hold several."""
    return (answer.times[-1] - answer.first) / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/serving-overhead-DATE.json")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"kind": "serving-overhead", **machine.description()}
    document |= {"model": arguments.model.stem, "threads": arguments.threads}
    vocab = open_checkpoint(arguments.model).config.vocab_size
    command = ours(arguments.model, arguments.threads, 1, CONTEXT)
    llm = LLM(arguments.model, threads=arguments.threads, max_batch=1, context=CONTEXT, gpu="none")
    with llm, running("powerinfer", command) as server:
        rounds: dict[str, list[Answer]] = {"server": [], "python": []}
        for number in range(arguments.repeat + 2):
            tokens = prompt(number, PROMPT, vocab)
            rounds["server"].append(through_server(server, tokens))
            rounds["python"].append(through_python(llm, tokens))
        kept = {label: answers[2:] for label, answers in rounds.items()}  # the first two warm up
        document["first_token_ms"] = {
            label: 1000 * median(one.first for one in answers) for label, answers in kept.items()
        }
        document["between_tokens_ms"] = {
            label: 1000 * median(between(one, TOKENS) for one in answers) for label, answers in kept.items()
        }
        pairs = list(zip(kept["server"], kept["python"], strict=True))
        document["added_first_token_ms"] = 1000 * median(a.first - b.first for a, b in pairs)
        document["added_between_tokens_ms"] = 1000 * median(between(a, TOKENS) - between(b, TOKENS) for a, b in pairs)
        first, again = [], []
        for number in range(arguments.repeat):
            shared = prompt(1000 + number, PREFIX, vocab)
            first.append(through_server(server, shared + prompt(2000 + number, 8, vocab)).first)
            again.append(through_server(server, shared + prompt(3000 + number, 8, vocab)).first)
        document["prefix_first_token_ms"] = [1000 * median(first), 1000 * median(again)]
        document["prefix_ratio"] = median(a / b for a, b in zip(first, again, strict=True))
        masked, free = [], []
        for number in range(arguments.repeat + 1):
            tokens = prompt(5000 + number, PROMPT, vocab)
            constrained = through_python(llm, tokens, SCHEMA)
            masked.append(between(constrained, len(constrained.times)))
            free.append(between(through_python(llm, tokens), TOKENS))
        document["mask"] = {
            "free_ms": 1000 * median(free[1:]),
            "masked_ms": 1000 * median(masked[1:]),
            "cost": median(a / b for a, b in zip(masked[1:], free[1:], strict=True)) - 1,
        }
    print(
        {name: document[name] for name in document if "ms" in name or name in ("prefix_ratio", "mask")}, file=sys.stderr
    )
    results.write_json(arguments.out or results.path_of(document), document)


if __name__ == "__main__":
    main()
