"""The tables of drafts of several levels, which one CUDA graph reads.

Positions, cache rows and pages of every level are known before any token is, so they are copied to the device with the
rows of the first pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.sampling import SamplingLaw
from foretoken.models.chains import LATER, TREE_KINDS, TYPICAL, ChainRequest, DraftStop, DraftVocabulary, Draws
from foretoken.models.runners.base import DeeperLayer
from foretoken.models.runners.cuda.changes import ChangeSizes, DraftChanges, LevelChanges, split
from foretoken.models.runners.cuda.layout import FEW_ROWS, Bucket, fill, padded
from foretoken.models.runners.cuda.page_cache import Places
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.runners.triton_kernels.steps import doubled
from foretoken.models.state.pages import PAGE

# Rows of the table of sequences; those of random numbers follow, one for each level. TREE is whether it is no chain.
FIRST, ROOT, TREE, BUDGET, STEPS, SOURCE, TOP_K, TEMPERATURE, FLOOR, MIN_P, TOP_P, THRESHOLD, NOISE = range(13)
# Rows of the table of a level.
POSITIONS, COUNTS, PLACES, SIZES, LEVEL_ROWS = range(5)
TILES, PREFIXES, PAGES = range(3)  # rows of the table that all levels share
# Rows of the table of a deeper layer, of sequences: the row of the layer before whose state the drafted token reads,
# and the addresses of the states that come in and go out; of rows: that whose state each reads, all behind the states
# that come in.
ROOTS, CARRIED, REPLACED, SOURCES = range(4)
LIKELIEST, FRACTION, RACE = range(3)  # values of SOURCE
UNFILTERED = SamplingLaw().kept
MIN_KEPT = 8  # nodes of a tree that are returned, doubled until all fit


class Tables(NamedTuple):
    """The tables of a draft, int64."""

    sequences: Tensor
    shared: Tensor  # of all levels
    levels: Tensor  # [levels - 1, ...]
    states: Tensor  # addresses of the target's states
    below: Tensor  # of sampled trees, by sequence and depth; see ``reach_below``
    changes: Tensor  # of logits, see ``DraftChanges``
    passes: list[Tensor]
    deeper: list[Tensor]  # the new rows of deeper layers
    links: list[Tensor]  # rows and addresses of the states that these read
    pages: list[Tensor]  # of drafted tokens in the caches of deeper layers, as those of ``shared``


@dataclass(frozen=True, slots=True)
class DraftBucket:
    """Properties of drafts that a CUDA graph depends on.

    Attributes:
        passes: the pass over injected rows, if there are any, and the first pass of drafts.
        sequences: number of drafts, padding included.
        levels: number of levels.
        width: nodes that are expanded on a level of a tree; 1 for chains.
        siblings: candidates of a node of a tree, or its children; 1 for chains.
        kind: of trees, one of ``TREE_KINDS``; chains are among ranked ones.
        kept: number of nodes of a tree that are returned; 0 for chains.
        mixed: whether there are chains among trees.
        outputs: rows of the first pass that have logits, padding included.
        foreseen: whether these are all levels of each draft, so that no other pass follows.
        sources: the kinds of tokens among the drafts, of ``SOURCE``.
        filtered: whether any distribution has a filter.
        distributions: whether the distributions of tokens are returned.
        tokens: size and width of the vocabulary, and the identity of its tokens and of its successors.
        changes: sizes of the changes of logits; None for none.
        stop: the score by which chains end, whether it reads states, and whether its threshold is of each token; None
            for none.
        fed: number, width and type of the target's states of a row, if ``passes[0]`` reads them where they are.
        deeper: the new rows of layers that draft a level each.
    """

    passes: tuple[Bucket, ...]
    sequences: int
    levels: int
    width: int
    siblings: int
    kind: str
    kept: int
    mixed: bool
    outputs: int
    foreseen: bool
    sources: tuple[int, ...]
    filtered: bool
    distributions: bool
    tokens: tuple[int, int, int, int]
    fed: tuple[int, int, torch.dtype] | None
    changes: ChangeSizes | None = None
    stop: DraftStop | None = None
    deeper: tuple[Bucket, ...] = ()

    @property
    def first(self) -> Bucket:
        """The first pass of drafts."""
        return self.passes[-1]

    @property
    def drawn(self) -> bool:
        """Whether the drafts are sampled trees."""
        return self.kind != TREE_KINDS[0]

    @property
    def rows(self) -> int:
        """Rows of a level after the first, padding included."""
        return padded(self.sequences * self.width)

    @staticmethod
    def of(
        plans: Sequence[PassPlan],
        requests: Sequence[ChainRequest],
        vocabulary: DraftVocabulary,
        state: int | None,
        foreseen: bool,
        deeper: int = 0,
        changes: ChangeSizes | None = None,
    ) -> DraftBucket:
        """Returns the smallest bucket that holds the drafts: chains, and trees of one width.

        ``plans`` are those of ``passes``, and the new rows of ``deeper`` layers. ``reach`` includes the cache rows of
        later passes.
        """
        below, plans = plans[len(plans) - deeper :], plans[: len(plans) - deeper]
        *before, plan = plans
        trees, draws = [each.tree for each in requests if each.tree], [each.draws for each in requests if each.draws]
        limit = max([0, *(each.limit for each in requests if each.tree)])
        siblings = max([1, *(min(tree.width, vocabulary.size) for tree in trees)])
        kind = trees[0].kind if trees else TREE_KINDS[0]
        sources = {LIKELIEST} if len(draws) < len(requests) else set[int]()
        sources |= {source_of(draw) for draw in draws}
        levels = max(request.levels for request in requests)
        nodes = siblings + (levels - 1) * siblings**2 if kind == TREE_KINDS[0] else limit
        sequences = padded_sequences(len(requests))
        return DraftBucket(
            passes=(
                *(_coarse(Bucket.of(rows, (), False)) for rows in before),
                _coarse(Bucket.of(plan, () if state is None else (state,), True)),
            ),
            sequences=sequences,
            levels=levels,
            width=level_width(requests, vocabulary.size),
            siblings=siblings,
            kind=kind,
            kept=min(nodes, doubled(limit, MIN_KEPT)) if trees else 0,
            mixed=0 < len(trees) < len(requests),
            outputs=padded(len(plan.outputs) if foreseen else sequences),
            foreseen=foreseen,
            sources=tuple(sorted(sources)),
            filtered=any(draw.kept[1:] != UNFILTERED[1:] for draw in draws),
            distributions=any(draw.rows for draw in draws),
            tokens=(vocabulary.size, vocabulary.width, id(vocabulary.ids), id(vocabulary.after)),
            fed=None if plans[0].states is None else plans[0].states.kind,
            changes=changes,
            stop=next((replace(request.stop, threshold=0.0) for request in requests if request.stop), None),
            deeper=tuple(_coarse(Bucket.of(rows, (), False)) for rows in below),
        )

    @property
    def size(self) -> int:
        """Number of elements of all tables."""
        return sum(math.prod(shape) for shape in self.tables)

    @property
    def tables(self) -> list[tuple[int, ...]]:
        """Shapes of the tables, in the order of ``Tables``."""
        pages, passes = self.first.longest // PAGE, 0 if self.foreseen else self.levels - 1
        rows = self.rows if passes else 0
        return [
            (NOISE + max(self.levels, self.kept * self.drawn), self.sequences),
            (PAGES + pages, rows),
            (passes, LEVEL_ROWS, rows),
            (self.passes[0].rows, 0 if self.fed is None else self.fed[0]),
            (self.sequences, self.levels, self.kept * self.drawn),
            (0 if self.changes is None else LevelChanges.size(self.changes, self.sequences),),
            *(each.shape for each in (*self.passes, *self.deeper)),
            *((SOURCES + 1, max(each.rows, self.sequences)) for each in self.deeper),
            *((pages, rows) for _ in self.deeper),
        ]

    def split(self, table: Tensor) -> Tables:
        """Returns the tables in the memory of the whole."""
        sequences, shared, levels, states, below, changes, *several = split(table, self.tables)
        parts, counts = iter(several), (len(self.passes), *[len(self.deeper)] * 3)
        lists = ([*islice(parts, count)] for count in counts)
        return Tables(sequences, shared, levels, states, below, changes, *lists)


def _coarse(bucket: Bucket) -> Bucket:
    """Returns the bucket, of many rows with more padding, so that few graphs are captured."""
    return replace(bucket, rows=doubled(bucket.rows, FEW_ROWS)) if bucket.rows > FEW_ROWS else bucket


def level_width(requests: Sequence[ChainRequest], vocabulary: int) -> int:
    """Returns the number of rows of a sequence on a level, the largest of all requests.

    Each node that a sampled tree expands has a child, so there are at most half as many as nodes.
    """
    shapes = [(each.tree, each.limit) for each in requests if each.tree]
    return max([1, *(min(tree.width, vocabulary) if tree.kind == TREE_KINDS[0] else n // 2 for tree, n in shapes)])


def rows_behind(request: ChainRequest, width: int) -> int:
    """Returns the number of rows that drafting computes after the sequence's. width: see ``level_width``."""
    return request.levels - 1 if request.tree is None else (request.levels - 1) * width


