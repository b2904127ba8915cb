"""Tokens of rows of logits on a device, by the rules of ``core/native/csrc/token_row.hpp``.

Sums, exponentials and logarithms in float64 may differ from the CPU's in the last bit, which decides a token only where
a random number meets the edge between two tokens to 16 digits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.models.runners.triton_kernels.distributions import BLOCK, chances_of, distributed, sum_of_powers
from foretoken.models.runners.triton_kernels.rows import ChainRows, SampledRows, TreeRows

PART = 512  # tokens of one sum of log-probabilities


@triton.jit
def _gather(addresses, logits, SIZE: tl.constexpr, LENGTH: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * LENGTH + tl.arange(0, LENGTH)
    address = tl.load(addresses + row)
    count = tl.where(address == 0, 0, SIZE)
    values = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=at < count, other=0.0)
    tl.store(logits + row * SIZE + at, values, mask=at < SIZE)


@triton.jit
def _nodes(addresses, values, COUNT: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, COUNT)
    address = tl.load(addresses + row)
    node = tl.load(address.to(tl.pointer_type(tl.int64)) + at, mask=at < tl.where(address == 0, 0, COUNT), other=0)
    tl.store(values + row * COUNT + at, node)


@triton.jit
def _ratio(
    logits, inverses, top, lowest, over, last, drawn_from, of_drafts, drafted, ratios, chances, SIZE: tl.constexpr
):
    """Stores the probability of a row's drafted token for the draft, and the target's divided by it, or 0."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, 1)
    address = tl.load(drawn_from + row)
    if address != 0:
        at = tl.load(drafted + row) + lane
        p = chances_of(logits, inverses, top, lowest, over, last, row, at, SIZE)
        q = tl.load(address.to(tl.pointer_type(tl.float32)) + at).to(tl.float64)
        possible = (p > 0.0) & (q > 0.0)
        ratio = p / (tl.where(possible, q, 1.0) / tl.load(of_drafts + row))
        tl.store(ratios + row + lane, tl.where(possible, ratio, 0.0))
        tl.store(chances + row + lane, q)


@triton.jit
def _weigh(firsts, ratios, weights, start):
    """Stores the weight with which block verification reaches a row: the product of ratios, at most 1 at each."""
    row = start + tl.program_id(0)
    at, weight = tl.load(firsts + row), tl.full((), 1.0, tl.float64)
    while at < row:
        weight = tl.minimum(weight * tl.load(ratios + at), 1.0)
        at += 1
    tl.store(weights + tl.program_id(0), weight)


@triton.jit
def _excess(chance, drawn_from, of_drafts, weights, row, at, SIZE: tl.constexpr):
    """Returns (weight p - q)+ of tokens of a row above a sampled one, and p of other rows."""
    address = tl.load(drawn_from + row)
    count = tl.where(address == 0, 0, SIZE)
    q = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=at < count, other=0.0)
    left = chance * tl.load(weights + row) - q.to(tl.float64) / tl.load(of_drafts + row)
    return tl.where(address != 0, tl.where(left < 0.0, 0.0, left), chance)


