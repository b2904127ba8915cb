"""Chains and trees that grow on the device: the tokens of a level are chosen there, with the host's random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.sampling import nucleus_sorted
from foretoken.models.chains import DraftStop, ScoredRows
from foretoken.models.runners.cuda.drafts import (
    BUDGET,
    FLOOR,
    FRACTION,
    LIKELIEST,
    MIN_P,
    NOISE,
    RACE,
    ROOT,
    SOURCE,
    STEPS,
    TEMPERATURE,
    THRESHOLD,
    TOP_K,
    TOP_P,
    TREE,
)
from foretoken.models.runners.cuda.graphs import States
from foretoken.models.runners.cuda.levels import Levels

NODES, ROWS = range(2)  # results of a graph


class Chains:
    """Chains that grow, one for each sequence.

    Args:
        levels: the passes.
    """

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._tokens, self._probabilities, self._rows = list[Tensor](), list[Tensor](), list[Tensor]()
        self._end = None if levels.bucket.stop is None else ChainEnds(levels.bucket.stop, levels)

    def next(self, logits: Tensor) -> Tensor:
        """Returns the next token of each chain by the logits [sequences, V] behind it."""
        index, probability, rows = _choose(logits, len(self._tokens), self._levels)
        if self._end is not None and rows is not None:
            before = self._tokens[-1] if self._tokens else self._levels.sequences[ROOT]
            probability = self._end.scored(probability, rows, before)
        self._tokens.append(self._levels.targets(index))
        self._probabilities.append(probability)
        if self._levels.bucket.distributions and rows is not None:
            self._rows.append(self._levels.widened(rows))
        return self._tokens[-1]

    def results(self) -> States:
        """Returns the results of a graph.

        These are ``NODES``, whose scores are the probabilities of the likeliest tokens, or those of ``ChainEnds``, NaN
        where no token is possible; and ``ROWS``, the distributions [sequences, levels, width], if the bucket has them.
        """
        drafted = torch.stack(self._tokens, 1)
        nodes = {NODES: node_fields(drafted, torch.ones_like(drafted), torch.stack(self._probabilities, 1))}
        return nodes | {ROWS: torch.stack(self._rows, 1)} if self._rows else nodes


def grow_chains(levels: Levels) -> States:
    """Grows a chain for each sequence; see ``Chains``."""
    chains, logits = Chains(levels), levels.first()
    for level in range(levels.bucket.levels):
        tokens = chains.next(logits)
        if level + 1 < levels.bucket.levels:
            logits = levels.next(tokens)
    return chains.results()


class ChainEnds:
    """Ends chains by the scores of their next tokens; see ``DraftStop``.

    Args:
        stop: the score; each chain has a threshold of its own.
        levels: the passes.
    """

    def __init__(self, stop: DraftStop, levels: Levels) -> None:
        self._stop, self._levels = stop, levels
        self._threshold = levels.sequences[THRESHOLD].view(torch.float64)
        self._reach = torch.ones_like(self._threshold)
        self._ended = torch.zeros_like(self._threshold, dtype=torch.bool)

    def scored(self, probability: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Returns the scores of a level: NaN from where a chain ends, or where no token is possible.

        Args:
            probability: probabilities of the likeliest tokens, for chains without a threshold.
            rows: the distributions.
            tokens: the tokens before.
        """
        states, greedy = self._levels.chain_states, self._levels.sequences[SOURCE] == LIKELIEST
        claim = self._stop.score(ScoredRows(rows, states, tokens, greedy))
        self._reach = self._reach * claim
        self._ended = self._ended | ((claim if self._stop.each else self._reach) < self._threshold)
        score = claim.float().where(self._threshold > -torch.inf, probability)
        return score.masked_fill(self._ended | probability.isnan(), torch.nan)


def node_fields(tokens: Tensor, up: Tensor, scores: Tensor) -> Tensor:
    """Returns the fields of nodes, [sequences, nodes] each, as ``device_drafts.DraftMemory`` has them."""
    return torch.stack((tokens.int(), up.int(), scores.view(torch.int32)))


def _choose(logits: Tensor, level: int, levels: Levels) -> tuple[Tensor, Tensor, Tensor | None]:
    """Chooses a token for each row.

    Returns:
        Its index among the logits; the probability of the likeliest token by the unchanged logits, NaN where no token
        is possible; and the distributions that tokens are sampled from, None if all are the likeliest ones.
    """
    index, bucket = logits.argmax(-1), levels.bucket
    probability = logits.softmax(-1).gather(-1, index[:, None])[:, 0]  # NaN if any logit is, or the largest is infinite
    if bucket.changes is not None:
        times = len(levels.unchanged) // len(logits)  # the first rows of trees are those of chains
        plain = levels.unchanged[::times].softmax(-1).gather(-1, index[:, None])[:, 0]
        probability = plain.where(~probability.isnan(), probability)
    if bucket.sources == (LIKELIEST,) and bucket.stop is None:
        return index, probability, None
    rows, source = distributions(logits, levels), levels.sequences[SOURCE]
    if FRACTION in bucket.sources:
        index = index.where(source != FRACTION, at_fraction(rows, levels.each(NOISE + level).view(torch.float64)))
    if RACE in bucket.sources:
        index = index.where(source != RACE, levels.raced(rows, levels.each(NOISE + level)).argmax(-1))
    return index, probability, rows


