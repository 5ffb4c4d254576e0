"""Whole native programs, tiny and random, against the reference operators; and that a token's bits are its own.

The bound on the logits is not a chosen number. The reference runs again with every operator's result disturbed, at
random, by as much as float32 arithmetic may: n roundings add up to 4 sqrt(n) u sum |a| |b| but for one case in
thousands (Higham and Mary, 2019). The native program may stray twice as far as the worst of these runs did.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import numpy as np
import pytest
import reference
from stored_weights import stored_evenly

from powerinfer import _native
from powerinfer.config import ACTIVATIONS, AttentionConfig, LatentAttentionConfig, RopeConfig
from powerinfer.formats.quant import dequantize
from powerinfer.kernels.cpu import LANES, PAGE, round_up

LEVELS = _native.levels()
ROUNDING = 2.0**-24
N_PAGES, MAX_TOKENS = 12, 120
LENGTHS = (75, 33, 5)  # tokens of the three sequences; pages turn at 32 and 64
FEW = 12  # tokens in which every wrong vector shows
PAGE_TABLES = [
    np.array([[7, 2, 11], [0, 9, -1], [4, -1, -1]], np.int32),
    np.array([[1, 10, 3], [8, 5, -1], [6, -1, -1]], np.int32),
]
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
OUTER = ("positions", "project_in", "project_out")
SERIAL = ("pre", "output", "both")  # orders in which the FFN reads what attention has been added to
OFFSET, POSITIONS = 2, 80  # of the table of positions: rows before that of position 0, and from it on


@dataclass(frozen=True)
class Setting:
    """A model to be. types: of embed, head, PARTS and OUTER, in this order, or one for all.

    order: of norms and sums, "pre", "post", "parallel" (attention and FFN read the same x), "shared" (the same norm of
    it), "output" (a norm of what attention and the FFN add) or "both" (that and the one before). head_norms: of q and
    k, over each head, or with wide_norms over all heads together. rope_bases: of the layers, None: not rotated. scale:
    of the scores, None: head_dim ** -0.5. embed_dim: width of the embedding where it is not d_model.
    """

    heads: int
    kv_heads: int
    head_dim: int
    d_model: int
    d_ff: int
    types: str
    kv_type: str
    windows: tuple[int, ...] = (0, 0)
    rotated: int | None = None  # pairs; None: all
    biases: bool = False
    head_norms: bool = False
    wide_norms: bool = False
    rope_bases: tuple[float | None, ...] = (1000.0, 1000.0)
    rope_factor: float = 1.0
    scale: float | None = None
    embedding_scale: float = 1.0
    eps: float = 1e-5
    vocab: int = 45
    norm: str = "rms"
    order: str = "pre"
    activation: str = "silu"
    threshold: float = 0.0
    limits: bool = False  # thresholds of neurons
    curve: tuple[float, ...] = ()  # of xielu
    product_limits: bool = False
    gated: bool = True
    learned_positions: bool = False
    embed_dim: int | None = None

    def type_of(self, part: str) -> str:
        names = self.types.split()
        return names[0] if len(names) == 1 else names[("embed", "head", *PARTS, *OUTER).index(part)]

    def shape(self, part: str) -> tuple[int, int]:
        q, kv, d, ff = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.d_model, self.d_ff
        outer = self.embed_dim or d
        shapes = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q), "gate": (ff, d), "up": (ff, d), "down": (d, ff)}
        shapes |= {"positions": (OFFSET + POSITIONS, d), "project_in": (d, outer), "project_out": (outer, d)}
        return shapes.get(part, (self.vocab, outer))

    def attention(self, layer: int) -> AttentionConfig:
        window = self.windows[layer] or None
        return AttentionConfig(self.heads, self.kv_heads, self.head_dim, window=window, scale=self.scale)

    @property
    def parts(self) -> tuple[str, ...]:
        """Matrices of a layer."""
        return tuple(part for part in PARTS if self.gated or part != "gate")

    @property
    def outer(self) -> tuple[str, ...]:
        """Matrices beside the layers, but for embed and head."""
        projections = OUTER[1:] if self.embed_dim else ()
        return (*OUTER[: int(self.learned_positions)], *projections)

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms over d_model."""
        before = {"output": (), "shared": ("attn_norm",)}.get(self.order, ("attn_norm", "ffn_norm"))
        inner = (*before, *(("attn_out_norm", "ffn_out_norm") if self.order in ("output", "both") else ()))
        layers = tuple(f"{layer}.{name}" for layer in range(len(self.windows)) for name in inner)
        return layers if self.order == "post" else (*layers, "final_norm")


