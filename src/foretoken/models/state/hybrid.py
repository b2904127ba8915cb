"""The state of models with recurrent layers: pages of keys and values together with recurrent states.

A prompt reuses a prefix only up to a page at whose end there is a snapshot of the recurrent state. Snapshots are kept
with their page within a separate bound, evicted in the order of their last use, and dropped with their page.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from foretoken.models.state.pages import PAGE, Page, Pages
from foretoken.models.state.recurrent import RecurrentSlot, RecurrentStates, StateMemory, StateShape
from foretoken.models.state.replay import ReplayPlan, Rows


class Snapshots:
    """Recurrent states at the ends of pages, by the serial of the page.

    Args:
        allocate: returns the address of a number of zeroed bytes.
        size: bytes of a snapshot.
    """

    def __init__(self, allocate: Callable[[int], int], size: int) -> None:
        self._allocate, self._size = allocate, size
        self.limit = 0
        self._kept: OrderedDict[int, int] = OrderedDict()  # addresses by serial, least recently used first
        self._spare: list[int] = []
        self.allocated = 0

    def __contains__(self, serial: int) -> bool:
        return serial in self._kept

    def take(self) -> int | None:
        """Returns memory: unused, new, or the least recently used snapshot's; None if the bound allows none."""
        if self._spare:
            return self._spare.pop()
        if self.allocated < self.limit:
            self.allocated += 1
            return self._allocate(self._size)
        return self._kept.popitem(last=False)[1] if self._kept else None

    def give_back(self, address: int) -> None:
        self._spare.append(address)

    def keep(self, serial: int, address: int) -> None:
        """Keeps the snapshot at the end of a page; a second one of the same page is equal, and is dropped."""
        if serial in self._kept:
            self.give_back(address)
        else:
            self._kept[serial] = address

    def drop(self, serial: int) -> None:
        """Drops the snapshot at the end of a page, if there is one."""
        if serial in self._kept:
            self.give_back(self._kept.pop(serial))

    def use(self, serial: int) -> int:
        """Returns the address of a snapshot, which becomes the most recently used one."""
        self._kept.move_to_end(serial)
        return self._kept[serial]

    def check(self, serials: set[int], pending: int) -> None:
        """Raises AssertionError if a snapshot has no page or leaked.

        Args:
            serials: serials of the pages.
            pending: number of snapshots in slots.
        """
        assert self._kept.keys() <= serials, "a snapshot has no page"
        assert len(self._kept) + len(self._spare) + pending == self.allocated, "a snapshot leaked"


class HybridState(Pages):
    """Pages whose slots also have a recurrent state.

    Args:
        memory: allocates pages, states and snapshots.
        page_bytes: size of a page.
        shape: sizes of a recurrent state.
    """

    def __init__(self, memory: StateMemory, page_bytes: int, shape: StateShape) -> None:
        super().__init__(memory.allocate, page_bytes, memory.copy)
        self.states = RecurrentStates(memory, shape)
        self.snapshots = Snapshots(memory.allocate, shape.snapshot_bytes)
        # pages between snapshots, so that snapshots take at most the memory of pages
        self._every = -(-shape.snapshot_bytes // page_bytes)

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        snapshot, run = self.states.shape.snapshot_bytes, self._every * self.page_bytes
        self.snapshots.limit = max_bytes // (run + snapshot)
        return super().enable_prefix_cache(max_bytes - self.snapshots.limit * snapshot)

    def acquire(self, tokens: Sequence[int] = (), scope: Hashable = None) -> tuple[int, int]:
        number, _ = super().acquire(tokens, scope)
        slot = self._slots[number]
        while slot.pages and slot.pages[-1].serial not in self.snapshots:
            slot.addresses.pop()
            self._let_go(slot.pages.pop())
        slot.known = len(slot.pages)
        self.states.reset(self.states.slot(number))  # its snapshot is loaded for the first pass
        return number, slot.known * PAGE

    def release(self, number: int) -> None:
        self._give_back(self.states.slot(number))
        super().release(number)

    def publish(self, number: int, tokens: Sequence[int], rows: int) -> None:
        super().publish(number, tokens, rows)
        slot, state = self._slots[number], self.states.slot(number)
        if state.position < 0:
            self._give_back(state)
        for at in [at for at in state.snapshots if at <= slot.known * PAGE]:
            self.snapshots.keep(slot.pages[at // PAGE - 1].serial, state.snapshots.pop(at))

    def resume(self, number: int, rows: int) -> int:
        slot, state = self._slots[number], self.states.slot(number)
        if state.position < 0:  # the last pass failed
            self._give_back(state)
        reached = self.states.reaches(state, rows)
        ends = range(min(slot.known, rows // PAGE), reached // PAGE, -1)
        at = next((at for at in ends if slot.pages[at - 1].serial in self.snapshots), 0)
        if at:
            self.states.load(state, at * PAGE, self.snapshots.use(slot.pages[at - 1].serial))
            return at * PAGE
        if not reached:
            self.states.reset(state)
        return reached

    def accept(self, number: int, destination: int, sources: Sequence[int]) -> None:
        self.states.accept(self.states.slot(number), destination, sources)

    def finish(self) -> None:
        self.states.finish()

    def plan(self, parts: Sequence[Rows]) -> ReplayPlan:
        return self.states.plan(parts, self._take)

    def nbytes(self) -> int:
        return super().nbytes() + self.states.nbytes()

    def check(self) -> None:
        super().check()
        self.states.check()
        keyed = {page.serial for page in self._known.values()}
        pending = sum(len(self.states.slot(number).snapshots) for number in range(len(self._slots)))
        self.snapshots.check(keyed, pending)

    def _take(self, number: int, start: int, end: int) -> dict[int, int]:
        """Returns the snapshots to write while a slot's state advances from ``start`` to ``end`` rows, by row count.

        One is written at every ``_every``-th page. Another one follows the sequence at its last page, so that a
        preempted request computes few rows again; the one at the end of the prompt stays.
        """
        state, taken = self.states.slot(number), {}
        ends = range(start // PAGE + 1, end // PAGE + 1) if self.limit is not None else range(0)
        for at in ends:
            if at % self._every and at < ends[-1]:
                continue
            address = self.snapshots.take()
            if address is None:
                break
            state.snapshots[at * PAGE] = taken[at * PAGE] = address
            prefills = end - start >= PAGE
            if at % self._every:
                if state.follower and state.follower[1] == prefills:
                    self._drop(number, state.follower[0])
                state.follower = at * PAGE, prefills
        return taken

    def _drop(self, number: int, rows: int) -> None:
        """Drops the snapshot of a slot's first ``rows`` rows."""
        pending, slot = self.states.slot(number).snapshots, self._slots[number]
        if rows in pending:
            self.snapshots.give_back(pending.pop(rows))
        elif rows <= slot.known * PAGE:
            self.snapshots.drop(slot.pages[rows // PAGE - 1].serial)

    def _give_back(self, state: RecurrentSlot) -> None:
        """Frees the snapshots of a slot that belong to no page yet."""
        for address in state.snapshots.values():
            self.snapshots.give_back(address)
        state.snapshots.clear()

    def _forget(self, page: Page) -> None:
        if page.key is not None:
            self.snapshots.drop(page.serial)
        super()._forget(page)
