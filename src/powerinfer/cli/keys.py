"""Keys that are pressed while a model is loaded or answers: not echoed into that, and kept for what is typed next."""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

LARGEST = 1 << 16  # bytes of keys that are kept
_LFLAG, _CC = 3, 6  # places in what `termios.tcgetattr` returns

# What terminals send for keys that write nothing: arrows, Home, function keys, letters with Alt
_SEQUENCE = "\x1b(?:\\[[0-?]*[ -/]*[@-~]|O.|.)?"
_NEW_LINE = "\x1b?(?:\r\n?|\n)"  # Enter, or Alt-Enter
_CONTROLS = "[\x00-\x08\x0b-\x1f\x7f]"
_EDITS: dict[str, Callable[[str], str]] = {
    "\x7f": lambda text: text[:-1],
    "\x08": lambda text: text[:-1],
    "\x15": lambda text: text[: text.rfind("\n") + 1],
    "\x17": lambda text: re.sub(r"\S*\s*\Z", "", text),
}
"""Rest of a text after Backspace, Ctrl-U and Ctrl-W."""


@contextmanager
def unechoed(keep: Callable[[str], object] | None = None) -> Iterator[None]:
    """Keys pressed meanwhile are not shown. keep: gets them as text at the end; None: they stay for who reads next.

    Ctrl-C interrupts as ever. The terminal is as before when this ends, and while Ctrl-Z stops the process. Nothing
    happens where stdin and stdout are no terminals.
    """
    fd = _terminal()
    if fd is None:
        yield
        return
    before = termios.tcgetattr(fd)
    quiet: list[Any] = [*before[:_CC], [*before[_CC]]]
    quiet[_LFLAG] &= ~termios.ECHO
    quiet[_LFLAG] |= termios.NOFLSH  # Ctrl-C drops neither keys nor what is being shown
    if keep is not None:
        quiet[_LFLAG] &= ~termios.ICANON
        quiet[_CC][termios.VMIN] = quiet[_CC][termios.VTIME] = 0  # reading does not wait
    raw = b""

    def restore() -> None:
        nonlocal raw
        if _is_in_front(fd):
            raw += b"" if keep is None else _read(fd)
            termios.tcsetattr(fd, termios.TCSANOW, before)

    def stop(number: int, frame: object) -> None:
        """Stop the process, by Ctrl-Z, until it is told to go on."""
        restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, stop)
        if _is_in_front(fd):
            termios.tcsetattr(fd, termios.TCSANOW, quiet)

    handled = signal.getsignal(signal.SIGTSTP)
    if handled == signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, stop)
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(OSError, termios.error):  # the terminal is gone
            restore()
        signal.signal(signal.SIGTSTP, handled)
        if keep is not None:
            keep(typed_text(raw))


def typed_text(raw: bytes) -> str:
    """The text that keys make: without those that write nothing, and as some of them edit it."""
    text = ""
    keys = re.sub(_SEQUENCE, "", re.sub(_NEW_LINE, "\n", raw.decode(errors="ignore")), flags=re.DOTALL)
    for part in re.split(f"({_CONTROLS})", keys):
        if part in _EDITS:
            text = _EDITS[part](text)
        elif not re.match(_CONTROLS, part):
            text += part
    return text.strip("\n")


def _terminal() -> int | None:
    """The terminal of a conversation, in the thread that gets signals."""
    if threading.current_thread() is not threading.main_thread():
        return None
    with suppress(AttributeError, OSError, ValueError):  # there is no stdin, or it is no file of this process
        fd = sys.stdin.fileno()
        # where stdout is a pipe, the program behind it may use the terminal
        if os.isatty(fd) and sys.stdout.isatty() and _is_in_front(fd):
            return fd
    return None


def _is_in_front(fd: int) -> bool:
    """Whether this process is in the terminal's foreground: others are stopped when they change or read it."""
    return os.getpgrp() == os.tcgetpgrp(fd)


def _read(fd: int) -> bytes:
    """The keys pressed so far."""
    raw = b""
    while len(raw) < LARGEST and (piece := os.read(fd, 4096)):
        raw += piece
    return raw