SETTINGS = {
    "odd widths, window of 5": Setting(4, 2, 8, 40, 72, "F32", "f32", windows=(0, 5)),
    "window over pages": Setting(4, 4, 16, 64, 80, "F16", "f16", windows=(40, 0)),
    "four heads a key head, biases": Setting(4, 1, 24, 24, 40, "F32", "q8_0", biases=True),
    "three heads a key head": Setting(3, 1, 64, 96, 160, "Q8_0", "f16", rope_factor=1.25),
    "part of a head rotated, head norms": Setting(2, 2, 80, 64, 96, "Q4_0", "q8_0", rotated=16, head_norms=True),
    "more query heads than a tile": Setting(9, 1, 128, 32, 32, "F32", "f32", biases=True, head_norms=True),
    "bfloat16, window of one": Setting(3, 3, 32, 48, 80, "BF16", "f32", windows=(1, 33)),
    "super-blocks": Setting(4, 2, 64, 256, 512, "Q6_K Q6_K Q4_K Q5_K Q6_K Q4_K Q4_K Q5_K Q6_K", "f16"),
    "a type for every part": Setting(2, 1, 48, 64, 96, "F16 Q4_1 F32 BF16 Q8_0 Q5_1 Q5_0 F32 BF16", "q8_0", (0, 64)),
    "gated relu": Setting(2, 2, 16, 40, 72, "F32", "f32", activation="relu", biases=True),
    "relu above a threshold": Setting(2, 1, 16, 48, 56, "F16", "f32", activation="fatrelu", threshold=0.125),
    "relu on both": Setting(4, 2, 16, 64, 96, "BF16", "f16", activation="drelu"),
    "squared relu, part of a head rotated": Setting(
        4, 2, 24, 64, 104, "F32", "f32", rotated=6, norm="layer", activation="relu2", gated=False, biases=True
    ),
    "learned positions": Setting(
        3, 3, 16, 48, 80, "F32", "f32", rotated=0, norm="layer", activation="relu", gated=False, biases=True,
        learned_positions=True,
    ),
    "learned positions, norms behind, projections": Setting(
        4, 4, 16, 64, 96, "F16", "f16", rotated=0, norm="layer", activation="relu", gated=False, biases=True,
        learned_positions=True, order="post", embed_dim=32,
    ),
    "projections from a wider embedding, odd widths": Setting(
        2, 1, 8, 20, 24, "F32", "f32", norm="layer", embed_dim=52, activation="relu", gated=False
    ),
    "attention and FFN of one norm": Setting(
        4, 1, 16, 64, 96, "Q4_0", "f16", norm="layer", order="shared", activation="relu", gated=False
    ),
    "attention and FFN side by side, biases": Setting(
        4, 2, 16, 40, 88, "F32", "f32", (0, 5), norm="layer", order="parallel", activation="relu", gated=False,
        biases=True,
    ),
    "a type for every part, outer ones too": Setting(
        2, 1, 48, 64, 96, "F16 Q8_0 F32 BF16 Q8_0 Q5_1 Q5_0 F32 BF16 Q4_1 BF16 F16", "q8_0", norm="layer",
        activation="drelu", learned_positions=True, embed_dim=96,
    ),
    "four norms a layer, two tables of angles, scaled": Setting(
        4, 1, 16, 64, 96, "Q8_0", "f16", (0, 33), activation="gelu_tanh", head_norms=True, order="both",
        rope_bases=(1000.0, 50.0), scale=0.125, embedding_scale=8.0,
    ),
    "norms behind, of all heads together": Setting(
        4, 2, 24, 40, 72, "F32", "f32", head_norms=True, wide_norms=True, order="output", rope_bases=(1000.0, None)
    ),
    "a norm of all heads, which fill their lanes": Setting(
        3, 3, 32, 96, 64, "F16", "f32", head_norms=True, wide_norms=True, order="output", activation="gelu_tanh",
        gated=False, biases=True, embed_dim=64, embedding_scale=0.5, rope_bases=(None, 30.0),
    ),
    "relu above a threshold of each neuron": Setting(2, 1, 16, 48, 56, "F16", "f32", activation="fatrelu", limits=True),
    "silu beyond a threshold of each neuron, biases": Setting(
        2, 1, 16, 48, 104, "F32", "f32", activation="cats", limits=True, product_limits=True, biases=True
    ),
    "silu of the largest of a bank": Setting(
        2, 1, 16, 48, 192, "F32", "f32", activation="topk", threshold=20, limits=True, biases=True
    ),
    "the largest of a bank, one bank, no gate": Setting(
        2, 1, 16, 48, 64, "F16", "f32", activation="topk", threshold=63, limits=True, gated=False
    ),
    "what gates exceed a cutoff": Setting(
        2, 1, 16, 48, 72, "F32", "f32", activation="gaussian", threshold=0.8, biases=True
    ),
    "a cutoff below the mean": Setting(
        4, 2, 16, 64, 96, "F16", "f16", activation="gaussian", threshold=-0.8, order="both"
    ),
    "xielu": Setting(
        2, 1, 16, 48, 88, "F32", "f32", head_norms=True, activation="xielu", gated=False, curve=(0.7, 1.1, 0.5, -1e-6)
    ),
    "gated xielu": Setting(2, 1, 16, 40, 88, "F16", "f32", activation="xielu", curve=(0.2, 0.7, 0.9, -1e-3)),
}  # fmt: skip

every_setting = pytest.mark.parametrize("name", SETTINGS)
every_level = pytest.mark.parametrize("level", LEVELS)


