"""Rows of the draft of a request for tokens, and the verdict that the device's results of all rows lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.core.draft import Elsewhere, TopPlusSampledElsewhere, WithoutReplacementElsewhere
from foretoken.core.native.sampling import Adjustment, DraftNodes, TokenRow
from foretoken.core.streams import PrivateStream, Uniform, step_key
from foretoken.models.device_drafts import FIELDS, UnreadDraft
from foretoken.models.runners.cuda.changes import Changes

ONE_SAMPLED, TOKENWISE = -1, -2  # for ``Walk.ranks``
RECURSIVE = 2**16  # added to ``Walk.ranks`` of trees verified from the root down
Measures = Sequence[float]
Verdict = tuple[list[int], Measures]  # accepted nodes, the draft's probability of each node
NODE_VALUES = FIELDS + 1  # of a node that a pass has read: its fields and its depth, int64


class Walk:
    """The rows of one request: the root's, then those of the draft's nodes.

    Args:
        request: the request, to which ``follow`` writes the results.

    Attributes:
        tokens: tokens of the nodes.
        parents: the node above each; -1 for the root.
        unread: the draft, if the host has not read it.
        law: the law of a sampled one; None for other drafts.
        ranks: the largest number of siblings sampled without replacement, see ``RECURSIVE``; ``ONE_SAMPLED`` for trees
            of which the last sibling alone is sampled, ``TOKENWISE`` for chains verified token by token, 0 for other
            drafts.
        deepest: the largest depth of a node that has siblings sampled without replacement below it.
        drawn_from: address of the distribution of the sampled tokens below each row; 0 for none.
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
        self.law, self.ranks, self.deepest = None if self.unread is None else self.unread.source.law, 0, 0
        self._rule: Callable[..., Verdict] = Walk._block
        if self.unread is not None and self.law is WithoutReplacementElsewhere:
            self.ranks, self.deepest = self.unread.source.siblings, self.unread.source.tree_depth - 1
            self.ranks += RECURSIVE * request.tokenwise
            self._rule = Walk._recursive if request.tokenwise else Walk._traversal
        elif self.law is TopPlusSampledElsewhere:
            self.ranks, self._rule = ONE_SAMPLED, Walk._tokenwise
        elif self.law is not None and request.tokenwise:
            self.ranks, self._rule = TOKENWISE, Walk._tokenwise
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
        self.depths, rows, none = depths, range(self.count), [0] * self.count
        self.addresses = [request.logits + 4 * stride * row for row in rows]
        self.nodes, self.drawn_from, self.masks = none, none, none
        if self.unread is not None:
            self.nodes = [0, *(request.node + 8 * NODE_VALUES * row for row in rows[:-1])]
            if self.law is not None:
                q = self.unread.source.distributions
                first, step = q.data_ptr(), 4 * q.stride(0)
                self.drawn_from = [*(first + step * row for row in rows[:-1]), 0]

    @property
    def reach(self) -> int:
        """Depth of the deepest node, at most."""
        if self.unread is not None:
            return self.unread.tree_depth or self.unread.limit
        return max(self.depths) - self.request.index

    def add_changes(self, changes: Changes, number: int) -> None:
        """Adds the changes of the request."""
        request = self.request
        mask = changes.add(number, Adjustment.from_address(request.changes or 0), not request.masks)
        own = [changes.mask(each) for each in request.masks]
        self.masks = [*own, *[mask] * (self.count - len(own))]

    def _take(self, tokens: Iterable[int], parents: Iterable[int]) -> None:
        self.tokens, self.parents = list(tokens), list(parents)

    def receive(self, *fields: list[Any]) -> None:
        """Takes the fields of the nodes; see ``UnreadChain.receive``."""
        assert self.unread is not None
        self.unread.source.receive(*fields)
        self._take(self.unread.ids, self.unread.parents)

    def verify(self, chosen: list[int], measures: list[Measures], described: NDArray[np.int64], listed: int) -> None:
        """Writes the verdict on a sampled draft.

        Args:
            chosen: the token of each row.
            measures: the measures of each row.
            described: log-probabilities, see ``_compute``.
            listed: number of tokens that are listed; -1 without log-probabilities.
        """
        path, chances = self._rule(self, chosen, *zip(*measures, strict=True))
        self._accept(path, chosen[path[-1] + 1 if path else 0], chances[: len(self.tokens)])
        if self.request.top_count >= 0:
            self._describe(path, chosen, described, listed)

    def _block(self, chosen: list[int], masses: Measures, weights: Measures, chances: Measures) -> Verdict:
        """Returns the path that block verification accepts, as ``verify/block.py``, and the draft's probabilities.

        The measures are those of ``chosen`` of ``triton_kernels/sampling.py``.
        """
        count, stream = len(self.tokens), self._stream
        reached = [*weights[: count + 1], 0.0].index(0.0)  # a weight of 0 stays 0
        accepted = count
        if reached <= count or not stream.uniform(count).below(weights[count]):
            accepted = min(reached, count) - 1
            while accepted and not _leaves(
                stream.uniform(accepted), weights[accepted], masses[accepted], chosen[accepted] >= 0
            ):
                accepted -= 1
        return [*range(accepted)], chances

    def _describe(self, path: Sequence[int], chosen: list[int], described: NDArray[np.int64], listed: int) -> None:
        """Writes the log-probabilities of the accepted tokens and of the chosen one behind them."""
        rows = [0, *(node + 1 for node in path)]
        for row, below, level in zip(rows, [*rows[1:], None], self._levels(len(path)), strict=True):
            if below is None:
                token, of_token = chosen[row], described[row, :2]
            else:
                token, of_token = self.tokens[below - 1], described[below, -2:]
            level.token = token
            _write(level, np.concatenate((of_token, described[row, 2:])), listed)

    def _traversal(self, _: object, reached: Measures, weights: Measures, chances: Measures) -> Verdict:
        """Returns the same of traversal verification, as ``verify/tree.py``; see ``TreeRows.measures``."""
        path, stream, untested = [-1], self._stream, [*map(iter, self._children)]
        while True:
            if (child := next(untested[path[-1] + 1], None)) is not None:
                if reached[child + 1] > 0.0:
                    path.append(child)
            elif path[-1] < 0 or stream.bernoulli(weights[path[-1] + 1], path[-1] + 1):
                return path[1:], chances[1:]
            else:
                path.pop()

    def _recursive(self, _: object, ratios: Measures, __: Measures, chances: Measures) -> Verdict:
        """Returns the same of recursive rejection, as ``verify/tree.py``; see ``TreeRows.measures``."""
        path, stream, children = list[int](), self._stream, self._children
        while True:
            below = children[path[-1] + 1 if path else 0]
            child = next((child for child in below if stream.bernoulli(ratios[child + 1], child)), None)
            if child is None:
                return path, chances[1:]
            path.append(child)

    def _tokenwise(self, chosen: list[int], ratios: Measures, _: Measures, chances: Measures) -> Verdict:
        """Returns the same of greedy multi-draft verification, and of ``verify/token.py``; see ``SiblingRows``."""
        path, stream, children = list[int](), self._stream, self._children
        while True:
            row = path[-1] + 1 if path else 0
            below, token = children[row], chosen[row]
            if below and stream.bernoulli(ratios[row], below[-1]):
                path.append(below[-1])
            elif self.ranks == ONE_SAMPLED and (landed := [child for child in below if self.tokens[child] == token]):
                path += landed
            else:
                return path, chances[1:]

    @property
    def _children(self) -> list[list[int]]:
        """The nodes below each row, in order."""
        children = [list[int]() for _ in range(self.count)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return children

    @property
    def _stream(self) -> PrivateStream:
        """The random numbers of the verification."""
        return PrivateStream(step_key(self.request.noise, self.request.position))

    def _accept(self, path: Sequence[int], token: int, chances: Sequence[float]) -> None:
        """Writes the accepted nodes and the token behind them.

        Args:
            chances: the draft's probability of each node's token.
        """
        assert self._nodes is not None and self.unread is not None
        for level, number in zip(self._levels(len(path)), [*(self.tokens[node] for node in path), token], strict=True):
            level.token = number
        self._nodes.path_count = len(path)
        (c_int32 * len(path)).from_address(self._nodes.path)[:] = list(path)
        law = self.unread.law
        if token >= 0 and isinstance(law, Elsewhere):
            law.drop(chances)

    def _levels(self, depth: int) -> list[TokenRow]:
        """Returns the requests of the root and of accepted nodes up to a depth."""
        assert self._nodes is not None
        pointers = (c_void_p * self._nodes.deepest).from_address(self._nodes.rows)
        return [self.request, *(TokenRow.from_address(pointers[at]) for at in range(depth))]

    def follow(self, chosen: list[int], described: NDArray[np.int64], listed: int) -> None:
        """Writes the results of the root and of the nodes that tokens lead to, as ``DraftWalk`` of token_row.hpp."""
        row, reached, depth = self.request, [-1], 0
        while True:
            row.token = chosen[reached[0] + 1]
            if row.top_count >= 0:
                _write(row, described[reached[0] + 1], listed)
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
    """Writes the log-probabilities of a row."""
    row.logprob, row.rank = float(results[:1].view(np.float64)[0]), int(results[1])
    ids, logprobs = results[2 : 2 + row.top_count], results[2 + listed :].view(np.float64)
    (c_int64 * row.top_count).from_address(row.top_ids)[:] = ids.tolist()
    (c_double * row.top_count).from_address(row.top_logprobs)[:] = logprobs[: row.top_count].tolist()
