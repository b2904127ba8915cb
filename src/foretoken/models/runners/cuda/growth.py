"""Chains and trees that grow on the device: the tokens of a level are chosen there, with the host's random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core.sampling import nucleus_sorted
from foretoken.core.streams import exponentials_at
from foretoken.models.runners.cuda.drafts import (
    BUDGET,
    FLOOR,
    FRACTION,
    LIKELIEST,
    MIN_P,
    NOISE,
    RACE,
    SOURCE,
    STEPS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DraftBucket,
    Levels,
)


def grow_chains(levels: Levels, bucket: DraftBucket, ids: Tensor | None) -> Tensor:
    """Grows a chain for each sequence.

    Args:
        levels: the passes.
        bucket: their bucket.
        ids: int64 [size], the target's token of each logit; None if it is the logit's index.

    Returns:
        int32: tokens [levels, sequences]; float32 of the same shape, the probability of each likeliest token, NaN where
        no token is possible; and the distributions [levels, sequences, width], if the bucket has them.
    """
    tokens, probabilities, rows = [], [], []
    logits = levels.first()
    for level in range(bucket.levels):
        index, probability, distributions = _choose(logits[:, : bucket.tokens[0]], level, levels, bucket, ids)
        tokens.append(index if ids is None else ids.take(index))
        probabilities.append(probability)
        if bucket.distributions and distributions is not None:
            rows.append(_widened(distributions, ids, bucket.tokens[1]))
        if level + 1 < bucket.levels:
            logits = levels.next(tokens[-1])
    return _buffer(torch.stack(tokens).int(), *probabilities, *rows)


def _buffer(ints: Tensor, *floats: Tensor) -> Tensor:
    """Returns all elements as one int32 tensor."""
    return torch.cat([ints.flatten(), *(part.contiguous().view(torch.int32).flatten() for part in floats)])


def _widened(rows: Tensor, ids: Tensor | None, width: int) -> Tensor:
    if ids is None:
        return rows
    return rows.new_zeros(len(rows), width).index_copy_(1, ids, rows)


def _choose(
    logits: Tensor, level: int, levels: Levels, bucket: DraftBucket, ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Chooses a token for each row.

    Returns:
        Its index among the logits; the probability of the likeliest token, NaN where no token is possible; and the
        distributions that tokens are sampled from, None if all are the likeliest ones.
    """
    index = logits.argmax(-1)
    probability = logits.softmax(-1).gather(-1, index[:, None])[:, 0]  # NaN if any logit is, or the largest is infinite
    if bucket.sources == (LIKELIEST,):
        return index, probability, None
    rows, source = _distributions(logits, levels, bucket), levels.sequences[SOURCE]
    if FRACTION in bucket.sources:
        index = index.where(source != FRACTION, _at_fraction(rows, levels.each(NOISE + level).view(torch.float64)))
    if RACE in bucket.sources:
        index = index.where(source != RACE, _race(rows, levels.each(NOISE + level), ids).argmax(-1))
    return index, probability, rows


def _distributions(logits: Tensor, levels: Levels, bucket: DraftBucket, times: int = 1) -> Tensor:
    """Returns the probabilities [sequences * times, V] of ``SamplingLaw``, by the parameters of each sequence."""
    scores = (logits - logits.amax(-1, keepdim=True)) / levels.floats(TEMPERATURE, times)
    if bucket.filtered:
        scores = scores.masked_fill(scores < levels.floats(MIN_P, times), -torch.inf)
        kept = scores.sort(-1, descending=True).values.gather(-1, levels.each(TOP_K, times) - 1)
        scores = nucleus_sorted(scores.masked_fill(scores < kept, -torch.inf), levels.floats(TOP_P, times))
    return scores.softmax(-1)


