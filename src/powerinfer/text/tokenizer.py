"""Text to token ids and back, from the metadata of a GGUF file or the tokenizer files of a Hugging Face folder.

The ids are those of `transformers`: the engine is the `tokenizers` library, built on first use because loading a
vocabulary takes tens of milliseconds. Until then short ASCII texts are encoded by `formats.bpe` and everything is
decoded here, so that a process with a short prompt never needs it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.windows import WINDOW, find
from powerinfer.text import bpe

if TYPE_CHECKING:
    import tokenizers

# A model may end its answer with any of these; not every file lists them all, or has them as control tokens.
_END_OF_GENERATION = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>",
    "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<｜end▁of▁sentence｜>",
    # where a model of code has filled a gap: the padding, the next repository, the next file
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))  # fmt: skip

LONG = 4096
"""Characters of a text from which on it is encoded as a batch of one: the library lets other Python threads run only
while it encodes batches, and encodes up to a megabyte a second."""

PIECE = 1 << 18  # characters, of which `Tokenizer.excess` encodes pieces
SEAM = 64  # tokens that two such pieces may have more than their text as a whole

Encode = Callable[[str], list[int]]
"""Ids of ASCII text in which nothing is special."""


@dataclass(frozen=True)
class Added:
    """A token that is matched in the text before the vocabulary is applied."""

    text: str
    id: int
    special: bool  # a control token: parsed only if special tokens are enabled, hidden on decoding
    lstrip: bool = False  # includes the white space before it (after it: rstrip)
    rstrip: bool = False


def ends_of_generation(tokens: Mapping[str, int], special: Container[int] = ()) -> dict[str, int]:
    """The tokens that end an answer by their names, whatever their type, and whatever else a model's files say.

    tokens: the id of each text; special: those that are control tokens. In the formats of gpt-oss and Solar, which have
    `<|return|>`, `<|call|>` and the like, `<|end|>` ends a message, and another one may follow. Beside other ends a
    `</s>` that is no control token is HTML's, of what is struck out: Gemma and Qwen have one.
    """
    ends = {name: tokens[name] for name in _END_OF_GENERATION if name in tokens}
    if ends.keys() & {"<|call|>", "<|calls|>"} and ends.keys() & {"<|return|>", "<|flush|>"}:
        ends.pop("<|end|>", None)
    if "</s>" in ends and ends["</s>"] not in special and len(ends) > 1:
        del ends["</s>"]
    return ends


@dataclass(frozen=True)
class Vocabulary:
    """The data of a tokenizer, besides its engine.

    piece: text of a token id in the vocabulary, None if there is none. byte_level: pieces spell bytes in
    GPT-2's alphabet; otherwise they are text with "▁" for a space, and byte_pieces maps ids to bytes. added_as_pieces:
    added tokens are spelled so, too (in folders); otherwise their texts are what they stand for.
    strip_space: decoding drops one leading space, the one that encoding puts there. before, after: what encoding puts
    around a text where that is neither nothing nor the tokens of add_bos and add_eos. chat_templates: the source of
    each by its name; "default" is the one for all that no other name is for. notes: lines for the user.
    """

    piece: Callable[[int], str | None]
    size: int
    byte_level: bool
    added: tuple[Added, ...] = ()
    added_as_pieces: bool = False
    byte_pieces: dict[int, int] = field(default_factory=dict)
    strip_space: bool = False
    bos_id: int | None = None
    eos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    unk_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    chat_templates: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    infill: Mapping[str, int] = field(default_factory=dict)  # tokens around the parts of a file, where it states them


class Engine:
    """The native tokenizer `full`, once with its special tokens and, sharing its vocabulary, without them.

    `inner` is for text that is not at the start: some tokenizers put a space before the whole text only.
    plain_model: the vocabulary for text without special tokens, if it differs from that of `full`.
    """

    def __init__(self, full: tokenizers.Tokenizer, plain_model: Any = None) -> None:
        full.no_truncation()
        full.no_padding()
        self._full = full
        self._plain = _drop_special(full, plain_model or full.model, full.pre_tokenizer)
        self._inner = self._plain
        state = b"null" if full.pre_tokenizer is None else full.pre_tokenizer.__getstate__()
        if b'"prepend_scheme":"first"' in state:
            inner = _pre_tokenizer(state.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
            self._inner = _drop_special(full, plain_model or full.model, inner)

    def encode(self, text: str, special: bool, first: bool) -> list[int]:
        engine = self._full if special else self._plain if first else self._inner
        if len(text) > LONG:
            encoded = engine.encode_batch_fast([text], add_special_tokens=False)[0]
        else:
            encoded = engine.encode(text, add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def to_json(self) -> str:
        """The tokenizer.json that the library saves."""
        return self._full.to_str()


def _drop_special(full: tokenizers.Tokenizer, model: Any, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    import tokenizers

    plain = tokenizers.Tokenizer(model)
    if full.normalizer is not None:
        plain.normalizer = full.normalizer
    if pre_tokenizer is not None:
        plain.pre_tokenizer = pre_tokenizer
    added = full.get_added_tokens_decoder()
    plain.add_tokens([added[at] for at in sorted(added)])
    plain.encode_special_tokens = True
    return plain


def _pre_tokenizer(state: bytes) -> Any:
    """The pre-tokenizer that `state`, the library's own JSON for it, describes."""
    import json

    import tokenizers

    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": json.loads(state)})).pre_tokenizer


