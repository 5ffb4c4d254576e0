"""Make a model of the Nemotron-H kind with random weights, whose neurons are silent at a chosen rate.

    python -m benchmarks.models.silent_models OUT.gguf --shape nemotron-3-nano-30b-a3b --layers 8 --type q5_0
    python -m benchmarks.models.silent_models FOLDER --shape nemotron-nano-9b-v2 --layers 8 --silent 0.9,0.95

An OUT that does not end in .gguf is a Hugging Face folder, in F16. --layers cuts the pattern of blocks to fit small
machines, and --vocab the table. --silent gives the share of the neurons that do not fire for a token, for all MLPs,
shared experts and experts, or a share for each block that has some, in turn; the default is what was counted in
Nemotron 3 Nano. A neuron fires where the product of its row of `up` is above zero: the stream carries a constant that
the embedding alone writes, and rows are shifted against it (benchmarks/models/expert_models.py does so with gates).

--predictor writes OUT.powerinfer/predictor.safetensors, too. Most of what a row of `up` sees of the stream lies in a
few directions that the predictor knows, but for a share REST of its variance, which nobody predicts (firing.py): so it
is set to select --recall of the neurons that fire, and selects others with them: at 90.7 % silence and a recall of 98 %
15 % of the neurons, where 9 % fire.

Random weights say nothing about quality; the work they make is that of real ones. Blocks of a kind share their weights,
and the experts of a block repeat a few, so that large models are written in minutes: memory holds each on its own.
Embedding and head are Q8_0, norms, routers and the vectors of Mamba2 F32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.models.firing import Firing
from benchmarks.models.gguf_writer import Builder
from benchmarks.models.vocabulary import gguf_fields, write_json, write_tokenizer_files
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.families import FOLDERS
from powerinfer.formats.predictor_file import write_predictor
from powerinfer.formats.quant import quantize
from powerinfer.formats.safetensors_file import safetensors_header
from powerinfer.neurons import Predictor
from powerinfer.placement import shapes as placed

SEED = 20251215
SILENT = 0.907
"""Share of the neurons of Nemotron 3 Nano's experts that are exactly zero, over 72,174 calls of experts."""
TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16")
DISTINCT = 8
"""Experts of a block that differ; the others repeat them."""
CARRIED = 0.5
"""The constant in the stream, relative to the rest."""
KNOWN = 63
"""Directions of the stream that a predictor knows, at most a quarter of its width."""
REST = 0.05
RECALL = 0.98
"""Share of the neurons that fire which predictors select."""
CONTEXT = 4096

