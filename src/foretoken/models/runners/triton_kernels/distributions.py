"""Distributions of rows of logits on a device, by the rules of ``core/native/csrc/distribution.hpp``.

Exponentials and their sums in float32 have the operations and the order of the CPU's compiled kernels, and the same
bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.models.runners.triton_kernels.rows import SampledRows

CHUNK = 4096  # tokens of one sum of exponentials, as in distribution.hpp
BLOCK = 1024  # tokens of one sum of probabilities, of a race, and of work on single tokens
EVERY = 2**31 - 1  # the last token of a distribution without a nucleus


@triton.jit
def _exponential(x):
    """Returns exp(x) of exponential.hpp."""
    x = tl.maximum(x, -104.0)
    scaled = x * 1.44269504
    # The sum with 1.5 * 2^23 has no digits behind the point: it is rounded to an integer, ties to even.
    n = (scaled + 12582912.0) - 12582912.0
    r = tl.fma(-n, 0.693359375, x)
    r = tl.fma(-n, -2.12194440e-4, r)
    p = tl.fma(tl.full(r.shape, 1.9875691e-4, tl.float32), r, 1.3981999e-3)
    p = tl.fma(p, r, 8.3334519e-3)
    p = tl.fma(p, r, 4.1665795e-2)
    p = tl.fma(p, r, 1.6666665e-1)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(r * r, p, r + 1.0)
    whole = tl.minimum(n, 254.0).to(tl.int32)
    half = whole >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return p * low * ((whole - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sum_of_powers(x, count, top, inverse, floor):
    """Returns the sum of exp((x - top) inverse) over ``count`` logits, lane by lane, and the smallest one in it."""
    lane = tl.arange(0, 16)
    total, lowest = tl.zeros([16], tl.float32), tl.full([16], float("inf"), tl.float32)
    for at in tl.range(0, count, 16, loop_unroll_factor=8):
        values = tl.load(x + at + lane, mask=at + lane < count, other=-float("inf"))
        y = (values - top) * inverse
        total += tl.where(y >= floor, _exponential(y), 0.0)
        lowest = tl.where(y >= floor, tl.minimum(lowest, values), lowest)
    pairs = tl.sum(tl.reshape(total, [2, 8]), 0)
    pairs = tl.sum(tl.reshape(pairs, [2, 4]), 0)
    pairs = tl.sum(tl.reshape(pairs, [2, 2]), 0)
    return tl.sum(pairs, 0), tl.min(lowest, 0)


@triton.jit
def _look(
    logits, sources, inverses, tops, places, sums, CHUNKS: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr
):
    """Finds the largest logit of a chunk (NaN if any is), its first place, and the sum of exponentials below it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, to = row * SIZE + chunk * LENGTH, row * CHUNKS + chunk
    at, count = tl.arange(0, LENGTH), tl.minimum(SIZE - chunk * LENGTH, LENGTH)
    x = tl.load(logits + start + at, mask=at < count, other=-float("inf"))
    top = tl.max(tl.where(x == x, x, -float("inf")), 0)
    lost = tl.max((x != x).to(tl.int32), 0) > 0
    tl.store(places + to, chunk * LENGTH + tl.min(tl.where(x == top, at, LENGTH - 1), 0))
    tl.store(tops + to, tl.where(lost, float("nan"), top))
    total = 0.0
    if (tl.load(sources + row) > 1) & (top > -float("inf")) & (top < float("inf")) & (lost == 0):
        total, _ = sum_of_powers(logits + start, count, top, tl.load(inverses + row), -float("inf"))
    tl.store(sums + to, total)


@triton.jit
def _top(tops, row, at, CHUNKS: tl.constexpr):
    """Returns the largest logits of chunks and of the row, and whether the latter is a finite number."""
    every = tl.load(tops + row * CHUNKS + at, mask=at < CHUNKS, other=-float("inf"))
    top = tl.max(tl.where(every == every, every, -float("inf")), 0)
    lost = tl.max((every != every).to(tl.int32), 0) > 0
    return every, top, (lost == 0) & (top > -float("inf")) & (top < float("inf"))