class Weights:
    """The bytes of a random model, its packed matrices, and the tokens it reads."""

    def __init__(self, s: Setting, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.s, self.layers = s, len(s.windows)
        names = ["embed", "head", *(f"{layer}.{part}" for layer in range(self.layers) for part in s.parts), *s.outer]
        self.data: dict[str, np.ndarray] = {}
        for name in names:
            rows, k = s.shape(part := name.split(".")[-1])
            size = {"q": 2.0, "k": 2.0}.get(part, 1.0) / (1.0 if part in ("embed", "positions") else np.sqrt(k))
            self.data[name] = stored_evenly(s.type_of(part), rows, k, size, rng)
        vectors: dict[str, int] = {}
        for name in s.norms:
            vectors |= {name: s.d_model} | ({f"{name}_bias": s.d_model} if s.norm == "layer" else {})
        for layer in range(self.layers):
            if s.head_norms:
                heads = {"q": s.heads, "k": s.kv_heads} if s.wide_norms else {"q": 1, "k": 1}
                vectors |= {f"{layer}.{part}_norm": n * s.head_dim for part, n in heads.items()}
            if s.biases:
                vectors |= {f"{layer}.{part}_bias": s.shape(part)[0] for part in s.parts}
            if s.limits:
                vectors[f"{layer}.limits"] = s.d_ff
            if s.product_limits:
                vectors[f"{layer}.product_limits"] = s.d_ff
        self.vectors = {name: rng.uniform(0.5, 1.5, n).astype(np.float32) for name, n in vectors.items()}
        for name in (name for name in vectors if name.endswith("limits")):
            self.vectors[name] *= np.float32(0.2)
        pairs = s.head_dim // 2 if s.rotated is None else s.rotated
        self.frequencies = {
            base: (base ** -(np.arange(pairs) / pairs)).astype(np.float32) for base in s.rope_bases if base and pairs
        }
        self.sequences = [rng.integers(0, s.vocab, n).astype(np.int32) for n in LENGTHS]
        self.packed = {name: self._pack(name) for name in names if name not in ("embed", "positions")}

    def _head_map(self, heads: int) -> np.ndarray:
        """Rows of heads padded to whole lanes, -1 where there is nothing."""
        dim = self.s.head_dim
        within = np.arange(round_up(dim, LANES))
        return np.where(within < dim, np.arange(heads)[:, None] * dim + within, -1).reshape(-1).astype(np.int32)

    def _pack(self, name: str) -> _native.Matrix:
        part = name.split(".")[-1]
        heads = {"q": self.s.heads, "k": self.s.kv_heads, "v": self.s.kv_heads}.get(part)
        rows = None if heads is None else self._head_map(heads)
        kind = self.s.type_of(part)
        return _native.pack_matrix(_native.Pool(1), _native.Arena(), kind, *self.s.shape(part), self.data[name], rows)

    def padded_bias(self, layer: int, part: str, heads: int) -> np.ndarray | None:
        bias = self.vectors.get(f"{layer}.{part}_bias")
        if bias is None:
            return None
        rows = self._head_map(heads)
        return np.where(rows < 0, np.float32(0), bias[rows])

    def norm(self, name: str) -> _native.Norm | None:
        weight = self.vectors.get(name)
        if weight is None:
            return None
        bias = self.vectors.get(f"{name}_bias")
        return _native.Norm(weight, self.s.eps, bias, layer=bias is not None)

    def table(self, name: str) -> _native.Table:
        return _native.Table(self.s.type_of(name), *self.s.shape(name), self.data[name])

    def program(self, level: str, threads: int) -> _native.Program:
        s = self.s
        cache = _native.Cache(s.kv_type, [(s.kv_heads, s.head_dim)] * self.layers, N_PAGES)
        sizes = (MAX_TOKENS, s.d_model, s.d_ff, [s.heads] * self.layers)
        p = _native.Program(_native.Workspace(_native.Pool(threads), level), cache, *sizes, s.embed_dim)
        ropes = {base: p.add_rope(table, s.rope_factor) for base, table in self.frequencies.items()}
        positions = self.table("positions") if s.learned_positions else None
        p.embed(self.table("embed"), positions, OFFSET, self.packed.get("project_in"), s.embedding_scale)
        for i in range(self.layers):
            attn_norm, ffn_norm = self.norm(f"{i}.attn_norm"), self.norm(f"{i}.ffn_norm")
            rope = ropes.get(s.rope_bases[i], -1)
            if s.order == "post":
                assert attn_norm is not None and ffn_norm is not None
                self._attention(p, i, None, rope)
                self._project(p, i)
                p.normalise(attn_norm)
                self._ffn(p, i, None)
                p.normalise(ffn_norm)
                continue
            self._attention(p, i, attn_norm, rope)
            if s.order in SERIAL:
                self._project(p, i)
            self._ffn(p, i, ffn_norm or attn_norm)
            if s.order not in SERIAL:
                self._project(p, i)
        p.head(self.norm("final_norm"), self.packed["head"], self.packed.get("project_out"))
        return p

    def _attention(self, p: _native.Program, i: int, norm: _native.Norm | None, rope: int) -> None:
        q, k, v = (self.packed[f"{i}.{part}"] for part in "qkv")
        biases = (self.padded_bias(i, part, self.s.heads if part == "q" else self.s.kv_heads) for part in "qkv")
        norms = self.norm(f"{i}.q_norm"), self.norm(f"{i}.k_norm")
        settings = self.s.attention(i)
        p.attention_input(i, settings, norm, q, k, v, *biases, *norms, rope)
        p.attention(i, settings)

    def _project(self, p: _native.Program, i: int) -> None:
        p.project(i, self.packed[f"{i}.o"], self.vectors.get(f"{i}.o_bias"), self.norm(f"{i}.attn_out_norm"))

    def _ffn(self, p: _native.Program, i: int, norm: _native.Norm | None) -> None:
        up, down = (self.packed[f"{i}.{part}"] for part in ("up", "down"))
        *biases, down_bias = (self.vectors.get(f"{i}.{part}_bias") for part in ("gate", "up", "down"))
        limits = (self.vectors.get(f"{i}.{name}") for name in ("limits", "product_limits"))
        spec = _native.NeuronSpec(self.s.activation, self.s.threshold, *biases, *limits, curve=self.s.curve)
        neurons = _native.DenseNeurons(spec, self.packed.get(f"{i}.gate"), up, down)
        p.ffn(_native.FfnSpec(norm, self.norm(f"{i}.ffn_out_norm"), down_bias), neurons)


class Reference:
    """The same model in the reference operators. noise: disturbs every result as far as float32 may."""

    def __init__(self, weights: Weights, noise: np.random.Generator | None = None) -> None:
        self.w, self.noise = weights, noise

    def _disturbed(self, exact: np.ndarray, size: np.ndarray, roundings: int) -> np.ndarray:
        if self.noise is None:
            return exact
        return exact + size * (4 * roundings**0.5 * ROUNDING * self.noise.choice([-1.0, 1.0], exact.shape))

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        part = name.split(".")[-1]
        kind, (rows, k) = self.w.s.type_of(part), self.w.s.shape(part)
        planes = 2 if name == "head" else 1
        exact = reference.linear(x, self.w.data[name], kind, rows, planes)
        b = np.abs(dequantize(self.w.data[name].reshape(rows, -1), kind)).astype(np.float64)
        n = 2 * k if kind in ("F32", "F16", "BF16") else 4 * k // 32 + 8
        out = self._disturbed(exact, np.abs(reference.seen_by(x, kind, planes)) @ b.T, n)
        bias = self.w.vectors.get(f"{name}_bias")
        return out if bias is None else out + bias

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """Of a norm that the setting does not have: x."""
        if name not in self.w.vectors:
            return x
        weight, eps = self.w.vectors[name], self.w.s.eps
        roundings = x.shape[-1] // LANES + 8
        if f"{name}_bias" not in self.w.vectors:
            exact = reference.rms_norm(x, weight, eps)
            return self._disturbed(exact, np.abs(exact), roundings)
        bias = self.w.vectors[f"{name}_bias"]
        exact = reference.layer_norm(x, weight, bias, eps)
        # the mean is off by as much as the sum of what was added up
        by = np.abs(weight) / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
        size = np.abs(exact - bias) + np.abs(bias) + by * np.abs(x).mean(axis=-1, keepdims=True)
        return self._disturbed(exact, size, roundings)

    def _heads(self, x: np.ndarray, i: int, part: str, rotation: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
        s, rows = self.w.s, self._linear(x, f"{i}.{part}")
        if part != "v" and s.wide_norms:
            rows = self._norm(rows, f"{i}.{part}_norm")
        heads = rows.reshape(len(x), -1, s.head_dim)
        if part == "v":
            return heads
        if s.head_norms and not s.wide_norms:
            heads = self._norm(heads, f"{i}.{part}_norm")
        if rotation is None:
            return heads
        rotated = reference.rope(heads, *rotation)
        return self._disturbed(rotated, np.full(rotated.shape, np.abs(rotated).max()), 4)

    def _attention(self, normed: np.ndarray, i: int) -> np.ndarray:
        s, tokens, window = self.w.s, len(normed), self.w.s.windows[i]
        positions, pages = np.arange(tokens, dtype=np.int32), np.arange(-(-tokens // PAGE), dtype=np.int32)
        table = self.w.frequencies.get(s.rope_bases[i])
        rotation = None if table is None else reference.rotations(positions, table, s.rope_factor)
        q, k, v = (self._heads(normed, i, part, rotation) for part in "qkv")
        q = self._disturbed(q, np.abs(q), s.head_dim)  # the error of the scores
        caches = []
        for part in (k, v):
            cache = np.zeros((len(pages) * PAGE, s.kv_heads, s.head_dim), np.float32)
            cache[:tokens] = reference.kv_rounded(part, s.kv_type)
            caches.append(cache.reshape(len(pages), PAGE, s.kv_heads, s.head_dim))
        out = reference.attention(q, *caches, pages, positions, window, s.scale)
        out = self._disturbed(out, np.full(out.shape, np.abs(caches[1]).max()), tokens + 8)
        return self._linear(out.reshape(tokens, -1), f"{i}.o")

    def _ffn(self, normed: np.ndarray, i: int) -> np.ndarray:
        s = self.w.s
        hidden = [self._linear(normed, f"{i}.{part}") for part in s.parts if part in ("gate", "up")]
        limits = self.w.vectors.get(f"{i}.limits", s.curve or s.threshold)
        own = self.w.vectors.get(f"{i}.product_limits")
        active = reference.activate(
            s.activation, *hidden, threshold=limits, kept=int(s.threshold), product_threshold=own
        )
        return self._linear(self._disturbed(active, np.abs(active), 12), f"{i}.down")

    def _sum(self, x: np.ndarray, more: np.ndarray) -> np.ndarray:
        return self._disturbed(x + more, np.abs(x + more), 1)

    def _rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        stored = self.w.data[name].reshape(self.w.s.shape(name)[0], -1)
        return dequantize(stored, self.w.s.type_of(name))[rows].astype(np.float64)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """[tokens, vocab] of one sequence from its start."""
        s = self.w.s
        x = self._rows("embed", tokens) * s.embedding_scale
        if s.embed_dim:
            x = self._linear(x, "project_in")
        if s.learned_positions:
            x = self._sum(x, self._rows("positions", OFFSET + np.arange(len(tokens))))
        for i in range(self.w.layers):
            if s.order == "post":
                x = self._norm(self._sum(x, self._attention(x, i)), f"{i}.attn_norm")
                x = self._norm(self._sum(x, self._ffn(x, i)), f"{i}.ffn_norm")
                continue
            normed = self._norm(x, f"{i}.attn_norm")
            attended = self._norm(self._attention(normed, i), f"{i}.attn_out_norm")
            if s.order in SERIAL:
                x = self._sum(x, attended)
            fed = self._ffn(normed if s.order == "shared" else self._norm(x, f"{i}.ffn_norm"), i)
            x = self._sum(x, self._norm(fed, f"{i}.ffn_out_norm"))
            if s.order not in SERIAL:
                x = self._sum(x, attended)
        if s.order != "post":
            x = self._norm(x, "final_norm")
        return self._linear(self._linear(x, "project_out") if s.embed_dim else x, "head")


@cache
def weights_of(name: str) -> Weights:
    return Weights(SETTINGS[name], seed=list(SETTINGS).index(name))


@cache
def expected(name: str) -> tuple[np.ndarray, float]:
    """(logits of the first sequence, how far they may be missed)."""
    weights = weights_of(name)
    exact = Reference(weights).logits(weights.sequences[0])
    runs = [Reference(weights, np.random.default_rng(i)).logits(weights.sequences[0]) for i in range(4)]
    return exact, 2 * max(float(np.abs(run - exact).max()) for run in runs)


Part = tuple[int, int, int]  # row, first position, tokens


def step(program: _native.Program, weights: Weights, parts: list[Part], table: np.ndarray) -> list[np.ndarray]:
    """One run over parts of sequences; the logits of every token, [tokens, vocab] each part."""
    vocab = weights.s.vocab
    tokens = np.concatenate([weights.sequences[row][first : first + n] for row, first, n in parts])
    positions = np.concatenate([np.arange(first, first + n, dtype=np.int32) for _, first, n in parts])
    rows = np.concatenate([np.full(n, row, np.int32) for row, _, n in parts])
    logits = np.full((len(tokens), round_up(vocab, LANES)), np.nan, np.float32)
    every = np.arange(len(tokens), dtype=np.int32)
    program.run(tokens, positions, rows, table, every, logits, 0, program.size, vocab)
    assert not logits[:, vocab:].any() and np.isfinite(logits).all()
    return np.split(logits[:, :vocab], np.cumsum([n for _, _, n in parts])[:-1])


@cache
def whole(name: str, level: str) -> tuple[np.ndarray, ...]:
    """The logits of each sequence, alone, in one go, with one thread."""
    weights, out = weights_of(name), []
    for row, length in enumerate(LENGTHS):
        out += step(weights.program(level, 1), weights, [(row, 0, length)], PAGE_TABLES[0])
    return tuple(out)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


@every_level
@every_setting
def test_logits_are_those_of_the_reference(name: str, level: str) -> None:
    exact, bound = expected(name)
    assert np.abs(whole(name, level)[0] - exact).max() <= bound


@every_setting
def test_the_bound_notices_every_setting(name: str) -> None:
    """A model that is a little different misses the bound: the test above can fail."""
    weights, (exact, bound) = weights_of(name), expected(name)
    s = weights.s
    wrong = {
        "window": replace(s, windows=tuple(w + 1 if w else 64 for w in s.windows)),
        "eps": replace(s, eps=0.1),
        "activation": replace(s, activation="silu" if s.activation == "relu" else "relu", curve=()),
    }
    if s.rotated != 0:
        wrong["rope"] = replace(s, rope_factor=s.rope_factor * 1.05)
    if s.rope_bases != Setting.rope_bases:
        wrong["tables of angles"] = replace(s, rope_bases=s.rope_bases[::-1])
    if s.wide_norms:
        wrong["norms of heads"] = replace(s, head_norms=False, wide_norms=False)
    if s.scale:
        wrong["scale"] = replace(s, scale=s.scale * 1.1)
    if s.embedding_scale != 1:
        wrong["embedding"] = replace(s, embedding_scale=1.0)
    for at, number in enumerate(s.curve[:3]):
        wrong[f"curve {at}"] = replace(s, curve=(*s.curve[:at], number * 1.05, *s.curve[at + 1 :]))
    if s.threshold:
        wrong["threshold"] = replace(s, threshold=s.threshold + 1 if s.limits else s.threshold * 1.1)
    if s.order == "parallel":
        wrong["order"] = replace(s, order="pre")
    for what, setting in wrong.items():
        other = Weights(setting, seed=list(SETTINGS).index(name))
        assert np.abs(Reference(other).logits(other.sequences[0]) - exact).max() > bound, what
    for changed in weights.vectors:
        if changed.endswith("k_bias") and s.rotated == 0:
            continue  # adds the same to every score of a query: nothing
        kept = weights.vectors[changed]
        weights.vectors[changed] = np.roll(kept, 1)
        missed = np.abs(Reference(weights).logits(weights.sequences[0][:FEW]) - exact[:FEW]).max()
        weights.vectors[changed] = kept
        assert missed > bound, changed


@every_level
@every_setting
def test_chunks_and_threads_give_the_same_bits(name: str, level: str) -> None:
    weights, (expected_logits, *_) = weights_of(name), whole(name, level)
    """At the best level with every number of threads: how work is cut for them depends on no level."""
    ways = (2, [1, 31, 1, 32, 10]), (1, [1] * 75), (3, [9, 66])
    for threads, sizes in ways if level == LEVELS[0] else ways[:1]:
        program, first, out = weights.program(level, threads), 0, []
        for n in sizes:
            out += step(program, weights, [(0, first, n)], PAGE_TABLES[1])
            first += n
        assert same_bits(np.concatenate(out), expected_logits), (threads, sizes)


@every_level
@every_setting
def test_batches_give_the_same_bits(name: str, level: str) -> None:
    """Three sequences side by side: prompts together, prompts beside decoding, decoding together."""
    weights, alone = weights_of(name), whole(name, level)
    for threads in (1, 2, 3) if level == LEVELS[0] else (2,):
        program, table = weights.program(level, threads), PAGE_TABLES[threads % 2]
        batches = [[(0, 0, 73), (1, 0, 30), (2, 0, 2)], [(1, 30, 1), (0, 73, 1), (2, 2, 2)],
                   [(0, 74, 1), (1, 31, 1), (2, 4, 1)], [(1, 32, 1)]]  # fmt: skip
        for parts in batches:
            for (row, first, n), logits in zip(parts, step(program, weights, parts, table), strict=True):
                assert same_bits(logits, alone[row][first : first + n]), (threads, row, first)


@pytest.mark.sampled(("activation", "level"), ("activation", "limits", "gated"))
@every_level
@pytest.mark.parametrize(
    ("activation", "limits", "gated"),
    [
        *((name, name == "topk", gated) for name in ACTIVATIONS for gated in (True, False)),
        *((name, True, gated) for name in ("fatrelu", "cats") for gated in (True, False)),
        ("gaussian", False, True),
    ],
)
def test_what_is_no_number_stays_so(activation: str, limits: bool, gated: bool, level: str) -> None:
    """A NaN that enters the activation of one neuron reaches every logit, as it does in `transformers`."""
    own = {"activation": activation, "limits": limits, "threshold": 30 if activation == "topk" else 0}
    own["product_limits"] = gated and limits and activation != "topk"
    own["curve"] = (0.7, 1.1, 0.5, -1e-6) if activation == "xielu" else ()
    setting = Setting(2, 1, 8, 24, 64, "F32", "f32", gated=gated, biases=True, **own)  # type: ignore[arg-type]
    for part in setting.parts[4:-1]:
        weights = Weights(setting, seed=5)
        vocab, tokens, at = setting.vocab, np.arange(3, dtype=np.int32), np.zeros(3, np.int32)
        logits = np.zeros((3, round_up(vocab, LANES)), np.float32)
        step_of = (tokens, tokens, at, PAGE_TABLES[0], tokens, logits)
        program = weights.program(level, 1)
        program.run(*step_of, 0, program.size, vocab)
        assert np.isfinite(logits).all()
        weights.vectors[f"1.{part}_bias"][17] = np.nan
        program = weights.program(level, 1)
        program.run(*step_of, 0, program.size, vocab)
        assert np.isnan(logits[:, :vocab]).all(), part


def simple() -> tuple[Weights, _native.Program, dict[str, np.ndarray]]:
    """A model, its program and good arguments of a step of six tokens of two sequences."""
    weights = weights_of("odd widths, window of 5")
    step_of = {
        "tokens": np.array([1, 2, 3, 4, 5, 6], np.int32),
        "positions": np.array([0, 1, 2, 0, 1, 2], np.int32),
        "rows": np.array([0, 0, 0, 2, 2, 2], np.int32),
        "page_table": PAGE_TABLES[0].copy(),
        "logit_rows": np.array([2, 5], np.int32),
        "logits": np.full((2, 48), np.nan, np.float32),
    }
    return weights, weights.program("", 1), step_of


@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_that_is_stopped_ends_with_the_operator_under_way(threads: int) -> None:
    weights, _, step_of = simple()
    program = weights.program("", threads)
    run = partial(program.run, **step_of, last=program.size, vocab=45)
    assert run(first=0, stop=np.zeros(1, np.int32)) is True
    right = step_of["logits"].copy()
    step_of["logits"][:] = 0
    stop = np.ones(1, np.int32)
    for first in range(program.size - 1):  # as many calls as there are operators
        assert run(first=first, stop=stop) is False
        assert not step_of["logits"].any()
    assert run(first=program.size - 1, stop=stop) is True, "nothing was left out"
    assert same_bits(step_of["logits"], right)
    with pytest.raises(ValueError, match="stop is one number"):
        run(first=0, stop=np.zeros(2, np.int32))
    with pytest.raises(TypeError):  # a copy would not be seen
        run(first=0, stop=np.zeros(1, np.int64))


def test_only_the_logits_asked_for_are_written() -> None:
    weights, program, step_of = simple()
    every = step_of | {"logit_rows": np.arange(6, dtype=np.int32), "logits": np.full((6, 48), np.nan, np.float32)}
    program.run(**every, first=0, last=program.size, vocab=45)
    for asked in ([], [4], [5, 0, 5]):
        logits = np.full((4, 48), np.nan, np.float32)
        some = step_of | {"logit_rows": np.array(asked, np.int32), "logits": logits}
        program.run(**some, first=0, last=program.size, vocab=45)
        assert same_bits(logits[: len(asked)], every["logits"][asked]) and np.isnan(logits[len(asked) :]).all()
    assert weights.s.vocab == 45


def test_two_threads_of_python_may_run_a_program(request: pytest.FixtureRequest) -> None:
    """Steps of other positions between the parts of none: each has the angles of its own."""
    weights, program, step_of = simple()
    del weights

    def run(first: int) -> np.ndarray:
        table = step_of["page_table"][[0 if first == 0 else 1]].copy()
        one = step_of | {"rows": np.zeros(6, np.int32), "page_table": table, "logits": np.empty((2, 48), np.float32)}
        program.run(
            **one | {"positions": np.arange(first, first + 6, dtype=np.int32)}, first=0, last=program.size, vocab=45
        )
        return np.asarray(one["logits"][:, :45])

    wanted = {first: run(first) for first in (0, 9)}
    wrong = []

    def check(first: int) -> None:
        wrong.extend(first for _ in range(2000) if not same_bits(run(first), wanted[first]))

    threads = [threading.Thread(target=check, args=(first,)) for first in wanted]
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # they take turns often
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


BAD_VALUES = {
    "token id beyond the vocabulary": ("tokens", 3, 45, "outside the vocabulary"),
    "negative token id": ("tokens", 0, -1, "outside the vocabulary"),
    "huge token id": ("tokens", 5, 2**31 - 1, "outside the vocabulary"),
    "row beyond the table": ("rows", 5, 3, "outside the page table"),
    "negative row": ("rows", 0, -1, "outside the page table"),
    "negative position": ("positions", 0, -1, "beyond the page table"),
    "position beyond the table": ("positions", 5, 96, "beyond the page table"),
    "position gap": ("positions", 2, 3, "must follow each other"),
    "position repeated": ("positions", 1, 0, "must follow each other"),
    "row changes inside a sequence": ("rows", 1, 1, None),
    "unused page": ("page_table", (0, 0), -1, "page is outside the cache"),
    "page beyond the cache": ("page_table", (2, 0), N_PAGES, "page is outside the cache"),
    "logit row beyond the step": ("logit_rows", 1, 6, "logit row is outside"),
    "negative logit row": ("logit_rows", 0, -1, "logit row is outside"),
}


@pytest.mark.parametrize("what", BAD_VALUES)
def test_a_step_with_bad_values_is_refused(what: str) -> None:
    _, program, step_of = simple()
    name, at, value, message = BAD_VALUES[what]
    step_of[name][at] = value
    if message is None:  # three runs of two sequences, each page known: odd, but sound
        program.run(**step_of, first=0, last=program.size, vocab=45)
        return
    with pytest.raises(ValueError, match=message):
        program.run(**step_of, first=0, last=program.size, vocab=45)
    assert np.isnan(step_of["logits"]).all()


def test_a_page_that_is_reached_later_must_be_there_too() -> None:
    weights, program, _ = simple()
    table = PAGE_TABLES[0].copy()
    table[0, 1] = -1
    step(program, weights, [(0, 0, 32)], table)
    with pytest.raises(ValueError, match="page is outside the cache"):
        step(program, weights, [(0, 32, 1)], table)


def test_a_position_without_a_row_is_refused() -> None:
    weights = weights_of("learned positions")
    program, vocab = weights.program("", 1), weights.s.vocab
    one, logits = np.zeros(1, np.int32), np.full((1, 48), np.nan, np.float32)
    for position in (POSITIONS - 1, POSITIONS):
        args = (one, np.array([position], np.int32), one, PAGE_TABLES[0], one, logits, 0, program.size, vocab)
        if position < POSITIONS:
            program.run(*args)
            assert np.isfinite(logits[:, :vocab]).all()
        else:
            with pytest.raises(ValueError, match="beyond the table of positions"):
                program.run(*args)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


BAD_SHAPES = {
    "no tokens": ({"tokens": ints(0), "positions": ints(0), "rows": ints(0)}, "between 1 and max_tokens"),
    "too many tokens": (dict.fromkeys(("tokens", "positions", "rows"), ints(MAX_TOKENS + 1)), "1 and max_tokens"),
    "fewer positions": ({"positions": ints(5)}, "differ in length"),
    "fewer rows": ({"rows": ints(5)}, "differ in length"),
    "room for one row of logits": ({"logits": np.zeros((1, 48), np.float32)}, "room for"),
    "more logits than tokens": ({"logit_rows": ints(7), "logits": np.zeros((7, 48), np.float32)}, "room for"),
    "logits not rounded up to lanes": ({"logits": np.zeros((2, 45), np.float32)}, "another width"),
    "wider logits": ({"logits": np.zeros((2, 64), np.float32)}, "another width"),
    "another vocabulary": ({"vocab": 32, "logits": np.zeros((2, 32), np.float32)}, "another size than the output head"),
    "a vocabulary beyond the embedding": ({"vocab": 46}, "larger than the embedding"),
    "no sequences": ({"page_table": ints(0, 3)}, "outside the page table"),
    "no pages": ({"page_table": ints(3, 0)}, "beyond the page table"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_SHAPES)
def test_a_step_with_bad_shapes_is_refused(what: str) -> None:
    _, program, step_of = simple()
    change, message = BAD_SHAPES[what]
    with pytest.raises(ValueError, match=message):
        program.run(**({"vocab": 45, "first": 0, "last": program.size} | step_of | change))


def test_logits_are_never_written_to_a_copy() -> None:
    _, program, step_of = simple()
    for logits in (np.zeros((2, 48)), np.zeros((2, 96), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            program.run(**step_of | {"logits": logits}, first=0, last=program.size, vocab=45)


HEADS = AttentionConfig(2, 1, 8)


def test_the_settings_of_attention_are_attributes_of_its_configuration() -> None:
    names = set(_native.ATTENTION_SETTINGS)
    assert names <= {field.name for field in fields(AttentionConfig)}
    latent = LatentAttentionConfig(2, 16, 8, 8, 16, RopeConfig(dim=8), 0.5)
    assert names & vars(latent).keys(), "kinds share settings by name"
    _, program, _ = simple()
    for wrong in (None, 0, replace(HEADS, window="long"), replace(HEADS, scale="large")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="AttentionKind"):
            program.attention(0, wrong)


def test_wrong_wiring_is_refused() -> None:
    weights, program, _ = simple()
    ones = np.ones(40, np.float32)
    norm, short = _native.Norm(ones, 1e-5), _native.Norm(ones[:39].copy(), 1e-5)
    q, k, v, o, gate, up, down = (weights.packed[f"0.{part}"] for part in PARTS)
    with pytest.raises(ValueError, match="layer"):
        program.attention_input(2, HEADS, norm, q, k, v)
    for bad in ([norm, k, k, v], [norm, q, q, v], [norm, q, k, q], [norm, q, k, down], [short, q, k, v]):
        with pytest.raises(ValueError):
            program.attention_input(0, HEADS, *bad)
    for rope in (-2, 1):
        with pytest.raises(ValueError, match="rotary"):
            program.attention_input(0, HEADS, norm, q, k, v, rope=rope)
    with pytest.raises(ValueError, match="another length"):
        as_wide_as_q = _native.Norm(np.ones(32, np.float32), 1e-5)
        program.attention_input(0, HEADS, norm, q, k, v, k_norm=as_wide_as_q)
    for name in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm"):
        wrong = np.ones(9, np.float32) if name.endswith("bias") else _native.Norm(np.ones(9, np.float32), 1e-5)
        with pytest.raises(ValueError, match=r"wrong length|another length"):
            program.attention_input(0, HEADS, norm, q, k, v, **{name: wrong})
    for wrong in (replace(HEADS, query_interval=0), replace(HEADS, query_offset=-1)):
        with pytest.raises(ValueError, match="positions"):
            program.attention_input(0, wrong, norm, q, k, v)
    for layer in (2, -1):
        with pytest.raises(ValueError, match="layer"):
            program.attention(layer, HEADS)
        with pytest.raises(ValueError, match="layer"):
            program.project(layer, o)
    with pytest.raises(ValueError, match="negative window"):
        program.attention(0, replace(HEADS, window=-1))
    with pytest.raises(ValueError, match="output projection"):
        program.project(0, down)
    with pytest.raises(ValueError, match="bias"):
        program.project(0, o, ones[:39].copy())
    with pytest.raises(ValueError, match="norm of the output projection"):
        program.project(0, o, norm=short)
    silu = _native.NeuronSpec("silu")
    for weights_ in ((down, up, down), (gate, down, down), (gate, up, gate), (None, down, down)):
        with pytest.raises(ValueError, match="width"):
            program.ffn(_native.FfnSpec(norm), _native.DenseNeurons(silu, *weights_))
    neurons = _native.DenseNeurons(silu, gate, up, down)
    for spec, message in (
        (_native.FfnSpec(short), "the FFN norm"),
        (_native.FfnSpec(norm, short), "norm of the FFN's output"),
        (_native.FfnSpec(down_bias=ones[:39].copy()), "bias of down"),
    ):
        with pytest.raises(ValueError, match=message):
            program.ffn(spec, neurons)
    with pytest.raises(ValueError, match="needs neurons"):
        program.ffn(_native.FfnSpec(norm))
    with pytest.raises(ValueError, match="without a gate"):
        _native.DenseNeurons(_native.NeuronSpec(gate_bias=np.ones(72, np.float32)), None, up, down)
    with pytest.raises(ValueError, match="activation 'gelu'"):
        _native.NeuronSpec("gelu")
    with pytest.raises(ValueError, match="another length"):
        program.normalise(short)
    with pytest.raises(ValueError, match="another length"):
        program.head(short, weights.packed["head"])
    with pytest.raises(ValueError, match="width"):
        program.head(norm, down)
    for projection in (gate, o):
        with pytest.raises(ValueError, match=r"projection|width"):
            program.head(norm, weights.packed["head"], projection)
    with pytest.raises(ValueError, match="width"):
        program.embed(_native.Table("F32", 45, 8, np.zeros(45 * 32, np.uint8)))
    table, narrow = weights.table("embed"), _native.Table("F32", 45, 8, np.zeros(45 * 32, np.uint8))
    with pytest.raises(ValueError, match="projection"):
        program.embed(table, project=o)
    with pytest.raises(ValueError, match="positions has rows of another width"):
        program.embed(table, narrow)
    for offset in (-1, 45):
        with pytest.raises(ValueError, match="no row for position 0"):
            program.embed(table, table, offset)


def test_norms_are_checked() -> None:
    ones = np.ones(8, np.float32)
    with pytest.raises(ValueError, match="only a LayerNorm has a bias"):
        _native.Norm(ones, 1e-5, ones)
    with pytest.raises(ValueError, match="as long as its weights"):
        _native.Norm(ones, 1e-5, np.ones(7, np.float32), True)
    with pytest.raises(ValueError, match="needs weights"):
        _native.Norm(ones[:0], 1e-5)
    for order in ([0, 1, 2, 3, 4, 5, 6, 6], [0, 1, 2, 3, 4, 5, 6, 8], [0, 1, 2, 3, 4, 5, 6, -1]):
        with pytest.raises(ValueError, match="every number once"):
            _native.Norm(ones, 1e-5, order=np.array(order, np.int32))
    with pytest.raises(ValueError, match="another length"):
        _native.Norm(ones, 1e-5, order=np.arange(7, dtype=np.int32))


@pytest.mark.parametrize("kind", ["rms", "layer", "plain"])
def test_norms_put_rows_in_an_order(kind: str) -> None:
    rng = np.random.default_rng(3)
    order = rng.permutation(40).astype(np.int32)
    weight, bias = rng.standard_normal((2, 40)).astype(np.float32)
    settings = {"bias": bias, "layer": True} if kind == "layer" else {"plain": kind == "plain"}
    results = []
    for more in ({}, {"order": order}):
        weights, program, step_of = simple()
        begin = program.size
        program.normalise(_native.Norm(weight, 1e-5, **settings, **more))
        x = program.residual(len(step_of["tokens"]))
        x[:] = np.random.default_rng(4).standard_normal(x.shape)
        program.run(**step_of, first=begin, last=program.size, vocab=weights.s.vocab)
        results.append(x.copy())
    assert np.allclose(results[1], results[0][:, order], rtol=1e-6, atol=0 if kind == "plain" else 1e-6)


def test_wrong_sizes_are_refused() -> None:
    good = {"max_tokens": 4, "d_model": 32, "d_ff": 32, "heads": [4, 3]}
    workspace, cache = _native.Workspace(_native.Pool(1), ""), _native.Cache("f16", [(2, 8), (1, 24)], 4)
    assert cache.pages == 4
    assert cache.nbytes == 4 * sum(_native.kv_page_bytes("f16", *heads) for heads in ((2, 8), (1, 24)))
    for change in (
        {"heads": [3, 3]},
        {"heads": [4]},
        {"heads": [4, 0]},
        {"d_ff": 0},
        {"max_tokens": -1},
        {"embed_dim": 0},
    ):
        with pytest.raises(ValueError):
            _native.Program(workspace, cache, **(good | change))
    program = _native.Program(workspace, cache, **good)
    assert [program.add_rope(np.ones(n, np.float32), 1.0) for n in (4, 5)] == [0, 1]
    pool, arena, zeros = _native.Pool(1), _native.Arena(), np.zeros(96 * 32, np.float32)

    def rows(count: int, columns: int = 32) -> _native.Matrix:
        return _native.pack_matrix(pool, arena, "F32", count, columns, zeros[: count * columns].view(np.uint8))

    # heads of 8 dimensions fill 16 lanes, those of 24 fill 32: each layer takes the matrices of its own heads
    first, second = (rows(64), rows(32), rows(32)), (rows(96), rows(32), rows(32))
    program.attention_input(0, HEADS, None, *first, rope=0)
    with pytest.raises(ValueError, match="rotary"):
        program.attention_input(0, HEADS, None, *first, rope=1)
    with pytest.raises(ValueError, match="rows than its heads"):
        program.attention_input(1, HEADS, None, *first)
    program.attention_input(1, HEADS, None, *second, rope=1)
    with pytest.raises(ValueError, match="output projection"):
        program.project(1, rows(32, 32))
    program.project(0, rows(32, 32))
    for args in (
        ("f8", [(1, 8)], 1), ("f16", [], 1), ("f16", [(1, 8)], 0), ("f16", [(1, 8), (-1, 8)], 1), ("f16", [(1, 0)], 1)
    ):  # fmt: skip
        with pytest.raises(ValueError):
            _native.Cache(*args)


def test_operators_are_timed_by_kind() -> None:
    _, program, step_of = simple()
    program.run(**step_of, first=0, last=program.size, vocab=45)
    assert sum(seconds for _, seconds in program.take_times()) == 0
    program.timed = True
    program.run(**step_of, first=0, last=program.size, vocab=45)
    times = dict(program.take_times())
    assert set(times) == {"embed", "attention_input", "attention", "project", "ffn", "head"}
    assert all(seconds > 0 for seconds in times.values())
