"""Tiny models of every architecture, as GGUF files and Hugging Face folders, every byte under the test's control."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models.gguf_writer import F32, STRING, U32, Builder

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
    "positions": "position_embd",
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


PLAIN = ("opt", "falcon", "nemotron")  # families with LayerNorm and a plain FFN
PREDICTOR_RANKS = (32, 64)  # of the layers


def plain_shapes(architecture: str, two_norms: bool, biases: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of a family of `PLAIN`, written out on its own as well. two_norms: Falcon's with a norm for the FFN."""
    kv = HEAD_DIM * (HEADS if architecture == "opt" else KV_HEADS)
    yield "embed", (VOCAB, D)
    if architecture == "opt":
        yield "positions", (128 + 2, D)
    for i in range(LAYERS):
        yield f"layers.{i}.attn_norm", (D,)
        yield f"layers.{i}.attn_norm_bias", (D,)
        if architecture != "falcon" or two_norms:
            yield f"layers.{i}.ffn_norm", (D,)
            yield f"layers.{i}.ffn_norm_bias", (D,)
        matrices = {"q": (HEADS * HEAD_DIM, D), "k": (kv, D), "v": (kv, D), "o": (D, HEADS * HEAD_DIM)}
        for name, shape in (matrices | {"up": (FF, D), "down": (D, FF)}).items():
            yield f"layers.{i}.{name}", shape
            if biases:
                yield f"layers.{i}.{name}_bias", shape[:1]
    yield "final_norm", (D,)
    yield "final_norm_bias", (D,)
    if architecture != "opt":
        yield "head", (VOCAB, D)


def family_weights(architecture: str, two_norms: bool = False, predictors: bool = False) -> dict[str, np.ndarray]:
    """Canonical name -> float32 values, for `family_gguf`."""
    rng = np.random.default_rng(6)
    if architecture in PLAIN:
        shapes = plain_shapes(architecture, two_norms, biases=architecture == "opt")
        values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes}
    else:
        values = weights(architecture, tied=False)
    for layer, rank in enumerate(PREDICTOR_RANKS if predictors else ()):
        values[f"layers.{layer}.predictor_in"] = rng.standard_normal((rank, D)).astype(np.float32)
        values[f"layers.{layer}.predictor_out"] = rng.standard_normal((FF, rank)).astype(np.float32)
    return values


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
    builder = tiny_fields(architecture)
    for name, values in weights(architecture, tied, biases).items():
        builder.tensor(gguf_name(name), values)
    return builder


def tiny_fields(architecture: str = "llama") -> Builder:
    """The same without tensors."""
    builder = Builder().fields({"architecture": architecture, "name": "Tiny"}, "general.")
    keys = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 20000.0,
    }
    builder.fields(keys, f"{architecture}.")
    tokens = ["<|endoftext|>", *[chr(ord("a") + i) for i in range(26)], "ab", "abc", "Ġ", "Ġa"]
    tokens += [f"<|x{i}|>" for i in range(VOCAB - len(tokens))]
    kinds = [3 if token.startswith("<|") else 1 for token in tokens]
    vocabulary = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": kinds}
    return builder.fields(vocabulary | {"merges": ["a b", "ab c", "Ġ a"], "eos_token_id": 0}, "tokenizer.ggml.")


def give_limits(
    builder: Builder, limits: np.ndarray | None = None, layers: int = LAYERS, products: bool = False
) -> Builder:
    """The same, with a threshold for each neuron of the first layers; None: random ones, others in each layer.
    products: those of the products are 16 times as large, which leaves a third of these out."""
    for layer in range(layers):
        own = np.random.default_rng([layer, FF]).random(FF, np.float32) if limits is None else limits
        builder.tensor(f"blk.{layer}.ffn_threshold.weight", own)
        if products:
            builder.tensor(f"blk.{layer}.ffn_product_threshold.weight", 16 * own)
    return builder


