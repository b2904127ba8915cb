"""Times one completion. The clock runs only while the library works, not while the caller displays a piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from foretoken.core.errors import InvalidRequest
from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM

OnPiece = Callable[[StreamPiece, float], None]


@dataclass(frozen=True)
class TimedCompletion:
    """One timed completion of one prompt.

    Attributes:
        output: The completion.
        seconds: Total seconds, prefill included.
        first_seconds: Seconds until the first piece (TTFT).
        first_tokens: Tokens in the first piece.
    """

    output: CompletionOutput
    seconds: float
    first_seconds: float
    first_tokens: int

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.output.token_ids)


@dataclass(frozen=True)
class Totals:
    """Sums over several completions, and their rates."""

    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float
    steps: int
    drafts: int
    accepted: int

    @staticmethod
    def of(runs: Iterable[TimedCompletion]) -> Totals:
        """Returns the sums over ``runs``."""
        runs = list(runs)
        stats = [run.output.stats for run in runs]
        return Totals(
            tokens=sum(run.tokens for run in runs),
            seconds=sum(run.seconds for run in runs),
            decode_tokens=sum(run.tokens - run.first_tokens for run in runs),
            decode_seconds=sum(run.seconds - run.first_seconds for run in runs),
            steps=sum(s.steps for s in stats),
            drafts=sum(s.drafts for s in stats),
            accepted=sum(s.accepted for s in stats),
        )

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Emitted tokens per second after each first piece."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted/drafts, bonus token included."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per target pass, steps without a draft included."""
        return self.tokens / self.steps if self.steps else 0.0


def timed(llm: LLM, prompt: str, params: SamplingParams, on_piece: OnPiece | None = None) -> TimedCompletion:
    """Completes ``prompt`` once. ``on_piece`` receives each piece and the seconds so far; its own time is excluded."""
    if params.n != 1:
        raise InvalidRequest(f"a timed run makes one completion; got n={params.n}")
    pieces = iter(llm.stream(prompt, params))
    seconds = first_seconds = 0.0
    first_tokens = 0
    output: CompletionOutput | None = None
    while True:
        started = perf_counter()
        piece = next(pieces, None)
        seconds += perf_counter() - started
        if piece is None:
            break
        if not first_seconds:
            first_seconds, first_tokens = seconds, len(piece.token_ids)
        output = piece.output or output
        if on_piece is not None:
            on_piece(piece, seconds)
    if output is None:
        raise RuntimeError("the stream ended without a finished completion")
    return TimedCompletion(output, seconds, first_seconds, first_tokens)
