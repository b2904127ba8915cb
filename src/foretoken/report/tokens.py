"""HTML page of a generated text: origin and probabilities of every token, and a timeline of the decode steps."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from markupsafe import Markup

from foretoken.core.draft import Draft
from foretoken.core.step import PositionCounts, StepOutput, Timings
from foretoken.core.verdict import KINDS
from foretoken.engine.stopping import Detokenizer, Tokenizer
from foretoken.outputs import CompletionOutput, Logprob, SpeculationStats, StreamPiece
from foretoken.report.charts import Axis, Bar, Point, Series, StepLap, bars, lines, missing, timeline
from foretoken.report.document import figure, percent, render

ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the text, or a rejected draft token."""

    id: int  # token id
    text: str  # its text
    origin: str  # ``ACCEPTED``, ``REJECTED`` or ``TARGET``
    step: int  # number of the decode step, from 1
    p: float | None = None  # the target's softmax before sampling parameters
    rank: int | None = None  # its rank among the target's tokens
    q: float | None = None  # probability with which it was drafted, None if it was not sampled
    # predicted probability that it is accepted with all tokens before it, None if the draft has none
    score: float | None = None
    others: tuple[tuple[str, float], ...] = ()  # the target's likeliest other tokens, with probabilities
    cut: bool = False  # whether it was emitted, but its text was not (a stop string, an end-of-text token)


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One decode step. Its tokens have no texts yet, since those of parts of characters depend on later ones."""

    number: int  # its number, from 1
    timings: Timings  # seconds of its parts
    drafted: int  # number of draft tokens
    verified: int  # number of draft positions that were verified
    accepted: int  # number of them that were accepted
    emitted: tuple[Token, ...]
    rejected: tuple[Token, ...]
    prompt: bool  # whether it includes the prompt's prefill

    @classmethod
    def of(cls, number: int, step: StepOutput) -> "TraceStep":
        path, draft = step.verdict.path, step.draft
        kept = path[: step.accepted]
        accepted = (_drafted(draft, node, ACCEPTED, number) for node in kept)
        more = bool(draft.children[(path[-1] if path else -1) + 1])
        return cls(
            number=number,
            timings=step.timings,
            drafted=len(draft),
            verified=len(path) + more,
            accepted=len(path),
            emitted=(*accepted, *(Token(token, "", TARGET, number) for token in step.tokens[len(kept) :])),
            rejected=tuple(_drafted(draft, node, REJECTED, number) for node in step.rejected),
            prompt=step.position == 0,
        )


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
    _steps: list[TraceStep] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)  # of the pieces
    _output: CompletionOutput | None = None

    def push(self, piece: StreamPiece) -> None:
        """Adds one decode step."""
        self._texts.append(piece.text)
        self._steps.append(TraceStep.of(len(self._steps) + 1, piece.step))
        self._output = piece.output or self._output

    def trace(self) -> Trace:
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
        for step in self._steps:
            rejected = step.rejected
            for token in step.emitted:
                row = next(recorded, {})
                if token.origin == TARGET:  # the first rejected token was verified by the same row
                    decoded = [replace(each, text=self._decoded(each.id)) for each in rejected]
                    tokens += [_verified(each, {} if i else row) for i, each in enumerate(decoded)]
                    rejected = ()
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


def _drafted(draft: Draft, node: int, origin: str, step: int) -> Token:
    score = None if draft.scores is None else min(1.0, math.exp(draft.scores[node]))
    return Token(draft.ids[node], "", origin, step, q=draft.chance(node), score=score)


def _others(row: Mapping[int, Logprob], token: int) -> tuple[tuple[str, float], ...]:
    ranked = sorted((each for other, each in row.items() if other != token), key=lambda each: each.rank)
    return tuple((each.decoded_token, math.exp(each.logprob)) for each in ranked)


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's score interval of hits / trials at 95 %, (0, 1) for no trials."""
    if trials <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    share, weight = hits / trials, z * z / trials
    middle = (share + weight / 2) / (1 + weight)
    reach = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)