@lru_cache(1024)
def reach_below(levels: int, width: int, count: int) -> NDArray[np.float64]:
    """Returns the largest probabilities of reaching nodes of an expected subtree, relative to its root; zeros follow.

    Args:
        levels: levels of the subtree.
        width: maximum number of siblings.
        count: number of results.
    """
    reach, offers = np.zeros(count), [(-TYPICAL, 1, 0, TYPICAL)] if levels else []
    for number in range(count if levels else 0):
        if not offers:
            break
        value, level, rank, chance = heappop(offers)
        reach[number] = -value
        if rank + 1 < width:
            later = LATER[min(rank, len(LATER) - 1)]
            heappush(offers, (value / chance * (1.0 - chance) * later, level, rank + 1, later))
        if level < levels:
            heappush(offers, (value * TYPICAL, level + 1, 0, TYPICAL))
    return reach


def source_of(draws: Draws) -> int:
    """Returns the value of ``SOURCE`` of a draft's tokens; without random numbers they are the likeliest ones."""
    return RACE if draws.keys else FRACTION if draws.uniforms else LIKELIEST


def padded_sequences(count: int) -> int:
    """Returns the number of sequences with padding."""
    return min(doubled(count, 1), padded(count))


def fill_drafts(
    plans: Sequence[PassPlan],
    requests: Sequence[ChainRequest],
    bucket: DraftBucket,
    pages: Sequence[Sequence[Places]],
    tile: int,
    links: Sequence[NDArray[np.int64]],
    changes: DraftChanges,
    whole: Tensor,
) -> None:
    """Writes all tables one after another; see ``layout.fill`` for the arguments.

    Args:
        plans: the passes, then the new rows of deeper layers. ``pages`` are in the same order.
        links: results of ``link`` for the deeper layers.
        changes: those of the requests.
        whole: zeros, int64 [bucket.size].
    """
    tables, first = bucket.split(whole), len(bucket.passes) - 1
    buckets = (*bucket.passes, *bucket.deeper)
    for table, part, rows, held in zip((*tables.passes, *tables.deeper), buckets, plans, pages, strict=True):
        table.copy_(fill(rows, part, held, tile, pinned=False))
    _fill_sequences(tables.sequences.numpy(), plans[first], requests, bucket)
    for number, request in enumerate(requests if bucket.drawn else ()):
        for depth in range(request.levels):
            deeper = reach_below(request.levels - depth - 1, bucket.siblings, bucket.kept)
            tables.below.numpy().view(np.float64)[number, depth] = deeper
    if tables.levels.numel():
        _fill_levels(tables.levels.numpy(), tables.shared.numpy(), plans[first], requests, bucket)
        for table, held in zip((tables.shared[PAGES:], *tables.pages), pages[first:], strict=True):
            _fill_pages(table.numpy(), held, bucket.width)
    for table, values in zip(tables.links, links, strict=True):
        table.numpy()[:, : values.shape[1]] = values
    changes.fill(tables.changes, bucket.sequences)
    read = plans[0].states
    if bucket.fed is not None and read is not None:
        addresses = np.array(read.addresses(), np.int64)
        tables.states.numpy()[: len(read)] = addresses.reshape(len(read), -1)


