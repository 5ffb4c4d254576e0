"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError
from powerinfer.formats import bpe
from powerinfer.formats.pre_tokenizers import PRE_TOKENIZERS
from powerinfer.formats.tokenizer import Added, Encode, Engine, Tokenizer, Vocabulary, ends_of_generation

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's `tokenizer.*` keys describe; ModelError if they are malformed or unknown."""
    model = metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _gguf_byte_level, "llama": _gguf_scored, "t5": _gguf_unigram, "unigram": _gguf_unigram}
    if not isinstance(model, str):
        raise ModelError("the GGUF file has no tokenizer (key tokenizer.ggml.model)")
    if model not in makers:
        known = ", ".join(sorted(makers))
        raise ModelError(f"tokenizer.ggml.model {model[:40]!r} is not supported; supported: {known}")
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
            raise ModelError(f"tokenizer.ggml.{name} is missing or not a list of strings: the tokenizer is unusable")
        return values

    def numbers(self, name: str, kind: str) -> Any:
        """A numeric array of one entry per token: numpy, [vocab]; None when the key is absent."""
        import numpy as np

        values = self._metadata.get(f"tokenizer.ggml.{name}")
        if values is None:
            return None
        try:
            small = isinstance(values, list) and name == "token_type"  # a list of 49,000: 0.5 ms instead of 3
            array = np.frombuffer(bytes(values), np.uint8) if small else np.asarray(values)
        except (TypeError, ValueError):
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
        try:
            token = -1 if isinstance(value, bool) else index(value)
        except TypeError:
            token = -1
        if not 0 <= token < len(self.pieces):
            name = f"tokenizer.ggml.{name}_token_id"
            raise ModelError(f"{name} {str(value)[:40]!r} is not one of the {len(self.pieces)} tokens")
        return token

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, (bool, int)):
            raise ModelError(f"tokenizer.ggml.{name} must be true or false")
        return bool(value)

    def raw(self, name: str) -> bytes | None:
        import numpy as np

        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        try:
            return np.asarray(value).astype(np.uint8, casting="unsafe").tobytes()
        except (TypeError, ValueError) as error:
            raise ModelError(f"tokenizer.ggml.{name} must be an array of bytes") from error

    def charsmap(self) -> bytes | None:
        """SentencePiece's table of replacements: the size of a trie (32 bits), the trie in words, and its texts."""
        data = self.raw("precompiled_charsmap")
        if not data:
            return None
        trie = int.from_bytes(data[:4], "little")
        if len(data) < 8 or trie % 4 or not 4 <= trie <= len(data) - 4:
            raise ModelError("tokenizer.ggml.precompiled_charsmap is malformed")
        return data

    def vocabulary(self, **fields: Any) -> Vocabulary:
        """A Vocabulary with the fields that all models share, completed by `fields`."""
        ends = {at for at in map(self.token, ("eos", "eot", "eom")) if at is not None}
        special = {at for at, kind in self.types.items() if kind in (CONTROL, UNKNOWN)} | ends
        special |= {at for at in (self.token("bos"),) if at is not None}
        added = [Added(self.pieces[at], at, special=True) for at in special if self.pieces[at]]
        literal = [at for at, kind in self.types.items() if kind == USER_DEFINED and self.pieces[at]]
        added += [Added(self.pieces[at], at, special=False) for at in literal]
        ends |= ends_of_generation(added)
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ModelError("tokenizer.chat_template must be a string")
        return Vocabulary(
            piece=self.pieces.__getitem__,
            size=len(self.pieces),
            added=tuple(sorted({token.id: token for token in reversed(added)}.values(), key=lambda token: token.id)),
            bos_id=self.token("bos"),
            eos_id=self.token("eos"),
            eos_ids=frozenset(ends),
            unk_id=self.token("unknown"),
            chat_template=template,
            **fields,
        )


