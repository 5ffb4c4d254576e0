"""How good a model's predictions are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.errors import RequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.formats.checkpoint import Progress
    from powerinfer.runtime.engine import LLM


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood, in nats, of the scored tokens."""

    perplexity: float
    error: float  # one standard error of it
    tokens: int  # scored


def perplexity(llm: LLM, text: str, context: int = 512, progress: Progress | None = None) -> Perplexity:
    """The perplexity of a text, as llama-perplexity computes it.

    The text's tokens are cut into windows of `context` that do not overlap; what does not fill one is left out. Where
    the model puts a BOS token before a text, the first token of every window is replaced by it. The predictions made
    at positions context/2 to context - 2 of a window count. RequestError for a text of less than two windows.
    """
    if context < 4:
        raise RequestError(f"a window of {context} tokens is too small: it needs at least 4")
    tokenizer = llm.tokenizer
    tokens = tokenizer.encode(text, special=False)
    windows = len(tokens) // context
    if windows < 2:
        raise RequestError(
            f"the text has {len(tokens)} tokens, but two windows of {context} need {2 * context}: "
            f"use a longer text or a smaller context"
        )
    first = context // 2
    losses: list[NDArray[np.float64]] = []
    for window in range(windows):
        inside = tokens[window * context : (window + 1) * context]
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            inside[0] = tokenizer.bos_id

        def use(at: int, logits: NDArray[np.float32], inside: list[int] = inside) -> None:
            losses.append(_losses(logits, inside[at + 1 :]))

        llm.score(inside[:-1], first, use)  # the last token predicts nothing that is in the window
        if progress is not None:
            progress("perplexity", window + 1, windows)
    return _summary(np.concatenate(losses))


def _losses(logits: NDArray[np.float32], following: list[int]) -> NDArray[np.float64]:
    """-log softmax(logits)[token] of each row and the token that follows it; float32 [n, vocab] -> float64 [n]."""
    rows = len(logits)
    highest = logits.max(axis=1)
    totals = np.exp(logits - highest[:, None]).sum(axis=1, dtype=np.float64)
    chosen = logits[np.arange(rows), following[:rows]]
    losses: NDArray[np.float64] = np.log(totals) + highest.astype(np.float64) - chosen
    return losses


def _summary(losses: NDArray[np.float64]) -> Perplexity:
    mean = float(losses.mean())
    if not math.isfinite(mean):
        raise RequestError("the model gave no usable probabilities for this text: its weights may be damaged")
    # d exp(m) = exp(m) dm
    spread = float(losses.std(ddof=1)) / math.sqrt(len(losses))
    value = math.exp(mean)
    return Perplexity(value, value * spread, len(losses))
