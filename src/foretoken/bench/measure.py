"""One timed completion. The clock runs only while the library works, never while a consumer draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from foretoken.core.errors import InvalidRequest
from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.params import SamplingParams


class Streams(Protocol):
    """What is needed of ``LLM``."""

    def stream(self, prompts: str, sampling_params: SamplingParams) -> Iterator[StreamPiece]: ...


OnPiece = Callable[[StreamPiece, float], None]


@dataclass(frozen=True)
class Run:
    """One completion of one prompt and what it took.

    seconds: all of it, the prompt's pass included. first_seconds, first_tokens: up to and in the first piece,
    so that decoding can be told from prefill.
    """

    output: CompletionOutput
    seconds: float
    first_seconds: float
    first_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.output.token_ids)


@dataclass(frozen=True)
class Totals:
    """Sums over several runs, and the rates that follow from them."""

    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float
    rounds: int
    drafts: int
    accepted: int

    @staticmethod
    def of(runs: Iterable[Run]) -> Totals:
        runs = list(runs)
        stats = [run.output.stats for run in runs]
        return Totals(
            tokens=sum(run.tokens for run in runs),
            seconds=sum(run.seconds for run in runs),
            decode_tokens=sum(run.tokens - run.first_tokens for run in runs),
            decode_seconds=sum(run.seconds - run.first_seconds for run in runs),
            rounds=sum(s.rounds for s in stats),
            drafts=sum(s.drafts for s in stats),
            accepted=sum(s.accepted for s in stats),
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted/drafts, the bonus included."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over target passes, rounds without a draft included."""
        return self.tokens / self.rounds if self.rounds else 0.0


def timed(llm: Streams, prompt: str, params: SamplingParams, on_piece: OnPiece | None = None) -> Run:
    """Complete ``prompt`` once. ``on_piece`` gets each piece and the seconds so far; its own time is not counted."""
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
    return Run(output, seconds, first_seconds, first_tokens)