def _gguf_byte_level(gguf: _GGUF) -> Tokenizer:
    name = gguf._metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str):
        raise ModelError("the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): convert the model again")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {name[:40]!r} (tokenizer.ggml.pre) is not supported: how this model splits text into words "
            "is not known here; use its Hugging Face folder, whose tokenizer.json says it"
        )
    pre, merges = PRE_TOKENIZERS[name], gguf.strings("merges")
    if "\n".join(merges).count(" ") != len(merges):
        raise ModelError("tokenizer.ggml.merges must hold two pieces with one space between them in every entry")
    vocabulary = gguf.vocabulary(
        byte_level=True, add_bos=gguf.flag("add_bos_token", pre.add_bos), add_eos=gguf.flag("add_eos_token", False)
    )

    def build() -> Engine:
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

        pairs: Any = [tuple(entry.split(" ")) for entry in merges]
        engine = Tokenizer(models.BPE(gguf.vocab, pairs, ignore_merges=pre.ignore_merges))
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits_alone else []
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.pre_tokenizer = pre_tokenizers.Sequence([*digits, *splits, level])
        if pre.nfc:
            engine.normalizer = normalizers.NFC()
        return _with_added(engine, vocabulary)

    def small() -> Encode:
        words = bpe.ascii_words(("[0-9]", *pre.patterns) if pre.digits_alone else pre.patterns)
        return bpe.SmallByteBPE(gguf.vocab, merges, words, pre.ignore_merges).encode

    return Tokenizer(_with_bos(vocabulary), build, small)


def _gguf_scored(gguf: _GGUF) -> Tokenizer:
    scores = _scores(gguf)
    prefix = gguf.flag("add_space_prefix", True)
    vocabulary = gguf.vocabulary(
        byte_level=False,
        byte_pieces=_byte_pieces(gguf),
        strip_space=prefix,
        add_bos=gguf.flag("add_bos_token", True),
        add_eos=gguf.flag("add_eos_token", False),
    )
    atoms = frozenset(gguf.pieces[at] for at in {*gguf.types, *(token.id for token in vocabulary.added)})

    def build() -> Engine:
        from tokenizers import Tokenizer, models, normalizers

        unknown = None if vocabulary.unk_id is None else gguf.pieces[vocabulary.unk_id]
        pairs = bpe.score_merges(gguf.vocab, scores, atoms)
        fallback = bool(vocabulary.byte_pieces)
        engine = Tokenizer(models.BPE(gguf.vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=fallback))
        first = [normalizers.Prepend("▁")] if prefix else []
        engine.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        return _with_added(engine, vocabulary)

    def small() -> Encode:
        return bpe.SmallScoredBPE(gguf.vocab, scores, atoms, vocabulary.unk_id, prefix).encode

    return Tokenizer(_with_bos(vocabulary), build, small)


def _gguf_unigram(gguf: _GGUF) -> Tokenizer:
    scores = _scores(gguf)
    prefix, squeeze = gguf.flag("add_space_prefix", True), gguf.flag("remove_extra_whitespaces", True)
    charsmap = gguf.charsmap()
    vocabulary = gguf.vocabulary(
        byte_level=False,
        byte_pieces=_byte_pieces(gguf),
        strip_space=prefix,
        add_bos=gguf.flag("add_bos_token", False),
        add_eos=gguf.flag("add_eos_token", True),
    )

    def build() -> Engine:
        from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

        pairs = list(zip(gguf.pieces, scores, strict=True))
        options = (vocabulary.unk_id, bool(vocabulary.byte_pieces))
        engine = Tokenizer(models.Unigram(pairs, *options))
        steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
        if squeeze:
            steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if steps:
            engine.normalizer = normalizers.Sequence(steps)
        engine.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always" if prefix else "never")
        # The model would find its special tokens in plain text too, so it gets them under names that occur in no text.
        hidden = {at: f"\ufffe{at}" for at, kind in gguf.types.items() if kind in (CONTROL, UNKNOWN)}
        plain = [(hidden.get(at, piece), score) for at, (piece, score) in enumerate(pairs)]
        return _with_added(engine, vocabulary, models.Unigram(plain, *options))

    return Tokenizer(_with_bos(vocabulary), build)


def _with_added(engine: tokenizers.Tokenizer, vocabulary: Vocabulary, plain_model: Any = None) -> Engine:
    from tokenizers import AddedToken

    engine.add_tokens([AddedToken(token.text, special=token.special, normalized=False) for token in vocabulary.added])
    return Engine(engine, plain_model)


def _with_bos(vocabulary: Vocabulary) -> Vocabulary:
    if vocabulary.add_bos and vocabulary.bos_id is None:
        raise ModelError("tokenizer.ggml.add_bos_token is true but tokenizer.ggml.bos_token_id is missing")
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
