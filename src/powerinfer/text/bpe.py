"""Byte-pair merging in Python, for texts so short that waiting for the native vocabulary would cost more.

The `tokenizers` library needs 40 ms to load a vocabulary of 49,000 pieces and its merges; a prompt of a few words is
merged here in well under one. Only ASCII text is encoded here: it needs no Unicode tables for letters, digits and
spaces, so `re` gives the same words as the native engine. Tests check that both give the same ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from powerinfer.errors import ModelError

MAX_CHARS = 1024  # above it the native engine, once built, is faster
_NEVER = (float("inf"),)


@cache
def byte_alphabet() -> tuple[str, ...]:
    """The 256 characters that stand for the bytes 0..255 in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(shifted)) for byte in range(256))


@cache
def byte_values() -> dict[str, int]:
    """The inverse of `byte_alphabet`."""
    return {char: byte for byte, char in enumerate(byte_alphabet())}


def ascii_words(patterns: Sequence[str]) -> Callable[[str], list[str]]:
    r"""A function that cuts ASCII text as the Unicode `patterns` do, one after the other: into what each matches
    and what lies between.

    The patterns may use \p{L}, \p{N}, \p{P}, \p{Lu} and the like and \s, each inside brackets only.
    """
    cutters = [re.compile(f"({_narrow_to_ascii(pattern)})").split for pattern in patterns]

    def words(text: str) -> list[str]:
        pieces = [text]
        for cut in cutters:
            pieces = [piece for one in pieces for piece in cut(one) if piece]
        return pieces

    return words


def _narrow_to_ascii(pattern: str) -> str:
    """The pattern with its Unicode classes narrowed to ASCII."""
    upper, lower, none = "A-Z", "a-z", ""
    classes = {"L": upper + lower, "N": "0-9", "P": r"!-#%-*,-/:;?@\[-\]_{}"}
    classes |= {"S": r"$+<=>\^`|~", "Han": "\u4e00", "Nd": "0-9", "Pc": "_"}
    classes |= {"Lu": upper, "Lt": none, "Lm": none, "Lo": none, "M": none, "Ll": lower}
    return re.sub(r"\\p\{(\w+)\}", lambda match: classes[match[1]], pattern).replace(r"\s", r"\t-\r ")


def merge(symbols: list[str], rank: Callable[[str, str], tuple[Any, ...] | None]) -> list[str]:
    """Joins neighbours, lowest rank first and leftmost among equals, until no pair has a rank."""
    ranks = [rank(left, right) or _NEVER for left, right in pairwise(symbols)]
    while ranks:
        best = min(ranks)
        if best is _NEVER:
            break
        at = ranks.index(best)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        del ranks[at]
        if at:
            ranks[at - 1] = rank(symbols[at - 1], symbols[at]) or _NEVER
        if at < len(ranks):
            ranks[at] = rank(symbols[at], symbols[at + 1]) or _NEVER
    return symbols


class SmallByteBPE:
    """Byte-level BPE over `vocab` (piece -> id) with `merges` ("left right", most important first)."""

    def __init__(
        self, vocab: dict[str, int], merges: list[str], words: Callable[[str], list[str]], ignore_merges: bool
    ) -> None:
        self._vocab, self._words, self._ignores_merges = vocab, words, ignore_merges
        self._ranks = dict(zip(merges, range(len(merges)), strict=True))
        self._table = dict(enumerate(byte_alphabet()))

    def _rank(self, left: str, right: str) -> tuple[int] | None:
        rank = self._ranks.get(f"{left} {right}")
        return None if rank is None else (rank,)

    def encode(self, text: str) -> list[int]:
        """Ids of ASCII `text`, in which nothing is special."""
        vocab, ids = self._vocab, []
        for word in self._words(text):
            piece = word.translate(self._table)
            token = vocab.get(piece) if self._ignores_merges else None
            if token is not None:
                ids.append(token)
            else:
                symbols = merge([char for char in piece if char in vocab], self._rank)
                try:
                    ids += [vocab[symbol] for symbol in symbols]
                except KeyError as error:
                    raise ModelError(f"the tokenizer merges into {error.args[0][:40]!r}, which is no token") from error
        return ids


