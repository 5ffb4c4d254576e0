"""API keys: who may use the server."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from powerinfer.errors import RequestError

ENVIRONMENT = "POWERINFER_API_KEY"
SALT_BYTES = 16


def read_keys(file: str | None) -> list[str]:
    """The keys of `file`, one a line (empty lines and lines with # are skipped), and of the environment.

    RequestError for a file that cannot be read, and for a key that no header could hold.
    """
    lines: list[str] = []
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise RequestError(f"cannot read the API keys in {file}: {reason}") from None
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if file is not None and not keys:
        raise RequestError(f"{file} holds no API key")
    keys += os.environ.get(ENVIRONMENT, "").replace(",", " ").split()
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise RequestError("an API key may hold printable ASCII characters without spaces only")
    return list(dict.fromkeys(keys))


class Keys:
    """Compares keys in constant time, and separates their prefix caches."""

    def __init__(self, keys: Sequence[str]) -> None:
        # of one length, so that the time to compare tells nothing
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def salt(self, authorization: bytes) -> bytes | None:
        """The salt for the key in an Authorization header; None if it is none of the keys.

        Prompts of different salts share no pages of the prefix cache: the time to the first token would tell one client
        what another one asked.
        """
        scheme, _, key = authorization.partition(b" ")
        sent = _digest(key.strip())
        matching = b""
        for digest in self._digests:  # all of them, whichever is right
            if hmac.compare_digest(digest, sent):
                matching = digest
        return matching[:SALT_BYTES] if matching and scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32, person=b"powerinfer key").digest()
