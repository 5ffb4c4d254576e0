"""Sampling the next token, in numpy.

The steps and their order are those of Hugging Face `generate` (and vLLM), not of llama.cpp, which applies the
temperature last:

1. `logit_bias` is added (as OpenAI and vLLM do).
2. Penalties. `repetition_penalty` (CTRL, arXiv 1909.05858; Hugging Face, vLLM): logits of tokens in the prompt or the
   answer are divided by it when positive and multiplied when negative. `frequency_penalty` times the count and
   `presence_penalty` once are subtracted from the logits of tokens in the answer (OpenAI, vLLM; the prompt does not
   count).
3. Temperature 0 selects the largest logit. Otherwise logits are divided by the temperature, then
4. `top_k` keeps the k largest (exactly k: of equal ones the lowest ids),
5. `top_p` keeps the fewest of these, largest first, that hold at least this share of their probability,
6. `min_p` drops those less likely than `min_p` times the most likely,

and one of the rest is drawn. If a `TokenMask` forbids it, the tokens that the mask forbids are removed between 2 and 3,
and another one is drawn: without 4 to 6, with the probabilities of the allowed tokens. Each request has its own random
generator, so its tokens do not depend on other requests. The whole vocabulary is never sorted: where 4 to 6 leave some
of the most likely tokens, these are enough, and a device may bring them alone (`Sampler.draw`). The native module draws
from these, in place of what is here, wherever the token is certain to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from powerinfer.devices.batch import NOT_FINITE, LogitsNeed
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.kernels.candidates import ERROR, HOTTEST, LIKELIEST, MOST, Draw, drawn_token
from powerinfer.runtime.params import SamplingParams

if TYPE_CHECKING:  # importing numpy.typing takes milliseconds
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]
    Float64 = NDArray[np.float64]
    Ids = NDArray[np.intp]

GREEDY_BELOW = 1e-5  # a temperature below this is greedy: the quotient would overflow
MAX_FACTOR = 1e20  # of a logit: beyond it, and below its inverse, a float32 has no room for the product
_MISSED = 0.25  # share of a request's tokens for which candidates may not suffice, before it takes all logits
_RARELY = 1 / 64  # the same, before no step is launched ahead of its tokens: one that is void costs a step
_FEW = 32  # below this part of the vocabulary the logits of the allowed tokens are gathered
_COLUMNS = 1024  # the vocabulary is cut into this many interleaved parts to bound the k-th largest logit


class TokenLogprob(NamedTuple):
    """A token and its log-probability under the model itself: before bias, penalties and temperature.

    token_id: the token.
    logprob: the natural logarithm of its probability.
    bytes: of the token alone, which may be a part of a character.
    top: of a token of an answer the most likely ones in its place, best first.
    """

    token_id: int
    logprob: float
    bytes: bytes
    top: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The token's text; bytes that are no character on their own become U+FFFD."""
        return self.bytes.decode("utf-8", "replace")


class TokenMask(Protocol):
    """Mask of the tokens that may follow in one answer, by a grammar. Called on the driver's thread: be fast."""

    def allows(self, token: int) -> bool:
        """Whether a token may follow: asked first, because nearly all tokens that models want are allowed."""
        ...

    def allowed(self) -> NDArray[np.uint32] | None:
        """uint32 [ceil(vocab / 32)]: token t may follow if bit t % 32 of word t // 32 is set; None: all may."""
        ...

    def accept(self, token: int) -> bool:
        """The token was sampled. True: it ends the answer."""
        ...


