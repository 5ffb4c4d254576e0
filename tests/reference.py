"""Reference operators in numpy: the definition of what every kernel must compute, written for clarity, not speed.

Values are rounded where the kernels round on purpose (activations, keys and values converted to a smaller type);
everything else is float64, so that the only difference is the kernels' float32 arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import Mamba2Config
from powerinfer.formats.quant import dequantize

Floats = NDArray[np.floating[Any]]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

PAGE = 32
"""Tokens of a page of the KV cache."""

SMALLEST_PEAK = np.float32(2.0**-120)
"""A block of activations whose peak lies below this is taken as zeros: 127 / peak would overflow."""


def bfloat16_rounded(x: Floats) -> Float32:
    """The nearest bfloat16 of finite x, ties to even, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) & np.uint32(0xFFFF0000)).view(np.float32)


def quantise_activations(x: Floats) -> tuple[NDArray[np.int8], Float32]:
    """(codes int8 [..., k], scales float32 [..., k / 32]) of x [..., k]: 8 bits per 32, bit for bit as the kernels."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    peak = np.abs(blocks).max(axis=-1)
    usable = peak >= SMALLEST_PEAK
    inverse = np.where(usable, np.float32(127) / np.where(usable, peak, np.float32(1)), np.float32(0))
    codes = np.rint(blocks * inverse[..., None]).astype(np.int8)
    return codes.reshape(x.shape), peak / np.float32(127)


def seen_by(x: Floats, type_name: str, planes: int = 1) -> Float64:
    """x [..., k] in the form that weights of this type are multiplied with: as it is, bfloat16, or 8 bits per 32.

    planes 2: the remainder of the first 8 bits is quantised again, as for the output head.
    """
    if type_name in ("F32", "F16"):
        return np.asarray(x, np.float32).astype(np.float64)
    if type_name == "BF16":
        return bfloat16_rounded(x).astype(np.float64)
    left = np.asarray(x, np.float32)
    seen = np.zeros(left.shape)
    for _ in range(planes):
        codes, scales = quantise_activations(left)
        plane = codes.astype(np.float64) * np.repeat(scales, 32, axis=-1)
        seen, left = seen + plane, (left - plane).astype(np.float32)
    return seen


def linear(x: Floats, data: NDArray[np.uint8], type_name: str, rows: int, planes: int = 1) -> Float64:
    """x . W^T, [tokens, rows]. x: [tokens, k]; data: the stored blocks of W [rows, k], uint8 1-D."""
    weights = dequantize(data.reshape(rows, -1), type_name).astype(np.float64)
    return seen_by(x, type_name, planes) @ weights.T


def rms_norm(x: Floats, weight: Floats, eps: float) -> Float64:
    """x / rms(x) * weight over the last axis."""
    wide = np.asarray(x, np.float64)
    mean: Float64 = np.mean(wide * wide, axis=-1, keepdims=True)
    return wide / np.sqrt(mean + np.float32(eps)) * np.asarray(weight, np.float64)


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float) -> Float64:
    """(x - mean(x)) / deviation(x) * weight + bias over the last axis."""
    wide = np.asarray(x, np.float64)
    centred = wide - np.mean(wide, axis=-1, keepdims=True)
    return rms_norm(centred, weight, eps) + bias


def rotations(positions: NDArray[np.int32], frequencies: Float32, factor: float) -> tuple[Float64, Float64]:
    """(cos, sin) [tokens, pairs], times factor. The angle is a float32, as in training."""
    angle = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    return np.cos(angle) * np.float32(factor), np.sin(angle) * np.float32(factor)


def rope(x: Floats, cos: Floats, sin: Floats) -> Float64:
    """Rotates the pairs (i, i + n) of the first 2 n dimensions. x: [tokens, heads, dim]; cos, sin: [tokens, n]."""
    out = np.array(x, np.float64)
    n = cos.shape[-1]
    first, second = out[..., :n].copy(), out[..., n : 2 * n].copy()
    c, s = cos[:, None, :], sin[:, None, :]
    out[..., :n] = first * c - second * s
    out[..., n : 2 * n] = first * s + second * c
    return out


def activate(
    activation: str,
    gate: Floats,
    up: Floats | None = None,
    threshold: float | Floats | tuple[float, ...] = 0.0,
    kept: int = 0,
    product_threshold: Floats | None = None,
) -> Float64:
    """The FFN's product h from gate . n and up . n, or, without a gate, from up . n alone (here `gate`).

    activation: of `config.ACTIVATIONS`, or gaussian, of which threshold says how many standard deviations of a token's
    gates the cutoff is above their mean; threshold: what a value must exceed to be kept, of cats its magnitude: one
    number, or one for each neuron; of xielu its curve, see `config.FfnConfig`. NaN stays NaN. topk: of each 64 neurons
    the `kept` with the largest magnitude of silu over threshold, the first among equals, NaN before all others.
    product_threshold: of each neuron, what the magnitude of h must exceed.
    """

    def above(x: Floats, limit: float | Floats) -> Float64:
        return np.where(np.asarray(x) <= np.asarray(limit, np.float32), 0.0, np.asarray(x, np.float64))

    wide = np.asarray(gate, np.float64)
    if activation == "silu":
        active = wide * 0.5 * (1.0 + np.tanh(0.5 * wide))
    elif activation == "cats":
        active = wide * 0.5 * (1.0 + np.tanh(0.5 * wide))
        active = np.where(np.abs(active) <= np.asarray(threshold, np.float32), 0.0, active)
    elif activation == "topk":
        active = wide * 0.5 * (1.0 + np.tanh(0.5 * wide))
        banks = (np.abs(active) / np.asarray(threshold, np.float32)).reshape(-1, 64)
        order = np.argsort(-np.nan_to_num(banks, nan=np.inf), axis=1, kind="stable")[:, :kept]
        counts = np.zeros(banks.shape, bool)
        np.put_along_axis(counts, order, True, axis=1)
        active = np.where(counts.reshape(active.shape), active, 0.0)
    elif activation == "xielu":
        above_zero, below, beta, least = np.asarray(threshold, np.float64)
        rest = np.expm1(np.minimum(wide, least)) - wide
        active = np.where(wide > 0, above_zero * wide * wide, below * rest) + beta * wide
    elif activation == "gaussian":
        centred = wide - wide.mean(axis=-1, keepdims=True)
        wide = np.maximum(centred - threshold * np.sqrt(np.mean(centred**2, axis=-1, keepdims=True)), 0.0)
        active = wide * 0.5 * (1.0 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    elif activation == "gelu_tanh":
        active = wide * 0.5 * (1.0 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    else:
        active = above(wide, threshold if activation == "fatrelu" else 0.0)
    if activation == "relu2":
        active = active * active
    if up is None:
        return active
    h = active * (above(up, 0.0) if activation == "drelu" else np.asarray(up, np.float64))
    return h if product_threshold is None else np.where(np.abs(h) <= product_threshold, 0.0, h)


def kv_rounded(x: Floats, kv_type: str) -> Float32:
    """Keys or values [..., head_dim] as read from the cache. kv_type: f32, f16 or q8_0 (8 bits per 32)."""
    narrow = np.asarray(x, np.float32)
    if kv_type == "f32":
        return narrow
    most = np.float32(65504)
    if kv_type == "f16":
        return np.clip(narrow, -most, most).astype(np.float16).astype(np.float32)
    dim = narrow.shape[-1]
    padded = np.zeros((*narrow.shape[:-1], -(-dim // 32) * 32), np.float32)
    padded[..., :dim] = narrow
    blocks = padded.reshape(*narrow.shape[:-1], -1, 32)
    peak = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = np.minimum(peak * (np.float32(1) / np.float32(127)), most).astype(np.float16).astype(np.float32)
    inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, np.float32(1)), np.float32(0))
    codes = np.clip(np.rint(blocks * inverse), -128, 127)
    back: Float32 = (codes * scale).reshape(padded.shape)
    return back[..., :dim]


def softmax(scores: Floats) -> Float64:
    """Over the last axis; -inf has weight 0."""
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores, axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), np.float64)


def attention(
    q: Floats,
    keys: Floats,
    values: Floats,
    pages: NDArray[np.int32],
    positions: NDArray[np.int32],
    window: int = 0,
    scale: float | None = None,
    sinks: Floats | None = None,
    cap: float | None = None,
    chunked: bool = False,
) -> Float64:
    """Attention of tokens of one sequence over its paged cache, [tokens, heads, dim].

    q: [tokens, heads, dim]; keys, values: [pages, PAGE, kv_heads, dim]; pages: the sequence's page table. The token at
    position p sees 0 .. p, or the last `window` of these. scale: of the scores, None: dim ** -0.5. sinks:
    [heads], a score more in the softmax of each head, which belongs to no value. cap: scores become cap * tanh(scores /
    cap), None: they stay. chunked: p sees those from the last multiple of `window` on.
    """
    tokens, heads, dim = q.shape
    group = heads // keys.shape[2]
    scale = dim**-0.5 if scale is None else scale
    seen = np.arange(positions.max() + 1)
    k, v = (cache[pages[seen // PAGE], seen % PAGE].astype(np.float64) for cache in (keys, values))
    back = positions[:, None] - seen  # from a token to those before it
    reach = positions % window + 1 if chunked else np.full(tokens, window or np.inf)
    hidden = (back < 0) | (back >= reach[:, None])
    out = np.zeros((tokens, heads, dim))
    for h in range(heads):
        scores = q[:, h].astype(np.float64) @ k[:, h // group].T * scale
        scores = np.where(hidden, -np.inf, scores if cap is None else cap * np.tanh(scores / cap))
        if sinks is not None:
            scores = np.insert(scores, len(seen), sinks[h], axis=1)
        out[:, h] = softmax(scores)[:, : len(seen)] @ v[:, h // group]
    return out


def mamba(
    x: Floats, b: Floats, c: Floats, steps: Floats, a: Floats, d: Floats, state: Floats | None = None
) -> tuple[Float64, Float64]:
    """(what the heads of Mamba2 give for tokens of one sequence [tokens, heads, dim], the new state), token by token:
    state = exp(a * step) * state + step * x b^T;  y = state c + d * x.

    x: [tokens, heads, dim]; b, c: [tokens, groups, state_dim], of neighbouring heads; steps: [tokens, heads], behind
    softplus and limits; a, d: [heads]; state: [heads, dim, state_dim], None: a sequence begins.
    """
    (tokens, heads, dim), n = x.shape, b.shape[2]
    of_head = np.arange(heads) // (heads // b.shape[1])
    state = np.zeros((heads, dim, n)) if state is None else np.array(state, np.float64)
    out = np.zeros((tokens, heads, dim))
    for t in range(tokens):
        step = steps[t].astype(np.float64)[:, None, None]
        state = np.exp(a[:, None, None] * step) * state + step * x[t][:, :, None] * b[t, of_head][:, None, :]
        out[t] = (state * c[t, of_head][:, None, :]).sum(axis=2) + d[:, None] * x[t]
    return out, state


def mamba_layer(about: Mamba2Config, tensors: dict[str, Floats], n: Floats, eps: float) -> Float64:
    """What Mamba2 adds to tokens of a sequence from its begin, [tokens, d_model], of their normalised rows n.

    tensors: of the layer, by the names of `Mamba2Config.tensors` without `mamba_`.
    """
    get = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    z, xbc, dt = (n @ get[part].T + get.get(f"{part}_bias", 0.0) for part in ("z", "xbc", "dt"))
    inner, heads, keys = about.width, about.n_heads, about.n_groups * about.state_dim
    of_z, *of_xbc, of_dt = about.scales
    xbc = xbc * np.repeat(of_xbc, (inner, keys, keys))
    padded = np.concatenate([np.zeros((about.taps - 1, about.channels)), xbc])
    mixed = sum(padded[j : j + len(n)] * get["conv"][:, j] for j in range(about.taps))
    mixed = activate(about.activation, mixed + get.get("conv_bias", 0.0))
    x, b, c = np.split(mixed, [inner, inner + keys], axis=1)
    steps = np.clip(np.logaddexp(0, dt * of_dt + get["step_bias"]), *about.step_limits)
    groups = (len(n), about.n_groups, about.state_dim)
    y, _ = mamba(
        x.reshape(len(n), heads, about.head_dim), b.reshape(groups), c.reshape(groups), steps, get["a"], get["d"]
    )
    y, gate = y.reshape(len(n), inner), z * of_z / (1 + np.exp(-z * of_z))
    if about.norm == "gated":
        y = y * gate
    if about.norm != "none":
        each = y.reshape(len(n), about.norm_groups, -1)
        each = each / np.sqrt((each**2).mean(axis=-1, keepdims=True) + eps)
        y = each.reshape(len(n), inner) * get["norm"]
    y = y if about.norm == "gated" else y * gate
    return np.asarray(y @ get["o"].T + get.get("o_bias", 0.0), np.float64)
