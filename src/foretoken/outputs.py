"""Outputs of requests, with statistics of speculation."""

from dataclasses import asdict, dataclass, field
from typing import Any

from foretoken.core.step import StepOutput

SPAN = 256
"""Output tokens of one entry of ``SpeculationStats.by_output``."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log of the target's softmax at one position, before sampling parameters. Rank 1 is the most probable token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class SpeculationStats:
    """Counts over the decode steps of one output.

    Args:
        steps: Number of decode steps.
        drafts: Number of steps with a draft.
        drafted: Number of draft tokens.
        accepted: Number of accepted draft tokens.
        tokens: Number of emitted tokens.
        seconds: Time from admission to the end of the request.
        drafted_per_position: Entry i is the number of steps with a draft of more than i positions.
        accepted_per_position: Entry i is the number of steps in which draft position i was accepted.
        cached: Number of prompt tokens found in the prefix cache.
        by_output: Entry i has the numbers of drafts and of accepted tokens behind 256 i to 256 i + 255 output tokens.
    """

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    cached: int = 0
    by_output: tuple[tuple[int, int], ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step with a draft, the bonus token included: 1 + accepted/drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens per draft token: accepted/drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, the time of prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns all counts and rates by name."""
        return {
            **asdict(self),
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class Explained:
    """Probabilities of the tokens of one step.

    Args:
        p: [nodes]. Target probability of each draft token, given that its parent was reached.
        q: [nodes]. Probability with which it was drafted, None for fixed candidates.
        emitted_prob: Target probability of each emitted token.
    """

    p: tuple[float, ...]
    q: tuple[float | None, ...]
    emitted_prob: tuple[float, ...]


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a request.

    Args:
        index: Number of the completion in its request.
        text: The generated text.
        token_ids: The generated tokens.
        finish_reason: "stop", "length", "abort", or a kind of ``SamplingParams.acceptance_stop``.
        stop_reason: The stop string or stop id that ended the text, if any.
        logprobs: Log-probabilities of ``token_ids`` by token id, if requested.
        stats: Statistics of speculation.
        exactness: Grade of exactness.
    """

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
    """A prompt and its completions. ``str()`` of it is the text.

    Args:
        request_id: Number of the request.
        prompt: The prompt's text, or None for token ids.
        prompt_token_ids: The prompt's tokens.
        outputs: The completions.
        prompt_logprobs: One entry for each prompt token, None for the first, if requested.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None

    @property
    def stats(self) -> SpeculationStats:
        """Statistics of the first completion."""
        return self.outputs[0].stats

    def __str__(self) -> str:
        return "\n".join(output.text for output in self.outputs)


@dataclass(frozen=True)
class StreamPiece:
    """The output of one step for one completion.

    Args:
        request_id: Number of the request.
        index: Number of the completion in its request.
        text: The new text: whole characters, held back while it may become a stop string.
        token_ids: The new tokens.
        step: The step: draft, accepted tokens and the target's token.
        output: The finished completion, on its last piece.
        logprobs: Log-probabilities of ``token_ids``, if requested.
        explained: Probabilities of the step's tokens, if requested.
        prompt_logprobs: Log-probabilities of the prompt, if requested, on the first and the last piece.
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    step: StepOutput
    output: CompletionOutput | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    explained: Explained | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
