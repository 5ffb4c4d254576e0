"""Weights of a random model of experts that make its routers select some experts more often, and often the same again.

Skew. An embedding has, beside its random part, the same component u for every token, a share COMMON of its length. The
row of expert e in a router is random, and has so much of u that the expert is selected with probability p_e: random
scores are normally distributed, so of the score that e needs for that, p_e of the distribution lies above 0. p_e is a
power law, rank ** -skew, with `top_k` experts a token; which expert has which rank is drawn for every layer.

Locality. Layer 0 averages the values of about the last WINDOW tokens in every first head of two. The second averages
the whole text, and is subtracted: what all of a text has in common is not slow, but skew. The difference changes
slowly, and is so large that it is the share `locality` of the variance that routers see. Without locality, what a token
selects is independent of the token before it, but for the skew. How a layer averages (`slow_layers.py`) depends on what
it is: attention, latent attention, or Gated DeltaNet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from benchmarks.models.slow_layers import SlowLayer, slow_layer
from powerinfer.config import ExpertsConfig, ModelConfig

COMMON = 0.5
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
        if not 0 <= self.locality < 1 or not 0 <= self.skew <= 4:
            raise ValueError("--skew must be from 0 to 4, --locality from 0 to less than 1")
        if self.locality:
            self._slow  # noqa: B018 - ValueError where there can be none
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
        return self.locality > 0 and name.startswith(("blk.0.attn_", "blk.0.ssm_")) and name.endswith(".weight")

    def rows(self, name: str, values: np.ndarray, first: int) -> np.ndarray:
        """Rows of a matrix from `first` on, float32 [n, columns]."""
        if not self.on:
            return values
        if name == "token_embd.weight":
            return np.float32((1 - COMMON**2) ** 0.5) * self._without_u(values) + np.float32(COMMON) * self._signs
        if name.endswith("ffn_gate_inp.weight"):
            return self._router(int(name.split(".")[1]), values, first)
        return self._slow.rows(_part(name), values, first) if self.locality and name.startswith("blk.0.") else values

    def vector(self, name: str, values: np.ndarray) -> np.ndarray:
        """A norm or a bias."""
        return self._slow.vector(_part(name), values) if self.locality and name.startswith("blk.0.") else values

    @cached_property
    def _slow(self) -> SlowLayer:
        share = self.locality / (1 - self.locality) * (1 - COMMON**2)
        return slow_layer(self.config, self._u, self._seen, 1 - COMMON**2, share)

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


def _part(name: str) -> str:
    """A tensor of layer 0 by its name in it."""
    return name.removeprefix("blk.0.").removesuffix(".weight")
