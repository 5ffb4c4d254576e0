"""The part of a decode step that is spent outside the native module.

    python -m benchmarks.speed.python_share MODEL [--threads N] [--tokens 128]      prints one JSON document

Every call into the native program is timed from Python, so the crossing counts as native; all the rest, from the
request to the text (scheduling, sampling, detokenising), is Python's share. Greedy, one request.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from powerinfer import LLM, SamplingParams


class Timed:
    """A native program whose `run` calls are timed."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def run(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        whole = self._program.run(*arguments)
        self.seconds += time.perf_counter() - start
        return whole


def measure(model: Path, threads: int, tokens: int, repeat: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    shares, steps = [], []
    with LLM(model, threads=threads, context=1024, prefix_cache=False) as llm:
        timed = Timed(llm._executor._program)
        llm._executor._program = timed
        for _ in range(repeat + 1):
            before, start = timed.seconds, time.perf_counter()
            llm.generate([[1]], params)
            wall = time.perf_counter() - start
            shares.append(1 - (timed.seconds - before) / wall)
            steps.append(1000 * wall / tokens)
    return {"python_share": median(shares[1:]), "step_ms": median(steps[1:]), "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.model, arguments.threads, arguments.tokens, arguments.repeat)))


if __name__ == "__main__":
    main()
