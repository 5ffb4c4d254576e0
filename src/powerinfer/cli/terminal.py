"""Reads messages from a terminal: a line editor, a history across sessions, completion of commands.

Imports prompt_toolkit, so `chat` imports this file when it runs on a terminal, and only then.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from powerinfer.cli.screen import has_styles
from powerinfer.text.tokenizer import valid_unicode

MOST_ENTRIES = 1000
MOST_BYTES = 1 << 20  # of the history's file, before it is shortened
LARGEST_ENTRY = 1 << 16  # bytes; a larger message is not saved

_PRIVATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Terminal:
    """The input of a conversation.

    unfinished: whether Enter continues a text with another line instead of sending it. commands: name -> what it does;
    options: what /set takes. `session`: further arguments of the PromptSession.
    """

    def __init__(
        self,
        history: Path,
        unfinished: Callable[[str], bool],
        commands: Mapping[str, str],
        options: Collection[str],
        **session: Any,
    ) -> None:
        self._draft = ""  # typed before it was asked for
        self._session: PromptSession[str] = PromptSession(
            [("bold ansigreen", "> ")] if has_styles(sys.stdout) else "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(unfinished),
            history=SavedHistory(history),
            completer=_Completer(commands, options),
            complete_while_typing=False,
            enable_suspend=True,
            **session,
        )

    def read(self) -> str | None:
        """The next message; None for Ctrl-D. KeyboardInterrupt for Ctrl-C where nothing is typed."""
        draft, self._draft = self._draft, ""
        try:
            return self._session.prompt(default=draft).encode("utf-8", "replace").decode()
        except EOFError:
            return None

    def keep(self, text: str) -> None:
        """Begin the next message with a text, which its sender may still edit."""
        self._draft = text


def _keys(unfinished: Callable[[str], bool]) -> KeyBindings:
    """Enter sends, Alt-Enter is a new line, Ctrl-C empties what is typed."""
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # not while the history is searched

    @keys.add("enter", filter=typing)
    def enter(event: KeyPressEvent) -> None:
        if unfinished(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=typing)
    @keys.add("<sigint>", filter=typing)
    def interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


class _Completer(Completer):
    """Commands, names of options after /set, paths after /save and /load."""

    def __init__(self, commands: Mapping[str, str], options: Collection[str]) -> None:
        self._commands, self._options, self._paths = commands, options, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        command, space, rest = text.partition(" ")
        if "\n" in text or not command.startswith("/"):
            return
        if not space:
            for name, about in self._commands.items():
                if name.startswith(command):
                    yield Completion(name, -len(command), display_meta=about)
        elif command == "/set":
            yield from (Completion(name, -len(rest)) for name in self._options if name.startswith(rest))
        elif command in ("/save", "/load"):
            yield from self._paths.get_completions(Document(rest), complete_event)


class SavedHistory(History):
    """History of typed lines, in a file that only its owner can read: a JSON string per line, the newest last.

    A file that cannot be read or written is no obstacle to a conversation: it only goes unsaved.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """The newest first."""
        entries: list[str] = []
        with suppress(OSError):
            raw, size = self._tail()
            entries = [valid_unicode(entry) for entry in map(_entry, raw.split(b"\n")) if entry is not None]
            entries = entries[-MOST_ENTRIES:]
            if size > MOST_BYTES:
                self._shorten(entries[-MOST_ENTRIES // 2 :])
        return reversed(entries)

    def store_string(self, string: str) -> None:
        line = _line(string)
        if len(line) > LARGEST_ENTRY:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(self._path, _PRIVATE | os.O_APPEND | os.O_NONBLOCK, 0o600), "wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(line)

    def _tail(self) -> tuple[bytes, int]:
        """(the end of the file, its size)"""
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{self._path} is not a regular file")
            file.seek(max(0, status.st_size - MOST_BYTES))
            return file.read(MOST_BYTES), status.st_size

    def _shorten(self, entries: list[str]) -> None:
        lines = list(map(_line, entries))
        while sum(map(len, lines)) > MOST_BYTES // 2:
            lines = lines[len(lines) // 2 + 1 :]
        part = self._path.with_name(self._path.name + ".part")
        with os.fdopen(os.open(part, _PRIVATE | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(lines)
        os.replace(part, self._path)


def _line(entry: str) -> bytes:
    return json.dumps(valid_unicode(entry)).encode() + b"\n"


def _entry(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, str) else None
