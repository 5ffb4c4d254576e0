"""Texts to profile a model with: files and folders, read in pieces, as windows of token ids.

A corpus is the argument of one --corpus: a text file, a JSONL file, or a folder of both. Only a piece of text is in
memory at a time; the token ids are in a temporary file. Conversations are read as the model is used: through its chat
template, if it has one.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.mapped import shown
from powerinfer.progress import Progress, Say, silent
from powerinfer.text.chat import ROLES, ChatTemplate, encode_chat

if TYPE_CHECKING:
    from powerinfer.text.tokenizer import Tokenizer

SAMPLE = "built-in sample"
SAMPLE_SOURCE = (
    "the beginnings of Alice's Adventures in Wonderland, Pride and Prejudice, A Tale of Two Cities, On the Origin of "
    "Species and Moby-Dick, and the Gettysburg Address: in the public domain"
)
JSONL = (".jsonl", ".ndjson")
TEXT = (".txt", ".text", ".md", ".markdown", ".rst", ".raw", *JSONL)
"""Suffixes of the files of a folder that are read."""

PIECE = 1 << 16  # characters encoded at once
LINE = 1 << 26  # maximum bytes of a line of JSON
CONVERSATION = 1 << 20  # maximum characters of a conversation, which is encoded at once
MOST_FAILURES = 8  # a template that fails so often in a row is broken
NOW = "2025-01-01T12:00:00"
"""The date that templates see, some of which write it: the same texts give the same tokens every day."""

SAYS = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT, and what templates call them."""


@dataclass(frozen=True)
class Conversation:
    """Turns, each (role, None if there is none; text)."""

    turns: tuple[tuple[str | None, str], ...]

    def text(self) -> str:
        """Lines `role: content`, for models without a chat template."""
        return "\n".join(what if who is None else f"{who}: {what}" for who, what in self.turns)

    def opening(self) -> Conversation:
        """Up to the user's first turn; no turns if there is none."""
        at = next((at for at, (who, _) in enumerate(self.turns) if SAYS.get(who or "", who) == "user"), -1)
        return Conversation(self.turns[: at + 1])

    def messages(self) -> list[dict[str, str]]:
        """Messages for a template. RequestError for a role that none takes, and for a conversation that is too long."""
        if sum(len(what) for _, what in self.turns) > CONVERSATION:
            raise RequestError(f"it is longer than {CONVERSATION} characters")
        names = [SAYS.get(who or "", who) for who, _ in self.turns]
        if strange := [who for who in names if who not in ROLES]:
            raise RequestError(f"the role {shown(strange[0] or '')} is unknown")
        return [{"role": ROLES[str(who)], "content": what} for who, (_, what) in zip(names, self.turns, strict=True)]


Piece = str | Conversation | NDArray[np.int32]
"""A piece of a text: text, a conversation, or token ids."""


@dataclass(frozen=True)
class Corpus:
    """A named text. paths: its files, in order; none: the built-in sample."""

    name: str
    paths: tuple[Path, ...]

    def pieces(self) -> Iterator[Piece]:
        """The text in pieces that end at line breaks if possible. RequestError if a file cannot be read."""
        if not self.paths:
            yield files("powerinfer.prepare").joinpath("sample.txt").read_text(encoding="utf-8")
        for path in self.paths:
            with _opened(path) as file:
                yield from _documents(file, path) if path.suffix.lower() in JSONL else _pieces(file, path)


def open_corpora(names: Sequence[str]) -> list[Corpus]:
    """The corpora of --corpus options, by default the built-in sample; their contents are not read yet.

    RequestError for a path that does not exist or has no texts, and for duplicates.
    """
    if not names:
        return [Corpus(SAMPLE, ())]
    paths = [Path(name).expanduser() for name in names]
    for path in paths:
        if "\0" in str(path):
            raise RequestError(f"corpus {shown(path)} cannot be the name of a file")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise RequestError("a corpus is given twice")
    short = [path.name or str(path) for path in paths]
    return [
        Corpus(name if short.count(name) == 1 else str(path), _files(path))
        for name, path in zip(short, paths, strict=True)
    ]


