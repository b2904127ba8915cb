"""Relays one request between its client and the replicas, and asks another replica if one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Send

from foretoken.serve.errors import RETRY_SECONDS, ApiError, ServerUnavailable, as_api_error
from foretoken.serve.replicas.forwarded import Forwarded, ReplicaLost, repeatable
from foretoken.serve.replicas.replay import REPLAYED_PATHS, Different, Replay, Transcript
from foretoken.serve.summary import RequestSummary, Summarized

_log = logging.getLogger(__name__)

LOSSES = 4  # lost replicas after which a request is refused, because it may be the cause
GRACE = 10.0  # seconds beyond the request's own limit, which its replica enforces
RETRIED, REPLAYED, BROKEN = OUTCOMES = ("retried", "replayed", "broken")
HEADER = b"x-foretoken-replica"  # names the replica that answered


class Relay(Summarized):
    """Relays one request. ``run`` is called once.

    Args:
        respond: Sends a request to a replica and returns the messages of its answer.
        parsed: The request's body.
        timeout: Seconds that the request may take.
        failovers: Counts the ``OUTCOMES``.
    """

    def __init__(
        self,
        respond: Callable[[Forwarded], AsyncGenerator[Message, None]],
        request: Forwarded,
        parsed: Mapping[str, Any],
        send: Send,
        timeout: float,
        failovers: Counter[str],
    ) -> None:
        self._respond, self._request, self._send = respond, request, send
        self._timeout, self._failovers = timeout, failovers
        self._path = str(request.scope["path"])
        replayed = self._path in REPLAYED_PATHS and parsed.get("stream") and repeatable(parsed)
        self._transcript = Transcript() if replayed else None
        self._streaming = self._over = False
        self._lost: list[str] = []
        self._replica = ""
        self._summary: RequestSummary | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ended: Exception | None = None

    def end(self, error: Exception) -> None:
        """Ends the request: answers with ``error``, or closes the stream with it."""
        self._ended = error
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Runs until the answer is sent. Raises ApiError, ServerUnavailable or TimeoutError if nothing was sent yet."""
        self._task = asyncio.current_task()
        try:
            async with asyncio.timeout(self._timeout + GRACE):
                while not self._over:
                    await self._attempt()
        except asyncio.CancelledError:
            if self._ended is None:
                raise
            await self._give_up(self._ended)
        except (ApiError, ServerUnavailable, TimeoutError) as error:
            await self._give_up(error)

    async def _attempt(self) -> None:
        """Asks one replica. Sets ``_over`` when the whole answer is sent."""
        again = self._streaming
        replay = self._transcript.replay() if again and self._transcript is not None else None
        request = replace(self._request, avoid=frozenset(self._lost))
        try:
            async with aclosing(self._respond(request)) as messages:
                self._over = await (self._begin(messages) if replay is None else self._go_on(messages, replay))
        except ReplicaLost as error:
            await self._note_loss(error)
        except Different:
            self._failovers[BROKEN] += 1
            raise ServerUnavailable("a replica was lost, and another one writes another text; ask again") from None
        else:
            if self._lost and self._over:
                self._failovers[REPLAYED if again else RETRIED] += 1

    async def _begin(self, messages: AsyncIterator[Message]) -> bool:
        """Begins the answer. One that is no stream is sent when it is complete."""
        kept: list[Message] = []
        async for message in messages:
            self._note(message)
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (HEADER, self._replica.encode())]
                streams = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            kept.append(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            if whole or (streams and message["type"] == "http.response.body"):
                for part in kept:
                    await self._pass_on(part)
                kept.clear()
            if whole:
                return True
        raise ReplicaLost("a replica ended without an answer", self._replica)

    async def _go_on(self, messages: AsyncIterator[Message], replay: Replay) -> bool:
        """Continues the answer after the part that was already sent."""
        async for message in messages:
            self._note(message)
            if message["type"] == "http.response.start":
                if message["status"] != 200:  # such as a full queue
                    await asyncio.sleep(RETRY_SECONDS)
                    return False
                continue
            body = replay.rest(message.get("body", b""))
            more = message.get("more_body", False)
            if body or not more:
                await self._pass_on({"type": "http.response.body", "body": body, "more_body": more})
            if not more:
                return True
        raise ReplicaLost("a replica ended in the middle of an answer", self._replica)

    def summary(self) -> RequestSummary | None:
        """Returns what the replica said became of it."""
        return self._summary

    def _note(self, message: Message) -> None:
        """Takes out of a message what it has beside ASGI's fields."""
        self._replica, self._summary = message.pop("replica"), message.pop("summary", None) or self._summary

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streaming = True
        elif self._transcript is not None:
            self._transcript.note(message.get("body", b""))
        await self._send(message)

    async def _note_loss(self, error: ReplicaLost) -> None:
        name = error.replica or self._replica
        _log.warning("a replica was lost (%s): %s", name or "not known which", error)
        self._lost.append(name)
        if self._streaming and self._transcript is None:
            self._failovers[BROKEN] += 1
            raise ServerUnavailable(
                "the replica was lost in the middle of the answer; with a seed, streams survive that"
            )
        if len(self._lost) >= LOSSES:
            self._failovers[BROKEN] += 1
            raise ServerUnavailable(f"{LOSSES} replicas were lost over this request; it is not tried again")

    async def _give_up(self, error: Exception) -> None:
        if not self._streaming:
            raise error
        last = as_api_error(error).last_event(self._path)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
