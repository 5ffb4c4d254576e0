"""Measure decoding with drafts beside decoding without, and llama.cpp's own ways of it.

    python -m benchmarks.speed.speculation [--coder FILE --draft FILE --peer FOLDER_OF_BINARIES] [--heads FILE...]

Cases: a real model that edits code, with prompt lookup and with a smaller model (--coder, --draft: GGUF files of one
family; left out without them), and on prose, where lookup finds little; random models with a draft head (--heads; see
models/draft_head.py), whose drafts are replaced by such that are right in a given share of places, so that they cost
what a head costs. Each engine answers once a round, in an order that rotates; answers must be the same, token by token.

Of llama.cpp's binaries llama-completion decodes the same prompt plainly, llama-lookup with drafts.

Writes one JSON, after each case; `python -m benchmarks.speed.speculation_table` turns it into docs/speculation.md's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.lib import machine, results
from powerinfer import LLM, Completion, SamplingParams
from powerinfer.runtime.request import AnswerRequest, Request
from powerinfer.runtime.speculation import DraftSource, Outlook, Speculation

EDIT = (
    "Rename the class LookupDrafts to PromptLookup and the method outlook to prospect in this file. Print the whole "
    "file again, nothing else.\n```python\n{}\n```"
)
PROSE = "Tell a story of a lighthouse keeper who finds a letter in a bottle. Make it long, and let nothing repeat."
FILE = machine.ROOT / "src/powerinfer/runtime/lookup.py"
CHARACTERS = 2000  # of the file that is edited
RATES = re.compile(r"(?:(?<!prompt )eval time =.*?|decoded +\d+ tokens in .*?: +)([\d.]+) t(?:okens per second|/s)")


class RatedDrafts:
    """A source that drafts as another one does, at its cost, and is right in a given share of places."""

    def __init__(self, source: DraftSource, right: float, most: int, vocab: int, seed: int = 1) -> None:
        self._source, self._right, self._most, self._vocab = source, right, most, vocab
        self._random = Random(seed)
        self.name = source.name
        self.answer: list[int] = []  # the prompt and what follows it

    def outlook(self, request: AnswerRequest) -> Outlook:
        outlook = self._source.outlook(request)
        return outlook._replace(most=min(outlook.most, self._most))

    def prepare(self, requests: Sequence[AnswerRequest]) -> int:
        return self._source.prepare(requests)

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        self._source.draft(wanted)
        return [self._for(len(request.tokens), count) for request, count in wanted]

    def _for(self, at: int, count: int) -> list[int]:
        following = self.answer[at : at + count]
        wrong = [(token + 1 + self._random.randrange(self._vocab - 1)) % self._vocab for token in following]
        pairs = zip(following, wrong, strict=True)
        return [token if self._random.random() < self._right else other for token, other in pairs]

    def observe(self, parts: Sequence[tuple[Request, int, int]]) -> None:
        self._source.observe(parts)

    def forget(self, request: AnswerRequest) -> None:
        self._source.forget(request)

    def close(self) -> None:
        self._source.close()


class Way:
    """A way for a model to answer: with drafts, or without. Several of one model share its memory, so that they differ
    in nothing else."""

    def __init__(self, llm: LLM, speculation: Speculation | None) -> None:
        self.llm, self.speculation = llm, speculation

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        self.take_over()
        return self.llm.generate([prompt], params)[0]

    def take_over(self) -> None:
        self.llm._runner._driver._speculation = self.speculation


def as_loaded(llm: LLM) -> Way:
    return Way(llm, llm._runner._driver._speculation)


def rated(llm: LLM, right: float, most: int) -> Way:
    """A way in which a model's drafts are right in a given share of places."""
    loaded = llm._runner._driver._speculation
    assert loaded is not None
    source = RatedDrafts(loaded.source, right, most, llm.config.vocab_size)
    return Way(llm, Speculation(source, alone=loaded._alone))


