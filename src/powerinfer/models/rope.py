"""Frequencies of rotary position embeddings, plain and scaled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import RopeConfig
from powerinfer.errors import ModelError


def rope_frequencies(rope: RopeConfig, context: int = 0) -> tuple[NDArray[np.float32], float]:
    """(frequencies, factor): float32 [dim / 2] radians per position, and what sine and cosine are multiplied by.

    context: tokens that a request may have. LongRoPE has other divisors for contexts beyond the one that a model was
    trained with first; which ones apply is decided here, once, as keys in the cache are rotated already (llama.cpp does
    the same; transformers goes by the length of each text).
    Arithmetic in float32, as the models were trained with. ModelError for an unknown scaling.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    plain = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    divisors = rope.divisors
    if rope.long_divisors and context > rope.original_context_length:
        divisors = rope.long_divisors
    if divisors:
        plain = (plain / np.array(divisors, np.float32)).astype(np.float32)
    if rope.scaling is None:
        return plain, 1.0
    if rope.scaling == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, plain)
    if rope.scaling == "longrope":
        factor = rope.long_attention_factor if context > rope.original_context_length else None
        return plain, _longrope_factor(rope) if factor is None else factor
    raise ModelError(f"RoPE scaling {rope.scaling!r} is unknown; known are linear, llama3, yarn and longrope")


def _longrope_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context_length)) if rope.factor > 1 else 1.0


def _llama3(rope: RopeConfig, plain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Long wavelengths divided by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    long = rope.original_context_length / rope.low_freq_factor
    short = rope.original_context_length / rope.high_freq_factor
    between = rope.high_freq_factor - rope.low_freq_factor or 1.0  # 0: nothing is blended
    smooth = (rope.original_context_length / wavelength - rope.low_freq_factor) / between
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = np.where(wavelength > long, plain / rope.factor, np.where(wavelength < short, plain, blended))
    return scaled.astype(np.float32)


def _yarn(rope: RopeConfig, plain: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate what turns slowly, keep what turns fast, ramp between."""

    def pair(turns: float) -> float:  # the pair with that number of turns over the original context
        return rope.dim * math.log(rope.original_context_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    scaled = plain / np.float32(rope.factor) * ramp + plain * (1 - ramp)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return scaled.astype(np.float32), factor
