"""Tokens of a step, chosen on the device: one graph behind that of the pass, and one copy of its results.

The requests are those of the compiled kernels (``native.TokenRow``). Every row of logits gets a token, whether the path
leads there or not; the host follows the tokens along the draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.devices import fetched
from foretoken.core.draft import Elsewhere
from foretoken.core.native.sampling import Adjustment, DraftNodes, TokenRow, TokenSource
from foretoken.core.streams import GOLDEN, PrivateStream, Uniform, splitmixed, step_keys
from foretoken.models.device_drafts import FIELDS, SCORE, TOKEN, UP, UnreadDraft
from foretoken.models.runners.cuda.changes import ChangedRows, Changes, ChangeSizes, DeviceChanges, split
from foretoken.models.runners.cuda.graphs import Graphs, Inputs, States
from foretoken.models.runners.functional import ranked
from foretoken.models.runners.triton_kernels import sampling_kernels
from foretoken.models.runners.triton_kernels.rows import ChainRows, SampledRows, TreeRows
from foretoken.models.runners.triton_kernels.steps import doubled

MIN_ROWS = 8  # doubled until all fit
ROWS_AT_ONCE = 64  # bounds the memory of a graph
ROW_FIELDS, FLOAT_FIELDS = 8, 3  # numbers of int64 and of float32 that a row has
OF, MASK, NODE_TOKEN, NODE_UP, DEPTH, CHANGE_FIELDS = range(6)  # fields of rows that only changes of logits need
MEASURES = 3  # of rows beside the token, for sampled chains
NODE_VALUES = FIELDS + 1  # of a node that a pass has read: its fields and its depth, int64
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
    ranks: int = 0  # the largest number of siblings in a sampled tree; 0 without such trees
    deepest: int = 0  # the largest depth of a node that has children in such a tree

    @property
    def measured(self) -> bool:
        """Whether rows have measures."""
        return self.sampled or self.ranks > 0

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
    def choose_tokens(self, rows: Sequence[TokenRow], vocabulary: int, threads: int = 0) -> None:
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
            sampled=any(walk.sampled for walk in walks),
            ranks=max(walk.ranks for walk in walks),
            deepest=max(walk.deepest for walk in walks),
        )
        table = self._filled(bucket, walks)
        if sizes is not None:
            _, rows_of, requests_of, changes_of = split(table, bucket.shapes)
            _fill_changes(rows_of.numpy(), requests_of.numpy(), walks)
            changes.fill(changes_of, sizes)
        results = fetched(self._graphs.run(bucket, Inputs(table), lambda inputs: _compute(inputs, bucket))[RESULTS])
        numbers, at = results.numpy(), 0
        for walk in walks:
            part = numbers[at : (at := at + walk.count)]
            measured = 1 + MEASURES * bucket.measured
            if walk.unread is not None:
                walk.receive(part[1:, measured : measured + FIELDS])
            described = part[:, measured + FIELDS * bucket.unread :]
            if walk.ranks:
                walk.verify_tree(part[:, :measured])
            elif walk.sampled:
                walk.verify(part[:, :measured], described, bucket.listed)
            else:
                walk.follow(np.concatenate((part[:, :1], described), 1), bucket.listed)

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
        depths = np.concatenate([walk.depths for walk in walks])
        nodes = np.concatenate([walk.nodes for walk in walks])
        columns = (
            nodes,
            np.where(nodes, np.repeat(np.cumsum([0, *counts[:-1]]), counts), np.arange(sum(counts))),
            np.concatenate([walk.drawn_from for walk in walks]),
            each([walk.ranks for walk in walks]),
            np.concatenate([walk.addresses for walk in walks]),
            sources,
            noise(bits, positions, depths, sources == TokenSource.RACE).view(np.int64),
            *(each([getattr(each_filter, name) for each_filter in filters], np.float64) for name in FILTER_FIELDS),
        )
        for field, column in zip(fields, columns, strict=True):
            field[: len(column)] = column
        return table


def _fill_changes(fields: NDArray[np.int64], requests: NDArray[np.int64], walks: Sequence[Walk]) -> None:
    """Fills the fields of rows that changes need, and the rows of each request with changes."""
    requests[:], fields[OF], at, number = fields.shape[1], len(requests) - 1, 0, 0
    for walk in walks:
        rows = slice(at, at := at + walk.count)
        if walk.request.changes:
            columns = fields[:, rows]
            requests[number, : walk.count] = range(rows.start, at)
            columns[OF], columns[MASK], columns[DEPTH] = number, walk.masks, walk.depths - walk.request.index
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
        int64 [rows, n]: the token, the measures of sampled chains if there are any, the fields of its node if the host
        has not read all of them, log-probabilities, and those of the drafted token below if there are sampled chains.
    """
    table, *changed = split(inputs.table, bucket.shapes)
    (nodes, firsts, drawn_from, ranks, *fields), kernels = bucket.fields(table), sampling_kernels()
    chains, trees, parts, size = None, None, list[Tensor](), bucket.vocabulary
    drafted = kernels.nodes(nodes) if bucket.unread else None
    if drafted is not None:  # the noise of a node is in the row whose distance from the root's is the node's depth
        row = torch.arange(bucket.rows, device=nodes.device)
        fields[NOISE] = fields[NOISE].take((firsts + drafted[:, FIELDS]).where(ranks == 0, row))  # of trees in its own
        if bucket.sampled:
            below = drafted.roll(-1, 0)  # the node below each row; the last row of a chain has none
            there = ~below[:, SCORE].int().view(torch.float32).isnan() & (ranks == 0)
            ratios = torch.zeros(bucket.rows, dtype=torch.float64, device=nodes.device)
            chains = ChainRows(drawn_from.where(there, 0), below[:, TOKEN].contiguous(), firsts, ratios)
        if bucket.ranks:
            trees = _tree_rows(drafted, (ranks > 0) & (nodes != 0), drawn_from, bucket)
    changes = None if bucket.changes is None else DeviceChanges(changed[2], bucket.changes)
    changed_rows = None if changes is None else _changed_rows(changed[0], changed[1], nodes, drafted, bucket)
    for start in range(0, bucket.rows, ROWS_AT_ONCE):
        rows = SampledRows(*(field[start : start + ROWS_AT_ONCE] for field in fields))
        logits = after = kernels.gathered(rows, size)
        if changes is not None and changed_rows is not None:
            after = changes.applied(logits, changed_rows.part(start, len(logits)))
        results = [kernels.chosen(after, rows, bucket.narrow, chains, start, trees)]
        if trees is not None:
            part = slice(start, start + ROWS_AT_ONCE)
            measures = trees.measures(part).view(torch.int64).where(ranks[part, None] > 0, results[0][:, 1:])
            results = [results[0][:, :1], measures]
        if drafted is not None:
            results.append(drafted[start : start + ROWS_AT_ONCE, :FIELDS])
        if bucket.listed >= 0:
            results.append(kernels.described(logits, results[0][:, 0], ranked(logits, bucket.listed)))
            if chains is not None:
                drafted_below = chains.drafted[start : start + ROWS_AT_ONCE]
                results.append(kernels.described(logits, drafted_below, drafted_below[:, None][:, :0]))
        parts.append(torch.cat(results, 1))
    return {RESULTS: torch.cat(parts)}


