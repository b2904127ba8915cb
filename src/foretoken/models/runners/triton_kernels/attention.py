"""Attention of single rows over a paged KV cache: a row's result does not depend on what shares the pass.

A program computes all query heads of one key head, for one row or for a few rows that follow each other in a sequence,
over one stretch of their keys ("split-KV", as in Flash Decoding, https://pytorch.org/blog/flash-decoding/). It is the
same program for any number of rows, and a key that a row does not see adds 0 to the row's sums. Keys are processed in
the order of their positions, wherever they are in the cache: committed ones at the row of their position, and those of
a draft tree's path at the rows in ``paths``. So the path of a tree, a chain and plain decoding add up the same values
in the same order. A second kernel merges the stretches, again in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.models.runners.triton_kernels.rows import EDGE, STRETCH, UNIT, LayerPages, PassRows
from foretoken.models.state.pages import PAGE

PARTIAL = 2**28  # bytes of the sums over stretches at once
TILE = 2**14  # bytes of the keys of one step; the fastest size on an H200 that also fits smaller GPUs
WARPS, STAGES = 4, 2
FLOAT = 4  # bytes


@triton.jit
def _first_key(count, WINDOW: tl.constexpr):
    """Returns the first position that the row sees: of a window, or of a chunk if ``WINDOW`` is negative."""
    if WINDOW > 0:
        first = tl.maximum(count - WINDOW, 0)
    elif WINDOW < 0:
        first = (count - 1) // -WINDOW * -WINDOW
    else:
        first = count * 0
    return first


@triton.jit(do_not_specialize=["begin", "until"])
def _attend(
    queries, base, scales, counts, ends, tiles, sizes, pages, prefixes, paths, biases, mixed, best, total,
    begin, until, scale, softcap, query_stride, page_stride, path_stride, bias_stride,
    keys_at, values_at, key_scales_at, value_scales_at, splits,
    GROUP: tl.constexpr, PART: tl.constexpr, DIM: tl.constexpr, EXTRA: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TREES: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, PER_UNIT: tl.constexpr, SCALES_PER_UNIT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_EXTRA: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    LENGTH: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(2)
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART  # parts of the query heads of a key head
    WIDTH: tl.constexpr = DIM + EXTRA  # width of a key: values may lack its last elements
    kv_head, kv_heads = tl.program_id(1) // PARTS, tl.num_programs(1) // PARTS
    slot = tl.arange(0, BLOCK_HEADS)  # a row and a query head
    lead = tl.load(tiles + tile).to(tl.int32)
    row, member = lead + slot // PART, tl.program_id(1) % PARTS * PART + slot % PART
    valid = (slot // PART < tl.load(sizes + tile)) & (row >= begin) & (row < until) & (member < GROUP)
    count = tl.load(counts + row, mask=valid, other=0).to(tl.int32)
    end = tl.load(ends + row, mask=valid, other=0).to(tl.int32)
    last = tl.max(end, 0)
    first = tl.where(valid, _first_key(count, WINDOW), last)
    low = tl.min(first, 0)
    start = split * LENGTH
    if (start < last) & (start + LENGTH > low):
        heads, dim = kv_head * GROUP + member, tl.arange(0, BLOCK_DIM)
        inside = dim < DIM
        used = valid[:, None] & inside[None, :]
        asked = queries + row[:, None] * query_stride + heads[:, None] * WIDTH
        query = tl.load(asked + dim[None, :], mask=used, other=0.0)
        if EXTRA:
            last_dim = tl.arange(0, BLOCK_EXTRA)
            behind = last_dim < EXTRA
            extra = tl.load(asked + DIM + last_dim[None, :], mask=valid[:, None] & behind[None, :], other=0.0)
        prefix = tl.load(prefixes + lead).to(tl.int32)
        if BIASED:
            own_bias = tl.load(biases + heads * bias_stride + count - 1, mask=valid & (count > 0), other=0.0)
        top = tl.full([BLOCK_HEADS], -float("inf"), tl.float32)
        weight = tl.zeros([BLOCK_HEADS], tl.float32)
        sums = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
        for at in range(start, tl.minimum(start + LENGTH, last), BLOCK_KEYS):
            position = at + tl.arange(0, BLOCK_KEYS)
            read = (position < last) & (position >= low)
            place = position
            if TREES:
                drafted = read & (position >= prefix)
                node = tl.load(paths + (position - prefix) * path_stride + lead, mask=drafted, other=0)
                place = tl.where(drafted, node.to(tl.int32), position)
            page = tl.load(pages + place // PAGE_ROWS * page_stride + lead, mask=read, other=0)
            inner = kv_head * PAGE_ROWS + place % PAGE_ROWS
            offset = page * PER_UNIT + inner * WIDTH
            key = tl.load(
                base + (keys_at + offset)[None, :] + dim[:, None], mask=read[None, :] & inside[:, None], other=0
            )
            score = tl.dot(query, key.to(query.dtype), input_precision="ieee")
            if EXTRA:
                rest = tl.load(
                    base + (keys_at + DIM + offset)[None, :] + last_dim[:, None],
                    mask=read[None, :] & behind[:, None],
                    other=0,
                )
                score += tl.dot(extra, rest.to(query.dtype), input_precision="ieee")
            score *= scale
            if SCALED:
                score *= tl.load(scales + page * SCALES_PER_UNIT + key_scales_at + inner, mask=read, other=0.0)[None, :]
            if SOFTCAP:
                shrunk = tl.exp(-2.0 * tl.abs(score / softcap))
                score = tl.where(score < 0, -1.0, 1.0) * softcap * (1.0 - shrunk) / (1.0 + shrunk)
            if BIASED:
                bias = biases + heads[:, None] * bias_stride + position[None, :]
                score += tl.load(bias, mask=valid[:, None] & read[None, :], other=0.0) - own_bias[:, None]
            seen = (position[None, :] < end[:, None]) & (position[None, :] >= first[:, None])
            score = tl.where(seen, score, -float("inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            share = tl.exp(score - safe[:, None])
            fade = tl.exp(top - safe)
            weight = weight * fade + tl.sum(share, 1)
            value = tl.load(
                base + (values_at + offset)[:, None] + dim[None, :], mask=read[:, None] & inside[None, :], other=0
            )
            if SCALED:
                share *= tl.load(scales + page * SCALES_PER_UNIT + value_scales_at + inner, mask=read, other=0.0)[
                    None, :
                ]
            part = tl.dot(share.to(query.dtype), value.to(query.dtype), input_precision="ieee")
            sums = sums * fade[:, None] + part
            top = higher
        to = ((row - begin) * kv_heads * GROUP + heads).to(tl.int64) * splits + split
        stored = valid & (start < end) & (start + LENGTH > first)
        tl.store(best + to, top, mask=stored)
        tl.store(total + to, weight, mask=stored)
        tl.store(mixed + to[:, None] * DIM + dim[None, :], sums, mask=stored[:, None] & inside[None, :])


@triton.jit
def _merge(
    mixed, best, total, counts, ends, sinks, result, begin, splits,
    DIM: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, BLOCK_DIM: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    place = tl.program_id(0) * tl.num_programs(1) + head
    row = begin + tl.program_id(0)
    count, end = tl.load(counts + row).to(tl.int32), tl.load(ends + row).to(tl.int32)
    dim = tl.arange(0, BLOCK_DIM)
    inside = dim < DIM
    top = -float("inf")
    weight = 0.0
    if SINKS:
        top = tl.load(sinks + head).to(tl.float32)
        weight = 1.0
    sums = tl.zeros([BLOCK_DIM], tl.float32)
    for split in range(_first_key(count, WINDOW) // LENGTH, (end + LENGTH - 1) // LENGTH):
        own = tl.load(best + place * splits + split)
        higher = tl.maximum(top, own)
        fade, share = tl.exp(top - higher), tl.exp(own - higher)
        weight = weight * fade + tl.load(total + place * splits + split) * share
        part = tl.load(mixed + (place * splits + split) * DIM + dim, mask=inside, other=0.0)
        sums = sums * fade + part * share
        top = higher
    if weight > 0:
        sums = sums / weight
    to = result + (row * tl.num_programs(1) + head) * DIM
    tl.store(to + dim, sums.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _finite(numbers):
    """Returns float32 values with 0 in place of NaN and infinity, as ``state.kv.finite``."""
    return tl.where(tl.abs(numbers) < float("inf"), numbers, 0.0)


@triton.jit
def _write(numbers, to, scale_to, inside, SCALED: tl.constexpr):
    """Writes a key or value, rounded to int8 with its scale if ``SCALED``."""
    if SCALED:
        largest = tl.max(tl.abs(numbers))
        rounded = numbers * tl.where(largest < 1e-30, 0.0, 127.0 / tl.maximum(largest, 1e-30))
        # The sum with 1.5 * 2^23 has no digits behind the point: it is rounded to an integer, ties to even.
        numbers = (rounded + 12582912.0) - 12582912.0
        tl.store(scale_to, largest / 127.0)
    tl.store(to, numbers.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _store(
    keys, values, base, scales, pages, places, counts, key_stride, value_stride, page_stride,
    keys_at, values_at, key_scales_at, value_scales_at,
    DIM: tl.constexpr, VALUES: tl.constexpr, SCALED: tl.constexpr, PER_UNIT: tl.constexpr,
    SCALES_PER_UNIT: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_ROWS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(counts + row) > 0:
        dim = tl.arange(0, BLOCK_DIM)
        inside = dim < DIM
        place = tl.load(places + row)
        page = tl.load(pages + place // PAGE_ROWS * page_stride + row)
        inner = head * PAGE_ROWS + place % PAGE_ROWS
        to = base + page * PER_UNIT + inner * DIM + dim
        scale_to = scales + page * SCALES_PER_UNIT + inner
        key = tl.load(keys + row * key_stride + head * DIM + dim, mask=inside, other=0.0).to(tl.float32)
        _write(_finite(key), to + keys_at, scale_to + key_scales_at, inside, SCALED)
        if VALUES:
            value = tl.load(values + row * value_stride + head * DIM + dim, mask=inside, other=0.0).to(tl.float32)
            _write(_finite(value), to + values_at, scale_to + value_scales_at, inside, SCALED)


def store(keys: Tensor, values: Tensor, cache: LayerPages, rows: PassRows) -> None:
    """Writes keys and values [R, heads, D] to the cache; padding is not written, nor values that are part of keys."""
    count, heads, dim = keys.shape
    assert all(each.stride(2) == 1 and each.stride(1) == dim for each in (keys, values))
    _store[(count, heads)](
        keys, values, cache.base, cache.scales, rows.pages, rows.places, rows.counts,
        keys.stride(0), values.stride(0), rows.pages.stride(0), cache.keys, cache.values, *cache.scales_at or (0, 0),
        DIM=dim, VALUES=cache.values != cache.keys, SCALED=cache.scales_at is not None,
        PER_UNIT=UNIT // cache.base.element_size(), SCALES_PER_UNIT=UNIT // FLOAT,
        BLOCK_DIM=triton.next_power_of_2(dim), PAGE_ROWS=PAGE, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["moved"])
def _move(moves, firsts, blocks, moved, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """Moves a block's rows of one sequence in order: a thread moves the same bytes of all of them."""
    sequence, block, at = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDE)
    start, size = tl.load(blocks + block), tl.load(blocks + BLOCKS + block)
    for move in range(tl.load(firsts + sequence), tl.load(firsts + sequence + 1)):
        to = tl.load(moves + move) + start + tl.load(moves + moved + move) * size
        source = tl.load(moves + 2 * moved + move) + start + tl.load(moves + 3 * moved + move) * size
        values = tl.load(source.to(tl.pointer_type(tl.uint8)) + at, mask=at < size, other=0)
        tl.store(to.to(tl.pointer_type(tl.uint8)) + at, values, mask=at < size)


