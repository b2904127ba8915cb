"""Data of a generated text: tokens, their origin and probabilities under both models, and the decode steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretoken.core.draft import Draft
from foretoken.core.positions import PositionCounts
from foretoken.core.step import StepOutput, Timings
from foretoken.engine.detokenize import Detokenizer, Tokenizer
from foretoken.outputs import CompletionOutput, Logprob, SpeculationStats, StreamPiece

ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the text, or a rejected draft token.

    Args:
        id: Token id.
        text: Its text.
        origin: ``ACCEPTED``, ``REJECTED`` or ``TARGET``.
        step: Number of the decode step, from 1.
        p: The target's softmax before sampling parameters.
        rank: Its rank among the target's tokens.
        q: Probability with which it was drafted, None if it was not sampled.
        score: Predicted probability that it is accepted with all tokens before it, None if the draft has none.
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
        """Returns the numbers of acceptances and of verifications for each draft position."""
        counts = PositionCounts()
        for step in self.steps:
            counts.add(step.verified, step.accepted)
        return [(int(accepted), int(tried)) for accepted, tried in zip(counts.accepted, counts.drafted, strict=True)]


@dataclass(slots=True)
class Tracer:
    """Collects the pieces of one completion. Stores scalars of the drafts, not rows of the vocabulary.

    Probabilities of the target need ``logprobs`` in the request: 0 is enough, more adds alternatives.
    """

    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    _emitted: list[list[Token]] = field(default_factory=list)  # by step, without texts
    _rejected: list[list[Token]] = field(default_factory=list)  # by step, without texts
    _steps: list[TraceStep] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _output: CompletionOutput | None = None

    def push(self, piece: StreamPiece) -> None:
        """Adds one decode step."""
        step, number = piece.step, len(self._steps) + 1
        path = step.verdict.path[: step.accepted]
        accepted = [_drafted(step.draft, node, ACCEPTED, number) for node in path]
        self._emitted.append(accepted + [Token(token, "", TARGET, number) for token in step.tokens[len(path) :]])
        self._rejected.append([_drafted(step.draft, node, REJECTED, number) for node in step.rejected])
        self._texts.append(piece.text)
        self._steps.append(_trace_step(number, step))
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
        recorded = iter((self._output.logprobs if self._output else None) or ())
        detokenizer, over = Detokenizer(self.tokenizer, self.prompt_ids), self._output is not None
        tokens: list[Token] = []
        length = 0
        for emitted, rejected in zip(self._emitted, self._rejected, strict=True):
            for token in emitted:
                row = next(recorded, {})
                if token.origin == TARGET:  # the first rejected token was verified by the same row
                    decoded = [replace(each, text=self._decoded(each.id)) for each in rejected]
                    tokens += [_verified(each, {} if i else row) for i, each in enumerate(decoded)]
                    rejected = []
                piece = detokenizer.push(token.id)
                special = "" if piece else self._decoded(token.id)
                mark = "" if "\N{REPLACEMENT CHARACTER}" in special else special
                cut = bool(mark) or (over and length >= len(text))
                shown = replace(token, text=piece or mark, others=_others(row, token.id), cut=cut)
                tokens.append(_verified(shown, row))
                length += len(piece)
        return tokens

    def _decoded(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)


def _verified(token: Token, row: Mapping[int, Logprob]) -> Token:
    """Returns the token with the target's probability, if the row has it."""
    entry = row.get(token.id)
    return token if entry is None else replace(token, p=math.exp(entry.logprob), rank=entry.rank)


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


def _drafted(draft: Draft, node: int, origin: str, step: int) -> Token:
    score = None if draft.scores is None else min(1.0, math.exp(draft.scores[node]))
    return Token(draft.ids[node], "", origin, step, q=draft.chance(node), score=score)


def _others(row: Mapping[int, Logprob], token: int) -> tuple[tuple[str, float], ...]:
    ranked = sorted((each for other, each in row.items() if other != token), key=lambda each: each.rank)
    return tuple((each.decoded_token, math.exp(each.logprob)) for each in ranked)


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
