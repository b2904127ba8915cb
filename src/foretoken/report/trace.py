"""Data of a generated text: its tokens, their origin and probabilities under both models, and the decode steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretoken.core.draft import Draft
from foretoken.core.positions import PositionCounts
from foretoken.core.step import StepOutput, Timings
from foretoken.engine.detokenize import Detokenizer, Tokenizer
from foretoken.outputs import CompletionOutput, Logprob, SpeculationStats, StreamPiece

ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A draft token.

    Args:
        id: Token id.
        q: Probability with which it was sampled, None where it was not sampled.
        score: Predicted probability that it is accepted with all tokens before it, None where the draft has none.
    """

    id: int
    q: float | None
    score: float | None


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the text, or a rejected one that was drafted in its place.

    Args:
        id: Token id.
        text: Its text.
        origin: ``ACCEPTED``, ``REJECTED`` or ``TARGET``.
        step: Number of the decode step, from 1.
        p: The target's softmax before sampling parameters.
        rank: Its rank among the target's tokens.
        q: See ``DraftedToken``.
        score: See ``DraftedToken``.
        others: The target's likeliest other tokens, with probabilities.
        cut: Whether it was emitted, but its text was not (a stop string, an end-of-text token).
    """

    id: int
    text: str
    origin: str
    step: int
    p: float | None = None
    rank: int | None = None
    q: float | None = None
    score: float | None = None
    others: tuple[tuple[str, float], ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One decode step.

    Args:
        number: Its number, from 1.
        timings: Seconds of its parts.
        drafted: Number of draft tokens.
        verified: Number of draft positions that were verified.
        accepted: Number of them that were accepted.
        emitted: Number of emitted tokens.
        prompt: Whether it includes the prompt's prefill.
    """

    number: int
    timings: Timings
    drafted: int
    verified: int
    accepted: int
    emitted: int
    prompt: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """One completion. Tokens are in reading order, rejected ones before the token that was emitted instead."""

    prompt: str
    tokens: tuple[Token, ...]
    steps: tuple[TraceStep, ...]
    text: str
    stats: SpeculationStats
    finish_reason: str | None
    exactness: str

    def acceptance(self) -> list[tuple[int, int]]:
        """Returns for each draft position how often it was accepted, and how often it was verified."""
        counts = PositionCounts()
        for step in self.steps:
            counts.add(step.verified, step.accepted)
        return [(int(accepted), int(tried)) for accepted, tried in zip(counts.accepted, counts.drafted, strict=True)]


@dataclass(slots=True)
class Tracer:
    """Collects the pieces of one completion. Keeps scalars of the drafts, not rows of the vocabulary.

    Probabilities of the target need ``logprobs`` in the request: 0 is enough, more adds alternatives.
    """

    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    _drafted: list[tuple[DraftedToken | None, ...]] = field(default_factory=list)  # by step, of each emitted token
    _rejected: list[tuple[DraftedToken, ...]] = field(default_factory=list)  # by step
    _steps: list[TraceStep] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _emitted: list[tuple[int, ...]] = field(default_factory=list)
    _output: CompletionOutput | None = None

    def push(self, piece: StreamPiece) -> None:
        """Adds one decode step."""
        step, draft = piece.step, piece.step.draft
        path = step.verdict.path[: step.accepted]
        self._drafted.append((*(_drafted(draft, node) for node in path), *[None] * (len(step.tokens) - len(path))))
        self._rejected.append(tuple(_drafted(draft, node) for node in step.rejected))
        self._emitted.append(step.tokens)
        self._texts.append(piece.text)
        self._steps.append(_trace_step(len(self._steps) + 1, step))
        self._output = piece.output or self._output

    def trace(self) -> Trace:
        """Returns the trace so far."""
        output = self._output
        text = "".join(self._texts)
        return Trace(
            prompt=self.tokenizer.decode(list(self.prompt_ids), skip_special_tokens=True),
            tokens=tuple(self._tokens(text)),
            steps=tuple(self._steps),
            text=text,
            stats=output.stats if output else SpeculationStats(),
            finish_reason=output.finish_reason if output else None,
            exactness=output.exactness if output else "",
        )

    def _tokens(self, text: str) -> list[Token]:
        recorded = (self._output.logprobs if self._output else None) or ()
        detokenizer, over = Detokenizer(self.tokenizer, self.prompt_ids), self._output is not None
        made: list[Token] = []
        length = at = 0
        steps = zip(self._emitted, self._drafted, self._rejected, strict=True)
        for number, (ids, drafted, rejected) in enumerate(steps, 1):
            for token, draft in zip(ids, drafted, strict=True):
                row = recorded[at] if at < len(recorded) else {}
                if draft is None:  # the first rejected token was verified by the same row
                    made += [self._rejected_token(r, number, row if i == 0 else {}) for i, r in enumerate(rejected)]
                    rejected = ()
                piece = detokenizer.push(token)
                made.append(self._token(token, piece, number, draft, row, cut=over and length >= len(text)))
                length, at = length + len(piece), at + 1
        return made

    def _token(
        self, token: int, text: str, number: int, draft: DraftedToken | None, row: Mapping[int, Logprob], cut: bool
    ) -> Token:
        own = row.get(token)
        special = "" if text else self.tokenizer.decode([token], skip_special_tokens=False)
        mark = special if special and "\N{REPLACEMENT CHARACTER}" not in special else ""
        return Token(
            id=token,
            text=text or mark,
            origin=TARGET if draft is None else ACCEPTED,
            step=number,
            p=math.exp(own.logprob) if own else None,
            rank=own.rank if own else None,
            q=draft.q if draft else None,
            score=draft.score if draft else None,
            others=_others(row, token),
            cut=cut or bool(mark),
        )

    def _rejected_token(self, draft: DraftedToken, number: int, row: Mapping[int, Logprob]) -> Token:
        known = row.get(draft.id)
        text = self.tokenizer.decode([draft.id], skip_special_tokens=False)
        p, rank = (math.exp(known.logprob), known.rank) if known else (None, None)
        return Token(draft.id, text, REJECTED, number, p, rank, draft.q, draft.score)


def _trace_step(number: int, step: StepOutput) -> TraceStep:
    path, draft = step.verdict.path, step.draft
    more = bool(draft.children[(path[-1] if path else -1) + 1])
    return TraceStep(
        number=number,
        timings=step.timings,
        drafted=len(draft),
        verified=len(path) + more,
        accepted=len(path),
        emitted=len(step.tokens),
        prompt=step.position == 0,
    )


def _drafted(draft: Draft, node: int) -> DraftedToken:
    score = None if draft.scores is None else min(1.0, math.exp(float(draft.scores[node])))
    return DraftedToken(draft.ids[node], draft.chance(node), score)


def _others(row: Mapping[int, Logprob], token: int) -> tuple[tuple[str, float], ...]:
    ranked = sorted(((one.rank, one) for other, one in row.items() if other != token), key=lambda pair: pair[0])
    return tuple((one.decoded_token, math.exp(one.logprob)) for _, one in ranked)


def wilson(hits: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Returns Wilson's score interval of hits / trials, (0, 1) for no trials.

    Args:
        hits: At least 0.
        trials: At least ``hits``.
        z: Standard errors; the default is 95 %.
    """
    if trials <= 0:
        return 0.0, 1.0
    share, weight = hits / trials, z * z / trials
    middle = (share + weight / 2) / (1 + weight)
    reach = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)