class Sampler:
    """Samples the tokens of one request; remembers them, for the penalties.

    `prompt` counts as seen for `repetition_penalty`. Logits are float32 [vocab] and are not changed. `scratch`,
    float32 [2, vocab], may be shared by samplers that are not used at the same time. A token that `mask` forbids is
    never sampled; PowerInferError if the mask fails or forbids every token.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int] = (),
        scratch: Float32 | None = None,
        mask: TokenMask | None = None,
    ) -> None:
        beyond = [token for token in params.logit_bias if token >= vocab_size]
        if beyond:
            raise RequestError(f"logit_bias has token {beyond[0]}, but the model has {vocab_size} tokens")
        if scratch is None:
            scratch = np.empty((2, vocab_size), np.float32)
        self._params = params
        self._edited, self._scratch = scratch
        self._mask = mask
        if mask is not None:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            self._penalties = np.where(bits, np.float32(0), np.float32(-np.inf))  # [256, 8]
        self._edits = _Edits(params, prompt, self._edited) if _has_edits(params) else None
        self._greedy = params.temperature < GREEDY_BELOW
        self._limited = 0 < params.top_k < vocab_size
        self._uniform: Callable[[], float] = float
        if not self._greedy:
            from random import Random  # its numbers are the same on every platform and version

            self._uniform = Random(params.seed).random
        self._ahead: float | None = None  # the next number, where it was asked for before the token is drawn
        temperature, top_k = 0.0 if self._greedy else params.temperature, params.top_k if self._limited else 0
        self._draws = temperature, top_k, params.top_p, params.min_p
        self.inverse_temperature = 1.0 if self._greedy else 1.0 / params.temperature
        self._needs = self._least_needs()
        self._drawn = self._missed = 0  # tokens, and those for which candidates did not suffice

    def _least_needs(self) -> LogitsNeed:
        params = self._params
        if self._edits is not None or self._mask is not None:
            return LogitsNeed.LOGITS
        if self._greedy:
            return LogitsNeed.LARGEST
        few = params.top_k <= LIKELIEST if self._limited else params.top_p < 1.0 or params.min_p > 0.0
        return LogitsNeed.CANDIDATES if few and params.temperature <= HOTTEST else LogitsNeed.LOGITS

    @property
    def needs(self) -> LogitsNeed:
        """Need for the next row of logits."""
        return LogitsNeed.LOGITS if self._missed > 1 + _MISSED * self._drawn else self._needs

    @property
    def steady(self) -> bool:
        """Whether candidates suffice for nearly all tokens."""
        return self._missed <= _RARELY * self._drawn

    def next_draw(self) -> Draw:
        """The draw of the next token, where another one draws it, whose token `take` gets; until then it is the same.
        Of samplers that need candidates at most."""
        if self._ahead is None:
            self._ahead = self._uniform()
        return *self._draws, self._ahead

    def take(self, token: int) -> int:
        """The next token, of the largest logit or as of `next_draw`, or a number of `NOT_FINITE`. Of samplers that need
        candidates at most."""
        if token < 0:
            self._refuse(NOT_FINITE[token])
        self._ahead = None
        self._drawn += 1
        return token

    def draw(self, candidates: Any) -> int | None:
        """The next token, the same as by all logits; None: it takes these. candidates: a record of
        `candidates.CANDIDATES`. Of samplers that need no other."""
        certain = drawn_token(candidates, self.next_draw())
        if certain >= 0:
            return self.take(certain)
        token = self._draw_candidates(candidates)
        self._drawn += 1
        self._missed += token is None
        return token

    def _draw_candidates(self, candidates: Any) -> int | None:
        """`draw` by numpy, as from all logits."""
        token = None
        if candidates["count"] <= MOST:
            values, ids = candidates["values"][: candidates["count"]], candidates["ids"][: candidates["count"]]
            self._check(float(values.max()))
            order = np.lexsort((ids, -values))[:LIKELIEST]
            token = self._draw_sorted(ids[order], values[order], float(candidates["total"]))
        return token

    def _draw_sorted(self, ids: Ids, logits: Float32, total: float) -> int | None:
        """`draw` from candidates, most likely first."""
        if self._greedy:
            return int(ids[0])
        if self._limited:
            return self._draw_limited(ids[: self._params.top_k], logits[: self._params.top_k])
        if not 1 - ERROR <= total < np.inf:  # of no logits that a model has
            return None
        return self._draw_likeliest(ids, logits, (1 - 2 * ERROR) * total, (1 + 2 * ERROR) * total)

    def sample(self, logits: Float32) -> int:
        """The next token."""
        edits = self._edits
        if edits is not None:
            logits = edits.apply(logits)
        token = self._choose(logits)
        if self._mask is not None and not self._allows(token, self._mask):
            logits, ids = self._masked(logits, self._mask)
            token = self._choose(logits)
            if ids is not None:
                token = int(ids[token])
        if edits is not None:
            edits.count(token)
        return token

    def _choose(self, logits: Float32) -> int:
        if not self._greedy:
            return self._draw(logits)
        token = int(logits.argmax())
        self._check(float(logits[token]))
        return token

    def _check(self, highest: float) -> None:
        if not -np.inf < highest < np.inf:
            self._refuse(highest)

    def _refuse(self, highest: float) -> None:
        if highest == -np.inf and self._edits is not None:
            raise RequestError("logit_bias forbids every token that could follow")
        raise PowerInferError(f"the model computed {highest} instead of a logit: its weights may be damaged")

    def ends_with(self, token: int) -> bool:
        """Tell the mask the token that was sampled; whether the answer must end with it."""
        if self._mask is None:
            return False
        with _blaming_the_mask():
            return bool(self._mask.accept(token))

    def _allows(self, token: int, mask: TokenMask) -> bool:
        with _blaming_the_mask():
            return mask.allows(token)

    def _masked(self, logits: Float32, mask: TokenMask) -> tuple[Float32, Ids | None]:
        """The logits of the allowed tokens, and their ids, if they are few; else all logits, -inf if not allowed."""
        with _blaming_the_mask():
            words = mask.allowed()
            if words is None:
                return logits, None
            if words.dtype != np.uint32 or words.shape != (-(-len(logits) // 32),):
                raise ValueError(f"it must be uint32 [{-(-len(logits) // 32)}], not {words.dtype} {list(words.shape)}")
        octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
        if np.bitwise_count(octets).sum() < len(logits) // _FEW:
            ids = np.flatnonzero(np.unpackbits(octets, count=len(logits), bitorder="little").view(np.bool_))
            if not len(ids):
                raise RequestError("the mask forbids every token that could follow")
            return logits[ids], ids
        # 0 or -inf of each token, from a table of bytes: a choice by a condition would be ten times slower
        forbidden = np.take(self._penalties, octets, axis=0).reshape(-1)[: len(logits)]
        return np.add(logits, forbidden, out=self._edited), None

    def _draw(self, logits: Float32) -> int:
        params = self._params
        highest = logits.max()
        self._check(float(highest))
        if 0 < params.top_k < len(logits):
            ids = largest(logits, params.top_k)
            return self._draw_limited(ids, logits[ids])
        weights = np.subtract(logits, highest, out=self._scratch[: len(logits)])
        weights *= np.float32(1.0 / params.temperature)
        np.exp(weights, out=weights)
        total = float(weights.sum(dtype=np.float64))
        if params.top_p < 1.0 or params.min_p > 0.0:
            ids = largest(logits, LIKELIEST)
            token = self._draw_likeliest(ids, logits[ids], total, total)
            if token is not None:
                return token
        return self._draw_from_all(weights, total)

    def _draw_limited(self, ids: Ids, logits: Float32) -> int:
        """Draw by top_p and min_p from the tokens that top_k leaves, most likely first."""
        weights = self._weights(logits)
        cumulative = weights.cumsum()
        left = self._left(weights, cumulative, float(weights.sum()))
        return self._pick(ids, cumulative, min(left, len(ids)))

    def _draw_likeliest(self, ids: Ids, logits: Float32, low: float, high: float) -> int | None:
        """Draw by top_p and min_p from the most likely tokens, most likely first; None: these may leave others, too.
        low, high: the weights of all tokens add up to a number between them."""
        weights = self._weights(logits)
        cumulative = weights.cumsum()
        left = self._left(weights, cumulative, low)
        if left > len(ids) or left != self._left(weights, cumulative, high):
            return None
        return self._pick(ids, cumulative, left)

    def _weights(self, logits: Float32) -> Float64:
        """Weights of tokens, most likely first: probabilities, as multiples of the first one."""
        return np.exp((logits.astype(np.float64) - float(logits[0])) / self._params.temperature)

    def _random(self) -> float:
        """The next number, which is uniform in [0, 1)."""
        number, self._ahead = self._ahead, None
        return self._uniform() if number is None else number

    def _pick(self, ids: Ids, cumulative: Float64, left: int) -> int:
        """One of the first `left` tokens."""
        chosen = cumulative[:left].searchsorted(self._random() * cumulative[left - 1], side="right")
        return int(ids[min(int(chosen), left - 1)])

    def _left(self, weights: Float64, cumulative: Float64, total: float) -> int:
        """Number of these tokens that top_p and min_p leave; one more than there are: all, and perhaps others. weights:
        descending, the first is 1; total: of all tokens."""
        params, left = self._params, len(weights) + 1
        if params.top_p < 1.0:
            left = int(cumulative.searchsorted(params.top_p * total)) + 1
        if params.min_p > 0.0:
            likely = int(np.count_nonzero(weights >= params.min_p))
            if likely < len(weights):
                left = max(1, min(left, likely))
        return left

    def _draw_from_all(self, weights: Float32, total: float) -> int:
        """Draw by top_p and min_p from all tokens. total: the sum of the weights, which are overwritten."""
        params = self._params
        weights[weights < params.min_p] = 0.0  # tokens more likely than a remaining one are kept
        wheel = _Wheel(weights)
        if params.top_p == 1.0:
            return wheel.turn(self._random())
        # The nucleus is large. Instead of sorting, draw from all tokens until one is in it, that is, until the more
        # likely ones hold less than top_p (ties: the lower id first). A try succeeds with a probability of at least
        # top_p.
        while True:
            token = wheel.turn(self._random())
            before = weights[:token]
            likelier = float(weights.sum(where=weights > weights[token], dtype=np.float64))
            likelier += float(before.sum(where=before == weights[token], dtype=np.float64))
            if likelier < params.top_p * total:
                return token


class _Wheel:
    """Draws an index with probability proportional to its weight: first a block of 256, then an index in it."""

    def __init__(self, weights: Float32) -> None:
        self._weights = weights
        starts = np.arange(0, len(weights), 256)
        self._blocks: Float64 = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()

    def turn(self, uniform: float) -> int:
        """The index for a number that is uniform in [0, 1)."""
        blocks = self._blocks
        goal = uniform * blocks[-1]
        block = min(int(blocks.searchsorted(goal, side="right")), len(blocks) - 1)
        inside = self._weights[256 * block : 256 * (block + 1)].cumsum(dtype=np.float64)
        if block:
            goal -= blocks[block - 1]
        at = int(inside.searchsorted(goal, side="right"))
        # rounding may put the goal at the end: then it is the last index with a weight
        return 256 * block + min(at, int(inside.searchsorted(inside[-1])))


def largest(logits: Float32, count: int) -> Ids:
    """Ids of the `count` largest logits, largest first; ties by id.

    The maxima of disjoint parts are themselves logits, so the count-th largest of them is a lower bound of the
    count-th largest logit; only logits that reach the bound are sorted.
    """
    rows = len(logits) // _COLUMNS
    if rows < 4 or count > _COLUMNS // 4:
        return np.argsort(-logits, kind="stable")[:count]
    maxima = logits[: rows * _COLUMNS].reshape(rows, _COLUMNS).max(axis=0)
    maxima.partition(_COLUMNS - count)
    ids = np.flatnonzero(logits >= maxima[_COLUMNS - count])
    order: Ids = np.argsort(-logits[ids], kind="stable")[:count]
    return ids[order]


def token_logprob(
    logits: Float32, token: int, count: int, spell: Callable[[int], bytes], scratch: Float32 | None = None
) -> TokenLogprob:
    """Log-probabilities, by log-softmax of the logits, of `token` and of the `count` most likely tokens.

    spell: the bytes of a token. `scratch`, float32 [vocab], is overwritten.
    """
    highest = float(logits.max())
    weights = np.subtract(logits, np.float32(highest), out=scratch)
    log_total = highest + float(np.log(np.exp(weights, out=weights).sum(dtype=np.float64)))

    def entry(token: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(token, float(logits[token]) - log_total, spell(token), top)

    return entry(token, tuple(entry(int(i)) for i in largest(logits, count)) if count else ())


@contextmanager
def _blaming_the_mask() -> Iterator[None]:
    """An error of a mask ends its request, not the engine."""
    try:
        yield
    except PowerInferError:
        raise
    except Exception as error:
        raise PowerInferError(f"the token mask failed, {type(error).__name__}: {error}") from error


def _has_edits(params: SamplingParams) -> bool:
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return bool(params.logit_bias) or penalties != (1.0, 0.0, 0.0)


class _Edits:
    """Bias and penalties: changes to a few logits, made in a copy, `edited`."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], edited: Float32) -> None:
        self._params = params
        self._edited = edited
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._repeats = params.repetition_penalty != 1.0
        self._index_of: dict[int, int] = {}  # token -> its index in _ids
        self._ids = np.empty(64, np.intp)
        self._counts = np.zeros(64, np.float32)  # in the answer
        if self._repeats:
            for token in dict.fromkeys(prompt):
                self._place(token)

    def count(self, token: int) -> None:
        place = self._place(token)  # may replace the arrays
        self._counts[place] += 1

    def apply(self, logits: Float32) -> Float32:
        params, edited = self._params, self._edited
        np.copyto(edited, logits)
        if len(self._bias_ids):
            edited[self._bias_ids] += self._bias
        if count := len(self._index_of):
            ids, counts = self._ids[:count], self._counts[:count]
            values = edited[ids]
            if self._repeats:
                factor = np.float32(min(max(params.repetition_penalty, 1 / MAX_FACTOR), MAX_FACTOR))
                values = np.where(values > 0, values / factor, values * factor)
            values -= np.float32(params.frequency_penalty) * counts
            values -= np.float32(params.presence_penalty) * (counts > 0)
            edited[ids] = values
        return edited

    def _place(self, token: int) -> int:
        place = self._index_of.get(token)
        if place is None:
            place = self._index_of[token] = len(self._index_of)
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place)
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
        return place