def _files(path: Path) -> tuple[Path, ...]:
    try:
        if not path.is_dir():
            with _opened(path) as file:
                if not os.fstat(file.fileno()).st_size:
                    raise RequestError(f"corpus {path} is empty")
                return (path,)
        paths = sorted(
            Path(folder) / name
            for folder, folders, names in os.walk(path, onerror=_raise)
            for name in names
            if name.lower().endswith(TEXT) and not name.startswith(".")
        )
    except OSError as error:
        raise RequestError(f"corpus {path} cannot be read: {error.strerror or error}") from None
    if not paths:
        raise RequestError(f"the folder {path} holds no text: nothing in it ends in {', '.join(TEXT)}")
    return tuple(paths)


def _raise(error: OSError) -> None:
    raise error


def _opened(path: Path) -> BinaryIO:
    """The open file; RequestError unless it is a regular file: a pipe or a device may never end."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise RequestError(f"corpus {path} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RequestError(f"corpus {path} is not a regular file")
    return file


def _pieces(file: BinaryIO, path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, at = "", 0
    while True:
        raw = _read(file, path)
        split = len(decoder.getstate()[0])  # bytes of an incomplete character
        try:
            rest += decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            raise RequestError(f"corpus {path} is not UTF-8 text: byte {at - split + error.start} is invalid") from None
        if "\0" in rest:
            raise RequestError(f"corpus {path} is not text: it holds a zero byte")
        at += len(raw)
        if not raw:
            break
        cut = _line_end(rest)
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _read(file: BinaryIO, path: Path) -> bytes:
    try:
        return file.read(PIECE)
    except OSError as error:
        raise RequestError(f"corpus {path} cannot be read: {error.strerror or error}") from None


def _line_end(text: str) -> int:
    """Position of a cut: after the last line break before no white space, else at the last space, else at the end."""
    cut = len(text)
    while (cut := text.rfind("\n", 0, cut) + 1) > 0:
        if cut < len(text) and not text[cut].isspace():
            return cut
        cut -= 1
    if len(text) < 4 * PIECE:
        return 0
    return text.rfind(" ") if " " in text[1:] else len(text)


def _documents(file: BinaryIO, path: Path) -> Iterator[str | Conversation]:
    """The texts of a JSONL file: of each line's "text", or its "messages" or "conversations", one after another."""
    number = 0
    while line := file.readline(LINE + 1):
        number += 1
        place = f"corpus {path}, line {number}"
        if len(line) > LINE:
            raise RequestError(f"{place}: longer than {LINE >> 20} MiB, which no text is")
        if not line.strip():
            continue
        try:
            text = _document(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
        except UnicodeDecodeError:
            raise RequestError(f"{place}: not UTF-8") from None
        except RecursionError:
            raise RequestError(f"{place}: nested too deeply") from None
        except ValueError as error:
            reason = str(error).split(": line 1 ")[0]
            raise RequestError(f"{place}: not JSON ({reason})") from None
        if text is None:
            raise RequestError(f'{place}: neither "text" nor "messages" nor "conversations" with text in it')
        if isinstance(text, Conversation):
            if text.turns:
                yield text
        elif text:
            yield from _as_document(text)


def _as_document(text: str) -> Iterator[str]:
    """A text in pieces, and a blank line."""
    for at in range(0, len(text), PIECE):
        yield text[at : at + PIECE]
    yield "\n\n"


def _document(value: Any) -> str | Conversation | None:
    """The text of a line, None if it has none."""
    if type(value) is not dict:
        return None
    if type(value.get("text")) is str:
        return str(value["text"])
    for turns, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if type(value.get(turns)) is list:
            turns_read = [_turn(turn, role, content) for turn in value[turns]]
            return None if None in turns_read else Conversation(tuple(turn for turn in turns_read if turn is not None))
    return None


def _turn(turn: Any, role: str, content: str) -> tuple[str | None, str] | None:
    if type(turn) is not dict:
        return None
    speaker, text = turn.get(role), turn.get(content)
    if type(text) is list:  # parts: only text is used
        text = "".join(part["text"] for part in text if type(part) is dict and type(part.get("text")) is str)
    if type(text) is not str:
        return None
    return speaker if type(speaker) is str else None, text


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Windows:
    """Texts as windows of token ids, int32 [windows, size]; those of a corpus together, in its order.

    number: windows of each corpus; digest: hex SHA-256 of all of it.
    """

    ids: NDArray[np.int32]
    corpora: tuple[str, ...]
    number: tuple[int, ...]
    digest: str

    @property
    def size(self) -> int:
        """Tokens of a window."""
        return int(self.ids.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return self.ids.size

    def corpus_of(self, window: int) -> int:
        """The corpus that a window belongs to."""
        return int(np.searchsorted(np.cumsum(self.number), window, side="right"))


def read_windows(
    corpora: Sequence[Corpus],
    tokenizer: Tokenizer,
    size: int,
    limit: int,
    progress: Progress = silent,
    template: ChatTemplate | None = None,
    say: Say = silent,
) -> Windows:
    """The corpora as windows of `size` tokens that do not overlap, as `evaluate.perplexity` cuts them.

    An incomplete last window is dropped. If the model starts texts with a BOS token, it replaces the first token of
    every window. limit: of all tokens; each corpus gets an equal share of what is left. template: renders
    conversations; those that it does not take are left out, and `say` tells how many. None: they become lines `role:
    content`. RequestError for a corpus that cannot be read or does not fill a window, ModelError for a broken template.
    progress: called with ("reading the corpus", tokens, limit).
    """
    assert size > 0
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    digest = hashlib.sha256(f"{size} {bos}".encode())
    number: list[int] = []
    with tempfile.TemporaryFile() as spool:
        for at, corpus in enumerate(corpora):
            room = max(1, (limit // size - sum(number)) // (len(corpora) - at))
            count = 0
            encoder = Encoder(tokenizer, template)
            for ids in _cut(corpus, encoder, size, room):
                if bos is not None:
                    ids[:, 0] = bos
                raw = ids.tobytes()
                digest.update(raw)
                spool.write(raw)
                count += len(ids)
                progress("reading the corpus", (sum(number) + count) * size, limit)
            if encoder.left_out:
                say(f"corpus {corpus.name}: {encoder.left_out_note}")
            number.append(count)
            digest.update(f"{corpus.name} {count}".encode(errors="surrogateescape"))
        progress("reading the corpus", limit, limit)
        spool.flush()
        ids = np.memmap(spool, np.int32, "r", shape=(sum(number), size))  # remains valid when the file is closed
    return Windows(ids, tuple(corpus.name for corpus in corpora), tuple(number), digest.hexdigest())


class Encoder:
    """Token ids of pieces. left_out: conversations that the template did not take."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = None if template is None else template.with_time(NOW)
        self.left_out = 0
        self._failures = 0  # in a row
        self._reason = ""

    def ids(self, pieces: Iterable[Piece]) -> Iterator[Sequence[int]]:
        """ModelError if the template seems to take no conversation."""
        for piece in pieces:
            if isinstance(piece, Conversation) and self._template is not None:
                yield self.chat(piece)
            elif isinstance(piece, Conversation):
                yield from self.ids(_as_document(piece.text()))
            elif isinstance(piece, str):
                yield self._tokenizer.encode(piece, special=False, add_bos=False)
            else:
                yield piece.tolist()

    def chat(self, conversation: Conversation, answer: bool = False) -> Sequence[int]:
        """A conversation through the template, nothing if it is left out. answer: with the start of the next answer."""
        assert self._template is not None
        try:
            ids = encode_chat(self._tokenizer, self._template, conversation.messages(), answer)
            self._failures = 0
            return ids
        except RequestError as error:
            reason = str(error)
        except ModelError as error:
            self._failures += 1
            if self._failures == MOST_FAILURES:
                raise
            reason = str(error)
        self.left_out += 1
        self._reason = self._reason or reason.partition("; --raw")[0]
        return []

    @property
    def left_out_note(self) -> str:
        return f"conversations left out: {self.left_out}; of the first one, {self._reason}"


def _cut(corpus: Corpus, encoder: Encoder, size: int, room: int) -> Iterator[NDArray[np.int32]]:
    """Windows of a corpus, at most `room`, int32 [some, size]."""
    rest: list[int] = []
    tokens = done = 0
    for fresh in encoder.ids(corpus.pieces()):
        tokens += len(fresh)
        rest += fresh
        count = min(len(rest) // size, room - done)
        if count:
            yield np.array(rest[: count * size], np.int32).reshape(count, size)
            done += count
            rest = rest[count * size :]
        if done == room:
            return
    if not done:
        also = f" ({encoder.left_out_note})" if encoder.left_out else ""
        raise RequestError(
            f"corpus {corpus.name} has {tokens} tokens{also}, less than one window of {size}: use a longer text, or a "
            "smaller --window"
        )
