"""Sizes and tensor types shared by the kernels over torch tensors (`gpu`) and their Triton versions (`triton_*`).

torch is not imported: the sizes are asked for without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from powerinfer.formats.weight_types import FLOAT_TYPES, GPU_TYPES, WEIGHT_TYPES

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.config import DeltaNetConfig, Mamba2Config, RouterConfig, ShortConvConfig

Limit: TypeAlias = float | tuple[float, ...]
"""Numbers of an activation that all neurons share: `FfnConfig.limit`."""

PAGE = 32
"""Tokens of a page of the KV cache."""

FEW = 32
"""Most tokens whose products read weights as they are; for more of them matrices are dequantised first."""

PIECE = 1 << 26
"""Elements of a matrix that are dequantised, and multiplied with many tokens, at a time."""

EXPERT_TOKENS = 1024
"""Tokens of a prompt whose experts are summed at a time: the rows of all pairs of a token and an expert take memory,
and are indexed with 32 bits."""

KEPT_BLOCKS = 2
"""Most of these blocks that keep the rows of their pairs while parts of a layer's experts come, as is planned; of more
blocks each part's are added by themselves."""

_KINDS = [WEIGHT_TYPES[name] for name in GPU_TYPES if name not in FLOAT_TYPES]

UNPACKED = {
    "Q3_K": (0, 96), "Q2_K": (16, 80), "TQ2_0": (0, 64), "TQ1_0": (0, 52),
    "IQ3_S": (2, 106), "IQ3_XXS": (2, 98), "IQ2_XS": (2, 66), "IQ2_XXS": (2, 66), "IQ2_S": (2, 74), "IQ1_S": (2, 50),
    "IQ1_M": (0, 48), "IQ4_XS": (8, 136), "NVFP4": (4, 36), "Q2_0": (2, 18), "Q1_0": (2, 18),
}  # fmt: skip
"""Types whose codes kernels unpack to words of four (`triton_words`): of the bytes of a block in a file those of the
codes; the others are of the scales. All but a file's K-quants of four bits and more."""

FACTORED = "NVFP4"
"""The type whose rows have a factor beside the scales of their blocks: a float32 behind these."""

K_CODES = {
    kind.name: (kind.codes_at, kind.codes_at + kind.codes)
    for kind in _KINDS
    if kind.block == 256 and kind.name not in UNPACKED
}
"""The same of K-quants of four bits and more."""

CUT = K_CODES | UNPACKED
"""The same of all types whose blocks are cut so."""

FOUR_BITS = tuple(kind.name for kind in _KINDS if kind.codes < kind.block and kind.name not in UNPACKED)
"""Types in whose rows a byte has the low four bits of two codes."""

INTEGERS = tuple(kind.name for kind in _KINDS if not kind.entries or kind.name in UNPACKED)
"""Types whose products with one token, and with some in turn, are of integers."""

MADE_CODES = "made_codes"
"""The attribute of a tensor of activations with what a kernel made of them for such products when it wrote them."""

SHARING = {"Q4_0": "Q4_0X32", "Q8_0": "Q8_0X32"}
"""Types of whose matrices each block of 32 lies across rows of the transpose: 32 of these share their scales, in a
tensor of their own. By the type of the matrix."""

BY_NEURON = ("F16", "BF16", *SHARING)
"""Types of down of experts whose neurons are told apart."""

FLOAT16_MAX = 65504.0

Q8_STEP = float(np.float32(1) / np.float32(127))
"""One step of a block of Q8_0, as a share of the largest of its 32 values."""

OAI_LIMIT, OAI_SCALE = 7.0, 1.702
"""swiglu_oai(g, u) = g * sigmoid(OAI_SCALE * g) * (u + 1), g at most OAI_LIMIT and u clamped to it on either side."""

