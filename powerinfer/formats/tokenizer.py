"""Text to token ids and back, from the metadata of a GGUF file or the tokenizer files of a Hugging Face folder.

The ids are those of `transformers`: the engine is the `tokenizers` library, built on first need because handing it a
vocabulary takes tens of milliseconds. Until then short ASCII texts are encoded by `formats.bpe` and everything is
decoded here, so that a process with a short prompt never waits for it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from powerinfer.errors import ModelError, RequestError
from powerinfer.formats import bpe

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

# A model may end its answer with any of these; not every file names them all (the list of llama.cpp, without the ones
# that mean something else in some family).
END_OF_GENERATION = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS]"
    " <|end_of_text|> <end_of_utterance> <eos> </s>".split()
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text into words before it merges: the meaning of `tokenizer.ggml.pre`.

    pattern: Unicode regular expression of a word (classes inside brackets, for `bpe.ascii_words`).
    """

    pattern: str
    digits_alone: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a piece is taken whole
    add_bos: bool = False  # what a file that does not say means


_GPT2 = PreTokenizer(r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|[\s]+(?![^\s])|[\s]+")
_SMOLLM = PreTokenizer(_GPT2.pattern, digits_alone=True)
_LLAMA3 = PreTokenizer(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}]+|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = PreTokenizer(_LLAMA3.pattern.replace("{1,3}", ""), nfc=True)
_TEKKEN = PreTokenizer(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|[\p{N}]| ?[^\s\p{L}\p{N}]+[\r\n/]*|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ignore_merges=True,
    add_bos=True,
)
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "gpt2", "default"), _GPT2),
    "smollm": _SMOLLM,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}


class _SmallEncoder(Protocol):
    def encode(self, text: str) -> list[int]:
        """Ids of ASCII text in which nothing is special."""
        ...


