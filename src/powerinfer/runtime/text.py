"""Text from tokens: incremental decoding, and stop strings, which are never part of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from powerinfer.text.tokenizer import StreamDecoder


class TextStream:
    """Text of one request. `stopped`: a stop string was found; nothing may be pushed after that."""

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._waiting = ""  # possibly the start of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The final text after this token, up to a stop string."""
        text = self._decoder.push(token)
        return self._cut_at_stop(text) if self._stop else text

    def flush(self) -> str:
        """The rest: no token follows."""
        text = self._decoder.flush()
        if self._stop:
            text = self._cut_at_stop(text) + self._waiting
            self._waiting = ""
        return text

    def _cut_at_stop(self, new: str) -> str:
        if not new:
            return ""
        text = self._waiting + new
        stops = [at for at in map(text.find, self._stop) if at >= 0]
        if stops:
            self.stopped = True
            self._waiting = ""
            return text[: min(stops)]
        waiting = max(_overlap(text, stop) for stop in self._stop)
        self._waiting = text[len(text) - waiting :]
        return text[: len(text) - waiting]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
