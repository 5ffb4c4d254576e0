"""Tiny random models with a draft head (MTP), as files, and what `transformers` says of both.

The head's layer is a model of one layer of the family: its embedding is replaced by the projection of what the head
reads, written here from the paper (arXiv 2412.19437). In Nemotron-H that is a model of two layers, attention and
experts, whose tensors are those of one layer in GGUF files.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import SIZES, TOKENS, Case, build, case_named, double_precision, random_model, save
from safetensors.numpy import load_file, save_file

from powerinfer.devices.disk import DiskTier, OnDisk
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.formats.gguf import read_gguf
from powerinfer.formats.gguf_model import open_gguf
from powerinfer.formats.layout import matrix_names
from powerinfer.formats.tensors import RawTensor

# Settings of a model of the head's layer alone.
ONE_LAYER: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4_moe_lite": {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
    "bailing_moe": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "minimax_m2": {"num_hidden_layers": 1},
    "ernie4_5_moe": {"num_hidden_layers": 1},  # a dense one
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
    "llama": {"num_hidden_layers": 1},
}
BELOW_MTP = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
ONE_LAYER |= {kind: {"num_hidden_layers": 1, "layer_types": ["full_attention"]} for kind in BELOW_MTP}
OF_LAYER = {"join": "eh_proj", "embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
OF_MTP = {"join": "fc", "embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"}
FINAL = OF_LAYER | {"norm": "final_layernorm"}
OF_ERNIE = {"join": "mtp_linear_proj.0", "embed_norm": "mtp_emb_norm.0", "hidden_norm": "mtp_hidden_norm.0"}
# Of a kind, what the tensors of its layers begin with, by number, that of what is around them, and the names of that.
PLACES = dict.fromkeys(BELOW_MTP, (["mtp.layers.0."], "mtp.", OF_MTP))
PLACES["ernie4_5_moe"] = ["model.mtp_block.0."], "model.", OF_ERNIE
PLACES["nemotron_h"] = ["mtp.layers.0.", "mtp.layers.1."], "mtp.layers.0.", FINAL
COUNTS = dict.fromkeys(BELOW_MTP, "mtp_num_hidden_layers") | {"minimax_m2": "num_mtp_modules"}
IN_GGUF = {
    "join": "nextn.eh_proj", "embed_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm",
    "norm": "nextn.shared_head_norm", "embed": "nextn.embed_tokens", "head": "nextn.shared_head_head",
}  # fmt: skip


class DraftModel:
    """A random model of a case with a head. whole: the head has an embedding and an output head of its own."""

    def __init__(self, name: str, *, whole: bool = False) -> None:
        self.case: Case = case_named(name)
        self.config = self.case.config()
        self.layers: int = self.config.num_hidden_layers
        self.one_layer = self.case.config(**ONE_LAYER[self.case.kind])
        self.whole = whole
        self.final_norm = self.case.kind != "ernie4_5_moe"  # which has the model's
        self.tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], TOKENS + 1).astype(np.int32)
        rng = np.random.default_rng(8)
        d = self.config.hidden_size
        self.around = {name: 1 + 0.3 * rng.standard_normal(d) for name in ("embed_norm", "hidden_norm")}
        self.around["join"] = 1.5 * rng.standard_normal((d, 2 * d)) / np.sqrt(2 * d)
        self.around = {name: values.astype(np.float32) for name, values in self.around.items()}

    @cached_property
    def model(self) -> Any:
        return random_model(self.case, self.config, 11)

    @cached_property
    def head(self) -> Any:
        """A model of the head's layer, final norm, and output head."""
        head = random_model(self.case, self.one_layer, 12)
        if not self.final_norm:
            head.model.norm.load_state_dict(self.model.model.norm.state_dict())
        return head

    # ---- what transformers says

    @cached_property
    def exact(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(hidden states that the head reads, those that it gives, its logits) of all positions, in float64."""
        with double_precision(self.case.base):
            return self._said(torch.float64)

    @cached_property
    def narrow(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same in float32."""
        return self._said(torch.float32)

    def _said(self, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        model, head = build(self.case, self.config).to(dtype), build(self.case, self.one_layer).to(dtype)
        model.load_state_dict(self.model.state_dict())
        head.load_state_dict(self.head.state_dict())
        tokens = torch.from_numpy(self.tokens.astype(np.int64))[None]
        with torch.inference_mode():
            hidden = model.model(tokens[:, :-1]).last_hidden_state
            given, logits = self._head_of(model, head, hidden, tokens[:, 1:])
        return tuple(one[0].numpy() for one in (hidden, given, logits))  # type: ignore[return-value]

    def _head_of(self, model: Any, head: Any, hidden: Any, tokens: Any) -> tuple[Any, Any]:
        """(hidden states, logits) of the head. hidden: what it reads; tokens: those that follow."""
        around = {name: torch.from_numpy(values).to(hidden.dtype) for name, values in self.around.items()}

        def norm(x: Any, name: str) -> Any:
            epsilon = getattr(self.config, "rms_norm_eps", None) or self.config.layer_norm_epsilon
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * around[name]

        embedded = (head if self.whole else model).get_input_embeddings()(tokens)
        both = torch.cat([norm(embedded, "embed_norm"), norm(hidden, "hidden_norm")], -1) @ around["join"].T
        given = head.model(inputs_embeds=both).last_hidden_state
        return given, (head if self.whole else model).lm_head(given)

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Drafts in a row that follow these tokens, in float64: each reads what the head gave the one before."""
        text, dtype = list(tokens), torch.float64
        with double_precision(self.case.base), torch.inference_mode():
            model, head = build(self.case, self.config).to(dtype), build(self.case, self.one_layer).to(dtype)
            model.load_state_dict(self.model.state_dict())
            head.load_state_dict(self.head.state_dict())
            read = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
            for _ in range(count):
                given, logits = self._head_of(model, head, read, torch.tensor([text[1:]]))
                read = torch.cat([read, given[:, -1:]], 1)
                text.append(int(logits[0, -1].argmax()))
        return text[len(tokens) :]

    # ---- files

    def save(self, layout: str, folder: Path) -> Path:
        """The files of the model, and of its head in the same place."""
        of_head = folder / "head"
        for place in (folder, of_head):
            place.mkdir(parents=True, exist_ok=True)
        case = replace(self.case, metadata={})
        head = save(case, self.one_layer, self.head, layout, of_head)
        return self._add_to_folder(save(self.case, self.config, self.model, layout, folder), head)

    def _add_to_folder(self, path: Path, head: Path) -> Path:
        if path.is_file():
            return path
        behind = f"model.layers.{self.layers}."
        bailing = self.case.kind == "bailing_moe"
        layers, outer, names = PLACES.get(self.case.kind, ([behind], behind, FINAL if bailing else OF_LAYER))
        mtp = self.case.kind in BELOW_MTP
        at = {f"layers.{number}.": place for number, place in enumerate(layers)}
        tensors = {name: one for file in sorted(path.glob("*.safetensors")) for name, one in load_file(file).items()}
        for file in sorted(path.glob("*.safetensors")):
            file.unlink()
        for file in sorted(head.glob("*.safetensors")):
            for name, one in load_file(file).items():
                layer = next((layer for layer in at if name.partition(".")[2].startswith(layer)), None)
                if layer is not None:
                    tensors[at[layer] + name.partition(layer)[2]] = one
                elif name.endswith(("model.norm.weight", ".norm_f.weight")):
                    if self.final_norm:
                        tensors[f"{layers[-1] if len(layers) > 1 else outer}{names['norm']}.weight"] = one
                elif self.whole:
                    new = {"model.embed_tokens.weight": "embed_tokens", "lm_head.weight": "shared_head.head"}[name]
                    tensors[f"{outer}{new}.weight"] = one
        for name, values in self.around.items():
            stored = values - mtp if values.ndim == 1 else values  # norms less one
            tensors[f"{outer}{names[name]}.weight"] = stored.astype(np.float32)
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
        save_file(tensors, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        config[COUNTS.get(self.case.kind, "num_nextn_predict_layers")] = 1
        (path / "config.json").write_text(json.dumps(config))
        return path

    def open(self, path: Path, draft_head: bool = True, change: Any = None) -> Checkpoint:
        """The checkpoint; of a GGUF file the head's tensors are added as it is read. change: called with the tensors
        (and keys) of such a file."""
        if path.is_dir():
            return open_checkpoint(path, draft_head=draft_head)
        file, head = read_gguf(path), read_gguf(path.parent / "head" / path.name)
        architecture, at = file.metadata["general.architecture"], f"blk.{self.layers}."
        file.metadata[f"{architecture}.block_count"] = self.layers + 1
        file.metadata[f"{architecture}.nextn_predict_layers"] = 1
        if self.case.kind == "nemotron_h":
            for key in ("attention.head_count_kv", "feed_forward_length"):
                file.metadata[f"{architecture}.{key}"] += [max(head.metadata[f"{architecture}.{key}"])]
        in_file = IN_GGUF | ({"norm": "layer_output_norm"} if self.case.kind == "bailing_moe" else {})
        own = {"output_norm.weight": "norm"} if self.final_norm else {}
        own |= {"token_embd.weight": "embed", "output.weight": "head"} if self.whole else {}
        for name, tensor in head.tensors.items():
            if name.startswith("blk.0."):
                file.tensors[name.replace("blk.0.", at)] = tensor
            elif name.startswith("blk.1."):
                file.tensors[name.replace("blk.1.", at).replace("attn_norm", "post_attention_norm")] = tensor
            elif name in own:
                file.tensors[f"{at}{in_file[own[name]]}.weight"] = tensor
        for name, values in self.around.items():
            data = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8)
            file.tensors[f"{at}{in_file[name]}.weight"] = RawTensor("F32", values.shape, data)
        if change is not None:
            change(file.metadata, file.tensors)
        return Checkpoint(open_gguf(file, draft_head))


def tier_of(checkpoint: Checkpoint) -> DiskTier:
    """The disk tier of a model of which RAM has its head, or heads, and half of the experts of each layer."""
    config = checkpoint.config
    names = [name for name in matrix_names(config) if not name.endswith(("head", "k_b", "v_b", "router"))]
    places = {name: place for name in names if (place := checkpoint.rests_at(name)) is not None}
    slots = {layer: experts.n_experts // 2 + 3 for layer, experts in config.experts.items()}
    return DiskTier(OnDisk(frozenset(places), 256 << 10, experts=slots), checkpoint.files, places.values())
