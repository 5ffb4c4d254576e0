"""A model of a folder as a GGUF file: metadata, tokenizer and tensors, for families that both formats know.

What cannot be said there is refused, see `other_format`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from powerinfer.config import STORED_TYPES, AttentionConfig, ExpertsConfig, ModelConfig, RopeConfig
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.families import GGUFS
from powerinfer.formats.gguf import GGUFFile
from powerinfer.formats.gguf_model import NAMES, read_config
from powerinfer.formats.layout import shapes
from powerinfer.formats.quant import Float32
from powerinfer.formats.source import Names
from powerinfer.formats.tensors import RawTensor
from powerinfer.models.rope import rope_frequencies
from powerinfer.text.bpe import score_merges
from powerinfer.text.model_text import sampling_defaults_of, tokenizer_of
from powerinfer.text.sampling_defaults import GGUF_KEYS
from powerinfer.text.tokenizer import Vocabulary, ends_of_generation
from powerinfer.text.tokenizer_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, tokenizer_from_gguf
from powerinfer_train.other_format import OtherFormat, same_tokens
from powerinfer_train.recipes import StoredTypes

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "arcee": "arcee",
    "gemma3_text": "gemma3", "granite": "granite", "olmo2": "olmo2", "olmoe": "olmoe",
    "llama_sparse_relu": "llama",
}  # fmt: skip
"""Architecture in GGUF by family of folders."""

SPLITS = (
    "gpt-2", "smollm", "falcon", "llama-bpe", "qwen2", "qwen35", "tekken", "dbrx", "gpt-4o", "glm4", "deepseek-llm",
    "deepseek-coder", "deepseek-v3", "kimi-k2",
)  # fmt: skip
"""Ways of splitting words, by the names that llama.cpp knows too."""


def _types_of(vocabulary: Vocabulary, pieces: Sequence[str | None]) -> list[int]:
    """The type of every piece, as GGUF numbers them."""
    types = [UNUSED if piece is None else NORMAL for piece in pieces]
    for at in vocabulary.byte_pieces:
        types[at] = BYTE
    for token in vocabulary.added:
        types[token.id] = CONTROL if token.special else USER_DEFINED
    if not vocabulary.byte_level and vocabulary.unk_id is not None:
        types[vocabulary.unk_id] = UNKNOWN
    return types


def _special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Keys of the tokens that begin and end texts, and of the unknown one."""
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unknown": vocabulary.unk_id}
    keys = {f"{name}_token_id": at for name, at in ids.items() if at is not None}
    special = {token.id for token in vocabulary.added if token.special}
    named = ends_of_generation({token.text: token.id for token in vocabulary.added}, special).values()
    ends = sorted(vocabulary.eos_ids - {vocabulary.eos_id}, key=lambda at: (at in named, at))
    return keys | {f"{name}_token_id": at for name, at in zip(("eot", "eom"), ends, strict=False)}


def _template_keys(templates: Mapping[str, str]) -> dict[str, Any]:
    """The metadata of chat templates by name."""
    named = {name: source for name, source in templates.items() if name != "default"}
    keys: dict[str, Any] = {}
    if "default" in templates:
        keys["tokenizer.chat_template"] = templates["default"]
    if named:
        keys["tokenizer.chat_templates"] = list(named)
        keys |= {f"tokenizer.chat_template.{name}": source for name, source in named.items()}
    return keys


