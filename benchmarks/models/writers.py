"""Write the models of weights.py as GGUF files and Hugging Face folders, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from benchmarks.models.speed_models import vocabulary, write_tokenizer
from benchmarks.models.weights import Plan, Weights, shapes
from powerinfer.formats.quant import quantize

Progress = Callable[[str], None]

EPS = 1e-5
THETA = 10000.0

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
    "qkv": "attn_qkv",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# Falcon-40B's names of its two norms; Falcon-7B has the first only, under the plain name.
GGUF_FALCON_40B = GGUF_NAMES | {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"}
HF_NAMES = {
    "llama": {
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "layers": "model.layers",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{name: f"self_attn.{name}_proj" for name in "qkvo"},
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    },
    "opt": {
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
        "layers": "model.decoder.layers",
        "attn_norm": "self_attn_layer_norm",
        "ffn_norm": "final_layer_norm",
        **{name: f"self_attn.{name}_proj" for name in "qkv"},
        "o": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
    },
    "falcon": {
        "embed": "transformer.word_embeddings",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "layers": "transformer.h",
        "attn_norm": "ln_attn",
        "ffn_norm": "ln_mlp",
        "qkv": "self_attention.query_key_value",
        "o": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
}
TYPES = {  # --type -> (GGUF file type, GGUF tensor type, safetensors type, numpy type of the stored values)
    "f32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32, "F32", np.dtype("<f4")),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16, "F16", np.dtype("<f2")),
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16, "BF16", np.dtype("<u2")),
    "q4_0": (gguf.LlamaFileType.MOSTLY_Q4_0, gguf.GGMLQuantizationType.Q4_0, None, np.dtype(np.uint8)),  # GGUF only
}


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 values as they lie in a file of that type."""
    if kind == "bf16":
        return quantize(values.reshape(1, -1), "BF16").view("<u2").reshape(values.shape)
    if kind == "q4_0":
        return quantize(values, "Q4_0")
    return values.astype(TYPES[kind][3])


def stored_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The shape of `stored` values; of block types that of their bytes."""
    return (*shape[:-1], shape[-1] // 32 * 18) if kind == "q4_0" else shape


def file_tensors(plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`shapes`, with Falcon's Q, K and V as one tensor `qkv`."""
    for name, shape in shapes(plan):
        inner = name.rpartition(".")[2]
        if plan.family == "falcon" and inner in ("q", "k", "v"):
            if inner == "q":
                yield f"{name}kv", ((plan.n_heads + 2 * plan.n_kv_heads) * plan.head_dim, plan.d_model)
        else:
            yield name, shape