def family_gguf(architecture: str, two_norms: bool = False, published: bool = False) -> Builder:
    """A complete model of any architecture; published: as PowerInfer wrote it, with predictors."""
    values = family_weights(architecture, two_norms, published)
    builder = tiny_fields(architecture)
    if architecture in PLAIN:
        builder.drop(f"{architecture}.attention.layer_norm_rms_epsilon")
    if architecture in ("falcon", "nemotron"):
        builder.add(f"{architecture}.attention.layer_norm_epsilon", F32, 1e-5)
    if architecture == "falcon" and not published:
        builder.add("falcon.hidden_act", STRING, "relu")
    if architecture == "nemotron":
        builder.put("nemotron.rope.dimension_count", U32, HEAD_DIM // 2)
    if architecture == "opt":
        builder.drop("opt.rope.dimension_count").drop("opt.rope.freq_base").drop("opt.attention.head_count_kv")
        builder.put("opt.context_length", U32, 128 + 2)
    if published:
        builder.magic = b"PWRI"
        builder.add("powerinfer.sparse_threshold", F32, 0.25)
    for name, array in values.items():
        layer, _, inner = name.rpartition(".")
        if architecture == "falcon" and inner in ("k", "v"):
            continue
        if architecture == "falcon" and inner == "q":
            array = np.concatenate([values[f"{layer}.{part}"] for part in "qkv"])
        down = published and inner == "down"
        builder.tensor(family_name(name, architecture, two_norms, published), array.T if down else array)
    return builder


def family_name(canonical: str, architecture: str, two_norms: bool, published: bool) -> str:
    """The name in the file of `family_gguf`."""
    names = GGUF_NAMES | {"predictor_in": "fc1", "predictor_out": "fc2"}
    if architecture == "falcon":
        names |= dict.fromkeys("qkv", "attn_qkv")
    if two_norms:
        names |= {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"}
    if published:
        names |= {"down": "ffn_down_t"}
    return spelled(canonical, names, "blk")


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


PLAIN_CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {"architectures": ["OPTForCausalLM"], "ffn_dim": FF, "word_embed_proj_dim": D, "enable_bias": True},
    "falcon": {
        "architectures": ["FalconForCausalLM"],
        "new_decoder_architecture": True,
        "num_kv_heads": KV_HEADS,
        "activation": "relu",
        "ffn_hidden_size": FF,
        "tie_word_embeddings": False,
        "alibi": False,
        "bias": False,
    },
    "nemotron": {
        "architectures": ["NemotronForCausalLM"],
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FF,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
    },
}


def plain_config(architecture: str) -> dict[str, Any]:
    sizes = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCAB}
    return PLAIN_CONFIGS[architecture] | sizes | {"model_type": architecture, "max_position_embeddings": 128}


def plain_folder(folder: Path, architecture: str) -> Path:
    """A complete folder of a family of `PLAIN`, in F16. The order of the rows of fused matrices is not right."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(plain_config(architecture)))
    values = family_weights(architecture, two_norms=architecture == "falcon")
    stored = {}
    for name, array in values.items():
        layer, _, inner = name.rpartition(".")
        if architecture == "falcon" and inner in ("k", "v"):
            continue
        if architecture == "falcon" and inner == "q":
            array = np.concatenate([values[f"{layer}.{part}"] for part in "qkv"])
        raw = array.astype(np.float16)
        stored[spelled(name, *PLAIN_HF_NAMES[architecture])] = ("F16", raw.shape, raw.tobytes())
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    return folder


PLAIN_HF_NAMES = {
    "opt": (
        {
            **{"embed": "model.decoder.embed_tokens", "positions": "model.decoder.embed_positions"},
            **{"attn_norm": "self_attn_layer_norm", "ffn_norm": "final_layer_norm", "up": "fc1", "down": "fc2"},
            **{"final_norm": "model.decoder.final_layer_norm", "o": "self_attn.out_proj"},
            **{name: HF_NAMES[name] for name in "qkv"},
        },
        "model.decoder.layers",
    ),
    "falcon": (
        {
            **{"embed": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "head": "lm_head"},
            **{"attn_norm": "ln_attn", "ffn_norm": "ln_mlp", "o": "self_attention.dense"},
            **{"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
            **dict.fromkeys("qkv", "self_attention.query_key_value"),
        },
        "transformer.h",
    ),
    "nemotron": (HF_NAMES, "model.layers"),
}


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; a value of ... removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def experts_gguf(experts: int = 4, top: int = 2, leave: str = "", router: int = 0) -> Builder:
    """A tiny model of Mixtral's kind, without the tensor `leave` (LAYER.NAME), with a router of `router` rows."""
    builder = tiny_gguf()
    builder.fields({"expert_count": experts, "expert_used_count": top}, "llama.")
    rng = np.random.default_rng(3)
    plain = [f"blk.{layer}.ffn_{part}.weight" for layer in range(LAYERS) for part in ("gate", "up", "down")]
    builder.tensors = [tensor for tensor in builder.tensors if tensor.name not in plain]
    for layer in range(LAYERS):
        shapes = {"gate_exps": (experts, FF, D), "up_exps": (experts, FF, D), "down_exps": (experts, D, FF)}
        for name, shape in (shapes | {"gate_inp": (router or experts, D)}).items():
            if f"{layer}.{name}" != leave:
                values = rng.standard_normal(shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)
                builder.tensor(f"blk.{layer}.ffn_{name}.weight", values)
    return builder


