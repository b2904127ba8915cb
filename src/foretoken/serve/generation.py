"""One request from its queueing to its last piece, between the engine's thread and the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Self, cast

from foretoken.core.context import Context
from foretoken.engine.requests import Request
from foretoken.outputs import StreamPiece
from foretoken.params import SamplingParams
from foretoken.serve.answer_types import RequestMetrics, SpeculativeDecoding, TokenUsage
from foretoken.serve.metrics import Metrics, SpeculationRecord
from foretoken.serve.preparation import as_sent
from foretoken.serve.request_state import RequestSummary

BuiltRequest = tuple[Request, list[Context]]
Delivery = tuple["Generation", StreamPiece | Exception]


class DraftSource(NamedTuple):
    """Source of the drafts of a request."""

    method: str = ""
    tokens: int = 0  # configured draft tokens per step
    predicted: int = 0  # tokens of the predicted output, if it is the draft


NO_DRAFTS = DraftSource()


class Generation:
    """One or more prompts that are being answered.

    Iterate over it, once and within ``with``: it yields pieces, and ends when all choices have ended. Pieces that are
    not read yet wait here. It belongs to its event loop, except for ``began``.

    Attributes:
        shown: Whether the client gets the generated tokens; otherwise they are not counted either.
        arrived: When it was submitted, by ``time.monotonic``.
        began: When the engine admitted it.
    """

    def __init__(
        self,
        built: Sequence[BuiltRequest],  # the requests, one for each prompt, with their contexts
        # called once when it is over, with whether the engine still works on it
        release: "Callable[[Generation, bool], None]",
        *,
        priority: int = 0,  # lower priorities are admitted first
        identifier: str = "",  # identifies it in the answer
        model: str = "",  # name of the model in the answer
        timeout: float | None = None,  # seconds after which iterating raises TimeoutError
        metrics: Metrics | None = None,  # counts it
        drafts: DraftSource = NO_DRAFTS,  # the source of its drafts
        # names of parameters as the client sent them, for errors; see ``sent_names``
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.id, self.model, self.created = identifier, model, int(time.time())
        self.built, self.priority = built, priority
        self.requests = [request for request, _ in built]
        self._places = {request.id: position for position, request in enumerate(self.requests)}
        self.members = [member for request in self.requests for member in request.members]
        self.loop = asyncio.get_running_loop()
        self.deadline = None if timeout is None else self.loop.time() + timeout
        self.arrived = time.monotonic()
        self.began: float | None = None
        self.shown = True
        self._drafts, self._names = drafts, names or {}
        self._first: float | None = None  # seconds until the first token
        self._seconds: float | None = None  # until it was closed
        self._release, self._metrics = release, metrics
        # the engine's side
        self._pieces: deque[StreamPiece] = deque()
        self._unmade, self._over = len(self.members), False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        # the client's side
        self._record = SpeculationRecord(drafts.tokens)
        self._generated = self._accepted_of_prediction = self._cached = 0
        self._unread, self._closed = len(self.members), False
        self._reason: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("error" if isinstance(error, Exception) else "abort")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamPiece:
        """Returns the next piece.

        Raises:
            ApiError: The engine refused the request.
            RequestFailed: The engine failed on it.
            ServerUnavailable: The server or its engine ended.
            TimeoutError: The request exceeded its time limit.
        """
        async with asyncio.timeout_at(self.deadline):
            while not self._pieces and not self._over:
                self._news.clear()
                await self._news.wait()
        if not self._pieces:
            raise StopAsyncIteration if self._error is None else as_sent(self._error, self._names)
        piece = self._pieces.popleft()
        if self._first is None:
            self._first = time.monotonic() - self.arrived
            if self._metrics is not None:
                self._metrics.on_first_token(self._first)
        self._count(piece)
        return piece

    def push(self, piece: StreamPiece) -> None:
        if self._over:
            return
        self._pieces.append(piece)
        self._unmade -= piece.output is not None
        if not self._unmade:
            self.end(None)
        self._news.set()

    def end(self, error: Exception | None, abort: bool = False) -> None:
        """Ends it: no more pieces will come.

        ``error`` is raised to the reader after the pieces that have arrived. ``abort`` stops the engine's work on it.
        """
        if not self._over:
            self._over, self._error = True, error
            self._news.set()
            self._release(self, abort)

    def close(self, reason: Literal["error", "abort"] = "abort") -> None:
        """Drops unread pieces, and counts an unfinished request under ``reason``. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._pieces.clear()
        self.end(None, abort=True)
        self._seconds = time.monotonic() - self.arrived
        if self._metrics is not None:
            self._metrics.on_finished((self._reason or reason) if self.finished else reason, self.summary())

    def number(self, piece: StreamPiece) -> int:
        """Returns the number of the piece's choice. The choices of the second prompt follow those of the first."""
        return self._places[piece.request_id] * self.params.n + piece.index

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of all prompts."""
        return self.requests[0].params

    @property
    def finished(self) -> bool:
        """Whether the last piece of every choice was read."""
        return not self._unread

    def usage(self, reasoning_tokens: int = 0) -> TokenUsage:
        """Returns the token counts so far. reasoning_tokens: how many of the generated ones are reasoning."""
        generated = self._generated if self.shown else 0
        accepted = self._accepted_of_prediction
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {
                "reasoning_tokens": reasoning_tokens,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(0, self._drafts.predicted * len(self.members) - accepted),
            },
        }

    def speculation(self, detailed: bool = False) -> RequestMetrics:
        """Returns the statistics of all choices together. detailed: with an entry for each step."""
        return {"speculative_decoding": cast("SpeculativeDecoding", self._record.to_dict(detailed))}

    def summary(self) -> RequestSummary:
        """Returns its outcome so far."""
        return RequestSummary(
            id=self.id,
            model=self.model,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            completion_tokens=self._generated,
            finish_reason=self._reason if self.finished else None,
            queue_seconds=None if self.began is None else self.began - self.arrived,
            first_token_seconds=self._first,
            seconds=time.monotonic() - self.arrived if self._seconds is None else self._seconds,
            method=self._drafts.method,
            speculation=self._record.to_dict(),
        )

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    def _count(self, piece: StreamPiece) -> None:
        self._record.add(piece.step)
        self._generated += len(piece.token_ids)
        if self._drafts.predicted:  # then every draft was the client's prediction
            self._accepted_of_prediction += piece.step.accepted
        if piece.output is not None:
            self._unread -= 1
            self._reason = self._reason or piece.output.finish_reason
            self._cached += piece.output.stats.cached if piece.index == 0 else 0


async def final_pieces(generation: Generation) -> dict[int, StreamPiece]:
    """Returns the last piece of every choice, which has the whole output, by the choice's number and in order."""
    finals = {generation.number(piece): piece async for piece in generation if piece.output is not None}
    return dict(sorted(finals.items()))


def hand_over(deliveries: Sequence[Delivery]) -> None:
    """Passes pieces and errors to their generations, on the event loop."""
    for generation, item in deliveries:
        if isinstance(item, Exception):
            generation.end(item)
        else:
            generation.push(item)
