"""Weights of a random model's layer 0 that add a slowly changing signal to the residual stream (routing.py).

Queries and keys are the same for every token: they read u alone, the component that all embeddings share. Heads are
pairs with the same values. The first head of a pair averages the values of about the last WINDOW tokens, the second
those of the whole text, and what the layer writes is their difference, times random weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from powerinfer.config import AttentionConfig, DeltaNetConfig, LatentAttentionConfig, ModelConfig, RopeConfig
from powerinfer.models.rope import rope_frequencies

WINDOW = 32
FALL = 3.0  # beyond the window, weights of attention fall with this power of the distance
LONGEST = 4096  # distances that count


class SlowLayer(ABC):
    """u: float32 [d_model], of length 1; seen: the product of u and what the layer reads; own: the variance of that
    beside u; wanted: of the signal."""

    def __init__(self, config: ModelConfig, u: np.ndarray, seen: float, own: float, wanted: float) -> None:
        self.config, self.u, self.seen, self.own, self.wanted = config, u, seen, own, wanted

    @abstractmethod
    def rows(self, part: str, values: np.ndarray, first: int) -> np.ndarray:
        """Rows of a matrix from `first` on, float32 [n, columns]; values: random ones."""

    def vector(self, part: str, values: np.ndarray) -> np.ndarray:
        """A norm or a bias."""
        return values

    def without_u(self, values: np.ndarray) -> np.ndarray:
        return values - np.outer(values @ self.u, self.u)

    def reading_u(self, products: np.ndarray) -> np.ndarray:
        """Rows whose products with what the layer reads are these numbers, for every token."""
        return (products[:, None] * (self.u / np.float32(self.seen))).astype(np.float32)

    def output_gain(self, variance: float) -> float:
        """Of the output matrix; variance: of what it reads of a pair of heads, together. Its weights are so small that
        the outputs of all layers would add up to about one (`expert_models`), and half of them are the other half's."""
        return float((2 * 2 * self.config.n_layers * self.wanted / variance) ** 0.5)


def paired(values: np.ndarray, size: int, sign: int = 1) -> np.ndarray:
    """Columns of heads of that size: those of every second head are those of the one before it, times `sign`."""
    heads = values.reshape(len(values), -1, size).copy()
    heads[:, 1::2] = sign * heads[:, 0:-1:2]
    return heads.reshape(values.shape)


def slow_layer(config: ModelConfig, u: np.ndarray, seen: float, own: float, wanted: float) -> SlowLayer:
    """The one of a model. ValueError where there can be none."""
    attention = config.layers[0].attention
    given = config, u, seen, own, wanted
    if isinstance(attention, DeltaNetConfig):
        if attention.n_value_heads % 2:
            raise ValueError("--locality needs an even number of heads")
        return SlowDeltaNet(*given)
    if isinstance(attention, LatentAttentionConfig):
        if attention.n_heads % 2:
            raise ValueError("--locality needs an even number of heads")
        return SlowLatents(*given)
    if type(attention) is not AttentionConfig or attention.rope is None or attention.window:
        raise ValueError("--locality needs a first layer with rotary attention, without a window, or Gated DeltaNet")
    if attention.n_kv_heads != attention.n_heads and attention.n_heads // attention.n_kv_heads % 2:
        raise ValueError("--locality needs an even number of heads for each head of keys and values")
    return SlowAttention(*given)


# ---------------------------------------------------------------- attention


class _Rotated:
    """Scores that fall with the distance: queries and keys that are ones in dimensions which rotate less than a radian
    within the window, of a head of `size` dimensions of which the first `plain` are not rotated."""

    def __init__(self, rope: RopeConfig, size: int, scale: float, beside: bool, plain: int = 0) -> None:
        every = rope_frequencies(rope, LONGEST)[0].astype(np.float64)
        self._slow = every[every * WINDOW <= 1]
        of_pair = (every * WINDOW <= 1).astype(np.float32)
        half = np.repeat(of_pair, 2) if beside else np.tile(of_pair, 2)
        self.dims = np.concatenate([np.zeros(plain, np.float32), half, np.zeros(size - plain - len(half), np.float32)])
        lowest = 1 / rope.theta if rope.scaling is None else float(every.min())
        self.sharpness = FALL * float(np.log(1 / lowest / WINDOW))  # the score of a token with itself
        self.amplitude = (self.sharpness / scale / float(self.dims.sum())) ** 0.5

    @property
    def kernel(self) -> np.ndarray:
        """The weights of the tokens before, by distance."""
        score = self.sharpness * np.cos(np.outer(np.arange(LONGEST), self._slow)).mean(axis=1)
        weights = np.exp(score - score[0])
        return np.asarray(weights / weights.sum())

    @property
    def kept(self) -> float:
        """Of the variance of a token's values, what the average has."""
        return float((self.kernel**2).sum())


