"""Sampling parameters, completions and stream events, and the state of a request (`Request`)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from powerinfer.config import option
from powerinfer.errors import PowerInferError, RequestError

if TYPE_CHECKING:
    from powerinfer.runtime.sampling import Sampler
    from powerinfer.runtime.text import TextStream

MAX_TOP_LOGPROBS = 20
MAX_BIAS = 1e6  # far above any logit, and far below the limit of float32


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. Every value is checked here; `RequestError` for an invalid one."""

    max_tokens: int | None = option(
        128, "maximum number of tokens to generate; none: until the context is full", metavar="N"
    )
    temperature: float = option(0.8, "0: always the most likely token; higher is more random", metavar="T")
    top_k: int = option(40, "sample among the K most likely tokens; 0: all", metavar="K")
    top_p: float = option(0.95, "sample among the most likely tokens that together have this probability", metavar="P")
    min_p: float = option(0.05, "drop tokens less likely than this fraction of the most likely one", metavar="M")
    repetition_penalty: float = option(1.0, "divide the logits of tokens that occurred before; 1: off", metavar="R")
    presence_penalty: float = option(0.0, "subtract this from the logits of tokens already generated", metavar="X")
    frequency_penalty: float = option(0.0, "subtract this for each occurrence of a generated token", metavar="X")
    logit_bias: Mapping[int, float] = option((), "token id -> number added to its logit")
    seed: int | None = option(None, "random seed, for reproducible sampling", metavar="S")
    stop: Sequence[str] = option((), "stop before this text (repeatable)", metavar="TEXT")
    stop_token_ids: Sequence[int] = option((), "stop at this token (repeatable)", metavar="ID")
    ignore_eos: bool = option(False, "do not stop at the model's end-of-text token")
    logprobs: int | None = option(
        None, "return log-probabilities of the chosen token and of the N most likely", metavar="N"
    )

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_int("top_k", self.top_k, -1)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError("stop must be one or more non-empty texts")
        stop_token_ids = tuple(self.stop_token_ids or ())
        for token in stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        # frozen copies: changing the caller's list or dict later does not affect a running request
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias or {}))


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {span}, not {value!r}")


def _check_float(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        least = f"above {low:g}" if open_low else f"at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} must be a number {least}{most}, not {value!r}")


def _checked_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Token ids may be text, as in JSON keys. -inf forbids a token."""
    try:
        checked = {int(token): float(value) for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError):
        raise RequestError("logit_bias must map token ids to numbers") from None
    if any(token < 0 or not (abs(value) <= MAX_BIAS or value == -math.inf) for token, value in checked.items()):
        raise RequestError(f"logit_bias must map token ids to numbers of at most {MAX_BIAS:g}; -inf forbids a token")
    return checked


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities under the model itself: before bias, penalties and temperature."""

    logprob: float  # of the chosen token
    top: tuple[tuple[int, float], ...]  # (token id, logprob) of the most likely tokens, best first


@dataclass(frozen=True)
class Timings:
    """Times in seconds and rates of one request; None if not measured."""

    load_s: float  # loading the model, once for the engine
    ttft_s: float | None  # from submission to the first token
    prefill_tok_s: float | None  # prompt tokens computed per second, without cached ones
    decode_tok_s: float | None  # tokens after the first per second

    def as_dict(self) -> dict[str, float | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Completion:
    """The answer to one request."""

    text: str
    token_ids: list[int]  # as generated, including a token that ended the answer
    finish_reason: str  # "stop", "length" or "abort"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens taken from the prefix cache
    timings: Timings
    logprobs: list[TokenLogprobs] | None = None  # one per token id, if requested


class StreamEvent(NamedTuple):
    """One generated token. The last event of a stream has a finish_reason and the whole completion."""

    text: str  # new final text; may be empty (half a character, the start of a stop string)
    token_id: int | None  # None in an event that only ends an aborted stream
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    completion: Completion | None = None


class Request:
    """The state of a request. The scheduler owns the second group of fields, the runner the third."""

    __slots__ = (
        "cached",
        "completion",
        "computed",
        "error",
        "events",
        "first_token_time",
        "keys",
        "last_token_time",
        "logprobs",
        "max_new",
        "n_prompt",
        "on_end",
        "pages",
        "params",
        "pieces",
        "published",
        "row",
        "sampler",
        "start_time",
        "stop_ids",
        "submit_time",
        "text",
        "tokens",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_new: int,
        sampler: Sampler,
        text: TextStream,
        stop_ids: frozenset[int],
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.params = params
        self.tokens = list(prompt)  # the prompt, then what was generated
        self.n_prompt = len(self.tokens)
        self.max_new = max_new
        self.sampler = sampler
        self.text = text
        self.stop_ids = stop_ids

        self.computed = 0  # tokens whose keys and values are in `pages`
        self.cached = 0  # prompt tokens found in the prefix cache at the first admission
        self.pages: list[int] = []
        self.keys: list[bytes] = []  # keys of the pages that `tokens` fills
        self.published = 0  # leading pages that are in the prefix cache
        self.row = -1  # row of the page table while it runs

        self.events: deque[StreamEvent] | None = None  # not yet read by a stream; None: not a stream
        self.on_end = on_end
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.completion: Completion | None = None  # set when it has ended, unless it failed:
        self.error: PowerInferError | None = None
        self.submit_time = time.perf_counter()
        self.start_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    @property
    def ended(self) -> bool:
        return self.completion is not None or self.error is not None

    def complete(self, reason: str, load_s: float) -> Completion:
        """End it: set and return the completion."""
        generated = self.tokens[self.n_prompt :]
        self.completion = Completion(
            text="".join(self.pieces),
            token_ids=generated,
            finish_reason=reason,
            prompt_tokens=self.n_prompt,
            completion_tokens=len(generated),
            cached_tokens=self.cached,
            timings=self._timings(len(generated), load_s),
            logprobs=None if self.params.logprobs is None else self.logprobs,
        )
        return self.completion

    def _timings(self, generated: int, load_s: float) -> Timings:
        first, last, start = self.first_token_time, self.last_token_time, self.start_time
        if first is None or last is None or start is None:
            return Timings(load_s, None, None, None)
        return Timings(
            load_s=load_s,
            ttft_s=first - self.submit_time,
            prefill_tok_s=_rate(self.n_prompt - self.cached, first - start),
            decode_tok_s=_rate(generated - 1, last - first),
        )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
