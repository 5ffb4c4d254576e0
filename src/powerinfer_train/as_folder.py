"""A model of a GGUF file as a Hugging Face folder: its JSON files, tokenizer and tensors, for families that both
formats know.

What cannot be said there is refused, see `other_format`. `transformers` reads the folder as it reads any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from powerinfer.config import AttentionConfig, ExpertsConfig, FfnConfig, ModelConfig, RopeConfig, Shape
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.families import FOLDERS
from powerinfer.formats.folder import THRESHOLDS, file_names
from powerinfer.formats.folder_config import read_config
from powerinfer.models.rope import rope_frequencies
from powerinfer.text.model_text import sampling_defaults_of, tokenizer_of
from powerinfer.text.tokenizer import Vocabulary
from powerinfer.text.tokenizer_folder import tokenizer_from_folder
from powerinfer.text.tokenizer_gguf import UNUSED
from powerinfer_train.other_format import OtherFormat, same_tokens
from powerinfer_train.recipes import StoredTypes

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""Family of folders by architecture in GGUF: Mistral's models are Llama's there."""

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""Name in config.json by --type."""

LOW, HIGH = 1.0, 4.0
"""low_freq_factor and high_freq_factor of all published models with the scaling of Llama 3."""


class AsFolder(OtherFormat):
    """document: the contents of config.json, of the dense model; files: those of the other JSON files, by name."""

    form, stays, keys = "folder", "GGUF file", "config.json"
    families, types = FAMILIES, tuple(DTYPES)
    document: dict[str, Any]
    files: dict[str, dict[str, Any]]

    def __init__(self, checkpoint: Checkpoint, types: StoredTypes) -> None:
        """RequestError for a model that a folder cannot hold, or not as it is, and for types that it does not have."""
        super().__init__(checkpoint, types)
        self.document = self._sizes() | {"torch_dtype": DTYPES[types.changed]}
        read = self._read_again()
        self._check_config(read)
        self._names = file_names(read, {})
        self.files = self._tokenizer(checkpoint)
        config = self.files.pop("config.json")
        self.document |= config
        sampling = _sampling(sampling_defaults_of(checkpoint).values)
        if sampling:
            self.files["generation_config.json"] = config | sampling

    def entries(self, canonical: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """(name, shape) of what the folder has for a tensor: each expert's matrices are tensors of their own."""
        name = self._names(canonical)
        if "{}" in name:
            yield from ((name.format(expert), shape[1:]) for expert in range(shape[0]))
        else:
            yield name.removesuffix(".weight") if canonical.endswith(THRESHOLDS) else name, shape

    # ------------------------------------------------------------------------------------------------ configuration

    def _sizes(self) -> dict[str, Any]:
        """config.json; `_check_config` says whether it is enough."""
        config, experts, ffns = self.config, self._experts, [layer.ffn for layer in self.config.layers]
        attention, rope = config.layers[0].attention, config.ropes[0]
        assert isinstance(attention, AttentionConfig)
        sizes: dict[str, Any] = {
            "architectures": [FOLDERS[self.architecture].classes[0]],
            "model_type": self.architecture,
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": self._width,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": attention.n_heads,
            "num_key_value_heads": attention.n_kv_heads,
            "head_dim": attention.head_dim,
            "hidden_act": config.activations,
            "max_position_embeddings": config.context_length,
            "rms_norm_eps": _short(config.norm_eps),
            "rope_theta": _short(rope.theta),
            "rope_scaling": _scaling(rope),
            "tie_word_embeddings": config.tied_embeddings,
        }
        if self.architecture != "qwen2":  # its class has biases on q, k and v, and no switch
            sizes["attention_bias"] = attention.o_bias
        if self.architecture == "llama":
            sizes["mlp_bias"] = isinstance(ffns[0], FfnConfig) and ffns[0].bias
        else:
            sizes["use_sliding_window"] = False
        if experts is not None and self.architecture == "qwen3_moe":
            sizes["num_experts"], sizes["num_experts_per_tok"] = experts.n_experts, experts.router.top_k
            sizes["moe_intermediate_size"], sizes["norm_topk_prob"] = experts.size, experts.router.normalise
            sizes["decoder_sparse_step"] = 1
            sizes["mlp_only_layers"] = [n for n, ffn in enumerate(ffns) if not isinstance(ffn, ExpertsConfig)]
        return sizes

    def _read_again(self) -> ModelConfig:
        """The configuration that a folder of this config.json has."""
        try:
            return read_config(self.document, self._path)
        except ModelError as error:
            raise self._refused(str(error)) from None

    # ------------------------------------------------------------------------------------------------ tokenizer

    def _tokenizer(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        """tokenizer.json and tokenizer_config.json, and what config.json says of tokens."""
        tokenizer = tokenizer_of(checkpoint)
        vocabulary = tokenizer.vocabulary
        added: dict[int | None, str] = {token.id: token.text for token in vocabulary.added}
        ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unk": vocabulary.unk_id}
        ids["pad"] = checkpoint.metadata.get("tokenizer.ggml.padding_token_id")
        side: dict[str, Any] = {f"{name}_token": added[at] for name, at in ids.items() if at in added}
        side |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        side["model_max_length"] = self.config.context_length
        templates = vocabulary.chat_templates
        if templates.keys() == {"default"}:
            side["chat_template"] = templates["default"]
        elif templates:
            side["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
        ends = sorted(vocabulary.eos_ids, key=lambda at: (at != vocabulary.eos_id, at))
        config = {"bos_token_id": vocabulary.bos_id, "eos_token_id": ends if len(ends) > 1 else vocabulary.eos_id}
        document = json.loads(tokenizer.to_json())
        if document["model"]["type"] != "BPE":
            raise self._refused("its tokenizer is not BPE")
        kinds = checkpoint.metadata.get("tokenizer.ggml.token_type")
        for at in () if kinds is None else np.flatnonzero(np.asarray(kinds) == UNUSED):
            document["model"]["vocab"].pop(f"[PAD{at}]", None)  # a row of the embedding without a token
        document["decoder"] = _decoder(vocabulary)
        begin, end = [vocabulary.bos_id] * vocabulary.add_bos, [vocabulary.eos_id] * vocabulary.add_eos
        if begin or end:
            document["post_processor"] = _frame(begin, end, added)
        files = {"tokenizer.json": document, "tokenizer_config.json": side}
        with TemporaryDirectory() as folder:
            for name, content in (*files.items(), ("config.json", config)):
                (Path(folder) / name).write_bytes(json_bytes(content))
            try:
                read = tokenizer_from_folder(folder)
            except ModelError as error:
                raise self._refused(str(error)) from None
        if not same_tokens(tokenizer, read):
            raise self._refused("tokenizer.json would give other tokens")
        return files | {"config.json": config}


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """A JSON file."""
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _short(value: float) -> float:
    """The shortest number that is the same as float32, which is what GGUF has: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """`rope_scaling`; one that does not give the same frequencies is found when it is read."""
    if rope.scaling == "linear":
        return {"rope_type": "linear", "factor": _short(rope.factor)}
    if rope.scaling == "yarn":
        scaling = {key: _short(getattr(rope, key)) for key in ("factor", "beta_fast", "beta_slow")}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        return {"rope_type": "yarn", "original_max_position_embeddings": rope.original_context_length} | scaling
    factor = max(rope.divisors, default=1.0)
    if factor == 1:
        return None
    # Llama 3's: 1 / divisor = (1 - share) / factor + share between the two ends, share = (turns - LOW) / (HIGH - LOW),
    # turns = original context * frequency / 2 pi. One pair between the ends says what the original context was.
    plain = rope_frequencies(RopeConfig(rope.theta, rope.dim))[0].astype(np.float64)
    shares = (1 / np.array(rope.divisors) - 1 / factor) / (1 - 1 / factor)
    between = (shares > 1e-4) & (shares < 1 - 1e-4)
    if not between.any():
        return None
    original = np.median(2 * np.pi * (LOW + shares[between] * (HIGH - LOW)) / plain[between])
    return {
        "rope_type": "llama3",
        "factor": _short(factor),
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": max(1, round(float(original))),
    }


def _decoder(vocabulary: Vocabulary) -> dict[str, Any]:
    """Decoder of tokenizer.json, as folders of Llama 3 and of Llama 2 have it."""
    if vocabulary.byte_level:
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    steps += [{"type": "ByteFallback"}] * bool(vocabulary.byte_pieces) + [{"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * vocabulary.strip_space
    return {"type": "Sequence", "decoders": steps}


def _frame(begin: Sequence[int | None], end: Sequence[int | None], added: Mapping[int | None, str]) -> dict[str, Any]:
    """The post-processor of tokenizer.json that puts tokens around a text, and around the second of a pair."""

    def around(sequence: str, of: int) -> list[dict[str, Any]]:
        first, last = ([{"SpecialToken": {"id": added[at], "type_id": of}} for at in part] for part in (begin, end))
        return [*first, {"Sequence": {"id": sequence, "type_id": of}}, *last]

    tokens = {added[at]: {"id": added[at], "ids": [at], "tokens": [added[at]]} for at in (*begin, *end)}
    pair = around("A", 0) + around("B", 1)
    return {"type": "TemplateProcessing", "single": around("A", 0), "pair": pair, "special_tokens": tokens}


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of generation_config.json, where all tokens count with top_k 0, not -1."""
    if values.get("temperature") == 0:
        penalty = {name: value for name, value in values.items() if name == "repetition_penalty"}
        return {"do_sample": False} | penalty
    limited = {name: max(0, value) if name == "top_k" else value for name, value in values.items()}
    return {"do_sample": True} | limited if values else {}
