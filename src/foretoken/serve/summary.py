"""What became of one request, for its line in the log, its trace and its key's rates."""

from __future__ import annotations

from dataclasses import dataclass

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
    method: str

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per draft; 1.0 without drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over draft tokens; 0.0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


class Summarized:
    """What has a ``summary``."""

    def summary(self) -> RequestSummary | None:
        """Returns the summary so far, None if nothing is known."""
        raise NotImplementedError


def summarized_by(scope: Scope, source: Summarized) -> None:
    """Makes ``source`` tell what became of the request."""
    scope.setdefault("state", {})[_STATE] = source


def summary_of(scope: Scope) -> RequestSummary | None:
    """Returns what became of a request; None if it generates nothing, or was refused."""
    source: Summarized | None = scope.get("state", {}).get(_STATE)
    return None if source is None else source.summary()
