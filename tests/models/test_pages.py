"""Pages that prompts share: what is found is what was put there, nothing leaks, and nobody writes into another's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.models.native.bindings import PAGE
from foretoken.models.native.pages import Pages

BYTES = 64


@dataclass
class Memory:
    """Pages with something in them, and what they were written with."""

    held: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)

    def allocate(self, size: int) -> int:
        self.held.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(self.held[-1])


def filled(pages: Pages, slot: int, tokens: list[int], first: int) -> None:
    """Write rows ``first`` on: a page's content is a digest of all tokens up to its end."""
    pages.reserve(slot, first, len(tokens))
    for at in range(first // PAGE, -(-len(tokens) // PAGE)):
        ctypes.memmove(address(pages, slot, at), digest(tokens[: (at + 1) * PAGE]), BYTES)


def digest(tokens: list[int]) -> bytes:
    return repr(hash(tuple(tokens))).encode().ljust(BYTES, b".")


def address(pages: Pages, slot: int, at: int) -> int:
    return ctypes.cast(pages.addresses(slot), ctypes.POINTER(ctypes.c_uint64))[at]


def holds(pages: Pages, slot: int, tokens: list[int]) -> bool:
    ends = range(0, len(tokens) - len(tokens) % PAGE, PAGE)
    return all(ctypes.string_at(address(pages, slot, at // PAGE), BYTES) == digest(tokens[: at + PAGE]) for at in ends)


def text(*parts: int) -> list[int]:
    return [part for part in parts for _ in range(PAGE)]


def test_a_prompt_finds_what_an_earlier_one_began_with():
    pages = Pages(Memory().allocate, BYTES)
    pages.keep(100 * BYTES)
    tokens = text(1, 2, 3)
    slot, known = pages.acquire(tokens)
    assert (slot, known) == (0, 0)
    filled(pages, slot, tokens, 0)
    pages.publish(slot, tokens, len(tokens))
    assert pages.acquire(text(1, 2, 9)) == (1, 2 * PAGE)  # while the first still runs
    assert pages.acquire(tokens) == (2, 2 * PAGE)  # the last page is left out: one row has to be computed
    for one in range(3):
        pages.release(one)
    pages.check()
    assert pages.acquire([*tokens, 5]) == (0, 3 * PAGE)
    assert holds(pages, 0, tokens)


def test_prompts_of_another_salt_share_no_page():
    pages = Pages(Memory().allocate, BYTES)
    pages.keep(100 * BYTES)
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


def test_a_slot_takes_the_salt_of_its_next_sequence():
    pages = Pages(Memory().allocate, BYTES)
    pages.keep(100 * BYTES)
    tokens = text(1, 2)
    for salt in ("a", None):
        assert pages.acquire([*tokens, 0], salt) == (0, 0)
        filled(pages, 0, tokens, 0)
        pages.publish(0, tokens, len(tokens))
        pages.release(0)
    assert [pages.acquire([*tokens, 0], salt)[1] for salt in ("a", None, "b")] == [2 * PAGE, 2 * PAGE, 0]


def test_without_a_bound_nothing_is_kept():
    pages = Pages(Memory().allocate, BYTES)
    tokens = text(1, 2)
    slot, _ = pages.acquire(tokens)
    filled(pages, slot, tokens, 0)
    pages.publish(slot, tokens, len(tokens))
    pages.release(slot)
    assert pages.acquire([*tokens, 1]) == (0, 0)
    pages.check()


def test_the_longest_unused_ends_go_first():
    memory = Memory()
    pages = Pages(memory.allocate, BYTES)
    pages.keep(4 * BYTES)
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


def test_whoever_writes_into_a_shared_page_gets_a_copy():
    pages = Pages(Memory().allocate, BYTES)
    pages.keep(100 * BYTES)
    tokens = text(1, 2)
    for slot in range(2):
        assert pages.acquire([*tokens, 0])[0] == slot
        filled(pages, slot, tokens, pages._slots[slot].known * PAGE)
        pages.publish(slot, tokens, len(tokens))
    assert address(pages, 0, 1) == address(pages, 1, 1)
    changed = text(1, 5)
    filled(pages, 1, changed, PAGE)
    assert holds(pages, 0, tokens) and holds(pages, 1, changed)
    pages.check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_history_keeps_the_books_and_the_contents(data):
    pages, serial = Pages(Memory().allocate, BYTES), count()
    pages.keep(data.draw(st.integers(3, 12)) * BYTES)
    running: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        if running and data.draw(st.booleans()):
            slot = data.draw(st.sampled_from(sorted(running)))
            if data.draw(st.booleans()):
                pages.release(slot)
                del running[slot]
            else:  # back to some row, and on from there with other tokens
                old = running[slot]
                keep = data.draw(st.integers(1, len(old)))
                more = [1000 + next(serial)] * data.draw(st.integers(1, PAGE + 9))
                running[slot] = old[:keep] + more
                filled(pages, slot, running[slot], keep)
                rows = len(running[slot])
                pages.publish(slot, running[slot], rows)
        else:
            tokens = [*text(*data.draw(st.lists(st.integers(1, 2), max_size=4))), 0]
            slot, known = pages.acquire(tokens)
            assert slot not in running and known < len(tokens)
            filled(pages, slot, tokens, known)
            running[slot] = tokens
            pages.publish(slot, tokens, len(tokens) - 1)
        pages.check()
        assert all(holds(pages, slot, tokens) for slot, tokens in running.items())
