"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError
from powerinfer.formats import bpe
from powerinfer.formats.tokenizer import Added, Encode, Engine, Tokenizer, Vocabulary, ends_of_generation

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words before byte-level merges: the meaning of `tokenizer.ggml.pre`.

    patterns: Unicode regular expressions (classes inside brackets, for `bpe.ascii_words`). What the first one matches
    is split off, then what the next one matches in the pieces that are left, and so on.
    """

    patterns: tuple[str, ...]
    digits_alone: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a piece is not split
    add_bos: bool = False  # the default of files that do not state it


_GPT2 = PreTokenizer((r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|[\s]+(?![^\s])|[\s]+",))
_SMOLLM = PreTokenizer(_GPT2.patterns, digits_alone=True)
# Symbols that the tokenizers library counts as punctuation beside Unicode's.
_FALCON = PreTokenizer((r"[\p{P}$+<=>^`|~]+", *_GPT2.patterns, "[0-9][0-9][0-9]"))
_LLAMA3 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}]+|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ),
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = PreTokenizer((_LLAMA3.patterns[0].replace("{1,3}", ""),), nfc=True)
_QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|[\p{{N}}]| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ),
    nfc=True,
)
_TEKKEN = PreTokenizer(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|[\p{N}]| ?[^\s\p{L}\p{N}]+[\r\n/]*|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    ),
    ignore_merges=True,
    add_bos=True,
)
_GPT4O = PreTokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?"
        r"|[\p{N}]{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    )
)
_SEED = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}]+|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    )
)
_LETTERS = (  # those that have cases, as the first DeepSeek models count them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        rf"[\s]?[{_LETTERS}]+",
        "[\\s]?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"[\s]+$",
        _HAN_AND_HANGUL,
        r"[\p{N}]",
    )
)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"[\s]?[\p{L}]+", r"[\s]?[\p{P}]+", _HAN_AND_HANGUL, r"[\p{N}]"))
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"[\p{N}]{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    )
)
_NO_HAN = r"(?:(?![\p{Han}])"
_KIMI_K2 = PreTokenizer(
    (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}])*"
        rf"{_NO_HAN}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}])+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}])+"
        rf"{_NO_HAN}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}])*{_CONTRACTIONS}?"
        r"|[\p{N}]{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+",
    )
)
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "gpt2", "default", "olmo"), _GPT2),
    "smollm": _SMOLLM,
    "falcon": _FALCON,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "dbrx": PreTokenizer(_LLAMA3.patterns),  # OLMo 2 and 3, Phi-4
    **dict.fromkeys(("gpt-4o", "minimax-m2"), _GPT4O),  # the first is Phi-4-mini's, too
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),  # SmolLM3
    "seed-coder": _SEED,
    "chatglm-bpe": PreTokenizer(_LLAMA3.patterns),
    "glm4": PreTokenizer(_LLAMA3.patterns, ignore_merges=True),
    "deepseek-llm": _DEEPSEEK_LLM,  # DeepSeek-V2 too
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": _KIMI_K2,
}


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
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"pre-tokenizer {name[:40]!r} (tokenizer.ggml.pre) is not supported; supported: {known}")
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