def peer_rate(command: Sequence[str]) -> float:
    """Tokens per second that a program of llama.cpp reports for its decoding. RuntimeError if it reports none."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    found = RATES.findall(done.stdout + done.stderr)
    if done.returncode or not found:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout)[-300:]}")
    return float(found[-1])


def peer_commands(folder: Path, model: Path, prompt: str, tokens: int, threads: int) -> dict[str, list[str]]:
    common = ["-m", str(model), "-p", prompt, "-n", str(tokens), "-t", str(threads), "--temp", "0", "--perf"]
    plain = [str(folder / "llama-completion"), *common, "-no-cnv", "--no-display-prompt", "--ignore-eos"]
    return {
        "llama.cpp": plain,
        "llama.cpp lookup": [str(folder / "llama-lookup"), *common, "--spec-draft-n-max", "7"],
    }


def measure(
    ways: dict[str, Way],
    prompt: Sequence[int],
    arguments: argparse.Namespace,
    others: dict[str, Callable[[], float]],
) -> dict[str, Any]:
    """Rates of each engine, in rounds; the first, which is not counted, gives the answer that all must give."""
    params = SamplingParams(temperature=0.0, max_tokens=arguments.gen_tokens, ignore_eos=True)
    answer = ways["off"].answer(prompt, params).token_ids
    for way in ways.values():
        if way.speculation is not None and isinstance(way.speculation.source, RatedDrafts):
            way.speculation.source.answer = [*prompt, *answer]
    rates: dict[str, list[float]] = {name: [] for name in (*ways, *others)}
    drafts: dict[str, tuple[int, int]] = {}
    for number in range(arguments.rounds + 1):
        names = list(rates)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in others:
                rate = others[name]()
            else:
                machine.wait_until_quiet(arguments.quiet)
                one = ways[name].answer(prompt, params)
                if one.token_ids != answer:
                    raise RuntimeError(f"{name}: another answer than without drafts")
                rate = one.timings.decode_tok_s or 0.0
                drafts[name] = one.drafted, one.accepted
            if number:
                rates[name].append(rate)
    ratios = {
        name: median(rate / plain for rate, plain in zip(rates[name], rates["off"], strict=True)) for name in rates
    }
    stats = {name: way.speculation.stats() for name, way in ways.items() if way.speculation is not None}
    return {
        "tok_s": rates,
        "median": {name: median(values) for name, values in rates.items()},
        "ratio": ratios,
        "drafts": {name: list(pair) for name, pair in drafts.items() if name != "off"},
        "tokens_per_step": {name: one.tokens / one.steps for name, one in stats.items() if one.steps},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, nargs="+", default=(), metavar="FILE", help="models with draft heads")
    parser.add_argument("--coder", type=Path, metavar="FILE", help="a model that can edit code")
    parser.add_argument("--draft", type=Path, metavar="FILE", help="a smaller one of its family")
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="llama.cpp's binaries")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gen-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds to wait for a quiet machine, at most")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/speculation-DATE.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    document: dict[str, Any] = {"kind": "speculation", **machine.description(), "speculation": []}
    for name in ("threads", "gen_tokens", "rounds"):
        document[name] = getattr(arguments, name)
    out = arguments.out or results.path_of(document)
    for case in arguments.cases:
        for entry in CASES[case](arguments):
            document["speculation"].append(entry)
            results.write_json(out, document)


def of_text(name: str, text: str, ways: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """A case of the real model."""
    options: dict[str, Any] = {"threads": arguments.threads, "context": 4096, "gpu": "none"}
    llms = {"off": LLM(arguments.coder, speculate="off", **options)}
    llms |= {way: LLM(arguments.coder, speculate=way, **options) for way in ways if way == "lookup"}
    if "model" in ways and arguments.draft:
        llms["model"] = LLM(arguments.coder, speculate=str(arguments.draft), **options)
    prompt = llms["off"].encode_chat([{"role": "user", "content": text}])
    others: dict[str, Callable[[], float]] = {}
    if arguments.peer:
        said = llms["off"].tokenizer.decode(prompt, skip_special=False)
        for label, command in peer_commands(
            arguments.peer, arguments.coder, said, arguments.gen_tokens, arguments.threads
        ).items():
            others[label] = lambda command=command: peer_rate(command)  # type: ignore[misc]
    try:
        ways_of = {way: as_loaded(llm) for way, llm in llms.items()}
        return {"case": name, "model": arguments.coder.stem} | measure(ways_of, prompt, arguments, others)
    finally:
        for llm in llms.values():
            llm.close()


def of_head(model: Path, shares: Sequence[float], most: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A case of a random model with a head."""
    options: dict[str, Any] = {"threads": arguments.threads, "context": 1024, "gpu": "none"}
    with LLM(model, speculate="mtp", **options) as llm:
        loaded = as_loaded(llm)
        ways = {"off": Way(llm, None)} | {f"{100 * share:.0f} % right": rated(llm, share, most) for share in shares}
        prompt = [(7919 * i + 13) % llm.config.vocab_size for i in range(32)]
        about = {"case": "a head", "model": model.stem, "most": most, "selector": str(llm.choices["selector"])}
        try:
            return about | measure(ways, prompt, arguments, {})
        finally:
            loaded.take_over()


def edit(arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    if arguments.coder:
        text = EDIT.format(FILE.read_text()[:CHARACTERS])
        yield of_text("editing code", text, ("lookup", "model"), arguments)


def prose(arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    if arguments.coder:
        yield of_text("prose", PROSE, ("lookup",), arguments)


def head(arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for model in arguments.heads:
        yield of_head(model, (0.75, 0.0), 2, arguments)


CASES = {"edit": edit, "prose": prose, "head": head}

if __name__ == "__main__":
    main()
