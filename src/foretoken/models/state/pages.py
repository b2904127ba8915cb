"""A paged KV cache with prefix caching: a slot is a list of pages, and sequences with a common prefix share pages.

A full page of committed tokens is never written again, so every sequence with the same tokens up to its end can read
it. Such pages are found by their content. Pages that no slot holds are kept for later prompts within a bound on all
memory, and evicted in the order of their last use (LRU).
"""

from __future__ import annotations

import ctypes
import heapq
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

from foretoken.models.state.replay import ReplayPlan, Rows

PAGE = 64  # cache rows of one page; csrc/specs.hpp has the same number

# Identifies a page's content: the serial of the page before it (the scope for the first page), and its tokens.
Key = tuple[Hashable, tuple[int, ...]]


@dataclass(eq=False, slots=True)
class Page:
    """One page."""

    address: int  # its memory
    serial: int  # unique number of its content
    users: int = 1  # number of slots that hold it
    key: Key | None = None  # its content; None while the page may still be written


@dataclass(eq=False, slots=True)
class Slot:
    """The pages of one sequence."""

    pages: list[Page] = field(default_factory=list)  # in the order of the sequence
    addresses: array[int] = field(default_factory=lambda: array("Q"))  # their memory, as the kernels read it
    known: int = 0  # number of leading pages that sequences with the same ``scope`` may share
    scope: Hashable = None  # see ``Pages.acquire``
    discarded: int = 0  # number of leading pages that no longer hold all layers


