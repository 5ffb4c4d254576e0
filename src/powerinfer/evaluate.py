"""Quality: the perplexity of a model, its accuracy in tasks, and the agreement of two engines on the same text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.errors import RequestError
from powerinfer.progress import Progress, silent
from powerinfer.runtime.runner import SCORE_ROWS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.runtime.engine import LLM
    from powerinfer.tasks import Item
    from powerinfer.text.tokenizer import Tokenizer

PROMPT = 16
"""Tokens at the start of a window that are computed as a prompt when two engines are compared."""

UNUSABLE = "the model gave no usable probabilities for this text: its weights may be damaged"


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood, in nats, of the scored tokens."""

    perplexity: float
    error: float  # one standard error of it
    tokens: int  # scored


def perplexity(
    llm: LLM, text: str, context: int = 512, progress: Progress = silent, step: int = SCORE_ROWS
) -> Perplexity:
    """The perplexity of a text, as llama-perplexity computes it.

    The text's tokens are cut into windows of `context` that do not overlap; an incomplete last window is dropped. If
    the model starts texts with a BOS token, it replaces the first token of every window. The predictions at positions
    context/2 to context - 2 of a window are scored. RequestError for a text of less than two windows.

    step: tokens that are computed at once where they are scored. Steps of up to `kernels.cpu.NEURON_TOKENS` use the
    selector, larger ones are dense.
    """
    return windows_perplexity(llm, perplexity_windows(llm.tokenizer, text, context), progress, step)


def perplexity_windows(tokenizer: Tokenizer, text: str, context: int) -> list[list[int]]:
    """The windows of a text for `perplexity`. RequestError if it has less than two."""
    tokens = _encoded(tokenizer, text, context)
    windows = len(tokens) // context
    if windows < 2:
        raise RequestError(
            f"the text has {len(tokens)} tokens, but two windows of {context} need {2 * context}: "
            "give a longer text, or a smaller context (--context)"
        )
    return list(_windows(tokenizer, tokens[: windows * context], context))


def windows_perplexity(
    llm: LLM, windows: Sequence[list[int]], progress: Progress = silent, step: int = SCORE_ROWS
) -> Perplexity:
    """The same for windows of token ids; the second half of each is scored."""
    return _summary(window_losses(llm, windows, progress, step))


