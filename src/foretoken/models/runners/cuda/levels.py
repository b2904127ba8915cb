"""The passes of all levels of drafts, on the device.

The tokens that a level drafts stay there: they are the input of the next one, and of the target's pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.streams import exponentials_at
from foretoken.models.runners.cuda.changes import LevelChanges
from foretoken.models.runners.cuda.drafts import (
    CARRIED,
    COUNTS,
    FIRST,
    PAGES,
    PLACES,
    POSITIONS,
    PREFIXES,
    REPLACED,
    ROOT,
    ROOTS,
    SIZES,
    SOURCES,
    TILES,
    DraftBucket,
)
from foretoken.models.runners.cuda.graphs import Inputs
from foretoken.models.runners.cuda.layout import OUTPUTS, RowLayout, read_states, write_states
from foretoken.models.runners.cuda.page_cache import PageCache
from foretoken.models.runners.triton_kernels.rows import PassRows

# Computes rows, given their layout, the rows with logits (None for all) and features: logits, and the tapped states.
Run = Callable[[RowLayout, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]


class LayerPasses(NamedTuple):
    """Passes of a model, or of a deeper layer: their function, its KV cache and ALiBi's biases."""

    run: Run
    cache: PageCache
    biases: Tensor | None = None  # see ``attention.attend_rows``