def distributions(logits: Tensor, levels: Levels, times: int = 1) -> Tensor:
    """Returns the probabilities [sequences * times, V] of ``SamplingLaw``, by the parameters of each sequence."""
    scores = (logits - logits.amax(-1, keepdim=True)) / levels.each(TEMPERATURE, times, floats=True)
    if levels.bucket.filtered:
        scores = scores.masked_fill(scores < levels.each(MIN_P, times, floats=True), -torch.inf)
        kept = scores.sort(-1, descending=True).values.gather(-1, levels.each(TOP_K, times) - 1)
        scores = nucleus_sorted(scores.masked_fill(scores < kept, -torch.inf), levels.each(TOP_P, times, floats=True))
    return scores.softmax(-1)


def at_fraction(rows: Tensor, fraction: Tensor) -> Tensor:
    """Returns the token of each row at a fraction [rows, 1] of its mass; see ``PrivateStream.categorical``."""
    cumulative = rows.double().cumsum(-1)
    beyond = cumulative > fraction * cumulative[:, -1:]
    # Behind the last token with any mass there is none, whatever rounding does: the first of the largest is taken.
    return ((rows > 0) * (1 + beyond.int())).argmax(-1)


def grow_trees(levels: Levels) -> States:
    """Grows a tree of likely tokens for each sequence, as ``propose.tree.Tree`` does, or a chain in its first rows.

    Nodes are numbered level by level; those of a level are the candidates of its frontier, ``width`` of each node.

    Returns:
        ``NODES``, the best nodes in the order of their numbers. Those that are not there come last. With chains also
        ``ROWS``.
    """
    bucket = levels.bucket
    count, width = bucket.sequences, bucket.width
    logits, chains = levels.first(), Chains(levels) if bucket.mixed else None
    above = torch.zeros_like(levels.each(FLOOR, floats=True))  # [sequences, frontier], -inf for nodes not expanded
    frontier = torch.full_like(levels.each(BUDGET), -1)  # [sequences, frontier], numbers of nodes
    numbers = torch.arange(width + (bucket.levels - 1) * width**2, device=logits.device).expand(count, -1)
    first = torch.arange(count, device=logits.device)[:, None] * width  # rows of the level
    tokens, parents, scores = list[Tensor](), list[Tensor](), above[:, :0]
    for level in range(bucket.levels):
        start = scores.shape[1]  # number of the level's first node
        chained = None if chains is None else chains.next(logits.view(count, -1, logits.shape[1])[:, 0])
        likely, index = _candidates(logits, level, levels)
        tokens.append(levels.targets(index).view(count, -1))
        parents.append(frontier[..., None].expand(-1, -1, width).flatten(1))
        scores = torch.cat((scores, (above[..., None] + likely.view(count, -1, width)).flatten(1)), 1)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        if level + 1 == bucket.levels:
            break
        rank = torch.empty_like(order).scatter_(1, order, numbers[:, : order.shape[1]])
        at = rank[:, start:].topk(width, largest=False, sorted=False).indices.sort(1).values  # among the level's nodes
        frontier = at + start
        expanded = (rank.gather(1, frontier) < levels.each(BUDGET)) & (levels.each(STEPS) > level + 1)
        above = scores.gather(1, frontier)
        above = above.where(expanded & (above >= levels.each(FLOOR, floats=True)), -torch.inf)
        rows = at // width + (first if level else first // width)
        likeliest = tokens[-1].gather(1, at)
        if chained is not None:
            trees = levels.each(TREE) > 0
            likeliest, rows = likeliest.where(trees, chained[:, None]), rows.where(trees, first if level else rows)
        logits = levels.next(likeliest.flatten(), rows.flatten())
    kept = order[:, : bucket.kept]
    nodes = _kept(kept, torch.cat(tokens, 1), torch.cat(parents, 1), scores, levels)
    return {NODES: nodes} if chains is None else _joined(nodes, chains.results(), levels)


def _joined(trees: Tensor, chains: States, levels: Levels) -> States:
    """Returns the results of chains, with the nodes of trees [fields, sequences, nodes] where a sequence has one."""
    count = max(trees.shape[2], chains[NODES].shape[2])
    drafts = [F.pad(nodes, (0, count - nodes.shape[2])) for nodes in (trees, chains[NODES])]
    return chains | {NODES: drafts[0].where(levels.each(TREE) > 0, drafts[1])}


def _kept(best: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, levels: Levels) -> Tensor:
    """Returns the fields of the best nodes [sequences, kept], as many as each budget allows, parents first."""
    rank = torch.arange(best.shape[1], device=best.device)
    there = (rank < levels.each(BUDGET)) & (scores.gather(1, best) > -torch.inf)
    numbers, order = best.where(there, scores.shape[1]).sort(1)
    best = best.gather(1, order)
    there, above = numbers < scores.shape[1], parents.gather(1, best)
    at = torch.searchsorted(numbers, above).where(there & (above >= 0), -1)
    return node_fields(tokens.gather(1, best), rank - at, scores.gather(1, best).where(there, -torch.inf))


def _candidates(logits: Tensor, level: int, levels: Levels) -> tuple[Tensor, Tensor]:
    """Returns the likeliest tokens [rows, width], or the leaders of a race: scores, -inf for none, and indices."""
    bucket, times = levels.bucket, len(logits) // levels.bucket.sequences
    rows = distributions(logits, levels, times)
    values, index = rows.topk(bucket.width)
    if RACE in bucket.sources:
        race, raced = levels.raced(rows, levels.each(NOISE + level, times)), levels.each(SOURCE, times) == RACE
        leaders = race.topk(bucket.width)
        values = (leaders.values / race.sum(-1, keepdim=True)).float().where(raced, values)
        index = leaders.indices.where(raced, index)
    return values.nan_to_num().log(), index  # a sum of probabilities is at most 1
