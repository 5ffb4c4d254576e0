"""Triton kernels of `gpu_latent`, by the rules of `triton_kernels`.

All heads of a token read the same keys, so a program has many heads of a token, and loads a key once for all of them:
as a key, and its latents as the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.gpu_types import FEW, INTEGERS
from powerinfer.kernels.triton_kernels import (
    ONE,
    WIDE,
    cache_kind,
    codes,
    columns,
    context_splits,
    either,
    for_rows,
    growth_of,
    half,
    in_turn,
    precision,
    processors,
    query_growth,
    row_dots,
    row_width,
    scales_of,
    stored_head,
    taken_width,
    tensor_columns,
    turned_head,
)
from powerinfer.kernels.triton_launch import launched

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.config import LatentAttentionConfig
    from powerinfer.kernels.gpu_types import Cached, Contexts, Weight


# Queries and weights are multiplied as sums of that many numbers of float16, or in float32 (0): a cache of float32 is
# exact; of a few tokens queries are as exact as float32 where the cache's own numbers are float16; else one suffices.
ROWS = {0: 16, 1: 32, 2: 16}  # of a tile of scores: tokens times heads
PLACES = {0: 16, 1: 32, 2: 32}  # positions at a time
WARPS = {0: 8, 1: 8, 2: 4}
CHUNK = 128  # columns of a key at a time in float32, which has no room for whole keys
HELD = 1  # a context is split for this many programs of each multiprocessor,
SPLIT_PAGES = 2  # but into none of fewer pages
JOINED = 64  # columns that a program joins

# ---------------------------------------------------------------------------------------------------------------------
# Products with a matrix of each head


@launched
@triton.jit(do_not_specialize=["tokens"])
def _per_head_kernel(
    x, data, scales, out, tokens, rows, k, x_head, out_head, out_token,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < rows
    x += head * x_head
    out += head * out_head
    if T > 1:
        y = row_dots(x, data, scales, head * rows + row, live, tokens, k, TYPE, T, R, C, PRECISION)
        t = tl.arange(0, T)
        tl.store(out + t[None, :] * out_token + row[:, None], y, mask=live[:, None] & (t < tokens)[None, :])
    else:
        for t in range(tokens if T else 1):
            own = x + t * taken_width(k, TYPE)
            y = row_dots(own, data, scales, head * rows + row, live, 1, k, TYPE, T, R, C, PRECISION)
            tl.store(out + t * out_token + row, y, mask=live)


def per_head(w: Weight, x: Tensor, out: Tensor) -> None:
    """`gpu_latent.per_head` of at most `gpu.FEW` tokens, into out, float32 [heads, T, out], maybe a transposed one."""
    heads, tokens, k = x.shape
    if not out.numel():
        return
    assert x.stride(2) == out.stride(2) == 1
    turns = in_turn(w.type, tokens)
    if turns:
        tile = for_rows(ONE[w.type], w.type, k)
    else:
        tile = WIDE[w.type]
        tile = tile._replace(columns=min(tile.columns, max(32, triton.next_power_of_2(row_width(w.type, k)))))
    if turns and w.type in INTEGERS:
        x = codes(x.reshape(-1, k)).view(heads, tokens, -1)
    elif tokens > 1 and x.stride(1) != k:
        x = x.contiguous()
    rows = w.rows // heads
    _per_head_kernel[(triton.cdiv(rows, tile.rows), heads)](
        x, w.data, scales_of(w), out, tokens, rows, k, x.stride(0), out.stride(0), out.stride(1),
        TYPE=w.type, T=columns(w.type, tokens) if turns else tensor_columns(tokens, False), R=tile.rows, C=tile.columns,
        PRECISION=precision(x), num_warps=tile.warps,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Norm, rotary embedding, cache


@launched
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _place_kernel(
    turned, kv, weight, eps, positions, frequencies, factor, pairs, cache, scales, slots, heads, latents, dims,
    q_token, q_head, kv_token, KIND: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + t)
    if head < heads:
        x, turn = turned + t * q_token + head * q_head, tl.arange(0, TURNED)
        of_query = turned_head(x, turn, position, frequencies, factor, pairs, dims - latents)
        tl.debug_barrier()  # every thread has read its pair
        tl.store(x + turn, of_query, mask=turn < 2 * pairs)
    else:
        key, dim = kv + t * kv_token, tl.arange(0, BLOCK)
        v = tl.load(key + dim, mask=dim < latents, other=0)
        v = v * (1 / tl.sqrt_rn(tl.sum(v * v, 0) / latents + eps)) * tl.load(weight + dim, mask=dim < latents, other=0)
        behind = tl.where(dim < latents, dims - latents, dim - latents)
        rest = turned_head(key + latents, behind, position, frequencies, factor, pairs, dims - latents)
        y = tl.where(dim < latents, v, rest)
        stored_head(cache, scales, tl.load(slots + t), 0, 1, dims, dim, y, KIND, BLOCK)


def place(
    turned: Tensor, kv: Tensor, norm: tuple[Tensor, float], positions: Tensor, rotation: tuple[Tensor, float],
    cache: Cached, slots: Tensor,
) -> None:  # fmt: skip
    """`gpu_latent.place` in one launch; the tensors may be parts of larger ones."""
    (tokens, heads, dims), latents = turned.shape, len(norm[0])
    assert turned.stride(2) == kv.stride(1) == 1 and kv.shape[1] == latents + dims
    if tokens:
        kind = cache_kind(cache)
        _place_kernel[(tokens, heads + 1)](
            turned, kv, *norm, positions, *rotation, rotation[0].shape[0], cache.data,
            either(cache.scales, cache.data), slots, heads, latents, latents + dims, turned.stride(0),
            turned.stride(1), kv.stride(0), KIND=kind, BLOCK=max(32, triton.next_power_of_2(latents + dims)),
            TURNED=triton.next_power_of_2(dims), num_warps=4, enable_fp_fusion=kind != "Q8_0",
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@triton.jit
def _loaded(cache, scales, row, there, dims, dim, live, KIND: tl.constexpr, NARROW: tl.constexpr):
    """Elements dim of the keys at these rows, [rows, dim]; zeros where a row is not there or a dim not live."""
    here = there[:, None] & live[None, :]
    y = tl.load(cache + row[:, None] * dims + dim[None, :], mask=here, other=0)
    if KIND == "Q8_0":
        d = tl.load(scales + row[:, None] * tl.cdiv(dims, 32) + (dim // 32)[None, :], mask=here, other=0)
        y = half(y.to(tl.float32) * d.to(tl.float32))
    return y.to(NARROW)


@triton.jit
def _latents(
    cache, scales, row, there, dims, latents, BLOCK: tl.constexpr, PLACES: tl.constexpr, KIND: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """The latents [PLACES, BLOCK] of keys at these rows, scales once per block."""
    if KIND == "Q8_0":
        b = tl.arange(0, BLOCK // 32)
        each = b[:, None] * 32 + tl.arange(0, 32)[None, :]
        here = there[:, None, None] & (each < latents)[None]
        codes = tl.load(cache + row[:, None, None] * dims + each[None], mask=here, other=0).to(tl.float32)
        here = there[:, None] & (b * 32 < latents)[None, :]
        d = tl.load(scales + row[:, None] * tl.cdiv(dims, 32) + b[None, :], mask=here, other=0).to(tl.float32)
        y = tl.reshape(half(codes * d[:, :, None]).to(NARROW), (PLACES, BLOCK))
    else:
        dim = tl.arange(0, BLOCK)
        y = _loaded(cache, scales, row, there, dims, dim, dim < latents, KIND, NARROW)
    return y


@launched
@triton.jit(do_not_specialize=["tokens", "pages", "per"], do_not_specialize_on_alignment=["table", "rows", "positions"])
def _latent_kernel(
    q, turned, cache, scales, table, rows, positions, out, peaks, sums, tokens, heads, latents, dims, pages, per, scale,
    growth, interval, offset, q_head, of_token, of_head,
    GROWN: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    TURNED: tl.constexpr, PLACES: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of tokens, with HEADS heads of each, against one split of their contexts: online softmax."""
    NARROW: tl.constexpr = tl.float16 if PARTS else tl.float32
    split = tl.program_id(2)
    m, dim, turn, place = tl.arange(0, M), tl.arange(0, BLOCK), tl.arange(0, TURNED), tl.arange(0, PLACES)
    token, head = tl.program_id(0) * TILE + m // HEADS, tl.program_id(1) * HEADS + m % HEADS
    live = (m // HEADS < TILE) & (token < tokens) & (head < heads)
    position = tl.load(positions + token, mask=live, other=-1)
    row = tl.load(rows + token, mask=live, other=0)
    if GROWN:
        scale *= query_growth(position, growth, interval, offset)[:, None]
    q_at = q + (head.to(tl.int64) * q_head + token.to(tl.int64) * latents)[:, None]
    at = turned + (token.to(tl.int64) * of_token + head * of_head)[:, None] + turn[None, :]
    tail = tl.load(at, mask=live[:, None] & (turn < dims - latents)[None, :], other=0) * scale
    tail_1 = tail.to(NARROW)
    if PARTS == 2:
        tail_2 = (tail - tail_1.to(tl.float32)).to(NARROW)
    if PARTS:
        query = tl.load(q_at + dim[None, :], mask=live[:, None] & (dim < latents)[None, :], other=0) * scale
        query_1 = query.to(NARROW)
        if PARTS == 2:
            query_2 = (query - query_1.to(tl.float32)).to(NARROW)
    acc = tl.zeros((M, BLOCK), tl.float32)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    left = live & (position >= 0)
    while tl.max(left.to(tl.int32), 0) > 0:  # the sequences of the tile in turn
        one = tl.min(tl.where(left, row, 0x7FFFFFFF), 0)
        mine = left & (row == one)
        end = tl.minimum(tl.max(tl.where(mine, position, -1), 0) + 1, (split * per + per) * 32)
        for begin in range(split * per * 32, end, PLACES):
            slot = begin + place
            there = slot < end
            from_ = tl.load(table + one * pages + begin // 32).to(tl.int64) * 32 + slot % 32
            keys = _loaded(cache, scales, from_, there, dims, latents + turn, turn < dims - latents, KIND, NARROW)
            scores = tl.dot(tail_1, tl.trans(keys), input_precision=PRECISION)
            if PARTS == 2:
                scores = tl.dot(tail_2, tl.trans(keys), scores)
            if PARTS == 0:
                for c in range(0, BLOCK, CHUNK):
                    d = c + tl.arange(0, CHUNK)
                    piece = tl.load(q_at + d[None, :], mask=live[:, None] & (d < latents)[None, :], other=0) * scale
                    some = _loaded(cache, scales, from_, there, dims, d, d < latents, KIND, NARROW)
                    scores = tl.dot(piece, tl.trans(some), scores, input_precision=PRECISION)
            values = _latents(cache, scales, from_, there, dims, latents, BLOCK, PLACES, KIND, NARROW)
            if PARTS:
                scores = tl.dot(query_1, tl.trans(values), scores)
                if PARTS == 2:
                    scores = tl.dot(query_2, tl.trans(values), scores)
            scores = tl.where(mine[:, None] & (slot[None, :] <= position[:, None]), scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp(peak - level)
            weights = tl.exp(scores - level[:, None])
            weights_1 = weights.to(NARROW)
            summed = tl.dot(weights_1, values, acc * shrink[:, None], input_precision=PRECISION)
            if PARTS == 2:
                summed = tl.dot((weights - weights_1.to(tl.float32)).to(NARROW), values, summed)
            acc = tl.where(mine[:, None], summed, acc) if TILE > 1 else summed  # 0 * NaN of another sequence is NaN
            total = total * shrink + tl.sum(weights, 1)
            peak = higher
        left = left & (row != one)
    where_ = head.to(tl.int64) * tokens + token
    real = live[:, None] & (dim < latents)[None, :]
    if not SPLIT:
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + where_[:, None] * latents + dim[None, :], result, mask=real)
    else:
        where_ += split.to(tl.int64) * tokens * heads
        tl.store(out + where_[:, None] * latents + dim[None, :], acc, mask=real)
        tl.store(peaks + where_, peak, mask=live)
        tl.store(sums + where_, total, mask=live)


@launched
@triton.jit(do_not_specialize=["splits"])
def _join_latents_kernel(parts, peaks, sums, out, latents, splits, PAD: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of the splits of one head of one token, in their order."""
    at, of = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    s, dim = tl.arange(0, PAD), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = s < splits
    peak = tl.load(peaks + s * of + at, mask=split, other=float("-inf"))
    level = tl.max(peak, 0)
    level = tl.where(level == float("-inf"), 0.0, level)
    weight = tl.exp(peak - level)
    total = tl.sum(weight * tl.load(sums + s * of + at, mask=split, other=0), 0)
    here = split[:, None] & (dim < latents)[None, :]
    part = tl.load(parts + (s[:, None] * of + at) * latents + dim[None, :], mask=here, other=0)
    y = tl.sum(part * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + at * latents + dim, y, mask=dim < latents)


def attention(
    q: Tensor, turned: Tensor, cache: Cached, contexts: Contexts, settings: LatentAttentionConfig
) -> Tensor:
    """`gpu_latent.attention`; turned may be a part of a larger tensor."""
    (heads, tokens, latents), dims, pages = q.shape, cache.data.shape[3], contexts.pages.shape[1]
    assert q.stride(1) == latents and q.stride(2) == turned.stride(2) == 1
    out = torch.empty((heads, tokens, latents), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    kind = cache_kind(cache)
    parts_of = 0 if kind == "F32" else 2 if kind == "F16" and tokens <= FEW else 1
    own = min(int(triton.next_power_of_2(heads)), ROWS[parts_of])
    tile = 1 if tokens <= FEW else ROWS[parts_of] // own
    grid = triton.cdiv(tokens, tile), triton.cdiv(heads, own)
    splits = context_splits(pages, SPLIT_PAGES, grid[0] * grid[1], HELD * processors(q))
    per = triton.cdiv(pages, splits)
    splits = triton.cdiv(pages, per)
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = torch.empty((splits, heads, tokens, latents), dtype=torch.float32, device=q.device)
        peaks, sums = (torch.empty((splits, heads, tokens), dtype=torch.float32, device=q.device) for _ in range(2))
    block = max(32, int(triton.next_power_of_2(latents)))
    _latent_kernel[(*grid, splits)](
        q, turned, cache.data, either(cache.scales, cache.data), *contexts, parts, peaks, sums, tokens, heads, latents,
        dims, pages, per, settings.scale, *growth_of(settings), q.stride(0), turned.stride(0), turned.stride(1),
        GROWN=settings.query_growth != 0, HEADS=own, TILE=tile, M=max(16, tile * own), BLOCK=block,
        TURNED=max(16, triton.next_power_of_2(dims - latents)), PLACES=PLACES[parts_of], CHUNK=min(CHUNK, block),
        SPLIT=splits > 1, KIND=kind, PARTS=parts_of, PRECISION=precision(q), num_warps=WARPS[parts_of],
    )  # fmt: skip
    if splits > 1:
        pad = triton.next_power_of_2(splits)
        _join_latents_kernel[(heads * tokens, triton.cdiv(latents, JOINED))](
            parts, peaks, sums, out, latents, splits, PAD=pad, COLUMNS=JOINED, num_warps=4
        )  # fmt: skip
    return out