class Levels:
    """The passes of all levels, on the device.

    Args:
        layers: computes passes of each level; the last one also those behind.
        inputs: the result of ``fill_drafts``, and the features of the first pass of drafts.
        bucket: the bucket of both.
        ids: int64 [size], the target's token of each logit; None if it is the logit's index.
        after: see ``DraftVocabulary``.

    Attributes:
        sequences: the table of sequences.
        below: float64 [sequences, levels, n]; see ``reach_below``.
        bucket: the bucket.
        unchanged: the logits of the level without changes, [sequences * n, size].
    """

    def __init__(
        self,
        layers: Sequence[LayerPasses],
        inputs: Inputs,
        bucket: DraftBucket,
        ids: Tensor | None = None,
        after: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> None:
        self._layers, self.bucket, self._tables = layers, bucket, bucket.split(inputs.table)
        self._ids = ids
        self.sequences, table, first = self._tables.sequences, self._tables.passes[-1], layers[0]
        self.below = self._tables.below.view(torch.float64)
        outputs = table[OUTPUTS, : bucket.outputs]
        layout = RowLayout.of(table, bucket.first, first.cache, first.biases)
        logits, states = first.run(layout, outputs, inputs.features)
        self._states = None if states is None else states.index_select(0, outputs)  # tapped at the level's rows
        self._first = logits, self._states
        # of the last layer that began: its states at new rows, and at the rows of each level's tokens
        self._new, self._drafted = states, list[Tensor]()
        self._tokens, self._parents, self._paths = list[Tensor](), list[Tensor | None](), list[Tensor]()
        self._level, self._after, table, sizes = 0, after, self._tables.changes, bucket.changes
        self._changes = None if sizes is None else LevelChanges(table, sizes, bucket.sequences, ids)
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

    def targets(self, index: Tensor) -> Tensor:
        """Returns the target's tokens of logits."""
        return index if self._ids is None else self._ids.take(index)

    def widened(self, rows: Tensor) -> Tensor:
        """Returns distributions over all of the target's tokens, [rows, width of the vocabulary]."""
        if self._ids is None:
            return rows
        return rows.new_zeros(len(rows), self.bucket.tokens[1]).index_copy_(1, self._ids, rows)

    def raced(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Returns the race of each row [rows, V] by its key [rows, 1]; see ``SharedStream.race``."""
        return rows.double() / exponentials_at(keys, self.targets(torch.arange(rows.shape[1], device=rows.device)))

    @property
    def chain_states(self) -> Tensor | None:
        """The tapped states at the level's rows of chains, [sequences, H]; None for none."""
        rows = len(self.unchanged)
        return None if self._states is None else self._states[: rows : rows // self.bucket.sequences]

    def first(self) -> Tensor:
        """Returns the logits of the first level, [sequences, size]."""
        foreseen, (size, *_) = self.bucket.foreseen, self.bucket.tokens
        logits = self._foreseen(self.sequences[ROOT]) if foreseen else self._first[0][: self.bucket.sequences]
        self.unchanged = logits[:, :size]
        return self.unchanged if self._changes is None else self._changes.at_roots(self.unchanged)

    def next(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Computes the next level.

        Args:
            tokens: the target's tokens of its rows, [sequences * width].
            parents: the rows of the level before that they follow, [sequences * width]; None if they are the same.

        Returns:
            The logits of its rows, [sequences * width, size].
        """
        self.unchanged = self._computed(tokens, parents)[:, : self.bucket.tokens[0]]
        return self.unchanged if self._changes is None else self._changes.below(self.unchanged, tokens, parents)

    def _computed(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        self._level += 1
        if self.bucket.foreseen:
            return self._foreseen(tokens)
        rows, count = self.bucket.rows, len(tokens)
        tokens, features = F.pad(tokens, (0, rows - count)), self._states if self.bucket.first.features else None
        if parents is not None:
            parents = F.pad(parents, (0, rows - count))
            features = None if features is None else features.index_select(0, parents)
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._add_paths(parents)
        if self._level < len(self._layers):
            return self._begin(self._level)[:count]
        layer = self._layers[-1]
        last = len(self._layers) - 1
        layout = RowLayout(tokens, *self._rows(self._level - 1, last), layer.cache, layer.biases)
        logits, self._states = layer.run(layout, None, features)
        return logits[:count]

    def finish(self) -> None:
        """Computes the new rows of layers that draft no level."""
        for number in range(self._level + 1, len(self._layers)):
            self._begin(number)

    def _add_paths(self, parents: Tensor | None) -> None:
        """Adds the cache rows of the paths to the tokens of a level of trees, [depth, rows]."""
        if parents is not None:
            places = self._tables.levels[self._level - 1, PLACES][None]
            above = [self._paths[-1].index_select(1, parents)] if self._paths else []
            self._paths.append(torch.cat((*above, places)))

    def _rows(self, first: int, number: int) -> tuple[Tensor, PassRows]:
        """Returns positions and rows of the tokens of levels from ``first`` on, in a layer.

        Each layer has one row fewer than the layer before, unless there is none yet.
        """
        levels, shared = self._tables.levels[first : self._level], self._tables.shared
        prefixes, count, depth = shared[PREFIXES], len(levels), len(self._paths)
        fields = positions, counts, places = [levels[:, field].flatten() for field in (POSITIONS, COUNTS, PLACES)]
        paths = [F.pad(paths, (0, 0, 0, depth - len(paths))) for paths in self._paths[first:]]
        path = torch.cat(paths, 1) if paths else places[:0].view(0, len(places))
        pages = self._tables.pages[number - 1] if number else shared[PAGES:]
        if number:
            fewer = prefixes.clamp(max=number)
            positions, counts, places, path = ((each - fewer.repeat(count)).clamp(min=0) for each in (*fields, path))
            prefixes, pages = (prefixes - fewer).repeat(count), pages.repeat(1, count)
        tiles = shared[TILES] if count == 1 else torch.arange(len(places), device=places.device)
        sizes = levels[:, SIZES].flatten()
        rows = PassRows(counts, counts, pages, places, prefixes, path, tiles, sizes, self.bucket.first.longest)
        return positions, rows

    def _begin(self, number: int) -> Tensor:
        """Computes a layer's new rows and the tokens of all levels. Returns the logits of the newest level's rows."""
        bucket, links = self.bucket, self._tables.links[number - 1]
        before, sequences = links[CARRIED, : bucket.sequences, None], bucket.sequences
        assert self._new is not None
        carried = read_states(before, self._new.shape[1], self._new.dtype, self._new.dtype)
        known = torch.cat((carried, self._new))
        roots = known.index_select(0, links[ROOTS, :sequences])
        write_states(links[REPLACED, :sequences], roots)
        features = [known.index_select(0, links[SOURCES, : bucket.deeper[number - 1].rows])]
        drafted = self._drafted
        if self._tokens:
            below = roots[:, None].expand(-1, bucket.width, -1).flatten(0, 1)
            features.append(F.pad(below, (0, 0, 0, bucket.rows - len(below))))
        for states, parents in zip(drafted, self._parents[1:], strict=False):
            features.append(states if parents is None else states.index_select(0, parents))
        return self._compute_layer(number, torch.cat(features))

    def _compute_layer(self, number: int, features: Tensor) -> Tensor:
        layer, table, part = self._layers[number], self._tables.deeper[number - 1], self.bucket.deeper[number - 1]
        if not len(features):  # the layer has no row yet
            self._new = features
            return features
        layout = RowLayout.of(table, part, layer.cache, layer.biases)
        if self._tokens:
            positions, rows = self._rows(0, number)
            layout = replace(
                layout,
                tokens=torch.cat((layout.tokens, *self._tokens)),
                positions=torch.cat((layout.positions, positions)),
                rows=layout.rows.followed(rows),
            )
        newest = torch.arange(max(0, len(features) - self.bucket.rows), len(features), device=features.device)
        logits, states = layer.run(layout, newest, features)
        assert states is not None
        self._new, *self._drafted = states.split([part.rows, *[self.bucket.rows] * len(self._tokens)])
        self._states = self._drafted[-1] if self._drafted else None
        return logits

    def _foreseen(self, tokens: Tensor) -> Tensor:
        """Returns the logits behind the last token of each row, of which the first pass has computed the most part."""
        logits, states = self._first
        index = (self.sequences[FIRST] + self._level).clamp(max=len(logits) - 1)  # drafts may have fewer levels
        index = index[:, None].expand(-1, len(tokens) // len(index)).flatten()
        logits, self._states = logits.index_select(0, index), None if states is None else states.index_select(0, index)
        return logits if self._after is None else logits + self._after(tokens, self._states)
