"""The rows of a pass as one table of integers, which is copied to the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.device_drafts import NODE_BYTES, UnreadDraft, fields_of
from foretoken.models.runners.base import Move
from foretoken.models.runners.cuda.page_cache import Moves, PageCache, Places
from foretoken.models.runners.layout import AttentionSizes
from foretoken.models.runners.linear import FIXED_ROWS
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.runners.triton_kernels import attention_kernels
from foretoken.models.runners.triton_kernels.rows import PassRows
from foretoken.models.runners.triton_kernels.steps import Steps, StepSizes, doubled
from foretoken.models.state.pages import PAGE

MIN_KEYS, MIN_DEPTH = 512, 8  # doubled until all rows, or all trees, fit
FEW_ROWS = 512  # up to these, rows are padded to multiples of ``FIXED_ROWS``
MANY_ROWS = 128  # more rows are padded to multiples of this, so that fewer graphs are captured
MAX_ROWS = 1024  # passes of more rows are not captured

# Rows of the table: the fields of ``rows.PassRows``; in OUTPUTS, indices of rows of the pass; for nodes that only the
# device has, their addresses and the bytes from a field to the next one. Pages follow the paths.
TOKENS, POSITIONS, COUNTS, ENDS, PLACES, PREFIXES, TILES, SIZES, OUTPUTS, NODES, STRIDES, PATHS = range(12)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Properties of a pass that a CUDA graph depends on.

    Attributes:
        rows: rows of the pass, padding included.
        longest: number of cache rows that any sequence may have.
        depth: depth of the deepest draft tree; 0 if all drafts are chains.
        taps: layers whose hidden states are returned.
        features: whether the input is features instead of tokens alone.
        outputs: rows whose logits are computed, padding included; 0 for none.
        ranks: number of the likeliest tokens of each of these that are returned in place of the logits; 0 for logits.
        steps: sizes of the steps of recurrent layers; None without them.
        fused: whether the input is a target's states, which the pass makes features from.
        unread: whether there are drafts that the host has not read.
        moved: number of sequences whose accepted rows the pass may move first.
    """

    rows: int
    longest: int
    depth: int
    taps: tuple[int, ...]
    features: bool
    outputs: int
    ranks: int
    steps: StepSizes | None = None
    fused: bool = False
    unread: bool = False
    moved: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the table."""
        return PATHS + self.depth + self.longest // PAGE + self.move_rows, self.rows

    @property
    def move_rows(self) -> int:
        """Rows of the table for moves, at its end: the first move of each sequence, and the fields of moves."""
        return 5 if self.moved else 0

    @staticmethod
    def of(plan: PassPlan, taps: Sequence[int], logits: bool) -> Bucket:
        """Returns the smallest bucket that holds the plan."""
        depth = max(part.draft.tree_depth for part in plan.parts)
        rows = padded(len(plan.tokens))
        return Bucket(
            rows=rows,
            longest=doubled(plan.reach, MIN_KEYS),
            depth=doubled(depth, MIN_DEPTH) if depth else 0,
            taps=tuple(sorted(set(taps))),
            features=plan.features is not None or plan.states is not None,
            outputs=padded(len(plan.outputs)) if logits else 0,
            ranks=1 + plan.ranks if logits and plan.argmax_only else 0,
            steps=None if plan.replay is None else StepSizes.of(plan.replay),
            fused=plan.states is not None,
            unread=any(isinstance(part.draft, UnreadDraft) for part in plan.parts),
            moved=min(doubled(len(plan.parts), 1), rows - 1) if depth and plan.replay is None else 0,
        )


def padded(count: int) -> int:
    """Returns a number of rows with padding."""
    step = MANY_ROWS if FEW_ROWS < count <= MAX_ROWS else FIXED_ROWS
    return -(-count // step) * step


@dataclass(frozen=True)
class RowLayout:
    """The layout of a pass on the device, for ``TorchRunner``.

    Attributes:
        tokens: the token of each row, int64 [R].
        positions: the position of each row, int64 [R].
        rows: cache rows and visible keys of the rows.
        cache: the KV cache.
        biases: ALiBi's biases; see ``attention.attend_rows``.
        steps: the steps of recurrent layers; None without them.
    """

    tokens: Tensor
    positions: Tensor
    rows: PassRows
    cache: PageCache
    biases: Tensor | None = None
    steps: Steps | None = None

    @property
    def counts(self) -> Tensor:
        """Number of keys of each row, 0 for padding, int64 [R]."""
        return self.rows.counts

    @staticmethod
    def of(
        table: Tensor, bucket: Bucket, cache: PageCache, biases: Tensor | None = None, steps: Tensor | None = None
    ) -> RowLayout:
        """Reads a table on the device, and the one of ``fill_steps``."""
        rows = PassRows(
            counts=table[COUNTS],
            ends=table[ENDS],
            pages=table[PATHS + bucket.depth :][: bucket.longest // PAGE],
            places=table[PLACES],
            prefixes=table[PREFIXES],
            paths=table[PATHS : PATHS + bucket.depth],
            tiles=table[TILES],
            sizes=table[SIZES],
            longest=bucket.longest,
        )
        order = None if steps is None or bucket.steps is None else Steps.of(steps, bucket.steps)
        return RowLayout(table[TOKENS], table[POSITIONS], rows, cache, biases, order)

    def attend(
        self,
        layer: int,
        queries_keys: Tensor,
        values: Tensor,
        a: AttentionSizes,
        view: tuple[int, bool],
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes new keys and values and computes attention; see ``runners.layout.Layout``."""
        queries, fresh = queries_keys[:, : a.heads], queries_keys[:, a.heads :]
        pages, kernels = self.cache.layer(layer), attention_kernels()
        if fresh.shape[1]:
            kernels.store(fresh, values, pages, self.rows)
        window, ordered = view
        rows = replace(self.rows, ends=self.rows.counts) if ordered else self.rows
        factors = a.scale, window, a.attention_softcap, sinks, self.biases
        mixed: Tensor = kernels.attend_rows(queries, pages, rows, *factors)
        return mixed.flatten(1)