@triton.jit
def _keep(
    logits, sources, inverses, floors, top_k, tops, sums, lowest,
    CHUNKS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Replaces the sum of a chunk by that of the tokens that min_p keeps, for rows without top_k."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    floor, few = tl.load(floors + row), tl.load(top_k + row)
    if (tl.load(sources + row) > 1) & (floor > -float("inf")) & ((few <= 0) | (few >= SIZE)):
        _, top, finite = _top(tops, row, tl.arange(0, WIDE), CHUNKS)
        if finite:
            count = tl.minimum(SIZE - chunk * LENGTH, LENGTH)
            x, inverse = logits + row * SIZE + chunk * LENGTH, tl.load(inverses + row)
            total, low = sum_of_powers(x, count, top, inverse, floor)
            tl.store(sums + row * CHUNKS + chunk, total)
            tl.store(lowest + row * CHUNKS + chunk, low)


@triton.jit
def _distribute(
    inverses, floors, top_k, tops, places, sums, lows, top, best, mass, lowest,
    CHUNKS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Merges the chunks of a row: its largest logit, that one's place (-1 for none), its mass, the smallest kept."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside, few = at < CHUNKS, tl.load(top_k + row)
    every, largest, finite = _top(tops, row, at, CHUNKS)
    place = tl.load(places + row * CHUNKS + at, mask=inside & (every == largest), other=SIZE)
    tl.store(best + row, tl.where(finite, tl.min(place, 0), -1))
    tl.store(top + row, tl.where(finite, largest, float("nan")))
    total = tl.load(sums + row * CHUNKS + at, mask=inside, other=0.0).to(tl.float64)
    floored = (tl.load(floors + row) > -float("inf")) & ((few <= 0) | (few >= SIZE))
    shift = (every.to(tl.float64) - largest.to(tl.float64)) * tl.load(inverses + row).to(tl.float64)
    part = tl.where(floored, total, total * tl.exp(tl.where(inside & finite, shift, 0.0)))
    tl.store(mass + row, tl.sum(part, 0))
    low = tl.min(tl.load(lows + row * CHUNKS + at, mask=inside, other=float("inf")), 0)
    tl.store(lowest + row, tl.where(floored, low, -float("inf")))


@triton.jit
def _narrow(
    values, ids, sources, inverses, floors, top_k, top_p, top, mass, lowest, over, last,
    SIZE: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Applies top_k and top_p to a row whose logits are sorted, as ``narrow`` of distribution.hpp."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, LENGTH)
    few, share, peak = tl.load(top_k + row), tl.load(top_p + row), tl.load(top + row)
    limited = (few > 0) & (few < SIZE)
    if (tl.load(sources + row) > 1) & (limited | (share < 1.0)) & (peak > -float("inf")):
        x, inverse, floor = values + row * SIZE, tl.load(inverses + row), tl.load(floors + row)
        # The kept tokens are the first ones: with top_k all that equal the last of them, and min_p counts among these.
        least = tl.load(x + few - 1, mask=limited, other=-float("inf"))
        least = tl.where(limited, least, tl.load(lowest + row))
        floor = tl.where(limited, floor, -float("inf"))
        total = tl.load(mass + row)
        if limited:
            total, start = total * 0.0, 0
            while start < SIZE:
                value = tl.load(x + start + at, mask=start + at < SIZE, other=-float("inf"))
                y = (value - peak) * inverse
                kept = (start + at < SIZE) & (value >= least) & (y >= floor)
                total += tl.sum(tl.where(kept, _exponential(y), 0.0).to(tl.float64), 0)
                start = tl.where(tl.min(value, 0) >= least, start + LENGTH, SIZE)
        factor = (1.0 / total).to(tl.float32)
        before, inner, count, start = total * 0.0, total * 0.0, 0, 0
        while start < SIZE:
            value = tl.load(x + start + at, mask=start + at < SIZE, other=-float("inf"))
            y = (value - peak) * inverse
            power = _exponential(y)
            chance = power * factor
            passed = (before + tl.cumsum(chance.to(tl.float64), 0)).to(tl.float32)
            # The nucleus ends before the first token that is preceded by its share of the mass.
            beyond = (tl.where(share < 1.0, passed - chance, -1.0) >= share) & (start + at > 0)
            out = (start + at >= SIZE) | (value < least) | (y < floor) | beyond
            end = tl.min(tl.where(out, at, LENGTH), 0)
            inner += tl.sum(tl.where(at < end, power, 0.0).to(tl.float64), 0)
            before += tl.sum(chance.to(tl.float64), 0)
            count += end
            start = tl.where(end == LENGTH, start + LENGTH, SIZE)
        tl.store(over + row, (1.0 / inner).to(tl.float32))
        tl.store(lowest + row, tl.load(x + count - 1))
        if share < 1.0:
            tl.store(last + row, tl.load(ids + row * SIZE + count - 1))


@triton.jit
def chances_of(logits, inverses, top, lowest, over, last, row, at, SIZE: tl.constexpr):
    """Returns the probabilities of tokens ``at`` of a row, float64."""
    inside, least = at < SIZE, tl.load(lowest + row)
    x = tl.load(logits + row * SIZE + at, mask=inside, other=-float("inf"))
    kept = inside & ((x > least) | ((x == least) & (at <= tl.load(last + row))))
    power = _exponential((x - tl.load(top + row)) * tl.load(inverses + row))
    return tl.where(kept, power * tl.load(over + row), 0.0).to(tl.float64)


def distributed(
    logits: Tensor, rows: SampledRows, narrow: bool, strict: dict[str, int]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Returns each row's likeliest token, -1 for none, its mass, and its distribution as ``chances_of`` takes it.

    Args:
        logits: changed logits, [R, V].
        rows: the requests.
        narrow: whether any row has top_k or top_p.
        strict: options of all kernels.
    """
    count, size = logits.shape
    chunks, device = triton.cdiv(size, CHUNK), logits.device
    tops, sums, lows = torch.empty((3, count, chunks), dtype=torch.float32, device=device)
    places = torch.empty((count, chunks), dtype=torch.int64, device=device)
    top, lowest = torch.empty((2, count), dtype=torch.float32, device=device)
    best = torch.empty(count, dtype=torch.int64, device=device)
    mass = torch.empty(count, dtype=torch.float64, device=device)
    of_chunks = {"CHUNKS": chunks, "WIDE": triton.next_power_of_2(chunks), **strict}
    filters = rows.inverse, rows.floor, rows.top_k
    _look[(count, chunks)](
        logits, rows.sources, rows.inverse, tops, places, sums, CHUNKS=chunks, LENGTH=CHUNK, num_warps=4, **strict
    )
    _keep[(count, chunks)](logits, rows.sources, *filters, tops, sums, lows, LENGTH=CHUNK, num_warps=1, **of_chunks)
    _distribute[(count,)](*filters, tops, places, sums, lows, top, best, mass, lowest, num_warps=1, **of_chunks)
    over, last = (1.0 / mass).float(), torch.full_like(best, EVERY)
    if narrow:
        values, ids = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True)  # 0 and -0 are equal
        law = *filters, rows.top_p, top, mass, lowest, over, last
        _narrow[(count,)](values, ids, rows.sources, *law, LENGTH=BLOCK, num_warps=4, **strict)
    return best, mass, (rows.inverse, top, lowest, over, last)
