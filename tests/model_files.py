"""Tiny models of every architecture, as GGUF files and Hugging Face folders, every byte under the test's control."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf_bytes import ARRAY, F32, I32, STRING, U32, Array, Builder

D, FF, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 16, 40
HF_NAMES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GGUF_NAMES = {
    "embed": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def canonical_shapes(architecture: str, tied: bool, biases: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Written out here on its own, so that a slip in the engine's own list is seen."""
    yield "embed", (VOCAB, D)
    for i in range(LAYERS):
        yield f"layers.{i}.attn_norm", (D,)
        yield f"layers.{i}.q", (HEADS * HEAD_DIM, D)
        yield f"layers.{i}.k", (KV_HEADS * HEAD_DIM, D)
        yield f"layers.{i}.v", (KV_HEADS * HEAD_DIM, D)
        yield f"layers.{i}.o", (D, HEADS * HEAD_DIM)
        if "qkv" in biases or architecture == "qwen2":
            yield f"layers.{i}.q_bias", (HEADS * HEAD_DIM,)
            yield f"layers.{i}.k_bias", (KV_HEADS * HEAD_DIM,)
            yield f"layers.{i}.v_bias", (KV_HEADS * HEAD_DIM,)
        if "o" in biases:
            yield f"layers.{i}.o_bias", (D,)
        if architecture == "qwen3":
            yield f"layers.{i}.q_norm", (HEAD_DIM,)
            yield f"layers.{i}.k_norm", (HEAD_DIM,)
        yield f"layers.{i}.ffn_norm", (D,)
        yield f"layers.{i}.gate", (FF, D)
        yield f"layers.{i}.up", (FF, D)
        yield f"layers.{i}.down", (D, FF)
        if "ffn" in biases:
            yield f"layers.{i}.gate_bias", (FF,)
            yield f"layers.{i}.up_bias", (FF,)
            yield f"layers.{i}.down_bias", (D,)
    yield "final_norm", (D,)
    if not tied:
        yield "head", (VOCAB, D)


def weights(architecture: str, tied: bool = True, biases: str = "") -> dict[str, np.ndarray]:
    """Canonical name -> float32 values."""
    rng = np.random.default_rng(5)
    shapes = canonical_shapes(architecture, tied, biases)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes}


def spelled(canonical: str, names: dict[str, str], layers: str) -> str:
    *outer, inner = canonical.split(".")
    bias = inner.endswith("_bias")
    name = names[inner.removesuffix("_bias")] + (".bias" if bias else ".weight")
    return f"{layers}.{outer[1]}.{name}" if outer else name


def gguf_name(canonical: str) -> str:
    return spelled(canonical, GGUF_NAMES, "blk")


def hf_name(canonical: str) -> str:
    return spelled(canonical, HF_NAMES, "model.layers")


def tiny_gguf(architecture: str = "llama", tied: bool = True, biases: str = "") -> Builder:
    """A complete model, tokenizer metadata included."""
    builder = Builder().add("general.architecture", STRING, architecture).add("general.name", STRING, "Tiny")
    for key, value in [
        ("block_count", LAYERS),
        ("context_length", 128),
        ("embedding_length", D),
        ("feed_forward_length", FF),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("rope.dimension_count", HEAD_DIM),
    ]:
        builder.add(f"{architecture}.{key}", U32, value)
    builder.add(f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5)
    builder.add(f"{architecture}.rope.freq_base", F32, 20000.0)
    builder.add("tokenizer.ggml.model", STRING, "gpt2").add("tokenizer.ggml.pre", STRING, "smollm")
    tokens = ["<|endoftext|>", *[chr(ord("a") + i) for i in range(26)], "ab", "abc", "Ġ", "Ġa"]
    tokens += [f"<|x{i}|>" for i in range(VOCAB - len(tokens))]
    kinds = [3 if token.startswith("<|") else 1 for token in tokens]
    builder.add("tokenizer.ggml.tokens", ARRAY, Array(STRING, tokens))
    builder.add("tokenizer.ggml.token_type", ARRAY, Array(I32, kinds))
    builder.add("tokenizer.ggml.merges", ARRAY, Array(STRING, ["a b", "ab c", "Ġ a"]))
    builder.add("tokenizer.ggml.eos_token_id", U32, 0)
    for name, values in weights(architecture, tied, biases).items():
        builder.tensor(gguf_name(name), values)
    return builder


def safetensors_bytes(tensors: dict[str, tuple[str, tuple[int, ...], bytes]], **changes: Any) -> bytes:
    """A file. changes: `header` edits the header, `text` replaces it, `length` is claimed, `tail` is put at the end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    changes.get("header", lambda header: None)(header)
    text = changes.get("text") or json.dumps(header).encode()
    if not changes:
        text += b" " * (-len(text) % 8)  # as the library does, so that the data is aligned
    return struct.pack("<Q", changes.get("length", len(text))) + text + data + changes.get("tail", b"")


def as_stored(values: dict[str, np.ndarray], dtype: str = "F32") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """HF name -> (dtype, shape, bytes); BF16 by dropping the lower half."""

    def raw(array: np.ndarray) -> bytes:
        if dtype == "BF16":
            return (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return array.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]).tobytes()

    return {hf_name(name): (dtype, array.shape, raw(array)) for name, array in values.items()}


CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(architecture: str = "llama", tied: bool = True, **more: Any) -> dict[str, Any]:
    config = {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "hidden_size": D,
        "intermediate_size": FF,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 20000.0,
        "tie_word_embeddings": tied,
        **({"sliding_window": None} if architecture == "mistral" else {}),
        "torch_dtype": "float32",
        "transformers_version": "4.44.0",
    }
    return config | more


def tiny_folder(
    folder: Path, architecture: str = "llama", tied: bool = True, biases: str = "", dtype: str = "F32"
) -> Path:
    """A complete folder in one safetensors file, without a tokenizer."""
    folder.mkdir(exist_ok=True)
    config = tiny_config(architecture, tied)
    if "qkv" in biases:
        config["attention_bias"] = True
    if "ffn" in biases:
        config["mlp_bias"] = True
    (folder / "config.json").write_text(json.dumps(config))
    stored = as_stored(weights(architecture, tied, biases), dtype)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; a value of ... removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
