"""One model dense and sparse in turn: the speed of both, what they read, and whether they say the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from powerinfer.errors import RequestError
from powerinfer.progress import silent
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import Completion
from powerinfer.system import Disturbance

if TYPE_CHECKING:
    from powerinfer.runtime.engine import LLM

Side = Literal["dense", "sparse"]
SIDES: tuple[Side, Side] = ("dense", "sparse")
Watch = Callable[[Side, int], object]
"""Called with the side and the number of its tokens so far, in the middle of an answer."""


@dataclass
class Run:
    """One side. tok_s: decoded tokens a second of each round; bytes_per_token: of weights, None: unknown; answer: that
    of the last round."""

    tok_s: list[float] = field(default_factory=list)
    bytes_per_token: int | None = None
    answer: Completion | None = None

    @property
    def median(self) -> float:
        """Tokens a second, the median of the rounds."""
        return median(self.tok_s)

    def document(self) -> dict[str, object]:
        """Run as a JSON document."""
        spread = {"median": self.median, "min": min(self.tok_s), "max": max(self.tok_s)}
        return {"decode_tok_s": spread, "bytes_per_token": self.bytes_per_token}


@dataclass(frozen=True)
class Comparison:
    """Both sides. sparsity: `LLM.sparsity` of the last sparse round; disturbed: cores that other programs took
    meanwhile, 0 if they were few."""

    dense: Run
    sparse: Run
    sparsity: dict[str, Any]
    disturbed: float

    @property
    def computed_fraction(self) -> float:
        """Share of the neurons of all layers that the sparse side computed in full."""
        return float(self.sparsity["computed_fraction"])

    @property
    def ratio(self) -> float:
        """The sparse speed by the dense one: the median of the ratios within a round."""
        return median(sparse / dense for dense, sparse in zip(self.dense.tok_s, self.sparse.tok_s, strict=True))

    @property
    def same_tokens(self) -> tuple[int, int]:
        """(tokens with which both answers begin, tokens of the longer one)."""
        dense, sparse = (run.answer.token_ids if run.answer else [] for run in (self.dense, self.sparse))
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(dense, sparse, strict=False)))
        return same, max(len(dense), len(sparse))

    def document(self) -> dict[str, object]:
        """Comparison as a JSON document."""
        same, longest = self.same_tokens
        return {
            "dense": self.dense.document(),
            "sparse": self.sparse.document(),
            "ratio": self.ratio,
            "computed_fraction": self.computed_fraction,
            "tokens": longest,
            "same_tokens": same,
            "disturbed": self.disturbed,
        }


def refusal_reason(llm: LLM) -> str | None:
    """Reason for which a loaded model cannot be compared; None if it can."""
    sparsity = llm.sparsity
    if sparsity is None:
        return f"every neuron is computed: {llm.choices.get('selector', 'all')}"
    if "gpu_share" in sparsity:
        return "its FFNs are split between a GPU and the CPU; --gpu none leaves all to the CPU"
    return None


def compare(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    rounds: int,
    watch: Watch = silent,
    seconds: float = float("inf"),
) -> Comparison:
    """Answer a prompt densely and sparsely in turn, after a round to warm up. RequestError where that is not possible.

    The order changes from round to round, and so does the seed of params. seconds: after which no further round begins.
    """
    if (reason := refusal_reason(llm)) is not None:
        raise RequestError(f"nothing to compare: {reason}")
    runs: dict[Side, Run] = {side: Run() for side in SIDES}
    sparsity: dict[str, Any] = {}
    begin = time.monotonic()
    with Disturbance() as load:
        for number in range(rounds + 1):
            for side in SIDES if number % 2 else SIDES[::-1]:
                llm.clear_sparsity()
                with llm.every_neuron() if side == "dense" else nullcontext():
                    answer = _answer(llm, prompt, replace(params, seed=(params.seed or 0) + number), side, watch)
                rate = answer.timings.decode_tok_s
                if rate is None:
                    raise RequestError("the answer ended after one token: there is no speed to compare")
                runs[side].answer, runs[side].bytes_per_token = answer, llm.bytes_per_token
                if side == "sparse":
                    sparsity = llm.sparsity or {}
                if number:
                    runs[side].tok_s.append(rate)
            if number and time.monotonic() - begin > seconds:
                break
    return Comparison(runs["dense"], runs["sparse"], sparsity, round(load.cores, 2) if load.disturbed else 0.0)


def _answer(llm: LLM, prompt: Sequence[int], params: SamplingParams, side: Side, watch: Watch) -> Completion:
    tokens = 0
    for event in llm.stream(list(prompt), params):
        tokens += event.token_id is not None
        watch(side, tokens)
        if event.completion is not None:
            return event.completion
    raise AssertionError("a stream ends with a completion")

