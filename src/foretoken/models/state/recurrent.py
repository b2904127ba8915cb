"""Recurrent states of sequences: a state and a log of inputs for each slot (see ``replay.py``)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foretoken.models.families.recurrence import Recurrence
from foretoken.models.state.replay import NOTHING, ReplayPlan, ReplaySpan, Rows, branch, fold

FLOAT = 4  # bytes
LOG_ROWS = 16  # a log grows by multiples of this


class StateMemory(Protocol):
    """Allocates memory for states."""

    def allocate(self, size: int) -> int:
        """Returns the address of ``size`` zeroed bytes. Raises MemoryError."""

    def free(self, address: int) -> None:
        """Frees memory that ``allocate`` returned."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copies ``size`` bytes to the address ``to``."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of a sequence's recurrent state."""

    layers: int  # number of recurrent layers
    state: int  # elements of one layer's state, float32
    inputs: int  # elements of one row that are kept for one layer, float32
    window: int  # number of earlier rows whose inputs a row needs, for a convolution

    @staticmethod
    def of(recurrence: Recurrence, layers: int) -> "StateShape":
        return StateShape(layers, recurrence.state, recurrence.inputs, recurrence.window)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a state with the inputs of the rows before it."""
        return self.layers * (self.state + self.window * self.inputs) * FLOAT

    @property
    def bytes(self) -> int:
        """Bytes of a running sequence with a short draft: its state, and ``LOG_ROWS`` rows of its log."""
        return self.layers * (self.state + LOG_ROWS * self.inputs) * FLOAT


@dataclass(eq=False, slots=True)
class RecurrentSlot:
    """The state of one sequence; rows of the log are those of ``replay.ReplaySpan``."""

    state: int = 0  # address of the states of all layers; 0 before the first pass
    log: int = 0  # address of the log, [layers, capacity, inputs]
    capacity: int = 0  # rows of the log of one layer
    position: int = 0  # number of rows that the state holds; -1 while a pass changes it, and after one that failed
    held: list[int] = field(default_factory=list)  # rows in the log of the cache rows from ``position`` on
    window: list[int] = field(default_factory=list)  # rows in the log of the cache rows before ``position``
    # addresses of snapshots that belong to no page yet, by the number of rows
    snapshots: dict[int, int] = field(default_factory=dict)
    # number of rows of the snapshot that follows the sequence, and whether a prefill pass wrote it
    follower: tuple[int, bool] | None = None


# Returns the addresses of snapshots to write while a slot's state advances from one number of rows to another, by
# their number of rows.
TakeSnapshots = Callable[[int, int, int], dict[int, int]]


class RecurrentStates:
    """Allocates states and logs to slots, and plans how passes change them.

    Args:
        memory: allocates the memory.
        shape: sizes of a state.
    """

    def __init__(self, memory: StateMemory, shape: StateShape) -> None:
        self._memory, self.shape = memory, shape
        self._slots: dict[int, RecurrentSlot] = {}
        self._after: list[tuple[RecurrentSlot, int, list[int], list[int]]] = []

    def slot(self, number: int) -> RecurrentSlot:
        """Returns a slot. Its memory is kept for the next sequence when it is released."""
        if number not in self._slots:
            self._slots[number] = RecurrentSlot()
            self.reset(self._slots[number])
        return self._slots[number]

    def reset(self, slot: RecurrentSlot) -> None:
        slot.position, slot.held, slot.window, slot.follower = 0, [], [-1] * self.shape.window, None

    def load(self, slot: RecurrentSlot, rows: int, snapshot: int) -> None:
        shape = self.shape
        self._allocate(slot, shape.window)
        states, row = shape.layers * shape.state * FLOAT, shape.inputs * FLOAT
        self._memory.copy(slot.state, snapshot, states)
        for layer in range(shape.layers):
            source = snapshot + states + layer * shape.window * row
            self._memory.copy(slot.log + layer * slot.capacity * row, source, shape.window * row)
        slot.position, slot.held, slot.window = rows, [], list(range(shape.window))

    def reaches(self, slot: RecurrentSlot, rows: int) -> int:
        """Returns the number of the first ``rows`` rows that the slot holds; 0 if a pass must start from the first."""
        if not 0 <= slot.position <= rows:
            return 0
        return min(rows, slot.position + len(slot.held))

    def accept(self, slot: RecurrentSlot, destination: int, sources: Sequence[int]) -> None:
        """Keeps the inputs of an accepted path: rows ``sources`` become the rows from ``destination`` on."""
        if slot.position >= 0:
            path = [slot.held[row - slot.position] for row in sources]
            slot.held[destination - slot.position :] = path

    def plan(self, parts: Sequence[Rows], take: TakeSnapshots) -> ReplayPlan:
        """Returns the steps of a pass. ``finish`` must follow it; if it fails, its sequences start from row 0."""
        plan, base = ReplayPlan(), 0
        self._after.clear()
        for part in parts:
            self._plan(plan, part, base, take)
            base += part.count
        return plan

    def finish(self) -> None:
        """Records that the last planned pass has run."""
        for slot, position, held, window in self._after:
            slot.position, slot.held, slot.window = position, held, window
        self._after.clear()

    def nbytes(self) -> int:
        """Returns the bytes of the states and logs of all slots, kept ones included."""
        shape = self.shape
        rows = sum(slot.capacity for slot in self._slots.values())
        states = sum(1 for slot in self._slots.values() if slot.state)
        return shape.layers * (states * shape.state + rows * shape.inputs) * FLOAT

    def check(self) -> None:
        """Raises AssertionError if a log's bookkeeping is inconsistent."""
        for slot in self._slots.values():
            used = [place for place in (*slot.held, *slot.window) if place >= 0]
            assert len(set(used)) == len(used), "two rows share a place of the log"
            assert max(used, default=-1) < slot.capacity, "a row has no place in the log"

    def _plan(self, plan: ReplayPlan, part: Rows, base: int, take: TakeSnapshots) -> None:
        slot, root, shape = self.slot(part.slot), part.nodes_at - 1, self.shape
        start = slot.position
        assert start >= 0 and start <= min(part.first, root) and part.first <= start + len(slot.held), (
            "a pass needs a state that is not there"
        )
        del slot.held[part.first - start :]  # their rows are computed again
        span = ReplaySpan(start, slot.held, slot.window, base, part.first, part.count, root, part.draft)
        kept = shape.window + span.end - root
        self._allocate(slot, len(slot.held) + len(slot.window) + kept)
        taken = take(part.slot, start, root)
        numbers = {rows: len(plan.snapshots) + number for number, rows in enumerate(taken)}
        plan.snapshots.extend(taken.values())
        before = span.before
        for rows, before in fold(plan, span, numbers):
            if rows in taken:
                at = taken[rows] + shape.layers * shape.state * FLOAT
                for number, row in enumerate(before):
                    plan.move(row, at + number * shape.inputs * FLOAT, shape.window)
        branch(plan, span, before)
        coded = [*before, *map(span.encoded, range(root, span.end))]
        places = self._places(plan, slot, coded)
        self._after.append((slot, root, places[shape.window :], places[: shape.window]))
        slot.position = -1
        plan.states.append(slot.state)
        plan.logs.append(slot.log)
        plan.log_rows.append(slot.capacity)
        plan.first_step.append(len(plan.sources))

    def _places(self, plan: ReplayPlan, slot: RecurrentSlot, rows: Sequence[int]) -> list[int]:
        """Returns the rows in the log of encoded rows. Rows of the pass get rows that nothing in the pass reads."""
        used = {*slot.held, *slot.window}
        free = (place for place in range(slot.capacity) if place not in used)
        places = []
        for row in rows:
            if row >= 0:
                place = next(free)
                plan.move(row, slot.log + place * self.shape.inputs * FLOAT, slot.capacity)
            else:
                place = -1 if row == NOTHING else ~row
            places.append(place)
        return places

    def _allocate(self, slot: RecurrentSlot, rows: int) -> None:
        """Allocates a slot's memory, with at least ``rows`` rows of the log."""
        shape = self.shape
        if not slot.state and shape.state:
            slot.state = self._memory.allocate(shape.layers * shape.state * FLOAT)
        if rows <= slot.capacity:
            return
        capacity, row = -(-rows // LOG_ROWS) * LOG_ROWS, shape.inputs * FLOAT
        log = self._memory.allocate(shape.layers * capacity * row)
        for layer in range(shape.layers if slot.log else 0):
            self._memory.copy(log + layer * capacity * row, slot.log + layer * slot.capacity * row, slot.capacity * row)
        if slot.log:
            self._memory.free(slot.log)
        slot.log, slot.capacity = log, capacity
