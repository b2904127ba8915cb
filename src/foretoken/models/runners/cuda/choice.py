"""Tokens of a step, chosen on the device: one graph behind that of the pass, and one copy of its results.

The requests are those of the compiled kernels (``native.TokenRow``). Every row of logits gets a token, whether the path
leads there or not; the host follows the tokens along the draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.devices import fetching
from foretoken.core.draft import SampledElsewhere
from foretoken.core.native.sampling import TokenRow, TokenSource
from foretoken.core.streams import GOLDEN, splitmixed, step_keys
from foretoken.models.device_drafts import FIELDS, SCORE, TOKEN, UP, fields_of
from foretoken.models.runners.cuda.changes import ChangedRows, Changes, ChangeSizes, DeviceChanges, split
from foretoken.models.runners.cuda.graphs import Graphs, Inputs, States
from foretoken.models.runners.cuda.walks import ONE_SAMPLED, RECURSIVE, Walk
from foretoken.models.runners.functional import ranked
from foretoken.models.runners.triton_kernels import sampling_kernels
from foretoken.models.runners.triton_kernels.rows import ChainRows, SampledRows, TreeRows
from foretoken.models.runners.triton_kernels.steps import doubled

MIN_ROWS = 8  # doubled until all fit
ROWS_AT_ONCE = 64  # bounds the memory of a graph
ROW_FIELDS, FLOAT_FIELDS = 8, 3  # numbers of int64 and of float32 that a row has
OF, MASK, NODE_TOKEN, NODE_UP, DEPTH, CHANGE_FIELDS = range(6)  # fields of rows that only changes of logits need
MEASURES = 3  # of rows beside the token, for sampled chains
FILTER_FIELDS = "top_k", "inverse", "floor", "top_p"
NOISE = 2  # among the fields of ``SampledRows``
RESULTS = 0  # key of a graph's results


@dataclass(frozen=True, slots=True)
class ChoiceBucket:
    """Properties of requests that a graph depends on."""

    rows: int  # number of rows, padding included
    vocabulary: int  # number of logits of a row
    narrow: bool  # whether any row has top_k or top_p
    listed: int  # number of likeliest tokens that are listed; -1 without log-probabilities
    changes: ChangeSizes | None  # sizes of the changes of logits; None for none
    width: int  # number of rows of a request with changes, at most
    depth: int  # depth of a node whose path adds to penalties, at most
    unread: bool  # whether there are drafts that the host has not read
    sampled: bool  # whether any of these is a sampled chain
    ranks: int = 0  # the largest number of siblings sampled without replacement; 0 for none
    deepest: int = 0  # the largest depth of a node that has such children
    tokenwise: bool = False  # whether there are other drafts of which sampled tokens are verified one by one

    @property
    def measured(self) -> bool:
        """Whether rows have measures."""
        return self.sampled or self.tokenwise or self.ranks > 0

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts of a table: fields of rows, those that changes need, rows of requests, and changes."""
        changes = self.changes
        fields = (ROW_FIELDS + FLOAT_FIELDS, self.rows)
        if changes is None:
            return (fields,)
        return fields, (CHANGE_FIELDS, self.rows), (changes.sequences, self.width), (changes.size,)

    def fields(self, table: Tensor) -> list[Tensor]:
        """Returns the fields of rows; those of float32 fill the first half of their memory."""
        whole, real = table[:ROW_FIELDS], table[ROW_FIELDS:]
        return [*whole, *(field.view(torch.float32)[: self.rows] for field in real)]