def link(above: PassPlan, layer: DeeperLayer, replaced: Sequence[Tensor]) -> tuple[PassPlan, NDArray[np.int64]]:
    """Links the new rows of a deeper layer to those of the layer before.

    Args:
        above: the new rows of the layer before.
        replaced: memory for the states that go out, [1, H] for each sequence.

    Returns:
        The new rows, and the table of ``ROOTS`` and the other fields.
    """
    tokens, sources, roots, count = list[int](), list[int](), list[int](), len(layer.parts)
    end, first = 0, padded_sequences(count)  # the first state behind those that come in
    for number, (part, before) in enumerate(zip(layer.parts, above.parts, strict=True)):
        end += before.count
        tokens += above.tokens[end - part.count : end]
        behind = [number, *range(first + end - before.count, first + end)]
        roots.append(behind[-1])
        sources += behind[len(behind) - 1 - part.count : -1]
    positions = [row for part in layer.parts for row in range(part.first, part.end)]
    plan = PassPlan(tokens, positions, list(layer.parts), [], [0] * count, above.reach)
    table = np.zeros((SOURCES + 1, max(len(sources), count)), np.int64)
    carried = [0 if state is None else state.data_ptr() for state in layer.carried]
    for field, values in enumerate((roots, carried, [state.data_ptr() for state in replaced], sources)):
        table[field, : len(values)] = values
    return plan, table