WORDS = {ACCEPTED: "draft, accepted", REJECTED: "draft, rejected", TARGET: "the target's own"}
PARTS = ("propose", "score", "verify", "commit")


def page(traces: Sequence[Trace], setting: Mapping[str, Any] | None = None) -> str:
    """Returns an HTML document of one completion, or of several of one prompt."""
    completions = [(trace, _ending(trace), _timeline(trace), (_positions(trace), _sizes(trace))) for trace in traces]
    return render("tokens.jinja", setting, completions=completions, words=WORDS, tip=_tip, visible=visible)


def _ending(trace: Trace) -> str:
    reasons: dict[str, str] = {
        "length": "The text reached its maximum length.",
        **dict.fromkeys(KINDS, "The text ended because of its acceptance."),
        "stop": "The text ended at an end-of-text token or a stop string.",
    }
    grade = f" Exactness: {trace.exactness}." if trace.exactness else ""
    return reasons.get(trace.finish_reason or "", "The text is not finished.") + grade


def _tip(token: Token) -> str:
    rank = f" (its choice no. {token.rank})" if token.rank else ""
    facts = [
        f"{visible(token.text)}  {WORDS[token.origin]}, step {token.step}",
        f"target p {percent(token.p)}{rank}" if token.p is not None else "",
        f"draft q {percent(token.q)}" if token.q is not None else "",
        f"predicted acceptance {percent(token.score)}" if token.score is not None else "",
        "not in the text" if token.cut else "",
        "target also: " + ", ".join(f"{visible(t)} {percent(p)}" for t, p in token.others[:4]) if token.others else "",
    ]
    return " · ".join(fact for fact in facts if fact)


def visible(text: str) -> str:
    """Returns a token's text with visible signs for white space."""
    signs = {"\n": "⏎", "\t": "⇥", " ": "␣", "\r": "␍"}
    return "".join(signs.get(char, char) for char in text) or "(part of a character)"


def _timeline(trace: Trace) -> Markup:
    """Timeline of the steps. The prefill's step takes much longer, so its time is only stated."""
    laps = [_lap(step) for step in trace.steps if not step.prompt or len(trace.steps) == 1]
    first = next((step for step in trace.steps if step.prompt), None)
    note = "Above each step the number of tokens that it emitted."
    if first is not None and len(trace.steps) > 1:
        note += f" The first step, with the prefill, took {figure(first.timings.total * 1e3)} ms and is not shown."
    return timeline("Time of each step, by part", PARTS, laps, note=note)


def _lap(step: TraceStep) -> StepLap:
    t = step.timings
    shared = f", {t.batch} sequences" if t.batch > 1 else ""
    emitted = len(step.emitted)
    note = f"{step.drafted} drafted, {step.accepted} accepted, {emitted} emitted{shared}"
    return StepLap(step.number, (t.propose, t.score, t.verify, t.commit), f"+{emitted}", note)


def _positions(trace: Trace) -> Markup:
    points = [
        Point(position, accepted / tried, *wilson(accepted, tried), f"{accepted} of {tried}")
        for position, (accepted, tried) in enumerate(trace.acceptance(), 1)
    ]
    at = tuple(float(k) for k in range(1, len(points) + 1)) if len(points) <= 12 else ()
    if not points:
        return missing("Acceptance by position", "nothing was drafted")
    return lines(
        "Acceptance by position",
        [Series("accepted", tuple(points))],
        Axis("position in the draft", at=at),
        Axis("accepted, given those before", zero=True, high=1.0),
        note="Shaded: the 95 % interval.",
    )


def _sizes(trace: Trace) -> Markup:
    counts = Counter(len(step.emitted) for step in trace.steps)
    items = [Bar(f"{size} token{'s' if size != 1 else ''}", count) for size, count in sorted(counts.items())]
    return bars("Steps by tokens emitted", items, "steps")