def in_nvfp4(builder: Builder, ends: tuple[str, ...], spread: float) -> Builder:
    """With random matrices of NVFP4 under the names that end so, and the factors that these have in tensors of their
    own, one of each matrix: e to the power of `spread` times normal numbers."""
    rng = np.random.default_rng(5)
    for tensor in [tensor for tensor in builder.tensors if tensor.name.endswith(ends)]:
        blocks = rng.integers(0, 256, (len(tensor.data) // 4 // 64, 36), np.uint8)
        blocks[:, :4] = rng.integers(0x10, 0x20, (len(blocks), 4))
        tensor.type_id, tensor.data = 40, blocks.tobytes()
        matrices = tensor.dims[2] if len(tensor.dims) > 2 else 1
        factors = np.exp(spread * rng.standard_normal(matrices)).astype(np.float32)
        builder.tensor(tensor.name.replace(".weight", ".scale"), factors)
    return builder


DELTA_KEYS, DELTA_VALUES, DELTA_DIM, TAPS = 2, 4, 16, 4  # key heads, value heads, their dimensions, of the convolution


def delta_gguf(leave: str = "", layers: int = 2) -> Builder:
    """A tiny model of Qwen3.5's kind, without the tensor `leave`: a layer of Gated DeltaNet, one of gated attention."""
    builder = tiny_fields("qwen35").put("qwen35.block_count", U32, layers)
    keys, values = DELTA_KEYS * DELTA_DIM, DELTA_VALUES * DELTA_DIM
    sizes = {
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "full_attention_interval": 2,
        "ssm.conv_kernel": TAPS,
        "ssm.state_size": DELTA_DIM,
        "ssm.group_count": DELTA_KEYS,
        "ssm.time_step_rank": DELTA_VALUES,
        "ssm.inner_size": values,
    }
    builder.fields(sizes | {"rope.dimension_sections": [4, 2, 2, 0]}, "qwen35.")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D), "output_norm.weight": (D,)}
    own: list[dict[str, tuple[int, ...]]] = [
        {
            "attn_qkv.weight": (2 * keys + values, D), "attn_gate.weight": (values, D),
            "ssm_beta.weight": (DELTA_VALUES, D), "ssm_alpha.weight": (DELTA_VALUES, D), "ssm_a": (DELTA_VALUES,),
            "ssm_dt.bias": (DELTA_VALUES,), "ssm_conv1d.weight": (2 * keys + values, TAPS),
            "ssm_norm.weight": (DELTA_DIM,), "ssm_out.weight": (D, values),
        },
        {
            "attn_q.weight": (2 * HEADS * HEAD_DIM, D), "attn_k.weight": (KV_HEADS * HEAD_DIM, D),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, D), "attn_output.weight": (D, HEADS * HEAD_DIM),
            "attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,),
        },
    ]  # fmt: skip
    ffn = {"ffn_gate.weight": (FF, D), "ffn_up.weight": (FF, D), "ffn_down.weight": (D, FF)}
    for layer, tensors in enumerate(own * (layers // 2)):
        norms = {"attn_norm.weight": (D,), "post_attention_norm.weight": (D,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (norms | tensors | ffn).items()}
    rng = np.random.default_rng(5)
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape).astype(np.float32)
        made = drawn / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else 1 + drawn / 10
        if name.endswith("ssm_a"):
            made = -np.exp(drawn - 4)  # the states remember hundreds of tokens
        if name != leave:
            builder.tensor(name, made.astype(np.float32))
    return builder


MAMBA_HEADS, MAMBA_DIM, GROUPS, STATE = 4, 48, 2, 16  # of Mamba2


PLAIN_EXPERTS, SHARED = 4, 160  # without gates, and neurons of the shared one


def mamba_gguf(pattern: str = "M-*M", latents: int = 0) -> Builder:
    """A tiny model of Nemotron-H's kind: M, *, - and E as its pattern has them; latents: of experts."""
    family = "nemotron_h_moe" if "E" in pattern else "nemotron_h"
    builder = tiny_fields(family).put(f"{family}.block_count", U32, len(pattern))
    inner = MAMBA_HEADS * MAMBA_DIM
    channels = inner + 2 * GROUPS * STATE
    sizes = {
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "ssm.conv_kernel": TAPS,
        "ssm.state_size": STATE, "ssm.group_count": GROUPS, "ssm.time_step_rank": MAMBA_HEADS, "ssm.inner_size": inner,
        "attention.head_count_kv": [KV_HEADS * (one == "*") for one in pattern],
        "feed_forward_length": [FF * (one in "-E") for one in pattern],
    }  # fmt: skip
    if "E" in pattern:
        sizes |= {
            "expert_count": PLAIN_EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": FF,
            "expert_shared_feed_forward_length": SHARED, "expert_shared_count": 1, "expert_group_count": 1,
        }  # fmt: skip
    for key in sizes:
        builder.drop(f"{family}.{key}")
    builder.fields(sizes, f"{family}.")
    own: dict[str, dict[str, tuple[int, ...]]] = {
        "M": {
            "ssm_in.weight": (inner + channels + MAMBA_HEADS, D), "ssm_conv1d.weight": (channels, TAPS),
            "ssm_conv1d.bias": (channels,), "ssm_dt.bias": (MAMBA_HEADS,), "ssm_a": (MAMBA_HEADS, 1),
            "ssm_d": (MAMBA_HEADS, 1), "ssm_norm.weight": (GROUPS, inner // GROUPS), "ssm_out.weight": (D, inner),
        },
        "*": {
            "attn_q.weight": (HEADS * HEAD_DIM, D), "attn_k.weight": (KV_HEADS * HEAD_DIM, D),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, D), "attn_output.weight": (D, HEADS * HEAD_DIM),
        },
        "-": {"ffn_up.weight": (FF, D), "ffn_down.weight": (D, FF)},
        "E": {
            "ffn_gate_inp.weight": (PLAIN_EXPERTS, D), "exp_probs_b.bias": (PLAIN_EXPERTS,),
            "ffn_up_exps.weight": (PLAIN_EXPERTS, FF, latents or D),
            "ffn_down_exps.weight": (PLAIN_EXPERTS, latents or D, FF),
            "ffn_up_shexp.weight": (SHARED, D), "ffn_down_shexp.weight": (D, SHARED),
        },
    }  # fmt: skip
    if latents:
        builder.put(f"{family}.moe_latent_size", U32, latents)
        own["E"] |= {"ffn_latent_down.weight": (latents, D), "ffn_latent_up.weight": (D, latents)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D), "output_norm.weight": (D,)}
    for layer, part in enumerate(pattern):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own[part].items()}
        shapes[f"blk.{layer}.attn_norm.weight"] = (D,)
    rng = np.random.default_rng(6)
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape).astype(np.float32)
        made = drawn / np.float32(shape[-1] ** 0.5) if name.endswith(("_in.weight", "_out.weight")) else 1 + drawn / 10
        if len(shape) > 1 and "ssm" not in name:
            made = drawn / np.float32(shape[-1] ** 0.5)
        if name.endswith("ssm_a"):
            made = -np.exp(drawn - 4)  # the states remember hundreds of tokens
        elif name.endswith(("dt.bias", "conv1d.weight")):
            made = drawn / 2
        builder.tensor(name, made.astype(np.float32))
    return builder


