"""Masks for answers that a thought may precede: it is free, ends within its budget, and a grammar applies behind it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from powerinfer.text.grammar import AfterThought, Grammar
from powerinfer.text.marks import overlap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.text.tokenizer import Tokenizer

MAX_SPACE = 8  # bytes of white space between a thought and what a grammar is about
MAX_BEYOND = 3  # tokens by which a thought may exceed its budget, to complete a character


class AnswerMask(Protocol):
    """A `TokenMask` that also takes text."""

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""

    def allowed(self) -> NDArray[np.uint32] | None:
        """The tokens that may follow, None for all."""

    def accept(self, token: int) -> bool:
        """Take the next token; whether the answer ends with it."""

    def accept_bytes(self, data: bytes) -> bool:
        """Take text; whether it fits. If not, the mask cannot be used any more."""


class Spelling:
    """A vocabulary's tokens by their bytes, as masks of ceil(vocab_size / 32) words."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.words = -(-vocab_size // 32)
        self.ends = frozenset(tokenizer.eos_ids)
        self.beginning = lru_cache(64)(self._beginning)
        self.with_byte = lru_cache(4)(self._with_byte)
        self.tokens = lru_cache(64)(self._tokens)

    def prepare(self, begin: bytes, end: bytes) -> None:
        """Look up what masks of these marks need, once: it takes milliseconds."""
        self.beginning(begin)
        self.with_byte(end[-1:])
        assert self.spaces is not None

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token; empty for one that only the model has."""
        return self._tokenizer.token_bytes(token) if token < self._tokenizer.vocab_size else b""

    def mask(self, fits: Callable[[bytes], object]) -> NDArray[np.uint32]:
        """The tokens whose bytes fit."""
        return self.mask_of(token for token, data in self._all() if data and fits(data))

    def mask_of(self, tokens: Iterable[int]) -> NDArray[np.uint32]:
        """Mask of these tokens."""
        words = np.zeros(self.words, np.uint32)
        ids = np.fromiter(tokens, np.int64)
        np.bitwise_or.at(words, ids >> 5, np.left_shift(1, ids & 31).astype(np.uint32))
        return words

    def _beginning(self, text: bytes) -> NDArray[np.uint32]:
        """The tokens that `text` begins with, or that begin with it."""
        return self.mask(lambda data: text.startswith(data) or data.startswith(text))

    def _with_byte(self, byte: bytes) -> list[tuple[int, bytes]]:
        """The tokens that have a byte in them, with their bytes."""
        return [(token, data) for token, data in self._all() if byte in data]

    @cached_property
    def spaces(self) -> NDArray[np.uint32]:
        """The tokens of white space."""
        return self.mask(bytes.isspace)

    def _tokens(self, data: bytes) -> list[int]:
        """Tokens that spell `data`, as the tokenizer does where it does so to the byte; none if there are none."""
        tokens = self._tokenizer.encode(data.decode("utf-8", "replace"), add_bos=False)
        if b"".join(map(self.token_bytes, tokens)) == data:
            return tokens
        tokens = []
        while data:
            fits = ((len(one), token) for token, one in self._all() if one and data.startswith(one))
            length, token = max(fits, default=(0, 0))
            if not length:
                return []
            tokens.append(token)
            data = data[length:]
        return tokens

    def _all(self) -> Iterator[tuple[int, bytes]]:
        return ((token, self._tokenizer.token_bytes(token)) for token in range(self._tokenizer.vocab_size))


class ThoughtMask:
    """A `TokenMask` for an answer that a thought may precede.

    make: makes the mask of what follows the thought, None: that is free. Where a grammar must be matched, a thought
    that has begun must end; up to `MAX_SPACE` bytes of white space may follow it.
    """

    def __init__(self, rules: AfterThought, spelling: Spelling, make: Callable[[], AnswerMask] | None) -> None:
        self._spelling, self._make, self._budget = spelling, make, rules.budget
        self._begin, self._end = rules.begin.encode(), rules.end.encode()
        self._forced = isinstance(rules.grammar, Grammar)
        self._pending = b""  # text that may belong to a mark
        self._decoder = getincrementaldecoder("utf-8")("ignore")
        self._tokens = 0  # of the thought
        self._room = 0  # for white space behind it
        self._closing: list[int] = []  # tokens that must follow, the last one first
        self._inner = None if make is None or rules.opened else make()
        self._possible = True  # that there is no thought, and the text so far is the answer's
        self._state = self._accept_opening
        if rules.opened:
            self._open(b"")

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""
        data = self._spelling.token_bytes(token)
        if self._closing:
            return token == self._closing[-1]
        if self._state == self._accept_thought:
            return not self._forced or (token not in self._spelling.ends and self._fits(data))
        if self._state == self._accept_opening and data and self._is_begin(self._pending + data):
            return True
        if self._is_space(data):
            return True
        return self._possible and (self._inner is None or self._inner.allows(token))

    def allowed(self) -> NDArray[np.uint32] | None:
        """The tokens that may follow, None for all. RequestError if a limit is reached."""
        spelling = self._spelling
        if self._closing:
            return spelling.mask_of(self._closing[-1:])
        if self._state == self._accept_thought:
            return ~spelling.mask_of(self._refused()) if self._forced else None
        words = np.zeros(spelling.words, np.uint32)
        if self._possible:
            allowed_words = None if self._inner is None else self._inner.allowed()
            if allowed_words is None:
                return None
            words |= allowed_words
        if self._state == self._accept_opening:
            words |= spelling.beginning(self._begin[len(self._pending) :])
        return words | spelling.spaces if self._room else words

    def accept(self, token: int) -> bool:
        """Take the next token; whether the answer ends with it."""
        return self._state(token, self._spelling.token_bytes(token))

    # ---- what the next token belongs to

    def _accept_opening(self, token: int, data: bytes) -> bool:
        """Accept a token of the mark that begins a thought, or of the answer."""
        self._pending += data
        ends = False
        if self._possible and self._inner is not None:
            self._possible = self._inner.allows(token)
            ends = self._possible and self._inner.accept(token)
        text = self._pending if self._forced else self._pending.lstrip()
        if text.startswith(self._begin):
            self._open(text[len(self._begin) :])
            return False
        if not self._begin.startswith(text):
            self._state = self._accept_answer
        return ends

    def _accept_thought(self, token: int, data: bytes) -> bool:
        if self._closing:
            self._closing.pop()
            if not self._closing:
                self._leave(b"")
            return False
        self._tokens += 1
        self._decoder.decode(data)
        return self._read(data)

    def _accept_space(self, token: int, data: bytes) -> bool:
        """Accept a token of the white space behind a thought, or of the answer."""
        if self._is_space(data):
            self._room -= len(data)
            return False
        self._room, self._state = 0, self._accept_answer
        return self._accept_answer(token, data)

    def _accept_answer(self, token: int, data: bytes) -> bool:
        return self._inner is not None and self._inner.accept(token)

    # ----

    def _open(self, rest: bytes) -> None:
        """A thought begins, with this text."""
        self._pending, self._state = b"", self._accept_thought
        self._read(rest)

    def _read(self, data: bytes) -> bool:
        """Text of a thought."""
        self._pending += data
        before, mark, rest = self._pending.partition(self._end)
        if mark:
            self._leave(rest.lstrip())
            return False
        self._pending = before[len(before) - len(self._end) + 1 :] if len(before) >= len(self._end) else before
        if self._budget is not None and self._tokens >= self._budget:
            incomplete = self._decoder.getstate()[0]
            if not incomplete or self._tokens >= self._budget + MAX_BEYOND:
                self._closing = self._spelling.tokens(self._end[overlap(self._pending, self._end) :])[::-1]
                self._budget = None  # it is spent, or this vocabulary cannot spell the mark
        return False

    def _leave(self, rest: bytes) -> None:
        """A thought has ended, and this text follows it."""
        self._inner, self._possible = None if self._make is None else self._make(), True
        self._pending, self._room = b"", 0 if rest else MAX_SPACE
        self._state = self._accept_answer if rest or self._inner is None else self._accept_space
        if rest and self._inner is not None and not self._inner.accept_bytes(rest):
            self._inner = None

    def _fits(self, data: bytes) -> bool:
        """Whether the answer may begin as it does if these bytes end the thought."""
        if self._end[-1:] not in data or self._make is None:
            return True
        _, mark, rest = (self._pending + data).partition(self._end)
        return not mark or not rest.lstrip() or self._make().accept_bytes(rest.lstrip())

    def _is_begin(self, text: bytes) -> bool:
        return self._begin.startswith(text) or text.startswith(self._begin)

    def _is_space(self, data: bytes) -> bool:
        return 0 < len(data) <= self._room and data.isspace()

    def _refused(self) -> Iterator[int]:
        """The tokens that may not follow in a thought, where a grammar must be matched behind it."""
        yield from self._spelling.ends
        for token, data in self._spelling.with_byte(self._end[-1:]):
            if not self._fits(data):
                yield token
