"""Turns step outputs into pieces of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.core.context import Context
from foretoken.core.step import StepOutput
from foretoken.engine.loop import Engine
from foretoken.engine.requests import Request, logprob_entries, prompt_logprobs
from foretoken.engine.sequence import OutputOptions
from foretoken.outputs import StreamPiece


class Assembler:
    """Queues requests and maps the outputs of ``engine.step()`` back to them."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._owners: dict[int, tuple[Request, int]] = {}

    def add(self, request: Request, contexts: Sequence[Context], priority: int = 0) -> None:
        """Queues all sequences of a request. ``contexts`` has one for each completion."""
        self._owners.update({member: (request, index) for index, member in enumerate(request.members)})
        params = request.params
        options = OutputOptions(params.logprobs, params.prompt_logprobs, params.explain)
        for context, stopping in zip(contexts, request.stoppings, strict=True):
            self._engine.add(context, stopping, options, priority=priority)

    def forget(self, request: Request) -> None:
        """Removes a request whose outputs are not needed any more. Unknown ones are ignored."""
        for member in request.members:
            self._owners.pop(member, None)

    @property
    def open(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._owners)

    def owner(self, sequence: int) -> Request | None:
        """Returns the request of a sequence, None for one that is finished or was added elsewhere."""
        owned = self._owners.get(sequence)
        return owned[0] if owned else None

    def piece(self, step: StepOutput) -> StreamPiece:
        """Returns the piece that ``step`` added to its request. Takes a finished sequence from the engine.

        Raises:
            Exception: The error that ended the sequence.
        """
        request, index = self._owners[step.sequence]
        ended = step.finish_reason is not None
        if ended:
            del self._owners[step.sequence]
        sequence = self._engine.take(step.sequence) if ended else self._engine.running[step.sequence]
        if sequence.error is not None:
            raise sequence.error
        recorded = sequence.recorded[step.position : step.position + len(step.tokens)]
        return StreamPiece(
            request_id=request.id,
            index=index,
            text=request.stoppings[index].take(),
            token_ids=step.tokens,
            step=step,
            output=request.completion(index, sequence, self._tokenizer) if ended else None,
            logprobs=tuple(logprob_entries(r, self._tokenizer) for r in recorded) if recorded else None,
            explained=sequence.explained[-1] if sequence.explained else None,
            prompt_logprobs=prompt_logprobs(sequence, self._tokenizer) if ended or not step.position else None,
        )