def move(firsts: Tensor, moves: Tensor, blocks: Tensor, widest: int) -> None:
    """Moves rows within the pages of sequences by one launch.

    Args:
        firsts: int64 [sequences + 1], the first move of each sequence.
        moves: int64 [4, moves], the address of a page, the row in it, and the same of the row that moves there.
        blocks: int64 [2, blocks], the start of each block in a page, and the bytes of a row of it.
        widest: the largest of these numbers of bytes.
    """
    count = blocks.shape[1]
    _move[(len(firsts) - 1, count)](
        moves, firsts, blocks, moves.shape[1], WIDE=triton.next_power_of_2(widest), BLOCKS=count, num_warps=1
    )


@triton.jit
def _read_nodes(
    nodes, strides, tokens, positions, counts, ends, places, prefixes, paths, result, path_stride, TREES: tl.constexpr
):
    row = tl.program_id(0)
    address = tl.load(nodes + row)
    if address != 0:
        stride = tl.load(strides + row)
        to = result + row * 4
        for field in tl.static_range(3):
            value = tl.load((address + field * stride).to(tl.pointer_type(tl.int32)))
            tl.store(to + field, value.to(tl.int64))
        tl.store(tokens + row, tl.load(address.to(tl.pointer_type(tl.int32))).to(tl.int64))
        at, above, depth = row, address, row * 0
        while above != 0:
            at -= tl.load((above + tl.load(strides + at)).to(tl.pointer_type(tl.int32)))
            above = tl.load(nodes + at)
            depth += 1
        position = tl.load(positions + at) + depth  # ``at`` is the root's row
        tl.store(to + 3, depth.to(tl.int64))
        tl.store(positions + row, position)
        tl.store(counts + row, position + 1)
        tl.store(ends + row, position + 1)
        if TREES:
            at, above, behind = row, address, position - tl.load(prefixes + row)
            while (above != 0) & (behind >= 0):  # rows of a chain have their whole path in their prefix
                tl.store(paths + behind * path_stride + row, tl.load(places + at))
                at -= tl.load((above + tl.load(strides + at)).to(tl.pointer_type(tl.int32)))
                above = tl.load(nodes + at)
                behind -= 1