class DeviceChooser:
    """Chooses tokens on a device; a ``TokenChooser``.

    Args:
        graphs: its graphs, on the device of the logits.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs

    @torch.inference_mode()
    def choose_tokens(self, rows: Sequence[TokenRow], vocabulary: int, threads: int = 0) -> Callable[[], None]:
        """See ``TokenChooser``."""
        walks = [Walk(request) for request in rows]
        changed, changes = [walk for walk in walks if walk.request.changes], Changes(vocabulary)
        for number, walk in enumerate(changed):
            walk.add_changes(changes, number)
        at, sizes = sum(walk.count for walk in walks), changes.sizes()
        listed, deepest = (max(request.top_count for request in rows), max([0, *(walk.reach for walk in changed)]))
        bucket = ChoiceBucket(
            rows=doubled(at, MIN_ROWS) if at <= ROWS_AT_ONCE else -(-at // ROWS_AT_ONCE) * ROWS_AT_ONCE,
            vocabulary=vocabulary,
            narrow=any(request.filter.top_k > 0 or request.filter.top_p < 1.0 for request in rows),
            listed=-1 if listed < 0 else min(doubled(listed, 1), vocabulary),
            changes=sizes,
            width=doubled(max(walk.count for walk in changed), 1) if sizes else 0,
            depth=doubled(deepest, 1) if sizes and sizes.penalized and deepest else 0,
            unread=any(walk.unread is not None for walk in walks),
            sampled=any(walk.law is SampledElsewhere for walk in walks),
            ranks=max([0, *(walk.ranks % RECURSIVE for walk in walks if walk.ranks > 0)]),
            deepest=max(walk.deepest for walk in walks),
            tokenwise=any(walk.ranks < 0 for walk in walks),
        )
        table = self._filled(bucket, walks)
        if sizes is not None:
            _, rows_of, requests_of, changes_of = split(table, bucket.shapes)
            _fill_changes(rows_of.numpy(), requests_of.numpy(), walks)
            changes.fill(changes_of, sizes)
        results = fetching(self._graphs.run(bucket, Inputs(table), lambda inputs: _compute(inputs, bucket))[RESULTS])
        return lambda: _receive(results().numpy(), walks, bucket)

    def _filled(self, bucket: ChoiceBucket, walks: Sequence[Walk]) -> Tensor:
        """Returns the table of all requests in the host's memory, without their changes."""
        size = sum(map(math.prod, bucket.shapes))
        table = torch.zeros(size, dtype=torch.int64, pin_memory=self._graphs.pinned)
        fields = [field.numpy() for field in bucket.fields(split(table, bucket.shapes)[0])]
        requests, counts = [walk.request for walk in walks], [walk.count for walk in walks]
        filters = [request.filter for request in requests]

        def each(values: Sequence[Any], dtype: Any = np.int64) -> NDArray[Any]:
            return np.repeat(np.array(values, dtype), counts)

        sources = each([request.source for request in requests])
        bits = each([request.noise for request in requests], np.uint64)
        positions = each([request.position for request in requests])
        depths, nodes, addresses, drawn_from = (
            np.array([*chain.from_iterable(map(attrgetter(name), walks))], np.int64)
            for name in ("depths", "nodes", "addresses", "drawn_from")
        )
        columns = (
            nodes,
            np.where(nodes, np.repeat(np.cumsum([0, *counts[:-1]]), counts), np.arange(sum(counts))),
            drawn_from,
            each([walk.ranks for walk in walks]),
            addresses,
            sources,
            noise(bits, positions, depths, sources == TokenSource.RACE).view(np.int64),
            *(each([getattr(each_filter, name) for each_filter in filters], np.float64) for name in FILTER_FIELDS),
        )
        for field, column in zip(fields, columns, strict=True):
            field[: len(column)] = column
        return table


def _receive(results: NDArray[np.int64], walks: Sequence[Walk], bucket: ChoiceBucket) -> None:
    """Writes the results of ``_compute`` to the requests."""
    measured, first = 1 + MEASURES * bucket.measured, 0
    chosen, described = results[:, 0].tolist(), results[:, measured + FIELDS * bucket.unread :]
    measures = np.ascontiguousarray(results[:, 1:measured]).view(np.float64).tolist()
    fields = fields_of(results[:, measured : measured + FIELDS]) if bucket.unread else ()
    for walk in walks:
        rows = slice(first, first := first + walk.count)
        if walk.unread is not None:
            walk.receive(*(field[rows.start + 1 : rows.stop] for field in fields))
        if walk.law is None:
            walk.follow(chosen[rows], described[rows], bucket.listed)
        else:
            walk.verify(chosen[rows], measures[rows], described[rows], bucket.listed)


def _fill_changes(fields: NDArray[np.int64], requests: NDArray[np.int64], walks: Sequence[Walk]) -> None:
    """Fills the fields of rows that changes need, and the rows of each request with changes."""
    requests[:], fields[OF], at, number = fields.shape[1], len(requests) - 1, 0, 0
    for walk in walks:
        rows = slice(at, at := at + walk.count)
        if walk.request.changes:
            columns = fields[:, rows]
            requests[number, : walk.count] = range(rows.start, at)
            columns[OF], columns[MASK] = number, walk.masks
            columns[DEPTH] = [depth - walk.request.index for depth in walk.depths]
            columns[NODE_TOKEN, 1 : 1 + len(walk.tokens)] = walk.tokens
            columns[NODE_UP, 1 : 1 + len(walk.parents)] = np.arange(len(walk.parents)) - walk.parents
            number += 1


