"""Sends answers, whole or as server-sent events, until the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from foretoken.outputs import StreamPiece
from foretoken.serve.errors import ApiError, as_api_error
from foretoken.serve.generation import Generation, collect
from foretoken.serve.schema import Generate
from foretoken.serve.steps import step_record
from foretoken.serve.token_text import TokenText

T = TypeVar("T")

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_GRACE = 10.0  # seconds for a client to read what is left once its request is over


class ResponseWriter(Protocol):
    """Writes the answers of one endpoint to one request.

    Attributes:
        object: What the endpoint calls its chunks.
    """

    object: str

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> Mapping[str, Any]:
        """Returns the whole answer. finals: the last piece of every choice, by its number."""
        ...

    def choices(self, number: int, piece: StreamPiece) -> list[dict[str, Any]]:
        """Returns the piece's additions, one choice per chunk to send; at least one for a choice's last piece."""
        ...

    def silent(self, number: int) -> dict[str, Any]:
        """Returns a choice without any addition, to fill in."""
        ...


async def respond(
    body: Generate, generation: Generation, writer: ResponseWriter, token_text: TokenText, receive: Receive
) -> Response:
    """Answers a request, as one object or as a stream.

    A stream begins with its first piece, so that an error before it is answered like any other.
    """
    if body.streams:
        try:
            first = await cancel_on_disconnect(receive, anext(generation))
        except BaseException as error:
            generation.close("error" if isinstance(error, Exception) else "abort")
            raise
        return EventStream(_events(body, generation, first, writer, token_text), generation)
    with generation:
        finals = await cancel_on_disconnect(receive, collect(generation))
        return JSONResponse(writer.answer(generation, finals))


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. If the client disconnects, cancels it and raises an ApiError of status 499."""
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
    """Sends ``events`` until they end or the client disconnects, and then closes ``generation``.

    A client that reads slowly does not delay others: its pieces wait in its generation.
    """

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream; charset=utf-8")
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            deadline = self._generation.deadline
            async with asyncio.timeout_at(None if deadline is None else deadline + _GRACE):
                await cancel_on_disconnect(receive, self.stream_response(send))
        except (ApiError, TimeoutError):
            return  # it disconnected, or does not read
        finally:
            self._generation.close("abort")


async def _events(
    body: Generate, generation: Generation, first: StreamPiece, writer: ResponseWriter, token_text: TokenText
) -> AsyncIterator[bytes]:
    """Yields chunks as events, the usage and the end mark; after an error the error, and no end mark."""
    options = body.stream_options
    usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    head = {"id": generation.id, "object": writer.object, "created": generation.created, "model": generation.model}
    try:
        async for piece in _chained(first, generation):
            number = generation.number(piece)
            choices = writer.choices(number, piece)
            if body.return_steps and not choices:
                choices = [writer.silent(number)]
            extra = {"usage": generation.usage() if continuous else None} if usage else {}
            chunks: list[dict[str, Any]] = [head | {"choices": [choice]} | extra for choice in choices]
            if body.return_steps:
                chunks[-1]["steps"] = [step_record(piece, number, token_text)]
            if generation.finished and not usage:
                chunks[-1]["metrics"] = generation.speculation(body.return_steps)
            if chunks:
                yield b"".join(map(_event, chunks))
        if usage:
            metrics = generation.speculation(body.return_steps)
            yield _event(head | {"choices": [], "usage": generation.usage(), "metrics": metrics})
        yield _DONE
    except Exception as error:
        yield _event(as_api_error(error).body())


async def _chained(first: StreamPiece, generation: Generation) -> AsyncIterator[StreamPiece]:
    yield first
    async for piece in generation:
        yield piece


def _event(data: Any) -> bytes:
    # ASCII, because clients that split lines by Unicode rules would break a text at U+2028 or U+0085.
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
