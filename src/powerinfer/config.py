"""Frozen configuration: what a model is (`ModelConfig`) and how the engine runs it (`EngineConfig`).

Every default and every help text lives here once; the command line and the Python API take both from these classes.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that carries its help text (and `choices`, `metavar`) to the command line.

    flags: other names of its flag. unlimited: a number that the command line reads as None.
    duration: the field is a number of seconds, which the command line also accepts as 5m or 1h, or -1 for None.
    least: the smallest integer allowed; default: 0 if the field's default is 0, else 1. size: the field is a number of
    bytes, which the command line also accepts as 8GiB or 500MB; sizes: or several, as 8GiB,500MB.
    """
    return field(default=default, metadata={"help": help, **metadata})


_Config = TypeVar("_Config", bound=type)


def documented(config: _Config) -> _Config:
    """A configuration whose docstring ends with its options, each with its type, its default and its help text."""
    texts = (_documentation(one) for one in fields(config) if "help" in one.metadata)
    config.__doc__ = "\n".join((cleandoc(config.__doc__ or ""), "", *texts))
    return config


def _documentation(option: Any) -> str:
    choices = option.metadata.get("choices")
    values = " | ".join(map(repr, choices)) if choices else option.type
    return _wrapped(f"{option.name} ({values}, default {option.default!r}): {python_help(option.metadata['help'])}")


def python_help(help: str) -> str:
    """A help text for the keyword of an option instead of its flag."""
    help = re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), help)
    return help.replace("-1 or none", "None").replace(" (repeatable)", "")


def _wrapped(text: str, width: int = 112) -> str:
    """A paragraph whose lines are indented but for the first: `textwrap` takes longer to import than this for all."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    theta: base of the frequencies; dim: rotated dimensions of a head; interleaved: pairs are (2i, 2i+1), as GGUF
    files of architecture `llama` store them, instead of (i, i + dim/2).
    scaling: None, "linear", "llama3", "yarn" or "longrope"; the fields below it hold that scaling's parameters, named
    as in a Hugging Face `rope_scaling` (Llama 3: low/high_freq_factor; YaRN, arXiv 2309.00071: beta_fast/slow;
    attention_factor, None when it follows from `factor`).
    divisors: of the frequencies, one for each rotated pair; () where all are 1. long_divisors: those of LongRoPE (arXiv
    2402.13753) for contexts beyond original_context_length.
    """

    theta: float = 10000.0
    dim: int = 0
    interleaved: bool = False
    scaling: str | None = None
    factor: float = 1.0
    original_context_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # YaRN's ramp begins and ends at whole pairs
    attention_factor: float | None = None
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    # Of these contexts, in place of attention_factor; None: as of all. Not shown: fingerprints hash what is.
    long_attention_factor: float | None = field(default=None, repr=False)

    def problem(self, head_dim: int) -> str | None:
        """Settings that do not go together, or with heads of that many dimensions; None: all do."""
        if self.dim % 2 or not 2 <= self.dim <= head_dim:
            return f"{self.dim} of a head's {head_dim} dimensions cannot be rotated in pairs"
        if self.scaling == "llama3" and not self.low_freq_factor <= self.high_freq_factor:
            return "RoPE's high_freq_factor is below its low_freq_factor"
        if self.scaling == "yarn" and not self.beta_slow < self.beta_fast:
            return "RoPE's beta_fast is not above its beta_slow"
        return None


ACTIVATIONS = ("silu", "gelu_tanh", "relu", "relu2", "fatrelu", "drelu", "cats", "topk", "xielu")
"""gelu_tanh is GELU by its tanh approximation; relu2 is relu squared; fatrelu keeps what exceeds a threshold; drelu is
relu on the gate and on up; cats (arXiv 2404.08763) is silu where its magnitude exceeds a threshold; topk is silu for so
many neurons of each bank of BANK in turn, those whose magnitude is largest as a multiple of the neuron's threshold;
xielu (arXiv 2411.13010) has a curve of four numbers: `FfnConfig.curve`."""

THRESHOLDED = ("fatrelu", "cats")
"""Activations that have a threshold."""

EXPERT_ACTIVATIONS = (*ACTIVATIONS, "swiglu_oai")
"""Activations of experts: swiglu_oai, gpt-oss's, is gate * sigmoid(1.702 gate) * (up + 1), with both clamped at 7."""

LIMITED = (*THRESHOLDED, "topk")
"""Activations with a number that each layer may have another of: a threshold, or how many neurons count."""

BANK = 64
"""Neurons of a bank, among which the activation topk selects."""

GAUSSIAN = "gaussian"
"""The activation of Gemma 3n's first layers: gelu_tanh of what a gate exceeds the cutoff of its token by, the mean of
all gates and so many of their standard deviations."""

SMOOTH = {GAUSSIAN: "gelu_tanh"}
"""Activations of neurons that compete, and the one that they have of what is left."""

COMPETING = ("topk", GAUSSIAN)
"""Activations by which neurons compete: whether one fires depends on the gates of others."""

RECTIFIED = ("relu", "relu2", "fatrelu", "drelu", "cats", "topk", GAUSSIAN)
"""Activations that are exactly zero for a neuron that does not fire."""


Shape = tuple[int, ...]

# A kind of attention and a kind of FFN is a class of configurations that says for itself which tensors its layers have
# (`tensors`) and what is wrong with its settings (`problem`). How it is wired: `models/blocks.py`.


