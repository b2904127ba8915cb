"""Drafts of several levels as one CUDA graph: requests as a table, the passes of all levels, and the results.

Positions, cache rows and pages of every level are known before any token is, so they are copied to the device with the
rows of the first pass. What a level drafts stays there: it is the input of the next one, and of the target's pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.sampling import SamplingLaw
from foretoken.models.chains import ChainRequest, DraftVocabulary, Draws
from foretoken.models.runners.cuda.graphs import Inputs
from foretoken.models.runners.cuda.layout import OUTPUTS, Bucket, RowLayout, fill
from foretoken.models.runners.cuda.page_cache import PageCache, Places
from foretoken.models.runners.linear import FIXED_ROWS
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.runners.triton_kernels.rows import PassRows
from foretoken.models.runners.triton_kernels.steps import doubled
from foretoken.models.state.pages import PAGE

# Rows of the table of sequences; those of random numbers follow, one for each level.
FIRST, ROOT, BUDGET, STEPS, SOURCE, TOP_K, TEMPERATURE, FLOOR, MIN_P, TOP_P, NOISE = range(11)
# Rows of the table of a level.
POSITIONS, COUNTS, PLACES, SIZES, LEVEL_ROWS = range(5)
TILES, PREFIXES, PAGES = range(3)  # rows of the table that all levels share
LIKELIEST, FRACTION, RACE = range(3)  # values of SOURCE
UNFILTERED = SamplingLaw().kept
MIN_KEPT = 8  # nodes of a tree that are returned, doubled until all fit

# Computes rows, given their layout, the rows with logits (None for all) and features: logits, and the tapped states.
Run = Callable[[RowLayout, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class DraftBucket:
    """Properties of drafts that a CUDA graph depends on.

    Attributes:
        passes: the pass over injected rows, if there are any, and the first pass of drafts.
        sequences: number of drafts, padding included.
        levels: number of levels.
        width: candidates of a node of a tree, and nodes that are expanded on a level; 1 for chains.
        kept: number of nodes of a tree that are returned; 0 for chains.
        outputs: rows of the first pass that have logits, padding included.
        foreseen: whether these are all levels of each draft, so that no other pass follows.
        sources: the kinds of tokens among the drafts, of ``SOURCE``.
        filtered: whether any distribution has a filter.
        distributions: whether the distributions of tokens are returned.
        tokens: size and width of the vocabulary, and the identity of its tokens and of its successors.
        fed: number, width and type of the target's states of a row, if ``passes[0]`` reads them where they are.
    """

    passes: tuple[Bucket, ...]
    sequences: int
    levels: int
    width: int
    kept: int
    outputs: int
    foreseen: bool
    sources: tuple[int, ...]
    filtered: bool
    distributions: bool
    tokens: tuple[int, int, int, int]
    fed: tuple[int, int, torch.dtype] | None

    @property
    def first(self) -> Bucket:
        """The first pass of drafts."""
        return self.passes[-1]

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
    ) -> DraftBucket:
        """Returns the smallest bucket that holds the drafts: all chains, or all trees of one width.

        ``plans`` are those of ``passes``. ``reach`` of the last one includes the cache rows of later passes.
        """
        *before, plan = plans
        shape, draws = requests[0].tree, [request.draws for request in requests if request.draws]
        width = 1 if shape is None else min(shape.width, vocabulary.size)
        sources = {LIKELIEST} if len(draws) < len(requests) else set[int]()
        sources |= {source_of(draw) for draw in draws}
        levels = max(request.levels for request in requests)
        nodes = width + (levels - 1) * width * width
        sequences = min(doubled(len(requests), 1), padded(len(requests)))
        return DraftBucket(
            passes=(
                *(Bucket.of(rows, (), False) for rows in before),
                Bucket.of(plan, () if state is None else (state,), True),
            ),
            sequences=sequences,
            levels=levels,
            width=width,
            kept=0 if shape is None else min(nodes, doubled(max(request.limit for request in requests), MIN_KEPT)),
            outputs=padded(len(plan.outputs) if foreseen else sequences),
            foreseen=foreseen,
            sources=tuple(sorted(sources)),
            filtered=any(draw.kept[1:] != UNFILTERED[1:] for draw in draws),
            distributions=any(draw.rows for draw in draws),
            tokens=(vocabulary.size, vocabulary.width, id(vocabulary.ids), id(vocabulary.after)),
            fed=None if plans[0].states is None else plans[0].states.kind,
        )

    @property
    def size(self) -> int:
        """Number of elements of all tables."""
        return sum(math.prod(shape) for shape in self.tables)

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tables: of ``passes``, of sequences, of all levels, of each level, and of states."""
        pages, passes = self.first.longest // PAGE, 0 if self.foreseen else self.levels - 1
        return (
            *(each.shape for each in self.passes),
            (NOISE + self.levels, self.sequences),
            (PAGES + pages, self.rows if passes else 0),
            (passes, LEVEL_ROWS, self.rows if passes else 0),
            (self.passes[0].rows, 0 if self.fed is None else self.fed[0]),
        )

    def split(self, table: Tensor) -> list[Tensor]:
        """Returns the tables in the memory of the whole."""
        parts = table.split([math.prod(shape) for shape in self.tables])
        return [part.view(shape) for part, shape in zip(parts, self.tables, strict=True)]


