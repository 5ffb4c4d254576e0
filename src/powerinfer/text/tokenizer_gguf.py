"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

import re
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError
from powerinfer.text import bpe
from powerinfer.text.pre_tokenizers import PRE_TOKENIZERS, byte_level
from powerinfer.text.tokenizer import Added, Encode, Engine, Tokenizer, Vocabulary, ends_of_generation

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # keys of tokens with which an answer ends
_IDS = ("bos", "unknown", *_ENDS)
_STRIP_NOTHING = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's special tokens
_INFILL = {
    "prefix": ("fim_pre", "prefix"), "suffix": ("fim_suf", "suffix"), "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",), "repository": ("fim_rep",), "file": ("fim_sep",),
}  # fmt: skip
"""Keys of the tokens around the parts of a file, older ones last."""


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's `tokenizer.*` keys describe; ModelError if they are malformed or unknown."""
    model = metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _gguf_byte_level, "llama": _gguf_scored, "t5": _gguf_unigram, "unigram": _gguf_unigram}
    makers["gemma4"] = _gguf_merged
    if not isinstance(model, str):
        raise ModelError("the GGUF file has no tokenizer (key tokenizer.ggml.model)")
    if model == "llama" and metadata.get("tokenizer.ggml.pre") == "gemma4":  # Ollama's, whose scores are token ids
        model = "gemma4"
    if model not in makers:
        names = ", ".join(sorted(makers))
        raise ModelError(f"tokenizer.ggml.model {model[:40]!r} is not supported; supported: {names}")
    return makers[model](_GGUF(metadata))


class _GGUF:
    """Checked access to the tokenizer keys of a GGUF file."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self.notes: list[str] = []
        self.pieces = self.strings("tokens")
        # Empty ones, which nothing spells, get names for the native engine, as in llama.cpp.
        self.names = [piece or f"[EMPTY_{at}]" for at, piece in enumerate(self.pieces)]
        self.vocab = dict(zip(self.names, range(len(self.names)), strict=True))
        if len(self.vocab) != len(self.pieces):
            twice = next(name for at, name in enumerate(self.names) if self.vocab[name] != at)
            raise ModelError(f"tokenizer.ggml.tokens lists {twice[:40]!r} twice")
        self.types = self._types()
        self.ids = {name: self._token(name) for name in _IDS}

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

    def _token(self, name: str) -> int | None:
        """The token of a key; None without the key, and, with a note, if there is no such token."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._metadata.get(key)
        if value is None:
            return None
        try:
            token = None if isinstance(value, bool) else index(value)
        except TypeError:
            token = None
        if token is None:
            raise ModelError(f"{key} {str(value)[:40]!r} is no token id")
        if not 0 <= token < len(self.pieces):
            self.notes.append(f"{key} {str(token)[:24]} is left out: the model has {len(self.pieces)} tokens")
            return None
        return token

    def _listed_ends(self) -> set[int]:
        """The tokens of `eos_token_ids`, in which Ollama's files have all of generation_config.json."""
        values = self._metadata.get("tokenizer.ggml.eos_token_ids", [])
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ModelError("tokenizer.ggml.eos_token_ids is not a list of token ids")
        return {value for value in values if 0 <= value < len(self.pieces)}

    def infill(self) -> dict[str, int]:
        """The tokens around the parts of a file, by the name of the part."""
        stated = {part: [token for name in names if (token := self._token(name)) is not None]
                  for part, names in _INFILL.items()}  # fmt: skip
        return {part: tokens[0] for part, tokens in stated.items() if tokens}

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
        control = {at for at, kind in self.types.items() if kind in (CONTROL, UNKNOWN)}
        ends = {at for name in _ENDS if (at := self.ids[name]) is not None} | self._listed_ends()
        named = set(ends_of_generation(self.vocab, control).values())
        # A piece of one character that a file names by mistake, "!" for bos, stays what it is.
        by_id = {at for at in (*ends, self.ids["bos"]) if at is not None and len(self.pieces[at]) > 1}
        special = {at for at in control | named | by_id if self.pieces[at]}
        literal = {at for at, kind in self.types.items() if kind == USER_DEFINED and self.pieces[at]} - special
        strips = special | literal if self._strips() else set()
        strips = {at for at in strips if self.pieces[at] not in _STRIP_NOTHING}
        return Vocabulary(
            piece=self.pieces.__getitem__,
            size=len(self.pieces),
            added=tuple(
                Added(self.pieces[at], at, special=at in special, rstrip=at in strips)
                for at in sorted(special | literal)
            ),
            bos_id=self.ids["bos"],
            eos_id=self.ids["eos"],
            eos_ids=frozenset(ends | named),
            unk_id=self.ids["unknown"],
            chat_templates=self._templates(),
            notes=tuple(self.notes),
            infill=self.infill(),
            **fields,
        )

    def _strips(self) -> bool:
        """Whether special tokens take the white space after them. GGUF has no key for it: it is so in Phi-3's
        vocabulary, which is known by the model's architecture or its name."""
        names = [str(self._metadata.get(f"general.{key}", "")).lower() for key in ("architecture", "name")]
        phi = names[0] == "phi3" or re.search("phi[ -]?3", names[1])
        return bool(phi) and self._metadata.get("tokenizer.ggml.model") == "llama"

    def _templates(self) -> dict[str, str]:
        """Chat templates by name: the nameless key holds the default."""
        listed = self._metadata.get("tokenizer.chat_templates")
        names = [name for name in listed if isinstance(name, str)] if isinstance(listed, (list, tuple)) else []
        keys = {"default": "tokenizer.chat_template"} | {name: f"tokenizer.chat_template.{name}" for name in names}
        sources = {name: self._metadata[key] for name, key in keys.items() if self._metadata.get(key) is not None}
        for name, source in sources.items():
            if not isinstance(source, str):
                raise ModelError(f"{keys[name][:60]} must be a string")
        return sources


