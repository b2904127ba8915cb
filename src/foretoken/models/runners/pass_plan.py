"""The plan of one forward pass as plain lists on the host, the same for every runner."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.devices import on_device
from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.device_drafts import UnreadDraft
from foretoken.models.device_logits import DeviceTaps
from foretoken.models.state.replay import ReplayPlan

_MAX_WASTE = 8  # rows that hold more than this many times their own memory are copied


def address(values: NDArray[Any]) -> int:
    """Returns the address of an array's first element, in less time than ``ctypes``."""
    first: int = values.__array_interface__["data"][0]
    return first


class Tapped(Mapping[int, Tensor]):
    """Hidden states of a pass in one array; a layer's become a tensor when they are asked for.

    Args:
        states: float32 [layers, rows, H].
        held: Number of rows whose memory these keep, if they are some rows of a larger array.
    """

    def __init__(self, layers: Sequence[int], states: NDArray[np.float32], held: int = 0) -> None:
        self.layers, self.states = tuple(layers), states
        self.rows = states.shape[1]
        self.held = held or self.rows

    @property
    def starts(self) -> range:
        first, size = address(self.states), self.states.strides[0]
        return range(first, first + len(self.layers) * size, size)

    def split(self, counts: Sequence[int]) -> list[Mapping[int, Tensor]]:
        """Returns the first ``counts[0]`` rows, the next ``counts[1]`` rows, and so on, in the same memory."""
        return [
            Tapped(self.layers, self.states[:, end - count : end], self.held)
            for count, end in zip(counts, accumulate(counts), strict=True)
        ]

    @staticmethod
    def joined(parts: Sequence[tuple[Mapping[int, Tensor], Sequence[int]]]) -> Tapped:
        """Returns a copy of some rows of each of several passes, all of ``Tapped``, with the layers of the first."""
        passes = [(taps, rows) for taps, rows in parts if isinstance(taps, Tapped)]
        states = [
            taps.states[:, rows[0] : rows[-1] + 1] if isinstance(rows, range) else taps.states[:, rows]
            for taps, rows in passes
        ]
        return Tapped(passes[0][0].layers, np.concatenate(states, 1))

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        return torch.from_numpy(self.states[self.layers.index(layer)])

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def tapped_rows(taps: Mapping[int, Tensor]) -> int:
    """Returns the number of rows whose states were tapped."""
    return taps.rows if isinstance(taps, Tapped | DeviceTaps) else len(next(iter(taps.values())))


