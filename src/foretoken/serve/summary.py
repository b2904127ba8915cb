"""What became of one request, for its line in the log, its trace and its key's rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope

_STATE = "summary"  # in the state of an ASGI scope


@dataclass(frozen=True, kw_only=True)
class RequestSummary:
    """What became of one request that generates.

    Args:
        id: Identifier of the answer.
        model: Name of the model in the answer.
        prompt_tokens: Tokens of all prompts.
        cached_tokens: How many of them were in the prefix cache.
        completion_tokens: Generated tokens of all choices.
        finish_reason: Why it ended; None if it did not end by itself.
        queue_seconds: From its arrival until it was scheduled; None if it never was.
        first_token_seconds: From its arrival to its first token; None if there was none.
        seconds: From its arrival to its end, or until now.
        drafts: Decode steps that verified a draft.
        draft_tokens: Draft tokens.
        accepted_tokens: Accepted draft tokens.
        mean_acceptance_length: See ``SpeculationRecord``, as the next.
        draft_acceptance_rate: Accepted over draft tokens.
        method: The method that drafted.
    """

    id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str | None
    queue_seconds: float | None
    first_token_seconds: float | None
    seconds: float
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    method: str

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.completion_tokens


class Summarized(Protocol):
    """What knows what became of a request."""

    def summary(self) -> RequestSummary | None:
        """Returns the summary so far, None if nothing is known."""


def summarized_by(scope: Scope, source: Summarized) -> None:
    """Makes ``source`` tell what became of the request."""
    scope.setdefault("state", {})[_STATE] = source


def summary_of(scope: Scope) -> RequestSummary | None:
    """Returns what became of a request; None if it generates nothing, or was refused."""
    source: Summarized | None = scope.get("state", {}).get(_STATE)
    return None if source is None else source.summary()