def source_of(draws: Draws) -> int:
    """Returns the value of ``SOURCE`` of a draft's tokens; without random numbers they are the likeliest ones."""
    return RACE if draws.keys else FRACTION if draws.uniforms else LIKELIEST


def padded(rows: int) -> int:
    """Returns the number of rows with padding."""
    return -(-rows // FIXED_ROWS) * FIXED_ROWS


def fill_drafts(
    plans: Sequence[PassPlan],
    requests: Sequence[ChainRequest],
    bucket: DraftBucket,
    pages: Sequence[Sequence[Places]],
    tile: int,
    pinned: bool,
) -> Tensor:
    """Returns all tables one after another, int64; see ``layout.fill`` for the arguments."""
    whole = torch.zeros(bucket.size, dtype=torch.int64, pin_memory=pinned)
    *tables, sequences, shared, levels, states = bucket.split(whole)
    for table, part, rows, held in zip(tables, bucket.passes, plans, pages, strict=True):
        table.copy_(fill(rows, part, held, tile, pinned=False))
    read, plan = plans[0], plans[-1]
    _fill_sequences(sequences.numpy(), plan, requests, bucket)
    if levels.numel():
        _fill_levels(levels.numpy(), shared.numpy(), plan, requests, bucket, pages[-1])
    if bucket.fed is not None and read.states is not None:
        addresses = np.array(read.states.addresses(), np.int64)
        states.numpy()[: len(read.tokens)] = addresses.reshape(len(read.tokens), -1)
    return whole


def _fill_sequences(
    table: NDArray[np.int64], plan: PassPlan, requests: Sequence[ChainRequest], bucket: DraftBucket
) -> None:
    floats = table.view(np.float64)
    floats[TEMPERATURE], floats[MIN_P], floats[TOP_P], table[TOP_K] = 1.0, -np.inf, 2.0, bucket.tokens[0]
    output, row = 0, 0
    for number, (part, request) in enumerate(zip(plan.parts, requests, strict=True)):
        table[FIRST, number], table[ROOT, number] = output, plan.tokens[row]
        table[BUDGET, number], table[STEPS, number] = request.limit, request.levels
        if request.tree is not None:
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
            table[NOISE:, number][: len(noise)] = noise.view(np.int64)[: bucket.levels]
        output += plan.output_counts[number]
        row += part.count


def _fill_levels(
    levels: NDArray[np.int64],
    shared: NDArray[np.int64],
    plan: PassPlan,
    requests: Sequence[ChainRequest],
    bucket: DraftBucket,
    pages: Sequence[Places],
) -> None:
    """Fills the tables of the passes behind the first one: a row for each chain, or ``width`` rows for each tree."""
    width, count = bucket.width, len(requests) * bucket.width
    end = np.repeat(np.array([part.end for part in plan.parts]), width)
    depth = np.arange(1, bucket.levels)[:, None]
    going = depth < np.repeat(np.array([request.levels for request in requests]), width)
    levels[:, POSITIONS, :count] = (end - 1 + depth) * going
    levels[:, COUNTS, :count] = (end + depth) * going
    levels[:, PLACES, :count] = (end + (depth - 1) * width + np.tile(np.arange(width), len(requests))) * going
    levels[:, SIZES, :count] = going
    shared[TILES] = range(bucket.rows)
    shared[PREFIXES, :count] = end
    for number, held in enumerate(pages):
        shared[PAGES : PAGES + len(held), number * width : (number + 1) * width] = held[:, None]


class Levels:
    """The passes of all levels, on the device.

    Args:
        run: computes a pass.
        inputs: the result of ``fill_drafts``, and the features of the first pass of drafts.
        bucket: the bucket of both.
        cache: the KV cache.
        biases: ALiBi's biases; see ``attention.attend_rows``.
        after: see ``DraftVocabulary``.

    Attributes:
        sequences: the table of sequences.
    """

    def __init__(
        self,
        run: Run,
        inputs: Inputs,
        bucket: DraftBucket,
        cache: PageCache,
        biases: Tensor | None,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._run, self._bucket, self._cache, self._biases = run, bucket, cache, biases
        *_, table, self.sequences, self._shared, self._tables, _ = bucket.split(inputs.table)
        outputs = table[OUTPUTS, : bucket.outputs]
        self._first, states = run(RowLayout.of(table, bucket.first, cache, biases), outputs, inputs.features)
        self._features = None if states is None else states.index_select(0, outputs)
        self._paths: Tensor | None = None
        self._level, self._after = 0, after
        self._numbers: dict[tuple[int, int, bool], Tensor] = {}

    def each(self, row: int, times: int = 1, floats: bool = False) -> Tensor:
        """Returns a row of the table of sequences, each element a number of times, [sequences * times, 1].

        ``floats`` are float64 values in the table, which become float32.
        """
        key = row, times, floats
        if key not in self._numbers:
            numbers = self.sequences[row].view(torch.float64).float() if floats else self.sequences[row]
            self._numbers[key] = numbers[:, None].expand(-1, times).reshape(-1, 1)
        return self._numbers[key]

    def first(self) -> Tensor:
        """Returns the logits of the first level, [sequences, V]."""
        foreseen, count = self._bucket.foreseen, self._bucket.sequences
        return self._foreseen(self.sequences[ROOT]) if foreseen else self._first[:count]

    def next(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Computes the next level.

        Args:
            tokens: the target's tokens of its rows, [sequences * width].
            parents: the rows of the level before that they follow, [sequences * width]; None if they are the same.

        Returns:
            The logits of its rows, [sequences * width, V].
        """
        self._level += 1
        if self._bucket.foreseen:
            return self._foreseen(tokens)
        rows, count = self._bucket.rows, len(tokens)
        tokens, features = F.pad(tokens, (0, rows - count)), self._features
        if parents is not None:
            parents = F.pad(parents, (0, rows - count))
            features = None if features is None else features.index_select(0, parents)
        logits, self._features = self._run(self._layout(tokens, parents), None, features)
        return logits[:count]

    def _layout(self, tokens: Tensor, parents: Tensor | None) -> RowLayout:
        table, shared = self._tables[self._level - 1], self._shared
        places = table[PLACES]
        paths = places[:0].view(0, len(places))
        if parents is not None:
            if self._paths is not None:
                paths = self._paths.index_select(1, parents)
            self._paths = paths = torch.cat((paths, places[None]))
        rows = PassRows(
            counts=table[COUNTS],
            ends=table[COUNTS],
            pages=shared[PAGES:],
            places=places,
            prefixes=shared[PREFIXES],
            paths=paths,
            tiles=shared[TILES],
            sizes=table[SIZES],
            longest=self._bucket.first.longest,
        )
        return RowLayout(tokens, table[POSITIONS], rows, self._cache, self._biases)

    def _foreseen(self, tokens: Tensor) -> Tensor:
        """Returns the logits behind the last token of each row, of which the first pass has computed the most part."""
        index = (self.sequences[FIRST] + self._level).clamp(max=len(self._first) - 1)  # drafts may have fewer levels
        logits = self._first.index_select(0, index)
        logits = logits[:, None].expand(-1, len(tokens) // len(logits), -1).flatten(0, 1)
        return logits if self._after is None else logits + self._after(tokens)
