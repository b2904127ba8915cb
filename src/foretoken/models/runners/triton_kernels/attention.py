"""Attention of single rows over the KV cache: a row's result does not depend on what shares the pass.

A program computes one row, all query heads of one key head, and one stretch of the row's keys ("split-KV", as in Flash
Decoding, https://pytorch.org/blog/flash-decoding/). Keys are taken in the order of their positions wherever they lie
in the cache: committed ones at the row of their position, and those of a draft tree's path where ``paths`` says. So the
path of a tree, a chain and plain decoding add up the same numbers in the same order. A second kernel merges the
stretches, again in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.models.runners.triton_kernels.rows import STRETCH, PassRows

PARTIAL = 2**28  # bytes of the sums over stretches at once
TILE = 2**14  # bytes of the keys of one step; of what was tried on an H200, the fastest that fits smaller GPUs too
EDGE = 16  # rows and columns of a tile that the tensor cores multiply, at least
WARPS, STAGES = 4, 2


@triton.jit
def _first_key(count, WINDOW: tl.constexpr):
    """Returns the first position that the row sees: of a window, or of a chunk where ``WINDOW`` is negative."""
    if WINDOW > 0:
        return tl.maximum(count - WINDOW, 0)
    if WINDOW < 0:
        return (count - 1) // -WINDOW * -WINDOW
    return 0


@triton.jit
def _attend(
    queries, keys, values, counts, slots, prefixes, paths, mixed, best, total, scale, softcap,
    query_stride, slot_stride, head_stride, depth, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TREES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + row)
    first = _first_key(count, WINDOW)
    start = split * LENGTH
    if (start < count) & (start + LENGTH > first):
        head, dim = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
        inside = dim < DIM
        heads = kv_head * GROUP + head
        used = (head < GROUP)[:, None] & inside[None, :]
        query = tl.load(queries + row * query_stride + heads[:, None] * DIM + dim[None, :], mask=used, other=0.0)
        prefix = tl.load(prefixes + row)
        base = tl.load(slots + row).to(tl.int64) * slot_stride + kv_head * head_stride
        top = tl.full([BLOCK_HEADS], -float("inf"), tl.float32)
        weight = tl.zeros([BLOCK_HEADS], tl.float32)
        sums = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
        for at in range(start, tl.minimum(start + LENGTH, count), BLOCK_KEYS):
            position = at + tl.arange(0, BLOCK_KEYS)
            seen = (position < count) & (position >= first)
            place = position
            if TREES:
                drafted = seen & (position >= prefix)
                place = tl.where(
                    drafted, tl.load(paths + row * depth + (position - prefix), mask=drafted, other=0), position
                )
            offset = base + place.to(tl.int64) * DIM
            key = tl.load(keys + offset[None, :] + dim[:, None], mask=seen[None, :] & inside[:, None], other=0.0)
            score = tl.dot(query, key, input_precision="ieee") * scale
            if SOFTCAP:
                shrunk = tl.exp(-2.0 * tl.abs(score / softcap))
                score = tl.where(score < 0, -1.0, 1.0) * softcap * (1.0 - shrunk) / (1.0 + shrunk)
            score = tl.where(seen[None, :], score, -float("inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            share = tl.exp(score - safe[:, None])
            fade = tl.exp(top - safe)
            weight = weight * fade + tl.sum(share, 1)
            value = tl.load(values + offset[:, None] + dim[None, :], mask=seen[:, None] & inside[None, :], other=0.0)
            sums = sums * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
            top = higher
        place = (row * tl.num_programs(1) * GROUP + heads) * splits + split
        tl.store(best + place, top, mask=head < GROUP)
        tl.store(total + place, weight, mask=head < GROUP)
        tl.store(mixed + place[:, None] * DIM + dim[None, :], sums, mask=used)


@triton.jit
def _merge(
    mixed, best, total, counts, sinks, result, splits,
    DIM: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, BLOCK_DIM: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(1) + head
    count = tl.load(counts + row)
    dim = tl.arange(0, BLOCK_DIM)
    inside = dim < DIM
    top = -float("inf")
    weight = 0.0
    if SINKS:
        top = tl.load(sinks + head).to(tl.float32)
        weight = 1.0
    sums = tl.zeros([BLOCK_DIM], tl.float32)
    for split in range(_first_key(count, WINDOW) // LENGTH, (count + LENGTH - 1) // LENGTH):
        own = tl.load(best + place * splits + split)
        higher = tl.maximum(top, own)
        fade, share = tl.exp(top - higher), tl.exp(own - higher)
        weight = weight * fade + tl.load(total + place * splits + split) * share
        part = tl.load(mixed + (place * splits + split) * DIM + dim, mask=inside, other=0.0)
        sums = sums * fade + part * share
        top = higher
    if weight > 0:
        sums = sums / weight
    tl.store(result + place * DIM + dim, sums.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    keys, values, key_cache, value_cache, slots, places, counts, key_stride, value_stride, slot_stride, head_stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(counts + row) > 0:
        dim = tl.arange(0, BLOCK_DIM)
        to = tl.load(slots + row).to(tl.int64) * slot_stride + head * head_stride
        to += tl.load(places + row).to(tl.int64) * DIM
        key = tl.load(keys + row * key_stride + head * DIM + dim, mask=dim < DIM, other=0.0)
        key = tl.where(tl.abs(key.to(tl.float32)) < float("inf"), key, 0.0)  # as ``state.kv.finite``
        tl.store(key_cache + to + dim, key.to(key_cache.dtype.element_ty), mask=dim < DIM)
        value = tl.load(values + row * value_stride + head * DIM + dim, mask=dim < DIM, other=0.0)
        value = tl.where(tl.abs(value.to(tl.float32)) < float("inf"), value, 0.0)
        tl.store(value_cache + to + dim, value.to(value_cache.dtype.element_ty), mask=dim < DIM)


def store(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PassRows) -> None:
    """Writes keys and values [R, kv_heads, D] to caches [slots, kv_heads, cache rows, D]; padding is not written."""
    count, heads, dim = keys.shape
    assert all(each.stride(2) == 1 and each.stride(1) == dim for each in (keys, values))
    assert key_cache.is_contiguous() and key_cache.stride() == value_cache.stride()
    _store[(count, heads)](
        keys, values, key_cache, value_cache, rows.slots, rows.places, rows.counts,
        keys.stride(0), values.stride(0), key_cache.stride(0), key_cache.stride(1),
        DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PassRows,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention.

    Args:
        queries: [R, heads, D]; a row's heads lie one after another.
        keys: the cache [slots, kv_heads, cache rows, D], which holds the rows' own keys already.
        values: likewise.
        rows: what each row sees.
        scale: factor of the scores.
        window: number of keys up to the row's own that it sees; 0 for all; negative for chunks of so many.
        softcap: cap of the scores; 0 for none.
        sinks: scores [heads] of a key without a value; None for none.

    Returns:
        [R, heads, D]; zeros for padding.
    """
    count, heads, dim = queries.shape
    splits = -(-rows.longest // STRETCH)
    assert queries.stride(2) == 1 and queries.stride(1) == dim
    result = torch.empty((count, heads, dim), dtype=queries.dtype, device=queries.device)
    step = max(1, PARTIAL // (4 * heads * splits * dim))
    for start in range(0, count, step):
        end = min(start + step, count)
        part = queries[start:end], keys, values, rows.part(start, end), result[start:end]
        _attend_part(*part, splits, scale, window, softcap, sinks)
    return result


def _attend_part(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PassRows,
    result: Tensor,
    splits: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Writes attention of some rows to ``result``; see ``attend_rows``."""
    count, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group, block = heads // kv_heads, max(EDGE, triton.next_power_of_2(dim))
    mixed = queries.new_empty((count, heads, splits, dim), dtype=torch.float32)
    best, total = (queries.new_empty((count, heads, splits), dtype=torch.float32) for _ in "ab")
    depth = rows.paths.shape[1]
    _attend[(count, kv_heads, splits)](
        queries, keys, values, rows.counts, rows.slots, rows.prefixes, rows.paths, mixed, best, total, scale, softcap,
        queries.stride(0), keys.stride(0), keys.stride(1), depth, splits,
        GROUP=group, DIM=dim, WINDOW=window, SOFTCAP=softcap > 0, TREES=depth > 0,
        BLOCK_HEADS=max(EDGE, triton.next_power_of_2(group)), BLOCK_DIM=block,
        BLOCK_KEYS=max(EDGE, min(STRETCH // 2, TILE // (block * keys.element_size()))),
        LENGTH=STRETCH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _merge[(count, heads)](
        mixed, best, total, rows.counts, best if sinks is None else sinks, result, splits,
        DIM=dim, WINDOW=window, SINKS=sinks is not None, BLOCK_DIM=block, LENGTH=STRETCH, num_warps=1,
    )  # fmt: skip