def _race(rows: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor:
    """Returns the race of each row [rows, V] by its key [rows, 1]; see ``SharedStream.race``."""
    tokens = torch.arange(rows.shape[1], device=rows.device) if ids is None else ids
    return rows.double() / exponentials_at(keys, tokens)


def _at_fraction(rows: Tensor, fraction: Tensor) -> Tensor:
    """Returns the token of each row at a fraction [rows, 1] of its mass; see ``PrivateStream.categorical``."""
    cumulative = rows.double().cumsum(-1)
    beyond = cumulative > fraction * cumulative[:, -1:]
    # Behind the last token with any mass there is none, whatever rounding does: the first of the largest is taken.
    return ((rows > 0) * (1 + beyond.int())).argmax(-1)


def grow_trees(levels: Levels, bucket: DraftBucket, ids: Tensor | None) -> Tensor:
    """Grows a tree of likely tokens for each sequence, as ``propose.tree.Tree`` does.

    Nodes are numbered level by level; those of a level are the candidates of its frontier, ``width`` of each node.

    Returns:
        int32 [4, sequences, kept]: the best nodes' numbers, tokens, parents' numbers and scores (float32), the best
        first. Nodes that are not there have the score -inf.
    """
    count, width = bucket.sequences, bucket.width
    floor, budget, steps = levels.floats(FLOOR), levels.each(BUDGET), levels.each(STEPS)
    logits = levels.first()
    above = torch.zeros_like(floor)  # [sequences, frontier], -inf for nodes that are not expanded
    frontier = torch.full_like(budget, -1)  # [sequences, frontier], numbers of nodes
    first = torch.arange(count, device=logits.device)[:, None]
    nodes = [frontier[:, :0], frontier[:, :0], above[:, :0]]  # tokens, parents and scores, [sequences, nodes]
    start = 0  # number of the level's first node
    for level in range(bucket.levels):
        scores, tokens = _candidates(logits[:, : bucket.tokens[0]], level, levels, bucket, ids)
        scores = (above[..., None] + scores.view(count, -1, width)).flatten(1)
        tokens = tokens if ids is None else ids.take(tokens)
        children = tokens.view(count, -1), _repeated(frontier, width), scores
        nodes = [torch.cat(parts, 1) for parts in zip(nodes, children, strict=True)]
        order = nodes[2].sort(dim=1, descending=True, stable=True).indices
        if level + 1 == bucket.levels:
            break
        rank = torch.empty_like(order).scatter_(1, order, _numbers(order))
        best, at = rank[:, start:].topk(width, largest=False, sorted=False)
        at, index = at.sort(1)
        best, frontier = best.gather(1, index), at + start
        above = nodes[2].gather(1, frontier)
        expanded = (best < budget) & (above >= floor) & (level + 1 < steps)
        above = above.masked_fill(~expanded, -torch.inf)
        rows = at // width + first * (width if level else 1)
        logits = levels.next(nodes[0].gather(1, frontier).flatten(), rows.flatten())
        start = nodes[0].shape[1]
    kept = order[:, : bucket.kept]
    tokens, parents, scores = (part.gather(1, kept) for part in nodes)
    return _buffer(torch.stack((kept, tokens, parents)).int(), scores)


def _numbers(like: Tensor) -> Tensor:
    """Returns 0, 1, 2, ... in each row of a tensor of this shape."""
    return torch.arange(like.shape[1], device=like.device).expand_as(like)


def _repeated(values: Tensor, times: int) -> Tensor:
    """Returns each element [rows, n] a number of times, [rows, n * times]."""
    return values[..., None].expand(-1, -1, times).flatten(1)


def _candidates(
    logits: Tensor, level: int, levels: Levels, bucket: DraftBucket, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the likeliest tokens [rows, width], or the leaders of a race: scores, -inf for none, and indices."""
    times = len(logits) // bucket.sequences
    rows = _distributions(logits, levels, bucket, times)
    values, index = rows.topk(bucket.width)
    if RACE in bucket.sources:
        race, raced = _race(rows, levels.each(NOISE + level, times), ids), levels.each(SOURCE, times) == RACE
        leaders = race.topk(bucket.width)
        values = (leaders.values / race.sum(-1, keepdim=True)).float().where(raced, values)
        index = leaders.indices.where(raced, index)
    return values.log().nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0), index