def noise(
    bits: NDArray[np.uint64], positions: NDArray[np.int64], depths: NDArray[np.int64], races: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    """Returns the key of each row's race, or the bits of its fraction; see ``key_of`` of token_row.hpp."""
    keys = step_keys(bits, positions + np.where(races, depths, 0))
    counters = (2 * depths + 1).astype(np.uint64) * np.uint64(GOLDEN)
    fractions = ((splitmixed(keys + counters) >> np.uint64(12)) + 0.5) * 2.0**-52
    return np.where(positions < 0, bits, np.where(races, keys, fractions.view(np.uint64)))


def _compute(inputs: Inputs, bucket: ChoiceBucket) -> States:
    """Chooses the tokens of all rows, some rows at a time.

    Returns:
        int64 [rows, n]: the token, the measures of sampled drafts if there are any, the fields of its node if the host
        has not read all of them, log-probabilities, and those of the node's token in the row above if there are sampled
        drafts.
    """
    table, *changed = split(inputs.table, bucket.shapes)
    (nodes, firsts, drawn_from, ranks, *fields), kernels = bucket.fields(table), sampling_kernels()
    chains, siblings, trees, parts, size = None, None, None, list[Tensor](), bucket.vocabulary
    drafted = kernels.nodes(nodes) if bucket.unread else None
    row = torch.arange(bucket.rows, device=nodes.device)
    if drafted is not None:  # the noise of a node is in the row whose distance from the root's is the node's depth
        own = (ranks > 0) & (ranks < RECURSIVE)  # of traversed trees in its own
        fields[NOISE] = fields[NOISE].take(row.where(own, firsts + drafted[:, FIELDS]))
        chains, siblings, trees = _sampled_drafts(drafted, nodes, firsts, drawn_from, ranks, bucket)
    changes = None if bucket.changes is None else DeviceChanges(changed[2], bucket.changes)
    changed_rows = None if changes is None else _changed_rows(changed[0], changed[1], nodes, drafted, bucket)
    for start in range(0, bucket.rows, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        rows = SampledRows(*(field[part] for field in fields))
        logits = after = kernels.gathered(rows.addresses, size)
        if changes is not None and changed_rows is not None:
            after = changes.applied(logits, changed_rows.part(start, len(logits)))
        without = None if siblings is None else siblings.exclude(part, size)
        chosen = kernels.chosen(after, rows, bucket.narrow, chains, start, trees)
        del without  # the distributions, which ``chosen`` has read
        results, measures = [chosen[:, :1]], chosen[:, 1:]
        for drafts, among in ((trees, ranks > 0), (siblings, ranks < 0)):
            if drafts is not None:
                measures = drafts.measures(part).view(torch.int64).where(among[part, None], measures)
        results.append(measures)
        if drafted is not None:
            results.append(drafted[part, :FIELDS])
        if bucket.listed >= 0:
            results.append(kernels.described(logits, chosen[:, 0], ranked(logits, bucket.listed)))
            if drafted is not None and bucket.measured:
                tokens, roots = drafted[part, TOKEN], fields[0].take((row - drafted[:, UP])[part])
                results.append(kernels.described(kernels.gathered(roots, size), tokens, tokens[:, None][:, :0]))
        parts.append(torch.cat(results, 1))
    return {RESULTS: torch.cat(parts)}


@dataclass(frozen=True, slots=True)
class SiblingRows:
    """Rows of trees of which the last sibling alone is sampled, from the tokens that the others are not.

    Chains that are verified token by token are among them, with distributions as they are.
    """

    chains: ChainRows  # their rows above a sampled token, which are verified as chains of one token
    above: Tensor  # the row above each row of such a tree, -1 for other rows, [R]
    last: Tensor  # the last one of the rows below each row of a tree, -1 for none, [R]
    tokens: Tensor  # the token of each row, [R]
    chances: Tensor  # the draft's probability of it, float64, once the chunk of the row above is computed, [R]

    def exclude(self, part: slice, size: int) -> Tensor:
        """Replaces the distributions of rows ``part`` by copies without the siblings that are not sampled.

        Returns the copies, [rows + 1, size], to be kept while ``chains`` are read.
        """
        rows = F.pad(self.chains.drawn_from[part], (0, 1))
        q = sampling_kernels().gathered(rows, size)
        end = (len(rows) - 1) * size  # the element of no sibling, in a row of zeros
        inside = (self.above >= part.start) & (self.above < part.start + len(rows) - 1)
        at = ((self.above - part.start) * size + self.tokens).where(inside, end)
        self.chances.add_(q.view(-1).take(at))
        row = torch.arange(len(at), device=at.device)
        q.view(-1).index_fill_(0, at.where(self.last.take(self.above.clamp(0)) != row, end), 0.0)
        masses, here = q.sum(1, dtype=torch.float64)[:-1], self.last[part] >= 0
        self.chains.masses[part] = masses.where(here & (masses > 0.0), 1.0)
        addresses = q.data_ptr() + q.stride(0) * q.itemsize * row[: len(rows) - 1]
        self.chains.drawn_from[part] = addresses.where(here, rows[:-1])
        return q

    def measures(self, part: slice) -> Tensor:
        """Returns three measures of computed rows: target's and draft's ratio for the row below, 0, and ``chances``."""
        ratios = self.chains.ratios[part]
        return torch.stack((ratios, torch.zeros_like(ratios), self.chances[part]), 1)


def _sampled_drafts(
    drafted: Tensor, nodes: Tensor, firsts: Tensor, drawn_from: Tensor, ranks: Tensor, bucket: ChoiceBucket
) -> tuple[ChainRows | None, SiblingRows | None, TreeRows | None]:
    """Returns the rows of sampled drafts of each kind, None for none.

    Args:
        drafted: the fields of each row's node and its depth, [rows, 4]. The others are fields of the table.
    """
    row, scores = torch.arange(bucket.rows, device=nodes.device), drafted[:, SCORE].int().view(torch.float32)
    above = (row - drafted[:, UP]).where((nodes != 0) & (scores > -torch.inf), -1)
    below = (row + 1).where(~scores.roll(-1).isnan(), -1)  # the last row of a chain has no distribution
    chains, siblings, trees, last = None, None, None, below
    if bucket.tokenwise:
        index = above.where((ranks < 0) & (above >= 0), bucket.rows)
        last = F.pad(torch.full_like(row, -1), (0, 1)).scatter_reduce_(0, index, row, "amax")[:-1]
        below = below.where(ranks == 0, last)
    if bucket.sampled or bucket.tokenwise:
        addresses, tokens = drawn_from.where((ranks <= 0) & (below >= 0), 0), drafted[:, TOKEN].contiguous()
        ratios = torch.zeros(bucket.rows, dtype=torch.float64, device=row.device)
        below, firsts = tokens.take(below.clamp(0, bucket.rows - 1)), firsts.where(ranks == 0, row)
        chains = ChainRows(addresses, below, firsts, ratios, torch.ones_like(ratios))
        if bucket.tokenwise:
            last = last.where(ranks == ONE_SAMPLED, -1)
            siblings = SiblingRows(chains, above.where(ranks < 0, -1), last, tokens, torch.zeros_like(ratios))
    if bucket.ranks:
        trees = _tree_rows(drafted, above.where(ranks > 0, -1), drawn_from, ranks > RECURSIVE, bucket)
    return chains, siblings, trees


def _tree_rows(drafted: Tensor, above: Tensor, drawn_from: Tensor, recursive: Tensor, bucket: ChoiceBucket) -> TreeRows:
    """Returns the rows of trees sampled without replacement.

    Args:
        drafted: the fields of each row's node and its depth, [rows, 4].
        above: the row above each row of a node of such a tree, -1 for other rows, [rows].
        drawn_from: see ``TreeRows``; of all rows that have a distribution.
        recursive: see ``TreeRows``.
    """
    rows, ranks, row, there = bucket.rows, bucket.ranks, torch.arange(bucket.rows, device=drafted.device), above >= 0
    siblings = (above[:, None] == above[None]) & there[:, None] & (row[:, None] > row[None])
    index = (above * ranks + siblings.sum(1)).where(there, rows * ranks)
    children = torch.full_like(row, -1).repeat(ranks + 1)[: rows * ranks + 1].scatter_(0, index, row)[:-1]
    children = children.view(rows, ranks)
    weights = torch.ones(rows, ranks + 1, dtype=torch.float64, device=row.device)
    masses, rests = torch.zeros(2, rows, ranks, dtype=torch.float64, device=row.device)
    return TreeRows(
        drawn_from.where(children[:, 0] >= 0, 0),
        drafted[:, TOKEN].contiguous(),
        children,
        drafted[:, FIELDS].contiguous(),
        recursive,
        torch.ones_like(weights[:, 0]),
        weights,
        masses,
        rests,
        torch.zeros_like(weights[:, 0]),
        bucket.deepest,
    )


def _changed_rows(
    fields: Tensor, requests: Tensor, nodes: Tensor, drafted: Tensor | None, bucket: ChoiceBucket
) -> ChangedRows:
    """Returns the rows for ``DeviceChanges``, with the paths to their nodes.

    Args:
        fields: the fields of rows that changes need.
        requests: the rows of each request.
        nodes: addresses of nodes that the host has not read; 0 for other rows.
        drafted: fields and depths of all nodes, if there are such nodes.
        bucket: the graph's.
    """
    token, up, depth = fields[NODE_TOKEN], fields[NODE_UP], fields[DEPTH]
    if drafted is not None:
        token, up, depth = (
            drafted[:, new].where(nodes != 0, field) for new, field in ((TOKEN, token), (UP, up), (FIELDS, depth))
        )
    at, path = torch.arange(bucket.rows, device=fields.device), list[Tensor]()
    for _ in range(bucket.depth):
        above = up.take(at)
        path.append(token.take(at).where(above > 0, bucket.vocabulary))
        at = at - above
    paths = torch.stack(path, 1) if path else token[:, None][:, :0]
    return ChangedRows(requests, fields[OF], fields[MASK], depth, paths)
