"""Facts that a checkpoint has about text: its tokenizer, its chat template, and how its publisher wants it sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from powerinfer.formats.checkpoint import Checkpoint

if TYPE_CHECKING:
    from powerinfer.text.chat import ChatTemplate
    from powerinfer.text.sampling_defaults import SamplingDefaults
    from powerinfer.text.tokenizer import Tokenizer

_TOKENIZERS: WeakKeyDictionary[Checkpoint, Tokenizer] = WeakKeyDictionary()


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The model's tokenizer, made on the first call. ModelError if the model has none that can be used."""
    if checkpoint not in _TOKENIZERS:
        _TOKENIZERS[checkpoint] = _read_tokenizer(checkpoint)
    return _TOKENIZERS[checkpoint]


def _read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.source == "gguf":
        from powerinfer.text.tokenizer_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(checkpoint.metadata)
    from powerinfer.text.tokenizer_folder import tokenizer_from_folder

    return tokenizer_from_folder(checkpoint.path)


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether the model's files have a tokenizer, be it one that can be used or not."""
    if checkpoint.source == "gguf":
        return "tokenizer.ggml.model" in checkpoint.metadata
    from powerinfer.text.tokenizer_folder import tokenizer_file

    return tokenizer_file(checkpoint.path) is not None


def sampling_defaults_of(checkpoint: Checkpoint) -> SamplingDefaults:
    """Sampling as the model's publisher wants it, by its files."""
    from powerinfer.text.sampling_defaults import folder_defaults, gguf_defaults

    return gguf_defaults(checkpoint.metadata) if checkpoint.source == "gguf" else folder_defaults(checkpoint.path)


def chat_template_of(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The model's chat template, None if it has none."""
    from powerinfer.text.chat import chat_template

    return chat_template(tokenizer_of(checkpoint))