def window_losses(
    llm: LLM, windows: Sequence[list[int]], progress: Progress = silent, step: int = SCORE_ROWS
) -> NDArray[np.float64]:
    """The negative log-likelihoods, in nats, of the tokens that `windows_perplexity` scores."""
    losses: list[NDArray[np.float64]] = []
    for window, inside in enumerate(windows):

        def use(at: int, logits: NDArray[np.float32], inside: list[int] = inside) -> None:
            losses.append(_losses(logits, inside[at + 1 :]))

        # the last token's prediction is outside the window
        llm.score(inside[:-1], len(inside) // 2, use, step)
        progress("perplexity", window + 1, len(windows))
    return np.concatenate(losses)


@dataclass(frozen=True)
class Perplexities:
    """Perplexities of one text, decoded densely and sparsely. apart: the logarithm of their ratio, the mean over the
    tokens, with one standard error; tokens: scored."""

    dense: float
    sparse: float
    apart: float
    apart_error: float
    tokens: int

    @property
    def alike(self) -> bool:
        """Whether the text cannot tell them apart: by no more than two standard errors."""
        return abs(self.apart) <= 2 * self.apart_error


def dense_and_sparse(llm: LLM, text: str, context: int, progress: Progress = silent, step: int = 1) -> Perplexities:
    """The perplexities of a text. step: as of `perplexity`; up to the engine's --max-batch it uses the selector."""
    windows = perplexity_windows(llm.tokenizer, text, context)
    sparse = window_losses(llm, windows, progress, step)
    with llm.every_neuron():
        dense = window_losses(llm, windows, progress, step)
    log_ratios = sparse - dense
    error = float(log_ratios.std(ddof=1) / math.sqrt(len(log_ratios)))
    perplexities = _summary(dense).perplexity, _summary(sparse).perplexity
    return Perplexities(*perplexities, float(log_ratios.mean()), error, len(log_ratios))


@dataclass(frozen=True)
class Accuracy:
    """Shares of the items whose right choice is the most likely one, each with one standard error.

    acc: by the sum of the log-probabilities of a choice's tokens; acc_norm: by that sum divided by the choice's
    characters, as lm-eval divides. cut: items whose beginning was left out, because they are longer than the context.
    """

    items: int
    acc: float
    acc_error: float
    acc_norm: float
    acc_norm_error: float
    chance: float  # what guessing would reach
    cut: int


@dataclass(frozen=True)
class EncodedItem:
    """texts: of each choice, the tokens of what stands before it and of itself; firsts: where its own begin."""

    texts: tuple[list[int], ...]
    firsts: tuple[int, ...]
    sizes: tuple[int, ...]  # characters of each choice
    answer: int
    cut: bool = False


def encode_items(tokenizer: Tokenizer, items: Sequence[Item], context: int) -> list[EncodedItem]:
    """The tokens of items, as lm-eval makes them: a choice's are what it adds to those of the text before it.

    Spaces at the end of that text count to the choice. Of a text that is longer than `context` tokens the last ones are
    kept. RequestError for a choice that is longer itself, or that adds no token.
    """
    encoded = []
    for item in items:
        shared = len(_with_bos(tokenizer, item.context.rstrip()))
        texts, firsts = [], []
        for choice in item.choices:
            tokens = _with_bos(tokenizer, f"{item.context} {choice}")
            over = max(0, len(tokens) - 1 - context)  # the last token is only predicted
            if not over < shared < len(tokens):
                raise RequestError(
                    f"{item.place}: a choice of {len(tokens) - shared} tokens cannot be scored in a context of "
                    f"{context}"
                )
            texts.append(tokens[over:])
            firsts.append(shared - over)
        sizes = tuple(map(len, item.choices))
        encoded.append(EncodedItem(tuple(texts), tuple(firsts), sizes, item.answer, min(firsts) < shared))
    return encoded


def accuracy(llm: LLM, items: Sequence[EncodedItem], progress: Progress = silent, step: int = SCORE_ROWS) -> Accuracy:
    """Share of items whose right choice is the most likely one. step: as of `perplexity`."""
    right = np.empty((len(items), 2))
    for number, item in enumerate(items):
        sums = choice_log_probabilities(llm, item, step)
        if not np.isfinite(sums).all():
            raise RequestError(UNUSABLE)
        right[number] = sums.argmax() == item.answer, (sums / item.sizes).argmax() == item.answer
        progress("tasks", number + 1, len(items))
    acc, acc_norm = right.mean(axis=0).tolist()
    errors = right.std(axis=0, ddof=1) / math.sqrt(len(items)) if len(items) > 1 else np.zeros(2)
    chance = sum(1 / len(item.texts) for item in items) / len(items)
    cut = sum(item.cut for item in items)
    return Accuracy(len(items), acc, float(errors[0]), acc_norm, float(errors[1]), chance, cut)


def choice_log_probabilities(llm: LLM, item: EncodedItem, step: int = SCORE_ROWS) -> NDArray[np.float64]:
    """The sum of the log-probabilities of each choice's tokens, in nats, float64 [choices]."""
    sums = np.zeros(len(item.texts))

    def use(choice: int, at: int, logits: NDArray[np.float32]) -> None:
        sums[choice] -= _losses(logits, item.texts[choice][at + 1 :]).sum()

    llm.score_texts([tokens[:-1] for tokens in item.texts], [first - 1 for first in item.firsts], use, step)
    return sums


def _with_bos(tokenizer: Tokenizer, text: str) -> list[int]:
    """Plain text, begun as the model begins texts, and not ended."""
    return tokenizer.encode(text, special=False, add_bos=tokenizer.add_bos and tokenizer.bos_id is not None)


@dataclass(frozen=True)
class Agreement:
    """Measures of how closely the predictions of one engine match those of another."""

    top1_agreement: float  # share of the positions at which both find the same token most likely
    mean_kl: float  # KL(other || one) in nats
    max_abs_logit_diff: float
    tokens: int  # positions compared
    active_fraction: float  # share of the first engine's neurons computed in full; 1: dense


def agreement(
    llm: LLM,
    against: LLM | None,
    text: str,
    context: int = 512,
    limit: int | None = None,
    step: int = 1,
    progress: Progress = silent,
) -> Agreement:
    """Compare two engines of one model on a text that both are given token by token.

    against None: the engine itself with every neuron. Not for one that splits neurons between devices: that only skips
    its predictors.

    The text is cut into windows of `context` tokens, the last may be shorter; BOS as in `perplexity`. The first
    tokens of a window, `PROMPT` or half of it, are computed as a prompt, which is dense; the rest `step` tokens at a
    time, like decode, and the logits of each of these positions are compared. limit: of positions. Memory: one window's
    logits of `against`, context * vocabulary * 4 bytes. RequestError for a text of less than two tokens, or different
    vocabularies.
    """
    if against is not None and llm.config.vocab_size != against.config.vocab_size:
        raise RequestError(
            f"vocabularies of {llm.config.vocab_size} and {against.config.vocab_size} tokens cannot be compared"
        )
    windows = agreement_windows(llm.tokenizer, text, context, limit)
    total = sum(len(inside) - first for inside, first in windows)
    compared = _Compared(total, progress)
    llm.clear_sparsity()
    for inside, first in windows:
        compared.window(llm, against, inside, first, step)
    sparsity = llm.sparsity
    active = sparsity["active_fraction"] if sparsity else None
    return Agreement(
        compared.same / total, compared.kl / total, compared.furthest, total, 1.0 if active is None else active
    )


def agreement_windows(
    tokenizer: Tokenizer, text: str, context: int, limit: int | None = None
) -> list[tuple[list[int], int]]:
    """The windows of a text for `agreement`, each with its first position to compare; RequestError if there is none."""
    tokens = _encoded(tokenizer, text, context)
    windows, total = [], 0
    for inside in _windows(tokenizer, tokens, context):
        first = min(PROMPT, len(inside) // 2)
        count = len(inside) - first if limit is None else min(len(inside) - first, limit - total)
        if first and count > 0:
            windows.append((inside[: first + count], first))
            total += count
    if not windows:
        raise RequestError(f"the text has {len(tokens)} tokens: at least 2 are needed")
    return windows


class _Compared:
    """Sums over the positions compared so far."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.same = 0
        self.kl = 0.0
        self.furthest = 0.0
        self._total = total
        self._progress = progress
        self._computed = 0  # positions, of both engines

    def window(self, llm: LLM, against: LLM | None, inside: list[int], first: int, step: int) -> None:
        """Compare the predictions from position `first` on."""
        logits_of_window = np.empty((len(inside) - first, llm.config.vocab_size), np.float32)

        def keep(at: int, logits: NDArray[np.float32]) -> None:
            logits_of_window[at - first : at - first + len(logits)] = logits
            self._advance(len(logits))

        def compare(at: int, logits: NDArray[np.float32]) -> None:
            for row, own in enumerate(logits, at - first):
                self._add(logits_of_window[row].astype(np.float64), own.astype(np.float64))
            self._advance(len(logits))

        with llm.every_neuron() if against is None else nullcontext():
            (against or llm).score(inside, first, keep, step)
        llm.score(inside, first, compare, step)

    def _add(self, theirs: NDArray[np.float64], ours: NDArray[np.float64]) -> None:
        furthest = float(np.abs(theirs - ours).max())
        if not math.isfinite(furthest):
            raise RequestError(UNUSABLE)
        self.furthest = max(self.furthest, furthest)
        self.same += int(theirs.argmax() == ours.argmax())
        log_p, log_q = _log_softmax(theirs), _log_softmax(ours)
        self.kl += float((np.exp(log_p) * (log_p - log_q)).sum())

    def _advance(self, count: int) -> None:
        self._computed += count
        self._progress("agreement", self._computed, 2 * self._total)


def _encoded(tokenizer: Tokenizer, text: str, context: int) -> list[int]:
    if context < 4:
        raise RequestError(f"a window of {context} tokens is too small: it needs at least 4")
    return tokenizer.encode(text, special=False)


def _windows(tokenizer: Tokenizer, tokens: list[int], context: int) -> Iterator[list[int]]:
    """Windows of `context` tokens, the last may be shorter, with BOS as in `perplexity`."""
    for at in range(0, len(tokens), context):
        inside = tokens[at : at + context]
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            inside[0] = tokenizer.bos_id
        yield inside


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


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
    if not mean < 700:  # beyond it e^mean is no number
        raise RequestError(UNUSABLE)
    # d exp(m) = exp(m) dm
    spread = float(losses.std(ddof=1)) / math.sqrt(len(losses))
    value = math.exp(mean)
    return Perplexity(value, value * spread, len(losses))