GELU_SCALE, GELU_CUBIC = float(np.sqrt(8 / np.pi)), 0.044715
"""gelu_tanh(x) = x * sigmoid(GELU_SCALE * (x + GELU_CUBIC * x ** 3))."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix [rows, k] on a device.

    F32, F16, BF16: data [rows, k] of that type, no scales. Q8_0: data int8 [rows, k]; Q4_0: data uint8 [rows, k / 2],
    byte 16 b + j of a row is element 32 b + j in its low and element 32 b + 16 + j in its high nibble (j < 16), in
    two's complement; both: scales float16 [rows, k / 32]. Q4_0X32, Q8_0X32: data as Q4_0 and Q8_0, the scales are in
    `Neurons.shared`.
    MXFP4: data as Q4_0, codes of E2M1, scales uint8 [rows, k / 32], exponents of E8M0.
    Types of `CUT`: as in a file, each block cut in two: data uint8 [rows, blocks * bytes of codes], scales uint8 [rows,
    blocks * the other bytes], of `FACTORED` four more.
    """

    type: str
    rows: int
    k: int
    data: Tensor
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return tensor_bytes(self.data, self.scales)


@dataclass(frozen=True, slots=True, eq=False)
class Cached:
    """The keys, or the values, of a layer: float16, float32 or int8 [pages, PAGE, kv_heads, head_dim].

    scales: of int8, float16 [pages, PAGE, kv_heads, ceil(head_dim / 32)]; 32 values of a head share one.
    """

    data: Tensor
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return tensor_bytes(self.data, self.scales)

    def values(self, pages: Tensor) -> Tensor:
        """The values of some pages, float32 [pages, PAGE, kv_heads, head_dim]."""
        wide = self.data[pages].float()
        if self.scales is None:
            return wide
        return wide.mul_(self.scales[pages].float().repeat_interleave(32, dim=-1)[..., : wide.shape[-1]])


class Contexts(NamedTuple):
    """Contexts in a cache that the T tokens of a step see. pages: int32 [S, P], of each sequence in order; rows: int32
    [T], the sequence of a token; positions: int32 [T], negative where a token stands for nothing."""

    pages: Tensor
    rows: Tensor
    positions: Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each head of q and of k: float32 [head_dim] weights."""

    q: Tensor
    k: Tensor
    eps: float


class NewHeads(NamedTuple):
    """Keys and values of a step's tokens, float32 [T, kv_heads, head_dim], and where a cache gets them, int64 [T];
    rotation: frequencies and factor, by which q and k turn; norms: of their heads, before that."""

    k: Tensor
    v: Tensor
    slots: Tensor
    rotation: tuple[Tensor, float]
    norms: HeadNorms | None


@dataclass(frozen=True, slots=True, eq=False)
class Neurons:
    """Neurons of a layer on a device.

    up, and gate unless the FFN is plain: [n, d_model]; down: [n, d_model], row i is neuron i's column of down; its type
    may be Q4_0X32, then neuron i's scales are row group[i] of `shared`, float16 [groups, d_model], group int32 [n].
    gate_bias, up_bias: float32 [n]; activation: of config.ACTIVATIONS; threshold: of fatrelu and cats, or of each
    neuron in `limits`, float32 [n]; of xielu its curve; product_limits: of h, float32 [n], only with a gate.
    """

    gate: Weight | None
    up: Weight
    down: Weight
    shared: Tensor | None
    group: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str
    threshold: Limit
    limits: Tensor | None = None
    product_limits: Tensor | None = None

    @property
    def n(self) -> int:
        """Number of neurons."""
        return self.up.rows

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        weights = sum(w.nbytes for w in (self.gate, self.up, self.down) if w is not None)
        vectors = self.gate_bias, self.up_bias, self.limits, self.product_limits
        return weights + tensor_bytes(self.shared, self.group, *vectors)


NOT_A_NUMBER = -1e30
"""The score of an expert whose own is not a number: it is selected after all others."""


class CallAnswer(NamedTuple):
    """Means of a GPU that selects terms for a call of the CPU, to answer it where it selects none of the CPU's.

    counters: int32 [3] on the device: selections of the CPU's terms, and what kernels count by, zero but meanwhile;
    answered: int32 [1] of the host (`gpu_host`), which gets the number if there are none. Sums of the CPU's count only
    where there are some.
    """

    counters: Tensor
    answered: Tensor
    number: int


class Elsewhere(NamedTuple):
    """The experts that the CPU has: those whose slot is negative in the table, int32 [n]; and how to answer where no
    token selects any."""

    table: Tensor
    answer: CallAnswer


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """The router of a layer on a device. weight: [n, d_model]; bias: float32 [n] of its products; correction: float32
    [n], added to the scores for the selection alone; arrived: int32 [1], zero but while a kernel counts by it."""

    settings: RouterConfig
    weight: Weight
    bias: Tensor | None
    correction: Tensor | None
    arrived: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.weight.nbytes + tensor_bytes(self.bias, self.correction, self.arrived)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPredictor:
    """The second matrix of a predictor inside experts, outer [slots * size, rank] as `Experts` has up: a token needs
    the neurons of its experts of which z = outer . hidden is at least threshold, or no number."""

    outer: Weight
    threshold: float


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Some experts of a layer on a device, in slots.

    gate (None without one), up: [slots * size, d_model], an expert's rows together; down: [slots * d_model, size];
    biases: of these, float32 [rows] of the weight, or none of them has one. by_neuron: in steps of few tokens rows of
    up where a gate does not fire, and down's of neurons that do not, are not read; then there are no biases, size is a
    multiple of 32, and down, of a type of `BY_NEURON`, is [slots * size, d_model], row i being neuron i's column.
    shared: the scales of a type of `SHARING`, float16 [slots * size / 32, d_model], a row for 32 neurons one after
    another; or, where only some neurons of the experts are here, [rows, d_model] and group, int32 [slots * size], the
    row of each. predictor: of experts by neuron, selects before a row is read; None: the first products say what fires.
    scales_input: weights multiply what experts read, not what they give; then there are no biases.
    """

    slots: int
    size: int
    gate: Weight | None
    up: Weight
    down: Weight
    activation: str
    threshold: float
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    by_neuron: bool = False
    shared: Tensor | None = None
    predictor: ExpertPredictor | None = None
    group: Tensor | None = None
    scales_input: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        outer = None if self.predictor is None else self.predictor.outer
        weights = sum(weight.nbytes for weight in (self.gate, self.up, self.down, outer) if weight is not None)
        return weights + tensor_bytes(self.gate_bias, self.up_bias, self.down_bias, self.shared, self.group)


