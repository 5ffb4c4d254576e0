"""A model in the other format than the one it was read from: what both ways have in common.

What cannot be said in the other format is refused before anything is written: what was made for it is read as that of
any model is, and configuration and tokenizer must come out the same. A tokenizer is compared by the tokens of texts
that the known ways of splitting words (`tokenizer.ggml.pre`) split differently, as llama.cpp's converter does.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import ClassVar, TypeVar

import numpy as np

from powerinfer.config import AttentionConfig, ExpertsConfig, ModelConfig
from powerinfer.errors import RequestError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.quant import Bytes, Float32
from powerinfer.models.rope import rope_frequencies
from powerinfer.prepare.corpus import open_corpora
from powerinfer.text.tokenizer import Tokenizer
from powerinfer_train.recipes import StoredTypes

Rows = TypeVar("Rows", Float32, Bytes)

PROBE = (
    "I'm, we'LL; don't've 3 33 333 3333 3.14\n\n \n\t\t x  y   z    \r\n  \u3000end ~!@#$%^&*()_+-=[]{}|;':\",./<>?\n\n"
    "ÀÉ e\u0301 A\u030a \ufb01 ½ ² ٣ Straße \u0132SSEL \u01c5x Ünï Привет! Καλημέρα 你好，世界。123こんにちは 안녕 "
    "ไทย हिन्दी 👩\u200d👩\u200d👧 🤦🏼\u200d♂️ CamelCaseWORD snake_case x86_64 ''' \"\" <a href='x'>\u00a0\ufeff "
)
"""A text that splits of words differ in."""


class OtherFormat:
    """One way. form: as of --format; stays: what --format same writes; keys: where settings are stated;
    families: those it is for, as the format that is read calls them -> as the other one does; types: of weights."""

    form: ClassVar[str]
    stays: ClassVar[str]
    keys: ClassVar[str]
    families: ClassVar[dict[str, str]]
    types: ClassVar[tuple[str, ...]]

    def __init__(self, checkpoint: Checkpoint, types: StoredTypes) -> None:
        """RequestError for a model of another family, and for types that it does not have."""
        self.config, self._path = checkpoint.config, checkpoint.path
        architecture = self.config.architecture
        if architecture not in self.families:
            raise self._refused(f"models of {architecture} are not written so (only {', '.join(self.families)})")
        self.architecture = self.families[architecture]
        for name, kind in asdict(types).items():
            if kind not in self.types and (name == "changed" or kind != "same"):
                flag, names = "--type" if name == "changed" else f"--{name}-type", ", ".join(self.types)
                raise self._refused(f"weights are not written so in {flag} {kind} (only {names})")
        ffns = [layer.ffn for layer in self.config.layers]
        self._experts = next((ffn for ffn in ffns if isinstance(ffn, ExpertsConfig)), None)
        dense = next((ffn.width for ffn in ffns if not isinstance(ffn, ExpertsConfig)), 0)
        self._width = dense or (self._experts.size if self._experts else 0)

    def _refused(self, reason: str) -> RequestError:
        return RequestError(f"--format {self.form}, {self._path}: {reason}; --format same writes a {self.stays}")

    def reordered(self, canonical: str, values: Rows) -> Rows:
        """A tensor, or its rows as bytes, with the rows in the order of the other format: the two rows of q and k of a
        pair that is rotated are neighbours in one, Llama's GGUF files, and half a head apart in the other."""
        part = canonical.rpartition(".")[2].removesuffix("_bias")
        if not self._reorders or part not in ("q", "k"):
            return values
        attention = self.config.with_draft.layers[int(canonical.split(".")[1])].attention
        assert isinstance(attention, AttentionConfig) and attention.rope is not None
        heads = attention.n_heads if part == "q" else attention.n_kv_heads
        half = attention.head_dim // 2
        pairs = (half, 2) if attention.rope.interleaved else (2, half)
        rows: Rows = values.reshape(heads, *pairs, -1).swapaxes(1, 2).reshape(values.shape)
        return rows

    def _check_config(self, read: ModelConfig) -> None:
        """RequestError unless the configuration, as it is read from what was made, is the model's."""
        orders = {rope.interleaved for rope in self.config.ropes}, {rope.interleaved for rope in read.ropes}
        self._reorders = orders[0] != orders[1]
        for layer, read_layer in zip(self.config.layers, read.layers, strict=True):
            ropes = layer.attention.rope, read_layer.attention.rope
            if None in ropes:
                raise self._refused("its layers do not all rotate positions")
            length = self.config.context_length
            expected, read_back = (rope_frequencies(rope, length) for rope in ropes if rope is not None)
            if not np.allclose(expected[0], read_back[0], rtol=1e-5, atol=0) or expected[1] != read_back[1]:
                raise self._refused("its scaling of the rotary embedding is not one that is written")
        if _rest(read) != _rest(self.config):
            raise self._refused(
                f"{self.keys} has no keys for all of its settings (experts, a window of attention, layers that differ)"
            )


def _rest(config: ModelConfig) -> ModelConfig:
    """Sizes and settings that must be equal, with numbers as GGUF holds them, float32."""
    layers = []
    for layer in config.layers:
        assert isinstance(layer.attention, AttentionConfig)
        scale = _short(layer.attention.score_scale)
        layers.append(replace(layer, attention=replace(layer.attention, rope=None, scale=scale)))
    return replace(
        config,
        layers=tuple(layers),
        norm_eps=_short(config.norm_eps),
        embedding_scale=_short(config.embedding_scale),
        residual_scale=_short(config.residual_scale),
        logit_scale=_short(config.logit_scale),
        architecture="",
        name="",
        draft=None,
    )


def _short(number: float) -> float:
    return float(np.float32(number))


def same_tokens(tokenizer: Tokenizer, written: Tokenizer) -> bool:
    """Whether two tokenizers give the same ids for the probe and the built-in sample, and end answers alike."""
    expected, read = tokenizer.vocabulary, written.vocabulary
    for name in ("bos_id", "eos_ids", "add_bos", "add_eos", "before", "after"):
        if getattr(expected, name) != getattr(read, name):
            return False
    added = "".join(dict.fromkeys(token.text for token in (*expected.added, *read.added)))
    texts = [PROBE, PROBE + added, *(str(text) for text in open_corpora([])[0].pieces())]
    return all(
        tokenizer.encode(text, special=special) == written.encode(text, special=special)
        for text in texts
        for special in (False, True)
    )
