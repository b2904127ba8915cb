"""Shared pages: a prefix hit has the right content, no page leaks, and no sequence writes into another's pages."""

import ctypes
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from foretoken.models.state.pages import PAGE, Pages

ROW = 8  # bytes of one row here
BYTES = PAGE * ROW


@dataclass
class Memory:
    """Pages with something in them, and what they were written with."""

    held: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)

    def allocate(self, size: int) -> int:
        self.held.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self.held[-1])


@pytest.fixture
def pages() -> Pages:
    result = Pages(Memory().allocate, BYTES)
    result.enable_prefix_cache(100 * BYTES)
    return result


def rows(tokens: Sequence[int]) -> bytes:
    """Contents of the rows of ``tokens``: each a digest of all tokens up to its own."""
    digests, digest = array("q"), 0
    for token in tokens:
        digest = hash((digest, token))
        digests.append(digest)
    return digests.tobytes()


def filled(pages: Pages, slot: int, tokens: list[int], first: int) -> None:
    """Write rows ``first`` on."""
    pages.reserve(slot, first, len(tokens))
    written, at = rows(tokens), first * ROW
    while at < len(written):
        piece = written[at : (at // BYTES + 1) * BYTES]
        ctypes.memmove(address(pages, slot, at // BYTES) + at % BYTES, piece, len(piece))
        at += len(piece)


def address(pages: Pages, slot: int, at: int) -> int:
    return ctypes.cast(pages.addresses(slot), ctypes.POINTER(ctypes.c_uint64))[at]


def holds(pages: Pages, slot: int, tokens: list[int]) -> bool:
    expected = rows(tokens)
    starts = range(0, len(expected), BYTES)
    contents = [ctypes.string_at(address(pages, slot, start // BYTES), BYTES) for start in starts]
    return b"".join(contents)[: len(expected)] == expected


def text(*parts: int) -> list[int]:
    return [part for part in parts for _ in range(PAGE)]


def test_a_prompt_reuses_the_prefix_of_an_earlier_one(pages):
    tokens = text(1, 2, 3)
    slot, known = pages.acquire(tokens)
    assert (slot, known) == (0, 0)
    filled(pages, slot, tokens, 0)
    pages.publish(slot, tokens, len(tokens))
    assert pages.acquire(text(1, 2, 9)) == (1, 2 * PAGE)  # while the first still runs
    assert pages.acquire(tokens) == (2, 2 * PAGE)  # without the last page: one row has to be computed
    for one in range(3):
        pages.release(one)
    pages.check()
    assert pages.acquire([*tokens, 5]) == (0, 3 * PAGE)
    assert holds(pages, 0, tokens)


def test_prompts_of_another_salt_share_no_page(pages):
    tokens = text(1, 2)
    for slot, salt in enumerate(("a", "b", None)):
        assert pages.acquire([*tokens, 0], salt) == (slot, 0)
        filled(pages, slot, tokens, 0)
        pages.publish(slot, tokens, len(tokens))
    assert len({address(pages, slot, at) for slot in range(3) for at in range(2)}) == 6
    pages.check()
    for slot in range(3):
        pages.release(slot)
    for slot, salt in enumerate((None, "b", "a", "")):
        assert pages.acquire([*tokens, 0], salt) == (slot, 2 * PAGE if salt != "" else 0)
    pages.check()


def test_a_slot_takes_the_salt_of_its_next_sequence(pages):
    tokens = text(1, 2)
    for salt in ("a", None):
        assert pages.acquire([*tokens, 0], salt) == (0, 0)
        filled(pages, 0, tokens, 0)
        pages.publish(0, tokens, len(tokens))
        pages.release(0)
    assert [pages.acquire([*tokens, 0], salt)[1] for salt in ("a", None, "b")] == [2 * PAGE, 2 * PAGE, 0]


def test_without_a_bound_no_pages_are_kept():
    pages = Pages(Memory().allocate, BYTES)
    tokens = text(1, 2)
    slot, _ = pages.acquire(tokens)
    filled(pages, slot, tokens, 0)
    pages.publish(slot, tokens, len(tokens))
    pages.release(slot)
    assert pages.acquire([*tokens, 1]) == (0, 0)
    pages.check()


def test_least_recently_used_ends_are_evicted_first():
    memory = Memory()
    pages = Pages(memory.allocate, BYTES)
    pages.enable_prefix_cache(4 * BYTES)
    for part in (1, 2):
        tokens = text(part, part + 10)
        slot, _ = pages.acquire(tokens)
        filled(pages, slot, tokens, 0)
        pages.publish(slot, tokens, len(tokens))
        pages.release(slot)
    slot, _ = pages.acquire([])
    filled(pages, slot, text(7), 0)
    assert len(memory.held) == 4
    assert pages.acquire([*text(1, 11), 0])[1] == PAGE
    assert pages.acquire([*text(2, 12), 0])[1] == 2 * PAGE
    pages.check()


def shared(pages: Pages) -> list[int]:
    """Returns the tokens of two slots that share two pages."""
    tokens = text(1, 2)
    for slot in range(2):
        acquired, known = pages.acquire([*tokens, 0])
        assert acquired == slot
        filled(pages, slot, tokens, known)
        pages.publish(slot, tokens, len(tokens))
    return tokens


def test_writing_into_a_shared_page_copies_it(pages):
    tokens = shared(pages)
    assert address(pages, 0, 1) == address(pages, 1, 1)
    changed = text(1, 5)
    filled(pages, 1, changed, PAGE)
    assert holds(pages, 0, tokens) and holds(pages, 1, changed)
    pages.check()


def test_a_copy_keeps_the_rows_before_those_that_are_written(pages):
    tokens = shared(pages)
    changed = [*tokens[: PAGE + 9], 5, 5]
    filled(pages, 1, changed, PAGE + 9)
    assert holds(pages, 0, tokens) and holds(pages, 1, changed)


def test_a_page_is_shared_once_its_last_row_is_computed(pages):
    tokens = text(1)
    slot, _ = pages.acquire(tokens)
    filled(pages, slot, tokens[:-1], 0)
    pages.publish(slot, tokens, PAGE - 1)
    assert pages.acquire([*tokens, 0])[1] == 0
    filled(pages, slot, tokens, PAGE - 1)
    pages.publish(slot, tokens, PAGE)
    assert pages.acquire([*tokens, 0])[1] == PAGE


def test_a_rewritten_page_is_not_followed_by_the_pages_that_followed_its_old_content(pages):
    first, _ = pages.acquire([*text(1, 2), 0])
    filled(pages, first, text(1, 2), 0)
    pages.publish(first, text(1, 2), 2 * PAGE)
    pages.release(first)
    second, known = pages.acquire([*text(1), 0])  # the page of twos stays idle
    assert known == PAGE
    filled(pages, second, text(3), 0)
    pages.publish(second, text(3), PAGE)
    third, known = pages.acquire([*text(3, 2), 0])
    assert known == PAGE
    assert holds(pages, third, text(3))


class History:
    """Slots beside a plain dictionary of the text that was computed in each, driven as ``Handle`` drives them.

    All rows of a text but the newest token's are computed. Texts are long runs of two tokens, so that many share a
    prefix, and are cut at the first and the last row of a page.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.memory = Memory()
        self.pages = Pages(self.memory.allocate, BYTES)
        self.limit = self.largest = self.draw.choice([4, 12])
        self.pages.enable_prefix_cache(self.limit * BYTES)
        self.texts: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.shareable: dict[int, int] = {}  # leading rows of a slot that other sequences may share
        self.published: set[tuple[int, ...]] = set()
        self.complete = True  # no published page was evicted or rewritten

    def step(self) -> None:
        if not self.texts or self.draw.random() < 0.3:
            self.acquire()
        elif self.draw.random() < 0.4:
            slot = self.draw.choice(list(self.texts))
            self.pages.release(slot)
            del self.texts[slot], self.computed[slot]
        else:
            self.rewrite(self.draw.choice(list(self.texts)))
        self.check()

    def acquire(self) -> None:
        tokens = [*text(*self.draw.choices([1, 2], k=self.draw.randint(0, 2))), *[1] * self.end(), 0]
        slot, known = self.pages.acquire(tokens)
        assert slot not in self.texts and known % PAGE == 0 and known < len(tokens)
        assert not known or tuple(tokens[:known]) in self.published
        if self.complete:
            expected = [at for at in range(PAGE, len(tokens), PAGE) if tuple(tokens[:at]) in self.published]
            assert known == max(expected, default=0)
        self.texts[slot], self.computed[slot], self.shareable[slot] = tokens, known, known
        self.compute(slot)

    def rewrite(self, slot: int) -> None:
        """Back to some row, where the text is that long, and on from there."""
        kept = self.texts[slot][:-1][: self.draw.randint(0, 1) * PAGE + self.end()]
        self.computed[slot] = min(self.computed[slot], len(kept))
        self.texts[slot] = [*kept, *self.draw.choices([1, 2]) * self.draw.choice([1, PAGE - 1, PAGE]), 0]
        self.compute(slot)

    def compute(self, slot: int) -> None:
        tokens, first = self.texts[slot][:-1], self.computed[slot]
        self.complete &= first >= self.shareable[slot]
        filled(self.pages, slot, tokens, first)
        self.computed[slot] = len(tokens)
        self.largest = max(self.largest, self.pages.nbytes() // BYTES)
        self.complete &= len(self.memory.held) < self.limit
        self.pages.publish(slot, self.texts[slot], len(tokens))
        self.shareable[slot] = len(tokens) // PAGE * PAGE
        self.published |= {tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)}

    def end(self) -> int:
        return self.draw.choice([0, PAGE - 1])

    def check(self) -> None:
        self.pages.check()
        assert all(holds(self.pages, slot, tokens[: self.computed[slot]]) for slot, tokens in self.texts.items())
        assert len(self.memory.held) <= self.largest


@pytest.mark.parametrize("seed", range(80))
def test_any_history_keeps_bookkeeping_and_contents_consistent(seed: int) -> None:
    history = History(seed)
    for _ in range(60):
        history.step()


def test_rows_beyond_the_window_are_discarded() -> None:
    discarded: list[int] = []
    pages = Pages(Memory().allocate, BYTES, window=100, discard=discarded.append)
    slot, _ = pages.acquire()
    pages.reserve(slot, 0, 6 * PAGE)
    held = list(pages.held(slot))
    pages.discard_before(slot, PAGE + 98)
    assert not discarded, "row 162 sees row 63"
    pages.discard_before(slot, PAGE + 99)
    assert discarded == held[:1]
    pages.discard_before(slot, 5 * PAGE)
    assert discarded == held[:3]
    assert pages.resume(slot, 3 * PAGE + 99) == 3 * PAGE + 99
    assert pages.resume(slot, 3 * PAGE + 98) == 0, "it would see a row that is gone"
    pages.reserve(slot, 0, PAGE)  # all rows are computed again
    assert pages.resume(slot, PAGE) == PAGE


def test_pages_that_later_prompts_may_reuse_are_kept() -> None:
    discarded: list[int] = []
    pages = Pages(Memory().allocate, BYTES, window=100, discard=discarded.append)
    early, _ = pages.acquire()
    pages.reserve(early, 0, 6 * PAGE)
    pages.discard_before(early, 5 * PAGE)
    pages.enable_prefix_cache(100 * BYTES)
    pages.publish(early, text(1, 2, 3), 3 * PAGE)
    assert pages.acquire(text(1, 2, 3, 4))[1] == 0, "a page without some layers was reused"
    late, _ = pages.acquire()
    pages.reserve(late, 0, 6 * PAGE)
    pages.discard_before(late, 5 * PAGE)
    assert len(discarded) == 3, "a page that may be reused was discarded"
