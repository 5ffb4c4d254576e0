"""Pages of a layer's KV cache between the CPU's byte order (csrc/table.h) and a GPU's, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from powerinfer.kernels.cpu import LANES, round_up
from powerinfer.kernels.gpu_types import PAGE, Cached

if TYPE_CHECKING:
    from torch import Tensor


def put(keys: Cached, values: Cached, pages: Tensor, raw: Tensor) -> None:
    """Pages of a cache become those that the CPU has. pages: int64 [n], no two alike; raw: uint8 [n, kv_heads, bytes of
    a head]."""
    n, heads, _ = raw.shape
    for to, begin, end, width, by_slot in _parts(keys, values):
        own = raw[..., begin:end].contiguous().view(to.dtype)
        own = own.view(n, heads, PAGE, width) if by_slot else own.view(n, heads, width, PAGE).transpose(2, 3)
        to.index_copy_(0, pages, own[..., : to.shape[-1]].transpose(1, 2))


def taken(keys: Cached, values: Cached, pages: Tensor, nbytes: int) -> Tensor:
    """The same the other way: uint8 [n, kv_heads, nbytes], zeros where the CPU pads heads."""
    import torch

    heads = keys.data.shape[2]
    raw = torch.zeros((len(pages), heads, nbytes), dtype=torch.uint8, device=pages.device)
    for of, begin, end, width, by_slot in _parts(keys, values):
        own = of.index_select(0, pages).transpose(1, 2)  # [n, heads, PAGE, ..]
        wide = own.new_zeros((len(pages), heads, PAGE, width) if by_slot else (len(pages), heads, width, PAGE))
        (wide if by_slot else wide.transpose(2, 3))[..., : own.shape[-1]].copy_(own)
        raw[..., begin:end].copy_(wide.view(torch.uint8).view(len(pages), heads, -1))
    return raw


def _parts(keys: Cached, values: Cached) -> Iterator[tuple[Tensor, int, int, int, bool]]:
    """The tensors of a cache: where each begins and ends in a head's bytes, its numbers of a token there, and whether
    those of a token are adjacent."""
    pad = round_up(keys.data.shape[-1], LANES)
    at = 0
    for own, by_slot in ((keys.data, False), (values.data, True), (keys.scales, False), (values.scales, True)):
        if own is None:
            continue
        width = pad if own is keys.data or own is values.data else -(-pad // 32)
        end = at + width * PAGE * own.element_size()
        yield own, at, end, width, by_slot
        at = end
