"""The front: one address for several replicas. It forwards requests and answers unchanged.

A lost replica fails no request whose answer has not begun: another replica is asked. A stream whose text depends on the
request alone is generated again by another replica, and the part that was already sent is cut. Any other stream ends
with an error event.
"""

import asyncio
import json
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from foretoken.serve.app import HEALTH_PATHS, LIVE, create_gateway
from foretoken.serve.errors import RETRY_SECONDS, ApiError, ServerUnavailable, as_api_error
from foretoken.serve.json_body import read_object
from foretoken.serve.keyring import LOAD_LORA, SPECULATION, UNLOAD_LORA
from foretoken.serve.metrics import replica_metrics
from foretoken.serve.replicas.forwarding import Forwarded, ReplicaLost, repeatable
from foretoken.serve.request_log import RequestTracer
from foretoken.serve.request_state import RequestSummary, state_of
from foretoken.serve.settings import ServerSettings
from foretoken.serve.stream import cancel_on_disconnect, error_event, event

REPLAYED_PATHS = ("/v1/completions", "/v1/chat/completions")  # whose streams are chunks with choices
_HEAD, _END, _DONE = b"data: ", b"\n\n", b"[DONE]"

_log = logging.getLogger(__name__)
LOSSES = 4  # lost replicas after which a request is refused, because it may be the cause
GRACE = 10.0  # seconds beyond the request's own limit, which its replica enforces
RETRIED, REPLAYED, BROKEN = OUTCOMES = ("retried", "replayed", "broken")
HEADER = b"x-foretoken-replica"  # names the replica that answered


class ReplayDiffers(Exception):
    """The text that was generated again differs from the text that was sent."""


@dataclass
class _SentChoice:
    """The part of one choice that was sent. ``again`` counts the characters of the replay."""

    text: str = ""
    opened: bool = False
    ended: bool = False
    again: int = 0


class Replay:
    """Removes the part that was sent from a repeated stream, and keeps the first stream's identifier and time."""

    def __init__(self, sent: bytes) -> None:
        self._head: dict[str, Any] = {}
        self._sent_choices: defaultdict[int, _SentChoice] = defaultdict(_SentChoice)
        self._over = self._counted = False
        for data in _events(sent):
            self._note(data)

    def rest(self, body: bytes) -> bytes:
        """Returns the part of these events that was not sent yet. Raises ReplayDiffers."""
        return b"".join(event(part) if isinstance(part, dict) else _HEAD + part + _END for part in self._left(body))

    def _note(self, data: bytes) -> None:
        if data == _DONE:
            self._over = True
            return
        chunk = json.loads(data)
        self._head = self._head or {key: chunk[key] for key in ("id", "created") if key in chunk}
        self._counted |= "choices" in chunk and not chunk["choices"]
        for choice in chunk.get("choices", ()):
            sent, (text, opens, ends) = self._sent_choices[choice["index"]], _parts(choice)
            sent.text += text
            sent.opened |= opens
            sent.ended |= ends

    def _left(self, body: bytes) -> list[dict[str, Any] | bytes]:
        left: list[dict[str, Any] | bytes] = []
        for data in _events(body):
            if data == _DONE:
                left += [] if self._over else [data]
                continue
            chunk = json.loads(data)
            if "choices" in chunk:
                had = bool(chunk["choices"])
                chunk["choices"] = [choice for choice in chunk["choices"] if self._is_news(choice)]
                if not chunk["choices"] and (had or self._counted):
                    continue
                chunk |= self._head
            left.append(chunk)
        return left

    def _is_news(self, choice: dict[str, Any]) -> bool:
        """Returns whether anything of a choice is new, and cuts the rest from its text."""
        sent, (text, opens, ends) = self._sent_choices[choice["index"]], _parts(choice)
        known = sent.text[sent.again : sent.again + len(text)]
        sent.again += len(text)
        if not text.startswith(known) or (ends and sent.again < len(sent.text)):
            raise ReplayDiffers
        fresh = text[len(known) :]
        if text:
            choice.get("delta", choice)["content" if "delta" in choice else "text"] = fresh
        return bool(fresh) or (opens and not sent.opened) or (ends and not sent.ended)


def _events(body: bytes) -> list[bytes]:
    return [part.removeprefix(_HEAD) for part in body.split(_END) if part]


def _parts(choice: dict[str, Any]) -> tuple[str, bool, bool]:
    """Returns a choice's text, whether it opens the choice, and whether it ends it."""
    delta = choice.get("delta", choice)
    text = delta.get("content" if "delta" in choice else "text") or ""
    return text, "role" in delta, choice.get("finish_reason") is not None


