"""What comes out: frozen, printable, and with the statistics of how it was made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from foretoken.core.step import Step


@dataclass(frozen=True, slots=True)
class Logprob:
    """log of the target's own softmax at this position, before sampling parameters; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class SpeculationStats:
    """Counts over one output's rounds.

    rounds: target passes after the prompt's; drafted, accepted: draft tokens. cached: tokens of the prompt that were
    found computed.
    accepted_per_position[i]: rounds in which draft position i was accepted.
    drafted_per_position[i]: rounds that drafted that far.
    """

    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    cached: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted/drafts: tokens per speculative round, the bonus included."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted/drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time this request was in work, its prompt included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class Explained:
    """What was thought of the tokens of one round: [nodes] each, then of the tokens that came.

    p: the target's law at each drafted token, given that its parent was reached. q: what it was drafted with, None
    where drafts are fixed candidates. came: the target's law at each emitted token.
    """

    p: tuple[float, ...]
    q: tuple[float | None, ...]
    came: tuple[float, ...]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion. ``finish_reason`` is "stop", "length" or "abort"; ``stop_reason`` the string or id that hit."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    exactness: str = "distribution"


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions; prints as the text.

    prompt_logprobs: where they were asked for, one entry for each token of the prompt, None for the first.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None

    @property
    def stats(self) -> SpeculationStats:
        """The first output's statistics."""
        return self.outputs[0].stats

    def __str__(self) -> str:
        return "\n".join(output.text for output in self.outputs)


@dataclass(frozen=True)
class StreamPiece:
    """What one round added to one completion.

    text: the new text, whole characters only, held back while it could be the start of a stop string.
    step: the round itself: what was drafted, accepted and added by the target.
    output: the finished completion, on its last piece.
    logprobs: of ``token_ids``, where they were asked for. explained: likewise. prompt_logprobs: likewise, on the
    first piece and on the last.
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    step: Step
    output: CompletionOutput | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    explained: Explained | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