DELTA_CHUNK = 16
"""Tokens that the delta rule takes at a time in steps of many."""

UNIT_EPS = 1e-6
"""Of the L2 norm of queries and keys: no file states it (csrc/delta_net.cpp has the same)."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """A layer beside its matrices. taps: float32 [taps, channels] of the convolution over queries, keys and values;
    decay, dt_bias: float32 [value heads], or dt_bias of each channel of a key, whose decay's logarithm, or a head's, is
    decay * softplus(alpha + dt_bias); norm: float32 [value_dim], of each value head, with eps."""

    about: DeltaNetConfig
    taps: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float

    @property
    def conv_bias(self) -> None:
        """None: the convolution has no bias."""


SCAN_CHUNK = 32
"""Tokens that Mamba2 takes at a time in steps of many."""


@dataclass(frozen=True, slots=True, eq=False)
class Mamba:
    """A layer of Mamba2 beside its matrices. taps: float32 [taps, channels] of the convolution over x, B and C, times
    their scales; conv_bias: float32 [channels]; a, d, step_bias: float32 [heads], the logarithm of a head's decay is
    a * step, and d * x is added to what it gives; norm: float32 [heads * head_dim], with eps, or None."""

    about: Mamba2Config
    taps: Tensor
    conv_bias: Tensor
    a: Tensor
    d: Tensor
    step_bias: Tensor
    norm: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    """A layer of short convolutions beside its matrices. taps: float32 [taps, channels]; conv_bias: float32 [channels]
    or None."""

    about: ShortConvConfig
    taps: Tensor
    conv_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """A layer's states of sequences, in slots. window: float32 [slots, taps - 1, channels], the convolution's inputs
    for the last tokens; heads: float32 [slots, heads, n, m], a matrix for each: of Gated DeltaNet [value_dim,
    key_dim], of Mamba2 [head_dim, state_dim], of short convolutions without elements; inputs: float32 [slots * tokens,
    n], what the last step of few tokens read of each: the convolution's inputs, and, behind them, the heads' gates."""

    window: Tensor
    heads: Tensor
    inputs: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return tensor_bytes(self.window, self.heads, self.inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Tokens of S sequences that are computed again for their states alone, in rows of which each sequence has as many.

    runs: int32 [S, 4], as of `gpu_delta.delta_net`; rows: int32 [n], the sequence of each row, also of those that hold
    no token; inputs: int32 [n], rows of `States.inputs`.
    """

    runs: Tensor
    rows: Tensor
    inputs: Tensor


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Bytes of some tensors; a missing one has none."""
    return sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)
