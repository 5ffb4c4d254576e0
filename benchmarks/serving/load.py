"""Throughput with many clients, beside llama.cpp's server, in turn, on the same file and number of threads.

    python -m benchmarks.serving.load MODEL.gguf --peer FOLDER_OF_BINARIES [--clients 8 32] [--rounds 3]

Every client sends one request after the other, --requests of them: a prompt of 128 random tokens, 128 tokens of answer,
greedy, streamed. No two prompts are alike, and llama.cpp's cache of prompts is off, so both compute every one. Figures
are medians of the rounds; tokens per second count those of the answers. Writes one JSON; serving.table turns the newest
into the table of docs/serving.md.
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
from benchmarks.lib.programs import peer_facts
from benchmarks.serving.servers import Answer, Server, ask, llama_server, ours, prompt, running
from powerinfer.formats.checkpoint import open_checkpoint

TOKENS = 128
PEER = "llama.cpp"


async def _client(server: Server, number: int, requests: int, vocab: int, seed: int) -> list[Answer]:
    answers = []
    for request in range(requests):
        body: dict[str, Any] = {
            "prompt": prompt(seed + 1000 * number + request, TOKENS, vocab),
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        answers.append(await ask(server.port, body))
    return answers


async def _all(server: Server, clients: int, requests: int, vocab: int, seed: int) -> tuple[float, list[Answer]]:
    start = time.perf_counter()
    every = await asyncio.gather(*(_client(server, one, requests, vocab, seed) for one in range(clients)))
    return time.perf_counter() - start, [answer for answers in every for answer in answers]


def measure(server: Server, clients: int, requests: int, vocab: int, seed: int) -> dict[str, float]:
    """One round on a server that has answered once before."""
    asyncio.run(_all(server, 1, 1, vocab, seed - 1))
    seconds, answers = asyncio.run(_all(server, clients, requests, vocab, seed))
    wrong = [answer.status for answer in answers if answer.status != 200 or answer.tokens != TOKENS]
    if wrong:
        sys.exit(f"{server.label}: {len(wrong)} of {len(answers)} answers are not whole, such as status {wrong[0]}")
    each = [(answer.times[-1] - answer.first) / (TOKENS - 1) for answer in answers]
    return {
        "tok_s": sum(answer.tokens for answer in answers) / seconds,
        "first_token_s": median(answer.first for answer in answers),
        "between_tokens_ms": 1000 * median(each),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, required=True, help="folder of llama.cpp's binaries")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/serving-load-DATE.json")
    arguments = parser.parse_args()
    vocab = open_checkpoint(arguments.model).config.vocab_size
    document: dict[str, Any] = {"kind": "serving-load", **machine.description(), "peer": peer_facts(arguments.peer)}
    document |= {"model": arguments.model.stem, "threads": arguments.threads, "tokens": TOKENS, "load": []}
    context = 2 * TOKENS + 64
    for clients in arguments.clients:
        rounds: dict[str, list[dict[str, float]]] = {"powerinfer": [], PEER: []}
        for number in range(arguments.rounds):
            commands = {
                "powerinfer": ours(arguments.model, arguments.threads, clients, context),
                PEER: llama_server(arguments.peer, arguments.model, arguments.threads, clients, context),
            }
            for label in list(commands)[:: 1 if number % 2 == 0 else -1]:
                with running(label, commands[label]) as server:
                    rounds[label].append(measure(server, clients, arguments.requests, vocab, 100_000 * (number + 1)))
                print(f"{clients} clients, round {number + 1}: {label} {rounds[label][-1]}", file=sys.stderr)
        figures = {
            label: {name: median(one[name] for one in each) for name in each[0]} for label, each in rounds.items()
        }
        ratio = median(a["tok_s"] / b["tok_s"] for a, b in zip(*rounds.values(), strict=True))
        document["load"].append({"clients": clients, "engines": figures, "ratio": ratio, "rounds": rounds})
        results.write_json(arguments.out or results.path_of(document), document)


if __name__ == "__main__":
    main()
