"""Tiny random EAGLE-3 heads, as files, and what the paper (arXiv 2503.01840) says of them, in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from families import SIZES, TOKENS, build, case_named, double_precision, random_model, save
from safetensors.numpy import save_file

D, HEADS, KV_HEADS, HEAD_DIM, FF, VOCAB = 64, 8, 2, 24, 72, SIZES["vocab_size"]
"""Sizes of the head: as wide as the models, with other heads and neurons."""


@dataclass(frozen=True)
class Kind:
    """How a head is made and written. target: its model's case; layers: of the features, stated: what its config.json
    says of them beside the rest; rows: of its output head, 0: it has none; form: of its files."""

    layers: tuple[int, ...]
    target: str = "llama3"
    form: str = "midlayer"
    stated: dict[str, Any] = field(default_factory=dict)
    rows: int = 40
    norms: str = "none"
    normed: bool = False
    normed_output: bool = False
    normed_heads: bool = False
    bias: bool = False
    embedding: bool = False
    window: int = 0


KINDS = {
    "eagle": Kind((2, 1, 0)),
    "nested": Kind(
        (1, 2, 3), "qwen3", stated={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "fc_norm": True},
        rows=0, norms="each", normed_heads=True, embedding=True,
    ),
    "speculators": Kind(
        (0, 2, 3, 3), "gpt-oss", "speculators",
        {"eagle_aux_hidden_state_layer_ids": [0, 2, 3, 3], "norm_before_fc": True, "norm_output": True},
        norms="whole", normed=True, normed_output=True, bias=True, window=9,
    ),
    "gguf": Kind((0, 1, 2), form="gguf", normed=True),
}  # fmt: skip


class EagleModel:
    """A random head of a kind, and its model."""

    def __init__(self, kind: str | Kind, vocab: int = VOCAB) -> None:
        self.kind = kind = KINDS[kind] if isinstance(kind, str) else kind
        self.case = case_named(kind.target)
        self.config = self.case.config()
        self.eps, self.theta = 3e-5, 2000.0
        self.vocab = vocab
        self.tokens = np.random.default_rng(3).integers(0, VOCAB, TOKENS + 1).astype(np.int32)
        rng = np.random.default_rng(8)
        shapes = {f"{part}_proj": ((HEADS if part == "q" else KV_HEADS) * HEAD_DIM, 2 * D) for part in "qkv"}
        shapes |= {"o_proj": (D, HEADS * HEAD_DIM), "gate_proj": (FF, D), "up_proj": (FF, D), "down_proj": (D, FF)}
        shapes |= {"fc": (D, len(kind.layers) * D)}
        self.weights = {name: 1.5 * rng.standard_normal(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
        norms = dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"), D)
        norms |= dict.fromkeys(("q_norm", "k_norm"), HEAD_DIM) if kind.normed_heads else {}
        norms |= {"input_norm": len(kind.layers) * D} if kind.norms == "whole" else {}
        norms |= {f"fc_norm.{at}": D for at in range(len(kind.layers))} if kind.norms == "each" else {}
        self.weights |= {name: 1 + 0.3 * rng.standard_normal(width) for name, width in norms.items()}
        if kind.bias:
            self.weights |= {f"{part}_bias": 0.5 * rng.standard_normal(shapes[f"{part}_proj"][0]) for part in "qkvo"}
        if kind.rows:
            self.weights["lm_head"] = 1.5 * rng.standard_normal((kind.rows, D)) / D**0.5
        if kind.embedding:
            self.weights["embed_tokens"] = rng.standard_normal((vocab, D))
        self.weights = {name: values.astype(np.float32) for name, values in self.weights.items()}
        self.ids = np.sort(rng.permutation(vocab)[: kind.rows]) if kind.rows else np.arange(vocab)

    @cached_property
    def model(self) -> Any:
        return random_model(self.case, self.config, 11)

    # ---- what the paper says

    def features(self, model: Any, tokens: Any) -> Any:
        """What layers of the model get, and the last one gives, of a text, side by side [T, features * D]."""
        seen: dict[int, Any] = {}
        layers = list(model.model.layers)
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, at=at: seen.__setitem__(at, args[0]))
            for at, layer in enumerate(layers)
        ]
        hooks.append(layers[-1].register_forward_hook(lambda _, args, out: seen.__setitem__(len(layers), out)))
        model.model(tokens[None])
        for hook in hooks:
            hook.remove()
        whole = {at: one[0] if isinstance(one, tuple) else one for at, one in seen.items()}
        return torch.cat([whole[at][0] for at in self.kind.layers], -1)

    def weight(self, name: str, dtype: torch.dtype) -> Any:
        return torch.from_numpy(self.weights[name]).to(dtype)

    def norm(self, x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight(name, x.dtype)

    def fused(self, features: Any) -> Any:
        if self.kind.norms == "whole":
            features = self.norm(features, "input_norm")
        if self.kind.norms == "each":
            parts = features.split(D, -1)
            features = torch.cat([self.norm(part, f"fc_norm.{at}") for at, part in enumerate(parts)], -1)
        return features @ self.weight("fc", features.dtype).T

    def layer(self, read: Any, embedded: Any) -> Any:
        """x behind the layer. read: projected features, or what a draft before gave; embedded: of the tokens that
        follow; both [T, D], of positions from 0 on."""
        normed = self.norm(read, "hidden_norm")
        both = torch.cat([self.norm(embedded, "input_layernorm"), normed], -1)
        n, dtype = len(read), read.dtype

        def heads(part: str, count: int) -> Any:
            rows = both @ self.weight(f"{part}_proj", dtype).T
            rows = rows + (self.weight(f"{part}_bias", dtype) if self.kind.bias else 0)
            rows = rows.reshape(n, count, HEAD_DIM)
            return self.norm(rows, f"{part}_norm") if self.kind.normed_heads and part != "v" else rows

        half = HEAD_DIM // 2
        angles = torch.outer(
            torch.arange(n, dtype=dtype), self.theta ** (-torch.arange(half, dtype=torch.float64) / half).to(dtype)
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotated(x: Any) -> Any:
            low, high = x[..., :half], x[..., half:]
            return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

        q, k, v = rotated(heads("q", HEADS)), rotated(heads("k", KV_HEADS)), heads("v", KV_HEADS)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * HEAD_DIM**-0.5
        back = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (back < 0) | (back >= (self.kind.window or n))
        attended = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).reshape(n, -1)
        out = attended @ self.weight("o_proj", dtype).T + (self.weight("o_bias", dtype) if self.kind.bias else 0)
        x = (normed if self.kind.normed else read) + out
        y = self.norm(x, "post_attention_layernorm")
        gate, up, down = (self.weight(f"{part}_proj", dtype) for part in ("gate", "up", "down"))
        return x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T

    def given(self, x: Any) -> Any:
        """What further drafts read."""
        return self.norm(x, "norm") if self.kind.normed_output else x

    def logits(self, x: Any, model: Any) -> Any:
        head = self.weight("lm_head", x.dtype) if self.kind.rows else model.lm_head.weight
        return self.norm(x, "norm") @ head.T

    def embedded(self, model: Any, tokens: Any) -> Any:
        table = model.model.embed_tokens.weight
        return (self.weight("embed_tokens", table.dtype) if self.kind.embedding else table)[tokens]

    def wide(self) -> Any:
        """The model in float64, within `double_precision`."""
        model = build(self.case, self.config).double()
        model.load_state_dict(self.model.state_dict())
        return model

    def said(self, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(features, what drafts read, logits) of all positions."""
        tokens = torch.from_numpy(self.tokens.astype(np.int64))
        with torch.inference_mode():
            if dtype == torch.float64:
                with double_precision(self.case.base):
                    return self._said(self.wide(), tokens)
            return self._said(self.model, tokens)

    def _said(self, model: Any, tokens: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        features = self.features(model, tokens[:-1])
        x = self.layer(self.fused(features), self.embedded(model, tokens[1:]))
        return features.numpy(), self.given(x).numpy(), self.logits(x, model).numpy()

    def drafts(self, text: list[int], count: int) -> list[int]:
        """Drafts in a row that follow a text, in float64: each reads what the head gave the one before."""
        tokens = list(text)
        with double_precision(self.case.base), torch.inference_mode():
            model = self.wide()
            read = self.fused(self.features(model, torch.tensor(text[:-1])))
            for _ in range(count):
                x = self.layer(read, self.embedded(model, torch.tensor(tokens[1:])))
                tokens.append(int(self.ids[int(self.logits(x, model)[-1].argmax())]))
                read = torch.cat([read, self.given(x)[-1:]])
        return tokens[len(text) :]

    # ---- files

    def save_model(self, folder: Path) -> Path:
        return save(self.case, self.config, self.model, "folder", folder)

    def save(self, folder: Path, **settings: Any) -> Path:
        """The head's files. settings: other ones of config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        return self._save_gguf(folder) if self.kind.form == "gguf" else self._save_folder(folder, settings)

    def _save_folder(self, folder: Path, settings: dict[str, Any]) -> Path:
        speculators = self.kind.form == "speculators"
        layer = {
            "model_type": "llama", "hidden_size": D, "intermediate_size": FF, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": self.eps,
            "rope_theta": self.theta, "rope_scaling": None, "max_position_embeddings": 64, "vocab_size": self.vocab,
            "num_hidden_layers": 1, "attention_bias": True, "tie_word_embeddings": False,
        }  # fmt: skip
        if self.kind.window:
            layer |= {"layer_types": ["sliding_attention"], "sliding_window": self.kind.window}
        outer: dict[str, Any] = {"draft_vocab_size": self.kind.rows or None, **self.kind.stated}
        if speculators:
            outer |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
            config = outer | {"transformer_layer_config": layer} | settings
        else:
            config = layer | {"architectures": ["LlamaForCausalLMEagle3"]} | outer | settings
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors(), folder / "model.safetensors")
        return folder

    def tensors(self) -> dict[str, np.ndarray]:
        """The tensors of a folder."""
        at = "layers.0." if self.kind.form == "speculators" else "midlayer."
        tensors: dict[str, np.ndarray] = {}
        for name, values in self.weights.items():
            part, _, what = name.partition("_")
            if what in ("proj", "bias") and part in "qkvo":
                name = f"{at}self_attn.{part}_proj.{'weight' if what == 'proj' else 'bias'}"
            elif what == "proj":
                name = f"{at}mlp.{name}.weight"
            elif name in ("q_norm", "k_norm"):
                name = f"{at}self_attn.{name}.weight"
            elif name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
                name = f"{at}{name}.weight"
            else:
                name += ".weight"
            tensors[name] = values
        if self.kind.rows:
            tensors["d2t"] = self.ids - np.arange(self.kind.rows)
            tensors["t2d"] = np.isin(np.arange(self.vocab), self.ids)
        return tensors

    def _save_gguf(self, folder: Path) -> Path:
        """As llama.cpp's converter writes it: tokens themselves in d2t, rows of q and k in its order."""
        path = folder / "head.gguf"
        writer = gguf.GGUFWriter(path, "eagle3")
        writer.add_context_length(64)
        writer.add_embedding_length(D)
        writer.add_block_count(1)
        writer.add_feed_forward_length(FF)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_rope_freq_base(self.theta)
        writer.add_layer_norm_rms_eps(self.eps)
        writer.add_vocab_size(self.vocab)
        writer.add_array("eagle3.extract_layers", list(self.kind.layers))
        writer.add_uint32("eagle3.target_hidden_size", D)
        writer.add_bool("eagle3.norm_before_residual", self.kind.normed)
        names = {
            "fc": "fc", "norm": "output_norm", "lm_head": "output", "input_layernorm": "blk.0.attn_norm",
            "hidden_norm": "blk.0.attn_norm_2", "post_attention_layernorm": "blk.0.ffn_norm",
            "o_proj": "blk.0.attn_output", **{f"{part}_proj": f"blk.0.attn_{part}" for part in "qkv"},
            **{f"{part}_proj": f"blk.0.ffn_{part}" for part in ("gate", "up", "down")},
        }  # fmt: skip
        for name, values in self.weights.items():
            if name in ("q_proj", "k_proj"):
                heads = len(values) // HEAD_DIM
                values = values.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(values.shape)
            writer.add_tensor(f"{names[name]}.weight", np.ascontiguousarray(values))
        writer.add_tensor("d2t", self.ids.astype(np.int64))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