def conv_gguf(pattern: str = "C*C") -> Builder:
    """A tiny model of LFM2's kind: C, short convolutions, and *, attention, as its pattern has them."""
    builder = tiny_gguf("lfm2").put("lfm2.block_count", U32, len(pattern)).drop("lfm2.attention.head_count_kv")
    kv_heads = [KV_HEADS * (one == "*") for one in pattern]
    builder.fields({"attention.head_count_kv": kv_heads, "shortconv.l_cache": 3}, "lfm2.")
    own: dict[str, dict[str, tuple[int, ...]]] = {
        "C": {
            "shortconv.in_proj.weight": (3 * D, D), "shortconv.conv.weight": (D, 3),
            "shortconv.out_proj.weight": (D, D),
        },
        "*": {
            "attn_q.weight": (HEADS * HEAD_DIM, D), "attn_k.weight": (KV_HEADS * HEAD_DIM, D),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, D), "attn_output.weight": (D, HEADS * HEAD_DIM),
            "attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,),
        },
    }  # fmt: skip
    both = {"ffn_gate.weight": (FF, D), "ffn_up.weight": (FF, D), "ffn_down.weight": (D, FF)}
    both |= {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D), "token_embd_norm.weight": (D,)}
    for layer, part in enumerate(pattern):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (own[part] | both).items()}
    return with_random(builder, shapes)


