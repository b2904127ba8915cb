"""Failures in the engine's thread: an order fails alone, and no request waits for a thread that has ended."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.serve.conftest import PATIENCE

from foretoken import LLM, SamplingParams
from foretoken.serve.errors import RequestFailed, ServerUnavailable
from foretoken.serve.generation import Generation
from foretoken.serve.worker import Worker

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=8, temperature=0)


class Planted(RuntimeError):
    """An error that a test causes."""


def planted(*_: Any) -> Any:
    raise Planted


@contextmanager
def working(llm: LLM) -> Iterator[Worker]:
    worker = Worker(llm)
    worker.start()
    try:
        yield worker
    finally:
        worker.close()
        llm.engine.clear()


async def text(generation: Generation) -> str:
    async with asyncio.timeout(PATIENCE):
        return "".join([piece.text async for piece in generation])


async def error(generation: Generation) -> Exception:
    with pytest.raises((RequestFailed, ServerUnavailable)) as caught:
        await text(generation)
    return caught.value


def test_an_order_that_raises_does_not_end_the_thread(spare: LLM) -> None:
    with working(spare) as worker:
        failures: list[Exception] = []
        worker.order(planted)
        worker.order(planted, failures.append)

        async def use() -> str:
            with pytest.raises(Planted):
                await worker.between_steps(planted)
            return await text(await worker.submit(["x = "], PARAMS))

        assert asyncio.run(use()) and worker.alive
        assert len(failures) == 1 and isinstance(failures[0].__cause__, Planted)


def test_a_sequence_that_cannot_be_removed_leaves_the_others(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter fails on a sequence whose client went away; requests beside it and after it get their text."""
    proposer = spare.engine.proposer
    forget = proposer.forget

    async def use(worker: Worker) -> None:
        wanted = await text(await worker.submit(["x = "], PARAMS))
        left = await worker.submit(["y = "], SamplingParams(max_tokens=2000, ignore_eos=True))
        identifiers = set(left.members)
        monkeypatch.setattr(proposer, "forget", lambda c: planted() if c.id in identifiers else forget(c))
        await anext(left)
        left.close()
        assert [await text(await worker.submit(["x = "], PARAMS)) for _ in range(2)] == [wanted, wanted]
        assert worker.alive and not worker.busy

    with working(spare) as worker:
        asyncio.run(use(worker))


def test_all_requests_fail_when_the_thread_ends(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run, those that are queued behind them, orders between steps, and those that come later."""
    in_step, go_on = threading.Event(), threading.Event()
    step = spare.engine.step

    def held() -> Any:
        in_step.set()
        assert go_on.wait(PATIENCE)
        return step()

    async def use(worker: Worker) -> None:
        running = await worker.submit(["x = "], PARAMS)
        await asyncio.to_thread(in_step.wait, PATIENCE)
        queued = [await worker.submit(["y = "], PARAMS) for _ in range(3)]
        order = asyncio.ensure_future(worker.between_steps(lambda: 1))
        await asyncio.sleep(0)  # lets the order be queued
        monkeypatch.setattr(worker, "_note_begun", planted)
        go_on.set()
        for generation in (running, *queued):
            assert isinstance(await error(generation), ServerUnavailable)
        with pytest.raises(ServerUnavailable, match="stopped working"):
            await asyncio.wait_for(order, PATIENCE)
        with pytest.raises(ServerUnavailable, match="started again"):
            await worker.submit(["x"], PARAMS)
        assert not worker.busy

    monkeypatch.setattr(spare.engine, "step", held)
    with working(spare) as worker:
        asyncio.run(use(worker))
        assert not worker.alive


def test_a_request_that_is_queued_while_the_thread_stops_fails(spare: LLM) -> None:
    held, go_on = threading.Event(), threading.Event()

    async def use(worker: Worker) -> None:
        worker.order(lambda: (held.set(), go_on.wait(PATIENCE)))  # type: ignore[arg-type, return-value]
        await asyncio.to_thread(held.wait, PATIENCE)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        while worker._orders.empty():  # until the order to stop is queued
            await asyncio.sleep(0.001)
        queued = await worker.submit(["x"], PARAMS)
        go_on.set()
        assert "not running" in str(await error(queued))
        stopping.join(PATIENCE)
        assert "not running" in str(await error(await worker.submit(["x"], PARAMS)))

    with working(spare) as worker:
        asyncio.run(use(worker))


def test_a_step_that_fails_for_no_request_ends_the_thread(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that fails and cannot be removed would fail every step from then on."""
    monkeypatch.setattr(spare.engine, "step", planted)

    async def use(worker: Worker) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(spare.engine, "abort", planted)
            assert isinstance(await error(await worker.submit(["x"], PARAMS)), RequestFailed)
            await asyncio.to_thread(worker._thread.join, PATIENCE)
        assert isinstance(worker.dead, Planted) and not worker.alive

    with working(spare) as worker:
        asyncio.run(use(worker))