class Tokenizer:
    """Encodes text to ids and decodes ids to text. Made by `tokenizer_gguf` and `tokenizer_folder`.

    `bos_id`, `eos_id`: None where the model has none. `eos_ids`: every token that ends a generation.
    `chat_template`: the source of the model's own template; a dict of sources by name if it has several; None.
    `special_tokens`: the texts of special tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        build: Callable[[], Engine],
        small: Callable[[], Encode] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._build, self._build_small = build, small
        self._bytes: dict[int, bytes] = {}
        self._begun = False  # a text began with the token that is put before texts
        self._added = {token.id: token for token in vocabulary.added}
        self._special_ids = frozenset(token.id for token in vocabulary.added if token.special)
        # What is one character is that character, too.
        words = frozenset(token.id for token in vocabulary.added if len(token.text) > 1)
        self._never_plain = (self._special_ids & words) - {vocabulary.unk_id}
        self.vocab_size = vocabulary.size
        self.bos_id, self.eos_id, self.eos_ids = vocabulary.bos_id, vocabulary.eos_id, vocabulary.eos_ids
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        templates = vocabulary.chat_templates
        self.chat_template = templates.get("default") if templates.keys() <= {"default"} else templates
        self.special_tokens = tuple(token.text for token in vocabulary.added if token.special)

    @cached_property
    def _engine(self) -> Engine:
        with native_errors("the tokenizer"):
            return self._build()

    @cached_property
    def _small(self) -> Encode | None:
        return None if self._build_small is None else self._build_small()

    def prepare(self) -> None:
        """Build the native engine now, in any thread: for 262,144 pieces that takes a second or two, in which no other
        thread runs. And look up what `excess` needs."""
        _ = self._engine, self._longest

    def encode(self, text: str, *, special: bool = True, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        special: text such as `<|im_end|>` becomes the special token; False: it is plain text. add_bos: put the
        beginning-of-sequence token first, unless the text begins with it; None: as the model specifies, also for the
        end token. A lone surrogate, which no UTF-8 text can hold, counts as U+FFFD.
        """
        return self._framed(self._encode(valid_unicode(text), special), add_bos)

    def encode_masked(self, text: str, plain: Sequence[tuple[int, int]], *, add_bos: bool | None = None) -> list[int]:
        """`encode` with special tokens, except that those touching a span of `plain` are plain text.

        plain: [start, end) in characters, in order and apart from each other.
        """
        if not plain:
            return self.encode(text, add_bos=add_bos)
        ids: list[int] = []
        for run, token in self._cut(text, [token for token in self._added.values() if token.special], plain):
            ids += [token.id] if token else self._encode(valid_unicode(run), False, first=not ids)
        return self._framed(ids, add_bos)

    def excess(self, text: str, limit: int) -> int:
        """Minimum number of tokens of `text`, if these are more than `limit`; otherwise 0.

        A text that nobody can use is not encoded as a whole: that takes seconds and hundreds of times its bytes. No
        token spells more than the longest one, and pieces of a text have about as many tokens as the text.
        """
        count = -(-len(text) // self._longest)
        if count > limit or len(text) <= PIECE:
            return count if count > limit else 0
        count = 0
        for at in range(0, len(text), PIECE):
            count += max(0, len(self._encode(valid_unicode(text[at : at + PIECE]), True)) - SEAM)
            if count > limit:
                return count
        return 0

    def end_of(self, text: str, count: int) -> str:
        """The end of a text that has its last `count` tokens, and more."""
        return text if len(text) <= PIECE else text[-(count + SEAM) * self._longest :]

    def start_of(self, text: str, count: int) -> str:
        """The beginning of a text that has its first `count` tokens, and more."""
        return text if len(text) <= PIECE else text[: (count + SEAM) * self._longest]

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token."""
        return max((len(self._spell(at)) for at in range(self.vocab_size)), default=1) or 1

    def _framed(self, ids: list[int], add_bos: bool | None) -> list[int]:
        vocabulary = self._vocabulary
        before: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise RequestError("this model has no beginning-of-sequence token: encode without add_bos")
            before = [self.bos_id]
        after: list[int] = []
        if add_bos is None:
            before = before or list(vocabulary.before)
            ends = [self.eos_id] if self.add_eos and self.eos_id is not None else []
            after = ends or list(vocabulary.after)
        if before and ids[: len(before)] == before:
            self._say_begun()
            before = []
        return [*before, *ids, *after]

    def _say_begun(self) -> None:
        """Log, once, that a text begins with what would have been put before it."""
        if not self._begun:
            import logging

            self._begun = True
            logging.getLogger(__name__).warning(
                "a prompt begins with the model's beginning-of-sequence token: it gets no second one"
            )

    def _encode(self, text: str, special: bool, first: bool = True) -> list[int]:
        """first: whether the text is at the beginning."""
        if len(text) <= bpe.MAX_CHARS and text.isascii() and "_engine" not in self.__dict__ and self._small is not None:
            ids = self._encode_small(text, special, self._small)
        else:
            with native_errors("the tokenizer"):
                ids = self._engine.encode(text, special, first)
        forbidden = frozenset() if special else self._never_plain.intersection(ids)
        return self._encode_avoiding(ids, text, forbidden, first) if forbidden else ids

    def _encode_small(self, text: str, special: bool, small: Encode) -> list[int]:
        ids: list[int] = []
        for run, token in self._cut(text, [token for token in self._added.values() if special or not token.special]):
            ids += [token.id] if token else small(run)
        return ids

    def _encode_avoiding(self, ids: list[int], text: str, forbidden: frozenset[int], first: bool) -> list[int]:
        """Ids of plain text that would contain the special tokens `forbidden`: it is split so that it cannot."""
        name = max((self._added[at].text for at in forbidden), key=len)
        cuts, at = [0], text.find(name)
        while at >= 0 and len(name) > 1:
            cuts.append(at + 1)
            at = text.find(name, at + 1)
        if len(cuts) == 1:  # its text is not its name
            if len(text) < 2:
                return ids  # nothing else spells this character
            cuts.append(len(text) // 2)
        parts = [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], None], strict=True)]
        return [at for n, part in enumerate(parts) for at in self._encode(part, False, first and n == 0)]

    def _cut(
        self, text: str, tokens: list[Added], spans: Sequence[tuple[int, int]] = ()
    ) -> Iterator[tuple[str, Added | None]]:
        """The text, split at `tokens`, leftmost and longest first, none touching a span."""
        present = {token.text: token for token in tokens if token.text and token.text in text}
        if not present:
            yield text, None
            return
        pattern = re.compile("|".join(map(re.escape, sorted(present, key=len, reverse=True))))
        longest = max(map(len, present))
        done, start, span = 0, 0, 0
        while match := find(pattern, text, start, longest):
            while span < len(spans) and spans[span][1] <= match.start():
                span += 1
            if span < len(spans) and spans[span][0] < match.end():
                start = match.start() + 1
                continue
            token = present[match[0]]
            run = text[done : match.start()]
            done = start = match.end()
            if token.lstrip:
                run = run.rstrip()
            if token.rstrip:
                while done < len(text) and text[done].isspace():
                    done += 1
                start = done
            if run:
                yield run, None
            yield "", token
        if text[done:]:
            yield text[done:], None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; ids outside the vocabulary are skipped. Bytes that are not UTF-8 become U+FFFD."""
        tokens = list(ids)
        data = b"".join(self._spelled(tokens[at : at + WINDOW], skip_special) for at in range(0, len(tokens), WINDOW))
        text = data.decode("utf-8", "replace")
        return text[1:] if self._vocabulary.strip_space and text[:1] == " " else text

    def _spelled(self, ids: list[int], skip_special: bool) -> bytes:
        """The bytes of some ids, each looked up once: other threads may run before the next ones, and soon."""
        hidden = self._special_ids if skip_special else frozenset()
        spelled = {token: b"" if token in hidden else self.token_bytes(token) for token in set(ids)}
        return b"".join(map(spelled.__getitem__, ids))

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder that takes one id at a time."""
        return StreamDecoder(self, skip_special)

    def token_text(self, token: int) -> str:
        """Text of one token on its own, a leading space and special tokens included."""
        return self.token_bytes(token).decode("utf-8", "replace")

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary that it was made from."""
        return self._vocabulary

    def to_json(self) -> str:
        """The `tokenizers` library's document for it, a tokenizer.json. One made from a GGUF file's metadata has no
        decoder and no post-processor: what they do is done here, by the `vocabulary`."""
        with native_errors("the tokenizer"):
            return self._engine.to_json()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about how it was read."""
        return self._vocabulary.notes

    def literal_text(self, token: int | None) -> str:
        """The text in which the token is seen when special tokens are looked for; empty for none."""
        if token is None:
            return ""
        return self._added[token].text if token in self._added else self.token_text(token)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` hides."""
        return self._special_ids

    @property
    def strips_space(self) -> bool:
        """Whether decoding drops a space that the text begins with."""
        return self._vocabulary.strip_space

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of one token on its own, which may be part of a character; empty for no token."""
        token = int(token)
        spelled = self._bytes.get(token)
        if spelled is None:
            spelled = self._bytes[token] = self._spell(token)
        return spelled

    def _spell(self, token: int) -> bytes:
        if token in self._added and not self._vocabulary.added_as_pieces:
            return self._added[token].text.encode()
        piece = self._vocabulary.piece(token) if 0 <= token < self.vocab_size else None
        if piece is None:
            return b""
        if not self._vocabulary.byte_level:
            byte = self._vocabulary.byte_pieces.get(token)
            return piece.replace("▁", " ").encode() if byte is None else bytes([byte])
        values = bpe.byte_values()
        return bytes(values[char] for char in piece) if all(char in values for char in piece) else piece.encode()


class StreamDecoder:
    """Decodes a growing sequence of ids: what `push` and `flush` return adds up to `decode` of all ids pushed.

    The bytes of an incomplete character, at most three, are held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._vocabulary.strip_space

    def push(self, token: int) -> str:
        """The text that `token` completes; often empty."""
        if self._skip and token in self._tokenizer._special_ids:
            return ""
        return self._first(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """The rest of the text: U+FFFD for an incomplete character, otherwise empty. Resets the decoder."""
        text = self._first(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._strip = self._tokenizer._vocabulary.strip_space
        return text

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def valid_unicode(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextmanager
def native_errors(noun: str) -> Iterator[None]:
    """Turns whatever the native library raises, panics included, into a ModelError of one line."""
    try:
        yield
    except (ModelError, RequestError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{noun} is malformed: {reason or type(error).__name__}") from error
