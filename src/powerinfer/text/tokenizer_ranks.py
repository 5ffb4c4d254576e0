"""The vocabulary of a folder with `tiktoken.model`, which has the pieces of byte-level merges by their rank.

Neither how words are split nor which tokens follow the pieces is in the file: it is in the publisher's code, of which
one kind is known, that of Kimi Linear, Kimi K2 and Moonlight.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError
from powerinfer.text import bpe
from powerinfer.text.pre_tokenizers import PRE_TOKENIZERS, byte_level

if TYPE_CHECKING:
    import tokenizers

FILE = "tiktoken.model"
SPECIAL = 256  # tokens behind the pieces, be they named or reserved
_CLASS = "TikTokenTokenizer"


def engine_of_ranks(data: bytes, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer for the text of the file; ModelError if it is malformed, or of an unknown kind.

    config: tokenizer_config.json, which names special tokens by id. Among pairs of neighbours, the one that makes the
    piece of the lowest rank merges first, and a word that is a piece is not split.
    """
    import numpy as np
    from tokenizers import AddedToken, decoders

    if config.get("tokenizer_class") != _CLASS:
        raise ModelError(
            f"{FILE} of the tokenizer_class {str(config.get('tokenizer_class'))[:40]!r} (tokenizer_config.json) is not "
            f"supported, only that of {_CLASS}: take a GGUF file of the model"
        )
    vocab = _pieces(data)
    merges = bpe.score_merges(vocab, -np.arange(len(vocab)), frozenset())
    engine = byte_level(vocab, merges, PRE_TOKENIZERS["kimi-k2"])
    engine.decoder = decoders.ByteLevel()
    listed = config.get("added_tokens_decoder") or {}
    for at in range(len(vocab), len(vocab) + SPECIAL):
        entry = listed.get(str(at), {})
        name, special = entry.get("content", f"<|reserved_token_{at}|>"), entry.get("special", True)
        engine.add_tokens([AddedToken(name, special=bool(special), normalized=False)])
    return engine


def _pieces(data: bytes) -> dict[str, int]:
    """The pieces, in GPT-2's alphabet of bytes, and their ranks, which are their ids."""
    alphabet = dict(enumerate(bpe.byte_alphabet()))
    try:
        rows = [line.split() for line in data.splitlines() if line]
        vocab = {b64decode(text, validate=True).decode("latin-1").translate(alphabet): int(at) for text, at in rows}
    except ValueError as error:
        raise ModelError(f"{FILE} must have a piece in base64 and its rank in every line: {error}") from error
    if sorted(vocab.values()) != list(range(len(rows))):
        raise ModelError(f"{FILE} lists a piece or a rank twice, or leaves out a rank")
    if not vocab.keys() >= set(alphabet.values()):
        raise ModelError(f"{FILE} has no piece for some byte")
    return vocab