def blocks(weights: Weights, name: str, shape: tuple[int, ...], kind: str, to_gguf: bool) -> Iterator[np.ndarray]:
    """A tensor of `file_tensors`, `stored`, in the order of the file's rows.

    Falcon's heads: GGUF has all of Q, K and V in turn, Hugging Face one group after the other. GGUF's llama rotates
    neighbours, Hugging Face halves: the same model has its rows of Q and K in another order.
    """
    plan = weights.plan
    base, _, inner = name.rpartition(".")
    finish = partial(stored, kind=kind)
    if inner == "qkv":
        q, k, v = (
            weights.blocks(f"{base}.{part}", (heads * plan.head_dim, plan.d_model), finish)
            for part, heads in (("q", plan.n_heads), ("k", plan.n_kv_heads), ("v", plan.n_kv_heads))
        )
        if to_gguf:
            for part in (q, k, v):
                yield from part
            return
        for _ in range(plan.n_kv_heads):
            for _ in range(plan.n_heads // plan.n_kv_heads):
                yield next(q)
            yield next(k)
            yield next(v)
        return
    for block in weights.blocks(name, shape, finish):
        if to_gguf and plan.family == "llama" and inner in ("q", "k"):
            block = block.reshape(2, -1, block.shape[1]).swapaxes(0, 1).reshape(block.shape)
        yield block


def tensor(weights: Weights, name: str, shape: tuple[int, ...], kind: str, to_gguf: bool) -> np.ndarray:
    """The whole tensor as stored."""
    out = np.empty(stored_shape(shape, kind), TYPES[kind][3])
    at = 0
    for block in blocks(weights, name, shape, kind, to_gguf):
        out[at : at + len(block)] = block
        at += len(block)
    return out


def spelled(name: str, names: dict[str, str], layers: str) -> str:
    *outer, inner = name.split(".")
    stem = inner.removesuffix("_bias")
    tail = names[stem] + (".weight" if stem == inner else ".bias")
    return f"{layers}.{outer[1]}.{tail}" if outer else tail


# --- GGUF ------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, plan: Plan, kind: str, progress: Progress, threads: int = 1) -> None:
    """Matrices in the type, vectors in F32."""
    names = GGUF_FALCON_40B if plan.parallel and not plan.shared_norm else GGUF_NAMES
    beside = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(beside, plan.family)
    _metadata(writer, plan, kind)
    weights = Weights(plan, threads)
    types = {name: kind if len(shape) > 1 else "f32" for name, shape in file_tensors(plan)}
    for name, dims in file_tensors(plan):
        shape, dtype = stored_shape(dims, types[name]), TYPES[types[name]][3]
        nbytes = int(np.prod(shape)) * dtype.itemsize
        # numpy has no types of bfloat16 and of blocks
        raw = {"raw_dtype": TYPES[types[name]][1]} if types[name] in ("bf16", "q4_0") else {}
        writer.add_tensor_info(spelled(name, names, "blk"), shape, dtype, nbytes, **raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in file_tensors(plan):
        progress(name)
        writer.write_tensor_data(tensor(weights, name, shape, types[name], to_gguf=True))
    writer.close()
    os.replace(beside, path)


def _metadata(writer: gguf.GGUFWriter, plan: Plan, kind: str) -> None:
    writer.add_name(f"random {plan.family}, {100 * plan.active:g} % active")
    writer.add_context_length(plan.context)
    writer.add_embedding_length(plan.d_model)
    writer.add_block_count(plan.n_layers)
    writer.add_feed_forward_length(plan.d_ff)
    writer.add_head_count(plan.n_heads)
    writer.add_head_count_kv(plan.n_kv_heads)
    if plan.layer_norm:
        writer.add_layer_norm_eps(EPS)
    else:
        writer.add_layer_norm_rms_eps(EPS)
    if plan.family != "opt":
        writer.add_rope_freq_base(THETA)
        writer.add_rope_dimension_count(plan.head_dim)
    writer.add_vocab_size(plan.vocab)
    writer.add_file_type(TYPES[kind][0])
    writer.add_string(f"{plan.family}.hidden_act", plan.activation)
    if plan.activation == "fatrelu":
        writer.add_float32(f"{plan.family}.hidden_act_param", plan.offset)
    write_tokenizer(writer, plan.vocab)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def write_folder(path: Path, plan: Plan, kind: str, progress: Progress, shard_bytes: int = 4 << 30) -> None:
    """config.json, tokenizer.json and safetensors shards of about `shard_bytes`."""
    beside = path.with_name(path.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write_json(beside / "config.json", _config(plan, kind))
    write_tokenizer_files(beside, plan.vocab)
    weights = Weights(plan)
    shards = _shards(plan, kind, shard_bytes)
    places = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        with (beside / name).open("wb") as file:
            _write_shard(file, weights, shard, kind, progress)
        places |= dict.fromkeys((hf for hf, _, _ in shard), name)
    if len(shards) > 1:
        total = sum(_nbytes(shape, kind) for _, shape in file_tensors(plan))
        write_json(beside / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    os.replace(beside, path)


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    return int(np.prod(shape)) * TYPES[kind][3].itemsize


def _shards(plan: Plan, kind: str, shard_bytes: int) -> list[list[tuple[str, str, tuple[int, ...]]]]:
    """Lists of (name in the file, canonical name, shape)."""
    names = dict(HF_NAMES[plan.family])
    if plan.shared_norm:
        names["attn_norm"] = "input_layernorm"
    result: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in file_tensors(plan):
        if result[-1] and filled + _nbytes(shape, kind) > shard_bytes:
            result.append([])
            filled = 0
        result[-1].append((spelled(name, names, names["layers"]), name, shape))
        filled += _nbytes(shape, kind)
    return result


def _write_shard(
    file: BinaryIO, weights: Weights, shard: list[tuple[str, str, tuple[int, ...]]], kind: str, progress: Progress
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for hf, _, shape in shard:
        end = at + _nbytes(shape, kind)
        header[hf] = {"dtype": TYPES[kind][2], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, name, shape in shard:
        progress(name)
        file.write(tensor(weights, name, shape, kind, to_gguf=False).data)


def _config(plan: Plan, kind: str) -> dict[str, Any]:
    """config.json for the class of `transformers`, or of ProSparse's or Bamboo's own code."""
    shared = {
        "hidden_size": plan.d_model,
        "num_hidden_layers": plan.n_layers,
        "num_attention_heads": plan.n_heads,
        "vocab_size": plan.vocab,
        "max_position_embeddings": plan.context,
        "tie_word_embeddings": False,
        "unk_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[kind],
    }
    return shared | {"llama": _llama_config, "opt": _opt_config, "falcon": _falcon_config}[plan.family](plan)


def _llama_config(plan: Plan) -> dict[str, Any]:
    name, kind = {"fatrelu": ("SparseLlama", "sparsellama"), "drelu": ("Bamboo", "bamboo")}.get(
        plan.activation, ("Llama", "llama")
    )
    more = {"hidden_act_param": plan.offset} if plan.activation == "fatrelu" else {}
    if kind == "bamboo":
        more = {"sliding_window": None}
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "relu" if plan.activation == "drelu" else plan.activation,
        "intermediate_size": plan.d_ff,
        "num_key_value_heads": plan.n_kv_heads,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        **more,
    }


def _opt_config(plan: Plan) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": plan.activation,
        "ffn_dim": plan.d_ff,
        "word_embed_proj_dim": plan.d_model,
        "do_layer_norm_before": True,
        "enable_bias": True,
    }


def _falcon_config(plan: Plan) -> dict[str, Any]:
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "activation": plan.activation,
        "ffn_hidden_size": plan.d_ff,
        "num_kv_heads": plan.n_kv_heads,
        "new_decoder_architecture": not plan.shared_norm,
        "multi_query": plan.shared_norm,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "layer_norm_epsilon": EPS,
        "rope_theta": THETA,
    }


def write_tokenizer_files(folder: Path, vocab: int) -> None:
    """The vocabulary of the GGUF file as tokenizer.json."""
    tokens, _, merges = vocabulary(vocab)
    special = dict(zip(("unk_token", "bos_token", "eos_token"), tokens, strict=False))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": id, "content": text, **flags} for id, text in enumerate(special.values())],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)}, "merges": merges},
        },
    )
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