@dataclass(frozen=True, slots=True)
class TapRows:
    """Rows of the target's tapped layers that a head has not read yet, left where the passes wrote them.

    chunks: the states of all layers, as the pass returned them or [n, Ht] each, and which of their rows are meant; each
    of another pass.
    """

    chunks: list[tuple[Tapped | DeviceTaps | tuple[Tensor, ...], Sequence[int]]] = field(default_factory=list)

    @staticmethod
    def of(taps: Mapping[int, Tensor], layers: Sequence[int], rows: Sequence[int]) -> TapRows:
        """Returns the given rows of ``layers``. Only a few rows of a large pass are copied, to free the others."""
        if isinstance(taps, Tapped) and taps.layers == tuple(layers):
            if taps.held > _MAX_WASTE * len(rows):
                start, end = rows[0], rows[-1] + 1
                copied = taps.states[:, start:end].copy() if end - start == len(rows) else taps.states.take(rows, 1)
                taps, rows = Tapped(taps.layers, copied), range(len(rows))
            return TapRows([(taps, rows)])
        if isinstance(taps, DeviceTaps):
            return TapRows([(taps.of(layers), rows)])
        states = tuple(taps[layer] for layer in layers)
        held = {state.untyped_storage().data_ptr(): state.untyped_storage().nbytes() for state in states}
        if sum(held.values()) > _MAX_WASTE * len(rows) * sum(state.shape[-1] * state.itemsize for state in states):
            index = on_device(rows, states[0].device)
            states, rows = tuple(state.index_select(0, index) for state in states), range(len(rows))
        return TapRows([(states, rows)])

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self.chunks)

    def kept(self) -> TapRows:
        """Returns the rows in memory that holds few others, after a pass has copied those of all."""
        kept = TapRows()
        for states, rows in self.chunks:
            if isinstance(states, DeviceTaps) and states.held > _MAX_WASTE * len(rows):
                kept.chunks.append((states.only(rows), range(len(rows))))
            else:
                kept.chunks.append((states, rows))
        return kept

    def only(self, numbers: Iterable[int]) -> TapRows:
        """Returns some of the rows."""
        chosen, placed = TapRows(), [(states, row) for states, rows in self.chunks for row in rows]
        for _, run in groupby((placed[number] for number in numbers), lambda each: id(each[0])):
            states, rows = zip(*run, strict=True)
            chosen.chunks.append((states[0], rows))
        return chosen

    @property
    def kind(self) -> tuple[int, int, torch.dtype] | None:
        """Number of layers, their width and type, if all rows have the same and a device can read them."""
        kinds = set[tuple[int, int, torch.dtype]]()
        for states, _ in self.chunks:
            first = states.memory.states if isinstance(states, DeviceTaps) else next(iter(_tensors(states)))
            kinds.add((len(states), first.shape[-1], first.dtype))
        return kinds.pop() if len(kinds) == 1 and self.addressable else None

    def repeated(self, count: int) -> TapRows:
        """Returns the rows a number of times."""
        return TapRows([(states, [*rows] * count) for states, rows in self.chunks if count])

    @property
    def bytes_per_row(self) -> float:
        layers, width, dtype = self.kind or (math.inf, 1, torch.uint8)
        return layers * width * dtype.itemsize

    @staticmethod
    def joined(parts: Iterable[TapRows]) -> TapRows:
        return TapRows([chunk for part in parts for chunk in part.chunks])

    def split(self, count: int) -> tuple[TapRows, TapRows]:
        """Returns the first ``count`` rows, and those behind them."""
        first, second = TapRows(), TapRows()
        for states, rows in self.chunks:
            for half, part in ((first, rows[:count]), (second, rows[count:])):
                if len(part):
                    half.chunks.append((states, part))
            count = max(0, count - len(rows))
        return first, second

    def concatenated(self) -> Tensor:
        """Returns the states [rows, layers * Ht], those of one row's layers one after another."""
        parts = [torch.cat([_rows(state, rows) for state in _tensors(states)], -1) for states, rows in self.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def addresses(self) -> array[int]:
        """Returns the address of every row's state of every layer, those of one row one after another."""
        result = array("Q")
        for states, rows in self.chunks:
            if isinstance(states, Tapped):
                step, starts = states.states.strides[1], states.starts
                result.extend([start + row * step for row in rows for start in starts])
            elif isinstance(states, DeviceTaps):
                firsts, step = states.places
                result.extend([start + row * step for row in rows for start in firsts])
            else:
                placed = [(state.data_ptr(), state.itemsize * state.stride(0)) for state in states]
                result.extend(start + row * step for row in rows for start, step in placed)
        return result

    @property
    def addressable(self) -> bool:
        """Whether a runner on their device can read all states where they are: on the host float32 ones."""
        return all(
            isinstance(states, Tapped | DeviceTaps) or all(map(_addressable, states)) for states, _ in self.chunks
        )


def _tensors(states: Tapped | DeviceTaps | tuple[Tensor, ...]) -> Iterable[Tensor]:
    return states if isinstance(states, tuple) else states.values()


def _addressable(states: Tensor) -> bool:
    return states.stride(-1) == 1 and (states.is_cuda or (states.is_cpu and states.dtype is torch.float32))


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows in a pass: their position in its slot, and the draft tree of the last rows.

    The rows of a ``mutual`` part, which has no draft, see each other besides the rows before them.
    """

    slot: int
    first: int  # the cache row of the first new row
    count: int
    nodes_at: int  # the cache row of draft node 0
    draft: Draft
    mutual: bool = False

    @property
    def end(self) -> int:
        """The cache row after the last row."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The rows of all sequences, one sequence after another."""

    tokens: list[int]  # the token of each row
    positions: list[int]  # the position of each row; a draft node's follows from its depth
    parts: list[Part]  # the rows of each sequence
    outputs: list[int]  # the rows whose logits are needed, ascending
    output_counts: list[int]  # number of outputs of each sequence
    reach: int  # the highest cache row in use, plus one
    features: Tensor | None = None  # [rows, H], for a model whose inputs are features; see ``weights.Entry``
    # the target's states that the runner makes the features from, in the place of ``features``
    states: TapRows | None = None
    replay: ReplayPlan | None = None  # the steps of recurrent layers, which the CUDA runner adds; None without them
    argmax_only: bool = False  # whether a runner may return the argmax of each output instead of its logits
    ranks: int = 0  # number of the likeliest tokens of each output that it may return with the argmax; 0 for none

    @property
    def output_rows(self) -> slice | Tensor:
        """The outputs as an index of rows: a slice if they are neighbours, which takes a fraction of a list's time."""
        first, count = self.outputs[0], len(self.outputs)
        if self.outputs[-1] - first + 1 == count:
            return slice(first, first + count)
        return torch.tensor(self.outputs)

    @staticmethod
    def of(
        handles: Sequence[Handle], drafts: Sequence[Draft], scored: Sequence[int], fed: Tensor | TapRows | None = None
    ) -> PassPlan:
        """Returns the pass over all pending tokens and the draft nodes from ``scored[i]`` on.

        ``fed`` are the rows' features, or the states that they are made from. Logits are computed from the root on.
        Raises ValueError if a sequence has neither a pending token nor a new draft node.
        """
        tokens: list[int] = []
        positions: list[int] = []
        parts: list[Part] = []
        outputs: list[int] = []
        counts: list[int] = []
        for handle, draft, done in zip(handles, drafts, scored, strict=True):
            cached, length = handle.cached, len(handle.tokens)
            start, pending = len(tokens), length > cached
            tokens += handle.tokens[cached:]
            positions += range(cached, length)
            if isinstance(draft, UnreadDraft):  # the device fills in its tokens, and the positions of a tree
                tokens += [0] * draft.limit
                positions += range(length, length + draft.limit)
            else:
                tokens += draft.ids[done:]
                positions += [*(length - 1 + d for d in draft.depths[done:])]
            count = len(tokens) - start
            if not count:
                raise ValueError("nothing to score: no pending token and no new draft node")
            output_count = draft.limit - done + pending
            outputs += range(len(tokens) - output_count, len(tokens))
            counts.append(output_count)
            parts.append(Part(handle.slot, cached if pending else length + done, count, length, draft))
        reach = max([part.end for part in parts])
        argmax_only = all(handle.argmax_only for handle in handles)
        ranks = max([handle.ranks for handle in handles])
        features, states = (None, fed) if isinstance(fed, TapRows) else (fed, None)
        return PassPlan(
            tokens, positions, parts, outputs, counts, reach, features, states, argmax_only=argmax_only, ranks=ranks
        )

    @property
    def fed(self) -> Tensor | None:
        """The features, or the states that they are made from, [rows, layers * Ht]; None for a plan without."""
        return self.features if self.states is None else self.states.concatenated()

    def only(self, numbers: Sequence[int]) -> PassPlan:
        ends, last = list(accumulate(part.count for part in self.parts)), list(accumulate(self.output_counts))
        outputs, rows = list[int](), list[int]()
        for number in numbers:
            start, count = ends[number] - self.parts[number].count, self.output_counts[number]
            outputs += [row - start + len(rows) for row in self.outputs[last[number] - count : last[number]]]
            rows += range(start, ends[number])
        tokens, positions = [self.tokens[row] for row in rows], [self.positions[row] for row in rows]
        parts, counts = [self.parts[i] for i in numbers], [self.output_counts[i] for i in numbers]
        features = None if self.features is None else _rows(self.features, rows)
        states = None if self.states is None else self.states.only(rows)
        return PassPlan(tokens, positions, parts, outputs, counts, max(part.end for part in parts), features, states)


def _rows(state: Tensor, rows: Sequence[int]) -> Tensor:
    if rows and rows[-1] - rows[0] + 1 == len(rows):  # nearly always: a slice needs no copy
        return state[rows[0] : rows[-1] + 1]
    return state.index_select(0, on_device(rows, state.device))