class SmallScoredBPE:
    """SentencePiece's BPE: the pair that makes the piece with the highest score merges first.

    Pieces in `atoms` (control, byte and user-defined ones) never come out of a merge. Equal scores are ordered as
    `score_merges` orders them.
    """

    def __init__(
        self, vocab: dict[str, int], scores: Any, atoms: frozenset[str], unk_id: int | None, prefix: bool
    ) -> None:
        self._vocab, self._scores, self._atoms, self._unk, self._prefix = vocab, scores, atoms, unk_id, prefix

    def _rank(self, left: str, right: str) -> tuple[Any, ...] | None:
        at = self._vocab.get(left + right)
        if at is None or not left or not right or not self._atoms.isdisjoint((left, right, left + right)):
            return None
        return (-self._scores[at], -len(left), -len(right), at)

    def _symbols(self, text: str) -> list[str]:
        """Characters; those without a piece of their own become byte pieces, or one empty string for a run."""
        symbols: list[str] = []
        for char in text:
            byte = f"<0x{ord(char):02X}>"
            if char in self._vocab:
                symbols.append(char)
            elif byte in self._vocab:
                symbols.append(byte)
            elif not symbols or symbols[-1]:
                symbols.append("")
        return symbols

    def encode(self, text: str) -> list[int]:
        """Ids of ASCII `text`, in which nothing is special."""
        if not text:
            return []
        text = ("▁" if self._prefix else "") + text.replace(" ", "▁")
        ids = (self._vocab.get(symbol, self._unk) for symbol in merge(self._symbols(text), self._rank))
        return [at for at in ids if at is not None]


def score_merges(vocab: dict[str, int], scores: Any, atoms: frozenset[str]) -> list[tuple[str, str]]:
    """The merge list that a scored vocabulary stands for, most important first (the order of transformers).

    Of 262,144 pieces there are two million ways to cut one in two: they are looked up by hashes, as arrays.
    """
    import numpy as np

    pieces = [piece for piece in vocab if piece and piece not in atoms]
    if not pieces:
        return []
    ids = np.array([vocab[piece] for piece in pieces])
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # The hash of a piece is the polynomial of its characters in an odd number, modulo 2^64: of a part of a text, a
    # difference of two sums divided by a power of the number.
    codes = np.frombuffer("".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32)
    place = np.arange(len(codes)) - np.repeat(starts, lengths)  # of a character in its piece
    powers, inverses = (_powers(number, int(lengths.max())) for number in (_NUMBER, pow(_NUMBER, -1, 1 << 64)))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((codes + np.uint64(1)) * powers[place], dtype=np.uint64)])
    hashes = sums[ends] - sums[starts]
    order = np.argsort(hashes)
    sorted_hashes = hashes[order]
    if (sorted_hashes[1:] == sorted_hashes[:-1]).any():
        raise ModelError("the tokenizer's vocabulary has two pieces of one hash: it was made to be slow")

    def pieces_of(wanted: Any) -> Any:
        """Indices in `pieces`, -1 for none."""
        at = np.minimum(np.searchsorted(sorted_hashes, wanted), len(sorted_hashes) - 1)
        return np.where(sorted_hashes[at] == wanted, order[at], -1)

    cuts = place.nonzero()[0]
    piece = np.repeat(np.arange(len(pieces)), lengths)[cuts]
    left = pieces_of(sums[cuts] - sums[starts[piece]])
    cuts, piece, left = (array[left >= 0] for array in (cuts, piece, left))
    right = pieces_of((sums[ends[piece]] - sums[cuts]) * inverses[place[cuts]])
    cuts, piece, left, right = (array[right >= 0] for array in (cuts, piece, left, right))
    first = place[cuts]
    ranked = np.lexsort((ids[piece], first - lengths[piece], -first, -np.asarray(scores, np.float64)[ids[piece]]))
    halves = (map(pieces.__getitem__, array[ranked].tolist()) for array in (left, right))
    return list(zip(*halves, strict=True))


_NUMBER = 0x9E3779B97F4A7C15  # odd, with bits all over


def _powers(number: int, highest: int) -> Any:
    """The powers of a number up to the highest, modulo 2^64."""
    import numpy as np

    powers = np.full(highest + 1, number, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)