@triton.jit
def _rejected(
    chance, drawn_from, drafted, children, weights, masses, rests, row, at, count,
    SIZE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Returns p and q of tokens of a row of a tree after its first ``count`` children were rejected, of others p."""
    address = tl.load(drawn_from + row)
    inside = at < tl.where(address == 0, 0, SIZE)
    q = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0.0).to(tl.float64)
    p = chance
    for rank in tl.static_range(RANKS):
        child = tl.load(children + row * RANKS + rank)
        if (child >= 0) & (rank < count):
            left = p * tl.load(weights + row * (RANKS + 1) + rank) - q
            mass, rest = tl.load(masses + row * RANKS + rank), tl.load(rests + row * RANKS + rank)
            p = tl.where(mass > 0.0, tl.where(left < 0.0, 0.0, left) / tl.where(mass > 0.0, mass, 1.0), p)
            q = tl.where(at == tl.load(drafted + child), 0.0, q) / tl.where(rest > 0.0, rest, 1.0)
    return p, q


@triton.jit
def _sum_excess(
    logits, inverses, top, lowest, over, last, drawn_from, drafted, children, depths, weights, masses, rests,
    plain, totals, start, depth, rank,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Sums a chunk of (weight p - q)+ and of q without the child of a rank, in rows of one depth."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    child = tl.load(children + (start + row) * RANKS + rank)
    if (child >= 0) & (tl.load(depths + start + row) == depth):
        at = chunk * LENGTH + tl.arange(0, LENGTH)
        chance = chances_of(logits, inverses, top, lowest, over, last, row, at, SIZE)
        p, q = _rejected(
            chance, drawn_from, drafted, children, weights, masses, rests, start + row, at, rank, SIZE, RANKS
        )
        left = p * tl.load(weights + (start + row) * (RANKS + 1) + rank) - q
        tl.store(plain + row * CHUNKS + chunk, tl.sum(tl.where(left < 0.0, 0.0, left), 0))
        tl.store(totals + row * CHUNKS + chunk, tl.sum(tl.where(at == tl.load(drafted + child), 0.0, q), 0))


@triton.jit
def _reject(
    logits, inverses, top, lowest, over, last, drawn_from, drafted, children, depths, weights, masses, rests,
    plain, totals, chances, recursive, all_reached, start, depth, rank,
    CHUNKS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Stores the weight with which the child of a rank is reached, and that of its row once it is rejected."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    child = tl.load(children + (start + row) * RANKS + rank)
    if (child >= 0) & (tl.load(depths + start + row) == depth):
        to, lane = (start + row) * RANKS + rank, tl.arange(0, 1)
        mass = tl.sum(tl.load(plain + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0), 0)
        rest = tl.sum(tl.load(totals + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0), 0)
        weight = tl.load(weights + (start + row) * (RANKS + 1) + rank)
        at = tl.load(drafted + child) + lane
        chance = chances_of(logits, inverses, top, lowest, over, last, row, at, SIZE)
        p, q = _rejected(
            chance, drawn_from, drafted, children, weights, masses, rests, start + row, at, rank, SIZE, RANKS
        )
        possible = (p > 0.0) & (q > 0.0)
        reached = weight * tl.where(possible, p / tl.where(possible, q, 1.0), 0.0)
        reached = tl.where(reached < 1.0, reached, 1.0)
        tl.store(all_reached + child + lane, reached)
        tl.store(weights + child * (RANKS + 1) + lane, tl.where(tl.load(recursive + child), 1.0, reached))
        drawn = tl.load(tl.load(drawn_from + start + row).to(tl.pointer_type(tl.float32)) + at)
        tl.store(chances + child + lane, drawn.to(tl.float64))
        tl.store(masses + to, mass)
        tl.store(rests + to, rest)
        remaining = mass + (1.0 - weight)
        after = tl.where(remaining > 0.0, mass / tl.where(remaining > 0.0, remaining, 1.0), 1.0)
        finite = tl.load(top + row) > -float("inf")  # where no token is possible, the row keeps its weight
        tl.store(weights + (start + row) * (RANKS + 1) + rank + 1, tl.where(finite, after, weight))


@triton.jit
def _draw(
    logits, sources, noise, inverses, top, lowest, over, last, drawn_from, of_drafts, weights, masses, plain, winners,
    of_children, drafted, children, of_trees, excesses, rests, start,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr, SAMPLED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Weighs a chunk, or finds the winner of its race."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source, to = tl.load(sources + row), row * CHUNKS + chunk
    if (source > 1) & (tl.load(top + row) > -float("inf")):  # not NaN
        at = chunk * LENGTH + tl.arange(0, LENGTH)
        chance = chances_of(logits, inverses, top, lowest, over, last, row, at, SIZE)
        if source == 2:
            if RANKS:
                chance, _ = _rejected(
                    chance,
                    of_children,
                    drafted,
                    children,
                    of_trees,
                    excesses,
                    rests,
                    start + row,
                    at,
                    RANKS,
                    SIZE,
                    RANKS,
                )
            if SAMPLED:
                tl.store(plain + to, tl.sum(chance, 0))
                chance = _excess(chance, drawn_from, of_drafts, weights, row, at, SIZE)
            tl.store(masses + to, tl.sum(chance, 0))
        else:
            z = (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + tl.load(noise + row).to(tl.uint64, bitcast=True)
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB
            z = (z ^ (z >> 31)) >> 12
            u = (z.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
            score = chance / -tl.log(u)
            best = tl.max(score, 0)
            tl.store(masses + to, best)
            tl.store(winners + to, tl.min(tl.where(score == best, at, SIZE), 0))


@triton.jit
def _pick(
    logits, sources, noise, inverses, top, lowest, over, last, drawn_from, of_drafts, weights, best, masses, plain,
    winners, tokens, totals, of_children, drafted, children, of_trees, excesses, rests, start,
    CHUNKS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr, SAMPLED: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Chooses the token of a row from its chunks; -1 where none is possible."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    source, token = tl.load(sources + row), tl.load(best + row)
    if (source > 1) & (tl.load(top + row) > -float("inf")):
        mass = tl.load(masses + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
        if source == 3:
            winner = tl.load(winners + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=SIZE)
            score = tl.max(mass, 0)
            token = tl.where(score > 0.0, tl.min(tl.where(mass == score, winner, SIZE), 0), -1)
        else:
            # Rounding can put the point past the end of the row or of a chunk: its last token with mass is then right.
            total = tl.sum(mass, 0)
            if SAMPLED:
                tl.store(totals + row, total)
                left = total > 0.0  # the target's own distribution counts where nothing is beyond the draft's
                own = tl.load(plain + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
                mass = tl.where(left, mass, own)
                total = tl.sum(mass, 0)
            point = tl.load(noise + row).to(tl.float64, bitcast=True) * total
            passed = tl.cumsum(mass, 0)
            beyond = tl.min(tl.where((chunk < CHUNKS) & (passed > point), chunk, WIDE), 0)
            place = tl.where(beyond < WIDE, beyond, tl.max(tl.where(mass > 0.0, chunk, 0), 0))
            before = tl.sum(tl.where(chunk < place, mass, 0.0), 0)
            at = tl.arange(0, LENGTH)
            chance = chances_of(logits, inverses, top, lowest, over, last, row, place * LENGTH + at, SIZE)
            if RANKS:
                place_at = place * LENGTH + at
                chance, _ = _rejected(
                    chance, of_children, drafted, children, of_trees, excesses, rests, start + row, place_at, RANKS,
                    SIZE, RANKS,
                )  # fmt: skip
            if SAMPLED:
                beyond_draft = _excess(chance, drawn_from, of_drafts, weights, row, place * LENGTH + at, SIZE)
                chance = tl.where(left, beyond_draft, chance)
            reached = before + tl.cumsum(chance, 0) > tl.where(beyond < WIDE, point, float("inf"))
            first, final = tl.min(tl.where(reached, at, LENGTH), 0), tl.max(tl.where(chance > 0.0, at, 0), 0)
            token = (place * LENGTH + tl.where(first < LENGTH, first, final)).to(tl.int64)
            token = tl.where((total > 0.0) & (total < float("inf")), token, -1)
    tl.store(tokens + row, token)


@triton.jit
def _sum_parts(logits, top, sums, PARTS: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr):
    """Sums the exponentials of a part of a row, relative to its largest logit."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.minimum(SIZE - part * LENGTH, LENGTH)
    x = logits + row * SIZE + part * LENGTH
    total, _ = sum_of_powers(x, count, tl.load(top + row), 1.0, -float("inf"))
    tl.store(sums + row * PARTS + part, total)


@triton.jit
def _total(top, sums, totals, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """Stores the logarithm of a row's sum of exponentials."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    total = tl.sum(tl.load(sums + row * PARTS + part, mask=part < PARTS, other=0.0).to(tl.float64), 0)
    tl.store(totals + row, tl.load(top + row).to(tl.float64) + tl.log(total))


def gathered(addresses: Tensor, vocabulary: int) -> Tensor:
    """Returns rows of float32 [V] at addresses [R], [R, V]; zeros for address 0."""
    rows = torch.empty((len(addresses), vocabulary), dtype=torch.float32, device=addresses.device)
    _gather[(len(addresses), triton.cdiv(vocabulary, BLOCK))](
        addresses, rows, SIZE=vocabulary, LENGTH=BLOCK, num_warps=4
    )
    return rows


def nodes(addresses: Tensor) -> Tensor:
    """Returns the four values of nodes at addresses [R], int64 [R, 4]; zeros for address 0."""
    values = torch.empty((len(addresses), 4), dtype=torch.int64, device=addresses.device)
    _nodes[(len(addresses),)](addresses, values, COUNT=4, num_warps=1)
    return values


def chosen(
    logits: Tensor,
    rows: SampledRows,
    narrow: bool,
    chains: ChainRows | None = None,
    start: int = 0,
    trees: TreeRows | None = None,
) -> Tensor:
    """Returns the token of each row; -1 where none is possible.

    Rows of sampled chains get the token that follows if block verification (2403.10444) accepts the chain up to there,
    rows of sampled trees that of traversal verification (2505.12398) or recursive rejection (2305.09781), and rows of
    trees with one sampled sibling that after its rejection (2502.18779).

    Args:
        logits: changed logits, [R, V].
        rows: the requests.
        narrow: whether any row has top_k or top_p.
        chains: sampled chains and siblings; the rows before these have been computed. None for none.
        start: the first row among those of ``chains`` and ``trees``.
        trees: sampled trees, likewise. None for none.

    Returns:
        int64 [R, 1], or with chains or trees [R, 4]: the token, and the bits of three measures of chains, float64: the
        mass beyond the draft's, the weight, and the draft's probability of the drafted token.
    """
    count, size = logits.shape
    blocks, device = triton.cdiv(size, BLOCK), logits.device
    masses = torch.empty((count, blocks), dtype=torch.float64, device=device)
    winners = torch.empty((count, blocks), dtype=torch.int64, device=device)
    strict = {"SIZE": size, "enable_fp_fusion": False}  # the CPU's kernels do not fuse products and sums either
    best, mass, distribution = distributed(logits, rows, narrow, strict)
    tokens, plain, measures = torch.empty_like(best), masses, torch.zeros((3, count), dtype=mass.dtype, device=device)
    drawn_from, of_drafts = best, mass
    if chains is not None:
        part = slice(start, start + count)
        plain, drawn_from, of_drafts = torch.empty_like(masses), chains.drawn_from[part], chains.masses[part]
        results = chains.ratios[part], measures[2]
        _ratio[(count,)](
            logits, *distribution, drawn_from, of_drafts, chains.drafted[part], *results, num_warps=1, **strict
        )
        _weigh[(count,)](chains.firsts, chains.ratios, measures[1], start, num_warps=1)
    drawn = logits, rows.sources, rows.noise, *distribution, drawn_from, of_drafts, measures[1]
    wide, ranks, of_trees = triton.next_power_of_2(blocks), 0, (best, best, best, mass, mass, mass, start)
    if trees is not None:
        ranks = _reject_nodes(logits, distribution, trees, start, strict)
        rejected = trees.drawn_from, trees.drafted, trees.children, trees.weights, trees.masses, trees.rests
        of_trees = *rejected, start
    sizes = {"CHUNKS": blocks, "LENGTH": BLOCK, "SAMPLED": chains is not None, "RANKS": ranks, "num_warps": 4, **strict}
    _draw[(count, blocks)](*drawn, masses, plain, winners, *of_trees, **sizes)
    _pick[(count,)](*drawn, best, masses, plain, winners, tokens, measures[0], *of_trees, WIDE=wide, **sizes)
    if chains is None and trees is None:
        return tokens[:, None]
    return torch.cat((tokens[:, None], measures.view(torch.int64).T), 1)


def _reject_nodes(
    logits: Tensor, distribution: Sequence[Tensor], trees: TreeRows, start: int, strict: dict[str, int]
) -> int:
    """Computes weights, masses and rests of sampled trees, sibling by sibling. Returns the number of siblings."""
    count, size = logits.shape
    blocks, ranks = triton.cdiv(size, BLOCK), trees.children.shape[1]
    sums, totals = torch.empty((2, count, blocks), dtype=torch.float64, device=logits.device)
    nodes_of = trees.drawn_from, trees.drafted, trees.children, trees.depths
    states = *nodes_of, trees.weights, trees.masses, trees.rests, sums, totals
    sizes, wide = {"CHUNKS": blocks, "RANKS": ranks, "num_warps": 4, **strict}, triton.next_power_of_2(blocks)
    for depth in range(trees.deepest + 1):
        for rank in range(ranks):
            stage = start, depth, rank
            _sum_excess[(count, blocks)](logits, *distribution, *states, *stage, LENGTH=BLOCK, **sizes)
            results = trees.chances, trees.recursive, trees.reached
            _reject[(count,)](logits, *distribution, *states, *results, *stage, WIDE=wide, **sizes)
    return ranks


def described(logits: Tensor, tokens: Tensor, ids: Tensor) -> Tensor:
    """Returns the log-probability of each row's token, its rank, and the likeliest tokens with theirs.

    Args:
        logits: unchanged logits, [R, V].
        tokens: [R].
        ids: the likeliest tokens, [R, k].

    Returns:
        int64 [R, 2 + 2 k]; log-probabilities are the bits of float64.
    """
    rows, size = logits.shape
    top, parts = logits.amax(-1), triton.cdiv(size, PART)
    sums = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    _sum_parts[(rows, parts)](
        logits, top, sums, PARTS=parts, SIZE=size, LENGTH=PART, num_warps=1, enable_fp_fusion=False
    )
    total = torch.empty((rows, 1), dtype=torch.float64, device=logits.device)
    _total[(rows,)](top, sums, total, PARTS=parts, WIDE=triton.next_power_of_2(parts), num_warps=4)
    chosen_logits = logits.gather(1, tokens.clamp(0)[:, None])
    rank = (logits > chosen_logits).sum(-1, keepdim=True) + 1
    bits = [(each.double() - total).view(torch.int64) for each in (chosen_logits, logits.gather(1, ids))]
    return torch.cat((bits[0], rank, ids, bits[1]), 1)
