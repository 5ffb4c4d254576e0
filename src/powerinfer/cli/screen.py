"""Text on a terminal: words stay whole at its right edge, and styles where it has them."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import Literal, TextIO

Style = Literal["bold", "dim", "yellow", "red"]

_CODES: dict[Style, str] = {"bold": "1", "dim": "2", "yellow": "33", "red": "31"}
RESET = "\x1b[0m"
USUAL = 80  # columns where a terminal does not say how many it has
HELD_BACK = 32  # columns before the edge where a word is only shown once it is whole
MOST_BEGIN = 64  # characters of a line that are kept to tell what it is

_PARTS = re.compile(r"\n|[ \t]+|[^ \t\n]+")
_FENCE = re.compile(r"[ \t]*(```|~~~)")
_TABLE = re.compile(r"[ \t]*\|")
_HEADING = re.compile(r"#{1,6}[ \t]")
_MARKS = re.compile(r"[ \t]*(?:(?:[-*+•>]|\d{1,3}[.)])[ \t]+)*")
"""Marks before the text of a list's item or a quotation, whose next lines begin below that text."""
# Scripts that are written without spaces, a line of which may end after any character but before no closing mark.
_UNSPACED = (  # compiled when it is used, which takes a millisecond
    "[\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60\U00020000-\U0003fffd]"
)
_CLOSING = frozenset("、。〉》」』】〕〗〙〛，．：；！？）］｝…ー々")


def has_styles(stream: TextIO) -> bool:
    """Whether styles may be written to a stream: a terminal that has them, whose user does not decline them."""
    # https://no-color.org, https://bixense.com/clicolors
    declined = os.environ.get("NO_COLOR") or os.environ.get("CLICOLOR") == "0"
    return not declined and os.environ.get("TERM", "dumb") != "dumb" and stream.isatty()


def styled(text: str, style: Style, stream: TextIO) -> str:
    """A text as a stream shows it in a style; as it is where it has none."""
    return f"\x1b[{_CODES[style]}m{text}{RESET}" if text and has_styles(stream) else text


def columns(stream: TextIO) -> int:
    """The width of a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL
    except (OSError, ValueError):
        return USUAL


def text_width(text: str) -> int:
    """The columns that a text without line breaks takes."""
    if text.isascii():
        return len(text)
    return sum(map(_character_width, text))


def _character_width(character: str) -> int:
    if character == "\ufe0f":  # makes an emoji of the character before it
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class Wrapping:
    """A text that arrives in pieces, with line breaks between words where a line of the terminal ends.

    Code between fences and tables keep their lines. A word that is longer than a line, or than `HELD_BACK` and begun
    before that is seen, is broken by the terminal. No line ends with spaces.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bold = has_styles(stream)
        self._out: list[str] = []
        self._columns = USUAL
        self._at = 0  # columns of the line that are written
        self._spaces = ""  # to write before the next word
        self._word = ""  # what is not written yet of it
        self._begun = False  # whether some of the word is
        self._begin = ""  # of the line
        self._in_heading = False
        self._fence = ""  # the mark that ends the code

    def push(self, text: str) -> str:
        """Text to write now, of what has come so far."""
        self._columns = columns(self._stream)
        for part in _PARTS.findall(text):
            if part == "\n":
                self._end_line()
                continue
            if len(self._begin) < MOST_BEGIN:
                self._begin += part
            if part.isspace():
                self._end_word()
                self._spaces += part
            elif part.isascii():
                self._add(part)
            else:
                self._add_unspaced(part)
        return self._take_output()

    def flush(self) -> str:
        """Text to write at the end: the rest."""
        self._end_word()
        self._spaces = ""
        self._end_style()
        return self._take_output()

    def _take_output(self) -> str:
        output = "".join(self._out)
        self._out.clear()
        return output

    def _end_line(self) -> None:
        self._end_word()
        self._end_style()
        self._out.append("\n")
        if fence := _FENCE.match(self._begin):
            if not self._fence:
                self._fence = fence[1]
            elif self._fence == fence[1]:
                self._fence = ""
        self._at, self._spaces, self._begin = 0, "", ""

    def _end_style(self) -> None:
        if self._in_heading:
            self._out.append(RESET)
            self._in_heading = False

    def _add_unspaced(self, text: str) -> None:
        """Add letters, each of which may be a word."""
        at = 0
        for match in re.finditer(_UNSPACED, text):
            if between := text[at : match.start()]:
                self._add(between)
            if match[0] not in _CLOSING:
                self._end_word()
            self._add(match[0])
            at = match.end()
        if rest := text[at:]:
            if at:
                self._end_word()
            self._add(rest)

    def _add(self, letters: str) -> None:
        """Add letters to the word, and write them unless the word may have to begin another line."""
        self._word += letters
        if self._begun or self._fence or _TABLE.match(self._begin):
            self._write()
            return
        width = text_width(self._word)
        heading = self._bold and not self._at and not self._word.strip("#")  # it is shown with the word after it
        room = self._columns - self._at - text_width(self._spaces.expandtabs())
        if width > self._columns or (room - width >= HELD_BACK and not heading):
            self._write()

    def _end_word(self) -> None:
        if self._word:
            before = text_width(self._spaces.expandtabs())
            indent = self._indent()
            if self._at + before + text_width(self._word) > self._columns and self._at > indent:
                self._out.append("\n")
                self._at, self._spaces = 0, " " * indent
            self._write()
        self._begun = False

    def _indent(self) -> int:
        """The columns before the text of this line."""
        marks = _MARKS.match(self._begin)
        width = text_width(marks[0].expandtabs()) if marks is not None else 0
        return width if width <= self._columns // 3 else 0

    def _write(self) -> None:
        if self._bold and not self._at and not self._fence and _HEADING.match(self._begin):
            self._in_heading = True
            self._out.append("\x1b[1m")
        text = self._spaces + self._word
        self._out.append(text)
        self._at += text_width(text.expandtabs())
        if self._at > self._columns:  # the terminal broke it
            self._at = (self._at - 1) % self._columns + 1
        self._spaces, self._word, self._begun = "", "", True
