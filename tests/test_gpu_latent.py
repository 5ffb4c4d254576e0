"""Multi-head latent attention on a GPU: every operator against float64, in plain torch and in Triton."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from gpu_device import EPS, device_name, sum_error
from stored_weights import stored_evenly
from test_gpu_kernels import (  # noqa: F401
    GROWTH,
    assert_close,
    by_interpreter,
    cached,
    coded,
    floats,
    held,
    kernels,
    on_device,
    query_factors,
    unwritten,
)

from powerinfer.config import LatentAttentionConfig, RopeConfig
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import gpu, gpu_latent

SIZES = [(3, 40, 8), (6, 64, 16), (20, 24, 4)]
"""Heads, latents, rotated numbers: of 40 + 8 numbers a block of 8 bits has both kinds; 20 heads are several tiles."""


def head_matrices(type_name: str, heads: int, rows: int, k: int) -> RawTensor:
    rng = np.random.default_rng([heads, rows, k])
    return RawTensor(type_name, (heads, rows, k), stored_evenly(type_name, heads * rows, k, 1.0, rng))


@pytest.mark.parametrize("tokens", [1, 3, 20, 33])
@pytest.mark.parametrize("type_name", [kind for kind in gpu.GPU_TYPES if kind not in gpu.UNPACKED])
def test_each_head_meets_its_own_matrix(type_name: str, tokens: int, kernels: str) -> None:  # noqa: F811
    """Rows that are parts of wider ones, token by token as a product gives them."""
    sizes = ((2, 40, 96), (3, 5, 32), (5, 1, 160)) if type_name[0] in "QM" else ((2, 40, 130), (3, 7, 20))
    for heads, rows, least in sizes[: 1 if by_interpreter() else None]:
        k = least if type_name not in gpu.K_CODES else 256 + least // 96 * 256
        stored = head_matrices(type_name, heads, rows, k)
        wide = floats(1, tokens, heads, k + 8)
        x = wide[..., :k].astype(np.float64)
        weights = stored.float32().astype(np.float64)
        want = np.einsum("thk,hrk->htr", x, weights)
        bound = sum_error(k) * np.einsum("thk,hrk->htr", np.abs(x), np.abs(weights))
        for head in range(heads):
            bound[head] += coded(type_name, x[:, head]) @ np.abs(weights[head]).T
        weight = gpu_latent.upload(stored, device_name())
        assert (weight.rows, weight.k) == (heads * rows, k)
        given = on_device(wide)[..., :k].transpose(0, 1)
        if not by_interpreter() or tokens not in (3, 33):
            assert_close(gpu_latent.per_head(weight, given), want, bound)
        if by_interpreter() and tokens not in (3, 33):
            continue
        by_token = gpu_latent.per_head(weight, given, by_token=True)
        assert by_token.is_contiguous()
        assert_close(by_token, want.swapaxes(0, 1), bound.swapaxes(0, 1))


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_many_tokens_of_heads_are_multiplied_in_a_narrow_type(
    type_name: str,
    kernels: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some heads at a time; activations beyond float16 too."""
    monkeypatch.setattr(gpu, "_NARROW", [device_name()])
    monkeypatch.setattr(gpu, "_PIECE", 2 * 21 * 96)
    stored = head_matrices(type_name, 5, 21, 96)
    x = floats(3, 5, 40, 96)
    x[2, 7] *= 1e9
    x[3, 8] = 0
    weights = stored.float32().astype(np.float64)
    size = np.einsum("htk,hrk->htr", np.abs(x.astype(np.float64)), np.abs(weights))
    rounding = 2**-8 if type_name == "BF16" else 2**-10 if type_name == "F16" else 2**-9
    got = gpu_latent.per_head(gpu_latent.upload(stored, device_name()), on_device(x))
    assert_close(got, np.einsum("htk,hrk->htr", x.astype(np.float64), weights), (sum_error(96) + rounding) * size)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("sizes", SIZES)
