"""Changes of logits on the device: masks, bans, biases and penalties of all requests of a call, as one table.

A request's changes are those at its root. Tokens of a draft add to the penalties of the nodes below them, also those
that the host has not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint8
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.native.sampling import Adjustment
from foretoken.models.chains import ChainRequest
from foretoken.models.runners.triton_kernels.steps import doubled

MIN_ENTRIES = 1024  # doubled until all fit
TOKEN, SEQUENCE, KIND, VALUE = range(4)  # fields of entries, changes of one token each
BANNED, END, BIASED, SEEN = range(1, 5)  # values of ``KIND``; 0 is padding
REPETITION, FREQUENCY, PRESENCE, END_STEPS, FIELDS = range(5)  # fields of sequences
NUMBER, MASK, LATER_MASK = range(3)  # fields of drafts: their request, its mask at the root, and that below
WORD = 64  # tokens of an element of a mask


@dataclass(frozen=True, slots=True)
class ChangeSizes:
    """Sizes of a table.

    Attributes:
        vocabulary: number of logits of a row.
        sequences: number of requests, padding included; the last one is padding.
        entries: number of entries, padding included.
        masks: number of masks, padding included; 0 for none.
        penalized: whether any request has penalties.
    """

    vocabulary: int
    sequences: int
    entries: int
    masks: int
    penalized: bool

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the parts: entries, sequences, and masks."""
        return (VALUE + 1, self.entries), (FIELDS, self.sequences), (self.masks, -(-self.vocabulary // WORD))

    @property
    def size(self) -> int:
        """Number of elements of all parts, int64."""
        return sum(map(math.prod, self.shapes))


class Changes:
    """The changes of a call's requests, collected one by one.

    Args:
        vocabulary: number of logits of a row.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._entries = list[tuple[int, int, NDArray[np.int64], NDArray[Any]]]()  # request, kind, tokens, values
        self._changes = dict[int, Adjustment]()
        self._masks = [np.full(-(-vocabulary // 8), 255, np.uint8)]  # the first one allows all tokens

    def add(self, number: int, change: Adjustment, limited: bool = True) -> int:
        """Adds a request's changes.

        Args:
            number: the request's.
            change: its changes at the root.
            limited: whether its mask and bans hold at all nodes; if not, they are not added.

        Returns:
            The number of its mask.
        """
        self._changes[number] = change
        parts: list[tuple[int, int | None, int, int | None, Any]] = [
            (BIASED, change.biased, change.biased_count, change.biases, c_float),
            (SEEN, change.seen, change.seen_count if _penalizes(change) else 0, change.generated, c_int32),
        ]
        allowed = _held(c_uint8, change.allowed if limited else None, self._vocabulary)
        if limited:
            ends = change.end_count if _others_allowed(allowed, change) else 0
            parts += [(BANNED, change.banned, change.banned_count, None, c_float)]
            parts += [(END, change.ends, ends, None, c_float)]
        for kind, address, count, values, type_of_values in parts:
            tokens, amounts = _held(c_int64, address, count), _held(type_of_values, values, count)
            inside = (tokens >= 0) & (tokens < self._vocabulary)  # ids beyond the row change nothing
            if inside.any():
                amounts = amounts[inside] if len(amounts) else np.zeros(inside.sum())
                self._entries.append((number, kind, tokens[inside], amounts))
        return self.mask(allowed) if len(allowed) else 0

    def mask(self, allowed: NDArray[Any]) -> int:
        """Adds a mask of the tokens that are allowed, [vocabulary]. Returns its number."""
        self._masks.append(np.packbits(allowed.astype(np.bool_), bitorder="little"))
        return len(self._masks) - 1

    def sizes(self) -> ChangeSizes | None:
        """Returns the sizes of a table; None without any change."""
        if not self._changes:
            return None
        count, masks = sum(len(tokens) for *_, tokens, _ in self._entries), len(self._masks)
        return ChangeSizes(
            vocabulary=self._vocabulary,
            sequences=doubled(len(self._changes) + 1, 2),
            entries=doubled(count, MIN_ENTRIES) if count else 0,
            masks=doubled(masks, 2) if masks > 1 else 0,
            penalized=any(map(_penalizes, self._changes.values())),
        )

    def fill(self, table: Tensor, sizes: ChangeSizes) -> None:
        """Writes a table of zeros, int64 [size] in the host's memory."""
        entries, sequences, masks = (part.numpy() for part in split(table, sizes.shapes))
        at = 0
        for number, kind, tokens, values in self._entries:
            columns = entries[:, at : (at := at + len(tokens))]
            columns[TOKEN], columns[SEQUENCE], columns[KIND] = tokens, number, kind
            columns[VALUE] = values.astype(np.float64).view(np.int64)
        floats = sequences.view(np.float64)
        floats[REPETITION] = 1.0
        for number, change in self._changes.items():
            floats[[REPETITION, FREQUENCY, PRESENCE], number] = change.repetition, change.frequency, change.presence
            sequences[END_STEPS, number] = change.end_steps
        if sizes.masks:
            masks.view(np.uint8)[: len(self._masks), : len(self._masks[0])] = self._masks


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Rows of logits, int64 tensors on the device.

    Attributes:
        rows: rows of each request, [sequences, n]; those beyond all rows are none.
        sequences: the request of each row, [R].
        masks: the number of each row's mask, [R].
        depths: depth of each row's node below the root, [R].
        paths: drafted tokens from the root to each row's node, [R, depth]; those beyond the vocabulary are none.
    """

    rows: Tensor
    sequences: Tensor
    masks: Tensor
    depths: Tensor
    paths: Tensor

    def part(self, start: int, count: int) -> ChangedRows:
        """Returns ``count`` rows from ``start`` on."""
        rows, end = self.rows - start, start + count
        rows = rows.where((rows >= 0) & (rows < count), count)
        fields = self.sequences, self.masks, self.depths, self.paths
        return ChangedRows(rows, *(field[start:end] for field in fields))


class DeviceChanges:
    """A table on the device.

    Args:
        table: int64 [size].
        sizes: its sizes.
    """

    def __init__(self, table: Tensor, sizes: ChangeSizes) -> None:
        self._sizes = sizes
        self._entries, self._sequences, self._masks = split(table, sizes.shapes)
        self._values = self._entries[VALUE].view(torch.float64).float()
        self._kind = self._entries[KIND]
        # Of each request and token: 0 for a new one, else one more than the number of times that it was generated.
        count = sizes.sequences * sizes.vocabulary if sizes.penalized else 0
        self._times = torch.zeros(count + 1, dtype=torch.int32, device=table.device)
        if sizes.penalized and sizes.entries:
            at = self._entries[SEQUENCE] * sizes.vocabulary + self._entries[TOKEN]
            at = at.where(self._kind == SEEN, len(self._times) - 1)
            self._times.index_copy_(0, at, self._values.int() + 1)

    def applied(self, logits: Tensor, rows: ChangedRows) -> Tensor:
        """Returns a copy of logits [R, vocabulary] with their changes, in the order of ``SamplingLaw``."""
        sizes, size = self._sizes, logits.numel()
        if sizes.masks:
            allowed = self._masks.view(torch.uint8).index_select(0, rows.masks)[..., None]
            bits = (allowed >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
            logits = logits.masked_fill(bits.flatten(1)[:, : sizes.vocabulary] == 0, -torch.inf)
        flat = torch.cat((logits.flatten(), logits.new_zeros(1)))  # the last element stands for those of no row
        if sizes.entries:
            entry_rows = rows.rows.index_select(0, self._entries[SEQUENCE])
            at = (entry_rows * sizes.vocabulary + self._entries[TOKEN][:, None]).clamp(max=size)
            left = self._sequences[END_STEPS].take(self._entries[SEQUENCE])[:, None]
            ended = rows.depths.take(entry_rows.clamp(max=len(rows.depths) - 1)) >= left
            kind = self._kind[:, None]
            banned = at.where((kind == BANNED) | ((kind == END) & ~ended), size)
            flat.index_fill_(0, banned.flatten(), -torch.inf)
            biased = at.where(kind == BIASED, size).flatten()
            flat.index_copy_(0, biased, flat.take(biased) + self._values[:, None].expand_as(at).flatten())
            if sizes.penalized:
                self._penalize(flat, at.where(kind == SEEN, size), rows)
        elif sizes.penalized:
            self._penalize(flat, None, rows)
        return flat[:-1].view_as(logits)

    def _penalize(self, flat: Tensor, seen: Tensor | None, rows: ChangedRows) -> None:
        """Applies the penalties to elements ``seen``, [entries, n], and to those of paths, which add to the counts."""
        vocabulary, paths = self._sizes.vocabulary, rows.paths
        row = torch.arange(len(paths), device=flat.device)[:, None]
        on_path = (row * vocabulary + paths).where(paths < vocabulary, len(flat) - 1)
        before = flat.take(on_path)
        if seen is not None:
            penalties = self._penalties(self._entries[SEQUENCE][:, None])
            values = _penalized(flat.take(seen), self._values[:, None].expand_as(seen), *penalties)
            flat.index_copy_(0, seen.flatten(), values.flatten())
        sequences = rows.sequences[:, None]
        root = self._times.take((sequences * vocabulary + paths).clamp(max=len(self._times) - 1))
        times = (root - 1).clamp(0) + (paths[:, :, None] == paths[:, None]).sum(-1)
        values = _penalized(before, times.float(), *self._penalties(sequences))
        flat.index_copy_(0, on_path.flatten(), values.flatten())

    def _penalties(self, sequences: Tensor) -> list[Tensor]:
        fields = self._sequences.view(torch.float64)
        return [fields[field].float().take(sequences) for field in (REPETITION, FREQUENCY, PRESENCE)]


class DraftChanges:
    """The changes of the logits of drafts.

    Args:
        requests: the drafts.
        vocabulary: number of the target's tokens.

    Attributes:
        sizes: sizes of the changes; None for none.
    """

    def __init__(self, requests: Sequence[ChainRequest], vocabulary: int) -> None:
        self._changes, self._fields = Changes(vocabulary), list[tuple[int, ...]]()
        for number, request in enumerate(requests):
            if request.changes is not None:
                at = len(self._fields)
                later = mask = self._changes.add(at, request.changes(vocabulary), request.possible is None)
                if request.possible is not None:
                    mask = self._changes.mask(request.possible(vocabulary))
                self._fields.append((number, at, mask, later))
        self.sizes = self._changes.sizes()

    def fill(self, table: Tensor, sequences: int) -> None:
        """Writes the table that ``LevelChanges`` reads, for a number of sequences with padding."""
        if self.sizes is not None:
            fields, changes = split(table, LevelChanges.shapes(self.sizes, sequences))
            numbers = fields.numpy()
            numbers[NUMBER] = self.sizes.sequences - 1
            for sequence, *values in self._fields:
                numbers[:, sequence] = values
            self._changes.fill(changes, self.sizes)


class LevelChanges:
    """The changes of the levels of drafts on the device.

    Args:
        table: the table.
        sizes: sizes of the changes.
        sequences: number of sequences, padding included.
        ids: int64 [size], the target's token of each logit; None if it is the logit's index.
    """

    def __init__(self, table: Tensor, sizes: ChangeSizes, sequences: int, ids: Tensor | None) -> None:
        self._sizes, self._sequences, self._ids = sizes, sequences, ids
        self._fields, changes = split(table, self.shapes(sizes, sequences))
        self._changes = DeviceChanges(changes, sizes)
        self._paths = self._fields[NUMBER][:, None][:, :0]  # drafted tokens from the root to each row

    @staticmethod
    def shapes(sizes: ChangeSizes, sequences: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts of the table."""
        return (LATER_MASK + 1, sequences), (sizes.size,)

    @staticmethod
    def size(sizes: ChangeSizes, sequences: int) -> int:
        return sum(map(math.prod, LevelChanges.shapes(sizes, sequences)))

    def at_roots(self, logits: Tensor) -> Tensor:
        """Returns the logits of the first level, [sequences, size], with their changes."""
        return self._applied(logits, self._fields[MASK])

    def below(self, logits: Tensor, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """Returns the logits of the next level, [sequences * n, size]; see ``Levels.next``."""
        above = self._paths if parents is None else self._paths.index_select(0, parents)
        self._paths = torch.cat((above, tokens[:, None]), 1)
        return self._applied(logits, self._fields[LATER_MASK])

    def _applied(self, logits: Tensor, masks: Tensor) -> Tensor:
        count = len(logits)
        numbers, each, at = self._fields[NUMBER], count // self._sequences, torch.arange(count, device=logits.device)
        rows = at.new_full((self._sizes.sequences, each), count).index_copy_(0, numbers, at.view(-1, each))
        numbers, masks = (field[:, None].expand(-1, each).flatten() for field in (numbers, masks))
        if self._ids is not None:
            wide = logits.new_full((count, self._sizes.vocabulary), -torch.inf)
            logits = wide.index_copy_(1, self._ids, logits)
        depths = torch.full_like(at, self._paths.shape[1])
        logits = self._changes.applied(logits, ChangedRows(rows, numbers, masks, depths, self._paths))
        return logits if self._ids is None else logits.index_select(1, self._ids)


def split(table: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Returns the parts of a table in its memory."""
    parts = table.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _penalized(values: Tensor, times: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    values = torch.where(values > 0, values / repetition, values * repetition)
    return torch.where(times > 0, values - (frequency * times + presence), values)


def _penalizes(change: Adjustment) -> bool:
    return (change.repetition, change.frequency, change.presence) != (1.0, 0.0, 0.0)


def _others_allowed(allowed: NDArray[Any], change: Adjustment) -> bool:
    """Returns whether any token except the ends is allowed."""
    if not len(allowed):
        return True
    ends = _held(c_int64, change.ends, change.end_count)
    return bool(allowed.sum() > allowed[np.unique(ends[(ends >= 0) & (ends < len(allowed))])].sum())


def _held(kind: Any, address: int | None, count: int) -> NDArray[Any]:
    """Returns a copy of an array in the host's memory; an empty one where there is none."""
    return np.array((kind * count).from_address(address)) if address and count else np.empty(0, kind)
