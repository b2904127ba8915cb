"""From steps back to requests: what a round added, as whoever asked for it sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.core.context import Context
from foretoken.core.step import Step
from foretoken.engine.loop import Engine
from foretoken.engine.requests import Request, logprob_entries, prompt_logprobs
from foretoken.outputs import StreamPiece


class Assembler:
    """Knows whose every sequence is. Whoever calls ``engine.step()`` has one."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._owners: dict[int, tuple[Request, int]] = {}

    def add(self, request: Request) -> None:
        """Expect steps of the request's sequences."""
        self._owners.update({member: (request, index) for index, member in enumerate(request.members)})

    def forget(self, request: Request) -> None:
        """Expect no more of them; unknown ones are ignored."""
        for member in request.members:
            self._owners.pop(member, None)

    @property
    def open(self) -> bool:
        """Whether any are still expected."""
        return bool(self._owners)

    def owner(self, sequence: int) -> Request | None:
        """Whose sequence it is, None of a stranger's or one that is over."""
        owned = self._owners.get(sequence)
        return owned[0] if owned else None

    def piece(self, step: Step) -> StreamPiece:
        """What ``step`` added; takes a finished sequence from the engine. Raises the error that ended a sequence."""
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


def submit(engine: Engine, request: Request, contexts: Sequence[Context], priority: int = 0) -> None:
    """Queue all sequences of a request."""
    params = request.params
    for context, stopping in zip(contexts, request.stoppings, strict=True):
        engine.add(
            context,
            stopping,
            params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            explain=params.explain,
            priority=priority,
        )