def with_random(builder: Builder, shapes: dict[str, tuple[int, ...]]) -> Builder:
    """The same with these tensors alone, matrices and, about 1, vectors."""
    rng, builder.tensors = np.random.default_rng(7), []
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape).astype(np.float32)
        made = drawn / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else 1 + drawn / 10
        builder.tensor(name, made.astype(np.float32))
    return builder


def gemma4_gguf(experts: bool) -> Builder:
    """A tiny model of Gemma 4's kind: with experts, or with inputs of layers and two layers that read the keys and
    values of others."""
    slides, inputs = [True, False] * 2, 0 if experts else 16
    builder = tiny_gguf("gemma4")
    heads = [(HEAD_DIM, KV_HEADS) if sliding else (2 * HEAD_DIM, 1) for sliding in slides]
    attention = {
        "head_count_kv": [kv for _, kv in heads], "key_length": 2 * HEAD_DIM, "value_length": 2 * HEAD_DIM,
        "key_length_swa": HEAD_DIM, "value_length_swa": HEAD_DIM, "sliding_window": 20,
        "sliding_window_pattern": slides, "shared_kv_layers": 0 if experts else 2,
    }  # fmt: skip
    keys = {f"attention.{key}": value for key, value in attention.items()}
    keys |= {"block_count": 4, "rope.dimension_count": 2 * HEAD_DIM, "rope.dimension_count_swa": HEAD_DIM}
    keys |= {"embedding_length_per_layer_input": inputs, "final_logit_softcapping": 20.0}
    if experts:
        keys |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    for key in keys:
        builder.drop(f"gemma4.{key}")
    builder.fields(keys, "gemma4.")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, D), "output_norm.weight": (D,)}
    shapes["rope_freqs.weight"] = (HEAD_DIM,)
    if inputs:
        shapes |= {"per_layer_token_embd.weight": (VOCAB, 4 * inputs), "per_layer_model_proj.weight": (4 * inputs, D)}
        shapes["per_layer_proj_norm.weight"] = (inputs,)
    norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] if experts else ["post_norm"]
    for layer, (dim, kv) in enumerate(heads):
        own: dict[str, tuple[int, ...]] = {f"{name}.weight": (D,) for name in norms}
        own["layer_output_scale.weight"] = (1,)
        own |= {"attn_q.weight": (HEADS * dim, D), "attn_output.weight": (D, HEADS * dim), "attn_q_norm.weight": (dim,)}
        own |= {"ffn_gate.weight": (FF, D), "ffn_up.weight": (FF, D), "ffn_down.weight": (D, FF)}
        if experts or layer < 2:
            own |= {"attn_k.weight": (kv * dim, D), "attn_k_norm.weight": (dim,)}
            own |= {"attn_v.weight": (kv * dim, D)} if slides[layer] else {}
        if inputs:
            own |= {"inp_gate.weight": (inputs, D), "proj.weight": (D, inputs)}
        if experts:
            own |= {"ffn_gate_inp.weight": (4, D), "ffn_gate_inp.scale": (D,), "ffn_down_exps.scale": (4,)}
            own |= {"ffn_gate_up_exps.weight": (4, 64, D), "ffn_down_exps.weight": (4, D, 32)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return with_random(builder, shapes)


def llama4_gguf() -> Builder:
    """A tiny model of Llama 4's kind, as Ollama writes it: experts in every second of four layers."""
    builder = tiny_gguf("llama4").drop("llama4.block_count")
    keys = {"block_count": 4, "interleave_moe_layer_step": 2, "attention.chunk_size": 20, "use_qk_norm": True}
    builder.fields(keys | {"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 32}, "llama4.")
    shapes = {tensor.name: tuple(reversed(tensor.dims)) for tensor in builder.tensors}
    layers = {name.partition("blk.0.")[2]: shape for name, shape in shapes.items() if name.startswith("blk.0.")}
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("blk.")}
    for layer in range(4):
        own = dict(layers)
        if layer % 2:
            own = {name: shape for name, shape in layers.items() if name.startswith("attn") or "norm" in name}
            own["ffn_gate_inp.weight"] = (4, D)
            for of, count in (("exps", (4,)), ("shexp", ())):
                own |= {f"ffn_{part}_{of}.weight": (*count, 32, D) for part in ("gate", "up")}
                own[f"ffn_down_{of}.weight"] = (*count, D, 32)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return with_random(builder, shapes)


LATENTS, ROTATED, UNROTATED, HEAD_VALUES = 32, 8, 32, 16  # of latent attention


def latent_gguf(older: bool) -> Builder:
    """A tiny model of DeepSeek-V2's kind; older: what makes keys and values is in one tensor."""
    builder = tiny_gguf("deepseek2")
    plain = [f"blk.{layer}.attn_{part}.weight" for layer in range(LAYERS) for part in "qkv"]
    builder.tensors = [one for one in builder.tensors if one.name not in plain and "attn_output" not in one.name]
    key, value = (UNROTATED + ROTATED, HEAD_VALUES) if older else (LATENTS + ROTATED, LATENTS)
    sizes = {"kv_lora_rank": LATENTS, "key_length": key, "value_length": value}
    if not older:
        sizes |= {"key_length_mla": UNROTATED + ROTATED, "value_length_mla": HEAD_VALUES}
    builder.fields(sizes, "deepseek2.attention.")
    builder.put("deepseek2.rope.dimension_count", U32, ROTATED)
    builder.put("deepseek2.attention.head_count_kv", U32, HEADS if older else 1)
    makers: dict[str, tuple[int, ...]] = {"kv_b": (HEADS * (UNROTATED + HEAD_VALUES), LATENTS)}
    if not older:
        makers = {"k_b": (HEADS, LATENTS, UNROTATED), "v_b": (HEADS, HEAD_VALUES, LATENTS)}
    shapes = makers | {
        "q": (HEADS * (UNROTATED + ROTATED), D), "kv_a_mqa": (LATENTS + ROTATED, D), "kv_a_norm": (LATENTS,),
        "output": (D, HEADS * HEAD_VALUES),
    }  # fmt: skip
    rng = np.random.default_rng(6)
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            drawn = rng.standard_normal(shape).astype(np.float32)
            made = drawn / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else 1 + drawn / 10
            builder.tensor(f"blk.{layer}.attn_{name}.weight", made.astype(np.float32))
    return builder
