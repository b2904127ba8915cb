"""Sends answers, whole or as server-sent events, until the client disconnects."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from foretoken.outputs import StreamPiece
from foretoken.serve.errors import ApiError, as_api_error, is_anthropic
from foretoken.serve.generation import Generation, final_pieces

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_GRACE = 10.0  # seconds for a client to read what is left once its request is over


def event(data: Any, name: str | None = None) -> bytes:
    """Returns one event. name: its type, for APIs whose events have one.

    It is ASCII, because clients that split lines by Unicode rules would break a text at U+2028 or U+0085.
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError, path: str) -> bytes:
    """Returns the event that ends a stream of the API at ``path`` after an error."""
    if is_anthropic(path):
        return event(error.anthropic_body(None), "error")
    if path.startswith("/v1/responses"):
        numbered = {"type": "error", "code": error.code or "server_error", "message": error.shown}
        return event({**numbered, "param": error.param, "sequence_number": 0}, "error")
    return event(error.body())


class AnswerWriter(ABC):
    """Writes one API's answer to one request, either whole or as a stream of server-sent events."""

    @abstractmethod
    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> Mapping[str, Any]:
        """Returns the whole answer. finals: the last piece of every choice, by its number."""

    def opening(self, generation: Generation) -> bytes:
        """Returns the events before the first piece."""
        return b""

    @abstractmethod
    def piece(self, generation: Generation, piece: StreamPiece) -> bytes:
        """Returns the events of a piece; none if nothing is certain yet."""

    @abstractmethod
    def closing(self, generation: Generation) -> bytes:
        """Returns the events after the last piece."""

    @abstractmethod
    def failure(self, generation: Generation, error: ApiError) -> bytes:
        """Returns the events with which a stream ends that failed after its beginning."""


async def respond(streams: bool, generation: Generation, writer: AnswerWriter, receive: Receive) -> Response:
    """Answers a request, as one object or as a stream.

    A stream begins with its first piece, so that an error before it is answered like any other.
    """
    if streams:
        try:
            first = await cancel_on_disconnect(receive, anext(generation))
        except BaseException as error:
            generation.close("error" if isinstance(error, Exception) else "abort")
            raise
        return EventStream(_events(generation, first, writer), generation)
    with generation:
        finals = await cancel_on_disconnect(receive, final_pieces(generation))
        return JSONResponse(writer.answer(generation, finals))


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. If the client disconnects, cancels it and raises an ApiError of status 499."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


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


async def _events(generation: Generation, first: StreamPiece, writer: AnswerWriter) -> AsyncIterator[bytes]:
    """Yields the events of a stream; after an error the error, and no end mark."""
    try:
        if before := writer.opening(generation):
            yield before
        async for piece in _chained(first, generation):
            if events := writer.piece(generation, piece):
                yield events
        yield writer.closing(generation)
    except Exception as error:
        yield writer.failure(generation, as_api_error(error))


async def _chained(first: StreamPiece, generation: Generation) -> AsyncIterator[StreamPiece]:
    yield first
    async for piece in generation:
        yield piece
