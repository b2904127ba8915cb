"""Tokens of a step, chosen on the device: one graph behind that of the pass, and one copy of its results.

The requests are those of the compiled kernels (``native.TokenRow``). Every row of logits gets a token, whether the path
leads there or not; the host follows the tokens along the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
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
from foretoken.models.runners.cuda.graphs import Graphs, Inputs, States
from foretoken.models.runners.functional import ranked
from foretoken.models.runners.triton_kernels import sampling_kernels
from foretoken.models.runners.triton_kernels.rows import ChainRows, SampledRows, TreeRows
from foretoken.models.runners.triton_kernels.steps import doubled

MIN_ROWS, MIN_CHANGES = 8, 1024  # doubled until all fit
ROWS_AT_ONCE = 64  # bounds the memory of a graph
ROW_FIELDS, CHANGE_FIELDS = (8, 3), (4, 4)  # numbers of int64 and of float32 that a row has, and a change
BANNED, BIASED, SEEN, TIMES, BIAS, REPETITION, FREQUENCY, PRESENCE = range(8)  # fields of changes
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
    changes: int  # number of changed logits, padding included; 0 for none
    unread: bool  # whether there are drafts that the host has not read
    sampled: bool  # whether any of these is a sampled chain
    ranks: int = 0  # the largest number of siblings in a sampled tree; 0 without such trees
    deepest: int = 0  # the largest depth of a node that has children in such a tree

    @property
    def measured(self) -> bool:
        """Whether rows have measures."""
        return self.sampled or self.ranks > 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Lengths of the parts of a table, int64: the fields of rows, and those of changes."""
        return sum(ROW_FIELDS) * self.rows, sum(CHANGE_FIELDS) * self.changes

    def fields(self, table: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the fields of a table; those of float32 fill the first half of their memory."""
        parts = []
        for part, (whole, real) in zip(table.split(self.sizes), (ROW_FIELDS, CHANGE_FIELDS), strict=True):
            count = len(part) // (whole + real)
            fields = part.view(whole + real, count)
            parts.append([*fields[:whole], *(field.view(torch.float32)[:count] for field in fields[whole:])])
        return parts[0], parts[1]


class DeviceChooser:
    """Chooses tokens on a device; a ``TokenChooser``.

    Args:
        graphs: its graphs, on the device of the logits.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs

    @torch.inference_mode()
    def choose_tokens(self, rows: Sequence[TokenRow], vocabulary: int, threads: int = 0) -> None:
        """See ``TokenChooser``. Masks of allowed tokens are not supported."""
        walks = [Walk(request) for request in rows]
        changes = Changes(vocabulary)
        at = 0
        for walk in walks:
            if walk.request.changes:
                changes.add(walk.request, at, walk.tokens, walk.parents)
            at += walk.count
        listed = max(request.top_count for request in rows)
        bucket = ChoiceBucket(
            rows=doubled(at, MIN_ROWS) if at <= ROWS_AT_ONCE else -(-at // ROWS_AT_ONCE) * ROWS_AT_ONCE,
            vocabulary=vocabulary,
            narrow=any(request.filter.top_k > 0 or request.filter.top_p < 1.0 for request in rows),
            listed=-1 if listed < 0 else min(doubled(listed, 1), vocabulary),
            changes=doubled(changes.count, MIN_CHANGES) if changes.count else 0,
            unread=any(walk.unread is not None for walk in walks),
            sampled=any(walk.sampled for walk in walks),
            ranks=max(walk.ranks for walk in walks),
            deepest=max(walk.deepest for walk in walks),
        )
        table = self._filled(bucket, walks, changes)
        results = fetched(self._graphs.run(bucket, Inputs(table), lambda inputs: _compute(inputs, bucket))[RESULTS])
        numbers, at = results.numpy(), 0
        for walk in walks:
            part = numbers[at : (at := at + walk.count)]
            measured = 1 + MEASURES * bucket.measured
            if walk.unread is not None:
                walk.receive(part[1:, measured : measured + FIELDS])
            if walk.ranks:
                walk.verify_tree(part[:, :measured])
            elif walk.sampled:
                walk.verify(part[:, :measured])
            else:
                described = part[:, measured + FIELDS * bucket.unread :]
                walk.follow(np.concatenate((part[:, :1], described), 1), bucket.listed)

    def _filled(self, bucket: ChoiceBucket, walks: Sequence[Walk], changes: Changes) -> Tensor:
        """Returns the table of all requests in the host's memory."""
        table = torch.zeros(sum(bucket.sizes), dtype=torch.int64, pin_memory=self._graphs.pinned)
        fields, changed = ([field.numpy() for field in fields] for fields in bucket.fields(table))
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
        changes.fill(changed, bucket.rows * bucket.vocabulary)
        return table


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
        has not read all of them, and log-probabilities.
    """
    fields, changed = bucket.fields(inputs.table)
    (nodes, firsts, drawn_from, ranks, *fields), kernels, size = fields, sampling_kernels(), bucket.vocabulary
    chains, trees, parts = None, None, list[Tensor]()
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
    for start in range(0, bucket.rows, ROWS_AT_ONCE):
        rows = SampledRows(*(field[start : start + ROWS_AT_ONCE] for field in fields))
        logits = kernels.gathered(rows, size)
        after = applied(logits, changed, start * size) if bucket.changes else logits
        results = [kernels.chosen(after, rows, bucket.narrow, chains, start, trees)]
        if trees is not None:
            part = slice(start, start + ROWS_AT_ONCE)
            measures = trees.measures(part).view(torch.int64).where(ranks[part, None] > 0, results[0][:, 1:])
            results = [results[0][:, :1], measures]
        if drafted is not None:
            results.append(drafted[start : start + ROWS_AT_ONCE, :FIELDS])
        if bucket.listed >= 0:
            results.append(kernels.described(logits, results[0][:, 0], ranked(logits, bucket.listed)))
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
        self.addresses, self.drawn_from = request.logits + 4 * stride * rows, 0 * rows
        if self.unread is not None and (self.sampled or self.ranks):
            q = self.unread.source.distributions
            self.drawn_from[:-1] = q.data_ptr() + 4 * q.stride(0) * rows[:-1]

    def _take(self, tokens: Iterable[int], parents: Iterable[int]) -> None:
        self.tokens, self.parents = list(tokens), list(parents)

    def receive(self, nodes: NDArray[np.int64]) -> None:
        """Takes the fields of the nodes, [nodes, fields], if the host has not read them."""
        if self.unread is not None:
            self.unread.source.receive(nodes.T.astype(np.int32))
            self._take(self.unread.ids, self.unread.parents)

    def verify(self, results: NDArray[np.int64]) -> None:
        """Writes the verdict of block verification on a sampled chain, as ``verify/block.py``.

        Args:
            results: [rows, 4], see ``chosen`` of ``triton_kernels/sampling.py``.
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

    def verify_tree(self, results: NDArray[np.int64]) -> None:
        """Writes the verdict of traversal verification on a sampled tree, as ``verify/tree.py``.

        Args:
            results: [rows, 4], the token of each row and ``TreeRows.measures``.
        """
        reached, weights, chances = np.ascontiguousarray(results[:, 1:].T).view(np.float64)
        path, stream = [-1], self._stream
        untested = [iter([node for node, above in enumerate(self.parents) if above == -1])]
        while True:
            child = next(untested[-1], None)
            if child is not None:
                if reached[child + 1] > 0.0:
                    path.append(child)
                    untested.append(iter([node for node, above in enumerate(self.parents) if above == child]))
            elif path[-1] < 0 or stream.bernoulli(weights[path[-1] + 1], path[-1] + 1):
                break
            else:
                path.pop()
                untested.pop()
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


class Changes:
    """The changes of a step's rows, collected request by request.

    Args:
        vocabulary: number of logits of a row.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._banned, self._biased, self._seen = (list[tuple[NDArray[Any], ...]]() for _ in range(3))

    @property
    def count(self) -> int:
        """Number of columns that ``fill`` writes."""
        return max(sum(len(part[0]) for part in parts) for parts in (self._banned, self._biased, self._seen))

    def add(self, request: TokenRow, first: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Adds the changes of a request's rows, as ``DraftWalk`` of token_row.hpp makes them.

        Args:
            request: the request.
            first: the root's row, which the rows of the nodes follow.
            tokens: tokens of the nodes.
            parents: the node above each; -1 for the root.
        """
        change = Adjustment.from_address(request.changes)
        banned, ends = _held(c_int64, change.banned, change.banned_count), _held(c_int64, change.ends, change.end_count)
        biased, biases = (
            _held(kind, address, change.biased_count)
            for kind, address in ((c_int64, change.biased), (c_float, change.biases))
        )
        penalties = np.array([[change.repetition], [change.frequency], [change.presence]], np.float32)
        seen, times = (
            _held(kind, address, change.seen_count)
            for kind, address in ((c_int64, change.seen), (c_int32, change.generated))
        )
        before, depths = [(seen, times)], [0]
        for row in range(len(tokens) + 1):
            if row:
                above = parents[row - 1] + 1
                depths.append(depths[above] + 1)
                before.append(_counted(*before[above], tokens[row - 1]))
            self._place(self._banned, first + row, banned)
            if depths[row] < change.end_steps:
                self._place(self._banned, first + row, ends)
            self._place(self._biased, first + row, biased, biases)
            if (penalties != [[1.0], [0.0], [0.0]]).any():
                ids, counts = before[row]
                self._place(self._seen, first + row, ids, counts, *np.broadcast_to(penalties, (3, len(ids))))

    def _place(self, parts: list[tuple[NDArray[Any], ...]], row: int, ids: NDArray[Any], *values: NDArray[Any]) -> None:
        """Adds the elements of a row, and their values. Ids beyond the row change nothing."""
        inside = (ids >= 0) & (ids < self._vocabulary)
        if inside.any():
            parts.append((ids[inside] + row * self._vocabulary, *(value[inside] for value in values)))

    def fill(self, fields: Sequence[NDArray[Any]], padding: int) -> None:
        """Writes the fields that ``applied`` reads. padding: an element behind all rows."""
        fields[REPETITION][:] = 1.0
        for names, parts in (
            ((BANNED,), self._banned),
            ((BIASED, BIAS), self._biased),
            ((SEEN, TIMES, REPETITION, FREQUENCY, PRESENCE), self._seen),
        ):
            fields[names[0]][:] = padding
            for name, column in zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=bool(parts)):
                fields[name][: len(column)] = column


def applied(logits: Tensor, fields: Sequence[Tensor], first: int) -> Tensor:
    """Returns a copy of logits [rows, V] with their changes. first: number of elements before these rows."""
    banned, biased, seen, times, bias, repetition, frequency, presence = fields
    size = logits.numel()
    banned, biased, seen = (
        torch.where((at >= first) & (at < first + size), at - first, size) for at in (banned, biased, seen)
    )
    flat = torch.cat((logits.flatten(), logits.new_zeros(1)))  # the last element stands for those of other rows
    flat.index_fill_(0, banned, -torch.inf)
    flat.index_add_(0, biased, bias)
    values = flat[seen]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(times > 0, values - (frequency * times.float() + presence), values)
    return flat.index_copy_(0, seen, values)[:-1].view_as(logits)


def _held(kind: Any, address: int | None, count: int) -> NDArray[Any]:
    """Returns a copy of an array in the host's memory; an empty one where there is none."""
    return np.array((kind * count).from_address(address)) if address and count else np.empty(0, kind)


def _counted(
    ids: NDArray[np.int64], times: NDArray[np.int32], token: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns the counts of generated tokens with one more."""
    at = np.flatnonzero(ids == token)
    if not len(at):
        return np.append(ids, token), np.append(times, np.int32(1))
    times = times.copy()
    times[at] += 1
    return ids, times
