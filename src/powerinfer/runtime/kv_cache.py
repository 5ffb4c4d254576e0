"""Allocation of KV cache pages: reference counts, and reuse of pages by content.

The executor owns the bytes of the pages; this file handles only their ids. A full page has a key, the chained hash of
all tokens up to its end, so equal keys mean equal prefixes. A page that no request uses keeps its content, and can be
found by its key, until it is reallocated, least recently used first. Slots for states are handled alike
(`state_cache.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def first_parent(salt: bytes) -> bytes:
    """Parent of the key of a first page. Requests with different salts have no key in common.

    Its length is that of no key, so that no salt is another's page.
    """
    if not salt:
        return b""
    from hashlib import blake2b

    return blake2b(salt, digest_size=32).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a full page that holds `tokens` and follows the page with key `parent` (a first page: `first_parent`).

    128 bits of a cryptographic hash: a prompt cannot be made to collide with another user's.
    """
    from hashlib import blake2b  # on first use: it loads OpenSSL, which a short prompt does not need

    return blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


class PageCache:
    """Allocation, sharing and reuse of `n_pages` pages. Every operation takes constant time per page."""

    def __init__(self, n_pages: int, reuse: bool = True) -> None:
        self.n_pages = n_pages
        self.reuse = reuse
        self._empty = list(range(n_pages - 1, -1, -1))  # pages without reusable content; used as a stack
        self._references = [0] * n_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # with a key but no user; least recently used first

    @property
    def available(self) -> int:
        """Number of pages that can be allocated."""
        return len(self._empty) + len(self._unused)

    @property
    def reusable(self) -> int:
        """Number of those of them that may be found by their key until then."""
        return len(self._unused)

    def find(self, key: bytes) -> int | None:
        """The page with this key, if its content is still there."""
        return self._page_of.get(key)

    def take(self, page: int) -> None:
        """Add a user to a page returned by `find`."""
        if self._references[page] == 0:
            del self._unused[page]
        self._references[page] += 1

    def allocate(self) -> int | None:
        """A page to write to, with one user; None if every page is in use."""
        if self._empty:
            page = self._empty.pop()
        elif self._unused:
            page, _ = self._unused.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        else:
            return None
        self._references[page] = 1
        return page

    def reserve(self, count: int) -> list[int] | None:
        """`count` pages to write to, or None if there are fewer; then nothing is allocated."""
        if count > self.available:
            return None
        return [page for page in (self.allocate() for _ in range(count)) if page is not None]

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page, which is never written again, available for reuse, unless its key has a page already."""
        if self.reuse and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget(self, page: int) -> None:
        """Let a page not be found any more: it is reallocated first."""
        del self._page_of[self._key_of.pop(page)]
        if self._references[page] == 0:
            del self._unused[page]
            self._empty.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user from each of a request's pages, given in order of position."""
        for page in reversed(pages):  # so that the end of a prefix is evicted before its beginning
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._unused[page] = None
                else:
                    self._empty.append(page)
