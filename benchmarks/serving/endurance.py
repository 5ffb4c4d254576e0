"""Whether the server stays well: more clients than it has room for, clients that leave, schemas of a public suite.

    python -m benchmarks.serving.endurance MODEL.gguf [--minutes 10] [--leaving 1000] [--suite FOLDER]

* 64 clients against a batch of 8 and a queue of 16, for some minutes: every answer is right or a 429 or 503 with
  Retry-After, and memory does not grow.
* Clients that leave at random times, before, during and after the prompt: afterwards no request runs or waits and every
  page of the KV cache is free or in the prefix cache.
* Answers to the schemas of JSON-Schema-Test-Suite (`tests/` of its repository, or of the sdist of jsonschema): each
  answer that ends by itself is checked by jsonschema, by the rules of draft 2020-12 where a schema states no draft.
  What the engine refuses is counted apart.

Writes one JSON; serving.table turns the newest into the table of docs/serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, results
from benchmarks.serving.servers import Answer, Server, ask, ours, prompt, running
from powerinfer.formats.checkpoint import open_checkpoint

CLIENTS, BATCH, QUEUE, TOKENS = 64, 8, 16, 48
CONTEXT = 2048
LENGTHS = (8, 200, 900)  # of the prompts of clients that leave
DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")


def body(tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True} | more


async def crowd(server: Server, seconds: float, vocab: int) -> dict[str, Any]:
    """What the clients got, and the memory of the server now and then."""
    statuses: collections.Counter[int] = collections.Counter()
    memory: list[float] = []
    prompts = [prompt(one, 24, vocab) for one in range(16)]
    right = ["".join((await ask(server.port, body(one))).texts) for one in prompts]
    wrong = 0
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        nonlocal wrong
        chosen = random.Random(number)
        while time.monotonic() < end:
            which = chosen.randrange(len(prompts))
            answer = await ask(server.port, body(prompts[which]))
            statuses[answer.status] += 1
            if answer.status == 200:
                wrong += "".join(answer.texts) != right[which]
            else:
                await asyncio.sleep(chosen.uniform(0.05, 0.5))

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(10.0, seconds / 10))
            memory.append(round(server.resident_mib, 1))

    await asyncio.gather(watch(), *(client(one) for one in range(CLIENTS)))
    return {"seconds": seconds, "statuses": dict(statuses), "wrong": wrong, "resident_mib": memory}


async def leavers(server: Server, count: int, vocab: int) -> dict[str, Any]:
    """Clients that leave at random times, 16 at a time; then what the engine holds."""
    chosen = random.Random(7)
    statuses: collections.Counter[int] = collections.Counter()
    before = server.get("/v1/engine")["stats"]

    async def one(number: int) -> None:
        tokens = prompt(10_000 + number, chosen.choice(LENGTHS), vocab)
        request = ask(
            server.port, body(tokens, max_tokens=min(400, CONTEXT - len(tokens))), leave=chosen.choice((None, 1, 3, 20))
        )
        try:
            statuses[(await asyncio.wait_for(request, chosen.choice((0.05, 0.5, 4.0)) * chosen.random())).status] += 1
        except TimeoutError:
            statuses[-1] += 1

    for first in range(0, count, 16):
        await asyncio.gather(*(one(number) for number in range(first, min(first + 16, count))))
    end = time.monotonic() + 30
    after = server.get("/v1/engine")["stats"]
    while time.monotonic() < end and (after["running"] or after["waiting"]):
        await asyncio.sleep(0.2)
        after = server.get("/v1/engine")["stats"]
    again = await ask(server.port, body(prompt(0, 24, vocab)))
    return {"clients": count, "statuses": dict(statuses), "before": before, "after": after, "answers": again.status}


def schemas(suite: Path) -> list[dict[str, Any]]:
    """Those of all groups of tests, but for true and false."""
    files = [path for draft in DRAFTS for path in sorted((suite / draft).glob("*.json"))]
    every = [group["schema"] for path in files for group in json.loads(path.read_text())]
    return [schema for schema in every if isinstance(schema, dict)]


async def structured(server: Server, suite: Path, limit: int) -> dict[str, Any]:
    """Answers to the suite's schemas."""
    import jsonschema

    counts: collections.Counter[str] = collections.Counter()
    examples: dict[str, Any] = {}
    every = schemas(suite)
    random.Random(3).shuffle(every)
    for schema in every[:limit]:
        request = {
            "messages": [{"role": "user", "content": "Answer."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            "max_tokens": 300, "stream": True, "temperature": 1.0, "seed": 5,
        }  # fmt: skip
        answer = await _chat(server, request)
        if answer.status != 200:
            verdict = f"refused ({answer.status})"
        elif answer.tokens >= 300:
            verdict = "cut off"
        else:
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            try:
                errors = list(kind(schema).iter_errors(json.loads("".join(answer.texts))))
                verdict = "valid" if not errors else "invalid"
            except ValueError:
                verdict = "invalid"
        counts[verdict] += 1
        if verdict not in ("valid", "cut off"):
            examples.setdefault(verdict, []).append({"schema": schema, "answer": "".join(answer.texts)[:300]})
    return {"schemas": sum(counts.values()), "verdicts": dict(counts), "invalid": examples.get("invalid", [])[:20]}


async def _chat(server: Server, request: dict[str, Any]) -> Answer:
    """A chat's stream, as `ask` gives one of completions."""
    request |= {"stream": False}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 22)
    data = json.dumps(request).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    raw = await reader.read()
    writer.close()
    head_bytes, _, content = raw.partition(b"\r\n\r\n")
    answer = Answer(int(head_bytes.split()[1]))
    if answer.status == 200:
        document = json.loads(content)
        answer.texts = [document["choices"][0]["message"]["content"] or ""]
        answer.tokens = document["usage"]["completion_tokens"]
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--leaving", type=int, default=1000)
    parser.add_argument("--suite", type=Path, help="folder `tests` of JSON-Schema-Test-Suite")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/serving-endurance-DATE.json")
    arguments = parser.parse_args()
    vocab = open_checkpoint(arguments.model).config.vocab_size
    document: dict[str, Any] = {"kind": "serving-endurance", **machine.description(), "model": arguments.model.stem}
    command = ours(arguments.model, arguments.threads, BATCH, CONTEXT, "--max-queue", str(QUEUE))
    with running("powerinfer", command) as server:
        if arguments.leaving:
            document["leaving"] = asyncio.run(leavers(server, arguments.leaving, vocab))
            print(document["leaving"], file=sys.stderr)
        if arguments.suite:
            document["schemas"] = asyncio.run(structured(server, arguments.suite, arguments.schemas))
            print(document["schemas"]["verdicts"], file=sys.stderr)
        if arguments.minutes:
            document["crowd"] = asyncio.run(crowd(server, 60 * arguments.minutes, vocab))
            print(document["crowd"], file=sys.stderr)
    results.write_json(arguments.out or results.path_of(document), document)


if __name__ == "__main__":
    main()
