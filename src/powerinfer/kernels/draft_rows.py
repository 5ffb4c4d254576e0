"""Sizes of a draft vocabulary: the tokens that drafts are chosen from."""

from __future__ import annotations

SHARE = 8
"""Drafts are chosen from one of so many tokens, the first, and from those that texts used lately."""

LEAST = 4096
"""Tokens of these first ones, at least; where they would be most, drafts are chosen from all."""

RECENT = 8192
"""Tokens that texts used lately, in whole panels, at most."""


def first_tokens(vocab_size: int) -> int:
    """Number of the first tokens that drafts are chosen from; all where the output head is small."""
    first = max(LEAST, vocab_size // SHARE)
    return first if 2 * first <= vocab_size else vocab_size


def recent_tokens(vocab_size: int) -> int:
    """Number of other tokens that there is room for, at most."""
    return min(RECENT, vocab_size - first_tokens(vocab_size))
