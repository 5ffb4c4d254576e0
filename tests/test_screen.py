"""Text on a terminal: words stay whole at its edge, and styles are written where they are wanted."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer.cli import screen
from powerinfer.cli.common import Output
from powerinfer.cli.screen import HELD_BACK, Wrapping, has_styles, styled, text_width

SETTINGS = ("NO_COLOR", "CLICOLOR", "TERM")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(screen, "columns", lambda stream: 40)


def shown(*pieces: str, stream: io.StringIO | None = None) -> str:
    """What a terminal of 40 columns is sent for a text that arrives in pieces."""
    wrapping = Wrapping(io.StringIO() if stream is None else stream)
    return "".join(map(wrapping.push, pieces)) + wrapping.flush()


WORDS = st.text("ab,.-é漢ก", min_size=1, max_size=HELD_BACK // 2)


@given(st.lists(st.tuples(WORDS, st.sampled_from([" ", "  ", "\t", "\n", "\n\n", " \n"]))), st.data())
@settings(max_examples=200, deadline=None)
def test_words_stay_whole(text: list[tuple[str, str]], data: st.DataObject) -> None:
    whole = "".join(word + space for word, space in text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=9)))
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    lines = shown(*pieces).split("\n")
    assert all(text_width(line.expandtabs()) <= 40 or "\t" in line for line in lines)
    assert not any(line.endswith((" ", "\t")) for line in lines)
    unspaced = [word for word, _ in text if "漢" in word]  # a line may end after each of their characters
    if not unspaced:
        assert [word for line in lines for word in line.split()] == whole.split()
    assert "".join("".join(lines).split()) == "".join(whole.split())
    assert whole.count("\n") <= len(lines) - 1


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Rayleigh scattering is the reason for an additive", ["Rayleigh scattering is the reason for an", "additive"]),
        ("a" * 39 + " b", ["a" * 39, "b"]),
        ("a" * 38 + " b", ["a" * 38 + " b"]),
        ("see " + "a" * 50 + " b", ["see " + "a" * 50 + " b"]),  # broken by the terminal alone
        ("漢" * 25, ["漢" * 20, "漢" * 5]),
        ("漢" * 20 + "。漢", ["漢" * 19, "漢。漢"]),
        ("- " + "word " * 9, ["- word word word word word word word", "  word word"]),
        (" 12. " + "word " * 9, [" 12. word word word word word word word", "     word word"]),
        ("| a" + " | word" * 9 + " |", ["| a" + " | word" * 9 + " |"]),
        ("```sh\n" + "word  " * 9 + "\n```\n" + "word " * 9, ["```sh", ("word  " * 9).rstrip(), "```",
            "word word word word word word word word", "word"]),
        ("~~~\n```\n" + "word " * 9 + "\n~~~", ["~~~", "```", ("word " * 9).rstrip(), "~~~"]),
        ("👍🏽 " * 14, ["👍🏽 " * 7 + "👍🏽", "👍🏽 " * 5 + "👍🏽"]),
    ],
)  # fmt: skip
def test_lines(text: str, lines: list[str]) -> None:
    assert shown(text).split("\n") == shown(*text).split("\n") == lines


def test_a_word_is_shown_at_once_where_it_cannot_reach_the_edge() -> None:
    wrapping = Wrapping(io.StringIO())
    assert wrapping.push("Hel") == "Hel" and wrapping.push("lo the") == "lo"
    assert wrapping.push("re") == "", "three columns more, and the longest word would not fit"
    assert wrapping.push("!\n") == " there!\n"
    assert wrapping.push("a" * 20) == "" and wrapping.flush() == "a" * 20


def test_a_terminal_may_change_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapping = Wrapping(io.StringIO())
    assert wrapping.push("word " * 8) == " ".join(["word"] * 8)
    monkeypatch.setattr(screen, "columns", lambda stream: 20)
    assert wrapping.push("\n" + "word " * 8) == "\n" + " ".join(["word"] * 4) + "\n" + " ".join(["word"] * 4)


def test_headings_are_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "## Why is it blue\n#tag # x\n```\n# code\n```"
    assert shown(text, stream=Terminal()) == text, "no TERM"
    monkeypatch.setenv("TERM", "xterm")
    bold = text.replace("## Why is it blue", "\x1b[1m## Why is it blue\x1b[0m")
    assert shown(text, stream=Terminal()) == shown(*text, stream=Terminal()) == bold
    assert shown(text) == text


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "CLICOLOR": "0"}, False),
        ({"TERM": "xterm", "CLICOLOR": "1"}, True),
    ],
)
def test_styles_can_be_declined(settings: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert has_styles(Terminal()) is wanted and not has_styles(io.StringIO())
    assert styled("a", "dim", Terminal()) == ("\x1b[2ma\x1b[0m" if wanted else "a")
    assert styled("", "dim", Terminal()) == ""


def test_only_a_terminal_gets_line_breaks_and_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = "# Head\n" + "word \t" * 12
    for stream, verbatim in ((io.StringIO(), False), (Terminal(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", io.StringIO() if not stream.isatty() else Terminal())
        out = Output(json_mode=False)
        if verbatim:
            out.verbatim()
        out.text(text)
        out.thought("Hm " * 20)
        out.flush()
        out.aside("(stopped)")
        said = sys.stderr.getvalue()  # type: ignore[attr-defined]
        assert (stream.getvalue() == text) is (verbatim or not stream.isatty())
        if not stream.isatty():
            assert said == "(stopped)\n"
        else:
            assert said.endswith("\x1b[2m(stopped)\x1b[0m\n") and said.startswith("\x1b[2mHm")
            assert "Hm Hm Hm\nHm Hm Hm" in said
