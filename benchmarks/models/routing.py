"""Weights of a random model of experts that make its routers select some experts more often, and often the same again.

Skew. An embedding has, beside its random part, the same component u for every token, a share COMMON of its length. The
row of expert e in a router is random, and has so much of u that the expert is selected with probability p_e: random
scores are normally distributed, so of the score that e needs for that, p_e of the distribution lies above 0. p_e is a
power law, rank ** -skew, with `top_k` experts a token; which expert has which rank is drawn for every layer.

Locality. The attention of layer 0 averages the values of about the last WINDOW tokens: queries and keys are the same
for every token (they read u alone) in the dimensions that rotate slower than the window, so scores fall with the
distance. Every second head averages the whole text instead, and is subtracted: what all of a text has in common is not
slow, but skew. The difference changes slowly, and is so large that it is the share `locality` of the variance that
routers see. Without locality, what a token selects is independent of the token before it, but for the skew.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from powerinfer.config import AttentionConfig, ExpertsConfig, ModelConfig

COMMON = 0.5
WINDOW = 32
FALL = 3.0  # beyond the window, weights fall with this power of the distance
LONGEST = 4096  # distances that count
MOST = 0.98  # of the tokens select one expert


def selection_shares(experts: int, top_k: int, skew: float) -> np.ndarray:
    """The share of the tokens that select each expert, by rank: a power law up to MOST, with the sum top_k."""
    law = np.arange(1, experts + 1) ** -float(skew)
    low, high = 0.0, 2.0 * experts / law[-1]
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(MOST, middle * law).sum() < top_k else (low, middle)
    return np.minimum(MOST, high * law)


@dataclass(frozen=True)
class Routing:
    """What becomes of the weights of a model whose rows are otherwise random."""

    config: ModelConfig
    skew: float = 0.0
    locality: float = 0.0
    seed: int = 7

    def __post_init__(self) -> None:
        attention = self.config.layers[0].attention
        if not 0 <= self.locality < 1 or not 0 <= self.skew <= 4:
            raise ValueError("--skew must be from 0 to 4, --locality from 0 to less than 1")
        if self.locality and (type(attention) is not AttentionConfig or attention.rope is None or attention.window):
            raise ValueError(
                "--locality needs a first layer with rotary attention over keys and values, without a window"
            )
        if (
            self.locality
            and attention.n_kv_heads != attention.n_heads
            and attention.n_heads // attention.n_kv_heads % 2
        ):
            raise ValueError("--locality needs an even number of heads for each head of keys and values")
        for ffn in self.config.experts.values():
            if (
                self.skew
                and selection_shares(ffn.n_experts, ffn.router.top_k, self.skew).sum() < ffn.router.top_k - 0.1
            ):
                raise ValueError(f"{ffn.n_experts} experts cannot be used so unevenly with {ffn.router.top_k} a token")

    @property
    def on(self) -> bool:
        """Whether anything is changed."""
        return self.skew > 0 or self.locality > 0

    def precise(self, name: str) -> bool:
        """Whether a matrix is stored in Q8_0, because its errors would add up over the window."""
        return self.locality > 0 and name.startswith("blk.0.attn_") and name.endswith(".weight")

    def rows(self, name: str, values: np.ndarray, first: int) -> np.ndarray:
        """Rows of a matrix from `first` on, float32 [n, columns]."""
        if not self.on:
            return values
        if name == "token_embd.weight":
            return np.float32((1 - COMMON**2) ** 0.5) * self._without_u(values) + np.float32(COMMON) * self._signs
        if name.endswith("ffn_gate_inp.weight"):
            return self._router(int(name.split(".")[1]), values, first)
        part = name.removeprefix("blk.0.").removesuffix(".weight") if self.locality else ""
        if part in ("attn_q", "attn_k"):
            at, size = first + np.arange(len(values)), len(self._slow)
            dims = self._slow[at % size] * (part == "attn_k" or at // size % 2 == 0)
            return np.float32(self._amplitude / self._seen) * dims[:, None] * self._u
        if part == "attn_v":
            assert not first, "all heads at once"
            return self._without_u(self._halved(values.T).T)
        return np.float32(self._gain) * self._halved(values, -1) if part == "attn_output" else values

    def vector(self, name: str, values: np.ndarray) -> np.ndarray:
        """A norm or a bias."""
        if self.locality and name == "blk.0.attn_q_norm.weight":
            attention = self.config.layers[0].attention
            return np.full_like(values, self._sharpness * attention.head_dim**-0.5)
        return values

    # ---- directions and sizes

    @property
    def _signs(self) -> np.ndarray:
        """The common component of all embeddings, before it is scaled: ones of either sign."""
        draws = np.random.default_rng(self.seed).integers(0, 2, self.config.d_model)
        return (2 * draws - 1).astype(np.float32)

    @property
    def _u(self) -> np.ndarray:
        return self._signs / np.float32(self.config.d_model**0.5)

    @property
    def _variance(self) -> float:
        """Of x where routers read it: of the common part, of the token's own, and of the slow one."""
        return COMMON**2 + (1 - COMMON**2) / (1 - self.locality)

    @property
    def _seen(self) -> float:
        """The product of u and a normalised embedding."""
        return COMMON * self.config.d_model**0.5

    def _without_u(self, values: np.ndarray) -> np.ndarray:
        return values - np.outer(values @ self._u, self._u)

    def _halved(self, values: np.ndarray, sign: int = 1) -> np.ndarray:
        """Columns of heads: those of every second one are those of the head before it, unless both read one value."""
        attention = self.config.layers[0].attention
        heads = values.reshape(len(values), -1, attention.head_dim).copy()
        if sign < 0 or attention.n_heads == attention.n_kv_heads:
            heads[:, 1::2] = sign * heads[:, 0:-1:2]
        return heads.reshape(values.shape)

    def _router(self, layer: int, values: np.ndarray, first: int) -> np.ndarray:
        ffn = self.config.layers[layer].ffn
        assert isinstance(ffn, ExpertsConfig)
        shares = selection_shares(ffn.n_experts, ffn.router.top_k, self.skew)
        drawn = np.random.default_rng((self.seed, layer)).permutation(shares)[first : first + len(values)]
        bias = np.array([NormalDist().inv_cdf(share) for share in drawn])
        common = COMMON**2 / self._variance
        noise = self._without_u(values) / (1 - common) ** 0.5
        read = common**0.5 * self.config.d_model**0.5  # the product of u and what the router reads
        return (noise + np.outer(bias / read, self._u)).astype(np.float32)

    # ---- the attention of layer 0

    @property
    def _frequencies(self) -> np.ndarray:
        """Of the pairs that rotate less than a radian within the window."""
        rope = self.config.layers[0].attention.rope
        assert rope is not None
        every = rope.theta ** -(np.arange(0, rope.dim, 2) / rope.dim)
        return np.where(every * WINDOW <= 1, every, np.nan)

    @property
    def _slow(self) -> np.ndarray:
        """Of a head's dimensions those of these pairs: ones, else zeros."""
        attention = self.config.layers[0].attention
        assert attention.rope is not None
        of_pair = np.isfinite(self._frequencies).astype(np.float32)
        beside = attention.rope.interleaved or self.config.architecture == "llama"  # as GGUF has its queries and keys
        half = np.repeat(of_pair, 2) if beside else np.tile(of_pair, 2)
        return np.concatenate([half, np.zeros(attention.head_dim - len(half), np.float32)])

    @property
    def _sharpness(self) -> float:
        """The score of a token with itself: what makes weights fall with the power FALL."""
        rope = self.config.layers[0].attention.rope
        assert rope is not None
        return FALL * float(np.log(rope.theta / WINDOW))

    @property
    def _amplitude(self) -> float:
        """Of a query's and a key's dimensions; a norm of theirs replaces it."""
        attention = self.config.layers[0].attention
        scale = attention.scale or attention.head_dim**-0.5
        return (self._sharpness / scale / float(self._slow.sum())) ** 0.5

    @property
    def kernel(self) -> np.ndarray:
        """The weights of the tokens before, by distance."""
        slow = self._frequencies[np.isfinite(self._frequencies)]
        score = self._sharpness * np.cos(np.outer(np.arange(LONGEST), slow)).mean(axis=1)
        weights = np.exp(score - score[0])
        return weights / weights.sum()

    @property
    def _gain(self) -> float:
        """Of the output matrix, whose products are otherwise small (`expert_models`)."""
        own = (2 * 2 * self.config.n_layers) ** 0.5  # and half of the heads
        return own * (self.locality / (1 - self.locality) / float((self.kernel**2).sum())) ** 0.5
