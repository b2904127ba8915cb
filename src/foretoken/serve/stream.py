"""Server-sent events to the letter, for as long as somebody listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from foretoken.outputs import StreamPiece
from foretoken.serve.errors import ApiError, as_api_error
from foretoken.serve.generation import Generation
from foretoken.serve.schema import Generate
from foretoken.serve.steps import step_record
from foretoken.serve.token_text import TokenText

T = TypeVar("T")

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_GRACE = 10.0  # seconds for a client to read what is left once its request is over


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """``work``, unless the client goes away: then it is cancelled, and a 499 raised that nobody will read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends ``events`` until they end or the client goes; then ``generation`` is closed, whatever happened.

    A client that does not read holds nothing up but itself: its pieces wait in its ticket.
    """

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream; charset=utf-8")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._generation.deadline + _GRACE):
                await cancel_on_disconnect(receive, self.stream_response(send))
        except (ApiError, TimeoutError):
            return  # gone, or deaf
        finally:
            self._generation.close("abort")


class Composer(Protocol):
    """How an endpoint writes chunks. ``object`` is what it calls them."""

    object: str

    def choices(self, number: int, piece: StreamPiece) -> list[dict[str, Any]]:
        """What the piece adds, as choices of one chunk each; for a choice's last piece one at least."""
        ...

    def silent(self, number: int) -> dict[str, Any]:
        """A choice that adds nothing."""
        ...


async def stream(
    body: Generate, generation: Generation, composer: Composer, spelling: TokenText, receive: Receive
) -> EventStream:
    """Begins once the first piece is there, so that what fails before is an error like any other."""
    try:
        first = await cancel_on_disconnect(receive, anext(generation))
    except BaseException as error:
        generation.close("error" if isinstance(error, Exception) else "abort")
        raise
    return EventStream(_events(body, generation, first, composer, spelling), generation)


async def _events(
    body: Generate, generation: Generation, first: tuple[int, StreamPiece], composer: Composer, spelling: TokenText
) -> AsyncIterator[bytes]:
    """Chunks as events, the usage, and the end mark; or an error in their place, and no end mark."""
    options = body.stream_options
    usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    head = {
        "id": generation.id, "object": composer.object, "created": generation.created, "model": generation.model
    }  # fmt: skip
    try:
        async for number, piece in _chained(first, generation):
            choices = composer.choices(number, piece)
            if body.return_steps and not choices:
                choices = [composer.silent(number)]
            extra = {"usage": generation.usage() if continuous else None} if usage else {}
            chunks: list[dict[str, Any]] = [head | {"choices": [choice]} | extra for choice in choices]
            if body.return_steps:
                chunks[-1]["steps"] = [step_record(piece, number, spelling)]
            if generation.finished and not usage:
                chunks[-1]["metrics"] = generation.metrics(body.return_steps)
            if chunks:
                yield b"".join(map(_event, chunks))
        if usage:
            metrics = generation.metrics(body.return_steps)
            yield _event(head | {"choices": [], "usage": generation.usage(), "metrics": metrics})
        yield _DONE
    except Exception as error:
        yield _event(as_api_error(error).body())


async def _chained(first: tuple[int, StreamPiece], generation: Generation) -> AsyncIterator[tuple[int, StreamPiece]]:
    yield first
    async for item in generation:
        yield item


def _event(data: Any) -> bytes:
    # In ASCII: readers that split lines as Unicode does would end one at U+2028 or U+0085 in the middle of a text.
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