@dataclass(frozen=True)
class Added:
    """A token that is cut out of the text before the vocabulary sees it."""

    text: str
    id: int
    special: bool  # a control token: parsed only where special tokens are wanted, hidden on decoding
    lstrip: bool = False  # takes the white space before it (after it: rstrip) along
    rstrip: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer needs besides its engine.

    piece: text of a token id as the vocabulary spells it, None where there is none. byte_level: pieces spell bytes in
    GPT-2's alphabet; otherwise they are text with "▁" for a space, and byte_pieces maps ids to the byte they stand for.
    strip_space: decoding drops one leading space, the one that encoding puts there.
    """

    piece: Callable[[int], str | None]
    size: int
    byte_level: bool
    added: tuple[Added, ...] = ()
    byte_pieces: dict[int, int] = field(default_factory=dict)
    strip_space: bool = False
    bos_id: int | None = None
    eos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    unk_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None


class _Engine:
    """The native tokenizer, once with its special tokens and once, sharing its vocabulary, without."""

    def __init__(self, full: tokenizers.Tokenizer) -> None:
        import tokenizers

        full.no_truncation()
        full.no_padding()
        self.full = full
        self.plain = tokenizers.Tokenizer(full.model)
        if full.normalizer is not None:
            self.plain.normalizer = full.normalizer
        if full.pre_tokenizer is not None:
            self.plain.pre_tokenizer = full.pre_tokenizer
        added = full.get_added_tokens_decoder()
        self.plain.add_tokens([added[at] for at in sorted(added)])
        self.plain.encode_special_tokens = True

    def encode(self, text: str, special: bool) -> list[int]:
        engine = self.full if special else self.plain
        return engine.encode(text, add_special_tokens=False).ids


class Tokenizer:
    """Encodes text to ids and decodes ids to text. Made by `tokenizer_from_gguf` and `tokenizer_from_folder`.

    `bos_id`, `eos_id`: None where the model has none. `eos_ids`: every token that ends a generation.
    `chat_template`: the model's own template source, or None.
    """

    def __init__(
        self, vocabulary: Vocabulary, build: Callable[[], tokenizers.Tokenizer], small: Callable[[], _SmallEncoder] | None
    ) -> None:
        self._vocabulary = vocabulary
        self._build, self._build_small = build, small
        self._bytes: dict[int, bytes] = {}
        self._added = {token.id: token for token in vocabulary.added}
        self._special_ids = frozenset(token.id for token in vocabulary.added if token.special)
        self.vocab_size = vocabulary.size
        self.bos_id, self.eos_id, self.eos_ids = vocabulary.bos_id, vocabulary.eos_id, vocabulary.eos_ids
        self.add_bos, self.add_eos = vocabulary.add_bos, vocabulary.add_eos
        self.chat_template = vocabulary.chat_template

    @cached_property
    def _engine(self) -> _Engine:
        with _native_errors("the tokenizer"):
            return _Engine(self._build())

    @cached_property
    def _small(self) -> _SmallEncoder | None:
        return None if self._build_small is None else self._build_small()

    def encode(self, text: str, *, special: bool = True, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        special: text such as `<|im_end|>` becomes the special token; False: it is plain text. add_bos: put the
        beginning-of-sequence token first; None: do with it, and with the end token, as the model says.
        A lone surrogate, which no UTF-8 text can hold, counts as U+FFFD.
        """
        return self._framed(self._encode(_valid_unicode(text), special), add_bos)

    def encode_masked(self, text: str, plain: Sequence[tuple[int, int]], *, add_bos: bool | None = None) -> list[int]:
        """As `encode` with special tokens, except that those touching a span [start, end) of `plain` are plain text."""
        if not plain:
            return self.encode(text, add_bos=add_bos)
        text = _valid_unicode(text) if len(_valid_unicode(text)) == len(text) else text
        ids: list[int] = []
        for run, token in self._cut(text, [token for token in self._added.values() if token.special], plain):
            ids += [token.id] if token else self._encode(_valid_unicode(run), False)
        return self._framed(ids, add_bos)

    def _framed(self, ids: list[int], add_bos: bool | None) -> list[int]:
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise RequestError("this model has no beginning-of-sequence token: encode without add_bos")
            ids = [self.bos_id, *ids]
        if add_bos is None and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        if len(text) <= bpe.MAX_CHARS and text.isascii() and "_engine" not in self.__dict__ and self._small is not None:
            ids = self._encode_small(text, special, self._small)
        else:
            with _native_errors("the tokenizer"):
                ids = self._engine.encode(text, special)
        forbidden = frozenset() if special else self._special_ids.intersection(ids) - {self._vocabulary.unk_id}
        return self._without(ids, text, forbidden) if forbidden else ids

    def _encode_small(self, text: str, special: bool, small: _SmallEncoder) -> list[int]:
        ids: list[int] = []
        for run, token in self._cut(text, [token for token in self._added.values() if special or not token.special]):
            ids += [token.id] if token else small.encode(run)
        return ids

    def _without(self, ids: list[int], text: str, forbidden: frozenset[int]) -> list[int]:
        """Plain text whose pieces came out as the special tokens `forbidden`: cut apart so that they cannot."""
        name = max((self._added[at].text for at in forbidden), key=len)
        parts = re.split(f"(?<={re.escape(name[:1])})(?={re.escape(name[1:])})", text) if len(name) > 1 else [text]
        if len(parts) == 1:
            return [at for at in ids if at not in forbidden]
        return [at for part in parts for at in self._encode(part, False)]

    def _cut(
        self, text: str, tokens: list[Added], spans: Sequence[tuple[int, int]] = ()
    ) -> Iterator[tuple[str, Added | None]]:
        """The text as runs and the `tokens` between them, leftmost and longest first, none touching a span."""
        present = {token.text: token for token in tokens if token.text and token.text in text}
        if not present:
            yield text, None
            return
        pattern = re.compile("|".join(map(re.escape, sorted(present, key=len, reverse=True))))
        done, start = 0, 0
        while match := pattern.search(text, start):
            blocked = [end for begin, end in spans if begin < match.end() and match.start() < end]
            if blocked:
                start = match.start() + 1
                continue
            token = present[match[0]]
            run = text[done : match.start()]
            done = start = match.end()
            if token.lstrip:
                run = run.rstrip()
            if token.rstrip:
                done = start = start + len(text[start:]) - len(text[start:].lstrip())
            if run:
                yield run, None
            yield "", token
        if text[done:]:
            yield text[done:], None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; ids outside the vocabulary say nothing. Bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(self._token_bytes(at) for at in ids if not (skip_special and at in self._special_ids))
        text = data.decode("utf-8", "replace")
        return text[1:] if self._vocabulary.strip_space and text[:1] == " " else text

    def stream(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder that takes one id at a time."""
        return StreamDecoder(self, skip_special)

    def token_text(self, token: int) -> str:
        """Text of one token on its own, a leading space and special tokens included."""
        return self._token_bytes(token).decode("utf-8", "replace")

    def _token_bytes(self, token: int) -> bytes:
        token = int(token)
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        if token in self._added:
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

    Bytes of a character whose end has not come yet are held back, at most three of them.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._vocabulary.strip_space

    def push(self, token: int) -> str:
        """The text that `token` completes; often empty."""
        if self._skip and token in self._tokenizer._special_ids:
            return ""
        return self._first(self._decoder.decode(self._tokenizer._token_bytes(token)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut off, else nothing. Starts afresh after it."""
        text = self._first(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._strip = self._tokenizer._vocabulary.strip_space
        return text

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def _valid_unicode(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextmanager
def _native_errors(what: str) -> Iterator[None]:
    """Turns whatever the native library raises, panics included, into a ModelError of one line."""
    try:
        yield
    except (ModelError, RequestError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{what} is malformed: {reason or type(error).__name__}") from error


# ---------------------------------------------------------------------------------------------------------------- GGUF


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's `tokenizer.*` keys describe; ModelError when they are malformed or unknown."""
    model = metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _gguf_byte_level, "llama": _gguf_scored, "t5": _gguf_unigram, "unigram": _gguf_unigram}
    if not isinstance(model, str):
        raise ModelError("the GGUF file has no tokenizer (key tokenizer.ggml.model)")
    if model not in makers:
        raise ModelError(f"tokenizer.ggml.model {model[:40]!r} is not supported; supported: {', '.join(sorted(makers))}")
    return makers[model](_GGUF(metadata))


class _GGUF:
    """Checked access to the tokenizer keys of a GGUF file."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.pieces = self.strings("tokens")
        self.vocab = dict(zip(self.pieces, range(len(self.pieces)), strict=True))
        if len(self.vocab) != len(self.pieces):
            twice = next(piece for at, piece in enumerate(self.pieces) if self.vocab[piece] != at)
            raise ModelError(f"tokenizer.ggml.tokens lists {twice[:40]!r} twice")
        self.types = self._types()

    def strings(self, name: str) -> list[str]:
        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not values or set(map(type, values)) != {str}:
            raise ModelError(f"tokenizer.ggml.{name} is missing or not a list of strings: the file holds no usable tokenizer")
        return values

    def numbers(self, name: str, kind: str) -> Any:
        """A numeric array of one entry per token: numpy, [vocab]; None when the key is absent."""
        import numpy as np

        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if values is None:
            return None
        try:
            array = np.asarray(values)
        except ValueError:
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in kind or array.shape != (len(self.pieces),):
            raise ModelError(f"tokenizer.ggml.{name} must hold one number for each of the {len(self.pieces)} tokens")
        return array

    def _types(self) -> dict[int, int]:
        """Type of every token that is not a normal one."""
        array = self.numbers("token_type", "iu")
        if array is None:
            return {}
        odd = (array != NORMAL).nonzero()[0]
        return dict(zip(odd.tolist(), array[odd].tolist(), strict=True))

    def token(self, name: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) < len(self.pieces):
            raise ModelError(f"tokenizer.ggml.{name}_token_id {str(value)[:40]} is not one of the {len(self.pieces)} tokens")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, (bool, int)):
            raise ModelError(f"tokenizer.ggml.{name} must be true or false")
        return bool(value)

    def bytes(self, name: str) -> bytes | None:
        import numpy as np

        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        try:
            return np.asarray(value).astype(np.uint8, casting="unsafe").tobytes()
        except (TypeError, ValueError) as error:
            raise ModelError(f"tokenizer.ggml.{name} must be an array of bytes") from error

    def vocabulary(self, **fields: Any) -> Vocabulary:
        """The part of a Vocabulary that is read the same way for every model. `fields` complete it."""
        eos = self.token("eos")
        ends = {self.token(name) for name in ("eos", "eot", "eom")} - {None}
        named = {self.token("bos"), *ends}
        special = sorted({at for at, kind in self.types.items() if kind in (CONTROL, UNKNOWN)} | (named - {None}))
        added = [Added(self.pieces[at], at, special=True) for at in special]
        added += [Added(self.pieces[at], at, special=False) for at, kind in self.types.items() if kind == USER_DEFINED]
        ends |= {token.id for token in added if token.special and token.text in END_OF_GENERATION}
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ModelError("tokenizer.chat_template must be a string")
        added = sorted({token.text: token for token in reversed(added) if token.text}.values(), key=lambda token: token.id)
        return Vocabulary(
            piece=self.pieces.__getitem__, size=len(self.pieces), added=tuple(added), bos_id=self.token("bos"),
            eos_id=eos, eos_ids=frozenset(ends), unk_id=self.token("unknown"), chat_template=template, **fields,
        )  # fmt: skip


def _gguf_byte_level(gguf: _GGUF) -> Tokenizer:
    name = gguf._metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str):
        raise ModelError("the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): convert the model again")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"pre-tokenizer {name[:40]!r} (tokenizer.ggml.pre) is not supported; supported: {known}")
    pre, merges = PRE_TOKENIZERS[name], gguf.strings("merges")
    if "\n".join(merges).count(" ") != len(merges):
        raise ModelError("tokenizer.ggml.merges must hold two pieces with one space between them in every entry")
    vocabulary = gguf.vocabulary(
        byte_level=True, add_bos=gguf.flag("add_bos_token", pre.add_bos), add_eos=gguf.flag("add_eos_token", False)
    )

    def build() -> tokenizers.Tokenizer:
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

        pairs = [tuple(entry.split(" ")) for entry in merges]
        engine = Tokenizer(models.BPE(gguf.vocab, pairs, ignore_merges=pre.ignore_merges))
        split = pre_tokenizers.Split(Regex(pre.pattern), "isolated")
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits_alone else []
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.pre_tokenizer = pre_tokenizers.Sequence([*digits, split, level])
        if pre.nfc:
            engine.normalizer = normalizers.NFC()
        return _with_added(engine, vocabulary)

    def small() -> _SmallEncoder:
        words = bpe.ascii_words(pre.pattern, pre.digits_alone)
        return bpe.SmallByteBPE(gguf.vocab, merges, words, pre.ignore_merges)

    return Tokenizer(_with_bos(vocabulary), build, small)


def _gguf_scored(gguf: _GGUF) -> Tokenizer:
    scores = _scores(gguf)
    prefix = gguf.flag("add_space_prefix", True)
    vocabulary = gguf.vocabulary(
        byte_level=False, byte_pieces=_byte_pieces(gguf), strip_space=prefix,
        add_bos=gguf.flag("add_bos_token", True), add_eos=gguf.flag("add_eos_token", False),
    )  # fmt: skip
    atoms = frozenset(gguf.pieces[at] for at in {*gguf.types, *(token.id for token in vocabulary.added)})

    def build() -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer, models, normalizers

        unknown = None if vocabulary.unk_id is None else gguf.pieces[vocabulary.unk_id]
        pairs = bpe.score_merges(gguf.vocab, scores, atoms)
        model = models.BPE(gguf.vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=bool(vocabulary.byte_pieces))
        engine = Tokenizer(model)
        first = [normalizers.Prepend("▁")] if prefix else []
        engine.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        return _with_added(engine, vocabulary)

    def small() -> _SmallEncoder:
        return bpe.SmallScoredBPE(gguf.vocab, scores, atoms, vocabulary.unk_id, prefix)

    return Tokenizer(_with_bos(vocabulary), build, small)


def _gguf_unigram(gguf: _GGUF) -> Tokenizer:
    scores = _scores(gguf)
    prefix, squeeze = gguf.flag("add_space_prefix", True), gguf.flag("remove_extra_whitespaces", True)
    charsmap = gguf.bytes("precompiled_charsmap")
    vocabulary = gguf.vocabulary(
        byte_level=False, byte_pieces=_byte_pieces(gguf), strip_space=prefix,
        add_bos=gguf.flag("add_bos_token", False), add_eos=gguf.flag("add_eos_token", True),
    )  # fmt: skip

    def build() -> tokenizers.Tokenizer:
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

        pairs = list(zip(gguf.pieces, scores, strict=True))
        engine = Tokenizer(models.Unigram(pairs, vocabulary.unk_id, bool(vocabulary.byte_pieces)))
        steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
        if squeeze:
            steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if steps:
            engine.normalizer = normalizers.Sequence(steps)
        engine.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always" if prefix else "never")
        return _with_added(engine, vocabulary)

    return Tokenizer(_with_bos(vocabulary), build, None)


def _with_added(engine: tokenizers.Tokenizer, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken

    engine.add_tokens([AddedToken(token.text, special=token.special, normalized=False) for token in vocabulary.added])
    return engine


def _with_bos(vocabulary: Vocabulary) -> Vocabulary:
    if vocabulary.add_bos and vocabulary.bos_id is None:
        raise ModelError("the tokenizer wants a beginning-of-sequence token but names none (tokenizer.ggml.bos_token_id)")
    return vocabulary


def _scores(gguf: _GGUF) -> list[float]:
    import numpy as np

    scores = gguf.numbers("scores", "f")
    if scores is None or not np.isfinite(scores).all():
        raise ModelError("tokenizer.ggml.scores must hold one finite score for every token")
    values: list[float] = scores.astype(np.float64).tolist()
    return values


def _byte_pieces(gguf: _GGUF) -> dict[int, int]:
    found = {at: gguf.pieces[at] for at, kind in gguf.types.items() if kind == BYTE}
    spelled = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for at, piece in found.items():
        if piece not in spelled:
            raise ModelError(f"token {at} is of type byte but spelled {piece[:40]!r}, not like <0x0A>")
    return {at: spelled[piece] for at, piece in found.items()}