def _gguf_byte_level(gguf: _GGUF) -> Tokenizer:
    name = gguf._metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str):
        raise ModelError("the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): convert the model again")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {name[:40]!r} (tokenizer.ggml.pre) is not supported: how this model splits text into words "
            "is not known here; use its Hugging Face folder, whose tokenizer.json says it"
        )
    pre, merges = PRE_TOKENIZERS[name], _merges(gguf)
    vocabulary = gguf.vocabulary(
        byte_level=True, add_bos=gguf.flag("add_bos_token", pre.add_bos), add_eos=gguf.flag("add_eos_token", False)
    )

    def build() -> Engine:
        pairs = [tuple(entry.split(" ")) for entry in merges]
        return _with_added(byte_level(gguf.vocab, pairs, pre), vocabulary)

    def small() -> Encode:
        words = bpe.ascii_words(("[0-9]", *pre.patterns) if pre.digits_alone else pre.patterns)
        return bpe.SmallByteBPE(gguf.vocab, merges, words, pre.ignore_merges).encode

    return Tokenizer(_with_bos(gguf, vocabulary), build, small)


def _merges(gguf: _GGUF) -> list[str]:
    merges = gguf.strings("merges")
    if "\n".join(merges).count(" ") != len(merges):
        raise ModelError("tokenizer.ggml.merges must hold two pieces with one space between them in every entry")
    return merges


def _gguf_merged(gguf: _GGUF) -> Tokenizer:
    """Merges of whole texts, with "▁" for a space: what Gemma 4 has. A text begins with bos, whatever the file says."""
    merges = _merges(gguf)
    pieces = _byte_pieces(gguf) or {gguf.vocab[name]: byte for name, byte in _SPELLED.items() if name in gguf.vocab}
    vocabulary = gguf.vocabulary(
        byte_level=False,
        byte_pieces=pieces,
        strip_space=False,
        add_bos=gguf.ids["bos"] is not None,
        add_eos=gguf.flag("add_eos_token", False),
    )

    def build() -> Engine:
        from tokenizers import Tokenizer, models, normalizers

        pairs: Any = [tuple(entry.split(" ")) for entry in merges]
        unknown = None if vocabulary.unk_id is None else gguf.names[vocabulary.unk_id]
        fallback = bool(vocabulary.byte_pieces)
        engine = Tokenizer(models.BPE(gguf.vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=fallback))
        engine.normalizer = normalizers.Replace(" ", "▁")
        return _with_added(engine, vocabulary)

    return Tokenizer(_with_bos(gguf, vocabulary), build)


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
    atoms = frozenset(gguf.names[at] for at in {*gguf.types, *(token.id for token in vocabulary.added)})

    def build() -> Engine:
        from tokenizers import Tokenizer, models, normalizers

        unknown = None if vocabulary.unk_id is None else gguf.names[vocabulary.unk_id]
        pairs = bpe.score_merges(gguf.vocab, scores, atoms)
        fallback = bool(vocabulary.byte_pieces)
        engine = Tokenizer(models.BPE(gguf.vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=fallback))
        first = [normalizers.Prepend("▁")] if prefix else []
        engine.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        return _with_added(engine, vocabulary)

    def small() -> Encode:
        return bpe.SmallScoredBPE(gguf.vocab, scores, atoms, vocabulary.unk_id, prefix).encode

    return Tokenizer(_with_bos(gguf, vocabulary), build, small)


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

        pairs = list(zip(gguf.names, scores, strict=True))
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

    return Tokenizer(_with_bos(gguf, vocabulary), build)


def _with_added(engine: tokenizers.Tokenizer, vocabulary: Vocabulary, plain_model: Any = None) -> Engine:
    from tokenizers import AddedToken

    engine.add_tokens(
        [
            AddedToken(token.text, special=token.special, rstrip=token.rstrip, normalized=False)
            for token in vocabulary.added
        ]
    )
    return Engine(engine, plain_model)


def _with_bos(gguf: _GGUF, vocabulary: Vocabulary) -> Vocabulary:
    if vocabulary.add_bos and vocabulary.bos_id is None:
        if any("bos_token_id" in note for note in gguf.notes):
            return replace(vocabulary, add_bos=False)
        raise ModelError("tokenizer.ggml.add_bos_token is true but tokenizer.ggml.bos_token_id is missing")
    return vocabulary


def _scores(gguf: _GGUF) -> list[float]:
    import numpy as np

    scores = gguf.numbers("scores", "f")
    if scores is None or not np.isfinite(scores).all():
        raise ModelError("tokenizer.ggml.scores must hold one finite score for every token")
    values: list[float] = scores.astype(np.float64).tolist()
    return values


_SPELLED = {f"<0x{byte:02X}>": byte for byte in range(256)}
"""Bytes by the tokens that stand for them."""


def _byte_pieces(gguf: _GGUF) -> dict[int, int]:
    pieces = {at: gguf.pieces[at] for at, kind in gguf.types.items() if kind == BYTE}
    for at, piece in pieces.items():
        if piece not in _SPELLED:
            raise ModelError(f"token {at} is of type byte but spelled {piece[:40]!r}, not like <0x0A>")
    return {at: _SPELLED[piece] for at, piece in pieces.items()}