def move_rows(cache: PageCache, moves: Sequence[Move]) -> None:
    """Moves the rows of accepted draft trees; see ``Runner.move_all``."""
    cache.move(moves, attention_kernels())


def move_first(cache: PageCache, table: Tensor, bucket: Bucket) -> None:
    """Moves the rows that the table of a pass lists."""
    firsts, moves = table[-bucket.move_rows, : bucket.moved + 1], table[1 - bucket.move_rows :]
    attention_kernels().move(firsts, moves, cache.blocks, cache.widest)


def fill(
    plan: PassPlan, bucket: Bucket, pages: Sequence[Places], tile: int, pinned: bool, moves: Moves | None = None
) -> Tensor:
    """Returns the plan as a table, int64, in memory that torch keeps until it is copied.

    Padding is token 0 at position 0. It sees no key and is not written to the cache.

    Args:
        bucket: the bucket that holds it.
        pages: positions of each sequence's pages (``PageCache.reserve``).
        tile: rows of a tile, at most.
        pinned: whether the memory is pinned.
        moves: rows that the pass moves first; None for none.
    """
    filled = torch.zeros(bucket.shape, dtype=torch.int64, pin_memory=pinned)
    table = filled.numpy()
    count = len(plan.tokens)
    table[TOKENS, :count], table[POSITIONS, :count] = plan.tokens, plan.positions
    table[COUNTS, :count] = table[POSITIONS, :count] + 1
    table[OUTPUTS, : len(plan.outputs)] = plan.outputs
    at = 0
    tiles: list[tuple[int, int]] = []
    for part, held in zip(plan.parts, pages, strict=True):
        columns = table[:, at : at + part.count]
        columns[ENDS] = part.end if part.mutual else columns[COUNTS]
        columns[PREFIXES] = part.end
        columns[PLACES] = range(part.first, part.end)
        columns[PATHS + bucket.depth :][: len(held)] = held[:, None]
        branches = part.draft.tree_depth > 0
        if branches or isinstance(part.draft, UnreadDraft):
            _fill_nodes(columns, part, bucket.depth)
        step = 1 if branches else tile
        tiles += [(row, min(step, at + part.count - row)) for row in range(at, at + part.count, step)]
        at += part.count
    table[[TILES, SIZES], : len(tiles)] = np.array(tiles).T
    if moves is not None:
        count = len(moves.pairs)
        table[-bucket.move_rows, : bucket.moved + 1] = count  # of sequences without moves
        table[-bucket.move_rows, : len(moves.firsts)] = moves.firsts
        table[1 - bucket.move_rows :, :count] = np.array(moves.pairs).T
    return filled


def _fill_nodes(columns: NDArray[np.int64], part: Part, depth: int) -> None:
    """Fills the columns of the nodes of a tree, or of a draft that the device has to read."""
    draft = part.draft
    nodes = columns[:, part.count - draft.limit + max(0, part.first - part.nodes_at) :]
    if draft.tree_depth:
        nodes[PREFIXES] = part.nodes_at
    if isinstance(draft, UnreadDraft):
        first, stride = draft.source.places
        nodes[NODES], nodes[STRIDES] = first + NODE_BYTES * np.arange(draft.limit), stride
    else:
        nodes[PATHS : PATHS + depth] = paths(part, depth).T


def read_nodes(table: Tensor, bucket: Bucket) -> Tensor:
    """Completes the table of a pass with the nodes of drafts that the host has not read.

    Returns:
        int64 [outputs, 4], the fields of each output's node (``device_drafts``) and its depth; 0 for other outputs.
    """
    rows = table[TOKENS], table[POSITIONS], table[COUNTS], table[ENDS]
    paths = table[PATHS : PATHS + bucket.depth]
    nodes: Tensor = attention_kernels().read_nodes(
        table[NODES], table[STRIDES], *rows, table[PLACES], table[PREFIXES], paths
    )
    return nodes.index_select(0, table[OUTPUTS, : bucket.outputs])


def read_states(addresses: Tensor, width: int, held: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Returns hidden states that lie elsewhere on the device; see the kernel."""
    states: Tensor = attention_kernels().read_states(addresses, width, held, dtype)
    return states


def write_states(addresses: Tensor, states: Tensor) -> None:
    """Writes hidden states to memory elsewhere on the device; see the kernel."""
    attention_kernels().write_states(addresses, states)


def receive(plan: PassPlan, nodes: NDArray[np.int64]) -> None:
    """Passes the results of ``read_nodes`` to the drafts."""
    tokens, up, scores = fields_of(nodes)
    for part, end in zip(plan.parts, accumulate(plan.output_counts), strict=True):
        if isinstance(part.draft, UnreadDraft):
            rows = slice(end - part.draft.limit, end)
            part.draft.source.receive(tokens[rows], up[rows], scores[rows])


def paths(part: Part, depth: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Returns the cache rows of the path to each draft node that the part computes, [nodes, depth], padded by zeros."""
    draft: Draft = part.draft
    scored = max(0, part.first - part.nodes_at)  # nodes whose rows an earlier pass computed
    table = np.zeros((len(draft), depth), np.int64)
    for node, parent in enumerate(draft.parents):
        if parent >= 0:
            table[node] = table[parent]
        table[node, draft.depths[node] - 1] = part.nodes_at + node
    return table[scored:]