class AttentionKind(Protocol):
    """Facts that every kind of attention states of itself.

    The cache keeps `cached_heads` keys of `head_dim` numbers for each token, and as many values, unless `latents` of
    each key, its first, are its value.
    """

    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def cached_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def latents(self) -> int: ...
    @property
    def rope(self) -> RopeConfig | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def width(self) -> int:
        """Numbers that all heads get from the cache for a token."""
        ...

    @property
    def title(self) -> str:
        """Description of it, for people."""
        ...

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        """(name within the layer, shape) of every tensor; matrices are [out, in]."""
        ...

    def problem(self) -> str | None:
        """Settings that do not go together; None: there are none."""
        ...

    def row_bytes(self) -> int:
        """Bytes of its working memory on the CPU for each token, beside queries for the cache and what they get."""
        ...


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer: heads over keys and values in the cache."""

    n_heads: int
    n_kv_heads: int  # n_heads / n_kv_heads query heads share the keys and values of one
    head_dim: int
    rope: RopeConfig | None = None  # None: q and k are not rotated
    window: int | None = None  # tokens that a query looks back over, its own included; None: all
    qkv_bias: bool = False
    o_bias: bool = False
    # RMS norm of q and k: "head": of each head; "plain": the same without weights; "rotated": of each head when it is
    # rotated; "width": over all heads together; "separate": LayerNorm of each head, with weights of its own
    qk_norm: str | None = None
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    sinks: bool = False  # each head's softmax has a score more, which is learned and belongs to no value
    # A query at position p is multiplied by 1 + query_growth * log(1 + floor((p + query_offset) / query_interval)). Not
    # shown: fingerprints hash what is, and theirs stay.
    query_growth: float = field(default=0.0, repr=False)
    query_interval: int = field(default=1, repr=False)
    query_offset: int = field(default=0, repr=False)
    # Not shown: fingerprints hash what is, and theirs stay.
    score_cap: float | None = field(default=None, repr=False)  # scores become cap * tanh(score / cap)
    qkv_clip: float | None = field(default=None, repr=False)  # what q, k and v are clamped to, in magnitude
    v_norm: bool = field(default=False, repr=False)  # RMS norm of each head of v, without weights
    keys_as_values: bool = field(default=False, repr=False)  # v is k, before its norm and its rotation
    kv_from: int | None = field(default=None, repr=False)  # the layer whose keys and values it reads; None: its own
    # The window does not move: a text is cut into chunks of its size, and a query sees its own. Not shown: fingerprints
    # hash what is, and theirs stay.
    chunked: bool = field(default=False, repr=False)
    attended_norm: bool = field(default=False, repr=False)  # RMS norm of what heads give, over all of them, before o

    def gated(self, by_head: bool = False) -> GatedAttentionConfig:
        """The same heads with a gate on what they give."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(AttentionConfig)}
        return GatedAttentionConfig(**values, by_head=by_head)

    @property
    def score_scale(self) -> float:
        """The scale of the scores, which a product of a query and a key is multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotates_first(self) -> bool:
        """Whether queries and keys are rotated before they are normalised."""
        return self.qk_norm == "rotated"

    @property
    def width(self) -> int:
        """Elements of all query heads of a token."""
        return self.n_heads * self.head_dim

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the matrices that make queries, keys and values of the input."""
        if self.kv_from is not None:
            return ("q",)
        return ("q", "k") if self.keys_as_values else ("q", "k", "v")

    @property
    def cached_heads(self) -> int:
        """Heads for keys and values that the cache keeps of the layer."""
        return 0 if self.kv_from is not None else self.n_kv_heads

    @property
    def latents(self) -> int:
        return 0

    @property
    def title(self) -> str:
        return f"{self.n_heads} heads of {self.head_dim}, {self.n_kv_heads} for keys and values"

    def row_bytes(self) -> int:
        return 0

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        """(name within the layer, shape) of every tensor; matrices are [out, in]."""
        kv = self.n_kv_heads * self.head_dim
        if self.qk_norm not in (None, "plain"):
            wide, dim = self.qk_norm == "width", self.head_dim
            heads = {"q": self.n_heads} if self.kv_from is not None else {"q": self.n_heads, "k": self.n_kv_heads}
            for name, n in heads.items():
                yield f"{name}_norm", (n, dim) if self.qk_norm == "separate" else (n * dim if wide else dim,)
        for name in self.projections:
            yield from _matrix(name, self.width if name == "q" else kv, d_model, self.qkv_bias)
        yield from _matrix("o", d_model, self.width, self.o_bias)
        if self.attended_norm:
            yield "attended_norm", (self.width,)
        if self.sinks:
            yield "sinks", (self.n_heads,)

    def problem(self) -> str | None:
        """Settings that do not go together; None: there are none."""
        if self.n_heads % self.n_kv_heads:
            return f"{self.n_heads} heads cannot share {self.n_kv_heads} key-value heads evenly"
        if self.head_dim % 2:
            return f"heads of {self.head_dim} dimensions cannot be cut into pairs"
        if self.qk_norm not in (None, "head", "plain", "width", "rotated", "separate"):
            return f"norms of q and k {self.qk_norm!r} are unknown"
        if self.chunked and self.window is None:
            return "attention in chunks of no size"
        if self.scale == 0:
            return "a scale of the scores of 0"
        if problem := _query_problem(self):
            return problem
        if self.score_cap is not None and not self.score_cap > 0:
            return f"scores capped at {self.score_cap:g}"
        if self.qkv_clip is not None and not self.qkv_clip > 0:
            return f"queries, keys and values clamped to {self.qkv_clip:g}"
        if self.keys_as_values and self.rope is not None and self.rope.interleaved:
            return "values that are keys whose rotated pairs are neighbours"
        return None if self.rope is None else self.rope.problem(self.head_dim)


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    A token's keys and values of all heads follow from `latents` numbers, which the cache keeps, normalised, with
    `rope_dim` rotated ones that the keys of all heads share. Queries follow from `q_latents` numbers, or from the
    layer's input where there are none. A head has queries and keys of `plain_dim` + `rope_dim` numbers, and values of
    `value_dim`.
    """

    n_heads: int
    latents: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig | None  # None: nothing is rotated
    scale: float  # of the scores
    q_latents: int | None = None
    norm_eps: float = 1e-6  # of the norms of latents
    query_growth: float = field(default=0.0, repr=False)  # as in AttentionConfig
    query_interval: int = field(default=1, repr=False)
    query_offset: int = field(default=0, repr=False)

    @property
    def n_kv_heads(self) -> int:
        return 1

    @property
    def cached_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers of the key that the cache keeps."""
        return self.latents + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query, before it becomes one for keys in the cache."""
        return self.plain_dim + self.rope_dim

    @property
    def window(self) -> int | None:
        return None

    @property
    def width(self) -> int:
        return self.n_heads * self.latents

    @property
    def title(self) -> str:
        return f"{self.n_heads} heads over {self.latents} latents and {self.rope_dim} rotated dimensions"

    def row_bytes(self) -> int:
        """Queries or values of all heads, their latents, the key."""
        return 4 * (self.n_heads * max(self.query_dim, self.value_dim) + (self.q_latents or 0) + self.head_dim)

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        """k_b and v_b: of each head what would make its keys from latents, transposed, and its values."""
        queries = self.n_heads * self.query_dim
        if self.q_latents is None:
            yield "q", (queries, d_model)
        else:
            yield "q_a", (self.q_latents, d_model)
            yield "q_a_norm", (self.q_latents,)
            yield "q_b", (queries, self.q_latents)
        yield "kv_a", (self.head_dim, d_model)
        yield "kv_a_norm", (self.latents,)
        yield "k_b", (self.n_heads, self.latents, self.plain_dim)
        yield "v_b", (self.n_heads, self.value_dim, self.latents)
        yield "o", (d_model, self.n_heads * self.value_dim)

    def problem(self) -> str | None:
        if self.value_dim % 16:
            return f"heads whose values have {self.value_dim} dimensions, no multiple of 16, are not supported"
        return _query_problem(self) or (None if self.rope is None else self.rope.problem(self.rope_dim))


def _query_problem(attention: AttentionConfig | LatentAttentionConfig) -> str | None:
    """Settings by which queries cannot grow with their positions; None: they can, or do not."""
    if attention.query_interval < 1 or attention.query_offset < 0:
        return f"queries that grow every {attention.query_interval} positions, from {attention.query_offset} on"
    return f"queries that grow by {attention.query_growth:g}" if attention.query_growth < 0 else None


@dataclass(frozen=True)
class GatedAttentionConfig(AttentionConfig):
    """Attention whose result is multiplied with the sigmoid of another product with the input.

    by_head: that is one number for each head, and its softplus counts.
    """

    by_head: bool = field(default=False, repr=False)  # fingerprints hash what is shown: theirs stay

    @property
    def title(self) -> str:
        return f"{super().title} with a gate"

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        yield from super().tensors(d_model)
        yield "q_gate", (self.n_heads if self.by_head else self.width, d_model)


MIXED_ACTIVATIONS = ("silu", "relu", "relu2")


class Uncached:
    """Facts that a kind of attention that keeps nothing in the cache states of it."""

    @property
    def n_kv_heads(self) -> int:
        return 0

    @property
    def cached_heads(self) -> int:
        return 0

    @property
    def latents(self) -> int:
        return 0

    @property
    def rope(self) -> RopeConfig | None:
        return None

    @property
    def window(self) -> int | None:
        return None


class StateKind(Uncached):
    """A kind of attention that keeps a state for each sequence instead of keys and values for each token.

    A head's state is a matrix [value_dim, key_dim], which a rule changes by a value and a key and reads by a query.
    Value heads share keys and queries. A causal convolution over the last `taps` tokens precedes the rule; behind it is
    the activation, one of MIXED_ACTIVATIONS, "": none.
    """

    kind: ClassVar[str]  # for people
    shared: ClassVar[str]  # what keys and queries belong to, for people
    channel_decays: ClassVar[bool] = False  # each channel of a key has a decay
    chunked: ClassVar[bool] = False  # the CPU keeps what the tokens of a chunk that has begun add to the state
    taps: int
    activation: str
    if TYPE_CHECKING:  # a kind has them as fields, or by other names

        @property
        def n_key_heads(self) -> int: ...
        @property
        def key_dim(self) -> int: ...
        @property
        def n_value_heads(self) -> int: ...
        @property
        def value_dim(self) -> int: ...

    @property
    def width(self) -> int:
        """Elements of all value heads of a token."""
        return self.n_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: elements of queries, keys and values together."""
        return 2 * self.n_key_heads * self.key_dim + self.width

    @property
    def title(self) -> str:
        return f"{self.kind} of {self.n_value_heads} heads"

    def row_bytes(self) -> int:
        """Bytes of queries, keys and values, and of two numbers of each head in whole vectors."""
        return 4 * (self.channels + 2 * ((self.n_value_heads + 15) // 16 * 16))

    def problem(self) -> str | None:
        if self.n_value_heads % self.n_key_heads:
            return f"{self.n_value_heads} heads of {self.kind} cannot share {self.n_key_heads} {self.shared} evenly"
        if self.key_dim % 16 or self.value_dim % 16:
            return f"heads of {self.kind} of {self.value_dim} and {self.key_dim} dimensions are no multiples of 16"
        return self._problem_of_taps()

    def _problem_of_taps(self) -> str | None:
        return None if 2 <= self.taps <= 8 else f"a convolution over {self.taps} tokens; only 2 to 8 are supported"


@dataclass(frozen=True)
class DeltaNetConfig(StateKind):
    """Gated DeltaNet (arXiv 2412.06464), linear attention.

    Value heads share the query and key heads: in turn (`tiled`: head i has those of head i % n_key_heads), or
    neighbouring ones those of one.
    """

    kind = "Gated DeltaNet"
    shared = "key heads"

    n_key_heads: int
    key_dim: int
    n_value_heads: int
    value_dim: int
    taps: int
    tiled: bool = False
    activation: str = field(default="silu", repr=False)  # fingerprints hash what is shown: theirs stay

    @property
    def n_heads(self) -> int:
        return self.n_value_heads

    @property
    def head_dim(self) -> int:
        return self.value_dim

    @property
    def decays(self) -> int:
        """Decays of a token."""
        return self.n_value_heads

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        keys = self.n_key_heads * self.key_dim
        rows = {"q": keys, "k": keys, "v": self.width, "z": self.width}
        rows |= dict.fromkeys(("b", "a"), self.n_value_heads)
        yield from ((f"delta_{name}", (n, d_model)) for name, n in rows.items())
        yield "delta_conv", (self.channels, self.taps)
        yield "delta_decay", (self.n_value_heads,)
        yield "delta_dt_bias", (self.n_value_heads,)
        yield "delta_norm", (self.value_dim,)
        yield "delta_o", (d_model, self.width)


@dataclass(frozen=True)
class ChannelDeltaConfig(DeltaNetConfig):
    """Kimi Delta Attention (arXiv 2510.26692): Gated DeltaNet in which each channel of a key decays by itself.

    The decays, and the gate of what heads give, whose sigmoid counts, follow from `rank` numbers each. Value heads have
    a key head each.
    """

    kind = "Kimi Delta Attention"
    channel_decays = True

    @property
    def rank(self) -> int:
        """Numbers of a token that its decays follow from, and as many of its gate."""
        return self.key_dim

    @property
    def decays(self) -> int:
        return self.n_key_heads * self.key_dim

    def row_bytes(self) -> int:
        """Bytes of queries, keys and values, of a decay for each channel, a number of each head, and the latents."""
        return 4 * (self.channels + self.decays + (self.n_value_heads + 15) // 16 * 16 + 2 * self.rank)

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        keys = self.n_key_heads * self.key_dim
        rows = {"q": keys, "k": keys, "v": self.width, "f_a": self.rank, "g_a": self.rank, "b": self.n_value_heads}
        yield from ((f"delta_{name}", (n, d_model)) for name, n in rows.items())
        yield "delta_f_b", (self.decays, self.rank)
        yield "delta_g_b", (self.width, self.rank)
        yield from ((f"delta_{name}_conv", (rows[name], self.taps)) for name in "qkv")
        yield "delta_decay", (self.n_value_heads,)
        yield "delta_dt_bias", (self.decays,)
        yield "delta_norm", (self.value_dim,)
        yield "delta_o", (d_model, self.width)

    def problem(self) -> str | None:
        if self.n_key_heads != self.n_value_heads:
            return f"{self.n_value_heads} heads of {self.kind} with keys of {self.n_key_heads}"
        return super().problem()


@dataclass(frozen=True)
class Mamba2Config(StateKind):
    """Mamba2 (arXiv 2405.21060).

    A head's state is a matrix [head_dim, state_dim], which `step`, how far time goes on with a token, decides the decay
    of. `n_groups` of neighbouring heads share what is written to the state and read from it (B and C). step_limits:
    what a step is clamped to. norm: of what heads give, in `norm_groups` equal parts: "gated", of the product with the
    activated gate; "before", which the gate multiplies then; "none". bias: of the products with the layer's input and
    of the output projection. The scales are of the products with the input: of the gate, x, B, C and the step.
    """

    kind = "Mamba2"
    shared = "groups"
    chunked = True

    n_heads: int
    head_dim: int
    n_groups: int
    state_dim: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    norm: str = "gated"
    norm_groups: int = 1
    step_limits: tuple[float, float] = (0.0, math.inf)
    activation: str = "silu"
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    # B and C are keys and queries, x are values.
    @property
    def n_key_heads(self) -> int:
        return self.n_groups

    @property
    def key_dim(self) -> int:
        return self.state_dim

    @property
    def n_value_heads(self) -> int:
        return self.n_heads

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def row_bytes(self) -> int:
        """The same, and products of B and C."""
        return super().row_bytes() + 4 * 16 * self.n_groups

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        for name, rows in (("z", self.width), ("xbc", self.channels), ("dt", self.n_heads)):
            yield from _matrix(f"mamba_{name}", rows, d_model, self.bias)
        yield "mamba_conv", (self.channels, self.taps)
        if self.conv_bias:
            yield "mamba_conv_bias", (self.channels,)
        yield "mamba_step_bias", (self.n_heads,)
        yield "mamba_a", (self.n_heads,)  # negative: the logarithm of a head's decay is a * step
        yield "mamba_d", (self.n_heads,)
        if self.norm != "none":
            yield "mamba_norm", (self.width,)
        yield from _matrix("mamba_o", d_model, self.width, self.bias)

    def problem(self) -> str | None:
        if problem := super().problem():
            return problem
        if self.width % self.norm_groups or self.width // self.norm_groups % 16:
            return f"{self.norm_groups} groups of a norm do not divide {self.width} numbers into multiples of 16"
        if not 0 <= self.step_limits[0] < self.step_limits[1]:
            return f"steps of Mamba2 from {self.step_limits[0]:g} to {self.step_limits[1]:g}"
        return None


@dataclass(frozen=True)
class ShortConvConfig(StateKind):
    """A gated short convolution (LFM2): of the products b, c and x with the layer's input, each of `size` numbers, it
    gives c * convolution(b * x). Its state is the last inputs of the convolution; there are no keys, and `size` numbers
    count as heads of 16. bias: of the products, the convolution and the output projection.
    """

    kind = "short convolution"
    activation = ""

    size: int
    taps: int
    bias: bool = False

    @property
    def n_heads(self) -> int:
        return self.size // 16

    @property
    def head_dim(self) -> int:
        return 16

    @property
    def n_key_heads(self) -> int:
        return 0

    @property
    def key_dim(self) -> int:
        return 0

    @property
    def n_value_heads(self) -> int:
        return self.n_heads

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def title(self) -> str:
        return f"gated convolution over {self.taps} tokens"

    def row_bytes(self) -> int:
        """Bytes of x and b."""
        return 4 * 2 * self.size

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        for name in "bcx":
            yield from _matrix(f"short_{name}", self.size, d_model, self.bias)
        yield "short_conv", (self.size, self.taps)
        if self.bias:
            yield "short_conv_bias", (self.size,)
        yield from _matrix("short_o", d_model, self.size, self.bias)

    def problem(self) -> str | None:
        if self.size % 16:
            return f"a short convolution of {self.size} channels, no multiple of 16, is not supported"
        return self._problem_of_taps()


@dataclass(frozen=True)
class ParallelConfig:
    """Attention and Mamba2 beside each other: both read the layer's input, and what they give is added, each with a
    factor."""

    attention: AttentionConfig
    mamba: Mamba2Config
    factors: tuple[float, float] = (1.0, 1.0)

    @property
    def n_heads(self) -> int:
        return self.attention.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.attention.n_kv_heads

    @property
    def cached_heads(self) -> int:
        return self.attention.cached_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def latents(self) -> int:
        return 0

    @property
    def rope(self) -> RopeConfig | None:
        return self.attention.rope

    @property
    def window(self) -> int | None:
        return self.attention.window

    @property
    def width(self) -> int:
        """Elements of all heads of both, Mamba2's from a whole vector on."""
        return (self.attention.width + 15) // 16 * 16 + self.mamba.width

    @property
    def title(self) -> str:
        return f"{self.attention.title}, beside {self.mamba.title}"

    def row_bytes(self) -> int:
        return self.mamba.row_bytes() + 4 * (self.width - self.attention.width)

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        yield from self.attention.tensors(d_model)
        yield from self.mamba.tensors(d_model)

    def problem(self) -> str | None:
        return self.attention.problem() or self.mamba.problem()


@dataclass(frozen=True)
class NoAttention(Uncached):
    """No attention: the layer is an FFN alone."""

    @property
    def n_heads(self) -> int:
        return 1  # of nothing: the cache has an entry for every layer

    @property
    def head_dim(self) -> int:
        return 16

    @property
    def width(self) -> int:
        return 0

    @property
    def title(self) -> str:
        return "no attention"

    def row_bytes(self) -> int:
        return 0

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        return iter(())

    def problem(self) -> str | None:
        return None


class FfnKind(ABC):
    """Facts that every kind of FFN states of itself, whatever it consists of.

    Kinds whose neurons are not separable (`neurons` is None) are always computed whole, and placed with their layer.
    """

    activation: str  # for people
    gated: bool  # its first product has two matrices

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the matrices of a sum of neurons, in order."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    @property
    def neurons(self) -> FfnConfig | None:
        """Itself, where it is a sum of neurons that are profiled, selected, bundled and placed one by one."""
        return None

    @property
    def separable(self) -> int:
        """Neurons among which a predictor can select, those of all experts together; 0: none can."""
        return 0 if self.neurons is None else self.neurons.size

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers of a token between its matrices, for buffers."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Description of it, for people."""

    @abstractmethod
    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        """(name within the layer, shape) of every tensor; matrices are [out, in]."""

    @abstractmethod
    def problem(self) -> str | None:
        """Settings that do not go together; None: there are none."""

    def share_read(self, tokens: int) -> float:
        """Share of its weights that a step of so many tokens reads, as far as that can be expected."""
        return 1.0

    def row_bytes(self, d_model: int) -> int:
        """Bytes of its working memory on the CPU for each token of a step, beside what every layer has."""
        return 0


@dataclass(frozen=True)
class FfnConfig(FfnKind):
    """An FFN that is one sum of neurons."""

    size: int  # neurons
    activation: str = "silu"  # of ACTIVATIONS
    # fatrelu: what the gate must exceed; cats: what silu of the gate must, in magnitude; topk: how many of a bank
    # count; gaussian: standard deviations from the mean of the gates to the cutoff
    threshold: float = 0.0
    gated: bool = True  # False: no gate matrix, the activation is applied to up
    bias: bool = False
    # The threshold is not one of the layer but one of each neuron. Not in `repr`, of which fingerprints of models
    # consist: these have the names of the tensors.
    thresholds: bool = field(default=False, repr=False)
    # Each neuron has a threshold of its product, too: h that does not exceed it in magnitude counts as zero.
    product_thresholds: bool = field(default=False, repr=False)
    # Of xielu, (above, below, beta, least): of x above zero above * x^2 + beta * x, of others
    # below * (e^min(x, least) - 1 - x) + beta * x.
    curve: tuple[float, ...] = field(default=(), repr=False)
    inner_norm: bool = field(default=False, repr=False)  # RMS norm of all products, before down

    @property
    def limit(self) -> float | tuple[float, ...]:
        """Numbers of the activation that all neurons share: its threshold, or its curve."""
        return self.curve or self.threshold

    @property
    def neurons(self) -> FfnConfig | None:
        return None if self.inner_norm else self

    @property
    def width(self) -> int:
        return self.size

    @property
    def title(self) -> str:
        norm = ", with a norm before down" if self.inner_norm else ""
        return f"FFN of {self.size} neurons, {self.activation}{'' if self.gated else ' without a gate'}{norm}"

    @property
    def rectified(self) -> bool:
        """Whether the activation of a neuron that does not fire is exactly zero."""
        return self.activation in RECTIFIED

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        for name in self.matrices:
            yield from _matrix(name, *((d_model, self.size) if name == "down" else (self.size, d_model)), self.bias)
        if self.thresholds:
            yield "threshold", (self.size,)
        if self.product_thresholds:
            yield "product_threshold", (self.size,)
        if self.inner_norm:
            yield "inner_norm", (self.size,)

    def problem(self) -> str | None:
        if self.activation == GAUSSIAN:
            return self._problem_of_gaussian()
        if self.activation not in ACTIVATIONS:
            return f"activation {self.activation!r} is unknown (only {', '.join(ACTIVATIONS)})"
        if self.activation == "drelu" and not self.gated:
            return "activation drelu needs a gated FFN"
        if len(self.curve) != (4 if self.activation == "xielu" else 0):
            return f"activation {self.activation} with {len(self.curve)} numbers of a curve"
        if self.product_thresholds and not (self.gated and self.thresholds and self.activation in THRESHOLDED):
            return f"product thresholds, which only gated {' and '.join(THRESHOLDED)} with thresholds of neurons have"
        return self._problem_of_topk() if self.activation == "topk" else self._problem_of_thresholds()

    def _problem_of_thresholds(self) -> str | None:
        if self.threshold < 0 or (self.threshold and self.activation not in THRESHOLDED):
            return f"activation {self.activation} with threshold {self.threshold:g}"
        if self.thresholds and self.activation not in THRESHOLDED:
            return f"activation {self.activation} has no thresholds of neurons (only {', '.join(THRESHOLDED)} have)"
        if self.thresholds and self.threshold:
            return "a threshold of the layer and thresholds of its neurons"
        if self.inner_norm and (self.thresholds or self.product_thresholds):
            return "thresholds of neurons with a norm before down"
        return None

    def _problem_of_gaussian(self) -> str | None:
        plain = self.gated and not (self.bias or self.thresholds or self.product_thresholds)
        return None if plain else "activation gaussian with biases or thresholds of neurons, or without gates"

    def _problem_of_topk(self) -> str | None:
        if self.size % BANK:
            return f"activation topk needs whole banks of {BANK} neurons, not {self.size}"
        if not 1 <= self.threshold <= BANK or self.threshold % 1:
            return f"activation topk with {self.threshold:g} of a bank's {BANK} neurons"
        return None if self.thresholds else "activation topk without thresholds of neurons"


@dataclass(frozen=True)
class NoFfn(FfnKind):
    """No FFN: the layer is attention alone."""

    activation = ""
    gated = False

    @property
    def matrices(self) -> tuple[str, ...]:
        return ()

    @property
    def width(self) -> int:
        return 0

    @property
    def title(self) -> str:
        return "no FFN"

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        return iter(())

    def problem(self) -> str | None:
        return None


def _matrix(name: str, rows: int, cols: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield name, (rows, cols)
    if bias:
        yield f"{name}_bias", (rows,)


@dataclass(frozen=True)
class RouterConfig:
    """Rules by which the experts of a token, and their weights, follow from a router's scores, one for each expert.

    groups: experts are selected in the best `top_groups` of that many equal groups (DeepSeek-V2, arXiv 2405.04434); a
    group's score is the sum of its `group_best` best experts' (1; DeepSeek-V3, arXiv 2412.19437: 2). factors: of each
    expert, what its weight is multiplied by in the end. scales_input: weights multiply what experts read, not what they
    give. nearness: of sparsemixer (arXiv 2409.12136), which selects experts one after another and weighs each by its
    share of the softmax over itself and those left whose logits differ by at most twice that, in parts of the larger.
    """

    top_k: int  # experts of a token
    scoring: str = "softmax"  # over all experts; "sigmoid" of each; "sparsemixer"
    normalise: bool = True  # the weights of a token's experts add up to `scale`
    scale: float = 1.0  # of the weights
    correction: bool = False  # a bias for each expert that counts for the selection alone (DeepSeek-V3)
    bias: bool = False  # of the logits
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    factors: bool = field(default=False, repr=False)  # fingerprints hash what is shown: theirs stay
    scales_input: bool = field(default=False, repr=False)
    nearness: float = field(default=0.0, repr=False)

    def problem(self, n_experts: int) -> str | None:
        """Settings that do not go together, or with that many experts; None: all do."""
        if self.scoring not in ("softmax", "sigmoid", "sparsemixer"):
            return f"a router's scores {self.scoring!r} are unknown"
        changes = self.normalise, self.scale != 1, self.correction, self.groups > 1, self.factors, self.scales_input
        if self.scoring == "sparsemixer" and (any(changes) or self.top_k != 2):
            return "a router of sparsemixer selects two experts, whose weights nothing else changes"
        if self.nearness < 0 or (self.nearness and self.scoring != "sparsemixer"):
            return f"a router's nearness of {self.nearness:g} with {self.scoring}"
        if not 0 < self.top_k <= n_experts:
            return f"{self.top_k} experts a token of {n_experts}"
        if n_experts % self.groups:
            return f"{n_experts} experts cannot be divided into {self.groups} groups evenly"
        size = n_experts // self.groups
        if not 0 < self.top_groups <= self.groups or self.top_groups * size < self.top_k:
            return f"{self.top_groups} groups of {size} experts are too few for {self.top_k} experts a token"
        if self.group_best > size:
            return f"groups of {size} experts are too small for a score of {self.group_best}"
        return None


SEPARATE_NORMS = ("router_scale", "experts_norm", "shared_out_norm", "experts_out_norm")
"""Weights of norms of `ExpertsConfig.separate`: of what the router reads, times the root of d_model, of what the
experts read, of what the shared expert gives, of what the others give."""


@dataclass(frozen=True)
class ExpertsConfig(FfnKind):
    """An FFN of experts, each a sum of neurons, of which a router selects a few for every token.

    shared_size: neurons of an expert that every token has, 0: there is none; shared_weight: its output is multiplied
    with the sigmoid of a product with the input. early_router: the router reads the layer's input, before the norm of
    attention, so that a layer's experts are known while attention runs. latents: width of what the selected experts,
    not the shared one, read and give, with a matrix in front of them and one behind (LatentMoE); 0: that of the layer.
    separate: the shared expert, the others and the router read the layer's input each through a norm of its own, and
    what the shared one and the others give is normalised before it is added up (Gemma 4).
    """

    n_experts: int
    size: int  # neurons of each expert
    router: RouterConfig
    activation: str = "silu"  # of EXPERT_ACTIVATIONS
    threshold: float = 0.0  # as in FfnConfig
    gated: bool = True
    bias: bool = False
    shared_size: int = 0
    shared_weight: bool = False
    early_router: bool = False
    latents: int = field(default=0, repr=False)  # fingerprints hash what is shown: theirs stay
    separate: bool = field(default=False, repr=False)  # likewise

    @property
    def width(self) -> int:
        return max(self.size, self.shared_size)

    @property
    def title(self) -> str:
        shared = f", a shared one of {self.shared_size}" if self.shared_size else ""
        routed = f"{self.n_experts} experts of {self.size} neurons, {self.router.top_k} a token"
        return f"{routed}{shared}, {self.activation}"

    def row_width(self, d_model: int) -> int:
        """Numbers of a token that a selected expert reads, and gives."""
        return self.latents or d_model

    @property
    def shared(self) -> FfnConfig | None:
        """The shared expert."""
        return FfnConfig(self.shared_size, self.activation, self.threshold, self.gated) if self.shared_size else None

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        yield "router", (self.n_experts, d_model)
        if self.router.bias:
            yield "router_bias", (self.n_experts,)
        if self.router.correction:
            yield "router_correction_bias", (self.n_experts,)
        if self.router.factors:
            yield "router_factors", (self.n_experts,)
        if self.separate:  # the norm before the shared expert is the layer's
            yield from ((name, (d_model,)) for name in SEPARATE_NORMS)
        width = self.row_width(d_model)
        if self.latents:
            yield from (("latent_in", (self.latents, d_model)), ("latent_out", (d_model, self.latents)))
        for name in self.matrices:
            rows, cols = (width, self.size) if name == "down" else (self.size, width)
            yield f"experts_{name}", (self.n_experts, rows, cols)
            if self.bias:
                yield f"experts_{name}_bias", (self.n_experts, rows)
        if self.shared is not None:
            yield from ((f"shared_{name}", shape) for name, shape in self.shared.tensors(d_model))
        if self.shared_weight:
            yield "shared_weight", (d_model,)

    def problem(self) -> str | None:
        router = self.router
        if problem := router.problem(self.n_experts):
            return problem
        if self.shared_weight and not self.shared_size:
            return "the weight of a shared expert without one"
        if self.early_router and router.bias:
            return "a bias of a router that reads a layer's input"
        if self.separate and (not self.shared_size or self.shared_weight or self.early_router or self.latents):
            return "experts with norms of their own need a plain shared expert and router, and no latents"
        if router.scales_input and self.bias:
            return "biases of experts whose input is scaled"
        if self.activation == "swiglu_oai":
            return None if self.gated and not self.shared_size else "activation swiglu_oai is of gated experts alone"
        if self.activation in (*COMPETING, "xielu"):
            return f"activation {self.activation} is not for experts"
        return FfnConfig(self.size, self.activation, self.threshold, self.gated).problem()

    @property
    def separable(self) -> int:
        return self.n_experts * self.size + self.predicted_shared if self.whole_reason is None else 0

    @property
    def predicted_shared(self) -> int:
        """Neurons of the shared expert that are separable, behind those of the others; 0: it is computed whole."""
        return 0 if self.gated or self.shared_size % 32 else self.shared_size

    @property
    def whole_reason(self) -> str | None:
        """Reason for which the neurons inside selected experts are not separable; None: they are."""
        if self.activation not in RECTIFIED:
            return f"the activation {self.activation} is never exactly zero"
        if self.bias:
            return "experts with biases are computed whole"
        if self.separate:
            return "experts beside an FFN with norms of its own are computed whole"
        if self.router.scales_input:
            return "experts whose input is scaled are computed whole"
        return None if self.size % 32 == 0 else f"{self.size} neurons of an expert are not whole groups of 32"

    def share_read(self, tokens: int) -> float:
        missed = (1 - self.router.top_k / self.n_experts) ** tokens  # each token selects anew
        experts = self.n_experts * self.size
        return ((1 - missed) * experts + self.shared_size) / (experts + self.shared_size)

    def row_bytes(self, d_model: int) -> int:
        """A row for each of a token's experts: gate and up, then h; the input and the output."""
        return self.router.top_k * (3 * 4 * self.size + 2 * 4 * d_model)


@dataclass(frozen=True)
class LayerConfig:
    """One layer. f is its attention, then its FFN.

    norms: "pre": x += f(norm(x)); "post": x = norm(x + f(x)); "output": x += norm(f(x)); "both": x += norm(f(norm(x))).
    """

    attention: AttentionKind
    ffn: FfnKind
    norms: str = "pre"
    parallel: bool = False  # attention and FFN both read the layer's input
    shared_norm: bool = False  # parallel, with one norm for both
    # Of the FFN's input, and of what it adds. Not shown: fingerprints hash what is, and theirs stay.
    ffn_factors: tuple[float, float] = field(default=(1.0, 1.0), repr=False)
    out_scale: bool = field(default=False, repr=False)  # a learned factor of x behind the layer

    @property
    def heads(self) -> AttentionConfig:
        """Attention with keys and values, also where Mamba2 is beside it."""
        attention = self.attention.attention if isinstance(self.attention, ParallelConfig) else self.attention
        assert isinstance(attention, AttentionConfig), attention.title
        return attention

    @property
    def neurons(self) -> FfnConfig:
        """The FFN, which must be a sum of neurons: `ModelConfig.whole_reason` is for models with others."""
        neurons = self.ffn.neurons
        assert neurons is not None, f"{self.ffn.title}: its neurons are not told apart"
        return neurons


@dataclass(frozen=True)
class AltUpConfig:
    """AltUp (arXiv 2301.13310) and LAuReL (arXiv 2411.07501), as in Gemma 3n: several residual streams.

    A layer predicts all of them, computes with the one that is `active`, and corrects all of them by what it has made
    of that; what it makes of its inputs is added to all but the first. rank: of the product that stands beside
    attention (LAuReL). scaled: the active stream is multiplied with learned factors before it meets a layer's inputs.
    """

    streams: int
    active: int
    rank: int
    scaled: bool = True

    def outer(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        """(name, shape) of the matrices that make the other streams of the embedding, and that lead back."""
        yield from ((name, (self.streams - 1, d_model, d_model)) for name in ("altup_in", "altup_out"))

    def tensors(self, d_model: int) -> Iterator[tuple[str, Shape]]:
        """(name within the layer, shape) of every tensor; matrices are [out, in]."""
        yield "altup_router", (self.streams, d_model)
        yield "altup_norm", (d_model,)
        yield "altup_predict", (self.streams**2, self.streams)
        yield "altup_correct", (self.streams, self.streams)
        yield "altup_scale", (d_model,)
        yield "laurel_in", (self.rank, d_model)
        yield "laurel_out", (d_model, self.rank)
        yield "laurel_norm", (d_model,)

    def problem(self) -> str | None:
        """Settings that do not go together; None: there are none."""
        if not 2 <= self.streams <= MOST_STREAMS:
            return f"{self.streams} residual streams; only 2 to {MOST_STREAMS} are supported"
        if not 0 <= self.active < self.streams:
            return f"layers compute with residual stream {self.active} of {self.streams}"
        return None


MOST_STREAMS = 16


def uniform(n_layers: int, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """The layers of a model whose layers are alike."""
    return (layer,) * n_layers


@dataclass(frozen=True)
class EagleConfig:
    """Settings of an EAGLE-3 head (arXiv 2503.01840): a draft head in files of its own, trained for a model.

    It reads of a position features, what some layers of the model get, side by side, which a projection makes as wide
    as the model, and the embedding of the token that follows. Its attention reads a norm of each, side by side, the
    embedding first, and what attention gives is added to the projected features. layers: that get the features; the
    number of layers: what the last one gives. vocab: rows of its output head, each of a token of the model. norm_eps:
    of its norms. norms: of the features: "none", "whole", of all together, "each". normed: attention's result is added
    to the norm of the projected features; normed_output: further drafts read what the final norm gives.
    """

    layers: tuple[int, ...]
    vocab: int
    norm_eps: float
    norms: str = "none"
    normed: bool = False
    normed_output: bool = False


@dataclass(frozen=True)
class DraftHeadConfig:
    """A head that predicts the token after the next (MTP), as of DeepSeek-V3 (arXiv 2412.19437).

    It reads of a position what the model's final norm gives, and the embedding of the token that follows: a norm of
    each, both side by side, the embedding first, and a projection make the input of its layer. embedding, head,
    final_norm: it has its own, else it uses the model's. eagle: it is an EAGLE head, which reads other things.
    """

    layer: LayerConfig
    embedding: bool = False
    head: bool = False
    final_norm: bool = True
    eagle: EagleConfig | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and layers of a decoder-only transformer, independent of the file format."""

    architecture: str  # "llama", "mistral", "qwen2", ...: the family, for people; the other fields decide
    d_model: int
    vocab_size: int
    context_length: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    norm: str = "rms"  # "layer": LayerNorm, whose norms have biases unless norm_bias says otherwise
    norm_bias: bool = field(default=True, repr=False)  # fingerprints hash what is shown: theirs stay
    out_norm_eps: float | None = field(default=None, repr=False)  # of norms of what layers add; None: as of the others
    embed_norm: bool = field(default=False, repr=False)  # the norm of the embedding's rows, without weights
    positions: str = "rope"  # "learned": rows of a table, added to the embedding
    position_offset: int = 0  # row of position 0 in that table
    embed_dim: int = 0  # width of the embedding and of the head's input, where it is not d_model
    embedding_scale: float = 1.0  # factor of the embedding's rows
    residual_scale: float = 1.0  # factor of what attention and FFN add
    # Numbers that each layer gets of a token beside the residual stream (Gemma 4 E2B and E4B), 0: none; rows of their
    # table.
    layer_inputs: int = field(default=0, repr=False)
    layer_input_rows: int = field(default=0, repr=False)
    altup: AltUpConfig | None = field(default=None, repr=False)  # None: there is one residual stream
    logit_scale: float = 1.0  # factor of the head's result
    logit_cap: float | None = field(default=None, repr=False)  # logits become cap * tanh(logits / cap), after that
    final_norm: bool = True
    head_bias: bool = field(default=False, repr=False)  # of the head's result, before its factor
    tied_embeddings: bool = False
    name: str = ""
    draft: DraftHeadConfig | None = field(default=None, repr=False)  # which is read where it is asked for

    @property
    def with_draft(self) -> ModelConfig:
        """The configuration with the layer of the draft head, if any, as one more layer."""
        return self if self.draft is None else replace(self, layers=(*self.layers, self.draft.layer), draft=None)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def ffn_sizes(self) -> tuple[int, ...]:
        """Neurons of each layer; 0 where they are not separable (`FfnKind.neurons`), and where there is no FFN."""
        return tuple(0 if layer.ffn.neurons is None else layer.ffn.neurons.size for layer in self.layers)

    @property
    def neurons(self) -> dict[int, FfnConfig]:
        """The FFNs that are sums of neurons, by layer."""
        ffns = enumerate(layer.ffn.neurons for layer in self.layers)
        return {at: ffn for at, ffn in ffns if ffn is not None}

    @property
    def whole_reason(self) -> str | None:
        """Reason for which all neurons are computed, and none prepared; None where every FFN is a sum of neurons."""
        kinds = [layer.ffn for layer in self.layers if not isinstance(layer.ffn, NoFfn)]
        titles = [kind.title for kind in kinds if kind.neurons is None]
        if titles:
            count = f"{len(titles)} of {self.n_layers} layers have another kind of FFN ({titles[0]})"
            return f"{count}, whose neurons are not told apart"
        return None if kinds else "no layer has an FFN"

    @property
    def whole_experts_reason(self) -> str | None:
        """Reason for which every neuron of selected experts is computed; None: some layer can skip silent ones."""
        routed = dict.fromkeys(layer.ffn for layer in self.layers if isinstance(layer.ffn, ExpertsConfig))
        reasons = [experts.whole_reason for experts in routed if experts.whole_reason is not None]
        return (reasons[0] if reasons else "there are no experts") if len(reasons) == len(routed) else None

    @property
    def unpredicted_reason(self) -> str | None:
        """Reason for which no predictors select inside the experts of every layer with an FFN; None: they can."""
        for at, layer in enumerate(self.layers):
            if isinstance(layer.ffn, NoFfn):
                continue
            if not isinstance(layer.ffn, ExpertsConfig):
                return f"layer {at} has no experts"
            if layer.ffn.whole_reason is not None:
                return f"layer {at}: {layer.ffn.whole_reason}"
        return None if self.experts else "there are no experts"

    @property
    def separable(self) -> tuple[int, ...]:
        """Neurons of each layer among which a predictor can select, those of all its experts together and behind
        them those of its shared one (`ExpertsConfig.predicted_shared`); 0: none can."""
        return tuple(layer.ffn.separable for layer in self.layers)

    @property
    def predicted_layers(self) -> tuple[int, ...]:
        """The layers that have such neurons."""
        return tuple(at for at, neurons in enumerate(self.separable) if neurons)

    @cached_property
    def experts(self) -> dict[int, ExpertsConfig]:
        """The FFNs of the layers that have experts, by layer."""
        return {at: layer.ffn for at, layer in enumerate(self.layers) if isinstance(layer.ffn, ExpertsConfig)}

    @property
    def attentions(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention of the layers, each once."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    @cached_property
    def states(self) -> dict[int, StateKind]:
        """The layers that keep a state for each sequence."""
        kinds = ((number, layer.attention) for number, layer in enumerate(self.layers))
        mixers = ((number, kind.mamba if isinstance(kind, ParallelConfig) else kind) for number, kind in kinds)
        return {number: kind for number, kind in mixers if isinstance(kind, StateKind)}

    @property
    def n_neurons(self) -> int:
        """Neurons of all layers."""
        return sum(self.ffn_sizes)

    @property
    def widest_ffn(self) -> int:
        """Numbers of a token within the widest FFN, for buffers: its neurons."""
        return max(layer.ffn.width for layer in self.layers)

    @property
    def activations(self) -> str:
        """The activations of the layers, each once, for people."""
        return ", ".join(dict.fromkeys(layer.ffn.activation for layer in self.layers if layer.ffn.activation))

    @property
    def activations_never_zero(self) -> str:
        """The same, of those that are never exactly zero."""
        return ", ".join(dict.fromkeys(ffn.activation for ffn in self.neurons.values() if not ffn.rectified))

    @property
    def rectified(self) -> bool:
        """Whether neurons that do not fire are exactly zero in every layer."""
        return self.whole_reason is None and all(ffn.rectified for ffn in self.neurons.values())

    @property
    def partly_rectified(self) -> bool:
        """Whether they are in some layer: it can be computed sparsely without loss."""
        return self.whole_reason is None and any(ffn.rectified for ffn in self.neurons.values())

    @property
    def fires_both_ways(self) -> bool:
        """Whether neurons fire on both sides of zero, as those of cats do: a predictor must then be large, or selects
        many others too, so it is trained only where it is asked for."""
        return any(layer.ffn.activation == "cats" for layer in self.layers)

    @property
    def competing(self) -> str:
        """The activation by which neurons of some layer compete: whether one fires depends on the gates of others; "":
        none do."""
        return next((layer.ffn.activation for layer in self.layers if layer.ffn.activation in COMPETING), "")

    @property
    def unsplit_reason(self) -> str | None:
        """Reason for which the neurons of a layer are not placed one by one, on two devices; None: they can be."""
        if self.altup is not None:
            return "layers with several residual streams run whole beside a GPU"
        return f"layers with the activation {self.competing} run whole beside a GPU" if self.competing else None

    def whole_layers(self, layers: int) -> int:
        """The number of layers, from the first on, that one device can have if it has room for so many: layers that
        read the keys and values of another are where that one is, and those of several residual streams are together.
        """
        if self.altup is not None:
            return layers if layers >= self.n_layers else 0
        return self.whole_caches(layers)

    def whole_caches(self, layers: int) -> int:
        """The same of one of several GPUs, which pass all residual streams on."""
        sources = [layer.attention.kv_from for layer in self.layers if isinstance(layer.attention, AttentionConfig)]
        first = min((source for source in sources if source is not None), default=self.n_layers)
        return layers if layers >= self.n_layers else min(layers, first)

    @cached_property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of the layers, each once."""
        return self.ropes_of(0, self.n_layers)

    def ropes_of(self, first: int, last: int) -> tuple[RopeConfig, ...]:
        """The same of the layers [first, last)."""
        attentions = (layer.attention for layer in self.layers[first:last])
        return tuple(dict.fromkeys(one.rope for one in attentions if one.rope is not None))


@dataclass(frozen=True)
class ProfileConfig:
    """Settings by which a model is profiled. Field names are keyword arguments and, with dashes, flags."""

    corpus: Sequence[str] = option(
        (),
        "text to profile: a text file, a JSONL file or a folder of them; may be repeated, each is a separate corpus; "
        "default: a small built-in sample",
        metavar="PATH",
    )
    tokens: int = option(200_000, "maximum number of tokens to profile, over all corpora", metavar="N")
    window: int = option(
        0,
        "tokens per window; windows are independent; 0: 512, or the model's context if that is smaller",
        metavar="N",
        least=0,
    )
    samples: int = option(
        1 << 30,
        "maximum size of the samples that predictors are trained on; 0: none (default 1GiB)",
        size=True,
        least=0,
    )
    perplexity_cost: float = option(
        0.01,
        "for activations that are never exactly zero: allowed relative increase in perplexity from skipping small ones",
        metavar="X",
    )


DEFAULT_CHUNK = 512
"""Tokens of a prompt that a step computes, where nothing says otherwise."""


@documented
@dataclass(frozen=True)
class EngineConfig:
    """Settings by which the engine runs a model. Field names are the keywords of `LLM` and, with dashes, the flags.

    Sizes are bytes here, and in `LLM` also texts such as "8GiB". `LLM` checks them: RequestError for an invalid one.
    """

    threads: int = option(
        0,
        "CPU threads; 0: every core this process may use, two fewer beside a GPU; where cores differ, what a trial at "
        "load finds fastest",
        metavar="N",
        flags=("-t",),
    )
    context: int = option(0, "context length in tokens; 0: the model's own", metavar="N", flags=("-c",))
    kv_type: str = option("f16", "type of the KV cache", choices=("f16", "q8_0", "f32"))
    prefill_chunk: int = option(
        0,
        "prompt tokens computed per step; 0: 512, or beside a GPU to which weights stream in every step up to 8192, as "
        "there is memory for",
        metavar="N",
    )
    mixed_chunk: int = option(
        128, "prompt tokens computed per step while other requests decode; fewer: a steadier stream", metavar="N"
    )
    max_batch: int = option(8, "maximum number of requests decoded together", metavar="N")
    max_queue: int = option(0, "maximum number of requests that wait; more are refused; 0: unlimited", metavar="N")
    prefix_cache: bool = option(True, "reuse the KV cache of prompt prefixes computed earlier")
    quantize: str | None = option(None, "quantise a float model's matrices on load", choices=("q8_0", "q4_0"))
    selector: str = option(
        "auto",
        "which neurons decode computes; auto: exact if the model allows it and bundles are prepared, else all",
        choices=("auto", "all", "exact", "predicted", "threshold"),
    )
    trial: bool = option(True, "measure at load for which layers and batch sizes the selector is faster than all")
    retrial: bool = option(False, "repeat the measurements at load instead of using saved results")
    threshold: float | None = option(
        None,
        "for selector threshold: skip activations up to this magnitude; default: as calibrated by `profile`",
        metavar="X",
    )
    prepared: str | None = option(
        None, "folder of the model's prepared files (bundles, predictor); default: MODEL.powerinfer", metavar="PATH"
    )
    recall_every: int = option(64, "measure the predictors' recall at every Nth step; 0: never", metavar="N", least=0)
    gpu: str = option(
        "auto",
        "GPU to use beside the CPU: auto (the first CUDA device, if any), none, cuda:N, several as 0,1, or cpu "
        "(emulates a GPU, for testing)",
        metavar="NAME",
    )
    vram: int | tuple[int, ...] | None = option(
        None,
        "GPU memory budget, everything included, such as 8GiB, or of several GPUs one each (8GiB,12GiB); 0: no GPU; "
        "default: free GPU memory",
        sizes=True,
    )
    ram: int | None = option(None, "RAM budget, everything included; default: free RAM", size=True)
    disk: str = option(
        "auto",
        "how weights that --ram does not hold are read while the model runs: direct, past the system's cache; cached, "
        "through it; auto: the one that suits this machine; none: they are not, and --ram must hold the model",
        choices=("auto", "direct", "cached", "none"),
    )
    disk_policy: str = option(
        "lfu",
        "which of the neurons or experts on disk RAM holds: lfu, those selected most often lately; window, by the last "
        "tokens; lru, those selected last; static, those that a profile finds most frequent",
        choices=("lfu", "window", "lru", "static"),
    )
    adjust: bool = option(
        False,
        "between requests, swap neurons or experts on the GPU that have become cold for ones that have become hot",
    )
    expert_policy: str = option(
        "static",
        "which experts the GPU holds: static, those that a profile finds most frequent; or, with all of them in RAM "
        "or on disk too, those selected last (lru) or most often (lfu), or static at first and exchanged slowly "
        "(dynamic); auto: the one that decodes fastest, tried at the first load",
        choices=("static", "lru", "lfu", "dynamic", "auto"),
    )
    split_mode: str = option(
        "layer",
        "what of a model several GPUs have: layer, each of them layers that follow each other; expert, of models of "
        "experts each some of every layer's, so that all compute at the same time",
        choices=("layer", "expert"),
        flags=("-sm",),
    )
    speculate: str = option(
        "auto",
        "draft tokens, which the model verifies several at a time; answers stay the same: mtp, by the model's own "
        "layers for that; lookup, by what followed the same words before; a smaller MODEL of the same vocabulary, or "
        "an EAGLE-3 head; off; auto: mtp where the model has such layers",
        metavar="HOW|MODEL",
    )
    isa: str | None = option(None, "instruction set of the CPU kernels; default: the best supported", metavar="NAME")

    @property
    def chunk(self) -> int:
        """`prefill_chunk`, known: where nothing chose another."""
        return self.prefill_chunk or DEFAULT_CHUNK

    @property
    def vram_bytes(self) -> int | None:
        """`vram` of all GPUs together."""
        return sum(self.vram) if isinstance(self.vram, tuple) else self.vram

    @property
    def vrams(self) -> tuple[int, ...]:
        """`vram` of each of several GPUs; (): it is of one, or not given."""
        return self.vram if isinstance(self.vram, tuple) else ()

    @property
    def reads_draft_head(self) -> bool:
        """Whether a model's draft head is read, if it has one."""
        return self.speculate in ("auto", "mtp")

    def drafts_for(self, config: ModelConfig) -> bool:
        """Whether requests of a model may have drafts."""
        return self.speculate != "off" and (self.speculate not in ("auto", "mtp") or config.draft is not None)


@dataclass(frozen=True)
class PlanConfig:
    """Options of a plan, in addition to the engine's."""

    batch: int = option(1, "requests decoded together, each with a full context", metavar="N")
    hardware: str | None = option(
        None,
        "hardware description: a built-in one (pc-high, pc-low, pc-16gb, pc-8gb) or a file; default: this machine's",
        metavar="NAME|FILE",
    )
    card: str | None = option(
        None,
        "plan for a PC with this card, such as 'RTX 4060', several ('RTX 4090, RTX 3060') or none, and --ram of RAM "
        "(default 32GiB)",
        metavar="NAME",
    )
    memory: str | None = option(
        None,
        "with --card: the PC's kind of RAM, such as ddr4-3200 or ddr5-5600; default: what was usual in the card's year",
        metavar="KIND",
    )
    policy: str = option(
        "time",
        "time: minimise the estimated time per token; ilp: the paper's integer program, maximise activations on the "
        "GPU; greedy: by firing frequency; random",
        choices=("time", "ilp", "greedy", "random"),
    )
    seed: int = option(0, "random seed of the policy random", metavar="N", flags=("-s",))
    time_limit: float = option(10.0, "time limit of the solver in seconds", metavar="X")

    @property
    def described(self) -> bool:
        """Whether the machine is a described one."""
        return self.hardware is not None or self.card is not None


@dataclass(frozen=True)
class TrainConfig:
    """Settings by which predictors are trained. Field names are Python's keywords and, with dashes, flags."""

    recall: float = option(0.99, "target share of the firing neurons that each layer's predictor selects", metavar="X")
    lost: float = option(0.03, "target for false positives, as a share of all neurons; sets the size", metavar="X")
    share: float = option(0.10, "maximum size of all predictors together, as a share of the model's", metavar="X")
    type: str = option("auto", "type of the weights; auto: q8_0 where possible", choices=("auto", "q8_0", "f16"))
    device: str = option("auto", "device to train on; auto: a GPU if torch has one", choices=("auto", "cpu", "cuda"))
    steps: int = option(3000, "maximum training steps per layer and size; 0: low rank only", metavar="N", least=0)
    batch: int = option(256, "tokens per training step", metavar="N")
    lr: float = option(0.02, "learning rate, relative to the magnitude of the weights", metavar="X")
    seed: int = option(0, "random seed", metavar="N", least=0, flags=("-s",))


STORED_TYPES = ("same", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


@dataclass(frozen=True)
class SparsifyConfig:
    """Settings by which a dense model is made sparse. Field names are Python's keywords and, with dashes, flags."""

    recipe: str = option(
        "cats",
        "how: cats, silu where its magnitude exceeds a threshold; product, the same with a second threshold, of silu "
        "times up; topk, silu where it is one of the largest of 64 neurons; or ReLU in place: fatrelu, reglu, drelu",
        choices=("cats", "product", "topk", "fatrelu", "reglu", "drelu"),
    )
    zeros: float = option(0.6, "target share of the neurons that are zero for a token", metavar="X")
    gate_zeros: float | None = option(
        None,
        "of recipe product: share of the neurons that are zero by their gates alone, of which up need not be read, at "
        "most --zeros; default: 0.7 of it",
        metavar="X",
    )
    tokens: int = option(1_000_000, "tokens to train on; the texts are repeated if they have fewer", metavar="N")
    own_text: int = option(
        0, "tokens of text that the model writes first, to train on beside the texts", metavar="N", least=0
    )
    window: int = option(256, "tokens of a window of text", metavar="N", least=8)
    batch: int = option(2048, "tokens of a training step", metavar="N")
    rows: int = option(8, "windows computed at once; fewer need less memory", metavar="N")
    lr: float = option(1.0, "factor of the recipe's learning rates", metavar="X")
    format: str = option(
        "same",
        "format of the sparse model; same: of the original; gguf, folder: that, whatever the original's",
        choices=("same", "gguf", "folder"),
    )
    type: str = option(
        "auto",
        "type of the changed matrices of a GGUF file, and of all in another format than the original's (a folder takes "
        "bf16, f16, f32); same: their own, of quantised ones only the scales of the blocks are trained; a folder made "
        "of a folder keeps its own; auto: bf16 with --format folder, else q8_0",
        choices=("auto", "same", "f32", "f16", "bf16", "q8_0", "q5_0", "q4_0"),
    )
    attention_type: str = option(
        "same",
        f"type of the changed matrices of attention in a GGUF file ({', '.join(STORED_TYPES)}); same: --type",
        choices=STORED_TYPES,
        metavar="TYPE",
    )
    embedding_type: str = option(
        "same",
        "type of the token embedding in a GGUF file, as of --attention-type; same: as it is, of a folder --type",
        choices=STORED_TYPES,
        metavar="TYPE",
    )
    save: float = option(600.0, "seconds between the states that are kept, to resume from", metavar="X")
    device: str = option("auto", "device to train on; auto: a GPU if torch has one", choices=("auto", "cpu", "cuda"))
    seed: int = option(0, "random seed", metavar="N", least=0, flags=("-s",))


@dataclass(frozen=True)
class ServeConfig:
    """Settings by which the HTTP server listens, and its limits. Field names are the flags, with dashes."""

    host: str = option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = option(8080, "port to listen on; 0: any free one", metavar="N", least=0)
    alias: Sequence[str] = option((), "name of the model in the API (repeatable); default: its file's", metavar="NAME")
    keep_alive: float | None = option(
        300.0,
        "of several models: how long one stays loaded without a request, such as 30s, 5m or 1h; 0: not at all; -1: "
        "always (default 5m)",
        duration=True,
    )
    max_models: int = option(
        0, "of several models: maximum number that are loaded at a time; 0: as many as memory holds", metavar="N"
    )
    ray: str | None = option(
        None, "replicas of one model on Ray Serve: their number, or the fewest and the most, such as 1-4", metavar="N"
    )
    api_key_file: str | None = option(
        None, "file of API keys, one a line; the environment's POWERINFER_API_KEY adds more", metavar="FILE"
    )
    insecure: bool = option(False, "listen beyond this machine without an API key")
    cors: Sequence[str] = option((), "origin whose web pages may call the API (repeatable), or *", metavar="ORIGIN")
    tls_cert: str | None = option(None, "certificate chain in PEM, for HTTPS", metavar="FILE")
    tls_key: str | None = option(None, "private key of the certificate, in PEM", metavar="FILE")
    timeout: float = option(3600.0, "seconds after which a request is ended; 0: never", metavar="X")
    queue_timeout: float = option(300.0, "seconds after which a waiting request is refused; 0: never", metavar="X")
    drain: float = option(30.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C", metavar="X")
    max_body: int = option(8 << 20, "maximum size of a request's body (default 8MiB)", size=True)
    receive_timeout: float = option(30.0, "seconds that a client has to send its request", metavar="X")
    reasoning_format: str = option(
        "auto", "thoughts in a chat's answer: auto, deepseek: apart from its text; none: in it, with their marks",
        choices=("auto", "deepseek", "none"),
    )  # fmt: skip
    reasoning_budget: int = option(
        -1, "maximum number of tokens of a thought, where a request does not say; -1: any, 0: no thought", metavar="N",
        least=-1,
    )  # fmt: skip
    log_prompts: bool = option(False, "write the bodies of requests to the log")
    log_format: str = option(
        "auto", "the log's lines: json, text, or auto: text on a terminal and JSON elsewhere",
        choices=("auto", "json", "text"),
    )  # fmt: skip
