"""The order in which recurrent layers process the rows of a pass.

A recurrent layer keeps one state per sequence, which each token changes. It cannot be rewound, so the state lags: it
holds the committed tokens before the newest one (*the root*). For the root and the draft nodes only the small *inputs*
of the layer are kept, in a log. A later pass replays the inputs of accepted tokens, one after the other, in the order
and with the operations of plain decoding, so the state has the same bits. A tree is processed depth first, with one
running state and a copy at each branch.

A pass is a list of *steps*. A step reads a state, adds one row, and writes a state: the sequence's own, or a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from foretoken.core.draft import Draft

# Indices of states, with the values of csrc/specs.hpp; copies have indices from 0 on.
OWN, ZEROS, NOWHERE = -1, -2, -2
NOTHING = -(2**31)  # inputs of rows before the first one


_ints, _words = partial(array, "i"), partial(array, "Q")


class Rows(Protocol):
    """One sequence's rows in a pass; see ``pass_plan.Part``."""

    @property
    def slot(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def nodes_at(self) -> int: ...
    @property
    def draft(self) -> Draft: ...


@dataclass(slots=True)
class ReplayPlan:
    """The steps of one pass, sequence after sequence, as the kernels read them.

    Rows are encoded: a row of the pass as its index, and row r of the sequence's log as ``~r``.
    """

    # [sequences + 1]; the first step of each sequence
    first_step: array[int] = field(default_factory=lambda: array("i", [0]))
    # [steps]; the state that a step reads: ``OWN``, ``ZEROS``, or a copy
    sources: array[int] = field(default_factory=_ints)
    # [steps]; the state that it writes: ``OWN``, ``NOWHERE``, or a copy
    targets: array[int] = field(default_factory=_ints)
    saves: array[int] = field(default_factory=_ints)  # [steps]; the snapshot that it also writes; -1 for none
    # [steps, 1 + window]; the row of a step, then the rows before it, the nearest first
    inputs: array[int] = field(default_factory=_ints)
    copies: int = 0  # number of states beside the sequences' states
    states: array[int] = field(default_factory=_words)  # [sequences]; address of each sequence's state
    logs: array[int] = field(default_factory=_words)  # [sequences]; address of each sequence's log
    log_rows: array[int] = field(default_factory=_ints)  # [sequences]; rows of the log of one layer
    snapshots: array[int] = field(default_factory=_words)  # [snapshots]; address of each snapshot's state
    moved: array[int] = field(default_factory=_ints)  # encoded rows whose inputs are copied
    moved_of: array[int] = field(default_factory=_ints)  # the sequence of each
    moved_to: array[int] = field(default_factory=_words)  # the address in the first layer to which each is copied
    moved_stride: array[int] = field(default_factory=_ints)  # rows between this address in one layer and in the next

    def step(self, source: int, target: int, save: int, inputs: Sequence[int]) -> None:
        self.sources.append(source)
        self.targets.append(target)
        self.saves.append(save)
        self.inputs.extend(inputs)
        self.copies = max(self.copies, target + 1)

    def move(self, row: int, address: int, stride: int) -> None:
        """Adds a copy of the inputs of a row of the current sequence."""
        self.moved.append(row)
        self.moved_of.append(len(self.first_step) - 1)
        self.moved_to.append(address)
        self.moved_stride.append(stride)


@dataclass(frozen=True, slots=True)
class ReplaySpan:
    """One sequence's rows in a pass, and its state and log before it."""

    position: int  # number of rows that the state holds
    held: Sequence[int]  # rows in the log of the cache rows from ``position`` on
    # rows in the log of the cache rows before ``position``, the nearest first; -1 before the first row
    window: Sequence[int]
    base: int  # the sequence's first row of the pass
    first: int  # the cache row of that row
    count: int  # number of rows in the pass
    root: int  # the cache row of the newest committed token; draft node i follows in row ``root + 1 + i``
    draft: Draft  # the draft whose nodes are the last rows

    def encoded(self, row: int) -> int:
        """Returns the code of a cache row from ``position`` on."""
        return self.base + row - self.first if row >= self.first else ~self.held[row - self.position]

    @property
    def before(self) -> tuple[int, ...]:
        """Codes of the rows before ``position``, the nearest first."""
        return tuple(~place if place >= 0 else NOTHING for place in self.window)

    @property
    def end(self) -> int:
        return self.first + self.count


def fold(plan: ReplayPlan, span: ReplaySpan, saves: dict[int, int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Adds the steps of the committed rows before the root, which change the sequence's state.

    Args:
        plan: the plan to extend.
        span: the sequence.
        saves: index of the snapshot to write by the number of rows of the state.

    Yields:
        At every snapshot and after the last row: the number of rows that the state holds, and the codes of the rows
        before it.
    """
    before, source = span.before, OWN if span.position else ZEROS
    for row in range(span.position, span.root):
        inputs = (span.encoded(row), *before)
        save = saves.get(row + 1, -1)
        plan.step(source, OWN, save, inputs)
        source, before = OWN, inputs[:-1]
        if save >= 0:
            yield row + 1, before
    yield span.root, before


def branch(plan: ReplayPlan, span: ReplaySpan, before: tuple[int, ...]) -> None:
    """Adds the steps of the root and the draft nodes, depth first; none of them changes the sequence's state.

    Args:
        plan: the plan to extend.
        span: the sequence.
        before: codes of the rows before the root.
    """
    children = _children(span.draft, max(0, span.first - span.root - 1))
    source = OWN if span.root else ZEROS
    waiting = [(-1, source, 0, before)]
    while waiting:
        node, source, copy, before = waiting.pop()
        inputs = (span.encoded(span.root + 1 + node), *before)
        below = children.get(node, ())
        plan.step(source, copy if below else NOWHERE, -1, inputs)
        # The last child continues in the copy of its parent, which no step reads later.
        for number, child in enumerate(reversed(below)):
            waiting.append((child, copy, copy + bool(number), inputs[:-1]))


def _children(draft: Draft, done: int) -> dict[int, list[int]]:
    """Returns the children of each node, -1 the root, without branches whose nodes are all among the first ``done``."""
    needed = set(range(done, len(draft)))
    for node in range(len(draft) - 1, -1, -1):
        if node in needed:
            needed.add(draft.parents[node])
    children: dict[int, list[int]] = {}
    for node in sorted(needed - {-1}):
        children.setdefault(draft.parents[node], []).append(node)
    return children
