"""A text as it came about: its tokens, who each is from, what both models gave it, and the rounds. Data, no drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretoken.core.draft import Draft
from foretoken.core.step import StepOutput, Timings
from foretoken.engine.detokenize import Detokenizer, Tokenizer
from foretoken.outputs import CompletionOutput, Logprob, SpeculationStats, StreamPiece

ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A drafted token. q: the probability with which it was drawn, None where nothing was drawn.

    score: what the draft expected of it where it said so, a probability that the target gets there.
    """

    id: int
    q: float | None
    score: float | None


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the text, or one that was drafted in its place. p: the target's softmax, before parameters.

    origin: accepted, rejected or target. others: what the target thought likeliest here, with probabilities.
    cut: the token came out, and its text did not (a stop string, an end mark).
    """

    id: int
    text: str
    origin: str
    round: int
    p: float | None = None
    rank: int | None = None
    q: float | None = None
    score: float | None = None
    others: tuple[tuple[str, float], ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class TraceStep:
    """drafted: nodes; depth: of the deepest. tried, landed: positions that were judged, and that were accepted."""

    number: int
    timings: Timings
    drafted: int
    depth: int
    tried: int
    landed: int
    emitted: int
    prompt: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """One completion."""

    prompt: str
    tokens: tuple[Token, ...]  # in reading order; what was drafted in vain stands before what came instead
    rounds: tuple[TraceStep, ...]
    text: str
    stats: SpeculationStats
    finish_reason: str | None
    exactness: str

    def acceptance(self) -> list[tuple[int, int]]:
        """For each draft position how often it was accepted, and how often judged: that is, all before it stood."""
        deepest = max((r.tried for r in self.rounds), default=0)
        return [
            (sum(r.landed >= k for r in self.rounds), sum(r.tried >= k for r in self.rounds))
            for k in range(1, deepest + 1)
        ]


@dataclass(slots=True)
class Tracer:
    """Collects one completion's pieces. Of a round's draft it keeps figures, not rows of the vocabulary.

    Probabilities of the target need ``logprobs`` in the request; 0 is enough, more names the alternatives.
    """

    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    _steps: list[StepOutput] = field(default_factory=list)
    _guesses: list[tuple[DraftedToken | None, ...]] = field(
        default_factory=list
    )  # by round: of each token that was emitted
    _vain: list[tuple[DraftedToken, ...]] = field(default_factory=list)
    _rounds: list[TraceStep] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _emitted: list[tuple[int, ...]] = field(default_factory=list)
    _output: CompletionOutput | None = None

    def push(self, piece: StreamPiece) -> None:
        """One round."""
        step, draft = piece.step, piece.step.draft
        path = step.verdict.path[: step.accepted]
        self._guesses.append((*(_guess(draft, node) for node in path), *[None] * (len(step.tokens) - len(path))))
        self._vain.append(tuple(_guess(draft, node) for node in step.rejected))
        self._emitted.append(step.tokens)
        self._texts.append(piece.text)
        self._rounds.append(_round(len(self._rounds) + 1, step))
        self._output = piece.output or self._output

    def trace(self) -> Trace:
        """What was collected, finished or not."""
        output = self._output
        text = "".join(self._texts)
        return Trace(
            prompt=self.tokenizer.decode(list(self.prompt_ids), skip_special_tokens=True),
            tokens=tuple(self._tokens(text)),
            rounds=tuple(self._rounds),
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
        for number, (ids, guesses, vain) in enumerate(zip(self._emitted, self._guesses, self._vain, strict=True), 1):
            for token, guess in zip(ids, guesses, strict=True):
                row = recorded[at] if at < len(recorded) else {}
                if guess is None:  # what was drafted in its place was judged by the same row
                    made += [self._vain_token(g, number, row if i == 0 else {}) for i, g in enumerate(vain)]
                    vain = ()
                piece = detokenizer.push(token)
                made.append(self._token(token, piece, number, guess, row, cut=over and length >= len(text)))
                length, at = length + len(piece), at + 1
        return made

    def _token(
        self, token: int, text: str, number: int, guess: DraftedToken | None, row: Mapping[int, Logprob], cut: bool
    ) -> Token:
        own = row.get(token)
        special = "" if text else self.tokenizer.decode([token], skip_special_tokens=False)
        mark = special if special and "\N{REPLACEMENT CHARACTER}" not in special else ""
        return Token(
            id=token,
            text=text or mark,
            origin=TARGET if guess is None else ACCEPTED,
            round=number,
            p=math.exp(own.logprob) if own else None,
            rank=own.rank if own else None,
            q=guess.q if guess else None,
            score=guess.score if guess else None,
            others=_others(row, token),
            cut=cut or bool(mark),
        )

    def _vain_token(self, guess: DraftedToken, number: int, row: Mapping[int, Logprob]) -> Token:
        known = row.get(guess.id)
        text = self.tokenizer.decode([guess.id], skip_special_tokens=False)
        p, rank = (math.exp(known.logprob), known.rank) if known else (None, None)
        return Token(guess.id, text, REJECTED, number, p, rank, guess.q, guess.score)


def _round(number: int, step: StepOutput) -> TraceStep:
    path, draft = step.verdict.path, step.draft
    more = bool(draft.children[(path[-1] if path else -1) + 1])
    return TraceStep(
        number=number,
        timings=step.timings,
        drafted=len(draft),
        depth=max(draft.depths, default=0),
        tried=len(path) + more,
        landed=len(path),
        emitted=len(step.tokens),
        prompt=step.position == 0,
    )


def _guess(draft: Draft, node: int) -> DraftedToken:
    score = None if draft.scores is None else min(1.0, math.exp(float(draft.scores[node])))
    return DraftedToken(draft.ids[node], draft.chance(node), score)


def _others(row: Mapping[int, Logprob], token: int) -> tuple[tuple[str, float], ...]:
    ranked = sorted(((one.rank, one) for other, one in row.items() if other != token), key=lambda pair: pair[0])
    return tuple((one.decoded_token, math.exp(one.logprob)) for _, one in ranked)
