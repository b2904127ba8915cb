"""One request while it is answered: its pieces, and what is counted of it."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

from foretoken.outputs import StreamPiece
from foretoken.propose.per_request import PREDICTION
from foretoken.serve.metrics import Metrics, SpeculationRecord
from foretoken.serve.request_stream import RequestStream
from foretoken.serve.responses import RequestMetrics, TokenUsage
from foretoken.serve.worker import Worker


class Generation:
    """Iterate over it, within ``with``: (choice, piece) as they come; choices of the second prompt follow the first's.

    Leaving the ``with`` cancels what is left. Raises TimeoutError after ``timeout`` seconds, else as ``RequestStream``.
    shown: whether the client gets what is generated, and has it counted.
    """

    def __init__(
        self, kind: str, model: str, ticket: RequestStream, worker: Worker, metrics: Metrics, timeout: float
    ) -> None:
        self.id, self.model, self.created = f"{kind}-{uuid4().hex}", model, int(time.time())
        self.ticket = ticket
        self.params = ticket.request.params
        self._metrics = metrics
        self.deadline = asyncio.get_running_loop().time() + timeout
        self.shown = True
        self._numbers = {request.id: place * self.params.n for place, request in enumerate(ticket.requests)}
        self._generated = self._accepted_of_prediction = self._cached = 0
        self._reason: str | None = None
        self._left = len(ticket.members)
        self._closed = False
        context = ticket.built[0][1][0]
        self._predicted = len(context.prediction) if worker.method(context) == PREDICTION else 0
        configured = worker.llm.speculative_config.tokens if context.depth is None else context.depth
        self._record = SpeculationRecord(configured)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("error" if isinstance(error, Exception) else "abort")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, StreamPiece]:
        async with asyncio.timeout_at(self.deadline):
            piece = await anext(self.ticket)
        if not self._generated:
            self._metrics.on_first_token(time.monotonic() - self.ticket.arrived)
        self._count(piece)
        return self._numbers[piece.request_id] + piece.index, piece

    def close(self, reason: Literal["error", "abort"]) -> None:
        """Nothing more is wanted; ``reason`` is why, if it was not finished. Only the first call counts."""
        if self._closed:
            return
        self._closed = True
        self.ticket.cancel()
        ticket, now = self.ticket, time.monotonic()
        self._metrics.on_finished(
            (self._reason or reason) if self.finished else reason,
            prompt_tokens=self._prompted,
            generation_tokens=self._generated,
            e2e_seconds=now - ticket.arrived,
            queue_seconds=None if ticket.began is None else ticket.began - ticket.arrived,
        )

    @property
    def finished(self) -> bool:
        """Whether every choice is."""
        return not self._left

    def usage(self) -> TokenUsage:
        """So far."""
        generated = self._generated if self.shown else 0
        accepted = self._accepted_of_prediction
        return {
            "prompt_tokens": self._prompted,
            "completion_tokens": generated,
            "total_tokens": self._prompted + generated,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(0, self._predicted * len(self.ticket.members) - accepted),
            },
        }

    def metrics(self, detailed: bool = False) -> RequestMetrics:
        """Of all choices together."""
        record: Any = self._record.to_dict(detailed)
        return {"speculative_decoding": record}

    @property
    def _prompted(self) -> int:
        return sum(len(request.prompt_ids) for request in self.ticket.requests)

    def _count(self, piece: StreamPiece) -> None:
        self._record.add(piece.step)
        self._generated += len(piece.token_ids)
        if self._predicted:  # whatever was drafted then was the client's prediction
            self._accepted_of_prediction += piece.step.accepted
        if piece.output is not None:
            self._left -= 1
            self._reason = self._reason or piece.output.finish_reason
            self._cached += piece.output.stats.cached if piece.index == 0 else 0


async def collect(generation: Generation) -> dict[int, StreamPiece]:
    """The last piece of every choice, which has the whole of it; by number, in order."""
    finals = {number: piece async for number, piece in generation if piece.output is not None}
    return dict(sorted(finals.items()))