def test_queries_are_turned_and_keys_stored(sizes: tuple[int, int, int], kv_type: str, kernels: str) -> None:  # noqa: F811
    """Both are parts of larger tensors; a token whose slot is negative is not stored."""
    (heads, latents, n), tokens = sizes, 4
    q, kv = floats(5, tokens, heads, 12 + n), floats(6, tokens, 20 + latents + n)
    weight = floats(7, latents)
    positions, slots = np.array([7, 0, 40, 900], np.int32), np.array([39, -1, 0, 64])
    frequencies = (10000.0 ** -(np.arange(n // 2) / n)).astype(np.float32)
    turns = reference.rotations(positions, frequencies, 1.25)
    cache = unwritten(kv_type, 3, 1, latents + n)
    ours, keys = on_device(q.copy()), on_device(kv.copy())[:, 20:]
    norm, rotation = (on_device(weight), 1e-5), (on_device(frequencies), 1.25)
    gpu_latent.place(ours[..., 12:], keys, norm, on_device(positions), rotation, cache, on_device(slots))
    np.testing.assert_array_equal(ours[..., :12].cpu().numpy(), q[..., :12])
    bound = 16 * EPS * 1.25 * max(np.abs(q).max(), np.abs(kv).max())
    assert_close(ours[..., 12:], reference.rope(q[..., 12:], *turns), bound)
    normed = reference.rms_norm(kv[:, 20 : 20 + latents], weight, 1e-5)
    turned = reference.rope(kv[:, None, 20 + latents :], *turns)[:, 0]
    want, stored = np.concatenate([normed, turned], axis=1), np.array([0, 2, 3])
    off = np.maximum((latents + 8) * EPS * np.abs(want), bound)
    if kv_type == "f16":
        off += np.abs(want) * 2**-11
    if kv_type == "q8_0":
        blocks = np.pad(np.abs(want), ((0, 0), (0, -want.shape[1] % 32))).reshape(tokens, -1, 32).max(axis=2)
        off += (np.repeat(blocks, 32, axis=1) * (0.5 + 2**-8) / 127)[:, : want.shape[1]]
    flat = held(cache)
    assert_close(on_device(flat[slots[stored], 0]), want[stored], off[stored])
    assert int(np.isnan(flat).all(axis=(1, 2)).sum()) == len(flat) - len(stored)


# DeepSeek's 512 latents are compiled (test_gpu_compile.py); here they would take a minute.
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter, where a sequence has NaN
@pytest.mark.parametrize(
    ("sizes", "many", "split", "kv_types"),  # of the cache, by the interpreter
    [
        (SIZES[0], 31, True, "f32 q8_0"),
        ((16, 128, 64), 2, True, "f16"),
        (SIZES[1], 2, False, "f32 q8_0"),
        (SIZES[2], 2, True, "q8_0"),
        (SIZES[2], 31, False, "f16"),
    ],
)
def test_attention_over_latents(
    sizes: tuple[int, int, int],
    many: int,
    split: bool,
    kv_types: str,
    kernels: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several sequences; split: their contexts, between programs."""
    if kernels == "triton":
        from powerinfer.kernels import triton_latent

        monkeypatch.setattr(triton_latent, "SPLIT_PAGES", 1 if split else 99)
        monkeypatch.setattr(triton_latent, "CHUNK", 32)
    several = [([5, 2, 7], [70]), ([1], [0, 1, 2]), ([3, 6], [*range(31, 31 + many)])]
    (heads, latents, n), tokens = sizes, 4 + many
    q, turned = floats(10, heads, tokens, latents), floats(11, tokens, heads, 3 + n)
    scale, growth = 0.7 / np.sqrt(latents), GROWTH if split else {}
    table, rows, positions = np.full((3, 3), -1, np.int32), [], []
    for i, (pages, places) in enumerate(several):
        table[i, : len(pages)] = pages
        rows += [i] * len(places)
        positions += places
    for kv_type in kv_types.split() if by_interpreter() else ("f32", "f16", "q8_0"):
        keys = reference.kv_rounded(floats(12, 8, gpu.PAGE, 1, latents + n), kv_type)
        # A score's error is that of a sum of products; weights change by as much, relatively, and the rest rounds once
        # for every position. Of few tokens float16 has queries in two parts; a cache of 8 bits is read as float16.
        # There products are of numbers that were rounded to float16: queries, keys and weights.
        exact = kv_type == "f32" or (kv_type == "f16" and many < 8)
        want, bound = np.zeros((heads, tokens, latents)), np.zeros((heads, tokens, 1))
        for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
            seen = keys[table[row][table[row] >= 0], :, 0].reshape(-1, latents + n)[: position + 1].astype(np.float64)
            own = np.concatenate([q[:, t], turned[t, :, 3:]], axis=1).astype(np.float64) * scale
            own *= query_factors([position], growth)
            scores = own @ seen.T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            want[:, t] = (weights / weights.sum(axis=1, keepdims=True)) @ seen[:, :latents]
            size = (np.abs(own) @ np.abs(seen).T).max(axis=1)
            off = (
                2 * EPS * ((sum_error(latents + n) / EPS + 6) * size + position + 9)
                if exact
                else 2**-11 * (2 * size + 2)
            )
            bound[:, t, 0] = off * np.abs(keys).max()
        cache = cached(kv_type, on_device(keys))
        np.testing.assert_array_equal(held(cache), keys.reshape(-1, 1, latents + n))
        (cache.data if cache.scales is None else cache.scales)[0] = torch.nan  # a page of nobody
        # The last token stands for nothing, as those that fill up a step of fixed size.
        step = on_device(np.array([*rows, 0], np.int32)), on_device(np.array([*positions, -1], np.int32))
        extra = on_device(np.concatenate([q, floats(13, heads, 1, latents)], axis=1))
        tails = on_device(np.concatenate([turned, floats(14, 1, heads, 3 + n)]))[..., 3:]
        contexts = gpu.Contexts(on_device(table), *step)
        settings = LatentAttentionConfig(heads, latents, latents, n, latents, RopeConfig(dim=n), scale, **growth)
        got = gpu_latent.attention(extra, tails, cache, contexts, settings)
        assert_close(got[:, :-1], want, np.broadcast_to(bound, want.shape))
        assert (got[:, -1] == 0).all()
        (cache.data if cache.scales is None else cache.scales)[several[0][0]] = torch.nan
        again = gpu_latent.attention(extra, tails, cache, contexts, settings)
        assert again[:, 0].isnan().all() and torch.equal(again[:, 1:], got[:, 1:]), "of the first sequence alone"