def read_nodes(
    nodes: Tensor,
    strides: Tensor,
    tokens: Tensor,
    positions: Tensor,
    counts: Tensor,
    ends: Tensor,
    places: Tensor,
    prefixes: Tensor,
    paths: Tensor,
) -> Tensor:
    """Completes the rows of nodes that lie elsewhere on the device, int64 [R] each; see ``rows.PassRows``.

    Args:
        nodes: addresses of their tokens, int32; 0 for other rows.
        strides: bytes from the token to the number of rows up to the parent's, and from there to the score.
        tokens: written, as all of the following but ``places`` and ``prefixes``.
        positions: those of roots are given.
        paths: [depth, R].

    Returns:
        int64 [R, 4]: token, number of rows up, score and depth of each node; 0 for other rows.
    """
    result = torch.zeros((len(nodes), 4), dtype=torch.int64, device=nodes.device)
    _read_nodes[(len(nodes),)](
        nodes, strides, tokens, positions, counts, ends, places, prefixes, paths, result, paths.stride(0),
        TREES=len(paths) > 0, num_warps=1,
    )  # fmt: skip
    return result


@triton.jit
def _read_states(addresses, result, WIDTH: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    place, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(addresses + place)
    count = tl.where(address == 0, 0, WIDTH)
    values = tl.load(address.to(tl.pointer_type(TYPE)) + at, mask=at < count, other=0.0)
    tl.store(result + place.to(tl.int64) * WIDTH + at, values.to(result.dtype.element_ty), mask=at < WIDTH)


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def read_states(addresses: Tensor, width: int, held: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Returns the states at addresses [R, n] of rows of ``width`` elements, [R, n * width]; zeros for address 0.

    Args:
        held: their type.
        dtype: that of the result.
    """
    result = torch.empty((len(addresses), addresses.shape[1] * width), dtype=dtype, device=addresses.device)
    block = min(1024, triton.next_power_of_2(width))
    grid = addresses.numel(), triton.cdiv(width, block)
    _read_states[grid](addresses, result, WIDTH=width, TYPE=TYPES[held], BLOCK=block, num_warps=4)
    return result


@triton.jit
def _write_states(addresses, states, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(addresses + row)
    count = tl.where(address == 0, 0, WIDTH)
    values = tl.load(states + row.to(tl.int64) * WIDTH + at, mask=at < WIDTH, other=0.0)
    tl.store(address.to(tl.pointer_type(states.dtype.element_ty)) + at, values, mask=at < count)


def write_states(addresses: Tensor, states: Tensor) -> None:
    """Writes states [R, width] to addresses [R] of as many elements of their type; nothing to address 0."""
    (rows, width), block = states.shape, min(1024, triton.next_power_of_2(states.shape[1]))
    _write_states[rows, triton.cdiv(width, block)](addresses, states, WIDTH=width, BLOCK=block, num_warps=4)


def attend_rows(
    queries: Tensor,
    cache: LayerPages,
    rows: PassRows,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """Computes attention.

    Args:
        queries: [R, heads, width of a key]; a row's heads lie one after another.
        cache: positions of the layer's keys and values, which include the rows' own.
        rows: the keys that each row sees.
        scale: factor of the scores.
        window: number of keys up to the row's own that it sees; 0 for all; negative for chunks of that length.
        softcap: cap of the scores; 0 for none.
        sinks: scores [heads] of a key without a value; None for none.
        biases: float32 [heads, positions]; the score of a key is raised by the bias of its position less that of the
            row's (``families.architecture.Alibi``). None for none.

    Returns:
        [R, heads, width of a value]; zeros for padding.
    """
    (count, heads, width), dim = queries.shape, cache.dim
    splits = -(-rows.longest // STRETCH)
    assert queries.stride(2) == 1 and queries.stride(1) == width == cache.width
    assert biases is None or biases.stride(1) == 1
    result = torch.empty((count, heads, dim), dtype=queries.dtype, device=queries.device)
    step = max(1, PARTIAL // (FLOAT * heads * splits * dim))
    for begin in range(0, count, step):
        until = min(begin + step, count)
        _attend_part(queries, cache, rows, result, begin, until, splits, scale, window, softcap, sinks, biases)
    return result


def _attend_part(
    queries: Tensor,
    cache: LayerPages,
    rows: PassRows,
    result: Tensor,
    begin: int,
    until: int,
    splits: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    biases: Tensor | None,
) -> None:
    """Writes attention of rows ``begin`` to ``until`` to ``result``; see ``attend_rows``."""
    (_, heads, width), dim = queries.shape, cache.dim
    group, block, size = heads // cache.heads, max(EDGE, triton.next_power_of_2(dim)), cache.base.element_size()
    mixed = queries.new_empty((until - begin, heads, splits, dim), dtype=torch.float32)
    best, total = (queries.new_empty((until - begin, heads, splits), dtype=torch.float32) for _ in "ab")
    extra = width - dim
    part = min(group, EDGE) if extra else group  # heads per program; fewer if they are wide
    _attend[(len(rows.tiles), cache.heads * triton.cdiv(group, part), splits)](
        queries, cache.base, cache.scales, rows.counts, rows.ends, rows.tiles, rows.sizes,
        rows.pages, rows.prefixes, rows.paths, best if biases is None else biases, mixed, best, total,
        begin, until, scale, softcap,
        queries.stride(0), rows.pages.stride(0), rows.paths.stride(0), 0 if biases is None else biases.stride(0),
        cache.keys, cache.values, *cache.scales_at or (0, 0), splits,
        GROUP=group, PART=part, DIM=dim, EXTRA=extra, WINDOW=window, SOFTCAP=softcap > 0, TREES=len(rows.paths) > 0,
        BIASED=biases is not None, SCALED=cache.scales_at is not None,
        PER_UNIT=UNIT // size, SCALES_PER_UNIT=UNIT // FLOAT,
        BLOCK_HEADS=max(EDGE, triton.next_power_of_2(part)), BLOCK_DIM=block,
        BLOCK_EXTRA=max(EDGE, triton.next_power_of_2(extra)),
        BLOCK_KEYS=max(EDGE, min(STRETCH // 2, TILE // (block * queries.element_size()))),
        LENGTH=STRETCH, PAGE_ROWS=PAGE, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _merge[(until - begin, heads)](
        mixed, best, total, rows.counts, rows.ends, best if sinks is None else sinks, result, begin, splits,
        DIM=dim, WINDOW=window, SINKS=sinks is not None, BLOCK_DIM=block, LENGTH=STRETCH, num_warps=1,
    )  # fmt: skip