def _tree_rows(drafted: Tensor, in_tree: Tensor, drawn_from: Tensor, bucket: ChoiceBucket) -> TreeRows:
    """Returns the rows of sampled trees.

    Args:
        drafted: the fields of each row's node and its depth, [rows, 4].
        in_tree: whether a row may be that of a node of such a tree, [rows].
        drawn_from: see ``TreeRows``; of all rows that have a distribution.
    """
    rows, ranks, row = bucket.rows, bucket.ranks, torch.arange(bucket.rows, device=drafted.device)
    there = in_tree & (drafted[:, SCORE].int().view(torch.float32) > -torch.inf)
    above = (row - drafted[:, UP]).where(there, -1)
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


class Walk:
    """The rows of one request: the root's, then those of the draft's nodes.

    Args:
        request: the request, to which ``follow`` writes the results.

    Attributes:
        tokens: tokens of the nodes.
        parents: the node above each; -1 for the root.
        unread: the draft, if the host has not read it.
        sampled: whether it is a sampled chain.
        ranks: the largest number of siblings of a sampled tree; 0 for other drafts.
        deepest: the largest depth of a node that has children in a sampled tree.
        drawn_from: address of the distribution of the token below each row of a sampled chain; 0 for none.
        count: number of rows.
        nodes: address of each row's node on the device, if the host has not read it; else 0.
        depths: depth of each row; of nodes that the host has not read, all depths in turn.
        addresses: address of each row's logits.
        masks: number of each row's mask among those of changes.
    """

    def __init__(self, request: TokenRow) -> None:
        self.request, stride, self.count = request, 0, 1
        self.tokens, self.parents = list[int](), list[int]()
        self._nodes: DraftNodes | None = None
        self.unread: UnreadDraft | None = request.unread if request.below else None
        self.sampled, self.ranks, self.deepest = False, 0, 0
        if self.unread is not None and self.unread.source.sampled:
            self.ranks, self.deepest = self.unread.source.siblings, max(0, self.unread.source.tree_depth - 1)
            self.sampled = not self.ranks
        depths = [request.index]
        if request.below:
            nodes = self._nodes = DraftNodes.from_address(request.below)
            stride, self.count = nodes.stride, 1 + nodes.nodes
            if self.unread is None:
                self._take(
                    (c_int64 * nodes.nodes).from_address(nodes.ids), (c_int32 * nodes.nodes).from_address(nodes.parents)
                )
            else:
                depths += range(request.index + 1, request.index + self.count)
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        self.depths, rows = np.array(depths), np.arange(self.count)
        self.nodes = (
            np.where(rows, request.node + 8 * NODE_VALUES * (rows - 1), 0) if self.unread is not None else 0 * rows
        )
        self.addresses, self.drawn_from, self.masks = request.logits + 4 * stride * rows, 0 * rows, 0 * rows
        if self.unread is not None and (self.sampled or self.ranks):
            q = self.unread.source.distributions
            self.drawn_from[:-1] = q.data_ptr() + 4 * q.stride(0) * rows[:-1]

    @property
    def reach(self) -> int:
        """Depth of the deepest node, at most."""
        if self.unread is not None:
            return self.unread.tree_depth or self.unread.limit
        return int(self.depths.max()) - self.request.index

    def add_changes(self, changes: Changes, number: int) -> None:
        """Adds the changes of the request."""
        request = self.request
        self.masks[:] = changes.add(number, Adjustment.from_address(request.changes or 0), not request.masks)
        if request.masks:
            self.masks[: len(request.masks)] = [changes.mask(mask) for mask in request.masks]

    def _take(self, tokens: Iterable[int], parents: Iterable[int]) -> None:
        self.tokens, self.parents = list(tokens), list(parents)

    def receive(self, nodes: NDArray[np.int64]) -> None:
        """Takes the fields of the nodes, [nodes, fields], if the host has not read them."""
        if self.unread is not None:
            self.unread.source.receive(nodes.T.astype(np.int32))
            self._take(self.unread.ids, self.unread.parents)

    def verify(self, results: NDArray[np.int64], described: NDArray[np.int64], listed: int) -> None:
        """Writes the verdict of block verification on a sampled chain, as ``verify/block.py``.

        Args:
            results: [rows, 4], see ``chosen`` of ``triton_kernels/sampling.py``.
            described: log-probabilities, see ``_compute``.
            listed: number of tokens that are listed; -1 without log-probabilities.
        """
        count, stream = len(self.tokens), self._stream
        masses, weights, chances = np.ascontiguousarray(results[:, 1:].T).view(np.float64)
        reached = [*weights[: count + 1], 0.0].index(0.0)  # a weight of 0 stays 0
        accepted = count
        if reached <= count or not stream.uniform(count).below(weights[count]):
            accepted = min(reached, count) - 1
            rows = [*zip(weights, masses, results[:, 0] >= 0, strict=True)]
            while accepted and not _leaves(stream.uniform(accepted), *rows[accepted]):
                accepted -= 1
        self._accept([*range(accepted)], int(results[accepted, 0]), chances[:count].tolist())
        if self.request.top_count >= 0:
            self._describe(results[:, 0], described, accepted, listed)

    def _describe(self, chosen: NDArray[np.int64], described: NDArray[np.int64], accepted: int, listed: int) -> None:
        """Writes the log-probabilities of the accepted tokens of a chain, and of the chosen one behind them."""
        assert self._nodes is not None
        pointers = (c_void_p * self._nodes.deepest).from_address(self._nodes.rows)
        levels = [self.request, *(TokenRow.from_address(pointers[depth]) for depth in range(accepted))]
        for at, level in enumerate(levels):
            token, of_token = (
                (self.tokens[at], described[at, -2:]) if at < accepted else (chosen[at], described[at, :2])
            )
            _write(level, np.concatenate(([token], of_token, described[at, 2:])), listed)

    def verify_tree(self, results: NDArray[np.int64]) -> None:
        """Writes the verdict of traversal verification on a sampled tree, as ``verify/tree.py``.

        Args:
            results: [rows, 4], the token of each row and ``TreeRows.measures``.
        """
        reached, weights, chances = np.ascontiguousarray(results[:, 1:].T).view(np.float64)
        path, stream, untested = [-1], self._stream, [list[int]() for _ in range(self.count)]  # children of each row
        for node in reversed(range(len(self.parents))):
            untested[self.parents[node] + 1].append(node)
        while True:
            if children := untested[path[-1] + 1]:
                child = children.pop()
                if reached[child + 1] > 0.0:
                    path.append(child)
            elif path[-1] < 0 or stream.bernoulli(weights[path[-1] + 1], path[-1] + 1):
                break
            else:
                path.pop()
        self._accept(path[1:], int(results[path[-1] + 1, 0]), chances[1 : 1 + len(self.tokens)].tolist())

    @property
    def _stream(self) -> PrivateStream:
        """The random numbers of the verification."""
        (key,) = step_keys(np.array([self.request.noise], np.uint64), np.array([self.request.position]))
        return PrivateStream(int(key))

    def _accept(self, path: Sequence[int], token: int, chances: Sequence[float]) -> None:
        """Writes the accepted nodes and the token behind them.

        Args:
            chances: the draft's probability of each node's token.
        """
        assert self._nodes is not None and self.unread is not None
        pointers = (c_void_p * self._nodes.deepest).from_address(self._nodes.rows)
        levels = [self.request, *(TokenRow.from_address(pointers[depth]) for depth in range(len(path)))]
        for level, number in zip(levels, [*(self.tokens[node] for node in path), token], strict=True):
            level.token = number
        self._nodes.path_count = len(path)
        (c_int32 * len(path)).from_address(self._nodes.path)[:] = list(path)
        law = self.unread.law
        if token >= 0 and isinstance(law, Elsewhere):
            law.drop(chances)

    def follow(self, results: NDArray[np.int64], listed: int) -> None:
        """Writes the results of the root and of the nodes that tokens lead to, as ``DraftWalk`` of token_row.hpp."""
        row, reached, depth = self.request, [-1], 0
        while True:
            _write(row, results[reached[0] + 1], listed)
            below = [
                child
                for node in reached
                for child, parent in enumerate(self.parents)
                if parent == node and self.tokens[child] == row.token
            ]
            if row.token < 0 or not below or self._nodes is None:
                break
            pointers = (c_void_p * self._nodes.deepest).from_address(self._nodes.rows)
            row, reached, depth = TokenRow.from_address(pointers[depth]), below, depth + 1
        if self._nodes is not None:
            self._nodes.path_count, node = depth, reached[0]
            path = (c_int32 * depth).from_address(self._nodes.path)
            while node >= 0:
                depth -= 1
                path[depth], node = node, self.parents[node]


def _leaves(number: Uniform, weight: float, mass: float, possible: bool) -> bool:
    """Returns whether verification ends at a row: with the token that follows there, or because none is possible."""
    leaving = mass + (1.0 - weight)
    left = mass / leaving if possible and leaving > 0.0 else 1.0
    return number.below(weight) and number.below(left)


def _write(row: TokenRow, results: NDArray[np.int64], listed: int) -> None:
    """Writes the token of a row and its log-probabilities."""
    row.token = int(results[0])
    if row.top_count < 0:
        return
    row.logprob, row.rank = float(results[1:2].view(np.float64)[0]), int(results[2])
    ids, logprobs = results[3 : 3 + row.top_count], results[3 + listed :].view(np.float64)
    (c_int64 * row.top_count).from_address(row.top_ids)[:] = ids.tolist()
    (c_double * row.top_count).from_address(row.top_logprobs)[:] = logprobs[: row.top_count].tolist()