class SlowAttention(SlowLayer):
    """Rotary attention over keys and values."""

    def __init__(self, config: ModelConfig, u: np.ndarray, seen: float, own: float, wanted: float) -> None:
        super().__init__(config, u, seen, own, wanted)
        about = config.layers[0].attention
        assert isinstance(about, AttentionConfig) and about.rope is not None
        self._about = about
        beside = about.rope.interleaved or config.architecture == "llama"  # as GGUF has its queries and keys
        self._scores = _Rotated(about.rope, about.head_dim, about.scale or about.head_dim**-0.5, beside)

    def rows(self, part: str, values: np.ndarray, first: int) -> np.ndarray:
        size, alone = self._about.head_dim, self._about.n_heads == self._about.n_kv_heads
        if part in ("attn_q", "attn_k"):
            at = first + np.arange(len(values))
            dims = self._scores.dims[at % size] * (part == "attn_k" or at // size % 2 == 0)
            return self.reading_u(self._scores.amplitude * dims)
        if part == "attn_v":
            assert not first, "all heads at once"
            return self.without_u(paired(values.T, size).T if alone else values)
        gain = self.output_gain(self.own * self._scores.kept)
        return np.float32(gain) * paired(values, size, -1) if part == "attn_output" else values

    def vector(self, part: str, values: np.ndarray) -> np.ndarray:
        if part == "attn_q_norm":
            return np.full_like(values, self._scores.sharpness * self._about.head_dim**-0.5)
        return values


class SlowLatents(SlowLayer):
    """Latent attention: scores come from the rotated dimensions alone, values from the latents, whose norm makes their
    variance 1."""

    def __init__(self, config: ModelConfig, u: np.ndarray, seen: float, own: float, wanted: float) -> None:
        super().__init__(config, u, seen, own, wanted)
        about = config.layers[0].attention
        assert isinstance(about, LatentAttentionConfig)
        self._about = about
        self._scores = _Rotated(about.rope, about.query_dim, about.scale, about.rope.interleaved, about.plain_dim)

    def rows(self, part: str, values: np.ndarray, first: int) -> np.ndarray:
        about, at = self._about, first + np.arange(len(values))
        queries = self._scores.amplitude * self._scores.dims[at % about.query_dim] * (at // about.query_dim % 2 == 0)
        if part == "attn_q":
            return self.reading_u(queries)
        if part == "attn_q_a":  # one latent, which its norm makes as large as all together
            return self.reading_u((at == 0).astype(np.float32))
        if part == "attn_q_b":
            assert about.q_latents is not None
            found = np.zeros_like(values)
            found[:, 0] = queries * about.q_latents**-0.5
            return found
        if part == "attn_kv_a_mqa":
            keys = self._scores.dims[about.plain_dim :]
            rotated = at >= about.latents
            products = np.where(rotated, keys[np.maximum(at - about.latents, 0)], 0) * self._scores.amplitude
            return np.where(rotated[:, None], self.reading_u(products), self.without_u(values)).astype(np.float32)
        if part == "attn_v_b":
            assert not first, "all heads at once"
            return paired(values.T, about.value_dim).T
        gain = self.output_gain(self._scores.kept)
        return np.float32(gain) * paired(values, about.value_dim, -1) if part == "attn_output" else values


# ---------------------------------------------------------------- Gated DeltaNet


class SlowDeltaNet(SlowLayer):
    """Gated DeltaNet. With the same key for every token the delta rule makes of a head's state a moving average of its
    values: each token moves it by the share beta. Nothing decays, and the convolution passes the last token on."""

    SMALL = 0.5
    """Of the values before their activation, SiLU, so that it is nearly linear."""
    GATE = 4.0
    """What the output's gate, SiLU too, is given."""
    SECOND = 64
    """How many times longer than the window the second head of a pair averages."""

    def __init__(self, config: ModelConfig, u: np.ndarray, seen: float, own: float, wanted: float) -> None:
        super().__init__(config, u, seen, own, wanted)
        about = config.layers[0].attention
        assert isinstance(about, DeltaNetConfig)
        self._about = about

    def _betas(self) -> np.ndarray:
        """What the sigmoid makes a head's share, by head."""
        share = np.where(np.arange(self._about.n_value_heads) % 2, 1 / (self.SECOND * WINDOW), 1 / WINDOW)
        return np.log(share / (1 - share))

    def rows(self, part: str, values: np.ndarray, first: int) -> np.ndarray:
        about, at = self._about, first + np.arange(len(values))
        if part == "attn_qkv":
            assert not first, "all heads at once"
            keys = 2 * about.n_key_heads * about.key_dim
            own = self.SMALL * self.without_u(paired(values[keys:].T, about.value_dim).T)
            return np.concatenate([self.reading_u(np.ones(keys)), own]).astype(np.float32)
        if part == "attn_gate":
            return self.reading_u(np.full(len(values), self.GATE))
        if part == "ssm_conv1d":
            found = np.zeros_like(values)
            found[:, -1] = 1
            return found
        if part == "ssm_beta":
            return self.reading_u(self._betas()[at])
        if part == "ssm_alpha":
            return np.zeros_like(values)
        if part == "ssm_ba":  # for each key head what its value heads have of the one, and of the other
            share = about.n_value_heads // about.n_key_heads
            group, inside = np.divmod(at, 2 * share)
            return self.reading_u(np.where(inside < share, self._betas()[group * share + inside % share], 0))
        if part == "ssm_out":
            return np.float32(self.output_gain(self._variance())) * paired(values, about.value_dim, -1)
        return values

    def vector(self, part: str, values: np.ndarray) -> np.ndarray:
        return np.full_like(values, -1e-6) if part == "ssm_a" else values

    def _variance(self) -> float:
        """Of the difference of the heads of a pair, gated: found by computing a long text of random values."""
        rng, size = np.random.default_rng(1), self._about.value_dim
        own = self.SMALL * (self.own**0.5) * rng.standard_normal((LONGEST, size))
        values = own / (1 + np.exp(-own))
        gate = self.GATE / (1 + np.exp(-self.GATE))
        state, found = np.zeros((2, size)), np.empty((LONGEST, size))
        shares = 1 / (1 + np.exp(-self._betas()[:2]))[:, None]
        for token, one in enumerate(values):
            state += shares * (one - state)
            out = state * self._about.key_dim**-0.5
            normed = out / (np.square(out).mean(axis=1, keepdims=True) + self.config.norm_eps) ** 0.5
            found[token] = gate * (normed[0] - normed[1])
        return float(found[WINDOW:].var(axis=0).mean())