def _fill_sequences(
    table: NDArray[np.int64], plan: PassPlan, requests: Sequence[ChainRequest], bucket: DraftBucket
) -> None:
    floats = table.view(np.float64)
    floats[TEMPERATURE], floats[MIN_P], floats[TOP_P], table[TOP_K] = 1.0, -np.inf, 2.0, bucket.tokens[0]
    output, row = 0, 0
    for number, (part, request) in enumerate(zip(plan.parts, requests, strict=True)):
        table[FIRST, number], table[ROOT, number] = output, plan.tokens[row]
        table[BUDGET, number], table[STEPS, number] = request.limit, request.levels
        floats[THRESHOLD, number] = -np.inf if request.stop is None else request.stop.threshold
        if request.tree is not None:
            table[TREE, number] = 1
            floats[TEMPERATURE, number], floats[FLOOR, number] = request.tree.temperature, request.tree.floor
        if request.draws is not None:
            draws, kept = request.draws, request.draws.kept
            table[SOURCE, number] = source_of(draws)
            floats[TEMPERATURE, number] = kept.temperature
            if kept.min_p > 0.0:
                floats[MIN_P, number] = np.log(kept.min_p)
            if 0 < kept.top_k < bucket.tokens[0]:
                table[TOP_K, number] = kept.top_k
            if kept.top_p < 1.0:
                floats[TOP_P, number] = kept.top_p
            noise = np.array(draws.keys, np.uint64) if draws.keys else np.array(draws.uniforms, np.float64)
            bits = noise.view(np.int64)[: len(table) - NOISE]
            table[NOISE:, number][: len(bits)] = bits
        output += plan.output_counts[number]
        row += part.count


def _fill_levels(
    levels: NDArray[np.int64],
    shared: NDArray[np.int64],
    plan: PassPlan,
    requests: Sequence[ChainRequest],
    bucket: DraftBucket,
) -> None:
    """Fills the tables of the passes behind the first one: ``width`` rows for each sequence, of chains the first."""
    width, count = bucket.width, len(requests) * bucket.width
    number, chains = np.tile(np.arange(width), len(requests)), [request.tree is None for request in requests]
    step = np.where(np.repeat(chains, width), 1, width)
    end = np.repeat(np.array([part.end for part in plan.parts]), width)
    depth = np.arange(1, bucket.levels)[:, None]
    going = (depth < np.repeat([request.levels for request in requests], width)) & (number < step)
    levels[:, POSITIONS, :count] = (end - 1 + depth) * going
    levels[:, COUNTS, :count] = (end + depth) * going
    levels[:, PLACES, :count] = (end + (depth - 1) * step + number) * going
    levels[:, SIZES, :count] = going
    shared[TILES] = range(bucket.rows)
    shared[PREFIXES, :count] = end


def _fill_pages(table: NDArray[np.int64], pages: Sequence[Places], width: int) -> None:
    """Fills in the pages of ``width`` rows of each sequence."""
    for number, held in enumerate(pages):
        table[: len(held), number * width : (number + 1) * width] = held[:, None]