class SlotCache(ABC):
    """A KV cache with a slot for each sequence."""

    @abstractmethod
    def acquire(self, tokens: Sequence[int] = (), scope: Hashable = None) -> tuple[int, int]:
        """Takes the lowest free slot, which keeps a batch dense, for a sequence that begins with ``tokens``.

        Only rows with the same ``scope``, which is no integer, are reused. Returns the slot, and the number of leading
        tokens whose rows it holds: always fewer than ``tokens``.
        """

    @abstractmethod
    def release(self, number: int) -> None:
        """Frees a slot."""

    @abstractmethod
    def nbytes(self) -> int:
        """Returns the bytes that slots hold."""

    def publish(self, number: int, tokens: Sequence[int], rows: int) -> None:
        """Makes rows shareable: the slot's first ``rows`` rows hold the first of ``tokens`` and are final."""
        return

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        """Keeps rows for later prompts, within ``max_bytes`` for all slots. Returns whether the cache supports it."""
        return False

    def resume(self, number: int, rows: int) -> int:
        """Returns the number of a slot's first ``rows`` rows that the next pass can follow; it recomputes others."""
        return rows

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent."""
        return


class Pages(SlotCache):
    """Allocates pages to slots. Full pages of a slot are shareable.

    Args:
        allocate: returns the address of as many zeroed bytes as it is called with.
        page_bytes: size of a page.
        copy: copies as many bytes to an address as it is called with, from another address.
        window: longest attention window of the layers that have one.
        discard: returns the memory of those layers in the page at an address to the system; None to keep it.
    """

    def __init__(
        self,
        allocate: Callable[[int], int],
        page_bytes: int,
        copy: Callable[[int, int, int], object] = ctypes.memmove,
        window: int = 0,
        discard: Callable[[int], object] | None = None,
    ) -> None:
        self._allocate, self._copy, self.page_bytes = allocate, copy, page_bytes
        self._window, self._discard = window, discard
        self.limit: int | None = None
        self._slots: list[Slot] = []
        self._free_slots: list[int] = []
        self._spare: list[int] = []
        self._known: dict[Key, Page] = {}
        self._idle: OrderedDict[int, Page] = OrderedDict()  # known pages that no slot holds, least recently used first
        self._serials = count(1)
        self._allocated = 0

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        """See ``SlotCache``; open slots may exceed the bound."""
        self.limit = max_bytes
        return True

    def acquire(self, tokens: Sequence[int] = (), scope: Hashable = None) -> tuple[int, int]:
        if not self._free_slots:
            self._free_slots.append(len(self._slots))
            self._slots.append(Slot())
        number = heapq.heappop(self._free_slots)
        slot = self._slots[number]
        slot.scope = scope
        before: Hashable = scope
        while self.limit is not None and (len(slot.pages) + 1) * PAGE < len(tokens):
            start = len(slot.pages) * PAGE
            page = self._known.get((before, tuple(tokens[start : start + PAGE])))
            if page is None:
                break
            page.users += 1
            self._idle.pop(page.serial, None)
            self._append(slot, page)
            before = page.serial
        slot.known = len(slot.pages)
        return number, slot.known * PAGE

    def release(self, number: int) -> None:
        """Frees a slot. Its shareable pages are kept for later prompts, the others are reused."""
        slot, self._slots[number] = self._slots[number], Slot()
        for page in reversed(slot.pages):  # the end of a text is evicted before its beginning
            self._let_go(page)
        heapq.heappush(self._free_slots, number)

    def publish(self, number: int, tokens: Sequence[int], rows: int) -> None:
        slot = self._slots[number]
        if self.limit is None or slot.discarded:
            return
        while (slot.known + 1) * PAGE <= rows:
            at = slot.known
            before = slot.pages[at - 1].serial if at else slot.scope
            key = before, tuple(tokens[at * PAGE : (at + 1) * PAGE])
            page, shared = slot.pages[at], self._known.get(key)
            if shared is None:
                page.key = key
                self._known[key] = page
            elif shared is not page:  # another sequence computed the same content meanwhile
                shared.users += 1
                self._idle.pop(shared.serial, None)
                slot.pages[at], slot.addresses[at] = shared, shared.address
                self._let_go(page)
            slot.known += 1

    def resume(self, number: int, rows: int) -> int:
        return rows if self._slots[number].discarded * PAGE <= max(0, rows + 1 - self._window) else 0

    def accept(self, number: int, destination: int, sources: Sequence[int]) -> None:
        """Records that rows ``sources`` (ascending), a draft's accepted path, become those from ``destination`` on."""

    def plan(self, parts: Sequence[Rows]) -> ReplayPlan | None:
        """Returns the steps of recurrent layers in a pass, which ``finish`` must follow; None without such layers."""
        return None

    def finish(self) -> None:
        """Records that the pass that was planned last has run."""

    def reserve(self, number: int, first: int, rows: int) -> int:
        """Allocates pages for ``rows`` rows, of which those from ``first`` on will be written.

        Returns the address of the slot's array of pages; valid until the slot grows.
        """
        slot = self._slots[number]
        for at in range(first // PAGE, slot.known):
            self._take_back(slot, at)
        slot.known = min(slot.known, first // PAGE)
        while len(slot.pages) * PAGE < rows:
            self._append(slot, Page(self._address(), next(self._serials)))
        slot.discarded = min(slot.discarded, first // PAGE)
        return slot.addresses.buffer_info()[0]

    def discard_before(self, number: int, row: int) -> None:
        """Discards what rows from ``row`` on do not see, unless later prompts may reuse pages."""
        slot = self._slots[number]
        while self._discard and self.limit is None and (slot.discarded + 1) * PAGE <= row + 1 - self._window:
            self._discard(slot.pages[slot.discarded].address)
            slot.discarded += 1

    def addresses(self, number: int) -> int:
        return self._slots[number].addresses.buffer_info()[0]

    def count(self, number: int) -> int:
        return len(self._slots[number].pages)

    def held(self, number: int) -> array[int]:
        return self._slots[number].addresses

    def nbytes(self) -> int:
        return self.page_bytes * len({page.serial for slot in self._slots for page in slot.pages})

    def check(self) -> None:
        held = [page for slot in self._slots for page in slot.pages]
        users: dict[int, int] = {}
        for page in held:
            users[page.serial] = users.get(page.serial, 0) + 1
        assert all(page.users == users[page.serial] for page in held), "a page's users are miscounted"
        assert all(not page.users and page.key for page in self._idle.values()), "a kept page is in use, or has no key"
        assert all(self._known[page.key] is page for page in self._idle.values() if page.key), "a kept page is lost"
        assert all(slot.known <= len(slot.pages) for slot in self._slots), "a slot shares more than it has"
        unshared = [page for slot in self._slots for page in slot.pages[slot.known :]]
        assert all(page.key is None and page.users == 1 for page in unshared), "a page in work is shared"
        every = {page.address for page in held} | {page.address for page in self._idle.values()} | {*self._spare}
        assert len(every) == len(users) + len(self._idle) + len(self._spare) == self._allocated, "a page leaked"
        assert all(list(slot.addresses) == [page.address for page in slot.pages] for slot in self._slots)
        assert all(not self._slots[number].pages for number in self._free_slots), "a free slot holds pages"

    def _append(self, slot: Slot, page: Page) -> None:
        slot.pages.append(page)
        slot.addresses.append(page.address)

    def _let_go(self, page: Page) -> None:
        page.users -= 1
        if page.users:
            return
        if page.key is None:
            self._spare.append(page.address)
        else:
            self._idle[page.serial] = page

    def _address(self) -> int:
        """Returns the memory of an unused page: a spare one, a new one, or the least recently used kept one."""
        if self._spare:
            return self._spare.pop()
        full = self.limit is not None and (self._allocated + 1) * self.page_bytes > self.limit
        if full and self._idle:
            _, page = self._idle.popitem(last=False)
            self._forget(page)
            return page.address
        address = self._allocate(self.page_bytes)
        self._allocated += 1
        return address

    def _take_back(self, slot: Slot, at: int) -> None:
        """Prepares page ``at`` for writing: a page of this slot alone loses its key, a shared page is copied."""
        page = slot.pages[at]
        if page.users == 1:
            self._forget(page)
            page.serial = next(self._serials)  # keys of idle pages that follow the old content hold the old serial
            return
        copy = Page(self._address(), next(self._serials))
        self._copy(copy.address, page.address, self.page_bytes)
        slot.pages[at], slot.addresses[at] = copy, copy.address
        page.users -= 1

    def _forget(self, page: Page) -> None:
        if page.key is not None:
            del self._known[page.key]
            page.key = None