class AsGGUF(OtherFormat):
    """metadata: of the file, without activation and thresholds; divisors: of the rotary embedding's frequencies, None:
    they have none."""

    form, stays, keys = "gguf", "folder", "GGUF"
    families, types = ARCHITECTURES, STORED_TYPES[1:]
    metadata: dict[str, Any]
    divisors: Float32 | None

    def __init__(self, checkpoint: Checkpoint, types: StoredTypes) -> None:
        """RequestError for a model that a GGUF file cannot hold, or not as it is, and for types that it does not
        have."""
        super().__init__(checkpoint, types)
        config = self.config
        sizes = {f"{self.architecture}.{key}": value for key, value in self._sizes().items()}
        name = config.name or checkpoint.path.resolve().name
        self.metadata = {"general.architecture": self.architecture, "general.name": name} | sizes
        self._check_config(self._read_again())
        self.metadata |= self._tokenizer(checkpoint)
        self.metadata |= {GGUF_KEYS[key]: value for key, value in sampling_defaults_of(checkpoint).values.items()}

    # ------------------------------------------------------------------------------------------------ configuration

    def _sizes(self) -> dict[str, Any]:
        """The keys of the architecture; `_check_config` says whether they are enough."""
        config, experts = self.config, self._experts
        attentions = [layer.attention for layer in config.layers]
        # that of the layers without a window, where some have one: the others' has no keys
        attention = next((one for one in attentions if one.window is None), attentions[0])
        rope = attention.rope or config.ropes[0]
        self.divisors = None
        sizes: dict[str, Any] = {
            "context_length": config.context_length,
            "embedding_length": config.d_model,
            "block_count": config.with_draft.n_layers,
            "feed_forward_length": self._width,
            "attention.head_count": attention.n_heads,
            "attention.head_count_kv": attention.n_kv_heads,
            "attention.key_length": attention.head_dim,
            "attention.value_length": attention.head_dim,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "rope.freq_base": rope.theta,
            "rope.dimension_count": rope.dim,
            "vocab_size": config.vocab_size,
        }
        if config.draft is not None:
            sizes["nextn_predict_layers"] = 1
        if experts is not None:
            sizes |= self._expert_sizes(experts)
        if rope.scaling == "linear":
            sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
        elif rope.scaling == "llama3":
            plain = rope_frequencies(RopeConfig(rope.theta, rope.dim))[0]
            self.divisors = plain / rope_frequencies(rope)[0]
        windows = [one.window for one in attentions if one.window is not None]
        if windows and self.architecture == "gemma3":
            sizes["attention.sliding_window"] = windows[0]
        if self.architecture == "granite":
            sizes |= {"embedding_scale": config.embedding_scale, "residual_scale": config.residual_scale}
            sizes |= {"logit_scale": 1 / config.logit_scale}
            if isinstance(attention, AttentionConfig):
                sizes["attention.scale"] = attention.score_scale
        if config.activations != "silu":
            sizes["hidden_act"] = config.activations
        return sizes

    def _expert_sizes(self, experts: ExpertsConfig) -> dict[str, Any]:
        router, dense = experts.router, [not isinstance(layer.ffn, ExpertsConfig) for layer in self.config.layers]
        sizes: dict[str, Any] = {
            "expert_count": experts.n_experts,
            "expert_used_count": router.top_k,
            "expert_feed_forward_length": experts.size,
            "expert_weights_norm": router.normalise,
        }
        if any(dense):
            sizes["leading_dense_block_count"] = dense.index(False)
        if experts.shared_size % experts.size:
            sizes["expert_shared_feed_forward_length"] = experts.shared_size
        elif experts.shared_size:
            sizes["expert_shared_count"] = experts.shared_size // experts.size
        if router.scoring == "sigmoid":
            sizes["expert_gating_func"] = 2
        if router.scale != 1:
            sizes["expert_weights_scale"] = router.scale
        if router.groups > 1:
            sizes |= {"expert_group_count": router.groups, "expert_group_used_count": router.top_groups}
        return sizes

    @property
    def names(self) -> Names:
        """Spelling of canonical names in the file."""
        return NAMES.extended(GGUFS[self.architecture].names)

    @property
    def draft_names(self) -> Names:
        """The same of those of a draft head."""
        return self.names.extended(GGUFS[self.architecture].draft_names)

    def _read_again(self) -> ModelConfig:
        """The configuration that a file of this metadata has."""
        empty = np.zeros(0, np.uint8)
        tensors = {self.names(name): RawTensor("F32", shape, empty) for name, shape in shapes(self.config)}
        if self.divisors is not None:
            tensors["rope_freqs.weight"] = RawTensor("F32", self.divisors.shape, self.divisors.view(np.uint8))
        try:
            return read_config(GGUFFile(self._path, 3, self.metadata, tensors, []))
        except ModelError as error:
            raise self._refused(str(error)) from None

    # ------------------------------------------------------------------------------------------------ tokenizer

    def _tokenizer(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tokenizer = tokenizer_of(checkpoint)
        vocabulary = tokenizer.vocabulary
        document = json.loads(tokenizer.to_json())
        self._check_vocabulary(vocabulary, document)
        pieces = [vocabulary.piece(at) for at in range(self.config.vocab_size)]
        types = _types_of(vocabulary, pieces)
        merges = [one.split(" ") if isinstance(one, str) else one for one in document["model"]["merges"]]
        keys: dict[str, Any] = {
            "tokens": [piece if piece is not None else f"[PAD{at}]" for at, piece in enumerate(pieces)],
            "token_type": types,
            "add_bos_token": vocabulary.add_bos,
            "add_eos_token": vocabulary.add_eos,
        }
        keys |= _special_ids(vocabulary)
        if vocabulary.byte_level:
            keys |= {"model": "gpt2", "merges": [" ".join(pair) for pair in merges]}
            ways: list[dict[str, Any]] = [{"pre": split} for split in SPLITS]
        else:
            keys |= {"model": "llama", "scores": self._scores(keys["tokens"], types, merges)}
            ways = [{"add_space_prefix": vocabulary.strip_space}]
        templates = _template_keys(vocabulary.chat_templates)
        for way in ways:
            metadata = {f"tokenizer.ggml.{key}": value for key, value in (keys | way).items()} | templates
            if same_tokens(tokenizer, tokenizer_from_gguf(metadata)):
                return metadata
        raise self._refused("its tokenizer splits words, or ends answers, in a way that GGUF has no name for")

    def _scores(self, tokens: Sequence[str], types: Sequence[int], merges: Sequence[Sequence[str]]) -> list[float]:
        """Scores of the pieces, which stand for the merges. RequestError for merges that no scores stand for."""
        vocab = {token: at for at, token in enumerate(tokens)}
        scores = [0.0] * len(tokens)
        for rank, (first, second) in enumerate(merges):
            at = vocab.get(first + second)
            if at is not None and not scores[at]:
                scores[at] = -1.0 - rank
        ranks = [scores[vocab[first + second]] for first, second in merges if first + second in vocab]
        atoms = frozenset(token for token, kind in zip(tokens, types, strict=True) if kind != NORMAL)
        meant = set(score_merges(vocab, scores, atoms))
        if ranks != sorted(ranks, reverse=True) or meant != {(first, second) for first, second in merges}:
            raise self._refused("its tokenizer merges pieces in an order that scores do not give")
        return scores

    def _check_vocabulary(self, vocabulary: Vocabulary, document: Mapping[str, Any]) -> None:
        """RequestError for a vocabulary that GGUF's kinds of BPE cannot say. document: tokenizer.json."""
        model = document["model"]
        if model.get("type") != "BPE" or not (vocabulary.byte_level or vocabulary.byte_pieces):
            raise self._refused("its tokenizer is neither byte-level BPE nor SentencePiece's with pieces for bytes")
        if any(token.lstrip or token.rstrip for token in vocabulary.added):
            raise self._refused("its special tokens take the spaces around them")
        if vocabulary.size > self.config.vocab_size:
            raise self._refused(f"it has {vocabulary.size} tokens, and {self.config.vocab_size} rows in the embedding")
