"""Write the models of weights.py as GGUF files and Hugging Face folders, one tensor in memory at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.models.gguf_writer import EPS, THETA, dense
from benchmarks.models.vocabulary import gguf_fields, write_json, write_tokenizer_files
from benchmarks.models.weights import Plan, Weights, repeated, shapes
from powerinfer.formats.gguf_model import NAMES
from powerinfer.formats.quant import quantize
from powerinfer.formats.safetensors_file import safetensors_header
from powerinfer.formats.source import Names

Progress = Callable[[str], None]

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
TYPES = {  # --type -> numpy type of the stored values; q4_0: GGUF only
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "q4_0": np.dtype(np.uint8),
}


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 values as they lie in a file of that type."""
    if kind == "bf16":
        return quantize(values.reshape(1, -1), "BF16").view("<u2").reshape(values.shape)
    if kind == "q4_0":
        return quantize(values, "Q4_0")
    return values.astype(TYPES[kind])


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
    out = np.empty(stored_shape(shape, kind), TYPES[kind])
    at = 0
    for block in blocks(weights, name, shape, kind, to_gguf):
        out[at : at + len(block)] = block
        at += len(block)
    return out


# --- GGUF ------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, plan: Plan, kind: str, progress: Progress, threads: int = 1) -> None:
    """Matrices in the type, vectors in F32."""
    builder = dense(
        plan.family, f"random {plan.family}, {100 * plan.active:g} % active", plan, kind,
        layer_norm=plan.layer_norm, rotated=plan.family != "opt",
    )  # fmt: skip
    builder.fields({"hidden_act": plan.activation}, f"{plan.family}.")
    if plan.activation == "fatrelu":
        builder.fields({"hidden_act_param": plan.offset}, f"{plan.family}.")
    builder.fields(gguf_fields(plan.vocab), "tokenizer.ggml.")
    names = replace(NAMES, inner=NAMES.inner | {"qkv": "attn_qkv"})
    if plan.parallel and not plan.shared_norm:  # Falcon-40B's two norms; Falcon-7B has the first, under the plain name
        names = replace(names, inner=names.inner | {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"})
    tensors = [(name, shape, kind if len(shape) > 1 else "f32") for name, shape in file_tensors(plan)]
    for name, shape, stored_as in tensors:
        builder.declare(names(name), stored_as.upper(), shape)
    weights, places = Weights(plan, threads), {name: place for place, (name, *_) in enumerate(tensors)}

    def values(place: int) -> np.ndarray:
        name, shape, stored_as = tensors[place]
        progress(name)
        return tensor(weights, name, shape, stored_as, to_gguf=True)

    builder.stream(path, repeated(values, [places[plan.source_name(name)] for name, *_ in tensors], 1))


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
    return int(np.prod(shape)) * TYPES[kind].itemsize


def _shards(plan: Plan, kind: str, shard_bytes: int) -> list[list[tuple[str, str, tuple[int, ...]]]]:
    """Lists of (name in the file, canonical name, shape)."""
    names = dict(HF_NAMES[plan.family])
    if plan.shared_norm:
        names["attn_norm"] = "input_layernorm"
    file_name = Names(names, names["layers"], names)
    result: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in file_tensors(plan):
        if result[-1] and filled + _nbytes(shape, kind) > shard_bytes:
            result.append([])
            filled = 0
        result[-1].append((file_name(name), name, shape))
        filled += _nbytes(shape, kind)
    return result


def _write_shard(
    file: BinaryIO, weights: Weights, shard: list[tuple[str, str, tuple[int, ...]]], kind: str, progress: Progress
) -> None:
    described = [(hf, kind.upper(), shape, _nbytes(shape, kind)) for hf, _, shape in shard]
    file.write(safetensors_header(described, {"format": "pt"}))
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