class Relay:
    """Relays one request. ``run`` is called once."""

    def __init__(
        self,
        # sends a request to a replica and returns the messages of its answer
        respond: Callable[[Forwarded], AsyncGenerator[Message, None]],
        request: Forwarded,
        parsed: Mapping[str, Any],
        send: Send,
        timeout: float,  # seconds that the request may take
        failovers: Counter[str],  # counts the ``OUTCOMES``
    ) -> None:
        self._respond, self._request, self._send = respond, request, send
        self._timeout, self._failovers = timeout, failovers
        self._path = str(request.scope["path"])
        replayed = self._path in REPLAYED_PATHS and parsed.get("stream") and repeatable(parsed)
        self._sent: list[bytes] | None = [] if replayed else None  # events, if a lost stream can be repeated
        self._streaming = self._over = False
        self._lost: list[str] = []
        self._replica = ""
        self.summary: RequestSummary | None = None  # the outcome that the replica reported
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
        replay = Replay(b"".join(self._sent)) if again and self._sent is not None else None
        request = replace(self._request, avoid=frozenset(self._lost))
        try:
            async with aclosing(self._respond(request)) as messages:
                self._over = await (self._begin(messages) if replay is None else self._go_on(messages, replay))
        except ReplicaLost as error:
            await self._note_loss(error)
        except ReplayDiffers:
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
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if complete or (streams and message["type"] == "http.response.body"):
                for kept_message in kept:
                    await self._pass_on(kept_message)
                kept.clear()
            if complete:
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

    def _note(self, message: Message) -> None:
        """Removes the fields of a message that are not ASGI's."""
        self._replica, self.summary = message.pop("replica"), message.pop("summary", None) or self.summary

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streaming = True
        elif self._sent is not None:
            self._sent.append(message.get("body", b""))
        await self._send(message)

    async def _note_loss(self, error: ReplicaLost) -> None:
        name = error.replica or self._replica
        _log.warning("a replica was lost (%s): %s", name or "not known which", error)
        self._lost.append(name)
        if self._streaming and self._sent is None:
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
        last = error_event(as_api_error(error), self._path)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


class Replicas(Protocol):
    """The replicas, as the front uses them."""

    def respond(self, request: Forwarded) -> AsyncGenerator[Message, None]:
        """Runs ``Replica.respond`` on one of them. Raises ReplicaLost also if the replica's process ended."""
        ...

    async def metrics(self) -> Sequence[tuple[str, Any]]:
        """Returns ``Replica.metrics`` of all replicas that answer."""
        ...

    async def speculation(self, body: bytes | None) -> Sequence[tuple[str, int, dict[str, Any]]]:
        """Returns ``Replica.speculation`` of all replicas that answer."""
        ...


class Front:
    """Forwards requests. ``draining`` refuses new ones, and ``abandon`` ends the others."""

    def __init__(self, replicas: Replicas, settings: ServerSettings) -> None:
        self.draining = False
        self.failovers: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._replicas, self._settings = replicas, settings
        self._relays: set[Relay] = set()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._relays)

    def abandon(self) -> None:
        """Ends unfinished requests, for shutting down."""
        for relay in list(self._relays):
            relay.end(ServerUnavailable("the server shut down before the request was done"))

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards one ASGI request. Raises ApiError, ServerUnavailable or TimeoutError if nothing was sent yet."""
        body = await Request(scope, receive).body()  # the middleware has read it, within its limits
        if self.draining and scope["method"] == "POST":
            raise ServerUnavailable("the server is shutting down; ask another one")
        if scope["path"].rstrip("/") in (LOAD_LORA, UNLOAD_LORA):
            raise ApiError(404, "replicas take their LoRA adapters at the start; give them as lora_modules there")
        parsed = await read_object(body) if scope["method"] == "POST" else {}
        request = Forwarded.of(scope, body, parsed)
        relay = Relay(self._replicas.respond, request, parsed, send, self._settings.timeout, self.failovers)
        state_of(scope).reporter = lambda: relay.summary
        self._relays.add(relay)
        try:
            await cancel_on_disconnect(receive, relay.run())
        except ApiError as error:
            if error.status != 499:  # the client disconnected
                raise
        finally:
            self._relays.discard(relay)

    async def health(self, request: Request) -> Response:
        """Tells whether requests are accepted: 200 while one replica answers."""
        if self.draining:
            raise ServerUnavailable("the server is shutting down")
        if not await self._replicas.metrics():
            raise ServerUnavailable("no replica is running")
        return JSONResponse({"status": "ok"})

    async def live(self, request: Request) -> Response:
        """Tells whether the front runs. Ray Serve restarts replicas."""
        return JSONResponse({"status": "ok"})

    async def speculation(self, request: Request) -> Response:
        """Returns or changes the speculation of all replicas. The answer is one replica's, with all states by name."""
        body = None if request.method == "GET" else await request.body()
        answers = sorted(await self._replicas.speculation(body))
        if not answers:
            raise ServerUnavailable("no replica is running")
        _, status, answer = next((result for result in answers if result[1] != 200), answers[0])
        if status == 200:
            answer = answer | {"replicas": {name: state for name, _, state in answers}}
        return JSONResponse(answer, status)

    async def metrics(self, request: Request) -> Response:
        """Returns metrics for Prometheus."""
        return replica_metrics(dict(await self._replicas.metrics()), self.failovers).render()


def create_front(front: Front, settings: ServerSettings, tracer: RequestTracer | None = None) -> FastAPI:
    """Returns the front's app. It checks keys, rates, bodies and concurrency; replicas check everything else."""
    routes = {**dict.fromkeys(HEALTH_PATHS, front.health), LIVE: front.live}
    routes |= {SPECULATION: front.speculation, "/metrics": front.metrics}
    return create_gateway(settings, tracer, routes, front.forward)
