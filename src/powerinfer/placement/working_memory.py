"""The working memory of steps on a GPU, by what takes it: an estimate from above, of shapes alone.

    rows         of each token: what is kept from operator to operator
    operators    of those that run one after another the one with most: what it reads, makes and returns
    pieces       of the largest matrix, as many tokens are multiplied with it
    logits       of each request
    recordings   steps that are replayed, the driver's
    library      of cuBLAS, for products of many tokens
    allocator    what torch holds in segments that are not full, and by rounding tensors up
    rest         partial sums of kernels, tables of types

What a load really takes is measured once it is there (`hybrid/vram.py`).
"""

from __future__ import annotations

from powerinfer.config import (
    GAUSSIAN,
    AttentionConfig,
    AttentionKind,
    ChannelDeltaConfig,
    DeltaNetConfig,
    ExpertsConfig,
    FfnConfig,
    FfnKind,
    GatedAttentionConfig,
    LatentAttentionConfig,
    Mamba2Config,
    ModelConfig,
    ParallelConfig,
    ShortConvConfig,
)
from powerinfer.devices.link import selection_bytes
from powerinfer.devices.recording import PROMPTS_BYTES, RECORDED_BYTES
from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_types import EXPERT_TOKENS, KEPT_BLOCKS, piece_elements

LAYER_MARGIN = 1 << 20
"""Bytes of the allocator for each layer, whose small tensors are not in the piece of memory that large ones share."""

SEGMENTS = 44 << 20
"""Bytes of segments that are not full, of torch's own memory and of recordings': torch takes 20 MiB for tensors of 1 to
10 MiB, and 2 MiB for smaller ones."""

LIBRARY = 32 << 20
"""Bytes that torch gives cuBLAS to work in, on Hopper; 8 on others."""

REST = 16 << 20

GPU_MARGIN = RECORDED_BYTES + SEGMENTS + LIBRARY + REST
"""Bytes that do not depend on shapes."""


def working_memory(config: ModelConfig, tokens: int, requests: int, layers: int) -> dict[str, int]:
    """Bytes by part, of steps of up to `tokens` tokens and `requests` rows of logits on a GPU that has that number of
    layers. A step of few tokens may run while the results of a large one are kept."""
    d, many = config.d_model, tokens + gpu.FEW
    widest = max(max(_projected(layer.attention), _products(layer.ffn)) for layer in config.layers)
    piece, of_head = piece_elements(tokens), piece_elements(requests) if requests > gpu.FEW else 0
    result = piece // d if widest > piece // d else 0  # a matrix in one piece gives the product itself
    attention = max(_attention_row(layer.attention) for layer in config.layers) + result
    ffns = max(_ffn_row(layer.ffn, result) for layer in config.layers)
    pairs = max(_pair_bytes(layer.ffn, d, many) for layer in config.layers)
    streams = 0 if config.altup is None else 3 * config.altup.streams * d  # kept, mixed, made
    row = 3 * d + config.layer_inputs * layers + streams  # x, what neurons read, and their total
    beside = 4 * d  # a norm's result and its halves, what comes behind the operator, and a norm of that
    return {
        "rows": 4 * many * row + 2 * selection_bytes(tokens, config),
        "operators": 4 * many * beside + max(4 * many * max(attention, ffns), pairs),
        "pieces": 2 * max(min(widest * d, piece), min(config.vocab_size * d, of_head)),
        "logits": 4 * 2 * requests * (config.vocab_size + config.embed_dim),
        "recordings": RECORDED_BYTES,
        "library": LIBRARY,
        "allocator": SEGMENTS + layers * LAYER_MARGIN,
        "rest": REST,
    }


def prompt_recordings(config: ModelConfig, tokens: int, layers: int) -> int:
    """Bytes of recordings of chunks of prompts of up to so many tokens, of which no plan has any: they take what is
    left once all is placed. Their temporaries are in memory of their own."""
    parts = working_memory(config, tokens, 1, layers)
    return sum(parts[part] for part in ("operators", "pieces", "logits", "library", "allocator")) + PROMPTS_BYTES


def experts_for_others(config: ModelConfig, tokens: int) -> int:
    """Bytes of the experts that a GPU computes of another one's layers in such steps: on a stream for each of these,
    which takes none of the memory of others."""
    pairs = max(_pair_bytes(layer.ffn, config.d_model, tokens + gpu.FEW) for layer in config.layers)
    return pairs + SEGMENTS


def _products(ffn: FfnKind) -> int:
    """Numbers that the first products of a dense FFN give for a token."""
    return (1 + ffn.gated) * ffn.width


def _ffn_row(ffn: FfnKind, result: int) -> int:
    """Numbers of a token that a dense FFN holds at a time: its first products, and what becomes of them, or of a
    piece. result: those of a piece."""
    sorts = isinstance(ffn, FfnConfig) and ffn.activation in ("topk", GAUSSIAN)  # in plain torch
    return _products(ffn) + max((8 if sorts else 1) * ffn.width, result)


def _projected(kind: AttentionKind) -> int:
    """Numbers that the first products of attention, or what stands in its place, give for a token, at most."""
    if type(kind) in (AttentionConfig, GatedAttentionConfig):
        return (kind.n_heads + 2 * kind.n_kv_heads) * kind.head_dim
    return _attention_row(kind)


def _pair_bytes(ffn: FfnKind, d_model: int, many: int) -> int:
    """Bytes of the pairs of tokens and experts: rows of two blocks of tokens are kept, where there are no more; of one
    block what neurons give, and the same in float16."""
    if not isinstance(ffn, ExpertsConfig):
        return 0
    block = min(many, EXPERT_TOKENS + gpu.FEW)
    blocks = min(KEPT_BLOCKS, -(-many // block)) if many <= KEPT_BLOCKS * EXPERT_TOKENS + gpu.FEW else 1
    rows = min(many, blocks * block) * 4 * d_model
    return ffn.router.top_k * (rows + block * 6 * ffn.size) + 2 * many * d_model


def _attention_row(kind: AttentionKind) -> int:
    """Numbers of a token that attention, or what stands in its place, holds at a time."""
    if isinstance(kind, ParallelConfig):
        return _attention_row(kind.attention) + _attention_row(kind.mamba)
    row = (7 * kind.n_heads + 4 * kind.n_kv_heads) * kind.head_dim // 2
    if isinstance(kind, GatedAttentionConfig):
        row += kind.width
    elif isinstance(kind, DeltaNetConfig):  # the products, of each matrix by itself, too, or what kernels pass on
        products = kind.channels + kind.width + 2 * kind.n_heads
        if isinstance(kind, ChannelDeltaConfig):  # once more, put together
            products += 2 * (kind.n_heads * kind.key_dim + kind.rank) + kind.channels + kind.width
        passed = kind.n_heads * (kind.key_dim + kind.value_dim + gpu.DELTA_CHUNK + 1)
        row = products + max(products, kind.channels + kind.width + passed)
    elif isinstance(kind, Mamba2Config):  # likewise
        products = kind.channels + kind.width + kind.n_heads
        row = products + max(products, kind.channels + kind.width + gpu.SCAN_CHUNK * kind.n_groups)
    elif isinstance(kind, ShortConvConfig):
        row = 6 * kind.size  # likewise: what is passed on is less
    elif isinstance(kind, LatentAttentionConfig):  # queries, those for latents, and what heads get; a copy of some
        row = kind.n_heads * (kind.query_dim + kind.plain_dim + 2 * kind.latents)
        row += 2 * ((kind.q_latents or 0) + kind.head_dim)
    return row
