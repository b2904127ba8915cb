"""A request between the engine's thread and its client: pieces come in order, once, and end once."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.serve.generation import Generation, hand_over


def piece(number: int, last: bool = False) -> Any:
    step = SimpleNamespace(draft=(), accepted=0)
    output = SimpleNamespace(finish_reason="stop", stats=SimpleNamespace(cached=0)) if last else None
    return SimpleNamespace(number=number, output=output, step=step, token_ids=(), index=0)


def generation(members: int = 1) -> tuple[Generation, list[bool]]:
    """One of a number of sequences, and whether the engine still worked on it each time it was released."""
    released: list[bool] = []
    built: Any = [(SimpleNamespace(id=0, members=tuple(range(members))), [])]
    return Generation(built, lambda _, abort: released.append(abort)), released


def test_a_reader_who_is_late_gets_all_pieces_in_order() -> None:
    async def use() -> None:
        one, released = generation(members=2)
        hand_over([(one, piece(0)), (one, piece(1)), (one, piece(2, last=True)), (one, piece(3))])
        assert released == []
        hand_over([(one, piece(4, last=True)), (one, piece(5))])
        assert [item.number async for item in one] == [0, 1, 2, 3, 4]
        assert released == [False]

    asyncio.run(use())


def test_pieces_before_an_error_are_read_first() -> None:
    async def use() -> None:
        one, released = generation()
        hand_over([(one, piece(0)), (one, RuntimeError("planted"))])
        assert (await anext(one)).number == 0
        with pytest.raises(RuntimeError, match="planted"):
            await anext(one)
        one.close()
        assert released == [False]

    asyncio.run(use())


def test_a_cancelled_one_gives_nothing_more_and_is_dropped_by_the_engine() -> None:
    async def use() -> None:
        one, released = generation()
        hand_over([(one, piece(0))])
        one.close()
        hand_over([(one, piece(1, last=True))])
        assert [item async for item in one] == [] and released == [True]

    asyncio.run(use())
