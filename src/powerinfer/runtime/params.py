"""Parameters of sampling: `SamplingParams`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any

from powerinfer.config import documented, option
from powerinfer.errors import RequestError
from powerinfer.runtime.options import SamplingOptions, check_names
from powerinfer.text.grammar import AfterThought, Grammar, LazyGrammar

MAX_TOP_LOGPROBS = 20
MAX_BIAS = 1e6  # far above any logit, and far below the limit of float32


class TextLimit(int):
    """The limit of an answer whose caller gave none: it is for texts that a model continues, not for conversations."""


@documented
@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. Every value is checked here; `RequestError` for an invalid one.

        SamplingParams(temperature=0, max_tokens=64)
        SamplingParams(regex="[0-9]{4}")

    What is not given has the default below, not the model's own, which `LLM.default_params(seed=1)` fills in. Without
    `max_tokens` the answer of a chat ends where the model ends it, or with the context. One of these four at most:

    grammar: what the answer matches: a `Grammar`, or a text in llama.cpp's GBNF.
    json_schema: the answer is JSON that this schema validates: a document, a JSON text or a pydantic model's class.
    regex: the answer matches this regular expression.
    choice: the answer is one of these texts.
    """

    max_tokens: int | None = option(
        TextLimit(128),
        "maximum number of tokens to generate; -1 or none: until the context is full",
        metavar="N",
        flags=("-n",),
        unlimited=-1,
    )
    temperature: float = option(
        0.8, "0: always the most likely token; higher is more random", metavar="T", flags=("--temp",)
    )
    top_k: int = option(40, "sample among the K most likely tokens; 0: all", metavar="K")
    top_p: float = option(0.95, "sample among the most likely tokens that together have this probability", metavar="P")
    min_p: float = option(0.05, "drop tokens less likely than this fraction of the most likely one", metavar="M")
    repetition_penalty: float = option(1.0, "divide the logits of tokens that occurred before; 1: off", metavar="R")
    presence_penalty: float = option(0.0, "subtract this from the logits of tokens already generated", metavar="X")
    frequency_penalty: float = option(0.0, "subtract this for each occurrence of a generated token", metavar="X")
    logit_bias: Mapping[int, float] = option((), "token id -> number added to its logit")
    seed: int | None = option(
        None, "random seed, for reproducible sampling; -1 or none: another one every time", metavar="S", flags=("-s",),
        unlimited=-1,
    )  # fmt: skip
    stop: Sequence[str] = option((), "stop before this text (repeatable)", metavar="TEXT")
    stop_token_ids: Sequence[int] = option((), "stop at this token (repeatable)", metavar="ID")
    ignore_eos: bool = option(False, "do not stop at the model's end-of-text token")
    logprobs: int | None = option(
        None, "return log-probabilities of the chosen token and of the N most likely", metavar="N"
    )
    skip_special_tokens: bool = option(True, "hide special tokens in the text")
    grammar: Grammar | LazyGrammar | AfterThought | str | None = None
    json_schema: InitVar[Any] = None
    regex: InitVar[str | None] = None
    choice: InitVar[Sequence[str] | None] = None

    if not TYPE_CHECKING:

        def __new__(cls, *values, **options):
            """Misspelt names are refused with the nearest one."""
            check_names(options, SamplingOptions.__annotations__, "SamplingParams")
            return super().__new__(cls)

    def __post_init__(self, json_schema: Any, regex: str | None, choice: Sequence[str] | None) -> None:
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
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError("stop must be one or more non-empty texts")
        stop_token_ids = _tuple("stop_token_ids", self.stop_token_ids)
        for token in stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        object.__setattr__(self, "grammar", _single_grammar(self.grammar, json_schema, regex, choice))
        # frozen copies: changing the caller's list or dict later does not affect a running request
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias or {}))

    @property
    def rules(self) -> Grammar | LazyGrammar | AfterThought | None:
        """`grammar` as it was read."""
        assert not isinstance(self.grammar, str)
        return self.grammar


def chat_params(params: SamplingParams) -> SamplingParams:
    """`params` for the answer of a conversation: without a limit that the caller did not give."""
    return replace(params, max_tokens=None) if isinstance(params.max_tokens, TextLimit) else params


def check_params(params: object) -> None:
    """RequestError for params of another type; None is fine."""
    if isinstance(params, Mapping):
        kind = type(params).__name__
        raise RequestError(f"params must be a SamplingParams, not {kind}: SamplingParams(max_tokens=5)")
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params must be a SamplingParams, not {reprlib.repr(params)}")


def check_each(params: object, count: int) -> None:
    """RequestError unless there is a SamplingParams for each of `count` prompts."""
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise RequestError(f"params must be a SamplingParams or a list of them, not {reprlib.repr(params)}")
    if len(params) != count:
        raise RequestError(f"{count} prompts came with {len(params)} SamplingParams: give one, or one for each")
    for one in params:
        check_params(one)


def _single_grammar(
    grammar: Any, json_schema: Any, regex: str | None, choice: Sequence[str] | None
) -> Grammar | LazyGrammar | AfterThought | None:
    constraints = [value for value in (grammar, json_schema, regex, choice) if value is not None]
    if len(constraints) > 1:
        raise RequestError("give one of grammar, json_schema, regex and choice")
    if json_schema is not None:
        return Grammar.json_schema(json_schema)
    if regex is not None:
        return Grammar.regex(regex)
    if choice is not None:
        return Grammar.choice(choice)
    if isinstance(grammar, str):
        return Grammar.gbnf(grammar)
    if not isinstance(grammar, Grammar | LazyGrammar | AfterThought | None):
        raise RequestError(f"grammar must be a Grammar or a text in GBNF, not {type(grammar).__name__}")
    return grammar


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, Iterable | None):
        raise RequestError(f"{name} must be a list, not {values!r}")
    return tuple(values or ())


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {span}, not {value!r}")


def _check_float(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        lower = f"above {low:g}" if open_low else f"at least {low:g}"
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} must be a number {lower}{upper}, not {value!r}")


def _checked_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Token ids may be text, as in JSON keys. -inf forbids a token."""
    try:
        checked = {int(token): float(value) for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError):
        raise RequestError("logit_bias must map token ids to numbers") from None
    if any(token < 0 or not (abs(value) <= MAX_BIAS or value == -math.inf) for token, value in checked.items()):
        raise RequestError(f"logit_bias must map token ids to numbers of at most {MAX_BIAS:g}; -inf forbids a token")
    return checked