Parts = dict[str, tuple[int, ...]]
"""Tensors by their name in a block of GGUF -> shape."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, as its config.json has them; pattern: the blocks that it keeps."""

    document: dict[str, Any]
    pattern: str
    vocab: int

    def __getitem__(self, key: str) -> int:
        return int(self.document[key])

    @property
    def width(self) -> int:
        return self["hidden_size"]

    @property
    def inner(self) -> int:
        """Channels of Mamba2."""
        return self["mamba_num_heads"] * self["mamba_head_dim"]

    def parts(self, letter: str) -> Parts:
        """The tensors of a block by its letter."""
        norm = {"attn_norm.weight": (self.width,)}
        return norm | {"M": self._mamba, "*": self._attention, "-": self._mlp, "E": self._experts}[letter]()

    def _mamba(self) -> Parts:
        heads, groups, state = self["mamba_num_heads"], self["n_groups"], self["ssm_state_size"]
        channels = self.inner + 2 * groups * state
        return {
            "ssm_in.weight": (self.inner + channels + heads, self.width),
            "ssm_conv1d.weight": (channels, self["conv_kernel"]),
            "ssm_conv1d.bias": (channels,),
            "ssm_dt.bias": (heads,),
            "ssm_a": (heads, 1),
            "ssm_d": (heads, 1),
            "ssm_norm.weight": (groups, self.inner // groups),
            "ssm_out.weight": (self.width, self.inner),
        }

    def _attention(self) -> Parts:
        heads, kv = (self[f"num_{kind}_heads"] * self["head_dim"] for kind in ("attention", "key_value"))
        return {
            "attn_q.weight": (heads, self.width),
            "attn_k.weight": (kv, self.width),
            "attn_v.weight": (kv, self.width),
            "attn_output.weight": (self.width, heads),
        }

    def _mlp(self) -> Parts:
        size = self["intermediate_size"]
        return {"ffn_up.weight": (size, self.width), "ffn_down.weight": (self.width, size)}

    def _experts(self) -> Parts:
        n, size, shared = (
            self["n_routed_experts"], self["moe_intermediate_size"], self["moe_shared_expert_intermediate_size"]
        )  # fmt: skip
        return {
            "ffn_gate_inp.weight": (n, self.width),
            "exp_probs_b.bias": (n,),
            "ffn_up_exps.weight": (n, size, self.width),
            "ffn_down_exps.weight": (n, self.width, size),
            "ffn_up_shexp.weight": (shared, self.width),
            "ffn_down_shexp.weight": (self.width, shared),
        }


def cut(name: str, layers: int | None = None, vocab: int | None = None, blocks: str | None = None) -> Sizes:
    """The first blocks of a published shape, or blocks of its sizes by their letters. ValueError for another family, a
    wrong number of blocks or an unknown letter."""
    known = json.loads(Path(placed.__file__).with_suffix(".json").read_text(encoding="utf-8"))["shapes"]
    if name not in known:
        raise ValueError(f"there is no shape {name} in {placed.__name__}")
    document = FOLDERS["nemotron_h"].defaults | known[name]
    pattern = str(document.get("hybrid_override_pattern", ""))
    if document["model_type"] != "nemotron_h" or document.get("moe_latent_size"):
        raise ValueError(f"{name} is not made here: only nemotron_h without latent experts")
    if blocks is not None:
        if not blocks or not set(blocks) <= set(pattern):
            raise ValueError(f"--blocks must be letters of {pattern}")
        return Sizes(document, blocks, vocab or int(document.get("vocab_size", 131072)))
    if layers is not None and not 1 <= layers <= len(pattern):
        raise ValueError(f"--layers must be from 1 to {len(pattern)}")
    pattern = pattern[:layers]
    if "*" not in pattern:
        raise ValueError(f"--layers must be larger: the first {len(pattern)} have no attention")
    return Sizes(document, pattern, vocab or int(document.get("vocab_size", 131072)))


def type_of(name: str, dims: tuple[int, ...], kind: str) -> str:
    """The type of a tensor: a name of `quant.BLOCK_TYPES`."""
    if len(dims) == 1 or name in ("ssm_a", "ssm_d", "ssm_norm.weight", "ssm_conv1d.weight", "ffn_gate_inp.weight"):
        return "F32"
    return kind.upper()


class Values:
    """The values of tensors, float32. silent: of the blocks that have neurons the share that does not fire."""

    def __init__(self, sizes: Sizes, silent: list[float]) -> None:
        self._sizes = sizes
        width = sizes.width
        self._carried = np.where(np.arange(width) % 2, np.float32(1), np.float32(-1))
        have = [at for at, letter in enumerate(sizes.pattern) if letter in "-E"]
        if len(silent) not in (1, len(have)):
            raise ValueError(f"--silent must give one share, or {len(have)}: one for each block with neurons")
        self._silent = dict(zip(have, silent * (len(have) if len(silent) == 1 else 1), strict=True))

    def share(self, layer: int) -> float | None:
        """The share of a block's neurons that do not fire; None: it has none."""
        return self._silent.get(layer)

    def embedding(self, rows: int) -> np.ndarray:
        """The table, which writes the constant."""
        noise = np.random.default_rng((SEED, 0)).standard_normal((rows, self._sizes.width), np.float32)
        return noise + np.float32(CARRIED) * self._carried

    def head(self, rows: int) -> np.ndarray:
        rng = np.random.default_rng((SEED, 1))
        return rng.standard_normal((rows, self._sizes.width), np.float32) * np.float32(self._sizes.width**-0.5)

    def part(self, name: str, dims: tuple[int, ...], share: float | None) -> np.ndarray:
        """A tensor of a block; of a stack of experts those that differ."""
        if name == "ssm_a":  # states forget half of what they hold within a few tokens, or within hundreds
            return -np.geomspace(0.01, 4, dims[0], dtype=np.float32)[:, None]
        if name in ("ssm_d", "ssm_norm.weight", "attn_norm.weight"):
            return np.ones(dims, np.float32)
        if name == "ssm_dt.bias":
            return np.full(dims, -4, np.float32)
        if name.endswith("bias"):
            return np.zeros(dims, np.float32)
        if len(dims) == 3:
            dims = (min(DISTINCT, dims[0]), *dims[1:])
        rng = np.random.default_rng([SEED, *name.encode()])
        values = rng.standard_normal(dims, np.float32) * np.float32(dims[-1] ** -0.5)
        if name.startswith(("ssm_out", "attn_output", "ffn_down")):  # nothing in the direction of what is carried
            values *= np.float32((50 * len(self._sizes.pattern)) ** -0.5)
            along = np.einsum("w,...wc->...c", self._carried, values) / len(self._carried)
            values -= self._carried[:, None] * along[..., None, :]
        elif name.startswith("ffn_up") and share is not None:
            values *= np.float32(REST**0.5)
            values += np.float32((1 - REST) ** 0.5) * (self._seen(name, dims[:-1]) @ self._basis)
            values -= (values @ self._carried / len(self._carried))[..., None] * self._carried
            values -= np.float32(NormalDist().inv_cdf(share) / CARRIED / len(self._carried)) * self._carried
        return values

    @cached_property
    def _basis(self) -> np.ndarray:
        """The directions that predictors know, [directions, width], orthogonal to each other and to what is carried."""
        width, number = self._sizes.width, min(KNOWN, self._sizes.width // 4)
        drawn = np.random.default_rng((SEED, 2)).standard_normal((width, number + 1))
        drawn[:, 0] = self._carried
        return np.linalg.qr(drawn)[0][:, 1:].T.astype(np.float32)

    def _seen(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """What each row of `up` sees of them, of length 1."""
        rng = np.random.default_rng([SEED, 3, *name.encode()])
        values = rng.standard_normal((*shape, len(self._basis)), np.float32)
        return values / np.linalg.norm(values, axis=-1, keepdims=True)

    def predictor(self, layer: int, rank: int, recall: float) -> tuple[np.ndarray, np.ndarray] | None:
        """in [rank, width] and out [neurons, rank] of the predictor of a block: candidates are z >= 0. None: the block
        has no neurons."""
        share = self.share(layer)
        if share is None:
            return None
        used, carried = 2 * len(self._basis) + 1, self._carried / np.float32(CARRIED * len(self._carried))
        inner = np.zeros((rank, self._sizes.width), np.float32)
        inner[:used] = np.concatenate([self._basis, -self._basis, carried[None]])
        rows = []
        for name, dims in self._sizes.parts(self._sizes.pattern[layer]).items():
            if name.startswith("ffn_up"):
                own = self._seen(name, (min(DISTINCT, dims[0]), dims[1]) if len(dims) == 3 else dims[:1])
                rows.append((_stack(own, dims[0]) if len(dims) == 3 else own).reshape(-1, len(self._basis)))
        seen = np.concatenate(rows)
        outer = np.zeros((len(seen), rank), np.float32)
        outer[:, : used - 1] = np.concatenate([seen, -seen], axis=1)
        outer[:, used - 1] = -Firing("relu2", False, REST, recall).cut(np.array([1 - share]))
        return inner, outer


def _stack(stored: np.ndarray, n: int) -> np.ndarray:
    """A stack of n experts that repeats the first ones."""
    return stored[np.arange(n) % len(stored)]


def write(path: Path, sizes: Sizes, kind: str, silent: list[float]) -> None:
    """Write the GGUF file. kind: of `TYPES`."""
    values, builder = Values(sizes, silent), _described(sizes)
    outer = {"token_embd.weight": values.embedding, "output.weight": values.head}
    builder.declare("token_embd.weight", "Q8_0", (sizes.vocab, sizes.width))
    for layer, letter in enumerate(sizes.pattern):
        for name, dims in sizes.parts(letter).items():
            builder.declare(f"blk.{layer}.{name}", type_of(name, dims, kind), dims)
    builder.declare("output_norm.weight", "F32", (sizes.width,))
    builder.declare("output.weight", "Q8_0", (sizes.vocab, sizes.width))
    made: dict[tuple[str, str, float | None], np.ndarray] = {}

    def stored() -> Iterator[np.ndarray]:
        yield quantize(outer["token_embd.weight"](sizes.vocab), "Q8_0")
        for layer, letter in enumerate(sizes.pattern):
            share = values.share(layer)
            for name, dims in sizes.parts(letter).items():
                key = letter, name, share
                if key not in made:
                    print(f"\r{name:24}", end="", file=sys.stderr)
                    type_name, own = type_of(name, dims, kind), values.part(name, dims, share)
                    made[key] = own if type_name == "F32" else quantize(own.reshape(-1, own.shape[-1]), type_name)
                    if len(dims) == 3:
                        made[key] = made[key].reshape(len(own), -1)
                yield _stack(made[key], dims[0]) if len(dims) == 3 else made[key]
        yield np.ones(sizes.width, np.float32)
        yield quantize(outer["output.weight"](sizes.vocab), "Q8_0")

    builder.stream(path, stored())
    print(file=sys.stderr)


def write_predictors(path: Path, sizes: Sizes, silent: list[float], recall: float = RECALL) -> None:
    """Write the predictors of a model that was made with the same arguments, beside it."""
    values, rank = Values(sizes, silent), -(-(2 * min(KNOWN, sizes.width // 4) + 1) // 32) * 32  # whole blocks of Q8_0
    of = {(letter, values.share(at)): at for at, letter in enumerate(sizes.pattern)}  # others are the same
    made = {key: values.predictor(at, rank, recall) for key, at in of.items()}
    each = [made[letter, values.share(at)] for at, letter in enumerate(sizes.pattern)]
    layers = [None if one is None else Predictor(rank, 0.0, 0) for one in each]
    write_predictor(open_checkpoint(path), None, "Q8_0", layers, (one for one in each if one is not None))


@dataclass
class _Model:
    """What `Builder.model` asks for."""

    context: int
    d_model: int
    n_layers: int
    d_ff: list[int]
    n_heads: int
    n_kv_heads: list[int]


def _described(sizes: Sizes) -> Builder:
    """The metadata, as llama.cpp's converter writes it."""
    experts = "E" in sizes.pattern
    architecture = "nemotron_h_moe" if experts else "nemotron_h"
    widths = {"-": "intermediate_size", "E": "moe_intermediate_size"}
    own = [sizes[widths[letter]] if letter in widths else 0 for letter in sizes.pattern]
    kv = [sizes["num_key_value_heads"] * (letter == "*") for letter in sizes.pattern]
    model = _Model(CONTEXT, sizes.width, len(sizes.pattern), own, sizes["num_attention_heads"], kv)
    keys: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,  # llama.cpp asks for it
        "rope.dimension_count": sizes["head_dim"] // 2,  # of nothing that is rotated
        "rope.freq_base": 10000.0,
        "ssm.conv_kernel": sizes["conv_kernel"],
        "ssm.state_size": sizes["ssm_state_size"],
        "ssm.group_count": sizes["n_groups"],
        "ssm.inner_size": sizes.inner,
        "ssm.time_step_rank": sizes["mamba_num_heads"],
    }
    if experts:
        keys |= {
            "expert_count": sizes["n_routed_experts"],
            "expert_used_count": sizes["num_experts_per_tok"],
            "expert_feed_forward_length": sizes["moe_intermediate_size"],
            "expert_shared_feed_forward_length": sizes["moe_shared_expert_intermediate_size"],
            "expert_shared_count": sizes["n_shared_experts"],
            "expert_weights_norm": bool(sizes.document["norm_topk_prob"]),
            "expert_weights_scale": float(sizes.document["routed_scaling_factor"]),
            "expert_group_count": sizes["n_group"],
        }
    builder = Builder().model(architecture, f"random weights, {architecture}", model)
    return builder.fields(keys, f"{architecture}.").fields(gguf_fields(sizes.vocab), "tokenizer.ggml.")


_MODULES = {
    "attn_norm": "norm", "ssm_in": "mixer.in_proj", "ssm_conv1d": "mixer.conv1d", "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj", "ffn_gate_inp": "mixer.gate", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj", "attn_output": "mixer.o_proj",
}  # fmt: skip
_VECTORS = {
    "ssm_dt.bias": "mixer.dt_bias", "ssm_a": "mixer.A_log", "ssm_d": "mixer.D",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
}  # fmt: skip


def _in_folder(layer: int, name: str, own: np.ndarray, n: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name in a folder, values) of a tensor. n: of a stack, how many it has."""
    prefix = f"backbone.layers.{layer}."
    if name in _VECTORS:
        yield prefix + _VECTORS[name], np.log(-own[:, 0]) if name == "ssm_a" else own.reshape(-1)
    elif own.ndim == 3:
        part = "up" if "_up_" in name else "down"
        for expert in range(n):
            yield f"{prefix}mixer.experts.{expert}.{part}_proj.weight", own[expert % len(own)]
    else:
        module, _, end = name.rpartition(".")
        shaped = own[:, None] if name == "ssm_conv1d.weight" else own.reshape(-1) if name == "ssm_norm.weight" else own
        yield f"{prefix}{_MODULES[module]}.{end}", shaped


def write_folder(folder: Path, sizes: Sizes, silent: list[float]) -> None:
    """Write the Hugging Face folder, a file of tensors for each block."""
    values = Values(sizes, silent)
    folder.mkdir(parents=True)
    document = sizes.document | {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": sizes.pattern,
        "num_hidden_layers": len(sizes.pattern),
        "vocab_size": sizes.vocab,
        "max_position_embeddings": CONTEXT,
        "torch_dtype": "float16",
    }
    write_json(folder / "config.json", document)
    write_tokenizer_files(folder, sizes.vocab)
    places: dict[str, str] = {}

    def file(name: str, tensors: dict[str, np.ndarray]) -> None:
        kept = {key: own if own.ndim == 1 else own.astype(np.float16) for key, own in tensors.items()}
        described = [(key, "F32" if own.ndim == 1 else "F16", own.shape, own.nbytes) for key, own in kept.items()]
        with (folder / name).open("wb") as out:
            out.write(safetensors_header(described, {"format": "pt"}))
            for own in kept.values():
                out.write(np.ascontiguousarray(own).data)
        places.update(dict.fromkeys(kept, name))

    ones = np.ones(sizes.width, np.float32)
    ends = {"backbone.embeddings.weight": values.embedding(sizes.vocab), "backbone.norm_f.weight": ones}
    file("model-ends.safetensors", ends | {"lm_head.weight": values.head(sizes.vocab)})
    for layer, letter in enumerate(sizes.pattern):
        share = values.share(layer)
        parts = [(name, values.part(name, dims, share), dims[0]) for name, dims in sizes.parts(letter).items()]
        file(f"model-{layer:03}.safetensors", {key: own for part in parts for key, own in _in_folder(layer, *part)})
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": nbytes}, "weight_map": places})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="NAME.gguf, or a folder")
    parser.add_argument("--shape", default="nemotron-3-nano-30b-a3b", help="a published shape of nemotron_h")
    parser.add_argument("--layers", type=int, metavar="N", help="blocks; default: all")
    parser.add_argument("--blocks", metavar="LETTERS", help="in place of --layers, say MMM*MMM")
    parser.add_argument("--vocab", type=int, metavar="N", help="default: the shape's own")
    parser.add_argument("--type", choices=TYPES, default="q5_0", help="of the blocks' matrices")
    parser.add_argument("--predictor", action="store_true", help="write predictors, too")
    parser.add_argument("--recall", type=float, default=RECALL, metavar="R", help=f"of predictors; default {RECALL}")
    parser.add_argument("--silent", default=str(SILENT), metavar="F[,F...]", help=f"default {SILENT}")
    arguments = parser.parse_args()
    try:
        silent = [float(share) for share in arguments.silent.split(",")]
        if not all(0 < share < 1 for share in silent):
            raise ValueError("--silent must be between 0 and 1")
        if not 0 < arguments.recall < 1:
            raise ValueError("--recall must be between 0 and 1")
        sizes = cut(arguments.shape, arguments.layers, arguments.vocab, arguments.blocks)
        Values(sizes, silent)
    except ValueError as error:
        parser.error(str(error))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.out.exists():
        print(f"{arguments.out} exists already: kept", file=sys.stderr)
    elif arguments.out.suffix == ".gguf":
        write(arguments.out, sizes, arguments.type, silent)
    else:
        write_folder(arguments.out, sizes, silent)
    if arguments.predictor:
        write_predictors(arguments.out, sizes, silent, arguments.recall)


if __name__ == "__main__":
    main()
